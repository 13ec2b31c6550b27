/* Shards and elastic training on GPUs: one hash of the weights for each number of shards, whoever
   computes them.

   test_shards trains with S shards on 1 to 4 ranks, by NCCL and through host memory, and compares
   the hash with that of one CPU rank. test_elastic kills a rank at each point at which a step can
   be cut (cddp's CDDP__POINT): the others must end with the undisturbed hash. test_elastic_joins
   draws deaths and joins at random: SEEDS=100 draws more. */
#include "nccl_train.h"

/* Shards: what is left of training with S of them on n ranks is one hash for each S. */
enum { SHARD_PARAMS = 6, SHARD_STEPS = 4, MOST_SHARDS = 8 };

typedef struct sharding {
  bool cpu, sparse, elastic;
  int victims[8], steps[8]; /* of an elastic model: rank i is killed in that step, if [i], */
  const char *points[8];    /* when it comes to that point; "ready" is one */
  bool random;              /* they may not come to it */
  int ranks, joins;         /* at the start; those that join, as the victims if there are some */
  int length;               /* steps; 0: SHARD_STEPS */
  double norm;              /* max_grad_norm */
  bool masters;
  const char *backend;
  int shards;
  bool repeats;     /* all steps are the same, on a GPU from the third on launches of one graph */
  uint64_t *hashes; /* [ranks][MOST_SHARDS + 1] */
} sharding;

/* Of a process that may be killed; read by the library's threads. */
static const sharding *elastic_now;
static int elastic_rank;
static int elastic_step;

/* Whether a rank is in; one that joins may come too late, or where another one has not died. */
static bool made(cddp_result r) {
  const char *text = cddp_error();
  bool late = strstr(text, "has ended") || strstr(text, "is full") || strstr(text, "in the job;");
  if (r != CDDP_OK && late && getenv("CDDP_JOIN") != NULL) return false;
  CHECK_OK(r);
  return r == CDDP_OK;
}

/* inside_at_point. */
static void at_point(const char *name) {
  const sharding *c = __atomic_load_n(&elastic_now, __ATOMIC_ACQUIRE);
  if (c == NULL || !c->victims[elastic_rank]) return;
  if (__atomic_load_n(&elastic_step, __ATOMIC_SEQ_CST) < c->steps[elastic_rank]) return;
  if (strcmp(name, c->points[elastic_rank]) == 0) raise(SIGKILL);
}

static void shard_backward(const sharding *c, cddp_group *g, cddp_ddp *d, cddp_param *p,
                           uint64_t seed) {
  cudaStream_t s = c->cpu ? (cudaStream_t)-1 : (cudaStream_t)cddp_stream(g);
  float values[6 * 10];
  int64_t rows[6];
  size_t i;
  int k;
  for (k = SHARD_PARAMS - 1; k >= 0; k--) {
    cddp_param bare = p[k];
    bare.data = NULL;
    if (bare.grad != NULL) backward_on(s, &bare, ranks_mix(seed, (uint64_t)k, 1));
    for (i = 0; i < 60; i++) values[i] = (float)ranks_mix(seed, i, 4) * 0x1p-63f - 1;
    for (i = 0; i < 6; i++) rows[i] = (int64_t)(ranks_mix(seed, i, 5) % 7);
    if (c->sparse && k == 1) CHECK_OK(cddp_ddp_add_rows(d, 1, rows, values, 1 + seed % 6));
    CHECK_OK(cddp_ddp_ready(d, k));
  }
}

static uint64_t hash_shards(const sharding *c, cddp_group *g, int count) {
  static const size_t counts[SHARD_PARAMS] = {3001, 70, 1, 700, 900, 0};
  static const cddp_dtype dtypes[SHARD_PARAMS] = {CDDP_F32, CDDP_F32,  CDDP_F64,
                                                  CDDP_F16, CDDP_BF16, CDDP_F32};
  size_t rows[SHARD_PARAMS] = {0, 7, 0, 0, 0, 0}, i;
  uint64_t hash = 1;
  double host[3001], norm;
  plan memory;
  cddp_param p[SHARD_PARAMS];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  int step, k, shard = -1, steps = c->length > 0 ? c->length : SHARD_STEPS;
  memset(&memory, 0, sizeof memory);
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  memset(p, 0, sizeof p);
  memory.cpu = c->cpu;
  for (k = 0; k < SHARD_PARAMS; k++) {
    p[k].count = counts[k];
    p[k].dtype = dtypes[k];
    p[k].data = plan_memory(&memory, counts[k] * cddp_dtype_size(dtypes[k]));
    if (k == 3) p[k].grad = plan_memory(&memory, counts[k] * cddp_dtype_size(dtypes[k]));
  }
  if (!c->cpu) {
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    if (count % 2 == 0) cddp_set_stream(g, stream);
  }
  desc.shards = count;
  desc.elastic = c->elastic;
  desc.max_grad_norm = c->norm;
  if (c->sparse) desc.sparse_rows = rows;
  rule.lr = 0.01;
  rule.momentum = 0.9;
  rule.stream = stream;
  rule.master_weights = c->masters;
  if (!made(cddp_ddp_create(&d, g, p, SHARD_PARAMS, &desc))) return 0;
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&s, p, SHARD_PARAMS, &rule));
  if (!c->cpu && count % 2 != 0) { /* as late as may be */
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    cddp_set_stream(g, stream);
  }
  for (step = (int)cddp_ddp_steps(d); step < steps && exec == NULL; step++) {
    bool captures = c->repeats && !c->cpu && step == 2;
    CHECK_EQ(cddp_ddp_steps(d), step);
    __atomic_store_n(&elastic_step, step, __ATOMIC_SEQ_CST);
    if (c->joins > 0) ranks_sleep(2e-3);
    if (captures)
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    while (cddp_ddp_next_shard(d, &shard))
      shard_backward(c, g, d, p, (uint64_t)((c->repeats ? 0 : 100 * step) + shard));
    if (c->repeats || step % 2 == 0) {
      CHECK_OK(cddp_ddp_step(d, s));
      if (c->norm > 0) CHECK_OK(cddp_ddp_grad_norm(d, &norm)); /* ranks may have died */
      if (!captures) continue;
      CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
      CHECK(graph != NULL && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
      for (; step < SHARD_STEPS; step++) CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
      CHECK_OK(cddp_synchronize(g));
    } else {
      CHECK_OK(cddp_ddp_wait(d));
      CHECK_OK(cddp_optim_step(s));
      CHECK_OK(cddp_optim_zero_grad(s));
    }
  }
  for (k = 0; k < SHARD_PARAMS; k++) {
    size_t bytes = counts[k] * cddp_dtype_size(dtypes[k]);
    if (c->cpu)
      memcpy(host, p[k].data, bytes);
    else if (c->elastic) /* g has lost ranks */
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess &&
            cudaMemcpy(host, p[k].data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    else if (bytes > 0)
      to_host(g, host, p[k].data, bytes);
    for (i = 0; i < bytes; i++) hash = ranks_mix(hash, ((unsigned char *)host)[i], i);
  }
  if (exec != NULL) cudaGraphExecDestroy(exec);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  if (stream != NULL) cudaStreamDestroy(stream);
  for (k = 0; k < SHARD_PARAMS; k++) plan_release(&memory, p[k].data);
  plan_release(&memory, p[3].grad);
  return hash;
}

static int train_shards(cddp_group *g, void *arg) {
  const sharding *c = (const sharding *)arg;
  int count;
  for (count = cddp_world_size(g); count <= MOST_SHARDS; count++)
    c->hashes[cddp_rank(g) * (MOST_SHARDS + 1) + count] = hash_shards(c, g, count);
  return 0;
}

static void check_shards(const sharding *want, int n, const char *hosts, const char *backend) {
  size_t bytes = (size_t)n * (MOST_SHARDS + 1) * sizeof(uint64_t);
  sharding c = *want;
  int rank, count;
  c.cpu = false;
  c.hashes = (uint64_t *)ranks_shared(bytes);
  CHECK_OK(hosts != NULL ? run_on(hosts, train_shards, &c, backend)
                         : run(train_shards, &c, n, backend));
  for (rank = 0; rank < n; rank++)
    for (count = n; count <= MOST_SHARDS; count++)
      if (c.hashes[rank * (MOST_SHARDS + 1) + count] != want->hashes[count])
        test_fail(__FILE__, __LINE__, "%d shards: rank %d of %d on %s has other bits", count, rank,
                  n, backend != NULL ? backend : "nccl");
  munmap(c.hashes, bytes);
}

/* The rank that a process joins as: a victim's, or a further one. */
static int elastic_as(const sharding *c, int process) {
  int i, k = process - c->ranks;
  for (i = 0; process >= c->ranks && i < c->ranks; i++)
    if (c->victims[i] && k-- == 0) return i;
  return process;
}

static int elastic_life(int process, void *arg) {
  const sharding *c = (const sharding *)arg;
  int rank = elastic_as(c, process);
  cddp_group_desc d;
  cddp_group *g;
  bool joins = process >= c->ranks;
  memset(&d, 0, sizeof d);
  ranks_environment(rank, c->ranks, atoi(getenv("MASTER_PORT")));
  place(rank);
  d.device = "cuda";
  d.backend = c->backend;
  d.timeout_s = RANKS_WITHIN(20);
  if (joins) {
    setenv("CDDP_JOIN", "1", 1);
    ranks_sleep(0.03 + 0.01 * (double)(c->shards % 4)); /* a dead one cannot be replaced before */
  }
  elastic_rank = process;
  __atomic_store_n(&elastic_now, c, __ATOMIC_RELEASE);
  if (!made(cddp_init(&g, &d))) return 0;
  c->hashes[process] = hash_shards(c, g, c->shards);
  __atomic_store_n(&elastic_now, NULL, __ATOMIC_RELEASE);
  cddp_destroy(g);
  return 0;
}

static int elastic_joined; /* processes that joined, in all checks */

/* Those that live have the weights of an undisturbed run. */
static void check_elastic(sharding *c, uint64_t want, int n, const char *hosts) {
  int status[8], i;
  bool victim;
  c->elastic = true;
  c->ranks = n;
  memset(c->hashes, 0, 8 * sizeof *c->hashes);
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  ranks_script(elastic_life, c, n + c->joins, RANKS_WITHIN(60), status);
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  for (i = 0; i < n + c->joins; i++) {
    test_count();
    victim = c->victims[i] != 0;
    if (victim && WIFSIGNALED(status[i]) && status[i] != -1) continue;
    if (i >= n && status[i] == 0 && c->hashes[i] == 0) continue; /* it was not let in */
    elastic_joined += i >= n;
    if (status[i] != 0 || (victim && !c->random) || (want != 0 && c->hashes[i] != want))
      test_fail(__FILE__, __LINE__, "%d shards, %d ranks on %s: rank %d%s ended with %x%s",
                c->shards, n, c->backend != NULL ? c->backend : "nccl", elastic_as(c, i),
                i >= n ? " (joined)" : "", (unsigned)status[i],
                victim ? ", and should have died" : " or has other bits");
  }
}

static const char *const elastic_points[] = {"ready",
                                             "elastic shard end",
                                             "elastic met",
                                             "elastic exchanged",
                                             "elastic reduced",
                                             "elastic update",
                                             "elastic updated",
                                             "elastic rows",
                                             "elastic rows gathered",
                                             "elastic grouped",
                                             "elastic passed",
                                             "elastic table"};
#define ELASTIC_POINTS (sizeof elastic_points / sizeof *elastic_points)

static void test_elastic(void) {
  sharding want, c;
  int i, n;
  memset(&want, 0, sizeof want);
  memset(&c, 0, sizeof c);
  want.hashes = (uint64_t *)ranks_shared((MOST_SHARDS + 1) * sizeof *want.hashes);
  c.hashes = (uint64_t *)ranks_shared(8 * sizeof *c.hashes);
  want.cpu = want.sparse = c.sparse = true;
  CHECK_OK(ranks_run(train_shards, &want, 1, false));
  for (n = 1; n <= 3; n++) {
    c.shards = MOST_SHARDS - n;
    check_elastic(&c, want.hashes[c.shards], n, NULL);
  }
  for (i = 0; i < 10; i++) {
    memset(c.victims, 0, sizeof c.victims);
    n = i == 9 ? 3 : 2 + i % 3;
    c.shards = MOST_SHARDS - i % 2;
    c.backend = i % 4 == 3 ? "cpu" : NULL;
    c.victims[i % n] = 1;
    c.steps[i % n] = 1;
    c.points[i % n] = elastic_points[i];
    if (i == 9) { /* another one, while they meet again */
      c.victims[2] = c.steps[2] = 1;
      c.points[2] = "ready";
    }
    check_elastic(&c, want.hashes[c.shards], n, i % 4 == 2 ? "aabb" : NULL);
  }
  munmap(c.hashes, 8 * sizeof *c.hashes);
  munmap(want.hashes, (MOST_SHARDS + 1) * sizeof *want.hashes);
}

/* Random ranks die, and processes join; with norms and masters what one rank alone comes to is what
   all must have. */
static void test_elastic_joins(void) {
  int i, k, seeds = getenv("SEEDS") != NULL ? atoi(getenv("SEEDS")) : 4;
  uint64_t alone;
  sharding c;
  memset(&c, 0, sizeof c);
  c.hashes = (uint64_t *)ranks_shared(8 * sizeof *c.hashes);
  c.random = true;
  /* A job can end before a process joins: then further seeds follow. */
  for (i = 0; i < seeds || (elastic_joined == 0 && i < 8 * seeds); i++) {
    uint64_t seed = (uint64_t)(i + (RANKS_TSAN ? 8 : RANKS_SLOW ? 4 : 0));
#define ELASTIC_DRAW(what, below) ((int)(ranks_mix(seed, what, 51) % (uint64_t)(below)))
    int n = 1 + ELASTIC_DRAW(1, 4);
    c.shards = n + ELASTIC_DRAW(2, MOST_SHARDS + 1 - n);
    c.backend = ELASTIC_DRAW(3, 4) == 0 ? "cpu" : NULL;
    c.norm = ELASTIC_DRAW(8, 2) ? 2 : 0;
    c.masters = ELASTIC_DRAW(9, 2);
    c.sparse = ELASTIC_DRAW(12, 2);
    c.length = ELASTIC_DRAW(10, 3) ? 60 : SHARD_STEPS;
    c.joins = 0;
    memset(c.victims, 0, sizeof c.victims);
    check_elastic(&c, 0, 1, NULL);
    alone = c.hashes[0];
    c.joins = ELASTIC_DRAW(11, 4);
    for (k = 0; k < n + c.joins; k++) { /* one lives */
      c.victims[k] = k != n - 1 && ranks_mix(seed, 4, (uint64_t)k) % 2 == 0;
      c.steps[k] = (int)(ranks_mix(seed, 5, (uint64_t)k) % SHARD_STEPS);
      c.points[k] = elastic_points[ranks_mix(seed, 6, (uint64_t)k) % ELASTIC_POINTS];
    }
    check_elastic(&c, alone, n, ELASTIC_DRAW(7, 3) == 0 ? "abab" : NULL);
#undef ELASTIC_DRAW
  }
  fprintf(stderr, "  %d seeds: %d processes joined\n", i, elastic_joined);
  CHECK(elastic_joined > 0);
  munmap(c.hashes, 8 * sizeof *c.hashes);
}

/* Rank 1 dies with a mean that rank 2, which hears of it then, does not have yet: until the end of
   its step rank 2 has the group with rank 1, whose calls fail. */
static cddp_ddp *cut_model;
static void cut_point(const char *name) {
  double until = test_now() + RANKS_WITHIN(5);
  if (elastic_step != 1) return;
  if (elastic_rank == 1 && strcmp(name, "elastic reduced") == 0) raise(SIGKILL);
  if (elastic_rank != 2 || strcmp(name, "elastic piece") != 0) return;
  while (inside_check_group(cddp_ddp_group(cut_model)) == CDDP_OK && test_now() < until)
    ranks_sleep(0.001);
}

/* cut_model, with one parameter, and its optimizer. */
static cddp_optim *make_cut_model(cddp_group *g, cddp_param *p) {
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_optim *s = NULL;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  desc.elastic = true;
  model_of(g, p, 1, 100);
  elastic_rank = cddp_rank(g);
  CHECK_OK(cddp_ddp_create(&cut_model, g, p, 1, &desc));
  CHECK_OK(cddp_sgd_create(&s, p, 1, &rule));
  return s;
}

/* A handle whose group a loss has replaced, and whose memory is gone: rank 0 had allocated it. */
static int late_handle(cddp_group *g, scenario *o, outcome *f) {
  cddp_optim *s;
  cddp_param p;
  cddp_work *work = NULL;
  void *x;
  int shard;
  bool done = false;
  (void)o;
  s = make_cut_model(g, &p);
  x = cddp_alloc(g, 400);
  for (elastic_step = 0; elastic_step < 5; elastic_step++) {
    if (elastic_step == 1) {
      CHECK_OK(cddp_all_reduce(cddp_ddp_group(cut_model), x, 100, CDDP_F32, CDDP_SUM, &work));
      ranks_sleep(0.1);
      if (elastic_rank == 0) raise(SIGKILL);
    }
    if (elastic_step >= 2) {
      CHECK_OK(cddp_test(work, &done));
      CHECK(done);
    }
    while (cddp_ddp_next_shard(cut_model, &shard)) CHECK_OK(cddp_ddp_ready(cut_model, 0));
    CHECK_OK(cddp_ddp_step(cut_model, s));
  }
  f->result = cddp_wait(work);
  keep_error(f);
  cddp_free(g, x);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(cut_model);
  return test_failures != 0;
}

static void test_late_handle(void) {
  scenario *o = scenario_new(NULL);
  int i;
  memset(o, 0, sizeof *o);
  o->fn = late_handle;
  run_scenario(o, 3);
  for (i = 1; i < 3; i++) {
    CHECK(o->outcomes[i].result == CDDP_PEER_LOST || o->outcomes[i].result == CDDP_OK);
    if (o->outcomes[i].result != CDDP_OK)
      check_outcome(o, i, CDDP_PEER_LOST, "has been replaced");
  }
}

static int group_of_lost(cddp_group *g, scenario *o, outcome *f) {
  struct cudaPointerAttributes about;
  cddp_group *now;
  cddp_optim *s;
  cddp_param p;
  int shard, i;
  (void)o;
  s = make_cut_model(g, &p);
  inside_at_point = cut_point;
  for (elastic_step = 0; elastic_step < 3; elastic_step++) {
    cddp_work *work = NULL;
    cddp_result r = CDDP_OK;
    void *x;
    while (cddp_ddp_next_shard(cut_model, &shard)) CHECK_OK(cddp_ddp_ready(cut_model, 0));
    now = cddp_ddp_group(cut_model);
    x = cddp_alloc(now, 400);
    CHECK(cudaPointerGetAttributes(&about, x) == cudaSuccess);
    CHECK_EQ((int)about.type, (int)cudaMemoryTypeDevice);
    for (i = 0; i < 2 && r == CDDP_OK; i++) {
      r = cddp_all_reduce(now, x, 100, CDDP_F32, CDDP_SUM, i == 0 ? &work : NULL);
      if (work != NULL) r = cddp_wait(work);
      work = NULL;
    }
    if (r == CDDP_OK) r = cddp_synchronize(now);
    if (r == CDDP_OK) r = cddp_barrier(now);
    if (elastic_step == 1) f->result = r;
    else CHECK_OK(r);
    keep_error(f);
    cddp_free(now, x);
    CHECK_OK(cddp_ddp_step(cut_model, s));
  }
  inside_at_point = at_point;
  cddp_optim_destroy(s);
  cddp_ddp_destroy(cut_model);
  return test_failures != 0;
}

static void test_lost_in_step(void) {
  scenario *o = scenario_new(NULL);
  int i, k;
  for (k = 0; k < 3; k++) {
    memset(o, 0, sizeof *o);
    o->fn = group_of_lost;
    o->backend = k == 1 ? "cpu" : NULL;
    if (k < 2) run_scenario(o, 3);
    else run_scenario_on(o, "aab");
    for (i = 0; i < 3; i += 2) check_outcome(o, i, CDDP_PEER_LOST, "");
  }
}

/* The group of an elastic model follows the stream that the program gives to the model's group. */
static int follows_stream(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), shard, step;
  cudaStream_t stream[2];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  desc.elastic = true;
  model_of(g, &p, 1, 100);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
  for (step = 0; step < 2; step++) {
    CHECK(cudaStreamCreateWithFlags(&stream[step], cudaStreamNonBlocking) == cudaSuccess);
    cddp_set_stream(g, stream[step]);
    CHECK(cddp_stream(cddp_ddp_group(d)) == (void *)stream[step]);
    check_sum(cddp_ddp_group(d), n * (n + 1) / 2);
    while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, s));
  }
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  for (step = 0; step < 2; step++) cudaStreamDestroy(stream[step]);
  return 0;
}

static void test_follows_stream(void) {
  CHECK_OK(run(follows_stream, NULL, 2, NULL));
  CHECK_OK(run(follows_stream, NULL, 2, "cpu"));
}

/* A plain model beside an elastic one. Rank 1 dies in a step of the plain one: rank 0 is told, and
   gets no norm of a sum that never ended. */
static int plain_beside(cddp_group *g, scenario *o, outcome *f) {
  double norm = -1;
  cddp_ddp_desc desc;
  cddp_ddp *elastic = NULL, *plain = NULL;
  cddp_param p, q;
  cudaStream_t stream;
  int step;
  memset(&desc, 0, sizeof desc);
  desc.elastic = true;
  model_of(g, &p, 1, 100);
  model_of(g, &q, 1, 100);
  CHECK_OK(cddp_ddp_create(&elastic, g, &p, 1, &desc));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  CHECK_OK(cddp_ddp_create(&plain, g, &q, 1, NULL));
  for (step = 0; step < 3 && f->result == CDDP_OK; step++) {
    fill_on(stream, (float *)q.grad, 100, (float)cddp_rank(g) + 1, false);
    if (step == 2 && cddp_rank(g) == o->victim) raise(SIGKILL);
    f->result = cddp_ddp_ready(plain, 0);
    if (f->result == CDDP_OK) f->result = cddp_ddp_wait(plain);
    if (f->result == CDDP_OK) f->result = cddp_ddp_clip_grad_norm(plain, 1e9, &norm);
    if (f->result == CDDP_OK) CHECK(norm == 15); /* of 100 means of 1 and 2 */
  }
  keep_error(f);
  cddp_ddp_destroy(plain);
  cddp_ddp_destroy(elastic);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(stream);
  return test_failures != 0;
}

static void test_plain_beside(void) {
  scenario *o = scenario_new(plain_beside);
  o->victim = 1;
  run_scenario(o, 2);
  check_outcome(o, 0, CDDP_PEER_LOST, "rank 1 (pid ");
}

/* cddp_load in a process with an elastic model. Rank 0 dies in a broadcast: rank 1 is told, or has
   all that is in the file. */
static int loads_beside(cddp_group *g, scenario *o, outcome *f) {
  static const char *const names[] = {"a", "b", "c"};
  const char *tmp = getenv("TMPDIR");
  float sevens[100], got[100];
  cddp_param p, q[3];
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  char path[300];
  int i;
  (void)o;
  snprintf(path, sizeof path, "%.250s/cddp-nccl-%d", tmp ? tmp : "/tmp", (int)getppid());
  memset(&desc, 0, sizeof desc);
  desc.elastic = true;
  for (i = 0; i < 100; i++) sevens[i] = 7;
  model_of(g, &p, 1, 100);
  model_of(g, q, 3, 100);
  f->result = cddp_ddp_create(&d, g, &p, 1, &desc);
  for (i = 0; i < 3; i++) {
    q[i].name = names[i];
    CHECK(cudaMemcpy(q[i].data, sevens, 400, cudaMemcpyHostToDevice) == cudaSuccess);
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  if (f->result == CDDP_OK) f->result = cddp_save(g, path, q, 3, NULL);
  for (i = 0; i < 3; i++) CHECK(cudaMemset(q[i].data, 0, 400) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  if (f->result == CDDP_OK) f->result = cddp_load(g, path, q, 3, NULL);
  keep_error(f);
  for (i = 0; i < 3 && f->result == CDDP_OK; i++) {
    CHECK(cudaMemcpy(got, q[i].data, 400, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(memcmp(got, sevens, 400) == 0);
  }
  unlink(path);
  cddp_ddp_destroy(d);
  return test_failures != 0;
}

static void test_loads_beside(void) {
  scenario *o = scenario_new(NULL);
  char value[32];
  int n, lost = 0; /* in cddp_load */
  if (!on_double("NCCL does not die on demand")) return;
  for (n = 17; n <= 21; n++) {
    memset(o, 0, sizeof *o);
    o->fn = loads_beside;
    o->environment = "HOSTNCCL_FAIL";
    o->value = value;
    snprintf(value, sizeof value, "die:%d@0", n);
    run_scenario(o, 2);
    lost += o->outcomes[1].result == CDDP_PEER_LOST &&
            strstr(o->outcomes[1].text, "cddp_load") != NULL;
  }
  CHECK(lost > 0);
}

/* A job on CPUs that a process joins: a group of both gets GPUs. */
static int joined_devices(int rank, void *arg) {
  int n = 0, shard;
  double until = test_now() + RANKS_WITHIN(10);
  cddp_group *g = NULL, *both = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_sgd_desc rule;
  cddp_ddp_desc desc;
  cddp_param p;
  float w[100] = {0};
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  memset(&p, 0, sizeof p);
  ranks_setenv("WORLD_SIZE", 1);
  place(rank);
  if (rank > 0) ranks_setenv("CDDP_JOIN", 1);
  desc.elastic = true;
  desc.shards = 2;
  p.data = w;
  p.count = 100;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
  while (n < 2 && test_now() < until && test_failures == 0) {
    ranks_sleep(0.002);
    while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, s));
    n = cddp_world_size(cddp_ddp_group(d));
  }
  CHECK_EQ(n, 2);
  CHECK_OK(cddp_group_split(cddp_ddp_group(d), 0, rank, &both));
  CHECK_OK(cddp_set_device(both, "cuda", (const char *)arg));
  check_sum(both, 3);
  CHECK_OK(cddp_barrier(both));
  cddp_destroy(both);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return 0;
}

static void test_joined_devices(void) {
  static char cpu[] = "cpu";
  int k, status[2];
  for (k = 0; k < 2; k++) {
    ranks_script(joined_devices, k == 0 ? NULL : cpu, 2, RANKS_WITHIN(20), status);
    CHECK(ranks_exited_well(status, 2));
  }
}

/* What shards need, and what a step with them needs. arg: the backend; NULL: NCCL. */
static int shards_refused(cddp_group *g, void *arg) {
  const cddp_kernels *kernels = inside_kernels();
  int rank = cddp_rank(g), shard = -1;
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  model_of(g, p, 2, 64);
  desc.shards = cddp_world_size(g) + 1;
  if (rank == 0) cddp_register_kernels(NULL); /* one rank has none */
  CHECK_IS(cddp_ddp_create(&d, g, p, 2, &desc), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "include cddp_kernels.cuh") != NULL);
  cddp_register_kernels(kernels);
  desc.shards--;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  CHECK(cddp_ddp_next_shard(d, &shard));
  CHECK_EQ(shard, rank);
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK(!cddp_ddp_next_shard(d, &shard));
  CHECK_OK(cddp_ddp_step(d, s));
  CHECK_OK(cddp_barrier(g)); /* with NCCL ranks do not wait for each other in a step */
  CHECK_IS(cddp_ddp_step(d, s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "shards of this step") != NULL);
  check_misused(g, arg == NULL);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_shards(void) {
  static char cpu[] = "cpu";
  sharding want;
  int n, count;
  memset(&want, 0, sizeof want);
  want.hashes = (uint64_t *)ranks_shared((MOST_SHARDS + 1) * sizeof *want.hashes);
  for (n = 0; n < 3; n++) {
    want.sparse = n == 1;
    want.repeats = n == 2;
    want.cpu = true;
    CHECK_OK(ranks_run(train_shards, &want, 1, false));
    for (count = 2; count <= MOST_SHARDS; count++)
      CHECK(want.hashes[count] != want.hashes[count - 1]);
    if (n == 2) check_shards(&want, 2, NULL, NULL);
    if (n == 2) break;
    check_shards(&want, 2, NULL, "cpu");
    if (n == 0 || !RANKS_SLOW) check_shards(&want, 3, NULL, NULL);
    if (n == 1) check_shards(&want, 3, "aba", NULL);
    if (n == 1) continue;
    check_shards(&want, 1, NULL, NULL);
    check_shards(&want, 2, NULL, NULL);
    check_shards(&want, 4, NULL, NULL);
    check_shards(&want, 1, NULL, "cpu");
    check_shards(&want, 3, NULL, "cpu");
  }
  CHECK_OK(run(shards_refused, NULL, 2, NULL));
  CHECK_OK(run(shards_refused, cpu, 2, cpu));
}

int main(void) {
  inside_at_point = at_point;
  RUN(test_shards);
  RUN(test_elastic);
  RUN(test_lost_in_step);
  RUN(test_late_handle);
  RUN(test_follows_stream);
  RUN(test_plain_beside);
  RUN(test_loads_beside);
  RUN(test_joined_devices);
  RUN(test_elastic_joins);
  return TEST_END();
}
