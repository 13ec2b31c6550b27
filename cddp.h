/* cddp.h - v0.2 - DistributedDataParallel for C, C++ and CUDA programs
   Public domain or MIT, at your choice (end of file). No warranty; use at your own risk.

   Do this in ONE C or C++ file, before its other includes, and link -lpthread -lm:

       #define CDDP_IMPLEMENTATION
       #include "cddp.h"

   Every other file just includes "cddp.h". Your own training loop becomes data parallel by six
   calls:

       #define TRY(call) if (call) return fprintf(stderr, "%s\n", cddp_error()), 1
       static int train(int rank, void *arg) {
         cddp_group *g; cddp_ddp *ddp; cddp_sgd *sgd; cddp_sgd_desc o = {0};
         TRY(cddp_init(&g, NULL));                      // 1  finds the other ranks
         float *w = cddp_alloc(g, N * sizeof *w);       //    malloc'ed weights work too
         init_weights(w, 42);                           //    rank 0's values win anyway
         cddp_param p[] = {{"w", w, NULL, N, CDDP_F32}}; //   grad NULL: pointed into a bucket
         TRY(cddp_ddp_create(&ddp, g, p, 1, NULL));     // 2  same weights everywhere
         o.lr = 0.1, o.momentum = 0.9;
         TRY(cddp_sgd_create(&sgd, p, 1, &o));          // 3
         for (int step = 0; step < STEPS; step++) {
           backward(w, p[0].grad, my_batch(rank, step)); //   adds to the gradient
           TRY(cddp_ddp_ready(ddp, 0));                 // 4  its bucket may start reducing
           TRY(cddp_ddp_step(ddp, sgd));                // 5  mean over ranks, SGD, zero gradients
         }
         cddp_sgd_destroy(sgd); cddp_ddp_destroy(ddp); cddp_free(g, w); cddp_destroy(g);   // 6
         return 0;
       }
       int main(void) { TRY(cddp_spawn(train, NULL, 2)); return 0; }

   cddp_spawn forks two ranks. Started by torchrun or a script of yours instead, call train()
   directly: cddp_init(&g, NULL) reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. All ranks end
   with the same weights, bit for bit. Seeding is yours: give each rank its own seed for dropout and
   augmentation (say seed + rank), and all ranks the same seed for weights and for cddp_sampler.

   A call that fails returns a cddp_result other than CDDP_OK (0); cddp_error() then says in one
   sentence what failed, with which rank, address or variable, and the cure. cddp never prints,
   exits, aborts or installs a signal handler.

   Compile options, defined before the implementation:
     CDDP_STATIC   all public functions become static: a private copy for this file
     CDDP_ASSERT   your assert macro for internal invariants; default: nothing
     CDDP_CUDA     device "cuda" (see GPUS): needs cuda_runtime.h and nccl.h (2.18 or later), no
                   nvcc; link -lnccl -lcudart too
     CDDP_MPI      backend "mpi": large collectives go to the MPI that mpicc compiles for
   Needs Linux 5.3 or later with gcc or clang, C11 or C++17 (as CUDA too); links libc and threads
   only. -ffast-math suits your code; in this file it costs exact NaN, subnormal and PyTorch bits.
   Environment: RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT, as torchrun
   sets them; CDDP_TIMEOUT_S (seconds), CDDP_SECRET (all ranks must have the same), CDDP_RECORD (a
   directory for the flight recorder), CDDP_IFNAME (the network interface by which other hosts reach
   this one), CDDP_BACKEND (cpu or mpi), and CDDP_STORE_PROTO (old or new: the dialect of a TCPStore
   server that is not ours).

   CONTENTS: search for the mark
     >>api          the public interface, with the rules of each call
     >>design       how it works: memory, steps, the canonical sum, threads, failure
     >>config       limits and tunables             >>structs      private structs and their owners
     >>logging      error texts                     >>memory       allocator, checked sizes
     >>clock        deadlines                       >>threads      atomics, futex, thread start
     >>record       the flight recorder             >>bytes        little-endian, hashes, HMAC
     >>sockets      addresses, non-blocking I/O     >>frames       c10d TCPStore encoding
     >>store        key-value store: TCP and file   >>discovery    rank and address
     >>arena        memory shared by a host's ranks >>reduce       sums in canonical order (pure)
     >>plan         slices and buckets (pure)       >>local        steps in shared memory
     >>links        connections between hosts       >>rendezvous   how ranks and hosts meet
     >>p2p          send and recv                   >>hosts        steps, collectives across hosts
     >>mpi          collectives by MPI              >>work         asynchronous operations
     >>collectives  all_reduce and the others       >>groups       creation, split, destruction
     >>sparse       gradients that are rows (pure)  >>sgd          the optimizer's arithmetic
     >>buckets      distributed data parallel       >>join         uneven inputs
     >>cuda         devices, streams, the watcher   >>nccl         communicators and operations
     >>staging      device memory without NCCL      >>gpus         data parallel on devices
     >>sampler      DistributedSampler              >>safetensors  a file's header (pure)
     >>checkpoint   save and load                   >>spawn        processes and threads as ranks
     >>launch       programs as ranks               >>validate     argument checks
     >>public       the public functions            >>history      changes
     >>license      the terms
*/

#if defined(CDDP_IMPLEMENTATION) && !defined(CDDP_IMPLEMENTATION_DONE) /* what it needs of libc */
#if !defined(__linux__)
#error "cddp.h: this version runs on Linux only (it needs memfd, futex and pidfd)"
#endif
#if defined(_FEATURES_H) && !defined(__USE_MISC)
#error "cddp.h: include the implementation before any system header, or compile with -D_GNU_SOURCE"
#endif
#if !defined(_GNU_SOURCE) && !defined(_FEATURES_H)
#define _GNU_SOURCE
#endif
#endif

#ifndef CDDP_H
#define CDDP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef CDDP_MPI /* the switch; also the name of a result */
#undef CDDP_MPI
#define CDDP_MPI CDDP_MPI
#endif
#ifdef CDDP_CUDA /* the switch; also the name of a result */
#undef CDDP_CUDA
#define CDDP_CUDA CDDP_CUDA
#endif

#define CDDP_VERSION 200 /* major * 10000 + minor * 100 + patch */

#ifdef CDDP_STATIC
#define CDDPDEF static
#else
#define CDDPDEF extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>api -------------------------------------------------------------------------------------------

   RESULTS. Every fallible function returns one of these. 0 is success. */
#define CDDP__RESULTS(X)                                                                           \
  X(CDDP_OK, "success")                                                                            \
  X(CDDP_INVALID_ARGUMENT, "invalid argument")     /* the caller's mistake; nothing was done */    \
  X(CDDP_OUT_OF_MEMORY, "out of memory")           /* malloc, mmap or shared memory */             \
  X(CDDP_SYSTEM, "system call failed")             /* the text names the call and errno */         \
  X(CDDP_NETWORK, "network error")                 /* resolve, bind, connect; connection lost */   \
  X(CDDP_TIMEOUT, "timed out")                     /* the text names who is late, and in what */   \
  X(CDDP_PEER_LOST, "peer lost")                   /* a rank died or left; the text names it */    \
  X(CDDP_MISMATCH, "ranks disagree")               /* other operation, count, dtype, op, root */   \
  X(CDDP_UNAUTHORIZED, "unauthorized")             /* wrong or missing secret */                   \
  X(CDDP_ABORTED, "aborted")                       /* shut down under the operation */             \
  X(CDDP_UNSUPPORTED, "unsupported")               /* not in this build, or not on this machine */ \
  X(CDDP_CUDA, "CUDA error")                                                                       \
  X(CDDP_NCCL, "NCCL error")                                                                       \
  X(CDDP_MPI, "MPI error")                                                                         \
  X(CDDP_IO, "file error")

typedef enum cddp_result {
#define CDDP__ENUM(name, text) name,
  CDDP__RESULTS(CDDP__ENUM)
#undef CDDP__ENUM
  CDDP__RESULT_COUNT
} cddp_result;

/* The result's name, "CDDP_TIMEOUT" for CDDP_TIMEOUT. Never NULL. */
CDDPDEF const char *cddp_result_name(cddp_result r);
/* The result in words, "timed out" for CDDP_TIMEOUT. Never NULL. */
CDDPDEF const char *cddp_result_text(cddp_result r);

/* One sentence about this thread's last failure: operation, rank, peer, address, errno, cure. Never
   NULL; "" before the first failure. Valid until this thread's next failing call. */
CDDPDEF const char *cddp_error(void);

/* Element types. f16 is IEEE binary16, bf16 the upper half of an f32; both are summed in f32 and
   rounded once. */
typedef enum cddp_dtype {
  CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16, CDDP_I8, CDDP_U8, CDDP_I32, CDDP_I64
} cddp_dtype;

/* Reductions. AVG is the sum divided by the world size (integers: truncated towards zero). Integer
   sums and products wrap around. MIN and MAX give NaN when any input is NaN, as PyTorch's do. */
typedef enum cddp_op { CDDP_SUM, CDDP_AVG, CDDP_PROD, CDDP_MIN, CDDP_MAX } cddp_op;

CDDPDEF size_t cddp_dtype_size(cddp_dtype dtype); /* bytes of an element; 0 if it is no dtype */

typedef struct cddp_group cddp_group; /* torch.distributed.ProcessGroup, MPI_Comm */
typedef struct cddp_work cddp_work;   /* an operation in flight: distributed.Work */
typedef struct cddp_ddp cddp_ddp;     /* nn.parallel.DistributedDataParallel */
typedef struct cddp_sgd cddp_sgd;     /* torch.optim.SGD */
typedef struct cddp_store cddp_store; /* a key-value store: torch.distributed.Store */

/* GROUPS. -----------------------------------------------------------------------------------------
   THREADS: a group's collectives are called by one thread at a time, in the same order on every
   rank (other groups may be used at once by other threads; send and recv by any thread). After a
   failure that involves a peer the group is broken: each further call returns that failure at once,
   cddp_destroy never hangs, and a new group may be made. A group does not survive fork(). */

/* Memory and logging hooks. NULL functions mean malloc/free and silence. log gets one line without
   newline; level 0 = error, 1 = warning, 2 = info. Both may be called from any thread. */
typedef struct cddp_allocator {
  void *(*alloc)(size_t bytes, void *user_data); /* aligned for any type; NULL when there is none */
  void (*free)(void *p, void *user_data);
  void *user_data;
} cddp_allocator;

typedef struct cddp_logger {
  void (*log)(int level, const char *line, void *user_data);
  void *user_data;
} cddp_logger;

typedef struct cddp_group_desc {
  const char *init_method;  /* NULL = "env://"; "tcp://host:port", "unix://name", "file:///path" */
  const char *backend;      /* NULL = CDDP_BACKEND from the environment, else "nccl" if device is
                               cuda (see GPUS), else "cpu"; or "mpi" */
  const char *device;       /* NULL = "cpu"; "cuda" = cuda:LOCAL_RANK; "cuda:3" */
  int rank, world_size;     /* world_size 0 = discover both from the environment */
  double timeout_s;         /* for every wait; 0 = CDDP_TIMEOUT_S from the environment, else 600 */
  const char *secret;       /* NULL = CDDP_SECRET from the environment, else none */
  cddp_allocator allocator; /* for what cddp allocates for this group, shared memory excepted */
  cddp_logger logger;
} cddp_group_desc;

/* Finds the other ranks and forms the group. Blocks until all world_size ranks are there or
   timeout_s has passed; ranks may start in any order. desc NULL = all defaults. Like
   torch.distributed.init_process_group.
     env://          RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; none of them set = one rank alone.
                     Rank 0 listens on MASTER_ADDR:MASTER_PORT until all have met, no longer; on all
                     its host's addresses if that name means loopback there (Debian's 127.0.1.1).
                     The variables of srun and of mpirun (Open MPI, MPICH, Intel MPI) work too; on
                     one host their ranks meet without a port: see >>discovery.
     tcp://h:p       the same with this address; rank and world_size from desc (or the variables)
     unix://name     an abstract Unix socket of that name: one host, no port, no file
     file:///path    a file of this job's own; one left by a crashed job is recognised and reused
   Ranks may run on several hosts, any number on each: those of one share memory, between hosts
   they talk by TCP over the interface on the route to rank 0's, on ports that the system chooses;
   what passes there is not encrypted. CDDP_HOST_ID keeps ranks of one host apart, for tests. *out
   is NULL on failure. */
CDDPDEF cddp_result cddp_init(cddp_group **out, const cddp_group_desc *desc);

/* The rank that a launcher (torchrun, cddprun, srun, mpirun) gave this process, the one that
   cddp_init(&g, NULL) will find; -1 when none started it: time to cddp_spawn ranks. 0 when the
   launcher's variables are wrong, which cddp_init then explains. */
CDDPDEF int cddp_launcher_rank(void);

/* Collective over g: ranks that pass the same color (>= 0) form a group, ordered by (key, rank in
   g). A negative color takes part and gets *out = NULL. Like MPI_Comm_split. g must outlive the new
   group. */
CDDPDEF cddp_result cddp_group_split(cddp_group *g, int color, int key, cddp_group **out);

/* Collective over g: the listed ranks of g, in this order, form a group; every rank of g passes the
   same list. Ranks not listed get *out = NULL. Like torch.distributed.new_group. */
CDDPDEF cddp_result cddp_group_new(cddp_group *g, const int *ranks, int count, cddp_group **out);

/* Leaves the group and frees it; NULL is fine. Local and never blocks on a peer, but for at most a
   second in which messages sent to other hosts, or word of a rank's death, do not move: ranks still
   waiting for this one get CDDP_PEER_LOST. Asynchronous work must have been waited for. */
CDDPDEF void cddp_destroy(cddp_group *g);

CDDPDEF int cddp_rank(const cddp_group *g);             /* 0 .. world_size - 1; -1 for NULL */
CDDPDEF int cddp_world_size(const cddp_group *g);       /* number of ranks; -1 for NULL */
CDDPDEF int cddp_local_rank(const cddp_group *g);       /* among the group's ranks on this host */
CDDPDEF int cddp_local_world_size(const cddp_group *g); /* ranks of the group on this host */

/* Memory that the backend reduces without a copy: shared with the ranks of this host, on huge pages
   where the system allows, page-aligned, contents undefined. NULL when there is none (cddp_error
   says why). Local, any thread. Free it with the group it came from, after every operation on it
   has ended, and before that group is destroyed. Huge pages, which take their memory at once: by
   MADV_COLLAPSE (Linux 6.1); before that where
   /sys/kernel/mm/transparent_hugepage/shmem_enabled says advise. */
CDDPDEF void *cddp_alloc(cddp_group *g, size_t bytes);
CDDPDEF void cddp_free(cddp_group *g, void *p);

/* GPUS. -------------------------------------------------------------------------------------------
   With CDDP_CUDA and device "cuda" a rank has one GPU, which cddp's calls make the thread's current
   device. cddp_alloc gives device memory, parameters lie in device memory, and what is said here
   holds instead of what the other comments say of the CPU. In a build without CDDP_CUDA device
   "cuda" is CDDP_UNSUPPORTED.
     backend "nccl"   a GPU for each rank. Collectives, send and recv on device memory, and the data
                      parallel calls, are enqueued in stream order; the host waits for nothing
                      but, in cddp_ddp_wait and cddp_ddp_step, the other ranks' hosts.
     backend "cpu"    ranks may share a GPU: device memory goes through the host's. All calls return
                      when done; slower, and nothing can be captured in a CUDA graph. device "cuda"
                      is then cuda:(LOCAL_RANK modulo the number of GPUs).
   Either spans several hosts, by the address at which ranks meet and nothing else; NCCL_* variables
   are left to NCCL. Without LOCAL_RANK a rank's place among those of its host counts.
   STREAMS. A call with work NULL runs on the group's stream: cddp_set_stream, by default the legacy
   default stream. One with a work handle runs on a stream of cddp's that begins after what is on
   the group's stream now; cddp_wait(work) then makes the group's stream wait for it, not the host,
   and cddp_test asks whether it has ended on the device. Buffers are the operation's until the
   stream has passed it. cddp_barrier waits on the host for this group's stream, then for the ranks.
   cudaStreamPerThread is no stream for a group: NCCL enqueues in threads of its own.
   Host memory may be passed to collectives, send and recv all the same (all buffers of a call, on
   all ranks alike): the CPU backend does those, at once.
   SEND AND RECV on device memory match in the order of calls between two ranks; tags are not
   compared. Those with a work handle are sent together at the group's next call that is not
   another of them, or at their cddp_wait or cddp_test: an exchange posts all, then waits.
   ARITHMETIC is NCCL's: equal bits on all ranks, but not the canonical sum; AVG of floats adds what
   it has multiplied by 1/world_size; MIN and MAX may pass over a NaN.
   FAILURES. A thread watches NCCL's and the device's errors, the other ranks' processes, their
   order of calls and timeout_s (from an operation's enqueueing on; of an operation in a CUDA graph
   only cddp_synchronize and cddp_barrier do, from their beginning on). What it finds breaks the
   group on all ranks and aborts its communicator, so that streams, and a cudaStreamSynchronize on
   them, come to an end with undefined results; cddp_synchronize, cddp_wait and every later call
   return the failure. A cddp_ddp fails with its group, and takes it along. cddp_destroy waits for
   what is on the device, as long as the group is healthy, and with a process's last group up to two
   seconds for NCCL, which takes leave of the other ranks; a process that ends without it, while
   others have a graph with the group's operations, counts as lost.
   CUDA GRAPHS. A whole step can be captured after two eager ones like it (on a stream other than
   the default one); ranks are not compared while capturing, all must capture and launch alike. The
   learning rate is the captured one. Destroy graphs before the cddp_ddp and the group: until then
   NCCL keeps what they use. While there is one, go on with steps of its kind: what would move
   momentum (cddp_ddp_wait after cddp_ddp_step, cddp_load) is refused.
   ORDER. To NCCL all groups of a GPU are one queue: call the operations of all of them, ready() and
   the steps of a cddp_ddp included, from one thread at a time and in the same order on every rank.
   FORKING. CUDA does not survive a fork: cddp_spawn comes first. Where cddp_kernels.cuh is linked,
   cddp_sgd_create without a cddp_ddp, cddp_save and cddp_load use CUDA too: they ask it where
   parameters lie.
   STATE OF THIS. No part of it has run on a real GPU yet: it was tested on a test double of CUDA
   and NCCL, and compiled by nvcc 13.0 with NCCL 2.28. tests/gpu.sh is for those who have one. */

/* Collective over g, which has no device yet: gives it one, as cddp_init does for desc.device and
   desc.backend (the same words; backend NULL = "nccl"). For the groups of cddp_run_threads, where
   "cuda" is cuda:rank: one process, a GPU for each thread, as nn.DataParallel has it. Before the
   group's first cddp_alloc. After a failure g is what it was, or broken. */
CDDPDEF cddp_result cddp_set_device(cddp_group *g, const char *device, const char *backend);

/* The CUDA stream (a cudaStream_t) of g's operations, of a cddp_ddp on g and its cddp_sgd; NULL:
   the legacy default stream. It must stay until another is set. Set it between steps: one stream
   for all ready() calls of a step. New sub-groups take their parent's. Does nothing for a group
   without a GPU. */
CDDPDEF void cddp_set_stream(cddp_group *g, void *stream);
CDDPDEF void *cddp_stream(const cddp_group *g); /* for a communication hook: bucket->group's */

/* Returns when all that is on g's stream has been done, or with the failure that prevents it: what
   to call instead of cudaStreamSynchronize. On the CPU: when asynchronous collectives are done. */
CDDPDEF cddp_result cddp_synchronize(cddp_group *g);

/* Device code for SGD, clipping and compression, registered by cddp_kernels.cuh before main when
   one .cu file of the program includes it. Segments are in host memory, the caller's again after
   the return; all functions enqueue on stream (a cudaStream_t) and return a cudaError_t, 0 being
   success. */
typedef struct cddp_segment { /* a stretch of a parameter, in device memory */
  void *data;     /* weights; NULL where not needed */
  void *grad;
  void *momentum; /* NULL: none */
  size_t count;   /* elements */
} cddp_segment;
typedef struct cddp_sgd_desc cddp_sgd_desc;
enum {
  CDDP_SGD_FIRST = 1,  /* momentum has no value yet */
  CDDP_SGD_ZERO = 2,   /* then grad = 0 */
  CDDP_SGD_PUBLISH = 4 /* then grad = the new weight */
};
typedef struct cddp_kernels {
  int version;          /* CDDP_VERSION of the header they were compiled with */
  size_t scratch_bytes; /* device memory for squares, factor and scale */
  int (*sgd)(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_sgd_desc *rule,
             unsigned flags, void *stream);
  /* copies[i][count] = data of segment i, f32, as f16 or bf16 */
  int (*copies)(const cddp_segment *s, void *const *copies, int n, cddp_dtype copy_dtype,
                void *stream);
  int (*adopt)(const cddp_segment *s, int n, cddp_dtype dtype, void *stream); /* data = grad,
                                                                                 then grad = 0 */
  int (*convert)(void *to, cddp_dtype to_dtype, const void *from, cddp_dtype from_dtype, size_t n,
                 void *stream);
  /* scratch[0] = (add: +=) the sum of all grad squared, in an order that is always the same */
  int (*squares)(const cddp_segment *s, int n, cddp_dtype dtype, double *scratch, bool add,
                 void *stream);
  /* scratch[1] = min(1, max_norm / (sqrt(scratch[0]) + 1e-6)) */
  int (*factor)(double *scratch, double max_norm, void *stream);
  int (*scale)(const cddp_segment *s, int n, cddp_dtype dtype, const double *scratch,
               void *stream); /* grad *= scratch[1] */
} cddp_kernels;
CDDPDEF void cddp_register_kernels(const cddp_kernels *kernels); /* must stay where it is */

/* COLLECTIVES. ------------------------------------------------------------------------------------
   count and count_per_rank are elements, not bytes, the same on every rank; 0 is fine. Buffers are
   contiguous, in any memory, aligned to their element; memory from cddp_alloc saves a copy. work
   NULL: returns when the result is there and the buffers are the caller's again. Otherwise returns
   at once with *work set; the buffers belong to the operation until cddp_wait(*work). Operations of
   one group start in the order they were called. Errors: CDDP_INVALID_ARGUMENT (nothing was sent),
   CDDP_MISMATCH (the ranks called different operations or passed different count, dtype, op or
   root), CDDP_PEER_LOST, CDDP_TIMEOUT, CDDP_OUT_OF_MEMORY. The result of a reduction has the same
   bits on every rank and in every run: see >>design. */

/* buf[count] on every rank becomes the reduction of all ranks' buf. */
CDDPDEF cddp_result cddp_all_reduce(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                    cddp_op op, cddp_work **work);
/* As all_reduce, but only root's buf receives the result; the others' stay as they are. */
CDDPDEF cddp_result cddp_reduce(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                cddp_op op, int root, cddp_work **work);
/* buf[count] of root is copied to every rank's buf. */
CDDPDEF cddp_result cddp_broadcast(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                   int root, cddp_work **work);
/* recv[world_size * count_per_rank] = every rank's send[count_per_rank], by rank. In place: send
   = recv + rank's share. */
CDDPDEF cddp_result cddp_all_gather(cddp_group *g, const void *send, void *recv,
                                    size_t count_per_rank, cddp_dtype dtype, cddp_work **work);
/* As all_gather, on root only; recv may be NULL on the others. In place on root: send = recv +
   root's share. */
CDDPDEF cddp_result cddp_gather(cddp_group *g, const void *send, void *recv, size_t count_per_rank,
                                cddp_dtype dtype, int root, cddp_work **work);
/* recv[count_per_rank] = this rank's share of root's send[world_size * count_per_rank]; send may be
   NULL off the root. In place on root: recv = send + root's share. */
CDDPDEF cddp_result cddp_scatter(cddp_group *g, const void *send, void *recv, size_t count_per_rank,
                                 cddp_dtype dtype, int root, cddp_work **work);
/* recv[count_per_rank] = this rank's share of the reduction of all ranks' send[world_size *
   count_per_rank]. In place: recv = send + rank's share. */
CDDPDEF cddp_result cddp_reduce_scatter(cddp_group *g, const void *send, void *recv,
                                        size_t count_per_rank, cddp_dtype dtype, cddp_op op,
                                        cddp_work **work);
/* recv[r * count_per_rank ..] = rank r's send[rank * count_per_rank ..]. In place: send = recv. */
CDDPDEF cddp_result cddp_all_to_all(cddp_group *g, const void *send, void *recv,
                                    size_t count_per_rank, cddp_dtype dtype, cddp_work **work);
/* Returns when every rank has called it. */
CDDPDEF cddp_result cddp_barrier(cddp_group *g);

/* POINT TO POINT. A recv takes the oldest send of that peer with that tag (any int >= 0); sends
   with other tags wait their turn. Messages in memory that is not shared, and those up to 64 KiB,
   are copied and their send returns at once; larger ones from cddp_alloc memory are read in place,
   and their send returns when they have been received; to another host all are copied. Count and
   dtype of a send and its recv must agree: else CDDP_MISMATCH at the recv, and at the send or the
   sender's next call. Any thread. */
CDDPDEF cddp_result cddp_send(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                              int peer, int tag, cddp_work **work);
CDDPDEF cddp_result cddp_recv(cddp_group *g, void *buf, size_t count, cddp_dtype dtype, int peer,
                              int tag, cddp_work **work);

/* Waits for w and frees it; returns the operation's own result. Handles may be waited for in any
   order. */
CDDPDEF cddp_result cddp_wait(cddp_work *w);
/* *done = whether w has ended (well or not). Never blocks; w still needs cddp_wait. */
CDDPDEF cddp_result cddp_test(cddp_work *w, bool *done);

/* DATA PARALLEL. --------------------------------------------------------------------------------*/

typedef struct cddp_param {
  const char *name; /* for messages and for the comparison between ranks; NULL is fine */
  void *data;       /* count weights; from cddp_alloc: cddp_ddp_step writes them in place */
  void *grad;       /* count sums that backward adds to; NULL: cddp_ddp_create sets it, zeroed */
  size_t count;     /* elements */
  cddp_dtype dtype; /* CDDP_F32, F64, F16 or BF16; of data and of grad */
} cddp_param;

/* What a communication hook gets: one bucket's gradients of this rank, contiguous and not yet
   averaged. On success data must hold the mean over the ranks of group, the same bits everywhere.
   Each parameter begins on a cache line; what lies between two of them is zero and is counted. */
typedef struct cddp_bucket {
  int index, bucket_count; /* buckets are handled in index order on every rank */
  void *data;              /* count elements; shared memory, as from cddp_alloc(group, ...) */
  size_t count;
  cddp_dtype dtype;
  cddp_group *group; /* for the hook's own collectives; belongs to the cddp_ddp */
  const int *params; /* which parameters, in order, and how many */
  int param_count;
} cddp_bucket;

/* Called on cddp's communication thread, one bucket at a time, on every rank. Like DDP's
   register_comm_hook. On GPUs with NCCL: called by ready(), wait() or step(); data is device
   memory, and everything the hook does with it is enqueued on cddp_stream(bucket->group), as its
   collectives without a work handle are. */
typedef cddp_result (*cddp_comm_hook)(cddp_bucket *bucket, void *user_data);

/* Hooks that send f32 and f64 gradients as bf16 or fp16; the mean is rounded to that type. */
CDDPDEF cddp_result cddp_bf16_compress_hook(cddp_bucket *bucket, void *user_data);
CDDPDEF cddp_result cddp_fp16_compress_hook(cddp_bucket *bucket, void *user_data);

typedef struct cddp_ddp_desc {
  double bucket_cap_mb;        /* MiB at which a bucket closes; 0 = 25 */
  double first_bucket_mb;      /* the same for the first bucket; 0 = 1, or bucket_cap_mb if set */
  bool find_unused_parameters; /* without ready() = zero; on all ranks = left untouched */
  cddp_comm_hook comm_hook;    /* NULL = all_reduce with CDDP_AVG */
  void *comm_hook_data;        /* its user_data */
  cddp_param *buffers;         /* untrained state (running means); grad is ignored; any dtype */
  int buffer_count;            /* broadcast from rank 0 at creation and by cddp_ddp_sync_buffers */
  const size_t *sparse_rows;   /* [count] rows of a parameter whose gradient comes by
                                  cddp_ddp_add_rows, 0 for others; NULL = none has any */
} cddp_ddp_desc;

/* Collective over g. Compares names, counts and dtypes with rank 0's (CDDP_MISMATCH names the first
   that differs), copies rank 0's data to all ranks and assigns gradients to buckets as PyTorch
   does. params must stay where it is until cddp_ddp_destroy; gradient pointers never move. data and
   grad may be in any memory: gradients cddp_ddp_create placed (NULL) and weights from cddp_alloc of
   g are never copied. g must outlive the cddp_ddp. */
CDDPDEF cddp_result cddp_ddp_create(cddp_ddp **out, cddp_group *g, cddp_param *params, int count,
                                    const cddp_ddp_desc *desc);

/* Says that backward has written params[param].grad; when that fills a bucket, its reduction starts
   in the background. Never blocks on a peer. Any order, any thread (each parameter once a step).
   Twice in one step: CDDP_INVALID_ARGUMENT. Under no_sync it only notes that the parameter was
   used. */
CDDPDEF cddp_result cddp_ddp_ready(cddp_ddp *d, int param);

/* Adds to the gradient of a parameter with sparse_rows, such as an embedding's weight: values[i *
   width ..] to row rows[i], width being count / sparse_rows. A row may come more than once, n may
   differ from rank to rank and be 0; copies. Then cddp_ddp_ready as for others. cddp_ddp_wait and
   _step send only these rows, in the call itself, past any comm_hook; the mean has the bits of a
   dense one. The parameter's grad stays NULL. SGD does with them what torch.optim.SGD does: without
   momentum the other rows are not touched, with it all are; weight_decay is CDDP_UNSUPPORTED.
   cddp_sgd_step needs cddp_sgd_desc.ddp to find them. Any thread, one at a time for a parameter.
   Like nn.Embedding(sparse=True). */
CDDPDEF cddp_result cddp_ddp_add_rows(cddp_ddp *d, int param, const int64_t *rows,
                                      const void *values, size_t n);

/* After cddp_ddp_wait, for an optimizer of yours: the mean gradient's rows, ascending, each once.
   Returns how many; the arrays are valid until the next wait, step or cddp_sgd_zero_grad. */
CDDPDEF size_t cddp_ddp_rows(const cddp_ddp *d, int param, const int64_t **rows,
                             const void **values);

/* Collective. Returns when every gradient is the mean over all ranks of what each had accumulated.
   A parameter without ready() is an error that names it, CDDP_INVALID_ARGUMENT, or CDDP_MISMATCH
   when others had it ready; with find_unused_parameters it counts as zero. After an error the
   cddp_ddp is broken, the group is not unless a peer was lost. One thread at a time, not at once
   with ready(). */
CDDPDEF cddp_result cddp_ddp_wait(cddp_ddp *d);

/* cddp_ddp_wait, then cddp_sgd_step, then zero gradients, in one pass over the bytes: each rank
   reduces its share, updates it and writes the new weights to all ranks of the host, keeping
   1/world_size of the momentum. Same bits as the three calls. s must have been made for the same
   params array. Collective. On GPUs: bucket by bucket reduce-scatter, SGD, all-gather; needs
   cddp_kernels.cuh; with a hook, with find_unused_parameters or without NCCL every rank updates all
   weights and keeps all of the momentum. */
CDDPDEF cddp_result cddp_ddp_step(cddp_ddp *d, cddp_sgd *s);

/* Uneven inputs: a rank that has run out of data calls this where the others go on stepping. Until
   every rank has called it, it takes part in their cddp_ddp_wait, _step and _sync_buffers with zero
   weight: each mean is over the ranks that have data (>>join). s: the cddp_sgd of the loop, whose
   learning rate follows the others'; NULL if they step by other means, whose own state stays as it
   is here. On return all ranks have the same weights, buffers and momentum of s. A hook's result is
   scaled by world size / ranks with data, so it must be linear. Each step has the group's timeout
   anew. Other collectives of the loop are not joined: have them on ranks with data only, or
   outside. A batch that is shorter than the others' weighs as much as a full one; multiply its loss
   by its samples / a full batch's for each sample to weigh the same. Collective; once an epoch.
   Like PyTorch's join(divide_by_initial_world_size=False). */
CDDPDEF cddp_result cddp_ddp_join(cddp_ddp *d, cddp_sgd *s);

/* Over how many ranks the last cddp_ddp_wait or _step took the mean: those that had not joined. */
CDDPDEF int cddp_ddp_present(const cddp_ddp *d);

/* on: ready() stops sending and gradients accumulate locally; off: the next step sends all of it.
   Not divided by the number of micro-batches. Same call on every rank, between steps. Like DDP's
   no_sync(). */
CDDPDEF void cddp_ddp_no_sync(cddp_ddp *d, bool on);

/* After cddp_ddp_wait: scales all gradients so that their global 2-norm is at most max_norm (> 0);
   *norm, unless NULL, is the norm before. Local, same bits on every rank. Like
   torch.nn.utils.clip_grad_norm_. */
CDDPDEF cddp_result cddp_ddp_clip_grad_norm(cddp_ddp *d, double max_norm, double *norm);

/* Collective: copies rank 0's buffers (cddp_ddp_desc.buffers) to all ranks, or the first rank's
   that has not joined; DDP does it before each forward. */
CDDPDEF cddp_result cddp_ddp_sync_buffers(cddp_ddp *d);

/* Whether any rank used the parameter in the step that cddp_ddp_wait ended; false for a bad
   argument. */
CDDPDEF bool cddp_ddp_used(const cddp_ddp *d, int param);

/* The buckets now in force: count, and bucket i's parameters (at most capacity ints are written;
   returns how many it has, -1 for a bad argument). They change once, after the first wait or step,
   to rank 0's order of arrival. */
CDDPDEF int cddp_ddp_bucket_count(const cddp_ddp *d);
CDDPDEF int cddp_ddp_bucket_params(const cddp_ddp *d, int bucket, int *params, int capacity);

/* Frees d; gradients that cddp_ddp_create placed are gone and their pointers set to NULL. Local.
   NULL is fine. */
CDDPDEF void cddp_ddp_destroy(cddp_ddp *d);

struct cddp_sgd_desc {
  double lr;           /* learning rate, >= 0. Zero stays zero: there is no default */
  double momentum;     /* >= 0 */
  double dampening;    /* on the gradient that enters the momentum, not on the first one */
  double weight_decay; /* >= 0; L2, coupled */
  bool nesterov;       /* needs momentum > 0 and dampening 0 */
  bool maximize;       /* ascend */
  bool separate_mul_add; /* round after each multiply, as PyTorch without AVX2; false: fused */
  cddp_ddp *ddp;       /* optional, must outlive this: step skips what no rank used in its wait */
  void *stream;        /* CUDA stream of step and zero_grad without ddp; NULL = the default one */
  void *const *copies;   /* [count] mixed precision, see below; NULL for a parameter: none of it */
  cddp_dtype copy_dtype; /* of all copies: CDDP_F16 or CDDP_BF16 */
};

/* torch.optim.SGD's arithmetic, bit for bit. params as for cddp_ddp_create, and after it when grad
   was NULL; must stay where it is. Momentum is allocated at the first step that needs it.
   MIXED PRECISION. Forward and backward read f16 or bf16 weights, while the optimizer works on f32
   master weights: params hold the masters and f32 gradients, which are reduced in f32 as ever;
   copies[i], of count elements in the same kind of memory as data, is what the model reads.
   cddp_sgd_create, cddp_sgd_step, cddp_ddp_step, cddp_ddp_join and cddp_load (with desc.sgd) write
   data, rounded to the nearest, to it. Checkpoints have the masters. The array is copied, the
   memory must stay. */
CDDPDEF cddp_result cddp_sgd_create(cddp_sgd **out, cddp_param *params, int count,
                                    const cddp_sgd_desc *desc);
CDDPDEF cddp_result cddp_sgd_step(cddp_sgd *s);                /* updates data from grad. Local */
CDDPDEF cddp_result cddp_sgd_zero_grad(cddp_sgd *s);           /* sets every grad to zero. Local */
CDDPDEF cddp_result cddp_sgd_set_lr(cddp_sgd *s, double lr);   /* from the next step on */
CDDPDEF double cddp_sgd_lr(const cddp_sgd *s);
/* Writes the copies after a change of data by your own hand. Local. */
CDDPDEF cddp_result cddp_sgd_write_copies(cddp_sgd *s);
CDDPDEF void cddp_sgd_destroy(cddp_sgd *s);                    /* NULL is fine */

/* DATA. -----------------------------------------------------------------------------------------*/

typedef struct cddp_sampler_desc {
  size_t dataset_size;  /* samples */
  int rank, world_size; /* world_size 0 = one rank */
  uint64_t seed;        /* the same on every rank */
  bool shuffle;         /* a new permutation for each epoch */
  bool drop_last;       /* drop what does not divide evenly, instead of repeating samples */
  bool exact;           /* evaluation: every sample once, none repeated; sizes may differ by 1 */
} cddp_sampler_desc;

typedef struct cddp_sampler { /* all fields are private */
  cddp_sampler_desc desc;
  uint64_t epoch;
  size_t position, size;
  uint64_t *order;
  cddp_result result;
  size_t start; /* samples of the epoch taken before cddp_load */
  bool resumed; /* by cddp_load, and no epoch set since */
} cddp_sampler;

/* The indices of torch.utils.data.DistributedSampler for the same arguments. Starts in epoch 0. */
CDDPDEF cddp_result cddp_sampler_init(cddp_sampler *s, const cddp_sampler_desc *desc);
CDDPDEF void cddp_sampler_set_epoch(cddp_sampler *s, uint64_t epoch); /* rewinds */
CDDPDEF uint64_t cddp_sampler_epoch(const cddp_sampler *s);
CDDPDEF size_t cddp_sampler_size(const cddp_sampler *s); /* of an epoch, or what cddp_load left */
/* The next index; false at the end of the epoch, where the permutation's memory (8 bytes a sample)
   is freed too. false with s->result != CDDP_OK: there was no memory for it. */
CDDPDEF bool cddp_sampler_next(cddp_sampler *s, size_t *index);
CDDPDEF void cddp_sampler_destroy(cddp_sampler *s); /* for an epoch left early; NULL is fine */

/* CHECKPOINTS. ------------------------------------------------------------------------------------
   Files in the safetensors format, which PyTorch, NumPy, JAX and others read and write. Between
   steps only: no gradient may be marked ready. */

typedef struct cddp_shape {
  int dims;         /* at most 8; 0: one dimension, as long as the parameter */
  uint64_t size[8]; /* the last one varies fastest, as in C */
} cddp_shape;

typedef struct cddp_metadata { /* strings in UTF-8 */
  const char *key;             /* not "cddp."... */
  const char *value;           /* cddp_load sets it; NULL: the file has none */
} cddp_metadata;

typedef struct cddp_checkpoint_desc {
  const cddp_shape *shapes; /* [count] of params, for the file's readers; load: it must have them.
                               NULL: one dimension each; load takes any shape with that count */
  cddp_sgd *sgd;            /* its momentum and learning rate too; NULL: none */
  cddp_sampler *sampler;    /* its epoch and place in it; NULL: none */
  cddp_metadata *metadata;  /* save: what to write; load: keys to look up */
  int metadata_count;
  char *text;               /* load: memory for the values, which point into it */
  size_t text_size;         /* bytes */
  bool partial; /* load: what the file lacks stays as it is, what it has besides is no error */
} cddp_checkpoint_desc;

/* Collective over g; g NULL: by this process alone. Rank 0 writes its params (any dtype, each with
   a name) to path, and what desc asks for; returns when the file is on the disk. The momentum may
   lie in pieces on the ranks, as after cddp_ddp_step: it is written whole and stays where it is.
   Parameters and momentum in a GPU's memory come through a few MiB of the host's; what is on the
   group's stream is waited for (g NULL: what is on the device), and the file is the CPU's.
   The new file takes path's name in one step: whatever fails (no space, no right, a kill half-way)
   leaves the old one as it was, and at most path.tmp, which the next call takes over. All ranks
   get the same result, CDDP_IO for the file system's failures; ranks whose parameters or options
   differ get CDDP_MISMATCH. The others wait while rank 0 writes: timeout_s must suffice for that.
   Like safetensors' save_file. */
CDDPDEF cddp_result cddp_save(cddp_group *g, const char *path, const cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc);

/* Collective over g; g NULL: by this process alone. Rank 0 reads the file, all ranks get its
   values, whatever the number of ranks that saved it. f32, f64, f16 and bf16 are converted into
   each other. The file, which is not trusted, and all that is asked for are checked before
   anything is changed: CDDP_IO for a file that is damaged, CDDP_INVALID_ARGUMENT for one that does
   not suit; only when reading fails after that, part of rank 0's params may be overwritten. All
   ranks get the same result. A sampler goes on with the next sample of the epoch that no rank had:
   begin with epoch cddp_sampler_epoch(), whose first cddp_sampler_set_epoch then does not rewind.
   Memory of a GPU as in cddp_save; its values are there on return. Like load_file and
   load_state_dict. */
CDDPDEF cddp_result cddp_load(cddp_group *g, const char *path, cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc);

/* ANY FILE of that format: its tensors one by one. Local; once open, any thread. */
typedef struct cddp_safetensors cddp_safetensors; /* an open file: safetensors.safe_open */

typedef struct cddp_tensor_info {
  const char *name;      /* UTF-8; valid until the file is closed, as shape */
  const char *type;      /* the format's word: "F32", "BF16", "BOOL", "F8_E4M3", ... */
  int dtype;             /* the cddp_dtype; -1: there is none for it */
  int dims;              /* 0: a scalar */
  const uint64_t *shape; /* [dims] */
  uint64_t count, bytes; /* elements, bytes */
  uint64_t begin;        /* of its bytes, counted from the end of the header */
} cddp_tensor_info;

/* Opens and checks it: CDDP_IO says what is wrong. *out is NULL on failure. */
CDDPDEF cddp_result cddp_safetensors_open(cddp_safetensors **out, const char *path);
CDDPDEF void cddp_safetensors_close(cddp_safetensors *f); /* NULL is fine */
CDDPDEF int cddp_safetensors_count(const cddp_safetensors *f); /* tensors; -1 for NULL */
/* Tensor index of 0 .. count - 1, in the order of the file's bytes. */
CDDPDEF cddp_result cddp_safetensors_get(const cddp_safetensors *f, int index,
                                         cddp_tensor_info *out);
CDDPDEF int cddp_safetensors_find(const cddp_safetensors *f, const char *name); /* -1: none */
/* Copies the tensor's bytes, little-endian as they are; bytes must be their number. */
CDDPDEF cddp_result cddp_safetensors_read(const cddp_safetensors *f, int index, void *data,
                                          size_t bytes);
/* The value of a metadata key, valid until the file is closed; NULL: none. */
CDDPDEF const char *cddp_safetensors_metadata(const cddp_safetensors *f, const char *key);

/* PROCESSES. ------------------------------------------------------------------------------------*/

/* Forks nprocs processes that call fn(rank, arg) with RANK, WORLD_SIZE, LOCAL_RANK,
   LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and waits for them. fn's return value (0 ..
   255) is the exit code; 0 is success. When one fails the others have 1 s to notice, then get
   SIGTERM and 5 s later SIGKILL; CDDP_PEER_LOST names the first: its rank, exit code or signal.
   Children die with their parent, run no atexit handlers of it, and leave nothing behind. Call it
   before other threads exist, as with any fork. Like torch.multiprocessing.spawn. */
CDDPDEF cddp_result cddp_spawn(int (*fn)(int rank, void *arg), void *arg, int nprocs);

/* What cddp_launch starts, in torchrun's words. */
typedef struct cddp_launch_desc {
  const char *const *argv; /* the program, looked for in PATH, and its arguments; NULL at the end */
  int nproc_per_node;      /* ranks on this machine, the same on all; 0 = 1 */
  int nnodes, node_rank;   /* machines, 0 = 1, and which one this is; each calls cddp_launch */
  const char *master_addr; /* the machine with node_rank 0; NULL = this one, if it is alone */
  int master_port;         /* 0 = any free one, with several machines 29500 */
  bool standalone;         /* one machine and any free port, whatever master_addr and _port say */
  bool serve_store;        /* one machine: serve the ranks' store here, as torchrun's agent does */
  int max_restarts;        /* of all ranks when one fails; with 0 the first failure is the end */
  const char *log_dir;     /* what rank N prints also goes to log_dir/rankN.log; NULL = none */
  bool no_prefix;          /* lines as they are; false: "[3] " before those of rank 3 */
  int color;               /* of the prefix: 0 = on a terminal, 1 = always, -1 = never */
  int out_fd, err_fd;      /* where ranks' lines go; 0 = 1 and 2 (stdout, stderr); -1 = nowhere */
  cddp_logger logger;      /* gets a line for each restart */
} cddp_launch_desc;

typedef struct cddp_launch_report {
  int rank;      /* that failed first; -1: none did */
  int pid;       /* of its process */
  int exit_code; /* its exit code; -1: a signal killed it; 126, 127: it could not be run */
  int signal;    /* that killed it; for rank -1: that ended the launch; 0: none */
  int restarts;  /* that took place */
} cddp_launch_report;

/* Starts a program once for each rank of this machine and waits for all of them. Each gets RANK,
   WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR and
   MASTER_PORT; TORCHELASTIC_RESTART_COUNT and _MAX_RESTARTS; OMP_NUM_THREADS=1 if unset and there
   are several. Their output goes to out_fd and err_fd in whole lines: the one thing that cddp ever
   prints. When a rank fails the others end as with cddp_spawn; CDDP_PEER_LOST names the first, as
   does *report (NULL is fine). During the call SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2,
   SIGWINCH, SIGTSTP and SIGCONT of the calling thread go to the ranks unless they are ignored; the
   first four end the launch with CDDP_ABORTED, by SIGKILL when ranks remain after 30 s or the
   signal comes twice. A rank and what it starts are one process group, which ends with the rank and
   with the caller, however that dies. On one machine the port of MASTER_PORT is bound here and
   passed on to rank 0 (CDDP_LISTEN_FD), so nobody can take it. With serve_store, for PyTorch
   programs and for those behind one that closes descriptors, the caller serves on it instead.
   Call it before other threads exist. Like torchrun; examples/cddprun.c is the program for it. */
CDDPDEF cddp_result cddp_launch(const cddp_launch_desc *desc, cddp_launch_report *report);

/* Calls fn on n threads, each with its own rank of one group, and waits for them; the groups are
   destroyed here. fn returns 0 for success; when one fails the others' waits end with
   CDDP_PEER_LOST. All memory is zero-copy here. On GPUs fn begins with cddp_set_device. */
CDDPDEF cddp_result cddp_run_threads(int (*fn)(cddp_group *g, void *arg), void *arg, int n);

/* CALL SITES. -------------------------------------------------------------------------------------
   Error texts of collective calls say in which file and line each rank made its call: macros of the
   functions' own names, at the end of this file, pass it on through these two, which return their
   first argument. CDDP_NO_CALL_SITES, defined before this header is included, leaves them out. */
CDDPDEF cddp_group *cddp_at(cddp_group *g, const char *file, int line);
CDDPDEF cddp_ddp *cddp_ddp_at(cddp_ddp *d, const char *file, int line);

/* FLIGHT RECORDER. --------------------------------------------------------------------------------
   With CDDP_RECORD=dir in the environment every rank keeps its last 1,024 operations in
   dir/cddp-JOB-RANK.rec, which survives the rank's end, SIGKILL included. examples/cddptrace.c
   merges the ranks' files into a report (who is late or missing, and in what) and a trace for
   Perfetto. The file is a header, then the ring, in the machine's byte order. */
#define CDDP_RECORDS 1024 /* records in the ring; number n is at index (n - 1) % CDDP_RECORDS */

typedef struct cddp_record {
  uint64_t number;   /* of the operation on this rank, from 1; 0: none yet. Written last */
  uint64_t sequence; /* of the operation in its group, from 1; 0: it has none (send, ready) */
  uint64_t group;    /* alike on all ranks of a group; 0 is that of cddp_init */
  uint64_t count;    /* elements; of "bucket" its index, of "ready" the parameter's */
  int64_t enqueued;  /* ns of CLOCK_MONOTONIC, as are the next two */
  int64_t started;   /* 0: not yet */
  int64_t ended;     /* 0: not yet */
  char what[16];     /* "all_reduce", "send", "ddp_wait", "bucket", ... with a NUL */
  int32_t dtype, op; /* cddp_dtype and cddp_op, -1: none */
  int32_t root;      /* or the peer of a send or recv; -1: none */
  int32_t result;    /* cddp_result, valid when ended */
  int32_t engine;    /* 1: on cddp's own thread, 0: on a caller's */
  int32_t tag;       /* of a send or recv */
} cddp_record;

typedef struct cddp_record_header {
  char magic[8];       /* "cddprec1" */
  uint32_t record_size, capacity; /* sizeof (cddp_record), CDDP_RECORDS */
  uint32_t rank, world_size, pid;
  uint32_t left;       /* 1: the rank left its groups itself */
  uint64_t job;        /* alike on all ranks */
  int64_t created;     /* ns of CLOCK_MONOTONIC */
  int64_t wall_offset; /* ns, CLOCK_REALTIME - CLOCK_MONOTONIC */
  uint64_t next;       /* numbers given out so far */
  char host[72];       /* with a NUL */
} cddp_record_header;

/* STORE. ------------------------------------------------------------------------------------------
   A key-value store in c10d's TCPStore protocol: a torch.distributed.TCPStore of PyTorch 2.2 or
   later can use a server made here, and the other way round. Keys are NUL-terminated, at most 8
   KiB; values any bytes, at most 8 MiB. Any thread; one operation at a time per store. A cddp_group
   does not need one: cddp_init makes its own. */
typedef struct cddp_store_desc {
  const char *init_method;  /* "tcp://host:port", "unix://name" or "file:///absolute/path" */
  bool is_server;           /* tcp: also serve, from a thread, on host's addresses; port 0 = any */
  double timeout_s;         /* of connecting, get, wait; 0 = CDDP_TIMEOUT_S, else 600 */
  const char *secret;       /* NULL = CDDP_SECRET from the environment, else none */
  cddp_allocator allocator;
} cddp_store_desc;

CDDPDEF cddp_result cddp_store_create(cddp_store **out, const cddp_store_desc *desc);
CDDPDEF void cddp_store_destroy(cddp_store *s); /* NULL is fine */
CDDPDEF int cddp_store_port(const cddp_store *s); /* the TCP port in use; 0 for a file */
CDDPDEF cddp_result cddp_store_set(cddp_store *s, const char *key, const void *value, size_t size);
/* Waits for key, then copies its value: *size is its length; CDDP_INVALID_ARGUMENT if that exceeds
   capacity (nothing is copied then). value may be NULL with capacity 0 to ask for the length alone,
   which returns CDDP_OK. */
CDDPDEF cddp_result cddp_store_get(cddp_store *s, const char *key, void *value, size_t capacity,
                                   size_t *size);
/* Adds amount to the decimal number at key (absent = 0) in one atomic step; *total, unless NULL,
   is the new value. */
CDDPDEF cddp_result cddp_store_add(cddp_store *s, const char *key, int64_t amount, int64_t *total);
/* Stores desired if the value is expected (expected_size 0: if key is absent). *swapped says
   whether. value[capacity] and *size get the value that key has now, or expected if key is absent
   and was not expected to be. */
CDDPDEF cddp_result cddp_store_compare_set(cddp_store *s, const char *key, const void *expected,
                                           size_t expected_size, const void *desired,
                                           size_t desired_size, void *value, size_t capacity,
                                           size_t *size, bool *swapped);
/* Waits until all keys exist; timeout_s 0 = the store's. CDDP_TIMEOUT names the first key that
   is missing. */
CDDPDEF cddp_result cddp_store_wait(cddp_store *s, const char *const *keys, int count,
                                    double timeout_s);
CDDPDEF cddp_result cddp_store_check(cddp_store *s, const char *const *keys, int count,
                                     bool *all_exist);
/* *deleted, unless NULL: whether the key was there. */
CDDPDEF cddp_result cddp_store_delete(cddp_store *s, const char *key, bool *deleted);
CDDPDEF cddp_result cddp_store_num_keys(cddp_store *s, int64_t *count);

#ifdef __cplusplus
}
#endif
#endif /* CDDP_H */
#ifdef CDDP_IMPLEMENTATION
#ifndef CDDP_IMPLEMENTATION_DONE
#define CDDP_IMPLEMENTATION_DONE

#ifdef CDDP__CALL_SITES /* the header came before, as declarations only */
#undef CDDP__CALL_SITES
#undef CDDP__AT
#undef CDDP__DDP_AT
#undef cddp_all_reduce
#undef cddp_reduce
#undef cddp_broadcast
#undef cddp_all_gather
#undef cddp_gather
#undef cddp_scatter
#undef cddp_reduce_scatter
#undef cddp_all_to_all
#undef cddp_barrier
#undef cddp_send
#undef cddp_recv
#undef cddp_group_split
#undef cddp_group_new
#undef cddp_ddp_create
#undef cddp_ddp_wait
#undef cddp_ddp_step
#undef cddp_ddp_sync_buffers
#undef cddp_save
#undef cddp_load
#undef cddp_ddp_join
#endif

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/falloc.h>
#include <math.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef CDDP_MPI
#define OMPI_SKIP_MPICXX 1 /* its C++ functions are not for extern "C" */
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

#ifdef CDDP_CUDA
#include <cuda_runtime.h>
#include <nccl.h>
#if NCCL_VERSION_CODE < 21800
#error "cddp.h: CDDP_CUDA needs NCCL 2.18 or later (ncclCommSplit)"
#endif
#endif
/* >>design ----------------------------------------------------------------------------------------
   PLACES. The ranks of a host share one memfd, kept open by them alone, so that nothing is ever
   left in a file system. Rank i allocates in its own window of it (>>arena) and its peers map what
   they meet. Each group has a board there: two announcement lines per rank, a seat (posted sends, a
   state) and two slots for bytes in transit.

   STEPS. Whatever ranks do together is a numbered sequence of steps (>>local). In a step each rank
   announces what it calls and waits for all others' announcements; the announcement carries
   operation, count, dtype and root, so a disagreement is seen by every rank at once, and up to 40
   bytes of payload, so a small all_reduce is one exchange of cache lines. Collectives
   (>>collectives) are one step (small), two steps around in-place moves (shared memory), or a step
   per 64 KiB piece (other memory).

   THE CANONICAL SUM. Sums over ranks follow one binary tree: tree(0..n) = tree(0..p) + tree(p..n)
   with p the largest power of two below n, so ((a+b)+(c+d)) for four ranks and ((a+b)+c) for three.
   Element i of a result depends on the inputs alone, never on slices, sizes, timing or instruction
   set: equal bits on all ranks and in all runs. f16 and bf16 are widened to f32, summed and rounded
   once. AVG divides the sum.

   THREADS. cddp runs on its callers' threads, with exceptions: a group whose collectives are
   called with a work handle, or that reduces buckets, has an engine thread (>>work) that runs them
   in order; rank 0 serves the store from a thread while ranks meet; and a process with GPU groups
   has a watcher (>>cuda). All block all signals.
   Locks, in the order in which they may be nested: cddp_ddp.lock, engine.lock; mail_lock,
   host.lock; fail_lock. No lock is held while waiting for a peer. What ranks share is only touched
   through cddp__atomic_* or is published by one.

   WAITING. A wait polls for tens of microseconds, yields, then sleeps on a futex for at most 20 ms
   at a time (>>local). Each time it wakes it looks after the ranks it waits for: their state on the
   board and their pidfd. So a death is noticed within about 20 ms, by waiting ranks only, at no
   cost to others. Ranks beyond the number of cores never poll.

   FAILURE. The first rank to see a lost peer, a disagreement or a deadline writes it on the board
   and wakes everyone; every rank's calls on that group then return it. A rank that cannot go on for
   reasons of its own (no memory) breaks the group likewise, unless nothing was announced yet.
   cddp_destroy only marks the rank's seat and unmaps.

   SEVERAL HOSTS. The ranks of a host work as above. Leaders, one for each host in a group, carry
   the lines of a step to each other, large arrays go from host to host in slices, one for each rank
   (>>hosts), on connections that are made when first used (>>links). Each host has a board of its
   own: a failure is told to the others, and how a rank died by the ranks of its own host, which
   alone can see it; without one there the end of its connection has to do. A host that is cut off
   is noticed by the deadline, or by TCP after 20 s.

   DATA PARALLEL. Gradients lie in one arena per rank and never move; see >>buckets. A model has
   private groups for buckets and for control, so your own collectives on the group may come between
   ready() calls in any order (on GPUs see ORDER there). Ranks without data: >>join. Gradients that
   are rows: >>sparse.

   DEVICES. A group keeps all of the above as its control plane; memory on a device has a data plane
   beside it: cddp_group.backend, a struct of functions, NULL for the CPU. The public functions ask
   it first, with one branch. Both kinds of data plane (>>nccl, >>staging) share devices and streams
   of >>cuda and the data parallel code of >>gpus; NCCL's also has the watcher thread. It compares
   what ranks called by records in their seats, without any of them waiting for it; it looks every
   few milliseconds, at the host's cost only. Between hosts it passes these records on. Locks there:
   plane.turn, plane.lock; watch.lock, mail_lock, plane.lock, fail_lock. */

/* >>config ------------------------------------------------------------------------------------- */

#ifndef CDDP_ASSERT
#define CDDP_ASSERT(c) ((void)0)
#endif

/* Tests stop, delay or kill a rank at these points; nothing otherwise. */
#ifndef CDDP__POINT
#define CDDP__POINT(name) ((void)0)
#endif

#ifdef CDDP_CUDA
#define CDDP__HAS_CUDA true
#else
#define CDDP__HAS_CUDA false
#endif
#ifdef CDDP_MPI
#define CDDP__HAS_MPI true
#else
#define CDDP__HAS_MPI false
#endif
#define CDDP__CACHE_LINE 64
#define CDDP__HUGE_PAGE ((size_t)2 << 20)
#define CDDP__ERROR_MAX 512          /* bytes of an error text */
#define CDDP__TIMEOUT_S 600.0        /* default of timeout_s */
#define CDDP__MAX_RANKS 4096         /* a host's ranks in one group */
#define CDDP__KEY_MAX 8192           /* bytes of a store key, as c10d's libuv server */
#define CDDP__LAUNCH_PORT 29500      /* master_port on several machines, as torchrun's */
#define CDDP__VALUE_MAX (8u << 20)   /* bytes of a store value, likewise */
#define CDDP__KEYS_MAX 131072u       /* keys in one store command, likewise */

#ifndef CDDP__FERRY
#define CDDP__FERRY ((size_t)4 << 20) /* bytes between a device and a file at a time */
#endif

#define CDDP__PRINTF(f, a) __attribute__((format(printf, f, a)))
#define CDDP__LIKELY(c) __builtin_expect(!!(c), 1)
#define CDDP__UNLIKELY(c) __builtin_expect(!!(c), 0)

/* >>structs ------------------------------------------------------------------------------------
   Every private struct. "shared" = in memory that the ranks of a host share, so no pointers and
   one writer per cache line; all zero bytes is the initial state. */

typedef struct cddp__atomic_u32 {
  uint32_t v;
} cddp__atomic_u32;

/* Where in the program a call was made; file NULL: not known. */
typedef struct cddp__site {
  const char *file;
  int line;
} cddp__site;

/* Where a buffer lies, in words that every rank of the host can follow. */
typedef struct cddp__ref {
  uint64_t base;       /* extent: offset in the memfd, bytes; pointer: the address */
  uint64_t size;       /* extent: its length, bytes */
  uint64_t offset;     /* of the buffer in the extent, bytes */
  uint32_t generation; /* of the extent: a freed and reused one has another */
  uint32_t kind;       /* CDDP__REF_* */
} cddp__ref;
enum { CDDP__REF_NONE, CDDP__REF_EXTENT, CDDP__REF_POINTER };

#define CDDP__INLINE 40 /* payload bytes that ride in a line */

/* shared: what one rank announces in one step. Written by its rank, seq last. Two per rank, used in
   turn: a rank can only be one step ahead of a reader, see cddp__sync. */
typedef struct cddp__line {
  cddp__atomic_u32 seq; /* number of the step; readers sleep on it */
  uint32_t call;        /* operation, dtype, op: cddp__call_code */
  uint64_t count;       /* elements */
  int32_t root;         /* rank, or -1 */
  uint32_t extra;       /* room specific, compared too */
  union {
    unsigned char bytes[CDDP__INLINE];
    cddp__ref ref;
    uint64_t align;
  } u;
} cddp__line;

/* shared: a posted send. state is written by both sides in turn, the rest by the sender. Only the
   rank named in a posted parcel's state may look at the rest: others' parcels change under it. */
typedef struct cddp__parcel {
  cddp__atomic_u32 state; /* CDDP__PARCEL_*, for POSTED with the receiver: CDDP__POSTED_TO */
  int32_t to, tag;
  uint32_t dtype;
  uint64_t count;  /* elements */
  uint64_t number; /* order of posting at the sender */
  uint64_t wanted; /* REFUSED: count that the receiver expected, dtype in the top byte */
  cddp__ref ref;
} cddp__parcel;
enum {
  CDDP__PARCEL_FREE,
  CDDP__PARCEL_POSTED,
  CDDP__PARCEL_TAKEN, /* its receiver copies the bytes; also with the receiver's rank */
  CDDP__PARCEL_DONE,
  CDDP__PARCEL_REFUSED
};
#define CDDP__POSTED_TO(rank) ((uint32_t)CDDP__PARCEL_POSTED | (uint32_t)(rank) << 8)
#define CDDP__TAKEN_BY(rank) ((uint32_t)CDDP__PARCEL_TAKEN | (uint32_t)(rank) << 8)

#define CDDP__PARCELS 128 /* sends in flight per rank and group */
#define CDDP__SITE_MAX 124 /* bytes of a call site's text */

/* shared: one call on device memory, for the watchers of the other ranks. Written by its rank. */
typedef struct cddp__note {
  cddp__atomic_u32 number; /* of the call, from 1; 0 while it is being written */
  uint32_t call;           /* cddp__call_code */
  uint64_t count;
  int32_t root;
  uint32_t spare;
  uint64_t hash; /* of this and all calls before it */
  char site[96]; /* where it was made, in words; "": not known */
} cddp__note;
#define CDDP__NOTES 64 /* calls remembered per rank and group, a power of two */
#define CDDP__NEIGHBOURS 3 /* hosts whose leaders' notes come to a host, see >>cuda */

/* shared: a rank's place in a group, on its own host. */
typedef struct cddp__seat {
  cddp__atomic_u32 state; /* CDDP__SEAT_*; writer: the rank, for threads also their starter */
  uint32_t pid;           /* writer: the rank, before its first step */
  cddp__atomic_u32 inside; /* 1: may be in its peers' memory, see cddp__enter; writer: the rank */
  unsigned char pad1[CDDP__CACHE_LINE - 12];
  cddp__atomic_u32 mail;    /* bumped by any rank that changed a parcel of interest to this one */
  cddp__atomic_u32 waiting; /* threads of this rank asleep on mail */
  cddp__atomic_u32 parcel_top; /* parcels below this index may be in use; writer: the rank */
  cddp__atomic_u32 awaits;    /* 1 + a rank of another host that this one waits for; 0: none */
  cddp__atomic_u32 awaits_at; /* as of this ms of cddp__now(); writer of both: the rank */
  cddp__atomic_u32 calls;     /* on device memory, noted so far; writer: the rank */
  unsigned char pad2[CDDP__CACHE_LINE - 24];
  cddp__atomic_u32 site_step; /* the step whose call site follows; writer: the rank, as it fails */
  char site[CDDP__SITE_MAX];
  cddp__parcel parcels[CDDP__PARCELS];
  cddp__note notes[CDDP__NOTES];
} cddp__seat;
enum { CDDP__SEAT_EMPTY, CDDP__SEAT_TAKEN, CDDP__SEAT_LEFT, CDDP__SEAT_DEAD };

/* shared: the control block of a group, followed by the lines of all ranks, the seats of those of
   this host (and an empty one for the others) and then the slots. */
typedef struct cddp__board {
  cddp__atomic_u32 arrivals; /* crowded groups: ranks that reached a step, summed over all steps */
  unsigned char pad1[CDDP__CACHE_LINE - 4];
  cddp__atomic_u32 release; /* crowded groups: the last step that all ranks reached; futex */
  unsigned char pad2[CDDP__CACHE_LINE - 4];
  cddp__atomic_u32 sleepers; /* threads asleep in a step */
  unsigned char pad3[CDDP__CACHE_LINE - 4];
  cddp__atomic_u32 broken; /* 0, CDDP__BREAKING + rank, or 2 + what broke the group */
  cddp__atomic_u32 left;   /* ranks that have destroyed the group */
  uint32_t size;           /* ranks of the group, for its owner: see cddp__reap_boards */
  uint32_t spare;
  char broken_text[CDDP__ERROR_MAX]; /* valid when broken >= 2 */
  unsigned char pad4[CDDP__CACHE_LINE - 16];
  cddp__atomic_u32 cause; /* 0, CDDP__BREAKING, or 2 + what a loss to come is due to */
  char cause_text[CDDP__ERROR_MAX]; /* valid when cause >= 2 */
} cddp__board;
#define CDDP__BREAKING 0x80000000u /* the rank writes the text */

/* A piece of this rank's window, or (threads) of plain memory. Owned by cddp__arena. */
typedef struct cddp__extent {
  uint64_t base;       /* offset in the memfd, bytes */
  uint64_t size;       /* bytes, whole pages */
  char *address;       /* where this process has it; NULL: free */
  uint32_t generation; /* bumped by each allocation */
  bool dirty;          /* free, and its old bytes are still there */
} cddp__extent;

/* A peer's extent mapped here. */
typedef struct cddp__mapping {
  uint64_t base, size; /* as the extent's */
  char *address;       /* NULL: slot unused */
  uint32_t generation;
} cddp__mapping;

/* The ranks of one host that share memory: made by cddp_init or cddp_run_threads, used by the group
   and its sub-groups. lock guards everything that changes after creation. */
typedef struct cddp__host {
  cddp_allocator allocator;
  cddp_logger logger;
  pthread_mutex_t lock;
  int refs;              /* groups that use it */
  bool threads;          /* ranks are threads of this process: any pointer is shared */
  int size, index;       /* ranks, this rank */
  int fd;                /* the memfd; -1 for threads and a single rank without shared memory */
  int window_bits;       /* rank i's extents lie in [(i + 1) << bits, (i + 2) << bits) */
  int *pidfds;           /* [size]; -1 for this rank and for threads */
  uint32_t *pids;        /* [size] */
  int cores;             /* that this process may use */
  char name[72];         /* of the machine */
  cddp_record_header *record; /* flight recorder; NULL: off */
  uint64_t window_end;   /* bump pointer in this rank's window, offset in the memfd */
  uint32_t generation;   /* last one given out */
  cddp__extent *extents; /* own extents, used and free, by base */
  int extent_count, extent_capacity;
  cddp__mapping *maps; /* open-addressing hash of peers' extents, capacity a power of two */
  int map_count, map_capacity;
  cddp__ref zombies[64]; /* control blocks whose group is gone here but not yet on every rank */
  int zombie_count;
  struct cddp__net *net; /* the other hosts; NULL: there are none */
} cddp__host;

/* One collective call, as validated. */
typedef struct cddp__call {
  uint8_t kind;      /* CDDP__KIND_ALL_REDUCE ... */
  uint8_t dtype, op; /* cddp_dtype, cddp_op */
  int root;          /* -1 where there is none */
  const void *send;
  void *recv;
  size_t count; /* elements, per rank where the operation says so */
  size_t esize; /* bytes of an element */
  int tag;      /* messages; root is the peer then */
} cddp__call;
enum {
  CDDP__KIND_BARRIER,
  CDDP__KIND_ALL_REDUCE,
  CDDP__KIND_REDUCE,
  CDDP__KIND_BROADCAST,
  CDDP__KIND_ALL_GATHER,
  CDDP__KIND_GATHER,
  CDDP__KIND_SCATTER,
  CDDP__KIND_REDUCE_SCATTER,
  CDDP__KIND_ALL_TO_ALL,
  CDDP__KIND_GROUP_NEW,
  CDDP__KIND_DDP_CREATE,
  CDDP__KIND_DDP_WAIT,
  CDDP__KIND_DDP_STEP,
  CDDP__KIND_DDP_BUCKET,
  CDDP__KIND_DDP_BUFFERS,
  CDDP__KIND_DDP_JOIN,
  CDDP__KIND_COUNT,
  CDDP__KIND_SEND, /* on devices only, never compared */
  CDDP__KIND_RECV
};

/* What a group does with memory on a device. NULL in cddp_group and cddp_ddp: there is none. Where
   a function says *taken = false, all memory was the host's and the CPU backend goes on. */
typedef struct cddp__backend {
  cddp_result (*start)(cddp_group *g, const cddp__call *c, cddp_work **work, bool *taken);
  cddp_result (*message)(cddp_group *g, const cddp__call *c, cddp_work **work, bool *taken);
  cddp_result (*wait)(cddp_work *w); /* frees w */
  bool (*done)(cddp_work *w);
  cddp_result (*synchronize)(cddp_group *g);
  void (*set_stream)(cddp_group *g, void *stream);
  void *(*stream)(const cddp_group *g);
  void *(*alloc)(cddp_group *g, size_t bytes);
  void (*release)(cddp_group *g, void *p);
  /* Every rank of g calls it after cddp__split, child NULL if it is in no new group. */
  cddp_result (*split)(cddp_group *g, int color, int key, cddp_group *child);
  void (*leave)(cddp_group *g);
  cddp_result (*ddp_join)(cddp_ddp *d);
  cddp_result (*ddp_ready)(cddp_ddp *d, int param);
  cddp_result (*ddp_wait)(cddp_ddp *d);
  cddp_result (*ddp_step)(cddp_ddp *d, cddp_sgd *s);
  cddp_result (*ddp_clip)(cddp_ddp *d, double max_norm, double *norm);
  cddp_result (*ddp_sync_buffers)(cddp_ddp *d);
  void (*ddp_leave)(cddp_ddp *d); /* frees what is the backend's */
  cddp_result (*compress)(cddp_bucket *b, cddp_dtype small);
} cddp__backend;

/* Gets n bytes of a parameter's momentum, from `offset` on. */
typedef cddp_result (*cddp__take_fn)(void *context, int param, size_t offset, const void *bytes,
                                     size_t n);

/* What an optimizer does whose parameters lie on a device. */
typedef struct cddp__sgd_backend {
  cddp_result (*step)(cddp_sgd *s);
  cddp_result (*zero)(cddp_sgd *s);
  void (*leave)(cddp_sgd *s);
  /* Zeroed memory for whole momentum, and where each parameter's lies in it. */
  cddp_result (*room)(const cddp_sgd *s, void **flat, void **momentum);
  void (*free_room)(void *flat);
  /* Collective over the shard's group: all momentum goes to rank 0's take, piece by piece. */
  cddp_result (*collect)(const cddp_sgd *s, cddp__take_fn take, void *context);
  cddp_result (*copy)(cddp_sgd *s); /* all copies from data */
} cddp__sgd_backend;

/* A recv that waits for its parcel. In its group's list, in order of posting; guarded by mail_lock.
 */
typedef struct cddp__pending {
  struct cddp__pending *next;
  void *buf;
  size_t count;
  cddp_dtype dtype;
  int peer, tag;
  bool done;
  cddp_result result; /* valid when done */
  char text[CDDP__ERROR_MAX];
} cddp__pending;

/* An operation in flight. Collectives: in the queue of their group's engine, guarded by
   engine.lock. Sends: waits for its parcel. Receives: in the group's pending list. */
struct cddp_work {
  struct cddp_work *next;
  cddp_group *group;
  cddp_result (*run)(struct cddp_work *w); /* engine work; NULL for send and recv */
  cddp__call call;
  void *context; /* for run */
  cddp__site site;
  uint64_t record; /* number of its record */
  bool done;     /* guarded by engine.lock */
  bool owned;    /* engine frees it: nobody waits */
  cddp_result result;
  char text[CDDP__ERROR_MAX];
  int parcel;            /* send: its index; -1: none, or the message was copied */
  cddp__pending pending; /* recv */
  bool is_recv;
  const cddp__backend *backend; /* on a device: waited for there; NULL: none of the next two */
  void *event;                  /* recorded behind the operation; NULL: not yet issued */
  void *stage;                  /* recv through the host: its memory there */
};

/* Runs asynchronous operations of one group in order, on a thread started by the first of them. */
typedef struct cddp__engine {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* queue or done flags */
  pthread_t thread;
  bool started, stop;
  bool busy; /* some thread is inside the group's steps */
  cddp_work *first, *last;
} cddp__engine;

/* What the sender keeps about each of its parcels; guarded by mail_lock. */
typedef struct cddp__outgoing {
  void *stage; /* extent that holds the copy; kept for reuse; NULL: none yet */
  size_t stage_size;
  bool orphan; /* the send has returned: the parcel is freed when it is DONE */
  bool staged; /* the message is in stage */
} cddp__outgoing;

struct cddp_group {
  cddp__host *host;
  int rank, size;
  int *members;       /* [size] index on the host of each rank; -1: on another host */
  int *world;         /* [size] the rank in the job of each rank; NULL in a job on one host */
  struct cddp__hosts *hosts; /* NULL: all ranks are on this host */
  struct cddp__mpi *mpi;     /* NULL: the bytes are cddp's own affair */
  int locals, number; /* ranks of the group on this host, this one's place among them */
  int *places;        /* [size] index of each rank's seat */
  char *board_memory; /* control block: board, lines, seats, slots */
  cddp__board *board;
  cddp__seat *seats;
  char *slots;
  size_t slot_size;   /* bytes; 0: there are none */
  cddp__ref board_ref;
  bool board_mine; /* this rank allocated it */
  double timeout_s;
  uint32_t step;          /* of this rank; owner: the thread that runs a collective */
  uint32_t arrive_target; /* arrivals when this step is complete */
  int spin;               /* polls before yielding */
  bool crowded;           /* more ranks than cores */
  uint64_t calls;         /* collectives so far, for messages */
  uint64_t id;            /* alike on all ranks of the group; the world's is 0 */
  bool failed;            /* guarded by fail_lock, as are the next two */
  cddp_result fail_result;
  char fail_text[CDDP__ERROR_MAX];
  pthread_mutex_t fail_lock;
  cddp__engine engine;
  pthread_mutex_t mail_lock; /* guards pending, outgoing, posting of parcels */
  cddp__pending *pending_first, *pending_last;
  uint64_t parcel_number;
  cddp__outgoing outgoing[CDDP__PARCELS];
  bool internal; /* belongs to a cddp_ddp */
  const cddp__backend *backend; /* of memory on a device; NULL: none */
  void *plane;                  /* its state, a cddp__plane */
};

/* Callers keep their elements as any type, say _Float16: pure rooms
   access them through these. */
typedef float __attribute__((may_alias)) cddp__f32;
typedef double __attribute__((may_alias)) cddp__f64;
typedef int8_t __attribute__((may_alias)) cddp__i8;
typedef uint8_t __attribute__((may_alias)) cddp__u8;
typedef uint16_t __attribute__((may_alias)) cddp__u16;
typedef int32_t __attribute__((may_alias)) cddp__i32;
typedef uint32_t __attribute__((may_alias)) cddp__u32;
typedef int64_t __attribute__((may_alias)) cddp__i64;
typedef uint64_t __attribute__((may_alias)) cddp__u64;

/* One instruction set, as functions over arrays of n elements. All give the same bits. d may be
   exactly one of the inputs; any other overlap is not allowed. */
typedef struct cddp__kernels {
  /* d = canonical sum of k sources (2, 3, 4 or 8), then * f, or / f if divide (k = 2, 3).
     F32, F64, BF16 */
  void (*sum)(void *d, const void *const *s, int k, size_t n, cddp_dtype dtype, double f,
              bool divide);
  /* every buffer = canonical sum of k buffers (2, 4 or 8) * f. F32, F64, BF16 */
  void (*all)(void *const *bufs, int k, size_t n, cddp_dtype dtype, double f);
  /* d = a op b, not F16, BF16; op is PROD, MIN, MAX, integers: SUM */
  void (*pair)(void *d, const void *a, const void *b, size_t n, cddp_dtype dtype, cddp_op op);
  /* d = d * f or d / f, any but F16 and BF16; integers are always divided */
  void (*scale)(void *d, size_t n, cddp_dtype dtype, double f, bool divide);
  void (*widen)(cddp__f32 *d, const void *s, size_t n, cddp_dtype from);    /* F16, BF16 */
  void (*narrow)(void *d, const cddp__f32 *s, size_t n, cddp_dtype to);     /* F16, BF16 */
  double (*squares)(const void *p, size_t n, cddp_dtype dtype);               /* F32, F64 */
} cddp__kernels;

/* One reduction: what is the same for all its blocks. */
typedef struct cddp__fold {
  const cddp__kernels *kernels;
  const void *const *srcs; /* [nsrcs] */
  const int *widths;       /* [nsrcs] ranks that each is the sum of, in the compute type if more
                              than one; NULL: one each */
  bool wide;               /* the result is in the compute type */
  int nsrcs;
  cddp_dtype dtype;        /* of sources and result */
  cddp_dtype compute;      /* F32 for F16 and BF16, else dtype */
  cddp_op op;              /* SUM for AVG */
  size_t esize, csize;     /* bytes of an element of dtype, of compute */
  int leaf;                /* sources that one kernel call takes at most */
  bool direct;             /* one call of `sum` does it all */
  double factor;           /* of the result */
  bool divide;             /* by factor, not times */
} cddp__fold;

/* The arithmetic of one SGD step, in double; rounded once to each parameter's dtype. */
typedef struct cddp__sgd_rule {
  double step;     /* -lr */
  double momentum; /* 0: none */
  double intake;   /* 1 - dampening */
  double decay;    /* weight_decay; 0: none */
  bool nesterov, maximize, separate;
} cddp__sgd_rule;

/* A stretch of a data-parallel step: gradients and weights of 1, 2 or 4 ranks, one momentum. */
typedef struct cddp__sweep {
  cddp__f32 *gradients[4], *weights[4]; /* weights: this rank's first */
  cddp__f32 *momentum;
  float mean, momentum_factor, intake, decay, step; /* mean: 1 / ranks */
  bool decays;
} cddp__sweep;

/* The passes of a step over one block, fused or rounded after each multiply. */
typedef struct cddp__sgd_kernels {
  /* d = a + f * b */
  void (*add_f32)(cddp__f32 *d, const cddp__f32 *a, const cddp__f32 *b, size_t n, float f,
                  bool separate);
  void (*add_f64)(cddp__f64 *d, const cddp__f64 *a, const cddp__f64 *b, size_t n, double f,
                  bool separate);
  /* m = momentum * m + f * b */
  void (*mix_f32)(cddp__f32 *m, const cddp__f32 *b, size_t n, float momentum, float f,
                  bool separate);
  void (*mix_f64)(cddp__f64 *m, const cddp__f64 *b, size_t n, double momentum, double f,
                  bool separate);
  /* mean, decay, momentum, step, publish, zero; of a rule that cddp__rule_sweeps */
  void (*sweep)(const cddp__sweep *s, int ranks, size_t n);
} cddp__sgd_kernels;

/* Rows of a matrix, by number; owner: cddp__sparse. */
typedef struct cddp__rows {
  size_t n, capacity;
  int64_t *number;   /* [capacity] */
  char *values;      /* [capacity] rows of `bytes` bytes */
  struct cddp__row_order *order; /* [capacity] scratch for sorting */
} cddp__rows;

/* A parameter whose gradient is rows. Owned by its cddp_ddp; one thread at a time. */
typedef struct cddp__sparse {
  size_t rows, width, bytes; /* of the parameter; elements and bytes of a row */
  cddp__rows added;          /* since the last step, as they came; a number may come again */
  cddp__rows mean;           /* of the last cddp_ddp_wait, each number once, ascending */
  char *zeros;               /* a row */
} cddp__sparse;

struct cddp_sgd { /* all fields: the thread that calls cddp_sgd_* or cddp_ddp_step */
  cddp_allocator allocator;
  cddp_param *params;  /* [count], the caller's */
  int count;
  cddp_sgd_desc desc;
  cddp__sgd_rule rule; /* of desc */
  void **momentum;     /* [count] each parameter's buffer, as long as it; NULL: none yet */
  bool *started;       /* [count] whether the momentum has its first gradient */
  const unsigned char *used; /* [count] 0: skip the parameter; NULL: use all. The cddp_ddp's */
  cddp__sparse *const *sparse; /* [count] NULL: dense; NULL: all are. The cddp_ddp's */
  void *shard;         /* momentum that a cddp_ddp keeps in pieces; NULL: momentum above is whole */
  void (*drop)(cddp_sgd *s); /* frees the shard and NULLs it; set along with shard */
  const cddp__sgd_backend *backend; /* parameters on a device; NULL: in host memory */
  void *flat;                       /* their momentum in one piece; NULL: none */
  void **copies;                    /* [count] of desc.copy_dtype, the caller's; NULL: none */
};

/* Parameters dealt out to buckets: b has params[offsets[b]] .. params[offsets[b + 1] - 1]. */
typedef struct cddp__bucket_plan {
  cddp_allocator allocator;
  int bucket_count;
  int *offsets; /* [bucket_count + 1] */
  int *params;  /* indices of parameters */
} cddp__bucket_plan;

/* The generator of PyTorch on the CPU. On the stack of its user. */
typedef struct cddp__mt19937 {
  uint32_t state[624];
  int next; /* word of state to give out; 624: make new ones */
} cddp__mt19937;

/* Sockets, frames and store. */
#include <sys/epoll.h>
#include <sys/eventfd.h>

#define CDDP__ADDRESSES_MAX 16 /* addresses of one host name */
#define CDDP__COMMAND_MAX                                                                          \
  (64u << 20) /* bytes of one store command or reply, all strings together */
#define CDDP__SERVER_MEMORY ((size_t)1 << 30) /* bytes of all connections' buffers together */
#define CDDP__SERVER_PAUSE                                                                         \
  (256u << 10) /* unread output at which a connection's commands have to wait */
#define CDDP__NONCE_SIZE 32
#define CDDP__PROOF_SIZE 32

typedef struct cddp__sha256 {
  uint32_t h[8];
  uint64_t bytes;          /* hashed so far */
  unsigned char block[64]; /* the last bytes % 64 of them */
} cddp__sha256;

typedef struct cddp__address { /* a socket address */
  struct sockaddr_storage sa;
  socklen_t size; /* bytes of sa in use */
} cddp__address;

typedef struct cddp__span { /* bytes that belong to somebody else */
  const unsigned char *data;
  size_t size;
} cddp__span;

typedef struct cddp__buffer { /* a growing queue of bytes */
  unsigned char *data;
  size_t start, end; /* the bytes in use are data[start .. end) */
  size_t capacity;
} cddp__buffer;

typedef struct
    cddp__frame {   /* how far the command at the head of a stream has been looked through */
  size_t scanned;   /* bytes found good so far; 0 = its code byte has not come */
  size_t need;      /* bytes there must be before it is worth looking again */
  uint64_t strings; /* strings still to come */
  unsigned code;    /* cddp__code */
  unsigned index;   /* which string of its item comes next; 0 is the key */
} cddp__frame;

typedef struct cddp__queue_item { /* QUEUE_PUSH: its bytes follow the struct */
  struct cddp__queue_item *next;
  size_t size;
} cddp__queue_item;

typedef struct
    cddp__entry { /* a key of a map, bytes following the struct. Owner: whoever owns the map */
  struct cddp__entry *next; /* in its bucket */
  uint64_t hash;
  size_t key_size;
  unsigned char *value; /* value_size bytes of value_capacity */
  size_t value_size, value_capacity;
  bool present; /* false: only waited for, or only a queue */
  cddp__queue_item *queue_head, *queue_tail;
  int64_t queue_length;
  struct cddp__waiter *waiters,
      *last_waiter; /* server only: who waits for this key, oldest first */
} cddp__entry;

typedef struct cddp__map {
  cddp_allocator allocator;
  cddp__entry **buckets;
  size_t bucket_count; /* a power of two, or 0 */
  size_t entry_count;
  int64_t present_count;
  uint64_t seed; /* of the hash */
} cddp__map;

typedef struct cddp__waiter { /* one key that one connection waits for. Owner: server thread */
  struct cddp__waiter *next, *prev; /* of the same entry */
  struct cddp__waiter *mate;        /* of the same connection */
  cddp__entry *entry;               /* NULL once that key is there */
  struct cddp__conn *conn;
  int64_t world; /* BARRIER: released at this total; 0 = WAIT */
} cddp__waiter;

typedef struct
    cddp__source { /* what an epoll event points at; first member of what it is part of */
  int kind;        /* cddp__source_kind */
  int fd;
} cddp__source;

enum cddp__source_kind { CDDP__SOURCE_STOP, CDDP__SOURCE_LISTENER, CDDP__SOURCE_CONN };

enum cddp__conn_state {
  CDDP__CONN_FRESH,   /* nothing, or too little, has come to tell what it speaks */
  CDDP__CONN_PROVING, /* has our challenge and owes its proof */
  CDDP__CONN_PROVEN,  /* knows the secret; dialect not known yet */
  CDDP__CONN_SERVED,  /* speaks c10d, commands are answered */
  CDDP__CONN_REFUSED  /* gets the rest of its output, then ends */
};

typedef struct cddp__conn { /* a client of the server. Owner: server thread */
  cddp__source source;
  struct cddp__conn *next, *prev; /* all living ones, or (next) the dead to be freed */
  struct cddp__conn *next_ready;  /* those with commands to be run */
  int state;                      /* cddp__conn_state */
  bool ready;                     /* is on the ready list */
  bool dead;                      /* closed; freed at the end of the turn */
  bool ended;                     /* its end of stream has come */
  bool old;                       /* speaks the dialect of PyTorch 1.x */
  bool greeted;                   /* its first command was good */
  bool silent;                    /* callback channel of a 1.x client, may stay without a word */
  uint32_t events;                /* what epoll watches for */
  cddp__buffer in, out;
  cddp__frame frame;     /* of the command at the head of in */
  cddp__waiter *waiters; /* by mate; not empty = blocked in WAIT or BARRIER */
  size_t missing;        /* waiters whose key is still missing */
  double deadline;       /* dropped then; 0 = none. cddp__now() */
  double began;          /* when the command at the head of in began to arrive; 0 = none there */
  unsigned char nonces[2 * CDDP__NONCE_SIZE]; /* client's, then ours */
  cddp__address peer;
  unsigned char *will; /* a SET to be run when it closes, behind the code byte; NULL: none */
} cddp__conn;

typedef struct cddp__server { /* Owner: its thread, between start and join */
  pthread_t thread;
  cddp_allocator allocator;
  const char *secret; /* the store's; NULL = none */
  int epoll;
  cddp__source stop; /* an eventfd: written to by the destroyer */
  cddp__source listeners[CDDP__ADDRESSES_MAX];
  int listener_count;
  bool accepting; /* false while there are no descriptors left */
  double accept_again;
  cddp__map map;
  cddp__conn *conns, *ready, *dead;
  int armed;       /* connections with a deadline */
  double checked;  /* when deadlines were last looked at */
  size_t buffered; /* capacity of all connections' buffers, bytes */
} cddp__server;

typedef struct cddp__tcp { /* Lock: the store's */
  int fd;                  /* -1 = not connected */
  bool old;                /* speaks the dialect of PyTorch 1.x */
  cddp__address addresses[CDDP__ADDRESSES_MAX];
  int address_count;
  int port;
  cddp__server *server; /* NULL = only a client */
} cddp__tcp;

typedef struct cddp__file { /* Lock: the store's */
  int fd;
  uint64_t offset; /* of the first byte of the log that map does not know */
  unsigned char nonce[16];
  cddp__map map;
} cddp__file;

typedef struct cddp__store_ops cddp__store_ops;

struct cddp_store {
  pthread_mutex_t lock;       /* one operation at a time; guards all below */
  const cddp__store_ops *ops; /* the backend */
  cddp_allocator allocator;
  double timeout_s;     /* of operations that take no deadline */
  char *name;           /* for error texts: "host:port" or the path */
  char *secret;         /* NULL = none */
  cddp__buffer request; /* the command being built, or the record being written */
  cddp__buffer reply;   /* a value that came back */
  cddp__tcp tcp;
  cddp__file file;
};

/* A backend. Keys are the user's, the backend puts "/" before them. Called with the store's lock
   held. get and compare_set leave the value in s->reply. */
struct cddp__store_ops {
  cddp_result (*set)(cddp_store *s, const char *key, cddp__span value);
  cddp_result (*get)(cddp_store *s, const char *key); /* after a wait */
  cddp_result (*add)(cddp_store *s, const char *key, int64_t amount, int64_t *total);
  cddp_result (*compare_set)(cddp_store *s, const char *key, cddp__span expected,
                             cddp__span desired);
  cddp_result (*check)(cddp_store *s, const char *const *keys, int count, bool *all,
                       double deadline);
  cddp_result (*wait)(cddp_store *s, const char *const *keys, int count, double deadline);
  cddp_result (*remove)(cddp_store *s, const char *key, bool *deleted);
  cddp_result (*num_keys)(cddp_store *s, int64_t *count);
  void (*close)(cddp_store *s);
};

typedef struct cddp__store_options {
  const char *init_method; /* "tcp://host:port", "unix://name" or "file:///path" */
  bool is_server;
  int listen_fd; /* listening socket to serve on; closed in every case; -1 = bind one */
  bool reachable; /* by other hosts, even if this one's own name resolves to loopback here */
  double deadline;    /* for opening, cddp__now() */
  double timeout_s;   /* of operations that take no deadline; 0 = CDDP__TIMEOUT_S */
  const char *secret; /* NULL = CDDP_SECRET from the environment; "" = none */
  cddp_allocator allocator;
  const char *port_name; /* which variable the port came from, for error texts; NULL = none */
  const char *host_name; /* the same for the host */
} cddp__store_options;

/* One parameter inside a cddp_ddp. Offsets are into the arena, alike on every rank. */
typedef struct cddp__tensor {
  size_t offset, room; /* bytes; room is the size rounded up to a cache line, the rest stays zero */
  bool placed;         /* params[i].grad points into the arena */
  bool ready;          /* this step; guarded by lock */
  bool noted;          /* ready() under no_sync since the last step; guarded by lock */
  bool used;           /* by any rank, in the step being reduced */
  int bucket;
  char **data; /* [ranks] every rank's weights, NULL unless all lie in shared memory */
} cddp__tensor;

typedef struct cddp__bucket_state {
  int remaining; /* parameters not yet ready; guarded by lock */
  int *sorted;   /* its parameters by offset; owned by plan_order */
  int count;
  bool launched;  /* guarded by lock */
  cddp_work work; /* its reduction in the engine */
  cddp_ddp *ddp;
} cddp__bucket_state;

/* This rank's share of an SGD's momentum: the part of each parameter that lies in its slice. */
typedef struct cddp__shard {
  struct cddp__shard *next;
  cddp_sgd *sgd;
  cddp_ddp *ddp;
  char *mine; /* in the arena of the host: slice bytes of each dtype, one after the other */
  char **all; /* [ranks] where every rank's lies */
} cddp__shard;

/* Parameters of one dtype lie together in the arena. */
typedef struct cddp__section {
  size_t begin, end; /* bytes */
} cddp__section;

/* The payload of a step in which the ranks of a cddp_ddp meet. */
typedef struct cddp__muster {
  uint64_t missing;  /* parameters that are not ready on this rank */
  uint64_t settings; /* of the cddp_sgd without its lr; 0: there is none */
  double lr;
  uint32_t joined;   /* CDDP__JOINED*; 0: the rank has data */
} cddp__muster;
enum { CDDP__JOINED = 1, CDDP__JOINED_NOW };

struct cddp_ddp {
  cddp_group *group;   /* the user's */
  cddp_group *comm;    /* buckets are reduced here, by its engine */
  cddp_group *control; /* waits and steps agree here, on the caller's thread */
  cddp_group *hooks;   /* given to communication hooks; NULL without one */
  cddp_param *params;  /* the caller's */
  int count;
  cddp_ddp_desc desc;
  const cddp__backend *backend; /* the group's; NULL: gradients in host memory */
  void *gpu;                    /* its state, a cddp__gpu */
  size_t align;                 /* of each gradient in the arena, bytes */
  size_t limits[2];      /* of the first bucket and the others, bytes */
  cddp__tensor *tensors; /* [count] */
  char *arena;           /* all gradients */
  size_t bytes;
  char **arenas;                        /* [ranks] every rank's arena, mapped here */
  char **addresses;                     /* storage of tensors[].data */
  cddp__section sections[CDDP_I64 + 1]; /* by dtype */
  cddp__bucket_plan plan;
  cddp__bucket_state *buckets; /* [plan.bucket_count] */
  int *plan_order;             /* [count] storage of buckets[].sorted */
  char *scratch;               /* a bucket made contiguous for a hook */
  size_t scratch_bytes;
  pthread_mutex_t lock;
  int next_bucket; /* first one not launched; guarded by lock */
  int *arrival;    /* [count] order of ready(); guarded by lock */
  int arrived;
  bool no_sync, rebuilt;
  bool stepping;        /* the last step was cddp_ddp_step: buckets wait for the next one */
  unsigned char *used;  /* [count] of the last completed step; cddp_sgd points here */
  unsigned char *flags; /* [ranks][count] exchange of ready flags */
  cddp__shard *shards;
  cddp__sparse **sparse;       /* [count] NULL: dense; NULL: all are */
  struct cddp__row_list *lists; /* [ranks] scratch of merging, with sources [ranks] behind it */
  int *active;          /* [active_count] ranks that have not joined, as of the last meeting */
  int active_count;
  int present;          /* active_count of the last completed step */
  uint32_t joined;      /* this rank's CDDP__JOINED*; the engine reads it too, between steps */
  bool shadowed, stale; /* since the last join ended: some rank had joined; its weights are old */
  bool failed;
  cddp_result fail_result;
  char fail_text[CDDP__ERROR_MAX];
};

/* Connections to ranks of other hosts; steps and collectives that span hosts. */
#define CDDP__LINK_HELLO 80  /* bytes of a link's first message */
#define CDDP__LINK_ANSWER 64 /* of the answer, where there is a secret */
#define CDDP__LINK_HEAD 32   /* bytes before each message */

/* A send to another host that the system's buffers had no room for yet, or one that came before its
   recv. Its bytes follow the struct. */
typedef struct cddp__letter {
  struct cddp__letter *next;
  int from; /* rank in the group; letters received */
  int tag;
  uint32_t dtype;
  uint64_t count; /* elements */
  size_t size;    /* of the message, bytes; letters to be sent: with its head */
} cddp__letter;

/* A TCP connection between this rank and one of another host, for one purpose in one group. Owner:
   the thread that runs the group's collectives (COLLECTIVE), mail_lock (MAIL, WATCH), net.lock
   (before it is known what for). */
typedef struct cddp__link {
  struct cddp__link *next;
  int fd;    /* -1: closed */
  int state; /* CDDP__LINK_CONNECTING ... */
  int peer;  /* rank of the job; -1 not known yet */
  int rank;  /* the peer's in the group */
  int purpose;
  uint64_t group;
  bool mine;       /* this side has connected */
  int error;       /* errno that ended it; 0: the other side closed it */
  double deadline; /* strangers are dropped then */
  unsigned char hello[CDDP__LINK_HELLO + CDDP__NONCE_SIZE]; /* and the answering nonce */
  unsigned char hand[CDDP__LINK_ANSWER]; /* part of the handshake that goes out or comes in */
  size_t hand_size, hand_done;
  int stage; /* of the handshake */
  uint32_t sent_count, got_count; /* whole messages */
  uint64_t pass;                  /* of its group, in which it was found busy */
  size_t sent, got;               /* bytes of the current ones, heads included */
  unsigned char out_head[CDDP__LINK_HEAD], in_head[CDDP__LINK_HEAD];
  cddp__letter *letters, *last_letter; /* MAIL: to be sent, or the one that is coming in; else a
                                          reason for leaving, as it comes in */
  bool quiet;        /* COLLECTIVE: up, and no message is half sent; writer: the owner, fail_lock */
  bool parting;      /* the other side's goodbye has begun, its reason follows */
  bool odd;          /* a message of another size came than was due */
  cddp_result told;  /* of that reason, whose text is in letters; CDDP_OK: none */
} cddp__link;
enum { CDDP__LINK_CONNECTING, CDDP__LINK_SHAKING, CDDP__LINK_UP, CDDP__LINK_DEAD };
enum { CDDP__LINK_COLLECTIVE, CDDP__LINK_MAIL, CDDP__LINK_WATCH, CDDP__LINK_ABORT };

#define CDDP__LEFT_GROUPS 256 /* that are remembered, for ranks that call late */

/* Where a rank of the job runs. */
typedef struct cddp__home {
  int host;  /* index in net.hosts */
  int index; /* among the host's ranks */
  uint32_t pid;
  int port;
} cddp__home;

typedef struct cddp__host_entry {
  char name[72];
  cddp__address address; /* without a port */
  int size;              /* ranks */
} cddp__host_entry;

/* The other hosts, as rendezvous found them. Owned by cddp__host; constant but for what lock
   guards. */
typedef struct cddp__net {
  cddp_allocator allocator;
  int rank, size; /* of the job */
  int host, host_count;
  cddp__home *homes;       /* [size] */
  cddp__host_entry *hosts; /* [host_count] */
  unsigned char token[16]; /* of the job; whoever knows it came through the store */
  char *secret;            /* NULL: none */
  int listener;
  cddp__atomic_u32 loss;           /* 0, CDDP__BREAKING, or 2: a group of this rank has lost one, */
  char loss_text[CDDP__ERROR_MAX]; /* in words */
  pthread_mutex_t lock;            /* guards the rest */
  cddp__link *strangers;           /* have not said hello; newest first */
  int stranger_count;
  cddp__link *arrived;             /* said hello, wait for their group to ask for them */
  uint64_t left[CDDP__LEFT_GROUPS]; /* ids of groups that this rank has left, a ring */
  uint32_t left_count;
  struct cddp_group *groups;       /* that span hosts, by hosts->next */
  void (*close)(struct cddp__net *n);
} cddp__net;

/* A node of the canonical tree whose ranks [low, high) all lie on one host, its parent's not. */
typedef struct cddp__node {
  int low, high;
  int host; /* index in the group */
} cddp__node;

/* A message of a collective: out of this rank's memory, or into it. */
typedef struct cddp__item {
  int rank; /* the other side, in the group */
  char *data;
  size_t size; /* bytes; 0: there is no message */
  size_t least; /* of another size: bytes that must come all the same; 0: it must be that size */
} cddp__item;

/* What one group needs to span hosts. Host 0 of a group is that of its rank 0, and so on. */
typedef struct cddp__hosts {
  const struct cddp__hosts_ops *ops;
  cddp__net *net;
  struct cddp_group *next; /* in net.groups */
  int count, mine;         /* hosts of the group; this one's index */
  int me, locals;          /* this rank's number among the group's ranks here; how many */
  int most, carriers;      /* most and fewest ranks of the group on one host */
  int *host_of;            /* [size] */
  int *number;             /* [size] among the group's ranks of its host */
  int *ranks, *first;      /* ranks of host h: ranks[first[h]] .. ranks[first[h + 1] - 1] */
  cddp__node *nodes;       /* of the canonical tree, by rank */
  int node_count;
  int *widths;             /* [node_count] ranks of each node */
  cddp__link **links;      /* [size] COLLECTIVE; NULL: none yet */
  cddp__item *outs, *ins;  /* [size] */
  long *out_at, *in_at;    /* [count] how far a slice's exchange with each host is */
  size_t *node_bytes;      /* [count + 1] bytes an element of the nodes of the hosts before */
  size_t *node_at;         /* [node_count] of the nodes before it of its host */
  const void **pointers, **sums; /* [size] sources of a reduction */
  struct pollfd *fds;      /* [2 * size + 2] */
  uint64_t pass;           /* through outs or ins */
  unsigned char *lines;    /* leaders: all hosts' lines on the wire, this host's first, each host's
                              with the shares that ride with them */
  size_t *lines_at;        /* [count] bytes before each host's */
  int lowest_remote;       /* the lowest rank on another host */
  bool apart;              /* this rank's step is one of its host alone */
  char *stage;             /* what is on its way to or from other hosts */
  size_t stage_size;
  char **scratch;          /* [locals] shared: pieces of buffers that are not */
  char *my_scratch;        /* this rank's */
  bool has_scratch;
  char **bufs, **pieces;   /* [locals] this call's buffers; the parts of them now on their way */
  size_t *landed;          /* [locals] bytes of a landing that were taken */
  cddp__link **mail_out;   /* [mail_outs] mail_lock guards this and what follows */
  int mail_outs;
  cddp__link *mail_in, *watches;
  cddp__letter *letters, *last_letter; /* received, without a recv yet */
  size_t letter_bytes, queued_bytes;   /* received, to be sent */
  cddp__atomic_u32 *fates; /* [size] CDDP__FATE_*; any thread */
  double *fate_times;      /* [size] when it was learnt; written before fates, as are */
  int *fate_errors;        /* [size] link.error */
} cddp__hosts;
enum { CDDP__FATE_ALIVE, CDDP__FATE_LOST };

/* What lower rooms call when a group spans hosts. */
typedef struct cddp__hosts_ops {
  cddp_result (*meet)(struct cddp_group *g, void (*idle)(struct cddp_group *));
  void (*look)(struct cddp_group *g);  /* accepts connections, hears of failures elsewhere */
  void (*abort)(struct cddp_group *g); /* tells the other hosts why the group is broken */
  void (*hang_up)(struct cddp_group *g);
  bool (*gone)(const struct cddp_group *g, int rank, char *how, size_t n); /* how: may be NULL */
  cddp_result (*post)(struct cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                      int peer, int tag, bool *posted);
  void (*serve)(struct cddp_group *g);           /* mail_lock held */
  void (*doze)(struct cddp_group *g, int peer); /* until there may be news of peer */
} cddp__hosts_ops;

#ifdef CDDP_CUDA
/* Device memory that cddp_alloc gave out. */
typedef struct cddp__block {
  struct cddp__block *next;
  void *address;
} cddp__block;

/* How many CUDA graphs hold operations of a plane; any thread. There as long as one of them or the
   plane is. */
typedef struct cddp__graphs {
  cddp__atomic_u32 alive, refs;
} cddp__graphs;

/* A communicator on its way out, in a thread of its own: NCCL's calls that end one wait for
   streams, for CUDA graphs and for other ranks. Made with its plane; there until both are gone. */
typedef struct cddp__ending {
  cddp__atomic_u32 refs, done;
  ncclComm_t comm;
  ncclComm_t made; /* a communicator in the making; NCCL's threads write it */
  int device;
  bool abort; /* or destroy */
} cddp__ending;

/* A group's data plane on one device. turn: held while an operation is issued. lock: held for a
   moment, also by the watcher; it guards what is marked so. */
typedef struct cddp__plane {
  cddp_group *group;
  struct cddp__plane *next; /* watched planes; guarded by cddp__watch_lock */
  int device;
  cudaStream_t stream; /* the caller's */
  cudaStream_t side;   /* operations with a work handle, buckets; of high priority */
  cudaEvent_t fork;    /* orders side after stream; turn */
  cudaEvent_t join;    /* orders stream and side; the thread that calls collectives */
  pthread_mutex_t turn, lock;
  ncclComm_t comm;     /* lock; NULL: a single rank, no NCCL, or at its end */
  bool aborted;        /* lock; the plane has given its communicator away */
  cddp__ending *end;   /* the thread's that ends it, once aborted */
  cddp_group *parent;  /* lock; a cddp_ddp's private planes: the group that fails with them */
  bool doomed;         /* watcher; its group is broken */
  struct cddp__graphs *graphs; /* with operations of the plane; they run when the caller likes */
  unsigned long long capture;  /* lock; the latest one counted there, as CUDA numbers captures */
  cudaEvent_t last;    /* lock; behind the last operation */
  bool pending;        /* lock; last has not been seen done */
  cudaEvent_t probe;   /* lock; behind some operation, one at a time */
  bool probing;        /* lock; probe has not been seen done */
  double probe_since;  /* lock; when it was recorded */
  double last_since;   /* lock; when last was recorded */
  double left_since;   /* watcher; when a peer was first seen to have left; 0: none has */
  uint32_t calls;      /* notes written; lock */
  uint64_t hash;       /* of those calls; lock */
  uint64_t *hashes;    /* [CDDP__HASHES] the hash after each of the latest calls, a ring; lock */
  uint32_t *compared;  /* [ranks] calls of each found to be the same; lock */
  uint32_t told[CDDP__NEIGHBOURS]; /* calls that the neighbours have been told of; mail_lock */
  cddp_work *letters;  /* sends and receives to be issued together, oldest first; turn */
  cddp__block *blocks; /* lock */
  void *scratch;       /* device memory, used on side; the thread that calls collectives */
  size_t scratch_bytes;
  void *stage; /* host memory for operations through the host; one at a time */
  size_t stage_bytes;
} cddp__plane;

/* What every rank tells about its device when groups form. */
typedef struct cddp__device_report {
  int32_t result, device; /* cddp_result */
  char bus[32];           /* PCI bus id */
  char host[96];          /* identity of the machine */
  char name[96];          /* rank, pid and host, for messages */
  char text[CDDP__ERROR_MAX];
} cddp__device_report;

/* The first rank's id for a new communicator, or why it has none. */
typedef struct cddp__id_report {
  int32_t result;
  ncclUniqueId id;
  char text[CDDP__ERROR_MAX];
} cddp__id_report;

/* The device side of a cddp_ddp. Owner: the thread that steps; what ready() uses: cddp_ddp.lock. */
typedef struct cddp__gpu {
  cddp__plane *plane;   /* of d->comm */
  cudaEvent_t filled;   /* orders the side stream after the caller's */
  cudaEvent_t drained;  /* the other way round */
  cudaEvent_t *reduced; /* [count of parameters] behind the operations of each bucket */
  int event_count;
  cudaEvent_t *fills; /* through the host: [count] before each bucket, read by the engine */
  bool arena_from_nccl;
  void *registration;     /* of the arena with comm; NULL: none */
  cddp__call *calls;      /* [count] operations of one launch */
  cddp_segment *segments; /* [count] */
  double *scratch;        /* for clipping; NULL: not needed yet */
  char *mirror;           /* through the host: the arena there */
  bool scattered;         /* this step's buckets are reduce-scattered only */
} cddp__gpu;
#endif
/* >>logging ------------------------------------------------------------------------------------ */

static __thread char cddp__error_text[CDDP__ERROR_MAX];

/* Where the call this thread is in was made, and, until that call begins, where the next one is. */
static __thread cddp__site cddp__this_site, cddp__next_site;

/* A public call begins: what its macro noted is about this call and no later one. */
static void cddp__enter_call(void) {
  cddp__this_site = cddp__next_site;
  cddp__next_site.file = NULL;
}

/* Writes " at train.c:120", or nothing when the place is not known. */
static void cddp__describe_site(char *out, size_t n) {
  const char *file = cddp__this_site.file;
  size_t length = file != NULL ? strlen(file) : 0;
  out[0] = 0;
  if (file != NULL)
    snprintf(out, n, " at %s%s:%d", length > 80 ? "..." : "",
             file + (length > 80 ? length - 80 : 0), cddp__this_site.line);
}

static const char *const cddp__result_names[] = {
#define CDDP__NAME(name, text) #name,
    CDDP__RESULTS(CDDP__NAME)
#undef CDDP__NAME
};
static const char *const cddp__result_texts[] = {
#define CDDP__TEXT(name, text) text,
    CDDP__RESULTS(CDDP__TEXT)
#undef CDDP__TEXT
};

/* Sets this thread's error text and returns r: `return cddp__fail(CDDP_NETWORK, "connect to %s:
 * %s", ...)`. */
CDDP__PRINTF(2, 3)
static cddp_result cddp__fail(cddp_result r, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(cddp__error_text, sizeof cddp__error_text, format, args);
  va_end(args);
  return r;
}

/* Puts words before the error text that a lower room left: "cddp_init: " + text. */
CDDP__PRINTF(2, 3)
static cddp_result cddp__fail_in(cddp_result r, const char *format, ...) {
  char inner[CDDP__ERROR_MAX];
  size_t n;
  va_list args;
  memcpy(inner, cddp__error_text, sizeof inner);
  va_start(args, format);
  vsnprintf(cddp__error_text, sizeof cddp__error_text, format, args);
  va_end(args);
  n = strlen(cddp__error_text);
  snprintf(cddp__error_text + n, sizeof cddp__error_text - n, "%s", inner);
  return r;
}

static cddp_result cddp__fail_errno(const char *what) {
  return cddp__fail(CDDP_SYSTEM, "%s: %s", what, strerror(errno));
}

/* One line to the program's logger, if it has one. level 0 = error, 1 = warning, 2 = info. */
CDDP__PRINTF(3, 4)
static void cddp__log(const cddp_logger *l, int level, const char *format, ...) {
  char line[CDDP__ERROR_MAX];
  va_list args;
  if (l->log == NULL) return;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  l->log(level, line, l->user_data);
}

/* >>memory ------------------------------------------------------------------------------------- */

static void *cddp__malloc(const cddp_allocator *a, size_t bytes) {
  void *p = a != NULL && a->alloc != NULL ? a->alloc(bytes ? bytes : 1, a->user_data)
                                          : malloc(bytes ? bytes : 1);
  if (p == NULL) cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory allocating %zu bytes", bytes);
  return p;
}

static void *cddp__calloc(const cddp_allocator *a, size_t count, size_t size) {
  void *p;
  if (size != 0 && count > SIZE_MAX / size) {
    cddp__fail(CDDP_OUT_OF_MEMORY, "%zu elements of %zu bytes exceed the address space", count,
               size);
    return NULL;
  }
  p = cddp__malloc(a, count * size);
  if (p != NULL) memset(p, 0, count * size);
  return p;
}

static void cddp__free(const cddp_allocator *a, void *p) {
  if (p == NULL) return;
  if (a != NULL && a->free != NULL)
    a->free(p, a->user_data);
  else
    free(p);
}

static char *cddp__strdup(const cddp_allocator *a, const char *s) {
  size_t n = strlen(s) + 1;
  char *p = (char *)cddp__malloc(a, n);
  if (p != NULL) memcpy(p, s, n);
  return p;
}

static size_t cddp__min(size_t a, size_t b) { return a < b ? a : b; }
static size_t cddp__max(size_t a, size_t b) { return a > b ? a : b; }
static size_t cddp__round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

/* >>clock -------------------------------------------------------------------------------------- */

static double cddp__now(void) { /* seconds, monotonic */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void cddp__sleep(double seconds) {
  struct timespec t;
  if (seconds <= 0) return;
  t.tv_sec = (time_t)seconds;
  t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
  nanosleep(&t, NULL);
}

/* Milliseconds until the deadline for poll(2): 0 when past, at most max_ms, rounded up. */
static int cddp__poll_ms(double deadline, int max_ms) {
  double left = (deadline - cddp__now()) * 1e3;
  if (left <= 0) return 0;
  return left >= (double)max_ms ? max_ms : (int)left + 1;
}

/* >>threads ------------------------------------------------------------------------------------ */

/* Shared scalars live in cddp__atomic_* structs and are touched only by the functions below.
   Acquire on load, release on store, both on exchange and add: correct on weakly ordered machines
   too. */
static uint32_t cddp__load32(const cddp__atomic_u32 *a) {
  return __atomic_load_n(&a->v, __ATOMIC_ACQUIRE);
}
static void cddp__store32(cddp__atomic_u32 *a, uint32_t v) {
  __atomic_store_n(&a->v, v, __ATOMIC_RELEASE);
}
static uint32_t cddp__exchange32(cddp__atomic_u32 *a, uint32_t v) {
  return __atomic_exchange_n(&a->v, v, __ATOMIC_SEQ_CST);
}
static uint32_t cddp__add32(cddp__atomic_u32 *a, uint32_t v) { /* returns the new value */
  return __atomic_add_fetch(&a->v, v, __ATOMIC_SEQ_CST);
}
static bool cddp__swap32(cddp__atomic_u32 *a, uint32_t expected, uint32_t desired) {
  return __atomic_compare_exchange_n(&a->v, &expected, desired, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_ACQUIRE);
}

static void cddp__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* Sleeps while *a == value, until woken or for at most `seconds`; may return early for no reason.
   Works between processes and between threads. */
static void cddp__futex_wait(cddp__atomic_u32 *a, uint32_t value, double seconds) {
  struct timespec t;
  if (seconds <= 0) return;
  t.tv_sec = (time_t)seconds;
  t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
  syscall(SYS_futex, &a->v, 0 /* FUTEX_WAIT */, value, &t, NULL, 0);
}

static void cddp__futex_wake(cddp__atomic_u32 *a) {
  syscall(SYS_futex, &a->v, 1 /* FUTEX_WAKE */, INT_MAX, NULL, NULL, 0);
}

/* Starts a thread with all signals blocked, so that the program's handlers run on its own threads.
 */
static cddp_result cddp__thread_start(pthread_t *thread, void *(*fn)(void *), void *arg) {
  sigset_t all, old;
  int e;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  e = pthread_create(thread, NULL, fn, arg);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (e != 0) return cddp__fail(CDDP_SYSTEM, "pthread_create: %s", strerror(e));
  return CDDP_OK;
}

/* >>record -------------------------------------------------------------------------------------
   The flight recorder: a file per rank, mapped, so that the kernel keeps what was written when the
   rank is killed. Works as follows: an operation takes the next number and with it a place in the
   ring, and fills it in; start, end and result follow as they come, unless the place is another
   operation's by then. Any thread may record. Off (no CDDP_RECORD), all of it is one look at a NULL
   pointer. */

static size_t cddp__record_bytes(void) {
  return sizeof(cddp_record_header) + CDDP_RECORDS * sizeof(cddp_record);
}

static int64_t cddp__nanoseconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A name for a job: the time of its start, and the process. */
static uint64_t cddp__record_job(void) {
  return (uint64_t)cddp__nanoseconds(CLOCK_REALTIME) ^ (uint64_t)getpid() << 44;
}

/* Makes the file, at its full size: a disk that is full later must not end the program. */
static cddp_result cddp__record_map(const char *path, cddp_record_header **out) {
  size_t bytes = cddp__record_bytes();
  int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600), e = 0;
  void *p = MAP_FAILED;
  if (fd >= 0) e = posix_fallocate(fd, 0, (off_t)bytes);
  if (fd >= 0 && e == 0) p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (e == 0 && p == MAP_FAILED) e = errno;
  if (fd >= 0) close(fd);
  if (p == MAP_FAILED)
    return cddp__fail(CDDP_IO, "CDDP_RECORD: cannot make the flight recorder's file %s: %s", path,
                      strerror(e));
  *out = (cddp_record_header *)p;
  return CDDP_OK;
}

/* Opens the recorder if the environment asks for one; *out is NULL if not. */
static cddp_result cddp__record_open(cddp_record_header **out, uint64_t job, int rank, int size) {
  const char *dir = getenv("CDDP_RECORD");
  cddp_record_header *h = NULL;
  char path[4096];
  cddp_result r;
  *out = NULL;
  if (dir == NULL || dir[0] == 0) return CDDP_OK;
  snprintf(path, sizeof path, "%s/cddp-%016" PRIx64 "-%d.rec", dir, job, rank);
  if ((r = cddp__record_map(path, &h)) != CDDP_OK) return r;
  h->record_size = (uint32_t)sizeof(cddp_record);
  h->capacity = CDDP_RECORDS;
  h->rank = (uint32_t)rank;
  h->world_size = (uint32_t)size;
  h->pid = (uint32_t)getpid();
  h->job = job;
  h->created = cddp__nanoseconds(CLOCK_MONOTONIC);
  h->wall_offset = cddp__nanoseconds(CLOCK_REALTIME) - h->created;
  gethostname(h->host, sizeof h->host - 1);
  memcpy(h->magic, "cddprec1", sizeof h->magic);
  *out = h;
  return CDDP_OK;
}

static void cddp__record_close(cddp_record_header *h) {
  if (h == NULL) return;
  h->left = 1;
  munmap(h, cddp__record_bytes());
}

static cddp_record *cddp__record_at(cddp_record_header *h, uint64_t number) {
  return (cddp_record *)(void *)(h + 1) + (number - 1) % CDDP_RECORDS;
}

/* Notes an operation that has been asked for; returns its number. what: at most 15 bytes. */
static uint64_t cddp__record_new(cddp_record_header *h, const char *what, uint64_t group,
                                 uint64_t count, int dtype, int op, int root) {
  uint64_t number = __atomic_add_fetch(&h->next, 1, __ATOMIC_RELAXED);
  cddp_record *r = cddp__record_at(h, number);
  __atomic_exchange_n(&r->number, 0, __ATOMIC_SEQ_CST); /* a fence, which gcc's tsan lacks */
  r->sequence = 0;
  r->group = group;
  r->count = count;
  r->enqueued = cddp__nanoseconds(CLOCK_MONOTONIC);
  r->started = r->ended = 0;
  memset(r->what, 0, sizeof r->what);
  memcpy(r->what, what, cddp__min(strlen(what), sizeof r->what - 1));
  r->dtype = dtype;
  r->op = op;
  r->root = root;
  r->result = r->engine = r->tag = 0;
  __atomic_store_n(&r->number, number, __ATOMIC_RELEASE);
  return number;
}

static void cddp__record_start(cddp_record_header *h, uint64_t number, uint64_t sequence) {
  cddp_record *r = cddp__record_at(h, number);
  if (__atomic_load_n(&r->number, __ATOMIC_ACQUIRE) != number) return;
  r->sequence = sequence;
  r->started = cddp__nanoseconds(CLOCK_MONOTONIC);
}

static void cddp__record_end(cddp_record_header *h, uint64_t number, cddp_result result) {
  cddp_record *r = cddp__record_at(h, number);
  if (__atomic_load_n(&r->number, __ATOMIC_ACQUIRE) != number) return;
  r->result = (int32_t)result;
  r->ended = cddp__nanoseconds(CLOCK_MONOTONIC);
}

/* >>bytes -------------------------------------------------------------------------------------- */

static void cddp__put32(void *p, uint32_t v) { /* little-endian, any alignment */
  unsigned char *b = (unsigned char *)p;
  int i;
  for (i = 0; i < 4; i++) b[i] = (unsigned char)(v >> (8 * i));
}
static void cddp__put64(void *p, uint64_t v) {
  unsigned char *b = (unsigned char *)p;
  int i;
  for (i = 0; i < 8; i++) b[i] = (unsigned char)(v >> (8 * i));
}
static uint32_t cddp__get32(const void *p) {
  const unsigned char *b = (const unsigned char *)p;
  return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}
static uint64_t cddp__get64(const void *p) {
  return (uint64_t)cddp__get32(p) | (uint64_t)cddp__get32((const unsigned char *)p + 4) << 32;
}

static uint64_t cddp__hash64(uint64_t h, const void *data,
                             size_t n) { /* FNV-1a; start with h = 0 */
  const unsigned char *b = (const unsigned char *)data;
  size_t i;
  h ^= 0xcbf29ce484222325ull;
  for (i = 0; i < n; i++) h = (h ^ b[i]) * 0x100000001b3ull;
  return h;
}

/* Fills p from the kernel's generator; for nonces and names that must not be guessed. */
static cddp_result cddp__random(void *p, size_t n) {
  unsigned char *b = (unsigned char *)p;
  while (n > 0) {
    long got = syscall(SYS_getrandom, b, n, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return cddp__fail_errno("getrandom");
    b += got;
    n -= (size_t)got;
  }
  return CDDP_OK;
}

static uint32_t cddp__rotate(uint32_t v, int n) { return v >> n | v << (32 - n); }

static void cddp__sha256_block(uint32_t h[8], const unsigned char *p) {
  static const uint32_t k[64] = {
      0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
      0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
      0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
      0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
      0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
      0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
      0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
      0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
      0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
      0xc67178f2u};
  uint32_t w[64], v[8];
  int i;
  for (i = 0; i < 16; i++)
    w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 |
           p[4 * i + 3];
  for (i = 16; i < 64; i++) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (cddp__rotate(a, 7) ^ cddp__rotate(a, 18) ^ a >> 3) + w[i - 7] +
           (cddp__rotate(b, 17) ^ cddp__rotate(b, 19) ^ b >> 10);
  }
  memcpy(v, h, sizeof v);
  for (i = 0; i < 64; i++) {
    uint32_t e = v[4], a = v[0];
    uint32_t t = v[7] + (cddp__rotate(e, 6) ^ cddp__rotate(e, 11) ^ cddp__rotate(e, 25)) +
                 ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
    uint32_t u = (cddp__rotate(a, 2) ^ cddp__rotate(a, 13) ^ cddp__rotate(a, 22)) +
                 ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof v[0]);
    v[4] += t;
    v[0] = t + u;
  }
  for (i = 0; i < 8; i++) h[i] += v[i];
}

static void cddp__sha256_init(cddp__sha256 *s) {
  static const uint32_t h[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
  memcpy(s->h, h, sizeof h);
  s->bytes = 0;
}

static void cddp__sha256_add(cddp__sha256 *s, const void *data, size_t n) {
  const unsigned char *p = (const unsigned char *)data;
  size_t have = (size_t)(s->bytes % 64);
  s->bytes += n;
  while (n > 0) {
    size_t take = cddp__min(64 - have, n);
    memcpy(s->block + have, p, take);
    p += take;
    n -= take;
    have += take;
    if (have == 64) {
      cddp__sha256_block(s->h, s->block);
      have = 0;
    }
  }
}

static void cddp__sha256_end(cddp__sha256 *s, unsigned char digest[32]) {
  static const unsigned char pad[64] = {0x80};
  unsigned char length[8];
  uint64_t bits = s->bytes * 8;
  int i;
  for (i = 0; i < 8; i++) length[i] = (unsigned char)(bits >> (56 - 8 * i));
  cddp__sha256_add(s, pad, 1 + (size_t)((119 - s->bytes % 64) % 64));
  cddp__sha256_add(s, length, 8);
  for (i = 0; i < 32; i++) digest[i] = (unsigned char)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

/* RFC 2104 over label (with its NUL, so that no label is the beginning of another) and data. */
static void cddp__hmac(const char *secret, const char *label, const void *data, size_t n,
                       unsigned char mac[32]) {
  cddp__sha256 s;
  unsigned char key[64], inner[32];
  size_t size = strlen(secret), i;
  memset(key, 0, sizeof key);
  if (size > 64) {
    cddp__sha256_init(&s);
    cddp__sha256_add(&s, secret, size);
    cddp__sha256_end(&s, key);
  } else {
    memcpy(key, secret, size);
  }
  for (i = 0; i < 64; i++) key[i] ^= 0x36;
  cddp__sha256_init(&s);
  cddp__sha256_add(&s, key, 64);
  if (label != NULL) cddp__sha256_add(&s, label, strlen(label) + 1);
  cddp__sha256_add(&s, data, n);
  cddp__sha256_end(&s, inner);
  for (i = 0; i < 64; i++) key[i] ^= 0x36 ^ 0x5c;
  cddp__sha256_init(&s);
  cddp__sha256_add(&s, key, 64);
  cddp__sha256_add(&s, inner, 32);
  cddp__sha256_end(&s, mac);
}

/* Equality in a time that does not tell where the first difference is. */
static bool cddp__same_bytes(const void *a, const void *b, size_t n) {
  const volatile unsigned char *p = (const volatile unsigned char *)a;
  const volatile unsigned char *q = (const volatile unsigned char *)b;
  unsigned char difference = 0;
  size_t i;
  for (i = 0; i < n; i++) difference = (unsigned char)(difference | (p[i] ^ q[i]));
  return difference == 0;
}

/* >>sockets ------------------------------------------------------------------------------------ */

/* The calls that may do less than asked go through these, so that tests can make them. */
#ifndef CDDP__SEND
#define CDDP__SEND send
#endif
#ifndef CDDP__RECV
#define CDDP__RECV recv
#endif
#ifndef CDDP__PREAD
#define CDDP__PREAD pread
#endif
#ifndef CDDP__PWRITE
#define CDDP__PWRITE pwrite
#endif

static void cddp__close_fd(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

/* Waits until poll(2) has something to say about fd. */
static cddp_result cddp__wait_fd(int fd, short events, double deadline) {
  for (;;) {
    struct pollfd p;
    int n;
    p.fd = fd;
    p.events = events;
    p.revents = 0;
    n = poll(&p, 1, cddp__poll_ms(deadline, 60000));
    if (n > 0) return CDDP_OK;
    if (n < 0 && errno != EINTR) return cddp__fail_errno("poll");
    if (cddp__now() >= deadline) return cddp__fail(CDDP_TIMEOUT, "timed out");
  }
}

/* Sends all of it before the deadline. Text without the peer: callers put it in front. */
static cddp_result cddp__send_all(int fd, const void *data, size_t size, double deadline) {
  const unsigned char *p = (const unsigned char *)data;
  while (size > 0) {
    ssize_t n = CDDP__SEND(fd, p, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      p += n;
      size -= (size_t)n;
    } else if (errno == EAGAIN) {
      cddp_result r = cddp__wait_fd(fd, POLLOUT, deadline);
      if (r != CDDP_OK) return r;
    } else if (errno != EINTR) {
      return cddp__fail(CDDP_NETWORK, "send: %s", strerror(errno));
    }
  }
  return CDDP_OK;
}

/* Receives exactly size bytes before the deadline. errno is 0 when the peer ended the stream. */
static cddp_result cddp__recv_all(int fd, void *data, size_t size, double deadline) {
  unsigned char *p = (unsigned char *)data;
  while (size > 0) {
    ssize_t n = CDDP__RECV(fd, p, size, MSG_DONTWAIT);
    if (n > 0) {
      p += n;
      size -= (size_t)n;
    } else if (n == 0) {
      cddp__fail(CDDP_NETWORK, "the other side closed the connection");
      errno = 0;
      return CDDP_NETWORK;
    } else if (errno == EAGAIN) {
      cddp_result r = cddp__wait_fd(fd, POLLIN, deadline);
      if (r != CDDP_OK) return r;
    } else if (errno != EINTR) {
      return cddp__fail(CDDP_NETWORK, "recv: %s", strerror(errno));
    }
  }
  return CDDP_OK;
}

/* Splits "host:port" or "[::1]:port". */
static cddp_result cddp__host_port(const char *text, char *host, size_t host_capacity, int *port) {
  const char *colon = strrchr(text, ':'), *begin = text, *end = colon, *digit;
  long value = 0;
  if (colon == NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "'%s' has no port; write host:port", text);
  if (text[0] == '[') {
    begin = text + 1;
    end = colon - 1;
    if (end <= begin || *end != ']') {
      return cddp__fail(CDDP_INVALID_ARGUMENT, "'%s' is no address; write [::1]:port for IPv6",
                        text);
    }
  } else if (memchr(text, ':', (size_t)(colon - text)) != NULL) {
    return cddp__fail(CDDP_INVALID_ARGUMENT, "'%s' has several colons; write [::1]:port for IPv6",
                      text);
  }
  for (digit = colon + 1; *digit >= '0' && *digit <= '9' && value <= 65535; digit++)
    value = value * 10 + (*digit - '0');
  if (digit == colon + 1 || *digit != '\0' || value > 65535) {
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "'%s' in '%s' is no port; it is a number from 0 to 65535", colon + 1, text);
  }
  if (end == begin)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "'%s' has no host; write host:port", text);
  if ((size_t)(end - begin) >= host_capacity) {
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the host name in '%.80s...' is too long", text);
  }
  memcpy(host, begin, (size_t)(end - begin));
  host[end - begin] = '\0';
  *port = (int)value;
  return CDDP_OK;
}

static const struct sockaddr *cddp__sockaddr(const cddp__address *a) {
  return (const struct sockaddr *)(const void *)&a->sa;
}

/* "127.0.0.1:29500" or "[::1]:29500". */
static void cddp__address_text(const cddp__address *a, char *text, size_t capacity) {
  char host[128], port[16];
  bool v6 = a->sa.ss_family == AF_INET6;
  if (a->sa.ss_family == AF_UNIX) { /* the name begins behind a NUL, see cddp__unix_name */
    const struct sockaddr_un *u = (const struct sockaddr_un *)(const void *)&a->sa;
    size_t named = offsetof(struct sockaddr_un, sun_path) + 1;
    snprintf(text, capacity, "@%.*s", a->size > named ? (int)(a->size - named) : 0,
             u->sun_path + 1);
  } else if (getnameinfo(cddp__sockaddr(a), a->size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    snprintf(text, capacity, "(unknown address)");
  } else {
    snprintf(text, capacity, "%s%s%s:%s", v6 ? "[" : "", host, v6 ? "]" : "", port);
  }
}

static void cddp__address_set_port(cddp__address *a, int port) {
  if (a->sa.ss_family == AF_UNIX) return;
  if (a->sa.ss_family == AF_INET6)
    ((struct sockaddr_in6 *)(void *)&a->sa)->sin6_port = htons((uint16_t)port);
  else
    ((struct sockaddr_in *)(void *)&a->sa)->sin_port = htons((uint16_t)port);
}

static int cddp__address_port(const cddp__address *a) {
  if (a->sa.ss_family == AF_UNIX) return 0;
  if (a->sa.ss_family == AF_INET6)
    return ntohs(((const struct sockaddr_in6 *)(const void *)&a->sa)->sin6_port);
  return ntohs(((const struct sockaddr_in *)(const void *)&a->sa)->sin_port);
}

static bool cddp__address_same_host(const cddp__address *a, const cddp__address *b) {
  if (a->sa.ss_family != b->sa.ss_family || a->sa.ss_family == AF_UNIX) return false;
  if (a->sa.ss_family == AF_INET6) {
    const struct sockaddr_in6 *p = (const struct sockaddr_in6 *)(const void *)&a->sa;
    const struct sockaddr_in6 *q = (const struct sockaddr_in6 *)(const void *)&b->sa;
    return memcmp(&p->sin6_addr, &q->sin6_addr, sizeof p->sin6_addr) == 0 &&
           p->sin6_scope_id == q->sin6_scope_id;
  }
  return ((const struct sockaddr_in *)(const void *)&a->sa)->sin_addr.s_addr ==
         ((const struct sockaddr_in *)(const void *)&b->sa)->sin_addr.s_addr;
}

/* An abstract Unix socket: of this host alone, without a port and without a file. */
static void cddp__unix_name(cddp__address *a, const char *name) {
  struct sockaddr_un *u = (struct sockaddr_un *)(void *)&a->sa;
  size_t n = cddp__min(strlen(name), sizeof u->sun_path - 1);
  memset(a, 0, sizeof *a);
  u->sun_family = AF_UNIX;
  memcpy(u->sun_path + 1, name, n);
  a->size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

/* The addresses of a host name, each once. host_name: the variable it came from, or NULL. */
static cddp_result cddp__resolve(const char *host, int port, const char *host_name,
                                 cddp__address *out, int *count) {
  struct addrinfo hints, *list = NULL, *i;
  int e, n = 0, j;
  memset(&hints, 0, sizeof hints);
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  e = getaddrinfo(host, NULL, &hints, &list);
  if (e != 0) {
    return cddp__fail(
        CDDP_NETWORK,
        "the host name '%s'%s%s does not resolve: %s; correct it, use an address such as 127.0.0.1 "
        "(all ranks on one host), or add the name to /etc/hosts",
        host, host_name ? " in " : "", host_name ? host_name : "",
        e == EAI_SYSTEM ? strerror(errno) : gai_strerror(e));
  }
  for (i = list; i != NULL && n < CDDP__ADDRESSES_MAX; i = i->ai_next) {
    if ((i->ai_family != AF_INET && i->ai_family != AF_INET6) || i->ai_addrlen > sizeof out[n].sa)
      continue;
    memset(&out[n], 0, sizeof out[n]);
    memcpy(&out[n].sa, i->ai_addr, i->ai_addrlen);
    out[n].size = i->ai_addrlen;
    cddp__address_set_port(&out[n], port);
    for (j = 0; j < n && !cddp__address_same_host(&out[j], &out[n]); j++) continue;
    if (j == n) n++;
  }
  freeaddrinfo(list);
  *count = n;
  if (n == 0)
    return cddp__fail(CDDP_NETWORK, "the host name '%s' has no IPv4 or IPv6 address", host);
  return CDDP_OK;
}

static bool cddp__address_loopback(const cddp__address *a) {
  if (a->sa.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(
               &((const struct sockaddr_in6 *)(const void *)&a->sa)->sin6_addr) != 0;
  return a->sa.ss_family == AF_INET &&
         (ntohl(((const struct sockaddr_in *)(const void *)&a->sa)->sin_addr.s_addr) >> 24) == 127;
}

/* This host's addresses on interfaces that are up: those of one interface, or (name NULL) all but
   loopback's. Link-local ones are left out unless asked for by name. Returns how many. */
static int cddp__interface_addresses(const char *name, cddp__address *out, int capacity) {
  struct ifaddrs *list = NULL, *i;
  int n = 0;
  if (getifaddrs(&list) != 0) return 0;
  for (i = list; i != NULL && n < capacity; i = i->ifa_next) {
    int family = i->ifa_addr != NULL ? i->ifa_addr->sa_family : AF_UNSPEC;
    size_t size = family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if ((family != AF_INET && family != AF_INET6) || !(i->ifa_flags & IFF_UP)) continue;
    if (name != NULL ? strcmp(name, i->ifa_name) != 0 : (i->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    memset(&out[n], 0, sizeof out[n]);
    memcpy(&out[n].sa, i->ifa_addr, size);
    out[n].size = (socklen_t)size;
    if (name == NULL && family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)(void *)&out[n].sa)->sin6_addr))
      continue;
    n++;
  }
  freeifaddrs(list);
  return n;
}

static bool cddp__set_nodelay(int fd) {
  int on = 1;
  return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0 &&
         setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on) == 0;
}

/* Readies a connection with a. An abstract name any user may take, or call: the process at the
   other end must be this user's. errno says why not. */
static bool cddp__stream_ready(int fd, const cddp__address *a) {
  uint32_t c[3] = {0, 0, 0}; /* struct ucred: pid, uid, gid */
  socklen_t n = sizeof c;
  if (a->sa.ss_family != AF_UNIX) return cddp__set_nodelay(fd);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, c, &n) != 0) return false;
  errno = EPERM;
  return c[1] == (uint32_t)geteuid();
}

static bool cddp__set_nonblock(int fd) {
  int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

static bool cddp__set_cloexec(int fd) { return fcntl(fd, F_SETFD, FD_CLOEXEC) == 0; }

static bool cddp__local_address(int fd, cddp__address *a) {
  memset(a, 0, sizeof *a);
  a->size = sizeof a->sa;
  return getsockname(fd, (struct sockaddr *)(void *)&a->sa, &a->size) == 0;
}

/* A TCP connection to a port of this host where nobody listens may, when that port is also picked
   for the near end, connect to itself. */
static bool cddp__connected_to_itself(int fd) {
  cddp__address here, there;
  memset(&there, 0, sizeof there);
  there.size = sizeof there.sa;
  if (!cddp__local_address(fd, &here)) return false;
  if (getpeername(fd, (struct sockaddr *)(void *)&there.sa, &there.size) != 0) return false;
  return cddp__address_same_host(&here, &there) &&
         cddp__address_port(&here) == cddp__address_port(&there);
}

/* One attempt. Returns 0 or an errno; *out is a non-blocking socket, or -1. */
static int cddp__connect_address(const cddp__address *a, double deadline, int *out) {
  int error = 0, fd = socket(a->sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  socklen_t size = sizeof error;
  *out = -1;
  if (fd < 0) return errno;
  if (connect(fd, cddp__sockaddr(a), a->size) != 0) {
    if (errno != EINPROGRESS && errno != EINTR)
      error = errno;
    else if (cddp__wait_fd(fd, POLLOUT, deadline) != CDDP_OK)
      error = ETIMEDOUT;
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
      error = errno;
  }
  if (error == 0 && cddp__connected_to_itself(fd)) error = ECONNREFUSED;
  if (error == 0 && !cddp__stream_ready(fd, a)) error = errno;
  if (error != 0)
    close(fd);
  else
    *out = fd;
  return error;
}

/* A listening socket. Returns 0 or an errno. "::" serves IPv4 too, any other IPv6 address only
   itself. */
static int cddp__listen_address(const cddp__address *a, int *out) {
  static const struct in6_addr any = IN6ADDR_ANY_INIT;
  int on = 1, error = 0,
      fd = socket(a->sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  *out = -1;
  if (fd < 0) return errno;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (a->sa.ss_family == AF_INET6) {
    int v6only = memcmp(&((const struct sockaddr_in6 *)(const void *)&a->sa)->sin6_addr, &any,
                        sizeof any) != 0;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6only, sizeof v6only);
  }
  if (bind(fd, cddp__sockaddr(a), a->size) != 0 || listen(fd, SOMAXCONN) != 0) error = errno;
  if (error != 0)
    close(fd);
  else
    *out = fd;
  return error;
}

/* Why listening failed, and the cure. */
static cddp_result cddp__listen_failed(const cddp__address *a, int error, const char *port_name,
                                       const char *host_name) {
  char text[160], note[64] = "";
  cddp__address_text(a, text, sizeof text);
  if (port_name != NULL) snprintf(note, sizeof note, " (%s)", port_name);
  if (a->sa.ss_family == AF_UNIX) {
    return cddp__fail(CDDP_NETWORK,
                      "cannot listen on the abstract Unix socket %s: %s; set MASTER_ADDR and "
                      "MASTER_PORT for all ranks to meet over TCP instead",
                      text, strerror(error));
  }
  if (error == EADDRINUSE) {
    return cddp__fail(
        CDDP_NETWORK,
        "cannot listen on %s%s: the port is in use by another process; choose another %s or "
        "stop that one",
        text, note, port_name ? port_name : "port");
  }
  if (error == EADDRNOTAVAIL) {
    return cddp__fail(
        CDDP_NETWORK,
        "cannot listen on %s: this address is not one of this host's; the server (rank 0) must "
        "run on the host that %s names",
        text, host_name ? host_name : "the address");
  }
  if (error == EACCES) {
    return cddp__fail(
        CDDP_NETWORK,
        "cannot listen on %s%s: permission denied; ports below 1024 are for root, choose another",
        text, note);
  }
  return cddp__fail(CDDP_NETWORK, "cannot listen on %s%s: %s", text, note, strerror(error));
}

/* One listening socket for each address that this host has; all with one port, which is chosen by
   the system when *port is 0. An address in use is an error; one that this host lacks (::1 without
   IPv6) is left out when there are others. */
static cddp_result cddp__listen_all(cddp__address *a, int count, int *port, const char *port_name,
                                    const char *host_name, int *fds, int *fd_count) {
  bool any_port = *port == 0;
  int attempt, i, error = 0, worst = 0, n = 0;
  for (attempt = 0; attempt < 32; attempt++) {
    for (i = n = 0; i < count; i++) {
      cddp__address bound;
      cddp__address_set_port(&a[i], *port);
      error = cddp__listen_address(&a[i], &fds[n]);
      if (error == EADDRINUSE) break;
      worst = error != 0 ? i : worst;
      if (error != 0) continue;
      if (cddp__local_address(fds[n], &bound)) *port = cddp__address_port(&bound);
      n++;
    }
    if (error != EADDRINUSE && n > 0) {
      *fd_count = n;
      return CDDP_OK;
    }
    while (n > 0) cddp__close_fd(&fds[--n]);
    if (error != EADDRINUSE || !any_port) break;
    *port = 0;
  }
  if (i == count) i = worst;
  return cddp__listen_failed(&a[i], error, port_name, host_name);
}

/* A listening socket on 127.0.0.1 and a port of the system's choice. */
static cddp_result cddp__listen_any(int *fd, int *port) {
  cddp__address a[CDDP__ADDRESSES_MAX];
  int count = 0;
  cddp_result r = cddp__resolve("127.0.0.1", 0, NULL, a, &count);
  *port = 0;
  *fd = -1;
  return r != CDDP_OK ? r : cddp__listen_all(a, 1, port, NULL, NULL, fd, &count);
}

/* >>frames ------------------------------------------------------------------------------------- */

/* c10d's TCPStore commands. Integers are little-endian; a string is its length in 8 bytes, then its
   bytes. There are two dialects: the codes below from PyTorch 2.2 on, where VALIDATE comes first,
   and those of PyTorch 1.x. */
enum cddp__code {
  CDDP__VALIDATE,
  CDDP__SET,
  CDDP__COMPARE_SET,
  CDDP__GET,
  CDDP__ADD,
  CDDP__CHECK,
  CDDP__WAIT,
  CDDP__GETNUMKEYS,
  CDDP__DELETE_KEY,
  CDDP__APPEND,
  CDDP__MULTI_GET,
  CDDP__MULTI_SET,
  CDDP__CANCEL_WAIT,
  CDDP__PING,
  CDDP__QUEUE_PUSH,
  CDDP__QUEUE_POP,
  CDDP__QUEUE_LEN,
  CDDP__LIST_KEYS,
  CDDP__BARRIER,
  CDDP__CODES_NEW,                   /* the codes above are those on the wire */
  CDDP__WATCH_KEY = CDDP__CODES_NEW, /* PyTorch 1.x only, code 7 there */
  CDDP__CODES
};

static const unsigned char cddp__validate_bytes[5] = {CDDP__VALIDATE, 0xce, 0xf7, 0x85, 0x3c};

/* What follows the code byte: if counted, a u64 n and n items, else one item; an item is so many
   strings, the first of them a key; then tail bytes. */
static const struct cddp__shape {
  unsigned char counted, strings, tail;
} cddp__shapes[CDDP__CODES] = {{0, 0, 4}, {0, 2, 0}, {0, 3, 0}, {0, 1, 0}, {0, 1, 8},
                               {1, 1, 0}, {1, 1, 0}, {0, 0, 0}, {0, 1, 0}, {0, 2, 0},
                               {1, 1, 0}, {1, 2, 0}, {0, 0, 0}, {0, 0, 4}, {0, 2, 0},
                               {0, 1, 0}, {0, 1, 0}, {0, 0, 0}, {0, 1, 8}, {0, 1, 0}};

/* The code on the wire for a cddp__code, or the reverse; CDDP__CODES if there is none. */
static unsigned cddp__code_to_old(unsigned code) {
  if (code >= CDDP__SET && code <= CDDP__GETNUMKEYS) return code - 1;
  return code == CDDP__DELETE_KEY ? 8u : (unsigned)CDDP__CODES;
}
static unsigned cddp__code_from_wire(unsigned char byte, bool old) {
  if (!old) return byte < CDDP__CODES_NEW ? byte : (unsigned)CDDP__CODES;
  if (byte <= 6) return byte + 1u;
  return byte == 7   ? (unsigned)CDDP__WATCH_KEY
         : byte == 8 ? (unsigned)CDDP__DELETE_KEY
                     : (unsigned)CDDP__CODES;
}

enum cddp__frame_result { CDDP__FRAME_PART, CDDP__FRAME_WHOLE, CDDP__FRAME_BAD };

static int cddp__frame_need(cddp__frame *f, size_t bytes) {
  f->need = bytes;
  return CDDP__FRAME_PART;
}

/* Code byte and count. */
static int cddp__frame_head(cddp__frame *f, bool old, const unsigned char *p, size_t n) {
  const struct cddp__shape *shape;
  uint64_t count;
  if (n < 1) return cddp__frame_need(f, 1);
  f->code = cddp__code_from_wire(p[0], old);
  if (f->code == CDDP__CODES) return CDDP__FRAME_BAD;
  shape = &cddp__shapes[f->code];
  f->strings = shape->strings;
  f->index = 0;
  if (!shape->counted) {
    f->scanned = 1;
    return CDDP__FRAME_WHOLE;
  }
  if (n < 9) return cddp__frame_need(f, 9);
  count = cddp__get64(p + 1);
  if (count > CDDP__KEYS_MAX) return CDDP__FRAME_BAD;
  f->strings = count * shape->strings;
  f->scanned = 9;
  return CDDP__FRAME_WHOLE;
}

/* Looks for a whole command in the n bytes at p, which begin with its code byte; f->scanned is then
   its size. Works as follows: strings are skipped one by one, and where they end is remembered in
   *f (zeroed for each new command), so that the next call with more bytes at p goes on there: the
   cost is linear however the bytes come. Every limit is checked as soon as the length is seen,
   before there is room made for it. */
static int cddp__frame_scan(cddp__frame *f, bool old, const unsigned char *p, size_t n) {
  unsigned per_item;
  if (n < f->need) return CDDP__FRAME_PART;
  if (f->scanned == 0) {
    int r = cddp__frame_head(f, old, p, n);
    if (r != CDDP__FRAME_WHOLE) return r;
  }
  for (per_item = cddp__shapes[f->code].strings; f->strings > 0; f->strings--) {
    uint64_t size;
    if (n - f->scanned < 8) return cddp__frame_need(f, f->scanned + 8);
    size = cddp__get64(p + f->scanned);
    if (size > (f->index == 0 ? CDDP__KEY_MAX : CDDP__VALUE_MAX)) return CDDP__FRAME_BAD;
    if (f->scanned + 8 + size > CDDP__COMMAND_MAX) return CDDP__FRAME_BAD;
    if (n - f->scanned - 8 < size) return cddp__frame_need(f, f->scanned + 8 + (size_t)size);
    f->scanned += 8 + (size_t)size;
    f->index = (f->index + 1) % per_item;
  }
  if (n - f->scanned < cddp__shapes[f->code].tail)
    return cddp__frame_need(f, f->scanned + cddp__shapes[f->code].tail);
  f->scanned += cddp__shapes[f->code].tail;
  return CDDP__FRAME_WHOLE;
}

/* The string at *p of a command that cddp__frame_scan found whole; moves *p behind it. */
static cddp__span cddp__take_string(const unsigned char **p) {
  cddp__span s;
  s.size = (size_t)cddp__get64(*p);
  s.data = *p + 8;
  *p = s.data + s.size;
  return s;
}

static cddp__span cddp__span_of(const void *data, size_t size) {
  cddp__span s;
  s.data = (const unsigned char *)data;
  s.size = size;
  return s;
}

static bool cddp__span_equal(cddp__span a, cddp__span b) {
  return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

static size_t cddp__buffer_size(const cddp__buffer *b) { return b->end - b->start; }

static cddp__span cddp__buffer_span(const cddp__buffer *b) { /* NULL + 0 is not allowed in C */
  return cddp__span_of(b->data != NULL ? b->data + b->start : NULL, cddp__buffer_size(b));
}

/* Makes room for `more` bytes behind the end; false when there is no memory. */
static bool cddp__buffer_reserve(const cddp_allocator *a, cddp__buffer *b, size_t more) {
  size_t size = cddp__buffer_size(b), capacity = cddp__max(b->capacity, 256);
  unsigned char *data;
  if (b->capacity - b->end >= more) return true;
  if (b->start > 0 && b->start >= size &&
      b->capacity - size >= more) { /* moves at most as much as was consumed */
    memmove(b->data, b->data + b->start, size);
    b->start = 0;
    b->end = size;
    return true;
  }
  while (capacity / 2 < size || capacity - size < more)
    capacity *= 2; /* at least doubled: moves are rare */
  data = (unsigned char *)cddp__malloc(a, capacity);
  if (data == NULL) return false;
  if (size > 0) memcpy(data, b->data + b->start, size);
  cddp__free(a, b->data);
  b->data = data;
  b->capacity = capacity;
  b->start = 0;
  b->end = size;
  return true;
}

static bool cddp__buffer_add(const cddp_allocator *a, cddp__buffer *b, const void *data,
                             size_t size) {
  if (!cddp__buffer_reserve(a, b, size)) return false;
  if (size > 0) memcpy(b->data + b->end, data, size);
  b->end += size;
  return true;
}

static bool cddp__buffer_add64(const cddp_allocator *a, cddp__buffer *b, uint64_t v) {
  unsigned char bytes[8];
  cddp__put64(bytes, v);
  return cddp__buffer_add(a, b, bytes, 8);
}

static bool cddp__buffer_add_string(const cddp_allocator *a, cddp__buffer *b, cddp__span s) {
  return cddp__buffer_add64(a, b, s.size) && cddp__buffer_add(a, b, s.data, s.size);
}

static void cddp__buffer_free(const cddp_allocator *a, cddp__buffer *b) {
  cddp__free(a, b->data);
  memset(b, 0, sizeof *b);
}

/* Empties b, and frees it when it has grown beyond `keep` bytes. */
static void cddp__buffer_clear(const cddp_allocator *a, cddp__buffer *b, size_t keep) {
  if (b->capacity > keep) cddp__buffer_free(a, b);
  b->start = b->end = 0;
}

/* >>store -------------------------------------------------------------------------------------- */

/* The map: what the server and the file store hold. A hash table of chains. An entry is there while
   its key has a value, a queue or somebody waiting for it. */

static void cddp__map_init(cddp__map *m, const cddp_allocator *a) {
  memset(m, 0, sizeof *m);
  m->allocator = *a;
  if (cddp__random(&m->seed, sizeof m->seed) != CDDP_OK) m->seed = (uint64_t)(cddp__now() * 1e9);
}

static unsigned char *cddp__entry_key(cddp__entry *e) { return (unsigned char *)(e + 1); }

static cddp__span cddp__entry_value(const cddp__entry *e) {
  return cddp__span_of(e->value, e->value_size);
}

/* Whether WAIT and CHECK see the key. */
static bool cddp__entry_exists(const cddp__entry *e) {
  return e != NULL && (e->present || e->queue_head != NULL);
}

static cddp__entry *cddp__map_find(const cddp__map *m, cddp__span key) {
  uint64_t hash = cddp__hash64(m->seed, key.data, key.size);
  cddp__entry *e = m->bucket_count == 0 ? NULL : m->buckets[hash & (m->bucket_count - 1)];
  while (e != NULL && !(e->hash == hash &&
                        cddp__span_equal(key, cddp__span_of(cddp__entry_key(e), e->key_size))))
    e = e->next;
  return e;
}

/* More buckets; without memory for them chains just get longer. False only when there is no bucket
   at all. */
static bool cddp__map_grow(cddp__map *m) {
  size_t count = m->bucket_count == 0 ? 64 : m->bucket_count * 2, i;
  cddp__entry **buckets;
  if (m->entry_count < m->bucket_count) return true;
  buckets = (cddp__entry **)cddp__calloc(&m->allocator, count, sizeof *buckets);
  if (buckets == NULL) return m->bucket_count > 0;
  for (i = 0; i < m->bucket_count; i++) {
    while (m->buckets[i] != NULL) {
      cddp__entry *e = m->buckets[i];
      m->buckets[i] = e->next;
      e->next = buckets[e->hash & (count - 1)];
      buckets[e->hash & (count - 1)] = e;
    }
  }
  cddp__free(&m->allocator, m->buckets);
  m->buckets = buckets;
  m->bucket_count = count;
  return true;
}

/* The entry of key, made if need be without a value; NULL when there is no memory. */
static cddp__entry *cddp__map_touch(cddp__map *m, cddp__span key) {
  cddp__entry *e = cddp__map_find(m, key);
  if (e != NULL) return e;
  if (!cddp__map_grow(m)) return NULL;
  e = (cddp__entry *)cddp__malloc(&m->allocator, sizeof *e + key.size);
  if (e == NULL) return NULL;
  memset(e, 0, sizeof *e);
  if (key.size > 0) memcpy(cddp__entry_key(e), key.data, key.size);
  e->key_size = key.size;
  e->hash = cddp__hash64(m->seed, key.data, key.size);
  e->next = m->buckets[e->hash & (m->bucket_count - 1)];
  m->buckets[e->hash & (m->bucket_count - 1)] = e;
  m->entry_count++;
  return e;
}

/* Removes e when nothing keeps it. */
static void cddp__map_prune(cddp__map *m, cddp__entry *e) {
  cddp__entry **link = &m->buckets[e->hash & (m->bucket_count - 1)];
  if (e->present || e->queue_head != NULL || e->waiters != NULL) return;
  while (*link != e) link = &(*link)->next;
  *link = e->next;
  m->entry_count--;
  cddp__free(&m->allocator, e->value);
  cddp__free(&m->allocator, e);
}

/* Stores value (which must not be e's own); false, and nothing has changed, when there is no
   memory. */
static bool cddp__map_store(cddp__map *m, cddp__entry *e, cddp__span value) {
  if (e->value_capacity < value.size || e->value_capacity / 4 > value.size + 64) {
    unsigned char *data = (unsigned char *)cddp__malloc(&m->allocator, value.size);
    if (data == NULL) return false;
    cddp__free(&m->allocator, e->value);
    e->value = data;
    e->value_capacity = value.size;
  }
  if (value.size > 0) memcpy(e->value, value.data, value.size);
  e->value_size = value.size;
  m->present_count += !e->present;
  e->present = true;
  return true;
}

/* The entry of key, with that value now; NULL when there is no memory. */
static cddp__entry *cddp__map_put(cddp__map *m, cddp__span key, cddp__span value) {
  cddp__entry *e = cddp__map_touch(m, key);
  if (e == NULL || cddp__map_store(m, e, value)) return e;
  cddp__map_prune(m, e);
  return NULL;
}

static cddp__entry *cddp__map_append(cddp__map *m, cddp__span key, cddp__span more) {
  cddp__entry *e = cddp__map_touch(m, key);
  size_t size = e == NULL ? 0 : e->value_size + more.size;
  if (e == NULL) return NULL;
  if (e->present && e->value_capacity < size) {
    unsigned char *data = (unsigned char *)cddp__malloc(&m->allocator, 2 * size);
    if (data == NULL) return NULL;
    if (e->value_size > 0) memcpy(data, e->value, e->value_size);
    cddp__free(&m->allocator, e->value);
    e->value = data;
    e->value_capacity = 2 * size;
  }
  if (!e->present) return cddp__map_put(m, key, more);
  if (more.size > 0) memcpy(e->value + e->value_size, more.data, more.size);
  e->value_size = size;
  return e;
}

static bool cddp__map_remove(cddp__map *m, cddp__span key) {
  cddp__entry *e = cddp__map_find(m, key);
  if (e == NULL || !e->present) return false;
  e->present = false;
  e->value_size = 0;
  m->present_count--;
  cddp__map_prune(m, e);
  return true;
}

static bool cddp__queue_push(cddp__map *m, cddp__entry *e, cddp__span value) {
  cddp__queue_item *item =
      (cddp__queue_item *)cddp__malloc(&m->allocator, sizeof *item + value.size);
  if (item == NULL) return false;
  item->next = NULL;
  item->size = value.size;
  if (value.size > 0) memcpy(item + 1, value.data, value.size);
  if (e->queue_tail != NULL)
    e->queue_tail->next = item;
  else
    e->queue_head = item;
  e->queue_tail = item;
  e->queue_length++;
  return true;
}

/* Drops the oldest item of a queue that is not empty. */
static void cddp__queue_pop(cddp__map *m, cddp__entry *e) {
  cddp__queue_item *item = e->queue_head;
  e->queue_head = item->next;
  if (e->queue_head == NULL) e->queue_tail = NULL;
  e->queue_length--;
  cddp__free(&m->allocator, item);
}

static void cddp__map_free(cddp__map *m) { /* nobody waits any more */
  size_t i;
  for (i = 0; i < m->bucket_count; i++) {
    while (m->buckets[i] != NULL) {
      cddp__entry *e = m->buckets[i];
      m->buckets[i] = e->next;
      while (e->queue_head != NULL) cddp__queue_pop(m, e);
      cddp__free(&m->allocator, e->value);
      cddp__free(&m->allocator, e);
    }
  }
  cddp__free(&m->allocator, m->buckets);
  m->buckets = NULL;
  m->bucket_count = m->entry_count = 0;
  m->present_count = 0;
}

/* A decimal number with an optional sign, as ADD stores it. */
static bool cddp__parse_i64(cddp__span text, int64_t *out) {
  uint64_t v = 0, limit = INT64_MAX;
  size_t i = 0;
  bool negative = text.size > 0 && text.data[0] == '-';
  if (text.size > 0 && (text.data[0] == '-' || text.data[0] == '+')) i = 1;
  if (i == text.size) return false;
  limit += negative;
  for (; i < text.size; i++) {
    unsigned digit = (unsigned)text.data[i] - '0';
    if (digit > 9 || v > (limit - digit) / 10) return false;
    v = v * 10 + digit;
  }
  *out = (int64_t)(negative ? 0 - v : v);
  return true;
}

/* *total = the number at key (0 if there is none) + amount, wrapping; false when the value there is
   no number. */
static bool cddp__map_total(const cddp__map *m, cddp__span key, int64_t amount, int64_t *total) {
  const cddp__entry *e = cddp__map_find(m, key);
  int64_t have = 0;
  if (e != NULL && e->present && !cddp__parse_i64(cddp__entry_value(e), &have)) return false;
  *total = (int64_t)((uint64_t)have + (uint64_t)amount);
  return true;
}

static cddp__span cddp__decimal(int64_t v, char text[24]) {
  return cddp__span_of(text, (size_t)snprintf(text, 24, "%" PRId64, v));
}

/* Authentication of a connection, before the first byte of c10d. Works as follows: both sides prove
   that they know the secret without showing it, over one fresh nonce of each side, so that no
   recording of an earlier connection helps; the labels differ, so that neither side's proof serves
   as the other's. A stranger who just connects gets a nonce and nothing to guess the secret from.
   The connection is not encrypted.
     client: HELLO, client nonce          server: CHALLENGE, server nonce
     client: HMAC(client label, nonces)   server: WELCOME, HMAC(server label, nonces)
   Instead of an answer the server may send REFUSAL and a letter: S = a secret is needed here, W =
   not that one, N = there is none here. No c10d stream begins with the letter C, and as a count it
   would be absurd. */
#define CDDP__AUTH_HELLO "CDDPauth"
#define CDDP__AUTH_CHALLENGE "CDDPchal"
#define CDDP__AUTH_WELCOME "CDDPgood"
#define CDDP__AUTH_REFUSAL "CDDPdeny"
#define CDDP__LABEL_CLIENT "cddp store 1 client"
#define CDDP__LABEL_SERVER "cddp store 1 server"

/* The server: one thread with level-triggered epoll. Each connection has a buffer of input, whose
   commands are run one by one in cddp__conn_run, and one of output. A connection that waits is on
   the waiter lists of its missing keys and its next commands stay in its buffer; when the last key
   comes, it goes on the ready list and is run after the command that brought the key. Closed
   connections are freed at the end of the turn, as events and lists may still point at them.
   Nothing a client does stops the loop: each has its own limits and deadlines, and an error,
   malloc's included, ends only the connection it happened on. */
#ifndef CDDP__GREETING_S
#define CDDP__GREETING_S 5.0 /* for the first command, and the authentication */
#endif
#ifndef CDDP__COMMAND_S
#define CDDP__COMMAND_S 10.0 /* for a command, plus 1 per 64 KiB that came; for reading output */
#endif
#define CDDP__TICK_S 0.25       /* how often deadlines are looked at */
#define CDDP__SERVER_KEEP 4096u /* bytes of buffer that an idle connection keeps */

static void cddp__server_set_deadline(cddp__server *v, cddp__conn *c, double deadline) {
  v->armed += (deadline != 0) - (c->deadline != 0);
  c->deadline = deadline;
}

static void cddp__waiter_detach(cddp__waiter *w) {
  cddp__entry *e = w->entry;
  if (w->prev != NULL)
    w->prev->next = w->next;
  else
    e->waiters = w->next;
  if (w->next != NULL)
    w->next->prev = w->prev;
  else
    e->last_waiter = w->prev;
  w->entry = NULL;
}

/* Ends c's waiting, whatever is still missing. */
static void cddp__conn_unwait(cddp__server *v, cddp__conn *c) {
  while (c->waiters != NULL) {
    cddp__waiter *w = c->waiters;
    cddp__entry *e = w->entry;
    c->waiters = w->mate;
    if (e != NULL) {
      cddp__waiter_detach(w);
      cddp__map_prune(&v->map, e);
    }
    cddp__free(&v->allocator, w);
  }
  c->missing = 0;
  if (c->began != 0) c->began = cddp__now(); /* what came meanwhile did not have its chance yet */
}

/* Closes c; it is freed at the end of the turn. */
static void cddp__conn_kill(cddp__server *v, cddp__conn *c) {
  if (c->dead) return;
  c->dead = true;
  cddp__conn_unwait(v, c);
  cddp__server_set_deadline(v, c, 0);
  v->buffered -= c->in.capacity + c->out.capacity;
  cddp__buffer_free(&v->allocator, &c->in);
  cddp__buffer_free(&v->allocator, &c->out);
  cddp__close_fd(&c->source.fd);
  if (c->prev != NULL)
    c->prev->next = c->next;
  else
    v->conns = c->next;
  if (c->next != NULL) c->next->prev = c->prev;
  c->next = v->dead;
  v->dead = c;
  if (!v->accepting) v->accept_again = 0;
}

/* Room for `more` bytes in a connection's buffer; false beyond the limits. */
static bool cddp__conn_reserve(cddp__server *v, cddp__buffer *b, size_t more) {
  size_t before = b->capacity;
  if (cddp__buffer_size(b) + more > (size_t)CDDP__COMMAND_MAX + CDDP__VALUE_MAX) return false;
  if (v->buffered + more > CDDP__SERVER_MEMORY) return false;
  if (!cddp__buffer_reserve(&v->allocator, b, more)) return false;
  v->buffered = v->buffered - before + b->capacity;
  return true;
}

static void cddp__conn_tidy(cddp__server *v, cddp__buffer *b) {
  size_t before = b->capacity;
  if (cddp__buffer_size(b) > 0) return;
  cddp__buffer_clear(&v->allocator, b, CDDP__SERVER_KEEP);
  v->buffered = v->buffered - before + b->capacity;
}

static bool cddp__reply(cddp__server *v, cddp__conn *c, const void *data, size_t size) {
  if (!cddp__conn_reserve(v, &c->out, size)) return false;
  if (size > 0) memcpy(c->out.data + c->out.end, data, size);
  c->out.end += size;
  return true;
}
static bool cddp__reply8(cddp__server *v, cddp__conn *c, unsigned char byte) {
  return cddp__reply(v, c, &byte, 1);
}
static bool cddp__reply64(cddp__server *v, cddp__conn *c, int64_t value) {
  unsigned char bytes[8];
  cddp__put64(bytes, (uint64_t)value);
  return cddp__reply(v, c, bytes, 8);
}
static bool cddp__reply_string(cddp__server *v, cddp__conn *c, cddp__span s) {
  return cddp__reply64(v, c, (int64_t)s.size) && cddp__reply(v, c, s.data, s.size);
}

static void cddp__server_ready(cddp__server *v, cddp__conn *c) {
  if (c->ready || c->dead) return;
  c->ready = true;
  c->next_ready = v->ready;
  v->ready = c;
}

/* The key that w waits for has come. */
static void cddp__server_wake_one(cddp__server *v, cddp__waiter *w) {
  cddp__conn *c = w->conn;
  cddp__waiter_detach(w);
  if (--c->missing > 0) return;
  cddp__conn_unwait(v, c);
  if (cddp__reply8(v, c, 0))
    cddp__server_ready(v, c);
  else
    cddp__conn_kill(v, c);
}

/* Wakes those in WAIT (total 0), or those in BARRIER whose number has been reached. */
static void cddp__server_wake(cddp__server *v, cddp__entry *e, int64_t total) {
  cddp__waiter *w = e->waiters;
  while (w != NULL) {
    cddp__waiter *next = w->next;
    if (total == 0 ? w->world == 0 : w->world != 0 && total >= w->world)
      cddp__server_wake_one(v, w);
    w = next;
  }
}

static bool cddp__conn_add_waiter(cddp__server *v, cddp__conn *c, cddp__entry *e, int64_t world) {
  cddp__waiter *w = (cddp__waiter *)cddp__malloc(&v->allocator, sizeof *w);
  if (w == NULL) return false;
  w->next = NULL;
  w->prev = e->last_waiter;
  w->mate = c->waiters;
  w->entry = e;
  w->conn = c;
  w->world = world;
  if (w->prev != NULL)
    w->prev->next = w;
  else
    e->waiters = w;
  e->last_waiter = w;
  c->waiters = w;
  c->missing++;
  return true;
}

/* The commands. p is behind the code byte of a whole command. False ends the connection. */

/* A client's last will. A SET of a key that ends in CDDP__WILL stores nothing: its value, itself a
   SET's key and value, is stored when this connection closes, unless an empty value has come in
   the meantime. So a rank that dies early is known to those who wait for it. Other servers take the
   key for a key, and nobody reads it. */
#define CDDP__WILL "/cddp-last-will"

static bool cddp__is_will(cddp__span key) {
  size_t n = sizeof CDDP__WILL - 1;
  return key.size > n && memcmp(key.data + key.size - n, CDDP__WILL, n) == 0;
}

static bool cddp__make_will(cddp__server *v, cddp__conn *c, cddp__span value) {
  uint64_t key_size;
  cddp__free(&v->allocator, c->will);
  c->will = NULL;
  if (value.size == 0) return true;
  if (value.size < 16 || value.size > 4096) return false;
  key_size = cddp__get64(value.data);
  if (key_size > value.size - 16 ||
      cddp__get64(value.data + 8 + key_size) != value.size - 16 - key_size ||
      cddp__is_will(cddp__span_of(value.data + 8, (size_t)key_size)))
    return false;
  c->will = (unsigned char *)cddp__malloc(&v->allocator, value.size);
  if (c->will != NULL) memcpy(c->will, value.data, value.size);
  return c->will != NULL;
}

/* SET, MULTI_SET */
static bool cddp__serve_put(cddp__server *v, cddp__conn *c, const unsigned char *p, uint64_t n) {
  while (n-- > 0) {
    cddp__span key = cddp__take_string(&p), value = cddp__take_string(&p);
    cddp__entry *e;
    if (cddp__is_will(key)) {
      if (!cddp__make_will(v, c, value)) return false;
      continue;
    }
    e = cddp__map_put(&v->map, key, value);
    if (e == NULL) return false;
    cddp__server_wake(v, e, 0);
  }
  return true;
}

static bool cddp__serve_append(cddp__server *v, const unsigned char *p) {
  cddp__span key = cddp__take_string(&p), more = cddp__take_string(&p);
  cddp__entry *e = cddp__map_find(&v->map, key);
  if (e != NULL && e->value_size + more.size > CDDP__VALUE_MAX) return false;
  e = cddp__map_append(&v->map, key, more);
  if (e == NULL) return false;
  cddp__server_wake(v, e, 0);
  return true;
}

static bool cddp__serve_compare_set(cddp__server *v, cddp__conn *c, const unsigned char *p) {
  cddp__span key = cddp__take_string(&p), expected = cddp__take_string(&p),
             desired = cddp__take_string(&p);
  cddp__entry *e = cddp__map_find(&v->map, key);
  bool present = e != NULL && e->present;
  if (!present && expected.size > 0) return cddp__reply_string(v, c, expected);
  if (present && !cddp__span_equal(cddp__entry_value(e), expected))
    return cddp__reply_string(v, c, cddp__entry_value(e));
  e = cddp__map_put(&v->map, key, desired);
  if (e == NULL) return false;
  cddp__server_wake(v, e, 0);
  return cddp__reply_string(v, c, desired);
}

/* GET, MULTI_GET */
static bool cddp__serve_get(cddp__server *v, cddp__conn *c, const unsigned char *p, uint64_t n) {
  while (n-- > 0) {
    const cddp__entry *e = cddp__map_find(&v->map, cddp__take_string(&p));
    bool present = e != NULL && e->present;
    if (!cddp__reply_string(v, c, present ? cddp__entry_value(e) : cddp__span_of(NULL, 0)))
      return false;
  }
  return true;
}

/* Adds to the number at key and wakes who waits for it; false when it is none or out of memory. */
static bool cddp__server_add(cddp__server *v, cddp__span key, int64_t amount, int64_t *total) {
  char text[24];
  cddp__entry *e;
  if (!cddp__map_total(&v->map, key, amount, total)) return false;
  e = cddp__map_put(&v->map, key, cddp__decimal(*total, text));
  if (e != NULL) cddp__server_wake(v, e, 0);
  return e != NULL;
}

static bool cddp__serve_add(cddp__server *v, cddp__conn *c, const unsigned char *p) {
  cddp__span key = cddp__take_string(&p);
  int64_t total = 0;
  return cddp__server_add(v, key, (int64_t)cddp__get64(p), &total) && cddp__reply64(v, c, total);
}

static bool cddp__serve_check(cddp__server *v, cddp__conn *c, const unsigned char *p, uint64_t n) {
  bool all = true;
  while (n-- > 0 && all) all = cddp__entry_exists(cddp__map_find(&v->map, cddp__take_string(&p)));
  return cddp__reply8(v, c, all ? 0 : 1);
}

static bool cddp__serve_wait(cddp__server *v, cddp__conn *c, const unsigned char *p, uint64_t n) {
  while (n-- > 0) {
    cddp__span key = cddp__take_string(&p);
    cddp__entry *e = cddp__map_touch(&v->map, key);
    if (e == NULL) return false;
    if (cddp__entry_exists(e)) continue;
    if (!cddp__conn_add_waiter(v, c, e, 0)) {
      cddp__map_prune(&v->map, e);
      return false;
    }
  }
  return c->missing > 0 || cddp__reply8(v, c, 0);
}

static bool cddp__serve_barrier(cddp__server *v, cddp__conn *c, const unsigned char *p) {
  cddp__span key = cddp__take_string(&p);
  int64_t world = (int64_t)cddp__get64(p), total = 0;
  cddp__entry *e;
  if (!cddp__server_add(v, key, 1, &total)) return false;
  e = cddp__map_find(&v->map, key);
  cddp__server_wake(v, e, total);
  if (total >= world) return cddp__reply8(v, c, 0);
  return cddp__conn_add_waiter(v, c, e, world);
}

static bool cddp__serve_push(cddp__server *v, const unsigned char *p) {
  cddp__span key = cddp__take_string(&p), value = cddp__take_string(&p);
  cddp__entry *e = cddp__map_touch(&v->map, key);
  cddp__waiter *w;
  if (e == NULL) return false;
  if (!cddp__queue_push(&v->map, e, value)) {
    cddp__map_prune(&v->map, e);
    return false;
  }
  for (w = e->waiters; w != NULL && w->world != 0; w = w->next) continue;
  if (w != NULL) cddp__server_wake_one(v, w);
  return true;
}

static bool cddp__serve_pop(cddp__server *v, cddp__conn *c, const unsigned char *p) {
  cddp__entry *e = cddp__map_find(&v->map, cddp__take_string(&p));
  if (e == NULL || e->queue_head == NULL) return cddp__reply64(v, c, 0);
  if (!cddp__reply64(v, c, e->queue_length)) return false;
  if (!cddp__reply_string(v, c, cddp__span_of(e->queue_head + 1, e->queue_head->size)))
    return false;
  cddp__queue_pop(&v->map, e);
  cddp__map_prune(&v->map, e);
  return true;
}

static bool cddp__serve_list(cddp__server *v, cddp__conn *c) {
  size_t i;
  cddp__entry *e;
  if (!cddp__reply64(v, c, v->map.present_count)) return false;
  for (i = 0; i < v->map.bucket_count; i++) {
    for (e = v->map.buckets[i]; e != NULL; e = e->next) {
      if (e->present && !cddp__reply_string(v, c, cddp__span_of(cddp__entry_key(e), e->key_size)))
        return false;
    }
  }
  return true;
}

static bool cddp__serve(cddp__server *v, cddp__conn *c, unsigned code, const unsigned char *p) {
  uint64_t n = 1;
  const cddp__entry *e;
  if (cddp__shapes[code].counted) {
    n = cddp__get64(p);
    p += 8;
  }
  switch (code) {
  case CDDP__VALIDATE:
    return memcmp(p, cddp__validate_bytes + 1, 4) == 0;
  case CDDP__SET:
  case CDDP__MULTI_SET:
    return cddp__serve_put(v, c, p, n);
  case CDDP__COMPARE_SET:
    return cddp__serve_compare_set(v, c, p);
  case CDDP__GET:
  case CDDP__MULTI_GET:
    return cddp__serve_get(v, c, p, n);
  case CDDP__ADD:
    return cddp__serve_add(v, c, p);
  case CDDP__CHECK:
    return cddp__serve_check(v, c, p, n);
  case CDDP__WAIT:
    return cddp__serve_wait(v, c, p, n);
  case CDDP__GETNUMKEYS:
    return cddp__reply64(v, c, v->map.present_count);
  case CDDP__DELETE_KEY:
    return cddp__reply64(v, c, cddp__map_remove(&v->map, cddp__take_string(&p)));
  case CDDP__APPEND:
    return cddp__serve_append(v, p);
  case CDDP__CANCEL_WAIT:
    cddp__conn_unwait(v, c);
    return cddp__reply8(v, c, 1);
  case CDDP__PING:
    return cddp__reply(v, c, p, 4);
  case CDDP__QUEUE_PUSH:
    return cddp__serve_push(v, p);
  case CDDP__QUEUE_POP:
    return cddp__serve_pop(v, c, p);
  case CDDP__QUEUE_LEN:
    e = cddp__map_find(&v->map, cddp__take_string(&p));
    return cddp__reply64(v, c, e == NULL ? 0 : e->queue_length);
  case CDDP__LIST_KEYS:
    return cddp__serve_list(v, c);
  case CDDP__BARRIER:
    return cddp__serve_barrier(v, c, p);
  case CDDP__WATCH_KEY:
    return cddp__reply8(v, c, 3); /* registered; PyTorch never uses what would follow */
  default:
    return false;
  }
}

/* The states of a connection. Each looks at the head of its input and returns whether it got
   anywhere. */

static const unsigned char *cddp__conn_head(const cddp__conn *c) {
  return c->in.data + c->in.start;
}

static void cddp__conn_consume(cddp__conn *c, size_t n) {
  c->in.start += n;
  c->began = cddp__buffer_size(&c->in) > 0 ? cddp__now() : 0;
}

/* Says why, then ends the connection once that is read. */
static void cddp__conn_refuse(cddp__server *v, cddp__conn *c, char why) {
  c->state = CDDP__CONN_REFUSED;
  cddp__server_set_deadline(v, c, cddp__now() + 1);
  if (!cddp__reply(v, c, CDDP__AUTH_REFUSAL, 8) || !cddp__reply8(v, c, (unsigned char)why))
    cddp__conn_kill(v, c);
}

/* The first bytes tell: HELLO, VALIDATE, or a command of PyTorch 1.x. They are enough as soon as
   they can be only one. */
static bool cddp__conn_fresh(cddp__server *v, cddp__conn *c) {
  const unsigned char *p = cddp__conn_head(c);
  size_t size = cddp__buffer_size(&c->in);
  if (size == 0) return false;
  if (c->state == CDDP__CONN_FRESH && memcmp(p, CDDP__AUTH_HELLO, cddp__min(size, 8)) == 0) {
    if (size < 8 + CDDP__NONCE_SIZE) return false;
    if (v->secret == NULL) {
      cddp__conn_refuse(v, c, 'N');
      return false;
    }
    memcpy(c->nonces, p + 8, CDDP__NONCE_SIZE);
    cddp__conn_consume(c, 8 + CDDP__NONCE_SIZE);
    c->state = CDDP__CONN_PROVING;
    if (cddp__random(c->nonces + CDDP__NONCE_SIZE, CDDP__NONCE_SIZE) != CDDP_OK ||
        !cddp__reply(v, c, CDDP__AUTH_CHALLENGE, 8) ||
        !cddp__reply(v, c, c->nonces + CDDP__NONCE_SIZE, CDDP__NONCE_SIZE)) {
      cddp__conn_kill(v, c);
    }
    return !c->dead;
  }
  if (c->state == CDDP__CONN_FRESH && v->secret != NULL) {
    cddp__conn_refuse(v, c, 'S');
    return false;
  }
  c->old = memcmp(p, cddp__validate_bytes, cddp__min(size, 5)) != 0;
  if (!c->old && size < 5) return false;
  c->state = CDDP__CONN_SERVED;
  return true;
}

static bool cddp__conn_proving(cddp__server *v, cddp__conn *c) {
  unsigned char proof[CDDP__PROOF_SIZE];
  if (cddp__buffer_size(&c->in) < CDDP__PROOF_SIZE) return false;
  cddp__hmac(v->secret, CDDP__LABEL_CLIENT, c->nonces, sizeof c->nonces, proof);
  if (!cddp__same_bytes(proof, cddp__conn_head(c), sizeof proof)) {
    cddp__conn_refuse(v, c, 'W');
    return false;
  }
  cddp__conn_consume(c, sizeof proof);
  cddp__hmac(v->secret, CDDP__LABEL_SERVER, c->nonces, sizeof c->nonces, proof);
  c->state = CDDP__CONN_PROVEN;
  if (!cddp__reply(v, c, CDDP__AUTH_WELCOME, 8) || !cddp__reply(v, c, proof, sizeof proof))
    cddp__conn_kill(v, c);
  return !c->dead;
}

/* Runs one command. In a wait only CANCEL_WAIT is taken; what else comes stays where it is. PyTorch
   1.x has no CANCEL_WAIT: who speaks again there has given up waiting. */
static bool cddp__conn_served(cddp__server *v, cddp__conn *c) {
  size_t size = cddp__buffer_size(&c->in);
  int r;
  if (size == 0) return false;
  if (c->waiters != NULL && c->old) cddp__conn_unwait(v, c);
  if (c->waiters != NULL && *cddp__conn_head(c) != CDDP__CANCEL_WAIT) return false;
  r = cddp__frame_scan(&c->frame, c->old, cddp__conn_head(c), size);
  if (r == CDDP__FRAME_PART) return false;
  if (r == CDDP__FRAME_BAD || !cddp__serve(v, c, c->frame.code, cddp__conn_head(c) + 1)) {
    cddp__conn_kill(v, c);
    return false;
  }
  cddp__conn_consume(c, c->frame.scanned);
  memset(&c->frame, 0, sizeof c->frame);
  c->greeted = true;
  return true;
}

static bool cddp__conn_step(cddp__server *v, cddp__conn *c) {
  switch (c->state) {
  case CDDP__CONN_FRESH:
  case CDDP__CONN_PROVEN:
    return cddp__conn_fresh(v, c);
  case CDDP__CONN_PROVING:
    return cddp__conn_proving(v, c);
  case CDDP__CONN_SERVED:
    return cddp__conn_served(v, c);
  default:
    c->in.start = c->in.end;
    return false; /* refused: whatever it says */
  }
}

/* Sends what it can. False when the connection has failed. */
static bool cddp__conn_flush(cddp__server *v, cddp__conn *c) {
  bool moved = false;
  while (cddp__buffer_size(&c->out) > 0) {
    ssize_t n = CDDP__SEND(c->source.fd, c->out.data + c->out.start, cddp__buffer_size(&c->out),
                           MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) return false;
    if (n < 0) break;
    c->out.start += (size_t)n;
    moved = true;
    if (c->began != 0) c->began = cddp__now();
  }
  if (moved && c->state == CDDP__CONN_SERVED && c->deadline != 0)
    cddp__server_set_deadline(v, c, cddp__now() + CDDP__COMMAND_S);
  cddp__conn_tidy(v, &c->out);
  return true;
}

/* Which events and which deadline c has from now on. */
static void cddp__conn_arm(cddp__server *v, cddp__conn *c) {
  size_t out = cddp__buffer_size(&c->out), in = cddp__buffer_size(&c->in);
  bool full = out > CDDP__SERVER_PAUSE || (c->waiters != NULL && in >= CDDP__SERVER_PAUSE);
  struct epoll_event event;
  uint32_t events =
      (c->ended || full ? 0u : (uint32_t)EPOLLIN) | (out > 0 ? (uint32_t)EPOLLOUT : 0u);
  if (c->state == CDDP__CONN_REFUSED) {
    if (out == 0)
      shutdown(c->source.fd, SHUT_WR); /* closing at once might reset it before it has read why */
  } else if (out > 0) {
    if (c->deadline == 0) cddp__server_set_deadline(v, c, cddp__now() + CDDP__COMMAND_S);
  } else if (c->greeted && (c->waiters != NULL || in == 0)) {
    cddp__server_set_deadline(v, c, 0);
  } else if (c->greeted) {
    cddp__server_set_deadline(v, c, c->began + CDDP__COMMAND_S + (double)in / 65536);
  }
  if (events == c->events) return;
  event.events = events;
  event.data.ptr = c;
  if (epoll_ctl(v->epoll, EPOLL_CTL_MOD, c->source.fd, &event) == 0)
    c->events = events;
  else
    cddp__conn_kill(v, c);
}

/* Runs the commands that have come, as long as the answers are read. */
static void cddp__conn_run(cddp__server *v, cddp__conn *c) {
  bool more = true;
  while (more && !c->dead) {
    while (!c->dead && cddp__buffer_size(&c->out) <= CDDP__SERVER_PAUSE && cddp__conn_step(v, c))
      continue;
    more = !c->dead && cddp__buffer_size(&c->out) > CDDP__SERVER_PAUSE;
    if (!c->dead && !cddp__conn_flush(v, c)) cddp__conn_kill(v, c);
    more = more && cddp__buffer_size(&c->out) == 0;
  }
  if (c->dead) return;
  cddp__conn_tidy(v, &c->in);
  if (c->ended && cddp__buffer_size(&c->out) == 0)
    cddp__conn_kill(v, c);
  else
    cddp__conn_arm(v, c);
}

static void cddp__conn_read(cddp__server *v, cddp__conn *c) {
  size_t want = cddp__min(cddp__max(c->in.capacity, 512), 1u << 20), room;
  ssize_t n;
  if (c->in.capacity - c->in.end < 256 && !cddp__conn_reserve(v, &c->in, want)) {
    cddp__conn_kill(v, c);
    return;
  }
  room = cddp__min(c->in.capacity - c->in.end, 1u << 20);
  do n = CDDP__RECV(c->source.fd, c->in.data + c->in.end, room, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return;
  if (n < 0) {
    cddp__conn_kill(v, c);
    return;
  }
  if (n > 0 && c->began == 0) c->began = cddp__now();
  if (n > 0 && c->silent) { /* so it is none */
    c->silent = false;
    cddp__server_set_deadline(v, c, c->began + CDDP__GREETING_S);
  }
  if (n == 0) c->ended = true;
  c->in.end += (size_t)n;
  cddp__conn_run(v, c);
}

static void cddp__conn_event(cddp__server *v, cddp__conn *c, uint32_t events) {
  if (c->dead) return;
  if (events & EPOLLIN)
    cddp__conn_read(v, c);
  else if (events & (EPOLLHUP | EPOLLERR))
    cddp__conn_kill(v, c);
  else
    cddp__conn_run(v, c);
}

/* Makes a connection of fd, which it takes. */
static void cddp__server_add_conn(cddp__server *v, int fd, const cddp__address *peer) {
  struct epoll_event event;
  cddp__conn *c = (cddp__conn *)cddp__calloc(&v->allocator, 1, sizeof *c);
  if (c == NULL || !cddp__stream_ready(fd, peer)) {
    cddp__free(&v->allocator, c);
    close(fd);
    return;
  }
  c->source.kind = CDDP__SOURCE_CONN;
  c->source.fd = fd;
  c->peer = *peer;
  c->events = EPOLLIN;
  event.events = EPOLLIN;
  event.data.ptr = c;
  c->next = v->conns;
  if (v->conns != NULL) v->conns->prev = c;
  v->conns = c;
  cddp__server_set_deadline(v, c, cddp__now() + CDDP__GREETING_S);
  if (epoll_ctl(v->epoll, EPOLL_CTL_ADD, fd, &event) != 0) cddp__conn_kill(v, c);
}

/* Without descriptors or memory for a connection, accepting rests: the listening sockets would wake
   epoll for ever. */
static void cddp__server_set_accepting(cddp__server *v, bool on) {
  int i;
  for (i = 0; i < v->listener_count; i++) {
    struct epoll_event event;
    event.events = on ? (uint32_t)EPOLLIN : 0u;
    event.data.ptr = &v->listeners[i];
    epoll_ctl(v->epoll, EPOLL_CTL_MOD, v->listeners[i].fd, &event);
  }
  v->accepting = on;
  v->accept_again = cddp__now() + CDDP__TICK_S;
}

static void cddp__server_accept(cddp__server *v, int listener) {
  int i;
  for (i = 0; i < 64; i++) {
    cddp__address peer;
    int fd;
    memset(&peer, 0, sizeof peer);
    peer.size = sizeof peer.sa;
    fd = accept4(listener, (struct sockaddr *)(void *)&peer.sa, &peer.size,
                 SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0)
      cddp__server_add_conn(v, fd, &peer);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      break;
    else if (errno != EINTR && errno != ECONNABORTED)
      return;
  }
  if (i < 64) cddp__server_set_accepting(v, false);
}

/* Each client of PyTorch 1.x has a second connection on which it never says a word, and spins when
   that is closed. So a silent one may stay when its host has more 1.x clients than silent ones. */
static bool cddp__server_spares(cddp__server *v, cddp__conn *silent) {
  cddp__conn *c;
  int clients = 0;
  if (silent->state != CDDP__CONN_FRESH || cddp__buffer_size(&silent->in) > 0 || v->secret != NULL)
    return false;
  for (c = v->conns; c != NULL; c = c->next) {
    if (cddp__address_same_host(&c->peer, &silent->peer))
      clients += (c->greeted && c->old) - c->silent;
  }
  return clients > 0;
}

static void cddp__server_check_deadlines(cddp__server *v) {
  double now = cddp__now();
  cddp__conn *c, *next;
  if (!v->accepting && now >= v->accept_again) cddp__server_set_accepting(v, true);
  if (v->armed == 0 || now < v->checked + CDDP__TICK_S) return;
  v->checked = now;
  for (c = v->conns; c != NULL; c = next) {
    next = c->next;
    if (c->deadline == 0 || now < c->deadline) continue;
    if (cddp__server_spares(v, c)) {
      c->silent = true;
      cddp__server_set_deadline(v, c, 0);
    } else {
      cddp__conn_kill(v, c);
    }
  }
}

static void cddp__server_run_ready(cddp__server *v) {
  while (v->ready != NULL) {
    cddp__conn *c = v->ready;
    v->ready = c->next_ready;
    c->ready = false;
    if (!c->dead) cddp__conn_run(v, c);
  }
}

/* Carries the wills of the dead out, which may end others, and frees them. */
static void cddp__server_bury(cddp__server *v) {
  while (v->dead != NULL) {
    cddp__conn *c = v->dead;
    v->dead = c->next;
    if (c->will != NULL) (void)cddp__serve_put(v, c, c->will, 1); /* no memory: nobody is told */
    cddp__free(&v->allocator, c->will);
    cddp__free(&v->allocator, c);
  }
}

static void *cddp__server_main(void *arg) {
  cddp__server *v = (cddp__server *)arg;
  struct epoll_event events[64];
  for (;;) {
    int i, n = epoll_wait(v->epoll, events, 64,
                          v->armed > 0 || !v->accepting ? (int)(CDDP__TICK_S * 1000) : -1);
    if (n < 0 && errno != EINTR) return NULL;
    for (i = 0; i < n; i++) {
      cddp__source *source = (cddp__source *)events[i].data.ptr;
      if (source->kind == CDDP__SOURCE_STOP) return NULL;
      if (source->kind == CDDP__SOURCE_LISTENER)
        cddp__server_accept(v, source->fd);
      else
        cddp__conn_event(v, (cddp__conn *)events[i].data.ptr, events[i].events);
      cddp__server_run_ready(v);
    }
    cddp__server_check_deadlines(v);
    while (v->dead != NULL) {
      cddp__server_bury(v);
      cddp__server_run_ready(v);
    }
  }
}

/* Frees a server whose thread has ended or never ran. */
static void cddp__server_free(cddp__server *v) {
  cddp_allocator a = v->allocator;
  while (v->conns != NULL) cddp__conn_kill(v, v->conns);
  cddp__server_bury(v);
  cddp__map_free(&v->map);
  while (v->listener_count > 0) cddp__close_fd(&v->listeners[--v->listener_count].fd);
  cddp__close_fd(&v->stop.fd);
  cddp__close_fd(&v->epoll);
  cddp__free(&a, v);
}

static void cddp__server_stop(cddp__server *v) {
  uint64_t one = 1;
  while (write(v->stop.fd, &one, sizeof one) < 0 && errno == EINTR) continue;
  pthread_join(v->thread, NULL);
  cddp__server_free(v);
}

static cddp_result cddp__server_watch(cddp__server *v, cddp__source *source) {
  struct epoll_event event;
  event.events = EPOLLIN;
  event.data.ptr = source;
  return epoll_ctl(v->epoll, EPOLL_CTL_ADD, source->fd, &event) == 0
             ? CDDP_OK
             : cddp__fail_errno("epoll_ctl");
}

/* Serves on the given listening sockets, which it takes in every case. secret must outlive it. */
static cddp_result cddp__server_start(cddp__server **out, int *fds, int count, const char *secret,
                                      const cddp_allocator *a) {
  cddp_result r = CDDP_OK;
  int i;
  cddp__server *v = (cddp__server *)cddp__calloc(a, 1, sizeof *v);
  *out = NULL;
  if (v == NULL) {
    for (i = 0; i < count; i++) cddp__close_fd(&fds[i]);
    return CDDP_OUT_OF_MEMORY;
  }
  v->allocator = *a;
  v->secret = secret;
  v->accepting = true;
  v->listener_count = count;
  for (i = 0; i < count; i++) {
    v->listeners[i].kind = CDDP__SOURCE_LISTENER;
    v->listeners[i].fd = fds[i];
    fds[i] = -1;
  }
  cddp__map_init(&v->map, a);
  v->stop.kind = CDDP__SOURCE_STOP;
  v->stop.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  v->epoll = epoll_create1(EPOLL_CLOEXEC);
  if (v->stop.fd < 0 || v->epoll < 0)
    r = cddp__fail_errno(v->epoll < 0 ? "epoll_create1" : "eventfd");
  if (r == CDDP_OK) r = cddp__server_watch(v, &v->stop);
  for (i = 0; i < count && r == CDDP_OK; i++) r = cddp__server_watch(v, &v->listeners[i]);
  if (r == CDDP_OK) r = cddp__thread_start(&v->thread, cddp__server_main, v);
  if (r != CDDP_OK)
    cddp__server_free(v);
  else
    *out = v;
  return r;
}

/* The TCP client. */

static double cddp__soon(double seconds, double deadline) { /* the earlier of both */
  double t = cddp__now() + seconds;
  return t < deadline ? t : deadline;
}

static cddp_result cddp__tcp_refused(char why) {
  switch (why) {
  case 'S':
    return cddp__fail(
        CDDP_UNAUTHORIZED,
        "the server wants a secret and this process has none; set CDDP_SECRET (or the "
        "desc's secret) to the server's");
  case 'W':
    return cddp__fail(
        CDDP_UNAUTHORIZED,
        "the server has another secret; set the same CDDP_SECRET (or desc's secret) on "
        "every rank");
  default:
    return cddp__fail(
        CDDP_UNAUTHORIZED,
        "this process has a secret and the server has none; set CDDP_SECRET there too, or "
        "unset it here");
  }
}

/* What begins an answer: 8 bytes in head, which must be `want` unless that is NULL; or a refusal,
   or something else. */
static cddp_result cddp__tcp_expect(int fd, const char *want, unsigned char head[8],
                                    double deadline, bool *final) {
  cddp_result r = cddp__recv_all(fd, head, 8, deadline);
  if (r != CDDP_OK) return r;
  if (memcmp(head, CDDP__AUTH_REFUSAL, 8) == 0) {
    unsigned char why;
    r = cddp__recv_all(fd, &why, 1, deadline);
    *final = r == CDDP_OK;
    return r == CDDP_OK ? cddp__tcp_refused((char)why) : r;
  }
  if (want != NULL ? memcmp(head, want, 8) == 0 : cddp__get64(head) < (uint64_t)1 << 40)
    return CDDP_OK;
  *final = true;
  return cddp__fail(CDDP_NETWORK, "what answers there is no %s; is that another program's port?",
                    want != NULL ? "cddp store" : "c10d store");
}

static cddp_result cddp__tcp_authenticate(int fd, const char *secret, double deadline,
                                          bool *final) {
  unsigned char hello[8 + CDDP__NONCE_SIZE], nonces[2 * CDDP__NONCE_SIZE], proof[CDDP__PROOF_SIZE],
      theirs[CDDP__PROOF_SIZE];
  unsigned char head[8];
  cddp_result r = cddp__random(nonces, CDDP__NONCE_SIZE);
  memcpy(hello, CDDP__AUTH_HELLO, 8);
  memcpy(hello + 8, nonces, CDDP__NONCE_SIZE);
  if (r == CDDP_OK) r = cddp__send_all(fd, hello, sizeof hello, deadline);
  if (r == CDDP_OK) r = cddp__tcp_expect(fd, CDDP__AUTH_CHALLENGE, head, deadline, final);
  if (r == CDDP_OK) r = cddp__recv_all(fd, nonces + CDDP__NONCE_SIZE, CDDP__NONCE_SIZE, deadline);
  if (r != CDDP_OK) return r;
  cddp__hmac(secret, CDDP__LABEL_CLIENT, nonces, sizeof nonces, proof);
  r = cddp__send_all(fd, proof, sizeof proof, deadline);
  if (r == CDDP_OK) r = cddp__tcp_expect(fd, CDDP__AUTH_WELCOME, head, deadline, final);
  if (r == CDDP_OK) r = cddp__recv_all(fd, theirs, sizeof theirs, deadline);
  if (r != CDDP_OK) return r;
  cddp__hmac(secret, CDDP__LABEL_SERVER, nonces, sizeof nonces, proof);
  if (cddp__same_bytes(proof, theirs, sizeof proof)) return CDDP_OK;
  *final = true;
  return cddp__fail(CDDP_UNAUTHORIZED, "what answers there does not know the secret");
}

/* The beginning of a connection, up to the first answer: only that shows that there is a store and
   that it takes us. Sets *final when trying again is no use. */
static cddp_result cddp__tcp_greet(cddp_store *s, int fd, double deadline, bool *final) {
  unsigned char head[8], code = CDDP__GETNUMKEYS;
  cddp_result r = CDDP_OK;
  if (s->tcp.old) code = (unsigned char)cddp__code_to_old(code);
  if (s->secret != NULL) r = cddp__tcp_authenticate(fd, s->secret, deadline, final);
  if (r == CDDP_OK && !s->tcp.old)
    r = cddp__send_all(fd, cddp__validate_bytes, sizeof cddp__validate_bytes, deadline);
  if (r == CDDP_OK) r = cddp__send_all(fd, &code, 1, deadline);
  if (r == CDDP_OK) r = cddp__tcp_expect(fd, NULL, head, deadline, final);
  return r;
}

/* Tries each address once. */
static cddp_result cddp__tcp_try(cddp_store *s, double deadline, bool *final, bool *hung_up) {
  cddp__tcp *t = &s->tcp;
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; i < t->address_count && !*final; i++) {
    char text[160];
    int fd, error = cddp__connect_address(&t->addresses[i], cddp__soon(5, deadline), &fd);
    if (error == 0) {
      r = cddp__tcp_greet(s, fd, deadline, final);
      if (r == CDDP_OK) {
        t->fd = fd;
        return r;
      }
      *hung_up = r == CDDP_NETWORK;
      close(fd);
    } else {
      cddp__address_text(&t->addresses[i], text, sizeof text);
      bool foreign = error == EPERM && t->addresses[i].sa.ss_family == AF_UNIX;
      *final = error == EMFILE || error == ENFILE || foreign;
      *hung_up = false;
      r = cddp__fail(*final && !foreign ? CDDP_SYSTEM : CDDP_NETWORK, "connect to %s: %s", text,
                     foreign ? "another user's process listens there; set MASTER_ADDR and "
                               "MASTER_PORT for all ranks to meet over TCP instead"
                             : strerror(error));
    }
  }
  return r;
}

/* Connects, again and again until the deadline, as ranks may start long before the server; or, once
   only, to a server that was there before. One that takes connections and hangs up, for half a
   minute, is no store. */
static cddp_result cddp__tcp_connect(cddp_store *s, double deadline, bool once) {
  double pause = 0.001, started = cddp__now(), hung_up_since = 0;
  uint64_t dice = cddp__hash64((uint64_t)getpid(), &started, sizeof started);
  for (;;) {
    bool final = false, hung_up = false;
    cddp_result r = cddp__tcp_try(s, deadline, &final, &hung_up);
    if (r == CDDP_OK) return r;
    if (!hung_up)
      hung_up_since = 0;
    else if (hung_up_since == 0)
      hung_up_since = cddp__now();
    else if (cddp__now() > hung_up_since + 30)
      final = true;
    if (final || once) return cddp__fail_in(r, "store at %s: ", s->name);
    if (cddp__now() >= deadline) {
      return cddp__fail_in(
          CDDP_TIMEOUT,
          "no connection to the store at %s within %.1f s; rank 0 (the server) may not be running, "
          "or the address may be wrong. Last error: ",
          s->name, cddp__now() - started);
    }
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    cddp__sleep(cddp__soon(pause * (0.5 + (double)(dice >> 40) / (1 << 25)), deadline) -
                cddp__now());
    pause = pause < 0.125 ? pause * 2 : 0.25;
  }
}

/* After a failure in the middle of a dialogue nothing that comes can be trusted: the next operation
   connects anew. */
static cddp_result cddp__tcp_lost(cddp_store *s, cddp_result r) {
  cddp__close_fd(&s->tcp.fd);
  return cddp__fail_in(r, "store at %s: ", s->name);
}

/* Starts a command in s->request. */
static cddp_result cddp__tcp_begin(cddp_store *s, unsigned code) {
  unsigned char byte = (unsigned char)(s->tcp.old ? cddp__code_to_old(code) : code);
  cddp_result r = CDDP_OK;
  cddp__buffer_clear(&s->allocator, &s->request, 65536);
  if (s->tcp.fd < 0) r = cddp__tcp_connect(s, cddp__now() + s->timeout_s, true);
  if (r == CDDP_OK && !cddp__buffer_add(&s->allocator, &s->request, &byte, 1))
    r = CDDP_OUT_OF_MEMORY;
  return r;
}

static bool cddp__put_key(cddp_store *s, const char *key) {
  size_t n = strlen(key);
  return cddp__buffer_add64(&s->allocator, &s->request, n + 1) &&
         cddp__buffer_add(&s->allocator, &s->request, "/", 1) &&
         cddp__buffer_add(&s->allocator, &s->request, key, n);
}

static bool cddp__put_string(cddp_store *s, cddp__span v) {
  return cddp__buffer_add_string(&s->allocator, &s->request, v);
}

/* Sends the command (built: there was memory for it) and receives `size` bytes of answer. */
static cddp_result cddp__tcp_ask(cddp_store *s, bool built, void *answer, size_t size,
                                 double deadline) {
  cddp_result r;
  if (!built) return CDDP_OUT_OF_MEMORY;
  if (cddp__buffer_size(&s->request) > CDDP__COMMAND_MAX) {
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the keys of one call have more than %u MiB",
                      CDDP__COMMAND_MAX >> 20);
  }
  r = cddp__send_all(s->tcp.fd, s->request.data, cddp__buffer_size(&s->request), deadline);
  if (r == CDDP_OK) r = cddp__recv_all(s->tcp.fd, answer, size, deadline);
  return r == CDDP_OK ? r : cddp__tcp_lost(s, r);
}

/* Receives a string into s->reply. */
static cddp_result cddp__tcp_receive_string(cddp_store *s, const unsigned char head[8],
                                            double deadline) {
  uint64_t size = cddp__get64(head);
  cddp_result r;
  cddp__buffer_clear(&s->allocator, &s->reply, 65536);
  if (size > CDDP__COMMAND_MAX) {
    return cddp__tcp_lost(
        s, cddp__fail(CDDP_NETWORK,
                      "a value of %" PRIu64 " bytes was announced, more than the limit", size));
  }
  if (!cddp__buffer_reserve(&s->allocator, &s->reply, (size_t)size))
    return cddp__tcp_lost(s, CDDP_OUT_OF_MEMORY);
  r = cddp__recv_all(s->tcp.fd, s->reply.data, (size_t)size, deadline);
  if (r != CDDP_OK) return cddp__tcp_lost(s, r);
  s->reply.end = (size_t)size;
  return CDDP_OK;
}

/* SET has no answer; that to a question behind it tells that the value is there for everyone. */
static cddp_result cddp__tcp_set(cddp_store *s, const char *key, cddp__span value) {
  unsigned char code = CDDP__GETNUMKEYS, answer[8];
  cddp_result r = cddp__tcp_begin(s, CDDP__SET);
  bool built = r == CDDP_OK && cddp__put_key(s, key) && cddp__put_string(s, value);
  if (s->tcp.old) code = (unsigned char)cddp__code_to_old(code);
  built = built && cddp__buffer_add(&s->allocator, &s->request, &code, 1);
  return r == CDDP_OK ? cddp__tcp_ask(s, built, answer, 8, cddp__now() + s->timeout_s) : r;
}

static cddp_result cddp__tcp_get(cddp_store *s, const char *key) {
  double deadline = cddp__now() + s->timeout_s;
  unsigned char head[8];
  cddp_result r = cddp__tcp_begin(s, CDDP__GET);
  if (r == CDDP_OK) r = cddp__tcp_ask(s, cddp__put_key(s, key), head, 8, deadline);
  return r == CDDP_OK ? cddp__tcp_receive_string(s, head, deadline) : r;
}

static cddp_result cddp__tcp_add(cddp_store *s, const char *key, int64_t amount, int64_t *total) {
  unsigned char answer[8];
  cddp_result r = cddp__tcp_begin(s, CDDP__ADD);
  bool built = r == CDDP_OK && cddp__put_key(s, key) &&
               cddp__buffer_add64(&s->allocator, &s->request, (uint64_t)amount);
  if (r == CDDP_OK) r = cddp__tcp_ask(s, built, answer, 8, cddp__now() + s->timeout_s);
  if (r == CDDP_NETWORK && s->tcp.fd < 0)
    return cddp__fail_in(r, "add to '%.64s' (is its value a decimal number?): ", key);
  if (r == CDDP_OK) *total = (int64_t)cddp__get64(answer);
  return r;
}

static cddp_result cddp__tcp_compare_set(cddp_store *s, const char *key, cddp__span expected,
                                         cddp__span desired) {
  double deadline = cddp__now() + s->timeout_s;
  unsigned char head[8];
  cddp_result r = cddp__tcp_begin(s, CDDP__COMPARE_SET);
  bool built = r == CDDP_OK && cddp__put_key(s, key) && cddp__put_string(s, expected) &&
               cddp__put_string(s, desired);
  if (r == CDDP_OK) r = cddp__tcp_ask(s, built, head, 8, deadline);
  return r == CDDP_OK ? cddp__tcp_receive_string(s, head, deadline) : r;
}

/* Sends WAIT or CHECK. */
static cddp_result cddp__tcp_ask_keys(cddp_store *s, unsigned code, const char *const *keys,
                                      int count, void *answer, size_t size, double deadline) {
  cddp_result r = cddp__tcp_begin(s, code);
  bool built = r == CDDP_OK && cddp__buffer_add64(&s->allocator, &s->request, (uint64_t)count);
  int i;
  for (i = 0; i < count && built; i++) built = cddp__put_key(s, keys[i]);
  return r == CDDP_OK ? cddp__tcp_ask(s, built, answer, size, deadline) : r;
}

static cddp_result cddp__tcp_check(cddp_store *s, const char *const *keys, int count, bool *all,
                                   double deadline) {
  unsigned char answer;
  cddp_result r = cddp__tcp_ask_keys(s, CDDP__CHECK, keys, count, &answer, 1, deadline);
  if (r == CDDP_OK) *all = answer == 0;
  return r;
}

/* Takes back a WAIT that went on too long. A 0 in front of the 1 means that the keys just came. */
static void cddp__tcp_cancel(cddp_store *s) {
  unsigned char byte = CDDP__CANCEL_WAIT;
  double deadline = cddp__now() + 5;
  cddp_result r = s->tcp.old ? CDDP_NETWORK : cddp__send_all(s->tcp.fd, &byte, 1, deadline);
  if (r == CDDP_OK) r = cddp__recv_all(s->tcp.fd, &byte, 1, deadline);
  if (r == CDDP_OK && byte == 0) r = cddp__recv_all(s->tcp.fd, &byte, 1, deadline);
  if (r != CDDP_OK || byte != 1) cddp__close_fd(&s->tcp.fd);
}

/* The timeout of a wait, with the first missing key: CHECKs of the first half, and so on. */
static cddp_result cddp__wait_timed_out(cddp_store *s, const char *const *keys, int count) {
  int low = 0, high = count; /* the first low keys exist, the first high do not all */
  bool all = false;
  cddp_result r = s->ops->check(s, keys, count, &all, cddp__now() + 5);
  while (r == CDDP_OK && !all && high - low > 1) {
    int middle = low + (high - low) / 2;
    bool some = false;
    r = s->ops->check(s, keys, middle, &some, cddp__now() + 5);
    if (some)
      low = middle;
    else
      high = middle;
  }
  if (r != CDDP_OK)
    return cddp__fail_in(CDDP_TIMEOUT,
                         "store at %s: the wait for '%.64s' timed out; then: ", s->name, keys[0]);
  if (all)
    return cddp__fail(CDDP_TIMEOUT,
                      "store at %s: the wait for '%.64s' timed out; it came just after", s->name,
                      keys[0]);
  return cddp__fail(
      CDDP_TIMEOUT,
      "store at %s: timed out waiting for key '%.128s' (%d of %d), which nobody has set", s->name,
      keys[high - 1], high, count);
}

static cddp_result cddp__tcp_wait(cddp_store *s, const char *const *keys, int count,
                                  double deadline) {
  unsigned char answer = 1;
  cddp_result r =
      cddp__tcp_ask_keys(s, CDDP__WAIT, keys, count, NULL, 0, cddp__now() + s->timeout_s);
  if (r != CDDP_OK) return r;
  r = cddp__recv_all(s->tcp.fd, &answer, 1, deadline);
  if (r == CDDP_TIMEOUT) {
    cddp__tcp_cancel(s);
    return cddp__wait_timed_out(s, keys, count);
  }
  if (r == CDDP_OK && answer != 0)
    r = cddp__fail(CDDP_NETWORK, "%d instead of 0 came in answer to a wait", answer);
  return r == CDDP_OK ? r : cddp__tcp_lost(s, r);
}

static cddp_result cddp__tcp_remove(cddp_store *s, const char *key, bool *deleted) {
  unsigned char answer[8];
  cddp_result r;
  if (s->tcp.old) {
    return cddp__fail(
        CDDP_UNSUPPORTED,
        "store at %s: the versions of PyTorch 1.x's protocol do not agree on how to delete",
        s->name);
  }
  r = cddp__tcp_begin(s, CDDP__DELETE_KEY);
  if (r == CDDP_OK)
    r = cddp__tcp_ask(s, cddp__put_key(s, key), answer, 8, cddp__now() + s->timeout_s);
  if (r == CDDP_OK) *deleted = cddp__get64(answer) != 0;
  return r;
}

static cddp_result cddp__tcp_num_keys(cddp_store *s, int64_t *count) {
  unsigned char answer[8];
  cddp_result r = cddp__tcp_begin(s, CDDP__GETNUMKEYS);
  if (r == CDDP_OK) r = cddp__tcp_ask(s, true, answer, 8, cddp__now() + s->timeout_s);
  if (r == CDDP_OK) *count = (int64_t)cddp__get64(answer);
  return r;
}

static void cddp__tcp_close(cddp_store *s) {
  cddp__close_fd(&s->tcp.fd);
  if (s->tcp.server != NULL) cddp__server_stop(s->tcp.server);
  s->tcp.server = NULL;
}

static const cddp__store_ops cddp__tcp_ops = {
    cddp__tcp_set,  cddp__tcp_get,    cddp__tcp_add,      cddp__tcp_compare_set, cddp__tcp_check,
    cddp__tcp_wait, cddp__tcp_remove, cddp__tcp_num_keys, cddp__tcp_close};

/* PyTorch 1.x's dialect is for its servers: asked for by CDDP_STORE_PROTO, or recognised by what
   only its torchrun sets. */
static cddp_result cddp__tcp_choose_dialect(cddp__tcp *t) {
  const char *choice = getenv("CDDP_STORE_PROTO"), *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
  if (choice != NULL && choice[0] != '\0') {
    t->old = strcmp(choice, "old") == 0;
    if (t->old || strcmp(choice, "new") == 0) return CDDP_OK;
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "CDDP_STORE_PROTO is '%.32s'; it may be 'old' or 'new'", choice);
  }
  t->old = agent != NULL && strcmp(agent, "True") == 0 &&
           getenv("NCCL_ASYNC_ERROR_HANDLING") != NULL &&
           getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING") == NULL;
  return CDDP_OK;
}

/* Starts the server, on o's socket or on the addresses of host; its own client will use the first
   of them. */
static cddp_result cddp__tcp_serve(cddp_store *s, const cddp__store_options *o, int *listen_fd) {
  cddp__tcp *t = &s->tcp;
  int fds[CDDP__ADDRESSES_MAX], count = 1;
  cddp_result r = CDDP_OK;
  fds[0] = *listen_fd;
  *listen_fd = -1;
  if (fds[0] < 0) {
    r = cddp__listen_all(t->addresses, t->address_count, &t->port, o->port_name, o->host_name, fds,
                         &count);
  } else if (!cddp__set_nonblock(fds[0]) || !cddp__set_cloexec(fds[0])) {
    r = cddp__fail_errno("fcntl on the listening socket");
    cddp__close_fd(&fds[0]);
  }
  if (r != CDDP_OK) return r;
  if (!cddp__local_address(fds[0], &t->addresses[0])) {
    r = cddp__fail_errno("getsockname on the listening socket");
    while (count > 0) cddp__close_fd(&fds[--count]);
    return r;
  }
  t->address_count = 1;
  t->port = cddp__address_port(&t->addresses[0]);
  return cddp__server_start(&t->server, fds, count, s->secret, &s->allocator);
}

/* A host's own name may resolve to loopback on that host alone (127.0.1.1 in Debian's /etc/hosts):
   other hosts call another of its addresses, so the server takes all of them. */
static void cddp__tcp_reach(cddp__tcp *t, const char *host) {
  int i;
  if (strcmp(host, "localhost") == 0 || strchr(host, ':') != NULL ||
      host[strspn(host, "0123456789.")] == 0) /* an address says what is meant */
    return;
  for (i = 0; i < t->address_count; i++)
    if (!cddp__address_loopback(&t->addresses[i])) return;
  t->address_count += cddp__interface_addresses(NULL, t->addresses + t->address_count,
                                                CDDP__ADDRESSES_MAX - t->address_count);
}

static cddp_result cddp__tcp_open(cddp_store *s, const cddp__store_options *o, const char *where,
                                  int *listen_fd) {
  cddp__tcp *t = &s->tcp;
  char host[256], name[300];
  cddp_result r = cddp__host_port(where, host, sizeof host, &t->port);
  s->ops = &cddp__tcp_ops;
  if (r == CDDP_OK) r = cddp__tcp_choose_dialect(t);
  if (r == CDDP_OK && t->port == 0 && !o->is_server) {
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "port 0 in 'tcp://%s' is for the server only, which then gets a free one",
                   where);
  }
  if (r == CDDP_OK && *listen_fd < 0)
    r = cddp__resolve(host, t->port, o->host_name, t->addresses, &t->address_count);
  if (r == CDDP_OK && o->is_server && o->reachable) cddp__tcp_reach(t, host);
  if (r == CDDP_OK && o->is_server) r = cddp__tcp_serve(s, o, listen_fd);
  if (r != CDDP_OK) return r;
  snprintf(name, sizeof name, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, t->port);
  s->name = cddp__strdup(&s->allocator, name);
  if (s->name == NULL) return CDDP_OUT_OF_MEMORY;
  return cddp__tcp_connect(s, o->deadline, false);
}

/* The same server and protocol on an abstract Unix socket: for ranks of one host whose launcher
   gives no address. There is no port that could be in use. */
static cddp_result cddp__unix_open(cddp_store *s, const cddp__store_options *o, const char *name) {
  cddp__tcp *t = &s->tcp;
  cddp_result r = CDDP_OK;
  int none = -1;
  s->ops = &cddp__tcp_ops;
  cddp__unix_name(&t->addresses[0], name);
  t->address_count = 1;
  s->name = cddp__strdup(&s->allocator, name);
  if (s->name == NULL) return CDDP_OUT_OF_MEMORY;
  if (o->is_server) r = cddp__tcp_serve(s, o, &none);
  return r == CDDP_OK ? cddp__tcp_connect(s, o->deadline, false) : r;
}

/* The file store: a log of records that is read into a map. Works as follows. Open file description
   locks, which the kernel releases when a process dies, guard two bytes of the file:
     byte 0   held while writing (exclusive) or reading (shared) the log
     byte 1   held shared by everyone who has the store open. Who opens the file and finds nobody
              there knows that its contents are those of a job that is over, and starts a new log;
              who closes it as the last one removes it.
   The header says how much of the log is committed: a record is written behind that and then the
   number is changed, so a writer killed in between leaves nothing half done. A nonce in the header
   tells one log from another. */
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#endif
#define CDDP__FILE_MAGIC "CDDPSTO1"
#define CDDP__FILE_HEADER 64 /* magic 8, nonce 16, committed 8, zeros */
#define CDDP__FILE_RECORD                                                                          \
  24 /* hash of the rest 8, kind 4, key size 4, value size 8; then key and value */
enum cddp__file_kind { CDDP__FILE_SET = 1, CDDP__FILE_REMOVE = 2 };

static int cddp__file_fcntl(int fd, int command, short *type, off_t byte) {
  struct flock l;
  int e;
  memset(&l, 0, sizeof l);
  l.l_type = *type;
  l.l_whence = SEEK_SET;
  l.l_start = byte;
  l.l_len = 1;
  do e = fcntl(fd, command, &l) == 0 ? 0 : errno;
  while (e == EINTR);
  *type = l.l_type;
  return e;
}

static void cddp__file_unlock(int fd, off_t byte) {
  short type = F_UNLCK;
  cddp__file_fcntl(fd, F_OFD_SETLK, &type, byte);
}

/* Locks byte 0: F_RDLCK or F_WRLCK. Never blocks in the kernel, which would hear of no deadline. */
static cddp_result cddp__file_lock(cddp_store *s, int fd, short type, double deadline) {
  double pause = 5e-5;
  for (;;) {
    short t = type;
    int e = cddp__file_fcntl(fd, F_OFD_SETLK, &t, 0);
    if (e == 0) return CDDP_OK;
    if (e != EAGAIN && e != EACCES) {
      return cddp__fail(
          CDDP_IO, "store file %s: fcntl(F_OFD_SETLK): %s; put it on a file system that has locks",
          s->name, strerror(e));
    }
    if (cddp__now() >= deadline) {
      return cddp__fail(
          CDDP_TIMEOUT,
          "store file %s: another process has kept it locked all the time; is one stopped?",
          s->name);
    }
    cddp__sleep(cddp__soon(pause, deadline) - cddp__now());
    pause = pause < 2e-3 ? pause * 1.5 : pause;
  }
}

/* Whether anybody else has the store open. */
static cddp_result cddp__file_shared(cddp_store *s, int fd, bool *others) {
  short type = F_WRLCK;
  int e = cddp__file_fcntl(fd, F_OFD_GETLK, &type, 1);
  *others = type != F_UNLCK;
  return e == 0
             ? CDDP_OK
             : cddp__fail(CDDP_IO, "store file %s: fcntl(F_OFD_GETLK): %s", s->name, strerror(e));
}

static cddp_result cddp__file_read(cddp_store *s, int fd, void *data, size_t size,
                                   uint64_t offset) {
  unsigned char *p = (unsigned char *)data;
  while (size > 0) {
    ssize_t n = CDDP__PREAD(fd, p, size, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return cddp__fail(CDDP_IO, "store file %s: read: %s", s->name, strerror(errno));
    if (n == 0)
      return cddp__fail(CDDP_IO, "store file %s is shorter than it says; somebody has cut it",
                        s->name);
    p += n;
    size -= (size_t)n;
    offset += (uint64_t)n;
  }
  return CDDP_OK;
}

static cddp_result cddp__file_write(cddp_store *s, int fd, const void *data, size_t size,
                                    uint64_t offset) {
  const unsigned char *p = (const unsigned char *)data;
  while (size > 0) {
    ssize_t n = CDDP__PWRITE(fd, p, size, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      return cddp__fail(CDDP_IO, "store file %s: write: %s", s->name,
                        n == 0 ? "nothing was written" : strerror(errno));
    p += n;
    size -= (size_t)n;
    offset += (uint64_t)n;
  }
  return CDDP_OK;
}

static uint64_t cddp__record_hash(const unsigned char *record, size_t size) {
  return cddp__hash64(0, record + 8, size - 8);
}

/* The size of the record at p, of which n bytes are known; 0 = it is none. */
static uint64_t cddp__record_size(const unsigned char *p) {
  uint32_t kind = cddp__get32(p + 8), key = cddp__get32(p + 12);
  uint64_t value = cddp__get64(p + 16);
  if ((kind != CDDP__FILE_SET && kind != CDDP__FILE_REMOVE) || key > CDDP__KEY_MAX ||
      value > CDDP__VALUE_MAX)
    return 0;
  return CDDP__FILE_RECORD + key + value;
}

static cddp_result cddp__file_corrupt(cddp_store *s) {
  return cddp__fail(CDDP_IO,
                    "store file %s is damaged at byte %" PRIu64
                    "; end the job, remove the file and start again",
                    s->name, s->file.offset);
}

/* Brings the records in the n bytes at p, which are those at s->file.offset, into the map as far as
   they are whole. *need: how many bytes it takes to get on. */
static cddp_result cddp__file_replay(cddp_store *s, const unsigned char *p, size_t n,
                                     size_t *need) {
  for (;;) {
    uint64_t size;
    cddp__span key, value;
    *need = CDDP__FILE_RECORD;
    if (n < CDDP__FILE_RECORD) return CDDP_OK;
    size = cddp__record_size(p);
    if (size == 0) return cddp__file_corrupt(s);
    *need = (size_t)size;
    if (n < size) return CDDP_OK;
    if (cddp__record_hash(p, (size_t)size) != cddp__get64(p)) return cddp__file_corrupt(s);
    key = cddp__span_of(p + CDDP__FILE_RECORD, cddp__get32(p + 12));
    value = cddp__span_of(key.data + key.size, (size_t)cddp__get64(p + 16));
    if (cddp__get32(p + 8) == CDDP__FILE_REMOVE)
      cddp__map_remove(&s->file.map, key);
    else if (cddp__map_put(&s->file.map, key, value) == NULL)
      return CDDP_OUT_OF_MEMORY;
    s->file.offset += size;
    p += size;
    n -= (size_t)size;
  }
}

/* With byte 0 locked: learns what the others have written. */
static cddp_result cddp__file_refresh(cddp_store *s) {
  cddp__file *f = &s->file;
  unsigned char header[CDDP__FILE_HEADER];
  uint64_t committed;
  size_t need = CDDP__FILE_RECORD;
  cddp_result r = cddp__file_read(s, f->fd, header, sizeof header, 0);
  if (r != CDDP_OK) return r;
  if (memcmp(header, CDDP__FILE_MAGIC, 8) != 0 ||
      memcmp(header + 8, f->nonce, sizeof f->nonce) != 0) {
    return cddp__fail(
        CDDP_IO, "store file %s was overwritten by somebody else while this job used it", s->name);
  }
  committed = cddp__get64(header + 24);
  if (committed < f->offset) return cddp__file_corrupt(s);
  while (r == CDDP_OK && f->offset < committed) {
    size_t left = (size_t)(committed - f->offset), take = cddp__min(left, cddp__max(need, 65536));
    if (need > left) return cddp__file_corrupt(s);
    cddp__buffer_clear(&s->allocator, &s->reply, (size_t)CDDP__COMMAND_MAX);
    if (!cddp__buffer_reserve(&s->allocator, &s->reply, take)) return CDDP_OUT_OF_MEMORY;
    r = cddp__file_read(s, f->fd, s->reply.data, take, f->offset);
    if (r == CDDP_OK) r = cddp__file_replay(s, s->reply.data, take, &need);
  }
  cddp__buffer_clear(&s->allocator, &s->reply, 65536);
  return r;
}

/* Starts an operation on the log: locks and refreshes. The caller unlocks, with cddp__file_end,
   whatever the result. */
static cddp_result cddp__file_begin(cddp_store *s, short type, double deadline) {
  cddp_result r = cddp__file_lock(s, s->file.fd, type, deadline);
  return r == CDDP_OK ? cddp__file_refresh(s) : r;
}

static cddp_result cddp__file_end(cddp_store *s, cddp_result r) {
  cddp__file_unlock(s->file.fd, 0);
  return r;
}

/* With byte 0 locked for writing and the map up to date: adds a record. The map learns of it at the
   next refresh. */
static cddp_result cddp__file_append(cddp_store *s, enum cddp__file_kind kind, const char *key,
                                     cddp__span value) {
  unsigned char record[CDDP__FILE_RECORD], committed[8];
  size_t key_size = strlen(key) + 1;
  cddp__buffer *b = &s->request;
  cddp_result r;
  cddp__put32(record + 8, (uint32_t)kind);
  cddp__put32(record + 12, (uint32_t)key_size);
  cddp__put64(record + 16, value.size);
  cddp__buffer_clear(&s->allocator, b, 65536);
  if (!cddp__buffer_reserve(&s->allocator, b, CDDP__FILE_RECORD + key_size + value.size))
    return CDDP_OUT_OF_MEMORY;
  cddp__buffer_add(&s->allocator, b, record, sizeof record);
  cddp__buffer_add(&s->allocator, b, "/", 1);
  cddp__buffer_add(&s->allocator, b, key, key_size - 1);
  cddp__buffer_add(&s->allocator, b, value.data, value.size);
  cddp__put64(b->data, cddp__record_hash(b->data, b->end));
  r = cddp__file_write(s, s->file.fd, b->data, b->end, s->file.offset);
  if (r != CDDP_OK) return r;
  cddp__put64(committed, s->file.offset + b->end);
  return cddp__file_write(s, s->file.fd, committed, 8, 24);
}

/* The wire key of a user's key, in s->request. */
static cddp_result cddp__file_key(cddp_store *s, const char *key, cddp__span *wire) {
  cddp__buffer_clear(&s->allocator, &s->request, 65536);
  if (!cddp__buffer_add(&s->allocator, &s->request, "/", 1) ||
      !cddp__buffer_add(&s->allocator, &s->request, key, strlen(key))) {
    return CDDP_OUT_OF_MEMORY;
  }
  *wire = cddp__span_of(s->request.data, s->request.end);
  return CDDP_OK;
}

/* The entry of a user's key, NULL if it has no value. */
static cddp_result cddp__file_find(cddp_store *s, const char *key, cddp__entry **out) {
  cddp__span wire;
  cddp_result r = cddp__file_key(s, key, &wire);
  *out = NULL;
  if (r == CDDP_OK) *out = cddp__map_find(&s->file.map, wire);
  if (*out != NULL && !(*out)->present) *out = NULL;
  return r;
}

static double cddp__store_deadline(const cddp_store *s) { return cddp__now() + s->timeout_s; }

/* s->reply = value. */
static cddp_result cddp__store_answer(cddp_store *s, cddp__span value) {
  cddp__buffer_clear(&s->allocator, &s->reply, 65536);
  return cddp__buffer_add(&s->allocator, &s->reply, value.data, value.size) ? CDDP_OK
                                                                            : CDDP_OUT_OF_MEMORY;
}

static cddp_result cddp__file_set(cddp_store *s, const char *key, cddp__span value) {
  cddp_result r = cddp__file_begin(s, F_WRLCK, cddp__store_deadline(s));
  if (r == CDDP_OK) r = cddp__file_append(s, CDDP__FILE_SET, key, value);
  return cddp__file_end(s, r);
}

static cddp_result cddp__file_get(cddp_store *s, const char *key) {
  cddp__entry *e = NULL;
  cddp_result r = cddp__file_find(s, key, &e); /* the wait has just refreshed the map */
  return r == CDDP_OK
             ? cddp__store_answer(s, e == NULL ? cddp__span_of(NULL, 0) : cddp__entry_value(e))
             : r;
}

static cddp_result cddp__file_add(cddp_store *s, const char *key, int64_t amount, int64_t *total) {
  char text[24];
  cddp__span wire;
  cddp_result r = cddp__file_begin(s, F_WRLCK, cddp__store_deadline(s));
  if (r == CDDP_OK) r = cddp__file_key(s, key, &wire);
  if (r == CDDP_OK && !cddp__map_total(&s->file.map, wire, amount, total)) {
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "store file %s: add to '%.64s', whose value is no decimal number", s->name, key);
  }
  if (r == CDDP_OK) r = cddp__file_append(s, CDDP__FILE_SET, key, cddp__decimal(*total, text));
  return cddp__file_end(s, r);
}

static cddp_result cddp__file_compare_set(cddp_store *s, const char *key, cddp__span expected,
                                          cddp__span desired) {
  cddp__entry *e = NULL;
  cddp_result r = cddp__file_begin(s, F_WRLCK, cddp__store_deadline(s));
  if (r == CDDP_OK) r = cddp__file_find(s, key, &e);
  if (r == CDDP_OK) {
    if (e != NULL ? cddp__span_equal(cddp__entry_value(e), expected) : expected.size == 0) {
      r = cddp__store_answer(s, desired);
      if (r == CDDP_OK) r = cddp__file_append(s, CDDP__FILE_SET, key, desired);
    } else {
      r = cddp__store_answer(s, e != NULL ? cddp__entry_value(e) : expected);
    }
  }
  return cddp__file_end(s, r);
}

static cddp_result cddp__file_check(cddp_store *s, const char *const *keys, int count, bool *all,
                                    double deadline) {
  cddp__entry *e;
  int i;
  cddp_result r = cddp__file_begin(s, F_RDLCK, deadline);
  *all = true;
  for (i = 0; i < count && r == CDDP_OK && *all; i++) {
    r = cddp__file_find(s, keys[i], &e);
    *all = r == CDDP_OK && e != NULL;
  }
  return cddp__file_end(s, r);
}

static cddp_result cddp__file_wait(cddp_store *s, const char *const *keys, int count,
                                   double deadline) {
  double pause = 2e-4;
  for (;;) {
    bool all = false;
    cddp_result r = cddp__file_check(s, keys, count, &all, cddp__now() + s->timeout_s);
    if (r != CDDP_OK || all) return r;
    if (cddp__now() >= deadline) return cddp__wait_timed_out(s, keys, count);
    cddp__sleep(cddp__soon(pause, deadline) - cddp__now());
    pause = pause < 8e-3 ? pause * 1.25 : 1e-2;
  }
}

static cddp_result cddp__file_remove(cddp_store *s, const char *key, bool *deleted) {
  cddp__entry *e = NULL;
  cddp_result r = cddp__file_begin(s, F_WRLCK, cddp__store_deadline(s));
  if (r == CDDP_OK) r = cddp__file_find(s, key, &e);
  *deleted = e != NULL;
  if (r == CDDP_OK && e != NULL)
    r = cddp__file_append(s, CDDP__FILE_REMOVE, key, cddp__span_of(NULL, 0));
  return cddp__file_end(s, r);
}

static cddp_result cddp__file_num_keys(cddp_store *s, int64_t *count) {
  cddp_result r = cddp__file_begin(s, F_RDLCK, cddp__store_deadline(s));
  *count = s->file.map.present_count;
  return cddp__file_end(s, r);
}

/* Whether the path still leads to the file that fd is. */
static bool cddp__file_is_named(int fd, const char *path) {
  struct stat a, b;
  return fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static void cddp__file_close(cddp_store *s) {
  cddp__file *f = &s->file;
  bool others = true;
  if (f->fd >= 0 && cddp__file_lock(s, f->fd, F_WRLCK, cddp__now() + 5) == CDDP_OK) {
    if (cddp__file_shared(s, f->fd, &others) == CDDP_OK && !others &&
        cddp__file_is_named(f->fd, s->name))
      unlink(s->name);
  }
  if (f->fd >= 0) { /* closing is not enough when a forked child has the descriptor too */
    cddp__file_unlock(f->fd, 1);
    cddp__file_unlock(f->fd, 0);
  }
  cddp__close_fd(&f->fd);
  cddp__map_free(&f->map);
}

static const cddp__store_ops cddp__file_ops = {
    cddp__file_set,         cddp__file_get,      cddp__file_add,
    cddp__file_compare_set, cddp__file_check,    cddp__file_wait,
    cddp__file_remove,      cddp__file_num_keys, cddp__file_close};

/* With byte 0 locked: joins the log if anybody is using it, else starts one. A file that is not
   ours is left alone. */
static cddp_result cddp__file_join(cddp_store *s, int fd) {
  unsigned char header[CDDP__FILE_HEADER];
  struct stat st;
  bool others = false;
  short type = F_RDLCK;
  cddp_result r = cddp__file_shared(s, fd, &others);
  if (r != CDDP_OK) return r;
  if (fstat(fd, &st) != 0)
    return cddp__fail(CDDP_IO, "store file %s: fstat: %s", s->name, strerror(errno));
  if (st.st_size > 0) {
    bool ours = st.st_size >= CDDP__FILE_HEADER;
    if (ours) r = cddp__file_read(s, fd, header, sizeof header, 0);
    if (r != CDDP_OK) return r;
    if (!ours || memcmp(header, CDDP__FILE_MAGIC, 8) != 0) {
      return cddp__fail(CDDP_IO,
                        "%s exists and is not a store of this version of cddp; it was left as it "
                        "is. Choose another path, "
                        "or remove it",
                        s->name);
    }
  }
  if (!others || st.st_size == 0) {
    memset(header, 0, sizeof header);
    memcpy(header, CDDP__FILE_MAGIC, 8);
    r = cddp__random(header + 8, sizeof s->file.nonce);
    cddp__put64(header + 24, CDDP__FILE_HEADER);
    if (r != CDDP_OK) return r;
    if (ftruncate(fd, 0) != 0)
      return cddp__fail(CDDP_IO, "store file %s: ftruncate: %s", s->name, strerror(errno));
    r = cddp__file_write(s, fd, header, sizeof header, 0);
    if (r != CDDP_OK) { /* not even the header: leave nothing */
      if (!others) unlink(s->name);
      return r;
    }
  }
  memcpy(s->file.nonce, header + 8, sizeof s->file.nonce);
  s->file.offset = CDDP__FILE_HEADER;
  if (cddp__file_fcntl(fd, F_OFD_SETLK, &type, 1) != 0)
    return cddp__fail(CDDP_IO, "store file %s: no lock on its second byte", s->name);
  s->file.fd = fd;
  return cddp__file_refresh(s);
}

static cddp_result cddp__file_open(cddp_store *s, const char *path, double deadline) {
  cddp_result r;
  int fd;
  s->ops = &cddp__file_ops;
  cddp__map_init(&s->file.map, &s->allocator);
  s->name = cddp__strdup(&s->allocator, path);
  if (s->name == NULL) return CDDP_OUT_OF_MEMORY;
  for (;;) { /* until the path names what we have locked: its last user may have removed it */
    struct stat st;
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
    if (fd < 0) {
      return cddp__fail(CDDP_IO,
                        "cannot open store file %s: %s; its directory must exist and be writable",
                        path, strerror(errno));
    }
    r = fstat(fd, &st) == 0 && S_ISREG(st.st_mode)
            ? CDDP_OK
            : cddp__fail(CDDP_IO, "store file %s is not a regular file", path);
    if (r == CDDP_OK) r = cddp__file_lock(s, fd, F_WRLCK, deadline);
    if (r != CDDP_OK || cddp__file_is_named(fd, path)) break;
    close(fd);
  }
  if (r == CDDP_OK) r = cddp__file_join(s, fd);
  if (r == CDDP_OK)
    cddp__file_unlock(fd, 0);
  else if (s->file.fd < 0)
    close(fd);
  return r;
}

/* Both. */

static void cddp__store_close(cddp_store *s) {
  cddp_allocator a;
  if (s == NULL) return;
  a = s->allocator;
  if (s->ops != NULL) s->ops->close(s);
  pthread_mutex_destroy(&s->lock);
  cddp__buffer_free(&a, &s->request);
  cddp__buffer_free(&a, &s->reply);
  cddp__free(&a, s->name);
  cddp__free(&a, s->secret);
  cddp__free(&a, s);
}

/* *out is NULL on failure. o->listen_fd is the store's or closed in every case. */
static cddp_result cddp__store_open(cddp_store **out, const cddp__store_options *o) {
  const char *secret = o->secret != NULL ? o->secret : getenv("CDDP_SECRET");
  int listen_fd = o->listen_fd;
  cddp_result r = CDDP_OK;
  cddp_store *s = (cddp_store *)cddp__calloc(&o->allocator, 1, sizeof *s);
  *out = NULL;
  if (s == NULL) {
    cddp__close_fd(&listen_fd);
    return CDDP_OUT_OF_MEMORY;
  }
  pthread_mutex_init(&s->lock, NULL);
  s->allocator = o->allocator;
  s->timeout_s = o->timeout_s > 0 ? o->timeout_s : CDDP__TIMEOUT_S;
  s->tcp.fd = s->file.fd = -1;
  if (secret != NULL && secret[0] != '\0') {
    s->secret = cddp__strdup(&s->allocator, secret);
    if (s->secret == NULL) r = CDDP_OUT_OF_MEMORY;
  }
  if (r == CDDP_OK) {
    if (strncmp(o->init_method, "tcp://", 6) == 0) {
      r = cddp__tcp_open(s, o, o->init_method + 6, &listen_fd);
    } else if (strncmp(o->init_method, "unix://", 7) == 0 && o->init_method[7] != '\0') {
      r = cddp__unix_open(s, o, o->init_method + 7);
    } else if (strncmp(o->init_method, "file:///", 8) == 0 && o->init_method[8] != '\0') {
      r = cddp__file_open(s, o->init_method + 7, o->deadline);
    } else {
      r = cddp__fail(CDDP_INVALID_ARGUMENT,
                     "'%.128s' is no store; write tcp://host:port, unix://name or "
                     "file:///absolute/path",
                     o->init_method);
    }
  }
  cddp__close_fd(&listen_fd);
  if (r != CDDP_OK)
    cddp__store_close(s);
  else
    *out = s;
  return r;
}

static int cddp__store_port(const cddp_store *s) { return s->tcp.port; }

/* Ends an operation, which may have left a large value behind. */
static cddp_result cddp__store_end(cddp_store *s, cddp_result r) {
  cddp__buffer_clear(&s->allocator, &s->request, 65536);
  cddp__buffer_clear(&s->allocator, &s->reply, 65536);
  pthread_mutex_unlock(&s->lock);
  return r;
}

static cddp_result cddp__store_set(cddp_store *s, const char *key, const void *value, size_t size) {
  pthread_mutex_lock(&s->lock);
  return cddp__store_end(s, s->ops->set(s, key, cddp__span_of(value, size)));
}

/* s->reply to the caller. */
static cddp_result cddp__store_hand_over(cddp_store *s, const char *key, void *value,
                                         size_t capacity, size_t *size) {
  size_t have = cddp__buffer_size(&s->reply);
  if (size != NULL) *size = have;
  if (have > 0 && have <= capacity) memcpy(value, s->reply.data + s->reply.start, have);
  if (have <= capacity || (value == NULL && capacity == 0)) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "the value of '%.64s' has %zu bytes and the buffer %zu",
                    key, have, capacity);
}

/* Waits for key until the deadline. */
static cddp_result cddp__store_get(cddp_store *s, const char *key, void *value, size_t capacity,
                                   size_t *size, double deadline) {
  cddp_result r;
  pthread_mutex_lock(&s->lock);
  r = s->ops->wait(s, &key, 1, deadline);
  if (r == CDDP_OK) r = s->ops->get(s, key);
  if (r == CDDP_OK) r = cddp__store_hand_over(s, key, value, capacity, size);
  return cddp__store_end(s, r);
}

static cddp_result cddp__store_add(cddp_store *s, const char *key, int64_t amount, int64_t *total) {
  int64_t sum = 0;
  cddp_result r;
  pthread_mutex_lock(&s->lock);
  r = s->ops->add(s, key, amount, &sum);
  if (r == CDDP_OK && total != NULL) *total = sum;
  return cddp__store_end(s, r);
}

/* *swapped = the answer is `desired`, as in c10d, whose answer cannot tell apart that the value was
   `desired` before: of several that write the same bytes, all are told that they have. Make them
   differ (a rank or nonce in them) to elect one. */
static cddp_result cddp__store_compare_set(cddp_store *s, const char *key, const void *expected,
                                           size_t expected_size, const void *desired,
                                           size_t desired_size, void *value, size_t capacity,
                                           size_t *size, bool *swapped) {
  cddp__span want = cddp__span_of(desired, desired_size);
  cddp_result r;
  pthread_mutex_lock(&s->lock);
  r = s->ops->compare_set(s, key, cddp__span_of(expected, expected_size), want);
  if (r == CDDP_OK) {
    if (swapped != NULL)
      *swapped = cddp__span_equal(cddp__buffer_span(&s->reply), want);
    r = cddp__store_hand_over(s, key, value, capacity, size);
  }
  return cddp__store_end(s, r);
}

static cddp_result cddp__store_check(cddp_store *s, const char *const *keys, int count, bool *all) {
  pthread_mutex_lock(&s->lock);
  return cddp__store_end(s, s->ops->check(s, keys, count, all, cddp__store_deadline(s)));
}

static cddp_result cddp__store_wait(cddp_store *s, const char *const *keys, int count,
                                    double deadline) {
  if (count == 0) return CDDP_OK;
  pthread_mutex_lock(&s->lock);
  return cddp__store_end(s, s->ops->wait(s, keys, count, deadline));
}

static cddp_result cddp__store_delete(cddp_store *s, const char *key, bool *deleted) {
  bool was_there = false;
  cddp_result r;
  pthread_mutex_lock(&s->lock);
  r = s->ops->remove(s, key, &was_there);
  if (r == CDDP_OK && deleted != NULL) *deleted = was_there;
  return cddp__store_end(s, r);
}

static cddp_result cddp__store_num_keys(cddp_store *s, int64_t *count) {
  pthread_mutex_lock(&s->lock);
  return cddp__store_end(s, s->ops->num_keys(s, count));
}
/* >>discovery ----------------------------------------------------------------------------------
   Rank, world size and meeting place from the description and the environment. */

/* The variables of one launcher. */
typedef struct cddp__launcher {
  const char *name; /* for messages */
  const char *rank, *size, *local_rank, *local_size;
  const char *cure; /* what to add to its command when ranks do not know where to meet */
} cddp__launcher;

typedef struct cddp__place {
  int rank, world_size, local_rank, local_world_size; /* local ones -1 when unknown */
  int launcher;           /* whose variables are in force: index into cddp__launchers */
  char init_method[1200]; /* "tcp://host:port", "unix://name" or "file:///path"; "" for one rank */
  bool from_environment;  /* the address is MASTER_ADDR:MASTER_PORT */
  bool client_only;       /* torchrun's agent serves the store: rank 0 must not */
  int listen_fd;          /* bound by cddp_spawn or cddp_launch for rank 0, else -1 */
  bool listen_fd_lost;    /* there should be one */
  char run[128];          /* prefix of this job's keys */
  double timeout_s;
} cddp__place;

static const char *cddp__env(const char *name) { /* NULL when unset or empty */
  const char *v = getenv(name);
  return v != NULL && v[0] != 0 ? v : NULL;
}

static const char *cddp__backend_name(const cddp_group_desc *d) { /* NULL: the default */
  return d->backend != NULL ? d->backend : cddp__env("CDDP_BACKEND");
}

static cddp_result cddp__parse_int(const char *name, const char *text, long low, long high,
                                   int *out) {
  char *end = NULL;
  long v;
  errno = 0;
  v = strtol(text, &end, 10);
  if (end == text || *end != 0 || errno != 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is \"%s\", which is not a whole number", name,
                      text);
  if (v < low || v > high)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is %ld; it must be from %ld to %ld", name, v, low,
                      high);
  *out = (int)v;
  return CDDP_OK;
}

/* What launchers tell each rank, in the order in which they are asked: the first whose rank and
   size are both set is believed, and no other. mpirun comes before Slurm: inside an allocation it
   leaves Slurm's variables as those of its daemon. */
static const cddp__launcher cddp__launchers[] = {
    {"torchrun, cddprun or a script", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ""},
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "-x MASTER_ADDR=HOST -x MASTER_PORT=29500"},
    {"Hydra's mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
     "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500"},
    {"Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL,
     "--export=ALL,MASTER_ADDR=HOST"}};
enum { CDDP__BY_SCRIPT, CDDP__BY_OPENMPI, CDDP__BY_HYDRA, CDDP__BY_SLURM, CDDP__LAUNCHERS };

/* A batch script and an salloc shell look like task 0 of all tasks but are no step; and what are
   steps to Slurm alone (batch, interactive, extern) has the highest numbers. */
static bool cddp__in_slurm_step(void) {
  const char *step = cddp__env("SLURM_STEP_ID");
  return step != NULL && strtoul(step, NULL, 10) < 0xfffffff0ul &&
         cddp__env("SLURM_PROCID") != NULL;
}

static bool cddp__env_same(const char *name, const char *other) {
  const char *a = cddp__env(name), *b = cddp__env(other);
  return a != NULL && b != NULL && strcmp(a, b) == 0;
}

static bool cddp__launched_by(int i) {
  const cddp__launcher *l = &cddp__launchers[i];
  if (cddp__env(l->rank) == NULL || cddp__env(l->size) == NULL) return false;
  if (i == CDDP__BY_SLURM) return cddp__in_slurm_step();
  if (i == CDDP__BY_HYDRA && cddp__env(l->local_rank) == NULL) /* srun --mpi=pmi2 */
    return !(cddp__in_slurm_step() && cddp__env_same("PMI_RANK", "SLURM_PROCID"));
  return true;
}

/* Half of a pair is a mistake: as single processes, all ranks would train on all data. */
static cddp_result cddp__half_launched(void) {
  int i;
  for (i = 0; i < CDDP__BY_SLURM; i++) {
    const cddp__launcher *l = &cddp__launchers[i];
    bool rank = cddp__env(l->rank) != NULL;
    if (rank == (cddp__env(l->size) != NULL)) continue;
    if (i == CDDP__BY_SCRIPT)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s is set but %s is not; set RANK, WORLD_SIZE, MASTER_ADDR and "
                        "MASTER_PORT for every rank, or none of them for a single process",
                        rank ? l->rank : l->size, rank ? l->size : l->rank);
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s is set but %s is not: %s sets both; unset it for a single process",
                      rank ? l->rank : l->size, rank ? l->size : l->rank, l->name);
  }
  return CDDP_OK;
}

/* RANK or WORLD_SIZE alone, beside a launcher that knows both, must not contradict it. */
static cddp_result cddp__check_stray(const char *name, int value, const cddp__launcher *l,
                                     const char *theirs) {
  const char *text = cddp__env(name);
  int given = value;
  if (text != NULL) cddp__parse_int(name, text, 0, INT_MAX, &given);
  if (given == value) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "%s is %s but %s is %d (set by %s); unset %s, or set RANK and WORLD_SIZE both",
                    name, text, theirs, value, l->name, name);
}

static cddp_result cddp__env_ranks(cddp__place *at) {
  const cddp__launcher *l;
  cddp_result r;
  int i = 0;
  at->rank = 0;
  at->world_size = 1;
  while (i < CDDP__LAUNCHERS && !cddp__launched_by(i)) i++;
  if (i == CDDP__LAUNCHERS) return cddp__half_launched();
  at->launcher = i;
  l = &cddp__launchers[i];
  if ((r = cddp__parse_int(l->size, cddp__env(l->size), 1, CDDP__MAX_RANKS, &at->world_size)) !=
          CDDP_OK ||
      (r = cddp__parse_int(l->rank, cddp__env(l->rank), 0, INT_MAX, &at->rank)) != CDDP_OK)
    return r;
  if (at->rank >= at->world_size)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is %d but %s is %d; ranks go from 0 to %d",
                      l->rank, at->rank, l->size, at->world_size, at->world_size - 1);
  if (i == CDDP__BY_SCRIPT) return CDDP_OK;
  r = cddp__check_stray("RANK", at->rank, l, l->rank);
  return r == CDDP_OK ? cddp__check_stray("WORLD_SIZE", at->world_size, l, l->size) : r;
}

/* The count for a node in Slurm's short form: "4(x2),1" is 4, 4, 1. -1 when it has none. */
static int cddp__tasks_on_node(const char *text, long node) {
  while (text != NULL && *text >= '0' && *text <= '9') {
    char *end;
    long tasks = strtol(text, &end, 10), times = 1;
    if (end[0] == '(' && end[1] == 'x') {
      times = strtol(end + 2, &end, 10);
      if (*end++ != ')' || times < 1) return -1;
    }
    if (node < times) return node >= 0 && tasks >= 1 && tasks <= CDDP__MAX_RANKS ? (int)tasks : -1;
    node -= times;
    text = *end == ',' ? end + 1 : NULL;
  }
  return -1;
}

static cddp_result cddp__env_local(cddp__place *at) {
  const cddp__launcher *l = &cddp__launchers[at->launcher];
  const char *rank = cddp__env(l->local_rank),
             *size = l->local_size != NULL ? cddp__env(l->local_size) : NULL;
  cddp_result r;
  at->local_rank = at->local_world_size = -1;
  if (rank != NULL &&
      (r = cddp__parse_int(l->local_rank, rank, 0, INT_MAX, &at->local_rank)) != CDDP_OK)
    return r;
  if (size != NULL &&
      (r = cddp__parse_int(l->local_size, size, 1, INT_MAX, &at->local_world_size)) != CDDP_OK)
    return r;
  if (at->launcher == CDDP__BY_SLURM && cddp__env("SLURM_NODEID") != NULL)
    at->local_world_size = cddp__tasks_on_node(cddp__env("SLURM_STEP_TASKS_PER_NODE"),
                                               strtol(cddp__env("SLURM_NODEID"), NULL, 10));
  return CDDP_OK;
}

/* The first host of a Slurm node list: "n[03-07,9]x[1-2],m" gives n03x1. false: no such list. */
static bool cddp__first_host(const char *list, char *out, size_t capacity) {
  size_t n = 0;
  bool inside = false, skipping = false;
  for (; *list != 0 && (inside || *list != ','); list++) {
    bool opens = *list == '[', closes = *list == ']';
    if ((opens && inside) || (closes && !inside)) return false;
    if (opens || closes) {
      if (closes && list[-1] == '[') return false;
      inside = opens;
      skipping = false;
    } else if (inside && (*list == ',' || *list == '-')) {
      if (list[-1] == '[') return false; /* no first element */
      skipping = true;
    } else if (!skipping) {
      if (inside && (*list < '0' || *list > '9')) return false;
      if (n + 1 >= capacity) return false;
      out[n++] = *list;
    }
  }
  out[n] = 0;
  return n > 0 && !inside;
}

/* Whether the launcher says that all its ranks are on this host. */
static bool cddp__one_host(const cddp__place *at) {
  static const char *const names[] = {"SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES",
                                      "SLURM_NNODES"};
  const char *nodes = NULL;
  int i;
  if (at->launcher != CDDP__BY_SLURM) return at->local_world_size == at->world_size;
  for (i = 0; i < 3 && nodes == NULL; i++) nodes = cddp__env(names[i]);
  return nodes != NULL && strcmp(nodes, "1") == 0;
}

/* A number that the ranks of this job on this host share, and no other job here; 0: there is none.
   Hydra gives its ranks no such variable, but PMI_FD is one end of a socket pair, and the kernel
   knows which process made it: the proxy that started this host's ranks. */
static uint64_t cddp__job_key(int launcher) {
  static const char *const names[CDDP__LAUNCHERS][5] = {
      {NULL, NULL, NULL, NULL, NULL},
      {"PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_TMPDIR", NULL},
      {"PMI_PORT", NULL, NULL, NULL, NULL},
      {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", NULL}};
  const char *fd = launcher == CDDP__BY_HYDRA ? cddp__env("PMI_FD") : NULL;
  uint32_t maker[3] = {0, 0, 0}; /* struct ucred: pid, uid, gid */
  socklen_t size = sizeof maker;
  uint64_t key = 0;
  int i;
  for (i = 0; names[launcher][i] != NULL; i++) {
    const char *value = cddp__env(names[launcher][i]);
    if (value != NULL) key = cddp__hash64(key + 1, value, strlen(value) + 1);
  }
  if (fd != NULL && getsockopt((int)strtol(fd, NULL, 10), SOL_SOCKET, SO_PEERCRED, maker, &size) ==
                        0 && maker[0] != 0)
    key = cddp__hash64(key + 1, maker, sizeof maker);
  return key;
}

/* A port for the ranks of several hosts: below those that systems give out by themselves. 0: the
   launcher gives nothing that all of them know. */
static int cddp__job_port(int launcher) {
  const char *job = cddp__env("SLURM_JOB_ID"), *step = cddp__env("SLURM_STEP_ID"),
             *space = cddp__env("PMIX_NAMESPACE");
  if (launcher == CDDP__BY_SLURM && job != NULL && step != NULL)
    return 20000 + (int)((7 * strtoull(job, NULL, 10) + strtoull(step, NULL, 10)) % 10000);
  if (launcher == CDDP__BY_OPENMPI && space != NULL)
    return 20000 + (int)(cddp__hash64(0, space, strlen(space)) % 10000);
  return 0;
}

/* A socket that the launcher of all ranks has bound and passed on to rank 0. It is taken only if it
   is still what the variable says. */
static cddp_result cddp__env_listen_fd(cddp__place *at, int port) {
  const char *text = cddp__env("CDDP_LISTEN_FD");
  cddp__address bound;
  socklen_t size = sizeof(int);
  cddp_result r;
  int fd = -1, listening = 0;
  if (text == NULL || at->rank != 0 || at->launcher != CDDP__BY_SCRIPT) return CDDP_OK;
  if ((r = cddp__parse_int("CDDP_LISTEN_FD", text, 0, INT_MAX, &fd)) != CDDP_OK) return r;
  at->listen_fd_lost = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 ||
                       !listening || !cddp__local_address(fd, &bound) ||
                       cddp__address_port(&bound) != port;
  if (!at->listen_fd_lost) at->listen_fd = fd;
  return CDDP_OK;
}

static void cddp__set_master(cddp__place *at, const char *host, int port) {
  snprintf(at->init_method, sizeof at->init_method,
           strchr(host, ':') ? "tcp://[%s]:%d" : "tcp://%s:%d", host, port);
  at->from_environment = true;
}

/* Where ranks meet whom Slurm or mpirun started, when MASTER_ADDR and MASTER_PORT are not both set:
   on one host without any port. */
static cddp_result cddp__launcher_master(cddp__place *at, const char *host, int port) {
  static const char *const lists[] = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
                                      "SLURM_NODELIST"};
  const cddp__launcher *l = &cddp__launchers[at->launcher];
  uint64_t key = cddp__one_host(at) ? cddp__job_key(at->launcher) : 0;
  const char *list = NULL;
  char first[256];
  int i;
  if (key != 0) {
    snprintf(at->init_method, sizeof at->init_method, "unix://cddp-%u-%016" PRIx64,
             (unsigned)geteuid(), key);
    return CDDP_OK;
  }
  for (i = 0; i < 3 && list == NULL && at->launcher == CDDP__BY_SLURM; i++)
    list = cddp__env(lists[i]);
  if (host == NULL && list != NULL) {
    if (!cddp__first_host(list, first, sizeof first))
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s is \"%.200s\", which is no node list; set MASTER_ADDR to rank 0's host",
                        lists[i - 1], list);
    host = first;
  }
  if (port == 0) port = cddp__job_port(at->launcher);
  if (host == NULL || port == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s is not set, and %s does not say where its %d ranks on several hosts "
                      "should meet; add %s to its command, HOST being rank 0's",
                      host == NULL ? "MASTER_ADDR" : "MASTER_PORT", l->name, at->world_size,
                      l->cure);
  cddp__set_master(at, host, port);
  return CDDP_OK;
}

static cddp_result cddp__env_master(cddp__place *at) {
  const char *host = cddp__env("MASTER_ADDR"), *port = cddp__env("MASTER_PORT");
  const char *agent = cddp__env("TORCHELASTIC_USE_AGENT_STORE");
  cddp_result r;
  int number = 0;
  if (port != NULL && (r = cddp__parse_int("MASTER_PORT", port, 1, 65535, &number)) != CDDP_OK)
    return r;
  if (at->launcher != CDDP__BY_SCRIPT && (host == NULL || port == NULL))
    return cddp__launcher_master(at, host, number);
  if (host == NULL || port == NULL)
    return cddp__fail(
        CDDP_INVALID_ARGUMENT,
        "%s is not set, but WORLD_SIZE is %d; set it to rank 0's %s, the same for every rank",
        host == NULL ? "MASTER_ADDR" : "MASTER_PORT", at->world_size,
        host == NULL ? "host name or address" : "port, say 29500");
  cddp__set_master(at, host, number);
  at->client_only = at->launcher == CDDP__BY_SCRIPT && agent != NULL && strcmp(agent, "True") == 0;
  return at->client_only ? CDDP_OK : cddp__env_listen_fd(at, number);
}

static cddp_result cddp__discover_timeout(double given, double *out) {
  const char *text = cddp__env("CDDP_TIMEOUT_S");
  char *end = NULL;
  *out = given > 0 ? given : CDDP__TIMEOUT_S;
  if (given > 0 || text == NULL) return CDDP_OK;
  *out = strtod(text, &end);
  if (end == text || *end != 0 || !(*out > 0) || *out > 1e9)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "CDDP_TIMEOUT_S is \"%s\"; it must be seconds above 0",
                      text);
  return CDDP_OK;
}

static cddp_result cddp__discover(cddp__place *at, const cddp_group_desc *d) {
  const char *method = d->init_method ? d->init_method : "env://";
  const char *run = cddp__env("TORCHELASTIC_RUN_ID"),
             *restart = cddp__env("TORCHELASTIC_RESTART_COUNT");
  cddp_result r;
  memset(at, 0, sizeof *at);
  at->listen_fd = -1;
  snprintf(at->run, sizeof at->run, "cddp/%.80s/%.20s", run ? run : "0", restart ? restart : "0");
  if ((r = cddp__discover_timeout(d->timeout_s, &at->timeout_s)) != CDDP_OK) return r;
  if (d->world_size > 0) {
    at->rank = d->rank;
    at->world_size = d->world_size;
  } else if ((r = cddp__env_ranks(at)) != CDDP_OK) {
    return r;
  }
  if ((r = cddp__env_local(at)) != CDDP_OK) return r;
  if (strcmp(method, "env://") == 0) return at->world_size > 1 ? cddp__env_master(at) : CDDP_OK;
  if (strncmp(method, "tcp://", 6) != 0 && strncmp(method, "file:///", 8) != 0 &&
      strncmp(method, "unix://", 7) != 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "init_method \"%s\" is none of env://, tcp://host:port, unix://name, "
                      "file:///absolute/path",
                      method);
  if (strlen(method) >= sizeof at->init_method)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "init_method is longer than %zu bytes",
                      sizeof at->init_method - 1);
  snprintf(at->init_method, sizeof at->init_method, "%s", method);
  return CDDP_OK;
}
/* >>arena --------------------------------------------------------------------------------------
   Memory that the ranks of a host reduce in place. Works as follows: the ranks hold one memfd, so
   large that it is all holes; rank i's extents lie in its own window of it, so that nobody needs a
   lock to allocate. A buffer is told to peers as a cddp__ref (extent, offset); a peer maps the
   extent when it first meets it and keeps the mapping until the extent is freed and its place
   used again (its generation differs then). The kernel drops everything with the last process. For
   threads every pointer is good as it is. */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static size_t cddp__page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Maps an extent where its huge pages can be used: at an address that agrees with its offset. */
static char *cddp__map_extent(const cddp__host *h, uint64_t base, uint64_t size) {
  size_t align = size >= CDDP__HUGE_PAGE ? CDDP__HUGE_PAGE : cddp__page_size();
  size_t span = (size_t)size + align;
  char *area, *at;
  area = (char *)mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == (char *)MAP_FAILED) return NULL;
  at = area + (align - (uintptr_t)area % align) % align;
  if (mmap(at, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, h->fd,
           (off_t)base) == MAP_FAILED) {
    munmap(area, span);
    return NULL;
  }
  if (at > area) munmap(area, (size_t)(at - area));
  if (at + size < area + span) munmap(at + size, (size_t)(area + span - (at + size)));
  madvise(at, (size_t)size, MADV_DONTFORK);
  return at;
}

static char *cddp__map_plain(uint64_t size) { /* for threads and single ranks */
  size_t span = (size_t)size + CDDP__HUGE_PAGE;
  char *area, *at;
  area = (char *)mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == (char *)MAP_FAILED) return NULL;
  at = area + (CDDP__HUGE_PAGE - (uintptr_t)area % CDDP__HUGE_PAGE) % CDDP__HUGE_PAGE;
  if (size < CDDP__HUGE_PAGE) at = area;
  if (at > area) munmap(area, (size_t)(at - area));
  if (at + size < area + span) munmap(at + size, (size_t)(area + span - (at + size)));
  return at;
}

/* Asks for huge pages. MADV_COLLAPSE makes them, on this core, even where the system's setting for
   shared memory says never, but only of memory that has one page at least. Without it ordinary
   pages do. */
static void cddp__populate(char *address, uint64_t size, bool shared) {
  uint64_t whole = size / CDDP__HUGE_PAGE * CDDP__HUGE_PAGE, at;
  if (whole == 0) return;
  madvise(address, (size_t)whole, MADV_HUGEPAGE);
  if (!shared) return; /* the first touch makes one */
  for (at = 0; at < whole; at += CDDP__HUGE_PAGE) ((volatile char *)address)[at] = 0;
  madvise(address, (size_t)whole, MADV_COLLAPSE);
}

static cddp_result cddp__extents_grow(cddp__host *h) {
  int capacity = h->extent_capacity ? 2 * h->extent_capacity : 32;
  cddp__extent *e;
  if (h->extent_count < h->extent_capacity) return CDDP_OK;
  e = (cddp__extent *)cddp__calloc(&h->allocator, (size_t)capacity, sizeof *e);
  if (e == NULL) return CDDP_OUT_OF_MEMORY;
  if (h->extents != NULL) memcpy(e, h->extents, (size_t)h->extent_count * sizeof *e);
  cddp__free(&h->allocator, h->extents);
  h->extents = e;
  h->extent_capacity = capacity;
  return CDDP_OK;
}

/* Index of a free place of at least size bytes: the smallest that fits, cut to size, or a new one
   at the end of the window; -1 with the error set. Called with the lock held. */
static int cddp__extent_place(cddp__host *h, uint64_t size) {
  uint64_t align = size >= CDDP__HUGE_PAGE ? CDDP__HUGE_PAGE : cddp__page_size();
  uint64_t limit = (uint64_t)(h->index + 2) << h->window_bits, base;
  int i, best = -1;
  for (i = 0; i < h->extent_count; i++) {
    const cddp__extent *e = &h->extents[i];
    if (e->address != NULL || e->size < size || e->base % align != 0) continue;
    if (best < 0 || e->size < h->extents[best].size) best = i;
  }
  if (best >= 0 && h->extents[best].size <= 2 * size) return best;
  if (cddp__extents_grow(h) != CDDP_OK) return -1;
  base = (h->window_end + align - 1) / align * align;
  if (!h->threads && (base > limit || size > limit - base)) {
    cddp__fail(CDDP_OUT_OF_MEMORY,
               "cddp_alloc: %" PRIu64 " bytes do not fit into this rank's window", size);
    return -1;
  }
  best = h->extent_count++;
  h->extents[best].base = base;
  h->extents[best].size = size;
  h->extents[best].address = NULL;
  h->extents[best].dirty = false;
  h->window_end = base + size;
  return best;
}

static void *cddp__arena_alloc(cddp__host *h, size_t bytes) {
  size_t page = bytes >= CDDP__HUGE_PAGE ? CDDP__HUGE_PAGE : cddp__page_size();
  cddp__extent *e = NULL;
  char *address = NULL;
  int i;
  if (bytes > SIZE_MAX / 4) {
    cddp__fail(CDDP_OUT_OF_MEMORY, "cddp_alloc: %zu bytes exceed the address space", bytes);
    return NULL;
  }
  pthread_mutex_lock(&h->lock);
  i = cddp__extent_place(h, cddp__round_up(bytes ? bytes : 1, page));
  if (i >= 0) {
    e = &h->extents[i];
    address = h->fd >= 0 ? cddp__map_extent(h, e->base, e->size) : cddp__map_plain(e->size);
    if (address == NULL) {
      cddp__fail(CDDP_OUT_OF_MEMORY, "cddp_alloc: mmap of %zu bytes: %s", bytes, strerror(errno));
    } else {
      cddp__populate(address, e->size, h->fd >= 0);
      if (e->dirty) memset(address, 0, (size_t)e->size); /* or a board's old steps would seem new */
      e->dirty = false;
      e->address = address;
      e->generation = ++h->generation;
    }
  }
  pthread_mutex_unlock(&h->lock);
  return address;
}

static void cddp__extent_release(cddp__host *h, cddp__extent *e) {
  if (h->fd >= 0) /* the memory goes at once, unless the system will not */
    e->dirty = fallocate(h->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)e->base,
                         (off_t)e->size) != 0;
  munmap(e->address, (size_t)e->size);
  e->address = NULL;
}

/* The own extent that holds p, or NULL. Called with the lock held. */
static cddp__extent *cddp__extent_of(const cddp__host *h, const void *p) {
  const char *c = (const char *)p;
  int i;
  for (i = 0; i < h->extent_count; i++) {
    cddp__extent *e = &h->extents[i];
    if (e->address != NULL && c >= e->address && c < e->address + e->size) return e;
  }
  return NULL;
}

static void cddp__arena_free(cddp__host *h, void *p) {
  cddp__extent *e;
  if (p == NULL) return;
  pthread_mutex_lock(&h->lock);
  e = cddp__extent_of(h, p);
  if (e != NULL && e->address == (char *)p) cddp__extent_release(h, e);
  pthread_mutex_unlock(&h->lock);
}

/* How peers find bytes at p; kind NONE when they cannot. */
static cddp__ref cddp__ref_of(cddp__host *h, const void *p, size_t bytes) {
  cddp__ref ref;
  const cddp__extent *e;
  memset(&ref, 0, sizeof ref);
  if (h->threads) {
    ref.kind = CDDP__REF_POINTER;
    ref.base = (uint64_t)(uintptr_t)p;
    return ref;
  }
  pthread_mutex_lock(&h->lock);
  e = cddp__extent_of(h, p);
  if (e != NULL && bytes <= e->size - (size_t)((const char *)p - e->address)) {
    ref.kind = CDDP__REF_EXTENT;
    ref.base = e->base;
    ref.size = e->size;
    ref.offset = (uint64_t)((const char *)p - e->address);
    ref.generation = e->generation;
  }
  pthread_mutex_unlock(&h->lock);
  return ref;
}

static cddp__mapping *cddp__map_slot(cddp__mapping *maps, int capacity, uint64_t base) {
  uint64_t i = (base >> 12) * 0x9e3779b97f4a7c15ull >> 20;
  for (;; i++) {
    cddp__mapping *m = &maps[i & (uint64_t)(capacity - 1)];
    if (m->address == NULL || m->base == base) return m;
  }
}

static cddp_result cddp__maps_grow(cddp__host *h) {
  int capacity = h->map_capacity ? 2 * h->map_capacity : 64, i;
  cddp__mapping *maps;
  if (2 * (h->map_count + 1) <= h->map_capacity) return CDDP_OK;
  maps = (cddp__mapping *)cddp__calloc(&h->allocator, (size_t)capacity, sizeof *maps);
  if (maps == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < h->map_capacity; i++)
    if (h->maps[i].address != NULL) *cddp__map_slot(maps, capacity, h->maps[i].base) = h->maps[i];
  cddp__free(&h->allocator, h->maps);
  h->maps = maps;
  h->map_capacity = capacity;
  return CDDP_OK;
}

static cddp_result cddp__map_peer(cddp__host *h, const cddp__ref *ref, char **address) {
  cddp__mapping *m;
  if (cddp__maps_grow(h) != CDDP_OK) return CDDP_OUT_OF_MEMORY;
  m = cddp__map_slot(h->maps, h->map_capacity, ref->base);
  if (m->address == NULL || m->generation != ref->generation || m->size != ref->size) {
    char *p = cddp__map_extent(h, ref->base, ref->size);
    if (p == NULL)
      return cddp__fail(CDDP_OUT_OF_MEMORY, "mmap of a peer's memory: %s", strerror(errno));
    if (m->address != NULL)
      munmap(m->address, (size_t)m->size);
    else
      h->map_count++;
    m->base = ref->base;
    m->size = ref->size;
    m->generation = ref->generation;
    m->address = p;
  }
  *address = m->address;
  return CDDP_OK;
}

/* The address here of what ref describes: a peer's or this rank's own. */
static cddp_result cddp__locate(cddp__host *h, const cddp__ref *ref, void **out) {
  cddp_result r = CDDP_OK;
  char *address = NULL;
  uint64_t mine = (uint64_t)(h->index + 1) << h->window_bits;
  int i;
  if (ref->kind == CDDP__REF_POINTER) {
    *out = (void *)(uintptr_t)ref->base;
    return CDDP_OK;
  }
  pthread_mutex_lock(&h->lock);
  if (ref->base >= mine && ref->base - mine < (uint64_t)1 << h->window_bits) {
    for (i = 0; i < h->extent_count; i++)
      if (h->extents[i].base == ref->base) address = h->extents[i].address;
  } else {
    r = cddp__map_peer(h, ref, &address);
  }
  pthread_mutex_unlock(&h->lock);
  *out = address != NULL ? address + ref->offset : NULL;
  return r;
}

static int cddp__count_cores(void) {
  unsigned char set[1024]; /* 8192 processors */
  long bytes = syscall(SYS_sched_getaffinity, 0, sizeof set, set), i;
  int n = 0;
  for (i = 0; i < bytes; i++) n += __builtin_popcount(set[i]);
  if (n == 0) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? n : 1;
}

static cddp__host *cddp__host_create(const cddp_allocator *a, const cddp_logger *l, int size,
                                     int index) {
  cddp__host *h = (cddp__host *)cddp__calloc(a, 1, sizeof *h);
  const char *given = cddp__env("CDDP_HOST_ID");
  if (h == NULL) return NULL;
  if (a != NULL) h->allocator = *a;
  if (l != NULL) h->logger = *l;
  h->size = size;
  h->index = index;
  h->fd = -1;
  h->window_bits = 40;
  h->window_end = (uint64_t)(index + 1) << h->window_bits;
  h->cores = cddp__count_cores();
  h->refs = 1;
  gethostname(h->name, sizeof h->name - 1);
  if (given != NULL)
    snprintf(h->name + strlen(h->name), sizeof h->name - strlen(h->name), "/%.20s", given);
  h->pidfds = (int *)cddp__calloc(a, (size_t)size, sizeof *h->pidfds);
  h->pids = (uint32_t *)cddp__calloc(a, (size_t)size, sizeof *h->pids);
  if (h->pidfds == NULL || h->pids == NULL || pthread_mutex_init(&h->lock, NULL) != 0) {
    cddp__free(a, h->pidfds);
    cddp__free(a, h->pids);
    cddp__free(a, h);
    return NULL;
  }
  memset(h->pidfds, 0xff, (size_t)size * sizeof *h->pidfds);
  return h;
}

/* Where this rank is among the ranks of the host; before anything is allocated. The arrays are
   large enough for the job. */
static void cddp__host_place(cddp__host *h, int size, int index) {
  h->size = size;
  h->index = index;
  h->window_end = (uint64_t)(index + 1) << h->window_bits;
}

static void cddp__host_release(cddp__host *h) {
  cddp_allocator a;
  int i, left;
  if (h == NULL) return;
  pthread_mutex_lock(&h->lock);
  left = --h->refs;
  pthread_mutex_unlock(&h->lock);
  if (left > 0) return;
  for (i = 0; i < h->extent_count; i++)
    if (h->extents[i].address != NULL) munmap(h->extents[i].address, (size_t)h->extents[i].size);
  for (i = 0; i < h->map_capacity; i++)
    if (h->maps[i].address != NULL) munmap(h->maps[i].address, (size_t)h->maps[i].size);
  for (i = 0; i < h->size; i++)
    if (h->pidfds[i] >= 0) close(h->pidfds[i]);
  if (h->fd >= 0) close(h->fd);
  cddp__record_close(h->record);
  if (h->net != NULL) h->net->close(h->net);
  pthread_mutex_destroy(&h->lock);
  a = h->allocator;
  cddp__free(&a, h->extents);
  cddp__free(&a, h->maps);
  cddp__free(&a, h->pidfds);
  cddp__free(&a, h->pids);
  cddp__free(&a, h);
}
/* >>reduce ---------------------------------------------------------------------------------------
   Sums in canonical order, and element types. Pure.

   The loops are written once, in plain C, as CDDP__TEMPLATE functions. Thin functions instantiate
   them for each instruction set (CDDP__KERNEL_SET), and cddp__pick_kernels takes the best that this
   machine has. All give the same bits: each element's operations and their order are the same, and
   no compiler option may contract a * b + c or reorder sums here. */

#if defined(__x86_64__) && !defined(CDDP__NO_DISPATCH)
#define CDDP__DISPATCH 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define CDDP__DISPATCH 0
#endif

#define CDDP__TEMPLATE static inline __attribute__((always_inline))
#if defined(__clang__)
#define CDDP__KERNEL
#define CDDP__STRICT_FP _Pragma("clang fp contract(off) reassociate(off)")
#define CDDP__IVDEP _Pragma("clang loop vectorize(assume_safety)") /* destinations may be sources */
#define CDDP__WIDE ""
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed" /* a loop that stays scalar is no fault */
#else
#define CDDP__KERNEL __attribute__((optimize("O3", "fp-contract=off", "no-fast-math")))
#define CDDP__STRICT_FP
#define CDDP__IVDEP _Pragma("GCC ivdep") /* destinations may be sources */
#define CDDP__WIDE ",prefer-vector-width=512"
#endif

static bool cddp__dtype_ok(cddp_dtype d) { return (unsigned)d <= (unsigned)CDDP_I64; }

static size_t cddp__dtype_size(cddp_dtype d) {
  switch (d) {
    case CDDP_F32: case CDDP_I32: return 4;
    case CDDP_F64: case CDDP_I64: return 8;
    case CDDP_F16: case CDDP_BF16: return 2;
    case CDDP_I8: case CDDP_U8: return 1;
    default: return 0;
  }
}

/* Half precision, as the F16C instructions do it: NaNs turn quiet, keep sign and upper payload. */

CDDP__TEMPLATE uint32_t cddp__f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

CDDP__TEMPLATE float cddp__f32_of_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

/* c ? a : b for c = 0 or 1, as arithmetic that every machine can do on vectors. */
CDDP__TEMPLATE uint32_t cddp__choose(bool c, uint32_t a, uint32_t b) {
  uint32_t mask = 0u - (uint32_t)c;
  return (a & mask) | (b & ~mask);
}

CDDP__TEMPLATE float cddp__widen_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = h & 0x7fffu;
  uint32_t normal = (a << 13) + cddp__choose(a >= 0x7c00, 224u << 23, 112u << 23);
  uint32_t small = cddp__f32_bits((float)(int32_t)a * 0x1p-24f); /* subnormal or zero: exact */
  uint32_t quiet = cddp__choose(a > 0x7c00, 0x400000, 0);
  return cddp__f32_of_bits(sign | quiet | cddp__choose(a < 0x400, small, normal));
}

CDDP__TEMPLATE uint16_t cddp__narrow_f16(float x) {
  uint32_t u = cddp__f32_bits(x), a = u & 0x7fffffff;
  uint32_t normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
  /* below 2^-14: adding 0.5, whose last place is 2^-24, does the rounding */
  uint32_t little = cddp__choose(a < 0x38800000, a, 0);
  uint32_t small = cddp__f32_bits(cddp__f32_of_bits(little) + 0.5f) - 0x3f000000;
  uint32_t bits = cddp__choose(a < 0x38800000, small, normal);
  bits = cddp__choose(a >= 0x477ff000, 0x7c00, bits); /* 65520 and more round to infinity */
  bits = cddp__choose(a > 0x7f800000, 0x7e00 | ((a >> 13) & 0x1ff), bits);
  return (uint16_t)((u >> 16 & 0x8000) | bits);
}

CDDP__TEMPLATE float cddp__widen_bf16(uint16_t h) { return cddp__f32_of_bits((uint32_t)h << 16); }

CDDP__TEMPLATE uint16_t cddp__narrow_bf16(float x) {
  uint32_t u = cddp__f32_bits(x), a = u & 0x7fffffff;
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (uint16_t)(a > 0x7f800000 ? u >> 16 | 0x40 : rounded);
}

static float cddp__f16_to_f32(uint16_t h) { return cddp__widen_f16(h); }
static uint16_t cddp__f32_to_f16(float x) { return cddp__narrow_f16(x); }
static float cddp__bf16_to_f32(uint16_t h) { return cddp__widen_bf16(h); }
static uint16_t cddp__f32_to_bf16(float x) { return cddp__narrow_bf16(x); }

/* Loops. */

#define CDDP__EACH(statement) \
  do {                        \
    size_t i;                 \
    CDDP__IVDEP               \
    for (i = 0; i < n; i++) { \
      statement;              \
    }                         \
  } while (0)

/* d[i] = the lesser (or greater) of a[i] and b[i]; where either is NaN, that NaN comes through */
#define CDDP__EACH_PICK(T, before) \
  CDDP__EACH(T x = a[i]; T y = b[i]; d[i] = ((x before y) | (x != x)) ? x : y)

/* T: element, F: type of the arithmetic, IN and OUT convert between them */
#define CDDP__SUM_LOOPS(T, F, S, IN, OUT)                                               \
  CDDP__TEMPLATE void cddp__sum_##S(T *d, const void *const *s, int k, size_t n, F f,   \
                                    bool divide) {                                      \
    CDDP__STRICT_FP                                                                     \
    const T *s0 = (const T *)s[0], *s1 = (const T *)s[1];                               \
    const T *s2 = k > 2 ? (const T *)s[2] : s0, *s3 = k > 3 ? (const T *)s[3] : s0;     \
    if (k == 2 && divide) {                                                             \
      CDDP__EACH(d[i] = OUT((IN(s0[i]) + IN(s1[i])) / f));                              \
    } else if (k == 2) {                                                                \
      CDDP__EACH(d[i] = OUT((IN(s0[i]) + IN(s1[i])) * f));                              \
    } else if (k == 3 && divide) {                                                      \
      CDDP__EACH(d[i] = OUT(((IN(s0[i]) + IN(s1[i])) + IN(s2[i])) / f));                \
    } else if (k == 3) {                                                                \
      CDDP__EACH(d[i] = OUT(((IN(s0[i]) + IN(s1[i])) + IN(s2[i])) * f));                \
    } else if (k == 4) {                                                                \
      CDDP__EACH(d[i] = OUT(((IN(s0[i]) + IN(s1[i])) + (IN(s2[i]) + IN(s3[i]))) * f));  \
    } else {                                                                            \
      const T *s4 = (const T *)s[4], *s5 = (const T *)s[5];                             \
      const T *s6 = (const T *)s[6], *s7 = (const T *)s[7];                             \
      CDDP__EACH(F x = (IN(s0[i]) + IN(s1[i])) + (IN(s2[i]) + IN(s3[i]));               \
                 F y = (IN(s4[i]) + IN(s5[i])) + (IN(s6[i]) + IN(s7[i]));               \
                 d[i] = OUT((x + y) * f));                                              \
    }                                                                                   \
  }                                                                                     \
  CDDP__TEMPLATE void cddp__all_##S(void *const *bufs, int k, size_t n, F f) {          \
    CDDP__STRICT_FP                                                                     \
    T *b0 = (T *)bufs[0], *b1 = (T *)bufs[1];                                           \
    T *b2 = k > 2 ? (T *)bufs[2] : b0, *b3 = k > 2 ? (T *)bufs[3] : b0;                 \
    if (k == 2) {                                                                       \
      CDDP__EACH(T t = OUT((IN(b0[i]) + IN(b1[i])) * f); b0[i] = t; b1[i] = t);         \
    } else if (k == 4) {                                                                \
      CDDP__EACH(T t = OUT(((IN(b0[i]) + IN(b1[i])) + (IN(b2[i]) + IN(b3[i]))) * f);    \
                 b0[i] = t; b1[i] = t; b2[i] = t; b3[i] = t);                           \
    } else {                                                                            \
      T *b4 = (T *)bufs[4], *b5 = (T *)bufs[5], *b6 = (T *)bufs[6], *b7 = (T *)bufs[7]; \
      CDDP__EACH(F x = (IN(b0[i]) + IN(b1[i])) + (IN(b2[i]) + IN(b3[i]));               \
                 F y = (IN(b4[i]) + IN(b5[i])) + (IN(b6[i]) + IN(b7[i]));               \
                 T t = OUT((x + y) * f);                                                \
                 b0[i] = t; b1[i] = t; b2[i] = t; b3[i] = t;                            \
                 b4[i] = t; b5[i] = t; b6[i] = t; b7[i] = t);                           \
    }                                                                                   \
  }
#define CDDP__SAME(x) (x)
CDDP__SUM_LOOPS(cddp__f32, float, f32, CDDP__SAME, CDDP__SAME)
CDDP__SUM_LOOPS(cddp__f64, double, f64, CDDP__SAME, CDDP__SAME)
CDDP__SUM_LOOPS(cddp__u16, float, bf16, cddp__widen_bf16, cddp__narrow_bf16)
#undef CDDP__SAME
#undef CDDP__SUM_LOOPS

#define CDDP__FLOAT_LOOPS(T, S)                                                         \
  CDDP__TEMPLATE void cddp__pair_##S(void *dst, const void *p, const void *q, size_t n, \
                                     cddp_op op) {                                      \
    CDDP__STRICT_FP                                                                     \
    T *d = (T *)dst;                                                                    \
    const T *a = (const T *)p, *b = (const T *)q;                                       \
    if (op == CDDP_PROD) CDDP__EACH(d[i] = a[i] * b[i]);                                \
    else if (op == CDDP_MIN) CDDP__EACH_PICK(T, <);                                     \
    else CDDP__EACH_PICK(T, >);                                                         \
  }                                                                                     \
  CDDP__TEMPLATE void cddp__scale_##S(T *d, size_t n, T f, bool divide) {               \
    CDDP__STRICT_FP                                                                     \
    if (divide) CDDP__EACH(d[i] = d[i] / f);                                            \
    else CDDP__EACH(d[i] = d[i] * f);                                                   \
  }
CDDP__FLOAT_LOOPS(cddp__f32, f32)
CDDP__FLOAT_LOOPS(cddp__f64, f64)
#undef CDDP__FLOAT_LOOPS

/* U is T unsigned: sums and products wrap around. */
#define CDDP__INT_LOOPS(T, U, S)                                                        \
  CDDP__TEMPLATE void cddp__pair_##S(void *dst, const void *p, const void *q, size_t n, \
                                     cddp_op op) {                                      \
    T *d = (T *)dst;                                                                    \
    const T *a = (const T *)p, *b = (const T *)q;                                       \
    if (op == CDDP_PROD) CDDP__EACH(d[i] = (T)(U)((U)a[i] * (U)b[i]));                  \
    else if (op == CDDP_MIN) CDDP__EACH_PICK(T, <);                                     \
    else if (op == CDDP_MAX) CDDP__EACH_PICK(T, >);                                     \
    else CDDP__EACH(d[i] = (T)(U)((U)a[i] + (U)b[i]));                                  \
  }
CDDP__INT_LOOPS(cddp__i8, uint8_t, i8)
CDDP__INT_LOOPS(cddp__u8, uint8_t, u8)
CDDP__INT_LOOPS(cddp__i32, uint32_t, i32)
CDDP__INT_LOOPS(cddp__i64, uint64_t, i64)
#undef CDDP__INT_LOOPS

CDDP__TEMPLATE void cddp__sum(void *d, const void *const *s, int k, size_t n, cddp_dtype dtype,
                              double f, bool divide) {
  if (dtype == CDDP_F64) cddp__sum_f64((cddp__f64 *)d, s, k, n, f, divide);
  else if (dtype == CDDP_F32) cddp__sum_f32((cddp__f32 *)d, s, k, n, (float)f, divide);
  else cddp__sum_bf16((cddp__u16 *)d, s, k, n, (float)f, divide);
}

CDDP__TEMPLATE void cddp__all(void *const *bufs, int k, size_t n, cddp_dtype dtype, double f) {
  if (dtype == CDDP_F64) cddp__all_f64(bufs, k, n, f);
  else if (dtype == CDDP_F32) cddp__all_f32(bufs, k, n, (float)f);
  else cddp__all_bf16(bufs, k, n, (float)f);
}

CDDP__TEMPLATE void cddp__pair(void *d, const void *a, const void *b, size_t n, cddp_dtype dtype,
                               cddp_op op) {
  switch (dtype) {
    case CDDP_F32: cddp__pair_f32(d, a, b, n, op); break;
    case CDDP_F64: cddp__pair_f64(d, a, b, n, op); break;
    case CDDP_I8: cddp__pair_i8(d, a, b, n, op); break;
    case CDDP_U8: cddp__pair_u8(d, a, b, n, op); break;
    case CDDP_I32: cddp__pair_i32(d, a, b, n, op); break;
    case CDDP_I64: cddp__pair_i64(d, a, b, n, op); break;
    default: break;
  }
}

/* Floats: * f or / f. Integers: / f, truncated (a divisor is at most CDDP__MAX_RANKS). */
CDDP__TEMPLATE void cddp__scale_any(void *p, size_t n, cddp_dtype dtype, double f, bool divide) {
  int k = dtype == CDDP_F32 || dtype == CDDP_F64 ? 0 : (int)f;
  switch (dtype) {
    case CDDP_F32: cddp__scale_f32((cddp__f32 *)p, n, (float)f, divide); break;
    case CDDP_F64: cddp__scale_f64((cddp__f64 *)p, n, f, divide); break;
    case CDDP_I8: CDDP__EACH(((cddp__i8 *)p)[i] = (int8_t)(((cddp__i8 *)p)[i] / k)); break;
    case CDDP_U8: CDDP__EACH(((cddp__u8 *)p)[i] = (uint8_t)(((cddp__u8 *)p)[i] / k)); break;
    case CDDP_I32: CDDP__EACH(((cddp__i32 *)p)[i] /= k); break;
    case CDDP_I64: CDDP__EACH(((cddp__i64 *)p)[i] /= k); break;
    default: break;
  }
}

CDDP__TEMPLATE void cddp__widen(cddp__f32 *d, const void *src, size_t n, cddp_dtype from) {
  const cddp__u16 *s = (const cddp__u16 *)src;
  if (from == CDDP_F16) CDDP__EACH(d[i] = cddp__widen_f16(s[i]));
  else CDDP__EACH(d[i] = cddp__widen_bf16(s[i]));
}

CDDP__TEMPLATE void cddp__narrow(void *dst, const cddp__f32 *s, size_t n, cddp_dtype to) {
  cddp__u16 *d = (cddp__u16 *)dst;
  if (to == CDDP_F16) CDDP__EACH(d[i] = cddp__narrow_f16(s[i]));
  else CDDP__EACH(d[i] = cddp__narrow_bf16(s[i]));
}

/* Works as follows: element i goes to lane i mod 16, the lanes are added in pairs. So the order
   depends on nothing but n. */
#define CDDP__SQUARES(T, S)                                       \
  CDDP__TEMPLATE double cddp__squares_##S(const T *p, size_t n) { \
    CDDP__STRICT_FP                                               \
    double lane[16];                                              \
    size_t i, j, whole = n / 16 * 16;                             \
    for (j = 0; j < 16; j++) lane[j] = 0;                         \
    for (i = 0; i < whole; i += 16) {                             \
      for (j = 0; j < 16; j++) {                                  \
        double square = (double)p[i + j] * (double)p[i + j];      \
        lane[j] += square;                                        \
      }                                                           \
    }                                                             \
    for (i = whole; i < n; i++) {                                 \
      double square = (double)p[i] * (double)p[i];                \
      lane[i - whole] += square;                                  \
    }                                                             \
    for (j = 8; j > 0; j /= 2) {                                  \
      for (i = 0; i < j; i++) lane[i] += lane[i + j];             \
    }                                                             \
    return lane[0];                                               \
  }
CDDP__SQUARES(cddp__f32, f32)
CDDP__SQUARES(cddp__f64, f64)
#undef CDDP__SQUARES

CDDP__TEMPLATE double cddp__squares(const void *p, size_t n, cddp_dtype dtype) {
  return dtype == CDDP_F64 ? cddp__squares_f64((const cddp__f64 *)p, n)
                           : cddp__squares_f32((const cddp__f32 *)p, n);
}

/* F16C converts 8 elements in one instruction. */
#if CDDP__DISPATCH
#define CDDP__AVX2 __attribute__((target("avx2,fma,f16c")))
#define CDDP__AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c" CDDP__WIDE)))

CDDP__AVX2 static void cddp__widen_f16c(cddp__f32 *d, const void *src, size_t n) {
  const cddp__u16 *s = (const cddp__u16 *)src;
  size_t i;
  for (i = 0; i + 8 <= n; i += 8) {
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(s + i));
    _mm256_storeu_ps((float *)(d + i), _mm256_cvtph_ps(h));
  }
  for (; i < n; i++) d[i] = cddp__widen_f16(s[i]);
}

CDDP__AVX2 static void cddp__narrow_f16c(void *dst, const cddp__f32 *s, size_t n) {
  cddp__u16 *d = (cddp__u16 *)dst;
  size_t i;
  for (i = 0; i + 8 <= n; i += 8) {
    __m256 x = _mm256_loadu_ps((const float *)(s + i));
    _mm_storeu_si128((__m128i *)(void *)(d + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; i++) d[i] = cddp__narrow_f16(s[i]);
}
#endif

/* One function per entry of cddp__kernels, compiled for TARGET, and the table of them. */
#define CDDP__KERNEL_SET(ISA, TARGET, WIDEN_F16, NARROW_F16)                                      \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__sum_##ISA(void *d, const void *const *s, int k, size_t n, cddp_dtype dtype,   \
                              double f, bool divide) {                                            \
    cddp__sum(d, s, k, n, dtype, f, divide);                                                      \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__all_##ISA(void *const *bufs, int k, size_t n, cddp_dtype dtype, double f) {   \
    cddp__all(bufs, k, n, dtype, f);                                                              \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__pair_##ISA(void *d, const void *a, const void *b, size_t n, cddp_dtype dtype, \
                               cddp_op op) {                                                      \
    cddp__pair(d, a, b, n, dtype, op);                                                            \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__scale_##ISA(void *d, size_t n, cddp_dtype dtype, double f, bool divide) {     \
    cddp__scale_any(d, n, dtype, f, divide);                                                      \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__widen_##ISA(cddp__f32 *d, const void *s, size_t n, cddp_dtype from) {         \
    if (from == CDDP_F16) WIDEN_F16;                                                              \
    else cddp__widen(d, s, n, CDDP_BF16);                                                         \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__narrow_##ISA(void *d, const cddp__f32 *s, size_t n, cddp_dtype to) {          \
    if (to == CDDP_F16) NARROW_F16;                                                               \
    else cddp__narrow(d, s, n, CDDP_BF16);                                                        \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static double cddp__squares_##ISA(const void *p, size_t n, cddp_dtype dtype) {                  \
    return cddp__squares(p, n, dtype);                                                            \
  }                                                                                               \
  static const cddp__kernels cddp__kernels_##ISA = {                                              \
      cddp__sum_##ISA,   cddp__all_##ISA,    cddp__pair_##ISA,   cddp__scale_##ISA,               \
      cddp__widen_##ISA, cddp__narrow_##ISA, cddp__squares_##ISA};

CDDP__KERNEL_SET(base, , cddp__widen(d, s, n, CDDP_F16), cddp__narrow(d, s, n, CDDP_F16))
#if CDDP__DISPATCH
CDDP__KERNEL_SET(avx2, CDDP__AVX2, cddp__widen_f16c(d, s, n), cddp__narrow_f16c(d, s, n))
CDDP__KERNEL_SET(avx512, CDDP__AVX512, cddp__widen_f16c(d, s, n), cddp__narrow_f16c(d, s, n))
#endif
#undef CDDP__KERNEL_SET

enum { CDDP__ISA_BASE = 1, CDDP__ISA_AVX2, CDDP__ISA_AVX512 };
static int cddp__isa_found; /* 0 until asked; only cddp__isa (and tests) touch it */

/* CDDP__ISA_*: the best this machine and system have. AVX-512 only where there is VBMI too (Ice
   Lake, Zen 4): those before slow their clock down for it, which these loops cannot earn. */
static int cddp__isa(void) {
  int isa = __atomic_load_n(&cddp__isa_found, __ATOMIC_RELAXED);
  if (isa != 0) return isa;
  isa = CDDP__ISA_BASE;
#if CDDP__DISPATCH
  {
    unsigned a, b, c = 0, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_FMA) && (c & bit_F16C) &&
        __builtin_cpu_supports("avx2"))
      isa = CDDP__ISA_AVX2;
    if (isa == CDDP__ISA_AVX2 && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      isa = CDDP__ISA_AVX512;
  }
#endif
  __atomic_store_n(&cddp__isa_found, isa, __ATOMIC_RELAXED);
  return isa;
}

static const cddp__kernels *cddp__pick_kernels(void) {
  switch (cddp__isa()) {
#if CDDP__DISPATCH
  case CDDP__ISA_AVX512: return &cddp__kernels_avx512;
  case CDDP__ISA_AVX2: return &cddp__kernels_avx2;
#endif
  default: return &cddp__kernels_base;
  }
}

#define CDDP__BLOCK_BYTES 4096 /* handled at a time, so that they stay in the first cache */
#define CDDP__FOLD_DEPTH 14    /* partial results at a time: log2(CDDP__MAX_RANKS) and two */

static void cddp__fold_init(cddp__fold *f, const void *const *srcs, int nsrcs, cddp_dtype dtype,
                            cddp_op op) {
  bool halves = dtype == CDDP_F16 || dtype == CDDP_BF16;
  bool integer = !halves && dtype != CDDP_F32 && dtype != CDDP_F64;
  bool average = op == CDDP_AVG;
  f->kernels = cddp__pick_kernels();
  f->srcs = srcs;
  f->widths = NULL;
  f->wide = false;
  f->nsrcs = nsrcs;
  f->dtype = dtype;
  f->compute = halves ? CDDP_F32 : dtype;
  f->op = average ? CDDP_SUM : op;
  f->esize = cddp__dtype_size(dtype);
  f->csize = cddp__dtype_size(f->compute);
  f->leaf = f->op == CDDP_SUM && !halves && !integer ? 8 : 1;
  f->direct = f->op == CDDP_SUM && (f->leaf == 8 || dtype == CDDP_BF16) &&
              (nsrcs <= 4 || nsrcs == 8);
  /* dividing by a power of two is multiplying by its inverse, to the bit, and faster */
  f->divide = average && (integer || (nsrcs & (nsrcs - 1)) != 0);
  f->factor = !average ? 1.0 : f->divide ? (double)nsrcs : 1.0 / (double)nsrcs;
}

/* d = a op b, in the compute type. The last one of a tree scales the result. */
static void cddp__fold_pair(const cddp__fold *f, void *d, const void *a, const void *b, size_t n,
                            bool last) {
  if (f->op == CDDP_SUM && (f->compute == CDDP_F32 || f->compute == CDDP_F64)) {
    const void *s[2];
    s[0] = a;
    s[1] = b;
    f->kernels->sum(d, s, 2, n, f->compute, last ? f->factor : 1.0, last && f->divide);
  } else {
    f->kernels->pair(d, a, b, n, f->compute, f->op);
    if (last && f->divide) f->kernels->scale(d, n, f->compute, f->factor, true);
  }
}

/* The reduction of sources first .. first + k - 1 (k = 1, 2, 4 or 8) from element `at`: in the
   source itself or in buf. */
static const void *cddp__fold_leaf(const cddp__fold *f, void *buf, int first, int k, size_t at,
                                   size_t n) {
  const void *s[8];
  int i;
  if (f->widths != NULL && f->widths[first] > 1)
    return (const char *)f->srcs[first] + at * f->csize;
  for (i = 0; i < k; i++) s[i] = (const char *)f->srcs[first + i] + at * f->esize;
  if (k > 1) {
    f->kernels->sum(buf, s, k, n, f->compute, 1.0, false);
  } else if (f->compute != f->dtype) {
    f->kernels->widen((cddp__f32 *)buf, s[0], n, f->dtype);
  } else {
    return s[0];
  }
  return buf;
}

/* Works as follows, for n elements from `at`, at most a block. Partial results wait on a stack,
   each of 2^j sources, the sizes falling from bottom to top. A leaf is pushed; while the two on top
   have the same size, or there are no more sources, they are merged. That is the canonical tree: it
   splits a range at the largest power of two below its length. The last merge writes dst. */
static void cddp__fold_block(const cddp__fold *f, char *dst, size_t at, size_t n) {
  double bufs[CDDP__FOLD_DEPTH][CDDP__BLOCK_BYTES / sizeof(double)];
  const void *parts[CDDP__FOLD_DEPTH];
  int sizes[CDDP__FOLD_DEPTH]; /* sources in each part */
  int depth = 0, i = 0, k;
  bool narrow = f->compute != f->dtype && !f->wide;
  dst += at * (f->wide ? f->csize : f->esize);
  while (i < f->nsrcs) {
    for (k = f->leaf; k > f->nsrcs - i; k /= 2) continue;
    parts[depth] = cddp__fold_leaf(f, bufs[depth], i, k, at, n);
    sizes[depth++] = f->widths != NULL ? f->widths[i] : k;
    i += k;
    while (depth > 1 && (i == f->nsrcs || sizes[depth - 1] == sizes[depth - 2])) {
      bool last = i == f->nsrcs && depth == 2;
      void *out = last && !narrow ? (void *)dst : (void *)bufs[depth - 2];
      depth--;
      cddp__fold_pair(f, out, parts[depth - 1], parts[depth], n, last);
      parts[depth - 1] = out;
      sizes[depth - 1] += sizes[depth];
    }
  }
  if (narrow) f->kernels->narrow(dst, (const cddp__f32 *)parts[0], n, f->dtype);
}

/* dst[at .. at + n) of a fold with at least two sources. */
static void cddp__fold_range(const cddp__fold *f, void *dst, size_t at, size_t n) {
  size_t block = CDDP__BLOCK_BYTES / f->csize, end = at + n;
  if (f->direct) {
    const void *s[8];
    int i;
    for (i = 0; i < f->nsrcs; i++) s[i] = (const char *)f->srcs[i] + at * f->esize;
    f->kernels->sum((char *)dst + at * f->esize, s, f->nsrcs, n, f->dtype, f->factor, f->divide);
    return;
  }
  for (; at < end; at += block) cddp__fold_block(f, (char *)dst, at, cddp__min(block, end - at));
}

/* dst[i] = the canonical tree over srcs[..][i]; AVG divides by nsrcs. dst may be exactly one of the
   sources. nsrcs is 1 .. CDDP__MAX_RANKS. */
static void cddp__reduce(void *dst, const void *const *srcs, int nsrcs, size_t n, cddp_dtype dtype,
                         cddp_op op) {
  cddp__fold f;
  if (nsrcs == 1) {
    if (dst != srcs[0] && n > 0) memcpy(dst, srcs[0], n * cddp__dtype_size(dtype));
    return;
  }
  cddp__fold_init(&f, srcs, nsrcs, dtype, op);
  cddp__fold_range(&f, dst, 0, n);
}

/* The sum of some ranks, in the compute type and not divided: what another host needs of them. */
static void cddp__reduce_part(void *dst, const void *const *srcs, int nsrcs, size_t n,
                              cddp_dtype dtype, cddp_op op) {
  cddp__fold f;
  cddp__fold_init(&f, srcs, nsrcs, dtype, op == CDDP_AVG ? CDDP_SUM : op);
  f.wide = f.compute != dtype;
  f.direct = f.direct && !f.wide;
  cddp__fold_range(&f, dst, 0, n);
}

/* The rest of the canonical tree, over nodes of widths[..] of its `ranks` ranks; at least two. */
static void cddp__reduce_nodes(void *dst, const void *const *srcs, const int *widths, int nsrcs,
                               int ranks, size_t n, cddp_dtype dtype, cddp_op op) {
  cddp__fold f;
  cddp__fold_init(&f, srcs, ranks, dtype, op);
  f.nsrcs = nsrcs;
  f.widths = widths;
  f.leaf = 1;
  f.direct = false;
  cddp__fold_range(&f, dst, 0, n);
}

/* As cddp__reduce, with the result in every buffer. Reads and writes each once from memory. */
static void cddp__reduce_all(void *const *bufs, int nbufs, size_t n, cddp_dtype dtype, cddp_op op) {
  cddp__fold f;
  size_t at, block, bytes;
  int i;
  if (nbufs == 1) return;
  cddp__fold_init(&f, (const void *const *)bufs, nbufs, dtype, op);
  if (f.direct && nbufs != 3) {
    f.kernels->all(bufs, nbufs, n, dtype, f.factor);
    return;
  }
  block = CDDP__BLOCK_BYTES / f.csize;
  for (at = 0; at < n; at += block) {
    cddp__fold_range(&f, bufs[0], at, cddp__min(block, n - at));
    bytes = cddp__min(block, n - at) * f.esize;
    for (i = 1; i < nbufs; i++) {
      memcpy((char *)bufs[i] + at * f.esize, (char *)bufs[0] + at * f.esize, bytes);
    }
  }
}

/* p[i] *= factor, with one rounding; factor is rounded to the type of the arithmetic first. F32,
   F64, F16, BF16. */
static void cddp__scale(void *p, size_t n, cddp_dtype dtype, double factor) {
  const cddp__kernels *k = cddp__pick_kernels();
  double buf[CDDP__BLOCK_BYTES / sizeof(double)];
  size_t at, m, block = CDDP__BLOCK_BYTES / sizeof(float);
  if (dtype != CDDP_F16 && dtype != CDDP_BF16) {
    k->scale(p, n, dtype, factor, false);
    return;
  }
  for (at = 0; at < n; at += block) {
    char *q = (char *)p + at * 2;
    m = cddp__min(block, n - at);
    k->widen((cddp__f32 *)(void *)buf, q, m, dtype);
    k->scale(buf, m, CDDP_F32, factor, false);
    k->narrow(q, (const cddp__f32 *)(const void *)buf, m, dtype);
  }
}

/* The sum of squares in double, in an order that depends on n alone. F32, F64, F16, BF16. */
static double cddp__sum_squares(const void *p, size_t n, cddp_dtype dtype) {
  const cddp__kernels *k = cddp__pick_kernels();
  double buf[CDDP__BLOCK_BYTES / sizeof(double)], sum = 0;
  size_t at, m, esize = cddp__dtype_size(dtype), block = CDDP__BLOCK_BYTES / sizeof(float);
  for (at = 0; at < n; at += block) {
    const void *q = (const char *)p + at * esize;
    m = cddp__min(block, n - at);
    if (dtype == CDDP_F16 || dtype == CDDP_BF16) {
      k->widen((cddp__f32 *)(void *)buf, q, m, dtype);
      sum += k->squares(buf, m, CDDP_F32);
    } else {
      sum += k->squares(q, m, dtype);
    }
  }
  return sum;
}

/* The float that, rounded once more to half precision, gives what x rounded at once would: cut off
   towards zero, the last bit set if anything was lost. */
static float cddp__round_odd(double x) {
  float y = (float)x;
  uint32_t u = cddp__f32_bits(y);
  if (x != x || (double)y == x) return y;
  if (fabs((double)y) > fabs(x)) u--;
  return cddp__f32_of_bits(u | 1);
}

/* One block between two of F32, F64, F16, BF16. */
static void cddp__convert_block(const cddp__kernels *k, void *dst, cddp_dtype to, const void *src,
                                cddp_dtype from, size_t n) {
  float buf[CDDP__BLOCK_BYTES / sizeof(float)];
  const cddp__f32 *mid = (const cddp__f32 *)src;
  cddp__f64 *d = (cddp__f64 *)dst;
  size_t i;
  if (from == CDDP_F64) {
    const cddp__f64 *s = (const cddp__f64 *)src;
    if (to == CDDP_F32) for (i = 0; i < n; i++) ((cddp__f32 *)dst)[i] = (float)s[i];
    else for (i = 0; i < n; i++) buf[i] = cddp__round_odd(s[i]);
    if (to == CDDP_F32) return;
    mid = buf;
  } else if (from != CDDP_F32) {
    k->widen(to == CDDP_F32 ? (cddp__f32 *)dst : buf, src, n, from);
    if (to == CDDP_F32) return;
    mid = buf;
  }
  if (to == CDDP_F64) for (i = 0; i < n; i++) d[i] = (double)mid[i];
  else k->narrow(dst, mid, n, to);
}

/* dst[i] = src[i], rounded to the nearest, ties to even. No overlap, unless to == from. */
static void cddp__convert(void *dst, cddp_dtype to, const void *src, cddp_dtype from, size_t n) {
  const cddp__kernels *k = cddp__pick_kernels();
  size_t at, to_size = cddp__dtype_size(to), from_size = cddp__dtype_size(from);
  size_t block = CDDP__BLOCK_BYTES / sizeof(float);
  if (to == from) {
    if (n > 0) memmove(dst, src, n * to_size);
    return;
  }
  for (at = 0; at < n; at += block) {
    cddp__convert_block(k, (char *)dst + at * to_size, to, (const char *)src + at * from_size, from,
                        cddp__min(block, n - at));
  }
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
/* >>plan ---------------------------------------------------------------------------------------
   Who gets what: slices of an array, buckets of parameters. Pure. */

/* Part `part` of n elements: contiguous parts that cover all, cut at multiples of granule, their
   sizes differing by at most a granule (the last ones are larger, as the end may be cut short). */
static void cddp__slice(size_t n, size_t granule, int parts, int part, size_t *begin,
                              size_t *end) {
  size_t grains = n / granule + (n % granule != 0), i = (size_t)part;
  size_t each = grains / (size_t)parts, plain = (size_t)parts - grains % (size_t)parts;
  size_t first = each * i + (i > plain ? i - plain : 0), count = each + (i >= plain);
  *begin = first >= grains ? n : first * granule;
  *end = first + count >= grains ? n : (first + count) * granule;
}

/* The bucket that parameters of one dtype are being added to. */
typedef struct cddp__open_bucket {
  int id;       /* in order of creation; -1: none open */
  size_t bytes; /* in it so far */
  int limit;    /* index of the limit in force */
} cddp__open_bucket;

/* Deals position after position out to buckets, as PyTorch's compute_bucket_assignment_by_size: a
   bucket is closed once its bytes reach the limit. bucket_of[position] is its number in order of
   creation, emitted[number] its place in order of closing. Returns how many buckets. */
static int cddp__deal_buckets(const cddp_param *params, int count, const int *order,
                              const size_t *limits, int limit_count, int *bucket_of, int *emitted) {
  cddp__open_bucket open[CDDP_I64 + 1];
  int seen[CDDP_I64 + 1]; /* dtypes in order of first appearance */
  int seen_count = 0, created = 0, closed = 0, i, key;
  for (key = 0; key <= CDDP_I64; key++) open[key].id = open[key].limit = -1;
  for (i = 0; i < count; i++) {
    const cddp_param *p = &params[order != NULL ? order[i] : i];
    cddp__open_bucket *b = &open[p->dtype];
    if (b->limit < 0) {
      b->limit = 0;
      seen[seen_count++] = (int)p->dtype;
    }
    if (b->id < 0) {
      b->id = created++;
      b->bytes = 0;
    }
    bucket_of[i] = b->id;
    b->bytes += p->count * cddp__dtype_size(p->dtype);
    if (b->bytes >= limits[b->limit]) {
      emitted[b->id] = closed++;
      b->id = -1;
      if (b->limit + 1 < limit_count) b->limit++;
    }
  }
  for (i = 0; i < seen_count; i++) {
    if (open[seen[i]].id >= 0) emitted[open[seen[i]].id] = closed++;
  }
  return created;
}

static void cddp__plan_free(cddp__bucket_plan *p) {
  cddp__free(&p->allocator, p->offsets);
  cddp__free(&p->allocator, p->params);
  p->offsets = p->params = NULL;
  p->bucket_count = 0;
}

/* Assigns params[0 .. count) to buckets of limits[0], limits[1], ... bytes; the last limit repeats
   (limit_count >= 1). order NULL: declaration order, and the buckets sorted by smallest index.
   Otherwise parameters are taken in that order and the buckets stay in order of closing, those open
   at the end by the first appearance of their dtype. */
static cddp_result cddp__plan_buckets(cddp__bucket_plan *out, const cddp_param *params, int count,
                                      const int *order, const size_t *limits, int limit_count,
                                      const cddp_allocator *a) {
  size_t n = (size_t)count;
  int *bucket_of = (int *)cddp__calloc(a, n + 1, sizeof(int));
  int *emitted = (int *)cddp__calloc(a, n + 1, sizeof(int));
  int i, b;
  memset(out, 0, sizeof *out);
  if (a != NULL) out->allocator = *a;
  out->offsets = (int *)cddp__calloc(a, n + 2, sizeof(int));
  out->params = (int *)cddp__calloc(a, n + 1, sizeof(int));
  if (bucket_of != NULL && emitted != NULL && out->offsets != NULL && out->params != NULL) {
    out->bucket_count =
        cddp__deal_buckets(params, count, order, limits, limit_count, bucket_of, emitted);
    /* a counting sort by bucket; in order of creation is by smallest index */
    for (i = 0; i < count; i++) {
      if (order != NULL) bucket_of[i] = emitted[bucket_of[i]];
      out->offsets[bucket_of[i] + 2]++;
    }
    for (b = 0; b < out->bucket_count; b++) out->offsets[b + 2] += out->offsets[b + 1];
    for (i = 0; i < count; i++) {
      out->params[out->offsets[bucket_of[i] + 1]++] = order != NULL ? order[i] : i;
    }
  }
  cddp__free(a, bucket_of);
  cddp__free(a, emitted);
  if (out->offsets != NULL && out->params != NULL && bucket_of != NULL && emitted != NULL)
    return CDDP_OK;
  cddp__plan_free(out);
  return CDDP_OUT_OF_MEMORY;
}

static void cddp__reverse(int *p, int n) {
  int i, t;
  for (i = 0; i < n / 2; i++) {
    t = p[i];
    p[i] = p[n - 1 - i];
    p[n - 1 - i] = t;
  }
}

/* Reverses the list of buckets, as gradients arrive last parameter first. Inside a bucket nothing
   moves. */
static void cddp__plan_reverse(cddp__bucket_plan *p) {
  int b, count = p->bucket_count, total = p->offsets[count];
  for (b = 0; b < count; b++) {
    cddp__reverse(p->params + p->offsets[b], p->offsets[b + 1] - p->offsets[b]);
  }
  cddp__reverse(p->params, total);
  for (b = 0; b <= count; b++) p->offsets[b] = total - p->offsets[b];
  cddp__reverse(p->offsets, count + 1);
}
/* >>local --------------------------------------------------------------------------------------
   Steps: how the ranks of a group wait for each other in shared memory. Everything that ranks do
   together is a sequence of steps, numbered per group. Works as follows: a rank announces a step by
   writing its line (what it calls, with which count, and up to 40 bytes of payload) and then the
   line's seq; the step is complete when all lines carry its number. Every rank compares all lines:
   ranks that called different things all see it, at no extra cost. Lines and slots exist twice and
   are used in turn: when a rank writes those of step s + 2, everybody has announced s + 1 and so is
   done reading those of s.
   With a core per rank, ranks poll each other's lines, yield, then sleep on the seq of the one that
   is missing. Crowded groups count arrivals instead; the last to come releases all with one
   wake-up, so 64 ranks on 2 cores switch once per step, not 63 times. */

#define CDDP__SLOT                                                                                 \
  ((size_t)64 << 10)    /* bytes of a slot: two ranks' slots stay in a 512 KiB L2 cache */
#define CDDP__RIDE                                                                                 \
  ((size_t)32 << 10) /* bytes of all ranks' slots that cross between hosts with a step's lines */
#define CDDP__SPIN 2000 /* polls with a core per rank: tens of microseconds */
#define CDDP__SPIN_CROWDED 50
#define CDDP__YIELDS 100
#define CDDP__NAP_S 0.02 /* longest sleep before peers are looked after */

static const char *const cddp__call_names[] = {
    "barrier",    "all_reduce", "reduce",         "broadcast",  "all_gather",
    "gather",     "scatter",    "reduce_scatter", "all_to_all", "group_split",
    "ddp_create", "ddp_wait",   "ddp_step",       "ddp bucket", "ddp_sync_buffers",
    "ddp_join"};
static const char *const cddp__dtype_names[] = {"f32", "f64", "f16", "bf16",
                                                "i8",  "u8",  "i32", "i64"};
static const char *const cddp__op_names[] = {"sum", "avg", "prod", "min", "max"};

static uint32_t cddp__call_code(const cddp__call *c, uint32_t phase) {
  return (uint32_t)c->kind | (uint32_t)c->dtype << 8 | (uint32_t)c->op << 16 | (phase << 24);
}

static bool cddp__kind_reduces(uint32_t kind) {
  return kind == CDDP__KIND_ALL_REDUCE || kind == CDDP__KIND_REDUCE ||
         kind == CDDP__KIND_REDUCE_SCATTER;
}

#define CDDP__PHASE_STAGED 1u /* the shares are in lines or slots */
#define CDDP__PHASE_HOST 15u /* records: a device group's call on host memory */

static void cddp__describe_call(char *out, size_t n, uint32_t code, uint64_t count, int root) {
  uint32_t kind = code & 255, dtype = code >> 8 & 255, op = code >> 16 & 255;
  char more[48] = "";
  if (kind == CDDP__KIND_DDP_BUCKET) {
    snprintf(out, n, "%s %" PRIu64, cddp__call_names[kind], count);
  } else if (kind >= CDDP__KIND_COUNT || dtype > CDDP_I64 || op > CDDP_MAX) {
    snprintf(out, n, "an unknown call");
  } else if (kind == CDDP__KIND_BARRIER || kind >= CDDP__KIND_GROUP_NEW) {
    snprintf(out, n, "%s", cddp__call_names[kind]);
  } else {
    if (cddp__kind_reduces(kind)) snprintf(more, sizeof more, ", %s", cddp__op_names[op]);
    if (root >= 0) snprintf(more + strlen(more), sizeof more - strlen(more), ", root %d", root);
    if (code >> 24 == CDDP__PHASE_HOST)
      snprintf(more + strlen(more), sizeof more - strlen(more), ", host memory");
    snprintf(out, n, "%s(count %" PRIu64 ", %s%s)", cddp__call_names[kind], count,
             cddp__dtype_names[dtype], more);
  }
}

/* Layout of a control block: board, lines, seats, slots. Every rank reads all lines, so those lie
   close together: of a thousand ranks they are 32 pages, while a seat takes several. */
static size_t cddp__board_seats(int size) {
  return 4096 + cddp__round_up(2 * (size_t)size * sizeof(cddp__line), 4096);
}
static size_t cddp__board_head(int size, int locals) {
  size_t seats = (size_t)locals + (locals < size ? 1 + CDDP__NEIGHBOURS : 0);
  return cddp__round_up(cddp__board_seats(size) + seats * sizeof(cddp__seat), 65536);
}
static size_t cddp__board_bytes(int size, int locals) { /* any page size */
  return cddp__board_head(size, locals) +
         2 * (locals < size ? CDDP__RIDE : (size_t)size * CDDP__SLOT);
}
/* Ranks of other hosts share a seat in which nobody ever sits; neighbours have one for their notes.
 */
static cddp__seat *cddp__seat_of(const cddp_group *g, int rank) {
  return g->seats + g->places[rank];
}
static cddp__line *cddp__line_of(const cddp_group *g, int rank, uint32_t step) {
  return (cddp__line *)(void *)(g->board_memory + 4096) + 2 * (size_t)rank + (step & 1);
}
static void *cddp__slot_of(const cddp_group *g, int rank, uint32_t step) {
  return g->slots + (2 * (size_t)rank + (step & 1)) * g->slot_size;
}

/* --- failure: the first rank to notice one writes it on the board; all calls of all ranks then
 * return it --- */

/* Keeps the first loss of any group, for those who wait for this rank in another one. */
static void cddp__note_loss(cddp__net *n, const char *text) {
  if (n == NULL || !cddp__swap32(&n->loss, 0, CDDP__BREAKING)) return;
  snprintf(n->loss_text, sizeof n->loss_text, "%s", text);
  cddp__store32(&n->loss, 2);
}

/* Keeps the group's failure for this rank's later calls and makes it this thread's error. */
static cddp_result cddp__fail_group(cddp_group *g, cddp_result r, const char *text) {
  pthread_mutex_lock(&g->fail_lock);
  if (!g->failed) {
    g->failed = true;
    g->fail_result = r;
    snprintf(g->fail_text, sizeof g->fail_text, "%s", text);
    if (r == CDDP_PEER_LOST) cddp__note_loss(g->host->net, text);
    if (g->hosts != NULL) g->hosts->ops->hang_up(g);
  }
  r = cddp__fail(g->fail_result, "%s", g->fail_text);
  pthread_mutex_unlock(&g->fail_lock);
  return r;
}

static void cddp__wake_all(cddp_group *g) { /* of other hosts' lines one at most is slept on */
  int p;
  cddp__futex_wake(&g->board->release);
  for (p = 0; p < g->size; p++) {
    if (g->members[p] < 0 && (g->hosts == NULL || p != g->hosts->lowest_remote)) continue;
    cddp__futex_wake(&cddp__line_of(g, p, 0)->seq);
    cddp__futex_wake(&cddp__line_of(g, p, 1)->seq);
    if (g->members[p] >= 0) cddp__futex_wake(&cddp__seat_of(g, p)->mail);
  }
}

static void cddp__name_rank(const cddp_group *g, int rank, char *out, size_t n) {
  const cddp__net *net = g->host->net;
  if (g->host->threads)
    snprintf(out, n, "rank %d (a thread of pid %d)", rank, (int)getpid());
  else if (net != NULL)
    snprintf(out, n, "rank %d (pid %u on %s)", rank, net->homes[g->world[rank]].pid,
             net->hosts[net->homes[g->world[rank]].host].name);
  else
    snprintf(out, n, "rank %d (pid %u on %s)", rank, g->host->pids[g->members[rank]],
             g->host->name);
}

/* Whether a peer's process has ended, as far as its pidfd tells. */
static bool cddp__process_ended(const cddp_group *g, int rank) {
  struct pollfd fd;
  fd.fd = g->host->pidfds[g->members[rank]];
  fd.events = POLLIN;
  fd.revents = 0;
  return fd.fd >= 0 && poll(&fd, 1, 0) == 1;
}

/* The failure on the board, if there is one. */
static cddp_result cddp__check_board(cddp_group *g) {
  uint32_t b = cddp__load32(&g->board->broken);
  char text[CDDP__ERROR_MAX], who[160];
  int i;
  if (CDDP__LIKELY(b == 0)) return CDDP_OK;
  for (i = 0; (b & CDDP__BREAKING) && i < 20000; i++) { /* its writer is at it, or died over it */
    if (i > 100 && cddp__process_ended(g, (int)(b & ~CDDP__BREAKING))) break;
    cddp__sleep(1e-6);
    b = cddp__load32(&g->board->broken);
  }
  b = cddp__load32(&g->board->broken);
  if (b & CDDP__BREAKING) {
    cddp__name_rank(g, (int)(b & ~CDDP__BREAKING), who, sizeof who);
    snprintf(text, sizeof text, "%s died or was stopped while it told of a failure", who);
    return cddp__fail_group(g, CDDP_PEER_LOST, text);
  }
  memcpy(text, g->board->broken_text, sizeof text);
  text[sizeof text - 1] = 0;
  return cddp__fail_group(g, (cddp_result)(b - 2), text);
}

/* Breaks the group with this thread's error text, unless a peer was first; returns what is in
 * force. tell: other hosts do not see it for themselves. */
static cddp_result cddp__break_here(cddp_group *g, cddp_result r, bool tell) {
  if (cddp__swap32(&g->board->broken, 0, CDDP__BREAKING + (uint32_t)g->rank)) {
    CDDP__POINT("breaking");
    memcpy(g->board->broken_text, cddp__error_text, sizeof g->board->broken_text);
    cddp__store32(&g->board->broken, 2 + (uint32_t)r);
    cddp__wake_all(g);
    cddp__log(&g->host->logger, 0, "%s", cddp__error_text);
    if (tell && g->hosts != NULL) g->hosts->ops->abort(g);
  }
  return cddp__check_board(g);
}

static cddp_result cddp__break(cddp_group *g, cddp_result r) {
  return cddp__break_here(g, r, true);
}

/* Keeps what a rank that left has said of another one's death: no failure of this group yet, but
   what one to come is due to. Whether it is the first such word. */
static bool cddp__note_cause(cddp_group *g, cddp_result r, const char *text) {
  if (!cddp__swap32(&g->board->cause, 0, CDDP__BREAKING)) return false;
  snprintf(g->board->cause_text, sizeof g->board->cause_text, "%s", text);
  cddp__store32(&g->board->cause, 2 + (uint32_t)r);
  return true;
}

static bool cddp__has_cause(const cddp_group *g) {
  uint32_t cause = cddp__load32(&g->board->cause);
  return cause >= 2 && (cause & CDDP__BREAKING) == 0;
}

/* Breaks the group over the loss of a rank, with this thread's error text. One that left, or is on
   another host, may be gone because of somebody else: who has said so is believed. */
static cddp_result cddp__break_lost(cddp_group *g, int rank) {
  bool seen = g->members[rank] >= 0 &&
              cddp__load32(&cddp__seat_of(g, rank)->state) != CDDP__SEAT_LEFT;
  if (seen || !cddp__has_cause(g)) return cddp__break(g, CDDP_PEER_LOST);
  return cddp__break(g, cddp__fail((cddp_result)(cddp__load32(&g->board->cause) - 2), "%s",
                                   g->board->cause_text));
}

/* This group's failure for a call that begins, CDDP_OK when it is healthy. */
static cddp_result cddp__check_group(cddp_group *g) {
  if (CDDP__LIKELY(cddp__load32(&g->board->broken) == 0)) return CDDP_OK;
  return cddp__check_board(g);
}

/* --- looking after peers --- */

/* Without pidfds (an old valgrind): whether the process id is free again. */
static bool cddp__process_gone(const cddp_group *g, int rank) {
  if (g->host->threads || rank == g->rank) return false;
  return kill((pid_t)g->host->pids[g->members[rank]], 0) != 0 && errno == ESRCH;
}

/* Whether the rank's process has ended or has left the group. */
static bool cddp__rank_gone(const cddp_group *g, int rank) {
  uint32_t state = cddp__load32(&cddp__seat_of(g, rank)->state);
  if (g->members[rank] < 0) return g->hosts->ops->gone(g, rank, NULL, 0);
  if (state == CDDP__SEAT_LEFT || state == CDDP__SEAT_DEAD) return true;
  if (g->host->pidfds[g->members[rank]] >= 0) return cddp__process_ended(g, rank);
  return cddp__process_gone(g, rank);
}

static const char *cddp__signal_name(int number) {
  static const struct {
    int number;
    const char *name;
  } names[] = {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"},
               {SIGILL, "SIGILL"},   {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"},
               {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"},
               {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
               {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"},
               {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"}, {SIGSYS, "SIGSYS"}};
  size_t i;
  for (i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].number == number) return names[i].name;
  return "see signal(7)";
}

/* How a process ended, from its wait status: "was killed by signal 9 (SIGKILL)". */
static void cddp__describe_status(int status, char *out, size_t n) {
  if (WIFSIGNALED(status))
    snprintf(out, n, "was killed by signal %d (%s)%s", WTERMSIG(status),
             cddp__signal_name(WTERMSIG(status)), WCOREDUMP(status) ? ", core dumped" : "");
  else
    snprintf(out, n, "exited with code %d", WEXITSTATUS(status));
}

/* The wait status of a process that its parent has reaped: Linux 6.15 and later keep it. */
static bool cddp__status_of_reaped(int pidfd, int *status) {
  struct cddp__pidfd_info { /* struct pidfd_info, its first version */
    uint64_t mask, cgroup;
    uint32_t ids[11];
    int32_t exit_code;
  } info;
  memset(&info, 0, sizeof info);
  info.mask = 8; /* PIDFD_INFO_EXIT */
  if (pidfd < 0 || ioctl(pidfd, _IOWR(0xff, 11, struct cddp__pidfd_info), &info) != 0) return false;
  *status = (int)info.exit_code;
  return (info.mask & 8) != 0;
}

/* The wait status of a process that waits for its parent to reap it. */
static bool cddp__status_of_zombie(uint32_t pid, int *status) {
  char path[32], text[1024], *at;
  ssize_t n;
  int fd, field;
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) return false;
  n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  if ((at = strrchr(text, ')')) == NULL || at[1] != ' ' || at[2] != 'Z') return false;
  for (field = 2; field < 52 && at != NULL; field++) at = strchr(at + 1, ' ');
  if (at == NULL) return false;
  *status = atoi(at);
  return true;
}

/* How a rank that is gone went. */
static void cddp__describe_end(const cddp_group *g, int rank, char *out, size_t n) {
  uint32_t state = cddp__load32(&cddp__seat_of(g, rank)->state), pid;
  int status = 0, fd;
  if (g->members[rank] < 0) {
    g->hosts->ops->gone(g, rank, out, n);
    return;
  }
  fd = g->host->pidfds[g->members[rank]];
  pid = g->host->pids[g->members[rank]];
  if (state == CDDP__SEAT_LEFT)
    snprintf(out, n, "left the group (cddp_destroy)");
  else if (state == CDDP__SEAT_DEAD)
    snprintf(out, n, "ended: its thread function returned");
  else if (cddp__status_of_reaped(fd, &status) || cddp__status_of_zombie(pid, &status) ||
           cddp__status_of_reaped(fd, &status)) /* reaped between the two */
    cddp__describe_status(status, out, n);
  else
    snprintf(out, n, "died: its process has ended");
}

/* "rank 2 (pid 7 on host) was killed by signal 9 (Killed)". A rank that only left has often lost
   another one itself: a process of the group that has died is named too. */
static void cddp__describe_loss(const cddp_group *g, int rank, char *out, size_t n) {
  char who[160], how[96];
  size_t at;
  int p;
  cddp__name_rank(g, rank, who, sizeof who);
  cddp__describe_end(g, rank, how, sizeof how);
  snprintf(out, n, "%s %s", who, how);
  if (cddp__load32(&cddp__seat_of(g, rank)->state) != CDDP__SEAT_LEFT) return;
  for (p = 0; p < g->size; p++) {
    uint32_t state = cddp__load32(&cddp__seat_of(g, p)->state);
    if (p == g->rank || state == CDDP__SEAT_LEFT || !cddp__rank_gone(g, p)) continue;
    cddp__name_rank(g, p, who, sizeof who);
    cddp__describe_end(g, p, how, sizeof how);
    at = strlen(out);
    snprintf(out + at, n - at, " after %s %s", who, how);
    return;
  }
}

/* What touches peers' memory stands between cddp__enter and cddp__exit. A rank that enters is seen
   by one that fails, or sees the failure itself: both use full fences. */
static cddp_result cddp__enter(cddp_group *g) {
  cddp__exchange32(&cddp__seat_of(g, g->rank)->inside, 1);
  CDDP__POINT("inside");
  return cddp__check_group(g);
}

/* Passes r on. After a failure it waits for the peers that are still inside: only then are the
   buffers the caller's again. They come out soon, the failure ends their waits. */
static cddp_result cddp__exit(cddp_group *g, cddp_result r) {
  double deadline;
  int p;
  CDDP__POINT("exit");
  cddp__store32(&cddp__seat_of(g, g->rank)->inside, 0);
  if (CDDP__LIKELY(r == CDDP_OK)) return CDDP_OK;
  deadline = cddp__now() + 5;
  for (p = 0; p < g->size; p++)
    while (cddp__load32(&cddp__seat_of(g, p)->inside) != 0 && !cddp__rank_gone(g, p) &&
           cddp__now() < deadline)
      cddp__sleep(1e-5);
  return r;
}

/* What this rank is doing, for messages: "all_reduce(count 4, f32, sum), call 17 of the group". */
static void cddp__describe_here(const cddp_group *g, char *out, size_t n) {
  const cddp__line *line = cddp__line_of(g, g->rank, g->step);
  char call[128], site[CDDP__SITE_MAX];
  cddp__describe_call(call, sizeof call, line->call, line->count, line->root);
  cddp__describe_site(site, sizeof site);
  snprintf(out, n, "%s%s, call %" PRIu64 " of the group", call, site, g->calls);
}

/* Whether this rank's step still lacks rank p. Crowded: it may have died between line and arrival.
 */
static bool cddp__rank_missing(const cddp_group *g, int p) {
  if (cddp__load32(&cddp__line_of(g, p, g->step)->seq) != g->step) return true;
  return g->crowded && cddp__load32(&g->board->release) != g->step;
}

/* The same, or the step still lacks other hosts: until they have come all ranks here are needed. */
static bool cddp__rank_needed(const cddp_group *g, int p) {
  if (cddp__rank_missing(g, p)) return true;
  return g->hosts != NULL && !g->hosts->apart && cddp__rank_missing(g, g->hosts->lowest_remote);
}

/* Breaks the group if a rank that this step waits for is gone. */
static cddp_result cddp__look_after_peers(cddp_group *g) {
  char loss[320], what[320];
  int p;
  if (g->hosts != NULL) g->hosts->ops->look(g);
  for (p = 0; p < g->size; p++) {
    if (p == g->rank || g->members[p] < 0) continue;
    if (!cddp__rank_needed(g, p) || !cddp__rank_gone(g, p)) continue;
    if (!cddp__rank_needed(g, p)) continue; /* its last word had just come */
    cddp__describe_loss(g, p, loss, sizeof loss);
    cddp__describe_here(g, what, sizeof what);
    cddp__fail(CDDP_PEER_LOST, "%s; rank %d was waiting for it in %s", loss, g->rank, what);
    return cddp__break_lost(g, p);
  }
  return CDDP_OK;
}

/* Whether a rank of this host has not come to the step: as long as that is so, the ranks of other
   hosts look late too. */
static bool cddp__late_here(const cddp_group *g) {
  int p;
  for (p = 0; p < g->size; p++)
    if (g->members[p] >= 0 && cddp__load32(&cddp__line_of(g, p, g->step)->seq) != g->step)
      return true;
  return false;
}

/* A late rank may itself be waiting for one of another host, right now: then that one, else p. */
static int cddp__held_up_by(const cddp_group *g, int p) {
  cddp__seat *seat = cddp__seat_of(g, p);
  uint32_t awaits = cddp__load32(&seat->awaits);
  uint32_t age = (uint32_t)(uint64_t)(cddp__now() * 1000) - cddp__load32(&seat->awaits_at);
  return awaits > 0 && awaits <= (uint32_t)g->size && age < 500 ? (int)awaits - 1 : p;
}

static cddp_result cddp__break_late(cddp_group *g) { /* the deadline has passed */
  char who[160], what[320], late[256] = "";
  bool here = cddp__late_here(g);
  int p, held, before = -1, n = 0;
  for (p = 0; p < g->size; p++) {
    if (here && g->members[p] < 0) continue;
    if (cddp__load32(&cddp__line_of(g, p, g->step)->seq) == g->step) continue;
    held = here ? cddp__held_up_by(g, p) : p;
    if (held == before) continue;
    cddp__name_rank(g, before = held, who, sizeof who);
    if (n++ < 3)
      snprintf(late + strlen(late), sizeof late - strlen(late), "%s%s", n > 1 ? ", " : "", who);
  }
  if (n > 3) snprintf(late + strlen(late), sizeof late - strlen(late), " and %d more", n - 3);
  cddp__describe_here(g, what, sizeof what);
  cddp__fail(CDDP_TIMEOUT, "timed out after %g s: %s did not come to %s", g->timeout_s, late, what);
  return cddp__break(g, CDDP_TIMEOUT);
}

/* --- waiting --- */

typedef void (*cddp__idle_fn)(cddp_group *g); /* work to do while waiting: pending receives */

/* Waits until *word == want, the slow way: yields, then sleeps, with a deadline and an eye on
 * peers. */
static cddp_result cddp__wait_slow(cddp_group *g, cddp__atomic_u32 *word, uint32_t want,
                                   cddp__idle_fn idle) {
  double now = cddp__now(), deadline = now + g->timeout_s, look = now + CDDP__NAP_S;
  double nap = 0.001;
  cddp_result r;
  uint32_t v;
  int i;
  for (i = 0; g->spin > 0 && i < CDDP__YIELDS; i++) {
    if (cddp__load32(word) == want) return CDDP_OK;
    sched_yield();
  }
  while ((v = cddp__load32(word)) != want) {
    if ((r = cddp__check_board(g)) != CDDP_OK) return r;
    if (idle != NULL) idle(g);
    cddp__add32(&g->board->sleepers, 1);
    if (cddp__load32(&g->board->broken) == 0 && cddp__load32(word) == v)
      cddp__futex_wait(word, v, nap < deadline - now ? nap : deadline - now);
    cddp__add32(&g->board->sleepers, (uint32_t)-1);
    now = cddp__now();
    nap = nap * 2 < CDDP__NAP_S ? nap * 2 : CDDP__NAP_S;
    if (now >= look) {
      if (cddp__load32(word) == want) return CDDP_OK;
      if ((r = cddp__look_after_peers(g)) != CDDP_OK) return r;
      look = now + CDDP__NAP_S;
    }
    if (now >= deadline && cddp__load32(word) != want) return cddp__break_late(g);
  }
  return CDDP_OK;
}

static cddp_result cddp__wait_word(cddp_group *g, cddp__atomic_u32 *word, uint32_t want,
                                   cddp__idle_fn idle) {
  int i;
  for (i = 0; i < g->spin; i++) {
    if (CDDP__LIKELY(cddp__load32(word) == want)) return CDDP_OK;
    cddp__pause();
  }
  return cddp__wait_slow(g, word, want, idle);
}

/* Whether two lines that differ are described alike: in a count that is a hash, in extra. */
static bool cddp__same_words(const cddp__line *a, const cddp__line *b) {
  bool counted = (a->call & 255) > CDDP__KIND_BARRIER && (a->call & 255) < CDDP__KIND_GROUP_NEW;
  return (a->call & 0xffffff) == (b->call & 0xffffff) && a->root == b->root &&
         (!counted || a->count == b->count);
}

/* Ranks disagree, and all see it: each writes down where it made its call, for everybody's message.
   Ranks that do not come (they died just now) are not waited for long. */
static void cddp__exchange_sites(cddp_group *g) {
  cddp__seat *mine = cddp__seat_of(g, g->rank);
  double deadline = cddp__now() + 0.1;
  int p;
  cddp__describe_site(mine->site, sizeof mine->site);
  cddp__store32(&mine->site_step, g->step);
  for (p = 0; p < g->size; p++)
    while (g->members[p] >= 0 && cddp__load32(&cddp__seat_of(g, p)->site_step) != g->step &&
           cddp__load32(&g->board->broken) == 0 && cddp__now() < deadline)
      cddp__sleep(1e-5);
}

/* "rank 1 called all_reduce(count 4, f32, sum) at train.c:120" */
static void cddp__describe_rank(const cddp_group *g, int rank, char *out, size_t n) {
  const cddp__line *line = cddp__line_of(g, rank, g->step);
  cddp__seat *seat = cddp__seat_of(g, rank);
  char call[128], site[CDDP__SITE_MAX] = "";
  cddp__describe_call(call, sizeof call, line->call, line->count, line->root);
  if (cddp__load32(&seat->site_step) == g->step) memcpy(site, seat->site, sizeof site - 1);
  snprintf(out, n, "rank %d called %s%s", rank, call, site);
}

/* Whether ranks that have joined take part in the call that this line announces. */
static bool cddp__joinable(const cddp__line *a) {
  uint32_t kind = a->call & 255, phase = a->call >> 24;
  return phase == 0 && (kind == CDDP__KIND_DDP_WAIT || kind == CDDP__KIND_DDP_STEP ||
                        kind == CDDP__KIND_DDP_BUFFERS);
}

static bool cddp__is_join(const cddp__line *a) { return (a->call & 255) == CDDP__KIND_DDP_JOIN; }

static bool cddp__agrees(const cddp__line *a, const cddp__line *b) {
  if (cddp__is_join(b) && cddp__joinable(a)) return true;
  return a->call == b->call && a->count == b->count && a->root == b->root && a->extra == b->extra;
}

/* The rank with whose call the others' are compared: the first that has not joined. */
static int cddp__first_caller(const cddp_group *g) {
  int p;
  for (p = 0; p < g->size; p++)
    if (!cddp__is_join(cddp__line_of(g, p, g->step))) return p;
  return 0;
}

/* Lines differ, but only because some ranks have joined the others' call. Alike on every rank. */
static bool cddp__joins(const cddp_group *g) {
  const cddp__line *a = cddp__line_of(g, cddp__first_caller(g), g->step);
  int p;
  for (p = 0; p < g->size; p++)
    if (!cddp__agrees(a, cddp__line_of(g, p, g->step))) return false;
  return true;
}

static cddp_result cddp__break_mismatch(cddp_group *g) {
  char text[CDDP__ERROR_MAX], one[256];
  int p, shown = 0, others = 0, first = cddp__first_caller(g);
  const cddp__line *a = cddp__line_of(g, first, g->step);
  cddp__exchange_sites(g);
  cddp__describe_rank(g, first, one, sizeof one);
  snprintf(text, sizeof text, "ranks disagree in call %" PRIu64 " of the group: %s", g->calls, one);
  for (p = 0; p < g->size; p++) {
    const cddp__line *b = cddp__line_of(g, p, g->step);
    size_t at = strlen(text);
    if (cddp__agrees(a, b)) continue;
    if (shown++ >= 2) {
      others++;
      continue;
    }
    cddp__describe_rank(g, p, one, sizeof one);
    snprintf(text + at, sizeof text - at, ", %s%s", one,
             cddp__same_words(a, b) ? " with other settings" : "");
  }
  if (others > 0)
    snprintf(text + strlen(text), sizeof text - strlen(text), ", and %d more disagree", others);
  cddp__fail(CDDP_MISMATCH, "%s", text);
  return cddp__break_here(g, CDDP_MISMATCH, false); /* the other hosts have the same lines */
}

/* Starts this rank's next step; the caller may then fill the line's payload and the slot. */
static cddp__line *cddp__begin(cddp_group *g) {
  CDDP__POINT("begin");
  g->step++;
  return cddp__line_of(g, g->rank, g->step);
}

/* Counts this rank's arrival at a step of a crowded group; whether it was the last on this host. In
   a group of several hosts that is the leader, who may be waiting for the others. */
static bool cddp__arrive(cddp_group *g) {
  uint32_t n = cddp__add32(&g->board->arrivals, 1);
  if (n == g->arrive_target) return true;
  if (g->hosts != NULL && n + 1 == g->arrive_target && cddp__load32(&g->board->sleepers) != 0)
    cddp__futex_wake(&g->board->arrivals);
  return false;
}

/* Announces the step begun and waits for all ranks to announce it. Afterwards every rank's line and
   slot of this step can be read, until this rank announces the next step but one. */
static cddp_result cddp__sync(cddp_group *g, uint32_t code, uint64_t count, int root,
                              uint32_t extra, cddp__idle_fn idle) {
  cddp__line *mine = cddp__line_of(g, g->rank, g->step);
  cddp_result r;
  int p;
  bool same = true;
  mine->call = code;
  mine->count = count;
  mine->root = (int32_t)root;
  mine->extra = extra;
  CDDP__POINT("announce");
  cddp__exchange32(&mine->seq, g->step); /* a full fence: sleepers is read after it */
  CDDP__POINT("announced");
  if (CDDP__UNLIKELY(g->hosts != NULL) && (r = g->hosts->ops->meet(g, idle)) != CDDP_OK) return r;
  if (g->crowded) {
    g->arrive_target += (uint32_t)g->locals;
    if (cddp__arrive(g)) {
      cddp__exchange32(&g->board->release, g->step);
      if (cddp__load32(&g->board->sleepers) != 0) cddp__futex_wake(&g->board->release);
    } else if ((r = cddp__wait_word(g, &g->board->release, g->step, idle)) != CDDP_OK) {
      return r;
    }
  } else if (cddp__load32(&g->board->sleepers) != 0) {
    cddp__futex_wake(&mine->seq);
  }
  for (p = 0; p < g->size; p++) {
    cddp__line *line = cddp__line_of(g, p, g->step);
    if (p == g->rank) continue;
    if (!g->crowded && (r = cddp__wait_word(g, &line->seq, g->step, idle)) != CDDP_OK) return r;
    same = same && line->call == code && line->count == count && line->root == root &&
           line->extra == extra;
  }
  CDDP__POINT("met");
  return CDDP__LIKELY(same) || cddp__joins(g) ? CDDP_OK : cddp__break_mismatch(g);
}
/* Makes a group on a control block that all members have mapped; takes one reference to the host.
 */
static cddp_result cddp__group_build(cddp_group **out, cddp__host *h, int rank, int size,
                                     const int *members, char *board, double timeout_s) {
  cddp_group *g = (cddp_group *)cddp__calloc(&h->allocator, 1, sizeof *g);
  cddp__seat *seat;
  int i, place;
  *out = NULL;
  if (g == NULL) return CDDP_OUT_OF_MEMORY;
  g->members = (int *)cddp__calloc(&h->allocator, 2 * (size_t)size, sizeof *g->members);
  if (g->members == NULL) {
    cddp__free(&h->allocator, g);
    return CDDP_OUT_OF_MEMORY;
  }
  memcpy(g->members, members, (size_t)size * sizeof *members);
  g->host = h;
  g->rank = rank;
  g->size = size;
  g->board_memory = board;
  g->board = (cddp__board *)(void *)board;
  g->timeout_s = timeout_s;
  for (i = 0; i < size; i++) g->locals += members[i] >= 0;
  g->places = g->members + size;
  for (i = 0, place = 0; i < size; i++) g->places[i] = members[i] >= 0 ? place++ : g->locals;
  g->number = g->places[rank];
  g->seats = (cddp__seat *)(void *)(board + cddp__board_seats(size));
  g->slots = board + cddp__board_head(size, g->locals);
  g->slot_size = g->locals == size ? CDDP__SLOT : 0;
  g->crowded = g->locals > h->cores;
  g->spin = h->size > h->cores ? CDDP__SPIN_CROWDED : CDDP__SPIN;
  pthread_mutex_init(&g->fail_lock, NULL);
  pthread_mutex_init(&g->mail_lock, NULL);
  pthread_mutex_init(&g->engine.lock, NULL);
  pthread_cond_init(&g->engine.changed, NULL);
  seat = cddp__seat_of(g, rank);
  seat->pid = (uint32_t)getpid();
  cddp__store32(&seat->state, CDDP__SEAT_TAKEN);
  pthread_mutex_lock(&h->lock);
  h->refs++;
  pthread_mutex_unlock(&h->lock);
  *out = g;
  return CDDP_OK;
}

/* >>links --------------------------------------------------------------------------------------
   Connections between ranks of different hosts. Works as follows: each rank listens on one port of
   the address by which its host reaches the others. A link serves one purpose of one group between
   two ranks and is made when it is first needed; who calls whom is fixed by the purpose. The caller
   says hello: magic, version, purpose, both ranks, group, and the token that only the job's ranks
   know, as it came to them through the store. With a secret both sides then prove that they know
   it, over one nonce of each. Without one the hello is all, so that what follows it is delivered
   even if the other side accepts later. Nothing blocks, and there is no thread: whoever waits, for
   whatever group, also accepts, and lays links of others aside until their group asks for them.
   Who says nothing, or nonsense, is dropped after CDDP__STRANGER_S or at once, and costs a
   descriptor until then. Messages of collectives carry a head with their number and size: both
   sides know what must come next, so a stream that is out of step is seen at once. Who leaves says
   goodbye in the same form, and why if its group has failed or it has seen a rank die: so whoever
   finds a link ended finds the cause before the end. */

#define CDDP__LINK_MAGIC 0x4b4c4443u    /* "CDLK", opens a link */
#define CDDP__MESSAGE_MAGIC 0x534d4443u /* "CDMS", begins a message */
#define CDDP__LABEL_CALLER "cddp link 1 caller"
#define CDDP__LABEL_CALLED "cddp link 1 called"
#define CDDP__STRANGERS 256 /* at a time; beyond these the oldest is dropped */
#ifndef CDDP__STRANGER_S
#define CDDP__STRANGER_S 5.0 /* for the hello and the proof */
#endif
#define CDDP__UNANSWERED_MS 20000 /* after which the system gives a connection up */
#define CDDP__REASON_BYTES (4 + CDDP__ERROR_MAX)
#define CDDP__HEARSAY 0x80000000u /* in a reason: the group has not failed, but a rank has died */
enum { CDDP__MESSAGE_DATA = 1, CDDP__MESSAGE_BYE };
#define CDDP__LEFT (-1) /* in link.error: the other side said goodbye */

static cddp__link *cddp__link_new(const cddp__net *n, int fd, int purpose, uint64_t group) {
  cddp__link *l = (cddp__link *)cddp__calloc(&n->allocator, 1, sizeof *l);
  if (l == NULL) {
    close(fd);
    return NULL;
  }
  l->fd = fd;
  l->purpose = purpose;
  l->group = group;
  l->peer = l->rank = -1;
  return l;
}

/* The link is of no more use. Its descriptor stays until cddp__link_free: others may look at it. */
static void cddp__link_end(cddp__link *l, int error) {
  if (l->state == CDDP__LINK_DEAD) return;
  l->state = CDDP__LINK_DEAD;
  l->error = error;
  shutdown(l->fd, SHUT_WR);
}

static void cddp__letters_free(const cddp_allocator *a, cddp__letter *first) {
  while (first != NULL) {
    cddp__letter *next = first->next;
    cddp__free(a, first);
    first = next;
  }
}

static void cddp__link_free(const cddp__net *n, cddp__link *l) {
  if (l == NULL) return;
  close(l->fd);
  cddp__letters_free(&n->allocator, l->letters);
  cddp__free(&n->allocator, l);
}

static void cddp__links_free(const cddp__net *n, cddp__link *l) {
  while (l != NULL) {
    cddp__link *next = l->next;
    cddp__link_free(n, l);
    l = next;
  }
}

static void cddp__link_options(int fd) { /* without them it works too, but notices less */
  int idle = 5, count = 3, unanswered = CDDP__UNANSWERED_MS;
  (void)cddp__set_nodelay(fd);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, sizeof unanswered);
}

/* Sends or receives what is left of data[size]: 1 when *done is size, 0 when it would block, -1
   when the link has ended. */
static int cddp__link_io(cddp__link *l, void *data, size_t size, size_t *done, bool out) {
  while (*done < size) {
    char *p = (char *)data + *done;
    ssize_t n = out ? CDDP__SEND(l->fd, p, size - *done, MSG_NOSIGNAL | MSG_DONTWAIT)
                    : CDDP__RECV(l->fd, p, size - *done, MSG_DONTWAIT);
    if (n > 0) {
      *done += (size_t)n;
    } else if (n < 0 && errno == EAGAIN) {
      return 0;
    } else if (n == 0 || errno != EINTR) {
      cddp__link_end(l, n == 0 ? 0 : errno);
      return -1;
    }
  }
  return 1;
}

/* --- the handshake --- */

/* The proof of one side, over the hello and the called side's nonce. */
static void cddp__link_prove(const cddp__net *n, const cddp__link *l, const char *label,
                             unsigned char proof[CDDP__PROOF_SIZE]) {
  cddp__hmac(n->secret, label, l->hello, sizeof l->hello, proof);
}

static void cddp__link_write_hello(const cddp__net *n, cddp__link *l) {
  unsigned char *h = l->hello;
  cddp__put32(h, CDDP__LINK_MAGIC);
  cddp__put32(h + 4, CDDP_VERSION);
  cddp__put32(h + 8, (uint32_t)l->purpose);
  cddp__put32(h + 12, (uint32_t)n->rank);
  cddp__put32(h + 16, (uint32_t)l->peer);
  cddp__put32(h + 20, n->secret != NULL);
  cddp__put64(h + 24, l->group);
  memcpy(h + 32, n->token, 16);
  /* the nonce behind it is there already */
}

static bool cddp__link_read_hello(const cddp__net *n, cddp__link *l) {
  const unsigned char *h = l->hello;
  uint32_t from = cddp__get32(h + 12);
  if (cddp__get32(h) != CDDP__LINK_MAGIC || cddp__get32(h + 4) != CDDP_VERSION ||
      cddp__get32(h + 8) > CDDP__LINK_ABORT || from >= (uint32_t)n->size ||
      cddp__get32(h + 16) != (uint32_t)n->rank ||
      cddp__get32(h + 20) != (uint32_t)(n->secret != NULL) ||
      !cddp__same_bytes(h + 32, n->token, 16))
    return false;
  l->purpose = (int)cddp__get32(h + 8);
  l->peer = (int)from;
  l->group = cddp__get64(h + 24);
  return true;
}

/* What this side has to send or receive at its stage of the handshake: into l->hand. Returns the
   bytes, 0 at the end. */
static size_t cddp__link_stage(const cddp__net *n, cddp__link *l) {
  bool answers = !l->mine && l->stage == 1;
  if (l->stage == 0) return CDDP__LINK_HELLO; /* in l->hello itself */
  if (n->secret == NULL) return 0;
  if (answers) {
    memcpy(l->hand, l->hello + CDDP__LINK_HELLO, CDDP__NONCE_SIZE);
    cddp__link_prove(n, l, CDDP__LABEL_CALLED, l->hand + CDDP__NONCE_SIZE);
  }
  if (l->mine && l->stage == 2) cddp__link_prove(n, l, CDDP__LABEL_CALLER, l->hand);
  return l->stage == 1 ? CDDP__LINK_ANSWER : l->stage == 2 ? CDDP__PROOF_SIZE : 0;
}

/* Looks at what has come in: false if it is wrong. */
static bool cddp__link_check(const cddp__net *n, cddp__link *l) {
  unsigned char proof[CDDP__PROOF_SIZE];
  if (!l->mine && l->stage == 0) return cddp__link_read_hello(n, l);
  if (l->mine && l->stage == 1) {
    memcpy(l->hello + CDDP__LINK_HELLO, l->hand, CDDP__NONCE_SIZE);
    cddp__link_prove(n, l, CDDP__LABEL_CALLED, proof);
    return cddp__same_bytes(proof, l->hand + CDDP__NONCE_SIZE, sizeof proof);
  }
  if (!l->mine && l->stage == 2) {
    cddp__link_prove(n, l, CDDP__LABEL_CALLER, proof);
    return cddp__same_bytes(proof, l->hand, sizeof proof);
  }
  return true;
}

static void cddp__link_connected(cddp__link *l) {
  struct pollfd p;
  int error = 0;
  socklen_t size = sizeof error;
  p.fd = l->fd;
  p.events = POLLOUT;
  p.revents = 0;
  if (poll(&p, 1, 0) != 1) return;
  if (getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error == 0 && cddp__connected_to_itself(l->fd)) error = ECONNREFUSED;
  if (error != 0)
    cddp__link_end(l, error);
  else
    l->state = CDDP__LINK_SHAKING;
}

/* Goes on with the handshake as far as it can without waiting; whether the link is up. */
static bool cddp__link_shake(const cddp__net *n, cddp__link *l) {
  if (l->state == CDDP__LINK_CONNECTING) cddp__link_connected(l);
  while (l->state == CDDP__LINK_SHAKING) {
    unsigned char *data = l->stage == 0 ? l->hello : l->hand;
    if (l->hand_size == 0) l->hand_size = cddp__link_stage(n, l);
    if (l->hand_size == 0) {
      l->state = CDDP__LINK_UP;
    } else if (cddp__link_io(l, data, l->hand_size, &l->hand_done, l->mine == (l->stage != 1)) <=
               0) {
      break;
    } else if (!cddp__link_check(n, l)) {
      cddp__link_end(l, EPROTO);
    } else {
      l->hand_size = l->hand_done = 0;
      l->stage++;
    }
  }
  return l->state == CDDP__LINK_UP;
}

/* Begins to call a rank. NULL: no memory, or the system refuses; the text says what. A link that
   could not be made later ends with the error. */
static cddp__link *cddp__link_call(const cddp__net *n, int peer, int purpose, uint64_t group) {
  const cddp__home *home = &n->homes[peer];
  cddp__address a = n->hosts[home->host].address, here = n->hosts[n->host].address;
  cddp__link *l;
  int fd = socket(a.sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    cddp__fail_errno("socket");
    return NULL;
  }
  if ((l = cddp__link_new(n, fd, purpose, group)) == NULL) return NULL;
  l->mine = true;
  l->peer = peer;
  cddp__link_options(fd);
  cddp__address_set_port(&a, home->port);
  cddp__address_set_port(&here, 0);
  if (a.sa.ss_family == AF_INET6) {
    struct sockaddr_in6 *there = (struct sockaddr_in6 *)(void *)&a.sa;
    if (IN6_IS_ADDR_LINKLOCAL(&there->sin6_addr)) /* its own interface's number is not ours */
      there->sin6_scope_id = ((struct sockaddr_in6 *)(void *)&here.sa)->sin6_scope_id;
  }
  if (here.sa.ss_family == a.sa.ss_family) (void)!bind(fd, cddp__sockaddr(&here), here.size);
  cddp__random(l->hello + 48, CDDP__NONCE_SIZE);
  cddp__link_write_hello(n, l);
  if (connect(fd, cddp__sockaddr(&a), a.size) == 0)
    l->state = CDDP__LINK_SHAKING;
  else if (errno != EINPROGRESS && errno != EINTR)
    cddp__link_end(l, errno);
  return l;
}

static void cddp__message_head(unsigned char *head, uint32_t number, uint64_t size, uint32_t type) {
  memset(head, 0, CDDP__LINK_HEAD);
  cddp__put32(head, CDDP__MESSAGE_MAGIC);
  cddp__put32(head + 4, number);
  cddp__put64(head + 8, size);
  cddp__put32(head + 16, type);
}

static bool cddp__message_bye(const cddp__link *l) {
  return cddp__get32(l->in_head) == CDDP__MESSAGE_MAGIC &&
         cddp__get32(l->in_head + 16) == CDDP__MESSAGE_BYE;
}

/* --- reasons: why a group has failed, or what it will fail of --- */

static void cddp__put_reason(unsigned char body[CDDP__REASON_BYTES], uint32_t code,
                             const char *text) {
  memset(body, 0, CDDP__REASON_BYTES);
  cddp__put32(body, code);
  snprintf((char *)body + 4, CDDP__ERROR_MAX, "%s", text);
}

/* Takes in what is left of a reason, into l->letters; `have` bytes of it are at begun already. As
   cddp__link_io. */
static int cddp__link_reason(const cddp__net *n, cddp__link *l, const void *begun, size_t have) {
  if (l->letters == NULL) {
    l->letters =
        (cddp__letter *)cddp__malloc(&n->allocator, sizeof *l->letters + CDDP__REASON_BYTES);
    if (l->letters == NULL) {
      cddp__link_end(l, ENOMEM);
      return -1;
    }
    l->letters->next = NULL;
    l->got = cddp__min(have, CDDP__REASON_BYTES);
    if (have > 0) memcpy(l->letters + 1, begun, l->got);
  }
  return cddp__link_io(l, l->letters + 1, CDDP__REASON_BYTES, &l->got, false);
}

/* The result of a reason that is there; CDDP_OK if it makes no sense. */
static cddp_result cddp__read_reason(const cddp__link *l, bool *hearsay) {
  unsigned char *body = (unsigned char *)(l->letters + 1);
  uint32_t code = cddp__get32(body) & ~CDDP__HEARSAY;
  *hearsay = (cddp__get32(body) & CDDP__HEARSAY) != 0;
  body[CDDP__REASON_BYTES - 1] = 0;
  return code < CDDP__RESULT_COUNT ? (cddp_result)code : CDDP_OK;
}

static const char *cddp__reason_text(const cddp__link *l) {
  return (const char *)(l->letters + 1) + 4;
}

/* Says goodbye, in one piece or not at all. reason: NULL without one. */
static void cddp__link_part(const cddp__link *l, const unsigned char *reason) {
  unsigned char bye[CDDP__LINK_HEAD + CDDP__REASON_BYTES];
  size_t size = reason != NULL ? CDDP__REASON_BYTES : 0;
  cddp__message_head(bye, l->sent_count, size, CDDP__MESSAGE_BYE);
  if (size > 0) memcpy(bye + CDDP__LINK_HEAD, reason, size);
  (void)!CDDP__SEND(l->fd, bye, CDDP__LINK_HEAD + size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Says goodbye, if no message is half sent; what the other side sent last is not for anybody. */
static void cddp__link_leave(cddp__link *l, const unsigned char *reason) {
  unsigned char rest[4096];
  if (l->state == CDDP__LINK_UP && l->sent == 0) cddp__link_part(l, reason);
  while (recv(l->fd, rest, sizeof rest, MSG_DONTWAIT) > 0) {} /* or close would reset it */
}

/* Goes on with a goodbye whose head, and `have` bytes behind it, have come. 0: more is to come; -1:
   the link has ended. */
static int cddp__link_goodbye(const cddp__net *n, cddp__link *l, const void *begun, size_t have) {
  uint64_t size = cddp__get64(l->in_head + 8);
  bool hearsay;
  int done;
  l->parting = true;
  if (size != 0 && size != CDDP__REASON_BYTES) {
    cddp__link_end(l, EPROTO);
  } else if (size != 0) {
    if ((done = cddp__link_reason(n, l, begun, have)) <= 0) return done;
    l->told = cddp__read_reason(l, &hearsay);
  }
  cddp__link_end(l, CDDP__LEFT);
  return -1;
}

/* The link has ended, but perhaps not everything that its other side said has been read. */
static void cddp__link_hear_out(const cddp__net *n, cddp__link *l) {
  unsigned char rest[4096];
  while (!l->parting) {
    size_t whole;
    if (l->got < CDDP__LINK_HEAD &&
        cddp__link_io(l, l->in_head, CDDP__LINK_HEAD, &l->got, false) != 1)
      return;
    if (cddp__message_bye(l)) break;
    whole = CDDP__LINK_HEAD + (size_t)cddp__get64(l->in_head + 8);
    if (cddp__get32(l->in_head) != CDDP__MESSAGE_MAGIC || whole < CDDP__LINK_HEAD) return;
    while (l->got < whole) {
      ssize_t got = CDDP__RECV(l->fd, rest, cddp__min(sizeof rest, whole - l->got), MSG_DONTWAIT);
      if (got <= 0) return;
      l->got += (size_t)got;
    }
    l->got = 0;
  }
  if (l->told == CDDP_OK) (void)cddp__link_goodbye(n, l, NULL, 0);
}

/* --- whoever calls this rank --- */

/* A rank of another host says why a group is broken: so is it here. net.lock held. */
static void cddp__link_abort(cddp__net *n, cddp__link *l) {
  char kept[CDDP__ERROR_MAX];
  cddp_result code;
  cddp_group *g;
  bool hearsay;
  if (cddp__link_reason(n, l, NULL, 0) != 1) return;
  code = cddp__read_reason(l, &hearsay);
  for (g = n->groups; g != NULL; g = g->hosts->next) {
    if (g->id != l->group || code == CDDP_OK) continue;
    memcpy(kept, cddp__error_text, sizeof kept);
    if (hearsay)
      cddp__note_cause(g, code, cddp__reason_text(l));
    else
      (void)cddp__break_here(g, cddp__fail(code, "%s", cddp__reason_text(l)), false);
    memcpy(cddp__error_text, kept, sizeof kept);
  }
  cddp__link_end(l, 0);
}

static bool cddp__net_has_left(const cddp__net *n, uint64_t group) {
  uint32_t i;
  for (i = 0; i < n->left_count && i < CDDP__LEFT_GROUPS; i++)
    if (n->left[i] == group) return true;
  return false;
}

static void cddp__net_accept(cddp__net *n) { /* net.lock held */
  int i;
  for (i = 0; i < 64; i++) {
    int fd = (int)syscall(SYS_accept4, n->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    cddp__link *l;
    if (fd < 0) return;
    if ((l = cddp__link_new(n, fd, -1, 0)) == NULL) return;
    cddp__link_options(fd);
    l->state = CDDP__LINK_SHAKING;
    l->deadline = cddp__now() + CDDP__STRANGER_S;
    if (n->secret != NULL && cddp__random(l->hello + CDDP__LINK_HELLO, CDDP__NONCE_SIZE) != CDDP_OK)
      cddp__link_end(l, EIO);
    l->next = n->strangers;
    n->strangers = l;
    n->stranger_count++;
  }
}

/* Accepts, hears hellos and bad news. Never blocks; another thread that is at it is let alone. */
static void cddp__net_look(cddp__net *n) {
  cddp__link **at;
  double now;
  int place = 0;
  if (pthread_mutex_trylock(&n->lock) != 0) return;
  cddp__net_accept(n);
  now = n->strangers != NULL ? cddp__now() : 0;
  for (at = &n->strangers; *at != NULL;) {
    cddp__link *l = *at;
    bool up = cddp__link_shake(n, l);
    if (up && l->purpose == CDDP__LINK_ABORT) cddp__link_abort(n, l);
    if (l->state != CDDP__LINK_DEAD && (now > l->deadline || ++place > CDDP__STRANGERS))
      cddp__link_end(l, ETIMEDOUT);
    if (l->state != CDDP__LINK_DEAD && (!up || l->purpose == CDDP__LINK_ABORT)) {
      at = &l->next;
      continue;
    }
    *at = l->next;
    n->stranger_count--;
    if (l->state != CDDP__LINK_DEAD && cddp__net_has_left(n, l->group)) {
      cddp__link_leave(l, NULL);
      cddp__link_free(n, l);
    } else if (l->state == CDDP__LINK_DEAD) {
      cddp__link_free(n, l);
    } else {
      l->next = n->arrived;
      n->arrived = l;
    }
  }
  pthread_mutex_unlock(&n->lock);
}

/* A link that has come for this purpose, or NULL. peer -1: from anybody. */
static cddp__link *cddp__net_claim(cddp__net *n, uint64_t group, int purpose, int peer) {
  cddp__link **at, *l = NULL;
  pthread_mutex_lock(&n->lock);
  for (at = &n->arrived; *at != NULL; at = &(*at)->next) {
    if ((*at)->group != group || (*at)->purpose != purpose) continue;
    if (peer >= 0 && (*at)->peer != peer) continue;
    l = *at;
    *at = l->next;
    l->next = NULL;
    break;
  }
  pthread_mutex_unlock(&n->lock);
  return l;
}

static void cddp__net_free(cddp__net *n) {
  cddp_allocator a;
  if (n == NULL) return;
  a = n->allocator;
  cddp__links_free(n, n->strangers);
  cddp__links_free(n, n->arrived);
  if (n->listener >= 0) close(n->listener);
  pthread_mutex_destroy(&n->lock);
  cddp__free(&a, n->homes);
  cddp__free(&a, n->hosts);
  cddp__free(&a, n->secret);
  cddp__free(&a, n);
}

static cddp__net *cddp__net_new(const cddp_allocator *a, int size, int host_count) {
  cddp__net *n = (cddp__net *)cddp__calloc(a, 1, sizeof *n);
  if (n == NULL) return NULL;
  n->allocator = *a;
  n->close = cddp__net_free;
  n->listener = -1;
  n->size = size;
  n->host_count = host_count;
  pthread_mutex_init(&n->lock, NULL);
  n->homes = (cddp__home *)cddp__calloc(a, (size_t)size, sizeof *n->homes);
  n->hosts = (cddp__host_entry *)cddp__calloc(a, (size_t)host_count, sizeof *n->hosts);
  if (n->homes != NULL && n->hosts != NULL) return n;
  cddp__net_free(n);
  return NULL;
}

/* --- messages of collectives --- */

/* Moves what is left of a message: its head and size bytes at data. As cddp__link_io. */
static ssize_t cddp__link_vector(const cddp__link *l, unsigned char *head, void *data, size_t size,
                                 size_t done, bool out) {
  struct iovec io[2];
  struct msghdr msg;
  size_t skip = done < CDDP__LINK_HEAD ? 0 : done - CDDP__LINK_HEAD;
  int n = 0;
  memset(&msg, 0, sizeof msg);
  if (done < CDDP__LINK_HEAD) {
    io[n].iov_base = head + done;
    io[n++].iov_len = CDDP__LINK_HEAD - done;
  }
  if (skip < size) {
    io[n].iov_base = (char *)data + skip;
    io[n++].iov_len = size - skip;
  }
  msg.msg_iov = io;
  msg.msg_iovlen = (size_t)n;
  return out ? sendmsg(l->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT)
             : recvmsg(l->fd, &msg, MSG_DONTWAIT);
}

/* Sends what is left of this message: 1 when all of it is on its way, 0 when it would block, -1
   when the link has ended. */
static int cddp__link_push(cddp__link *l, const void *data, size_t size) {
  void *p;
  memcpy(&p, &data, sizeof p); /* sendmsg does not write to it */
  if (l->sent == 0) cddp__message_head(l->out_head, l->sent_count, size, CDDP__MESSAGE_DATA);
  while (l->sent < CDDP__LINK_HEAD + size) {
    ssize_t n = cddp__link_vector(l, l->out_head, p, size, l->sent, true);
    if (n >= 0) {
      l->sent += (size_t)n;
    } else if (errno == EAGAIN) {
      return 0;
    } else if (errno != EINTR) {
      cddp__link_end(l, errno);
      return -1;
    }
  }
  l->sent = 0;
  l->sent_count++;
  return 1;
}

static bool cddp__message_good(const cddp__link *l, uint64_t size) {
  return cddp__get32(l->in_head) == CDDP__MESSAGE_MAGIC && cddp__get64(l->in_head + 8) == size &&
         cddp__get32(l->in_head + 4) == l->got_count &&
         cddp__get32(l->in_head + 16) == CDDP__MESSAGE_DATA;
}

/* Receives what is left of the message that must come now. As cddp__link_push. Where `least` is not
   0 one of another size will do as far as its first `least` bytes: those tell that the two sides
   disagree, and nothing is read from the link after them. */
static int cddp__link_pull(const cddp__net *net, cddp__link *l, void *data, size_t size,
                           size_t least) {
  if (l->parting) return cddp__link_goodbye(net, l, NULL, 0);
  if (l->odd && l->got == 0) { /* nobody knows where the next message begins */
    cddp__link_end(l, EPROTO);
    return -1;
  }
  while (l->got < CDDP__LINK_HEAD + (l->odd ? least : size)) {
    bool headless = l->got < CDDP__LINK_HEAD;
    ssize_t n = cddp__link_vector(l, l->in_head, data, size, l->got, false);
    if (n > 0) {
      l->got += (size_t)n;
      if (!headless || l->got < CDDP__LINK_HEAD || cddp__message_good(l, size)) continue;
      l->odd = least > 0 && cddp__get64(l->in_head + 8) >= least &&
               cddp__message_good(l, cddp__get64(l->in_head + 8));
      if (l->odd) continue;
      if (cddp__message_bye(l))
        return cddp__link_goodbye(net, l, data, l->got - CDDP__LINK_HEAD);
      cddp__link_end(l, EPROTO);
      return -1;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return 0;
    cddp__link_end(l, n == 0 ? 0 : errno);
    return -1;
  }
  l->got = 0;
  l->got_count++;
  return 1;
}

/* How a link ended, for messages: behind the name of the rank. */
static void cddp__describe_link_end(const cddp__link *l, char *out, size_t n) {
  if (l->error == CDDP__LEFT)
    snprintf(out, n, "left the group (cddp_destroy)");
  else if (l->error == 0 || l->error == ECONNRESET || l->error == EPIPE)
    snprintf(out, n, "closed its connection: it died, or its group failed");
  else if (l->error == ECONNREFUSED)
    snprintf(out, n, "does not listen any more: it has ended");
  else if (l->error == EPROTO)
    snprintf(out, n, "sent what is no message of cddp, or not the one that was due");
  else
    snprintf(out, n, "lost its connection: %s", strerror(l->error));
}

/* >>rendezvous ---------------------------------------------------------------------------------
   How ranks meet. Works as follows: all open the store (rank 0 serves it); the first rank of a host
   to write its socket's name under the host's key becomes the host's leader, the others connect to
   that abstract Unix socket and say hello. When all are there the leader makes the memfd and sends
   it to everyone with the list of process ids, and waits for each to say that it is in. A leader's
   name left over from a dead job is recognised by the refused connection and replaced. A rank that
   cannot go on says why under a key that leaders look at, and one that dies has left its will in
   the store. Who fails when all have met breaks the group on its board, through the memfd. The
   socket's name carries 128 random bits, the hello a random token that only the store knows, and
   both sides check the peer's user. */

#define CDDP__HELLO_MAGIC 0x49484443u /* "CDHI" */
#define CDDP__HELLO_BYTES 48
#define CDDP__REPLY_BYTES (16 + CDDP__ERROR_MAX)
#define CDDP__REPLY_LISTEN 1u /* not the answer yet: open a port at this address and say which */
#define CDDP__HELLO_S 5.0 /* a connection that has not said hello by then is dropped */
#define CDDP__HELLO_TRIES 100 /* to a leader that hangs up, 1 ms apart */

typedef struct cddp__credentials { /* struct ucred, which libc hides without _GNU_SOURCE */
  int32_t pid;
  uint32_t uid, gid;
} cddp__credentials;

typedef struct cddp__guest { /* a connection to the leader */
  int fd;                    /* -1: place unused */
  int rank;                  /* -1 until its hello has come */
  uint32_t pid;
  double since;
  size_t have; /* bytes of the hello so far */
  unsigned char hello[CDDP__HELLO_BYTES];
} cddp__guest;

typedef struct cddp__meeting {
  const cddp__place *at;
  cddp_store *store;
  double deadline;
  char host[128], host_key[288], failed_key[160], will_key[160], met_key[160];
  unsigned char name[32]; /* the leader's socket, hex, without the leading NUL */
  unsigned char token[16];
  int listener;
  cddp__guest *guests; /* [capacity] */
  int capacity, joined;
  bool stale;   /* the store may be an earlier job's, whose ranks have met */
  bool refused; /* the leader did not take this rank in: its own affair */
  int doubles;  /* hellos of ranks that were there already */
  char double_text[160]; /* about the last of them, or a rank of another world size */
  /* several hosts; of leaders, but for round */
  uint64_t round;        /* rank 0's number for this meeting; 0: not known yet */
  bool conducts;         /* rank 0 is one of this host's ranks, or to be */
  int number;            /* of the host: 0 conducts */
  int told;              /* ranks of this host that the store knows of */
  double look, pause;    /* when to ask the store again, s */
  int host_count;        /* when all have come; 1: this host alone */
  cddp__address address; /* of this host, for the others */
  int fd;                /* this rank's listening socket; -1: none yet */
  int *ports;            /* [capacity] of the guests */
  unsigned char *blob;   /* who is where, as all ranks get it */
  size_t blob_size;
} cddp__meeting;

/* What ranks must have in common to count as ranks of one host: the kernel's boot and the network
   namespace, in which they must find each other's socket. */
static void cddp__host_identity(char *out, size_t n) {
  const char *given = cddp__env("CDDP_HOST_ID");
  char boot[64] = "unknown";
  struct stat st;
  ssize_t got = 0;
  int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    got = read(fd, boot, 36);
    close(fd);
  }
  boot[got > 0 ? got : 7] = 0;
  if (stat("/proc/self/ns/net", &st) != 0) st.st_ino = 0;
  snprintf(out, n, "%.60s.%llu", given != NULL ? given : boot, (unsigned long long)st.st_ino);
}

static socklen_t cddp__unix_address(struct sockaddr_un *a, const unsigned char *name) {
  memset(a, 0, sizeof *a);
  a->sun_family = AF_UNIX;
  memcpy(a->sun_path + 1, "cddp-", 5); /* the leading NUL makes it abstract: no file */
  memcpy(a->sun_path + 6, name, 32);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 6 + 32);
}

static bool cddp__same_user(int fd, uint32_t *pid) {
  cddp__credentials c;
  socklen_t n = sizeof c;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &n) != 0) return false;
  *pid = (uint32_t)c.pid;
  return c.uid == (uint32_t)geteuid();
}

static cddp_result cddp__leader_listen(cddp__meeting *m) {
  static const char hex[] = "0123456789abcdef";
  unsigned char raw[16];
  struct sockaddr_un address;
  socklen_t n;
  cddp_result r;
  int i;
  if ((r = cddp__random(raw, sizeof raw)) != CDDP_OK) return r;
  if ((r = cddp__random(m->token, sizeof m->token)) != CDDP_OK) return r;
  CDDP__POINT("store");
  for (i = 0; i < 32; i++) m->name[i] = (unsigned char)hex[(raw[i / 2] >> (i % 2 ? 0 : 4)) & 15];
  n = cddp__unix_address(&address, m->name);
  m->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (m->listener < 0) return cddp__fail_errno("socket(AF_UNIX)");
  if (bind(m->listener, (struct sockaddr *)(void *)&address, n) != 0 ||
      listen(m->listener, SOMAXCONN) != 0)
    return cddp__fail_errno("bind of an abstract Unix socket");
  return CDDP_OK;
}

static void cddp__meeting_close(cddp__meeting *m) {
  int i;
  for (i = 0; i < m->capacity; i++)
    if (m->guests != NULL && m->guests[i].fd >= 0) close(m->guests[i].fd);
  if (m->listener >= 0) close(m->listener);
  if (m->fd >= 0) close(m->fd);
  free(m->guests);
  free(m->ports);
  free(m->blob);
  m->guests = NULL;
  m->ports = NULL;
  m->blob = NULL;
  m->listener = m->fd = -1;
}

/* --- the leader's side --- */

static void cddp__guest_drop(cddp__guest *c) {
  close(c->fd);
  c->fd = -1;
  c->rank = -1;
}

static void cddp__write_reply(unsigned char *reply, cddp_result r, int size, const char *text) {
  memset(reply, 0, CDDP__REPLY_BYTES);
  cddp__put32(reply, CDDP__HELLO_MAGIC);
  cddp__put32(reply + 4, (uint32_t)r);
  cddp__put32(reply + 8, (uint32_t)size);
  snprintf((char *)reply + 16, CDDP__ERROR_MAX, "%s", text);
}

static void cddp__guest_refuse(cddp__guest *c, cddp_result r, const char *text) {
  unsigned char reply[CDDP__REPLY_BYTES];
  cddp__write_reply(reply, r, 0, text);
  (void)cddp__send_all(c->fd, reply, sizeof reply, cddp__now() + 0.1);
  cddp__guest_drop(c);
}

/* A free place at the table. When strangers have taken all, the one who has sat there longest
   without a hello goes: a rank says its hello at once. */
static int cddp__guest_place(cddp__meeting *m) {
  int i, oldest = -1;
  for (i = 0; i < m->capacity; i++) {
    const cddp__guest *c = &m->guests[i];
    if (c->fd < 0) return i;
    if (c->rank < 0 && (oldest < 0 || c->since < m->guests[oldest].since)) oldest = i;
  }
  cddp__guest_drop(&m->guests[oldest]); /* there are more places than ranks */
  return oldest;
}

static void cddp__accept_guest(cddp__meeting *m) {
  int fd = (int)syscall(SYS_accept4, m->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), i;
  uint32_t pid = 0;
  if (fd < 0) return;
  if (!cddp__same_user(fd, &pid)) {
    close(fd);
    return;
  }
  i = cddp__guest_place(m);
  memset(&m->guests[i], 0, sizeof m->guests[i]);
  m->guests[i].fd = fd;
  m->guests[i].rank = -1;
  m->guests[i].pid = pid;
  m->guests[i].since = cddp__now();
}

/* Takes a complete hello in; a wrong one is refused and the meeting goes on. */
static void cddp__guest_hello(cddp__meeting *m, cddp__guest *c) {
  int rank = (int)cddp__get32(c->hello + 8), size = (int)cddp__get32(c->hello + 12), i;
  char text[CDDP__ERROR_MAX];
  if (cddp__get32(c->hello) != CDDP__HELLO_MAGIC || memcmp(c->hello + 24, m->token, 16) != 0) {
    cddp__guest_drop(c);
    return;
  }
  if (cddp__get32(c->hello + 4) != CDDP_VERSION) {
    cddp__guest_refuse(c, CDDP_MISMATCH,
                       "another version of cddp.h runs in the other ranks; build all alike");
  } else if (size != m->at->world_size || rank < 0 || rank >= size) {
    snprintf(text, sizeof text, "rank %d has world size %d, rank %d has %d: WORLD_SIZE must agree",
             rank, size, m->at->rank, m->at->world_size);
    snprintf(m->double_text, sizeof m->double_text, "%.159s", text);
    cddp__guest_refuse(c, CDDP_MISMATCH, text);
  } else {
    for (i = 0; i < m->capacity; i++)
      if (m->guests[i].fd >= 0 && m->guests[i].rank == rank) break;
    if (rank == m->at->rank || i < m->capacity) {
      snprintf(text, sizeof text,
               "rank %d is taken already: pid %u has it too; each process needs a RANK of its own",
               rank, rank == m->at->rank ? (uint32_t)getpid() : m->guests[i].pid);
      m->doubles++;
      snprintf(m->double_text, sizeof m->double_text,
               "pid %u and pid %u both have rank %d; each process needs a RANK of its own",
               rank == m->at->rank ? (uint32_t)getpid() : m->guests[i].pid, c->pid, rank);
      cddp__guest_refuse(c, CDDP_INVALID_ARGUMENT, text);
    } else {
      c->rank = rank;
      m->joined++;
    }
  }
}

/* Reads from a guest; one that has joined only speaks by dying. */
static cddp_result cddp__guest_read(cddp__meeting *m, cddp__guest *c) {
  unsigned char byte;
  ssize_t n;
  if (c->rank >= 0) {
    n = recv(c->fd, &byte, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return CDDP_OK;
    return cddp__fail(CDDP_PEER_LOST, "rank %d (pid %u) died while the ranks were meeting", c->rank,
                      c->pid);
  }
  n = recv(c->fd, c->hello + c->have, sizeof c->hello - c->have, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return CDDP_OK;
  if (n <= 0) {
    cddp__guest_drop(c);
    return CDDP_OK;
  }
  c->have += (size_t)n;
  if (c->have == sizeof c->hello) cddp__guest_hello(m, c);
  return CDDP_OK;
}

/* --- several hosts: what their leaders tell each other through the store --- */

/* A key of this meeting, so that nothing of an earlier one with the same store is in the way. */
static void cddp__meeting_key(const cddp__meeting *m, char key[256], const char *what, int number) {
  snprintf(key, 256, "%s/%016" PRIx64 "/%s%d", m->at->run, m->round, what, number);
}

/* Reads a value if it is there: *size is 0 if not. */
static cddp_result cddp__meeting_peek(cddp__meeting *m, const char *key, void *value,
                                      size_t capacity, size_t *size) {
  bool there = false;
  cddp_result r = cddp__store_check(m->store, &key, 1, &there);
  *size = 0;
  if (r != CDDP_OK || !there) return r;
  return cddp__store_get(m->store, key, value, capacity, size, cddp__now() + 1); /* no wait */
}

/* Rank 0 begins the meeting: its number, and on which host it is, whose leader then conducts. */
static cddp_result cddp__open_round(cddp__meeting *m) {
  unsigned char value[8 + sizeof m->host];
  char key[256];
  cddp_result r;
  do {
    if ((r = cddp__random(&m->round, sizeof m->round)) != CDDP_OK) return r;
  } while (m->round == 0);
  if (strncmp(m->at->init_method, "unix:", 5) == 0) return CDDP_OK; /* no other host can come */
  cddp__put64(value, m->round);
  memcpy(value + 8, m->host, strlen(m->host));
  snprintf(key, sizeof key, "%s/meeting", m->at->run);
  return cddp__store_set(m->store, key, value, 8 + strlen(m->host));
}

#define CDDP__PACKED_ADDRESS 24
#define CDDP__AT_BYTES (16 + CDDP__PACKED_ADDRESS) /* of a host: its leader's token, its address */

static void cddp__pack_address(unsigned char out[CDDP__PACKED_ADDRESS], const cddp__address *a) {
  memset(out, 0, CDDP__PACKED_ADDRESS);
  if (a->sa.ss_family == AF_INET6) {
    const struct sockaddr_in6 *p = (const struct sockaddr_in6 *)(const void *)&a->sa;
    cddp__put32(out, 6);
    cddp__put32(out + 4, p->sin6_scope_id);
    memcpy(out + 8, &p->sin6_addr, 16);
  } else {
    cddp__put32(out, 4);
    memcpy(out + 8, &((const struct sockaddr_in *)(const void *)&a->sa)->sin_addr, 4);
  }
}

static void cddp__unpack_address(cddp__address *a, const unsigned char in[CDDP__PACKED_ADDRESS]) {
  memset(a, 0, sizeof *a);
  if (cddp__get32(in) == 6) {
    struct sockaddr_in6 *p = (struct sockaddr_in6 *)(void *)&a->sa;
    p->sin6_family = AF_INET6;
    p->sin6_scope_id = cddp__get32(in + 4);
    memcpy(&p->sin6_addr, in + 8, 16);
    a->size = sizeof *p;
  } else {
    struct sockaddr_in *p = (struct sockaddr_in *)(void *)&a->sa;
    p->sin_family = AF_INET;
    memcpy(&p->sin_addr, in + 8, 4);
    a->size = sizeof *p;
  }
}

/* CDDP_IFNAME: the first address of that interface, of the master's family if it has one. */
static cddp_result cddp__named_interface(const char *name, int family, cddp__address *out) {
  cddp__address list[CDDP__ADDRESSES_MAX];
  int n = cddp__interface_addresses(name, list, CDDP__ADDRESSES_MAX), i;
  if (n == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "CDDP_IFNAME is \"%.40s\", but this host has no such interface that is up "
                      "and has an address; `ip addr` lists them",
                      name);
  for (i = 0; i < n - 1 && list[i].sa.ss_family != family; i++) {}
  *out = list[list[i].sa.ss_family == family ? i : 0];
  return CDDP_OK;
}

/* Where other hosts reach this one: the near end of the connection to the store, as the system has
   chosen it by route. */
static cddp_result cddp__own_address(const cddp__meeting *m, cddp__address *out) {
  static const unsigned char loopback[CDDP__PACKED_ADDRESS] = {4, 0, 0, 0, 0,   0,
                                                               0, 0, 127, 0, 0, 1};
  bool routed = strncmp(m->at->init_method, "tcp://", 6) == 0 && m->store->tcp.fd >= 0 &&
                cddp__local_address(m->store->tcp.fd, out);
  const char *name = cddp__env("CDDP_IFNAME");
  if (name != NULL) return cddp__named_interface(name, routed ? out->sa.ss_family : AF_INET, out);
  if (!routed && cddp__interface_addresses(NULL, out, 1) == 0) cddp__unpack_address(out, loopback);
  return CDDP_OK;
}

/* The near end of the route to `there`, if the system has one. Sends nothing. */
static void cddp__route_address(const cddp__address *there, cddp__address *out) {
  cddp__address a = *there, near_end;
  int fd = socket(a.sa.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  cddp__address_set_port(&a, 9);
  if (fd >= 0 && connect(fd, cddp__sockaddr(&a), a.size) == 0 && cddp__local_address(fd, &near_end))
    *out = near_end;
  if (fd >= 0) close(fd);
}

/* Learns the meeting's number, and reports as a host when it is a new one. */
static cddp_result cddp__meeting_round(cddp__meeting *m) {
  unsigned char value[8 + sizeof m->host], at[CDDP__AT_BYTES];
  char key[256];
  int64_t total = 0;
  size_t n = 0;
  cddp_result r;
  snprintf(key, sizeof key, "%s/meeting", m->at->run);
  if ((r = cddp__meeting_peek(m, key, value, sizeof value, &n)) != CDDP_OK || n < 8) return r;
  m->conducts = n - 8 == strlen(m->host) && memcmp(value + 8, m->host, n - 8) == 0;
  if (cddp__get64(value) == m->round && (m->conducts || m->number > 0)) return CDDP_OK;
  m->round = cddp__get64(value);
  m->number = m->told = 0;
  if (m->conducts) return CDDP_OK;
  if ((r = cddp__own_address(m, &m->address)) != CDDP_OK) return r;
  cddp__meeting_key(m, key, "hosts", 0);
  if ((r = cddp__store_add(m->store, key, 1, &total)) != CDDP_OK) return r;
  m->number = total > 0 && total < CDDP__MAX_RANKS ? (int)total : CDDP__MAX_RANKS;
  memcpy(at, m->token, 16);
  cddp__pack_address(at + 16, &m->address);
  cddp__meeting_key(m, key, "at", m->number);
  return cddp__store_set(m->store, key, at, sizeof at);
}

/* This host's ranks so far, for those who ask who is missing, and how many. */
static cddp_result cddp__meeting_tell(cddp__meeting *m) {
  unsigned char *list;
  char key[256];
  size_t n = 1;
  cddp_result r;
  int i;
  if (m->conducts || m->told == m->joined + 1) return CDDP_OK;
  list = (unsigned char *)malloc(4 * ((size_t)m->joined + 1));
  if (list == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  cddp__put32(list, (uint32_t)m->at->rank);
  for (i = 0; i < m->capacity; i++)
    if (m->guests[i].fd >= 0 && m->guests[i].rank >= 0)
      cddp__put32(list + 4 * n++, (uint32_t)m->guests[i].rank);
  cddp__meeting_key(m, key, "here", m->number);
  r = cddp__store_set(m->store, key, list, 4 * n);
  free(list);
  if (r != CDDP_OK) return r;
  cddp__meeting_key(m, key, "joined", 0);
  r = cddp__store_add(m->store, key, m->joined + 1 - m->told, NULL);
  m->told = m->joined + 1;
  return r;
}

static bool cddp__meeting_has(const cddp__meeting *m, int rank) {
  int i;
  if (rank == m->at->rank) return true;
  for (i = 0; i < m->capacity; i++)
    if (m->guests[i].fd >= 0 && m->guests[i].rank == rank) return true;
  return false;
}

/* All ranks have come: tells which hosts take part, by their leaders' tokens. */
static cddp_result cddp__meeting_go(cddp__meeting *m, int others) {
  unsigned char *tokens = (unsigned char *)malloc(16 * (size_t)others + 1), at[CDDP__AT_BYTES];
  cddp__address there;
  char key[256];
  size_t n = 0;
  bool routed = false;
  cddp_result r = cddp__own_address(m, &m->address);
  int i;
  if (tokens == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  for (i = 1; r == CDDP_OK && i <= others; i++) {
    cddp__meeting_key(m, key, "at", i);
    r = cddp__store_get(m->store, key, at, sizeof at, &n, m->deadline);
    if (r == CDDP_OK && n != sizeof at)
      r = cddp__fail(CDDP_MISMATCH, "the store holds a key of cddp with foreign content");
    if (r != CDDP_OK) break;
    memcpy(tokens + 16 * (size_t)(i - 1), at, 16);
    cddp__unpack_address(&there, at + 16);
    if (!routed && cddp__address_loopback(&m->address) && cddp__env("CDDP_IFNAME") == NULL &&
        !cddp__address_loopback(&there)) { /* the store is on this host: that says nothing */
      cddp__route_address(&there, &m->address);
      routed = true;
    }
  }
  cddp__meeting_key(m, key, "go", 0);
  if (r == CDDP_OK) r = cddp__store_set(m->store, key, tokens, 16 * (size_t)others);
  if (r == CDDP_OK) m->host_count = others + 1;
  free(tokens);
  return r;
}

static cddp_result cddp__meeting_conduct(cddp__meeting *m) {
  int64_t joined = 0, others = 0;
  char key[256];
  cddp_result r;
  if (!cddp__meeting_has(m, 0)) return CDDP_OK; /* the number may be an earlier meeting's */
  cddp__meeting_key(m, key, "joined", 0);
  if ((r = cddp__store_add(m->store, key, 0, &joined)) != CDDP_OK) return r;
  if (joined + m->joined + 1 < m->at->world_size) return CDDP_OK;
  cddp__meeting_key(m, key, "hosts", 0);
  if ((r = cddp__store_add(m->store, key, 0, &others)) != CDDP_OK) return r;
  if (others < 1 || others >= m->at->world_size)
    return cddp__fail(CDDP_MISMATCH, "%d hosts have come for %d ranks: WORLD_SIZE must agree",
                      (int)others + 1, m->at->world_size);
  return cddp__meeting_go(m, (int)others);
}

static cddp_result cddp__meeting_follow(cddp__meeting *m) {
  size_t capacity = 16 * (size_t)m->at->world_size, n = 0, mine = 16 * (size_t)m->number;
  unsigned char *tokens;
  char key[256];
  cddp_result r;
  cddp__meeting_key(m, key, "go", 0);
  tokens = (unsigned char *)malloc(capacity);
  if (tokens == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  r = cddp__meeting_peek(m, key, tokens, capacity, &n);
  if (r == CDDP_OK && n >= mine && memcmp(tokens + mine - 16, m->token, 16) == 0)
    m->host_count = (int)(n / 16) + 1;
  free(tokens);
  return r;
}

/* A rank elsewhere may have given up, and then the store holds a result and a text; or it was the
   one that serves the store. */
static cddp_result cddp__meeting_failed_elsewhere(cddp__meeting *m) {
  const char *key = m->failed_key;
  char text[1 + CDDP__ERROR_MAX];
  size_t n = 0;
  bool there = false;
  cddp_result r = cddp__store_check(m->store, &key, 1, &there);
  if (r != CDDP_OK || !there) return r == CDDP_NETWORK ? r : CDDP_OK;
  if (cddp__store_get(m->store, key, text, sizeof text - 1, &n, cddp__now() + 1) != CDDP_OK ||
      n < 2)
    return CDDP_OK;
  text[cddp__min(n, sizeof text - 1)] = 0;
  if (text[0] <= 0 || text[0] >= CDDP__RESULT_COUNT) return CDDP_OK;
  m->refused = true; /* all others are told already */
  return cddp__fail((cddp_result)text[0], "%s",
                    text[1] != 0 ? text + 1 : "a rank gave up without a word");
}

/* Waits for a key, a little at a time: the rank that is to set it may have failed. */
static cddp_result cddp__meeting_await(cddp__meeting *m, const char *key) {
  cddp_result r;
  for (;;) {
    r = cddp__store_wait(m->store, &key, 1, cddp__soon(0.25, m->deadline));
    if (r != CDDP_TIMEOUT || cddp__now() >= m->deadline) return r;
    if ((r = cddp__meeting_failed_elsewhere(m)) != CDDP_OK) return r;
  }
}

/* A leader's look at the store, when its host's ranks are not all there are. */
static cddp_result cddp__meeting_news(cddp__meeting *m) {
  double most = 0.02 + 1e-5 * m->at->world_size;
  cddp_result r = CDDP_OK;
  if (strncmp(m->at->init_method, "unix:", 5) != 0) r = cddp__meeting_round(m);
  if (r == CDDP_OK) r = cddp__meeting_failed_elsewhere(m);
  if (r == CDDP_OK && m->round != 0 && (m->conducts || m->number > 0)) {
    r = cddp__meeting_tell(m);
    if (r == CDDP_OK) r = m->conducts ? cddp__meeting_conduct(m) : cddp__meeting_follow(m);
  }
  m->look = cddp__now() + m->pause;
  m->pause = 2 * m->pause < most ? 2 * m->pause : most;
  return r;
}

/* Strikes out of missing[world_size] the ranks that other hosts have reported. */
static void cddp__meeting_elsewhere(cddp__meeting *m, bool *missing) {
  size_t n = 0, i, capacity = 4 * (size_t)m->at->world_size;
  unsigned char *list = (unsigned char *)malloc(capacity);
  int64_t others = 0;
  char key[256];
  int h;
  cddp__meeting_key(m, key, "hosts", 0);
  if (list == NULL || m->round == 0 || cddp__store_add(m->store, key, 0, &others) != CDDP_OK)
    others = 0;
  for (h = 1; h <= others && h < m->at->world_size; h++) {
    cddp__meeting_key(m, key, "here", h);
    if (h == m->number || cddp__meeting_peek(m, key, list, capacity, &n) != CDDP_OK) continue;
    for (i = 0; i + 4 <= n; i += 4) {
      uint32_t rank = cddp__get32(list + i);
      if (rank < (uint32_t)m->at->world_size) missing[rank] = false;
    }
  }
  free(list);
}

static cddp_result cddp__meeting_late(cddp__meeting *m) {
  bool *missing = (bool *)calloc((size_t)m->at->world_size, sizeof *missing);
  char list[128] = "";
  int rank, n = 0;
  if (missing == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  if (m->conducts || m->number == 0) {
    for (rank = 0; rank < m->at->world_size; rank++) missing[rank] = !cddp__meeting_has(m, rank);
    cddp__meeting_elsewhere(m, missing);
  }
  for (rank = 0; rank < m->at->world_size; rank++) {
    if (!missing[rank]) continue;
    if (n++ < 8)
      snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d", n > 1 ? ", " : "", rank);
  }
  free(missing);
  if (n == 0)
    return cddp__fail(CDDP_TIMEOUT,
                      "timed out after %g s: not all %d ranks have come; %d are on this host",
                      m->at->timeout_s, m->at->world_size, m->joined + 1);
  return cddp__fail(
      CDDP_TIMEOUT,
      "timed out after %g s: rank%s %s%s of %d did not come; start them, or raise CDDP_TIMEOUT_S",
      m->at->timeout_s, n > 1 ? "s" : "", list, n > 8 ? ", ..." : "", m->at->world_size);
}

/* One round of the leader's loop: waits a little for connections, hellos and deaths. */
static cddp_result cddp__meeting_poll(cddp__meeting *m, struct pollfd *fds) {
  double now, until = m->look < m->deadline ? m->look : m->deadline;
  cddp_result r;
  int i;
  fds[0].fd = m->listener;
  for (i = 0; i < m->capacity; i++) fds[1 + i].fd = m->guests[i].fd;
  for (i = 0; i < m->capacity + 1; i++) {
    fds[i].events = POLLIN;
    fds[i].revents = 0;
  }
  if (poll(fds, (nfds_t)m->capacity + 1, cddp__poll_ms(until, 50)) < 0 && errno != EINTR)
    return cddp__fail_errno("poll");
  if (fds[0].revents != 0) cddp__accept_guest(m);
  now = cddp__now();
  for (i = 0; i < m->capacity; i++) {
    cddp__guest *c = &m->guests[i];
    if (c->fd < 0) continue;
    if (fds[1 + i].fd == c->fd && fds[1 + i].revents != 0 &&
        (r = cddp__guest_read(m, c)) != CDDP_OK)
      return r;
    if (c->fd >= 0 && c->rank < 0 && now - c->since > CDDP__HELLO_S) cddp__guest_drop(c);
  }
  return CDDP_OK;
}

static cddp_result cddp__gather_guests(cddp__meeting *m) {
  struct pollfd *fds;
  cddp_result r = CDDP_OK;
  int i;
  m->pause = 0.002;
  m->look = cddp__now() + m->pause;
  m->capacity = m->at->world_size + 64;
  m->guests = (cddp__guest *)calloc((size_t)m->capacity, sizeof *m->guests);
  fds = (struct pollfd *)calloc((size_t)m->capacity + 1, sizeof *fds);
  if (m->guests == NULL || fds == NULL)
    r = cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  for (i = 0; m->guests != NULL && i < m->capacity; i++) m->guests[i].fd = m->guests[i].rank = -1;
  if (m->at->world_size == 1) m->host_count = 1;
  while (r == CDDP_OK && m->host_count == 0) {
    r = cddp__meeting_poll(m, fds);
    if (r == CDDP_OK && m->joined == m->at->world_size - 1)
      m->host_count = 1;
    else if (r == CDDP_OK && cddp__now() >= m->look)
      r = cddp__meeting_news(m);
    if (r == CDDP_OK && m->host_count == 0) {
      if (cddp__now() >= m->deadline)
        r = cddp__meeting_late(m);
      else if (m->doubles > 0 && m->joined + 1 + m->doubles >= m->at->world_size)
        r = cddp__fail(CDDP_INVALID_ARGUMENT, "%s", m->double_text); /* as many as are to come */
    }
  }
  free(fds);
  return r;
}

/* Makes the memfd: as large as all windows, and all holes. */
static cddp_result cddp__make_memory(cddp__host *h) {
  uint64_t bytes;
  h->fd = (int)syscall(SYS_memfd_create, "cddp", 3u /* MFD_CLOEXEC | MFD_ALLOW_SEALING */);
  if (h->fd < 0) return cddp__fail_errno("memfd_create");
  bytes = (uint64_t)(h->size + 1) << h->window_bits;
  if (ftruncate(h->fd, (off_t)bytes) != 0)
    return cddp__fail(CDDP_SYSTEM,
                      "ftruncate of shared memory: %s; is there a file size limit (ulimit -f)?",
                      strerror(errno));
  fcntl(h->fd, 1033 /* F_ADD_SEALS */,
        2 | 4 /* SHRINK | GROW: no peer can pull it from under us */);
  return CDDP_OK;
}

/* Sends bytes with a descriptor attached to the first of them. */
static cddp_result cddp__send_descriptor(int fd, const void *data, size_t n, int descriptor) {
  union {
    struct cmsghdr head;
    char space[CMSG_SPACE(sizeof(int))];
  } control;
  struct msghdr msg;
  struct iovec io;
  ssize_t sent;
  double deadline = cddp__now() + 5;
  cddp_result r = CDDP_OK;
  memset(&msg, 0, sizeof msg);
  memset(&control, 0, sizeof control);
  memcpy(&io.iov_base, &data, sizeof io.iov_base); /* sendmsg does not write to it */
  io.iov_len = n;
  msg.msg_iov = &io;
  msg.msg_iovlen = 1;
  msg.msg_control = control.space;
  msg.msg_controllen = sizeof control.space;
  control.head.cmsg_level = SOL_SOCKET;
  control.head.cmsg_type = SCM_RIGHTS;
  control.head.cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(&control.head), &descriptor, sizeof descriptor);
  while ((sent = sendmsg(fd, &msg, MSG_NOSIGNAL)) < 0) {
    if (errno == EAGAIN)
      r = cddp__wait_fd(fd, POLLOUT, deadline);
    else if (errno != EINTR)
      r = cddp__fail_errno("sendmsg of a descriptor");
    if (r != CDDP_OK) return r;
  }
  return cddp__send_all(fd, (const char *)data + sent, n - (size_t)sent, deadline);
}

static cddp_result cddp__guest_lost(const cddp__guest *c) {
  return cddp__fail(CDDP_PEER_LOST, "rank %d (pid %u) died or gave up while the ranks were meeting",
                    c->rank, c->pid);
}

/* --- several hosts: who is where ---
   What all ranks get. Little-endian: magic, hosts, ranks, 0, the job's token; for each host its
   name[72], address[24], its leader's token[16], its ranks, WORLD_SIZE; for each rank its host,
   process id and port. A host's own table, for the conductor, is its entry and (rank, process id,
   port). */

#define CDDP__BLOB_MAGIC 0x4f484443u /* "CDHO" */
#define CDDP__BLOB_HEAD 32
#define CDDP__HOST_BYTES 120
#define CDDP__RANK_BYTES 12

/* Opens this rank's port for links. */
static cddp_result cddp__listen_for_links(cddp__meeting *m, int *port) {
  cddp__address a = m->address;
  char text[160];
  int error;
  cddp__address_set_port(&a, 0);
  error = cddp__listen_address(&a, &m->fd);
  cddp__address_text(&a, text, sizeof text);
  if (error == 0 && !cddp__local_address(m->fd, &a)) error = errno;
  if (error != 0)
    return cddp__fail(CDDP_SYSTEM,
                      "cannot listen on %s for ranks of other hosts: %s; CDDP_IFNAME names another "
                      "interface",
                      text, strerror(error));
  *port = cddp__address_port(&a);
  return CDDP_OK;
}

/* The leader has its guests listen, and learns their ports. */
static cddp_result cddp__collect_ports(cddp__meeting *m) {
  unsigned char reply[CDDP__REPLY_BYTES], port[4];
  cddp_result r = CDDP_OK;
  int i, pass;
  m->ports = (int *)calloc((size_t)m->capacity, sizeof *m->ports);
  if (m->ports == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  cddp__write_reply(reply, CDDP_OK, m->host_count, "");
  cddp__put32(reply + 12, CDDP__REPLY_LISTEN);
  cddp__pack_address(reply + 16, &m->address);
  for (pass = 0; pass < 2; pass++)
    for (i = 0; r == CDDP_OK && i < m->capacity; i++) {
      cddp__guest *c = &m->guests[i];
      if (c->fd < 0 || c->rank < 0) continue;
      r = pass == 0 ? cddp__send_all(c->fd, reply, sizeof reply, m->deadline)
                    : cddp__recv_all(c->fd, port, sizeof port, m->deadline);
      if (r == CDDP_TIMEOUT)
        return cddp__fail(r, "timed out after %g s: rank %d (pid %u) came, and then stood still",
                          m->at->timeout_s, c->rank, c->pid);
      if (r != CDDP_OK)
        return cddp__fail(CDDP_PEER_LOST, "rank %d (pid %u) died while the ranks were meeting",
                          c->rank, c->pid);
      m->ports[i] = pass == 0 ? 0 : (int)cddp__get32(port);
    }
  return r;
}

static void cddp__put_rank(unsigned char *at, uint32_t a, uint32_t pid, uint32_t port) {
  cddp__put32(at, a);
  cddp__put32(at + 4, pid);
  cddp__put32(at + 8, port);
}

/* This host's own table; NULL without memory. */
static unsigned char *cddp__host_table(cddp__meeting *m, const cddp__host *h, int port,
                                       size_t *size) {
  unsigned char *t, *at;
  int i;
  *size = CDDP__HOST_BYTES + CDDP__RANK_BYTES * (size_t)(m->joined + 1);
  if ((t = (unsigned char *)calloc(1, *size)) == NULL) return NULL;
  snprintf((char *)t, 72, "%s", h->name);
  cddp__pack_address(t + 72, &m->address);
  memcpy(t + 96, m->token, 16);
  cddp__put32(t + 112, (uint32_t)m->joined + 1);
  cddp__put32(t + 116, (uint32_t)m->at->world_size);
  at = t + CDDP__HOST_BYTES;
  cddp__put_rank(at, (uint32_t)m->at->rank, (uint32_t)getpid(), (uint32_t)port);
  for (i = 0; i < m->capacity; i++)
    if (m->guests[i].fd >= 0 && m->guests[i].rank >= 0)
      cddp__put_rank(at += CDDP__RANK_BYTES, (uint32_t)m->guests[i].rank, m->guests[i].pid,
                     (uint32_t)m->ports[i]);
  return t;
}

/* Adds a host's table to the blob; every rank may come but once. */
static cddp_result cddp__add_table(cddp__meeting *m, int host, const unsigned char *t,
                                   size_t size) {
  unsigned char *entry = m->blob + CDDP__BLOB_HEAD + CDDP__HOST_BYTES * (size_t)host;
  unsigned char *ranks = m->blob + CDDP__BLOB_HEAD + CDDP__HOST_BYTES * (size_t)m->host_count;
  size_t n = size < CDDP__HOST_BYTES ? 0 : cddp__get32(t + 112), i;
  if (n == 0 || n > (size_t)m->at->world_size || size != CDDP__HOST_BYTES + CDDP__RANK_BYTES * n)
    return cddp__fail(CDDP_MISMATCH, "the store holds a key of cddp with foreign content");
  memcpy(entry, t, CDDP__HOST_BYTES);
  entry[71] = 0;
  if (cddp__get32(t + 116) != (uint32_t)m->at->world_size)
    return cddp__fail(CDDP_MISMATCH,
                      "rank %u on %s has world size %u, rank %d has %d: WORLD_SIZE must agree",
                      cddp__get32(t + CDDP__HOST_BYTES), (const char *)entry, cddp__get32(t + 116),
                      m->at->rank, m->at->world_size);
  for (i = 0; i < n; i++) {
    const unsigned char *in = t + CDDP__HOST_BYTES + CDDP__RANK_BYTES * i;
    uint32_t rank = cddp__get32(in);
    unsigned char *out;
    if (rank >= (uint32_t)m->at->world_size)
      return cddp__fail(CDDP_MISMATCH, "rank %u of host %s is beyond WORLD_SIZE %d: all must agree",
                        rank, (const char *)entry, m->at->world_size);
    out = ranks + CDDP__RANK_BYTES * (size_t)rank;
    if (cddp__get32(out + 8) != 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "rank %u is taken twice: by pid %u on %s and pid %u on %s; each process "
                        "needs a RANK of its own",
                        rank, cddp__get32(out + 4),
                        (const char *)m->blob + CDDP__BLOB_HEAD +
                            CDDP__HOST_BYTES * (size_t)cddp__get32(out),
                        cddp__get32(in + 4), (const char *)entry);
    cddp__put_rank(out, (uint32_t)host, cddp__get32(in + 4), cddp__get32(in + 8));
  }
  return CDDP_OK;
}

/* The conductor puts all hosts' tables together. */
static cddp_result cddp__conduct_tables(cddp__meeting *m, const unsigned char *own, size_t size) {
  size_t most = CDDP__HOST_BYTES + CDDP__RANK_BYTES * (size_t)m->at->world_size, n = 0;
  unsigned char *t = (unsigned char *)malloc(most);
  char key[256];
  cddp_result r = t != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
  int i;
  cddp__put32(m->blob, CDDP__BLOB_MAGIC);
  cddp__put32(m->blob + 4, (uint32_t)m->host_count);
  cddp__put32(m->blob + 8, (uint32_t)m->at->world_size);
  if (r == CDDP_OK) r = cddp__random(m->blob + 16, 16);
  if (r == CDDP_OK) r = cddp__add_table(m, 0, own, size);
  for (i = 1; r == CDDP_OK && i < m->host_count; i++) {
    cddp__meeting_key(m, key, "table", i);
    r = cddp__meeting_await(m, key);
    if (r == CDDP_OK) r = cddp__store_get(m->store, key, t, most, &n, m->deadline);
    if (r == CDDP_OK) r = cddp__add_table(m, i, t, n);
  }
  free(t);
  if (r != CDDP_OK) return r;
  for (i = 0; i < m->at->world_size; i++) {
    const unsigned char *ranks =
        m->blob + CDDP__BLOB_HEAD + CDDP__HOST_BYTES * (size_t)m->host_count;
    if (cddp__get32(ranks + CDDP__RANK_BYTES * (size_t)i + 8) == 0)
      return cddp__fail(CDDP_MISMATCH, "as many ranks as WORLD_SIZE have come, but no rank %d", i);
  }
  cddp__meeting_key(m, key, "world", 0);
  return cddp__store_set(m->store, key, m->blob, m->blob_size);
}

/* The others give theirs and get the whole; the last to have it says so. */
static cddp_result cddp__follow_tables(cddp__meeting *m, const unsigned char *own, size_t size) {
  char key[256];
  size_t n = 0;
  int64_t fetched = 0;
  cddp_result r;
  cddp__meeting_key(m, key, "table", m->number);
  if ((r = cddp__store_set(m->store, key, own, size)) != CDDP_OK) return r;
  cddp__meeting_key(m, key, "world", 0);
  r = cddp__meeting_await(m, key);
  if (r == CDDP_OK) r = cddp__store_get(m->store, key, m->blob, m->blob_size, &n, m->deadline);
  if (r != CDDP_OK) return r;
  if (n != m->blob_size)
    return cddp__fail(CDDP_MISMATCH, "the ranks on other hosts have another world size than %d",
                      m->at->world_size);
  cddp__meeting_key(m, key, "fetched", 0);
  if ((r = cddp__store_add(m->store, key, 1, &fetched)) != CDDP_OK) return r;
  cddp__meeting_key(m, key, "done", 0);
  return fetched == m->host_count - 1 ? cddp__store_set(m->store, key, "", 0) : CDDP_OK;
}

/* Rank 0's process serves the store: on success until all hosts have what they need, after a
   failure for a moment, so that they can read why. */
static void cddp__serve_others(cddp__meeting *m, cddp_result r) {
  char kept[CDDP__ERROR_MAX], key[256];
  int64_t others = 0;
  memcpy(kept, cddp__error_text, sizeof kept);
  if (r == CDDP_OK) {
    cddp__meeting_key(m, key, "done", 0);
    (void)cddp__meeting_await(m, key); /* after a failure the first step fails */
  } else if (r != CDDP_NETWORK && strncmp(m->at->init_method, "unix:", 5) != 0) {
    cddp__meeting_key(m, key, "hosts", 0);
    if (cddp__store_add(m->store, key, 0, &others) == CDDP_OK && others > 0) cddp__sleep(0.3);
  }
  memcpy(cddp__error_text, kept, sizeof kept);
}

static uint32_t cddp__blob_rank(const unsigned char *blob, int rank, int field) {
  size_t hosts = cddp__get32(blob + 4);
  return cddp__get32(blob + CDDP__BLOB_HEAD + CDDP__HOST_BYTES * hosts +
                     CDDP__RANK_BYTES * (size_t)rank + 4 * (size_t)field);
}

/* Fills h with what m->blob says; takes over the listening socket. */
static cddp_result cddp__take_blob(cddp__meeting *m, cddp__host *h, const char *secret) {
  const unsigned char *b = m->blob;
  cddp__net *n;
  int i;
  if (cddp__get32(b) != CDDP__BLOB_MAGIC || cddp__get32(b + 4) != (uint32_t)m->host_count ||
      cddp__get32(b + 8) != (uint32_t)m->at->world_size)
    return cddp__fail(CDDP_MISMATCH, "the list of ranks is damaged");
  n = cddp__net_new(&h->allocator, m->at->world_size, m->host_count);
  h->net = n;
  if (n == NULL) return CDDP_OUT_OF_MEMORY;
  n->rank = m->at->rank;
  memcpy(n->token, b + 16, 16);
  if (secret != NULL && (n->secret = cddp__strdup(&h->allocator, secret)) == NULL)
    return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < n->host_count; i++) {
    const unsigned char *entry = b + CDDP__BLOB_HEAD + CDDP__HOST_BYTES * (size_t)i;
    snprintf(n->hosts[i].name, sizeof n->hosts[i].name, "%.71s", (const char *)entry);
    cddp__unpack_address(&n->hosts[i].address, entry + 72);
  }
  for (i = 0; i < n->size; i++) {
    uint32_t host = cddp__blob_rank(b, i, 0);
    if (host >= (uint32_t)n->host_count)
      return cddp__fail(CDDP_MISMATCH, "the list of ranks is damaged");
    n->homes[i].host = (int)host;
    n->homes[i].index = n->hosts[host].size++;
    n->homes[i].pid = cddp__blob_rank(b, i, 1);
    n->homes[i].port = (int)cddp__blob_rank(b, i, 2);
  }
  n->host = n->homes[n->rank].host;
  cddp__host_place(h, n->hosts[n->host].size, n->homes[n->rank].index);
  for (i = 0; i < n->size; i++)
    if (n->homes[i].host == n->host) h->pids[n->homes[i].index] = n->homes[i].pid;
  n->listener = m->fd;
  m->fd = -1;
  return CDDP_OK;
}

static bool cddp__blob_alloc(cddp__meeting *m) {
  m->blob_size = CDDP__BLOB_HEAD + CDDP__HOST_BYTES * (size_t)m->host_count +
                 CDDP__RANK_BYTES * (size_t)m->at->world_size;
  m->blob = (unsigned char *)calloc(1, m->blob_size);
  if (m->blob == NULL) cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  return m->blob != NULL;
}

/* The leaders tell each other who is where. */
static cddp_result cddp__meet_hosts(cddp__meeting *m, cddp__host *h) {
  unsigned char *table = NULL;
  size_t size = 0;
  int port = 0;
  cddp_result r;
  if (!cddp__blob_alloc(m)) return CDDP_OUT_OF_MEMORY;
  if ((r = cddp__listen_for_links(m, &port)) != CDDP_OK) return r;
  if ((r = cddp__collect_ports(m)) != CDDP_OK) return r;
  if ((table = cddp__host_table(m, h, port, &size)) == NULL)
    return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the meeting");
  r = m->conducts ? cddp__conduct_tables(m, table, size) : cddp__follow_tables(m, table, size);
  free(table);
  return r == CDDP_OK ? cddp__take_blob(m, h, m->store->secret) : r;
}

static cddp_result cddp__welcome(cddp__meeting *m, cddp__host *h) {
  unsigned char reply[CDDP__REPLY_BYTES];
  cddp_result r = CDDP_OK;
  int i;
  h->pids[h->index] = (uint32_t)getpid();
  for (i = 0; m->host_count == 1 && i < m->capacity; i++)
    if (m->guests[i].fd >= 0 && m->guests[i].rank >= 0)
      h->pids[m->guests[i].rank] = m->guests[i].pid;
  cddp__write_reply(reply, CDDP_OK, m->host_count, "");
  for (i = 0; i < m->capacity; i++) {
    cddp__guest *c = &m->guests[i];
    if (c->fd < 0 || c->rank < 0) continue;
    CDDP__POINT("welcome");
    r = cddp__send_descriptor(c->fd, reply, sizeof reply, h->fd);
    if (r == CDDP_OK && m->host_count > 1)
      r = cddp__send_all(c->fd, m->blob, m->blob_size, cddp__now() + 5);
    else if (r == CDDP_OK)
      r = cddp__send_all(c->fd, h->pids, (size_t)h->size * sizeof *h->pids, cddp__now() + 5);
    if (r != CDDP_OK) return cddp__guest_lost(c);
  }
  for (i = 0; i < m->capacity; i++) { /* each says that it is in, or is dead or could not come in */
    cddp__guest *c = &m->guests[i];
    if (c->fd < 0 || c->rank < 0) continue;
    if (cddp__recv_all(c->fd, reply, 1, m->deadline) != CDDP_OK) return cddp__guest_lost(c);
  }
  return CDDP_OK;
}

static cddp_result cddp__lead(cddp__meeting *m, cddp__host *h) {
  char text[CDDP__ERROR_MAX];
  cddp_result r = cddp__gather_guests(m);
  int i;
  if (r == CDDP_OK && m->host_count > 1) r = cddp__meet_hosts(m, h);
  if (r == CDDP_OK) r = cddp__make_memory(h);
  if (r == CDDP_OK) {
    if (m->host_count == 1 || m->conducts) /* without a store: others find out */
      (void)cddp__store_set(m->store, m->met_key, "", 0);
    return cddp__welcome(m, h);
  }
  snprintf(text, sizeof text, "%s", cddp_error());
  for (i = 0; m->guests != NULL && i < m->capacity; i++)
    if (m->guests[i].fd >= 0) cddp__guest_refuse(&m->guests[i], r, text);
  return cddp__fail(r, "%s", text);
}

/* --- the others' side --- */

/* Receives exactly n bytes and the descriptor that comes with them, -1 if none does. */
static cddp_result cddp__recv_descriptor(int fd, void *data, size_t n, int *descriptor,
                                         double deadline) {
  union {
    struct cmsghdr head;
    char space[CMSG_SPACE(sizeof(int))];
  } control;
  struct pollfd p;
  struct msghdr msg;
  struct iovec io;
  ssize_t got;
  *descriptor = -1;
  p.fd = fd;
  p.events = POLLIN;
  for (;;) {
    memset(&msg, 0, sizeof msg);
    io.iov_base = data;
    io.iov_len = n;
    msg.msg_iov = &io;
    msg.msg_iovlen = 1;
    msg.msg_control = control.space;
    msg.msg_controllen = sizeof control.space;
    got = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got > 0) break;
    if (got == 0 || (errno != EAGAIN && errno != EINTR))
      return cddp__fail(CDDP_NETWORK, "connection lost");
    if (cddp__now() >= deadline) return cddp__fail(CDDP_TIMEOUT, "timed out");
    poll(&p, 1, cddp__poll_ms(deadline, 1000));
  }
  if (msg.msg_controllen >= CMSG_LEN(sizeof(int)) && control.head.cmsg_type == SCM_RIGHTS)
    memcpy(descriptor, CMSG_DATA(&control.head), sizeof *descriptor);
  return cddp__recv_all(fd, (char *)data + got, n - (size_t)got, deadline);
}

static void cddp__write_hello(const cddp__meeting *m, unsigned char *hello) {
  memset(hello, 0, CDDP__HELLO_BYTES);
  cddp__put32(hello, CDDP__HELLO_MAGIC);
  cddp__put32(hello + 4, CDDP_VERSION);
  cddp__put32(hello + 8, (uint32_t)m->at->rank);
  cddp__put32(hello + 12, (uint32_t)m->at->world_size);
  memcpy(hello + 24, m->token, 16);
}

static cddp_result cddp__take_reply_head(cddp__meeting *m, cddp__host *h, int fd,
                                         unsigned char reply[CDDP__REPLY_BYTES], bool *dropped) {
  double deadline =
      m->deadline + 0.5; /* the leader's own deadline comes first: it knows who is late */
  uint32_t code;
  cddp_result r = cddp__recv_descriptor(fd, reply, CDDP__REPLY_BYTES, &h->fd, deadline);
  if (r == CDDP_TIMEOUT)
    return cddp__fail(r, "timed out after %g s: not all %d ranks have come", m->at->timeout_s,
                      m->at->world_size);
  if (r != CDDP_OK || cddp__get32(reply) != CDDP__HELLO_MAGIC) {
    *dropped = r != CDDP_OK;
    return cddp__fail(CDDP_PEER_LOST,
                      "the rank that gathers this host's ranks died while they were meeting");
  }
  code = cddp__get32(reply + 4);
  if (code == CDDP_OK) return CDDP_OK;
  m->refused = true;
  reply[CDDP__REPLY_BYTES - 1] = 0;
  return cddp__fail(code < CDDP__RESULT_COUNT ? (cddp_result)code : CDDP_NETWORK, "%s",
                    reply[16] ? (const char *)reply + 16 : "another rank could not go on");
}

/* Takes the leader's answer from fd: shared memory and process ids, or the reason why not; before
   it, when there are several hosts, the request to listen. *dropped: there was no answer. */
static cddp_result cddp__take_reply(cddp__meeting *m, cddp__host *h, int fd, bool *dropped) {
  unsigned char reply[CDDP__REPLY_BYTES], answer[4];
  int port = 0;
  cddp_result r = cddp__take_reply_head(m, h, fd, reply, dropped);
  if (r != CDDP_OK) return r;
  m->host_count = (int)cddp__get32(reply + 8);
  if (m->host_count < 1 || m->host_count > m->at->world_size)
    return cddp__fail(CDDP_MISMATCH, "the rank that gathers this host's ranks makes no sense");
  if (cddp__get32(reply + 12) == CDDP__REPLY_LISTEN) {
    cddp__unpack_address(&m->address, reply + 16);
    if ((r = cddp__listen_for_links(m, &port)) != CDDP_OK) return r;
    cddp__put32(answer, (uint32_t)port);
    (void)cddp__send_all(fd, answer, sizeof answer, m->deadline); /* the answer tells */
    if ((r = cddp__take_reply_head(m, h, fd, reply, dropped)) != CDDP_OK) return r;
  }
  if (h->fd < 0)
    return cddp__fail(CDDP_SYSTEM, "no descriptor of the shared memory came; too many open files?");
  if (m->host_count == 1) {
    r = cddp__recv_all(fd, h->pids, (size_t)h->size * sizeof *h->pids, m->deadline + 0.5);
  } else {
    if (!cddp__blob_alloc(m)) return CDDP_OUT_OF_MEMORY;
    r = cddp__recv_all(fd, m->blob, m->blob_size, m->deadline + 0.5);
    if (r == CDDP_OK) r = cddp__take_blob(m, h, m->store->secret);
  }
  return r == CDDP_OK ? cddp__send_all(fd, "", 1, m->deadline + 0.5) : r;
}

/* Connects to the leader; *fd -1 with CDDP_OK when nobody listens there any more. */
static cddp_result cddp__call_leader(const cddp__meeting *m, int *fd) {
  struct sockaddr_un address;
  socklen_t n = cddp__unix_address(&address, m->name);
  uint32_t pid;
  *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (*fd < 0) return cddp__fail_errno("socket(AF_UNIX)");
  while (connect(*fd, (struct sockaddr *)(void *)&address, n) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN && cddp__now() < m->deadline) { /* its backlog is full */
      cddp__sleep(0.001);
      continue;
    }
    close(*fd);
    *fd = -1;
    return CDDP_OK;
  }
  if (!cddp__same_user(*fd, &pid)) {
    close(*fd);
    *fd = -1;
    return cddp__fail(CDDP_UNAUTHORIZED, "the other ranks run as another user");
  }
  return CDDP_OK;
}

/* --- both --- */

/* Becomes the host's leader (*lead) or learns its name. stale: a name found dead, to be replaced.
 */
static cddp_result cddp__choose_leader(cddp__meeting *m, const unsigned char *stale, bool *lead) {
  unsigned char mine[48], now[48];
  size_t n = 0;
  cddp_result r;
  memcpy(mine, m->name, 32);
  memcpy(mine + 32, m->token, 16);
  r = cddp__store_compare_set(m->store, m->host_key, stale, stale ? sizeof mine : 0, mine,
                              sizeof mine, now, sizeof now, &n, lead);
  if (r != CDDP_OK) return r;
  if (n != sizeof now)
    return cddp__fail(CDDP_MISMATCH, "the store holds a key of cddp with foreign content");
  if (*lead && stale != NULL) /* what failed then is over */
    (void)cddp__store_delete(m->store, m->failed_key, NULL);
  memcpy(m->name, now, 32);
  memcpy(m->token, now + 32, 16);
  return CDDP_OK;
}

/* Joins the leader at fd. One that hangs up without an answer is dead, or has dropped this rank
   with the strangers at a full table: then it can be called again. */
static cddp_result cddp__join(cddp__meeting *m, cddp__host *h, int fd) {
  unsigned char hello[CDDP__HELLO_BYTES];
  char text[CDDP__ERROR_MAX];
  cddp_result r = CDDP_OK;
  int tries;
  cddp__write_hello(m, hello);
  for (tries = 1;; tries++) {
    bool dropped = false;
    CDDP__POINT("hello");
    r = cddp__send_all(fd, hello, sizeof hello, m->deadline);
    CDDP__POINT("greeted");
    if (r == CDDP_OK) r = cddp__take_reply(m, h, fd, &dropped);
    close(fd);
    if (!dropped || tries == CDDP__HELLO_TRIES || cddp__now() >= m->deadline) return r;
    if (h->fd >= 0) close(h->fd); /* came before the rest of the answer did not */
    h->fd = -1;
    cddp__sleep(0.001);
    snprintf(text, sizeof text, "%s", cddp_error());
    if (cddp__call_leader(m, &fd) != CDDP_OK || fd < 0) return cddp__fail(r, "%s", text);
  }
}

/* Meets the host's other ranks through the open store. */
static cddp_result cddp__meet_in(cddp__meeting *m, cddp__host *h) {
  unsigned char stale[48], own[48];
  bool lead = false, have_stale = false;
  cddp_result r = cddp__leader_listen(m);
  int fd = -1;
  if (r == CDDP_OK && m->at->rank == 0) r = cddp__open_round(m);
  memcpy(own, m->name, 32);
  memcpy(own + 32, m->token, 16);
  while (r == CDDP_OK) {
    memcpy(m->name, own, 32);
    memcpy(m->token, own + 32, 16);
    if ((r = cddp__choose_leader(m, have_stale ? stale : NULL, &lead)) != CDDP_OK) break;
    CDDP__POINT(lead ? "lead" : "follow");
    if (lead) return cddp__lead(m, h);
    if ((r = cddp__call_leader(m, &fd)) != CDDP_OK) break;
    if (fd >= 0) return cddp__join(m, h, fd);
    memcpy(stale, m->name, 32);
    memcpy(stale + 32, m->token, 16);
    have_stale = true;
    if (cddp__now() >= m->deadline)
      return cddp__fail(CDDP_TIMEOUT, "timed out after %g s looking for the other ranks",
                        m->at->timeout_s);
  }
  return r;
}

/* Leaves word in the store, in case this rank dies before it has met the others. */
static void cddp__leave_will(const cddp__meeting *m) {
  unsigned char will[512], *p = will + 8;
  size_t key = strlen(m->failed_key) + 1, n;
  char host[72] = "?";
  if (strncmp(m->at->init_method, "file:", 5) == 0) return; /* nobody sees it end */
  (void)gethostname(host, sizeof host - 1);
  cddp__put64(will, key);
  *p = '/'; /* as every key on the wire */
  memcpy(p + 1, m->failed_key, key - 1);
  p += key;
  p[8] = CDDP_PEER_LOST;
  n = (size_t)snprintf((char *)p + 9, (size_t)(will + sizeof will - p) - 9,
                       "rank %d (pid %d on %s) died before the ranks had met", m->at->rank,
                       (int)getpid(), host);
  cddp__put64(p, n + 1);
  (void)cddp__store_set(m->store, m->will_key, will, (size_t)(p - will) + 9 + n);
}

/* The meeting is over for this rank: it takes its will back. If it failed by itself, not because
   the leader said so, it tells the others. */
static void cddp__end_will(const cddp__meeting *m, cddp_result r) {
  char own[CDDP__ERROR_MAX], text[1 + CDDP__ERROR_MAX];
  snprintf(own, sizeof own, "%s", cddp_error());
  if (r != CDDP_OK && r != CDDP_NETWORK && !m->refused) {
    text[0] = (char)r;
    snprintf(text + 1, sizeof text - 1, "rank %d failed while the ranks were meeting: %.*s",
             m->at->rank, CDDP__ERROR_MAX - 64, own);
    (void)cddp__store_set(m->store, m->failed_key, text, 1 + strlen(text + 1));
  }
  if (strncmp(m->at->init_method, "file:", 5) != 0)
    (void)cddp__store_set(m->store, m->will_key, NULL, 0);
  if (r != CDDP_OK) cddp__fail(r, "%s", own);
}

static cddp_result cddp__open_store(cddp__meeting *m, const cddp__place *at,
                                    const cddp_group_desc *d) {
  cddp__store_options o;
  memset(&o, 0, sizeof o);
  o.init_method = at->init_method;
  o.is_server = at->rank == 0 && !at->client_only && strncmp(at->init_method, "file:", 5) != 0;
  o.listen_fd = at->listen_fd;
  o.reachable = at->local_world_size != at->world_size;
  o.deadline = m->deadline;
  o.timeout_s = at->timeout_s;
  o.secret = d->secret;
  o.allocator = d->allocator;
  o.port_name = at->from_environment ? "MASTER_PORT" : NULL;
  o.host_name = at->from_environment ? "MASTER_ADDR" : NULL;
  return cddp__store_open(&m->store, &o);
}

/* Whose store it is, then the meeting in it. */
static cddp_result cddp__meet_at(cddp__meeting *m, cddp__host *h) {
  const char *key = m->met_key;
  cddp_result r = cddp__store_check(m->store, &key, 1, &m->stale);
  if (r == CDDP_OK) {
    cddp__leave_will(m);
    r = cddp__meet_in(m, h);
    cddp__end_will(m, r);
  } else {
    m->stale = true;
  }
  if (r != CDDP_NETWORK || m->stale) return r;
  if (m->double_text[0] != 0) return cddp__fail(CDDP_MISMATCH, "%s", m->double_text);
  return cddp__fail(CDDP_PEER_LOST,
                    "the store hung up while the ranks were meeting: the process that serves it "
                    "(rank 0, unless a launcher does) died or gave up");
}

/* Fills h with the shared memory and process ids of all ranks. A store that goes away under a rank
   may be an earlier job's, which is ending: then it tries again until the deadline. */
static cddp_result cddp__meet(cddp__place *at, const cddp_group_desc *d, cddp__host *h) {
  cddp__meeting m;
  cddp_result r;
  bool serves = at->rank == 0 && !at->client_only;
  double deadline = cddp__now() + at->timeout_s;
  for (;;) {
    memset(&m, 0, sizeof m);
    m.at = at;
    m.listener = m.fd = -1;
    m.deadline = deadline;
    cddp__host_identity(m.host, sizeof m.host);
    snprintf(m.host_key, sizeof m.host_key, "%s/host/%s", at->run, m.host);
    snprintf(m.failed_key, sizeof m.failed_key, "%s/failed", at->run);
    snprintf(m.met_key, sizeof m.met_key, "%s/met", at->run);
    snprintf(m.will_key, sizeof m.will_key, "%s" CDDP__WILL, at->run);
    if (h->net != NULL) h->net->close(h->net);
    h->net = NULL;
    cddp__host_place(h, at->world_size, at->rank);
    r = cddp__open_store(&m, at, d);
    if (at->listen_fd >= 0) unsetenv("CDDP_LISTEN_FD");
    at->listen_fd = -1;
    if (r != CDDP_OK && at->listen_fd_lost && at->rank == 0)
      return cddp__fail_in(r,
                           "descriptor %s (CDDP_LISTEN_FD) of the launcher is not here: a "
                           "program between it and this one has closed it; ",
                           getenv("CDDP_LISTEN_FD"));
    if (r != CDDP_OK) return r;
    r = cddp__meet_at(&m, h);
    if (serves && (r != CDDP_OK || h->net != NULL)) cddp__serve_others(&m, r);
    cddp__meeting_close(&m);
    cddp__store_close(m.store);
    if (r != CDDP_NETWORK || serves || cddp__now() >= deadline) return r;
    cddp__sleep(0.005);
  }
}

static void cddp__watch_processes(cddp__host *h) {
  int i;
  for (i = 0; i < h->size; i++)
    if (i != h->index) h->pidfds[i] = (int)syscall(SYS_pidfd_open, (pid_t)h->pids[i], 0u);
}

/* The group of all ranks, on a board that lies at the start of the shared memory. */
static cddp_result cddp__world_group(cddp_group **out, cddp__host *h, int rank, int size,
                                     double timeout_s) {
  int *members = (int *)cddp__calloc(&h->allocator, (size_t)size, sizeof *members);
  char *board = NULL;
  cddp_result r = CDDP_OUT_OF_MEMORY;
  size_t bytes;
  int i, locals = 0;
  if (members == NULL) return r;
  for (i = 0; i < size; i++) {
    const cddp__home *home = h->net != NULL ? &h->net->homes[i] : NULL;
    members[i] = home == NULL ? i : home->host == h->net->host ? home->index : -1;
    locals += members[i] >= 0;
  }
  bytes = cddp__round_up(cddp__board_bytes(size, locals), cddp__page_size());
  board = h->fd >= 0 ? cddp__map_extent(h, 0, bytes) : cddp__map_plain(bytes);
  if (board == NULL)
    cddp__fail(r, "mmap of the group's shared memory: %s", strerror(errno));
  else
    r = cddp__group_build(out, h, rank, size, members, board, timeout_s);
  if (r != CDDP_OK && board != NULL) munmap(board, bytes);
  cddp__free(&h->allocator, members);
  return r;
}
/* >>p2p ----------------------------------------------------------------------------------------
   send and recv. Works as follows: a sender posts a parcel (destination, tag, where the bytes are)
   on its own seat; the receiver looks through the sender's parcels, copies the bytes itself and
   marks the parcel done. Bytes in shared memory are read where they are, other messages and small
   ones from a copy, so that their send returns at once. Each side bumps the other's mail word, on
   which it may sleep. A rank that waits for anything, collectives included, also serves its own
   pending receives: an exchange needs no thread. */

#define CDDP__EAGER ((size_t)64 << 10) /* shared memory up to this size is copied all the same */
#define CDDP__STAGED_MAX ((size_t)256 << 20) /* bytes in copies per group before a send waits */

static void cddp__notify(cddp_group *g, int rank) {
  cddp__seat *s = cddp__seat_of(g, rank);
  cddp__add32(&s->mail, 1);
  if (cddp__load32(&s->waiting) != 0) cddp__futex_wake(&s->mail);
}

/* Whether the receiver may still read one of this rank's own parcels. */
static bool cddp__parcel_open(const cddp_group *g, int index) {
  uint32_t state = cddp__load32(&cddp__seat_of(g, g->rank)->parcels[index].state) & 255;
  return state == CDDP__PARCEL_POSTED || state == CDDP__PARCEL_TAKEN;
}

/* Frees parcels whose receiver is done and whose send has returned. mail_lock held. */
static size_t cddp__reap_parcels(cddp_group *g) { /* returns bytes still in copies */
  cddp__seat *seat = cddp__seat_of(g, g->rank);
  size_t staged = 0;
  int i;
  for (i = 0; i < CDDP__PARCELS; i++) {
    cddp__outgoing *o = &g->outgoing[i];
    uint32_t state = cddp__load32(&seat->parcels[i].state);
    if (o->orphan && (state == CDDP__PARCEL_DONE || state == CDDP__PARCEL_REFUSED)) {
      o->orphan = o->staged = false;
      cddp__store32(&seat->parcels[i].state, CDDP__PARCEL_FREE);
    }
    if (o->staged) staged += o->stage_size;
  }
  return staged;
}

/* Index of a parcel to post in, -1: none free. mail_lock held. */
static int cddp__free_parcel(cddp_group *g, size_t bytes) {
  cddp__seat *seat = cddp__seat_of(g, g->rank);
  size_t staged = cddp__reap_parcels(g);
  int i, best = -1;
  if (staged > 0 && bytes > CDDP__STAGED_MAX - cddp__min(staged, CDDP__STAGED_MAX)) return -1;
  for (i = 0; i < CDDP__PARCELS; i++) {
    if (cddp__load32(&seat->parcels[i].state) != CDDP__PARCEL_FREE || g->outgoing[i].orphan)
      continue;
    if (best < 0) best = i;
    if (g->outgoing[i].stage_size < bytes) continue;
    if (g->outgoing[best].stage_size < bytes ||
        g->outgoing[i].stage_size < g->outgoing[best].stage_size)
      best = i;
  }
  return best;
}

/* Copies the message into the parcel's stage. mail_lock held. */
static cddp_result cddp__stage(cddp_group *g, int index, const void *buf, size_t bytes,
                               cddp__ref *ref) {
  cddp__outgoing *o = &g->outgoing[index];
  if (o->stage_size < bytes || o->stage == NULL) {
    size_t size = 4096;
    while (size < bytes) size *= 2;
    cddp__arena_free(g->host, o->stage);
    o->stage_size = 0;
    o->stage = cddp__arena_alloc(g->host, size);
    if (o->stage == NULL) return CDDP_OUT_OF_MEMORY;
    o->stage_size = size;
  }
  if (bytes > 0) memcpy(o->stage, buf, bytes);
  o->staged = o->orphan = true;
  *ref = cddp__ref_of(g->host, o->stage, bytes);
  return CDDP_OK;
}

/* Posts a send if there is room (*posted). *parcel is its index while the buffer is in use, else
 * -1. */
static cddp_result cddp__try_post(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                                  int peer, int tag, bool *posted, int *parcel) {
  cddp__seat *seat = cddp__seat_of(g, g->rank);
  size_t bytes = count * cddp__dtype_size(dtype);
  cddp__parcel *p;
  cddp__ref ref;
  cddp_result r = CDDP_OK;
  int i;
  *parcel = -1;
  pthread_mutex_lock(&g->mail_lock);
  i = cddp__free_parcel(g, bytes);
  *posted = i >= 0;
  if (i >= 0) {
    ref = cddp__ref_of(g->host, buf, bytes);
    if (bytes <= CDDP__EAGER || ref.kind == CDDP__REF_NONE || peer == g->rank)
      r = cddp__stage(g, i, buf, bytes, &ref);
    else
      *parcel = i;
  }
  if (i >= 0 && r == CDDP_OK) {
    p = &seat->parcels[i];
    p->to = peer;
    p->tag = tag;
    p->dtype = (uint32_t)dtype;
    p->count = count;
    p->number = ++g->parcel_number;
    p->ref = ref;
    CDDP__POINT("post");
    cddp__store32(&p->state, CDDP__POSTED_TO(peer));
    if ((uint32_t)i >= cddp__load32(&seat->parcel_top))
      cddp__store32(&seat->parcel_top, (uint32_t)i + 1);
  }
  pthread_mutex_unlock(&g->mail_lock);
  if (*posted && r == CDDP_OK) cddp__notify(g, peer);
  return r;
}

static cddp__parcel *cddp__look_for_parcel(cddp_group *g, const cddp__pending *q) {
  cddp__seat *seat = cddp__seat_of(g, q->peer);
  uint32_t i, top = cddp__load32(&seat->parcel_top);
  cddp__parcel *best = NULL;
  for (i = 0; i < top && i < CDDP__PARCELS; i++) {
    cddp__parcel *p = &seat->parcels[i];
    if (cddp__load32(&p->state) != CDDP__POSTED_TO(g->rank) || p->tag != q->tag) continue;
    if (best == NULL || p->number < best->number) best = p;
  }
  return best;
}

/* The oldest parcel from q->peer to this rank with q's tag, or NULL. One look may come upon a
   parcel and have passed by the place of an older one, posted there behind its back just before.
   Whatever is older than a parcel that has been seen is there for the second look. */
static cddp__parcel *cddp__find_parcel(cddp_group *g, const cddp__pending *q) {
  if (cddp__look_for_parcel(g, q) == NULL) return NULL;
  return cddp__look_for_parcel(g, q);
}

static void cddp__finish_pending(cddp__pending *q, cddp_result r) {
  q->result = r;
  if (r != CDDP_OK) snprintf(q->text, sizeof q->text, "%s", cddp__error_text);
  q->done = true;
}

/* Copies the message of a matching parcel, or refuses it; leaves it alone if its sender has just
   withdrawn it. mail_lock held. */
static void cddp__take_parcel(cddp_group *g, cddp__pending *q, cddp__parcel *p) {
  void *from = NULL;
  cddp_result r;
  if (!cddp__swap32(&p->state, CDDP__POSTED_TO(g->rank), CDDP__TAKEN_BY(g->rank))) return;
  if (p->count != q->count || p->dtype != (uint32_t)q->dtype) {
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree: rank %d sent count %" PRIu64
               " %s with tag %d, rank %d receives count %zu %s",
               q->peer, p->count, cddp__dtype_names[p->dtype & 7], q->tag, g->rank, q->count,
               cddp__dtype_names[q->dtype]);
    cddp__finish_pending(q, cddp__break(g, CDDP_MISMATCH));
    cddp__store32(&p->state, CDDP__PARCEL_REFUSED);
  } else {
    CDDP__POINT("take");
    r = cddp__locate(g->host, &p->ref, &from);
    if (r == CDDP_OK && q->count > 0) memcpy(q->buf, from, q->count * cddp__dtype_size(q->dtype));
    cddp__finish_pending(q, r == CDDP_OK ? r : cddp__break(g, r));
    cddp__store32(&p->state, CDDP__PARCEL_DONE);
  }
  CDDP__POINT("taken");
  cddp__notify(g, q->peer);
}

/* Serves receives whose message has come, oldest first for each peer and tag. mail_lock held. */
static void cddp__serve_pending(cddp_group *g) {
  cddp__pending *q, *before;
  for (q = g->pending_first; q != NULL; q = q->next) {
    cddp__parcel *p;
    if (q->done) continue;
    for (before = g->pending_first; before != q; before = before->next)
      if (!before->done && before->peer == q->peer && before->tag == q->tag) break;
    if (before != q) continue;
    p = cddp__find_parcel(g, q);
    if (p != NULL) cddp__take_parcel(g, q, p);
  }
  if (g->hosts != NULL) g->hosts->ops->serve(g);
}

static void cddp__serve_idle(cddp_group *g) { /* cddp__idle_fn: for waits inside collectives */
  if (pthread_mutex_trylock(&g->mail_lock) != 0) return;
  if (g->pending_first != NULL || g->hosts != NULL) cddp__serve_pending(g);
  pthread_mutex_unlock(&g->mail_lock);
}

static void cddp__post_pending(cddp_group *g, cddp__pending *q) {
  q->next = NULL;
  pthread_mutex_lock(&g->mail_lock);
  if (g->pending_last != NULL)
    g->pending_last->next = q;
  else
    g->pending_first = q;
  g->pending_last = q;
  cddp__serve_pending(g);
  pthread_mutex_unlock(&g->mail_lock);
}

static void cddp__drop_pending(cddp_group *g, cddp__pending *q) { /* mail_lock held */
  cddp__pending **link = &g->pending_first, *last = NULL;
  while (*link != NULL) {
    if (*link == q)
      *link = q->next;
    else
      last = *link, link = &last->next;
  }
  g->pending_last = last;
}

/* One look at what a wait is for: a receive (q), a parcel (index >= 0), or room for one more (-1).
   Of room for a message to another host the next try tells.
 */
static bool cddp__mail_ready(cddp_group *g, const cddp__pending *q, int parcel, size_t bytes) {
  bool ready;
  pthread_mutex_lock(&g->mail_lock);
  cddp__serve_pending(g);
  if (q != NULL)
    ready = q->done;
  else if (parcel >= 0)
    ready = !cddp__parcel_open(g, parcel);
  else
    ready = cddp__free_parcel(g, bytes) >= 0;
  pthread_mutex_unlock(&g->mail_lock);
  return ready;
}

/* Breaks the group if the peer of a send or recv is gone. */
static cddp_result cddp__check_peer(cddp_group *g, int peer, const char *what, int tag) {
  char loss[320];
  if (peer == g->rank || !cddp__rank_gone(g, peer)) return CDDP_OK;
  cddp__describe_loss(g, peer, loss, sizeof loss);
  cddp__fail(CDDP_PEER_LOST, "%s; rank %d was in %s it, tag %d", loss, g->rank, what, tag);
  return cddp__break_lost(g, peer);
}

/* Waits for mail with a deadline and an eye on the peer. what: "recv(...) from", for messages. */
static cddp_result cddp__mail_wait(cddp_group *g, const cddp__pending *q, int parcel, size_t bytes,
                                   int peer, int tag) {
  cddp__seat *seat = cddp__seat_of(g, g->rank);
  const char *what = q != NULL ? "recv from" : "send to";
  double deadline = cddp__now() + g->timeout_s;
  char who[160];
  cddp_result r;
  uint32_t mail;
  int spins = 0;
  for (;;) {
    mail = cddp__load32(&seat->mail);
    if (cddp__mail_ready(g, q, parcel, bytes)) return CDDP_OK;
    if ((r = cddp__check_board(g)) != CDDP_OK) return r;
    if (spins++ < CDDP__YIELDS) {
      sched_yield();
      continue;
    }
    if (cddp__rank_gone(g, peer) && !cddp__mail_ready(g, q, parcel, bytes) &&
        (r = cddp__check_peer(g, peer, what, tag)) != CDDP_OK)
      return r;
    if (cddp__now() >= deadline) {
      cddp__name_rank(g, peer, who, sizeof who);
      cddp__fail(CDDP_TIMEOUT,
                 "timed out after %g s: %s %s, tag %d, on rank %d: the other side did not come",
                 g->timeout_s, what, who, tag, g->rank);
      return cddp__break(g, CDDP_TIMEOUT);
    }
    if (g->hosts != NULL) {
      g->hosts->ops->doze(g, peer);
      continue;
    }
    cddp__add32(&seat->waiting, 1);
    if (cddp__load32(&g->board->broken) == 0) cddp__futex_wait(&seat->mail, mail, CDDP__NAP_S);
    cddp__add32(&seat->waiting, (uint32_t)-1);
  }
}

/* Posts a send, waiting for room. *parcel >= 0: the buffer is in use until cddp__finish_send. */
static cddp_result cddp__start_send(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                                    int peer, int tag, int *parcel) {
  bool posted = false;
  cddp_result r;
  for (;;) {
    if ((r = cddp__check_group(g)) != CDDP_OK) return r;
    if ((r = cddp__check_peer(g, peer, "send to", tag)) != CDDP_OK) return r;
    if (CDDP__UNLIKELY(g->members[peer] < 0))
      r = g->hosts->ops->post(g, buf, count, dtype, peer, tag, &posted);
    else
      r = cddp__try_post(g, buf, count, dtype, peer, tag, &posted, parcel);
    if (r != CDDP_OK || posted) return r;
    r = cddp__mail_wait(g, NULL, -1, count * cddp__dtype_size(dtype), peer, tag);
    if (r != CDDP_OK) return r;
  }
}

/* After a failure: takes the parcel back, so that the buffer is the caller's again. A receiver that
   has begun to copy finishes first, unless it dies. */
static void cddp__withdraw(cddp_group *g, cddp__parcel *p, int peer) {
  double deadline = cddp__now() + 5;
  if (cddp__swap32(&p->state, CDDP__POSTED_TO(peer), CDDP__PARCEL_FREE)) return;
  while ((cddp__load32(&p->state) & 255) == CDDP__PARCEL_TAKEN && !cddp__rank_gone(g, peer) &&
         cddp__now() < deadline)
    cddp__sleep(1e-5);
}

static cddp_result cddp__finish_send(cddp_group *g, int parcel) {
  cddp__seat *seat = cddp__seat_of(g, g->rank);
  cddp__parcel *p;
  cddp_result r;
  if (parcel < 0) return CDDP_OK;
  p = &seat->parcels[parcel];
  r = cddp__mail_wait(g, NULL, parcel, 0, p->to, p->tag);
  if (r == CDDP_OK && cddp__load32(&p->state) == CDDP__PARCEL_REFUSED) r = cddp__check_board(g);
  if (r != CDDP_OK) cddp__withdraw(g, p, p->to);
  pthread_mutex_lock(&g->mail_lock);
  if (r == CDDP_OK) cddp__store32(&p->state, CDDP__PARCEL_FREE);
  pthread_mutex_unlock(&g->mail_lock);
  return r;
}

static cddp_result cddp__finish_recv(cddp_group *g, cddp__pending *q) {
  cddp_result r = cddp__mail_wait(g, q, -1, 0, q->peer, q->tag);
  pthread_mutex_lock(&g->mail_lock);
  cddp__drop_pending(g, q);
  pthread_mutex_unlock(&g->mail_lock);
  if (r != CDDP_OK) return r;
  return q->result == CDDP_OK ? CDDP_OK : cddp__fail(q->result, "%s", q->text);
}
/* >>hosts --------------------------------------------------------------------------------------
   Steps and collectives of groups whose ranks are on several hosts. Works as follows.

   STEPS. The board of such a group has lines for all its ranks on each of the hosts. The lowest
   rank of a host in the group leads it: in a step it waits for its host's ranks, sends their lines
   to the other leaders, gets theirs, and writes those into the remote ranks' places. So all ranks
   compare all lines, as on one host: disagreement, small all_reduce, splits and what a cddp_ddp
   agrees on need nothing else. Up to CDDP__DIRECT_HOSTS leaders exchange directly; more in
   log2(hosts) rounds, in each of which a leader passes on all it has. Directly, the ranks' shares
   of a short collective ride along, out of their slots and into those of the remote ranks: it is
   the one step of >>collectives then, and costs what a barrier costs. Of how many bytes, each
   leader knows from its own line; where another comes with more or fewer, the lines disagree too.
   A local step is one of the host's ranks alone.

   COLLECTIVES. What does not fit into lines or slots begins with one step. all_reduce, reduce and
   broadcast then move slices: each rank of a host (as many as the smallest host has) carries one,
   and deals with the ranks that carry it on the other hosts. A slice goes in pieces, each divided
   among the hosts: (A) every host sends each other one its sums for that one's part, straight out
   of its ranks' buffers; (B) the owner adds up what it got and sends the result to all. broadcast
   is the same with the root's bytes for sums. That moves the fewest bytes, in two hops; while one
   piece is reduced others are on their way. Short ones go to all at once, and all add up all. The
   others send straight from rank to rank, once to each host what the whole host needs. What ranks
   of the same host must see of each other's buffers, and cannot, passes through shared scratch.

   THE CANONICAL SUM over hosts: a host adds up those nodes of the canonical tree whose ranks are
   all its own (of hosts with consecutive ranks, aligned: one) and sends these, f16 and bf16 as f32
   once anything was added; the owner adds the rest of the tree. So the bits are those of one host.
   Ranks scattered over hosts have many such nodes and send more.

   MESSAGES (send, recv) to another host are written to their link at once as far as the system
   takes them; the rest is copied and goes out in later calls, of any group. Whatever comes is read
   into memory, unless nobody waits for it and 256 MiB have come already.

   FAILURE. Whoever breaks the group tells the ranks of the other hosts by a link of its own; every
   rank then says why on its collective links and ends them, which others see at once. How a rank
   died is known on its own host only: who finds its link ended gives the ranks there CDDP__CAUSE_S
   to tell. A rank that leaves a healthy group says, as hearsay, that one of its host has died or
   that another group of its own has failed of a loss: nobody's call fails of that, but one that
   fails of a loss then names the dead.

   WHAT IT COSTS, reckoned for 4,096 ranks on 512 hosts of 8, 25 us from host to host, 100 Gbit/s
   for each host; tests/bench/scale.md has the sums. Start-up: each leader puts 27 bytes a rank into
   the store and takes out 108 KiB, 55 MiB from the store's host together. A step: 9 rounds, 256 KiB
   to each leader, 0.8 ms, and 18 links of each leader. An all_reduce of n bytes: (A) and (B) each
   n * 511/512 out of every host, so 25 MiB take 4.2 ms of the wire and 8 ms of system calls. Links:
   511 for each rank that carries a slice. The board of a group takes 0.7 MiB of each host. */

#define CDDP__DIRECT_HOSTS 8 /* above, lines go by rounds */
#define CDDP__NEWS_S 0.1     /* for a failure's cause to arrive */
#define CDDP__CAUSE_S 0.5    /* the same where other ranks may have seen how one ended */
#define CDDP__LINE_BYTES 64  /* of a line on the wire */
#define CDDP__PIECE ((size_t)64 << 10) /* bytes of a part of a piece; of all parts at most: */
#define CDDP__PIECE_MOST ((size_t)2 << 20)
#define CDDP__WHOLE_MOST ((size_t)32 << 10) /* bytes of a slice, times hosts, that all add up */
#define CDDP__AHEAD 4 /* pieces on their way before the first comes back */
#define CDDP__SLOTS (CDDP__AHEAD + 1)
#define CDDP__SCRATCH ((size_t)2 << 20) /* bytes of a rank's share in shared scratch */
#define CDDP__LANDING ((size_t)1 << 20) /* and of what comes in for its host */
#define CDDP__HALF (CDDP__SCRATCH + CDDP__LANDING) /* there are two of each, used in turn */

static uint32_t cddp__fate_of(const cddp_group *g, int rank) {
  return cddp__load32(&g->hosts->fates[rank]);
}

/* --- waiting --- */

typedef struct cddp__patience {
  double deadline, look;
  int spins, nfds;
} cddp__patience;

static void cddp__patience_begin(const cddp_group *g, cddp__patience *w) {
  w->deadline = cddp__now() + g->timeout_s;
  w->look = 0;
  w->spins = w->nfds = 0;
}

static void cddp__watch_fd(cddp_group *g, cddp__patience *w, const cddp__link *l, bool out) {
  struct pollfd *p = &g->hosts->fds[w->nfds];
  if (l == NULL) return;
  if (w->nfds >= 2 * g->size) return;
  p->fd = l->fd;
  p->events = out || l->state == CDDP__LINK_CONNECTING ? POLLOUT : POLLIN;
  p->revents = 0;
  w->nfds++;
}

/* --- messages on their way out --- */

/* Sends letters as far as the system takes them. mail_lock held. */
static void cddp__mail_push(cddp_group *g, cddp__link *l) {
  cddp__hosts *x = g->hosts;
  if (!cddp__link_shake(x->net, l)) return;
  while (l->letters != NULL) {
    cddp__letter *letter = l->letters;
    if (cddp__link_io(l, letter + 1, letter->size, &l->sent, true) != 1) return;
    l->sent = 0;
    x->queued_bytes -= letter->size;
    l->letters = letter->next;
    if (l->letters == NULL) l->last_letter = NULL;
    cddp__free(&x->net->allocator, letter);
  }
}

/* Notes that a peer is gone, once, and why, if it said so. */
static void cddp__fate(cddp_group *g, int rank, const cddp__link *l) {
  cddp__hosts *x = g->hosts;
  if (l->told != CDDP_OK) cddp__note_cause(g, l->told, cddp__reason_text(l));
  if (cddp__fate_of(g, rank) != CDDP__FATE_ALIVE) return;
  x->fate_times[rank] = l->told != CDDP_OK ? 0 : cddp__now();
  x->fate_errors[rank] = l->error;
  cddp__store32(&x->fates[rank], CDDP__FATE_LOST);
}

static void cddp__mail_flush(cddp_group *g) { /* mail_lock held */
  cddp__hosts *x = g->hosts;
  int i;
  for (i = 0; i < x->mail_outs; i++) {
    cddp__link *l = x->mail_out[i];
    if (l->state == CDDP__LINK_UP && l->letters == NULL) continue;
    cddp__mail_push(g, l);
    if (l->state == CDDP__LINK_DEAD) cddp__fate(g, l->rank, l);
  }
}

/* A watch link carries nothing but a goodbye; it ends when its other side does. */
static void cddp__mail_watch(cddp_group *g, cddp__link *l) {
  if (l->state == CDDP__LINK_DEAD || !cddp__link_shake(g->hosts->net, l)) {
    if (l->state == CDDP__LINK_DEAD && l->mine) cddp__fate(g, l->rank, l);
    return;
  }
  if (l->parting || cddp__link_io(l, l->in_head, CDDP__LINK_HEAD, &l->got, false) == 1) {
    if (cddp__message_bye(l))
      (void)cddp__link_goodbye(g->hosts->net, l, NULL, 0);
    else
      cddp__link_end(l, EPROTO);
  }
  if (l->state == CDDP__LINK_DEAD && l->mine) cddp__fate(g, l->rank, l);
}

/* A link that ends when that rank does, for one who waits for a first word from it. */
static void cddp__mail_watch_peer(cddp_group *g, int peer) { /* mail_lock held */
  cddp__hosts *x = g->hosts;
  cddp__link *l;
  for (l = x->mail_in; l != NULL; l = l->next)
    if (l->rank == peer) return;
  for (l = x->watches; l != NULL; l = l->next)
    if (l->mine && l->rank == peer) return;
  l = cddp__link_call(x->net, g->world[peer], CDDP__LINK_WATCH, g->id);
  if (l == NULL) return; /* without it only the deadline tells */
  l->rank = peer;
  l->next = x->watches;
  x->watches = l;
}

/* Accepts connections, hears of failures elsewhere, sends what is left of all groups' messages. */
static void cddp__hosts_look(cddp_group *g) {
  cddp__net *n = g->hosts->net;
  cddp_group *other;
  cddp__net_look(n);
  if (pthread_mutex_trylock(&n->lock) != 0) return;
  for (other = n->groups; other != NULL; other = other->hosts->next) {
    if (pthread_mutex_trylock(&other->mail_lock) != 0) continue;
    if (other->hosts->queued_bytes > 0) cddp__mail_flush(other);
    pthread_mutex_unlock(&other->mail_lock);
  }
  pthread_mutex_unlock(&n->lock);
}

/* --- failure --- */

static void cddp__hosts_hang_up(cddp_group *g) { /* fail_lock held */
  unsigned char reason[CDDP__REASON_BYTES];
  int p;
  cddp__put_reason(reason, (uint32_t)g->fail_result, g->fail_text);
  for (p = 0; p < g->size; p++) {
    cddp__link *l = g->hosts->links[p];
    if (l == NULL) continue;
    if (l->quiet) cddp__link_part(l, reason);
    shutdown(l->fd, SHUT_WR);
  }
}

/* Who is to be told of a failure: the ranks of a group that are on other hosts; of large groups
   their leaders. */
typedef struct cddp__audience {
  const cddp__net *net;
  uint64_t group;
  int size;
  const int *world, *number; /* [size] as in cddp_group, cddp__hosts; NULL: of the job itself */
} cddp__audience;

/* Calls the next of them from *next on; returns how many connections. */
static int cddp__abort_call(const cddp__audience *a, int *next, cddp__link **links, int most) {
  int n = 0;
  for (; *next < a->size && n < most; ++*next) {
    int rank = a->world != NULL ? a->world[*next] : *next;
    const cddp__home *home = &a->net->homes[rank];
    if (home->host == a->net->host) continue;
    if (a->size > 64 && (a->number != NULL ? a->number[*next] : home->index) != 0) continue;
    links[n] = cddp__link_call(a->net, rank, CDDP__LINK_ABORT, a->group);
    if (links[n] != NULL) n++;
  }
  return n;
}

/* Tells them why the group is broken, or will be. Without a secret they need not be listening; with
   one, those that wait do. */
static void cddp__tell_all(const cddp__audience *a, uint32_t code, const char *text) {
  unsigned char body[CDDP__REASON_BYTES];
  cddp__link *links[32];
  char kept[CDDP__ERROR_MAX];
  double deadline = cddp__now() + 0.3;
  int next = 0, n, i, left;
  memcpy(kept, cddp__error_text, sizeof kept);
  cddp__put_reason(body, code, text);
  while ((n = cddp__abort_call(a, &next, links, 32)) > 0) {
    do {
      for (i = left = 0; i < n; i++) {
        if (cddp__link_shake(a->net, links[i]) &&
            cddp__link_io(links[i], body, sizeof body, &links[i]->sent, true) == 1)
          cddp__link_end(links[i], 0);
        left += links[i]->state != CDDP__LINK_DEAD;
      }
      if (left > 0) cddp__sleep(2e-4);
    } while (left > 0 && cddp__now() < deadline);
    for (i = 0; i < n; i++) cddp__link_free(a->net, links[i]);
  }
  memcpy(cddp__error_text, kept, sizeof kept);
}

static void cddp__hosts_tell(cddp_group *g, uint32_t code, const char *text) {
  cddp__audience a;
  a.net = g->hosts->net;
  a.group = g->id;
  a.size = g->size;
  a.world = g->world;
  a.number = g->hosts->number;
  cddp__tell_all(&a, code, text);
}

static void cddp__hosts_abort(cddp_group *g) {
  cddp__hosts_tell(g, cddp__load32(&g->board->broken) - 2, g->board->broken_text);
}

/* How long the cause of a link's end may take: one that said goodbye has said it, and a rank that
   was alone on its host has nobody who could. */
static double cddp__news_time(const cddp_group *g, int rank, int error) {
  const cddp__hosts *x = g->hosts;
  int host = x->host_of[rank];
  bool alone = x->first[host + 1] - x->first[host] == 1;
  return error == CDDP__LEFT || alone ? CDDP__NEWS_S : CDDP__CAUSE_S;
}

/* Gives the cause of a failure that this rank sees the effect of some time to arrive. */
static cddp_result cddp__hosts_news(cddp_group *g, double time) {
  double deadline = cddp__now() + time;
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && !cddp__has_cause(g) && cddp__now() < deadline) {
    cddp__hosts_look(g);
    if ((r = cddp__check_board(g)) == CDDP_OK) r = cddp__look_after_peers(g);
    if (r == CDDP_OK) cddp__sleep(5e-4);
  }
  return r;
}

/* A collective link has ended. */
static cddp_result cddp__hosts_lost(cddp_group *g, cddp__link *l) {
  char who[160], how[128], what[320];
  cddp_result r;
  if (l->error != EPROTO) cddp__link_hear_out(g->hosts->net, l);
  if (l->told != CDDP_OK) {
    cddp__fail(l->told, "%s", cddp__reason_text(l));
    return cddp__break_here(g, l->told, false); /* it has told the others too */
  }
  r = cddp__hosts_news(g, cddp__news_time(g, l->rank, l->error));
  if (r != CDDP_OK) return r;
  cddp__name_rank(g, l->rank, who, sizeof who);
  cddp__describe_link_end(l, how, sizeof how);
  cddp__describe_here(g, what, sizeof what);
  cddp__fail(CDDP_PEER_LOST, "%s %s; rank %d was waiting for it in %s", who, how, g->rank, what);
  return cddp__break_lost(g, l->rank);
}

/* Nothing has come from a rank until the deadline. */
static cddp_result cddp__hosts_late(cddp_group *g, int rank) {
  const cddp__hosts *x = g->hosts;
  int host = x->host_of[rank], others = x->first[host + 1] - x->first[host] - 1;
  char who[160], what[320], more[48] = "";
  cddp_result r = cddp__hosts_news(g, CDDP__NEWS_S);
  if (r != CDDP_OK) return r;
  cddp__name_rank(g, rank, who, sizeof who);
  cddp__describe_here(g, what, sizeof what);
  if (others > 1) snprintf(more, sizeof more, " or one of the %d other ranks there", others);
  if (others == 1) snprintf(more, sizeof more, " or the other rank there");
  cddp__fail(CDDP_TIMEOUT,
             "timed out after %g s: %s%s did not come to %s, or that host cannot be reached",
             g->timeout_s, who, more, what);
  return cddp__break(g, CDDP_TIMEOUT);
}

/* Takes over the collective links that others have made to this rank. One from a rank that this one
   calls is a goodbye: it left without ever having been called. */
static void cddp__hosts_claim(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp__link *l;
  int p;
  while ((l = cddp__net_claim(x->net, g->id, CDDP__LINK_COLLECTIVE, -1)) != NULL) {
    for (p = 0; p < g->size && g->world[p] != l->peer; p++) {}
    if (p < g->size && x->links[p] == NULL) {
      l->rank = p;
      pthread_mutex_lock(&g->fail_lock);
      x->links[p] = l;
      pthread_mutex_unlock(&g->fail_lock);
      continue;
    }
    if (p < g->size && x->links[p]->mine) {
      cddp__link_hear_out(x->net, l);
      if (l->told != CDDP_OK) cddp__note_cause(g, l->told, cddp__reason_text(l));
      cddp__link_end(x->links[p], CDDP__LEFT);
    }
    cddp__link_free(x->net, l);
  }
}

/* While waiting for a rank with whom there is no link that would end: looks whether it is gone. */
static cddp_result cddp__hosts_watch(cddp_group *g, int rank) {
  cddp__link *l;
  char loss[320], what[320];
  cddp_result r;
  pthread_mutex_lock(&g->mail_lock);
  cddp__mail_watch_peer(g, rank);
  for (l = g->hosts->watches; l != NULL; l = l->next) cddp__mail_watch(g, l);
  pthread_mutex_unlock(&g->mail_lock);
  if (cddp__fate_of(g, rank) == CDDP__FATE_ALIVE) return CDDP_OK;
  r = cddp__hosts_news(g, cddp__news_time(g, rank, g->hosts->fate_errors[rank]));
  if (r != CDDP_OK) return r;
  cddp__describe_loss(g, rank, loss, sizeof loss);
  cddp__describe_here(g, what, sizeof what);
  cddp__fail(CDDP_PEER_LOST, "%s; rank %d was waiting for it in %s", loss, g->rank, what);
  return cddp__break_lost(g, rank);
}

/* In the middle of a collective no rank of this host ends in good order, whether it has announced
   the step or not: each waits for the others before it is through. */
static cddp_result cddp__hosts_mates(cddp_group *g) {
  const cddp__hosts *x = g->hosts;
  char loss[320], what[320];
  int i;
  for (i = 0; i < g->locals; i++) {
    int p = x->ranks[x->first[x->mine] + i];
    if (p == g->rank || !cddp__rank_gone(g, p)) continue;
    cddp__describe_loss(g, p, loss, sizeof loss);
    cddp__describe_here(g, what, sizeof what);
    cddp__fail(CDDP_PEER_LOST, "%s; rank %d was in %s", loss, g->rank, what);
    return cddp__break_lost(g, p);
  }
  return CDDP_OK;
}

/* Nothing could be moved: polls, then sleeps until a watched descriptor is ready, for at most a few
   ms. late: a rank that is waited for, for the message. */
static cddp_result cddp__hosts_pause(cddp_group *g, cddp__patience *w, int late,
                                     cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  cddp_result r;
  double now;
  bool joining = false;
  int i;
  if (w->spins++ < (g->spin >= CDDP__SPIN ? 100 : 1)) {
    if (g->spin < CDDP__SPIN) sched_yield();
    return CDDP_OK;
  }
  if ((r = cddp__check_board(g)) != CDDP_OK) return r;
  if (idle != NULL) idle(g);
  now = cddp__now();
  cddp__store32(&cddp__seat_of(g, g->rank)->awaits_at, (uint32_t)(uint64_t)(now * 1000));
  cddp__store32(&cddp__seat_of(g, g->rank)->awaits, (uint32_t)late + 1);
  for (i = 0; i < g->size && !joining; i++)
    joining = x->links[i] != NULL && x->links[i]->state < CDDP__LINK_UP;
  joining = joining || w->nfds == 0;
  x->fds[w->nfds].fd = x->net->listener;
  x->fds[w->nfds].events = POLLIN;
  x->fds[w->nfds].revents = 0;
  poll(x->fds, (nfds_t)w->nfds + 1, joining ? 1 : 5);
  if (joining || x->fds[w->nfds].revents != 0) cddp__hosts_look(g);
  if (now >= w->look) {
    if ((r = cddp__look_after_peers(g)) != CDDP_OK) return r;
    if ((r = cddp__hosts_mates(g)) != CDDP_OK) return r;
    cddp__hosts_claim(g);
    if (w->look > 0 && x->links[late] == NULL && (r = cddp__hosts_watch(g, late)) != CDDP_OK)
      return r;
    w->look = now + CDDP__NAP_S;
  }
  return now >= w->deadline ? cddp__hosts_late(g, late) : CDDP_OK;
}

/* --- moving messages of collectives --- */

/* The collective link to a rank, made if need be; *link NULL: it is not up yet. */
static cddp_result cddp__hosts_link(cddp_group *g, int rank, cddp__link **link) {
  cddp__hosts *x = g->hosts;
  cddp__link *l = x->links[rank];
  *link = NULL;
  if (l == NULL) {
    if (g->world[g->rank] < g->world[rank]) {
      l = cddp__link_call(x->net, g->world[rank], CDDP__LINK_COLLECTIVE, g->id);
      if (l == NULL) return cddp__break(g, CDDP_SYSTEM);
      l->rank = rank;
      pthread_mutex_lock(&g->fail_lock);
      x->links[rank] = l;
      pthread_mutex_unlock(&g->fail_lock);
    } else {
      cddp__hosts_claim(g);
      if ((l = x->links[rank]) == NULL) return CDDP_OK;
    }
  }
  if (l->state < CDDP__LINK_UP) cddp__link_shake(x->net, l);
  if (l->state == CDDP__LINK_DEAD) return cddp__hosts_lost(g, l);
  if (l->state == CDDP__LINK_UP) *link = l;
  if (l->state == CDDP__LINK_UP && !l->quiet && l->sent == 0) {
    pthread_mutex_lock(&g->fail_lock);
    l->quiet = true;
    pthread_mutex_unlock(&g->fail_lock);
  }
  return CDDP_OK;
}

/* cddp__link_push; whoever breaks the group meanwhile says so before or behind the message, not in
   the middle. */
static int cddp__hosts_push(cddp_group *g, cddp__link *l, const void *data, size_t size) {
  int done;
  pthread_mutex_lock(&g->fail_lock);
  done = cddp__link_push(l, data, size);
  l->quiet = done > 0;
  pthread_mutex_unlock(&g->fail_lock);
  return done;
}

/* Goes on with the messages of one direction. *left: how many there still are, *late: whose. */
static cddp_result cddp__deliver_some(cddp_group *g, cddp__patience *w, cddp__item *items, int n,
                                      bool out, bool *moved, int *left, int *late) {
  cddp__hosts *x = g->hosts;
  cddp_result r;
  int i;
  x->pass++; /* of two messages on one link the second waits */
  for (i = 0; i < n; i++) {
    cddp__item *it = &items[i];
    cddp__link *l;
    size_t before;
    int done;
    if (it->size == 0) continue;
    ++*left;
    *late = it->rank;
    if ((r = cddp__hosts_link(g, it->rank, &l)) != CDDP_OK) return r;
    if (l == NULL) cddp__watch_fd(g, w, x->links[it->rank], true);
    if (l == NULL || l->pass == x->pass) continue;
    before = out ? l->sent : l->got;
    done = out ? cddp__hosts_push(g, l, it->data, it->size)
               : cddp__link_pull(x->net, l, it->data, it->size, it->least);
    if (done < 0) return cddp__hosts_lost(g, l);
    if (done == 0) {
      *moved = *moved || (out ? l->sent : l->got) != before; /* slow is not late */
      l->pass = x->pass;
      cddp__watch_fd(g, w, l, out);
      continue;
    }
    it->size = 0;
    --*left;
    *moved = true;
  }
  return CDDP_OK;
}

/* Sends x->outs and receives x->ins, those of one link in the order in which they stand. */
static cddp_result cddp__deliver(cddp_group *g, int outs, int ins, cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  cddp__patience w;
  cddp_result r = CDDP_OK;
  cddp__patience_begin(g, &w);
  for (;;) {
    bool moved = false;
    int left = 0, late = -1;
    w.nfds = 0;
    r = cddp__deliver_some(g, &w, x->outs, outs, true, &moved, &left, &late);
    if (r == CDDP_OK) r = cddp__deliver_some(g, &w, x->ins, ins, false, &moved, &left, &late);
    if (r != CDDP_OK || left == 0) break;
    if (moved)
      cddp__patience_begin(g, &w);
    else if ((r = cddp__hosts_pause(g, &w, late, idle)) != CDDP_OK)
      break;
  }
  cddp__store32(&cddp__seat_of(g, g->rank)->awaits, 0);
  return r;
}

static void cddp__item_set(cddp__item *it, int rank, const void *data, size_t size) {
  it->rank = rank;
  memcpy(&it->data, &data, sizeof it->data); /* what is sent is not written to */
  it->size = size;
  it->least = 0;
}

/* --- steps --- */

static int cddp__host_size(const cddp__hosts *x, int host) {
  return x->first[host + 1] - x->first[host];
}

/* The leader waits until its host's other ranks have announced the step. */
static cddp_result cddp__await_locals(cddp_group *g, cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  const int *ranks = x->ranks + x->first[x->mine];
  cddp_result r;
  int i;
  if (g->crowded)
    return cddp__wait_word(g, &g->board->arrivals, g->arrive_target + (uint32_t)g->locals - 1,
                           idle);
  for (i = 1; i < g->locals; i++) {
    cddp__line *line = cddp__line_of(g, ranks[i], g->step);
    if ((r = cddp__wait_word(g, &line->seq, g->step, idle)) != CDDP_OK) return r;
  }
  return CDDP_OK;
}

static void cddp__put_line(unsigned char *out, const cddp__line *line, uint32_t step) {
  cddp__put32(out, line->call);
  cddp__put32(out + 4, (uint32_t)line->root);
  cddp__put64(out + 8, line->count);
  cddp__put32(out + 16, line->extra);
  cddp__put32(out + 20, step);
  memcpy(out + 24, line->u.bytes, CDDP__INLINE);
}

/* Bytes of a rank's slot that ride with the lines of the step, as this rank sees it. */
static size_t cddp__ride_of(const cddp_group *g, int rank) {
  const cddp__line *line = cddp__line_of(g, g->rank, g->step);
  uint32_t kind = line->call & 255, dtype = line->call >> 8 & 255;
  bool pieces = kind == CDDP__KIND_SCATTER || kind == CDDP__KIND_REDUCE_SCATTER ||
                kind == CDDP__KIND_ALL_TO_ALL;
  size_t element;
  if (line->call >> 24 != CDDP__PHASE_STAGED || kind == CDDP__KIND_BARRIER ||
      kind >= CDDP__KIND_GROUP_NEW || dtype > CDDP_I64)
    return 0;
  element = cddp__dtype_size((cddp_dtype)dtype) * (pieces ? (size_t)g->size : 1);
  if (line->count > g->slot_size / element || line->count <= CDDP__INLINE / element) return 0;
  if ((kind == CDDP__KIND_BROADCAST || kind == CDDP__KIND_SCATTER) && rank != line->root) return 0;
  return element * (size_t)line->count;
}

/* Copies what rides with a host's lines between its place behind them and the ranks' slots. */
static size_t cddp__ride_copy(cddp_group *g, int host, unsigned char *at, bool out) {
  const cddp__hosts *x = g->hosts;
  size_t sum = 0;
  int i;
  for (i = x->first[host]; i < x->first[host + 1]; i++) {
    size_t bytes = cddp__ride_of(g, x->ranks[i]);
    void *slot = cddp__slot_of(g, x->ranks[i], g->step);
    if (bytes == 0) continue;
    memcpy(out ? at + sum : (unsigned char *)slot, out ? slot : at + sum, bytes);
    sum += bytes;
  }
  return sum;
}

/* Leaders exchange lines and what rides with them directly. */
static cddp_result cddp__exchange_directly(cddp_group *g, cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  size_t lines = (size_t)g->locals * CDDP__LINE_BYTES;
  size_t have = lines + cddp__ride_copy(g, x->mine, x->lines + lines, true), at = have;
  int i, k;
  for (i = 1; i < x->count; i++) {
    int host = (x->mine + i) % x->count, leader = x->ranks[x->first[host]];
    size_t least = (size_t)cddp__host_size(x, host) * CDDP__LINE_BYTES, bytes = least;
    for (k = x->first[host]; k < x->first[host + 1]; k++) bytes += cddp__ride_of(g, x->ranks[k]);
    cddp__item_set(&x->outs[i - 1], leader, x->lines, have);
    cddp__item_set(&x->ins[i - 1], leader, x->lines + at, bytes);
    x->ins[i - 1].least = least;
    x->lines_at[host] = at;
    at += bytes;
  }
  return cddp__deliver(g, x->count - 1, x->count - 1, idle);
}

/* The leaders' exchange, into x->lines: this host's lines first, then the next host's, ... */
static cddp_result cddp__exchange_lines(cddp_group *g, cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  size_t have = (size_t)g->locals * CDDP__LINE_BYTES;
  cddp_result r = CDDP_OK;
  int d, i, n;
  if (x->count <= CDDP__DIRECT_HOSTS) return cddp__exchange_directly(g, idle);
  for (d = 1; r == CDDP_OK && d < x->count; d *= 2) { /* has d hosts' lines, gets as many more */
    int to = (x->mine + x->count - d) % x->count, from = (x->mine + d) % x->count;
    size_t out = 0, in = 0;
    n = d < x->count - d ? d : x->count - d;
    for (i = 0; i < n; i++) {
      out += (size_t)cddp__host_size(x, (x->mine + i) % x->count) * CDDP__LINE_BYTES;
      in += (size_t)cddp__host_size(x, (from + i) % x->count) * CDDP__LINE_BYTES;
    }
    cddp__item_set(&x->outs[0], x->ranks[x->first[to]], x->lines, out);
    cddp__item_set(&x->ins[0], x->ranks[x->first[from]], x->lines + have, in);
    r = cddp__deliver(g, 1, 1, idle);
    have += in;
  }
  return r;
}

/* What came with the other hosts' lines goes into their ranks' slots. A message of another size
   than this host's is fine if the line in it is another too: all ranks will find that. */
static cddp_result cddp__mirror_rides(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  const cddp__line *mine = cddp__line_of(g, g->rank, g->step);
  int h;
  for (h = 0; h < x->count; h++) {
    unsigned char *in = x->lines + x->lines_at[h];
    int leader = x->ranks[x->first[h]];
    if (h == x->mine) continue;
    if (!x->links[leader]->odd) {
      cddp__ride_copy(g, h, in + (size_t)cddp__host_size(x, h) * CDDP__LINE_BYTES, false);
    } else if (cddp__get32(in) == mine->call && cddp__get64(in + 8) == mine->count &&
               cddp__get32(in + 4) == (uint32_t)mine->root) {
      cddp__fail(CDDP_NETWORK, "rank %d sent a message to rank %d that is not as long as was due",
                 leader, g->rank);
      return cddp__break(g, CDDP_NETWORK);
    }
  }
  return CDDP_OK;
}

/* Writes the other hosts' lines into their places; the lowest remote rank's last, for which ranks
   of this host wait first. */
static cddp_result cddp__mirror_lines(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp_result r = x->count <= CDDP__DIRECT_HOSTS ? cddp__mirror_rides(g) : CDDP_OK;
  int p;
  if (r != CDDP_OK) return r;
  for (p = g->size - 1; p >= 0; p--) {
    cddp__line *line = cddp__line_of(g, p, g->step);
    const unsigned char *in;
    int host = x->host_of[p];
    if (host == x->mine) continue;
    in = x->lines + x->lines_at[host] + (size_t)x->number[p] * CDDP__LINE_BYTES;
    if (cddp__get32(in + 20) != g->step) {
      cddp__fail(CDDP_NETWORK, "rank %d is at step %u of the group, rank %d at %u", p,
                 cddp__get32(in + 20), g->rank, g->step);
      return cddp__break(g, CDDP_NETWORK);
    }
    line->call = cddp__get32(in);
    line->root = (int32_t)cddp__get32(in + 4);
    line->count = cddp__get64(in + 8);
    line->extra = cddp__get32(in + 16);
    memcpy(line->u.bytes, in + 24, CDDP__INLINE);
    cddp__exchange32(&line->seq, g->step);
  }
  if (!g->crowded && cddp__load32(&g->board->sleepers) != 0)
    cddp__futex_wake(&cddp__line_of(g, x->lowest_remote, g->step)->seq);
  return CDDP_OK;
}

static cddp_result cddp__hosts_meet(cddp_group *g, cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  cddp_result r;
  int i;
  x->apart = false;
  if (x->me != 0) return CDDP_OK;
  cddp__hosts_look(g); /* the others may have given up and left their lines behind */
  if ((r = cddp__check_board(g)) != CDDP_OK) return r;
  if ((r = cddp__await_locals(g, idle)) != CDDP_OK) return r;
  for (i = 0; i < g->locals; i++)
    cddp__put_line(x->lines + (size_t)i * CDDP__LINE_BYTES,
                   cddp__line_of(g, x->ranks[x->first[x->mine] + i], g->step), g->step);
  if ((r = cddp__exchange_lines(g, idle)) != CDDP_OK) return r;
  return cddp__mirror_lines(g);
}

/* A step of this host's ranks alone, begun by the caller. The other hosts take it too, at their own
   time: the numbers stay the same everywhere. */
static cddp_result cddp__local_sync(cddp_group *g, const cddp__call *c, uint32_t phase,
                                    cddp__idle_fn idle) {
  cddp__hosts *x = g->hosts;
  cddp__line *mine = cddp__line_of(g, g->rank, g->step);
  const int *ranks = x->ranks + x->first[x->mine];
  cddp_result r;
  int i;
  mine->call = cddp__call_code(c, phase);
  mine->count = c->count;
  mine->root = c->root;
  mine->extra = 0;
  x->apart = true;
  cddp__exchange32(&mine->seq, g->step);
  if (g->crowded) {
    g->arrive_target += (uint32_t)g->locals;
    if (!cddp__arrive(g)) return cddp__wait_word(g, &g->board->release, g->step, idle);
    cddp__exchange32(&g->board->release, g->step);
    if (cddp__load32(&g->board->sleepers) != 0) cddp__futex_wake(&g->board->release);
    return CDDP_OK;
  }
  if (cddp__load32(&g->board->sleepers) != 0) cddp__futex_wake(&mine->seq);
  for (i = 0; i < g->locals; i++)
    if (i != x->me && (r = cddp__wait_word(g, &cddp__line_of(g, ranks[i], g->step)->seq, g->step,
                                           idle)) != CDDP_OK)
      return r;
  return CDDP_OK;
}

/* --- all_reduce, reduce, broadcast: one slice's way through the hosts --- */

/* Piece k of the slice [begin, end) is divided among the hosts into parts; host h owns the h-th. On
   each link the messages of both directions are A0 .. A3 (A4 B0) (A5 B1) .., less those that have
   no bytes or no purpose. */
typedef struct cddp__relay {
  cddp_group *g;
  const cddp__call *c;
  char *const *bufs;   /* [locals] element 0 of every local rank's buffer */
  size_t begin, end;   /* elements */
  size_t piece, most;  /* elements of a piece, of its largest part */
  long pieces;
  bool whole;          /* short: every part is the piece, all hosts add up all of it */
  bool reduces, raw;   /* not broadcast; this host's sums are its only rank's buffer itself */
  int root_host, root; /* -1 without one; the root's number if it is on this host, else -1 */
  cddp_dtype dtype;
  size_t esize, csize;
  size_t mine_bytes, all_bytes; /* an element's nodes: of this host, of all */
  char *out, *in, *sums, *result; /* in x->stage: CDDP__SLOTS of each, but one of sums */
  long prepared, reduced; /* pieces whose sums are ready; whose own part is done */
  int arrived[CDDP__SLOTS]; /* A messages of a piece */
} cddp__relay;

/* A message of the sequence. */
typedef struct cddp__leg {
  long k;
  bool back;         /* B, not A */
  size_t begin, n;   /* elements: absolute, count */
  size_t bytes;
} cddp__leg;

static void cddp__relay_part(const cddp__relay *y, long k, int host, size_t *begin, size_t *n) {
  size_t from = y->begin + (size_t)k * y->piece, to = cddp__min(from + y->piece, y->end), end;
  *begin = 0;
  end = to - from;
  if (!y->whole)
    cddp__slice(to - from, CDDP__CACHE_LINE / y->esize, y->g->hosts->count, host, begin, &end);
  *n = end - *begin;
  *begin += from;
}

/* Whether host `from` sends host `to` such messages at all. */
static bool cddp__relay_sends(const cddp__relay *y, int from, int to, bool back) {
  if (y->whole) return !back;
  if (y->c->kind == CDDP__KIND_BROADCAST) return back ? to != y->root_host : from == y->root_host;
  return !back || y->c->kind == CDDP__KIND_ALL_REDUCE || to == y->root_host;
}

/* The message at `at` of the sequence from one host to another; false: there is none. */
static bool cddp__relay_leg(const cddp__relay *y, int from, int to, long at, cddp__leg *m) {
  const cddp__hosts *x = y->g->hosts;
  m->back = (at & 1) != 0;
  m->k = at / 2 - (m->back ? CDDP__AHEAD : 0);
  if (m->k < 0 || m->k >= y->pieces || !cddp__relay_sends(y, from, to, m->back)) return false;
  cddp__relay_part(y, m->k, m->back ? from : to, &m->begin, &m->n);
  m->bytes = m->back || !y->reduces ? y->esize : x->node_bytes[from + 1] - x->node_bytes[from];
  m->bytes *= m->n;
  return m->n > 0;
}

static long cddp__relay_end(const cddp__relay *y) { return 2 * (y->pieces + CDDP__AHEAD); }

/* Skips what there is no message for. */
static bool cddp__relay_next(const cddp__relay *y, int from, int to, long *at, cddp__leg *m) {
  for (; *at < cddp__relay_end(y); ++*at)
    if (cddp__relay_leg(y, from, to, *at, m)) return true;
  return false;
}

static const void *cddp__relay_local(const cddp__relay *y, int number, size_t begin) {
  return y->bufs[number] + begin * y->esize;
}

/* The sum of one of this host's nodes, into dst. */
static void cddp__relay_sum(const cddp__relay *y, const cddp__node *node, char *dst, size_t begin,
                            size_t n) {
  cddp__hosts *x = y->g->hosts;
  int r;
  if (node->high - node->low == 1) {
    memcpy(dst, cddp__relay_local(y, x->number[node->low], begin), n * y->esize);
    return;
  }
  for (r = node->low; r < node->high; r++)
    x->pointers[r - node->low] = cddp__relay_local(y, x->number[r], begin);
  cddp__reduce_part(dst, x->pointers, node->high - node->low, n, y->dtype, (cddp_op)y->c->op);
}

/* Where this host's sums for another's part of piece k wait to be sent. */
static char *cddp__relay_out(const cddp__relay *y, long k, int host) {
  size_t part = y->most * y->mine_bytes, slot = y->whole ? part : part * (size_t)y->g->hosts->count;
  return y->out + (size_t)(k % CDDP__SLOTS) * slot + (y->whole ? 0 : (size_t)host) * part;
}

/* And where another host's sums for this one's part go. */
static char *cddp__relay_in(const cddp__relay *y, long k, int host) {
  return y->in +
         y->most * ((size_t)(k % CDDP__SLOTS) * y->all_bytes + y->g->hosts->node_bytes[host]);
}

static void cddp__relay_copies(const cddp__relay *y, size_t begin, size_t n, int from) {
  int t;
  for (t = 0; t < y->g->locals; t++)
    if (t != from)
      memcpy(y->bufs[t] + begin * y->esize, cddp__relay_local(y, from, begin), n * y->esize);
}

/* Makes the sums of the next piece that others are to get, if its place is free again. */
static bool cddp__relay_prepare(cddp__relay *y) {
  cddp__hosts *x = y->g->hosts;
  size_t begin, n;
  long k = y->prepared;
  int h, i;
  if (k == y->pieces) return false;
  if (!y->reduces) {
    begin = y->begin + (size_t)k * y->piece;
    if (y->root >= 0) cddp__relay_copies(y, begin, cddp__min(y->piece, y->end - begin), y->root);
  } else if (!y->raw) {
    for (h = 0; h < x->count; h++)
      if (h != x->mine && x->out_at[h] <= 2 * (k - CDDP__SLOTS)) return false;
    for (h = 0; h < x->count; h++) {
      if (h == x->mine || (y->whole && h != (x->mine == 0))) continue;
      cddp__relay_part(y, k, h, &begin, &n);
      for (i = 0; i < x->node_count; i++)
        if (x->nodes[i].host == x->mine)
          cddp__relay_sum(y, &x->nodes[i], cddp__relay_out(y, k, h) + n * x->node_at[i], begin, n);
    }
  }
  y->prepared++;
  return true;
}

/* Where the result of this host's part goes first. */
static char *cddp__relay_dst(const cddp__relay *y, long k, size_t begin) {
  const cddp__hosts *x = y->g->hosts;
  if (y->c->kind == CDDP__KIND_ALL_REDUCE) return y->bufs[x->me] + begin * y->esize;
  if (y->root >= 0) return y->bufs[y->root] + begin * y->esize;
  if (!y->reduces) return y->bufs[x->me] + begin * y->esize;
  return y->result + (size_t)(k % CDDP__SLOTS) * y->most * y->esize;
}

/* Adds up what has come for this host's part of piece k. */
static void cddp__relay_fold(cddp__relay *y, long k, size_t begin, size_t n) {
  cddp__hosts *x = y->g->hosts;
  char *sums = y->sums, *dst = cddp__relay_dst(y, k, begin);
  int i;
  for (i = 0; i < x->node_count; i++) { /* own sums first: they need x->pointers too */
    const cddp__node *node = &x->nodes[i];
    if (node->host != x->mine || node->high - node->low == 1) continue;
    cddp__relay_sum(y, node, sums, begin, n);
    sums += n * y->csize;
  }
  for (i = 0, sums = y->sums; i < x->node_count; i++) {
    const cddp__node *node = &x->nodes[i];
    bool single = node->high - node->low == 1;
    if (node->host != x->mine) {
      x->pointers[i] = cddp__relay_in(y, k, node->host) + n * x->node_at[i];
    } else if (single) {
      x->pointers[i] = cddp__relay_local(y, x->number[node->low], begin);
    } else {
      x->pointers[i] = sums;
      sums += n * y->csize;
    }
  }
  cddp__reduce_nodes(dst, x->pointers, x->widths, x->node_count, y->g->size, n, y->dtype,
                     (cddp_op)y->c->op);
  if (y->c->kind == CDDP__KIND_ALL_REDUCE) cddp__relay_copies(y, begin, n, x->me);
}

/* Finishes this host's part of the next piece, if all of it is there. */
static bool cddp__relay_reduce(cddp__relay *y) {
  cddp__hosts *x = y->g->hosts;
  long k = y->reduced;
  size_t begin, n;
  int h, due = 0;
  if (k == y->pieces || y->prepared <= k) return false;
  cddp__relay_part(y, k, x->mine, &begin, &n);
  for (h = 0; n > 0 && h < x->count; h++)
    due += h != x->mine && cddp__relay_sends(y, h, x->mine, false);
  if (y->arrived[k % CDDP__SLOTS] < due) return false;
  if (y->c->kind == CDDP__KIND_REDUCE && y->root < 0 && /* its place may be on its way still */
      x->out_at[y->root_host] <= 2 * (k - CDDP__SLOTS + CDDP__AHEAD) + 1)
    return false;
  if (y->whole) /* the piece itself is the result's place: all must have been sent */
    for (h = 0; h < x->count; h++)
      if (h != x->mine && x->out_at[h] <= 2 * k) return false;
  if (y->reduces && n > 0) cddp__relay_fold(y, k, begin, n);
  if (!y->reduces && n > 0 && y->root < 0) cddp__relay_copies(y, begin, n, x->me);
  y->arrived[k % CDDP__SLOTS] = 0;
  y->reduced++;
  return true;
}

/* Sends to host h as much as is ready. 1: something moved, 0: not, -1: its link has ended. */
static int cddp__relay_push(cddp__relay *y, cddp__patience *w, int h, cddp__link *l) {
  cddp__hosts *x = y->g->hosts;
  cddp__leg m;
  int moved = 0, done;
  while (cddp__relay_next(y, x->mine, h, &x->out_at[h], &m)) {
    const void *data;
    size_t before = l->sent;
    if (m.back ? m.k >= y->reduced : m.k >= y->prepared) break;
    if (m.back)
      data = cddp__relay_dst(y, m.k, m.begin);
    else if (y->reduces && !y->raw)
      data = cddp__relay_out(y, m.k, h);
    else
      data = cddp__relay_local(y, y->reduces ? x->me : y->root, m.begin);
    if ((done = cddp__hosts_push(y->g, l, data, m.bytes)) < 0) return -1;
    if (done == 0) {
      cddp__watch_fd(y->g, w, l, true);
      if (l->sent != before) moved = 1;
      break;
    }
    x->out_at[h]++;
    moved = 1;
  }
  return moved;
}

static int cddp__relay_pull(cddp__relay *y, cddp__patience *w, int h, cddp__link *l) {
  cddp__hosts *x = y->g->hosts;
  cddp__leg m;
  int moved = 0, done;
  while (cddp__relay_next(y, h, x->mine, &x->in_at[h], &m)) {
    char *to = cddp__relay_in(y, m.k, h);
    size_t before = l->got;
    if (!m.back && m.k >= y->reduced + CDDP__SLOTS) break;
    if (m.back || !y->reduces) to = y->bufs[y->root >= 0 ? y->root : x->me] + m.begin * y->esize;
    if ((done = cddp__link_pull(x->net, l, to, m.bytes, 0)) < 0) return -1;
    if (done == 0) {
      cddp__watch_fd(y->g, w, l, false);
      if (l->got != before) moved = 1;
      break;
    }
    if (!m.back) y->arrived[m.k % CDDP__SLOTS]++;
    if (m.back && y->c->kind != CDDP__KIND_REDUCE) cddp__relay_copies(y, m.begin, m.n, x->me);
    x->in_at[h]++;
    moved = 1;
  }
  return moved;
}

/* One round over all hosts. *late: a rank that there is still something to do with, -1: none. */
static cddp_result cddp__relay_round(cddp__relay *y, cddp__patience *w, bool *moved, int *late) {
  cddp__hosts *x = y->g->hosts;
  cddp_result r;
  cddp__leg m;
  int i;
  w->nfds = 0;
  for (i = 1; i < x->count; i++) {
    int h = (x->mine + i) % x->count, rank = x->ranks[x->first[h] + x->me], a, b;
    bool out = cddp__relay_next(y, x->mine, h, &x->out_at[h], &m);
    bool in = cddp__relay_next(y, h, x->mine, &x->in_at[h], &m);
    cddp__link *l;
    if (!out && !in) continue;
    if (*late < 0 || in) *late = rank;
    if ((r = cddp__hosts_link(y->g, rank, &l)) != CDDP_OK) return r;
    if (l == NULL) cddp__watch_fd(y->g, w, x->links[rank], true);
    if (l == NULL) continue;
    a = cddp__relay_push(y, w, h, l);
    b = a < 0 ? a : cddp__relay_pull(y, w, h, l);
    if (b < 0) return cddp__hosts_lost(y->g, l);
    *moved = *moved || a + b > 0;
  }
  while (cddp__relay_prepare(y)) {
    *moved = true;
    if (y->prepared > y->reduced + CDDP__AHEAD) break; /* rather send what is ready */
  }
  while (cddp__relay_reduce(y)) *moved = true;
  return CDDP_OK;
}

static cddp_result cddp__relay_run(cddp__relay *y) {
  cddp__hosts *x = y->g->hosts;
  cddp__patience w;
  cddp_result r;
  memset(x->out_at, 0, (size_t)x->count * sizeof *x->out_at);
  memset(x->in_at, 0, (size_t)x->count * sizeof *x->in_at);
  cddp__patience_begin(y->g, &w);
  for (;;) {
    bool moved = false;
    int late = -1;
    if ((r = cddp__relay_round(y, &w, &moved, &late)) != CDDP_OK) break;
    if (late < 0 && y->reduced == y->pieces && !moved) break;
    if (late < 0) late = x->lowest_remote;
    if (moved)
      cddp__patience_begin(y->g, &w);
    else if ((r = cddp__hosts_pause(y->g, &w, late, cddp__serve_idle)) != CDDP_OK)
      break;
  }
  cddp__store32(&cddp__seat_of(y->g, y->g->rank)->awaits, 0);
  return r;
}

/* Bytes an element of every host's nodes, and where each begins among its host's: those of several
   ranks first, as their elements may be wider. */
static void cddp__count_node_bytes(cddp__hosts *x, size_t esize, size_t csize) {
  int i, pass;
  memset(x->node_bytes, 0, ((size_t)x->count + 1) * sizeof *x->node_bytes);
  for (pass = 0; pass < 2; pass++)
    for (i = 0; i < x->node_count; i++) {
      size_t *sum = &x->node_bytes[x->nodes[i].host + 1];
      if ((x->widths[i] == 1) != pass) continue;
      x->node_at[i] = *sum;
      *sum += pass ? esize : csize;
    }
  for (i = 0; i < x->count; i++) x->node_bytes[i + 1] += x->node_bytes[i];
}

static cddp_result cddp__hosts_stage(cddp_group *g, size_t bytes) {
  cddp__hosts *x = g->hosts;
  if (x->stage_size >= bytes) return CDDP_OK;
  cddp__free(&x->net->allocator, x->stage);
  x->stage = (char *)cddp__malloc(&x->net->allocator, bytes);
  x->stage_size = x->stage != NULL ? bytes : 0;
  return x->stage != NULL ? CDDP_OK : cddp__break(g, CDDP_OUT_OF_MEMORY);
}

/* Sizes of pieces and stages. */
static cddp_result cddp__relay_plan(cddp__relay *y) {
  const cddp__hosts *x = y->g->hosts;
  size_t granule = CDDP__CACHE_LINE / y->esize, hosts = (size_t)x->count, out, in, sums, result;
  size_t part = cddp__min(CDDP__PIECE, CDDP__PIECE_MOST / hosts) * hosts / y->all_bytes;
  cddp_result r;
  part = cddp__round_up(cddp__max(part, 1), granule);
  y->piece = part * hosts;
  y->whole = y->c->kind == CDDP__KIND_ALL_REDUCE &&
             (y->end - y->begin) * y->all_bytes <= CDDP__WHOLE_MOST;
  if (y->whole) y->piece = y->end - y->begin;
  y->most = y->whole ? cddp__round_up(y->piece, granule) : part;
  y->pieces = (long)((y->end - y->begin + y->piece - 1) / cddp__max(y->piece, 1));
  y->raw = y->reduces && !y->whole && y->g->locals == 1;
  out = y->most * y->mine_bytes * (y->whole ? 1 : hosts);
  in = y->most * y->all_bytes;
  y->out = y->in = y->sums = y->result = NULL;
  if (!y->reduces) return CDDP_OK;
  out = cddp__round_up(y->raw ? 0 : out, CDDP__CACHE_LINE);
  in = cddp__round_up(in, CDDP__CACHE_LINE);
  sums = cddp__round_up(y->most * y->mine_bytes, CDDP__CACHE_LINE);
  result = cddp__round_up(y->most * y->esize, CDDP__CACHE_LINE);
  r = cddp__hosts_stage(y->g, CDDP__SLOTS * (out + in + result) + sums);
  if (r != CDDP_OK) return r;
  y->out = x->stage;
  y->in = y->out + CDDP__SLOTS * out;
  y->sums = y->in + CDDP__SLOTS * in;
  y->result = y->sums + sums;
  return CDDP_OK;
}

/* One call's elements [0, count) of bufs, the buffers of this host's ranks, all in memory that each
   of them sees. Its ranks have met before and meet afterwards. */
static cddp_result cddp__relay_call(cddp_group *g, const cddp__call *c, char *const *bufs,
                                    size_t count) {
  cddp__hosts *x = g->hosts;
  cddp__relay y;
  cddp_result r;
  if (x->me >= x->carriers) return CDDP_OK;
  memset(&y, 0, sizeof y);
  y.g = g;
  y.c = c;
  y.bufs = bufs;
  y.dtype = (cddp_dtype)c->dtype;
  y.esize = c->esize;
  y.csize = c->dtype == CDDP_F16 || c->dtype == CDDP_BF16 ? 4 : c->esize;
  y.reduces = c->kind != CDDP__KIND_BROADCAST;
  y.root_host = c->root >= 0 ? x->host_of[c->root] : -1;
  y.root = y.root_host == x->mine ? x->number[c->root] : -1;
  cddp__slice(count, CDDP__CACHE_LINE / y.esize, x->carriers, x->me, &y.begin, &y.end);
  if (y.begin == y.end) return CDDP_OK;
  cddp__count_node_bytes(x, y.esize, y.csize);
  y.mine_bytes = x->node_bytes[x->mine + 1] - x->node_bytes[x->mine];
  y.all_bytes = x->node_bytes[x->count];
  if ((r = cddp__relay_plan(&y)) != CDDP_OK) return r;
  return cddp__relay_run(&y);
}

/* --- the other collectives: rank to rank --- */

static void cddp__copy(void *to, const void *from, size_t n) {
  if (n > 0 && to != from) memcpy(to, from, n);
}

/* A call on its way through this room. Elements [begin, begin + n) of each share at a time. */
typedef struct cddp__tour {
  cddp_group *g;
  const cddp__call *c;
  size_t begin, n;
  int half; /* of the scratch */
  int outs, ins;
} cddp__tour;

/* How many shares of n elements a rank shows to its host's others. */
static size_t cddp__shown(const cddp_group *g, const cddp__call *c) {
  switch (c->kind) {
  case CDDP__KIND_REDUCE_SCATTER: return (size_t)g->size;
  case CDDP__KIND_SCATTER:
  case CDDP__KIND_ALL_TO_ALL: return (size_t)g->hosts->most;
  default: return 1;
  }
}

/* This host's local rank t's share for rank `to`, where this rank can see it: in t's buffer, or in
   its scratch. */
static const char *cddp__share_of(const cddp__tour *v, int t, int to) {
  const cddp__hosts *x = v->g->hosts;
  const cddp__call *c = v->c;
  bool many = cddp__shown(v->g, c) > 1;
  if (x->bufs[t] != NULL)
    return x->bufs[t] + ((c->kind == CDDP__KIND_GATHER || c->kind == CDDP__KIND_ALL_GATHER
                              ? 0
                              : (size_t)to * c->count) +
                         v->begin) *
                            c->esize;
  if (c->kind == CDDP__KIND_SCATTER || c->kind == CDDP__KIND_ALL_TO_ALL) to = x->number[to];
  return x->scratch[t] + (size_t)v->half * CDDP__HALF + (many ? (size_t)to * v->n * c->esize : 0);
}

static char *cddp__landing(const cddp__tour *v, int t) {
  return v->g->hosts->scratch[t] + (size_t)v->half * CDDP__HALF + CDDP__SCRATCH;
}

/* Copies this rank's shares into its scratch, if its buffer is not shared and others want them. */
static void cddp__show(const cddp__tour *v) {
  const cddp__hosts *x = v->g->hosts;
  const cddp__call *c = v->c;
  const char *send = c->send != NULL ? (const char *)c->send + v->begin * c->esize : NULL;
  const int *here = x->ranks + x->first[x->mine];
  char *to = x->scratch[x->me] + (size_t)v->half * CDDP__HALF;
  size_t bytes = v->n * c->esize;
  int r;
  if (x->bufs[x->me] != NULL) return;
  if (c->root >= 0 && x->host_of[c->root] != x->mine) return;
  switch (c->kind) {
  case CDDP__KIND_REDUCE_SCATTER:
    for (r = 0; r < v->g->size; r++)
      memcpy(to + (size_t)r * bytes, send + (size_t)r * c->count * c->esize, bytes);
    break;
  case CDDP__KIND_SCATTER:
    if (v->g->rank != c->root) break;
    /* fall through */
  case CDDP__KIND_ALL_TO_ALL:
    for (r = 0; r < v->g->locals; r++)
      memcpy(to + (size_t)r * bytes, send + (size_t)here[r] * c->count * c->esize, bytes);
    break;
  default:
    memcpy(to, send, bytes);
  }
}

static void cddp__add_out(cddp__tour *v, int rank, const void *data, size_t bytes) {
  cddp__item_set(&v->g->hosts->outs[v->outs++], rank, data, bytes);
}

static void cddp__add_in(cddp__tour *v, int rank, void *data, size_t bytes) {
  cddp__item_set(&v->g->hosts->ins[v->ins++], rank, data, bytes);
}

/* Which of `host`'s ranks deals with rank: they take turns. */
static int cddp__dealer(const cddp__hosts *x, int host, int rank) {
  return x->ranks[x->first[host] + x->number[rank] % cddp__host_size(x, host)];
}

/* all_gather: one rank of each other host gets this rank's share, for all of that host. */
static void cddp__tour_all_gather(cddp__tour *v) {
  const cddp__hosts *x = v->g->hosts;
  const cddp__call *c = v->c;
  size_t bytes = v->n * c->esize;
  char *landing = cddp__landing(v, x->me);
  int h, r;
  for (h = 0; h < x->count; h++)
    if (h != x->mine)
      cddp__add_out(v, cddp__dealer(x, h, v->g->rank), (const char *)c->send + v->begin * c->esize,
                    bytes);
  for (r = 0; r < v->g->size; r++) {
    if (x->host_of[r] == x->mine || cddp__dealer(x, x->mine, r) != v->g->rank) continue;
    cddp__add_in(v, r, landing, bytes);
    landing += bytes;
  }
}

/* gather, scatter, all_to_all: straight between the ranks' own buffers. */
static cddp_result cddp__tour_direct(cddp__tour *v) {
  const cddp__hosts *x = v->g->hosts;
  const cddp__call *c = v->c;
  bool all = c->kind == CDDP__KIND_ALL_TO_ALL, copied = all && c->send == c->recv;
  size_t bytes = v->n * c->esize, at = v->begin * c->esize, share = c->count * c->esize;
  const char *send = c->send != NULL ? (const char *)c->send + at : NULL;
  char *recv = c->recv != NULL ? (char *)c->recv + at : NULL;
  cddp_result r;
  int p;
  if (copied && (r = cddp__hosts_stage(v->g, bytes * (size_t)v->g->size)) != CDDP_OK) return r;
  for (p = 0; p < v->g->size; p++) {
    bool gives = all || (c->kind == CDDP__KIND_GATHER ? p == c->root : v->g->rank == c->root);
    bool gets = all || (c->kind == CDDP__KIND_GATHER ? v->g->rank == c->root : p == c->root);
    const char *from = c->kind == CDDP__KIND_GATHER || !gives ? send : send + (size_t)p * share;
    if (x->host_of[p] == x->mine) continue;
    if (copied) from = (const char *)memcpy(x->stage + (size_t)p * bytes, from, bytes);
    if (gives) cddp__add_out(v, p, from, bytes);
    if (gets)
      cddp__add_in(v, p, c->kind == CDDP__KIND_SCATTER ? recv : recv + (size_t)p * share, bytes);
  }
  return CDDP_OK;
}

/* The node's sum over its ranks' shares for rank `to`; a single rank's share itself. */
static const void *cddp__tour_sum(const cddp__tour *v, const cddp__node *node, int to,
                                  char *space) {
  cddp__hosts *x = v->g->hosts;
  int r;
  if (node->high - node->low == 1) return cddp__share_of(v, x->number[node->low], to);
  for (r = node->low; r < node->high; r++)
    x->pointers[r - node->low] = cddp__share_of(v, x->number[r], to);
  cddp__reduce_part(space, x->pointers, node->high - node->low, v->n, (cddp_dtype)v->c->dtype,
                    (cddp_op)v->c->op);
  return space;
}

/* reduce_scatter: this host's sums for each rank elsewhere that this rank deals with; and what the
   other hosts have for this one. */
static cddp_result cddp__tour_reduce_scatter(cddp__tour *v) {
  cddp__hosts *x = v->g->hosts;
  cddp_group *g = v->g;
  size_t own = x->node_bytes[x->mine + 1] - x->node_bytes[x->mine];
  size_t room = cddp__round_up(v->n, CDDP__CACHE_LINE), all = room * x->node_bytes[x->count];
  char *out;
  cddp_result r;
  int p, i, deals = 0;
  for (p = 0; p < g->size; p++)
    deals += x->host_of[p] != x->mine && cddp__dealer(x, x->mine, p) == g->rank;
  r = cddp__hosts_stage(g, all + room * own * (size_t)(deals + 1));
  if (r != CDDP_OK) return r;
  out = x->stage + all;
  for (p = 0; p < g->size; p++) {
    if (x->host_of[p] == x->mine || cddp__dealer(x, x->mine, p) != g->rank) continue;
    for (i = 0; i < x->node_count; i++) {
      char *to = out + v->n * x->node_at[i];
      const void *sum;
      if (x->nodes[i].host != x->mine) continue;
      sum = cddp__tour_sum(v, &x->nodes[i], p, to);
      if (sum != to) memcpy(to, sum, v->n * v->c->esize);
    }
    cddp__add_out(v, p, out, v->n * own);
    out += room * own;
  }
  for (i = 0; i < x->count; i++)
    if (i != x->mine)
      cddp__add_in(v, cddp__dealer(x, i, g->rank), x->stage + room * x->node_bytes[i],
                   v->n * (x->node_bytes[i + 1] - x->node_bytes[i]));
  return CDDP_OK;
}

/* Adds up this rank's share of a reduce_scatter. */
static void cddp__tour_fold(cddp__tour *v) {
  cddp__hosts *x = v->g->hosts;
  size_t room = cddp__round_up(v->n, CDDP__CACHE_LINE);
  char *own = x->stage + room * x->node_bytes[x->mine]; /* nobody has sent this host's */
  int i;
  for (i = 0; i < x->node_count; i++)
    if (x->nodes[i].host == x->mine)
      x->sums[i] = cddp__tour_sum(v, &x->nodes[i], v->g->rank, own + v->n * x->node_at[i]);
  for (i = 0; i < x->node_count; i++)
    if (x->nodes[i].host != x->mine)
      x->sums[i] = x->stage + room * x->node_bytes[x->nodes[i].host] + v->n * x->node_at[i];
  cddp__reduce_nodes((char *)v->c->recv + v->begin * v->c->esize, x->sums, x->widths, x->node_count,
                     v->g->size, v->n, (cddp_dtype)v->c->dtype, (cddp_op)v->c->op);
}

/* Takes what this host's other ranks have, or have received, for this one. */
static void cddp__tour_collect(cddp__tour *v) {
  cddp__hosts *x = v->g->hosts;
  const cddp__call *c = v->c;
  const int *here = x->ranks + x->first[x->mine];
  size_t bytes = v->n * c->esize, share = c->count * c->esize, *at = x->landed;
  char *recv = c->recv != NULL ? (char *)c->recv + v->begin * c->esize : NULL;
  int t, r;
  if (c->kind == CDDP__KIND_SCATTER) {
    if (x->host_of[c->root] == x->mine)
      cddp__copy(recv, cddp__share_of(v, x->number[c->root], v->g->rank), bytes);
    return;
  }
  if (c->kind == CDDP__KIND_GATHER && v->g->rank != c->root) return;
  for (t = 0; t < v->g->locals; t++) {
    const char *from = t == x->me && c->kind != CDDP__KIND_ALL_TO_ALL
                           ? (const char *)c->send + v->begin * c->esize
                           : cddp__share_of(v, t, v->g->rank);
    cddp__copy(recv + (size_t)here[t] * share, from, bytes);
  }
  if (c->kind != CDDP__KIND_ALL_GATHER) return;
  memset(at, 0, (size_t)v->g->locals * sizeof *at);
  for (r = 0; r < v->g->size; r++) {
    if (x->host_of[r] == x->mine) continue;
    t = x->number[cddp__dealer(x, x->mine, r)];
    memcpy(recv + (size_t)r * share, cddp__landing(v, t) + at[t], bytes);
    at[t] += bytes;
  }
}

static cddp_result cddp__local_step(cddp_group *g, const cddp__call *c) {
  cddp__begin(g);
  return cddp__local_sync(g, c, 5, cddp__serve_idle);
}

/* One piece of gather, scatter, all_gather, all_to_all or reduce_scatter. */
static cddp_result cddp__tour_piece(cddp__tour *v) {
  cddp_result r = CDDP_OK;
  v->outs = v->ins = 0;
  cddp__show(v);
  if (v->c->kind == CDDP__KIND_REDUCE_SCATTER) {
    if ((r = cddp__local_step(v->g, v->c)) != CDDP_OK) return r;
    r = cddp__tour_reduce_scatter(v);
  } else if (v->c->kind == CDDP__KIND_ALL_GATHER) {
    cddp__tour_all_gather(v);
  } else {
    r = cddp__tour_direct(v);
  }
  if (r == CDDP_OK) r = cddp__deliver(v->g, v->outs, v->ins, cddp__serve_idle);
  if (r != CDDP_OK) return r;
  if (v->c->kind == CDDP__KIND_REDUCE_SCATTER) {
    cddp__tour_fold(v);
    return CDDP_OK;
  }
  if ((r = cddp__local_step(v->g, v->c)) != CDDP_OK) return r;
  cddp__tour_collect(v);
  return CDDP_OK;
}

static cddp_result cddp__tour_run(cddp_group *g, const cddp__call *c) {
  size_t shown = cddp__shown(g, c), most = CDDP__SCRATCH / (shown * c->esize);
  size_t csize = c->dtype == CDDP_F16 || c->dtype == CDDP_BF16 ? 4 : c->esize;
  cddp__tour v;
  cddp_result r = CDDP_OK;
  memset(&v, 0, sizeof v);
  v.g = g;
  v.c = c;
  if (c->kind == CDDP__KIND_ALL_GATHER)
    most = cddp__min(most, CDDP__LANDING / ((size_t)g->size * c->esize));
  cddp__count_node_bytes(g->hosts, c->esize, csize);
  for (; r == CDDP_OK && v.begin < c->count; v.begin += v.n, v.half ^= 1) {
    v.n = cddp__min(most, c->count - v.begin);
    r = cddp__tour_piece(&v);
  }
  return r == CDDP_OK ? cddp__local_step(g, c) : r; /* nobody reads this rank's buffer any more */
}

/* --- a call --- */

/* Every rank of the host makes its scratch and tells the others where, once. */
static cddp_result cddp__hosts_scratch(cddp_group *g, const cddp__call *c) {
  cddp__hosts *x = g->hosts;
  const int *here = x->ranks + x->first[x->mine];
  cddp__line *line = cddp__begin(g);
  cddp_result r;
  void *at = NULL;
  int t;
  char *mine = (char *)cddp__arena_alloc(g->host, 2 * CDDP__HALF);
  memset(line->u.bytes, 0, CDDP__INLINE);
  if (mine != NULL) line->u.ref = cddp__ref_of(g->host, mine, 2 * CDDP__HALF);
  if ((r = cddp__local_sync(g, c, 6, cddp__serve_idle)) != CDDP_OK) {
    cddp__arena_free(g->host, mine);
    return r;
  }
  x->my_scratch = mine;
  for (t = 0; t < g->locals; t++) {
    const cddp__ref *ref = &cddp__line_of(g, here[t], g->step)->u.ref;
    if (ref->kind == CDDP__REF_NONE) {
      cddp__fail(CDDP_OUT_OF_MEMORY, "rank %d has no memory for pieces of messages", here[t]);
      return cddp__break(g, CDDP_OUT_OF_MEMORY);
    }
    if ((r = cddp__locate(g->host, ref, &at)) != CDDP_OK) return cddp__break(g, r);
    x->scratch[t] = (char *)at;
  }
  x->has_scratch = true;
  return CDDP_OK;
}

/* The buffer that a host's other ranks read, or write. */
static cddp__ref cddp__hosts_ref(cddp_group *g, const cddp__call *c) {
  bool pieces = c->kind == CDDP__KIND_SCATTER || c->kind == CDDP__KIND_REDUCE_SCATTER ||
                c->kind == CDDP__KIND_ALL_TO_ALL;
  cddp__ref none;
  memset(&none, 0, sizeof none);
  if (c->kind == CDDP__KIND_SCATTER && g->rank != c->root) return none;
  if (c->kind == CDDP__KIND_ALL_TO_ALL && c->send == c->recv) return none;
  return cddp__ref_of(g->host, c->send, c->count * c->esize * (pieces ? (size_t)g->size : 1));
}

/* Finds the buffers of this host's ranks from the refs of the current step: NULL where one is not
   shared. *direct: whether all ranks' are, on all hosts, as far as others need them. */
static cddp_result cddp__hosts_locate(cddp_group *g, const cddp__call *c, bool *direct) {
  cddp__hosts *x = g->hosts;
  cddp_result r;
  int p;
  *direct = true;
  for (p = 0; p < g->size; p++) {
    const cddp__ref *ref = &cddp__line_of(g, p, g->step)->u.ref;
    void *at = NULL;
    if (ref->kind == CDDP__REF_NONE && cddp__host_size(x, x->host_of[p]) > 1) *direct = false;
    if (x->host_of[p] != x->mine) continue;
    if (ref->kind != CDDP__REF_NONE && p != g->rank &&
        (r = cddp__locate(g->host, ref, &at)) != CDDP_OK)
      return cddp__break(g, r);
    if (p == g->rank && (g->locals == 1 || ref->kind != CDDP__REF_NONE))
      memcpy(&at, &c->send, sizeof at);
    x->bufs[x->number[p]] = (char *)at;
  }
  if (c->kind == CDDP__KIND_ALL_TO_ALL && c->send == c->recv) x->bufs[x->me] = NULL;
  return CDDP_OK;
}

/* all_reduce, reduce, broadcast of buffers some of which are not shared: those pass through
   scratch, piece by piece. */
static cddp_result cddp__relay_staged(cddp_group *g, const cddp__call *c) {
  cddp__hosts *x = g->hosts;
  size_t most = CDDP__SCRATCH / c->esize, begin, n, bytes;
  bool staged = x->bufs[x->me] == NULL, half = false;
  bool reads = c->kind != CDDP__KIND_BROADCAST || g->rank == c->root;
  bool writes = c->kind == CDDP__KIND_ALL_REDUCE ||
                (c->kind == CDDP__KIND_REDUCE) == (g->rank == c->root);
  cddp_result r;
  int t;
  for (begin = 0; begin < c->count; begin += n, half = !half) {
    char *piece = (char *)c->recv + begin * c->esize, *space;
    n = cddp__min(most, c->count - begin);
    bytes = n * c->esize;
    for (t = 0; t < g->locals; t++)
      x->pieces[t] = x->bufs[t] != NULL ? x->bufs[t] + begin * c->esize
                                        : x->scratch[t] + (half ? CDDP__HALF : 0);
    space = x->pieces[x->me];
    if (staged && reads) memcpy(space, piece, bytes);
    if ((r = cddp__local_step(g, c)) != CDDP_OK) return r;
    if ((r = cddp__relay_call(g, c, x->pieces, n)) != CDDP_OK) return r;
    if ((r = cddp__local_step(g, c)) != CDDP_OK) return r;
    if (staged && writes) memcpy(piece, space, bytes);
  }
  return CDDP_OK;
}

static cddp_result cddp__hosts_run(cddp_group *g, const cddp__call *c) {
  cddp__hosts *x = g->hosts;
  bool relayed = c->kind == CDDP__KIND_ALL_REDUCE || c->kind == CDDP__KIND_REDUCE ||
                 c->kind == CDDP__KIND_BROADCAST, direct = false;
  cddp__line *line = cddp__begin(g);
  cddp_result r;
  line->u.ref = cddp__hosts_ref(g, c);
  r = cddp__sync(g, cddp__call_code(c, 4), c->count, c->root, 0, cddp__serve_idle);
  if (r == CDDP_OK) r = cddp__enter(g);
  if (r == CDDP_OK) r = cddp__hosts_locate(g, c, &direct);
  if (r == CDDP_OK && relayed && direct) {
    r = cddp__relay_call(g, c, x->bufs, c->count);
    if (r == CDDP_OK) r = cddp__local_step(g, c);
  } else if (r == CDDP_OK) {
    if (!x->has_scratch) r = cddp__hosts_scratch(g, c);
    if (r == CDDP_OK) r = relayed ? cddp__relay_staged(g, c) : cddp__tour_run(g, c);
  }
  return cddp__exit(g, r);
}

/* --- send and recv --- */

#define CDDP__MAIL_MAGIC 0x4c4d4443u /* "CDML" */

static void cddp__mail_head(unsigned char head[CDDP__LINK_HEAD], int tag, cddp_dtype dtype,
                            size_t count, size_t bytes) {
  memset(head, 0, CDDP__LINK_HEAD);
  cddp__put32(head, CDDP__MAIL_MAGIC);
  cddp__put32(head + 4, (uint32_t)tag);
  cddp__put32(head + 8, (uint32_t)dtype);
  cddp__put64(head + 16, count);
  cddp__put64(head + 24, bytes);
}

/* The link for sends to a rank; NULL with the error set. mail_lock held. */
static cddp__link *cddp__mail_link(cddp_group *g, int peer) {
  cddp__hosts *x = g->hosts;
  cddp__link *l;
  int i;
  for (i = 0; i < x->mail_outs; i++)
    if (x->mail_out[i]->rank == peer) return x->mail_out[i];
  l = cddp__link_call(x->net, g->world[peer], CDDP__LINK_MAIL, g->id);
  if (l == NULL) return NULL;
  l->rank = peer;
  x->mail_out[x->mail_outs++] = l;
  return l;
}

/* Keeps what of the message the system did not take: from byte l->sent on, or all of it behind
   other letters, of whose first l->sent tells then. mail_lock held. */
static cddp_result cddp__mail_keep(cddp_group *g, cddp__link *l, const unsigned char *head,
                                   const void *buf, size_t bytes) {
  size_t sent = l->letters == NULL ? l->sent : 0, size = CDDP__LINK_HEAD + bytes - sent, skip = 0;
  cddp__letter *letter =
      (cddp__letter *)cddp__malloc(&g->hosts->net->allocator, sizeof *letter + size);
  char *to = (char *)(letter + 1);
  if (letter == NULL) return CDDP_OUT_OF_MEMORY;
  letter->next = NULL;
  letter->size = size;
  if (sent < CDDP__LINK_HEAD) {
    memcpy(to, head + sent, CDDP__LINK_HEAD - sent);
    to += CDDP__LINK_HEAD - sent;
  } else {
    skip = sent - CDDP__LINK_HEAD;
  }
  if (bytes > skip) memcpy(to, (const char *)buf + skip, bytes - skip);
  l->sent -= sent;
  if (l->last_letter != NULL)
    l->last_letter->next = letter;
  else
    l->letters = letter;
  l->last_letter = letter;
  g->hosts->queued_bytes += size;
  return CDDP_OK;
}

/* Waits until the link for sends to a rank has been connected, or cannot be; that is for the
   systems to do, not for the other rank. */
static cddp_result cddp__mail_connect(cddp_group *g, int peer) {
  double deadline = cddp__now() + g->timeout_s;
  char loss[320];
  cddp_result r;
  for (;;) {
    struct pollfd fd;
    cddp__link *l;
    int state = CDDP__LINK_DEAD;
    pthread_mutex_lock(&g->mail_lock);
    l = cddp__mail_link(g, peer);
    if (l != NULL) {
      cddp__mail_push(g, l);
      state = l->state;
      fd.fd = l->fd;
      if (state == CDDP__LINK_DEAD) cddp__fate(g, peer, l);
    }
    pthread_mutex_unlock(&g->mail_lock);
    if (l == NULL) return CDDP_SYSTEM;
    if (state == CDDP__LINK_SHAKING || state == CDDP__LINK_UP) return CDDP_OK;
    if (state == CDDP__LINK_DEAD) break;
    fd.events = POLLOUT;
    poll(&fd, 1, 5);
    if ((r = cddp__check_board(g)) != CDDP_OK) return r;
    if (cddp__now() >= deadline) break;
  }
  r = cddp__hosts_news(g, cddp__news_time(g, peer, g->hosts->fate_errors[peer]));
  if (r != CDDP_OK) return r;
  cddp__describe_loss(g, peer, loss, sizeof loss);
  cddp__fail(CDDP_PEER_LOST, "%s; rank %d was in send to it", loss, g->rank);
  return cddp__break_lost(g, peer);
}

/* Sends a message as far as the system takes it, and keeps the rest. *posted false: too much is
   kept already. */
static cddp_result cddp__hosts_post(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                                    int peer, int tag, bool *posted) {
  size_t bytes = count * cddp__dtype_size(dtype);
  unsigned char head[CDDP__LINK_HEAD];
  cddp_result r = CDDP_OK;
  cddp__link *l;
  void *p;
  memcpy(&p, &buf, sizeof p); /* what is sent is not written to */
  cddp__mail_head(head, tag, dtype, count, bytes);
  if ((r = cddp__mail_connect(g, peer)) != CDDP_OK) return r;
  pthread_mutex_lock(&g->mail_lock);
  *posted = g->hosts->queued_bytes == 0 || bytes + g->hosts->queued_bytes <= CDDP__STAGED_MAX;
  l = *posted ? cddp__mail_link(g, peer) : NULL;
  if (*posted && l == NULL) {
    r = CDDP_SYSTEM;
  } else if (*posted) {
    cddp__mail_push(g, l);
    if (l->state == CDDP__LINK_UP && l->letters == NULL &&
        cddp__link_io(l, head, CDDP__LINK_HEAD, &l->sent, true) == 1) {
      size_t sent = l->sent - CDDP__LINK_HEAD;
      (void)cddp__link_io(l, p, bytes, &sent, true);
      l->sent = sent + CDDP__LINK_HEAD;
    }
    if (l->state != CDDP__LINK_DEAD && l->letters == NULL && l->sent == CDDP__LINK_HEAD + bytes)
      l->sent = 0;
    else if (l->state != CDDP__LINK_DEAD)
      r = cddp__mail_keep(g, l, head, buf, bytes);
    if (l->state == CDDP__LINK_DEAD) cddp__fate(g, peer, l);
  }
  pthread_mutex_unlock(&g->mail_lock);
  return r;
}

/* Whether a message says the same of its size twice, so that neither can be too much. */
static bool cddp__mail_head_good(const unsigned char head[CDDP__LINK_HEAD], size_t bytes) {
  uint32_t dtype = cddp__get32(head + 8);
  uint64_t count = cddp__get64(head + 16);
  size_t esize = dtype <= CDDP_I64 ? cddp__dtype_size((cddp_dtype)dtype) : 0;
  return cddp__get32(head) == CDDP__MAIL_MAGIC && esize != 0 && bytes <= SIZE_MAX / 16 &&
         bytes % esize == 0 && bytes / esize == count;
}

/* Takes in what comes from a sender. mail_lock held. Returns whether a whole message came. */
static bool cddp__mail_pull(cddp_group *g, cddp__link *l) {
  cddp__hosts *x = g->hosts;
  cddp__letter *letter = l->letters;
  size_t bytes;
  if (l->parting || letter == NULL) {
    if (!l->parting && cddp__link_io(l, l->in_head, CDDP__LINK_HEAD, &l->got, false) != 1)
      return false;
    bytes = (size_t)cddp__get64(l->in_head + 24);
    if (cddp__message_bye(l)) {
      (void)cddp__link_goodbye(x->net, l, NULL, 0);
      return false;
    }
    if (!cddp__mail_head_good(l->in_head, bytes)) {
      cddp__link_end(l, EPROTO);
      return false;
    }
    letter = (cddp__letter *)cddp__malloc(&x->net->allocator, sizeof *letter + bytes);
    if (letter == NULL) {
      cddp__link_end(l, ENOMEM);
      return false;
    }
    letter->next = NULL;
    letter->from = l->rank;
    letter->tag = (int)cddp__get32(l->in_head + 4);
    letter->dtype = cddp__get32(l->in_head + 8);
    letter->count = cddp__get64(l->in_head + 16);
    letter->size = bytes;
    l->letters = letter;
    l->got = 0;
  }
  if (cddp__link_io(l, letter + 1, letter->size, &l->got, false) != 1) return false;
  l->got = 0;
  l->letters = NULL;
  x->letter_bytes += letter->size;
  if (x->last_letter != NULL)
    x->last_letter->next = letter;
  else
    x->letters = letter;
  x->last_letter = letter;
  return true;
}

/* Whether a recv from that rank waits that no letter fits yet. mail_lock held. */
static bool cddp__mail_wanted(const cddp_group *g, int rank) {
  const cddp__pending *q;
  for (q = g->pending_first; q != NULL; q = q->next)
    if (!q->done && q->peer == rank) return true;
  return false;
}

/* Gives the oldest letter that fits to a recv. mail_lock held. */
static void cddp__mail_match(cddp_group *g, cddp__pending *q) {
  cddp__hosts *x = g->hosts;
  cddp__letter **at = &x->letters, *letter, *before = NULL;
  while (*at != NULL && ((*at)->from != q->peer || (*at)->tag != q->tag)) {
    before = *at;
    at = &(*at)->next;
  }
  if ((letter = *at) == NULL) return;
  if (letter->count != q->count || letter->dtype != (uint32_t)q->dtype ||
      letter->size != q->count * cddp__dtype_size(q->dtype)) {
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree: rank %d sent count %" PRIu64
               " %s with tag %d, rank %d receives count %zu %s",
               q->peer, letter->count, cddp__dtype_names[letter->dtype & 7], q->tag, g->rank,
               q->count, cddp__dtype_names[q->dtype]);
    cddp__finish_pending(q, cddp__break(g, CDDP_MISMATCH));
  } else {
    if (letter->size > 0) memcpy(q->buf, letter + 1, letter->size);
    cddp__finish_pending(q, CDDP_OK);
  }
  x->letter_bytes -= letter->size;
  *at = letter->next;
  if (x->last_letter == letter) x->last_letter = before;
  cddp__free(&x->net->allocator, letter);
}

/* Takes over links that others have made to send to this rank, or to watch it. mail_lock held. */
static void cddp__mail_welcome(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp__link *l;
  int p, purpose;
  for (purpose = CDDP__LINK_MAIL; purpose <= CDDP__LINK_WATCH; purpose++)
    while ((l = cddp__net_claim(x->net, g->id, purpose, -1)) != NULL) {
      for (p = 0; p < g->size && g->world[p] != l->peer; p++) {}
      if (p == g->size || x->host_of[p] == x->mine) {
        cddp__link_free(x->net, l);
        continue;
      }
      l->rank = p;
      l->next = purpose == CDDP__LINK_MAIL ? x->mail_in : x->watches;
      *(purpose == CDDP__LINK_MAIL ? &x->mail_in : &x->watches) = l;
    }
}

/* Sends and receives messages, and gives them to those that wait. mail_lock held. */
static void cddp__hosts_serve(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp__pending *q, *before;
  cddp__link *l;
  cddp__net_look(x->net);
  cddp__mail_flush(g);
  cddp__mail_welcome(g);
  for (l = x->mail_in; l != NULL; l = l->next) {
    while (l->state == CDDP__LINK_UP &&
           (x->letter_bytes <= CDDP__STAGED_MAX || cddp__mail_wanted(g, l->rank)))
      if (!cddp__mail_pull(g, l)) break;
    if (l->state == CDDP__LINK_DEAD) cddp__fate(g, l->rank, l);
  }
  for (l = x->watches; l != NULL; l = l->next) cddp__mail_watch(g, l);
  for (q = g->pending_first; q != NULL && x->letters != NULL; q = q->next) {
    if (q->done || g->members[q->peer] >= 0) continue;
    for (before = g->pending_first; before != q; before = before->next)
      if (!before->done && before->peer == q->peer && before->tag == q->tag) break;
    if (before == q) cddp__mail_match(g, q);
  }
}

/* The first to see, in a healthy group, that a rank of its host has died tells the other hosts,
   which cannot see it; here nobody may have to wait for that rank. One that ended well may do so,
   unless this rank leaves with it. */
static void cddp__hosts_mourn(cddp_group *g, bool leaving) {
  const cddp__hosts *x = g->hosts;
  char who[160], how[96], text[CDDP__ERROR_MAX];
  int i;
  if (cddp__load32(&g->board->broken) != 0 || cddp__load32(&g->board->cause) != 0) return;
  for (i = 0; i < g->locals; i++) {
    int p = x->ranks[x->first[x->mine] + i];
    if (p == g->rank || cddp__load32(&cddp__seat_of(g, p)->state) == CDDP__SEAT_LEFT) continue;
    if (!cddp__rank_gone(g, p)) continue;
    cddp__describe_end(g, p, how, sizeof how);
    if (!leaving && strcmp(how, "exited with code 0") == 0) continue;
    cddp__name_rank(g, p, who, sizeof who);
    snprintf(text, sizeof text, "%s %s; rank %d %s", who, how, g->rank,
             leaving ? "left the group after that" : "saw it end");
    if (cddp__note_cause(g, CDDP_PEER_LOST, text))
      cddp__hosts_tell(g, CDDP__HEARSAY | (uint32_t)CDDP_PEER_LOST, text);
    return;
  }
}

/* Sleeps until there may be news for one who waits for peer: a few ms at most. */
static void cddp__hosts_doze(cddp_group *g, int peer) {
  cddp__hosts *x = g->hosts;
  struct pollfd fds[4];
  cddp__link *l;
  int n = 1, i;
  fds[0].fd = x->net->listener;
  fds[0].events = POLLIN;
  pthread_mutex_lock(&g->mail_lock);
  if (x->host_of[peer] != x->mine) cddp__mail_watch_peer(g, peer);
  for (l = x->mail_in; l != NULL && n < 2; l = l->next)
    if (l->rank == peer && l->state == CDDP__LINK_UP) fds[n].fd = l->fd, fds[n++].events = POLLIN;
  for (i = 0; i < x->mail_outs && n < 4; i++) {
    l = x->mail_out[i];
    if (l->state == CDDP__LINK_UP && l->letters == NULL) continue;
    if (l->state == CDDP__LINK_DEAD) continue;
    fds[n].fd = l->fd;
    fds[n++].events = l->state == CDDP__LINK_SHAKING ? POLLIN : POLLOUT;
  }
  pthread_mutex_unlock(&g->mail_lock);
  poll(fds, (nfds_t)n, x->host_of[peer] == x->mine ? 1 : 5);
  cddp__hosts_look(g);
  cddp__hosts_mourn(g, false);
}

/* Whether a rank of another host is gone; the cause, if another one, is here or has had time to
   arrive. */
static bool cddp__hosts_gone(const cddp_group *g, int rank, char *how, size_t n) {
  const cddp__hosts *x = g->hosts;
  cddp__link end;
  double grace;
  if (cddp__fate_of(g, rank) == CDDP__FATE_ALIVE) return false;
  memset(&end, 0, sizeof end);
  end.error = x->fate_errors[rank];
  if (how != NULL) cddp__describe_link_end(&end, how, n);
  grace = end.error == CDDP__LEFT ? CDDP__NEWS_S / 5 : cddp__news_time(g, rank, end.error);
  return cddp__has_cause(g) || cddp__now() >= x->fate_times[rank] + grace;
}

/* --- a group's life --- */

static const cddp__hosts_ops cddp__hosts_functions = {
    cddp__hosts_meet, cddp__hosts_look, cddp__hosts_abort, cddp__hosts_hang_up,
    cddp__hosts_gone, cddp__hosts_post, cddp__hosts_serve, cddp__hosts_doze};

/* The nodes of the canonical tree over ranks [low, high) that lie on one host. */
static void cddp__find_nodes(cddp__hosts *x, int low, int high) {
  int r, half = 1;
  for (r = low; r < high && x->host_of[r] == x->host_of[low]; r++) {}
  if (r == high) {
    cddp__node *node = &x->nodes[x->node_count];
    node->low = low;
    node->high = high;
    node->host = x->host_of[low];
    x->widths[x->node_count++] = high - low;
    return;
  }
  while (2 * half < high - low) half *= 2;
  cddp__find_nodes(x, low, low + half);
  cddp__find_nodes(x, low + half, high);
}

/* Numbers the hosts by their lowest ranks; lists the ranks of each. index[hosts of the job]: 0. */
static void cddp__sort_hosts(const cddp_group *g, cddp__hosts *x, const int *jobs_hosts,
                             int *index) {
  int p, h, n = 0;
  for (p = 0; p < g->size; p++) {
    if (index[jobs_hosts[p]] == 0) index[jobs_hosts[p]] = ++x->count;
    x->host_of[p] = index[jobs_hosts[p]] - 1;
    x->number[p] = x->first[x->host_of[p] + 1]++;
  }
  x->most = 0;
  x->carriers = g->size;
  for (h = 0; h < x->count; h++) {
    x->most = x->first[h + 1] > x->most ? x->first[h + 1] : x->most;
    x->carriers = x->first[h + 1] < x->carriers ? x->first[h + 1] : x->carriers;
    x->first[h + 1] += x->first[h];
  }
  for (p = 0; p < g->size; p++) x->ranks[x->first[x->host_of[p]] + x->number[p]] = p;
  x->mine = x->host_of[g->rank];
  x->me = x->number[g->rank];
  for (p = 0; p < g->size && x->host_of[p] == x->mine; p++) {}
  x->lowest_remote = p;
  for (h = 0; h < x->count; h++) {
    x->lines_at[(x->mine + h) % x->count] = (size_t)n * CDDP__LINE_BYTES;
    n += cddp__host_size(x, (x->mine + h) % x->count);
  }
}

/* All arrays of the struct in one piece of memory. */
static cddp__hosts *cddp__hosts_new(const cddp_group *g) {
  size_t n = (size_t)g->size, bytes = 0;
  cddp__hosts *x = NULL;
  char *memory = NULL;
  int pass;
#define CDDP__TAKE(field, type, count)                                                 \
  do {                                                                                 \
    if (pass == 1) x->field = (type *)(void *)(memory + bytes);                        \
    bytes += cddp__round_up((count) * sizeof(type), 16);                               \
  } while (0)
  for (pass = 0; pass < 2; pass++) {
    if (pass == 1 && (memory = (char *)cddp__calloc(&g->host->allocator, 1, bytes)) == NULL)
      return NULL;
    if (pass == 1) x = (cddp__hosts *)(void *)memory;
    bytes = cddp__round_up(sizeof *x, 16);
    CDDP__TAKE(host_of, int, n);
    CDDP__TAKE(number, int, n);
    CDDP__TAKE(ranks, int, n);
    CDDP__TAKE(first, int, n + 1);
    CDDP__TAKE(nodes, cddp__node, n);
    CDDP__TAKE(widths, int, n);
    CDDP__TAKE(links, cddp__link *, n);
    CDDP__TAKE(outs, cddp__item, n);
    CDDP__TAKE(ins, cddp__item, n);
    CDDP__TAKE(out_at, long, n);
    CDDP__TAKE(in_at, long, n);
    CDDP__TAKE(node_bytes, size_t, n + 1);
    CDDP__TAKE(node_at, size_t, n);
    CDDP__TAKE(pointers, const void *, n);
    CDDP__TAKE(sums, const void *, n);
    CDDP__TAKE(fds, struct pollfd, 2 * n + 2);
    CDDP__TAKE(lines, unsigned char, n * CDDP__LINE_BYTES + CDDP__RIDE);
    CDDP__TAKE(lines_at, size_t, n);
    CDDP__TAKE(scratch, char *, n);
    CDDP__TAKE(bufs, char *, n);
    CDDP__TAKE(pieces, char *, n);
    CDDP__TAKE(landed, size_t, n);
    CDDP__TAKE(mail_out, cddp__link *, n);
    CDDP__TAKE(fates, cddp__atomic_u32, n);
    CDDP__TAKE(fate_times, double, n);
    CDDP__TAKE(fate_errors, int, n);
  }
#undef CDDP__TAKE
  return x;
}

/* The leader of a host above (i = 0) or below this one in the group's tree; -1: there is none. */
static int cddp__neighbour(const cddp__hosts *x, int i) {
  int host = i == 0 ? (x->mine - 1) / 2 : 2 * x->mine + i;
  if (host >= x->count || (i == 0 && x->mine == 0)) return -1;
  return x->ranks[x->first[host]];
}

/* Tells a new group of a job of several hosts which ranks of the job its ranks are (NULL: the
   same), and prepares it to span hosts, if it does. */
static cddp_result cddp__hosts_attach(cddp_group *g, const int *world) {
  cddp__net *net = g->host->net;
  cddp__hosts *x;
  int *hosts, p, i;
  if (net == NULL) return CDDP_OK;
  g->world = (int *)cddp__calloc(&g->host->allocator,
                                 2 * (size_t)g->size + (size_t)net->host_count, sizeof *g->world);
  if (g->world == NULL) return CDDP_OUT_OF_MEMORY;
  hosts = g->world + g->size;
  for (p = 0; p < g->size; p++) {
    g->world[p] = world != NULL ? world[p] : p;
    hosts[p] = net->homes[g->world[p]].host;
  }
  if (g->locals == g->size) return CDDP_OK;
  if ((x = cddp__hosts_new(g)) == NULL) return CDDP_OUT_OF_MEMORY;
  x->ops = &cddp__hosts_functions;
  x->net = net;
  x->locals = g->locals;
  cddp__sort_hosts(g, x, hosts, hosts + g->size);
  cddp__find_nodes(x, 0, g->size);
  for (i = 0; i < CDDP__NEIGHBOURS; i++)
    if ((p = cddp__neighbour(x, i)) >= 0) g->places[p] = g->locals + 1 + i;
  if (x->count <= CDDP__DIRECT_HOSTS)
    g->slot_size = CDDP__RIDE / (size_t)g->size / CDDP__CACHE_LINE * CDDP__CACHE_LINE;
  g->hosts = x;
  return CDDP_OK;
}

/* From now on, and only once it has its number, failures of the group elsewhere are heard. */
static void cddp__hosts_register(cddp_group *g) {
  cddp__net *net = g->host->net;
  if (g->hosts == NULL) return;
  pthread_mutex_lock(&net->lock);
  g->hosts->next = net->groups;
  net->groups = g;
  pthread_mutex_unlock(&net->lock);
}

/* Messages that were sent but are still here get a moment to leave. */
static void cddp__mail_linger(cddp_group *g) {
  double deadline = cddp__now() + 1;
  size_t left = SIZE_MAX, before;
  do {
    before = left;
    pthread_mutex_lock(&g->mail_lock);
    if (g->hosts->queued_bytes > 0) cddp__mail_flush(g);
    left = g->hosts->queued_bytes;
    pthread_mutex_unlock(&g->mail_lock);
    if (left < before) deadline = cddp__now() + 1;
    if (left > 0) cddp__sleep(2e-4);
  } while (left > 0 && cddp__load32(&g->board->broken) == 0 && cddp__now() < deadline);
}

/* A leader that leaves says so to those it would meet in a step, if they have no link yet. With a
   secret they would have to answer, and are left to their deadline. */
static void cddp__say_goodbye(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  double deadline = cddp__now() + 0.1;
  int d, side, i;
  if (x->me != 0 || x->net->secret != NULL || cddp__load32(&g->board->broken) != 0) return;
  for (d = 1; d < x->count; d = x->count <= CDDP__DIRECT_HOSTS ? d + 1 : 2 * d)
    for (side = 0; side < 2; side++) {
      int host = (x->mine + (side ? x->count - d : d)) % x->count, rank = x->ranks[x->first[host]];
      if (x->links[rank] != NULL) continue;
      x->links[rank] = cddp__link_call(x->net, g->world[rank], CDDP__LINK_COLLECTIVE, g->id);
    }
  for (i = 0; i < g->size; i++)
    while (x->links[i] != NULL && x->links[i]->state < CDDP__LINK_UP && x->links[i]->mine &&
           !cddp__link_shake(x->net, x->links[i]) && x->links[i]->state != CDDP__LINK_DEAD &&
           cddp__now() < deadline)
      cddp__sleep(1e-4);
}

/* What the others are told by a rank that leaves a healthy group because another one has failed. */
static void cddp__hosts_excuse(cddp_group *g) {
  const cddp__net *n = g->hosts->net;
  char text[CDDP__ERROR_MAX];
  if (cddp__load32(&g->board->broken) != 0 || cddp__load32(&n->loss) != 2) return;
  snprintf(text, sizeof text, "rank %d left the group after a failure in another one: %.*s",
           g->rank, CDDP__ERROR_MAX - 80, n->loss_text);
  if (cddp__note_cause(g, CDDP_PEER_LOST, text))
    cddp__hosts_tell(g, CDDP__HEARSAY | (uint32_t)CDDP_PEER_LOST, text);
}

/* Why this rank leaves, for its goodbyes: NULL without a reason. */
static const unsigned char *cddp__hosts_reason(const cddp_group *g,
                                               unsigned char body[CDDP__REASON_BYTES]) {
  uint32_t broken = cddp__load32(&g->board->broken);
  if (broken >= 2 && (broken & CDDP__BREAKING) == 0)
    cddp__put_reason(body, broken - 2, g->board->broken_text);
  else if (cddp__has_cause(g))
    cddp__put_reason(body, cddp__load32(&g->board->cause) - 2, g->board->cause_text);
  else
    return NULL;
  return body;
}

/* This rank leaves: says goodbye on all links and closes them. */
static void cddp__hosts_leave(cddp_group *g) {
  unsigned char body[CDDP__REASON_BYTES];
  const unsigned char *reason;
  cddp__hosts *x = g->hosts;
  cddp__net *net = g->host->net;
  cddp_group **at;
  cddp__link *l;
  int p;
  if (x == NULL) return;
  cddp__hosts_mourn(g, true);
  cddp__hosts_excuse(g);
  cddp__mail_linger(g);
  pthread_mutex_lock(&net->lock);
  for (at = &net->groups; *at != NULL && *at != g;) at = &(*at)->hosts->next;
  if (*at == g) *at = x->next;
  net->left[net->left_count++ % CDDP__LEFT_GROUPS] = g->id;
  pthread_mutex_unlock(&net->lock);
  cddp__net_look(net);
  cddp__hosts_claim(g);
  cddp__say_goodbye(g);
  cddp__mail_welcome(g);
  reason = cddp__hosts_reason(g, body);
  for (p = 0; p < g->size; p++)
    if (x->links[p] != NULL) cddp__link_leave(x->links[p], reason);
  for (p = 0; p < x->mail_outs; p++)
    if (x->mail_out[p]->letters == NULL) cddp__link_leave(x->mail_out[p], reason);
  for (l = x->watches; l != NULL; l = l->next)
    if (!l->mine) cddp__link_leave(l, reason);
  for (p = 0; p < g->size; p++) cddp__link_free(net, x->links[p]);
  for (p = 0; p < x->mail_outs; p++) cddp__link_free(net, x->mail_out[p]);
  cddp__links_free(net, x->mail_in);
  cddp__links_free(net, x->watches);
  cddp__letters_free(&net->allocator, x->letters);
  cddp__arena_free(g->host, x->my_scratch);
  cddp__free(&net->allocator, x->stage);
}

#ifdef CDDP_MPI
/* >>mpi ----------------------------------------------------------------------------------------
   Collectives through the cluster's MPI, for backend "mpi". Works as follows: ranks meet, agree on
   each call and watch each other as ever, in steps. Calls too large to ride in a step then go to
   MPI: each rank starts the nonblocking collective on the group's own communicator and tests it,
   with an eye on its peers and the deadline. A second step ends the call, so that nobody who is
   done can be taken for lost. MPI is asked by one thread at a time, under cddp__mpi_lock. The
   order of sums is MPI's. An operation that a failure has cut off cannot be taken back from MPI:
   its buffers, and copies made for it, stay reserved. send and recv do not come here. */

#define CDDP__MPI_MOST ((size_t)1 << 24) /* elements at a time: MPI counts in int */

struct cddp__mpi {
  MPI_Comm comm;
};

static pthread_mutex_t cddp__mpi_lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t cddp__mpi_owner;            /* the process for which this file called MPI_Init */
static cddp__atomic_u32 cddp__mpi_stuck; /* operations were cut off: MPI_Finalize would wait */

static cddp_result cddp__mpi_fail(int code, const char *what) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int n = 0;
  MPI_Error_string(code, text, &n);
  return cddp__fail(CDDP_MPI, "%s: %s", what, text);
}

/* Waits for an operation that `code` says to have begun. */
static cddp_result cddp__mpi_wait(cddp_group *g, int code, MPI_Request *request, const char *what) {
  double now = cddp__now(), deadline = now + g->timeout_s, look = now + CDDP__NAP_S;
  cddp_result r = CDDP_OK;
  int i, done = 0;
  g->step++; /* whoever has not announced the next one is in this operation, or lost in it */
  for (i = 0; r == CDDP_OK && code == MPI_SUCCESS; i++) {
    pthread_mutex_lock(&cddp__mpi_lock);
    code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
    pthread_mutex_unlock(&cddp__mpi_lock);
    if (code != MPI_SUCCESS || done) break;
    if (i < g->spin) continue;
    sched_yield();
    if ((now = cddp__now()) < look) continue;
    cddp__serve_idle(g);
    look = now + CDDP__NAP_S;
    if ((r = cddp__check_board(g)) == CDDP_OK) r = cddp__look_after_peers(g);
    if (r == CDDP_OK && now >= deadline) r = cddp__break_late(g);
  }
  g->step--;
  if (code != MPI_SUCCESS) {
    cddp__mpi_fail(code, what);
    r = cddp__break(g, CDDP_MPI);
  }
  if (r != CDDP_OK) cddp__store32(&cddp__mpi_stuck, 1);
  return r;
}

static MPI_Datatype cddp__mpi_type(cddp_dtype t) { /* f16 and bf16: as bits */
  switch (t) {
  case CDDP_F32: return MPI_FLOAT;
  case CDDP_F64: return MPI_DOUBLE;
  case CDDP_I8: return MPI_INT8_T;
  case CDDP_U8: return MPI_UINT8_T;
  case CDDP_I32: return MPI_INT32_T;
  case CDDP_I64: return MPI_INT64_T;
  default: return MPI_UINT16_T;
  }
}

static MPI_Op cddp__mpi_op(cddp_op op) {
  switch (op) {
  case CDDP_PROD: return MPI_PROD;
  case CDDP_MIN: return MPI_MIN;
  case CDDP_MAX: return MPI_MAX;
  default: return MPI_SUM;
  }
}

#define CDDP__MPI_DIVIDE(T)                                               \
  {                                                                       \
    T *v = (T *)data;                                                     \
    for (i = 0; i < n; i++) v[i] = (T)(v[i] / (T)by);                     \
  }
static void cddp__mpi_divide(void *data, size_t n, cddp_dtype dtype, int by) {
  size_t i;
  switch (dtype) {
  case CDDP_F32: CDDP__MPI_DIVIDE(float) break;
  case CDDP_F64: CDDP__MPI_DIVIDE(double) break;
  case CDDP_I8: CDDP__MPI_DIVIDE(int8_t) break;
  case CDDP_U8: CDDP__MPI_DIVIDE(uint8_t) break;
  case CDDP_I32: CDDP__MPI_DIVIDE(int32_t) break;
  default: CDDP__MPI_DIVIDE(int64_t)
  }
}
#undef CDDP__MPI_DIVIDE

/* Reduces n elements of send into recv: everybody's (root -1) or root's; send may be recv. */
static cddp_result cddp__mpi_reduce(cddp_group *g, const void *send, void *recv, size_t n,
                                    cddp_dtype dtype, cddp_op op, int root) {
  bool half = dtype == CDDP_F16 || dtype == CDDP_BF16, gets = root < 0 || root == g->rank;
  const void *in = send == recv ? MPI_IN_PLACE : send;
  MPI_Datatype type = half ? MPI_FLOAT : cddp__mpi_type(dtype);
  MPI_Request request = MPI_REQUEST_NULL;
  void *out = recv;
  cddp_result r;
  int code;
  if (half) { /* summed in f32, as everywhere */
    out = cddp__malloc(&g->host->allocator, n * sizeof(float));
    if (out == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
    cddp__pick_kernels()->widen((cddp__f32 *)out, send, n, dtype);
    in = MPI_IN_PLACE;
  }
  if (!gets && in == MPI_IN_PLACE) in = out;
  pthread_mutex_lock(&cddp__mpi_lock);
  if (root < 0)
    code = MPI_Iallreduce(in, out, (int)n, type, cddp__mpi_op(op), g->mpi->comm, &request);
  else
    code = MPI_Ireduce(in, gets ? out : NULL, (int)n, type, cddp__mpi_op(op), root, g->mpi->comm,
                       &request);
  pthread_mutex_unlock(&cddp__mpi_lock);
  r = cddp__mpi_wait(g, code, &request, root < 0 ? "MPI_Iallreduce" : "MPI_Ireduce");
  if (r != CDDP_OK) return r; /* a copy is left to MPI */
  if (gets && op == CDDP_AVG) cddp__mpi_divide(out, n, half ? CDDP_F32 : dtype, g->size);
  if (gets && half) cddp__pick_kernels()->narrow(recv, (const cddp__f32 *)out, n, dtype);
  if (half) cddp__free(&g->host->allocator, out);
  return CDDP_OK;
}

/* n elements, and how far apart the ranks' are. */
static MPI_Datatype cddp__mpi_piece(const cddp__call *c, size_t n) {
  MPI_Datatype block, piece;
  MPI_Type_contiguous((int)n, cddp__mpi_type((cddp_dtype)c->dtype), &block);
  MPI_Type_create_resized(block, 0, (MPI_Aint)(c->count * c->esize), &piece);
  MPI_Type_commit(&piece);
  MPI_Type_free(&block);
  return piece;
}

/* Elements [begin, begin + n) of each share, of a call that moves and does not add. */
static cddp_result cddp__mpi_move(cddp_group *g, const cddp__call *c, const char *send,
                                  size_t begin, size_t n) {
  static const char *const names[] = {"MPI_Ibcast", "MPI_Iallgather", "MPI_Igather",
                                      "MPI_Iscatter", "MPI_Ialltoall"};
  const char *from = send + begin * c->esize;
  char *to = (char *)c->recv + begin * c->esize;
  MPI_Comm comm = g->mpi->comm;
  MPI_Request q = MPI_REQUEST_NULL;
  MPI_Datatype p;
  int code, name = 4;
  pthread_mutex_lock(&cddp__mpi_lock);
  p = cddp__mpi_piece(c, n);
  switch (c->kind) {
  case CDDP__KIND_BROADCAST:
    name = 0;
    code = MPI_Ibcast(to, 1, p, c->root, comm, &q);
    break;
  case CDDP__KIND_ALL_GATHER:
    name = 1;
    code = MPI_Iallgather(from, 1, p, to, 1, p, comm, &q);
    break;
  case CDDP__KIND_GATHER:
    name = 2;
    code = MPI_Igather(from, 1, p, g->rank == c->root ? to : NULL, 1, p, c->root, comm, &q);
    break;
  case CDDP__KIND_SCATTER:
    name = 3;
    code = MPI_Iscatter(g->rank == c->root ? from : NULL, 1, p, to, 1, p, c->root, comm, &q);
    break;
  default:
    code = MPI_Ialltoall(from, 1, p, to, 1, p, comm, &q);
  }
  MPI_Type_free(&p); /* when the operation is over */
  pthread_mutex_unlock(&cddp__mpi_lock);
  return cddp__mpi_wait(g, code, &q, names[name]);
}

static cddp_result cddp__mpi_data(cddp_group *g, const cddp__call *c, const char *send) {
  cddp_dtype dtype = (cddp_dtype)c->dtype;
  cddp_op op = (cddp_op)c->op;
  size_t begin, n;
  cddp_result r = CDDP_OK;
  int p;
  for (begin = 0; r == CDDP_OK && begin < c->count; begin += n) {
    char *to = (char *)c->recv + begin * c->esize;
    n = cddp__min(CDDP__MPI_MOST, c->count - begin);
    if (c->kind == CDDP__KIND_ALL_REDUCE || c->kind == CDDP__KIND_REDUCE) {
      r = cddp__mpi_reduce(g, send + begin * c->esize, to, n, dtype, op, c->root);
    } else if (c->kind == CDDP__KIND_REDUCE_SCATTER) {
      for (p = 0; r == CDDP_OK && p < g->size; p++)
        r = cddp__mpi_reduce(g, send + ((size_t)p * c->count + begin) * c->esize, to, n, dtype, op,
                             p);
    } else {
      r = cddp__mpi_move(g, c, send, begin, n);
    }
  }
  return r;
}

/* What send and recv are, in bytes: MPI wants them apart. */
static bool cddp__mpi_overlap(const cddp_group *g, const cddp__call *c, size_t *sent) {
  size_t share = c->count * c->esize, all = share * (size_t)g->size, got = share;
  const char *send = (const char *)c->send, *recv = (const char *)c->recv;
  *sent = share;
  if (c->kind == CDDP__KIND_ALL_GATHER || c->kind == CDDP__KIND_GATHER) got = all;
  if (c->kind == CDDP__KIND_SCATTER || c->kind == CDDP__KIND_REDUCE_SCATTER) *sent = all;
  if (c->kind == CDDP__KIND_ALL_TO_ALL) *sent = got = all;
  if (c->kind == CDDP__KIND_GATHER && g->rank != c->root) got = 0;
  if (c->kind == CDDP__KIND_SCATTER && g->rank != c->root) *sent = 0;
  return send != NULL && recv != NULL && send < recv + got && recv < send + *sent;
}

static cddp_result cddp__mpi_run(cddp_group *g, const cddp__call *c) {
  bool in_place = c->kind == CDDP__KIND_ALL_REDUCE || c->kind == CDDP__KIND_REDUCE ||
                  c->kind == CDDP__KIND_BROADCAST;
  const char *send = (const char *)c->send;
  void *copy = NULL;
  size_t bytes;
  cddp_result r;
  cddp__begin(g);
  r = cddp__sync(g, cddp__call_code(c, 5), c->count, c->root, 0, cddp__serve_idle);
  if (r == CDDP_OK) r = cddp__enter(g);
  if (r == CDDP_OK && !in_place && cddp__mpi_overlap(g, c, &bytes)) {
    copy = cddp__malloc(&g->host->allocator, bytes);
    if (copy == NULL) r = cddp__break(g, CDDP_OUT_OF_MEMORY);
    if (copy != NULL) memcpy(copy, send, bytes);
    send = (const char *)copy;
  }
  if (r == CDDP_OK) r = cddp__mpi_data(g, c, send);
  if (r == CDDP_OK) {
    cddp__begin(g);
    r = cddp__sync(g, cddp__call_code(c, 6), c->count, c->root, 0, cddp__serve_idle);
    cddp__free(&g->host->allocator, copy);
  }
  return cddp__exit(g, r);
}

/* --- communicators --- */

static void cddp__mpi_finalize(void) { /* at exit */
  int over = 1;
  if (cddp__mpi_owner != getpid() || cddp__load32(&cddp__mpi_stuck) != 0) return;
  if (MPI_Finalized(&over) == MPI_SUCCESS && !over) MPI_Finalize();
}

static cddp_result cddp__mpi_start(const cddp_group *g) {
  int on = 0, level = 0, size = 0, code = MPI_Initialized(&on);
  if (code == MPI_SUCCESS && !on) {
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    cddp__mpi_owner = getpid();
    if (code == MPI_SUCCESS) atexit(cddp__mpi_finalize);
  } else if (code == MPI_SUCCESS) {
    code = MPI_Query_thread(&level);
  }
  if (code == MPI_SUCCESS) code = MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (code != MPI_SUCCESS) return cddp__mpi_fail(code, "MPI_Init_thread");
  if (level < MPI_THREAD_SERIALIZED)
    return cddp__fail(CDDP_MPI, "MPI was initialized for one thread only; ask MPI_Init_thread for "
                                "MPI_THREAD_SERIALIZED or let cddp_init do it");
  if (size != g->size)
    return cddp__fail(CDDP_MPI,
                      "MPI_COMM_WORLD has %d rank%s, the group %d; start all of them with one "
                      "mpirun -n %d or srun -n %d, of the MPI that the program was built with",
                      size, size == 1 ? "" : "s", g->size, g->size, g->size);
  return CDDP_OK;
}

/* Gives `to`, whose members are those of `from` with this color (negative: no member, to is NULL),
   its communicator. from NULL: all processes that MPI knows. */
static cddp_result cddp__mpi_split(const cddp_group *from, cddp_group *to, int color, int key) {
  MPI_Comm comm = MPI_COMM_NULL, parent = from != NULL ? from->mpi->comm : MPI_COMM_WORLD;
  int code;
  pthread_mutex_lock(&cddp__mpi_lock);
  code = MPI_Comm_split(parent, color < 0 ? MPI_UNDEFINED : color, key, &comm);
  if (code == MPI_SUCCESS && comm != MPI_COMM_NULL)
    code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  pthread_mutex_unlock(&cddp__mpi_lock);
  if (code != MPI_SUCCESS) return cddp__mpi_fail(code, "MPI_Comm_split");
  if (to == NULL) return CDDP_OK;
  to->mpi = (struct cddp__mpi *)cddp__calloc(&to->host->allocator, 1, sizeof *to->mpi);
  if (to->mpi == NULL) return CDDP_OUT_OF_MEMORY;
  to->mpi->comm = comm;
  return CDDP_OK;
}

static void cddp__mpi_leave(cddp_group *g) {
  int over = 1;
  if (g->mpi == NULL) return;
  pthread_mutex_lock(&cddp__mpi_lock);
  if (cddp__load32(&g->board->broken) == 0 && MPI_Finalized(&over) == MPI_SUCCESS && !over)
    MPI_Comm_free(&g->mpi->comm);
  pthread_mutex_unlock(&cddp__mpi_lock);
  cddp__free(&g->host->allocator, g->mpi);
  g->mpi = NULL;
}
#endif /* CDDP_MPI */

/* >>work ---------------------------------------------------------------------------------------
   Asynchronous operations. Collectives of one group run on its engine, a thread that the first
   asynchronous one starts; a synchronous collective waits for the engine to be idle, then runs on
   its caller's thread. Sends and receives need no thread, see >>p2p. */

static cddp_work *cddp__work_new(cddp_group *g) {
  cddp_work *w = (cddp_work *)cddp__calloc(&g->host->allocator, 1, sizeof *w);
  if (w == NULL) return NULL;
  w->group = g;
  w->parcel = -1;
  return w;
}

static void cddp__work_run(cddp_work *w) {
  cddp__this_site = w->site;
  w->result = w->run(w);
  if (w->result != CDDP_OK) snprintf(w->text, sizeof w->text, "%s", cddp__error_text);
}

static void *cddp__engine_main(void *arg) {
  cddp_group *g = (cddp_group *)arg;
  cddp__engine *e = &g->engine;
  cddp_work *w;
  int spin;
  pthread_mutex_lock(&e->lock);
  for (;;) {
    while (e->first == NULL && !e->stop) pthread_cond_wait(&e->changed, &e->lock);
    if (e->first == NULL) break;
    w = e->first;
    e->first = w->next;
    if (e->first == NULL) e->last = NULL;
    e->busy = true;
    pthread_mutex_unlock(&e->lock);
    CDDP__POINT("engine");
    spin = g->spin;
    if (g->host->cores < 2 * g->locals) g->spin = 0; /* the core is wanted by the training thread */
    cddp__work_run(w);
    g->spin = spin;
    pthread_mutex_lock(&e->lock);
    e->busy = false;
    w->done = true;
    pthread_cond_broadcast(&e->changed);
  }
  pthread_mutex_unlock(&e->lock);
  return NULL;
}

/* Puts w at the end of its group's queue; starts the engine if need be. */
static cddp_result cddp__engine_push(cddp_work *w) {
  cddp__engine *e = &w->group->engine;
  cddp_result r = CDDP_OK;
  w->next = NULL;
  CDDP__POINT("push");
  pthread_mutex_lock(&e->lock);
  if (!e->started) {
    r = cddp__thread_start(&e->thread, cddp__engine_main, w->group);
    e->started = r == CDDP_OK;
  }
  if (r == CDDP_OK) {
    if (e->last != NULL)
      e->last->next = w;
    else
      e->first = w;
    e->last = w;
    pthread_cond_broadcast(&e->changed);
  }
  pthread_mutex_unlock(&e->lock);
  return r;
}

/* Waits until all asynchronous collectives of g have run. */
static void cddp__engine_drain(cddp_group *g) {
  cddp__engine *e = &g->engine;
  if (!e->started) return; /* written only by the thread that calls this group's collectives */
  if (pthread_equal(e->thread, pthread_self())) return;
  pthread_mutex_lock(&e->lock);
  while (e->first != NULL || e->busy) pthread_cond_wait(&e->changed, &e->lock);
  pthread_mutex_unlock(&e->lock);
}

static void cddp__engine_stop(cddp_group *g) {
  cddp__engine *e = &g->engine;
  if (!e->started) return;
  pthread_mutex_lock(&e->lock);
  e->stop = true;
  pthread_cond_broadcast(&e->changed);
  pthread_mutex_unlock(&e->lock);
  pthread_join(e->thread, NULL);
  e->started = false;
}

static uint64_t cddp__record_message(const cddp_group *g, const char *what, size_t count,
                                     cddp_dtype dtype, int peer, int tag) { /* 0: recorder off */
  uint64_t n;
  if (CDDP__LIKELY(g->host->record == NULL)) return 0;
  n = cddp__record_new(g->host->record, what, g->id, count, (int)dtype, -1, peer);
  cddp__record_at(g->host->record, n)->tag = tag;
  cddp__record_start(g->host->record, n, 0);
  return n;
}

static void cddp__record_finish(const cddp_group *g, uint64_t record, cddp_result r) {
  if (CDDP__UNLIKELY(record != 0)) cddp__record_end(g->host->record, record, r);
}

static cddp_result cddp__work_wait(cddp_work *w) {
  cddp_group *g = w->group;
  cddp_result r;
  if (w->backend != NULL) return w->backend->wait(w);
  if (w->is_recv) {
    r = cddp__finish_recv(g, &w->pending);
  } else if (w->run == NULL) {
    r = cddp__finish_send(g, w->parcel);
  } else {
    pthread_mutex_lock(&g->engine.lock);
    while (!w->done) pthread_cond_wait(&g->engine.changed, &g->engine.lock);
    pthread_mutex_unlock(&g->engine.lock);
    r = w->result;
    if (r != CDDP_OK) cddp__fail(r, "%s", w->text);
  }
  if (w->run == NULL) cddp__record_finish(g, w->record, r);
  cddp__free(&g->host->allocator, w);
  return r;
}

static bool cddp__work_done(cddp_work *w) {
  cddp_group *g = w->group;
  bool done;
  if (w->backend != NULL) return w->backend->done(w);
  if (w->run == NULL) {
    if (cddp__load32(&g->board->broken) != 0) return true;
    if (!w->is_recv && w->parcel < 0) return true;
    return cddp__mail_ready(g, w->is_recv ? &w->pending : NULL, w->parcel, 0);
  }
  pthread_mutex_lock(&g->engine.lock);
  done = w->done;
  pthread_mutex_unlock(&g->engine.lock);
  return done;
}
/* >>collectives --------------------------------------------------------------------------------
   Every collective is one of three sequences of steps:
     one step   what fits into a slot: each rank puts its share into its line (up to 40 bytes) or
   slot (64 KiB; in a group of several hosts, its part of CDDP__RIDE), one step, each rank takes
   what it needs from all lines or slots. A small all_reduce is thus one exchange of cache lines;
   every rank adds all values, in the same order. direct     the buffers that others need lie in
   shared memory: one step to tell where, each rank reads (all_reduce: also writes) its peers'
   buffers in place, one step to say it is done. all_reduce: rank r owns the r-th slice, reads every
   replica of it once and writes the result into every replica: the fewest bytes that can move;
   broadcast, where all buffers are shared, likewise, so that the root's core works too.
   staged     any other memory: the share goes through the slots piece by piece, one step a piece;
   the slots stay in cache, so main memory sees one read and one write of the buffer. Which one is
   decided from the size, and from the refs of all ranks: alike on every rank. */

#define CDDP__DIRECT_MIN                                                                           \
  ((size_t)16 << 10) /* bytes of a share from which a look at the refs pays */

/* Bytes a rank puts into a slot per element of count. */
static size_t cddp__slot_element(const cddp_group *g, const cddp__call *c) {
  bool pieces = c->kind == CDDP__KIND_SCATTER || c->kind == CDDP__KIND_REDUCE_SCATTER ||
                c->kind == CDDP__KIND_ALL_TO_ALL;
  return c->esize * (pieces ? (size_t)g->size : 1);
}

/* A call's elements [begin, begin + n) of each share, as they pass through lines or slots. */
typedef struct cddp__chunk {
  size_t begin, n;
  bool in_line; /* small enough for the lines */
} cddp__chunk;

static void *cddp__space_of(const cddp_group *g, int rank, const cddp__chunk *k) {
  return k->in_line ? (void *)cddp__line_of(g, rank, g->step)->u.bytes
                    : cddp__slot_of(g, rank, g->step);
}

/* This rank's share of the chunk goes into its space. */
static void cddp__put(const cddp_group *g, const cddp__call *c, const cddp__chunk *k) {
  char *space = (char *)cddp__space_of(g, g->rank, k);
  const char *send = (const char *)c->send;
  size_t bytes = k->n * c->esize, r;
  switch (c->kind) {
  case CDDP__KIND_BROADCAST:
    if (g->rank == c->root) memcpy(space, send + k->begin * c->esize, bytes);
    break;
  case CDDP__KIND_SCATTER:
    if (g->rank != c->root) break;
    /* fall through */
  case CDDP__KIND_REDUCE_SCATTER:
  case CDDP__KIND_ALL_TO_ALL:
    for (r = 0; r < (size_t)g->size; r++)
      memcpy(space + r * bytes, send + (r * c->count + k->begin) * c->esize, bytes);
    break;
  default:
    memcpy(space, send + k->begin * c->esize, bytes);
  }
}

/* Reduces the same stretch of every rank's memory into dst: the others' at their space + offset,
   this rank's at own, which may be dst. */
static void cddp__reduce_spaces(const cddp_group *g, const cddp__call *c, const cddp__chunk *k,
                                void *dst, size_t offset, const char *own) {
  const void *few[16], **srcs = few;
  int r, base;
  if (g->hosts != NULL)
    srcs = g->hosts->pointers;
  else if (g->size > 16)
    srcs = (const void **)cddp__slot_of(g, g->rank, g->step + 1); /* free until then */
  for (r = 0, base = g->size; r < base; r++)
    srcs[r] = (const char *)cddp__space_of(g, r, k) + offset;
  srcs[g->rank] = own;
  cddp__reduce(dst, srcs, g->size, k->n, (cddp_dtype)c->dtype, (cddp_op)c->op);
}

/* This rank takes its result of the chunk out of everybody's space. */
static void cddp__take(const cddp_group *g, const cddp__call *c, const cddp__chunk *k) {
  char *recv = (char *)c->recv;
  size_t bytes = k->n * c->esize, at = k->begin * c->esize, share = c->count * c->esize, r;
  bool root = g->rank == c->root;
  switch (c->kind) {
  case CDDP__KIND_REDUCE:
    if (!root) break;
    /* fall through */
  case CDDP__KIND_ALL_REDUCE:
    cddp__reduce_spaces(g, c, k, recv + at, 0, (const char *)c->send + at);
    break;
  case CDDP__KIND_REDUCE_SCATTER:
    cddp__reduce_spaces(g, c, k, recv + at, (size_t)g->rank * bytes,
                        (const char *)c->send + (size_t)g->rank * share + at);
    break;
  case CDDP__KIND_BROADCAST:
    if (!root) memcpy(recv + at, cddp__space_of(g, c->root, k), bytes);
    break;
  case CDDP__KIND_SCATTER:
    memcpy(recv + at, (char *)cddp__space_of(g, c->root, k) + (size_t)g->rank * bytes, bytes);
    break;
  case CDDP__KIND_GATHER:
    if (!root) break;
    /* fall through */
  case CDDP__KIND_ALL_GATHER:
    for (r = 0; r < (size_t)g->size; r++)
      memcpy(recv + r * share + at, cddp__space_of(g, (int)r, k), bytes);
    break;
  default: /* ALL_TO_ALL */
    for (r = 0; r < (size_t)g->size; r++)
      memcpy(recv + r * share + at, (char *)cddp__space_of(g, (int)r, k) + (size_t)g->rank * bytes,
             bytes);
  }
}

static cddp_result cddp__sync_call(cddp_group *g, const cddp__call *c, uint32_t phase) {
  return cddp__sync(g, cddp__call_code(c, phase), c->count, c->root, 0, cddp__serve_idle);
}

static cddp_result cddp__run_staged(cddp_group *g, const cddp__call *c) {
  size_t element = cddp__slot_element(g, c), most = cddp__max(g->slot_size, CDDP__INLINE) / element;
  cddp__chunk k;
  cddp_result r;
  for (k.begin = 0; k.begin < c->count; k.begin += k.n) {
    k.n = cddp__min(most, c->count - k.begin);
    k.in_line = k.n * element <= CDDP__INLINE;
    cddp__begin(g);
    cddp__put(g, c, &k);
    if ((r = cddp__sync_call(g, c, CDDP__PHASE_STAGED)) != CDDP_OK) return r;
    cddp__take(g, c, &k);
  }
  return CDDP_OK;
}

/* Whether the operation reads (all_reduce: also writes) rank's buffer from other ranks. */
static bool cddp__rank_is_read(const cddp__call *c, int rank) {
  if (c->kind == CDDP__KIND_BROADCAST || c->kind == CDDP__KIND_SCATTER) return rank == c->root;
  return c->kind != CDDP__KIND_GATHER || rank != c->root;
}

static cddp__ref cddp__call_ref(cddp_group *g, const cddp__call *c) {
  cddp__ref none;
  bool pieces = c->kind == CDDP__KIND_SCATTER || c->kind == CDDP__KIND_REDUCE_SCATTER ||
                c->kind == CDDP__KIND_ALL_TO_ALL;
  memset(&none, 0, sizeof none);
  if (c->kind == CDDP__KIND_BROADCAST) return cddp__ref_of(g->host, c->recv, c->count * c->esize);
  if (!cddp__rank_is_read(c, g->rank) || (c->kind == CDDP__KIND_ALL_TO_ALL && c->send == c->recv))
    return none;
  return cddp__ref_of(g->host, c->send, c->count * c->esize * (pieces ? (size_t)g->size : 1));
}

/* The root's array to all: this rank's slice of it to everybody, or (not all see all) the whole of
   it to this rank. Blocks stay in the cache for the next copy. */
static void cddp__spread(const cddp_group *g, const cddp__call *c, char *const *bufs) {
  size_t begin, end, n, bytes = c->count * c->esize;
  int r;
  for (r = 0; r < g->size && bufs[r] != NULL; r++) {}
  if (r < g->size) {
    if (g->rank != c->root) memcpy(c->recv, bufs[c->root], bytes);
    return;
  }
  cddp__slice(bytes, CDDP__CACHE_LINE, g->size, g->rank, &begin, &end);
  for (; begin < end; begin += n) {
    n = g->size == 2 ? end - begin : cddp__min(end - begin, CDDP__SLOT);
    for (r = 0; r < g->size; r++)
      if (r != c->root) memcpy(bufs[r] + begin, bufs[c->root] + begin, n);
  }
}

/* The direct moves, bufs[r] being rank r's buffer where it is read. */
static void cddp__move(cddp_group *g, const cddp__call *c, char *const *bufs, void **slices) {
  size_t share = c->count * c->esize, begin, end, me = (size_t)g->rank, r, n = (size_t)g->size;
  cddp_dtype dtype = (cddp_dtype)c->dtype;
  cddp_op op = (cddp_op)c->op;
  char *recv = (char *)c->recv;
  switch (c->kind) {
  case CDDP__KIND_ALL_REDUCE:
  case CDDP__KIND_REDUCE:
    cddp__slice(c->count, CDDP__CACHE_LINE / c->esize, g->size, g->rank, &begin, &end);
    for (r = 0; r < n; r++) slices[r] = bufs[r] + begin * c->esize;
    if (c->kind == CDDP__KIND_ALL_REDUCE)
      cddp__reduce_all(slices, g->size, end - begin, dtype, op);
    else
      cddp__reduce(slices[c->root], (const void *const *)slices, g->size, end - begin, dtype, op);
    break;
  case CDDP__KIND_REDUCE_SCATTER:
    for (r = 0; r < n; r++) slices[r] = bufs[r] + me * share;
    cddp__reduce(recv, (const void *const *)slices, g->size, c->count, dtype, op);
    break;
  case CDDP__KIND_BROADCAST: cddp__spread(g, c, bufs); break;
  case CDDP__KIND_SCATTER:
    cddp__copy(recv, bufs[c->root] + me * share, share);
    break;
  case CDDP__KIND_GATHER:
    if (g->rank != c->root) break;
    for (r = 0; r < n; r++)
      cddp__copy(recv + r * share, (int)r == c->root ? (const char *)c->send : bufs[r], share);
    break;
  case CDDP__KIND_ALL_GATHER:
    for (r = 0; r < n; r++) /* each begins with its neighbour: readers spread over the owners */
      cddp__copy(recv + (me + r) % n * share, r == 0 ? (const char *)c->send : bufs[(me + r) % n],
                 share);
    break;
  default: /* ALL_TO_ALL */
    for (r = 0; r < n; r++) cddp__copy(recv + r * share, bufs[r] + me * share, share);
  }
}

/* Finds all buffers from the refs of the current step; NULL: needed by nobody, or not told of.
   *direct: whether those that are needed were found. */
static cddp_result cddp__locate_all(cddp_group *g, const cddp__call *c, char **bufs, bool *direct) {
  cddp_result r;
  int p;
  *direct = true;
  for (p = 0; p < g->size; p++) {
    const cddp__ref *ref = &cddp__line_of(g, p, g->step)->u.ref;
    if (cddp__rank_is_read(c, p) && ref->kind == CDDP__REF_NONE) *direct = false;
  }
  for (p = 0; *direct && p < g->size; p++) {
    const cddp__ref *ref = &cddp__line_of(g, p, g->step)->u.ref;
    void *at = NULL;
    bufs[p] = NULL;
    if (ref->kind == CDDP__REF_NONE) continue;
    if ((r = cddp__locate(g->host, ref, &at)) != CDDP_OK) return cddp__break(g, r);
    bufs[p] = (char *)at;
  }
  return CDDP_OK;
}

static cddp_result cddp__run_large(cddp_group *g, const cddp__call *c) {
  char *few_bufs[16], **bufs = few_bufs;
  void *few_slices[16], **slices = few_slices, *many = NULL;
  bool direct = false;
  cddp__line *line;
  cddp_result r;
  if (g->size > 16) {
    many = cddp__calloc(&g->host->allocator, 2 * (size_t)g->size, sizeof(void *));
    if (many == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
    bufs = (char **)many;
    slices = (void **)many + g->size;
  }
  line = cddp__begin(g);
  line->u.ref = cddp__call_ref(g, c);
  r = cddp__sync_call(g, c, 2);
  if (r == CDDP_OK) r = cddp__locate_all(g, c, bufs, &direct);
  if (r == CDDP_OK && !direct) {
    r = cddp__run_staged(g, c);
  } else if (r == CDDP_OK && (r = cddp__enter(g)) == CDDP_OK) {
    cddp__move(g, c, bufs, slices);
    cddp__begin(g);
    r = cddp__sync_call(g, c, 3);
  }
  r = cddp__exit(g, r);
  cddp__free(&g->host->allocator, many);
  return r;
}

static cddp_result cddp__dispatch_call(cddp_group *g, const cddp__call *c) {
  size_t element = cddp__slot_element(g, c);
  if (c->count == 0) {
    cddp__begin(g);
    return cddp__sync_call(g, c, 0);
  }
  if (g->size == 1) {
    cddp__copy(c->recv, c->send, c->count * c->esize); /* any op of one value is the value */
    return CDDP_OK;
  }
#ifdef CDDP_MPI
  if (g->mpi != NULL && c->count > CDDP__INLINE / element) return cddp__mpi_run(g, c);
#endif
  if (CDDP__UNLIKELY(g->hosts != NULL))
    return c->count <= cddp__max(g->slot_size, CDDP__INLINE) / element ? cddp__run_staged(g, c)
                                                                       : cddp__hosts_run(g, c);
  if (c->count <= CDDP__DIRECT_MIN / element) return cddp__run_staged(g, c);
  return cddp__run_large(g, c);
}

/* Runs a collective on the calling thread. record: its number in the flight recorder, 0 = none. */
static cddp_result cddp__run_recorded(cddp_group *g, const cddp__call *c, uint64_t record) {
  cddp_result r;
  if ((r = cddp__check_group(g)) == CDDP_OK) {
    g->calls++;
    if (CDDP__UNLIKELY(record != 0)) cddp__record_start(g->host->record, record, g->calls);
    r = cddp__dispatch_call(g, c);
  }
  if (CDDP__UNLIKELY(record != 0)) cddp__record_end(g->host->record, record, r);
  return r;
}

static uint64_t cddp__record_call(const cddp_group *g, const cddp__call *c) { /* 0: recorder off */
  if (CDDP__LIKELY(g->host->record == NULL)) return 0;
  return cddp__record_new(g->host->record, cddp__call_names[c->kind], g->id, c->count, c->dtype,
                          cddp__kind_reduces(c->kind) ? c->op : -1, c->root);
}

static cddp_result cddp__run_call(cddp_group *g, const cddp__call *c) {
  return cddp__run_recorded(g, c, cddp__record_call(g, c));
}

/* Records what is no cddp__call: begins, or ends. */
static uint64_t cddp__record_begin(const cddp_group *g, int kind, uint64_t sequence,
                                   uint64_t count) {
  uint64_t n;
  if (CDDP__LIKELY(g->host->record == NULL)) return 0;
  n = cddp__record_new(g->host->record, cddp__call_names[kind], g->id, count, -1, -1, -1);
  cddp__record_start(g->host->record, n, sequence);
  return n;
}

static cddp_result cddp__run_work_call(cddp_work *w) {
  return cddp__run_recorded(w->group, &w->call, w->record);
}

/* Runs a validated collective now, or hands it to the engine. */
static cddp_result cddp__start_call(cddp_group *g, const cddp__call *c, cddp_work **work) {
  cddp_result r;
  cddp_work *w;
  bool taken = false;
  if (CDDP__UNLIKELY(g->backend != NULL)) {
    r = g->backend->start(g, c, work, &taken);
    if (taken || r != CDDP_OK) return r;
  }
  if (work == NULL) {
    cddp__engine_drain(g);
    return cddp__run_call(g, c);
  }
  *work = NULL;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if ((w = cddp__work_new(g)) == NULL) return CDDP_OUT_OF_MEMORY;
  w->call = *c;
  w->run = cddp__run_work_call;
  w->site = cddp__this_site;
  w->record = cddp__record_call(g, c);
  if (w->record != 0) cddp__record_at(g->host->record, w->record)->engine = 1;
  if ((r = cddp__engine_push(w)) != CDDP_OK) {
    cddp__free(&g->host->allocator, w);
    return r;
  }
  *work = w;
  return CDDP_OK;
}
/* >>groups -------------------------------------------------------------------------------------
   Creation, splitting and destruction. A split takes three steps of the parent: colors and keys,
   where each new group's control block lies, and whether every member could map it. */

/* Gives back control blocks that every rank has left. */
static void cddp__reap_boards(cddp__host *h) {
  int i, kept = 0;
  for (i = 0; i < h->zombie_count; i++) {
    void *p = NULL;
    cddp__board *b;
    if (cddp__locate(h, &h->zombies[i], &p) != CDDP_OK || p == NULL) continue;
    b = (cddp__board *)p;
    if (cddp__load32(&b->left) == b->size)
      cddp__arena_free(h, p);
    else
      h->zombies[kept++] = h->zombies[i];
  }
  h->zombie_count = kept;
}

typedef struct cddp__color { /* the payload of a split's first step */
  int32_t color, key;
} cddp__color;

static cddp__color cddp__color_of(const cddp_group *g, int rank) {
  cddp__color c;
  memcpy(&c, cddp__line_of(g, rank, g->step)->u.bytes, sizeof c);
  return c;
}

/* The parent's ranks with this rank's color, by (key, rank); returns how many. */
static int cddp__pick_members(const cddp_group *g, int color, int *members) {
  int n = 0, p, i;
  for (p = 0; p < g->size; p++) {
    cddp__color c = cddp__color_of(g, p);
    if (c.color != color) continue;
    for (i = n; i > 0 && cddp__color_of(g, members[i - 1]).key > c.key; i--)
      members[i] = members[i - 1];
    members[i] = p;
    n++;
  }
  return n;
}

static cddp_result cddp__split_step(cddp_group *g, uint64_t check, uint32_t phase) {
  cddp__call c;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_GROUP_NEW;
  return cddp__sync(g, cddp__call_code(&c, phase), check, -1, 0, cddp__serve_idle);
}

/* Allocates the control block on the first member, maps it on all; false if this rank could not. */
static cddp_result cddp__share_board(cddp_group *g, const int *members, int n, cddp__ref *ref,
                                     char **board, bool *mine) {
  cddp__line *line = cddp__begin(g);
  void *p = NULL;
  cddp_result r;
  size_t bytes;
  int first = 0, here = 0, i; /* the board is its host's first member's, a host's members many */
  for (i = n - 1; i >= 0; i--) {
    if (g->members[members[i]] < 0) continue;
    first = i;
    here++;
  }
  bytes = cddp__board_bytes(n, here);
  *mine = n > 0 && members[first] == g->rank;
  *board = NULL;
  memset(line->u.bytes, 0, CDDP__INLINE);
  if (*mine) {
    cddp__reap_boards(g->host);
    p = cddp__arena_alloc(g->host, bytes);
    if (p != NULL) {
      ((cddp__board *)p)->size = (uint32_t)here;
      line->u.ref = cddp__ref_of(g->host, p, bytes);
    }
  }
  if ((r = cddp__split_step(g, 0, 1)) != CDDP_OK) return r;
  if (n == 0) return CDDP_OK;
  *ref = cddp__line_of(g, members[first], g->step)->u.ref;
  if (ref->kind == CDDP__REF_NONE)
    cddp__fail(CDDP_OUT_OF_MEMORY, "rank %d had no memory for the new group", members[first]);
  else if (cddp__locate(g->host, ref, &p) == CDDP_OK)
    *board = (char *)p;
  return CDDP_OK;
}

/* Tells the parent's ranks whether this one succeeded; an error if a member of its group did not.
 */
static cddp_result cddp__agree(cddp_group *g, const int *members, int n, bool ok) {
  cddp__line *line = cddp__begin(g);
  cddp_result r;
  int i;
  line->u.bytes[0] = ok ? 1 : 0;
  if ((r = cddp__split_step(g, 0, 2)) != CDDP_OK) return r;
  if (!ok) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < n; i++)
    if (cddp__line_of(g, members[i], g->step)->u.bytes[0] == 0)
      return cddp__fail(CDDP_OUT_OF_MEMORY, "rank %d had no memory for the new group", members[i]);
  return CDDP_OK;
}

static void cddp__group_free(cddp_group *g) {
  cddp__host *h = g->host;
  pthread_mutex_destroy(&g->fail_lock);
  pthread_mutex_destroy(&g->mail_lock);
  pthread_mutex_destroy(&g->engine.lock);
  pthread_cond_destroy(&g->engine.changed);
  cddp__free(&h->allocator, g->members);
  cddp__free(&h->allocator, g->world);
  cddp__free(&h->allocator, g->hosts);
  cddp__free(&h->allocator, g);
  cddp__host_release(h);
}

/* Leaves the group: what peers wait for from now on is lost. */
static void cddp__group_leave(cddp_group *g) {
  cddp__seat *seat = cddp__seat_of(g, g->rank);
  cddp__host *h = g->host;
  bool busy;
  int i;
  if (g->backend != NULL) g->backend->leave(g);
  pthread_mutex_lock(&g->engine.lock);
  busy = g->engine.started && (g->engine.busy || g->engine.first != NULL);
  pthread_mutex_unlock(&g->engine.lock);
  if (busy) {
    cddp__fail(CDDP_ABORTED, "rank %d destroyed the group while an operation was in flight",
               g->rank);
    cddp__break(g, CDDP_ABORTED);
  }
  cddp__engine_stop(g);
  cddp__hosts_leave(g);
  for (i = 0; i < CDDP__PARCELS; i++) /* messages not yet received stay where they are */
    if (!cddp__parcel_open(g, i))
      cddp__arena_free(h, g->outgoing[i].stage);
#ifdef CDDP_MPI
  cddp__mpi_leave(g);
#endif
  (void)cddp__swap32(&seat->state, CDDP__SEAT_TAKEN, CDDP__SEAT_LEFT);
  cddp__wake_all(g);
  cddp__add32(&g->board->left, 1);
  if (g->board_ref.kind == CDDP__REF_NONE) { /* the first group of its host */
    size_t bytes = cddp__board_bytes(g->size, g->locals);
    if (!h->threads || g->size == 1)
      munmap(g->board_memory, cddp__round_up(bytes, cddp__page_size()));
  } else if (g->board_mine) {
    cddp__reap_boards(h);
    if (h->zombie_count < (int)(sizeof h->zombies / sizeof h->zombies[0]))
      h->zombies[h->zombie_count++] = g->board_ref;
    cddp__reap_boards(h);
  }
  cddp__group_free(g);
}

/* All three go through the hash: links of other hosts find their group by this number alone. */
static uint64_t cddp__child_id(const cddp_group *g, int color) {
  uint64_t of[3];
  of[0] = g->id;
  of[1] = g->calls;
  of[2] = (uint64_t)color;
  return cddp__hash64(0, of, sizeof of);
}

/* check: a hash that must agree on all ranks of g. */
static cddp_result cddp__split(cddp_group *g, int color, int key, uint64_t check,
                               cddp_group **out) {
  const cddp_allocator *a = &g->host->allocator;
  int *members = (int *)cddp__calloc(a, 2 * (size_t)g->size, sizeof *members), n, i, rank = 0;
  cddp__color mine;
  cddp__ref ref;
  char *board = NULL;
  bool owner = false, attached = false;
  cddp_result r = CDDP_OUT_OF_MEMORY;
  uint64_t record;
  *out = NULL;
  if (members == NULL) return cddp__break(g, r);
  mine.color = color;
  mine.key = key;
  g->calls++;
  record = cddp__record_begin(g, CDDP__KIND_GROUP_NEW, g->calls, 0);
  memcpy(cddp__begin(g)->u.bytes, &mine, sizeof mine);
  if ((r = cddp__split_step(g, check, 0)) != CDDP_OK) goto done;
  n = color >= 0 ? cddp__pick_members(g, color, members) : 0;
  if ((r = cddp__share_board(g, members, n, &ref, &board, &owner)) != CDDP_OK) goto done;
  for (i = 0; i < n; i++) {
    if (members[i] == g->rank) rank = i;
    members[g->size + i] = g->members[members[i]];
  }
  if (board != NULL &&
      cddp__group_build(out, g->host, rank, n, members + g->size, board, g->timeout_s) == CDDP_OK) {
    (*out)->board_ref = ref;
    (*out)->board_mine = owner;
    (*out)->id = cddp__child_id(g, color);
    for (i = 0; g->world != NULL && i < n; i++) members[i + g->size] = g->world[members[i]];
    attached = cddp__hosts_attach(*out, members + g->size) == CDDP_OK;
  }
  r = cddp__agree(g, members, n, n == 0 || attached);
  if (r != CDDP_OK && *out != NULL) {
    cddp__group_leave(*out);
    *out = NULL;
  }
#ifdef CDDP_MPI
  if (r == CDDP_OK && g->mpi != NULL &&
      (r = cddp__mpi_split(g, *out, color, rank)) != CDDP_OK && *out != NULL) {
    cddp__group_leave(*out);
    *out = NULL;
  }
#endif
  if (*out != NULL) cddp__hosts_register(*out);
done:
  cddp__free(a, members);
  cddp__record_finish(g, record, r);
  return r;
}

/* The first step of a new group: every rank has come, and rank 0's number names the job. */
static cddp_result cddp__first_step(cddp_group *g) {
  cddp__line *line = cddp__begin(g);
  cddp__call c;
  cddp_result r;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_BARRIER;
  cddp__put64(line->u.bytes, cddp__record_job());
  if ((r = cddp__sync(g, cddp__call_code(&c, 0), 0, -1, 0, NULL)) != CDDP_OK) return r;
  return cddp__record_open(&g->host->record, cddp__get64(cddp__line_of(g, 0, g->step)->u.bytes),
                           g->rank, g->size);
}

/* The ranks have met, but this one cannot come to the first step: it may not even have the memory
   to map the board on which the others would read why. */
static void cddp__break_unmapped(const cddp__host *h, cddp_result r) {
  cddp__audience all;
  char text[CDDP__ERROR_MAX];
  uint32_t broken = 2 + (uint32_t)r;
  memset(text, 0, sizeof text);
  snprintf(text, sizeof text, "rank %d failed while the ranks were meeting: %.*s",
           h->net != NULL ? h->net->rank : h->index, CDDP__ERROR_MAX - 64, cddp_error());
  if (pwrite(h->fd, text, sizeof text, offsetof(cddp__board, broken_text)) == (ssize_t)sizeof text)
    (void)!pwrite(h->fd, &broken, sizeof broken, offsetof(cddp__board, broken));
  if (h->net == NULL) return;
  memset(&all, 0, sizeof all);
  all.net = h->net;
  all.size = h->net->size;
  cddp__tell_all(&all, (uint32_t)r, text);
}

#ifdef CDDP_MPI
static bool cddp__wants_mpi(const cddp_group_desc *d) {
  const char *backend = cddp__backend_name(d);
  return backend != NULL && strcmp(backend, "mpi") == 0;
}

/* MPI's communicator for the group of all ranks, if every rank can have it. */
static cddp_result cddp__mpi_world(cddp_group *g) {
  cddp_result r = cddp__mpi_start(g), all;
  int32_t ready = r == CDDP_OK;
  char text[CDDP__ERROR_MAX];
  cddp__call c;
  snprintf(text, sizeof text, "%s", r != CDDP_OK ? cddp_error() : "");
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_ALL_REDUCE;
  c.dtype = CDDP_I32;
  c.op = CDDP_MIN;
  c.root = -1;
  c.send = c.recv = &ready;
  c.count = 1;
  c.esize = sizeof ready;
  if ((all = cddp__run_call(g, &c)) != CDDP_OK) return all;
  if (r != CDDP_OK) return cddp__fail(r, "%s", text);
  if (!ready) return cddp__fail(CDDP_MPI, "another rank cannot use MPI; it says why");
  return cddp__mpi_split(NULL, g, 0, g->rank);
}
#endif

static cddp_result cddp__init(cddp_group **out, const cddp_group_desc *d) {
  cddp__place at;
  cddp__host *h;
  cddp_result r;
  if ((r = cddp__discover(&at, d)) != CDDP_OK) return r;
  h = cddp__host_create(&d->allocator, &d->logger, at.world_size, at.rank);
  if (h == NULL) return CDDP_OUT_OF_MEMORY;
  h->threads = at.world_size == 1;
  if (at.world_size > 1) r = cddp__meet(&at, d, h);
  if (r == CDDP_OK && at.world_size > 1) cddp__watch_processes(h);
  if (r == CDDP_OK) r = cddp__world_group(out, h, at.rank, at.world_size, at.timeout_s);
  if (r != CDDP_OK && h->fd >= 0) cddp__break_unmapped(h, r);
  cddp__host_release(h);
  if (r != CDDP_OK) return r;
  if ((r = cddp__hosts_attach(*out, NULL)) == CDDP_OK) {
    cddp__hosts_register(*out);
    r = cddp__first_step(*out);
  }
#ifdef CDDP_MPI
  if (r == CDDP_OK && cddp__wants_mpi(d)) r = cddp__mpi_world(*out);
#endif
  if (r != CDDP_OK) {
    cddp__group_leave(*out);
    *out = NULL;
    return r;
  }
  cddp__log(&d->logger, 2, "rank %d of %d is ready (pid %d, %d cores%s)", at.rank, at.world_size,
            (int)getpid(), (*out)->host->cores, (*out)->crowded ? ", shared by more ranks" : "");
  return r;
}
/* >>sparse -------------------------------------------------------------------------------------
   Gradients that are rows of a parameter, as an embedding's are. Works as follows: backward adds
   (number of the row, values) as it finds them. At the step each rank sorts its own by number and
   adds up those of one number, in the order in which they came, into a packet that its peers read.
   Each rank then walks through the sorted lists of all ranks at once; a row's mean is the canonical
   sum, a rank without the row counting as zeros, so the bits are a dense gradient's. Pure. */

typedef struct cddp__row_order {
  int64_t number;
  size_t at; /* its place in the list */
} cddp__row_order;

/* One rank's list while it is merged. */
typedef struct cddp__row_list {
  const int64_t *number;
  const char *values;
  size_t n, next; /* rows, and the first that is not merged */
  char *packet;   /* what follows in the rank's packet */
} cddp__row_list;

/* A list in a packet begins with this; then numbers, then values, each on a cache line. */
typedef struct cddp__row_head {
  uint64_t n, bound; /* rows, and for how many there is room */
  unsigned char pad[CDDP__CACHE_LINE - 16];
} cddp__row_head;

static void cddp__rows_free(const cddp_allocator *a, cddp__rows *r) {
  cddp__free(a, r->number);
  cddp__free(a, r->values);
  cddp__free(a, r->order);
  memset(r, 0, sizeof *r);
}

/* Room for n rows; those held stay. */
static cddp_result cddp__rows_reserve(const cddp_allocator *a, cddp__rows *r, size_t n,
                                      size_t bytes) {
  cddp__rows big;
  if (n <= r->capacity) return CDDP_OK;
  memset(&big, 0, sizeof big);
  big.n = r->n;
  big.capacity = cddp__max(n, r->capacity + r->capacity / 2);
  big.number = (int64_t *)cddp__calloc(a, big.capacity, sizeof *big.number);
  big.values = (char *)cddp__calloc(a, big.capacity, bytes);
  big.order = (cddp__row_order *)cddp__calloc(a, big.capacity, sizeof *big.order);
  if (big.number == NULL || big.values == NULL || big.order == NULL) {
    cddp__rows_free(a, &big);
    return CDDP_OUT_OF_MEMORY;
  }
  if (r->n > 0) {
    memcpy(big.number, r->number, r->n * sizeof *r->number);
    memcpy(big.values, r->values, r->n * bytes);
  }
  cddp__rows_free(a, r);
  *r = big;
  return CDDP_OK;
}

static cddp_result cddp__rows_add(const cddp_allocator *a, cddp__rows *r, size_t bytes,
                                  const int64_t *numbers, const void *values, size_t n) {
  cddp_result e;
  if (n == 0) return CDDP_OK;
  if ((e = cddp__rows_reserve(a, r, r->n + n, bytes)) != CDDP_OK) return e;
  memcpy(r->number + r->n, numbers, n * sizeof *numbers);
  memcpy(r->values + r->n * bytes, values, n * bytes);
  r->n += n;
  return CDDP_OK;
}

static void cddp__sparse_free(const cddp_allocator *a, cddp__sparse *p) {
  if (p == NULL) return;
  cddp__rows_free(a, &p->added);
  cddp__rows_free(a, &p->mean);
  cddp__free(a, p->zeros);
  cddp__free(a, p);
}

static cddp__sparse *cddp__sparse_new(const cddp_allocator *a, const cddp_param *p, size_t rows) {
  cddp__sparse *s = (cddp__sparse *)cddp__calloc(a, 1, sizeof *s);
  if (s == NULL) return NULL;
  s->rows = rows;
  s->width = p->count / rows;
  s->bytes = s->width * cddp__dtype_size(p->dtype);
  s->zeros = (char *)cddp__calloc(a, 1, s->bytes);
  if (s->zeros != NULL) return s;
  cddp__sparse_free(a, s);
  return NULL;
}

static int cddp__by_number(const void *x, const void *y) {
  const cddp__row_order *a = (const cddp__row_order *)x, *b = (const cddp__row_order *)y;
  if (a->number != b->number) return a->number < b->number ? -1 : 1;
  return a->at < b->at ? -1 : a->at > b->at;
}

static size_t cddp__row_list_bytes(const cddp__sparse *s, size_t n) {
  return sizeof(cddp__row_head) + cddp__round_up(n * sizeof(int64_t), CDDP__CACHE_LINE) +
         cddp__round_up(n * s->bytes, CDDP__CACHE_LINE);
}

/* Opens the list at l->packet, with room for `bound` rows, and moves on behind it. */
static void cddp__row_list_open(const cddp__sparse *s, cddp__row_list *l, size_t bound) {
  char *at = l->packet + sizeof(cddp__row_head);
  l->number = (const int64_t *)(const void *)at;
  l->values = at + cddp__round_up(bound * sizeof(int64_t), CDDP__CACHE_LINE);
  l->packet += cddp__row_list_bytes(s, bound);
  l->next = 0;
}

/* Writes the n rows added, sorted and summed by number, to packet; returns where it ends. */
static char *cddp__rows_pack(cddp__sparse *s, size_t n, cddp_dtype dtype, char *packet) {
  cddp__row_head *head = (cddp__row_head *)(void *)packet;
  cddp__row_order *order = s->added.order;
  cddp__row_list l;
  const void *pair[2];
  int64_t *number;
  size_t i;
  l.packet = packet;
  cddp__row_list_open(s, &l, n);
  number = (int64_t *)(void *)(packet + sizeof *head);
  head->bound = n;
  head->n = 0;
  for (i = 0; i < n; i++) {
    order[i].number = s->added.number[i];
    order[i].at = i;
  }
  if (n > 1) qsort(order, n, sizeof *order, cddp__by_number);
  for (i = 0; i < n; i++) {
    const char *from = s->added.values + order[i].at * s->bytes;
    bool again = i > 0 && order[i].number == order[i - 1].number;
    char *to = packet + (l.values - packet) + (head->n - again) * s->bytes;
    pair[0] = to;
    pair[1] = from;
    if (again) {
      cddp__reduce(to, pair, 2, s->width, dtype, CDDP_SUM);
    } else {
      memcpy(to, from, s->bytes);
      number[head->n++] = order[i].number;
    }
  }
  return l.packet;
}

/* The mean over n ranks' lists, which stand at this parameter's list; sources: scratch [n]. */
static cddp_result cddp__rows_merge(const cddp_allocator *a, cddp__sparse *s, cddp__row_list *lists,
                                    int n, const void **sources, cddp_dtype dtype) {
  size_t total = 0;
  cddp_result r;
  int k;
  for (k = 0; k < n; k++) {
    const cddp__row_head *head = (const cddp__row_head *)(const void *)lists[k].packet;
    lists[k].n = (size_t)head->n;
    cddp__row_list_open(s, &lists[k], (size_t)head->bound);
    total += lists[k].n;
  }
  s->mean.n = 0;
  r = cddp__rows_reserve(a, &s->mean, cddp__min(total, s->rows), s->bytes);
  while (r == CDDP_OK) {
    int64_t number = INT64_MAX;
    for (k = 0; k < n; k++)
      if (lists[k].next < lists[k].n && lists[k].number[lists[k].next] < number)
        number = lists[k].number[lists[k].next];
    if (number == INT64_MAX) break;
    for (k = 0; k < n; k++) {
      bool has = lists[k].next < lists[k].n && lists[k].number[lists[k].next] == number;
      sources[k] = has ? lists[k].values + lists[k].next++ * s->bytes : s->zeros;
    }
    cddp__reduce(s->mean.values + s->mean.n * s->bytes, sources, n, s->width, dtype, CDDP_AVG);
    s->mean.number[s->mean.n++] = number;
  }
  return r;
}
/* >>sgd ----------------------------------------------------------------------------------------
   The arithmetic of torch.optim.SGD, to the last bit: every a + s * b is one fused multiply-add, as
   in PyTorch's AVX2 kernels, or (separate) is rounded after the multiply, as without AVX2. Scalars
   are computed in double and rounded once to the parameter's dtype. f16 and bf16 compute each
   operation in f32 and round its result, as PyTorch's vector loops do; its scalar loops, which take
   the last elements of each thread's chunk of bf16, round the product too. */

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define CDDP__SGD_LOOPS(T, S, FMA)                                                                \
  CDDP__TEMPLATE void cddp__add_##S(T *d, const T *a, const T *b, size_t n, T f, bool separate) { \
    CDDP__STRICT_FP                                                                               \
    if (separate) CDDP__EACH(T x = f * b[i]; d[i] = a[i] + x);                                    \
    else CDDP__EACH(d[i] = FMA(f, b[i], a[i]));                                                   \
  }                                                                                               \
  CDDP__TEMPLATE void cddp__mix_##S(T *m, const T *b, size_t n, T momentum, T f, bool separate) { \
    CDDP__STRICT_FP                                                                               \
    if (separate) CDDP__EACH(T x = momentum * m[i]; T y = f * b[i]; m[i] = x + y);                \
    else CDDP__EACH(T x = momentum * m[i]; m[i] = FMA(f, b[i], x));                               \
  }
CDDP__SGD_LOOPS(cddp__f32, f32, __builtin_fmaf)
CDDP__SGD_LOOPS(cddp__f64, f64, __builtin_fma)
#undef CDDP__SGD_LOOPS

/* Reads and writes everything once, in one loop: the memory is busy all the time. */
#define CDDP__SWEEP(MEAN, OTHERS)                           \
  CDDP__EACH(float v = MEAN; float x = momentum * m[i];     \
             if (decay) v = __builtin_fmaf(rate, w0[i], v); \
             v = __builtin_fmaf(intake, v, x);              \
             x = __builtin_fmaf(step, v, w0[i]);            \
             m[i] = v; w0[i] = x; g0[i] = 0; OTHERS)

CDDP__TEMPLATE void cddp__sweep_as(const cddp__sweep *s, int ranks, bool decay, size_t n) {
  CDDP__STRICT_FP
  float mean = s->mean, momentum = s->momentum_factor, intake = s->intake, rate = s->decay,
        step = s->step;
  cddp__f32 *m = s->momentum, *g0 = s->gradients[0], *g1 = s->gradients[1], *g2 = s->gradients[2],
            *g3 = s->gradients[3];
  cddp__f32 *w0 = s->weights[0], *w1 = s->weights[1], *w2 = s->weights[2], *w3 = s->weights[3];
  if (ranks == 1) {
    CDDP__SWEEP(g0[i], );
  } else if (ranks == 2) {
    CDDP__SWEEP((g0[i] + g1[i]) * mean, w1[i] = x; g1[i] = 0);
  } else {
    CDDP__SWEEP(((g0[i] + g1[i]) + (g2[i] + g3[i])) * mean,
                w1[i] = x; w2[i] = x; w3[i] = x; g1[i] = 0; g2[i] = 0; g3[i] = 0);
  }
}
#undef CDDP__SWEEP

CDDP__TEMPLATE void cddp__sweep_any(const cddp__sweep *s, int ranks, size_t n) {
  bool decay = s->decays;
  if (ranks == 1) decay ? cddp__sweep_as(s, 1, true, n) : cddp__sweep_as(s, 1, false, n);
  else if (ranks == 2) decay ? cddp__sweep_as(s, 2, true, n) : cddp__sweep_as(s, 2, false, n);
  else decay ? cddp__sweep_as(s, 4, true, n) : cddp__sweep_as(s, 4, false, n);
}

#define CDDP__SGD_SET(ISA, TARGET)                                                                \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__add_f32_##ISA(cddp__f32 *d, const cddp__f32 *a, const cddp__f32 *b, size_t n, \
                                  float f, bool separate) {                                       \
    cddp__add_f32(d, a, b, n, f, separate);                                                       \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__add_f64_##ISA(cddp__f64 *d, const cddp__f64 *a, const cddp__f64 *b, size_t n, \
                                  double f, bool separate) {                                      \
    cddp__add_f64(d, a, b, n, f, separate);                                                       \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__mix_f32_##ISA(cddp__f32 *m, const cddp__f32 *b, size_t n, float momentum,     \
                                  float f, bool separate) {                                       \
    cddp__mix_f32(m, b, n, momentum, f, separate);                                                \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__mix_f64_##ISA(cddp__f64 *m, const cddp__f64 *b, size_t n, double momentum,    \
                                  double f, bool separate) {                                      \
    cddp__mix_f64(m, b, n, momentum, f, separate);                                                \
  }                                                                                               \
  TARGET CDDP__KERNEL                                                                             \
  static void cddp__sweep_##ISA(const cddp__sweep *s, int ranks, size_t n) {                      \
    cddp__sweep_any(s, ranks, n);                                                                 \
  }                                                                                               \
  static const cddp__sgd_kernels cddp__sgd_kernels_##ISA = {                                      \
      cddp__add_f32_##ISA, cddp__add_f64_##ISA, cddp__mix_f32_##ISA, cddp__mix_f64_##ISA,         \
      cddp__sweep_##ISA};

CDDP__SGD_SET(base, )
#if CDDP__DISPATCH
CDDP__SGD_SET(avx2, CDDP__AVX2)
CDDP__SGD_SET(avx512, CDDP__AVX512)
#endif
#undef CDDP__SGD_SET

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

static const cddp__sgd_kernels *cddp__pick_sgd_kernels(void) {
  switch (cddp__isa()) {
#if CDDP__DISPATCH
  case CDDP__ISA_AVX512: return &cddp__sgd_kernels_avx512;
  case CDDP__ISA_AVX2: return &cddp__sgd_kernels_avx2;
#endif
  default: return &cddp__sgd_kernels_base;
  }
}

static void cddp__sgd_rule_init(cddp__sgd_rule *r, const cddp_sgd_desc *d) {
  r->step = -d->lr;
  r->momentum = d->momentum;
  r->intake = 1.0 - d->dampening;
  r->decay = d->weight_decay;
  r->nesterov = d->nesterov;
  r->maximize = d->maximize;
  r->separate = d->separate_mul_add;
}

static bool cddp__rule_sweeps(const cddp__sgd_rule *r) {
  return r->momentum != 0 && !r->nesterov && !r->maximize && !r->separate;
}

static cddp__sweep cddp__sweep_of(const cddp__sgd_rule *r, int ranks) { /* but for the arrays */
  cddp__sweep s;
  memset(&s, 0, sizeof s);
  s.mean = 1.0f / (float)ranks;
  s.momentum_factor = (float)r->momentum;
  s.intake = (float)r->intake;
  s.decay = (float)r->decay;
  s.decays = r->decay != 0;
  s.step = (float)r->step;
  return s;
}

/* One pass over a block in the compute type: F32 for F16 and BF16, whose results are rounded. */
typedef struct cddp__sgd_pass {
  const cddp__kernels *kernels;
  const cddp__sgd_kernels *sgd;
  cddp_dtype dtype;
  bool halves, separate;
} cddp__sgd_pass;

static double cddp__sgd_scalar(const cddp__sgd_pass *k, double x) {
  float y = cddp__round_odd(x);
  if (k->dtype == CDDP_F16) return (double)cddp__f16_to_f32(cddp__f32_to_f16(y));
  if (k->dtype == CDDP_BF16) return (double)cddp__bf16_to_f32(cddp__f32_to_bf16(y));
  return x;
}

static void cddp__sgd_round(const cddp__sgd_pass *k, void *d, size_t n) {
  uint16_t rounded[CDDP__BLOCK_BYTES / sizeof(float)];
  if (!k->halves) return;
  k->kernels->narrow(rounded, (cddp__f32 *)d, n, k->dtype);
  k->kernels->widen((cddp__f32 *)d, rounded, n, k->dtype);
}

static void cddp__sgd_add(const cddp__sgd_pass *k, void *d, const void *a, const void *b, size_t n,
                          double f) { /* d = a + f * b */
  f = cddp__sgd_scalar(k, f);
  if (k->dtype == CDDP_F64) {
    k->sgd->add_f64((cddp__f64 *)d, (const cddp__f64 *)a, (const cddp__f64 *)b, n, f, k->separate);
  } else {
    k->sgd->add_f32((cddp__f32 *)d, (const cddp__f32 *)a, (const cddp__f32 *)b, n, (float)f,
                    k->separate);
  }
  cddp__sgd_round(k, d, n);
}

static void cddp__sgd_mix(const cddp__sgd_pass *k, void *m, const void *b, size_t n,
                          double momentum, double f) { /* m = momentum * m + f * b */
  if (k->halves) {
    k->kernels->scale(m, n, CDDP_F32, cddp__sgd_scalar(k, momentum), false);
    cddp__sgd_round(k, m, n);
    cddp__sgd_add(k, m, m, b, n, f);
  } else if (k->dtype == CDDP_F64) {
    k->sgd->mix_f64((cddp__f64 *)m, (const cddp__f64 *)b, n, momentum, f, k->separate);
  } else {
    k->sgd->mix_f32((cddp__f32 *)m, (const cddp__f32 *)b, n, (float)momentum, (float)f,
                    k->separate);
  }
}

/* Works as follows, on a block that stays in the first cache, all in the compute type:
   d = g; d = -d if maximize; d = d + decay * p; m = first ? d : momentum * m + intake * d;
   d = nesterov ? d + momentum * m : m; p_out = p - lr * d.
   d is g or m itself where it is equal, else in buf. */
static void cddp__sgd_block(const cddp__sgd_rule *r, const cddp__sgd_pass *k, void *p_out,
                            const void *p, const void *g, void *m, size_t n, bool first) {
  double buf[CDDP__BLOCK_BYTES / sizeof(double)];
  cddp_dtype compute = k->halves ? CDDP_F32 : k->dtype;
  const void *d = g;
  if (r->maximize) {
    memcpy(buf, g, n * cddp__dtype_size(compute));
    k->kernels->scale(buf, n, compute, -1.0, false);
    d = buf;
  }
  if (r->decay != 0) {
    cddp__sgd_add(k, buf, d, p, n, r->decay);
    d = buf;
  }
  if (r->momentum != 0) {
    if (first) memcpy(m, d, n * cddp__dtype_size(compute));
    else cddp__sgd_mix(k, m, d, n, r->momentum, r->intake);
    if (r->nesterov) cddp__sgd_add(k, buf, d, m, n, r->momentum);
    d = r->nesterov ? buf : m;
  }
  cddp__sgd_add(k, p_out, p, d, n, r->step);
}

/* The same for F16 and BF16: widened, computed, narrowed. */
static void cddp__sgd_half_block(const cddp__sgd_rule *r, const cddp__sgd_pass *k, void *p_out,
                                 const void *p, const void *g, void *m, size_t n, bool first) {
  float wide_p[CDDP__BLOCK_BYTES / sizeof(float)], wide_g[CDDP__BLOCK_BYTES / sizeof(float)];
  float wide_m[CDDP__BLOCK_BYTES / sizeof(float)];
  k->kernels->widen(wide_p, p, n, k->dtype);
  k->kernels->widen(wide_g, g, n, k->dtype);
  if (m != NULL && !first) k->kernels->widen(wide_m, m, n, k->dtype);
  cddp__sgd_block(r, k, wide_p, wide_p, wide_g, wide_m, n, first);
  k->kernels->narrow(p_out, wide_p, n, k->dtype);
  if (m != NULL) k->kernels->narrow(m, wide_m, n, k->dtype);
}

/* p_out[i] = one step from p_in[i] with gradient g[i]; p_out may be p_in. Elementwise: any piece of
   a parameter may be done on its own. momentum: NULL if the rule has none; first: no value yet. */
static void cddp__sgd_update(const cddp__sgd_rule *r, cddp_dtype dtype, void *p_out,
                             const void *p_in, const void *g, void *momentum, size_t n,
                             bool first) {
  size_t at, m, esize = cddp__dtype_size(dtype), block;
  cddp__sgd_pass k;
  k.kernels = cddp__pick_kernels();
  k.sgd = cddp__pick_sgd_kernels();
  k.dtype = dtype;
  k.halves = dtype == CDDP_F16 || dtype == CDDP_BF16;
  k.separate = r->separate;
  block = CDDP__BLOCK_BYTES / (k.halves ? sizeof(float) : esize);
  for (at = 0; at < n; at += block) {
    char *out = (char *)p_out + at * esize;
    const char *p = (const char *)p_in + at * esize, *d = (const char *)g + at * esize;
    char *buf = momentum != NULL ? (char *)momentum + at * esize : NULL;
    m = cddp__min(block, n - at);
    if (k.halves) cddp__sgd_half_block(r, &k, out, p, d, buf, m, first);
    else cddp__sgd_block(r, &k, out, p, d, buf, m, first);
  }
}

static bool cddp__dtype_trains(cddp_dtype d) { return (unsigned)d <= (unsigned)CDDP_BF16; }

static cddp_result cddp__sgd_check(const cddp_param *params, int count, const cddp_sgd_desc *d) {
  int i;
  if (d == NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "desc is NULL; the learning rate has no default");
  if (count < 0 || (count > 0 && params == NULL))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "params is NULL or count %d is negative", count);
  if (!(d->lr >= 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "lr is %g; it must be at least 0", d->lr);
  if (!(d->momentum >= 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "momentum is %g; it must be at least 0", d->momentum);
  if (!(d->weight_decay >= 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "weight_decay is %g; it must be at least 0",
                      d->weight_decay);
  if (d->dampening != d->dampening)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "dampening is not a number");
  if (d->nesterov && (!(d->momentum > 0) || d->dampening != 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "nesterov needs momentum > 0 and dampening 0; they are %g and %g",
                      d->momentum, d->dampening);
  if (d->copies != NULL && d->copy_dtype != CDDP_F16 && d->copy_dtype != CDDP_BF16)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "copy_dtype is %d; it must be CDDP_F16 or CDDP_BF16",
                      (int)d->copy_dtype);
  for (i = 0; i < count; i++) {
    const char *name = params[i].name != NULL ? params[i].name : "unnamed";
    if (!cddp__dtype_trains(params[i].dtype))
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "parameter %d (%s) has dtype %d; F32, F64, F16 and BF16 can be trained", i,
                        name, (int)params[i].dtype);
    if (d->copies != NULL && d->copies[i] != NULL && params[i].dtype != CDDP_F32)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "parameter %d (%s) is %s; only f32 weights have copies", i, name,
                        cddp__dtype_names[params[i].dtype]);
  }
  return CDDP_OK;
}

static void cddp__sgd_free(cddp_sgd *s) {
  cddp_allocator a;
  int i;
  if (s == NULL) return;
  a = s->allocator;
  for (i = 0; s->momentum != NULL && i < s->count; i++) cddp__free(&a, s->momentum[i]);
  cddp__free(&a, s->momentum);
  cddp__free(&a, s->started);
  cddp__free(&a, s->copies);
  cddp__free(&a, s);
}

static cddp_result cddp__sgd_create(cddp_sgd **out, cddp_param *params, int count,
                                    const cddp_sgd_desc *desc, const cddp_allocator *a) {
  cddp_result r;
  cddp_sgd *s;
  if (out == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sgd_create: out is NULL");
  *out = NULL;
  r = cddp__sgd_check(params, count, desc);
  if (r != CDDP_OK) return cddp__fail_in(r, "cddp_sgd_create: ");
  s = (cddp_sgd *)cddp__calloc(a, 1, sizeof *s);
  if (s == NULL) return cddp__fail_in(CDDP_OUT_OF_MEMORY, "cddp_sgd_create: ");
  if (a != NULL) s->allocator = *a;
  s->params = params;
  s->count = count;
  s->desc = *desc;
  cddp__sgd_rule_init(&s->rule, desc);
  s->momentum = (void **)cddp__calloc(a, (size_t)count, sizeof *s->momentum);
  s->started = (bool *)cddp__calloc(a, (size_t)count, sizeof *s->started);
  if (desc->copies != NULL) s->copies = (void **)cddp__calloc(a, (size_t)count, sizeof *s->copies);
  if (s->momentum == NULL || s->started == NULL || (desc->copies != NULL && s->copies == NULL)) {
    cddp__sgd_free(s);
    return cddp__fail_in(CDDP_OUT_OF_MEMORY, "cddp_sgd_create: ");
  }
  if (s->copies != NULL) memcpy(s->copies, desc->copies, (size_t)count * sizeof *s->copies);
  *out = s;
  return CDDP_OK;
}

static bool cddp__sgd_skips(const cddp_sgd *s, int i) {
  return s->params[i].count == 0 || (s->used != NULL && !s->used[i]);
}

/* Brings n elements of parameter i's copy, if it has one, up to date. */
static void cddp__sgd_copy(const cddp_sgd *s, int i, size_t from, size_t n) {
  if (s->copies != NULL && s->copies[i] != NULL)
    cddp__convert((uint16_t *)s->copies[i] + from, s->desc.copy_dtype,
                  (const float *)s->params[i].data + from, CDDP_F32, n);
}

static void cddp__sgd_copy_all(const cddp_sgd *s) {
  int i;
  for (i = 0; i < s->count; i++)
    if (s->params[i].data != NULL) cddp__sgd_copy(s, i, 0, s->params[i].count);
}

/* One step of a parameter; its copy while the new weights are in the cache. */
static void cddp__sgd_dense(cddp_sgd *s, int i) {
  const cddp_param *p = &s->params[i];
  size_t size = cddp__dtype_size(p->dtype), at, n;
  bool copied = s->copies != NULL && s->copies[i] != NULL;
  for (at = 0; at < p->count; at += n) {
    char *momentum = (char *)s->momentum[i], *weights = (char *)p->data + at * size;
    n = copied ? cddp__min(p->count - at, (size_t)CDDP__BLOCK_BYTES / sizeof(float)) : p->count;
    cddp__sgd_update(&s->rule, p->dtype, weights, weights, (char *)p->grad + at * size,
                     momentum != NULL ? momentum + at * size : NULL, n, !s->started[i]);
    cddp__sgd_copy(s, i, at, n);
  }
}

/* One step of a parameter whose gradient is rows: what a dense gradient with zeros elsewhere would
   do. Without momentum the other rows stay as they are and are not looked at. */
static void cddp__sgd_rows(cddp_sgd *s, int i, const cddp__sparse *g) {
  const cddp_param *p = &s->params[i];
  size_t k, row;
  for (k = 0; s->rule.momentum == 0 && k < g->mean.n; k++) {
    char *weights = (char *)p->data + (size_t)g->mean.number[k] * g->bytes;
    cddp__sgd_update(&s->rule, p->dtype, weights, weights, g->mean.values + k * g->bytes, NULL,
                     g->width, false);
    cddp__sgd_copy(s, i, (size_t)g->mean.number[k] * g->width, g->width);
  }
  for (k = row = 0; s->rule.momentum != 0 && row < g->rows; row++) {
    bool has = k < g->mean.n && (size_t)g->mean.number[k] == row;
    char *weights = (char *)p->data + row * g->bytes;
    cddp__sgd_update(&s->rule, p->dtype, weights, weights,
                     has ? g->mean.values + k * g->bytes : g->zeros,
                     (char *)s->momentum[i] + row * g->bytes, g->width, !s->started[i]);
    cddp__sgd_copy(s, i, row * g->width, g->width);
    k += has;
  }
}

static cddp_result cddp__sgd_check_rows(const cddp_sgd *s, int i) {
  const char *name = s->params[i].name != NULL ? s->params[i].name : "unnamed";
  if (s->rule.decay == 0) return CDDP_OK;
  return cddp__fail(CDDP_UNSUPPORTED,
                    "parameter %d (%s) has rows as its gradient, which go without weight_decay; "
                    "set that to 0, or have a dense gradient",
                    i, name);
}

static const cddp__sparse *cddp__sgd_sparse(const cddp_sgd *s, int i) { /* NULL: it is dense */
  return s->sparse != NULL ? s->sparse[i] : NULL;
}

/* Checks and allocates all that a step needs, so that a step is done as a whole or not at all. */
static cddp_result cddp__sgd_prepare(cddp_sgd *s) {
  int i;
  for (i = 0; i < s->count; i++) {
    const cddp_param *p = &s->params[i];
    const char *name = p->name != NULL ? p->name : "unnamed";
    bool sparse = cddp__sgd_sparse(s, i) != NULL;
    if (cddp__sgd_skips(s, i)) continue;
    if (sparse && cddp__sgd_check_rows(s, i) != CDDP_OK) return CDDP_UNSUPPORTED;
    if (p->data == NULL || (p->grad == NULL && !sparse))
      return cddp__fail(CDDP_INVALID_ARGUMENT, "parameter %d (%s) has no %s%s", i, name,
                        p->data == NULL ? "data" : "gradient",
                        p->data == NULL ? ""
                                        : "; set grad, or have cddp_ddp_create place it, or "
                                          "(sparse) set ddp in cddp_sgd_desc");
    if (!cddp__dtype_trains(p->dtype))
      return cddp__fail(CDDP_INVALID_ARGUMENT, "parameter %d (%s) now has dtype %d", i, name,
                        (int)p->dtype);
    if (s->rule.momentum == 0 || s->momentum[i] != NULL) continue;
    s->momentum[i] = cddp__calloc(&s->allocator, p->count, cddp__dtype_size(p->dtype));
    if (s->momentum[i] == NULL) return CDDP_OUT_OF_MEMORY;
  }
  return CDDP_OK;
}

static cddp_result cddp__sgd_step(cddp_sgd *s) {
  cddp_result r;
  int i;
  if (s->shard != NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "after cddp_ddp_step each rank holds its part of the momentum only; call "
                      "cddp_ddp_wait before cddp_sgd_step");
  if ((r = cddp__sgd_prepare(s)) != CDDP_OK) return r;
  for (i = 0; i < s->count; i++) {
    if (cddp__sgd_skips(s, i)) continue;
    if (cddp__sgd_sparse(s, i) != NULL)
      cddp__sgd_rows(s, i, s->sparse[i]);
    else
      cddp__sgd_dense(s, i);
    if (s->rule.momentum != 0) s->started[i] = true;
  }
  return CDDP_OK;
}
/* >>buckets ------------------------------------------------------------------------------------
   Distributed data parallel. All gradients lie in one arena of shared memory per rank, in reverse
   order of declaration, and never move; a bucket is a list of parameters, so that rebuilding
   the buckets in order of arrival moves nothing. Works as follows: ready() marks a gradient; when a
   bucket and all before it are full, the engine of a private group reduces it (two steps: every
   rank has it, every rank has done its slice). wait() exchanges the ready flags on a second private
   group, launches what is left and waits for the engine. step() on gradients that nobody has
   reduced yet takes one pass instead: each rank walks through its slice of the arena block by
   block, adds up the block of all ranks, applies SGD with its share of the momentum, writes the new
   weights to every rank and zeroes the block everywhere: the block stays in the first-level cache
   between these, or (f32, 1, 2 or 4 ranks) one loop does it all. After a step() the next buckets
   therefore wait for step(). Weights in memory that is not shared are published through the
   gradients' places. */

#define CDDP__BLOCK ((size_t)2048) /* elements of a block of step() */

static cddp_result cddp__ddp_fail(cddp_ddp *d, cddp_result r) {
  if (!d->failed) {
    d->failed = true;
    d->fail_result = r;
    snprintf(d->fail_text, sizeof d->fail_text, "%s", cddp__error_text);
  }
  return cddp__fail(d->fail_result, "%s", d->fail_text);
}

static const char *cddp__param_name(const cddp_param *p, int index, char *space, size_t n) {
  if (p->name != NULL) return p->name;
  snprintf(space, n, "#%d", index);
  return space;
}

/* --- creation: comparing the model with rank 0's --- */

static cddp__sparse *cddp__sparse_of(const cddp_ddp *d, int i) { /* NULL: it is dense */
  return d->sparse != NULL ? d->sparse[i] : NULL;
}

/* Elements of parameter i's gradient in the arena. */
static size_t cddp__dense_count(const cddp_ddp *d, int i) {
  return cddp__sparse_of(d, i) == NULL ? d->params[i].count : 0;
}

/* Writes what must agree between ranks; returns the length. out NULL: only the length. */
static size_t cddp__describe_params(const cddp_ddp *d, unsigned char *out) {
  const cddp_param *params = d->params;
  size_t n = 0, length;
  int i;
  for (i = 0; i < d->count; i++) {
    const cddp__sparse *s = cddp__sparse_of(d, i);
    length = params[i].name != NULL ? cddp__min(strlen(params[i].name), 1000) : 0;
    if (out != NULL) {
      cddp__put64(out + n, params[i].count);
      cddp__put32(out + n + 8, (uint32_t)params[i].dtype);
      cddp__put32(out + n + 12, (uint32_t)length);
      cddp__put64(out + n + 16, s != NULL ? s->rows : 0);
      if (length > 0) memcpy(out + n + 24, params[i].name, length);
    }
    n += 24 + length;
  }
  return n;
}

/* Compares own parameters with rank 0's description; writes the first difference to text. */
static void cddp__compare_params(const cddp_ddp *d, const unsigned char *theirs, size_t bytes,
                                 char *text, size_t n) {
  size_t at = 0;
  int i, rank = d->group->rank;
  char space[24];
  text[0] = 0;
  for (i = 0; at + 24 <= bytes || i < d->count; i++) {
    const cddp_param *p = &d->params[i];
    const char *name;
    uint64_t count, rows;
    uint32_t dtype, length;
    if (i >= d->count || at + 24 > bytes) {
      snprintf(text, n, "rank %d has %d parameters, rank 0 has %s", rank, d->count,
               i >= d->count ? "more" : "fewer");
      return;
    }
    count = cddp__get64(theirs + at);
    dtype = cddp__get32(theirs + at + 8);
    length = (uint32_t)cddp__min(cddp__get32(theirs + at + 12), bytes - at - 24);
    rows = cddp__get64(theirs + at + 16);
    name = cddp__param_name(p, i, space, sizeof space);
    at += 24;
    if ((p->name != NULL ? cddp__min(strlen(p->name), 1000) : 0) != length ||
        (length > 0 && memcmp(p->name, theirs + at, length) != 0)) {
      snprintf(text, n, "parameter %d is \"%.100s\" on rank %d, \"%.*s\" on rank 0", i, name, rank,
               (int)cddp__min(length, 100), (const char *)theirs + at);
    } else if (p->count != count) {
      snprintf(text, n, "parameter \"%.100s\" has %zu elements on rank %d, %" PRIu64 " on rank 0",
               name, p->count, rank, count);
    } else if ((uint32_t)p->dtype != dtype) {
      snprintf(text, n, "parameter \"%.100s\" is %s on rank %d, %s on rank 0", name,
               cddp__dtype_names[p->dtype], rank, cddp__dtype_names[dtype & 7]);
    } else if ((cddp__sparse_of(d, i) != NULL ? cddp__sparse_of(d, i)->rows : 0) != rows) {
      snprintf(text, n,
               "parameter \"%.100s\" has %zu sparse rows on rank %d, %" PRIu64 " on rank 0", name,
               cddp__sparse_of(d, i) != NULL ? cddp__sparse_of(d, i)->rows : 0, rank, rows);
    }
    if (text[0] != 0) return;
    at += length;
  }
}

static cddp_result cddp__run_simple(cddp_group *g, int kind, const void *send, void *recv,
                                    size_t count, cddp_dtype dtype, int root) {
  cddp__call c;
  memset(&c, 0, sizeof c);
  c.kind = (uint8_t)kind;
  c.dtype = (uint8_t)dtype;
  c.send = send;
  c.recv = recv;
  c.count = count;
  c.esize = cddp__dtype_size(dtype);
  c.root = root;
  return cddp__run_call(g, &c);
}

static cddp_result cddp__ddp_step_line(cddp_group *g, int kind, uint64_t count, uint32_t phase) {
  cddp__call c;
  memset(&c, 0, sizeof c);
  c.kind = (uint8_t)kind;
  return cddp__sync(g, cddp__call_code(&c, phase), count, -1, 0, cddp__serve_idle);
}

#define CDDP__DIFFERENCE 256 /* bytes of a difference's text */

/* All ranks learn of the first rank whose parameters differ from rank 0's. */
static cddp_result cddp__agree_on_params(cddp_ddp *d) {
  cddp_group *g = d->control;
  const cddp_allocator *a = &g->host->allocator;
  size_t mine = cddp__describe_params(d, NULL), bytes;
  cddp__line *line = cddp__begin(g);
  unsigned char *theirs = NULL;
  char *texts = NULL;
  cddp_result r;
  int p;
  cddp__put64(line->u.bytes, mine);
  if ((r = cddp__ddp_step_line(g, CDDP__KIND_DDP_CREATE, 0, 0)) != CDDP_OK) return r;
  bytes = (size_t)cddp__get64(cddp__line_of(g, 0, g->step)->u.bytes);
  theirs = (unsigned char *)cddp__malloc(a, bytes);
  texts = (char *)cddp__calloc(a, (size_t)g->size + 1, CDDP__DIFFERENCE);
  if (theirs == NULL || texts == NULL) {
    r = cddp__break(g, CDDP_OUT_OF_MEMORY);
  } else {
    if (g->rank == 0) cddp__describe_params(d, theirs);
    r = cddp__run_simple(g, CDDP__KIND_BROADCAST, theirs, theirs, bytes, CDDP_U8, 0);
  }
  if (r == CDDP_OK) {
    char *own = texts + (size_t)g->size * CDDP__DIFFERENCE;
    cddp__compare_params(d, theirs, bytes, own, CDDP__DIFFERENCE);
    r = cddp__run_simple(g, CDDP__KIND_ALL_GATHER, own, texts, CDDP__DIFFERENCE, CDDP_U8, -1);
  }
  for (p = 0; r == CDDP_OK && p < g->size; p++)
    if (texts[(size_t)p * CDDP__DIFFERENCE] != 0)
      r = cddp__fail(CDDP_MISMATCH, "the ranks' models differ: %s",
                     texts + (size_t)p * CDDP__DIFFERENCE);
  cddp__free(a, theirs);
  cddp__free(a, texts);
  return r;
}

/* --- creation: memory --- */

/* Places every parameter in the arena: dtype by dtype, last parameters first. */
static void cddp__lay_out(cddp_ddp *d) {
  size_t at = 0;
  int dtype, i;
  for (dtype = 0; dtype <= CDDP_I64; dtype++) {
    d->sections[dtype].begin = at;
    for (i = d->count - 1; i >= 0; i--) {
      if ((int)d->params[i].dtype != dtype) continue;
      d->tensors[i].offset = at;
      d->tensors[i].room = cddp__round_up(
          cddp__dense_count(d, i) * cddp__dtype_size(d->params[i].dtype), d->align);
      at += d->tensors[i].room;
    }
    d->sections[dtype].end = at;
  }
  d->bytes = at;
}

/* Every rank tells where p lies; out[i] is the address here of that of this host's i-th rank, *all
 * false if any rank has none. */
static cddp_result cddp__exchange_refs(cddp_group *g, const void *p, size_t bytes, char **out,
                                       bool *all) {
  cddp__line *line = cddp__begin(g);
  void *at = NULL;
  cddp_result r;
  int k;
  *all = true;
  if (p != NULL)
    line->u.ref = cddp__ref_of(g->host, p, bytes);
  else
    memset(&line->u.ref, 0, sizeof line->u.ref);
  if ((r = cddp__ddp_step_line(g, CDDP__KIND_DDP_CREATE, bytes, 1)) != CDDP_OK) return r;
  for (k = 0; k < g->size; k++)
    if (cddp__line_of(g, k, g->step)->u.ref.kind == CDDP__REF_NONE) *all = false;
  for (k = 0; *all && k < g->size; k++) {
    if (g->members[k] < 0) continue;
    if ((r = cddp__locate(g->host, &cddp__line_of(g, k, g->step)->u.ref, &at)) != CDDP_OK)
      return cddp__break(g, r);
    *out++ = (char *)at;
  }
  return CDDP_OK;
}

/* Allocates the arena everywhere, finds the peers' arenas and weights. */
static cddp_result cddp__share_gradients(cddp_ddp *d) {
  cddp_group *g = d->control;
  size_t n = (size_t)g->locals, bytes;
  bool all = true;
  cddp_result r;
  int i;
  d->arena = (char *)cddp__arena_alloc(g->host, d->bytes);
  if ((r = cddp__exchange_refs(g, d->arena, d->bytes, d->arenas, &all)) != CDDP_OK) return r;
  if (!all)
    return cddp__fail(CDDP_OUT_OF_MEMORY,
                      "no shared memory for %zu bytes of gradients on every rank", d->bytes);
  for (i = 0; i < d->count; i++) {
    cddp__tensor *t = &d->tensors[i];
    bytes = d->params[i].count * cddp__dtype_size(d->params[i].dtype);
    r = cddp__exchange_refs(g, d->params[i].data, bytes, d->addresses + n * (size_t)i, &all);
    if (r != CDDP_OK) return r;
    t->data = all ? d->addresses + n * (size_t)i : NULL;
    t->placed = d->params[i].grad == NULL;
    t->used = true;
    d->used[i] = 1;
  }
  return CDDP_OK;
}

static cddp_result cddp__broadcast_params(cddp_ddp *d, cddp_param *params, int count, int root) {
  cddp_result r;
  int i;
  for (i = 0; i < count; i++) {
    r = cddp__run_simple(d->control, CDDP__KIND_BROADCAST, params[i].data, params[i].data,
                         params[i].count, params[i].dtype, root);
    if (r != CDDP_OK) return r;
  }
  return CDDP_OK;
}

/* --- reducing one bucket --- */

/* A stretch of the arena. */
typedef struct cddp__run {
  size_t begin, end; /* bytes */
} cddp__run;

/* The next stretch of used parameters of the bucket from sorted[*i] on; false at the end. */
static bool cddp__next_run(const cddp_ddp *d, const cddp__bucket_state *b, int *i, cddp__run *run) {
  const cddp__tensor *t;
  while (*i < b->count && !d->tensors[b->sorted[*i]].used) ++*i;
  if (*i >= b->count) return false;
  t = &d->tensors[b->sorted[(*i)++]];
  run->begin = t->offset;
  run->end = t->offset + t->room;
  while (*i < b->count) {
    t = &d->tensors[b->sorted[*i]];
    if (t->offset != run->end || !t->used) break;
    run->end += t->room;
    ++*i;
  }
  return true;
}

static size_t cddp__bucket_bytes(const cddp_ddp *d, const cddp__bucket_state *b) {
  cddp__run run;
  size_t bytes = 0;
  int i = 0;
  while (cddp__next_run(d, b, &i, &run)) bytes += run.end - run.begin;
  return bytes;
}

/* Whether a rank has joined, as of a bucket's first step. */
static bool cddp__some_joined(const cddp_group *g) {
  int k;
  for (k = 0; k < g->size; k++)
    if (cddp__line_of(g, k, g->step)->u.bytes[0] != 0) return true;
  return false;
}

/* As cddp__reduce_all, over the ranks that have not joined; the result is on all. bufs: scratch */
static void cddp__reduce_present(cddp_ddp *d, void **bufs, size_t at, size_t n, cddp_dtype dtype) {
  const cddp_group *g = d->comm;
  char *mine = d->arena + at;
  int k, m = 0;
  for (k = 0; k < g->size; k++)
    if (cddp__line_of(g, k, g->step)->u.bytes[0] == 0) bufs[m++] = d->arenas[k] + at;
  cddp__reduce(mine, (const void *const *)bufs, m, n, dtype, CDDP_AVG);
  for (k = 0; k < g->size; k++)
    if (k != g->rank) memcpy(d->arenas[k] + at, mine, n * cddp__dtype_size(dtype));
}

/* This rank's slice of the bucket: the mean of all replicas goes into all replicas. */
static void cddp__reduce_slice(cddp_ddp *d, const cddp__bucket_state *b, void **bufs) {
  cddp_dtype dtype = d->params[b->sorted[0]].dtype;
  size_t esize = cddp__dtype_size(dtype), begin, end, at = 0;
  int i = 0, k, n = d->group->size;
  bool partial = cddp__some_joined(d->comm);
  cddp__run run;
  cddp__slice(cddp__bucket_bytes(d, b), CDDP__CACHE_LINE, n, d->group->rank, &begin, &end);
  while (cddp__next_run(d, b, &i, &run)) {
    size_t length = run.end - run.begin, low = cddp__max(begin, at),
           high = cddp__min(end, at + length);
    if (low < high && partial) {
      cddp__reduce_present(d, bufs, run.begin + (low - at), (high - low) / esize, dtype);
    } else if (low < high) {
      for (k = 0; k < n; k++) bufs[k] = d->arenas[k] + run.begin + (low - at);
      cddp__reduce_all(bufs, n, (high - low) / esize, dtype, CDDP_AVG);
    }
    at += length;
  }
}

/* The same on several hosts: this rank's slices of the bucket's stretches, and those only. */
static cddp_result cddp__reduce_over_hosts(cddp_ddp *d, const cddp__bucket_state *b) {
  cddp_group *g = d->comm;
  cddp__run run;
  cddp__call c;
  cddp_result r = CDDP_OK;
  int i = 0, k;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_ALL_REDUCE;
  c.dtype = (uint8_t)d->params[b->sorted[0]].dtype;
  c.op = CDDP_AVG;
  c.root = -1;
  c.esize = cddp__dtype_size((cddp_dtype)c.dtype);
  while (r == CDDP_OK && cddp__next_run(d, b, &i, &run)) {
    for (k = 0; k < g->locals; k++) g->hosts->bufs[k] = d->arenas[k] + run.begin;
    r = cddp__relay_call(g, &c, g->hosts->bufs, (run.end - run.begin) / c.esize);
  }
  return r;
}

#ifdef CDDP_MPI
static cddp_result cddp__reduce_by_mpi(cddp_ddp *d, const cddp__bucket_state *b) {
  cddp_dtype dtype = d->params[b->sorted[0]].dtype;
  size_t size = cddp__dtype_size(dtype), n;
  cddp_result r = CDDP_OK;
  cddp__run run;
  int i = 0;
  while (r == CDDP_OK && cddp__next_run(d, b, &i, &run))
    for (; r == CDDP_OK && run.begin < run.end; run.begin += n * size) {
      char *data = d->arena + run.begin;
      n = cddp__min(CDDP__MPI_MOST, (run.end - run.begin) / size);
      r = cddp__mpi_reduce(d->comm, data, data, n, dtype, CDDP_AVG, -1);
    }
  return r;
}
#endif

/* All ranks of this host have done their part of it. */
static cddp_result cddp__bucket_done(cddp_group *g, int index) {
  cddp__call c;
  cddp__begin(g);
  if (g->hosts == NULL)
    return cddp__ddp_step_line(g, CDDP__KIND_DDP_BUCKET, (uint64_t)index, 1);
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_DDP_BUCKET;
  c.count = (size_t)index;
  c.root = -1;
  return cddp__local_sync(g, &c, 1, cddp__serve_idle);
}

static cddp_result cddp__reduce_bucket(cddp_ddp *d, cddp__bucket_state *b, int index) {
  cddp_group *g = d->comm;
  void *few[16], **bufs = few;
  uint64_t record;
  cddp_result r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if (g->size > 16)
    bufs = (void **)cddp__malloc(&g->host->allocator, (size_t)g->size * sizeof *bufs);
  if (bufs == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  g->calls++;
  record = cddp__record_begin(g, CDDP__KIND_DDP_BUCKET, g->calls, (uint64_t)index);
  if (record != 0) cddp__record_at(g->host->record, record)->engine = 1;
  cddp__begin(g)->u.bytes[0] = (unsigned char)d->joined;
  r = cddp__ddp_step_line(g, CDDP__KIND_DDP_BUCKET, (uint64_t)index, 0);
  if (r == CDDP_OK && (r = cddp__enter(g)) == CDDP_OK) {
#ifdef CDDP_MPI
    if (g->mpi != NULL)
      r = cddp__reduce_by_mpi(d, b);
    else
#endif
        if (g->hosts != NULL)
      r = cddp__reduce_over_hosts(d, b);
    else
      cddp__reduce_slice(d, b, bufs);
    if (r == CDDP_OK) r = cddp__bucket_done(g, index);
  }
  r = cddp__exit(g, r);
  cddp__record_finish(g, record, r);
  if (bufs != few) cddp__free(&g->host->allocator, bufs);
  return r;
}

/* Copies between the bucket's places in the arena and a contiguous buffer. */
static void cddp__pack(const cddp_ddp *d, const cddp__bucket_state *b, char *flat, bool to_flat) {
  cddp__run run;
  int i = 0;
  while (cddp__next_run(d, b, &i, &run)) {
    size_t n = run.end - run.begin;
    if (to_flat)
      memcpy(flat, d->arena + run.begin, n);
    else
      memcpy(d->arena + run.begin, flat, n);
    flat += n;
  }
}

static cddp_result cddp__scratch(cddp_ddp *d, size_t bytes) {
  if (d->scratch_bytes >= bytes) return CDDP_OK;
  cddp__arena_free(d->group->host, d->scratch);
  d->scratch = (char *)cddp__arena_alloc(d->group->host, bytes);
  d->scratch_bytes = d->scratch != NULL ? bytes : 0;
  return d->scratch != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

/* What a hook is told of a bucket of so many bytes; whether they lie side by side, at data. */
static bool cddp__describe_bucket(const cddp_ddp *d, const cddp__bucket_state *b, size_t bytes,
                                  cddp_bucket *out) {
  cddp__run run;
  int i = 0;
  cddp__next_run(d, b, &i, &run);
  memset(out, 0, sizeof *out);
  out->index = (int)(b - d->buckets);
  out->bucket_count = d->plan.bucket_count;
  out->dtype = d->params[b->sorted[0]].dtype;
  out->count = bytes / cddp__dtype_size(out->dtype);
  out->group = d->hooks;
  out->params = b->sorted;
  out->param_count = b->count;
  out->data = d->arena + run.begin;
  return run.end - run.begin == bytes;
}

/* Hands the bucket to the hook: in place when its parameters lie side by side, else through
 * scratch. */
static cddp_result cddp__hook_bucket(cddp_ddp *d, cddp__bucket_state *b) {
  cddp_bucket bucket;
  size_t bytes = cddp__bucket_bytes(d, b);
  bool whole;
  cddp_result r;
  if (bytes == 0) return CDDP_OK; /* no rank used any of it */
  whole = cddp__describe_bucket(d, b, bytes, &bucket);
  if (!whole) {
    if ((r = cddp__scratch(d, bytes)) != CDDP_OK) return r;
    bucket.data = d->scratch;
    cddp__pack(d, b, d->scratch, true);
  }
  r = d->desc.comm_hook(&bucket, d->desc.comm_hook_data);
  if (r == CDDP_OK && bucket.data == d->scratch) cddp__pack(d, b, d->scratch, false);
  return r;
}

static cddp_result cddp__run_bucket(cddp_work *w) { /* on the engine's thread */
  cddp__bucket_state *b = (cddp__bucket_state *)w->context;
  cddp_ddp *d = b->ddp;
  int index = (int)(b - d->buckets);
  cddp_result r;
  char space[24];
  int first = b->sorted[0];
  if (d->desc.comm_hook != NULL) {
    if ((r = cddp__check_group(d->hooks)) == CDDP_OK) r = cddp__hook_bucket(d, b);
    if (r == CDDP_OK) return r;
    cddp__fail_in(r, "communication hook on bucket %d of rank %d: ", index, d->group->rank);
    return cddp__break(d->hooks, r); /* or later buckets' calls here would meet this one's there */
  }
  r = cddp__reduce_bucket(d, b, index);
  if (r == CDDP_OK) return r;
  return cddp__fail_in(r, "bucket %d (parameter \"%.60s\"%s): ", index,
                       cddp__param_name(&d->params[first], first, space, sizeof space),
                       b->count > 1 ? " and others" : "");
}

/* --- assigning buckets --- */

static void cddp__sort_by_offset(const cddp_ddp *d, int *list, int n) {
  int i, k;
  for (i = 1; i < n; i++) {
    int x = list[i];
    for (k = i; k > 0 && d->tensors[list[k - 1]].offset > d->tensors[x].offset; k--)
      list[k] = list[k - 1];
    list[k] = x;
  }
}

/* Replaces the plan: order NULL = reverse order of declaration, else the given order of arrival. */
static cddp_result cddp__set_plan(cddp_ddp *d, const int *order) {
  const cddp_allocator *a = &d->group->host->allocator;
  cddp__bucket_plan plan;
  cddp__bucket_state *states;
  cddp_result r;
  int b, i;
  if ((r = cddp__plan_buckets(&plan, d->params, d->count, order, d->limits, 2, a)) != CDDP_OK)
    return r;
  if (order == NULL) cddp__plan_reverse(&plan);
  states = (cddp__bucket_state *)cddp__calloc(a, (size_t)plan.bucket_count, sizeof *states);
  if (states == NULL) {
    cddp__plan_free(&plan);
    return CDDP_OUT_OF_MEMORY;
  }
  cddp__plan_free(&d->plan);
  cddp__free(a, d->buckets);
  d->plan = plan;
  d->buckets = states;
  memcpy(d->plan_order, plan.params, (size_t)d->count * sizeof *plan.params);
  for (b = 0; b < plan.bucket_count; b++) {
    cddp__bucket_state *s = &states[b];
    s->ddp = d;
    s->sorted = d->plan_order + plan.offsets[b];
    s->count = plan.offsets[b + 1] - plan.offsets[b];
    cddp__sort_by_offset(d, s->sorted, s->count);
    for (i = 0; i < s->count; i++) d->tensors[s->sorted[i]].bucket = b;
  }
  return CDDP_OK;
}

/* Everything as before the first ready() of a step. */
static void cddp__arm(cddp_ddp *d) {
  int i;
  pthread_mutex_lock(&d->lock);
  for (i = 0; i < d->count; i++) {
    d->tensors[i].ready = d->tensors[i].noted = false;
    d->tensors[i].used = true;
  }
  for (i = 0; i < d->plan.bucket_count; i++) {
    d->buckets[i].remaining = d->buckets[i].count;
    d->buckets[i].launched = false;
  }
  d->next_bucket = 0;
  d->arrived = 0;
  pthread_mutex_unlock(&d->lock);
}

/* --- ready --- */

/* Starts every bucket that is full and whose predecessors have started. lock held. */
static cddp_result cddp__launch(cddp_ddp *d) {
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && d->next_bucket < d->plan.bucket_count) {
    cddp__bucket_state *b = &d->buckets[d->next_bucket];
    if (b->remaining > 0) break;
    memset(&b->work, 0, sizeof b->work);
    b->work.group = d->comm;
    b->work.run = cddp__run_bucket;
    b->work.context = b;
    b->launched = true;
    d->next_bucket++;
    r = cddp__engine_push(&b->work);
  }
  return r;
}

static void cddp__fetch_gradient(cddp_ddp *d, int i) { /* the caller's memory -> arena */
  if (!d->tensors[i].placed)
    cddp__copy(d->arena + d->tensors[i].offset, d->params[i].grad,
               d->params[i].count * cddp__dtype_size(d->params[i].dtype));
}

/* Whether buckets are more than a reading of each other's memory. */
static bool cddp__relayed(const cddp_group *g) { return g->hosts != NULL || g->mpi != NULL; }

/* Takes the parameter off its bucket; launches what that completes. lock held. */
static cddp_result cddp__count_down(cddp_ddp *d, int param) {
  CDDP_ASSERT(d->buckets[d->tensors[param].bucket].remaining > 0);
  d->buckets[d->tensors[param].bucket].remaining--;
  if (d->stepping && d->desc.comm_hook == NULL && !cddp__relayed(d->comm))
    return CDDP_OK; /* step() reduces and updates at once */
  if (d->group->size == 1 && d->desc.comm_hook == NULL) return CDDP_OK;
  return cddp__launch(d);
}

/* Notes that the parameter's gradient is there; *noted: for a later step only. */
static cddp_result cddp__mark_ready(cddp_ddp *d, int param, bool *noted) {
  cddp__tensor *t = &d->tensors[param];
  char space[24];
  bool twice;
  CDDP__POINT("ready");
  pthread_mutex_lock(&d->lock);
  *noted = d->no_sync;
  twice = !*noted && t->ready;
  if (*noted)
    t->noted = true;
  else if (!twice) {
    t->ready = true;
    d->arrival[d->arrived++] = param;
  }
  pthread_mutex_unlock(&d->lock);
  if (twice)
    return cddp__fail(
        CDDP_INVALID_ARGUMENT,
        "cddp_ddp_ready: parameter \"%s\" was marked ready twice in one step; call it once, "
        "when its gradient is complete",
        cddp__param_name(&d->params[param], param, space, sizeof space));
  if (CDDP__UNLIKELY(d->group->host->record != NULL)) {
    uint64_t n = cddp__record_new(d->group->host->record, "ready", d->comm->id, (uint64_t)param, -1,
                                  -1, -1);
    cddp__record_end(d->group->host->record, n, CDDP_OK);
  }
  return CDDP_OK;
}

static cddp_result cddp__ddp_ready(cddp_ddp *d, int param) {
  bool noted = false;
  cddp_result r = cddp__mark_ready(d, param, &noted);
  if (r != CDDP_OK || noted) return r;
  cddp__fetch_gradient(d, param);
  pthread_mutex_lock(&d->lock);
  r = cddp__count_down(d, param);
  pthread_mutex_unlock(&d->lock);
  return r;
}

/* --- agreeing on what is ready --- */

static uint64_t cddp__sgd_hash(const cddp_sgd *s, double lr) { /* what must agree between ranks */
  double v[4];
  uint64_t flags = (uint64_t)s->desc.nesterov | (uint64_t)s->desc.maximize << 1 |
                   (uint64_t)s->desc.separate_mul_add << 2 | (uint64_t)(s->shard != NULL) << 3;
  v[0] = lr;
  v[1] = s->desc.momentum;
  v[2] = s->desc.dampening;
  v[3] = s->desc.weight_decay;
  return cddp__hash64(flags, v, sizeof v) | 1; /* not 0: see cddp__muster */
}

static cddp__muster cddp__muster_of(const cddp_ddp *d, int rank) { /* as of the last meeting */
  cddp__muster m;
  memcpy(&m, cddp__line_of(d->control, rank, d->control->step)->u.bytes, sizeof m);
  return m;
}

/* All ranks meet. *missing: parameters not ready anywhere, summed over ranks. The same call, the
   same settings (check) on all of them is part of the step, but for ranks that have joined. s: the
   cddp_sgd of the call or NULL. */
static cddp_result cddp__meet_for_step(cddp_ddp *d, int kind, uint64_t check, const cddp_sgd *s,
                                       uint64_t *missing) {
  cddp_group *g = d->control;
  cddp__muster m;
  cddp_result r;
  int i, p;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  memset(&m, 0, sizeof m);
  pthread_mutex_lock(&d->lock);
  for (i = 0; i < d->count && d->joined == 0; i++) m.missing += d->tensors[i].ready ? 0 : 1;
  pthread_mutex_unlock(&d->lock);
  m.settings = s != NULL ? cddp__sgd_hash(s, 0) : 0;
  m.lr = s != NULL ? s->desc.lr : 0;
  m.joined = d->joined;
  g->calls++;
  memcpy(cddp__begin(g)->u.bytes, &m, sizeof m);
  if ((r = cddp__ddp_step_line(g, kind, check, 0)) != CDDP_OK) return r;
  *missing = 0;
  d->active_count = 0;
  for (p = 0; p < g->size; p++) {
    m = cddp__muster_of(d, p);
    *missing += m.missing;
    if (m.joined == 0) d->active[d->active_count++] = p;
  }
  if (d->active_count > 0 && d->active_count < g->size) d->shadowed = true;
  return CDDP_OK;
}

/* The error for parameters that were not ready: names the first of them. */
static cddp_result cddp__name_missing(const cddp_ddp *d) {
  int i, p, n = d->group->size, absent, shown = 0;
  char list[256] = "", space[24];
  cddp_result r = CDDP_INVALID_ARGUMENT;
  for (i = 0; i < d->count && shown < 4; i++) {
    size_t at;
    for (p = absent = 0; p < n; p++)
      absent += d->flags[(size_t)p * (size_t)d->count + (size_t)i] == 0;
    if (absent == 0) continue;
    at = strlen(list);
    snprintf(list + at, sizeof list - at, "%s\"%.60s\"", shown++ ? ", " : "",
             cddp__param_name(&d->params[i], i, space, sizeof space));
    at = strlen(list);
    if (absent == d->active_count) continue;
    r = CDDP_MISMATCH;
    for (p = 0; d->flags[(size_t)p * (size_t)d->count + (size_t)i] != 0; p++) {}
    snprintf(list + at, sizeof list - at, " (on rank %d%s)", p, absent > 1 ? " and others" : "");
  }
  return cddp__fail(
      r,
      "gradients were not marked ready: %s; call cddp_ddp_ready for every parameter, or "
      "set find_unused_parameters",
      list);
}

/* The ranks that see each other's memory meet. */
static cddp_result cddp__control_barrier(cddp_ddp *d, int kind, uint32_t phase) {
  cddp__call c;
  cddp__begin(d->control);
  if (d->control->hosts == NULL) return cddp__ddp_step_line(d->control, kind, 0, phase);
  memset(&c, 0, sizeof c);
  c.kind = (uint8_t)kind;
  c.root = -1;
  return cddp__local_sync(d->control, &c, phase, cddp__serve_idle);
}

#define CDDP__FLAG_JOINED 2 /* the rank has joined: neither used nor forgotten */

/* Puts parameter i's gradient into the arena: the caller's (accumulated under no_sync, or to be
   left as it is), or zero. */
typedef cddp_result (*cddp__place_fn)(cddp_ddp *d, int i, bool fetch);

static cddp_result cddp__place_gradient(cddp_ddp *d, int i, bool fetch) {
  if (fetch) {
    cddp__fetch_gradient(d, i);
  } else {
    memset(d->arena + d->tensors[i].offset, 0, d->tensors[i].room);
    if (cddp__sparse_of(d, i) != NULL) d->sparse[i]->added.n = 0;
  }
  return CDDP_OK;
}

/* Some parameters are not ready: with find_unused_parameters decides which count as zero and which
   are left alone, without it fails on every rank. */
static cddp_result cddp__settle_unused(cddp_ddp *d, cddp__place_fn place) {
  size_t n = (size_t)d->count;
  unsigned char *mine = d->flags + n * (size_t)d->group->size;
  cddp_result r;
  size_t i, p;
  for (i = 0; i < n; i++)
    mine[i] = d->joined != 0 ? CDDP__FLAG_JOINED
              : d->tensors[i].ready || (d->desc.find_unused_parameters && d->tensors[i].noted);
  r = cddp__run_simple(d->control, CDDP__KIND_ALL_GATHER, mine, d->flags, n, CDDP_U8, -1);
  if (r != CDDP_OK) return r;
  if (!d->desc.find_unused_parameters) return cddp__name_missing(d);
  pthread_mutex_lock(&d->lock);
  for (i = 0; i < n && r == CDDP_OK; i++) {
    cddp__tensor *t = &d->tensors[i];
    if (t->ready) continue;
    for (t->used = false, p = 0; p < (size_t)d->group->size; p++)
      if (d->flags[p * n + i] == 1) t->used = true;
    r = place(d, (int)i, mine[i] || !t->used);
    t->ready = true;
    d->buckets[t->bucket].remaining--;
  }
  pthread_mutex_unlock(&d->lock);
  return r;
}

/* A rank that has joined has nothing to wait for. */
static void cddp__ready_as_joined(cddp_ddp *d) {
  int i;
  pthread_mutex_lock(&d->lock);
  for (i = 0; i < d->count; i++) {
    if (d->tensors[i].ready) continue;
    d->tensors[i].ready = true;
    d->buckets[d->tensors[i].bucket].remaining--;
  }
  pthread_mutex_unlock(&d->lock);
}

/* Whether the mean was made by who divides by the number of all ranks, but some have joined. */
static bool cddp__overdivided(const cddp_ddp *d) {
  return (d->desc.comm_hook != NULL || cddp__relayed(d->comm)) &&
         d->active_count < d->group->size;
}

static void cddp__rescale(cddp_ddp *d) {
  double factor = (double)d->group->size / d->active_count;
  int i;
  if (!cddp__overdivided(d)) return;
  for (i = 0; i < d->count; i++)
    if (d->tensors[i].used)
      cddp__scale(d->arena + d->tensors[i].offset, cddp__dense_count(d, i), d->params[i].dtype,
                  factor);
}

/* Launches all buckets and waits for them; the first failure is the result. */
static cddp_result cddp__finish_buckets(cddp_ddp *d) {
  cddp_result r = CDDP_OK;
  int b;
  if (d->joined != 0) cddp__ready_as_joined(d);
  if (d->group->size > 1 || d->desc.comm_hook != NULL) {
    pthread_mutex_lock(&d->lock);
    r = cddp__launch(d);
    pthread_mutex_unlock(&d->lock);
  }
  cddp__engine_drain(d->comm);
  for (b = 0; b < d->plan.bucket_count; b++) {
    cddp_work *w = &d->buckets[b].work;
    if (d->buckets[b].launched && w->result != CDDP_OK) return cddp__fail(w->result, "%s", w->text);
  }
  if (r == CDDP_OK) cddp__rescale(d);
  return r;
}

/* Ends what peers may still wait for in the background, after a failure that all ranks know of. */
static cddp_result cddp__give_up(cddp_ddp *d, cddp_result r) {
  cddp_group *groups[3];
  char text[CDDP__ERROR_MAX];
  int i;
  groups[0] = d->control;
  groups[1] = d->comm;
  groups[2] = d->hooks;
  snprintf(text, sizeof text, "%s", cddp__error_text);
  for (i = 0; i < 3; i++) {
    cddp__fail(r, "%s", text);
    if (groups[i] != NULL) cddp__break(groups[i], r);
  }
  cddp__engine_drain(d->comm);
  cddp__fail(r, "%s", text);
  return cddp__ddp_fail(d, r);
}

/* --- after a step --- */

/* Once: buckets follow the order in which rank 0's gradients arrived (or the first rank's that has
   data). */
static cddp_result cddp__rebuild(cddp_ddp *d) {
  cddp_result r;
  if (d->rebuilt || d->desc.find_unused_parameters) return CDDP_OK;
  r = cddp__run_simple(d->control, CDDP__KIND_BROADCAST, d->arrival, d->arrival, (size_t)d->count,
                       CDDP_I32, d->active[0]);
  if (r == CDDP_OK) r = cddp__set_plan(d, d->arrival);
  d->rebuilt = r == CDDP_OK;
  return r;
}

static cddp_result cddp__complete(cddp_ddp *d, bool stepping) {
  cddp_result r;
  int i;
  for (i = 0; i < d->count; i++) d->used[i] = d->tensors[i].used;
  d->stepping = stepping;
  d->present = d->active_count;
  r = cddp__rebuild(d);
  cddp__arm(d);
  return r;
}

/* --- momentum in shards --- */

/* A rank's slice of the gradients: the same stretch of each dtype's section. rank: its number among
   the group's ranks on this host, here and below. */
static void cddp__section_slice(const cddp_ddp *d, int dtype, int rank, size_t *begin,
                                size_t *end) {
  const cddp__section *s = &d->sections[dtype];
  cddp__slice(s->end - s->begin, CDDP__CACHE_LINE, d->group->locals, rank, begin, end);
  *begin += s->begin;
  *end += s->begin;
}

/* Where parameter i's part of rank's slice begins and ends, in bytes of the arena; false if there
 * is none. */
static bool cddp__tensor_slice(const cddp_ddp *d, int i, int rank, size_t *begin, size_t *end) {
  const cddp__tensor *t = &d->tensors[i];
  size_t bytes = cddp__dense_count(d, i) * cddp__dtype_size(d->params[i].dtype);
  cddp__section_slice(d, (int)d->params[i].dtype, rank, begin, end);
  *begin = cddp__max(*begin, t->offset);
  *end = cddp__min(*end, t->offset + bytes);
  return *begin < *end;
}

/* Offset into rank's shard of arena offset `at`, which lies in its slice of dtype. */
static size_t cddp__shard_offset(const cddp_ddp *d, int dtype, int rank, size_t at) {
  size_t before = 0, begin, end;
  int t;
  for (t = 0; t < dtype; t++) {
    cddp__section_slice(d, t, rank, &begin, &end);
    before += end - begin;
  }
  cddp__section_slice(d, dtype, rank, &begin, &end);
  return before + at - begin;
}

static size_t cddp__shard_bytes(const cddp_ddp *d, int rank) {
  size_t bytes = 0, begin, end;
  int t;
  for (t = 0; t <= CDDP_I64; t++) {
    cddp__section_slice(d, t, rank, &begin, &end);
    bytes += end - begin;
  }
  return bytes;
}

static void cddp__shard_free(cddp__shard *s) {
  cddp_ddp *d = s->ddp;
  cddp__shard **link = &d->shards;
  while (*link != s) link = &(*link)->next;
  *link = s->next;
  s->sgd->shard = NULL;
  s->sgd->drop = NULL;
  cddp__arena_free(d->group->host, s->mine);
  cddp__free(&d->group->host->allocator, s);
}

static void cddp__shard_drop(cddp_sgd *s) { cddp__shard_free((cddp__shard *)s->shard); }

/* Collective: makes the shard of an SGD that takes its first fused step, from its whole momentum.
 */
static cddp_result cddp__shard_create(cddp_ddp *d, cddp_sgd *s) {
  const cddp_allocator *a = &d->group->host->allocator;
  size_t n = (size_t)d->group->locals, begin, end, bytes = cddp__shard_bytes(d, d->group->number);
  cddp__shard *h = (cddp__shard *)cddp__calloc(a, 1, sizeof *h + n * sizeof *h->all);
  bool all = false;
  cddp_result r;
  int i;
  if (h == NULL) return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  h->all = (char **)(void *)(h + 1);
  h->mine = (char *)cddp__arena_alloc(d->group->host, bytes);
  h->ddp = d;
  h->sgd = s;
  /* the slices differ in size, the exchange compares its count: 0 */
  r = cddp__exchange_refs(d->control, h->mine, 0, h->all, &all);
  if (r == CDDP_OK && !all) {
    cddp__fail(CDDP_OUT_OF_MEMORY, "no shared memory for the momentum on every rank");
    r = cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  }
  if (r != CDDP_OK) {
    cddp__arena_free(d->group->host, h->mine);
    cddp__free(a, h);
    return r;
  }
  h->next = d->shards;
  d->shards = h;
  s->shard = h;
  s->drop = cddp__shard_drop;
  for (i = 0; i < d->count; i++) {
    if (s->momentum[i] == NULL || cddp__sparse_of(d, i) != NULL) continue;
    if (cddp__tensor_slice(d, i, d->group->number, &begin, &end))
      memcpy(h->mine + cddp__shard_offset(d, (int)d->params[i].dtype, d->group->number, begin),
             (char *)s->momentum[i] + (begin - d->tensors[i].offset), end - begin);
    cddp__free(&s->allocator, s->momentum[i]);
    s->momentum[i] = NULL;
  }
  return CDDP_OK;
}

/* Collective: brings whole momentum back to every rank, for unfused steps. */
static cddp_result cddp__shard_dissolve(cddp__shard *h) {
  cddp_ddp *d = h->ddp;
  cddp_sgd *s = h->sgd;
  size_t begin, end;
  cddp_result r = cddp__enter(d->control);
  int i, p;
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    if (!s->started[i] || cddp__sparse_of(d, i) != NULL) continue;
    s->momentum[i] =
        cddp__calloc(&s->allocator, d->params[i].count, cddp__dtype_size(d->params[i].dtype));
    if (s->momentum[i] == NULL) {
      r = cddp__break(d->control, CDDP_OUT_OF_MEMORY);
      break;
    }
    for (p = 0; p < d->group->locals; p++)
      if (cddp__tensor_slice(d, i, p, &begin, &end))
        memcpy((char *)s->momentum[i] + (begin - d->tensors[i].offset),
               h->all[p] + cddp__shard_offset(d, (int)d->params[i].dtype, p, begin), end - begin);
  }
  if (r == CDDP_OK) r = cddp__control_barrier(d, CDDP__KIND_DDP_WAIT, 2); /* all have read */
  r = cddp__exit(d->control, r);
  if (r == CDDP_OK) cddp__shard_free(h);
  return r;
}

/* --- gradients that are rows --- */

static cddp_result cddp__pack_rows(cddp_ddp *d, size_t *bytes) {
  char *at;
  cddp_result r;
  int i;
  *bytes = 0;
  for (i = 0; i < d->count; i++)
    if (cddp__sparse_of(d, i) != NULL)
      *bytes += cddp__row_list_bytes(d->sparse[i], d->sparse[i]->added.n);
  if ((r = cddp__scratch(d, *bytes)) != CDDP_OK) return r;
  for (at = d->scratch, i = 0; i < d->count; i++)
    if (cddp__sparse_of(d, i) != NULL)
      at = cddp__rows_pack(d->sparse[i], d->tensors[i].used ? d->sparse[i]->added.n : 0,
                           d->params[i].dtype, at);
  return CDDP_OK;
}

/* Merges the packets that the current step tells of; or they lie in all, each so far apart. */
static cddp_result cddp__merge_rows(cddp_ddp *d, char *all, size_t each) {
  cddp_group *g = d->control;
  const void **sources = (const void **)(void *)(d->lists + g->size);
  void *at = NULL;
  cddp_result r = CDDP_OK;
  int i, k;
  for (k = 0; r == CDDP_OK && k < d->active_count; k++) {
    if (all == NULL)
      r = cddp__locate(g->host, &cddp__line_of(g, d->active[k], g->step)->u.ref, &at);
    d->lists[k].packet = all != NULL ? all + (size_t)d->active[k] * each : (char *)at;
  }
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    if (cddp__sparse_of(d, i) == NULL) continue;
    r = cddp__rows_merge(&g->host->allocator, d->sparse[i], d->lists, d->active_count, sources,
                         d->params[i].dtype);
    if (d->tensors[i].used) d->sparse[i]->added.n = 0;
  }
  return r;
}

/* Where ranks do not see each other's memory: all packets to all, as long as the longest. */
static cddp_result cddp__gather_rows(cddp_ddp *d, size_t bytes) {
  cddp_group *g = d->control;
  const cddp_allocator *a = &g->host->allocator;
  size_t each = 0;
  char *all;
  cddp_result r;
  int p;
  for (p = 0; p < g->size; p++) {
    size_t theirs = (size_t)cddp__get64(cddp__line_of(g, p, g->step)->u.bytes);
    if (theirs > each) each = theirs;
  }
  all = (char *)cddp__malloc(a, each * (size_t)(g->size + 1) + 1);
  if (all == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  memcpy(all + each * (size_t)g->size, d->scratch, bytes);
  r = cddp__run_simple(g, CDDP__KIND_ALL_GATHER, all + each * (size_t)g->size, all, each, CDDP_U8,
                       -1);
  if (r == CDDP_OK && (r = cddp__merge_rows(d, all, each)) != CDDP_OK) r = cddp__break(g, r);
  cddp__free(a, all);
  return r;
}

/* Collective: all ranks get the mean of what each has added. */
static cddp_result cddp__exchange_rows(cddp_ddp *d, int kind) {
  cddp_group *g = d->control;
  cddp__line *line;
  size_t bytes;
  cddp_result r;
  if (d->sparse == NULL) return CDDP_OK;
  if ((r = cddp__pack_rows(d, &bytes)) != CDDP_OK) return cddp__break(g, r);
  line = cddp__begin(g);
  if (g->hosts != NULL)
    cddp__put64(line->u.bytes, bytes);
  else
    line->u.ref = cddp__ref_of(g->host, d->scratch, bytes);
  if ((r = cddp__ddp_step_line(g, kind, 0, 5)) != CDDP_OK) return r;
  if (g->hosts != NULL) return cddp__gather_rows(d, bytes);
  if ((r = cddp__enter(g)) == CDDP_OK) {
    if ((r = cddp__merge_rows(d, NULL, 0)) != CDDP_OK) r = cddp__break(g, r);
    if (r == CDDP_OK) r = cddp__control_barrier(d, kind, 6); /* all have read */
  }
  return cddp__exit(g, r);
}

/* --- wait --- */

/* What follows the meeting of a wait, on ranks that have joined too. */
static cddp_result cddp__finish_wait(cddp_ddp *d, uint64_t missing) {
  cddp_result r = CDDP_OK;
  int i;
  if (missing > 0) r = cddp__settle_unused(d, cddp__place_gradient);
  while (r == CDDP_OK && d->shards != NULL) r = cddp__shard_dissolve(d->shards);
  if (r == CDDP_OK) r = cddp__finish_buckets(d);
  if (r == CDDP_OK) r = cddp__exchange_rows(d, CDDP__KIND_DDP_WAIT);
  if (r != CDDP_OK) return cddp__give_up(d, r);
  if (d->active_count < d->group->size) d->stale = true; /* the others step on their own */
  for (i = 0; i < d->count; i++)
    if (!d->tensors[i].placed && d->tensors[i].used)
      cddp__copy(d->params[i].grad, d->arena + d->tensors[i].offset,
                 d->params[i].count * cddp__dtype_size(d->params[i].dtype));
  r = cddp__complete(d, false);
  return r == CDDP_OK ? r : cddp__ddp_fail(d, r);
}

static cddp_result cddp__wait_for_buckets(cddp_ddp *d) {
  uint64_t missing = 0;
  cddp_result r = cddp__meet_for_step(d, CDDP__KIND_DDP_WAIT, 0, NULL, &missing);
  return r == CDDP_OK ? cddp__finish_wait(d, missing) : cddp__give_up(d, r);
}

static cddp_result cddp__ddp_wait(cddp_ddp *d) {
  uint64_t record;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (d->no_sync) return CDDP_OK;
  record = cddp__record_begin(d->control, CDDP__KIND_DDP_WAIT, d->control->calls + 1, 0);
  r = cddp__wait_for_buckets(d);
  cddp__record_finish(d->control, record, r);
  return r;
}

/* --- step --- */

/* What one fused step works with. */
typedef struct cddp__fused {
  cddp_ddp *d;
  cddp_sgd *s;
  cddp__shard *shard; /* NULL without momentum */
  bool averaged;      /* the arena holds the mean already */
  const void **srcs;  /* [ranks] scratch */
} cddp__fused;

/* Whether the step updates the parameter: if no rank used it, only an SGD that does not know. */
static bool cddp__steps(const cddp_ddp *d, const cddp_sgd *s, int i) {
  return d->tensors[i].used || s->used == NULL;
}

/* Whether one loop does it all: with what most programs have, and not in the first step. */
static bool cddp__sweeps(const cddp__fused *f, int i) {
  const cddp_ddp *d = f->d;
  int k = d->group->locals;
  return d->params[i].dtype == CDDP_F32 && (k == 1 || k == 2 || k == 4) && d->active_count == k &&
         !f->averaged && d->tensors[i].used && (d->tensors[i].data != NULL || k == 1) &&
         f->shard != NULL && f->s->started[i] && cddp__rule_sweeps(&f->s->rule);
}

static void cddp__sweep_block(const cddp__fused *f, int i, size_t at, size_t n) {
  const cddp_ddp *d = f->d;
  size_t inside = at - d->tensors[i].offset;
  int k, others = 0, size = d->group->locals, me = d->group->number;
  cddp__sweep sweep = cddp__sweep_of(&f->s->rule, size);
  sweep.momentum =
      (cddp__f32 *)(void *)(f->shard->mine + cddp__shard_offset(d, CDDP_F32, me, at));
  sweep.weights[0] = (cddp__f32 *)(void *)((char *)d->params[i].data + inside);
  for (k = 0; k < size; k++) {
    sweep.gradients[k] = (cddp__f32 *)(void *)(d->arenas[k] + at);
    if (k != me)
      sweep.weights[++others] = (cddp__f32 *)(void *)(d->tensors[i].data[k] + inside);
  }
  cddp__pick_sgd_kernels()->sweep(&sweep, size, n);
}

/* Reduces, updates and publishes n elements of parameter i from arena offset `at` on. */
static void cddp__fuse_block(const cddp__fused *f, int i, size_t at, size_t n) {
  double sum[CDDP__BLOCK];
  cddp_ddp *d = f->d;
  const cddp_param *p = &d->params[i];
  const cddp__tensor *t = &d->tensors[i];
  size_t bytes = n * cddp__dtype_size(p->dtype), inside = at - t->offset;
  const void *gradient = d->arena + at;
  char *weights = (char *)p->data + inside;
  void *momentum = NULL;
  int k, size = d->group->locals, me = d->group->number;
  if (!f->averaged && t->used) {
    for (k = 0; k < d->active_count; k++) f->srcs[k] = d->arenas[d->active[k]] + at;
    cddp__reduce(sum, f->srcs, d->active_count, n, p->dtype, CDDP_AVG);
    gradient = sum;
  }
  if (f->shard != NULL) momentum = f->shard->mine + cddp__shard_offset(d, (int)p->dtype, me, at);
  cddp__sgd_update(&f->s->rule, p->dtype, weights, weights, gradient, momentum, n,
                   !f->s->started[i]);
  for (k = 0; k < size; k++) {
    if (t->data != NULL && k != me) memcpy(t->data[k] + inside, weights, bytes);
    if (t->data != NULL || k != me) memset(d->arenas[k] + at, 0, bytes);
  }
  if (t->data == NULL) memcpy(d->arena + at, weights, bytes); /* the others fetch it from here */
}

static void cddp__fuse_slice(const cddp__fused *f) {
  cddp_ddp *d = f->d;
  size_t begin, end, n;
  int i;
  for (i = d->count - 1; i >= 0; i--) { /* ascending in the arena */
    size_t esize = cddp__dtype_size(d->params[i].dtype);
    bool sweeps = cddp__sweeps(f, i);
    if (!cddp__steps(d, f->s, i)) continue;
    if (!cddp__tensor_slice(d, i, d->group->number, &begin, &end)) continue;
    for (; begin < end; begin += n * esize) {
      n = cddp__min(CDDP__BLOCK, (end - begin) / esize);
      if (sweeps) cddp__sweep_block(f, i, begin, n);
      else cddp__fuse_block(f, i, begin, n);
      cddp__sgd_copy(f->s, i, (begin - d->tensors[i].offset) / esize, n);
    }
  }
}

/* Weights that are not shared: fetches the other ranks' slices of them, then clears the places. */
static cddp_result cddp__fetch_weights(cddp_ddp *d, const cddp_sgd *s) {
  size_t begin, end;
  cddp_result r;
  bool any = false;
  int i, p;
  for (i = 0; i < d->count; i++) {
    cddp__tensor *t = &d->tensors[i];
    if (t->data != NULL || !cddp__steps(d, s, i)) continue;
    any = true;
    for (p = 0; p < d->group->locals; p++)
      if (p != d->group->number && cddp__tensor_slice(d, i, p, &begin, &end))
        memcpy((char *)d->params[i].data + (begin - t->offset), d->arenas[p] + begin, end - begin);
  }
  if (!any) return CDDP_OK;
  if ((r = cddp__control_barrier(d, CDDP__KIND_DDP_STEP, 3)) != CDDP_OK) return r;
  for (i = 0; i < d->count; i++)
    if (d->tensors[i].data == NULL && cddp__steps(d, s, i) &&
        cddp__tensor_slice(d, i, d->group->number, &begin, &end))
      memset(d->arena + begin, 0, end - begin);
  return CDDP_OK;
}

/* Copies of the weights that other ranks of this host have updated. */
static void cddp__fuse_copies(cddp_ddp *d, const cddp_sgd *s) {
  size_t begin, end;
  int i, p;
  for (i = 0; s->copies != NULL && i < d->count; i++)
    for (p = 0; s->copies[i] != NULL && cddp__steps(d, s, i) && p < d->group->locals; p++)
      if (p != d->group->number && cddp__tensor_slice(d, i, p, &begin, &end))
        cddp__sgd_copy(s, i, (begin - d->tensors[i].offset) / sizeof(float),
                       (end - begin) / sizeof(float));
}

/* Every rank updates its own copy of the parameters whose gradients are rows. */
static cddp_result cddp__fuse_rows(cddp_ddp *d, cddp_sgd *s) {
  int i;
  for (i = 0; d->sparse != NULL && i < d->count; i++) {
    const cddp_param *p = &d->params[i];
    if (d->sparse[i] == NULL || !cddp__steps(d, s, i)) continue;
    if (s->rule.momentum != 0 && s->momentum[i] == NULL)
      s->momentum[i] = cddp__calloc(&s->allocator, p->count, cddp__dtype_size(p->dtype));
    if (s->rule.momentum != 0 && s->momentum[i] == NULL)
      return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
    cddp__sgd_rows(s, i, d->sparse[i]);
  }
  return CDDP_OK;
}

/* The update itself, between two steps of the control group. */
static cddp_result cddp__fuse(cddp_ddp *d, cddp_sgd *s, bool averaged) {
  const void *few[16];
  cddp__fused f;
  cddp_result r = CDDP_OK;
  int i;
  f.d = d;
  f.s = s;
  f.averaged = averaged;
  f.srcs = few;
  if (s->rule.momentum != 0 && s->shard == NULL) r = cddp__shard_create(d, s);
  if (r != CDDP_OK) return r;
  f.shard = s->rule.momentum != 0 ? (cddp__shard *)s->shard : NULL;
  if (d->group->locals > 16)
    f.srcs = (const void **)cddp__malloc(&d->group->host->allocator,
                                         (size_t)d->group->locals * sizeof *f.srcs);
  if (f.srcs == NULL) return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  CDDP__POINT("fuse");
  cddp__fuse_slice(&f);
  if (f.srcs != few) cddp__free(&d->group->host->allocator, f.srcs);
  if ((r = cddp__fuse_rows(d, s)) != CDDP_OK) return r;
  if ((r = cddp__control_barrier(d, CDDP__KIND_DDP_STEP, 2)) != CDDP_OK) return r;
  if ((r = cddp__fetch_weights(d, s)) != CDDP_OK) return r;
  cddp__fuse_copies(d, s);
  for (i = 0; i < d->count; i++) {
    bool skipped = !cddp__steps(d, s, i);
    if (s->rule.momentum != 0 && !skipped) s->started[i] = true;
    if (skipped) memset(d->arena + d->tensors[i].offset, 0, d->tensors[i].room);
    if (cddp__sparse_of(d, i) != NULL) d->sparse[i]->added.n = d->sparse[i]->mean.n = 0;
    if (!d->tensors[i].placed && d->params[i].count > 0)
      memset(d->params[i].grad, 0, d->params[i].count * cddp__dtype_size(d->params[i].dtype));
  }
  return CDDP_OK;
}

/* Collective: root's momentum to all ranks. None of it is in shards. */
static cddp_result cddp__sync_momentum(cddp_ddp *d, cddp_sgd *s, int root) {
  cddp_group *g = d->control;
  cddp_result r;
  int i;
  r = cddp__run_simple(g, CDDP__KIND_BROADCAST, s->started, s->started, (size_t)d->count, CDDP_U8,
                       root);
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    const cddp_param *p = &d->params[i];
    if (!s->started[i]) continue;
    if (s->momentum[i] == NULL)
      s->momentum[i] = cddp__calloc(&s->allocator, p->count, cddp__dtype_size(p->dtype));
    if (s->momentum[i] == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
    r = cddp__run_simple(g, CDDP__KIND_BROADCAST, s->momentum[i], s->momentum[i], p->count,
                         p->dtype, root);
  }
  return r;
}

/* Collective: after steps that ranks which have joined did not take, brings them root's weights
   and momentum. */
static cddp_result cddp__catch_up(cddp_ddp *d, cddp_sgd *s, int root) {
  cddp_result r = CDDP_OK;
  if (!d->stale) return r;
  r = cddp__broadcast_params(d, d->params, d->count, root);
  if (r == CDDP_OK && s != NULL && s->rule.momentum != 0) r = cddp__sync_momentum(d, s, root);
  if (r == CDDP_OK && s != NULL) cddp__sgd_copy_all(s);
  d->stale = false;
  return r;
}

/* What follows the meeting of a step, on ranks that have joined too. */
static cddp_result cddp__finish_step(cddp_ddp *d, cddp_sgd *s, uint64_t missing) {
  bool averaged = d->desc.comm_hook != NULL || cddp__relayed(d->comm) ||
                  (!d->stepping && d->group->size > 1);
  cddp_result r = cddp__catch_up(d, s, d->active[0]);
  if (r == CDDP_OK && missing > 0) {
    r = cddp__settle_unused(d, cddp__place_gradient);
    if (r == CDDP_OK)
      r = cddp__control_barrier(d, CDDP__KIND_DDP_STEP, 1); /* unused ones are zero */
  }
  if (r == CDDP_OK && averaged) r = cddp__finish_buckets(d);
  if (r == CDDP_OK && (d->desc.comm_hook != NULL || cddp__overdivided(d)))
    r = cddp__control_barrier(d, CDDP__KIND_DDP_STEP, 4); /* every rank has written its result */
  if (r == CDDP_OK) r = cddp__exchange_rows(d, CDDP__KIND_DDP_STEP);
  if (r == CDDP_OK) r = cddp__enter(d->control);
  if (r == CDDP_OK) r = cddp__fuse(d, s, averaged);
  if (r != CDDP_OK) r = cddp__give_up(d, r);
  if (cddp__exit(d->control, r) != CDDP_OK) return r;
  r = cddp__complete(d, true);
  return r == CDDP_OK ? r : cddp__ddp_fail(d, r);
}

static cddp_result cddp__reduce_and_step(cddp_ddp *d, cddp_sgd *s) {
  uint64_t missing = 0;
  cddp_result r = cddp__meet_for_step(d, CDDP__KIND_DDP_STEP, cddp__sgd_hash(s, s->desc.lr), s,
                                      &missing);
  return r == CDDP_OK ? cddp__finish_step(d, s, missing) : cddp__give_up(d, r);
}

static cddp_result cddp__ddp_step(cddp_ddp *d, cddp_sgd *s) {
  uint64_t record;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  record = cddp__record_begin(d->control, CDDP__KIND_DDP_STEP, d->control->calls + 1, 0);
  r = cddp__reduce_and_step(d, s);
  cddp__record_finish(d->control, record, r);
  return r;
}

/* --- compression hooks --- */

static cddp__call cddp__average_call(void *buf, size_t count, cddp_dtype dtype) {
  cddp__call c;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_ALL_REDUCE;
  c.dtype = (uint8_t)dtype;
  c.op = CDDP_AVG;
  c.send = c.recv = buf;
  c.count = count;
  c.esize = cddp__dtype_size(dtype);
  c.root = -1;
  return c;
}

static cddp_result cddp__average(cddp_group *g, void *buf, size_t count, cddp_dtype dtype) {
  cddp__call c = cddp__average_call(buf, count, dtype);
  return cddp__run_call(g, &c);
}

static cddp_result cddp__compress_hook(cddp_bucket *b, cddp_dtype small) {
  void *copy;
  cddp_result r;
  if (b->group->backend != NULL) return b->group->backend->compress(b, small);
  if (cddp__dtype_size(b->dtype) <= 2) return cddp__average(b->group, b->data, b->count, b->dtype);
  copy = cddp__arena_alloc(b->group->host, b->count * 2);
  if (copy == NULL) return CDDP_OUT_OF_MEMORY;
  cddp__convert(copy, small, b->data, b->dtype, b->count);
  r = cddp__average(b->group, copy, b->count, small);
  if (r == CDDP_OK) cddp__convert(b->data, b->dtype, copy, small, b->count);
  cddp__arena_free(b->group->host, copy);
  return r;
}

/* --- creation and destruction --- */

static void cddp__ddp_free(cddp_ddp *d) {
  cddp__host *h = d->group->host;
  const cddp_allocator *a = &h->allocator;
  int i;
  while (d->shards != NULL) {
    cddp_sgd *s = d->shards->sgd; /* its momentum goes with the shard: it starts anew */
    for (i = 0; i < s->count; i++) s->started[i] = false;
    cddp__shard_free(d->shards);
  }
  for (i = 0; d->tensors != NULL && i < d->count; i++)
    if (d->tensors[i].placed) d->params[i].grad = NULL;
  if (d->hooks != NULL) cddp__group_leave(d->hooks);
  if (d->comm != NULL) cddp__group_leave(d->comm);
  if (d->control != NULL) cddp__group_leave(d->control);
  cddp__arena_free(h, d->arena);
  cddp__arena_free(h, d->scratch);
  cddp__plan_free(&d->plan);
  pthread_mutex_destroy(&d->lock);
  cddp__free(a, d->buckets);
  cddp__free(a, d->plan_order);
  cddp__free(a, d->arrival);
  cddp__free(a, d->used);
  cddp__free(a, d->flags);
  for (i = 0; d->sparse != NULL && i < d->count; i++) cddp__sparse_free(a, d->sparse[i]);
  cddp__free(a, d->sparse);
  cddp__free(a, d->lists);
  cddp__free(a, d->arenas);
  cddp__free(a, d->active);
  cddp__free(a, d->addresses);
  cddp__free(a, d->tensors);
  cddp__free(a, d);
}

/* For the parameters whose gradients are rows; false: no memory. */
static bool cddp__sparse_create(cddp_ddp *d) {
  const cddp_allocator *a = &d->group->host->allocator;
  const size_t *rows = d->desc.sparse_rows;
  bool ok = true, any = false;
  int i;
  for (i = 0; rows != NULL && i < d->count; i++) any = any || rows[i] > 0;
  if (!any) return true;
  d->lists = (cddp__row_list *)cddp__calloc(a, (size_t)d->group->size,
                                            sizeof *d->lists + sizeof(void *));
  d->sparse = (cddp__sparse **)cddp__calloc(a, (size_t)d->count, sizeof *d->sparse);
  if (d->lists == NULL || d->sparse == NULL) return false;
  for (i = 0; i < d->count && ok; i++)
    if (rows[i] > 0)
      ok = (d->sparse[i] = cddp__sparse_new(a, &d->params[i], rows[i])) != NULL;
  return ok;
}

static cddp_ddp *cddp__ddp_new(cddp_group *g, cddp_param *params, int count,
                               const cddp_ddp_desc *desc) {
  const cddp_allocator *a = &g->host->allocator;
  size_t n = (size_t)count, size = (size_t)g->size;
  double cap = desc->bucket_cap_mb > 0 ? desc->bucket_cap_mb : 25;
  double first = desc->first_bucket_mb > 0 ? desc->first_bucket_mb
                 : desc->bucket_cap_mb > 0 ? cap
                                           : 1;
  cddp_ddp *d = (cddp_ddp *)cddp__calloc(a, 1, sizeof *d);
  if (d == NULL) return NULL;
  d->group = g;
  d->params = params;
  d->count = count;
  d->desc = *desc;
  d->backend = g->backend;
  d->align = CDDP__CACHE_LINE;
  d->limits[0] = (size_t)(first * 1048576);
  d->limits[1] = (size_t)(cap * 1048576);
  pthread_mutex_init(&d->lock, NULL);
  d->tensors = (cddp__tensor *)cddp__calloc(a, n, sizeof *d->tensors);
  d->plan_order = (int *)cddp__calloc(a, n, sizeof *d->plan_order);
  d->arrival = (int *)cddp__calloc(a, n, sizeof *d->arrival);
  d->used = (unsigned char *)cddp__calloc(a, n, 1);
  d->flags = (unsigned char *)cddp__calloc(a, n, size + 1);
  d->arenas = (char **)cddp__calloc(a, size, sizeof *d->arenas);
  d->active = (int *)cddp__calloc(a, size, sizeof *d->active);
  d->addresses = (char **)cddp__calloc(a, size * n, sizeof *d->addresses);
  if (d->tensors == NULL || d->plan_order == NULL || d->arrival == NULL || d->used == NULL ||
      d->flags == NULL || d->arenas == NULL || d->active == NULL || d->addresses == NULL ||
      !cddp__sparse_create(d)) {
    cddp__ddp_free(d);
    return NULL;
  }
  while ((size_t)d->active_count < size) {
    d->active[d->active_count] = d->active_count;
    d->active_count++;
  }
  return d;
}

/* The collective part of creation. */
static cddp_result cddp__ddp_join(cddp_ddp *d) {
  cddp_group *g = d->group;
  cddp_result r;
  int i;
  if ((r = cddp__split(g, 0, g->rank, CDDP__KIND_DDP_CREATE, &d->control)) != CDDP_OK) return r;
  if ((r = cddp__split(g, 0, g->rank, CDDP__KIND_DDP_CREATE, &d->comm)) != CDDP_OK) return r;
  if ((r = cddp__agree_on_params(d)) != CDDP_OK) return r;
  if (d->desc.comm_hook != NULL &&
      (r = cddp__split(g, 0, g->rank, CDDP__KIND_DDP_CREATE + 1, &d->hooks)) != CDDP_OK)
    return r;
  cddp__lay_out(d);
  if ((r = cddp__share_gradients(d)) != CDDP_OK) return r;
  if ((r = cddp__broadcast_params(d, d->params, d->count, 0)) != CDDP_OK) return r;
  r = cddp__broadcast_params(d, d->desc.buffers, d->desc.buffer_count, 0);
  if (r != CDDP_OK) return r;
  if ((r = cddp__set_plan(d, NULL)) != CDDP_OK) return r;
  cddp__arm(d);
  for (i = 0; i < d->count; i++)
    if (d->tensors[i].placed && cddp__sparse_of(d, i) == NULL)
      d->params[i].grad = d->arena + d->tensors[i].offset;
  return CDDP_OK;
}

static cddp_result cddp__clip(cddp_ddp *d, double max_norm, double *norm) {
  double sum = 0, factor;
  int i;
  for (i = 0; i < d->count; i++) {
    const cddp__sparse *s = cddp__sparse_of(d, i);
    if (d->used[i] && s != NULL && s->mean.n > 0)
      sum += cddp__sum_squares(s->mean.values, s->mean.n * s->width, d->params[i].dtype);
    if (d->used[i] && cddp__dense_count(d, i) > 0)
      sum += cddp__sum_squares(d->params[i].grad, d->params[i].count, d->params[i].dtype);
  }
  if (norm != NULL) *norm = sqrt(sum);
  factor = max_norm / (sqrt(sum) + 1e-6);
  if (!(factor < 1)) return CDDP_OK;
  for (i = 0; i < d->count; i++) {
    const cddp__sparse *s = cddp__sparse_of(d, i);
    if (d->used[i] && s != NULL && s->mean.n > 0)
      cddp__scale(s->mean.values, s->mean.n * s->width, d->params[i].dtype, factor);
    if (d->used[i] && s == NULL)
      cddp__scale(d->params[i].grad, d->params[i].count, d->params[i].dtype, factor);
  }
  return CDDP_OK;
}
/* >>join ---------------------------------------------------------------------------------------
   Uneven inputs: a rank that has no more data takes part in the others' steps. Works as follows:
   each meeting of a cddp_ddp carries who has joined (cddp__muster), so all know over how many ranks
   the mean goes; the first step of a bucket carries it too, since it may come before the meeting.
   A rank that has joined announces ddp_join, which agrees with any call of the others that begins
   with a meeting, looks at what that was, and does its part: in a fused step it reduces and updates
   its slice as ever, while its own gradients are left out of the sums. After a cddp_ddp_wait the
   others step as they like, so weights here become stale; they and the momentum come from a rank
   that has data before the next fused step, or from the last one to join when all have. */

/* Zero weight for a hook, which gets the arena as it is; nothing is left of the others' mean. */
static void cddp__zero_gradients(cddp_ddp *d) {
  int i;
  memset(d->arena, 0, d->bytes);
  for (i = 0; i < d->count; i++) {
    if (!d->tensors[i].placed && d->params[i].count > 0)
      memset(d->params[i].grad, 0, d->params[i].count * cddp__dtype_size(d->params[i].dtype));
    if (cddp__sparse_of(d, i) != NULL) d->sparse[i]->added.n = d->sparse[i]->mean.n = 0;
  }
}

static void cddp__take_over_lr(cddp_sgd *s, double lr) {
  s->desc.lr = lr;
  cddp__sgd_rule_init(&s->rule, &s->desc);
}

/* This rank's cddp_sgd must be the one that the others step with. */
static cddp_result cddp__check_joined_sgd(cddp_ddp *d, const cddp_sgd *s) {
  int rank = d->group->rank, lead = d->active[0];
  if (s != NULL && cddp__muster_of(d, lead).settings == cddp__sgd_hash(s, 0)) return CDDP_OK;
  if (s == NULL)
    cddp__fail(CDDP_MISMATCH,
               "rank %d called ddp_join without a cddp_sgd, rank %d called ddp_step; pass the one "
               "of the training loop",
               rank, lead);
  else
    cddp__fail(CDDP_MISMATCH,
               "the cddp_sgd that rank %d passed to ddp_join has other settings than the one that "
               "rank %d passed to ddp_step",
               rank, lead);
  return cddp__give_up(d, cddp__break(d->control, CDDP_MISMATCH));
}

/* This rank's part of what the others have called. */
static cddp_result cddp__take_part(cddp_ddp *d, cddp_sgd *s, uint64_t missing) {
  int lead = d->active[0];
  uint32_t kind = cddp__line_of(d->control, lead, d->control->step)->call & 255;
  cddp_result r;
  if (kind == CDDP__KIND_DDP_BUFFERS)
    return cddp__broadcast_params(d, d->desc.buffers, d->desc.buffer_count, lead);
  if (kind == CDDP__KIND_DDP_WAIT) {
    r = cddp__finish_wait(d, missing);
    if (r == CDDP_OK) cddp__zero_gradients(d);
    return r;
  }
  if ((r = cddp__check_joined_sgd(d, s)) != CDDP_OK) return r;
  cddp__take_over_lr(s, cddp__muster_of(d, lead).lr);
  return cddp__finish_step(d, s, missing);
}

/* All ranks have joined: who was last has the newest state. */
static cddp_result cddp__end_join(cddp_ddp *d, cddp_sgd *s) {
  uint64_t mine = s != NULL ? cddp__sgd_hash(s, 0) : 0;
  int p, last = 0, n = d->group->size;
  cddp_result r;
  if (!d->shadowed) return CDDP_OK;
  while (last < n - 1 && cddp__muster_of(d, last).joined != CDDP__JOINED_NOW) last++;
  for (p = 0; p < n; p++)
    if (cddp__muster_of(d, p).settings != mine)
      return cddp__fail(CDDP_MISMATCH,
                        "ranks %d and %d called ddp_join with cddp_sgd's of other settings, or one "
                        "of them with none",
                        d->group->rank, p);
  if (s != NULL) cddp__take_over_lr(s, cddp__muster_of(d, last).lr);
  r = cddp__catch_up(d, s, last);
  if (r == CDDP_OK)
    r = cddp__broadcast_params(d, d->desc.buffers, d->desc.buffer_count, last);
  d->shadowed = false;
  return r;
}

static cddp_result cddp__join_steps(cddp_ddp *d, cddp_sgd *s) {
  uint64_t missing = 0, record;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  record = cddp__record_begin(d->control, CDDP__KIND_DDP_JOIN, d->control->calls + 1, 0);
  cddp__zero_gradients(d);
  for (d->joined = CDDP__JOINED_NOW;; d->joined = CDDP__JOINED) {
    r = cddp__meet_for_step(d, CDDP__KIND_DDP_JOIN, 0, s, &missing);
    if (r != CDDP_OK || d->active_count == 0) break;
    if ((r = cddp__take_part(d, s, missing)) != CDDP_OK) break;
  }
  if (r == CDDP_OK) r = cddp__end_join(d, s);
  d->joined = 0;
  if (r != CDDP_OK) r = cddp__give_up(d, r);
  cddp__record_finish(d->control, record, r);
  return r;
}

static cddp_result cddp__sync_buffers(cddp_ddp *d) {
  uint64_t missing;
  cddp_result r = cddp__meet_for_step(d, CDDP__KIND_DDP_BUFFERS, 0, NULL, &missing);
  if (r != CDDP_OK) return r;
  return cddp__broadcast_params(d, d->desc.buffers, d->desc.buffer_count, d->active[0]);
}

/* >>cuda ---------------------------------------------------------------------------------------
   What both kinds of data plane share: devices, pointers, streams, notes of calls, and the
   watcher. Works as follows: an operation is noted in the rank's seat (number, what was called,
   a hash of all calls so far), issued to a stream, and followed there by events. The watcher, one
   thread per process, looks at every plane every few milliseconds: whether the group was broken,
   NCCL failed, a process died, ranks called different things, or an event is too late. It breaks
   the group and aborts the communicator, so that all streams of all ranks come to an end. Notes
   are compared at the latest call that both ranks have made: equal hashes mean that all calls
   before were alike. Nobody waits for a comparison.

   A group of several hosts has its hosts in a binary tree, by their number in the group. Each
   host's leader sends its latest notes to the leaders of the hosts above and below, as messages of
   the group (>>hosts), and writes theirs into their seats here, where all ranks of the host compare
   them: hosts that agree with their neighbours all agree. The links show the end of a leader; other
   ranks are looked after by those of their host, who tell of what they find. */

static const cddp_kernels *cddp__registered_kernels;

#ifdef CDDP_CUDA

#define CDDP__WATCH_S 0.005 /* between two looks of the watcher */
#define CDDP__GONE_S 0.1    /* to see that what NCCL began is done, after a peer has gone */
#ifndef CDDP__LEFT_S
#define CDDP__LEFT_S 2.0    /* to finish operations on a device after a peer has left the group */
#endif
#define CDDP__HASHES 4096   /* by how many calls ranks may be apart, a power of two */
#define CDDP__NOTE_BYTES 124
#define CDDP__NOTES_SENT 16   /* notes in a message, at most: the newest */
#define CDDP__NOTES_TAG (-1)  /* of such messages; a program's tags are 0 and above */

static cddp_result cddp__cuda_result(cudaError_t e, const char *what) {
  if (CDDP__LIKELY(e == cudaSuccess)) return CDDP_OK;
  (void)cudaGetLastError(); /* it would come back at the program's next check */
  return cddp__fail(CDDP_CUDA, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

/* Makes the device this thread's, unless it is already. */
static cddp_result cddp__use_device(int device) {
  int now = -1;
  if (cudaGetDevice(&now) == cudaSuccess && now == device) return CDDP_OK;
  return cddp__cuda_result(cudaSetDevice(device), "cudaSetDevice");
}

static cddp__atomic_u32 cddp__device_groups; /* 1: this process has had one */

/* Whether memory may lie on a device: asked before the first call that would set CUDA up, or fail,
   in a process that has no business with it. */
static bool cddp__cuda_in_use(void) {
  int version = 0;
  if (cddp__load32(&cddp__device_groups) != 0) return true;
  return cddp__registered_kernels != NULL && cudaDriverGetVersion(&version) == cudaSuccess &&
         version > 0; /* 0: no driver */
}

static bool cddp__capturing(cudaStream_t s) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(s, &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError(); /* the default stream, while another is captured */
  return false;
}

/* `to` goes on after all that is on `from` now. */
static cddp_result cddp__stream_after(cudaStream_t to, cudaStream_t from, cudaEvent_t event) {
  cddp_result r = cddp__cuda_result(cudaEventRecord(event, from), "cudaEventRecord");
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(cudaStreamWaitEvent(to, event, 0), "cudaStreamWaitEvent");
}

static cddp_result cddp__event_new(cudaEvent_t *event) {
  return cddp__cuda_result(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                           "cudaEventCreateWithFlags");
}

static void cddp__event_free(cudaEvent_t *event) {
  if (*event != NULL) cudaEventDestroy(*event);
  *event = NULL;
}

static cddp_result cddp__device_copy(void *to, const void *from, size_t bytes, cudaStream_t s) {
  if (bytes == 0 || to == from) return CDDP_OK;
  return cddp__cuda_result(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s),
                           "cudaMemcpyAsync");
}

static cddp_result cddp__device_zero(void *p, size_t bytes, cudaStream_t s) {
  if (bytes == 0) return CDDP_OK;
  return cddp__cuda_result(cudaMemsetAsync(p, 0, bytes, s), "cudaMemsetAsync");
}

enum { CDDP__MEMORY_HOST, CDDP__MEMORY_DEVICE };

/* Where p lies: on the plane's device, in host memory, or (an error) on another device. */
static cddp_result cddp__memory_of(int device, const void *p, const char *what, int *memory) {
  struct cudaPointerAttributes a;
  cddp_result r = cddp__cuda_result(cudaPointerGetAttributes(&a, p), "cudaPointerGetAttributes");
  *memory = CDDP__MEMORY_HOST;
  if (r != CDDP_OK || (a.type != cudaMemoryTypeDevice && a.type != cudaMemoryTypeManaged)) return r;
  *memory = CDDP__MEMORY_DEVICE;
  if (a.type == cudaMemoryTypeManaged || a.device == device) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "%s lies on cuda:%d, but this rank's device is cuda:%d",
                    what, a.device, device);
}

/* Where a call's buffers lie; an error if they differ. */
static cddp_result cddp__memory_of_call(const cddp__plane *p, const cddp__call *c, bool *device) {
  int send = CDDP__MEMORY_DEVICE, recv = CDDP__MEMORY_DEVICE;
  bool root = p->group->rank == c->root; /* off it one of them is not looked at */
  const void *from = c->kind == CDDP__KIND_SCATTER && !root ? NULL : c->send;
  const void *to = c->kind == CDDP__KIND_GATHER && !root ? NULL : c->recv;
  const char *name = c->kind <= CDDP__KIND_BROADCAST || c->kind > CDDP__KIND_COUNT ? "buf" : "send";
  cddp_result r = CDDP_OK;
  *device = true;
  if (c->count == 0) return CDDP_OK;
  if (from != NULL) r = cddp__memory_of(p->device, from, name, &send);
  if (r == CDDP_OK && to != NULL && to != from)
    r = cddp__memory_of(p->device, to, "recv", &recv);
  if (to == NULL || to == from) recv = send;
  if (from == NULL) send = recv;
  if (r != CDDP_OK) return r;
  if (send != recv)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "send and recv must both lie on the device, or both in host memory");
  *device = send == CDDP__MEMORY_DEVICE;
  return CDDP_OK;
}

/* --- notes of calls --- */

/* Appends what this rank calls to its notes. */
static void cddp__note_call(cddp__plane *p, const cddp__call *c, bool device) {
  cddp__seat *seat = cddp__seat_of(p->group, p->group->rank);
  cddp__note *to;
  struct {
    uint64_t count;
    uint32_t call;
    int32_t root;
  } what;
  memset(&what, 0, sizeof what);
  what.call = cddp__call_code(c, device ? 0 : CDDP__PHASE_HOST);
  what.count = c->count;
  what.root = (int32_t)c->root;
  pthread_mutex_lock(&p->lock);
  p->hash = cddp__hash64(p->hash, &what, sizeof what);
  to = &seat->notes[++p->calls & (CDDP__NOTES - 1)];
  p->hashes[p->calls & (CDDP__HASHES - 1)] = p->hash;
  cddp__exchange32(&to->number, 0); /* a fence, which gcc's tsan lacks; so is cddp__add32 below */
  to->call = what.call;
  to->count = what.count;
  to->root = what.root;
  to->hash = p->hash;
  to->site[0] = 0;
  if (c->kind != CDDP__KIND_DDP_BUCKET) cddp__describe_site(to->site, sizeof to->site);
  cddp__store32(&to->number, p->calls);
  cddp__store32(&seat->calls, p->calls);
  pthread_mutex_unlock(&p->lock);
}

/* A copy of a rank's note of call number n; false if it was overwritten. */
static bool cddp__read_note(const cddp_group *g, int rank, uint32_t n, cddp__note *out) {
  cddp__note *from = &cddp__seat_of(g, rank)->notes[n & (CDDP__NOTES - 1)];
  if (cddp__load32(&from->number) != n) return false;
  out->call = from->call;
  out->count = from->count;
  out->root = from->root;
  out->hash = from->hash;
  memcpy(out->site, from->site, sizeof out->site - 1);
  out->site[sizeof out->site - 1] = 0;
  return cddp__add32(&from->number, 0) == n;
}

static cddp_result cddp__break_notes(cddp__plane *p, int rank, uint32_t first, uint32_t n) {
  cddp_group *g = p->group;
  cddp__note mine, theirs;
  char a[160], b[160];
  bool low = g->rank < rank;
  uint32_t i;
  for (i = first; i <= n; i++) {
    if (!cddp__read_note(g, g->rank, i, &mine) || !cddp__read_note(g, rank, i, &theirs)) continue;
    if (mine.call == theirs.call && mine.count == theirs.count && mine.root == theirs.root)
      continue;
    cddp__describe_call(a, sizeof a, mine.call, mine.count, mine.root);
    cddp__describe_call(b, sizeof b, theirs.call, theirs.count, theirs.root);
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree in call %" PRIu32 " of the group: rank %d called %s%s, rank %d "
               "called %s%s",
               i, low ? g->rank : rank, low ? a : b, low ? mine.site : theirs.site,
               low ? rank : g->rank, low ? b : a, low ? theirs.site : mine.site);
    return cddp__break(g, CDDP_MISMATCH);
  }
  cddp__fail(CDDP_MISMATCH,
             "ranks %d and %d disagree in their calls %" PRIu32 " to %" PRIu32 " of the group",
             g->rank, rank, first, n);
  return cddp__break(g, CDDP_MISMATCH);
}

/* Compares what all ranks have called so far, without waiting for any. */
static cddp_result cddp__compare_notes(cddp__plane *p) {
  cddp_group *g = p->group;
  cddp__note theirs;
  int q;
  for (q = 0; q < g->size; q++) { /* of another host's rank there may be no notes: 0 calls */
    uint32_t n = cddp__load32(&cddp__seat_of(g, q)->calls), since;
    bool same;
    pthread_mutex_lock(&p->lock);
    since = p->compared[q];
    if ((int32_t)(n - p->calls) > 0) n = p->calls;
    same = n == since || p->calls - n >= CDDP__HASHES || !cddp__read_note(g, q, n, &theirs);
    if (!same && p->hashes[n & (CDDP__HASHES - 1)] == theirs.hash)
      same = true, p->compared[q] = n;
    pthread_mutex_unlock(&p->lock);
    if (!same) return cddp__break_notes(p, q, since + 1, n);
  }
  return CDDP_OK;
}

/* --- notes between hosts --- */

/* Whether this host knows how much the rank has called. */
static bool cddp__knows_calls(const cddp_group *g, int rank) {
  int i;
  if (g->members[rank] >= 0) return true;
  for (i = 0; i < CDDP__NEIGHBOURS; i++)
    if (cddp__neighbour(g->hosts, i) == rank) return true;
  return false;
}

/* Tells a neighbour what this rank has called since the last time. mail_lock held. */
static void cddp__send_notes(cddp_group *g, int peer, uint32_t *told) {
  unsigned char head[CDDP__LINK_HEAD], body[CDDP__NOTES_SENT * CDDP__NOTE_BYTES];
  uint32_t calls = cddp__load32(&cddp__seat_of(g, g->rank)->calls), i;
  size_t bytes = 0;
  cddp__link *l;
  if (cddp__fate_of(g, peer) != CDDP__FATE_ALIVE) return;
  if ((l = cddp__mail_link(g, peer)) == NULL) return; /* then only the deadline tells */
  cddp__mail_push(g, l);
  if (l->state == CDDP__LINK_DEAD || l->letters != NULL || calls == *told) return;
  for (i = calls - *told < CDDP__NOTES_SENT ? *told + 1 : calls - CDDP__NOTES_SENT + 1;
       (int32_t)(calls - i) >= 0; i++) {
    unsigned char *out = body + bytes;
    cddp__note note;
    if (!cddp__read_note(g, g->rank, i, &note)) continue;
    cddp__put32(out, i);
    cddp__put32(out + 4, note.call);
    cddp__put64(out + 8, note.count);
    cddp__put32(out + 16, (uint32_t)note.root);
    cddp__put64(out + 20, note.hash);
    memcpy(out + 28, note.site, sizeof note.site);
    bytes += CDDP__NOTE_BYTES;
  }
  cddp__mail_head(head, CDDP__NOTES_TAG, CDDP_U8, bytes, bytes);
  if (cddp__mail_keep(g, l, head, body, bytes) != CDDP_OK) return;
  *told = calls;
  cddp__mail_push(g, l);
}

/* Writes a neighbour's note into its seat on this host, of which this rank is the only writer. */
static void cddp__mirror_note(cddp_group *g, int rank, const unsigned char *in) {
  cddp__seat *seat = cddp__seat_of(g, rank);
  uint32_t number = cddp__get32(in);
  cddp__note *to = &seat->notes[number & (CDDP__NOTES - 1)];
  cddp__exchange32(&to->number, 0);
  to->call = cddp__get32(in + 4);
  to->count = cddp__get64(in + 8);
  to->root = (int32_t)cddp__get32(in + 16);
  to->hash = cddp__get64(in + 20);
  memcpy(to->site, in + 28, sizeof to->site - 1);
  to->site[sizeof to->site - 1] = 0;
  cddp__store32(&to->number, number);
  cddp__store32(&seat->calls, number);
}

/* Takes the notes out of the messages that have come. mail_lock held. */
static void cddp__take_notes(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp__letter **at = &x->letters, *before = NULL, *l;
  size_t i;
  while ((l = *at) != NULL) {
    if (l->tag != CDDP__NOTES_TAG) {
      before = l;
      at = &l->next;
      continue;
    }
    for (i = 0; i + CDDP__NOTE_BYTES <= l->size; i += CDDP__NOTE_BYTES)
      cddp__mirror_note(g, l->from, (const unsigned char *)(l + 1) + i);
    x->letter_bytes -= l->size;
    *at = l->next;
    if (x->last_letter == l) x->last_letter = before;
    cddp__free(&x->net->allocator, l);
  }
}

/* In a group of several hosts: tells the others what was called here, hears what was called there,
   what has failed and who is gone. Never waits; any thread. */
static void cddp__exchange_notes(cddp__plane *p) {
  cddp_group *g = p->group;
  cddp__hosts *x = g->hosts;
  int i, q;
  if (x == NULL) return;
  if (x->me != 0) { /* its host's leader sees to the rest */
    cddp__hosts_look(g);
    return;
  }
  pthread_mutex_lock(&g->mail_lock);
  cddp__hosts_serve(g);
  cddp__take_notes(g);
  for (i = 0; i < CDDP__NEIGHBOURS; i++) {
    if ((q = cddp__neighbour(x, i)) < 0) continue;
    cddp__mail_watch_peer(g, q);
    cddp__send_notes(g, q, &p->told[i]);
  }
  pthread_mutex_unlock(&g->mail_lock);
}

/* --- failure --- */

static cddp__atomic_u32 cddp__endings; /* communicators of this process that are on their way out */

static void cddp__ending_release(cddp__ending *x) {
  if (x != NULL && cddp__add32(&x->refs, (uint32_t)-1) == 0) free(x);
}

static void *cddp__end_main(void *ending) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cddp__ending *x = (cddp__ending *)ending;
  ncclComm_t made;
  (void)cudaSetDevice(x->device);
  cudaThreadExchangeStreamCaptureMode(&mode); /* what is freed here is no part of a graph */
  if (x->comm != NULL && (x->abort || ncclCommDestroy(x->comm) != ncclSuccess))
    ncclCommAbort(x->comm); /* joins who may write to made */
  made = __atomic_load_n(&x->made, __ATOMIC_RELAXED);
  if (made != NULL) ncclCommAbort(made);
  cudaThreadExchangeStreamCaptureMode(&mode); /* the thread may be the caller's */
  cddp__store32(&x->done, 1);
  cddp__ending_release(x);
  cddp__add32(&cddp__endings, (uint32_t)-1);
  return NULL;
}

/* Gives the communicator to a thread that ends it: abort, for which the group has been broken
   before, makes all operations on this rank's streams end at once. Never waits. */
static void cddp__plane_end(cddp__plane *p, bool abort) {
  cddp__ending *x = p->end;
  pthread_t thread;
  bool first;
  pthread_mutex_lock(&p->lock);
  first = !p->aborted;
  p->aborted = true;
  if (first) {
    x->comm = p->comm;
    x->abort = abort;
  }
  p->comm = NULL;
  pthread_mutex_unlock(&p->lock);
  if (!first) return;
  cddp__add32(&x->refs, 1);
  cddp__add32(&cddp__endings, 1);
  if (x->comm == NULL && __atomic_load_n(&x->made, __ATOMIC_RELAXED) == NULL)
    cddp__end_main(x);
  else if (cddp__thread_start(&thread, cddp__end_main, x) == CDDP_OK)
    pthread_detach(thread);
  else
    cddp__end_main(x);
}

static void cddp__plane_abort(cddp__plane *p) { cddp__plane_end(p, true); }

/* After an abort: until NCCL's threads have let go of the operations' memory. That takes a moment;
   where there is a CUDA graph with the group's operations the rest of it waits for the graph. */
static void cddp__await_abort(cddp__plane *p) {
  double deadline = cddp__now() + (cddp__load32(&p->graphs->alive) != 0 ? 0.1 : CDDP__LEFT_S);
  bool aborted;
  pthread_mutex_lock(&p->lock);
  aborted = p->aborted && p->end->abort;
  pthread_mutex_unlock(&p->lock);
  while (aborted && cddp__load32(&p->end->done) == 0 && cddp__now() < deadline) cddp__sleep(1e-4);
}

/* Breaks the group if a rank's process is gone. */
static cddp_result cddp__break_dead(cddp_group *g, const char *doing) {
  char who[160], how[80];
  int q;
  for (q = 0; q < g->size; q++) {
    if (q == g->rank || !cddp__rank_gone(g, q)) continue;
    cddp__name_rank(g, q, who, sizeof who);
    cddp__describe_end(g, q, how, sizeof how);
    cddp__fail(CDDP_PEER_LOST, "%s %s; rank %d was in %s", who, how, g->rank, doing);
    return cddp__break_lost(g, q);
  }
  return CDDP_OK;
}

/* This rank sees an effect: the cause, a death or another rank's failure, gets a moment to show. */
static cddp_result cddp__await_cause(cddp__plane *p, const char *doing, double seconds) {
  double deadline = cddp__now() + seconds;
  cddp_result r;
  do {
    cddp__exchange_notes(p);
    if ((r = cddp__check_board(p->group)) != CDDP_OK) return r;
    if ((r = cddp__break_dead(p->group, doing)) != CDDP_OK) return r;
    cddp__sleep(0.002);
  } while (cddp__now() < deadline);
  return CDDP_OK;
}

/* Breaks the group over a failure of NCCL. What follows from a death may be seen before it. */
static cddp_result cddp__break_nccl(cddp__plane *p, ncclResult_t e, const char *what) {
  bool remote = e != ncclInvalidArgument && e != ncclInvalidUsage; /* a death has many faces */
  cddp_group *g = p->group;
  char text[CDDP__ERROR_MAX];
  cddp_result r;
  snprintf(text, sizeof text, "rank %d: %s: %s (%.300s)", g->rank, what, ncclGetErrorString(e),
           ncclGetLastError(NULL));
  r = cddp__await_cause(p, what, remote ? CDDP__CAUSE_S : 0.01);
  if (r != CDDP_OK) return r;
  cddp__fail(CDDP_NCCL, "%s", text);
  return cddp__break(g, CDDP_NCCL);
}

/* --- the watcher --- */

static pthread_mutex_t cddp__watch_lock = PTHREAD_MUTEX_INITIALIZER;
static cddp__plane *cddp__watched; /* guarded by cddp__watch_lock, as are the next three */
static pthread_t cddp__watcher;
static bool cddp__watching;
static pid_t cddp__watch_pid;              /* of the process whose watcher it is */
static cddp__atomic_u32 cddp__watch_shift; /* a watcher ends when this changes; it sleeps on it */

/* Whether the event lies ahead; *fault: what the device failed with, if it did. */
static bool cddp__event_ahead(cudaEvent_t event, cudaError_t *fault) {
  cudaError_t e = cudaEventQuery(event);
  if (e != cudaSuccess) (void)cudaGetLastError(); /* cudaErrorNotReady counts as one */
  if (e == cudaErrorCudartUnloading) return false; /* the process ends without cddp_destroy */
  if (e != cudaSuccess && e != cudaErrorNotReady) *fault = e;
  return e == cudaErrorNotReady;
}

/* Updates and tells whether operations of the plane are on the device, those of graphs left aside;
   *late: for longer than a deadline allows. */
static bool cddp__plane_pending(cddp__plane *p, bool *late, cudaError_t *fault) {
  bool pending;
  *fault = cudaSuccess;
  pthread_mutex_lock(&p->lock);
  if (p->pending) p->pending = cddp__event_ahead(p->last, fault);
  if (p->probing) p->probing = cddp__event_ahead(p->probe, fault);
  *late = (p->probing || p->pending) &&
          cddp__now() - (p->probing ? p->probe_since : p->last_since) > p->group->timeout_s;
  pending = p->pending;
  pthread_mutex_unlock(&p->lock);
  return pending;
}

static uint32_t cddp__calls_of(cddp__plane *p) {
  uint32_t n;
  pthread_mutex_lock(&p->lock);
  n = p->calls;
  pthread_mutex_unlock(&p->lock);
  return n;
}

static cddp_result cddp__break_pending(cddp__plane *p) { /* an operation is too late */
  cddp_group *g = p->group;
  char who[160], late[256] = "";
  uint32_t calls = cddp__calls_of(p);
  cddp_result r;
  int q, n = 0;
  for (q = 0; q < g->size; q++) {
    if (!cddp__knows_calls(g, q)) continue;
    if ((int32_t)(cddp__load32(&cddp__seat_of(g, q)->calls) - calls) >= 0) continue;
    cddp__name_rank(g, q, who, sizeof who);
    if (n++ < 2)
      snprintf(late + strlen(late), sizeof late - strlen(late), "%s%s", n > 1 ? ", " : ": ", who);
  }
  if (n == 0 && g->hosts != NULL) { /* another host may know who is late */
    r = cddp__await_cause(p, "operations on its device", 3 * CDDP__NEWS_S);
    if (r != CDDP_OK) return r;
  }
  cddp__fail(CDDP_TIMEOUT,
             "timed out after %g s: an operation of rank %d on cuda:%d has not ended%s%s%s",
             g->timeout_s, g->rank, p->device, n > 0 ? "; behind it in calls" : "", late,
             n > 2 ? " and others" : "");
  return cddp__break(g, CDDP_TIMEOUT);
}

/* Breaks the group if operations wait for a rank that is gone. One that left after the same number
   of calls has done its part: what is still on the device here gets a moment. Whether a graph runs
   nobody tells: with a rank that died it would never end, one that left has seen the end of its. */
static cddp_result cddp__look_for_lost(cddp__plane *p, bool pending) {
  cddp_group *g = p->group;
  char who[160], how[80];
  int q;
  for (q = 0; q < g->size; q++) {
    cddp__seat *seat = cddp__seat_of(g, q);
    bool behind, left;
    if (q == g->rank || !cddp__rank_gone(g, q)) continue;
    left = g->members[q] >= 0 ? cddp__load32(&seat->state) == CDDP__SEAT_LEFT
                              : g->hosts->fate_errors[q] == CDDP__LEFT;
    behind = cddp__knows_calls(g, q) &&
             (int32_t)(cddp__calls_of(p) - cddp__load32(&seat->calls)) > 0;
    if (!behind && !pending && (left || cddp__load32(&p->graphs->alive) == 0)) continue;
    if (!behind && left) {
      if (p->left_since == 0) p->left_since = cddp__now();
      if (cddp__now() - p->left_since < CDDP__LEFT_S) continue;
    }
    cddp__name_rank(g, q, who, sizeof who);
    cddp__describe_end(g, q, how, sizeof how);
    cddp__fail(CDDP_PEER_LOST, "%s %s; rank %d had operations with it on cuda:%d", who, how,
               g->rank, p->device);
    return cddp__break_lost(g, q);
  }
  return CDDP_OK;
}

/* First what asks neither CUDA nor NCCL: a call of the program's that waits for a dead rank may
   hold their locks. */
static cddp_result cddp__look_at_plane(cddp__plane *p) {
  ncclResult_t e = ncclSuccess;
  cudaError_t fault = cudaSuccess;
  bool late = false, pending;
  cddp_result r;
  cddp__exchange_notes(p);
  if ((r = cddp__check_group(p->group)) != CDDP_OK) return r;
  if ((r = cddp__compare_notes(p)) != CDDP_OK) return r;
  pthread_mutex_lock(&p->lock);
  pending = p->pending;
  pthread_mutex_unlock(&p->lock);
  if ((r = cddp__look_for_lost(p, pending)) != CDDP_OK) return r;
  pthread_mutex_lock(&p->lock);
  if (p->comm != NULL && ncclCommGetAsyncError(p->comm, &e) != ncclSuccess) e = ncclInternalError;
  pthread_mutex_unlock(&p->lock);
  (void)cddp__plane_pending(p, &late, &fault);
  if (e != ncclSuccess && e != ncclInProgress)
    return cddp__break_nccl(p, e, "an asynchronous NCCL operation");
  if (fault != cudaSuccess) {
    cddp__fail(CDDP_CUDA, "rank %d: cuda:%d failed during the group's operations: %s (%s)",
               p->group->rank, p->device, cudaGetErrorString(fault), cudaGetErrorName(fault));
    return cddp__break(p->group, CDDP_CUDA);
  }
  return late ? cddp__break_pending(p) : CDDP_OK;
}

/* A cddp_ddp's private group and the user's, whose work is on the same streams: the private one
   fails with the other, the other over what may leave streams with undefined results. */
static void cddp__break_both(cddp_group *private_group, cddp_group *users) {
  cddp_result r = cddp__check_group(users);
  if (r != CDDP_OK) {
    if (cddp__load32(&private_group->board->broken) == 0) (void)cddp__break(private_group, r);
    return;
  }
  r = cddp__check_group(private_group);
  if (r == CDDP_PEER_LOST || r == CDDP_TIMEOUT || r == CDDP_NCCL || r == CDDP_CUDA)
    (void)cddp__break(users, r);
}

/* Looks at every plane before any communicator ends: what a stream still does then is undefined,
   and whoever asks must hear of the failure. */
static void cddp__watch_all(void) {
  cddp__plane *p;
  for (p = cddp__watched; p != NULL; p = p->next) {
    cddp_group *parent;
    bool healthy;
    pthread_mutex_lock(&p->lock);
    healthy = !p->aborted;
    parent = p->parent;
    pthread_mutex_unlock(&p->lock);
    p->doomed = healthy && cddp__use_device(p->device) == CDDP_OK;
    if (p->doomed) p->doomed = cddp__look_at_plane(p) != CDDP_OK;
    if (parent != NULL) cddp__break_both(p->group, parent);
  }
  for (p = cddp__watched; p != NULL; p = p->next)
    if (p->doomed) cddp__plane_abort(p);
}

static void *cddp__watch_main(void *shift) {
  enum cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;
  uint32_t mine = (uint32_t)(uintptr_t)shift;
  cudaThreadExchangeStreamCaptureMode(&relaxed); /* its queries are no part of anyone's graph */
  while (cddp__load32(&cddp__watch_shift) == mine) {
    pthread_mutex_lock(&cddp__watch_lock);
    cddp__watch_all();
    pthread_mutex_unlock(&cddp__watch_lock);
    cddp__futex_wait(&cddp__watch_shift, mine, CDDP__WATCH_S);
  }
  return NULL;
}

static cddp_result cddp__watch(cddp__plane *p) {
  cddp_result r = CDDP_OK;
  pthread_mutex_lock(&cddp__watch_lock);
  if (cddp__watch_pid != getpid()) { /* after a fork: the parent's are not ours */
    cddp__watching = false;
    cddp__watched = NULL;
    cddp__store32(&cddp__endings, 0);
    cddp__watch_pid = getpid();
  }
  if (!cddp__watching) {
    uintptr_t shift = cddp__load32(&cddp__watch_shift);
    r = cddp__thread_start(&cddp__watcher, cddp__watch_main, (void *)shift);
    cddp__watching = r == CDDP_OK;
  }
  if (r == CDDP_OK) {
    p->next = cddp__watched;
    cddp__watched = p;
  }
  pthread_mutex_unlock(&cddp__watch_lock);
  return r;
}

/* The last plane to go takes the thread with it. */
static void cddp__unwatch(cddp__plane *p) {
  cddp__plane **link;
  pthread_t thread;
  bool last;
  pthread_mutex_lock(&cddp__watch_lock);
  for (link = &cddp__watched; *link != NULL && *link != p; link = &(*link)->next) {}
  if (*link == NULL) {
    pthread_mutex_unlock(&cddp__watch_lock);
    return;
  }
  *link = p->next;
  last = cddp__watched == NULL;
  thread = cddp__watcher;
  if (last) {
    cddp__watching = false;
    cddp__add32(&cddp__watch_shift, 1);
    cddp__futex_wake(&cddp__watch_shift);
  }
  pthread_mutex_unlock(&cddp__watch_lock);
  if (last) pthread_join(thread, NULL);
}

/* Without planes the process may end soon: NCCL's threads get a moment to be out of the way. */
static void cddp__await_endings(void) {
  double deadline = cddp__now() + CDDP__LEFT_S;
  bool last;
  pthread_mutex_lock(&cddp__watch_lock);
  last = cddp__watched == NULL;
  pthread_mutex_unlock(&cddp__watch_lock);
  while (last && cddp__load32(&cddp__endings) != 0 && cddp__now() < deadline) cddp__sleep(1e-4);
}

static void cddp__graphs_release(cddp__graphs *k) {
  if (k != NULL && cddp__add32(&k->refs, (uint32_t)-1) == 0) free(k);
}

/* CUDA calls it when a counted graph, and all that was made from it, has been destroyed. */
static void cddp__graph_gone(void *graphs) {
  cddp__graphs *k = (cddp__graphs *)graphs;
  cddp__add32(&k->alive, (uint32_t)-1);
  cddp__graphs_release(k);
}

/* Counts the graph that s is captured into, once. Should CUDA refuse to tell of its end, it counts
   for ever. lock held. */
static void cddp__count_graph(cddp__plane *p, cudaStream_t s) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaUserObject_t object = NULL;
  cudaGraph_t graph = NULL;
#if CUDART_VERSION >= 13000
  cudaError_t e = cudaStreamGetCaptureInfo(s, &status, &id, &graph, NULL, NULL, NULL);
#else
  cudaError_t e = cudaStreamGetCaptureInfo_v2(s, &status, &id, &graph, NULL, NULL);
#endif
  if (e == cudaSuccess && status != cudaStreamCaptureStatusActive) e = cudaErrorUnknown;
  if (e == cudaSuccess && id == p->capture) return;
  p->capture = id;
  cddp__add32(&p->graphs->alive, 1);
  if (e == cudaSuccess)
    e = cudaUserObjectCreate(&object, p->graphs, cddp__graph_gone, 1,
                             cudaUserObjectNoDestructorSync);
  if (e == cudaSuccess) {
    cddp__add32(&p->graphs->refs, 1);
    e = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  }
  if (e != cudaSuccess) (void)cudaGetLastError();
}

/* Whether CUDA graphs hold operations of the plane, and with them the addresses of its memory. Of
   one that has been destroyed CUDA tells a little later. */
static bool cddp__in_graphs(cddp__plane *p) {
  double deadline = cddp__now() + 0.5;
  while (cddp__load32(&p->graphs->alive) != 0 && cddp__now() < deadline) cddp__sleep(1e-3);
  return cddp__load32(&p->graphs->alive) != 0;
}

/* Puts events behind an operation just enqueued, for the watcher. */
static cddp_result cddp__track(cddp__plane *p, cudaStream_t s) {
  cudaError_t e = cudaSuccess;
  bool capturing = cddp__capturing(s);
  pthread_mutex_lock(&p->lock);
  if (capturing) {
    cddp__count_graph(p, s);
  } else {
    e = cudaEventRecord(p->last, s);
    p->pending = e == cudaSuccess;
    p->last_since = cddp__now();
    if (e == cudaSuccess && !p->probing) {
      e = cudaEventRecord(p->probe, s);
      p->probing = e == cudaSuccess;
      p->probe_since = p->last_since;
    }
  }
  pthread_mutex_unlock(&p->lock);
  return cddp__cuda_result(e, "cudaEventRecord");
}

/* --- planes --- */

static void cddp__plane_free(cddp__plane *p) {
  const cddp_allocator *a = &p->group->host->allocator;
  cddp__block *b;
  while ((b = p->blocks) != NULL) {
    p->blocks = b->next;
    cudaFree(b->address);
    cddp__free(a, b);
  }
  if (p->scratch != NULL) cudaFree(p->scratch);
  cddp__arena_free(p->group->host, p->stage);
  cddp__event_free(&p->fork);
  cddp__event_free(&p->join);
  cddp__event_free(&p->last);
  cddp__event_free(&p->probe);
  if (p->side != NULL) cudaStreamDestroy(p->side);
  pthread_mutex_destroy(&p->turn);
  pthread_mutex_destroy(&p->lock);
  cddp__graphs_release(p->graphs);
  cddp__ending_release(p->end);
  cddp__free(a, p->compared);
  cddp__free(a, p->hashes);
  cddp__free(a, p);
}

/* A plane without a communicator, not yet watched. */
static cddp_result cddp__plane_new(cddp__plane **out, cddp_group *g, int device,
                                   cudaStream_t stream) {
  const cddp_allocator *a = &g->host->allocator;
  cddp__plane *p = (cddp__plane *)cddp__calloc(a, 1, sizeof *p);
  int least = 0, greatest = 0;
  cddp_result r;
  *out = NULL;
  if (p == NULL) return CDDP_OUT_OF_MEMORY;
  cddp__store32(&cddp__device_groups, 1);
  p->group = g;
  p->device = device;
  p->stream = stream;
  pthread_mutex_init(&p->turn, NULL);
  pthread_mutex_init(&p->lock, NULL);
  p->compared = (uint32_t *)cddp__calloc(a, (size_t)g->size, sizeof *p->compared);
  p->hashes = (uint64_t *)cddp__calloc(a, CDDP__HASHES, sizeof *p->hashes);
  p->graphs = (cddp__graphs *)cddp__calloc(NULL, 1, sizeof *p->graphs); /* may outlive the group, */
  p->end = (cddp__ending *)cddp__calloc(NULL, 1, sizeof *p->end);       /* as may this */
  if (p->graphs != NULL) p->graphs->refs.v = 1;
  if (p->end != NULL) p->end->refs.v = 1;
  if (p->end != NULL) p->end->device = device;
  r = CDDP_OUT_OF_MEMORY;
  if (p->compared != NULL && p->hashes != NULL && p->graphs != NULL && p->end != NULL)
    r = cddp__use_device(device);
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                          "cudaDeviceGetStreamPriorityRange");
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaStreamCreateWithPriority(&p->side, cudaStreamNonBlocking, greatest),
                          "cudaStreamCreateWithPriority");
  if (r == CDDP_OK) r = cddp__event_new(&p->fork);
  if (r == CDDP_OK) r = cddp__event_new(&p->join);
  if (r == CDDP_OK) r = cddp__event_new(&p->last);
  if (r == CDDP_OK) r = cddp__event_new(&p->probe);
  if (r != CDDP_OK)
    cddp__plane_free(p);
  else
    *out = p;
  return r;
}

static cddp__plane *cddp__plane_of(const cddp_group *g) { return (cddp__plane *)g->plane; }

static void cddp__plane_set_stream(cddp_group *g, void *stream) {
  cddp__plane_of(g)->stream = (cudaStream_t)stream;
}

static void *cddp__plane_stream(const cddp_group *g) { return (void *)cddp__plane_of(g)->stream; }

/* Memory that goes with the plane, or by cddp__plane_release. */
static cddp_result cddp__plane_keep(cddp__plane *p, void *address) {
  cddp__block *b = (cddp__block *)cddp__calloc(&p->group->host->allocator, 1, sizeof *b);
  if (b == NULL) return CDDP_OUT_OF_MEMORY;
  b->address = address;
  pthread_mutex_lock(&p->lock);
  b->next = p->blocks;
  p->blocks = b;
  pthread_mutex_unlock(&p->lock);
  return CDDP_OK;
}

/* Device memory for an operation that needs some; grows. */
static cddp_result cddp__plane_scratch(cddp__plane *p, size_t bytes) {
  cddp_result r;
  if (p->scratch_bytes >= bytes) return CDDP_OK;
  if (p->scratch != NULL && cddp__load32(&p->graphs->alive) != 0) { /* a graph may use it again */
    if ((r = cddp__plane_keep(p, p->scratch)) != CDDP_OK) return r;
  } else if (p->scratch != NULL) {
    (void)cudaStreamSynchronize(p->side); /* its last user */
    cudaFree(p->scratch);
  }
  p->scratch = NULL;
  p->scratch_bytes = 0;
  r = cddp__cuda_result(cudaMalloc(&p->scratch, bytes), "cudaMalloc");
  if (r == CDDP_OK) p->scratch_bytes = bytes;
  return r;
}

static void *cddp__plane_alloc(cddp_group *g, size_t bytes) {
  cddp__plane *p = cddp__plane_of(g);
  void *address = NULL;
  cddp_result r = cddp__use_device(p->device);
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaMalloc(&address, bytes > 0 ? bytes : 1), "cddp_alloc: cudaMalloc");
  if (r != CDDP_OK) return NULL;
  if (cddp__plane_keep(p, address) == CDDP_OK) return address;
  cudaFree(address);
  return NULL;
}

static void cddp__plane_release(cddp_group *g, void *address) {
  cddp__plane *p = cddp__plane_of(g);
  cddp__block **link, *b;
  pthread_mutex_lock(&p->lock);
  for (link = &p->blocks; *link != NULL && (*link)->address != address; link = &(*link)->next) {}
  b = *link;
  if (b != NULL) *link = b->next;
  pthread_mutex_unlock(&p->lock);
  if (b == NULL) return;
  cudaFree(b->address);
  cddp__free(&g->host->allocator, b);
}

/* Waits on the host for the stream, as long as the group is healthy. The deadline is for what the
   watcher has no event behind: operations in a CUDA graph. */
static cddp_result cddp__await_stream(cddp__plane *p, cudaStream_t s) {
  double nap = 1e-5, deadline = cddp__now() + p->group->timeout_s;
  cudaError_t e;
  cddp_result r;
  int i;
  for (i = 0; (e = cudaStreamQuery(s)) == cudaErrorNotReady; i++) {
    if ((r = cddp__check_group(p->group)) != CDDP_OK) return r;
    if (i < CDDP__YIELDS) {
      sched_yield();
      continue;
    }
    cddp__sleep(nap);
    nap = nap < 5e-4 ? 2 * nap : nap;
    if (cddp__now() < deadline) continue;
    cddp__fail(CDDP_TIMEOUT, "timed out after %g s: rank %d's work on cuda:%d has not ended",
               p->group->timeout_s, p->group->rank, p->device);
    return cddp__break(p->group, CDDP_TIMEOUT);
  }
  (void)cudaGetLastError(); /* cudaErrorNotReady counts as one */
  if ((r = cddp__check_group(p->group)) != CDDP_OK) return r;
  return cddp__cuda_result(e, "work on the group's stream");
}
/* >>nccl ---------------------------------------------------------------------------------------
   Communicators. They are made non-blocking, so that no call of NCCL can hang the host: whatever
   it returns is polled until it is done, with an eye on peers and deadline. Works as follows: ranks
   tell each other their devices over the control plane, which catches what NCCL would say in a log
   only; rank 0's id goes the same way, to other hosts too; each rank polls its communicator until
   it is connected. How NCCL's own connections find their way between hosts is NCCL's affair, and
   its NCCL_* variables'. Ranks that are threads of one process do the same. ncclCommInitAll would
   save them nothing: it is these calls in a loop, made by one thread, blocking, without a deadline.
   Sub-groups come from ncclCommSplit, except single ranks: those need no communicator. Operations
   are issued in the order of calls, one at a time (plane.turn). gather, scatter and all_to_all are
   sends and receives in one NCCL group. What ends a communicator blocks all the same (ncclCommAbort
   for streams and CUDA graphs, ncclCommDestroy for the ranks of the host too), so a thread of its
   own does it (cddp__plane_end). */

static ncclDataType_t cddp__nccl_type(uint8_t dtype) {
  static const int types[] = {7, 8, 6, 9, 0, 1, 2, 4}; /* bf16 is not named in every nccl.h */
  return (ncclDataType_t)types[dtype];
}

static ncclRedOp_t cddp__nccl_op(uint8_t op) {
  static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclProd, ncclMin, ncclMax};
  return ops[op];
}

/* Sends and receives the shares of gather, scatter and all_to_all; inside an NCCL group. */
static ncclResult_t cddp__post_shares(const cddp__plane *p, const cddp__call *c, cudaStream_t s) {
  int me = p->group->rank, n = p->group->size, q;
  bool sends, recvs, root = me == c->root;
  size_t share = c->count * c->esize;
  const char *send = (const char *)c->send;
  char *recv = (char *)c->recv;
  ncclResult_t e = ncclSuccess;
  for (q = 0; q < n && e == ncclSuccess; q++) {
    sends =
        c->kind == CDDP__KIND_ALL_TO_ALL || (c->kind == CDDP__KIND_GATHER ? q == c->root : root);
    recvs =
        c->kind == CDDP__KIND_ALL_TO_ALL || (c->kind == CDDP__KIND_GATHER ? root : q == c->root);
    if (q == me) {
      const char *from = c->kind == CDDP__KIND_GATHER ? send : send + (size_t)me * share;
      char *to = c->kind == CDDP__KIND_SCATTER ? recv : recv + (size_t)me * share;
      if (sends && cddp__device_copy(to, from, share, s) != CDDP_OK) e = ncclUnhandledCudaError;
      continue;
    }
    if (sends)
      e = ncclSend(c->kind == CDDP__KIND_GATHER ? send : send + (size_t)q * share, c->count,
                   cddp__nccl_type(c->dtype), q, p->comm, s);
    if (recvs && e == ncclSuccess)
      e = ncclRecv(c->kind == CDDP__KIND_SCATTER ? recv : recv + (size_t)q * share, c->count,
                   cddp__nccl_type(c->dtype), q, p->comm, s);
  }
  return e;
}

static ncclResult_t cddp__post(const cddp__plane *p, const cddp__call *c, cudaStream_t s) {
  ncclDataType_t type = cddp__nccl_type(c->dtype);
  ncclRedOp_t op = cddp__nccl_op(c->op);
  switch (c->kind) {
  case CDDP__KIND_ALL_REDUCE:
    return ncclAllReduce(c->send, c->recv, c->count, type, op, p->comm, s);
  case CDDP__KIND_REDUCE:
    return ncclReduce(c->send, c->recv, c->count, type, op, c->root, p->comm, s);
  case CDDP__KIND_BROADCAST:
    return ncclBroadcast(c->send, c->recv, c->count, type, c->root, p->comm, s);
  case CDDP__KIND_ALL_GATHER:
    return ncclAllGather(c->send, c->recv, c->count, type, p->comm, s);
  case CDDP__KIND_REDUCE_SCATTER:
    return ncclReduceScatter(c->send, c->recv, c->count, type, op, p->comm, s);
  case CDDP__KIND_SEND:
    return ncclSend(c->send, c->count, type, c->root, p->comm, s);
  case CDDP__KIND_RECV:
    return ncclRecv(c->recv, c->count, type, c->root, p->comm, s);
  default:
    return cddp__post_shares(p, c, s);
  }
}

static const char *cddp__post_name(const cddp__call *c) {
  static const char *const names[] = {"",
                                      "ncclAllReduce",
                                      "ncclReduce",
                                      "ncclBroadcast",
                                      "ncclAllGather",
                                      "gather by ncclSend and ncclRecv",
                                      "scatter by ncclSend and ncclRecv",
                                      "ncclReduceScatter",
                                      "all_to_all by ncclSend and ncclRecv"};
  if (c->kind == CDDP__KIND_SEND) return "ncclSend";
  return c->kind == CDDP__KIND_RECV ? "ncclRecv" : names[c->kind];
}

/* Asks how far NCCL is with what it began. Up to NCCL 2.25 that does not end its work in this
   thread, which would be in the way of another communicator's; ncclCommCount does. */
static ncclResult_t cddp__progress(cddp__plane *p, ncclComm_t comm) {
  ncclResult_t e = ncclInternalError;
  int ranks;
  pthread_mutex_lock(&p->lock);
  if (p->aborted || ncclCommGetAsyncError(comm, &e) != ncclSuccess) e = ncclInternalError;
  if (e == ncclSuccess) e = ncclCommCount(comm, &ranks);
  pthread_mutex_unlock(&p->lock);
  return e;
}

static bool cddp__any_gone(const cddp_group *g) {
  int q;
  for (q = 0; q < g->size; q++)
    if (q != g->rank && cddp__rank_gone(g, q)) return true;
  return false;
}

/* Polls until NCCL has done what it began: e is what it returned then, of which success says
   nothing: ncclCommSplit and, up to NCCL 2.23, single operations return it too early. A rank that
   is gone may have done its part: NCCL gets a moment to say so. */
static cddp_result cddp__settle(cddp__plane *p, ncclComm_t comm, ncclResult_t e, const char *what) {
  cddp_group *g = p->group;
  double now = cddp__now(), deadline = now + g->timeout_s, look = now + CDDP__NAP_S, nap = 2e-5;
  double gone_since = now;
  cddp_result r;
  int i;
  if (e == ncclSuccess) e = ncclInProgress;
  for (i = 0; e == ncclInProgress; i++) {
    if ((r = cddp__check_group(g)) != CDDP_OK) return r;
    if ((e = cddp__progress(p, comm)) != ncclInProgress) break;
    if (i < CDDP__YIELDS) {
      sched_yield();
      continue;
    }
    cddp__sleep(nap);
    nap = nap < 1e-3 ? 2 * nap : nap;
    now = cddp__now();
    if (now >= look) {
      cddp__exchange_notes(p);
      if (!cddp__any_gone(g)) gone_since = now;
      if (now - gone_since > CDDP__GONE_S && (r = cddp__break_dead(g, what)) != CDDP_OK) return r;
      look = now + CDDP__NAP_S;
    }
    if (now >= deadline) {
      cddp__fail(CDDP_TIMEOUT, "timed out after %g s: rank %d in %s; not all ranks came to it%s",
                 g->timeout_s, g->rank, what,
                 g->hosts == NULL ? "" : ", or NCCL finds no way between the hosts: it takes the "
                                         "interface that NCCL_SOCKET_IFNAME names, and with "
                                         "NCCL_DEBUG=INFO it says what it does");
      return cddp__break(g, CDDP_TIMEOUT);
    }
  }
  return CDDP__LIKELY(e == ncclSuccess) ? CDDP_OK : cddp__break_nccl(p, e, what);
}

/* Enqueues n operations on s as one. turn held. */
static cddp_result cddp__issue_held(cddp__plane *p, const cddp__call *c, int n, cudaStream_t s) {
  ncclResult_t e = ncclSuccess, end;
  ncclComm_t comm;
  cddp_result r;
  bool group = n > 1 || c->kind == CDDP__KIND_GATHER || c->kind == CDDP__KIND_SCATTER ||
               c->kind == CDDP__KIND_ALL_TO_ALL;
  int i;
  if (s == cudaStreamPerThread) /* NCCL enqueues in a thread of its own */
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the group's stream is cudaStreamPerThread, which to "
                      "NCCL is another stream; make one with cudaStreamCreate");
  pthread_mutex_lock(&p->lock);
  if ((comm = p->comm) == NULL) {
    pthread_mutex_unlock(&p->lock);
    if ((r = cddp__check_board(p->group)) != CDDP_OK) return r;
    return cddp__fail(CDDP_ABORTED, "the group's communicator is gone");
  }
  if (group) e = ncclGroupStart();
  for (i = 0; i < n && (e == ncclSuccess || e == ncclInProgress); i++) e = cddp__post(p, &c[i], s);
  if (group) {
    end = ncclGroupEnd();
    if (e == ncclSuccess || e == ncclInProgress) e = end;
  }
  pthread_mutex_unlock(&p->lock);
  r = cddp__settle(p, comm, e, cddp__post_name(c));
  return r == CDDP_OK ? cddp__track(p, s) : r;
}

/* After an operation that failed with the group: makes the buffers the caller's again. */
static cddp_result cddp__let_go(cddp__plane *p, cddp_result r) {
  if (r == CDDP_OK || cddp__load32(&p->group->board->broken) == 0) return r;
  cddp__plane_abort(p);
  cddp__await_abort(p);
  return r;
}

static cddp_result cddp__issue(cddp__plane *p, const cddp__call *c, int n, cudaStream_t s) {
  cddp_result r;
  if (n == 0) return CDDP_OK;
  pthread_mutex_lock(&p->turn);
  r = cddp__issue_held(p, c, n, s);
  pthread_mutex_unlock(&p->turn);
  return cddp__let_go(p, r);
}

/* An operation of a single rank. */
static cddp_result cddp__issue_alone(const cddp__call *c, cudaStream_t s) {
  return cddp__device_copy(c->recv, c->send, c->count * c->esize, s);
}

/* Through a copy, always on the side stream: two of them share the memory for it. */
static cddp_result cddp__issue_in_place(cddp__plane *p, const cddp__call *call, cudaStream_t s) {
  cddp__call c = *call;
  size_t bytes = c.count * c.esize * (size_t)p->group->size;
  cddp_result r = cddp__plane_scratch(p, bytes);
  if (r == CDDP_OK && s != p->side) r = cddp__stream_after(p->side, s, p->join);
  if (r == CDDP_OK) r = cddp__device_copy(p->scratch, c.send, bytes, p->side);
  c.send = p->scratch;
  if (r == CDDP_OK) r = cddp__issue(p, &c, 1, p->side);
  if (r == CDDP_OK && s != p->side) r = cddp__stream_after(s, p->side, p->join);
  return r;
}

static cddp_result cddp__issue_call(cddp__plane *p, const cddp__call *c, cudaStream_t s) {
  if (c->count == 0) return CDDP_OK;
  if (p->group->size == 1) return cddp__issue_alone(c, s);
  if (c->kind == CDDP__KIND_ALL_TO_ALL && c->send == c->recv) return cddp__issue_in_place(p, c, s);
  return cddp__issue(p, c, 1, s);
}

/* --- handles --- */

static cddp_result cddp__work_on_device(cddp_group *g, cddp_work **out) {
  cddp_work *w = cddp__work_new(g);
  if (w == NULL) return CDDP_OUT_OF_MEMORY;
  w->backend = g->backend;
  *out = w;
  return CDDP_OK;
}

static void cddp__device_work_free(cddp_work *w) {
  if (w->event != NULL) cudaEventDestroy((cudaEvent_t)w->event);
  cddp__free(&w->group->host->allocator, w);
}

static cddp_result cddp__work_record(cddp_work *w, cudaStream_t s) {
  cudaEvent_t event = NULL;
  cddp_result r = cddp__event_new(&event);
  w->event = (void *)event;
  if (r == CDDP_OK) r = cddp__cuda_result(cudaEventRecord(event, s), "cudaEventRecord");
  return r;
}

/* Issues the sends and receives posted with a handle. Each gets the result. turn held. */
static cddp_result cddp__send_letters_held(cddp__plane *p) {
  const cddp_allocator *a = &p->group->host->allocator;
  cddp__call *calls;
  cddp_result r;
  cddp_work *w;
  int n = 0;
  for (w = p->letters; w != NULL; w = w->next) n++;
  if (n == 0) return CDDP_OK;
  calls = (cddp__call *)cddp__malloc(a, (size_t)n * sizeof *calls);
  r = calls == NULL ? CDDP_OUT_OF_MEMORY : cddp__stream_after(p->side, p->stream, p->fork);
  for (n = 0, w = p->letters; r == CDDP_OK && w != NULL; w = w->next) calls[n++] = w->call;
  if (r == CDDP_OK) r = cddp__issue_held(p, calls, n, p->side);
  if (r != CDDP_OK) r = cddp__break(p->group, r); /* the others wait for these */
  while ((w = p->letters) != NULL) {
    p->letters = w->next;
    w->result = r == CDDP_OK ? cddp__work_record(w, p->side) : r;
    w->done = true;
    snprintf(w->text, sizeof w->text, "%s", cddp__error_text);
  }
  cddp__free(a, calls);
  return r;
}

static cddp_result cddp__send_letters(cddp__plane *p) {
  cddp_result r;
  pthread_mutex_lock(&p->turn);
  r = cddp__send_letters_held(p);
  pthread_mutex_unlock(&p->turn);
  return cddp__let_go(p, r);
}

/* Sees to it that a send or receive with a handle has been issued; another thread may be at it. */
static void cddp__issue_letter(cddp_work *w) {
  cddp__plane *p = cddp__plane_of(w->group);
  cddp_result r = CDDP_OK;
  if (w->call.kind != CDDP__KIND_SEND && w->call.kind != CDDP__KIND_RECV) return;
  pthread_mutex_lock(&p->turn);
  if (!w->done) r = cddp__send_letters_held(p);
  pthread_mutex_unlock(&p->turn);
  (void)cddp__let_go(p, r);
}

static cddp_result cddp__device_wait(cddp_work *w) {
  cddp__plane *p = cddp__plane_of(w->group);
  cddp_result r = cddp__use_device(p->device); /* the default stream is the current device's */
  cddp__issue_letter(w);
  if (r == CDDP_OK && w->result != CDDP_OK) r = cddp__fail(w->result, "%s", w->text);
  if (r == CDDP_OK) r = cddp__check_group(w->group);
  if (r == CDDP_OK && w->event != NULL)
    r = cddp__cuda_result(cudaStreamWaitEvent(p->stream, (cudaEvent_t)w->event, 0),
                          "cudaStreamWaitEvent");
  cddp__device_work_free(w);
  return r;
}

static bool cddp__device_done(cddp_work *w) {
  cddp__plane *p = cddp__plane_of(w->group);
  cudaError_t e;
  if (cddp__use_device(p->device) != CDDP_OK) return true;
  if (cddp__capturing(p->stream)) return false; /* a look would void the capture */
  cddp__issue_letter(w);
  if (w->result != CDDP_OK || w->event == NULL) return true;
  if (cddp__load32(&w->group->board->broken) != 0) return true;
  e = cudaEventQuery((cudaEvent_t)w->event);
  if (e == cudaErrorNotReady) (void)cudaGetLastError();
  return e != cudaErrorNotReady;
}

/* --- the calls of a group --- */

static cddp_result cddp__device_barrier(cddp_group *g) {
  cddp__plane *p = cddp__plane_of(g);
  cddp__call c;
  cddp_result r;
  if (cddp__capturing(p->stream))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "cddp_barrier waits on the host and cannot be captured in a CUDA graph");
  if ((r = cddp__await_stream(p, p->stream)) != CDDP_OK) return r;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_BARRIER;
  c.root = -1;
  c.esize = 1;
  if ((r = cddp__run_call(g, &c)) != CDDP_OK) return r;
  return g->size > 1 ? cddp__compare_notes(p) : CDDP_OK; /* all have called all before it */
}

static cddp_result cddp__nccl_start(cddp_group *g, const cddp__call *c, cddp_work **work,
                                    bool *taken) {
  cddp__plane *p = cddp__plane_of(g);
  cudaStream_t s = work != NULL ? p->side : p->stream;
  cddp_work *w = NULL;
  bool device = true;
  uint64_t record;
  cddp_result r;
  *taken = true;
  if (work != NULL) *work = NULL;
  if ((r = cddp__use_device(p->device)) != CDDP_OK) return r;
  if ((r = cddp__send_letters(p)) != CDDP_OK) return r;
  if (c->kind == CDDP__KIND_BARRIER) {
    cddp__engine_drain(g);
    return cddp__device_barrier(g);
  }
  if ((r = cddp__memory_of_call(p, c, &device)) != CDDP_OK) return r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if (g->size > 1) cddp__note_call(p, c, device);
  *taken = device;
  if (!device) return CDDP_OK;
  record = cddp__record_call(g, c);
  if (work != NULL) r = cddp__work_on_device(g, &w);
  if (r == CDDP_OK && work != NULL) r = cddp__stream_after(p->side, p->stream, p->fork);
  if (r == CDDP_OK) r = cddp__issue_call(p, c, s);
  if (r == CDDP_OK && work != NULL) r = cddp__work_record(w, s);
  if (r != CDDP_OK && g->size > 1) r = cddp__break(g, r); /* the others will wait for this call */
  cddp__record_finish(g, record, r);                       /* on the device it goes on */
  if (r != CDDP_OK && w != NULL) cddp__device_work_free(w);
  if (r == CDDP_OK && work != NULL) *work = w;
  return r;
}

static cddp_result cddp__nccl_message(cddp_group *g, const cddp__call *c, cddp_work **work,
                                      bool *taken) {
  cddp__plane *p = cddp__plane_of(g);
  cddp_work *w, **link;
  bool device = true;
  cddp_result r;
  if ((r = cddp__memory_of_call(p, c, &device)) != CDDP_OK) return r;
  *taken = device && g->size > 1 && c->count > 0;
  if (!*taken && device && c->count > 0)
    return cddp__fail(CDDP_UNSUPPORTED, "a single rank cannot send device memory to itself");
  if (!*taken) return CDDP_OK;
  if ((r = cddp__use_device(p->device)) != CDDP_OK) return r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if (work == NULL) {
    if (c->root == g->rank)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "rank %d sends to itself: on a device both send and "
                        "recv need a work handle",
                        g->rank);
    if ((r = cddp__send_letters(p)) != CDDP_OK) return r;
    r = cddp__issue(p, c, 1, p->stream);
    return r == CDDP_OK ? r : cddp__break(g, r);
  }
  if ((r = cddp__work_on_device(g, &w)) != CDDP_OK) return r;
  w->call = *c;
  pthread_mutex_lock(&p->turn);
  for (link = &p->letters; *link != NULL; link = &(*link)->next) {}
  *link = w;
  pthread_mutex_unlock(&p->turn);
  *work = w;
  return CDDP_OK;
}

static cddp_result cddp__nccl_synchronize(cddp_group *g) {
  cddp__plane *p = cddp__plane_of(g);
  cddp_result r;
  cddp__engine_drain(g);
  if ((r = cddp__use_device(p->device)) != CDDP_OK) return r;
  if ((r = cddp__send_letters(p)) != CDDP_OK) return r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  return cddp__await_stream(p, p->stream);
}

/* --- communicators --- */

/* The communicator that NCCL has made for maker becomes p's. */
static ncclComm_t cddp__plane_adopt(cddp__plane *p, cddp__plane *maker) {
  ncclComm_t comm = NULL;
  pthread_mutex_lock(&maker->lock);
  if (!maker->aborted) {
    comm = maker->end->made;
    maker->end->made = NULL;
  }
  pthread_mutex_unlock(&maker->lock);
  pthread_mutex_lock(&p->lock);
  p->comm = comm;
  pthread_mutex_unlock(&p->lock);
  return comm;
}

/* Rank 0's new id, on every rank. */
static cddp_result cddp__nccl_id(cddp_group *g, ncclUniqueId *id) {
  cddp__id_report report;
  cddp_result r;
  ncclResult_t e;
  memset(&report, 0, sizeof report);
  if (g->rank == 0 && (e = ncclGetUniqueId(&report.id)) != ncclSuccess) {
    report.result = CDDP_NCCL;
    snprintf(report.text, sizeof report.text, "rank 0: ncclGetUniqueId: %s (%.300s)",
             ncclGetErrorString(e), ncclGetLastError(NULL));
  }
  r = cddp__run_simple(g, CDDP__KIND_BROADCAST, &report, &report, sizeof report, CDDP_U8, 0);
  if (r == CDDP_OK && report.result != CDDP_OK)
    r = cddp__fail((cddp_result)report.result, "%s", report.text);
  *id = report.id;
  return r;
}

static cddp_result cddp__all_connected(cddp_group *g) {
  cddp__begin(g);
  return cddp__split_step(g, 0, 3);
}

/* Collective: connects a communicator over all ranks of the plane's group. */
static cddp_result cddp__nccl_connect(cddp__plane *p) {
  cddp_group *g = p->group;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm;
  ncclUniqueId id;
  ncclResult_t e;
  cddp_result r;
  int version = 0;
  if (ncclGetVersion(&version) == ncclSuccess && version < 21900)
    cddp__log(&g->host->logger, 1,
              "NCCL %d.%d can crash when another thread aborts a communicator, which cddp does "
              "after a failure; 2.19 and later do not",
              version / 10000, version / 100 % 100);
  cddp__exchange_notes(p); /* from now on leaders see each other's end */
  if ((r = cddp__nccl_id(g, &id)) != CDDP_OK) return r;
  config.blocking = 0;
  e = ncclCommInitRankConfig(&p->end->made, g->size, id, g->rank, &config);
  comm = __atomic_load_n(&p->end->made, __ATOMIC_RELAXED); /* which NCCL's thread writes again */
  r = cddp__settle(p, comm, e, "ncclCommInitRankConfig");
  if (r == CDDP_OK) r = cddp__all_connected(g);
  if (r != CDDP_OK) return r;
  cddp__plane_adopt(p, p);
  return cddp__watch(p);
}

/* Every rank of g: the communicators of the groups that it has been split into. */
static cddp_result cddp__nccl_split_comm(cddp__plane *p, int color, int key, cddp__plane *child) {
  bool wants = child != NULL && child->group->size > 1;
  ncclComm_t comm;
  ncclResult_t e = ncclInvalidUsage;
  cddp_result r;
  pthread_mutex_lock(&p->turn);
  pthread_mutex_lock(&p->lock);
  if ((comm = p->comm) != NULL)
    e = ncclCommSplit(comm, wants ? color : NCCL_SPLIT_NOCOLOR, key, &p->end->made, NULL);
  pthread_mutex_unlock(&p->lock);
  r = cddp__settle(p, comm, e, "ncclCommSplit");
  pthread_mutex_unlock(&p->turn);
  if (r == CDDP_OK && wants)
    r = cddp__settle(child, cddp__plane_adopt(child, p), ncclSuccess, "ncclCommSplit");
  if (r != CDDP_OK) cddp__plane_abort(p);
  return r == CDDP_OK && wants ? cddp__watch(child) : r;
}

static cddp_result cddp__nccl_split(cddp_group *g, int color, int key, cddp_group *child) {
  cddp__plane *p = cddp__plane_of(g), *c = NULL;
  cddp_result r = cddp__use_device(p->device);
  if (r == CDDP_OK) r = cddp__send_letters(p);
  if (r == CDDP_OK && child != NULL) r = cddp__plane_new(&c, child, p->device, p->stream);
  if (r == CDDP_OK && c != NULL) cddp__exchange_notes(c);
  if (r == CDDP_OK) r = cddp__await_stream(p, p->side);
  if (r == CDDP_OK) r = cddp__await_stream(p, p->stream);
  if (r != CDDP_OK) r = cddp__break(g, r);
  if (r == CDDP_OK && g->size > 1) r = cddp__nccl_split_comm(p, color, key, c);
  if (r == CDDP_OK && g->size > 1) r = cddp__all_connected(g);
  if (r == CDDP_OK && c != NULL) {
    child->backend = g->backend;
    child->plane = c;
    return CDDP_OK;
  }
  if (c != NULL) {
    char text[CDDP__ERROR_MAX];
    snprintf(text, sizeof text, "%s", cddp__error_text);
    cddp__unwatch(c);
    cddp__plane_abort(c);
    cddp__plane_free(c);
    cddp__fail(r, "%s", text);
  }
  return r;
}

/* Ends the communicator in an orderly way: what peers still read from this rank goes out first.
   Ranks that go on must not hear of it, so nothing here breaks the group. */
static void cddp__nccl_finish(cddp__plane *p) {
  const cddp__atomic_u32 *broken = &p->group->board->broken;
  cudaError_t fault;
  bool late = false;
  while (cddp__plane_pending(p, &late, &fault)) {
    if (cddp__load32(broken) != 0) return;
    cddp__sleep(1e-4);
  }
  if (cddp__load32(broken) == 0) cddp__plane_end(p, false);
}

static void cddp__plane_leave(cddp_group *g) {
  cddp__plane *p = cddp__plane_of(g);
  char text[CDDP__ERROR_MAX];
  snprintf(text, sizeof text, "%s", cddp__error_text);
  (void)cddp__use_device(p->device);
  (void)cddp__send_letters(p);
  cddp__nccl_finish(p);
  cddp__unwatch(p);
  if (g->backend->start == cddp__nccl_start) cddp__exchange_notes(p); /* the last ones */
  cddp__plane_abort(p);
  cddp__await_abort(p);
  (void)cudaStreamSynchronize(p->side);
  cddp__plane_free(p);
  g->backend = NULL;
  g->plane = NULL;
  snprintf(cddp__error_text, sizeof cddp__error_text, "%s", text);
}
/* >>staging ------------------------------------------------------------------------------------
   Device memory on the CPU backend, for ranks that share a GPU. Works as follows: what a rank
   contributes is copied to host memory that the ranks share, once the group's stream has come that
   far; the CPU's collective runs there; the result is copied back. The caller's thread does it, or,
   with a work handle, the group's engine. Correct and simple, not fast. */

/* Which bytes of a call go to the host, and which come back; sends and recvs: sizes there. */
typedef struct cddp__haul {
  size_t sends, recvs; /* bytes */
  bool in_place;       /* they are the same */
  bool out, back;      /* whether this rank has something to copy */
} cddp__haul;

static cddp__haul cddp__haul_of(const cddp_group *g, const cddp__call *c) {
  size_t share = c->count * c->esize, all = share * (size_t)g->size;
  bool root = g->rank == c->root;
  cddp__haul h;
  memset(&h, 0, sizeof h);
  h.sends = h.recvs = share;
  h.out = h.back = true;
  switch (c->kind) {
  case CDDP__KIND_ALL_REDUCE:
    h.in_place = true;
    break;
  case CDDP__KIND_REDUCE:
    h.in_place = true, h.back = root;
    break;
  case CDDP__KIND_BROADCAST:
    h.in_place = true, h.out = root, h.back = !root;
    break;
  case CDDP__KIND_ALL_GATHER:
    h.recvs = all;
    break;
  case CDDP__KIND_GATHER:
    h.recvs = root ? all : 0, h.back = root;
    break;
  case CDDP__KIND_SCATTER:
    h.sends = root ? all : 0, h.out = root;
    break;
  case CDDP__KIND_REDUCE_SCATTER:
    h.sends = all;
    break;
  default:
    h.sends = h.recvs = all; /* ALL_TO_ALL */
  }
  return h;
}

static cddp_result cddp__stage_for(cddp__plane *p, size_t bytes) {
  if (p->stage_bytes >= bytes) return CDDP_OK;
  cddp__arena_free(p->group->host, p->stage);
  p->stage = cddp__arena_alloc(p->group->host, bytes);
  p->stage_bytes = p->stage != NULL ? bytes : 0;
  return p->stage != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

/* Copies on the side stream and waits for it. */
static cddp_result cddp__copy_now(cddp__plane *p, void *to, const void *from, size_t bytes) {
  cddp_result r = cddp__device_copy(to, from, bytes, p->side);
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(cudaStreamSynchronize(p->side), "cudaStreamSynchronize");
}

/* Runs a collective on device memory, after what the side stream waits for already. */
static cddp_result cddp__staged_run(cddp_group *g, const cddp__call *call) {
  cddp__plane *p = cddp__plane_of(g);
  cddp__haul h = cddp__haul_of(g, call);
  cddp__call c = *call;
  size_t second = h.in_place ? 0 : cddp__round_up(h.sends, CDDP__CACHE_LINE);
  cddp_result r = cddp__use_device(p->device);
  if (r == CDDP_OK) r = cddp__stage_for(p, second + h.recvs);
  if (r == CDDP_OK) r = cddp__copy_now(p, p->stage, c.send, h.out ? h.sends : 0);
  if (r != CDDP_OK) return cddp__break(g, r);
  c.send = p->stage;
  c.recv = (char *)p->stage + second;
  if ((r = cddp__run_call(g, &c)) != CDDP_OK) return r;
  r = cddp__copy_now(p, call->recv, c.recv, h.back ? h.recvs : 0);
  return r == CDDP_OK ? r : cddp__break(g, r);
}

static cddp_result cddp__staged_work(cddp_work *w) { /* on the engine's thread */
  cddp__plane *p = cddp__plane_of(w->group);
  cddp_result r = cddp__use_device(p->device);
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaStreamWaitEvent(p->side, (cudaEvent_t)w->event, 0),
                          "cudaStreamWaitEvent");
  return r == CDDP_OK ? cddp__staged_run(w->group, &w->call) : cddp__break(w->group, r);
}

static cddp_result cddp__staged_no_graph(const cddp__plane *p) {
  if (!cddp__capturing(p->stream)) return CDDP_OK;
  return cddp__fail(CDDP_UNSUPPORTED,
                    "backend \"cpu\" cannot be captured in a CUDA graph; backend \"nccl\" can");
}

static cddp_result cddp__staged_start(cddp_group *g, const cddp__call *c, cddp_work **work,
                                      bool *taken) {
  cddp__plane *p = cddp__plane_of(g);
  cddp_work *w = NULL;
  bool device = true;
  cddp_result r;
  if (work != NULL) *work = NULL;
  if ((r = cddp__use_device(p->device)) != CDDP_OK) return r;
  if ((r = cddp__memory_of_call(p, c, &device)) != CDDP_OK) return r;
  *taken = device;
  if (!device) return CDDP_OK;
  if ((r = cddp__staged_no_graph(p)) != CDDP_OK) return r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if (work == NULL) {
    cddp__engine_drain(g);
    if (c->kind == CDDP__KIND_BARRIER) return cddp__device_barrier(g);
    if ((r = cddp__stream_after(p->side, p->stream, p->fork)) != CDDP_OK) return r;
    return cddp__staged_run(g, c);
  }
  if ((r = cddp__work_on_device(g, &w)) != CDDP_OK) return r;
  w->call = *c;
  w->run = cddp__staged_work;
  w->site = cddp__this_site;
  if ((r = cddp__work_record(w, p->stream)) == CDDP_OK) r = cddp__engine_push(w);
  if (r != CDDP_OK)
    cddp__device_work_free(w);
  else
    *work = w;
  return r;
}

/* Sends a copy; the CPU backend copies it again, so that it need not be kept. */
static cddp_result cddp__staged_send(cddp_group *g, const cddp__call *c, void *copy) {
  cddp__plane *p = cddp__plane_of(g);
  int parcel = -1;
  cddp_result r = cddp__stream_after(p->side, p->stream, p->fork);
  if (r == CDDP_OK) r = cddp__copy_now(p, copy, c->send, c->count * c->esize);
  if (r == CDDP_OK)
    r = cddp__start_send(g, copy, c->count, (cddp_dtype)c->dtype, c->root, c->tag, &parcel);
  return r == CDDP_OK ? cddp__finish_send(g, parcel) : r;
}

static cddp_result cddp__staged_message(cddp_group *g, const cddp__call *c, cddp_work **work,
                                        bool *taken) {
  const cddp_allocator *a = &g->host->allocator;
  cddp__plane *p = cddp__plane_of(g);
  cddp_work *w = NULL;
  bool device = true;
  cddp_result r;
  if ((r = cddp__memory_of_call(p, c, &device)) != CDDP_OK) return r;
  *taken = device;
  if (!device) return CDDP_OK;
  if ((r = cddp__use_device(p->device)) != CDDP_OK) return r;
  if ((r = cddp__staged_no_graph(p)) != CDDP_OK) return r;
  if ((w = cddp__work_new(g)) == NULL) return CDDP_OUT_OF_MEMORY;
  if ((w->stage = cddp__malloc(a, c->count * c->esize)) == NULL) {
    cddp__free(a, w);
    return CDDP_OUT_OF_MEMORY;
  }
  w->call = *c;
  w->backend = g->backend;
  if (c->kind == CDDP__KIND_SEND) {
    w->result = cddp__staged_send(g, c, w->stage);
    if (w->result != CDDP_OK) snprintf(w->text, sizeof w->text, "%s", cddp__error_text);
  } else {
    w->is_recv = true;
    w->pending.buf = w->stage;
    w->pending.count = c->count;
    w->pending.dtype = (cddp_dtype)c->dtype;
    w->pending.peer = c->root;
    w->pending.tag = c->tag;
    cddp__post_pending(g, &w->pending);
  }
  if (work == NULL) return g->backend->wait(w);
  *work = w;
  return CDDP_OK;
}

static cddp_result cddp__staged_wait(cddp_work *w) {
  cddp_group *g = w->group;
  cddp__plane *p = cddp__plane_of(g);
  const cddp_allocator *a = &g->host->allocator;
  cddp__call c = w->call;
  void *stage = w->stage;
  cudaEvent_t event = (cudaEvent_t)w->event;
  bool is_recv = w->is_recv;
  cddp_result r;
  if (stage != NULL && !is_recv) { /* a send is over */
    r = w->result;
    if (r != CDDP_OK) cddp__fail(r, "%s", w->text);
    cddp__free(a, w);
  } else {
    w->backend = NULL;
    r = cddp__work_wait(w);
  }
  if (is_recv && r == CDDP_OK) r = cddp__use_device(p->device);
  if (is_recv && r == CDDP_OK) r = cddp__stream_after(p->side, p->stream, p->fork);
  if (is_recv && r == CDDP_OK) r = cddp__copy_now(p, c.recv, stage, c.count * c.esize);
  cddp__free(a, stage);
  cddp__event_free(&event);
  return r;
}

static bool cddp__staged_done(cddp_work *w) {
  bool done;
  if (w->stage != NULL && !w->is_recv) return true;
  w->backend = NULL;
  done = cddp__work_done(w);
  w->backend = w->group->backend;
  return done;
}

static cddp_result cddp__staged_split(cddp_group *g, int color, int key, cddp_group *child) {
  cddp__plane *p = cddp__plane_of(g), *c = NULL;
  cddp_result r;
  (void)color;
  (void)key;
  if (child == NULL) return CDDP_OK;
  if ((r = cddp__plane_new(&c, child, p->device, p->stream)) != CDDP_OK)
    return cddp__break(child, r);
  child->backend = g->backend;
  child->plane = c;
  return r;
}
/* >>gpus ---------------------------------------------------------------------------------------
   Distributed data parallel on devices. Layout and buckets are as in >>buckets; the arena is device
   memory, registered with NCCL, and each gradient's room is a multiple of 16 bytes for every rank,
   so that any stretch of gradients divides evenly. Works as follows: ready() counts; when a bucket
   is full, an event behind the backward pass is recorded, the side stream waits for it, and
   the bucket's all-reduce goes onto the side stream. wait() makes the caller's stream wait for
   the side stream: the host waits for no device. After a step() buckets are only reduce-scattered;
   the next step() goes from bucket to bucket: the caller's stream waits for the bucket, SGD
   updates this rank's slice and writes the new weights over its gradients, the side stream gathers
   them from all ranks; at the end one kernel per bucket moves them into the weights and zeroes
   the gradients. SGD of one bucket so runs beside the all-gather of the one before, and neither
   needs memory of its own. Momentum lies in slices as gradients do. A wait() after a step() gathers
   the slices' means instead. Through the host (>>staging) the engine reduces each bucket in a
   mirror of the arena, and all ranks update all weights. */

static cddp__gpu *cddp__gpu_of(const cddp_ddp *d) { return (cddp__gpu *)d->gpu; }

/* The caller's stream: that of the user's group. */
static cudaStream_t cddp__gpu_stream(const cddp_ddp *d) { return cddp__plane_of(d->group)->stream; }

static bool cddp__gpu_staged(const cddp_ddp *d) { return d->backend->start == cddp__staged_start; }

/* Whether step() may deal the update out to the ranks. */
static bool cddp__gpu_slices(const cddp_ddp *d) {
  return d->group->size > 1 && !cddp__gpu_staged(d) && d->desc.comm_hook == NULL &&
         !d->desc.find_unused_parameters;
}

static cddp_result cddp__need_kernels(const cddp_kernels **k, const char *what) {
  *k = cddp__registered_kernels;
  if (*k != NULL && (*k)->version == CDDP_VERSION) return CDDP_OK;
  if (*k != NULL)
    return cddp__fail(CDDP_UNSUPPORTED, "cddp_kernels.cuh was compiled with another cddp.h");
  return cddp__fail(CDDP_UNSUPPORTED,
                    "%s on a GPU needs cddp's kernels: include cddp_kernels.cuh in one .cu file",
                    what);
}

static cddp_result cddp__kernel_result(int e, const char *what) {
  return cddp__cuda_result((cudaError_t)e, what);
}

/* --- SGD --- */

/* Collects stretches of parameters and launches those that agree in dtype and flags together. */
typedef struct cddp__batch {
  const cddp_kernels *kernels;
  const cddp_sgd_desc *rule; /* NULL: adopt, not sgd */
  cudaStream_t stream;
  cddp_segment *segments; /* [capacity] */
  int count, capacity;
  cddp_dtype dtype;
  unsigned flags;
} cddp__batch;

static cddp_result cddp__batch_launch(cddp__batch *b) {
  int e, n = b->count;
  b->count = 0;
  if (n == 0) return CDDP_OK;
  if (b->rule == NULL)
    e = b->kernels->adopt(b->segments, n, b->dtype, (void *)b->stream);
  else
    e = b->kernels->sgd(b->segments, n, b->dtype, b->rule, b->flags, (void *)b->stream);
  return cddp__kernel_result(e, b->rule == NULL ? "the kernel that moves weights" : "SGD's kernel");
}

static bool cddp__continues(const void *before, const void *p, size_t bytes) {
  if (before == NULL || p == NULL) return before == p;
  return (const char *)before + bytes == (const char *)p;
}

/* Adds a stretch, to the one before it where they touch. */
static cddp_result cddp__batch_add(cddp__batch *b, const cddp_segment *s, cddp_dtype dtype,
                                   unsigned flags) {
  cddp_segment *last = b->count > 0 ? &b->segments[b->count - 1] : NULL;
  size_t bytes;
  cddp_result r = CDDP_OK;
  if (s->count == 0) return r;
  if (last != NULL && (b->dtype != dtype || b->flags != flags || b->count == b->capacity)) {
    if ((r = cddp__batch_launch(b)) != CDDP_OK) return r;
    last = NULL;
  }
  b->dtype = dtype;
  b->flags = flags;
  bytes = last != NULL ? last->count * cddp__dtype_size(dtype) : 0;
  if (last != NULL && cddp__continues(last->data, s->data, bytes) &&
      cddp__continues(last->grad, s->grad, bytes) &&
      cddp__continues(last->momentum, s->momentum, bytes)) {
    last->count += s->count;
  } else {
    b->segments[b->count++] = *s;
  }
  return r;
}

static cddp_result cddp__no_momentum_yet(void) {
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "take two steps of the same kind before you capture one in a CUDA graph: "
                    "momentum is allocated by the first");
}

/* Momentum is to move: not while CUDA graphs of the cddp_ddp's steps hold its address. */
static cddp_result cddp__gpu_check_graphs(const cddp_ddp *d) {
  if (cddp__capturing(cddp__gpu_stream(d)) || !cddp__in_graphs(cddp__gpu_of(d)->plane))
    return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "momentum would move to other memory, but there is a CUDA graph of steps with "
                    "it; destroy the graph first, or go on with steps of the same kind");
}

/* Whole momentum of all parameters, in one piece of device memory. */
static cddp_result cddp__momentum_room(const cddp_sgd *s, void **flat, void **momentum,
                                       cudaStream_t stream) {
  size_t bytes = 0, at = 0;
  cddp_result r;
  int i;
  for (i = 0; i < s->count; i++)
    bytes += cddp__round_up(s->params[i].count * cddp__dtype_size(s->params[i].dtype), 256);
  r = cddp__cuda_result(cudaMalloc(flat, bytes > 0 ? bytes : 1), "cudaMalloc of momentum");
  if (r != CDDP_OK) return r;
  for (i = 0; i < s->count; i++) {
    momentum[i] = (char *)*flat + at;
    at += cddp__round_up(s->params[i].count * cddp__dtype_size(s->params[i].dtype), 256);
  }
  return cddp__device_zero(*flat, bytes, stream);
}

static cddp_result cddp__device_momentum(cddp_sgd *s, cudaStream_t stream) {
  if (s->rule.momentum == 0 || s->flat != NULL) return CDDP_OK;
  if (cddp__capturing(stream)) return cddp__no_momentum_yet();
  return cddp__momentum_room(s, &s->flat, s->momentum, stream);
}

static void cddp__device_momentum_free(cddp_sgd *s) {
  int i;
  if (s->flat != NULL) cudaFree(s->flat);
  s->flat = NULL;
  for (i = 0; s->momentum != NULL && i < s->count; i++) s->momentum[i] = NULL;
}

static unsigned cddp__first_flag(const cddp_sgd *s, int i) {
  return s->rule.momentum != 0 && !s->started[i] ? (unsigned)CDDP_SGD_FIRST : 0u;
}

/* Updates all weights of this rank from whole gradients: at grads[i], NULL: params' own. */
static cddp_result cddp__device_update(cddp_sgd *s, const cddp_ddp *d, unsigned flags,
                                       cddp_segment *segments, cudaStream_t stream) {
  bool capturing = cddp__capturing(stream);
  cddp__batch b;
  cddp_result r;
  int i;
  memset(&b, 0, sizeof b);
  if ((r = cddp__need_kernels(&b.kernels, "SGD")) != CDDP_OK) return r;
  if ((r = cddp__device_momentum(s, stream)) != CDDP_OK) return r;
  b.rule = &s->desc;
  b.stream = stream;
  b.segments = segments;
  b.capacity = s->count;
  for (i = s->count - 1; r == CDDP_OK && i >= 0; i--) { /* ascending in a cddp_ddp's arena */
    cddp_segment g;
    if (d != NULL ? !cddp__steps(d, s, i) : cddp__sgd_skips(s, i)) continue;
    g.data = s->params[i].data;
    g.grad = d != NULL ? d->arena + d->tensors[i].offset : s->params[i].grad;
    g.momentum = s->momentum[i];
    g.count = s->params[i].count;
    if (capturing && cddp__first_flag(s, i) != 0) return cddp__no_momentum_yet();
    r = cddp__batch_add(&b, &g, s->params[i].dtype, flags | cddp__first_flag(s, i));
  }
  if (r == CDDP_OK) r = cddp__batch_launch(&b);
  for (i = 0; r == CDDP_OK && s->rule.momentum != 0 && i < s->count; i++)
    if (d != NULL ? cddp__steps(d, s, i) : !cddp__sgd_skips(s, i)) s->started[i] = true;
  return r;
}

/* That of the cddp_ddp, whose device becomes this thread's. */
static cudaStream_t cddp__sgd_stream(const cddp_sgd *s) {
  if (s->desc.ddp == NULL || s->desc.ddp->backend == NULL) return (cudaStream_t)s->desc.stream;
  (void)cddp__use_device(cddp__plane_of(s->desc.ddp->group)->device);
  return cddp__gpu_stream(s->desc.ddp);
}

#define CDDP__COPIES 64 /* of a launch */

static cddp_result cddp__device_copies(const cddp_sgd *s, cudaStream_t stream) {
  cddp_segment from[CDDP__COPIES];
  void *to[CDDP__COPIES];
  const cddp_kernels *k;
  cddp_result r;
  int i, n = 0;
  if (s->copies == NULL) return CDDP_OK;
  r = cddp__need_kernels(&k, "copies of weights");
  memset(from, 0, sizeof from);
  for (i = 0; r == CDDP_OK && i < s->count; i++) {
    if (s->copies[i] != NULL && s->params[i].count > 0) {
      from[n].data = s->params[i].data;
      from[n].count = s->params[i].count;
      to[n++] = s->copies[i];
    }
    if (n == 0 || (n < CDDP__COPIES && i < s->count - 1)) continue;
    r = cddp__kernel_result(k->copies(from, to, n, s->desc.copy_dtype, (void *)stream),
                            "the kernel that copies weights");
    n = 0;
  }
  return r;
}

static cddp_result cddp__device_sgd_step(cddp_sgd *s) {
  cddp_segment *segments;
  cddp_result r;
  int i;
  if (s->shard != NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "after cddp_ddp_step each rank holds its part of the momentum only; call "
                      "cddp_ddp_wait before cddp_sgd_step");
  for (i = 0; i < s->count; i++) {
    if (cddp__sgd_skips(s, i) || s->params[i].grad != NULL) continue;
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "parameter %d (%s) has no gradient; set grad, or have "
                      "cddp_ddp_create place it",
                      i, s->params[i].name != NULL ? s->params[i].name : "unnamed");
  }
  segments = (cddp_segment *)cddp__malloc(&s->allocator, (size_t)s->count * sizeof *segments);
  if (segments == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__device_update(s, NULL, 0, segments, cddp__sgd_stream(s));
  if (r == CDDP_OK) r = cddp__device_copies(s, cddp__sgd_stream(s));
  cddp__free(&s->allocator, segments);
  return r;
}

static cddp_result cddp__device_sgd_zero(cddp_sgd *s) {
  cudaStream_t stream = cddp__sgd_stream(s);
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < s->count; i++)
    if (s->params[i].grad != NULL)
      r = cddp__device_zero(s->params[i].grad,
                            s->params[i].count * cddp__dtype_size(s->params[i].dtype), stream);
  return r;
}

static cddp_result cddp__device_sgd_copy(cddp_sgd *s) {
  return cddp__device_copies(s, cddp__sgd_stream(s));
}

/* --- reducing buckets --- */

/* The operations of one bucket: its stretches, each as one call. Returns how many. */
static int cddp__bucket_calls(const cddp_ddp *d, const cddp__bucket_state *b, int kind,
                              cddp__call *calls) {
  cddp_dtype dtype = d->params[b->sorted[0]].dtype;
  size_t esize = cddp__dtype_size(dtype), share;
  cddp__run run;
  int i = 0, n = 0;
  while (cddp__next_run(d, b, &i, &run)) {
    cddp__call *c = &calls[n];
    if (run.begin == run.end) continue;
    n++;
    memset(c, 0, sizeof *c);
    share = (run.end - run.begin) / (size_t)d->group->size;
    c->kind = (uint8_t)kind;
    c->dtype = (uint8_t)dtype;
    c->op = CDDP_AVG;
    c->root = -1;
    c->esize = esize;
    c->send = c->recv = d->arena + run.begin;
    c->count = (kind == CDDP__KIND_ALL_REDUCE ? run.end - run.begin : share) / esize;
    if (kind == CDDP__KIND_REDUCE_SCATTER)
      c->recv = d->arena + run.begin + share * (size_t)d->group->rank;
    if (kind == CDDP__KIND_ALL_GATHER)
      c->send = d->arena + run.begin + share * (size_t)d->group->rank;
  }
  return n;
}

static cddp_result cddp__issue_bucket(cddp_ddp *d, cddp__bucket_state *b, int kind) {
  cddp__gpu *gpu = cddp__gpu_of(d);
  int n = cddp__bucket_calls(d, b, kind, gpu->calls);
  cddp__call note;
  cddp_result r;
  memset(&note, 0, sizeof note);
  note.kind = CDDP__KIND_DDP_BUCKET;
  note.op = (uint8_t)kind;
  note.count = (uint64_t)(b - d->buckets);
  note.root = -1;
  cddp__note_call(gpu->plane, &note, true);
  r = cddp__issue(gpu->plane, gpu->calls, n, gpu->plane->side);
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(cudaEventRecord(gpu->reduced[b - d->buckets], gpu->plane->side),
                           "cudaEventRecord");
}

/* Copies between the bucket's places in the arena and contiguous memory. */
static cddp_result cddp__device_pack(const cddp_ddp *d, const cddp__bucket_state *b, char *arena,
                                     char *flat, bool to_flat, cudaStream_t s) {
  cddp__run run;
  cddp_result r = CDDP_OK;
  int i = 0;
  while (r == CDDP_OK && cddp__next_run(d, b, &i, &run)) {
    size_t n = run.end - run.begin;
    r = to_flat ? cddp__device_copy(flat, arena + run.begin, n, s)
                : cddp__device_copy(arena + run.begin, flat, n, s);
    flat += n;
  }
  return r;
}

/* Hands the bucket to the hook, whose group's stream is the side stream. */
static cddp_result cddp__device_hook(cddp_ddp *d, cddp__bucket_state *b) {
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp__plane *p = cddp__plane_of(d->hooks);
  size_t bytes = cddp__bucket_bytes(d, b);
  cddp_bucket bucket;
  bool packed;
  cddp_result r = CDDP_OK;
  if (bytes == 0) return r;
  packed = !cddp__describe_bucket(d, b, bytes, &bucket);
  p->stream = gpu->plane->side;
  if (packed) {
    if ((r = cddp__plane_scratch(gpu->plane, bytes)) != CDDP_OK) return r;
    bucket.data = gpu->plane->scratch;
    r = cddp__device_pack(d, b, d->arena, (char *)bucket.data, true, p->stream);
  }
  if (r == CDDP_OK) r = d->desc.comm_hook(&bucket, d->desc.comm_hook_data);
  if (r == CDDP_OK && packed)
    r = cddp__device_pack(d, b, d->arena, (char *)bucket.data, false, p->stream);
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaEventRecord(gpu->reduced[bucket.index], p->stream),
                          "cudaEventRecord");
  return r == CDDP_OK ? r : cddp__fail_in(r, "communication hook on bucket %d: ", bucket.index);
}

/* On the engine: the bucket's mean, by way of the mirror. */
static cddp_result cddp__mirror_bucket(cddp_work *w) {
  cddp__bucket_state *b = (cddp__bucket_state *)w->context;
  cddp_ddp *d = b->ddp;
  cddp__gpu *gpu = cddp__gpu_of(d);
  cudaStream_t s = gpu->plane->side;
  cddp_result r = cddp__use_device(gpu->plane->device);
  cddp__run run;
  int i = 0;
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaStreamWaitEvent(s, gpu->fills[b - d->buckets], 0),
                          "cudaStreamWaitEvent");
  if (r == CDDP_OK && d->desc.comm_hook != NULL) {
    r = cddp__device_hook(d, b);
    if (r != CDDP_OK) return r;
    return cddp__cuda_result(cudaStreamSynchronize(s), "cudaStreamSynchronize");
  }
  while (r == CDDP_OK && cddp__next_run(d, b, &i, &run)) {
    size_t n = run.end - run.begin;
    cddp_dtype dtype = d->params[b->sorted[0]].dtype;
    r = cddp__copy_now(gpu->plane, gpu->mirror + run.begin, d->arena + run.begin, n);
    if (r == CDDP_OK)
      r = cddp__average(d->comm, gpu->mirror + run.begin, n / cddp__dtype_size(dtype), dtype);
    if (r == CDDP_OK)
      r = cddp__copy_now(gpu->plane, d->arena + run.begin, gpu->mirror + run.begin, n);
  }
  return r == CDDP_OK ? r : cddp__break(d->comm, r);
}

static cddp_result cddp__start_bucket(cddp_ddp *d, cddp__bucket_state *b) {
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp_result r;
  if (cddp__gpu_staged(d)) {
    r = cddp__cuda_result(cudaEventRecord(gpu->fills[b - d->buckets], cddp__gpu_stream(d)),
                          "cudaEventRecord");
    if (r != CDDP_OK) return r;
    memset(&b->work, 0, sizeof b->work);
    b->work.group = d->comm;
    b->work.run = cddp__mirror_bucket;
    b->work.context = b;
    return cddp__engine_push(&b->work);
  }
  r = cddp__stream_after(gpu->plane->side, cddp__gpu_stream(d), gpu->filled);
  if (r != CDDP_OK) return r;
  if (d->desc.comm_hook != NULL) return cddp__device_hook(d, b);
  gpu->scattered = d->stepping && cddp__gpu_slices(d);
  return cddp__issue_bucket(d, b,
                            gpu->scattered ? CDDP__KIND_REDUCE_SCATTER : CDDP__KIND_ALL_REDUCE);
}

/* Starts every bucket that is full and whose predecessors have started. lock held. */
static cddp_result cddp__gpu_launch(cddp_ddp *d) {
  cddp_result r = CDDP_OK;
  if (d->group->size == 1 && d->desc.comm_hook == NULL) return CDDP_OK;
  while (r == CDDP_OK && d->next_bucket < d->plan.bucket_count) {
    cddp__bucket_state *b = &d->buckets[d->next_bucket];
    if (b->remaining > 0) break;
    b->launched = true;
    d->next_bucket++;
    r = cddp__start_bucket(d, b);
  }
  return r;
}

static cddp_result cddp__gpu_fetch(cddp_ddp *d, int i) { /* the caller's memory -> arena */
  if (d->tensors[i].placed) return CDDP_OK;
  return cddp__device_copy(d->arena + d->tensors[i].offset, d->params[i].grad,
                           d->params[i].count * cddp__dtype_size(d->params[i].dtype),
                           cddp__gpu_stream(d));
}

static cddp_result cddp__gpu_ready(cddp_ddp *d, int param) {
  bool noted = false;
  cddp_result r = cddp__mark_ready(d, param, &noted);
  if (r != CDDP_OK || noted) return r;
  if ((r = cddp__use_device(cddp__gpu_of(d)->plane->device)) != CDDP_OK) return r;
  if ((r = cddp__gpu_fetch(d, param)) != CDDP_OK) return r;
  pthread_mutex_lock(&d->lock);
  d->buckets[d->tensors[param].bucket].remaining--;
  r = cddp__gpu_launch(d);
  pthread_mutex_unlock(&d->lock);
  return r == CDDP_OK ? r : cddp__give_up(d, r); /* the bucket counts as started */
}

/* --- agreeing --- */

static cddp_result cddp__gpu_place(cddp_ddp *d, int i, bool fetch) {
  const cddp__tensor *t = &d->tensors[i];
  if (fetch) return cddp__gpu_fetch(d, i);
  return cddp__device_zero(d->arena + t->offset, t->room, cddp__gpu_stream(d));
}

/* While a graph is captured only this rank is looked at. */
static cddp_result cddp__gpu_check_capture(cddp_ddp *d) {
  char space[24];
  int i;
  if (cddp__gpu_staged(d)) return cddp__staged_no_graph(cddp__plane_of(d->group));
  if (!d->rebuilt && !d->desc.find_unused_parameters)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "take two steps before you capture one in a CUDA graph: the first arranges "
                      "the buckets");
  for (i = 0; i < d->count; i++)
    if (!d->tensors[i].ready)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "gradient \"%s\" was not marked ready; while a CUDA graph is captured "
                        "every parameter must be",
                        cddp__param_name(&d->params[i], i, space, sizeof space));
  return CDDP_OK;
}

/* Ranks agree to wait or step, and on what is ready. */
static cddp_result cddp__gpu_meet(cddp_ddp *d, int kind, uint64_t check) {
  uint64_t missing = 0;
  cddp_result r;
  if ((r = cddp__use_device(cddp__gpu_of(d)->plane->device)) != CDDP_OK) return r;
  if (cddp__capturing(cddp__gpu_stream(d))) return cddp__gpu_check_capture(d);
  r = cddp__meet_for_step(d, kind, check, NULL, &missing);
  return r == CDDP_OK && missing > 0 ? cddp__settle_unused(d, cddp__gpu_place) : r;
}

/* Starts what is left; the caller's stream goes on when all buckets are reduced. */
static cddp_result cddp__gpu_finish(cddp_ddp *d) {
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp_result r;
  int b;
  pthread_mutex_lock(&d->lock);
  r = cddp__gpu_launch(d);
  pthread_mutex_unlock(&d->lock);
  if (r != CDDP_OK || (d->group->size == 1 && d->desc.comm_hook == NULL)) return r;
  if (!cddp__gpu_staged(d)) {
    if ((r = cddp__check_group(d->comm)) != CDDP_OK) return r;
    return cddp__stream_after(cddp__gpu_stream(d), gpu->plane->side, gpu->drained);
  }
  cddp__engine_drain(d->comm);
  for (b = 0; b < d->plan.bucket_count; b++) {
    cddp_work *w = &d->buckets[b].work;
    if (d->buckets[b].launched && w->result != CDDP_OK) return cddp__fail(w->result, "%s", w->text);
  }
  return CDDP_OK;
}

/* Only slices hold means so far: gathers the rest. */
static cddp_result cddp__gpu_gather_means(cddp_ddp *d) {
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp_result r = CDDP_OK;
  int b;
  if (!gpu->scattered) return r;
  for (b = 0; r == CDDP_OK && b < d->plan.bucket_count; b++)
    r = cddp__issue_bucket(d, &d->buckets[b], CDDP__KIND_ALL_GATHER);
  return r == CDDP_OK ? cddp__stream_after(cddp__gpu_stream(d), gpu->plane->side, gpu->drained) : r;
}

/* --- momentum in slices --- */

static void cddp__gpu_shard_drop(cddp_sgd *s) {
  cddp__shard *h = (cddp__shard *)s->shard, **link = &h->ddp->shards;
  while (*link != h) link = &(*link)->next;
  *link = h->next;
  if (h->mine != NULL) cudaFree(h->mine);
  s->shard = NULL;
  s->drop = NULL;
  cddp__free(&h->ddp->group->host->allocator, h);
}

/* Goes through all stretches of gradients and this rank's slices of them: momentum of slice
   [run.begin + rank * share, + share) lies at `at` in the shard. */
typedef struct cddp__slices {
  int bucket, index; /* where cddp__next_run stands */
  int from;          /* index of the stretch's first parameter */
  cddp__run run;
  size_t share, at, next; /* bytes */
} cddp__slices;

static bool cddp__next_slice(const cddp_ddp *d, cddp__slices *k, int bucket_end) {
  for (; k->bucket < bucket_end; k->bucket++, k->index = 0) {
    k->from = k->index;
    if (!cddp__next_run(d, &d->buckets[k->bucket], &k->index, &k->run)) continue;
    k->share = (k->run.end - k->run.begin) / (size_t)d->group->size;
    k->at = k->next;
    k->next += k->share;
    return true;
  }
  return false;
}

/* Parameter i's part of rank's slice, as offsets into the arena; false if there is none. */
static bool cddp__slice_part(const cddp_ddp *d, const cddp__slices *k, int rank, int i,
                             size_t *begin, size_t *end) {
  size_t low = k->run.begin + (size_t)rank * k->share, start = d->tensors[i].offset;
  *begin = cddp__max(low, start);
  *end =
      cddp__min(low + k->share, start + d->params[i].count * cddp__dtype_size(d->params[i].dtype));
  return *begin < *end;
}

static cddp_result cddp__gpu_shard_create(cddp_ddp *d, cddp_sgd *s) {
  cudaStream_t stream = cddp__gpu_stream(d);
  size_t begin, end, bytes = d->bytes / (size_t)d->group->size;
  void *mine = NULL;
  cddp__shard *h;
  cddp__slices k;
  cddp_result r;
  int i, j;
  if (s->rule.momentum == 0 || s->shard != NULL) return CDDP_OK;
  if (cddp__capturing(stream)) return cddp__no_momentum_yet();
  h = (cddp__shard *)cddp__calloc(&d->group->host->allocator, 1, sizeof *h);
  if (h == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__cuda_result(cudaMalloc(&mine, bytes > 0 ? bytes : 1), "cudaMalloc of momentum");
  h->mine = (char *)mine;
  h->ddp = d;
  h->sgd = s;
  h->next = d->shards;
  d->shards = h;
  s->shard = h;
  s->drop = cddp__gpu_shard_drop;
  if (r == CDDP_OK) r = cddp__device_zero(mine, bytes, stream);
  memset(&k, 0, sizeof k);
  while (r == CDDP_OK && s->flat != NULL && cddp__next_slice(d, &k, d->plan.bucket_count)) {
    for (j = k.from; r == CDDP_OK && j < k.index; j++) {
      i = d->buckets[k.bucket].sorted[j];
      if (cddp__slice_part(d, &k, d->group->rank, i, &begin, &end))
        r = cddp__device_copy(
            h->mine + k.at + (begin - k.run.begin - k.share * (size_t)d->group->rank),
            (char *)s->momentum[i] + (begin - d->tensors[i].offset), end - begin, stream);
    }
  }
  if (s->flat != NULL) { /* cudaFree waits for the copies */
    if (r == CDDP_OK) r = cddp__await_stream(cddp__plane_of(d->group), stream);
    cddp__device_momentum_free(s);
  }
  return r;
}

/* Collective: whole momentum on every rank again, by way of the scratch of d->comm. */
static cddp_result cddp__gpu_dissolve(cddp_ddp *d, cddp__shard *h) {
  cudaStream_t stream = cddp__gpu_stream(d);
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp_sgd *s = h->sgd;
  size_t begin, end;
  cddp__slices k;
  cddp__call c;
  cddp_result r;
  int i, j;
  if (cddp__capturing(stream))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "after cddp_ddp_step, call cddp_ddp_wait once before it is captured");
  r = cddp__device_momentum(s, stream);
  if (r == CDDP_OK) r = cddp__plane_scratch(gpu->plane, d->bytes);
  memset(&k, 0, sizeof k);
  while (r == CDDP_OK && cddp__next_slice(d, &k, d->plan.bucket_count)) {
    char *whole = (char *)gpu->plane->scratch + k.run.begin;
    memset(&c, 0, sizeof c);
    c.kind = CDDP__KIND_ALL_GATHER;
    c.dtype = CDDP_U8;
    c.esize = 1;
    c.count = k.share;
    c.root = -1;
    c.send = h->mine + k.at;
    c.recv = whole;
    if (k.share > 0) r = cddp__issue(gpu->plane, &c, 1, stream);
    for (j = k.from; r == CDDP_OK && j < k.index; j++) {
      i = d->buckets[k.bucket].sorted[j];
      begin = d->tensors[i].offset;
      end = begin + d->params[i].count * cddp__dtype_size(d->params[i].dtype);
      r = cddp__device_copy(s->momentum[i], whole + (begin - k.run.begin), end - begin, stream);
    }
  }
  if (r == CDDP_OK) r = cddp__await_stream(cddp__plane_of(d->group), stream);
  cddp__gpu_shard_drop(s);
  return r;
}

/* --- momentum of checkpoints --- */

static cddp_result cddp__device_room(const cddp_sgd *s, void **flat, void **momentum) {
  cudaStream_t stream = cddp__sgd_stream(s);
  cddp_result r = cddp__momentum_room(s, flat, momentum, stream);
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

static void cddp__device_room_free(void *flat) {
  if (flat != NULL) cudaFree(flat);
}

/* What a piece, [at, at + n) of rank's slice, holds of each parameter. */
static cddp_result cddp__take_piece(const cddp_ddp *d, const cddp__slices *k, int rank, size_t at,
                                    const char *bytes, size_t n, cddp__take_fn take,
                                    void *context) {
  size_t low = k->run.begin + (size_t)rank * k->share + at, begin, end;
  cddp_result r = CDDP_OK;
  int j;
  for (j = k->from; r == CDDP_OK && j < k->index; j++) {
    int i = d->buckets[k->bucket].sorted[j];
    if (!cddp__slice_part(d, k, rank, i, &begin, &end)) continue;
    begin = cddp__max(begin, low);
    end = cddp__min(end, low + n);
    if (begin < end)
      r = take(context, i, begin - d->tensors[i].offset, bytes + (begin - low), end - begin);
  }
  return r;
}

/* A failure of take is kept to the end: the other ranks count on this one. */
static cddp_result cddp__device_collect(const cddp_sgd *s, cddp__take_fn take, void *context) {
  const cddp__shard *h = (const cddp__shard *)s->shard;
  cddp_ddp *d = h->ddp;
  cddp_group *g = d->group;
  size_t most = cddp__max(CDDP__FERRY / (size_t)g->size, 4096), at, n;
  char *mine = (char *)cddp__malloc(&s->allocator, most * (g->rank == 0 ? 1 + (size_t)g->size : 1));
  cddp_result r, taken = CDDP_OK;
  cddp__slices k;
  int q;
  if (mine == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  memset(&k, 0, sizeof k);
  r = CDDP_OK;
  while (r == CDDP_OK && cddp__next_slice(d, &k, d->plan.bucket_count))
    for (at = 0; r == CDDP_OK && at < k.share; at += n) {
      n = cddp__min(most, k.share - at);
      r = cddp__copy_now(cddp__plane_of(g), mine, h->mine + k.at + at, n);
      if (r != CDDP_OK) r = cddp__break(g, r);
      if (r == CDDP_OK)
        r = cddp__run_simple(g, CDDP__KIND_GATHER, mine, mine + most, n, CDDP_U8, 0);
      for (q = 0; r == CDDP_OK && taken == CDDP_OK && g->rank == 0 && q < g->size; q++)
        taken = cddp__take_piece(d, &k, q, at, mine + most + (size_t)q * n, n, take, context);
    }
  cddp__free(&s->allocator, mine);
  return r == CDDP_OK ? taken : r;
}

static const cddp__sgd_backend cddp__device_sgd = {cddp__device_sgd_step,
                                                   cddp__device_sgd_zero,
                                                   cddp__device_momentum_free,
                                                   cddp__device_room,
                                                   cddp__device_room_free,
                                                   cddp__device_collect,
                                                   cddp__device_sgd_copy};

/* --- wait --- */

static cddp_result cddp__gpu_average(cddp_ddp *d) {
  cddp_result r;
  int i;
  if (d->shards != NULL && (r = cddp__gpu_check_graphs(d)) != CDDP_OK) return r;
  r = cddp__gpu_meet(d, CDDP__KIND_DDP_WAIT, 0);
  if (r == CDDP_OK) r = cddp__gpu_finish(d);
  if (r == CDDP_OK) r = cddp__gpu_gather_means(d);
  while (r == CDDP_OK && d->shards != NULL) r = cddp__gpu_dissolve(d, d->shards);
  for (i = 0; r == CDDP_OK && i < d->count; i++)
    if (!d->tensors[i].placed && d->tensors[i].used)
      r = cddp__device_copy(d->params[i].grad, d->arena + d->tensors[i].offset,
                            d->params[i].count * cddp__dtype_size(d->params[i].dtype),
                            cddp__gpu_stream(d));
  if (r != CDDP_OK) return cddp__give_up(d, r);
  cddp__gpu_of(d)->scattered = false;
  r = cddp__complete(d, false);
  return r == CDDP_OK ? r : cddp__ddp_fail(d, r);
}

static cddp_result cddp__gpu_wait(cddp_ddp *d) {
  uint64_t record;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (d->no_sync) return CDDP_OK;
  record = cddp__record_begin(d->control, CDDP__KIND_DDP_WAIT, d->control->calls + 1, 0);
  r = cddp__gpu_average(d);
  cddp__record_finish(d->control, record, r);
  return r;
}

/* --- step --- */

/* This rank's slice of a bucket: SGD; the new weights take the place of the gradients. */
static cddp_result cddp__gpu_update_bucket(cddp_ddp *d, cddp_sgd *s, cddp__batch *b,
                                           cddp__slices *k, int bucket) {
  const cddp__shard *h = (const cddp__shard *)s->shard;
  size_t begin, end;
  cddp_result r = CDDP_OK;
  int i, j, me = d->group->rank;
  while (r == CDDP_OK && cddp__next_slice(d, k, bucket + 1)) {
    for (j = k->from; r == CDDP_OK && j < k->index; j++) {
      cddp_segment g;
      i = d->buckets[bucket].sorted[j];
      if (!cddp__slice_part(d, k, me, i, &begin, &end)) continue;
      g.data = (char *)d->params[i].data + (begin - d->tensors[i].offset);
      g.grad = d->arena + begin;
      g.momentum =
          h == NULL ? NULL : h->mine + k->at + (begin - k->run.begin - k->share * (size_t)me);
      g.count = (end - begin) / cddp__dtype_size(d->params[i].dtype);
      r = cddp__batch_add(b, &g, d->params[i].dtype,
                          (unsigned)CDDP_SGD_PUBLISH | cddp__first_flag(s, i));
    }
  }
  return r == CDDP_OK ? cddp__batch_launch(b) : r;
}

/* The new weights of a bucket, gathered in the arena, go where they belong. */
static cddp_result cddp__gpu_adopt_bucket(cddp_ddp *d, cddp__batch *b, int bucket) {
  const cddp__bucket_state *state = &d->buckets[bucket];
  cddp_result r = CDDP_OK;
  int j;
  for (j = 0; r == CDDP_OK && j < state->count; j++) {
    int i = state->sorted[j];
    cddp_segment g;
    g.data = d->params[i].data;
    g.grad = d->arena + d->tensors[i].offset;
    g.momentum = NULL;
    g.count = d->params[i].count;
    r = cddp__batch_add(b, &g, d->params[i].dtype, 0);
  }
  return r == CDDP_OK ? cddp__batch_launch(b) : r;
}

/* All buckets are reduced or reduce-scattered, or will be: see the head of this room. */
static cddp_result cddp__gpu_step_slices(cddp_ddp *d, cddp_sgd *s) {
  cudaStream_t stream = cddp__gpu_stream(d);
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp__slices k;
  cddp__batch b;
  cddp_result r;
  int i;
  memset(&b, 0, sizeof b);
  memset(&k, 0, sizeof k);
  if ((r = cddp__gpu_shard_create(d, s)) != CDDP_OK) return r;
  b.kernels = cddp__registered_kernels;
  b.segments = gpu->segments;
  b.capacity = d->count;
  b.stream = stream;
  b.rule = &s->desc;
  for (i = 0; r == CDDP_OK && i < d->plan.bucket_count; i++) {
    if (gpu->scattered) /* else the stream waits for all of them already */
      r = cddp__cuda_result(cudaStreamWaitEvent(stream, gpu->reduced[i], 0), "cudaStreamWaitEvent");
    if (r == CDDP_OK) r = cddp__gpu_update_bucket(d, s, &b, &k, i);
    if (r == CDDP_OK) r = cddp__stream_after(gpu->plane->side, stream, gpu->filled);
    if (r == CDDP_OK) r = cddp__issue_bucket(d, &d->buckets[i], CDDP__KIND_ALL_GATHER);
  }
  b.rule = NULL;
  for (i = 0; r == CDDP_OK && i < d->plan.bucket_count; i++) {
    r = cddp__cuda_result(cudaStreamWaitEvent(stream, gpu->reduced[i], 0), "cudaStreamWaitEvent");
    if (r == CDDP_OK) r = cddp__gpu_adopt_bucket(d, &b, i);
  }
  for (i = 0; s->rule.momentum != 0 && i < d->count; i++) s->started[i] = true;
  return r;
}

/* Gradients are whole on every rank: each updates all weights. */
static cddp_result cddp__gpu_step_whole(cddp_ddp *d, cddp_sgd *s) {
  cudaStream_t stream = cddp__gpu_stream(d);
  cddp_result r = CDDP_OK;
  int i;
  r = cddp__device_update(s, d, (unsigned)CDDP_SGD_ZERO, cddp__gpu_of(d)->segments, stream);
  for (i = 0; r == CDDP_OK && i < d->count; i++)
    if (!cddp__steps(d, s, i))
      r = cddp__device_zero(d->arena + d->tensors[i].offset, d->tensors[i].room, stream);
  return r;
}

static cddp_result cddp__gpu_average_and_step(cddp_ddp *d, cddp_sgd *s) {
  bool slices = cddp__gpu_slices(d);
  cddp_result r;
  int i;
  if (slices && s->flat != NULL && (r = cddp__gpu_check_graphs(d)) != CDDP_OK) return r;
  r = cddp__gpu_meet(d, CDDP__KIND_DDP_STEP, cddp__sgd_hash(s, s->desc.lr));
  if (r == CDDP_OK && d->stepping && slices) {
    pthread_mutex_lock(&d->lock);
    r = cddp__gpu_launch(d);
    pthread_mutex_unlock(&d->lock);
    if (r == CDDP_OK) r = cddp__check_group(d->comm);
  } else if (r == CDDP_OK) {
    r = cddp__gpu_finish(d);
    if (r == CDDP_OK) r = cddp__rebuild(d); /* before momentum is dealt out by buckets */
  }
  if (r == CDDP_OK) r = slices ? cddp__gpu_step_slices(d, s) : cddp__gpu_step_whole(d, s);
  if (r == CDDP_OK) r = cddp__device_copies(s, cddp__gpu_stream(d));
  for (i = 0; r == CDDP_OK && i < d->count; i++)
    if (!d->tensors[i].placed)
      r = cddp__device_zero(d->params[i].grad,
                            d->params[i].count * cddp__dtype_size(d->params[i].dtype),
                            cddp__gpu_stream(d));
  if (r != CDDP_OK) return cddp__give_up(d, r);
  cddp__gpu_of(d)->scattered = false;
  r = cddp__complete(d, true);
  return r == CDDP_OK ? r : cddp__ddp_fail(d, r);
}

static cddp_result cddp__gpu_step(cddp_ddp *d, cddp_sgd *s) {
  const cddp_kernels *kernels;
  uint64_t record;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if ((r = cddp__need_kernels(&kernels, "cddp_ddp_step")) != CDDP_OK) return r;
  record = cddp__record_begin(d->control, CDDP__KIND_DDP_STEP, d->control->calls + 1, 0);
  r = cddp__gpu_average_and_step(d, s);
  cddp__record_finish(d->control, record, r);
  return r;
}

/* --- clipping, buffers, compression --- */

static cddp_result cddp__gpu_clip(cddp_ddp *d, double max_norm, double *norm) {
  cudaStream_t stream = cddp__gpu_stream(d);
  cddp__gpu *gpu = cddp__gpu_of(d);
  const cddp_kernels *k;
  double sum = 0;
  cddp_result r;
  int dtype, i, n;
  bool add = false, scaling;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (norm != NULL && cddp__capturing(stream))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "cddp_ddp_clip_grad_norm waits for the norm and cannot be captured in a CUDA "
                      "graph; with norm NULL it can");
  if ((r = cddp__need_kernels(&k, "cddp_ddp_clip_grad_norm")) != CDDP_OK) return r;
  if ((r = cddp__use_device(gpu->plane->device)) != CDDP_OK) return r;
  if (gpu->scratch == NULL) {
    void *p = NULL;
    r = cddp__cuda_result(cudaMalloc(&p, cddp__max(k->scratch_bytes, 16)), "cudaMalloc");
    if (r != CDDP_OK) return r;
    gpu->scratch = (double *)p;
  }
  r = cddp__device_zero(gpu->scratch, 2 * sizeof *gpu->scratch, stream);
  for (scaling = false; r == CDDP_OK; scaling = true) { /* first all sums, then all factors */
    for (dtype = 0; r == CDDP_OK && dtype <= CDDP_BF16; dtype++) {
      for (n = 0, i = d->count - 1; i >= 0; i--) {
        if ((int)d->params[i].dtype != dtype || !d->used[i] || d->params[i].count == 0) continue;
        memset(&gpu->segments[n], 0, sizeof gpu->segments[n]);
        gpu->segments[n].grad = d->params[i].grad;
        gpu->segments[n++].count = d->params[i].count;
      }
      if (n == 0) continue;
      r = cddp__kernel_result(
          scaling
              ? k->scale(gpu->segments, n, (cddp_dtype)dtype, gpu->scratch, (void *)stream)
              : k->squares(gpu->segments, n, (cddp_dtype)dtype, gpu->scratch, add, (void *)stream),
          scaling ? "the kernel that scales" : "the kernel that adds squares");
      add = true;
    }
    if (scaling || r != CDDP_OK) break;
    r = cddp__kernel_result(k->factor(gpu->scratch, max_norm, (void *)stream), "the norm's kernel");
  }
  if (norm == NULL || r != CDDP_OK) return r;
  if ((r = cddp__await_stream(cddp__plane_of(d->group), stream)) != CDDP_OK) return r;
  r = cddp__cuda_result(cudaMemcpyAsync(&sum, gpu->scratch, sizeof sum, cudaMemcpyDefault, stream),
                        "cudaMemcpyAsync");
  if (r == CDDP_OK) r = cddp__await_stream(cddp__plane_of(d->group), stream);
  *norm = sqrt(sum);
  return r;
}

/* Rank 0's values on every rank, wherever they lie. */
static cddp_result cddp__gpu_broadcast(cddp_ddp *d, cddp_param *params, int count) {
  cddp__plane *p = cddp__gpu_of(d)->plane;
  cddp_result r = cddp__use_device(p->device);
  bool taken;
  int i;
  p->stream = cddp__gpu_stream(d);
  for (i = 0; r == CDDP_OK && i < count; i++) {
    cddp__call c;
    if (params[i].count == 0) continue;
    memset(&c, 0, sizeof c);
    c.kind = CDDP__KIND_BROADCAST;
    c.dtype = (uint8_t)params[i].dtype;
    c.send = c.recv = params[i].data;
    c.count = params[i].count;
    c.esize = cddp__dtype_size(params[i].dtype);
    r = d->backend->start(d->comm, &c, NULL, &taken);
    if (r == CDDP_OK && !taken) r = cddp__run_call(d->comm, &c);
  }
  return r;
}

static cddp_result cddp__gpu_sync_buffers(cddp_ddp *d) {
  return cddp__gpu_broadcast(d, d->desc.buffers, d->desc.buffer_count);
}

static cddp_result cddp__device_average(cddp_group *g, void *buf, size_t count, cddp_dtype dtype) {
  cddp__call c = cddp__average_call(buf, count, dtype);
  bool taken;
  return g->backend->start(g, &c, NULL, &taken);
}

static cddp_result cddp__device_compress(cddp_bucket *b, cddp_dtype small) {
  cddp__plane *p = cddp__plane_of(b->group);
  const cddp_kernels *k;
  cddp_result r;
  if (cddp__dtype_size(b->dtype) <= 2)
    return cddp__device_average(b->group, b->data, b->count, b->dtype);
  if ((r = cddp__need_kernels(&k, "gradient compression")) != CDDP_OK) return r;
  if ((r = cddp__plane_scratch(p, 2 * b->count)) != CDDP_OK) return r;
  r = cddp__kernel_result(
      k->convert(p->scratch, small, b->data, b->dtype, b->count, (void *)p->stream),
      "the kernel that compresses");
  if (r == CDDP_OK) r = cddp__device_average(b->group, p->scratch, b->count, small);
  if (r != CDDP_OK) return r;
  return cddp__kernel_result(
      k->convert(b->data, b->dtype, p->scratch, small, b->count, (void *)p->stream),
      "the kernel that expands");
}

/* --- creation and destruction --- */

static cddp_result cddp__gpu_check_params(const cddp_ddp *d) {
  int device = cddp__plane_of(d->group)->device, i, k, memory;
  char space[24], what[96];
  cddp_result r;
  for (i = 0; i < d->count; i++) {
    const cddp_param *p = &d->params[i];
    for (k = 0; k < 2; k++) {
      const void *at = k == 0 ? p->data : p->grad;
      if (at == NULL || p->count == 0) continue;
      snprintf(what, sizeof what, "%s of parameter \"%.60s\"", k == 0 ? "data" : "grad",
               cddp__param_name(p, i, space, sizeof space));
      if ((r = cddp__memory_of(device, at, what, &memory)) != CDDP_OK) return r;
      if (memory == CDDP__MEMORY_HOST)
        return cddp__fail(CDDP_INVALID_ARGUMENT,
                          "%s lies in host memory, but the group's device is cuda:%d; take it from "
                          "cddp_alloc or cudaMalloc",
                          what, device);
    }
  }
  return CDDP_OK;
}

/* Every rank tells whether it has come so far; one that has not fails all, by name. *all: whether
   every rank passed true. */
static cddp_result cddp__gpu_agree(cddp_ddp *d, cddp_result r, bool *all) {
  cddp_group *g = d->control;
  char text[CDDP__ERROR_MAX];
  int q;
  if (r != CDDP_OK) {
    snprintf(text, sizeof text, "%s", cddp__error_text);
    cddp__fail(r, "rank %d: %s", g->rank, text);
    return cddp__break(g, r);
  }
  cddp__begin(g)->u.bytes[0] = *all;
  r = cddp__ddp_step_line(g, CDDP__KIND_DDP_CREATE, 0, 3);
  for (q = 0; r == CDDP_OK && q < g->size; q++)
    if (cddp__line_of(g, q, g->step)->u.bytes[0] == 0) *all = false;
  return r;
}

static cddp_result cddp__gpu_arena(cddp_ddp *d) {
  size_t bytes = d->bytes > 0 ? d->bytes : 1;
  void *p = NULL;
  cddp_result r;
#if NCCL_VERSION_CODE >= 21900
  cddp__gpu *gpu = cddp__gpu_of(d);
  int version = 0;
  if (!cddp__gpu_staged(d) && d->group->size > 1 && ncclGetVersion(&version) == ncclSuccess &&
      version >= 21900 && ncclMemAlloc(&p, bytes) == ncclSuccess)
    gpu->arena_from_nccl = true;
  else
#endif
      if ((r = cddp__cuda_result(cudaMalloc(&p, bytes), "cudaMalloc of gradients")) != CDDP_OK)
    return r;
  d->arena = (char *)p;
  if ((r = cddp__device_zero(p, bytes, cddp__gpu_stream(d))) != CDDP_OK) return r;
  if (!cddp__gpu_staged(d) || d->group->size == 1) return CDDP_OK;
  cddp__gpu_of(d)->mirror = (char *)cddp__arena_alloc(d->group->host, bytes);
  return cddp__gpu_of(d)->mirror != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

/* NCCL then moves the gradients without a copy; slower, not wrong, where it cannot. */
static void cddp__gpu_register(cddp_ddp *d) {
#if NCCL_VERSION_CODE >= 21900
  cddp__gpu *gpu = cddp__gpu_of(d);
  cddp__plane *p = gpu->plane;
  ncclResult_t e = ncclSuccess;
  ncclComm_t comm;
  pthread_mutex_lock(&p->turn);
  pthread_mutex_lock(&p->lock);
  comm = p->comm;
  if (comm != NULL) e = ncclCommRegister(comm, d->arena, d->bytes, &gpu->registration);
  pthread_mutex_unlock(&p->lock);
  if (e != ncclSuccess && e != ncclInProgress) gpu->registration = NULL;
  if (e == ncclInProgress) (void)cddp__settle(p, comm, e, "ncclCommRegister");
  pthread_mutex_unlock(&p->turn);
#else
  (void)d;
#endif
}

static void cddp__gpu_deregister(cddp_ddp *d) {
#if NCCL_VERSION_CODE >= 21900
  cddp__gpu *gpu = cddp__gpu_of(d);
  pthread_mutex_lock(&gpu->plane->lock);
  if (gpu->registration != NULL && gpu->plane->comm != NULL)
    ncclCommDeregister(gpu->plane->comm, gpu->registration);
  pthread_mutex_unlock(&gpu->plane->lock);
  gpu->registration = NULL;
#else
  (void)d;
#endif
}

/* The device side's own memory. Buckets are never more than parameters. */
static cddp_result cddp__gpu_new(cddp_ddp *d) {
  const cddp_allocator *a = &d->group->host->allocator;
  size_t n = (size_t)d->count;
  cddp__gpu *gpu = (cddp__gpu *)cddp__calloc(a, 1, sizeof *gpu);
  cddp_result r;
  int i;
  if (gpu == NULL) return CDDP_OUT_OF_MEMORY;
  d->gpu = gpu;
  gpu->plane = cddp__plane_of(d->comm);
  gpu->reduced = (cudaEvent_t *)cddp__calloc(a, n, sizeof *gpu->reduced);
  gpu->fills = (cudaEvent_t *)cddp__calloc(a, n, sizeof *gpu->fills);
  gpu->calls = (cddp__call *)cddp__calloc(a, n, sizeof *gpu->calls);
  gpu->segments = (cddp_segment *)cddp__calloc(a, n, sizeof *gpu->segments);
  if (gpu->reduced == NULL || gpu->fills == NULL || gpu->calls == NULL || gpu->segments == NULL)
    return CDDP_OUT_OF_MEMORY;
  r = cddp__event_new(&gpu->filled);
  if (r == CDDP_OK) r = cddp__event_new(&gpu->drained);
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    r = cddp__event_new(&gpu->reduced[i]);
    if (r == CDDP_OK && cddp__gpu_staged(d)) r = cddp__event_new(&gpu->fills[i]);
  }
  return r;
}

static void cddp__gpu_leave(cddp_ddp *d) {
  const cddp_allocator *a = &d->group->host->allocator;
  cddp__gpu *gpu = cddp__gpu_of(d);
  int i;
  if (gpu == NULL) return;
  (void)cddp__use_device(gpu->plane->device);
  if (d->comm != NULL) cddp__engine_drain(d->comm);
  (void)cddp__await_stream(cddp__plane_of(d->group), cddp__gpu_stream(d));
  if (cddp__await_stream(gpu->plane, gpu->plane->side) != CDDP_OK) cddp__plane_abort(gpu->plane);
  cddp__await_abort(gpu->plane);
  (void)cudaStreamSynchronize(gpu->plane->side); /* what ran at the failure, too */
  (void)cudaStreamSynchronize(cddp__gpu_stream(d));
  cddp__gpu_deregister(d);
  while (d->shards != NULL) {
    cddp_sgd *s = d->shards->sgd; /* its momentum goes with the shard: it starts anew */
    for (i = 0; i < s->count; i++) s->started[i] = false;
    cddp__gpu_shard_drop(s);
  }
#if NCCL_VERSION_CODE >= 21900
  if (gpu->arena_from_nccl) {
    ncclMemFree(d->arena);
    d->arena = NULL;
  }
#endif
  if (d->arena != NULL) cudaFree(d->arena);
  d->arena = NULL;
  if (gpu->scratch != NULL) cudaFree(gpu->scratch);
  cddp__arena_free(d->group->host, gpu->mirror);
  cddp__event_free(&gpu->filled);
  cddp__event_free(&gpu->drained);
  for (i = 0; i < d->count; i++) {
    if (gpu->reduced != NULL) cddp__event_free(&gpu->reduced[i]);
    if (gpu->fills != NULL) cddp__event_free(&gpu->fills[i]);
  }
  cddp__free(a, gpu->reduced);
  cddp__free(a, gpu->fills);
  cddp__free(a, gpu->calls);
  cddp__free(a, gpu->segments);
  cddp__free(a, gpu);
  d->gpu = NULL;
}

/* A private group like g, with a data plane. */
static cddp_result cddp__split_with_plane(cddp_group *g, uint64_t check, cddp_group **out) {
  cddp_result r = cddp__split(g, 0, g->rank, check, out), s;
  if (r != CDDP_OK && r != CDDP_OUT_OF_MEMORY) return r;
  s = g->backend->split(g, 0, g->rank, *out);
  return r == CDDP_OK ? s : r;
}

/* From now on the user's group and the private one fail together: see cddp__break_both. */
static void cddp__plane_belongs(cddp__plane *p, cddp_group *parent) {
  pthread_mutex_lock(&p->lock);
  p->parent = parent;
  pthread_mutex_unlock(&p->lock);
}

static size_t cddp__gpu_align(int ranks) { /* lowest common multiple of 64 and 16 * ranks */
  size_t step = 16 * (size_t)ranks, align = step;
  while (align % CDDP__CACHE_LINE != 0) align += step;
  return align;
}

/* The collective part of creation, on a device. */
static cddp_result cddp__gpu_join(cddp_ddp *d) {
  cddp_group *g = d->group;
  cddp_result r, local;
  bool all = true;
  int i;
  if ((r = cddp__use_device(cddp__plane_of(g)->device)) != CDDP_OK) return r;
  if ((r = cddp__split(g, 0, g->rank, CDDP__KIND_DDP_CREATE, &d->control)) != CDDP_OK) return r;
  local = cddp__gpu_check_params(d);
  if ((r = cddp__gpu_agree(d, local, &all)) != CDDP_OK) return r;
  if ((r = cddp__split_with_plane(g, CDDP__KIND_DDP_CREATE, &d->comm)) != CDDP_OK) return r;
  if ((r = cddp__agree_on_params(d)) != CDDP_OK) return r;
  if (d->desc.comm_hook != NULL &&
      (r = cddp__split_with_plane(g, CDDP__KIND_DDP_CREATE + 1, &d->hooks)) != CDDP_OK)
    return r;
  d->align = cddp__gpu_align(g->size);
  cddp__lay_out(d);
  local = cddp__gpu_new(d);
  if (local == CDDP_OK) local = cddp__gpu_arena(d);
  all = local == CDDP_OK && cddp__gpu_of(d)->arena_from_nccl;
  if ((r = cddp__gpu_agree(d, local, &all)) != CDDP_OK) return r;
  if (all) cddp__gpu_register(d);
  all = cddp__gpu_of(d)->registration != NULL;
  if ((r = cddp__gpu_agree(d, CDDP_OK, &all)) != CDDP_OK) return r;
  if (!all) cddp__gpu_deregister(d); /* on all ranks or none */
  for (i = 0; i < d->count; i++) {
    d->tensors[i].placed = d->params[i].grad == NULL;
    d->tensors[i].used = true;
    d->used[i] = 1;
  }
  if ((r = cddp__gpu_broadcast(d, d->params, d->count)) != CDDP_OK) return r;
  if ((r = cddp__gpu_broadcast(d, d->desc.buffers, d->desc.buffer_count)) != CDDP_OK) return r;
  if ((r = cddp__set_plan(d, NULL)) != CDDP_OK) return r;
  cddp__arm(d);
  for (i = 0; i < d->count; i++)
    if (d->tensors[i].placed) d->params[i].grad = d->arena + d->tensors[i].offset;
  cddp__plane_belongs(cddp__plane_of(d->comm), g);
  if (d->hooks != NULL) cddp__plane_belongs(cddp__plane_of(d->hooks), g);
  return CDDP_OK;
}

/* --- backends and their groups --- */

static const cddp__backend cddp__nccl_backend = {
    cddp__nccl_start,       cddp__nccl_message,     cddp__device_wait,    cddp__device_done,
    cddp__nccl_synchronize, cddp__plane_set_stream, cddp__plane_stream,   cddp__plane_alloc,
    cddp__plane_release,    cddp__nccl_split,       cddp__plane_leave,    cddp__gpu_join,
    cddp__gpu_ready,        cddp__gpu_wait,         cddp__gpu_step,       cddp__gpu_clip,
    cddp__gpu_sync_buffers, cddp__gpu_leave,        cddp__device_compress};

static const cddp__backend cddp__staged_backend = {
    cddp__staged_start,     cddp__staged_message,   cddp__staged_wait,    cddp__staged_done,
    cddp__nccl_synchronize, cddp__plane_set_stream, cddp__plane_stream,   cddp__plane_alloc,
    cddp__plane_release,    cddp__staged_split,     cddp__plane_leave,    cddp__gpu_join,
    cddp__gpu_ready,        cddp__gpu_wait,         cddp__gpu_step,       cddp__gpu_clip,
    cddp__gpu_sync_buffers, cddp__gpu_leave,        cddp__device_compress};

static cddp_result cddp__no_gpu(cudaError_t e) {
  int version = 0;
  (void)cudaGetLastError();
  (void)cudaRuntimeGetVersion(&version);
  if (e == cudaErrorInsufficientDriver)
    return cddp__fail(CDDP_CUDA,
                      "CUDA finds no GPU here: the NVIDIA driver is missing, or too old for CUDA "
                      "%d.%d; install or update it, or use device \"cpu\"",
                      version / 1000, version % 1000 / 10);
  if (e == cudaErrorInitializationError)
    return cddp__fail(CDDP_CUDA,
                      "cudaGetDeviceCount: %s: a process that has used CUDA must not fork; call "
                      "cddp_spawn before anything that does",
                      cudaGetErrorString(e));
  if (e == cudaSuccess || e == cudaErrorNoDevice)
    return cddp__fail(CDDP_CUDA, "CUDA finds no GPU here%s; use device \"cpu\"",
                      getenv("CUDA_VISIBLE_DEVICES") != NULL
                          ? " (CUDA_VISIBLE_DEVICES is set: is it right?)"
                          : "");
  return cddp__cuda_result(e, "cudaGetDeviceCount");
}

/* Which device this rank takes. */
static cddp_result cddp__pick_device(const cddp_group *g, const cddp_group_desc *desc, bool nccl,
                                     int *device) {
  const char *local = getenv("LOCAL_RANK");
  int count = 0;
  cudaError_t e = cudaGetDeviceCount(&count);
  if (e != cudaSuccess || count == 0) return cddp__no_gpu(e);
  if (desc->device[4] == ':') {
    *device = atoi(desc->device + 5);
    if (*device < count) return CDDP_OK;
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "device \"%s\" does not exist: %d GPU%s visible, cuda:0 to cuda:%d",
                      desc->device, count, count == 1 ? " is" : "s are", count - 1);
  }
  if (g->host->threads && g->size > 1) local = NULL; /* the process's, not a thread's */
  *device = local != NULL && local[0] >= '0' && local[0] <= '9' ? atoi(local) : g->number;
  if (!nccl || count == 1) *device %= count; /* a rank that sees one GPU has been given it */
  if (*device < count) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "local rank %d has no GPU of its own: %d %s visible; start at most %d rank%s "
                    "here, or let them share with backend \"cpu\"",
                    *device, count, count == 1 ? "is" : "are", count, count == 1 ? "" : "s");
}

static void cddp__report_device(const cddp_group *g, const cddp_group_desc *desc, bool nccl,
                                cddp__device_report *out) {
  const char *blocking = getenv("NCCL_COMM_BLOCKING");
  cddp_result r;
  int device = 0;
  memset(out, 0, sizeof *out);
  r = cddp__pick_device(g, desc, nccl, &device);
  if (r == CDDP_OK && nccl && blocking != NULL && strcmp(blocking, "1") == 0)
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "NCCL_COMM_BLOCKING=1 makes NCCL's calls block, which no deadline ends; unset "
                   "it");
  if (r == CDDP_OK) r = cddp__cuda_result(cudaSetDevice(device), "cudaSetDevice");
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaDeviceGetPCIBusId(out->bus, (int)sizeof out->bus, device),
                          "cudaDeviceGetPCIBusId");
  out->device = device;
  out->result = (int32_t)r;
  cddp__host_identity(out->host, sizeof out->host);
  if (getenv("NCCL_HOSTID") != NULL) /* NCCL goes by it: ranks may so share a GPU, for tests */
    snprintf(out->host, sizeof out->host, "%s", getenv("NCCL_HOSTID"));
  snprintf(out->name, sizeof out->name, "rank %d (pid %d on %.48s)", g->rank, (int)getpid(),
           g->host->name);
  if (r != CDDP_OK) snprintf(out->text, sizeof out->text, "%s", cddp__error_text);
}

/* The first thing that is wrong with the ranks' devices; the same on every rank. */
static cddp_result cddp__check_devices(const cddp__device_report *all, int n, bool nccl) {
  int i, k;
  for (i = 0; i < n; i++)
    if (all[i].result != CDDP_OK)
      return cddp__fail((cddp_result)all[i].result, "%s%s%s", n > 1 ? all[i].name : "",
                        n > 1 ? ": " : "", all[i].text);
  for (i = 0; nccl && i < n; i++)
    for (k = 0; k < i; k++)
      if (strcmp(all[i].bus, all[k].bus) == 0 && strcmp(all[i].host, all[k].host) == 0)
        return cddp__fail(CDDP_INVALID_ARGUMENT,
                          "%s and %s both have cuda:%d (%s), but NCCL needs a GPU for each rank: "
                          "set device to \"cuda\" for cuda:LOCAL_RANK, start fewer ranks, or let "
                          "them share with backend \"cpu\"",
                          all[k].name, all[i].name, all[i].device, all[i].bus);
  return CDDP_OK;
}

/* Collective: gives the new group of all ranks its data plane. */
static cddp_result cddp__attach_plane(cddp_group *g, const cddp_group_desc *desc) {
  const cddp_allocator *a = &g->host->allocator;
  const char *backend = cddp__backend_name(desc);
  bool nccl = backend == NULL || strcmp(backend, "nccl") == 0;
  cddp__device_report mine, *all;
  cddp__plane *p = NULL;
  cddp_result r;
  all = (cddp__device_report *)cddp__malloc(a, (size_t)g->size * sizeof *all);
  if (all == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  cddp__report_device(g, desc, nccl, &mine);
  r = cddp__run_simple(g, CDDP__KIND_ALL_GATHER, &mine, all, sizeof mine, CDDP_U8, -1);
  if (r == CDDP_OK) r = cddp__check_devices(all, g->size, nccl);
  cddp__free(a, all);
  if (r != CDDP_OK) return r;
  if ((r = cddp__plane_new(&p, g, mine.device, NULL)) != CDDP_OK) return cddp__break(g, r);
  if (nccl && g->size > 1) r = cddp__nccl_connect(p);
  if (r != CDDP_OK) {
    cddp__unwatch(p);
    cddp__plane_abort(p);
    cddp__plane_free(p);
    return r;
  }
  g->backend = nccl ? &cddp__nccl_backend : &cddp__staged_backend;
  g->plane = p;
  return CDDP_OK;
}
#endif

/* Collective: a device for a group that has none. */
static cddp_result cddp__give_device(cddp_group *g, const cddp_group_desc *desc) {
#ifdef CDDP_CUDA
  return cddp__attach_plane(g, desc);
#else
  (void)g;
  (void)desc;
  return cddp__fail(CDDP_UNSUPPORTED, "this build has no CUDA");
#endif
}

/* Collective: the device that the description asks for, if any. A failure takes the group away. */
static cddp_result cddp__attach_device(cddp_group **g, const cddp_group_desc *desc) {
  cddp_result r = CDDP_OK;
#ifdef CDDP_CUDA
  char text[CDDP__ERROR_MAX];
  if (desc->device != NULL && strncmp(desc->device, "cuda", 4) == 0)
    r = cddp__give_device(*g, desc);
  if (r != CDDP_OK) {
    snprintf(text, sizeof text, "%s", cddp__error_text);
    cddp__group_leave(*g);
    *g = NULL;
    cddp__fail(r, "%s", text);
  }
#else
  (void)g;
  (void)desc;
#endif
  return r;
}

/* An optimizer whose first parameter lies on a device has all of them there. */
static cddp_result cddp__attach_sgd(cddp_sgd *s) {
#ifdef CDDP_CUDA
  int i, count = 0, on_device = 0;
  if (s->desc.ddp != NULL ? s->desc.ddp->backend == NULL : !cddp__cuda_in_use()) return CDDP_OK;
  for (i = 0; i < s->count; i++) {
    struct cudaPointerAttributes a;
    if (s->params[i].count == 0 || s->params[i].data == NULL) continue;
    if (cudaPointerGetAttributes(&a, s->params[i].data) != cudaSuccess) {
      (void)cudaGetLastError(); /* no device: no device memory */
      return CDDP_OK;
    }
    count++;
    on_device += a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged;
  }
  if (on_device > 0 && on_device < count)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "some parameters lie on a GPU and others in host memory");
  if (on_device > 0) s->backend = &cddp__device_sgd;
#else
  (void)s;
#endif
  return CDDP_OK;
}

/* --- for checkpoints: memory anywhere --- */

/* Whether p lies in memory that the host cannot read. */
static bool cddp__on_device(const void *p) {
#ifdef CDDP_CUDA
  struct cudaPointerAttributes a;
  if (p == NULL || !cddp__cuda_in_use()) return false;
  if (cudaPointerGetAttributes(&a, p) == cudaSuccess) return a.type == cudaMemoryTypeDevice;
  (void)cudaGetLastError();
#else
  (void)p;
#endif
  return false;
}

/* Whether an optimizer's momentum on a device may move. */
static cddp_result cddp__check_graphs(const cddp_sgd *s) {
#ifdef CDDP_CUDA
  const cddp_ddp *d = s->shard != NULL ? ((const cddp__shard *)s->shard)->ddp : s->desc.ddp;
  if (s->backend != NULL && d != NULL && d->gpu != NULL) return cddp__gpu_check_graphs(d);
#else
  (void)s;
#endif
  return CDDP_OK;
}

/* Waits for what is on the group's stream; without a group with a device, for all of the device's.
 */
static cddp_result cddp__settle_device(cddp_group *g) {
#ifdef CDDP_CUDA
  if (g == NULL || g->backend == NULL)
    return cddp__cuda_result(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (cddp__capturing(cddp__plane_of(g)->stream))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "a checkpoint waits on the host and cannot be captured in a CUDA graph");
  return g->backend->synchronize(g);
#else
  (void)g;
  return CDDP_OK;
#endif
}

/* Copies between the host's memory and a device's; returns when that is done. */
static cddp_result cddp__transfer(cddp_group *g, void *to, const void *from, size_t bytes) {
#ifdef CDDP_CUDA
  if (g != NULL && g->backend != NULL) return cddp__copy_now(cddp__plane_of(g), to, from, bytes);
  return cddp__cuda_result(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
#else
  (void)g;
  memcpy(to, from, bytes);
  return CDDP_OK;
#endif
}

/* Rank 0's values on every rank, in the same kind of memory on all. */
static cddp_result cddp__broadcast_anywhere(cddp_group *g, void *data, size_t count,
                                            cddp_dtype dtype) {
  cddp__call c;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_BROADCAST;
  c.dtype = (uint8_t)dtype;
  c.send = c.recv = data;
  c.count = count;
  c.esize = cddp__dtype_size(dtype);
  return cddp__start_call(g, &c, NULL);
}

/* cddp__split, and for every new group its data plane. */
static cddp_result cddp__split_planes(cddp_group *g, int color, int key, uint64_t check,
                                      cddp_group **out) {
  cddp_result r = cddp__split(g, color, key, check, out), planes;
  char text[CDDP__ERROR_MAX];
  if (g->backend == NULL || (r != CDDP_OK && r != CDDP_OUT_OF_MEMORY)) return r;
  snprintf(text, sizeof text, "%s", cddp__error_text);
  planes = g->backend->split(g, color, key, *out); /* the other ranks count on this one */
  if (r != CDDP_OK) return cddp__fail(r, "%s", text);
  if (planes == CDDP_OK) return planes;
  snprintf(text, sizeof text, "%s", cddp__error_text);
  if (*out != NULL) cddp__group_leave(*out);
  *out = NULL;
  return cddp__fail(planes, "%s", text);
}
/* >>sampler ------------------------------------------------------------------------------------
   torch.utils.data.DistributedSampler: the same generator and the same shuffle. Pure. */

static void cddp__mt_seed(cddp__mt19937 *g, uint32_t seed) {
  uint32_t i;
  g->state[0] = seed;
  for (i = 1; i < 624; i++) {
    g->state[i] = 1812433253u * (g->state[i - 1] ^ (g->state[i - 1] >> 30)) + i;
  }
  g->next = 624;
}

static uint32_t cddp__mt_next(cddp__mt19937 *g) {
  uint32_t y;
  int i;
  if (g->next == 624) {
    for (i = 0; i < 624; i++) {
      y = (g->state[i] & 0x80000000u) | (g->state[(i + 1) % 624] & 0x7fffffffu);
      g->state[i] = g->state[(i + 397) % 624] ^ (y >> 1) ^ ((y & 1) != 0 ? 0x9908b0dfu : 0);
    }
    g->next = 0;
  }
  y = g->state[g->next++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

#define CDDP__RANDPERM_32BIT 214748364u /* from here on torch.randperm draws 64 bits a time */

/* torch.randperm(n) of a fresh generator, as in PyTorch 2.6 and later (all versions, for n below
   CDDP__RANDPERM_32BIT). */
static void cddp__randperm(uint64_t *a, size_t n, uint64_t seed) {
  cddp__mt19937 g;
  size_t i, z;
  cddp__mt_seed(&g, (uint32_t)(seed & 0xffffffffu));
  if (n < CDDP__RANDPERM_32BIT) {
    for (i = 0; i < n; i++) a[i] = i;
    for (i = 0; i + 1 < n; i++) {
      uint64_t t = a[i];
      z = i + cddp__mt_next(&g) % (n - i);
      a[i] = a[z];
      a[z] = t;
    }
    return;
  }
  for (i = 0; i < n; i++) {
    uint64_t high = cddp__mt_next(&g);
    z = (size_t)((high << 32 | cddp__mt_next(&g)) % (i + 1));
    a[i] = i;
    a[i] = a[z];
    a[z] = i;
  }
}

/* Indices of this rank in an epoch, of which all ranks together have taken `start` samples. */
static size_t cddp__sampler_count(const cddp_sampler_desc *d, size_t start) {
  size_t n = d->dataset_size - start, w = (size_t)d->world_size, r = (size_t)d->rank;
  if (d->exact) return n / w + (r < n % w);
  return n / w + (!d->drop_last && n % w != 0);
}

static cddp_result cddp__sampler_check(const cddp_sampler_desc *d) {
  if (d->world_size < 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "world_size %d is negative", d->world_size);
  if (d->rank < 0 || d->rank >= (d->world_size != 0 ? d->world_size : 1))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "rank %d is not in 0 .. world_size - 1 = %d", d->rank,
                      d->world_size != 0 ? d->world_size - 1 : 0);
  if (d->drop_last && d->exact)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "drop_last and exact exclude each other");
  if (d->dataset_size > SIZE_MAX / 16)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "dataset_size %zu is too large", d->dataset_size);
  return CDDP_OK;
}

static void cddp__sampler_rewind(cddp_sampler *s) {
  free(s->order);
  s->order = NULL;
  s->position = 0;
  s->result = CDDP_OK;
  s->resumed = false;
}

static void cddp__sampler_resume(cddp_sampler *s, uint64_t epoch, uint64_t samples) {
  cddp__sampler_rewind(s);
  s->epoch = epoch;
  s->start = samples < s->desc.dataset_size ? (size_t)samples : s->desc.dataset_size;
  s->size = cddp__sampler_count(&s->desc, s->start);
  s->resumed = true;
}

/* Works as follows: this rank has positions rank, rank + W, ... of the permutation, after those
   that were taken before a resumption; for even shares it is repeated from its start. It is made at
   the first index of an epoch and freed after the last. */
static bool cddp__sampler_next(cddp_sampler *s, size_t *index) {
  size_t n = s->desc.dataset_size, at;
  s->result = CDDP_OK;
  if (s->position >= s->size) {
    free(s->order);
    s->order = NULL;
    return false;
  }
  if (s->desc.shuffle && s->order == NULL) {
    s->order = (uint64_t *)malloc(n * sizeof *s->order);
    if (s->order == NULL) {
      s->result = cddp__fail(CDDP_OUT_OF_MEMORY,
                             "cddp_sampler_next: no memory for the permutation of %zu samples", n);
      return false;
    }
    cddp__randperm(s->order, n, s->desc.seed + s->epoch);
  }
  at = (s->start + (size_t)s->desc.rank + s->position * (size_t)s->desc.world_size) % n;
  *index = s->order != NULL ? (size_t)s->order[at] : at;
  s->position++;
  return true;
}
/* >>safetensors --------------------------------------------------------------------------------
   The header of a safetensors file, read and written. Pure: no I/O. A file is a u64 N, N bytes of
   JSON and the tensors' bytes: {"__metadata__": {string: string}, NAME: {"dtype": "F32", "shape":
   [2, 3], "data_offsets": [begin, end]}, ...}. Reading works as follows: the text, which may be
   anybody's, is checked for UTF-8 as a whole and passed over once, by a cursor that stops at its
   end. Strings are decoded in place, which never makes them longer, and end with a NUL where their
   quote was: names point into the text. Then the tensors are sorted by position, where each must
   begin where the one before ended and the last one ends with the file, and by name, where equal
   names meet. No size is computed without a check for overflow, and memory is taken for what has
   been read, not for what a number in the file says. */

#define CDDP__HEADER_MAX 100000000u /* bytes of JSON, as in the reference implementation */
#define CDDP__DIMS_MAX 64           /* of a tensor, as in PyTorch and NumPy */
#define CDDP__NESTING_MAX 32        /* of values in fields that mean nothing to us */
#define CDDP__MOMENTUM_PREFIX "optimizer.momentum_buffer."
#define CDDP__LR_NAME "optimizer.lr"

typedef struct cddp__st_type {
  char name[12];
  int bits;
  int dtype; /* cddp_dtype; -1: none */
} cddp__st_type;

/* In the order in which the reference implementation lays tensors out: none is then misaligned. */
static const cddp__st_type cddp__st_types[] = {
    {"U64", 64, -1},        {"I64", 64, CDDP_I64},  {"F64", 64, CDDP_F64}, {"C64", 64, -1},
    {"F32", 32, CDDP_F32},  {"U32", 32, -1},        {"I32", 32, CDDP_I32}, {"BF16", 16, CDDP_BF16},
    {"F16", 16, CDDP_F16},  {"U16", 16, -1},        {"I16", 16, -1},       {"F8_E5M2", 8, -1},
    {"F8_E4M3", 8, -1},     {"F8_E8M0", 8, -1},     {"F8_E4M3FNUZ", 8, -1},
    {"F8_E5M2FNUZ", 8, -1}, {"I8", 8, CDDP_I8},     {"U8", 8, CDDP_U8},    {"F6_E3M2", 6, -1},
    {"F6_E2M3", 6, -1},     {"F4", 4, -1},          {"BOOL", 8, -1}};
#define CDDP__ST_TYPES ((int)(sizeof cddp__st_types / sizeof *cddp__st_types))

typedef struct cddp__st_tensor {
  cddp_tensor_info info; /* info.shape is set when all tensors are known */
  size_t shape_at;       /* in shapes */
} cddp__st_tensor;

struct cddp_safetensors { /* nothing changes once it is open */
  cddp_allocator allocator;
  char *text; /* the JSON, decoded in place, and a NUL */
  size_t text_size;
  cddp__st_tensor *tensors; /* by position in the file */
  size_t count, capacity;
  uint64_t *shapes;
  size_t shape_count, shape_capacity;
  const char **pairs; /* metadata: key, value, key, value, ..., sorted by key */
  size_t pair_count, pair_capacity; /* of both together */
  bool has_metadata;
  const cddp__st_tensor **by_name; /* [count] */
  uint64_t data_begin;             /* in the file */
  int fd;
};

/* --- text --- */

/* Bytes of the UTF-8 sequence that p begins with; 0: it is none. */
static size_t cddp__utf8(const unsigned char *p, size_t n) {
  size_t i, k = 0;
  if (p[0] < 0x80) return 1;
  if (p[0] >= 0xc2 && p[0] < 0xf5) k = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
  if (k > n) return 0;
  for (i = 1; i < k; i++)
    if ((p[i] & 0xc0) != 0x80) return 0;
  /* longer than need be, half of a surrogate pair, beyond the last character */
  if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f)) return 0;
  if ((p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f)) return 0;
  return k;
}

static char *cddp__utf8_put(char *to, uint32_t c) {
  int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
  *to++ = (char)(lead[more] | c >> (6 * more));
  while (more-- > 0) *to++ = (char)(0x80 | (c >> (6 * more) & 0x3f));
  return to;
}

#define CDDP__SHOWN 64 /* bytes of a name in an error text */

/* A name from a file, as it may stand in a message: nothing that a terminal would obey. */
static const char *cddp__show_name(const char *name, char *space) {
  size_t i;
  snprintf(space, CDDP__SHOWN, "%s", name);
  for (i = 0; space[i] != 0; i++)
    if ((unsigned char)space[i] < 0x20 || space[i] == 0x7f) space[i] = '?';
  return space;
}

/* --- JSON --- */

typedef struct cddp__json {
  const char *begin;
  char *at, *end;
} cddp__json;

static cddp_result cddp__json_fail(const cddp__json *j, const char *what) {
  return cddp__fail(CDDP_IO, "its header is wrong at byte %zu: %s", (size_t)(j->at - j->begin),
                    what);
}

static void cddp__json_space(cddp__json *j) {
  while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t'))
    j->at++;
}

/* Steps over c, if that is next. */
static bool cddp__json_next(cddp__json *j, char c) {
  cddp__json_space(j);
  if (j->at == j->end || *j->at != c) return false;
  j->at++;
  return true;
}

static bool cddp__json_hex(cddp__json *j, uint32_t *v) { /* four digits */
  static const char digits[] = "0123456789abcdefABCDEF";
  int i;
  for (i = 0, *v = 0; i < 4; i++) {
    const char *d =
        j->at < j->end ? (const char *)memchr(digits, *j->at, sizeof digits - 1) : NULL;
    if (d == NULL) return false;
    *v = *v << 4 | (uint32_t)(d - digits < 16 ? d - digits : d - digits - 6);
    j->at++;
  }
  return true;
}

/* Decodes what follows a backslash to `to`; NULL if it is no escape sequence. */
static char *cddp__json_escape(cddp__json *j, char *to) {
  static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
  const char *k;
  uint32_t c, low;
  if (j->at == j->end) return NULL;
  if (*j->at != 'u') {
    k = (const char *)memchr(letters, *j->at, sizeof letters - 1);
    if (k == NULL) return NULL;
    j->at++;
    *to = meant[k - letters];
    return to + 1;
  }
  j->at++;
  if (!cddp__json_hex(j, &c) || c == 0) return NULL; /* no C string holds a NUL */
  if (c >= 0xd800 && c < 0xdc00) { /* the first half of a pair */
    if (j->end - j->at < 2 || j->at[0] != '\\' || j->at[1] != 'u') return NULL;
    j->at += 2;
    if (!cddp__json_hex(j, &low) || low < 0xdc00 || low > 0xdfff) return NULL;
    c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
  } else if (c >= 0xdc00 && c < 0xe000) {
    return NULL;
  }
  return cddp__utf8_put(to, c);
}

static cddp_result cddp__json_string(cddp__json *j, const char **out) {
  char *to;
  if (!cddp__json_next(j, '"')) return cddp__json_fail(j, "a string is expected");
  *out = to = j->at;
  while (j->at < j->end) {
    char c = *j->at++;
    if (c == '"') {
      *to = 0;
      return CDDP_OK;
    }
    if ((unsigned char)c < 0x20) return cddp__json_fail(j, "a control character in a string");
    if (c != '\\')
      *to++ = c;
    else if ((to = cddp__json_escape(j, to)) == NULL)
      return cddp__json_fail(j, "no escape sequence that a name or a value may have");
  }
  return cddp__json_fail(j, "a string does not end");
}

static cddp_result cddp__json_u64(cddp__json *j, uint64_t *out) {
  const char *first;
  uint64_t v = 0, digit;
  cddp__json_space(j);
  for (first = j->at; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
    digit = (uint64_t)(*j->at - '0');
    if (v > (UINT64_MAX - digit) / 10) return cddp__json_fail(j, "a number beyond 64 bits");
    v = v * 10 + digit;
  }
  if (j->at == first || (*first == '0' && j->at - first > 1))
    return cddp__json_fail(j, "a whole number from 0 on is expected");
  *out = v;
  return CDDP_OK;
}

static bool cddp__json_digits(cddp__json *j) {
  const char *first = j->at;
  while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
  return j->at > first;
}

static bool cddp__json_number(cddp__json *j) { /* steps over any number */
  if (*j->at == '-') j->at++;
  if (j->at < j->end && *j->at == '0') j->at++;
  else if (!cddp__json_digits(j)) return false;
  if (j->at < j->end && *j->at == '.') {
    j->at++;
    if (!cddp__json_digits(j)) return false;
  }
  if (j->at < j->end && (*j->at == 'e' || *j->at == 'E')) {
    j->at++;
    if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
    if (!cddp__json_digits(j)) return false;
  }
  return true;
}

static bool cddp__json_word(cddp__json *j, const char *word) {
  size_t n = strlen(word);
  if ((size_t)(j->end - j->at) < n || memcmp(j->at, word, n) != 0) return false;
  j->at += n;
  return true;
}

/* Steps over a value that means nothing to us. */
static cddp_result cddp__json_skip(cddp__json *j, int depth) {
  const char *ignored;
  cddp_result r;
  char close;
  cddp__json_space(j);
  if (depth > CDDP__NESTING_MAX) return cddp__json_fail(j, "values are nested too deeply");
  if (j->at == j->end) return cddp__json_fail(j, "a value is expected");
  if (*j->at == '"') return cddp__json_string(j, &ignored);
  if (*j->at == '-' || (*j->at >= '0' && *j->at <= '9'))
    return cddp__json_number(j) ? CDDP_OK : cddp__json_fail(j, "a number is expected");
  if (*j->at != '{' && *j->at != '[')
    return cddp__json_word(j, "true") || cddp__json_word(j, "false") || cddp__json_word(j, "null")
               ? CDDP_OK
               : cddp__json_fail(j, "a value is expected");
  close = *j->at++ == '{' ? '}' : ']';
  if (cddp__json_next(j, close)) return CDDP_OK;
  do {
    if (close == '}') {
      if ((r = cddp__json_string(j, &ignored)) != CDDP_OK) return r;
      if (!cddp__json_next(j, ':')) return cddp__json_fail(j, "a colon is expected");
    }
    if ((r = cddp__json_skip(j, depth + 1)) != CDDP_OK) return r;
  } while (cddp__json_next(j, ','));
  return cddp__json_next(j, close) ? CDDP_OK : cddp__json_fail(j, "a comma or the end is expected");
}

static cddp_result cddp__json_key(cddp__json *j, const char **key) {
  cddp_result r = cddp__json_string(j, key);
  if (r == CDDP_OK && !cddp__json_next(j, ':')) r = cddp__json_fail(j, "a colon is expected");
  return r;
}

/* [n, n, ...], at most max of them. */
static cddp_result cddp__json_numbers(cddp__json *j, uint64_t *v, int max, int *n) {
  cddp_result r;
  *n = 0;
  if (!cddp__json_next(j, '[')) return cddp__json_fail(j, "a list of numbers is expected");
  if (cddp__json_next(j, ']')) return CDDP_OK;
  do {
    if (*n == max) return cddp__json_fail(j, "a list is too long");
    if ((r = cddp__json_u64(j, &v[*n])) != CDDP_OK) return r;
    ++*n;
  } while (cddp__json_next(j, ','));
  return cddp__json_next(j, ']') ? CDDP_OK : cddp__json_fail(j, "a comma or a ] is expected");
}

/* --- reading a header --- */

static const cddp__st_type *cddp__st_type_named(const char *name) {
  int i;
  for (i = 0; i < CDDP__ST_TYPES; i++)
    if (strcmp(cddp__st_types[i].name, name) == 0) return &cddp__st_types[i];
  return NULL;
}

/* Elements and bytes of a shape, multiplied from left to right; false: beyond 64 bits, or a part of
   a byte. */
static bool cddp__st_size(const uint64_t *shape, int dims, int bits, uint64_t *elements,
                          uint64_t *bytes) {
  uint64_t n = 1;
  int i;
  for (i = 0; i < dims; i++) {
    if (shape[i] != 0 && n > UINT64_MAX / shape[i]) return false;
    n *= shape[i];
  }
  *elements = n;
  *bytes = n * (uint64_t)bits / 8;
  return n <= UINT64_MAX / (uint64_t)bits && n * (uint64_t)bits % 8 == 0;
}

/* p, or a copy of it with room for more: at least `needed` elements. NULL: no memory, p is as it
   was. */
static void *cddp__grown(const cddp_allocator *a, void *p, size_t *capacity, size_t needed,
                         size_t size) {
  size_t more = cddp__max(needed, *capacity * 2 + 8);
  void *q;
  if (needed <= *capacity) return p;
  if ((q = cddp__malloc(a, more * size)) == NULL) return NULL;
  if (p != NULL) memcpy(q, p, *capacity * size);
  cddp__free(a, p);
  *capacity = more;
  return q;
}

static cddp_result cddp__st_add(cddp_safetensors *f, const cddp_tensor_info *info,
                                const uint64_t *shape) {
  size_t dims = (size_t)info->dims;
  void *p;
  p = cddp__grown(&f->allocator, f->shapes, &f->shape_capacity, f->shape_count + dims,
                  sizeof *f->shapes);
  if (dims > 0 && p == NULL) return CDDP_OUT_OF_MEMORY;
  f->shapes = (uint64_t *)p;
  p = cddp__grown(&f->allocator, f->tensors, &f->capacity, f->count + 1, sizeof *f->tensors);
  if (p == NULL) return CDDP_OUT_OF_MEMORY;
  f->tensors = (cddp__st_tensor *)p;
  f->tensors[f->count].info = *info;
  f->tensors[f->count++].shape_at = f->shape_count;
  if (dims > 0) memcpy(f->shapes + f->shape_count, shape, dims * sizeof *shape);
  f->shape_count += dims;
  return CDDP_OK;
}

/* One field of a tensor's object; those that mean nothing to us are stepped over. */
static cddp_result cddp__st_field(cddp__json *j, const char **type, uint64_t *shape, int *dims,
                                  uint64_t *offsets, int *ends) {
  const char *key;
  cddp_result r = cddp__json_key(j, &key);
  if (r != CDDP_OK) return r;
  if (strcmp(key, "dtype") == 0)
    return *type == NULL ? cddp__json_string(j, type) : cddp__json_fail(j, "dtype comes twice");
  if (strcmp(key, "shape") == 0)
    return *dims < 0 ? cddp__json_numbers(j, shape, CDDP__DIMS_MAX, dims)
                     : cddp__json_fail(j, "shape comes twice");
  if (strcmp(key, "data_offsets") == 0)
    return *ends < 0 ? cddp__json_numbers(j, offsets, 2, ends)
                     : cddp__json_fail(j, "data_offsets comes twice");
  return cddp__json_skip(j, 0);
}

static cddp_result cddp__st_tensor_object(cddp_safetensors *f, cddp__json *j, const char *name) {
  uint64_t shape[CDDP__DIMS_MAX], offsets[2] = {0, 0};
  const char *type = NULL;
  const cddp__st_type *known;
  int dims = -1, ends = -1;
  cddp_tensor_info t;
  cddp_result r;
  char space[CDDP__SHOWN];
  if (!cddp__json_next(j, '{')) return cddp__json_fail(j, "a tensor's object is expected");
  if (!cddp__json_next(j, '}')) {
    do {
      r = cddp__st_field(j, &type, shape, &dims, offsets, &ends);
      if (r != CDDP_OK) return r;
    } while (cddp__json_next(j, ','));
    if (!cddp__json_next(j, '}')) return cddp__json_fail(j, "a comma or a } is expected");
  }
  if (type == NULL || dims < 0 || ends != 2)
    return cddp__json_fail(j, "a tensor needs dtype, shape and two data_offsets");
  if ((known = cddp__st_type_named(type)) == NULL)
    return cddp__json_fail(j, "its dtype is not one of the format's");
  memset(&t, 0, sizeof t);
  t.name = name;
  t.type = known->name;
  t.dtype = known->dtype;
  t.dims = dims;
  t.begin = offsets[0];
  if (!cddp__st_size(shape, dims, known->bits, &t.count, &t.bytes))
    return cddp__json_fail(j, "a shape's size exceeds 64 bits, or is not whole bytes");
  if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != t.bytes)
    return cddp__fail(CDDP_IO,
                      "tensor \"%s\" takes %" PRIu64 " bytes by its shape, but its data_offsets "
                      "are %" PRIu64 " and %" PRIu64,
                      cddp__show_name(name, space), t.bytes, offsets[0], offsets[1]);
  return cddp__st_add(f, &t, shape);
}

static cddp_result cddp__st_metadata(cddp_safetensors *f, cddp__json *j) {
  cddp_result r;
  void *p;
  if (f->has_metadata) return cddp__json_fail(j, "__metadata__ comes twice");
  f->has_metadata = true;
  cddp__json_space(j);
  if (cddp__json_word(j, "null")) return CDDP_OK;
  if (!cddp__json_next(j, '{')) return cddp__json_fail(j, "an object of strings is expected");
  if (cddp__json_next(j, '}')) return CDDP_OK;
  do {
    p = cddp__grown(&f->allocator, f->pairs, &f->pair_capacity, f->pair_count + 2,
                    sizeof *f->pairs);
    if (p == NULL) return CDDP_OUT_OF_MEMORY;
    f->pairs = (const char **)p;
    if ((r = cddp__json_key(j, &f->pairs[f->pair_count])) != CDDP_OK) return r;
    if ((r = cddp__json_string(j, &f->pairs[f->pair_count + 1])) != CDDP_OK) return r;
    f->pair_count += 2;
  } while (cddp__json_next(j, ','));
  return cddp__json_next(j, '}') ? CDDP_OK : cddp__json_fail(j, "a comma or a } is expected");
}

static cddp_result cddp__st_object(cddp_safetensors *f) { /* the whole text */
  cddp__json j;
  const char *name;
  cddp_result r;
  j.begin = j.at = f->text;
  j.end = f->text + f->text_size;
  if (f->text_size == 0 || *j.at != '{') return cddp__json_fail(&j, "it must begin with {");
  j.at++;
  if (!cddp__json_next(&j, '}')) {
    do {
      if ((r = cddp__json_key(&j, &name)) != CDDP_OK) return r;
      r = strcmp(name, "__metadata__") == 0 ? cddp__st_metadata(f, &j)
                                            : cddp__st_tensor_object(f, &j, name);
      if (r != CDDP_OK) return r;
    } while (cddp__json_next(&j, ','));
    if (!cddp__json_next(&j, '}')) return cddp__json_fail(&j, "a comma or a } is expected");
  }
  cddp__json_space(&j);
  return j.at == j.end ? CDDP_OK : cddp__json_fail(&j, "only spaces may follow the last }");
}

static int cddp__st_by_position(const void *a, const void *b) {
  const cddp_tensor_info *x = &((const cddp__st_tensor *)a)->info;
  const cddp_tensor_info *y = &((const cddp__st_tensor *)b)->info;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int cddp__st_by_name(const void *a, const void *b) {
  return strcmp((*(const cddp__st_tensor *const *)a)->info.name,
                (*(const cddp__st_tensor *const *)b)->info.name);
}

static int cddp__st_by_key(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* No name twice. */
static cddp_result cddp__st_check_names(cddp_safetensors *f) {
  char space[CDDP__SHOWN];
  size_t i;
  f->by_name = (const cddp__st_tensor **)cddp__calloc(&f->allocator, f->count, sizeof *f->by_name);
  if (f->by_name == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < f->count; i++) f->by_name[i] = &f->tensors[i];
  if (f->count > 1) qsort(f->by_name, f->count, sizeof *f->by_name, cddp__st_by_name);
  for (i = 1; i < f->count; i++)
    if (cddp__st_by_name(&f->by_name[i - 1], &f->by_name[i]) == 0)
      return cddp__fail(CDDP_IO, "two tensors are named \"%s\"",
                        cddp__show_name(f->by_name[i]->info.name, space));
  if (f->pair_count > 2) qsort(f->pairs, f->pair_count / 2, 2 * sizeof *f->pairs, cddp__st_by_key);
  for (i = 2; i < f->pair_count; i += 2)
    if (strcmp(f->pairs[i - 2], f->pairs[i]) == 0)
      return cddp__fail(CDDP_IO, "the metadata has \"%s\" twice",
                        cddp__show_name(f->pairs[i], space));
  return CDDP_OK;
}

/* Each byte of the data belongs to one tensor. Sorts them by position. */
static cddp_result cddp__st_check_places(cddp_safetensors *f, uint64_t data_bytes) {
  char space[CDDP__SHOWN];
  uint64_t at = 0;
  size_t i;
  if (f->count > 1) qsort(f->tensors, f->count, sizeof *f->tensors, cddp__st_by_position);
  for (i = 0; i < f->count; i++) {
    cddp__st_tensor *t = &f->tensors[i];
    if (t->info.begin != at)
      return cddp__fail(CDDP_IO,
                        "tensor \"%s\" begins at byte %" PRIu64 " of the data, %s byte %" PRIu64,
                        cddp__show_name(t->info.name, space), t->info.begin,
                        t->info.begin < at ? "inside another that ends at"
                                           : "but no tensor has the bytes from",
                        at);
    at += t->info.bytes;
    t->info.shape = f->shapes != NULL ? f->shapes + t->shape_at : NULL;
  }
  if (at != data_bytes)
    return cddp__fail(CDDP_IO,
                      "its tensors take %" PRIu64 " bytes, but %" PRIu64 " follow the header%s", at,
                      data_bytes, data_bytes < at ? ": it was cut off" : "");
  return CDDP_OK;
}

/* Reads f->text, of a file with so many bytes of data; f is otherwise zero. */
static cddp_result cddp__st_parse(cddp_safetensors *f, uint64_t data_bytes) {
  const unsigned char *p = (const unsigned char *)f->text;
  size_t at, n;
  cddp_result r;
  for (at = 0; at < f->text_size; at += n)
    if ((n = cddp__utf8(p + at, f->text_size - at)) == 0)
      return cddp__fail(CDDP_IO, "its header is not UTF-8 at byte %zu", at);
  if ((r = cddp__st_object(f)) != CDDP_OK) return r;
  if ((r = cddp__st_check_places(f, data_bytes)) != CDDP_OK) return r;
  return cddp__st_check_names(f);
}

/* The length of the header after the first 8 bytes of a file of so many bytes. */
static cddp_result cddp__st_header_size(const unsigned char *first, uint64_t file_bytes,
                                        size_t *size) {
  uint64_t n = file_bytes >= 8 ? cddp__get64(first) : 0;
  if (file_bytes < 8)
    return cddp__fail(CDDP_IO, "it has %" PRIu64 " bytes; a safetensors file has at least 10",
                      file_bytes);
  if (n > CDDP__HEADER_MAX)
    return cddp__fail(CDDP_IO,
                      "it is no safetensors file: its header would have %" PRIu64
                      " bytes, and at most %u are allowed",
                      n, CDDP__HEADER_MAX);
  if (n > file_bytes - 8)
    return cddp__fail(CDDP_IO, "its header should have %" PRIu64 " bytes, but %" PRIu64
                               " follow: it was cut off", n, file_bytes - 8);
  *size = (size_t)n;
  return CDDP_OK;
}

static void cddp__st_free(cddp_safetensors *f) {
  cddp_allocator a = f->allocator;
  cddp__free(&a, f->text);
  cddp__free(&a, f->tensors);
  cddp__free(&a, f->shapes);
  cddp__free(&a, f->pairs);
  cddp__free(&a, f->by_name);
  cddp__free(&a, f);
}

static int cddp__st_compare(const char *whole, const char *prefix, const char *name) {
  size_t n = strlen(prefix);
  int c = strncmp(whole, prefix, n);
  return c != 0 ? c : strcmp(whole + n, name);
}

/* The tensor named prefix and name, NULL if there is none. */
static const cddp__st_tensor *cddp__st_find(const cddp_safetensors *f, const char *prefix,
                                            const char *name) {
  size_t low = 0, high = f->count, mid;
  while (low < high) {
    int c = cddp__st_compare(f->by_name[mid = low + (high - low) / 2]->info.name, prefix, name);
    if (c == 0) return f->by_name[mid];
    if (c < 0) low = mid + 1;
    else high = mid;
  }
  return NULL;
}

static const char *cddp__st_value(const cddp_safetensors *f, const char *key) {
  size_t low = 0, high = f->pair_count / 2, mid;
  while (low < high) {
    int c = strcmp(f->pairs[2 * (mid = low + (high - low) / 2)], key);
    if (c == 0) return f->pairs[2 * mid + 1];
    if (c < 0) low = mid + 1;
    else high = mid;
  }
  return NULL;
}

/* --- writing a header --- */

/* A tensor to write, and where its bytes are. */
typedef struct cddp__st_item {
  const char *prefix, *name; /* its name is both together */
  const cddp__st_type *type;
  uint64_t shape[8];
  int dims;
  uint64_t begin, bytes;
  const void *data; /* NULL: the momentum of parameter `param`, which is in pieces */
  int param;
} cddp__st_item;

typedef struct cddp__text { /* out NULL: counts only */
  char *out;
  size_t n;
} cddp__text;

static void cddp__text_put(cddp__text *t, const char *s, size_t n) {
  if (t->out != NULL) memcpy(t->out + t->n, s, n);
  t->n += n;
}

static void cddp__text_puts(cddp__text *t, const char *s) { cddp__text_put(t, s, strlen(s)); }

static void cddp__text_u64(cddp__text *t, uint64_t v) {
  char digits[24];
  snprintf(digits, sizeof digits, "%" PRIu64, v);
  cddp__text_puts(t, digits);
}

/* The inside of a JSON string; what is not UTF-8 shows when the header is read back. */
static void cddp__text_quote(cddp__text *t, const char *s) {
  static const char meant[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
  static const char hex[] = "0123456789abcdef";
  for (; *s != 0; s++) {
    const char *k = (const char *)memchr(meant, *s, sizeof meant - 1);
    char u[6] = {'\\', 'u', '0', '0', 0, 0};
    u[4] = hex[(unsigned char)*s >> 4];
    u[5] = hex[(unsigned char)*s & 15];
    if (k != NULL) {
      u[1] = letters[k - meant];
      cddp__text_put(t, u, 2);
    } else if ((unsigned char)*s < 0x20) {
      cddp__text_put(t, u, 6);
    } else {
      cddp__text_put(t, s, 1);
    }
  }
}

static void cddp__text_pair(cddp__text *t, const char *key, const char *value) {
  cddp__text_puts(t, "\"");
  cddp__text_quote(t, key);
  cddp__text_puts(t, "\":\"");
  cddp__text_quote(t, value);
  cddp__text_puts(t, "\"");
}

static void cddp__text_item(cddp__text *t, const cddp__st_item *item) {
  int i;
  cddp__text_puts(t, ",\"");
  cddp__text_quote(t, item->prefix);
  cddp__text_quote(t, item->name);
  cddp__text_puts(t, "\":{\"dtype\":\"");
  cddp__text_puts(t, item->type->name);
  cddp__text_puts(t, "\",\"shape\":[");
  for (i = 0; i < item->dims; i++) {
    if (i > 0) cddp__text_puts(t, ",");
    cddp__text_u64(t, item->shape[i]);
  }
  cddp__text_puts(t, "],\"data_offsets\":[");
  cddp__text_u64(t, item->begin);
  cddp__text_puts(t, ",");
  cddp__text_u64(t, item->begin + item->bytes);
  cddp__text_puts(t, "]}");
}

/* Writes N and the JSON, so that the data is aligned to 8 bytes. pairs: key, value, ... */
static void cddp__st_write(cddp__text *t, const cddp__st_item *items, size_t count,
                           const char *const *pairs, size_t pair_count) {
  size_t i;
  cddp__text_put(t, "\0\0\0\0\0\0\0", 8);
  cddp__text_puts(t, "{\"__metadata__\":{");
  for (i = 0; i < pair_count; i += 2) {
    if (i > 0) cddp__text_puts(t, ",");
    cddp__text_pair(t, pairs[i], pairs[i + 1]);
  }
  cddp__text_puts(t, "}");
  for (i = 0; i < count; i++) cddp__text_item(t, &items[i]);
  cddp__text_puts(t, "}");
  while (t->n % 8 != 0) cddp__text_puts(t, " ");
  if (t->out != NULL) cddp__put64(t->out, t->n - 8);
}

static int cddp__st_item_order(const void *a, const void *b) {
  const cddp__st_item *x = (const cddp__st_item *)a, *y = (const cddp__st_item *)b;
  int c;
  if (x->type != y->type) return x->type < y->type ? -1 : 1;
  c = strcmp(x->prefix, y->prefix);
  return c != 0 ? c : strcmp(x->name, y->name);
}

/* Orders the tensors as the reference implementation does and gives each its place. */
static void cddp__st_place(cddp__st_item *items, size_t count) {
  uint64_t at = 0;
  size_t i;
  if (count > 1) qsort(items, count, sizeof *items, cddp__st_item_order);
  for (i = 0; i < count; i++) {
    items[i].begin = at;
    at += items[i].bytes;
  }
}
/* >>checkpoint ---------------------------------------------------------------------------------
   Saving and loading, for a group or for one process. Works as follows. Saving: all ranks compare
   what they pass; rank 0 writes, reading the other ranks' shards of the momentum where they lie;
   all wait for its result. It writes to PATH.tmp, locked, which takes PATH's name only when all of
   it is on the disk: whoever reads PATH sees the old file or the new one. Loading: rank 0 reads the
   header and broadcasts its text; every rank reads that for itself and finds what it wants in it,
   so that all come to the same conclusion; then rank 0 reads the tensors and broadcasts them. After
   each part the ranks tell each other how they fare, and all return the first failure.
   What lies on a device passes through a few MiB of the host's memory, piece by piece; its momentum
   in slices goes so from every rank to rank 0. */

/* --- files --- */

static cddp_result cddp__read_at(int fd, void *data, uint64_t size, uint64_t at) {
  unsigned char *p = (unsigned char *)data;
  while (size > 0) {
    ssize_t n = CDDP__PREAD(fd, p, (size_t)(size < 1u << 30 ? size : 1u << 30), (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return cddp__fail(CDDP_IO, "read: %s", strerror(errno));
    if (n == 0) return cddp__fail(CDDP_IO, "it has become shorter while it was read");
    p += n;
    size -= (uint64_t)n;
    at += (uint64_t)n;
  }
  return CDDP_OK;
}

static cddp_result cddp__write_at(int fd, const void *data, uint64_t size, uint64_t *at) {
  const unsigned char *p = (const unsigned char *)data;
  while (size > 0) {
    ssize_t n = CDDP__PWRITE(fd, p, (size_t)(size < 1u << 30 ? size : 1u << 30), (off_t)*at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      return cddp__fail(CDDP_IO, "write, after %" PRIu64 " bytes: %s", *at,
                        n == 0 ? "nothing was written" : strerror(errno));
    p += n;
    size -= (uint64_t)n;
    *at += (uint64_t)n;
  }
  return CDDP_OK;
}

static void cddp__st_close(cddp_safetensors *f) {
  if (f == NULL) return;
  cddp__close_fd(&f->fd);
  cddp__st_free(f);
}

static cddp_safetensors *cddp__st_new(const cddp_allocator *a) {
  cddp_safetensors *f = (cddp_safetensors *)cddp__calloc(a, 1, sizeof *f);
  if (f == NULL) return NULL;
  if (a != NULL) f->allocator = *a;
  f->fd = -1;
  return f;
}

static cddp_result cddp__st_text_room(cddp_safetensors *f, size_t size) {
  f->text = (char *)cddp__malloc(&f->allocator, size + 1);
  if (f->text == NULL) return CDDP_OUT_OF_MEMORY;
  f->text[size] = 0;
  f->text_size = size;
  return CDDP_OK;
}

/* Opens the file and reads its header, unparsed; *data_bytes follow it. */
static cddp_result cddp__st_open(cddp_safetensors *f, const char *path, uint64_t *data_bytes) {
  unsigned char first[8] = {0};
  struct stat st;
  size_t size = 0;
  cddp_result r = CDDP_OK;
  f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused, not waited for */
  if (f->fd < 0) return cddp__fail(CDDP_IO, "open: %s", strerror(errno));
  if (fstat(f->fd, &st) != 0) return cddp__fail(CDDP_IO, "fstat: %s", strerror(errno));
  if (!S_ISREG(st.st_mode)) return cddp__fail(CDDP_IO, "it is not a regular file");
  if (st.st_size >= 8) r = cddp__read_at(f->fd, first, 8, 0);
  if (r == CDDP_OK) r = cddp__st_header_size(first, (uint64_t)st.st_size, &size);
  if (r == CDDP_OK) r = cddp__st_text_room(f, size);
  if (r == CDDP_OK) r = cddp__read_at(f->fd, f->text, size, 8);
  f->data_begin = 8 + (uint64_t)size;
  *data_bytes = (uint64_t)st.st_size - 8 - size;
  return r;
}

/* Opens PATH.tmp for this process alone: locked, regular, empty. One that a killed process left is
   taken over. */
static cddp_result cddp__temporary(const char *path, int *fd) {
  struct stat mine, there;
  int tries;
  for (tries = 0; tries < 100; tries++) {
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (*fd < 0) return cddp__fail(CDDP_IO, "open %s: %s", path, strerror(errno));
    if (fstat(*fd, &mine) != 0 || !S_ISREG(mine.st_mode))
      return cddp__fail(CDDP_IO, "%s is not a regular file", path);
    if (flock(*fd, LOCK_EX | LOCK_NB) != 0)
      return errno == EWOULDBLOCK
                 ? cddp__fail(CDDP_IO, "somebody else is just writing %s", path)
                 : cddp__fail(CDDP_IO, "flock %s: %s", path, strerror(errno));
    if (lstat(path, &there) == 0 && there.st_dev == mine.st_dev && there.st_ino == mine.st_ino) {
      if (ftruncate(*fd, 0) == 0) return CDDP_OK;
      cddp__fail(CDDP_IO, "ftruncate %s: %s", path, strerror(errno));
      unlink(path);
      return CDDP_IO;
    }
    cddp__close_fd(fd); /* its owner has given it its final name meanwhile */
  }
  return cddp__fail(CDDP_IO, "%s is renamed by others again and again", path);
}

/* Makes a rename in path's directory last; path is written over. */
static cddp_result cddp__sync_directory(char *path) {
  char *slash = strrchr(path, '/'), *end = slash != NULL ? slash : path;
  cddp_result r = CDDP_OK;
  int fd;
  if (slash == path) end++;
  if (slash == NULL) *end++ = '.';
  *end = 0;
  fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
  if (fd < 0) return cddp__fail(CDDP_IO, "open %s, to sync it: %s", path, strerror(errno));
  if (fsync(fd) != 0 && errno != EINVAL) /* EINVAL: this file system has no such thing */
    r = cddp__fail(CDDP_IO, "fsync of %s: %s; the checkpoint is there, but may not outlast a crash",
                   path, strerror(errno));
  cddp__close_fd(&fd);
  return r;
}

/* --- agreement --- */

typedef struct cddp__report { /* passed between ranks as bytes */
  uint32_t result;
  uint32_t unused;
  uint64_t hash;
  uint64_t value[2];
  char text[CDDP__ERROR_MAX];
} cddp__report;

/* Collective: all ranks return the failure of the first one that has one. hash: of what must be
   alike. value: becomes rank 0's. */
static cddp_result cddp__st_settle(cddp_group *g, cddp_result mine, uint64_t hash,
                                   uint64_t value[2]) {
  cddp__report own, *all;
  cddp_result r;
  int p;
  if (g == NULL || g->size == 1) return mine;
  memset(&own, 0, sizeof own);
  own.result = (uint32_t)mine;
  own.hash = hash;
  if (mine != CDDP_OK) snprintf(own.text, sizeof own.text, "%s", cddp__error_text);
  if (value != NULL) memcpy(own.value, value, sizeof own.value);
  all = (cddp__report *)cddp__calloc(&g->host->allocator, (size_t)g->size, sizeof *all);
  if (all == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  r = cddp__run_simple(g, CDDP__KIND_ALL_GATHER, &own, all, sizeof own, CDDP_U8, -1);
  for (p = 0; r == CDDP_OK && p < g->size; p++) {
    if (all[p].result == CDDP_OK) continue;
    r = (cddp_result)all[p].result;
    if (p == g->rank) cddp__fail(r, "%s", own.text);
    else cddp__fail(r, "rank %d: %s", p, all[p].text);
  }
  for (p = 0; r == CDDP_OK && p < g->size; p++)
    if (all[p].hash != all[0].hash)
      r = cddp__fail(CDDP_MISMATCH,
                     "rank %d passed other parameters (names, counts, dtypes) or other options "
                     "than rank 0",
                     p);
  if (value != NULL) memcpy(value, all[0].value, sizeof all[0].value);
  cddp__free(&g->host->allocator, all);
  return r;
}

static uint64_t cddp__hash_params(uint64_t h, const cddp_param *params, int count) {
  int i;
  for (i = 0; i < count; i++) {
    uint64_t numbers[2];
    numbers[0] = params[i].count;
    numbers[1] = (uint64_t)params[i].dtype;
    h = cddp__hash64(h, numbers, sizeof numbers);
    h = cddp__hash64(h, params[i].name, strlen(params[i].name));
  }
  return h;
}

static uint64_t cddp__hash_checkpoint(const cddp_param *params, int count,
                                      const cddp_checkpoint_desc *d) {
  uint64_t h = (uint64_t)(d->sgd != NULL) | (uint64_t)(d->sampler != NULL) << 1 |
               (uint64_t)d->partial << 2;
  h = cddp__hash_params(h, params, count);
  if (d->sgd != NULL && d->sgd->rule.momentum != 0)
    h = cddp__hash_params(h + 1, d->sgd->params, d->sgd->count);
  return h;
}

/* --- arguments --- */

static cddp_result cddp__check_tensors(const char *what, const cddp_param *params, int count,
                                       bool data) {
  int i;
  if (count < 0 || (count > 0 && params == NULL))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%ss is NULL or their number %d negative", what,
                      count);
  for (i = 0; i < count; i++) {
    if (params[i].name == NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s %d has no name, by which a file knows it", what,
                        i);
    if (!cddp__dtype_ok(params[i].dtype))
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s \"%s\" has dtype %d, which is no cddp_dtype",
                        what, params[i].name, (int)params[i].dtype);
    if (params[i].count > SIZE_MAX / 64)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s \"%s\" has too many elements", what,
                        params[i].name);
    if (data && params[i].data == NULL && params[i].count > 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s \"%s\" has data NULL", what, params[i].name);
  }
  return CDDP_OK;
}

static cddp_result cddp__check_shapes(const cddp_param *params, int count,
                                      const cddp_shape *shapes) {
  uint64_t elements, bytes;
  int i;
  for (i = 0; shapes != NULL && i < count; i++) {
    const cddp_shape *s = &shapes[i];
    if (s->dims == 0) continue;
    if (s->dims < 0 || s->dims > 8)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "shape %d has %d dimensions; 8 are possible", i,
                        s->dims);
    if (!cddp__st_size(s->size, s->dims, 64, &elements, &bytes) || elements != params[i].count)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "the shape of parameter \"%s\" does not come to its count, %zu",
                        params[i].name, params[i].count);
  }
  return CDDP_OK;
}

/* Whether anything that is to be saved or loaded may lie on a device. */
static bool cddp__any_on_device(const cddp_group *g, const cddp_param *params, int count,
                                const cddp_checkpoint_desc *d) {
  int i;
  if (g != NULL && g->backend != NULL) return true;
  if (d->sgd != NULL && d->sgd->backend != NULL) return true;
  for (i = 0; i < count; i++)
    if (params[i].count > 0 && cddp__on_device(params[i].data)) return true;
  return false;
}

static cddp_result cddp__check_checkpoint(const cddp_group *g, const char *path,
                                          const cddp_param *params, int count,
                                          const cddp_checkpoint_desc *d) {
  const cddp__shard *shard = d->sgd != NULL ? (const cddp__shard *)d->sgd->shard : NULL;
  cddp_result r;
  int i;
  if (path == NULL || path[0] == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the path is NULL or empty");
  if ((r = cddp__check_tensors("parameter", params, count, true)) != CDDP_OK) return r;
  if (g != NULL && g->size > 1 && g->backend == NULL && cddp__any_on_device(g, params, count, d))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "parameters lie on a GPU, but the group has device \"cpu\"; pass one with "
                      "device \"cuda\", or NULL");
  if ((r = cddp__check_shapes(params, count, d->shapes)) != CDDP_OK) return r;
  if (d->sgd != NULL)
    r = cddp__check_tensors("parameter of the SGD", d->sgd->params, d->sgd->count, false);
  if (r != CDDP_OK) return r;
  if (shard != NULL && shard->ddp->group != g && shard->ddp->group->size > 1)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "the momentum lies in pieces on the ranks of the cddp_ddp's group; pass that "
                      "group, on all of its ranks");
  if (d->metadata_count < 0 || (d->metadata_count > 0 && d->metadata == NULL))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "metadata is NULL or metadata_count negative");
  for (i = 0; i < d->metadata_count; i++)
    if (d->metadata[i].key == NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "metadata %d has no key", i);
  return CDDP_OK;
}

/* --- saving --- */

enum { CDDP__SAMPLER_EPOCH, CDDP__SAMPLER_SAMPLES, CDDP__SAMPLER_SIZE, CDDP__SAMPLER_SEED,
       CDDP__SAMPLER_SHUFFLE, CDDP__SAMPLER_VALUES };
static const char *const cddp__sampler_keys[] = {
    "cddp.sampler.epoch", "cddp.sampler.samples", "cddp.sampler.dataset_size",
    "cddp.sampler.seed", "cddp.sampler.shuffle"};

typedef struct cddp__saving {
  cddp_group *g; /* NULL: none */
  const cddp_allocator *allocator;
  const cddp_param *params;
  int count;
  const cddp_checkpoint_desc *desc;
  cddp__st_item *items;
  size_t item_count;
  const char **pairs; /* key, value, ... */
  size_t pair_count;
  char numbers[CDDP__SAMPLER_VALUES][24];
  double lr;
  cddp__text header;
  char *ferry;     /* [CDDP__FERRY] for what lies on a device; NULL: not needed yet */
  char *temporary; /* the file's name until it is whole */
  int fd;          /* -1: it is not open */
} cddp__saving;

static bool cddp__has_momentum(const cddp_sgd *s, int i) {
  return s->rule.momentum != 0 && s->started[i] && s->params[i].count > 0 &&
         (s->momentum[i] != NULL || s->shard != NULL);
}

static cddp__st_item *cddp__save_item(cddp__saving *s, const char *prefix, const cddp_param *p,
                                      const cddp_shape *shape, const void *data) {
  cddp__st_item *item = &s->items[s->item_count++];
  int i;
  item->prefix = prefix;
  item->name = p->name;
  for (i = 0; cddp__st_types[i].dtype != (int)p->dtype; i++) {}
  item->type = &cddp__st_types[i];
  item->bytes = (uint64_t)p->count * cddp__dtype_size(p->dtype);
  item->data = data;
  item->dims = shape != NULL && shape->dims > 0 ? shape->dims : 1;
  if (shape != NULL && shape->dims > 0)
    memcpy(item->shape, shape->size, sizeof item->shape);
  else
    item->shape[0] = p->count;
  return item;
}

static cddp_result cddp__save_items(cddp__saving *s) {
  const cddp_sgd *sgd = s->desc->sgd;
  const cddp_shape *shapes = s->desc->shapes;
  size_t n = (size_t)s->count + (sgd != NULL ? (size_t)sgd->count + 1 : 0);
  cddp_param lr;
  int i;
  s->items = (cddp__st_item *)cddp__calloc(s->allocator, n, sizeof *s->items);
  if (s->items == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < s->count; i++)
    cddp__save_item(s, "", &s->params[i], shapes != NULL ? &shapes[i] : NULL, s->params[i].data);
  if (sgd == NULL) return CDDP_OK;
  if (sgd->params != s->params || sgd->count > s->count) shapes = NULL;
  for (i = 0; i < sgd->count; i++)
    if (cddp__has_momentum(sgd, i))
      cddp__save_item(s, CDDP__MOMENTUM_PREFIX, &sgd->params[i], shapes != NULL ? &shapes[i] : NULL,
                      sgd->momentum[i])->param = i;
  memset(&lr, 0, sizeof lr);
  lr.name = CDDP__LR_NAME;
  lr.count = 1;
  lr.dtype = CDDP_F64;
  s->lr = sgd->desc.lr;
  cddp__save_item(s, "", &lr, NULL, &s->lr)->dims = 0;
  return CDDP_OK;
}

/* Samples of the epoch that all ranks together have taken. */
static uint64_t cddp__sampler_samples(const cddp_sampler *s) {
  size_t taken = s->start + s->position * (size_t)s->desc.world_size;
  return cddp__min(taken, s->desc.dataset_size);
}

static void cddp__sampler_values(const cddp_sampler *s, uint64_t v[CDDP__SAMPLER_VALUES]) {
  v[CDDP__SAMPLER_EPOCH] = s->epoch;
  v[CDDP__SAMPLER_SAMPLES] = cddp__sampler_samples(s);
  v[CDDP__SAMPLER_SIZE] = s->desc.dataset_size;
  v[CDDP__SAMPLER_SEED] = s->desc.seed;
  v[CDDP__SAMPLER_SHUFFLE] = s->desc.shuffle;
}

static void cddp__save_pair(cddp__saving *s, const char *key, const char *value) {
  s->pairs[s->pair_count++] = key;
  s->pairs[s->pair_count++] = value;
}

static cddp_result cddp__save_metadata(cddp__saving *s) {
  const cddp_checkpoint_desc *d = s->desc;
  size_t n = (size_t)d->metadata_count + CDDP__SAMPLER_VALUES + 1;
  uint64_t v[CDDP__SAMPLER_VALUES];
  bool format = false;
  int i;
  s->pairs = (const char **)cddp__calloc(s->allocator, 2 * n, sizeof *s->pairs);
  if (s->pairs == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < d->metadata_count; i++) {
    const char *key = d->metadata[i].key;
    if (strncmp(key, "cddp.", 5) == 0 || d->metadata[i].value == NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "metadata \"%s\" has no value, or begins with cddp., which is reserved",
                        key);
    if (strcmp(key, "format") == 0) format = true;
  }
  if (!format) cddp__save_pair(s, "format", "pt"); /* some of PyTorch's loaders insist on it */
  if (d->sampler != NULL) cddp__sampler_values(d->sampler, v);
  for (i = 0; d->sampler != NULL && i < CDDP__SAMPLER_VALUES; i++) {
    snprintf(s->numbers[i], sizeof s->numbers[i], "%" PRIu64, v[i]);
    cddp__save_pair(s, cddp__sampler_keys[i], s->numbers[i]);
  }
  for (i = 0; i < d->metadata_count; i++)
    cddp__save_pair(s, d->metadata[i].key, d->metadata[i].value);
  return CDDP_OK;
}

/* A header that we would not read must not be written: duplicate names, wrong UTF-8. */
static cddp_result cddp__save_verify(const cddp__saving *s, uint64_t data_bytes) {
  cddp_safetensors *f = cddp__st_new(s->allocator);
  cddp_result r;
  if (f == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__st_text_room(f, s->header.n - 8);
  if (r == CDDP_OK) {
    memcpy(f->text, s->header.out + 8, s->header.n - 8);
    if (f->text_size > CDDP__HEADER_MAX)
      r = cddp__fail(CDDP_INVALID_ARGUMENT,
                     "names and metadata make a header of %zu bytes; %u are allowed", f->text_size,
                     CDDP__HEADER_MAX);
    else r = cddp__st_parse(f, data_bytes);
  }
  cddp__st_close(f);
  if (r == CDDP_IO) r = cddp__fail_in(CDDP_INVALID_ARGUMENT, "what was passed makes no file: ");
  return r;
}

static cddp_result cddp__save_header(cddp__saving *s) {
  const cddp__st_item *last;
  cddp_result r;
  if ((r = cddp__save_items(s)) != CDDP_OK || (r = cddp__save_metadata(s)) != CDDP_OK) return r;
  cddp__st_place(s->items, s->item_count);
  cddp__st_write(&s->header, s->items, s->item_count, s->pairs, s->pair_count);
  s->header.out = (char *)cddp__malloc(s->allocator, s->header.n);
  if (s->header.out == NULL) return CDDP_OUT_OF_MEMORY;
  s->header.n = 0;
  cddp__st_write(&s->header, s->items, s->item_count, s->pairs, s->pair_count);
  last = s->item_count > 0 ? &s->items[s->item_count - 1] : NULL;
  return cddp__save_verify(s, last != NULL ? last->begin + last->bytes : 0);
}

/* Momentum in pieces: slice by slice from the ranks' shards, in shared memory. */
static cddp_result cddp__write_shards(const cddp__saving *s, int fd, int param, uint64_t *at) {
  const cddp__shard *h = (const cddp__shard *)s->desc->sgd->shard;
  cddp_ddp *d = h->ddp;
  int p, dtype = (int)d->params[param].dtype;
  size_t begin, end;
  cddp_result r = CDDP_OK;
  for (p = 0; r == CDDP_OK && p < d->group->locals; p++)
    if (cddp__tensor_slice(d, param, p, &begin, &end))
      r = cddp__write_at(fd, h->all[p] + cddp__shard_offset(d, dtype, p, begin), end - begin, at);
  return r;
}

static cddp_result cddp__write_device(cddp__saving *s, const void *data, uint64_t size,
                                      uint64_t *at) {
  cddp_result r = CDDP_OK;
  uint64_t done;
  size_t n;
  if (s->ferry == NULL) s->ferry = (char *)cddp__malloc(s->allocator, CDDP__FERRY);
  if (s->ferry == NULL) return CDDP_OUT_OF_MEMORY;
  for (done = 0; r == CDDP_OK && done < size; done += n) {
    n = cddp__min((size_t)(size - done), CDDP__FERRY);
    r = cddp__transfer(s->g, s->ferry, (const char *)data + done, n);
    if (r == CDDP_OK) r = cddp__write_at(s->fd, s->ferry, n, at);
  }
  return r;
}

/* Momentum in slices on devices: all ranks hand it to rank 0 later. */
static bool cddp__collects(const cddp_checkpoint_desc *d) {
  return d->sgd != NULL && d->sgd->backend != NULL && d->sgd->shard != NULL;
}

/* For collect: a part of one parameter's momentum. */
static cddp_result cddp__write_part(void *context, int param, size_t offset, const void *bytes,
                                    size_t n) {
  const cddp__saving *s = (const cddp__saving *)context;
  uint64_t at;
  size_t i;
  for (i = 0; i < s->item_count; i++) {
    const cddp__st_item *item = &s->items[i];
    if (item->param != param || item->prefix[0] == 0) continue;
    at = (uint64_t)s->header.n + item->begin + offset;
    return cddp__write_at(s->fd, bytes, n, &at);
  }
  return CDDP_OK;
}

static cddp_result cddp__write_file(cddp__saving *s) {
  uint64_t at = 0;
  size_t i;
  cddp_result r = cddp__write_at(s->fd, s->header.out, s->header.n, &at);
  for (i = 0; r == CDDP_OK && i < s->item_count; i++) {
    const cddp__st_item *item = &s->items[i];
    CDDP__POINT("save");
    if (item->data == NULL && item->bytes > 0) {
      if (cddp__collects(s->desc)) at += item->bytes;
      else r = cddp__write_shards(s, s->fd, item->param, &at);
    } else if (cddp__on_device(item->data)) {
      r = cddp__write_device(s, item->data, item->bytes, &at);
    } else {
      r = cddp__write_at(s->fd, item->data, item->bytes, &at);
    }
  }
  return r;
}

/* Rank 0's part: the file, but for what other ranks have to bring. */
static cddp_result cddp__write_begin(cddp__saving *s, const char *path) {
  size_t n = strlen(path) + 5;
  cddp_result r;
  s->temporary = (char *)cddp__malloc(s->allocator, n);
  if (s->temporary == NULL) return CDDP_OUT_OF_MEMORY;
  snprintf(s->temporary, n, "%s.tmp", path);
  r = cddp__temporary(s->temporary, &s->fd);
  if (r != CDDP_OK) cddp__close_fd(&s->fd); /* it is somebody else's */
  return r == CDDP_OK ? cddp__write_file(s) : r;
}

/* Gives it its name, or takes it away. */
static cddp_result cddp__write_end(cddp__saving *s, const char *path, cddp_result r) {
  bool ours = s->fd >= 0;
  if (r == CDDP_OK && fsync(s->fd) != 0) r = cddp__fail(CDDP_IO, "fsync: %s", strerror(errno));
  if (r == CDDP_OK && rename(s->temporary, path) != 0)
    r = cddp__fail(CDDP_IO, "rename of %s: %s", s->temporary, strerror(errno));
  if (r != CDDP_OK && ours) unlink(s->temporary);
  cddp__close_fd(&s->fd); /* after that: the lock ends here */
  if (r == CDDP_OK) r = cddp__sync_directory(s->temporary);
  cddp__free(s->allocator, s->temporary);
  return r;
}

/* Collective. r: of the arguments' check here. */
static cddp_result cddp__save(cddp_group *g, const char *path, const cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc, cddp_result r) {
  cddp__saving s;
  uint64_t hash = r == CDDP_OK ? cddp__hash_checkpoint(params, count, desc) : 0;
  bool inside = g != NULL && g->size > 1, first = g == NULL || g->rank == 0;
  memset(&s, 0, sizeof s);
  s.g = g;
  s.allocator = g != NULL ? &g->host->allocator : NULL;
  s.params = params;
  s.count = count;
  s.desc = desc;
  s.fd = -1;
  if (r == CDDP_OK && cddp__any_on_device(g, params, count, desc)) r = cddp__settle_device(g);
  if (r == CDDP_OK && first) r = cddp__save_header(&s);
  r = cddp__st_settle(g, r, hash, NULL);
  if (r == CDDP_OK) {
    if (first && inside) r = cddp__enter(g); /* reads its peers' memory */
    if (first && r == CDDP_OK) r = cddp__write_begin(&s, path);
    if (first && inside) cddp__exit(g, CDDP_OK);
    if (cddp__collects(desc) && (r = cddp__st_settle(g, r, 0, NULL)) == CDDP_OK)
      r = desc->sgd->backend->collect(desc->sgd, cddp__write_part, &s);
    if (first) r = cddp__write_end(&s, path, r);
    r = cddp__st_settle(g, r, 0, NULL);
  }
  cddp__free(s.allocator, s.ferry);
  cddp__free(s.allocator, s.items);
  cddp__free(s.allocator, s.pairs);
  cddp__free(s.allocator, s.header.out);
  return r;
}

/* --- loading --- */

/* A tensor of the file that somebody wants. */
typedef struct cddp__st_copy {
  const cddp__st_tensor *from;
  void *to;
  cddp_dtype dtype; /* of `to` */
  bool device;      /* where that lies */
} cddp__st_copy;

typedef struct cddp__loading {
  cddp_group *g;
  const cddp_allocator *allocator;
  const cddp_param *params;
  int count;
  const cddp_checkpoint_desc *desc;
  cddp_safetensors *file; /* rank 0's has the descriptor */
  cddp__st_copy *copies;
  size_t copy_count;
  void **momentum; /* [sgd->count] memory for what is in the file */
  bool *found;     /* [sgd->count] what is */
  void *flat;      /* the memory, if it is a device's */
  char *ferry;     /* [2 * CDDP__FERRY] for what goes to a device; NULL: not needed yet */
  bool *taken;     /* [file->count] somebody wants it */
  bool has_sampler;
  uint64_t sampler[CDDP__SAMPLER_VALUES];
  bool has_lr;
  double lr;
} cddp__loading;

/* Notes that the tensor is to be copied to `to`, if it suits p. */
static cddp_result cddp__want(cddp__loading *l, const cddp__st_tensor *t, const cddp_param *p,
                              void *to) {
  const cddp_tensor_info *info = &t->info;
  bool converts = info->dtype >= 0 && cddp__dtype_trains((cddp_dtype)info->dtype) &&
                  cddp__dtype_trains(p->dtype);
  cddp__st_copy *c = &l->copies[l->copy_count++];
  char space[CDDP__SHOWN];
  if (info->count != p->count)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "\"%s\" has %" PRIu64 " elements in the file, the parameter has %zu",
                      cddp__show_name(info->name, space), info->count, p->count);
  if (info->dtype != (int)p->dtype && !converts)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "\"%s\" is %s in the file, the parameter is %s",
                      cddp__show_name(info->name, space), info->type, cddp__dtype_names[p->dtype]);
  c->from = t;
  c->to = to;
  c->dtype = p->dtype;
  c->device = cddp__on_device(to);
  l->taken[t - l->file->tensors] = true;
  return CDDP_OK;
}

static cddp_result cddp__lacks(const char *what, const char *name) {
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "the file has no %s \"%s\"; set partial to leave such things as they are", what,
                    name);
}

static cddp_result cddp__match_params(cddp__loading *l) {
  const cddp_shape *s = l->desc->shapes;
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < l->count; i++) {
    const cddp_param *p = &l->params[i];
    const cddp__st_tensor *t = cddp__st_find(l->file, "", p->name);
    if (t == NULL && !l->desc->partial) return cddp__lacks("tensor", p->name);
    if (t == NULL) continue;
    r = cddp__want(l, t, p, p->data);
    if (r == CDDP_OK && s != NULL && s[i].dims > 0 &&
        (s[i].dims != t->info.dims ||
         memcmp(s[i].size, t->info.shape, (size_t)s[i].dims * sizeof *s[i].size) != 0))
      r = cddp__fail(CDDP_INVALID_ARGUMENT, "\"%s\" has another shape in the file", p->name);
  }
  return r;
}

static cddp_result cddp__match_sgd(cddp__loading *l) {
  cddp_sgd *sgd = l->desc->sgd;
  const cddp__st_tensor *t = cddp__st_find(l->file, "", CDDP__LR_NAME);
  cddp_result r;
  cddp_param lr;
  int i;
  memset(&lr, 0, sizeof lr);
  lr.count = 1;
  lr.dtype = CDDP_F64;
  if (t == NULL) return l->desc->partial ? CDDP_OK : cddp__lacks("tensor", CDDP__LR_NAME);
  r = cddp__want(l, t, &lr, &l->lr);
  l->has_lr = true;
  if (r != CDDP_OK || sgd->rule.momentum == 0) return r;
  l->momentum = (void **)cddp__calloc(l->allocator, (size_t)sgd->count, sizeof *l->momentum);
  l->found = (bool *)cddp__calloc(l->allocator, (size_t)sgd->count, sizeof *l->found);
  if (l->momentum == NULL || l->found == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; r == CDDP_OK && i < sgd->count; i++) {
    const cddp_param *p = &sgd->params[i];
    t = cddp__st_find(l->file, CDDP__MOMENTUM_PREFIX, p->name);
    if (t == NULL || p->count == 0) continue; /* no step has touched it */
    if (sgd->backend == NULL)
      l->momentum[i] = cddp__calloc(&sgd->allocator, p->count, cddp__dtype_size(p->dtype));
    else if (l->flat == NULL)
      r = sgd->backend->room(sgd, &l->flat, l->momentum);
    if (r == CDDP_OK && l->momentum[i] == NULL) r = CDDP_OUT_OF_MEMORY;
    if (r == CDDP_OK) r = cddp__want(l, t, p, l->momentum[i]);
    l->found[i] = true;
  }
  return r;
}

static cddp_result cddp__match_sampler(cddp__loading *l) {
  const cddp_sampler_desc *d = &l->desc->sampler->desc;
  uint64_t *v = l->sampler;
  int i;
  for (i = 0; i < CDDP__SAMPLER_VALUES; i++) {
    const char *key = cddp__sampler_keys[i], *text = cddp__st_value(l->file, key);
    char *end = NULL;
    if (text == NULL) return l->desc->partial ? CDDP_OK : cddp__lacks("metadata", key);
    errno = 0;
    v[i] = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != 0 || errno != 0)
      return cddp__fail(CDDP_IO, "its metadata \"%s\" is not a number", key);
  }
  if (v[CDDP__SAMPLER_SAMPLES] > 0 &&
      (v[CDDP__SAMPLER_SIZE] != d->dataset_size || v[CDDP__SAMPLER_SEED] != d->seed ||
       v[CDDP__SAMPLER_SHUFFLE] != (uint64_t)d->shuffle))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "it was saved in the middle of an epoch over %" PRIu64
                      " samples, seed %" PRIu64
                      ", %sshuffled; the sampler has %zu, seed %" PRIu64 ", %sshuffled",
                      v[CDDP__SAMPLER_SIZE], v[CDDP__SAMPLER_SEED],
                      v[CDDP__SAMPLER_SHUFFLE] != 0 ? "" : "not ", d->dataset_size, d->seed,
                      d->shuffle ? "" : "not ");
  l->has_sampler = true;
  return CDDP_OK;
}

static cddp_result cddp__match_metadata(const cddp__loading *l) {
  const cddp_checkpoint_desc *d = l->desc;
  size_t needed = 0;
  int i;
  for (i = 0; i < d->metadata_count; i++) {
    const char *value = cddp__st_value(l->file, d->metadata[i].key);
    if (value != NULL) needed += strlen(value) + 1;
  }
  if (needed > 0 && (d->text == NULL || d->text_size < needed))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "text has %zu bytes; the metadata's values need %zu",
                      d->text != NULL ? d->text_size : 0, needed);
  return CDDP_OK;
}

/* Nothing may be left over, but for what an SGD would want. */
static cddp_result cddp__match_rest(const cddp__loading *l) {
  char space[CDDP__SHOWN];
  size_t i;
  for (i = 0; !l->desc->partial && i < l->file->count; i++) {
    const char *name = l->file->tensors[i].info.name;
    if (!l->taken[i] && strncmp(name, "optimizer.", 10) != 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "the file has a tensor \"%s\", which is not among the parameters; set "
                        "partial to leave it",
                        cddp__show_name(name, space));
  }
  return CDDP_OK;
}

/* Finds everything that is wanted in the file; changes nothing outside l. */
static cddp_result cddp__match(cddp__loading *l) {
  const cddp_sgd *sgd = l->desc->sgd;
  size_t n = (size_t)l->count + (sgd != NULL ? (size_t)sgd->count + 1 : 0);
  cddp_result r = CDDP_OK;
  l->copies = (cddp__st_copy *)cddp__calloc(l->allocator, n, sizeof *l->copies);
  l->taken = (bool *)cddp__calloc(l->allocator, l->file->count, sizeof *l->taken);
  if (l->copies == NULL || l->taken == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__match_params(l);
  if (r == CDDP_OK && sgd != NULL) r = cddp__match_sgd(l);
  if (r == CDDP_OK && l->desc->sampler != NULL) r = cddp__match_sampler(l);
  if (r == CDDP_OK) r = cddp__match_metadata(l);
  return r == CDDP_OK ? cddp__match_rest(l) : r;
}

/* Reads n elements at `at` of the file, converted on the way. */
static cddp_result cddp__read_converted(int fd, const cddp__st_copy *c, uint64_t at) {
  double block[2048];
  cddp_dtype from = (cddp_dtype)c->from->info.dtype;
  size_t size = cddp__dtype_size(from), count = (size_t)c->from->info.count, done, n;
  cddp_result r = CDDP_OK;
  for (done = 0; r == CDDP_OK && done < count; done += n) {
    n = cddp__min(count - done, sizeof block / size);
    r = cddp__read_at(fd, block, n * size, at + done * size);
    if (r == CDDP_OK)
      cddp__convert((char *)c->to + done * cddp__dtype_size(c->dtype), c->dtype, block, from, n);
  }
  return r;
}

/* The same into device memory, a few MiB at a time, converted or not. */
static cddp_result cddp__read_device(cddp__loading *l, const cddp__st_copy *c, uint64_t at) {
  cddp_dtype from = (cddp_dtype)c->from->info.dtype;
  size_t size = cddp__dtype_size(from), to_size = cddp__dtype_size(c->dtype), done, n;
  size_t count = (size_t)c->from->info.count, most = CDDP__FERRY / cddp__max(size, to_size);
  cddp_result r = CDDP_OK;
  if (l->ferry == NULL) l->ferry = (char *)cddp__malloc(l->allocator, 2 * CDDP__FERRY);
  if (l->ferry == NULL) return CDDP_OUT_OF_MEMORY;
  for (done = 0; r == CDDP_OK && done < count; done += n) {
    char *bytes = l->ferry;
    n = cddp__min(count - done, most);
    r = cddp__read_at(l->file->fd, bytes, n * size, at + done * size);
    if (r == CDDP_OK && from != c->dtype)
      cddp__convert(bytes = l->ferry + CDDP__FERRY, c->dtype, l->ferry, from, n);
    if (r == CDDP_OK)
      r = cddp__transfer(l->g, (char *)c->to + done * to_size, bytes, n * to_size);
  }
  return r;
}

static cddp_result cddp__read_tensors(cddp__loading *l) {
  cddp_result r = CDDP_OK;
  size_t i;
  for (i = 0; r == CDDP_OK && i < l->copy_count; i++) {
    const cddp__st_copy *c = &l->copies[i];
    uint64_t at = l->file->data_begin + c->from->info.begin;
    if (c->device)
      r = cddp__read_device(l, c, at);
    else
      r = c->from->info.dtype == (int)c->dtype
              ? cddp__read_at(l->file->fd, c->to, c->from->info.bytes, at)
              : cddp__read_converted(l->file->fd, c, at);
  }
  if (r == CDDP_OK && l->has_lr && !(l->lr >= 0))
    r = cddp__fail(CDDP_IO, "its learning rate is %g", l->lr);
  return r;
}

/* The part without which nothing is known: the header, alike on all ranks. */
static cddp_result cddp__load_header(cddp__loading *l, const char *path, uint64_t hash,
                                     cddp_result r) {
  uint64_t value[2] = {0, 0}; /* bytes of the header and of the data */
  bool first = l->g == NULL || l->g->rank == 0;
  if (r == CDDP_OK && (l->file = cddp__st_new(l->allocator)) == NULL) r = CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK && first) r = cddp__st_open(l->file, path, &value[1]);
  if (r == CDDP_OK && first) value[0] = l->file->text_size;
  if ((r = cddp__st_settle(l->g, r, hash, value)) != CDDP_OK) return r;
  if (!first) r = cddp__st_text_room(l->file, (size_t)value[0]);
  if ((r = cddp__st_settle(l->g, r, 0, NULL)) != CDDP_OK) return r;
  if (l->g != NULL)
    r = cddp__run_simple(l->g, CDDP__KIND_BROADCAST, l->file->text, l->file->text,
                         (size_t)value[0], CDDP_U8, 0);
  if (r != CDDP_OK) return r;
  r = cddp__st_parse(l->file, value[1]);
  if (r == CDDP_OK) r = cddp__match(l);
  return cddp__st_settle(l->g, r, 0, NULL);
}

/* Puts what was loaded in its place; cannot fail. */
static void cddp__load_commit(cddp__loading *l) {
  const cddp_checkpoint_desc *d = l->desc;
  cddp_sgd *sgd = d->sgd;
  char *text = d->text;
  int i;
  if (l->momentum != NULL && sgd->shard != NULL) sgd->drop(sgd); /* made anew by the next step */
  if (l->momentum != NULL && sgd->backend != NULL) {
    sgd->backend->leave(sgd);
    sgd->flat = l->flat;
    l->flat = NULL;
  }
  for (i = 0; l->momentum != NULL && i < sgd->count; i++) {
    cddp__free(&sgd->allocator, sgd->momentum[i]);
    sgd->momentum[i] = l->momentum[i];
    sgd->started[i] = l->found[i];
    l->momentum[i] = NULL;
  }
  if (l->has_lr) {
    sgd->desc.lr = l->lr;
    cddp__sgd_rule_init(&sgd->rule, &sgd->desc);
  }
  if (l->has_sampler)
    cddp__sampler_resume(d->sampler, l->sampler[CDDP__SAMPLER_EPOCH],
                         l->sampler[CDDP__SAMPLER_SAMPLES]);
  for (i = 0; i < d->metadata_count; i++) {
    const char *value = cddp__st_value(l->file, d->metadata[i].key);
    d->metadata[i].value = value != NULL ? text : NULL;
    if (value == NULL) continue;
    memcpy(text, value, strlen(value) + 1);
    text += strlen(value) + 1;
  }
}

static cddp_result cddp__load_tensors(cddp__loading *l) {
  cddp_result r = CDDP_OK;
  size_t i;
  if (l->g == NULL || l->g->rank == 0) r = cddp__read_tensors(l);
  r = cddp__st_settle(l->g, r, 0, NULL);
  for (i = 0; r == CDDP_OK && l->g != NULL && i < l->copy_count; i++) {
    const cddp__st_copy *c = &l->copies[i];
    r = cddp__broadcast_anywhere(l->g, c->to, (size_t)c->from->info.count, c->dtype);
  }
  if (r == CDDP_OK && cddp__any_on_device(l->g, l->params, l->count, l->desc))
    r = cddp__settle_device(l->g); /* cudaMemcpy may return before the bytes are there */
  return r;
}

/* Collective. r: of the arguments' check here. */
static cddp_result cddp__load(cddp_group *g, const char *path, const cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc, cddp_result r) {
  cddp__loading l;
  uint64_t hash = r == CDDP_OK ? cddp__hash_checkpoint(params, count, desc) : 0;
  int i;
  memset(&l, 0, sizeof l);
  l.g = g;
  l.allocator = g != NULL ? &g->host->allocator : NULL;
  l.params = params;
  l.count = count;
  l.desc = desc;
  if (r == CDDP_OK && cddp__any_on_device(g, params, count, desc)) r = cddp__settle_device(g);
  if (r == CDDP_OK && desc->sgd != NULL) r = cddp__check_graphs(desc->sgd);
  r = cddp__load_header(&l, path, hash, r);
  if (r == CDDP_OK) r = cddp__load_tensors(&l);
  if (r == CDDP_OK) cddp__load_commit(&l);
  for (i = 0; l.momentum != NULL && i < desc->sgd->count && desc->sgd->backend == NULL; i++)
    cddp__free(&desc->sgd->allocator, l.momentum[i]);
  if (l.flat != NULL) desc->sgd->backend->free_room(l.flat);
  cddp__free(l.allocator, l.momentum);
  cddp__free(l.allocator, l.found);
  cddp__free(l.allocator, l.ferry);
  cddp__free(l.allocator, l.copies);
  cddp__free(l.allocator, l.taken);
  cddp__st_close(l.file);
  return r;
}

/* >>spawn --------------------------------------------------------------------------------------
   Ranks as processes: fork, watch, end the rest when one fails. Ranks as threads. */

#define CDDP__NOTICE_S 1.0 /* after a failure, for the others to notice it and say so themselves   \
                            */
#define CDDP__GRACE_S 5.0  /* between SIGTERM and SIGKILL */

static void cddp__setenv_int(const char *name, int value) {
  char text[16];
  snprintf(text, sizeof text, "%d", value);
  setenv(name, text, 1);
}

/* What RANK and the others are for child i of a launch; for cddp_spawn first is 0, world the count
   of children. */
typedef struct cddp__ranks {
  int first, world, count; /* rank of child 0, all ranks, children here */
  const char *master;      /* MASTER_ADDR */
  int port;                /* MASTER_PORT */
  int listen_fd;           /* of rank 0 for its store; -1: none is passed on */
} cddp__ranks;

/* Puts rank i's variables into the environment of the child that calls it. */
static void cddp__child_environment(const cddp__ranks *k, int i) {
  cddp__setenv_int("RANK", k->first + i);
  cddp__setenv_int("WORLD_SIZE", k->world);
  cddp__setenv_int("LOCAL_RANK", i);
  cddp__setenv_int("LOCAL_WORLD_SIZE", k->count);
  setenv("MASTER_ADDR", k->master, 1);
  cddp__setenv_int("MASTER_PORT", k->port);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  unsetenv("CDDP_LISTEN_FD");
  if (k->listen_fd >= 0 && k->first + i == 0) cddp__setenv_int("CDDP_LISTEN_FD", k->listen_fd);
}

static void cddp__die_with(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1); /* it died before the line above */
}

typedef struct cddp__spawn_job {
  int (*fn)(int, void *);
  void *arg;
  cddp__ranks ranks;
  pid_t parent;
} cddp__spawn_job;

/* The life of a child of cddp_spawn: never returns. */
static void cddp__child(void *context, int rank) {
  cddp__spawn_job *job = (cddp__spawn_job *)context;
  int code;
  cddp__die_with(job->parent);
  cddp__child_environment(&job->ranks, rank);
  if (rank != 0) close(job->ranks.listen_fd);
  cddp__error_text[0] = 0;
  code = job->fn(rank, job->arg);
  fflush(NULL);
  _exit(code >= 0 && code <= 255 ? code : 255);
}

typedef struct cddp__children {
  pid_t *pids; /* 0: reaped */
  int n, alive;
  int first_rank;     /* of child 0 */
  bool blind;         /* no pidfds on this system: look every 10 ms */
  bool groups;        /* each child leads a process group, which ends with it */
  struct pollfd *fds; /* pidfds of all, -1 when reaped; then extra others, which tend looks after */
  int extra;
  void (*tend)(void *context); /* called before each poll; NULL: nobody */
  void *context;               /* for tend */
  cddp_result first;           /* the first failure, */
  char text[CDDP__ERROR_MAX];  /* in words, */
  int failed, status;          /* whose it was (child; -1: no child's) and its wait status */
  pid_t failed_pid;
  int next_signal; /* that the others get at deadline; 0: nothing has failed yet */
  double deadline;
} cddp__children;

static bool cddp__children_create(cddp__children *c, int n, int extra) {
  int i;
  memset(c, 0, sizeof *c);
  c->n = n;
  c->extra = extra;
  c->failed = -1;
  c->pids = (pid_t *)calloc((size_t)n, sizeof *c->pids);
  c->fds = (struct pollfd *)calloc((size_t)(n + extra), sizeof *c->fds);
  for (i = 0; c->fds != NULL && i < n + extra; i++) c->fds[i].fd = -1;
  return c->pids != NULL && c->fds != NULL;
}

static void cddp__children_free(cddp__children *c) {
  free(c->pids);
  free(c->fds);
}

static void cddp__signal_children(cddp__children *c, int signal_number) {
  int i;
  for (i = 0; i < c->n; i++)
    if (c->pids[i] > 0) kill(c->groups ? -c->pids[i] : c->pids[i], signal_number);
}

/* Says how a rank ended; CDDP_OK for a clean end. */
static cddp_result cddp__judge_child(int rank, pid_t pid, int status) {
  char how[96];
  if (status == 0) return CDDP_OK;
  cddp__describe_status(status, how, sizeof how);
  return cddp__fail(CDDP_PEER_LOST, "rank %d (pid %d) %s", rank, (int)pid, how);
}

/* Something failed that is not a child's end: the others are to end too, after seconds. */
static void cddp__children_fail(cddp__children *c, cddp_result r, int signal_number,
                                double seconds) {
  if (c->first != CDDP_OK) return;
  c->first = r;
  snprintf(c->text, sizeof c->text, "%s", cddp__error_text);
  c->next_signal = signal_number;
  c->deadline = cddp__now() + seconds;
}

/* Takes the status of a child that has ended; what is left of its group ends while the child, not
   yet waited for, still keeps the group's number from being used again. */
static bool cddp__child_ended(const cddp__children *c, pid_t pid, int *status) {
  siginfo_t info;
  memset(&info, 0, sizeof info);
  if (c->groups) {
    if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != pid)
      return false;
    kill(-pid, SIGKILL);
  }
  return waitpid(pid, status, WNOHANG) == pid;
}

/* Reaps the children that have ended. Keeps the first failure; among several at once a signal comes
   before an exit code: survivors of a killed rank exit because of it. */
static void cddp__reap_children(cddp__children *c) {
  bool fresh = c->first == CDDP_OK;
  int i, status;
  for (i = 0; i < c->n; i++) {
    pid_t pid = c->pids[i];
    if (pid <= 0 || !cddp__child_ended(c, pid, &status)) continue;
    c->pids[i] = 0;
    c->alive--;
    if (c->fds[i].fd >= 0) close(c->fds[i].fd);
    c->fds[i].fd = -1;
    if (!fresh || cddp__judge_child(c->first_rank + i, pid, status) == CDDP_OK) continue;
    if (c->first != CDDP_OK && (!WIFSIGNALED(status) || WIFSIGNALED(c->status))) continue;
    snprintf(c->text, sizeof c->text, "%s", cddp__error_text);
    c->first = CDDP_PEER_LOST;
    c->failed = i;
    c->failed_pid = pid;
    c->status = status;
  }
}

/* Once something has failed: time to notice it, then SIGTERM, then SIGKILL for the others. */
static void cddp__press_children(cddp__children *c) {
  if (c->first == CDDP_OK) return;
  if (c->next_signal == 0) {
    c->next_signal = SIGTERM;
    c->deadline = cddp__now() + CDDP__NOTICE_S;
  } else if (cddp__now() >= c->deadline) {
    cddp__signal_children(c, c->next_signal);
    c->deadline = cddp__now() + (c->next_signal == SIGTERM ? CDDP__GRACE_S : 1);
    c->next_signal = SIGKILL;
  }
}

static cddp_result cddp__watch_children(cddp__children *c) {
  int ms;
  while (c->alive > 0) {
    cddp__press_children(c);
    if (c->tend != NULL) c->tend(c->context);
    ms = c->blind ? 10 : c->next_signal == 0 ? -1 : cddp__poll_ms(c->deadline, 1000);
    if (poll(c->fds, (nfds_t)(c->n + c->extra), ms) < 0) /* EINTR: revents are old */
      for (ms = 0; ms < c->extra; ms++) c->fds[c->n + ms].revents = 0;
    cddp__reap_children(c);
  }
  return c->first == CDDP_OK ? CDDP_OK : cddp__fail(c->first, "%s", c->text);
}

/* Starts all: body(context, i) is the life of child i and never returns. */
static cddp_result cddp__fork_children(cddp__children *c, void (*body)(void *, int),
                                       void *context) {
  int i;
  for (i = 0; i < c->n; i++) {
    pid_t pid = fork();
    if (pid < 0) return cddp__fail_errno("fork");
    if (pid == 0) body(context, i);
    if (c->groups) setpgid(pid, pid); /* the child does so too: whoever comes first */
    c->pids[i] = pid;
    c->alive++;
    c->fds[i].events = POLLIN;
    c->fds[i].fd = (int)syscall(SYS_pidfd_open, pid, 0u);
    if (c->fds[i].fd < 0 && errno != ENOSYS) return cddp__fail_errno("pidfd_open");
    if (c->fds[i].fd < 0) c->blind = true; /* under valgrind 3.19, say */
  }
  return CDDP_OK;
}

static cddp_result cddp__spawn(int (*fn)(int, void *), void *arg, int nprocs) {
  cddp__children c;
  cddp__spawn_job job;
  cddp_result r;
  memset(&job, 0, sizeof job);
  job.fn = fn;
  job.arg = arg;
  job.parent = getpid();
  job.ranks.world = job.ranks.count = nprocs;
  job.ranks.master = "127.0.0.1";
  if ((r = cddp__listen_any(&job.ranks.listen_fd, &job.ranks.port)) != CDDP_OK) return r;
  if (!cddp__children_create(&c, nprocs, 0)) {
    r = cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d processes", nprocs);
    close(job.ranks.listen_fd);
  } else {
    fflush(NULL); /* or the children would print it again */
    r = cddp__fork_children(&c, cddp__child, &job);
    close(job.ranks.listen_fd); /* rank 0 has it */
    if (r != CDDP_OK) cddp__children_fail(&c, r, SIGTERM, 0);
    r = cddp__watch_children(&c);
  }
  cddp__children_free(&c);
  return r;
}

typedef struct cddp__thread_rank {
  int (*fn)(cddp_group *, void *);
  void *arg;
  cddp_group *group;
  cddp__host *host; /* kept until all threads have ended: others may still look at its memory */
  int index, code;
  cddp__atomic_u32 *order; /* counts endings, so that the first failure can be told */
  uint32_t ended;
  char text[CDDP__ERROR_MAX]; /* the thread's last error, for the caller's message */
} cddp__thread_rank;

static void *cddp__thread_main(void *p) {
  cddp__thread_rank *t = (cddp__thread_rank *)p;
  cddp__seat *seat = cddp__seat_of(t->group, t->index);
  t->code = t->fn(t->group, t->arg);
  snprintf(t->text, sizeof t->text, "%s", cddp__error_text);
  t->ended = cddp__add32(t->order, 1);
  if (t->code != 0) {
    cddp__exchange32(&seat->state, CDDP__SEAT_DEAD);
    cddp__wake_all(t->group);
  }
  cddp__group_leave(t->group);
  return NULL;
}

static cddp_result cddp__thread_groups(cddp__thread_rank *t, int n, char *board, double timeout_s) {
  int *members = (int *)calloc((size_t)n, sizeof *members), i;
  uint64_t job = cddp__record_job();
  cddp_result r = CDDP_OK;
  if (members == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d threads", n);
  for (i = 0; i < n; i++) members[i] = i;
  for (i = 0; r == CDDP_OK && i < n; i++) {
    t[i].host = cddp__host_create(NULL, NULL, n, i);
    if (t[i].host == NULL) {
      r = CDDP_OUT_OF_MEMORY;
      break;
    }
    t[i].host->threads = true;
    r = cddp__record_open(&t[i].host->record, job, i, n);
    if (r == CDDP_OK)
      r = cddp__group_build(&t[i].group, t[i].host, i, n, members, board, timeout_s);
  }
  free(members);
  return r;
}

/* Starts the threads whose groups were made; without all of them the others are told. */
static cddp_result cddp__run_thread_ranks(cddp__thread_rank *t, int n, cddp_result r) {
  pthread_t *threads = (pthread_t *)calloc((size_t)n, sizeof *threads);
  char text[CDDP__ERROR_MAX];
  int i, started = 0, e, first = -1;
  if (threads == NULL && r == CDDP_OK)
    r = cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d threads", n);
  for (i = 0; r == CDDP_OK && i < n; i++, started++) {
    e = pthread_create(&threads[i], NULL, cddp__thread_main, &t[i]);
    if (e != 0) {
      r = cddp__fail(CDDP_SYSTEM, "pthread_create: %s", strerror(e));
      break;
    }
  }
  snprintf(text, sizeof text, "%s", cddp__error_text);
  for (i = started; i < n; i++)
    if (t[i].group != NULL) cddp__group_leave(t[i].group);
  for (i = 0; i < started; i++) pthread_join(threads[i], NULL);
  free(threads);
  if (r != CDDP_OK) return cddp__fail(r, "%s", text);
  for (i = 0; i < n; i++)
    if (t[i].code != 0 && (first < 0 || t[i].ended < t[first].ended)) first = i;
  if (first < 0) return CDDP_OK;
  return cddp__fail(CDDP_PEER_LOST, "rank %d (a thread) returned %d%s%s", first, t[first].code,
                    t[first].text[0] ? "; its last error: " : "", t[first].text);
}

static cddp_result cddp__run_threads(int (*fn)(cddp_group *, void *), void *arg, int n) {
  cddp__thread_rank *t;
  cddp__atomic_u32 order = {0};
  double timeout_s;
  char *board;
  cddp_result r;
  int i;
  if ((r = cddp__discover_timeout(0, &timeout_s)) != CDDP_OK) return r;
  t = (cddp__thread_rank *)calloc((size_t)n, sizeof *t);
  board = cddp__map_plain(cddp__board_bytes(n, n));
  if (t == NULL || board == NULL) {
    free(t);
    if (board != NULL) munmap(board, cddp__board_bytes(n, n));
    return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d threads", n);
  }
  for (i = 0; i < n; i++) {
    t[i].fn = fn;
    t[i].arg = arg;
    t[i].index = i;
    t[i].order = &order;
  }
  r = cddp__thread_groups(t, n, board, timeout_s);
  r = cddp__run_thread_ranks(t, n, r);
  for (i = 0; i < n; i++) cddp__host_release(t[i].host);
  munmap(board, cddp__board_bytes(n, n));
  free(t);
#ifdef CDDP_CUDA
  cddp__await_endings();
#endif
  return r;
}
/* >>launch -------------------------------------------------------------------------------------
   Programs as ranks. Works as follows. Each rank is a child with a process group and a pipe each
   for stdout and stderr. One poll loop (cddp__watch_children, with cddp__tend_launch between polls)
   sees to children, pipes, signals and the two outputs. Lines leave whole: a rank's bytes wait in
   its stream until their newline is there, then go to an output's queue, which is written 4 KiB at
   a time when poll says that this will not block; while a queue is long, no pipe is read. Signals
   are blocked and read from a signalfd. A rank's death ends its group; the death of the launcher
   kills its ranks (PR_SET_PDEATHSIG) and wakes the guard, a small process that knows the groups and
   kills what is left of them. */

#define CDDP__INTERRUPT_S 30.0            /* for ranks to end after a signal that asks them to */
#define CDDP__LINE_MAX ((size_t)1 << 20)  /* bytes of a line; longer ones are broken */
#define CDDP__QUEUE_MAX ((size_t)1 << 18) /* bytes of an output from which ranks have to wait */
#define CDDP__WRITE_MAX 4096u /* bytes a pipe takes at once when poll calls it writable */

typedef struct cddp__stream { /* stdout or stderr of one rank */
  int fd;                     /* the pipe's end here; -1: ended */
  int theirs;                 /* the rank's end, until it has been started */
  cddp__buffer line;          /* what has come since the last newline */
} cddp__stream;

typedef struct cddp__sink { /* where lines go */
  int fd;                   /* -1: nowhere */
  bool color;
  cddp__buffer queue;       /* whole lines */
} cddp__sink;

enum {
  CDDP__TEND_SIGNALS,                       /* extra pollfds of the children: the signalfd, */
  CDDP__TEND_SINKS,                         /* two outputs, */
  CDDP__TEND_STREAMS = CDDP__TEND_SINKS + 2 /* two streams of each rank */
};

typedef struct cddp__job {
  const cddp_launch_desc *desc;
  cddp__children children;
  cddp__ranks ranks;
  cddp__stream *streams;      /* [2 * count] rank i's are 2i and 2i + 1 */
  int *logs;                  /* [count] files of log_dir; -1: none */
  cddp__sink sinks[2];        /* of stdout and stderr */
  int sink_count;             /* 1: both go to one file */
  int attempt;                /* restarts so far */
  int interrupted;            /* signal that asked for the end; 0: none */
  cddp_store *store;          /* that this process serves; NULL: rank 0 does */
  int signal_fd;
  sigset_t signals, old_mask; /* what signal_fd reads; the caller's mask */
  int exec_pipe[2];           /* children whose exec fails say so */
  int guard_pipe[2];          /* to the guard: pids of groups, negative ones are over */
  pid_t guard, parent;
  pid_t *groups;              /* [count] those the guard knows of; it has a list of its own */
} cddp__job;

typedef struct cddp__exec_failure {
  int child, error; /* its errno */
} cddp__exec_failure;

static cddp_result cddp__pipe(int *ends) {
  if (syscall(SYS_pipe2, ends, O_CLOEXEC) == 0) return CDDP_OK;
  ends[0] = ends[1] = -1;
  return cddp__fail(CDDP_SYSTEM, "pipe2: %s%s", strerror(errno),
                    errno == EMFILE ? "; raise ulimit -n: each rank takes 4 descriptors" : "");
}

/* --- the guard --- */

/* Reads pids of process groups; when all that write are gone, so are the groups. Keeps no other
   descriptor: nobody shall wait for this process to let go of it. */
static void cddp__guard_main(int fd, pid_t *groups, int n) {
  sigset_t all;
  ssize_t got;
  pid_t word;
  int i, limit = 65536;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, NULL);
  setsid();
  if (dup2(fd, 0) < 0) _exit(1);
  if (syscall(436 /* close_range */, 1u, ~0u, 0u) != 0)
    while (--limit > 0) close(limit);
  for (;;) {
    got = read(0, &word, sizeof word);
    if (got < 0 && errno == EINTR) continue;
    if (got != (ssize_t)sizeof word) break;
    for (i = 0; i < n && groups[i] != (word < 0 ? -word : 0); i++) {}
    if (i < n) groups[i] = word < 0 ? 0 : word;
  }
  for (i = 0; i < n; i++)
    if (groups[i] > 0) kill(-groups[i], SIGKILL);
  _exit(0);
}

static cddp_result cddp__guard_start(cddp__job *l) {
  cddp_result r;
  l->groups = (pid_t *)calloc((size_t)l->ranks.count, sizeof *l->groups);
  if (l->groups == NULL) return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for the launch");
  if ((r = cddp__pipe(l->guard_pipe)) != CDDP_OK) return r;
  l->guard = fork();
  if (l->guard < 0) return cddp__fail_errno("fork");
  if (l->guard == 0) {
    close(l->guard_pipe[1]);
    cddp__guard_main(l->guard_pipe[0], l->groups, l->ranks.count);
  }
  cddp__close_fd(&l->guard_pipe[0]);
  return CDDP_OK;
}

static void cddp__guard_tell(const cddp__job *l, pid_t word) {
  while (write(l->guard_pipe[1], &word, sizeof word) < 0 && errno == EINTR) {}
}

static void cddp__guard_stop(cddp__job *l) {
  cddp__close_fd(&l->guard_pipe[0]);
  cddp__close_fd(&l->guard_pipe[1]);
  while (l->guard > 0 && waitpid(l->guard, NULL, 0) < 0 && errno == EINTR) {}
  free(l->groups);
}

/* --- a rank's life until it runs the program --- */

static void cddp__rank_environment(const cddp__job *l, int i) {
  const cddp_launch_desc *d = l->desc;
  cddp__child_environment(&l->ranks, i);
  cddp__setenv_int("GROUP_RANK", d->node_rank);
  cddp__setenv_int("GROUP_WORLD_SIZE", d->nnodes > 0 ? d->nnodes : 1);
  cddp__setenv_int("TORCHELASTIC_RESTART_COUNT", l->attempt);
  cddp__setenv_int("TORCHELASTIC_MAX_RESTARTS", d->max_restarts);
  unsetenv("TORCHELASTIC_RUN_ID");
  if (d->serve_store) {
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    unsetenv("CDDP_LISTEN_FD");
  }
  if (l->ranks.count > 1) setenv("OMP_NUM_THREADS", "1", 0);
}

/* Never returns. The first rank here keeps stdin, unless that is a terminal: it would stop a
   process group that is not the one in front. */
static void cddp__rank_main(void *context, int i) {
  cddp__job *l = (cddp__job *)context;
  cddp__exec_failure failure;
  char *const *argv;
  int null = -1;
  cddp__die_with(l->parent);
  setpgid(0, 0);
  cddp__guard_tell(l, getpid());
  if (i != 0 || isatty(0)) null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) dup2(null, 0);
  dup2(l->streams[2 * i].theirs, 1);
  dup2(l->streams[2 * i + 1].theirs, 2);
  if (l->ranks.listen_fd >= 0 && l->ranks.first + i == 0 && !l->desc->serve_store)
    fcntl(l->ranks.listen_fd, F_SETFD, 0);
  cddp__rank_environment(l, i);
  pthread_sigmask(SIG_SETMASK, &l->old_mask, NULL);
  memcpy(&argv, &l->desc->argv, sizeof argv); /* execvp does not write to it */
  execvp(argv[0], argv);
  failure.child = i;
  failure.error = errno;
  if (write(l->exec_pipe[1], &failure, sizeof failure) < 0) _exit(126);
  _exit(failure.error == ENOENT ? 127 : 126);
}

/* --- output --- */

static cddp__sink *cddp__sink_of(cddp__job *l, int stream) {
  return &l->sinks[l->sink_count == 1 ? 0 : stream % 2];
}

/* The ranks cannot be heard any more, so they have to end. */
static void cddp__output_lost(cddp__job *l, int stream, const char *what) {
  cddp__fail(CDDP_IO, "output of rank %d cannot be passed on: %s", l->ranks.first + stream / 2,
             what);
  cddp__children_fail(&l->children, CDDP_IO, SIGTERM, 0);
}

/* A whole line, without its newline, goes to its output. */
static void cddp__emit_line(cddp__job *l, int stream, const unsigned char *line, size_t n) {
  cddp__sink *sink = cddp__sink_of(l, stream);
  int rank = l->ranks.first + stream / 2;
  char prefix[48] = "";
  if (sink->fd < 0) return;
  if (!l->desc->no_prefix && sink->color)
    snprintf(prefix, sizeof prefix, "\033[%dm[%d]\033[0m ", 31 + rank % 6, rank);
  else if (!l->desc->no_prefix)
    snprintf(prefix, sizeof prefix, "[%d] ", rank);
  if (!cddp__buffer_add(NULL, &sink->queue, prefix, strlen(prefix)) ||
      !cddp__buffer_add(NULL, &sink->queue, line, n) ||
      !cddp__buffer_add(NULL, &sink->queue, "\n", 1))
    cddp__output_lost(l, stream, cddp_error());
}

/* Bytes that came from a rank: complete lines leave, the rest waits. all: the rest leaves too. */
static void cddp__take_output(cddp__job *l, int stream, const unsigned char *data, size_t n,
                              bool all) {
  cddp__buffer *b = &l->streams[stream].line;
  size_t size;
  while (n > 0) {
    const unsigned char *end = (const unsigned char *)memchr(data, '\n', n);
    size_t part = end != NULL ? (size_t)(end - data) : n;
    if (!cddp__buffer_add(NULL, b, data, part)) {
      cddp__output_lost(l, stream, cddp_error());
      return;
    }
    data += part + (end != NULL);
    n -= part + (end != NULL);
    size = cddp__buffer_size(b);
    if (end == NULL && size < CDDP__LINE_MAX) continue;
    cddp__emit_line(l, stream, b->data + b->start, size);
    cddp__buffer_clear(NULL, b, 4096);
  }
  if (all && cddp__buffer_size(b) > 0) {
    cddp__emit_line(l, stream, b->data + b->start, cddp__buffer_size(b));
    cddp__buffer_clear(NULL, b, 4096);
  }
}

/* A rank's own file gets its bytes as they come. */
static void cddp__write_log(cddp__job *l, int stream, const unsigned char *data, size_t n) {
  int fd = l->logs[stream / 2];
  while (fd >= 0 && n > 0) {
    ssize_t got = write(fd, data, n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      cddp__output_lost(l, stream, strerror(errno));
      return;
    }
    data += got;
    n -= (size_t)got;
  }
}

/* Reads once from a rank's pipe, which does not block; false when there was nothing. */
static bool cddp__read_stream(cddp__job *l, int stream) {
  cddp__stream *t = &l->streams[stream];
  unsigned char data[16384];
  ssize_t n = read(t->fd, data, sizeof data);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (n > 0) {
    cddp__write_log(l, stream, data, (size_t)n);
    cddp__take_output(l, stream, data, (size_t)n, false);
    return true;
  }
  cddp__take_output(l, stream, data, 0, true);
  cddp__close_fd(&t->fd);
  return false;
}

/* Writes once; what cannot be written is dropped, and the ranks are ended. */
static void cddp__write_sink(cddp__job *l, cddp__sink *sink) {
  size_t n = cddp__min(cddp__buffer_size(&sink->queue), CDDP__WRITE_MAX);
  ssize_t got = write(sink->fd, sink->queue.data + sink->queue.start, n);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got < 0) {
    cddp__fail(CDDP_IO, "the ranks' output cannot be written to descriptor %d: %s", sink->fd,
               strerror(errno));
    cddp__children_fail(&l->children, CDDP_IO, SIGTERM, 0);
    sink->fd = -1;
    cddp__buffer_free(NULL, &sink->queue);
    return;
  }
  sink->queue.start += (size_t)got;
  if (cddp__buffer_size(&sink->queue) == 0) cddp__buffer_clear(NULL, &sink->queue, 65536);
}

/* --- signals --- */

static void cddp__take_signal(cddp__job *l, int number) {
  cddp__children *c = &l->children;
  bool ends = number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT;
  if (ends && l->interrupted != 0) number = SIGKILL; /* asked twice */
  cddp__signal_children(c, number);
  if (number == SIGTSTP) kill(getpid(), SIGSTOP); /* as the signal would have done */
  if (!ends || l->interrupted != 0) return;
  l->interrupted = number;
  cddp__fail(CDDP_ABORTED, "the launch was ended by signal %d (%s)", number,
             cddp__signal_name(number));
  cddp__children_fail(c, CDDP_ABORTED, SIGKILL, CDDP__INTERRUPT_S);
}

static void cddp__read_signals(cddp__job *l) {
  struct signalfd_siginfo info;
  while (read(l->signal_fd, &info, sizeof info) == (ssize_t)sizeof info)
    cddp__take_signal(l, (int)info.ssi_signo);
}

/* From here on the signals that a launch passes on come through signal_fd. Those that the caller
   ignores (nohup, a shell's background) stay ignored. */
static cddp_result cddp__signals_open(cddp__job *l) {
  static const int passed[] = {SIGHUP,  SIGINT,   SIGQUIT, SIGTERM, SIGUSR1,
                               SIGUSR2, SIGWINCH, SIGTSTP, SIGCONT};
  struct sigaction how;
  sigset_t blocked;
  size_t i;
  sigemptyset(&l->signals);
  for (i = 0; i < sizeof passed / sizeof *passed; i++)
    if (sigaction(passed[i], NULL, &how) == 0 && how.sa_handler != SIG_IGN)
      sigaddset(&l->signals, passed[i]);
  blocked = l->signals;
  sigaddset(&blocked, SIGPIPE); /* an output that is gone is an error, not a death */
  pthread_sigmask(SIG_BLOCK, &blocked, &l->old_mask);
  l->signal_fd = signalfd(-1, &l->signals, SFD_CLOEXEC | SFD_NONBLOCK);
  return l->signal_fd < 0 ? cddp__fail_errno("signalfd") : CDDP_OK;
}

static void cddp__signals_close(cddp__job *l) {
  struct timespec now = {0, 0};
  sigset_t pipe_signal;
  cddp__close_fd(&l->signal_fd);
  sigemptyset(&pipe_signal);
  sigaddset(&pipe_signal, SIGPIPE);
  if (!sigismember(&l->old_mask, SIGPIPE)) sigtimedwait(&pipe_signal, NULL, &now);
  pthread_sigmask(SIG_SETMASK, &l->old_mask, NULL);
}

/* --- the loop --- */

static bool cddp__sinks_full(const cddp__job *l) {
  return cddp__buffer_size(&l->sinks[0].queue) > CDDP__QUEUE_MAX ||
         cddp__buffer_size(&l->sinks[1].queue) > CDDP__QUEUE_MAX;
}

/* Before each poll: deals with what the last one found, and says what to look for in the next. */
static void cddp__tend_launch(void *context) {
  cddp__job *l = (cddp__job *)context;
  struct pollfd *extra = l->children.fds + l->children.n;
  int i;
  for (i = 0; i < l->ranks.count; i++) {
    if (l->groups[i] == 0 || l->children.pids[i] != 0) continue;
    cddp__guard_tell(l, -l->groups[i]); /* its number may be another's from now on */
    l->groups[i] = 0;
  }
  if (extra[CDDP__TEND_SIGNALS].revents != 0) cddp__read_signals(l);
  for (i = 0; i < l->sink_count; i++)
    if (extra[CDDP__TEND_SINKS + i].revents != 0) cddp__write_sink(l, &l->sinks[i]);
  for (i = 0; i < 2 * l->ranks.count; i++)
    if (extra[CDDP__TEND_STREAMS + i].revents != 0 && !cddp__sinks_full(l))
      cddp__read_stream(l, i);
  memset(extra, 0, (size_t)l->children.extra * sizeof *extra);
  for (i = 0; i < l->children.extra; i++) extra[i].fd = -1;
  extra[CDDP__TEND_SIGNALS].fd = l->signal_fd;
  extra[CDDP__TEND_SIGNALS].events = POLLIN;
  for (i = 0; i < l->sink_count; i++) {
    if (cddp__buffer_size(&l->sinks[i].queue) == 0) continue;
    extra[CDDP__TEND_SINKS + i].fd = l->sinks[i].fd;
    extra[CDDP__TEND_SINKS + i].events = POLLOUT;
  }
  for (i = 0; !cddp__sinks_full(l) && i < 2 * l->ranks.count; i++) {
    extra[CDDP__TEND_STREAMS + i].fd = l->streams[i].fd;
    extra[CDDP__TEND_STREAMS + i].events = POLLIN;
  }
}

/* Writes the queues out. After a signal, a reader that takes nothing for a second is given up. */
static void cddp__flush_sinks(cddp__job *l) {
  struct pollfd fds[3];
  int i, n;
  for (;;) {
    fds[0].fd = l->signal_fd;
    fds[0].events = POLLIN;
    for (i = 0; i < 2; i++) {
      fds[1 + i].fd = cddp__buffer_size(&l->sinks[i].queue) > 0 ? l->sinks[i].fd : -1;
      fds[1 + i].events = POLLOUT;
    }
    if (fds[1].fd < 0 && fds[2].fd < 0) return;
    n = poll(fds, 3, 1000);
    for (i = 0; n == 0 && l->interrupted != 0 && i < 2; i++) {
      l->sinks[i].fd = -1;
      cddp__buffer_free(NULL, &l->sinks[i].queue);
    }
    if (n > 0 && fds[0].revents != 0) cddp__read_signals(l);
    for (i = 0; i < 2; i++)
      if (n > 0 && fds[1 + i].revents != 0) cddp__write_sink(l, &l->sinks[i]);
  }
}

/* After the last rank: passes on what is still in the pipes, which one who left its rank's group
   may keep open; that one is not waited for. */
static void cddp__drain_launch(cddp__job *l) {
  int i, reads;
  for (i = 0; i < 2 * l->ranks.count; i++) {
    for (reads = 0; reads < 100 && l->streams[i].fd >= 0 && cddp__read_stream(l, i); reads++)
      if (cddp__sinks_full(l)) cddp__flush_sinks(l);
    cddp__take_output(l, i, NULL, 0, true);
    cddp__close_fd(&l->streams[i].fd);
  }
  cddp__flush_sinks(l);
}

/* --- start and end --- */

/* On one machine rank 0 gets its listening socket from here, so its port cannot be taken. */
static cddp_result cddp__launch_listen(cddp__job *l) {
  const cddp_launch_desc *d = l->desc;
  cddp__address a[CDDP__ADDRESSES_MAX];
  int fds[CDDP__ADDRESSES_MAX], count = 0, n = 0;
  cddp_result r;
  l->ranks.master = d->master_addr != NULL && !d->standalone ? d->master_addr : "127.0.0.1";
  l->ranks.port = d->standalone ? 0 : d->master_port;
  if (d->nnodes > 1) {
    if (l->ranks.port == 0) l->ranks.port = CDDP__LAUNCH_PORT;
    return CDDP_OK;
  }
  r = cddp__resolve(l->ranks.master, 0, "master_addr", a, &count);
  if (r == CDDP_OK)
    r = cddp__listen_all(a, count, &l->ranks.port, "master_port", "master_addr", fds, &n);
  if (r != CDDP_OK) return r;
  l->ranks.listen_fd = fds[0]; /* of the name's addresses one is enough */
  while (n > 1) cddp__close_fd(&fds[--n]);
  return CDDP_OK;
}

/* After the fork, which no thread shall see: who connects before waits in the socket's queue. */
static cddp_result cddp__launch_store(cddp__job *l) {
  cddp__store_options o;
  char where[64];
  memset(&o, 0, sizeof o);
  snprintf(where, sizeof where, "tcp://127.0.0.1:%d", l->ranks.port);
  o.init_method = where;
  o.is_server = true;
  o.listen_fd = l->ranks.listen_fd;
  l->ranks.listen_fd = -1;
  o.deadline = cddp__now() + 10;
  return cddp__store_open(&l->store, &o);
}

static cddp_result cddp__launch_log(cddp__job *l, int i) {
  const char *folder = l->desc->log_dir;
  char path[4096];
  if (folder == NULL) return CDDP_OK;
  if (mkdir(folder, 0777) != 0 && errno != EEXIST)
    return cddp__fail(CDDP_IO, "cannot make the folder %s for logs: %s", folder, strerror(errno));
  if (l->attempt == 0)
    snprintf(path, sizeof path, "%s/rank%d.log", folder, l->ranks.first + i);
  else
    snprintf(path, sizeof path, "%s/rank%d.restart%d.log", folder, l->ranks.first + i, l->attempt);
  l->logs[i] = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  return l->logs[i] >= 0 ? CDDP_OK
                         : cddp__fail(CDDP_IO, "cannot write %s: %s", path, strerror(errno));
}

static cddp_result cddp__launch_pipes(cddp__job *l) {
  int i, j, ends[2];
  cddp_result r = CDDP_OK;
  for (i = 0; r == CDDP_OK && i < l->ranks.count; i++) {
    for (j = 2 * i; r == CDDP_OK && j < 2 * i + 2; j++) {
      r = cddp__pipe(ends);
      l->streams[j].fd = ends[0];
      l->streams[j].theirs = ends[1];
      if (r == CDDP_OK && !cddp__set_nonblock(ends[0])) r = cddp__fail_errno("fcntl on a pipe");
    }
    if (r == CDDP_OK) r = cddp__launch_log(l, i);
  }
  return r;
}

static void cddp__launch_outputs(cddp__job *l) {
  const cddp_launch_desc *d = l->desc;
  const char *term = getenv("TERM");
  struct stat a, b;
  int i;
  l->sinks[0].fd = d->out_fd != 0 ? d->out_fd : 1;
  l->sinks[1].fd = d->err_fd != 0 ? d->err_fd : 2;
  for (i = 0; i < 2; i++)
    l->sinks[i].color = d->color > 0 || (d->color == 0 && isatty(l->sinks[i].fd) == 1 &&
                                         cddp__env("NO_COLOR") == NULL && term != NULL &&
                                         strcmp(term, "dumb") != 0);
  l->sink_count = 2;
  if (l->sinks[0].fd >= 0 && l->sinks[1].fd >= 0 && fstat(l->sinks[0].fd, &a) == 0 &&
      fstat(l->sinks[1].fd, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
    l->sink_count = 1; /* 2>&1: one queue keeps lines of both whole */
}

/* Waits until every child runs the program. What it says of one that could not is what counts. */
static cddp_result cddp__launch_execs(cddp__job *l) {
  cddp__exec_failure failure;
  ssize_t got;
  int i;
  cddp__close_fd(&l->exec_pipe[1]);
  for (i = 0; i < 2 * l->ranks.count; i++) cddp__close_fd(&l->streams[i].theirs);
  do {
    got = read(l->exec_pipe[0], &failure, sizeof failure);
  } while (got < 0 && errno == EINTR);
  cddp__close_fd(&l->exec_pipe[0]);
  if (got != (ssize_t)sizeof failure) return CDDP_OK;
  l->children.failed = failure.child;
  l->children.failed_pid = l->children.pids[failure.child];
  l->children.status = (failure.error == ENOENT ? 127 : 126) << 8;
  return cddp__fail(CDDP_SYSTEM, "cannot run \"%s\": %s%s", l->desc->argv[0],
                    strerror(failure.error),
                    failure.error == ENOENT && strchr(l->desc->argv[0], '/') == NULL
                        ? "; it is in no folder of PATH (a program here is ./NAME)"
                        : "");
}

static cddp_result cddp__launch_start(cddp__job *l) {
  int n = l->ranks.count, i;
  cddp_result r;
  l->streams = (cddp__stream *)calloc(2 * (size_t)n, sizeof *l->streams);
  l->logs = (int *)calloc((size_t)n, sizeof *l->logs);
  if (!cddp__children_create(&l->children, n, CDDP__TEND_STREAMS + 2 * n) || l->streams == NULL ||
      l->logs == NULL)
    return cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d ranks", n);
  for (i = 0; i < n; i++) l->logs[i] = -1;
  for (i = 0; i < 2 * n; i++) l->streams[i].fd = l->streams[i].theirs = -1;
  l->children.first_rank = l->ranks.first;
  l->children.groups = true;
  l->children.tend = cddp__tend_launch;
  l->children.context = l;
  cddp__launch_outputs(l);
  if ((r = cddp__signals_open(l)) != CDDP_OK) return r;
  if ((r = cddp__guard_start(l)) != CDDP_OK) return r;
  if ((r = cddp__launch_listen(l)) != CDDP_OK) return r;
  if ((r = cddp__launch_pipes(l)) != CDDP_OK) return r;
  if ((r = cddp__pipe(l->exec_pipe)) != CDDP_OK) return r;
  fflush(NULL);
  r = cddp__fork_children(&l->children, cddp__rank_main, l);
  memcpy(l->groups, l->children.pids, (size_t)n * sizeof *l->groups);
  if (r == CDDP_OK && l->desc->serve_store) r = cddp__launch_store(l);
  cddp__close_fd(&l->ranks.listen_fd);
  return r == CDDP_OK ? cddp__launch_execs(l) : r;
}

static void cddp__launch_free(cddp__job *l) {
  int i;
  for (i = 0; i < l->ranks.count; i++) {
    if (l->logs != NULL) cddp__close_fd(&l->logs[i]);
    if (l->streams == NULL) continue;
    cddp__close_fd(&l->streams[2 * i].fd);
    cddp__close_fd(&l->streams[2 * i + 1].fd);
    cddp__close_fd(&l->streams[2 * i].theirs);
    cddp__close_fd(&l->streams[2 * i + 1].theirs);
    cddp__buffer_free(NULL, &l->streams[2 * i].line);
    cddp__buffer_free(NULL, &l->streams[2 * i + 1].line);
  }
  for (i = 0; i < 2; i++) {
    cddp__close_fd(&l->exec_pipe[i]);
    cddp__buffer_free(NULL, &l->sinks[i].queue);
  }
  cddp__close_fd(&l->ranks.listen_fd);
  if (l->store != NULL) cddp__store_close(l->store);
  cddp__guard_stop(l);
  cddp__signals_close(l);
  cddp__children_free(&l->children);
  free(l->streams);
  free(l->logs);
}

static void cddp__launch_init(cddp__job *l, const cddp_launch_desc *d, int attempt) {
  int n = d->nproc_per_node > 0 ? d->nproc_per_node : 1;
  memset(l, 0, sizeof *l);
  l->desc = d;
  l->attempt = attempt;
  l->parent = getpid();
  l->ranks.count = n;
  l->ranks.first = d->node_rank * n;
  l->ranks.world = (d->nnodes > 0 ? d->nnodes : 1) * n;
  l->ranks.listen_fd = l->signal_fd = -1;
  l->exec_pipe[0] = l->exec_pipe[1] = l->guard_pipe[0] = l->guard_pipe[1] = -1;
  pthread_sigmask(SIG_BLOCK, NULL, &l->old_mask);
}

/* One life of all ranks. */
static cddp_result cddp__launch_once(const cddp_launch_desc *d, int attempt,
                                     cddp_launch_report *report) {
  cddp__job l;
  cddp__children *c = &l.children;
  cddp_result r;
  char text[CDDP__ERROR_MAX];
  cddp__launch_init(&l, d, attempt);
  if ((r = cddp__launch_start(&l)) != CDDP_OK) cddp__children_fail(c, r, SIGTERM, 0);
  if (c->alive > 0) r = cddp__watch_children(c);
  snprintf(text, sizeof text, "%s", cddp__error_text);
  if (l.streams != NULL && l.groups != NULL) cddp__drain_launch(&l);
  report->restarts = attempt;
  report->signal = l.interrupted;
  if (c->failed >= 0) {
    report->rank = l.ranks.first + c->failed;
    report->pid = (int)c->failed_pid;
    report->exit_code = WIFSIGNALED(c->status) ? -1 : WEXITSTATUS(c->status);
    report->signal = WIFSIGNALED(c->status) ? WTERMSIG(c->status) : 0;
  }
  cddp__launch_free(&l);
  if (r == CDDP_OK && c->first != CDDP_OK) r = cddp__fail(c->first, "%s", c->text);
  else if (r != CDDP_OK) cddp__fail(r, "%s", text);
  return r == CDDP_PEER_LOST && l.interrupted != 0 ? CDDP_ABORTED : r;
}

static cddp_result cddp__launch_all(const cddp_launch_desc *d, cddp_launch_report *report) {
  cddp_result r;
  int attempt = 0;
  for (;; attempt++) {
    memset(report, 0, sizeof *report);
    report->rank = -1;
    r = cddp__launch_once(d, attempt, report);
    if (r != CDDP_PEER_LOST || attempt >= d->max_restarts) break;
    cddp__log(&d->logger, 1, "%s; restart %d of %d", cddp__error_text, attempt + 1,
              d->max_restarts);
  }
  if (r != CDDP_OK && attempt > 0) cddp__fail_in(r, "after %d restart%s, ", attempt,
                                                 attempt > 1 ? "s" : "");
  return r;
}
/* >>validate -----------------------------------------------------------------------------------
   Argument checks of the public functions: CDDP_INVALID_ARGUMENT with a sentence, before anything
   is done. */

static cddp_result cddp__invalid(const char *function, const char *what) {
  return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: %s", function, what);
}

static cddp_result cddp__check_call(const char *function, cddp_group *g, cddp__call *c) {
  bool pieces = c->kind != CDDP__KIND_ALL_REDUCE && c->kind != CDDP__KIND_REDUCE &&
                c->kind != CDDP__KIND_BROADCAST;
  bool rooted = c->root != -1;
  if (g == NULL) return cddp__invalid(function, "the group is NULL");
  if (!cddp__dtype_ok((cddp_dtype)c->dtype))
    return cddp__invalid(function, "dtype is not a cddp_dtype");
  if (c->op > CDDP_MAX) return cddp__invalid(function, "op is not a cddp_op");
  if (rooted && (c->root < 0 || c->root >= g->size))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: root is %d; the group has ranks 0 to %d",
                      function, c->root, g->size - 1);
  c->esize = cddp__dtype_size((cddp_dtype)c->dtype);
  if (c->count > SIZE_MAX / 2 / c->esize / (pieces ? (size_t)g->size : 1))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: count %zu is beyond the address space", function,
                      c->count);
  if (c->count == 0) return CDDP_OK;
  if (c->send == NULL && (c->kind != CDDP__KIND_SCATTER || g->rank == c->root))
    return cddp__invalid(function,
                         c->kind >= CDDP__KIND_ALL_GATHER ? "send is NULL" : "buf is NULL");
  if (c->recv == NULL && (c->kind != CDDP__KIND_GATHER || g->rank == c->root))
    return cddp__invalid(function, "recv is NULL");
  return CDDP_OK;
}

static cddp_result cddp__collective(const char *function, cddp_group *g, int kind, const void *send,
                                    void *recv, size_t count, cddp_dtype dtype, cddp_op op,
                                    int root, cddp_work **work) {
  cddp__call c;
  cddp_result r;
  cddp__enter_call();
  memset(&c, 0, sizeof c);
  c.kind = (uint8_t)kind;
  c.dtype = (uint8_t)((unsigned)dtype > 255 ? 255 : dtype);
  c.op = (uint8_t)((unsigned)op > 255 ? 255 : op);
  c.send = send;
  c.recv = recv;
  c.count = count;
  c.root = root;
  if (root == -1 && (kind == CDDP__KIND_REDUCE || kind == CDDP__KIND_BROADCAST ||
                     kind == CDDP__KIND_GATHER || kind == CDDP__KIND_SCATTER))
    c.root = INT_MIN; /* -1 means "no root" inside; as an argument it is wrong */
  if ((r = cddp__check_call(function, g, &c)) != CDDP_OK) return r;
  return cddp__start_call(g, &c, work);
}

/* A message in device memory; *taken false: it is the host's. */
static cddp_result cddp__device_message(cddp_group *g, int kind, const void *buf, size_t count,
                                        cddp_dtype dtype, int peer, int tag, cddp_work **work,
                                        bool *taken) {
  cddp__call c;
  *taken = false;
  if (CDDP__LIKELY(g->backend == NULL)) return CDDP_OK;
  memset(&c, 0, sizeof c);
  c.kind = (uint8_t)kind;
  c.dtype = (uint8_t)dtype;
  c.root = peer;
  c.tag = tag;
  c.send = buf;
  memcpy(&c.recv, &buf, sizeof buf); /* recv's is not const, a send does not write to it */
  c.count = count;
  c.esize = cddp__dtype_size(dtype);
  return g->backend->message(g, &c, work, taken);
}

static cddp_result cddp__check_p2p(const char *function, const cddp_group *g, const void *buf,
                                   size_t count, cddp_dtype dtype, int peer, int tag) {
  if (g == NULL) return cddp__invalid(function, "the group is NULL");
  if (!cddp__dtype_ok(dtype)) return cddp__invalid(function, "dtype is not a cddp_dtype");
  if (buf == NULL && count > 0) return cddp__invalid(function, "buf is NULL");
  if (count > SIZE_MAX / 16) return cddp__invalid(function, "count is beyond the address space");
  if (tag < 0) return cddp__invalid(function, "tag is negative");
  if (peer < 0 || peer >= g->size)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: peer is %d; the group has ranks 0 to %d",
                      function, peer, g->size - 1);
  return CDDP_OK;
}

static cddp_result cddp__check_backend(const char *backend, bool cuda) {
  bool nccl = backend != NULL && strcmp(backend, "nccl") == 0;
  bool mpi = backend != NULL && strcmp(backend, "mpi") == 0;
  if (backend == NULL || strcmp(backend, "cpu") == 0) return CDDP_OK;
  if (!nccl && !mpi)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "cddp_init: backend \"%s\" is not known; it may be \"cpu\", \"mpi\" or "
                      "\"nccl\"",
                      backend);
  if (nccl ? !CDDP__HAS_CUDA : !CDDP__HAS_MPI)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "cddp_init: this build has no \"%s\" backend; compile cddp's implementation "
                      "with %s for it",
                      backend, nccl ? "-DCDDP_CUDA" : "mpicc -DCDDP_MPI");
  if (nccl && !cuda) return cddp__invalid("cddp_init", "backend \"nccl\" needs device \"cuda\"");
  if (mpi && cuda) return cddp__invalid("cddp_init", "backend \"mpi\" needs device \"cpu\"");
  return CDDP_OK;
}

static cddp_result cddp__check_device(const char *device, bool cuda) {
  if (device == NULL || strcmp(device, "cpu") == 0) return CDDP_OK;
  if (cuda && !CDDP__HAS_CUDA)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "cddp_init: this build has no CUDA; compile cddp's implementation with "
                      "-DCDDP_CUDA and link -lnccl -lcudart, or use device \"cpu\"");
  if (cuda && (device[4] == 0 || (device[4] == ':' && device[5] >= '0' && device[5] <= '9' &&
                                  strlen(device + 5) <= 4 &&
                                  strspn(device + 5, "0123456789") == strlen(device + 5))))
    return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "cddp_init: device \"%s\" is not known; it may be \"cpu\", \"cuda\" or a "
                    "certain GPU: \"cuda:0\"",
                    device);
}

static cddp_result cddp__check_set_device(const cddp_group *g, const cddp_group_desc *d) {
  static const char who[] = "cddp_set_device";
  char text[CDDP__ERROR_MAX];
  cddp_result r;
  if (g == NULL) return cddp__invalid(who, "the group is NULL");
  if (d->device == NULL || strncmp(d->device, "cuda", 4) != 0)
    return cddp__invalid(who, "device is not \"cuda\" or a certain GPU, such as \"cuda:0\"");
  if ((r = cddp__check_device(d->device, true)) == CDDP_OK)
    r = cddp__check_backend(cddp__backend_name(d), true);
  if (r != CDDP_OK) {
    const char *inner = strstr(cddp__error_text, ": ");
    snprintf(text, sizeof text, "%s", inner != NULL ? inner + 2 : cddp__error_text);
    return cddp__fail(r, "%s: %s", who, text);
  }
  return g->backend == NULL && g->mpi == NULL
             ? CDDP_OK
             : cddp__invalid(who, "the group has a device already, or its backend is \"mpi\"");
}

static cddp_result cddp__check_desc(const cddp_group_desc *d) {
  bool cuda = d->device != NULL && strncmp(d->device, "cuda", 4) == 0;
  cddp_result r;
  if ((r = cddp__check_backend(cddp__backend_name(d), cuda)) != CDDP_OK) return r;
  if ((r = cddp__check_device(d->device, cuda)) != CDDP_OK) return r;
  if (d->world_size < 0 || d->world_size > CDDP__MAX_RANKS)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "cddp_init: world_size is %d; it must be from 1 to %d, or 0 for "
                      "the environment's",
                      d->world_size, CDDP__MAX_RANKS);
  if (d->world_size > 0 && (d->rank < 0 || d->rank >= d->world_size))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "cddp_init: rank is %d but world_size is %d; ranks go from 0 to %d", d->rank,
                      d->world_size, d->world_size - 1);
  if (!(d->timeout_s >= 0)) return cddp__invalid("cddp_init", "timeout_s is negative");
  if ((d->allocator.alloc == NULL) != (d->allocator.free == NULL))
    return cddp__invalid("cddp_init", "allocator needs both alloc and free, or neither");
  return CDDP_OK;
}
static cddp_result cddp__check_launch(const cddp_launch_desc *d) {
  static const char who[] = "cddp_launch";
  int nodes, n;
  if (d == NULL || d->argv == NULL || d->argv[0] == NULL || d->argv[0][0] == 0)
    return cddp__invalid(who, "desc->argv names no program");
  nodes = d->nnodes > 0 ? d->nnodes : 1;
  n = d->nproc_per_node > 0 ? d->nproc_per_node : 1;
  if (d->nproc_per_node < 0 || d->nnodes < 0 || n > CDDP__MAX_RANKS || nodes > INT_MAX / n)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s: nproc_per_node is %d and nnodes %d; they must be from 1, and at most %d "
                      "ranks can be on a machine",
                      who, d->nproc_per_node, d->nnodes, CDDP__MAX_RANKS);
  if (d->node_rank < 0 || d->node_rank >= nodes)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s: node_rank is %d; with nnodes %d it is from 0 to %d", who, d->node_rank,
                      nodes, nodes - 1);
  if (nodes > 1 && d->standalone)
    return cddp__invalid(who, "standalone is for one machine, but nnodes is more than 1");
  if (nodes > 1 && d->serve_store)
    return cddp__invalid(who, "serve_store is for one machine; with several, rank 0 serves");
  if (nodes > 1 && (d->master_addr == NULL || d->master_addr[0] == 0))
    return cddp__invalid(who,
                         "with nnodes above 1 master_addr must name the machine whose node_rank is "
                         "0, in a way that the others can reach");
  if (d->master_port < 0 || d->master_port > 65535)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: master_port is %d; it must be from 0 to 65535",
                      who, d->master_port);
  if (d->max_restarts < 0) return cddp__invalid(who, "max_restarts is negative");
  return CDDP_OK;
}
/* >>public ------------------------------------------------------------------------------------- */


CDDPDEF int cddp_launcher_rank(void) {
  cddp__place at;
  int i;
  memset(&at, 0, sizeof at);
  if (cddp__env_ranks(&at) != CDDP_OK) return 0;
  for (i = 0; i < CDDP__LAUNCHERS; i++)
    if (cddp__launched_by(i)) return at.rank;
  return -1;
}

CDDPDEF size_t cddp_dtype_size(cddp_dtype dtype) { return cddp__dtype_size(dtype); }

static cddp_result cddp__write_copies(cddp_sgd *s) {
  if (s->backend != NULL && s->copies != NULL) return s->backend->copy(s);
  cddp__sgd_copy_all(s);
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_sgd_write_copies(cddp_sgd *s) {
  cddp_result r;
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sgd_write_copies: s is NULL");
  r = cddp__write_copies(s);
  return r == CDDP_OK ? r : cddp__fail_in(r, "cddp_sgd_write_copies: ");
}

CDDPDEF cddp_result cddp_sgd_step(cddp_sgd *s) {
  cddp_result r;
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sgd_step: s is NULL");
  r = s->backend != NULL ? s->backend->step(s) : cddp__sgd_step(s);
  return r == CDDP_OK ? r : cddp__fail_in(r, "cddp_sgd_step: ");
}

CDDPDEF cddp_result cddp_sgd_zero_grad(cddp_sgd *s) {
  int i;
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sgd_zero_grad: s is NULL");
  if (s->backend != NULL) return s->backend->zero(s);
  for (i = 0; i < s->count; i++) {
    cddp_param *p = &s->params[i];
    if (p->grad != NULL) memset(p->grad, 0, p->count * cddp__dtype_size(p->dtype));
    if (cddp__sgd_sparse(s, i) != NULL) s->sparse[i]->mean.n = 0;
  }
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_sgd_set_lr(cddp_sgd *s, double lr) {
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sgd_set_lr: s is NULL");
  if (!(lr >= 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sgd_set_lr: lr is %g; it must be at least 0",
                      lr);
  s->desc.lr = lr;
  cddp__sgd_rule_init(&s->rule, &s->desc);
  return CDDP_OK;
}

CDDPDEF double cddp_sgd_lr(const cddp_sgd *s) { return s != NULL ? s->desc.lr : 0.0; }

CDDPDEF void cddp_sgd_destroy(cddp_sgd *s) {
  if (s != NULL && s->shard != NULL) s->drop(s);
  if (s != NULL && s->backend != NULL) s->backend->leave(s);
  cddp__sgd_free(s);
}

CDDPDEF cddp_result cddp_sampler_init(cddp_sampler *s, const cddp_sampler_desc *desc) {
  cddp_result r;
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sampler_init: s is NULL");
  memset(s, 0, sizeof *s);
  if (desc == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_sampler_init: desc is NULL");
  r = cddp__sampler_check(desc);
  if (r != CDDP_OK) return cddp__fail_in(r, "cddp_sampler_init: ");
  s->desc = *desc;
  if (s->desc.world_size == 0) s->desc.world_size = 1;
  s->size = cddp__sampler_count(&s->desc, 0);
  return CDDP_OK;
}

CDDPDEF void cddp_sampler_set_epoch(cddp_sampler *s, uint64_t epoch) {
  bool goes_on;
  if (s == NULL) return;
  goes_on = s->resumed && s->epoch == epoch;
  s->resumed = false;
  if (goes_on) return;
  cddp__sampler_rewind(s);
  s->epoch = epoch;
  if (s->start != 0) s->size = cddp__sampler_count(&s->desc, s->start = 0);
}

CDDPDEF uint64_t cddp_sampler_epoch(const cddp_sampler *s) { return s != NULL ? s->epoch : 0; }

CDDPDEF size_t cddp_sampler_size(const cddp_sampler *s) { return s != NULL ? s->size : 0; }

CDDPDEF bool cddp_sampler_next(cddp_sampler *s, size_t *index) {
  size_t ignored;
  return s != NULL && cddp__sampler_next(s, index != NULL ? index : &ignored);
}

CDDPDEF void cddp_sampler_destroy(cddp_sampler *s) {
  if (s == NULL) return;
  cddp__sampler_rewind(s);
  s->size = s->start = 0;
}

/* The store's public functions: arguments are checked here, all else is done in >>store. */

static cddp_result cddp__check_key(const char *who, const cddp_store *s, const char *key) {
  size_t n;
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: the store is NULL", who);
  if (key == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: the key is NULL", who);
  n = strnlen(key, CDDP__KEY_MAX);
  if (n < CDDP__KEY_MAX) return CDDP_OK; /* a "/" is put before it */
  return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: the key '%.32s...' has more than %u bytes", who,
                    key, CDDP__KEY_MAX - 1u);
}

static cddp_result cddp__check_value(const char *who, const char *what, const void *value,
                                     size_t size) {
  if (value == NULL && size > 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: %s is NULL and its size is not 0", who, what);
  if (size <= CDDP__VALUE_MAX) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: %s has %zu bytes; a value has at most %u", who,
                    what, size, CDDP__VALUE_MAX);
}

static cddp_result cddp__check_keys(const char *who, const cddp_store *s, const char *const *keys,
                                    int count) {
  cddp_result r = cddp__check_key(who, s, "");
  int i;
  if (r == CDDP_OK && (count < 0 || (unsigned)count > CDDP__KEYS_MAX)) {
    r = cddp__fail(CDDP_INVALID_ARGUMENT, "%s: count is %d; it is from 0 to %u", who, count,
                   CDDP__KEYS_MAX);
  }
  if (r == CDDP_OK && keys == NULL && count > 0)
    r = cddp__fail(CDDP_INVALID_ARGUMENT, "%s: keys is NULL", who);
  for (i = 0; i < count && r == CDDP_OK; i++) r = cddp__check_key(who, s, keys[i]);
  return r;
}

static cddp_result cddp__check_pointer(const char *who, const char *what, const void *p) {
  return p != NULL ? CDDP_OK : cddp__fail(CDDP_INVALID_ARGUMENT, "%s: %s is NULL", who, what);
}

/* NaN and negative times are nobody's intention; 0 is the default. */
static cddp_result cddp__check_seconds(const char *who, const char *what, double seconds) {
  return seconds >= 0
             ? CDDP_OK
             : cddp__fail(CDDP_INVALID_ARGUMENT, "%s: %s is %g; it is in seconds, and 0 or more",
                          who, what, seconds);
}

/* seconds, or if that is 0 CDDP_TIMEOUT_S, or 600. */
static cddp_result cddp__store_timeout(double seconds, double *out) {
  const char *text = getenv("CDDP_TIMEOUT_S");
  char *end = NULL;
  *out = seconds > 0 ? seconds : CDDP__TIMEOUT_S;
  if (seconds > 0 || text == NULL || text[0] == '\0') return CDDP_OK;
  *out = strtod(text, &end);
  if (*end == '\0' && *out > 0) return CDDP_OK;
  return cddp__fail(
      CDDP_INVALID_ARGUMENT,
      "cddp_store_create: CDDP_TIMEOUT_S is '%.32s'; it is a number of seconds above 0", text);
}

CDDPDEF cddp_result cddp_store_create(cddp_store **out, const cddp_store_desc *desc) {
  static const char who[] = "cddp_store_create";
  cddp__store_options o;
  cddp_result r = cddp__check_pointer(who, "out", out);
  if (r != CDDP_OK) return r;
  *out = NULL;
  r = cddp__check_pointer(who, "desc", desc);
  if (r == CDDP_OK) r = cddp__check_pointer(who, "desc->init_method", desc->init_method);
  if (r == CDDP_OK) r = cddp__check_seconds(who, "desc->timeout_s", desc->timeout_s);
  if (r == CDDP_OK && (desc->allocator.alloc == NULL) != (desc->allocator.free == NULL)) {
    r = cddp__fail(CDDP_INVALID_ARGUMENT, "%s: the allocator needs both alloc and free, or neither",
                   who);
  }
  memset(&o, 0, sizeof o);
  if (r == CDDP_OK) r = cddp__store_timeout(desc->timeout_s, &o.timeout_s);
  if (r != CDDP_OK) return r;
  o.init_method = desc->init_method;
  o.is_server = desc->is_server;
  o.listen_fd = -1;
  o.deadline = cddp__now() + o.timeout_s;
  o.secret = desc->secret;
  o.allocator = desc->allocator;
  return cddp__store_open(out, &o);
}

CDDPDEF void cddp_store_destroy(cddp_store *s) { cddp__store_close(s); }

CDDPDEF int cddp_store_port(const cddp_store *s) { return s == NULL ? 0 : cddp__store_port(s); }

CDDPDEF cddp_result cddp_store_set(cddp_store *s, const char *key, const void *value, size_t size) {
  cddp_result r = cddp__check_key("cddp_store_set", s, key);
  if (r == CDDP_OK) r = cddp__check_value("cddp_store_set", "value", value, size);
  return r == CDDP_OK ? cddp__store_set(s, key, value, size) : r;
}

CDDPDEF cddp_result cddp_store_get(cddp_store *s, const char *key, void *value, size_t capacity,
                                   size_t *size) {
  cddp_result r = cddp__check_key("cddp_store_get", s, key);
  if (r == CDDP_OK && value == NULL && capacity > 0)
    r = cddp__check_pointer("cddp_store_get", "value", value);
  if (r == CDDP_OK) r = cddp__check_pointer("cddp_store_get", "size", size);
  return r == CDDP_OK ? cddp__store_get(s, key, value, capacity, size, cddp__store_deadline(s)) : r;
}

CDDPDEF cddp_result cddp_store_add(cddp_store *s, const char *key, int64_t amount, int64_t *total) {
  cddp_result r = cddp__check_key("cddp_store_add", s, key);
  return r == CDDP_OK ? cddp__store_add(s, key, amount, total) : r;
}

CDDPDEF cddp_result cddp_store_compare_set(cddp_store *s, const char *key, const void *expected,
                                           size_t expected_size, const void *desired,
                                           size_t desired_size, void *value, size_t capacity,
                                           size_t *size, bool *swapped) {
  static const char who[] = "cddp_store_compare_set";
  cddp_result r = cddp__check_key(who, s, key);
  if (r == CDDP_OK) r = cddp__check_value(who, "expected", expected, expected_size);
  if (r == CDDP_OK) r = cddp__check_value(who, "desired", desired, desired_size);
  if (r == CDDP_OK && value == NULL && capacity > 0) r = cddp__check_pointer(who, "value", value);
  if (r == CDDP_OK) r = cddp__check_pointer(who, "size", size);
  if (r == CDDP_OK) r = cddp__check_pointer(who, "swapped", swapped);
  if (r != CDDP_OK) return r;
  return cddp__store_compare_set(s, key, expected, expected_size, desired, desired_size, value,
                                 capacity, size, swapped);
}

CDDPDEF cddp_result cddp_store_wait(cddp_store *s, const char *const *keys, int count,
                                    double timeout_s) {
  cddp_result r = cddp__check_keys("cddp_store_wait", s, keys, count);
  if (r == CDDP_OK) r = cddp__check_seconds("cddp_store_wait", "timeout_s", timeout_s);
  return r == CDDP_OK ? cddp__store_wait(s, keys, count,
                                         cddp__now() + (timeout_s > 0 ? timeout_s : s->timeout_s))
                      : r;
}

CDDPDEF cddp_result cddp_store_check(cddp_store *s, const char *const *keys, int count,
                                     bool *all_exist) {
  cddp_result r = cddp__check_keys("cddp_store_check", s, keys, count);
  if (r == CDDP_OK) r = cddp__check_pointer("cddp_store_check", "all_exist", all_exist);
  return r == CDDP_OK ? cddp__store_check(s, keys, count, all_exist) : r;
}

CDDPDEF cddp_result cddp_store_delete(cddp_store *s, const char *key, bool *deleted) {
  cddp_result r = cddp__check_key("cddp_store_delete", s, key);
  return r == CDDP_OK ? cddp__store_delete(s, key, deleted) : r;
}

CDDPDEF cddp_result cddp_store_num_keys(cddp_store *s, int64_t *count) {
  cddp_result r = cddp__check_key("cddp_store_num_keys", s, "");
  if (r == CDDP_OK) r = cddp__check_pointer("cddp_store_num_keys", "count", count);
  return r == CDDP_OK ? cddp__store_num_keys(s, count) : r;
}
CDDPDEF const char *cddp_result_name(cddp_result r) {
  return (unsigned)r < CDDP__RESULT_COUNT ? cddp__result_names[r] : "not a cddp_result";
}

CDDPDEF const char *cddp_result_text(cddp_result r) {
  return (unsigned)r < CDDP__RESULT_COUNT ? cddp__result_texts[r] : "not a cddp_result";
}

CDDPDEF const char *cddp_error(void) { return cddp__error_text; }

CDDPDEF cddp_result cddp_init(cddp_group **out, const cddp_group_desc *desc) {
  cddp_group_desc zero;
  cddp_result r;
  if (out == NULL) return cddp__invalid("cddp_init", "out is NULL");
  *out = NULL;
  memset(&zero, 0, sizeof zero);
  if (desc == NULL) desc = &zero;
  if ((r = cddp__check_desc(desc)) != CDDP_OK) return r;
  r = cddp__init(out, desc);
  if (r == CDDP_OK) r = cddp__attach_device(out, desc);
  return r == CDDP_OK ? r : cddp__fail_in(r, "cddp_init: ");
}

CDDPDEF cddp_result cddp_group_split(cddp_group *g, int color, int key, cddp_group **out) {
  cddp__enter_call();
  if (out == NULL) return cddp__invalid("cddp_group_split", "out is NULL");
  *out = NULL;
  if (g == NULL) return cddp__invalid("cddp_group_split", "the group is NULL");
  cddp__engine_drain(g);
  {
    cddp_result r = cddp__check_group(g);
    return r != CDDP_OK ? r : cddp__split_planes(g, color, key, 0, out);
  }
}

CDDPDEF cddp_result cddp_group_new(cddp_group *g, const int *ranks, int count, cddp_group **out) {
  int i, j, color = -1, key = 0;
  cddp_result r;
  cddp__enter_call();
  if (out == NULL) return cddp__invalid("cddp_group_new", "out is NULL");
  *out = NULL;
  if (g == NULL) return cddp__invalid("cddp_group_new", "the group is NULL");
  if (ranks == NULL || count < 1)
    return cddp__invalid("cddp_group_new", "the list of ranks is empty");
  for (i = 0; i < count; i++) {
    if (ranks[i] < 0 || ranks[i] >= g->size)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "cddp_group_new: rank %d is not in the group (0 to %d)", ranks[i],
                        g->size - 1);
    for (j = 0; j < i; j++)
      if (ranks[j] == ranks[i])
        return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_group_new: rank %d is listed twice",
                          ranks[i]);
    if (ranks[i] == g->rank) color = 0, key = i;
  }
  cddp__engine_drain(g);
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  return cddp__split_planes(
      g, color, key, cddp__hash64((uint64_t)count, ranks, (size_t)count * sizeof *ranks), out);
}

CDDPDEF cddp_group *cddp_at(cddp_group *g, const char *file, int line) {
  cddp__next_site.file = file;
  cddp__next_site.line = line;
  return g;
}

CDDPDEF cddp_ddp *cddp_ddp_at(cddp_ddp *d, const char *file, int line) {
  cddp_at(NULL, file, line);
  return d;
}

CDDPDEF void cddp_destroy(cddp_group *g) {
#ifdef CDDP_CUDA
  bool device = g != NULL && g->backend != NULL;
#endif
  if (g != NULL) cddp__group_leave(g);
#ifdef CDDP_CUDA
  if (device) cddp__await_endings();
#endif
}

CDDPDEF int cddp_rank(const cddp_group *g) { return g != NULL ? g->rank : -1; }
CDDPDEF int cddp_world_size(const cddp_group *g) { return g != NULL ? g->size : -1; }
CDDPDEF int cddp_local_rank(const cddp_group *g) { return g != NULL ? g->number : -1; }
CDDPDEF int cddp_local_world_size(const cddp_group *g) { return g != NULL ? g->locals : -1; }

CDDPDEF void *cddp_alloc(cddp_group *g, size_t bytes) {
  if (g == NULL) {
    cddp__invalid("cddp_alloc", "the group is NULL");
    return NULL;
  }
  if (g->backend != NULL) return g->backend->alloc(g, bytes);
  return cddp__arena_alloc(g->host, bytes);
}

CDDPDEF void cddp_free(cddp_group *g, void *p) {
  if (g == NULL) return;
  if (g->backend != NULL)
    g->backend->release(g, p);
  else
    cddp__arena_free(g->host, p);
}

CDDPDEF cddp_result cddp_set_device(cddp_group *g, const char *device, const char *backend) {
  cddp_group_desc d;
  cddp_result r;
  memset(&d, 0, sizeof d);
  d.device = device;
  d.backend = backend;
  if ((r = cddp__check_set_device(g, &d)) != CDDP_OK) return r;
  cddp__engine_drain(g);
  if ((r = cddp__check_group(g)) == CDDP_OK) r = cddp__give_device(g, &d);
  return r == CDDP_OK ? r : cddp__fail_in(r, "cddp_set_device: ");
}

CDDPDEF void cddp_set_stream(cddp_group *g, void *stream) {
  if (g != NULL && g->backend != NULL) g->backend->set_stream(g, stream);
}

CDDPDEF void *cddp_stream(const cddp_group *g) {
  return g != NULL && g->backend != NULL ? g->backend->stream(g) : NULL;
}

CDDPDEF cddp_result cddp_synchronize(cddp_group *g) {
  if (g == NULL) return cddp__invalid("cddp_synchronize", "the group is NULL");
  if (g->backend != NULL) return g->backend->synchronize(g);
  cddp__engine_drain(g);
  return cddp__check_group(g);
}

CDDPDEF void cddp_register_kernels(const cddp_kernels *kernels) {
  cddp__registered_kernels = kernels;
}

CDDPDEF cddp_result cddp_all_reduce(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                    cddp_op op, cddp_work **work) {
  return cddp__collective("cddp_all_reduce", g, CDDP__KIND_ALL_REDUCE, buf, buf, count, dtype, op,
                          -1, work);
}

CDDPDEF cddp_result cddp_reduce(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                cddp_op op, int root, cddp_work **work) {
  return cddp__collective("cddp_reduce", g, CDDP__KIND_REDUCE, buf, buf, count, dtype, op, root,
                          work);
}

CDDPDEF cddp_result cddp_broadcast(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                   int root, cddp_work **work) {
  return cddp__collective("cddp_broadcast", g, CDDP__KIND_BROADCAST, buf, buf, count, dtype,
                          CDDP_SUM, root, work);
}

CDDPDEF cddp_result cddp_all_gather(cddp_group *g, const void *send, void *recv,
                                    size_t count_per_rank, cddp_dtype dtype, cddp_work **work) {
  return cddp__collective("cddp_all_gather", g, CDDP__KIND_ALL_GATHER, send, recv, count_per_rank,
                          dtype, CDDP_SUM, -1, work);
}

CDDPDEF cddp_result cddp_gather(cddp_group *g, const void *send, void *recv, size_t count_per_rank,
                                cddp_dtype dtype, int root, cddp_work **work) {
  return cddp__collective("cddp_gather", g, CDDP__KIND_GATHER, send, recv, count_per_rank, dtype,
                          CDDP_SUM, root, work);
}

CDDPDEF cddp_result cddp_scatter(cddp_group *g, const void *send, void *recv, size_t count_per_rank,
                                 cddp_dtype dtype, int root, cddp_work **work) {
  return cddp__collective("cddp_scatter", g, CDDP__KIND_SCATTER, send, recv, count_per_rank, dtype,
                          CDDP_SUM, root, work);
}

CDDPDEF cddp_result cddp_reduce_scatter(cddp_group *g, const void *send, void *recv,
                                        size_t count_per_rank, cddp_dtype dtype, cddp_op op,
                                        cddp_work **work) {
  return cddp__collective("cddp_reduce_scatter", g, CDDP__KIND_REDUCE_SCATTER, send, recv,
                          count_per_rank, dtype, op, -1, work);
}

CDDPDEF cddp_result cddp_all_to_all(cddp_group *g, const void *send, void *recv,
                                    size_t count_per_rank, cddp_dtype dtype, cddp_work **work) {
  return cddp__collective("cddp_all_to_all", g, CDDP__KIND_ALL_TO_ALL, send, recv, count_per_rank,
                          dtype, CDDP_SUM, -1, work);
}

CDDPDEF cddp_result cddp_barrier(cddp_group *g) {
  return cddp__collective("cddp_barrier", g, CDDP__KIND_BARRIER, NULL, NULL, 0, CDDP_F32, CDDP_SUM,
                          -1, NULL);
}

CDDPDEF cddp_result cddp_send(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                              int peer, int tag, cddp_work **work) {
  cddp_work *w = NULL;
  cddp_result r = cddp__check_p2p("cddp_send", g, buf, count, dtype, peer, tag);
  uint64_t record;
  int parcel = -1;
  bool taken;
  cddp__enter_call();
  if (work != NULL) *work = NULL;
  if (r != CDDP_OK) return r;
  r = cddp__device_message(g, CDDP__KIND_SEND, buf, count, dtype, peer, tag, work, &taken);
  if (r != CDDP_OK || taken) return r;
  if (work != NULL && (w = cddp__work_new(g)) == NULL) return CDDP_OUT_OF_MEMORY;
  record = cddp__record_message(g, "send", count, dtype, peer, tag);
  r = cddp__start_send(g, buf, count, dtype, peer, tag, &parcel);
  if (w == NULL && r == CDDP_OK) r = cddp__finish_send(g, parcel);
  if (w == NULL || r != CDDP_OK) cddp__record_finish(g, record, r);
  if (w == NULL) return r;
  if (r != CDDP_OK) {
    cddp__free(&g->host->allocator, w);
    return r;
  }
  w->parcel = parcel;
  w->record = record;
  *work = w;
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_recv(cddp_group *g, void *buf, size_t count, cddp_dtype dtype, int peer,
                              int tag, cddp_work **work) {
  cddp_work *w;
  cddp_result r = cddp__check_p2p("cddp_recv", g, buf, count, dtype, peer, tag);
  bool taken;
  cddp__enter_call();
  if (work != NULL) *work = NULL;
  if (r != CDDP_OK || (r = cddp__check_group(g)) != CDDP_OK) return r;
  r = cddp__device_message(g, CDDP__KIND_RECV, buf, count, dtype, peer, tag, work, &taken);
  if (r != CDDP_OK || taken) return r;
  if ((w = cddp__work_new(g)) == NULL) return CDDP_OUT_OF_MEMORY;
  w->is_recv = true;
  w->pending.buf = buf;
  w->pending.count = count;
  w->pending.dtype = dtype;
  w->pending.peer = peer;
  w->pending.tag = tag;
  w->record = cddp__record_message(g, "recv", count, dtype, peer, tag);
  cddp__post_pending(g, &w->pending);
  if (work == NULL) return cddp__work_wait(w);
  *work = w;
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_wait(cddp_work *w) {
  return w != NULL ? cddp__work_wait(w) : cddp__invalid("cddp_wait", "the work is NULL");
}

CDDPDEF cddp_result cddp_test(cddp_work *w, bool *done) {
  if (w == NULL || done == NULL) return cddp__invalid("cddp_test", "the work or done is NULL");
  *done = cddp__work_done(w);
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_spawn(int (*fn)(int rank, void *arg), void *arg, int nprocs) {
  if (fn == NULL) return cddp__invalid("cddp_spawn", "fn is NULL");
  if (nprocs < 1 || nprocs > CDDP__MAX_RANKS)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_spawn: nprocs is %d; it must be from 1 to %d",
                      nprocs, CDDP__MAX_RANKS);
  return cddp__spawn(fn, arg, nprocs);
}

CDDPDEF cddp_result cddp_launch(const cddp_launch_desc *desc, cddp_launch_report *report) {
  cddp_launch_report ignored;
  cddp_result r = cddp__check_launch(desc);
  if (report == NULL) report = &ignored;
  memset(report, 0, sizeof *report);
  report->rank = -1;
  return r == CDDP_OK ? cddp__launch_all(desc, report) : r;
}

CDDPDEF cddp_result cddp_run_threads(int (*fn)(cddp_group *g, void *arg), void *arg, int n) {
  if (fn == NULL) return cddp__invalid("cddp_run_threads", "fn is NULL");
  if (n < 1 || n > CDDP__MAX_RANKS)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_run_threads: n is %d; it must be from 1 to %d",
                      n, CDDP__MAX_RANKS);
  return cddp__run_threads(fn, arg, n);
}
static cddp_result cddp__check_params(const char *function, const cddp_param *params, int count,
                                      bool buffers) {
  char space[24];
  int i;
  if (count < 0 || (count == 0 && !buffers))
    return cddp__invalid(function, "there are no parameters");
  if (params == NULL && count > 0) return cddp__invalid(function, "params is NULL");
  for (i = 0; i < count; i++) {
    const char *name = cddp__param_name(&params[i], i, space, sizeof space);
    cddp_dtype t = params[i].dtype;
    if (!cddp__dtype_ok(t) || (!buffers && t > CDDP_BF16))
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: parameter \"%s\" must be f32, f64, f16 or bf16",
                        function, name);
    if (params[i].data == NULL && params[i].count > 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: parameter \"%s\" has data NULL", function,
                        name);
    if (params[i].count > SIZE_MAX / 64)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: parameter \"%s\" has too many elements",
                        function, name);
  }
  return CDDP_OK;
}

static cddp_result cddp__check_sparse(const char *function, const cddp_param *params, int count,
                                      const size_t *rows) {
  char space[24];
  int i;
  for (i = 0; rows != NULL && i < count; i++) {
    const char *name = cddp__param_name(&params[i], i, space, sizeof space);
    if (rows[i] == 0) continue;
    if (params[i].count == 0 || params[i].count % rows[i] != 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s: parameter \"%s\" cannot have %zu sparse rows, with %zu elements",
                        function, name, rows[i], params[i].count);
    if (params[i].grad != NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s: parameter \"%s\" has sparse rows; its grad must be NULL", function,
                        name);
  }
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_ddp_create(cddp_ddp **out, cddp_group *g, cddp_param *params, int count,
                                    const cddp_ddp_desc *desc) {
  static const char name[] = "cddp_ddp_create";
  cddp_ddp_desc zero;
  cddp_ddp *d;
  cddp_result r;
  cddp__enter_call();
  if (out == NULL) return cddp__invalid(name, "out is NULL");
  *out = NULL;
  memset(&zero, 0, sizeof zero);
  if (desc == NULL) desc = &zero;
  if (g == NULL) return cddp__invalid(name, "the group is NULL");
  if ((r = cddp__check_params(name, params, count, false)) != CDDP_OK) return r;
  if ((r = cddp__check_params(name, desc->buffers, desc->buffer_count, true)) != CDDP_OK) return r;
  if ((r = cddp__check_sparse(name, params, count, desc->sparse_rows)) != CDDP_OK) return r;
  if (g->backend != NULL && desc->sparse_rows != NULL)
    return cddp__fail(CDDP_UNSUPPORTED, "%s: no sparse gradients on a GPU in this version", name);
  if (!(desc->bucket_cap_mb >= 0 && desc->first_bucket_mb >= 0))
    return cddp__invalid(name, "a bucket size is negative");
  cddp__engine_drain(g);
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if ((d = cddp__ddp_new(g, params, count, desc)) == NULL) return CDDP_OUT_OF_MEMORY;
  r = d->backend != NULL ? d->backend->ddp_join(d) : cddp__ddp_join(d);
  if (r != CDDP_OK) {
    char text[CDDP__ERROR_MAX];
    snprintf(text, sizeof text, "%s", cddp__error_text);
    if (d->backend != NULL) d->backend->ddp_leave(d);
    cddp__ddp_free(d);
    return cddp__fail(r, "%s: %s", name, text);
  }
  *out = d;
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_ddp_ready(cddp_ddp *d, int param) {
  if (d == NULL) return cddp__invalid("cddp_ddp_ready", "the cddp_ddp is NULL");
  if (param < 0 || param >= d->count)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_ddp_ready: param is %d; there are %d", param,
                      d->count);
  if (d->params[param].grad == NULL && cddp__dense_count(d, param) > 0)
    return cddp__invalid("cddp_ddp_ready", "the parameter's grad is NULL");
  return d->backend != NULL ? d->backend->ddp_ready(d, param) : cddp__ddp_ready(d, param);
}

CDDPDEF cddp_result cddp_ddp_add_rows(cddp_ddp *d, int param, const int64_t *rows,
                                      const void *values, size_t n) {
  static const char name[] = "cddp_ddp_add_rows";
  char space[24];
  const char *what;
  cddp__sparse *s;
  size_t i;
  if (d == NULL) return cddp__invalid(name, "the cddp_ddp is NULL");
  if (param < 0 || param >= d->count)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: param is %d; there are %d", name, param,
                      d->count);
  what = cddp__param_name(&d->params[param], param, space, sizeof space);
  if ((s = cddp__sparse_of(d, param)) == NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s: parameter \"%s\" is dense; set sparse_rows in cddp_ddp_desc", name,
                      what);
  if (n > 0 && (rows == NULL || values == NULL))
    return cddp__invalid(name, "rows or values is NULL");
  for (i = 0; i < n; i++)
    if (rows[i] < 0 || (uint64_t)rows[i] >= s->rows)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s: row %" PRId64 " of parameter \"%s\", which has rows 0 to %zu", name,
                        rows[i], what, s->rows - 1);
  if (n > SIZE_MAX / 4 / (s->bytes + 64))
    return cddp__invalid(name, "n is beyond the address space");
  return cddp__rows_add(&d->group->host->allocator, &s->added, s->bytes, rows, values, n);
}

CDDPDEF size_t cddp_ddp_rows(const cddp_ddp *d, int param, const int64_t **rows,
                             const void **values) {
  const cddp__sparse *s =
      d != NULL && param >= 0 && param < d->count ? cddp__sparse_of(d, param) : NULL;
  if (rows != NULL) *rows = s != NULL ? s->mean.number : NULL;
  if (values != NULL) *values = s != NULL ? s->mean.values : NULL;
  return s != NULL ? s->mean.n : 0;
}

CDDPDEF cddp_result cddp_ddp_wait(cddp_ddp *d) {
  cddp_result r;
  cddp__enter_call();
  if (d == NULL) return cddp__invalid("cddp_ddp_wait", "the cddp_ddp is NULL");
  r = d->backend != NULL ? d->backend->ddp_wait(d) : cddp__ddp_wait(d);
  return r == CDDP_INVALID_ARGUMENT ? cddp__fail_in(r, "cddp_ddp_wait: ") : r;
}

/* Whether s may step d: made for the same parameters, not in use by another cddp_ddp. */
static cddp_result cddp__check_pair(const char *name, const cddp_ddp *d, const cddp_sgd *s) {
  cddp_result r = CDDP_OK;
  int i;
  if (s->params != d->params || s->count != d->count)
    return cddp__invalid(name, "the cddp_sgd was made for other parameters than the cddp_ddp");
  if (s->shard != NULL && ((cddp__shard *)s->shard)->ddp != d)
    return cddp__invalid(name, "the cddp_sgd already steps another cddp_ddp");
  if (d->no_sync)
    return cddp__invalid(name,
                         "no_sync is on; switch it off for the backward pass that is stepped");
  for (i = 0; i < d->count && r == CDDP_OK; i++)
    if (cddp__sparse_of(d, i) != NULL) r = cddp__sgd_check_rows(s, i);
  return r == CDDP_OK ? r : cddp__fail_in(r, "%s: ", name);
}

CDDPDEF cddp_result cddp_ddp_step(cddp_ddp *d, cddp_sgd *s) {
  static const char name[] = "cddp_ddp_step";
  cddp_result r;
  cddp__enter_call();
  if (d == NULL || s == NULL) return cddp__invalid(name, "the cddp_ddp or the cddp_sgd is NULL");
  if ((r = cddp__check_pair(name, d, s)) != CDDP_OK) return r;
  r = d->backend != NULL ? d->backend->ddp_step(d, s) : cddp__ddp_step(d, s);
  return r == CDDP_INVALID_ARGUMENT ? cddp__fail_in(r, "%s: ", name) : r;
}

CDDPDEF cddp_result cddp_ddp_join(cddp_ddp *d, cddp_sgd *s) {
  static const char name[] = "cddp_ddp_join";
  char space[24];
  cddp_result r;
  int i;
  cddp__enter_call();
  if (d == NULL) return cddp__invalid(name, "the cddp_ddp is NULL");
  if (d->backend != NULL)
    return cddp__fail(CDDP_UNSUPPORTED, "%s: models on a GPU cannot join in this version", name);
  if (s != NULL && (r = cddp__check_pair(name, d, s)) != CDDP_OK) return r;
  if (d->no_sync) return cddp__invalid(name, "no_sync is on; end the step that it began first");
  for (i = 0; i < d->count && !d->failed; i++)
    if (d->tensors[i].ready || d->tensors[i].noted)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s: parameter \"%s\" is ready; end the step that it belongs to first",
                        name, cddp__param_name(&d->params[i], i, space, sizeof space));
  r = cddp__join_steps(d, s);
  return r == CDDP_INVALID_ARGUMENT ? cddp__fail_in(r, "%s: ", name) : r;
}

CDDPDEF int cddp_ddp_present(const cddp_ddp *d) { return d != NULL ? d->present : -1; }

CDDPDEF void cddp_ddp_no_sync(cddp_ddp *d, bool on) {
  if (d == NULL) return;
  pthread_mutex_lock(&d->lock);
  d->no_sync = on;
  pthread_mutex_unlock(&d->lock);
}

CDDPDEF cddp_result cddp_ddp_clip_grad_norm(cddp_ddp *d, double max_norm, double *norm) {
  if (d == NULL) return cddp__invalid("cddp_ddp_clip_grad_norm", "the cddp_ddp is NULL");
  if (!(max_norm > 0)) return cddp__invalid("cddp_ddp_clip_grad_norm", "max_norm must be above 0");
  return d->backend != NULL ? d->backend->ddp_clip(d, max_norm, norm)
                            : cddp__clip(d, max_norm, norm);
}

CDDPDEF cddp_result cddp_ddp_sync_buffers(cddp_ddp *d) {
  cddp__enter_call();
  if (d == NULL) return cddp__invalid("cddp_ddp_sync_buffers", "the cddp_ddp is NULL");
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (d->backend != NULL) return d->backend->ddp_sync_buffers(d);
  return cddp__sync_buffers(d);
}

CDDPDEF bool cddp_ddp_used(const cddp_ddp *d, int param) {
  return d != NULL && param >= 0 && param < d->count && d->used[param] != 0;
}

CDDPDEF int cddp_ddp_bucket_count(const cddp_ddp *d) {
  return d != NULL ? d->plan.bucket_count : -1;
}

CDDPDEF int cddp_ddp_bucket_params(const cddp_ddp *d, int bucket, int *params, int capacity) {
  int n, i;
  if (d == NULL || bucket < 0 || bucket >= d->plan.bucket_count) return -1;
  n = d->plan.offsets[bucket + 1] - d->plan.offsets[bucket];
  for (i = 0; params != NULL && i < n && i < capacity; i++)
    params[i] = d->plan.params[d->plan.offsets[bucket] + i];
  return n;
}

CDDPDEF void cddp_ddp_destroy(cddp_ddp *d) {
  if (d == NULL) return;
  if (d->backend != NULL) d->backend->ddp_leave(d);
  cddp__ddp_free(d);
}

CDDPDEF cddp_result cddp_bf16_compress_hook(cddp_bucket *bucket, void *user_data) {
  (void)user_data;
  if (bucket == NULL) return cddp__invalid("cddp_bf16_compress_hook", "the bucket is NULL");
  return cddp__compress_hook(bucket, CDDP_BF16);
}

CDDPDEF cddp_result cddp_fp16_compress_hook(cddp_bucket *bucket, void *user_data) {
  (void)user_data;
  if (bucket == NULL) return cddp__invalid("cddp_fp16_compress_hook", "the bucket is NULL");
  return cddp__compress_hook(bucket, CDDP_F16);
}

CDDPDEF cddp_result cddp_sgd_create(cddp_sgd **out, cddp_param *params, int count,
                                    const cddp_sgd_desc *desc) {
  cddp_result r = cddp__sgd_create(out, params, count, desc, NULL);
  if (r != CDDP_OK) return r;
  if (desc->ddp != NULL && (desc->ddp->params != params || desc->ddp->count != count)) {
    r = cddp__invalid("cddp_sgd_create", "desc.ddp was made for other parameters");
  } else {
    if (desc->ddp != NULL) {
      (*out)->used = desc->ddp->used;
      (*out)->sparse = desc->ddp->sparse;
    }
    r = cddp__attach_sgd(*out);
    if (r == CDDP_OK) r = cddp__write_copies(*out);
    if (r != CDDP_OK) cddp__fail_in(r, "cddp_sgd_create: ");
  }
  if (r != CDDP_OK) {
    cddp__sgd_free(*out);
    *out = NULL;
  }
  return r;
}
/* Words for a failure of either: which call, which file. */
static cddp_result cddp__checkpoint_failed(const char *function, const char *path, cddp_result r) {
  return cddp__fail_in(r, "%s(\"%.200s\"): ", function, path != NULL ? path : "NULL");
}

CDDPDEF cddp_result cddp_save(cddp_group *g, const char *path, const cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc) {
  cddp_checkpoint_desc zero;
  cddp_result r;
  cddp__enter_call();
  memset(&zero, 0, sizeof zero);
  if (desc == NULL) desc = &zero;
  if (g != NULL) cddp__engine_drain(g);
  r = cddp__check_checkpoint(g, path, params, count, desc);
  r = cddp__save(g, path, params, count, desc, r);
  return r == CDDP_OK ? r : cddp__checkpoint_failed("cddp_save", path, r);
}

CDDPDEF cddp_result cddp_load(cddp_group *g, const char *path, cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc) {
  cddp_checkpoint_desc zero;
  cddp_result r;
  cddp__enter_call();
  memset(&zero, 0, sizeof zero);
  if (desc == NULL) desc = &zero;
  if (g != NULL) cddp__engine_drain(g);
  r = cddp__check_checkpoint(g, path, params, count, desc);
  r = cddp__load(g, path, params, count, desc, r);
  if (r == CDDP_OK && desc->sgd != NULL) r = cddp__write_copies(desc->sgd);
  return r == CDDP_OK ? r : cddp__checkpoint_failed("cddp_load", path, r);
}

CDDPDEF cddp_result cddp_safetensors_open(cddp_safetensors **out, const char *path) {
  static const char name[] = "cddp_safetensors_open";
  uint64_t data_bytes = 0;
  cddp_safetensors *f;
  cddp_result r;
  if (out == NULL) return cddp__invalid(name, "out is NULL");
  *out = NULL;
  if (path == NULL) return cddp__invalid(name, "path is NULL");
  if ((f = cddp__st_new(NULL)) == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__st_open(f, path, &data_bytes);
  if (r == CDDP_OK) r = cddp__st_parse(f, data_bytes);
  if (r == CDDP_OK) *out = f;
  else cddp__st_close(f);
  return r == CDDP_OK ? r : cddp__checkpoint_failed(name, path, r);
}

CDDPDEF int cddp_safetensors_count(const cddp_safetensors *f) {
  return f != NULL ? (int)f->count : -1;
}

CDDPDEF cddp_result cddp_safetensors_get(const cddp_safetensors *f, int index,
                                         cddp_tensor_info *out) {
  static const char name[] = "cddp_safetensors_get";
  if (f == NULL || out == NULL) return cddp__invalid(name, "the file or out is NULL");
  if (index < 0 || (size_t)index >= f->count)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s: index is %d; the file has %zu tensors", name,
                      index, f->count);
  *out = f->tensors[index].info;
  return CDDP_OK;
}

CDDPDEF int cddp_safetensors_find(const cddp_safetensors *f, const char *name) {
  const cddp__st_tensor *t = f != NULL && name != NULL ? cddp__st_find(f, "", name) : NULL;
  return t != NULL ? (int)(t - f->tensors) : -1;
}

CDDPDEF cddp_result cddp_safetensors_read(const cddp_safetensors *f, int index, void *data,
                                          size_t bytes) {
  static const char name[] = "cddp_safetensors_read";
  cddp_tensor_info t;
  cddp_result r;
  memset(&t, 0, sizeof t); /* a compiler that does not see far believes it unset */
  if ((r = cddp_safetensors_get(f, index, &t)) != CDDP_OK) return r;
  if (bytes != t.bytes || (data == NULL && bytes > 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s: data is NULL, or has %zu bytes where the tensor has %" PRIu64, name,
                      bytes, t.bytes);
  r = cddp__read_at(f->fd, data, bytes, f->data_begin + t.begin);
  return r == CDDP_OK ? r : cddp__fail_in(r, "%s: ", name);
}

CDDPDEF const char *cddp_safetensors_metadata(const cddp_safetensors *f, const char *key) {
  return f != NULL && key != NULL ? cddp__st_value(f, key) : NULL;
}

CDDPDEF void cddp_safetensors_close(cddp_safetensors *f) { cddp__st_close(f); }
#endif /* CDDP_IMPLEMENTATION_DONE */
#endif /* CDDP_IMPLEMENTATION */

#if !defined(CDDP_NO_CALL_SITES) && !defined(CDDP__CALL_SITES) /* see CALL SITES in >>api */
#define CDDP__CALL_SITES
#define CDDP__AT(g) cddp_at((g), __FILE__, __LINE__)
#define CDDP__DDP_AT(d) cddp_ddp_at((d), __FILE__, __LINE__)
#define cddp_all_reduce(g, ...) cddp_all_reduce(CDDP__AT(g), __VA_ARGS__)
#define cddp_reduce(g, ...) cddp_reduce(CDDP__AT(g), __VA_ARGS__)
#define cddp_broadcast(g, ...) cddp_broadcast(CDDP__AT(g), __VA_ARGS__)
#define cddp_all_gather(g, ...) cddp_all_gather(CDDP__AT(g), __VA_ARGS__)
#define cddp_gather(g, ...) cddp_gather(CDDP__AT(g), __VA_ARGS__)
#define cddp_scatter(g, ...) cddp_scatter(CDDP__AT(g), __VA_ARGS__)
#define cddp_reduce_scatter(g, ...) cddp_reduce_scatter(CDDP__AT(g), __VA_ARGS__)
#define cddp_all_to_all(g, ...) cddp_all_to_all(CDDP__AT(g), __VA_ARGS__)
#define cddp_barrier(g) cddp_barrier(CDDP__AT(g))
#define cddp_send(g, ...) cddp_send(CDDP__AT(g), __VA_ARGS__)
#define cddp_recv(g, ...) cddp_recv(CDDP__AT(g), __VA_ARGS__)
#define cddp_group_split(g, ...) cddp_group_split(CDDP__AT(g), __VA_ARGS__)
#define cddp_group_new(g, ...) cddp_group_new(CDDP__AT(g), __VA_ARGS__)
#define cddp_ddp_create(out, g, ...) cddp_ddp_create(out, CDDP__AT(g), __VA_ARGS__)
#define cddp_ddp_wait(d) cddp_ddp_wait(CDDP__DDP_AT(d))
#define cddp_ddp_step(d, s) cddp_ddp_step(CDDP__DDP_AT(d), s)
#define cddp_ddp_sync_buffers(d) cddp_ddp_sync_buffers(CDDP__DDP_AT(d))
#define cddp_save(g, ...) cddp_save(CDDP__AT(g), __VA_ARGS__)
#define cddp_load(g, ...) cddp_load(CDDP__AT(g), __VA_ARGS__)
#define cddp_ddp_join(d, s) cddp_ddp_join(CDDP__DDP_AT(d), s)
#endif

/* >>history ---------------------------------------------------------------------------------------
   0.2 (2026-11)  GPUs: NCCL backend, cddp_kernels.cuh, ranks that share a GPU (not yet run
                  on a real one)
                  how a rank died and where each rank made its call; flight recorder; cddp_launch;
                  the variables of mpirun and srun; unix://name; cddp_launcher_rank; ranks that die,
                  fail or are there twice while they meet are named to the others at once;
                  ranks on several hosts, by TCP; backend "mpi" (CDDP_MPI, CDDP_BACKEND);
                  device "cuda" on several hosts, checkpoints of a GPU's memory, cddp_set_device;
                  checkpoints: cddp_save, cddp_load, cddp_safetensors_*;
                  cddp_ddp_join; sparse gradients; f16 and bf16 copies of f32 weights; AVX-512;
                  cddp_ddp_step in one loop
   0.1 (2026-11)  CPU backend on one host, DDP, SGD, sampler, spawn, store */

/* >>license ---------------------------------------------------------------------------------------

   This software is available under 2 licenses. Choose whichever you prefer.

   ------------------------------------------------------------------------------
   ALTERNATIVE A - MIT License

   Copyright (c) 2026 the cddp authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of
   this software and associated documentation files (the "Software"), to deal in
   the Software without restriction, including without limitation the rights to
   use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies
   of the Software, and to permit persons to whom the Software is furnished to do
   so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
   SOFTWARE.

   ------------------------------------------------------------------------------
   ALTERNATIVE B - Public Domain (www.unlicense.org)

   This is free and unencumbered software released into the public domain.

   Anyone is free to copy, modify, publish, use, compile, sell, or distribute this
   software, either in source code form or as a compiled binary, for any purpose,
   commercial or non-commercial, and by any means.

   In jurisdictions that recognize copyright laws, the author or authors of this
   software dedicate any and all copyright interest in the software to the public
   domain. We make this dedication for the benefit of the public at large and to
   the detriment of our heirs and successors. We intend this dedication to be an
   overt act of relinquishment in perpetuity of all present and future rights to
   this software under copyright law.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
   ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION
   WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
