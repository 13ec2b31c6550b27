/* CUDA graphs: a captured training step, launched again and again, does what the same calls would
   have done.

   test_graph trains with the launches of one graph and compares with the CPU's weights. The other
   tests show what becomes of a graph when things go wrong: a rank that does not launch it, a rank
   that dies or leaves, a model destroyed before its graph, a capture that begins too early or on a
   stream that the group does not know. The double (tests/gpu/hostcuda) replays a graph's nodes in
   any order that the edges allow. */
#include "nccl_train.h"

#include <pthread.h>

static int captured_adamw(cddp_group *g, void *arg) {
  plan p;
  cddp_param params[PARAMS];
  cddp_adamw_desc a;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  int step;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&a, 0, sizeof a);
  a.lr = 0.1;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  plan_params(&p, params, 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, params, PARAMS, NULL));
  CHECK_OK(cddp_adamw_create(&s, params, PARAMS, &a));
  for (step = 0; step < 2; step++) plan_step(&p, d, s, params, g, step);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  plan_backward(&p, d, params, g, 2);
  CHECK_IS(cddp_ddp_step(d, s), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "AdamW") != NULL);
  (void)cudaStreamEndCapture(stream, &graph);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_captured_adamw(void) { CHECK_OK(run(captured_adamw, NULL, 1, NULL)); }

/* Half precision with masters, which cddp_optim_write_copies begins anew: before the capture (in
   step 2), and before step 10. Returns a hash of the weights. */
static uint64_t train_halves(cddp_group *g, bool graphs) {
  enum { COUNT = 400, STEPS = 20 };
  uint16_t w[COUNT], first[COUNT];
  cudaStream_t stream = NULL;
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cddp_sgd_desc rule;
  cddp_param p;
  int step, i;
  memset(&rule, 0, sizeof rule);
  memset(&p, 0, sizeof p);
  for (i = 0; i < COUNT; i++) first[i] = ranks_to_f16(1 + (float)i / 300);
  p.data = on_device(first, sizeof first);
  p.count = COUNT;
  p.dtype = CDDP_F16;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  rule.lr = 0.003;
  rule.ddp = d;
  rule.master_weights = true;
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
  for (step = 0; step < STEPS; step++) {
    if (step == 2 || step == 10) {
      CHECK_OK(cddp_synchronize(g));
      CHECK(cudaMemcpy(p.data, first, sizeof first, cudaMemcpyHostToDevice) == cudaSuccess);
      CHECK(cudaDeviceSynchronize() == cudaSuccess);
      CHECK_OK(cddp_optim_write_copies(o));
    }
    if (graphs && step == 2)
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (exec == NULL) {
      backward_on(stream, &p, 5);
      CHECK_OK(cddp_ddp_ready(d, 0));
      CHECK_OK(cddp_ddp_step(d, o));
    }
    if (graphs && step == 2) {
      CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
      CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    }
    if (exec != NULL) CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
  }
  to_host(g, w, p.data, sizeof w);
  if (exec != NULL) cudaGraphExecDestroy(exec);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cudaFree(p.data);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(stream);
  return ranks_hash(RANKS_HASH, w, sizeof w);
}

static int same_halves(cddp_group *g, void *arg) {
  (void)arg;
  CHECK(train_halves(g, true) == train_halves(g, false));
  return 0;
}

static void test_halves(void) {
  CHECK_OK(run(same_halves, NULL, 1, NULL));
  CHECK_OK(run(same_halves, NULL, 2, NULL));
}

static void test_graph(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 6;
  p.cap_mb = 0.02;
  p.graph = true;
  check_plan(&p, 1, NULL);
  check_plan(&p, 2, NULL);
  check_plan(&p, 4, NULL);
  p.clip = 0.5;
  check_plan(&p, 2, NULL);
  p.steps_a_mode = 8; /* cddp_ddp_wait, then the clip by itself */
  check_plan(&p, 2, NULL);
}

/* A step that cannot be captured, as it waits on the host: it is refused before it begins, by a
   capture of the whole step or (late) from cddp_ddp_step on, and then made without a capture. */
enum { REFUSED_ELASTIC, REFUSED_SPARSE, REFUSED_UNEVEN, REFUSED_STAGED, REFUSED_STAGED_SHARDS };
typedef struct refused {
  int kind;
  bool late;
} refused;

static void refused_gradients(cddp_group *g, const refused *o, cddp_ddp *d, const cddp_param *p,
                              cddp_result want) {
  bool shards = o->kind == REFUSED_ELASTIC || o->kind == REFUSED_STAGED_SHARDS;
  int shard = cddp_rank(g), times = 0;
  for (; shards ? cddp_ddp_next_shard(d, &shard) : times == 0; times++) {
    fill_on((cudaStream_t)cddp_stream(g), (float *)p[0].grad, 64, (float)shard + 1, false);
    CHECK_IS(cddp_ddp_ready(d, 1), want);
    CHECK_IS(cddp_ddp_ready(d, 0), want);
  }
  CHECK_EQ(times, !shards || want == CDDP_OK);
}

static int refused_capture(cddp_group *g, void *arg) {
  const refused *o = (const refused *)arg;
  size_t rows[] = {0, 8};
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *optim = NULL;
  cddp_param p[2];
  int step;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  model_of(g, p, 2, 64);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cddp_set_stream(g, s);
  desc.elastic = o->kind == REFUSED_ELASTIC;
  desc.uneven_inputs = o->kind == REFUSED_UNEVEN;
  desc.sparse_rows = o->kind == REFUSED_SPARSE ? rows : NULL;
  desc.shards = o->kind == REFUSED_STAGED_SHARDS ? cddp_world_size(g) : 0;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  rule.lr = 1;
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&optim, p, 2, &rule));
  for (step = 0; step < 4; step++) {
    bool captures = step == 2;
    if (!captures || o->late) refused_gradients(g, o, d, p, CDDP_OK);
    if (captures) {
      CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
      if (!o->late) refused_gradients(g, o, d, p, CDDP_UNSUPPORTED);
      CHECK_IS(cddp_ddp_step(d, optim), CDDP_UNSUPPORTED);
      CHECK(strstr(cddp_error(), "cannot be captured") != NULL);
      if (o->kind == REFUSED_UNEVEN && !o->late)
        CHECK_IS(cddp_ddp_join(d, optim), CDDP_UNSUPPORTED);
      CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
      if (graph != NULL) cudaGraphDestroy(graph);
      if (!o->late) refused_gradients(g, o, d, p, CDDP_OK);
    }
    CHECK_OK(cddp_ddp_step(d, optim));
  }
  check_fill(g, (float *)p[0].data, 64, -1.5 * step);
  if (o->kind == REFUSED_STAGED) {
    refused_gradients(g, o, d, p, CDDP_OK);
    CHECK_OK(cddp_ddp_reduce_scatter(d));
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_IS(cddp_ddp_all_gather(d), CDDP_UNSUPPORTED);
    CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    if (graph != NULL) cudaGraphDestroy(graph);
    CHECK_OK(cddp_ddp_all_gather(d));
  }
  cddp_optim_destroy(optim);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

static void test_refused_captures(void) {
  refused o;
  for (o.kind = 0; o.kind <= REFUSED_STAGED_SHARDS; o.kind++)
    for (o.late = false;; o.late = true) {
      CHECK_OK(run(refused_capture, &o, 2, o.kind >= REFUSED_STAGED ? "cpu" : NULL));
      if (o.late) break;
    }
}

/* A graph that rank 1 does not launch: no event tells of its operations, the deadline does. */
static int lone_graph(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  (void)o;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  if (cddp_rank(g) == 0)
    inside_set_timeout(g, RANKS_WITHIN(0.05)); /* before the barrier of rank 1 */
  if (cddp_rank(g) == 0) CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
  f->result = cddp_rank(g) == 0 ? cddp_synchronize(g) : cddp_barrier(g);
  (void)cudaStreamSynchronize(s); /* the watcher has ended it */
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

/* A graph that has been launched on all ranks; then rank 0 leaves, or dies. Rank 1 may go on only
   if it left: nobody knows whether the graph, which waits for rank 0, is to be launched again. */
static int graph_over(cddp_group *g, scenario *o, outcome *f) {
  enum { LEAVES, DIES };
  float *x = (float *)cddp_alloc(g, 4000);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  double until;
  inside_await_end_s = 0.1;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
  CHECK_OK(cddp_all_reduce(g, x, 20, CDDP_F32, CDDP_SUM, NULL));
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
  CHECK_OK(cddp_synchronize(g));
  cudaGraphDestroy(graph);
  if (cddp_rank(g) == 0) {
    cudaGraphExecDestroy(exec);
    exec = NULL;
  }
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 0 && o->victim != LEAVES) raise(SIGKILL);
  if (cddp_rank(g) != 0) {
    while (!inside_rank_gone(g, 0)) ranks_sleep(0.001);
    for (until = test_now() + 2.5 * inside_await_end_s; test_now() < until; ranks_sleep(0.01)) {}
    f->result = cddp_synchronize(g);
    keep_error(f);
  }
  if (exec != NULL) cudaGraphExecDestroy(exec);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

/* A blocking stream is captured while the group has the default one: an error, and no more. */
static int capture_elsewhere(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  cddp_ddp *d = NULL;
  cddp_param p;
  (void)o;
  model_of(g, &p, 1, 100);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  CHECK(cudaStreamCreate(&s) == cudaSuccess);
  (void)cddp_barrier(g);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_IS(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_set_stream") != NULL);
  CHECK_IS(cddp_ddp_ready(d, 0), CDDP_INVALID_ARGUMENT);
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess); /* not void */
  cudaGraphDestroy(graph);
  CHECK_OK(cddp_ddp_ready(d, 0)); /* the refused call has marked nothing */
  CHECK_OK(cddp_ddp_wait(d));
  f->result = work_on(g, x, 10);
  cddp_ddp_destroy(d);
  cudaStreamDestroy(s);
  return 0;
}

/* A model's first step is captured. */
static int capture_too_early(cddp_group *g, scenario *o, outcome *f) {
  cddp_sgd_desc rule;
  cudaGraph_t graph = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cudaStream_t stream;
  cddp_param p;
  (void)o;
  memset(&p, 0, sizeof p);
  memset(&rule, 0, sizeof rule);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  p.data = cddp_alloc(g, 40000);
  p.count = 10000;
  rule.momentum = 0.9;
  rule.stream = stream;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
  (void)cddp_barrier(g);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  f->result = cddp_ddp_ready(d, 0); /* or the other rank was first with the failure */
  if (f->result == CDDP_OK) f->result = cddp_ddp_step(d, s);
  keep_error(f);
  (void)cudaStreamEndCapture(stream, &graph);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(stream);
  return 0;
}

/* With find_unused_parameters a captured step needs all gradients, the eager ones before did not.
   Launches of its graph are not counted as steps. way: the gradient is there in the capture. */
static int capture_unused(cddp_group *g, scenario *o, outcome *f) {
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t stream;
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  int step;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  model_of(g, p, 2, 64);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  desc.find_unused_parameters = true;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  rule.lr = 1;
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  for (step = 0; step < 3; step++) {
    (void)cddp_barrier(g);
    if (step == 2)
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    fill_on(stream, (float *)p[0].grad, 64, (float)cddp_rank(g) + 1, false);
    if (step == 2 && o->way) f->result = cddp_ddp_ready(d, 1);
    if (f->result == CDDP_OK) f->result = cddp_ddp_ready(d, 0);
    if (f->result == CDDP_OK) f->result = cddp_ddp_step(d, s);
    keep_error(f);
  }
  (void)cudaStreamEndCapture(stream, &graph);
  if (f->result == CDDP_OK) {
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (; step < 6; step++) CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    check_fill(g, (float *)p[0].data, 64, -1.5 * 5);
    CHECK_EQ(cddp_ddp_steps(d), 3);
    cudaGraphExecDestroy(exec);
  }
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(stream);
  return test_failures != 0;
}

/* A model whose step has been captured after two eager ones. */
typedef struct captured {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cddp_param p;
  cddp_ddp *d;
  cddp_optim *s;
} captured;

static void captured_open(captured *c, cddp_group *g) {
  cddp_sgd_desc rule;
  int step;
  memset(c, 0, sizeof *c);
  memset(&rule, 0, sizeof rule);
  CHECK(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, c->stream);
  c->p.data = cddp_alloc(g, 40000);
  c->p.count = 10000;
  rule.momentum = 0.9;
  rule.lr = 0.1;
  CHECK_OK(cddp_ddp_create(&c->d, g, &c->p, 1, NULL));
  rule.ddp = c->d;
  CHECK_OK(cddp_sgd_create(&c->s, &c->p, 1, &rule));
  for (step = 0; step < 3; step++) {
    if (step == 2)
      CHECK(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_OK(cddp_ddp_ready(c->d, 0));
    CHECK_OK(cddp_ddp_step(c->d, c->s));
  }
  CHECK(cudaStreamEndCapture(c->stream, &c->graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&c->exec, c->graph, 0) == cudaSuccess);
}

static void captured_drop_graph(captured *c) {
  if (c->exec != NULL) cudaGraphExecDestroy(c->exec);
  if (c->graph != NULL) cudaGraphDestroy(c->graph);
  c->exec = NULL;
  c->graph = NULL;
}

/* What may become of a captured step: the model is destroyed before the graph; rank 1 does not
   launch it, or dies instead; an eager wait comes between. */
static int step_graph(cddp_group *g, scenario *o, outcome *f) {
  enum { MODEL_FIRST, ONE_LAUNCHES, DIES, WAITS };
  bool launches;
  captured c;
  inside_await_end_s = o->victim == DIES ? 30 : 0.2; /* no rank waits that long for a graph */
  captured_open(&c, g);
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1 && o->victim == DIES) {
    o->began = test_now();
    raise(SIGKILL);
  }
  launches = cddp_rank(g) == 0 || o->victim != ONE_LAUNCHES;
  if (cddp_rank(g) == 0 && o->victim == ONE_LAUNCHES) inside_set_timeout(g, RANKS_WITHIN(0.05));
  if (launches) CHECK(cudaGraphLaunch(c.exec, c.stream) == cudaSuccess);
  f->result = launches ? cddp_synchronize(g) : cddp_barrier(g);
  if (o->victim == WAITS) {
    CHECK_OK(f->result);
    CHECK_OK(cddp_ddp_ready(c.d, 0)); /* nothing of the graph's moves */
    CHECK_OK(cddp_ddp_wait(c.d));
    CHECK_OK(cddp_optim_step(c.s));
    CHECK(cudaGraphLaunch(c.exec, c.stream) == cudaSuccess);
    f->result = cddp_synchronize(g);
  }
  keep_error(f);
  cddp_optim_destroy(c.s);
  cddp_ddp_destroy(c.d);
  captured_drop_graph(&c);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(c.stream);
  return 0;
}

static void test_step_graphs(void) {
  static const cddp_result want[] = {CDDP_OK, CDDP_TIMEOUT, CDDP_PEER_LOST, CDDP_OK};
  scenario *o = scenario_new(NULL);
  int i, k;
  for (k = 0; k < 4; k++) {
    memset(o, 0, sizeof *o);
    o->fn = step_graph;
    o->victim = k;
    run_scenario(o, 2);
    if (k == 2) CHECK(o->outcomes[0].when - o->began < RANKS_WITHIN(2));
    for (i = 0; i < (k == 2 ? 1 : 2); i++)
      check_outcome(o, i, want[k], k == 1 ? "timed out after" : k == 2 ? "rank 1 (pid " : "");
  }
}

/* Rank 1 dies; rank 0 has one group's operation on a stream ahead of another's: neither can end
   before the other is told to. */
static int die_ahead(cddp_group *g, scenario *o, outcome *f) {
  captured c;
  float *x = (float *)cddp_alloc(g, 4000);
  captured_open(&c, g);
  captured_drop_graph(&c);
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1) {
    o->began = test_now();
    raise(SIGKILL);
  }
  f->result = cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL);
  if (f->result == CDDP_OK) f->result = cddp_ddp_ready(c.d, 0);
  if (f->result == CDDP_OK) f->result = cddp_ddp_step(c.d, c.s);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g); /* no host waits in a step */
  keep_error(f);
  cddp_optim_destroy(c.s);
  cddp_ddp_destroy(c.d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(c.stream);
  return 0;
}

static void test_graph_failures(void) {
  scenario *o = scenario_new(NULL);
  int i, k;
  memset(o, 0, sizeof *o);
  o->fn = lone_graph;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_TIMEOUT, "timed out after");
  for (i = 0; i < 2; i++) {
    memset(o, 0, sizeof *o);
    o->fn = graph_over;
    o->victim = i;
    run_scenario(o, 2);
    check_outcome(o, 1, i == 0 ? CDDP_OK : CDDP_PEER_LOST, i == 0 ? "" : "rank 0 (pid ");
  }
  memset(o, 0, sizeof *o);
  o->fn = capture_too_early;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_INVALID_ARGUMENT, "take two steps");
  for (k = 0; k < 2; k++) {
    memset(o, 0, sizeof *o);
    o->fn = capture_unused;
    o->way = k;
    run_scenario(o, 2);
    for (i = 0; i < 2; i++)
      check_outcome(o, i, k ? CDDP_OK : CDDP_INVALID_ARGUMENT, k ? "" : "needs all gradients");
  }
  memset(o, 0, sizeof *o);
  o->fn = capture_elsewhere;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_OK, "");
  memset(o, 0, sizeof *o);
  o->fn = die_ahead;
  run_scenario(o, 2);
  check_outcome(o, 0, CDDP_PEER_LOST, "rank 1 (pid ");
  CHECK(o->outcomes[0].when - o->began < RANKS_WITHIN(2));
}

/* --- calls beside a capture --- */

/* Rank 0 asks for an operation that the last rank has not begun, while a stream of the program is
   captured: by this thread in mode thread-local, or by another one in mode global. */
typedef struct asking {
  cddp_work *work;
  bool waits, done; /* waits: cddp_wait_for, else cddp_test */
  cddp_result result;
} asking;

static void *ask(void *arg) {
  asking *a = (asking *)arg;
  a->result = a->waits ? cddp_wait_for(a->work, 0.02) : cddp_test(a->work, &a->done);
  return NULL;
}

static int asks_in_capture(cddp_group *g, void *arg) {
  int how = (int)(uintptr_t)arg, last = cddp_world_size(g) - 1, i;
  bool elsewhere = how & 2;
  float *x = (float *)cddp_alloc(g, 400);
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  pthread_t thread;
  int32_t go = 1;
  asking a;
  memset(&a, 0, sizeof a);
  a.waits = how & 1;
  check_sum(g, (last + 1) * (last + 2) / 2.0);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  if (cddp_rank(g) == last) CHECK_OK(cddp_recv(g, &go, 1, CDDP_I32, 0, 5, NULL));
  CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, &a.work));
  for (i = 0; cddp_rank(g) == 0 && i < 2; i++) {
    CHECK(cudaStreamBeginCapture(s, elsewhere ? cudaStreamCaptureModeGlobal
                                              : cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (elsewhere && pthread_create(&thread, NULL, ask, &a) == 0) pthread_join(thread, NULL);
    else ask(&a);
    CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    if (graph != NULL) cudaGraphDestroy(graph);
    CHECK_IS(a.result, a.waits ? CDDP_TIMEOUT : CDDP_OK);
    CHECK(!a.done);
  }
  if (cddp_rank(g) == 0) CHECK_OK(cddp_send(g, &go, 1, CDDP_I32, last, 5, NULL));
  CHECK_OK(cddp_wait(a.work));
  CHECK_OK(cddp_synchronize(g));
  cudaStreamDestroy(s);
  return 0;
}

/* The first in-place all_to_all of a group, and a larger one: they need scratch memory. */
static int scratch_in_capture(cddp_group *g, void *arg) {
  size_t counts[] = {1, 1000, 100000};
  int n = cddp_world_size(g), me = cddp_rank(g), q, k;
  float *x = (float *)cddp_alloc(g, 4 * (size_t)n * counts[2]), *host;
  cudaStream_t s;
  (void)arg;
  check_sum(g, n * (n + 1) / 2);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK_OK(cddp_barrier(g));
  host = (float *)malloc(4 * (size_t)n * counts[2]);
  for (k = 0; k < 3; k++) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (q = 0; q < n; q++)
      fill_on(s, x + (size_t)q * counts[k], counts[k], (float)(100 * me + q), false);
    CHECK_OK(cddp_all_to_all(g, x, x, counts[k], CDDP_F32, NULL));
    CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
    to_host(g, host, x, 4 * (size_t)n * counts[k]);
    for (q = 0; q < n; q++) {
      CHECK_EQ((int)host[(size_t)q * counts[k]], 100 * q + me);
      CHECK_EQ((int)host[(size_t)(q + 1) * counts[k] - 1], 100 * q + me);
    }
    CHECK_OK(cddp_barrier(g));
    if (exec != NULL) cudaGraphExecDestroy(exec);
    if (graph != NULL) cudaGraphDestroy(graph);
  }
  free(host);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

/* Calls that wait on the host are refused while the group's stream is captured: the capture stays
   valid, the group healthy. */
static int waits_in_capture(cddp_group *g, void *arg) {
  static const char *const says[] = {"cddp_synchronize", "barrier", "the creation of a group"};
  cddp_group *half = NULL;
  int n = cddp_world_size(g), k;
  cudaGraph_t graph;
  cudaStream_t s;
  cddp_result r;
  (void)arg;
  check_sum(g, n * (n + 1) / 2);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  for (k = 0; k < 6; k++) {
    CHECK(cudaStreamBeginCapture(s, k < 3 ? cudaStreamCaptureModeThreadLocal
                                          : cudaStreamCaptureModeRelaxed) == cudaSuccess);
    r = k % 3 == 0   ? cddp_synchronize(g)
        : k % 3 == 1 ? cddp_barrier(g)
                     : cddp_group_split(g, 0, 0, &half);
    CHECK_IS(r, CDDP_INVALID_ARGUMENT);
    CHECK(strstr(cddp_error(), says[k % 3]) != NULL && half == NULL);
    graph = NULL;
    CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    if (graph != NULL) cudaGraphDestroy(graph);
    check_sum(g, n * (n + 1) / 2);
  }
  CHECK_OK(cddp_group_split(g, 0, 0, &half));
  check_sum(half, n * (n + 1) / 2);
  cddp_destroy(half);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

static void test_beside_captures(void) {
  int n;
  for (n = 0; n < 4; n++) CHECK_OK(run(asks_in_capture, (void *)(uintptr_t)n, 2 + n % 2, NULL));
  for (n = 1; n <= 3; n++) CHECK_OK(run(scratch_in_capture, NULL, n, NULL));
  for (n = 1; n <= 3; n++) CHECK_OK(run(waits_in_capture, NULL, n, NULL));
}

int main(void) {
  RUN(test_graph);
  RUN(test_halves);
  RUN(test_beside_captures);
  RUN(test_captured_adamw);
  RUN(test_refused_captures);
  RUN(test_step_graphs);
  RUN(test_graph_failures);
  return TEST_END();
}
