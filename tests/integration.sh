#!/bin/bash
# cddp in projects of other people: each test makes one, builds it, and runs it as two processes.
#
#   tests/integration.sh cmake14      a C++14 project of CMake, strict, that compiles cddp.c as C, as README says
#   tests/integration.sh cmake20      a C++20 one: designated initialisers, two files that include cddp.h
#   tests/integration.sh c99          a C99 program that has the declarations alone, strict
#   tests/integration.sh ofast        -Ofast in the program, and in cddp.c too
#
# The programs fit the line 3 x - 2, whose weights are known, and print them with the bits of each rank's weights.
# Exit code 77 and 'SKIP: reason' where cmake or a compiler is not installed.
set -u
cd "$(dirname "$0")/.." || exit 1
top=$PWD

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-integration.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" && ln -s "$top/cddp.h" cddp.h && printf '#define CDDP_IMPLEMENTATION\n#include "cddp.h"\n' >cddp.c || exit 1

fail() { echo "$*"; exit 1; }
needs() {
  for tool in "$@"; do command -v "$tool" >/dev/null || { echo "SKIP: $tool is not installed"; exit 77; }; done
}

configure_and_build() { # with the CMakeLists.txt here
  cmake -G Ninja -S . -B build >out 2>&1 || fail "cmake: $(cat out)"
  cmake --build build >out 2>&1 || fail "cmake --build: $(cat out)"
  ! grep -i 'warning' out || fail "$(cat out)"
}

fits() { # COMMAND...: two ranks have the weights 3 and -2, and the same bits
  timeout 120 "$@" >out 2>&1 || fail "$*: exit code $?: $(cat out)"
  sort out
  [ "$(grep -c '^rank [01] of 2: 3\.00 -2\.00 bits [0-9a-f]*$' out)" = 2 ] || fail "not the weights 3 and -2 on two ranks"
  [ "$(sed 's/.*bits//' out | sort -u | wc -l)" = 1 ] || fail "the ranks' weights differ"
}

cmake14() {
  needs cmake ninja cc c++
  cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.10)
project(trainer C CXX)
set(CMAKE_CXX_STANDARD 14)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
add_library(cddp cddp.c)
add_executable(my_trainer main.cpp)
target_compile_options(my_trainer PRIVATE -Wall -Wextra -Werror -pedantic)
target_link_libraries(my_trainer cddp pthread m)
END
  cat >main.cpp <<'END'
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cddp.h"

static void check(cddp_result r) {
  if (r != CDDP_OK) throw std::runtime_error(cddp_error());
}

struct Destroy {
  void operator()(cddp_group *g) const { cddp_destroy(g); }
  void operator()(cddp_ddp *d) const { cddp_ddp_destroy(d); }
  void operator()(cddp_optim *o) const { cddp_optim_destroy(o); }
};

static void train() {
  cddp_group *g = nullptr;
  check(cddp_init(&g, nullptr));
  std::unique_ptr<cddp_group, Destroy> group(g);
  std::vector<float> w(2, 0.0f);
  cddp_param p{};
  p.name = "w";
  p.data = w.data();
  p.count = w.size();
  p.dtype = CDDP_F32;
  cddp_ddp *d = nullptr;
  check(cddp_ddp_create(&d, g, &p, 1, nullptr));
  std::unique_ptr<cddp_ddp, Destroy> ddp(d);
  cddp_sgd_desc desc{};
  desc.lr = 0.1;
  desc.momentum = 0.9;
  cddp_optim *o = nullptr;
  check(cddp_sgd_create(&o, &p, 1, &desc));
  std::unique_ptr<cddp_optim, Destroy> optim(o);
  const int rank = cddp_rank(g), ranks = cddp_world_size(g);
  for (int step = 0; step < 400; ++step) {
    const float x = static_cast<float>((step * ranks + rank) % 7) / 7 - 0.5f;
    const float error = w[0] * x + w[1] - (3 * x - 2);
    auto gradient = static_cast<float *>(p.grad);
    gradient[0] += error * x;
    gradient[1] += error;
    check(cddp_ddp_ready(d, 0));
    check(cddp_ddp_step(d, o));
  }
  unsigned bits[2];
  std::memcpy(bits, w.data(), sizeof bits);
  std::printf("rank %d of %d: %.2f %.2f bits %08x%08x\n", rank, ranks, static_cast<double>(w[0]),
              static_cast<double>(w[1]), bits[0], bits[1]);
}

int main() {
  const auto guarded = [](int, void *) -> int {
    try {
      train();
      return 0;
    } catch (const std::exception &e) {
      std::fprintf(stderr, "%s\n", e.what());
      return 1;
    }
  };
  if (cddp_launcher_rank() >= 0) return guarded(0, nullptr);
  return cddp_spawn(guarded, nullptr, 2) == CDDP_OK ? 0 : 1;
}
END
  configure_and_build
  fits build/my_trainer
}

cmake20() {
  needs cmake ninja cc c++
  echo 'int main() { return 0; }' >probe.cpp
  c++ -std=c++20 -c probe.cpp -o probe.o 2>/dev/null || { echo "SKIP: c++ knows no -std=c++20"; exit 77; }
  cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.12)
project(trainer C CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
add_library(cddp STATIC cddp.c)
target_include_directories(cddp PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(cddp PUBLIC pthread m)
add_executable(my_trainer src/main.cpp src/model.cpp)
target_compile_options(my_trainer PRIVATE -Wall -Wextra -Werror -pedantic -Wshadow -Wconversion
  -Wno-missing-field-initializers) # which g++ has for designated initialisers, too
target_link_libraries(my_trainer cddp)
END
  mkdir src
  cat >src/model.h <<'END'
#pragma once
#include <cddp.h>
#include <span>

cddp_result step_of_model(cddp_ddp *ddp, cddp_optim *optim, std::span<float> w, std::span<float> gradient, float x);
END
  cat >src/model.cpp <<'END'
#include "model.h"

cddp_result step_of_model(cddp_ddp *ddp, cddp_optim *optim, std::span<float> w, std::span<float> gradient, float x) {
  const float error = w[0] * x + w[1] - (3 * x - 2);
  gradient[0] += error * x;
  gradient[1] += error;
  if (const cddp_result r = cddp_ddp_ready(ddp, 0); r != CDDP_OK) return r;
  return cddp_ddp_step(ddp, optim);
}
END
  cat >src/main.cpp <<'END'
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>

#include "model.h"

static int train(int, void *) {
  cddp_group *group = nullptr;
  cddp_ddp *ddp = nullptr;
  cddp_optim *optim = nullptr;
  std::array<float, 2> w{}, gradient{};
  std::array params{cddp_param{.name = "w", .data = w.data(), .grad = gradient.data(), .count = 2, .dtype = CDDP_F32}};
  const cddp_group_desc group_desc{.timeout_s = 60};
  const cddp_ddp_desc ddp_desc{.max_grad_norm = 10};
  const cddp_adamw_desc adamw_desc{.lr = 0.05};
  if (cddp_init(&group, &group_desc) || cddp_ddp_create(&ddp, group, params.data(), 1, &ddp_desc) ||
      cddp_adamw_create(&optim, params.data(), 1, &adamw_desc)) {
    std::fprintf(stderr, "%s\n", cddp_error());
    return 1;
  }
  const int rank = cddp_rank(group), ranks = cddp_world_size(group);
  for (int step = 0; step < 1000; ++step) {
    const float x = static_cast<float>((step * ranks + rank) % 7) / 7 - 0.5f;
    if (step_of_model(ddp, optim, w, gradient, x) != CDDP_OK) {
      std::fprintf(stderr, "%s\n", cddp_error());
      return 1;
    }
  }
  std::printf("rank %d of %d: %.2f %.2f bits %08x%08x\n", rank, ranks, static_cast<double>(w[0]),
              static_cast<double>(w[1]), std::bit_cast<std::uint32_t>(w[0]), std::bit_cast<std::uint32_t>(w[1]));
  cddp_optim_destroy(optim);
  cddp_ddp_destroy(ddp);
  cddp_destroy(group);
  return 0;
}

int main() {
  if (cddp_launcher_rank() >= 0) return train(0, nullptr);
  return cddp_spawn(train, nullptr, 2) == CDDP_OK ? 0 : 1;
}
END
  configure_and_build
  fits build/my_trainer
}

c99_program() { # fits the line; then prints the bits of sums in each dtype, over 5 ranks, and of AdamW's weights
  cat <<'END'
#include "cddp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call) \
  if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1

static void print_bits(const char *name, int rank, const void *p, size_t bytes) {
  const unsigned char *b = (const unsigned char *)p;
  unsigned long long hash = 1469598103934665603ull;
  size_t i;
  for (i = 0; i < bytes; i++) hash = (hash ^ b[i]) * 1099511628211ull;
  printf("rank %d %s bits %016llx\n", rank, name, hash);
}

/* The line 3 x - 2. */
static int train(int rank, void *arg) {
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  float w[2] = {0, 0};
  unsigned bits[2];
  cddp_param p = {"w", NULL, NULL, 2, CDDP_F32};
  cddp_sgd_desc o = {0};
  int step;
  (void)arg;
  p.data = w;
  o.lr = 0.1;
  o.momentum = 0.9;
  TRY(cddp_init(&g, NULL));
  rank = cddp_rank(g);
  TRY(cddp_ddp_create(&ddp, g, &p, 1, NULL));
  TRY(cddp_sgd_create(&sgd, &p, 1, &o));
  for (step = 0; step < 400; step++) {
    float x = (float)((step * 2 + rank) % 7) / 7 - 0.5f;
    float error = w[0] * x + w[1] - (3 * x - 2);
    ((float *)p.grad)[0] += error * x;
    ((float *)p.grad)[1] += error;
    TRY(cddp_ddp_ready(ddp, 0));
    TRY(cddp_ddp_step(ddp, sgd));
  }
  memcpy(bits, w, sizeof bits);
  printf("rank %d of %d: %.2f %.2f bits %08x%08x\n", rank, cddp_world_size(g), (double)w[0], (double)w[1],
         bits[0], bits[1]);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  return 0;
}

/* Sums of numbers with many digits, whose bits depend on the order in which they are added. */
enum { N = 10007 };
static unsigned draw(unsigned *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

static int sums(int rank, void *arg) {
  static float f[N];
  static double d[N];
  cddp_group *g;
  unsigned state;
  int i;
  (void)arg;
  TRY(cddp_init(&g, NULL));
  rank = cddp_rank(g);
  for (i = 0, state = (unsigned)rank; i < N; i++) {
    d[i] = ((double)draw(&state) + (double)draw(&state) / 16777216) / (1 << draw(&state) % 16);
    f[i] = (float)(int)draw(&state) / (float)(1 << draw(&state) % 16); /* divided by powers of two: exact */
  }
  TRY(cddp_all_reduce(g, f, N, CDDP_F32, CDDP_SUM, NULL));
  print_bits("sum of f32", rank, f, sizeof f);
  TRY(cddp_all_reduce(g, f, N, CDDP_F32, CDDP_AVG, NULL));
  print_bits("mean of f32", rank, f, sizeof f);
  TRY(cddp_all_reduce(g, d, N, CDDP_F64, CDDP_SUM, NULL));
  print_bits("sum of f64", rank, d, sizeof d);
  cddp_destroy(g);
  return 0;
}

/* A model whose gradients are drawn: its weights have the bits of cddp's AdamW. */
static int adamw(int rank, void *arg) {
  static float w[N], gradient[N];
  cddp_param p = {"w", w, gradient, N, CDDP_F32};
  cddp_adamw_desc o = {0};
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
  unsigned state;
  int i, step;
  (void)arg;
  o.lr = 0.01;
  TRY(cddp_init(&g, NULL));
  rank = cddp_rank(g);
  TRY(cddp_ddp_create(&ddp, g, &p, 1, NULL));
  TRY(cddp_adamw_create(&optim, &p, 1, &o));
  for (step = 0, state = (unsigned)rank; step < 10; step++) {
    for (i = 0; i < N; i++) gradient[i] = (float)(int)draw(&state) / (float)(1 << 22) - 2;
    TRY(cddp_ddp_ready(ddp, 0));
    TRY(cddp_ddp_step(ddp, optim));
  }
  print_bits("weights", rank, w, sizeof w);
  cddp_optim_destroy(optim);
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  int fits = argc < 2 || strcmp(argv[1], "bits") != 0;
  if (fits && cddp_launcher_rank() >= 0) return train(0, NULL);
  if (fits) return cddp_spawn(train, NULL, 2) == CDDP_OK ? 0 : 1;
  return cddp_spawn(sums, NULL, 5) == CDDP_OK && cddp_spawn(adamw, NULL, 5) == CDDP_OK ? 0 : 1;
}
END
}

c99() {
  needs cc
  c99_program >main.c
  cc -std=c99 -pedantic -Wall -Wextra -Werror -c main.c -o main.o || fail "the declarations do not compile as C99"
  cc -c cddp.c -o cddp.o && cc main.o cddp.o -o my_trainer -lpthread -lm || exit 1
  fits ./my_trainer
}

# The manual's REQUIREMENTS: the program can have -Ofast (-ffast-math), and cddp.c, compiled without, keeps all bits.
# With -Ofast in cddp.c too, all ranks still have the same weights.
ofast() {
  needs cc
  c99_program >main.c
  cc -O2 -c cddp.c -o cddp.o || exit 1
  cc -O2 main.c cddp.o -o plain -lpthread -lm || exit 1
  cc -Ofast main.c cddp.o -o fast -lpthread -lm || exit 1 # linked so, it sets FTZ and DAZ before main
  cc -Ofast -c cddp.c -o cddp_fast.o && cc -Ofast main.c cddp_fast.o -o faster -lpthread -lm || exit 1
  fits ./plain
  fits ./fast
  fits ./faster
  for program in plain fast faster; do
    timeout 120 ./$program bits >out 2>&1 || fail "$program bits: exit code $?: $(cat out)"
    sort out >$program.bits
    [ "$(wc -l <$program.bits)" = 20 ] || fail "$program: not 4 lines of 5 ranks: $(cat $program.bits)"
    [ "$(sed 's/^rank . //' $program.bits | sort -u | wc -l)" = 4 ] || fail "$program: the ranks' bits differ: $(cat $program.bits)"
  done
  sed -n 's/^rank 0 //p' plain.bits
  diff plain.bits fast.bits || fail "-Ofast in the program changes cddp's bits"
  diff <(grep 'sum of' plain.bits) <(grep 'sum of' faster.bits) || fail "-Ofast in cddp.c changes the bits of sums"
}

case ${1:-} in
cmake14 | cmake20 | c99 | ofast) "$1" ;;
*) fail "usage: $0 cmake14 | cmake20 | c99 | ofast" ;;
esac
