/* inside.h - what tests set in cddp.h, and ask of it, that no public call does. tests/inside.c has
   it. Included after cddp.h. A test that can do without is better off: these names change with
   cddp.h. */
#ifndef INSIDE_H
#define INSIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Set before cddp_init. */
extern void (*inside_at_point)(const char *name); /* called at each CDDP__POINT; NULL: nothing */
extern double inside_unanswered_s;                /* CDDP__UNANSWERED_S: 20 */

/* Whether this process knows that the rank has left the group or died. */
bool inside_rank_gone(cddp_group *g, int rank);
/* The group's error, without a call of the group. */
cddp_result inside_check_group(cddp_group *g);
/* This rank of an elastic model becomes one that the others count as lost, although it lives. */
void inside_become_lost(cddp_ddp *ddp);
/* An optimizer of an algorithm that cddp.h does not have, as one that is added later. */
cddp_result inside_third_create(cddp_optim **out, cddp_param *params, int count, double lr,
                                cddp_ddp *ddp);
/* The momentum of an f32 parameter. */
float *inside_state(cddp_optim *optim, int param);
/* A joining process's copy of the address table: the process forgets the process that leads its
   host, and must ask for the table again; the rank and the pid in its own entry. */
void inside_forget_life(cddp_group *g);
int inside_table_rank(cddp_group *g);
int inside_table_pid(cddp_group *g);

/* Sizes in bytes at which cddp.h chooses another way, in no order. */
extern const size_t inside_thresholds[];
extern const int inside_threshold_count;

/* Room >>plan. */
void inside_slice(size_t n, size_t granule, int parts, int part, size_t *begin, size_t *end);
int inside_plan_buckets(int *offsets, int *sorted, const cddp_param *params, int count,
                        const int *order, const size_t *limits, int limit_count);

#ifdef CDDP_CUDA
extern double inside_await_end_s;      /* CDDP__AWAIT_END_S: 2 */
extern int inside_comm_min_ranks; /* CDDP__COMM_MIN_RANKS: 2 */
extern size_t inside_file_staging, inside_warm_up,
    inside_shard_chunk; /* bytes, as cddp.h has them */
extern int (*inside_nanosleep)(const struct timespec *t, struct timespec *left); /* cddp's */

/* The deadline of operations that begin from here on; cddp_init and cddp_destroy keep theirs. */
void inside_set_timeout(cddp_group *g, double seconds);
/* The kernels of cddp_kernels.cuh. */
const struct cddp_kernels *inside_kernels(void);
/* One look at the device by a thread that has waited since `start`: it may yield or sleep. */
cddp_result inside_poll(cddp_group *g, double start);
/* Makes the oldest operation that no look has found at its end ten deadlines older; false: none. */
bool inside_age_operation(cddp_group *g);
bool inside_busy(cddp_group *g); /* operations are under way */
/* As a thread inside NCCL: until inside_leave_nccl no other thread calls NCCL for the group. */
void inside_enter_nccl(cddp_group *g);
void inside_leave_nccl(cddp_group *g);
extern const double inside_calls_s; /* CDDP__CALLS_S: an abort waits that long for such threads */
/* Waits for all ranks, without NCCL. */
void inside_meet(cddp_group *g);
/* Ends the group with CDDP_ABORTED and that error text. */
void inside_break(cddp_group *g, const char *text);
#endif

#endif
