/* inside.c - cddp.h as most tests link it, and what they see inside of it.

   Compiled once for each variant, and once more for GPUs (CDDP_CUDA), instead of once for each
   test. Behaviour and constants are those of cddp.h until a test sets a variable of inside.h. All
   private names that these tests need are here. Tests that replace system calls, or that call many
   private functions, compile an implementation of their own (tests/rooms, some of tests/chaos). */
#define CDDP_IMPLEMENTATION
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <time.h>

void (*inside_at_point)(const char *name);
double inside_unanswered_s = 20;

static void at_point(const char *name) {
  if (inside_at_point != NULL) inside_at_point(name);
}

#define CDDP__POINT(name) at_point(name)
#define CDDP__UNANSWERED_S inside_unanswered_s

#ifdef CDDP_CUDA
double inside_await_end_s = 2;
int inside_comm_min_ranks = 2;
size_t inside_file_staging = (size_t)4 << 20;
size_t inside_warm_up = (size_t)8 << 20;
size_t inside_shard_chunk = (size_t)8 << 20;
int (*inside_nanosleep)(const struct timespec *t, struct timespec *left);

static int sleep_or_test(const struct timespec *t, struct timespec *left) {
  return inside_nanosleep != NULL ? inside_nanosleep(t, left) : nanosleep(t, left);
}

#define CDDP__AWAIT_END_S inside_await_end_s
#define CDDP__COMM_MIN_RANKS inside_comm_min_ranks
#define CDDP__FILE_STAGING inside_file_staging
#define CDDP__WARM_UP inside_warm_up
#define CDDP__SHARD_CHUNK inside_shard_chunk
#define nanosleep sleep_or_test
#endif

#include "../cddp.h"
#undef nanosleep

#include "inside.h"

bool inside_rank_gone(cddp_group *g, int rank) { return cddp__rank_gone(g, rank); }
cddp_result inside_check_group(cddp_group *g) { return cddp__check_group(g); }

void inside_become_lost(cddp_ddp *ddp) {
  const struct cddp__meeting *meeting = &ddp->elastic->meeting;
  pthread_mutex_lock(&meeting->net->lock);
  cddp__close_fd(&meeting->net->listener);
  pthread_mutex_unlock(&meeting->net->lock);
  cddp__break(ddp->control, cddp__fail(CDDP_PEER_LOST, "as if this rank was lost"));
}

/* A third algorithm: SGD's arithmetic on a host, under another name. */
cddp_result inside_third_create(cddp_optim **out, cddp_param *params, int count, double lr,
                                cddp_ddp *ddp) {
  static cddp__algorithm third;
  cddp__optim_desc d;
  third = cddp__sgd;
  third.number = 2;
  third.name = "Third";
  memset(&d, 0, sizeof d);
  d.lr = lr;
  d.ddp = ddp;
  return cddp__optim_create(out, &third, 0, params, count, &d);
}

float *inside_state(cddp_optim *optim, int param) { return (float *)optim->state[param]; }

void inside_forget_life(cddp_group *g) { g->host->job_info->table.lead.self.life = 0; }
int inside_table_rank(cddp_group *g) { return (int)g->host->job_info->table.info.rank; }
int inside_table_pid(cddp_group *g) { return (int)g->host->job_info->table.info.pid; }

const size_t inside_thresholds[] = {
    CDDP__CACHE_LINE,     CDDP__PREFETCH_MAX, CDDP__ROUND_MAX,       CDDP__ROUND_MAX_OVERSUBSCRIBED,
    CDDP__BLOCK_BYTES,    CDDP__STEP_BLOCK,   CDDP__NT_MIN,          CDDP__SLICES_MIN,
    CDDP__WHOLE_MOST,     CDDP__NT_LARGE,     CDDP__EAGER_MAX,       CDDP__STAGING_MIN,
    CDDP__PIGGYBACK,      CDDP__PIECE,        CDDP__STAGING_MAX,     CDDP__WHOLE_MOST_OF_TWO,
    CDDP__CHECK_BYTES,    CDDP__SCRATCH_HALF, CDDP__IN_PLACE_BYTES,  CDDP__OVERSUBSCRIBED_READ,
    CDDP__HUGE_PAGE,      CDDP__PIECE_MOST,   4 * CDDP__NODES_CHUNK, CDDP__STAGING_ALL,
    4 * CDDP__HUGE_PAGE,  CDDP__NT_SHARE,     4 * CDDP__BLOCK,       2 * CDDP__NT_SHARE};
const int inside_threshold_count = sizeof inside_thresholds / sizeof *inside_thresholds;

void inside_slice(size_t n, size_t granule, int parts, int part, size_t *begin, size_t *end) {
  cddp__slice(n, granule, parts, part, begin, end);
}

int inside_plan_buckets(int *offsets, int *sorted, const cddp_param *params, int count,
                        const int *order, const size_t *limits, int limit_count) {
  return cddp__plan_buckets(offsets, sorted, params, count, order, limits, limit_count);
}

#ifdef CDDP_CUDA
const double inside_calls_s = CDDP__CALLS_S;

#if defined(__has_attribute)
#if __has_attribute(no_sanitize)
__attribute__((no_sanitize("thread"))) /* the watcher reads timeout_s */
#endif
#endif
void inside_set_timeout(cddp_group *g, double seconds) {
  g->timeout_s = seconds;
}

const struct cddp_kernels *inside_kernels(void) { return cddp__registered_kernels; }

cddp_result inside_poll(cddp_group *g, double start) {
  cddp__wait w;
  cddp__wait_begin(&w, g->timeout_s);
  w.since = start;
  return cddp__device_poll(cddp__device_of(g), &w, "a test");
}

bool inside_age_operation(cddp_group *g) {
  cddp__device *device = cddp__device_of(g);
  bool found;
  pthread_mutex_lock(&device->lock);
  found = device->issued != device->completed;
  if (found) device->markers[device->completed % CDDP__MARKER_COUNT].since -= 10 * g->timeout_s;
  pthread_mutex_unlock(&device->lock);
  return found;
}

bool inside_busy(cddp_group *g) { return cddp__busy_since(cddp__device_of(g)) > 0; }

void inside_enter_nccl(cddp_group *g) { pthread_mutex_lock(&cddp__device_of(g)->issue_lock); }
void inside_leave_nccl(cddp_group *g) { pthread_mutex_unlock(&cddp__device_of(g)->issue_lock); }

void inside_meet(cddp_group *g) { (void)cddp__consensus(g, CDDP_OK, NULL, 0, NULL); }

void inside_break(cddp_group *g, const char *text) {
  cddp__fail(CDDP_ABORTED, "%s", text);
  (void)cddp__break(g, CDDP_ABORTED);
}
#endif
