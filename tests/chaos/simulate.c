/* simulate.c - random programs of 2 to 6 ranks, with one thing that goes wrong.

     build/plain/simulate --seeds 10000 [FIRST]   so many seeds instead of 200
     build/plain/simulate 4711                    one of them, with a log of what each rank did

   Works as follows: a seed draws a program that all ranks compute alike (collectives of any kind,
   size, memory and type, synchronous or not; messages; sub-groups; models with steps), and a fault:
   a rank is killed or exits at its k-th passage of a sync point (CDDP__POINT in the header), is
   held up there, destroys its groups early, calls something else than the others, gets no memory
   for its k-th allocation, dies while it reports another's mistake, or has its store connection
   reset. Ranks are processes, or threads of one. Short random delays at the points shake the order
   of events. The oracles: nobody hangs; what returned CDDP_OK has the right bits; every failure
   fits the fault and names its rank; nothing is left open or allocated.
   One program in four ends with training an elastic model, and faults come there: a rank is
   killed, exits, is held up or leaves; others take its place or come besides, and the same happens
   to them, or they get no memory. All but one may go. Each rank that gets to the end must have the
   weights of an undisturbed run after every step. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/types.h>

static void sim_point(const char *name);
static ssize_t sim_send(int fd, const void *p, size_t n, int flags);
static ssize_t sim_recv(int fd, void *p, size_t n, int flags);
#define CDDP__POINT(name) sim_point(name)
#define send(fd, p, n, flags) sim_send(fd, p, n, flags)
#define recv(fd, p, n, flags) sim_recv(fd, p, n, flags)

#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#undef send
#undef recv

#include "../ranks.h"
#include "training.h"

#define MOST 6
#define LIVES 18 /* ranks of an elastic model, one after the other */
#define OPS 24
#define GROUPS 5
#define WORKS 4

enum { NOTHING, HOLD, KILL, EXIT, LEAVE, MISMATCH, NOMEM, BREAKER, DROP, FAULTS };
static const char *const fault_names[] = {"nothing", "hold",  "kill",    "exit", "leave",
                                          "mismatch", "nomem", "breaker", "drop"};

/* --- the program, drawn from the seed alone ---- */

enum { COLLECTIVE, RING, SPLIT, DROP_GROUP, MODEL, WAIT_ALL };
enum { PLAIN_MEMORY, SHARED_MEMORY, MIXED_MEMORY };

typedef struct op {
  int what, group;     /* index of the group it is on */
  int into;            /* SPLIT: index of the new group */
  int call, root, memory;
  cddp_dtype dtype;
  cddp_op reduce;
  size_t count;
  bool async;
  uint64_t seed;
} op;

typedef struct members { /* of a group, by rank in it */
  int n, rank[TRAINING_SHARDS]; /* in the world */
  bool live;
} members;

typedef struct blow { /* what happens to a rank of an elastic model, and when */
  int fault, moment;  /* passage of a point; LEAVE: step; NOMEM: allocation */
} blow;

typedef struct program {
  uint64_t seed;
  int n, ops;
  bool threads, shaken;
  op op[OPS];
  members at[OPS][GROUPS]; /* which groups there are when an op begins */
  int fault, victim;
  int moment; /* passage of a point, allocation, I/O call */
  int moment_op;
  double timeout_s;
  bool elastic; /* it ends with this: */
  recipe model;
  blow blows[LIVES];     /* n ranks, then those that join */
  int replaced, further; /* of three that go, so many are replaced; so many come besides */
  double join_delay;
  const char *hosts; /* as TEST_HOSTS */
} program;

static uint64_t draw(uint64_t seed, uint64_t what, uint64_t below) {
  return ranks_mix(seed, what, 99) % below;
}

static int rank_in(const members *m, int world_rank) { /* -1: no member */
  int i;
  for (i = 0; i < m->n; i++)
    if (m->rank[i] == world_rank) return i;
  return -1;
}

static int color_of(uint64_t seed, int rank) {
  return (int)(ranks_mix(seed, 77, (uint64_t)rank) % 2);
}

/* The group that `rank`, a member of m, gets by the split: those with its color. */
static members part_of(const members *m, uint64_t seed, int color) {
  members part;
  int i;
  memset(&part, 0, sizeof part);
  for (i = 0; i < m->n; i++)
    if (color_of(seed, m->rank[i]) == color) part.rank[part.n++] = m->rank[i];
  part.live = true;
  return part;
}

static size_t draw_count(uint64_t seed) {
  switch (draw(seed, 1, 5)) {
  case 0: return draw(seed, 2, 3);
  case 1: return 1 + draw(seed, 2, 12);
  case 2: return 1 + draw(seed, 2, 3000);
  case 3: return 4096 + draw(seed, 2, 20000);
  default: return 16384 + draw(seed, 2, 3);
  }
}

static void draw_call(op *o, uint64_t s, int n) {
  o->call = 1 + (int)draw(s, 12, 8);
  if (draw(s, 13, 12) == 0) o->call = CDDP__KIND_BARRIER;
  o->dtype = (cddp_dtype)draw(s, 14, 8);
  o->reduce = (cddp_op)draw(s, 15, 5);
  if (o->reduce == CDDP_PROD && o->dtype != CDDP_F32 && o->dtype != CDDP_F64) o->reduce = CDDP_MAX;
  if (o->reduce == CDDP_AVG && (o->dtype == CDDP_F16 || o->dtype == CDDP_BF16))
    o->reduce = CDDP_SUM;
  o->count = draw_count(s);
  o->memory = (int)draw(s, 16, 3);
  o->async = draw(s, 17, 3) == 0 && o->call != CDDP__KIND_BARRIER;
  o->root = (int)draw(s, 18, (uint64_t)n);
}

static void draw_op(program *p, int i, members *now) {
  op *o = &p->op[i];
  uint64_t s = o->seed = ranks_mix(p->seed, (uint64_t)i, 5);
  unsigned kind = (unsigned)draw(s, 10, 20);
  int g;
  do g = (int)draw(s++, 11, GROUPS);
  while (!now[g].live);
  s = o->seed;
  o->group = g;
  o->what = kind < 11 ? COLLECTIVE : kind < 14 ? RING : kind < 16 ? SPLIT : kind < 17 ? DROP_GROUP
            : kind < 19 ? MODEL : WAIT_ALL;
  draw_call(o, s, now[g].n);
  if (o->what == DROP_GROUP && g == 0) o->what = WAIT_ALL;
  if (o->what == SPLIT) {
    for (o->into = 1; o->into < GROUPS && now[o->into].live; o->into++) continue;
    if (o->into == GROUPS) o->what = WAIT_ALL;
  }
}

/* The program ends with an elastic model; what comes before it is undisturbed, and short. */
static void draw_elastic(program *p) {
  static const char *const hosts[] = {"ab", "aab", "abc", "aabb"};
  int i, kind;
  p->elastic = true;
  p->fault = NOTHING;
  p->timeout_s = 20;
  p->ops = (int)draw(p->seed, 61, 9);
  p->model = recipe_draw(p->seed, p->n);
  if (!p->threads && p->n > 2 && draw(p->seed, 62, 4) == 0) p->hosts = hosts[draw(p->seed, 63, 4)];
  if (!p->threads && draw(p->seed, 64, 2) == 0) p->further = (int)draw(p->seed, 65, 4);
  if (!p->threads) p->replaced = (int)draw(p->seed, 66, 4);
  p->join_delay = (double)draw(p->seed, 67, 1000) * 1e-5;
  for (i = 0; i < LIVES; i++) {
    uint64_t s = ranks_mix(p->seed, (uint64_t)i, 68);
    blow *b = &p->blows[i];
    kind = (int)draw(s, 1, 12);
    b->fault = kind < 4 ? KILL : kind < 5 ? EXIT : kind < 7 ? HOLD : kind < 8 ? LEAVE : NOTHING;
    b->moment = 1 + (int)draw(s, 2, draw(s, 3, 3) == 0 ? 12 : 60 * (1 + draw(s, 4, 6)));
    if (kind == 8 && i >= p->n) b->fault = NOMEM;
    if (b->fault == NOMEM) b->moment = 1 + (int)draw(s, 2, 25);
    if (b->fault == LEAVE) b->moment = (int)draw(s, 2, (uint64_t)p->model.steps);
    if (p->threads && b->fault == EXIT) b->fault = KILL;
    if (p->threads && RANKS_SLOW && !RANKS_TSAN && b->fault == KILL) b->fault = HOLD; /* it leaks */
  }
}

static program draw_program(uint64_t seed) {
  program p;
  members now[GROUPS];
  int i;
  memset(&p, 0, sizeof p);
  memset(now, 0, sizeof now);
  p.seed = seed;
  p.n = 2 + (int)draw(seed, 20, MOST - 1);
  p.ops = 6 + (int)draw(seed, 21, OPS - 5);
  p.threads = draw(seed, 22, 4) == 0;
  p.shaken = draw(seed, 23, 2) == 0;
  p.fault = (int)draw(seed, 24, FAULTS);
  p.victim = (int)draw(seed, 25, (uint64_t)p.n);
  p.moment = 1 + (int)draw(seed, 26, draw(seed, 27, 3) == 0 ? 30 : 500);
  p.moment_op = (int)draw(seed, 28, (uint64_t)p.ops);
  p.timeout_s = RANKS_WITHIN(20);
  if (p.fault == DROP && draw(seed, 29, 3) != 0) p.fault = KILL; /* these may wait for a timeout */
  if (p.fault == DROP) {
    p.timeout_s = RANKS_SLOW ? 4 : 1;
    p.moment = 1 + (int)draw(seed, 26, 24);
  }
  if (p.fault == NOMEM) p.moment = 1 + (int)draw(seed, 26, 60);
  if ((p.moment <= 6 && (p.fault == KILL || p.fault == EXIT)) ||
      ((p.moment <= 20 || p.victim == 0) && p.fault == NOMEM))
    p.timeout_s = RANKS_SLOW ? 4 : 1; /* while they meet: without rank 0's store some just wait */
  if (p.threads && p.fault >= KILL && p.fault != MISMATCH) p.fault = LEAVE;
  if (draw(seed, 60, 4) == 0) draw_elastic(&p);
  for (i = 0; i < p.n; i++) now[0].rank[i] = i;
  now[0].n = p.n;
  now[0].live = true;
  for (i = 0; i < p.ops; i++) {
    draw_op(&p, i, now);
    memcpy(p.at[i], now, sizeof now);
    if (p.op[i].what == DROP_GROUP) now[p.op[i].group].live = false;
    if (p.op[i].what == SPLIT) /* color 0 only is kept: everybody knows its members */
      now[p.op[i].into] = part_of(&now[p.op[i].group], p.op[i].seed, 0);
    if (p.op[i].what == SPLIT && now[p.op[i].into].n == 0) now[p.op[i].into].live = false;
  }
  return p;
}

/* --- what is shared between the ranks' processes and the judge ---- */

typedef struct story {
  bool fired;    /* the fault has happened to this rank */
  bool ended;    /* it came to its end */
  int failed_op; /* -1: none; -2: cddp_init */
  int failed_group;
  cddp_result result;
  char text[CDDP__ERROR_MAX];
  int wrong, wrong_op;      /* results with other bits */
  int different;            /* the failed group then returned something else */
  int fds, balance, threads; /* left behind */
  uint64_t hash[OPS];       /* weights after a MODEL; 0: did not get there */
  pid_t pid;
  int rank, state;       /* of an elastic model, as is what follows. state: STARTING .. */
  bool joins, gone;      /* gone: its process has ended */
  uint64_t begin, steps; /* the first step that it took part in; steps when it ended */
} story;

static struct shared {
  program p;
  story s[LIVES];
  int lives;     /* stories in use, of an elastic model; */
  int created;   /* ranks that have made it: when all have, faults begin; */
  int remaining; /* ranks that can finish its training: never comes down to 0 */
  uint64_t want[TRAINING_STEPS + 1]; /* hash of its weights after so many steps */
} *shared;

static bool verbose;
static int self = -1;            /* rank of this process; -1 in the judge and with threads */
static __thread int thread_rank = -1, thread_passages; /* of a rank that is a thread */
static cddp__atomic_u32 passages, allocations, ios;
static int balance;

static void story_log(int rank, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void story_log(int rank, const char *format, ...) {
  char line[900];
  va_list args;
  size_t n;
  if (!verbose) return;
  n = (size_t)snprintf(line, sizeof line, "rank %d: ", rank);
  va_start(args, format);
  vsnprintf(line + n, sizeof line - n, format, args);
  va_end(args);
  fprintf(stderr, "%s\n", line);
}

static void fire(const char *where) {
  __atomic_store_n(&shared->s[self].fired, true, __ATOMIC_RELAXED); /* of any thread of the rank */
  story_log(self, "%s at %s", fault_names[shared->p.fault], where);
}

static void shake(uint64_t passage) {
  uint64_t h = ranks_mix(shared->p.seed, passage, (uint64_t)(self >= 0 ? self : thread_rank) + 50);
  if (!shared->p.shaken || h % 16 != 0) return;
  if (h >> 8 & 1)
    sched_yield();
  else
    ranks_sleep((double)(h >> 16 & 255) * 1e-6);
}

/* A rank of an elastic model. GOING: it ends before the training does, and others go on. */
enum { STARTING, RUNNING, GOING, FINISHED, REFUSED };

static bool becomes(story *s, int from, int to) {
  return __atomic_compare_exchange_n(&s->state, &from, to, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}

static bool may_go(story *s) {
  int n = __atomic_load_n(&shared->remaining, __ATOMIC_SEQ_CST);
  if (s->joins && becomes(s, STARTING, GOING)) return true; /* the others do not need it */
  do
    if (n <= 1) return false;
  while (!__atomic_compare_exchange_n(&shared->remaining, &n, n - 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST));
  if (becomes(s, RUNNING, GOING)) return true;
  __atomic_add_fetch(&shared->remaining, 1, __ATOMIC_SEQ_CST);
  return false;
}

/* Threads die in the elastic engine alone: elsewhere one may hold a lock, which goes with a
   process. */
static void elastic_point(const char *name) {
  static cddp__atomic_u32 count;
  const program *p = &shared->p;
  int i = self >= 0 ? self : thread_rank, passage;
  const blow *b = &p->blows[i >= 0 ? i : 0];
  if (i < 0 || (self < 0 && strncmp(name, "elastic", 7) != 0)) return;
  if (__atomic_load_n(&shared->created, __ATOMIC_SEQ_CST) < p->n) return;
  passage = self >= 0 ? (int)cddp__add32(&count, 1) : ++thread_passages;
  if (passage == b->moment && b->fault == HOLD) ranks_sleep(0.06);
  if (passage < b->moment || (b->fault != KILL && b->fault != EXIT)) return;
  if (!may_go(&shared->s[i])) return;
  story_log(i, "%s at %s", fault_names[b->fault], name);
  if (self < 0) pthread_exit(NULL);
  if (b->fault == EXIT) _exit(3);
  raise(SIGKILL);
}

static void sim_point(const char *name) {
  const program *p = &shared->p;
  uint32_t passage;
  bool mine;
  if (strcmp(name, "waits") == 0) return; /* as often as the machine is slow */
  passage = cddp__add32(&passages, 1);
  mine = self == p->victim && (int)passage == p->moment;
  if (p->elastic) elastic_point(name);
  if (p->fault == BREAKER && strcmp(name, "breaking") == 0 && self >= 0) {
    fire(name);
    raise(SIGKILL);
  }
  if (mine && p->fault == KILL) {
    fire(name);
    raise(SIGKILL);
  }
  if (mine && p->fault == EXIT) {
    fire(name);
    _exit(3);
  }
  if (mine && p->fault == HOLD) {
    fire(name);
    ranks_sleep(0.06);
  }
  shake(passage);
}

static bool drops(int fd) {
  const program *p = &shared->p;
  if (p->fault != DROP || self != p->victim || (int)cddp__add32(&ios, 1) != p->moment) return false;
  fire("a socket");
  shutdown(fd, SHUT_RDWR);
  errno = ECONNRESET;
  return true;
}
static ssize_t sim_send(int fd, const void *p, size_t n, int flags) {
  return drops(fd) ? -1 : send(fd, p, n, flags);
}
static ssize_t sim_recv(int fd, void *p, size_t n, int flags) {
  return drops(fd) ? -1 : recv(fd, p, n, flags);
}

/* Of an elastic model's ranks one that joins may get none until it has joined. */
static bool gets_no_memory(void) {
  const program *p = &shared->p;
  bool joining = p->elastic && self >= 0 && p->blows[self].fault == NOMEM &&
                 __atomic_load_n(&shared->s[self].state, __ATOMIC_RELAXED) == STARTING;
  if (!joining && (p->fault != NOMEM || self != p->victim)) return false;
  return (int)cddp__add32(&allocations, 1) == (joining ? p->blows[self].moment : p->moment);
}

static void *sim_alloc(size_t bytes, void *user_data) {
  (void)user_data;
  if (gets_no_memory()) {
    fire("an allocation");
    return NULL;
  }
  __atomic_add_fetch(&balance, 1, __ATOMIC_RELAXED);
  return malloc(bytes);
}

static void sim_free(void *p, void *user_data) {
  (void)user_data;
  __atomic_sub_fetch(&balance, 1, __ATOMIC_RELAXED);
  free(p);
}

/* --- a rank ---- */

typedef struct pending {
  cddp_work *work;
  int op;
  void *send, *recv; /* recv: where the result is to be */
  bool send_shared, recv_shared;
} pending;

typedef struct rank {
  int me; /* in the world */
  story *s;
  cddp_group *groups[GROUPS];
  pending works[WORKS];
  int work_count;
} rank;

/* Element i of what world rank r puts into the op: a small whole number, exact in any type. */
static int element(const op *o, int r, size_t i) {
  return (int)(ranks_mix(o->seed, (uint64_t)r, i % 61) % 7);
}

static void set_element(cddp_dtype t, void *buf, size_t i, double v) {
  char *p = (char *)buf + i * cddp_dtype_size(t);
  int8_t b = (int8_t)v;
  int32_t w = (int32_t)v;
  int64_t q = (int64_t)v;
  if (t <= CDDP_BF16) ranks_store(t, buf, i, v);
  else if (t == CDDP_I8 || t == CDDP_U8) memcpy(p, &b, 1);
  else if (t == CDDP_I32) memcpy(p, &w, 4);
  else memcpy(p, &q, 8);
}

static double get_element(cddp_dtype t, const void *buf, size_t i) {
  const char *p = (const char *)buf + i * cddp_dtype_size(t);
  int32_t w;
  int64_t q;
  if (t <= CDDP_BF16) return ranks_load(t, buf, i);
  if (t == CDDP_I8 || t == CDDP_U8) return (double)*(const int8_t *)p;
  if (t == CDDP_I32) return memcpy(&w, p, 4), (double)w;
  return memcpy(&q, p, 8), (double)q;
}

static double reduced(const op *o, const members *m, size_t i) {
  double v = element(o, m->rank[0], i);
  int r;
  for (r = 1; r < m->n; r++) {
    double x = element(o, m->rank[r], i);
    v = o->reduce == CDDP_PROD ? v * x : o->reduce == CDDP_MIN ? fmin(v, x)
        : o->reduce == CDDP_MAX ? fmax(v, x) : v + x;
  }
  if (o->reduce != CDDP_AVG) return v;
  if (o->dtype > CDDP_BF16) return (double)((int)v / m->n);
  return o->dtype == CDDP_F64 ? v / m->n : (double)((float)v / (float)m->n);
}

/* Elements of the send and recv buffers. */
static size_t sends(const op *o, const members *m) {
  bool all = o->call == CDDP__KIND_SCATTER || o->call == CDDP__KIND_REDUCE_SCATTER ||
             o->call == CDDP__KIND_ALL_TO_ALL;
  return o->count * (all ? (size_t)m->n : 1);
}
static size_t receives(const op *o, const members *m) {
  bool all = o->call == CDDP__KIND_ALL_GATHER || o->call == CDDP__KIND_GATHER ||
             o->call == CDDP__KIND_ALL_TO_ALL;
  return o->count * (all ? (size_t)m->n : 1);
}

/* What element i of this rank's result must be; -1: not looked at. */
static double expected(const op *o, const members *m, int me, size_t i) {
  size_t c = o->count;
  switch (o->call) {
  case CDDP__KIND_REDUCE:
    if (me != o->root) return -1;
    return reduced(o, m, i);
  case CDDP__KIND_ALL_REDUCE: return reduced(o, m, i);
  case CDDP__KIND_BROADCAST: return element(o, m->rank[o->root], i);
  case CDDP__KIND_GATHER:
    if (me != o->root) return -1;
    return element(o, m->rank[i / c], i % c);
  case CDDP__KIND_ALL_GATHER: return element(o, m->rank[i / c], i % c);
  case CDDP__KIND_SCATTER: return element(o, m->rank[o->root], (size_t)me * c + i);
  case CDDP__KIND_REDUCE_SCATTER: return reduced(o, m, (size_t)me * c + i);
  default: return element(o, m->rank[i / c], (size_t)me * c + i % c);
  }
}

static void wrong(rank *k, int index) {
  if (k->s->wrong++ == 0) k->s->wrong_op = index;
}

static void verify_op(rank *k, int index, const op *o, const members *m, int me, const void *buf) {
  size_t n = receives(o, m), i;
  for (i = 0; i < n && o->call != CDDP__KIND_BARRIER; i += 1 + (n > 4000 ? i % 3 : 0)) {
    double want = expected(o, m, me, i);
    if (want >= 0 && get_element(o->dtype, buf, i) != want) {
      wrong(k, index);
      story_log(k->me, "op %d: element %zu is %g, not %g", index, i,
                get_element(o->dtype, buf, i), want);
      return;
    }
  }
}

static void verify(rank *k, int index, const void *buf) {
  const op *o = &shared->p.op[index];
  const members *m = &shared->p.at[index][o->group];
  verify_op(k, index, o, m, rank_in(m, k->me), buf);
}

static cddp_result call(cddp_group *g, const op *o, const void *in, void *out, cddp_work **w) {
  switch (o->call) {
  case CDDP__KIND_BARRIER: return cddp_barrier(g);
  case CDDP__KIND_ALL_REDUCE: return cddp_all_reduce(g, out, o->count, o->dtype, o->reduce, w);
  case CDDP__KIND_REDUCE: return cddp_reduce(g, out, o->count, o->dtype, o->reduce, o->root, w);
  case CDDP__KIND_BROADCAST: return cddp_broadcast(g, out, o->count, o->dtype, o->root, w);
  case CDDP__KIND_ALL_GATHER: return cddp_all_gather(g, in, out, o->count, o->dtype, w);
  case CDDP__KIND_GATHER: return cddp_gather(g, in, out, o->count, o->dtype, o->root, w);
  case CDDP__KIND_SCATTER: return cddp_scatter(g, in, out, o->count, o->dtype, o->root, w);
  case CDDP__KIND_REDUCE_SCATTER:
    return cddp_reduce_scatter(g, in, out, o->count, o->dtype, o->reduce, w);
  default: return cddp_all_to_all(g, in, out, o->count, o->dtype, w);
  }
}

static void *get_memory(cddp_group *g, bool in_shared, size_t bytes) {
  return in_shared ? cddp_alloc(g, bytes + 64) : malloc(bytes + 64);
}
static void give_memory(cddp_group *g, bool in_shared, void *p) {
  if (in_shared)
    cddp_free(g, p);
  else
    free(p);
}

static cddp_result fails(rank *k, int index, int group, cddp_result r) {
  story *s = k->s;
  if (r != CDDP_OK && s->failed_op == -1) {
    s->failed_op = index;
    s->failed_group = group;
    s->result = r;
    snprintf(s->text, sizeof s->text, "%s", cddp_error());
    story_log(k->me, "op %d: %s: %s", index, cddp_result_name(r), s->text);
  }
  return r;
}

static cddp_result wait_one(rank *k, pending *w) {
  const op *o = &shared->p.op[w->op];
  cddp_group *world = k->groups[0];
  cddp_result r = fails(k, w->op, o->group, cddp_wait(w->work));
  if (r == CDDP_OK) verify(k, w->op, w->recv);
  if (w->send != w->recv) give_memory(world, w->send_shared, w->send);
  give_memory(world, w->recv_shared, w->recv);
  return r;
}

static cddp_result wait_all(rank *k) {
  cddp_result r = CDDP_OK, r1;
  int i;
  for (i = 0; i < k->work_count; i++)
    if ((r1 = wait_one(k, &k->works[i])) != CDDP_OK) r = r1;
  k->work_count = 0;
  return r;
}

/* The victim's other call. */
static op mistaken(const op *o, const members *m) {
  op other = *o;
  switch (draw(o->seed, 40, 4)) {
  case 0: other.count++; break;
  case 1: other.dtype = o->dtype == CDDP_F32 ? CDDP_I32 : CDDP_F32; break;
  case 2:
    if (o->call == CDDP__KIND_REDUCE || o->call == CDDP__KIND_BROADCAST)
      other.root = (o->root + 1) % m->n;
    else
      other.count += 2;
    break;
  default: other.call = o->call == CDDP__KIND_BARRIER ? CDDP__KIND_ALL_REDUCE : CDDP__KIND_BARRIER;
  }
  return other;
}

static cddp_result collective(rank *k, int index) {
  op o = shared->p.op[index];
  const members *m = &shared->p.at[index][o.group];
  cddp_group *g = k->groups[o.group], *world = k->groups[0];
  size_t n = sends(&o, m), bytes = n > receives(&o, m) ? n : receives(&o, m), i;
  bool odd = (shared->p.fault == MISMATCH || shared->p.fault == BREAKER) && m->n > 1 &&
             k->me == shared->p.victim && index >= shared->p.moment_op &&
             !__atomic_load_n(&k->s->fired, __ATOMIC_RELAXED);
  bool in_place = o.call <= CDDP__KIND_BROADCAST;
  pending w;
  cddp_result r;
  memset(&w, 0, sizeof w);
  w.op = index;
  w.recv_shared = o.memory == SHARED_MEMORY || (o.memory == MIXED_MEMORY && k->me % 2 == 0);
  w.send_shared = w.recv_shared;
  bytes = (bytes + 4) * 8 * (size_t)(m->n);
  w.recv = get_memory(world, w.recv_shared, bytes);
  w.send = in_place ? w.recv : get_memory(world, w.send_shared, bytes);
  if (w.recv == NULL || w.send == NULL) return fails(k, index, 0, CDDP_OUT_OF_MEMORY);
  for (i = 0; i < n; i++) set_element(o.dtype, w.send, i, element(&o, k->me, i));
  if (odd) {
    k->s->fired = true;
    o = mistaken(&o, m);
    story_log(k->me, "op %d: another call than the others'", index);
  }
  o.async = o.async && o.call != CDDP__KIND_BARRIER;
  r = fails(k, index, o.group, call(g, &o, w.send, w.recv, o.async ? &w.work : NULL));
  if (r == CDDP_OK && o.async) {
    if (k->work_count == WORKS) r = wait_all(k);
    k->works[k->work_count++] = w;
    return r;
  }
  if (r == CDDP_OK) verify(k, index, w.recv);
  if (w.send != w.recv) give_memory(world, w.send_shared, w.send);
  give_memory(world, w.recv_shared, w.recv);
  return r;
}

static cddp_result ring(rank *k, int index) {
  const op *o = &shared->p.op[index];
  const members *m = &shared->p.at[index][o->group];
  cddp_group *g = k->groups[o->group], *world = k->groups[0];
  int me = rank_in(m, k->me), to = (me + 1) % m->n, from = (me + m->n - 1) % m->n;
  bool in_shared = o->memory != PLAIN_MEMORY;
  void *out = get_memory(world, in_shared, o->count * 8), *in = malloc(o->count * 8 + 8);
  cddp_work *receipt = NULL, *sent = NULL;
  cddp_result r, r2 = CDDP_OK, r3 = CDDP_OK;
  size_t i;
  if (out == NULL || in == NULL) return fails(k, index, 0, CDDP_OUT_OF_MEMORY);
  for (i = 0; i < o->count; i++) set_element(o->dtype, out, i, element(o, k->me, i));
  r = cddp_recv(g, in, o->count, o->dtype, from, index, &receipt);
  fails(k, index, o->group, r);
  if (r == CDDP_OK) {
    r = cddp_send(g, out, o->count, o->dtype, to, index, o->async ? &sent : NULL);
    fails(k, index, o->group, r);
  }
  if (receipt != NULL) r2 = fails(k, index, o->group, cddp_wait(receipt));
  if (sent != NULL) r3 = fails(k, index, o->group, cddp_wait(sent));
  for (i = 0; r == CDDP_OK && r2 == CDDP_OK && i < o->count; i++)
    if (get_element(o->dtype, in, i) != element(o, m->rank[from], i)) {
      wrong(k, index);
      break;
    }
  give_memory(world, in_shared, out);
  free(in);
  return r != CDDP_OK ? r : r2 != CDDP_OK ? r2 : r3;
}

static cddp_result split(rank *k, int index) {
  const op *o = &shared->p.op[index];
  const members *m = &shared->p.at[index][o->group];
  members part = part_of(m, o->seed, 0);
  cddp_group *g = NULL;
  int list[MOST], i;
  cddp_result r;
  if (draw(o->seed, 41, 2) == 0 && part.n > 0) {
    for (i = 0; i < part.n; i++) list[i] = rank_in(m, part.rank[i]);
    r = cddp_group_new(k->groups[o->group], list, part.n, &g);
  } else {
    r = cddp_group_split(k->groups[o->group], color_of(o->seed, k->me) == 0 ? 0 : -1, k->me, &g);
  }
  if (r == CDDP_OK && (g != NULL) != (rank_in(&part, k->me) >= 0)) wrong(k, index);
  if (r == CDDP_OK && g != NULL && cddp_rank(g) != rank_in(&part, k->me)) wrong(k, index);
  k->groups[o->into] = g;
  return fails(k, index, o->group, r);
}

#define PARAMS 3

typedef struct model {
  cddp_param params[PARAMS];
  bool data_shared[PARAMS];
  cddp_ddp *ddp;
  cddp_optim *sgd;
} model;

static cddp_result model_step(rank *k, int index, model *t, int step) {
  const op *o = &shared->p.op[index];
  const members *m = &shared->p.at[index][o->group];
  bool fused = draw(o->seed, 50 + (uint64_t)step, 2) == 0;
  cddp_result r = CDDP_OK;
  size_t i;
  int j, q, order[PARAMS];
  ranks_shuffle(order, PARAMS, o->seed + (uint64_t)step);
  for (j = 0; r == CDDP_OK && j < PARAMS; j++) {
    cddp_param *p = &t->params[order[j]];
    float *grad = (float *)p->grad;
    for (i = 0; i < p->count; i++) grad[i] += (float)element(o, k->me, i + (size_t)step);
    r = cddp_ddp_ready(t->ddp, order[j]);
  }
  if (r == CDDP_OK) r = fused ? cddp_ddp_step(t->ddp, t->sgd) : cddp_ddp_wait(t->ddp);
  if (r != CDDP_OK || fused) return r;
  for (j = 0; j < PARAMS; j++) {
    float sum = 0, want;
    const float *grad = (const float *)t->params[j].grad;
    for (q = 0; q < m->n; q++) sum += (float)element(o, m->rank[q], (size_t)step);
    want = sum / (float)m->n;
    if (t->params[j].count > 0 && grad[0] != want) wrong(k, index);
  }
  r = cddp_optim_step(t->sgd);
  return r == CDDP_OK ? cddp_optim_zero_grad(t->sgd) : r;
}

static cddp_result mean_hook(cddp_bucket *b, void *user_data) {
  (void)user_data;
  return cddp_all_reduce(b->group, b->data, b->count, b->dtype, CDDP_AVG, NULL);
}

static cddp_result run_model(rank *k, int index, model *t) {
  const op *o = &shared->p.op[index];
  cddp_group *g = k->groups[o->group];
  cddp_ddp_desc d;
  cddp_sgd_desc sd;
  cddp_result r;
  uint64_t hash = 1;
  int step, j;
  memset(&d, 0, sizeof d);
  memset(&sd, 0, sizeof sd);
  d.bucket_cap_mb = 0.002;
  if (draw(o->seed, 48, 4) == 0) d.comm_hook = mean_hook;
  sd.lr = 0.25;
  sd.momentum = draw(o->seed, 49, 2) ? 0.5 : 0;
  r = cddp_ddp_create(&t->ddp, g, t->params, PARAMS, &d);
  if (r == CDDP_OK) r = cddp_sgd_create(&t->sgd, t->params, PARAMS, &sd);
  for (step = 0; r == CDDP_OK && step < 3; step++) r = model_step(k, index, t, step);
  for (j = 0; r == CDDP_OK && j < PARAMS; j++)
    hash = cddp__hash64(hash, t->params[j].data, t->params[j].count * sizeof(float));
  if (r == CDDP_OK) k->s->hash[index] = hash | 1;
  return fails(k, index, o->group, r);
}

static cddp_result run_a_model(rank *k, int index) {
  const op *o = &shared->p.op[index];
  cddp_group *world = k->groups[0];
  model t;
  cddp_result r = CDDP_OK;
  int j;
  memset(&t, 0, sizeof t);
  for (j = 0; j < PARAMS; j++) {
    cddp_param *p = &t.params[j];
    p->count = draw(o->seed, 60 + (uint64_t)j, 1500);
    t.data_shared[j] = draw(o->seed, 70 + (uint64_t)j, 2) == 0;
    p->data = get_memory(world, t.data_shared[j], p->count * sizeof(float));
    if (p->data == NULL) return fails(k, index, 0, CDDP_OUT_OF_MEMORY);
    memset(p->data, k->me, p->count * sizeof(float)); /* rank 0's win */
    if (draw(o->seed, 80 + (uint64_t)j, 2) == 0) p->grad = calloc(p->count + 1, sizeof(float));
  }
  {
    void *own[PARAMS];
    for (j = 0; j < PARAMS; j++) own[j] = t.params[j].grad;
    if (r == CDDP_OK) r = run_model(k, index, &t);
    cddp_optim_destroy(t.sgd);
    cddp_ddp_destroy(t.ddp);
    for (j = 0; j < PARAMS; j++) {
      free(own[j]);
      give_memory(world, t.data_shared[j], t.params[j].data);
    }
  }
  return r;
}

static cddp_result run_op(rank *k, int index) {
  const op *o = &shared->p.op[index];
  cddp_group *g = k->groups[o->group];
  cddp_result r = CDDP_OK;
  if (o->what == WAIT_ALL) return wait_all(k);
  if (g == NULL) return CDDP_OK;
  switch (o->what) {
  case COLLECTIVE: r = collective(k, index); break;
  case RING: r = ring(k, index); break;
  case SPLIT: r = split(k, index); break;
  case MODEL: r = run_a_model(k, index); break;
  default: /* DROP_GROUP: its last works first; a barrier, or the first to leave ends the others' */
    r = wait_all(k);
    if (r == CDDP_OK) r = fails(k, index, o->group, cddp_barrier(g));
    if (r != CDDP_OK) break;
    cddp_destroy(g);
    k->groups[o->group] = NULL;
  }
  return r;
}

/* A rank that failed cannot destroy groups whose works it has not waited for, and these may wait
   for ranks that wait for this one: it ends them as cddp_destroy would. */
static void abandon_works(rank *k) {
  int i;
  for (i = 0; i < k->work_count; i++) {
    cddp_group *g = k->groups[shared->p.op[k->works[i].op].group];
    cddp__fail(CDDP_PEER_LOST, "rank %d left the group with works in flight", cddp_rank(g));
    cddp__break(g, CDDP_PEER_LOST);
  }
}

/* The whole program of one rank on its world group, which the caller destroys. */
static void run_program(rank *k) {
  const program *p = &shared->p;
  story *s = k->s;
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < p->ops; i++) {
    if (p->fault == LEAVE && k->me == p->victim && i == p->moment_op) {
      s->fired = true;
      story_log(k->me, "leaves before op %d", i);
      break;
    }
    r = run_op(k, i);
    story_log(k->me, "op %d: what %d, group %d, call %d, count %zu%s: %s", i, p->op[i].what,
              p->op[i].group, p->op[i].call, p->op[i].count, p->op[i].async ? ", async" : "",
              cddp_result_name(r));
  }
  if (r == CDDP_OK && !(p->fault == LEAVE && __atomic_load_n(&s->fired, __ATOMIC_RELAXED))) {
    r = wait_all(k);
    if (r == CDDP_OK) fails(k, p->ops, 0, cddp_barrier(k->groups[0]));
  }
  if (s->failed_op >= 0) abandon_works(k);
  wait_all(k);
  if (s->failed_op >= 0 && k->groups[s->failed_group] != NULL &&
      s->result != CDDP_OUT_OF_MEMORY) /* of which the group may know nothing */
    s->different = cddp_barrier(k->groups[s->failed_group]) != s->result;
  for (i = GROUPS - 1; i > 0; i--) cddp_destroy(k->groups[i]);
}

static int process_life(int r, void *arg) {
  program *p = &shared->p;
  cddp_group_desc d;
  rank k;
  int fds = ranks_open_fds();
  cddp_result result;
  char url[64];
  memset(&k, 0, sizeof k);
  memset(&d, 0, sizeof d);
  self = k.me = r;
  k.s = &shared->s[r];
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", *(int *)arg);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  d.init_method = url;
  d.rank = r;
  d.world_size = p->n;
  d.timeout_s = p->timeout_s;
  d.allocator.alloc = sim_alloc;
  d.allocator.free = sim_free;
  result = cddp_init(&k.groups[0], &d);
  if (result == CDDP_OK)
    run_program(&k);
  else
    fails(&k, -2, 0, result);
  cddp_destroy(k.groups[0]);
  k.s->balance = balance;
  k.s->fds = ranks_open_fds() - fds;
  k.s->threads = !ranks_threads_left(1);
  k.s->ended = true;
  return 0;
}

static int thread_life(cddp_group *g, void *arg) {
  rank k;
  (void)arg;
  memset(&k, 0, sizeof k);
  k.me = thread_rank = cddp_rank(g);
  k.s = &shared->s[k.me];
  k.groups[0] = g;
  run_program(&k);
  k.s->ended = true;
  return k.s->failed_op != -1;
}

/* --- an elastic model ---- */

/* The ranks that are there now do something together, unless one of them is lost meanwhile. */
static cddp_result use_living(rank *k, cddp_ddp *ddp, uint64_t seed) {
  cddp_group *g = cddp_ddp_group(ddp);
  void *in, *out;
  cddp_result r;
  members all;
  op o;
  size_t i, n;
  memset(&all, 0, sizeof all);
  memset(&o, 0, sizeof o);
  if (g == NULL) return CDDP_INVALID_ARGUMENT;
  all.n = cddp_world_size(g);
  for (i = 0; i < (size_t)all.n; i++) all.rank[i] = (int)i;
  o.seed = seed;
  draw_call(&o, seed, all.n);
  n = sends(&o, &all) + receives(&o, &all) + 8;
  in = get_memory(k->groups[0], o.memory == SHARED_MEMORY, n * 8);
  out = o.call <= CDDP__KIND_BROADCAST ? in : malloc(n * 8);
  if (in == NULL || out == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < sends(&o, &all); i++)
    set_element(o.dtype, in, i, element(&o, cddp_rank(g), i));
  r = call(g, &o, in, out, NULL);
  if (r == CDDP_OK) verify_op(k, OPS, &o, &all, cddp_rank(g), out);
  if (out != in) free(out);
  give_memory(k->groups[0], o.memory == SHARED_MEMORY, in);
  return r == CDDP_PEER_LOST ? CDDP_OK : r;
}

/* This rank has no model any more; its weights are its own. */
static void leave_training(rank *k, training *m) {
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  m->optim = NULL;
  m->ddp = NULL;
  ranks_sleep(0.01);
  if (k->s->steps > k->s->begin &&
      training_hash(m, &shared->p.model) != shared->want[k->s->steps])
    wrong(k, OPS);
}

/* m->g: this rank's group, in which it has nothing else any more. */
static void train(rank *k, training *m) {
  const program *p = &shared->p;
  const blow *b = &p->blows[k->s - shared->s];
  story *s = k->s;
  cddp_result r = training_open(m, &p->model, true, s->joins);
  if (r == CDDP_OK) {
    s->begin = s->steps = cddp_ddp_steps(m->ddp);
    (void)becomes(s, STARTING, RUNNING);
    __atomic_add_fetch(&shared->remaining, 1, __ATOMIC_SEQ_CST);
    if (!s->joins) __atomic_add_fetch(&shared->created, 1, __ATOMIC_SEQ_CST);
  }
  while (r == CDDP_OK && s->steps < (uint64_t)p->model.steps) {
    if (b->fault == LEAVE && s->steps >= (uint64_t)b->moment &&
        __atomic_load_n(&shared->created, __ATOMIC_SEQ_CST) == p->n && may_go(s)) {
      story_log(k->me, "leaves before step %d", (int)s->steps);
      leave_training(k, m);
      return;
    }
    r = training_step(m, &p->model, s->steps);
    if (r == CDDP_OK && cddp_ddp_steps(m->ddp) != ++s->steps) wrong(k, OPS);
    if (r == CDDP_OK && training_hash(m, &p->model) != shared->want[s->steps]) wrong(k, OPS);
    if (r == CDDP_OK && draw(p->seed, 100 + s->steps, 3) == 0)
      r = use_living(k, m->ddp, ranks_mix(p->seed, s->steps, 101));
  }
  (void)fails(k, OPS, 0, r);
  (void)becomes(s, r == CDDP_OK ? RUNNING : s->state, r == CDDP_OK ? FINISHED : REFUSED);
}

/* What an elastic model's rank does before. */
static void run_elastic_program(rank *k, training *m) {
  cddp_result r = CDDP_OK;
  int i;
  k->groups[0] = m->g;
  for (i = 0; r == CDDP_OK && i < shared->p.ops && !k->s->joins; i++) r = run_op(k, i);
  if (r == CDDP_OK) r = wait_all(k);
  for (i = GROUPS - 1; i > 0; i--) cddp_destroy(k->groups[i]);
  if (r == CDDP_OK) train(k, m);
  training_close(m, &shared->p.model);
}

static int elastic_process(int i, void *arg) {
  const program *p = &shared->p;
  int fds = ranks_open_fds();
  cddp_group_desc d;
  training m;
  rank k;
  memset(&m, 0, sizeof m);
  memset(&k, 0, sizeof k);
  memset(&d, 0, sizeof d);
  self = i;
  k.s = &shared->s[i];
  k.me = k.s->rank;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (p->hosts != NULL) setenv("TEST_HOSTS", p->hosts, 1);
  ranks_environment(k.me, p->n, *(int *)arg);
  if (k.s->joins) setenv("CDDP_JOIN", "1", 1);
  if (p->seed % 4 == 0) setenv("CDDP_SECRET", "of this seed", 1);
  d.timeout_s = p->timeout_s;
  d.allocator.alloc = sim_alloc;
  d.allocator.free = sim_free;
  if (fails(&k, -2, 0, cddp_init(&m.g, &d)) == CDDP_OK) run_elastic_program(&k, &m);
  else (void)becomes(k.s, STARTING, REFUSED);
  cddp_destroy(m.g);
  k.s->balance = balance;
  k.s->fds = ranks_open_fds() - fds;
  k.s->threads = !ranks_threads_left(1);
  k.s->ended = true;
  return 0;
}

static int elastic_thread(cddp_group *g, void *arg) {
  training m;
  rank k;
  (void)arg;
  memset(&m, 0, sizeof m);
  memset(&k, 0, sizeof k);
  k.me = thread_rank = cddp_rank(g);
  k.s = &shared->s[k.me];
  m.g = g;
  run_elastic_program(&k, &m);
  k.s->ended = true;
  return 0;
}

static int elastic_threads(int i, void *arg) { /* a process, which ends with what they leave */
  (void)i, (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  (void)cddp_run_threads(elastic_thread, NULL, shared->p.n);
  _exit(0);
}

static int undisturbed(int i, void *arg) {
  const recipe *c = &shared->p.model;
  cddp_group_desc d;
  cddp_result r;
  training m;
  int t;
  (void)i, (void)arg;
  memset(&m, 0, sizeof m);
  memset(&d, 0, sizeof d);
  d.world_size = 1;
  r = cddp_init(&m.g, &d);
  if (r == CDDP_OK) r = training_open(&m, c, false, false);
  for (t = 0; r == CDDP_OK && t < c->steps; t++) {
    r = training_step(&m, c, (uint64_t)t);
    shared->want[t + 1] = training_hash(&m, c);
  }
  training_close(&m, c);
  cddp_destroy(m.g);
  return r != CDDP_OK;
}

/* --- the judge ---- */

#define JUDGE(c)                                                                                \
  do {                                                                                          \
    test_count();                                                                               \
    if (!(c)) {                                                                                 \
      test_fail(__FILE__, __LINE__, "seed %llu (%s, %d %s, rank %d): rank %d, op %d, %s: %s: %s", \
                (unsigned long long)shared->p.seed, fault_names[shared->p.fault], shared->p.n,  \
                shared->p.threads ? "threads" : "processes", shared->p.victim, r, s->failed_op, \
                #c, cddp_result_name(s->result), s->text);                                      \
    }                                                                                           \
  } while (0)

static bool says(const story *s, const char *what) { return strstr(s->text, what) != NULL; }

/* Whether a failure of rank r fits a rank that has died. */
static bool fits_death(const story *s, int dead) {
  char pid[32];
  snprintf(pid, sizeof pid, "(pid %d", (int)shared->s[dead].pid);
  if (s->failed_op == -2)
    return s->result == CDDP_PEER_LOST || s->result == CDDP_TIMEOUT || s->result == CDDP_NETWORK;
  return s->result == CDDP_PEER_LOST && (says(s, pid) || says(s, "left the group"));
}

static void judge_failure(int r, const story *s) {
  const program *p = &shared->p;
  const members *m = &p->at[s->failed_op >= 0 && s->failed_op < p->ops ? s->failed_op : 0]
                           [s->failed_group];
  bool victim = r == p->victim, left = s->result == CDDP_PEER_LOST && says(s, "left the group");
  int i, fits, fired = -1;
  for (i = 0; i < p->n; i++)
    if (shared->s[i].fired && (p->fault != BREAKER || !shared->s[i].ended)) fired = i;
  JUDGE(s->text[0] != 0);
  JUDGE(fired >= 0);
  if (fired < 0) return;
  switch (p->fault) {
  case NOTHING:
  case HOLD: JUDGE(s->result == CDDP_OK); break;
  case KILL:
  case EXIT:
    JUDGE(fits_death(s, p->victim));
    if (s->failed_op >= 0 && rank_in(m, p->victim) >= 0 && !says(s, "works in flight")) {
      char pid[32];
      snprintf(pid, sizeof pid, "(pid %d", (int)shared->s[p->victim].pid);
      JUDGE(says(s, pid));
    }
    break;
  case LEAVE: JUDGE(left || says(s, "thread function returned")); break;
  case MISMATCH:
    JUDGE(s->result == CDDP_MISMATCH ? says(s, "ranks disagree")
                                     : left || says(s, "thread function returned"));
    if (victim && !p->op[s->failed_op < p->ops ? s->failed_op : 0].async)
      JUDGE(s->result == CDDP_MISMATCH || left);
    break;
  case BREAKER: /* each group has one, and each dies over it */
    for (i = fits = 0; i < p->n; i++) fits += !shared->s[i].ended && fits_death(s, i);
    JUDGE(s->result == CDDP_MISMATCH || fits > 0);
    break;
  case NOMEM:
    JUDGE(s->result == CDDP_OUT_OF_MEMORY ||
          (s->failed_op == -2 && /* the store's server had none; who calls again may be late */
           (s->result == CDDP_NETWORK || s->result == CDDP_PEER_LOST ||
            s->result == CDDP_TIMEOUT)) ||
          (!victim && (s->result == CDDP_PEER_LOST || s->result == CDDP_TIMEOUT)));
    break;
  default:
    JUDGE(s->failed_op == -2);
    JUDGE(s->result == CDDP_NETWORK || s->result == CDDP_PEER_LOST || s->result == CDDP_TIMEOUT);
  }
}

/* A synchronous call that some rank found mistaken is so for all of the group. */
static void judge_mismatch(void) {
  const program *p = &shared->p;
  const story *first = NULL;
  int r, i;
  for (r = 0; r < p->n; r++) {
    const story *s = &shared->s[r];
    if (s->result == CDDP_MISMATCH && s->failed_op >= 0 && s->failed_op < p->ops &&
        (first == NULL || s->failed_op < first->failed_op))
      first = s;
  }
  if (first == NULL || p->op[first->failed_op].async || p->fault != MISMATCH) return;
  for (i = 0; i < p->at[first->failed_op][first->failed_group].n; i++) {
    const story *s;
    r = p->at[first->failed_op][first->failed_group].rank[i];
    s = &shared->s[r];
    if (s->failed_op == first->failed_op) JUDGE(s->result == CDDP_MISMATCH);
    JUDGE(s->failed_op != -1);
  }
}

static void judge(void) {
  const program *p = &shared->p;
  int r, i, q;
  for (r = 0; r < p->n; r++) {
    story *s = &shared->s[r];
    bool dead = s->fired && (p->fault == KILL || p->fault == EXIT || p->fault == BREAKER) &&
                !s->ended;
    if (dead) continue;
    JUDGE(s->ended);
    JUDGE(s->wrong == 0);
    JUDGE(!s->different);
    JUDGE(s->fds == 0);
    JUDGE(s->balance == 0);
    JUDGE(s->threads == 0);
    if (s->failed_op != -1) judge_failure(r, s);
    if (p->fault == NOTHING || p->fault == HOLD) JUDGE(s->failed_op == -1);
    for (i = 0; i < p->ops; i++)
      for (q = 0; q < r; q++)
        if (s->hash[i] != 0 && shared->s[q].hash[i] != 0)
          JUDGE(s->hash[i] == shared->s[q].hash[i]);
  }
  judge_mismatch();
}

static void judge_elastic(void) {
  const program *p = &shared->p;
  int r, finished = 0;
  for (r = 0; r < shared->lives; r++) {
    const story *s = &shared->s[r];
    int fault = p->blows[r].fault;
    if (s->state == GOING && (fault == KILL || fault == EXIT)) continue;
    JUDGE(s->ended);
    JUDGE(s->wrong == 0);
    JUDGE(s->fds == 0);
    JUDGE(s->balance == 0);
    JUDGE(s->threads == 0);
    finished += s->state == FINISHED;
    if (s->state == FINISHED || s->state == GOING) JUDGE(s->failed_op == -1);
    else if (s->fired && s->result == CDDP_OUT_OF_MEMORY) JUDGE(s->joins);
    else JUDGE(s->joins && s->begin == 0 && (says(s, "has ended") || says(s, "is full")));
    if (s->state == FINISHED) JUDGE(s->steps == (uint64_t)p->model.steps);
  }
  CHECK(finished > 0);
}

static void start_life(int world_rank, bool joins, int *port) {
  int i = shared->lives++;
  story *s = &shared->s[i];
  s->rank = world_rank;
  s->joins = joins;
  s->pid = ranks_fork(elastic_process, i, port);
  if (s->pid < 0) exit(1);
}

/* Whether a rank may come now: nobody is through, and somebody is to be replaced, or to come. */
static bool may_come(int replaceable, int further) {
  int i;
  for (i = 0; i < shared->lives; i++)
    if (__atomic_load_n(&shared->s[i].state, __ATOMIC_SEQ_CST) == FINISHED) return false;
  return shared->lives < LIVES && replaceable + further > 0 &&
         __atomic_load_n(&shared->created, __ATOMIC_SEQ_CST) == shared->p.n;
}

static void run_lives(void) {
  const program *p = &shared->p;
  int replaceable[LIVES], count = 0, further = p->further, next = p->n, left, i, status;
  int port = ranks_free_port();
  double until = test_now() + RANKS_WITHIN(30), join_at = 0, now;
  for (i = 0; i < p->n; i++) start_life(i, false, &port);
  for (left = p->n; left > 0 && (now = test_now()) < until; ranks_sleep(2e-4)) {
    for (i = 0; i < shared->lives; i++) {
      story *s = &shared->s[i];
      if (s->gone || waitpid(s->pid, &status, WNOHANG) != s->pid) continue;
      s->gone = true;
      left--;
      if (s->state == GOING && (int)draw(p->seed, 200 + (uint64_t)i, 3) < p->replaced)
        replaceable[count++] = s->rank;
    }
    if (!may_come(count, further)) continue;
    if (join_at == 0) join_at = now + p->join_delay;
    if (now < join_at) continue;
    join_at = 0;
    left++;
    if (count > 0) start_life(replaceable[--count], true, &port);
    else further--, start_life(next++, true, &port);
  }
  for (i = 0; i < shared->lives; i++) {
    if (shared->s[i].gone) continue;
    kill(shared->s[i].pid, SIGKILL);
    waitpid(shared->s[i].pid, &status, 0);
  }
}

static void run_elastic(void) {
  pid_t pid;
  int status;
  if (verbose) {
    char text[300];
    recipe_describe(&shared->p.model, text, sizeof text);
    fprintf(stderr, "%s%s, on hosts %s\n", text, shared->p.threads ? ", threads" : "",
            shared->p.hosts != NULL ? shared->p.hosts : "a");
  }
  pid = ranks_fork(undisturbed, 0, NULL);
  ranks_join(&pid, 1, RANKS_WITHIN(15), &status);
  CHECK_EQ(status, 0);
  if (shared->p.threads) {
    shared->lives = shared->p.n;
    pid = ranks_fork(elastic_threads, 0, NULL);
    ranks_join(&pid, 1, RANKS_WITHIN(30), &status);
    CHECK_EQ(status, 0);
  } else {
    run_lives();
  }
  judge_elastic();
}

static void run_seed(uint64_t seed) {
  pid_t pids[MOST];
  int status[MOST], i, port;
  memset(shared, 0, sizeof *shared);
  shared->p = draw_program(seed);
  for (i = 0; i < LIVES; i++) shared->s[i].failed_op = -1;
  cddp__store32(&passages, 0);
  if (verbose)
    fprintf(stderr, "seed %llu: %d %s, %d ops, %s on rank %d at %d, op %d\n",
            (unsigned long long)seed, shared->p.n, shared->p.threads ? "threads" : "processes",
            shared->p.ops, fault_names[shared->p.fault], shared->p.victim, shared->p.moment,
            shared->p.moment_op);
  if (shared->p.elastic) {
    run_elastic();
    return;
  }
  if (shared->p.threads) {
    cddp_result r = cddp_run_threads(thread_life, NULL, shared->p.n);
    if (shared->p.fault == NOTHING) CHECK_OK(r);
  } else {
    port = ranks_free_port();
    for (i = 0; i < shared->p.n; i++) {
      pids[i] = shared->s[i].pid = ranks_fork(process_life, i, &port);
      if (pids[i] < 0) exit(1);
    }
    ranks_join(pids, shared->p.n, RANKS_WITHIN(15), status);
  }
  judge();
}

static int seeds = RANKS_SLOW ? 40 : 200;
static uint64_t first_seed = 1;

static void run_timed(uint64_t seed) {
  double begin = test_now();
  run_seed(seed);
  /* Elastic: a process on a host without ranks looks for 20 s for a job that has ended. */
  if (test_now() - begin > RANKS_WITHIN(shared->p.elastic ? 30 : 10))
    test_fail(__FILE__, __LINE__, "seed %llu took %.1f s", (unsigned long long)seed,
              test_now() - begin);
}

/* Each has shown a defect, as long as draw_program draws what it does. */
static void test_found_seeds(void) {
  static const uint64_t found[] = {
      30557,   /* a rank that joins waits for a leader that has died */
      3000882, /* no memory for its report: another rank is held to be lost */
      3001642, /* the same */
      3004255, /* the same, and it waits for its time-out */
  };
  size_t i;
  for (i = 0; i < sizeof found / sizeof *found; i++) run_timed(found[i]);
}

static void test_seeds(void) {
  int i;
  for (i = 0; i < seeds; i++) {
    int before = test_failures;
    run_timed(first_seed + (uint64_t)i);
    if (test_failures != before && test_failures > 40) return;
  }
  CHECK(ranks_no_children());
}

int main(int argc, char **argv) {
  shared = (struct shared *)ranks_shared(sizeof *shared);
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "200" : "20", 1); /* of the threads */
  if (argc >= 3 && strcmp(argv[1], "--seeds") == 0) seeds = atoi(argv[2]);
  if (argc >= 4) first_seed = strtoull(argv[3], NULL, 10);
  if (argc == 2) {
    verbose = true;
    seeds = 1;
    first_seed = strtoull(argv[1], NULL, 10);
  }
  if (argc == 1) RUN(test_found_seeds);
  RUN(test_seeds);
  return TEST_END();
}
