/* linear.cu - one step of Linear 10-10 on GPUs: the losses differ, the weights do not.

     nvcc -O3 -arch=native examples/linear.cu -o linear -lnccl -lcublas
     ./linear                                   1 rank on a GPU
     ./linear -n 2                              2 ranks, each on its own GPU
     ./linear -n 2 --device cpu                 needs no GPU

   Each rank has its own data, so its loss and its gradients are its own. After the step the
   parameters are the same on every rank to the last bit: all of them compare a hash of their bytes,
   and the program exits with 1 if two differ. The kernel that computes the gradients is this file's
   own: cddp only needs to know where the gradients are, and when they are complete. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, stdio.h, stdlib.h, string.h and math.h */

enum { BATCH = 20, IN = 10, OUT = 10, WEIGHTS = OUT * (IN + 1), MAX_RANKS = 64 };
static bool gpu;

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* Adds the gradient of output o to grad; returns its part of the mean squared error. The weights of
   output o are w[o * (IN + 1) ...], its bias comes last. */
static __host__ __device__ float output(const float *x, const float *labels, const float *w,
                                        float *grad, int o) {
  float loss = 0;
  w += o * (IN + 1);
  grad += o * (IN + 1);
  for (int r = 0; r < BATCH; r++) {
    float error = w[IN] - labels[r * OUT + o];
    for (int i = 0; i < IN; i++) error += w[i] * x[r * IN + i];
    float d = 2 * error / (BATCH * OUT);
    for (int i = 0; i < IN; i++) grad[i] += d * x[r * IN + i];
    grad[IN] += d;
    loss += error * error / (BATCH * OUT);
  }
  return loss;
}

static __global__ void outputs(const float *x, const float *labels, const float *w, float *grad,
                               float *loss) {
  int o = (int)threadIdx.x; /* a thread for each: nothing is shared */
  if (o < OUT) loss[o] = output(x, labels, w, grad, o);
}

static cddp_result backward(cddp_group *g, const float *x, const float *labels, const float *w,
                            float *grad, float *loss) {
  cudaLaunchConfig_t config = {dim3(1), dim3(32), 0, (cudaStream_t)cddp_stream(g), NULL, 0};
  for (int o = 0; o < OUT && !gpu; o++) loss[o] = output(x, labels, w, grad, o);
  if (!gpu) return CDDP_OK; /* below: outputs<<<1, 32, 0, stream>>>(...), with its result */
  return cudaLaunchKernelEx(&config, outputs, x, labels, w, grad, loss) ? CDDP_CUDA : CDDP_OK;
}

/* 64-bit FNV-1a: two ranks with the same hash have the same bytes. */
static uint64_t hash(const void *data, size_t size) {
  const unsigned char *byte = (const unsigned char *)data;
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++) h = (h ^ byte[i]) * 0x100000001b3u;
  return h;
}

static void copy(void *to, const void *from, size_t bytes) { /* between host and device */
  if (!gpu) memcpy(to, from, bytes);
  else if (cudaMemcpy(to, from, bytes, cudaMemcpyDefault)) fprintf(stderr, "cudaMemcpy failed\n");
}

static int train(int rank, void *group_desc) {
  enum { ALL = WEIGHTS + BATCH * (IN + OUT) + OUT };
  uint64_t mine, all[MAX_RANKS];
  float host[ALL];
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc));
  float *w = (float *)cddp_alloc(g, sizeof host); /* on a GPU device memory, else shared memory */
  TRY(w ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  float *x = w + WEIGHTS, *labels = x + BATCH * IN, *losses = labels + BATCH * OUT;
  srand48(1000 + cddp_rank(g));
  for (int i = 0; i < ALL; i++)
    host[i] = (float)(2 * drand48() - 1) / (i < WEIGHTS ? 3.0f : 1.0f);
  copy(w, host, sizeof host);

  cddp_param params[] = {{"weight", w, NULL, WEIGHTS, CDDP_F32}};
  cddp_sgd_desc options = cddp_sgd_desc();
  options.lr = 0.1;
  TRY(cddp_ddp_create(&ddp, g, params, 1, NULL)); /* every rank has rank 0's weights now */
  options.ddp = ddp; /* the device of the parameters; without it cddp asks CUDA */
  TRY(cddp_sgd_create(&sgd, params, 1, &options));
  if (backward(g, x, labels, w, (float *)params[0].grad, losses) != CDDP_OK)
    return fprintf(stderr, "rank %d: the kernel failed\n", rank), 1;
  TRY(cddp_ddp_ready(ddp, 0));      /* averaging over ranks begins when the kernel has ended */
  TRY(cddp_ddp_step(ddp, sgd));     /* enqueues the rest */
  TRY(cddp_synchronize(g));         /* waits for all of it */
  copy(host, w, sizeof host);

  float loss = 0;
  for (int o = 0; o < OUT; o++) loss += host[ALL - OUT + o];
  for (int turn = 0; turn < cddp_world_size(g); turn++) {
    if (turn == cddp_rank(g)) {
      printf("Loss on rank %d: %f\nParameters on rank %d:\n", turn, (double)loss, turn);
      for (int i = 0; i < WEIGHTS; i++)
        printf("%9.6f%s", (double)host[i], i % (IN + 1) == IN ? "\n" : " ");
    }
    TRY(cddp_barrier(g)); /* waits until rank `turn` has printed */
  }
  mine = hash(host, WEIGHTS * sizeof *host);
  TRY(cddp_all_gather(g, &mine, all, 1, CDDP_I64, NULL)); /* of host memory: fine on GPUs too */
  int differ = 0;
  for (int r = 0; r < cddp_world_size(g); r++) differ |= all[r] != all[0];
  if (cddp_rank(g) == 0)
    printf("Hash %016" PRIx64 ", %s the same on all ranks\n", mine, differ ? "NOT" : "and");
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, w);
  cddp_destroy(g);
  return differ;
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
  if (rank >= 0) return train(rank, &desc);
  cddp_result result = cddp_spawn(train, &desc, ranks); /* forks the ranks: no CUDA before */
  if (result == CDDP_OK) return 0;
  if (result != CDDP_PEER_LOST) fprintf(stderr, "%s\n", cddp_error());
  return 1; /* a rank that failed has printed its error */
}
