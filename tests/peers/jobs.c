/* jobs.c - a rank of job JOB, for tests of launchers: ./jobs JOB [SECONDS]. Prints "rank R of N,
   job JOB" when all ranks of its group are of that job and have said so; "MIXED" when they are not.
   With SECONDS rank 1 then gets SIGKILL, and the others go on until they hear of it, at most that
   long. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int fail(int rank) { return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; }

static int die(cddp_group *g, int rank, time_t end) {
  int64_t sum = 0;
  while (time(NULL) < end)
    if (cddp_all_reduce(g, &sum, 1, CDDP_I64, CDDP_SUM, NULL) != CDDP_OK)
      return fail(rank);
    else if (rank == 1)
      raise(SIGKILL);
  return 0;
}

int main(int argc, char **argv) {
  int64_t job = argc > 1 ? atoll(argv[1]) : 0, *jobs;
  int launched = cddp_launcher_rank(), rank, size, r;
  cddp_group *g;
  if (launched < 0) return puts("no launcher"), 4;
  if (cddp_init(&g, NULL) != CDDP_OK) return fail(launched);
  rank = cddp_rank(g), size = cddp_world_size(g);
  jobs = (int64_t *)calloc((size_t)size, sizeof *jobs);
  if (!jobs || cddp_all_gather(g, &job, jobs, 1, CDDP_I64, NULL) != CDDP_OK) return fail(rank);
  for (r = 0; r < size; r++)
    if (jobs[r] != job) return printf("MIXED: rank %d is of job %" PRId64 "\n", r, jobs[r]), 3;
  printf("rank %d of %d, job %" PRId64 ", local %d of %d\n", rank, size, job, cddp_local_rank(g),
         cddp_local_world_size(g));
  fflush(stdout);
  if (argc > 2 && die(g, rank, time(NULL) + atoi(argv[2]))) return 1;
  cddp_destroy(g);
  free(jobs);
  return 0;
}
