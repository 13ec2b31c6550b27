/* collectives.cu - broadcast, all_gather, reduce_scatter and all_reduce on GPUs, in stream order.

     nvcc -O3 -arch=native examples/collectives.cu -o collectives -lnccl -lcublas
     ./collectives                              1 rank on a GPU
     ./collectives -n 2                         2 ranks, each on its own GPU
     ./collectives -n 2 --device cpu            needs no GPU

   On a GPU a collective is enqueued on the group's stream and returns immediately, like a kernel.
   Work enqueued later on that stream sees its result. Only a copy to the host waits. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, stdio.h, stdlib.h, string.h and math.h */

enum { MAX_RANKS = 16 };
static bool gpu;
static cudaStream_t stream;

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* Between host and device, after all work on the stream; the host waits. */
static void copy(void *to, const void *from, size_t bytes) {
  if (!gpu) memcpy(to, from, bytes);
  else if (cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream) ||
           cudaStreamSynchronize(stream))
    fprintf(stderr, "cudaMemcpyAsync: %s\n", cudaGetErrorString(cudaGetLastError()));
}

/* Prints x one rank at a time: the barrier ends after the printing rank has printed. */
static cddp_result print_in_turn(cddp_group *g, const char *what, const float *x, int n) {
  float host[2 * MAX_RANKS];
  cddp_result r = cddp_synchronize(g); /* waits for the GPU, and returns what failed there */
  if (r == CDDP_OK) copy(host, x, (size_t)n * sizeof *x);
  for (int turn = 0; turn < cddp_world_size(g) && r == CDDP_OK; turn++) {
    if (turn == cddp_rank(g)) {
      printf("%s, rank %d:", what, turn);
      for (int i = 0; i < n; i++) printf(" %g", (double)host[i]);
      printf("\n");
    }
    r = cddp_barrier(g);
  }
  return r;
}

static int run(int rank, void *group_desc) {
  cddp_group *g;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc)); /* makes rank's GPU the current one */
  rank = cddp_rank(g);
  int world = cddp_world_size(g), last = world - 1;
  if (gpu && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
    return fprintf(stderr, "rank %d: no stream\n", rank), 1;
  cddp_set_stream(g, stream); /* all collectives from here on use this stream */

  float host[2] = {(float)(rank + 1), (float)(10 * (rank + 1))};
  float *mine = (float *)cddp_alloc(g, (2 + 2 * MAX_RANKS + 2) * sizeof *mine);
  TRY(mine ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  float *all = mine + 2, *share = all + 2 * MAX_RANKS;
  copy(mine, host, sizeof host);
  TRY(print_in_turn(g, "mine", mine, 2));

  TRY(cddp_all_gather(g, mine, all, 2, CDDP_F32, NULL)); /* every rank gets all */
  TRY(print_in_turn(g, "all_gather", all, 2 * world));

  /* Two operations in a row, and the host waits for neither: rank r gets the sum over ranks of
     share r of `all`, then all ranks get the mean of those sums. */
  TRY(cddp_reduce_scatter(g, all, share, 2, CDDP_F32, CDDP_SUM, NULL));
  TRY(cddp_all_reduce(g, share, 2, CDDP_F32, CDDP_AVG, NULL));
  TRY(print_in_turn(g, "reduce_scatter, then the mean", share, 2));
  TRY(cddp_broadcast(g, mine, 2, CDDP_F32, last, NULL));
  TRY(print_in_turn(g, "broadcast", mine, 2));

  /* With a handle an operation runs at the same time as the stream's work. cddp_wait makes the
     stream wait for it. */
  cddp_work *work;
  copy(mine, host, sizeof host);
  TRY(cddp_all_reduce(g, mine, 2, CDDP_F32, CDDP_SUM, &work)); /* cddp uses mine until ... */
  TRY(cddp_wait(work));                                        /* ... here */
  TRY(print_in_turn(g, "all_reduce, sum", mine, 2));

  cddp_free(g, mine);
  cddp_set_stream(g, NULL);
  if (gpu) cudaStreamDestroy(stream);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  cddp_group_desc desc = cddp_group_desc();
  int ranks = 1, bad = argc % 2 == 0, help = argc == 2 && strcmp(argv[1], "--help") == 0;
  desc.device = "cuda";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "-n") == 0) ranks = atoi(argv[i + 1]);
    else if (strcmp(argv[i], "--device") == 0) desc.device = argv[i + 1];
    else if (strcmp(argv[i], "--backend") == 0) desc.backend = argv[i + 1];
    else bad = 1;
  }
  if (bad || ranks < 1 || ranks > MAX_RANKS) {
    fprintf(help ? stdout : stderr,
            "usage: %s [-n N] [--device DEVICE] [--backend BACKEND]\n"
            "  -n         ranks, as child processes (1)\n"
            "  --device   cuda, or cpu: needs no GPU (cuda)\n"
            "  --backend  nccl, or cpu: ranks may share a GPU (nccl)\n", argv[0]);
    return help ? 0 : 2;
  }
  gpu = strcmp(desc.device, "cpu") != 0;
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && ranks > 1)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (rank >= 0) return run(rank, &desc);
  cddp_result result = cddp_spawn(run, &desc, ranks); /* forks the ranks: no CUDA before */
  if (result == CDDP_OK) return 0;
  if (result != CDDP_PEER_LOST) fprintf(stderr, "%s\n", cddp_error());
  return 1; /* a rank that failed has printed its error */
}
