/* sharded_states: each rank of all hosts keeps 1/world_size of an optimizer's states.

   The same model is trained with whole and with sharded states of SGD and AdamW. Weights, and the
   bytes of checkpoints, must be equal on 1 to 4 ranks of 1 to 4 hosts, with masters, clipping,
   unused parameters, shards and uneven inputs. A checkpoint of either kind resumes as the other,
   on another number of ranks. The memory that a rank allocates is measured. */
#include "../../cddp.h"
#include "../ranks.h"

#include <malloc.h>

enum { PARAMS = 6, STEPS = 7, SAVED = 4 };

static const size_t counts[PARAMS] = {5003, 17, 0, 30000, 1, 12001};

typedef struct plan {
  bool sharded, adamw, amsgrad, unused, uneven, owned; /* owned: grad is the caller's */
  cddp_dtype last; /* of the last parameter; half precision has a master */
  bool copies;
  double clip;
  int shards;
  cddp_comm_hook hook;
  const char *load, *save; /* files: read before step `from`, written before step SAVED */
  int from, to;
  char *out; /* shared, [ranks][bytes_of_all]: the weights */
} plan;

static size_t bytes_of_all(void) {
  size_t n = 0;
  int i;
  for (i = 0; i < PARAMS; i++) n += counts[i] * 8;
  return n;
}

static uint64_t value(int rank, int step, int param, size_t i) {
  return ranks_mix((uint64_t)(rank * 100 + param), (uint64_t)step, i);
}

static void backward(const plan *p, cddp_ddp *d, cddp_param *params, int shard, int step) {
  double x[1], all;
  size_t i;
  int k;
  for (k = PARAMS - 1; k >= 0; k--) {
    if (p->unused && (k == 1 || (k == 3 && shard % 2 == 0 && step % 2 == 0))) continue;
    for (i = 0; i < counts[k]; i++) {
      ranks_put(x, params[k].dtype, 0, value(shard, step, k, i));
      all = ranks_load(params[k].dtype, params[k].grad, i) + ranks_load(params[k].dtype, x, 0);
      ranks_store(params[k].dtype, params[k].grad, i, all);
    }
    CHECK_OK(cddp_ddp_ready(d, k));
  }
}

static void make_params(const plan *p, cddp_param *params, void **copies) {
  static const char *const names[PARAMS] = {"a", "b", "c", "d", "e", "f"};
  size_t i;
  int k;
  memset(params, 0, PARAMS * sizeof *params);
  for (k = 0; k < PARAMS; k++) {
    params[k].name = names[k];
    params[k].count = counts[k];
    params[k].dtype = k == PARAMS - 1 ? p->last : CDDP_F32;
    params[k].data = calloc(1, counts[k] * 8 + 1);
    if (p->owned && k % 2 == 1) params[k].grad = calloc(1, counts[k] * 8 + 1);
    for (i = 0; i < counts[k]; i++)
      ranks_put(params[k].data, params[k].dtype, i, value(7, 100, k, i));
    copies[k] = p->copies && k < 4 ? calloc(2, counts[k] + 1) : NULL;
  }
}

static cddp_optim *make_optim(const plan *p, cddp_param *params, void **copies, cddp_ddp *d) {
  static const double scales[PARAMS] = {1, 0.5, 1, 1, 2, 0.25};
  cddp_adamw_desc a;
  cddp_sgd_desc s;
  cddp_optim *o = NULL;
  memset(&a, 0, sizeof a);
  memset(&s, 0, sizeof s);
  a.lr = s.lr = 0.01, s.momentum = 0.9, s.nesterov = p->amsgrad, a.amsgrad = p->amsgrad;
  a.weight_decay = s.weight_decay = 0.01;
  a.ddp = s.ddp = d;
  a.lr_scales = s.lr_scales = scales;
  a.master_weights = s.master_weights = p->last >= CDDP_F16;
  if (p->copies) a.copies = s.copies = copies, a.copy_dtype = s.copy_dtype = CDDP_BF16;
  a.sharded_states = s.sharded_states = p->sharded;
  if (p->adamw) CHECK_OK(cddp_adamw_create(&o, params, PARAMS, &a));
  else CHECK_OK(cddp_sgd_create(&o, params, PARAMS, &s));
  return o;
}

static int train(cddp_group *g, void *arg) {
  const plan *p = (const plan *)arg;
  char *out = p->out + (size_t)cddp_rank(g) * bytes_of_all();
  cddp_param params[PARAMS];
  void *copies[PARAMS], *grads[PARAMS];
  cddp_checkpoint_desc file;
  cddp_ddp_desc desc;
  cddp_optim *o;
  cddp_ddp *d;
  int step, k, shard, to = p->to - (p->uneven ? cddp_rank(g) : 0);
  memset(&desc, 0, sizeof desc);
  memset(&file, 0, sizeof file);
  make_params(p, params, copies);
  for (k = 0; k < PARAMS; k++) grads[k] = params[k].grad;
  desc.find_unused_parameters = p->unused;
  desc.max_grad_norm = p->clip;
  desc.shards = p->shards;
  desc.comm_hook = p->hook;
  desc.bucket_cap_mb = 0.02;
  CHECK_OK(cddp_ddp_create(&d, g, params, PARAMS, &desc));
  o = make_optim(p, params, copies, d);
  file.optim = o;
  if (p->load != NULL) CHECK_OK(cddp_load(g, p->load, params, PARAMS, &file));
  for (step = p->from; step < to; step++) {
    if (p->save != NULL && step == SAVED) CHECK_OK(cddp_save(g, p->save, params, PARAMS, &file));
    if (p->shards == 0) backward(p, d, params, cddp_rank(g), step);
    while (p->shards > 0 && cddp_ddp_next_shard(d, &shard)) backward(p, d, params, shard, step);
    CHECK_OK(cddp_ddp_step(d, o));
    for (k = 0; k < PARAMS; k++)
      CHECK(ranks_zero(params[k].grad, counts[k] * cddp_dtype_size(params[k].dtype)));
  }
  if (p->save != NULL && to == SAVED) CHECK_OK(cddp_save(g, p->save, params, PARAMS, &file));
  if (p->uneven) CHECK_OK(cddp_ddp_join(d, o));
  for (k = 0; k < PARAMS; k++) {
    memcpy(out, params[k].data, counts[k] * cddp_dtype_size(params[k].dtype));
    out += counts[k] * 8;
    if (copies[k] != NULL)
      CHECK(ranks_is_copy(CDDP_BF16, copies[k], (const char *)params[k].data, counts[k]));
  }
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  for (k = 0; k < PARAMS; k++) {
    free(params[k].data);
    free(grads[k]);
    free(copies[k]);
  }
  return 0;
}

static void run_on_hosts(plan *p, const char *hosts, bool sharded, char *out) {
  p->sharded = sharded;
  p->out = out;
  setenv("TEST_HOSTS", hosts, 1);
  CHECK_OK(ranks_run(train, p, (int)strlen(hosts), false));
  unsetenv("TEST_HOSTS");
}

/* With and without sharded_states all ranks have the same bits. */
static void check_bits(plan *p, const char *hosts) {
  size_t n = strlen(hosts), bytes = bytes_of_all(), r;
  char *want = (char *)ranks_shared(n * bytes), *got = (char *)ranks_shared(n * bytes);
  run_on_hosts(p, hosts, false, want);
  run_on_hosts(p, hosts, true, got);
  CHECK(!ranks_zero(want, bytes));
  for (r = 0; r < n; r++)
    if (memcmp(got + r * bytes, want, bytes) != 0)
      test_fail(__FILE__, __LINE__, "rank %zu of hosts %s has other bits", r, hosts);
  munmap(want, n * bytes);
  munmap(got, n * bytes);
}

static void test_bits(void) {
  static const char *const hosts[] = {"ab", "aabb", "aab", "aa", "abcd", "a"};
  int i, k;
  for (i = 0; i < (RANKS_SLOW ? 2 : 6); i++)
    for (k = 0; k < 8; k++) {
      plan p;
      memset(&p, 0, sizeof p);
      p.to = STEPS;
      p.adamw = k % 2 == 1;
      p.amsgrad = k == 3 || k == 6;
      p.last = k == 1 || k == 4 ? CDDP_BF16 : k == 2 ? CDDP_F16 : k == 3 ? CDDP_F64 : CDDP_F32;
      p.clip = k >= 4 && k < 7 ? 0.5 : 0;
      p.unused = k == 3 || k == 6;
      p.owned = k == 2 || k == 5;
      p.copies = k == 5;
      p.shards = k == 5 ? 6 : 0;
      p.uneven = k == 0 && i % 2 == 0;
      p.hook = k == 7 ? cddp_bf16_compress_hook : NULL;
      check_bits(&p, hosts[i]);
    }
}

static bool same_files(const char *a, const char *b) {
  static char x[1 << 20], y[1 << 20];
  FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
  size_t n = f != NULL ? fread(x, 1, sizeof x, f) : 0, m = g != NULL ? fread(y, 1, sizeof y, g) : 1;
  if (f != NULL) fclose(f);
  if (g != NULL) fclose(g);
  return n == m && n > 2 * 47000 * sizeof(float) && n < sizeof x && memcmp(x, y, n) == 0;
}

/* A file of sharded states is that of whole ones. It continues with either, on other ranks. */
static void test_checkpoint(void) {
  static const char *const next[] = {"ab", "aabb", "abc", "aaa", "a"};
  char folder[] = "/tmp/cddp-sharded-XXXXXX", whole[64], parts[64], again[64];
  char *out = (char *)ranks_shared(8 * bytes_of_all()), *want;
  int k, i, sharded;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(whole, sizeof whole, "%s/whole", folder);
  snprintf(parts, sizeof parts, "%s/parts", folder);
  snprintf(again, sizeof again, "%s/again", folder);
  want = out + 4 * bytes_of_all();
  for (k = 0; k < 3; k++) {
    plan p;
    memset(&p, 0, sizeof p);
    p.adamw = k > 0;
    p.amsgrad = k == 1;
    p.last = k == 2 ? CDDP_BF16 : CDDP_F32;
    p.shards = 4;
    p.to = STEPS;
    memset(want, 0, bytes_of_all());
    p.save = whole;
    run_on_hosts(&p, "ab", false, want);
    p.save = parts;
    run_on_hosts(&p, "aabb", true, out);
    CHECK(same_files(whole, parts));
    for (i = 0; i < (RANKS_SLOW ? 3 : 5); i++)
      for (sharded = 0; sharded < 2; sharded++) {
        p.load = parts;
        p.from = SAVED;
        p.save = again;
        memset(out, 0, bytes_of_all());
        run_on_hosts(&p, next[i], sharded != 0, out);
        CHECK(same_files(parts, again));
        if (memcmp(out, want, bytes_of_all()) != 0)
          test_fail(__FILE__, __LINE__, "way %d, hosts %s, sharded %d: other bits", k, next[i],
                    sharded);
      }
  }
  CHECK(unlink(whole) == 0 && unlink(parts) == 0 && unlink(again) == 0);
  CHECK_EQ(rmdir(folder), 0);
  munmap(out, 8 * bytes_of_all());
}

/* Bytes of the heap, which is where sharded states of CPUs are. */
static size_t heap(void) {
#if defined(__GLIBC__) && !RANKS_SLOW
  struct mallinfo2 m = mallinfo2();
  return m.uordblks + m.hblkhd;
#else
  return 0;
#endif
}

static int count_bytes(cddp_group *g, void *arg) {
  cddp_param p;
  cddp_adamw_desc a;
  cddp_optim *o;
  cddp_ddp *d;
  int64_t all, ranks = cddp_world_size(g), bytes, before = 0;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&a, 0, sizeof a);
  p.name = "w";
  p.count = 1 << 20;
  p.dtype = CDDP_BF16;
  p.data = calloc(2, p.count);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  a.lr = 0.01;
  a.ddp = d;
  a.master_weights = a.sharded_states = true;
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_wait(d)); /* what the first step allocates besides */
  before = (int64_t)heap();
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &a));
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, o));
  bytes = all = (int64_t)heap() - before;
  CHECK_OK(cddp_all_reduce(g, &all, 1, CDDP_I64, CDDP_SUM, NULL));
  if (bytes > 0 || before > 0) { /* exp_avg, exp_avg_sq and the master: 12 bytes an element */
    CHECK(bytes <= 12 * (1 << 20) / ranks + 65536);
    CHECK(all >= 12 * (1 << 20) && all <= 12 * (1 << 20) + 65536 * ranks);
  }
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  free(p.data);
  return 0;
}

static void test_memory(void) {
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(count_bytes, NULL, 2, false));
  setenv("TEST_HOSTS", "aabb", 1);
  CHECK_OK(ranks_run(count_bytes, NULL, 4, false));
  unsetenv("TEST_HOSTS");
}

static int misused(cddp_group *g, void *arg) {
  static const size_t rows[2] = {0, 4};
  cddp_group *half = NULL;
  cddp_checkpoint_desc file;
  cddp_ddp_desc desc;
  cddp_sgd_desc s;
  cddp_param p[2];
  cddp_optim *o = NULL;
  cddp_ddp *d;
  const char *path = (const char *)arg;
  float w[8] = {1, 2, 3, 4, 5, 6, 7, 8}, v[8] = {0};
  memset(p, 0, sizeof p);
  memset(&s, 0, sizeof s);
  memset(&desc, 0, sizeof desc);
  memset(&file, 0, sizeof file);
  p[0].name = "w", p[0].data = w, p[0].count = 8;
  p[1].name = "v", p[1].data = v, p[1].count = 8;
  s.lr = 0.5, s.momentum = 0.9, s.sharded_states = true;
  CHECK_IS(cddp_sgd_create(&o, p, 2, &s), CDDP_INVALID_ARGUMENT); /* no ddp */
  CHECK(o == NULL && strstr(cddp_error(), "sharded_states") != NULL);
  desc.sparse_rows = rows;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  s.ddp = d;
  CHECK_IS(cddp_sgd_create(&o, p, 2, &s), CDDP_UNSUPPORTED);
  CHECK(o == NULL && strstr(cddp_error(), "sparse_rows") != NULL);
  cddp_ddp_destroy(d);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  s.ddp = d;
  CHECK_OK(cddp_sgd_create(&o, p, 2, &s));
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK_OK(cddp_ddp_wait(d));
  CHECK_IS(cddp_optim_step(o), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_ddp_step") != NULL);
  CHECK_OK(cddp_ddp_ready(d, 0)); /* nothing is lost */
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK_OK(cddp_ddp_step(d, o));
  file.optim = o;
  CHECK_IS(cddp_save(g, "/nowhere/at/all", p, 2, &file), CDDP_IO);
  CHECK_OK(cddp_group_split(g, cddp_rank(g), 0, &half));
  if (!ranks_together(0, 1)) CHECK_IS(cddp_save(half, path, p, 2, &file), CDDP_INVALID_ARGUMENT);
  cddp_destroy(half);
  CHECK_OK(cddp_save(g, path, p, 2, &file));
  if (cddp_rank(g) == 0) CHECK_EQ(truncate(path, 700), 0);
  CHECK_OK(cddp_barrier(g));
  CHECK(cddp_load(g, path, p, 2, &file) != CDDP_OK);
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK_OK(cddp_ddp_step(d, o));
  cddp_optim_destroy(o);
  s.sharded_states = cddp_rank(g) == 0; /* ranks disagree */
  CHECK_OK(cddp_sgd_create(&o, p, 2, &s));
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK_IS(cddp_ddp_step(d, o), CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), "sharded_states") != NULL);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_misuse(void) {
  char path[] = "/tmp/cddp-sharded-file-XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && close(fd) == 0);
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(misused, path, 2, false));
  setenv("TEST_HOSTS", "aa", 1);
  CHECK_OK(ranks_run(misused, path, 2, false));
  unsetenv("TEST_HOSTS");
  CHECK_EQ(unlink(path), 0);
}

/* A file without AdamW's largest averages is loaded with `partial`, and the optimizer saved before
   its first step: that file has all states. arg: 1 for sharded_states (a byte), then the path. */
static int load_partly(cddp_group *g, void *arg) {
  const char *path = (const char *)arg + 1;
  float w[900] = {0};
  cddp_param p = {"w", w, NULL, 900, CDDP_F32};
  cddp_checkpoint_desc file;
  cddp_adamw_desc a;
  cddp_optim *o = NULL;
  cddp_ddp *d = NULL;
  memset(&a, 0, sizeof a);
  memset(&file, 0, sizeof file);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  a.lr = 0.1, a.ddp = d, a.sharded_states = path[-1] != 0;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &a));
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, o));
  file.optim = o;
  CHECK_OK(cddp_save(g, path, &p, 1, &file));
  cddp_optim_destroy(o);
  a.amsgrad = true;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &a));
  file.optim = o;
  file.partial = true;
  CHECK_OK(cddp_load(g, path, &p, 1, &file));
  file.partial = false;
  CHECK_OK(cddp_save(g, path, &p, 1, &file));
  CHECK_OK(cddp_load(g, path, &p, 1, &file));
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, o));
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_partly(void) {
  static const char *const hosts[] = {"ab", "aa", "aab"};
  char arg[] = "\0/tmp/cddp-sharded-part-XXXXXX";
  int fd = mkstemp(arg + 1), k;
  CHECK(fd >= 0 && close(fd) == 0);
  for (k = 0; k < 6; k++) {
    arg[0] = (char)(k % 2);
    setenv("TEST_HOSTS", hosts[k / 2], 1);
    CHECK_OK(ranks_run(load_partly, arg, (int)strlen(hosts[k / 2]), false));
    unsetenv("TEST_HOSTS");
  }
  CHECK_EQ(unlink(arg + 1), 0);
}

int main(void) {
  RUN(test_bits);
  RUN(test_checkpoint);
  RUN(test_memory);
  RUN(test_misuse);
  RUN(test_partly);
  return TEST_END();
}
