/* What the measuring programs share: clock, pinning, memory that several processes see, medians.
   Included after cddp.h where that is used. */
#ifndef BENCH_H
#define BENCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BENCH_DEF static __attribute__((unused))
#define BENCH_HUGE ((size_t)2 << 20)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#if defined(__x86_64__)
#define BENCH_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define BENCH_PAUSE() __asm__ volatile("yield")
#else
#define BENCH_PAUSE() ((void)0)
#endif

BENCH_DEF double bench_now(void) { /* s */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

BENCH_DEF int bench_cores(void) {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* Rank i runs on the i-th core that this process may use, as long as there is one for each rank. */
BENCH_DEF void bench_pin(int rank, int ranks) {
  cpu_set_t have, want;
  size_t c;
  int n = 0;
  if (ranks > bench_cores() || sched_getaffinity(0, sizeof have, &have) != 0) return;
  CPU_ZERO(&want);
  for (c = 0; c < CPU_SETSIZE; c++) {
    if (CPU_ISSET(c, &have) && n++ == rank) CPU_SET(c, &want);
  }
  sched_setaffinity(0, sizeof want, &want);
}

BENCH_DEF void bench_die(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

BENCH_DEF size_t bench_round(size_t n) { return (n + BENCH_HUGE - 1) / BENCH_HUGE * BENCH_HUGE; }

/* Memory at a multiple of 2 MiB; shared: also seen by processes forked later. */
BENCH_DEF char *bench_map(size_t bytes, bool shared) {
  size_t span = bench_round(bytes) + BENCH_HUGE;
  char *area = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *at;
  int fd = shared ? memfd_create("bench", MFD_CLOEXEC) : -1;
  if (area == MAP_FAILED) bench_die("mmap");
  at = area + (BENCH_HUGE - (uintptr_t)area % BENCH_HUGE) % BENCH_HUGE;
  if (shared && (fd < 0 || ftruncate(fd, (off_t)bench_round(bytes)) != 0)) bench_die("memfd");
  if (mmap(at, bench_round(bytes), PROT_READ | PROT_WRITE,
           MAP_FIXED | (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS), fd, 0) == MAP_FAILED)
    bench_die("mmap");
  if (fd >= 0) close(fd);
  return at;
}

/* Asks for 2 MiB pages and touches everything, on the core of the caller. */
BENCH_DEF void bench_touch(char *p, size_t bytes, bool huge) {
  size_t i, whole = bench_round(bytes);
  if (huge) madvise(p, whole, MADV_HUGEPAGE);
  for (i = 0; i < bytes; i += 4096) ((volatile char *)p)[i] = 0;
  if (huge) madvise(p, whole, MADV_COLLAPSE);
}

static int bench_compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

BENCH_DEF double bench_median(double *t, int n) {
  qsort(t, (size_t)n, sizeof *t, bench_compare);
  return n == 0 ? 0 : n % 2 ? t[n / 2] : (t[n / 2 - 1] + t[n / 2]) / 2;
}

/* Runs fn(0) .. fn(n - 1) in a process each; whether all ended well. */
BENCH_DEF bool bench_fork(int n, void (*fn)(int rank)) {
  bool ok = true;
  int i, status;
  fflush(NULL);
  for (i = 0; i < n; i++) {
    pid_t pid = fork();
    if (pid < 0) bench_die("fork");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      fn(i);
      fflush(NULL);
      _exit(0);
    }
  }
  for (i = 0; i < n; i++) {
    if (wait(&status) < 0 || status != 0) ok = false;
  }
  return ok;
}

/* A barrier of n processes in shared memory, a flag and a cache line each: the least that works. */
typedef struct bench_flag {
  uint32_t seq;
  char pad[60];
} bench_flag;

BENCH_DEF void bench_flags(bench_flag *flags, int n, int me, uint32_t seq) {
  int p;
  __atomic_store_n(&flags[me].seq, seq, __ATOMIC_RELEASE);
  for (p = 0; p < n; p++) {
    while ((int32_t)(__atomic_load_n(&flags[p].seq, __ATOMIC_ACQUIRE) - seq) < 0) BENCH_PAUSE();
  }
}
#endif
