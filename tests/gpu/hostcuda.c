/* The test double of CUDA and NCCL (tests/gpu/hostcuda) is itself tested.

   What is asked of it is what the real ones do: the order of streams and events, the legacy
   stream, captured graphs, memory that the host cannot touch, contexts, injected errors; NCCL
   between processes, with late, lost and aborted ranks. It must also fail where they fail: a test
   double that forgives proves nothing. Each test runs in a process of its own, as CUDA does not
   survive a fork. */
#include "../../cddp.h"

#include "../test.h"

#include <nccl.h>

#include <sys/mman.h>

#include "hostcuda/hostcuda.h"

#define CUDA(call) CHECK_EQ(call, cudaSuccess)
#define NCCL(call) CHECK_EQ(call, ncclSuccess)

enum { N = 1000, RANKS = 4 };

static struct meeting { /* shared by the ranks of a test */
  ncclUniqueId id;
  int made;
} *meeting;

/* Runs fn on n processes with RANK set; env is "NAME=value", or NULL. */
static void processes(int n, void (*fn)(int), const char *name, const char *value) {
  pid_t pid[RANKS];
  int r, status;
  meeting->made = 0;
  for (r = 0; r < n; r++) {
    char text[16];
    if ((pid[r] = fork()) != 0) continue;
    snprintf(text, sizeof text, "%d", r);
    setenv("RANK", text, 1);
    if (name != NULL) setenv(name, value, 1);
    test_failures = test_checks = 0;
    fn(r);
    _exit(test_failures != 0);
  }
  for (r = 0; r < n; r++) {
    CHECK(waitpid(pid[r], &status, 0) == pid[r]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

/* --- streams --- */

static int host_value; /* atomic */

static void set_host_value(void *to) {
  __atomic_store_n(&host_value, *(int *)to, __ATOMIC_RELEASE);
}

/* Until *p is what it must be; fails after a minute. */
static void await(const int *p, int want) {
  double start = test_now();
  while (__atomic_load_n(p, __ATOMIC_ACQUIRE) != want && test_now() - start < 60) usleep(200);
  CHECK_EQ(__atomic_load_n(p, __ATOMIC_ACQUIRE), want);
}

/* a = 1, 2, ... in one stream, copied out by another: right with the event wait, wrong without. */
static int mistakes(bool waits) {
  cudaStream_t writer, reader;
  cudaEvent_t written, taken;
  unsigned char *device, *host;
  int i, wrong = 0;
  CUDA(cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithPriority(&reader, cudaStreamNonBlocking, -1));
  CUDA(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&taken, cudaEventDisableTiming));
  CUDA(cudaMalloc((void **)&device, N));
  CUDA(cudaMallocHost((void **)&host, N));
  for (i = 1; i <= 30; i++) {
    CUDA(cudaMemsetAsync(device, i, N, writer));
    CUDA(cudaEventRecord(written, writer));
    if (waits) CUDA(cudaStreamWaitEvent(reader, written, 0));
    CUDA(cudaMemcpyAsync(host, device, N, cudaMemcpyDeviceToHost, reader));
    CUDA(cudaEventRecord(taken, reader));
    CUDA(cudaStreamWaitEvent(writer, taken, 0));
    CUDA(cudaStreamSynchronize(reader));
    wrong += host[N - 1] != i;
  }
  CUDA(cudaEventDestroy(written));
  CUDA(cudaEventDestroy(taken));
  CUDA(cudaStreamDestroy(writer));
  CUDA(cudaStreamDestroy(reader));
  CUDA(cudaFree(device));
  CUDA(cudaFreeHost(host));
  return wrong;
}

static void streams(int rank) {
  (void)rank;
  CHECK_EQ(mistakes(true), 0);
#ifndef __SANITIZE_THREAD__ /* which would tell of it */
  CHECK(mistakes(false) > 0);
#endif
}

static void legacy_stream(int rank) { /* waits for blocking streams, not for others */
  static int five = 5;
  cudaStream_t s;
  unsigned char *device, host[4];
  int i;
  (void)rank;
  CUDA(cudaStreamCreate(&s));
  CUDA(cudaMalloc((void **)&device, 4));
  for (i = 0; i < 20; i++) {
    CUDA(cudaMemsetAsync(device, i, 4, s));
    CUDA(cudaMemcpy(host, device, 4, cudaMemcpyDeviceToHost));
    CHECK_EQ(host[3], i);
    CUDA(cudaMemset(device, 100 + i, 4));
    CUDA(cudaMemcpyAsync(host, device, 4, cudaMemcpyDeviceToHost, s)); /* pageable: waited for */
    CHECK_EQ(host[3], 100 + i);
  }
  CUDA(cudaLaunchHostFunc(s, set_host_value, &five));
  CUDA(cudaStreamSynchronize(s));
  CHECK_EQ(__atomic_load_n(&host_value, __ATOMIC_ACQUIRE), 5);
  CUDA(cudaStreamDestroy(s));
  CHECK_EQ(cudaStreamSynchronize(s), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
  CUDA(cudaFree(device));
}

static void events(int rank) {
  cudaEvent_t a, b;
  float ms = -1;
  (void)rank;
  CUDA(cudaEventCreate(&a));
  CUDA(cudaEventCreate(&b));
  CUDA(cudaEventQuery(a)); /* never recorded: done */
  CHECK_EQ(cudaEventElapsedTime(&ms, a, b), cudaErrorInvalidResourceHandle);
  CUDA(cudaEventRecord(a, NULL));
  CUDA(cudaEventRecord(b, NULL));
  CUDA(cudaEventSynchronize(b));
  CUDA(cudaEventElapsedTime(&ms, a, b));
  CHECK(ms >= 0);
  CUDA(cudaEventDestroy(a));
  CUDA(cudaEventDestroy(b));
}

/* --- memory --- */

static void memory(int rank) {
  struct cudaPointerAttributes a;
  float *device, *pinned, host[8];
  unsigned char bytes[8];
  int i;
  (void)rank;
  CUDA(cudaMalloc((void **)&device, sizeof host));
  CHECK_EQ((uintptr_t)device % 256, 0);
  CUDA(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
  for (i = 0; i < 8; i++) CHECK(host[i] != host[i]); /* not zero to begin with */
  CHECK_EQ(cudaMemcpy(host, device, sizeof host + 1, cudaMemcpyDeviceToHost),
           cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(device, host, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(host, 0, 4), cudaErrorInvalidValue);
  CUDA(cudaPointerGetAttributes(&a, device + 3));
  CHECK_EQ(a.type, cudaMemoryTypeDevice);
  CUDA(cudaPointerGetAttributes(&a, host));
  CHECK_EQ(a.type, cudaMemoryTypeUnregistered);
  CUDA(cudaMallocHost((void **)&pinned, 64));
  CUDA(cudaPointerGetAttributes(&a, pinned));
  CHECK_EQ(a.type, cudaMemoryTypeHost);
  pinned[0] = 2.5f;
  CUDA(cudaMemcpy(device, pinned, 4, cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(bytes, device, 4, cudaMemcpyDefault));
  CHECK(memcmp(bytes, pinned, 4) == 0);
  CUDA(cudaFreeHost(pinned));
  CUDA(cudaFree(device));
  CHECK_EQ(cudaFree(device), cudaErrorInvalidValue);
  CHECK_EQ(cudaMalloc((void **)&device, (size_t)1 << 60), cudaErrorMemoryAllocation);
}

static void touches(int rank) {
  volatile float *device;
  (void)rank;
  CUDA(cudaMalloc((void **)(uintptr_t)&device, 4));
  signal(SIGSEGV, SIG_DFL);
  _exit(device[0] != 1); /* must not get here */
}

/* Where the processor can forbid it, a host thread that reads device memory dies. */
static void test_protection(void) {
  int status, key = pkey_alloc(0, 0);
  pid_t pid;
  if (key < 0) return;
  pkey_free(key);
  if ((pid = fork()) == 0) touches(0);
  CHECK(waitpid(pid, &status, 0) == pid);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__clang__)
  CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) > 1);
#else
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
#endif
}

/* --- graphs --- */

static void graphs(int rank) {
  cudaStream_t a, b;
  cudaEvent_t fork_event, join;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  unsigned char *device, host[2];
  size_t nodes = 0;
  int i;
  (void)rank;
  CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CUDA(cudaMalloc((void **)&device, 2));
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  CUDA(cudaMemsetAsync(device, 1, 1, a));
  CUDA(cudaEventRecord(fork_event, a));
  CUDA(cudaStreamWaitEvent(b, fork_event, 0));
  CUDA(cudaMemcpyAsync(device + 1, device, 1, cudaMemcpyDeviceToDevice, b));
  CUDA(cudaEventRecord(join, b));
  CUDA(cudaStreamWaitEvent(a, join, 0));
  CUDA(cudaMemsetAsync(device, 7, 1, a));
  CUDA(cudaStreamEndCapture(a, &graph));
  CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
  CHECK_EQ(nodes, 3);
  CHECK_EQ(cudaEventQuery(join), cudaErrorCapturedEvent);
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  for (i = 0; i < 20; i++) {
    CUDA(cudaMemsetAsync(device, 99, 2, a));
    CUDA(cudaGraphLaunch(exec, a));
    CUDA(cudaMemcpyAsync(host, device, 2, cudaMemcpyDeviceToHost, a));
    CHECK_EQ(host[0], 7);
    CHECK_EQ(host[1], 1);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal)); /* what voids a capture */
  CHECK_EQ(cudaStreamSynchronize(a), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed)); /* a query does so in any mode */
  CHECK_EQ(cudaStreamQuery(a), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  CHECK_EQ(cudaStreamQuery(b), cudaSuccess);
  CUDA(cudaStreamSynchronize(b));
  CHECK_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  CUDA(cudaStreamBeginCapture(b, cudaStreamCaptureModeRelaxed));
  CUDA(cudaEventRecord(fork_event, a));
  CHECK_EQ(cudaStreamWaitEvent(b, fork_event, 0), cudaErrorStreamCaptureMerge); /* voids both */
  CHECK_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(cudaStreamEndCapture(b, &graph), cudaErrorStreamCaptureInvalidated);
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  CUDA(cudaEventRecord(fork_event, a));
  CUDA(cudaStreamWaitEvent(b, fork_event, 0));
  CUDA(cudaMemsetAsync(device, 1, 1, b));
  CHECK_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  CHECK_EQ(cudaMalloc((void **)&device, 8), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
}

/* --- failures --- */

static void no_device(int rank) {
  int count = 9;
  (void)rank;
  CHECK_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  CHECK_EQ(count, 0);
  CHECK(strcmp(cudaGetErrorString(cudaErrorNoDevice), "no CUDA-capable device is detected") == 0);
}

static void no_driver(int rank) {
  int count;
  (void)rank;
  CHECK_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
}

static void injected(int rank) { /* cudaMalloc:2:2@1 */
  void *p;
  CUDA(cudaMalloc(&p, 1));
  CHECK_EQ(cudaMalloc(&p, 1), rank == 1 ? cudaErrorMemoryAllocation : cudaSuccess);
  CUDA(cudaMalloc(&p, 1));
}

static void forked(int rank) {
  int count, status;
  pid_t pid;
  (void)rank;
  CUDA(cudaGetDeviceCount(&count));
  if ((pid = fork()) == 0) _exit(cudaSetDevice(0) != cudaErrorInitializationError);
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK_EQ(status, 0);
}

/* --- NCCL --- */

static ncclResult_t poll_state(ncclComm_t c) {
  ncclResult_t state = ncclInProgress;
  double start = test_now();
  while (state == ncclInProgress && test_now() - start < 60) {
    NCCL(ncclCommGetAsyncError(c, &state));
    usleep(50);
  }
  return state;
}

static ncclResult_t settle(ncclComm_t c) { /* polls, as one must, and joins */
  ncclResult_t state = poll_state(c);
  int n;
  return state == ncclSuccess ? ncclCommCount(c, &n) : state;
}

static ncclComm_t join(int rank, int n, int device) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id;
  ncclComm_t c;
  ncclResult_t r;
  config.blocking = 0;
  CUDA(cudaSetDevice(device));
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&meeting->id));
    __atomic_store_n(&meeting->made, 1, __ATOMIC_RELEASE);
  }
  while (!__atomic_load_n(&meeting->made, __ATOMIC_ACQUIRE)) usleep(100);
  id = meeting->id;
  r = ncclCommInitRankConfig(&c, n, id, rank, &config);
  CHECK(r == ncclInProgress || r == ncclSuccess);
  return c;
}

static float *upload(const float *x, size_t n) {
  float *d;
  CUDA(cudaMalloc((void **)&d, n * sizeof *d));
  CUDA(cudaMemcpy(d, x, n * sizeof *x, cudaMemcpyHostToDevice));
  CUDA(cudaDeviceSynchronize());
  return d;
}

static ncclResult_t sum(float *d, ncclComm_t c, cudaStream_t s) {
  return ncclAllReduce(d, d, 1, ncclFloat, ncclSum, c, s);
}

static ncclResult_t begin(ncclComm_t c, ncclResult_t r) {
  return r == ncclInProgress || r == ncclSuccess ? settle(c) : r;
}

static void collective(int rank) {
  enum { COUNT = 40000 }; /* several chunks */
  static float x[RANKS * COUNT], y[RANKS * COUNT];
  ncclComm_t c = join(rank, RANKS, rank);
  cudaStream_t s;
  float *a, *b;
  int i, bad = 0;
  CHECK_EQ(settle(c), ncclSuccess);
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (i = 0; i < RANKS * COUNT; i++) x[i] = (float)(i % 1000 + rank);
  a = upload(x, RANKS * COUNT);
  b = upload(x, RANKS * COUNT);
  NCCL(begin(c, ncclAllReduce(a, b, COUNT, ncclFloat, ncclAvg, c, s)));
  CUDA(cudaMemcpyAsync(y, b, COUNT * 4, cudaMemcpyDeviceToHost, s));
  for (i = 0; i < COUNT; i++) bad += y[i] != (float)(i % 1000) + (RANKS - 1) / 2.0f;
  NCCL(begin(c, ncclReduceScatter(a, b, COUNT, ncclFloat, ncclSum, c, s)));
  CUDA(cudaMemcpyAsync(y, b, COUNT * 4, cudaMemcpyDeviceToHost, s));
  for (i = 0; i < COUNT; i++)
    bad += y[i] != (float)(RANKS * ((i + rank * COUNT) % 1000) + RANKS * (RANKS - 1) / 2);
  NCCL(begin(c, ncclAllGather(a, b, COUNT, ncclFloat, c, s)));
  CUDA(cudaMemcpyAsync(y, b, sizeof y, cudaMemcpyDeviceToHost, s));
  for (i = 0; i < RANKS * COUNT; i++) bad += y[i] != (float)(i % COUNT % 1000 + i / COUNT);
  NCCL(begin(c, ncclBroadcast(a, a, COUNT, ncclFloat, 2, c, s)));
  CUDA(cudaMemcpyAsync(y, a, COUNT * 4, cudaMemcpyDeviceToHost, s));
  for (i = 0; i < COUNT; i++) bad += y[i] != (float)(i % 1000 + 2);
  CHECK_EQ(bad, 0);
  NCCL(ncclGroupStart()); /* all to all */
  for (i = 0; i < RANKS; i++) {
    NCCL(ncclSend(a + i * 9000, 9000, ncclFloat, i, c, s));
    NCCL(ncclRecv(b + i * 9000, 9000, ncclFloat, i, c, s));
  }
  NCCL(begin(c, ncclGroupEnd()));
  CUDA(cudaMemcpyAsync(y, b, RANKS * 9000 * 4, cudaMemcpyDeviceToHost, s));
  for (i = 0; i < RANKS; i++) CHECK_EQ(y[i * 9000 + 5], (rank * 9000 + 5) % 1000 + 2);
  NCCL(begin(c, ncclCommFinalize(c)));
  NCCL(ncclCommDestroy(c));
}

static void split(int rank) { /* odd and even, backwards */
  ncclComm_t c = join(rank, RANKS, rank), half;
  float x = (float)rank, *d = upload(&x, 1);
  cudaStream_t s;
  int r = -1, n = -1;
  CHECK_EQ(settle(c), ncclSuccess);
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  NCCL(begin(c, ncclCommSplit(c, rank == 3 ? NCCL_SPLIT_NOCOLOR : rank % 2, -rank, &half, NULL)));
  if (rank == 3) {
    CHECK(half == NULL);
  } else {
    CHECK_EQ(settle(half), ncclSuccess);
    NCCL(ncclCommUserRank(half, &r));
    NCCL(ncclCommCount(half, &n));
    CHECK_EQ(n, rank == 1 ? 1 : 2);
    CHECK_EQ(r, rank == 0);
    NCCL(begin(half, ncclAllReduce(d, d, 1, ncclFloat, ncclSum, half, s)));
    CUDA(cudaMemcpyAsync(&x, d, 4, cudaMemcpyDeviceToHost, s));
    CHECK_EQ(x, rank == 1 ? 1 : 2);
    NCCL(ncclCommDestroy(half));
  }
  NCCL(ncclCommDestroy(c));
}

static void duplicate(int rank) {
  ncclComm_t c = join(rank, 2, 0);
  CHECK_EQ(settle(c), ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(c), "Duplicate GPU detected") != NULL);
  NCCL(ncclCommAbort(c));
}

/* The others' streams hang until they abort. */
static void lost(int rank) {
  ncclComm_t c = join(rank, 2, rank);
  float x = 1, *d = upload(&x, 1);
  cudaStream_t s;
  CHECK_EQ(settle(c), ncclSuccess);
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  NCCL(begin(c, sum(d, c, s))); /* they are connected */
  CUDA(cudaStreamSynchronize(s));
  if (rank == 1) {
    usleep(200000);
    return; /* never comes */
  }
  NCCL(begin(c, ncclAllReduce(d, d, 1, ncclFloat, ncclSum, c, s)));
  usleep(50000);
  CHECK_EQ(cudaStreamQuery(s), cudaErrorNotReady);
  NCCL(ncclCommAbort(c));
  CUDA(cudaStreamSynchronize(s));
}

static void asynchronous_error(int rank) { /* error:2:6@0 */
  ncclComm_t c = join(rank, 2, rank);
  float x = 1, *d = upload(&x, 1);
  ncclResult_t state = ncclSuccess;
  cudaStream_t s;
  double start = test_now();
  int i;
  CHECK_EQ(settle(c), ncclSuccess);
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (i = 0; i < 2; i++) {
    begin(c, ncclAllReduce(d, d, 1, ncclFloat, ncclSum, c, s));
    if (i == 0) CUDA(cudaStreamSynchronize(s));
  }
  while (rank == 0 && state == ncclSuccess && test_now() - start < 60)
    NCCL(ncclCommGetAsyncError(c, &state));
  CHECK_EQ(state, rank == 0 ? ncclRemoteError : ncclSuccess);
  NCCL(ncclCommAbort(c));
  CUDA(cudaStreamSynchronize(s));
}

static void ipc(int rank) { /* rank 0's memory, written by rank 1 */
  cudaIpcMemHandle_t handle;
  int *p, x = 5;
  if (rank == 0) {
    CUDA(cudaMalloc((void **)&p, 4));
    CUDA(cudaMemcpy(p, &x, 4, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaIpcGetMemHandle(&handle, p));
    memcpy(&meeting->id, &handle, sizeof handle);
    __atomic_store_n(&meeting->made, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&meeting->made, __ATOMIC_ACQUIRE) != 2) usleep(100);
    CUDA(cudaMemcpy(&x, p, 4, cudaMemcpyDeviceToHost));
    CHECK_EQ(x, 6);
    return;
  }
  while (!__atomic_load_n(&meeting->made, __ATOMIC_ACQUIRE)) usleep(100);
  memcpy(&handle, &meeting->id, sizeof handle);
  CUDA(cudaIpcOpenMemHandle((void **)&p, handle, cudaIpcMemLazyEnablePeerAccess));
  CUDA(cudaMemcpy(&x, p, 4, cudaMemcpyDeviceToHost));
  CHECK_EQ(x, 5);
  x = 6;
  CUDA(cudaMemcpy(p, &x, 4, cudaMemcpyHostToDevice));
  CUDA(cudaIpcCloseMemHandle(p));
  __atomic_store_n(&meeting->made, 2, __ATOMIC_RELEASE);
}

/* The first operation between ranks waits for all of them, the second for none. */
static void connects(int rank) {
  ncclComm_t c = join(rank, 2, rank);
  float x = 1, *d = upload(&x, 1);
  double start;
  CHECK_EQ(settle(c), ncclSuccess);
  start = test_now();
  if (rank == 1) usleep(100000);
  NCCL(begin(c, sum(d, c, NULL)));
  if (rank == 0) CHECK(test_now() - start > 0.05);
  CUDA(cudaStreamSynchronize(NULL));
  start = test_now();
  if (rank == 1) usleep(2000000);
  NCCL(begin(c, sum(d, c, NULL)));
  if (rank == 0) CHECK(test_now() - start < 1.5);
  CUDA(cudaStreamSynchronize(NULL));
  NCCL(ncclCommDestroy(c));
}

/* --- contexts of devices --- */

static int host_waits; /* atomic */

static void wait_on_host(void *arg) {
  (void)arg;
  while (__atomic_load_n(&host_waits, __ATOMIC_ACQUIRE)) usleep(200);
}

static void *free_memory(void *p) {
  CUDA(cudaSetDevice(1));
  CUDA(cudaFree(p));
  return NULL;
}

static void *query_event(void *arg) {
  CUDA(cudaSetDevice(1));
  (void)cudaEventQuery((cudaEvent_t)arg);
  __atomic_store_n(&host_value, 1, __ATOMIC_RELEASE);
  return NULL;
}

/* cudaFree locks the context while it waits: nobody asks for an event meanwhile. */
static void contexts(int rank) {
  pthread_t threads[2];
  cudaStream_t s;
  cudaEvent_t e;
  int devices;
  void *p;
  (void)rank;
  CUDA(cudaGetDeviceCount(&devices));
  CHECK_EQ(hostcuda_contexts(), 0);
  CUDA(cudaSetDevice(1));
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  CUDA(cudaMalloc(&p, 16));
  CHECK_EQ(hostcuda_contexts(), 1);
  host_waits = 1;
  CUDA(cudaLaunchHostFunc(s, wait_on_host, NULL));
  CHECK(pthread_create(&threads[0], NULL, free_memory, p) == 0);
  usleep(50000);
  CHECK(pthread_create(&threads[1], NULL, query_event, e) == 0);
  usleep(50000);
  CHECK_EQ(__atomic_load_n(&host_value, __ATOMIC_ACQUIRE), 0);
  __atomic_store_n(&host_waits, 0, __ATOMIC_RELEASE);
  pthread_join(threads[0], NULL);
  pthread_join(threads[1], NULL);
  CHECK_EQ(__atomic_load_n(&host_value, __ATOMIC_ACQUIRE), 1);
  CUDA(cudaSetDevice(0));
  CHECK_EQ(hostcuda_contexts(), 2);
}

/* --- what NCCL does not forgive --- */

static ncclComm_t single(void) { /* a communicator of one */
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id;
  ncclComm_t c;
  config.blocking = 0;
  NCCL(ncclGetUniqueId(&id));
  CHECK_EQ(ncclCommInitRankConfig(&c, 1, id, 0, &config), ncclInProgress);
  CHECK_EQ(poll_state(c), ncclSuccess);
  return c;
}

static ncclComm_t ready(void) {
  ncclComm_t c = single();
  CHECK_EQ(settle(c), ncclSuccess);
  return c;
}

static cudaStream_t other_stream(void) {
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  return s;
}

typedef struct ending { /* of a communicator, by another thread */
  ncclResult_t (*by)(ncclComm_t);
  ncclComm_t comm;
  pthread_t thread;
  int done;
} ending;

static void *end_comm(void *arg) {
  ending *e = (ending *)arg;
  NCCL(e->by(e->comm));
  __atomic_store_n(&e->done, 1, __ATOMIC_RELEASE);
  return NULL;
}

static void start_end(ending *e, ncclResult_t (*by)(ncclComm_t), ncclComm_t c) {
  e->by = by;
  e->comm = c;
  e->done = 0;
  CHECK(pthread_create(&e->thread, NULL, end_comm, e) == 0);
}

static void has_ended(ending *e) {
  await(&e->done, 1);
  pthread_join(e->thread, NULL);
}

static void still_waits(const ending *e) { /* its chance to be wrong */
  usleep(20000);
  CHECK_EQ(__atomic_load_n(&e->done, __ATOMIC_ACQUIRE), 0);
}

/* The child appears when the parent's state is ncclSuccess; until then the parent is not usable. */
static void late_child(int rank) {
  ncclComm_t c = join(rank, 2, rank), child, children[1];
  ncclResult_t state;
  float x = 1, *d = upload(&x, 1);
  cudaStream_t s = other_stream();
  CHECK_EQ(settle(c), ncclSuccess);
  memset(&child, 1, sizeof child);
  children[0] = NULL;
  if (rank == 1) await(&meeting->made, 2);
  NCCL(ncclCommSplit(c, 0, rank, &child, NULL));
  if (rank == 0) {
    CHECK(__atomic_load_n(&child, __ATOMIC_ACQUIRE) == NULL);
    NCCL(ncclCommGetAsyncError(c, &state));
    CHECK_EQ(state, ncclInProgress);
    CHECK_EQ(ncclCommGetAsyncError(NULL, &state), ncclInvalidArgument);
    __atomic_store_n(&meeting->made, 2, __ATOMIC_RELEASE);
  }
  CHECK_EQ(settle(c), ncclSuccess);
  NCCL(ncclCommGetAsyncError(child, &state));
  CHECK_EQ(state, ncclSuccess);
  NCCL(begin(child, sum(d, child, s)));
  if (rank == 1) {
    NCCL(ncclCommAbort(c));
    NCCL(ncclCommDestroy(child));
    return;
  }
  NCCL(ncclCommSplit(c, 0, rank, &children[0], NULL)); /* alone: it never ends */
  CHECK_EQ(sum(d, c, s), ncclInvalidArgument);
  NCCL(ncclCommGetAsyncError(c, &state));
  CHECK_EQ(state, ncclInvalidArgument);
  NCCL(ncclCommAbort(c));
  NCCL(ncclCommAbort(children[0])); /* NULL, or one that failed */
  NCCL(ncclCommDestroy(child));
}

/* Abort waits for what is ahead of the communicator's operation in a stream: stall:1. */
static void abort_behind(int rank) {
  ncclComm_t a = ready(), b = ready();
  float x = 1, *d = upload(&x, 1);
  cudaStream_t s = other_stream();
  ending e;
  (void)rank;
  NCCL(begin(b, sum(d, b, s)));
  NCCL(begin(a, sum(d, a, s)));
  start_end(&e, ncclCommAbort, a);
  still_waits(&e);
  NCCL(ncclCommAbort(b));
  has_ended(&e);
  CUDA(cudaStreamSynchronize(s));
}

/* Finalize does, too; abort ends it. */
static void finalize_behind(int rank) {
  ncclComm_t a = ready();
  ncclResult_t state;
  float x = 1, *d = upload(&x, 1);
  (void)rank;
  NCCL(begin(a, sum(d, a, other_stream())));
  CHECK_EQ(ncclCommFinalize(a), ncclInProgress);
  usleep(20000);
  NCCL(ncclCommGetAsyncError(a, &state));
  CHECK_EQ(state, ncclInProgress);
  NCCL(ncclCommAbort(a));
}

/* ... and until no graph has an operation of it; destroy, too. */
static void end_of_captured(ncclResult_t (*by)(ncclComm_t)) {
  ncclComm_t a = ready();
  float x = 1, *d = upload(&x, 1);
  cudaStream_t s = other_stream();
  cudaGraphExec_t exec;
  cudaGraph_t graph;
  size_t nodes = 0;
  ending e;
  CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  CHECK_EQ(sum(d, a, s), ncclInProgress);
  CHECK_EQ(settle(a), ncclSuccess); /* in the graph not before */
  CUDA(cudaStreamEndCapture(s, &graph));
  CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
  CHECK_EQ(nodes, 1);
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaGraphLaunch(exec, s));
  NCCL(begin(a, sum(d, a, s)));
  CUDA(cudaStreamSynchronize(s));
  start_end(&e, by, a);
  still_waits(&e);
  CUDA(cudaGraphDestroy(graph));
  still_waits(&e);
  CUDA(cudaGraphExecDestroy(exec));
  has_ended(&e);
}

static void captured(int rank) {
  (void)rank;
  end_of_captured(ncclCommAbort);
  end_of_captured(ncclCommDestroy);
}

/* Rank 0 destroys: it waits until rank 1 has aborted and rank 2 has ended. */
static void destroy_waits(int rank) {
  ncclComm_t c = join(rank, 3, rank);
  CHECK_EQ(settle(c), ncclSuccess);
  if (rank == 0) {
    NCCL(ncclCommDestroy(c));
    CHECK_EQ(__atomic_load_n(&meeting->made, __ATOMIC_ACQUIRE), 3);
  } else if (rank == 1) {
    usleep(20000);
    __atomic_store_n(&meeting->made, 2, __ATOMIC_RELEASE);
    NCCL(ncclCommAbort(c));
  } else {
    await(&meeting->made, 2);
    usleep(20000);
    __atomic_store_n(&meeting->made, 3, __ATOMIC_RELEASE);
  }
}

static void in_progress(int rank) { /* in any stream; HOSTNCCL_VERSION: a new one */
  ncclComm_t c = ready();
  float x = 1, *d = upload(&x, 1);
  (void)rank;
  CHECK_EQ(sum(d, c, NULL), ncclInProgress);
  CHECK_EQ(poll_state(c), ncclSuccess);
  CHECK_EQ(sum(d, c, other_stream()), ncclInProgress);
  CHECK_EQ(poll_state(c), ncclSuccess);
  NCCL(ncclGroupStart());
  NCCL(sum(d, c, cudaStreamLegacy));
  CHECK_EQ(ncclGroupEnd(), ncclInProgress);
  CHECK_EQ(settle(c), ncclSuccess);
  NCCL(ncclCommDestroy(c));
}

static void old_success(int rank) { /* the same of an old one */
  ncclComm_t a = ready(), b = ready();
  float x = 1, *d = upload(&x, 1);
  (void)rank;
  NCCL(sum(d, a, NULL));
  CHECK_EQ(settle(a), ncclSuccess);
  NCCL(sum(d, b, NULL));
  CHECK_EQ(poll_state(b), ncclSuccess);
  NCCL(sum(d, b, NULL)); /* on the same one polling is enough */
  CHECK_EQ(settle(b), ncclSuccess);
  NCCL(ncclCommDestroy(a));
  NCCL(ncclCommDestroy(b));
}

static void blocking(int rank) { /* everything in its place when a call returns */
  float x = 1, *d = upload(&x, 1);
  ncclUniqueId id;
  ncclComm_t c, child;
  (void)rank;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclCommInitRank(&c, 1, id, 0));
  NCCL(sum(d, c, cudaStreamPerThread));
  NCCL(ncclCommSplit(c, 0, 0, &child, NULL));
  CHECK_EQ(ncclAllReduce(NULL, d, 1, ncclFloat, ncclSum, child, NULL), ncclInvalidArgument);
  NCCL(sum(d, child, NULL));
  NCCL(ncclCommFinalize(child));
  NCCL(ncclCommDestroy(child));
  NCCL(ncclCommDestroy(c));
}

static void argument_error(int rank) { /* stays, and in a group is everybody's */
  ncclComm_t a = ready(), b = ready();
  float x = 1, *d = upload(&x, 1);
  ncclResult_t state;
  (void)rank;
  CHECK_EQ(ncclAllReduce(NULL, d, 1, ncclFloat, ncclSum, a, NULL), ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(b), "not in device memory") != NULL);
  CHECK_EQ(sum(d, a, NULL), ncclInvalidArgument);
  CHECK_EQ(ncclCommDestroy(a), ncclInvalidArgument);
  NCCL(ncclGroupEnd()); /* which that has left open */
  CHECK_EQ(ncclGroupEnd(), ncclInvalidUsage);
  NCCL(ncclGroupStart());
  NCCL(sum(d, b, NULL));
  CHECK_EQ(sum(d, a, NULL), ncclInvalidArgument);
  CHECK_EQ(ncclGroupEnd(), ncclInvalidArgument);
  NCCL(ncclCommGetAsyncError(b, &state));
  CHECK_EQ(state, ncclInvalidArgument);
  NCCL(ncclCommAbort(a));
  NCCL(ncclCommAbort(b));
}

static int legacy_waits = 1;
static void wait_on_legacy(void *arg) {
  (void)arg;
  await(&legacy_waits, 0);
}

static void late_copies(int rank) { /* while the legacy stream is busy */
  cudaStream_t s = other_stream();
  unsigned char *device, host[2] = {7, 7}, got[2];
  (void)rank;
  CUDA(cudaMalloc((void **)&device, 2));
  CUDA(cudaLaunchHostFunc(NULL, wait_on_legacy, NULL));
  CUDA(cudaMemcpy(device, host, 1, cudaMemcpyHostToDevice));
  CUDA(cudaMemset(device + 1, 8, 1));
  host[0] = 9;
  CUDA(cudaMemcpyAsync(got, device, 2, cudaMemcpyDeviceToHost, s));
  CHECK(got[0] == 0xff && got[1] == 0xff);
  __atomic_store_n(&legacy_waits, 0, __ATOMIC_RELEASE);
  CUDA(cudaMemcpy(got, device, 2, cudaMemcpyDeviceToHost));
  CHECK(got[0] == 7 && got[1] == 8);
}

static void captured_legacy(int rank) {
  enum cudaStreamCaptureStatus status;
  cudaStream_t blocking, s = other_stream();
  cudaGraph_t graph;
  cudaEvent_t e;
  (void)rank;
  CUDA(cudaStreamCreate(&blocking));
  CUDA(cudaEventCreate(&e));
  CUDA(cudaStreamIsCapturing(NULL, &status));
  CHECK_EQ(status, cudaStreamCaptureStatusNone);
  CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
  CHECK_EQ(cudaStreamIsCapturing(NULL, &status), cudaErrorStreamCaptureImplicit);
  CUDA(cudaStreamEndCapture(blocking, &graph));
  CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  CHECK_EQ(cudaStreamQuery(NULL), cudaErrorStreamCaptureImplicit);
  CHECK_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  CHECK_EQ(cudaStreamSynchronize(NULL), cudaErrorStreamCaptureImplicit);
  CHECK_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  CUDA(cudaStreamIsCapturing(NULL, &status));
  CUDA(cudaEventRecord(e, s));
  CHECK_EQ(cudaEventQuery(e), cudaErrorCapturedEvent);
  CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
}

/* fn says so in its last sentence, and does not come back. */
static void dies(void (*fn)(void), const char *version, const char *sentence) {
  char text[4096];
  size_t n = 0;
  ssize_t more;
  int fd[2], status;
  pid_t pid;
  CHECK(pipe(fd) == 0);
  if ((pid = fork()) == 0) {
    dup2(fd[1], STDERR_FILENO);
    setenv("HOSTNCCL_VERSION", version, 1);
    fn();
    _exit(0);
  }
  close(fd[1]);
  while (n < sizeof text - 1 && (more = read(fd[0], text + n, sizeof text - 1 - n)) > 0)
    n += (size_t)more;
  text[n] = 0;
  close(fd[0]);
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  CHECK(strstr(text, sentence) != NULL);
}

static void unjoined(void) {
  ncclComm_t a = ready(), b = ready();
  float x = 1, *d = upload(&x, 1);
  NCCL(sum(d, a, NULL));
  CHECK_EQ(poll_state(a), ncclSuccess);
  sum(d, b, NULL);
}

static void unjoined_init(void) {
  single();
  single();
}

static void per_thread(void) {
  ncclComm_t c = ready();
  float x = 1, *d = upload(&x, 1);
  sum(d, c, cudaStreamPerThread);
}

static void after_abort(void) {
  ncclComm_t c = ready();
  ncclResult_t state;
  NCCL(ncclCommAbort(c));
  ncclCommGetAsyncError(c, &state);
}

static void test_deaths(void) {
  dies(unjoined, "22500", "the thread's last job on another is not joined");
  dies(unjoined_init, "22500", "the thread's last job on another is not joined");
  dies(per_thread, "22809", "cudaStreamPerThread");
  dies(after_abort, "22809", "after its end");
}

static void test_connects(void) { processes(2, connects, NULL, NULL); }
static void test_contexts(void) { processes(1, contexts, NULL, NULL); }
static void test_late_child(void) { processes(2, late_child, NULL, NULL); }
static void test_destroy(void) { processes(3, destroy_waits, NULL, NULL); }
static void test_abort(void) {
  processes(1, abort_behind, "HOSTNCCL_FAIL", "stall:1");
  processes(1, finalize_behind, "HOSTNCCL_FAIL", "stall:1");
  processes(1, captured, "HOSTNCCL_VERSION", "22809");
}
static void test_progress(void) {
  processes(1, in_progress, "HOSTNCCL_VERSION", "22809");
  processes(1, old_success, "HOSTNCCL_VERSION", "22500");
  processes(1, blocking, NULL, NULL);
}
static void test_argument_error(void) { processes(1, argument_error, NULL, NULL); }
static void test_late_copies(void) { processes(1, late_copies, NULL, NULL); }
static void test_captured_legacy(void) { processes(1, captured_legacy, NULL, NULL); }
static void test_streams(void) { processes(1, streams, "HOSTCUDA_DELAY_US", "2000"); }
static void test_legacy_stream(void) { processes(1, legacy_stream, NULL, NULL); }
static void test_events(void) { processes(1, events, NULL, NULL); }
static void test_memory(void) { processes(1, memory, NULL, NULL); }
static void test_graphs(void) { processes(1, graphs, NULL, NULL); }
static void test_no_device(void) { processes(1, no_device, "HOSTCUDA_DEVICES", "0"); }
static void test_no_driver(void) { processes(1, no_driver, "HOSTCUDA_DEVICES", "no-driver"); }
static void test_injected(void) { processes(2, injected, "HOSTCUDA_FAIL", "cudaMalloc:2:2@1"); }
static void test_forked(void) { processes(1, forked, NULL, NULL); }
static void test_ipc(void) { processes(2, ipc, NULL, NULL); }
static void test_collectives(void) { processes(RANKS, collective, NULL, NULL); }
static void test_split(void) { processes(RANKS, split, NULL, NULL); }
static void test_duplicate(void) { processes(2, duplicate, NULL, NULL); }
static void test_lost(void) { processes(2, lost, NULL, NULL); }
static void test_error(void) { processes(2, asynchronous_error, "HOSTNCCL_FAIL", "error:2:6@0"); }

int main(void) {
  meeting = (struct meeting *)mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  RUN(test_streams);
  RUN(test_legacy_stream);
  RUN(test_events);
  RUN(test_memory);
  RUN(test_protection);
  RUN(test_graphs);
  RUN(test_no_device);
  RUN(test_no_driver);
  RUN(test_injected);
  RUN(test_forked);
  RUN(test_ipc);
  RUN(test_collectives);
  RUN(test_split);
  RUN(test_duplicate);
  RUN(test_lost);
  RUN(test_error);
  RUN(test_connects);
  RUN(test_contexts);
  RUN(test_late_child);
  RUN(test_abort);
  RUN(test_destroy);
  RUN(test_progress);
  RUN(test_argument_error);
  RUN(test_late_copies);
  RUN(test_captured_legacy);
  RUN(test_deaths);
  return TEST_END();
}
