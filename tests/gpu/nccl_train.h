/* nccl_train.h - a made-up model for tests/gpu/nccl_*.c, and the training of it in every way that
   cddp has.

   A `plan` says how: steps, optimizer, buckets, clipping, graphs, checkpoints. `train` follows it
   on each rank and leaves the weights in plan.out. check_plan runs a plan on GPUs and on CPUs: all
   ranks must have the same weights, and those of the CPUs within rounding. The backward pass is an
   operation on the group's stream, as a program's kernels are; cddp's kernels are those of
   cddp_kernels.cuh, compiled for the host. */
#ifndef NCCL_TRAIN_H
#define NCCL_TRAIN_H

#include "nccl.h"

/* The backward pass of a made-up model: grad += f(weight, rank, step), on the stream. */
typedef struct backward {
  void *grad;
  const void *data;
  size_t count;
  cddp_dtype dtype;
  uint64_t seed;
} backward;

RANKS_DEF void backward_run(void *arg) {
  const backward *b = (const backward *)arg;
  size_t i;
  for (i = 0; b->data == NULL && i < b->count; i++) { /* many digits: sums depend on their order */
    uint64_t h = ranks_mix(b->seed, i, 9);
    double x = ((double)(h >> 11) * 0x1p-52 - 1) * (double)(1 << (h & 7));
    ranks_store(b->dtype, b->grad, i, ranks_load(b->dtype, b->grad, i) + x);
  }
  for (i = 0; b->data != NULL && i < b->count; i++) {
    double noise = (double)(int64_t)(ranks_mix(b->seed, i, 5) % 17) / 8 - 1;
    double g = 0.25 * ranks_load(b->dtype, b->data, i) + noise;
    ranks_store(b->dtype, b->grad, i, ranks_load(b->dtype, b->grad, i) + g);
  }
}

RANKS_DEF void backward_on(cudaStream_t s, const cddp_param *p, uint64_t seed) {
  backward *b = (backward *)malloc(sizeof *b);
  hostcuda_op op;
  b->grad = p->grad;
  b->data = p->data;
  b->count = p->count;
  b->dtype = p->dtype;
  b->seed = seed;
  op.run = backward_run;
  op.drop = free;
  op.arg = b;
  if (s == (cudaStream_t)-1) {
    backward_run(b);
    free(b);
  } else {
    CHECK(hostcuda_enqueue(s, op, false) == cudaSuccess);
  }
}

#define PARAMS 6
static const size_t sizes[PARAMS] = {3000, 17, 1, 0, 12000, 129};

/* How a model is trained; out: this rank's weights after it, all of them. */
typedef struct plan {
  int steps,
      steps_a_mode; /* every so many steps the other of wait and step is used; 0: step only */
  double cap_mb, clip;
  bool given_grads, unused, graph, no_momentum, buffers;
  bool adamw, amsgrad, groups; /* groups: some parameters have settings of their own */
  cddp_comm_hook hook;
  bool cpu; /* the reference: host memory, on the CPU backend */
  bool nosync;
  bool uneven;             /* each rank takes one step less than the one before it, then joins */
  bool sparse;             /* parameter 4's gradient is rows */
  cddp_dtype last;         /* of the last parameter */
  bool masters;            /* of it, if it is half precision */
  const char *load, *save; /* files; NULL: none */
  int from, save_at;       /* steps: the first after loading, that before which to save */
  bool alone;              /* load and save without the group, of one rank */
  bool parts;              /* the caller's own optimizer, each rank for its part of the weights */
  int shards;
  bool sharded; /* sharded_states */
  float *out;   /* shared, [ranks][sum of sizes] */
} plan;

RANKS_DEF size_t plan_floats(void) {
  size_t n = 0;
  int i;
  for (i = 0; i < PARAMS; i++) n += sizes[i];
  return n;
}

RANKS_DEF void *plan_memory(const plan *p, size_t bytes) {
  void *q;
  if (p->cpu) return calloc(1, bytes + 1);
  q = on_device(NULL, bytes);
  if (bytes > 0) CHECK(cudaMemset(q, 0, bytes) == cudaSuccess);
  return q;
}

RANKS_DEF void plan_release(const plan *p, void *q) {
  if (p->cpu)
    free(q);
  else
    cudaFree(q);
}

RANKS_DEF void plan_params(const plan *p, cddp_param *params, int rank) {
  static const char *const names[PARAMS] = {"a", "b", "c", "d", "e", "f"};
  size_t k;
  int i;
  for (i = 0; i < PARAMS; i++) {
    cddp_dtype t = i == PARAMS - 1 ? p->last : CDDP_F32;
    size_t bytes = sizes[i] * cddp_dtype_size(t);
    void *host = calloc(1, bytes + 1);
    for (k = 0; k < sizes[i]; k++)
      ranks_store(t, host, k,
                  rank == 0 ? (double)(ranks_mix((uint64_t)i, k, 3) % 64) / 32 - 1 : 99);
    params[i].name = names[i];
    params[i].count = sizes[i];
    params[i].dtype = t;
    params[i].data = plan_memory(p, bytes);
    params[i].grad = p->given_grads && i % 2 == 0 ? plan_memory(p, bytes) : NULL;
    if (p->cpu)
      memcpy(params[i].data, host, bytes);
    else if (bytes > 0)
      CHECK(cudaMemcpy(params[i].data, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    free(host);
  }
}

#define ROWS 100 /* of parameter 4 */

/* Some rows, more than once some of them; none on one rank. */
RANKS_DEF void plan_rows(const plan *p, cddp_ddp *d, int rank, int step) {
  size_t width = sizes[4] / ROWS, n = rank == 1 ? 0 : 7, k;
  float *values = (float *)malloc(n * width * sizeof *values + 1), *given = values;
  int64_t rows[7];
  for (k = 0; k < n; k++) {
    uint64_t row = ranks_mix((uint64_t)step, k / 2, (uint64_t)rank) % ROWS;
    rows[k] = k > 4 ? 50 + (int64_t)k : (int64_t)row;
  }
  for (k = 0; k < n * width; k++)
    values[k] = (float)(ranks_mix((uint64_t)rank, k, (uint64_t)step) % 64) / 32 - 1;
  if (!p->cpu && step % 2) {
    given = (float *)on_device(values, n * width * sizeof *values + 1);
    CHECK(cudaDeviceSynchronize() == cudaSuccess); /* cddp's streams do not wait for the copy */
  }
  CHECK_OK(cddp_ddp_add_rows(d, 4, rows, given, n));
  if (given != values) cudaFree(given);
  free(values);
}

/* One micro-batch: backward in an order that is not that of declaration. */
RANKS_DEF void plan_backward(const plan *p, cddp_ddp *d, const cddp_param *params, cddp_group *g,
                             int step) {
  static const int order[PARAMS] = {5, 3, 4, 1, 2, 0};
  cudaStream_t s = p->cpu ? (cudaStream_t)-1 : (cudaStream_t)cddp_stream(g);
  int i, k;
  for (k = 0; k < PARAMS; k++) {
    i = order[k];
    if (p->unused && (i == 1 || (i == 4 && cddp_rank(g) == 0 && step % 2 == 0))) continue;
    if (p->sparse && i == 4)
      plan_rows(p, d, cddp_rank(g), step);
    else if (params[i].count > 0)
      backward_on(s, &params[i], ranks_mix((uint64_t)i, (uint64_t)cddp_rank(g), (uint64_t)step));
    CHECK_OK(cddp_ddp_ready(d, i));
  }
}

/* SGD on this rank's partitions, with cddp's kernel. */
RANKS_DEF void plan_parts(const plan *p, cddp_ddp *d, cddp_group *g, char **momentum, bool *first) {
  const cddp_partition *part;
  int n = cddp_ddp_partitions(d, &part), i;
  cddp_sgd_desc rule;
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.05;
  rule.momentum = 0.9;
  rule.weight_decay = p->sparse ? 0 : 0.01;
  CHECK_OK(cddp_ddp_reduce_scatter(d));
  for (i = 0; i < n; i++) {
    cddp_dtype t = part[i].param == PARAMS - 1 ? p->last : CDDP_F32;
    cddp_segment s = {part[i].data, part[i].grad,
                      momentum[part[i].param] + part[i].first * cddp_dtype_size(t), part[i].count,
                      NULL};
    if (!cddp_ddp_used(d, part[i].param)) continue;
    CHECK(inside_kernels()->sgd(&s, 1, t, &rule, 1, NULL, first[part[i].param] ? CDDP_SGD_FIRST : 0,
                                cddp_stream(g)) == 0);
  }
  for (i = 0; i < PARAMS; i++)
    if (cddp_ddp_used(d, i)) first[i] = false;
  CHECK_OK(cddp_ddp_all_gather(d));
}

/* All ranks' parts of the states: then all have the same. */
RANKS_DEF void check_states(cddp_ddp *d, cddp_group *g, const cddp_param *params, char **momentum) {
  cddp_param states[PARAMS];
  float low[12000], high[12000];
  size_t k, none = 0;
  int i;
  for (i = 0; i < PARAMS; i++) {
    states[i] = params[i];
    states[i].data = i == 1 ? NULL : momentum[i];
  }
  CHECK_OK(cddp_ddp_gather_states(d, states));
  for (i = 0; i < PARAMS; i++) {
    if (i == 1 || params[i].dtype != CDDP_F32) continue;
    if (sizes[i] > 0) to_host(g, low, momentum[i], sizes[i] * sizeof *low);
    memcpy(high, low, sizes[i] * sizeof *low);
    CHECK_OK(cddp_all_reduce(g, low, sizes[i], CDDP_F32, CDDP_MIN, NULL));
    CHECK_OK(cddp_all_reduce(g, high, sizes[i], CDDP_F32, CDDP_MAX, NULL));
    CHECK(memcmp(low, high, sizes[i] * sizeof *low) == 0);
    for (k = 0; k < sizes[i]; k++) none += low[k] == 0;
  }
  CHECK(none < 100);
}

RANKS_DEF void plan_own(const plan *p, cddp_ddp *d, cddp_optim *o, cddp_param *params,
                        cddp_group *g) {
  bool first[PARAMS] = {true, true, true, true, true, true};
  cudaStream_t stream = (cudaStream_t)cddp_stream(g);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  char *momentum[PARAMS];
  int i, step, shard;
  for (i = 0; i < PARAMS; i++)
    momentum[i] = (char *)plan_memory(p, sizes[i] * cddp_dtype_size(params[i].dtype));
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_IS(cddp_ddp_all_gather(d), CDDP_INVALID_ARGUMENT);
  for (step = 0; step < p->steps; step++) {
    if (p->graph && step == 2)
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (p->shards == 0) plan_backward(p, d, params, g, p->graph ? 7 : step);
    while (p->shards > 0 && cddp_ddp_next_shard(d, &shard))
      plan_backward(p, d, params, g, 100 * step + shard);
    plan_parts(p, d, g, momentum, first);
    if (!p->graph || step != 2) continue;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(graph != NULL && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (; exec != NULL && step < p->steps; step++)
      CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    CHECK_OK(cddp_synchronize(g));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  CHECK_OK(cddp_optim_write_copies(o));
  check_states(d, g, params, momentum);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  for (i = 0; i < PARAMS; i++) plan_release(p, momentum[i]);
}

RANKS_DEF void plan_step(const plan *p, cddp_ddp *d, cddp_optim *s, const cddp_param *params,
                         cddp_group *g, int step) {
  int shard;
  if (p->nosync) {
    cddp_ddp_no_sync(d, true);
    plan_backward(p, d, params, g, step + 1000);
    CHECK_OK(cddp_ddp_wait(d));
    cddp_ddp_no_sync(d, false);
  }
  if (p->shards == 0) plan_backward(p, d, params, g, step);
  while (p->shards > 0 && cddp_ddp_next_shard(d, &shard))
    plan_backward(p, d, params, g, 100 * step + shard);
  if (p->buffers && !p->graph && !p->uneven) /* while buckets are reduced */
    CHECK_OK(cddp_ddp_sync_buffers(d));
  if ((p->cpu && p->clip > 0) || (p->steps_a_mode > 0 && step / p->steps_a_mode % 2 == 0)) {
    double norm = 0, *asked = step % 2 && !p->graph ? &norm : NULL;
    CHECK_OK(cddp_ddp_wait(d));
    if (p->clip > 0) CHECK_OK(cddp_ddp_clip_grad_norm(d, p->clip, asked));
    CHECK_OK(cddp_optim_step(s));
    CHECK_OK(cddp_optim_zero_grad(s));
  } else {
    double norm = 0;
    CHECK_OK(cddp_ddp_step(d, s));
    if (p->clip > 0 && !p->graph) CHECK_OK(cddp_ddp_grad_norm(d, &norm));
    if (p->clip > 0 && !p->graph) CHECK(norm > p->clip); /* or the test shows nothing */
  }
}

/* Steps 2 and later as launches of one graph: the captured step is `step` each time. */
RANKS_DEF void plan_graph(const plan *p, cddp_ddp *d, cddp_optim *s, const cddp_param *params,
                          cddp_group *g) {
  cudaStream_t stream = (cudaStream_t)cddp_stream(g);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  int step;
  for (step = 0; step < 2; step++) plan_step(p, d, s, params, g, 7);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  plan_step(p, d, s, params, g, 7);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(graph != NULL && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (step = 2; exec != NULL && step < p->steps; step++)
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
  CHECK_OK(cddp_synchronize(g));
  if (exec != NULL) cudaGraphExecDestroy(exec);
  if (graph != NULL) cudaGraphDestroy(graph);
}

RANKS_DEF void plan_save(const plan *p, cddp_group *g, const cddp_param *params, cddp_optim *s) {
  cddp_checkpoint_desc k;
  memset(&k, 0, sizeof k);
  k.optim = s;
  CHECK_OK(cddp_save(p->alone ? NULL : g, p->save, params, PARAMS, &k));
}

RANKS_DEF void plan_run(const plan *p, cddp_ddp *d, cddp_optim *s, cddp_param *params,
                        cddp_group *g) {
  cddp_checkpoint_desc k;
  int step;
  memset(&k, 0, sizeof k);
  k.optim = s;
  if (p->load != NULL) CHECK_OK(cddp_load(p->alone ? NULL : g, p->load, params, PARAMS, &k));
  for (step = p->from; step < p->steps - (p->uneven ? cddp_rank(g) : 0); step++) {
    if (p->save != NULL && step == p->save_at) plan_save(p, g, params, s);
    plan_step(p, d, s, params, g, p->graph ? 7 : step);
  }
  if (p->save != NULL && step == p->save_at) plan_save(p, g, params, s);
  if (p->uneven) CHECK_OK(cddp_ddp_join(d, s));
}

/* Half precision for every f32 parameter but one. */
RANKS_DEF void plan_copies(const plan *p, const cddp_param *params, void **copies,
                           cddp_sgd_desc *rule) {
  int i;
  for (i = 0; i < PARAMS; i++)
    copies[i] = params[i].dtype == CDDP_F32 && i != 2 ? plan_memory(p, sizes[i] * 2) : NULL;
  if (!p->cpu) CHECK(cudaDeviceSynchronize() == cudaSuccess);
  rule->copies = copies;
  rule->copy_dtype = p->given_grads ? CDDP_F16 : CDDP_BF16;
}

/* data: a parameter's weights, on the host. */
RANKS_DEF void check_copy(const plan *p, cddp_group *g, const void *copy, const char *data, int i,
                          cddp_dtype dtype) {
  char *host = (char *)calloc(2, sizes[i] + 1);
  if (p->cpu)
    memcpy(host, copy, sizes[i] * 2);
  else if (sizes[i] > 0)
    to_host(g, host, copy, sizes[i] * 2);
  CHECK(ranks_is_copy(dtype, host, data, sizes[i]));
  free(host);
}

/* rule: for SGD; AdamW takes what it says too. */
RANKS_DEF cddp_optim *plan_optim(const plan *p, cddp_param *params, cddp_sgd_desc *rule) {
  static const double scales[PARAMS] = {1, 0.5, 1, 1, 2, 0}, decays[PARAMS] = {0.1, 0, 0, 0.1, 0};
  cddp_optim *s = NULL;
  cddp_adamw_desc a;
  if (p->groups) rule->lr_scales = scales, rule->weight_decays = decays;
  if (!p->adamw) {
    CHECK_OK(cddp_sgd_create(&s, params, PARAMS, rule));
    return s;
  }
  memset(&a, 0, sizeof a);
  a.lr = 0.01;
  a.eps = 1e-3; /* what is rounded otherwise in a small gradient makes no other step */
  a.beta2 = 0.98;
  a.weight_decay = rule->weight_decay;
  a.amsgrad = p->amsgrad;
  a.ddp = rule->ddp;
  a.sharded_states = rule->sharded_states;
  a.stream = rule->stream;
  a.copies = rule->copies;
  a.master_weights = rule->master_weights;
  a.copy_dtype = rule->copy_dtype;
  a.lr_scales = rule->lr_scales;
  a.weight_decays = rule->weight_decays;
  CHECK_OK(cddp_adamw_create(&s, params, PARAMS, &a));
  return s;
}

RANKS_DEF int train(cddp_group *g, void *arg) {
  const plan *p = (const plan *)arg;
  cddp_param params[PARAMS], buffer;
  void *copies[PARAMS];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cudaStream_t stream = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  float *out = p->out + (size_t)cddp_rank(g) * plan_floats();
  size_t k, rows[PARAMS] = {0, 0, 0, 0, ROWS, 0};
  int i;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  if (!p->cpu) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    cddp_set_stream(g, stream);
  }
  plan_params(p, params, cddp_rank(g));
  if (!p->cpu) CHECK(cudaDeviceSynchronize() == cudaSuccess);
  desc.bucket_cap_mb = p->cap_mb;
  desc.find_unused_parameters = p->unused;
  desc.comm_hook = p->hook;
  desc.uneven_inputs = p->uneven;
  desc.max_grad_norm = p->clip;
  desc.shards = p->shards;
  if (p->sparse) desc.sparse_rows = rows;
  buffer = params[0];
  if (p->buffers) desc.buffers = &buffer, desc.buffer_count = 1;
  CHECK_OK(cddp_ddp_create(&d, g, params, PARAMS, &desc));
  if (d == NULL) return 1;
  rule.lr = 0.05;
  rule.momentum = p->no_momentum ? 0 : 0.9;
  rule.weight_decay = p->sparse ? 0 : 0.01;
  if (p->unused || p->sparse || p->sharded) rule.ddp = d;
  rule.sharded_states = p->sharded;
  rule.stream = stream;
  rule.master_weights = p->masters;
  plan_copies(p, params, copies, &rule);
  if ((s = plan_optim(p, params, &rule)) == NULL) return 1;
  if (p->parts)
    plan_own(p, d, s, params, g);
  else if (p->graph && !p->cpu)
    plan_graph(p, d, s, params, g);
  else
    plan_run(p, d, s, params, g);
  if (p->buffers) CHECK_OK(cddp_ddp_sync_buffers(d));
  for (i = 0; i < PARAMS; i++) {
    char *host = (char *)calloc(1, sizes[i] * 8 + 1);
    size_t bytes = sizes[i] * cddp_dtype_size(params[i].dtype);
    if (p->cpu)
      memcpy(host, params[i].data, bytes);
    else if (bytes > 0)
      to_host(g, host, params[i].data, bytes);
    for (k = 0; k < sizes[i]; k++) *out++ = (float)ranks_load(params[i].dtype, host, k);
    if (copies[i] != NULL) check_copy(p, g, copies[i], host, i, rule.copy_dtype);
    free(host);
  }
  if (!p->cpu) CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  for (i = 0; i < PARAMS; i++) {
    plan_release(p, params[i].data);
    if (params[i].grad != NULL) plan_release(p, params[i].grad);
    if (copies[i] != NULL) plan_release(p, copies[i]);
  }
  if (stream != NULL) {
    cddp_set_stream(g, NULL);
    cudaStreamDestroy(stream);
  }
  return 0;
}

/* The plan on n ranks, on a device and on the CPU: all ranks alike, and close to the CPU's. */
RANKS_DEF void check_plan(plan *p, int n, const char *backend) {
  size_t count = plan_floats(), i;
  float *got = (float *)ranks_shared((size_t)n * count * sizeof *got), *want;
  double worst = 0;
  int r, cut = 0;
  want = (float *)ranks_shared((size_t)n * count * sizeof *want);
  p->out = got;
  p->cpu = false;
  CHECK_OK(run(train, p, n, backend));
  p->out = want;
  p->cpu = true;
  CHECK_OK(ranks_run(train, p, n, false));
  for (r = 1; r < n; r++) CHECK(memcmp(got, got + (size_t)r * count, count * sizeof *got) == 0);
  for (i = 0; i < count; i++) {
    double e = fabs((double)got[i] - (double)want[i]) / (1 + fabs((double)want[i]));
    if (!(e <= worst)) worst = e;
    if (!(e == e)) cut = 1;
  }
  if (p->masters && n == 1) /* nothing is added up: the same bits */
    CHECK(worst == 0);
  if (!(worst < (p->hook != NULL || p->last >= CDDP_F16 ? 0.02 : 1e-5)) || cut)
    test_fail(__FILE__, __LINE__, "%d ranks on %s: worst difference to the CPU %g", n,
              backend != NULL ? backend : "nccl", worst);
  munmap(got, (size_t)n * count * sizeof *got);
  munmap(want, (size_t)n * count * sizeof *want);
}

#endif
