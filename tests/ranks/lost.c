/* lost.c - elastic models: ranks are lost at every point of a step. Proves that the surviving ranks
   finish the job, and that their weights are those of one rank without failures, bit for bit.

   How: a plan names for each rank a step, a point and a count. From that step on, the rank dies
   when it has passed the point that many times. Points are CDDP__POINT of cddp.h, "sendmsg", and
   three in this file. Each surviving rank writes the hash of its weights to shared memory. Further
   tests: living ranks that are late or call something else, and a rank that the others count as
   lost although it lives. */
#include "../../cddp.h"

#include "../inside.h"
#include "../ranks.h"

#include <sys/resource.h>

enum { HALVES = 3 /* from this one on: for AdamW with masters alone */, ROWS = 5, PARAMS = 7 };
enum { STEPS = 5, MOST = 8 };
enum { FUSED, APART, BOTH, KINDS };

static const size_t sizes[PARAMS] = {30001, 77, 1, 2500, 9100, 300 * 31, 40 * 9};
static const size_t rows[PARAMS] = {0, 0, 0, 0, 0, 300, 40}; /* of sparse ones */
static const cddp_dtype dtypes[PARAMS] = {CDDP_F32, CDDP_F64,  CDDP_F32, CDDP_F16,
                                          CDDP_BF16, CDDP_F32, CDDP_F16};
static const char *const names[PARAMS] = {"wide",  "double", "one", "half",
                                          "brain", "table",  "rows"};

typedef struct death {
  int step, moment; /* dies when it has passed the point `moment` times since that step began */
  char point[32];   /* CDDP__POINT's, or "forward", "backward", "meeting", "sendmsg" of this file */
  const char *after; /* count only from this point on; NULL: from the beginning of the step */
  bool leaves;      /* ends by _exit; false: by SIGKILL */
} death;

typedef struct plan {
  int shards, kind, ranks;
  bool own, shared, adamw, amsgrad, copies, masters, sparse;
  bool rows_only; /* the model has only the parameters with sparse rows */
  double momentum, max_norm;
  death deaths[MOST]; /* of each rank; step -1: none */
  uint64_t want;      /* hash of the weights without failures */
  const char *saved; /* path of a checkpoint, written after step 3; NULL: none */
  bool loads;        /* loads that checkpoint first */
} plan;

typedef struct report { /* of a rank, in shared memory */
  uint64_t hash;
  int steps, failures;
  int passed; /* 1: it has died where the plan says; small ranks: what pass() announces */
  double longest; /* the longest call of next_shard or step, s */
} report;

static report *reports;        /* [MOST] */
static __thread const plan *now_plan; /* of this rank; NULL: no rank dies */
static __thread int now_rank, now_step, now_passages;
static __thread bool now_after; /* this rank has passed its death's `after` */
static bool now_threads; /* ranks are threads, and die by pthread_exit */
static void (*now_enters)(void); /* called when this process creates a model; NULL: none */

static void elastic_point(const char *name) {
  const death *at = now_plan != NULL ? &now_plan->deaths[now_rank] : NULL;
  if (now_enters != NULL && strcmp(name, "elastic enter") == 0) now_enters();
  if (at == NULL || at->step < 0 || now_step < at->step) return;
  if (at->after != NULL && strcmp(name, at->after) == 0) now_after = true;
  if (strcmp(name, at->point) != 0 || (at->after != NULL && !now_after)) return;
  if (now_passages++ != at->moment) return;
  reports[now_rank].passed = 1;
  if (now_threads) pthread_exit(NULL);
  if (at->leaves) _exit(7);
  raise(SIGKILL);
}

/* In place of cddp's sendmsg: linked with --wrap=sendmsg. */
ssize_t __real_sendmsg(int fd, const struct msghdr *m, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *m, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *m, int flags) {
  ssize_t n = __real_sendmsg(fd, m, flags);
  elastic_point("sendmsg");
  return n;
}

typedef struct model {
  cddp_param p[PARAMS];
  void *copies[PARAMS];
  cddp_ddp *ddp;
  cddp_optim *optim;
  int first, count; /* p[first .. count) are its parameters */
} model;

static cddp_result model_open(model *m, cddp_group *g, const plan *c, bool elastic) {
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_adamw_desc a;
  cddp_result r;
  size_t i;
  int k;
  memset(m, 0, sizeof *m);
  m->count = c->sparse ? PARAMS : c->adamw && !c->masters ? HALVES : ROWS;
  m->first = c->rows_only ? ROWS : 0;
  for (k = m->first; k < m->count; k++) {
    size_t bytes = sizes[k] * cddp_dtype_size(dtypes[k]);
    m->p[k].name = names[k];
    m->p[k].count = sizes[k];
    m->p[k].dtype = dtypes[k];
    m->p[k].data = c->shared ? cddp_alloc(g, bytes) : malloc(bytes);
    if (c->own && rows[k] == 0) m->p[k].grad = calloc(1, bytes);
    if (c->copies && dtypes[k] == CDDP_F32) m->copies[k] = calloc(1, sizes[k] * 2);
    for (i = 0; i < sizes[k]; i++)
      ranks_put(m->p[k].data, dtypes[k], i, ranks_mix(3, (uint64_t)k, i));
  }
  memset(&desc, 0, sizeof desc);
  desc.shards = c->shards;
  desc.elastic = elastic;
  desc.max_grad_norm = c->max_norm;
  if (c->sparse) desc.sparse_rows = rows + m->first;
  r = cddp_ddp_create(&m->ddp, g, m->p + m->first, m->count - m->first, &desc);
  if (r != CDDP_OK) return r;
  memset(&a, 0, sizeof a);
  a.lr = 0.125;
  a.weight_decay = 0.01;
  a.amsgrad = c->amsgrad;
  a.ddp = m->ddp;
  memset(&o, 0, sizeof o);
  o.lr = 0.125;
  o.momentum = c->momentum;
  o.ddp = m->ddp;
  a.master_weights = o.master_weights = c->masters;
  if (c->copies) a.copies = o.copies = m->copies;
  a.copy_dtype = o.copy_dtype = CDDP_BF16;
  if (c->adamw) return cddp_adamw_create(&m->optim, m->p, m->count, &a);
  return cddp_sgd_create(&m->optim, m->p + m->first, m->count - m->first, &o);
}

static void model_close(model *m, cddp_group *g, const plan *c) {
  int k;
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  for (k = m->first; k < m->count; k++) {
    if (c->own && rows[k] == 0) free(m->p[k].grad);
    free(m->copies[k]);
    if (c->shared) cddp_free(g, m->p[k].data);
    else free(m->p[k].data);
  }
}

static uint64_t model_hash(const model *m) {
  uint64_t h = RANKS_HASH;
  int k;
  for (k = m->first; k < m->count; k++) {
    h = ranks_hash(h, m->p[k].data, sizes[k] * cddp_dtype_size(dtypes[k]));
    if (m->copies[k] != NULL) h = ranks_hash(h, m->copies[k], sizes[k] * 2);
  }
  return h;
}

static void backward(model *m, int step, int shard) {
  size_t i;
  int k, n;
  elastic_point("forward");
  for (k = m->count - 1; k >= m->first; k--) {
    uint64_t seed = (uint64_t)(1000 * step + shard);
    for (n = (int)(ranks_mix(seed, (uint64_t)k, 77) % 5); rows[k] != 0 && n > 0; n--) {
      int64_t number = (int64_t)(ranks_mix(seed, (uint64_t)n, 5) % rows[k]);
      double values[31];
      for (i = 0; i < sizes[k] / rows[k]; i++)
        ranks_put(values, dtypes[k], i, ranks_mix(seed, (uint64_t)(k + 100 * n), i));
      CHECK_OK(cddp_ddp_add_rows(m->ddp, k - m->first, &number, values, 1));
    }
    CHECK(rows[k] != 0 || ranks_zero(m->p[k].grad, m->p[k].count * cddp_dtype_size(dtypes[k])));
    for (i = 0; i < m->p[k].count && rows[k] == 0; i++)
      ranks_put(m->p[k].grad, dtypes[k], i, ranks_mix(seed, (uint64_t)k, i));
    CHECK_OK(cddp_ddp_ready(m->ddp, k - m->first));
    elastic_point("backward");
  }
}

static cddp_result take_step(model *m, int kind, int step) {
  cddp_result r;
  if (kind == FUSED || (kind == BOTH && step % 2 == 1)) return cddp_ddp_step(m->ddp, m->optim);
  if ((r = cddp_ddp_wait(m->ddp)) != CDDP_OK) return r;
  if ((r = cddp_optim_step(m->optim)) != CDDP_OK) return r;
  return cddp_optim_zero_grad(m->optim);
}

/* The living ranks save the model, or load it. */
static cddp_result keep(model *m, const plan *c, bool saves) {
  cddp_checkpoint_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.optim = m->optim;
  desc.ddp = m->ddp;
  if (saves) return cddp_save(cddp_ddp_group(m->ddp), c->saved, m->p, m->count, &desc);
  return cddp_load(cddp_ddp_group(m->ddp), c->saved, m->p, m->count, &desc);
}

/* Trains; the hash goes into this rank's report. */
static int train(cddp_group *g, void *arg) {
  const plan *c = (const plan *)arg;
  int shard, before = test_failures, rank = cddp_rank(g);
  bool reference = c->want == 0;
  double began;
  model m;
  CHECK_OK(model_open(&m, g, c, !reference));
  if (c->loads) {
    CHECK_OK(keep(&m, c, false));
    CHECK_EQ(cddp_ddp_steps(m.ddp), 3);
  }
  while (m.optim != NULL && test_failures == before && cddp_ddp_steps(m.ddp) < STEPS) {
    int step = (int)cddp_ddp_steps(m.ddp);
    if (!cddp_ddp_next_shard(m.ddp, &shard)) shard = -1;
    now_step = step;
    for (began = test_now(); shard >= 0; began = test_now()) {
      backward(&m, step, shard);
      began = test_now();
      if (!cddp_ddp_next_shard(m.ddp, &shard)) shard = -1;
      if (test_now() - began > reports[rank].longest) reports[rank].longest = test_now() - began;
    }
    elastic_point("meeting");
    began = test_now();
    CHECK_OK(take_step(&m, c->kind, step));
    if (test_now() - began > reports[rank].longest) reports[rank].longest = test_now() - began;
    if (c->saved != NULL && step == 2) CHECK_OK(keep(&m, c, true));
  }
  reports[rank].hash = model_hash(&m);
  reports[rank].steps = (int)cddp_ddp_steps(m.ddp);
  reports[rank].failures = test_failures - before;
  model_close(&m, g, c);
  return test_failures != before;
}

/* The hash of one rank that computes all shards. */
static uint64_t reference(const plan *c) {
  plan one = *c;
  one.want = 0;
  now_plan = NULL;
  CHECK_OK(ranks_run(train, &one, 1, true));
  return reports[0].hash;
}

static plan plan_of(int shards, int kind, int ranks) {
  plan c;
  int i;
  memset(&c, 0, sizeof c);
  c.shards = shards;
  c.kind = kind;
  c.ranks = ranks;
  c.momentum = 0.9;
  c.shared = true;
  for (i = 0; i < MOST; i++) c.deaths[i].step = -1;
  return c;
}

static void describe(const plan *c, char *out, size_t n) {
  int i;
  snprintf(out, n, "%d shards, %d ranks, kind %d%s%s%s%s%s, momentum %g", c->shards, c->ranks,
           c->kind, c->own ? ", own" : "", c->shared ? ", shared" : "", c->adamw ? ", adamw" : "",
           c->amsgrad ? ", amsgrad" : "", c->copies ? ", copies" : "", c->momentum);
  snprintf(out + strlen(out), n - strlen(out), "%s%s, norm %g", c->masters ? ", masters" : "",
           c->sparse ? ", sparse" : "", c->max_norm);
  for (i = 0; i < c->ranks; i++)
    if (c->deaths[i].step >= 0)
      snprintf(out + strlen(out), n - strlen(out), "; rank %d %s in step %d at %s %d", i,
               c->deaths[i].leaves ? "exits" : "is killed", c->deaths[i].step, c->deaths[i].point,
               c->deaths[i].moment);
}

static int body(cddp_group *g, void *arg) {
  now_plan = (const plan *)arg;
  now_rank = cddp_rank(g);
  now_step = -1;
  now_passages = 0;
  now_after = false;
  return train(g, arg);
}

/* Ranks as threads, which can be lost, too. Memory of a lost thread is never freed. */
static void run_threads(plan *c) {
  int i, died = 0;
  cddp_result r;
  char text[1024];
  c->want = reference(c);
  memset(reports, 0, MOST * sizeof *reports);
  now_threads = true;
  r = ranks_run(body, c, c->ranks, true);
  now_threads = false;
  describe(c, text, sizeof text);
  for (i = 0; i < c->ranks; i++) {
    died += reports[i].passed;
    if (reports[i].hash != c->want && !reports[i].passed)
      test_fail(__FILE__, __LINE__, "threads, %s: rank %d has other weights", text, i);
  }
  if (died == 0) CHECK_OK(r);
  test_count();
}

/* Ranks as processes. Returns how many died. */
static int run_processes(plan *c) {
  int status, i, port = ranks_free_port(), died = 0;
  char text[1024];
  pid_t pids[MOST];
  if (c->want == 0) c->want = reference(c);
  memset(reports, 0, MOST * sizeof *reports);
  fflush(NULL);
  for (i = 0; i < c->ranks; i++) {
    if ((pids[i] = fork()) != 0) continue;
    ranks_job job;
    char number[16];
    job.fn = body;
    job.arg = c;
    snprintf(number, sizeof number, "%d", i);
    setenv("RANK", number, 1);
    snprintf(number, sizeof number, "%d", c->ranks);
    setenv("WORLD_SIZE", number, 1);
    snprintf(number, sizeof number, "%d", port);
    setenv("MASTER_PORT", number, 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    _exit(ranks_process(i, &job));
  }
  describe(c, text, sizeof text);
  for (i = 0; i < c->ranks; i++) {
    waitpid(pids[i], &status, 0);
    died += reports[i].passed;
    if (reports[i].passed) continue;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      test_fail(__FILE__, __LINE__, "%s: rank %d ended with status %x", text, i, status);
    else if (reports[i].hash != c->want || reports[i].steps != STEPS)
      test_fail(__FILE__, __LINE__, "%s: rank %d has other weights, after %d steps", text, i,
                reports[i].steps);
  }
  test_count();
  return died;
}

static void kill_at(plan *c, int rank, int step, const char *point, int moment) {
  c->deaths[rank].step = step;
  c->deaths[rank].moment = moment;
  c->deaths[rank].leaves = (step + moment) % 2 == 1;
  snprintf(c->deaths[rank].point, sizeof c->deaths[rank].point, "%s", point);
}

/* With or without a clip, masters, rows. */
static void vary(plan *c, uint64_t dice) {
  c->max_norm = ranks_mix(dice, 1, 1) % 2 ? 3 : 0;
  c->masters = ranks_mix(dice, 2, 1) % 2;
  c->sparse = !c->adamw && ranks_mix(dice, 3, 1) % 2;
}

/* No rank dies: any number of ranks and shards, all kinds of updates. */
static void test_undisturbed(void) {
  int n, shards, kind;
  for (shards = 1; shards <= (RANKS_SLOW ? 5 : MOST); shards += shards < 3 ? 1 : 2 + RANKS_SLOW)
    for (kind = 0; kind < KINDS; kind++)
      for (n = 1; n <= shards && n <= 5; n++) {
        plan c = plan_of(shards, kind, n);
        c.own = n % 2 == 1;
        c.adamw = (n + shards) % 3 == 0;
        c.amsgrad = shards > 4;
        c.copies = kind == FUSED;
        c.momentum = shards == 2 ? 0 : 0.9;
        vary(&c, (uint64_t)(shards + 10 * n + kind));
        run_threads(&c);
        if (RANKS_TSAN || n == 1) continue;
        c.shared = kind != APART && n != 3;
        run_processes(&c);
      }
}

static const char *const points[] = {
    "elastic piece", /* between hosts alone */
    "forward", "backward", "meeting", "elastic shard end", "elastic shard stored", "elastic meet",
    "elastic met", "elastic exchanged", "elastic reduced", "elastic update", "elastic updated",
    "elastic mean", "elastic rows", "elastic rows gathered",
    /* after another death: */
    "elastic lost", "elastic report", "elastic answer", "elastic table", "elastic built",
    "elastic go", "elastic grouped"};
enum { POINTS = sizeof points / sizeof *points, LATE = 15 };

/* A rank dies at each point, the first or a later time. At points of a meeting it is the second
   rank that dies. hosts: TEST_HOSTS of 2, 3, 4 ranks; NULL: one host. */
static void check_deaths(const char *const *hosts) {
  int i, n, died;
  for (i = hosts == NULL; i < POINTS; i++) {
    bool late = i >= LATE;
    for (n = 2 + late, died = 0; n <= 4; n++) {
      plan c = plan_of(n == 3 ? 8 : 5, (i + n) % KINDS, n);
      c.own = i % 3 == 0;
      c.shared = (i + n) % 3 != 0;
      c.adamw = i % 2 == 1;
      vary(&c, (uint64_t)(i + 100 * n));
      if (strncmp(points[i], "elastic rows", 12) == 0) c.adamw = !(c.sparse = true);
      if (strcmp(points[i], "elastic mean") == 0) c.max_norm = 3;
      if (hosts != NULL) setenv("TEST_HOSTS", hosts[n - 2], 1);
      if (late) kill_at(&c, n - 1, 1, "backward", 1);
      kill_at(&c, n == 3 ? 0 : 1, 1, points[i], n == 4 || late ? 0 : i % 3);
      died += run_processes(&c) - late;
    }
    if (died == 0) test_fail(__FILE__, __LINE__, "no rank came to \"%s\"", points[i]);
  }
  unsetenv("TEST_HOSTS");
}

static void test_deaths(void) { check_deaths(NULL); }

/* A loss delays rank 0 by less than 50 ms, without the shards that it computes again. Measures the
   longest call, the best of ten tries, since other programs delay a rank, too. hosts: TEST_HOSTS;
   NULL: one host. */
static void check_recovery(const char *hosts, int ranks) {
  static const char *const moments[] = {"forward", "elastic shard stored", "meeting", "elastic met",
                                        "elastic mean", "elastic exchanged"};
  size_t i;
  int tries;
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  for (i = 0; i < sizeof moments / sizeof *moments; i++) {
    double best = 1e9;
    for (tries = 0; tries < 10 && best >= RANKS_WITHIN(0.05); tries++) {
      plan c = plan_of(4, FUSED, ranks);
      if (strcmp(moments[i], "elastic mean") == 0) c.max_norm = 3;
      kill_at(&c, 1, 2, moments[i], 0);
      if (run_processes(&c) == 1 && reports[0].longest < best) best = reports[0].longest;
    }
    if (best >= RANKS_WITHIN(0.05))
      test_fail(__FILE__, __LINE__, "hosts %s: rank 1 is lost at \"%s\": rank 0 waits for %.0f ms",
                hosts != NULL ? hosts : "a", moments[i], 1e3 * best);
    test_count();
  }
  unsetenv("TEST_HOSTS");
}

static void test_recovery(void) { check_recovery(NULL, 2); }

/* The cause of a loss, which another host can tell, is not waited for. */
static void test_hosts_recovery(void) {
  check_recovery("ab", 2);
  check_recovery("abb", 3);
}

/* All ranks but one die, in the same step or in successive steps. */
static void test_several(void) {
  static const char *const moments[] = {"backward", "elastic shard stored", "elastic mean",
                                        "elastic updated", "meeting"};
  int i, n, k;
  for (i = 0; i < 5; i++)
    for (n = 3; n <= 4; n++) {
      plan c = plan_of(8, i % 2 == 0 ? FUSED : BOTH, n);
      c.shared = i != 3;
      vary(&c, (uint64_t)(i + 10 * n));
      for (k = 0; k < n - 1; k++) kill_at(&c, k, 1 + (i == 1 ? k : 0), moments[(i + k) % 5], k);
      run_processes(&c);
    }
}

/* A random plan of ranks as threads. Those as processes: tests/chaos/programs.c. */
static void run_seed(uint64_t seed) {
  int shards = 1 + (int)(ranks_mix(seed, 1, 0) % 8), i;
  int n = 1 + (int)(ranks_mix(seed, 2, 0) % (uint64_t)(shards < 5 ? shards : 5));
  int spared = (int)(ranks_mix(seed, 3, 0) % (uint64_t)n);
  plan c = plan_of(shards, (int)(ranks_mix(seed, 4, 0) % KINDS), n);
  c.shared = ranks_mix(seed, 5, 0) % 2 == 0;
  c.own = ranks_mix(seed, 6, 0) % 3 == 0;
  c.adamw = ranks_mix(seed, 7, 0) % 2 == 0;
  c.amsgrad = ranks_mix(seed, 8, 0) % 2 == 0;
  c.copies = ranks_mix(seed, 9, 0) % 3 == 0;
  c.momentum = ranks_mix(seed, 10, 0) % 4 == 0 ? 0 : 0.9;
  vary(&c, seed);
  for (i = 0; i < n; i++)
    if (i != spared && ranks_mix(seed, 11, (uint64_t)i) % 3 != 0)
      kill_at(&c, i, (int)(ranks_mix(seed, 12, (uint64_t)i) % STEPS),
              points[1 + ranks_mix(seed, 13, (uint64_t)i) % (POINTS - 1)],
              (int)(ranks_mix(seed, 14, (uint64_t)i) %
                    (1 + ranks_mix(seed, 15, (uint64_t)i) % 12)));
  run_threads(&c);
}

/* On several hosts, no rank dies. */
static void test_hosts_undisturbed(void) {
  int n, shards, kind;
  setenv("TEST_HOSTS", "aab", 1);
  for (shards = 2; shards <= MOST; shards += 2)
    for (kind = 0; kind < KINDS; kind++)
      for (n = 2; n <= shards && n <= 4; n++) {
        plan c = plan_of(shards, kind, n);
        c.own = n % 2 == 1;
        c.adamw = (n + shards) % 3 == 0;
        c.sparse = !c.adamw;
        c.max_norm = n % 2 == 0 ? 3 : 0;
        c.copies = kind == FUSED;
        c.shared = kind != APART;
        setenv("TEST_HOSTS", n == 2 ? "ab" : n == 3 ? "aab" : "abca", 1);
        run_processes(&c);
      }
  unsetenv("TEST_HOSTS");
}

static void test_hosts_deaths(void) {
  static const char *const hosts[] = {"ab", "aab", "abca"};
  check_deaths(hosts);
}

/* A model with only sparse parameters. Rank 1 dies after one of its sends of rows, each in turn. So
   one of the others has the rows, and the other does not. */
static void test_hosts_rows(void) {
  int k;
  setenv("TEST_HOSTS", "abc", 1);
  for (k = 0; k < 12 && test_failures == 0; k++) {
    plan c = plan_of(5, FUSED, 3);
    c.sparse = c.rows_only = true;
    kill_at(&c, 1, 1, "sendmsg", k);
    c.deaths[1].after = "elastic met";
    CHECK_EQ(run_processes(&c), 1);
  }
  unsetenv("TEST_HOSTS");
}

/* A job that has lost a rank saves a checkpoint. A second job loads it and loses a rank, too. */
static void test_hosts_checkpoint(void) {
  char path[64];
  plan c = plan_of(6, FUSED, 3);
  snprintf(path, sizeof path, "/tmp/cddp-lost-%d.safetensors", (int)getpid());
  c.want = reference(&c);
  c.saved = path;
  kill_at(&c, 1, 1, "backward", 1);
  setenv("TEST_HOSTS", "aab", 1);
  CHECK_EQ(run_processes(&c), 1);
  c.ranks = 2;
  c.loads = true;
  setenv("TEST_HOSTS", "ab", 1);
  c.deaths[1].step = -1;
  run_processes(&c);
  kill_at(&c, 0, 4, "elastic exchanged", 0);
  CHECK_EQ(run_processes(&c), 1);
  unsetenv("TEST_HOSTS");
  unlink(path);
}

static void test_lost_threads(void) { /* a leak sanitizer would report lost threads */
  uint64_t seed;
  for (seed = 1; seed <= 40; seed++) run_seed(seed);
}

/* --- living ranks that are late or call something else --- */

enum { NOT_TAKEN, NOT_DONE, NOT_COME, CALLS_WAIT, OTHER_RATE, IS_STOPPED, LOST_IN_GROUP };
/* not in test_living */
enum { ALONE = LOST_IN_GROUP + 1, NO_DESCRIPTORS, NO_FIRST_THREAD, TAKEN_FOR_LOST };

typedef struct small {
  float w[100];
  cddp_param p;
  cddp_ddp *ddp;
  cddp_optim *optim;
  double pause; /* in each shard, s */
  bool both;    /* ranks are in all steps */
} small;

static int small_shard(small *m) { /* -1: there is none */
  int shard, i;
  if (!cddp_ddp_next_shard(m->ddp, &shard)) return -1;
  if (m->pause > 0) ranks_sleep(m->pause);
  for (i = 0; i < 100; i++) ((float *)m->p.grad)[i] += (float)(i + shard);
  CHECK_OK(cddp_ddp_ready(m->ddp, 0));
  return shard;
}

static void await_passed(int rank) {
  while (__atomic_load_n(&reports[rank].passed, __ATOMIC_SEQ_CST) == 0) ranks_sleep(0.001);
}

/* Ends the wait of await_passed(rank) in the other processes. */
static void pass(int rank) { __atomic_store_n(&reports[rank].passed, 1, __ATOMIC_SEQ_CST); }

/* Checks the error about a rank that is late or calls something else. */
static void expect(cddp_result got, cddp_result want, const char *text) {
  CHECK_EQ(got, want);
  if (strstr(cddp_error(), text) == NULL || strstr(cddp_error(), "rank ") == NULL)
    test_fail(__FILE__, __LINE__, "the error does not say \"%s\": %s", text, cddp_error());
}

/* One rank alone saves the model; a load gives the same weights and states. */
static void save_alone(small *m) {
  char directory[] = "/tmp/cddp-lost-XXXXXX", path[64];
  float w[100], momentum[100];
  cddp_param p = m->p;
  cddp_checkpoint_desc desc;
  cddp_sgd_desc o;
  CHECK(mkdtemp(directory) != NULL);
  snprintf(path, sizeof path, "%s/x", directory);
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  desc.optim = m->optim;
  CHECK_OK(cddp_save(NULL, path, &m->p, 1, &desc));
  p.data = w;
  p.grad = NULL;
  o.lr = 1;
  o.momentum = 0.9;
  CHECK_OK(cddp_sgd_create(&desc.optim, &p, 1, &o));
  CHECK_OK(cddp_load(NULL, path, &p, 1, &desc));
  memcpy(momentum, inside_state(desc.optim, 0), sizeof momentum);
  CHECK(memcmp(w, m->w, sizeof w) == 0 && momentum[99] != 0);
  CHECK(memcmp(momentum, inside_state(m->optim, 0), sizeof w) == 0);
  cddp_optim_destroy(desc.optim);
  CHECK(unlink(path) == 0 && rmdir(directory) == 0);
}

/* Uses up the descriptors: this process can open no file and no pidfd. */
static void take_descriptors(void) {
  struct rlimit most;
  CHECK(getrlimit(RLIMIT_NOFILE, &most) == 0);
  most.rlim_cur = 64;
  CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
  while (dup(STDERR_FILENO) >= 0) {}
  CHECK(errno == EMFILE);
}

/* Rank 0 counts rank 1 as lost and continues. Rank 1 fails alone, with CDDP_ABORTED. */
static void taken_for_lost(small *m, int rank) {
  while (rank == 0 && __atomic_load_n(&reports[1].passed, __ATOMIC_SEQ_CST) == 0) {
    while (small_shard(m) >= 0) {}
    CHECK_OK(cddp_ddp_step(m->ddp, m->optim));
  }
  if (rank == 0) return;
  inside_become_lost(m->ddp);
  ranks_sleep(0.2); /* rank 0 continues alone */
  while (small_shard(m) >= 0) {}
  expect(cddp_ddp_step(m->ddp, m->optim), CDDP_ABORTED, "counted rank 1's process as lost");
  CHECK(strncmp(cddp_error(), "rank 1: ", 8) == 0);
  pass(1);
}

static void small_rank(cddp_group *g, small *m, int scene, int rank) {
  float x = 1;
  int step;
  if (scene <= NOT_COME && rank == 1) { /* late until rank 0 has failed */
    if (scene == NOT_DONE) CHECK(cddp_ddp_next_shard(m->ddp, &step));
    while (scene == NOT_COME && small_shard(m) >= 0) {}
    await_passed(0);
    return;
  }
  for (step = 0; step < 4; step++) {
    bool unseen = step == 0; /* the ranks compare calls in the next step */
    cddp_result r;
    if (scene == IS_STOPPED && rank == 1 && step == 1) raise(SIGSTOP);
    if (scene == TAKEN_FOR_LOST && step == 1) {
      taken_for_lost(m, rank);
      return;
    }
    while (small_shard(m) >= 0) {}
    if (scene == OTHER_RATE && rank == 1 && step == 0) CHECK_OK(cddp_optim_set_lr(m->optim, 0.5));
    r = scene == CALLS_WAIT && rank == 1 && step == 0 ? cddp_ddp_wait(m->ddp)
                                         : cddp_ddp_step(m->ddp, m->optim);
    if (scene <= NOT_COME && !(scene == NOT_COME && unseen))
      expect(r, CDDP_TIMEOUT, "did not reach ddp_next_shard");
    if (scene == CALLS_WAIT && !unseen) expect(r, CDDP_MISMATCH, "called ddp_");
    if (scene == OTHER_RATE && !unseen) expect(r, CDDP_MISMATCH, "learning rate");
    if (scene <= OTHER_RATE && (!unseen || scene < NOT_COME)) break;
    CHECK_OK(r);
    if (m->both) CHECK_EQ(cddp_ddp_present(m->ddp), 2);
    if (scene != LOST_IN_GROUP) continue;
    g = cddp_ddp_group(m->ddp);
    CHECK_EQ(cddp_world_size(g), step >= 2 ? 2 : 3);
    if (rank == 1 && step == 1) raise(SIGKILL);
    CHECK_EQ(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL),
             step == 1 ? CDDP_PEER_LOST : CDDP_OK);
  }
  pass(rank);
  if (scene == LOST_IN_GROUP) save_alone(m);
}

static bool first_thread_has_ended(void) {
  char text[256] = "";
  FILE *f = fopen("/proc/self/stat", "r");
  if (f == NULL) return false;
  CHECK(fgets(text, sizeof text, f) != NULL);
  fclose(f);
  return strstr(text, ") Z ") != NULL;
}

static int scene_ranks(int scene) { return scene == LOST_IN_GROUP ? 3 : scene == ALONE ? 1 : 2; }

static int small_life(int rank, void *arg) {
  int scene = *(const int *)arg;
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_group *g;
  small m;
  ranks_environment(rank, scene_ranks(scene), reports[MOST - 1].steps);
  if (scene <= NOT_COME) setenv("CDDP_TIMEOUT_S", "1", 1);
  if (scene == TAKEN_FOR_LOST) ranks_setenv("CDDP_TIMEOUT_S", (long)RANKS_WITHIN(5.0));
  memset(&m, 0, sizeof m);
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  m.p.name = "w";
  m.p.data = m.w;
  m.p.count = 100;
  desc.shards = 4;
  desc.elastic = true;
  o.lr = 0.1;
  o.momentum = 0.9;
  CHECK_OK(cddp_init(&g, NULL));
  m.both = scene == NO_DESCRIPTORS || scene == NO_FIRST_THREAD;
  if (m.both) m.p.data = memset(cddp_alloc(g, sizeof m.w), 0, sizeof m.w);
  if (m.both && rank == 1) m.pause = 0.05;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, &m.p, 1, &desc));
  CHECK_OK(cddp_sgd_create(&m.optim, &m.p, 1, &o));
  if (scene == NO_DESCRIPTORS && rank == 0) take_descriptors();
  if (scene == NO_FIRST_THREAD && rank == 1) { /* from now on it looks like an ended process */
    pass(1);
    while (!first_thread_has_ended()) ranks_sleep(0.001);
  }
  small_rank(g, &m, scene, rank);
  reports[rank].hash = ranks_hash(RANKS_HASH, m.p.data, sizeof m.w);
  cddp_optim_destroy(m.optim);
  cddp_ddp_destroy(m.ddp);
  if (m.both) cddp_free(g, m.p.data);
  cddp_destroy(g);
  return 0;
}

static void *second_thread(void *arg) { exit(small_life(1, arg) != 0 || test_failures != 0); }

/* Rank 1 is the second thread of a process. The first thread ends after the model's creation. */
static int threaded_life(int rank, void *arg) {
  static int scene;
  pthread_t thread;
  scene = *(const int *)arg;
  if (scene != NO_FIRST_THREAD || rank != 1) return small_life(rank, arg);
  CHECK(pthread_create(&thread, NULL, second_thread, &scene) == 0);
  await_passed(1);
  pthread_exit(NULL);
}

static void run_scene(int scene) {
  int n = scene_ranks(scene), i, status;
  pid_t pids[3];
  memset(reports, 0, MOST * sizeof *reports);
  reports[MOST - 1].steps = ranks_free_port();
  for (i = 0; i < n; i++) pids[i] = ranks_fork(threaded_life, i, &scene);
  if (scene == IS_STOPPED) { /* the other one waits */
    CHECK_EQ(waitpid(pids[1], &status, WUNTRACED), pids[1]);
    CHECK(WIFSTOPPED(status));
    ranks_sleep(0.2);
    CHECK_EQ(waitpid(pids[0], &status, WNOHANG), 0);
    kill(pids[1], SIGCONT);
  }
  for (i = 0; i < n; i++) {
    bool killed = scene == LOST_IN_GROUP && i == 1;
    CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
    if (killed ? !WIFSIGNALED(status) : status != 0)
      test_fail(__FILE__, __LINE__, "scene %d: rank %d ends with %x", scene, i, status);
  }
  if (scene >= IS_STOPPED && scene < TAKEN_FOR_LOST) CHECK_EQ(reports[0].hash, reports[n - 1].hash);
}

static void test_living(void) {
  int scene;
  for (scene = NOT_TAKEN; scene <= LOST_IN_GROUP; scene++) run_scene(scene);
  setenv("TEST_HOSTS", "ab", 1);
  run_scene(CALLS_WAIT);
  run_scene(OTHER_RATE);
  unsetenv("TEST_HOSTS");
}

/* The two ranks of a scene have the weights of one rank alone. */
static void check_scene(int scene) {
  uint64_t want;
  run_scene(ALONE);
  want = reports[0].hash;
  run_scene(scene);
  CHECK(reports[0].hash == want && reports[1].hash == want);
}

/* A rank without descriptors counts no living rank as lost. A rank whose first thread has ended is
   not lost. */
static void test_no_descriptors(void) { check_scene(NO_DESCRIPTORS); }
static void test_no_first_thread(void) { check_scene(NO_FIRST_THREAD); }

/* A living rank that the others count as lost fails alone. */
static void test_taken_for_lost(void) { run_scene(TAKEN_FOR_LOST); }

/* --- a rank that is lost while the others create the model --- */

static void enter_late(void) { await_passed(0); }
static void die(void) { raise(SIGKILL); }

/* Rank 0 has failed and freed its memory when rank 1 creates the model. Rank 1 must not write to
   that memory. */
static int creation_life(int rank, void *arg) {
  enum { PIECES = 64, PAGE = 4096 }; /* an allocation reuses up to twice its size */
  unsigned char *pieces[PIECES];
  cddp_ddp_desc desc;
  cddp_group *g;
  small m;
  int i, k, wrong = 0;
  (void)arg;
  ranks_environment(rank, 3, reports[MOST - 1].steps);
  memset(&m, 0, sizeof m);
  memset(&desc, 0, sizeof desc);
  m.p.name = "w";
  m.p.data = m.w;
  m.p.count = 100;
  desc.elastic = true;
  now_enters = rank == 0 ? NULL : rank == 1 ? enter_late : die;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_EQ(cddp_ddp_create(&m.ddp, g, &m.p, 1, &desc), CDDP_PEER_LOST);
  for (i = 0; rank == 0 && i < PIECES; i++) {
    CHECK((pieces[i] = (unsigned char *)cddp_alloc(g, (size_t)(i + 1) * PAGE)) != NULL);
    memset(pieces[i], 0x5a, (size_t)(i + 1) * PAGE);
  }
  pass(rank);
  await_passed(1);
  for (i = 0; rank == 0 && i < PIECES; i++)
    for (k = 0; k < (i + 1) * PAGE; k++) wrong += pieces[i][k] != 0x5a;
  CHECK_EQ(wrong, 0);
  for (i = 0; rank == 0 && i < PIECES; i++) cddp_free(g, pieces[i]);
  cddp_destroy(g);
  return 0;
}

static void test_creation(void) {
  pid_t pids[3];
  int i, status;
  memset(reports, 0, MOST * sizeof *reports);
  reports[MOST - 1].steps = ranks_free_port();
  for (i = 0; i < 3; i++) pids[i] = ranks_fork(creation_life, i, NULL);
  for (i = 0; i < 3; i++) {
    CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
    CHECK(i == 2 ? WIFSIGNALED(status) : status == 0);
  }
}

/* --- a joining process asks again when its leader no longer leads, and keeps its rank and pid for
   others --- */

typedef struct asking {
  int port, stop, running, joined;
} asking;

static int life_asks(int rank, void *arg) {
  asking *a = (asking *)arg;
  cddp_param p = {"w", NULL, NULL, 100, CDDP_F32};
  cddp_sgd_desc o;
  cddp_ddp_desc desc;
  cddp_ddp *ddp = NULL;
  cddp_optim *sgd = NULL;
  cddp_group *g = NULL;
  cddp_result r;
  float stop = 0;
  memset(&o, 0, sizeof o);
  memset(&desc, 0, sizeof desc);
  desc.elastic = true;
  desc.shards = 3;
  ranks_environment(rank, 2, a->port);
  setenv("CDDP_TIMEOUT_S", "20", 1);
  if (rank == 2) setenv("CDDP_JOIN", "1", 1);
  while (rank == 2 && __atomic_load_n(&a->running, __ATOMIC_SEQ_CST) < 2) ranks_sleep(0.001);
  CHECK_OK(r = cddp_init(&g, NULL));
  if (r != CDDP_OK) return 1;
  if (rank == 2) inside_forget_life(g);
  p.data = cddp_alloc(g, 400);
  CHECK_OK(r = cddp_ddp_create(&ddp, g, &p, 1, &desc));
  __atomic_add_fetch(&a->running, rank < 2, __ATOMIC_SEQ_CST);
  o.ddp = ddp;
  o.lr = 0.1;
  if (r == CDDP_OK) CHECK_OK(r = cddp_sgd_create(&sgd, &p, 1, &o));
  while (r == CDDP_OK && stop == 0) {
    int shard;
    while (cddp_ddp_next_shard(ddp, &shard) && cddp_ddp_ready(ddp, 0) == CDDP_OK) {}
    CHECK_OK(r = cddp_ddp_step(ddp, sgd));
    stop = (float)__atomic_load_n(&a->stop, __ATOMIC_SEQ_CST);
    if (r == CDDP_OK) r = cddp_all_reduce(cddp_ddp_group(ddp), &stop, 1, CDDP_F32, CDDP_MAX, NULL);
    if (r == CDDP_OK && rank == 2) __atomic_store_n(&a->joined, 1, __ATOMIC_SEQ_CST);
    if (r == CDDP_PEER_LOST) r = CDDP_OK, stop = 0;
  }
  CHECK_OK(r);
  CHECK_EQ(inside_table_rank(g), rank);
  CHECK_EQ(inside_table_pid(g), (int)getpid());
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, p.data);
  cddp_destroy(g);
  return 0;
}

static void test_asks_again(void) {
  asking *a = (asking *)ranks_shared(sizeof *a);
  double until = test_now() + RANKS_WITHIN(20);
  pid_t pids[3];
  int status[3], i;
  a->port = ranks_free_port();
  setenv("TEST_HOSTS", "abc", 1);
  for (i = 0; i < 3; i++) pids[i] = ranks_fork(life_asks, i, a);
  unsetenv("TEST_HOSTS");
  while (__atomic_load_n(&a->joined, __ATOMIC_SEQ_CST) == 0 && test_now() < until)
    ranks_sleep(0.01);
  __atomic_store_n(&a->stop, 1, __ATOMIC_SEQ_CST);
  ranks_join(pids, 3, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, 3));
}

/* --- a process that has joined never had the mean that another rank lacks ---
   Ranks 0, 1 and 2 on one host. Rank 2 dies in step 3 after the reduction's last round. Rank 0 has
   passed that round, rank 1 has not: it sees the broken group first. Process 3 joins in the meeting
   that follows, with the weights behind step 3. Then rank 0 dies after the last round of the
   snapshot, which process 3 has passed and rank 1 has not. Now only process 3 has made the
   reduction of step 3, without its mean. Rank 1 must update by the right mean anyway. */

enum { MEAN_COUNT = 500, MEAN_STEP = 3, MEAN_STEPS = 7 };

typedef struct mean_scene {
  bool waits; /* the loop is cddp_ddp_wait and an update of its own */
  int port, first_lost, exchanged, held, grouped, held_again, reported, joined_lost;
  float weights[4];
  int done[4];
} mean_scene;

static mean_scene *scene; /* shared; its ints are atomic */
static cddp_ddp *scene_ddp;
static int scene_rank;

static int look(const int *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static void set(int *p) { __atomic_store_n(p, 1, __ATOMIC_SEQ_CST); }

static void hold(const int *p) {
  double until = test_now() + RANKS_WITHIN(20.0);
  while (look(p) == 0 && test_now() < until) ranks_sleep(0.0005);
  if (look(p) == 0) test_fail(__FILE__, __LINE__, "rank %d was held for too long", scene_rank);
}

static void scene_point(const char *name) {
  bool now = scene_ddp != NULL && cddp_ddp_steps(scene_ddp) == MEAN_STEP;
#define AT(which, point) (scene_rank == (which) && strcmp(name, point) == 0)
  if (AT(0, "elastic lost")) set(&scene->first_lost);
  if (AT(0, "elastic grouped") && look(&scene->first_lost)) hold(&scene->held_again);
  if (AT(0, "elastic passed") && look(&scene->held_again)) {
    ranks_sleep(0.05); /* process 3 passes the round */
    raise(SIGKILL);
  }
  if (AT(1, "elastic exchanged") && now) set(&scene->exchanged);
  if (AT(1, "elastic grouped") && look(&scene->held)) set(&scene->grouped);
  if (AT(1, "waits") && look(&scene->exchanged) && !look(&scene->held)) {
    set(&scene->held);
    hold(&scene->reported);
    hold(&scene->first_lost);
    ranks_sleep(0.1); /* rank 0 breaks the group */
  } else if (AT(1, "waits") && look(&scene->grouped) && !look(&scene->held_again)) {
    set(&scene->held_again);
    hold(&scene->joined_lost);
  }
  if (AT(2, "elastic exchanged") && now) hold(&scene->held);
  if (AT(2, "elastic reduced") && now) raise(SIGKILL);
  if (AT(3, "elastic report")) set(&scene->reported);
  if (AT(3, "elastic lost")) set(&scene->joined_lost);
#undef AT
}

/* Between two steps all ranks use the model's group. A call must not meet that of another step. */
static void scene_use_group(uint64_t step) {
  float all[2] = {(float)step, -(float)step};
  cddp_result r = cddp_all_reduce(cddp_ddp_group(scene_ddp), all, 2, CDDP_F32, CDDP_MAX, NULL);
  if (r != CDDP_PEER_LOST) CHECK_OK(r);
  if (r == CDDP_OK) CHECK(all[0] == -all[1]);
}

static int scene_life(int rank, void *arg) {
  static float w[MEAN_COUNT];
  cddp_param p = {"w", w, NULL, MEAN_COUNT, CDDP_F32};
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_optim *optim = NULL;
  cddp_group *g;
  uint64_t t;
  int shard, i;
  (void)arg;
  scene_rank = rank;
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  ranks_environment(rank, 3, scene->port);
  setenv("CDDP_TIMEOUT_S", "60", 1);
  if (rank == 3) setenv("CDDP_JOIN", "1", 1);
  inside_at_point = NULL;
  CHECK_OK(cddp_init(&g, NULL));
  inside_at_point = scene_point;
  desc.elastic = true;
  desc.shards = 4;
  o.lr = 0.125;
  for (i = 0; i < MEAN_COUNT; i++) w[i] = 1;
  CHECK_OK(cddp_ddp_create(&scene_ddp, g, &p, 1, &desc));
  if (!scene->waits) CHECK_OK(cddp_sgd_create(&optim, &p, 1, &o));
  while (test_failures == 0 && (t = cddp_ddp_steps(scene_ddp)) < MEAN_STEPS) {
    while (cddp_ddp_next_shard(scene_ddp, &shard)) {
      for (i = 0; i < MEAN_COUNT; i++) ((float *)p.grad)[i] += (float)(1 + t) * (float)(shard + 1);
      CHECK_OK(cddp_ddp_ready(scene_ddp, 0));
    }
    if (scene->waits) {
      CHECK_OK(cddp_ddp_wait(scene_ddp));
      for (i = 0; i < MEAN_COUNT; i++) w[i] -= 0.125f * ((float *)p.grad)[i];
      memset(p.grad, 0, sizeof w);
    } else {
      CHECK_OK(cddp_ddp_step(scene_ddp, optim));
    }
    scene_use_group(t);
  }
  scene->weights[rank] = w[7];
  scene->done[rank] = test_failures == 0;
  cddp_optim_destroy(optim);
  cddp_ddp_destroy(scene_ddp);
  cddp_destroy(g);
  return 0;
}

static void test_mean_of_joined(void) {
  float want = 1;
  int i, status[4], waits;
  pid_t pids[4];
  for (i = 0; i < MEAN_STEPS; i++) want -= 0.125f * 2.5f * (float)(1 + i); /* exact */
  scene = (mean_scene *)ranks_shared(sizeof *scene);
  for (waits = 0; waits < 2; waits++) {
    memset(scene, 0, sizeof *scene);
    scene->waits = waits != 0;
    scene->port = ranks_free_port();
    for (i = 0; i < 3; i++) pids[i] = ranks_fork(scene_life, i, NULL);
    hold(&scene->first_lost);
    pids[3] = ranks_fork(scene_life, 3, NULL);
    ranks_join(pids, 4, RANKS_WITHIN(60.0), status);
    CHECK(WIFSIGNALED(status[0]) && WIFSIGNALED(status[2]));
    CHECK(status[1] == 0 && status[3] == 0);
    CHECK(scene->done[1] && scene->weights[1] == want);
    CHECK(scene->done[3] && scene->weights[3] == want);
  }
}

/* --- processes that die while they join ---
   Each of them dies in the meeting in which it joins, but after the next one has asked to join. So
   without a limit every meeting of the step admits one more. The job must complete the step. */

enum { CRASHING = 36 }; /* more than 4 * shards + 16 */

typedef struct crash_loop {
  int port, created, stop, asked[CRASHING + 1];
  int steps; /* of the job */
} crash_loop;

static crash_loop *crashes;

static void crash_point(const char *name) {
  if (strcmp(name, "elastic report") == 0) set(&crashes->asked[scene_rank]);
  if (strcmp(name, "elastic table") != 0) return;
  while (look(&crashes->asked[scene_rank + 1]) == 0 && look(&crashes->stop) == 0)
    ranks_sleep(0.0005);
  raise(SIGKILL);
}

static int crash_life(int rank, void *arg) {
  bool joins = arg != NULL; /* rank: the number of the joining process */
  float w[100] = {0};
  cddp_param p = {"w", w, NULL, 100, CDDP_F32};
  cddp_ddp *ddp = NULL;
  cddp_optim *optim = NULL;
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_group *g;
  cddp_result r;
  int shard;
  scene_rank = rank;
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  ranks_environment(joins ? 2 + rank : rank, 2, crashes->port);
  setenv("CDDP_TIMEOUT_S", "60", 1);
  if (joins) setenv("CDDP_JOIN", "1", 1);
  inside_at_point = NULL;
  if (cddp_init(&g, NULL) != CDDP_OK) return joins ? 0 : 1;
  inside_at_point = joins ? crash_point : NULL;
  desc.elastic = true;
  desc.shards = 4;
  o.lr = 0.125;
  r = cddp_ddp_create(&ddp, g, &p, 1, &desc);
  if (joins) return 0; /* the job has ended before */
  CHECK_OK(r);
  CHECK_OK(cddp_sgd_create(&optim, &p, 1, &o));
  __atomic_add_fetch(&crashes->created, 1, __ATOMIC_SEQ_CST);
  while (test_failures == 0 && look(&crashes->stop) == 0) {
    while (cddp_ddp_next_shard(ddp, &shard)) CHECK_OK(cddp_ddp_ready(ddp, 0));
    CHECK_OK(cddp_ddp_step(ddp, optim));
    if (rank == 0) __atomic_add_fetch(&crashes->steps, 1, __ATOMIC_SEQ_CST);
    ranks_sleep(0.001);
  }
  exit(test_failures != 0); /* to the other one it is lost */
}

static void test_crashing_joins(void) {
  double until = test_now() + RANKS_WITHIN(20.0);
  pid_t pids[2 + CRASHING];
  int status[2 + CRASHING], i, n, begin = INT_MAX;
  crashes = (crash_loop *)ranks_shared(sizeof *crashes);
  crashes->port = ranks_free_port();
  for (i = 0; i < 2; i++) pids[i] = ranks_fork(crash_life, i, NULL);
  while (look(&crashes->created) < 2 && test_now() < until) ranks_sleep(0.001);
  for (n = 0; n < CRASHING && test_now() < until && look(&crashes->steps) < begin; n++) {
    pids[2 + n] = ranks_fork(crash_life, n, crashes);
    while (look(&crashes->asked[n]) == 0 && test_now() < until && look(&crashes->steps) < begin)
      ranks_sleep(0.001);
    if (n == 0) begin = look(&crashes->steps) + 3; /* the first can have asked late in a step */
  }
  CHECK(look(&crashes->steps) >= begin);
  set(&crashes->stop);
  ranks_join(pids, 2 + n, RANKS_WITHIN(20.0), status);
  CHECK(status[0] == 0 && status[1] == 0);
  fprintf(stderr, "  %d processes died or were refused\n", n);
}

/* --- cddp_group_split on another thread, while the owner of the new control block is lost --- */

typedef struct splitting {
  int held;  /* rank 1's split has mapped the block, and waits */
  int goes_on;
} splitting;

static splitting *split;
static __thread bool split_holds; /* this thread stops in its next large allocation */

static void *split_alloc(size_t bytes, void *user_data) {
  (void)user_data;
  if (split_holds && bytes > 500) { /* the group: it has the block's address */
    split_holds = false;
    set(&split->held);
    hold(&split->goes_on);
  }
  return malloc(bytes);
}

static void split_free(void *p, void *user_data) {
  (void)user_data;
  free(p);
}

static void *split_thread(void *arg) {
  cddp_group *g = (cddp_group *)arg, *all = NULL;
  split_holds = cddp_rank(g) == 1;
  CHECK_IS(cddp_group_split(g, 0, 0, &all), CDDP_PEER_LOST);
  CHECK(all == NULL);
  return NULL;
}

static int split_life(int rank, void *arg) {
  float w[4] = {0};
  cddp_param p = {"w", w, NULL, 4, CDDP_F32};
  cddp_group_desc desc;
  cddp_ddp_desc with;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  pthread_t thread;
  int shard, after = 0;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  memset(&with, 0, sizeof with);
  desc.allocator.alloc = split_alloc;
  desc.allocator.free = split_free;
  with.elastic = true;
  CHECK_OK(cddp_init(&g, &desc));
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &with));
  if (d == NULL) return 1;
  CHECK(pthread_create(&thread, NULL, split_thread, g) == 0);
  while (test_failures == 0 && after < 4) { /* the lost rank's memory is freed in the second one */
    while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_wait(d));
    after += cddp_world_size(cddp_ddp_group(d)) == 2;
    if (rank == 0 && look(&split->held)) raise(SIGKILL);
  }
  set(&split->goes_on);
  CHECK(pthread_join(thread, NULL) == 0);
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_split_with_a_lost_rank(void) {
  int status[3];
  split = (splitting *)ranks_shared(sizeof *split);
  ranks_script(split_life, NULL, 3, RANKS_WITHIN(20.0), status);
  CHECK(WIFSIGNALED(status[0]) && WTERMSIG(status[0]) == SIGKILL);
  CHECK_EQ(status[1], 0);
  CHECK_EQ(status[2], 0);
}

/* --- handles that outlive their group: waited for after the next step's shards --- */

static int late_life(int rank, void *arg) {
  enum { COUNT = 2000 };
  float w[4] = {0}, sums[2][COUNT], from = 0, seven = 7;
  cddp_param p = {"w", w, NULL, 4, CDDP_F32};
  cddp_work *work[4] = {NULL}; /* two collectives, one of them in the engine's own work; messages */
  cddp_ddp_desc with;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  cddp_result r;
  int shard, i, k, after = 0, size = 0;
  bool done, arrived = false;
  (void)arg;
  memset(&with, 0, sizeof with);
  with.elastic = true;
  with.shards = 6;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &with));
  if (d == NULL) return 1;
  while (test_failures == 0 && after < 3) {
    if (rank == 1 && cddp_ddp_steps(d) == 3) raise(SIGKILL);
    while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
    for (i = 0; i < 4; i++) {
      if (work[i] == NULL) continue;
      CHECK_OK(cddp_test(work[i], &done));
      if (i == 3) CHECK(cddp_cancel(work[i]) == CDDP_OK || cddp_wait(work[i]) != CDDP_OK);
      else if ((r = cddp_wait(work[i])) != CDDP_PEER_LOST || (i == 2 && arrived)) CHECK_OK(r);
      if (i < 2 && r == CDDP_OK)
        for (k = 0; k < COUNT; k++) CHECK(sums[i][k] == (float)(size * (k % 7)));
      work[i] = NULL;
    }
    CHECK_OK(cddp_ddp_wait(d));
    after += (size = cddp_world_size(cddp_ddp_group(d))) == 2;
    for (i = 0; i < 2; i++) {
      for (k = 0; k < COUNT; k++) sums[i][k] = (float)(k % 7);
      r = cddp_all_reduce(cddp_ddp_group(d), sums[i], COUNT, CDDP_F32, CDDP_SUM, &work[i]);
      if (r != CDDP_PEER_LOST) CHECK_OK(r);
    }
    from = 0;
    for (i = 2; i < 4; i++) { /* from the rank before, which sends one message: tag 2 */
      k = (cddp_rank(cddp_ddp_group(d)) + size - 1) % size;
      r = cddp_recv(cddp_ddp_group(d), &from, 1, CDDP_F32, k, i, &work[i]);
      if (r != CDDP_PEER_LOST) CHECK_OK(r);
    }
    k = (cddp_rank(cddp_ddp_group(d)) + 1) % size;
    r = cddp_send(cddp_ddp_group(d), &seven, 1, CDDP_F32, k, 2, NULL);
    if (r != CDDP_PEER_LOST) CHECK_OK(r);
    ranks_sleep(0.02);
    if (work[2] != NULL) CHECK_OK(cddp_test(work[2], &done));
    arrived = work[2] != NULL && from == 7;
  }
  for (i = 0; i < 3; i++)
    if (work[i] != NULL && (r = cddp_wait(work[i])) != CDDP_PEER_LOST) CHECK_OK(r);
  if (work[3] != NULL) CHECK_OK(cddp_cancel(work[3]));
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_late_waits(void) {
  static const char *const hosts[] = {"aaa", "aab"};
  int status[3], i;
  inside_at_point = NULL;
  for (i = 0; i < 2; i++) {
    setenv("TEST_HOSTS", hosts[i], 1);
    ranks_script(late_life, NULL, 3, RANKS_WITHIN(20.0), status);
    CHECK(WIFSIGNALED(status[1]) && WTERMSIG(status[1]) == SIGKILL);
    CHECK_EQ(status[0], 0);
    CHECK_EQ(status[2], 0);
  }
  unsetenv("TEST_HOSTS");
  inside_at_point = elastic_point;
}

/* --- a rank that destroys its model and allocates, while another lacks the last mean --- */

enum { GONE_COUNT = 300000, GONE_STEPS = 6, GONE_LAST = 3 /* rank 0's last step */ };

typedef struct gone_ranks {
  int waits;        /* rank 2 has found in that step's last round that others are missing */
  int ended;        /* number of ranks that have trained to the end */
  uint64_t hash[3]; /* of their weights */
} gone_ranks;

static gone_ranks *gone;
static __thread cddp_ddp *gone_model; /* NULL: not created */
static __thread int gone_rank;
static __thread bool gone_in_round; /* rank 2 is in the last round of step GONE_LAST */

static void gone_point(const char *name) {
  if (gone_model == NULL || cddp_ddp_steps(gone_model) != GONE_LAST) return;
  if (strcmp(name, "elastic exchanged") == 0) {
    if (gone_rank == 2) gone_in_round = true;
    else hold(&gone->waits);
  }
  if (gone_in_round && strcmp(name, "waits") == 0) {
    gone_in_round = false;
    set(&gone->waits);
    ranks_sleep(0.5); /* the others complete the round; rank 0 leaves, rank 1 breaks the group */
  }
  /* It has left the groups, and has not read the mean. */
  if (gone_rank == 2 && strcmp(name, "elastic grouped") == 0) ranks_sleep(0.3);
}

static int gone_life(int rank, void *arg) {
  float *w, *garbage;
  cddp_param p = {"w", NULL, NULL, GONE_COUNT, CDDP_F32};
  cddp_ddp_desc with;
  cddp_sgd_desc sgd;
  cddp_optim *optim = NULL;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  int shard, i, steps;
  (void)arg;
  memset(&with, 0, sizeof with);
  memset(&sgd, 0, sizeof sgd);
  with.elastic = true;
  with.shards = 6;
  inside_at_point = gone_point;
  gone_rank = rank;
  CHECK_OK(cddp_init(&g, NULL));
  p.data = w = (float *)cddp_alloc(g, GONE_COUNT * sizeof *w);
  for (i = 0; i < GONE_COUNT; i++) w[i] = (float)(i % 10);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &with));
  sgd.lr = 0.5;
  sgd.ddp = d;
  CHECK_OK(cddp_sgd_create(&optim, &p, 1, &sgd));
  if (optim == NULL) return 1;
  gone_model = d;
  while (test_failures == 0 && (steps = (int)cddp_ddp_steps(d)) < GONE_STEPS) {
    if (rank == 0 && steps > GONE_LAST) break;
    while (cddp_ddp_next_shard(d, &shard)) {
      for (i = 0; i < GONE_COUNT; i++) ((float *)p.grad)[i] = (float)(i % 7 + shard + steps);
      CHECK_OK(cddp_ddp_ready(d, 0));
    }
    CHECK_OK(cddp_ddp_step(d, optim));
  }
  gone_model = NULL;
  gone->hash[rank] = ranks_hash(RANKS_HASH, w, GONE_COUNT * sizeof *w);
  __atomic_add_fetch(&gone->ended, rank != 0, __ATOMIC_SEQ_CST);
  cddp_optim_destroy(optim);
  cddp_ddp_destroy(d);
  while (rank == 0 && look(&gone->ended) < 2) { /* memory that is free is soon given out again */
    if ((garbage = (float *)cddp_alloc(g, GONE_COUNT * sizeof *w)) == NULL) return 1;
    memset(garbage, 0x41, GONE_COUNT * sizeof *w);
    ranks_sleep(0.01);
  }
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_gone_with_a_mean(void) {
  int status[3], i;
  gone = (gone_ranks *)ranks_shared(sizeof *gone);
  ranks_script(gone_life, NULL, 3, RANKS_WITHIN(20.0), status);
  for (i = 0; i < 3; i++) CHECK_EQ(status[i], 0);
  CHECK(gone->hash[1] == gone->hash[2] && gone->hash[1] != gone->hash[0]);
}

int main(void) {
  reports = (report *)ranks_shared(MOST * sizeof *reports);
  inside_at_point = elastic_point;
  RUN(test_undisturbed);
  if (RANKS_TSAN || !RANKS_SLOW) RUN(test_lost_threads);
  if (!RANKS_TSAN) {
    RUN(test_deaths);
    RUN(test_recovery);
    RUN(test_several);
    RUN(test_living);
    RUN(test_no_descriptors);
    RUN(test_no_first_thread);
    RUN(test_taken_for_lost);
    RUN(test_creation);
    RUN(test_mean_of_joined);
    RUN(test_crashing_joins);
    RUN(test_split_with_a_lost_rank);
    RUN(test_late_waits);
    RUN(test_gone_with_a_mean);
    RUN(test_hosts_undisturbed);
    RUN(test_hosts_deaths);
    RUN(test_hosts_recovery);
    RUN(test_hosts_rows);
    RUN(test_asks_again);
    RUN(test_hosts_checkpoint);
  }
  return TEST_END();
}
