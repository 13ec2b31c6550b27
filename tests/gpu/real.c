/* real.c - hostcuda.h's functions on the real CUDA and NCCL.

   tests/gpu/gpu.sh suite links nccl_*.c with this file in place of the test double. What it adds:
   - Device memory is managed memory, so that the tests' own operations on streams, which are
     functions of the host, can read and write it. The rest (kernels, NCCL, copies, graphs) is as in
     a program with cudaMalloc.
   - The linker's --wrap sends the calls of the functions listed in WRAPPED through this file, which
     counts them and lets one fail: HOSTCUDA_FAIL, as in hostcuda.h. Calls inside of NCCL are not
     wrapped.
   The real thing cannot be told to stall or to fail by HOSTNCCL_FAIL: tests that need it skip
   themselves (nccl.h: on_double). */
#define _GNU_SOURCE
#include <nccl.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostcuda/hostcuda.h"

/* The functions that are counted: result, name, parameters, arguments. gpu.sh reads the names. */
#define WRAPPED(X)                                                                                 \
  X(cudaError_t, cudaSetDevice, (int d), (d))                                                      \
  X(cudaError_t, cudaGetDevice, (int *d), (d))                                                     \
  X(cudaError_t, cudaMalloc, (void **p, size_t n), (p, n))                                         \
  X(cudaError_t, cudaFree, (void *p), (p))                                                         \
  X(cudaError_t, cudaPointerGetAttributes, (struct cudaPointerAttributes *a, const void *p),      \
    (a, p))                                                                                        \
  X(cudaError_t, cudaMemsetAsync, (void *p, int v, size_t n, cudaStream_t s), (p, v, n, s))        \
  X(cudaError_t, cudaMemcpyAsync,                                                                  \
    (void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s),                 \
    (to, from, n, k, s))                                                                           \
  X(cudaError_t, cudaDeviceSynchronize, (void), ())                                                \
  X(cudaError_t, cudaStreamCreateWithPriority, (cudaStream_t *s, unsigned f, int p), (s, f, p))    \
  X(cudaError_t, cudaStreamSynchronize, (cudaStream_t s), (s))                                     \
  X(cudaError_t, cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned f), (s, e, f))      \
  X(cudaError_t, cudaEventCreateWithFlags, (cudaEvent_t *e, unsigned f), (e, f))                   \
  X(cudaError_t, cudaEventRecord, (cudaEvent_t e, cudaStream_t s), (e, s))                         \
  X(cudaError_t, cudaEventQuery, (cudaEvent_t e), (e))                                             \
  X(cudaError_t, cudaEventSynchronize, (cudaEvent_t e), (e))                                       \
  X(cudaError_t, cudaLaunchKernelExC, (const cudaLaunchConfig_t *c, const void *f, void **a),      \
    (c, f, a))                                                                                     \
  X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId *id), (id))                                       \
  X(ncclResult_t, ncclCommInitRankConfig,                                                          \
    (ncclComm_t *c, int n, ncclUniqueId id, int r, ncclConfig_t *f), (c, n, id, r, f))             \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t c), (c))                                            \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t c), (c))                                              \
  X(ncclResult_t, ncclGroupEnd, (void), ())                                                        \
  X(ncclResult_t, ncclAllReduce,                                                                   \
    (const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,              \
     cudaStream_t q),                                                                              \
    (s, r, n, t, o, c, q))                                                                         \
  X(ncclResult_t, ncclBroadcast,                                                                   \
    (const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t q),  \
    (s, r, n, t, root, c, q))                                                                      \
  X(ncclResult_t, ncclReduceScatter,                                                               \
    (const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,              \
     cudaStream_t q),                                                                              \
    (s, r, n, t, o, c, q))                                                                         \
  X(ncclResult_t, ncclAllGather,                                                                   \
    (const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t q),            \
    (s, r, n, t, c, q))                                                                            \
  X(ncclResult_t, ncclSend,                                                                        \
    (const void *s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t q),           \
    (s, n, t, peer, c, q))

#define DECLARE(type, name, params, args) \
  type __real_##name params;              \
  type __wrap_##name params;
WRAPPED(DECLARE)

enum {
#define NUMBER(type, name, params, args) N_##name,
  WRAPPED(NUMBER)
  NAMES
};
static const char *const names[] = {
#define NAME(type, name, params, args) #name,
    WRAPPED(NAME)};
static _Atomic uint64_t counts[NAMES];

/* Counts a call. Returns the code with which it must fail, or 0. */
static int counted(int name) {
  const char *at = getenv("HOSTCUDA_FAIL"), *rank = getenv("RANK");
  unsigned long long nth, n = (unsigned long long)atomic_fetch_add(&counts[name], 1) + 1;
  char which[64];
  int code, on;
  for (; at != NULL; at = (at = strchr(at, ',')) != NULL ? at + 1 : NULL) {
    on = -1;
    if (sscanf(at, "%63[^:]:%llu:%d@%d", which, &nth, &code, &on) < 3) continue;
    if (strcmp(which, names[name]) != 0 || nth != n) continue;
    if (on < 0 || (rank != NULL && on == atoi(rank))) return code;
  }
  return 0;
}

uint64_t hostcuda_calls(const char *name) {
  int i;
  if (strcmp(name, "kernel") == 0) name = "cudaLaunchKernelExC";
  for (i = 0; i < NAMES; i++)
    if (strcmp(name, names[i]) == 0) return counts[i];
  fprintf(stderr, "real.c does not count %s\n", name);
  abort();
}

/* --- device memory --- */

typedef struct block {
  void *p;
  size_t bytes;
  struct block *next;
} block;

static block *blocks;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic size_t allocated;
static _Atomic int communicators;

static cudaError_t allocate(void **p, size_t bytes) {
  block *b = (block *)malloc(sizeof *b);
  cudaError_t e = cudaMallocManaged(p, bytes, cudaMemAttachGlobal);
  if (b == NULL) abort();
  if (e != cudaSuccess) return free(b), e;
  b->p = *p;
  b->bytes = bytes;
  allocated += bytes;
  pthread_mutex_lock(&blocks_lock);
  b->next = blocks;
  blocks = b;
  pthread_mutex_unlock(&blocks_lock);
  return e;
}

static void forget(void *p) {
  block **at, *b;
  pthread_mutex_lock(&blocks_lock);
  for (at = &blocks; *at != NULL && (*at)->p != p;) at = &(*at)->next;
  if ((b = *at) != NULL) *at = b->next;
  pthread_mutex_unlock(&blocks_lock);
  if (b != NULL) allocated -= b->bytes;
  free(b);
}

size_t hostcuda_bytes(void) { return allocated; }

void *hostcuda_unreadable(size_t bytes) {
  void *p = NULL;
  return __real_cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}

/* --- the wrapped functions --- */

/* After a call that has been counted: what else this file does about it. */
static int done(int name, int code) {
  bool good = code == ncclSuccess || code == ncclInProgress;
  if (good && name == N_ncclCommInitRankConfig) communicators++;
  if ((good && name == N_ncclCommDestroy) || name == N_ncclCommAbort) communicators--;
  return code;
}

static cudaError_t managed_malloc(void **p, size_t bytes) { return allocate(p, bytes); }
static cudaError_t managed_free(void *p) {
  forget(p);
  return __real_cudaFree(p);
}
#define __real_cudaMalloc managed_malloc
#define __real_cudaFree managed_free

#define WRAP(type, name, params, args)                                   \
  type __wrap_##name params {                                            \
    int code = counted(N_##name);                                        \
    return (type)done(N_##name, code != 0 ? code : (int)__real_##name args); \
  }
WRAPPED(WRAP)

/* --- operations on streams --- */

/* Never freed: a graph runs it again. */
static void CUDART_CB run_op(void *arg) {
  const hostcuda_op *op = (const hostcuda_op *)arg;
  op->run(op->arg);
}

cudaError_t hostcuda_enqueue(cudaStream_t stream, hostcuda_op op, bool ordered) {
  hostcuda_op *kept = (hostcuda_op *)malloc(sizeof *kept);
  (void)ordered;
  if (kept == NULL) return cudaErrorMemoryAllocation;
  *kept = op;
  return cudaLaunchHostFunc(stream, run_op, kept);
}

/* --- what is asked of CUDA and NCCL --- */

int hostcuda_contexts(void) { /* by the driver's primary contexts; libcuda need not be linked */
  static int (*state)(int, unsigned *, int *);
  enum cudaDriverEntryPointQueryResult found;
  int n = 0, i, made = 0, active;
  unsigned flags;
  if (cudaGetDeviceCount(&n) != cudaSuccess) return 0;
  if (state == NULL)
    (void)cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", (void **)&state, 12000,
                                           cudaEnableDefault, &found);
  for (i = 0; state != NULL && i < n; i++)
    if (state(i, &flags, &active) == 0) made += active;
  return made;
}

int hostnccl_communicators(void) { return communicators; }
void hostnccl_late(void) {}
void hostnccl_busy(int times) { (void)times; }
