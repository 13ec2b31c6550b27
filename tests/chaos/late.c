/* late.c - Time as connections between hosts see it: a rank that is late to read, however long, is
   no dead one.

   The 20 s after which a host that answers nothing is lost are 1 s here (inside.h), so that a few
   seconds are very late. A receiver sleeps while small messages or one large message wait for it,
   a rank is stopped in the middle of a collective, a receiver leaves before its sender has
   looked: no rank may be taken for lost. Hosts that are really cut off: tests/ranks/netns.sh. */
#include "../../cddp.h"

#include "../inside.h"
#include "../ranks.h"

static bool naps; /* this rank, behind each send, before it looks at anything else */

static void nap_at(const char *point) {
  if (naps && strcmp(point, "sent") == 0) ranks_sleep(0.02);
}

/* Rank 0 sends at once what rank 1 receives seconds later: small messages, or one that is more than
   the system takes. */
static int receive_late(cddp_group *g, void *arg) {
  size_t n = *(const size_t *)arg, turns = n > 1 ? 1 : 20000, k, i, bad = 0;
  float *x = (float *)malloc(n * sizeof *x);
  if (cddp_rank(g) == 1) ranks_sleep(5);
  for (k = 0; k < turns && test_failures == 0; k++) {
    for (i = 0; i < n; i++) x[i] = cddp_rank(g) == 0 ? (float)(i + k) : 0;
    if (cddp_rank(g) == 0)
      CHECK_OK(cddp_send(g, x, n, CDDP_F32, 1, 0, NULL));
    else
      CHECK_OK(cddp_recv(g, x, n, CDDP_F32, 0, 0, NULL));
    for (i = 0; i < n; i++) bad += x[i] != (float)(i + k);
  }
  CHECK_EQ(bad, 0);
  CHECK_OK(cddp_barrier(g));
  free(x);
  return 0;
}

static void test_late_receiver(void) {
  size_t counts[] = {1, 8000000};
  int i;
  setenv("TEST_HOSTS", "ab", 1);
  for (i = 0; i < 2; i++) CHECK_OK(ranks_run(receive_late, &counts[i], 2, false));
}

/* Rank 1 leaves as soon as it has received, before rank 0 comes out of its send. */
static int leave_at_once(cddp_group *g, void *arg) {
  cddp_group *two;
  float x = 1;
  int i;
  (void)arg;
  for (i = 0; i < 20 && test_failures == 0; i++) {
    CHECK_OK(cddp_group_split(g, 0, cddp_rank(g), &two));
    CHECK_OK(cddp_barrier(two));
    naps = cddp_rank(g) == 0;
    if (naps)
      CHECK_OK(cddp_send(two, &x, 1, CDDP_F32, 1, 0, NULL));
    else
      CHECK_OK(cddp_recv(two, &x, 1, CDDP_F32, 0, 0, NULL));
    naps = false;
    cddp_destroy(two);
  }
  return 0;
}

static void test_receiver_leaves(void) {
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(leave_at_once, NULL, 2, false));
}

/* Rank 1 is stopped in the middle of a collective, for seconds, and goes on. */
static int stop_midway(cddp_group *g, void *arg) {
  enum { N = 12000000 };
  float *x = (float *)malloc(N * sizeof *x);
  pid_t *pid = (pid_t *)arg;
  int i, bad = 0;
  for (i = 0; i < N; i++) x[i] = 1;
  CHECK_OK(cddp_barrier(g));
  if (cddp_rank(g) == 1) {
    *pid = fork();
    if (*pid == 0) { /* stops its parent, and lets it go on */
      ranks_sleep(RANKS_WITHIN(0.005));
      kill(getppid(), SIGSTOP);
      ranks_sleep(4);
      kill(getppid(), SIGCONT);
      _exit(0);
    }
  }
  for (i = 0; i < 3; i++) CHECK_OK(cddp_all_reduce(g, x, N, CDDP_F32, CDDP_AVG, NULL));
  for (i = 0; i < N; i++) bad += x[i] != 1;
  CHECK_EQ(bad, 0);
  CHECK_OK(cddp_barrier(g));
  if (cddp_rank(g) == 1) waitpid(*pid, NULL, 0);
  free(x);
  return 0;
}

static void test_stopped_midway(void) {
  pid_t pid = 0;
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(stop_midway, &pid, 2, false));
}

int main(void) {
  inside_at_point = nap_at;
  inside_unanswered_s = 1;
  setenv("CDDP_TIMEOUT_S", "120", 0);
  RUN(test_late_receiver);
  RUN(test_receiver_leaves);
  RUN(test_stopped_midway);
  return TEST_END();
}
