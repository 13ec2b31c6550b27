/* nccl.c - NCCL between processes and threads of one host: a test double, see hostcuda.h.

   Works as follows: a communicator is a memfd that every rank maps; the unique id says where its
   maker keeps it open. A collective goes chunk by chunk: each rank puts its piece into its slot,
   all meet, each takes what it needs from all slots in rank order, all meet again. Ranks that call
   different things never meet: the operation hangs, as the real one may. Sends go through one
   mailbox for each pair of ranks.

   What a call starts is a job: a blocking communicator runs it in the caller's thread, another in
   one of its own, and is in progress until that has ended. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "nccl.h"

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

#include "half.h"
#include "hostcuda.h"

enum { SIZES = 2, SMALL_MAX = 65536 }; /* NCCL has other connections for small collectives */
enum { MAX_RANKS = 16, CHUNK = 65536, MAIL = 16384, MAX_SPLITS = 64 };
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };

typedef struct id_text { uint64_t magic; int32_t pid, fd; } id_text;

typedef struct mailbox { /* written by its sender, acked by its receiver */
  uint64_t sent, taken;
  uint64_t total, bytes;
  char data[MAIL];
} mailbox;

typedef struct call { int64_t kind, count, type, op, root; } call;

typedef struct seat { /* one rank's; written by it alone */
  uint64_t step;
  int32_t pid, device, here, color[MAX_SPLITS], key[MAX_SPLITS];
  uint64_t host;
  uint64_t splits;
  ncclUniqueId id[MAX_SPLITS];
  uint64_t ids, left;
  uint64_t rings[SIZES], peers[MAX_RANKS]; /* connections that it is ready for */
  call now;
  char slot[CHUNK];
} seat;

typedef struct shared { seat seats[MAX_RANKS]; mailbox mail[MAX_RANKS][MAX_RANKS]; } shared;

struct ncclComm { /* guarded by its lock where no comment says otherwise */
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int rank, size, device;
  int pending; /* operations that a stream, a graph or a job has */
  int jobs;    /* that have not ended */
  bool blocking, finalized, doomed, busy;
  bool orphan;  /* aborted; waits for the process's other ranks; guarded by living */
  bool old;     /* as NCCL 2.19 to 2.25 */
  bool asked;   /* a thread asks for its state */
  int aborted; /* atomic */
  ncclResult_t state;
  shared *all;
  ncclUniqueId id;
  uint64_t step, tail, head, splits, random;
  struct ncclComm *parent; /* while it is being split off */
  int color, key;
  float scalars[4]; /* of the caller's operations; these are ncclNumOps and up */
  int scalars_made;
  ncclDataType_t scalar_types[4];
  struct ncclComm *next; /* guarded by living, as is: */
  uint64_t unjoined;     /* the job that no call has joined yet, or 0 */
};

typedef struct action {
  int kind, root;
  const char *send;
  char *recv;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
} action;

typedef struct batch { /* what one group enqueues on one communicator and stream */
  struct batch *next;
  ncclComm_t comm;
  cudaStream_t stream;
  action *actions;
  int count;
  bool eager; /* in a stream, not in a graph */
  bool late;
  uint64_t ticket;
} batch;

typedef struct job {
  ncclResult_t (*run)(struct job *);
  uint64_t pause;             /* nanoseconds before it */
  ncclComm_t child, *newcomm; /* a split's */
  batch *batches;             /* a group's */
  bool late;                  /* see hostnccl_late */
  int count;
  ncclComm_t comms[]; /* in progress until it ends */
} job;

enum { TEXTS = 64 };

static _Thread_local int t_depth;
static _Thread_local batch *t_batches;
static _Thread_local ncclResult_t t_failed; /* an operation of this group */
static int operations, initialised; /* atomic: of this process */
static int next_late, busy;         /* atomic: see hostnccl_late and hostnccl_busy */
static char texts[TEXTS][256]; /* so many: one may be read while the next come */
static unsigned last_text;     /* atomic */
static pthread_mutex_t living = PTHREAD_MUTEX_INITIALIZER; /* guards comms and jobs */
static ncclComm_t comms;
static uint64_t jobs;
static _Thread_local uint64_t t_job; /* the last one that this thread has started */

static ncclResult_t refuse(ncclResult_t r, const char *text) {
  static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
  unsigned next;
  pthread_mutex_lock(&one);
  next = (last_text + 1) % TEXTS;
  snprintf(texts[next], sizeof texts[next], "%s", text);
  __atomic_store_n(&last_text, next, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&one);
  return r;
}

/* What a real NCCL does not survive. */
static void die(const char *text) {
  fprintf(stderr, "hostcuda: %s\n", text);
  abort();
}

/* What HOSTCUDA_FAIL says about this call. */
static ncclResult_t enter(const char *name) {
  char text[120];
  int code = hostcuda_injected(name);
  snprintf(text, sizeof text, "injected failure of %s", name);
  return code != 0 ? refuse((ncclResult_t)code, text) : ncclSuccess;
}

#define ENTER(name)                                      \
  do {                                                   \
    ncclResult_t entered = enter(name);                  \
    if (entered != ncclSuccess) return entered;          \
  } while (0)

static uint64_t load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void store(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

static bool aborted(ncclComm_t c) { /* or the one that it is being split from */
  return __atomic_load_n(&c->aborted, __ATOMIC_ACQUIRE) ||
         (c->parent != NULL && __atomic_load_n(&c->parent->aborted, __ATOMIC_ACQUIRE));
}

static void pause_for(long nanoseconds) {
  struct timespec t = {0, 0};
  t.tv_nsec = nanoseconds;
  nanosleep(&t, NULL);
}

static void nap(void) { pause_for(20000); }

/* Whether HOSTNCCL_FAIL names this kind of failure for the nth event; *code is its third field. */
static bool told(const char *kind, int nth, int *code) {
  const char *s = getenv("HOSTNCCL_FAIL"), *rank = getenv("RANK"), *end;
  size_t length = strlen(kind);
  for (; s != NULL && *s != 0; s = strchr(s, ',') != NULL ? strchr(s, ',') + 1 : "") {
    char *p;
    if (strncmp(s, kind, length) != 0 || s[length] != ':') continue;
    if (strtol(s + length + 1, &p, 10) != nth) continue;
    *code = *p == ':' ? (int)strtol(p + 1, &p, 10) : (int)ncclRemoteError;
    end = p;
    if (*end != '@' || (rank != NULL && atoi(end + 1) == atoi(rank))) return true;
  }
  return false;
}

/* An error is there to stay. */
static void set_state(ncclComm_t c, ncclResult_t r) {
  pthread_mutex_lock(&c->lock);
  if (c->state == ncclSuccess || c->state == ncclInProgress) c->state = r;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
}

/* Locks c, unless it is NULL. */
static bool hold(ncclComm_t c) {
  ncclComm_t o;
  if (c == NULL) return false;
  pthread_mutex_lock(&living);
  for (o = comms; o != NULL && o != c;) o = o->next;
  if (o == NULL) die("a communicator is used after its end");
  pthread_mutex_lock(&c->lock);
  pthread_mutex_unlock(&living);
  return true;
}

static ncclComm_t make_comm(const ncclConfig_t *config, bool blocking, int device) {
  static uint64_t made; /* guarded by living */
  const char *forced = getenv("NCCL_COMM_BLOCKING"), *version = getenv("HOSTNCCL_VERSION");
  ncclComm_t c = (ncclComm_t)calloc(1, sizeof *c);
  if (c == NULL) abort();
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->changed, NULL);
  c->blocking = blocking;
  if (config != NULL) c->blocking = config->blocking != 0;
  if (forced != NULL) c->blocking = atoi(forced) != 0;
  c->device = device;
  pthread_mutex_lock(&living);
  c->random = hostcuda_seed() * 7919 + ++made;
  c->old = version != NULL ? atoi(version) < 22600 : hostcuda_random(&c->random) % 2 == 0;
  c->next = comms;
  comms = c;
  pthread_mutex_unlock(&living);
  return c;
}

static void free_comm(ncclComm_t c) {
  ncclComm_t *at = &comms;
  pthread_mutex_lock(&living);
  while (*at != c) at = &(*at)->next;
  *at = c->next;
  pthread_mutex_unlock(&living);
  pthread_mutex_lock(&c->lock); /* whoever has just held it lets it go */
  pthread_mutex_unlock(&c->lock);
  if (c->all != NULL) munmap(c->all, sizeof *c->all);
  pthread_mutex_destroy(&c->lock);
  pthread_cond_destroy(&c->changed);
  free(c);
}

static void join(ncclComm_t c) {
  uint64_t joined;
  ncclComm_t o;
  pthread_mutex_lock(&living);
  joined = c->unjoined;
  for (o = comms; joined != 0 && o != NULL; o = o->next)
    if (o->unjoined == joined) o->unjoined = 0;
  pthread_mutex_unlock(&living);
}

/* NCCL up to 2.25 has one place for a thread's job, which the next one overwrites: a job that goes
   through without a thread of its own (running) only matters to one that has not ended. */
static void check_thread(ncclComm_t c, bool running) { /* living is held */
  ncclComm_t o;
  for (o = comms; o != NULL && t_job != 0; o = o->next) {
    bool unjoined = o != c && o->old && o->unjoined == t_job;
    pthread_mutex_lock(&o->lock);
    if (running && o->state != ncclInProgress) unjoined = false;
    pthread_mutex_unlock(&o->lock);
    if (unjoined)
      die("operation on a communicator while the thread's last job on another is not joined: "
          "NCCL 2.19 to 2.25 crash here");
  }
}

/* Its state; whoever hears first of the end of a job frees it, without a lock: of two threads that
   ask at a time both would. Some take their time, so that it shows. */
static ncclResult_t state(ncclComm_t c) {
  ncclResult_t r;
  bool slow;
  if (!hold(c)) return refuse(ncclInvalidArgument, "the communicator is NULL");
  if (c->asked) die("two threads ask for the state of a communicator at a time");
  c->asked = true;
  slow = hostcuda_random(&c->random) % 8 == 0;
  pthread_mutex_unlock(&c->lock);
  if (slow) nap();
  hold(c);
  r = c->state;
  c->asked = false;
  pthread_mutex_unlock(&c->lock);
  return r;
}

/* What every call asks first. Joins the last job. */
static ncclResult_t ready(ncclComm_t c) {
  ncclResult_t r = state(c);
  if (r == ncclInProgress)
    return refuse(ncclInvalidArgument,
                  "the communicator is used before its last operation is ncclSuccess");
  if (r == ncclSuccess) join(c);
  return r;
}

/* An operation that fails leaves its communicator failed. */
static ncclResult_t fail(ncclComm_t c, ncclResult_t r) {
  if (c != NULL && !c->blocking) set_state(c, r);
  return r;
}

static ncclResult_t usable(ncclComm_t c) {
  ncclResult_t r = ready(c);
  if (r == ncclSuccess && hold(c)) {
    if (c->finalized) r = refuse(ncclInvalidArgument, "the communicator is finalized");
    pthread_mutex_unlock(&c->lock);
  }
  return r == ncclSuccess ? r : fail(c, r);
}

/* --- jobs --- */

static void end_job(job *j, ncclResult_t r) {
  int i;
  for (i = 0; i < j->count; i++) {
    ncclComm_t c = j->comms[i];
    pthread_mutex_lock(&c->lock);
    if (c->state == ncclInProgress) c->state = r;
    c->jobs--;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
  }
  free(j);
}

static void *run_job(void *arg) {
  job *j = (job *)arg;
  pause_for((long)j->pause);
  end_job(j, j->run(j));
  return NULL;
}

static job *make_job(ncclResult_t (*run)(job *), int count, ncclComm_t c) {
  job *j = (job *)calloc(1, sizeof *j + (size_t)count * sizeof(ncclComm_t));
  if (j == NULL) abort();
  j->run = run;
  j->count = count;
  j->comms[0] = c;
  return j;
}

/* Whoever does not poll records his event too early, as with the real one. */
static ncclResult_t start_job(job *j) {
  bool blocking = j->comms[0]->blocking;
  pthread_t thread;
  ncclResult_t r;
  int i;
  pthread_mutex_lock(&living);
  check_thread(NULL, blocking);
  if (!blocking) t_job = ++jobs;
  for (i = 0; i < j->count; i++) j->comms[i]->unjoined = blocking ? 0 : t_job;
  pthread_mutex_unlock(&living);
  for (i = 0; i < j->count; i++) {
    ncclComm_t c = j->comms[i];
    pthread_mutex_lock(&c->lock);
    if (!blocking && c->state == ncclSuccess) c->state = ncclInProgress;
    c->jobs++;
    j->pause = hostcuda_random(&c->random);
    pthread_mutex_unlock(&c->lock);
  }
  if (blocking) {
    r = j->run(j);
    end_job(j, r);
    return r;
  }
  j->pause = j->pause % 2 == 0 ? 0 : j->pause / 2 % 300000;
  if (pthread_create(&thread, NULL, run_job, j) != 0) abort();
  pthread_detach(thread);
  return ncclInProgress;
}

static void await_jobs(ncclComm_t c) {
  pthread_mutex_lock(&c->lock);
  while (c->jobs > 0) pthread_cond_wait(&c->changed, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

/* Until its jobs have ended and no stream and no graph has an operation of it. */
static void drain(ncclComm_t c) {
  pthread_mutex_lock(&c->lock);
  while (c->pending > 0 || c->jobs > 0) pthread_cond_wait(&c->changed, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

/* --- waiting --- */

static void hang(ncclComm_t c) {
  while (!aborted(c)) nap();
}

static bool ended(pid_t pid) { /* a process; its parent need not have heard of it */
  char path[40], text[512], *name_end;
  ssize_t n;
  int fd;
  snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) return errno == ENOENT;
  n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return true;
  text[n] = 0;
  name_end = strrchr(text, ')');
  return name_end != NULL && (name_end[2] == 'Z' || name_end[2] == 'X');
}

/* With HOSTNCCL_TRANSPORT=net a dead peer is noticed; over shared memory nobody looks. */
static void look_after(ncclComm_t c, int peer) {
  const char *transport = getenv("HOSTNCCL_TRANSPORT");
  int pid = __atomic_load_n(&c->all->seats[peer].pid, __ATOMIC_ACQUIRE);
  char text[120];
  if (transport == NULL || strcmp(transport, "net") != 0 || pid == 0 || !ended(pid)) return;
  snprintf(text, sizeof text, "connection closed by remote peer, rank %d", peer);
  set_state(c->parent != NULL ? c->parent : c, refuse(ncclRemoteError, text));
  hang(c);
}

/* Waits until *p >= want; false when aborted. */
static bool await(ncclComm_t c, const uint64_t *p, uint64_t want, int peer) {
  int tries;
  for (tries = 0; load(p) < want; tries++) {
    if (aborted(c)) return false;
    if (tries % 64 == 63) look_after(c, peer);
    if (tries > 20) nap();
    else sched_yield();
  }
  return !aborted(c);
}

static bool meet(ncclComm_t c) {
  int r;
  store(&c->all->seats[c->rank].step, ++c->step);
  for (r = 0; r < c->size; r++)
    if (!await(c, &c->all->seats[r].step, c->step, r)) return false;
  return true;
}

/* --- arithmetic --- */

static size_t type_size(ncclDataType_t t) {
  switch (t) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 0;
  }
}

#define LOOP(T, A, READ, WRITE, COMBINE, AVERAGE)                                  \
  for (i = 0; i < n; i++) {                                                        \
    A sum = (A)0;                                                                  \
    for (r = 0; r < size; r++) {                                                   \
      T element;                                                                   \
      A x;                                                                         \
      memcpy(&element, from[r] + i * sizeof element, sizeof element);              \
      x = READ;                                                                    \
      if (r == 0) sum = x;                                                         \
      else { COMBINE; }                                                            \
    }                                                                              \
    AVERAGE;                                                                       \
    { T element = WRITE; memcpy(to + i * sizeof element, &element, sizeof element); } \
  }

#define PICK                                                                       \
  switch (op) {                                                                    \
    case ncclProd: sum *= x; break;                                                \
    case ncclMax: sum = x > sum ? x : sum; break;                                  \
    case ncclMin: sum = x < sum ? x : sum; break;                                  \
    default: sum += x; break;                                                      \
  }

#define WHOLE(T, U) \
  LOOP(U, U, element, (U)sum, PICK, if (op == ncclAvg) sum = (U)((T)sum / (T)size))
#define SMALL(T, U) \
  LOOP(U, U, element, sum, sum = combine_small(sum, x, op), \
       if (op == ncclAvg) sum = (U)((T)sum / (T)size))

static uint8_t combine_small(uint8_t a, uint8_t b, ncclRedOp_t op) {
  if (op == ncclMax) return a > b ? a : b;
  if (op == ncclMin) return a < b ? a : b;
  return (uint8_t)(op == ncclProd ? a * b : a + b);
}

static void reduce_signed(char *to, char **from, int size, size_t n, ncclDataType_t t,
                          ncclRedOp_t op) { /* sums wrap around: signed ones as unsigned */
  size_t i;
  int r;
  for (i = 0; i < n; i++) {
    uint64_t sum = 0;
    for (r = 0; r < size; r++) {
      int8_t b;
      int32_t w;
      int64_t x;
      size_t bytes = type_size(t);
      memcpy(&b, from[r] + i * bytes, 1);
      memcpy(&w, from[r] + i * bytes, bytes < 4 ? bytes : 4);
      memcpy(&x, from[r] + i * bytes, bytes);
      x = t == ncclInt8 ? b : t == ncclInt32 ? w : x;
      if (r == 0) sum = (uint64_t)x;
      else if (op == ncclProd) sum *= (uint64_t)x;
      else if (op == ncclMax) sum = (int64_t)sum > x ? sum : (uint64_t)x;
      else if (op == ncclMin) sum = (int64_t)sum < x ? sum : (uint64_t)x;
      else sum += (uint64_t)x;
    }
    if (t == ncclInt8) sum = (uint64_t)(int8_t)sum;
    if (t == ncclInt32) sum = (uint64_t)(int32_t)sum;
    if (op == ncclAvg) sum = (uint64_t)((int64_t)sum / size);
    memcpy(to + i * type_size(t), &sum, type_size(t)); /* little-endian */
  }
}

static float half(float x) { return hostcuda_half_to_float(hostcuda_float_to_half(x)); }
static float bfloat(float x) { return hostcuda_bf16_to_float(hostcuda_float_to_bf16(x)); }

/* Floats are multiplied by factor first. It, the product and each sum on the way are rounded to the
   type, as NCCL has it. */
static void reduce_pieces(char *to, char **from, int size, size_t n, ncclDataType_t t,
                          ncclRedOp_t op, double factor) {
  float f = (float)factor;
  size_t i;
  int r;
  switch (t) {
    case ncclFloat32: LOOP(float, float, element * f, sum, PICK, ) break;
    case ncclFloat64: LOOP(double, double, element * factor, sum, PICK, ) break;
    case ncclFloat16:
      f = half(f);
      LOOP(uint16_t, float, half(hostcuda_half_to_float(element) * f), hostcuda_float_to_half(sum),
           PICK sum = half(sum), ) break;
    case ncclBfloat16:
      f = bfloat(f);
      LOOP(uint16_t, float, bfloat(hostcuda_bf16_to_float(element) * f),
           hostcuda_float_to_bf16(sum), PICK sum = bfloat(sum), ) break;
    case ncclUint8: SMALL(unsigned, uint8_t) break;
    case ncclUint32: WHOLE(uint32_t, uint32_t) break;
    case ncclUint64: WHOLE(uint64_t, uint64_t) break;
    default: reduce_signed(to, from, size, n, t, op); break;
  }
}

/* --- operations, on the thread of a stream --- */

static bool agreed(ncclComm_t c, const action *a) {
  const call *mine = &c->all->seats[c->rank].now;
  int r;
  (void)a;
  for (r = 0; r < c->size; r++)
    if (memcmp(&c->all->seats[r].now, mine, sizeof *mine) != 0) return false;
  return true;
}

static void take(ncclComm_t c, const action *a, size_t at, size_t n) {
  size_t bytes = type_size(a->type);
  char *from[MAX_RANKS];
  int r, own = (int)a->op - ncclNumOps;
  double factor = own >= 0 ? c->scalars[own] : a->op == ncclAvg ? 1.0 / c->size : 1;
  for (r = 0; r < c->size; r++) {
    from[r] = c->all->seats[r].slot;
    if (a->kind == REDUCE_SCATTER) from[r] += (size_t)c->rank * n * bytes;
    if (a->kind == ALL_GATHER)
      memcpy(a->recv + ((size_t)r * a->count + at) * bytes, from[r], n * bytes);
  }
  if (a->kind == BROADCAST) memcpy(a->recv + at * bytes, from[a->root], n * bytes);
  if (a->kind == ALL_REDUCE || a->kind == REDUCE_SCATTER ||
      (a->kind == REDUCE && c->rank == a->root))
    reduce_pieces(a->recv + at * bytes, from, c->size, n, a->type, a->op,
                  factor);
}

static void give(ncclComm_t c, const action *a, size_t at, size_t n) {
  size_t bytes = type_size(a->type);
  char *slot = c->all->seats[c->rank].slot;
  int r;
  if (a->kind == BROADCAST && c->rank != a->root) return;
  if (a->kind != REDUCE_SCATTER) {
    memcpy(slot, a->send + at * bytes, n * bytes);
    return;
  }
  for (r = 0; r < c->size; r++)
    memcpy(slot + (size_t)r * n * bytes, a->send + ((size_t)r * a->count + at) * bytes, n * bytes);
}

static void run_collective(ncclComm_t c, const action *a) {
  size_t at, n, most = CHUNK / type_size(a->type);
  call *now = &c->all->seats[c->rank].now;
  if (a->count == 0) return;
  if (a->kind == REDUCE_SCATTER) most /= (size_t)c->size;
  memset(now, 0, sizeof *now);
  now->kind = a->kind;
  now->count = (int64_t)a->count;
  now->type = a->type;
  now->op = a->op;
  now->root = a->root;
  for (at = 0; at < a->count; at += n) {
    n = a->count - at < most ? a->count - at : most;
    give(c, a, at, n);
    if (!meet(c)) return;
    if (at == 0 && !agreed(c, a)) {
      hang(c);
      return;
    }
    take(c, a, at, n);
    if (!meet(c)) return;
  }
}

typedef struct transfer { size_t at; bool begun, done; } transfer;

static bool post(ncclComm_t c, const action *a, transfer *t) {
  mailbox *m = &c->all->mail[c->rank][a->root];
  size_t total = a->count * type_size(a->type), n = total - t->at < MAIL ? total - t->at : MAIL;
  if (load(&m->taken) != load(&m->sent)) return false;
  if (n > 0) memcpy(m->data, a->send + t->at, n);
  m->total = total;
  m->bytes = n;
  t->at += n;
  t->done = t->at == total;
  store(&m->sent, load(&m->sent) + 1);
  return true;
}

static bool fetch(ncclComm_t c, const action *a, transfer *t) {
  mailbox *m = &c->all->mail[a->root][c->rank];
  size_t total = a->count * type_size(a->type);
  if (load(&m->taken) == load(&m->sent)) return false;
  if (m->total != total) { /* the sizes differ: the real one hangs or corrupts */
    hang(c);
    return false;
  }
  if (m->bytes > 0) memcpy(a->recv + t->at, m->data, m->bytes);
  t->at += m->bytes;
  t->done = t->at == total;
  store(&m->taken, load(&m->taken) + 1);
  return true;
}

/* An earlier send to the same peer, or receive from it, goes first. */
static bool is_turn(const batch *b, const transfer *t, int i) {
  int k;
  for (k = 0; k < i; k++)
    if (!t[k].done && b->actions[k].kind == b->actions[i].kind &&
        b->actions[k].root == b->actions[i].root)
      return false;
  return true;
}

static void run_transfers(batch *b) {
  transfer *t = (transfer *)calloc((size_t)b->count, sizeof *t);
  bool moved, left = t != NULL;
  int i, idle = 0;
  while (left && !aborted(b->comm)) {
    left = moved = false;
    for (i = 0; i < b->count; i++) {
      const action *a = &b->actions[i];
      if (a->kind < SEND || t[i].done) continue;
      left = true;
      if (!is_turn(b, t, i)) continue;
      moved = (a->kind == SEND ? post(b->comm, a, &t[i]) : fetch(b->comm, a, &t[i])) || moved;
      if (!moved && idle % 64 == 63) look_after(b->comm, a->root);
    }
    idle = moved ? 0 : idle + 1;
    if (idle > 20) nap();
    else if (idle > 0) sched_yield();
  }
  free(t);
}

/* Whether this operation goes on after what HOSTNCCL_FAIL has in store for it. */
static bool survives(ncclComm_t c) {
  int nth = __atomic_add_fetch(&operations, 1, __ATOMIC_SEQ_CST), code = 0;
  if (told("die", nth, &code)) kill(getpid(), SIGKILL);
  if (told("error", nth, &code)) {
    set_state(c, refuse((ncclResult_t)code, "injected asynchronous error"));
  } else if (!told("stall", nth, &code)) {
    return true;
  }
  hang(c);
  return false;
}

/* One at a time; those of streams in the order of their calls. */
static void run_batch(void *arg) {
  batch *b = (batch *)arg;
  ncclComm_t c = b->comm;
  int i;
  pthread_mutex_lock(&c->lock);
  while (c->busy || (b->eager && c->head != b->ticket)) pthread_cond_wait(&c->changed, &c->lock);
  c->busy = true;
  pthread_mutex_unlock(&c->lock);
  if (b->late) give(c, &b->actions[0], 0, b->actions[0].count);
  for (i = 0; i < b->count && !aborted(c) && survives(c); i++)
    if (b->actions[i].kind < SEND) run_collective(c, &b->actions[i]);
  run_transfers(b);
  pthread_mutex_lock(&c->lock);
  c->busy = false;
  if (b->eager) c->head++;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
}

static void free_batch(batch *b) {
  free(b->actions);
  free(b);
}

static void drop_batch(void *arg) {
  batch *b = (batch *)arg;
  ncclComm_t c = b->comm;
  free_batch(b);
  pthread_mutex_lock(&c->lock);
  c->pending--;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
}

/* --- enqueueing --- */

static ncclResult_t enqueue(batch *b) {
  enum cudaStreamCaptureStatus status;
  hostcuda_op op = {run_batch, drop_batch, NULL};
  ncclComm_t c = b->comm;
  bool eager;
  cudaError_t e;
  op.arg = b;
  if (hostcuda_device() != c->device) cudaSetDevice(c->device);
  b->eager = eager = cudaStreamIsCapturing(b->stream, &status) != cudaSuccess ||
                     status == cudaStreamCaptureStatusNone;
  pthread_mutex_lock(&c->lock);
  if (eager) b->ticket = c->tail++;
  pthread_mutex_unlock(&c->lock);
  e = hostcuda_enqueue(b->stream, op, true);
  if (e == cudaSuccess) return ncclSuccess;
  pthread_mutex_lock(&c->lock);
  if (eager) c->tail--;
  pthread_mutex_unlock(&c->lock);
  return refuse(ncclUnhandledCudaError, cudaGetErrorString(e));
}

/* Ranks connect when they first use an algorithm, or send to a peer: each waits for the others. */
static bool connected(ncclComm_t c, const action *a) {
  seat *seats = c->all->seats;
  int size = a->count * type_size(a->type) > SMALL_MAX, r;
  if (a->count == 0) return true;
  if (a->kind >= SEND) {
    store(&seats[c->rank].peers[a->root], 1);
    return await(c, &seats[a->root].peers[c->rank], 1, a->root);
  }
  store(&seats[c->rank].rings[size], 1);
  for (r = 0; r < c->size; r++)
    if (!await(c, &seats[r].rings[size], 1, r)) return false;
  return true;
}

/* All that a group will need is announced before any of it is waited for. */
static ncclResult_t connect_group(const batch *first) {
  const batch *b;
  int i;
  for (b = first; b != NULL; b = b->next)
    for (i = 0; i < b->count; i++)
      if (b->actions[i].kind >= SEND)
        store(&b->comm->all->seats[b->comm->rank].peers[b->actions[i].root], 1);
  for (b = first; b != NULL; b = b->next)
    for (i = 0; i < b->count; i++)
      if (!connected(b->comm, &b->actions[i])) return ncclInternalError;
  return ncclSuccess;
}

static ncclResult_t run_group(job *j) {
  ncclResult_t r = j->late ? ncclSuccess : connect_group(j->batches);
  int was = hostcuda_device();
  batch *b, *next;
  if (j->late) {
    hang(j->comms[0]);
    pause_for(100000000);
  }
  for (b = j->batches; b != NULL; b = next) {
    next = b->next;
    b->late = j->late;
    if (aborted(b->comm) && !j->late) r = ncclInternalError;
    if (r == ncclSuccess) r = enqueue(b);
    else drop_batch(b);
  }
  if (hostcuda_device() != was && j->comms[0]->blocking) cudaSetDevice(was); /* the caller's */
  return r;
}

static batch *batch_for(ncclComm_t c, cudaStream_t stream) {
  batch **at = &t_batches, *b;
  for (; *at != NULL; at = &(*at)->next)
    if ((*at)->comm == c && (*at)->stream == stream) return *at;
  b = (batch *)calloc(1, sizeof *b);
  if (b == NULL) abort();
  b->comm = c;
  b->stream = stream;
  *at = b;
  return b;
}

ncclResult_t ncclGroupStart(void) {
  ENTER("ncclGroupStart");
  t_depth++;
  return ncclSuccess;
}

static ncclResult_t end_group(ncclResult_t failure) {
  batch *first = t_batches, *b, *next;
  int count = 0;
  job *j;
  if (failure == ncclSuccess) failure = t_failed;
  t_failed = ncclSuccess;
  t_batches = NULL;
  for (b = first; b != NULL; b = b->next, count++)
    if (b->comm->blocking != first->comm->blocking)
      failure = refuse(ncclInvalidArgument, "a blocking communicator in a group with another");
  for (b = first; b != NULL && failure != ncclSuccess; b = next) {
    next = b->next;
    fail(b->comm, failure);
    free_batch(b);
  }
  if (first == NULL || failure != ncclSuccess) return failure;
  j = make_job(run_group, count, NULL);
  j->batches = first;
  j->late = __atomic_exchange_n(&next_late, 0, __ATOMIC_SEQ_CST) != 0;
  for (b = first; b != NULL; b = b->next) {
    j->comms[--count] = b->comm;
    hold(b->comm);
    b->comm->pending++;
    pthread_mutex_unlock(&b->comm->lock);
  }
  return start_job(j);
}

ncclResult_t ncclGroupEnd(void) {
  ncclResult_t failure = enter("ncclGroupEnd");
  if (t_depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --t_depth > 0 ? failure : end_group(failure);
}

static bool reachable(const void *p, size_t bytes) {
  struct cudaPointerAttributes a;
  if (bytes == 0) return true;
  if (p == NULL || cudaPointerGetAttributes(&a, p) != cudaSuccess) return false;
  return a.type == cudaMemoryTypeHost || hostcuda_is_device(p, bytes);
}

static ncclResult_t check(const char *name, action a, ncclComm_t c, cudaStream_t stream) {
  size_t size = type_size(a.type), in = a.count, out = a.count;
  ncclResult_t r;
  ENTER(name);
  if ((r = usable(c)) != ncclSuccess) return r;
  if (size == 0 || (int)a.op < 0 || (int)a.op >= ncclNumOps + c->scalars_made ||
      (a.op >= ncclNumOps && c->scalar_types[a.op - ncclNumOps] != a.type) ||
      a.root < 0 || a.root >= c->size)
    return refuse(ncclInvalidArgument, "bad type, operation, root or peer");
  if (a.kind == REDUCE_SCATTER) in *= (size_t)c->size;
  if (a.kind == ALL_GATHER) out *= (size_t)c->size;
  if (a.kind == BROADCAST && c->rank != a.root) in = 0;
  if (a.kind == RECV) in = 0;
  if (a.kind == SEND || (a.kind == REDUCE && c->rank != a.root)) out = 0;
  if (!reachable(a.send, in * size) || !reachable(a.recv, out * size))
    return refuse(ncclInvalidArgument, "a buffer is not in device memory, or ends too early");
  if (stream == cudaStreamPerThread && !c->blocking)
    die("cudaStreamPerThread with a non-blocking communicator is the stream of NCCL's own thread");
  if (stream > cudaStreamPerThread && hostcuda_stream_device(stream) != c->device)
    return refuse(ncclInvalidUsage, "the stream belongs to another device");
  return ncclSuccess;
}

/* A single operation of an old communicator says ncclSuccess while it is in progress. */
static ncclResult_t add(const char *name, action a, ncclComm_t c, cudaStream_t stream) {
  ncclResult_t r = check(name, a, c, stream);
  batch *b;
  if (r != ncclSuccess) {
    if (t_depth > 0) t_failed = r;
    return fail(c, r);
  }
  b = batch_for(c, stream);
  b->actions = (action *)realloc(b->actions, (size_t)(b->count + 1) * sizeof a);
  if (b->actions == NULL) abort();
  b->actions[b->count++] = a;
  if (t_depth > 0) return ncclSuccess;
  r = end_group(ncclSuccess);
  return r == ncclInProgress && c->old ? ncclSuccess : r;
}

static action make(int kind, const void *send, void *recv, size_t count, ncclDataType_t type,
                   ncclRedOp_t op, int root) {
  action a;
  memset(&a, 0, sizeof a);
  a.kind = kind;
  a.send = (const char *)send;
  a.recv = (char *)recv;
  a.count = count;
  a.type = type;
  a.op = op;
  a.root = root;
  return a;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  ncclResult_t r;
  uint16_t bits;
  ENTER("ncclRedOpCreatePreMulSum");
  if ((r = usable(comm)) != ncclSuccess) return r;
  if (type != ncclFloat16 || residence != ncclScalarHostImmediate || comm->scalars_made == 4)
    return refuse(ncclInvalidArgument, "the double has f16 and four operations a communicator");
  memcpy(&bits, scalar, sizeof bits);
  comm->scalars[comm->scalars_made] = hostcuda_half_to_float(bits);
  comm->scalar_types[comm->scalars_made] = type;
  *op = (ncclRedOp_t)(ncclNumOps + comm->scalars_made++);
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add("ncclAllReduce", make(ALL_REDUCE, send, recv, count, type, op, 0), comm, stream);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return add("ncclReduce", make(REDUCE, send, recv, count, type, op, root), comm, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return add("ncclBroadcast", make(BROADCAST, send, recv, count, type, ncclSum, root), comm,
             stream);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add("ncclAllGather", make(ALL_GATHER, send, recv, count, type, ncclSum, 0), comm, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add("ncclReduceScatter", make(REDUCE_SCATTER, send, recv, count, type, op, 0), comm,
             stream);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add("ncclSend", make(SEND, send, NULL, count, type, ncclSum, peer), comm, stream);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add("ncclRecv", make(RECV, NULL, recv, count, type, ncclSum, peer), comm, stream);
}

/* --- communicators --- */

static int ids;
int hostnccl_ids(void) { return __atomic_load_n(&ids, __ATOMIC_SEQ_CST); }

static ncclResult_t make_id(ncclUniqueId *id) { /* its memory stays open as long as this process */
  id_text text = {0x686f73746e63636cu, (int32_t)getpid(), 0};
  text.fd = memfd_create("hostnccl", MFD_CLOEXEC);
  if (text.fd < 0 || ftruncate(text.fd, (off_t)sizeof(shared)) != 0)
    return refuse(ncclSystemError, "no memory for a communicator");
  memset(id, 0, sizeof *id);
  memcpy(id, &text, sizeof text);
  __atomic_add_fetch(&ids, 1, __ATOMIC_SEQ_CST);
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
  const char *s = getenv("HOSTNCCL_VERSION");
  ENTER("ncclGetVersion");
  if (version == NULL) return refuse(ncclInvalidArgument, "version is NULL");
  *version = s != NULL ? atoi(s) : NCCL_VERSION_CODE;
  return ncclSuccess;
}

/* As NCCL does at its first call that needs settings: the file's become the process's variables. */
static void read_settings(void) {
  const char *path = getenv("NCCL_CONF_FILE");
  FILE *f = path != NULL ? fopen(path, "r") : NULL;
  char line[256], name[128], value[128];
  while (f != NULL && fgets(line, sizeof line, f) != NULL)
    if (sscanf(line, "%127[^=#]=%127s", name, value) == 2) setenv(name, value, 0);
  if (f != NULL) fclose(f);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  ENTER("ncclGetUniqueId");
  read_settings();
  if (id == NULL) return refuse(ncclInvalidArgument, "id is NULL");
  return make_id(id);
}

static shared *open_id(const ncclUniqueId *id) {
  char path[64];
  id_text text;
  shared *all;
  int fd;
  memcpy(&text, id, sizeof text);
  if (text.magic != 0x686f73746e63636cu) return NULL;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", text.pid, text.fd);
  fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return NULL;
  all = (shared *)mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return all == (shared *)MAP_FAILED ? NULL : all;
}

static uint64_t host_hash(void) {
  const char *s = getenv("NCCL_HOSTID");
  uint64_t h = 1469598103934665603u;
  for (; s != NULL && *s != 0; s++) h = (h ^ (uint64_t)(unsigned char)*s) * 1099511628211u;
  return h;
}

static ncclResult_t find_duplicates(ncclComm_t c) {
  const seat *s = c->all->seats;
  const char *several = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  char text[160];
  int r, q, version = 0;
  ncclGetVersion(&version);
  if (version >= 23000 && several != NULL && atoi(several) != 0) return ncclSuccess;
  snprintf(text, sizeof text,
           "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to "
           "enable this configuration.");
  for (r = 0; r < c->size; r++)
    for (q = 0; q < r; q++) {
      if (s[r].device != s[q].device || s[r].host != s[q].host) continue;
      if (version < 23000)
        snprintf(text, sizeof text,
                 "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", r, q,
                 (unsigned)s[r].device + 1);
      return refuse(ncclInvalidUsage, text);
    }
  return ncclSuccess;
}

static ncclResult_t connect_ranks(ncclComm_t c) {
  int code = 0;
  seat *s;
  if (told("init", __atomic_add_fetch(&initialised, 1, __ATOMIC_SEQ_CST), &code)) hang(c);
  c->all = open_id(&c->id);
  if (c->all == NULL)
    return refuse(ncclSystemError, "the process that made the unique id has ended");
  s = &c->all->seats[c->rank];
  __atomic_store_n(&s->pid, (int32_t)getpid(), __ATOMIC_RELEASE);
  s->device = c->device;
  s->host = host_hash();
  if (!meet(c)) return refuse(ncclInternalError, "aborted");
  return find_duplicates(c);
}

/* Works as follows: every rank of the parent shows its color and key; then each finds its new rank
   and size; the first of a color makes the id and shows it; the others read it. */
static ncclResult_t split_ranks(ncclComm_t c) {
  ncclComm_t p = c->parent;
  uint64_t n = p->splits++;
  int r, first = -1, at = (int)(n % MAX_SPLITS);
  seat *mine = &p->all->seats[p->rank];
  mine->color[at] = c->color;
  mine->key[at] = c->key;
  store(&mine->splits, n + 1);
  c->size = c->rank = 0;
  for (r = 0; r < p->size; r++) {
    const seat *s = &p->all->seats[r];
    if (!await(p, &s->splits, n + 1, r) || aborted(c)) return ncclInternalError;
    if (s->color[at] != c->color) continue;
    c->size++;
    if (s->key[at] < c->key || (s->key[at] == c->key && r < p->rank)) c->rank++;
    if (first < 0 || s->key[at] < p->all->seats[first].key[at]) first = r;
  }
  if (c->color < 0) {
    store(&mine->ids, n + 1);
    return ncclSuccess;
  }
  if (first == p->rank) {
    ncclResult_t e = make_id(&mine->id[at]);
    if (e != ncclSuccess) return e;
  }
  store(&mine->ids, n + 1);
  if (!await(p, &p->all->seats[first].ids, n + 1, first)) return ncclInternalError;
  pthread_mutex_lock(&living); /* who aborts the parent looks at all ids */
  c->id = p->all->seats[first].id[at];
  pthread_mutex_unlock(&living);
  return ncclSuccess;
}

static ncclResult_t run_init(job *j) {
  ncclResult_t r = connect_ranks(j->comms[0]);
  if (r != ncclSuccess) set_state(j->comms[0], r);
  return r;
}

/* The child is shown when all is done; of one that failed, a half is. */
static ncclResult_t run_split(job *j) {
  ncclComm_t c = j->child;
  ncclResult_t r = split_ranks(c);
  if (r == ncclSuccess && c->color >= 0) r = connect_ranks(c);
  c->parent = NULL;
  if (r != ncclSuccess) set_state(c, r);
  if (c->color < 0 || (r != ncclSuccess && hostcuda_random(&c->random) % 2 == 0)) {
    free_comm(c);
    c = NULL;
  }
  __atomic_store_n(j->newcomm, c, __ATOMIC_RELEASE);
  return r;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  ncclComm_t c;
  int device;
  ENTER("ncclCommInitRankConfig");
  if (comm == NULL || nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks)
    return refuse(ncclInvalidArgument, "bad rank or number of ranks (hostcuda: up to 16)");
  if (config != NULL &&
      (config->magic != 0xcafebeef ||
       (config->blocking != NCCL_CONFIG_UNDEF_INT && (unsigned)config->blocking > 1)))
    return refuse(ncclInvalidArgument,
                  "the config was not initialised, or blocking not 0 or 1");
  if (cudaGetDevice(&device) != cudaSuccess)
    return refuse(ncclUnhandledCudaError, "no device");
  c = make_comm(config, true, device);
  c->size = nranks;
  c->rank = rank;
  c->id = id;
  if (!c->blocking) c->state = ncclInProgress;
  *comm = c;
  return start_job(make_job(run_init, 1, c));
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, nranks, id, rank, NULL);
}

/* Says ncclSuccess while it is in progress: a quirk of every version so far. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config) {
  ncclResult_t r;
  ncclComm_t c;
  job *j;
  ENTER("ncclCommSplit");
  if ((r = usable(comm)) != ncclSuccess) return r;
  if (newcomm == NULL || color < NCCL_SPLIT_NOCOLOR)
    return fail(comm, refuse(ncclInvalidArgument, "bad color or newcomm"));
  *newcomm = NULL;
  c = make_comm(config, comm->blocking, comm->device);
  c->parent = comm;
  c->color = color;
  c->key = key;
  j = make_job(run_split, 1, comm);
  j->child = c;
  j->newcomm = newcomm;
  r = start_job(j);
  return r == ncclInProgress ? ncclSuccess : r;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  ENTER("ncclCommGetAsyncError");
  if (error == NULL || comm == NULL) return refuse(ncclInvalidArgument, "NULL");
  if (__atomic_load_n(&busy, __ATOMIC_SEQ_CST) > 0 &&
      __atomic_fetch_sub(&busy, 1, __ATOMIC_SEQ_CST) > 0)
    *error = ncclInProgress;
  else *error = state(comm);
  return ncclSuccess;
}

static ncclResult_t run_finalize(job *j) {
  ncclComm_t c = j->comms[0];
  pthread_mutex_lock(&c->lock);
  while (c->pending > 0) pthread_cond_wait(&c->changed, &c->lock);
  pthread_mutex_unlock(&c->lock);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ncclResult_t r;
  ENTER("ncclCommFinalize");
  if ((r = usable(comm)) != ncclSuccess) return r;
  hold(comm);
  comm->finalized = true;
  pthread_mutex_unlock(&comm->lock);
  return start_job(make_job(run_finalize, 1, comm));
}

/* From here on nobody else may use it. */
static void doom(ncclComm_t c, bool abort_it) {
  hold(c);
  if (c->doomed) die("ncclCommDestroy or ncclCommAbort of a communicator that is in one of them");
  if (c->asked) die("a communicator ends while another thread asks for its state");
  c->doomed = true;
  if (abort_it) __atomic_store_n(&c->aborted, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&c->lock);
  pthread_mutex_lock(&living);
  check_thread(c, true);
  pthread_mutex_unlock(&living);
}

/* The ranks of one host serve each other until all have left. */
static void await_neighbours(ncclComm_t c) {
  const seat *mine = &c->all->seats[c->rank], *s;
  int r;
  for (r = 0; r < c->size; r++) {
    s = &c->all->seats[r];
    if (s->host != mine->host || s->pid == mine->pid) continue;
    while (!load(&s->left) && !ended(s->pid)) nap();
  }
}

static void end_comm(ncclComm_t c) {
  drain(c);
  join(c);
  if (c->all != NULL) store(&c->all->seats[c->rank].left, 1);
  if (c->all != NULL) await_neighbours(c);
  hostcuda_context(c->device); /* its memory is freed */
  hostcuda_context(hostcuda_device()); /* and the thread goes back to its own device */
  free_comm(c);
}

static bool same_id(ncclComm_t a, ncclComm_t b) {
  return memcmp(&a->id, &b->id, sizeof a->id) == 0;
}

/* Of a process's ranks of one communicator the last abort ends all; the others return at once. */
static bool is_last(ncclComm_t c) {
  ncclComm_t o;
  bool last = true;
  pthread_mutex_lock(&living);
  for (o = comms; o != NULL; o = o->next)
    if (o != c && same_id(o, c) && !o->orphan) last = false;
  if (!last) c->orphan = true;
  pthread_mutex_unlock(&living);
  return last;
}

static ncclComm_t next_orphan(ncclComm_t c) {
  ncclComm_t o;
  pthread_mutex_lock(&living);
  for (o = comms; o != NULL && (o == c || !o->orphan || !same_id(o, c));) o = o->next;
  if (o != NULL) o->orphan = false;
  pthread_mutex_unlock(&living);
  return o;
}

void hostnccl_busy(int times) { __atomic_store_n(&busy, times, __ATOMIC_SEQ_CST); }

void hostnccl_late(void) { __atomic_store_n(&next_late, 1, __ATOMIC_SEQ_CST); }

int hostnccl_communicators(void) {
  ncclComm_t c;
  int n = 0;
  pthread_mutex_lock(&living);
  for (c = comms; c != NULL; c = c->next) n++;
  pthread_mutex_unlock(&living);
  return n;
}

/* One that fails leaves the thread's group open. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ncclResult_t r = enter("ncclCommDestroy");
  if (comm == NULL) return ncclSuccess;
  if (r == ncclSuccess) r = ready(comm);
  if (r != ncclSuccess) {
    t_depth++;
    return r;
  }
  doom(comm, false);
  end_comm(comm);
  return ncclSuccess;
}

/* Inside a group its flags are set and what it began is waited for, and that is all. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ncclComm_t orphan;
  ENTER("ncclCommAbort");
  if (comm == NULL) return ncclSuccess;
  doom(comm, true);
  await_jobs(comm);
  if (t_depth > 0 || !is_last(comm)) return ncclSuccess;
  while ((orphan = next_orphan(comm)) != NULL) end_comm(orphan);
  end_comm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  ncclResult_t r = ready(comm);
  if (count == NULL) return refuse(ncclInvalidArgument, "NULL");
  if (r == ncclSuccess) *count = comm->size;
  return r;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  ncclResult_t r = ready(comm);
  if (rank == NULL) return refuse(ncclInvalidArgument, "NULL");
  if (r == ncclSuccess) *rank = comm->rank;
  return r;
}

const char *ncclGetErrorString(ncclResult_t result) {
  static const char *const text[] = {
      "no error", "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage", "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return (unsigned)result < sizeof text / sizeof text[0] ? text[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm) { /* of the process: no communicator has its own */
  (void)comm;
  return texts[__atomic_load_n(&last_text, __ATOMIC_ACQUIRE)];
}
