/* What tests/gpu/nccl_*.c set and ask that no public call of cddp.h sets or tells. nccl_cddp.c has
   it. */
#ifndef NCCL_CDDP_H
#define NCCL_CDDP_H

/* Set them before the rank's cddp_init. */
extern double nccl_left_s;                      /* CDDP__GRACE_LEFT_S: 2 */
extern int nccl_comm_min_ranks;                 /* CDDP__COMM_MIN_RANKS: 2 */
extern void (*nccl_at_point)(const char *name); /* called at each CDDP__POINT; NULL: nothing */
extern int (*nccl_nanosleep)(const struct timespec *t,
                             struct timespec *left); /* cddp's nanosleep */

/* The deadline of operations that begin from here on; cddp_init and cddp_destroy keep theirs. */
void nccl_set_timeout(cddp_group *g, double seconds);
/* Whether this process knows that the rank has left the group or died. */
bool nccl_rank_gone(cddp_group *g, int rank);
/* The group's error, without a call of the group. */
cddp_result nccl_check_group(cddp_group *g);
/* The kernels of cddp_kernels.cuh. */
const cddp_kernels *nccl_kernels(void);

/* One look at the device by a thread that has waited since `start`: it may yield or sleep. */
cddp_result nccl_poll(cddp_group *g, double start);
/* Makes the oldest operation that no look has found at its end ten deadlines older; false: there is
   none. */
bool nccl_age_operation(cddp_group *g);
bool nccl_busy(cddp_group *g); /* operations are under way */

/* As a thread inside NCCL: until nccl_leave no other thread calls NCCL for the group. */
void nccl_enter(cddp_group *g);
void nccl_leave(cddp_group *g);
/* Waits for all ranks, without NCCL. */
void nccl_meet(cddp_group *g);
/* Ends the group with CDDP_ABORTED and that error text. */
void nccl_break(cddp_group *g, const char *text);
extern const double
    nccl_calls_s; /* CDDP__CALLS_S: an abort waits that long for threads inside NCCL */

#endif
