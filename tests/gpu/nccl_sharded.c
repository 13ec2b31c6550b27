/* Each rank keeps a part of the optimizer's state on its GPU, and the weights are those of whole
   states, bit for bit.

   test_parts: an optimizer of the caller's own, between cddp_ddp_reduce_scatter and
   cddp_ddp_all_gather, against cddp_ddp_step. test_sharded_states: sharded_states of SGD and AdamW
   against the same optimizer without them, on 1 to 8 ranks, with masters, clipping, unused
   parameters, shards, uneven inputs, hooks and graphs; and the bytes of device memory that it
   saves. The plans are those of nccl_train.h. */
#include "nccl_train.h"

/* An optimizer of the caller's own, each rank for its part of the weights, ends in the bits of
   cddp_ddp_step. */
static void check_parts(plan *p, const char *hosts, const char *backend) {
  size_t n = strlen(hosts), bytes = n * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  p->out = want;
  p->parts = false;
  CHECK_OK(run_on(hosts, train, p, backend));
  p->out = got;
  p->parts = true;
  CHECK_OK(run_on(hosts, train, p, backend));
  if (memcmp(got, want, bytes) != 0)
    test_fail(__FILE__, __LINE__, "%s on %s: clip %g, %d shards: other bits than cddp_ddp_step's",
              hosts, backend != NULL ? backend : "nccl", p->clip, p->shards);
  munmap(want, bytes);
  munmap(got, bytes);
}

static void test_parts(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  check_parts(&p, "aaa", NULL);
  p.clip = 0.5;
  p.given_grads = true;
  check_parts(&p, "aa", NULL);
  check_parts(&p, "aba", NULL);
  check_parts(&p, "aa", "cpu");
  p.graph = true;
  check_parts(&p, "aaa", NULL);
  p.graph = false;
  p.shards = 5;
  p.last = CDDP_BF16;
  check_parts(&p, "aa", NULL);
  if (RANKS_TSAN) return;
  p.clip = 0;
  check_parts(&p, "aaa", "cpu");
  p.shards = 0;
  p.last = CDDP_F64;
  p.unused = true;
  check_parts(&p, "a", NULL);
  check_parts(&p, "aaaa", NULL);
}

/* With sharded_states the plan ends in the bits of one without, on all ranks. */
static void check_sharded(plan *p, const char *hosts, const char *backend) {
  size_t n = strlen(hosts), bytes = n * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  p->out = want;
  p->sharded = false;
  CHECK_OK(run_on(hosts, train, p, backend));
  p->out = got;
  p->sharded = true;
  CHECK_OK(run_on(hosts, train, p, backend));
  if (ranks_zero(got, bytes) || memcmp(got, want, bytes) != 0)
    test_fail(__FILE__, __LINE__, "%s on %s: sharded states end in other bits", hosts,
              backend != NULL ? backend : "nccl");
  munmap(want, bytes);
  munmap(got, bytes);
}

/* AdamW's states with a master are 12 bytes an element. A wait between two sharded steps gets all
   of the gradient. */
static int sharded_memory(cddp_group *g, void *arg) {
  cddp_param p;
  cddp_adamw_desc a;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  size_t n = 1 << 18, ranks = (size_t)cddp_world_size(g), before, bytes, i;
  uint16_t *host = (uint16_t *)calloc(n, sizeof *host);
  int step;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&a, 0, sizeof a);
  p.name = "w", p.count = n, p.dtype = CDDP_BF16, p.data = on_device(host, 2 * n);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  before = hostcuda_bytes();
  a.lr = 0.01, a.ddp = d, a.master_weights = a.sharded_states = true;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &a));
  bytes = hostcuda_bytes() - before;
  CHECK(bytes + 65536 >= 12 * n / ranks && bytes <= 12 * n / ranks + 65536);
  for (step = 0; step < 6; step++) {
    for (i = 0; i < n; i++) host[i] = (uint16_t)(0x3f80 + cddp_rank(g) * 8); /* 1 + rank / 16 */
    CHECK_OK(cddp_synchronize(g));
    CHECK(cudaMemcpy(p.grad, host, 2 * n, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK_OK(cddp_ddp_ready(d, 0));
    if (step % 2 == 0) {
      CHECK_OK(cddp_ddp_step(d, o));
      continue;
    }
    CHECK_OK(cddp_ddp_wait(d));
    to_host(g, host, p.grad, 2 * n);
    for (i = 1; i < n && host[i] == host[0];) i++;
    CHECK(i == n && host[0] >= 0x3f80 && host[0] <= 0x3f80 + 8 * (ranks - 1));
  }
  CHECK_IS(cddp_optim_step(o), CDDP_INVALID_ARGUMENT);
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cudaFree(p.data);
  free(host);
  return 0;
}

static void test_sharded_states(void) {
  static const char *const hosts[] = {"a",     "aa",     "aba",     "aaaa",
                                      "aaaaa", "aaaaaa", "aaaaaaa", "aaaaaaaa"};
  plan p;
  int n, k;
  for (n = RANKS_TSAN ? 2 : 1; n <= MOST_RANKS; n += RANKS_SLOW ? 2 : 1) {
    memset(&p, 0, sizeof p);
    p.steps = 4;
    p.cap_mb = 0.02;
    p.adamw = p.amsgrad = n % 2 == 0;
    p.given_grads = n % 3 == 0;
    p.groups = n % 4 == 1;
    p.last = n % 4 == 2 ? CDDP_F64 : CDDP_F32;
    check_sharded(&p, hosts[n - 1], NULL);
  }
  for (k = 0; k < (RANKS_TSAN ? 2 : 8); k++) {
    memset(&p, 0, sizeof p);
    p.steps = 5;
    p.cap_mb = 0.02;
    p.adamw = k % 2 == 0;
    p.last = k < 4 ? k % 2 == 0 ? CDDP_BF16 : CDDP_F16 : CDDP_F32;
    p.masters = k < 4;
    p.clip = k == 1 || k == 5 ? 0.5 : 0;
    p.unused = k == 2 || k == 4;
    p.shards = k == 3 ? 7 : 0;
    p.uneven = k == 6;
    p.hook = k == 5 ? cddp_bf16_compress_hook : NULL;
    p.graph = k == 7;
    check_sharded(&p, hosts[1 + k % 3], k == 4 ? "cpu" : NULL);
  }
  CHECK_OK(run(sharded_memory, NULL, 2, NULL));
  if (!RANKS_TSAN) CHECK_OK(run(sharded_memory, NULL, 3, NULL));
}

int main(void) {
  RUN(test_parts);
  RUN(test_sharded_states);
  return TEST_END();
}
