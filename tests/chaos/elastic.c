/* elastic.c - ranks of an elastic model die at any point, and other processes join. Proves that all
   surviving ranks finish in time, with the weights of one rank that trained alone, bit for bit.

     build/plain/elastic --seeds 1000 --seed 5000   seeds 5000 to 5999
     build/plain/elastic --seeds 1 --seed 17        one seed, with what each process did
     build/plain/elastic --hosts 500                the same on several hosts (CDDP_HOST_ID); with
                                                    --seed as above
     build/plain/elastic --sweep 17                 seed 17's model without its kills: one rank dies
                                                    at the first point of the engine that any rank
                                                    reaches, then at the second, and so on
     build/plain/elastic --hosts 1 --sweep 17       the same on two hosts

   A seed draws a model (1 to 8 ranks, up to 12 shards, an optimizer, types, the owner of memory,
   cddp_ddp_step or cddp_ddp_wait) and a list of faults. Ranks die at the n-th point that any rank
   reaches (CDDP__POINT("elastic ...")) or at a random time: one, several, one during the recovery
   from another, or all but one. Some are stopped for a while. Dead ranks are replaced, and further
   ones join. How: one rank without the elastic engine first computes the weights' hash for every
   step. After each step every rank compares its hash. A rank that does not end in time fails the
   test. */
#include "../../cddp.h"

#include "../inside.h"
#include "../ranks.h"
#include "training.h"

#include <sys/prctl.h>

enum { RANKS = 8, KILLS = 10, PROCESSES = 32 };
#define LIMIT_S 30.0 /* of a seed; the machine may be loaded */

enum { BY_POINT, FROM_OUTSIDE, STOPPED };
typedef struct kill_plan {
  int how;
  unsigned after; /* BY_POINT: points since the kill before */
  double delay;   /* others: seconds since the event before */
} kill_plan;

typedef struct plan {
  uint64_t seed;
  recipe model;
  int n, kills, further;
  bool groups;
  bool frames;  /* only frames between hosts are points, of the last rank */
  int replaced; /* out of four dead ranks, this many are replaced */
  const char *hosts; /* on which ranks are, as TEST_HOSTS; NULL: on one */
  kill_plan kill[KILLS];
  double join_delay;
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

typedef struct shared_state {
  plan p;
  int port;
  uint64_t want[TRAINING_STEPS + 1]; /* [n] hash of the weights after n steps */
  int created;              /* first ranks with a model; faults begin when all have one */
  int alive;                /* ranks that can finish the job; never 0 */
  unsigned points;          /* reached so far by all ranks */
  unsigned due;             /* the number of the point at which the next kill BY_POINT happens */
  int next;                 /* kills done or skipped */
  int process_count;
  process processes[PROCESSES];
} shared_state;

static shared_state *shared;
static process *me; /* NULL in the test itself */
static bool verbose;

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define ADD(x, n) __atomic_add_fetch(&(x), n, __ATOMIC_SEQ_CST)
#define SWAP(x, old, now)                                                                          \
  __extension__({                                                                                  \
    __typeof__(x) swap_old = (old);                                                                \
    __atomic_compare_exchange_n(&(x), &swap_old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  })

/* --- permission to die: never for the last rank that could finish the job --- */

static bool may_die(process *q) {
  int alive;
  if (SWAP(q->state, STARTING, DYING)) return true; /* joining: the others do not need it */
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
  if (me == NULL || (shared->p.frames ? strcmp(name, "frame") != 0 || me->rank != shared->p.n - 1
                                      : strncmp(name, "elastic", 7) != 0))
    return;
  snprintf(me->at, sizeof me->at, "%s", name + (shared->p.frames ? 0 : 7));
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
  uint64_t k = 0;
#define DRAW(n) (ranks_mix(seed, ++k, 10) % (uint64_t)(n))
  plan p;
  int i, scheme;
  memset(&p, 0, sizeof p);
  p.seed = seed;
  p.n = 1 + (int)DRAW(RANKS);
  if (p.n > 4 && DRAW(2)) p.n -= 4;
  p.model = recipe_draw(seed, p.n);
  p.groups = DRAW(4) == 0;
  p.replaced = (int)DRAW(5);
  p.further = DRAW(3) == 0 ? (int)(1 + DRAW(3)) : 0;
  p.join_delay = (double)DRAW(1000) * 1e-5;
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
#undef DRAW
  return p;
}

/* --- a rank's life --- */

/* The living ranks reduce a value; a rank that dies meanwhile is no error. */
static cddp_result use_group(training *m) {
  cddp_group *g = cddp_ddp_group(m->ddp);
  float x = 1;
  cddp_result r;
  if (g == NULL) return CDDP_INVALID_ARGUMENT;
  r = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL);
  if (r == CDDP_OK && x != (float)cddp_world_size(g)) return CDDP_MISMATCH;
  return r == CDDP_PEER_LOST ? CDDP_OK : r;
}

static int reference(int rank, void *arg) { /* one rank alone, in a process of its own */
  const recipe *c = &shared->p.model;
  cddp_group_desc d;
  cddp_result r;
  uint64_t t;
  training m;
  (void)rank, (void)arg;
  memset(&m, 0, sizeof m);
  memset(&d, 0, sizeof d);
  d.world_size = 1;
  if ((r = cddp_init(&m.g, &d)) == CDDP_OK) r = training_open(&m, c, false, false);
  for (t = 0; r == CDDP_OK && t < (uint64_t)c->steps; t++) {
    r = training_step(&m, c, t);
    shared->want[t + 1] = training_hash(&m, c);
  }
  CHECK_OK(r);
  training_close(&m, c);
  cddp_destroy(m.g);
  return 0;
}

static int life(int number, void *arg) {
  const plan *p = &shared->p;
  const recipe *c = &p->model;
  cddp_result r;
  uint64_t t;
  training m;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  me = &shared->processes[number];
  me->pid = getpid();
  memset(&m, 0, sizeof m);
  if (p->hosts != NULL) setenv("TEST_HOSTS", p->hosts, 1);
  ranks_environment(me->rank, p->n, shared->port);
  if (me->joins) setenv("CDDP_JOIN", "1", 1);
  setenv("CDDP_TIMEOUT_S", "20", 1);
  if (p->seed % 4 == 0) setenv("CDDP_SECRET", "of this seed", 1);
  if ((r = cddp_init(&m.g, NULL)) == CDDP_OK) r = training_open(&m, c, true, me->joins);
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
    r = training_step(&m, c, t);
    if (r == CDDP_OK && cddp_ddp_steps(m.ddp) != ++t) r = CDDP_MISMATCH;
    if (r == CDDP_OK && training_hash(&m, c) != shared->want[t] && me->wrong++ == 0)
      me->first_wrong = (int)t;
    if (r == CDDP_OK && (p->frames || (p->groups && t % 2 == 0))) r = use_group(&m);
  }
  me->result = r;
  me->steps = t;
  snprintf(me->text, sizeof me->text, "%s", r != CDDP_OK ? cddp_error() : "");
  if (!SWAP(me->state, RUNNING, r == CDDP_OK ? FINISHED : REFUSED) &&
      !SWAP(me->state, STARTING, REFUSED))
    pause(); /* it is being killed */
  training_close(&m, c);
  cddp_destroy(m.g);
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

/* A rank that may die, or (stop) that can be stopped. */
static process *pick(uint64_t dice, bool stop) {
  int i, tries;
  for (tries = 0; tries < 2 * PROCESSES; tries++) {
    i = (int)((dice + (uint64_t)tries) % (uint64_t)shared->process_count);
    if (stop && LOAD(shared->processes[i].state) == RUNNING) return &shared->processes[i];
    if (!stop && may_die(&shared->processes[i])) return &shared->processes[i];
  }
  return NULL;
}

typedef struct watch { /* what the test does next, and when */
  double next_kill, next_join, go_on;
  process *stopped;
  int dead[PROCESSES], dead_count; /* ranks to be replaced */
  int further;
} watch;

/* Kills and stops by the test itself. */
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

/* Whether a process ended as planned. */
static bool judge(const process *q, int status) {
  bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  if (q->state == DYING) return killed;
  if (status != 0 || q->wrong > 0) return false;
  if (q->state == FINISHED)
    return q->result == CDDP_OK && q->steps == (uint64_t)shared->p.model.steps;
  if (q->state != REFUSED || !q->joins || q->begin > 0) return false; /* it joined too late */
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
    char model[300];
    recipe_describe(&c->model, model, sizeof model);
    fprintf(stderr, "  seed %" PRIu64 "%s: %d ranks, %s, %d kills, %u points\n", c->seed,
            hung ? " HANGS" : "", c->n, model, c->kills, shared->points);
    for (i = 0; i < shared->process_count; i++) describe(&shared->processes[i], status[i]);
  }
  return test_failures == before;
}

/* --- */

static int seeds = RANKS_SLOW ? 20 : 50, host_seeds = RANKS_SLOW ? 5 : 10;
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

/* test_seeds on several hosts: ranks do not share all memory. */
static void test_hosts(void) {
  static const char *const hosts[] = {"ab", "aab", "abc", "aabb", "abcdefgh"};
  int i, failed = 0;
  deaths = joined = finished = 0;
  for (i = 0; i < host_seeds && failed < 10; i++) {
    uint64_t seed = first_seed + (uint64_t)i;
    plan p = draw(seed);
    p.hosts = hosts[ranks_mix(seed, 1, 12) % 5];
    if (p.n < 2 || (p.hosts[1] == 'a' && p.n < 3)) p.n = 3; /* or they would be on one host */
    if (p.model.shards < p.n) p.model.shards = p.n;
    failed += !run_plan(&p);
  }
  fprintf(stderr, "  %d seeds over hosts: %d ranks died, %d finished, %d of these had joined\n",
          i, deaths, finished, joined);
  CHECK(deaths > 0 || host_seeds < 10);
  CHECK(joined > 0 || host_seeds < 10);
}

/* One rank dies at point n, for n = 1, 1 + step, ... while a rank reaches it. */
static void sweep(plan p, unsigned step) {
  unsigned n, failed = 0;
  p.kills = 1;
  p.further = 0;
  p.kill[0].how = BY_POINT;
  deaths = joined = 0;
  for (n = 1; failed < 5; n += step) {
    p.kill[0].after = n;
    p.replaced = n / step % 2 ? 4 : 0;
    failed += !run_plan(&p);
    if (LOAD(shared->next) == 0) break;
  }
  fprintf(stderr, "  %u points, %d of them deadly\n", n, deaths);
  CHECK(deaths > (step > 7 ? 1 : step > 1 ? 3 : 10));
}

static void test_sweep(void) {
  plan p = draw(sweep_seed);
  p.hosts = seeds == 0 ? "aab" : NULL; /* --hosts */
  p.n = p.n < 3 ? 2 + (p.hosts != NULL) : p.n;
  p.model.shards = p.model.shards < p.n ? p.n : p.model.shards;
  p.model.steps = 3;
  p.model.pause = 0;
  sweep(p, stride);
}

/* A rank of three on three hosts dies after its frame to one of the others and before that to the
   other. So only one rank has the mean, and it is already in the group of the next step. */
static void test_frames(void) {
  plan p = draw(sweep_seed);
  p.hosts = "abc";
  p.n = 3;
  p.groups = false;
  p.frames = true;
  memset(&p.model, 0, sizeof p.model);
  p.model.seed = sweep_seed;
  p.model.shards = 3;
  p.model.steps = 2;
  p.model.count = 1;
  p.model.sizes[0] = 300;
  sweep(p, RANKS_SLOW ? 3 : 1);
}

/* A norm that clips nothing: an update reads the parts of the mean in the memory of all ranks. */
static void test_unclipped_sweep(void) {
  plan p = draw(sweep_seed);
  int adamw;
  p.hosts = NULL;
  p.n = 2;
  for (adamw = 0; adamw < 2; adamw++) {
    memset(&p.model, 0, sizeof p.model);
    p.model.seed = sweep_seed;
    p.model.shards = p.model.steps = 2;
    p.model.adamw = adamw;
    p.model.momentum = 0.9;
    p.model.max_norm = 1e9;
    p.model.count = 1;
    p.model.sizes[0] = 300;
    sweep(p, RANKS_SLOW ? 3 : 1);
  }
}

int main(int argc, char **argv) {
  int i;
  shared = (shared_state *)ranks_shared(sizeof *shared);
  inside_at_point = point;
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
  verbose = seeds + host_seeds == 1 && stride != 1;
  if (host_seeds > 0) RUN(test_hosts);
  if (host_seeds > 0) RUN(test_frames);
  if (stride == 0) return TEST_END();
  if (stride > 1) RUN(test_seeds);
  if (stride == 1 || seeds > 1) RUN(test_sweep);
  if (stride != 1 && seeds > 1) RUN(test_unclipped_sweep);
  return TEST_END();
}
