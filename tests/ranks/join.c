/* join.c - CDDP_JOIN: processes that join a running elastic job, or are refused.
   Proves that a joined process has the job's weights, optimizer states and step count, and that the
   weights after that are those of a job without joins. A refused process must fail alone with an
   error that names the cause, and the job must continue.

   How: begin_job starts a job of one or more ranks that train until the test says stop. The test
   starts further processes, each different from the job in one thing (process_config): rank, world
   size, model, secret, optimizer settings, memory. Counters and the last error are in shared
   memory. The tests also cover a rank's replacement on one host and on several, two models in a
   row, memory that must not grow with joins, the death of all ranks at MASTER_ADDR, and processes
   that connect and then send nothing. Joins while ranks die: tests/chaos/programs.c. */
#include "../../cddp.h"

#include "../inside.h"
#include "../ranks.h"

#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { COUNT = 3000, SHARDS = 3, ROWS = 500, WIDTH = 100 };

typedef struct process_config { /* how a process differs from the usual one */
  int rank, world_size, shards;
  size_t count;
  bool plain;  /* not elastic */
  bool leaves; /* rank 1 destroys its model after three steps, and keeps its weights */
  bool rows;   /* there is a second parameter, with sparse rows */
  int orphan;  /* kills the job's only member behind cddp_init (1) or cddp_ddp_create (2) */
  bool bare;   /* has no stdin and no stdout, like a daemon */
  bool waits;  /* waits for shared->left before its first step */
  bool apart;  /* its optimizer is created without `ddp` */
  bool adamw;  /* its optimizer has the settings of the second struct, else of the first */
  cddp_sgd_desc sgd;
  cddp_adamw_desc adam;
  int (*before)(cddp_optim *o); /* before each step; 1: the step is cddp_ddp_wait */
  const char *secret, *join;
  double timeout_s;
  int descriptors;   /* its limit of open files; 0: the usual one */
  int port;    /* MASTER_PORT; 0: shared->port */
  bool crowd;  /* it notes how it began, and ends if it was refused */
  size_t extra;      /* bytes that it allocates and writes beside the model */
  int dies_at;       /* killed at this call of CDDP__POINT in cddp_ddp_create; 0: not */
  int quits;         /* destroys its model after so many steps, and ends; 0: not */
  bool splits;       /* has groups of its own with all first ranks, and keeps them */
  bool renews;       /* in each step it replaces a group of its own with all present ranks */
  void (*environment)(void); /* called first: namespaces, limits */
  bool again;        /* while the job is full it tries again, and counts in shared->left */
  bool another;      /* in each step it creates one more optimizer, which never steps */
  bool reloads;      /* in each step it replaces its optimizer by one that cddp_load fills */
  bool beside;       /* it has a model of its own beside the elastic one, if it has not joined */
  bool lacks, early; /* it can allocate only `spare` more bytes, from its first step on; */
  size_t spare;      /* early: from the beginning */
  bool poor;         /* its first cddp_optim, of a wrong rate, lacks memory */
} process_config;

typedef struct resources { /* of a rank */
  int descriptors, mappings;
  size_t kib; /* of the memory that its host's ranks share */
} resources;

typedef struct shared_state {
  int asked, answers;   /* number of the last question for resources; answers to it */
  resources use[8];     /* by rank */
  int port, stop, running, joined, left;
  pid_t member; /* see process_config.orphan */
  uint64_t steps; /* of the job, about */
  size_t memory; /* bytes that the job's ranks share */
  cddp_result result;
  char text[512];
  double took, cpu;  /* seconds of a refused process, and its processor time */
  double init_s;     /* that cddp_init of the last joining process took */
  int far;           /* 1: far_proxy listens */
  int killed;        /* 1: the joined process kills itself after its step and renew_group */
  int placed[8];     /* by RANK: its rank in the last group of all 4 ranks, + 1 */
  int crowd[64];     /* result + 1 of processes with `crowd`, by rank; 0: not known yet */
} shared_state;

static shared_state *shared;

static int look(const int *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static void bump(int *p) { __atomic_add_fetch(p, 1, __ATOMIC_SEQ_CST); }
static bool error_contains(const char *text) { return strstr(shared->text, text) != NULL; }

static void await(const int *p, int value) {
  double until = test_now() + RANKS_WITHIN(20.0);
  while (look(p) < value && test_now() < until) ranks_sleep(0.001);
  CHECK(look(p) >= value);
}

typedef struct model {
  cddp_param p, table; /* in this order in memory: they are the model's parameters */
  bool rows, adamw, another, reloads;
  int (*before)(cddp_optim *o);
  cddp_group *g, *all, *some, *present;
  cddp_ddp *ddp, *own; /* own: on `some`, a group of this rank alone */
  cddp_param q;
  cddp_optim *sgd, *idle;
} model;

/* Answers ask_resources. */
static void tell_resources(int rank, int *told) {
  resources *use = &shared->use[rank];
  if (*told == look(&shared->asked)) return;
  *told = look(&shared->asked);
  use->descriptors = ranks_open_fds();
  use->mappings = ranks_mappings("");
  use->kib = (size_t)ranks_shared_bytes() >> 10;
  bump(&shared->answers);
}

/* Asks the n living ranks of a job what they have open, and waits for the answers. */
static void ask_resources(int n) {
  double until = test_now() + RANKS_WITHIN(20.0);
  __atomic_store_n(&shared->answers, 0, __ATOMIC_SEQ_CST);
  bump(&shared->asked);
  while (look(&shared->answers) < n && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->answers), n);
}

static int points_left; /* until this process is killed */

static void die_at_point(const char *name) {
  (void)name;
  if (--points_left == 0) raise(SIGKILL);
}

static void kill_member(void) {
  kill(shared->member, SIGKILL);
  while (kill(shared->member, 0) == 0) ranks_sleep(0.001); /* until the test has waited for it */
}

/* From now on this process can allocate `spare` more bytes. */
static void limit_memory(size_t spare, rlim_t most_later) {
  unsigned long pages = 0;
  struct rlimit most;
  FILE *f = fopen("/proc/self/statm", "r");
  CHECK(f != NULL && fscanf(f, "%lu", &pages) == 1);
  if (f != NULL) fclose(f);
  most.rlim_max = most_later;
  most.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + spare;
  CHECK(setrlimit(RLIMIT_AS, &most) == 0);
}

static cddp_result model_open(model *m, const process_config *v) {
  static const size_t rows[2] = {0, ROWS};
  cddp_ddp_desc desc;
  cddp_sgd_desc o = v->sgd;
  cddp_adamw_desc a = v->adam;
  cddp_result r;
  double begin;
  memset(m, 0, sizeof *m);
  memset(&desc, 0, sizeof desc);
  m->adamw = v->adamw;
  m->before = v->before;
  m->another = v->another && v->join == NULL;
  m->reloads = v->reloads && v->join == NULL;
  ranks_environment(v->rank, v->world_size, v->port > 0 ? v->port : shared->port);
  ranks_setenv("CDDP_TIMEOUT_S", (long)v->timeout_s);
  if (v->join != NULL) setenv("CDDP_JOIN", v->join, 1);
  if (v->secret != NULL) setenv("CDDP_SECRET", v->secret, 1);
  m->p.name = "w";
  m->p.count = v->count;
  desc.shards = v->shards;
  desc.elastic = !v->plain;
  begin = test_now();
  if ((r = cddp_init(&m->g, NULL)) != CDDP_OK) return r;
  if (v->join != NULL) shared->init_s = test_now() - begin;
  if (v->orphan == 1) kill_member();
  CHECK_EQ(cddp_rank(m->g), v->rank);
  CHECK_EQ(cddp_world_size(m->g), v->world_size);
  m->p.data = cddp_alloc(m->g, v->count * sizeof(float));
  if (v->rows) {
    m->rows = true;
    m->table.name = "table";
    m->table.count = ROWS * WIDTH;
    m->table.data = cddp_alloc(m->g, ROWS * WIDTH * sizeof(float));
    desc.sparse_rows = rows;
  }
  if (v->extra > 0) {
    void *extra = cddp_alloc(m->g, v->extra);
    CHECK(extra != NULL);
    if (extra != NULL) memset(extra, 1, v->extra);
  }
  if (v->splits && v->join == NULL) {
    CHECK_OK(cddp_group_split(m->g, 0, 0, &m->all));
    CHECK_OK(cddp_group_split(m->g, v->rank == 0, 0, &m->some));
  }
  if (v->beside && v->join == NULL) {
    m->q = m->p;
    cddp_destroy(m->some); /* of `splits` */
    CHECK_OK(cddp_group_split(m->g, v->rank, 0, &m->some));
    CHECK_OK(cddp_ddp_create(&m->own, m->some, &m->q, 1, NULL));
  }
  points_left = v->dies_at;
  if (v->dies_at > 0) inside_at_point = die_at_point;
  r = cddp_ddp_create(&m->ddp, m->g, &m->p, 1 + v->rows, &desc);
  for (; v->again && r == CDDP_UNSUPPORTED && strstr(cddp_error(), "full") != NULL;
       ranks_sleep(0.01)) {
    bump(&shared->left);
    r = cddp_ddp_create(&m->ddp, m->g, &m->p, 1 + v->rows, &desc);
  }
  inside_at_point = NULL;
  if (r != CDDP_OK) return r;
  if (v->orphan == 2) kill_member();
  o.ddp = a.ddp = v->apart ? NULL : m->ddp;
  if (v->poor) {
    struct rlimit most;
    CHECK(getrlimit(RLIMIT_AS, &most) == 0);
    o.lr = 9; /* the job's replaces it */
    limit_memory(1 << 16, most.rlim_max);
    CHECK_IS(cddp_sgd_create(&m->sgd, &m->p, 1, &o), CDDP_OUT_OF_MEMORY);
    CHECK(setrlimit(RLIMIT_AS, &most) == 0);
  }
  if (v->adamw) return cddp_adamw_create(&m->sgd, &m->p, 1, &a);
  return cddp_sgd_create(&m->sgd, &m->p, 1 + v->rows, &o);
}

static void model_close(model *m) {
  cddp_optim_destroy(m->sgd);
  cddp_optim_destroy(m->idle);
  cddp_ddp_destroy(m->own);
  cddp_ddp_destroy(m->ddp);
  if (m->g != NULL) cddp_free(m->g, m->p.data);
  if (m->g != NULL) cddp_free(m->g, m->table.data);
  cddp_destroy(m->all);
  cddp_destroy(m->some);
  cddp_destroy(m->present);
  cddp_destroy(m->g);
}

/* The weights are those of a job without joins: the gradient is 1 for each shard. */
static bool right(const model *m, uint64_t steps) {
  const float *weights = (const float *)m->p.data;
  float w = 0, momentum = 0;
  uint64_t t;
  size_t i;
  for (t = 0; t < steps; t++) {
    momentum = t == 0 ? 1 : 0.5f * momentum + 1;
    w -= 0.125f * momentum;
  }
  for (i = 0; i < m->p.count && weights[i] == w;) i++;
  return i == m->p.count;
}

static void reload(model *m) {
  cddp_checkpoint_desc file;
  char path[64];
  memset(&file, 0, sizeof file);
  snprintf(path, sizeof path, "/dev/shm/cddp-join-%d", (int)getpid());
  file.optim = m->sgd;
  CHECK_OK(cddp_save(NULL, path, &m->p, 1, &file));
  file.optim = m->idle;
  CHECK_OK(cddp_load(NULL, path, &m->p, 1, &file));
  CHECK_EQ(unlink(path), 0);
  cddp_optim_destroy(m->sgd);
  m->sgd = m->idle;
  m->idle = NULL;
}

static cddp_result one_step(model *m) {
  cddp_sgd_desc o;
  cddp_result r;
  int shard;
  size_t i;
  if (m->another || m->reloads) {
    memset(&o, 0, sizeof o);
    o.lr = 0.125, o.momentum = 0.5;
    cddp_optim_destroy(m->idle);
    CHECK_OK(cddp_sgd_create(&m->idle, &m->p, 1, &o));
  }
  if (m->reloads) reload(m);
  while (cddp_ddp_next_shard(m->ddp, &shard)) {
    for (i = 0; i < m->p.count; i++) ((float *)m->p.grad)[i] += 1;
    if (m->rows) {
      int64_t row;
      float values[WIDTH] = {1};
      for (row = 0; row < ROWS; row += 2) CHECK_OK(cddp_ddp_add_rows(m->ddp, 1, &row, values, 1));
      if (cddp_ddp_ready(m->ddp, 1) != CDDP_OK) break;
    }
    if (cddp_ddp_ready(m->ddp, 0) != CDDP_OK) break;
  }
  if (m->before != NULL && m->before(m->sgd) == 1) r = cddp_ddp_wait(m->ddp);
  else r = cddp_ddp_step(m->ddp, m->sgd);
  if (r == CDDP_OK && !m->adamw && m->before == NULL) CHECK(right(m, cddp_ddp_steps(m->ddp)));
  return r;
}

/* A new group of the present ranks, which uses its buffers. */
static cddp_result renew_group(model *m) {
  static float x[1 << 16];
  cddp_result r;
  cddp_destroy(m->present);
  m->present = NULL;
  r = cddp_group_split(cddp_ddp_group(m->ddp), 0, 0, &m->present);
  return r != CDDP_OK ? r : cddp_all_reduce(m->present, x, 1 << 16, CDDP_F32, CDDP_SUM, NULL);
}

/* This rank destroys its model and keeps its weights. Its replacement must not write to them. */
static void leave(model *m) {
  double until = test_now() + RANKS_WITHIN(10.0);
  uint64_t steps = cddp_ddp_steps(m->ddp);
  cddp_optim_destroy(m->sgd);
  cddp_ddp_destroy(m->ddp);
  m->sgd = NULL;
  m->ddp = NULL;
  bump(&shared->left);
  while (look(&shared->joined) == 0 && test_now() < until) ranks_sleep(0.001);
  CHECK(right(m, steps));
}

/* A model that is not elastic, on the present ranks' group: joined ranks are ranks as others. */
static void train_plain_model(cddp_group *g) {
  const size_t rows[2] = {0, ROWS};
  const int64_t row = 1;
  const float one[WIDTH] = {1};
  float w[8] = {0}, table[ROWS * WIDTH] = {0};
  cddp_param p[2] = {{"w", w, NULL, 8, CDDP_F32}, {"table", table, NULL, ROWS * WIDTH, CDDP_F32}};
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_ddp *d = NULL;
  cddp_optim *sgd = NULL;
  int shard, shards = 0, size = cddp_world_size(g), k;
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  desc.sparse_rows = rows;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  o.lr = 1;
  o.ddp = d;
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  for (; cddp_ddp_next_shard(d, &shard); shards++) {
    for (k = 0; k < 8; k++) ((float *)p[0].grad)[k] += (float)shard;
    CHECK_OK(cddp_ddp_add_rows(d, 1, &row, one, 1));
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_ready(d, 1));
  }
  CHECK_EQ(shards, 1);
  CHECK_OK(cddp_ddp_step(d, sgd));
  for (k = 0; k < 8; k++) CHECK(w[k] == -(float)(size - 1) / 2);
  CHECK(table[WIDTH] == -1 && table[0] == 0);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(d);
  p[0].grad = p[1].grad = NULL;
  desc.shards = size - 1; /* each rank needs one */
  if (size > 1) CHECK_IS(cddp_ddp_create(&d, g, p, 2, &desc), CDDP_INVALID_ARGUMENT);
}

static void limit_descriptors(int most) {
  struct rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = limit.rlim_max = (rlim_t)most;
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/* A rank of the job. It trains until the test says stop, which all ranks see in the same step. */
static int life(int rank, void *arg) {
  process_config v = *(const process_config *)arg;
  cddp_ddp_desc desc;
  cddp_result r;
  model m;
  float stop = 0;
  int told = look(&shared->asked);
  bool counted = false;
  (void)rank;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (v.environment != NULL) v.environment();
  if (v.descriptors > 0) limit_descriptors(v.descriptors);
  v.rank = v.join == NULL ? rank : v.rank;
  if (v.bare) CHECK(close(STDIN_FILENO) == 0 && close(STDOUT_FILENO) == 0);
  if ((r = model_open(&m, &v)) == CDDP_OK && v.join == NULL) bump(&shared->running);
  if (v.crowd) {
    if (r != CDDP_OK) snprintf(shared->text, sizeof shared->text, "%s", cddp_error());
    __atomic_store_n(&shared->crowd[v.rank], (int)r + 1, __ATOMIC_SEQ_CST);
    if (r != CDDP_OK) {
      model_close(&m);
      return 0;
    }
  }
  while (v.waits && look(&shared->left) == 0) ranks_sleep(0.001);
  while (r == CDDP_OK && stop == 0) {
    cddp_group *g;
    if (v.plain) {
      ranks_sleep(0.01);
      stop = (float)look(&shared->stop);
      continue;
    }
    if ((r = one_step(&m)) != CDDP_OK) break;
    shared->steps = cddp_ddp_steps(m.ddp);
    if (v.rank < 8) tell_resources(v.rank, &told);
    if (v.rows && v.rank == 0) shared->memory = (size_t)ranks_shared_bytes();
    stop = (float)look(&shared->stop);
    g = cddp_ddp_group(m.ddp);
    if (cddp_world_size(g) == 4 && v.rank < 8) shared->placed[v.rank] = cddp_rank(g) + 1;
    r = cddp_all_reduce(g, &stop, 1, CDDP_F32, CDDP_MAX, NULL);
    if (r == CDDP_OK && v.join != NULL && !counted) { /* from now on the others have it */
      counted = true;
      bump(&shared->joined);
    }
    if (r == CDDP_OK && v.renews) r = renew_group(&m);
    if (v.join != NULL && look(&shared->killed) != 0) raise(SIGKILL);
    if (r == CDDP_PEER_LOST) r = CDDP_OK, stop = 0; /* the next step has another group */
    if (v.join != NULL && stop != 0) shared->took = cddp_world_size(g);
    if (v.quits > 0 && counted && --v.quits == 0) break;
    if (v.leaves && v.join == NULL && rank == 1 && cddp_ddp_steps(m.ddp) >= 3) {
      leave(&m);
      break;
    }
  }
  CHECK_OK(r);
  if (r == CDDP_OK && stop != 0 && !v.plain && v.descriptors == 0)
    train_plain_model(cddp_ddp_group(m.ddp));
  if (v.bare) CHECK(fcntl(STDIN_FILENO, F_GETFD) < 0 && fcntl(STDOUT_FILENO, F_GETFD) < 0);
  if (v.join != NULL) { /* the group that cddp_init has made is no group */
    CHECK_IS(cddp_barrier(m.g), CDDP_UNSUPPORTED);
    CHECK(strstr(cddp_error(), "cddp_ddp_group") != NULL);
    cddp_optim_destroy(m.sgd);
    cddp_ddp_destroy(m.ddp);
    m.sgd = NULL;
    memset(&desc, 0, sizeof desc);
    desc.elastic = true;
    CHECK_IS(cddp_ddp_create(&m.ddp, m.g, &m.p, 1, &desc), CDDP_UNSUPPORTED);
  }
  model_close(&m);
  return 0;
}

/* A process that must be refused. */
static int refused(int rank, void *arg) {
  const process_config *v = (const process_config *)arg;
  double begin = test_now();
  struct rusage used;
  int steps = 0;
  model m;
  (void)rank;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (v->lacks && v->early) limit_memory(v->spare, RLIM_INFINITY);
  shared->result = model_open(&m, v);
  if (v->lacks && !v->early) limit_memory(v->spare, RLIM_INFINITY);
  while (shared->result == CDDP_OK &&
         (v->apart || v->before != NULL || (v->lacks && steps++ < 3)) &&
         test_now() < begin + RANKS_WITHIN(20.0)) {
    float none = 0; /* as life */
    shared->result = one_step(&m);
    if (shared->result == CDDP_OK)
      shared->result = cddp_all_reduce(cddp_ddp_group(m.ddp), &none, 1, CDDP_F32, CDDP_MAX, NULL);
  }
  snprintf(shared->text, sizeof shared->text, "%s", cddp_error());
  shared->took = test_now() - begin;
  CHECK_EQ(getrusage(RUSAGE_SELF, &used), 0);
  shared->cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
  model_close(&m);
  return 0;
}

static process_config usual(void) {
  process_config v;
  memset(&v, 0, sizeof v);
  v.world_size = 2;
  v.shards = SHARDS;
  v.count = COUNT;
  v.timeout_s = 20;
  v.rank = 2;
  v.join = "1";
  v.sgd.lr = v.adam.lr = 0.125;
  v.sgd.momentum = 0.5;
  return v;
}

static void begin_job(pid_t *pids, const process_config *v) {
  double until = test_now() + RANKS_WITHIN(10.0);
  int i;
  memset(shared, 0, sizeof *shared);
  shared->port = ranks_free_port();
  for (i = 0; i < v->world_size; i++) pids[i] = ranks_fork(life, i, (void *)(uintptr_t)v);
  while (look(&shared->running) < v->world_size && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->running), v->world_size);
}

static void end_job(pid_t *pids, int n) {
  int status[8], i;
  __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  ranks_join(pids, n, RANKS_WITHIN(10.0), status);
  for (i = 0; i < n; i++) CHECK_EQ(status[i], 0);
}

static void refuse(const process_config *v) {
  int status;
  pid_t pid = ranks_fork(refused, 0, (void *)(uintptr_t)v);
  ranks_join(&pid, 1, RANKS_WITHIN(30.0), &status);
  CHECK_EQ(status, 0);
}

/* A further rank joins, and one more is too many. Then a process replaces a dead rank. */
static void test_comes(void) {
  process_config first = usual(), v = usual(), late = usual();
  pid_t pids[4];
  double until = test_now() + RANKS_WITHIN(20.0);
  int status;
  first.join = NULL;
  begin_job(pids, &first);
  pids[2] = ranks_fork(life, 2, &v);
  while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
  late.rank = 3;
  refuse(&late);
  CHECK_IS(shared->result, CDDP_UNSUPPORTED);
  CHECK(error_contains("full"));
  late.rank = 1;
  refuse(&late);
  CHECK(shared->result != CDDP_OK); /* full, and the rank is there */
  late.rank = 4096; /* nobody would find it */
  refuse(&late);
  CHECK_IS(shared->result, CDDP_INVALID_ARGUMENT);
  kill(pids[0], SIGKILL);
  waitpid(pids[0], &status, 0);
  late.rank = 1;
  refuse(&late);
  CHECK_IS(shared->result, CDDP_INVALID_ARGUMENT);
  CHECK(error_contains("rank 1 (pid "));
  late.rank = 0;
  pids[0] = ranks_fork(life, 0, &late);
  while (look(&shared->joined) < 2 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 2);
  end_job(pids, 3);
  CHECK_EQ(shared->took, 3); /* ranks in the last step */
}

/* A process that the job has refused, as it was full, is admitted when a rank has died. */
static void test_again(void) {
  process_config first = usual(), v = usual();
  pid_t pids[3];
  int status;
  first.join = NULL;
  first.shards = v.shards = 2;
  v.again = true;
  begin_job(pids, &first);
  pids[2] = ranks_fork(life, 2, &v);
  await(&shared->left, 2);
  kill(pids[1], SIGKILL);
  waitpid(pids[1], &status, 0);
  await(&shared->joined, 1);
  pids[1] = pids[2];
  end_job(pids, 2);
}

/* The joining process gets the states of the optimizer that steps. */
static void test_another(void) {
  process_config first = usual(), v = usual();
  pid_t pids[3];
  int k;
  first.join = NULL;
  for (k = 0; k < 2; k++) {
    first.another = k == 0;
    first.reloads = k == 1;
    begin_job(pids, &first);
    pids[2] = ranks_fork(life, 2, &v);
    await(&shared->joined, 1);
    end_job(pids, 3);
  }
}

/* Opens the memory that the ranks of pid's host share. */
static int open_shared_memory(pid_t pid) {
  char dir[64], path[400], name[16];
  struct dirent *e;
  int fd = -1;
  DIR *d;
  snprintf(dir, sizeof dir, "/proc/%d/fd", (int)pid);
  d = opendir(dir);
  while (fd < 0 && d != NULL && (e = readdir(d)) != NULL) {
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    if (readlink(path, name, sizeof name) > 11 && memcmp(name, "/memfd:cddp", 11) == 0)
      fd = open(path, O_RDWR | O_CLOEXEC);
  }
  if (d != NULL) closedir(d);
  return fd;
}

/* Two processes take their place in the shared memory at the same moment: the second one waits
   until the first has taken it. Here the test is the first one, for 0.2 s. */
static void test_same_place(void) {
  process_config first = usual(), v = usual();
  struct flock lock;
  pid_t pids[3];
  int fd;
  first.join = NULL;
  begin_job(pids, &first);
  fd = open_shared_memory(pids[0]);
  memset(&lock, 0, sizeof lock);
  lock.l_type = F_WRLCK;
  lock.l_start = 2; /* behind the bytes of ranks 0 and 1 */
  lock.l_len = 4;
  CHECK(fd >= 0 && fcntl(fd, F_OFD_SETLK, &lock) == 0);
  pids[2] = ranks_fork(life, 2, &v);
  ranks_sleep(0.2);
  CHECK_EQ(look(&shared->joined), 0);
  lock.l_type = F_UNLCK; /* the lock is also the forked process's */
  CHECK(fcntl(fd, F_OFD_SETLK, &lock) == 0);
  close(fd);
  await(&shared->joined, 1);
  end_job(pids, 3);
}

/* Ranks 1 and 2 of 4 die at once: the processes that replace them have the ranks that these had,
   whichever comes first. */
static void test_places(void) {
  process_config first = usual(), v[2];
  int i, k, status, round;
  pid_t pids[4];
  first.join = NULL;
  first.world_size = first.shards = 4;
  begin_job(pids, &first);
  v[0] = v[1] = first;
  v[0].join = v[1].join = "1";
  for (round = 0; round < 4; round++) {
    double until = test_now() + RANKS_WITHIN(20.0);
    for (i = 1; i <= 2; i++) kill(pids[i], SIGKILL);
    for (i = 1; i <= 2; i++) waitpid(pids[i], &status, 0);
    memset(shared->placed, 0, sizeof shared->placed);
    for (k = 0; k < 2; k++) {
      i = k == round % 2 ? 2 : 1;
      v[i - 1].rank = i;
      pids[i] = ranks_fork(life, i, &v[i - 1]);
      while (k == 0 && round >= 2 && look(&shared->joined) <= 2 * round && test_now() < until)
        ranks_sleep(0.001);
    }
    while (look(&shared->joined) < 2 * round + 2 && test_now() < until) ranks_sleep(0.001);
    CHECK_EQ(look(&shared->joined), 2 * round + 2);
    for (i = 0; i < 4; i++) {
      while (look(&shared->placed[i]) == 0 && test_now() < until) ranks_sleep(0.001);
      CHECK_EQ(look(&shared->placed[i]), i + 1);
    }
  }
  end_job(pids, 4);
}

/* The descriptors for a joined rank are never 0, 1 or 2, which the program can still open. */
static void test_no_stdio(void) {
  process_config first = usual(), v;
  double until = test_now() + RANKS_WITHIN(20.0);
  pid_t pids[3];
  first.bare = true;
  v = first;
  first.join = NULL;
  begin_job(pids, &first);
  pids[2] = ranks_fork(life, 2, &v);
  while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 1);
  end_job(pids, 3);
}

/* A rank leaves and keeps its weights, while another process replaces it. */
static void test_leaves(void) {
  process_config first = usual(), v = usual();
  double until = test_now() + RANKS_WITHIN(20.0);
  pid_t pids[3];
  first.join = NULL;
  first.leaves = true;
  begin_job(pids, &first);
  while (look(&shared->left) < 1 && test_now() < until) ranks_sleep(0.001);
  v.rank = 1;
  pids[2] = ranks_fork(life, 2, &v);
  while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 1);
  end_job(pids, 3);
}

/* Without a number of shards the job has one for each first rank, also in a process that replaces
   one with an unused RANK. */
static void test_no_shards(void) {
  static const char *const hosts[] = {NULL, "ab", "abc", NULL, NULL};
  static const int ranks[] = {2, 2, 3, 4, 6};
  pid_t pids[6];
  int i, status;
  for (i = 0; i < 5; i++) {
    process_config first = usual(), v, late;
    if (hosts[i] != NULL) setenv("TEST_HOSTS", hosts[i], 1);
    first.shards = 0;
    first.world_size = ranks[i];
    v = late = first;
    first.join = NULL;
    begin_job(pids, &first);
    late.rank = 10;
    refuse(&late);
    CHECK_IS(shared->result, CDDP_UNSUPPORTED);
    CHECK(error_contains("full"));
    kill(pids[ranks[i] - 1], SIGKILL);
    waitpid(pids[ranks[i] - 1], &status, 0);
    v.rank = 76 + ranks[i] - 1; /* TEST_HOSTS: on the host of the lost one, or on a new one */
    pids[ranks[i] - 1] = ranks_fork(life, v.rank, &v);
    await(&shared->joined, 1);
    end_job(pids, ranks[i]);
    CHECK_EQ(shared->took, ranks[i]);
    unsetenv("TEST_HOSTS");
  }
}

/* A job that began as one rank. All others join later and continue without it. */
static void test_alone(void) {
  process_config first = usual(), v[2];
  pid_t pids[3];
  double until = test_now() + RANKS_WITHIN(20.0);
  int status, i;
  first.join = NULL;
  first.world_size = 1;
  begin_job(pids, &first);
  for (i = 0; i < 2; i++) {
    v[i] = usual();
    v[i].world_size = 1;
    v[i].rank = 1 + i;
    pids[1 + i] = ranks_fork(life, 1 + i, &v[i]);
  }
  while (look(&shared->joined) < 2 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 2);
  kill(pids[0], SIGKILL);
  waitpid(pids[0], &status, 0);
  end_job(pids + 1, 2);
  CHECK(shared->took >= 2); /* the dead one may have done its part of the last step */
}

/* Ranks die and others join, again and again. Their shared memory must not grow. */
static void test_many(void) {
  process_config first = usual(), v[2];
  size_t memory = 0;
  pid_t pids[3];
  int i, status, rounds = getenv("ROUNDS") != NULL ? atoi(getenv("ROUNDS")) : 90;
  first.join = NULL;
  first.rows = true;
  begin_job(pids, &first);
  for (i = 0; i < rounds && test_failures == 0; i++) {
    double until = test_now() + RANKS_WITHIN(20.0);
    int rank = 1 + i % 2;
    if (i != 1) {
      kill(pids[rank], SIGKILL);
      waitpid(pids[rank], &status, 0);
    }
    v[i % 2] = first;
    v[i % 2].rank = rank;
    v[i % 2].join = "1";
    pids[rank] = ranks_fork(life, rank, &v[i % 2]);
    while (look(&shared->joined) <= i && test_now() < until) ranks_sleep(0.0005);
    CHECK_EQ(look(&shared->joined), i + 1);
    if (i == rounds / 3) memory = shared->memory;
  }
  fprintf(stderr, "  %zu KiB, in the end %zu KiB\n", memory >> 10, shared->memory >> 10);
  CHECK(shared->memory < 2 * memory); /* a leak of a round would make it 60 times */
  end_job(pids, 3);
}

/* Waits until the process that replaces rank 1 is a member, or (dies_at) has died before. */
static void await_replacement(pid_t pid, const process_config *v, int *joined) {
  double until = test_now() + RANKS_WITHIN(20.0);
  int status;
  while (look(&shared->joined) == *joined && test_now() < until &&
         (v->dies_at == 0 || (kill(pid, 0) == 0 && waitpid(pid, &status, WNOHANG) == 0)))
    ranks_sleep(0.0005);
  CHECK(v->dies_at > 0 || look(&shared->joined) == *joined + 1);
  *joined = look(&shared->joined);
}

/* Rank 1 is replaced `rounds` times. Each replacement allocates memory, and is killed: each third
   one at some point of cddp_ddp_create, the others as members. The survivors must not keep anything
   of these processes: with few descriptors they live as long as with many. */
static void replace_rank(int rounds, const char *hosts) {
  process_config first = usual(), v;
  resources begin[3];
  pid_t pids[3];
  int i, k, status, joined = 0;
  memset(begin, 0, sizeof begin);
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  first.join = NULL;
  first.world_size = 3;
  first.descriptors = 64;
  first.extra = (size_t)1 << 20;
  begin_job(pids, &first);
  for (i = 0; i < rounds && test_failures == 0; i++) {
    kill(pids[1], SIGKILL);
    waitpid(pids[1], &status, 0);
    if (i == 4) {
      for (k = 0; k < 3; k++) ask_resources(2);
      memcpy(begin, shared->use, sizeof begin);
    }
    v = first;
    v.rank = 1;
    v.join = "1";
    v.dies_at = i % 3 == 2 ? 1 + (int)(ranks_mix(4, (uint64_t)i, 1) % 60) : 0;
    pids[1] = ranks_fork(life, 1, &v);
    await_replacement(pids[1], &v, &joined);
  }
  kill(pids[1], SIGKILL);
  waitpid(pids[1], &status, 0);
  for (k = 0; k < 3; k++) ask_resources(2);
  for (k = 0; k < 3; k += 2) {
    const resources *old = &begin[k], *use = &shared->use[k];
    fprintf(stderr, "  %s: rank %d: %d descriptors, %d mappings, %zu KiB, in the end %d, %d, %zu\n",
            hosts != NULL ? hosts : "a", k, old->descriptors, old->mappings, old->kib,
            use->descriptors, use->mappings, use->kib);
    CHECK(use->descriptors <= old->descriptors + 2);
    CHECK(use->mappings <= old->mappings + 4 || RANKS_SLOW);
    CHECK(use->kib < old->kib + 900);
  }
  pids[1] = pids[2];
  end_job(pids, 2);
  unsetenv("TEST_HOSTS");
}

static void test_descriptors(void) {
  bool is_long = getenv("ROUNDS") != NULL;
  int rounds = is_long ? atoi(getenv("ROUNDS")) : 7;
  replace_rank(rounds, NULL);
  replace_rank(rounds, "aab");
  if (is_long) replace_rank(rounds, "abc");
}

/* Processes join and end in every way: killed as members, killed at any point of cddp_ddp_create,
   refused, or in good order. One step later the survivors have nothing of them, also if they have
   another model (beside), or groups of their own (renews). */
static void lose_processes(int rounds, const char *hosts, bool beside, bool renews) {
  process_config first = usual(), v;
  resources begin;
  pid_t pids[3];
  int i, status, joined = 0;
  memset(&begin, 0, sizeof begin);
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  first.join = NULL;
  first.extra = (size_t)1 << 20;
  first.count = 65536;
  first.shards = 2;
  first.beside = beside;
  first.renews = renews;
  begin_job(pids, &first);
  v = first;
  v.rank = 1;
  v.join = "1";
  kill(pids[1], SIGKILL);
  waitpid(pids[1], &status, 0);
  for (i = 0; i < rounds && test_failures == 0; i++) {
    v.dies_at = i % 3 == 1 ? 1 + (int)(ranks_mix(3, (uint64_t)i, 1) % 60) : 0;
    v.quits = i % 3 == 2 ? 2 : 0;
    pids[1] = ranks_fork(life, 1, &v);
    await_replacement(pids[1], &v, &joined);
    if (v.dies_at == 0 && v.quits == 0) {
      v.rank = 2; /* one more than there are shards */
      refuse(&v);
      CHECK_IS(shared->result, CDDP_UNSUPPORTED);
      v.rank = 1;
    }
    if (v.quits == 0 && renews) bump(&shared->killed);
    else if (v.quits == 0) kill(pids[1], SIGKILL);
    waitpid(pids[1], &status, 0);
    shared->killed = 0;
    if (i == 2) {
      for (status = 0; status < 3; status++) ask_resources(1);
      begin = shared->use[0];
    }
  }
  for (i = 0; i < 3; i++) ask_resources(1);
  fprintf(stderr, "  %s: %d, in the end %d mappings; %zu, %zu KiB; %d, %d descriptors\n",
          hosts != NULL ? hosts : "aa", begin.mappings, shared->use[0].mappings, begin.kib,
          shared->use[0].kib, begin.descriptors, shared->use[0].descriptors);
  CHECK(shared->use[0].mappings <= begin.mappings + 4 || RANKS_SLOW);
  CHECK(shared->use[0].kib < begin.kib + 900);
  CHECK(shared->use[0].descriptors <= begin.descriptors + 2);
  end_job(pids, 1);
  unsetenv("TEST_HOSTS");
}

static void test_memory_of_lost_processes(void) {
  bool is_long = getenv("ROUNDS") != NULL;
  lose_processes(is_long ? atoi(getenv("ROUNDS")) : 9, NULL, false, false);
  lose_processes(6, NULL, true, false);
  lose_processes(9, NULL, false, true);
  if (is_long) lose_processes(atoi(getenv("ROUNDS")), "ab", false, false);
}

static int dies_without_a_model(int rank, void *arg) {
  cddp_group *g;
  void *p;
  (void)arg;
  ranks_environment(rank, 2, shared->port);
  setenv("CDDP_JOIN", "1", 1);
  CHECK_OK(cddp_init(&g, NULL));
  CHECK((p = cddp_alloc(g, (size_t)16 << 20)) != NULL);
  if (p != NULL) memset(p, 1, (size_t)16 << 20);
  _exit(test_failures != 0);
}

/* Processes join in cddp_init, and end before they ask for a meeting: as a program that does not
   find its data, started again and again. */
static void test_memory_without_a_meeting(void) {
  process_config first = usual();
  size_t begin;
  pid_t pids[2], pid;
  int i, status;
  first.join = NULL;
  begin_job(pids, &first);
  ask_resources(2);
  begin = shared->use[0].kib;
  for (i = 0; i < 5; i++) {
    pid = ranks_fork(dies_without_a_model, 5, NULL);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  }
  for (i = 0; i < 4; i++) ask_resources(2);
  CHECK(shared->use[0].kib < begin + 8192);
  end_job(pids, 2);
}

/* Rank 0 dies. A step later its memory is gone, though the others keep cddp_init's group and groups
   whose control blocks are there. */
static void lose_rank_0(bool beside) {
  process_config v = usual();
  resources before, after;
  pid_t pids[3];
  int status, i;
  v.join = NULL;
  v.world_size = 3;
  v.extra = (size_t)24 << 20;
  v.splits = true;
  v.beside = beside;
  begin_job(pids, &v);
  ask_resources(3);
  before = shared->use[1];
  kill(pids[0], SIGKILL);
  waitpid(pids[0], &status, 0);
  for (i = 0; i < 4; i++) ask_resources(2);
  after = shared->use[1];
  fprintf(stderr, "  %zu KiB, without rank 0 %zu KiB\n", before.kib, after.kib);
  CHECK(before.kib > 3 * (v.extra >> 10));
  CHECK(after.kib < before.kib - (v.extra >> 10));
  CHECK(after.kib > 2 * (v.extra >> 10));
  end_job(pids + 1, 2);
}

static void test_memory_of_rank_0(void) {
  lose_rank_0(false);
  lose_rank_0(true); /* the groups that it splits have no model */
}

/* One rank trains alone, a second one joins. Then the first one dies: the second one has all. */
static void test_large_alone(void) {
  static const size_t counts[] = {100000, (2 << 20) / 4, 16 << 20};
  size_t i;
  for (i = 0; i < sizeof counts / sizeof *counts - (RANKS_SLOW ? 1 : 0); i++) {
    process_config first = usual(), v;
    pid_t pids[2];
    double until = test_now() + RANKS_WITHIN(20.0);
    int status;
    first.join = NULL;
    first.world_size = 1;
    first.shards = 2;
    first.count = counts[i];
    first.extra = (size_t)100 << i;
    begin_job(pids, &first);
    v = first;
    v.rank = 1;
    v.join = "1";
    pids[1] = ranks_fork(life, 1, &v);
    while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
    CHECK_EQ(look(&shared->joined), 1);
    if (i % 2 == 0) {
      kill(pids[0], SIGKILL);
      waitpid(pids[0], &status, 0);
      end_job(pids + 1, 1);
    } else {
      end_job(pids, 2);
    }
  }
}

/* Ranks as a container's runtime or a set-uid launcher starts them. Nobody may open another rank's
   descriptors by /proc, and the address space or files have a limit. */
static void own_user_namespace(void) {
  if (geteuid() == 0 && (setgid(1234) != 0 || setuid(1234) != 0)) _exit(9);
  (void)prctl(PR_SET_DUMPABLE, 1);
  if (unshare(CLONE_NEWUSER) != 0) fprintf(stderr, "  no user namespaces\n");
}
static void not_dumpable(void) { CHECK(prctl(PR_SET_DUMPABLE, 0) == 0); }
static void little_address_space(void) {
  struct rlimit most = {(rlim_t)16 << 30, (rlim_t)16 << 30};
  CHECK(RANKS_SLOW || setrlimit(RLIMIT_AS, &most) == 0);
}
static void small_files(void) {
  struct rlimit most = {65536, 65536};
  CHECK(setrlimit(RLIMIT_FSIZE, &most) == 0);
}

static void test_confined(void) {
  static void (*const environments[])(void) = {own_user_namespace, not_dumpable,
                                               little_address_space, small_files};
  size_t kib;
  int i, status;
  for (i = 0; i < 4; i++) {
    process_config first = usual(), v;
    double until = test_now() + RANKS_WITHIN(20.0);
    pid_t pids[3];
    first.join = NULL;
    first.environment = environments[i] == small_files ? NULL : environments[i]; /* no joins */
    first.extra = (size_t)24 << 20;
    begin_job(pids, &first);
    ask_resources(2);
    kib = shared->use[1].kib;
    kill(pids[0], SIGKILL);
    waitpid(pids[0], &status, 0);
    v = first;
    v.environment = environments[i];
    v.rank = 0;
    v.join = "1";
    pids[0] = ranks_fork(life, 0, &v);
    while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
    CHECK_EQ(look(&shared->joined), 1);
    ask_resources(2);
    ask_resources(2);
    CHECK(shared->use[1].kib < kib + (first.extra >> 10)); /* that of two processes */
    end_job(pids, 2);
  }
}

/* Rank after rank dies, and none is replaced. */
static void test_descriptors_of_lost_ranks(void) {
  static const char *const hosts[] = {"", "aab", "abcdef"};
  enum { RANKS = 6 };
  process_config v = usual();
  resources use[RANKS];
  pid_t pids[RANKS];
  int i, k, status, left, tries, more;
  v.join = NULL;
  v.world_size = v.shards = RANKS;
  for (i = 0; i < 3; i++) {
    setenv("TEST_HOSTS", hosts[i], 1);
    begin_job(pids, &v);
    ranks_sleep(0.05); /* until all links exist */
    ask_resources(RANKS);
    memcpy(use, shared->use, sizeof use);
    for (left = RANKS - 1; left > 1; left--) {
      kill(pids[left], SIGKILL);
      waitpid(pids[left], &status, 0);
      for (tries = more = 1; more > 0 && tries < 50; tries++) { /* a meeting can still go on */
        ranks_sleep(0.02);
        ask_resources(left);
        for (k = more = 0; k < left; k++) /* two hosts' ranks have one link or two */
          more += shared->use[k].descriptors > use[k].descriptors - (i > 0 && left == 2 ? 3 : 0) +
                                                   (i > 0 && left > 2 ? 2 * left : 0);
      }
      CHECK_EQ(more, 0);
    }
    end_job(pids, 2);
  }
  unsetenv("TEST_HOSTS");
}

/* --- the log of a loss, after a checkpoint was loaded --- */

typedef struct logging {
  bool loads; /* the second of two jobs, in which rank 1 is killed in step 4 */
  char path[64], lines[4096];
  int port, failures; /* lines of level 0 */
} logging;

static void log_line(int level, const char *text, void *user) {
  logging *log = (logging *)user;
  size_t n = strlen(log->lines);
  log->failures += level == 0;
  snprintf(log->lines + n, sizeof log->lines - n, "%s\n", text);
}

static int log_life(int rank, void *arg) {
  logging *log = (logging *)arg;
  float w[8] = {0};
  cddp_param p = {"w", w, NULL, 8, CDDP_F32};
  cddp_group_desc desc;
  cddp_ddp_desc with;
  cddp_sgd_desc o;
  cddp_checkpoint_desc file;
  cddp_group *g;
  int shard;
  memset(&desc, 0, sizeof desc);
  memset(&with, 0, sizeof with);
  memset(&o, 0, sizeof o);
  memset(&file, 0, sizeof file);
  ranks_environment(rank, 2, log->port);
  if (rank == 0) desc.logger.log = log_line;
  desc.logger.user_data = log;
  with.shards = 4;
  with.elastic = true;
  o.lr = 0.125;
  CHECK_OK(cddp_init(&g, &desc));
  CHECK_OK(cddp_ddp_create(&file.ddp, g, &p, 1, &with));
  CHECK_OK(cddp_sgd_create(&file.optim, &p, 1, &o));
  if (log->loads) CHECK_OK(cddp_load(g, log->path, &p, 1, &file));
  while (test_failures == 0 && cddp_ddp_steps(file.ddp) < (log->loads ? 6 : 3)) {
    while (cddp_ddp_next_shard(file.ddp, &shard)) {
      if (rank == 1 && cddp_ddp_steps(file.ddp) == 4) raise(SIGKILL);
      CHECK_OK(cddp_ddp_ready(file.ddp, 0));
    }
    CHECK_OK(cddp_ddp_step(file.ddp, file.optim));
  }
  if (!log->loads) CHECK_OK(cddp_save(g, log->path, &p, 1, &file));
  cddp_optim_destroy(file.optim);
  cddp_ddp_destroy(file.ddp);
  cddp_destroy(g);
  return 0;
}

static void test_log(void) {
  logging *log = (logging *)ranks_shared(sizeof *log);
  int status[2], loads;
  pid_t pids[2];
  snprintf(log->path, sizeof log->path, "/tmp/cddp-log-%d.safetensors", (int)getpid());
  for (loads = 0; loads < 2; loads++) {
    log->loads = loads != 0;
    log->port = ranks_free_port();
    pids[0] = ranks_fork(log_life, 0, log);
    pids[1] = ranks_fork(log_life, 1, log);
    ranks_join(pids, 2, RANKS_WITHIN(20.0), status);
    CHECK(status[0] == 0 && (loads ? WIFSIGNALED(status[1]) : status[1] == 0));
  }
  CHECK(strstr(log->lines, "is lost; the others do its shards of step 4\n") != NULL);
  CHECK(strstr(log->lines, "1 rank continues with step 4\n") != NULL);
  CHECK_EQ(log->failures, 1);
  if (log->failures != 1) fprintf(stderr, "%s", log->lines);
  unlink(log->path);
}

static uint64_t trained; /* steps of this rank's last model */

/* Steps of a rank, until all know that the test has seen enough; then the model goes. */
static cddp_result train(model *m, bool joins) {
  cddp_result r = CDDP_OK;
  float stop = 0;
  bool counted = false;
  while (r == CDDP_OK && stop == 0) {
    if ((r = one_step(m)) != CDDP_OK) return r;
    stop = (float)look(&shared->stop);
    r = cddp_all_reduce(cddp_ddp_group(m->ddp), &stop, 1, CDDP_F32, CDDP_MAX, NULL);
    if (r == CDDP_OK && joins && !counted) bump(&shared->joined);
    counted = true;
  }
  trained = cddp_ddp_steps(m->ddp);
  cddp_optim_destroy(m->sgd);
  cddp_ddp_destroy(m->ddp);
  m->sgd = NULL;
  m->ddp = NULL;
  return r;
}

enum { PIECES = 24 };

/* A job has a model, and then another one in the same group. Rank 2 has joined the first and keeps
   its weights. Rank 3 knows the first model and tries to join after its end, while rank 0 reuses
   the memory. Rank 4 joins the second model. */
static int twice_life(int rank, void *arg) {
  process_config v = *(const process_config *)arg;
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  int *pieces[PIECES], i;
  size_t n[PIECES], k;
  model m;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  desc.elastic = true;
  v.rank = rank;
  v.join = rank >= 2 ? "1" : NULL;
  if (rank == 3) { /* as model_open, with a pause */
    memset(&m, 0, sizeof m);
    ranks_environment(3, v.world_size, shared->port);
    setenv("CDDP_JOIN", "1", 1);
    CHECK_OK(cddp_init(&m.g, NULL));
    m.p.name = "w";
    m.p.count = v.count;
    m.p.data = cddp_alloc(m.g, v.count * sizeof(float));
    bump(&shared->left);
    await(&shared->running, 3);
    CHECK_IS(cddp_ddp_create(&m.ddp, m.g, &m.p, 1, &desc), CDDP_PEER_LOST);
    CHECK(strstr(cddp_error(), "has ended") != NULL);
    bump(&shared->left);
    model_close(&m);
    return 0;
  }
  CHECK_OK(model_open(&m, &v));
  if (v.join == NULL) bump(&shared->running);
  CHECK_OK(train(&m, v.join != NULL));
  if (rank == 2) {
    await(&shared->left, 3); /* the test has seen the end of the second model */
    CHECK(right(&m, trained));
  }
  if (rank < 2) {
    for (i = 0; rank == 0 && i < PIECES; i++) {
      n[i] = i == 0 ? 1024 : n[i - 1] * 3 / 2;
      pieces[i] = (int *)cddp_alloc(m.g, n[i] * sizeof(int));
      for (k = 0; k < n[i]; k++) pieces[i][k] = 7;
    }
    if (rank == 0) bump(&shared->running);
    await(&shared->left, 2);
    for (i = 0; rank == 0 && i < PIECES; i++) {
      for (k = 0; k < n[i] && pieces[i][k] == 7;) k++;
      CHECK_EQ(k, n[i]);
      cddp_free(m.g, pieces[i]);
    }
    memset(m.p.data, 0, m.p.count * sizeof(float));
    m.p.grad = NULL;
    desc.shards = SHARDS;
    CHECK_OK(cddp_barrier(m.g));
    if (rank == 0) __atomic_store_n(&shared->stop, 0, __ATOMIC_SEQ_CST);
    CHECK_OK(cddp_barrier(m.g));
    CHECK_OK(cddp_ddp_create(&m.ddp, m.g, &m.p, 1, &desc));
    o.lr = 0.125;
    o.momentum = 0.5;
    o.ddp = m.ddp;
    CHECK_OK(cddp_sgd_create(&m.sgd, &m.p, 1, &o));
    bump(&shared->running);
    CHECK_OK(train(&m, false));
  }
  model_close(&m);
  return 0;
}

static void test_two_models(void) {
  process_config v = usual();
  int status[5], rank;
  pid_t pids[5];
  memset(shared, 0, sizeof *shared);
  shared->port = ranks_free_port();
  for (rank = 0; rank < 2; rank++) pids[rank] = ranks_fork(twice_life, rank, &v);
  await(&shared->running, 2);
  for (; rank < 4; rank++) pids[rank] = ranks_fork(twice_life, rank, &v);
  await(&shared->joined, 1);
  await(&shared->left, 1);
  __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  await(&shared->running, 5);
  pids[4] = ranks_fork(twice_life, 4, &v);
  await(&shared->joined, 2);
  __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  ranks_join(pids + 4, 1, RANKS_WITHIN(10.0), status + 4);
  bump(&shared->left);
  ranks_join(pids, 4, RANKS_WITHIN(10.0), status);
  for (rank = 0; rank < 5; rank++) CHECK_EQ(status[rank], 0);
}

/* Connects n sockets to the process's listener for joins. Returns the number of connections. */
static int connect_join_sockets(pid_t pid, int *fds, int n) {
  int made = 0, i;
  for (i = 0; i < n; i++) {
    if (fds[i] >= 0) close(fds[i]);
    fds[i] = ranks_connect(pid, "-join-");
    made += fds[i] >= 0 && send(fds[i], "C", 1, MSG_NOSIGNAL) == 1;
  }
  return made;
}

/* Connections that begin the proof of the secret and send nothing more do not stop the steps. */
static void test_stalling(void) {
  process_config first = usual();
  int fds[2][30], i, calls = 0;
  double until;
  uint64_t steps;
  pid_t pids[2];
  first.join = NULL;
  first.secret = "of this job";
  memset(fds, 0xff, sizeof fds);
  begin_job(pids, &first);
  for (until = test_now() + 1; test_now() < until; ranks_sleep(0.02))
    for (i = 0; i < 2; i++) calls += connect_join_sockets(pids[i], fds[i], 30);
  CHECK(calls >= 60);
  steps = shared->steps;
  for (until = test_now() + 2; test_now() < until; ranks_sleep(0.02))
    for (i = 0; i < 2; i++) calls += connect_join_sockets(pids[i], fds[i], 30);
  CHECK(shared->steps > steps + 20);
  for (i = 0; i < 60; i++)
    if (fds[i / 30][i % 30] >= 0) close(fds[i / 30][i % 30]);
  end_job(pids, 2);
}

/* --- slow, silent and many callers --- */

static void pass_on(int from, int to, double seconds) {
  char some[4096];
  ssize_t n;
  while ((n = recv(from, some, sizeof some, 0)) > 0) {
    ranks_sleep(seconds);
    if (send(to, some, (size_t)n, MSG_NOSIGNAL) != n) break;
  }
  shutdown(to, SHUT_WR);
}

static int tcp(int port, bool listens) { /* of 127.0.0.1 */
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (listens ? bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 64) == 0
              : connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
    return fd;
  close(fd);
  return -1;
}

/* A path to MASTER_PORT with a round trip of 0.3 s, at the port `rank`. */
static int far_proxy(int rank, void *arg) {
  int listener = tcp(rank, true), here, there;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGCHLD, SIG_IGN);
  CHECK(listener >= 0);
  bump(&shared->far);
  while ((here = accept(listener, NULL, NULL)) >= 0) {
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      there = tcp(shared->port, false);
      if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pass_on(here, there, 0.15);
        pause();
      }
      pass_on(there, here, 0.15);
      _exit(0);
    }
    close(here);
  }
  return 1;
}

/* A process joins from a host behind a round trip of 0.3 s. */
static void test_far(void) {
  int secret, status;
  setenv("TEST_HOSTS", "abc", 1);
  for (secret = 0; secret < 2; secret++) {
    process_config first = usual(), v = usual();
    pid_t pids[3], proxy;
    double begin;
    first.join = NULL;
    first.secret = v.secret = secret ? "of this job" : NULL;
    begin_job(pids, &first);
    v.port = ranks_free_port();
    proxy = ranks_fork(far_proxy, v.port, NULL);
    await(&shared->far, 1);
    begin = test_now();
    pids[2] = ranks_fork(life, 2, &v);
    await(&shared->joined, 1);
    CHECK(test_now() - begin < RANKS_WITHIN(5.0));
    end_job(pids, 3);
    kill(proxy, SIGKILL);
    waitpid(proxy, &status, 0);
  }
  unsetenv("TEST_HOSTS");
}

/* A process joins beside 30 callers of each kind that say nothing, a letter, or one message. */
static void test_silent_callers(void) {
  enum { CALLERS = 90 };
  int secret, i;
  setenv("TEST_HOSTS", "abc", 1);
  for (secret = 0; secret < 2; secret++) {
    process_config first = usual(), v = usual();
    char hello[40] = "CDDPau\r\n";
    int fds[CALLERS];
    pid_t pids[3];
    double begin;
    first.join = NULL;
    first.secret = v.secret = secret ? "of this job" : NULL;
    begin_job(pids, &first);
    for (i = 0; i < CALLERS; i++) {
      CHECK((fds[i] = tcp(shared->port, false)) >= 0);
      if (i % 3 > 0) CHECK(send(fds[i], hello, i % 3 == 1 ? 1 : sizeof hello, MSG_NOSIGNAL) > 0);
    }
    begin = test_now();
    pids[2] = ranks_fork(life, 2, &v);
    await(&shared->joined, 1);
    CHECK(test_now() - begin < RANKS_WITHIN(5.0));
    for (i = 0; i < CALLERS; i++) close(fds[i]);
    end_job(pids, 3);
  }
  unsetenv("TEST_HOSTS");
}

/* Many processes want to join at the same time: one of them finds the last free shard, and the
   others are refused, all of them soon. On one host, and from hosts without the others' memory. */
static void crowd_of(int n, const char *hosts) {
  process_config first = usual(), *v = (process_config *)calloc((size_t)n, sizeof *v);
  double until;
  pid_t pids[64], member = 0;
  int status, i, joined = 0, full = 0;
  setenv("TEST_HOSTS", hosts, 1);
  first.join = NULL;
  begin_job(pids, &first);
  until = test_now() + RANKS_WITHIN(20.0);
  for (i = 0; i < n; i++) {
    v[i] = usual();
    v[i].crowd = true;
    v[i].rank = 2 + i;
    pids[2 + i] = ranks_fork(life, 2 + i, &v[i]);
  }
  for (i = 0; i < n; i++) {
    while (look(&shared->crowd[2 + i]) == 0 && test_now() < until) ranks_sleep(0.001);
    joined += look(&shared->crowd[2 + i]) == CDDP_OK + 1;
    full += look(&shared->crowd[2 + i]) == CDDP_UNSUPPORTED + 1;
    if (look(&shared->crowd[2 + i]) == CDDP_OK + 1) member = pids[2 + i];
    else waitpid(pids[2 + i], &status, 0);
  }
  CHECK_EQ(joined, 1);
  CHECK_EQ(joined + full, n);
  CHECK(error_contains("full"));
  pids[2] = member;
  end_job(pids, 2 + joined);
  unsetenv("TEST_HOSTS");
  free(v);
}

static void test_crowd(void) {
  int n = getenv("CROWD") != NULL ? atoi(getenv("CROWD")) : 12;
  crowd_of(n, "a");
  crowd_of(n, "abcd");
}

static int slow_rank_0(cddp_optim *o) {
  (void)o;
  if (strcmp(getenv("RANK"), "0") == 0) ranks_sleep(2.5);
  return 0;
}

/* A rank that waits for a slower one answers. */
static void test_answers_in_waits(void) {
  process_config first = usual(), v = usual();
  uint64_t steps;
  pid_t pids[2];
  first.join = NULL;
  first.before = slow_rank_0;
  begin_job(pids, &first);
  for (steps = shared->steps; shared->steps == steps;) ranks_sleep(0.001);
  ranks_sleep(0.1);
  v.shards = SHARDS + 1; /* no meeting follows */
  refuse(&v);
  CHECK_IS(shared->result, CDDP_MISMATCH);
  CHECK(shared->init_s < RANKS_WITHIN(1.0));
  end_job(pids, 2);
}

/* The ranks have a model and make no calls. */
static void test_no_answer(void) {
  process_config first = usual(), v = usual();
  pid_t pids[2];
  first.join = NULL;
  first.waits = true;
  begin_job(pids, &first);
  v.timeout_s = 1;
  refuse(&v);
  CHECK_IS(shared->result, CDDP_TIMEOUT);
  CHECK(error_contains("no rank has answered yet"));
  bump(&shared->left);
  end_job(pids, 2);
}

/* Processes with another model, another WORLD_SIZE or another secret. */
static void test_strangers(void) {
  process_config first = usual(), v;
  pid_t pids[2];
  first.join = NULL;
  first.secret = "of this job";
  begin_job(pids, &first);
  v = usual();
  v.secret = first.secret;
  v.shards = 4;
  refuse(&v);
  CHECK_IS(shared->result, CDDP_MISMATCH);
  CHECK(error_contains("shards"));
  v.shards = SHARDS;
  v.count = COUNT - 1;
  refuse(&v);
  CHECK_IS(shared->result, CDDP_MISMATCH);
  CHECK(error_contains("parameter"));
  v.count = COUNT;
  v.world_size = 1;
  refuse(&v);
  CHECK_IS(shared->result, CDDP_MISMATCH);
  CHECK(error_contains("WORLD_SIZE"));
  v.world_size = 2;
  v.plain = true;
  refuse(&v);
  CHECK_IS(shared->result, CDDP_UNSUPPORTED);
  v.plain = false;
  v.secret = "of another job";
  refuse(&v);
  CHECK_IS(shared->result, CDDP_PEER_LOST);
  CHECK(error_contains("CDDP_SECRET"));
  v.secret = "";
  refuse(&v);
  CHECK_IS(shared->result, CDDP_PEER_LOST);
  v.join = "yes";
  refuse(&v);
  CHECK_IS(shared->result, CDDP_INVALID_ARGUMENT);
  CHECK(error_contains("CDDP_JOIN"));
  CHECK_EQ(look(&shared->joined), 0);
  end_job(pids, 2);
}

/* No job exists, or its model is not elastic. */
static void test_nobody(void) {
  process_config v = usual(), first = usual();
  pid_t pids[2];
  memset(shared, 0, sizeof *shared);
  shared->port = ranks_free_port();
  refuse(&v);
  CHECK_IS(shared->result, CDDP_PEER_LOST);
  CHECK(error_contains("has ended") && error_contains("unset CDDP_JOIN"));
  CHECK(shared->took < RANKS_WITHIN(4.0));
  v.timeout_s = 1;
  refuse(&v);
  CHECK(error_contains("has ended") && shared->took < RANKS_WITHIN(2.0));
  first.join = NULL;
  first.plain = true;
  for (first.world_size = 1; first.world_size <= 2; first.world_size++) {
    begin_job(pids, &first);
    v.world_size = first.world_size;
    refuse(&v);
    CHECK_IS(shared->result, CDDP_TIMEOUT);
    CHECK(error_contains("no model yet") && error_contains("elastic"));
    fprintf(stderr, "  waited %.2f s, computed %.3f s\n", shared->took, shared->cpu);
    if (!RANKS_SLOW) CHECK(shared->cpu < 0.15 * shared->took); /* much of it to begin */
    end_job(pids, first.world_size);
  }
}

/* The only member dies while a process joins. Before cddp_ddp_create that process finds no job;
   after it that process is a member, and continues alone with the job's weights. */
static void test_orphan(void) {
  process_config first = usual(), v = usual();
  pid_t pids[2];
  int status;
  first.join = NULL;
  first.world_size = v.world_size = 1;
  v.rank = 1;
  v.lacks = true; /* makes three steps */
  v.spare = (size_t)1 << 40;
  for (v.orphan = 1; v.orphan <= 2; v.orphan++) {
    begin_job(pids, &first);
    shared->member = pids[0];
    pids[1] = ranks_fork(refused, 0, &v);
    waitpid(pids[0], &status, 0);
    CHECK(WIFSIGNALED(status));
    ranks_join(pids + 1, 1, RANKS_WITHIN(30.0), &status);
    CHECK_EQ(status, 0);
    CHECK_IS(shared->result, v.orphan == 1 ? CDDP_PEER_LOST : CDDP_OK);
    if (v.orphan == 1) CHECK(error_contains("the job has ended, or has destroyed its model"));
    CHECK(shared->took < RANKS_WITHIN(6.0));
  }
}

/* The same on several hosts: rank 2 joins on the host of rank 0, or on a new host. */
static void test_hosts(void) {
  setenv("TEST_HOSTS", "ab", 1);
  test_comes();
  test_strangers();
  setenv("TEST_HOSTS", "abc", 1);
  test_comes();
  unsetenv("TEST_HOSTS");
}

/* Each process that replaces rank 1 shares the memory of rank 0, on its host, whichever rank of the
   job answers first. */
static void test_shares_memory(void) {
  process_config first = usual(), v = usual();
  pid_t pids[3];
  int status, i;
  setenv("TEST_HOSTS", "aab", 1);
  first.join = NULL;
  first.world_size = v.world_size = 3;
  v.rank = 1;
  begin_job(pids, &first);
  for (i = 1; i <= 8; i++) {
    kill(pids[1], SIGKILL);
    waitpid(pids[1], &status, 0);
    pids[1] = ranks_fork(life, 1, &v);
    await(&shared->joined, i);
    ask_resources(3);
    CHECK(shared->use[1].kib > 0);
  }
  end_job(pids, 3);
  unsetenv("TEST_HOSTS");
}

/* All ranks of the first host die. A rank of the other host then listens at MASTER_PORT, and admits
   processes on both hosts. It dies too: a rank that has joined admits a process on a third host. */
static void test_master_gone(void) {
  process_config first = usual(), v = usual();
  pid_t pids[3];
  double until = test_now() + RANKS_WITHIN(20.0);
  int status;
  setenv("TEST_HOSTS", "abc", 1);
  first.join = NULL;
  begin_job(pids, &first);
  kill(pids[0], SIGKILL);
  waitpid(pids[0], &status, 0);
  while (shared->steps == 0 && test_now() < until) ranks_sleep(0.001);
  v.rank = 4; /* on b */
  pids[2] = ranks_fork(life, 2, &v);
  while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 1);
  v.rank = 0;
  pids[0] = ranks_fork(life, 0, &v);
  while (look(&shared->joined) < 2 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 2);
  kill(pids[1], SIGKILL);
  waitpid(pids[1], &status, 0);
  v.rank = 2;
  pids[1] = ranks_fork(life, 1, &v);
  while (look(&shared->joined) < 3 && test_now() < until) ranks_sleep(0.001);
  CHECK_EQ(look(&shared->joined), 3);
  end_job(pids, 3);
  unsetenv("TEST_HOSTS");
}

/* The rank at MASTER_ADDR has died, and the other one computes for a while: it is stopped. A third
   process, on another host, waits for it. */
static void test_master_busy(void) {
  process_config first = usual(), v = usual();
  pid_t pids[2];
  int status;
  setenv("TEST_HOSTS", "abc", 1);
  first.join = NULL;
  begin_job(pids, &first);
  kill(pids[1], SIGSTOP);
  kill(pids[0], SIGKILL);
  waitpid(pids[0], &status, 0);
  v.rank = 2;
  pids[0] = ranks_fork(life, 2, &v);
  ranks_sleep(3);
  kill(pids[1], SIGCONT);
  await(&shared->joined, 1);
  end_job(pids, 2);
  unsetenv("TEST_HOSTS");
}

/* --- weights that all ranks change between two steps, without an optimizer --- */

enum { HALF_COUNT = 500, HALVES = 3 };

/* AdamW. Its parameters: f32; bf16 with master weights; f32 with fewer steps, since its states
   begin when the others' are loaded. */
typedef struct half_model {
  cddp_param p[HALVES];
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
} half_model;

typedef struct half_kind {
  bool joins, fused;
  bool other; /* the joining rank has another optimizer than the job, and leaves */
  bool loads; /* instead of a change, all load a checkpoint without master weights */
} half_kind;

static void half_params(cddp_param *p) {
  static const cddp_dtype types[HALVES] = {CDDP_F32, CDDP_BF16, CDDP_F32};
  static const char *const names[HALVES] = {"nothing", "w", "late"};
  int k;
  memset(p, 0, HALVES * sizeof *p);
  for (k = 0; k < HALVES; k++) {
    p[k].name = names[k];
    p[k].dtype = types[k];
    p[k].count = k > 0 ? HALF_COUNT : 0;
  }
}

/* A checkpoint of a model that has "w" alone, after some steps. */
static void half_save(const char *path, bool masters) {
  cddp_param all[HALVES], p;
  cddp_adamw_desc o;
  cddp_checkpoint_desc file;
  cddp_optim *optim;
  size_t i;
  int t;
  half_params(all);
  p = all[1];
  memset(&o, 0, sizeof o);
  memset(&file, 0, sizeof file);
  o.lr = 0.01;
  o.master_weights = true;
  p.data = calloc(HALF_COUNT, 2);
  p.grad = calloc(HALF_COUNT, 2);
  for (i = 0; i < HALF_COUNT; i++) {
    ranks_store(CDDP_BF16, p.data, i, 1 + (double)i / HALF_COUNT);
    ranks_store(CDDP_BF16, p.grad, i, (double)(i % 7));
  }
  CHECK_OK(cddp_adamw_create(&optim, &p, 1, &o));
  for (t = 0; t < 5; t++) CHECK_OK(cddp_optim_step(optim));
  if (!masters) CHECK_OK(cddp_optim_write_copies(optim)); /* they are those of the weights now */
  file.optim = optim;
  CHECK_OK(cddp_save(NULL, path, &p, 1, &file));
  cddp_optim_destroy(optim);
  free(p.data);
  free(p.grad);
}

static cddp_result half_load(half_model *m, cddp_group *g) {
  cddp_checkpoint_desc file;
  memset(&file, 0, sizeof file);
  file.optim = m->optim;
  file.partial = true;
  return cddp_load(g, shared->text, m->p, HALVES, &file);
}

static cddp_result half_open(half_model *m, int rank, const half_kind *kind) {
  bool joins = kind->joins;
  cddp_ddp_desc desc;
  cddp_adamw_desc o;
  cddp_sgd_desc sgd;
  cddp_result r;
  size_t i;
  int k;
  memset(m, 0, sizeof *m);
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  memset(&sgd, 0, sizeof sgd);
  ranks_environment(rank, 2, shared->port);
  setenv("CDDP_TIMEOUT_S", "20", 1);
  if (joins) setenv("CDDP_JOIN", "1", 1);
  if ((r = cddp_init(&m->g, NULL)) != CDDP_OK) return r;
  half_params(m->p);
  for (k = 1; k < HALVES; k++) {
    m->p[k].data = cddp_alloc(m->g, 4 * HALF_COUNT);
    for (i = 0; i < HALF_COUNT; i++)
      ranks_store(m->p[k].dtype, m->p[k].data, i, joins ? 7 : 1 + (double)i / HALF_COUNT);
  }
  desc.shards = 3;
  desc.elastic = true;
  if ((r = cddp_ddp_create(&m->ddp, m->g, m->p, HALVES, &desc)) != CDDP_OK) return r;
  sgd.lr = o.lr = 0.01;
  o.master_weights = true;
  sgd.ddp = o.ddp = m->ddp;
  if (kind->other && joins) return cddp_sgd_create(&m->optim, m->p, HALVES, &sgd);
  r = cddp_adamw_create(&m->optim, m->p, HALVES, &o);
  return r == CDDP_OK && !joins ? half_load(m, m->g) : r;
}

static uint64_t half_hash(const half_model *m) {
  uint64_t h = ranks_hash(RANKS_HASH, m->p[1].data, 2 * HALF_COUNT);
  return ranks_hash(h, m->p[2].data, 4 * HALF_COUNT);
}

/* Changes the weights before a step: halves or doubles them. Master weights that do not follow the
   change would give other weights. */
static cddp_result half_step(half_model *m, const half_kind *kind) {
  double times = cddp_ddp_steps(m->ddp) % 2 == 0 ? 0.5 : 2;
  cddp_result r = CDDP_OK;
  int shard, k;
  size_t i;
  while (r == CDDP_OK && cddp_ddp_next_shard(m->ddp, &shard))
    for (k = 0; r == CDDP_OK && k < HALVES; k++) {
      const cddp_param *p = &m->p[k];
      for (i = 0; i < p->count; i++)
        ranks_store(p->dtype, p->grad, i,
                    ranks_load(p->dtype, p->grad, i) + 1 + (double)(shard + (int)(i % 5)));
      r = cddp_ddp_ready(m->ddp, k);
    }
  r = kind->fused ? cddp_ddp_step(m->ddp, m->optim) : cddp_ddp_wait(m->ddp);
  if (r == CDDP_OK && !kind->fused) r = cddp_optim_step(m->optim);
  if (r == CDDP_OK && !kind->fused) r = cddp_optim_zero_grad(m->optim);
  if (r != CDDP_OK || kind->loads) return r;
  for (i = 0; i < HALF_COUNT; i++)
    ranks_store(CDDP_BF16, m->p[1].data, i, times * ranks_load(CDDP_BF16, m->p[1].data, i));
  return cddp_optim_write_copies(m->optim);
}

static int half_life(int rank, void *arg) {
  const half_kind *kind = (const half_kind *)arg;
  half_kind turned = *kind;
  bool counted = false;
  half_model m;
  cddp_result r = half_open(&m, rank, kind);
  float say[2] = {0, 0}; /* to stop; a hash, which all must have */
  uint64_t hash;
  int k;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (kind->other && kind->joins) {
    CHECK_EQ(r, CDDP_MISMATCH);
    CHECK(strstr(cddp_error(), "(0: SGD, 1: AdamW) is 0 on rank 2, 1 in the job"));
    bump(&shared->joined);
    goto leave;
  }
  if (r == CDDP_OK && !kind->joins) bump(&shared->running);
  while (r == CDDP_OK && say[0] == 0) {
    if (kind->loads && (counted || !kind->joins)) r = half_load(&m, NULL);
    if (r != CDDP_OK || (r = half_step(&m, kind)) != CDDP_OK) break;
    hash = half_hash(&m);
    say[0] = (float)look(&shared->stop);
    say[1] = (float)(hash >> 44);
    r = cddp_all_reduce(cddp_ddp_group(m.ddp), say, 2, CDDP_F32, CDDP_MAX, NULL);
    if (kind->other && r == CDDP_PEER_LOST) {
      say[0] = 0;
      r = CDDP_OK;
      continue;
    }
    CHECK(say[1] == (float)(hash >> 44));
    if (kind->joins && !counted) bump(&shared->joined);
    counted = true;
  }
  CHECK_OK(r);
  turned.fused = !kind->fused;
  if (r == CDDP_OK) {
    CHECK_OK(half_step(&m, &turned));
    CHECK_OK(half_step(&m, kind));
  }
leave:
  if (kind->loads) { /* the optimizer outlives the model */
    cddp_ddp_destroy(m.ddp);
    m.ddp = NULL;
  }
  cddp_optim_destroy(m.optim);
  cddp_ddp_destroy(m.ddp);
  for (k = 1; m.g != NULL && k < HALVES; k++) cddp_free(m.g, m.p[k].data);
  cddp_destroy(m.g);
  return 0;
}

/* Ranks of a job in which each changes its weights by hand; another one joins. */
static void half_job(bool other, bool loads) {
  double until;
  pid_t pids[3];
  int status[3], hosts, i;
  half_kind first, joins;
  memset(&first, 0, sizeof first);
  for (hosts = 0; hosts < 4; hosts++) {
    if (hosts / 2) setenv("TEST_HOSTS", "ab", 1);
    memset(shared, 0, sizeof *shared);
    first.fused = hosts % 2 != 0;
    first.other = other;
    first.loads = loads;
    joins = first;
    joins.joins = true;
    snprintf(shared->text, sizeof shared->text, "/tmp/cddp-join-%d.safetensors", (int)getpid());
    half_save(shared->text, !loads);
    shared->port = ranks_free_port();
    until = test_now() + RANKS_WITHIN(20.0);
    for (i = 0; i < 2; i++) pids[i] = ranks_fork(half_life, i, &first);
    while (look(&shared->running) < 2 && test_now() < until) ranks_sleep(0.001);
    pids[2] = ranks_fork(half_life, 2, &joins);
    while (look(&shared->joined) < 1 && test_now() < until) ranks_sleep(0.001);
    CHECK_EQ(look(&shared->joined), 1);
    if (other) ranks_join(pids + 2, 1, RANKS_WITHIN(10.0), status + 2);
    __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
    ranks_join(pids, other ? 2 : 3, RANKS_WITHIN(10.0), status);
    for (i = 0; i < 3; i++) CHECK_EQ(status[i], 0);
    unlink(shared->text);
  }
  unsetenv("TEST_HOSTS");
}

/* --- a process whose optimizer settings differ from the job's --- */

static int other_rate(cddp_optim *o) { return cddp_optim_set_lr(o, 0.25) != CDDP_OK; }
static int own_update(cddp_optim *o) { return (void)o, 1; }

/* Sets the n-th difference from the job. Returns the text that the error must contain, or NULL. */
static const char *differ(process_config *v, int n) {
  static const double two[] = {2};
  switch (n) {
  case 0: return v->sgd.momentum = 0.9, "momentum is 0.9";
  case 1: return v->sgd.momentum = 0, "momentum is 0 on rank 2, 0.5 in the job";
  case 2: return v->sgd.dampening = 0.25, "dampening";
  case 3: return v->sgd.nesterov = true, "nesterov";
  case 4: return v->sgd.maximize = true, "maximize";
  case 5: return v->sgd.weight_decay = 0.25, "weight_decay is 0.25 on rank 2, 0 in the job";
  case 6: return v->sgd.weight_decays = two, "weight_decay is 2";
  case 7: return v->sgd.lr_scales = two, "lr_scales";
  case 8: return v->adamw = true, "(0: SGD, 1: AdamW) is 1 on rank 2, 0 in the job";
  case 9: return v->before = other_rate, "learning rate";
  case 10: return v->before = own_update, "called ddp_wait";
  default: return NULL;
  }
}

static const char *differ_adamw(process_config *v, int n) {
  switch (n) {
  case 0: return v->adam.beta1 = 0.5, "beta1 is 0.5 on rank 2";
  case 1: return v->adam.beta2 = 0.5, "beta2";
  case 2: return v->adam.eps = 0.5, "eps";
  case 3: return v->adam.amsgrad = true, "amsgrad";
  case 4: return v->adam.weight_decay = 0.5, "weight_decay is 0.5";
  case 5: return v->adamw = false, "(0: SGD, 1: AdamW) is 0";
  default: return NULL;
  }
}

/* Each process fails alone and names the difference. The job continues and admits another one. */
static void refuse_settings(bool adamw, const char *hosts) {
  process_config first = usual(), v = usual();
  const char *word;
  pid_t pids[3];
  int n, apart;
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  first.join = NULL;
  first.adamw = v.adamw = adamw;
  begin_job(pids, &first);
  for (n = 0; word = (adamw ? differ_adamw : differ)(&v, n), word != NULL; n++) {
    for (apart = 0; apart < (v.before == NULL ? 2 : 1); apart++) {
      v.apart = apart != 0;
      refuse(&v);
      CHECK_IS(shared->result, CDDP_MISMATCH);
      if (!error_contains(word)) test_fail(__FILE__, __LINE__, "%s: %s", word, shared->text);
    }
    v = usual();
    v.adamw = adamw;
  }
  pids[2] = ranks_fork(life, 2, &v);
  await(&shared->joined, 1);
  end_job(pids, 3);
  CHECK_EQ(shared->took, 3);
  unsetenv("TEST_HOSTS");
}

static void test_other_settings(void) {
  static const char *const hosts[] = {NULL, "ab", "abc"};
  int i;
  for (i = 0; i < 3; i++) {
    refuse_settings(false, hosts[i]);
    refuse_settings(true, hosts[i]);
  }
}

/* The same in the job's first step, before an optimizer has stepped. apart: the job's ranks created
   their optimizers without `ddp`, so the step detects the difference. The learning rates agree. */
static void test_other_settings_early(void) {
  int hosts, apart, status;
  for (hosts = 0; hosts < 2; hosts++)
    for (apart = 0; apart < 1 + hosts; apart++) {
      process_config first = usual(), v = usual(), good = usual();
      pid_t pids[4];
      if (hosts) setenv("TEST_HOSTS", "ab", 1);
      first.join = NULL;
      first.waits = true;
      first.apart = v.apart = apart != 0;
      v.sgd.momentum = 0.9;
      good.rank = 3;
      good.sgd.lr = apart ? good.sgd.lr : 0.5;
      begin_job(pids, &first);
      pids[3] = ranks_fork(refused, 0, &v);
      ranks_sleep(0.5);
      bump(&shared->left);
      ranks_join(pids + 3, 1, RANKS_WITHIN(20.0), &status);
      CHECK_EQ(status, 0);
      CHECK_IS(shared->result, CDDP_MISMATCH);
      if (!error_contains("momentum")) test_fail(__FILE__, __LINE__, "%d: %s", apart, shared->text);
      pids[2] = ranks_fork(life, 2, &good);
      await(&shared->joined, 1);
      end_job(pids, 3);
      unsetenv("TEST_HOSTS");
    }
}

static void test_changed_weights(void) { half_job(false, false); }
static void test_other_optimizer(void) { half_job(true, false); }
static void test_loaded_weights(void) { half_job(false, true); }

/* --- a process that fails for a local reason --- */

/* It has no memory when it joins, or in its first step. It fails alone, and the error names it. */
static void check_lacks(const char *hosts) {
  static const size_t spares[] = {0, 64, 256, 1024};
  process_config first = usual(), v = usual();
  pid_t pids[3];
  int failed = 0;
  size_t i;
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  first.join = NULL;
  first.count = v.count = 100000;
  begin_job(pids, &first);
  v.lacks = true;
  for (i = 0; i < 2 * sizeof spares / sizeof *spares; i++) {
    v.early = i % 2 == 0;
    v.spare = spares[i / 2] << 10;
    refuse(&v);
    if (v.early && v.spare == 0) CHECK(shared->result != CDDP_OK);
    if (v.early || shared->result == CDDP_OK) continue;
    failed++;
    CHECK_IS(shared->result, CDDP_OUT_OF_MEMORY);
    if (strncmp(shared->text, "rank 2: ", 8) != 0)
      test_fail(__FILE__, __LINE__, "it does not name itself: %s", shared->text);
  }
  CHECK(failed > 0 || hosts != NULL);
  v = usual();
  v.count = first.count;
  pids[2] = ranks_fork(life, 2, &v);
  await(&shared->joined, 1);
  end_job(pids, 3);
  CHECK_EQ(shared->took, 3);
  unsetenv("TEST_HOSTS");
}

static void test_lacks(void) {
  check_lacks(NULL);
  check_lacks("ab");
  check_lacks("abc");
}

/* Another optimizer follows one that lacked memory, and gets the job's states and rate. */
static void test_lacks_once(void) {
  process_config first = usual(), v = usual();
  pid_t pids[3];
  first.join = NULL;
  first.count = v.count = 100000;
  begin_job(pids, &first);
  v.poor = true;
  pids[2] = ranks_fork(life, 2, &v);
  await(&shared->joined, 1);
  end_job(pids, 3);
  CHECK_EQ(shared->took, 3);
}

/* --- a joined rank without an optimizer gives a snapshot --- */

typedef struct replacements {
  pid_t second; /* the first process of rank 1 */
  int joining;  /* 1: its replacement joins */
  int steps;    /* of the job, when that is known */
  int good;     /* ranks with the right weights */
} replacements;

static int without_optimizer(int rank, void *arg) {
  replacements *all = (replacements *)arg;
  bool joins = getenv("CDDP_JOIN") != NULL;
  float weights[COUNT] = {0}, speed = 0, expected = 0;
  cddp_group *g = NULL;
  cddp_ddp *ddp = NULL;
  cddp_optim *optim = NULL;
  cddp_param p = {0};
  cddp_ddp_desc desc = {0};
  cddp_sgd_desc sgd = {0};
  int shard, i, step;
  p.data = weights;
  p.count = COUNT;
  desc.elastic = true;
  desc.shards = SHARDS;
  sgd.lr = 0.0625;
  sgd.momentum = 0.5;
  if (!joins && rank == 1) all->second = getpid();
  if (joins && rank == 1) bump(&all->joining);
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &desc));
  if (joins && rank == 0) { /* a second process joins in the same step */
    kill(all->second, SIGKILL);
    await(&all->joining, 1);
    ranks_sleep(RANKS_SLOW ? 2 : 0.5);
  }
  if (joins && rank == 1)
    __atomic_store_n(&all->steps, (int)cddp_ddp_steps(ddp) + 5, __ATOMIC_SEQ_CST);
  while (test_failures == 0 && (step = (int)cddp_ddp_steps(ddp)) < look(&all->steps)) {
    while (cddp_ddp_next_shard(ddp, &shard)) {
      if (!joins && rank == 0 && step == 4) raise(SIGKILL);
      for (i = 0; i < COUNT; i++) ((float *)p.grad)[i] += (float)(shard + 1);
      CHECK_OK(cddp_ddp_ready(ddp, 0));
    }
    if (optim == NULL) CHECK_OK(cddp_sgd_create(&optim, &p, 1, &sgd)); /* before the first step */
    CHECK_OK(cddp_ddp_step(ddp, optim));
  }
  for (step = 0; step < look(&all->steps); step++) { /* products are exact, sums rounded once */
    speed = 0.5f * speed + 2;
    expected -= 0.0625f * speed;
  }
  CHECK(weights[0] == expected && weights[COUNT - 1] == expected);
  cddp_optim_destroy(optim);
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  if (test_failures == 0) bump(&all->good);
  return test_failures != 0;
}

/* Rank 0 is lost. Its replacement has the states, but no cddp_optim yet, when rank 1 is lost and
   replaced. The second replacement must have the states, too. */
static void test_without_optimizer(void) {
  replacements *all = (replacements *)ranks_shared(sizeof *all);
  all->steps = INT_MAX;
  CHECK_OK(cddp_spawn_elastic(without_optimizer, all, SHARDS, 2));
  CHECK_EQ(all->good, SHARDS);
}

int main(void) {
  shared = (shared_state *)ranks_shared(sizeof *shared);
  RUN(test_comes);
  RUN(test_again);
  RUN(test_another);
  RUN(test_same_place);
  RUN(test_places);
  RUN(test_no_stdio);
  RUN(test_leaves);
  RUN(test_no_shards);
  RUN(test_alone);
  RUN(test_log);
  RUN(test_many);
  RUN(test_descriptors);
  RUN(test_descriptors_of_lost_ranks);
  RUN(test_memory_of_lost_processes);
  RUN(test_memory_without_a_meeting);
  RUN(test_memory_of_rank_0);
  RUN(test_large_alone);
  RUN(test_confined);
  RUN(test_two_models);
  RUN(test_strangers);
  RUN(test_stalling);
  RUN(test_far);
  RUN(test_silent_callers);
  RUN(test_crowd);
  RUN(test_answers_in_waits);
  RUN(test_no_answer);
  RUN(test_nobody);
  RUN(test_orphan);
  RUN(test_hosts);
  RUN(test_shares_memory);
  RUN(test_master_gone);
  RUN(test_master_busy);
  RUN(test_changed_weights);
  RUN(test_loaded_weights);
  RUN(test_other_optimizer);
  RUN(test_other_settings);
  RUN(test_other_settings_early);
  RUN(test_without_optimizer);
  if (!RANKS_SLOW) RUN(test_lacks_once);
  if (!RANKS_SLOW) RUN(test_lacks); /* a sanitizer needs terabytes of addresses */
  return TEST_END();
}
