#!/bin/bash
# Checks that read and compile the sources. Each is one test of tests/run.sh.
#
#   tests/checks.sh symbols       runs one: exit code 0 = good, 77 = skipped, 'SKIP: reason' says why
#
# Compiling: cddp.h in all its modes, by gcc, clang and nvcc, in C99 to C++17, with the strictest warnings;
# what it exports; programs that get its use wrong. Reading: columns, the length of functions, rooms and
# contents, the layout of the repository, the C of README and manual, and that each test is in a list.
set -u
cd "$(dirname "$0")/.." || exit 1
top=$PWD

strict="-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-qual -Wcast-align
  -Wpointer-arith -Wwrite-strings -Wformat=2 -Wvla -pedantic -Werror"
strict_c="-std=c11 $strict -Wstrict-prototypes -Wmissing-prototypes"
strict_cxx="-std=c++17 $strict"

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-check.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

fail() { echo "$*"; exit 1; }
skip() { echo "SKIP: $*"; exit 77; }
none() { # WHAT: reads findings, prints them; the check fails at its end when there were any
  sed "s|^|$1: |" | tee -a "$work/findings"
}
implement() { printf '#define CDDP_IMPLEMENTATION\n#include "cddp.h"\n'; }
installed() { command -v "$1" >/dev/null || skip "$1 is not installed"; }

# COMPILER: sets cc, flags and ext. The first C compiler is cc, whatever it is here.
compiler() {
  installed "$1"
  cc=$1
  case $1 in *++) flags=$strict_cxx ext=cpp ;; *) flags=$strict_c ext=c ;; esac
}

# --- compiling, for each compiler ---

implementation() { # warning-free with optimisation, where the compiler sees most
  compiler "$1"
  implement >"$work/one.$ext"
  for level in $([ "$1" = cc ] && echo -O2 -O3 || echo -O1); do # more inlining is more that can be warned of
    $cc $flags "$level" -I. -c "$work/one.$ext" -o "$work/one.o" || exit 1
  done
}

declarations() { # alone, and what they include
  compiler "$1"
  printf '#include "cddp.h"\n' >"$work/one.$ext"
  $cc $flags -I. -c "$work/one.$ext" -o "$work/one.o" || exit 1
  $cc $flags -I. -H -E "$work/one.$ext" 2>&1 >/dev/null | sed -n 's/^\.\. //p' | sed 's|.*/||' |
    grep -v -x -E 'std(def|int|bool)\.h' | none "included by the declarations"
}

static() {
  compiler "$1"
  { echo '#define CDDP_STATIC' && implement && echo 'int main(void) { return cddp_error()[0]; }'; } \
    >"$work/one.$ext"
  $cc $flags -I. -c "$work/one.$ext" -o "$work/one.o" || exit 1
  nm -g --defined-only "$work/one.o" | awk '$NF != "main"' | none "CDDP_STATIC exports"
}

two_files() {
  compiler "$1"
  implement >"$work/one.$ext"
  program >"$work/two.$ext"
  $cc $flags -I. -c "$work/two.$ext" -o "$work/two.o" || exit 1
  $cc -I. "$work/one.$ext" "$work/two.o" -o "$work/two" -lpthread -lm || exit 1
  run_program "$work/two"
}

program() { # adds 1 and 2 on two ranks
  cat <<'END'
#include "cddp.h"
#include <stdio.h>

static int add(int rank, void *arg) {
  cddp_group *g;
  float x = (float)rank + 1;
  (void)arg;
  if (cddp_init(&g, NULL) || cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL)) {
    fprintf(stderr, "rank %d: %s\n", rank, cddp_error());
    return 1;
  }
  printf("rank %d of %d: %g\n", cddp_rank(g), cddp_world_size(g), (double)x);
  cddp_destroy(g);
  return 0;
}

int main(void) {
  if (cddp_spawn(add, NULL, 2) == CDDP_OK) return 0;
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
END
}

run_program() {
  "$1" >"$work/out" || fail "the program failed: $(cat "$work/out")"
  [ "$(sort "$work/out")" = "rank 0 of 2: 3
rank 1 of 2: 3" ] || fail "wrong output: $(cat "$work/out")"
}

# The header in an empty directory, with nothing but the command of the manual, which prints nothing.
alone() {
  local source=prog.c command
  case $1 in
  *++) source=prog.cpp command="$1 -std=c++17 -O2 prog.cpp -lpthread -lm" ;;
  nvcc) command="nvcc -x cu prog.c -lpthread -lm" ;;
  *) command="$1 -std=c11 -O2 prog.c -lpthread -lm" ;;
  esac
  installed "$1"
  mkdir "$work/alone" && cp cddp.h "$work/alone" && cd "$work/alone" || exit 1
  { echo '#define CDDP_IMPLEMENTATION' && program; } >$source
  $command >out 2>&1 || fail "$command: $(cat out)"
  [ ! -s out ] || fail "$command prints: $(cat out)"
  run_program ./a.out
}

# Ranks of a program that has used threads of OpenMP or OpenBLAS before: they do not hang, and have a thread
# each unless the user or the program says otherwise.
openmp() {
  local c out blas
  cat >"$work/omp.c" <<'END'
#define CDDP_IMPLEMENTATION
#include "cddp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef BLAS
void cblas_dgemm(int, int, int, int, int, int, double, const double *, int, const double *, int, double,
                 double *, int);
int openblas_get_num_threads(void);
void openblas_set_num_threads(int);
#define threads openblas_get_num_threads
#define set_threads openblas_set_num_threads
static void work(void) {
  int n = 300;
  double *a = (double *)calloc(3 * 300 * 300, sizeof *a);
  cblas_dgemm(101, 111, 111, n, n, n, 1, a, n, a + n * n, n, 0, a + 2 * n * n, n);
  free(a);
}
#else
#include <omp.h>
#define threads omp_get_max_threads
#define set_threads omp_set_num_threads
static void work(void) {
  double s = 0;
  int i;
#pragma omp parallel for reduction(+ : s)
  for (i = 0; i < 100000; i++) s += i;
}
#endif
static int train(int rank, void *arg) {
  cddp_group *g;
  work();
  if (cddp_init(&g, NULL) || cddp_barrier(g)) return 1;
  cddp_destroy(g);
  if (threads() == *(int *)arg) return 0;
  printf("rank %d has %d threads, not %d\n", rank, threads(), *(int *)arg);
  return 2;
}
int main(int argc, char **argv) {
  int want = argc > 1 ? atoi(argv[1]) : 1, i;
  if (argc > 2) set_threads(atoi(argv[2]));
  for (i = 0; i < 3; i++) {
    work();
    if (cddp_spawn(train, &want, 2) == CDDP_OK) continue;
    printf("%s\n", cddp_error());
    return 1;
  }
  return 0;
}
END
  for c in gcc clang; do
    command -v $c >/dev/null && $c -O0 -w -fopenmp -I. "$work/omp.c" -o "$work/omp" -lpthread -lm 2>/dev/null || continue
    echo "$c -fopenmp"
    run_openmp $c
  done
  cc -O0 -w -DBLAS -I. "$work/omp.c" -o "$work/omp" -lopenblas -lpthread -lm 2>/dev/null || return 0
  for blas in /usr/lib/*-linux-gnu/openblas-{pthread,openmp,serial} "${TEST_OPENBLAS:-}"; do
    [ -d "$blas" ] || continue
    echo "$blas"
    LD_LIBRARY_PATH=$blas run_openmp blas
  done
}

run_openmp() { # LIBRARY; clang's starts afresh after a fork, and forgets what the program said
  (
    unset OMP_NUM_THREADS OPENBLAS_NUM_THREADS
    timeout 30 "$work/omp" || fail "the ranks hang or fail after the caller's parallel regions: $?"
    OMP_NUM_THREADS=2 timeout 30 "$work/omp" 2 || fail "OMP_NUM_THREADS of the user's is lost"
    [ "$1" != gcc ] || timeout 30 "$work/omp" 3 3 || fail "the program's own number of threads is lost"
  ) || exit 1
}

# --- nvcc, with or without a GPU: for sm_80, sm_90 and sm_100, no warnings from it or the host's compiler. (The
# comments and macros that excuse two things are gone before the host's compiler sees the code.)

cuda_flags="-Werror all-warnings --threads 3 -Xcompiler -Wall,-Wextra,-Wno-implicit-fallthrough,-Wno-tautological-compare -I$top
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_100,code=sm_100"

cuda_own="-DCDDP_IMPLEMENTATION_DONE -DCDDP_KERNELS_IMPLEMENTATION_DONE -include stdio.h -include stdlib.h
  -include string.h -include math.h -include inttypes.h -include nccl.h"

# As users compile it, and no kernel uses stack memory: cddp with its kernels in one file, of the others what is their own.
# Only with `ninja cuda`: it takes minutes.
cuda-full() {
  local f own
  installed nvcc
  nccl_found || skip "nvcc finds no nccl.h"
  for f in tests/gpu/*.cu examples/*.cu; do
    own=$cuda_own
    case $f in tests/gpu/kernels.cu | tests/gpu/gpt_speed.cu) own= ;; esac
    # shellcheck disable=SC2086
    nvcc $cuda_flags $own -O3 -Xptxas -v -c "$f" -o "$work/full.o" >"$work/out" 2>&1 || fail "$(cat "$work/out")"
    grep -E '[1-9][0-9]* bytes (spill|stack)' "$work/out" | none "$f: registers are spilled, or an array is in stack memory"
  done
}

# All code once, hardly optimised, in toy.cu; of the other examples what is theirs. Then toy runs: without
# a GPU it says so.
cuda-examples() {
  local f
  installed nvcc
  nccl_found || skip "nvcc finds no nccl.h"
  for f in examples/*.cu; do
    head -n 12 "$f" | grep -q -E "^ +nvcc .*$f .*-lnccl -lcublas\$" || fail "$f: no 'nvcc ... $f ...' in its top comment"
    [ "$f" = examples/toy.cu ] && continue
    # shellcheck disable=SC2086
    nvcc $cuda_flags $cuda_own -c "$f" -o "$work/one.o" >"$work/out" 2>&1 || fail "$(cat "$work/out")"
  done
  # shellcheck disable=SC2086
  nvcc $cuda_flags -Xptxas -O0 -Xcicc -O1 examples/toy.cu -o "$work/toy" -lnccl -lcublas >"$work/out" 2>&1 ||
    fail "$(cat "$work/out")"
  "$work/toy" -n 2 --device cpu || fail "--device cpu: exit code $?"
  CUDA_VISIBLE_DEVICES='' "$work/toy" >"$work/out" 2>&1 && fail "runs on no GPU: $(cat "$work/out")"
  [ "$(grep -c '^rank 0: cddp_init: CUDA finds no GPU here' "$work/out")" = 1 ] &&
    [ "$(wc -l <"$work/out")" = 1 ] || fail "no sentence about the GPU: $(cat "$work/out")"
}

# tests/gpu/gpu.sh suite compiles and links with the real CUDA and NCCL, for all architectures; a program of it says that
# there is no GPU. The suite has all tests, but those that gpu.sh names.
gpu-suite() {
  local name
  installed nvcc
  nccl_found || skip "nvcc finds no nccl.h"
  for name in $(sed -n 's/^  .*RUN(\(test_[a-z_]*\));.*/\1/p' tests/gpu/nccl_*.c | sort -u); do
    grep -q -E "^(  suite_tests .* |# Left out:.* )$name( |,|;|\$)" tests/gpu/gpu.sh || echo "$name"
  done | none "not in tests/gpu/gpu.sh suite"
  GPU_BUILD=$work/gpu GPU_ARCH=all GPU_SECONDS=0 SUITE_FLAGS="${cuda_flags##*"-I$top"} -Xptxas -O0 -Xcicc -O1 --threads 3" \
    tests/gpu/gpu.sh build-suite >"$work/out" 2>&1 || fail "$(cat "$work/out")"
  CUDA_VISIBLE_DEVICES='' ONLY=test_graph "$work/gpu/bin/nccl_graphs" >"$work/out" 2>&1 && fail "runs on no GPU"
  grep -q 'cddp_init: CUDA finds no GPU here' "$work/out" || fail "no sentence about the GPU: $(cat "$work/out")"
}

gpu_coverage() { # the table of gpu-results.md is what gpu.sh makes of the page
  diff <(GPU_BUILD=$work tests/gpu/gpu.sh coverage) <(grep '^| feature ' -A 60 tests/gpu/gpu-results.md | sed '/^$/,$d') ||
    fail "put the output of tests/gpu/gpu.sh coverage (<) into tests/gpu/gpu-results.md (>)"
}

nccl_found() { echo '#include <nccl.h>' >"$work/nccl.cu" && nvcc -E "$work/nccl.cu" >/dev/null 2>&1; }

# CDDP_CUDA without nvcc: cc and c++ compile cddp.h beside cddp_kernels.cuh, and need no cuBLAS. The kernels' declarations
# can follow in the same file. The object exports what a build without CDDP_CUDA exports.
cuda() {
  local c
  exported() { nm -g --defined-only "$1" | grep -o 'cddp_.*'; } # the double's headers have names of their own
  mkdir "$work/alone" && cp cddp.h cddp_kernels.cuh "$work/alone" && cd "$work/alone" || exit 1
  { echo '#define CDDP_CUDA' && implement; } >one.c
  { cat one.c && echo '#undef CDDP_IMPLEMENTATION
#define CDDP_KERNELS_NO_CUBLAS
#include "cddp_kernels.cuh"
cudaError_t f(float *x, cudaStream_t s);
cudaError_t f(float *x, cudaStream_t s) { return cddp_cuda_fill(x, CDDP_F32, 1, 0, s); }'; } >two.c
  { echo '#define CDDP_STATIC' && cat one.c; } >static.c
  implement >cpu.c
  cc -O0 -w -c cpu.c -o cpu.o || exit 1
  for c in "gcc $strict_c" "g++ $strict_cxx -xc++" "clang $strict_c" "clang++ $strict_cxx -xc++"; do
    command -v "${c%% *}" >/dev/null || continue
    c="$c -isystem $top/tests/gpu/hostcuda"
    $c -fsyntax-only two.c || fail "${c%% *}: cddp_kernels.cuh behind cddp.h"
    [ "${c#g}" != "$c" ] || continue
    $c -M one.c | grep cublas && fail "${c%% *}: CDDP_CUDA includes cuBLAS"
    $c -c one.c -o one.o || fail "${c%% *}"
    diff <(exported cpu.o) <(exported one.o) ||
      fail "${c%% *}: exports differ without CDDP_CUDA (<) and with it (>)"
    $c -c static.c -o static.o || fail "${c%% *}: CDDP_STATIC"
    exported static.o | none "CDDP_STATIC exports"
  done
  for c in "g++ -std=c++20" "clang++ -std=c++17"; do # the kernels, of which C++17 is the least
    command -v "${c%% *}" >/dev/null || continue
    $c -Wall -Wextra -Werror -isystem "$top/tests/gpu/hostcuda" -DCDDP_KERNELS_IMPLEMENTATION -fsyntax-only \
      -xc++ cddp_kernels.cuh || fail "$c: the kernels"
  done
  g++ -isystem "$top/tests/gpu/hostcuda" -DCDDP_STATIC -DCDDP_KERNELS_IMPLEMENTATION -fsyntax-only -xc++ \
    cddp_kernels.cuh >out 2>&1 && fail "CDDP_STATIC in two files compiles"
  grep -q 'error.*CDDP_STATIC: the file that implements cddp.h must be' out || fail "CDDP_STATIC: $(head -n 3 out)"
  rm cddp_kernels.cuh
  cc -I"$top/tests/gpu/hostcuda" -c one.c -o one.o 2>out && fail "compiles without cddp_kernels.cuh"
  grep -q 'cddp_kernels.cuh: No such file' out || fail "does not name the missing file: $(head -n 3 out)"
}

aarch64() {
  installed aarch64-linux-gnu-gcc
  implementation aarch64-linux-gnu-gcc
}

ignored() { # a result that nobody looks at is a warning, unless the program wants none
  compiler cc
  echo '#include "cddp.h"
    void f(cddp_ddp *d);
    void f(cddp_ddp *d) { cddp_ddp_wait(d); }' >"$work/one.c"
  $cc -I. -Werror -c "$work/one.c" -o "$work/one.o" >"$work/out" 2>&1 && fail "an ignored cddp_ddp_wait does not warn"
  grep -q 'unused-result' "$work/out" || fail "$(cat "$work/out")"
  $cc -I. -Werror -DCDDP_CHECKED= -c "$work/one.c" -o "$work/one.o" || fail "CDDP_CHECKED= does not help"
}

stdio_first() { # a system header before the implementation: fine by default; explained with c11
  compiler cc
  { echo '#include <stdio.h>' && implement; } >"$work/one.c"
  $cc -I. -fsyntax-only "$work/one.c" || exit 1
  $cc -std=c11 -I. -fsyntax-only "$work/one.c" >"$work/out" 2>&1 && fail "compiles with -std=c11"
  grep -q 'include the implementation before any system header, or compile with -D' "$work/out" ||
    fail "no #error with the cure: $(head -n 5 "$work/out")"
  $cc -std=c11 -D_GNU_SOURCE -I. -fsyntax-only "$work/one.c" || fail "the cure does not cure"
}

any_order() { # whatever came first, nothing is implicit: GNU's extensions may be off
  local first
  compiler cc
  for first in stdio fcntl sys/socket pthread; do
    { echo "#include <$first.h>" && implement; } >"$work/one.c"
    $cc -std=gnu11 -Werror=implicit-function-declaration -Wall -Wextra -Werror -I. -fsyntax-only "$work/one.c" ||
      fail "$first.h first"
  done
}

targets() { # those that cddp does not support are refused, with a sentence: preprocessing needs none of their headers
  local target
  compiler cc
  implement >"$work/one.c"
  refused big-endian cc -U__BYTE_ORDER__ -D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__
  refused 32-bit cc -U__SIZEOF_POINTER__ -D__SIZEOF_POINTER__=4
  command -v clang >/dev/null || return 0
  for target in s390x powerpc64 aarch64_be; do refused big-endian clang --target=$target-linux-gnu; done
  for target in i386 armv7 riscv32; do refused 32-bit clang --target=$target-linux-gnu; done
  refused 32-bit clang --target=x86_64-linux-gnux32
}

refused() { # WORD COMMAND...
  local word=$1
  shift
  "$@" -I. -E "$work/one.c" >/dev/null 2>"$work/out" && fail "compiles: $*"
  grep -q "error.*cddp.h: .*$word" "$work/out" || fail "no #error about $word: $*: $(head -n 5 "$work/out")"
}

standards() { # older than those of the other checks; as strict
  local c s
  implement | tee "$work/one.c" >"$work/one.cpp"
  for c in gcc clang; do
    command -v $c >/dev/null || continue
    $c -std=c99 -pedantic -Wall -Wextra -Werror -I. -fsyntax-only "$work/one.c" || fail "$c -std=c99"
  done
  for c in g++ clang++; do
    command -v $c >/dev/null || continue
    for s in 11 14; do
      $c -std=c++$s $strict -I. -fsyntax-only "$work/one.cpp" || fail "$c -std=c++$s"
    done
  done
}

macros() { # the program's own, before the implementation: <tgmath.h>, and names that members and variables have
  local name
  installed g++
  { sed -n '/^#if/,/^#endif/d; s/^#include <.*/&/p' cddp.h
    for name in log min max sum copy zero free alloc scale run step all bits norm loop load; do
      echo "#undef $name"
      echo "#define $name(only) oops only only"
    done && echo '#undef free' && echo '#define free(p) (free)(p)' && implement; } >"$work/one.cpp"
  { echo '#include <tgmath.h>' && cat "$work/one.cpp"; } >"$work/one.c"
  cc -D_GNU_SOURCE -Wall -Wextra -Werror -I. -fsyntax-only "$work/one.c" || fail "C"
  g++ -Wall -Wextra -Werror -I. -fsyntax-only "$work/one.cpp" || fail "C++"
}

commas() { # the first argument of each macro of CALL SITES can have a template's commas, or be a class that converts
  local name rest first
  installed g++
  cat >"$work/table" <<'END'
all_reduce , p, 1, CDDP_F32, CDDP_SUM, w
reduce , p, 1, CDDP_F32, CDDP_SUM, 0, w
broadcast , p, 1, CDDP_F32, 0, w
all_gather , p, p, 1, CDDP_F32, w
gather , p, p, 1, CDDP_F32, 0, w
scatter , p, p, 1, CDDP_F32, 0, w
reduce_scatter , p, p, 1, CDDP_F32, CDDP_SUM, w
all_to_all , p, p, 1, CDDP_F32, w
all_gather_v , p, p, n, CDDP_F32, w
all_to_all_v , p, n, p, n, CDDP_F32, w
barrier
barrier_async , w
send , p, 1, CDDP_F32, 0, 0, w
recv , p, 1, CDDP_F32, 0, 0, w
group_split , 0, 0, out
group_new , NULL, 0, out
ddp_create , group<1, 2>(), NULL, 1, NULL
ddp_wait
ddp_step , optim
ddp_reduce_scatter
ddp_all_gather
ddp_gather_states , NULL
ddp_sync_buffers
ddp_join , optim
save , "", NULL, 0, NULL
load , "", NULL, 0, NULL
END
  sed -n 's/^#define cddp_\([a-z_]*\)(.*/\1/p' cddp.h | sort >"$work/macros"
  cut -d' ' -f1 "$work/table" | sort | diff "$work/macros" - || fail "macros (<) and the table here (>) differ"
  cat >"$work/one.cpp" <<'END'
#include "cddp.h"
template <int I, int J> static cddp_group *group() { return NULL; }
template <int I, int J> static cddp_ddp *model() { return NULL; }
template <int I, int J> static cddp_ddp *&place() { static cddp_ddp *d; return d; }
template <class T> struct Holder { operator T() const { return NULL; } };
int main() {
  void *p = NULL;
  size_t n[1] = {1};
  cddp_group **out = NULL;
  cddp_work **w = NULL;
  cddp_optim *optim = NULL;
  int refused = 0;
  (void)n, (void)out, (void)w, (void)optim;
END
  while read -r name rest; do
    case $name in
    ddp_create) set -- '&place<1, 2>()' 'Holder<cddp_ddp **>()' nullptr ;;
    ddp_*) set -- 'model<1, 2>()' 'Holder<cddp_ddp *>()' nullptr ;;
    *) set -- 'group<1, 2>()' 'Holder<cddp_group *>()' nullptr ;;
    esac
    for first in "$@"; do echo "  refused += ::cddp_$name($first$rest) == CDDP_INVALID_ARGUMENT;"; done
  done <"$work/table" >>"$work/one.cpp"
  echo "  return refused == 3 * $(wc -l <"$work/table") ? 0 : 1; }" >>"$work/one.cpp"
  implement >"$work/two.c"
  cc -O0 -w -I. -c "$work/two.c" -o "$work/two.o" || exit 1
  g++ -std=c++11 $strict -Wno-useless-cast -I. "$work/one.cpp" "$work/two.o" -o "$work/one" -lpthread -lm || exit 1
  "$work/one" || fail "a call with NULL does not return CDDP_INVALID_ARGUMENT"
}

with_types() { # ROW...: $work/cddp.h, with more element types
  local rows=
  for row in "$@"; do rows="$rows \\\\\n  X($row)"; done
  sed "s|^  X(CDDP_I64, .*)\$|&$rows|" cddp.h >"$work/cddp.h"
}

dtypes() { # an integer type is one more row, and works; a trained one also needs arithmetic, or does not compile
  local row
  compiler cc
  with_types 'CDDP_U32, "u32", uint32_t, UNSIGNED, i32' 'CDDP_U64, "u64", uint64_t, UNSIGNED, i64'
  cat >"$work/one.c" <<'END'
#define CDDP_IMPLEMENTATION
#include "cddp.h"
#include <stdio.h>
#define CHECK(c) ((c) ? 0 : (printf("rank %d: not " #c "; %s\n", rank, cddp_error()), failures++))
static const char *file;
static int failures;
#define TEST_OF(T, TYPE, name) \
  static void test_##T(cddp_group *g, int rank) { \
    enum { N = 3000 }; \
    const T big = (T)1 << (8 * sizeof(T) - 1); \
    static T x[N], y[2 * N]; \
    static const cddp_op ops[] = {CDDP_SUM, CDDP_PROD, CDDP_MIN, CDDP_MAX, CDDP_BAND, CDDP_BOR, CDDP_BXOR}; \
    cddp_param p = {"w", x, NULL, N, TYPE}; \
    cddp_safetensors *st; \
    cddp_tensor_info info; \
    cddp_ddp *ddp; \
    int i, k, n; \
    CHECK(cddp_dtype_size(TYPE) == sizeof(T)); \
    for (n = 1; n <= N; n += N - 1) \
      for (k = 0; k < 7; k++) { \
        T a, b, want; \
        for (i = 0; i < n; i++) x[i] = (T)i * 7 + 5 + (rank ? big : 0); \
        CHECK(cddp_all_reduce(g, x, (size_t)n, TYPE, ops[k], NULL) == CDDP_OK); \
        for (i = 0; i < n; i++) { \
          a = (T)i * 7 + 5, b = a + big; \
          want = k == 0 ? a + b : k == 1 ? a * b : k == 2 ? a : k == 3 ? b : k == 4 ? a & b : k == 5 ? a | b : a ^ b; \
          if (x[i] != want) break; \
        } \
        CHECK(i == n); \
      } \
    for (i = 0; i < N; i++) x[i] = rank ? big + 10 : 20; \
    CHECK(cddp_all_reduce(g, x, N, TYPE, CDDP_AVG, NULL) == CDDP_OK); \
    CHECK(x[0] == (big + 30) / 2 && x[N - 1] == (big + 30) / 2); \
    for (i = 0; i < N; i++) x[i] = big + (T)(rank * N + i); \
    CHECK(cddp_all_gather(g, x, y, N, TYPE, NULL) == CDDP_OK); \
    for (i = 0; i < 2 * N && y[i] == big + (T)i; i++) {} \
    CHECK(i == 2 * N); \
    if (rank == 0) CHECK(cddp_send(g, x, N, TYPE, 1, 1, NULL) == CDDP_OK); \
    if (rank == 1) CHECK(cddp_recv(g, x, N, TYPE, 0, 1, NULL) == CDDP_OK && x[9] == big + 9); \
    CHECK(cddp_broadcast(g, x, N, TYPE, 0, NULL) == CDDP_OK && x[9] == big + 9); \
    CHECK(cddp_save(g, file, &p, 1, NULL) == CDDP_OK); \
    CHECK(cddp_safetensors_open(&st, file) == CDDP_OK); \
    CHECK(cddp_safetensors_get(st, 0, &info) == CDDP_OK && info.dtype == TYPE); \
    cddp_safetensors_close(st); \
    x[9] = 0; \
    CHECK(cddp_load(g, file, &p, 1, NULL) == CDDP_OK && x[9] == big + 9); \
    CHECK(cddp_ddp_create(&ddp, g, &p, 1, NULL) == CDDP_INVALID_ARGUMENT); \
    CHECK(strstr(cddp_error(), "must be f32") != NULL); \
  } \
  static void mismatch_##T(cddp_group *g, int rank) { /* ends the group */ \
    T x[8] = {0}; \
    if (rank == 0) CHECK(cddp_send(g, x, 8, TYPE, 1, 1, NULL) == CDDP_OK); \
    if (rank == 0) return; \
    CHECK(cddp_recv(g, x, 8, CDDP_F32, 0, 1, NULL) == CDDP_MISMATCH); \
    CHECK(strstr(cddp_error(), "sent count 8 " name " with tag 1") != NULL); \
  }
TEST_OF(uint32_t, CDDP_U32, "u32")
TEST_OF(uint64_t, CDDP_U64, "u64")
static int run(int rank, void *arg) {
  cddp_group *g;
  if (*(int *)arg % 2) setenv("CDDP_HOST_ID", rank ? "a" : "b", 1);
  if (cddp_init(&g, NULL)) return 1;
  if (*(int *)arg / 2 == 0) test_uint32_t(g, rank), test_uint64_t(g, rank);
  else if (*(int *)arg / 2 == 1) mismatch_uint32_t(g, rank);
  else mismatch_uint64_t(g, rank);
  cddp_destroy(g);
  return failures != 0;
}
int main(int argc, char **argv) {
  int mode, bad = 0;
  file = argv[argc - 1];
  for (mode = 0; mode < 6; mode++) bad += cddp_spawn(run, &mode, 2) != CDDP_OK;
  return bad;
}
END
  set -- $cc -std=gnu11 -O0 -DCDDP__NO_DISPATCH -Wall -Wextra -Werror -I"$work" "$work/one.c" -o "$work/one" -lpthread -lm
  "$@" -fsanitize=address,undefined -fno-sanitize-recover=undefined 2>"$work/out" || "$@" ||
    fail "a type for integers does not compile"
  ASAN_OPTIONS=detect_leaks=0 "$work/one" "$work/file.safetensors" || fail "a type for integers does not work"

  implement >"$work/one.c"
  for row in 'CDDP_F8, "f8", uint8_t, HALF, bf16' 'CDDP_E16, "e16", uint16_t, HALF, e16' \
    'CDDP_F128, "f128", double, FLOAT, f64' 'CDDP_C64, "c64", float, COMPLEX, f32' 'CDDP_I16, "i16", int16_t, SIGNED, i16'; do
    with_types "$row"
    $cc -I"$work" -w -fsyntax-only "$work/one.c" 2>/dev/null && fail "compiles: $row"
  done
  command -v g++ >/dev/null || return 0
  with_types 'CDDP_E16, "e16", uint16_t, HALF, bf16' # on a CPU it is bf16
  $cc -I"$work" -Wall -Wextra -Werror -fsyntax-only "$work/one.c" || fail "a type with the loops of bf16 does not compile"
  cp cddp_kernels.cuh "$work"
  g++ -xc++ -std=c++17 -w -DCDDP_KERNELS_IMPLEMENTATION -Itests/gpu/hostcuda -fsyntax-only "$work/cddp_kernels.cuh" 2>"$work/out" &&
    fail "the kernels compile without those of a new type"
  grep -q 'kernels: e16' "$work/out" || fail "another error: $(head -n 5 "$work/out")"
}

cppcheck() { # can read the header, and reports nothing. Two of its checks do not follow a pointer to memory to be written
  type -P cppcheck >/dev/null || skip "cppcheck is not installed"
  implement >"$work/one.c"
  timeout 280 cppcheck --enable=warning,portability --quiet --max-configs=1 --template='{file}:{line}: {id}: {message}' \
    --suppress=legacyUninitvar --suppress=ctuuninitvar --suppress=toomanyconfigs -D__linux__ -D__x86_64__ -D_GNU_SOURCE \
    -D__BYTE_ORDER__=1234 -D__ORDER_LITTLE_ENDIAN__=1234 -D__SIZEOF_POINTER__=8 -I. "$work/one.c" 2>"$work/out" ||
    fail "cppcheck ends with $?: $(head -n 5 "$work/out")"
  none "cppcheck" <"$work/out"
}

symbols() { # the object exports what the header declares and nothing else
  compiler cc
  implement >"$work/one.c"
  $cc -std=c11 -I. -c "$work/one.c" -o "$work/one.o" || exit 1
  nm -g --defined-only "$work/one.o" | awk '{ print $NF }' | sort >"$work/defined"
  echo '#include "cddp.h"' | $cc -std=c11 -I. -E -P -xc - | tr '\n' ' ' | tr ';' '\n' |
    sed -n 's/.*extern [^(]*[ *]\(cddp_[a-zA-Z0-9_]*\) *(.*/\1/p' | sort >"$work/declared"
  [ "$(wc -l <"$work/declared")" -gt 20 ] || fail "only declared: $(cat "$work/declared")"
  grep -v -E '^cddp_[a-z0-9]' "$work/defined" | none "exported without the prefix cddp_"
  comm -13 "$work/declared" "$work/defined" | none "exported but not declared with CDDPDEF"
  comm -23 "$work/declared" "$work/defined" | none "declared with CDDPDEF but not defined"
}

# --- reading ---

sources() {
  ls cddp.h cddp_kernels.cuh examples/*.[ch] examples/*.cu examples/torch/*.cpp tests/*.[ch] tests/*/*.[ch] tests/*/*/*.[ch] 2>/dev/null
}

lines() { # at most 100 columns, no tabs, no blanks at the end, a newline at the end of the file
  # shellcheck disable=SC2046
  awk 'length($0) > 100 { print FILENAME ":" FNR ": " length($0) " columns" }
       /\t/ { print FILENAME ":" FNR ": a tab" }
       /[ \r]$/ { print FILENAME ":" FNR ": blanks at the end" }' $(sources) | none "line"
  for f in $(sources); do [ -z "$(tail -c 1 "$f")" ] || echo "$f"; done | none "no newline at the end"
}

# The functions of cddp.h and cddp_kernels.cuh are at most 80 lines long and none is declared ahead, but for the list
# in room >>hooks. A chunk runs from a line that begins in column 0 to the one that ends it: '}' after an open body,
# ';' or '}' otherwise.
functions() {
  awk '
    FNR == 1 { open = 0 }
    /^\/\* >>[a-z0-9_]+ -/ { room = $2 }
    /^[#\/ }]/ && !open || /^$/ { next }
    !open && /^[A-Za-z_]/ { open = 1; start = FNR; head = $0; body = 0 }
    open && !body && /\{[^}]*$/ { body = 1 }
    open && (body && /^\}/ || !body && /[;}][ ]*(\/\*.*)?$/) {
      where = FILENAME ":" start ": " head
      if (!body && room != ">>hooks" && head ~ /^(static |CDDP)/ && head ~ /cddp__[a-z0-9_]+\(/ && $0 ~ /\);/ && $0 !~ /[={]/)
        print "forward declaration: " where
      if (body && head ~ /\(/ && head !~ /^(typedef|enum|struct|union|extern)/ && FNR - start >= 80)
        print "function of " FNR - start + 1 " lines: " where
      open = 0
    }' cddp.h cddp_kernels.cuh | none "style"
}

contents() { # each >>mark of a file's contents has one room, in that order
  local f
  for f in cddp.h cddp_kernels.cuh; do
    awk '/CONTENTS/ { on = 1 } on { print } on && /\*\// { exit }' $f |
      grep -o -E '>>[a-z0-9_-]+ +[^ ]' | cut -d' ' -f1 >"$work/listed" # '... of >>api' ends its line
    sed -n 's|^/\* \(>>[a-z0-9_-]*\) -.*|\1|p' $f >"$work/rooms"
    [ -s "$work/listed" ] || fail "$f: no contents: a line CONTENTS, then >>marks, each with a word on it"
    diff "$work/listed" "$work/rooms" >"$work/diff" ||
      fail "$f: contents (<) and rooms (>, lines '/* >>name ---') differ:
$(cat "$work/diff")"
  done
}

layout() { # the top level holds what the layout names; no binaries. Tracked files count: users build beside them
  local files f allowed='cddp\.h|cddp_kernels\.cuh|examples|tests|build\.ninja|README\.md|LICENSE'
  allowed="$allowed|\.clang-format|\.gitignore|\.ci"
  files=$(git ls-files --cached 2>/dev/null)
  echo "$files" | cut -d/ -f1 | sort -u | grep -v -x -E "$allowed|" | none "not in the layout"
  echo "$files" | grep -E '\.(o|a|so|out|exe)$|(^|/)core(\.|$)' | none "build products"
  for f in cddp.h cddp_kernels.cuh build.ninja README.md LICENSE; do [ -f $f ] || echo $f; done | none "missing"
  for f in $(grep -h -o -E '^ *(cc|nvcc) .* -o [a-z_]+|--plot [a-z]+\.svg|--csv [a-z]+\.csv|-o [a-z]+\.json' examples/*.c* README.md |
    sed 's/.* //' | sort -u); do
    grep -q -x "/$f" .gitignore || echo "/$f"
  done | none "made by a command of the examples, but not in .gitignore"
}

unfinished() {
  # shellcheck disable=SC2046
  grep -n -E '\b(T[O]DO|F[I]XME|X[X]X)\b|not implemente[d]' $(sources) tests/*.sh tests/*/*.sh build.ninja tests/*.ninja README.md |
    none "unfinished"
}

short_examples() { # at most 300 lines (gpt 450, four 200; the engine for PyTorch 500); the build command in the top comment
  local f most
  for f in examples/*.c examples/*.cu; do # cddp...: a tool, no lesson
    case $f in
    examples/gpt.*) most=450 ;;
    examples/powersgd.c | examples/sync_batchnorm.c | examples/mesh.c | examples/local_sgd.c) most=200 ;;
    *) most=300 ;;
    esac
    [[ $f = examples/cddp* ]] || [ "$(wc -l <"$f")" -le $most ] || echo "$f: $(wc -l <"$f") lines"
    head -n 20 "$f" | grep -q -E "^ +(cc|nvcc) .*$f" || echo "$f: no line '  cc ... $f ...' in its top comment"
  done | none "examples"
  f=examples/torch/cddp_backend.cpp
  [ "$(wc -l <$f)" -le 500 ] || fail "$f: $(wc -l <$f) lines"
}

readme() { # its C compiles, and runs where it is whole; every file and target of ours that it names is there
  local word f
  [ -f README.md ] || fail "there is no README.md"
  for word in $(grep -o -E '\b(examples|tests)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' README.md | sort -u); do
    [ -e "$word" ] || echo "no file $word"
  done | none "README.md"
  for word in $(grep -o -E '`(\$ )?ninja [a-z-]+|^ *(\$ )?ninja [a-z-]+' README.md | grep -o '[a-z-]*$' | sort -u); do
    grep -q -E "^build ([^:]* )?$word:|^name = $word$" build.ninja tests/suites.ninja || echo "no target $word"
  done | none "README.md: ninja"
  awk -v to="$work/block" '/^```/ { on = $0 == "```c"; n += on; next } on { print > (to n ".c") }' README.md
  compile_blocks | none "README.md: C"
  run_whole "$work/block1.c" | none "README.md: the quick start"
}

# FILE: a program of two ranks, without its includes or with them; learns 3 and -2 as C99 and as C++11.
run_whole() {
  local c
  implement >"$work/impl.c"
  cc -O0 -w -DCDDP__NO_DISPATCH -I. -c "$work/impl.c" -o "$work/impl.o" || return
  for c in 'cc -std=c99 -D_GNU_SOURCE' 'g++ -xc++ -std=c++11'; do
    command -v "${c%% *}" >/dev/null || continue
    $c -w -DCDDP_IMPLEMENTATION_DONE -I. "$1" -xnone "$work/impl.o" -o "$work/whole" -lpthread -lm 2>&1 || continue
    "$work/whole" >"$work/out" 2>&1 || echo "$c: it fails: $(cat "$work/out")"
    [ "$(sort "$work/out")" = "rank 0: 3.0000 -2.0000
rank 1: 3.0000 -2.0000" ] || echo "$c: it prints: $(cat "$work/out")"
  done
}

manual() { # the examples of the first page and at the head of each topic compile
  awk -v to="$work/block-first.c" '
    /becomes data parallel in six places/ { on = 1 } /main calls train in each process/ { exit }
    on && (/^       / || /^$/) { print > to }' cddp.h
  grep -q cddp_ddp_step "$work/block-first.c" || fail "the first page has no example"
  awk -v to="$work/block" '
    /^\/\* >>fine-print/ { exit }
    /^\/\* >>api-/ { topic = $2; sub(/>>api-/, "", topic); next }
    topic == "diagnostics" { topic = "" } # an error text
    topic != "" && /^     / { sub(/ \*\/$/, ""); print > (to "-" topic ".c"); began = 1; next }
    topic != "" && began && NF { topic = ""; began = 0 }' cddp.h
  [ "$(find "$work" -name 'block-*.c' | wc -l)" -ge 10 ] || fail "too few examples: $(find "$work" -name 'block-*.c')"
  compile_blocks | none "the manual's examples"
}

# Compiles $work/block*.c as C99, C11, C++11 and C++20, and by nvcc where there is one. A block that is no whole file becomes
# the body of a function, or the first page's a file, behind declarations of the names that the README and the manual leave
# to the reader; a line of dots stands for the reader's code.
compile_blocks() {
  local f c what
  cat >"$work/names.h" <<'END'
#include "cddp.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
enum { N = 4, STEPS = 2, EPOCHS = 2 };
#ifdef FIRST_PAGE
void backward(float *w, float *gradient, const float *batch), init_weights(float *w, int seed);
const float *my_batch(int rank, int step);
#else
#define TRY(call) do { if ((call) != CDDP_OK) return 1; } while (0)
extern cddp_group *g, *group, *half;
extern cddp_ddp *ddp;
extern cddp_optim *optim, *sgd, *adamw;
extern cddp_param *p, *params;
extern cddp_sgd_desc options;
extern cddp_sampler sampler;
extern cddp_store *store;
extern int n, rank, count, shard, step;
extern float *w, *b, *x, *weights, *gradients, sample[N];
extern double correct, samples;
extern size_t m, bytes, size;
extern char buffer[100];
extern void *stream;
int train(int rank, void *arg);
void backward(void), forward_backward(int shard), forward_backward_of(int step, int shard);
void compute_something_else(void), my_update(float *w, float *g, int n);
void train_on(float x), train_batch(const size_t *index, size_t count);
double schedule(int step), loss_of(float x);
#endif
END
  for f in "$work"/block*.c; do
    if ! grep -q '#include "cddp.h"' "$f"; then
      {
        case $f in *-first.c) echo '#define FIRST_PAGE' ;; esac
        echo '#include "names.h"'
        case $f in
        *-first.c) cat "$f" ;;
        *)
          case $f in *-gpus.c) echo 'extern cddp_group_desc desc;' ;; *) echo 'extern cddp_ddp_desc desc;' ;; esac
          echo 'int block(void);'
          echo 'int block(void) {'
          sed -E 's/\{ \.\.\. .*\}$/{ }/; s/^ +\.\.\.( .*)?$//; s/backward\(\.\.\.\)/backward()/; s/forward_backward\((step|t), shard\)/forward_backward_of(step, shard)/
            /#define CDDP_IMPLEMENTATION|#include "cddp_kernels/d' "$f"
          echo 'return 0; }'
          ;;
        esac
      } >"$f.whole"
      mv "$f.whole" "$f"
    fi
    what="-D_GNU_SOURCE -DCDDP_IMPLEMENTATION_DONE -I. -I$work"
    for c in 'cc -std=c99' 'cc -std=c11' 'g++ -xc++ -std=c++11' 'g++ -xc++ -std=c++20'; do
      command -v "${c%% *}" >/dev/null || continue
      $c $what -Wall -Wextra -Wno-missing-field-initializers -Wno-narrowing -Wno-unused-variable -Wno-unused-parameter -Wno-unused-function \
        -fsyntax-only "$f" 2>&1 | sed "s|^|$c: |"
    done
    grep -q -E 'device|stream' "$f" && command -v nvcc >/dev/null || continue
    nvcc -x cu -w $what -c "$f" -o "$work/cu.o" 2>&1 | sed "s|^|nvcc: |"
  done
}

lists() { # what there is to run, tests/list.ninja or a script has; tests/suites.ninja says when it runs
  local f name
  for f in tests/{rooms,ranks,chaos,fuzz}/*.c tests/gpu/*.{c,cu}; do
    grep -q ": object $f " tests/list.ninja && continue # a part of others
    [ "$f" = tests/gpu/real.c ] && continue             # of tests/gpu/gpu.sh suite
    name=$(sed -n "s|^build \$dir/\([^:]*\): [a-z_]*program $f.*|\1|p" tests/list.ninja)
    grep -q -E "build/[a-z]+/${name:-none}( |\$)" tests/suites.ninja || echo "$f"
  done | none "not in tests/list.ninja, or its program not in tests/suites.ninja"
  for f in tests/*.sh tests/{ranks,chaos,peers}/*.sh; do
    grep -q "$f" build.ninja tests/suites.ninja tests/nightly.sh || echo "$f"
  done | none "not in tests/suites.ninja or tests/nightly.sh"
  for name in $others; do grep -q -E "checks.sh:([^ ]*,)?$name(,| |\$)" tests/suites.ninja || echo "$name"; done |
    none "tests/checks.sh: not in tests/suites.ninja"
}

# --- which ---

compilers="cc g++ clang clang++"
others="openmp stdio-first any-order cuda gpu-suite gpu-coverage ignored targets standards macros commas dtypes cppcheck symbols lines functions contents layout unfinished short-examples readme manual lists"
per_compiler="implementation declarations static two-files alone" # ...-COMPILER

case ${1:-} in
cuda-full | cuda-examples | gpu-suite) "$1" || exit 1 ;;
implementation-* | declarations-* | static-* | two-files-* | alone-*)
  what=${1%-*}
  "${what//-/_}" "${1##*-}" || exit 1
  ;;
*)
  [[ " aarch64 $others " == *" ${1:-?} "* ]] || fail "usage: $0 NAME: $others ${per_compiler// /-COMPILER }"
  "${1//-/_}" || exit 1
  ;;
esac
[ ! -s "$work/findings" ]
