/* collectives.c - all_gather, gather, a list of arrays gathered as one, all_reduce, broadcast.

     cc -O2 examples/collectives.c -o collectives -lpthread -lm
     ./collectives                              3 ranks, as child processes
     ./collectives -n 4                         4 ranks
     mpirun -n 4 ./collectives                  4 ranks, started by mpirun, srun or torchrun

   All ranks of the group make the same calls, in the same order and with the same count. If a rank
   makes another call, all ranks get CDDP_MISMATCH, and cddp_error() names both calls. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 16, ARRAYS = 3, MAX_LENGTH = MAX_RANKS + ARRAYS };

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

static void print_array(const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) printf(" %g", (double)x[i]);
  printf("\n");
}

/* Prints x one rank at a time: the barrier ends after the printing rank has printed. */
static cddp_result print_in_turn(cddp_group *g, const char *what, const float *x, int64_t n) {
  cddp_result r = CDDP_OK;
  for (int turn = 0; turn < cddp_world_size(g) && r == CDDP_OK; turn++) {
    if (turn == cddp_rank(g)) {
      printf("%s, rank %d:", what, turn);
      print_array(x, n);
    }
    r = cddp_barrier(g);
  }
  return r;
}

/* Every rank has a list of arrays, and their lengths differ by rank. Two calls give rank 0 all of
   them: the first gathers the lengths, the second the arrays, packed one after the other. All ranks
   must pass the same count, so that each pack has the size of the longest. */
static int gather_list(cddp_group *g, int rank, int world) {
  float list[ARRAYS][MAX_LENGTH], *packed, *all;
  int64_t length[ARRAYS], lengths[MAX_RANKS * ARRAYS], used = 0, room = 0;
  for (int a = 0; a < ARRAYS; a++) {
    length[a] = 1 + (rank + a) % (ARRAYS + 1);
    for (int i = 0; i < length[a]; i++) list[a][i] = (float)(100 * rank + 10 * a + i);
  }
  TRY(cddp_all_gather(g, length, lengths, ARRAYS, CDDP_I64, NULL));
  for (int r = 0; r < world; r++) {
    int64_t total = 0;
    for (int a = 0; a < ARRAYS; a++) total += lengths[r * ARRAYS + a];
    if (total > room) room = total;
  }

  packed = (float *)calloc((size_t)room, sizeof *packed);
  all = (float *)calloc((size_t)(room * world), sizeof *all); /* only root's is used */
  if (!packed || !all) return fprintf(stderr, "rank %d: out of memory\n", rank), 1;
  for (int a = 0; a < ARRAYS; used += length[a++])
    memcpy(packed + used, list[a], (size_t)length[a] * sizeof *packed);
  TRY(cddp_gather(g, packed, all, (size_t)room, CDDP_F32, 0, NULL));

  for (int r = 0; r < world && rank == 0; r++) {
    const float *next = all + r * room;
    for (int a = 0; a < ARRAYS; next += lengths[r * ARRAYS + a++]) {
      printf("list, array %d of rank %d:", a, r);
      print_array(next, lengths[r * ARRAYS + a]);
    }
  }
  free(all);
  free(packed);
  return 0;
}

static int run(int rank, void *arg) {
  cddp_group *g;
  float mine[2], all[2 * MAX_RANKS], sum[2], received[2] = {-1, -1};
  (void)arg;
  TRY(cddp_init(&g, NULL));
  int world = cddp_world_size(g), last = world - 1;
  if (world > MAX_RANKS) return fprintf(stderr, "at most %d ranks\n", MAX_RANKS), 1;
  mine[0] = (float)(rank + 1);
  mine[1] = (float)(10 * (rank + 1));
  TRY(print_in_turn(g, "mine", mine, 2));

  TRY(cddp_all_gather(g, mine, all, 2, CDDP_F32, NULL)); /* every rank gets all */
  TRY(print_in_turn(g, "all_gather", all, 2 * world));

  memset(all, 0, sizeof all);
  TRY(cddp_gather(g, mine, all, 2, CDDP_F32, last, NULL)); /* only the root gets all */
  TRY(print_in_turn(g, "gather", all, 2 * world));

  if (gather_list(g, rank, world)) return 1;
  TRY(cddp_barrier(g));

  cddp_work *work; /* with a handle the operation runs while this thread continues */
  memcpy(sum, mine, sizeof sum);
  TRY(cddp_all_reduce(g, sum, 2, CDDP_F32, CDDP_SUM, &work)); /* cddp uses sum until ... */
  TRY(cddp_wait(work));                                       /* ... here */
  TRY(print_in_turn(g, "all_reduce, sum", sum, 2));

  if (rank == last) memcpy(received, mine, sizeof received);
  TRY(cddp_broadcast(g, received, 2, CDDP_F32, last, NULL));
  TRY(print_in_turn(g, "broadcast", received, 2));

  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  int ranks = argc == 3 && strcmp(argv[1], "-n") == 0 ? atoi(argv[2]) : argc == 1 ? 3 : 0;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  if (ranks < 1 || ranks > MAX_RANKS) {
    fprintf(help ? stdout : stderr, "usage: %s [-n N]: N ranks, as child processes, 1 to %d (3)\n",
            argv[0], MAX_RANKS);
    return help ? 0 : 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && argc > 1)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (rank >= 0) return run(rank, NULL);
  if (cddp_spawn(run, NULL, ranks) == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
