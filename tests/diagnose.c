/* What failures say: how a rank died, who called what and where, what the flight recorder keeps. */
#include "../cddp.h"

#include "ranks.h"

enum { RANKS = 3 };

typedef struct heard { /* by one rank of a job; shared */
  int line;            /* of its own call */
  cddp_result result, again;
  char text[512];
} heard;

static heard *all; /* [RANKS] */

static void note(int rank, int line, cddp_result r) {
  all[rank].line = line;
  all[rank].result = r;
  snprintf(all[rank].text, sizeof all[rank].text, "%s", cddp_error());
}

static __attribute__((format(printf, 2, 3))) bool says(int rank, const char *format, ...) {
  char want[256];
  va_list args;
  va_start(args, format);
  vsnprintf(want, sizeof want, format, args);
  va_end(args);
  if (strstr(all[rank].text, want) != NULL) return true;
  fprintf(stderr, "  rank %d does not say \"%s\" but \"%s\"\n", rank, want, all[rank].text);
  return false;
}

/* --- disagreement --- */

typedef struct disagreement {
  const char *name;
  int (*odd)(cddp_group *g, float *x);  /* what rank 1 calls; returns its line */
  int (*even)(cddp_group *g, float *x); /* what the others call */
  const char *odd_says, *even_says;
} disagreement;

#define CALL(name, call)                                                                           \
  static int name(cddp_group *g, float *x) {                                                       \
    (void)x;                                                                                       \
    note(cddp_rank(g), __LINE__, call);                                                            \
    return __LINE__;                                                                               \
  }
CALL(sum_4, cddp_all_reduce(g, x, 4, CDDP_F32, CDDP_SUM, NULL))
CALL(sum_5, cddp_all_reduce(g, x, 5, CDDP_F32, CDDP_SUM, NULL))
CALL(sum_i32, cddp_all_reduce(g, x, 4, CDDP_I32, CDDP_SUM, NULL))
CALL(max_4, cddp_all_reduce(g, x, 4, CDDP_F32, CDDP_MAX, NULL))
CALL(from_0, cddp_broadcast(g, x, 4, CDDP_F32, 0, NULL))
CALL(from_1, cddp_broadcast(g, x, 4, CDDP_F32, 1, NULL))
CALL(barrier, cddp_barrier(g))
CALL(large, cddp_all_reduce(g, x, 100000, CDDP_F32, CDDP_SUM, NULL))
CALL(larger, cddp_all_reduce(g, x, 100001, CDDP_F32, CDDP_SUM, NULL))

static int pairs(cddp_group *g, float *x) {
  cddp_group *sub = NULL;
  int list[2] = {0, 1};
  (void)x;
  note(cddp_rank(g), __LINE__, cddp_group_new(g, list, 2, &sub));
  return 0;
}

static int other_pairs(cddp_group *g, float *x) {
  cddp_group *sub = NULL;
  int list[2] = {1, 2};
  (void)x;
  note(cddp_rank(g), __LINE__, cddp_group_new(g, list, 2, &sub));
  return 0;
}

static const disagreement disagreements[] = {
    {"operation", from_0, sum_4, "broadcast(count 4, f32, root 0)",
     "all_reduce(count 4, f32, sum)"},
    {"count", sum_5, sum_4, "all_reduce(count 5, f32, sum)", "all_reduce(count 4, f32, sum)"},
    {"large count", larger, large, "all_reduce(count 100001, f32, sum)",
     "all_reduce(count 100000, f32, sum)"},
    {"dtype", sum_i32, sum_4, "all_reduce(count 4, i32, sum)", "all_reduce(count 4, f32, sum)"},
    {"op", max_4, sum_4, "all_reduce(count 4, f32, max)", "all_reduce(count 4, f32, sum)"},
    {"root", from_1, from_0, "broadcast(count 4, f32, root 1)", "broadcast(count 4, f32, root 0)"},
    {"barrier", barrier, sum_4, "barrier", "all_reduce(count 4, f32, sum)"},
    {"group", other_pairs, pairs, "group_split", "group_split"},
};

static int disagree(cddp_group *g, void *arg) {
  const disagreement *d = (const disagreement *)arg;
  float *x = (float *)calloc(100001, sizeof *x), one = 1;
  int rank = cddp_rank(g);
  if (x == NULL) return 1;
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
  (rank == 1 ? d->odd : d->even)(g, x);
  all[rank].again = cddp_barrier(g);
  CHECK(strcmp(cddp_error(), all[rank].text) == 0);
  free(x);
  return 0;
}

static void check_disagreement(const disagreement *d, bool threads) {
  int p;
  memset(all, 0, RANKS * sizeof *all);
  CHECK_OK(ranks_run(disagree, (void *)(uintptr_t)d, RANKS, threads));
  for (p = 0; p < RANKS; p++) {
    CHECK_IS(all[p].result, CDDP_MISMATCH);
    CHECK_IS(all[p].again, CDDP_MISMATCH);
    CHECK(says(p, "call 2 of the group"));
    CHECK(says(p, "rank 0 called %s at %s:%d, rank 1 called %s at %s:%d", d->even_says, __FILE__,
               all[0].line, d->odd_says, __FILE__, all[1].line));
    CHECK(strstr(all[p].text, "rank 2 called") == NULL); /* it agrees with rank 0 */
  }
}

static void test_mismatch_names_calls_and_lines(void) {
  size_t i;
  for (i = 0; i < sizeof disagreements / sizeof *disagreements; i++) {
    check_disagreement(&disagreements[i], false);
    check_disagreement(&disagreements[i], true);
  }
}

static int disagree_later(cddp_group *g, void *arg) {
  cddp_work *w = NULL;
  float x[8] = {0};
  int rank = cddp_rank(g), line = __LINE__ + 1;
  cddp_result r = cddp_all_reduce(g, x, rank == 1 ? 8 : 7, CDDP_F32, CDDP_SUM, &w);
  (void)arg;
  CHECK_OK(r);
  note(rank, line, cddp_wait(w));
  return 0;
}

static void test_asynchronous_calls_have_a_line_too(void) {
  int p;
  memset(all, 0, RANKS * sizeof *all);
  CHECK_OK(ranks_run(disagree_later, NULL, RANKS, false));
  for (p = 0; p < RANKS; p++) {
    CHECK_IS(all[p].result, CDDP_MISMATCH);
    CHECK(says(p, "rank 1 called all_reduce(count 8, f32, sum) at %s:%d", __FILE__, all[1].line));
  }
}

static int no_macro(cddp_group *g, void *arg) {
  float x[8] = {0};
  int rank = cddp_rank(g);
  (void)arg;
  CHECK_OK(cddp_barrier(g)); /* its line must not be taken for the next call's */
  note(rank, 0, (cddp_all_reduce)(g, x, rank == 1 ? 8 : 7, CDDP_F32, CDDP_SUM, NULL));
  return 0;
}

static void test_calls_past_the_macros_have_none(void) {
  int p;
  memset(all, 0, RANKS * sizeof *all);
  CHECK_OK(ranks_run(no_macro, NULL, RANKS, false));
  for (p = 0; p < RANKS; p++) {
    CHECK_IS(all[p].result, CDDP_MISMATCH);
    CHECK(says(p, "rank 0 called all_reduce(count 7, f32, sum), rank 1"));
  }
}

static int two_models(cddp_group *g, void *arg) {
  float w[4] = {0}, b[4] = {0};
  cddp_param p[2] = {{"weight", w, NULL, 4, CDDP_F32}, {"bias", b, NULL, 4, CDDP_F32}};
  cddp_ddp *d = NULL;
  int rank = cddp_rank(g);
  (void)arg;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  CHECK_OK(cddp_ddp_ready(d, 1));
  if (rank != 2) CHECK_OK(cddp_ddp_ready(d, 0));
  note(rank, 0, cddp_ddp_wait(d));
  cddp_ddp_destroy(d);
  return 0;
}

static void test_a_parameter_ready_on_some_ranks(void) {
  int p;
  memset(all, 0, RANKS * sizeof *all);
  CHECK_OK(ranks_run(two_models, NULL, RANKS, false));
  for (p = 0; p < RANKS; p++) {
    CHECK_IS(all[p].result, CDDP_MISMATCH);
    CHECK(says(p, "\"weight\" (on rank 2)"));
  }
}

/* --- deaths --- */

typedef enum death { KILLED, SEGFAULT, EXITED, DEATHS } death;

static int die(int rank, void *arg) {
  cddp_group *g;
  float x = 1;
  struct {
    int how, reap;
  } *job = arg;
  if (cddp_init(&g, NULL) != CDDP_OK || cddp_barrier(g) != CDDP_OK) return 1;
  if (rank == 1) {
    if (job->how == EXITED) _exit(7);
    signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would make it an exit */
    kill(getpid(), job->how == KILLED ? SIGKILL : SIGSEGV);
    pause();
  }
  note(rank, 0, cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  all[rank].again = cddp_barrier(g);
  cddp_destroy(g);
  return 0;
}

/* reap: whether the parent takes the dead child's status at once, or only at the end. */
static void check_death(death how, bool reap) {
  static const char *const words[] = {"was killed by signal 9 (SIGKILL)",
                                      "was killed by signal 11 (SIGSEGV)", "exited with code 7"};
  struct {
    int how, reap;
  } job = {(int)how, reap};
  pid_t pid[RANKS];
  int status[RANKS], i, port = ranks_free_port();
  memset(all, 0, RANKS * sizeof *all);
  for (i = 0; i < RANKS; i++) {
    ranks_environment(i, RANKS, port);
    pid[i] = ranks_fork(die, i, &job);
  }
  if (!reap) { /* ranks 0 and 2 end while rank 1 is a zombie */
    ranks_join(&pid[0], 1, 20, &status[0]);
    ranks_join(&pid[2], 1, 20, &status[2]);
    ranks_join(&pid[1], 1, 20, &status[1]);
  } else {
    ranks_join(pid, RANKS, 20, status);
  }
  unsetenv("RANK"), unsetenv("WORLD_SIZE"), unsetenv("LOCAL_RANK"), unsetenv("LOCAL_WORLD_SIZE");
  unsetenv("MASTER_ADDR"), unsetenv("MASTER_PORT");
  for (i = 0; i < RANKS; i += 2) {
    CHECK_EQ(status[i], 0);
    CHECK_IS(all[i].result, CDDP_PEER_LOST);
    CHECK_IS(all[i].again, CDDP_PEER_LOST);
    CHECK(says(i, "rank 1 (pid %d on ", (int)pid[1]));
    CHECK(strstr(all[i].text, words[how]) != NULL || !says(i, "%s", words[how]));
    CHECK(says(i, "all_reduce(count 1, f32, sum) at %s:", __FILE__));
    CHECK(says(i, "call 2 of the group"));
  }
}

static void test_a_death_says_how(void) {
  int how;
  for (how = 0; how < DEATHS; how++) check_death((death)how, false);
}

/* The parent's wait may come first, or in between: then kernels before 6.15 no longer know. */
static void test_a_death_that_is_reaped(void) {
  int i;
  for (i = 0; i < 5; i++) check_death(i % 2 ? KILLED : EXITED, true);
}

/* --- the flight recorder --- */

typedef struct ring {
  cddp_record_header head;
  cddp_record records[CDDP_RECORDS];
} ring;

static bool read_ring(const char *dir, int rank, ring *out) { /* the only job's file of that rank */
  char end[16], path[600];
  DIR *d = opendir(dir);
  struct dirent *e;
  FILE *in = NULL;
  bool ok;
  snprintf(end, sizeof end, "-%d.rec", rank);
  while (d != NULL && in == NULL && (e = readdir(d)) != NULL) {
    size_t n = strlen(e->d_name), m = strlen(end);
    if (n < m || strcmp(e->d_name + n - m, end) != 0) continue;
    snprintf(path, sizeof path, "%s/%.256s", dir, e->d_name);
    in = fopen(path, "rb");
  }
  if (d != NULL) closedir(d);
  ok = in != NULL && fread(out, sizeof *out, 1, in) == 1;
  if (in != NULL) fclose(in);
  return ok;
}

static void remove_rings(const char *dir) {
  char path[600];
  DIR *d = opendir(dir);
  struct dirent *e;
  while (d != NULL && (e = readdir(d)) != NULL) {
    snprintf(path, sizeof path, "%s/%.256s", dir, e->d_name);
    if (e->d_name[0] != '.') unlink(path);
  }
  if (d != NULL) closedir(d);
  rmdir(dir);
}

static int recorded(cddp_group *g, void *arg) {
  float w[64] = {0}, x[4] = {1, 2, 3, 4};
  cddp_param p[1] = {{"weight", w, NULL, 64, CDDP_F32}};
  cddp_sgd_desc o = {0};
  cddp_ddp *d = NULL;
  cddp_sgd *s = NULL;
  int rank = cddp_rank(g), i;
  (void)arg;
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 1, &o));
  for (i = 0; i < 2; i++) {
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_wait(d));
  }
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, s));
  if (rank == 0) CHECK_OK(cddp_send(g, x, 4, CDDP_F32, 1, 5, NULL));
  if (rank == 1) CHECK_OK(cddp_recv(g, x, 4, CDDP_F32, 0, 5, NULL));
  for (i = 0; i < 1500; i++) CHECK_OK(cddp_all_reduce(g, x, 4, CDDP_F32, CDDP_MAX, NULL));
  cddp_sgd_destroy(s);
  cddp_ddp_destroy(d);
  if (rank == 1) {
    CHECK_OK(cddp_broadcast(g, x, 3, CDDP_F32, 0, NULL));
    kill(getpid(), SIGKILL);
  }
  CHECK_OK(cddp_broadcast(g, x, 3, CDDP_F32, 0, NULL));
  note(rank, 0, cddp_barrier(g));
  return 1;
}

/* How many records of the ring are called `what`, and the last of them. */
static int find(const ring *r, const char *what, cddp_record *last) {
  int i, n = 0;
  for (i = 0; i < CDDP_RECORDS; i++) {
    const cddp_record *e = &r->records[i];
    if (e->number == 0 || strcmp(e->what, what) != 0) continue;
    if (n++ == 0 || e->number > last->number) *last = *e;
  }
  return n;
}

static void test_the_recorder_survives(void) {
  ring *r = (ring *)calloc(RANKS, sizeof *r);
  char dir[] = "/tmp/cddp-record-XXXXXX";
  cddp_record last = {0};
  int p, i;
  bool ready = r != NULL && mkdtemp(dir) != NULL;
  CHECK(ready);
  if (!ready) return;
  setenv("CDDP_RECORD", dir, 1);
  CHECK_IS(ranks_run(recorded, NULL, RANKS, false), CDDP_PEER_LOST);
  unsetenv("CDDP_RECORD");
  for (p = 0; p < RANKS; p++) {
    CHECK(read_ring(dir, p, &r[p]));
    CHECK(memcmp(r[p].head.magic, "cddprec1", 8) == 0);
    CHECK_EQ(r[p].head.rank, p);
    CHECK_EQ(r[p].head.world_size, RANKS);
    CHECK(r[p].head.job == r[0].head.job && r[p].head.job != 0);
    CHECK_EQ(r[p].head.left, p != 1);
    CHECK(r[p].head.next > CDDP_RECORDS);
    for (i = 0; i < CDDP_RECORDS; i++) {
      const cddp_record *e = &r[p].records[i];
      CHECK(e->number > r[p].head.next - CDDP_RECORDS && e->number <= r[p].head.next);
      CHECK_EQ((e->number - 1) % CDDP_RECORDS, i);
    }
    CHECK(find(&r[p], "all_reduce", &last) > 900);
    CHECK_EQ(last.count, 4);
    CHECK_EQ(last.op, CDDP_MAX);
    CHECK_EQ(last.group, 0);
    CHECK(last.enqueued <= last.started && last.started <= last.ended);
    CHECK_EQ(find(&r[p], "broadcast", &last), 1);
    CHECK_EQ(last.root, 0);
    CHECK_EQ(find(&r[p], "barrier", &last), p != 1);
    if (p != 1) CHECK_EQ(last.result, CDDP_PEER_LOST);
  }
  CHECK_EQ(r[0].head.pid == r[1].head.pid, 0);
  remove_rings(dir);
  free(r);
}

static int recorded_few(cddp_group *g, void *arg) {
  float w[64] = {0}, x[4] = {0};
  cddp_param p[1] = {{"weight", w, NULL, 64, CDDP_F32}};
  cddp_ddp *d = NULL;
  cddp_work *work = NULL;
  int rank = cddp_rank(g), i;
  (void)arg;
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, NULL));
  for (i = 0; i < 2; i++) {
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_wait(d));
  }
  if (rank == 0) CHECK_OK(cddp_send(g, x, 4, CDDP_F32, 1, 5, NULL));
  if (rank == 1) CHECK_OK(cddp_recv(g, x, 4, CDDP_F32, 0, 5, NULL));
  CHECK_OK(cddp_all_gather(g, x, w, 1, CDDP_F32, &work));
  CHECK_OK(cddp_wait(work));
  cddp_ddp_destroy(d);
  return 0;
}

static void test_the_recorder_knows_all_kinds(void) {
  ring *r = (ring *)calloc(RANKS, sizeof *r);
  char dir[] = "/tmp/cddp-record-XXXXXX";
  cddp_record last = {0}, wait = {0};
  uint64_t bucket_group = 0;
  int p;
  bool ready = r != NULL && mkdtemp(dir) != NULL;
  CHECK(ready);
  if (!ready) return;
  setenv("CDDP_RECORD", dir, 1);
  CHECK_OK(ranks_run(recorded_few, NULL, RANKS, true));
  unsetenv("CDDP_RECORD");
  for (p = 0; p < RANKS; p++) {
    CHECK(read_ring(dir, p, &r[p]));
    CHECK_EQ(r[p].head.left, 1);
    CHECK_EQ(find(&r[p], "ready", &last), 2);
    CHECK_EQ(find(&r[p], "ddp bucket", &last), 2);
    CHECK_EQ(last.engine, 1);
    if (p == 0) bucket_group = last.group;
    CHECK(last.group == bucket_group && last.group != 0);
    CHECK_EQ(find(&r[p], "ddp_wait", &wait), 2);
    CHECK(wait.group != last.group && wait.ended >= last.ended);
    CHECK(find(&r[p], "all_gather", &last) >= 1); /* the last is ours, cddp_ddp has its own */
    CHECK_EQ(last.engine, 1);
    CHECK_EQ(find(&r[p], "send", &last), p == 0);
    CHECK_EQ(find(&r[p], "recv", &last), p == 1);
    if (p == 1) CHECK(last.root == 0 && last.tag == 5 && last.count == 4);
  }
  remove_rings(dir);
  free(r);
}

static int not_run(cddp_group *g, void *arg) {
  (void)g, (void)arg;
  return 0;
}

static void test_a_directory_that_is_not_there(void) {
  setenv("CDDP_RECORD", "/nowhere/at/all", 1);
  CHECK_IS(cddp_run_threads(not_run, NULL, 2), CDDP_IO);
  CHECK(strstr(cddp_error(), "CDDP_RECORD") != NULL && strstr(cddp_error(), "/nowhere/at/all"));
  unsetenv("CDDP_RECORD");
}

int main(void) {
  all = (heard *)ranks_shared(RANKS * sizeof *all);
  RUN(test_mismatch_names_calls_and_lines);
  RUN(test_asynchronous_calls_have_a_line_too);
  RUN(test_calls_past_the_macros_have_none);
  RUN(test_a_parameter_ready_on_some_ranks);
  RUN(test_a_death_says_how);
  RUN(test_a_death_that_is_reaped);
  RUN(test_the_recorder_survives);
  RUN(test_the_recorder_knows_all_kinds);
  RUN(test_a_directory_that_is_not_there);
  return TEST_END();
}
