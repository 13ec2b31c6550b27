/* Error texts and the flight recorder: whoever reads a failure knows which rank did what.

   Ranks are processes that disagree, do not come to a call, or die in many ways. The tests read
   cddp_error() of the others: it must name both calls and their source lines, the parameter that
   one rank forgot, where each rank waits, the signal or exit code of a dead rank, and must not
   claim a deadlock that is none. The recorder's files (CDDP_RECORD) must outlive a killed rank
   and know every kind of call. */
#include "../../cddp.h"

#include "../inside.h"
#include "../ranks.h"

#include <fenv.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/time.h>

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
    {"group", other_pairs, pairs, "group_new/split", "group_new/split"},
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

/* " at FILE:LINE" of rank's call, as far as rank p can know it: calls of other hosts have none. */
static const char *at_line(int rank, int p, bool threads) {
  static char text[2][128];
  if (!threads && !ranks_together(rank, p)) return "";
  snprintf(text[rank], sizeof text[rank], " at %s:%d", __FILE__, all[rank].line);
  return text[rank];
}

static void check_disagreement(const disagreement *d, bool threads) {
  int p;
  memset(all, 0, RANKS * sizeof *all);
  CHECK_OK(ranks_run(disagree, (void *)(uintptr_t)d, RANKS, threads));
  for (p = 0; p < RANKS; p++) {
    CHECK_IS(all[p].result, CDDP_MISMATCH);
    CHECK_IS(all[p].again, CDDP_MISMATCH);
    CHECK(says(p, "call 2 of the group"));
    CHECK(says(p, "rank 0 called %s%s, rank 1 called %s%s", d->even_says, at_line(0, p, threads),
               d->odd_says, at_line(1, p, threads)));
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
    CHECK(says(p, "rank 1 called all_reduce(count 8, f32, sum)%s", at_line(1, p, false)));
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

/* A call inside the first argument of a collective does not take the collective's line. All public
   functions without a macro of call sites are called so, on two ranks whose counts differ. Returns
   the number of them. */
static cddp_group *after(bool called, cddp_group *g) { return (void)called, g; }
#define VALUE(call) \
  if (k == n++) line = __LINE__, \
    r = cddp_all_reduce(after((call) == 0, half), x, count, CDDP_F32, CDDP_SUM, NULL)
#define NOTHING(call) \
  if (k == n++) line = __LINE__, \
    r = cddp_all_reduce(((call), half), x, count, CDDP_F32, CDDP_SUM, NULL)
static int call_inside(cddp_group *g, cddp_ddp *d, int k) {
  int n = 0, line = 0;
  size_t count = cddp_rank(g) == 0 ? 1 : 2;
  cddp_group *half = NULL;
  cddp_result r = CDDP_OK;
  float x[2] = {0, 0};
  CHECK_OK(cddp_group_split(g, 0, 0, &half)); /* the disagreement breaks it */
  if (k == n++) line = __LINE__ + 1,
    r = cddp_all_reduce(cddp_ddp_group(d), x, count, CDDP_F32, CDDP_SUM, NULL);
  VALUE(cddp_ddp_group(NULL));
  VALUE(cddp_wait(NULL));
  VALUE(cddp_wait_for(NULL, 1));
  VALUE(cddp_test(NULL, NULL));
  VALUE(cddp_cancel(NULL));
  VALUE(cddp_source());
  VALUE(cddp_rank(g));
  VALUE(cddp_world_size(g));
  VALUE(cddp_local_rank(g));
  VALUE(cddp_local_world_size(g));
  VALUE(cddp_launcher_rank());
  VALUE(cddp_init(NULL, NULL));
  VALUE(cddp_result_name(CDDP_OK));
  VALUE(cddp_result_text(CDDP_OK));
  VALUE(cddp_error());
  VALUE(cddp_dtype_size(CDDP_F32));
  VALUE(cddp_alloc(NULL, 1));
  NOTHING(cddp_free(NULL, NULL));
  NOTHING(cddp_destroy(NULL));
  VALUE(cddp_ddp_ready(NULL, 0));
  VALUE(cddp_ddp_next_shard(NULL, NULL));
  VALUE(cddp_ddp_steps(d));
  NOTHING(cddp_ddp_no_sync(NULL, true));
  VALUE(cddp_ddp_clip_grad_norm(NULL, 1, NULL));
  VALUE(cddp_ddp_grad_norm(NULL, NULL));
  VALUE(cddp_ddp_used(d, 0));
  VALUE(cddp_ddp_present(d));
  VALUE(cddp_ddp_add_rows(NULL, 0, NULL, NULL, 0));
  VALUE(cddp_ddp_rows(NULL, 0, NULL, NULL));
  VALUE(cddp_ddp_bucket_count(d));
  VALUE(cddp_ddp_bucket_params(d, 0, NULL, 0));
  VALUE(cddp_ddp_partitions(NULL, NULL));
  NOTHING(cddp_ddp_destroy(NULL));
  VALUE(cddp_sgd_create(NULL, NULL, 0, NULL));
  VALUE(cddp_adamw_create(NULL, NULL, 0, NULL));
  VALUE(cddp_optim_step(NULL));
  VALUE(cddp_optim_zero_grad(NULL));
  VALUE(cddp_optim_set_lr(NULL, 1));
  VALUE(cddp_optim_lr(NULL));
  VALUE(cddp_optim_write_copies(NULL));
  NOTHING(cddp_optim_destroy(NULL));
  VALUE(cddp_sampler_init(NULL, NULL));
  NOTHING(cddp_sampler_destroy(NULL));
  VALUE(cddp_safetensors_open(NULL, NULL));
  VALUE(cddp_safetensors_count(NULL));
  VALUE(cddp_safetensors_find(NULL, "w"));
  NOTHING(cddp_safetensors_close(NULL));
  VALUE(cddp_set_device(NULL, "cpu", NULL));
  NOTHING(cddp_set_stream(NULL, NULL));
  VALUE(cddp_stream(NULL));
  VALUE(cddp_synchronize(NULL));
  VALUE(cddp_store_create(NULL, NULL));
  VALUE(cddp_store_port(NULL));
  NOTHING(cddp_store_destroy(NULL));
  if (k < n) {
    char at[128];
    snprintf(at, sizeof at, "rank 0 called all_reduce(count 1, f32, sum) at %s:%d", __FILE__, line);
    CHECK_IS(r, CDDP_MISMATCH);
    if (strstr(cddp_error(), at) == NULL) test_fail(__FILE__, line, "not \"%s\"", at);
  }
  cddp_destroy(half);
  return n;
}

static int calls_inside(cddp_group *g, void *arg) {
  float w[4] = {0};
  cddp_param p = {"w", w, NULL, 4, CDDP_F32};
  cddp_ddp *d = NULL;
  int k;
  (void)arg;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  for (k = call_inside(g, d, INT_MAX) - 1; k >= 0; k--) (void)call_inside(g, d, k); /* 0 breaks g */
  cddp_ddp_destroy(d);
  return 0;
}

static void test_calls_inside_an_argument(void) {
  CHECK_OK(ranks_run(calls_inside, NULL, 2, false));
  CHECK_OK(ranks_run(calls_inside, NULL, 2, true));
}

/* Rank 1 ends in its engine, when its training thread waits for the bucket as rank 0 does. */
static void end_in_engine(const char *name) {
  if (strcmp(name, "engine") != 0) return;
  ranks_sleep(0.2);
  _exit(0);
}

/* A loss in a bucket, which cddp's own thread reduces, is told with the line of the wait. */
static int bucket_lines(cddp_group *g, void *arg) {
  float w[4] = {0};
  cddp_param p = {"w", w, NULL, 4, CDDP_F32};
  cddp_ddp *d = NULL;
  char at[128];
  int step, line = 0;
  (void)arg;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  for (step = 0; step < 4; step++) {
    if (step == 3 && cddp_rank(g) == 1) inside_at_point = end_in_engine;
    if (cddp_ddp_ready(d, 0) != CDDP_OK) break;
    line = __LINE__ + 1;
    if (cddp_ddp_wait(d) != CDDP_OK) break;
  }
  snprintf(at, sizeof at, "in ddp bucket 0 at %s:%d", __FILE__, line);
  if (cddp_rank(g) == 0) CHECK(step == 3 && strstr(cddp_error(), at) != NULL);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_buckets_have_a_line(void) {
  CHECK_OK(ranks_run(bucket_lines, NULL, 2, false));
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

/* --- ranks that wait for each other in different groups --- */

enum { TO_WAIT, TO_STEP, SECOND_STEP, SUB_GROUP, MEETINGS };                      /* the others */
enum { BY_SAVE, BY_REDUCE, BY_HANDLE, BY_BARRIER, BY_STEP, CALLS_OF_ONE }; /* rank 0 */

typedef struct crossing {
  int one, others;
  char path[256];
} crossing;

static const char *const crossing_words[] = {"cddp_save", "cddp_all_reduce", "cddp_all_reduce",
                                             "cddp_barrier", "cddp_ddp_step"};

/* Rank 0 alone makes a call on the group, or on another model, that the others do not make. */
static int cross(cddp_group *g, void *arg) {
  const crossing *c = (const crossing *)arg;
  int rank = cddp_rank(g), line = 0;
  float w[2][4] = {{0}}, x = 1;
  cddp_param p[2][1] = {{{"weight", w[0], NULL, 4, CDDP_F32}}, {{"w", w[1], NULL, 4, CDDP_F32}}};
  cddp_sgd_desc o;
  cddp_ddp *d[2] = {NULL, NULL};
  cddp_optim *s[2] = {NULL, NULL};
  cddp_group *sub = NULL;
  cddp_work *work = NULL;
  cddp_result r = CDDP_OK;
  double start;
  int i;
  memset(&o, 0, sizeof o);
  for (i = 0; i < 2; i++) {
    CHECK_OK(cddp_ddp_create(&d[i], g, p[i], 1, NULL));
    CHECK_OK(cddp_sgd_create(&s[i], p[i], 1, &o));
  }
  CHECK_OK(cddp_group_split(g, 0, -rank, &sub));
  if (c->others == SECOND_STEP) {
    CHECK_OK(cddp_ddp_ready(d[0], 0));
    CHECK_OK(cddp_ddp_step(d[0], s[0]));
  }
  start = test_now();
  if (rank == 0) {
    if (c->one == BY_SAVE) line = __LINE__, r = cddp_save(g, c->path, p[0], 1, NULL);
    if (c->one == BY_REDUCE)
      line = __LINE__, r = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL);
    if (c->one == BY_HANDLE) {
      line = __LINE__ + 1;
      CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, &work));
      r = cddp_wait(work);
    }
    if (c->one == BY_BARRIER) line = __LINE__, r = cddp_barrier(g);
    if (c->one == BY_STEP) {
      CHECK_OK(cddp_ddp_ready(d[1], 0));
      line = __LINE__, r = cddp_ddp_step(d[1], s[1]);
    }
  } else {
    if (c->others != SUB_GROUP) CHECK_OK(cddp_ddp_ready(d[0], 0));
    if (c->others == TO_WAIT) line = __LINE__, r = cddp_ddp_wait(d[0]);
    if (c->others == TO_STEP) line = __LINE__, r = cddp_ddp_step(d[0], s[0]);
    if (c->others == SECOND_STEP) line = __LINE__, r = cddp_ddp_step(d[0], s[0]);
    if (c->others == SUB_GROUP) line = __LINE__, r = cddp_barrier(sub);
  }
  note(rank, line, r);
  CHECK(test_now() - start < RANKS_WITHIN(2.0));
  for (i = 0; i < 2; i++) {
    cddp_optim_destroy(s[i]);
    cddp_ddp_destroy(d[i]);
  }
  cddp_destroy(sub);
  return 0;
}

static void test_a_call_on_one_rank_alone(void) {
  static const char *const others[] = {"cddp_ddp_wait", "cddp_ddp_step", "cddp_ddp_step",
                                       "cddp_barrier"};
  crossing c;
  int p, threads;
  const char *tmp = getenv("TMPDIR");
  snprintf(c.path, sizeof c.path, "%s/cddp-one.%d", tmp != NULL ? tmp : "/tmp", (int)getpid());
  for (c.one = 0; c.one < CALLS_OF_ONE; c.one++)
    for (c.others = 0; c.others < MEETINGS; c.others++) {
      threads = (c.one + c.others) % 2;
      memset(all, 0, RANKS * sizeof *all);
      CHECK_OK(ranks_run(cross, &c, RANKS, threads));
      for (p = 0; p < RANKS; p++) {
        CHECK_IS(all[p].result, CDDP_MISMATCH);
        CHECK(says(p, "rank 0 of the job waits in %s at %s:%d", crossing_words[c.one], __FILE__,
                   all[0].line));
        CHECK(says(p, "in %s at %s:%d", others[c.others], __FILE__, all[1].line));
      }
    }
}

/* A thread that waits takes another rank's message: each rank has one thread all the same. */
static int cross_after_message(cddp_group *g, void *arg) {
  int rank = cddp_rank(g);
  char bytes[1000] = {0};
  cddp_group *twin = NULL;
  cddp_work *work = NULL;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, 0, &twin));
  if (rank == 1) CHECK_OK(cddp_recv(g, bytes, sizeof bytes, CDDP_U8, 0, 0, &work));
  CHECK_OK(cddp_barrier(g));
  if (rank == 0) CHECK_OK(cddp_send(g, bytes, sizeof bytes, CDDP_U8, 1, 0, NULL));
  if (rank == 1) ranks_sleep(0.1); /* meanwhile rank 0 waits */
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) CHECK_OK(cddp_wait(work));
  CHECK_IS(cddp_barrier(rank == 0 ? g : twin), CDDP_MISMATCH);
  cddp_destroy(twin);
  return 0;
}

static void test_waits_for_each_other_after_a_message(void) {
  CHECK_OK(ranks_run(cross_after_message, NULL, 2, true));
  CHECK_OK(ranks_run(cross_after_message, NULL, 2, false));
}

/* What looks alike and is none: a third rank comes, another thread, an operation in flight, a hook,
   a message. Each rank that others wait for is late by so much. */
#define LATE 0.4

static void *late_barrier(void *arg) {
  cddp_group *g = (cddp_group *)arg;
  if (cddp_rank(g) == 0) ranks_sleep(LATE);
  return (void *)(uintptr_t)cddp_barrier(g);
}

static cddp_result late_hook(cddp_bucket *b, void *g) {
  (void)g;
  ranks_sleep(LATE);
  return cddp_all_reduce(b->group, b->data, b->count, b->dtype, CDDP_AVG, NULL);
}

static int no_deadlock(cddp_group *g, void *arg) {
  static const int pairs[3][2] = {{0, 2}, {1, 2}, {0, 1}};
  int rank = cddp_rank(g), i;
  cddp_group *pair[3], *twin = NULL;
  float w[4] = {0}, x = 1, y = (float)rank;
  cddp_param p[1] = {{"weight", w, NULL, 4, CDDP_F32}};
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_work *work = NULL;
  pthread_t thread;
  void *result = NULL;
  (void)arg;
  for (i = 0; i < 3; i++) CHECK_OK(cddp_group_new(g, pairs[i], 2, &pair[i]));
  CHECK_OK(cddp_group_split(g, 0, 0, &twin));
  if (rank == 2) ranks_sleep(LATE); /* a third rank */
  for (i = 0; i < 3; i++)
    if (pair[i] != NULL) CHECK_OK(cddp_barrier(pair[i]));
  if (rank == 1) { /* rank 0 sends, late, to one that others wait for */
    CHECK_OK(cddp_recv(g, &y, 1, CDDP_F32, 0, 1, NULL));
  } else if (rank == 0) {
    ranks_sleep(LATE);
    CHECK_OK(cddp_send(g, &y, 1, CDDP_F32, 1, 1, NULL));
  }
  CHECK_OK(cddp_barrier(twin));
  if (rank == 1) CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, &work)); /* in flight */
  if (rank == 2) ranks_sleep(LATE);
  if (rank != 1) CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_OK(cddp_barrier(twin));
  if (work != NULL) CHECK_OK(cddp_wait(work));
  /* rank 1 waits for a late message, with an operation in flight to which others come later */
  if (rank == 1) {
    CHECK_OK(cddp_all_reduce(twin, &x, 1, CDDP_F32, CDDP_SUM, &work));
    CHECK_OK(cddp_recv(twin, &y, 1, CDDP_F32, 2, 1, NULL));
  } else if (rank == 2) {
    ranks_sleep(LATE);
    CHECK_OK(cddp_send(twin, &y, 1, CDDP_F32, 1, 1, NULL));
  }
  CHECK_OK(cddp_barrier(g));
  if (rank != 1) CHECK_OK(cddp_all_reduce(twin, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  if (rank == 1) CHECK_OK(cddp_wait(work));
  /* two threads of each rank in groups of their own, one of them late here, the other there */
  CHECK_EQ(pthread_create(&thread, NULL, late_barrier, twin), 0);
  if (rank == 1) ranks_sleep(LATE);
  CHECK_OK(cddp_barrier(g));
  pthread_join(thread, &result);
  CHECK(result == NULL);
  memset(&desc, 0, sizeof desc);
  desc.comm_hook = late_hook;
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, &desc));
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_wait(d));
  CHECK_OK(cddp_barrier(g));
  cddp_ddp_destroy(d);
  for (i = 0; i < 3; i++) cddp_destroy(pair[i]);
  cddp_destroy(twin);
  return 0;
}

static void late_handler(int signal) {
  (void)signal;
  ranks_sleep(LATE);
}

/* Rank 1 waits for one operation and, in a handler, has not seen yet that it has ended, while the
   engine waits in the next one, for which the thread does not wait. */
static int no_deadlock_in_a_handler(cddp_group *g, void *arg) {
  int rank = cddp_rank(g);
  float x[2] = {1, 1};
  struct itimerval soon = {{0, 0}, {0, 60000}};
  cddp_work *work[2];
  cddp_group *twin = NULL;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, 0, &twin));
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) {
    CHECK(signal(SIGALRM, late_handler) != SIG_ERR);
    CHECK_OK(cddp_all_reduce(twin, &x[0], 1, CDDP_F32, CDDP_SUM, &work[0]));
    CHECK_OK(cddp_all_reduce(twin, &x[1], 1, CDDP_F32, CDDP_SUM, &work[1]));
    ranks_sleep(0.02); /* the engine begins */
    CHECK_EQ(setitimer(ITIMER_REAL, &soon, NULL), 0);
    CHECK_OK(cddp_wait(work[0]));
    CHECK_OK(cddp_barrier(g));
    CHECK_OK(cddp_wait(work[1]));
  } else {
    ranks_sleep(0.15);
    CHECK_OK(cddp_all_reduce(twin, &x[0], 1, CDDP_F32, CDDP_SUM, NULL));
    CHECK_OK(cddp_barrier(g));
    CHECK_OK(cddp_all_reduce(twin, &x[1], 1, CDDP_F32, CDDP_SUM, NULL));
  }
  CHECK_EQ(x[1], 2);
  cddp_destroy(twin);
  return 0;
}

static void *announced_thread(void *twin) {
  int x = 5;
  CHECK_OK(cddp_synchronize((cddp_group *)twin)); /* this rank has two threads */
  ranks_sleep(LATE);
  CHECK_OK(cddp_broadcast((cddp_group *)twin, &x, 1, CDDP_I32, 0, NULL));
  return NULL;
}

/* Two threads of rank 0 make the calls that rank 1 makes in one, the first one late. */
static int no_deadlock_with_a_late_thread(cddp_group *g, void *arg) {
  cddp_group *twin = NULL;
  pthread_t thread;
  int x = 0;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, 0, &twin));
  if (cddp_rank(g) == 0) {
    CHECK_EQ(pthread_create(&thread, NULL, announced_thread, twin), 0);
    CHECK_OK(cddp_barrier(g));
    pthread_join(thread, NULL);
  } else {
    CHECK_OK(cddp_broadcast(twin, &x, 1, CDDP_I32, 0, NULL));
    CHECK_OK(cddp_barrier(g));
    CHECK_EQ(x, 5);
  }
  cddp_destroy(twin);
  return 0;
}

static void test_what_is_no_deadlock(void) {
  CHECK_OK(ranks_run(no_deadlock_with_a_late_thread, NULL, 2, false));
  CHECK_OK(ranks_run(no_deadlock_in_a_handler, NULL, 2, false));
  CHECK_OK(ranks_run(no_deadlock, NULL, RANKS, false));
  CHECK_OK(ranks_run(no_deadlock, NULL, RANKS, true));
}

/* Three ranks in a ring: no two wait for each other, but the time-out says where each one is. */
static int ring_of_waits(int rank, void *arg) {
  static const int pairs[3][2] = {{0, 1}, {1, 2}, {2, 0}};
  cddp_group_desc desc;
  cddp_group *g, *pair[3];
  float x = 0;
  int i, line;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = rank == 1 ? 60 : (rank == 0 ? 4.0 : 2.0) * (RANKS_SLOW ? 2 : 1);
  if (cddp_init(&g, &desc) != CDDP_OK) return 1;
  for (i = 0; i < 3; i++) CHECK_OK(cddp_group_new(g, pairs[i], 2, &pair[i]));
  line = __LINE__ + 1;
  if (rank < 2) note(rank, line, cddp_barrier(pair[rank]));
  else note(rank, 0, cddp_recv(pair[2], &x, 1, CDDP_F32, 1, 0, NULL)); /* of rank 0 of the job */
  if (rank == 2) ranks_sleep(RANKS_SLOW ? 6 : 3); /* rank 1 waits on */
  for (i = 0; i < 3; i++) cddp_destroy(pair[i]);
  cddp_destroy(g);
  return 0;
}

static void test_a_time_out_says_where_peers_wait(void) {
  int status[RANKS];
  memset(all, 0, RANKS * sizeof *all);
  ranks_script(ring_of_waits, NULL, RANKS, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, RANKS));
  CHECK_IS(all[0].result, CDDP_TIMEOUT);
  CHECK(says(0, "rank 1 waits in cddp_barrier at %s:%d", __FILE__, all[1].line));
  CHECK_IS(all[1].result, CDDP_PEER_LOST);
  CHECK_IS(all[2].result, CDDP_TIMEOUT);
  CHECK(says(2, "rank 1 waits in cddp_barrier at %s:%d", __FILE__, all[0].line));
}

/* Rank 1 waits for a message while rank 0 waits for it in a barrier. */
enum { RECEIVES, RECEIVES_ANY, SENDS, COMPUTES, MESSAGES };
static const char *const message_words[] = {
    "rank 1 waits in cddp_recv from rank 0 of the job, tag 7",
    "rank 1 waits in cddp_recv from any rank, tag 7",
    "rank 1 waits in cddp_send to rank 0 of the job, tag 7",
    "rank 1 waits in no collective, send or recv"};

static int message_awaited(int rank, void *arg) {
  int how = *(const int *)arg;
  size_t n = 1 << 18; /* a send of shared memory, which is not copied */
  cddp_group_desc desc;
  cddp_group *g;
  float *x;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = rank == 1 ? 60 : 1.5 * (RANKS_SLOW ? 2 : 1);
  if (cddp_init(&g, &desc) != CDDP_OK) return 1;
  x = (float *)cddp_alloc(g, n * sizeof *x);
  if (rank == 0) note(rank, 0, cddp_barrier(g));
  else if (how == SENDS) note(rank, 0, cddp_send(g, x, n, CDDP_F32, 0, 7, NULL));
  else if (how == COMPUTES) ranks_sleep(RANKS_SLOW ? 6 : 3);
  else note(rank, 0, cddp_recv(g, x, 1, CDDP_F32, how == RECEIVES ? 0 : CDDP_ANY, 7, NULL));
  cddp_destroy(g);
  return 0;
}

static void test_a_time_out_says_who_waits_for_a_message(void) {
  int status[2], how;
  for (how = 0; how < MESSAGES; how++) {
    memset(all, 0, RANKS * sizeof *all);
    ranks_script(message_awaited, &how, 2, RANKS_WITHIN(20), status);
    CHECK(ranks_exited_well(status, 2));
    CHECK_IS(all[0].result, CDDP_TIMEOUT);
    CHECK(says(0, "%s", message_words[how]));
    if (how != COMPUTES) CHECK_IS(all[1].result, CDDP_TIMEOUT);
  }
}

/* --- floating-point modes --- */

enum { ON_REDUCE, ON_CREATE, ON_WAIT, ON_STEP, MODE_PLACES };

/* Rank 1 changes its mode at some point; what has no arithmetic does not mind. */
static int other_mode(cddp_group *g, void *arg) {
  const int *job = (const int *)arg; /* where, which mode */
  float w[4] = {0}, x = 1;
  cddp_param p[1] = {{"weight", w, NULL, 4, CDDP_F32}};
  cddp_sgd_desc o;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_result r = CDDP_OK;
  fenv_t normal;
  int rank = cddp_rank(g), one = 1;
  memset(&o, 0, sizeof o);
  fegetenv(&normal);
  if (job[0] > ON_CREATE) CHECK_OK(cddp_ddp_create(&d, g, p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 1, &o));
  if (d != NULL) CHECK_OK(cddp_ddp_ready(d, 0));
  if (rank == 1 && job[1] == 0) fesetround(FE_UPWARD);
#if defined(__x86_64__)
  if (rank == 1 && job[1] == 1) __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
  CHECK_OK(cddp_barrier(g));
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  if (job[0] == ON_REDUCE) r = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL);
  if (job[0] == ON_CREATE) r = cddp_ddp_create(&d, g, p, 1, NULL);
  if (job[0] == ON_WAIT) r = cddp_ddp_wait(d);
  if (job[0] == ON_STEP) r = cddp_ddp_step(d, s);
  fesetenv(&normal);
  note(rank, 0, r);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_another_floating_point_mode(void) {
  static const char *const words[] = {"all_reduce", "ddp_create", "ddp_wait", "ddp_step"};
  int job[2], p;
#if !defined(__x86_64__)
  const int modes = 1;
#else
  const int modes = 2;
#endif
  for (job[0] = 0; job[0] < MODE_PLACES; job[0]++)
    for (job[1] = 0; job[1] < modes; job[1]++) {
      memset(all, 0, RANKS * sizeof *all);
      CHECK_OK(ranks_run(other_mode, job, RANKS, job[0] % 2 != job[1]));
      for (p = 0; p < RANKS; p++) {
        CHECK_IS(all[p].result, CDDP_MISMATCH);
        CHECK(says(p, "rank 1 called %s", words[job[0]]));
        CHECK(says(p, "floating-point mode (rounds %s", job[1] == 0 ? "upward" : "to nearest"));
        CHECK(says(p, job[1] == 0 ? "upward, keeps" : "FTZ"));
        CHECK(strstr(all[p].text, "rank 2 called") == NULL);
      }
    }
}

/* --- deaths --- */

/* UNREADABLE: KILLED, and the others have no descriptor left to read /proc with. */
typedef enum death { KILLED, SEGFAULT, EXITED, UNREADABLE, DEATHS } death;

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
    kill(getpid(), job->how == SEGFAULT ? SIGSEGV : SIGKILL);
    pause();
  }
  if (job->how == UNREADABLE) {
    struct rlimit few = {64, 64};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (dup(STDERR_FILENO) >= 0) {}
  }
  note(rank, 0, cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  all[rank].again = cddp_barrier(g);
  cddp_destroy(g);
  return 0;
}

/* reap: whether the parent takes the dead child's status at once, or only at the end. */
static void check_death(death how, bool reap) {
  static const char *const words[] = {"was killed by signal 9 (Killed)",
                                      "was killed by signal 11 (Segmentation fault)",
                                      "exited with code 7", "died: its process has ended"};
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
    if (ranks_has_company(1, RANKS)) /* an older kernel may not tell */
      CHECK(strstr(all[i].text, words[how]) != NULL || !says(i, "%s", words[how]));
    else
      CHECK(says(i, "closed its connection"));
    CHECK(says(i, "all_reduce(count 1, f32, sum) at %s:", __FILE__));
    CHECK(says(i, "call 2 of the group"));
  }
}

static void test_a_death_says_how(void) {
  int how, some = getenv("TEST_HOSTS") == NULL ? DEATHS : UNREADABLE;
  for (how = 0; how < some; how++) check_death((death)how, false);
}

/* The parent's wait may come first, or in between: then kernels before 6.15 no longer know. */
static void test_a_death_that_is_reaped(void) {
  int i;
  for (i = 0; i < 5; i++) check_death(i % 2 ? KILLED : EXITED, true);
}

/* Only the left neighbour of a dead rank, rank 0, learns how it has ended, and only while it waits:
   here 0.2 s later than all others. */
static int die_unseen(int rank, void *arg) {
  cddp_group *g;
  float x = 1;
  double begin;
  bool named;
  (void)arg;
  if (cddp_init(&g, NULL) != CDDP_OK || cddp_barrier(g) != CDDP_OK) return 1;
  if (rank == 1) raise(SIGKILL);
  if (rank == 0) ranks_sleep(0.2);
  begin = test_now();
  CHECK_IS(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL), CDDP_PEER_LOST);
  CHECK(test_now() - begin < RANKS_WITHIN(3.0));
  named = strstr(cddp_error(), "rank 1 (pid ") != NULL && strstr(cddp_error(), "signal 9") != NULL;
  cddp_destroy(g);
  return !named;
}

static void test_a_death_unseen_by_most(void) {
  static const int sizes[] = {2, 3, 6, 64, 200};
  pid_t pid[200];
  int status[200], i, k, n, named, try;
  for (k = 0; k < 5; k++) {
    n = sizes[k];
    named = 0;
    /* On a busy machine rank 0 can get no turn while the others wait for what it knows. */
    for (try = 0; try < 4 && named < n - 1; try++) {
      ranks_begin(die_unseen, NULL, n, pid);
      for (i = 0; i < n; i += 50)
        ranks_join(pid + i, n - i < 50 ? n - i : 50, RANKS_WITHIN(60.0), status + i);
      for (i = named = 0; i < n; i++) named += i != 1 && status[i] == 0;
    }
    CHECK_EQ(named, n - 1);
  }
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
  cddp_optim *s = NULL;
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
  cddp_optim_destroy(s);
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

/* The recorder makes its directory, but none that it would lie in. */
static void test_a_directory_that_is_not_there(void) {
  char parent[] = "/tmp/cddp-record-XXXXXX", dir[64];
  struct stat st;
  int threads;
  bool made = mkdtemp(parent) != NULL;
  CHECK(made);
  if (!made) return;
  snprintf(dir, sizeof dir, "%s/new", parent);
  for (threads = 0; threads < 2; threads++) {
    setenv("CDDP_RECORD", dir, 1);
    CHECK_OK(ranks_run(not_run, NULL, RANKS, threads));
    CHECK(stat(dir, &st) == 0 && S_ISDIR(st.st_mode) && ranks_entries(dir) == RANKS);
    remove_rings(dir);
    CHECK(access(dir, F_OK) != 0);
  }
  setenv("CDDP_RECORD", "/dev/null", 1);
  CHECK_IS(cddp_run_threads(not_run, NULL, 2), CDDP_IO);
  CHECK(strstr(cddp_error(), "Not a directory") != NULL);
  CHECK(rmdir(parent) == 0);
  setenv("CDDP_RECORD", "/nowhere/at/all", 1);
  CHECK_IS(cddp_run_threads(not_run, NULL, 2), CDDP_IO);
  CHECK(strstr(cddp_error(), "CDDP_RECORD") != NULL && strstr(cddp_error(), "/nowhere/at/all"));
  unsetenv("CDDP_RECORD");
}

/* A time-out names every rank that did not come, of all hosts. `late` ranks sleep. */
typedef struct absence {
  const char *hosts, *late; /* late: 'x' for each of them, by rank */
  const char *names[4];     /* what all who wait are told */
} absence;

static int absent_rank(int rank, void *arg) {
  const absence *a = (const absence *)arg;
  int before = test_failures, i;
  cddp_group_desc desc;
  cddp_group *g = NULL;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = RANKS_SLOW ? 5 : 1;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  CHECK_OK(cddp_barrier(g));
  if (a->late[rank] == 'x') {
    ranks_sleep(desc.timeout_s + 1.5);
  } else {
    CHECK_IS(cddp_barrier(g), CDDP_TIMEOUT);
    for (i = 0; i < 4 && a->names[i] != NULL; i++)
      if (strstr(cddp_error(), a->names[i]) == NULL)
        test_fail(__FILE__, __LINE__, "%s: rank %d: no \"%s\" in: %s", a->hosts, rank, a->names[i],
                  cddp_error());
    for (i = 0; a->late[i] != 0 && i < 3; i++) { /* nobody who has come is named */
      char text[24];
      snprintf(text, sizeof text, "rank %d (pid", i);
      CHECK((strstr(cddp_error(), text) != NULL) == (a->late[i] == 'x'));
    }
  }
  cddp_destroy(g);
  return test_failures != before;
}

static void test_a_time_out_names_all(void) {
  static const absence cases[] = {
      {"", ".x.x.", {"rank 1 (pid", "rank 3 (pid", "barrier at", NULL}},
      {"", "...xxxxx.x.x", {"rank 3 (pid", "rank 4 (pid", "rank 5 (pid", " ranks 6-7, 9, 11 did"}},
      {"", ".xxxx", {"rank 3 (pid", " and rank 4 did not reach", NULL, NULL}},
      {"aabbccdd", ".x..xxxx", {"rank 1 (pid", "rank 4 (pid", "rank 5 (pid", " and ranks 6-7 did"}},
      {"abababab", "..x.....", {"rank 2 (pid", NULL, NULL, NULL}},
      {"abcabcabc", "x..xx...x", {"rank 0 (pid", "rank 3 (pid", "rank 4 (pid", "and rank 8 did"}},
      {"aabb", "...x", {"rank 3 (pid", NULL, NULL, NULL}},
  };
  size_t i;
  int status[16];
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    absence a = cases[i];
    int n = (int)strlen(a.late);
    setenv("TEST_HOSTS", a.hosts, 1);
    ranks_script(absent_rank, &a, n, 40, status);
    CHECK(ranks_exited_well(status, n));
  }
  unsetenv("TEST_HOSTS");
}

/* A model of many small parameters: they come to all ranks in a few broadcasts, at creation and
   from a checkpoint. One in a hundred is large. */
enum { SMALL_ONES = 600, LARGE_ONE = 9000 };

static size_t small_count(int i) { return i % 100 == 37 ? LARGE_ONE : (size_t)(i % 60); }
static double small_value(int i, size_t k) { return i % 200 + (int)(k % 7); }

static int many_small(cddp_group *g, void *arg) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  cddp_param *p = (cddp_param *)calloc(SMALL_ONES, sizeof *p);
  char (*names)[16] = (char (*)[16])calloc(SMALL_ONES, sizeof *names), path[300];
  int rank = cddp_rank(g), i, pass;
  size_t k, bad = 0;
  cddp_ddp *d = NULL;
  CHECK(p != NULL && names != NULL);
  for (i = 0; p != NULL && names != NULL && i < SMALL_ONES; i++) {
    snprintf(names[i], sizeof names[i], "p%d", i);
    p[i].name = names[i];
    p[i].count = small_count(i);
    p[i].dtype = types[i % 4];
    p[i].data = malloc(1 + p[i].count * 8);
  }
  snprintf(path, sizeof path, "%s/model", (const char *)arg);
  for (pass = 0; pass < 2 && p != NULL; pass++) { /* by creation; by cddp_load */
    for (i = 0; i < SMALL_ONES; i++)
      for (k = 0; k < p[i].count; k++)
        ranks_store(p[i].dtype, p[i].data, k, rank == 0 && pass == 0 ? small_value(i, k) : -1);
    if (pass == 0) CHECK_OK(cddp_ddp_create(&d, g, p, SMALL_ONES, NULL));
    else CHECK_OK(cddp_load(g, path, p, SMALL_ONES, NULL));
    for (i = 0; i < SMALL_ONES; i++)
      for (k = 0; k < p[i].count; k++)
        bad += ranks_load(p[i].dtype, p[i].data, k) != small_value(i, k);
    if (pass == 0) CHECK_OK(cddp_save(g, path, p, SMALL_ONES, NULL));
  }
  CHECK_EQ(bad, 0);
  cddp_ddp_destroy(d);
  for (i = 0; p != NULL && i < SMALL_ONES; i++) free(p[i].data);
  free(names);
  free(p);
  return 0;
}

static void test_small_parameters_share_broadcasts(void) {
  ring *r = (ring *)calloc(1, sizeof *r);
  char dir[] = "/tmp/cddp-record-XXXXXX";
  cddp_record last = {0};
  CHECK(r != NULL && mkdtemp(dir) != NULL);
  if (r == NULL) return;
  setenv("CDDP_RECORD", dir, 1);
  CHECK_OK(ranks_run(many_small, dir, RANKS, false));
  unsetenv("CDDP_RECORD");
  CHECK(read_ring(dir, 0, r));
  CHECK(r->head.next < 100);
  CHECK(find(r, "broadcast", &last) > 12); /* of the large ones at least */
  remove_rings(dir);
  free(r);
}

int main(void) {
  all = (heard *)ranks_shared(RANKS * sizeof *all);
  RUN(test_mismatch_names_calls_and_lines);
  RUN(test_asynchronous_calls_have_a_line_too);
  RUN(test_calls_past_the_macros_have_none);
  RUN(test_calls_inside_an_argument);
  RUN(test_buckets_have_a_line);
  RUN(test_a_parameter_ready_on_some_ranks);
  if (ranks_has_company(0, RANKS)) RUN(test_a_call_on_one_rank_alone); /* seen on one host only */
  RUN(test_waits_for_each_other_after_a_message);
  RUN(test_what_is_no_deadlock);
  if (getenv("TEST_HOSTS") == NULL) RUN(test_a_time_out_says_where_peers_wait);
  if (getenv("TEST_HOSTS") == NULL) RUN(test_a_time_out_says_who_waits_for_a_message);
  if (getenv("TEST_HOSTS") == NULL) RUN(test_a_time_out_names_all);
  RUN(test_another_floating_point_mode);
  RUN(test_a_death_says_how);
  RUN(test_a_death_that_is_reaped);
  RUN(test_a_death_unseen_by_most);
  RUN(test_the_recorder_survives);
  RUN(test_the_recorder_knows_all_kinds);
  RUN(test_a_directory_that_is_not_there);
  RUN(test_small_parameters_share_broadcasts);
  return TEST_END();
}
