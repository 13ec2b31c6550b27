/* collectives.cu - broadcast, all_gather, reduce_scatter and all_reduce on GPUs, in stream order.

     nvcc -O3 -arch=native examples/collectives.cu -o collectives -lnccl -lcublas
     ./collectives                              1 rank on a GPU
     ./collectives -n 2                         2 ranks, each on a GPU of its own
     ./collectives -n 2 --device cpu            needs no GPU

   On a GPU a collective is enqueued on the group's stream and returns at once, like a kernel: what
   the program enqueues later on that stream sees its result, and only a copy to the host waits. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, which brings stdio.h and others */

enum { MAX_RANKS = 16 };
static bool gpu;
static cudaStream_t stream;

#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(call) if (call) FAIL("rank %d: %s\n", rank, cddp_error())

/* Between host and device, after all that is on the stream; the host waits. */
static void copy(void *to, const void *from, size_t bytes) {
  if (!gpu) memcpy(to, from, bytes);
  else if (cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream) ||
           cudaStreamSynchronize(stream))
    fprintf(stderr, "cudaMemcpyAsync: %s\n", cudaGetErrorString(cudaGetLastError()));
}

/* Prints x one rank at a time: a barrier ends when all ranks are there, the one that prints too. */
static cddp_result print_in_turn(cddp_group *g, const char *what, const float *x, int n) {
  float host[2 * MAX_RANKS];
  cddp_result r = cddp_synchronize(g); /* or the failure, when a peer was lost on the way */
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
  if (gpu && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) FAIL("no stream\n");
  cddp_set_stream(g, stream); /* every collective from here on is in this stream's order */

  float host[2] = {(float)(rank + 1), (float)(10 * (rank + 1))};
  float *mine = (float *)cddp_alloc(g, (2 + 2 * MAX_RANKS + 2) * sizeof *mine);
  TRY(!mine);
  float *all = mine + 2, *share = all + 2 * MAX_RANKS;
  copy(mine, host, sizeof host);
  TRY(print_in_turn(g, "mine", mine, 2));

  TRY(cddp_all_gather(g, mine, all, 2, CDDP_F32, NULL)); /* all ranks have everybody's */
  TRY(print_in_turn(g, "all_gather", all, 2 * world));

  /* Two operations in a row, and the host waits for neither: rank r gets the sum of everybody's
     share r of `all`, then all ranks get the mean of those. */
  TRY(cddp_reduce_scatter(g, all, share, 2, CDDP_F32, CDDP_SUM, NULL));
  TRY(cddp_all_reduce(g, share, 2, CDDP_F32, CDDP_AVG, NULL));
  TRY(print_in_turn(g, "reduce_scatter, then the mean", share, 2));
  TRY(cddp_broadcast(g, mine, 2, CDDP_F32, last, NULL));
  TRY(print_in_turn(g, "broadcast", mine, 2));

  /* With a handle an operation runs beside the stream; cddp_wait orders the stream after it. */
  cddp_work *work;
  copy(mine, host, sizeof host);
  TRY(cddp_all_reduce(g, mine, 2, CDDP_F32, CDDP_SUM, &work)); /* mine is cddp's until ... */
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
  if (cddp_launcher_rank() == 0 && ranks > 1)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (cddp_launcher_rank() >= 0) return run(cddp_launcher_rank(), &desc); /* torchrun, mpirun */
  cddp_result r = cddp_spawn(run, &desc, ranks); /* no CUDA call before: CUDA fails after fork */
  if (r != CDDP_OK && r != CDDP_PEER_LOST) fprintf(stderr, "%s\n", cddp_error());
  return r != CDDP_OK; /* a rank that failed has said why */
}
