/* gpt_speed.cu - the tokens per second of examples/gpt.cu, and of the same program without cddp.

     gpt_speed [OPTION...]                  gpt.cu, unchanged
     GPT_PLAIN=1 gpt_speed [OPTION...]      no step calls cddp: this file clips, and steps AdamW

   Both print the same hash of the weights: plain_step computes what cddp_ddp_step does on one rank,
   with the same kernels. The first sixteenth of the steps is not measured. A token is a byte.
   tests/gpu/gpu.sh runs both in turn. */
#define CDDP_IMPLEMENTATION /* as in gpt.cu */
#include "../../cddp_kernels.cuh"
#include "../../examples/gpt.h"

#include <time.h>

static bool plain(void) {
  static const bool set = getenv("GPT_PLAIN") != NULL;
  return set;
}

static void must(bool ok, const char *what) {
  if (ok) return;
  fprintf(stderr, "%s failed\n", what);
  exit(1);
}

/* --- A step of one rank without cddp --- */

static uint64_t plain_steps; /* done */
static bool plain_shard_done;
static double plain_lr;

/* grad *= the factor of the clip, one step of AdamW, grad = 0. */
static void plain_update(const cddp_segment *s, int n, double decay, double *scratch) {
  const double beta1 = 0.9, beta2 = 0.99, t = (double)plain_steps + 1; /* gpt.cu's */
  cddp_adamw_step rule;
  memset(&rule, 0, sizeof rule);
  rule.step = -plain_lr / (1 - pow(beta1, t));
  rule.decay = 1 - plain_lr * decay;
  rule.lerp = 1 - beta1;
  rule.keep = beta2;
  rule.take = 1 - beta2;
  rule.root = sqrt(1 - pow(beta2, t));
  rule.eps = 1e-8;
  rule.stride = gpt_bytes();
#ifdef __CUDACC__ /* both in one pass, as cddp_ddp_step does */
  must(!cddp__cu_adamw(s, n, CDDP_F32, &rule, 1, scratch, CDDP_SGD_ZERO, NULL), "AdamW");
#else
  if (scratch) must(!cddp_cuda_scale(s, n, CDDP_F32, scratch, NULL), "clipping");
  must(!cddp_cuda_adamw(s, n, CDDP_F32, &rule, CDDP_SGD_ZERO, NULL), "AdamW");
#endif
}

static void plain_step(void) {
  static float *states; /* exp_avg and exp_avg_sq of all parameters, one after the other */
  static double *scratch;
  static cddp_segment all[MAX_PARAMS], equal[MAX_PARAMS]; /* equal: the same weight decay */
  size_t bytes = gpt_bytes();
  if (!states) {
    must(!cudaMalloc((void **)&states, 2 * bytes) &&
             !cudaMalloc((void **)&scratch, CDDP_CUDA_SCRATCH_BYTES) &&
             !cudaMemset(states, 0, 2 * bytes),
         "cudaMalloc");
    for (int i = 0; i < param_count; i++) { /* backwards, as cddp lists them: the same sum */
      const cddp_param *p = &params[param_count - 1 - i];
      all[i].data = p->data;
      all[i].grad = p->grad;
      all[i].momentum = states + ((float *)p->data - (float *)params[0].data);
      all[i].count = p->count;
    }
  }
  if (config.clip > 0)
    must(!cddp_cuda_squares(all, param_count, CDDP_F32, scratch, false, NULL) &&
             !cddp_cuda_factor(scratch, config.clip, NULL),
         "the norm");
  for (int decayed = 0; decayed < 2; decayed++) {
    int n = 0;
    for (int i = 0; i < param_count; i++)
      if ((decays[param_count - 1 - i] != 0) == (decayed != 0)) equal[n++] = all[i];
    plain_update(equal, n, decayed ? config.decay : 0, config.clip > 0 ? scratch : NULL);
  }
}

/* --- What gpt.cu calls in a step --- */

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static cddp_result speed_set_lr(cddp_optim *optim, double lr) {
  plain_lr = lr;
  return plain() ? CDDP_OK : cddp_optim_set_lr(optim, lr);
}

static bool speed_next_shard(cddp_ddp *ddp, int *shard) {
  if (!plain()) return cddp_ddp_next_shard(ddp, shard);
  *shard = 0;
  return plain_shard_done = !plain_shard_done; /* one a step */
}

static cddp_result speed_ready(cddp_ddp *ddp, int i) {
  return plain() ? CDDP_OK : cddp_ddp_ready(ddp, i);
}

static cddp_result speed_step(cddp_ddp *ddp, cddp_optim *optim) {
  if (!plain()) return cddp_ddp_step(ddp, optim);
  plain_step();
  plain_steps++;
  return CDDP_OK;
}

/* The steps done so far. Measures from the call after `warm` steps to that after the last step. */
static uint64_t speed_steps(cddp_ddp *ddp) {
  static double begin;
  uint64_t done = plain() ? plain_steps : cddp_ddp_steps(ddp);
  uint64_t end = (uint64_t)config.stop, warm = end / 16;
  if (done == 0)
    must(cddp_world_size(cddp_ddp_group(ddp)) == 1, "a measurement of several ranks");
  if (done != warm && done != end) return done;
  must(!cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (done == end)
    printf("gpt_%s %.0f tokens/s\n", plain() ? "plain" : "ddp",
           (double)(end - warm) * config.batch * config.context / (seconds() - begin));
  begin = seconds();
  return done;
}

#undef cddp_ddp_step
#define cddp_optim_set_lr speed_set_lr
#define cddp_ddp_next_shard speed_next_shard
#define cddp_ddp_ready speed_ready
#define cddp_ddp_step speed_step
#define cddp_ddp_steps speed_steps
#include "../../examples/gpt.cu"
