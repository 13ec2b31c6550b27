/* test.h - what the tests share. Included after cddp.h:

     static void test_sum(void) { CHECK(1 + 1 == 2); }
     int main(void) {
       RUN(test_sum);
       return TEST_END();
     }

   A failed check prints one line and goes on; TEST_END prints the count and gives main's value.
   Checks count from any thread. A forked rank counts its own: it returns `test_failures != 0`.
   A test that cannot run here says so first: `return TEST_SKIP("no right to make a namespace");`
   ONLY=test_sum in the environment runs that function alone. */
#ifndef TEST_H
#define TEST_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TEST__UNUSED __attribute__((unused))

/* Counted with __atomic functions. */
static int test_failures TEST__UNUSED, test_checks TEST__UNUSED;
/* The function that RUN has started, for the failure lines. */
static const char *test_running TEST__UNUSED = "main";

/* One write per line: lines of ranks that fail together do not mix. */
__attribute__((unused, format(printf, 3, 4)))
static void test_fail(const char *file, int line, const char *format, ...) {
  char text[1536];
  size_t n, room = sizeof text - 1; /* of the newline */
  va_list args;
  __atomic_add_fetch(&test_failures, 1, __ATOMIC_SEQ_CST);
  n = (size_t)snprintf(text, room, "%s:%d: %s: ", file, line, test_running);
  va_start(args, format);
  if (n < room) n += (size_t)vsnprintf(text + n, room - n, format, args);
  va_end(args);
  if (n < room && cddp_error()[0] != 0)
    n += (size_t)snprintf(text + n, room - n, "; cddp_error(): %s", cddp_error());
  if (n >= room) n = room - 1;
  text[n++] = '\n';
  if (write(STDERR_FILENO, text, n) < 0) return; /* nobody to tell */
}

TEST__UNUSED static void test_count(void) {
  __atomic_add_fetch(&test_checks, 1, __ATOMIC_RELAXED);
}

/* The condition holds. */
#define CHECK(c)                                                         \
  do {                                                                   \
    test_count();                                                        \
    if (!(c)) test_fail(__FILE__, __LINE__, "CHECK(%s) failed", #c);     \
  } while (0)

/* Two numbers are equal; prints both if not. A long double holds any 64-bit integer or double. */
#define CHECK_EQ(a, b)                                                                       \
  do {                                                                                       \
    long double test_a = (long double)(a), test_b = (long double)(b);                        \
    test_count();                                                                            \
    if (!(test_a == test_b))                                                                 \
      test_fail(__FILE__, __LINE__, "CHECK_EQ(%s, %s) failed: %.20Lg and %.20Lg", #a, #b,    \
                test_a, test_b);                                                             \
  } while (0)

/* The call's result is `want`. */
#define CHECK_IS(r, want)                                                                    \
  do {                                                                                       \
    cddp_result test_r = (r), test_want = (want);                                            \
    test_count();                                                                            \
    if (test_r != test_want)                                                                 \
      test_fail(__FILE__, __LINE__, "%s gave %s, not %s", #r, cddp_result_name(test_r),      \
                cddp_result_name(test_want));                                                \
  } while (0)

#define CHECK_OK(r) CHECK_IS(r, CDDP_OK)

TEST__UNUSED static double test_now(void) { /* seconds */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Names each function on stderr when it is through: a hang is in the one that follows. */
TEST__UNUSED static void test_run(void (*fn)(void), const char *name) {
  const char *only = getenv("ONLY");
  int before = __atomic_load_n(&test_failures, __ATOMIC_SEQ_CST), after;
  double start = test_now();
  if (only != NULL && strcmp(only, name) != 0) return;
  test_running = name;
  fn();
  test_running = "main";
  after = __atomic_load_n(&test_failures, __ATOMIC_SEQ_CST);
  fprintf(stderr, "  %s %s %.2f s\n", after == before ? "ok  " : "FAIL", name, test_now() - start);
}
#define RUN(fn) test_run(fn, #fn)

#ifdef CDDP__DISPATCH /* in tests of rooms */
/* The best set of instructions that this machine has: AVX-512 where cddp would not use it, too. */
TEST__UNUSED static int test_best_isa(void) {
  int isa = cddp__isa();
#if CDDP__DISPATCH
  if (isa == CDDP__ISA_AVX2 && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    isa = CDDP__ISA_AVX512;
#endif
  return isa;
}

TEST__UNUSED static void test_use_isa(int isa) {
  static const char *const names[] = {"portable", "AVX2", "AVX-512"};
  __atomic_store_n(&cddp__isa_found, isa, __ATOMIC_RELAXED);
  printf("%s\n", names[isa - CDDP__ISA_BASE]);
}
#endif

TEST__UNUSED static int test_end(const char *file) {
  const char *slash = strrchr(file, '/'), *name = slash != NULL ? slash + 1 : file;
  int failures = __atomic_load_n(&test_failures, __ATOMIC_SEQ_CST);
  int checks = __atomic_load_n(&test_checks, __ATOMIC_SEQ_CST);
  if (failures == 0 && checks > 0) {
    printf("ok %.*s (%d checks)\n", (int)strcspn(name, "."), name, checks);
    return 0;
  }
  printf("FAIL %.*s (%d of %d checks)\n", (int)strcspn(name, "."), name, failures, checks);
  return 1;
}
#define TEST_END() test_end(__FILE__)

TEST__UNUSED static int test_skip(const char *reason) {
  printf("SKIP: %s\n", reason);
  return 77; /* tests/run.sh counts it as skipped */
}
#define TEST_SKIP(reason) test_skip(reason)

#endif
