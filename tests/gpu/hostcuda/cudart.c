/* cudart.c - the CUDA runtime of hostcuda: a test double, see hostcuda.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "hostcuda.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum { MAX_DEVICES = 16, MAX_NAMES = 256, MAX_FAILS = 16 };

/* Everything below is guarded by g.lock unless it says otherwise; g.changed is broadcast whenever
   an operation or an event is done. */

typedef struct entry { /* an operation in a stream's queue */
  struct entry *next;
  hostcuda_op op;
  int wait_count; /* of the legacy stream's rules: these must have come so far */
  struct { struct CUstream_st *stream; uint64_t seq; } waits[];
} entry;

typedef struct deps { int *node, count; } deps;

struct CUstream_st {
  struct CUstream_st *next;
  int device, priority, refs;
  unsigned flags;
  bool started, closing;
  entry *head, **tail;
  uint64_t enqueued, done, random;
  pthread_cond_t work;
  struct capture *capture; /* what is recording this stream, and what its next operation follows */
  deps last;
};

struct CUevent_st {
  int refs, device;
  unsigned flags;
  uint64_t recorded, completed;
  double time;
  struct capture *capture; /* compared only: may be over */
  uint64_t capture_id;
  deps at;
};

struct CUgraphNode_st { hostcuda_op op; deps after; };

struct CUgraph_st {
  struct CUgraphNode_st *nodes;
  int count, refs;
};

struct CUgraphExec_st { cudaGraph_t graph; uint64_t random; };

typedef struct capture {
  struct capture *next;
  uint64_t id;
  cudaGraph_t graph;
  cudaStream_t origin;
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  bool invalid;
  int ordered; /* the last ordered node, or -1 */
} capture;

typedef struct block { /* one allocation */
  struct block *next;
  char *base, *map; /* the user's bytes; the mapping with its guard pages, NULL: malloc'ed */
  size_t size, map_size;
  enum cudaMemoryType type;
  int device;
  bool imported;
  uint64_t offset; /* in the memfd */
} block;

typedef struct failure { char name[40]; long nth, code; int rank; long seen; } failure;

static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool ready;
  pid_t pid;
  cudaError_t broken, sticky;
  int devices, key, memory;
  uint64_t seed, streams_made, memory_end, capture_ids;
  size_t used[MAX_DEVICES], limit;
  long delay_us;
  bool protects, launches_block;
  cudaStream_t streams, legacy[MAX_DEVICES];
  capture *captures;
  block *blocks;
  bool context[MAX_DEVICES];             /* this process has made one there */
  pthread_mutex_t contexts[MAX_DEVICES]; /* held by calls that wait for the device */
  uint64_t dice;
  failure fails[MAX_FAILS];
  int fail_count;
  struct { const char *name; uint64_t calls; } names[MAX_NAMES];
  int name_count;
  const void *loaded[MAX_NAMES]; /* kernels that have been launched */
  int loaded_count;
} g = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .memory = -1};

static _Thread_local cudaError_t t_last;
static _Thread_local int t_device;
static _Thread_local bool t_in_callback;
static _Thread_local cudaStream_t t_streams[MAX_DEVICES];
static _Thread_local enum cudaStreamCaptureMode t_mode;

static void lock(void) { pthread_mutex_lock(&g.lock); }
static void unlock(void) { pthread_mutex_unlock(&g.lock); }

static cudaError_t unlocked(cudaError_t e) {
  unlock();
  return hostcuda_leave(e);
}

static void *allocate(size_t bytes) {
  void *p = calloc(1, bytes != 0 ? bytes : 1);
  if (p == NULL) abort(); /* of the test's own memory: no CUDA error */
  return p;
}

uint64_t hostcuda_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double hostcuda_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- start, failures, errors --- */

static long number(const char *name, long otherwise) {
  const char *s = getenv(name);
  return s != NULL && *s != 0 ? atol(s) : otherwise;
}

static void read_failures(const char *s) {
  while (s != NULL && *s != 0 && g.fail_count < MAX_FAILS) {
    failure *f = &g.fails[g.fail_count];
    f->rank = -1;
    if (sscanf(s, "%39[^:]:%ld:%ld@%d", f->name, &f->nth, &f->code, &f->rank) < 3) {
      fprintf(stderr, "hostcuda: HOSTCUDA_FAIL has no NAME:N:CODE at '%s'\n", s);
      abort();
    }
    g.fail_count++;
    s = strchr(s, ',');
    if (s != NULL) s++;
  }
}

static void start(void) { /* g.lock is held */
  const char *devices = getenv("HOSTCUDA_DEVICES");
  pthread_mutexattr_t recursive;
  int i;
  if (g.ready) return;
  g.ready = true;
  g.pid = getpid();
  g.devices = devices != NULL && *devices != 0 ? atoi(devices) : 8;
  if (devices != NULL && strcmp(devices, "no-driver") == 0) g.broken = cudaErrorInsufficientDriver;
  else if (g.devices <= 0) g.broken = cudaErrorNoDevice;
  if (g.devices > MAX_DEVICES) g.devices = MAX_DEVICES;
  g.limit = (size_t)number("HOSTCUDA_MEMORY_MB", 4096) << 20;
  g.seed = (uint64_t)number("HOSTCUDA_SEED", 1) * 1000003 + (uint64_t)number("RANK", 0);
  g.delay_us = number("HOSTCUDA_DELAY_US", 50);
  g.launches_block = number("CUDA_LAUNCH_BLOCKING", 0) != 0;
  read_failures(getenv("HOSTCUDA_FAIL"));
  g.key = -1;
  if (g.broken == cudaSuccess && number("HOSTCUDA_PROTECT", 1) != 0)
    g.key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
  g.protects = g.key >= 0;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  for (i = 0; i < MAX_DEVICES; i++) pthread_mutex_init(&g.contexts[i], &recursive);
  pthread_mutexattr_destroy(&recursive);
}

static uint64_t *counter(const char *name) { /* g.lock is held */
  int i;
  for (i = 0; i < g.name_count; i++)
    if (strcmp(g.names[i].name, name) == 0) return &g.names[i].calls;
  if (g.name_count == MAX_NAMES) abort();
  g.names[g.name_count].name = name;
  return &g.names[g.name_count++].calls;
}

uint64_t hostcuda_calls(const char *name) {
  uint64_t calls = 0;
  int i;
  lock();
  for (i = 0; i < g.name_count; i++)
    if (strcmp(g.names[i].name, name) == 0) calls = g.names[i].calls;
  unlock();
  return calls;
}

uint64_t hostcuda_seed(void) { return g.seed; }
int hostcuda_device(void) { return t_device; }

static int injected(const char *name) { /* g.lock is held */
  int i, code = 0;
  start();
  ++*counter(name);
  for (i = 0; i < g.fail_count; i++) {
    failure *f = &g.fails[i];
    if (strcmp(f->name, name) != 0 || (f->rank >= 0 && f->rank != number("RANK", 0))) continue;
    if (++f->seen == f->nth) code = (int)f->code;
  }
  return code;
}

int hostcuda_injected(const char *name) {
  int code;
  lock();
  code = injected(name);
  unlock();
  return code;
}

void hostcuda_context(int device) {
  if (number("HOSTCUDA_CONTEXTS", 1) == 0) {
    fprintf(stderr, "HOSTCUDA_CONTEXTS=0, but the process makes a context on cuda:%d\n", device);
    _exit(86);
  }
  __atomic_store_n(&g.context[device], true, __ATOMIC_RELAXED);
  pthread_mutex_lock(&g.contexts[device]);
  pthread_mutex_unlock(&g.contexts[device]);
}

void *hostcuda_unreadable(size_t bytes) {
  void *p = NULL;
  return cudaMalloc(&p, bytes) == cudaSuccess && g.protects ? p : NULL;
}

int hostcuda_contexts(void) {
  int i, n = 0;
  for (i = 0; i < MAX_DEVICES; i++) n += __atomic_load_n(&g.context[i], __ATOMIC_RELAXED);
  return n;
}

static bool needs_context(const char *name) {
  static const char *const others[] = {
      "cudaGetDeviceCount", "cudaGetDevice", "cudaSetDevice", "cudaGetDeviceProperties"};
  size_t i;
  for (i = 0; i < sizeof others / sizeof *others; i++)
    if (strcmp(name, others[i]) == 0) return false;
  return true;
}

cudaError_t hostcuda_enter(const char *name) {
  cudaError_t e;
  lock();
  e = (cudaError_t)injected(name);
  if (e == cudaSuccess && t_in_callback) e = cudaErrorNotPermitted;
  if (e == cudaSuccess && g.broken == cudaSuccess && getpid() != g.pid)
    e = cudaErrorInitializationError;
  if (e == cudaSuccess) e = g.broken;
  if (e == cudaSuccess) e = g.sticky;
  unlock();
  if (e == cudaSuccess && needs_context(name)) hostcuda_context(t_device);
  return e;
}

cudaError_t hostcuda_leave(cudaError_t e) {
  if (e != cudaSuccess && e != cudaErrorNotReady) t_last = e;
  return e;
}

#define ENTER(name)                                      \
  do {                                                   \
    cudaError_t entered = hostcuda_enter(name);          \
    if (entered != cudaSuccess) return hostcuda_leave(entered); \
  } while (0)
#define REQUIRE(condition, error) \
  do {                            \
    if (!(condition)) return hostcuda_leave(error); \
  } while (0)

cudaError_t cudaGetLastError(void) {
  cudaError_t e = t_last;
  t_last = cudaSuccess;
  return e;
}

cudaError_t cudaPeekAtLastError(void) { return t_last; }

const char *cudaGetErrorString(cudaError_t error) {
#define CASE(name, value, text) if ((int)error == value) return text;
  HOSTCUDA_ERRORS(CASE)
#undef CASE
  return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error) {
#define CASE(name, value, text) if ((int)error == value) return #name;
  HOSTCUDA_ERRORS(CASE)
#undef CASE
  return "unrecognized error code";
}

/* --- devices --- */

cudaError_t cudaDriverGetVersion(int *version) {
  REQUIRE(version != NULL, cudaErrorInvalidValue);
  lock();
  start();
  *version = g.broken == cudaErrorInsufficientDriver ? 0 : CUDART_VERSION;
  unlock();
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  REQUIRE(version != NULL, cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  REQUIRE(count != NULL, cudaErrorInvalidValue);
  *count = 0;
  ENTER("cudaGetDeviceCount");
  *count = g.devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  ENTER("cudaGetDevice");
  *device = t_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  ENTER("cudaSetDevice");
  REQUIRE(device >= 0 && device < g.devices, cudaErrorInvalidDevice);
  t_device = device;
  hostcuda_context(device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  int i;
  ENTER("cudaGetDeviceProperties");
  REQUIRE(p != NULL, cudaErrorInvalidValue);
  REQUIRE(device >= 0 && device < g.devices, cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "hostcuda (a test double)");
  for (i = 0; i < 16; i++) p->uuid.bytes[i] = (char)(i + 16 * device);
  if (getenv("HOSTCUDA_PARTS") != NULL) memcpy(p->uuid.bytes, &g.pid, sizeof g.pid);
  p->totalGlobalMem = g.limit;
  p->major = 9;
  p->multiProcessorCount = 2;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->l2CacheSize = 1 << 20;
  p->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  ENTER("cudaDeviceGetStreamPriorityRange");
  if (least != NULL) *least = 0;
  if (greatest != NULL) *greatest = -5;
  return cudaSuccess;
}

/* --- streams --- */

static void drop(hostcuda_op *op) {
  if (op->drop != NULL) op->drop(op->arg);
  op->drop = NULL;
}

static void unref_stream(cudaStream_t s) { /* g.lock is held */
  cudaStream_t *at = &g.streams;
  if (--s->refs > 0) return;
  while (*at != s) at = &(*at)->next;
  *at = s->next;
  pthread_cond_destroy(&s->work);
  free(s->last.node);
  free(s);
}

static void pause_at_random(cudaStream_t s) {
  struct timespec t = {0, 0};
  uint64_t dice = hostcuda_random(&s->random);
  if (g.delay_us == 0 || (dice & 1) != 0) return; /* half of them follow at once */
  t.tv_nsec = (long)((dice >> 1) % (uint64_t)(g.delay_us * 1000));
  t.tv_sec = t.tv_nsec / 1000000000;
  t.tv_nsec %= 1000000000;
  nanosleep(&t, NULL);
}

static void *stream_thread(void *arg) {
  cudaStream_t s = (cudaStream_t)arg;
  entry *e;
  int i;
  if (g.key >= 0) pkey_set(g.key, 0);
  t_device = s->device;
  lock();
  for (;;) {
    while (s->head == NULL && !s->closing) pthread_cond_wait(&s->work, &g.lock);
    if (s->head == NULL) break;
    e = s->head;
    for (i = 0; i < e->wait_count; i++) {
      while (e->waits[i].stream->done < e->waits[i].seq) pthread_cond_wait(&g.changed, &g.lock);
      unref_stream(e->waits[i].stream);
    }
    unlock();
    pause_at_random(s);
    e->op.run(e->op.arg);
    drop(&e->op);
    lock();
    if (injected("op") != 0) g.sticky = (cudaError_t)injected("op failure");
    s->head = e->next;
    if (s->head == NULL) s->tail = &s->head;
    s->done++;
    free(e);
    pthread_cond_broadcast(&g.changed);
  }
  unref_stream(s);
  unlock();
  return NULL;
}

static cudaStream_t make_stream(int device, unsigned flags, int priority) { /* g.lock is held */
  cudaStream_t s = (cudaStream_t)allocate(sizeof *s);
  s->device = device;
  s->flags = flags;
  s->priority = priority;
  s->refs = 1;
  s->tail = &s->head;
  s->random = g.seed * 7919 + ++g.streams_made;
  pthread_cond_init(&s->work, NULL);
  s->next = g.streams;
  g.streams = s;
  return s;
}

/* The stream a handle means; NULL if it is none. g.lock is held. */
static cudaStream_t find(cudaStream_t handle) {
  cudaStream_t s, *special = NULL;
  if (handle == NULL || handle == cudaStreamLegacy) special = &g.legacy[t_device];
  else if (handle == cudaStreamPerThread) special = &t_streams[t_device];
  if (special != NULL) {
    if (*special == NULL) *special = make_stream(t_device, cudaStreamDefault, 0);
    return *special;
  }
  for (s = g.streams; s != NULL; s = s->next)
    if (s == handle && !s->closing) return s;
  return NULL;
}

static void start_thread(void *(*fn)(void *), void *arg) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, fn, arg) != 0) abort();
  pthread_detach(thread);
}

static bool is_legacy(cudaStream_t s) { return s == g.legacy[s->device]; }

/* Whether s has to wait for what other has queued: one of them is the legacy stream. */
static bool implied(cudaStream_t s, cudaStream_t other) {
  if (s == other || s->device != other->device || other->enqueued == other->done) return false;
  if (((s->flags | other->flags) & cudaStreamNonBlocking) != 0) return false;
  return is_legacy(s) || is_legacy(other);
}

static void push(cudaStream_t s, hostcuda_op op) { /* g.lock is held */
  cudaStream_t other;
  entry *e;
  int count = 0;
  for (other = g.streams; other != NULL; other = other->next) count += implied(s, other);
  e = (entry *)allocate(sizeof *e + (size_t)count * sizeof e->waits[0]);
  e->op = op;
  for (other = g.streams; other != NULL; other = other->next) {
    if (!implied(s, other)) continue;
    other->refs++;
    e->waits[e->wait_count].stream = other;
    e->waits[e->wait_count++].seq = other->enqueued;
  }
  *s->tail = e;
  s->tail = &e->next;
  s->enqueued++;
  if (!s->started) {
    s->started = true;
    s->refs++;
    start_thread(stream_thread, s);
  }
  pthread_cond_signal(&s->work);
}

static void add_dep(deps *d, int node) {
  int i;
  for (i = 0; i < d->count; i++)
    if (d->node[i] == node) return;
  d->node = (int *)realloc(d->node, (size_t)(d->count + 1) * sizeof *d->node);
  if (d->node == NULL) abort();
  d->node[d->count++] = node;
}

static void copy_deps(deps *to, const deps *from) {
  int i;
  to->count = 0;
  for (i = 0; i < from->count; i++) add_dep(to, from->node[i]);
}

static void record_node(cudaStream_t s, hostcuda_op op, bool ordered) { /* g.lock is held */
  cudaGraph_t graph = s->capture->graph;
  struct CUgraphNode_st *n;
  graph->nodes = (struct CUgraphNode_st *)realloc(graph->nodes,
                                                  (size_t)(graph->count + 1) * sizeof *n);
  if (graph->nodes == NULL) abort();
  n = &graph->nodes[graph->count];
  memset(n, 0, sizeof *n);
  n->op = op;
  copy_deps(&n->after, &s->last);
  if (ordered && s->capture->ordered >= 0) add_dep(&n->after, s->capture->ordered);
  if (ordered) s->capture->ordered = graph->count;
  s->last.count = 0;
  add_dep(&s->last, graph->count++);
}

/* The legacy stream may not be used while a blocking stream of its device is captured. Locked. */
static capture *obstacle(cudaStream_t s) {
  cudaStream_t o;
  for (o = g.streams; o != NULL && is_legacy(s); o = o->next)
    if (o->capture != NULL && (o->flags & cudaStreamNonBlocking) == 0 && o->device == s->device)
      return o->capture;
  return NULL;
}

static cudaError_t enqueueable(cudaStream_t s) { /* g.lock is held */
  capture *c;
  if (s == NULL) return cudaErrorInvalidResourceHandle;
  if (s->capture != NULL && s->capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if ((c = obstacle(s)) == NULL) return cudaSuccess;
  c->invalid = true;
  return cudaErrorStreamCaptureImplicit;
}

static cudaError_t enqueue(cudaStream_t handle, hostcuda_op op, bool ordered) { /* lock is held */
  cudaStream_t s = find(handle);
  cudaError_t e = enqueueable(s);
  if (e != cudaSuccess) return e;
  if (s->capture != NULL) record_node(s, op, ordered);
  else push(s, op);
  return cudaSuccess;
}

static cudaError_t drained(cudaStream_t s) { /* g.lock is held */
  uint64_t seq = s->enqueued;
  s->refs++;
  while (s->done < seq && g.sticky == cudaSuccess) pthread_cond_wait(&g.changed, &g.lock);
  unref_stream(s);
  return g.sticky;
}

cudaError_t hostcuda_enqueue(cudaStream_t stream, hostcuda_op op, bool ordered) {
  int device = hostcuda_stream_device(stream);
  cudaError_t e;
  if (device >= 0) hostcuda_context(device);
  lock();
  e = enqueue(stream, op, ordered);
  if (e == cudaSuccess && g.launches_block && find(stream)->capture == NULL)
    (void)drained(find(stream));
  unlock();
  if (e != cudaSuccess) drop(&op);
  return e;
}

int hostcuda_stream_device(cudaStream_t stream) {
  cudaStream_t s;
  int device;
  lock();
  s = find(stream);
  device = s != NULL ? s->device : -1;
  unlock();
  return device;
}

/* Calls that a capture forbids, as cudaMalloc: an error, and the capture is void. */
static cudaError_t unsafe(void) {
  cudaError_t e = cudaSuccess;
  capture *c;
  lock();
  for (c = g.captures; c != NULL && t_mode != cudaStreamCaptureModeRelaxed; c = c->next) {
    bool mine = pthread_equal(c->thread, pthread_self()) != 0;
    if (c->mode == cudaStreamCaptureModeRelaxed) continue;
    if (!mine && (c->mode != cudaStreamCaptureModeGlobal || t_mode != cudaStreamCaptureModeGlobal))
      continue;
    c->invalid = true;
    e = cudaErrorStreamCaptureUnsupported;
  }
  unlock();
  return e;
}

#define SAFE()                                        \
  do {                                                \
    cudaError_t safe = unsafe();                      \
    if (safe != cudaSuccess) return hostcuda_leave(safe); \
  } while (0)

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  ENTER("cudaStreamCreateWithPriority");
  REQUIRE(stream != NULL && flags <= cudaStreamNonBlocking, cudaErrorInvalidValue);
  SAFE();
  if (priority > 0) priority = 0; /* clamped, as there */
  if (priority < -5) priority = -5;
  lock();
  *stream = make_stream(t_device, flags, priority);
  return unlocked(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  ENTER("cudaStreamCreateWithFlags");
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  ENTER("cudaStreamCreate");
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

/* Returns at once; what is queued still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStream_t s;
  ENTER("cudaStreamDestroy");
  REQUIRE(stream != NULL && stream != cudaStreamLegacy && stream != cudaStreamPerThread,
          cudaErrorInvalidResourceHandle);
  lock();
  s = find(stream);
  if (s == NULL) return unlocked(cudaErrorInvalidResourceHandle);
  s->closing = true;
  pthread_cond_signal(&s->work);
  unref_stream(s);
  return unlocked(cudaSuccess);
}

/* A stream that is captured can be neither waited for nor asked, in any mode, and the legacy stream
   cannot while a blocking stream is captured: the capture is void. g.lock is held. */
static cudaError_t awaitable(cudaStream_t s) {
  capture *c;
  if (s == NULL) return cudaErrorInvalidResourceHandle;
  c = s->capture != NULL ? s->capture : obstacle(s);
  if (c == NULL) return cudaSuccess;
  c->invalid = true;
  return s->capture != NULL ? cudaErrorStreamCaptureUnsupported : cudaErrorStreamCaptureImplicit;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cudaStream_t s;
  cudaError_t e;
  ENTER("cudaStreamSynchronize");
  lock();
  s = find(stream);
  e = awaitable(s);
  return unlocked(e == cudaSuccess ? drained(s) : e);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  cudaStream_t s;
  cudaError_t e;
  ENTER("cudaStreamQuery");
  SAFE();
  lock();
  s = find(stream);
  e = awaitable(s);
  if (e == cudaSuccess && s->done != s->enqueued) e = cudaErrorNotReady;
  return unlocked(e);
}

static cudaError_t drain_device(void) {
  cudaStream_t s;
  cudaError_t e;
  lock();
  for (s = g.streams; s != NULL && g.sticky == cudaSuccess;) {
    if (s->device == t_device && s->done < s->enqueued) {
      drained(s);
      s = g.streams; /* the list may have changed */
    } else {
      s = s->next;
    }
  }
  e = g.sticky;
  unlock();
  return e;
}

/* Waits for the device with its context locked: no other thread's call comes through meanwhile. */
static cudaError_t drain_locked(void) {
  int device = t_device;
  cudaError_t e;
  pthread_mutex_lock(&g.contexts[device]);
  e = drain_device();
  pthread_mutex_unlock(&g.contexts[device]);
  return e;
}

cudaError_t cudaDeviceSynchronize(void) {
  cudaError_t e = cudaSuccess;
  cudaStream_t s;
  ENTER("cudaDeviceSynchronize");
  SAFE();
  lock();
  for (s = g.streams; s != NULL; s = s->next) /* in any mode */
    if (s->device == t_device && s->capture != NULL) e = awaitable(s);
  unlock();
  REQUIRE(e == cudaSuccess, e);
  return hostcuda_leave(drain_device());
}

cudaError_t hostcuda_load(const void *kernel) {
  int i;
  lock();
  for (i = 0; i < g.loaded_count && g.loaded[i] != kernel; i++) {}
  if (i == MAX_NAMES) abort();
  if (i == g.loaded_count) g.loaded[g.loaded_count++] = kernel, i = -1;
  unlock();
  return i >= 0 || unsafe() != cudaSuccess ? cudaSuccess : drain_locked();
}

typedef struct host_call { cudaHostFn_t fn; void *data; } host_call;

static void run_host_call(void *arg) {
  host_call *c = (host_call *)arg;
  t_in_callback = true;
  c->fn(c->data);
  t_in_callback = false;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data) {
  hostcuda_op op = {run_host_call, free, NULL};
  host_call *c;
  ENTER("cudaLaunchHostFunc");
  REQUIRE(fn != NULL, cudaErrorInvalidValue);
  c = (host_call *)allocate(sizeof *c);
  c->fn = fn;
  c->data = data;
  op.arg = c;
  return hostcuda_leave(hostcuda_enqueue(stream, op, false));
}

/* --- events --- */

typedef struct event_op { cudaEvent_t event; uint64_t seq; } event_op;

static void unref_event(cudaEvent_t e) { /* g.lock is held */
  if (--e->refs > 0) return;
  free(e->at.node);
  free(e);
}

static void drop_event_op(void *arg) {
  event_op *o = (event_op *)arg;
  lock();
  unref_event(o->event);
  unlock();
  free(o);
}

static void run_record(void *arg) {
  event_op *o = (event_op *)arg;
  lock();
  if (o->event->completed < o->seq) o->event->completed = o->seq;
  o->event->time = hostcuda_now();
  pthread_cond_broadcast(&g.changed);
  unlock();
}

static void run_wait(void *arg) {
  event_op *o = (event_op *)arg;
  lock();
  while (o->event->completed < o->seq) pthread_cond_wait(&g.changed, &g.lock);
  unlock();
}

static hostcuda_op make_event_op(void (*run)(void *), cudaEvent_t e) { /* g.lock is held */
  hostcuda_op op = {run, drop_event_op, NULL};
  event_op *o = (event_op *)allocate(sizeof *o);
  o->event = e;
  o->seq = e->recorded;
  e->refs++;
  op.arg = o;
  return op;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  ENTER("cudaEventCreateWithFlags");
  REQUIRE(event != NULL, cudaErrorInvalidValue);
  *event = (cudaEvent_t)allocate(sizeof **event);
  (*event)->refs = 1;
  (*event)->flags = flags;
  (*event)->device = t_device;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  ENTER("cudaEventCreate");
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER("cudaEventDestroy");
  REQUIRE(event != NULL, cudaErrorInvalidResourceHandle);
  lock();
  unref_event(event);
  return unlocked(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cudaStream_t s;
  cudaError_t e;
  ENTER("cudaEventRecord");
  REQUIRE(event != NULL, cudaErrorInvalidResourceHandle);
  lock();
  s = find(stream);
  e = enqueueable(s);
  if (e == cudaSuccess && s->device != event->device) e = cudaErrorInvalidResourceHandle;
  if (e != cudaSuccess) return unlocked(e);
  event->capture = s->capture;
  if (s->capture != NULL) {
    event->capture_id = s->capture->id;
    copy_deps(&event->at, &s->last);
  } else {
    event->recorded++;
    push(s, make_event_op(run_record, event));
  }
  return unlocked(cudaSuccess);
}

static capture *live_capture(cudaEvent_t event) { /* g.lock is held */
  capture *c;
  for (c = g.captures; c != NULL; c = c->next)
    if (c == event->capture && c->id == event->capture_id) return c;
  return NULL;
}

/* The stream joins the event's capture, or adds to what its next operation follows. */
static cudaError_t wait_in_capture(cudaStream_t s, cudaEvent_t event) { /* g.lock is held */
  capture *c = live_capture(event);
  int i;
  if (c == NULL) return cudaErrorCapturedEvent; /* its capture is over */
  if (is_legacy(s) || (s->capture != NULL && s->capture != c)) {
    c->invalid = true;
    if (is_legacy(s)) return cudaErrorStreamCaptureImplicit;
    s->capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (s->capture == NULL) s->last.count = 0;
  s->capture = c;
  for (i = 0; i < event->at.count; i++) add_dep(&s->last, event->at.node[i]);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  cudaStream_t s;
  cudaError_t e;
  (void)flags;
  ENTER("cudaStreamWaitEvent");
  REQUIRE(event != NULL, cudaErrorInvalidResourceHandle);
  lock();
  s = find(stream);
  e = enqueueable(s);
  if (e != cudaSuccess) return unlocked(e);
  if (event->capture != NULL) return unlocked(wait_in_capture(s, event));
  if (s->capture != NULL) {
    if (event->recorded == 0) return unlocked(cudaSuccess);
    s->capture->invalid = true;
    return unlocked(cudaErrorStreamCaptureIsolation);
  }
  if (event->completed < event->recorded) push(s, make_event_op(run_wait, event));
  return unlocked(cudaSuccess);
}

/* Of an event last recorded in a capture nobody may ask; it voids the capture. g.lock is held. */
static cudaError_t askable(cudaEvent_t event) {
  capture *c = live_capture(event);
  if (event->capture == NULL) return cudaSuccess;
  if (c != NULL) c->invalid = true;
  return cudaErrorCapturedEvent;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  cudaError_t e;
  ENTER("cudaEventQuery");
  REQUIRE(event != NULL, cudaErrorInvalidResourceHandle);
  SAFE();
  lock();
  e = askable(event);
  if (e == cudaSuccess && event->completed != event->recorded) e = cudaErrorNotReady;
  return unlocked(e);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  cudaError_t e;
  uint64_t seq;
  ENTER("cudaEventSynchronize");
  REQUIRE(event != NULL, cudaErrorInvalidResourceHandle);
  SAFE();
  lock();
  if ((e = askable(event)) != cudaSuccess) return unlocked(e);
  seq = event->recorded;
  event->refs++;
  while (event->completed < seq && g.sticky == cudaSuccess)
    pthread_cond_wait(&g.changed, &g.lock);
  unref_event(event);
  return unlocked(g.sticky);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  cudaError_t e = cudaSuccess;
  ENTER("cudaEventElapsedTime");
  REQUIRE(ms != NULL, cudaErrorInvalidValue);
  REQUIRE(start != NULL && end != NULL, cudaErrorInvalidResourceHandle);
  lock();
  if (((start->flags | end->flags) & cudaEventDisableTiming) != 0 || start->recorded == 0 ||
      end->recorded == 0)
    e = cudaErrorInvalidResourceHandle;
  else if (askable(start) != cudaSuccess || askable(end) != cudaSuccess)
    e = cudaErrorCapturedEvent;
  else if (start->completed < start->recorded || end->completed < end->recorded)
    e = cudaErrorNotReady;
  else
    *ms = (float)((end->time - start->time) * 1e3);
  return unlocked(e);
}

/* --- graphs --- */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode was = t_mode;
  ENTER("cudaThreadExchangeStreamCaptureMode");
  t_mode = *mode;
  *mode = was;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  cudaStream_t s;
  capture *c;
  ENTER("cudaStreamBeginCapture");
  lock();
  s = find(stream);
  if (s == NULL) return unlocked(cudaErrorInvalidResourceHandle);
  if (is_legacy(s)) return unlocked(cudaErrorStreamCaptureUnsupported);
  if (s->capture != NULL) return unlocked(cudaErrorInvalidValue);
  c = (capture *)allocate(sizeof *c);
  c->id = ++g.capture_ids;
  c->graph = (cudaGraph_t)allocate(sizeof *c->graph);
  c->graph->refs = 1;
  c->origin = s;
  c->mode = mode;
  c->thread = pthread_self();
  c->ordered = -1;
  c->next = g.captures;
  g.captures = c;
  s->capture = c;
  s->last.count = 0;
  return unlocked(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  cudaStream_t s;
  ENTER("cudaStreamIsCapturing");
  REQUIRE(status != NULL, cudaErrorInvalidValue);
  lock();
  s = find(stream);
  if (s == NULL) return unlocked(cudaErrorInvalidResourceHandle);
  *status = (enum cudaStreamCaptureStatus)3; /* unspecified in an error */
  if (obstacle(s) != NULL) return unlocked(cudaErrorStreamCaptureImplicit);
  *status = s->capture == NULL      ? cudaStreamCaptureStatusNone
            : s->capture->invalid   ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
  return unlocked(cudaSuccess);
}

/* Some time after the last use, on a thread of CUDA's own. */
static void *free_graph(void *arg) {
  struct timespec t = {0, 3000000};
  cudaGraph_t graph = (cudaGraph_t)arg;
  int i;
  nanosleep(&t, NULL);
  for (i = 0; i < graph->count; i++) {
    drop(&graph->nodes[i].op);
    free(graph->nodes[i].after.node);
  }
  free(graph->nodes);
  free(graph);
  return NULL;
}

static void unref_graph(cudaGraph_t graph) {
  int left;
  lock();
  left = --graph->refs;
  unlock();
  if (left == 0) start_thread(free_graph, graph);
}

static void mark(const struct CUgraph_st *graph, const deps *d, bool *reached) {
  int i;
  for (i = 0; i < d->count; i++) {
    if (reached[d->node[i]]) continue;
    reached[d->node[i]] = true;
    mark(graph, &graph->nodes[d->node[i]].after, reached);
  }
}

/* Every captured stream's last operations must precede the origin's end. g.lock is held. */
static bool joined(const capture *c) {
  bool *reached = (bool *)allocate((size_t)c->graph->count), all = true;
  cudaStream_t s;
  int i;
  mark(c->graph, &c->origin->last, reached);
  for (s = g.streams; s != NULL; s = s->next)
    for (i = 0; s->capture == c && i < s->last.count; i++) all = all && reached[s->last.node[i]];
  free(reached);
  return all;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  cudaError_t e = cudaSuccess;
  cudaStream_t s;
  capture *c, **at;
  ENTER("cudaStreamEndCapture");
  REQUIRE(graph != NULL, cudaErrorInvalidValue);
  *graph = NULL;
  lock();
  s = find(stream);
  if (s == NULL) return unlocked(cudaErrorInvalidResourceHandle);
  c = s->capture;
  if (c == NULL) return unlocked(cudaErrorInvalidValue);
  if (c->origin != s) return unlocked(cudaErrorStreamCaptureUnmatched);
  if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
    return unlocked(cudaErrorStreamCaptureWrongThread);
  if (c->invalid) e = cudaErrorStreamCaptureInvalidated;
  else if (!joined(c)) e = cudaErrorStreamCaptureUnjoined;
  for (s = g.streams; s != NULL; s = s->next)
    if (s->capture == c) s->capture = NULL;
  for (at = &g.captures; *at != c;) at = &(*at)->next;
  *at = c->next;
  unlock();
  if (e == cudaSuccess) *graph = c->graph;
  else unref_graph(c->graph);
  free(c);
  return hostcuda_leave(e);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags) {
  ENTER("cudaGraphInstantiate");
  REQUIRE(exec != NULL && graph != NULL && flags == 0, cudaErrorInvalidValue);
  *exec = (cudaGraphExec_t)allocate(sizeof **exec);
  (*exec)->graph = graph;
  (*exec)->random = g.seed;
  lock();
  graph->refs++;
  return unlocked(cudaSuccess);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  size_t i;
  ENTER("cudaGraphGetNodes");
  REQUIRE(graph != NULL && count != NULL, cudaErrorInvalidValue);
  for (i = 0; nodes != NULL && i < *count; i++)
    nodes[i] = i < (size_t)graph->count ? &graph->nodes[i] : NULL;
  if (nodes == NULL || *count > (size_t)graph->count) *count = (size_t)graph->count;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER("cudaGraphDestroy");
  REQUIRE(graph != NULL, cudaErrorInvalidValue);
  unref_graph(graph);
  return cudaSuccess;
}

typedef struct replay { cudaGraph_t graph; uint64_t random; } replay;

static bool may_run(const struct CUgraphNode_st *n, const bool *done) {
  int i;
  for (i = 0; i < n->after.count; i++)
    if (!done[n->after.node[i]]) return false;
  return true;
}

/* Works as follows: of the nodes whose predecessors have run, a random one is next. */
static void run_graph(void *arg) {
  replay *r = (replay *)arg;
  int left, i, n = r->graph->count;
  bool *done = (bool *)allocate((size_t)n);
  for (left = n; left > 0; left--) {
    int free_nodes = 0, pick = -1;
    for (i = 0; i < n; i++) {
      if (done[i] || !may_run(&r->graph->nodes[i], done)) continue;
      if (hostcuda_random(&r->random) % (uint64_t)++free_nodes == 0) pick = i;
    }
    r->graph->nodes[pick].op.run(r->graph->nodes[pick].op.arg);
    done[pick] = true;
  }
  free(done);
}

static void drop_replay(void *arg) {
  replay *r = (replay *)arg;
  unref_graph(r->graph);
  free(r);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  hostcuda_op op = {run_graph, drop_replay, NULL};
  replay *r;
  ENTER("cudaGraphLaunch");
  REQUIRE(exec != NULL, cudaErrorInvalidValue);
  r = (replay *)allocate(sizeof *r);
  lock();
  r->graph = exec->graph;
  r->graph->refs++;
  r->random = hostcuda_random(&exec->random);
  unlock();
  op.arg = r;
  return hostcuda_leave(hostcuda_enqueue(stream, op, false));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  ENTER("cudaGraphExecDestroy");
  REQUIRE(exec != NULL, cudaErrorInvalidValue);
  unref_graph(exec->graph);
  free(exec);
  return cudaSuccess;
}

/* --- memory --- */

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }
static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Maps bytes [offset, offset + b->map_size - 2 pages) of fd between two guard pages. */
static bool map_block(block *b, int fd) {
  size_t page = page_size(), inner = b->map_size - 2 * page;
  char *p = (char *)mmap(NULL, b->map_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == (char *)MAP_FAILED) return false;
  b->map = p;
  if (mmap(p + page, inner, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
           (off_t)b->offset) == MAP_FAILED)
    return false;
  b->base = p + page + inner - round_up(b->size, 256);
  return true;
}

static void protect_block(const block *b) {
  size_t page = page_size();
  if (g.key >= 0 && pkey_mprotect(b->map + page, b->map_size - 2 * page, PROT_READ | PROT_WRITE,
                                  g.key) != 0)
    abort();
  ASAN_POISON_MEMORY_REGION(b->base + b->size, round_up(b->size, 256) - b->size);
}

static void forget_block(block *b) { /* unlinked; g.lock is held */
  size_t page = page_size();
  if (b->map != NULL) {
    ASAN_UNPOISON_MEMORY_REGION(b->map, b->map_size);
    munmap(b->map, b->map_size);
    if (!b->imported && b->type == cudaMemoryTypeDevice) {
      fallocate(g.memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)b->offset,
                (off_t)(b->map_size - 2 * page));
      g.used[b->device] -= b->map_size;
    }
  } else if (!b->imported) {
    free(b->base);
  }
  free(b);
}

size_t hostcuda_bytes(void) {
  const block *b;
  size_t n = 0;
  lock();
  for (b = g.blocks; b != NULL; b = b->next)
    if (b->type == cudaMemoryTypeDevice && !b->imported) n += b->size;
  unlock();
  return n;
}

size_t hostcuda_left(int *streams, int *threads, int *fds) {
  const block *b;
  cudaStream_t s;
  size_t n = 0;
  lock();
  *streams = *threads = 0;
  *fds = g.memory >= 0;
  for (b = g.blocks; b != NULL; b = b->next) n += b->size;
  for (s = g.streams; s != NULL; s = s->next) {
    *threads += is_legacy(s) && s->started;
    *streams += !is_legacy(s) && !s->closing;
  }
  unlock();
  return n;
}

static block *find_block(const void *p) { /* g.lock is held */
  block *b;
  const char *at = (const char *)p;
  for (b = g.blocks; b != NULL; b = b->next)
    if (at >= b->base && at < b->base + (b->size != 0 ? b->size : 1)) return b;
  return NULL;
}

static block *unlink_block(const void *p) { /* g.lock is held; p is its beginning */
  block **at, *b;
  for (at = &g.blocks; *at != NULL; at = &(*at)->next) {
    if ((*at)->base != (const char *)p) continue;
    b = *at;
    *at = b->next;
    return b;
  }
  return NULL;
}

static void link_block(block *b) {
  b->next = g.blocks;
  g.blocks = b;
}

static cudaError_t allocate_device(void **p, size_t bytes) {
  size_t page = page_size(), inner = round_up(bytes, page > 256 ? page : 256);
  block *b;
  *p = NULL;
  if (bytes == 0) return cudaSuccess;
  if (inner < bytes || inner > g.limit) return cudaErrorMemoryAllocation;
  lock();
  if (g.memory < 0) g.memory = memfd_create("hostcuda device memory", MFD_CLOEXEC);
  if (g.memory < 0 || g.used[t_device] + inner > g.limit ||
      ftruncate(g.memory, (off_t)(g.memory_end + inner)) != 0) {
    unlock();
    return cudaErrorMemoryAllocation;
  }
  b = (block *)allocate(sizeof *b);
  b->size = bytes;
  b->map_size = inner + 2 * page;
  b->offset = g.memory_end;
  b->type = cudaMemoryTypeDevice;
  b->device = t_device;
  if (!map_block(b, g.memory)) abort();
  memset(b->map + page, 0xff, inner); /* NaN in every type of float */
  protect_block(b);
  g.memory_end += inner;
  g.used[t_device] += b->map_size;
  link_block(b);
  *p = b->base;
  unlock();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  cudaError_t e = cudaSuccess;
  bool waits;
  ENTER("cudaMalloc");
  REQUIRE(p != NULL, cudaErrorInvalidValue);
  SAFE();
  lock();
  waits = hostcuda_random(&g.dice) % 8 == 0; /* now and then it does, there too */
  unlock();
  if (waits) e = drain_locked();
  return hostcuda_leave(e == cudaSuccess ? allocate_device(p, bytes) : e);
}

cudaError_t cudaFree(void *p) { /* waits for the device, as there */
  block *b;
  cudaError_t e;
  ENTER("cudaFree");
  if (p == NULL) return cudaSuccess;
  SAFE();
  e = drain_locked();
  if (e != cudaSuccess) return hostcuda_leave(e);
  lock();
  b = find_block(p);
  if (b == NULL || b->base != (char *)p || b->type != cudaMemoryTypeDevice || b->imported)
    return unlocked(cudaErrorInvalidValue);
  forget_block(unlink_block(p));
  return unlocked(cudaSuccess);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  block *b;
  void *base = NULL;
  ENTER("cudaHostAlloc");
  REQUIRE(p != NULL && flags <= 7, cudaErrorInvalidValue);
  *p = NULL;
  if (bytes == 0) return cudaSuccess;
  SAFE();
  if (posix_memalign(&base, 4096, round_up(bytes, 4096)) != 0)
    return hostcuda_leave(cudaErrorMemoryAllocation);
  memset(base, 0xff, bytes);
  b = (block *)allocate(sizeof *b);
  b->base = (char *)base;
  b->size = bytes;
  b->type = cudaMemoryTypeHost;
  b->device = t_device;
  lock();
  link_block(b);
  *p = base;
  return unlocked(cudaSuccess);
}

cudaError_t cudaMallocHost(void **p, size_t bytes) {
  ENTER("cudaMallocHost");
  return cudaHostAlloc(p, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *p) {
  block *b;
  cudaError_t e;
  ENTER("cudaFreeHost");
  if (p == NULL) return cudaSuccess;
  SAFE();
  e = cudaDeviceSynchronize();
  if (e != cudaSuccess) return hostcuda_leave(e);
  lock();
  b = find_block(p);
  if (b == NULL || b->base != (char *)p || b->type != cudaMemoryTypeHost)
    return unlocked(cudaErrorInvalidValue);
  forget_block(unlink_block(p));
  return unlocked(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  block *b;
  ENTER("cudaPointerGetAttributes");
  REQUIRE(a != NULL, cudaErrorInvalidValue);
  memset(a, 0, sizeof *a);
  a->device = -2;
  lock();
  b = find_block(p);
  if (b == NULL) { /* memory that CUDA does not know: no error since CUDA 11 */
    memcpy(&a->hostPointer, &p, sizeof p);
  } else {
    a->type = b->type;
    a->device = b->device;
    memcpy(&a->devicePointer, &p, sizeof p);
    if (b->type == cudaMemoryTypeHost) memcpy(&a->hostPointer, &p, sizeof p);
  }
  return unlocked(cudaSuccess);
}

bool hostcuda_is_device(const void *p, size_t bytes) {
  block *b;
  bool yes;
  lock();
  b = find_block(p);
  yes = b != NULL && b->type == cudaMemoryTypeDevice &&
        bytes <= (size_t)(b->base + b->size - (const char *)p);
  unlock();
  return yes;
}

/* --- memory of another process --- */

typedef struct ipc_handle {
  uint32_t magic;
  int32_t pid, fd, device;
  uint64_t offset, size, map_size;
} ipc_handle;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) { /* of p's whole allocation */
  ipc_handle h = {0x68637564, (int32_t)getpid(), 0, 0, 0, 0, 0};
  block *b;
  ENTER("cudaIpcGetMemHandle");
  REQUIRE(handle != NULL, cudaErrorInvalidValue);
  lock();
  b = find_block(p);
  if (b == NULL || b->type != cudaMemoryTypeDevice || b->imported)
    return unlocked(cudaErrorInvalidValue);
  h.fd = g.memory;
  h.device = b->device;
  h.offset = b->offset;
  h.size = b->size;
  h.map_size = b->map_size;
  memset(handle, 0, sizeof *handle);
  memcpy(handle->reserved, &h, sizeof h);
  return unlocked(cudaSuccess);
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
  char path[64];
  ipc_handle h;
  block *b;
  int fd;
  ENTER("cudaIpcOpenMemHandle");
  memcpy(&h, handle.reserved, sizeof h);
  REQUIRE(p != NULL && flags <= 1 && h.magic == 0x68637564, cudaErrorInvalidValue);
  REQUIRE(h.pid != (int32_t)getpid(), cudaErrorDeviceUninitialized); /* not one's own */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  fd = open(path, O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0, cudaErrorInvalidResourceHandle);
  b = (block *)allocate(sizeof *b);
  b->size = (size_t)h.size;
  b->map_size = (size_t)h.map_size;
  b->offset = h.offset;
  b->type = cudaMemoryTypeDevice;
  b->device = h.device;
  b->imported = true;
  if (!map_block(b, fd)) abort();
  close(fd);
  protect_block(b);
  lock();
  link_block(b);
  *p = b->base;
  return unlocked(cudaSuccess);
}

cudaError_t cudaIpcCloseMemHandle(void *p) {
  block *b;
  cudaError_t e;
  ENTER("cudaIpcCloseMemHandle");
  e = cudaDeviceSynchronize();
  if (e != cudaSuccess) return hostcuda_leave(e);
  lock();
  b = find_block(p);
  if (b == NULL || b->base != (char *)p || !b->imported) return unlocked(cudaErrorInvalidValue);
  forget_block(unlink_block(p));
  return unlocked(cudaSuccess);
}

/* --- copies --- */

typedef struct copy { char *dst; const char *src; size_t bytes; int value; void *staged; } copy;

static void run_copy(void *arg) {
  copy *c = (copy *)arg;
  if (c->src != NULL) memmove(c->dst, c->src, c->bytes);
  else memset(c->dst, c->value, c->bytes);
}

static void drop_copy(void *arg) {
  free(((copy *)arg)->staged);
  free(arg);
}

/* How far p goes: device, pinned or pageable; *ok turns false when its allocation is too small. */
static enum cudaMemoryType kind_of(const void *p, size_t bytes, bool *ok) {
  enum cudaMemoryType type = cudaMemoryTypeUnregistered;
  block *b;
  lock();
  b = find_block(p);
  if (b != NULL) {
    type = b->type;
    if (bytes > (size_t)(b->base + b->size - (const char *)p)) *ok = false;
  }
  unlock();
  return type;
}

/* A host pointer where the direction says device, or the other way round, is an error. Pageable
   memory is copied at the call (to the device) or waited for (from it). */
static cudaError_t start_copy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  hostcuda_op op = {run_copy, drop_copy, NULL};
  bool ok = true, waits;
  enum cudaMemoryType to = kind_of(dst, bytes, &ok), from = kind_of(src, bytes, &ok);
  bool device_to = to == cudaMemoryTypeDevice, device_from = from == cudaMemoryTypeDevice;
  cudaError_t e;
  copy *c;
  if (bytes == 0) return cudaSuccess;
  if (!ok || dst == NULL || src == NULL || (unsigned)kind > 4) return cudaErrorInvalidValue;
  if (kind != cudaMemcpyDefault &&
      (device_to != ((kind & 1) != 0) || device_from != ((kind & 2) != 0)))
    return cudaErrorInvalidValue;
  waits = to == cudaMemoryTypeUnregistered;
  c = (copy *)allocate(sizeof *c);
  c->dst = (char *)dst;
  c->src = (const char *)src;
  c->bytes = bytes;
  if (from == cudaMemoryTypeUnregistered) {
    c->staged = allocate(bytes);
    memcpy(c->staged, src, bytes);
    c->src = (const char *)c->staged;
  }
  op.arg = c;
  e = hostcuda_enqueue(stream, op, false);
  return e == cudaSuccess && waits ? cudaStreamSynchronize(stream) : e;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  return hostcuda_leave(start_copy(dst, src, bytes, kind, stream));
}

/* To the device from pageable memory it ends when that may be written again, within the device at
   once: the copy itself comes in the legacy stream, for which non-blocking streams do not wait. */
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
  bool ok = true, later;
  cudaError_t e;
  ENTER("cudaMemcpy");
  SAFE();
  later = kind_of(dst, 0, &ok) == cudaMemoryTypeDevice &&
          kind_of(src, 0, &ok) != cudaMemoryTypeHost;
  e = start_copy(dst, src, bytes, kind, NULL);
  return hostcuda_leave(e == cudaSuccess && !later ? cudaStreamSynchronize(NULL) : e);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
  hostcuda_op op = {run_copy, drop_copy, NULL};
  bool ok = true;
  copy *c;
  ENTER("cudaMemsetAsync");
  if (bytes == 0) return cudaSuccess;
  REQUIRE(kind_of(p, bytes, &ok) != cudaMemoryTypeUnregistered && ok, cudaErrorInvalidValue);
  c = (copy *)allocate(sizeof *c);
  c->dst = (char *)p;
  c->bytes = bytes;
  c->value = value;
  op.arg = c;
  return hostcuda_leave(hostcuda_enqueue(stream, op, false));
}

cudaError_t cudaMemset(void *p, int value, size_t bytes) { /* waited for in pinned memory alone */
  bool ok = true, waits;
  cudaError_t e;
  ENTER("cudaMemset");
  SAFE();
  waits = kind_of(p, 0, &ok) == cudaMemoryTypeHost;
  e = cudaMemsetAsync(p, value, bytes, NULL);
  return e == cudaSuccess && waits ? cudaStreamSynchronize(NULL) : e;
}
