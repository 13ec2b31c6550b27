/* nccl_programs.c - random programs (tests/chaos/programs.c) whose ranks have GPUs of the test
   double: NCCL or the backend "cpu", streams, captured steps, shared GPUs, deaths and joins.

     build/plain/nccl_programs               20 seconds of them; options as there

   The generator, the reference and the judge are those of programs.c. Here parameters, gradients,
   states and some buffers of collectives are device memory, and work on them is put on streams: a
   missing event or wait shows as wrong bits. With NCCL and neither shards nor an elastic model the
   gradients are short numbers, so that each sum is exact in any order; the mean is the sum times
   1 / ranks. All other sums must have the CPU's order. A rank must give back all device and pinned
   memory, streams and communicators. */
#define CDDP_KERNELS_NO_CUBLAS
#include "../../cddp_kernels.cuh"

#include "hostcuda/hostcuda.h"

#define PROGRAMS_GPU 1
#include "../chaos/programs.c"
#include "setup.h"

__attribute__((constructor)) static void slow_communicators(void) {
  inside_await_end_s = DEADLINE_S; /* on a busy machine they take their time */
}

typedef struct device {
  cudaStream_t streams[2], backward; /* backward: of BACKWARD_APART */
  cudaEvent_t event;
  bool apart; /* the backward pass is on a stream of its own now */
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  void *copies[2], *buffers[2]; /* of look(), of put() */
} device;

static void device_environment(const program *p, int rank) {
  static const int delays[] = {0, 20, 200};
  if (p->gpu == HOST_ONLY) return;
  ranks_setenv("HOSTCUDA_SEED", (long)(p->seed % 1000000));
  ranks_setenv("HOSTCUDA_DELAY_US", delays[p->seed % 3]);
  ranks_setenv("HOSTCUDA_DEVICES", 16);
  ranks_setenv("LOCAL_RANK", p->share ? 0 : rank % 16);
  if (getenv("CDDP_HOST_ID") != NULL) setenv("NCCL_HOSTID", getenv("CDDP_HOST_ID"), 1);
  if (!p->share) return;
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  setenv("HOSTNCCL_VERSION", "23000", 1);
}

static void check_cuda(cudaError_t e, const char *call) {
  if (e != cudaSuccess) complain("%s: %s", call, cudaGetErrorString(e));
}
#define CUDA(call) check_cuda(call, #call)

static cudaStream_t stream_of(const model *m) {
  const device *d = m->device;
  return d != NULL && d->apart ? d->backward : (cudaStream_t)cddp_stream(m->g);
}

static void device_begin(model *m) {
  unsigned flags = m->p->stream == BLOCKING_STREAM ? cudaStreamDefault : cudaStreamNonBlocking;
  device *d = m->device = (device *)calloc(1, sizeof *d);
  CUDA(cudaStreamCreateWithFlags(&d->streams[0], flags));
  CUDA(cudaStreamCreateWithFlags(&d->streams[1], flags));
  CUDA(cudaStreamCreateWithFlags(&d->backward, flags));
  CUDA(cudaEventCreateWithFlags(&d->event, cudaEventDisableTiming));
  if (m->p->stream != DEFAULT_STREAM) cddp_set_stream(m->g, d->streams[0]);
}

static void drop_graph(model *m) {
  device *d = m->device;
  if (d != NULL && d->exec != NULL) CUDA(cudaGraphExecDestroy(d->exec));
  if (d != NULL && d->graph != NULL) CUDA(cudaGraphDestroy(d->graph));
}

static void device_end(model *m) { /* the group has ended */
  device *d = m->device;
  int i;
  if (d == NULL) return;
  for (i = 0; i < 2; i++) {
    cudaStreamDestroy(d->streams[i]);
    free(d->copies[i]);
    cudaFree(d->buffers[i]);
  }
  cudaStreamDestroy(d->backward);
  cudaEventDestroy(d->event);
  free(d);
}

static int device_ids(void) { return hostnccl_ids(); }

static int device_left(int *threads) {
  int streams, more, fds;
  size_t bytes = hostcuda_left(&streams, &more, &fds);
  *threads += more;
  if (bytes > 0) complain("%zu bytes of device or pinned memory left", bytes);
  if (streams > 0) complain("%d streams left", streams);
  if (hostnccl_communicators() > 0) complain("%d communicators left", hostnccl_communicators());
  if (!shared->p.threads && hostcuda_contexts() > 1) complain("contexts on several GPUs");
  return fds + device_ids();
}

static void *take(model *m, size_t bytes) {
  void *p = NULL;
  if (!m->p->gpu) return calloc(1, bytes);
  CUDA(cudaMalloc(&p, bytes));
  if (p != NULL) zero(m, p, bytes);
  return p;
}

static void give(model *m, void *p) {
  if (m->p->gpu) cudaFree(p);
  else free(p);
}

typedef struct queued {
  void (*run)(const task *);
  task x;
} queued;

static void run_queued(void *arg) { ((queued *)arg)->run(&((queued *)arg)->x); }

static void enqueue(model *m, void (*run)(const task *), task x) {
  hostcuda_op op = {run_queued, free, NULL};
  queued *q;
  if (!m->p->gpu) {
    run(&x);
    return;
  }
  q = (queued *)malloc(sizeof *q);
  if (m->p->stream == CHANGING && run == run_begin) /* between two steps */
    cddp_set_stream(m->g, x.t % 3 == 2 ? NULL : m->device->streams[x.t % 3]);
  q->run = run;
  q->x = x;
  op.arg = q;
  CUDA(hostcuda_enqueue(stream_of(m), op, false));
  if (run == run_rows) CUDA(cudaStreamSynchronize(stream_of(m))); /* cddp's memory */
}

/* The backward stream follows the group's, or the group's the backward stream. */
static void hand_over(model *m, bool to_backward) {
  device *d = m->device;
  cudaStream_t from;
  if (m->p->stream != BACKWARD_APART || d->apart == to_backward) return;
  from = stream_of(m);
  d->apart = to_backward;
  CUDA(cudaEventRecord(d->event, from));
  CUDA(cudaStreamWaitEvent(stream_of(m), d->event, 0));
}

static void *put(model *m, cddp_group *g, uint64_t h, void *x, size_t bytes, int slot) {
  enum { MOST = 1 << 20 };
  device *d = m->device;
  if (!m->p->gpu || h % 2 == 0) return x;
  if (d->buffers[slot] == NULL) CUDA(cudaMalloc(&d->buffers[slot], MOST));
  CUDA(cudaMemcpyAsync(d->buffers[slot], x, bytes, cudaMemcpyHostToDevice,
                       (cudaStream_t)cddp_stream(g)));
  return d->buffers[slot];
}

static cddp_result look(model *m, cddp_group *g, int slot, const void **p, size_t bytes) {
  cudaStream_t s = (cudaStream_t)cddp_stream(g != NULL ? g : m->g);
  cddp_result r = g != NULL ? cddp_synchronize(g) : CDDP_OK;
  if (r != CDDP_OK || !hostcuda_is_device(*p, bytes)) return r;
  free(m->device->copies[slot]);
  m->device->copies[slot] = malloc(bytes);
  CUDA(cudaMemcpyAsync(m->device->copies[slot], *p, bytes, cudaMemcpyDeviceToHost, s));
  CUDA(cudaStreamSynchronize(s));
  *p = m->device->copies[slot];
  return r;
}

static cddp_result run_graph(model *m, uint64_t t) {
  cudaStream_t s = stream_of(m);
  device *d = m->device;
  cddp_result r = CDDP_OK;
  if (d->exec == NULL) {
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    r = train_step(m, t);
    CUDA(cudaStreamEndCapture(s, &d->graph));
    if (r != CDDP_OK || d->graph == NULL) return r;
    CUDA(cudaGraphInstantiate(&d->exec, d->graph, 0));
  }
  CUDA(cudaGraphLaunch(d->exec, s));
  return t % 2 == 1 ? r : cddp_synchronize(m->g);
}
