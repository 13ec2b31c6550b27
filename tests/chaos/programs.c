/* programs.c - random programs over the whole library, judged by plain loops.

     build/plain/programs                      a minute of programs, as 'ninja all-tests' does
     build/plain/programs --seconds 3600       an hour of them
     build/plain/programs --seed 17            seed 17 alone, with what each rank did
     build/plain/programs --seed 1 --count 300 seeds 1 to 300
     --set NAME=VALUE,...                      changes the program: a failure prints these
     --hosts 0|1                               only programs on one host, or only on several
     --jobs N                                  N programs at a time
     --reduce 0                                leaves failing programs as they are
     --sweep 1                                 no random ones: in five programs a rank dies at each
                                               point that the ranks reach, one after the other
   The last line is 'N programs, N failed'. Each failure is a line with its seed, and a smaller
   program that fails too, as a list of calls. The exit code is 0 or 1.

   A seed is a `program`: a world (ranks, hosts, processes or threads), a model (memory, sizes
   around the thresholds of cddp.h, dtypes), an optimizer, a loop, and events (deaths, stops,
   processes that join, a system call that fails). Models and optimizers are made anew, or a second
   time; one rank fails alone, and all go on; processes start again. settle() removes what cddp does
   not allow.

   The judge computes what each rank must hold after each step: reference(). Gradients depend on
   step, shard and element alone, and repeat after PERIOD elements, so that the reference is short
   however large a parameter is. Each rank compares all bits after each step, and so does a process
   that joins. Every rank must end as the events say, in time, and leave no descriptor, mapping,
   thread or process behind.

   To add a feature: a field of `program` in FIELDS (so it can be printed, set and reduced), its
   draw, its limits in settle(), its effect in reference(), its calls in the life of a rank.

   tests/gpu/nccl_programs.c includes this file: there ranks have GPUs, parameters device memory. */
#ifndef PROGRAMS_GPU
#define PROGRAMS_GPU 0
#endif
#include "../../cddp.h"

#include "../inside.h"
#include "../ranks.h"

#include <dirent.h>
#include <malloc.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { RANKS = 8, PARAMS = 5, SHARDS = 24, EVENTS = 8, PROCESSES = 64, MOST_STEPS = 300 };
enum { LONG = 200, MEASURES = 48 }; /* steps of long programs; measures of what they use */
enum { BUFFER = 37 }; /* elements */
enum { PERIOD = 1021 }; /* elements after which weights and gradients repeat; a prime */
#define LIMIT_S 60.0    /* of a program, see overdue() */
#define DEADLINE_S 600  /* cddp's own: on a busy machine a rank can be late */

/* --- a program --- */

enum { SGD, ADAMW, OWN, OPTIMS };
enum { STEP, WAIT, BY_TURNS, PARTITIONS, FINISHES };
enum { MALLOCED, SHARED, MEMORIES };
enum { PLACED, OWN_MALLOCED, OWN_SHARED, GRADS };
enum { NO_CLIP, CLIPS, CLIPS_NOTHING, CLIPS_AFTER_WAIT, CLIP_KINDS };
enum { NOTHING, KILL_AT_POINT, KILL_AT_STEP, KILL_EARLY, KILL_OUTSIDE, STOP, JOIN, REFUSED,
       EVENT_KINDS };
enum { HOST_ONLY, NCCL, THROUGH_HOST, GPU_KINDS }; /* THROUGH_HOST: backend cpu */
enum { DEFAULT_STREAM, OWN_STREAM, BLOCKING_STREAM, BACKWARD_APART, CHANGING, STREAMS };
enum { SAME_RANK, OTHER_COUNT, OTHER_OPTIMIZER, OTHER_SECRET, MISFITS };
enum { REDUCES = 1, MOVES, SENDS, SPLITS, ALLOCATES, SAVES, BY_CHANCE, POLLS, SLIPS };
enum { NO_RENEWAL, NEW_OPTIMIZER, NEW_MODEL, TWO_OPTIMIZERS, SPARE_OPTIMIZER, RENEWALS };
enum { NO_MISHAP, TWICE, MISSING, NO_MEMORY, NO_MEMORY_AFTER, NO_MEMORY_TO_SAVE, MISHAPS };
enum { ALONE, BEFORE_IT, AFTER_IT, ON_ITS_GROUP, SECONDS };
enum { NEW_PROCESSES, SAME_PORT, OTHER_PORT, BESIDE, BESIDE_BY_MPIRUN, AGAINS };
enum { WHOLE, RENAMED, NO_STATES, NEW_STATE, PARTIALS };
enum { LEAVES_NOTHING, LEAVES_GROUPS, RETURNS, FAILS, EXITS, LEAVES };

enum { LEGAL, ELASTIC_HOOK, ELASTIC_UNUSED, ELASTIC_UNEVEN, SHARDS_HOOK, SHARDS_UNUSED, FEW_SHARDS,
       MANY_SHARDS, OVERLAP, NO_DATA, LAST_COUNT, LAST_DTYPE, LAST_SHARDS, SHARDED_ELASTIC,
       SHARDED_ROWS, ADAMW_HALF, ADAMW_ROWS, NEGATIVE, LAST_RATE, LAST_MOMENTUM, SHARDED_APART,
       READY_TWICE, NOT_READY, GATHER_ALONE, LAST_WAITS, NO_SYNC_STEP, HOST_DATA, COUNT_CHANGED,
       ILLEGALS };

typedef struct parameter {
  int count, dtype, memory, grad;
} parameter;

typedef struct event {
  int kind, rank, step;
  int arg; /* points, place, milliseconds, the point at which a joining process dies, misfit;
              KILL_EARLY: 0 before cddp_init, 1 before cddp_ddp_create */
} event;

typedef struct program {
  uint64_t seed;
  int ranks, hosts, threads, secret, supervised; /* by cddp_spawn_elastic */
  int count;
  parameter p[PARAMS];
  int shards, elastic, looped, rows, width, buckets, clip, hook, unused;
  int optim, momentum, nesterov, decay, amsgrad, maximize, masters, copies, groups, apart, sharded;
  int steps, finish, micro, between, pause, jitter, buffers;
  int uneven;                   /* the second half of the ranks has data for so many steps */
  int illegal;                  /* what all ranks must refuse */
  int churn;                    /* a rank is killed and replaced so many times */
  int renewal, at;              /* before this step, or in each, see renew() */
  int mishap, mishap_call, mishap_nth, mishap_rank; /* one rank alone fails in step `at` */
  int second;                   /* where a second model is made */
  int again;                    /* how processes live on after a restart */
  int partial;                  /* what the checkpoint lacks at the restart */
  int data;                     /* samples of a sampler that it has */
  int leave;                    /* what threads leave behind, or one of them after step `at` */
  int stands;                   /* a receive on the job's group that gets no message */
  int restart, restart_ranks;   /* saved at this step, loaded by so many ranks */
  event e[EVENTS];
  int fault, fault_nth, fault_rank, fault_delay;
  int gpu, stream, share; /* share: all ranks have cuda:0 */
  int graph;              /* this step is captured; it and all later ones are launches of it */
} program;

/* X(name, field, the least value) in the order in which a failing program is reduced. */
#define EVENT_FIELDS(X, n) \
  X("event" #n, e[n].kind, 0) X("event_rank" #n, e[n].rank, 0) X("event_step" #n, e[n].step, 0) \
  X("event_arg" #n, e[n].arg, 0)
#define PARAM_FIELDS(X, n) \
  X("size" #n, p[n].count, 1) X("dtype" #n, p[n].dtype, 0) X("memory" #n, p[n].memory, 0) \
  X("grad" #n, p[n].grad, 0)
#define FIELDS(X) \
  X("fault", fault, 0) X("churn", churn, 0) X("restart", restart, 0) X("hosts", hosts, 0) \
  X("mishap", mishap, 0) X("renewal", renewal, 0) X("second", second, 0) X("at", at, 0) \
  X("mishap_call", mishap_call, 0) X("mishap_nth", mishap_nth, 1) \
  X("mishap_rank", mishap_rank, 0) X("again", again, 0) X("partial", partial, 0) \
  X("data", data, 0) X("leave", leave, 0) X("stands", stands, 0) \
  EVENT_FIELDS(X, 7) EVENT_FIELDS(X, 6) EVENT_FIELDS(X, 5) EVENT_FIELDS(X, 4) EVENT_FIELDS(X, 3) \
  EVENT_FIELDS(X, 2) EVENT_FIELDS(X, 1) EVENT_FIELDS(X, 0) \
  X("ranks", ranks, 1) X("params", count, 1) X("steps", steps, 1) \
  PARAM_FIELDS(X, 0) PARAM_FIELDS(X, 1) PARAM_FIELDS(X, 2) PARAM_FIELDS(X, 3) PARAM_FIELDS(X, 4) \
  X("supervised", supervised, 0) X("elastic", elastic, 0) X("threads", threads, 0) \
  X("shards", shards, 0) \
  X("looped", looped, 0) X("secret", secret, 0) X("rows", rows, 0) X("width", width, 1) \
  X("buckets", buckets, 0) X("clip", clip, 0) X("hook", hook, 0) X("unused", unused, 0) \
  X("finish", finish, 0) X("optim", optim, 0) X("momentum", momentum, 0) \
  X("nesterov", nesterov, 0) X("decay", decay, 0) X("amsgrad", amsgrad, 0) \
  X("maximize", maximize, 0) X("masters", masters, 0) X("copies", copies, 0) \
  X("groups", groups, 0) X("apart", apart, 0) X("sharded", sharded, 0) X("micro", micro, 1) \
  X("between", between, 0) X("pause", pause, 0) X("jitter", jitter, 0) \
  X("buffers", buffers, 0) X("uneven", uneven, 0) X("illegal", illegal, 0) \
  X("restart_ranks", restart_ranks, 1) X("fault_nth", fault_nth, 1) \
  X("fault_rank", fault_rank, 0) X("fault_delay", fault_delay, 0) X("graph", graph, 0) \
  X("stream", stream, 0) X("share", share, 0) X("gpu", gpu, 0)

typedef struct field {
  const char *name;
  size_t at;
  int least;
} field;

static const field fields[] = {
#define FIELD(name, member, least) {name, offsetof(program, member), least},
    FIELDS(FIELD)
#undef FIELD
};
enum { FIELD_COUNT = sizeof fields / sizeof *fields };

static int *field_of(program *p, const field *f) { return (int *)(void *)((char *)p + f->at); }

static const char *const host_plans[] = {NULL, "ab", "aab", "abc", "aabb", "abcdefgh"};
enum { HOST_PLANS = 6, FEW_HOSTS = 4 };

/* The shards of a step: the ranks' number if the program sets none. */
static int shards_of(const program *p, uint64_t t) {
  if (p->shards > 0) return p->shards;
  return p->restart > 0 && t >= (uint64_t)p->restart ? p->restart_ranks : p->ranks;
}

/* The shards of a step that have data. */
static int present_of(const program *p, uint64_t t) {
  bool uneven = p->uneven > 0 && t >= (uint64_t)p->uneven && t < (uint64_t)p->steps;
  return uneven ? p->ranks / 2 : shards_of(p, t); /* after cddp_ddp_join one more step by all */
}

/* NCCL adds in an order of its own, and cddp multiplies by 1 / ranks. */
static bool nccl_sums(const program *p) { return p->gpu == NCCL && p->shards == 0 && !p->elastic; }

static bool is_half(int dtype) { return dtype == CDDP_F16 || dtype == CDDP_BF16; }
static bool has_rows(const program *p, int k) { return k == 0 && p->rows > 0; }
static bool steps_fused(const program *p, uint64_t t) {
  return p->finish == STEP || (p->finish == BY_TURNS && t % 2 == 0);
}

static int events_of(const program *p, int kind) {
  int i, n = 0;
  for (i = 0; i < EVENTS; i++) n += p->e[i].kind == kind;
  return n;
}

static int joins_of(const program *p) {
  int replaced = p->supervised ? events_of(p, KILL_AT_POINT) + events_of(p, KILL_AT_STEP) : 0;
  return events_of(p, JOIN) + events_of(p, REFUSED) + p->churn + replaced;
}

/* While processes join, the job goes on for at most so many steps. */
static int last_step(const program *p) {
  int most = p->steps + 30 * joins_of(p) + (p->uneven > 0);
  return most < MOST_STEPS ? most : MOST_STEPS;
}

/* Whether ranks that continue after a mishap have the states of before, from a file. */
static bool has_file(const program *p) {
  return p->mishap > MISSING || p->optim == OWN || p->mishap_nth % 2 == 0;
}

/* Whether all ranks begin step t with new states. */
static bool resets(const program *p, uint64_t t) {
  return t == (uint64_t)p->at &&
         (p->renewal == NEW_OPTIMIZER || (p->mishap && !has_file(p)) ||
          (p->renewal == NEW_MODEL && !p->apart && p->optim != OWN));
}
static uint64_t base_of(const program *p, uint64_t t) { /* of the model of step t */
  bool anew = p->renewal == NEW_MODEL || (p->mishap && !has_file(p));
  return anew && t > (uint64_t)p->at ? (uint64_t)p->at : 0;
}

static void no_more_than(int *value, int most) {
  if (*value > most) *value = most;
}

/* Events and faults need processes, and all but a death an elastic model. */
static void settle_events(program *p) {
  int i;
  if (p->supervised || p->restart > 0) p->churn = 0;
  if (p->churn > 0 && (p->ranks < 2 || p->threads || !p->elastic)) p->churn = 0;
  if (p->churn > 0) {
    memset(p->e, 0, sizeof p->e);
    p->fault = p->jitter = 0;
    no_more_than(&p->churn, 40);
  }
  for (i = 0; i < EVENTS; i++) {
    event *e = &p->e[i];
    if (p->threads || e->kind >= EVENT_KINDS || p->restart > 0) e->kind = NOTHING;
    if (p->supervised ? e->kind > KILL_EARLY : e->kind == KILL_EARLY) e->kind = NOTHING;
    if (!p->elastic && e->kind != KILL_AT_STEP && e->kind != KILL_OUTSIDE) e->kind = NOTHING;
    if (e->kind == REFUSED && e->arg == OTHER_SECRET && !p->secret) e->arg = SAME_RANK;
    if (e->kind == REFUSED && e->arg == OTHER_OPTIMIZER && p->optim == OWN) e->arg = OTHER_COUNT;
    no_more_than(&e->step, p->steps - 1);
  }
  if (p->threads || p->restart > 0 || p->supervised) p->fault = 0;
  no_more_than(&p->fault_rank, p->ranks - 1);
}

static void settle_model(program *p) {
  int k;
  if (p->elastic) p->hook = p->unused = p->sharded = 0, p->looped = 1, p->micro = 1;
  if (p->elastic && p->finish == PARTITIONS) p->finish = WAIT;
  if (p->shards > 0) p->hook = p->unused = 0, p->looped = 1, p->micro = 1;
  if (p->shards > 0 && p->shards < p->ranks) p->shards = p->ranks;
  if (p->shards > 0 && p->restart > 0 && p->shards < p->restart_ranks)
    p->shards = p->restart_ranks;
  if (p->finish == PARTITIONS) p->optim = OWN, p->rows = p->unused = 0, p->micro = 1;
  if (p->optim == OWN && p->finish != PARTITIONS) p->finish = WAIT;
  if (p->optim == ADAMW) p->rows = 0;
  if (p->rows > 0) p->decay = p->groups = p->sharded = p->hook = 0, p->micro = 1;
  if (p->rows > 0) p->p[0].count = p->rows * p->width, p->p[0].grad = PLACED;
  if (p->sharded) p->finish = STEP, p->apart = 0;
  if (p->unused || p->rows > 0) p->apart = 0;
  if (p->optim == OWN) p->masters = p->copies = p->apart = p->sharded = p->groups = 0;
  if (p->looped || p->unused || p->micro < 1) p->micro = 1;
  if (p->optim != SGD) p->nesterov = 0;
  if (p->momentum == 0) p->nesterov = 0;
  if (p->micro > 1 && steps_fused(p, 1)) p->clip = NO_CLIP;
  if (p->clip == CLIPS_AFTER_WAIT && p->finish != WAIT) p->clip = CLIPS;
  if (p->gpu != HOST_ONLY && p->rows > 0 && p->optim == OWN && p->clip != NO_CLIP)
    p->clip = CLIPS_NOTHING; /* on a GPU the values of cddp_ddp_rows are not clipped */
  /* The norm has the bits of any order of additions only if all squares are short numbers. */
  if (p->clip != NO_CLIP && (p->micro > 1 || (shards_of(p, 0) & (shards_of(p, 0) - 1)) != 0 ||
                             (shards_of(p, MOST_STEPS) & (shards_of(p, MOST_STEPS) - 1)) != 0))
    p->clip = CLIPS_NOTHING;
  for (k = 0; k < p->count; k++) {
    if (p->optim == ADAMW && is_half(p->p[k].dtype)) p->masters = 1;
    if (p->copies && p->p[k].dtype != CDDP_F32) p->copies = 0;
  }
}

static void settle_uneven(program *p) {
  if (p->elastic || p->shards > 0 || p->finish == PARTITIONS || p->restart > 0 || p->ranks < 2)
    p->uneven = 0;
  if (p->uneven == 0) return;
  /* Means over 1, 2 or 4 ranks have the same bits by division and by multiplication. */
  p->ranks = p->ranks < 4 ? 2 : 4;
  p->unused = p->between = p->hook = 0, p->micro = 1;
  no_more_than(&p->uneven, p->steps);
}

static void settle_mishap(program *p) {
  if (p->elastic || p->uneven > 0 || p->supervised) p->mishap = 0; /* elastic: `fault` */
  if (p->optim == OWN && p->unused) p->mishap = 0; /* the file does not have own_steps */
  if (p->mishap > MISSING && p->threads) p->mishap -= MISSING;
  if (p->mishap == MISSING && p->unused) p->mishap = TWICE;
  if (p->mishap > MISSING) p->restart = 0;
  if (p->mishap > 0) p->fault = p->renewal = 0, memset(p->e, 0, sizeof p->e);
  no_more_than(&p->mishap_rank, p->ranks - 1);
  if (p->restart > 0) no_more_than(&p->mishap_rank, p->restart_ranks - 1);
}

/* A joining process gets the states of one optimizer. An elastic model is made anew by all ranks of
   the job. With masters an optimizer does not see what another one has updated. */
static void settle_renewal(program *p) {
  bool loses = events_of(p, NOTHING) < EVENTS || p->fault || p->churn || p->supervised;
  int k;
  if (p->renewal == NEW_MODEL && p->elastic && loses) p->renewal = SPARE_OPTIMIZER;
  if (p->renewal == TWO_OPTIMIZERS && joins_of(p) > 0) p->renewal = SPARE_OPTIMIZER;
  if (p->renewal != NEW_MODEL && p->optim == OWN) p->renewal = 0;
  if (p->uneven > 0) no_more_than(&p->at, p->uneven - 1);
  no_more_than(&p->at, p->steps - 1);
  if (p->renewal != TWO_OPTIMIZERS) return;
  p->restart = p->uneven = 0;
  for (k = 0; k < p->count; k++)
    if (is_half(p->p[k].dtype)) p->optim = SGD, p->masters = 0;
}

static void settle_restart(program *p) {
  if (p->restart == 0 || p->threads || p->supervised) p->again = 0;
  if (p->again == BESIDE_BY_MPIRUN && p->hosts > 0) p->again = BESIDE;
  if (p->again) p->restart_ranks = p->ranks;
  if (p->restart == 0 || p->optim == OWN) p->partial = 0;
  if (p->partial == NEW_STATE && p->optim == SGD) p->momentum = p->momentum > 0;
  if (p->restart == 0 || p->elastic) p->data = 0;
}

/* Ranks that are out of data make no calls but the model's. A rank that is lost on one host ends
   calls on another only by a time-out. */
static void settle_others(program *p) {
  if (p->illegal || p->uneven > 0) p->second = 0;
  if (p->elastic && p->hosts > 0 && p->second > 0) p->second = ON_ITS_GROUP;
  if (!p->threads || p->illegal || p->mishap || p->uneven) p->leave = 0;
  if (p->ranks < 2 || p->restart > 0 || p->elastic) no_more_than(&p->leave, LEAVES_GROUPS);
  if (!p->elastic || p->threads || p->hosts > 0 || p->restart > 0) p->stands = 0;
}

static void settle_illegal(program *p) {
  if (p->illegal >= ILLEGALS) p->illegal = LEGAL;
  if (p->illegal == LEGAL) return;
  if (p->ranks < 2 && p->illegal != OVERLAP) p->ranks = 2;
  if (p->illegal == OVERLAP && p->count < 2) p->count = 2;
  if (p->illegal == COUNT_CHANGED && p->p[0].count < 2) p->p[0].count = 2;
  if (p->illegal == LAST_DTYPE || p->illegal == ADAMW_HALF) p->p[0].dtype = CDDP_F16;
  memset(p->e, 0, sizeof p->e);
  p->fault = p->churn = p->restart = p->uneven = p->elastic = p->rows = p->shards = 0;
  p->optim = SGD;
  p->finish = STEP;
}

/* Sums of short numbers have the bits of any order of additions; NCCL's means of f16, and those of
   a hook, only if their number is a power of two. Misused models break a group with NCCL. */
static void settle_gpu(program *p) {
  bool f16 = p->hook, bf16 = false;
  int k;
  if (!PROGRAMS_GPU || p->gpu >= GPU_KINDS) p->gpu = HOST_ONLY;
  if (p->gpu != NCCL || p->optim == ADAMW || p->elastic || p->illegal || p->graph < 2) p->graph = 0;
  if (p->gpu == HOST_ONLY) p->stream = p->share = 0;
  if (p->gpu == HOST_ONLY && p->illegal == HOST_DATA) p->illegal = LEGAL;
  if (p->gpu == HOST_ONLY) return;
  p->fault = 0; /* the double's own calls would fail */
  if (p->threads) p->elastic = p->share = 0;
  for (k = 0; k < EVENTS; k++) no_more_than(&p->e[k].rank, RANKS - 1); /* there are 16 GPUs */
  for (k = 0; k < p->count; k++) {
    no_more_than(&p->p[k].count, 20000);
    f16 = f16 || p->p[k].dtype == CDDP_F16;
    bf16 = bf16 || p->p[k].dtype == CDDP_BF16;
  }
  if (p->gpu == NCCL && p->illegal > NEGATIVE && p->illegal != HOST_DATA)
    p->illegal = LEGAL;
  if (nccl_sums(p) && bf16) p->micro = 1;
  for (; nccl_sums(p) && f16 && (p->ranks & (p->ranks - 1)) != 0;) p->ranks--;
  for (; nccl_sums(p) && f16 && (p->restart_ranks & (p->restart_ranks - 1)) != 0;)
    p->restart_ranks--;
  if (p->stream == CHANGING) p->apart = 0;
  if (p->graph == 0) return;
  p->rows = p->unused = p->uneven = p->buffers = p->restart = 0;
  if (p->finish == BY_TURNS) p->finish = STEP; /* two steps like it come before */
  if (p->stream == DEFAULT_STREAM || p->stream == CHANGING) p->stream = OWN_STREAM;
  if (p->steps <= p->graph) p->steps = p->graph + 2;
}

/* Makes any program one that cddp must run without an error but those of its events. */
static void settle(program *p) {
  int i;
  no_more_than(&p->ranks, RANKS);
  no_more_than(&p->restart_ranks, RANKS);
  no_more_than(&p->count, PARAMS);
  no_more_than(&p->steps, LONG);
  no_more_than(&p->shards, SHARDS);
  settle_gpu(p);
  settle_illegal(p);
  if (p->restart >= p->steps) p->restart = 0;
  if (p->restart > 0 && p->optim == OWN && p->unused) p->restart = 0;
  if (p->restart > 0) p->restart_ranks = p->restart_ranks < 1 ? 1 : p->restart_ranks;
  if (!p->elastic || p->threads || p->restart > 0) p->supervised = 0;
  if (p->ranks < 2 || p->threads || p->supervised) p->hosts = 0;
  if ((p->hosts == 2 || p->hosts == 4) && p->ranks < 3) p->hosts = 1; /* or all share a host */
  for (i = 0; i < p->count && (p->steps > 20 || p->churn > 12); i++)
    no_more_than(&p->p[i].count, 9000);
  settle_uneven(p);
  settle_model(p);
  settle_events(p);
  if (PROGRAMS_GPU || p->illegal) p->renewal = p->mishap = 0;
  if (PROGRAMS_GPU) p->again = p->partial = p->data = p->second = p->leave = p->stands = 0;
  settle_mishap(p);
  settle_renewal(p);
  settle_restart(p);
  settle_others(p);
  settle_model(p);
}

/* --- what a seed means --- */

static int draw_count(uint64_t *k, uint64_t seed, int class, int dtype) {
#define DRAW(n) ((int)(ranks_mix(seed, ++*k, 20) % (uint64_t)(n)))
  static const int tiny[] = {1, 2, 7, 77, 300, 1000, 2048, 2049};
  static const size_t least[] = {0, 0, (size_t)8 << 10, (size_t)1 << 20, (size_t)4 << 20};
  static const size_t most[] = {0, (size_t)16 << 10, (size_t)512 << 10, (size_t)4 << 20,
                                (size_t)64 << 20};
  size_t size = cddp_dtype_size((cddp_dtype)dtype), bytes = 0;
  int tries;
  if (class == 0 || (class < 3 && DRAW(3) == 0)) return tiny[DRAW(8)];
  for (tries = 0; tries < 64; tries++) {
    bytes = inside_thresholds[DRAW(inside_threshold_count)];
    bytes = DRAW(4) == 0 ? bytes * 2 : DRAW(4) == 0 ? bytes / 2 : bytes;
    if (bytes >= least[class] && bytes <= most[class]) break;
  }
  if (tries == 64) return tiny[DRAW(8)];
  bytes = bytes / size + (size_t)DRAW(3);
  return bytes < 2 ? 1 : (int)bytes - 1;
}

static void draw_params(program *p, uint64_t *k, uint64_t seed) {
  int class = DRAW(16), types = DRAW(6), memory = DRAW(4), grads = DRAW(4), i;
  if (p->ranks == 1 && DRAW(2)) class = 14; /* costs little */
  class = class < 7 ? 0 : class < 11 ? 1 : class < 14 ? 2 : class == 14 || DRAW(12) > 0 ? 3 : 4;
  p->count = class == 4 ? 1 : class == 3 ? 1 + DRAW(2) : 1 + DRAW(PARAMS);
  for (i = 0; i < PARAMS; i++) {
    parameter *q = &p->p[i];
    q->dtype = types < 3 ? CDDP_F32 : types == 3 ? DRAW(2) : types == 4 ? 2 + DRAW(2) : DRAW(4);
    q->memory = memory == 0 ? MALLOCED : memory < 3 ? SHARED : DRAW(MEMORIES);
    q->grad = grads < 2 ? PLACED : grads == 2 ? 1 + DRAW(2) : DRAW(GRADS);
    q->count = draw_count(k, seed, class, q->dtype);
  }
  p->steps = class >= 3 ? 1 + DRAW(3) : 2 + DRAW(6);
}

static void draw_events(program *p, uint64_t *k, uint64_t seed) {
  int n = DRAW(3) == 0 ? 0 : DRAW(2) ? 1 : 1 + DRAW(EVENTS - 1), i;
  if (!p->elastic && DRAW(6) > 0) n = 0;
  for (i = 0; i < n; i++) {
    event *e = &p->e[i];
    int kind = DRAW(16);
    if (p->supervised) kind /= 2;
    if (p->supervised && kind == 7) kind = 16;
    e->kind = kind < 3    ? KILL_AT_POINT
              : kind < 6  ? KILL_AT_STEP
              : kind < 8  ? KILL_OUTSIDE
              : kind < 9  ? STOP
              : kind < 14 ? JOIN
              : kind < 16 ? REFUSED
                          : KILL_EARLY;
    e->rank = DRAW(p->ranks);
    e->step = DRAW(p->steps);
    e->arg = e->kind == KILL_AT_POINT  ? 1 + DRAW(40 * p->ranks)
             : e->kind == KILL_AT_STEP ? DRAW(4)
             : e->kind == KILL_EARLY   ? DRAW(2)
             : e->kind == REFUSED      ? DRAW(MISFITS)
             : e->kind == JOIN         ? (DRAW(5) == 0 ? 1 + DRAW(60) : 0)
                                       : DRAW(60);
    if (e->kind == JOIN && DRAW(3) == 0) e->rank = p->ranks + DRAW(80);
  }
  for (i = 0; i < n; i++) { /* most processes that join find a free place */
    if (p->e[i].kind == JOIN && p->shards <= p->ranks && DRAW(3) > 0)
      p->shards = p->ranks + 1 + DRAW(3);
    if (p->e[i].kind >= JOIN && i > 0 && DRAW(2)) p->e[i].step = p->e[i - 1].step;
  }
  if (p->elastic && DRAW(20) == 0) p->churn = 6 + DRAW(4);
}

/* Most faults are in what follows a death: a step alone makes few calls. */
static void draw_fault(program *p, uint64_t *k, uint64_t seed) {
  bool few = DRAW(4) > 0;
  p->fault = DRAW(p->elastic ? 5 : 12) == 0 ? 1 + DRAW(few ? 9 : 18) : 0;
  p->fault_nth = 1 + DRAW(few ? 6 : 60);
  if (p->fault > 0 && few && p->elastic && p->ranks < 3) p->ranks = 3; /* one can die */
  p->fault_rank = DRAW(p->ranks);
  p->fault_delay = DRAW(4) == 0 ? 1 + DRAW(60) : 0;
  if (p->fault == 0 || !p->elastic || p->ranks < 2 || !few) return;
  p->e[0].kind = KILL_AT_STEP;
  p->e[0].rank = (p->fault_rank + 1 + DRAW(p->ranks - 1)) % p->ranks;
  p->e[0].step = DRAW(p->steps);
  p->e[0].arg = DRAW(4);
  if (DRAW(2)) return;
  p->e[1] = p->e[0];
  p->e[1].kind = JOIN;
  p->e[1].arg = 0;
}

static void draw_anew(program *p, uint64_t *k, uint64_t seed) {
  static const int calls[] = {2, 4, 5, 14, 16, 17}; /* memory, see CALLS */
  int kind = DRAW(6);
  p->at = DRAW(p->steps);
  p->renewal = kind == 0 ? 1 + DRAW(RENEWALS - 1) : NO_RENEWAL;
  p->mishap = kind == 1 ? 1 + DRAW(MISHAPS - 1) : NO_MISHAP;
  p->mishap_call = calls[DRAW(6)];
  p->mishap_nth = 1 + DRAW(6);
  if (DRAW(2)) p->mishap_nth += DRAW(40);
  p->mishap_rank = DRAW(p->ranks);
  p->second = DRAW(6) == 0 ? 1 + DRAW(SECONDS - 1) : ALONE;
  if (p->between > 0 && DRAW(3) == 0) p->between = POLLS + DRAW(2);
  p->again = DRAW(AGAINS);
  p->partial = DRAW(2) ? DRAW(PARTIALS) : WHOLE;
  p->data = DRAW(2) ? 1 + DRAW(40) : 0;
  p->leave = DRAW(LEAVES);
  p->stands = DRAW(4) == 0;
  if (p->illegal && DRAW(8) == 0 && !PROGRAMS_GPU) p->illegal = COUNT_CHANGED;
  if (DRAW(8) == 0 && !p->supervised) p->restart = 1 + DRAW(p->steps);
}

static program draw(uint64_t seed) {
  uint64_t count = 0, *k = &count;
  program p;
  int i;
  memset(&p, 0, sizeof p);
  p.seed = seed;
  p.ranks = 1 + DRAW(6);
  if (p.ranks > 3 && DRAW(2)) p.ranks -= 3;
  p.elastic = DRAW(2);
  p.threads = DRAW(p.elastic ? 10 : 3) == 0;
  p.supervised = DRAW(20) == 0;
  p.hosts = DRAW(4) == 0 ? 1 + DRAW(FEW_HOSTS - 1) : 0;
  p.secret = DRAW(5) == 0;
  draw_params(&p, k, seed);
  p.shards = DRAW(3);
  p.shards = p.shards == 0 ? 0 : p.shards == 1 ? p.ranks : p.ranks + DRAW(6);
  p.looped = DRAW(2);
  p.rows = DRAW(8) == 0 ? 1 + DRAW(300) : 0;
  p.width = 1 + DRAW(3);
  p.buckets = DRAW(3);
  p.clip = DRAW(3) == 0 ? 1 + DRAW(CLIP_KINDS - 1) : NO_CLIP;
  p.hook = DRAW(8) == 0;
  p.unused = DRAW(6) == 0;
  p.optim = DRAW(8) == 0 ? OWN : DRAW(2);
  p.momentum = DRAW(3);
  p.nesterov = DRAW(4) == 0;
  p.decay = DRAW(3) == 0;
  p.amsgrad = DRAW(3) == 0;
  p.maximize = DRAW(8) == 0;
  p.masters = DRAW(3) == 0;
  p.copies = DRAW(4) == 0;
  p.groups = DRAW(4) == 0;
  p.apart = DRAW(2);
  p.sharded = DRAW(6) == 0;
  p.finish = DRAW(3) == 0 ? STEP : DRAW(FINISHES);
  p.micro = DRAW(6) == 0 ? 2 + DRAW(2) : 1;
  p.between = DRAW(3) == 0 ? 1 + DRAW(7) : 0;
  p.pause = DRAW(3) == 0 ? DRAW(600) : 0;
  p.jitter = DRAW(4) == 0 ? 1 + DRAW(2000) : 0;
  p.illegal = DRAW(16) == 0 ? 1 + DRAW(HOST_DATA - 1) : LEGAL;
  p.buffers = DRAW(4) == 0;
  p.uneven = DRAW(6) == 0 ? 1 + DRAW(p.steps) : 0;
  p.restart = DRAW(8) == 0 ? 1 + DRAW(p.steps) : 0;
  p.restart_ranks = 1 + DRAW(6);
  draw_events(&p, k, seed);
  draw_fault(&p, k, seed);
  if (p.ranks == 6 && DRAW(3) == 0) p.ranks += 1 + DRAW(RANKS - 6);
  if (p.hosts == FEW_HOSTS - 1 && DRAW(2)) p.hosts += 1 + DRAW(HOST_PLANS - FEW_HOSTS);
  for (i = 1; i < EVENTS; i++) /* while the others recover from the death before */
    if (p.e[i].kind == KILL_AT_POINT && DRAW(3) == 0) p.e[i].arg = 1 + DRAW(12);
  if (DRAW(40) == 0) p.steps = LONG;
  if (p.churn > 0 && DRAW(3) == 0) p.churn = 20 + DRAW(20);
  if (p.illegal && DRAW(8) == 0) p.illegal = HOST_DATA;
  p.gpu = DRAW(12) == 0 ? HOST_ONLY : DRAW(3) > 0 ? NCCL : THROUGH_HOST;
  p.stream = DRAW(STREAMS);
  p.share = DRAW(4) == 0;
  p.graph = DRAW(3) == 0 ? 2 + DRAW(3) : 0;
  draw_anew(&p, k, seed);
#undef DRAW
  settle(&p);
  return p;
}

/* --- values: weights and gradients --- */

/* [exact][dtype]: PERIOD values twice, as elements and as numbers. exact: so short that all sums
   of their squares are exact. */
static unsigned char noise[2][4][2 * PERIOD * 8];
static double numbers[2][4][PERIOD];

static void make_noise(void) {
  int exact, dtype, i;
  for (exact = 0; exact < 2; exact++)
    for (dtype = 0; dtype < 4; dtype++)
      for (i = 0; i < 2 * PERIOD; i++) {
        double x = (double)(int64_t)(ranks_mix(21, (uint64_t)(i % PERIOD), 3) >> 11) * 0x1p-52 - 1;
        ranks_store((cddp_dtype)dtype, noise[exact][dtype], (size_t)i,
                    exact ? round(32 * x) / 16 + 0.0 : x); /* no -0 */
        if (i < PERIOD)
          numbers[exact][dtype][i] = ranks_load((cddp_dtype)dtype, noise[exact][dtype], (size_t)i);
      }
}

static bool is_exact(const program *p) { return p->clip != NO_CLIP || nccl_sums(p); }
static int begin_of_weights(int k) { return 100 * k % PERIOD; }

/* Where the gradient of a micro-batch of a shard begins in the noise. */
static int begin_of_gradient(const program *p, uint64_t t, int shard, int k, int micro) {
  return (int)(ranks_mix(p->seed, t * SHARDS + (uint64_t)shard, (uint64_t)(8 * k + micro)) %
               PERIOD);
}

static bool is_ready(const program *p, uint64_t t, int shard, int k) {
  uint64_t h = ranks_mix(p->seed ^ 5, t, (uint64_t)k);
  if (!p->unused || h % 3 > 0) return true;
  return h % 2 == 0 && ranks_mix(h, (uint64_t)shard, 2) % 2 == 0; /* nowhere, or not everywhere */
}

/* The rows that a shard adds: `first`, first + 1, ... Their number. */
static int rows_of(const program *p, uint64_t t, int shard, int *first) {
  uint64_t h = ranks_mix(p->seed ^ 9, t, (uint64_t)shard);
  int n = (int)(h % 4);
  *first = (int)(h / 4 % (uint64_t)p->rows);
  return n < p->rows ? n : p->rows;
}

static double learning_rate(const program *p, uint64_t t) {
  if (p->graph > 0 && t > (uint64_t)p->graph) t = (uint64_t)p->graph; /* the captured one */
  return 0.25 / (double)(1 + t % 3);
}

/* --- the reference: what every rank must hold after each step --- */

static int compute_type(int dtype) { return dtype == CDDP_F64 ? CDDP_F64 : CDDP_F32; }

/* A result of +, -, *, / or sqrt on numbers of the type: a double rounds it correctly. */
static double in(int type, double x) { return type == CDDP_F64 ? x : (double)(float)x; }

static double narrow(int dtype, double x) {
  if (dtype == CDDP_F16) return (double)ranks_from_f16(ranks_to_f16((float)x));
  if (dtype == CDDP_BF16) return (double)ranks_from_bf16(ranks_to_bf16((float)x));
  return in(dtype, x);
}

static double fused(int type, double a, double b, double x) { /* a * b + x, rounded once */
  return type == CDDP_F64 ? fma(a, b, x) : (double)fmaf((float)a, (float)b, (float)x);
}

/* The canonical sum of x[n]. */
static double sum_of(int type, const double *x, int n) {
  int half = n > 1 ? ranks_split(n) : 0;
  if (n == 1) return x[0];
  return in(type, sum_of(type, x, half) + sum_of(type, x + half, n - half));
}

typedef struct rule { /* of one step of one parameter */
  bool adamw, momentum, nesterov, first, amsgrad, half;
  int type; /* of the states; f16 and bf16 without masters compute in f32 and round each result */
  double sign, rate, decay, keep, take;
  int steps; /* of this parameter so far */
} rule;

static double scales(const program *p, int k) { return p->groups ? 1 - 0.25 * (k % 3) : 1; }
static double decays(const program *p, int k) {
  return !p->decay ? 0 : p->groups && k % 2 == 1 ? 0 : 0.0625;
}

static bool has_all_states(const program *p, uint64_t t) { /* else only after the restart */
  return p->partial != NEW_STATE || t >= (uint64_t)p->restart;
}

static rule rule_of(const program *p, int k, uint64_t t, int steps) {
  rule u;
  memset(&u, 0, sizeof u);
  u.adamw = p->optim == ADAMW;
  u.type = p->masters ? compute_type(p->p[k].dtype) : p->p[k].dtype;
  u.sign = p->maximize && p->optim != OWN ? -1 : 1;
  u.rate = learning_rate(p, t) * scales(p, k);
  u.decay = p->optim != OWN ? decays(p, k) : 0;
  u.momentum = p->momentum > 0 && has_all_states(p, t);
  u.keep = p->momentum == 1 ? 0.9 : 0.5;
  u.take = p->momentum == 2 && !p->nesterov && p->optim != OWN ? 0.75 : 1;
  u.nesterov = p->nesterov;
  u.first = steps == 0;
  u.amsgrad = p->amsgrad && has_all_states(p, t);
  u.steps = steps;
  return u;
}

static double plus(int type, double a, double b, double f) { /* a + f * b of SGD */
  return narrow(type, fused(compute_type(type), narrow(type, f), b, a));
}

static double power(double x, int n) { /* by squaring, as the header says */
  double y = 1;
  for (; n > 0; n /= 2, x *= x)
    if (n % 2 == 1) y *= x;
  return y;
}

static double sgd(const rule *u, double w, double g, double *m) {
  double d = narrow(u->type, g * u->sign);
  int type = compute_type(u->type);
  if (u->decay != 0) d = plus(u->type, d, w, u->decay);
  if (u->momentum) {
    double kept = narrow(u->type, in(type, in(type, u->keep) * *m));
    *m = u->first ? d : plus(u->type, kept, d, u->take);
    d = u->nesterov ? plus(u->type, d, *m, u->keep) : *m;
  }
  return plus(u->type, w, d, -u->rate);
}

static double adamw(const rule *u, double w, double g, double *m, double *q, double *most) {
  double beta1 = 0.9, beta2 = 0.999, lerp, b;
  int c = u->type, t = u->steps + 1;
  double root = in(c, sqrt(1 - power(beta2, t))), step = in(c, -u->rate / (1 - power(beta1, t)));
  double keep = in(c, beta2), take = in(c, 1 - beta2);
  g = in(c, g * u->sign);
  lerp = in(c, 1 - beta1);
  *m = fused(c, lerp, in(c, g - *m), *m);
  b = *q = fused(c, in(c, take * g), g, in(c, *q * keep));
  if (u->amsgrad) b = *most = b > *most ? b : *most;
  b = in(c, in(c, in(c, sqrt(b)) / root) + in(c, 1e-8));
  return in(c, in(c, w * in(c, 1 - u->rate * u->decay)) + in(c, in(c, step * *m) / b));
}

static double update(const rule *u, double w, double g, double *m, double *q, double *most) {
  return u->adamw ? adamw(u, w, g, m, q, most) : sgd(u, w, g, m);
}

typedef struct column { /* a parameter: the elements that repeat */
  int n, steps;
  double w[PERIOD], mean[PERIOD], m[PERIOD], q[PERIOD], most[PERIOD];
} column;

static int columns_of(const program *p, int k) {
  return p->p[k].count < PERIOD ? p->p[k].count : PERIOD;
}

/* A shard's gradient, in the parameter's type. */
static void gradient_of(const program *p, uint64_t t, int shard, int k, double *g) {
  const double *x = numbers[is_exact(p)][p->p[k].dtype];
  int n = columns_of(p, k), begin = begin_of_gradient(p, t, shard, k, 0), j, i, first;
  memset(g, 0, (size_t)n * sizeof *g);
  if (!is_ready(p, t, shard, k)) return;
  if (has_rows(p, k)) {
    for (j = rows_of(p, t, shard, &first) - 1; j >= 0; j--)
      for (i = 0; i < p->width; i++)
        g[(first + j) % p->rows * p->width + i] = x[(begin + j * p->width + i) % PERIOD];
    return;
  }
  for (j = 0; j < p->micro; j++) {
    begin = begin_of_gradient(p, t, shard, k, j);
    for (i = 0; i < n; i++)
      g[i] = j == 0 ? x[(begin + i) % PERIOD]
                    : narrow(p->p[k].dtype, g[i] + x[(begin + i) % PERIOD]);
  }
}

static bool is_used(const program *p, uint64_t t, int k) {
  int s;
  for (s = 0; s < present_of(p, t) && !is_ready(p, t, s, k);) s++;
  return s < present_of(p, t);
}

static double clip_limit(const program *p) { return p->clip == CLIPS_NOTHING ? 1e9 : 2; }

/* The factor of a clip. */
static double clip_of(const program *p, uint64_t t, const column *columns, double *norm) {
  double sum = 0, factor;
  int k, i;
  for (k = 0; k < p->count; k++) {
    const column *c = &columns[k];
    for (i = 0; i < c->n && is_used(p, t, k); i++) {
      int times = p->p[k].count / c->n + (i < p->p[k].count % c->n);
      sum += times * (c->mean[i] * c->mean[i]);
    }
  }
  *norm = sqrt(sum);
  factor = clip_limit(p) / (*norm + 1e-6);
  return factor < 1 ? factor : 1;
}

static void reference_step(const program *p, uint64_t t, column *columns, double *norm) {
  int shards = present_of(p, t), k, i, s;
  static double gradients[SHARDS][PERIOD];
  double x[SHARDS], factor, mean;
  for (k = 0; k < p->count; k++) {
    int type = compute_type(p->p[k].dtype);
    for (s = 0; s < shards; s++) gradient_of(p, t, s, k, gradients[s]);
    for (i = 0; i < columns[k].n; i++) {
      for (s = 0; s < shards; s++) x[s] = gradients[s][i];
      mean = sum_of(type, x, shards);
      mean = nccl_sums(p) && !has_rows(p, k) ? mean * in(type, 1.0 / shards) : mean / shards;
      columns[k].mean[i] = narrow(p->p[k].dtype, in(type, mean));
    }
  }
  factor = p->clip != NO_CLIP ? clip_of(p, t, columns, norm) : 1;
  for (k = 0; k < p->count; k++) {
    column *c = &columns[k];
    int dtype = p->p[k].dtype, type = compute_type(dtype);
    rule u = rule_of(p, k, t, c->steps);
    if (!is_used(p, t, k)) continue;
    for (i = 0; i < c->n; i++) {
      double g = narrow(dtype, in(type, c->mean[i] * in(type, factor)));
      c->w[i] = update(&u, c->w[i], g, &c->m[i], &c->q[i], &c->most[i]);
    }
    c->steps++;
  }
}

/* --- what the judge and all ranks share --- */

enum { DESCRIPTORS, THREADS, MAPPINGS, PRIVATE, IN_COMMON, USES };
typedef struct usage { /* of a process; of[PRIVATE] and of[IN_COMMON] in KiB of memory */
  int of[USES];
} usage;

enum { UNUSED, STARTING, RUNNING, DYING, ENDED };
typedef struct process { /* written by itself, but for state */
  int state;             /* atomic */
  int rank, event;       /* event: with which it joins; -1: one of the first ranks */
  bool joins;
  pid_t pid;
  cddp_result result;
  int wrong; /* complaints; text has the first */
  uint64_t begin, steps;
  double started, ended; /* ended: or killed */
  int passed;  /* points, of a process that dies while it joins */
  usage use[MEASURES]; /* after so many joins, or at so many parts of the steps */
  int states;          /* of all processes, in these */
  bool lives_on;       /* after the restart */
  bool no_memory;      /* the group ended because a rank had no memory at all */
  char text[600];
} process;

typedef struct shared_state {
  program p;
  int phase, port, other_port;
  int odd_bucket; /* of a hook */
  uint64_t epoch, samples; /* of the sampler in the checkpoint */
  int created;    /* first ranks with a model; events begin when all have one */
  int alive;      /* ranks that can finish the job; never 0 */
  int reached;    /* a step that some rank has begun, */
  int64_t begun[MOST_STEPS + 1]; /* and when, in us */
  int joins_left; /* that have neither joined nor ended yet */
  int joined;
  int last_join;  /* the step in which the last one took part first */
  int done[EVENTS];
  int points, due; /* points of all ranks; the one at which the next KILL_AT_POINT happens */
  int struck;      /* the fault has happened, */
  double struck_at;
  int decided[MOST_STEPS + 1]; /* 1: the job goes on after so many steps, 2: it ends */
  int process_count;
  process processes[PROCESSES];
  double norms[MOST_STEPS + 1];
  unsigned char want[MOST_STEPS + 1][PARAMS][PERIOD * 8];
  char path[256]; /* of the checkpoint */
  char text[600]; /* of cddp_spawn_elastic's failure */
} shared_state;

static shared_state *shared;
static struct { int programs, failed, deaths, joined, refused, faults; } *totals; /* of all jobs */
static bool verbose;
static __thread process *me; /* NULL in the judge */
static __thread uint64_t my_dice;

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define STORE(x, v) __atomic_store_n(&(x), v, __ATOMIC_SEQ_CST)
#define ADD(x, n) __atomic_add_fetch(&(x), n, __ATOMIC_SEQ_CST)
static bool swap(int *x, int old, int now) {
  return __atomic_compare_exchange_n(x, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* 1: after the restart. */
static int phase(void) { return shared->phase + (me != NULL && me->lives_on); }

static void keep(const column *c, int dtype, unsigned char *want) {
  int i;
  for (i = 0; i < c->n; i++) ranks_store((cddp_dtype)dtype, want, (size_t)i, c->w[i]);
}

static void begin_weights(const program *p, int k, column *c) {
  int i;
  for (i = 0; i < c->n; i++)
    c->w[i] = numbers[is_exact(p)][p->p[k].dtype][(begin_of_weights(k) + i) % PERIOD];
}

/* An optimizer that is created now: its masters are the weights. */
static void begin_states(column *c, int dtype) {
  int i;
  for (i = 0; i < c->n; i++) c->w[i] = narrow(dtype, c->w[i]);
  for (i = 0; i < c->n; i++) c->m[i] = c->q[i] = c->most[i] = 0;
  c->steps = 0;
}

static void exchange_states(column *a, column *b) {
  column kept = *b;
  *b = *a;
  memcpy(kept.w, a->w, sizeof a->w);
  kept.n = a->n;
  *a = kept;
}

/* Fills shared->want. With masters a column has the master, which starts as the weight. */
static void reference(const program *p) {
  static column columns[PARAMS], others[PARAMS]; /* of two optimizers */
  int t, k;
  memset(columns, 0, sizeof columns);
  memset(others, 0, sizeof others);
  for (k = 0; k < p->count; k++) {
    columns[k].n = columns_of(p, k);
    begin_weights(p, k, &columns[k]);
    keep(&columns[k], p->p[k].dtype, shared->want[0][k]);
  }
  for (t = 0; t < last_step(p); t++) {
    for (k = 0; k < p->count; k++) {
      bool anew = p->partial == NO_STATES || (p->partial == RENAMED && k == p->count - 1);
      if (p->restart > 0 && t == p->restart && anew) begin_states(&columns[k], p->p[k].dtype);
      if (p->restart > 0 && t == p->restart && p->partial == RENAMED && k == p->count - 1)
        begin_weights(p, k, &columns[k]);
      if (resets(p, (uint64_t)t)) begin_states(&columns[k], p->p[k].dtype);
      if (p->renewal == TWO_OPTIMIZERS && t > 0) exchange_states(&columns[k], &others[k]);
    }
    reference_step(p, (uint64_t)t, columns, &shared->norms[t + 1]);
    for (k = 0; k < p->count; k++) keep(&columns[k], p->p[k].dtype, shared->want[t + 1][k]);
  }
}

/* --- faults: one call of one rank fails, or takes its time --- */

static struct { int call, nth, delay; } armed; /* of this process */

static bool strikes(int call, int error) {
  if (LOAD(armed.call) != call || ADD(armed.nth, -1) != 0) return false;
  shared->struck_at = test_now();
  STORE(shared->struck, shared->p.fault > 0); /* else a mishap */
  if (armed.delay > 0) ranks_sleep(armed.delay * 1e-3);
  errno = error;
  return armed.delay == 0;
}

/* Linked by --wrap: calls of cddp.h (and of this file) come here. */
#define CALLS(X) \
  X(1, EMFILE, socket, (int a, int b, int c), (a, b, c), int, -1) \
  X(2, ENOMEM, mmap, (void *a, size_t b, int c, int d, int e, off_t f), (a, b, c, d, e, f), \
    void *, MAP_FAILED) \
  X(3, EIO, fstat, (int a, struct stat *b), (a, b), int, -1) \
  X(4, ENOMEM, malloc, (size_t a), (a), void *, NULL) \
  X(5, ENOMEM, calloc, (size_t a, size_t b), (a, b), void *, NULL) \
  X(6, ECONNRESET, sendmsg, (int a, const struct msghdr *b, int c), (a, b, c), ssize_t, -1) \
  X(7, ECONNRESET, recvmsg, (int a, struct msghdr *b, int c), (a, b, c), ssize_t, -1) \
  X(8, ECONNRESET, send, (int a, const void *b, size_t c, int d), (a, b, c, d), ssize_t, -1) \
  X(9, ECONNRESET, recv, (int a, void *b, size_t c, int d), (a, b, c, d), ssize_t, -1) \
  X(10, EMFILE, epoll_create1, (int a), (a), int, -1) \
  X(11, ENOMEM, epoll_ctl, (int a, int b, int c, struct epoll_event *d), (a, b, c, d), int, -1) \
  X(12, EMFILE, eventfd, (unsigned a, int b), (a, b), int, -1) \
  X(13, EAGAIN, pthread_create, \
    (pthread_t *a, const pthread_attr_t *b, void *(*c)(void *), void *d), (a, b, c, d), int, \
    EAGAIN) \
  X(14, ENOSPC, ftruncate, (int a, off_t b), (a, b), int, -1)
#define WRAP(n, error, name, parameters, arguments, type, failed) \
  type __real_##name parameters; \
  type __wrap_##name parameters; \
  type __wrap_##name parameters { \
    return strikes(n, error) ? failed : __real_##name arguments; \
  }
CALLS(WRAP)
#define CALL_NAME(n, error, name, parameters, arguments, type, failed) #name,
static const char *const call_names[] = {"none", CALLS(CALL_NAME) "accept4", "fallocate",
                                         "memfd_create", "pidfd_open"};
enum { SYSCALLS = 15, CALL_NAMES = sizeof call_names / sizeof *call_names };

long __real_syscall(long number, ...);
#if defined(__has_attribute)
#if __has_attribute(no_sanitize_address)
__attribute__((no_sanitize_address)) /* it reads six arguments, also if fewer were passed */
#endif
#endif
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
  static const long numbers_of[] = {SYS_accept4, SYS_fallocate, SYS_memfd_create, SYS_pidfd_open};
  static const int errors[] = {EMFILE, ENOSPC, EMFILE, EMFILE};
  long a[6];
  va_list args;
  int i;
  va_start(args, number);
  for (i = 0; i < 6; i++) a[i] = va_arg(args, long);
  va_end(args);
  for (i = 0; i < 4; i++)
    if (number == numbers_of[i] && strikes(SYSCALLS + i, errors[i])) return -1;
  return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* --- permission to die: never for the last rank that could finish the job --- */

static bool is_victim(const process *q) {
  return shared->p.fault > 0 && !q->joins && q->rank == shared->p.fault_rank;
}

static bool may_die(process *q) {
  int alive;
  if (LOAD(shared->created) < shared->p.ranks) return false;
  q->ended = test_now();
  if (swap(&q->state, STARTING, DYING)) return true; /* joining: the others do not need it */
  do alive = LOAD(shared->alive);
  while (alive > 1 && !swap(&shared->alive, alive, alive - 1));
  if (alive <= 1) return false;
  if (swap(&q->state, RUNNING, DYING)) return true;
  ADD(shared->alive, 1);
  return false;
}

static void die(void) {
  bool awaited = LOAD(me->state) == STARTING; /* it joins: joins_left counts it already */
  if (!may_die(me)) return;
  if (shared->p.supervised && !awaited) ADD(shared->joins_left, 1); /* for its replacement */
  raise(SIGKILL);
}

static void die_early(int place) { /* before there is a model, in a job with a supervisor */
  int i;
  for (i = 0; i < EVENTS; i++) {
    const event *e = &shared->p.e[i];
    if (e->kind != KILL_EARLY || e->rank != me->rank || e->arg != place || me->joins) continue;
    if (!swap(&shared->done[i], 0, 1)) continue;
    STORE(me->state, DYING);
    raise(SIGKILL);
  }
}

static void set_due(void) { /* of the next KILL_AT_POINT */
  int i;
  for (i = 0; i < EVENTS; i++)
    if (shared->p.e[i].kind == KILL_AT_POINT && !LOAD(shared->done[i])) {
      STORE(shared->due, LOAD(shared->points) + shared->p.e[i].arg);
      return;
    }
  STORE(shared->due, 0);
}

static void at_point(const char *name) {
  const program *p = &shared->p;
  int due, i;
  (void)name;
  if (me == NULL) return;
  if (p->jitter > 0 && (my_dice = ranks_mix(my_dice, 1, 2)) % 16 == 0)
    ranks_sleep((double)(my_dice / 16 % (uint64_t)p->jitter) * 1e-6);
  if (p->threads || LOAD(shared->created) < p->ranks) return;
  if (me->event >= 0 && p->e[me->event].kind == JOIN && p->e[me->event].arg > 0 &&
      ++me->passed == p->e[me->event].arg)
    die();
  if ((due = LOAD(shared->due)) == 0 || ADD(shared->points, 1) < due) return;
  if (!swap(&shared->due, due, 0)) return;
  for (i = 0; i < EVENTS && (p->e[i].kind != KILL_AT_POINT || LOAD(shared->done[i]));) i++;
  if (i < EVENTS) STORE(shared->done[i], 1);
  set_due();
  die();
}

/* --- the life of a rank --- */

typedef struct model {
  const program *p;
  int rank;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
  cddp_param params[PARAMS];
  void *copies[PARAMS];
  int64_t counts[BUFFER];
  void *running; /* on a GPU in its memory: 3 * BUFFER floats */
  cddp_param buffers[3 + PARAMS];
  int buffer_count;
  void *kept; /* the first parameter's data in an illegal program */
  void *own[PARAMS]; /* momentum of the program's own optimizer */
  int32_t own_steps[PARAMS];
  uint64_t step; /* as work on parameters knows it, see begin_step() */
  uint64_t base; /* steps of models before this one */
  cddp_optim *other; /* see TWO_OPTIMIZERS, SPARE_OPTIMIZER */
  int fails;     /* in this step this rank has a mishap, */
  bool arms;     /* or the next cddp_ddp_create, cddp_save or cddp_load has */
  struct second *second;
  bool partial; /* the next checkpoint is that of the restart */
  cddp_sampler sampler;
  uint64_t epoch;
  size_t begin, drawn; /* samples of the epoch that all ranks had before, and this one since */
  cddp_group *half;    /* a group that a thread leaves behind */
  cddp_work *stands;
  struct device *device;
} model;

/* Work on parameters: done by the call, or later by a stream of the rank's GPU. */
typedef struct task {
  model *m;
  uint64_t t;
  int k, shard, from; /* from: in the noise, or a micro-batch */
  cddp_param q;
  void *own;
  rule u;
  size_t first, n;
  bool next;
} task;

/* nccl_programs.c has these for GPUs. take: zeros. put: a copy of host memory for a collective, or
   that memory. look: *p becomes readable, in one of two slots. run_graph: captures and launches. */
#if PROGRAMS_GPU
static void device_environment(const program *p, int rank);
static void device_begin(model *m);
static void drop_graph(model *m);
static void device_end(model *m);
static int device_left(int *threads);
static int device_ids(void); /* descriptors that the double keeps for communicators' ids */
static void *take(model *m, size_t bytes);
static void give(model *m, void *p);
static void enqueue(model *m, void (*run)(const task *), task x);
static void *put(model *m, cddp_group *g, uint64_t h, void *x, size_t bytes, int slot);
static cddp_result look(model *m, cddp_group *g, int slot, const void **p, size_t bytes);
static void hand_over(model *m, bool to_backward);
static cddp_result run_graph(model *m, uint64_t t);
#else
#define device_environment(p, rank) (void)(p)
#define device_begin(m) (void)(m)
#define drop_graph(m) (void)(m)
#define device_end(m) (void)(m)
#define device_left(threads) ((void)(threads), 0)
#define device_ids() 0
#define take(m, bytes) calloc(1, bytes)
#define give(m, p) free(p)
#define put(m, g, h, x, bytes, slot) ((void)(m), (x))
#define look(m, g, slot, p, bytes) CDDP_OK
#define hand_over(m, to_backward) (void)(m)
#define run_graph(m, t) CDDP_UNSUPPORTED
static void enqueue(model *m, void (*run)(const task *), task x) { (void)m, run(&x); }
#endif

__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...) {
  va_list args;
  if (me->wrong++ > 0) return;
  va_start(args, format);
  vsnprintf(me->text, sizeof me->text, format, args);
  va_end(args);
}

static void at_step(model *m, uint64_t t, int place) { /* where KILL_AT_STEP happens */
  const program *p = m->p;
  int i;
  for (i = 0; i < EVENTS; i++) {
    const event *e = &p->e[i];
    if (e->kind != KILL_AT_STEP || e->rank != m->rank || e->step != (int)t || e->arg != place)
      continue;
    while (LOAD(shared->created) < p->ranks) ranks_sleep(1e-4);
    if (swap(&shared->done[i], 0, 1)) die();
  }
}

/* Its bucket has the parameters that are used, each from a multiple of 64 bytes on. */
static cddp_result mean_hook(cddp_bucket *bucket, void *data) {
  const model *m = (const model *)data;
  size_t size = cddp_dtype_size(bucket->dtype), bytes = 0;
  int i;
  for (i = 0; i < bucket->param_count && m != NULL && !m->p->gpu; i++) {
    int k = bucket->params[i];
    if (!is_used(m->p, m->step, k)) STORE(shared->odd_bucket, 1);
    bytes = (bytes + 63) / 64 * 64 + m->params[k].count * size;
  }
  if (m != NULL && !m->p->gpu && (bytes + 63) / 64 != (bucket->count * size + 63) / 64)
    STORE(shared->odd_bucket, 1);
  return cddp_all_reduce(bucket->group, bucket->data, bucket->count, bucket->dtype, CDDP_AVG,
                         NULL);
}

/* Fills n elements from place `from` of the noise on. */
static void fill(const program *p, void *to, int dtype, int count, int from) {
  size_t size = cddp_dtype_size((cddp_dtype)dtype), at, n, all = (size_t)count;
  const unsigned char *x = noise[is_exact(p)][dtype] + (size_t)from * size;
  for (at = 0; at < all; at += n) {
    n = all - at < PERIOD ? all - at : PERIOD;
    memcpy((char *)to + at * size, x, n * size);
  }
}

static void run_fill(const task *x) {
  fill(x->m->p, x->q.data, (int)x->q.dtype, (int)x->q.count, x->from);
}

static void run_zero(const task *x) { memset(x->q.data, 0, x->n); }

static void zero(model *m, void *p, size_t bytes) {
  task x;
  memset(&x, 0, sizeof x);
  x.q.data = p;
  x.n = bytes;
  enqueue(m, run_zero, x);
}

/* Of rank 0; others have something else until the next cddp_ddp_create. */
static void set_weights(model *m, uint64_t t, int k) {
  const cddp_param *q = &m->params[k];
  size_t size = cddp_dtype_size(q->dtype), at, n;
  for (at = 0; at < q->count; at += n) {
    n = q->count - at < PERIOD ? q->count - at : PERIOD;
    if (m->rank == 0) memcpy((char *)q->data + at * size, shared->want[t][k], n * size);
    else memset((char *)q->data + at * size, 0, n * size);
  }
}

static bool create_memory(model *m, int k) {
  const parameter *q = &m->p->p[k];
  static const char *const names[PARAMS] = {"a", "b", "c", "d", "e"};
  cddp_param *to = &m->params[k];
  task x;
  size_t bytes = (size_t)q->count * cddp_dtype_size((cddp_dtype)q->dtype);
  to->name = m->p->partial == RENAMED && phase() > 0 && k == m->p->count - 1 ? "z" : names[k];
  to->count = (size_t)q->count;
  to->dtype = (cddp_dtype)q->dtype;
  to->data = q->memory == SHARED ? cddp_alloc(m->g, bytes) : take(m, bytes);
  if (to->data == NULL) return false;
  if (q->grad == OWN_MALLOCED) to->grad = take(m, bytes);
  if (q->grad == OWN_SHARED && (to->grad = cddp_alloc(m->g, bytes)) != NULL)
    zero(m, to->grad, bytes);
  if (q->grad != PLACED && to->grad == NULL) return false;
  if (m->p->copies && (m->copies[k] = take(m, 2 * to->count)) == NULL) return false;
  if (m->p->optim == OWN && (m->own[k] = take(m, bytes)) == NULL) return false;
  memset(&x, 0, sizeof x);
  x.m = m;
  x.q = *to;
  x.from = (begin_of_weights(k) + (m->rank == 0 && !me->joins ? 0 : 500)) % PERIOD;
  enqueue(m, run_fill, x);
  return true;
}

static cddp_result create_optimizer(model *m, cddp_optim **out, bool misfit) {
  static __thread double rates[PARAMS], decay[PARAMS];
  const program *p = m->p;
  bool all = p->partial != NEW_STATE || phase() > 0;
  cddp_sgd_desc s;
  cddp_adamw_desc a;
  int k;
  memset(&s, 0, sizeof s);
  memset(&a, 0, sizeof a);
  for (k = 0; k < p->count; k++) rates[k] = scales(p, k), decay[k] = decays(p, k);
  s.ddp = a.ddp = p->apart ? NULL : m->ddp;
  s.maximize = a.maximize = p->maximize;
  s.copies = a.copies = p->copies ? m->copies : NULL;
  s.copy_dtype = a.copy_dtype = CDDP_BF16;
  s.lr_scales = a.lr_scales = p->groups ? rates : NULL;
  s.weight_decays = a.weight_decays = p->groups ? decay : NULL;
  s.weight_decay = a.weight_decay = decays(p, 0);
  s.master_weights = a.master_weights = p->masters;
  s.sharded_states = a.sharded_states = p->sharded;
  s.momentum = p->momentum == 0 || !all ? 0 : p->momentum == 1 ? 0.9 : 0.5;
  s.nesterov = p->nesterov && all;
  s.dampening = p->momentum == 2 && !p->nesterov ? 0.25 : 0;
  a.amsgrad = p->amsgrad && all;
  s.stream = a.stream = cddp_stream(m->g);
  if (misfit) s.momentum = 0.875, s.dampening = 0, a.beta1 = 0.875;
  if (p->optim == ADAMW) return cddp_adamw_create(out, m->params, p->count, &a);
  return cddp_sgd_create(out, m->params, p->count, &s);
}

static void run_buffer(const task *x) {
  int i;
  for (i = 0; i < 3 * BUFFER; i++) ((float *)x->q.data)[i] = x->next ? (float)((int)x->t + i) : -1;
}

/* Buffers as rank 0 has them at a step; other ranks have something else until the next call. All
   ranks of an elastic model compute them, and a joining process receives them. */
static void write_buffers(model *m, uint64_t t) {
  bool right = m->p->elastic ? t > 0 || !me->joins : m->rank == 0;
  task x;
  int i;
  for (i = 0; i < BUFFER; i++) m->counts[i] = right ? (int64_t)t * 100 + i : -1;
  memset(&x, 0, sizeof x);
  x.q.data = m->running;
  x.t = t;
  x.next = right;
  enqueue(m, run_buffer, x);
}

static void check_buffers(model *m, uint64_t t) {
  const void *running = m->running;
  int i;
  if (look(m, m->p->elastic ? NULL : m->g, 0, &running, 3 * BUFFER * sizeof(float)) != CDDP_OK)
    return; /* the next call returns it */
  for (i = 0; i < 3 * BUFFER; i++)
    if ((i < BUFFER && m->counts[i] != (int64_t)t * 100 + i) ||
        ((const float *)running)[i] != (float)((int)t + i)) {
      complain("a buffer of step %" PRIu64 " is not rank 0's", t);
      return;
    }
}

static void add_buffer(model *m, const char *name, void *data, size_t count, cddp_dtype dtype) {
  cddp_param *b = &m->buffers[m->buffer_count++];
  b->name = name;
  b->data = data;
  b->count = count;
  b->dtype = dtype;
}

/* Those of the program, and the states of its own optimizer. */
static void describe_buffers(model *m) {
  int k;
  if (m->p->buffers) {
    m->running = take(m, 3 * BUFFER * sizeof(float));
    add_buffer(m, "counts", m->counts, BUFFER, CDDP_I64);
    add_buffer(m, "running", m->running, 3 * BUFFER, CDDP_F32);
    write_buffers(m, 0);
  }
  if (m->p->optim != OWN || !m->p->elastic) return;
  add_buffer(m, "steps", m->own_steps, PARAMS, CDDP_I32);
  for (k = 0; k < m->p->count; k++)
    add_buffer(m, m->params[k].name, m->own[k], m->params[k].count, m->params[k].dtype);
}

/* The model of step t and later, and its optimizer unless there is one. */
static cddp_result make_model(model *m, uint64_t t) {
  const program *p = m->p;
  const event *e = me->event >= 0 ? &p->e[me->event] : NULL;
  int misfit = e != NULL && e->kind == REFUSED ? e->arg : -1, buckets = (p->buckets + (t > 0)) % 3;
  size_t rows[PARAMS] = {0};
  cddp_ddp_desc desc;
  cddp_result r;
  memset(&desc, 0, sizeof desc);
  rows[0] = (size_t)p->rows;
  if (misfit == OTHER_COUNT && p->rows == 0) m->params[0].count -= 1;
  if (misfit == OTHER_COUNT && p->rows > 0) /* no larger: the memory has the first dtype's size */
    m->params[0].dtype = m->params[0].dtype == CDDP_F32 ? CDDP_F16 : m->params[0].dtype ^ 1;
  desc.shards = p->shards;
  desc.elastic = p->elastic;
  desc.sparse_rows = p->rows > 0 ? rows : NULL;
  desc.bucket_cap_mb = buckets == 0 ? 0 : buckets == 1 ? 0.001 : 0.1;
  desc.max_grad_norm = p->clip == NO_CLIP || p->clip == CLIPS_AFTER_WAIT ? 0 : clip_limit(p);
  desc.comm_hook = p->hook ? mean_hook : NULL;
  desc.comm_hook_data = m;
  desc.find_unused_parameters = p->unused;
  desc.uneven_inputs = p->uneven > 0 && p->gpu == NCCL;
  desc.buffers = m->buffers;
  desc.buffer_count = m->buffer_count;
  if (p->buffers && t > 0) write_buffers(m, t);
  r = cddp_ddp_create(&m->ddp, m->g, m->params, p->count, &desc);
  if (r == CDDP_OK && p->buffers && !me->joins) check_buffers(m, t);
  if (r != CDDP_OK || p->optim == OWN || m->optim != NULL) return r;
  if (me->joins) ranks_sleep(2e-5 * p->pause); /* others die, or are refused */
  r = create_optimizer(m, &m->optim, misfit == OTHER_OPTIMIZER);
  if (r == CDDP_OK && p->renewal == TWO_OPTIMIZERS) r = create_optimizer(m, &m->other, false);
  return r;
}

static cddp_result create_model(model *m) {
  int k;
  for (k = 0; k < m->p->count; k++)
    if (!create_memory(m, k)) return CDDP_OUT_OF_MEMORY;
  describe_buffers(m);
  return make_model(m, 0);
}

static void destroy_optimizers(model *m) {
  cddp_optim_destroy(m->optim);
  cddp_optim_destroy(m->other);
  m->optim = m->other = NULL;
}

static void drop_model(model *m) {
  cddp_ddp_destroy(m->ddp);
  m->ddp = NULL;
}

static void destroy_model(model *m) {
  int k;
  drop_graph(m);
  destroy_optimizers(m);
  drop_model(m);
  give(m, m->running);
  if (m->p->illegal) m->params[0].data = m->kept;
  for (k = 0; k < m->p->count; k++) {
    const parameter *q = &m->p->p[k];
    if (q->memory == SHARED && m->g != NULL) cddp_free(m->g, m->params[k].data);
    if (q->memory != SHARED) give(m, m->params[k].data);
    if (q->grad == OWN_SHARED && m->g != NULL) cddp_free(m->g, m->params[k].grad);
    if (q->grad == OWN_MALLOCED) give(m, m->params[k].grad);
    give(m, m->copies[k]);
    give(m, m->own[k]);
  }
}

/* All weights have the bits of the reference after t steps. */
static cddp_result check_weights(model *m, uint64_t t) {
  int k;
  size_t at, n, i;
  cddp_result r = CDDP_OK;
  if (m->p->gpu && t % 2 == 1 && t < (uint64_t)m->p->steps) return r; /* the GPU can be behind */
  for (k = 0; k < m->p->count; k++) {
    const cddp_param *q = &m->params[k];
    size_t size = cddp_dtype_size(q->dtype);
    const void *data = q->data, *copy = m->copies[k];
    bool loaded = m->p->partial == RENAMED && phase() > 0 && t == (uint64_t)m->p->restart;
    if (loaded && k == m->p->count - 1) t = 0, loaded = false; /* not in the file */
    const char *have, *want = (const char *)shared->want[t][k];
    r = look(m, m->p->elastic ? NULL : m->g, 0, &data, q->count * size);
    if (r == CDDP_OK && copy != NULL) r = look(m, NULL, 1, &copy, 2 * q->count);
    if (r != CDDP_OK) return r;
    have = (const char *)data;
    for (at = 0; at < q->count; at += n) {
      n = q->count - at < PERIOD ? q->count - at : PERIOD;
      if (memcmp(have + at * size, want, n * size) == 0) continue;
      for (i = 0; memcmp(have + (at + i) * size, want + i * size, size) == 0;) i++;
      complain("after %" PRIu64 " steps element %zu of parameter %d is %.17g, not %.17g", t,
               at + i, k, ranks_load(q->dtype, have, at + i), ranks_load(q->dtype, want, i));
      return r;
    }
    n = q->count < 100000 ? q->count : 100000;
    if (m->p->copies && !ranks_is_copy(CDDP_BF16, copy, data, n))
      complain("after %" PRIu64 " steps parameter %d is not what its copy has", t, k);
  }
  return r;
}

static void add_noise(const program *p, const cddp_param *q, int from) {
  const unsigned char *table = noise[is_exact(p)][q->dtype];
  size_t at, n, i;
  for (at = 0; at < q->count; at += n) {
    n = q->count - at < PERIOD ? q->count - at : PERIOD;
    if (q->dtype == CDDP_F32) {
      float *g = (float *)q->grad + at;
      const float *x = (const float *)(const void *)table + from;
      for (i = 0; i < n; i++) g[i] += x[i];
    } else if (q->dtype == CDDP_F64) {
      double *g = (double *)q->grad + at;
      const double *x = (const double *)(const void *)table + from;
      for (i = 0; i < n; i++) g[i] += x[i];
    } else {
      for (i = 0; i < n; i++)
        ranks_store(q->dtype, q->grad, at + i,
                    ranks_load(q->dtype, q->grad, at + i) +
                        ranks_load(q->dtype, table, (size_t)from + i));
    }
  }
}

static cddp_result add_rows(model *m, uint64_t t, int shard) {
  const program *p = m->p;
  size_t size = cddp_dtype_size(m->params[0].dtype);
  int from = begin_of_gradient(p, t, shard, 0, 0), first, n = rows_of(p, t, shard, &first), j;
  int64_t rows[4];
  void *values;
  for (j = 0; j < n; j++) rows[j] = (first + j) % p->rows;
  values = noise[is_exact(p)][m->params[0].dtype] + (size_t)from * size;
  values = put(m, m->g, t, values, 4 * (size_t)p->width * size, 0);
  return cddp_ddp_add_rows(m->ddp, 0, rows, values, (size_t)n);
}

static void run_backward(const task *x) {
  add_noise(x->m->p, &x->q, begin_of_gradient(x->m->p, x->m->step, x->shard, x->k, x->from));
}

/* A launch of a captured step does not know its number. */
static void run_begin(const task *x) { x->m->step = x->next ? x->m->step + 1 : x->t; }

static void begin_step(model *m, uint64_t t) {
  task x;
  memset(&x, 0, sizeof x);
  x.m = m;
  x.t = t;
  x.next = m->p->graph > 0 && t >= (uint64_t)m->p->graph;
  enqueue(m, run_begin, x);
}

/* Forward and backward pass of a micro-batch of a shard. */
static cddp_result backward(model *m, uint64_t t, int shard, int micro) {
  const program *p = m->p;
  cddp_result r = CDDP_OK;
  task x;
  int k;
  memset(&x, 0, sizeof x);
  x.m = m;
  x.shard = shard;
  x.from = micro;
  if (p->pause > 0)
    ranks_sleep((double)(ranks_mix(my_dice, t, (uint64_t)shard) % (uint64_t)p->pause) * 1e-6);
  for (k = p->count - 1; k >= 0 && r == CDDP_OK; k--) {
    if (!is_ready(p, t, shard, k)) continue;
    if (has_rows(p, k)) r = add_rows(m, t, shard);
    else x.k = k, x.q = m->params[k], hand_over(m, true), enqueue(m, run_backward, x);
    hand_over(m, false);
    if (r == CDDP_OK && (k > 0 || m->fails != MISSING)) r = cddp_ddp_ready(m->ddp, k);
    if (k == p->count - 1) at_step(m, t, 1);
  }
  if (r == CDDP_OK && m->fails == TWICE && micro + 1 == p->micro) {
    if (!is_ready(p, t, shard, 0)) r = cddp_ddp_ready(m->ddp, 0);
    if (r != CDDP_OK || (r = cddp_ddp_ready(m->ddp, 0)) != CDDP_INVALID_ARGUMENT)
      complain("a second cddp_ddp_ready: %s", cddp_result_name(r));
  }
  return r;
}

static void zero_gradients(model *m) {
  int k;
  for (k = 0; k < m->p->count; k++)
    if (!has_rows(m->p, k))
      zero(m, m->params[k].grad, m->params[k].count * cddp_dtype_size(m->params[k].dtype));
}

static void run_own(const task *x) {
  size_t i;
  for (i = x->first; i < x->first + x->n; i++) {
    double v = ranks_load(x->q.dtype, x->own, i), w = ranks_load(x->q.dtype, x->q.data, i);
    w = sgd(&x->u, w, ranks_load(x->q.dtype, x->q.grad, i), &v);
    ranks_store(x->q.dtype, x->own, i, v);
    ranks_store(x->q.dtype, x->q.data, i, w);
  }
}

/* The same by rows: those without a gradient have zeros. */
static void run_rows(const task *x) {
  const int64_t *rows;
  const void *values;
  size_t n = cddp_ddp_rows(x->m->ddp, 0, &rows, &values), width = (size_t)x->m->p->width, i, j = 0;
  for (i = 0; i < x->q.count; i++) {
    double v = ranks_load(x->q.dtype, x->own, i), w = ranks_load(x->q.dtype, x->q.data, i), g = 0;
    while (j < n && (size_t)rows[j] < i / width) j++;
    if (j < n && (size_t)rows[j] == i / width)
      g = ranks_load(x->q.dtype, values, j * width + i % width);
    w = sgd(&x->u, w, g, &v);
    ranks_store(x->q.dtype, x->own, i, v);
    ranks_store(x->q.dtype, x->q.data, i, w);
  }
}

/* The program's own SGD on n elements from `first` of parameter k on. */
static void own_update(model *m, uint64_t t, int k, size_t first, size_t n) {
  task x;
  memset(&x, 0, sizeof x);
  x.q = m->params[k];
  x.own = m->own[k];
  x.u = rule_of(m->p, k, t, m->own_steps[k]);
  x.m = m;
  x.first = first;
  x.n = n;
  enqueue(m, has_rows(m->p, k) ? run_rows : run_own, x);
}

static cddp_result own_step(model *m, uint64_t t) {
  int k;
  for (k = 0; k < m->p->count; k++) {
    if (!cddp_ddp_used(m->ddp, k)) continue;
    own_update(m, t, k, 0, m->params[k].count);
    m->own_steps[k]++;
  }
  zero_gradients(m);
  return CDDP_OK;
}

static cddp_result partition_step(model *m, uint64_t t) {
  const cddp_partition *part;
  int n = cddp_ddp_partitions(m->ddp, &part), i, k;
  cddp_result r = cddp_ddp_reduce_scatter(m->ddp);
  for (i = 0; r == CDDP_OK && i < n; i++) {
    const cddp_param *q = &m->params[part[i].param];
    char *data = (char *)q->data + part[i].first * cddp_dtype_size(q->dtype);
    cddp_param kept = *q;
    if (part[i].data != data) complain("partition %d is not in its parameter", i);
    m->params[part[i].param].grad = (char *)part[i].grad - (data - (char *)q->data);
    own_update(m, t, part[i].param, part[i].first, part[i].count);
    m->params[part[i].param] = kept;
  }
  for (k = 0; k < m->p->count; k++) m->own_steps[k]++;
  return r == CDDP_OK ? cddp_ddp_all_gather(m->ddp) : r;
}

static cddp_result check_norm(model *m, uint64_t t, cddp_result r) {
  double norm = 0;
  if (r != CDDP_OK || m->p->clip == NO_CLIP) return r;
  if (m->p->graph > 0 && t >= (uint64_t)m->p->graph) return r; /* it waits */
  if ((r = cddp_ddp_grad_norm(m->ddp, &norm)) != CDDP_OK) return r;
  if (m->p->clip == CLIPS && norm != shared->norms[t + 1])
    complain("the norm of step %" PRIu64 " is %.17g, not %.17g", t, norm, shared->norms[t + 1]);
  return r;
}

static cddp_result finish_step(model *m, uint64_t t) {
  cddp_result r;
  at_step(m, t, 2);
  if (m->p->finish == PARTITIONS) return check_norm(m, t, partition_step(m, t));
  if (steps_fused(m->p, t)) return check_norm(m, t, cddp_ddp_step(m->ddp, m->optim));
  if ((r = cddp_ddp_wait(m->ddp)) != CDDP_OK) return r;
  if (m->p->clip == CLIPS_AFTER_WAIT)
    r = cddp_ddp_clip_grad_norm(m->ddp, clip_limit(m->p), NULL);
  else if (m->p->clip != NO_CLIP) /* max_grad_norm is for cddp_ddp_step */
    r = cddp_ddp_clip_grad_norm(m->ddp, clip_limit(m->p), NULL);
  if ((r = check_norm(m, t, r)) != CDDP_OK) return r;
  if (m->optim == NULL) return own_step(m, t);
  if ((r = cddp_optim_step(m->optim)) != CDDP_OK) return r;
  return cddp_optim_zero_grad(m->optim);
}

static cddp_result train_step(model *m, uint64_t t) {
  const program *p = m->p;
  cddp_result r = CDDP_OK;
  int shard = -1, micro;
  at_step(m, t, 0);
  begin_step(m, t);
  if (p->buffers && !p->elastic && p->uneven == 0) {
    write_buffers(m, t);
    if ((r = cddp_ddp_sync_buffers(m->ddp)) != CDDP_OK) return r;
    check_buffers(m, t);
  }
  if (m->optim != NULL) r = cddp_optim_set_lr(m->optim, learning_rate(m->p, t));
  if (r == CDDP_OK && p->renewal == SPARE_OPTIMIZER && !me->joins && t % 3 == 0 && !m->other)
    r = create_optimizer(m, &m->other, false);
  if (r != CDDP_OK) return r;
  if (!p->looped) {
    for (micro = 0; micro < p->micro && r == CDDP_OK; micro++) {
      cddp_ddp_no_sync(m->ddp, micro + 1 < p->micro);
      r = backward(m, t, m->rank, micro);
      if (r == CDDP_OK && micro + 1 < p->micro) r = cddp_ddp_wait(m->ddp);
    }
    return r == CDDP_OK ? finish_step(m, t) : r;
  }
  while (r == CDDP_OK && cddp_ddp_next_shard(m->ddp, &shard)) r = backward(m, t, shard, 0);
  r = finish_step(m, t); /* it says why an earlier call failed */
  return r;
}

/* --- between two steps: other calls on the ranks' group --- */

static cddp_result reduce_some(model *m, cddp_group *g, uint64_t h) {
  enum { MOST = 6000 };
  static const size_t counts[] = {0, 1, 3, 17, 1000, 4097, MOST};
  static __thread double x[MOST];
  const double(*noise_of)[PERIOD] = numbers[m->p->gpu == NCCL]; /* its order is its own */
  size_t n = counts[h % 7], i;
  cddp_dtype dtype = (cddp_dtype)(h / 7 % 2);
  double each[RANKS + PROCESSES], want;
  const void *sum;
  void *to;
  int size = cddp_world_size(g), rank = cddp_rank(g), k;
  cddp_result r;
  for (i = 0; i < n; i++)
    ranks_store(dtype, x, i, noise_of[dtype][((size_t)(97 * rank) + i) % PERIOD]);
  to = put(m, g, h / 14, x, sizeof x, 0);
  if ((r = cddp_all_reduce(g, to, n, dtype, CDDP_SUM, NULL)) != CDDP_OK) return r;
  sum = to;
  if ((r = look(m, g, 0, &sum, sizeof x)) != CDDP_OK) return r;
  for (i = 0; i < n; i += 1 + n / 7) {
    for (k = 0; k < size; k++) each[k] = noise_of[dtype][((size_t)(97 * k) + i) % PERIOD];
    want = sum_of(dtype, each, size);
    if (ranks_load(dtype, sum, i) != want)
      complain("all_reduce of %zu: element %zu is %.17g, not %.17g", n, i,
               ranks_load(dtype, sum, i), want);
  }
  return CDDP_OK;
}

static cddp_result move_some(model *m, cddp_group *g, uint64_t h) {
  enum { MOST = 3000 };
  static __thread int32_t mine[MOST * RANKS], all[MOST * (RANKS + 8)];
  int size = cddp_world_size(g), rank = cddp_rank(g), kind = (int)(h % 4), k;
  size_t n = h / 4 % 3 == 0 ? MOST : 1 + h / 12 % 70, i;
  void *from, *to;
  const void *result;
  cddp_result r;
  if (size > RANKS) return CDDP_OK;
  for (i = 0; i < n * (size_t)size; i++) mine[i] = (int32_t)(rank * 1000000 + (int)i);
  from = put(m, g, h / 12, mine, sizeof mine, 0);
  to = put(m, g, h / 12, all, sizeof all, 1);
  if (kind == 0) r = cddp_all_gather(g, from, to, n, CDDP_I32, NULL);
  else if (kind == 1) r = cddp_all_to_all(g, from, to, n, CDDP_I32, NULL);
  else if (kind == 2) r = cddp_broadcast(g, from, n, CDDP_I32, size - 1, NULL);
  else r = cddp_reduce_scatter(g, from, to, n, CDDP_I32, CDDP_MAX, NULL);
  result = kind == 2 ? from : to;
  if (r == CDDP_OK) r = look(m, g, 0, &result, kind == 2 ? sizeof mine : sizeof all);
  if (r != CDDP_OK) return r;
  for (k = 0; k < size; k++)
    for (i = 0; i < n; i += 1 + n / 5) {
      int32_t want = kind == 0   ? k * 1000000 + (int)i
                     : kind == 1 ? k * 1000000 + rank * (int)n + (int)i
                     : kind == 2 ? (size - 1) * 1000000 + (int)i
                                 : (size - 1) * 1000000 + rank * (int)n + (int)i;
      if (((const int32_t *)result)[kind > 1 ? i : (size_t)k * n + i] != want)
        complain("collective %d of %zu: element %zu of rank %d is wrong", kind, n, i, k);
    }
  return CDDP_OK;
}

static cddp_result send_ring(model *m, cddp_group *g, uint64_t h) {
  enum { MOST = 40000 };
  static __thread float out[MOST], into[MOST];
  int size = cddp_world_size(g), rank = cddp_rank(g);
  size_t n = h % 3 == 0 ? MOST : 1 + h / 3 % 500;
  cddp_work *w = NULL, *v = NULL;
  const void *got;
  void *from, *to;
  cddp_result r, end;
  out[0] = (float)rank, out[n - 1] = (float)rank;
  from = put(m, g, size > 1 ? h / 3 : 0, out, sizeof out, 0); /* NCCL sends nothing to itself */
  to = put(m, g, size > 1 ? h / 3 : 0, into, sizeof into, 1);
  r = cddp_send(g, from, n, CDDP_F32, (rank + 1) % size, 3, &w);
  if (r == CDDP_OK) /* on a GPU an exchange posts all */
    r = cddp_recv(g, to, n, CDDP_F32, (rank + size - 1) % size, 3, m->p->gpu ? &v : NULL);
  end = w != NULL ? cddp_wait(w) : CDDP_OK;
  if (r == CDDP_OK) r = end;
  end = v != NULL ? cddp_wait(v) : CDDP_OK;
  got = to;
  if (r == CDDP_OK && (r = end) == CDDP_OK) r = look(m, g, 1, &got, sizeof into);
  if (r != CDDP_OK) return r;
  if (((const float *)got)[0] != (float)((rank + size - 1) % size) ||
      ((const float *)got)[n - 1] != ((const float *)got)[0])
    complain("a message of %zu is wrong", n);
  return CDDP_OK;
}

static cddp_result use_subgroup(cddp_group *g, uint64_t h) {
  cddp_group *part = NULL;
  int size = cddp_world_size(g), rank = cddp_rank(g), colors = 1 + (int)(h % 3), k, want = 0;
  int32_t x = 1 + rank;
  cddp_result r = cddp_group_split(g, rank % colors, 0, &part);
  if (r == CDDP_OK) r = cddp_all_reduce(part, &x, 1, CDDP_I32, CDDP_SUM, NULL);
  for (k = rank % colors; k < size; k += colors) want += 1 + k;
  if (r == CDDP_OK && x != want) complain("a sub-group's sum is %d, not %d", (int)x, want);
  cddp_destroy(part);
  return r;
}

static cddp_result allocate(model *m, cddp_group *g, uint64_t h) {
  static const size_t sizes[] = {1, 777, 4097, 9000, 70001, 2999999};
  size_t bytes = sizes[h % 6];
  char *x = (char *)cddp_alloc(g, bytes);
  if (x == NULL) return CDDP_OUT_OF_MEMORY;
  zero(m, x, bytes);
  cddp_free(g, x);
  return CDDP_OK;
}

static cddp_group *group_of(model *m) {
  return m->p->elastic ? cddp_ddp_group(m->ddp) : m->g;
}

/* --- a sampler that does not shuffle: sample begin + rank, begin + rank + world size, ... --- */

static size_t samples_of(const model *m) { return m->sampler.desc.dataset_size; }
static size_t samples_left(const model *m) { /* of this rank, at the epoch's begin or a load */
  size_t size = (size_t)cddp_world_size(m->g);
  return m->begin >= samples_of(m) ? 0 : (samples_of(m) - m->begin + size - 1) / size;
}

/* odd: another number of samples than phase 0 has. */
static void begin_samples(model *m, bool odd) {
  cddp_sampler_desc o;
  if (m->p->data == 0) return;
  memset(&o, 0, sizeof o);
  o.dataset_size = (size_t)m->p->data + 3 * odd;
  o.rank = cddp_rank(m->g);
  o.world_size = cddp_world_size(m->g);
  cddp_sampler_destroy(&m->sampler);
  if (cddp_sampler_init(&m->sampler, &o) != CDDP_OK) complain("cddp_sampler_init");
}

static void check_left(const model *m) {
  if (cddp_sampler_epoch(&m->sampler) != m->epoch)
    complain("epoch %" PRIu64 ", not %" PRIu64, cddp_sampler_epoch(&m->sampler), m->epoch);
  if (cddp_sampler_size(&m->sampler) != samples_left(m))
    complain("%zu samples are left, not %zu", cddp_sampler_size(&m->sampler), samples_left(m));
}

static void resume_samples(model *m) {
  if (m->partial) m->epoch = shared->epoch, m->begin = shared->samples;
  else m->begin += m->drawn * (size_t)cddp_world_size(m->g);
  if (m->begin >= (size_t)m->p->data) m->begin = SIZE_MAX / 2; /* its end, also with more samples */
  m->drawn = 0;
  check_left(m);
  if (m->p->seed % 2) cddp_sampler_set_epoch(&m->sampler, m->epoch); /* the same one goes on */
}

static void draw_sample(model *m) {
  size_t i, want;
  bool more;
  if (m->p->data == 0) return;
  more = cddp_sampler_next(&m->sampler, &i);
  if (more != (m->drawn < samples_left(m)))
    complain("cddp_sampler_next after %zu of %zu", m->drawn, samples_left(m));
  if (!more) {
    m->begin = m->drawn = 0;
    cddp_sampler_set_epoch(&m->sampler, ++m->epoch);
    check_left(m);
    more = cddp_sampler_next(&m->sampler, &i);
  }
  want = m->begin + (size_t)cddp_rank(m->g) + m->drawn * (size_t)cddp_world_size(m->g);
  if (!more || (want < samples_of(m) && i != want)) complain("sample %zu, not %zu", i, want);
  m->drawn++;
}

/* The mishap_nth call that takes memory fails on one rank, once. */
static void arm(const model *m) {
  armed.nth = m->p->mishap_nth;
  armed.delay = 0;
  if (m->rank == m->p->mishap_rank) STORE(armed.call, m->p->mishap_call);
}
static void disarm(const model *m) {
  if (m->p->mishap) STORE(armed.call, 0);
}

/* Saves or loads the weights, and the states of an optimizer of the program's own. */
static cddp_result checkpoint(model *m, cddp_group *g, bool save) {
  static const char *const names[PARAMS] = {"ma", "mb", "mc", "md", "me"};
  cddp_param all[2 * PARAMS];
  cddp_checkpoint_desc c;
  cddp_result r = CDDP_OK;
  int n = m->p->count, k;
  memset(&c, 0, sizeof c);
  c.optim = m->partial && save && m->p->partial == NO_STATES ? NULL : m->optim;
  c.ddp = m->ddp;
  c.sampler = m->p->data ? &m->sampler : NULL;
  c.partial = m->partial && !save && m->p->partial;
  memcpy(all, m->params, sizeof m->params);
  for (k = 0; m->p->optim == OWN && k < m->p->count; k++) {
    all[n] = m->params[k];
    all[n].name = names[k];
    all[n++].data = m->own[k];
  }
  if (save && m->p->finish == PARTITIONS) r = cddp_ddp_gather_states(m->ddp, all + m->p->count);
  if (r != CDDP_OK) return r;
  if (m->arms) arm(m);
  r = save ? cddp_save(g, shared->path, all, n, &c) : cddp_load(g, shared->path, all, n, &c);
  disarm(m);
  if (r == CDDP_OK && m->p->data && !save) resume_samples(m);
  for (k = 0; k < m->p->count && !save && phase() > 0; k++)
    m->own_steps[k] = (int)(m->base + cddp_ddp_steps(m->ddp)); /* each was in each step */
  return r;
}

/* Saves, changes the weights, loads. */
static cddp_result save_and_load(model *m) {
  cddp_result r = checkpoint(m, m->g, true);
  int k;
  for (k = 0; k < m->p->count; k++)
    zero(m, m->params[k].data, m->params[k].count * cddp_dtype_size(m->params[k].dtype));
  return r == CDDP_OK ? checkpoint(m, m->g, false) : r;
}

/* Ends an operation in one of three ways, and checks what each promises. from: the sender of a
   receive, else -1. */
static cddp_result await(cddp_work *w, int from, uint64_t h) {
  bool done = false;
  int source;
  cddp_result r = CDDP_TIMEOUT;
  double limit = h % 5 == 1 ? 0 : 1e-3 * (double)(h / 5 % 4);
  if (h % 5 < 2) {
    for (; !done; ranks_sleep(2e-5))
      if (cddp_test(w, &done) != CDDP_OK) complain("cddp_test: %s", cddp_error());
    source = cddp_source();
    if ((r = cddp_wait(w)) == CDDP_OK && from >= 0 && source != from)
      complain("cddp_source after cddp_test is %d, not %d", source, from);
    return r;
  }
  if (h % 5 == 2) return cddp_wait(w);
  if (h % 5 == 3 && (r = cddp_wait_for(w, -1)) != CDDP_INVALID_ARGUMENT) {
    complain("cddp_wait_for(-1): %s", cddp_result_name(r));
    return CDDP_IO;
  }
  while ((r = cddp_wait_for(w, limit)) == CDDP_TIMEOUT) ranks_sleep(2e-5);
  return r;
}

/* Messages to the next rank and from the one before, all with handles. A rank that has lost the one
   still serves the other. */
static cddp_result poll_messages(cddp_group *g, uint64_t h) {
  enum { MOST = 20000, MANY = 140 };
  static const int counts[] = {1, 4, MANY};
  static __thread float out[MOST], into[MOST];
  cddp_work *sends[MANY], *w;
  int size = cddp_world_size(g), rank = cddp_rank(g), step = 1 + (int)(h % 7), i;
  int to = (rank + step) % size, from = (rank + size - step % size) % size;
  int n = counts[h / 7 % 3], posted = 0;
  size_t count = h / 21 % 2 ? MOST : 1 + h / 42 % 300;
  bool any = h / 84 % 2;
  float *data = h / 168 % 2 ? (float *)cddp_alloc(g, MOST * sizeof *data) : out;
  cddp_result r = CDDP_OK, end, first = CDDP_OK;
  if (data == NULL) return CDDP_OUT_OF_MEMORY;
  data[0] = data[count - 1] = (float)rank;
  for (i = 0; i < n && r == CDDP_OK; i++) {
    r = cddp_send(g, data, count, CDDP_F32, to, 5, &sends[i]);
    posted += r == CDDP_OK;
  }
  first = r;
  if (r == CDDP_PEER_LOST) r = CDDP_OK; /* after another failure this rank ends */
  for (i = 0; i < n && r == CDDP_OK; i++) {
    r = cddp_recv(g, into, count, CDDP_F32, any ? CDDP_ANY : from, 5, &w);
    if (r == CDDP_OK) r = await(w, from, ranks_mix(h, (uint64_t)rank, (uint64_t)i));
    if (r == CDDP_OK && (into[0] != (float)from || into[count - 1] != (float)from))
      complain("a message of %zu is wrong", count);
    if (r == CDDP_OK && cddp_source() != from)
      complain("cddp_source is %d, not %d", cddp_source(), from);
  }
  if (first == CDDP_OK) first = r;
  if (first == CDDP_OK) /* those that have been received do not hold it up */
    first = cddp_send(g, data, 1, CDDP_F32, to, 6, NULL);
  if (r == CDDP_OK) r = cddp_recv(g, into, 1, CDDP_F32, from, 6, NULL);
  if (first == CDDP_OK) first = r;
  for (i = posted - 1; i >= 0; i--) {
    end = await(sends[i], -1, ranks_mix(h, (uint64_t)rank + 1000, (uint64_t)i));
    if (first == CDDP_OK) first = end;
  }
  if (data != out) cddp_free(g, data);
  return first;
}

/* A caller's mistake on some ranks: refused, and without an effect. */
static cddp_result slip(model *m, cddp_group *g, uint64_t h) {
  uint64_t mine = ranks_mix(h, (uint64_t)cddp_rank(g), 4);
  int size = cddp_world_size(g), twice[] = {0, 0}, which = (int)(mine % 13);
  float x = 0;
  cddp_result r = CDDP_INVALID_ARGUMENT;
  cddp_group *part = NULL;
  bool done;
  switch (which) {
  case 0: r = cddp_all_reduce(g, NULL, 1, CDDP_F32, CDDP_SUM, NULL); break;
  case 1: r = cddp_all_reduce(g, &x, 1, (cddp_dtype)99, CDDP_SUM, NULL); break;
  case 2: r = cddp_all_reduce(g, &x, 1, CDDP_F32, (cddp_op)99, NULL); break;
  case 3: r = cddp_send(g, &x, 1, CDDP_F32, size, 3, NULL); break;
  case 4: r = cddp_recv(g, &x, 1, CDDP_F32, 0, -1, NULL); break;
  case 5: r = cddp_broadcast(g, &x, 1, CDDP_F32, -1, NULL); break;
  case 6: r = cddp_optim_set_lr(m->optim, -1); break;
  case 7: r = cddp_ddp_clip_grad_norm(m->ddp, -1, NULL); break;
  case 8: r = cddp_wait(NULL); break;
  case 9: r = cddp_test(NULL, &done); break;
  case 10: r = cddp_group_new(g, twice, 2, &part); break;
  case 11: r = cddp_send(g, NULL, 1, CDDP_F32, 0, 3, NULL); break;
  default: if (cddp_alloc(g, SIZE_MAX / 4) != NULL) r = CDDP_OK;
  }
  if (r != CDDP_INVALID_ARGUMENT && !(m->p->elastic && r == CDDP_PEER_LOST))
    complain("mistake %d: %s", which, cddp_result_name(r));
  if (cddp_error()[0] == 0) complain("mistake %d has no text", which);
  return reduce_some(m, g, h / 13);
}

static cddp_result between_steps(model *m, uint64_t t) {
  const program *p = m->p;
  uint64_t h = ranks_mix(p->seed ^ 3, t, 1);
  cddp_group *g = group_of(m);
  cddp_result r;
  if (p->between == 0 || h % 3 == 0) return CDDP_OK;
  h /= 3;
  if (g == NULL) return CDDP_ABORTED;
  switch (p->between == BY_CHANCE ? 1 + (int)(h % 5) : p->between) {
  case REDUCES: r = reduce_some(m, g, h / 5); break;
  case MOVES: r = move_some(m, g, h / 5); break;
  case SENDS: r = send_ring(m, g, h / 5); break;
  case SPLITS: r = p->elastic ? reduce_some(m, g, h / 5) : use_subgroup(g, h / 5); break;
  case ALLOCATES: return allocate(m, m->g, h / 5);
  case POLLS: r = m->p->gpu ? send_ring(m, g, h / 5) : poll_messages(g, h / 5); break;
  case SLIPS: r = m->p->gpu ? CDDP_OK : slip(m, g, h / 5); break;
  default: r = p->elastic ? CDDP_OK : save_and_load(m); break;
  }
  return p->elastic && r == CDDP_PEER_LOST ? CDDP_OK : r;
}

/* --- a second model: of one parameter, whose gradient depends on rank and element --- */

enum { FEW = 4 }; /* elements after which it repeats */

typedef struct second {
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
  cddp_param p;
  int steps;
  bool failed; /* and is not made again */
  double w[FEW], v[FEW], q[FEW];
} second;

static void drop_second(model *m) {
  second *s = m->second;
  if (s == NULL) return;
  cddp_optim_destroy(s->optim);
  cddp_ddp_destroy(s->ddp);
  if (s->p.data != NULL) cddp_free(m->g, s->p.data);
  free(s);
  m->second = NULL;
}

static cddp_result make_second(model *m, cddp_group *g) {
  const program *p = m->p;
  second *s = (second *)calloc(1, sizeof *s);
  cddp_ddp_desc desc;
  cddp_sgd_desc sgd;
  cddp_adamw_desc adamw;
  cddp_result r;
  size_t i;
  if (s == NULL) return CDDP_OUT_OF_MEMORY;
  memset(&desc, 0, sizeof desc);
  memset(&sgd, 0, sizeof sgd);
  memset(&adamw, 0, sizeof adamw);
  m->second = s;
  s->g = g;
  s->p.name = "second";
  s->p.count = 1 + p->seed % 7 * 700;
  if ((s->p.data = cddp_alloc(m->g, s->p.count * sizeof(float))) == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < s->p.count; i++)
    ((float *)s->p.data)[i] = cddp_rank(g) == 0 ? (float)(i % FEW) : -1;
  for (i = 0; i < FEW; i++) s->w[i] = (double)i;
  desc.shards = p->seed % 2 ? 0 : cddp_world_size(g);
  desc.elastic = !p->elastic && p->seed % 4 == 0;
  if ((r = cddp_ddp_create(&s->ddp, g, &s->p, 1, &desc)) != CDDP_OK) return r;
  sgd.ddp = adamw.ddp = p->seed % 3 ? s->ddp : NULL;
  sgd.lr = adamw.lr = 0.25;
  sgd.momentum = 0.5;
  sgd.sharded_states = adamw.sharded_states = p->seed % 3 == 1 && !desc.elastic;
  return p->optim == ADAMW ? cddp_adamw_create(&s->optim, &s->p, 1, &adamw)
                           : cddp_sgd_create(&s->optim, &s->p, 1, &sgd);
}

static cddp_result step_second(model *m) {
  second *s = m->second;
  int size = cddp_world_size(s->g), k;
  size_t i;
  double sum, none = 0;
  rule u = {0};
  cddp_result r;
  u.adamw = m->p->optim == ADAMW;
  u.momentum = true;
  u.sign = u.take = 1, u.rate = 0.25, u.keep = 0.5;
  u.steps = s->steps++;
  u.first = u.steps == 0;
  while (cddp_ddp_next_shard(s->ddp, &k)) { /* one */
    for (i = 0; i < s->p.count; i++) ((float *)s->p.grad)[i] += (float)(1 + k * (int)(i % FEW));
    (void)cddp_ddp_ready(s->ddp, 0);
  }
  if ((r = cddp_ddp_step(s->ddp, s->optim)) != CDDP_OK) return r;
  for (i = 0; i < FEW; i++) {
    for (k = 0, sum = 0; k < size; k++) sum += 1 + k * (int)i;
    s->w[i] = update(&u, s->w[i], in(CDDP_F32, sum / size), &s->v[i], &s->q[i], &none);
  }
  for (i = 0; i < s->p.count; i++)
    if ((double)((float *)s->p.data)[i] != s->w[i % FEW]) {
      complain("the second model's element %zu is %.9g, not %.9g, after %d steps", i,
               (double)((float *)s->p.data)[i], s->w[i % FEW], s->steps);
      break;
    }
  return r;
}

/* Whether that many ranks have a second model on g, and so need no new one. */
static cddp_result have_second(const model *m, cddp_group *g, int32_t *all) {
  *all = m->second != NULL && m->second->g == g;
  return cddp_all_reduce(g, all, 1, CDDP_I32, CDDP_MIN, NULL);
}

/* In an elastic job a model that is not elastic ends with the first rank that is lost. That on the
   elastic model's group is made anew with the group, that on the job's group is not. */
static cddp_result second_step(model *m) {
  const program *p = m->p;
  cddp_group *g = p->second == ON_ITS_GROUP ? group_of(m) : m->g;
  cddp_result r = CDDP_OK;
  int32_t all = 1;
  if (g == NULL) return CDDP_ABORTED;
  if (p->second == ON_ITS_GROUP) r = have_second(m, g, &all);
  else if (m->second == NULL || m->second->failed) return CDDP_OK;
  if (r == CDDP_OK && !all) {
    drop_second(m);
    r = make_second(m, g);
    /* Without memory this rank ends: the others are in cddp_ddp_create, which it has not called. */
    if (r != CDDP_OK && (m->second == NULL || m->second->p.data == NULL)) return r;
  }
  if (r == CDDP_OK) r = step_second(m);
  if (r == CDDP_OK || !p->elastic) return r;
  if (r != CDDP_PEER_LOST && !shared->struck)
    complain("the second model: %s: %s", cddp_result_name(r), cddp_error());
  if (p->second == ON_ITS_GROUP || p->seed % 2) drop_second(m);
  else m->second->failed = true;
  return CDDP_OK;
}

/* --- models and optimizers made anew --- */

/* Before step t. */
static cddp_result renew(model *m, uint64_t t) {
  const program *p = m->p;
  cddp_optim *kept = m->optim;
  if (p->renewal == SPARE_OPTIMIZER && t % 3 == 2) {
    cddp_optim_destroy(m->other);
    m->other = NULL;
  }
  if (p->renewal == TWO_OPTIMIZERS && t > me->begin) m->optim = m->other, m->other = kept;
  if (t != (uint64_t)p->at) return CDDP_OK;
  if (p->renewal == NEW_OPTIMIZER) {
    destroy_optimizers(m);
    return create_optimizer(m, &m->optim, false);
  }
  if (p->renewal != NEW_MODEL) return CDDP_OK;
  if (!p->apart) destroy_optimizers(m);
  drop_model(m);
  m->base = t;
  return make_model(m, t);
}

/* Whether `yes` is true on all ranks. */
static bool all_agree(model *m, bool yes) {
  int32_t all = yes;
  cddp_result r = cddp_all_reduce(m->g, &all, 1, CDDP_I32, CDDP_MIN, NULL);
  const char *none = strstr(cddp_error(), "out of memory allocating ");
  me->no_memory = r == CDDP_OUT_OF_MEMORY && /* for a message between hosts, too */
                  (m->p->hosts > 0 || (none != NULL && atoi(none + 25) < 20000));
  if (r != CDDP_OK && !me->no_memory)
    complain("the group cannot be used after a mishap: %s", cddp_error());
  return all;
}

/* One more time if it failed on any rank: the mishap happens once. */
static cddp_result make_again(model *m, uint64_t t, bool file) {
  int k;
  cddp_result r;
  destroy_optimizers(m);
  drop_model(m);
  for (k = 0; k < m->p->count && !file; k++) set_weights(m, t, k);
  m->base = base_of(m->p, t + 1);
  if (m->arms) arm(m);
  r = make_model(m, t);
  disarm(m);
  if (!all_agree(m, r == CDDP_OK)) return r;
  m->arms = m->arms && m->p->at % 2;
  zero_gradients(m);
  return file ? checkpoint(m, m->g, false) : CDDP_OK;
}

/* Step t, in which one rank fails alone. All go on from a file, or with rank 0's weights. */
static cddp_result step_with_mishap(model *m, uint64_t t) {
  const program *p = m->p;
  bool file = has_file(p), certain = p->mishap <= MISSING;
  int32_t own_steps[PARAMS];
  cddp_result r = CDDP_OK;
  memcpy(own_steps, m->own_steps, sizeof own_steps);
  m->arms = p->mishap == NO_MEMORY_TO_SAVE;
  if (file) r = checkpoint(m, m->g, true);
  m->arms = false;
  if (!all_agree(m, r == CDDP_OK)) {
    if (r == CDDP_OK) complain("cddp_save succeeds where it failed on another rank");
    if (me->no_memory) return CDDP_OUT_OF_MEMORY;
    if ((r = checkpoint(m, m->g, true)) != CDDP_OK) return r;
  }
  if (p->mishap == NO_MEMORY) arm(m);
  m->fails = certain || p->mishap == NO_MEMORY_AFTER
                 ? (m->rank == p->mishap_rank) * (certain ? p->mishap : TWICE)
                 : 0;
  r = train_step(m, t);
  disarm(m);
  m->fails = 0;
  if (r != CDDP_OK && cddp_error()[0] == 0) complain("a failed step has no text");
  if ((certain || p->mishap == NO_MEMORY_AFTER) && r == CDDP_OK)
    complain("a step succeeds in which rank %d failed", p->mishap_rank);
  if (all_agree(m, r == CDDP_OK)) return CDDP_OK;
  if (me->no_memory) return CDDP_OUT_OF_MEMORY;
  m->arms = p->mishap == NO_MEMORY_AFTER;
  r = make_again(m, t, file);
  m->arms = false;
  if (!all_agree(m, r == CDDP_OK) && (r = make_again(m, t, file)) != CDDP_OK) return r;
  memcpy(m->own_steps, own_steps, sizeof own_steps);
  if (m->base + cddp_ddp_steps(m->ddp) != t)
    complain("%" PRIu64 " steps after a mishap, not %" PRIu64, cddp_ddp_steps(m->ddp), t - m->base);
  return (r = check_weights(m, t)) == CDDP_OK ? train_step(m, t) : r;
}

/* --- what all ranks must refuse, in a group that can be used afterwards --- */

static const struct {
  const char *name;
  cddp_result one, other; /* results that it may have */
} illegal[ILLEGALS] = {
    {"nothing", CDDP_OK, CDDP_OK},
    {"elastic and comm_hook", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"elastic and find_unused_parameters", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"elastic and uneven_inputs", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"shards and comm_hook", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"shards and find_unused_parameters", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"fewer shards than ranks", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"5,000 shards", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"one array for two parameters", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"data NULL", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"another count on the last rank", CDDP_MISMATCH, CDDP_MISMATCH},
    {"another dtype on the last rank", CDDP_MISMATCH, CDDP_MISMATCH},
    {"another number of shards on the last rank", CDDP_MISMATCH, CDDP_MISMATCH},
    {"elastic and sharded_states", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"sparse_rows and sharded_states", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"AdamW with f16 and no masters", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"AdamW with sparse_rows", CDDP_UNSUPPORTED, CDDP_UNSUPPORTED},
    {"a negative rate", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"another rate on the last rank", CDDP_MISMATCH, CDDP_MISMATCH},
    {"another momentum on the last rank", CDDP_MISMATCH, CDDP_MISMATCH},
    {"sharded_states and cddp_optim_step", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"cddp_ddp_ready twice on the last rank", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"no cddp_ddp_ready on the last rank", CDDP_INVALID_ARGUMENT, CDDP_MISMATCH},
    {"cddp_ddp_all_gather alone", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"cddp_ddp_wait on the last rank, cddp_ddp_step elsewhere", CDDP_MISMATCH, CDDP_MISMATCH},
    {"cddp_ddp_step with no_sync", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"host memory in a model on a GPU", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT},
    {"an optimizer of a longer parameter", CDDP_INVALID_ARGUMENT, CDDP_INVALID_ARGUMENT}};

/* Up to its refusal by cddp_ddp_create. */
static cddp_result illegal_model(model *m, int kind, bool last) {
  const program *p = m->p;
  size_t rows[PARAMS] = {0};
  cddp_ddp_desc desc;
  int k;
  memset(&desc, 0, sizeof desc);
  for (k = 0; k < p->count; k++)
    if (!create_memory(m, k)) return CDDP_OUT_OF_MEMORY;
  desc.elastic = kind == ELASTIC_HOOK || kind == ELASTIC_UNUSED || kind == ELASTIC_UNEVEN ||
                 kind == SHARDED_ELASTIC;
  desc.shards = kind == FEW_SHARDS                            ? p->ranks - 1
                : kind == MANY_SHARDS                         ? 5000
                : kind == SHARDS_HOOK || kind == SHARDS_UNUSED ? p->ranks
                : kind == LAST_SHARDS                         ? p->ranks + last
                                                              : 0;
  if (kind == ELASTIC_HOOK || kind == SHARDS_HOOK) desc.comm_hook = mean_hook;
  desc.find_unused_parameters = kind == ELASTIC_UNUSED || kind == SHARDS_UNUSED;
  desc.uneven_inputs = kind == ELASTIC_UNEVEN;
  if (kind == SHARDED_ROWS || kind == ADAMW_ROWS) {
    rows[0] = 1;
    desc.sparse_rows = rows;
    if (p->p[0].grad == OWN_SHARED) cddp_free(m->g, m->params[0].grad);
    if (p->p[0].grad == OWN_MALLOCED) give(m, m->params[0].grad);
    m->params[0].grad = NULL;
  }
  m->kept = m->params[0].data;
  if (kind == OVERLAP) m->params[0].data = m->params[1].data;
  if (kind == NO_DATA) m->params[0].data = NULL;
  if (kind == HOST_DATA) m->params[0].data = m->counts;
  if (kind == LAST_COUNT) m->params[0].count -= last;
  if (kind == LAST_DTYPE && last) m->params[0].dtype = CDDP_BF16;
  return cddp_ddp_create(&m->ddp, m->g, m->params, p->count, &desc);
}

static cddp_result illegal_optimizer(model *m, int kind, bool last) {
  cddp_sgd_desc s;
  cddp_adamw_desc a;
  memset(&s, 0, sizeof s);
  memset(&a, 0, sizeof a);
  s.lr = a.lr = kind == NEGATIVE ? -1 : kind == LAST_RATE && last ? 0.5 : 0.25;
  s.momentum = kind == LAST_MOMENTUM && last ? 0.5 : 0.25;
  s.ddp = a.ddp = kind == COUNT_CHANGED ? NULL : m->ddp;
  s.sharded_states = kind == SHARDED_ELASTIC || kind == SHARDED_ROWS || kind == SHARDED_APART;
  if (kind == ADAMW_HALF || kind == ADAMW_ROWS)
    return cddp_adamw_create(&m->optim, m->params, m->p->count, &a);
  return cddp_sgd_create(&m->optim, m->params, m->p->count, &s);
}

static cddp_result illegal_step(model *m, int kind, bool last) {
  cddp_result r = CDDP_OK;
  int k;
  if (kind == COUNT_CHANGED) {
    drop_model(m);
    m->params[0].count -= 1;
    r = cddp_ddp_create(&m->ddp, m->g, m->params, m->p->count, NULL);
  }
  if (kind == GATHER_ALONE) return cddp_ddp_all_gather(m->ddp);
  cddp_ddp_no_sync(m->ddp, kind == NO_SYNC_STEP);
  for (k = m->p->count - 1; k >= 0 && r == CDDP_OK; k--)
    if (k > 0 || kind != NOT_READY || !last) r = cddp_ddp_ready(m->ddp, k);
  if (r == CDDP_OK && kind == READY_TWICE && last &&
      cddp_ddp_ready(m->ddp, 0) != CDDP_INVALID_ARGUMENT)
    complain("a second cddp_ddp_ready was not refused");
  if (r != CDDP_OK) return r;
  if (kind == COUNT_CHANGED && m->p->seed % 3 == 0) return checkpoint(m, m->g, true);
  if (kind == COUNT_CHANGED && m->p->seed % 3 == 1 && (r = cddp_ddp_wait(m->ddp)) == CDDP_OK)
    return cddp_optim_step(m->optim);
  if (kind == SHARDED_APART && (r = cddp_ddp_wait(m->ddp)) == CDDP_OK)
    return cddp_optim_step(m->optim);
  if (kind == LAST_WAITS && last) return cddp_ddp_wait(m->ddp);
  return cddp_ddp_step(m->ddp, m->optim);
}

static cddp_result refuse(model *m) {
  int kind = m->p->illegal, size = cddp_world_size(m->g);
  bool last = m->rank == size - 1;
  int32_t x = 1;
  cddp_result r = illegal_model(m, kind, last);
  if (r == CDDP_OK) r = illegal_optimizer(m, kind, last);
  if (r == CDDP_OK) r = illegal_step(m, kind, last);
  if (r != illegal[kind].one && r != illegal[kind].other)
    complain("%s: %s: %s", illegal[kind].name, cddp_result_name(r), r ? cddp_error() : "");
  if (cddp_error()[0] == 0) complain("%s: no text", illegal[kind].name);
  if ((r = cddp_all_reduce(m->g, &x, 1, CDDP_I32, CDDP_SUM, NULL)) == CDDP_OK && x != size)
    complain("after %s the sum is %d, not %d", illegal[kind].name, (int)x, size);
  return r;
}

/* --- what is left behind, or never comes --- */

/* Rank p->mishap_rank has returned from its thread: the others hear of it in a group of theirs. */
static cddp_result see_the_end(model *m) {
  cddp_result r = m->p->seed % 2 ? cddp_barrier(m->half) : cddp_barrier(m->g);
  if (r != CDDP_PEER_LOST) complain("after the end of a thread: %s", cddp_result_name(r));
  return CDDP_OK;
}

static bool has_lost_rank(void) {
  int i;
  for (i = 0; i < shared->process_count && i < PROCESSES; i++) {
    const process *q = &shared->processes[i];
    int state = LOAD(q->state);
    if (state == DYING || (state == ENDED && !q->joins)) return true;
  }
  return shared->struck || shared->p.supervised;
}

/* A receive from the next of the first ranks, which sends nothing: it ends as a rank is lost or has
   left, and not before; on this host within moments. */
static void check_standing(model *m, bool last) {
  const process *peer = &shared->processes[(m->rank + 1) % m->p->ranks];
  bool done = false, dead;
  float x[2] = {0, 0};
  cddp_result r;
  if (m->stands == NULL) return;
  dead = !m->p->supervised && LOAD(peer->state) == DYING;
  do {
    if (cddp_test(m->stands, &done) != CDDP_OK) complain("cddp_test: %s", cddp_error());
    if (last && dead && !done) ranks_sleep(1e-4);
  } while (last && dead && !done);
  if (!done && !last) return;
  if (!done && cddp_cancel(m->stands) == CDDP_OK) {
    m->stands = NULL;
    return;
  }
  r = cddp_wait(m->stands);
  m->stands = NULL;
  if (r != CDDP_PEER_LOST && !shared->struck)
    complain("a receive ends with %s", cddp_result_name(r));
  if (!has_lost_rank()) complain("a receive ends without a lost rank: %s", cddp_error());
  if (!dead || shared->struck) return;
  r = cddp_send(m->g, x, 2, CDDP_F32, (m->rank + 1) % m->p->ranks, 4, NULL);
  if (r != CDDP_PEER_LOST) complain("a send to a lost rank: %s", cddp_result_name(r));
}

/* --- from cddp_init to cddp_destroy --- */

/* Whether the job goes on after t steps: the first rank that asks decides. */
static bool goes_on(const program *p, uint64_t t) {
  uint64_t since = (uint64_t)LOAD(shared->last_join);
  bool more;
  if (p->restart > 0 && phase() == 0) return t < (uint64_t)p->restart;
  if (t < (uint64_t)p->steps) return true;
  if (LOAD(shared->decided[t]) == 0) {
    more = LOAD(shared->joins_left) > 0 || t < since + 2;
    more = more && t < (uint64_t)last_step(p) && joins_of(p) > 0;
    (void)swap(&shared->decided[t], 0, more ? 1 : 2);
  }
  if (LOAD(shared->decided[t]) == 1 && LOAD(shared->joins_left) > 0)
    ranks_sleep(fmin(0.002 * (double)(t - since), 0.06)); /* the process needs time */
  return LOAD(shared->decided[t]) == 1;
}

/* What this rank uses now: after each join of a churn, with all ranks; else at each part of the
   steps of a long program since the last process began or ended. */
static void measure(model *m, uint64_t t) {
  int i = (int)t * MEASURES / LONG, states = 0, k;
  usage *use;
  for (k = 0; k < LOAD(shared->process_count) && k < PROCESSES; k++)
    states += 100 + LOAD(shared->processes[k].state);
  if (m->p->churn > 0)
    i = cddp_world_size(group_of(m)) == m->p->ranks ? LOAD(shared->joined) : MEASURES;
  else if (states != me->states) memset(me->use, 0, sizeof me->use);
  me->states = states;
  if (i >= MEASURES || (m->p->churn == 0 && me->use[i].of[THREADS] > 0)) return;
  use = &me->use[i];
  use->of[DESCRIPTORS] = ranks_open_fds() - device_ids();
  use->of[MAPPINGS] = ranks_mappings("");
  use->of[THREADS] = ranks_threads();
#if __GLIBC_PREREQ(2, 33)
  use->of[PRIVATE] = (int)((mallinfo2().uordblks + mallinfo2().hblkhd) / 1024);
#endif
  use->of[IN_COMMON] = (int)(ranks_shared_bytes() / 1024);
}

static void announce(model *m) { /* the model exists */
  if (!me->joins) {
    if (!is_victim(me)) ADD(shared->alive, 1);
    STORE(me->state, RUNNING);
    if (is_victim(me)) armed.nth = m->p->fault_nth, armed.delay = m->p->fault_delay;
    if (is_victim(me)) STORE(armed.call, m->p->fault);
    ADD(shared->created, 1);
    return;
  }
  if (!swap(&me->state, STARTING, RUNNING)) pause(); /* it is being killed */
  ADD(shared->alive, 1);
  STORE(shared->last_join, (int)cddp_ddp_steps(m->ddp));
  ADD(shared->joined, 1);
  if (m->p->supervised) ADD(shared->joins_left, -1);
}

/* After the restart: what the file lacks, another save has. With another number of samples the file
   is refused in the middle of an epoch, and then changes nothing. */
static cddp_result load_whole(model *m) {
  const program *p = m->p;
  bool refused = p->data && p->seed % 3 && shared->samples > 0;
  cddp_result r;
  refused = refused && shared->samples < (uint64_t)p->data;
  m->partial = true;
  r = checkpoint(m, group_of(m), false);
  if (refused && r != CDDP_INVALID_ARGUMENT)
    complain("cddp_load of another dataset: %s", cddp_result_name(r));
  if (refused) begin_samples(m, false), r = checkpoint(m, group_of(m), false);
  m->partial = false;
  if (p->partial && r == CDDP_OK) r = checkpoint(m, group_of(m), true);
  if (p->partial && r == CDDP_OK) r = checkpoint(m, group_of(m), false);
  return r;
}

static cddp_result save_partly(model *m) {
  m->partial = true;
  if (m->p->data && m->rank == 0) {
    shared->epoch = m->epoch;
    shared->samples = m->begin + m->drawn * (size_t)cddp_world_size(m->g);
  }
  return checkpoint(m, group_of(m), true);
}

static cddp_result train(model *m) {
  const program *p = m->p;
  cddp_result r = CDDP_OK;
  uint64_t t = 0;
  bool launched;
  int shard;
  if (p->illegal) return refuse(m);
  if (p->second == BEFORE_IT && !me->joins) r = make_second(m, m->g);
  if (r == CDDP_OK) r = create_model(m);
  if (p->second == AFTER_IT && !me->joins && r == CDDP_OK) r = make_second(m, m->g);
  if (phase() > 0) m->base = base_of(p, (uint64_t)p->restart);
  begin_samples(m, phase() > 0 && p->seed % 3);
  if (r == CDDP_OK && phase() > 0) r = load_whole(m);
  if (r == CDDP_OK) announce(m);
  if (r == CDDP_OK) me->begin = t = m->base + cddp_ddp_steps(m->ddp);
  if (r == CDDP_OK && t > MOST_STEPS) complain("%" PRIu64 " steps at the start", t), r = CDDP_IO;
  if (r == CDDP_OK) r = check_weights(m, t);
  if (p->buffers && phase() > 0) write_buffers(m, t); /* not in the checkpoint */
  if (r == CDDP_OK && p->buffers && p->elastic) check_buffers(m, t);
  while (r == CDDP_OK && me->wrong == 0 && goes_on(p, t)) {
    if (p->uneven > 0 && t >= (uint64_t)p->uneven && m->rank >= p->ranks / 2) break;
    if (LOAD(shared->reached) < (int)t) STORE(shared->begun[t], (int64_t)(1e6 * test_now()));
    if (LOAD(shared->reached) < (int)t) STORE(shared->reached, (int)t);
    launched = p->graph > 0 && t >= (uint64_t)p->graph;
    if ((r = renew(m, t)) != CDDP_OK) break;
    if (p->mishap && t == (uint64_t)p->at) r = step_with_mishap(m, t);
    else r = launched ? run_graph(m, t) : train_step(m, t);
    if (r != CDDP_OK) break;
    at_step(m, t, 3);
    if (m->base + cddp_ddp_steps(m->ddp) != ++t && !launched)
      complain("%" PRIu64 " steps, not %" PRIu64, m->base + cddp_ddp_steps(m->ddp), t);
    if ((r = check_weights(m, t)) != CDDP_OK) break;
    if (p->buffers && p->elastic) write_buffers(m, t);
    if (p->churn > 0 || p->steps >= LONG / 2) measure(m, t);
    r = between_steps(m, t);
    if (r == CDDP_OK && p->second) r = second_step(m);
    draw_sample(m);
    check_standing(m, false);
    if (r == CDDP_OK && p->leave >= RETURNS && t == (uint64_t)p->at + 1) {
      me->steps = t;
      return m->rank == p->mishap_rank ? CDDP_OK : see_the_end(m);
    }
  }
  if (r == CDDP_OK && p->uneven > 0) {
    if (p->looped) (void)cddp_ddp_next_shard(m->ddp, &shard); /* for which there is no data */
    r = cddp_ddp_join(m->ddp, m->optim);
    if (r == CDDP_OK) r = check_weights(m, t = (uint64_t)p->steps);
    if (r == CDDP_OK && m->base + cddp_ddp_steps(m->ddp) != t)
      complain("%" PRIu64 " steps after cddp_ddp_join", cddp_ddp_steps(m->ddp));
    if (r == CDDP_OK && p->optim != OWN && (r = train_step(m, t)) == CDDP_OK)
      r = check_weights(m, ++t);
  }
  if (r == CDDP_OK && phase() == 0 && p->restart > 0) r = save_partly(m);
  me->steps = t;
  return r;
}

static void check_descriptors(int expected) {
  int more = ranks_fds_left(expected), fd;
  char names[500] = "", path[32], name[64];
  ssize_t n;
  for (fd = 3; more != 0 && fd < 64; fd++) {
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if ((n = readlink(path, name, sizeof name - 1)) < 0) continue;
    name[n] = 0;
    snprintf(names + strlen(names), sizeof names - strlen(names), " %d=%s", fd, name);
  }
  if (more != 0) complain("%d descriptors left:%s", more, names);
}

static void live(cddp_group *g, int rank);

/* The rest of the program in this process. */
static void live_on(int rank) {
  if (shared->p.again != SAME_PORT) ranks_setenv("MASTER_PORT", shared->other_port);
  if (shared->p.again == BESIDE_BY_MPIRUN) unsetenv("MASTER_PORT");
  me->lives_on = true;
  STORE(me->state, STARTING);
  live(NULL, rank);
}

/* Everything between the program's begin and its end. g: of a thread; NULL: cddp_init. */
static void live(cddp_group *g, int rank) {
  const program *p = &shared->p;
  int fds = ranks_open_fds(), threads = p->again >= BESIDE ? ranks_threads() : 1;
  cddp_result r = CDDP_OK;
  cddp_group_desc desc;
  bool beside = p->again >= BESIDE && !me->lives_on;
  float never = 0;
  model m;
  memset(&m, 0, sizeof m);
  memset(&desc, 0, sizeof desc);
  desc.device = p->gpu ? "cuda" : NULL;
  desc.backend = p->gpu == THROUGH_HOST ? "cpu" : NULL;
  m.p = p;
  m.g = g;
  m.rank = rank;
  my_dice = ranks_mix(p->seed, (uint64_t)rank, (uint64_t)me->event);
  die_early(0);
  if (g == NULL) r = cddp_init(&m.g, &desc);
  if (r == CDDP_OK) die_early(1);
  if (r == CDDP_OK && cddp_world_size(m.g) != (phase() > 0 ? p->restart_ranks : p->ranks))
    complain("cddp_world_size is %d", cddp_world_size(m.g));
  if (r == CDDP_OK && cddp_rank(m.g) != rank) complain("cddp_rank is %d", cddp_rank(m.g));
  if (r == CDDP_OK && p->gpu && g != NULL) r = cddp_set_device(g, desc.device, desc.backend);
  if (r == CDDP_OK && p->gpu) device_begin(&m);
  if (r == CDDP_OK && p->leave) r = cddp_group_split(m.g, 0, rank, &m.half);
  if (r == CDDP_OK && p->stands && !me->joins && p->ranks > 1)
    r = cddp_recv(m.g, &never, 1, CDDP_F32, (rank + 1) % p->ranks, 9, &m.stands);
  if (r == CDDP_OK) r = train(&m);
  if (r != CDDP_OK && me->wrong == 0) snprintf(me->text, sizeof me->text, "%s", cddp_error());
  me->result = r;
  me->ended = test_now();
  STORE(armed.call, 0);
  if (!p->threads && !swap(&me->state, RUNNING, ENDED) && !swap(&me->state, STARTING, ENDED))
    pause(); /* it is being killed */
  if (beside && r == CDDP_OK && me->wrong == 0) live_on(rank);
  check_standing(&m, true);
  cddp_sampler_destroy(&m.sampler);
  drop_second(&m);
  destroy_model(&m);
  if (!p->leave) cddp_destroy(m.g);
  device_end(&m);
  if (g != NULL) return;
  fds += device_left(&threads);
  if (p->supervised && rank == 0 && !me->joins) fds--; /* the supervisor's socket for rank 0 */
  if (!ranks_threads_left(threads)) complain("%d threads left", ranks_threads() - threads);
  check_descriptors(fds);
}

static int thread_life(cddp_group *g, void *arg) {
  (void)arg;
  me = &shared->processes[cddp_rank(g)];
  live(g, cddp_rank(g));
  if (me->rank == shared->p.mishap_rank && shared->p.leave == EXITS) pthread_exit(NULL);
  return me->rank == shared->p.mishap_rank && shared->p.leave == FAILS;
}

/* All ranks as threads of this process. */
static int threads_life(int count, void *arg) {
  int fds = ranks_open_fds(), mappings = ranks_mappings(" rw-s "), threads = 1;
  cddp_result r;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ranks_setenv("CDDP_TIMEOUT_S", DEADLINE_S);
  device_environment(&shared->p, 0);
  r = cddp_run_threads(thread_life, NULL, count);
  me = &shared->processes[0];
  if (r != (shared->p.leave >= FAILS ? CDDP_PEER_LOST : CDDP_OK))
    complain("cddp_run_threads: %s: %s", cddp_result_name(r), r ? cddp_error() : "");
  fds += device_left(&threads);
  check_descriptors(fds);
  mappings = ranks_mappings(" rw-s ") - mappings;
  if (mappings != 0) complain("%d mappings left", mappings);
  if (!ranks_threads_left(threads)) complain("%d threads left", ranks_threads() - threads);
  return 0;
}

/* The environment of Open MPI's mpirun instead. */
static void use_mpirun(int rank) {
  static const char *const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};
  char job[64];
  int i;
  for (i = 0; i < 6; i++) unsetenv(names[i]);
  ranks_setenv("OMPI_COMM_WORLD_RANK", rank);
  ranks_setenv("OMPI_COMM_WORLD_SIZE", shared->p.ranks);
  ranks_setenv("OMPI_COMM_WORLD_LOCAL_RANK", rank);
  ranks_setenv("OMPI_COMM_WORLD_LOCAL_SIZE", shared->p.ranks);
  snprintf(job, sizeof job, "programs-%d-%d", (int)getppid(), shared->port);
  setenv("PMIX_NAMESPACE", job, 1);
}

static int process_life(int number, void *arg) {
  const program *p = &shared->p;
  int mappings = ranks_mappings(" rw-s ");
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  me = &shared->processes[number];
  me->pid = getpid();
  if (p->hosts > 0) setenv("TEST_HOSTS", host_plans[p->hosts], 1);
  ranks_environment(me->rank, phase() > 0 ? p->restart_ranks : p->ranks, shared->port);
  ranks_setenv("CDDP_TIMEOUT_S", DEADLINE_S);
  if (me->joins) setenv("CDDP_JOIN", "1", 1);
  if (p->secret) setenv("CDDP_SECRET", "of these programs", 1);
  if (p->secret && me->event >= 0 && p->e[me->event].kind == REFUSED &&
      p->e[me->event].arg == OTHER_SECRET)
    setenv("CDDP_SECRET", "another", 1);
  device_environment(p, me->rank);
  if (p->again == BESIDE_BY_MPIRUN) use_mpirun(me->rank);
  live(NULL, me->rank);
  if (p->again && !me->lives_on && me->result == CDDP_OK && me->wrong == 0) live_on(me->rank);
  mappings = ranks_mappings(" rw-s ") - mappings;
  if (mappings != 0) complain("%d mappings left", mappings);
  return 0;
}

/* A rank of cddp_spawn_elastic. */
static int supervised_life(int rank, void *arg) {
  int number = ADD(shared->process_count, 1) - 1;
  const char *join = getenv("CDDP_JOIN");
  (void)arg;
  if (number >= PROCESSES) return 1;
  me = &shared->processes[number];
  me->pid = getpid();
  me->rank = rank;
  me->joins = join != NULL && strcmp(join, "1") == 0;
  me->event = -1;
  me->started = test_now();
  STORE(me->state, STARTING);
  device_environment(&shared->p, rank);
  live(NULL, rank);
  return me->result != CDDP_OK || me->wrong > 0;
}

static int supervisor_life(int count, void *arg) {
  cddp_result r;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ranks_setenv("CDDP_TIMEOUT_S", DEADLINE_S);
  r = cddp_spawn_elastic(supervised_life, NULL, count, 2 * EVENTS);
  if (r != CDDP_OK) snprintf(shared->text, sizeof shared->text, "%s", cddp_error());
  return r != CDDP_OK;
}

/* --- the judge --- */

typedef struct watch { /* what the judge does next, and when */
  bool settled[PROCESSES]; /* a joining process is a member, or has ended */
  bool ended[PROCESSES];
  int status[PROCESSES];
  double strike[EVENTS]; /* when an event from outside happens; 0: not set */
  pid_t stopped;
  double go_on;
  int churned, churner; /* processes that joined so far; the one that joined last, -1: none */
} watch;

static int start(int rank, int number) {
  int i = shared->process_count;
  process *q = &shared->processes[i];
  if (i == PROCESSES) return -1;
  memset(q, 0, sizeof *q);
  q->rank = rank;
  q->event = number;
  q->joins = number != -1;
  q->state = STARTING;
  q->started = test_now();
  shared->process_count++;
  q->pid = shared->p.threads ? 0 : ranks_fork(process_life, i, NULL);
  if (q->pid < 0) exit(1);
  return i;
}

static bool lives(const process *q) {
  int state = LOAD(q->state);
  return state == STARTING || state == RUNNING;
}

/* The living process with that rank; NULL: none. */
static process *find(int rank) {
  int i;
  for (i = 0; i < shared->process_count; i++)
    if (shared->processes[i].rank == rank && lives(&shared->processes[i]))
      return &shared->processes[i];
  return NULL;
}

static bool job_has_ended(void) {
  int i;
  for (i = 0; i < shared->process_count; i++)
    if (LOAD(shared->processes[i].state) == ENDED && !shared->processes[i].joins) return true;
  return false;
}

/* Starts a process that joins, or that is to be refused. */
static void start_joining(const event *e, int number) {
  int rank = e->rank, i;
  if (e->kind == REFUSED && e->arg == SAME_RANK) {
    for (rank = 0; rank < shared->p.ranks && find(rank) == NULL;) rank++;
    if (rank == shared->p.ranks || shared->p.fault > 0 || events_of(&shared->p, NOTHING) !=
        EVENTS - 1) rank = -1; /* who could die is no living rank for sure */
  } else {
    for (i = 0; i < shared->p.ranks && find(rank) != NULL; i++) rank = (rank + 1) % shared->p.ranks;
    if (i == shared->p.ranks) rank = i;
    while (find(rank) != NULL) rank++;
  }
  if (rank < 0 || start(rank, number) < 0) ADD(shared->joins_left, -1);
}

static void strike(watch *w, int i, double now) {
  const program *p = &shared->p;
  const event *e = &p->e[i];
  process *q;
  if (LOAD(shared->created) < p->ranks || LOAD(shared->reached) < e->step) return;
  if (w->strike[i] == 0) w->strike[i] = now + (e->kind == STOP ? 0 : e->arg * 2e-5);
  if (now < w->strike[i] || (e->kind == STOP && w->stopped != 0)) return;
  STORE(shared->done[i], 1);
  q = find(e->rank);
  if (e->kind == JOIN || e->kind == REFUSED) start_joining(e, i);
  else if (q != NULL && e->kind == KILL_OUTSIDE && may_die(q)) kill(q->pid, SIGKILL);
  else if (q != NULL && e->kind == STOP && LOAD(q->state) == RUNNING) {
    kill(q->pid, SIGSTOP);
    w->stopped = q->pid;
    w->go_on = now + e->arg * 1e-3;
  }
}

/* Kills the last rank and lets another process take its place, again and again. */
static void churn(watch *w) {
  const program *p = &shared->p;
  process *q;
  if (w->churned == p->churn || LOAD(shared->created) < p->ranks) return;
  if (w->churner >= 0 && LOAD(shared->reached) < LOAD(shared->last_join) + 2) return;
  if ((q = find(p->ranks - 1)) != NULL) {
    if (LOAD(q->state) != RUNNING || w->churner == -2) return;
    if (may_die(q)) kill(q->pid, SIGKILL), w->churner = -2;
    return;
  }
  w->churner = start(p->ranks - 1, -2);
  if (w->churner < 0) ADD(shared->joins_left, -1);
  w->churned++;
}

static void act(watch *w, double now) {
  int i;
  if (job_has_ended()) STORE(shared->joins_left, 0);
  if (w->stopped != 0 && now >= w->go_on) {
    kill(w->stopped, SIGCONT);
    w->stopped = 0;
  }
  for (i = 0; i < EVENTS; i++) {
    int kind = shared->p.e[i].kind;
    if (kind >= KILL_OUTSIDE && !LOAD(shared->done[i]) && !job_has_ended()) strike(w, i, now);
  }
  if (shared->p.churn > 0 && !job_has_ended()) churn(w);
}

/* Whether the job had ended before a process that joins could join: a rank had finished, or none
   was left. The rank whose call fails ends at an unknown time after that. */
static bool was_too_late(const process *q) {
  bool finished = false, none = true;
  int i;
  if (!q->joins || q->begin > 0 || q->result != CDDP_PEER_LOST) return false;
  for (i = 0; i < shared->process_count; i++) {
    const process *other = &shared->processes[i];
    bool fails = is_victim(other) && shared->struck && other->result != CDDP_OK;
    double end = fails ? shared->struck_at : other->ended;
    if (other == q || (other->joins && other->result != CDDP_OK)) continue;
    finished = finished || (other->state == ENDED && other->result == CDDP_OK && end < q->ended);
    none = none && end < q->ended;
  }
  return finished || none;
}

/* Whether a process found no rank at MASTER_PORT because the ranks made no step while it looked: on
   one machine only one of the hosts listens there, and after its death another one from its next
   step on. */
static bool saw_no_step(const process *q) {
  int t, steps = 0;
  for (t = 0; t <= MOST_STEPS; t++) {
    double begun = 1e-6 * (double)LOAD(shared->begun[t]);
    steps += begun > q->ended - 2 && begun < q->ended;
  }
  return shared->p.hosts > 0 && q->joins && q->result == CDDP_PEER_LOST && steps < 2 &&
         strstr(q->text, "no rank of a job") != NULL;
}

/* Whether a process may have ended with an error: an event explains it. */
static bool excused(const process *q) {
  const program *p = &shared->p;
  const event *e = q->event >= 0 ? &p->e[q->event] : NULL;
  bool lost = false;
  int i, members = 0;
  for (i = 0; i < shared->process_count; i++) {
    const process *other = &shared->processes[i];
    lost = lost || other->state == DYING || (other != q && other->result != CDDP_OK &&
                                             (is_victim(other) || other->wrong > 0));
    /* It may have died while q asked; then the job did not know it yet, or it was too late. */
    members += other != q && (other->state != DYING || other->ended > q->started);
  }
  if (was_too_late(q) || saw_no_step(q)) return true;
  if (p->mishap > MISSING && q->result == CDDP_OUT_OF_MEMORY) return q->no_memory;
  if (is_victim(q) && shared->struck) return true;
  if (!p->elastic && shared->struck) return true; /* such as cddp_save: all ranks fail alike */
  if (!p->elastic) return lost && q->result == CDDP_PEER_LOST;
  if (q->joins && q->result == CDDP_UNSUPPORTED && strstr(q->text, "full") != NULL)
    return members >= shards_of(p, 0);
  if (e == NULL || e->kind != REFUSED) return false;
  if (e->arg == SAME_RANK) return q->result == CDDP_INVALID_ARGUMENT;
  if (e->arg == OTHER_SECRET)
    return q->result == CDDP_UNAUTHORIZED || q->result == CDDP_PEER_LOST;
  return q->result == CDDP_MISMATCH;
}

static void describe_process(char *text, size_t size, const process *q, int status) {
  static const char *const states[] = {"unused", "starting", "running", "killed", "ended"};
  snprintf(text, size,
           "rank %d%s %s, status 0x%x, %s, steps %" PRIu64 " to %" PRIu64 ": %s", q->rank,
           q->joins ? " (joins)" : "", states[q->state], (unsigned)status,
           cddp_result_name(q->result), q->begin, q->steps, q->text);
}

/* Whether a rank uses more and more: the least of its last measures is above the most of its first
   ones (of memory: of the first half and more): by one for every third measure, or by 2 KiB each
   and 64 more, and a quarter of the measures are larger than the one before (of memory: than all
   before; otherwise a few first uses of large blocks look like it). Not under sanitizers. */
static bool grows(const process *q, char *text, size_t size) {
  static const char *const names[] = {"descriptors", "threads", "mappings", "KiB from malloc",
                                      "KiB in common"};
  int at[MEASURES], n = 0, kinds = RANKS_SLOW ? MAPPINGS : USES, kind, i, some;
  for (i = 1; i < MEASURES; i++)
    if (q->use[i].of[THREADS] > 0) at[n++] = i;
  some = n > 12 ? 4 : 2;
  if (shared->p.second == ON_ITS_GROUP) kinds = MAPPINGS; /* lost ranks' groups keep memory */
  for (kind = 0; kind < kinds && n > 4; kind++) {
    int begin = kind >= MAPPINGS ? n / 2 : 0; /* memory is not all in use at first */
    int least = kind >= PRIVATE ? n + 64 : (n - begin) / 3 + 1;
    int first = 0, last = INT_MAX, rises = 0, most = 0;
    if (shared->p.gpu && kind == MAPPINGS) least += shared->p.threads ? n : 4; /* of the double */
    if (begin + 2 * some > n) break;
    for (i = 0; verbose && i < n; i++) fprintf(stderr, " %d", q->use[at[i]].of[kind]);
    if (verbose) fprintf(stderr, " %s\n", names[kind]);
    for (i = 0; i < begin + some; i++)
      if (q->use[at[i]].of[kind] > first) first = q->use[at[i]].of[kind];
    for (i = n - some; i < n; i++)
      if (q->use[at[i]].of[kind] < last) last = q->use[at[i]].of[kind];
    for (i = begin; i < n; i++) {
      int use = q->use[at[i]].of[kind];
      rises += i > begin && use > most;
      most = kind >= PRIVATE && use < most ? most : use;
    }
    /* a first use of something: of memory one rise of a few measures shows nothing */
    if (last - first < least || 4 * rises < n - begin || (kind >= PRIVATE && rises < 2)) continue;
    snprintf(text, size, "rank %d: %d %s up to measure %d, %d at %d", q->rank, first, names[kind],
             at[begin + some - 1], last, at[n - 1]);
    return true;
  }
  return false;
}

/* What is wrong with a process that has ended; text is "" if nothing is. */
static bool judge(const process *q, int status, char *text, size_t size) {
  bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  text[0] = 0;
  describe_process(text, size, q, status);
  if (q->state == DYING) return killed;
  if (status != 0 || q->wrong > 0) return false;
  if (q->result != CDDP_OK) return excused(q) && q->text[0] != 0;
  if (q->event >= 0 && shared->p.e[q->event].kind == REFUSED) return false;
  return !grows(q, text, size);
}

typedef struct verdict {
  bool failed;
  char text[900];
} verdict;

static void fail(verdict *v, const char *text) {
  if (!v->failed) snprintf(v->text, sizeof v->text, "%s", text);
  v->failed = true;
}

typedef struct stopwatch {
  double at, waited, used; /* waited: for a processor; all in seconds */
  int progress;
} stopwatch;

/* Seconds for which the threads of a process have waited for a processor. */
static double waited_for_processor(pid_t pid) {
  char path[300];
  unsigned long long waited, sum = 0;
  struct dirent *e;
  DIR *d;
  snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
  d = opendir(path);
  while (d != NULL && (e = readdir(d)) != NULL) {
    FILE *f;
    snprintf(path, sizeof path, "/proc/%d/task/%.200s/schedstat", (int)pid, e->d_name);
    if ((f = fopen(path, "r")) == NULL) continue;
    if (fscanf(f, "%*u %llu", &waited) == 1) sum += waited;
    fclose(f);
  }
  if (d != NULL) closedir(d);
  return (double)sum * 1e-9;
}

/* Whether a program hangs: its ranks begin no step, and none begins or ends. On a busy machine its
   clock is slow, down to a tenth: the time in which its threads wait for a processor does not
   count. pid: a process without a rank, or -1. */
static bool overdue(stopwatch *s, pid_t pid) {
  double now = test_now(), passed = now - s->at, waited;
  int progress = LOAD(shared->reached), i;
  if (passed < 0.25) return false;
  waited = waited_for_processor(pid);
  for (i = 0; i < shared->process_count && i < PROCESSES; i++) {
    waited += waited_for_processor(shared->processes[i].pid);
    progress += 1000 * LOAD(shared->processes[i].state);
  }
  if (progress != s->progress) s->used = 0;
  s->progress = progress;
  if (s->at > 0) s->used += fmax(passed - fmax(waited - s->waited, 0), passed / 10);
  s->at = now;
  s->waited = waited;
  return s->used > LIMIT_S * ranks_slack();
}

/* Waits for a process that all ranks live in, or descend from; kills it if it hangs. */
static int await_process(pid_t pid) {
  stopwatch s;
  int status = -1;
  memset(&s, 0, sizeof s);
  while (waitpid(pid, &status, WNOHANG) != pid) {
    if (overdue(&s, pid)) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return -1;
    }
    ranks_sleep(1e-3);
  }
  return status;
}

/* Waits for all processes, with the events that come from outside. */
static bool await_processes(watch *w) {
  stopwatch s;
  double now;
  int i, left = 1;
  memset(&s, 0, sizeof s);
  while (left > 0 && !overdue(&s, -1)) {
    now = test_now();
    act(w, now);
    for (i = left = 0; i < shared->process_count; i++) {
      process *q = &shared->processes[i];
      if (!w->ended[i] && waitpid(q->pid, &w->status[i], WNOHANG) == q->pid) w->ended[i] = true;
      if (q->joins && !w->settled[i] && (w->ended[i] || LOAD(q->state) != STARTING)) {
        w->settled[i] = true;
        ADD(shared->joins_left, -1);
      }
      if (w->ended[i] && w->stopped == q->pid) w->stopped = 0;
      left += !w->ended[i];
    }
    if (left > 0) ranks_sleep(2e-4);
  }
  return left == 0;
}

static void end_processes(watch *w) {
  int i;
  for (i = 0; i < shared->process_count; i++) {
    if (w->ended[i]) continue;
    kill(shared->processes[i].pid, SIGKILL);
    waitpid(shared->processes[i].pid, &w->status[i], 0);
  }
}

static void judge_phase(watch *w, bool hung, verdict *v) {
  char text[900];
  int i, finished = 0, able = 0;
  for (i = 0; i < shared->process_count; i++) {
    const process *q = &shared->processes[i];
    bool good = judge(q, w->status[i], text, sizeof text);
    if (verbose) fprintf(stderr, "    %s\n", text);
    if (hung && !w->ended[i]) fail(v, text);
    else if (!hung && !good) fail(v, text);
    finished += q->state == ENDED && q->result == CDDP_OK;
    ADD(totals->deaths, q->state == DYING);
    ADD(totals->joined, q->joins && q->state == ENDED && q->result == CDDP_OK);
    ADD(totals->refused, q->joins && q->state == ENDED && q->result != CDDP_OK);
    able += !q->joins && !is_victim(q) && !q->no_memory;
  }
  if (!hung && finished == 0 && able > 0 && !v->failed &&
      (shared->p.elastic || events_of(&shared->p, NOTHING) == EVENTS) && !shared->struck)
    fail(v, "no rank has finished");
}

static void run_threads(watch *w, int n, verdict *v) {
  pid_t pid;
  int i, status;
  for (i = 0; i < n; i++) (void)start(i, -1);
  pid = ranks_fork(threads_life, n, NULL);
  status = await_process(pid);
  for (i = 0; i < n; i++) {
    w->status[i] = 0;
    shared->processes[i].state = ENDED;
  }
  if (status != 0) fail(v, status == -1 ? "HANGS (threads)" : "the process of the threads failed");
}

static bool died_early(void) {
  int i;
  for (i = 0; i < EVENTS && (shared->p.e[i].kind != KILL_EARLY || !shared->done[i]);) i++;
  return i < EVENTS;
}

static void run_supervised(watch *w, int n, verdict *v) {
  char text[900];
  int i, status = await_process(ranks_fork(supervisor_life, n, NULL));
  no_more_than(&shared->process_count, PROCESSES);
  if (status != 0) {
    snprintf(text, sizeof text, "cddp_spawn_elastic%s: %s", status == -1 ? " HANGS" : "",
             shared->text);
    fail(v, text);
  }
  for (i = 0; i < shared->process_count; i++) {
    process *q = &shared->processes[i];
    w->status[i] = q->state == DYING ? SIGKILL : 0;
    /* Before there was a model, a death ends them all. */
    if (died_early() && q->begin == 0 && q->steps == 0 && q->wrong == 0 && q->result != CDDP_OK)
      q->state = DYING, w->status[i] = SIGKILL;
    if (died_early() && q->state == STARTING) q->state = DYING, w->status[i] = SIGKILL;
  }
}

static void run_phase(const program *p, int phase, verdict *v) {
  int n = phase == 0 ? p->ranks : p->restart_ranks, i;
  bool hung = false;
  watch w;
  memset(&w, 0, sizeof w);
  w.churner = -1;
  shared->phase = phase;
  shared->created = shared->alive = shared->process_count = 0;
  shared->joins_left = joins_of(p);
  set_due();
  if (p->supervised) {
    shared->joins_left = 0;
    run_supervised(&w, n, v);
  } else if (p->threads) {
    run_threads(&w, n, v);
  } else {
    shared->port = ranks_free_port();
    shared->other_port = p->again ? ranks_free_port() : 0;
    for (i = 0; i < n; i++) (void)start(i, -1);
    hung = !await_processes(&w);
    end_processes(&w);
  }
  judge_phase(&w, hung, v);
  if (hung && v->failed && strncmp(v->text, "HANGS", 5) != 0) {
    char text[900];
    snprintf(text, sizeof text, "HANGS: %.800s", v->text);
    snprintf(v->text, sizeof v->text, "%s", text);
  }
}

static verdict run_program(const program *p) {
  verdict v;
  const char *tmp = getenv("TMPDIR");
  int fds = ranks_open_fds();
  memset(&v, 0, sizeof v);
  memset(shared, 0, offsetof(shared_state, want));
  shared->p = *p;
  snprintf(shared->path, sizeof shared->path, "%s/programs-%d.safetensors",
           tmp != NULL ? tmp : "/tmp", (int)getpid());
  reference(p);
  run_phase(p, 0, &v);
  if (p->restart > 0 && !v.failed && !p->again) run_phase(p, 1, &v);
  unlink(shared->path);
  if (shared->odd_bucket) fail(&v, "a bucket has other parameters than those with gradients");
  ADD(totals->faults, shared->struck);
  if (!ranks_no_children()) fail(&v, "a process is left");
  if (ranks_open_fds() != fds) fail(&v, "the judge has descriptors left");
  return v;
}

/* --- a failure: the smallest program that fails too --- */

static void print_program(const program *p) {
  static const char *const dtypes[] = {"f32", "f64", "f16", "bf16"};
  static const char *const memories[] = {"malloc", "cddp_alloc"};
  static const char *const grads[] = {"NULL", "malloc", "cddp_alloc"};
  static const char *const finishes[] = {"cddp_ddp_step", "cddp_ddp_wait, update",
                                         "cddp_ddp_step and cddp_ddp_wait by turns",
                                         "cddp_ddp_reduce_scatter, update, cddp_ddp_all_gather"};
  static const char *const places[] = {"before its first shard", "after its first cddp_ddp_ready",
                                       "before the step's last call", "after the step"};
  static const char *const misfits[] = {"the RANK of a living one", "another count",
                                        "another optimizer", "another secret"};
  static const char *const renewals[] = {"", "a new optimizer", "a new model", "two by turns",
                                         "a second optimizer that does not step"};
  static const char *const mishaps[] = {"", "is ready twice", "is not ready", "lacks memory",
                                        "fails, then lacks memory", "lacks memory for cddp_save"};
  static const char *const agains[] = {"new processes", "the same ones", "at another port",
                                       "beside the first", "beside the first, by mpirun"};
  static const char *const partials[] = {"all of it", "but the last parameter", "but the states",
                                         "but one state"};
  static const char *const leaves[] = {"", "groups are left behind", "a thread returns",
                                       "a thread fails", "a thread exits"};
  static const char *const seconds[] = {"", "before it", "after it", "on cddp_ddp_group"};
  int k;
  printf("    %d ranks as %s%s%s%s\n", p->ranks,
         p->supervised ? "processes of cddp_spawn_elastic"
         : p->threads  ? "threads"
                       : "processes",
         p->hosts > 0 ? ", CDDP_HOST_ID " : "", p->hosts > 0 ? host_plans[p->hosts] : "",
         p->secret ? ", CDDP_SECRET" : "");
  for (k = 0; k < p->count; k++)
    printf("    parameter %d: %d %s, data %s, grad %s%s\n", k, p->p[k].count,
           dtypes[p->p[k].dtype], memories[p->p[k].memory], grads[p->p[k].grad],
           has_rows(p, k) ? ", sparse rows" : "");
  printf("    cddp_ddp_create: shards %d%s%s%s%s%s\n", p->shards, p->elastic ? ", elastic" : "",
         p->hook ? ", comm_hook" : "", p->unused ? ", find_unused_parameters" : "",
         p->buckets ? ", small buckets" : "", p->clip ? ", clips" : "");
  if (p->gpu)
    printf("    GPUs%s, backend %s, stream %d%s\n", p->share ? " that ranks share" : "",
           p->gpu == NCCL ? "nccl" : "cpu", p->stream, p->graph ? ", a CUDA graph" : "");
  if (p->illegal) printf("    refused by all: %s\n", illegal[p->illegal].name);
  if (p->buffers) printf("    buffers\n");
  if (p->uneven > 0)
    printf("    ranks from %d on call cddp_ddp_join after %d steps\n", p->ranks / 2, p->uneven);
  printf("    %s momentum %d%s%s%s%s%s%s%s%s%s\n",
         p->optim == SGD ? "cddp_sgd_create" : p->optim == ADAMW ? "cddp_adamw_create" : "own SGD",
         p->momentum, p->nesterov ? ", nesterov" : "", p->decay ? ", weight_decay" : "",
         p->amsgrad ? ", amsgrad" : "", p->maximize ? ", maximize" : "",
         p->masters ? ", master_weights" : "", p->copies ? ", copies" : "",
         p->groups ? ", groups" : "", p->sharded ? ", sharded_states" : "",
         p->apart ? ", without ddp" : "");
  printf("    %d steps: %s%s%s", p->steps, p->looped ? "cddp_ddp_next_shard, " : "",
         p->micro > 1 ? "no_sync, " : "", finishes[p->finish]);
  printf(p->between > 0 ? "; other calls of kind %d between steps\n" : "\n", p->between);
  for (k = 0; k < EVENTS; k++) {
    const event *e = &p->e[k];
    if (e->kind == KILL_AT_POINT) printf("    a rank dies at a point, %d later\n", e->arg);
    if (e->kind == KILL_AT_STEP)
      printf("    rank %d dies in step %d, %s\n", e->rank, e->step, places[e->arg % 4]);
    if (e->kind == KILL_EARLY)
      printf("    rank %d dies before %s\n", e->rank,
             e->arg == 0 ? "cddp_init" : "cddp_ddp_create");
    if (e->kind == KILL_OUTSIDE) printf("    rank %d is killed in step %d\n", e->rank, e->step);
    if (e->kind == STOP)
      printf("    rank %d is stopped in step %d for %d ms\n", e->rank, e->step, e->arg);
    if (e->kind == JOIN)
      printf("    a process joins in step %d as rank %d%s\n", e->step, e->rank,
             e->arg > 0 ? ", and dies at a point" : "");
    if (e->kind == REFUSED)
      printf("    a process with %s is refused in step %d\n", misfits[e->arg % 4], e->step);
  }
  if (p->renewal) printf("    %s, step %d\n", renewals[p->renewal], p->at);
  if (p->mishap > 0)
    printf("    rank %d alone %s, at step %d (call %d of %s)\n", p->mishap_rank,
           mishaps[p->mishap], p->at, p->mishap_nth, call_names[p->mishap_call % CALL_NAMES]);
  if (p->second) printf("    a second model %s\n", seconds[p->second]);
  if (p->churn > 0) printf("    the last rank is killed and replaced %d times\n", p->churn);
  if (p->restart > 0)
    printf("    saved after step %d, loaded by %d ranks, %s, %s; %d samples\n", p->restart,
           p->restart_ranks, agains[p->again], partials[p->partial], p->data);
  if (p->leave > 0) printf("    %s\n", leaves[p->leave]);
  if (p->stands > 0) printf("    a receive without a message\n");
  if (p->fault > 0)
    printf("    call %d of %s %s in rank %d\n", p->fault_nth, call_names[p->fault % CALL_NAMES],
           p->fault_delay > 0 ? "is late" : "fails", p->fault_rank);
}

static void print_again(const program *p) {
  program first = draw(p->seed), now = *p;
  int i;
  const char *separator = " --set ";
  printf("    again: %sprograms --seed %" PRIu64, PROGRAMS_GPU ? "nccl_" : "", p->seed);
  for (i = 0; i < FIELD_COUNT; i++)
    if (*field_of(&first, &fields[i]) != *field_of(&now, &fields[i])) {
      printf("%s%s=%d", separator, fields[i].name, *field_of(&now, &fields[i]));
      separator = ",";
    }
  printf("\n");
}

static bool still_fails(program *p, verdict *v) {
  int tries;
  settle(p);
  for (tries = 0; tries < 2; tries++) {
    verdict now = run_program(p);
    if (now.failed) return *v = now, true;
  }
  return false;
}

/* Each field as small as the failure allows, for a minute. */
static void reduce(program *p, verdict *v) {
  double until = test_now() + 60;
  bool changed = true;
  int i, way;
  while (changed) {
    changed = false;
    for (i = 0; i < FIELD_COUNT; i++)
      for (way = 0; way < 3; way++) {
        program smaller = *p;
        int *value = field_of(&smaller, &fields[i]), old = *value;
        if (old <= fields[i].least || test_now() > until) break;
        *value = way == 0   ? fields[i].least
                 : way == 1 ? (old + fields[i].least) / 2
                            : old - 1;
        settle(&smaller);
        if (memcmp(&smaller, p, sizeof smaller) == 0 || !still_fails(&smaller, v)) continue;
        *p = smaller;
        changed = true;
        break;
      }
  }
}

/* --- the command line --- */

static struct {
  uint64_t seed, count;
  double seconds;
  int hosts, jobs, reduce, sweep;
  const char *set;
} options;

static bool set_fields(program *p, const char *text) {
  char name[32];
  int value, n, i;
  while (text != NULL && sscanf(text, "%31[^=]=%d%n", name, &value, &n) == 2) {
    for (i = 0; i < FIELD_COUNT && strcmp(fields[i].name, name) != 0;) i++;
    if (i == FIELD_COUNT) return fprintf(stderr, "no field %s\n", name), false;
    *field_of(p, &fields[i]) = value;
    text += n;
    text += *text == ',';
  }
  settle(p);
  return true;
}

static bool run_one(program p) {
  uint64_t seed = p.seed;
  verdict v;
  if (verbose) print_program(&p);
  v = run_program(&p);
  ADD(totals->failed, v.failed);
  ADD(totals->programs, 1);
  if (!v.failed) return true;
  printf("seed %" PRIu64 " FAILS: %s\n", seed, v.text);
  if (options.reduce) {
    bool loud = verbose;
    verbose = false;
    fflush(stdout);
    reduce(&p, &v);
    verbose = loud;
    printf("  seed %" PRIu64 " reduced: %s\n", seed, v.text);
  }
  print_program(&p);
  print_again(&p);
  fflush(stdout);
  return false;
}

static void run_seed(uint64_t seed) {
  program p = draw(seed);
  if (options.hosts == 0) p.hosts = 0;
  if (options.hosts == 1 && p.hosts == 0) p.hosts = 1 + (int)(seed % (HOST_PLANS - 1));
  settle(&p);
  if (!set_fields(&p, options.set)) exit(2);
  (void)run_one(p);
}

/* A rank dies at a point that any rank reaches: the first, the one `sweep` later, and so on. After
   every second death a process takes its place. */
static void sweep(const char *set) {
  int n, failed = 0;
  for (n = 1; failed < 3; n += options.sweep) {
    program p;
    memset(&p, 0, sizeof p);
    p.seed = 6;
    p.elastic = p.buffers = p.count = p.width = p.restart_ranks = p.fault_nth = 1;
    p.ranks = p.steps = 3;
    p.p[0].count = p.p[1].count = 300;
    p.p[0].memory = SHARED;
    p.e[0].kind = KILL_AT_POINT;
    p.e[0].arg = n;
    p.e[1].kind = n / options.sweep % 2 ? JOIN : NOTHING;
    if (!set_fields(&p, set)) exit(2);
    failed += !run_one(p);
    if (!LOAD(shared->done[0])) break;
  }
  printf("%d points: %s\n", n, set);
  if (n < 50) ADD(totals->failed, 1);
}

/* All kinds of steps; few frames between hosts, so that each rank dies between any two of them; a
   norm that clips nothing, so that an update reads the parts of the mean in all ranks' memory. */
static void run_sweeps(void) {
  sweep("shards=4,params=2,optim=1,rows=0,finish=2");
  sweep("shards=4,params=2,dtype0=2,rows=40,momentum=1,finish=2");
  sweep("hosts=3,shards=3,steps=2,between=1");
  sweep("ranks=2,shards=2,steps=2,clip=2,momentum=1");
  sweep("ranks=2,shards=2,steps=2,clip=2,optim=1");
}

/* Runs seeds job, job + jobs, ... */
static int run_seeds(int job, void *arg) {
  double until = test_now() + options.seconds;
  uint64_t i;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  shared = (shared_state *)ranks_shared(sizeof *shared);
  (void)ranks_free_port(); /* its descriptor stays */
  for (i = (uint64_t)job; i < options.count && test_now() < until; i += (uint64_t)options.jobs)
    run_seed(options.seed + i);
  if (job == 0 && options.sweep > 0) run_sweeps();
  return 0;
}

static bool parse(int argc, char **argv) {
  bool timed = false, alone = false;
  int i;
  options.seed = 1;
  options.count = UINT64_MAX;
  options.seconds = PROGRAMS_GPU ? 20 : 60;
  options.hosts = -1;
  options.jobs = options.reduce = 1;
  options.sweep = argc > 1 || PROGRAMS_GPU ? 0 : RANKS_SLOW ? 29 : 7;
  for (i = 1; i + 1 < argc; i += 2) {
    const char *value = argv[i + 1];
    if (strcmp(argv[i], "--seed") == 0) {
      options.seed = strtoull(value, NULL, 10);
      alone = true;
    } else if (strcmp(argv[i], "--count") == 0) options.count = strtoull(value, NULL, 10);
    else if (strcmp(argv[i], "--seconds") == 0) options.seconds = atof(value);
    else if (strcmp(argv[i], "--hosts") == 0) options.hosts = atoi(value);
    else if (strcmp(argv[i], "--jobs") == 0) options.jobs = atoi(value);
    else if (strcmp(argv[i], "--reduce") == 0) options.reduce = atoi(value);
    else if (strcmp(argv[i], "--sweep") == 0) options.sweep = atoi(value), options.count = 0;
    else if (strcmp(argv[i], "--set") == 0) options.set = value;
    else return false;
  }
  for (i = 1; i < argc; i++) timed = timed || strcmp(argv[i], "--seconds") == 0;
  if (alone && !timed && options.count == UINT64_MAX) options.count = 1;
  if (!timed && options.count != UINT64_MAX) options.seconds = 1e9;
  return argc % 2 == 1 && options.jobs >= 1;
}

int main(int argc, char **argv) {
  int i, status;
  if (!parse(argc, argv)) {
    fprintf(stderr, "programs [--seed N] [--count N] [--seconds S] [--hosts 0|1] [--jobs N]\n");
    return 2;
  }
  verbose = options.count == 1;
  totals = ranks_shared(sizeof *totals);
  inside_at_point = at_point;
  inside_unanswered_s = DEADLINE_S;
  make_noise();
  if (options.jobs == 1) (void)run_seeds(0, NULL);
  for (i = 0; i < options.jobs && options.jobs > 1; i++) (void)ranks_fork(run_seeds, i, NULL);
  while (options.jobs > 1 && wait(&status) > 0)
    if (status != 0) ADD(totals->failed, 1);
  printf("%d ranks died, %d joined, %d were refused; %d faults\n", totals->deaths, totals->joined,
         totals->refused, totals->faults);
  if (totals->programs >= 300 && (totals->deaths == 0 || totals->joined == 0)) totals->failed++;
  printf("%d programs, %d failed\n", totals->programs, totals->failed);
  return totals->failed > 0;
}
