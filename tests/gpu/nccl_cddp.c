/* nccl_cddp.c - cddp.h as tests/gpu/nccl_*.c link it: compiled once, for all of them.

   Chunks and staging buffers are small, so that small models need many of each. Constants that
   single tests change are variables. The functions of nccl_cddp.h set or tell what no public call
   does: all private names that these tests need are in this file. */
#define CDDP_CUDA
#define CDDP_IMPLEMENTATION
#include <time.h>

double nccl_left_s = 2;
int nccl_comm_min_ranks = 2;
void (*nccl_at_point)(const char *name);
int (*nccl_nanosleep)(const struct timespec *t, struct timespec *left);

static void at_point(const char *name) {
  if (nccl_at_point != NULL) nccl_at_point(name);
}
static int sleep_or_test(const struct timespec *t, struct timespec *left) {
  return nccl_nanosleep != NULL ? nccl_nanosleep(t, left) : nanosleep(t, left);
}

#define CDDP__FILE_STAGING ((size_t)12288) /* bytes: a checkpoint is copied in many pieces */
#define CDDP__WARM_UP ((size_t)1 << 18)
#define CDDP__SHARD_CHUNK ((size_t)700)
#define CDDP__GRACE_LEFT_S nccl_left_s
#define CDDP__COMM_MIN_RANKS nccl_comm_min_ranks
#define CDDP__POINT(name) at_point(name)
#define nanosleep sleep_or_test
#include "../../cddp.h"
#undef nanosleep

#include "nccl_cddp.h"

const double nccl_calls_s = CDDP__CALLS_S;

#if defined(__has_attribute)
#if __has_attribute(no_sanitize)
__attribute__((no_sanitize("thread"))) /* the watcher reads timeout_s */
#endif
#endif
void nccl_set_timeout(cddp_group *g, double seconds) {
  g->timeout_s = seconds;
}

bool nccl_rank_gone(cddp_group *g, int rank) { return cddp__rank_gone(g, rank); }
cddp_result nccl_check_group(cddp_group *g) { return cddp__check_group(g); }
const cddp_kernels *nccl_kernels(void) { return cddp__registered_kernels; }

cddp_result nccl_poll(cddp_group *g, double start) {
  cddp__wait w;
  cddp__wait_begin(&w, g->timeout_s, 0);
  w.since = start;
  return cddp__device_poll(cddp__device_of(g), &w, "a test");
}

bool nccl_age_operation(cddp_group *g) {
  cddp__device *device = cddp__device_of(g);
  bool found;
  pthread_mutex_lock(&device->lock);
  found = device->issued != device->seen;
  if (found) device->markers[device->seen % CDDP__MARKER_COUNT].since -= 10 * g->timeout_s;
  pthread_mutex_unlock(&device->lock);
  return found;
}

bool nccl_busy(cddp_group *g) { return cddp__device_busy(cddp__device_of(g)) > 0; }

void nccl_enter(cddp_group *g) { pthread_mutex_lock(&cddp__device_of(g)->issue_lock); }
void nccl_leave(cddp_group *g) { pthread_mutex_unlock(&cddp__device_of(g)->issue_lock); }

void nccl_meet(cddp_group *g) { (void)cddp__consensus(g, CDDP_OK, NULL, 0, NULL); }

void nccl_break(cddp_group *g, const char *text) {
  cddp__fail(CDDP_ABORTED, "%s", text);
  (void)cddp__break(g, CDDP_ABORTED);
}
