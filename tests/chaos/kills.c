/* kills.c - ranks that die at any moment, and ranks that stop.

     build/plain/kills --seeds 1000     so many random deaths instead of 20
     build/plain/kills --seed 17        one of them again, with its survivors' error texts

   A seed draws 2 to 8 rank processes, what they do all the time, which of them dies, how (SIGKILL
   from outside at a random moment; SIGSEGV, abort, _exit in the middle of its own work) and when.
   Every survivor must return CDDP_PEER_LOST naming the dead rank's pid, must have had right results
   before, must get out of cddp_destroy, and make a new group with the others. The time from the
   death to each survivor's return is measured. */
#include "../../cddp.h"

#include "../ranks.h"

#include <arpa/inet.h>
#include <sys/prctl.h>

#define MOST 8
#define LIMIT_S 2.0 /* for a survivor to return; the machine may be loaded. The goal is 0.5 */
#define STAGED 6000
#define DIRECT 40000

enum { RENDEZVOUS, SMALL, STAGE, SHARED, BETWEEN, STEPS, SUBGROUP, THREADS, MAIL, PHASES };
static const char *const phase_names[] = {"rendezvous", "small", "staged", "direct",
                                          "between", "ddp", "sub-group", "threads", "p2p"};
enum { OUTSIDE, KILL, SEGV, ABORT, EXIT, HOWS };

typedef struct survivor {
  double told;       /* when the failing call returned, test_now() */
  cddp_result result;
  char text[512];
  int wrong;         /* results that were not right */
  bool again;        /* the next call failed alike, at once */
  bool left;         /* cddp_destroy has returned */
  bool anew;         /* a new group of the survivors has reduced */
} survivor;

typedef struct plan {
  uint64_t seed;
  int n, phase, victim, how, port, second_port;
  int moment; /* the victim's own death: after so many calls */
  double delay; /* from outside: seconds after all run */
} plan;

typedef struct board {
  plan p;
  double died; /* test_now() of the death */
  int running; /* ranks in their work */
  pid_t pids[MOST];
  survivor survivors[MOST];
} board;

static board *shared;

static plan draw(uint64_t seed) {
  plan p;
  memset(&p, 0, sizeof p);
  p.seed = seed;
  p.n = 2 + (int)(ranks_mix(seed, 1, 0) % 7);
  p.phase = (int)(ranks_mix(seed, 2, 0) % PHASES);
  p.victim = (int)(ranks_mix(seed, 3, 0) % (uint64_t)p.n);
  p.how = (int)(ranks_mix(seed, 4, 0) % (2 * HOWS));
  if (p.how >= HOWS || p.phase == RENDEZVOUS) p.how = OUTSIDE; /* half of them */
  p.moment = (int)(ranks_mix(seed, 5, 0) % 40);
  p.delay = (double)(ranks_mix(seed, 6, 0) % 1000) * (p.phase == RENDEZVOUS ? 8e-6 : 4e-6);
  p.port = ranks_free_port();
  p.second_port = ranks_free_port();
  return p;
}

static void die(int how) {
  shared->died = test_now();
  switch (how) {
  case KILL: raise(SIGKILL); break;
  case SEGV: /* without what a sanitizer would print */
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
    break;
  case ABORT: abort();
  default: _exit(3);
  }
}

/* --- what ranks do until one dies ------------------------------------------------------------- */

typedef struct worker {
  cddp_group *g;
  int rank; /* in the world */
  int calls, wrong;
  float *buf;
  size_t count;
  bool main;
} worker;

/* Before each call: the victim's turn may have come. */
static void maybe_die(worker *k) {
  const plan *p = &shared->p;
  if (k->main && k->rank == p->victim && p->how != OUTSIDE && k->calls >= p->moment) die(p->how);
  k->calls++;
}

static cddp_result reduce_once(worker *k) {
  int n = cddp_world_size(k->g), me = cddp_rank(k->g), round = k->calls % 50;
  float want = (float)(n * (n + 1) / 2 * (round + 1));
  cddp_result r;
  size_t i;
  for (i = 0; i < k->count; i++) k->buf[i] = (float)((me + 1) * (round + 1));
  maybe_die(k);
  r = cddp_all_reduce(k->g, k->buf, k->count, CDDP_F32, CDDP_SUM, NULL);
  if (r != CDDP_OK) return r;
  for (i = 0; i < k->count; i++) k->wrong += k->buf[i] != want;
  return r;
}

static cddp_result mail_once(worker *k) { /* round the ring */
  int n = cddp_world_size(k->g), me = cddp_rank(k->g), from = (me + n - 1) % n;
  float *in = k->buf, *out = k->buf + k->count / 2;
  size_t count = k->calls % 3 == 0 ? k->count / 2 : 5, i;
  cddp_work *w = NULL;
  cddp_result r, r2;
  for (i = 0; i < count; i++) out[i] = (float)(me * 7 + k->calls % 100);
  maybe_die(k);
  if ((r = cddp_recv(k->g, in, count, CDDP_F32, from, 1, &w)) != CDDP_OK) return r;
  r = cddp_send(k->g, out, count, CDDP_F32, (me + 1) % n, 1, NULL);
  r2 = cddp_wait(w);
  for (i = 0; r2 == CDDP_OK && i < count; i++)
    k->wrong += in[i] != (float)(from * 7 + (k->calls - 1) % 100);
  return r != CDDP_OK ? r : r2;
}

static cddp_result until_failure(worker *k, cddp_result (*once)(worker *)) {
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK) r = once(k);
  return r;
}

static cddp_result between_once(worker *k) { /* mostly outside of cddp */
  ranks_sleep((double)(ranks_mix(shared->p.seed, (uint64_t)k->calls, (uint64_t)k->rank) % 400) *
              1e-6);
  maybe_die(k);
  return cddp_barrier(k->g);
}

static cddp_result steps_until_failure(worker *k) {
  enum { PARAMS = 4, EACH = 3000 };
  static float data[PARAMS][EACH];
  cddp_param params[PARAMS];
  cddp_sgd_desc o;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_result r;
  int i, step;
  memset(params, 0, sizeof params);
  memset(&o, 0, sizeof o);
  memset(&desc, 0, sizeof desc);
  o.lr = 0.5;
  o.momentum = shared->p.seed % 2 ? 0.5 : 0;
  desc.bucket_cap_mb = 0.02;
  for (i = 0; i < PARAMS; i++) {
    params[i].data = data[i];
    params[i].count = EACH;
  }
  r = cddp_ddp_create(&d, k->g, params, PARAMS, &desc);
  if (r == CDDP_OK) r = cddp_sgd_create(&s, params, PARAMS, &o);
  for (step = 0; r == CDDP_OK; step++) {
    for (i = PARAMS - 1; r == CDDP_OK && i >= 0; i--) {
      maybe_die(k);
      ((float *)params[i].grad)[0] += 1;
      r = cddp_ddp_ready(d, i);
    }
    maybe_die(k);
    if (r != CDDP_OK) break;
    r = step % 3 == 2 ? cddp_ddp_wait(d) : cddp_ddp_step(d, s);
    if (r == CDDP_OK && step % 3 == 2) {
      for (i = 0; i < PARAMS; i++) k->wrong += ((float *)params[i].grad)[0] != 1;
      r = cddp_optim_step(s);
      cddp_optim_zero_grad(s);
    }
  }
  shared->survivors[k->rank].told = test_now();
  snprintf(shared->survivors[k->rank].text, sizeof shared->survivors[0].text, "%s", cddp_error());
  shared->survivors[k->rank].again = cddp_ddp_wait(d) == r || d == NULL;
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return r;
}

static cddp_result subgroup_until_failure(worker *k) {
  worker inner = *k;
  cddp_group *world = k->g, *half = NULL;
  cddp_result r = cddp_group_split(world, k->rank % 2, k->rank, &half);
  inner.g = half;
  while (r == CDDP_OK) {
    int i;
    for (i = 0; r == CDDP_OK && i < 5; i++) r = reduce_once(&inner);
    if (r == CDDP_OK) r = cddp_barrier(world);
  }
  k->wrong = inner.wrong;
  shared->survivors[k->rank].told = test_now();
  snprintf(shared->survivors[k->rank].text, sizeof shared->survivors[0].text, "%s", cddp_error());
  shared->survivors[k->rank].again = true; /* the failed one may be either group */
  cddp_destroy(half);
  return r;
}

static void *other_thread(void *arg) {
  worker *k = (worker *)arg;
  cddp_result r = until_failure(k, reduce_once);
  char pid[32];
  snprintf(pid, sizeof pid, "(pid %d", (int)shared->pids[shared->p.victim]);
  if (r != CDDP_PEER_LOST || strstr(cddp_error(), pid) == NULL) k->wrong++;
  return NULL;
}

static cddp_result threads_until_failure(worker *k) {
  static float more[STAGED];
  worker other = *k;
  pthread_t thread;
  cddp_result r = cddp_group_split(k->g, 0, k->rank, &other.g);
  if (r != CDDP_OK) return r;
  other.buf = more;
  other.count = STAGED;
  other.main = false;
  if (pthread_create(&thread, NULL, other_thread, &other) != 0) return CDDP_SYSTEM;
  r = until_failure(k, reduce_once);
  snprintf(shared->survivors[k->rank].text, sizeof shared->survivors[0].text, "%s", cddp_error());
  pthread_join(thread, NULL);
  shared->survivors[k->rank].told = test_now(); /* both threads have been told */
  k->wrong += other.wrong;
  cddp_destroy(other.g);
  return r;
}

static cddp_result work(worker *k) {
  static float mine[STAGED];
  cddp_result r;
  k->buf = mine;
  k->count = STAGED;
  switch (shared->p.phase) {
  case SHARED:
  case MAIL:
    k->count = DIRECT;
    k->buf = (float *)cddp_alloc(k->g, DIRECT * sizeof(float));
    if (k->buf == NULL) return CDDP_OUT_OF_MEMORY;
    r = until_failure(k, shared->p.phase == MAIL ? mail_once : reduce_once);
    break;
  case BETWEEN: return until_failure(k, between_once);
  case STEPS: return steps_until_failure(k);
  case SUBGROUP:
    k->count = 1 + shared->p.seed % STAGED;
    return subgroup_until_failure(k);
  case THREADS:
    k->count = 3;
    return threads_until_failure(k);
  case STAGE: return until_failure(k, reduce_once);
  default: k->count = 1 + shared->p.seed % 3; return until_failure(k, reduce_once);
  }
  return r;
}

/* --- a rank's life ---- */

static cddp_result start(cddp_group **g, int rank, int n, int port, double timeout_s) {
  cddp_group_desc d;
  char url[64];
  memset(&d, 0, sizeof d);
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
  d.init_method = url;
  d.rank = rank;
  d.world_size = n;
  d.timeout_s = timeout_s;
  return cddp_init(g, &d);
}

/* The survivors meet again, as a group of n - 1. */
static bool meet_again(int rank) {
  const plan *p = &shared->p;
  int n = p->n - 1, me = rank - (rank > p->victim);
  cddp_group *g = NULL;
  float x = (float)me;
  bool good = start(&g, me, n, p->second_port, 20) == CDDP_OK &&
              cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL) == CDDP_OK &&
              x == (float)(n * (n - 1) / 2);
  if (!good) fprintf(stderr, "rank %d: the new group: %s\n", rank, cddp_error());
  cddp_destroy(g);
  return good;
}

static int life(int rank, void *arg) {
  survivor *s = &shared->survivors[rank];
  double timeout_s = shared->p.phase == RENDEZVOUS ? 1.5 * (RANKS_SLOW ? 3 : 1) : 30;
  cddp_group *g = NULL;
  worker k;
  cddp_result r;
  ranks_place(rank);
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  memset(&k, 0, sizeof k);
  k.rank = rank;
  k.main = true;
  if (shared->p.phase == RENDEZVOUS) __atomic_add_fetch(&shared->running, 1, __ATOMIC_SEQ_CST);
  r = start(&g, rank, shared->p.n, shared->p.port, timeout_s);
  k.g = g;
  if (r == CDDP_OK && shared->p.phase != RENDEZVOUS) {
    __atomic_add_fetch(&shared->running, 1, __ATOMIC_SEQ_CST);
    r = work(&k);
  } else if (r == CDDP_OK) {
    r = work(&k); /* it died just too late: a step with it fails */
  }
  if (s->told == 0) {
    s->told = test_now();
    snprintf(s->text, sizeof s->text, "%s", cddp_error());
  }
  s->result = r;
  s->wrong = k.wrong;
  if (!s->again) s->again = g == NULL || cddp_barrier(g) == r;
  cddp_destroy(g);
  s->left = true;
  while (shared->p.victim < 0) pause(); /* all are killed, one a moment before the other */
  s->anew = meet_again(rank);
  return 0;
}

/* --- a seed ---- */

static double *latencies;
static int latency_count, latency_room, late_meetings;

static void note_latency(double seconds) {
  if (latency_count == latency_room) {
    latency_room = latency_room ? 2 * latency_room : 256;
    latencies = (double *)realloc(latencies, (size_t)latency_room * sizeof *latencies);
    if (latencies == NULL) exit(1);
  }
  latencies[latency_count++] = seconds;
}

static void judge_survivor(int rank, int status, bool verbose) {
  const plan *p = &shared->p;
  const survivor *s = &shared->survivors[rank];
  char pid[32];
  bool meeting = p->phase == RENDEZVOUS && s->result != CDDP_PEER_LOST;
  int before = test_failures;
  snprintf(pid, sizeof pid, "(pid %d", (int)shared->pids[p->victim]);
  if (verbose)
    fprintf(stderr, "rank %d: %s after %.4f s: %s\n", rank, cddp_result_name(s->result),
            s->told - shared->died, s->text);
  CHECK(status == 0);
  CHECK(s->left);
  CHECK(s->again);
  CHECK(s->anew);
  CHECK_EQ(s->wrong, 0);
  if (meeting) { /* who died before anybody knew it is late; without rank 0 there is no store */
    CHECK_IS(s->result, CDDP_TIMEOUT);
    late_meetings++;
  } else {
    CHECK_IS(s->result, CDDP_PEER_LOST);
    if (s->told > 0) note_latency(s->told - shared->died);
    CHECK(s->told - shared->died < RANKS_WITHIN(LIMIT_S));
    CHECK(strstr(s->text, pid) != NULL ||
          (p->phase == RENDEZVOUS && strstr(s->text, "during the rendezvous") != NULL));
  }
  if (test_failures != before)
    fprintf(stderr,
            "  in seed %llu (%s, %d ranks, rank %d dies, how %d): rank %d: %s after %.3f s: %s\n",
            (unsigned long long)p->seed, phase_names[p->phase], p->n, p->victim, p->how, rank,
            cddp_result_name(s->result), s->told - shared->died, s->text);
}

static void run_seed(uint64_t seed, bool verbose) {
  pid_t pids[MOST];
  int status[MOST], i;
  double until = test_now() + 20;
  memset(shared, 0, sizeof *shared);
  shared->p = draw(seed);
  for (i = 0; i < shared->p.n; i++) {
    pids[i] = shared->pids[i] = ranks_fork(life, i, NULL);
    if (pids[i] < 0) exit(1);
  }
  if (shared->p.how == OUTSIDE) {
    while (__atomic_load_n(&shared->running, __ATOMIC_SEQ_CST) < shared->p.n && test_now() < until)
      ranks_sleep(1e-4);
    ranks_sleep(shared->p.delay);
    shared->died = test_now();
    kill(pids[shared->p.victim], SIGKILL);
  }
  ranks_join(pids, shared->p.n, 60, status);
  for (i = 0; i < shared->p.n; i++)
    if (i != shared->p.victim) judge_survivor(i, status[i], verbose);
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(double q) {
  return latencies[(int)(q * (double)(latency_count - 1))] * 1e3;
}

static int seeds = RANKS_SLOW ? 8 : 20;
static uint64_t first_seed = 1;

static void test_kills(void) {
  int i;
  for (i = 0; i < seeds; i++) run_seed(first_seed + (uint64_t)i, seeds == 1);
  CHECK(latency_count > 0);
  if (latency_count == 0) return;
  qsort(latencies, (size_t)latency_count, sizeof *latencies, by_size);
  fprintf(stderr,
          "  %d deaths, %d survivors told: ms min %.1f, median %.1f, 90%% %.1f, 99%% %.1f, "
          "max %.1f;"
          " %d timed out meeting\n",
          seeds, latency_count, quantile(0), quantile(0.5), quantile(0.9), quantile(0.99),
          quantile(1), late_meetings);
}

/* --- stopped ---- */

static int stopped_life(int rank, void *arg) {
  cddp_group *g = NULL;
  float x = 1;
  cddp_result r;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  r = start(&g, rank, 3, shared->p.port, 1.0);
  if (r == CDDP_OK) r = cddp_barrier(g);
  if (r == CDDP_OK && rank == 1) raise(SIGSTOP);
  if (r == CDDP_OK) r = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL);
  shared->survivors[rank].result = r;
  snprintf(shared->survivors[rank].text, sizeof shared->survivors[rank].text, "%s", cddp_error());
  cddp_destroy(g);
  return 0;
}

static void test_stopped(void) {
  pid_t pids[3];
  int status[3], i;
  double begin = test_now();
  memset(shared, 0, sizeof *shared);
  shared->p.port = ranks_free_port();
  for (i = 0; i < 3; i++) pids[i] = shared->pids[i] = ranks_fork(stopped_life, i, NULL);
  for (i = 0; i < 3; i += 2) {
    ranks_join(&pids[i], 1, 30, &status[i]);
    CHECK_IS(shared->survivors[i].result, CDDP_TIMEOUT);
    CHECK(strstr(shared->survivors[i].text, "rank 1 (pid ") != NULL);
  }
  CHECK(test_now() - begin < RANKS_WITHIN(5.0));
  kill(pids[1], SIGCONT);
  ranks_join(&pids[1], 1, 30, &status[1]);
  CHECK_IS(shared->survivors[1].result, CDDP_TIMEOUT); /* what the others have said */
}

/* --- all at once ---- */

static int cddp_entries(const char *directory) { /* files of ours */
  DIR *d = opendir(directory);
  struct dirent *e;
  int n = 0;
  while (d != NULL && (e = readdir(d)) != NULL)
    n += strncmp(e->d_name, "cddp-run.", 9) != 0 && strstr(e->d_name, "cddp") != NULL;
  if (d != NULL) closedir(d);
  return n;
}

static bool port_answers(int port) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  bool yes;
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_port = htons((uint16_t)port);
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  yes = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
  close(fd);
  return yes;
}

static void test_all_killed(void) {
  const char *tmp = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";
  int shm = cddp_entries("/dev/shm"), files = cddp_entries(tmp), fds = ranks_open_fds(), round, i;
  for (round = 0; round < 6; round++) {
    pid_t pids[4];
    int status[4];
    memset(shared, 0, sizeof *shared);
    shared->p.n = 4;
    shared->p.victim = -1;
    shared->p.phase = round == 0 ? RENDEZVOUS : round;
    shared->p.port = ranks_free_port();
    shared->p.seed = (uint64_t)round;
    for (i = 0; i < 4; i++) pids[i] = ranks_fork(life, i, NULL);
    while (__atomic_load_n(&shared->running, __ATOMIC_SEQ_CST) < 4) ranks_sleep(1e-4);
    for (i = 0; i < 4; i++) kill(pids[i], SIGKILL);
    ranks_join(pids, 4, 30, status);
    for (i = 0; i < 4; i++) CHECK(WIFSIGNALED(status[i]) && WTERMSIG(status[i]) == SIGKILL);
    CHECK(!port_answers(shared->p.port));
  }
  CHECK_EQ(cddp_entries("/dev/shm"), shm);
  CHECK_EQ(cddp_entries(tmp), files);
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_no_children());
}

int main(int argc, char **argv) {
  shared = (board *)ranks_shared(sizeof *shared);
  if (argc == 3 && strcmp(argv[1], "--seeds") == 0) seeds = atoi(argv[2]);
  if (argc == 3 && strcmp(argv[1], "--seed") == 0) {
    first_seed = strtoull(argv[2], NULL, 10);
    seeds = 1;
  }
  RUN(test_kills);
  if (seeds != 1) {
    RUN(test_stopped);
    RUN(test_all_killed);
  }
  free(latencies);
  return TEST_END();
}
