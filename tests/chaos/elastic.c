/* elastic.c - ranks of an elastic model that die at any instruction, and others that join.

     build/plain/elastic --seeds 1000 --seed 5000   seeds 5000 .. 5999 instead of a hundred
     build/plain/elastic --seeds 1 --seed 17        one of them again, with what each process did
     build/plain/elastic --hosts 500                the same on several hosts (CDDP_HOST_ID), where
                                                    nobody joins; with --seed as above
     build/plain/elastic --sweep 17                 seed 17's model without its kills: one rank dies
                                                    at the first point of the engine that any rank
                                                    reaches, then at the second, and so on

   A seed draws 1 to 8 ranks, up to 12 shards, an optimizer, types, whose memory weights and
   gradients lie in, cddp_ddp_step or cddp_ddp_wait; and what happens: ranks die at the n-th point
   that the engine reaches (CDDP__POINT("elastic ...")) or at a random moment, one or several, one
   in the recovery from another, all but one; some are stopped for a while; dead ones are replaced,
   further ones come. After every step each rank's weights must have the hash that one rank alone,
   without the elastic engine, has computed. A rank that does not end in time fails the test. */
#define _GNU_SOURCE
static void point(const char *name);
#define CDDP__POINT(name) point(name)
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../ranks.h"

#include <sys/prctl.h>

enum { RANKS = 8, SHARDS = 12, PARAMS = 5, STEPS = 12, KILLS = 10, JOINS = 8, PROCESSES = 32 };
#define LIMIT_S 30.0 /* of a seed; the machine may be loaded */

enum { BY_POINT, FROM_OUTSIDE, STOPPED };
typedef struct kill_plan {
  int how;
  unsigned after; /* BY_POINT: points since the kill before */
  double delay;   /* others: seconds since the event before */
} kill_plan;

typedef struct plan {
  uint64_t seed;
  int n, shards, count, steps, kills, further;
  bool adamw, waits, mixed, shared, own, copies, groups, masters; /* mixed: waits by turns */
  int replaced; /* of four that die, so many are replaced */
  const char *hosts; /* on which ranks are, as TEST_HOSTS; NULL: on one */
  double momentum, max_norm;
  size_t rows[PARAMS]; /* the first parameter may have sparse ones */
  cddp_dtype dtypes[PARAMS];
  size_t sizes[PARAMS];
  kill_plan kill[KILLS];
  double join_delay;
  unsigned pause; /* a shard's work takes up to so many microseconds */
} plan;

enum { UNUSED, STARTING, RUNNING, DYING, FINISHED, REFUSED };
typedef struct process { /* written by itself but for state, which the test changes too */
  int state; /* atomic */
  int rank;
  bool joins;
  pid_t pid;
  cddp_result result;
  int wrong, first_wrong; /* hashes; the step of the first one */
  uint64_t begin, steps;  /* the first step it took part in; steps when it ended */
  char at[40];            /* the last point it came to, */
  char text[512];
} process;

typedef struct board {
  plan p;
  int port;
  uint64_t want[STEPS + 1]; /* hash of the weights after so many steps */
  int created;              /* first ranks that have made the model: from then on ranks may die */
  int alive;                /* ranks that can finish the job; never comes down to 0 */
  unsigned points;          /* reached so far by all ranks */
  unsigned due;             /* the next kill BY_POINT comes at this one */
  int next;                 /* kills done or skipped */
  int process_count;
  process processes[PROCESSES];
} board;

static board *shared;
static process *me; /* NULL in the test itself */
static bool verbose;

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define ADD(x, n) __atomic_add_fetch(&(x), n, __ATOMIC_SEQ_CST)
#define SWAP(x, old, now)                                                                          \
  __extension__({                                                                                  \
    __typeof__(x) swap_old = (old);                                                                \
    __atomic_compare_exchange_n(&(x), &swap_old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  })

/* --- who may die: never the last rank that could finish the job --- */

static bool may_die(process *q) {
  int alive;
  if (SWAP(q->state, STARTING, DYING)) return true; /* a joining one: the others do not need it */
  do alive = LOAD(shared->alive);
  while (alive > 1 && !SWAP(shared->alive, alive, alive - 1));
  if (alive <= 1) return false;
  if (SWAP(q->state, RUNNING, DYING)) return true;
  ADD(shared->alive, 1);
  return false;
}

static void point(const char *name) {
  int next;
  unsigned n;
  if (strncmp(name, "elastic", 7) != 0 || me == NULL) return;
  snprintf(me->at, sizeof me->at, "%s", name + 7);
  if (LOAD(shared->created) < shared->p.n) return;
  n = ADD(shared->points, 1);
  next = LOAD(shared->next);
  if (next >= shared->p.kills || shared->p.kill[next].how != BY_POINT) return;
  if (n < LOAD(shared->due) || !SWAP(shared->next, next, next + 1)) return;
  __atomic_store_n(&shared->due, n + (next + 1 < shared->p.kills ? shared->p.kill[next + 1].after
                                                                 : 0), __ATOMIC_SEQ_CST);
  if (may_die(me)) raise(SIGKILL);
}

/* --- what a seed means --- */

static plan draw(uint64_t seed) {
  static const size_t some[] = {1, 7, 300, 2048, 2100, 5000, 9001};
  static const double momenta[] = {0, 0.9, 0.5};
  uint64_t k = 0;
#define DRAW(n) (ranks_mix(seed, ++k, 11) % (uint64_t)(n))
  plan p;
  int i, kind, scheme;
  memset(&p, 0, sizeof p);
  p.seed = seed;
  p.n = 1 + (int)DRAW(RANKS);
  if (p.n > 4 && DRAW(2)) p.n -= 4;
  p.shards = p.n + (int)DRAW(SHARDS - p.n + 1);
  p.steps = 2 + (int)DRAW(STEPS - 1);
  p.count = 1 + (int)DRAW(PARAMS);
  kind = (int)DRAW(6); /* of types */
  p.adamw = kind < 3 && DRAW(2);
  for (i = 0; i < p.count; i++) {
    p.sizes[i] = some[DRAW(sizeof some / sizeof *some)];
    p.dtypes[i] = kind < 2    ? CDDP_F32
                  : kind == 2 ? (cddp_dtype)DRAW(2)
                  : kind == 3 ? CDDP_F16
                  : kind == 4 ? CDDP_BF16
                              : (cddp_dtype)DRAW(4);
  }
  p.momentum = momenta[DRAW(3)];
  p.copies = kind < 2 && DRAW(4) == 0;
  p.waits = DRAW(3) == 0;
  p.shared = DRAW(2);
  p.own = DRAW(4) == 0;
  p.groups = DRAW(4) == 0;
  p.replaced = (int)DRAW(5);
  p.further = DRAW(3) == 0 ? (int)(1 + DRAW(3)) : 0;
  p.join_delay = (double)DRAW(1000) * 1e-5;
  p.pause = DRAW(2) ? 0 : (unsigned)DRAW(600);
  scheme = (int)DRAW(8);
  p.kills = scheme < 3 ? 1 : scheme < 5 ? 2 : scheme == 5 ? p.n + 1 : 1 + (int)DRAW(KILLS);
  if (p.kills > KILLS) p.kills = KILLS;
  for (i = 0; i < p.kills; i++) {
    kill_plan *q = &p.kill[i];
    unsigned most = i > 0 && DRAW(2) ? 12 : 40u * (unsigned)(1 + p.n) * (unsigned)(1 + DRAW(4));
    int how = (int)DRAW(8);
    q->how = how < 5 ? BY_POINT : how < 7 ? FROM_OUTSIDE : STOPPED;
    q->after = 1 + (unsigned)DRAW(most);
    q->delay = (double)DRAW(1000) * 8e-6;
  }
  p.max_norm = DRAW(3) == 0 ? 2 : 0;
  p.masters = DRAW(3) == 0;
  if (!p.adamw && DRAW(3) == 0) p.rows[0] = p.sizes[0] % 3 == 0 ? p.sizes[0] / 3 : p.sizes[0];
  p.mixed = DRAW(4) == 0;
#undef DRAW
  return p;
}

/* --- the model --- */

typedef struct model {
  cddp_param p[PARAMS];
  void *copies[PARAMS];
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
} model;

static double noise(uint64_t a, uint64_t b, uint64_t c) {
  return (double)(int64_t)(ranks_mix(a, b, c) >> 11) * 0x1p-52 - 1;
}

/* elastic: false for the rank that computes what the others must have. */
static cddp_result model_open(model *m, const plan *c, bool elastic) {
  cddp_ddp_desc desc;
  cddp_sgd_desc s;
  cddp_adamw_desc a;
  cddp_result r;
  int k;
  size_t i;
  memset(&desc, 0, sizeof desc);
  memset(&s, 0, sizeof s);
  memset(&a, 0, sizeof a);
  for (k = 0; k < c->count; k++) {
    size_t bytes = c->sizes[k] * cddp_dtype_size(c->dtypes[k]);
    m->p[k].name = k % 2 ? "odd" : "even";
    m->p[k].count = c->sizes[k];
    m->p[k].dtype = c->dtypes[k];
    m->p[k].data = c->shared ? cddp_alloc(m->g, bytes) : malloc(bytes);
    if (m->p[k].data == NULL) return CDDP_OUT_OF_MEMORY;
    if (c->own && c->rows[k] == 0) m->p[k].grad = calloc(1, bytes);
    for (i = 0; i < c->sizes[k]; i++) /* a rank that joins begins with others */
      ranks_store(c->dtypes[k], m->p[k].data, i,
                  noise(me != NULL && me->joins ? 4 : 3, (uint64_t)k, i));
    if (c->copies) m->copies[k] = malloc(c->sizes[k] * 2);
  }
  desc.shards = c->shards;
  desc.elastic = elastic;
  desc.max_grad_norm = c->max_norm;
  if (c->rows[0] > 0) desc.sparse_rows = c->rows;
  if ((r = cddp_ddp_create(&m->ddp, m->g, m->p, c->count, &desc)) != CDDP_OK) return r;
  if (c->adamw) {
    a.lr = 0.01;
    a.weight_decay = 0.01;
    a.amsgrad = c->seed % 2 == 0;
    a.ddp = m->ddp;
    a.master_weights = c->masters;
    a.copies = c->copies ? m->copies : NULL;
    a.copy_dtype = CDDP_BF16;
    return cddp_adamw_create(&m->optim, m->p, c->count, &a);
  }
  s.lr = 0.1;
  s.momentum = c->momentum;
  s.weight_decay = c->seed % 3 == 0 && c->rows[0] == 0 ? 0.01 : 0;
  s.master_weights = c->masters;
  s.ddp = m->ddp;
  s.copies = c->copies ? m->copies : NULL;
  s.copy_dtype = CDDP_F16;
  return cddp_sgd_create(&m->optim, m->p, c->count, &s);
}

static void model_close(model *m, const plan *c) {
  int k;
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < c->count; k++) {
    if (c->shared) cddp_free(m->g, m->p[k].data);
    else free(m->p[k].data);
    if (c->own && c->rows[k] == 0) free(m->p[k].grad);
    free(m->copies[k]);
  }
  cddp_destroy(m->g);
}

/* A few rows of the first parameter. */
static bool add_rows(model *m, const plan *c, uint64_t step, int shard) {
  const cddp_param *p = &m->p[0];
  size_t width = p->count / c->rows[0], i;
  uint64_t seed = step * SHARDS + (uint64_t)shard, n;
  for (n = 0; n < 1 + seed % 4; n++) {
    int64_t row = (int64_t)(ranks_mix(seed, n, 7) % c->rows[0]);
    double values[3];
    for (i = 0; i < width; i++)
      ranks_store(p->dtype, values, i,
                  0.1 * ranks_load(p->dtype, p->data, (size_t)row * width + i) +
                      noise(seed, 99 + n, i));
    if (cddp_ddp_add_rows(m->ddp, 0, &row, values, 1) != CDDP_OK) return false;
  }
  return true;
}

/* Gradients depend on the weights, so what is wrong once stays wrong. */
static cddp_result backward(model *m, const plan *c, uint64_t step, int shard) {
  int k;
  size_t i;
  for (k = c->count - 1; k >= 0; k--) {
    const cddp_param *p = &m->p[k];
    if (c->rows[k] > 0 && !add_rows(m, c, step, shard)) return CDDP_INVALID_ARGUMENT;
    for (i = 0; i < p->count && c->rows[k] == 0; i++)
      ranks_store(p->dtype, p->grad, i,
                  ranks_load(p->dtype, p->grad, i) + 0.1 * ranks_load(p->dtype, p->data, i) +
                      noise(step * SHARDS + (uint64_t)shard, (uint64_t)k, i));
    if (cddp_ddp_ready(m->ddp, k) != CDDP_OK) return CDDP_INVALID_ARGUMENT; /* step says why */
  }
  return CDDP_OK;
}

static uint64_t hash_of(const model *m, const plan *c) {
  uint64_t h = 1;
  int k;
  for (k = 0; k < c->count; k++) {
    h = cddp__hash64(h, m->p[k].data, c->sizes[k] * cddp_dtype_size(c->dtypes[k]));
    if (c->copies) h = cddp__hash64(h, m->copies[k], 2 * c->sizes[k]);
  }
  return h;
}

static cddp_result one_step(model *m, const plan *c, uint64_t t) {
  int shard;
  cddp_result r;
  while (cddp_ddp_next_shard(m->ddp, &shard)) {
    if (me != NULL && c->pause > 0)
      ranks_sleep((double)(ranks_mix(t, (uint64_t)shard, (uint64_t)me->pid) % c->pause) * 1e-6);
    if (backward(m, c, t, shard) != CDDP_OK) break;
  }
  if ((r = cddp_optim_set_lr(m->optim, 0.1 / (double)(1 + t % 3))) != CDDP_OK) return r;
  if (c->mixed ? t % 2 == 0 : !c->waits) return cddp_ddp_step(m->ddp, m->optim);
  if ((r = cddp_ddp_wait(m->ddp)) != CDDP_OK) return r;
  if ((r = cddp_optim_step(m->optim)) != CDDP_OK) return r;
  return cddp_optim_zero_grad(m->optim);
}

/* The ranks that are there now reduce something, if none of them dies in it. */
static cddp_result use_group(model *m) {
  cddp_group *g = cddp_ddp_group(m->ddp);
  float x = 1;
  cddp_result r;
  if (g == NULL) return CDDP_INVALID_ARGUMENT;
  r = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL);
  if (r == CDDP_OK && x != (float)cddp_world_size(g)) return CDDP_MISMATCH;
  return r == CDDP_PEER_LOST ? CDDP_OK : r;
}

/* --- a rank's life --- */

static int reference(int rank, void *arg) { /* one rank alone, in a process of its own */
  const plan *c = &shared->p;
  cddp_group_desc d;
  cddp_result r;
  uint64_t t;
  model m;
  (void)rank, (void)arg;
  memset(&m, 0, sizeof m);
  memset(&d, 0, sizeof d);
  d.world_size = 1;
  if ((r = cddp_init(&m.g, &d)) == CDDP_OK) r = model_open(&m, c, false);
  for (t = 0; r == CDDP_OK && t < (uint64_t)c->steps; t++) {
    r = one_step(&m, c, t);
    shared->want[t + 1] = hash_of(&m, c);
  }
  CHECK_OK(r);
  model_close(&m, c);
  return 0;
}

static int life(int number, void *arg) {
  const plan *c = &shared->p;
  cddp_result r;
  uint64_t t;
  model m;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  me = &shared->processes[number];
  me->pid = getpid();
  memset(&m, 0, sizeof m);
  if (c->hosts != NULL) setenv("TEST_HOSTS", c->hosts, 1);
  ranks_environment(me->rank, c->n, shared->port);
  if (me->joins) setenv("CDDP_JOIN", "1", 1);
  setenv("CDDP_TIMEOUT_S", "20", 1);
  if (c->seed % 4 == 0) setenv("CDDP_SECRET", "of this seed", 1);
  if ((r = cddp_init(&m.g, NULL)) == CDDP_OK) r = model_open(&m, c, true);
  if (r == CDDP_OK && !me->joins) {
    ADD(shared->alive, 1);
    me->state = RUNNING;
    ADD(shared->created, 1);
  } else if (r == CDDP_OK) {
    if (!SWAP(me->state, STARTING, RUNNING)) pause(); /* it is being killed */
    ADD(shared->alive, 1);
  }
  me->begin = t = r == CDDP_OK ? cddp_ddp_steps(m.ddp) : 0;
  while (r == CDDP_OK && t < (uint64_t)c->steps) {
    if ((r = one_step(&m, c, t)) == CDDP_OK && cddp_ddp_steps(m.ddp) != ++t) r = CDDP_MISMATCH;
    if (r == CDDP_OK && hash_of(&m, c) != shared->want[t] && me->wrong++ == 0)
      me->first_wrong = (int)t;
    if (r == CDDP_OK && c->groups && t % 2 == 0) r = use_group(&m);
  }
  me->result = r;
  me->steps = t;
  snprintf(me->text, sizeof me->text, "%s", r != CDDP_OK ? cddp_error() : "");
  if (SWAP(me->state, RUNNING, r == CDDP_OK ? FINISHED : REFUSED)) model_close(&m, c);
  else if (SWAP(me->state, STARTING, REFUSED)) model_close(&m, c);
  else pause(); /* it is being killed */
  return 0;
}

/* --- a seed --- */

static int start(int rank, bool joins) {
  int i = shared->process_count;
  process *q = &shared->processes[i];
  if (i == PROCESSES) return -1;
  shared->process_count++;
  q->rank = rank;
  q->joins = joins;
  q->state = STARTING;
  q->pid = ranks_fork(life, i, NULL);
  if (q->pid < 0) exit(1);
  return i;
}

/* Some rank that may die or (stop) be stopped. */
static process *pick(uint64_t dice, bool stop) {
  int i, tries;
  for (tries = 0; tries < 2 * PROCESSES; tries++) {
    i = (int)((dice + (uint64_t)tries) % (uint64_t)shared->process_count);
    if (stop && LOAD(shared->processes[i].state) == RUNNING) return &shared->processes[i];
    if (!stop && may_die(&shared->processes[i])) return &shared->processes[i];
  }
  return NULL;
}

typedef struct watch { /* what the test itself is to do, and when */
  double next_kill, next_join, go_on;
  process *stopped;
  int dead[PROCESSES], dead_count; /* ranks to be replaced */
  int further;
} watch;

/* Kills and stops that come from outside. */
static void strike(watch *w, double now) {
  const plan *c = &shared->p;
  int next = LOAD(shared->next);
  process *q;
  if (w->stopped != NULL && now >= w->go_on) {
    kill(w->stopped->pid, SIGCONT);
    w->stopped = NULL;
  }
  if (next >= c->kills || c->kill[next].how == BY_POINT || LOAD(shared->created) < c->n) return;
  if (w->next_kill == 0) w->next_kill = now + c->kill[next].delay;
  if (now < w->next_kill || w->stopped != NULL) return;
  w->next_kill = 0;
  q = pick(ranks_mix(c->seed, (uint64_t)next, 99), c->kill[next].how == STOPPED);
  if (q != NULL && c->kill[next].how == STOPPED) {
    kill(q->pid, SIGSTOP);
    w->stopped = q;
    w->go_on = now + c->kill[next].delay * 4;
  } else if (q != NULL) {
    kill(q->pid, SIGKILL);
  }
  if (next + 1 < c->kills)
    __atomic_store_n(&shared->due, LOAD(shared->points) + c->kill[next + 1].after,
                     __ATOMIC_SEQ_CST);
  ADD(shared->next, 1);
}

static void send_joins(watch *w, double now) {
  const plan *c = &shared->p;
  if (LOAD(shared->created) < c->n) return;
  if (w->dead_count == 0 && w->further == 0) return;
  if (w->next_join == 0) w->next_join = now + c->join_delay;
  if (now < w->next_join) return;
  w->next_join = 0;
  if (w->dead_count > 0) (void)start(w->dead[--w->dead_count], true);
  else (void)start(c->n + --w->further, true);
}

/* Whether a process that has ended, ended as it had to. */
static bool judge(const process *q, int status) {
  bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  if (q->state == DYING) return killed;
  if (status != 0 || q->wrong > 0) return false;
  if (q->state == FINISHED) return q->result == CDDP_OK && q->steps == (uint64_t)shared->p.steps;
  if (q->state != REFUSED || !q->joins || q->begin > 0) return false; /* it came too late, */
  return strstr(q->text, "has ended") != NULL || strstr(q->text, "is full") != NULL;
}

static void describe(const process *q, int status) {
  static const char *const states[] = {"unused",  "starting", "running",
                                       "killed", "finished", "refused"};
  fprintf(stderr,
          "    rank %d%s (pid %d) %s, status 0x%x, %s, steps %" PRIu64 "..%" PRIu64 ", %d wrong"
          " from %d, last point%s: %s\n",
          q->rank, q->joins ? " (joined)" : "", (int)q->pid, states[q->state], (unsigned)status,
          cddp_result_name(q->result), q->begin, q->steps, q->wrong, q->first_wrong, q->at,
          q->text);
}

static int deaths, joined, finished; /* of all seeds */

static bool run_plan(const plan *c) {
  int status[PROCESSES], left, i, before = test_failures;
  bool done[PROCESSES], good = true, hung;
  double until = test_now() + RANKS_WITHIN(LIMIT_S), now;
  watch w;
  memset(shared, 0, sizeof *shared);
  memset(&w, 0, sizeof w);
  memset(done, 0, sizeof done);
  memset(status, 0xff, sizeof status);
  shared->p = *c;
  shared->due = c->kill[0].after;
  w.further = c->further;
  shared->port = ranks_free_port();
  i = (int)ranks_fork(reference, 0, NULL);
  if (waitpid((pid_t)i, &status[0], 0) != (pid_t)i || status[0] != 0) return false;
  for (i = 0; i < c->n; i++) (void)start(i, false);
  for (left = c->n; left > 0 && (now = test_now()) < until;) {
    int count = shared->process_count;
    strike(&w, now);
    send_joins(&w, now);
    left += shared->process_count - count;
    for (i = 0; i < shared->process_count; i++) {
      process *q = &shared->processes[i];
      if (done[i] || waitpid(q->pid, &status[i], WNOHANG) != q->pid) continue;
      done[i] = true;
      left--;
      if (w.stopped == q) w.stopped = NULL;
      if (q->state == DYING && w.dead_count < PROCESSES &&
          (int)(ranks_mix(c->seed, (uint64_t)i, 5) % 4) < c->replaced)
        w.dead[w.dead_count++] = q->rank;
    }
    ranks_sleep(2e-4);
  }
  hung = left > 0;
  for (i = 0; i < shared->process_count; i++) {
    process *q = &shared->processes[i];
    if (!done[i]) {
      if (hung && verbose && getenv("HOLD") != NULL) pause();
      kill(q->pid, SIGKILL);
      waitpid(q->pid, &status[i], 0);
    } else if (!judge(q, status[i])) {
      good = false;
    }
    deaths += q->state == DYING;
    finished += q->state == FINISHED;
    joined += q->joins && q->state == FINISHED;
  }
  CHECK(good);
  CHECK(!hung);
  for (i = 0; i < shared->process_count && shared->processes[i].state != FINISHED;) i++;
  CHECK(i < shared->process_count);
  if (test_failures != before || verbose) {
    fprintf(stderr,
            "  seed %" PRIu64 "%s: %d ranks, %d shards, %d parameters, %d steps, %s, %s weights,"
            " %s gradients%s%s%s%s, norm %g, %d kills, %u points\n",
            c->seed, hung ? " HANGS" : "", c->n, c->shards, c->count, c->steps,
            c->adamw ? "AdamW" : "SGD", c->shared ? "shared" : "malloc'ed",
            c->own ? "own" : "placed", c->mixed ? ", both" : c->waits ? ", wait" : ", step",
            c->copies ? ", copies" : "",
            c->masters ? ", masters" : "", c->rows[0] > 0 ? ", rows" : "", c->max_norm, c->kills,
            shared->points);
    for (i = 0; i < shared->process_count; i++) describe(&shared->processes[i], status[i]);
  }
  return test_failures == before;
}

/* --- */

static int seeds = RANKS_SLOW ? 20 : 100, host_seeds = RANKS_SLOW ? 5 : 20;
static uint64_t first_seed = 1, sweep_seed = 6;
static unsigned stride = RANKS_SLOW ? 29 : 7; /* of test_sweep, points */

static void test_seeds(void) {
  int i, failed = 0;
  deaths = joined = finished = 0;
  for (i = 0; i < seeds && failed < 10; i++) {
    plan p = draw(first_seed + (uint64_t)i);
    failed += !run_plan(&p);
  }
  fprintf(stderr, "  %d seeds: %d ranks died, %d finished, %d of these had joined\n", i, deaths,
          finished, joined);
  CHECK(deaths > 0 || seeds < 10);
  CHECK(joined > 0 || seeds < 10);
}

/* As test_seeds, but that ranks do not share all memory. */
static void test_hosts(void) {
  static const char *const hosts[] = {"ab", "aab", "abc", "aabb", "abcdefgh"};
  int i, failed = 0;
  deaths = joined = finished = 0;
  for (i = 0; i < host_seeds && failed < 10; i++) {
    uint64_t seed = first_seed + (uint64_t)i;
    plan p = draw(seed);
    p.hosts = hosts[ranks_mix(seed, 1, 12) % 5];
    if (p.n < 2 || (p.hosts[1] == 'a' && p.n < 3)) p.n = 3; /* or they would be on one host */
    if (p.shards < p.n) p.shards = p.n;
    p.replaced = p.further = 0;
    memset(p.rows, 0, sizeof p.rows);
    failed += !run_plan(&p);
  }
  fprintf(stderr, "  %d seeds on several hosts: %d ranks died, %d finished\n", i, deaths, finished);
  CHECK(deaths > 0 || host_seeds < 10);
}

/* One rank dies at point n, for n = 1, 1 + stride, ... as long as any rank comes to it. */
static void test_sweep(void) {
  plan p = draw(sweep_seed);
  unsigned n, failed = 0;
  p.n = p.n < 2 ? 2 : p.n;
  p.shards = p.shards < p.n ? p.n : p.shards;
  p.steps = 3;
  p.pause = 0;
  p.kills = 1;
  p.further = 0;
  p.kill[0].how = BY_POINT;
  deaths = joined = 0;
  for (n = 1; failed < 5; n += stride) {
    p.kill[0].after = n;
    p.replaced = n / stride % 2 ? 4 : 0;
    failed += !run_plan(&p);
    if (LOAD(shared->next) == 0) break;
  }
  fprintf(stderr, "  %u points, %d of them deadly\n", n, deaths);
  CHECK(deaths > (stride > 7 ? 1 : 10));
}

int main(int argc, char **argv) {
  int i;
  shared = (board *)ranks_shared(sizeof *shared);
  for (i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--seeds") == 0) {
      seeds = atoi(argv[i + 1]);
      host_seeds = 0;
    }
    if (strcmp(argv[i], "--hosts") == 0) {
      host_seeds = atoi(argv[i + 1]);
      seeds = 0;
      stride = 0;
    }
    if (strcmp(argv[i], "--seed") == 0) first_seed = strtoull(argv[i + 1], NULL, 10);
    if (strcmp(argv[i], "--sweep") == 0) {
      sweep_seed = strtoull(argv[i + 1], NULL, 10);
      stride = 1;
    }
  }
  verbose = seeds + host_seeds == 1;
  if (host_seeds > 0) RUN(test_hosts);
  if (stride == 0) return TEST_END();
  if (stride > 1) RUN(test_seeds);
  if (stride == 1 || seeds > 1) RUN(test_sweep);
  return TEST_END();
}
