/* cddp.h - v0.3 - DistributedDataParallel for C, C++ and CUDA programs
   Public domain or MIT, at your choice (end of file). No warranty; use at your own risk.

   Do this in ONE C or C++ file, before its other includes, and link -lpthread -lm:

       #define CDDP_IMPLEMENTATION
       #include "cddp.h"

   Every other file just includes "cddp.h". Your own training loop becomes data parallel by six
   calls:

       #define TRY(call) if (call) return fprintf(stderr, "%s\n", cddp_error()), 1
       static int train(int rank, void *arg) {
         cddp_group *g; cddp_ddp *ddp; cddp_optim *sgd; cddp_sgd_desc o = {0};
         TRY(cddp_init(&g, NULL));                      // 1  finds the other ranks
         float *w = cddp_alloc(g, N * sizeof *w);       //    malloc'ed weights work too
         init_weights(w, 42);                           //    rank 0's values win anyway
         cddp_param p[] = {{"w", w, NULL, N, CDDP_F32}}; //   grad NULL: pointed into a bucket
         TRY(cddp_ddp_create(&ddp, g, p, 1, NULL));     // 2  same weights everywhere
         o.lr = 0.1, o.momentum = 0.9;
         TRY(cddp_sgd_create(&sgd, p, 1, &o));          // 3
         for (int step = 0; step < STEPS; step++) {
           backward(w, p[0].grad, my_batch(cddp_rank(g), step)); // adds to the gradient
           TRY(cddp_ddp_ready(ddp, 0));                 // 4  its bucket may start reducing
           TRY(cddp_ddp_step(ddp, sgd));                // 5  mean over ranks, SGD, zero gradients
         }
         cddp_optim_destroy(sgd); cddp_ddp_destroy(ddp); cddp_free(g, w); cddp_destroy(g);   // 6
         return 0;
       }
       int main(void) {
         if (cddp_launcher_rank() >= 0) return train(0, NULL); // torchrun, mpirun, srun: a rank
         TRY(cddp_spawn(train, NULL, 2));                      // alone: forks two ranks
         return 0;
       }

   Which rank a process is, cddp_rank(g) says, however it was started: cddp_init(&g, NULL) reads
   RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a script of yours may set them), or what its
   launcher set. All ranks end with the same weights, bit for bit. Seeding is yours: give each rank
   its own data and its own seed for dropout and augmentation (say seed + cddp_rank(g)), and all
   ranks the same seed for weights and for cddp_sampler.

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
   this one), and CDDP_BACKEND (cpu or mpi).

   CONTENTS: search for the mark
     >>api          the public interface, with the rules of each call
     >>design       how it works: memory, steps, the canonical sum, threads, failure
     >>config       limits and tunables             >>structs      private structs and their owners
     >>hooks        calls from rooms further down   >>base         errors, memory, clock, threads
     >>record       the flight recorder             >>bytes        little-endian, hashes, HMAC
     >>sockets      addresses, non-blocking I/O     >>store        key-value store: TCP and file
     >>discovery    rank and address
     >>arena        memory shared by a host's ranks >>reduce       sums in canonical order (pure)
     >>plan         slices and buckets (pure)       >>shape        what a collective moves (pure)
     >>round        rounds in shared memory          >>links        connections between hosts
     >>rendezvous   how ranks and hosts meet        >>p2p          send and recv
     >>hosts        steps, collectives across hosts >>mpi          collectives by MPI
     >>work         asynchronous operations         >>collectives  all_reduce and the others
     >>groups       creation, split, destruction    >>sparse       gradients that are rows (pure)
     >>optim        SGD and AdamW                   >>device       groups whose ranks have GPUs
     >>kernels      optimizers on devices           >>ddp          distributed data parallel
     >>elastic      ranks are lost, and come        >>sampler      DistributedSampler
     >>safetensors  a file's header (pure)          >>checkpoint   save and load
     >>spawn        processes and threads as ranks  >>public       arguments; the public functions
     >>history      changes                         >>license      the terms
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

#define CDDP_VERSION 300 /* major * 10000 + minor * 100 + patch */

#ifdef CDDP_STATIC
#define CDDPDEF static
#else
#define CDDPDEF extern
#endif

/* Calls after whose failure training goes wrong unseen: compilers warn where it is not looked at.
   Define it as nothing if you do not want that. */
#ifndef CDDP_CHECKED
#define CDDP_CHECKED __attribute__((warn_unused_result))
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
  X(CDDP_UNSUPPORTED, "unsupported")               /* in this build, on this machine, or here */ \
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
   sums and products wrap around. MIN and MAX give NaN when any input is NaN, as PyTorch's do. BAND,
   BOR and BXOR are bitwise and, or and exclusive or of integers: CDDP_INVALID_ARGUMENT for floats,
   CDDP_UNSUPPORTED with NCCL, which has none (as in PyTorch). */
typedef enum cddp_op {
  CDDP_SUM, CDDP_AVG, CDDP_PROD, CDDP_MIN, CDDP_MAX, CDDP_BAND, CDDP_BOR, CDDP_BXOR
} cddp_op;

CDDPDEF size_t cddp_dtype_size(cddp_dtype dtype); /* bytes of an element; 0 if it is no dtype */

typedef struct cddp_group cddp_group; /* torch.distributed.ProcessGroup, MPI_Comm */
typedef struct cddp_work cddp_work;   /* an operation in flight: distributed.Work */
typedef struct cddp_ddp cddp_ddp;     /* nn.parallel.DistributedDataParallel */
typedef struct cddp_optim cddp_optim; /* torch.optim.Optimizer */
typedef struct cddp_store cddp_store; /* a key-value store: torch.distributed.Store */

/* GROUPS. -----------------------------------------------------------------------------------------
   THREADS. Several threads of a rank may at once
     - call anything on different groups: each thread splits, uses and destroys groups of its own
     - beside a collective of another thread, on the same group: send, receive, allocate, free, ask
       for rank and size; wait for, test and cancel handles, each its own, whoever made it
     - call cddp_ddp_ready and cddp_ddp_add_rows, each for a parameter of its own, but not beside
       the other functions of that cddp_ddp
     - use one store, and read with cddp_safetensors_*.
   One thread at a time, in the same order on every rank: what is collective over a group, with a
   handle or without. (A cddp_ddp has groups of its own: its steps may run beside collectives.) One
   thread at a time: the rest of a cddp_ddp, a cddp_optim, a sampler. Destroy nothing that another
   thread is using. cddp_error is each thread's own. Do not pthread_cancel a thread in a call, but
   in cddp_recv without a handle. On GPUs see ORDER.
   FAILURES. After a failure that involves a peer the group is broken: each further call returns
   that failure at once, cddp_destroy never hangs, and a new group may be made. Buffers are the
   caller's again when the call returns its failure. A peer on this host that was stopped in the
   middle (SIGSTOP, a frozen container) is given 5 s. Then this rank's memory from cddp_alloc and
   its gradients become private: same addresses, same bytes, and nothing that the peer writes when
   it goes on arrives there. Collectives use them like malloc'ed memory from then on; what used
   them at that moment in other groups, and every cddp_ddp made before, returns CDDP_ABORTED. The
   copies take as much memory again, until cddp_free. (Threads of cddp_run_threads stop together.)
   FORK, EXEC: a group or store does not survive fork(): the child may use none of its calls, and
   its copies of cddp's sockets are closed. Memory from cddp_alloc of a group of several ranks is
   not there in the child at all (MADV_DONTFORK): a forked data loader that reads it gets SIGSEGV.
   Give the child a copy in malloc'ed memory. A rank that executes another program is noticed at
   once by other hosts, on its own host by the deadline only. */

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
  const char *secret;       /* NULL = CDDP_SECRET from the environment, else none; see SECRET */
  cddp_allocator allocator; /* for what cddp allocates for this group, shared memory excepted */
  cddp_logger logger;
} cddp_group_desc;

/* Finds the other ranks and forms the group. Blocks until all world_size ranks are there or
   timeout_s has passed; ranks may start in any order. desc NULL = all defaults. Like
   torch.distributed.init_process_group.
     env://          RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; none of them set = one rank alone.
                     Rank 0 listens at MASTER_ADDR:MASTER_PORT until all have met (on all addresses
                     of its host if that name means loopback there, as Debian's 127.0.1.1); while
                     its group lives the system gives the port to nobody else.
                     The variables of srun and mpirun (Open MPI, MPICH, Intel MPI) work too. On one
                     host their ranks meet without a port. On several, srun's meet at the step's
                     first node, on a port derived from job and step unless MASTER_PORT is set
                     (srun -m arbitrary needs --export=ALL,MASTER_ADDR=HOST, with rank 0's host);
                     mpirun's need MASTER_ADDR
     tcp://h:p       the same with this address; rank and world_size from desc (or the variables)
     unix://name     an abstract Unix socket of that name: one host, no port, no file
     file:///path    a file of this job's own, seen by all its hosts, on a file system with locks.
                     Rank 0 writes where it listens, and a key: only who may read the file gets in;
                     a secret is asked for besides. It holds a lock on the file until all have met,
                     then removes it. A file that a crashed job left is recognised and reused.
                     Refused: symbolic links, files with other names, another user's, and those
                     that others may write
   BACKEND "mpi" is for a fabric that only MPI knows: built by mpicc -DCDDP_MPI and started by
   mpirun. Ranks still meet and watch each other over shared memory and TCP, so mismatches and dead
   ranks are seen as ever, and calls of a few bytes and cddp_send stay there; larger collectives and
   the gradients go to MPI, in its order of sums.
   TWO JOBS must not use one place at once: give each a MASTER_PORT of its own. What launchers tell
   of the job keeps their jobs apart. Ranks started by hand, and Hydra's on several hosts, bring
   nothing but the address and CDDP_SECRET, so a group may form out of ranks of two jobs. A process
   whose rank is taken there by a living process of its user gets CDDP_INVALID_ARGUMENT, "two jobs
   use port N at once", and so do the ranks there while they meet and in the first 10 s of their
   group, which may be mixed. A mixed group goes unnoticed if it, or those 10 s, end before the rest
   of both jobs starts.
   SEVERAL HOSTS. Any number of ranks on each; those of one share memory. Between hosts they talk by
   TCP over the interface on the route to rank 0's, on ports that the system chooses, unencrypted.
   Ranks in different process namespaces (containers of one pod) count as on several hosts;
   CDDP_HOST_ID keeps ranks of one host apart. A host's first rank to come needs a descriptor for
   each other one there while they meet.
   Version, WORLD_SIZE, backend and floating-point mode (FTZ, DAZ, rounding) must be alike:
   CDDP_MISMATCH. A file size limit (ulimit -f) also limits what ranks share by cddp_alloc: each the
   limit over local ranks + 1. Not to be called while another thread changes the environment. *out
   is NULL on failure.
   SECRET. Without one, whoever can reach rank 0's port may read and change what the ranks tell each
   other there, or take a rank's place; while they meet, strangers cost rank 0 at most 1.5 GiB of
   memory, and never its last descriptors. With one, both ends of a connection prove at its begin
   that they know the secret, without showing it. That keeps out who can only connect, but neither a
   machine on the path between two hosts (nothing is encrypted or signed after the proofs) nor who
   guesses the secret: an impostor of rank 0 gets something to test guesses on. Take 128 random
   bits: CDDP_SECRET=$(head -c 16 /dev/urandom | base64). */
CDDPDEF cddp_result cddp_init(cddp_group **out, const cddp_group_desc *desc);

/* The rank that a launcher (torchrun, cddprun, srun, mpirun) gave this process, the one that
   cddp_init(&g, NULL) will find; -1 when none started it, nor a command typed into an interactive
   shell of Slurm (srun --pty bash). 0 when the launcher's variables are wrong, which cddp_init then
   explains. cddp_spawn forks in any case; a program that starts in every way:

       int rank = cddp_launcher_rank();
       if (rank >= 0) return train(rank, NULL);
       return cddp_spawn(train, NULL, 2) ? fprintf(stderr, "%s\n", cddp_error()), 1 : 0; */
CDDPDEF int cddp_launcher_rank(void);

/* Collective over g: ranks that pass the same color (>= 0) form a group, ordered by (key, rank in
   g). A negative color takes part and gets *out = NULL. Like MPI_Comm_split. g must outlive the new
   group. */
CDDPDEF cddp_result cddp_group_split(cddp_group *g, int color, int key, cddp_group **out);

/* Collective over g: the listed ranks of g, in this order, form a group; every rank of g passes the
   same list. Ranks not listed get *out = NULL. Like torch.distributed.new_group. */
CDDPDEF cddp_result cddp_group_new(cddp_group *g, const int *ranks, int count, cddp_group **out);

/* Leaves the group and frees it; NULL is fine. Ranks still waiting for this one get CDDP_PEER_LOST.
   Local; blocks at most for a second, in which messages to other hosts, or word of a rank's death,
   do not move. Asynchronous work must have been waited for. */
CDDPDEF void cddp_destroy(cddp_group *g);

CDDPDEF int cddp_rank(const cddp_group *g);             /* 0 .. world_size - 1; -1 for NULL */
CDDPDEF int cddp_world_size(const cddp_group *g);       /* number of ranks; -1 for NULL */
CDDPDEF int cddp_local_rank(const cddp_group *g);       /* among the group's ranks on this host */
CDDPDEF int cddp_local_world_size(const cddp_group *g); /* ranks of the group on this host */

/* Memory that the backend reduces without a copy: shared with the ranks of this host, page-aligned,
   contents undefined. NULL when there is none (cddp_error says why). Local, any thread. Free it
   with the group it came from, after every operation on it and before that group is destroyed. A
   forked child does not have it: see FORK. It lies on huge pages, which take their memory at once,
   where MADV_COLLAPSE makes them (Linux 6.1) or
   /sys/kernel/mm/transparent_hugepage/shmem_enabled says advise. */
CDDPDEF void *cddp_alloc(cddp_group *g, size_t bytes);
CDDPDEF void cddp_free(cddp_group *g, void *p);

/* GPUS. -------------------------------------------------------------------------------------------
   With CDDP_CUDA and device "cuda" a rank has one GPU, which cddp's calls make the thread's current
   device. cddp_alloc gives device memory, parameters lie in device memory, and what is said here
   holds instead of what the other comments say of the CPU. In a build without CDDP_CUDA device
   "cuda" is CDDP_UNSUPPORTED.
     backend "nccl"   a GPU for each rank. Collectives, send and recv on device memory, and the data
                      parallel calls, are enqueued in stream order. The host waits for no device.
                      It waits for other ranks where groups and models are made, which connects
                      all that all-reduces need; in the first message to or from a rank, and the
                      first use of an algorithm that only another collective takes; in a model's
                      first step; and in each step of a model with find_unused_parameters,
                      uneven_inputs or sparse_rows. The first launch of a kernel that is not
                      cddp's may wait for the device, unless CUDA_MODULE_LOADING=EAGER is set.
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
   ARITHMETIC is NCCL's: equal bits on all ranks, but not the canonical sum: other numbers of ranks
   or GPUs, another version or setting of NCCL may give other bits. cddp_ddp_desc.shards makes a
   model's gradients canonical sums. MIN and MAX may pass over a NaN. Means of floats, and of a
   model's gradients, are sums that a kernel multiplies by 1/world_size, so that NVLink's switches
   may add; of f16, whose sums could overflow, NCCL multiplies operands by a power of two first.
   Without cddp_kernels.cuh they are NCCL's means, which in bf16 are off by up to 0.2 % unless
   world_size is a power of two.
   FAILURES. Two threads watch NCCL's and the device's errors, the other ranks' processes, their
   order of calls, and timeout_s (from an operation's enqueueing on; of an operation in a CUDA graph
   only cddp_synchronize and cddp_barrier do, from their beginning on). Calls of ranks on different
   hosts are compared where ranks meet in cddp_barrier or cddp_group_split: until then only the
   deadline ends what they disagree in. What is found (that ranks stepped with other settings, too:
   some milliseconds later) breaks the group on all ranks and aborts its communicator, so that
   streams, and a cudaStreamSynchronize on them, come to an end with undefined results;
   cddp_synchronize, cddp_wait and every later call return the failure. A cddp_ddp fails with its
   group, and takes it along. cddp_destroy waits for what is on the device,
   as long as the group is healthy, and with a process's last group up to two seconds for NCCL,
   which takes leave of the other ranks; a process that ends without it, while others have a graph
   with the group's operations, counts as lost.
   CUDA GRAPHS. A whole step can be captured after two eager ones like it (on a stream other than
   the default one, in mode thread-local or relaxed); ranks are not compared while capturing, all
   must capture and launch alike. The learning rate is the captured one. Destroy graphs before the
   cddp_ddp, the cddp_optim and the group, whose memory they use.
   ORDER. To NCCL all groups of a GPU are one queue: call the operations of all of them, ready() and
   the steps of a cddp_ddp included, from one thread at a time and in the same order on every rank.
   From NCCL 2.26 on NCCL_LAUNCH_ORDER_IMPLICIT=1 keeps the GPU to that order as well.
   FORKING. CUDA does not survive a fork: cddp_spawn comes first. Where cddp_kernels.cuh is linked,
   cddp_sgd_create without a cddp_ddp, cddp_save and cddp_load use CUDA too: they ask it where
   parameters lie.
   STATE OF THIS. No part of it has run on a real GPU yet: it was tested on a test double of CUDA
   and NCCL, and compiled by nvcc 13.0 with NCCL 2.28. tests/gpu/gpu.sh is for who has one. */

/* Collective over g, which has no device yet: gives it one, as cddp_init does for desc.device and
   desc.backend (the same words; backend NULL = "nccl"). For the groups of cddp_run_threads, where
   "cuda" is cuda:rank: one process, a GPU for each thread, as nn.DataParallel has it. Before the
   group's first cddp_alloc. After a failure g is what it was, or broken. */
CDDPDEF cddp_result cddp_set_device(cddp_group *g, const char *device, const char *backend);

/* The CUDA stream (a cudaStream_t) of g's operations, of a cddp_ddp on g and its cddp_optim; NULL:
   the legacy default stream. It must stay until another is set. Set it between steps: one stream
   for all ready() calls of a step. New sub-groups take their parent's. Does nothing for a group
   without a GPU. */
CDDPDEF void cddp_set_stream(cddp_group *g, void *stream);
CDDPDEF void *cddp_stream(const cddp_group *g); /* for a communication hook: bucket->group's */

/* Returns when all that is on g's stream has been done, or with the failure that prevents it: what
   to call instead of cudaStreamSynchronize. On the CPU: when asynchronous collectives are done. */
CDDPDEF cddp_result cddp_synchronize(cddp_group *g);

/* Device code for optimizers, clipping and compression, registered by cddp_kernels.cuh before main
   when one .cu file of the program includes it. Segments are in host memory, the caller's again
   after the return; all functions enqueue on stream (a cudaStream_t) and return a cudaError_t, 0
   being success. */
typedef struct cddp_segment { /* a stretch of a parameter, in device memory */
  void *data;     /* weights; NULL where not needed */
  void *grad;
  void *momentum; /* AdamW: exp_avg; NULL: none */
  size_t count;   /* elements */
  void *master;   /* NULL: none. Else data and grad are f16 or bf16, this and momentum f32 */
} cddp_segment;
typedef struct cddp_sgd_desc cddp_sgd_desc;
typedef struct cddp_adamw_step { /* of AdamW's step number t, from 1 */
  double step;   /* -lr / (1 - beta1^t) */
  double decay;  /* 1 - lr * weight_decay */
  double lerp;   /* 1 - beta1 */
  double keep;   /* beta2 */
  double take;   /* 1 - beta2 */
  double root;   /* sqrt(1 - beta2^t) */
  double eps;
  bool maximize, amsgrad;
  size_t stride; /* bytes from exp_avg to exp_avg_sq, and from there to max_exp_avg_sq */
} cddp_adamw_step;
enum {
  CDDP_SGD_FIRST = 1, /* momentum has no value yet */
  CDDP_SGD_ZERO = 2   /* then grad = 0 */
};
typedef struct cddp_kernels {
  int version;          /* CDDP_VERSION of the header they were compiled with */
  size_t scratch_bytes; /* device memory for squares, factor and scale */
  int (*load)(void);    /* loads all kernels to the thread's device */
  /* The gradient is grad * factor, rounded to dtype, then (clip not NULL) * clip[1], rounded. */
  int (*sgd)(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_sgd_desc *rule,
             double factor, const double *clip, unsigned flags, void *stream);
  int (*adamw)(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_adamw_step *rule,
               double factor, const double *clip, unsigned flags, void *stream); /* F32, F64;
                                                                        F16, BF16 with masters */
  /* copies[i][count] = data of segment i, f32, as f16 or bf16 */
  int (*copies)(const cddp_segment *s, void *const *copies, int n, cddp_dtype copy_dtype,
                void *stream);
  int (*convert)(void *to, cddp_dtype to_dtype, const void *from, cddp_dtype from_dtype, size_t n,
                 void *stream);
  /* scratch[0] = (add: +=) the sum of all grad squared, in an order that is always the same */
  int (*squares)(const cddp_segment *s, int n, cddp_dtype dtype, double *scratch, bool add,
                 void *stream);
  /* scratch[1] = min(1, max_norm / (sqrt(scratch[0]) + 1e-6)) */
  int (*factor)(double *scratch, double max_norm, void *stream);
  /* grad *= scratch[1], or factor if scratch is NULL */
  int (*scale)(const cddp_segment *s, int n, cddp_dtype dtype, double factor,
               const double *scratch, void *stream);
  /* out[count] = the canonical sum of n nodes, 1 to CDDP_NODES, of widths[i] shards each; a width's
     sign does not count. Nodes are in the type of computing: f64, or f32 for all others. With
     divisor 0 so is out, but the last node is of dtype; else out = sum / divisor, of dtype. */
  int (*sum)(void *out, cddp_dtype dtype, const void *const *nodes, const int *widths, int n,
             int divisor, size_t count, void *stream);
} cddp_kernels;
#define CDDP_NODES 256
CDDPDEF void cddp_register_kernels(const cddp_kernels *kernels); /* must stay where it is */

/* COLLECTIVES. ------------------------------------------------------------------------------------
   count and count_per_rank are elements, not bytes, the same on every rank; 0 is fine. Buffers are
   contiguous, in any memory, aligned to their element; memory from cddp_alloc saves a copy. send
   and recv of a call must not overlap, but for what its comment calls in place. work NULL: returns
   when the result is there and the buffers are the caller's again. Otherwise returns at once with
   *work set; the buffers belong to the operation until cddp_wait(*work). Operations of one group
   start in the order they were called. The result of a reduction has the same bits on every rank
   and in every run: see >>design. Errors: CDDP_PEER_LOST, CDDP_TIMEOUT, CDDP_OUT_OF_MEMORY,
     CDDP_INVALID_ARGUMENT  nothing was sent
     CDDP_MISMATCH          the ranks called different operations, passed different count, dtype, op
                            or root, or reduce floats in other rounding or FTZ modes; or two ranks
                            of one host wait for each other in different groups, one in cddp_save
                            and one in a model's step, say
   The latter is seen where each rank uses cddp from one thread and no comm_hook of the program's
   own; else, and between hosts, it times out. The time-out's text says in what call each late rank
   of the host waits, or which other group of the rank has failed before. */

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
/* As all_gather, with counts[world_size]: recv = every rank's send[counts[rank]], by rank, one
   behind the other. All ranks have the same counts; 0 is fine, and a buffer of none may be NULL. In
   place: send = recv + the counts before this rank's. The counts are the caller's again at once.
   Like all_gather with tensors of different sizes. */
CDDPDEF cddp_result cddp_all_gather_v(cddp_group *g, const void *send, void *recv,
                                      const size_t *counts, cddp_dtype dtype, cddp_work **work);
/* As all_to_all, with counts[world_size]: send has send_counts[r] elements for rank r, by rank, one
   behind the other, and recv gets recv_counts[r] from it. Not in place. Both _v calls begin with an
   exchange of counts: where rank r's send_counts[rank] is not this rank's recv_counts[r], all ranks
   get CDDP_MISMATCH, which names both, and no element moves. With NCCL the host waits for that
   exchange in the call, with a handle too; in a CUDA graph the counts stay what they were.
   Like all_to_all_single with split sizes. */
CDDPDEF cddp_result cddp_all_to_all_v(cddp_group *g, const void *send, const size_t *send_counts,
                                      void *recv, const size_t *recv_counts, cddp_dtype dtype,
                                      cddp_work **work);
/* Returns when every rank has called it. */
CDDPDEF cddp_result cddp_barrier(cddp_group *g);
/* The same with a handle: returns at once, cddp_wait(*work) when every rank has called either. On a
   GPU each rank comes to it once what is on its group's stream now has been done, and cddp_wait
   waits on the host. Like barrier(async_op=True). */
CDDPDEF cddp_result cddp_barrier_async(cddp_group *g, cddp_work **work);

/* POINT TO POINT. A recv takes the oldest send of that peer with that tag (any int >= 0); sends
   with other tags wait their turn. A send returns when the message is received if it is read in
   place: above 64 KiB, from cddp_alloc memory, to a rank of this host. Others are copied, and their
   send returns at once, unless 128 messages of this rank or 256 MiB of copies are on their way.
   With a work handle cddp_send always returns at once. Count and dtype of a send and its recv must
   agree: else CDDP_MISMATCH at the recv, and at the send or the sender's next call. Any thread. */
CDDPDEF cddp_result cddp_send(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                              int peer, int tag, cddp_work **work);
CDDPDEF cddp_result cddp_recv(cddp_group *g, void *buf, size_t count, cddp_dtype dtype, int peer,
                              int tag, cddp_work **work);
/* The peer of a cddp_recv that takes the message of any rank; ranks take turns, and what one sends
   keeps its order. Receives for one tag are served in the order of their calls, those from any rank
   among them. CDDP_PEER_LOST when a rank has died, or all others have left. (It is not -1: a rank
   that was looked up and not found stays an error.) CDDP_UNSUPPORTED for memory that NCCL receives
   into. Like recv(tensor) without src. */
#define CDDP_ANY INT32_MIN
/* The rank whose message this thread's last cddp_recv, or cddp_wait or _wait_for of one, received,
   in that call's group; -1: none yet. Not of what NCCL receives. Like the value of recv, and
   Work._source_rank. */
CDDPDEF int cddp_source(void);

/* Waits for w and frees it; returns the operation's own result. Handles may be waited for in any
   order and by any thread, one thread for each. A collective that has not begun runs on this
   thread, after those of its group that were called before it. */
CDDPDEF cddp_result cddp_wait(cddp_work *w);
/* As cddp_wait, for at most timeout_s seconds (0: only looks). CDDP_TIMEOUT always leaves w valid:
   the operation goes on, its group is not broken, and cddp_wait, cddp_wait_for or cddp_cancel must
   follow. (Where the operation itself has failed with CDDP_TIMEOUT, cddp_test says that it has
   ended.) Any other result has freed w. timeout_s stands in for the group's. On a device the host
   waits. Like torch.distributed's work.wait(timeout). */
CDDPDEF cddp_result cddp_wait_for(cddp_work *w, double timeout_s);
/* Gives up a cddp_recv whose message has not come, and frees w: its buffer is the caller's again,
   the group goes on, and the message, if it comes, is the next recv's. CDDP_UNSUPPORTED leaves w
   valid: its message has come (cddp_wait returns at once), or it is a send, a collective or with
   NCCL, which end by the other ranks, the group's timeout_s, or cddp_destroy of a rank. Never
   blocks. Any thread, but none may be waiting for w. Like MPI_Cancel with MPI_Wait. */
CDDPDEF cddp_result cddp_cancel(cddp_work *w);
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
  bool uneven_inputs;          /* GPUs with NCCL: ranks may call cddp_ddp_join, so that all hosts
                                  meet in each step; elsewhere they do in any case */
  const size_t *sparse_rows;   /* [count] rows of a parameter whose gradient comes by
                                  cddp_ddp_add_rows, 0 for others; NULL = none has any */
  int shards;                  /* parts of the global batch, see cddp_ddp_next_shard; at least one
                                  a rank. 0 = one a rank */
  bool elastic;                /* ranks may be lost, and come; shards = the most there can be */
  double max_grad_norm;        /* cddp_ddp_step scales the mean gradient to at most this global
                                  2-norm; 0 = it does not, INFINITY = for cddp_ddp_grad_norm only */
} cddp_ddp_desc;

/* Collective over g. Compares names, counts and dtypes with rank 0's (CDDP_MISMATCH names the first
   that differs), copies rank 0's data to all ranks and assigns gradients to buckets as PyTorch
   does. params must stay where it is until cddp_ddp_destroy; gradient pointers never move. data and
   grad may be in any memory: weights from cddp_alloc of g, and gradients that were NULL, are never
   copied. g must outlive the cddp_ddp. TIED WEIGHTS, of an embedding and the output layer say, are
   one cddp_param: both layers read its data and add to its grad, and cddp_ddp_ready follows the
   later of them. Parameters whose memory overlaps are CDDP_INVALID_ARGUMENT. */
CDDP_CHECKED
CDDPDEF cddp_result cddp_ddp_create(cddp_ddp **out, cddp_group *g, cddp_param *params, int count,
                                    const cddp_ddp_desc *desc);

/* SHARDS make the result independent of the number of ranks. With cddp_ddp_desc.shards = S the
   global batch of a step is S shards, numbered from 0. Each rank takes its shards with
   cddp_ddp_next_shard, contiguous ones, as many as the others or one more; 8 shards on 3 ranks are
   3, 3 and 2:
     int shard;
     while (cddp_ddp_next_shard(ddp, &shard)) {
       forward and backward of batch `shard` of the step; cddp_ddp_ready for every parameter
     }
     TRY(cddp_ddp_step(ddp, optim));
   The mean is over all shards and adds them up in an order that depends on S alone. After each step
   the weights have the same bits on any number of ranks from 1 to S: those of S ranks without
   shards. What the program does with a shard must itself depend on the step and the shard alone.
   With shards = 0 the same loop runs with one shard a rank, numbered as the rank.
   More shards than ranks: a rank that has k shards needs up to ceil(log2 k) + 1 more copies of the
   gradients, those of f16 and bf16 in f32, as sums are rounded once. Nothing is reduced while
   backward runs. Over several hosts, and with MPI, all ranks get all of these copies and add them
   up. On GPUs a rank has a copy more and needs cddp_kernels.cuh; ranks exchange copies as for an
   all-reduce, each adds up a part and all gather the means, with NCCL also if there are as many
   shards as ranks. The sums have the bits of the CPU's.
   With shards set, find_unused_parameters, uneven_inputs, comm_hook and cddp_ddp_join are
   CDDP_UNSUPPORTED, whatever the number of ranks; each rank's shards are ready, or the step fails.

   The next shard of this rank in this step: true, with *shard its number, or false when there is
   none left and cddp_ddp_wait or _step is due. Gradients are zero at the start of every shard but
   the first one, which begins with what the step before has left: zero after cddp_ddp_step. Call it
   when all cddp_ddp_ready of the last shard have returned; if a parameter lacks its own, or no_sync
   is on, the cddp_ddp fails. After a failure the result is false, and the following cddp_ddp_wait
   or _step returns it; these fail as well while shards are left. Never blocks on a peer. */
CDDPDEF bool cddp_ddp_next_shard(cddp_ddp *d, int *shard);

/* ELASTIC: the ranks that are there in this step. The group belongs to d and changes when ranks are
   lost or come: ask for it after each step that you use it in, at the same place on all ranks. Its
   rank 0 is a rank that is there. NULL: cddp_error() says why. */
CDDPDEF cddp_group *cddp_ddp_group(cddp_ddp *d);

/* How many cddp_ddp_wait and cddp_ddp_step d has completed, the same on all ranks; 0 for NULL. With
   cddp_checkpoint_desc.ddp a checkpoint has it, and cddp_load sets it. */
CDDPDEF uint64_t cddp_ddp_steps(const cddp_ddp *d);

/* Says that backward has written params[param].grad. When that fills a bucket, a thread of cddp's
   starts to reduce it while backward goes on; but on one CPU host, without a comm_hook, after a
   cddp_ddp_step the next one does all of it itself. Never blocks on a peer. Any order, any thread
   (each parameter once a shard). Twice in one shard: CDDP_INVALID_ARGUMENT, here and from
   cddp_ddp_wait or _step on all ranks, as the first call may have sent half a gradient. Under
   no_sync it only notes that the parameter was used. */
CDDPDEF cddp_result cddp_ddp_ready(cddp_ddp *d, int param);

/* Adds to the gradient of a parameter with sparse_rows, such as an embedding's weight: values[i *
   width ..] to row rows[i], width being count / sparse_rows. A row may come more than once, n may
   differ from rank to rank and be 0; copies. Then cddp_ddp_ready as for others. cddp_ddp_wait and
   _step send only these rows, past any comm_hook; the mean has the bits of a dense one. The
   parameter's grad stays NULL. SGD does what torch.optim.SGD does: without momentum the other rows
   are not touched, with it all are; weight_decay is CDDP_UNSUPPORTED, and cddp_optim_step needs
   cddp_sgd_desc.ddp. Any thread, one at a time for a parameter. On a GPU values may lie in either
   memory, rows in the host's; the call waits for the group's stream, a step's hosts meet, and SGD
   passes over the whole table. Like nn.Embedding(sparse=True). */
CDDPDEF cddp_result cddp_ddp_add_rows(cddp_ddp *d, int param, const int64_t *rows,
                                      const void *values, size_t n);

/* After cddp_ddp_wait, for an optimizer of yours: the mean gradient's rows, ascending, each once.
   Returns how many; the arrays are valid until the next wait, step or cddp_optim_zero_grad. On a
   GPU they are the host's, without what a clip has done. */
CDDPDEF size_t cddp_ddp_rows(const cddp_ddp *d, int param, const int64_t **rows,
                             const void **values);

/* Collective. Returns when every gradient is the mean over all ranks of what each had accumulated.
   A parameter without ready() is an error that names it, CDDP_INVALID_ARGUMENT, or CDDP_MISMATCH
   when others had it ready; with find_unused_parameters it counts as zero. After an error the
   cddp_ddp is broken, the group is not unless a peer was lost. One thread at a time, not at once
   with ready(). */
CDDP_CHECKED
CDDPDEF cddp_result cddp_ddp_wait(cddp_ddp *d);

/* cddp_ddp_wait, then cddp_optim_step, then zero gradients, in one pass over the bytes: each rank
   reduces its share, updates it and writes the new weights to all ranks of the host, keeping
   1/world_size of its states. Same bits as the three calls. With max_grad_norm in cddp_ddp_desc it
   clips before it updates, with the bits of cddp_ddp_clip_grad_norm between the first two: one pass
   over the gradients and one round of the host's ranks more; on a GPU the host waits for nothing.
   s must have been made for the same params array. Collective. On GPUs buckets are reduced while
   backward runs, as in cddp_ddp_wait, and one kernel then updates all weights on every rank, which
   keeps all of the states; needs cddp_kernels.cuh. */
CDDP_CHECKED
CDDPDEF cddp_result cddp_ddp_step(cddp_ddp *d, cddp_optim *s);

/* AN OPTIMIZER OF YOUR OWN, each rank for its part of the weights, with a part of the states, like
   torch.distributed.optim.ZeroRedundancyOptimizer and stage 1 of ZeRO:
     const cddp_partition *part;
     int n = cddp_ddp_partitions(ddp, &part);          // once
     ...                                               // backward, cddp_ddp_ready
     TRY(cddp_ddp_reduce_scatter(ddp));                // in place of cddp_ddp_wait
     for (int i = 0; i < n; i++)
       update(part[i].data, part[i].grad, states[i], part[i].count);
     TRY(cddp_ddp_all_gather(ddp));                    // in place of zeroing gradients
   A partition is a stretch of one parameter. Those of a host's ranks together have each element of
   each dense gradient once; each host updates all of them, so on several hosts what `update`
   computes must not depend on the machine. A parameter that no rank used (cddp_ddp_used) is yours
   to skip. Parameters with sparse_rows have no partition: every rank updates all of them itself, by
   cddp_ddp_rows. Copies in half precision are yours to write, after cddp_ddp_all_gather.
   On GPUs, whose ranks keep all weights and states, CDDP_UNSUPPORTED: cddp_ddp_wait and a kernel of
   yours on every rank. */
typedef struct cddp_partition {
  int param;    /* of the params of cddp_ddp_create */
  size_t first; /* element of it */
  size_t count; /* elements, at least 1 */
  void *data;   /* this rank's weights there */
  void *grad;   /* the mean gradient there, from cddp_ddp_reduce_scatter to cddp_ddp_all_gather; not
                   in the caller's gradient, if there is one */
} cddp_partition;

/* This rank's partitions: how many, and an array that stays as it is until cddp_ddp_destroy. */
CDDPDEF int cddp_ddp_partitions(const cddp_ddp *d, const cddp_partition **out);

/* Collective; errors as of cddp_ddp_wait. Returns when this rank's partitions have the mean
   gradient, scaled by max_grad_norm if that is set. Other gradients have no meaning until
   cddp_ddp_all_gather, which must follow before any other step. Not beside a rank in cddp_ddp_join:
   CDDP_MISMATCH. */
CDDP_CHECKED
CDDPDEF cddp_result cddp_ddp_reduce_scatter(cddp_ddp *d);

/* Collective: the weights of all partitions go to all ranks, gradients become zero; the step counts
   as completed. CDDP_INVALID_ARGUMENT without a cddp_ddp_reduce_scatter before. */
CDDP_CHECKED
CDDPDEF cddp_result cddp_ddp_all_gather(cddp_ddp *d);

/* Collective, for checkpoints: states[i] is an array as long as parameter i, of any dtype (data
   NULL: there is none), in which each rank has filled its partitions; on return all ranks have all
   of it. Then cddp_save writes it like a parameter; after cddp_load every rank takes what is its
   own, on any number of ranks. */
CDDPDEF cddp_result cddp_ddp_gather_states(cddp_ddp *d, const cddp_param *states);

/* Uneven inputs: a rank that has run out of data calls this where the others go on stepping, once
   an epoch. Until every rank has called it, it takes part in their cddp_ddp_wait, _step and
   _sync_buffers with zero weight: each mean is over the ranks that have data (>>ddp). s: the
   cddp_optim of the loop, whose learning rate follows the others'; NULL if they step by other
   means, whose own state stays as it is here. On return all ranks have the same weights, buffers
   and states of s. A hook's result is scaled by world size / ranks with data, so it must be linear.
   Each step has the group's timeout anew. Other collectives of the loop are not joined: have them
   on ranks with data only, or outside. A short batch weighs as much as a full one, unless you
   multiply its loss by its samples / a full batch's. On GPUs with NCCL set uneven_inputs in
   cddp_ddp_desc. Like PyTorch's join(divide_by_initial_world_size=False). */
CDDP_CHECKED
CDDPDEF cddp_result cddp_ddp_join(cddp_ddp *d, cddp_optim *s);

/* Over how many ranks the last cddp_ddp_wait or _step took the mean: those that had not joined. */
CDDPDEF int cddp_ddp_present(const cddp_ddp *d);

/* on: ready() stops sending and gradients accumulate locally; off: the next step sends all of it.
   Not divided by the number of micro-batches. Same call on every rank, between steps. Like DDP's
   no_sync(). */
CDDPDEF void cddp_ddp_no_sync(cddp_ddp *d, bool on);

/* After cddp_ddp_wait: scales all gradients so that their global 2-norm is at most max_norm (> 0);
   *norm, unless NULL, is the norm before. Local, same bits on every rank, and with shards on any
   number of them. Like torch.nn.utils.clip_grad_norm_. */
CDDPDEF cddp_result cddp_ddp_clip_grad_norm(cddp_ddp *d, double max_norm, double *norm);

/* *norm = the global 2-norm that the last clip found, of cddp_ddp_step with max_grad_norm or of
   cddp_ddp_clip_grad_norm, before it scaled anything; CDDP_INVALID_ARGUMENT if there was none.
   Local. On a GPU it waits for the stream. */
CDDPDEF cddp_result cddp_ddp_grad_norm(cddp_ddp *d, double *norm);

/* Collective: copies rank 0's buffers (cddp_ddp_desc.buffers) to all ranks, or the first rank's
   that has not joined; DDP does it before each forward. With uneven_inputs on a GPU only between
   two steps, before the first cddp_ddp_ready. */
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
  cddp_ddp *ddp;       /* optional, must outlive this: step skips what no rank used in its wait */
  void *stream;        /* CUDA stream of step and zero_grad without ddp; NULL = the default one */
  void *const *copies;   /* [count] mixed precision, see below; NULL for a parameter: none of it */
  cddp_dtype copy_dtype; /* of all copies: CDDP_F16 or CDDP_BF16 */
  const double *lr_scales;     /* [count] each parameter's rate is lr times this; NULL: all 1 */
  const double *weight_decays; /* [count] each parameter's own; NULL: weight_decay for all */
  bool master_weights; /* of f16 and bf16 parameters; see MIXED PRECISION */
};

typedef struct cddp_adamw_desc {
  double lr;           /* learning rate, >= 0. Zero stays zero: there is no default */
  double beta1, beta2; /* below 1; 0 = 0.9 and 0.999 */
  double eps;          /* >= 0; 0 = 1e-8 */
  double weight_decay; /* >= 0, decoupled; 0: none, unlike PyTorch, whose default is 0.01 */
  bool amsgrad;        /* divide by the greatest exp_avg_sq so far */
  bool maximize;       /* from here on as in cddp_sgd_desc */
  cddp_ddp *ddp;
  void *stream;
  void *const *copies;
  cddp_dtype copy_dtype;
  const double *lr_scales;
  const double *weight_decays;
  bool master_weights;
} cddp_adamw_desc;

/* torch.optim.SGD's arithmetic, bit for bit. params as for cddp_ddp_create, and after it when grad
   was NULL; must stay where it is. Momentum is allocated at the first step that needs it.
   GROUPS of parameters with settings of their own, PyTorch's param_groups, are two arrays of
   doubles, lr_scales and weight_decays, such as no decay for vectors and half the rate for an
   embedding; cddp_optim_set_lr changes the rate of all of them. The arrays are copied.
   MIXED PRECISION. Forward and backward read f16 or bf16 weights, while the optimizer works on f32
   master weights. Which of two ways depends on what the gradients are:
     copies          params hold the masters and f32 gradients, which are reduced in f32. copies[i],
                     of count elements in the same kind of memory as data, is what the model reads.
                     Creation, cddp_optim_step, cddp_ddp_step, cddp_ddp_join and cddp_load (with
                     desc.optim) write data, rounded to the nearest, to it. Checkpoints have the
                     masters. The array is copied, the memory must stay.
     master_weights  params hold f16 or bf16 weights and gradients of that type, which are added up
                     in f32 and rounded once (NCCL: as NCCL does). The optimizer keeps the masters,
                     and f32 states, as states of its own: with cddp_ddp_step each rank has its
                     share of them, and 2 bytes a weight go to the ranks instead of 4. Masters begin
                     as the weights at the first step, and anew after cddp_optim_write_copies, to be
                     called when data was changed by your own hand. In a checkpoint they are
                     optimizer.master.NAME. f32 and f64 parameters beside these have none. */
CDDP_CHECKED
CDDPDEF cddp_result cddp_sgd_create(cddp_optim **out, cddp_param *params, int count,
                                    const cddp_sgd_desc *desc);

/* torch.optim.AdamW's arithmetic: f32 has the bits of its fused CPU kernel, on every machine. What
   has been said of cddp_sgd_create holds here too. Each parameter counts its own steps, those in
   which a rank used it. f16 and bf16 parameters without master_weights are CDDP_UNSUPPORTED, and so
   are sparse gradients, as in PyTorch. In a checkpoint the state of parameter NAME is
   optimizer.exp_avg.NAME, .exp_avg_sq.NAME, .max_exp_avg_sq.NAME (amsgrad) and .step.NAME. */
CDDP_CHECKED
CDDPDEF cddp_result cddp_adamw_create(cddp_optim **out, cddp_param *params, int count,
                                      const cddp_adamw_desc *desc);

CDDP_CHECKED
CDDPDEF cddp_result cddp_optim_step(cddp_optim *s);              /* updates data from grad. Local */
CDDPDEF cddp_result cddp_optim_zero_grad(cddp_optim *s);         /* all gradients = 0. Local */
CDDPDEF cddp_result cddp_optim_set_lr(cddp_optim *s, double lr); /* from the next step on */
CDDPDEF double cddp_optim_lr(const cddp_optim *s);
/* After a change of data by your own hand: writes the copies, lets masters begin anew. Local. */
CDDPDEF cddp_result cddp_optim_write_copies(cddp_optim *s);
CDDPDEF void cddp_optim_destroy(cddp_optim *s);                  /* NULL is fine */

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
/* The indices of batch number `batch` (from 0) of one shard of the epoch; each has `size` samples,
   the last one may have fewer. Returns how many it has; 0 behind the last batch. The sampler's
   world_size is the number of shards, its rank does not matter. Any batch at any time: this counts
   from the epoch's first sample, after cddp_load too, and changes nothing for cddp_sampler_next or
   a checkpoint. The permutation stays until another epoch is set. 0 with s->result != CDDP_OK: a
   bad argument, or no memory for it. Like torch.utils.data's
   BatchSampler(DistributedSampler(data, shards, shard), size, False). */
CDDPDEF size_t cddp_sampler_batch(cddp_sampler *s, int shard, size_t batch, size_t size,
                                  size_t *indices);
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
  cddp_optim *optim;        /* its state and learning rate too; NULL: none */
  cddp_sampler *sampler;    /* its epoch and place in it; NULL: none */
  cddp_metadata *metadata;  /* save: what to write; load: keys to look up */
  int metadata_count;
  char *text;               /* load: memory for the values, which point into it */
  size_t text_size;         /* bytes */
  bool partial; /* load: what the file lacks stays as it is, what it has besides is no error */
  cddp_ddp *ddp; /* its cddp_ddp_steps; load: with shards set, it must have as many as the file's;
                    NULL: none */
} cddp_checkpoint_desc;

/* Collective over g; g NULL: by this process alone. Rank 0 writes its params (any dtype, each with
   a name) to path, and what desc asks for; returns when the file is on the disk. States may lie in
   pieces on the ranks, as after cddp_ddp_step: they are written whole and stay where they are. A
   GPU's memory comes through a few MiB of the host's, after what is on the group's stream (g NULL:
   on the device); the file is the CPU's.
   The new file takes path's name in one step: whatever fails (no space, no right, ulimit -f, a kill
   half-way) leaves the old one as it was, and at most path.tmp, which the next call replaces. path
   may be a symbolic link of this user's: the file that it leads to is replaced, or made. Anything
   else but a regular file (a device, a pipe) is CDDP_IO. The new file gets the old one's mode,
   owner and group (no ACLs, no extended attributes). Without the right to set the owner it belongs
   to this user; without the right to set the group, the new group and all others get only what both
   had. All ranks get the same result: CDDP_IO for the file system's failures, CDDP_MISMATCH for
   parameters or options that differ. The others wait while rank 0 writes: timeout_s must suffice.
   Like safetensors' save_file. */
CDDPDEF cddp_result cddp_save(cddp_group *g, const char *path, const cddp_param *params, int count,
                              const cddp_checkpoint_desc *desc);

/* Collective over g; g NULL: by this process alone. Rank 0 reads the file, all ranks get its
   values, whatever the number of ranks that saved it; f32, f64, f16 and bf16 are converted into
   each other. The file is not trusted. All of it is checked before anything is changed: CDDP_IO for
   one that is damaged, CDDP_INVALID_ARGUMENT for one that does not suit. Only when reading fails
   after that, part of rank 0's params (and of states on a GPU) may be overwritten. All ranks get
   the same result. Another optimizer's states (SGD's momentum for AdamW) do not suit; with partial
   its learning rate is taken, and this one's states begin anew. A sampler goes on with the next
   sample of the epoch that no rank had: begin with epoch cddp_sampler_epoch(), whose first
   cddp_sampler_set_epoch then does not rewind. A cddp_ddp counts on from the steps of the saved
   one. Memory of a GPU as in cddp_save. Like load_file and load_state_dict. */
CDDP_CHECKED
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

/* Forks nprocs processes that call fn(rank, arg), and waits for them. fn's return value (0 .. 255)
   is the exit code; 0 is success. When one fails the others have 1 s to notice, then get SIGTERM
   and 5 s later SIGKILL; CDDP_PEER_LOST names the first: its rank, exit code or signal. Children
   die with their parent, run no atexit handlers of it, and leave nothing behind. Like
   torch.multiprocessing.spawn; examples/cddprun.c starts programs as ranks.
     environment  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; unless
                  CDDP_SECRET is set a random CDDP_JOB_SECRET for the ranks' meeting, which other
                  users of this host lack; with several ranks OMP_NUM_THREADS=1 if unset (OpenMP and
                  OpenBLAS are told too, unless the program has given them a number of threads)
     stdout       line-buffered, as on a terminal: lines of up to 4,000 bytes stay whole in files
                  and pipes
     SIGCHLD      leave it at its default during the call, and wait for no child that is not yours:
                  else, before Linux 6.15, exit codes are lost: CDDP_SYSTEM once all have ended
     threads      call it before other threads exist, as with any fork. Those of OpenMP (GCC 9 or
                  later, clang) and OpenBLAS may exist, between parallel regions */
CDDPDEF cddp_result cddp_spawn(int (*fn)(int rank, void *arg), void *arg, int nprocs);

/* cddp_spawn for ELASTIC training, where the others go on when one fails. It is forked again, to
   join them (with CDDP_JOIN=1), max_restarts times in all; 0: never. CDDP_OK when one has returned
   0, whatever the others have; nobody is forked after that. When all have failed CDDP_PEER_LOST
   names the last one. Like torchrun's --max-restarts, but none of the others restarts. */
CDDPDEF cddp_result cddp_spawn_elastic(int (*fn)(int rank, void *arg), void *arg, int nprocs,
                                       int max_restarts);

/* Calls fn on n threads, each with its own rank of one group, and waits for them; the groups are
   destroyed here. fn returns 0 for success; when one fails (or calls pthread_exit) the others'
   waits end with CDDP_PEER_LOST. All memory is zero-copy here. On GPUs fn begins with
   cddp_set_device. */
CDDPDEF cddp_result cddp_run_threads(int (*fn)(cddp_group *g, void *arg), void *arg, int n);

/* CALL SITES. -------------------------------------------------------------------------------------
   Error texts of collective calls say in which file and line each rank of this host made its call
   (of ranks on other hosts: what they called): macros of the functions' own names, at the end of
   this file, pass it on through these two, which return their first argument. CDDP_NO_CALL_SITES,
   defined before this header is included, leaves them out. */
CDDPDEF cddp_group *cddp_at(cddp_group *g, const char *file, int line);
CDDPDEF cddp_ddp *cddp_ddp_at(cddp_ddp *d, const char *file, int line);

/* FLIGHT RECORDER. --------------------------------------------------------------------------------
   With CDDP_RECORD=dir in the environment every rank keeps its last 1,024 operations in
   dir/cddp-JOB-RANK.rec (who joins: JOB-RANK.joinN.rec), which survives the rank's end, SIGKILL
   included. examples/cddptrace.c merges the ranks' files into a report (who is late, missing or
   lost, and in what) and a trace for Perfetto. The file is a header, then the ring, in the
   machine's byte order. It is mapped: copy or remove a running job's file, but never truncate it
   (> file, copytruncate), which ends the rank by SIGBUS. */
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
  int32_t root;      /* or the peer of a send or recv; -1: none (yet: CDDP_ANY) */
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
   KiB; values any bytes, at most 8 MiB; a server holds 512 MiB of both. Any thread; one operation
   at a time per store. A cddp_group does not need one: cddp_init makes its own. With file:// the
   first who opens the path serves from a thread, over an abstract Unix socket and, for other hosts,
   a TCP port of the system's choice; with its cddp_store_destroy, or its death, the store ends, and
   others' operations fail with CDDP_NETWORK. Not there: PyTorch's commands queue_*, list_keys and
   barrier. */
typedef struct cddp_store_desc {
  const char *init_method;  /* "tcp://host:port", "unix://name" or "file:///absolute/path" */
  bool is_server;           /* tcp: also serve, from a thread, on host's addresses; port 0 = any */
  double timeout_s;         /* of connecting, get, wait; 0 = CDDP_TIMEOUT_S, else 600 */
  const char *secret;       /* NULL = CDDP_SECRET from the environment, else none: cddp_init */
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

#include <arpa/inet.h>
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
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
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
#define CDDP__HAS_MPI true
#else
#define CDDP__HAS_MPI false
#endif

#ifdef CDDP_CUDA
#define CDDP__HAS_CUDA true
#include <cuda_runtime.h>
#include <nccl.h>
#if NCCL_VERSION_CODE < 21800
#error "cddp.h: CDDP_CUDA needs NCCL 2.18 or later (ncclCommSplit)"
#endif
#else
#define CDDP__HAS_CUDA false
#endif

/* >>design ----------------------------------------------------------------------------------------
   PLACES. The ranks of a host share one memfd, kept open by them alone, so that nothing is ever
   left in a file system. Rank i allocates in its own window of it (>>arena) and its peers map what
   they meet. Each group has a control block there: two operation headers per rank, a slot (posted
   sends, a state) and two staging buffers for bytes in transit.

   ROUNDS. Whatever ranks do together is a numbered sequence of rounds (>>round). In a round each
   rank announces what it calls and waits for all others' announcements; the announcement carries
   operation, count, dtype and root, so a disagreement is seen by every rank at once, and up to 40
   bytes of payload, so a small all_reduce is one exchange of cache lines. Collectives
   (>>collectives) are one round (small), two rounds around in-place moves (shared memory), or a
   round per piece of 256 KiB (other memory; from three ranks on an all_reduce takes two).

   THE CANONICAL SUM. Sums over ranks follow one binary tree: tree(0..n) = tree(0..p) + tree(p..n)
   with p the largest power of two below n, so ((a+b)+(c+d)) for four ranks and ((a+b)+c) for three.
   Element i of a result depends on the inputs alone, never on slices, sizes, timing or instruction
   set: equal bits on all ranks and in all runs. f16 and bf16 are widened to f32, summed and rounded
   once. AVG divides the sum.

   THREADS. cddp runs on its callers' threads (what callers may do at once: THREADS in >>api), with
   exceptions: a group whose collectives are called with a work handle, or that reduces buckets, has
   an engine thread (>>work) that runs those for which nobody waits, in order; rank 0 serves the
   store from a thread while ranks meet; and a group on GPUs has two (>>device). All block
   all signals.
   Locks, in the order in which they may be nested: cddp_ddp.lock, engine.lock; p2p_lock,
   host.lock; fail_lock. No lock is held while waiting for a peer. What ranks
   share is only touched through cddp__atomic_* or is published by one.

   WAITING. A wait polls for tens of microseconds, yields, then sleeps on a futex for at most 20 ms
   at a time (>>round). Each time it wakes it looks after the ranks it waits for: their state on the
   control block and their pidfd. So a death is noticed within about 20 ms, by waiting ranks only,
   at no cost to others. Ranks beyond the number of cores never poll. A long wait is shown to the
   ranks of the host (cddp__spot), in whatever group it is: time-outs say where late ranks wait, and
   two ranks that wait for each other in different groups are a mismatch within a fraction of a
   second.

   FAILURE. A rank that sees a lost peer, a disagreement or a deadline writes why into its slot; the
   first to name its slot on the control block has broken the group, and wakes everyone. Every
   rank's calls on that group then return this failure. A rank that cannot go on for reasons of its
   own (no memory) breaks the group likewise, unless nothing was announced yet. Before a failed call
   returns, no peer may be writing to its buffers any more: see cddp__exit, and cddp__arena_unshare
   for peers that have been stopped. cddp_destroy only marks the rank's slot and unmaps.

   SEVERAL HOSTS. The ranks of a host work as above. Leaders, one for each host in a group, carry
   the headers of a round to each other, large arrays go from host to host in slices, one for each
   rank (>>hosts), on connections that are made when first used (>>links). Each host has a control
   block of its own: a failure is told to the others, and how a rank died by the ranks of its own
   host, which alone can see it; without one there the end of its connection has to do. A host that
   is cut off is noticed by the deadline, or 20 s after it last acknowledged anything.

   DATA PARALLEL. Gradients lie in one arena per rank and never move; see >>ddp. A model has
   private groups for buckets and for control, so your own collectives on the group may come between
   ready() calls in any order (on GPUs see ORDER there). One engine serves host and device memory;
   what differs is behind a table of functions, cddp__ddp_memory. Gradients that are rows: >>sparse.
   The leaves of the canonical sum are the shards of the global batch, one a rank or more.

   DEVICES. A group keeps all of the above as its control plane; for memory on a device it has a
   device context beside it and cddp_group.backend, a struct of functions, NULL for the CPU. The
   public functions ask it first, with one branch. See >>device. Locks there: device.turn,
   device.lock; watch_lock, p2p_lock, device.lock, fail_lock. */

/* >>config ------------------------------------------------------------------------------------- */

#ifndef CDDP_ASSERT
#define CDDP_ASSERT(c) ((void)0)
#endif

/* Tests stop, delay or kill a rank at these points; nothing otherwise. */
#ifndef CDDP__POINT
#define CDDP__POINT(name) ((void)0)
#endif

#define CDDP__CACHE_LINE 64
#define CDDP__HUGE_PAGE ((size_t)2 << 20)
#define CDDP__ERROR_MAX 512          /* bytes of an error text */
#define CDDP__TIMEOUT_S 600.0        /* default of timeout_s */
#define CDDP__STACK_MIN 262144       /* bytes of a thread's stack, at least */
#define CDDP__MAX_RANKS 4096         /* a host's ranks in one group; shards of a batch */
#define CDDP__JOINS 1024             /* processes that may join a job after its start, in all */
#define CDDP__FOLD_DEPTH 14          /* partial sums at a time: log2(CDDP__MAX_RANKS) and two */
#define CDDP__KEY_MAX 8192           /* bytes of a store key, as c10d's libuv server */
#define CDDP__VALUE_MAX (8u << 20)   /* bytes of a store value, likewise */
#define CDDP__KEYS_MAX 131072u       /* keys in one store command, likewise */

#ifndef CDDP__FILE_STAGING
#define CDDP__FILE_STAGING ((size_t)4 << 20) /* bytes between a device and a file at a time */
#endif

#define CDDP__PRINTF(f, a) __attribute__((format(printf, f, a)))
/* Rooms in which no loop is hot, or the network is slower: gcc optimises them less, which saves a
   quarter of its time. */
#if defined(__OPTIMIZE__) && !defined(__clang__) && !defined(__NVCC__)
#define CDDP__COLD _Pragma("GCC push_options") _Pragma("GCC optimize(\"O1\")")
#define CDDP__COLD_END _Pragma("GCC pop_options")
#else
#define CDDP__COLD
#define CDDP__COLD_END
#endif

#define CDDP__LIKELY(c) __builtin_expect(!!(c), 1)
#define CDDP__UNLIKELY(c) __builtin_expect(!!(c), 0)

/* >>structs ------------------------------------------------------------------------------------
   Structs that several rooms see. "shared" = in memory that the ranks of a host share, so no
   pointers and one writer per cache line; all zero bytes is the initial state. */

typedef struct cddp__atomic_u32 {
  uint32_t v;
} cddp__atomic_u32;

typedef struct cddp__atomic_u64 {
  uint64_t v;
} cddp__atomic_u64;

/* Which call, and where in the program it was made; NULL: not known. */
typedef struct cddp__site {
  const char *function, *file;
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
enum { CDDP__REF_NONE, CDDP__REF_UNUSED, CDDP__REF_EXTENT, CDDP__REF_POINTER };

#define CDDP__INLINE 40 /* payload bytes that ride in a line */

/* What a round of an operation is for; the ranks' must agree. */
enum cddp__phase {
  CDDP__PHASE_CALL,      /* the call itself: all that is compared */
  CDDP__PHASE_STAGED,    /* the ranks' shares are in headers or staging buffers */
  CDDP__PHASE_PLACES,    /* where the ranks' buffers are */
  CDDP__PHASE_PIECE,     /* a host's ranks have filled, or emptied, a piece */
  CDDP__PHASE_DONE,      /* this rank is through with the others' buffers */
  CDDP__PHASE_BLOCK,     /* where a new group's control block is */
  CDDP__PHASE_CONNECTED, /* other means of communication are up */
  CDDP__PHASE_ROWS,      /* where the ranks' rows are */
  CDDP__PHASE_ROWS_DONE, /* this rank has read them */
  CDDP__PHASE_GRADIENTS, /* this rank's gradients are as its peers may read them */
  CDDP__PHASE_WEIGHTS,   /* this rank has written others' weights into its arena */
  CDDP__PHASE_NORM,      /* the squares of this rank's part of the gradients are there */
  CDDP__PHASE_HOST = 15  /* of records: a device group's call on host memory */
};
enum cddp__scope { CDDP__SCOPE_ALL, CDDP__SCOPE_HOST }; /* ranks of the group; those of this host */

/* shared: what one rank announces in one round. Written by its rank, seq last. Two per rank, used
   in turn: a rank can only be one round ahead of a reader, see cddp__round_of. */
typedef struct cddp__op_header {
  cddp__atomic_u32 seq; /* number of the round; readers sleep on it */
  uint32_t call;        /* operation, dtype, op: cddp__call_code */
  uint64_t count;       /* elements */
  int32_t root;         /* rank, or -1 */
  uint32_t fp_mode;     /* of the thread, for calls that compute: cddp__fp_mode */
  union {
    unsigned char bytes[CDDP__INLINE];
    cddp__ref ref;
    int32_t split[2]; /* of a new group: color and key */
    uint64_t align;
  } u;
} cddp__op_header;

/* shared: a posted send. state is written by both sides in turn, the rest by the sender. Only the
   rank named in a posted send's state may look at the rest: others' sends change under it. */
typedef struct cddp__send_request {
  cddp__atomic_u32 state; /* CDDP__SEND_*, for POSTED with the receiver: CDDP__POSTED_TO */
  int32_t to, tag;
  uint32_t dtype;
  uint64_t count;  /* elements */
  uint64_t number; /* order of posting at the sender */
  cddp__ref ref;
  void *stage; /* the sender's alone, like what follows: memory for a copy, kept for reuse */
  size_t stage_size;
  bool staged; /* the message is in stage, and its call has returned: free when it is DONE */
} cddp__send_request;
enum {
  CDDP__SEND_FREE,
  CDDP__SEND_POSTED,
  CDDP__SEND_TAKEN, /* its receiver copies the bytes; also with the receiver's rank */
  CDDP__SEND_DONE,
  CDDP__SEND_REFUSED
};
#define CDDP__POSTED_TO(rank) ((uint32_t)CDDP__SEND_POSTED | (uint32_t)(rank) << 8)
#define CDDP__TAKEN_BY(rank) ((uint32_t)CDDP__SEND_TAKEN | (uint32_t)(rank) << 8)

#define CDDP__SENDS 128 /* sends in flight per rank and group before one without a handle waits */
#define CDDP__SEND_BLOCKS 16 /* blocks of sends: number i has CDDP__SENDS << i */
#define CDDP__SITE_MAX 124 /* bytes of a call site's text */

/* shared: one call on device memory, for the watchers of the other ranks. Written by its rank. */
typedef struct cddp__logged_call {
  cddp__atomic_u32 number; /* of the call, from 1; 0 while it is being written */
  uint32_t call;           /* cddp__call_code */
  uint64_t count;
  int32_t root;
  uint64_t hash; /* of this and all calls before it */
  char site[96]; /* where it was made, in words; "": not known */
} cddp__logged_call;
#define CDDP__CALL_LOG 64 /* calls remembered per rank and group, a power of two */

#define CDDP__WHERE_MAX 160 /* bytes of a text that says where a rank waits */

/* shared: where a rank waits, for the ranks of its host that wait for it. In the slots of a job's
   first group. Writer: the thread of the rank that waits. */
typedef struct cddp__spot {
  cddp__atomic_u32 wait;    /* number of the wait; 0: no thread has waited for long */
  cddp__atomic_u32 group;   /* in which it waits: the low half of its id */
  cddp__atomic_u32 suspect; /* a rank with which it seems to be in deadlock: 1 + host index in the
                               top half, the number of that rank's wait below; 0: none */
  cddp__atomic_u32 failed;  /* 1: the last wait ended in a failure */
  cddp__atomic_u32 several; /* 1: several threads of the rank use cddp */
  char where[CDDP__WHERE_MAX]; /* read while it may change: cddp__copy_text */
} cddp__spot;

/* shared: a rank's place in a group, on its own host. */
typedef struct cddp__slot {
  cddp__atomic_u32 state; /* CDDP__SLOT_*; writer: the rank, for threads also their starter */
  uint32_t pid;           /* writer: the rank, before its first step */
  cddp__atomic_u32 inside; /* 1: may be in its peers' memory, see cddp__enter; writer: the rank */
  unsigned char pad1[CDDP__CACHE_LINE - 12];
  cddp__atomic_u32 events;  /* bumped by any rank that changed a send of interest to this one */
  cddp__atomic_u32 waiting; /* threads of this rank asleep until it changes */
  cddp__atomic_u32 send_top;  /* sends below this index may be in use; writer: the rank */
  cddp__atomic_u32 awaits;    /* 1 + a rank of another host that this one waits for; 0: none */
  cddp__atomic_u32 awaits_at; /* as of this ms of cddp__now(); writer of both: the rank */
  cddp__atomic_u32 calls;     /* on device memory, noted so far; writer: the rank */
  cddp__atomic_u32 works;     /* of its engine, not yet done; writer: the rank */
  unsigned char pad2[CDDP__CACHE_LINE - 28];
  cddp__atomic_u32 site_round; /* whose call site follows; writer: the rank, as it fails */
  char site[CDDP__SITE_MAX];
  char failure[CDDP__ERROR_MAX]; /* why the rank breaks the group; its fail_lock */
  cddp__spot spot;
  cddp__send_request sends[CDDP__SENDS];
  cddp__ref more_sends[CDDP__SEND_BLOCKS]; /* published by send_top; [0] is not used */
  cddp__ref scratch; /* between hosts, for what peers cannot see; writer: the rank, once */
  cddp__logged_call call_log[CDDP__CALL_LOG];
} cddp__slot;
enum { CDDP__SLOT_EMPTY, CDDP__SLOT_TAKEN, CDDP__SLOT_LEFT, CDDP__SLOT_DEAD };

/* A loss to which later failures are due, in words. Written once, by the first rank that knows. */
typedef struct cddp__cause {
  cddp__atomic_u32 state; /* 0, 1: it is being written, 2 + a result */
  char text[CDDP__ERROR_MAX];
} cddp__cause;

/* shared: the control block of a group, followed by the headers of all ranks, the slots of those of
   this host (and an empty one for the others) and then the staging buffers. */
typedef struct cddp__control_block {
  cddp__atomic_u32 arrivals; /* oversubscribed: ranks that reached a round, summed over all */
  unsigned char pad1[CDDP__CACHE_LINE - 4];
  cddp__atomic_u32 release; /* oversubscribed: the last round that all ranks reached; futex */
  unsigned char pad2[CDDP__CACHE_LINE - 4];
  cddp__atomic_u32 sleepers; /* threads asleep in a step */
  unsigned char pad3[CDDP__CACHE_LINE - 4];
  cddp__atomic_u32 broken; /* 0, or what broke the group, with the slot that says why << 8 */
  cddp__atomic_u32 left;   /* ranks of the host that have destroyed the group */
  cddp__atomic_u32 size;   /* of so many, for the rank that frees the block; 0: not known yet */
  unsigned char pad4[CDDP__CACHE_LINE - 12];
  cddp__cause cause; /* of losses to come */
} cddp__control_block;

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
  struct cddp__board *board; /* of this rank's elastic model, or of the one it has come to join */
  bool joined;           /* it came with CDDP_JOIN, and has met nobody */
  struct cddp__door *door; /* what it tells who joins; NULL: nobody can. See >>rendezvous */
  int door_fd;           /* where they call; -1: it has no elastic model */
  int claim, port;       /* held while the group lives, see >>rendezvous; -1: none */
  char place[96];        /* where the ranks met: "port 29500" */
  double claims_end;     /* of cddp__now(): how long claims of other processes are listened to */
  cddp__atomic_u32 claimant; /* a process that came with this rank too; 0: none so far */
  int window;            /* this rank's: index, but for who has joined */
  int window_bits;       /* window i's extents lie in [(i + 1) << bits, (i + 2) << bits) */
  int *pidfds;           /* [size + CDDP__JOINS]; -1 for this rank and for threads */
  uint32_t *pids;        /* [size + CDDP__JOINS] */
  int cores;             /* that this process may use */
  char name[72];         /* of the machine */
  cddp_record_header *record; /* flight recorder; NULL: off */
  uint64_t window_end;   /* bump pointer in this rank's window, offset in the memfd */
  uint32_t generation;   /* last one given out */
  cddp__atomic_u32 unshared; /* times that all memory was made private, see cddp__arena_unshare */
  struct cddp__extent *extents; /* own ones, used and free, and those of peers met, by base */
  size_t extent_count, extent_capacity;
  struct cddp__net *net; /* the other hosts; NULL: there are none */
  struct cddp_group *groups; /* that this rank is in, by next; lock */
  struct cddp__slot *slots; /* [size] of the job's first group, for their spots; NULL: it is gone */
  uintptr_t user;           /* a thread that uses cddp: the address of one of its variables */
  cddp__atomic_u32 shown;   /* 1: a thread's wait is in this rank's spot; it writes the next */
  uint32_t waits;           /* shown so far */
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
  struct cddp__part *parts; /* [size] of a call with counts; NULL: all shares have `count` */
} cddp__call;
#define CDDP__COUNTED SIZE_MAX /* count of a call with counts, until its ranks know the largest */

/* Of a call with counts: a rank's shares to and from another one. Elements. */
typedef struct cddp__part {
  size_t out, out_at; /* this rank's share for the other; where that begins in its send buffer */
  size_t in, in_at;   /* the other's for this one; where that goes in the receive buffer */
  size_t there;       /* where it begins in the other's send buffer */
} cddp__part;
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
  CDDP__KIND_ALL_GATHER_V, /* from here on with counts */
  CDDP__KIND_ALL_TO_ALL_V,
  CDDP__KIND_GROUP_NEW,
  CDDP__KIND_DDP_CREATE,
  CDDP__KIND_DDP_WAIT,
  CDDP__KIND_DDP_STEP,
  CDDP__KIND_DDP_BUCKET,
  CDDP__KIND_DDP_BUFFERS,
  CDDP__KIND_DDP_JOIN,
  CDDP__KIND_DDP_SCATTER,
  CDDP__KIND_DDP_GATHER,
  CDDP__KIND_COUNT,
  CDDP__KIND_SEND, /* on devices only, never compared */
  CDDP__KIND_RECV
};

/* What a group does with memory on a device. NULL in cddp_group and cddp_ddp: there is none. Where
   a function says *taken = false, all memory was the host's and the CPU backend goes on. */
typedef struct cddp__backend {
  cddp_result (*start)(cddp_group *g, const cddp__call *c, cddp_work **work, bool *taken);
  cddp_result (*wait)(cddp_work *w); /* frees w */
  bool (*done)(cddp_work *w);
  cddp_result (*synchronize)(cddp_group *g);
  void *(*alloc)(cddp_group *g, size_t bytes);
  /* Every rank of g calls it after cddp__split, child NULL if it is in no new group. internal: the
     child belongs to a cddp_ddp. */
  cddp_result (*split)(cddp_group *g, cddp_group *child, int color, bool internal);
  void (*leave)(cddp_group *g);
  void (*free)(void *p);
} cddp__backend;

/* What carries collectives in host memory that do not fit into a round: shared memory, connections
   between hosts, or MPI. Every group has one. NULL in it: there is nothing to do. */
typedef struct cddp__carrier {
  bool foreign; /* another library's: it adds up all ranks, those too that have joined */
  cddp_result (*run)(cddp_group *g, const cddp__call *c);
  /* The mean of the ranks' c->count elements at c->recv, which ranks of this host see `at` bytes
     behind mirrors[their place]. NULL: whoever asks sees them all, and adds them up itself. */
  cddp_result (*average)(cddp_group *g, const cddp__call *c, char *const *mirrors, size_t at);
  cddp_result (*split)(const cddp_group *from, cddp_group *to, int color, int key);
  void (*leave)(cddp_group *g);
} cddp__carrier;

/* What an optimizer does whose parameters lie on a device. */
typedef struct cddp__optim_backend {
  cddp_result (*step)(cddp_optim *s);
  cddp_result (*zero)(cddp_optim *s);
  void (*leave)(cddp_optim *s);
  cddp_result (*clear)(const cddp_optim *s, void *state, size_t bytes); /* zeroes momentum */
  cddp_result (*copy)(cddp_optim *s); /* all copies from data */
} cddp__optim_backend;

/* An operation in flight. Collectives: in the queue of their group's engine, guarded by
   engine.lock. Sends: waits until the message is taken. Receives: in the group's list, in order of
   posting; p2p_lock. */
struct cddp_work {
  struct cddp_work *next;
  cddp_group *group;
  cddp_result (*run)(struct cddp_work *w); /* engine work; NULL for send and recv */
  cddp__call call;
  void *context; /* for run; through the host: where the result goes on the device */
  cddp__site site;
  uint64_t record; /* number of its record */
  bool done;     /* engine.lock; a receive's: p2p_lock */
  bool anywhere; /* whoever waits may run it; false: the engine's thread alone */
  uint32_t tick; /* of the engine when it was pushed */
  cddp_result result;
  int send; /* send: index of its request; -1: none, or the message was copied */
  int from; /* receive: whose message it has; of CDDP_ANY, until it is done, might have; p2p_lock */
  const cddp__backend *backend; /* on a device: waited for there; NULL: none of the next two */
  void *event;                  /* recorded behind the operation; NULL: not yet issued */
  void *stage;                  /* through the host: its memory there */
  char text[CDDP__ERROR_MAX];   /* valid when result or pending.result is a failure; last */
};

/* Runs asynchronous operations of one group in order, on a thread started by the first of them or
   on one that waits for them. All but thread and started: lock. */
typedef struct cddp__engine {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* for those who wait: an operation has ended */
  pthread_cond_t work;    /* for the thread: there is something to do, or stop */
  pthread_t thread;
  bool started, stop;
  bool busy;     /* some thread is inside the group's steps */
  bool asleep;   /* the thread waits for `work` without a limit */
  bool urgent;   /* what is queued is to begin at once */
  uint32_t tick; /* counts the thread's short waits */
  int idle;      /* of these, how many since the last operation was pushed */
  int waiters;   /* threads that wait for `changed` */
  cddp__atomic_u32 awaited; /* those of them that wait without a limit; read without the lock */
  cddp_work *first, *last;
} cddp__engine;

struct cddp_group { /* followed by its arrays, see cddp__group_build */
  cddp__host *host;
  int rank, size;
  int *members;       /* [size] index on the host of each rank; -1: on another host */
  int *world;         /* [size] the rank in the job of each rank; NULL in a job on one host */
  struct cddp__hosts *hosts; /* NULL: all ranks are on this host. Written under host.lock */
  const cddp__carrier *carrier;
  struct cddp__mpi *mpi;     /* its carrier's, if that is MPI */
  int local_size, local_rank; /* ranks of the group on this host, this one's place among them */
  int *slot_index;            /* [size] index of each rank's slot */
  void **buffers, **slices;   /* [size] scratch of the collective that runs: the ranks' buffers */
  cddp__control_block *block; /* behind it headers, slots, staging buffers */
  cddp__slot *slots;
  char *staging;
  size_t staging_size; /* bytes; 0: there are none */
  size_t round_most; /* bytes of shares that go by a round; the carrier takes more */
  cddp__ref block_ref;
  double timeout_s;
  uint32_t round;         /* of this rank; owner: the thread that runs a collective */
  uint32_t arrive_target; /* arrivals when this step is complete */
  int spin, yields;       /* polls before yielding, yields before sleeping */
  bool oversubscribed;    /* more ranks than cores */
  uint64_t calls;         /* collectives so far, for messages */
  uint64_t id;            /* alike on all ranks of the group; the world's is 0 */
  struct cddp_group *next; /* in host.groups */
  bool failed;             /* this rank has seen that the group is broken; fail_lock */
  pthread_mutex_t fail_lock; /* guards the slot's failure too */
  cddp__engine engine;
  pthread_mutex_t p2p_lock; /* guards receives and posting of sends */
  cddp_work *recvs;          /* oldest first; p2p_lock, as are the next two */
  int next_any;              /* whom a receive from any rank asks first: those take turns */
  uint64_t send_number;
  cddp__send_request *sends[CDDP__SEND_BLOCKS]; /* own; NULL: not made yet */
  bool internal;     /* belongs to a cddp_ddp, whose peers know its memory once and for all */
  uint32_t unshared; /* host.unshared when they were told of this rank's memory */
  const cddp__backend *backend; /* of memory on a device; NULL: none */
  void *device;                  /* its device context, a cddp__device */
  void *stream;                  /* there: the caller's, a cudaStream_t */
};

/* Parameters dealt out to buckets: b has params[offsets[b]] .. params[offsets[b + 1] - 1]. */
typedef struct cddp__bucket_plan {
  int bucket_count;
  int *offsets; /* [bucket_count + 1] */
  int *params;  /* indices of parameters */
} cddp__bucket_plan;

/* A node of the canonical tree over the shards of a step: the sum of some that one rank has. */
typedef struct cddp__shard_node {
  int rank;
  int slot; /* of the rank's, where it is; -1: one shard, in the rank's arena */
} cddp__shard_node;

typedef struct cddp__address { /* a socket address */
  union {
    struct sockaddr any;
    struct sockaddr_storage sa;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un un;
  };
  socklen_t size; /* bytes in use */
} cddp__address;

/* One parameter inside a cddp_ddp. Offsets are into the arena, alike on every rank. */
typedef struct cddp__tensor {
  size_t offset, bytes, room; /* room: bytes rounded up to a cache line, the rest stays zero */
  size_t begin, end; /* what this rank steps, bytes of the arena; end <= begin: nothing */
  size_t state;      /* of it, where it is in each state of this rank's share */
  size_t piece;      /* of d->squares, its first one */
  size_t dense;      /* rows, on a device: where the mean is as a dense gradient */
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

/* This rank's share of an optimizer's states: the part of each parameter that lies in its slice. */
typedef struct cddp__share {
  struct cddp__share *next;
  cddp_optim *optim;
  cddp_ddp *ddp;
  char *mine; /* in the arena of the host: for each state as many bytes as the slice has */
  char **all; /* [ranks] where every rank's lies */
} cddp__share;

#define CDDP__TRAINED (CDDP_BF16 + 1) /* dtypes that parameters have */

/* The payload of a step in which the ranks of a cddp_ddp meet. */
typedef struct cddp__step_header {
  uint64_t missing;  /* parameters that are not ready on this rank */
  uint64_t settings; /* of the cddp_optim without its lr; 0: there is none */
  double lr;
  uint32_t joined;   /* CDDP__JOINED*; 0: the rank has data */
} cddp__step_header;
enum { CDDP__JOINED = 1, CDDP__JOINED_NOW };

/* What the engine asks of one kind of memory: on a host, or on a device. stream: NULL on a host.
   NULL functions: there is nothing to do. */
typedef struct cddp__ddp_memory {
  cddp_result (*use)(const cddp_ddp *d); /* makes its device this thread's */
  cddp_result (*copy)(void *to, const void *from, size_t bytes, void *stream);
  cddp_result (*zero)(void *p, size_t bytes, void *stream);
  cddp_result (*alloc)(cddp_ddp *d); /* the arena, zeroed, and what else it needs */
  void (*free)(cddp_ddp *d);         /* all but what host memory there is */
  cddp_result (*scratch)(cddp_ddp *d, size_t bytes, void **out); /* for a bucket, side by side */
  /* *met: the hosts need not meet before this wait or step. */
  cddp_result (*meet)(cddp_ddp *d, int kind, uint64_t check, bool *met);
  cddp_result (*begin_bucket)(cddp_ddp *d, cddp__bucket_state *b); /* lock held */
  cddp_result (*reduce_bucket)(cddp_ddp *d, cddp__bucket_state *b);
  /* Of more shards than ranks: see cddp__merge_nodes. */
  cddp_result (*merge_nodes)(cddp_ddp *d, int me, int out, const int *slots, const int *widths,
                             int count, bool clear);
  cddp_result (*gather_shards)(cddp_ddp *d); /* all nodes of all ranks make the mean in the arena */
  cddp_result (*fence)(cddp_ddp *d); /* the caller's stream goes on behind all buckets */
  cddp_result (*broadcast)(cddp_ddp *d, cddp_param *params, int count, int root);
  cddp_result (*place_rows)(cddp_ddp *d); /* mean rows to where SGD reads them */
  cddp_result (*scale)(cddp_ddp *d); /* all gradients in the arena, by cddp__mean_factor */
  cddp_result (*clip)(cddp_ddp *d, double max_norm, double *norm);
  cddp_result (*norm)(cddp_ddp *d, double *norm); /* as the last clip found it */
  /* Updates the weights. averaged: the arena holds means already. wrote: see cddp__host_step */
  cddp_result (*step)(cddp_ddp *d, cddp_optim *s, bool averaged, bool wrote);
} cddp__ddp_memory;

/* Elastic models: >>elastic. */

/* shared: the sum of some shards of a step, a node of the canonical tree that one member has. */
typedef struct cddp__elastic_node {
  int32_t first, width; /* shards */
  int32_t slot;         /* in the member's kit; -1: one shard, in its arena */
} cddp__elastic_node;

/* shared: what a member calls in the update of a step. */
typedef struct cddp__elastic_call {
  uint32_t kind;    /* CDDP__KIND_DDP_STEP, _WAIT; _JOIN: it joins, and has called nothing */
  uint32_t fp_mode; /* cddp__fp_mode */
  uint64_t check;   /* of the cddp_optim, with its lr; 0: a wait */
  uint64_t steps;   /* cddp_ddp_steps before it */
} cddp__elastic_call;

/* shared: a rank of an elastic model, or the place for one. Writer: its rank, but for state. */
typedef struct cddp__elastic_member {
  cddp__atomic_u64 state;  /* CDDP__MEMBER_*, and << 8: LIVE, its life; else the step of its end */
  cddp__atomic_u64 at;     /* 2 t: in the shards of step t; 2 t + 1: has come to its update */
  cddp__atomic_u64 nodes;  /* of its kit's tables the one in force: cddp__table_word */
  cddp__atomic_u32 inside; /* 1: may write to other members' memory */
  cddp__atomic_u32 life;   /* counts the ranks that have had this place */
  uint32_t pid;
  int32_t rank;  /* cddp_rank of its group */
  int32_t index; /* among the ranks of the host: cddp__host.index */
  uint64_t born; /* of its process: cddp__process_born */
  cddp__ref arena, kit;
  cddp__ref block;             /* a group's control block that it has made: see board.grouped */
  cddp__elastic_call calls[2]; /* by the step's lowest bit */
  uint64_t identity[2];        /* hash of the members below and their lives; never 0 */
  uint64_t living[2][CDDP__MAX_RANKS / 64]; /* by the step's lowest bit: the members it has seen */
  unsigned char pad[CDDP__CACHE_LINE];
} cddp__elastic_member;
enum {
  CDDP__MEMBER_NONE,
  CDDP__MEMBER_JOINING, /* its entry is being filled */
  CDDP__MEMBER_LIVE,
  CDDP__MEMBER_LOST, /* its process has ended */
  CDDP__MEMBER_LEFT  /* it has called cddp_ddp_destroy */
};

/* shared: a part of the update. */
typedef struct cddp__elastic_part {
  cddp__atomic_u64 word;     /* cddp__unit */
  cddp__atomic_u64 progress; /* cddp__progress; odd: the block there is in the log */
} cddp__elastic_part;

/* shared: where the ranks of an elastic model meet. Behind it lie members [capacity], the words of
   shards [shards], parts [parts], a byte for each parameter (1: its weights go to an area), and the
   areas, CDDP__AREA_*, each as long as the arena. */
typedef struct cddp__board {
  cddp__control_block block; /* size and left alone: the arena frees the board as one */
  uint64_t model;            /* hash of what must agree: parameters and shards */
  uint64_t arena_bytes;
  int32_t capacity, shards, parts, params;
  cddp__ref self;            /* where the board is, for ranks that join */
  cddp__atomic_u64 step;     /* how many are completed */
  cddp__atomic_u64 deal;     /* 1 + step << 12, and the member whose `living` is in force for it */
  cddp__atomic_u64 grouped;  /* identity of the members, and the one with their group's block */
  cddp__atomic_u32 joins;    /* processes that have come to join so far: windows given out */
  cddp__atomic_u32 changes;  /* bumped by whoever changed what others may wait for; futex */
  cddp__atomic_u32 sleepers; /* threads asleep until it changes */
  cddp__cause failure;       /* of the model, on all ranks */
} cddp__board;
enum { CDDP__AREA_MEANS, CDDP__AREA_WEIGHTS, CDDP__AREA_STATES, CDDP__AREAS = 5 };

/* A member as this rank sees it; its arena is in ddp.mirrors, its slots in ddp.slot_areas. */
typedef struct cddp__elastic_view {
  uint32_t life; /* of the member that is mapped; 0: none */
  int pidfd;     /* -1: none */
  char *kit;
  char **data; /* [params] its weights; NULL: they go to an area */
} cddp__elastic_view;

/* What a cddp_ddp has of an elastic model. Owner: the thread that trains. */
typedef struct cddp__elastic {
  cddp__board *board;
  cddp__elastic_member *members; /* [capacity] */
  cddp__atomic_u64 *shards;      /* [shards] */
  cddp__elastic_part *parts;     /* [parts] */
  unsigned char *in_area;        /* [params] */
  char *areas;
  size_t area_room;              /* bytes from one area to the next */
  cddp__elastic_view *views;     /* [capacity] */
  int *dealt;                    /* [shards] member to which each is dealt */
  int *living, living_count;     /* [capacity] members of the deal */
  int *arrived, arrived_count;   /* [capacity] members that have come to this update */
  int *order;                    /* [params] as they lie in the arena */
  uint64_t identity;             /* of them; 0: none yet */
  char *kit;                     /* this rank's */
  size_t log_at, refs_at, slots_at; /* in each kit, bytes */
  int me;                        /* this rank's member */
  uint64_t step;                 /* in which this rank is */
  bool begun;                    /* it knows the deal of this step */
  int shard;                     /* that it has taken; -1: none */
  int arena;                     /* CDDP__ARENA_* */
  int slots_used;                /* slots with memory of their own */
  uint32_t areas_used;           /* bits: the areas that this rank has used */
  uint32_t seen;                 /* board.changes when its wait began */
  uint32_t unshared;             /* host.unshared at creation */
  cddp_group *group;             /* of the living; NULL: not asked for yet */
  uint64_t grouped;              /* identity of its members */
} cddp__elastic;
enum {
  CDDP__ARENA_CLEAR, /* zero, or as the last wait has left it */
  CDDP__ARENA_NODE,  /* a shard is in it */
  CDDP__ARENA_SPENT  /* has been added to others */
};

struct cddp_ddp { /* followed by its arrays, see cddp__ddp_alloc */
  uint64_t id;         /* in this process, from 1; never used again */
  cddp_group *group;   /* the user's */
  cddp_group *comm;    /* buckets are reduced here, by its engine */
  cddp_group *control; /* waits and steps agree here, on the caller's thread */
  cddp_group *hooks;   /* given to communication hooks; NULL without one */
  cddp_param *params;  /* the caller's */
  int count;
  cddp_ddp_desc desc;
  const cddp__ddp_memory *memory; /* where gradients are */
  cddp__elastic *elastic;         /* NULL: ranks are those of the group */
  void *side;              /* on a device: the stream on which buckets are reduced */
  cddp__call *calls;       /* there: [count + buffers] scratch; lock, or the thread that steps */
  cddp_segment *segments;  /* there: [count] scratch, likewise */
  double *clip;            /* there, in device memory: squares of the norm, factor, scratch */
  bool meets;    /* ranks meet on the host in each step; false: until d->rebuilt */
  bool eager;    /* buckets are reduced as they fill, even where cddp_ddp_step could do it */
  bool early;    /* they are now: eager, or the last step was no cddp_ddp_step */
  bool sums;     /* reduced buckets are sums, as the last step was a cddp_ddp_step, which divides */
  bool no_sync, rebuilt;
  size_t limits[2];      /* of the first bucket and the others, bytes */
  cddp__tensor *tensors; /* [count] */
  char *arena;           /* all gradients */
  char *mirror;          /* on a host the arena, in shared memory; else NULL */
  size_t bytes;          /* of each */
  size_t squares_at;     /* bytes from the mirror to sums of squares, behind the slots */
  size_t whole;          /* of the mirror and what is behind it */
  char **mirrors;        /* [ranks] every rank's, mapped here; squares follow arena and slots */
  char **slot_areas;     /* [ranks] every rank's slots, mapped here */
  char **addresses;      /* storage of tensors[].data */
  cddp__bucket_plan plan;
  int *plan_memory;
  cddp__bucket_state *buckets; /* [count], plan.bucket_count in use */
  int *plan_order;             /* [count] storage of buckets[].sorted */
  void **buffers;              /* [shards] scratch of the engine */
  const void **sources;        /* [shards] scratch of the caller's thread */
  char *scratch;               /* shared memory: a bucket for a hook, rows for the other ranks */
  size_t scratch_bytes;
  pthread_mutex_t lock;
  int next_bucket; /* first one not launched; guarded by lock */
  int *arrival;    /* [count] order of ready(); guarded by lock */
  int arrived;
  unsigned char *used;  /* [count] of the last wait or step; cddp_optim points here */
  unsigned char *flags; /* [ranks + 1][count] exchange of ready flags */
  cddp__share *shares;
  struct cddp__sparse **sparse;      /* [count] NULL: dense; NULL: all are */
  struct cddp__sparse **sparse_room; /* [count] memory of sparse */
  struct cddp__row_list *lists; /* [shards] scratch of merging */
  int *active;      /* [active_count] ranks that have not joined, as of the last meeting */
  int active_count;
  int present;     /* active_count of the last completed step */
  int shards;                   /* in each step: desc.shards, or one a rank */
  int first_shard, shard_count; /* this rank's */
  int taken;                    /* of them in this step, by cddp_ddp_next_shard */
  uint64_t steps;               /* completed */
  double norm;                  /* of the last clip, on a host */
  bool has_norm;                /* there was one */
  cddp_partition *partitions;   /* [partition_count] this rank's, at most one a parameter */
  int partition_count;
  bool scattered;               /* cddp_ddp_all_gather is due */
  bool spread;                  /* more shards than ranks: the next fields are used */
  int starts[2 * CDDP__FOLD_DEPTH]; /* [depth] first shards of the nodes in this rank's slots */
  int depth;
  size_t halves, slot_bytes; /* bytes of the arena before f16 and bf16, which are f32 in a slot */
  size_t slot_room;          /* bytes from one slot to the next */
  int slots;                 /* of each rank */
  cddp__shard_node *nodes;   /* [node_count] all ranks', in order */
  int *widths;               /* [node_count] as cddp__reduce_nodes takes them */
  int node_count;
  bool leaves;    /* all of them are shards in arenas */
  int most_nodes; /* of one rank */
  uint32_t joined; /* this rank's CDDP__JOINED*; the engine reads it too, between steps */
  bool had_joined, out_of_date; /* since the last join ended: some rank had joined, and its
                                   weights are old */
  bool failed; /* guarded by lock as long as ready() may run, as are the next two */
  cddp_result fail_result;
  char fail_text[CDDP__ERROR_MAX];
};

/* Connections to ranks of other hosts; steps and collectives that span hosts. */

/* What came from another host, before its recv. Its bytes follow the struct. */
typedef struct cddp__message {
  struct cddp__message *next;
  int from, tag; /* rank in the group */
  uint32_t dtype;
  uint64_t count; /* elements */
  size_t size;    /* bytes */
} cddp__message;
typedef struct cddp__mailbox {
  cddp__message *first, **end; /* end: where the next one goes */
  size_t bytes; /* of all of them */
} cddp__mailbox;

typedef struct cddp__link cddp__link; /* a connection to a rank of another host: >>links */

#define CDDP__LEFT_GROUPS 256 /* that are remembered, for ranks that call late */

/* Where a rank of the job runs. */
typedef struct cddp__home {
  int host;  /* index in net.hosts */
  int index; /* among the host's ranks */
  uint32_t pid;
  int port;
} cddp__home;

typedef struct cddp__host_entry {
  struct sockaddr_in6 address; /* or a sockaddr_in: cddp__internet_address. Without a port */
  char name[68];
  int size; /* ranks */
} cddp__host_entry;

/* The other hosts, as rendezvous found them. Owned by cddp__host; constant but for what lock
   guards. */
typedef struct cddp__net {
  cddp_allocator allocator;
  int rank, size; /* of the job */
  int host, host_count;
  unsigned char *token;    /* [16] of the job; whoever knows it came through the store */
  cddp__host_entry *hosts; /* [host_count] behind the token, and behind them */
  cddp__home *homes;       /* [size]: the rank table, as rank 0's host has sent it */
  char *secret;            /* NULL: none */
  int listener;
  cddp__atomic_u32 deaf;           /* 1: without a descriptor for a caller; writer: under lock */
  double hears_again;              /* when to try again; lock */
  cddp__cause loss;                /* a group of this rank has lost one */
  pthread_mutex_t lock;            /* guards the rest */
  cddp__link *pending;           /* have not said hello; newest first */
  cddp__link *arrived;           /* have, and wait for their group to claim them */
  uint64_t left[CDDP__LEFT_GROUPS]; /* 1 + ids of groups that this rank has left, a ring */
  uint32_t left_count;
} cddp__net;

/* Leaves [low, high) of the canonical tree that have a node of their own and all lie on one host,
   while those of its parent do not. */
typedef struct cddp__subtree {
  int low, high;
  int host;  /* index in the group */
  size_t at; /* bytes an element before its sum among its host's */
} cddp__subtree;

/* A frame of a collective: out of this rank's memory, or into it. */
typedef struct cddp__item {
  int rank; /* the other side, in the group */
  const void *data;
  size_t size; /* bytes */
  size_t least; /* received: it may have as few */
  long step;    /* sent: in which it was posted */
} cddp__item;

/* A host of a group. */
typedef struct cddp__group_node {
  int first, size;        /* its ranks: hosts.ranks[first] .. */
  size_t headers_at;      /* where its headers and what rides with them lie in hosts.headers */
  size_t bytes, bytes_at; /* an element's subtrees there; those of the hosts before */
} cddp__group_node;

/* A rank of a group, as seen from another one. */
typedef struct cddp__peer {
  int host, number;      /* index of its host in the group; its place among the ranks there */
  cddp__link *data;      /* NULL: none yet. Other threads read it too */
  uint64_t pass;         /* hosts.pass of the last round in which a frame to or from it was left */
  cddp__atomic_u32 lost; /* 1: a connection to it has ended; any thread. Written before: */
  double lost_at;
  int error; /* link.error */
} cddp__peer;

/* What one group needs to span hosts. Host 0 of a group is that of its rank 0, and so on. Owner of
   what can change, but for what is said: the thread that runs the group's collectives. */
typedef struct cddp__hosts {
  cddp__net *net;
  int count, mine;            /* hosts of the group; this one's index */
  int max_locals, min_locals; /* most and fewest ranks of the group on one host */
  cddp__peer *peers;          /* [size] */
  cddp__group_node *nodes;    /* [count] */
  int *ranks;                 /* [size] by host */
  cddp__subtree *subtrees;    /* of the canonical tree, by rank */
  int subtree_count;
  int *widths;             /* [subtree_count] leaves of each */
  int *leaves, leaf_count; /* ranks that are summed over: all, but for those that have joined */
  cddp__item *outs, *ins;  /* [size * CDDP__FRAMES] posted frames; memory that is not used */
  int out_count, in_count;
  double looked;           /* leaders: when a round last looked for notices, of cddp__now() */
  long step;               /* of a slice; frames that are posted belong to it */
  uint64_t pass;           /* rounds through outs or ins */
  const void **pointers, **sums; /* [size] sources of a reduction */
  struct pollfd *fds;            /* [2 * size + 2] */
  unsigned char *headers; /* leaders: all hosts' headers on the wire, this host's first, each host's
                              with the shares that ride with them */
  int lowest_remote;      /* the lowest rank on another host */
  bool local_only;        /* this rank's round is one of its host alone */
  char *stage;            /* what is on its way to or from other hosts */
  size_t stage_size;
  char **scratch;        /* [local_size] shared: pieces of buffers that are not; NULL: none yet */
  cddp__link *links;     /* MESSAGES, oldest first; p2p_lock, as is the next */
  cddp__mailbox mailbox; /* received, without a recv yet; oldest first */
} cddp__hosts;

/* >>hooks ---------------------------------------------------------------------------------------
   A room calls rooms above it. These functions alone are called from rooms above their own. */

/* >>p2p: a rank that waits for anything serves its pending receives meanwhile. */
static void cddp__serve_idle(cddp_group *g);

/* >>hosts, for groups that span hosts: a round's headers go to the other hosts and come from there;
   connections are accepted and notices heard; this rank's connections end; a rank of another host
   is gone (how: in words, or NULL); a message is sent, has room, is received, is given to a recv
   (p2p_lock held for these three), or there may be news of a peer. */
static cddp_result cddp__hosts_meet(cddp_group *g);
static void cddp__hosts_look(cddp_group *g);
static void cddp__hosts_hang_up(cddp_group *g);
static bool cddp__hosts_gone(const cddp_group *g, int rank, char *how, size_t n);
static cddp_result cddp__hosts_post(cddp_group *g, const cddp__call *c, bool always,
                                    bool *posted);
static bool cddp__hosts_room(cddp_group *g, int peer, size_t bytes);
static void cddp__hosts_serve(cddp_group *g);
static void cddp__hosts_match(cddp_group *g, cddp_work *q);
static void cddp__hosts_poll(cddp_group *g, int peer);

/* >>collectives: what does not fit into a round, in shared memory. */
static cddp_result cddp__run_large(cddp_group *g, const cddp__call *c);

/* >>links: a job's connections end with its memory; ranks of other hosts are told of a failure. */
static void cddp__net_free(cddp__net *n);
static void cddp__tell_all(const cddp__net *n, uint64_t group, const int *world, int size,
                           uint32_t code, const char *text);

/* >>kernels: takes over what an optimizer does if its parameters lie on a device. */
static cddp_result cddp__attach_optim(cddp_optim *o);

/* >>elastic: the next shard of a model whose ranks are lost, and come. */
static bool cddp__elastic_next(cddp_ddp *d, int *shard);

/* >>rendezvous: ranks that run listen for a second job at their place. */
static cddp_result cddp__hear_claims(cddp_group *g);

/* >>base -----------------------------------------------------------------------------------------
   What every room uses: error texts, memory, the clock, atomics, threads.
   Owns: this thread's error text and call site.
   May touch: nothing else.
   Entry points: all of it.
   Works as follows: a function that fails leaves a sentence with cddp__fail and returns its
   result; callers may put words before it. Deadlines are times of cddp__now. Scalars that threads
   or processes share are cddp__atomic_u32 and are touched by the functions here alone. */

static __thread char cddp__error_text[CDDP__ERROR_MAX];

/* Where the call this thread is in was made, and, until that call begins, where the next one is. */
static __thread cddp__site cddp__this_site, cddp__next_site;

/* The engine whose thread this is; NULL on the program's threads. */
static __thread cddp__engine *cddp__own_engine;

/* A public call begins: what its macro noted is about this call and no later one. */
static void cddp__enter_call(const char *function) {
  cddp__this_site = cddp__next_site;
  cddp__this_site.function = function;
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

/* Appends to a text that is at most n bytes long with its NUL. */
CDDP__PRINTF(3, 4)
static void cddp__append(char *text, size_t n, const char *format, ...) {
  size_t at = strlen(text);
  va_list args;
  va_start(args, format);
  vsnprintf(text + at, n - at, format, args);
  va_end(args);
}

/* Puts words before the error text that a lower room left: "cddp_init: " + text. */
CDDP__PRINTF(2, 3)
static cddp_result cddp__fail_in(cddp_result r, const char *format, ...) {
  char inner[CDDP__ERROR_MAX];
  va_list args;
  memcpy(inner, cddp__error_text, sizeof inner);
  va_start(args, format);
  vsnprintf(cddp__error_text, sizeof cddp__error_text, format, args);
  va_end(args);
  cddp__append(cddp__error_text, sizeof cddp__error_text, "%s", inner);
  return r;
}

/* Prefixes the error text of a failure with the function's name. */
static cddp_result cddp__named(const char *function, cddp_result r) {
  return r == CDDP_OK ? r : cddp__fail_in(r, "%s: ", function);
}

/* An argument's check: unless the condition holds, the function that this stands in returns
   CDDP_INVALID_ARGUMENT with its name and this text. */
#define CDDP__CHECK(condition, ...)                                                                \
  do {                                                                                             \
    if (CDDP__UNLIKELY(!(condition)))                                                              \
      return cddp__named(__func__, cddp__fail(CDDP_INVALID_ARGUMENT, __VA_ARGS__));                \
  } while (0)

/* Likewise, for checks that are functions of their own. */
#define CDDP__TRY(result)                                                                          \
  do {                                                                                             \
    cddp_result cddp__tried = (result);                                                            \
    if (CDDP__UNLIKELY(cddp__tried != CDDP_OK)) return cddp__named(__func__, cddp__tried);         \
  } while (0)

/* Others' words, made fit to be shown: no control characters, which a terminal would obey; those
   from U+0080 to U+009F are two bytes in UTF-8. */
static void cddp__make_printable(char *text) {
  unsigned char *c = (unsigned char *)text;
  for (; *c != 0; c++) {
    bool wide = c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0;
    if (wide) *c++ = '?';
    if (wide || *c < 32 || *c == 127) *c = '?';
  }
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

/* --- memory --- */

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

static void cddp__copy(void *to, const void *from, size_t n) {
  if (n > 0 && to != from) memcpy(to, from, n);
}

/* --- the clock --- */

static double cddp__now(void) { /* seconds, monotonic */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct timespec cddp__timespec(double seconds) {
  struct timespec t;
  t.tv_sec = (time_t)seconds;
  t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
  return t;
}

static void cddp__sleep(double seconds) {
  struct timespec t = cddp__timespec(seconds);
  if (seconds > 0) nanosleep(&t, NULL);
}

/* Milliseconds until the deadline for poll(2): 0 when past, at most max_ms, rounded up. */
static int cddp__poll_ms(double deadline, int max_ms) {
  double left = (deadline - cddp__now()) * 1e3;
  if (left <= 0) return 0;
  return left >= (double)max_ms ? max_ms : (int)left + 1;
}

/* --- atomics and threads --- */

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

static uint64_t cddp__load64(const cddp__atomic_u64 *a) {
  return __atomic_load_n(&a->v, __ATOMIC_ACQUIRE);
}
static void cddp__store64(cddp__atomic_u64 *a, uint64_t v) { /* in order with all other accesses */
  __atomic_exchange_n(&a->v, v, __ATOMIC_SEQ_CST);
}
static bool cddp__swap64(cddp__atomic_u64 *a, uint64_t expected, uint64_t desired) {
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

/* How this thread's arithmetic treats floats, of what changes results: the same number on x86 and
   aarch64, 0 being the default (to nearest, subnormals kept). Ranks compare it, for with another
   mode their weights drift apart. Other machines: always 0. */
enum {
  CDDP__FP_ROUNDING = 3, /* 1: downward, 2: upward, 3: towards zero */
  CDDP__FP_FTZ = 4,      /* subnormal results become 0 */
  CDDP__FP_DAZ = 8       /* subnormal operands count as 0 */
};
static uint32_t cddp__fp_mode(void) {
  uint32_t mode = 0;
#if defined(__x86_64__)
  uint32_t csr = __builtin_ia32_stmxcsr();
  if (CDDP__LIKELY((csr & 0xe040) == 0)) return 0;
  mode = csr >> 13 & 3;
  if (csr >> 15 & 1) mode |= CDDP__FP_FTZ;
  if (csr >> 6 & 1) mode |= CDDP__FP_DAZ;
#elif defined(__aarch64__)
  static const unsigned char rounding[4] = {0, 2, 1, 3}; /* FPCR counts upward before downward */
  uint64_t csr;
  __asm__ __volatile__("mrs %0, fpcr" : "=r"(csr));
  mode = rounding[csr >> 22 & 3];
  if (csr >> 24 & 1) mode |= CDDP__FP_FTZ | CDDP__FP_DAZ;
  if (csr & 1) mode |= CDDP__FP_DAZ; /* FIZ, Armv8.7 */
#endif
  return mode;
}

/* The mode in words: "rounds upward, flushes subnormals (FTZ, DAZ)". */
static void cddp__describe_fp_mode(uint32_t mode, char *out, size_t n) {
  static const char *const rounding[] = {"to nearest", "downward", "upward", "towards zero"};
  static const char *const flushing[] = {"keeps subnormals", "flushes subnormal results (FTZ)",
                                         "takes subnormal operands for 0 (DAZ)",
                                         "flushes subnormals (FTZ, DAZ)"};
  snprintf(out, n, "rounds %s, %s", rounding[mode & CDDP__FP_ROUNDING], flushing[mode >> 2 & 3]);
}

/* Sleeps while *a == value, until woken or for at most `seconds`; may return early for no reason.
   Works between processes and between threads. */
static void cddp__futex_wait(cddp__atomic_u32 *a, uint32_t value, double seconds) {
  struct timespec t = cddp__timespec(seconds);
  if (seconds > 0) syscall(SYS_futex, &a->v, 0 /* FUTEX_WAIT */, value, &t, NULL, 0);
}

static void cddp__futex_wake(cddp__atomic_u32 *a) {
  syscall(SYS_futex, &a->v, 1 /* FUTEX_WAKE */, INT_MAX, NULL, NULL, 0);
}

static void cddp__cond_init(pthread_cond_t *c) { /* for waits by the clock of cddp__now */
  pthread_condattr_t a;
  pthread_condattr_init(&a);
  pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
  pthread_cond_init(c, &a);
  pthread_condattr_destroy(&a);
}

/* Waits for c until woken or until that time of cddp__now; false: it has passed. */
static bool cddp__cond_wait_until(pthread_cond_t *c, pthread_mutex_t *lock, double deadline) {
  struct timespec t;
  if (deadline > 1e15) return pthread_cond_wait(c, lock) == 0;
  t = cddp__timespec(deadline);
  return pthread_cond_timedwait(c, lock, &t) != ETIMEDOUT;
}

/* Starts a thread with a stack that suffices here, even under ulimit -s 64. quiet: it blocks all
   signals, so that the program's handlers run on its own threads. */
static cddp_result cddp__thread_start(pthread_t *thread, void *(*fn)(void *), void *arg,
                                      bool quiet) {
  pthread_attr_t a;
  sigset_t all, old;
  size_t stack = 0;
  int e = pthread_attr_init(&a);
  if (e == 0) {
    pthread_attr_getstacksize(&a, &stack);
    if (stack < CDDP__STACK_MIN) pthread_attr_setstacksize(&a, CDDP__STACK_MIN);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, quiet ? &all : NULL, &old);
    e = pthread_create(thread, &a, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&a);
  }
  return e == 0 ? CDDP_OK : cddp__fail(CDDP_SYSTEM, "pthread_create: %s", strerror(e));
}

/* How many bytes a file may have behind `at`; 0: errno is EFBIG. To write more than the process's
   limit (ulimit -f) sends the thread SIGXFSZ, which ends the process by default. */
static uint64_t cddp__file_room(uint64_t at) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0) return UINT64_MAX - at;
  if (at >= limit.rlim_cur) errno = EFBIG;
  return at < limit.rlim_cur ? limit.rlim_cur - at : 0;
}

/* What follows strerror(e) in the error text of a call that makes a file larger. */
static const char *cddp__size_cure(int e) {
  return e == EFBIG ? "; raise the file size limit (ulimit -f, RLIMIT_FSIZE)" : "";
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

/* Opens the recorder if the environment asks for one; *out is NULL if not. life: 0; if the process
   has joined, where an earlier one of its rank may have a file, its number. The file has its full
   size from the start: a disk that is full later must not end the program. */
static cddp_result cddp__record_open(cddp_record_header **out, uint64_t job, int rank, int size,
                                     int life) {
  const char *dir = getenv("CDDP_RECORD");
  size_t bytes = cddp__record_bytes();
  cddp_record_header *h;
  char path[4096];
  void *p = MAP_FAILED;
  int fd, e;
  *out = NULL;
  if (dir == NULL || dir[0] == 0) return CDDP_OK;
  snprintf(path, sizeof path, "%s/cddp-%016" PRIx64 "-%d", dir, job, rank);
  if (life > 0) cddp__append(path, sizeof path, ".join%d", life);
  cddp__append(path, sizeof path, ".rec");
  fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0)
    return cddp__fail(CDDP_IO, "CDDP_RECORD: open %s, the flight recorder's file: %s", path,
                      strerror(errno));
  e = cddp__file_room(0) >= bytes ? posix_fallocate(fd, 0, (off_t)bytes) : EFBIG;
  if (e == 0) p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (e == 0 && p == MAP_FAILED) e = errno;
  close(fd);
  if (e != 0) {
    unlink(path);
    return cddp__fail(CDDP_IO, "CDDP_RECORD: %zu bytes for the flight recorder's file %s: %s%s",
                      bytes, path, strerror(e), cddp__size_cure(e));
  }
  h = (cddp_record_header *)p;
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

/* The record of an operation; NULL if the recorder is off (0) or its place is another one's now. */
static cddp_record *cddp__record_at(const cddp_group *g, uint64_t number) {
  cddp_record *r;
  if (CDDP__LIKELY(number == 0)) return NULL;
  r = (cddp_record *)(void *)(g->host->record + 1) + (number - 1) % CDDP_RECORDS;
  return __atomic_load_n(&r->number, __ATOMIC_ACQUIRE) == number ? r : NULL;
}

/* Notes an operation of g that has been asked for; returns its number, 0 if the recorder is off.
   what: at most 15 bytes. */
static uint64_t cddp__record_new(const cddp_group *g, const char *what, uint64_t count, int dtype,
                                 int op, int root) {
  cddp_record_header *h = g->host->record;
  cddp_record *r;
  uint64_t number;
  if (CDDP__LIKELY(h == NULL)) return 0;
  number = __atomic_add_fetch(&h->next, 1, __ATOMIC_RELAXED);
  r = (cddp_record *)(void *)(h + 1) + (number - 1) % CDDP_RECORDS;
  __atomic_exchange_n(&r->number, 0, __ATOMIC_SEQ_CST);
  /* No later store may come before this one: a reader of a new field must not read the old number.
     On x86 the exchange sees to that; gcc's thread sanitizer knows no fences. */
#if !defined(__x86_64__) && !defined(__i386__) && !defined(__SANITIZE_THREAD__)
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
  r->sequence = 0;
  r->group = g->id;
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

static void cddp__record_start(const cddp_group *g, uint64_t number, uint64_t sequence) {
  cddp_record *r = cddp__record_at(g, number);
  if (CDDP__LIKELY(r == NULL)) return;
  r->sequence = sequence;
  r->started = cddp__nanoseconds(CLOCK_MONOTONIC);
}

static void cddp__record_finish(const cddp_group *g, uint64_t number, cddp_result result) {
  cddp_record *r = cddp__record_at(g, number);
  if (CDDP__LIKELY(r == NULL)) return;
  r->result = (int32_t)result;
  r->ended = cddp__nanoseconds(CLOCK_MONOTONIC);
}

/* Notes what has happened at this moment. */
static void cddp__record_event(const cddp_group *g, const char *what, uint64_t count,
                               cddp_result result) {
  cddp__record_finish(g, cddp__record_new(g, what, count, -1, -1, -1), result);
}

CDDP__COLD

/* >>bytes ----------------------------------------------------------------------------------------
   Numbers in little-endian order, hashes, random bytes, and the proof of a shared secret. Pure, but
   for cddp__random.
   Owns and touches nothing.
   Entry points: cddp__put32 to cddp__get64, cddp__hash64, cddp__random, cddp__hmac, and
   cddp__challenge_begin and _feed, of which CHALLENGE below says how they work. */

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

/* FNV-1a; start with h = 0. */
static uint64_t cddp__hash64(uint64_t h, const void *data, size_t n) {
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

typedef struct cddp__sha256 {
  uint32_t h[8];
  uint64_t bytes;          /* hashed so far */
  unsigned char block[64]; /* the last bytes % 64 of them */
} cddp__sha256;

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

/* CHALLENGE. Both ends of a connection prove that they know one secret without showing it, over a
   fresh nonce of each, so that no recording of an earlier connection helps. The labels name the end
   and the purpose, so that no proof serves in another place. A stranger who calls gets a nonce and
   nothing to test guesses on. What follows on the connection is neither encrypted nor signed.
     caller: HELLO, nonce                       called: CHALLENGE, nonce
     caller: PROOF, HMAC(caller's label, ...)   called: WELCOME, HMAC(called end's label, ...)
   Instead of an answer the called end may send REFUSAL and a letter: S = a secret is needed here,
   W = not that one, N = there is none here. Works as follows, without blocking: begin, then send
   `out` whenever out_size is not 0 (and set that to 0), and feed what comes, until the state is no
   longer CDDP__CHALLENGE_ON. A called end without a secret takes anything that is no HELLO. */
#define CDDP__AUTH_HELLO "CDDPau\r\n" /* a web server or redis answers a line of text */
#define CDDP__AUTH_CHALLENGE "CDDPchal"
#define CDDP__AUTH_PROOF "CDDPprov"
#define CDDP__AUTH_WELCOME "CDDPgood"
#define CDDP__AUTH_REFUSAL "CDDPdeny"
#define CDDP__NONCE_SIZE 32
#define CDDP__PROOF_SIZE 32

enum cddp__challenge_state {
  CDDP__CHALLENGE_ON,      /* wants more bytes */
  CDDP__CHALLENGE_PROVEN,  /* both know the secret */
  CDDP__CHALLENGE_REFUSED, /* the called end said why */
  CDDP__CHALLENGE_WRONG,   /* the other end does not know the secret */
  CDDP__CHALLENGE_ALIEN    /* the other end does not speak like this */
};

typedef struct cddp__challenge {
  const char *secret;  /* must outlive it; the called end's may be NULL: none */
  const char *purpose; /* part of the labels */
  bool caller;
  int state, step; /* cddp__challenge_state; messages that came */
  char why;        /* REFUSED: the letter */
  unsigned char covered[2 * CDDP__NONCE_SIZE + 64]; /* by proofs: the nonces, caller's first, and
                                                       what both must agree on besides */
  size_t covered_size;
  unsigned char in[8 + CDDP__NONCE_SIZE], out[8 + CDDP__NONCE_SIZE]; /* a tag; a nonce or proof */
  size_t in_size, out_size;
} cddp__challenge;

static void cddp__challenge_say(cddp__challenge *c, const char *tag, const void *data, size_t n) {
  memcpy(c->out, tag, 8);
  memcpy(c->out + 8, data, n);
  c->out_size = 8 + n;
}

static void cddp__challenge_prove(const cddp__challenge *c, bool caller,
                                  unsigned char proof[CDDP__PROOF_SIZE]) {
  char label[64];
  snprintf(label, sizeof label, "cddp %s %s", c->purpose, caller ? "caller" : "called");
  cddp__hmac(c->secret, label, c->covered, c->covered_size, proof);
}

/* context: at most 64 bytes that the proofs cover too, the same at both ends; NULL: none. */
static cddp_result cddp__challenge_begin(cddp__challenge *c, const char *secret,
                                         const char *purpose, bool caller, const void *context,
                                         size_t context_size) {
  unsigned char *own = c->covered + (caller ? 0 : CDDP__NONCE_SIZE);
  cddp_result r;
  memset(c, 0, sizeof *c);
  c->secret = secret;
  c->purpose = purpose;
  c->caller = caller;
  c->covered_size = 2 * CDDP__NONCE_SIZE + context_size;
  CDDP_ASSERT(c->covered_size <= sizeof c->covered);
  cddp__copy(c->covered + 2 * CDDP__NONCE_SIZE, context, context_size);
  r = cddp__random(own, CDDP__NONCE_SIZE);
  if (r == CDDP_OK && caller) cddp__challenge_say(c, CDDP__AUTH_HELLO, own, CDDP__NONCE_SIZE);
  return r;
}

/* A whole message has come: c->in. */
static void cddp__challenge_message(cddp__challenge *c) {
  unsigned char proof[CDDP__PROOF_SIZE];
  c->in_size = 0;
  if (c->step++ == 0) { /* the other end's nonce */
    memcpy(c->covered + (c->caller ? CDDP__NONCE_SIZE : 0), c->in + 8, CDDP__NONCE_SIZE);
    cddp__challenge_prove(c, true, proof);
    if (c->caller)
      cddp__challenge_say(c, CDDP__AUTH_PROOF, proof, sizeof proof);
    else
      cddp__challenge_say(c, CDDP__AUTH_CHALLENGE, c->covered + CDDP__NONCE_SIZE,
                          CDDP__NONCE_SIZE);
    return;
  }
  cddp__challenge_prove(c, !c->caller, proof);
  c->state = cddp__same_bytes(proof, c->in + 8, sizeof proof) ? CDDP__CHALLENGE_PROVEN
                                                              : CDDP__CHALLENGE_WRONG;
  if (c->caller) return;
  cddp__challenge_prove(c, false, proof);
  if (c->state == CDDP__CHALLENGE_PROVEN)
    cddp__challenge_say(c, CDDP__AUTH_WELCOME, proof, sizeof proof);
  else
    cddp__challenge_say(c, CDDP__AUTH_REFUSAL, "W", 1);
}

/* Takes bytes that came; returns how many. What it leaves, if anything, is no part of this. */
static size_t cddp__challenge_feed(cddp__challenge *c, const unsigned char *p, size_t n) {
  static const char *const tags[2][2] = {{CDDP__AUTH_HELLO, CDDP__AUTH_PROOF},
                                         {CDDP__AUTH_CHALLENGE, CDDP__AUTH_WELCOME}};
  size_t used = 0;
  if (c->secret == NULL && n > 0) {
    c->state = p[0] == CDDP__AUTH_HELLO[0] ? CDDP__CHALLENGE_WRONG : CDDP__CHALLENGE_PROVEN;
    if (c->state == CDDP__CHALLENGE_WRONG) cddp__challenge_say(c, CDDP__AUTH_REFUSAL, "N", 1);
    return 0;
  }
  while (used < n && c->state == CDDP__CHALLENGE_ON) {
    size_t k = cddp__min(c->in_size + 1, 8);
    c->in[c->in_size++] = p[used++];
    if (memcmp(c->in, tags[c->caller][c->step], k) == 0) {
      if (c->in_size == sizeof c->in) cddp__challenge_message(c);
    } else if (!c->caller || memcmp(c->in, CDDP__AUTH_REFUSAL, k) != 0) {
      c->state = CDDP__CHALLENGE_ALIEN;
      if (!c->caller) cddp__challenge_say(c, CDDP__AUTH_REFUSAL, "S", 1);
    } else if (c->in_size == 9) {
      c->state = CDDP__CHALLENGE_REFUSED;
      c->why = (char)c->in[8];
    }
  }
  return used;
}

/* >>sockets ------------------------------------------------------------------------------------
   Addresses of hosts and abstract Unix sockets; to connect, listen, send and receive; bytes of
   files.
   Owns: the list of sockets that a forked child gives up.
   May touch: the system only.
   Entry points: cddp__resolve, cddp__connect_address, cddp__listen_all, cddp__accept,
   cddp__send_all, cddp__recv_all, cddp__own_socket, cddp__file_io.
   Works as follows: no socket blocks. A function that waits takes a deadline (cddp__now()) and
   polls. A function whose callers try several addresses returns 0 or an errno; the others return a
   result and leave its text. */

#define CDDP__ADDRESSES_MAX 16 /* addresses of one host name */

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

/* FORK. The child of a fork has copies of all descriptors, and as long as it lives its copy of a
   connection keeps the other side from seeing that the rank has died. So the child gives up the
   sockets that are listed here: their numbers stay taken, by sockets that are connected to nothing,
   since the child's copy of a group or store may still use or close them. Descriptors from 2^17 on
   are not listed. glibc forgets the handler when the library that it is in is unloaded. */
#define CDDP__OWN_SOCKETS (1 << 17)
static uint32_t cddp__own_sockets[CDDP__OWN_SOCKETS / 32]; /* bits; atomic, for any thread */

static void cddp__in_forked_child(void) { /* async-signal-safe */
  int idle = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fd;
  uint32_t i, word;
  for (i = 0; i < CDDP__OWN_SOCKETS / 32; i++) {
    if ((word = __atomic_load_n(&cddp__own_sockets[i], __ATOMIC_ACQUIRE)) == 0) continue;
    __atomic_store_n(&cddp__own_sockets[i], 0, __ATOMIC_RELEASE);
    for (fd = (int)i * 32; word != 0; fd++, word >>= 1) {
      if ((word & 1) == 0) continue;
      if (idle < 0 || syscall(SYS_dup3, idle, fd, O_CLOEXEC) < 0) close(fd);
      if (idle < 0) idle = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); /* takes its number */
      if (idle == fd) idle = dup(fd);
    }
  }
  if (idle >= 0) close(idle);
}

static void cddp__watch_forks(void) { (void)pthread_atfork(NULL, NULL, cddp__in_forked_child); }

/* fd is a socket that forked children shall not keep open. */
static void cddp__own_socket(int fd) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, cddp__watch_forks);
  if (fd >= 0 && fd < CDDP__OWN_SOCKETS)
    __atomic_fetch_or(&cddp__own_sockets[fd / 32], 1u << (fd % 32), __ATOMIC_ACQ_REL);
}

static void cddp__close_fd(int *fd) {
  if (*fd >= 0 && *fd < CDDP__OWN_SOCKETS) /* the number's next owner may be anybody */
    __atomic_fetch_and(&cddp__own_sockets[*fd / 32], ~(1u << (*fd % 32)), __ATOMIC_ACQ_REL);
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

/* Waits until poll(2) has something to say about fd. */
static cddp_result cddp__wait_fd(int fd, short events, double deadline) {
  for (;;) {
    struct pollfd p = {fd, events, 0};
    int n = poll(&p, 1, cddp__poll_ms(deadline, 60000));
    if (n > 0) return CDDP_OK;
    if (n < 0 && errno != EINTR) return cddp__fail_errno("poll");
    if (cddp__now() >= deadline) return cddp__fail(CDDP_TIMEOUT, "timed out");
  }
}

/* Sends size bytes from out, or receives as many into in (the other one is NULL), before the
   deadline. The text does not name the peer: callers put it in front. */
static cddp_result cddp__send_or_recv(int fd, const void *out, void *in, size_t size,
                                      double deadline) {
  size_t at = 0;
  while (at < size) {
    ssize_t n =
        in != NULL ? CDDP__RECV(fd, (char *)in + at, size - at, MSG_DONTWAIT)
                   : CDDP__SEND(fd, (const char *)out + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == 0 && in != NULL)
      return cddp__fail(CDDP_NETWORK, "the other side closed the connection");
    if (n >= 0) {
      at += (size_t)n;
    } else if (errno == EAGAIN) {
      cddp_result r = cddp__wait_fd(fd, in != NULL ? POLLIN : POLLOUT, deadline);
      if (r != CDDP_OK) return r;
    } else if (errno != EINTR) {
      return cddp__fail(CDDP_NETWORK, "%s: %s", in != NULL ? "recv" : "send", strerror(errno));
    }
  }
  return CDDP_OK;
}

static cddp_result cddp__send_all(int fd, const void *data, size_t size, double deadline) {
  return cddp__send_or_recv(fd, data, NULL, size, deadline);
}

static cddp_result cddp__recv_all(int fd, void *data, size_t size, double deadline) {
  return cddp__send_or_recv(fd, NULL, data, size, deadline);
}

/* Sends bytes or receives up to n, without blocking, as sendmsg and recvmsg do. On a Unix socket
   with up to two descriptors: those of fds that are not -1 (NULL: none). Received ones replace what
   fds has. */
static ssize_t cddp__pass_fds(int fd, void *data, size_t n, int *fds, bool out) {
  union {
    struct cmsghdr head;
    char space[CMSG_SPACE(2 * sizeof(int))];
  } control;
  size_t count = fds == NULL ? 0 : !out || fds[1] >= 0 ? 2 : fds[0] >= 0;
  struct iovec io = {data, n};
  struct msghdr m;
  ssize_t done;
  memset(&m, 0, sizeof m);
  memset(&control, 0, sizeof control);
  m.msg_iov = &io;
  m.msg_iovlen = 1;
  m.msg_control = control.space;
  m.msg_controllen = count > 0 ? CMSG_SPACE(count * sizeof(int)) : 0;
  if (out) {
    control.head.cmsg_level = SOL_SOCKET;
    control.head.cmsg_type = SCM_RIGHTS;
    control.head.cmsg_len = CMSG_LEN(count * sizeof(int));
    if (count > 0) memcpy(CMSG_DATA(&control.head), fds, count * sizeof(int));
    return sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  done = recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (done <= 0 || m.msg_controllen < CMSG_LEN(sizeof(int)) ||
      control.head.cmsg_type != SCM_RIGHTS)
    return done;
  cddp__close_fd(&fds[0]);
  cddp__close_fd(&fds[1]);
  memcpy(fds, CMSG_DATA(&control.head),
         cddp__min(control.head.cmsg_len - CMSG_LEN(0), 2 * sizeof *fds));
  return done;
}

/* Splits "host:port" or "[::1]:port". */
static cddp_result cddp__host_port(const char *text, char *host, size_t host_capacity, int *port) {
  const char *colon = strrchr(text, ':'), *begin = text, *end = colon;
  size_t digits = colon != NULL ? strspn(colon + 1, "0123456789") : 0;
  bool v6 = text[0] == '[', good = digits > 0 && digits <= 5 && colon[1 + digits] == 0;
  if (good && v6) begin++, end--;
  if (!good || atoi(colon + 1) > 65535 || end <= begin ||
      (size_t)(end - begin) >= host_capacity ||
      (v6 ? *end != ']' : memchr(begin, ':', (size_t)(end - begin)) != NULL))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "'%.80s' is no host:port, or [address]:port for IPv6, with a port from 0 to "
                      "65535",
                      text);
  memcpy(host, begin, (size_t)(end - begin));
  host[end - begin] = '\0';
  *port = atoi(colon + 1);
  return CDDP_OK;
}

/* "127.0.0.1:29500", "[::1]:29500" or "the abstract Unix socket @name". */
static void cddp__address_text(const cddp__address *a, char *text, size_t capacity) {
  char host[128], port[16];
  int name = (int)a->size - (int)offsetof(struct sockaddr_un, sun_path) - 1; /* its size */
  if (a->sa.ss_family == AF_UNIX)
    snprintf(text, capacity, "the abstract Unix socket @%.*s", name > 0 ? name : 0,
             a->un.sun_path + 1);
  else if (getnameinfo(&a->any, a->size, host, sizeof host, port, sizeof port,
                       NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    snprintf(text, capacity, "(unknown address)");
  else
    snprintf(text, capacity, a->sa.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

/* Linux has the port of IPv4 and of IPv6 in the same place. */
static void cddp__address_set_port(cddp__address *a, int port) {
  if (a->sa.ss_family != AF_UNIX) a->v4.sin_port = htons((uint16_t)port);
}

static int cddp__address_port(const cddp__address *a) {
  return a->sa.ss_family != AF_UNIX ? ntohs(a->v4.sin_port) : 0;
}

static bool cddp__address_same_host(const cddp__address *a, const cddp__address *b) {
  if (a->sa.ss_family != b->sa.ss_family || a->sa.ss_family == AF_UNIX) return false;
  if (a->sa.ss_family == AF_INET) return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
  return memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr) == 0 &&
         a->v6.sin6_scope_id == b->v6.sin6_scope_id;
}

static bool cddp__address_loopback(const cddp__address *a) {
  if (a->sa.ss_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr) != 0;
  return a->sa.ss_family == AF_INET && ntohl(a->v4.sin_addr.s_addr) >> 24 == 127;
}

/* An IPv4 or IPv6 address from its bytes, whatever they are. */
static cddp__address cddp__internet_address(const struct sockaddr_in6 *in) {
  cddp__address a;
  memset(&a, 0, sizeof a);
  a.v6 = *in;
  if (a.sa.ss_family != AF_INET6) a.sa.ss_family = AF_INET;
  a.size = a.sa.ss_family == AF_INET6 ? sizeof a.v6 : sizeof a.v4;
  return a;
}

/* An abstract Unix socket: of this host alone, without a port and without a file. Its name begins
   behind a NUL. */
static void cddp__unix_name(cddp__address *a, const char *name) {
  size_t n = cddp__min(strlen(name), sizeof a->un.sun_path - 1);
  memset(a, 0, sizeof *a);
  a->un.sun_family = AF_UNIX;
  memcpy(a->un.sun_path + 1, name, n);
  a->size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

/* The addresses of a host name, each once. */
static cddp_result cddp__resolve(const char *host, int port, cddp__address *out, int *count) {
  struct addrinfo hints, *list = NULL, *i;
  int e, n = 0, j;
  memset(&hints, 0, sizeof hints);
  hints.ai_socktype = SOCK_STREAM;
  e = getaddrinfo(host, NULL, &hints, &list);
  if (e != 0)
    return cddp__fail(CDDP_NETWORK,
                      "the host name '%s' does not resolve: %s; correct it, add it to /etc/hosts, "
                      "or set MASTER_ADDR to an address of rank 0's host",
                      host, e == EAI_SYSTEM ? strerror(errno) : gai_strerror(e));
  for (i = list; i != NULL && n < CDDP__ADDRESSES_MAX; i = i->ai_next) {
    if (i->ai_family != AF_INET && i->ai_family != AF_INET6) continue;
    memset(&out[n], 0, sizeof out[n]);
    memcpy(&out[n].sa, i->ai_addr, i->ai_addrlen);
    out[n].size = i->ai_addrlen;
    cddp__address_set_port(&out[n], port);
    for (j = 0; j < n && !cddp__address_same_host(&out[j], &out[n]); j++) continue;
    if (j == n) n++;
  }
  freeaddrinfo(list);
  *count = n;
  if (n > 0) return CDDP_OK;
  return cddp__fail(CDDP_NETWORK, "the host name '%s' has no IPv4 or IPv6 address", host);
}

/* This host's addresses on interfaces that are up: those of one interface, or (name NULL) all but
   loopback's. Link-local ones are left out unless asked for by name. Returns how many. */
static int cddp__interface_addresses(const char *name, cddp__address *out, int capacity) {
  struct ifaddrs *list = NULL, *i;
  int n = 0;
  if (getifaddrs(&list) != 0) return 0;
  for (i = list; i != NULL && n < capacity; i = i->ifa_next) {
    int family = i->ifa_addr != NULL ? i->ifa_addr->sa_family : AF_UNSPEC;
    size_t size = family == AF_INET6 ? sizeof out->v6 : sizeof out->v4;
    if ((family != AF_INET && family != AF_INET6) || !(i->ifa_flags & IFF_UP)) continue;
    if (name != NULL ? strcmp(name, i->ifa_name) != 0 : (i->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    memset(&out[n], 0, sizeof out[n]);
    memcpy(&out[n].sa, i->ifa_addr, size);
    out[n].size = (socklen_t)size;
    n += name != NULL || family == AF_INET || !IN6_IS_ADDR_LINKLOCAL(&out[n].v6.sin6_addr);
  }
  freeifaddrs(list);
  return n;
}

/* Whether the address is of this host: one of its interfaces', loopback, 0.0.0.0 or ::. */
static bool cddp__address_here(const cddp__address *a) {
  cddp__address own[CDDP__ADDRESSES_MAX + 2];
  int n = cddp__interface_addresses(NULL, own, CDDP__ADDRESSES_MAX), i;
  memset(&own[n], 0, 2 * sizeof own[0]);
  own[n++].sa.ss_family = AF_INET;
  own[n++].sa.ss_family = AF_INET6;
  for (i = 0; i < n && !cddp__address_same_host(a, &own[i]); i++) {}
  return i < n || cddp__address_loopback(a);
}

static bool cddp__local_address(int fd, cddp__address *a) {
  memset(a, 0, sizeof *a);
  a->size = sizeof a->sa;
  return getsockname(fd, &a->any, &a->size) == 0;
}

static bool cddp__set_nodelay(int fd) {
  int on = 1;
  return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0 &&
         setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on) == 0;
}

/* The process that made the other end of a Unix socket: pid, uid and gid, as in struct ucred. */
static bool cddp__peer_process(int fd, uint32_t out[3]) {
  socklen_t n = 3 * sizeof *out;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, out, &n) == 0;
}

#define CDDP__FOREIGN (-1) /* in the place of an errno: the process there is another user's */

/* Readies a connection: 0, CDDP__FOREIGN or an errno. Any user may take or call an abstract name:
   the process at the other end must be this user's. */
static int cddp__stream_ready(int fd) {
  cddp__address a;
  uint32_t peer[3];
  (void)cddp__local_address(fd, &a);
  if (a.sa.ss_family != AF_UNIX) return cddp__set_nodelay(fd) ? 0 : errno;
  if (!cddp__peer_process(fd, peer)) return errno;
  return peer[1] == (uint32_t)geteuid() ? 0 : CDDP__FOREIGN;
}

/* The next connection of a listening socket, without blocking, or -1 and errno. */
static int cddp__accept(int listener) {
  return (int)syscall(SYS_accept4, listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
}

/* A TCP connection to a port of this host where nobody listens may, when that port is also picked
   for the near end, connect to itself. */
static bool cddp__connected_to_itself(int fd) {
  cddp__address here, there;
  memset(&there, 0, sizeof there);
  there.size = sizeof there.sa;
  return cddp__local_address(fd, &here) && getpeername(fd, &there.any, &there.size) == 0 &&
         cddp__address_same_host(&here, &there) &&
         cddp__address_port(&here) == cddp__address_port(&there);
}

/* One attempt. Returns 0, CDDP__FOREIGN or an errno; *out is a non-blocking socket, or -1. */
static int cddp__connect_address(const cddp__address *a, double deadline, int *out) {
  int error = 0, fd = socket(a->sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  socklen_t size = sizeof error;
  *out = fd;
  if (fd < 0) return errno;
  if (connect(fd, &a->any, a->size) != 0) {
    if (errno != EINPROGRESS && errno != EINTR)
      error = errno;
    else if (cddp__wait_fd(fd, POLLOUT, deadline) != CDDP_OK)
      error = ETIMEDOUT;
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
      error = errno;
  }
  if (error == 0 && cddp__connected_to_itself(fd)) error = ECONNREFUSED;
  if (error == 0) error = cddp__stream_ready(fd);
  if (error != 0) cddp__close_fd(out);
  return error;
}

/* A listening socket. Returns 0 or an errno. "::" serves IPv4 too, any other IPv6 address only
   itself. */
static int cddp__listen_address(const cddp__address *a, int *out) {
  int on = 1, error, fd = socket(a->sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  *out = fd;
  if (fd < 0) return errno;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (a->sa.ss_family == AF_INET6) {
    int v6only = !IN6_IS_ADDR_UNSPECIFIED(&a->v6.sin6_addr);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6only, sizeof v6only);
  }
  if (bind(fd, &a->any, a->size) == 0 && listen(fd, SOMAXCONN) == 0) return 0;
  error = errno;
  cddp__close_fd(out);
  return error;
}

/* Listens on each of the addresses that this host has, which get one port; the system chooses it
   when theirs is 0. An address in use is an error; one that this host lacks (::1 without IPv6) is
   left out when there are others. After a failure errno says why. */
static cddp_result cddp__listen_all(cddp__address *a, int count, int *fds, int *fd_count) {
  int asked = cddp__address_port(&a[0]), error = EADDRINUSE, failed = 0, attempt, i, n, e;
  cddp__address bound;
  char text[160];
  for (attempt = 0; attempt < 32 && error == EADDRINUSE && (attempt == 0 || asked == 0);
       attempt++) {
    int port = asked;
    for (i = n = error = 0; i < count && error != EADDRINUSE; i++) {
      cddp__address_set_port(&a[i], port);
      if ((e = cddp__listen_address(&a[i], &fds[n])) != 0) {
        error = e;
        failed = i;
      } else if (cddp__local_address(fds[n++], &bound) && port == 0) {
        port = cddp__address_port(&bound);
      }
    }
    if (n > 0 && error != EADDRINUSE) {
      for (i = 0; i < count; i++) cddp__address_set_port(&a[i], port);
      *fd_count = n;
      return CDDP_OK;
    }
    while (n > 0) cddp__close_fd(&fds[--n]);
  }
  cddp__address_text(&a[failed], text, sizeof text);
  cddp__fail(CDDP_NETWORK, "cannot listen on %s: %s", text, strerror(error));
  errno = error;
  return CDDP_NETWORK;
}

/* A listening socket on 127.0.0.1 and a port of the system's choice. */
static cddp_result cddp__listen_any(int *fd, int *port) {
  cddp__address a[CDDP__ADDRESSES_MAX];
  int count = 0;
  cddp_result r = cddp__resolve("127.0.0.1", 0, a, &count);
  *fd = -1;
  if (r == CDDP_OK) r = cddp__listen_all(a, 1, fd, &count);
  *port = r == CDDP_OK ? cddp__address_port(&a[0]) : 0;
  return r;
}

/* Reads or writes all bytes of a part of the file. */
static cddp_result cddp__file_io(int fd, bool write, void *data, uint64_t size, uint64_t at) {
  unsigned char *p = (unsigned char *)data;
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && size > 0) {
    uint64_t room = write ? cddp__file_room(at) : size;
    size_t most = (size_t)(size < 1u << 30 ? size : 1u << 30);
    ssize_t n = -1;
    if (room < most) most = (size_t)room;
    if (!write)
      n = CDDP__PREAD(fd, p, most, (off_t)at);
    else if (most > 0)
      n = CDDP__PWRITE(fd, p, most, (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      p += n;
      size -= (uint64_t)n;
      at += (uint64_t)n;
    } else if (write) {
      r = cddp__fail(CDDP_IO, "write, after %" PRIu64 " bytes: %s%s", at,
                     n == 0 ? "nothing was written" : strerror(errno),
                     n == 0 ? "" : cddp__size_cure(errno));
    } else {
      r = n < 0 ? cddp__fail(CDDP_IO, "read: %s", strerror(errno))
                : cddp__fail(CDDP_IO, "it has become shorter while it was read");
    }
  }
  return r;
}

/* Whether the path is still the name of the file that fd is. */
static bool cddp__file_is_named(int fd, const char *path) {
  struct stat a, b;
  return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* >>store --------------------------------------------------------------------------------------
   The key-value store in which ranks meet, and which programs may use.
   Owns: a server's thread, map and connections; a store's connection and file.
   May touch: no group.
   Entry points: cddp__store_open, cddp__store_close, cddp__store_run.
   Works as follows: the protocol is c10d's TCPStore of PyTorch 2.2 and later. A client sends a
   command and reads its answer, one at a time, under the store's lock. The server runs each command
   with cddp__execute. One that has to wait (WAIT) stays at the head of its connection's input and
   is tried again after each command that made a key. tcp://, unix:// and file:// differ in how a
   client finds the server.
   A command is its code, a byte; then, if it is counted, a number of items, else there is one item;
   an item is so many strings, the first of them a key; then tail bytes. Numbers are 8 bytes,
   little-endian; a string is its length, a number, and its bytes. VALIDATE comes first on a
   connection. Left out are QUEUE_PUSH to BARRIER (14 to 18), which a rank of PyTorch sends by no
   default. */

#define CDDP__COMMAND_MAX (64u << 20) /* bytes of one command or reply, all strings together */
#define CDDP__BUFFER_MAX (CDDP__COMMAND_MAX + CDDP__VALUE_MAX) /* of a connection, each way */
#define CDDP__PENDING_MAX 128         /* connections to a server that have not yet greeted */
#define CDDP__SERVER_PAUSE (256u << 10) /* unread output at which a connection's commands wait */
#define CDDP__SERVER_MEMORY ((size_t)1 << 30) /* bytes of all connections' buffers together */
#ifndef CDDP__STORE_MEMORY
#define CDDP__STORE_MEMORY ((size_t)512 << 20) /* bytes of a server's keys and values */
#endif

/* The bytes of an answer's number; of STRING's that is a length, and the string follows. */
enum cddp__answer { CDDP__NONE, CDDP__BYTE = 1, CDDP__WORD = 4, CDDP__NUMBER = 8, CDDP__STRING };

/* Code, counted, strings of an item, tail bytes, answer. */
#define CDDP__COMMANDS(X)                                                                          \
  X(VALIDATE, 0, 0, 4, NONE)                                                                       \
  X(SET, 0, 2, 0, NONE)                                                                            \
  X(COMPARE_SET, 0, 3, 0, STRING)                                                                  \
  X(GET, 0, 1, 0, STRING)                                                                          \
  X(ADD, 0, 1, 8, NUMBER)                                                                          \
  X(CHECK, 1, 1, 0, BYTE)                                                                          \
  X(WAIT, 1, 1, 0, BYTE)                                                                           \
  X(GETNUMKEYS, 0, 0, 0, NUMBER)                                                                   \
  X(DELETE_KEY, 0, 1, 0, NUMBER)                                                                   \
  X(APPEND, 0, 2, 0, NONE)                                                                         \
  X(MULTI_GET, 1, 1, 0, STRING)                                                                    \
  X(MULTI_SET, 1, 2, 0, NONE)                                                                      \
  X(CANCEL_WAIT, 0, 0, 0, BYTE)                                                                    \
  X(PING, 0, 0, 4, WORD)

#define CDDP__X(code, counted, strings, tail, answer) CDDP__##code,
enum cddp__code { CDDP__COMMANDS(CDDP__X) CDDP__CODES };
#undef CDDP__X
#define CDDP__X(code, counted, strings, tail, answer) {counted, strings, tail, CDDP__##answer},
static const struct cddp__command {
  unsigned char counted, strings, tail, answer;
} cddp__commands[CDDP__CODES] = {CDDP__COMMANDS(CDDP__X)};
#undef CDDP__X

/* What a client says first: VALIDATE, and a CHECK, whose answer shows that there is a store. Its
   key is a line of text, to which a web server would answer in its own way. */
#define CDDP__VALIDATE_SIZE 5
static const char cddp__greeting[] = "\0\xce\xf7\x85\x3c"
                                     "\5\1\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0\r\n\r\n";

typedef struct cddp__span { /* bytes that belong to somebody else */
  const unsigned char *data;
  size_t size;
} cddp__span;

typedef struct cddp__buffer { /* a growing queue of bytes */
  const cddp_allocator *allocator;
  size_t *total; /* NULL, or where the capacity of several buffers is added up */
  unsigned char *data;
  size_t start, end; /* the bytes in use are data[start .. end) */
  size_t capacity;
  bool failed; /* something could not be added for lack of memory */
} cddp__buffer;

static cddp__span cddp__span_of(const void *data, size_t size) {
  cddp__span s = {(const unsigned char *)data, size};
  return s;
}

static bool cddp__span_equal(cddp__span a, cddp__span b) {
  return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

/* The string at *p of a command that cddp__frame_scan found whole; moves *p behind it. */
static cddp__span cddp__take_string(const unsigned char **p) {
  cddp__span s = cddp__span_of(*p + 8, (size_t)cddp__get64(*p));
  *p = s.data + s.size;
  return s;
}

static size_t cddp__buffer_size(const cddp__buffer *b) { return b->end - b->start; }

static cddp__span cddp__buffer_span(const cddp__buffer *b) { /* NULL + 0 is not allowed in C */
  return cddp__span_of(b->data != NULL ? b->data + b->start : NULL, cddp__buffer_size(b));
}

/* Makes room for `more` bytes behind the end; false when there is no memory. What is in use moves
   to the front if at least as much was consumed, else into twice the room: so moves are rare. */
static bool cddp__buffer_reserve(cddp__buffer *b, size_t more) {
  size_t size = cddp__buffer_size(b), capacity = cddp__max(b->capacity, 256);
  unsigned char *data = b->data;
  if (b->capacity - b->end >= more) return true;
  if (b->start < size || b->capacity - size < more) {
    while (capacity / 2 < size || capacity - size < more) capacity *= 2;
    data = (unsigned char *)cddp__malloc(b->allocator, capacity);
    if (data == NULL) return false;
  }
  if (size > 0) memmove(data, b->data + b->start, size);
  if (data != b->data) {
    cddp__free(b->allocator, b->data);
    if (b->total != NULL) *b->total += capacity - b->capacity;
    b->data = data;
    b->capacity = capacity;
  }
  b->start = 0;
  b->end = size;
  return true;
}

static void cddp__buffer_add(cddp__buffer *b, const void *data, size_t size) {
  if (b->failed || !cddp__buffer_reserve(b, size)) {
    b->failed = true;
    return;
  }
  if (size > 0) memcpy(b->data + b->end, data, size);
  b->end += size;
}

/* Adds the low bytes of a number. */
static void cddp__buffer_add_number(cddp__buffer *b, uint64_t number, size_t bytes) {
  unsigned char all[8];
  cddp__put64(all, number);
  cddp__buffer_add(b, all, bytes);
}

/* Adds a string: the prefix (a client's keys begin with "/", as in PyTorch) and s. */
static void cddp__buffer_add_string(cddp__buffer *b, const char *prefix, cddp__span s) {
  cddp__buffer_add_number(b, strlen(prefix) + s.size, 8);
  cddp__buffer_add(b, prefix, strlen(prefix));
  cddp__buffer_add(b, s.data, s.size);
}

/* Empties b, and frees it when it has grown beyond `keep` bytes. */
static void cddp__buffer_clear(cddp__buffer *b, size_t keep) {
  b->start = b->end = 0;
  b->failed = false;
  if (b->capacity <= keep) return;
  cddp__free(b->allocator, b->data);
  if (b->total != NULL) *b->total -= b->capacity;
  b->data = NULL;
  b->capacity = 0;
}

/* The command at the head of a stream: how far it has been looked through, and run. */
typedef struct cddp__frame {
  size_t scanned;   /* bytes found good so far */
  uint64_t strings; /* strings still to come */
  unsigned code;    /* cddp__code */
  size_t missing;   /* WAIT: where the first key is that was missing; 0 = not tried yet */
  uint64_t wants;   /* WAIT: that key's hash in the map */
} cddp__frame;

enum cddp__frame_result { CDDP__FRAME_PART, CDDP__FRAME_WHOLE, CDDP__FRAME_BAD };

/* Looks for a whole command in the n bytes at p, which begin with its code byte; f->scanned is then
   its size. Works as follows: strings are skipped one by one, and where they end is remembered in
   *f (zeroed for each new command), so that the next call with more bytes at p goes on there: the
   cost is linear however the bytes come. Every limit is checked as soon as the length is seen,
   before there is room made for it. */
static int cddp__frame_scan(cddp__frame *f, const unsigned char *p, size_t n) {
  const struct cddp__command *c;
  uint64_t size = 1;
  if (n == 0) return CDDP__FRAME_PART;
  f->code = p[0];
  if (f->code >= CDDP__CODES) return CDDP__FRAME_BAD;
  c = &cddp__commands[f->code];
  if (f->scanned == 0) {
    if (c->counted && n < 9) return CDDP__FRAME_PART;
    if (c->counted) size = cddp__get64(p + 1);
    if (size > CDDP__KEYS_MAX) return CDDP__FRAME_BAD;
    f->strings = size * c->strings;
    f->scanned = c->counted ? 9 : 1;
  }
  for (; f->strings > 0; f->strings--) {
    if (n - f->scanned < 8) return CDDP__FRAME_PART;
    size = cddp__get64(p + f->scanned);
    if (size > (f->strings % c->strings == 0 ? CDDP__KEY_MAX : CDDP__VALUE_MAX) ||
        f->scanned + 8 + size > CDDP__COMMAND_MAX)
      return CDDP__FRAME_BAD;
    if (n - f->scanned - 8 < size) return CDDP__FRAME_PART;
    f->scanned += 8 + (size_t)size;
  }
  if (n - f->scanned < c->tail) return CDDP__FRAME_PART;
  f->scanned += c->tail;
  return CDDP__FRAME_WHOLE;
}

/* --- the map --- */

#define CDDP__BUCKETS 8192u /* a power of two: some entries a bucket for the largest jobs */

typedef struct cddp__entry { /* the key's bytes follow the struct */
  struct cddp__entry *next;  /* in its bucket */
  uint64_t hash;
  size_t key_size;
  cddp__buffer value;
} cddp__entry;

typedef struct cddp__map { /* Owner: the server's thread */
  const cddp_allocator *allocator;
  cddp__entry *buckets[CDDP__BUCKETS];
  size_t count;     /* keys */
  size_t bytes;     /* that entries take */
  uint64_t created; /* keys that were made, ever */
  uint64_t newest;  /* hash of the last of them */
  uint64_t seed;    /* of the hash */
} cddp__map;

static uint64_t cddp__map_hash(const cddp__map *m, cddp__span key) {
  return cddp__hash64(m->seed, key.data, key.size);
}

/* The link that leads to the entry of key, or to the end of its chain. */
static cddp__entry **cddp__map_link(cddp__map *m, cddp__span key) {
  uint64_t hash = cddp__map_hash(m, key);
  cddp__entry **link = &m->buckets[hash % CDDP__BUCKETS];
  while (*link != NULL && !((*link)->hash == hash &&
                            cddp__span_equal(key, cddp__span_of(*link + 1, (*link)->key_size))))
    link = &(*link)->next;
  return link;
}

/* Whether there is such a key; its value, else an empty one. */
static bool cddp__map_get(cddp__map *m, cddp__span key, cddp__span *value) {
  const cddp__entry *e = *cddp__map_link(m, key);
  *value = e != NULL ? cddp__buffer_span(&e->value) : cddp__span_of(NULL, 0);
  return e != NULL;
}

/* Frees the entry that link leads to, if there is one. */
static bool cddp__map_drop(cddp__map *m, cddp__entry **link) {
  cddp__entry *e = *link;
  if (e == NULL) return false;
  *link = e->next;
  m->count--;
  m->bytes -= sizeof *e + e->key_size;
  cddp__buffer_clear(&e->value, 0);
  cddp__free(m->allocator, e);
  return true;
}

/* The value of key is now `value`, or (append) has it at its end. False, and nothing has changed,
   when it would take more memory than there is, or be too long. value must not be the entry's. */
static bool cddp__map_put(cddp__map *m, cddp__span key, cddp__span value, bool append) {
  cddp__entry **link = cddp__map_link(m, key), *e = *link;
  bool is_new = e == NULL;
  size_t old, size;
  if (is_new) {
    e = (cddp__entry *)cddp__calloc(m->allocator, 1, sizeof *e + key.size);
    if (e == NULL) return false;
    e->hash = cddp__map_hash(m, key);
    e->key_size = key.size;
    e->value.allocator = m->allocator;
    e->value.total = &m->bytes;
    cddp__copy(e + 1, key.data, key.size);
    *link = e;
    m->count++;
    m->bytes += sizeof *e + key.size;
  }
  old = e->value.end;
  if (!append) e->value.end = 0;
  size = e->value.end + value.size;
  if (size > CDDP__VALUE_MAX || m->bytes - e->value.capacity + size > CDDP__STORE_MEMORY ||
      !cddp__buffer_reserve(&e->value, value.size)) {
    e->value.end = old;
    if (is_new) cddp__map_drop(m, link);
    return false;
  }
  cddp__buffer_add(&e->value, value.data, value.size);
  m->created += is_new;
  if (is_new) m->newest = e->hash;
  return true;
}

/* A decimal number with an optional sign, as ADD stores it. */
static bool cddp__parse_i64(cddp__span text, int64_t *out) {
  char copy[24] = "", *end;
  if (text.size == 0 || text.size >= sizeof copy || text.data[0] <= ' ') return false;
  memcpy(copy, text.data, text.size);
  errno = 0;
  *out = strtoll(copy, &end, 10);
  return errno == 0 && end == copy + text.size;
}

/* Adds amount, wrapping, to the number that is key's value; there is none: 0. */
static bool cddp__map_add(cddp__map *m, cddp__span key, uint64_t amount, uint64_t *total) {
  cddp__span value;
  int64_t number = 0;
  char text[24];
  if (cddp__map_get(m, key, &value) && !cddp__parse_i64(value, &number)) return false;
  *total = (uint64_t)number + amount;
  snprintf(text, sizeof text, "%" PRId64, (int64_t)*total);
  return cddp__map_put(m, key, cddp__span_of(text, strlen(text)), false);
}

/* Puts desired if the value is what was expected, nothing if there is none. *value: the one that
   key has then, or what was expected if there is none. */
static bool cddp__map_swap(cddp__map *m, cddp__span key, cddp__span expected, cddp__span desired,
                           cddp__span *value) {
  bool there = cddp__map_get(m, key, value);
  bool swap = there ? cddp__span_equal(*value, expected) : expected.size == 0;
  if (swap || !there) *value = swap ? desired : expected;
  return !swap || cddp__map_put(m, key, desired, false);
}

enum cddp__ran { CDDP__BROKEN, CDDP__RAN, CDDP__BLOCKED };

/* Runs a whole command, whose code byte is at head, and adds its answer to out. BROKEN: the client
   that sent it is to be left, for a command that c10d does not answer either, or for lack of
   memory. */
static int cddp__execute(cddp__map *m, cddp__frame *f, const unsigned char *head,
                         cddp__buffer *out) {
  const struct cddp__command *c = &cddp__commands[f->code];
  const unsigned char *p = head + (c->counted ? 9 : 1), *end = head + f->scanned - c->tail;
  uint64_t number = 0; /* the answer's */
  cddp__span key, value, expected;
  bool ok = true;
  switch (f->code) {
  case CDDP__VALIDATE: ok = memcmp(head, cddp__greeting, CDDP__VALIDATE_SIZE) == 0; break;
  case CDDP__SET:
  case CDDP__MULTI_SET:
  case CDDP__APPEND:
    while (ok && p < end) {
      key = cddp__take_string(&p);
      ok = cddp__map_put(m, key, cddp__take_string(&p), f->code == CDDP__APPEND);
    }
    break;
  case CDDP__GET:
  case CDDP__MULTI_GET: /* a missing key's value is empty, as PyTorch's libuv server has it */
    while (p < end && cddp__buffer_size(out) <= CDDP__BUFFER_MAX) {
      cddp__map_get(m, cddp__take_string(&p), &value);
      cddp__buffer_add_string(out, "", value);
    }
    break;
  case CDDP__COMPARE_SET:
    key = cddp__take_string(&p);
    expected = cddp__take_string(&p);
    ok = cddp__map_swap(m, key, expected, cddp__take_string(&p), &value);
    cddp__buffer_add_string(out, "", value);
    break;
  case CDDP__ADD:
    key = cddp__take_string(&p);
    ok = cddp__map_add(m, key, cddp__get64(p), &number);
    break;
  case CDDP__CHECK:
    while (p < end && number == 0) number = !cddp__map_get(m, cddp__take_string(&p), &value);
    break;
  case CDDP__WAIT: /* each key must have been there: one that was is not looked for again */
    if (f->missing > 0) p = head + f->missing;
    while (p < end) {
      f->missing = (size_t)(p - head);
      key = cddp__take_string(&p);
      f->wants = cddp__map_hash(m, key);
      if (!cddp__map_get(m, key, &value)) return CDDP__BLOCKED;
    }
    break;
  case CDDP__GETNUMKEYS: number = m->count; break;
  case CDDP__DELETE_KEY:
    number = cddp__map_drop(m, cddp__map_link(m, cddp__take_string(&p)));
    break;
  case CDDP__CANCEL_WAIT: number = 1; break;
  default: number = cddp__get32(p); /* PING */
  }
  if (c->answer != CDDP__STRING) cddp__buffer_add_number(out, number, c->answer);
  return ok && !out->failed ? CDDP__RAN : CDDP__BROKEN;
}

/* --- the server ---
   One thread with level-triggered epoll. Each connection has a buffer of input, whose commands are
   run one by one, and one of output. What happens to other connections on the way (a wait is over,
   one has to end) is only marked, and done at the end of the turn: cddp__server_settle. Nothing a
   client does stops the loop: each has its own limits and deadlines, and an error, malloc's
   included, ends only the connection it happened on. */
#ifndef CDDP__GREETING_S
#define CDDP__GREETING_S 5.0 /* for the first command, and the challenge */
#endif
#ifndef CDDP__COMMAND_S
#define CDDP__COMMAND_S 10.0 /* for a command, plus 1 per 64 KiB that came; for reading output */
#endif
#define CDDP__TICK_S 0.25       /* how often deadlines are looked at */
#define CDDP__SERVER_KEEP 4096u /* bytes of buffer that an idle connection keeps */

typedef struct cddp__conn { /* a client of the server. Owner: the server's thread */
  struct cddp__conn *next;  /* older */
  int fd;
  bool dead;       /* closed; freed at the end of the turn */
  bool greeted;    /* its first command, VALIDATE, was good */
  bool blocked;    /* the command at the head of in is a WAIT that waits */
  bool ready;      /* has commands to be run, now that its WAIT is over */
  uint32_t events; /* what epoll watches for */
  cddp__buffer in, out;
  cddp__frame frame;         /* of the command at the head of in */
  double deadline;           /* for greeting, for the command at hand, or for reading output */
  cddp__challenge challenge; /* PROVEN: commands are run; no longer ON: it is refused */
} cddp__conn;

typedef struct cddp__server { /* Owner: its thread, between start and join */
  pthread_t thread;
  cddp_allocator allocator;
  const char *secret; /* NULL = none */
  int epoll, stop;    /* an eventfd: written to by the destroyer */
  int listeners[CDDP__ADDRESSES_MAX], listener_count;
  cddp__atomic_u32 unproven; /* connections that did not prove to know the secret */
  cddp__map map;
  cddp__conn *conns;    /* the newest */
  int pending, blocked; /* connections that have not greeted; that are in a WAIT */
  bool unsettled;       /* some connection is dead or ready */
  double checked;       /* when deadlines were last looked at */
  size_t buffered;      /* capacity of all connections' buffers, bytes */
} cddp__server;

/* What epoll's events carry: 0 = stop, 1 + a listener's index, or a cddp__conn's address. */
static cddp_result cddp__server_watch(cddp__server *v, int fd, uint64_t what) {
  struct epoll_event event;
  event.events = EPOLLIN;
  event.data.u64 = what;
  return epoll_ctl(v->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? CDDP_OK
                                                             : cddp__fail_errno("epoll_ctl");
}

/* Closes c; it is freed at the end of the turn. */
static void cddp__conn_kill(cddp__server *v, cddp__conn *c) {
  if (c->dead) return;
  c->dead = v->unsettled = true;
  v->pending -= !c->greeted;
  v->blocked -= c->blocked;
  c->blocked = false;
  cddp__buffer_clear(&c->in, 0);
  cddp__buffer_clear(&c->out, 0);
  /* A child that this process forked may have a copy of the descriptor, which close() leaves. */
  epoll_ctl(v->epoll, EPOLL_CTL_DEL, c->fd, NULL);
  shutdown(c->fd, SHUT_RDWR);
  cddp__close_fd(&c->fd);
}

/* Feeds c's input to the challenge. A connection that is refused ends once it has read why. */
static void cddp__conn_prove(cddp__server *v, cddp__conn *c) {
  cddp__challenge *k = &c->challenge;
  cddp__span in = cddp__buffer_span(&c->in);
  c->in.start += cddp__challenge_feed(k, in.data, in.size);
  cddp__buffer_add(&c->out, k->out, k->out_size);
  k->out_size = 0;
  if (c->out.failed) cddp__conn_kill(v, c);
  if (k->state <= CDDP__CHALLENGE_PROVEN) return;
  cddp__add32(&v->unproven, 1);
  c->deadline = cddp__now() + 1;
}

/* The command at the head of c's input waits, or is done: the next one may follow. */
static void cddp__conn_ran(cddp__server *v, cddp__conn *c, bool blocked) {
  v->blocked += blocked - c->blocked;
  c->blocked = blocked;
  if (blocked) return;
  c->in.start += c->frame.scanned;
  memset(&c->frame, 0, sizeof c->frame);
}

/* Runs the whole command at the head of c's input, or tries it again. */
static void cddp__conn_execute(cddp__server *v, cddp__conn *c) {
  int ran;
  if (cddp__buffer_size(&c->out) == 0) c->deadline = cddp__now() + CDDP__COMMAND_S;
  ran = cddp__execute(&v->map, &c->frame, c->in.data + c->in.start, &c->out);
  if (ran == CDDP__BROKEN || v->buffered > CDDP__SERVER_MEMORY ||
      cddp__buffer_size(&c->out) > CDDP__BUFFER_MAX) {
    cddp__conn_kill(v, c);
    return;
  }
  v->pending -= !c->greeted;
  c->greeted = true;
  cddp__conn_ran(v, c, ran == CDDP__BLOCKED);
}

/* If keys have been made since there were `created`: connections that wait for them try again. */
static void cddp__server_wake(cddp__server *v, uint64_t created) {
  bool one = v->map.created == created + 1;
  cddp__conn *c;
  if (v->map.created == created || v->blocked == 0) return;
  for (c = v->conns; c != NULL; c = c->next) {
    if (!c->blocked || (one && c->frame.wants != v->map.newest)) continue;
    cddp__conn_execute(v, c);
    c->ready = !c->blocked;
    v->unsettled = v->unsettled || c->ready;
  }
}

/* Takes one step with c's input; false when more has to come first. In a WAIT only CANCEL_WAIT is
   taken, which ends it; what else comes stays where it is. */
static bool cddp__conn_step(cddp__server *v, cddp__conn *c) {
  uint64_t created = v->map.created;
  cddp__span in;
  int found;
  if (c->challenge.state == CDDP__CHALLENGE_ON) cddp__conn_prove(v, c);
  if (c->challenge.state > CDDP__CHALLENGE_PROVEN) c->in.start = c->in.end; /* refused */
  in = cddp__buffer_span(&c->in);
  if (in.size == 0 || c->challenge.state != CDDP__CHALLENGE_PROVEN) return false;
  if (c->blocked) {
    if (in.size == c->frame.scanned || in.data[c->frame.scanned] != CDDP__CANCEL_WAIT) return false;
    cddp__conn_ran(v, c, false);
    return true;
  }
  found = cddp__frame_scan(&c->frame, in.data, in.size);
  if (found == CDDP__FRAME_BAD || (!c->greeted && in.data[0] != CDDP__VALIDATE))
    cddp__conn_kill(v, c);
  else if (found == CDDP__FRAME_WHOLE)
    cddp__conn_execute(v, c);
  cddp__server_wake(v, created);
  return found == CDDP__FRAME_WHOLE && !c->dead;
}

/* Sends what the system takes. False when the connection has failed. */
static bool cddp__conn_flush(cddp__conn *c) {
  while (cddp__buffer_size(&c->out) > 0) {
    ssize_t n = CDDP__SEND(c->fd, c->out.data + c->out.start, cddp__buffer_size(&c->out),
                           MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    c->out.start += (size_t)n;
    if (c->greeted) c->deadline = cddp__now() + CDDP__COMMAND_S;
  }
  return true;
}

/* Runs the commands that have come, as long as the answers are read: no client keeps the server
   busy for others' time. Then says which events epoll shall report. */
static void cddp__conn_run(cddp__server *v, cddp__conn *c) {
  struct epoll_event event;
  bool full = true;
  size_t out = 0;
  while (full && out == 0 && !c->dead) {
    while (cddp__buffer_size(&c->out) <= CDDP__SERVER_PAUSE && cddp__conn_step(v, c)) {}
    full = cddp__buffer_size(&c->out) > CDDP__SERVER_PAUSE;
    if (!cddp__conn_flush(c)) cddp__conn_kill(v, c);
    out = cddp__buffer_size(&c->out);
  }
  if (c->dead) return;
  if (cddp__buffer_size(&c->in) == 0) cddp__buffer_clear(&c->in, CDDP__SERVER_KEEP);
  if (out == 0) cddp__buffer_clear(&c->out, CDDP__SERVER_KEEP);
  if (out == 0 && c->challenge.state > CDDP__CHALLENGE_PROVEN)
    shutdown(c->fd, SHUT_WR); /* closing at once might reset it before it has read why */
  event.events = (out > CDDP__SERVER_PAUSE ? 0u : (uint32_t)EPOLLIN) |
                 (out > 0 ? (uint32_t)EPOLLOUT : 0u);
  event.data.u64 = (uint64_t)(uintptr_t)c;
  if (event.events == c->events) return;
  c->events = event.events;
  if (epoll_ctl(v->epoll, EPOLL_CTL_MOD, c->fd, &event) != 0) cddp__conn_kill(v, c);
}

/* Reads once. False when the connection has failed or ended, or there is no room for more input. */
static bool cddp__conn_read(const cddp__server *v, cddp__conn *c) {
  size_t want = cddp__min(cddp__max(c->in.capacity, 512), 1u << 20);
  ssize_t n;
  if (c->in.capacity - c->in.end < 256 &&
      (cddp__buffer_size(&c->in) > CDDP__BUFFER_MAX || v->buffered + want > CDDP__SERVER_MEMORY ||
       !cddp__buffer_reserve(&c->in, want)))
    return false;
  do
    n = CDDP__RECV(c->fd, c->in.data + c->in.end, cddp__min(c->in.capacity - c->in.end, 1u << 20),
                   MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n <= 0) return n < 0 && errno == EAGAIN;
  if (c->greeted && cddp__buffer_size(&c->in) + cddp__buffer_size(&c->out) == 0)
    c->deadline = cddp__now() + CDDP__COMMAND_S;
  c->in.end += (size_t)n;
  return true;
}

static void cddp__conn_event(cddp__server *v, cddp__conn *c, uint32_t events) {
  if (c->dead) return;
  if (events & EPOLLIN ? !cddp__conn_read(v, c) : (events & (EPOLLHUP | EPOLLERR)) != 0)
    cddp__conn_kill(v, c);
  else
    cddp__conn_run(v, c);
}

/* Whether c has let a deadline pass: for its greeting, for reading its output, or for a command. */
static bool cddp__conn_late(const cddp__conn *c, double now) {
  size_t in = cddp__buffer_size(&c->in);
  if (!c->greeted || cddp__buffer_size(&c->out) > 0) return now >= c->deadline;
  return in > 0 && !c->blocked && now >= c->deadline + (double)in / 65536;
}

/* The end of a turn: drops connections that are late, goes on with those whose WAIT is over, and
   frees the dead. */
static void cddp__server_settle(cddp__server *v) {
  double now = cddp__now();
  cddp__conn *c, **link;
  bool tick = now >= v->checked + CDDP__TICK_S;
  if (tick) v->checked = now;
  for (c = v->conns; c != NULL && tick; c = c->next)
    if (cddp__conn_late(c, now)) cddp__conn_kill(v, c);
  while (v->unsettled) {
    v->unsettled = false;
    for (link = &v->conns; (c = *link) != NULL;) {
      if (c->ready && !c->dead) {
        c->ready = false;
        cddp__conn_run(v, c);
      }
      if (!c->dead) {
        link = &c->next;
        continue;
      }
      *link = c->next;
      cddp__free(&v->allocator, c);
    }
  }
}

/* Whether a new connection may have fd: some descriptors are left to the program, whoever calls. */
static bool cddp__spare_descriptor(int fd) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT_MAX) return true;
  return (rlim_t)fd + (limit.rlim_cur < 256 ? limit.rlim_cur / 4 : 64) < limit.rlim_cur;
}

/* Drops the connection that has been silent longest; false when all have greeted. */
static bool cddp__server_drop_pending(cddp__server *v) {
  cddp__conn *oldest = NULL, *c;
  for (c = v->conns; c != NULL; c = c->next)
    if (!c->dead && !c->greeted &&
        (v->secret == NULL || c->challenge.state != CDDP__CHALLENGE_PROVEN))
      oldest = c;
  if (oldest != NULL) cddp__conn_kill(v, oldest);
  return oldest != NULL;
}

/* Makes a connection of fd, which it takes. Works as follows when there are too many: those that
   have not greeted go first, oldest first; if all have, nobody else is let in. In the place of one
   that went, the new one takes its number, or a lower one. */
static void cddp__server_add_conn(cddp__server *v, int fd) {
  bool spare = cddp__spare_descriptor(fd),
       room = (spare && v->pending < CDDP__PENDING_MAX) || cddp__server_drop_pending(v);
  int low = room && !spare ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
  cddp__conn *c = NULL;
  if (low >= 0) close(fd), fd = low;
  if (room && cddp__stream_ready(fd) == 0)
    c = (cddp__conn *)cddp__calloc(&v->allocator, 1, sizeof *c);
  if (c == NULL ||
      cddp__challenge_begin(&c->challenge, v->secret, "store", false, NULL, 0) != CDDP_OK) {
    cddp__free(&v->allocator, c);
    close(fd);
    return;
  }
  cddp__own_socket(fd);
  c->fd = fd;
  c->in.allocator = c->out.allocator = &v->allocator;
  c->in.total = c->out.total = &v->buffered;
  c->deadline = cddp__now() + CDDP__GREETING_S;
  c->events = EPOLLIN;
  c->next = v->conns;
  v->conns = c;
  v->pending++;
  if (cddp__server_watch(v, fd, (uint64_t)(uintptr_t)c) != CDDP_OK) cddp__conn_kill(v, c);
}

/* When accept fails, as without descriptors, the server rests a little: the listening socket wakes
   epoll again and again. */
static void cddp__server_accept(cddp__server *v, int listener) {
  int i, fd;
  for (i = 0; i < 64; i++) {
    if ((fd = cddp__accept(listener)) >= 0) {
      cddp__server_add_conn(v, fd);
    } else if (errno != EINTR && errno != ECONNABORTED) {
      if (errno != EAGAIN) cddp__sleep(0.01);
      return;
    }
  }
}

static void *cddp__server_main(void *arg) {
  cddp__server *v = (cddp__server *)arg;
  struct epoll_event events[64];
  for (;;) {
    int i, n = epoll_wait(v->epoll, events, 64, v->conns != NULL ? (int)(CDDP__TICK_S * 1000) : -1);
    if (n < 0 && errno != EINTR) return NULL;
    for (i = 0; i < n; i++) {
      uint64_t what = events[i].data.u64;
      if (what == 0) return NULL;
      if (what > CDDP__ADDRESSES_MAX)
        cddp__conn_event(v, (cddp__conn *)(uintptr_t)what, events[i].events);
      else
        cddp__server_accept(v, v->listeners[what - 1]);
    }
    cddp__server_settle(v);
  }
}

/* Frees a server whose thread has ended or never ran. */
static void cddp__server_free(cddp__server *v) {
  cddp_allocator a = v->allocator;
  cddp__conn *c;
  uint32_t i;
  for (c = v->conns; c != NULL; c = c->next) cddp__conn_kill(v, c);
  cddp__server_settle(v);
  for (i = 0; i < CDDP__BUCKETS; i++)
    while (cddp__map_drop(&v->map, &v->map.buckets[i])) {}
  while (v->listener_count > 0) cddp__close_fd(&v->listeners[--v->listener_count]);
  cddp__close_fd(&v->stop);
  cddp__close_fd(&v->epoll);
  cddp__free(&a, v);
}

/* --- the client --- */

typedef struct cddp__store_options {
  cddp_store_desc desc; /* timeout_s: above 0 */
  bool elect;           /* file: the first who opens it is the server, whatever is_server says */
  int listen_fd;        /* listening socket to serve on, which stays the caller's; -1 = bind one */
  bool reachable;       /* by other hosts, even if this one's own name resolves to loopback here */
  double deadline;      /* for opening, cddp__now() */
  const char *host_name, *port_name; /* for error texts: "MASTER_ADDR", "from MASTER_PORT"; NULL:
                                        the caller says where */
} cddp__store_options;

struct cddp_store {
  pthread_mutex_t lock; /* one operation at a time; guards all below */
  cddp_allocator allocator;
  double timeout_s;                             /* of operations that take no deadline */
  char *name;                                   /* for error texts: "host:port" or the path */
  char *proof;                                  /* what both ends prove to know; NULL = nothing */
  cddp__buffer bytes;                           /* a command being built, then a value that came */
  int fd;                                       /* -1 = not connected */
  cddp__address addresses[CDDP__ADDRESSES_MAX]; /* where the server may be, in order */
  int address_count;
  cddp__server *server; /* NULL = only a client */
  pid_t server_pid;     /* the process that it serves in: a forked child has only a copy */
  int file;             /* the file of a server of file://, locked while it serves; -1 = none */
};

static double cddp__soon(double seconds, double deadline) { /* the earlier of both */
  double t = cddp__now() + seconds;
  return t < deadline ? t : deadline;
}

/* The server has refused; why: its letter. 0: it is the server that does not know the secret. */
static cddp_result cddp__turned_away(char why) {
  return cddp__fail(
      CDDP_UNAUTHORIZED,
      why == 'S'   ? "the server has a secret and this process has none; set CDDP_SECRET (or the "
                     "desc's secret) to the server's"
      : why == 'W' ? "the server has another secret; set one CDDP_SECRET (or desc's secret) on all "
                     "ranks"
      : why == 'N' ? "this process has a secret and the server has none; set CDDP_SECRET there "
                     "too, or unset it here"
                   : "what answers there does not know the secret");
}

/* The beginning of a connection to a: the challenge, if there is a secret, and the first answer to
   a command. Only that shows that there is a store and that it takes us. Whoever takes a connection
   in silence may be a server that is not ready yet. */
static cddp_result cddp__greet(const cddp_store *s, const cddp__address *a, int fd,
                               double deadline) {
  cddp__challenge c;
  unsigned char bytes[sizeof c.in + 1] = {0};
  char text[160];
  size_t n;
  cddp_result r = cddp__challenge_begin(&c, s->proof, "store", true, NULL, 0);
  if (s->proof == NULL) c.state = CDDP__CHALLENGE_PROVEN;
  while (r == CDDP_OK && c.state == CDDP__CHALLENGE_ON) {
    n = c.in_size == 0 ? 9 : sizeof c.in - c.in_size; /* a refusal has 9 bytes */
    r = cddp__send_all(fd, c.out, c.out_size, deadline);
    c.out_size = 0;
    if (r == CDDP_OK) r = cddp__recv_all(fd, bytes, n, deadline);
    if (r == CDDP_OK) cddp__challenge_feed(&c, bytes, n);
  }
  if (r == CDDP_OK && c.state == CDDP__CHALLENGE_PROVEN) {
    r = cddp__send_all(fd, cddp__greeting, sizeof cddp__greeting - 1, deadline);
    if (r == CDDP_OK) r = cddp__recv_all(fd, bytes, 1, deadline);
    if (r != CDDP_OK || bytes[0] <= 1) return r;
    r = cddp__recv_all(fd, bytes + 1, 8, deadline);
    c.state = memcmp(bytes, CDDP__AUTH_REFUSAL, 8) == 0 ? CDDP__CHALLENGE_REFUSED
                                                        : CDDP__CHALLENGE_ALIEN;
    c.why = (char)bytes[8];
  }
  if (r != CDDP_OK) return r;
  if (c.state != CDDP__CHALLENGE_ALIEN) return cddp__turned_away(c.why);
  bytes[strcspn((char *)bytes, "\r\n")] = 0;
  cddp__make_printable((char *)bytes);
  cddp__address_text(a, text, sizeof text);
  return cddp__fail(CDDP_MISMATCH,
                    "something that is not a cddp or TCPStore server answers at %s ('%s'); is that "
                    "another program's port?",
                    text, (char *)bytes);
}

/* Tries each address once. CDDP_NETWORK: trying again may help. CDDP_TIMEOUT: one has taken a
   connection and was silent until the deadline. Other results are final: MISMATCH says that what
   listens there is no store of this job. */
static cddp_result cddp__try_addresses(cddp_store *s, double deadline) {
  cddp_result r = CDDP_NETWORK;
  char text[160];
  int i, error;
  for (i = 0; i < s->address_count && r == CDDP_NETWORK; i++) {
    const cddp__address *a = &s->addresses[i];
    error = cddp__connect_address(a, cddp__soon(5, deadline), &s->fd);
    cddp__address_text(a, text, sizeof text);
    if (error == 0) {
      cddp__own_socket(s->fd);
      r = cddp__greet(s, a, s->fd, deadline);
      if (r != CDDP_OK) cddp__close_fd(&s->fd);
    } else if (error == CDDP__FOREIGN) {
      r = cddp__fail(CDDP_MISMATCH,
                     "connect to %s: another user's process listens there; set MASTER_ADDR and "
                     "MASTER_PORT for all ranks to meet over TCP",
                     text);
    } else {
      r = cddp__fail(error == EMFILE || error == ENFILE ? CDDP_SYSTEM : CDDP_NETWORK,
                     "connect to %s: %s", text, strerror(error));
    }
  }
  return r;
}

/* One command and its answer. */
typedef struct cddp__request {
  unsigned code;
  const char *const *keys;
  int count; /* keys */
  cddp__span values[2];
  uint64_t number; /* to the server: what to add; from it: a number or byte */
  bool equal;      /* from it: the string is values[1] */
  void *out;       /* where a string goes */
  size_t capacity, *size;
} cddp__request;

static cddp__request cddp__request_of(unsigned code, const char *const *keys, int count) {
  cddp__request q;
  memset(&q, 0, sizeof q);
  q.code = code;
  q.keys = keys;
  q.count = count;
  return q;
}

/* Puts the command into s->bytes. A SET has no answer: that to the question behind it tells that it
   is done. */
static void cddp__encode(cddp_store *s, const cddp__request *q) {
  const struct cddp__command *c = &cddp__commands[q->code];
  cddp__buffer *b = &s->bytes;
  int i;
  cddp__buffer_clear(b, 65536);
  cddp__buffer_add_number(b, q->code, 1);
  if (c->counted) cddp__buffer_add_number(b, (uint64_t)q->count, 8);
  for (i = 0; i < q->count; i++)
    cddp__buffer_add_string(b, "/", cddp__span_of(q->keys[i], strlen(q->keys[i])));
  for (i = 0; i + 1 < c->strings; i++) cddp__buffer_add_string(b, "", q->values[i]);
  cddp__buffer_add_number(b, q->number, c->tail);
  if (q->code == CDDP__SET) cddp__buffer_add_number(b, CDDP__GETNUMKEYS, 1);
}

/* Receives the answer; a string goes to s->bytes. */
static cddp_result cddp__receive(cddp_store *s, cddp__request *q, double deadline) {
  unsigned char bytes[8];
  int answer = cddp__commands[q->code].answer;
  cddp_result r = cddp__recv_all(s->fd, bytes, answer == CDDP__BYTE ? 1 : 8, deadline);
  if (r == CDDP_OK) q->number = answer == CDDP__BYTE ? bytes[0] : cddp__get64(bytes);
  if (r == CDDP_OK && q->code == CDDP__WAIT && q->number != 0)
    return cddp__fail(CDDP_NETWORK, "%u instead of 0 came in answer to a wait", bytes[0]);
  cddp__buffer_clear(&s->bytes, 65536);
  if (r != CDDP_OK || answer != CDDP__STRING) return r;
  if (q->number > CDDP__COMMAND_MAX)
    return cddp__fail(CDDP_NETWORK,
                      "a value of %" PRIu64 " bytes was announced, more than the limit", q->number);
  if (!cddp__buffer_reserve(&s->bytes, (size_t)q->number)) return CDDP_OUT_OF_MEMORY;
  s->bytes.end = (size_t)q->number;
  return cddp__recv_all(s->fd, s->bytes.data, s->bytes.end, deadline);
}

/* Puts the store's name before a failure's text. MISMATCH is NETWORK to others. */
static cddp_result cddp__store_failed(const cddp_store *s, cddp_result r) {
  return cddp__fail_in(r == CDDP_MISMATCH ? CDDP_NETWORK : r, "store at %s: ", s->name);
}

/* Sends q and receives the answer. After a failure in the middle nothing that comes can be trusted:
   the next operation connects anew. */
static cddp_result cddp__ask(cddp_store *s, cddp__request *q, double deadline) {
  cddp_result r = s->fd < 0 ? cddp__try_addresses(s, deadline) : CDDP_OK;
  if (r != CDDP_OK) return cddp__store_failed(s, r);
  cddp__encode(s, q);
  if (cddp__buffer_size(&s->bytes) > CDDP__COMMAND_MAX)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the keys of one call have more than %u MiB",
                      CDDP__COMMAND_MAX >> 20);
  if (s->bytes.failed) return CDDP_OUT_OF_MEMORY;
  r = cddp__send_all(s->fd, s->bytes.data, s->bytes.end, deadline);
  if (r == CDDP_OK) r = cddp__receive(s, q, deadline);
  if (r == CDDP_OK) return r;
  cddp__close_fd(&s->fd);
  if (r == CDDP_NETWORK && q->code == CDDP__ADD)
    cddp__fail_in(r, "add to '%.64s' (is its value a decimal number?): ", q->keys[0]);
  return cddp__store_failed(s, r);
}

/* One operation, under the lock. deadline: 0 = the store's timeout from now on. */
static cddp_result cddp__store_run(cddp_store *s, cddp__request *q, double deadline) {
  cddp__span reply;
  cddp_result r;
  pthread_mutex_lock(&s->lock);
  r = cddp__ask(s, q, deadline > 0 ? deadline : cddp__now() + s->timeout_s);
  if (r == CDDP_OK && cddp__commands[q->code].answer == CDDP__STRING) {
    reply = cddp__buffer_span(&s->bytes);
    q->equal = cddp__span_equal(reply, q->values[1]);
    if (q->size != NULL) *q->size = reply.size;
    if (reply.size > 0 && reply.size <= q->capacity) memcpy(q->out, reply.data, reply.size);
    if (reply.size > q->capacity && (q->out != NULL || q->capacity > 0))
      r = cddp__fail(CDDP_INVALID_ARGUMENT, "the value of '%.64s' has %zu bytes and the buffer %zu",
                     q->keys[0], reply.size, q->capacity);
  }
  cddp__buffer_clear(&s->bytes, 65536); /* may have been large */
  pthread_mutex_unlock(&s->lock);
  return r;
}

/* Waits for one key after the other. A wait that took too long names its key, if the server answers
   at all. */
static cddp_result cddp__store_wait(cddp_store *s, const char *const *keys, int count,
                                    double timeout_s) {
  double deadline = cddp__now() + (timeout_s > 0 ? timeout_s : s->timeout_s);
  cddp__request q;
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < count; i++) {
    q = cddp__request_of(CDDP__WAIT, &keys[i], 1);
    r = cddp__store_run(s, &q, deadline);
  }
  if (r != CDDP_TIMEOUT) return r;
  q = cddp__request_of(CDDP__CHECK, &keys[i - 1], 1);
  if (cddp__store_run(s, &q, cddp__now() + 5) != CDDP_OK)
    return cddp__fail_in(CDDP_TIMEOUT, "the wait for '%.64s' timed out; then: ", keys[i - 1]);
  return cddp__fail(CDDP_TIMEOUT,
                    "store at %s: timed out waiting for key '%.128s' (%d of %d), which nobody had "
                    "set",
                    s->name, keys[i - 1], i, count);
}

/* --- opening a store: where the server is --- */

static void cddp__add_listen_cure(const cddp_store *s, int error) {
  const char *cure =
      s->addresses[0].sa.ss_family == AF_UNIX
          ? "set MASTER_ADDR and MASTER_PORT for all ranks to meet over TCP instead"
      : error == EADDRINUSE
          ? "another process uses this port: stop it, or set MASTER_PORT to another"
      : error == EADDRNOTAVAIL
          ? "it is not one of this host's addresses; rank 0 must run on the host that has it"
      : error == EACCES ? "ports below 1024 are for root: choose another"
                        : NULL;
  if (cure != NULL) cddp__append(cddp__error_text, sizeof cddp__error_text, "; %s", cure);
}

/* Starts a server on s->addresses, or on the socket that came with the options; s->addresses are
   then where it can be reached. */
static cddp_result cddp__serve(cddp_store *s, const cddp__store_options *o) {
  cddp__server *v = (cddp__server *)cddp__calloc(&o->desc.allocator, 1, sizeof *v);
  cddp_result r = CDDP_OK;
  int i, *fds = v != NULL ? v->listeners : NULL;
  if (v == NULL) return CDDP_OUT_OF_MEMORY;
  v->allocator = o->desc.allocator;
  v->map.allocator = &v->allocator;
  v->secret = s->proof;
  if (o->listen_fd < 0) {
    r = cddp__listen_all(s->addresses, s->address_count, fds, &v->listener_count);
    if (r != CDDP_OK) cddp__add_listen_cure(s, errno);
  } else {
    v->listener_count = 1;
    fds[0] = fcntl(o->listen_fd, F_DUPFD_CLOEXEC, 0);
    if (fds[0] < 0 || fcntl(fds[0], F_SETFL, O_RDWR | O_NONBLOCK) != 0 ||
        !cddp__local_address(fds[0], &s->addresses[0]))
      r = cddp__fail_errno("the launcher's listening socket");
  }
  v->stop = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  v->epoll = epoll_create1(EPOLL_CLOEXEC);
  if (r == CDDP_OK && (v->stop < 0 || v->epoll < 0))
    r = cddp__fail_errno(v->epoll < 0 ? "epoll_create1" : "eventfd");
  if (r == CDDP_OK) r = cddp__random(&v->map.seed, sizeof v->map.seed);
  if (r == CDDP_OK) r = cddp__server_watch(v, v->stop, 0);
  for (i = 0; i < v->listener_count; i++) {
    cddp__own_socket(fds[i]);
    if (r == CDDP_OK) r = cddp__server_watch(v, fds[i], 1 + (uint64_t)i);
  }
  if (r == CDDP_OK) r = cddp__thread_start(&v->thread, cddp__server_main, v, true);
  if (r != CDDP_OK) {
    cddp__server_free(v);
    return r;
  }
  s->server = v;
  s->server_pid = getpid();
  return CDDP_OK;
}

/* A host's own name may resolve to loopback on that host alone (127.0.1.1 in Debian's /etc/hosts):
   other hosts call another of its addresses, so the server takes all of them. */
static void cddp__add_addresses(cddp_store *s, const char *host) {
  int i;
  if (strcmp(host, "localhost") == 0 || strchr(host, ':') != NULL ||
      host[strspn(host, "0123456789.")] == 0) /* an address says what is meant */
    return;
  for (i = 0; i < s->address_count; i++)
    if (!cddp__address_loopback(&s->addresses[i])) return;
  s->address_count += cddp__interface_addresses(NULL, s->addresses + s->address_count,
                                                CDDP__ADDRESSES_MAX - s->address_count);
}

/* Where tcp://host:port, or unix://name, leads; with is_server, serves there. unix:// is for ranks
   of one host whose launcher gives no address: no port could be in use. */
static cddp_result cddp__open_url(cddp_store *s, const cddp__store_options *o) {
  const char *where = o->desc.init_method + strlen("tcp://");
  char host[256], name[300];
  int port;
  cddp_result r = CDDP_OK;
  s->address_count = 1;
  if (o->desc.init_method[0] == 't') {
    r = cddp__host_port(where, host, sizeof host, &port);
    if (r == CDDP_OK && port == 0 && !o->desc.is_server)
      r = cddp__fail(CDDP_INVALID_ARGUMENT,
                     "port 0 in 'tcp://%s' is for the server only, which then gets a free one",
                     where);
    if (r == CDDP_OK && o->listen_fd < 0)
      r = cddp__resolve(host, port, s->addresses, &s->address_count);
    if (r == CDDP_OK && o->desc.is_server && o->reachable) cddp__add_addresses(s, host);
  } else {
    cddp__unix_name(&s->addresses[0], ++where);
  }
  if (r == CDDP_OK && o->desc.is_server) r = cddp__serve(s, o);
  if (r != CDDP_OK) return r;
  port = cddp__address_port(&s->addresses[0]);
  if (port != 0) snprintf(name, sizeof name, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, port);
  s->name = cddp__strdup(&s->allocator, port != 0 ? name : where);
  return s->name != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

/* --- file:// ---
   The file names the addresses of the process that serves, and holds a random key, which clients
   prove to know together with the user's secret: so only this user's processes get in, from other
   hosts too. Works as follows: the server holds a lock on the file as long as it serves, which the
   kernel releases if it dies, and removes the file at its end. A process that finds the file
   without the lock knows that what it says is of a job that is over. */
#define CDDP__FILE_MAGIC "cddp store 4"

typedef struct cddp__file_record { /* the whole file. Hosts of one job have one byte order */
  char magic[sizeof CDDP__FILE_MAGIC];
  char key[33]; /* hexadecimal */
  uint32_t count;
  cddp__address addresses[CDDP__ADDRESSES_MAX];
} cddp__file_record;

/* Another user's file might lead this job anywhere; what others may write, too. */
static cddp_result cddp__file_check(int fd, struct stat *st) {
  const char *why;
  if (fstat(fd, st) != 0) return cddp__fail(CDDP_IO, "fstat: %s", strerror(errno));
  why = !S_ISREG(st->st_mode)                      ? "is not a regular file"
        : st->st_uid != geteuid()                  ? "belongs to another user"
        : st->st_nlink > 1                         ? "has other names (hard links)"
        : (st->st_mode & (S_IWGRP | S_IWOTH)) != 0 ? "may be written by others"
                                                   : NULL;
  if (why == NULL) return CDDP_OK;
  return cddp__fail(CDDP_IO, "the file %s, so it is not trusted; choose another path", why);
}

/* Reads *record from a file of `size` bytes; its count is 0 when it is not whole. An error when the
   file holds what no store has written. */
static cddp_result cddp__file_read(int fd, off_t size, cddp__file_record *record) {
  size_t n = size < (off_t)sizeof *record ? (size_t)size : sizeof *record;
  memset(record, 0, sizeof *record);
  if (cddp__file_io(fd, false, record, n, 0) != CDDP_OK) return CDDP_NETWORK; /* try again */
  if (memcmp(record->magic, CDDP__FILE_MAGIC, cddp__min(n, sizeof record->magic)) != 0)
    return cddp__fail(CDDP_IO,
                      "the file exists and is not a store of this version of cddp; it was left as "
                      "it is. Choose another path, or remove it");
  if (size != (off_t)sizeof *record || record->count > CDDP__ADDRESSES_MAX) record->count = 0;
  return CDDP_OK;
}

/* s->proof: the file's key, and the user's secret. */
static cddp_result cddp__file_proof(cddp_store *s, const cddp__store_options *o, const char *key) {
  const char *secret = o->desc.secret != NULL ? o->desc.secret : "";
  size_t size = 32 + 1 + strlen(secret) + 1;
  cddp__free(&s->allocator, s->proof);
  s->proof = (char *)cddp__malloc(&s->allocator, size);
  if (s->proof == NULL) return CDDP_OUT_OF_MEMORY;
  snprintf(s->proof, size, "%.32s %s", key, secret);
  return CDDP_OK;
}

/* With the lock: makes this process the server, for this host and, with a port of the system's
   choice, for others. */
static cddp_result cddp__file_serve(cddp_store *s, const cddp__store_options *o) {
  cddp__file_record record;
  uint64_t word[4];
  char name[64];
  cddp_result r = cddp__random(word, sizeof word);
  memset(&record, 0, sizeof record);
  memcpy(record.magic, CDDP__FILE_MAGIC, sizeof CDDP__FILE_MAGIC);
  snprintf(record.key, sizeof record.key, "%016" PRIx64 "%016" PRIx64, word[0], word[1]);
  snprintf(name, sizeof name, "cddp-file-%016" PRIx64 "%016" PRIx64, word[2], word[3]);
  cddp__unix_name(&s->addresses[0], name);
  s->address_count = 1;
  if (o->reachable || o->elect)
    s->address_count += cddp__interface_addresses(NULL, s->addresses + 1, 8);
  if (r == CDDP_OK) r = cddp__file_proof(s, o, record.key);
  if (r == CDDP_OK) r = cddp__serve(s, o);
  if (r != CDDP_OK) return r == CDDP_NETWORK ? CDDP_SYSTEM : r; /* trying again is no use */
  record.count = (uint32_t)s->address_count;
  memcpy(record.addresses, s->addresses, record.count * sizeof *s->addresses);
  if (ftruncate(s->file, 0) != 0) return cddp__fail(CDDP_IO, "ftruncate: %s", strerror(errno));
  r = cddp__file_io(s->file, true, &record, sizeof record, 0);
  return r == CDDP_OK ? cddp__try_addresses(s, o->deadline) : r;
}

/* One look at the file: serves, or connects to who does. Results as of cddp__try_addresses. */
static cddp_result cddp__file_try(cddp_store *s, const cddp__store_options *o) {
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  bool may_serve = o->desc.is_server || o->elect, locked = false, named = false;
  int fd = open(s->name, flags, 0600);
  cddp__file_record record;
  struct stat st;
  cddp_result r;
  int i;
  if (fd < 0)
    return cddp__fail(CDDP_IO, "cannot open the file: %s; %s", strerror(errno),
                      errno == ELOOP ? "it must not be a symbolic link"
                                     : "its directory must exist and be writable");
  r = cddp__file_check(fd, &st);
  if (r == CDDP_OK) { /* without waiting: flock would hear of no deadline */
    locked = flock(fd, LOCK_NB | (may_serve ? LOCK_EX : LOCK_SH)) == 0;
    if (!locked && errno != EWOULDBLOCK && errno != EINTR)
      r = cddp__fail(CDDP_IO, "flock: %s; put the file on a file system that has locks",
                     strerror(errno));
    named = cddp__file_is_named(fd, s->name); /* else it has been removed meanwhile */
  }
  if (r == CDDP_OK) r = cddp__file_read(fd, st.st_size, &record);
  if (r == CDDP_OK && locked && may_serve && named) { /* it is this store's to remove */
    s->file = fd;
    cddp__own_socket(fd);
    return cddp__file_serve(s, o);
  }
  if (r == CDDP_OK && o->desc.is_server && !o->elect) {
    r = cddp__fail(CDDP_NETWORK, "another job is using the file; choose another path");
  } else if (r == CDDP_OK && (locked || !named || record.count == 0)) {
    r = cddp__fail(CDDP_NETWORK, "nobody serves it; rank 0, or whoever opens it first, has not "
                                 "come, or is stopped");
  } else if (r == CDDP_OK) {
    r = cddp__file_proof(s, o, record.key);
    s->address_count = (int)record.count;
    memcpy(s->addresses, record.addresses, sizeof s->addresses);
    for (i = 0; i < s->address_count; i++)
      s->addresses[i].size = (socklen_t)cddp__min(s->addresses[i].size, sizeof s->addresses[i].sa);
    if (r == CDDP_OK) r = cddp__try_addresses(s, o->deadline);
    if (r != CDDP_OK && (!cddp__file_is_named(fd, s->name) || flock(fd, LOCK_NB | LOCK_SH) == 0))
      r = CDDP_NETWORK; /* its server has ended, and another program may have its port */
  }
  close(fd);
  return r;
}

/* --- all of them --- */

/* Ends the server, too, but not in a forked child, which shares descriptors with it and lacks its
   thread. The file goes first: a process that comes now begins a store of its own. */
static void cddp__store_close(cddp_store *s) {
  cddp_allocator a;
  uint64_t one = 1;
  if (s == NULL) return;
  a = s->allocator;
  if (s->file >= 0 && cddp__file_is_named(s->file, s->name)) unlink(s->name);
  cddp__close_fd(&s->fd);
  if (s->server != NULL && s->server_pid == getpid()) {
    while (write(s->server->stop, &one, sizeof one) < 0 && errno == EINTR) {}
    pthread_join(s->server->thread, NULL);
    cddp__server_free(s->server);
  }
  cddp__close_fd(&s->file);
  pthread_mutex_destroy(&s->lock);
  cddp__buffer_clear(&s->bytes, 0);
  cddp__free(&a, s->name);
  cddp__free(&a, s->proof);
  cddp__free(&a, s);
}

/* Connects, again and again until the deadline: ranks may start long before the server. */
static cddp_result cddp__connect(cddp_store *s, const cddp__store_options *o) {
  bool is_file = o->desc.init_method[0] == 'f';
  double pause = 0.001, started = cddp__now();
  uint64_t dice = cddp__hash64((uint64_t)getpid(), &started, sizeof started);
  for (;;) {
    cddp_result r = is_file && s->server == NULL ? cddp__file_try(s, o)
                                                 : cddp__try_addresses(s, o->deadline);
    if (r == CDDP_OK) return r;
    if (r == CDDP_TIMEOUT)
      return cddp__fail(CDDP_TIMEOUT,
                        "what listens at %s has taken a connection and stayed silent: another "
                        "program (no cddp or TCPStore server, or PyTorch's before 2.2), or rank 0, "
                        "which is to serve there, has not come to cddp_init, or is stopped",
                        s->name);
    if (r != CDDP_NETWORK) return cddp__store_failed(s, r);
    if (cddp__now() >= o->deadline)
      return cddp__fail_in(
          CDDP_TIMEOUT,
          "no connection to the store at %s within %g s; rank 0 (the server) may not be running, "
          "or the address may be wrong. Last error: ",
          s->name, s->timeout_s);
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    cddp__sleep(cddp__soon(pause * (0.5 + (double)(dice >> 40) / (1 << 25)), o->deadline) -
                cddp__now());
    pause = pause < 0.125 ? pause * 2 : 0.25;
  }
}

/* *out is NULL on failure. */
static cddp_result cddp__store_open(cddp_store **out, const cddp__store_options *options) {
  cddp__store_options o = *options;
  const char *m = o.desc.init_method;
  cddp_store *s = (cddp_store *)cddp__calloc(&o.desc.allocator, 1, sizeof *s);
  cddp_result r = CDDP_OK;
  *out = NULL;
  if (s == NULL) return CDDP_OUT_OF_MEMORY;
  pthread_mutex_init(&s->lock, NULL);
  s->allocator = o.desc.allocator;
  s->bytes.allocator = &s->allocator;
  s->timeout_s = o.desc.timeout_s;
  s->fd = s->file = -1;
  if (o.desc.secret == NULL) o.desc.secret = getenv("CDDP_SECRET");
  if (o.desc.secret != NULL && o.desc.secret[0] != 0)
    if ((s->proof = cddp__strdup(&o.desc.allocator, o.desc.secret)) == NULL) r = CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK && strncmp(m, "file:///", 8) == 0 && m[8] != 0) {
    if ((s->name = cddp__strdup(&o.desc.allocator, m + 7)) == NULL) r = CDDP_OUT_OF_MEMORY;
  } else if (r == CDDP_OK && (strncmp(m, "tcp://", 6) == 0 ||
                              (strncmp(m, "unix://", 7) == 0 && m[7] != 0))) {
    r = cddp__open_url(s, &o);
  } else if (r == CDDP_OK) {
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "'%.128s' is no store; write tcp://host:port, unix://name or "
                   "file:///absolute/path",
                   m);
  }
  if (r == CDDP_OK) r = cddp__connect(s, &o);
  if (r == CDDP_OK) *out = s;
  if ((r == CDDP_NETWORK || r == CDDP_TIMEOUT) && o.port_name != NULL)
    cddp__append(cddp__error_text, sizeof cddp__error_text, " (host from %s, port %s)",
                 o.host_name, o.port_name);
  if (r != CDDP_OK) cddp__store_close(s);
  return r;
}

/* >>discovery ----------------------------------------------------------------------------------
   Rank, world size and meeting place from the description and the environment.
   Owns: nothing but the note that CDDP_LISTEN_FD was taken. May touch: the environment, /proc.
   Entry points: cddp__discover; cddp__env, cddp__env_ranks and cddp__one_host for others.
   Works as follows: a table says which variables each launcher sets. The first launcher whose rank
   and size are there is believed, and nobody else. MASTER_ADDR and MASTER_PORT say where to meet;
   without them what identifies the launcher's job gives a Unix socket's name or a port. */

/* The variables of one launcher. */
typedef struct cddp__launcher {
  const char *name; /* for messages */
  const char *rank, *size, *local_rank, *local_size;
  const char *cure;   /* what to add to its command when ranks do not know where to meet */
  const char *job[5]; /* tell its jobs apart; from [3] on: only to the ranks of one node */
} cddp__launcher;

typedef struct cddp__place {
  int rank, world_size, local_rank, local_world_size; /* local ones -1 when unknown */
  bool joins;             /* CDDP_JOIN: a running job, where rank may be world_size or more */
  int launcher;           /* whose variables are in force: index into cddp__launchers */
  char init_method[1200]; /* "tcp://host:port", "unix://name" or "file:///path"; "" for one rank */
  const char *host_name, *port_name; /* where they come from, for texts; NULL: init_method */
  bool client_only;       /* torchrun's agent serves the store: rank 0 must not */
  int listen_fd;          /* bound by cddp_spawn or cddprun for rank 0, else -1 */
  bool listen_fd_lost;    /* there should be one */
  char run[128];          /* prefix of this job's keys */
  bool by_hand;           /* no launcher tells this job from another one */
  double timeout_s;
} cddp__place;

static const char *cddp__env(const char *name) { /* NULL when unset, empty or without a name */
  const char *v = name != NULL ? getenv(name) : NULL;
  return v != NULL && v[0] != 0 ? v : NULL;
}

static const char *cddp__backend_name(const cddp_group_desc *d) { /* NULL: the default */
  return d->backend != NULL ? d->backend : cddp__env("CDDP_BACKEND");
}

/* A variable as a whole number. *out stays as it is if the variable is not set, or has no name. */
static cddp_result cddp__env_int(const char *name, long low, long high, int *out) {
  const char *text = cddp__env(name);
  char *end = NULL;
  long v;
  if (text == NULL) return CDDP_OK;
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
    {"torchrun, cddprun or a script", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "",
     {NULL, NULL, NULL, NULL, NULL}},
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "-x MASTER_ADDR=HOST -x MASTER_PORT=29500",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL, "PMIX_SERVER_URI2", "PMIX_SERVER_TMPDIR"}},
    {"Hydra's mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
     "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500", {"PMI_JOBID", NULL, NULL, "PMI_PORT", NULL}},
    {"Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL,
     "--export=ALL,MASTER_ADDR=HOST",
     {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", NULL, NULL}}};
enum { CDDP__BY_SCRIPT, CDDP__BY_OPENMPI, CDDP__BY_HYDRA, CDDP__BY_SLURM, CDDP__LAUNCHERS };

/* srun --pty gives task 0 a terminal. If the task is a shell, what a user starts from it inherits
   all variables of the task but is no task. A shell with job control gives each command a process
   group of its own; the task, and what a script runs as the task, have the session's. A step
   started from that shell inherits SLURM_PTY_PORT, but has no terminal. */
static bool cddp__typed_in_slurm(void) {
  int terminal = -1;
  if (cddp__env("SLURM_PTY_PORT") != NULL)
    terminal = open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC);
  if (terminal < 0) return false;
  close(terminal);
  return getpgrp() != getsid(0);
}

static bool cddp__env_same(const char *name, const char *other) {
  const char *a = cddp__env(name), *b = cddp__env(other);
  return a != NULL && b != NULL && strcmp(a, b) == 0;
}

/* A batch script and an salloc shell look like task 0 of all tasks but are no step of Slurm's; and
   what are steps to Slurm alone (batch, interactive, extern) has the highest numbers. */
static bool cddp__launched_by(int i) {
  const cddp__launcher *l = &cddp__launchers[i];
  const char *step = cddp__env("SLURM_STEP_ID");
  bool in_step = step != NULL && strtoul(step, NULL, 10) < 0xfffffff0ul &&
                 cddp__env("SLURM_PROCID") != NULL;
  if (cddp__env(l->rank) == NULL || cddp__env(l->size) == NULL) return false;
  if (i == CDDP__BY_SLURM) return in_step && !cddp__typed_in_slurm();
  if (i == CDDP__BY_HYDRA && cddp__env(l->local_rank) == NULL) /* srun --mpi=pmi2 */
    return !in_step || !cddp__env_same("PMI_RANK", "SLURM_PROCID");
  return true;
}

/* Rank and size. Half of a pair is a mistake: as single processes, all ranks would train on all
   data. RANK or WORLD_SIZE alone, beside a launcher that knows both, must not contradict it. */
static cddp_result cddp__env_ranks(cddp__place *at) {
  const cddp__launcher *script = cddp__launchers, *l = script;
  cddp_result r;
  int given, i;
  at->rank = 0;
  at->world_size = 1;
  while (l < script + CDDP__LAUNCHERS && !cddp__launched_by((int)(l - script))) l++;
  for (i = 0; i < CDDP__BY_SLURM && l == script + CDDP__LAUNCHERS; i++) {
    bool rank = cddp__env(script[i].rank) != NULL, size = cddp__env(script[i].size) != NULL;
    if (rank == size) continue;
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s is set but %s is not; %s sets both%s: unset it for a single process",
                      rank ? script[i].rank : script[i].size,
                      rank ? script[i].size : script[i].rank, script[i].name,
                      i == CDDP__BY_SCRIPT ? ", and MASTER_ADDR and MASTER_PORT" : "");
  }
  if (l == script + CDDP__LAUNCHERS) return CDDP_OK;
  at->launcher = (int)(l - script);
  if ((r = cddp__env_int(l->size, 1, CDDP__MAX_RANKS, &at->world_size)) != CDDP_OK ||
      (r = cddp__env_int(l->rank, 0, INT_MAX, &at->rank)) != CDDP_OK)
    return r;
  if (at->rank >= at->world_size && !at->joins)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is %d but %s is %d; ranks go from 0 to %d",
                      l->rank, at->rank, l->size, at->world_size, at->world_size - 1);
  for (i = 0; i < 2; i++) {
    const char *own = i ? l->size : l->rank, *other = i ? script->size : script->rank;
    int value = i ? at->world_size : at->rank;
    given = value;
    (void)cddp__env_int(other, 0, INT_MAX, &given);
    if (given != value)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "%s is %d but %s is %d (set by %s); unset %s, or set RANK and WORLD_SIZE "
                        "both",
                        other, given, own, value, l->name, other);
  }
  return CDDP_OK;
}

/* The first host of a Slurm node list: "n[03-07,9]x[1-2],m" gives n03x1. false: no such list. */
static bool cddp__first_host(const char *list, char *out, size_t capacity) {
  size_t n = 0, length;
  while (*list != 0 && *list != ',') {
    bool bracket = *list == '[';
    list += bracket;
    length = bracket ? strspn(list, "0123456789") : strcspn(list, "[],");
    if (length == 0 || n + length >= capacity) return false;
    memcpy(out + n, list, length);
    n += length;
    list += length;
    if (!bracket) continue;
    list += strspn(list, "0123456789-,");
    if (*list++ != ']') return false;
  }
  out[n] = 0;
  return n > 0;
}

/* Whether the launcher says that all its ranks are on this host. */
static bool cddp__one_host(const cddp__place *at) {
  const char *nodes = cddp__env("SLURM_STEP_NUM_NODES");
  if (at->launcher != CDDP__BY_SLURM) return at->local_world_size == at->world_size;
  if (nodes == NULL) nodes = cddp__env("SLURM_JOB_NUM_NODES");
  if (nodes == NULL) nodes = cddp__env("SLURM_NNODES");
  return nodes != NULL && strcmp(nodes, "1") == 0;
}

/* Hashes what a launcher tells all ranks of a job and no other job; 0: it tells nothing. here: and
   what only those of this host know, which is good for ranks that are all here. Hydra has no such
   variable, but PMI_FD is one end of a socket pair, and the kernel knows which process made it: the
   proxy that started this host's ranks. */
static uint64_t cddp__job_key(int launcher, bool here) {
  const char *fd = launcher == CDDP__BY_HYDRA && here ? cddp__env("PMI_FD") : NULL;
  uint32_t maker[3];
  uint64_t key = 0;
  int i;
  for (i = 0; i < (here ? 5 : 3); i++) {
    const char *value = cddp__env(cddp__launchers[launcher].job[i]);
    if (value != NULL) key = cddp__hash64(key + 1, value, strlen(value) + 1);
  }
  if (fd != NULL && cddp__peer_process((int)strtol(fd, NULL, 10), maker) && maker[0] != 0)
    key = cddp__hash64(key + 1, maker, sizeof maker);
  return key;
}

static cddp__atomic_u32 cddp__listen_fd_user; /* the process that has taken CDDP_LISTEN_FD */

/* A socket that the launcher of all ranks has bound and passed on to rank 0. It is taken once, and
   only if it is still what the variable says. */
static cddp_result cddp__env_listen_fd(cddp__place *at, int port) {
  const char *text = cddp__env("CDDP_LISTEN_FD");
  cddp__address bound;
  socklen_t size = sizeof(int);
  cddp_result r;
  int fd = -1, listening = 0;
  if (text == NULL || at->rank != 0 || at->launcher != CDDP__BY_SCRIPT ||
      cddp__load32(&cddp__listen_fd_user) == (uint32_t)getpid())
    return CDDP_OK;
  if ((r = cddp__env_int("CDDP_LISTEN_FD", 0, INT_MAX, &fd)) != CDDP_OK) return r;
  at->listen_fd_lost = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 ||
                       !listening || !cddp__local_address(fd, &bound) ||
                       cddp__address_port(&bound) != port;
  if (!at->listen_fd_lost) at->listen_fd = fd;
  return CDDP_OK;
}

/* The node of rank 0 in a Slurm step on several: the first one of the step's list. A step of all
   parts of a heterogeneous job has a list in which the nodes are sorted, and rank 0 in the first
   part; a step of one part has that part's list. *out stays empty when no list is set. */
static cddp_result cddp__slurm_host(cddp__place *at, char *out, size_t capacity) {
  static const char *const lists[] = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
                                      "SLURM_NODELIST"};
  static const char *const first[] = {"SLURM_JOB_NODELIST_HET_GROUP_0",
                                      "SLURM_JOB_NODELIST_PACK_GROUP_0"};
  const char *layout = cddp__env("SLURM_DISTRIBUTION"), *here = cddp__env("SLURMD_NODENAME"),
             *list = NULL;
  char part[64];
  int i, k;
  if (layout != NULL && strcmp(layout, "arbitrary") == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "Slurm's srun -m arbitrary (SLURM_DISTRIBUTION) does not tell the ranks "
                      "on which node rank 0 is; add --export=ALL,MASTER_ADDR=HOST to its command, "
                      "HOST being rank 0's");
  for (i = 0; i < 2 && cddp__env(lists[0]) != NULL; i++) {
    bool alone = cddp__env(first[i]) == NULL;
    for (k = 0; k < 1000 && !alone; k++) {
      snprintf(part, sizeof part, "%.*s%d", (int)strlen(first[i]) - 1, first[i], k);
      if (cddp__env(part) == NULL) break;
      alone = cddp__env_same(part, lists[0]);
    }
    if (!alone) list = first[i];
  }
  for (i = 0; i < 3 && list == NULL; i++)
    if (cddp__env(lists[i]) != NULL) list = lists[i];
  if (list == NULL) return CDDP_OK;
  at->host_name = list;
  if (!cddp__first_host(cddp__env(list), out, capacity))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s is \"%.200s\", which is no node list; set MASTER_ADDR to rank 0's host",
                      list, cddp__env(list));
  if (at->rank == 0 && here != NULL && strcmp(here, out) != 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "rank 0 is on node %s, but the other ranks look for it on %s, the first of "
                      "%s; add --export=ALL,MASTER_ADDR=%s to srun's command",
                      here, out, list, here);
  return CDDP_OK;
}

/* Where ranks meet: at MASTER_ADDR and MASTER_PORT. Those that Slurm or mpirun started can do
   without: on one host they need no port, on several one follows from their job, below those that
   systems give out by themselves. Slurm's jobs whose numbers differ by less than 99 have
   different ports in their first 100 steps. key: of the job, see cddp__job_key. */
static cddp_result cddp__env_master(cddp__place *at, uint64_t key) {
  const cddp__launcher *l = &cddp__launchers[at->launcher];
  const char *host = cddp__env("MASTER_ADDR"), *agent = cddp__env("TORCHELASTIC_USE_AGENT_STORE"),
             *job = cddp__env("SLURM_JOB_ID"), *step = cddp__env("SLURM_STEP_ID"),
             *space = cddp__env("PMIX_NAMESPACE");
  bool script = at->launcher == CDDP__BY_SCRIPT, slurm = at->launcher == CDDP__BY_SLURM;
  char first[256] = "";
  int port = 0;
  cddp_result r = cddp__env_int("MASTER_PORT", 1, 65535, &port);
  if (r != CDDP_OK) return r;
  at->host_name = "MASTER_ADDR";
  at->port_name = "from MASTER_PORT";
  if (!script && (host == NULL || port == 0) && cddp__one_host(at) && key != 0) {
    snprintf(at->init_method, sizeof at->init_method, "unix://cddp-%u-%016" PRIx64,
             (unsigned)geteuid(), key);
    return CDDP_OK;
  }
  if (host == NULL && slurm) {
    if ((r = cddp__slurm_host(at, first, sizeof first)) != CDDP_OK) return r;
    host = first[0] != 0 ? first : NULL;
  }
  if (port == 0 && slurm && job != NULL && step != NULL) {
    at->port_name = "derived from SLURM_JOB_ID and SLURM_STEP_ID";
    port = 20000 + (int)((strtoull(job, NULL, 10) % 9973 * 101 + strtoull(step, NULL, 10)) % 9973);
  } else if (port == 0 && at->launcher == CDDP__BY_OPENMPI && space != NULL) {
    at->port_name = "derived from PMIX_NAMESPACE";
    port = 20000 + (int)(cddp__hash64(0, space, strlen(space)) % 9973);
  }
  if ((host == NULL || port == 0) && script)
    return cddp__fail(
        CDDP_INVALID_ARGUMENT,
        "%s is not set, but WORLD_SIZE is %d; set it to rank 0's %s, the same for every rank",
        host == NULL ? "MASTER_ADDR" : "MASTER_PORT", at->world_size,
        host == NULL ? "host name or address" : "port, say 29500");
  if (host == NULL || port == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "%s is not set, and %s does not say where its %d ranks on several hosts "
                      "should meet; add %s to its command, HOST being rank 0's",
                      host == NULL ? "MASTER_ADDR" : "MASTER_PORT", l->name, at->world_size,
                      l->cure);
  snprintf(at->init_method, sizeof at->init_method,
           strchr(host, ':') ? "tcp://[%s]:%d" : "tcp://%s:%d", host, port);
  at->client_only = script && agent != NULL && strcmp(agent, "True") == 0;
  return script && !at->client_only ? cddp__env_listen_fd(at, port) : CDDP_OK;
}

/* given, or if that is 0 CDDP_TIMEOUT_S ("600" or "2.5", whatever the locale's decimal point is),
   or 600. */
static cddp_result cddp__discover_timeout(double given, double *out) {
  const char *text = cddp__env("CDDP_TIMEOUT_S"), *c = text;
  double value = 0, unit = 1;
  *out = given > 0 ? given : CDDP__TIMEOUT_S;
  if (given > 0 || text == NULL) return CDDP_OK;
  for (; *c >= '0' && *c <= '9'; c++) value = 10 * value + (*c - '0');
  if (*c == '.')
    for (c++; *c >= '0' && *c <= '9'; c++) value += (unit /= 10) * (*c - '0');
  *out = value;
  if (*c == 0 && value > 0 && value <= 1e9) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "CDDP_TIMEOUT_S is \"%s\"; it must be seconds above 0",
                    text);
}

static cddp_result cddp__discover(cddp__place *at, const cddp_group_desc *d) {
  const char *method = d->init_method ? d->init_method : "env://",
             *run = cddp__env("TORCHELASTIC_RUN_ID"),
             *restart = cddp__env("TORCHELASTIC_RESTART_COUNT");
  const cddp__launcher *l;
  uint64_t key;
  cddp_result r;
  int joins = 0;
  memset(at, 0, sizeof *at);
  at->listen_fd = -1;
  if ((r = cddp__discover_timeout(d->timeout_s, &at->timeout_s)) != CDDP_OK) return r;
  if ((r = cddp__env_int("CDDP_JOIN", 0, 1, &joins)) != CDDP_OK) return r;
  at->joins = joins != 0;
  if (d->world_size > 0) {
    at->rank = d->rank;
    at->world_size = d->world_size;
  } else if ((r = cddp__env_ranks(at)) != CDDP_OK) {
    return r;
  }
  l = &cddp__launchers[at->launcher];
  at->local_rank = at->local_world_size = -1;
  if ((r = cddp__env_int(l->local_rank, 0, INT_MAX, &at->local_rank)) != CDDP_OK ||
      (r = cddp__env_int(l->local_size, 1, INT_MAX, &at->local_world_size)) != CDDP_OK)
    return r;
  /* Two jobs that come to one store, because they were given one port, must not take each other's
     ranks for their own: each has a prefix, but for those by hand, and Hydra's on several hosts. */
  key = cddp__job_key(at->launcher, cddp__one_host(at));
  at->by_hand = key == 0 && run == NULL;
  if (key != 0)
    snprintf(at->run, sizeof at->run, "cddp/%016" PRIx64 "/0", key);
  else
    snprintf(at->run, sizeof at->run, "cddp/%.80s/%.20s", run ? run : "0", restart ? restart : "0");
  if (strcmp(method, "env://") == 0)
    return at->world_size > 1 || at->joins ? cddp__env_master(at, key) : CDDP_OK;
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
CDDP__COLD_END

/* >>arena -----------------------------------------------------------------------------------------
   Memory that the ranks of a host reduce in place.
   Owns: of cddp__host the memfd and the extents, under host.lock.
   Touches: of a control block whether all ranks have left it, to free it.
   Entry points: cddp__arena_alloc, _free and _unshare; cddp__ref_of and cddp__locate;
   cddp__host_create and _release.
   Works as follows: the ranks hold one memfd, so large that it is all holes; rank i's extents lie
   in its own window of it, so that allocating needs no lock between ranks. A buffer is told to
   peers as a cddp__ref (extent, offset); a peer maps the extent when it first meets it and keeps
   the mapping until the extent is freed and its place used again (its generation differs then).
   The kernel drops everything with the last process. For threads every pointer is good as it is. */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* What an extent is for. */
enum cddp__extent_use {
  CDDP__FOR_USER,    /* cddp_alloc, gradients: made private when a stopped peer may write to it */
  CDDP__FOR_MESSAGE, /* cddp's own */
  CDDP__FOR_BLOCK,   /* a group's control block: freed once its ranks have left */
  CDDP__FOR_BOARD,   /* likewise; begins with one, and takes memory as it is touched */
  CDDP__FOR_KIT      /* cddp's own, which takes memory as it is touched */
};

/* A piece of a rank's window, or (threads) of plain memory. Owned by cddp__host; a peer's is mapped
   here. The last three are of own ones. */
typedef struct cddp__extent {
  uint64_t base;       /* offset in the memfd, bytes */
  uint64_t size;       /* bytes, whole pages */
  char *address;       /* where this process has it; NULL: free */
  uint32_t generation; /* bumped by each allocation */
  enum cddp__extent_use use;
  bool dirty;      /* free, and its old bytes are still there */
  bool is_private; /* this process has a copy of its own, peers see the old memory; its place is not
                      used again */
} cddp__extent;

static size_t cddp__page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Maps size bytes where huge pages can be used: of the memfd from base, at an address that agrees
   with it; with fd -1 memory of this process alone, for threads and single ranks. */
static char *cddp__map_memory(int fd, uint64_t base, uint64_t size) {
  size_t align = size >= CDDP__HUGE_PAGE ? CDDP__HUGE_PAGE : cddp__page_size();
  size_t span = (size_t)size + align;
  int access = fd >= 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | (fd >= 0 ? MAP_NORESERVE : 0);
  char *area = (char *)mmap(NULL, span, access, flags, -1, 0), *at;
  if (area == (char *)MAP_FAILED) return NULL;
  at = area + (align - (uintptr_t)area % align) % align;
  if (fd >= 0 && mmap(at, (size_t)size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, (off_t)base) == MAP_FAILED) {
    munmap(area, span);
    return NULL;
  }
  if (at > area) munmap(area, (size_t)(at - area));
  if (at + size < area + span) munmap(at + size, (size_t)(area + span - (at + size)));
  if (fd >= 0) madvise(at, (size_t)size, MADV_DONTFORK);
  return at;
}

static void cddp__extent_release(cddp__host *h, cddp__extent *e) {
  if (h->fd >= 0) /* the memory goes at once, unless the system will not */
    e->dirty = syscall(SYS_fallocate, h->fd, 3 /* PUNCH_HOLE | KEEP_SIZE */, (off_t)e->base,
                       (off_t)e->size) != 0;
  munmap(e->address, (size_t)e->size);
  e->address = NULL;
}

/* The first extent at or behind that offset. Functions on extents are called with the lock held. */
static size_t cddp__extent_at(const cddp__host *h, uint64_t base) {
  size_t low = 0, high = h->extent_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (h->extents[middle].base < base) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* This rank's own extents: from the first one to before *end. */
static cddp__extent *cddp__own_extents(const cddp__host *h, cddp__extent **end) {
  size_t first = cddp__extent_at(h, (uint64_t)(h->window + 1) << h->window_bits);
  size_t last = cddp__extent_at(h, (uint64_t)(h->window + 2) << h->window_bits);
  *end = last > 0 ? h->extents + last : NULL;
  return last > 0 ? h->extents + first : NULL;
}

static cddp__extent *cddp__extent_new(cddp__host *h, uint64_t base, uint64_t size) {
  size_t at = cddp__extent_at(h, base);
  cddp__extent *e = (cddp__extent *)cddp__grown(&h->allocator, h->extents, &h->extent_capacity,
                                                h->extent_count + 1, sizeof *e);
  if (e == NULL) return NULL;
  h->extents = e;
  e += at;
  memmove(e + 1, e, (h->extent_count++ - at) * sizeof *e);
  memset(e, 0, sizeof *e);
  e->base = base;
  e->size = size;
  return e;
}

/* A free place of at least size bytes: the smallest that fits, or a new one at the end of the
   window; NULL with the error set. */
static cddp__extent *cddp__extent_place(cddp__host *h, uint64_t size) {
  uint64_t align = size >= CDDP__HUGE_PAGE ? CDDP__HUGE_PAGE : cddp__page_size();
  uint64_t limit = (uint64_t)(h->window + 2) << h->window_bits, base;
  cddp__extent *e, *end, *best = NULL;
  for (e = cddp__own_extents(h, &end); e < end; e++) {
    if (e->address != NULL || e->is_private || e->size < size || e->base % align != 0) continue;
    if (best == NULL || e->size < best->size) best = e;
  }
  if (best != NULL && best->size <= 2 * size) return best;
  base = cddp__round_up(h->window_end, align);
  if (!h->threads && (base > limit || size > limit - base)) {
    cddp__fail(CDDP_OUT_OF_MEMORY,
               "cddp_alloc: %" PRIu64 " bytes do not fit into the %" PRIu64
               " bytes that this rank may share%s",
               size, (uint64_t)1 << h->window_bits,
               h->window_bits < 40 ? "; raise the file size limit (ulimit -f)" : "");
    return NULL;
  }
  if ((e = cddp__extent_new(h, base, size)) != NULL) h->window_end = base + size;
  return e;
}

/* Asks for huge pages. MADV_COLLAPSE makes them, on this core, even where the system's setting for
   shared memory says never, but only of memory that has one page at least. Without it ordinary
   pages do. What is there stays, whoever writes to it meanwhile. */
static void cddp__populate(char *address, uint64_t size, bool shared) {
  uint64_t whole = size / CDDP__HUGE_PAGE * CDDP__HUGE_PAGE, at;
  if (whole == 0) return;
  madvise(address, (size_t)whole, MADV_HUGEPAGE);
  if (!shared) return; /* the first touch makes one */
  for (at = 0; at < whole; at += CDDP__HUGE_PAGE) (void)((volatile char *)address)[at];
  madvise(address, (size_t)whole, MADV_COLLAPSE);
}

/* Zeroed memory of this rank's window. First it gives back the control blocks of groups that all
   ranks of this host have left. */
static void *cddp__arena_alloc(cddp__host *h, size_t bytes, enum cddp__extent_use use) {
  size_t page = bytes >= CDDP__HUGE_PAGE ? CDDP__HUGE_PAGE : cddp__page_size();
  cddp__extent *e, *end;
  char *address = NULL;
  if (bytes > SIZE_MAX / 4) {
    cddp__fail(CDDP_OUT_OF_MEMORY, "cddp_alloc: %zu bytes exceed the address space", bytes);
    return NULL;
  }
  pthread_mutex_lock(&h->lock);
  for (e = cddp__own_extents(h, &end); e < end; e++) {
    const cddp__control_block *b = (const cddp__control_block *)(const void *)e->address;
    bool block = e->use == CDDP__FOR_BLOCK || e->use == CDDP__FOR_BOARD;
    uint32_t size = b != NULL && block ? cddp__load32(&b->size) : 0;
    if (size != 0 && cddp__load32(&b->left) == size) cddp__extent_release(h, e);
  }
  e = cddp__extent_place(h, cddp__round_up(bytes ? bytes : 1, page));
  if (e != NULL && (address = cddp__map_memory(h->fd, e->base, e->size)) == NULL)
    cddp__fail(CDDP_OUT_OF_MEMORY, "cddp_alloc: mmap of %zu bytes: %s", bytes, strerror(errno));
  if (address != NULL) {
    if (use < CDDP__FOR_BOARD) cddp__populate(address, e->size, h->fd >= 0);
    if (e->dirty) memset(address, 0, (size_t)e->size); /* or a block's old rounds would seem new */
    e->dirty = false;
    e->use = use;
    e->address = address;
    e->generation = ++h->generation;
  }
  pthread_mutex_unlock(&h->lock);
  return address;
}

/* A peer that was stopped in the middle of a failed operation may write to this rank's memory when
   it goes on, at any later time: the memory that users have becomes private, with the bytes it has,
   each piece at its address. What peers need of this rank stays: control blocks, messages on their
   way. Operations of other groups that are in this memory now fail, see cddp__enter. */
static void cddp__arena_unshare(cddp__host *h) {
  cddp__extent *e, *end;
  uint64_t failed = 0;
  if (h->fd < 0) return;
  pthread_mutex_lock(&h->lock);
  cddp__add32(&h->unshared, 1);
  for (e = cddp__own_extents(h, &end); e < end; e++) {
    char *copy;
    if (e->address == NULL || e->use != CDDP__FOR_USER || e->is_private) continue;
    copy = cddp__map_memory(-1, 0, e->size);
    if (copy != NULL) memcpy(copy, e->address, (size_t)e->size);
    e->is_private = copy != NULL && syscall(SYS_mremap, copy, (size_t)e->size, (size_t)e->size,
                                            3ul /* MAYMOVE | FIXED */, e->address) != -1;
    if (e->is_private) continue;
    if (copy != NULL) munmap(copy, (size_t)e->size);
    failed += e->size;
  }
  pthread_mutex_unlock(&h->lock);
  if (failed > 0)
    cddp__log(&h->logger, 0,
              "%" PRIu64 " bytes of cddp_alloc stay shared with a rank that may be writing to "
              "them: there is no memory for a copy",
              failed);
}

/* The own extent that holds p, or NULL. */
static cddp__extent *cddp__extent_of(const cddp__host *h, const void *p) {
  const char *c = (const char *)p;
  cddp__extent *e, *end;
  for (e = cddp__own_extents(h, &end); e < end; e++)
    if (e->address != NULL && c >= e->address && c < e->address + e->size) return e;
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
  if (e != NULL && !e->is_private && bytes <= e->size - (size_t)((const char *)p - e->address)) {
    ref.kind = CDDP__REF_EXTENT;
    ref.base = e->base;
    ref.size = e->size;
    ref.offset = (uint64_t)((const char *)p - e->address);
    ref.generation = e->generation;
  }
  pthread_mutex_unlock(&h->lock);
  return ref;
}

/* The address here of what ref describes: a peer's or this rank's own. */
static cddp_result cddp__locate(cddp__host *h, const cddp__ref *ref, void **out) {
  cddp__extent *e;
  char *address = NULL;
  size_t i;
  if (ref->kind == CDDP__REF_POINTER) {
    *out = (void *)(uintptr_t)ref->base;
    return CDDP_OK;
  }
  pthread_mutex_lock(&h->lock);
  i = cddp__extent_at(h, ref->base);
  e = i < h->extent_count && h->extents[i].base == ref->base
          ? &h->extents[i] : cddp__extent_new(h, ref->base, ref->size);
  if (e != NULL && e->address != NULL && e->generation == ref->generation && e->size == ref->size) {
    address = e->address;
  } else if (e != NULL) {
    if ((address = cddp__map_memory(h->fd, ref->base, ref->size)) == NULL)
      cddp__fail(CDDP_OUT_OF_MEMORY, "mmap of a peer's memory: %s", strerror(errno));
    else if (e->address != NULL)
      munmap(e->address, (size_t)e->size);
    if (address != NULL) {
      e->address = address;
      e->size = ref->size;
      e->generation = ref->generation;
    }
  }
  pthread_mutex_unlock(&h->lock);
  *out = address != NULL ? address + ref->offset : NULL;
  return address != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

static int cddp__count_cores(void) {
  unsigned char set[1024]; /* 8192 processors */
  long bytes = syscall(SYS_sched_getaffinity, 0, sizeof set, set), i;
  int n = 0;
  for (i = 0; i < bytes; i++) n += __builtin_popcount(set[i]);
  if (n == 0) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? n : 1;
}

/* Where this rank is among the ranks of the host; before anything is allocated. The arrays are
   large enough for the job. */
static void cddp__host_place(cddp__host *h, int size, int index, int window) {
  h->size = size;
  h->index = index;
  h->window = window;
  h->window_end = (uint64_t)(window + 1) << h->window_bits;
}

static void cddp__host_release(cddp__host *h) {
  cddp_allocator a;
  int i, left;
  if (h == NULL) return;
  pthread_mutex_lock(&h->lock);
  left = --h->refs;
  pthread_mutex_unlock(&h->lock);
  if (left > 0) return;
  for (i = 0; i < (int)h->extent_count; i++)
    if (h->extents[i].address != NULL) munmap(h->extents[i].address, (size_t)h->extents[i].size);
  for (i = 0; h->pidfds != NULL && i < h->size + CDDP__JOINS; i++)
    if (h->pidfds[i] >= 0) close(h->pidfds[i]);
  cddp__close_fd(&h->fd);
  cddp__close_fd(&h->door_fd);
  cddp__close_fd(&h->claim);
  cddp__close_fd(&h->port);
  if (h->record != NULL) {
    h->record->left = 1;
    munmap(h->record, cddp__record_bytes());
  }
  cddp__net_free(h->net);
  pthread_mutex_destroy(&h->lock);
  a = h->allocator;
  cddp__free(&a, h->extents);
  cddp__free(&a, h->pidfds);
  cddp__free(&a, h->pids);
  cddp__free(&a, h->door);
  cddp__free(&a, h);
}

static cddp__host *cddp__host_create(const cddp_allocator *a, const cddp_logger *l, int size,
                                     int index) {
  cddp__host *h = (cddp__host *)cddp__calloc(a, 1, sizeof *h);
  const char *given = cddp__env("CDDP_HOST_ID");
  size_t room = (size_t)size + CDDP__JOINS;
  if (h == NULL) return NULL;
  if (a != NULL) h->allocator = *a;
  if (l != NULL) h->logger = *l;
  pthread_mutex_init(&h->lock, NULL);
  h->fd = h->claim = h->port = h->door_fd = -1;
  h->window_bits = 40;
  cddp__host_place(h, size, index, index);
  h->cores = cddp__count_cores();
  h->refs = 1;
  gethostname(h->name, sizeof h->name - 1);
  if (given != NULL) cddp__append(h->name, sizeof h->name, "/%.20s", given);
  h->pids = (uint32_t *)cddp__calloc(a, room, sizeof *h->pids);
  h->pidfds = (int *)cddp__malloc(a, room * sizeof *h->pidfds);
  if (h->pidfds != NULL) memset(h->pidfds, 0xff, room * sizeof *h->pidfds);
  if (h->pidfds != NULL && h->pids != NULL) return h;
  cddp__host_release(h);
  return NULL;
}

/* >>reduce ---------------------------------------------------------------------------------------
   Sums in canonical order, conversions, and the loops of SGD, over arrays. Pure: owns nothing and
   touches only the arrays that it is given. Entry points: cddp__reduce, _reduce_all, _reduce_part,
   _reduce_nodes, _reduce_subtree; cddp__scale, cddp__sum_squares, cddp__convert;
   cddp__pick_kernels for >>optim.
   Works as follows: each loop is written once, in plain C, as a macro that makes it for an element
   type and an instruction set. A set's loops stand in a table with a row for each type, and
   cddp__pick_kernels takes the table of the best set that this machine has. All sets give the same
   bits: the operations on an element and their order are the same, and no compiler option may
   contract a * b + c or reorder sums here. */

/* Callers keep their elements as any type, say _Float16; these access all of them. */
typedef float __attribute__((may_alias)) cddp__f32;
typedef double __attribute__((may_alias)) cddp__f64;
typedef int8_t __attribute__((may_alias)) cddp__i8;
typedef uint8_t __attribute__((may_alias)) cddp__u8;
typedef uint16_t __attribute__((may_alias)) cddp__u16;
typedef int32_t __attribute__((may_alias)) cddp__i32;
typedef int64_t __attribute__((may_alias)) cddp__i64;

#if defined(__clang__)
#define CDDP__FAST
#define CDDP__STRICT_FP _Pragma("clang fp contract(off) reassociate(off)")
#define CDDP__IVDEP _Pragma("clang loop vectorize(assume_safety)") /* destinations may be sources */
#define CDDP__UNROLL_16 _Pragma("clang loop unroll_count(16)")
#define CDDP__WIDE ""
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed" /* a loop that stays scalar is no fault */
#else
#define CDDP__FAST /* O3 takes longer to compile, and gains nothing */                             \
  __attribute__((optimize("O2", "tree-vectorize", "vect-cost-model=dynamic", "fp-contract=off",    \
                          "no-fast-math")))
#define CDDP__STRICT_FP
#define CDDP__IVDEP _Pragma("GCC ivdep") /* destinations may be sources */
#ifdef __CUDACC__
#define CDDP__UNROLL_16 /* nvcc warns of it */
#else
#define CDDP__UNROLL_16 _Pragma("GCC unroll 16")
#endif
#define CDDP__WIDE ",prefer-vector-width=512"
#endif

/* The attributes of an instruction set's functions. `base` is what the compiler is set to. */
#if defined(__x86_64__) && !defined(CDDP__NO_DISPATCH)
#include <cpuid.h>
#define CDDP__DISPATCH 1
#define CDDP__AVX2 __attribute__((target("avx2,fma,f16c"))) CDDP__FAST
#define CDDP__AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c" CDDP__WIDE))) CDDP__FAST
#else
#define CDDP__DISPATCH 0
#endif

/* Without errno, loops with square roots become vectors. (nvcc has declarations of its own.) */
#if defined(__CUDACC__)
#elif defined(__cplusplus)
extern "C" float sqrtf(float) noexcept __attribute__((const));
extern "C" double sqrt(double) noexcept __attribute__((const));
#else
extern float sqrtf(float) __attribute__((const));
extern double sqrt(double) __attribute__((const));
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

static bool cddp__dtype_half(cddp_dtype d) { return d == CDDP_F16 || d == CDDP_BF16; }

/* In which elements of a dtype are computed. */
static cddp_dtype cddp__compute_type(cddp_dtype d) { return cddp__dtype_half(d) ? CDDP_F32 : d; }

/* Half precision, as the F16C instructions do it: NaNs turn quiet, keep sign and upper payload. */

#define CDDP__INLINED static inline __attribute__((always_inline))

CDDP__INLINED uint32_t cddp__f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

CDDP__INLINED float cddp__f32_of_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

/* c ? a : b for c = 0 or 1, as arithmetic that every machine can do on vectors. */
CDDP__INLINED uint32_t cddp__choose(bool c, uint32_t a, uint32_t b) {
  uint32_t mask = 0u - (uint32_t)c;
  return (a & mask) | (b & ~mask);
}

CDDP__INLINED float cddp__f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = h & 0x7fffu;
  uint32_t normal = (a << 13) + cddp__choose(a >= 0x7c00, 224u << 23, 112u << 23);
  uint32_t small = cddp__f32_bits((float)(int32_t)a * 0x1p-24f); /* subnormal or zero: exact */
  uint32_t quiet = cddp__choose(a > 0x7c00, 0x400000, 0);
  return cddp__f32_of_bits(sign | quiet | cddp__choose(a < 0x400, small, normal));
}

CDDP__INLINED uint16_t cddp__f32_to_f16(float x) {
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

CDDP__INLINED float cddp__bf16_to_f32(uint16_t h) { return cddp__f32_of_bits((uint32_t)h << 16); }

CDDP__INLINED uint16_t cddp__f32_to_bf16(float x) {
  uint32_t u = cddp__f32_bits(x), a = u & 0x7fffffff;
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (uint16_t)(a > 0x7f800000 ? u >> 16 | 0x40 : rounded);
}

#define CDDP__STATES 3 /* arrays that an optimizer keeps of a parameter, at most */

/* What an optimizer's step takes from its settings and from the number of the step. */
typedef struct cddp__scalars {
  double sign;   /* of the gradient: -1 to maximize */
  double step;   /* -lr; AdamW: / (1 - beta1^t) */
  double decay;  /* SGD: weight_decay, 0: none; AdamW: 1 - lr * weight_decay */
  double keep;   /* SGD: factor of the momentum; AdamW: of exp_avg_sq, beta2 */
  double take;   /* SGD: of the gradient that enters the momentum; AdamW: 1 - beta2 */
  bool nesterov; /* SGD */
  bool first;    /* SGD: the gradient becomes the momentum */
  double lerp;   /* AdamW: 1 - beta1 */
  double root;   /* AdamW: sqrt(1 - beta2^t) */
  double eps;    /* AdamW */
} cddp__scalars;

/* A stretch of a data-parallel step: gradients and weights of 1, 2 or 4 ranks, states of one. */
typedef struct cddp__fused_args {
  cddp__f32 *gradients[4], *weights[4]; /* weights: this rank's first */
  cddp__f32 *states[CDDP__STATES];
  const cddp__scalars *scalars;
  float mean; /* factor of the sum of gradients: sign / ranks */
} cddp__fused_args;

/* The loops for one element type; NULL: none. */
typedef struct cddp__kernels {
  /* d = the canonical sum of k sources: 2, 4 or 8, times f; 3, divided by f. F32, F64, BF16 */
  void (*sum)(void *d, const void *const *s, int k, size_t n, double f);
  /* every buffer = the canonical sum of all k, 2, 4 or 8, times f. F32, F64, BF16 */
  void (*all)(void *const *bufs, int k, size_t n, double f);
  /* d = a op b: PROD, MIN, MAX; for integers all but AVG. Not F16, BF16 */
  void (*pair)(void *d, const void *a, const void *b, size_t n, cddp_op op);
  /* d = d * f or d / f; integers are always divided, truncated. Not F16, BF16 */
  void (*scale)(void *d, size_t n, double f, bool divide);
  /* d = e * a + f * b, the first product rounded. F32, F64 */
  void (*mix)(void *d, const void *a, const void *b, size_t n, double e, double f);
  /* the sum of squares, in an order that depends on n alone. F32, F64 */
  double (*squares)(const void *p, size_t n);
  /* one step of AdamW; states: exp_avg, exp_avg_sq, max_exp_avg_sq (NULL: none). F32, F64 */
  void (*adamw)(void *w, const void *g, void *const *states, size_t n, const cddp__scalars *s);
  /* data-parallel steps: by SGD with momentum that has a value, without nesterov; by AdamW without
     amsgrad. F32 */
  void (*sgd_loop)(const cddp__fused_args *s, int ranks, size_t n);
  void (*adamw_loop)(const cddp__fused_args *s, int ranks, size_t n);
  void (*widen)(cddp__f32 *d, const void *s, size_t n);  /* F16, BF16 */
  void (*narrow)(void *d, const cddp__f32 *s, size_t n); /* F16, BF16 */
} cddp__kernels;

#define CDDP__EACH(statement) \
  do {                        \
    size_t i;                 \
    CDDP__IVDEP               \
    for (i = 0; i < n; i++) { \
      statement;              \
    }                         \
  } while (0)

/* Below ISA is an instruction set, TARGET its attributes, T an element type and S its name. */

/* F: type of the arithmetic; IN and OUT convert between T and F */
#define CDDP__SUM_KERNELS(ISA, TARGET, T, S, F, IN, OUT)                                        \
  TARGET static void cddp__sum_##S##_##ISA(void *dst, const void *const *s, int k, size_t n,    \
                                           double factor) {                                     \
    CDDP__STRICT_FP                                                                             \
    F f = (F)factor;                                                                            \
    T *d = (T *)dst;                                                                            \
    const T *s0 = (const T *)s[0], *s1 = (const T *)s[1];                                       \
    const T *s2 = k > 2 ? (const T *)s[2] : s0, *s3 = k > 3 ? (const T *)s[3] : s0;             \
    if (k == 2) CDDP__EACH(d[i] = OUT((IN(s0[i]) + IN(s1[i])) * f));                            \
    else if (k == 3) CDDP__EACH(d[i] = OUT(((IN(s0[i]) + IN(s1[i])) + IN(s2[i])) / f));         \
    else if (k == 4)                                                                            \
      CDDP__EACH(d[i] = OUT(((IN(s0[i]) + IN(s1[i])) + (IN(s2[i]) + IN(s3[i]))) * f));          \
    else {                                                                                      \
      const T *s4 = (const T *)s[4], *s5 = (const T *)s[5];                                     \
      const T *s6 = (const T *)s[6], *s7 = (const T *)s[7];                                     \
      CDDP__EACH(F x = (IN(s0[i]) + IN(s1[i])) + (IN(s2[i]) + IN(s3[i]));                       \
                 F y = (IN(s4[i]) + IN(s5[i])) + (IN(s6[i]) + IN(s7[i]));                       \
                 d[i] = OUT((x + y) * f));                                                      \
    }                                                                                           \
  }                                                                                             \
  TARGET static void cddp__all_##S##_##ISA(void *const *bufs, int k, size_t n, double factor) { \
    CDDP__STRICT_FP                                                                             \
    F f = (F)factor;                                                                            \
    T *b0 = (T *)bufs[0], *b1 = (T *)bufs[1];                                                   \
    T *b2 = k > 2 ? (T *)bufs[2] : b0, *b3 = k > 2 ? (T *)bufs[3] : b0;                         \
    if (k == 2)                                                                                 \
      CDDP__EACH(T t = OUT((IN(b0[i]) + IN(b1[i])) * f); b0[i] = t; b1[i] = t);                 \
    else if (k == 4)                                                                            \
      CDDP__EACH(T t = OUT(((IN(b0[i]) + IN(b1[i])) + (IN(b2[i]) + IN(b3[i]))) * f);            \
                 b0[i] = t; b1[i] = t; b2[i] = t; b3[i] = t);                                   \
    else {                                                                                      \
      T *b4 = (T *)bufs[4], *b5 = (T *)bufs[5], *b6 = (T *)bufs[6], *b7 = (T *)bufs[7];         \
      CDDP__EACH(F x = (IN(b0[i]) + IN(b1[i])) + (IN(b2[i]) + IN(b3[i]));                       \
                 F y = (IN(b4[i]) + IN(b5[i])) + (IN(b6[i]) + IN(b7[i]));                       \
                 T t = OUT((x + y) * f);                                                        \
                 b0[i] = t; b1[i] = t; b2[i] = t; b3[i] = t;                                    \
                 b4[i] = t; b5[i] = t; b6[i] = t; b7[i] = t);                                   \
    }                                                                                           \
  }

/* FMA: a * b + c, rounded once */
#define CDDP__SCALE_KERNELS(ISA, TARGET, T, S, F, FMA)                                          \
  TARGET static void cddp__scale_##S##_##ISA(void *p, size_t n, double factor, bool divide) {   \
    CDDP__STRICT_FP                                                                             \
    F f = (F)factor;                                                                            \
    T *d = (T *)p;                                                                              \
    if (divide) CDDP__EACH(d[i] = d[i] / f);                                                    \
    else CDDP__EACH(d[i] = d[i] * f);                                                           \
  }                                                                                             \
  TARGET static void cddp__mix_##S##_##ISA(void *dst, const void *p, const void *q, size_t n,   \
                                           double factor_p, double factor_q) {                  \
    CDDP__STRICT_FP                                                                             \
    F e = (F)factor_p, f = (F)factor_q;                                                         \
    T *d = (T *)dst;                                                                            \
    const T *a = (const T *)p, *b = (const T *)q;                                               \
    CDDP__EACH(F x = e * a[i]; d[i] = FMA(f, b[i], x));                                         \
  }

/* Element i is added to lane i mod 16, then the lanes in pairs. */
#define CDDP__SQUARES_KERNEL(ISA, TARGET, T, S)                                                 \
  TARGET static double cddp__squares_##S##_##ISA(const void *src, size_t n) {                   \
    CDDP__STRICT_FP                                                                             \
    const T *p = (const T *)src;                                                                \
    double lane[16], square;                                                                    \
    size_t i, j;                                                                                \
    for (j = 0; j < 16; j++) lane[j] = 0;                                                       \
    for (; n >= 16; n -= 16, p += 16) {                                                         \
      CDDP__UNROLL_16                                                                           \
      for (j = 0; j < 16; j++) {                                                                \
        square = (double)p[j] * (double)p[j];                                                   \
        lane[j] += square;                                                                      \
      }                                                                                         \
    }                                                                                           \
    for (i = 0; i < n; i++) {                                                                   \
      square = (double)p[i] * (double)p[i];                                                     \
      lane[i] += square;                                                                        \
    }                                                                                           \
    for (j = 8; j > 0; j /= 2) {                                                                \
      for (i = 0; i < j; i++) lane[i] += lane[i + j];                                           \
    }                                                                                           \
    return lane[0];                                                                             \
  }

/* d[i] = the lesser (or greater) of a[i] and b[i]; where either is NaN, that NaN comes through */
#define CDDP__EACH_PICK(T, before) \
  CDDP__EACH(T x = a[i]; T y = b[i]; d[i] = ((x before y) | (x != x)) ? x : y)

#define CDDP__PAIR_KERNEL(ISA, TARGET, T, S)                                                    \
  TARGET static void cddp__pair_##S##_##ISA(void *dst, const void *p, const void *q, size_t n,  \
                                            cddp_op op) {                                       \
    CDDP__STRICT_FP                                                                             \
    T *d = (T *)dst;                                                                            \
    const T *a = (const T *)p, *b = (const T *)q;                                               \
    if (op == CDDP_PROD) CDDP__EACH(d[i] = a[i] * b[i]);                                        \
    else if (op == CDDP_MIN) CDDP__EACH_PICK(T, <);                                             \
    else CDDP__EACH_PICK(T, >);                                                                 \
  }

/* U: T unsigned, since sums and products of integers wrap around. MAX is MIN of the complements,
   and BOR is BAND of them. */
#define CDDP__BITS_KERNEL(ISA, TARGET, T, S, U)                                                 \
  TARGET static void cddp__pair_##S##_##ISA(void *dst, const void *p, const void *q, size_t n,  \
                                            cddp_op op) {                                       \
    T *d = (T *)dst, flip = (T)(op == CDDP_MAX || op == CDDP_BOR ? -1 : 0);                     \
    const T *a = (const T *)p, *b = (const T *)q;                                               \
    if (op == CDDP_SUM) CDDP__EACH(d[i] = (T)(U)((U)a[i] + (U)b[i]));                           \
    else if (op == CDDP_PROD) CDDP__EACH(d[i] = (T)(U)((U)a[i] * (U)b[i]));                     \
    else if (op == CDDP_BXOR) CDDP__EACH(d[i] = (T)(a[i] ^ b[i]));                              \
    else if (op == CDDP_BAND || op == CDDP_BOR)                                                 \
      CDDP__EACH(d[i] = (T)(((a[i] ^ flip) & (b[i] ^ flip)) ^ flip));                           \
    else                                                                                        \
      CDDP__EACH(T x = (T)(a[i] ^ flip); T y = (T)(b[i] ^ flip);                                \
                 d[i] = (T)((x < y ? x : y) ^ flip));                                           \
  }

/* An integer divisor is at most CDDP__MAX_RANKS. Processors divide no vectors of integers. */
#define CDDP__DIVIDE_KERNEL(T, S)                                                               \
  static void cddp__divide_##S(void *p, size_t n, double f, bool divide) {                      \
    T *d = (T *)p;                                                                              \
    int k = (int)f;                                                                             \
    (void)divide;                                                                               \
    CDDP__EACH(d[i] = (T)(d[i] / k));                                                           \
  }

#define CDDP__HALF_KERNELS(ISA, TARGET, S)                                                      \
  TARGET static void cddp__widen_##S##_##ISA(cddp__f32 *d, const void *src, size_t n) {         \
    const cddp__u16 *s = (const cddp__u16 *)src;                                                \
    CDDP__EACH(d[i] = cddp__##S##_to_f32(s[i]));                                                \
  }                                                                                             \
  TARGET static void cddp__narrow_##S##_##ISA(void *dst, const cddp__f32 *s, size_t n) {        \
    CDDP__STRICT_FP                                                                             \
    cddp__u16 *d = (cddp__u16 *)dst;                                                            \
    CDDP__EACH(d[i] = cddp__f32_to_##S(s[i]));                                                  \
  }

/* One element of AdamW, as the vectors of PyTorch's fused kernel do it: FusedAdamKernel.cpp, whose
   bits (of 2.6.0) tell which sums are fused multiply-adds. v: the gradient, x: the weight; MAXIMUM:
   amsgrad's, or none. */
#define CDDP__ADAMW_STEP(F, FMA, SQRT, MAXIMUM)                                                 \
  F a = m[i];                                                                                   \
  F b = q[i];                                                                                   \
  a = FMA(lerp, v - a, near ? a : v);                                                           \
  b = FMA(take * v, v, b * keep);                                                               \
  m[i] = a;                                                                                     \
  q[i] = b;                                                                                     \
  MAXIMUM;                                                                                      \
  x = x * decay + step * a / (SQRT(b) / root + eps)
#define CDDP__ADAMW_SCALARS(F, s)                                                               \
  F decay = (F)(s)->decay, keep = (F)(s)->keep, take = (F)(s)->take, root = (F)(s)->root;       \
  F step = (F)(s)->step, eps = (F)(s)->eps, lerp = (F)(s)->lerp;                                \
  bool near = lerp < (F)0.5; /* torch.lerp */                                                   \
  if (!near) lerp = lerp - (F)1
#define CDDP__ADAMW_KERNEL(ISA, TARGET, T, S, F, FMA, SQRT)                                     \
  TARGET static void cddp__adamw_##S##_##ISA(void *weights, const void *gradient,               \
                                             void *const *states, size_t n,                     \
                                             const cddp__scalars *s) {                          \
    CDDP__STRICT_FP                                                                             \
    T *w = (T *)weights, *m = (T *)states[0], *q = (T *)states[1], *most = (T *)states[2];      \
    const T *g = (const T *)gradient;                                                           \
    F sign = (F)s->sign;                                                                        \
    CDDP__ADAMW_SCALARS(F, s);                                                                  \
    if (most == NULL) {                                                                         \
      CDDP__EACH(F v = g[i] * sign; F x = w[i]; CDDP__ADAMW_STEP(F, FMA, SQRT, ); w[i] = x);    \
    } else {                                                                                    \
      CDDP__EACH(F v = g[i] * sign; F x = w[i];                                                 \
                 CDDP__ADAMW_STEP(F, FMA, SQRT, F y = most[i];                                  \
                                  b = ((y > b) | (y != y)) ? y : b; most[i] = b);               \
                 w[i] = x);                                                                     \
    }                                                                                           \
  }

/* Mean, step, publish, zero. Reads and writes everything once, in one loop: the memory is busy all
   the time. STEP makes x, the weight, from x and v, the mean. */
#define CDDP__FUSED(MEAN, STEP, OTHERS) \
  CDDP__EACH(float v = MEAN; float x = w0[i]; STEP; w0[i] = x; g0[i] = 0; OTHERS)
#define CDDP__FUSED_LOOPS(STEP)                                                                 \
  if (ranks == 1) CDDP__FUSED(g0[i] * mean, STEP, );                                            \
  else if (ranks == 2) CDDP__FUSED((g0[i] + g1[i]) * mean, STEP, w1[i] = x; g1[i] = 0);         \
  else CDDP__FUSED(((g0[i] + g1[i]) + (g2[i] + g3[i])) * mean, STEP,                            \
                   w1[i] = x; w2[i] = x; w3[i] = x; g1[i] = 0; g2[i] = 0; g3[i] = 0);

#define CDDP__FUSED_ARRAYS(s)                                                                   \
  cddp__f32 *m = (s)->states[0], *g0 = (s)->gradients[0], *g1 = (s)->gradients[1];              \
  cddp__f32 *g2 = (s)->gradients[2], *g3 = (s)->gradients[3], *w0 = (s)->weights[0];            \
  cddp__f32 *w1 = (s)->weights[1], *w2 = (s)->weights[2], *w3 = (s)->weights[3];                \
  float mean = (s)->mean

#define CDDP__SGD_STEP                                                                          \
  float y = keep * m[i];                                                                        \
  float decayed = __builtin_fmaf(decay, x, v);                                                  \
  v = cddp__f32_of_bits(cddp__choose(decays, cddp__f32_bits(decayed), cddp__f32_bits(v)));      \
  v = __builtin_fmaf(take, v, y);                                                               \
  x = __builtin_fmaf(step, v, x);                                                               \
  m[i] = v
#define CDDP__LOOP_KERNELS(ISA, TARGET)                                                         \
  TARGET static void cddp__sgd_loop_##ISA(const cddp__fused_args *s, int ranks, size_t n) {     \
    CDDP__STRICT_FP                                                                             \
    float keep = (float)s->scalars->keep, take = (float)s->scalars->take;                       \
    float decay = (float)s->scalars->decay, step = (float)s->scalars->step;                     \
    bool decays = s->scalars->decay != 0;                                                       \
    CDDP__FUSED_ARRAYS(s);                                                                      \
    CDDP__FUSED_LOOPS(CDDP__SGD_STEP)                                                           \
  }                                                                                             \
  TARGET static void cddp__adamw_loop_##ISA(const cddp__fused_args *s, int ranks, size_t n) {   \
    CDDP__STRICT_FP                                                                             \
    cddp__f32 *q = s->states[1];                                                                \
    CDDP__ADAMW_SCALARS(float, s->scalars);                                                     \
    CDDP__FUSED_ARRAYS(s);                                                                      \
    CDDP__FUSED_LOOPS(CDDP__ADAMW_STEP(float, __builtin_fmaf, sqrtf, ))                         \
  }

/* What AVX-512 makes faster; and what it does not, or what is seldom called. */
#define CDDP__HOT_KERNELS(ISA, TARGET)                                                          \
  CDDP__SUM_KERNELS(ISA, TARGET, cddp__f32, f32, float, , )                                     \
  CDDP__SUM_KERNELS(ISA, TARGET, cddp__u16, bf16, float, cddp__bf16_to_f32, cddp__f32_to_bf16)  \
  CDDP__SCALE_KERNELS(ISA, TARGET, cddp__f32, f32, float, __builtin_fmaf)                       \
  CDDP__ADAMW_KERNEL(ISA, TARGET, cddp__f32, f32, float, __builtin_fmaf, sqrtf)                 \
  CDDP__LOOP_KERNELS(ISA, TARGET)
#define CDDP__OTHER_KERNELS(ISA, TARGET)                                                        \
  CDDP__SUM_KERNELS(ISA, TARGET, cddp__f64, f64, double, , )                                    \
  CDDP__SCALE_KERNELS(ISA, TARGET, cddp__f64, f64, double, __builtin_fma)                       \
  CDDP__ADAMW_KERNEL(ISA, TARGET, cddp__f64, f64, double, __builtin_fma, sqrt)                  \
  CDDP__SQUARES_KERNEL(ISA, TARGET, cddp__f32, f32)                                             \
  CDDP__SQUARES_KERNEL(ISA, TARGET, cddp__f64, f64)                                             \
  CDDP__PAIR_KERNEL(ISA, TARGET, cddp__f32, f32)                                                \
  CDDP__PAIR_KERNEL(ISA, TARGET, cddp__f64, f64)                                                \
  CDDP__BITS_KERNEL(ISA, TARGET, cddp__i8, i8, uint8_t)                                         \
  CDDP__BITS_KERNEL(ISA, TARGET, cddp__u8, u8, uint8_t)                                         \
  CDDP__BITS_KERNEL(ISA, TARGET, cddp__i32, i32, uint32_t)                                      \
  CDDP__BITS_KERNEL(ISA, TARGET, cddp__i64, i64, uint64_t)                                      \
  CDDP__HALF_KERNELS(ISA, TARGET, bf16)
CDDP__DIVIDE_KERNEL(cddp__i8, i8)
CDDP__DIVIDE_KERNEL(cddp__u8, u8)
CDDP__DIVIDE_KERNEL(cddp__i32, i32)
CDDP__DIVIDE_KERNEL(cddp__i64, i64)

/* The table of a set, by cddp_dtype; HOT: the set that has its hot kernels. */
#define CDDP__FLOAT_ENTRIES(ISA, HOT, S, SGD, ADAMW)                                            \
  {cddp__sum_##S##_##HOT, cddp__all_##S##_##HOT, cddp__pair_##S##_##ISA,                        \
   cddp__scale_##S##_##HOT, cddp__mix_##S##_##HOT, cddp__squares_##S##_##ISA,                   \
   cddp__adamw_##S##_##HOT, SGD, ADAMW, NULL, NULL}
#define CDDP__HALF_ENTRIES(ISA, S, SUM, ALL)                                                    \
  {SUM, ALL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,                                    \
   cddp__widen_##S##_##ISA, cddp__narrow_##S##_##ISA}
#define CDDP__INT_ENTRIES(ISA, S)                                                               \
  {NULL, NULL, cddp__pair_##S##_##ISA, cddp__divide_##S, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
#define CDDP__TABLE(ISA, HOT)                                                                   \
  {CDDP__FLOAT_ENTRIES(ISA, HOT, f32, cddp__sgd_loop_##HOT, cddp__adamw_loop_##HOT),            \
   CDDP__FLOAT_ENTRIES(ISA, ISA, f64, NULL, NULL),                                              \
   CDDP__HALF_ENTRIES(ISA, f16, NULL, NULL),                                                    \
   CDDP__HALF_ENTRIES(ISA, bf16, cddp__sum_bf16_##HOT, cddp__all_bf16_##HOT),                   \
   CDDP__INT_ENTRIES(ISA, i8),                                                                  \
   CDDP__INT_ENTRIES(ISA, u8),                                                                  \
   CDDP__INT_ENTRIES(ISA, i32),                                                                 \
   CDDP__INT_ENTRIES(ISA, i64)}

CDDP__HOT_KERNELS(base, CDDP__FAST)
CDDP__OTHER_KERNELS(base, CDDP__FAST)
CDDP__HALF_KERNELS(base, CDDP__FAST, f16)
static const cddp__kernels cddp__kernels_base[] = CDDP__TABLE(base, base);

#if CDDP__DISPATCH
/* F16C converts 8 elements in one instruction. */
typedef short __attribute__((vector_size(16))) cddp__8_halves;
typedef float __attribute__((vector_size(32))) cddp__8_floats;

CDDP__AVX2 static void cddp__widen_f16_avx2(cddp__f32 *d, const void *src, size_t n) {
  const cddp__u16 *s = (const cddp__u16 *)src;
  size_t i;
  for (i = 0; i + 8 <= n; i += 8) {
    cddp__8_halves h;
    cddp__8_floats x;
    memcpy(&h, s + i, sizeof h);
    x = __builtin_ia32_vcvtph2ps256(h);
    memcpy(d + i, &x, sizeof x);
  }
  cddp__widen_f16_base(d + i, s + i, n - i);
}

CDDP__AVX2 static void cddp__narrow_f16_avx2(void *dst, const cddp__f32 *s, size_t n) {
  cddp__u16 *d = (cddp__u16 *)dst;
  size_t i;
  for (i = 0; i + 8 <= n; i += 8) {
    cddp__8_halves h;
    cddp__8_floats x;
    memcpy(&x, s + i, sizeof x);
    h = __builtin_ia32_vcvtps2ph256(x, 0 /* to nearest, ties to even */);
    memcpy(d + i, &h, sizeof h);
  }
  cddp__narrow_f16_base(d + i, s + i, n - i);
}

CDDP__HOT_KERNELS(avx2, CDDP__AVX2)
CDDP__OTHER_KERNELS(avx2, CDDP__AVX2)
CDDP__HOT_KERNELS(avx512, CDDP__AVX512)
static const cddp__kernels cddp__kernels_avx2[] = CDDP__TABLE(avx2, avx2);
static const cddp__kernels cddp__kernels_avx512[] = CDDP__TABLE(avx2, avx512);
#endif

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

/* The loops of the best set, by dtype. */
static const cddp__kernels *cddp__pick_kernels(void) {
  switch (cddp__isa()) {
#if CDDP__DISPATCH
  case CDDP__ISA_AVX512: return cddp__kernels_avx512;
  case CDDP__ISA_AVX2: return cddp__kernels_avx2;
#endif
  default: return cddp__kernels_base;
  }
}

#define CDDP__BLOCK_BYTES 4096 /* handled at a time, so that they stay in the first cache */
#define CDDP__FOLD_BYTES 20480 /* of all of them: the stack of a thread may be 64 KiB */

/* One reduction: what is the same for all its blocks. */
typedef struct cddp__fold {
  const cddp__kernels *kernels; /* of dtype */
  const cddp__kernels *math;    /* of the compute type: F32 for F16 and BF16, else dtype */
  const void *const *srcs;      /* [nsrcs] */
  const int *widths;            /* [nsrcs] ranks that each is the sum of, in the compute type
                                   unless 1; -1: one, in the compute type; NULL: 1 each */
  int nsrcs;
  cddp_op op;          /* SUM for AVG */
  size_t esize, csize; /* bytes of an element of dtype, of the compute type */
  bool sums;           /* with `sum` of math; else with its `pair` */
  bool direct;         /* one call of `sum` of kernels does it all */
  bool narrows;        /* the result is of dtype, not of a wider compute type */
  bool divide;         /* the result by factor; false: times factor */
  double factor;
} cddp__fold;

static void cddp__fold_init(cddp__fold *f, const void *const *srcs, int nsrcs, cddp_dtype dtype,
                            cddp_op op) {
  const cddp__kernels *tables = cddp__pick_kernels();
  bool average = op == CDDP_AVG;
  f->kernels = &tables[dtype];
  f->math = &tables[cddp__compute_type(dtype)];
  f->srcs = srcs;
  f->widths = NULL;
  f->nsrcs = nsrcs;
  f->op = average ? CDDP_SUM : op;
  f->esize = cddp__dtype_size(dtype);
  f->csize = cddp__dtype_size(cddp__compute_type(dtype));
  f->sums = f->op == CDDP_SUM && f->math->sum != NULL;
  f->direct = f->op == CDDP_SUM && f->kernels->sum != NULL && (nsrcs <= 4 || nsrcs == 8);
  f->narrows = f->kernels != f->math;
  /* dividing by a power of two is multiplying by its inverse, to the bit, and faster */
  f->divide = average && (!f->sums || (nsrcs & (nsrcs - 1)) != 0);
  f->factor = !average ? 1.0 : f->divide ? (double)nsrcs : 1.0 / (double)nsrcs;
}

/* d = a op b, in the compute type. The last one of a tree scales the result. */
static void cddp__fold_pair(const cddp__fold *f, void *d, const void *a, const void *b, size_t n,
                            bool last) {
  const void *s[2];
  s[0] = a;
  s[1] = b;
  if (f->sums)
    f->math->sum(d, s, 2, n, last && !f->divide ? f->factor : 1.0);
  else
    f->math->pair(d, a, b, n, f->op);
  if (last && f->divide) f->math->scale(d, n, f->factor, true);
}

/* The reduction of sources first .. first + k - 1 (k = 1, 2, 4 or 8) from element `at`: in the
   source itself or in buf. */
static const void *cddp__fold_leaf(const cddp__fold *f, void *buf, int first, int k, size_t at,
                                   size_t n) {
  const void *s[8];
  int i;
  if (f->widths != NULL && f->widths[first] != 1)
    return (const char *)f->srcs[first] + at * f->csize;
  for (i = 0; i < k; i++) s[i] = (const char *)f->srcs[first + i] + at * f->esize;
  if (k > 1)
    f->math->sum(buf, s, k, n, 1.0);
  else if (f->kernels != f->math)
    f->kernels->widen((cddp__f32 *)buf, s[0], n);
  else
    return s[0];
  return buf;
}

/* Bytes of a block: a whole one for up to 15 sources; with more of them the partial results share
   what there is. */
static size_t cddp__fold_bytes(const cddp__fold *f) {
  size_t levels = 2;
  int n;
  for (n = f->nsrcs; n > 1; n /= 2) levels++;
  if (f->widths != NULL) levels = CDDP__FOLD_DEPTH;
  return cddp__min(CDDP__BLOCK_BYTES, CDDP__FOLD_BYTES / levels / 64 * 64);
}

/* Works as follows, for n elements from `at`, at most a block. Partial results wait on a stack,
   each of 2^j sources, the sizes falling from bottom to top. A leaf is pushed; while the two on top
   have the same size, or there are no more sources, they are merged. That is the canonical tree: it
   splits a range at the largest power of two below its length. The last merge writes dst. */
static void cddp__fold_block(const cddp__fold *f, char *dst, size_t at, size_t n) {
  double space[CDDP__FOLD_BYTES / sizeof(double)];
  char *bufs[CDDP__FOLD_DEPTH];
  const void *parts[CDDP__FOLD_DEPTH];
  int sizes[CDDP__FOLD_DEPTH]; /* sources in each part */
  int leaf = f->sums && f->kernels == f->math && f->widths == NULL ? 8 : 1;
  int depth = 0, i = 0, k;
  for (k = 0; k < CDDP__FOLD_DEPTH; k++)
    bufs[k] = (char *)space + (size_t)k * cddp__fold_bytes(f);
  while (i < f->nsrcs) {
    for (k = leaf; k > f->nsrcs - i; k /= 2) continue;
    parts[depth] = cddp__fold_leaf(f, bufs[depth], i, k, at, n);
    sizes[depth++] = f->widths != NULL ? abs(f->widths[i]) : k;
    i += k;
    while (depth > 1 && (i == f->nsrcs || sizes[depth - 1] == sizes[depth - 2])) {
      bool last = i == f->nsrcs && depth == 2;
      void *out = last && !f->narrows ? (void *)(dst + at * f->csize) : (void *)bufs[depth - 2];
      depth--;
      cddp__fold_pair(f, out, parts[depth - 1], parts[depth], n, last);
      parts[depth - 1] = out;
      sizes[depth - 1] += sizes[depth];
    }
  }
  if (f->narrows) f->kernels->narrow(dst + at * f->esize, (const cddp__f32 *)parts[0], n);
}

/* dst[at .. at + n) of a fold with at least two sources. */
static void cddp__fold_range(const cddp__fold *f, void *dst, size_t at, size_t n) {
  size_t block, end = at + n;
  if (f->direct) {
    const void *const *srcs = f->srcs;
    const void *moved[8];
    int i;
    for (i = 0; at > 0 && i < f->nsrcs; i++) moved[i] = (const char *)srcs[i] + at * f->esize;
    f->kernels->sum((char *)dst + at * f->esize, at > 0 ? moved : srcs, f->nsrcs, n, f->factor);
    return;
  }
  block = cddp__fold_bytes(f) / f->csize;
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
  f.direct = f.direct && !f.narrows;
  f.narrows = false;
  cddp__fold_range(&f, dst, 0, n);
}

/* The rest of the canonical tree, over nodes of widths[..] of its `ranks` ranks; at least two. */
static void cddp__reduce_nodes(void *dst, const void *const *srcs, const int *widths, int nsrcs,
                               int ranks, size_t n, cddp_dtype dtype, cddp_op op) {
  cddp__fold f;
  cddp__fold_init(&f, srcs, ranks, dtype, op);
  f.nsrcs = nsrcs;
  f.widths = widths;
  f.direct = false;
  cddp__fold_range(&f, dst, 0, n);
}

/* The sum of nodes that together are one node, in the compute type and not divided. dst may be
   srcs[0], if that is in the compute type. */
static void cddp__reduce_subtree(void *dst, const void *const *srcs, const int *widths, int nsrcs,
                                 size_t n, cddp_dtype dtype) {
  cddp__fold f;
  cddp__fold_init(&f, srcs, nsrcs, dtype, CDDP_SUM);
  f.widths = widths;
  f.direct = f.narrows = false;
  cddp__fold_range(&f, dst, 0, n);
}

/* As cddp__reduce, with the result in every buffer. Reads and writes each once from memory. */
static void cddp__reduce_all(void *const *bufs, int nbufs, size_t n, cddp_dtype dtype, cddp_op op) {
  cddp__fold f;
  size_t at, m;
  int i;
  if (nbufs == 1) return;
  cddp__fold_init(&f, (const void *const *)bufs, nbufs, dtype, op);
  if (f.direct && nbufs != 3) {
    f.kernels->all(bufs, nbufs, n, f.factor);
    return;
  }
  for (at = 0; at < n; at += m) {
    m = cddp__min(CDDP__BLOCK_BYTES / f.csize, n - at);
    cddp__fold_range(&f, bufs[0], at, m);
    for (i = 1; i < nbufs; i++)
      memcpy((char *)bufs[i] + at * f.esize, (char *)bufs[0] + at * f.esize, m * f.esize);
  }
}

/* p[i] *= factor, with one rounding; factor is rounded to the type of the arithmetic first. F32,
   F64, F16, BF16. */
static void cddp__scale(void *p, size_t n, cddp_dtype dtype, double factor) {
  const cddp__kernels *k = cddp__pick_kernels();
  float buf[CDDP__BLOCK_BYTES / sizeof(float)];
  size_t at, m;
  if (k[dtype].scale != NULL) {
    k[dtype].scale(p, n, factor, false);
    return;
  }
  for (at = 0; at < n; at += m) {
    char *q = (char *)p + at * 2;
    m = cddp__min(CDDP__BLOCK_BYTES / sizeof(float), n - at);
    k[dtype].widen(buf, q, m);
    k[CDDP_F32].scale(buf, m, factor, false);
    k[dtype].narrow(q, buf, m);
  }
}

/* The sum of squares in double, in an order that depends on n alone. F32, F64, F16, BF16. */
static double cddp__sum_squares(const void *p, size_t n, cddp_dtype dtype) {
  const cddp__kernels *k = cddp__pick_kernels();
  float buf[CDDP__BLOCK_BYTES / sizeof(float)];
  double sum = 0;
  size_t at, m, esize = cddp__dtype_size(dtype);
  for (at = 0; at < n; at += m) {
    const void *q = (const char *)p + at * esize;
    m = cddp__min(CDDP__BLOCK_BYTES / sizeof(float), n - at);
    if (k[dtype].widen != NULL) k[dtype].widen(buf, q, m);
    sum += k[cddp__compute_type(dtype)].squares(k[dtype].widen != NULL ? buf : q, m);
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

/* dst[i] = src[i], rounded to the nearest, ties to even. No overlap, unless to == from: then any
   dtype; else F32, F64, F16, BF16. */
static void cddp__convert(void *dst, cddp_dtype to, const void *src, cddp_dtype from, size_t n) {
  const cddp__kernels *k = cddp__pick_kernels();
  float buf[CDDP__BLOCK_BYTES / sizeof(float)];
  size_t at, m, i, to_size = cddp__dtype_size(to), from_size = cddp__dtype_size(from);
  if (to == from && n > 0) memmove(dst, src, n * to_size);
  for (at = 0; to != from && at < n; at += m) { /* by way of f32, in buf if it is neither */
    void *d = (char *)dst + at * to_size;
    const cddp__f64 *s64 = (const cddp__f64 *)src + at;
    cddp__f32 *mid = to == CDDP_F32 ? (cddp__f32 *)d : (cddp__f32 *)buf;
    const cddp__f32 *s = from == CDDP_F32 ? (const cddp__f32 *)src + at : mid;
    m = cddp__min(CDDP__BLOCK_BYTES / sizeof(float), n - at);
    if (from == CDDP_F64)
      for (i = 0; i < m; i++) mid[i] = to == CDDP_F32 ? (float)s64[i] : cddp__round_odd(s64[i]);
    else if (from != CDDP_F32)
      k[from].widen(mid, (const char *)src + at * from_size, m);
    if (to == CDDP_F64)
      for (i = 0; i < m; i++) ((cddp__f64 *)d)[i] = (double)s[i];
    else if (to != CDDP_F32)
      k[to].narrow(d, s, m);
  }
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

/* >>plan ---------------------------------------------------------------------------------------
   Who gets what: slices of an array, shards of a batch, and buckets of parameters as PyTorch's
   compute_bucket_assignment_by_size assigns them. Pure. Owns nothing. Entry points: cddp__slice;
   cddp__deal_shards, cddp__merges and cddp__plan_nodes;
   cddp__plan_buckets, cddp__plan_reverse.
   Works as follows: a node of the canonical tree over S shards is an aligned stretch: 2^j shards
   from a multiple of 2^j on, or what the end S leaves of them. A rank adds up its shards, in order,
   to as few nodes as there can be, as a binary counter does: a new shard is a node; while the two
   last nodes are the halves of a greater one, they are merged.
   Buckets: parameters are taken in order. Each dtype has one open bucket, which closes
   when its bytes reach the limit in force; the first limit is for a dtype's first bucket, the last
   one for all that follow. A bucket's place is the order of closing, or of its smallest index. */

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

/* Which of all shards a rank has: contiguous ones, the first ranks one more than the others. */
static void cddp__deal_shards(int shards, int ranks, int rank, int *first, int *count) {
  int each = shards / ranks, more = shards % ranks;
  *first = each * rank + (rank < more ? rank : more);
  *count = each + (rank < more);
}

/* With how many of the last nodes a new one, `shard` alone, becomes one node. The nodes begin at
   starts[0 .. depth) and reach up to `shard`. The whole tree is never made: its halves are to be
   added where the mean is taken. */
static int cddp__merges(const int *starts, int depth, int shard, int shards) {
  int right = shard, end = shard + 1, merged = 0;
  while (merged < depth) {
    int left = starts[depth - 1 - merged], half = right - left, full = left + 2 * half;
    bool halves = (half & (half - 1)) == 0 && left % (2 * half) == 0 &&
                  (end == full || (end == shards && end < full));
    if (!halves || (left == 0 && end == shards)) break;
    right = left;
    merged++;
  }
  return merged;
}

/* Which of `count` nodes, ascending, become one with a new one, `shard` alone: those from *low to
   before *high. Returns where it belongs among them. */
static int cddp__siblings(const cddp__elastic_node *nodes, int count, int shard, int shards,
                          int *low, int *high) {
  int begin = shard, end = shard + 1, at = 0, size;
  while (at < count && nodes[at].first < shard) at++;
  *low = *high = at;
  for (size = 1; size < shards; size *= 2) { /* [begin, end) is the node of `size` shards there */
    bool right = begin / size % 2 == 1;
    int from = right ? begin - size : end;
    int to = right ? begin : begin + 2 * size < shards ? begin + 2 * size : shards;
    int k = right ? *low - 1 : *high;
    bool whole = right ? from == 0 && end == shards : begin == 0 && to == shards;
    if (from >= shards) continue; /* it is the right end of the tree: has no sibling here */
    if (whole || k < 0 || k == count || nodes[k].first != from || from + nodes[k].width != to)
      break;
    if (right) begin = from, --*low;
    else end = to, ++*high;
  }
  return at;
}

/* The nodes of one rank once it has all its shards. Returns how many; *slots: how many slots it
   needs for them meanwhile. A last shard that merges with none needs no slot. */
static int cddp__plan_nodes(int shards, int ranks, int rank, cddp__shard_node *nodes, int *widths,
                            int *slots) {
  int starts[2 * CDDP__FOLD_DEPTH], depth = 0, first, count, i, merged = 0;
  *slots = 0;
  cddp__deal_shards(shards, ranks, rank, &first, &count);
  for (i = first; i < first + count; i++) {
    merged = cddp__merges(starts, depth, i, shards);
    if (merged == 0) starts[depth] = i;
    depth += 1 - merged;
    if (merged > 0 || i < first + count - 1) *slots = depth > *slots ? depth : *slots;
  }
  for (i = 0; i < depth; i++) {
    nodes[i].rank = rank;
    nodes[i].slot = i == depth - 1 && merged == 0 ? -1 : i;
    widths[i] = (i + 1 < depth ? starts[i + 1] : first + count) - starts[i];
    if (widths[i] == 1 && nodes[i].slot >= 0) widths[i] = -1;
  }
  return depth;
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

/* Assigns params[0 .. count) to buckets of limits[0], limits[1], ... bytes; the last limit repeats
   (limit_count >= 1). order NULL: declaration order, and the buckets sorted by smallest index.
   Otherwise parameters are taken in that order and the buckets stay in order of closing, those open
   at the end by the first appearance of their dtype. memory: [CDDP__PLAN_INTS(count)], which the
   plan keeps. */
#define CDDP__PLAN_INTS(count) (4 * (count) + 2)
static void cddp__plan_buckets(cddp__bucket_plan *out, int *memory, const cddp_param *params,
                               int count, const int *order, const size_t *limits,
                               int limit_count) {
  int *bucket_of = memory + 2 * count + 2, *emitted = bucket_of + count, i, b;
  out->offsets = memory; /* [count + 2] */
  out->params = memory + count + 2;
  out->bucket_count =
      cddp__deal_buckets(params, count, order, limits, limit_count, bucket_of, emitted);
  memset(out->offsets, 0, (size_t)(count + 2) * sizeof *out->offsets);
  /* a counting sort by bucket; in order of creation is by smallest index */
  for (i = 0; i < count; i++) {
    if (order != NULL) bucket_of[i] = emitted[bucket_of[i]];
    out->offsets[bucket_of[i] + 2]++;
  }
  for (b = 0; b < out->bucket_count; b++) out->offsets[b + 2] += out->offsets[b + 1];
  for (i = 0; i < count; i++)
    out->params[out->offsets[bucket_of[i] + 1]++] = order != NULL ? order[i] : i;
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
/* >>shape --------------------------------------------------------------------------------------
   What each collective moves: one table that all backends and the argument checks read.
   Job: say which rank sends and receives how many shares, and where they lie. Owns and touches
   nothing. Entry points: the functions below.
   Works as follows: the caller's buffers consist of shares of `count` elements. A rank's send
   buffer has one share for all, or one for each rank; its receive buffer has one, or one of each
   rank. Where both have one they are the same buffer. Of the ranks all send, or the root alone; all
   receive, or the root alone. In a call with counts each share has a length of its own: it begins
   with an exchange of these, by the call's own row, and goes on as if all were as long as the
   longest, of which each rank moves what there is. */

typedef struct cddp__shape {
  const char *name;
  bool reduces;            /* the shares for a rank are added up to one */
  bool scatters, gathers;  /* a share for each rank in send, of each rank in recv */
  bool from_root, to_root; /* only the root sends, receives */
} cddp__shape;
static const cddp__shape cddp__shapes[] = {{"barrier", 0, 0, 0, 0, 0},
                                           {"all_reduce", 1, 0, 0, 0, 0},
                                           {"reduce", 1, 0, 0, 0, 1},
                                           {"broadcast", 0, 0, 0, 1, 0},
                                           {"all_gather", 0, 0, 1, 0, 0},
                                           {"gather", 0, 0, 1, 0, 1},
                                           {"scatter", 0, 1, 0, 1, 0},
                                           {"reduce_scatter", 1, 1, 0, 0, 0},
                                           {"all_to_all", 0, 1, 1, 0, 0},
                                           {"all_gather_v", 0, 0, 1, 0, 0},
                                           {"all_to_all_v", 0, 1, 1, 0, 0},
                                           {"group_split", 0, 0, 0, 0, 0}, /* from here: names */
                                           {"ddp_create", 0, 0, 0, 0, 0},
                                           {"ddp_wait", 0, 0, 0, 0, 0},
                                           {"ddp_step", 0, 0, 0, 0, 0},
                                           {"ddp bucket", 0, 0, 0, 0, 0},
                                           {"ddp_sync_buffers", 0, 0, 0, 0, 0},
                                           {"ddp_join", 0, 0, 0, 0, 0},
                                           {"ddp_reduce_scatter", 0, 0, 0, 0, 0},
                                           {"ddp_all_gather", 0, 0, 0, 0, 0},
                                           {"", 0, 0, 0, 0, 0},
                                           {"send", 0, 0, 0, 0, 0},
                                           {"recv", 0, 0, 0, 0, 0}};

static cddp__call cddp__make_call(int kind, const void *send, void *recv, size_t count,
                                  cddp_dtype dtype, cddp_op op, int root) {
  cddp__call c;
  memset(&c, 0, sizeof c);
  c.kind = (uint8_t)kind;
  c.dtype = (uint8_t)((unsigned)dtype > 255 ? 255 : dtype);
  c.op = (uint8_t)((unsigned)op > 255 ? 255 : op);
  c.send = send;
  c.recv = recv;
  c.count = count;
  c.root = root;
  c.esize = cddp__dtype_ok(dtype) ? cddp__dtype_size(dtype) : 1;
  return c;
}

static bool cddp__in_one_buffer(const cddp__call *c) {
  return !cddp__shapes[c->kind].scatters && !cddp__shapes[c->kind].gathers;
}
static bool cddp__sends(const cddp__call *c, int rank) {
  return !cddp__shapes[c->kind].from_root || rank == c->root;
}
static bool cddp__receives(const cddp__call *c, int rank) {
  return !cddp__shapes[c->kind].to_root || rank == c->root;
}

/* Whether a call changes the rank's buffer: a broadcast's root keeps what it has. */
static bool cddp__is_written(const cddp__call *c, int rank) {
  return cddp__receives(c, rank) &&
         !(cddp__in_one_buffer(c) && cddp__shapes[c->kind].from_root && rank == c->root);
}

/* Whether other ranks read the rank's buffer, or add to it: a gather's root keeps its own share. */
static bool cddp__is_read(const cddp__call *c, int rank) {
  const cddp__shape *s = &cddp__shapes[c->kind];
  return cddp__sends(c, rank) && (s->reduces || !s->to_root || rank != c->root);
}

/* Whether all ranks get all shares alike. */
static bool cddp__gathers_to_all(const cddp__call *c) {
  const cddp__shape *s = &cddp__shapes[c->kind];
  return s->gathers && !s->scatters && !s->to_root;
}

/* all_to_all in place: what comes in takes the place of what goes out. */
static bool cddp__overwrites(const cddp__call *c) {
  return c->kind == CDDP__KIND_ALL_TO_ALL && c->send == c->recv;
}

/* Shares in the send buffer, and in the receive buffer, of a rank that uses them. */
static size_t cddp__send_shares(const cddp_group *g, const cddp__call *c) {
  return cddp__shapes[c->kind].scatters ? (size_t)g->size : 1;
}
static size_t cddp__recv_shares(const cddp_group *g, const cddp__call *c) {
  return cddp__shapes[c->kind].gathers ? (size_t)g->size : 1;
}

/* Where the share for a rank begins, and where that of a rank goes. */
static const char *cddp__share_for(const cddp__call *c, int to) {
  size_t at = 0;
  if (cddp__shapes[c->kind].scatters)
    at = c->parts != NULL ? c->parts[to].out_at : (size_t)to * c->count;
  return (const char *)c->send + at * c->esize;
}
static char *cddp__share_from(const cddp__call *c, int from) {
  size_t at = 0;
  if (cddp__shapes[c->kind].gathers)
    at = c->parts != NULL ? c->parts[from].in_at : (size_t)from * c->count;
  return (char *)c->recv + at * c->esize;
}

/* Bytes of a share's elements [begin, begin + n), as far as it has them: of that for a rank, and of
   that of a rank. */
static size_t cddp__part_bytes(const cddp__call *c, size_t count, size_t begin, size_t n) {
  return begin < count ? cddp__min(n, count - begin) * c->esize : 0;
}
static size_t cddp__bytes_for(const cddp__call *c, int to, size_t begin, size_t n) {
  return c->parts == NULL ? n * c->esize : cddp__part_bytes(c, c->parts[to].out, begin, n);
}
static size_t cddp__bytes_from(const cddp__call *c, int from, size_t begin, size_t n) {
  return c->parts == NULL ? n * c->esize : cddp__part_bytes(c, c->parts[from].in, begin, n);
}

/* Bytes of a call's parts, behind which is room for the exchange of counts. */
#define CDDP__TOLD 4 /* numbers that a rank tells each other one, see cddp__exchange_counts */
static size_t cddp__parts_bytes(const cddp_group *g) {
  return (size_t)g->size * (sizeof(cddp__part) + 2 * CDDP__TOLD * sizeof(uint64_t));
}

/* The bytes of the send and recv buffers that a collective uses on this rank; of one buffer for
   both the same twice. */
static void cddp__buffer_bytes(const cddp_group *g, const cddp__call *c, size_t *sent,
                               size_t *received) {
  bool one = cddp__in_one_buffer(c);
  size_t share = c->count * c->esize;
  if (c->parts != NULL) {
    const cddp__part *last = &c->parts[g->size - 1];
    *sent = (last->out_at + last->out) * c->esize;
    *received = (last->in_at + last->in) * c->esize;
    return;
  }
  *sent = one || cddp__sends(c, g->rank) ? share * cddp__send_shares(g, c) : 0;
  *received = one || cddp__receives(c, g->rank) ? share * cddp__recv_shares(g, c) : 0;
}

/* Where this rank's buffer lies, if other ranks of its host read or write it. */
static cddp__ref cddp__call_ref(cddp_group *g, const cddp__call *c) {
  cddp__ref none;
  size_t sent, received;
  memset(&none, 0, sizeof none);
  cddp__buffer_bytes(g, c, &sent, &received);
  if (!cddp__in_one_buffer(c) && (sent == 0 || !cddp__is_read(c, g->rank)))
    none.kind = CDDP__REF_UNUSED;
  if (none.kind == CDDP__REF_UNUSED || cddp__overwrites(c)) return none;
  return cddp__ref_of(g->host, c->send, sent);
}

/* >>round -----------------------------------------------------------------------------------------
   Rounds: how the ranks of a group wait for each other in shared memory; waits; how a failure
   reaches all ranks.
   Owns: of the control block the headers, arrivals, release, sleepers, broken and cause; of a
   slot state, inside, failure, site and spot; of the group round, spin, failed. Lock: fail_lock.
   Touches staging buffers only by address. Calls other hosts, and serves receives, through >>hooks.
   Entry points: cddp__round and cddp__round_of; cddp__wait_begin, _tick and _sleep; cddp__enter
   and cddp__exit around what touches peers' memory; cddp__break, cddp__check_group;
   cddp__group_build.
   Works as follows: everything that ranks do together is a sequence of rounds, numbered per
   group. A rank announces a round by writing its header (what it calls, with which count, and up
   to 40 bytes of payload) and then the header's seq; the round is complete when all headers carry
   its number. Every rank compares all headers: ranks that called different things all see it, at
   no extra cost. Headers and staging buffers exist twice and are used in turn: when a rank writes
   those of round s + 2, every rank has announced s + 1 and so is done reading those of s. With a
   core per rank, ranks poll each other's headers, yield, then sleep on the seq of the one that is
   missing. Oversubscribed groups count arrivals instead; the last to come releases all with one
   wake-up, so 64 ranks on 2 cores switch once per round, not 63 times. */

/* Bytes of a staging buffer, less where many ranks share the last cache: cddp__staging_bytes. Peers
   read 256 KiB in 2/3 of the time that pieces of 64 KiB take, which stay in their writer's L2. */
#define CDDP__STAGING ((size_t)256 << 10)
#define CDDP__STAGING_MIN ((size_t)64 << 10)
#define CDDP__STAGING_ALL ((size_t)4 << 20) /* of all ranks of a group */
/* Bytes of all ranks' staging buffers that cross between hosts with a round's headers. */
#define CDDP__RIDE ((size_t)32 << 10)
/* Bytes of a share for which one round takes less time than the two around direct moves. */
#define CDDP__ROUND_MOST ((size_t)3 << 10)
#define CDDP__ROUND_MOST_OVERSUBSCRIBED ((size_t)16 << 10)
#define CDDP__SPIN 2000 /* polls with a core per rank: tens of microseconds */
#define CDDP__SPIN_OVERSUBSCRIBED 50
#define CDDP__YIELDS 100
#define CDDP__NAP_S 0.02 /* longest sleep before peers are looked after */

static const char *const cddp__dtype_names[] = {"f32", "f64", "f16", "bf16",
                                                "i8",  "u8",  "i32", "i64"};
static const char *const cddp__op_names[] = {"sum", "avg",  "prod", "min",
                                             "max", "band", "bor",  "bxor"};

static uint32_t cddp__call_code(const cddp__call *c, uint32_t phase) {
  return (uint32_t)c->kind | (uint32_t)c->dtype << 8 | (uint32_t)c->op << 16 | (phase << 24);
}

static void cddp__describe_call(char *out, size_t n, uint32_t code, uint64_t count, int root) {
  uint32_t kind = code & 255, dtype = code >> 8 & 255, op = code >> 16 & 255;
  bool known = kind < CDDP__KIND_COUNT && dtype <= CDDP_I64 && op <= CDDP_BXOR;
  snprintf(out, n, "%s", known ? cddp__shapes[kind].name : "an unknown call");
  if (kind == CDDP__KIND_DDP_BUCKET) cddp__append(out, n, " %" PRIu64, count);
  if (!known || kind == CDDP__KIND_BARRIER || kind >= CDDP__KIND_GROUP_NEW) return;
  cddp__append(out, n, "(");
  if (kind < CDDP__KIND_ALL_GATHER_V) cddp__append(out, n, "count %" PRIu64 ", ", count);
  cddp__append(out, n, "%s", cddp__dtype_names[dtype]);
  if (cddp__shapes[kind].reduces) cddp__append(out, n, ", %s", cddp__op_names[op]);
  if (root >= 0) cddp__append(out, n, ", root %d", root);
  cddp__append(out, n, code >> 24 == CDDP__PHASE_HOST ? ", host memory)" : ")");
}

/* Layout: control block, headers, slots, staging buffers. Every rank reads all headers, so those
   lie close together: of a thousand ranks they are 32 pages, while a slot takes several. Ranks of
   other hosts share a slot that stays empty. */
static size_t cddp__block_slots(int size) {
  return 4096 + cddp__round_up(2 * (size_t)size * sizeof(cddp__op_header), 4096);
}
static size_t cddp__block_head(int size, int local_size) {
  size_t slots = (size_t)local_size + (local_size < size ? 1 : 0);
  return cddp__round_up(cddp__block_slots(size) + slots * sizeof(cddp__slot), 65536);
}
static size_t cddp__staging_bytes(int size) {
  size_t each = CDDP__STAGING;
  while (each > CDDP__STAGING_MIN && 2 * each * (size_t)size > CDDP__STAGING_ALL) each /= 2;
  return each;
}
static size_t cddp__block_bytes(int size, int local_size) { /* any page size */
  return cddp__block_head(size, local_size) +
         2 * (local_size < size ? CDDP__RIDE : (size_t)size * cddp__staging_bytes(size));
}
static cddp__slot *cddp__slot_of(const cddp_group *g, int rank) {
  return g->slots + g->slot_index[rank];
}
static cddp__op_header *cddp__op_header_of(const cddp_group *g, int rank, uint32_t round) {
  return (cddp__op_header *)(void *)((char *)g->block + 4096) + 2 * (size_t)rank + (round & 1);
}
static void *cddp__staging_of(const cddp_group *g, int rank, uint32_t round) {
  return g->staging + (2 * (size_t)rank + (round & 1)) * g->staging_size;
}
static bool cddp__has_announced(const cddp_group *g, int rank) { /* the current round */
  return cddp__load32(&cddp__op_header_of(g, rank, g->round)->seq) == g->round;
}

/* --- failure: the first rank to notice one writes it into its slot and publishes it on the control
   block; all calls of all ranks then return it --- */

/* Keeps a loss to which later failures are due, in words, unless there is one already. */
static bool cddp__note_cause(cddp__cause *c, cddp_result r, const char *text) {
  if (!cddp__swap32(&c->state, 0, 1)) return false;
  snprintf(c->text, sizeof c->text, "%s", text);
  cddp__store32(&c->state, 2 + (uint32_t)r);
  return true;
}

static bool cddp__has_cause(const cddp__cause *c) { return cddp__load32(&c->state) >= 2; }

static void cddp__wake_all(cddp_group *g) { /* of other hosts' headers one at most is slept on */
  int p;
  cddp__futex_wake(&g->block->release);
  for (p = 0; p < g->size; p++) {
    if (g->members[p] < 0 && (g->hosts == NULL || p != g->hosts->lowest_remote)) continue;
    cddp__futex_wake(&cddp__op_header_of(g, p, 0)->seq);
    cddp__futex_wake(&cddp__op_header_of(g, p, 1)->seq);
    if (g->members[p] >= 0) cddp__futex_wake(&cddp__slot_of(g, p)->events);
  }
}

/* Why the group is broken, once it is. */
static const char *cddp__failure_text(const cddp_group *g) {
  return g->slots[cddp__load32(&g->block->broken) >> 8].failure;
}

/* The failure on the control block, if there is one; it becomes this thread's error. */
static cddp_result cddp__check_failure(cddp_group *g) {
  cddp_result r = (cddp_result)(cddp__load32(&g->block->broken) & 255);
  if (CDDP__LIKELY(r == CDDP_OK)) return r;
  pthread_mutex_lock(&g->fail_lock);
  if (!g->failed && r == CDDP_PEER_LOST && g->host->net != NULL)
    cddp__note_cause(&g->host->net->loss, r, cddp__failure_text(g));
  if (!g->failed && g->hosts != NULL) cddp__hosts_hang_up(g);
  g->failed = true;
  pthread_mutex_unlock(&g->fail_lock);
  return cddp__fail(r, "%s", cddp__failure_text(g));
}

/* Makes this thread's error the group's failure; false: there is one already. */
static bool cddp__publish_failure(cddp_group *g, cddp_result r) {
  bool first = false;
  pthread_mutex_lock(&g->fail_lock); /* this rank's threads share the slot's text */
  if (cddp__load32(&g->block->broken) == 0) {
    memcpy(g->slots[g->local_rank].failure, cddp__error_text, CDDP__ERROR_MAX);
    CDDP__POINT("breaking");
    first = cddp__swap32(&g->block->broken, 0, (uint32_t)r | (uint32_t)g->local_rank << 8);
  }
  pthread_mutex_unlock(&g->fail_lock);
  return first;
}

/* Wakes all ranks for a failure that was published. tell: other hosts do not see it themselves. */
static void cddp__spread_failure(cddp_group *g, bool tell) {
  cddp__wake_all(g);
  cddp__log(&g->host->logger, 0, "%s", cddp__failure_text(g));
  if (tell && g->hosts != NULL)
    cddp__tell_all(g->hosts->net, g->id, g->world, g->size, cddp__load32(&g->block->broken) & 255,
                   cddp__failure_text(g));
}

/* Breaks the group with this thread's error, unless it is broken; returns what is in force. */
static cddp_result cddp__break_here(cddp_group *g, cddp_result r, bool tell) {
  if (cddp__publish_failure(g, r)) cddp__spread_failure(g, tell);
  return cddp__check_failure(g);
}

static cddp_result cddp__break(cddp_group *g, cddp_result r) {
  return cddp__break_here(g, r, true);
}

/* Notes that this rank has several threads that use cddp: what one of them waits for, another one
   of a peer may bring. */
static void cddp__note_several(const cddp__host *h) {
  if (h->slots != NULL) cddp__store32(&h->slots[h->index].spot.several, 1);
}

#define CDDP__THREAD ((uintptr_t)&cddp__this_site) /* a number of this thread's own */

static void cddp__note_thread(cddp__host *h) {
  uintptr_t self = CDDP__THREAD, first = __atomic_load_n(&h->user, __ATOMIC_RELAXED);
  if (CDDP__LIKELY(first == self) || cddp__own_engine != NULL) return;
  if (first != 0 || !__atomic_compare_exchange_n(&h->user, &first, self, false, __ATOMIC_RELAXED,
                                                 __ATOMIC_RELAXED))
    cddp__note_several(h);
}

/* This group's failure for a call that begins, CDDP_OK when it is healthy. */
static cddp_result cddp__check_group(cddp_group *g) {
  cddp__note_thread(g->host);
  if (CDDP__LIKELY(cddp__load32(&g->block->broken) == 0)) return CDDP_OK;
  return cddp__check_failure(g);
}

/* --- what has become of a peer --- */

/* Whether the rank's process has ended or has left the group. */
static bool cddp__rank_gone(const cddp_group *g, int rank) {
  uint32_t state = cddp__load32(&cddp__slot_of(g, rank)->state);
  struct pollfd fd;
  if (g->members[rank] < 0) return cddp__hosts_gone(g, rank, NULL, 0);
  if (state == CDDP__SLOT_LEFT || state == CDDP__SLOT_DEAD) return true;
  if (g->host->threads || rank == g->rank) return false;
  fd.fd = g->host->pidfds[g->members[rank]];
  fd.events = POLLIN;
  fd.revents = 0;
  if (fd.fd >= 0) return poll(&fd, 1, 0) == 1;
  return kill((pid_t)g->host->pids[g->members[rank]], 0) != 0 && errno == ESRCH; /* no pidfds */
}

/* The wait status of a process that has ended. A zombie's is in /proc; a reaped process's can be
   had from its pidfd (-1: none) since Linux 6.15. */
static bool cddp__exit_status(int pidfd, uint32_t pid, int *status) {
  struct cddp__pidfd_info { /* struct pidfd_info, its first version */
    uint64_t mask, cgroup;
    uint32_t ids[11];
    int32_t exit_code;
  } info;
  char path[32], text[1024], *at;
  ssize_t n = 0;
  int fd, field;
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  if ((fd = open(path, O_RDONLY | O_CLOEXEC)) >= 0) {
    n = read(fd, text, sizeof text - 1);
    close(fd);
  }
  text[n > 0 ? n : 0] = 0;
  at = strrchr(text, ')');
  if (at != NULL && at[1] == ' ' && at[2] == 'Z') {
    for (field = 2; field < 52 && at != NULL; field++) at = strchr(at + 1, ' ');
    if (at != NULL) *status = atoi(at);
    if (at != NULL) return true;
  }
  memset(&info, 0, sizeof info);
  info.mask = 8; /* PIDFD_INFO_EXIT */
  if (pidfd < 0 || ioctl(pidfd, _IOWR(0xff, 11, struct cddp__pidfd_info), &info) != 0) return false;
  *status = (int)info.exit_code;
  return (info.mask & 8) != 0;
}

/* How a process ended, from its wait status: "was killed by signal 9 (SIGKILL)". */
static void cddp__describe_status(int status, char *out, size_t n) {
  static const struct {
    int number;
    const char *name;
  } names[] = {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"},
               {SIGILL, "SIGILL"},   {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"},
               {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"},
               {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
               {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"},
               {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"}, {SIGSYS, "SIGSYS"}};
  const char *name = "see signal(7)";
  size_t i;
  for (i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].number == WTERMSIG(status)) name = names[i].name;
  if (WIFSIGNALED(status))
    snprintf(out, n, "was killed by signal %d (%s)%s", WTERMSIG(status), name,
             WCOREDUMP(status) ? ", core dumped" : "");
  else
    snprintf(out, n, "exited with code %d", WEXITSTATUS(status));
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

/* How a rank that is gone went. */
static void cddp__describe_end(const cddp_group *g, int rank, char *out, size_t n) {
  uint32_t state = cddp__load32(&cddp__slot_of(g, rank)->state);
  int status, at = g->members[rank];
  if (at < 0)
    cddp__hosts_gone(g, rank, out, n);
  else if (state == CDDP__SLOT_LEFT)
    snprintf(out, n, "left the group (cddp_destroy)");
  else if (state == CDDP__SLOT_DEAD)
    snprintf(out, n, "ended: its thread function returned");
  else if (cddp__exit_status(g->host->pidfds[at], g->host->pids[at], &status))
    cddp__describe_status(status, out, n);
  else
    snprintf(out, n, "died: its process has ended");
}

/* What this rank is doing: "all_reduce(count 4, f32, sum) at train.c:120, call 17 of the group". */
static void cddp__describe_here(const cddp_group *g, char *out, size_t n) {
  const cddp__op_header *header = cddp__op_header_of(g, g->rank, g->round);
  char site[CDDP__SITE_MAX];
  cddp__describe_call(out, n, header->call, header->count, header->root);
  cddp__describe_site(site, sizeof site);
  cddp__append(out, n, "%s, call %" PRIu64 " of the group", site, g->calls);
}

/* Breaks the group over the loss of a rank. doing: what this rank was in; NULL: waiting for that
   one. A rank that left, or is on another host, may be gone because of a third one: a notice of
   that is believed, and a process of the group that has died is named too. */
static cddp_result cddp__report_lost(cddp_group *g, int rank, const char *doing) {
  const cddp__cause *cause = &g->block->cause;
  char who[160], how[96], loss[540], here[320];
  bool left = cddp__load32(&cddp__slot_of(g, rank)->state) == CDDP__SLOT_LEFT;
  int p;
  if ((left || g->members[rank] < 0) && cddp__has_cause(cause))
    return cddp__break(
        g, cddp__fail((cddp_result)(cddp__load32(&cause->state) - 2), "%s", cause->text));
  cddp__name_rank(g, rank, who, sizeof who);
  cddp__describe_end(g, rank, how, sizeof how);
  snprintf(loss, sizeof loss, "%s %s", who, how);
  for (p = 0; left && p < g->size; p++) {
    if (p == g->rank || cddp__load32(&cddp__slot_of(g, p)->state) == CDDP__SLOT_LEFT) continue;
    if (!cddp__rank_gone(g, p)) continue;
    cddp__name_rank(g, p, who, sizeof who);
    cddp__describe_end(g, p, how, sizeof how);
    cddp__append(loss, sizeof loss, " after %s %s", who, how);
    break;
  }
  cddp__describe_here(g, here, sizeof here);
  cddp__fail(CDDP_PEER_LOST, "%.320s; rank %d was %s %s", loss, g->rank,
             doing == NULL ? "waiting for it in" : "in", doing == NULL ? here : doing);
  return cddp__break(g, CDDP_PEER_LOST);
}

/* Whether this rank's round still lacks rank p. Oversubscribed: p may have died between header and
   arrival. Until the other hosts have come, and while frames of theirs are on their way, all ranks
   of this one are needed. */
static bool cddp__rank_needed(const cddp_group *g, int p) {
  if (!cddp__has_announced(g, p)) return true;
  if (g->oversubscribed && cddp__load32(&g->block->release) != g->round) return true;
  if (g->hosts == NULL) return false;
  return g->hosts->in_count + g->hosts->out_count > 0 ||
         (!g->hosts->local_only && !cddp__has_announced(g, g->hosts->lowest_remote));
}

/* Breaks the group if a rank that this round waits for is gone. */
static cddp_result cddp__look_after_peers(cddp_group *g) {
  int p;
  if (g->hosts != NULL) cddp__hosts_look(g);
  for (p = 0; p < g->size; p++) {
    if (p == g->rank || g->members[p] < 0) continue;
    if (!cddp__rank_needed(g, p) || !cddp__rank_gone(g, p)) continue;
    if (!cddp__rank_needed(g, p)) continue; /* its last word had just come */
    return cddp__report_lost(g, p, NULL);
  }
  return CDDP_OK;
}

/* --- access to peers' memory --- */

/* Whether peers still know where this rank's memory is: it may be private by now. */
static cddp_result cddp__check_shared(cddp_group *g) {
  if (CDDP__LIKELY(cddp__load32(&g->host->unshared) == g->unshared)) return CDDP_OK;
  cddp__fail(CDDP_ABORTED,
             "rank %d took its memory out of sharing, as an operation of another group failed "
             "while one of its ranks was stopped: repeat the operation in a new group, a cddp_ddp "
             "has to be made anew",
             g->rank);
  return cddp__break(g, CDDP_ABORTED);
}

/* What touches peers' memory stands between cddp__enter and cddp__exit. A failing rank sees that a
   peer has entered, or the peer sees the failure: both use full fences. */
static cddp_result cddp__enter(cddp_group *g) {
  cddp_result r;
  cddp__exchange32(&cddp__slot_of(g, g->rank)->inside, 1);
  CDDP__POINT("inside");
  return (r = cddp__check_shared(g)) != CDDP_OK ? r : cddp__check_group(g);
}

/* Passes r on. After a failure it waits for the peers that are still inside: only then are the
   buffers the caller's again. Peers come out soon, since the failure ends their waits and their
   work; if a peer does not (it was stopped), this rank makes its own memory private. */
static cddp_result cddp__exit(cddp_group *g, cddp_result r) {
  cddp__atomic_u32 *inside = &cddp__slot_of(g, g->rank)->inside;
  double deadline;
  int p;
  CDDP__POINT("exit");
  if (CDDP__LIKELY(r == CDDP_OK) && cddp__load32(inside) != 0) r = cddp__check_shared(g);
  cddp__store32(inside, 0);
  if (CDDP__LIKELY(r == CDDP_OK)) return r;
  deadline = cddp__now() + 5;
  for (p = 0; p < g->size; p++) {
    inside = &cddp__slot_of(g, p)->inside;
    while (cddp__load32(inside) != 0 && !cddp__rank_gone(g, p)) {
      if (cddp__now() >= deadline) {
        cddp__arena_unshare(g->host);
        return r;
      }
      cddp__sleep(1e-5);
    }
  }
  return r;
}

/* --- where ranks wait, for those of the same host that wait for them --- */

static cddp__spot *cddp__spot_of(const cddp_group *g, int rank) { /* NULL: it is not known */
  if (g->host->slots == NULL || g->members[rank] < 0) return NULL;
  if (g->members[rank] >= g->host->size) return NULL; /* it has joined */
  return &g->host->slots[g->members[rank]].spot;
}

/* A text of n bytes that is read while it may change. */
static void cddp__copy_text(char *to, const char *from, size_t n) {
  char c = 1;
  size_t i;
  for (i = 0; i < n; i++) {
    if (c != 0) c = i + 1 < n ? __atomic_load_n(&from[i], __ATOMIC_RELAXED) : 0;
    __atomic_store_n(&to[i], c, __ATOMIC_RELAXED);
  }
}

static int cddp__job_rank(const cddp_group *g, int rank) {
  return g->world != NULL ? g->world[rank] : g->members[rank];
}

/* Appends "; rank 1 waits in cddp_ddp_step at train.c:71". */
static void cddp__describe_wait(const cddp_group *g, int rank, char *out, size_t n) {
  const cddp__spot *s = cddp__spot_of(g, rank);
  char where[CDDP__WHERE_MAX];
  bool waits = s != NULL && cddp__load32(&s->wait) != 0;
  bool failed = s != NULL && cddp__load32(&s->failed) != 0;
  if (s == NULL) return;
  cddp__copy_text(where, s->where, sizeof where);
  if (waits || failed)
    cddp__append(out, n, "; rank %d %s in %s%s", cddp__job_rank(g, rank),
                 waits ? "waits" : "has given up", where,
                 cddp__load32(&s->several) ? " (one of its threads)" : "");
  else if (g->host->net == NULL) /* else it may wait for another host */
    cddp__append(out, n, "; rank %d waits in no call of cddp", cddp__job_rank(g, rank));
}

/* Shows that this thread waits in g; false: another thread's wait is shown, or no thread waits for
   this one. An engine's thread counts while its caller waits for it. */
static bool cddp__show_wait(cddp_group *g) {
  const cddp__op_header *header = cddp__op_header_of(g, g->rank, g->round);
  cddp__engine *e = cddp__own_engine;
  cddp__spot *s = cddp__spot_of(g, g->rank);
  char where[256], site[CDDP__SITE_MAX];
  if (s == NULL || (e != NULL && (e != &g->engine || cddp__load32(&e->awaited) == 0))) return false;
  if (!cddp__swap32(&g->host->shown, 0, 1)) return false;
  cddp__describe_call(where, 90, header->call, header->count, header->root);
  if (cddp__this_site.function != NULL) snprintf(where, 90, "%s", cddp__this_site.function);
  cddp__describe_site(site, sizeof site);
  cddp__append(where, sizeof where, "%s", site);
  cddp__copy_text(s->where, where, CDDP__WHERE_MAX);
  cddp__store32(&s->group, (uint32_t)g->id);
  cddp__store32(&s->suspect, 0);
  cddp__store32(&s->failed, 0);
  if (++g->host->waits == 0) g->host->waits = 1;
  cddp__store32(&s->wait, g->host->waits);
  return true;
}

/* --- ranks that wait for each other in different groups --- */

/* Breaks both groups in which this rank and p wait for each other. */
static cddp_result cddp__break_deadlock(cddp_group *g, int p) {
  const cddp__spot *mine = cddp__spot_of(g, g->rank), *theirs = cddp__spot_of(g, p);
  int rank = cddp__job_rank(g, g->rank), other = cddp__job_rank(g, p);
  char here[CDDP__WHERE_MAX], there[CDDP__WHERE_MAX];
  cddp_group *in;
  cddp_result r;
  bool first;
  cddp__copy_text(here, mine->where, sizeof here);
  cddp__copy_text(there, theirs->where, sizeof there);
  r = cddp__fail(CDDP_MISMATCH,
                 "ranks disagree: rank %d waits in %s, rank %d in %s, each for the other; make the "
                 "same calls in the same order on all ranks",
                 rank < other ? rank : other, rank < other ? here : there,
                 rank < other ? other : rank, rank < other ? there : here);
  pthread_mutex_lock(&g->host->lock);
  for (in = g->host->groups; in != NULL && (uint32_t)in->id != cddp__load32(&theirs->group);)
    in = in->next;
  pthread_mutex_unlock(&g->host->lock);
  /* Both before any rank wakes: it may leave the other group, where that would look like a loss. */
  first = in != NULL && cddp__publish_failure(in, r);
  if (cddp__publish_failure(g, r)) cddp__spread_failure(g, true);
  if (first) cddp__spread_failure(in, true);
  return cddp__check_failure(g);
}

/* Once in a while in a long wait. Works as follows: a waiting rank shows in its spot which of its
   waits it is in, and which rank it suspects: one that it waits for, which waits in another group,
   with one thread and nothing for its engine to do here, and in which of its waits that rank is.
   Where the other rank suspects this one in the wait in which it still is, neither can ever go on:
   each had not come to the other's group when that one looked, and has been waiting ever since. */
static cddp_result cddp__look_for_deadlock(cddp_group *g) {
  cddp__spot *mine = cddp__spot_of(g, g->rank);
  uint32_t me = (1 + (uint32_t)g->members[g->rank]) << 16, suspect = 0;
  int p;
  me |= cddp__load32(&mine->wait) & 0xffff;
  for (p = 0; p < g->size && cddp__load32(&mine->several) == 0; p++) {
    const cddp__spot *s = cddp__spot_of(g, p);
    uint32_t wait = p != g->rank && s != NULL ? cddp__load32(&s->wait) : 0; /* read it first */
    if (wait == 0 || cddp__load32(&s->group) == (uint32_t)g->id || cddp__load32(&s->several) != 0 ||
        cddp__load32(&cddp__slot_of(g, p)->works) != 0 || cddp__has_announced(g, p))
      continue;
    if (cddp__load32(&s->suspect) == me) return cddp__break_deadlock(g, p);
    if (suspect == 0) suspect = (1 + (uint32_t)g->members[p]) << 16 | (wait & 0xffff);
  }
  cddp__store32(&mine->suspect, suspect);
  return CDDP_OK;
}

/* --- waiting --- */

/* Appends "; another group failed: ...", for a time-out: the late ranks may have waited there. */
static void cddp__describe_elsewhere(const cddp_group *g, char *out, size_t n) {
  const cddp_group *other;
  pthread_mutex_lock(&g->host->lock);
  for (other = g->host->groups; other != NULL; other = other->next) {
    if (other == g || cddp__load32(&other->block->broken) == 0) continue;
    cddp__append(out, n, "; another group failed: %.400s", cddp__failure_text(other));
    break;
  }
  pthread_mutex_unlock(&g->host->lock);
}

/* The deadline has passed. late: a rank of another host that did not answer; -1: ranks of this host
   have not come to the round, or once all are here, those of other hosts. A late rank may itself be
   waiting for one of another host, right now: then that one is named. */
static cddp_result cddp__break_late(cddp_group *g, int late) {
  uint32_t now = (uint32_t)(uint64_t)(cddp__now() * 1000);
  char who[160], what[320], names[256] = "", where[CDDP__ERROR_MAX] = "";
  bool here = false, mates = late >= 0 && g->hosts->nodes[g->hosts->peers[late].host].size > 1;
  int p, before = -1, n = 0;
  for (p = 0; p < g->size; p++) here = here || (g->members[p] >= 0 && !cddp__has_announced(g, p));
  for (p = 0; p < g->size; p++) {
    const cddp__slot *slot = cddp__slot_of(g, p);
    uint32_t awaits = here ? cddp__load32(&slot->awaits) : 0;
    int held = p;
    if (late >= 0 ? p != late : (here && g->members[p] < 0) || cddp__has_announced(g, p)) continue;
    if (awaits > 0 && awaits <= (uint32_t)g->size && now - cddp__load32(&slot->awaits_at) < 500)
      held = (int)awaits - 1;
    if (held == before) continue;
    before = held;
    if (n++ >= 3) continue;
    cddp__name_rank(g, held, who, sizeof who);
    cddp__append(names, sizeof names, "%s%s", n > 1 ? ", " : "", who);
    cddp__describe_wait(g, held, where, sizeof where);
  }
  if (n > 3) cddp__append(names, sizeof names, " and %d more", n - 3);
  cddp__describe_here(g, what, sizeof what);
  if (where[0] == 0) cddp__describe_elsewhere(g, where, sizeof where);
  cddp__fail(CDDP_TIMEOUT, "timed out after %g s: %s%s did not come to %s%s%s", g->timeout_s,
             names, mates ? ", or another rank of its host," : "", what,
             late >= 0 ? ", or that host cannot be reached" : "", where);
  return cddp__break(g, CDDP_TIMEOUT);
}

/* A wait for other ranks. Owner: the thread that waits. */
typedef struct cddp__wait {
  double deadline, look; /* of cddp__now(): when it fails, when peers are looked after again */
  double nap;            /* s; the next sleep's length at most */
  int yields;            /* left before it sleeps */
  bool due, late;        /* as of the last tick: whether look, deadline have come */
} cddp__wait;

static void cddp__wait_begin(cddp__wait *w, double seconds, int yields) {
  double now = cddp__now();
  w->deadline = now + seconds;
  w->look = now + CDDP__NAP_S;
  w->nap = 1e-3;
  w->yields = yields;
  w->due = w->late = false;
}

/* Whether it is too early to sleep; if so, other threads get the core for a moment. */
static bool cddp__wait_yields(cddp__wait *w) {
  if (w->yields-- <= 0) return false;
  sched_yield();
  return true;
}

/* Reads the clock. */
static void cddp__wait_look(cddp__wait *w) {
  double now = cddp__now();
  w->late = now >= w->deadline;
  w->due = now >= w->look;
  if (w->due) w->look = now + CDDP__NAP_S;
}

/* What every wait does between two sleeps: looks whether the group has failed, serves receives and
   reads the clock. When it is due the caller looks whether the rank it waits for is gone; when it
   is late it fails, in its own words. */
static cddp_result cddp__wait_tick(cddp_group *g, cddp__wait *w) {
  cddp_result r = cddp__check_failure(g);
  if (r != CDDP_OK) return r;
  cddp__serve_idle(g);
  cddp__wait_look(w);
  return w->due ? cddp__hear_claims(g) : CDDP_OK;
}

/* Sleeps until *word is no longer value, as long as the group is healthy. A rank that changes the
   word or breaks the group wakes the sleepers if *sleepers is not 0. */
static void cddp__wait_sleep(cddp_group *g, cddp__wait *w, cddp__atomic_u32 *sleepers,
                             cddp__atomic_u32 *word, uint32_t value) {
  double left = w->deadline - cddp__now();
  cddp__add32(sleepers, 1);
  if (cddp__load32(&g->block->broken) == 0 && cddp__load32(word) == value)
    cddp__futex_wait(word, value, w->nap < left ? w->nap : left);
  cddp__add32(sleepers, (uint32_t)-1);
  w->nap = w->nap * 2 < CDDP__NAP_S ? w->nap * 2 : CDDP__NAP_S;
}

/* Waits until *word == want, the slow way. A wait that has become long is shown in the spot. */
static cddp_result cddp__wait_slow(cddp_group *g, cddp__atomic_u32 *word, uint32_t want) {
  cddp__spot *spot = cddp__spot_of(g, g->rank);
  bool shown = false;
  cddp_result r = CDDP_OK;
  cddp__wait w;
  uint32_t v;
  cddp__wait_begin(&w, g->timeout_s, g->yields);
  while (r == CDDP_OK && (v = cddp__load32(word)) != want) {
    if (cddp__wait_yields(&w)) continue;
    r = cddp__wait_tick(g, &w);
    if (r == CDDP_OK && w.due && cddp__load32(word) != want) {
      r = cddp__look_after_peers(g);
      if (r == CDDP_OK && shown) r = cddp__look_for_deadlock(g);
      if (r == CDDP_OK && !shown) shown = cddp__show_wait(g);
    }
    if (r == CDDP_OK && w.late && cddp__load32(word) != want) r = cddp__break_late(g, -1);
    if (r == CDDP_OK) cddp__wait_sleep(g, &w, &g->block->sleepers, word, v);
  }
  if (!shown) return r;
  cddp__store32(&spot->failed, r != CDDP_OK);
  cddp__store32(&spot->wait, 0);
  cddp__store32(&g->host->shown, 0);
  return r;
}

static cddp_result cddp__wait_word(cddp_group *g, cddp__atomic_u32 *word, uint32_t want) {
  int i;
  for (i = 0; i < g->spin; i++) {
    if (CDDP__LIKELY(cddp__load32(word) == want)) return CDDP_OK;
    cddp__pause();
  }
  return cddp__wait_slow(g, word, want);
}

/* --- disagreement --- */

static bool cddp__is_join(const cddp__op_header *a) {
  return (a->call & 255) == CDDP__KIND_DDP_JOIN;
}

/* Whether b is the same call as a, or has joined it. */
static bool cddp__agrees(const cddp__op_header *a, const cddp__op_header *b) {
  uint32_t kind = a->call & 255;
  bool joinable = a->call >> 24 == CDDP__PHASE_CALL &&
                  (kind == CDDP__KIND_DDP_WAIT || kind == CDDP__KIND_DDP_STEP ||
                   kind == CDDP__KIND_DDP_BUFFERS);
  if (a->fp_mode != b->fp_mode) return false;
  if (joinable && cddp__is_join(b)) return true;
  return a->call == b->call && a->count == b->count && a->root == b->root;
}

/* Appends "rank 1 called all_reduce(count 4, f32, sum) at train.c:120" to this thread's error; and
   what differs where that reads as a's call does: settings, or the floating-point mode. */
static void cddp__describe_rank(const cddp_group *g, int rank, const cddp__op_header *a) {
  const cddp__op_header *b = cddp__op_header_of(g, rank, g->round);
  cddp__slot *slot = cddp__slot_of(g, rank);
  uint32_t kind = b->call & 255;
  bool counted = kind > CDDP__KIND_BARRIER && kind < CDDP__KIND_GROUP_NEW;
  char *out = cddp__error_text, call[128], site[CDDP__SITE_MAX] = "", mode[2][96];
  cddp__describe_call(call, sizeof call, b->call, b->count, b->root);
  if (cddp__load32(&slot->site_round) == g->round) memcpy(site, slot->site, sizeof site - 1);
  cddp__append(out, CDDP__ERROR_MAX, "rank %d called %s%s", rank, call, site);
  if (a == b || ((a->call ^ b->call) & 0xffffff) != 0 || a->root != b->root ||
      (counted && a->count != b->count))
    return;
  cddp__describe_fp_mode(a->fp_mode, mode[0], sizeof mode[0]);
  cddp__describe_fp_mode(b->fp_mode, mode[1], sizeof mode[1]);
  if (a->fp_mode == b->fp_mode)
    cddp__append(out, CDDP__ERROR_MAX, " with other settings");
  else
    cddp__append(out, CDDP__ERROR_MAX,
                 " in another floating-point mode (%.80s, not %.80s; -ffast-math sets FTZ)",
                 mode[1], mode[0]);
}

/* Not all headers are alike: fine if some ranks have joined the others' call. Every rank finds the
   same. All are compared with the first that has not joined. */
static cddp_result cddp__compare_headers(cddp_group *g) {
  cddp__slot *mine = cddp__slot_of(g, g->rank);
  double deadline = cddp__now() + 0.1; /* ranks may have died just now */
  const cddp__op_header *a;
  int p, first = 0, different = 0;
  while (first + 1 < g->size && cddp__is_join(cddp__op_header_of(g, first, g->round))) first++;
  a = cddp__op_header_of(g, first, g->round);
  for (p = 0; p < g->size; p++) different += !cddp__agrees(a, cddp__op_header_of(g, p, g->round));
  if (different == 0) return CDDP_OK;
  cddp__describe_site(mine->site, sizeof mine->site); /* for the other ranks' messages */
  cddp__store32(&mine->site_round, g->round);
  for (p = 0; p < g->size; p++)
    while (g->members[p] >= 0 && cddp__load32(&cddp__slot_of(g, p)->site_round) != g->round &&
           cddp__load32(&g->block->broken) == 0 && cddp__now() < deadline)
      cddp__sleep(1e-5);
  cddp__fail(CDDP_MISMATCH, "ranks disagree in call %" PRIu64 " of the group: ", g->calls);
  cddp__describe_rank(g, first, a);
  for (p = 0, different = 0; p < g->size; p++) {
    if (cddp__agrees(a, cddp__op_header_of(g, p, g->round)) || ++different > 2) continue;
    cddp__append(cddp__error_text, CDDP__ERROR_MAX, ", ");
    cddp__describe_rank(g, p, a);
  }
  if (different > 2)
    cddp__append(cddp__error_text, CDDP__ERROR_MAX, ", and %d more disagree", different - 2);
  return cddp__break_here(g, CDDP_MISMATCH, false); /* the other hosts have the same headers */
}

/* --- rounds --- */

/* Counts this rank's arrival at a round of an oversubscribed group, and waits for the release; the
   last on this host releases all. */
static cddp_result cddp__arrive(cddp_group *g) {
  uint32_t n = cddp__add32(&g->block->arrivals, 1);
  g->arrive_target += (uint32_t)g->local_size;
  if (n != g->arrive_target) { /* last comes the leader, who may be waiting for the other hosts */
    if (g->hosts != NULL && n + 1 == g->arrive_target && cddp__load32(&g->block->sleepers) != 0)
      cddp__futex_wake(&g->block->arrivals);
    return cddp__wait_word(g, &g->block->release, g->round);
  }
  cddp__exchange32(&g->block->release, g->round);
  if (cddp__load32(&g->block->sleepers) != 0) cddp__futex_wake(&g->block->release);
  return CDDP_OK;
}

/* Waits until the others of this rank's host, or all, have announced the round, and compares their
   headers with this rank's. Of other hosts' headers the leader has seen to. */
static cddp_result cddp__await_headers(cddp_group *g, bool all) {
  const cddp__op_header *mine = cddp__op_header_of(g, g->rank, g->round);
  uint64_t count = mine->count; /* read once: peers read this cache line meanwhile */
  uint32_t call = mine->call, fp_mode = mine->fp_mode;
  int32_t root = mine->root;
  bool same = true;
  cddp_result r;
  int p;
  for (p = 0; p < g->size; p++) {
    cddp__op_header *header = cddp__op_header_of(g, p, g->round);
    if (p == g->rank || (!all && g->members[p] < 0)) continue;
    if (!g->oversubscribed && (r = cddp__wait_word(g, &header->seq, g->round)) != CDDP_OK) return r;
    same = same && header->call == call && header->count == count &&
           header->root == root && header->fp_mode == fp_mode;
  }
  CDDP__POINT("met");
  return CDDP__LIKELY(same) || !all ? CDDP_OK : cddp__compare_headers(g);
}

/* The group's next round: announces it, and waits until all ranks of the scope have done so. Ranks
   that call different things learn it here. payload: bytes for the others, at most CDDP__INLINE;
   NULL: none, or the caller has filled this rank's next header or staging buffer. Afterwards the
   headers and staging buffers of the scope's ranks can be read, until this rank announces the next
   round but one. */
static cddp_result cddp__round_of(cddp_group *g, enum cddp__scope scope, const cddp__call *c,
                                  enum cddp__phase phase, const void *payload, size_t bytes) {
  cddp__op_header *mine = cddp__op_header_of(g, g->rank, g->round + 1);
  bool all = scope == CDDP__SCOPE_ALL || g->hosts == NULL;
  bool computes = c->kind >= CDDP__KIND_DDP_CREATE ||
                  (cddp__shapes[c->kind].reduces && c->dtype <= CDDP_BF16);
  cddp_result r;
  CDDP__POINT("begin");
  if (CDDP__UNLIKELY((g->round & (g->round - 1) & 255) == 0) && /* 9 of 256, the first ones most */
      (r = cddp__hear_claims(g)) != CDDP_OK)
    return r;
  g->round++;
  if (payload != NULL) memcpy(mine->u.bytes, payload, bytes);
  mine->call = cddp__call_code(c, phase);
  mine->count = c->count;
  mine->root = (int32_t)c->root;
  mine->fp_mode = all && computes ? cddp__fp_mode() : 0;
  CDDP__POINT("announce");
  cddp__exchange32(&mine->seq, g->round); /* a full fence: sleepers is read after it */
  CDDP__POINT("announced");
  if (CDDP__UNLIKELY(g->hosts != NULL)) {
    g->hosts->local_only = !all;
    if (all && (r = cddp__hosts_meet(g)) != CDDP_OK) return r;
  }
  if (g->oversubscribed) {
    if ((r = cddp__arrive(g)) != CDDP_OK) return r;
  } else if (cddp__load32(&g->block->sleepers) != 0) {
    cddp__futex_wake(&mine->seq);
  }
  return cddp__await_headers(g, all);
}

/* A round of what is no collective of a user's: of a kind, with a count to be compared. */
static cddp_result cddp__round(cddp_group *g, enum cddp__scope scope, int kind,
                               enum cddp__phase phase, uint64_t count, const void *payload,
                               size_t bytes) {
  cddp__call c = cddp__make_call(kind, NULL, NULL, (size_t)count, CDDP_F32, CDDP_SUM, -1);
  return cddp__round_of(g, scope, &c, phase, payload, bytes);
}

static const cddp__carrier cddp__shm_carrier = {false, cddp__run_large, NULL, NULL, NULL};

/* Makes a group on a control block that all members have mapped; takes one reference to the host.
 */
static cddp_result cddp__group_build(cddp_group **out, cddp__host *h, int rank, int size,
                                     const int *members, char *block, double timeout_s) {
  size_t arrays = 2 * (size_t)size * (sizeof(int) + sizeof(void *));
  cddp_group *g = (cddp_group *)cddp__calloc(&h->allocator, 1, sizeof *g + arrays);
  cddp__slot *slot;
  int i, place;
  *out = NULL;
  if (g == NULL) return CDDP_OUT_OF_MEMORY;
  g->buffers = (void **)(void *)(g + 1);
  g->slices = g->buffers + size;
  g->members = (int *)(void *)(g->slices + size);
  g->slot_index = g->members + size;
  for (i = 0; i < size; i++)
    g->members[i] = members != NULL   ? members[i]
                    : h->net == NULL ? i
                    : h->net->homes[i].host == h->net->host ? h->net->homes[i].index : -1;
  g->host = h;
  g->rank = rank;
  g->size = size;
  g->block = (cddp__control_block *)(void *)block;
  g->timeout_s = timeout_s;
  for (i = 0; i < size; i++) g->local_size += g->members[i] >= 0;
  for (i = 0, place = 0; i < size; i++)
    g->slot_index[i] = g->members[i] >= 0 ? place++ : g->local_size;
  g->local_rank = g->slot_index[rank];
  g->slots = (cddp__slot *)(void *)(block + cddp__block_slots(size));
  g->staging = block + cddp__block_head(size, g->local_size);
  g->staging_size = g->local_size == size ? cddp__staging_bytes(size) : 0;
  g->carrier = &cddp__shm_carrier;
  g->oversubscribed = g->local_size > h->cores;
  g->round_most = g->oversubscribed ? CDDP__ROUND_MOST_OVERSUBSCRIBED : CDDP__ROUND_MOST;
  g->yields = CDDP__YIELDS;
  g->spin = h->size > h->cores ? CDDP__SPIN_OVERSUBSCRIBED : CDDP__SPIN;
  pthread_mutex_init(&g->fail_lock, NULL);
  pthread_mutex_init(&g->p2p_lock, NULL);
  pthread_mutex_init(&g->engine.lock, NULL);
  cddp__cond_init(&g->engine.changed);
  cddp__cond_init(&g->engine.work);
  slot = cddp__slot_of(g, rank);
  g->unshared = cddp__load32(&h->unshared);
  g->sends[0] = slot->sends;
  slot->pid = (uint32_t)getpid();
  cddp__store32(&slot->state, CDDP__SLOT_TAKEN);
  if (h->slots == NULL && size > 1) h->slots = g->slots; /* the job's first group */
  pthread_mutex_lock(&h->lock);
  h->refs++;
  g->next = h->groups;
  h->groups = g;
  pthread_mutex_unlock(&h->lock);
  *out = g;
  return CDDP_OK;
}

CDDP__COLD

/* >>links --------------------------------------------------------------------------------------
   Connections between ranks of different hosts.
   Job: make, prove and end connections; move frames on them without blocking; failure notices.
   Owns: cddp__net (the listening socket, connections that no group has claimed yet), cddp__link.
   May touch: groups that span hosts, to break them or note a cause when a notice comes.
   Entry points: cddp__net_look, cddp__net_claim; cddp__link_call, _shake, _io, _data,
   _receive, _flush, _leave and _answered; cddp__tell_all.
   Works as follows: each rank listens on one port of the address by which its host reaches the
   others. Two ranks have at most two connections in a group, each made when it is first used:
     DATA      of collectives. The lower rank of the job calls. The thread that runs the group's
               collectives reads and writes it without a lock, from and into the caller's memory.
     MESSAGES  of send and recv. The first rank that sends calls. Under p2p_lock any thread reads
               and writes it. It is apart from DATA because messages may lie unread for long.
   A third kind lives for a moment: a NOTICE says why a group has failed. It needs no answer, so it
   reaches ranks that are not listening now, through the system's queue of callers.
   The caller says hello: magic, version, purpose, both ranks, group, and the token that only the
   job's ranks know, as it came to them through the store. With a secret both ends then prove that
   they know it (CHALLENGE in >>bytes); a notice carries one proof over hello and text. Everything
   else is frames: a head of 32 bytes and `size` bytes. DATA frames are numbered, and both sides
   know what must come next. A rank that leaves a group says BYE.
   Nothing blocks, and there is no thread: each rank that waits, for whatever group, also accepts
   connections and keeps them until their group claims them. A caller that says nothing, or
   nonsense, is dropped after CDDP__STRANGER_S or at once, and costs a descriptor until then.
   When a connection has ended, its error says how; the rank is lost then, see >>hosts. */

#define CDDP__LINK_MAGIC 0x4b4c4443u  /* "CDLK", opens a connection */
#define CDDP__FRAME_MAGIC 0x52464443u /* "CDFR", begins a frame */
#define CDDP__PENDING_LINKS 256       /* at a time; beyond these the oldest is dropped */
#ifndef CDDP__STRANGER_S
#define CDDP__STRANGER_S 5.0 /* for the hello and the proof */
#endif
#ifndef CDDP__UNANSWERED_S
#define CDDP__UNANSWERED_S 20.0 /* after which a host that answers nothing is given up */
#endif
#define CDDP__ACCEPT_AGAIN_S 0.25 /* after there were no descriptors left */
#define CDDP__NOTICE_PROOF_AT (4 + CDDP__ERROR_MAX) /* in a notice: result, text, proof */
#define CDDP__NOTICE_BYTES (CDDP__NOTICE_PROOF_AT + CDDP__PROOF_SIZE)
#define CDDP__NOTICE_EARLY 0x80000000u /* in its result: a rank is lost, the group has not failed */
#define CDDP__TURN ((size_t)128 << 10) /* bytes of a frame that go or come at a time */
#define CDDP__LEFT (-1)     /* in link.error: the other side said BYE */
enum { CDDP__FRAME_DATA = 1, CDDP__FRAME_MESSAGE, CDDP__FRAME_NOTICE, CDDP__FRAME_BYE };
enum { CDDP__LINK_DATA, CDDP__LINK_MESSAGES, CDDP__LINK_NOTICE };
enum { CDDP__LINK_GREETING, CDDP__LINK_PROVING, CDDP__LINK_UP, CDDP__LINK_DEAD };

/* The first message of a connection. This and what follows is sent as it lies in memory: all hosts
   have the same byte order, or the ranks would not have met. */
typedef struct cddp__hello {
  uint32_t magic, version, purpose;
  uint32_t from, to; /* ranks of the job */
  uint32_t secret;   /* 1: there is one */
  uint64_t group;
  unsigned char token[16];
} cddp__hello;

typedef struct cddp__frame_head {
  uint32_t magic, type;
  uint32_t number; /* of a DATA frame; of a message its tag */
  uint32_t dtype;  /* this and count: of a message */
  uint64_t count, size; /* elements, and the bytes that follow */
} cddp__frame_head;

/* A TCP connection between this rank and one of another host, for one purpose in one group. Owner:
   the thread that runs the group's collectives (DATA), p2p_lock (MESSAGES), net.lock (before its
   group has claimed it), the thread that sends it (NOTICE). */
struct cddp__link {
  cddp__link *next;
  int fd;    /* -1: closed */
  int state; /* CDDP__LINK_GREETING (the caller: connecting) ... */
  int purpose;
  int peer; /* rank of the job; -1 not known yet */
  int rank; /* the peer's in the group */
  uint64_t group;
  bool mine;       /* this side has connected */
  int error;       /* errno that ended it; 0: the other side closed it; CDDP__LEFT */
  double deadline; /* for the connection, or for its hello and proof */
  cddp__hello hello;
  cddp__challenge challenge;      /* with a secret, after the hello */
  uint32_t sent_count, got_count; /* whole DATA frames */
  size_t sent, got; /* bytes of the handshake's message or the current frame, head included */
  cddp__frame_head out_head, in_head;
  cddp__buffer out;  /* frames that wait to be sent; DATA: empty */
  cddp__message *in; /* the frame that is coming in; DATA: NULL */
};

/* --- a connection's life --- */

/* Takes over a socket. Its hello (the caller: its connection) is due in so many seconds. */
static cddp__link *cddp__link_new(const cddp__net *n, int fd, int purpose, double seconds) {
  cddp__link *l = (cddp__link *)cddp__calloc(&n->allocator, 1, sizeof *l);
  int idle = CDDP__UNANSWERED_S > 4 ? (int)(CDDP__UNANSWERED_S / 4) : 1, count = 3;
  if (l == NULL) {
    close(fd);
    return NULL;
  }
  cddp__own_socket(fd);
  l->out.allocator = &n->allocator;
  l->fd = fd;
  l->purpose = purpose;
  l->peer = l->rank = -1;
  l->deadline = cddp__now() + seconds;
  /* Without these it works too, but notices less. TCP_USER_TIMEOUT is not among them: it would also
     end a connection whose other side answers but is late to read. */
  (void)cddp__set_nodelay(fd);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  return l;
}

/* The link is of no more use. Its descriptor stays until cddp__link_free: others may look at it. */
static void cddp__link_end(cddp__link *l, int error) {
  if (l->state == CDDP__LINK_DEAD) return;
  l->state = CDDP__LINK_DEAD;
  l->error = error;
  shutdown(l->fd, SHUT_WR);
}

static void cddp__link_free(const cddp__net *n, cddp__link *l) {
  if (l == NULL) return;
  cddp__close_fd(&l->fd);
  cddp__free(&n->allocator, l->out.data);
  cddp__free(&n->allocator, l->in);
  cddp__free(&n->allocator, l);
}

static void cddp__links_free(const cddp__net *n, cddp__link *l) {
  while (l != NULL) {
    cddp__link *next = l->next;
    cddp__link_free(n, l);
    l = next;
  }
}

/* Ends a link if the other host has not acknowledged what was sent, as when it is unplugged. Where
   nothing is on its way the system's own probes tell. */
static void cddp__link_answered(cddp__link *l) {
  struct tcp_info t;
  socklen_t size = sizeof t;
  if (l->state == CDDP__LINK_GREETING) { /* connecting: TCP_INFO's times mean nothing yet */
    if (cddp__now() > l->deadline) cddp__link_end(l, ETIMEDOUT);
  } else if (getsockopt(l->fd, IPPROTO_TCP, TCP_INFO, &t, &size) == 0 &&
             t.tcpi_last_ack_recv >= CDDP__UNANSWERED_S * 1000 &&
             (t.tcpi_unacked > 0 || t.tcpi_probes >= 3)) {
    cddp__link_end(l, ETIMEDOUT);
  }
}

/* Sends or receives what is left of a frame's head (NULL: there is none) and size bytes at data:
   1 when *done says that all has passed, 0 when it would block, -1 when the link has ended. */
static int cddp__link_io(cddp__link *l, const cddp__frame_head *head, const void *data, size_t size,
                         size_t *done, bool out) {
  size_t before = head != NULL ? sizeof *head : 0;
  while (*done < before + size) {
    size_t skip = *done < before ? 0 : *done - before;
    const char *from[2];
    struct iovec io[2];
    struct msghdr msg;
    ssize_t n;
    int i = 0;
    memset(&msg, 0, sizeof msg);
    if (*done < before) {
      from[i] = (const char *)head + *done;
      io[i++].iov_len = before - *done;
    }
    if (skip < size) {
      from[i] = (const char *)data + skip;
      io[i++].iov_len = size - skip;
    }
    msg.msg_iovlen = (size_t)i;
    while (i-- > 0) memcpy(&io[i].iov_base, &from[i], sizeof *from); /* sendmsg only reads it */
    msg.msg_iov = io;
    n = out ? sendmsg(l->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT)
            : recvmsg(l->fd, &msg, MSG_DONTWAIT);
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

/* How a link ended, for messages: behind the name of the rank. */
static void cddp__describe_link_end(int error, char *out, size_t n) {
  if (error == CDDP__LEFT)
    snprintf(out, n, "left the group (cddp_destroy)");
  else if (error == 0 || error == ECONNRESET || error == EPIPE)
    snprintf(out, n, "closed its connection: it died, or its group failed");
  else if (error == ECONNREFUSED)
    snprintf(out, n, "does not listen any more: it has ended");
  else if (error == EPROTO)
    snprintf(out, n, "sent what is no message of cddp, or not the one that was due");
  else
    snprintf(out, n, "lost its connection: %s", strerror(error));
}

/* --- the handshake --- */

static void cddp__link_write_hello(const cddp__net *n, cddp__link *l) {
  cddp__hello *h = &l->hello;
  h->magic = CDDP__LINK_MAGIC;
  h->version = CDDP_VERSION;
  h->purpose = (uint32_t)l->purpose;
  h->from = (uint32_t)n->rank;
  h->to = (uint32_t)l->peer;
  h->secret = n->secret != NULL;
  h->group = l->group;
  memcpy(h->token, n->token, sizeof h->token);
}

static bool cddp__link_read_hello(const cddp__net *n, cddp__link *l) {
  const cddp__hello *h = &l->hello;
  if (h->magic != CDDP__LINK_MAGIC || h->version != CDDP_VERSION ||
      h->purpose > CDDP__LINK_NOTICE || h->from >= (uint32_t)n->size ||
      h->to != (uint32_t)n->rank || h->secret != (uint32_t)(n->secret != NULL) ||
      !cddp__same_bytes(h->token, n->token, sizeof h->token))
    return false;
  l->purpose = (int)h->purpose;
  l->peer = (int)h->from;
  l->group = h->group;
  return true;
}

/* Goes on with the handshake as far as it can without waiting; whether the link is up. What the
   system says to the caller's hello tells whether the connection is made. */
static bool cddp__link_shake(const cddp__net *n, cddp__link *l) {
  cddp__challenge *c = &l->challenge;
  unsigned char in[sizeof c->in];
  size_t *done = l->mine ? &l->sent : &l->got, due;
  while (l->state < CDDP__LINK_UP) {
    if (l->state == CDDP__LINK_GREETING) {
      if (cddp__link_io(l, NULL, &l->hello, sizeof l->hello, done, l->mine) <= 0) break;
      *done = 0;
      l->state = n->secret != NULL ? CDDP__LINK_PROVING : CDDP__LINK_UP;
      if (l->mine && cddp__connected_to_itself(l->fd)) cddp__link_end(l, ECONNREFUSED);
      if (!l->mine && !cddp__link_read_hello(n, l)) cddp__link_end(l, EPROTO);
      if (l->state != CDDP__LINK_PROVING) continue;
      if (l->purpose == CDDP__LINK_NOTICE)
        l->state = CDDP__LINK_UP;
      else if (cddp__challenge_begin(c, n->secret, "link", l->mine, &l->hello, sizeof l->hello) !=
               CDDP_OK)
        cddp__link_end(l, EIO);
    } else if (c->out_size > 0) {
      if (cddp__link_io(l, NULL, c->out, c->out_size, &l->sent, true) <= 0) break;
      c->out_size = l->sent = 0;
    } else if (c->state == CDDP__CHALLENGE_PROVEN) {
      l->state = CDDP__LINK_UP;
    } else if (c->state != CDDP__CHALLENGE_ON) {
      cddp__link_end(l, EPROTO);
    } else { /* reads nothing that comes behind the proof */
      due = sizeof in - c->in_size;
      memset(in, 0, sizeof in);
      (void)cddp__link_io(l, NULL, in, due, &l->got, false);
      if (l->got == 0) break;
      cddp__challenge_feed(c, in, l->got);
      l->got = 0;
    }
  }
  return l->state == CDDP__LINK_UP;
}

/* Begins to call a rank of the job. NULL: no memory, or the system refuses; the text says what. A
   link that could not be made later ends with the error. */
static cddp__link *cddp__link_call(const cddp__net *n, int peer, int purpose, uint64_t group) {
  const cddp__home *home = &n->homes[peer];
  cddp__address a = cddp__internet_address(&n->hosts[home->host].address),
                here = cddp__internet_address(&n->hosts[n->host].address);
  cddp__link *l;
  int fd = socket(a.sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    cddp__fail_errno("socket");
    return NULL;
  }
  if ((l = cddp__link_new(n, fd, purpose, CDDP__UNANSWERED_S)) == NULL) return NULL;
  l->group = group;
  l->mine = true;
  l->peer = peer;
  cddp__address_set_port(&a, home->port);
  cddp__address_set_port(&here, 0);
  if (a.sa.ss_family == AF_INET6) {
    struct sockaddr_in6 *there = (struct sockaddr_in6 *)(void *)&a.sa;
    if (IN6_IS_ADDR_LINKLOCAL(&there->sin6_addr)) /* its own interface's number is not ours */
      there->sin6_scope_id = ((struct sockaddr_in6 *)(void *)&here.sa)->sin6_scope_id;
  }
  if (here.sa.ss_family == a.sa.ss_family) (void)!bind(fd, &here.any, here.size);
  cddp__link_write_hello(n, l);
  if (connect(fd, &a.any, a.size) != 0 && errno != EINPROGRESS && errno != EINTR)
    cddp__link_end(l, errno);
  return l;
}

/* --- frames --- */

static cddp__frame_head cddp__link_head(int type, uint32_t number, int dtype, uint64_t count,
                                        uint64_t size) {
  cddp__frame_head h = {CDDP__FRAME_MAGIC, (uint32_t)type, number, (uint32_t)dtype, count, size};
  return h;
}

static bool cddp__frame_is(const cddp__frame_head *h, uint32_t type) {
  return h->magic == CDDP__FRAME_MAGIC && h->type == type;
}

/* Sends or receives what is left of the next DATA frame, of size bytes; only so many at a time that
   they stay in the cache until the other side, or this one, has taken them. One that has come with
   at least `least` bytes, and another size, says that ranks disagree: what there is of it will do.
   Returns as cddp__link_io. */
static int cddp__link_data(cddp__link *l, const void *data, size_t least, size_t size, bool out) {
  cddp__frame_head *head = out ? &l->out_head : &l->in_head;
  uint32_t *count = out ? &l->sent_count : &l->got_count;
  size_t *at = out ? &l->sent : &l->got, most = cddp__min(size, *at + CDDP__TURN);
  int done;
  if (out && *at == 0) *head = cddp__link_head(CDDP__FRAME_DATA, *count, CDDP_U8, size, size);
  done = cddp__link_io(l, head, data, most, at, out);
  if (!out && *at >= sizeof *head) {
    if (!cddp__frame_is(head, CDDP__FRAME_DATA) || head->size < least || head->number != *count) {
      cddp__link_end(l, 0);
      l->error = cddp__frame_is(head, CDDP__FRAME_BYE) ? CDDP__LEFT : EPROTO;
      return -1;
    }
    if (head->size != size && *at >= sizeof *head + least) done = 1, most = size;
  }
  if (done > 0 && most < size) return 0;
  if (done <= 0) return done;
  *at = 0;
  ++*count;
  return 1;
}

/* The next whole message or notice, of at most `most` bytes; NULL: it has not come yet, or the link
   has ended. A head says its size twice, so that it asks for no more memory than it means. */
static cddp__message *cddp__link_receive(const cddp__net *n, cddp__link *l, size_t most) {
  const cddp__frame_head *head = &l->in_head;
  bool notice = l->purpose == CDDP__LINK_NOTICE;
  cddp__message *m;
  if (l->in == NULL) {
    bool good;
    if (cddp__link_io(l, head, NULL, 0, &l->got, false) <= 0) return NULL;
    good = cddp__frame_is(head, notice ? CDDP__FRAME_NOTICE : CDDP__FRAME_MESSAGE) &&
           head->dtype <= CDDP_I64 && head->size <= most &&
           head->size % cddp__dtype_size((cddp_dtype)head->dtype) == 0 &&
           head->size / cddp__dtype_size((cddp_dtype)head->dtype) == head->count;
    if (good) l->in = (cddp__message *)cddp__malloc(&n->allocator, sizeof *m + (size_t)head->size);
    if (l->in == NULL) {
      if (cddp__frame_is(head, CDDP__FRAME_BYE)) cddp__link_end(l, CDDP__LEFT);
      cddp__link_end(l, good ? ENOMEM : EPROTO);
      return NULL;
    }
    l->in->next = NULL;
    l->in->from = l->rank;
    l->in->tag = (int)head->number;
    l->in->dtype = head->dtype;
    l->in->count = head->count;
    l->in->size = (size_t)head->size;
  }
  m = l->in;
  if (cddp__link_io(l, head, m + 1, m->size, &l->got, false) <= 0) return NULL;
  l->got = 0;
  l->in = NULL;
  return m;
}

/* Goes on with the handshake and with what waits to be sent, as far as the system takes it. */
static void cddp__link_flush(const cddp__net *n, cddp__link *l) {
  cddp__buffer *b = &l->out;
  if (!cddp__link_shake(n, l) || cddp__buffer_size(b) == 0) return;
  (void)cddp__link_io(l, NULL, b->data, b->end, &b->start, true);
  if (cddp__buffer_size(b) == 0) cddp__buffer_clear(b, 0);
}

/* Ends and frees a link; says goodbye, in one piece or not at all, if no frame is half sent. */
static void cddp__link_leave(const cddp__net *n, cddp__link *l) {
  cddp__frame_head bye = cddp__link_head(CDDP__FRAME_BYE, 0, CDDP_U8, 0, 0);
  char rest[4096];
  if (l->state == CDDP__LINK_UP && l->sent == 0 && cddp__buffer_size(&l->out) == 0)
    (void)!CDDP__SEND(l->fd, &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (recv(l->fd, rest, sizeof rest, MSG_DONTWAIT) > 0) {} /* or close would reset it */
  cddp__link_free(n, l);
}

/* --- failure notices --- */

/* The proof in a notice, over the hello and what comes before it; without a secret a checksum. */
static void cddp__notice_prove(const cddp__net *n, const cddp__link *l, const unsigned char *body,
                               unsigned char proof[CDDP__PROOF_SIZE]) {
  unsigned char all[sizeof l->hello + CDDP__NOTICE_PROOF_AT];
  memcpy(all, &l->hello, sizeof l->hello);
  memcpy(all + sizeof l->hello, body, CDDP__NOTICE_PROOF_AT);
  cddp__hmac(n->secret != NULL ? n->secret : "", "cddp link 1 notice", all, sizeof all, proof);
}

/* Whether a rank of a group is told of a failure: all on other hosts; in a large group only the
   lowest rank of each host. world: the group's ranks in the job; NULL: the same. */
static bool cddp__is_told(const cddp__net *n, const int *world, int size, int rank) {
  int host = n->homes[world != NULL ? world[rank] : rank].host, p;
  if (host == n->host || size <= 64) return host != n->host;
  for (p = 0; p < rank && n->homes[world != NULL ? world[p] : p].host != host; p++) {}
  return p == rank;
}

/* Sends the ranks of the other hosts a notice: why the group is broken, or what a loss to come is
   due to. They need not be listening. */
static void cddp__tell_all(const cddp__net *n, uint64_t group, const int *world, int size,
                           uint32_t code, const char *text) {
  cddp__frame_head head =
      cddp__link_head(CDDP__FRAME_NOTICE, 0, CDDP_U8, CDDP__NOTICE_BYTES, CDDP__NOTICE_BYTES);
  unsigned char body[CDDP__NOTICE_BYTES];
  char kept[CDDP__ERROR_MAX];
  double deadline = cddp__now() + 0.3;
  cddp__link *first = NULL, *l;
  int p = 0, count;
  bool busy;
  memcpy(kept, cddp__error_text, sizeof kept);
  memset(body, 0, sizeof body);
  cddp__put32(body, code);
  snprintf((char *)body + 4, CDDP__ERROR_MAX, "%s", text);
  while (p < size) {
    for (count = 0; p < size && count < 32; p++) {
      if (!cddp__is_told(n, world, size, p)) continue;
      l = cddp__link_call(n, world != NULL ? world[p] : p, CDDP__LINK_NOTICE, group);
      if (l == NULL) continue;
      cddp__notice_prove(n, l, body, body + CDDP__NOTICE_PROOF_AT);
      cddp__buffer_add(&l->out, &head, sizeof head);
      cddp__buffer_add(&l->out, body, sizeof body);
      l->next = first;
      first = l;
      count++;
    }
    do {
      for (busy = false, l = first; l != NULL; l = l->next) {
        cddp__link_flush(n, l);
        busy = busy || (l->state != CDDP__LINK_DEAD && cddp__buffer_size(&l->out) > 0);
      }
      if (busy) cddp__sleep(2e-4);
    } while (busy && cddp__now() < deadline);
    cddp__links_free(n, first);
    first = NULL;
  }
  memcpy(cddp__error_text, kept, sizeof kept);
}

/* Receives what there is of a notice; its link has ended when it was taken, or was none. The group
   is broken here too, then, or (early) what losses to come are due to is noted. net.lock held. */
static void cddp__notice_receive(cddp__host *h, cddp__link *l) {
  cddp__message *m = cddp__link_receive(h->net, l, CDDP__NOTICE_BYTES);
  unsigned char *body, proof[CDDP__PROOF_SIZE];
  char kept[CDDP__ERROR_MAX];
  uint32_t code, result;
  cddp_group *g;
  if (m == NULL) return;
  body = (unsigned char *)(m + 1);
  memcpy(kept, cddp__error_text, sizeof kept);
  code = m->size == CDDP__NOTICE_BYTES ? cddp__get32(body) : 0;
  if (code != 0) cddp__notice_prove(h->net, l, body, proof);
  if (code != 0 && !cddp__same_bytes(proof, body + CDDP__NOTICE_PROOF_AT, sizeof proof)) code = 0;
  if (code != 0) body[CDDP__NOTICE_PROOF_AT - 1] = 0;
  result = code & ~CDDP__NOTICE_EARLY;
  pthread_mutex_lock(&h->lock);
  for (g = h->groups; g != NULL && result > CDDP_OK && result < CDDP__RESULT_COUNT; g = g->next) {
    if (g->hosts == NULL || g->id != l->group) continue;
    if (code & CDDP__NOTICE_EARLY)
      cddp__note_cause(&g->block->cause, (cddp_result)result, (const char *)body + 4);
    else
      (void)cddp__break_here(
          g, cddp__fail((cddp_result)result, "%s", (const char *)body + 4), false);
  }
  pthread_mutex_unlock(&h->lock);
  memcpy(cddp__error_text, kept, sizeof kept);
  cddp__free(&h->net->allocator, m);
  cddp__link_end(l, 0);
}

/* --- whoever calls this rank --- */

/* Without descriptors or memory for a caller accepting rests: the listening socket stays ready, and
   waits with it in their poll(2) would be none. */
static void cddp__net_accept(cddp__net *n) { /* net.lock held */
  int i;
  if (cddp__load32(&n->deaf) != 0 && cddp__now() < n->hears_again) return;
  cddp__store32(&n->deaf, 0);
  for (i = 0; i < 64; i++) {
    int fd = cddp__accept(n->listener);
    cddp__link *l;
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
      n->hears_again = cddp__now() + CDDP__ACCEPT_AGAIN_S;
      cddp__store32(&n->deaf, 1);
    }
    if (fd < 0 || (l = cddp__link_new(n, fd, -1, CDDP__STRANGER_S)) == NULL) return;
    l->next = n->pending;
    n->pending = l;
  }
}

/* Accepts, hears hellos and bad news. Never blocks; another thread that is at it is let alone. */
static void cddp__net_look(cddp__host *h) {
  cddp__net *n = h->net;
  cddp__link **at, *l;
  int place = 0, i;
  if (pthread_mutex_trylock(&n->lock) != 0) return;
  cddp__net_accept(n);
  for (at = &n->pending; (l = *at) != NULL;) {
    bool up = cddp__link_shake(n, l), notice = up && l->purpose == CDDP__LINK_NOTICE;
    if (notice) cddp__notice_receive(h, l);
    if (cddp__now() > l->deadline || ++place > CDDP__PENDING_LINKS) cddp__link_end(l, ETIMEDOUT);
    if (l->state != CDDP__LINK_DEAD && (!up || notice)) {
      at = &l->next;
      continue;
    }
    *at = l->next;
    for (i = 0; i < CDDP__LEFT_GROUPS && n->left[i] != l->group + 1; i++) {}
    if (l->state == CDDP__LINK_DEAD) {
      cddp__link_free(n, l);
    } else if (i < CDDP__LEFT_GROUPS) {
      cddp__link_leave(n, l);
    } else {
      l->next = n->arrived;
      n->arrived = l;
    }
  }
  pthread_mutex_unlock(&n->lock);
}

/* A link that a rank of the group has made for this purpose; NULL: there is none (any more). */
static cddp__link *cddp__net_claim(cddp_group *g, int purpose) {
  cddp__net *n = g->host->net;
  cddp__link **at, *l;
  pthread_mutex_lock(&n->lock);
  for (at = &n->arrived; (l = *at) != NULL;) {
    if (l->group != g->id || l->purpose != purpose) {
      at = &l->next;
      continue;
    }
    *at = l->next;
    l->next = NULL;
    for (l->rank = 0; l->rank < g->size && g->world[l->rank] != l->peer; l->rank++) {}
    if (l->rank < g->size && g->members[l->rank] < 0) break;
    cddp__link_free(n, l);
  }
  pthread_mutex_unlock(&n->lock);
  return l;
}

static void cddp__net_free(cddp__net *n) {
  cddp_allocator a;
  if (n == NULL) return;
  a = n->allocator;
  cddp__links_free(n, n->pending);
  cddp__links_free(n, n->arrived);
  cddp__close_fd(&n->listener);
  pthread_mutex_destroy(&n->lock);
  cddp__free(&a, n->token);
  cddp__free(&a, n->secret);
  cddp__free(&a, n);
}

static size_t cddp__table_bytes(int size, int host_count) {
  return 16 + (size_t)host_count * sizeof(cddp__host_entry) + (size_t)size * sizeof(cddp__home);
}

static cddp__net *cddp__net_new(const cddp_allocator *a, int size, int host_count) {
  cddp__net *n = (cddp__net *)cddp__calloc(a, 1, sizeof *n);
  if (n == NULL) return NULL;
  n->allocator = *a;
  n->listener = -1;
  n->size = size;
  n->host_count = host_count;
  pthread_mutex_init(&n->lock, NULL);
  n->token = (unsigned char *)cddp__calloc(a, 1, cddp__table_bytes(size, host_count));
  if (n->token == NULL) {
    cddp__net_free(n);
    return NULL;
  }
  n->hosts = (cddp__host_entry *)(void *)(n->token + 16);
  n->homes = (cddp__home *)(void *)(n->hosts + host_count);
  return n;
}

/* >>rendezvous ---------------------------------------------------------------------------------
   How ranks find each other: who runs where, and the memory that the ranks of a host share.
   Words: ranks that can share memory (one host, user, network and process namespace, CDDP_HOST_ID)
   are a node. The first of them to come is the node's coordinator, the others are its clients.
   Owns: the sockets of the rendezvous and one key of the store; a name for each rank on its host,
   which it holds as long as its group lives.
   May touch: the cddp__host that it fills in, and the store where the job meets.
   Entry points: cddp__meet, cddp__world_group, cddp__join; cddp__hear_claims, cddp__door_open and
   _serve while the group lives.
   Works as follows: the ranks form a tree. A client is connected to its coordinator by a Unix
   socket, a coordinator to the root by TCP. The root is the coordinator of rank 0's node.
     1  A rank takes its name, which follows from where the job meets. If another living process has
        it, two jobs use one place, or two processes have one rank: both are told.
     2  It binds its node's socket and is the coordinator; or that is in use, and it connects.
     3  RANK goes up to the root: what a rank is. The answer is WAIT. Before that a connection that
        ends has met a process that was about to end: try again. Later a rank was lost.
     4  Unless all ranks are of its node, the root listens on a TCP port, and writes its address and
        a random token to the store, under RUN/meeting. Other coordinators read that and connect;
        by the token the root knows that they came through the store, and so know the secret.
     5  The root compares what ranks must have in common. When all have come it sends TABLE down:
        who is where, as cddp__net has it. A coordinator adds the node's memory for its clients, and
        for each client the socket on which it listens for ranks of other nodes.
     6  IN goes up when a rank has built the group of all ranks, and its clients have said so.
   When a process joins (CDDP_JOIN) no rank waits for it. It calls every rank of the job on a socket
   that ranks with an elastic model have (cddp__door), proves the secret, and gets the memory and
   the place of the model's board. It takes a window of the memory that nobody had, and its group is
   one that is broken from the start. The rest is >>elastic's: cddp_ddp_create.
   When it fails: FAIL, a result and a text, goes up and down from the rank that failed. A lost
   connection is a lost rank. What is wrong with a rank is told when as many ranks are there as are
   to come, so that all of them hear it. Ranks that have said IN find the failure in the group. */

#define CDDP__MEET_MAGIC 0x544d4443u /* "CDMT" */
#define CDDP__HELLO_S 5.0   /* a connection that has not said RANK by then is dropped */
#define CDDP__GREETING 64   /* connections that have not said RANK; beyond these the oldest goes */
#define CDDP__CLAIMS_S 10.0 /* how long after the meeting a second claim still ends the group */
#define CDDP__CLAIMS_OVER 0xffffffffu /* for claimant: no longer listened for */

enum { CDDP__MEET_RANK = 1, CDDP__MEET_WAIT, CDDP__MEET_TABLE, CDDP__MEET_FAIL, CDDP__MEET_IN };

/* What ranks send each other is sent as it lies in memory: all hosts have the same byte order, or
   the magic is wrong. */
typedef struct cddp__meet_head { /* of each message */
  uint32_t magic, kind;
  uint32_t result; /* of FAIL, whose text follows */
  uint32_t size;   /* bytes that follow */
} cddp__meet_head;

/* What a rank says of itself. version, world_size, fp_mode and backend must be alike. */
typedef struct cddp__rank_info {
  uint32_t version, world_size, rank, pid;
  int port;         /* where it listens for other nodes; 0: nowhere yet */
  uint32_t fp_mode; /* cddp__fp_mode() */
  uint32_t user;
  uint32_t joins; /* 1: by CDDP_JOIN */
  uint64_t machine;        /* and its network namespace: a hash */
  unsigned char token[16]; /* by TCP: what the store said */
  char backend[16];
  cddp__host_entry host;
} cddp__rank_info;

typedef struct cddp__root_key { /* what lies under RUN/meeting */
  char magic[8];
  struct sockaddr_in6 address; /* where the root listens, with the port */
  unsigned char token[16];
} cddp__root_key;
static const char cddp__root_magic[8] = {'C', 'D', 'D', 'P', 'r', 'o', 'o', 't'};

typedef struct cddp__member { /* a rank that has come, or a process that would be one */
  cddp__rank_info info;
  int node;    /* 0: this rank's own */
  int link_fd; /* a socket on which it is to listen for other nodes; -1: none, or it has it */
  bool fits;   /* with this rank, and nobody else has its rank */
} cddp__member;

typedef struct cddp__channel { /* a connection to another rank of the tree */
  int fd;
  bool local;   /* a Unix socket, else TCP */
  bool known;   /* the first RANK on it was taken; of the one up: WAIT has come */
  bool in;      /* it has said IN */
  size_t first; /* the member of the first RANK */
  double since;
  size_t have; /* bytes of the message that is coming */
  unsigned char got[sizeof(cddp__meet_head) + CDDP__ERROR_MAX];
} cddp__channel;

typedef struct cddp__rendezvous {
  const cddp__place *at;
  const cddp_group_desc *desc;
  cddp__host *host;
  const char *secret; /* NULL: none */
  bool job_secret;    /* it is the launcher's, for the rendezvous alone */
  bool serves;        /* the store, from this process */
  double deadline;
  char name[48]; /* of the node's socket */
  uint32_t mark; /* a hash of it, not 0 */
  char key[160]; /* RUN/meeting */
  cddp_store *store; /* NULL: not open */
  bool stale;        /* what the store says has led to nobody: it may be an earlier job's */
  double look, pause; /* when to ask the store again; then for how long to try to open it, s */
  unsigned char token[16];
  cddp__address address; /* of this host, for ranks of other nodes */
  int node_socket, root_socket; /* listening: for clients, for coordinators; -1: not this rank */
  cddp__channel up;             /* to the coordinator or root; fd -1: none */
  int fds[2]; /* that came with the table, -1: none: the memory, this rank's socket for links */
  cddp__channel *below;
  struct pollfd *poll; /* for all channels and listening sockets */
  size_t below_count, below_capacity, poll_capacity;
  cddp__member *members; /* this rank and all below it, in the order in which they came */
  size_t member_count, member_capacity;
  size_t told;  /* members that the rank above knows */
  int nodes;    /* that have said RANK, this one with them */
  int expected; /* ranks to come, by the smallest WORLD_SIZE */
  bool with_rank_0;    /* it is of this node, fitting or not */
  cddp_result problem; /* of the first member that does not fit; CDDP_OK: none */
  char problem_text[CDDP__ERROR_MAX];
  bool common;    /* the failure is not of this rank alone: its text is for all */
  cddp__net *net; /* with the rank table; NULL: not all ranks have come */
} cddp__rendezvous;

/* What names this kernel and network namespace, so that ranks of one machine know each other. */
static void cddp__host_identity(char *out, size_t n) {
  const char *given = cddp__env("CDDP_HOST_ID");
  char boot[128] = "";
  struct stat st;
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file == NULL || fgets(boot, 37, file) == NULL) /* else all machines would seem to be one */
    (void)gethostname(boot, sizeof boot - 1);
  if (file != NULL) fclose(file);
  if (stat("/proc/self/ns/net", &st) != 0) st.st_ino = 0;
  snprintf(out, n, "%.60s.%llu", given != NULL ? given : boot, (unsigned long long)st.st_ino);
}

/* The name of the node's socket: the same for its ranks alone, and with a secret not to be
   foreseen. Ranks may spell the place where they meet in several ways: an address of this host
   counts as "here", of others the first of the name's addresses. */
static void cddp__node_name(const cddp__place *at, const char *secret, char name[48]) {
  static const char hex[] = "0123456789abcdef";
  const char *given = cddp__env("CDDP_HOST_ID"), *method = at->init_method;
  cddp__address a[CDDP__ADDRESSES_MAX];
  char host[256], spelled[160], place[1200], text[1600];
  unsigned char mac[32];
  struct stat st;
  bool here = false;
  int n = 0, port = 0, i;
  snprintf(place, sizeof place, "%s", method);
  if (strncmp(method, "tcp://", 6) != 0 ||
      cddp__host_port(method + 6, host, sizeof host, &port) != CDDP_OK ||
      cddp__resolve(host, port, a, &n) != CDDP_OK)
    n = 0; /* who opens the store says what is wrong with it */
  for (i = 0; i < n && !here; i++) {
    here = cddp__address_here(&a[i]);
    cddp__address_text(&a[i], spelled, sizeof spelled);
    if (i == 0 || strcmp(spelled, place) < 0) snprintf(place, sizeof place, "%s", spelled);
  }
  if (here) snprintf(place, sizeof place, "here:%d", port);
  if (stat("/proc/self/ns/pid", &st) != 0) st.st_ino = 0;
  snprintf(text, sizeof text, "%s|%s|%.60s|%u|%llu", place, at->run, given != NULL ? given : "",
           (unsigned)geteuid(), (unsigned long long)st.st_ino);
  cddp__hmac(secret != NULL ? secret : "", "cddp node 1", text, strlen(text), mac);
  memcpy(name, "cddp-", 5);
  for (i = 0; i < 32; i++) name[5 + i] = hex[(mac[i / 2] >> (i % 2 ? 0 : 4)) & 15];
  name[37] = 0;
}

/* Words about lack of descriptors, when that is what the error says; else about the call. */
static cddp_result cddp__fail_descriptors(const cddp__rendezvous *v, int error, const char *what) {
  struct rlimit limit;
  errno = error;
  if ((error != EMFILE && error != ENFILE) || getrlimit(RLIMIT_NOFILE, &limit) != 0)
    return cddp__fail_errno(what);
  return cddp__fail(CDDP_SYSTEM,
                    "%s: %s: this process may have %llu open files (ulimit -n), and to gather the "
                    "ranks of its host, of %d in all, takes one for each; raise the limit: "
                    "ulimit -n %d",
                    what, strerror(error), (unsigned long long)limit.rlim_cur, v->at->world_size,
                    4 * v->at->world_size + 1024);
}

/* --- two jobs in one place --- */

static cddp_result cddp__taken(const cddp__host *h, int rank, uint32_t pid, const char *name,
                               uint32_t other, const char *other_name) {
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "two jobs use %s at once, or two processes were given one RANK: rank %d is "
                    "taken twice, by pid %u on %s and pid %u on %s. Give each job a MASTER_PORT of "
                    "its own",
                    h->place, rank, pid, name, other, other_name);
}

/* The process at the other end of a Unix socket, if it is this user's, else 0. */
static uint32_t cddp__peer_pid(int fd) {
  uint32_t peer[3];
  return cddp__peer_process(fd, peer) && peer[1] == (uint32_t)geteuid() ? peer[0] : 0;
}

/* Where this process met last: survivors of a group meet again under other ranks, while the others
   may still hold theirs. */
static cddp__atomic_u32 cddp__met_before; /* a rendezvous's mark */

/* Takes this rank's own name on the host, for as long as the group lives. A process that holds it
   has the same rank and meets in the same place: of two jobs at once neither may take the other's
   ranks for its own, not even after the first has met. The call to that process tells it too. */
static cddp_result cddp__claim_rank(cddp__rendezvous *v) {
  cddp__address a;
  char name[64], told;
  int tries, status;
  snprintf(name, sizeof name, "%s-%d", v->name, v->at->rank);
  cddp__unix_name(&a, name);
  for (tries = 0; tries < 100; tries++) {
    uint32_t pid = 0;
    bool ended;
    int fd, error = cddp__listen_address(&a, &v->host->claim);
    if (error == 0) {
      cddp__own_socket(v->host->claim);
      return CDDP_OK;
    }
    if (error != EADDRINUSE)
      return cddp__fail_descriptors(v, error, "bind of an abstract Unix socket");
    if (cddp__load32(&cddp__met_before) == v->mark)
      return CDDP_OK; /* a rank of the group before has it, which is about to leave that group */
    error = cddp__connect_address(&a, v->deadline, &fd);
    if (error == 0) pid = cddp__peer_pid(fd);
    ended = error != 0 || (pid != 0 && ((kill((pid_t)pid, 0) != 0 && errno == ESRCH) ||
                                        cddp__exit_status(-1, pid, &status)));
    if (error == EAGAIN || (error == 0 && recv(fd, &told, 1, MSG_DONTWAIT) == 1))
      ended = false; /* too many have called it; or it has heard this call, and ended since */
    cddp__close_fd(&fd);
    if (error == CDDP__FOREIGN || pid == (uint32_t)getpid())
      return CDDP_OK; /* a stranger, or this process once more */
    if (!ended)
      return cddp__taken(v->host, v->at->rank, pid, v->host->name, (uint32_t)getpid(),
                         v->host->name);
    cddp__sleep(0.001); /* the rank has ended (a child may hold the name for long), or not begun */
  }
  return CDDP_OK;
}

/* Another process of this user that has called this rank's name, since it has the same rank; 0:
   none. */
static uint32_t cddp__claimed_again(const cddp__host *h) {
  uint32_t pid = 0;
  int fd;
  while (pid == 0 && h->claim >= 0 && (fd = cddp__accept(h->claim)) >= 0) {
    pid = cddp__peer_pid(fd);
    if (pid == (uint32_t)getpid()) pid = 0;
    (void)!CDDP__SEND(fd, "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(fd);
  }
  return pid;
}

/* Ranks started by hand cannot prove that they are of one job, so the first to come may have met
   ranks of another one. The ranks that they lack then find their own names taken, and call here:
   that ends the group, as long as it is young. Later the second job alone is told, lest it end one
   that has trained for long. */
static cddp_result cddp__hear_claims(cddp_group *g) {
  cddp__host *h = g->host;
  uint32_t pid = cddp__load32(&h->claimant);
  bool over;
  if (pid == CDDP__CLAIMS_OVER || h->claim < 0) return CDDP_OK;
  if (pid == 0) {
    over = cddp__now() >= h->claims_end; /* what has come before is still heard */
    pid = cddp__claimed_again(h);
    if (pid == 0 && over) (void)cddp__swap32(&h->claimant, 0, CDDP__CLAIMS_OVER);
    if (pid == 0) return CDDP_OK;
    cddp__store32(&h->claimant, pid);
  }
  return cddp__break(g, cddp__taken(h, cddp__job_rank(g, g->rank), (uint32_t)getpid(), h->name, pid,
                                    h->name));
}

/* --- members: the ranks that have come, and what they must have in common --- */

static cddp__member *cddp__member_of(const cddp__rendezvous *v, uint32_t rank) { /* NULL: none */
  size_t i;
  for (i = 0; i < v->member_count; i++)
    if (v->members[i].fits && v->members[i].info.rank == rank) return &v->members[i];
  return NULL;
}

/* CDDP_OK if the two ranks can be in one group. */
static cddp_result cddp__compare_ranks(const cddp__rank_info *own, const cddp__rank_info *i) {
  char a[80], b[80];
  if (i->version != own->version)
    return cddp__fail(CDDP_MISMATCH,
                      "rank %u (pid %u) has version %u of cddp.h, rank %u has %u; build all alike",
                      i->rank, i->pid, i->version, own->rank, own->version);
  if (i->world_size != own->world_size || (i->rank >= own->world_size && !i->joins))
    return cddp__fail(CDDP_MISMATCH,
                      "rank %u (pid %u) has world size %u, rank %u has %u: WORLD_SIZE must agree",
                      i->rank, i->pid, i->world_size, own->rank, own->world_size);
  if (strncmp(i->backend, own->backend, sizeof own->backend) != 0)
    return cddp__fail(CDDP_MISMATCH,
                      "rank %u (pid %u) has backend \"%.16s\", rank %u has \"%.16s\": CDDP_BACKEND "
                      "(or desc.backend and desc.device) must be the same for all",
                      i->rank, i->pid, i->backend, own->rank, own->backend);
  if (i->fp_mode == own->fp_mode) return CDDP_OK;
  cddp__describe_fp_mode(i->fp_mode, a, sizeof a);
  cddp__describe_fp_mode(own->fp_mode, b, sizeof b);
  return cddp__fail(CDDP_MISMATCH,
                    "rank %u %s, rank %u %s: the floating-point modes must be the same. Is one "
                    "linked with -ffast-math? Set the mode before cddp_init",
                    i->rank, a, own->rank, b);
}

/* Adds a rank that has come, or a process that would be one. */
static cddp_result cddp__add_member(cddp__rendezvous *v, const cddp__rank_info *i, int node) {
  const cddp__member *other = cddp__member_of(v, i->rank);
  cddp_result r = v->member_count > 0 ? cddp__compare_ranks(&v->members[0].info, i) : CDDP_OK;
  cddp__member *m;
  if (r == CDDP_OK && other != NULL)
    r = cddp__taken(v->host, (int)i->rank, other->info.pid, other->info.host.name, i->pid,
                    i->host.name);
  if (r != CDDP_OK && v->problem == CDDP_OK) {
    v->problem = r;
    snprintf(v->problem_text, sizeof v->problem_text, "%s", cddp_error());
  }
  m = (cddp__member *)cddp__grown(&v->host->allocator, v->members, &v->member_capacity,
                                  v->member_count + 1, sizeof *m);
  if (m == NULL) return CDDP_OUT_OF_MEMORY;
  v->members = m;
  m += v->member_count++;
  m->info = *i;
  m->node = node;
  m->link_fd = -1;
  m->fits = r == CDDP_OK;
  if (node == 0 && i->rank == 0) v->with_rank_0 = true;
  if (i->world_size > 0 && i->world_size < (uint32_t)v->expected)
    v->expected = (int)i->world_size;
  return CDDP_OK;
}

/* --- messages --- */

/* Sends a message, with the descriptors of fds that are not -1; fds NULL: none. */
static cddp_result cddp__channel_post(int fd, int kind, cddp_result result, const void *data,
                                      size_t size, int *fds, double deadline) {
  cddp__meet_head h = {CDDP__MEET_MAGIC, (uint32_t)kind, (uint32_t)result, (uint32_t)size};
  cddp_result r = CDDP_OK;
  ssize_t sent;
  while ((sent = cddp__pass_fds(fd, &h, sizeof h, fds, true)) < 0 && r == CDDP_OK)
    if (errno == EAGAIN)
      r = cddp__wait_fd(fd, POLLOUT, deadline);
    else if (errno != EINTR)
      r = cddp__fail_errno("sendmsg to another rank");
  if (sent >= 0) r = cddp__send_all(fd, (char *)&h + sent, sizeof h - (size_t)sent, deadline);
  return r == CDDP_OK ? cddp__send_all(fd, data, size, deadline) : r;
}

/* Reads without blocking: 1 when a message is there (of TABLE its head), 0: not yet, -1: the
   connection has ended, or what it says is no message. fds: for descriptors, or NULL. */
static int cddp__channel_read(cddp__channel *c, cddp__meet_head *h, int *fds) {
  for (;;) {
    size_t want = sizeof *h;
    ssize_t n;
    if (c->have >= sizeof *h) {
      memcpy(h, c->got, sizeof *h);
      if (h->kind != CDDP__MEET_TABLE) want += h->size;
      if (h->magic != CDDP__MEET_MAGIC || want > sizeof c->got) return -1;
      if (c->have == want) {
        c->have = 0;
        return 1;
      }
    }
    n = cddp__pass_fds(c->fd, c->got + c->have, want - c->have, fds, false);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 && errno == EAGAIN ? 0 : -1;
    c->have += (size_t)n;
  }
}

static void cddp__channel_init(cddp__channel *c, int fd, bool local) {
  memset(c, 0, sizeof *c);
  cddp__own_socket(c->fd = fd);
  c->local = local;
  c->since = cddp__now();
}

/* Whether the end of this channel would be the loss of a rank that is waited for. */
static bool cddp__awaited(const cddp__rendezvous *v, const cddp__channel *c) {
  return c->known && !c->in && (c == &v->up || v->members[c->first].fits);
}

static cddp_result cddp__report_channel_lost(const cddp__rendezvous *v, const cddp__channel *c) {
  const cddp__rank_info *i = &v->members[c->first].info;
  if (c == &v->up)
    return cddp__fail(CDDP_PEER_LOST,
                      "the rank that gathers %s ranks at %s died while they were meeting",
                      c->local ? "this host's" : "all hosts'", v->host->place);
  return cddp__fail(CDDP_PEER_LOST,
                    "rank %u (pid %u on %s) died or gave up while the ranks were meeting", i->rank,
                    i->pid, i->host.name);
}

/* --- the ranks below --- */

static void cddp__drop_channel(cddp__rendezvous *v, size_t k) { /* the last one takes its place */
  cddp__close_fd(&v->below[k].fd);
  v->below[k] = v->below[--v->below_count];
}

/* Takes in who waits at a listening socket. When too many have not said RANK, the oldest of them
   goes: a rank says it at once. */
static cddp_result cddp__accept_channels(cddp__rendezvous *v, int listener) {
  int tries;
  for (tries = 0; tries < 64; tries++) {
    int fd = cddp__accept(listener);
    size_t i, oldest = 0, silent = 0;
    cddp__channel *below;
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0 && errno == EAGAIN) return CDDP_OK;
    if (fd < 0) return cddp__fail_descriptors(v, errno, "accept of another rank");
    for (i = 0; i < v->below_count; i++)
      if (!v->below[i].known && (silent++ == 0 || v->below[i].since < v->below[oldest].since))
        oldest = i;
    if (silent >= CDDP__GREETING) cddp__drop_channel(v, oldest);
    below = (cddp__channel *)cddp__grown(&v->host->allocator, v->below, &v->below_capacity,
                                         v->below_count + 1, sizeof *below);
    if (below != NULL) v->below = below;
    if (below != NULL && cddp__stream_ready(fd) == 0)
      cddp__channel_init(&below[v->below_count++], fd, listener == v->node_socket);
    else
      close(fd);
    if (below == NULL) return CDDP_OUT_OF_MEMORY;
  }
  return CDDP_OK;
}

/* Whether the rank that speaks first on a channel may take part. By TCP it has to know the token.
   One on this machine, but of another user, is told that the meeting goes on without it. */
static bool cddp__admit(const cddp__rendezvous *v, const cddp__channel *c,
                        const cddp__rank_info *i) {
  const cddp__rank_info *own = &v->members[0].info;
  if (!c->local && !cddp__same_bytes(i->token, v->token, sizeof v->token)) return false;
  if (!c->local && i->machine == own->machine && i->user != own->user) {
    char text[CDDP__ERROR_MAX];
    int n = snprintf(text, sizeof text,
                     "rank %u at %s runs as another user (uid %u): is that another job? Give this "
                     "one a port of its own (MASTER_PORT), or start all ranks as one user; "
                     "CDDP_SECRET keeps others out",
                     own->rank, v->host->place, own->user);
    (void)cddp__channel_post(c->fd, CDDP__MEET_FAIL, CDDP_UNAUTHORIZED, text, (size_t)n, NULL,
                             cddp__now());
    return false;
  }
  return cddp__channel_post(c->fd, CDDP__MEET_WAIT, CDDP_OK, NULL, 0, NULL, cddp__now()) == CDDP_OK;
}

/* --- the rank above --- */

/* Listens on a port of that address for ranks of other hosts. */
static cddp_result cddp__listen_for_others(const cddp__rendezvous *v, const cddp__address *at,
                                           int *fd, int *port) {
  cddp__address a = *at;
  char text[160];
  int error;
  cddp__address_set_port(&a, 0);
  error = cddp__listen_address(&a, fd);
  cddp__address_text(&a, text, sizeof text);
  if (error == 0 && !cddp__local_address(*fd, &a)) error = errno;
  *port = cddp__address_port(&a);
  cddp__own_socket(*fd);
  if (error == EMFILE || error == ENFILE) return cddp__fail_descriptors(v, error, "socket");
  if (error == 0) return CDDP_OK;
  return cddp__fail(CDDP_SYSTEM,
                    "cannot listen on %s for ranks of other hosts: %s; CDDP_IFNAME names another "
                    "interface",
                    text, strerror(error));
}

/* Opens a socket for links of a member of this node, if it has none, and notes where it is. */
static cddp_result cddp__listen_for_links(cddp__rendezvous *v, cddp__member *m) {
  m->info.host.address = v->address.v6;
  return m->link_fd >= 0
             ? CDDP_OK
             : cddp__listen_for_others(v, &v->address, &m->link_fd, &m->info.port);
}

/* Passes on the members that the rank above does not know yet. */
static cddp_result cddp__tell_up(cddp__rendezvous *v) {
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && v->up.fd >= 0 && v->told < v->member_count) {
    cddp__member *m = &v->members[v->told++];
    memcpy(m->info.token, v->token, sizeof v->token);
    if (!v->up.local && m->fits) r = cddp__listen_for_links(v, m);
    CDDP__POINT("hello");
    if (r == CDDP_OK) /* if it cannot be sent, reading says why */
      (void)cddp__channel_post(v->up.fd, CDDP__MEET_RANK, CDDP_OK, &m->info, sizeof m->info, NULL,
                               v->deadline);
    CDDP__POINT("greeted");
  }
  return r;
}

/* Receives a table of so many bytes. */
static cddp_result cddp__take_table(cddp__rendezvous *v, size_t size) {
  int ranks = v->at->world_size;
  size_t least = cddp__table_bytes(ranks, 0),
         hosts = size > least ? (size - least) / sizeof(cddp__host_entry) : 0;
  if (hosts == 0 || hosts > (size_t)ranks || size != cddp__table_bytes(ranks, (int)hosts))
    return cddp__fail(CDDP_MISMATCH, "the rank table has a wrong size");
  v->net = cddp__net_new(&v->host->allocator, ranks, (int)hosts);
  if (v->net == NULL) return CDDP_OUT_OF_MEMORY;
  return cddp__recv_all(v->up.fd, v->net->token, size, v->deadline + 0.5);
}

/* Takes what has come on a channel, and closes it if it has ended, or is not one of a rank. */
static cddp_result cddp__channel_hear(cddp__rendezvous *v, cddp__channel *c) {
  bool up = c == &v->up;
  char text[CDDP__ERROR_MAX + 1] = "a rank gave up without a word";
  cddp__rank_info info;
  cddp__meet_head h;
  cddp_result r;
  int got, node;
  while ((got = cddp__channel_read(c, &h, up ? v->fds : NULL)) > 0) {
    if (h.kind == CDDP__MEET_FAIL && (up || cddp__awaited(v, c))) {
      r = h.result > CDDP_OK && h.result < CDDP__RESULT_COUNT ? (cddp_result)h.result
                                                              : CDDP_MISMATCH;
      if (h.size > 0 && c->got[sizeof h] != 0) {
        memcpy(text, c->got + sizeof h, h.size);
        text[h.size] = 0;
      }
      cddp__make_printable(text);
      v->common = true;
      return cddp__fail(r, "%s", text);
    }
    if (h.kind == CDDP__MEET_WAIT && up) {
      c->known = true;
    } else if (h.kind == CDDP__MEET_TABLE && up && v->net == NULL) {
      return cddp__take_table(v, h.size);
    } else if (h.kind == CDDP__MEET_IN && !up && cddp__awaited(v, c)) {
      c->in = true;
    } else if (h.kind == CDDP__MEET_RANK && !up && h.size == sizeof info) {
      memcpy(&info, c->got + sizeof h, sizeof info);
      info.host.name[sizeof info.host.name - 1] = 0;
      if (!c->known && !cddp__admit(v, c, &info)) break;
      node = c->local ? 0 : c->known ? v->members[c->first].node : v->nodes++;
      if ((r = cddp__add_member(v, &info, node)) != CDDP_OK) return r;
      if (!c->known) c->first = v->member_count - 1;
      c->known = true;
    } else {
      break;
    }
  }
  if (got != 0 && cddp__awaited(v, c)) return cddp__report_channel_lost(v, c);
  if (got != 0) cddp__close_fd(&c->fd);
  if (got == 0 || !up) return CDDP_OK;
  v->told = 0; /* that rank was about to end: another one is found */
  v->stale = true;
  cddp__sleep(0.001);
  return CDDP_OK;
}

/* Waits a little for messages, connections, lost ones and claims, and deals with them. */
static cddp_result cddp__poll_channels(cddp__rendezvous *v, double until) {
  int more[4] = {v->node_socket, v->root_socket, v->host->claim, v->up.fd};
  size_t i, n = v->below_count;
  struct pollfd *fds = (struct pollfd *)cddp__grown(&v->host->allocator, v->poll,
                                                    &v->poll_capacity, n + 4, sizeof *fds);
  uint32_t pid;
  double now;
  cddp_result r = CDDP_OK;
  if (fds == NULL) return CDDP_OUT_OF_MEMORY;
  v->poll = fds;
  for (i = 0; i < n + 4; i++) {
    fds[i].fd = i < n ? v->below[i].fd : more[i - n];
    fds[i].events = POLLIN;
    fds[i].revents = 0;
  }
  if (poll(fds, (nfds_t)n + 4, cddp__poll_ms(until, 50)) < 0 && errno != EINTR)
    return cddp__fail_errno("poll");
  now = cddp__now();
  for (i = n; i-- > 0 && r == CDDP_OK;) { /* backwards: a dropped one's place is the last one's */
    cddp__channel *c = &v->below[i];
    if (!c->known && now - c->since > CDDP__HELLO_S)
      cddp__close_fd(&c->fd);
    else if (fds[i].revents != 0)
      r = cddp__channel_hear(v, c);
    if (c->fd < 0) cddp__drop_channel(v, i);
  }
  if (r == CDDP_OK && fds[n + 2].revents != 0 && (pid = cddp__claimed_again(v->host)) != 0) {
    cddp__rank_info info = v->members[0].info;
    info.pid = pid; /* another one with this rank */
    cddp__store32(&v->host->claimant, pid);
    r = cddp__add_member(v, &info, 0);
  }
  if (r == CDDP_OK && fds[n + 3].revents != 0) r = cddp__channel_hear(v, &v->up);
  for (i = 0; i < 2 && r == CDDP_OK; i++)
    if (fds[n + i].revents != 0) r = cddp__accept_channels(v, more[i]);
  return r;
}

/* --- how a coordinator finds the root, or is the root: one key of the store --- */

/* Where other hosts reach this one: the near end of a connection to one of them, as the system has
   chosen it by route; or, by CDDP_IFNAME, the first address of that interface, of the same family
   if it has one. Loopback says nothing: the other end is on this host. */
static cddp_result cddp__own_address(int fd, cddp__address *out) {
  const char *name = cddp__env("CDDP_IFNAME");
  cddp__address list[CDDP__ADDRESSES_MAX];
  int n, i;
  if (fd < 0 || !cddp__local_address(fd, out) || out->sa.ss_family == AF_UNIX) {
    memset(out, 0, sizeof *out);
    out->v4.sin_family = AF_INET;
    out->v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    out->size = sizeof out->v4;
  }
  if (name == NULL) return CDDP_OK;
  n = cddp__interface_addresses(name, list, CDDP__ADDRESSES_MAX);
  if (n == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "CDDP_IFNAME is \"%.40s\", but this host has no such interface that is up "
                      "and has an address; `ip addr` lists them",
                      name);
  for (i = 0; i < n && list[i].sa.ss_family != out->sa.ss_family; i++) {}
  *out = list[i < n ? i : 0];
  return CDDP_OK;
}

/* The root listens for other coordinators, and tells the store where: on the address of its
   connection to the store, or on all addresses if the store is on this host too. */
static cddp_result cddp__open_root(cddp__rendezvous *v) {
  cddp__root_key value;
  cddp__address a;
  int port;
  cddp_result r = cddp__random(v->token, sizeof v->token);
  if (r == CDDP_OK) r = cddp__own_address(v->store->fd, &v->address);
  if (r != CDDP_OK) return r;
  a = v->address;
  if (cddp__address_loopback(&a) && !cddp__one_host(v->at) && cddp__env("CDDP_IFNAME") == NULL) {
    if (a.sa.ss_family == AF_INET6) memset(&a.v6.sin6_addr, 0, sizeof a.v6.sin6_addr);
    if (a.sa.ss_family == AF_INET) a.v4.sin_addr.s_addr = htonl(INADDR_ANY);
  }
  if ((r = cddp__listen_for_others(v, &a, &v->root_socket, &port)) != CDDP_OK) return r;
  cddp__address_set_port(&v->address, port);
  memcpy(value.magic, cddp__root_magic, sizeof value.magic);
  memcpy(value.token, v->token, sizeof value.token);
  value.address = v->address.v6;
  return cddp_store_set(v->store, v->key, &value, sizeof value);
}

static void cddp__close_store(cddp__rendezvous *v) {
  if (v->store != NULL) cddp__store_close(v->store);
  v->store = NULL;
  v->pause = 0.25;
}

/* Looks into the store where the root is, and connects to it. */
static cddp_result cddp__call_root(cddp__rendezvous *v) {
  cddp__root_key value;
  cddp__address a, store;
  const char *key = v->key;
  bool there = false;
  size_t n = 0;
  int fd;
  cddp_result r = cddp_store_check(v->store, &key, 1, &there);
  if (r == CDDP_OK && there)
    r = cddp_store_get(v->store, key, &value, sizeof value, &n);
  if (r == CDDP_NETWORK || !there) return r;
  v->stale = true; /* until the root has answered */
  if (r != CDDP_OK || n != sizeof value ||
      memcmp(value.magic, cddp__root_magic, sizeof value.magic) != 0)
    return CDDP_OK; /* another program's */
  a = cddp__internet_address(&value.address);
  memset(&store, 0, sizeof store);
  store.size = sizeof store.sa;
  if (cddp__address_loopback(&a) && getpeername(v->store->fd, &store.any, &store.size) == 0 &&
      store.sa.ss_family != AF_UNIX && !cddp__address_loopback(&store)) {
    cddp__address_set_port(&store, cddp__address_port(&a)); /* the root is on the store's host */
    a = store;
  }
  if (cddp__connect_address(&a, cddp__soon(2, v->deadline), &fd) != 0) return CDDP_OK;
  cddp__channel_init(&v->up, fd, false);
  memcpy(v->token, value.token, sizeof v->token);
  cddp__close_store(v);
  return cddp__own_address(fd, &v->address);
}

static cddp_result cddp__open_store(cddp__rendezvous *v, double deadline) {
  const cddp__place *at = v->at;
  cddp__store_options o;
  memset(&o, 0, sizeof o);
  o.desc.init_method = at->init_method;
  o.desc.is_server = v->serves;
  o.desc.timeout_s = at->timeout_s;
  o.desc.secret = v->secret != NULL ? v->secret : "";
  o.desc.allocator = v->desc->allocator;
  o.listen_fd = v->serves ? at->listen_fd : -1;
  o.reachable = !cddp__one_host(at);
  o.deadline = deadline;
  o.port_name = at->port_name;
  o.host_name = at->host_name;
  return cddp__store_open(&v->store, &o);
}

/* Not all ranks are of this coordinator's node: looks for the others, now and then. It tries to
   open the store for a while, a longer one each time: in between the clients are seen to. */
static cddp_result cddp__seek_others(cddp__rendezvous *v) {
  double most = 0.02 + 1e-5 * v->at->world_size;
  cddp_result r;
  if (v->root_socket >= 0 || cddp__now() < v->look) return CDDP_OK;
  if (v->store == NULL) {
    r = cddp__open_store(v, cddp__soon(v->pause, v->deadline));
    v->pause = r == CDDP_OK ? 0.002 : 2 * v->pause;
    v->look = cddp__now();
    return r == CDDP_TIMEOUT && (v->look < v->deadline || v->problem != CDDP_OK) ? CDDP_OK : r;
  }
  r = v->with_rank_0 ? cddp__open_root(v) : cddp__call_root(v);
  v->look = cddp__now() + v->pause;
  v->pause = 2 * v->pause < most ? 2 * v->pause : most;
  if (r != CDDP_NETWORK || v->serves) return r;
  cddp__close_store(v);
  if (v->stale) return CDDP_OK; /* an earlier job's store has ended */
  return cddp__fail(CDDP_PEER_LOST,
                    "the store at %s hung up while the ranks were meeting: the process that "
                    "serves it (rank 0, unless a launcher does) died or gave up",
                    v->host->place);
}

/* --- the meeting --- */

/* Binds the node's socket, or calls the rank that has. */
static cddp_result cddp__enter_node(cddp__rendezvous *v) {
  cddp__address a;
  int error, fd;
  CDDP__POINT("store");
  cddp__unix_name(&a, v->name);
  error = cddp__listen_address(&a, &v->node_socket);
  if (error == 0) {
    cddp__own_socket(v->node_socket);
    CDDP__POINT("lead");
    return CDDP_OK;
  }
  if (error != EADDRINUSE)
    return cddp__fail_descriptors(v, error, "bind of an abstract Unix socket");
  error = cddp__connect_address(&a, v->deadline, &fd);
  if (error == CDDP__FOREIGN)
    return cddp__fail(CDDP_UNAUTHORIZED,
                      "a process of another user holds the name at which the ranks of this host "
                      "meet; set CDDP_SECRET, or another MASTER_PORT");
  if (error == 0) {
    CDDP__POINT("follow");
    cddp__channel_init(&v->up, fd, true);
  } else if (error == ECONNREFUSED || error == EAGAIN || error == EINTR) {
    cddp__sleep(0.001); /* that rank does not listen yet, or has just ended */
  } else {
    return cddp__fail_descriptors(v, error, "connect to an abstract Unix socket");
  }
  return CDDP_OK;
}

/* The root: all ranks have come. Says who is where. */
static cddp_result cddp__make_table(cddp__rendezvous *v) {
  size_t i;
  cddp_result r = CDDP_OK;
  bool routed = false;
  for (i = 0; i < v->below_count && !routed && r == CDDP_OK; i++) {
    if (v->below[i].local || !cddp__awaited(v, &v->below[i])) continue;
    r = cddp__own_address(v->below[i].fd, &v->address);
    routed = !cddp__address_loopback(&v->address);
  }
  for (i = 0; i < v->member_count && v->nodes > 1 && r == CDDP_OK; i++)
    if (v->members[i].node == 0) r = cddp__listen_for_links(v, &v->members[i]);
  if (r != CDDP_OK) return r;
  v->net = cddp__net_new(&v->host->allocator, v->at->world_size, v->nodes);
  if (v->net == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < v->member_count; i++) {
    const cddp__rank_info *info = &v->members[i].info;
    cddp__home *p = &v->net->homes[info->rank];
    p->host = v->members[i].node;
    p->pid = info->pid;
    p->port = info->port;
    v->net->hosts[p->host] = info->host;
  }
  return cddp__random(v->net->token, 16);
}

/* Time is up: who is missing, as far as this rank knows. */
static cddp_result cddp__fail_late(cddp__rendezvous *v) {
  char list[128] = "";
  int rank, n = 0, size = v->at->world_size;
  if (!v->with_rank_0 || v->node_socket < 0) /* not the root */
    return cddp__fail(CDDP_TIMEOUT,
                      "timed out after %g s: not all %d ranks have come to %s; %d are on this "
                      "host%s",
                      v->at->timeout_s, size, v->host->place, (int)v->member_count,
                      v->up.fd < 0 ? ", rank 0 has not" : "");
  for (rank = 0; rank < size; rank++)
    if (cddp__member_of(v, (uint32_t)rank) == NULL && n++ < 8)
      cddp__append(list, sizeof list, "%s%d", n > 1 ? ", " : "", rank);
  return cddp__fail(
      CDDP_TIMEOUT,
      "timed out after %g s: rank%s %s%s of %d did not come to %s; start them, or raise "
      "CDDP_TIMEOUT_S",
      v->at->timeout_s, n > 1 ? "s" : "", list, n > 8 ? ", ..." : "", size, v->host->place);
}

/* Until this rank has the table, or knows what is wrong. The root's deadline is the first, as it
   knows who is missing. */
static cddp_result cddp__gather(cddp__rendezvous *v) {
  cddp_result r = CDDP_OK;
  v->pause = v->store != NULL ? 0.002 : 0.25;
  v->look = cddp__now() + (v->store != NULL ? v->pause : 0);
  while (r == CDDP_OK && v->net == NULL) {
    double until = v->deadline + 0.5;
    bool late, all;
    if (v->up.fd < 0 && v->node_socket < 0) r = cddp__enter_node(v);
    if (r == CDDP_OK) r = cddp__tell_up(v);
    if (v->up.fd < 0) until = v->root_socket < 0 && v->look < v->deadline ? v->look : v->deadline;
    if (r == CDDP_OK) r = cddp__poll_channels(v, until);
    if (r != CDDP_OK || v->net != NULL) break;
    late = cddp__now() >= v->deadline + (v->up.fd < 0 ? 0 : v->up.local ? 0.5 : 0.25);
    all = v->with_rank_0 && v->node_socket >= 0 && v->member_count >= (size_t)v->expected;
    if (late || (all && v->problem != CDDP_OK)) {
      v->common = true;
      return v->problem != CDDP_OK ? cddp__fail(v->problem, "%s", v->problem_text)
                                   : cddp__fail_late(v);
    }
    if (all)
      r = cddp__make_table(v);
    else if (v->node_socket >= 0 && v->up.fd < 0)
      r = cddp__seek_others(v);
  }
  return r;
}

/* Makes the memfd: a window for each rank, one for what is common to all, and those of processes
   that may join. As large as the process may make a file: it is all holes, and so takes no memory
   of its own. */
static cddp_result cddp__make_memory(cddp__host *h) {
  uint64_t windows = (uint64_t)h->size + 1;
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0) limit.rlim_cur = RLIM_INFINITY;
  if (limit.rlim_cur == RLIM_INFINITY)
    windows += CDDP__JOINS;
  else
    while (h->window_bits > 12 && windows << h->window_bits > (uint64_t)limit.rlim_cur)
      h->window_bits--;
  if ((uint64_t)1 << h->window_bits < CDDP__HUGE_PAGE + cddp__block_bytes(h->size, h->size))
    return cddp__fail(CDDP_SYSTEM,
                      "the file size limit of %llu bytes (ulimit -f) is too small for the memory "
                      "that %d ranks share; raise it: ulimit -f unlimited",
                      (unsigned long long)limit.rlim_cur, h->size);
  h->fd = (int)syscall(SYS_memfd_create, "cddp", 3u /* MFD_CLOEXEC | MFD_ALLOW_SEALING */);
  if (h->fd < 0)
    return cddp__fail(CDDP_SYSTEM,
                      "memfd_create: %s: the ranks of a host share memory by it. If a container "
                      "forbids it (Docker: --security-opt seccomp=unconfined allows it), give each "
                      "rank a CDDP_HOST_ID of its own: then they talk by TCP",
                      strerror(errno));
  if (ftruncate(h->fd, (off_t)(windows << h->window_bits)) != 0)
    return cddp__fail_errno("ftruncate of shared memory");
  fcntl(h->fd, 1033 /* F_ADD_SEALS */,
        2 | 4 /* SHRINK | GROW: no peer can pull it from under us */);
  return CDDP_OK;
}

/* How large another rank has made the windows of the memfd. size: ranks that met. */
static cddp_result cddp__measure_windows(cddp__host *h, int size) {
  struct stat st;
  if (fstat(h->fd, &st) != 0) return cddp__fail_errno("fstat of shared memory");
  for (h->window_bits = 12; h->window_bits < 40; h->window_bits++)
    if (((uint64_t)size + 1) << h->window_bits >= (uint64_t)st.st_size) break;
  return CDDP_OK;
}

/* Fills the host with what the table says; a false one is an error. The table becomes the host's if
   there are other nodes. */
static cddp_result cddp__use_table(cddp__rendezvous *v) {
  cddp__host *h = v->host;
  cddp__net *n = v->net;
  int i;
  n->rank = v->at->rank;
  for (i = 0; i < n->host_count; i++) {
    n->hosts[i].name[sizeof n->hosts[i].name - 1] = 0;
    n->hosts[i].size = 0;
  }
  for (i = 0; i < n->size; i++) {
    cddp__home *p = &n->homes[i];
    if (p->host < 0 || p->host >= n->host_count || p->pid == 0 ||
        (i == n->rank && p->pid != (uint32_t)getpid()))
      return cddp__fail(CDDP_MISMATCH, "the rank table is damaged");
    p->index = n->hosts[p->host].size++;
  }
  n->host = n->homes[n->rank].host;
  for (i = 0; i < n->size; i++)
    if (n->homes[i].host == n->host) h->pids[n->homes[i].index] = n->homes[i].pid;
  cddp__host_place(h, n->hosts[n->host].size, n->homes[n->rank].index, n->homes[n->rank].index);
  if (n->host_count == 1) return CDDP_OK;
  h->net = n;
  if (v->secret == NULL || v->job_secret) return CDDP_OK;
  n->secret = cddp__strdup(&h->allocator, v->secret);
  return n->secret != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

/* The group of all ranks, on a control block that lies at the start of the shared memory. */
static cddp_result cddp__world_group(cddp_group **out, cddp__host *h, int rank, int size,
                                     double timeout_s) {
  size_t bytes = cddp__round_up(cddp__block_bytes(size, h->size), cddp__page_size());
  char *block = cddp__map_memory(h->fd, 0, bytes);
  cddp_result r;
  if (block == NULL)
    return cddp__fail(CDDP_OUT_OF_MEMORY, "mmap of the group's shared memory: %s", strerror(errno));
  r = cddp__group_build(out, h, rank, size, NULL, block, timeout_s);
  if (r != CDDP_OK) munmap(block, bytes);
  return r;
}

/* Builds the group that the table describes, passes the table on to the ranks below, and waits
   until they have built theirs. */
static cddp_result cddp__pass_on(cddp__rendezvous *v, cddp_group **out) {
  cddp__host *h = v->host;
  cddp_result r = cddp__use_table(v);
  double deadline = v->deadline + 1;
  size_t i;
  if (r == CDDP_OK && v->node_socket < 0) { /* a client */
    h->fd = v->fds[0];
    v->members[0].link_fd = v->fds[1];
    v->fds[0] = v->fds[1] = -1;
    if (h->fd < 0 || (h->net != NULL && v->members[0].link_fd < 0))
      return cddp__fail_descriptors(v, EMFILE, "recvmsg of the shared memory");
    r = cddp__measure_windows(h, h->size);
  } else if (r == CDDP_OK && h->size > 1) {
    r = cddp__make_memory(h);
  }
  cddp__host_place(h, h->size, h->index, h->index); /* with this size of windows */
  if (r == CDDP_OK)
    r = cddp__world_group(out, h, v->at->rank, v->at->world_size, v->at->timeout_s);
  for (i = 0; i < v->below_count && r == CDDP_OK; i++) {
    cddp__channel *c = &v->below[i];
    int *link_fd = &v->members[c->first].link_fd, fds[2] = {h->fd, *link_fd};
    if (!cddp__awaited(v, c)) continue;
    CDDP__POINT("welcome");
    if (cddp__channel_post(c->fd, CDDP__MEET_TABLE, CDDP_OK, v->net->token,
                           cddp__table_bytes(v->net->size, v->net->host_count),
                           c->local ? fds : NULL, cddp__now() + 5) != CDDP_OK)
      r = cddp__report_channel_lost(v, c);
    cddp__close_fd(link_fd);
  }
  for (i = 0; i < v->below_count && r == CDDP_OK;) {
    bool waits = cddp__awaited(v, &v->below[i]);
    if (waits && cddp__now() >= deadline) r = cddp__report_channel_lost(v, &v->below[i]);
    if (waits && r == CDDP_OK) r = cddp__poll_channels(v, deadline);
    i = waits ? 0 : i + 1; /* channels may have moved */
  }
  if (r == CDDP_OK && v->up.fd >= 0 &&
      cddp__channel_post(v->up.fd, CDDP__MEET_IN, CDDP_OK, NULL, 0, NULL, deadline) != CDDP_OK) {
    r = cddp__channel_hear(v, &v->up); /* it may have said why */
    if (r == CDDP_OK) r = cddp__report_channel_lost(v, &v->up);
  }
  if (r != CDDP_OK || h->net == NULL) return r;
  h->net->listener = v->members[0].link_fd;
  v->members[0].link_fd = -1;
  return CDDP_OK;
}

/* Says FAIL on a connection, and by TCP waits a moment until the other side has read it. */
static void cddp__channel_fail(int fd, bool local, cddp_result r, const char *text) {
  double deadline = cddp__now() + 0.2;
  char rest[256];
  (void)cddp__channel_post(fd, CDDP__MEET_FAIL, r, text, strlen(text), NULL, cddp__now() + 0.1);
  if (local || shutdown(fd, SHUT_WR) != 0) return;
  while (cddp__wait_fd(fd, POLLIN, deadline) == CDDP_OK &&
         recv(fd, rest, sizeof rest, MSG_DONTWAIT) > 0) {}
}

/* Tells the ranks above and below, those too that have just come, and those that are in the group
   already, why there will be no group; or (CDDP_OK) those that do not fit into it. */
static void cddp__tell_failure(cddp__rendezvous *v, cddp_group *g, cddp_result r) {
  char text[CDDP__ERROR_MAX], far[CDDP__ERROR_MAX];
  int rounds = 0;
  size_t k;
  snprintf(text, sizeof text, "%s", r != CDDP_OK ? cddp_error() : v->problem_text);
  snprintf(far, sizeof far, "%s", text);
  if (r != CDDP_OK && !v->common)
    snprintf(far, sizeof far, "rank %d failed while the ranks were meeting: %.430s", v->at->rank,
             text);
  if (v->up.fd >= 0 && r != CDDP_OK) cddp__channel_fail(v->up.fd, v->up.local, r, far);
  do {
    for (k = v->below_count; k-- > 0;) {
      const cddp__channel *c = &v->below[k];
      if (r == CDDP_OK && (!c->known || v->members[c->first].fits)) continue;
      cddp__channel_fail(c->fd, c->local || !c->known, r != CDDP_OK ? r : v->problem,
                         c->local ? text : far);
      cddp__drop_channel(v, k); /* those that come need its descriptor */
    }
    if (r == CDDP_OK) return;
    if (v->node_socket >= 0) (void)cddp__accept_channels(v, v->node_socket);
  } while (v->below_count > 0 && rounds++ < CDDP__MAX_RANKS);
  if (g != NULL) cddp__break(g, cddp__fail(r, "%s", far));
  if (v->host->net != NULL) cddp__tell_all(v->host->net, 0, NULL, v->net->size, (uint32_t)r, far);
  cddp__fail(r, "%s", text);
}

/* Finds out what this rank is and where it meets. CDDP_JOB_SECRET was made by cddp_spawn or cddprun
   for ranks that meet on one host, so that no other user of it can join in: "PORT:SECRET", good for
   that MASTER_PORT unless the user has set a secret. */
static cddp_result cddp__rendezvous_init(cddp__rendezvous *v, const cddp__place *at,
                                         const cddp_group_desc *d, cddp__host *h) {
  const char *port = strrchr(at->init_method, ':'), *job = cddp__env("CDDP_JOB_SECRET"),
             *master = cddp__env("MASTER_PORT"), *backend = cddp__backend_name(d),
             *secret = d->secret != NULL ? d->secret : cddp__env("CDDP_SECRET");
  bool tcp = strncmp(at->init_method, "tcp://", 6) == 0,
       cuda = d->device != NULL && strncmp(d->device, "cuda", 4) == 0;
  size_t n = master != NULL ? strlen(master) : 0;
  char machine[128];
  cddp__rank_info i;
  memset(v, 0, sizeof *v);
  v->at = at;
  v->desc = d;
  v->host = h;
  v->deadline = cddp__now() + at->timeout_s;
  v->up.fd = v->fds[0] = v->fds[1] = v->node_socket = v->root_socket = -1;
  v->nodes = 1;
  v->expected = at->world_size;
  v->serves = at->rank == 0 && !at->client_only;
  v->job_secret = secret == NULL && job != NULL && n > 0 && at->port_name != NULL &&
                  !at->client_only && strncmp(job, master, n) == 0 && job[n] == ':' &&
                  job[n + 1] != 0;
  if (v->job_secret) secret = job + n + 1;
  v->secret = secret != NULL && secret[0] != 0 ? secret : NULL;
  snprintf(v->key, sizeof v->key, "%s/meeting", at->run);
  snprintf(h->place, sizeof h->place, "%s%.80s", tcp ? "port " : "",
           tcp ? port + 1 : at->init_method);
  cddp__node_name(at, v->secret, v->name);
  v->mark = (uint32_t)cddp__hash64(1, v->name, strlen(v->name)) | 1;
  memset(&i, 0, sizeof i);
  i.version = CDDP_VERSION;
  i.world_size = (uint32_t)at->world_size;
  i.rank = (uint32_t)at->rank;
  i.pid = (uint32_t)getpid();
  i.fp_mode = cddp__fp_mode();
  i.user = (uint32_t)geteuid();
  i.joins = at->joins;
  cddp__host_identity(machine, sizeof machine);
  i.machine = cddp__hash64(0, machine, strlen(machine));
  snprintf(i.backend, sizeof i.backend, "%s", backend != NULL ? backend : cuda ? "nccl" : "cpu");
  snprintf(i.host.name, sizeof i.host.name, "%.67s", h->name);
  return cddp__add_member(v, &i, 0);
}

static void cddp__rendezvous_free(cddp__rendezvous *v) {
  const cddp_allocator *a = &v->host->allocator;
  size_t i;
  while (v->below_count > 0) cddp__drop_channel(v, v->below_count - 1);
  for (i = 0; i < v->member_count; i++) cddp__close_fd(&v->members[i].link_fd);
  cddp__close_fd(&v->up.fd);
  cddp__close_fd(&v->fds[0]);
  cddp__close_fd(&v->fds[1]);
  cddp__close_fd(&v->node_socket);
  cddp__close_fd(&v->root_socket);
  cddp__close_store(v);
  if (v->net != v->host->net) cddp__net_free(v->net);
  cddp__free(a, v->below);
  cddp__free(a, v->poll);
  cddp__free(a, v->members);
}

/* A descriptor for each process of the node, but at most half of what this one may have open: the
   rest is the program's. Without one (also where seccomp forbids it), kill(pid, 0) tells. */
static void cddp__watch_processes(cddp__host *h) {
  struct rlimit limit;
  int i, most = INT_MAX;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / 2 < (rlim_t)INT_MAX)
    most = (int)(limit.rlim_cur / 2);
  for (i = 0; i < h->size; i++)
    if (i != h->index && i < most)
      h->pidfds[i] = (int)syscall(SYS_pidfd_open, (pid_t)h->pids[i], 0u);
}

/* --- joining a job that runs --- */

#define CDDP__JOB_GONE_S 2.0 /* how long nobody must be there before the job counts as ended */
#define CDDP__CALLS 64   /* ranks that a joining process calls at once */

/* What a rank knows of its job for those who join. The secret's text follows the struct. */
typedef struct cddp__door {
  cddp__rank_info info; /* of the rank */
  int size;             /* ranks that met */
  char name[64];        /* of the socket that the rank listens on */
  const char *secret;   /* NULL: none */
} cddp__door;

/* What a rank answers, with the memfd. */
typedef struct cddp__join_table {
  cddp__rank_info info;
  uint64_t job; /* cddp_record_header.job; 0: it is not recorded */
  cddp__ref board;
  int size, reserved;
} cddp__join_table;

/* The socket of a rank that others may join; the rank that joins calls all. */
static void cddp__door_name(const char *node, int rank, char name[64]) {
  snprintf(name, 64, "%.44s-join-%d", node, rank);
}

static cddp_result cddp__door_make(const cddp__rendezvous *v, int size) {
  size_t n = v->secret != NULL ? strlen(v->secret) + 1 : 0;
  cddp__door *door = (cddp__door *)cddp__calloc(&v->host->allocator, 1, sizeof *door + n);
  if (door == NULL) return CDDP_OUT_OF_MEMORY;
  door->info = v->members[0].info;
  door->size = size;
  cddp__door_name(v->name, v->at->rank, door->name);
  if (n > 0) door->secret = (char *)memcpy(door + 1, v->secret, n);
  v->host->door = door;
  return CDDP_OK;
}

/* From here on processes may join through this rank, when it looks: cddp__door_serve. */
__attribute__((unused)) static void cddp__door_open(cddp__host *h) {
  cddp__address a;
  int error;
  if (h->door == NULL || h->door_fd >= 0) return;
  cddp__unix_name(&a, h->door->name);
  if ((error = cddp__listen_address(&a, &h->door_fd)) == 0)
    cddp__own_socket(h->door_fd);
  else
    cddp__log(&h->logger, 1, "no process can join through this rank: %s", strerror(error));
}

/* Does this end's part of the challenge. c: begun. */
static cddp_result cddp__prove(cddp__challenge *c, int fd, double deadline) {
  unsigned char bytes[sizeof c->in];
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && (c->state == CDDP__CHALLENGE_ON || c->out_size > 0)) {
    size_t n = c->in_size == 0 ? 9 : sizeof c->in - c->in_size; /* a refusal has 9 bytes */
    r = cddp__send_all(fd, c->out, c->out_size, deadline);
    c->out_size = 0;
    if (r != CDDP_OK || c->state != CDDP__CHALLENGE_ON) break;
    r = cddp__recv_all(fd, bytes, n, deadline);
    if (r == CDDP_OK) cddp__challenge_feed(c, bytes, n);
  }
  if (r != CDDP_OK || c->state == CDDP__CHALLENGE_PROVEN) return r;
  return cddp__fail(CDDP_UNAUTHORIZED, "the other process does not know the secret of the job");
}

/* Tells those who call how to join. A process that joins answers at once; for any other one this
   rank waits a moment. */
__attribute__((unused)) static void cddp__door_serve(cddp__host *h) {
  cddp__join_table table;
  cddp__challenge c;
  int fd, fds[2] = {h->fd, -1};
  double deadline;
  while (h->door_fd >= 0 && (fd = cddp__accept(h->door_fd)) >= 0) {
    cddp_result r = cddp__peer_pid(fd) != 0 ? CDDP_OK : CDDP_UNAUTHORIZED;
    deadline = cddp__now() + 0.1;
    if (r == CDDP_OK && h->door->secret != NULL) {
      r = cddp__challenge_begin(&c, h->door->secret, "join", false, NULL, 0);
      if (r == CDDP_OK) r = cddp__prove(&c, fd, deadline);
    }
    memset(&table, 0, sizeof table);
    table.info = h->door->info;
    table.info.fp_mode = cddp__fp_mode();
    table.job = h->record != NULL ? h->record->job : 0;
    table.size = h->door->size;
    table.board = h->board->self;
    if (r == CDDP_OK)
      (void)cddp__channel_post(fd, CDDP__MEET_TABLE, CDDP_OK, &table, sizeof table, fds, deadline);
    CDDP__POINT("elastic told");
    close(fd);
  }
}

typedef struct cddp__join_call { /* of a rank of the job; fd -1: it has ended */
  int fd, rank;
  cddp__challenge challenge;
} cddp__join_call;

/* Calls all ranks that listen and have not been called. */
static cddp_result cddp__join_call_ranks(cddp__rendezvous *v, cddp__join_call *calls, int *count) {
  cddp__address a;
  char name[64];
  int rank, i;
  for (rank = 0; rank < CDDP__MAX_RANKS && *count < CDDP__CALLS; rank++) {
    cddp__join_call *c = &calls[*count];
    cddp_result r = CDDP_OK;
    for (i = 0; i < *count && calls[i].rank != rank; i++) {}
    if (i < *count) continue;
    cddp__door_name(v->name, rank, name);
    cddp__unix_name(&a, name);
    if (cddp__connect_address(&a, cddp__now(), &c->fd) != 0) continue;
    cddp__own_socket(c->fd);
    c->rank = rank;
    ++*count;
    if (v->secret == NULL) continue;
    r = cddp__challenge_begin(&c->challenge, v->secret, "join", true, NULL, 0);
    if (r != CDDP_OK) return r;
    (void)cddp__send_all(c->fd, c->challenge.out, c->challenge.out_size, cddp__now());
    c->challenge.out_size = 0;
  }
  return CDDP_OK;
}

/* Takes what a rank has answered. CDDP_NETWORK: it has ended, perhaps. */
static cddp_result cddp__join_hear(cddp__rendezvous *v, cddp__join_call *call,
                                   cddp__join_table *table) {
  double deadline = cddp__now() + 1;
  cddp__meet_head head;
  cddp__channel c;
  cddp_result r = v->secret != NULL ? cddp__prove(&call->challenge, call->fd, deadline) : CDDP_OK;
  int got = 0;
  cddp__channel_init(&c, call->fd, true);
  while (r == CDDP_OK && (got = cddp__channel_read(&c, &head, v->fds)) == 0)
    r = cddp__wait_fd(call->fd, POLLIN, deadline);
  if (r == CDDP_OK && (got < 0 || head.kind != CDDP__MEET_TABLE || head.size != sizeof *table))
    r = cddp__fail(CDDP_NETWORK, "the rank hung up");
  if (r == CDDP_OK) r = cddp__recv_all(call->fd, table, sizeof *table, deadline);
  return r == CDDP_TIMEOUT ? CDDP_NETWORK : r;
}

/* Whether a process holds the name of one of the ranks that met. */
static bool cddp__rank_is_there(const cddp__rendezvous *v) {
  cddp__address a;
  char name[64];
  int rank, fd, error = 0;
  for (rank = 0; rank < v->at->world_size && error != EADDRINUSE; rank++) {
    if (rank == v->at->rank) continue;
    snprintf(name, sizeof name, "%s-%d", v->name, rank);
    cddp__unix_name(&a, name);
    error = cddp__listen_address(&a, &fd);
    cddp__close_fd(&fd);
  }
  return error == EADDRINUSE;
}

/* Why this process gives up; CDDP_OK: not yet. seen: when a rank was there last. */
static cddp_result cddp__join_patience(const cddp__rendezvous *v, int called, double *seen) {
  bool there = called > 0 || cddp__rank_is_there(v);
  double now = cddp__now();
  if (there) *seen = now;
  if (!there && (now >= v->deadline || now - *seen > CDDP__JOB_GONE_S))
    return cddp__fail(CDDP_PEER_LOST,
                      "CDDP_JOIN: no rank of a job is at %s on this host: it has ended, or has not "
                      "begun, or has another CDDP_SECRET",
                      v->host->place);
  if (now < v->deadline) return CDDP_OK;
  return cddp__fail(CDDP_TIMEOUT,
                    called > 0 ? "CDDP_JOIN: timed out after %g s: there are ranks at %s, but none "
                                 "has come to cddp_ddp_next_shard or cddp_ddp_step"
                               : "CDDP_JOIN: timed out after %g s: there are ranks at %s, but none "
                                 "has an elastic model: set elastic in cddp_ddp_desc",
                    v->at->timeout_s, v->host->place);
}

/* Calls the ranks of the job until one has answered. */
static cddp_result cddp__join_find(cddp__rendezvous *v, cddp__join_table *table) {
  const cddp_allocator *a = &v->host->allocator;
  cddp__join_call *calls = (cddp__join_call *)cddp__calloc(a, CDDP__CALLS, sizeof *calls);
  struct pollfd fds[CDDP__CALLS];
  double seen = cddp__now();
  int count = 0, i;
  cddp_result r = calls != NULL ? CDDP_NETWORK : CDDP_OUT_OF_MEMORY;
  while (r == CDDP_NETWORK) {
    r = cddp__join_call_ranks(v, calls, &count);
    if (r == CDDP_OK) r = cddp__join_patience(v, count, &seen);
    if (r != CDDP_OK) break;
    for (i = 0; i < count; i++) {
      fds[i].fd = calls[i].fd;
      fds[i].events = POLLIN;
    }
    (void)poll(fds, (nfds_t)count, cddp__poll_ms(v->deadline, 100));
    r = CDDP_NETWORK;
    for (i = count; i-- > 0 && r == CDDP_NETWORK;) {
      if (fds[i].revents == 0) continue;
      r = cddp__join_hear(v, &calls[i], table);
      cddp__close_fd(&calls[i].fd);
      calls[i] = calls[--count];
    }
  }
  for (i = 0; i < count; i++) cddp__close_fd(&calls[i].fd);
  cddp__free(a, calls);
  return r;
}

/* Maps what the job shares, and takes a window of it. */
static cddp_result cddp__join_memory(cddp__rendezvous *v, const cddp__join_table *table) {
  cddp__host *h = v->host;
  uint32_t joins;
  struct stat st;
  void *board;
  cddp_result r;
  h->fd = v->fds[0];
  v->fds[0] = -1;
  if (h->fd < 0) return cddp__fail_descriptors(v, EMFILE, "recvmsg of the shared memory");
  if ((r = cddp__measure_windows(h, table->size)) != CDDP_OK) return r;
  if ((r = cddp__locate(h, &table->board, &board)) != CDDP_OK) return r;
  h->board = (cddp__board *)board;
  joins = cddp__add32(&h->board->joins, 1);
  cddp__host_place(h, h->size, h->index, table->size + (int)joins - 1);
  if (fstat(h->fd, &st) != 0) return cddp__fail_errno("fstat of shared memory");
  if (joins <= CDDP__JOINS &&
      (uint64_t)(h->window + 2) << h->window_bits <= (uint64_t)st.st_size)
    return CDDP_OK;
  return cddp__fail(CDDP_UNSUPPORTED,
                    "CDDP_JOIN: the job is full: its memory has room for %d processes to join, in "
                    "all, or for none when it runs with a file size limit (ulimit -f)",
                    CDDP__JOINS);
}

/* The group of a process that joins: it has met nobody, so all but memory and models fails. */
static cddp_result cddp__join_group(cddp_group **out, cddp__rendezvous *v) {
  cddp__host *h = v->host;
  size_t bytes = cddp__round_up(cddp__block_bytes(h->size, h->size), cddp__page_size());
  char *block = cddp__map_memory(-1, 0, bytes);
  cddp_result r;
  if (block == NULL)
    return cddp__fail(CDDP_OUT_OF_MEMORY, "mmap of a group's memory: %s", strerror(errno));
  r = cddp__group_build(out, h, v->at->rank, h->size, NULL, block, v->at->timeout_s);
  if (r != CDDP_OK) {
    munmap(block, bytes);
    return r;
  }
  h->slots = NULL;
  cddp__fail(CDDP_UNSUPPORTED,
             "rank %d has joined the job (CDDP_JOIN) and is in no group of its first ranks: use "
             "cddp_ddp_group, the ranks that are there",
             v->at->rank);
  (void)cddp__break(*out, CDDP_UNSUPPORTED);
  return CDDP_OK;
}

/* Finds the job, and makes a group on the memory that its ranks share. */
static cddp_result cddp__join(cddp_group **out, const cddp__place *at, const cddp_group_desc *d,
                              cddp__host *h) {
  cddp__rendezvous v;
  cddp__join_table table;
  cddp__address a;
  char name[64];
  cddp_result r = cddp__rendezvous_init(&v, at, d, h);
  h->joined = true;
  cddp__store32(&h->claimant, CDDP__CLAIMS_OVER);
  if (r == CDDP_OK) r = cddp__join_find(&v, &table);
  if (r == CDDP_OK) r = cddp__compare_ranks(&table.info, &v.members[0].info);
  if (r == CDDP_OK) r = cddp__join_memory(&v, &table);
  if (r == CDDP_OK) r = cddp__door_make(&v, table.size);
  if (r == CDDP_OK) {
    snprintf(name, sizeof name, "%s-%d", v.name, at->rank);
    cddp__unix_name(&a, name);
    if (cddp__listen_address(&a, &h->claim) == 0) cddp__own_socket(h->claim);
    r = cddp__join_group(out, &v);
  }
  if (r == CDDP_OK && table.job != 0)
    r = cddp__record_open(&h->record, table.job, at->rank, h->size, h->window - table.size + 1);
  cddp__rendezvous_free(&v);
  return r;
}

/* --- all of it --- */

/* Meets the other ranks and builds the group of all, after which h has the shared memory and
   process ids of its ranks. After a failure there may be a group too, which the caller leaves. */
static cddp_result cddp__meet(cddp_group **out, cddp__place *at, const cddp_group_desc *d,
                              cddp__host *h) {
  cddp__rendezvous v;
  const cddp__server *s;
  uint32_t refused;
  cddp_result r = cddp__rendezvous_init(&v, at, d, h);
  *out = NULL;
  if (r == CDDP_OK) r = cddp__claim_rank(&v);
  if (at->listen_fd >= 0) cddp__store32(&cddp__listen_fd_user, (uint32_t)getpid());
  if (r == CDDP_OK && v.serves) {
    r = cddp__open_store(&v, v.deadline);
    if (r != CDDP_OK && at->listen_fd_lost)
      r = cddp__fail_in(r,
                        "descriptor %s (CDDP_LISTEN_FD) of the launcher is not here: a "
                        "program between it and this one has closed it; ",
                        getenv("CDDP_LISTEN_FD"));
  }
  cddp__close_fd(&at->listen_fd);
  if (r == CDDP_OK) r = cddp__gather(&v);
  if (r == CDDP_OK) r = cddp__pass_on(&v, out);
  cddp__tell_failure(&v, *out, r);
  s = v.store != NULL ? v.store->server : NULL; /* in this process */
  refused = s != NULL ? cddp__load32(&s->unproven) : 0;
  if (r == CDDP_TIMEOUT && refused > 0)
    r = cddp__fail_in(r, "%u connection%s with another CDDP_SECRET, or none, %s refused; ",
                      refused, refused > 1 ? "s" : "", refused > 1 ? "were" : "was");
  h->claims_end = cddp__now() + CDDP__CLAIMS_S;
  if (!at->by_hand || v.job_secret) cddp__store32(&h->claimant, CDDP__CLAIMS_OVER);
  if (r == CDDP_OK && h->net == NULL && h->size > 1) r = cddp__door_make(&v, h->size);
  if (r == CDDP_OK) {
    cddp__store32(&cddp__met_before, v.mark);
    cddp__watch_processes(h);
    /* The store's port is held, without listening, while the group lives: else the system might
       give it to the next job that asks for a free one, which would seem to be a second one. */
    if (s != NULL) h->port = fcntl(s->listeners[0], F_DUPFD_CLOEXEC, 0);
    if (h->port >= 0) cddp__own_socket(h->port);
  }
  cddp__rendezvous_free(&v); /* the server stops listening */
  if (h->port >= 0) shutdown(h->port, SHUT_RD);
  return r;
}

CDDP__COLD_END

/* >>p2p -------------------------------------------------------------------------------------------
   send and recv between ranks of a host; those to other hosts pass through >>hosts.
   Owns: of a slot the send requests, events and waiting; of the group the lists of receives and
   what it keeps of its sends. Lock: p2p_lock.
   Touches peers' slots: a receiver takes a send, and bumps the sender's events.
   Entry points: cddp__start_send and _finish_send, cddp__post_recv and _finish_recv,
   cddp__serve_idle.
   Works as follows: a sender posts a send request (destination, tag, where the bytes are) in its
   own slot; the receiver looks through the sender's requests, copies the bytes itself and marks
   the request done. Bytes in shared memory are read where they are, other messages and small ones
   from a copy, so that their send returns at once. Each side bumps the other's events, on which
   it may sleep. A rank that waits for anything, collectives included, also serves its own
   receives: an exchange needs no thread. */

#define CDDP__EAGER ((size_t)64 << 10) /* shared memory up to this size is copied all the same */
#define CDDP__STAGED_MAX ((size_t)256 << 20) /* bytes in copies per group before a send waits */

static void cddp__notify(cddp_group *g, int rank) {
  cddp__slot *s = cddp__slot_of(g, rank);
  cddp__add32(&s->events, 1);
  if (cddp__load32(&s->waiting) != 0) cddp__futex_wake(&s->events);
}

static cddp__send_request *cddp__send_at(const cddp_group *g, int index) { /* of this rank */
  int block = 0, size = CDDP__SENDS;
  for (; index >= size; block++, size *= 2) index -= size;
  return &g->sends[block][index];
}

static int cddp__send_count(const cddp_group *g) { /* of this rank, free and used */
  int block = 0, n = 0;
  for (; block < CDDP__SEND_BLOCKS && g->sends[block] != NULL; block++) n += CDDP__SENDS << block;
  return n;
}

/* Whether the receiver may still read one of this rank's own sends. */
static bool cddp__send_open(const cddp_group *g, int index) {
  uint32_t state = cddp__load32(&cddp__send_at(g, index)->state) & 255;
  return state == CDDP__SEND_POSTED || state == CDDP__SEND_TAKEN;
}

/* Memory for more sends; the first index in it, -1 with the error set. p2p_lock held. */
static int cddp__more_sends(cddp_group *g) {
  int block = 0, count = cddp__send_count(g);
  size_t bytes;
  while (block < CDDP__SEND_BLOCKS && g->sends[block] != NULL) block++;
  if (block == CDDP__SEND_BLOCKS) {
    cddp__fail(CDDP_OUT_OF_MEMORY, "%d messages are on their way already", count);
    return -1;
  }
  bytes = ((size_t)CDDP__SENDS << block) * sizeof(cddp__send_request);
  g->sends[block] = (cddp__send_request *)cddp__arena_alloc(g->host, bytes, CDDP__FOR_MESSAGE);
  if (g->sends[block] == NULL) return -1;
  cddp__slot_of(g, g->rank)->more_sends[block] = cddp__ref_of(g->host, g->sends[block], bytes);
  return count;
}

/* Index of a send to post in. -1: none is free, or too many bytes are on their way; then a send
   with a handle (always) gets one all the same, but for want of memory. Frees sends whose receiver
   is done and whose call has returned, and copies beyond what is kept for reuse. p2p_lock held. */
static int cddp__unused_send(cddp_group *g, size_t bytes, bool always) {
  size_t staged = 0, kept = 0, size = 0;
  int i, best = -1, n = cddp__send_count(g);
  for (i = 0; i < n; i++) {
    cddp__send_request *p = cddp__send_at(g, i);
    bool fits = p->stage_size >= bytes && (size < bytes || p->stage_size < size);
    if (p->staged && !cddp__send_open(g, i)) {
      p->staged = false;
      cddp__store32(&p->state, CDDP__SEND_FREE);
    }
    if (p->staged) {
      staged += p->stage_size;
    } else if (p->stage != NULL && (kept += p->stage_size) > CDDP__STAGED_MAX) {
      cddp__arena_free(g->host, p->stage);
      p->stage = NULL;
      p->stage_size = 0;
    }
    if (cddp__load32(&p->state) != CDDP__SEND_FREE || (best >= 0 && !fits) ||
        (!always && i >= CDDP__SENDS))
      continue;
    best = i;
    size = p->stage_size;
  }
  if (always) return best >= 0 ? best : cddp__more_sends(g);
  return staged > 0 && bytes > CDDP__STAGED_MAX - cddp__min(staged, CDDP__STAGED_MAX) ? -1 : best;
}

/* Copies the message into the send's stage. p2p_lock held. */
static cddp_result cddp__stage(cddp_group *g, cddp__send_request *p, const void *buf,
                               size_t bytes) {
  if (p->stage_size < bytes || p->stage == NULL) {
    size_t size = 4096;
    while (size < bytes && size < CDDP__HUGE_PAGE) size *= 2;
    size = cddp__round_up(cddp__max(bytes, 1), size);
    cddp__arena_free(g->host, p->stage);
    p->stage_size = 0;
    p->stage = cddp__arena_alloc(g->host, size, CDDP__FOR_MESSAGE);
    if (p->stage == NULL) return CDDP_OUT_OF_MEMORY;
    p->stage_size = size;
  }
  cddp__copy(p->stage, buf, bytes);
  p->staged = true;
  p->ref = cddp__ref_of(g->host, p->stage, bytes);
  return CDDP_OK;
}

/* Posts a send if there is room (*posted; always: there is). *send is its index while the buffer
   is in use, else -1. */
static cddp_result cddp__try_post(cddp_group *g, const cddp__call *c, bool always, bool *posted,
                                  int *send) {
  cddp__slot *slot = cddp__slot_of(g, g->rank);
  size_t bytes = c->count * c->esize;
  cddp__send_request *p;
  cddp_result r = CDDP_OK;
  int i;
  *send = -1;
  pthread_mutex_lock(&g->p2p_lock);
  i = cddp__unused_send(g, bytes, always);
  *posted = i >= 0;
  if (i < 0 && always) r = CDDP_OUT_OF_MEMORY;
  if (i >= 0) {
    p = cddp__send_at(g, i);
    p->ref = cddp__ref_of(g->host, c->send, bytes);
    if (bytes <= CDDP__EAGER || p->ref.kind == CDDP__REF_NONE || c->root == g->rank)
      r = cddp__stage(g, p, c->send, bytes);
    else
      *send = i;
  }
  if (i >= 0 && r == CDDP_OK) {
    p->to = c->root;
    p->tag = c->tag;
    p->dtype = c->dtype;
    p->count = c->count;
    p->number = ++g->send_number;
    CDDP__POINT("post");
    cddp__store32(&p->state, CDDP__POSTED_TO(c->root));
    if ((uint32_t)i >= cddp__load32(&slot->send_top))
      cddp__store32(&slot->send_top, (uint32_t)i + 1);
  }
  pthread_mutex_unlock(&g->p2p_lock);
  if (*posted && r == CDDP_OK) cddp__notify(g, c->root);
  return r;
}

/* The oldest send from q->from to this rank with q's tag, or NULL. One look may come upon a send
   and have passed by the place of an older one, posted there behind its back just before. Whatever
   is older than a send that has been seen is there for a second look. */
static cddp__send_request *cddp__look_for_send(cddp_group *g, const cddp_work *q) {
  cddp__slot *slot = cddp__slot_of(g, q->from);
  uint32_t i, n = CDDP__SENDS, left = cddp__load32(&slot->send_top);
  cddp__send_request *best = NULL;
  int block;
  for (block = 0; left > 0 && block < CDDP__SEND_BLOCKS; block++, n *= 2) {
    void *at = slot->sends;
    cddp__send_request *p;
    if (block > 0 && cddp__locate(g->host, &slot->more_sends[block], &at) != CDDP_OK) at = NULL;
    for (p = (cddp__send_request *)at, i = 0; i < n && i < left && p != NULL; i++, p++) {
      if (cddp__load32(&p->state) != CDDP__POSTED_TO(g->rank) || p->tag != q->call.tag)
        continue;
      if (best == NULL || p->number < best->number) best = p;
    }
    left -= left < n ? left : n;
  }
  return best;
}

static void cddp__complete_recv(cddp_work *q, cddp_result r) {
  q->result = r;
  snprintf(q->text, sizeof q->text, "%s", r != CDDP_OK ? cddp__error_text : "");
  q->done = true;
}

/* Whether a message of that count and dtype is what the recv asks for; if not, the ranks disagree
   and the recv has failed. */
static bool cddp__recv_fits(cddp_group *g, cddp_work *q, uint64_t count, uint32_t dtype) {
  const cddp__call *c = &q->call;
  if (count == c->count && dtype == c->dtype) return true;
  cddp__fail(CDDP_MISMATCH,
             "ranks disagree: rank %d sent count %" PRIu64
             " %s with tag %d, rank %d receives count %zu %s",
             q->from, count, cddp__dtype_names[dtype & 7], c->tag, g->rank, c->count,
             cddp__dtype_names[c->dtype]);
  cddp__complete_recv(q, cddp__break(g, CDDP_MISMATCH));
  return false;
}

/* Copies the message of a matching send, or refuses it; leaves it alone if its sender has just
   withdrawn it. p2p_lock held. */
static void cddp__take_send(cddp_group *g, cddp_work *q, cddp__send_request *p) {
  void *from = NULL;
  cddp_result r;
  if (!cddp__swap32(&p->state, CDDP__POSTED_TO(g->rank), CDDP__TAKEN_BY(g->rank))) return;
  if (!cddp__recv_fits(g, q, p->count, p->dtype)) {
    cddp__store32(&p->state, CDDP__SEND_REFUSED);
  } else {
    CDDP__POINT("take");
    r = cddp__locate(g->host, &p->ref, &from);
    if (r == CDDP_OK && p->count > 0) memcpy(q->call.recv, from, p->count * q->call.esize);
    if (r == CDDP_OK) r = cddp__check_group(g); /* or the sender may have taken its buffer back */
    cddp__complete_recv(q, r == CDDP_OK ? r : cddp__break(g, r));
    cddp__store32(&p->state, CDDP__SEND_DONE);
  }
  CDDP__POINT("taken");
  cddp__notify(g, q->from);
}

/* Whether an older receive has a claim to what comes from q->from with q's tag. p2p_lock held. */
static bool cddp__is_claimed(const cddp_group *g, const cddp_work *q) {
  const cddp_work *w;
  for (w = g->recvs; w != q; w = w->next)
    if (!w->done && w->call.tag == q->call.tag &&
        (w->call.root == q->from || w->call.root == CDDP_ANY))
      return true;
  return false;
}

/* Serves receives whose message has come, the oldest first. p2p_lock held. */
static void cddp__serve_recvs(cddp_group *g) {
  cddp_work *q;
  int i;
  if (g->hosts != NULL) cddp__hosts_serve(g);
  for (q = g->recvs; q != NULL; q = q->next) {
    bool any = q->call.root == CDDP_ANY;
    for (i = 0; !q->done && i < (any ? g->size : 1); i++) {
      cddp__send_request *p;
      q->from = any ? (g->next_any + i) % g->size : q->call.root;
      if (cddp__is_claimed(g, q)) continue;
      if (g->members[q->from] < 0)
        cddp__hosts_match(g, q);
      else if (cddp__look_for_send(g, q) != NULL && (p = cddp__look_for_send(g, q)) != NULL)
        cddp__take_send(g, q, p); /* the oldest, see there */
      if (any && q->done) g->next_any = q->from + 1;
    }
  }
}

static void cddp__serve_idle(cddp_group *g) {
  if (pthread_mutex_trylock(&g->p2p_lock) != 0) return;
  if (g->recvs != NULL || g->hosts != NULL) cddp__serve_recvs(g);
  pthread_mutex_unlock(&g->p2p_lock);
}

static void cddp__post_recv(cddp_group *g, cddp_work *q) {
  cddp_work **at = &g->recvs;
  int cancel; /* no thread is cancelled while it holds a lock */
  q->next = NULL;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
  pthread_mutex_lock(&g->p2p_lock);
  while (*at != NULL) at = &(*at)->next;
  *at = q;
  cddp__serve_recvs(g);
  pthread_mutex_unlock(&g->p2p_lock);
  pthread_setcancelstate(cancel, &cancel);
}

/* What a thread waits for: a receive (q), a send (its index), or room for one more (-1). */
typedef struct cddp__p2p {
  const cddp_work *q;
  int send, peer, tag;
  size_t bytes;
} cddp__p2p;

static bool cddp__p2p_ready(cddp_group *g, const cddp__p2p *m) {
  bool ready;
  pthread_mutex_lock(&g->p2p_lock);
  cddp__serve_recvs(g);
  if (m->q != NULL)
    ready = m->q->done;
  else if (m->send >= 0)
    ready = !cddp__send_open(g, m->send);
  else if (g->members[m->peer] < 0)
    ready = cddp__hosts_room(g, m->peer, m->bytes);
  else
    ready = cddp__unused_send(g, m->bytes, false) >= 0;
  pthread_mutex_unlock(&g->p2p_lock);
  return ready;
}

/* Whether a rank that is gone has left in good order. */
static bool cddp__rank_left(const cddp_group *g, int rank) {
  if (g->members[rank] < 0) return g->hosts->peers[rank].error == CDDP__LEFT;
  return cddp__load32(&cddp__slot_of(g, rank)->state) == CDDP__SLOT_LEFT;
}

/* The rank for which it is of no use to wait any longer; -1: none. From any rank: one that died, or
   the last one that left. */
static int cddp__gone_peer(const cddp_group *g, const cddp__p2p *m) {
  int p, gone = -1, n = 1;
  if (m->peer != CDDP_ANY)
    return m->peer != g->rank && cddp__rank_gone(g, m->peer) ? m->peer : -1;
  for (p = 0; p < g->size; p++) {
    if (p == g->rank || !cddp__rank_gone(g, p)) continue;
    if (!cddp__rank_left(g, p)) return p;
    gone = p;
    n++;
  }
  return n == g->size ? gone : -1;
}

/* Breaks the group if the peer of a send or recv is gone. */
static cddp_result cddp__check_peer(cddp_group *g, const cddp__p2p *m) {
  char doing[64];
  int gone = cddp__gone_peer(g, m);
  if (gone < 0) return CDDP_OK;
  snprintf(doing, sizeof doing, "%s, tag %d",
           m->q == NULL            ? "send to it"
           : m->peer == CDDP_ANY ? "recv from any rank"
                                   : "recv from it",
           m->tag);
  return cddp__report_lost(g, gone, doing);
}

/* The deadline has passed: the group's, or (limit >= 0, seconds) the caller's own, of which nobody
   else is told. */
static cddp_result cddp__p2p_late(cddp_group *g, const cddp__p2p *m, double limit) {
  const char *what = m->q != NULL ? "recv from" : "send to";
  char who[160] = "any rank", where[CDDP__WHERE_MAX + 64] = "";
  if (m->peer != CDDP_ANY) cddp__name_rank(g, m->peer, who, sizeof who);
  if (limit >= 0)
    return cddp__fail(CDDP_TIMEOUT,
                      "cddp_wait_for: no end after %g s: %s %s, tag %d, on rank %d; it goes on",
                      limit, what, who, m->tag, g->rank);
  if (m->peer != CDDP_ANY) cddp__describe_wait(g, m->peer, where, sizeof where);
  cddp__fail(CDDP_TIMEOUT,
             "timed out after %g s: %s %s, tag %d, on rank %d: the other side did not come%s",
             g->timeout_s, what, who, m->tag, g->rank, where);
  return cddp__break(g, CDDP_TIMEOUT);
}

/* Waits with an eye on the peer, until the group's deadline, or for `limit` seconds if that is not
   negative. A thread may be cancelled here while it sleeps for a receive. */
static cddp_result cddp__p2p_wait(cddp_group *g, const cddp__p2p *m, double limit) {
  cddp__slot *slot = cddp__slot_of(g, g->rank);
  cddp_result r = CDDP_OK;
  cddp__wait w;
  int cancel;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
  cddp__wait_begin(&w, limit >= 0 ? limit : g->timeout_s, limit == 0 ? 0 : CDDP__YIELDS);
  for (;;) {
    uint32_t events = cddp__load32(&slot->events);
    if (cddp__p2p_ready(g, m)) break;
    if ((r = cddp__check_failure(g)) != CDDP_OK) break;
    if (cddp__wait_yields(&w)) continue;
    if ((r = cddp__wait_tick(g, &w)) != CDDP_OK) break;
    if (cddp__gone_peer(g, m) >= 0 && !cddp__p2p_ready(g, m)) r = cddp__check_peer(g, m);
    if (r == CDDP_OK && w.late) r = cddp__p2p_late(g, m, limit);
    if (r != CDDP_OK) break;
    if (m->q != NULL) { /* no lock is held */
      pthread_setcancelstate(cancel, NULL);
      pthread_testcancel();
      pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    }
    if (g->hosts != NULL)
      cddp__hosts_poll(g, m->peer);
    else
      cddp__wait_sleep(g, &w, &slot->waiting, &slot->events, events);
  }
  pthread_setcancelstate(cancel, &cancel);
  return r;
}

/* Posts a send; without a handle it waits for room. *send >= 0: the buffer is in use until
   cddp__finish_send. */
static cddp_result cddp__start_send(cddp_group *g, const cddp__call *c, bool handle, int *send) {
  cddp__p2p m = {NULL, -1, c->root, c->tag, c->count * c->esize};
  bool posted = false;
  cddp_result r;
  do {
    if ((r = cddp__check_group(g)) != CDDP_OK) return r;
    if ((r = cddp__check_peer(g, &m)) != CDDP_OK) return r;
    if (CDDP__UNLIKELY(g->members[c->root] < 0))
      r = cddp__hosts_post(g, c, handle, &posted);
    else
      r = cddp__try_post(g, c, handle, &posted, send);
    if (r == CDDP_OK && !posted) r = cddp__p2p_wait(g, &m, -1);
  } while (r == CDDP_OK && !posted);
  return r;
}

/* limit: see cddp__p2p_wait. With one, CDDP_TIMEOUT leaves all as it is, of receives too. After
   another failure the send is taken back, so that the buffer is the caller's again: a receiver that
   has begun to copy finishes first, unless it dies. */
static cddp_result cddp__finish_send(cddp_group *g, int send, double limit) {
  cddp__p2p m = {NULL, send, -1, 0, 0};
  cddp__send_request *p;
  double deadline;
  cddp_result r;
  if (send < 0) return CDDP_OK;
  p = cddp__send_at(g, send);
  m.peer = p->to;
  m.tag = p->tag;
  r = cddp__p2p_wait(g, &m, limit);
  if (r == CDDP_TIMEOUT && limit >= 0) return r;
  if (r == CDDP_OK && cddp__load32(&p->state) == CDDP__SEND_REFUSED) r = cddp__check_failure(g);
  if (r == CDDP_OK) {
    pthread_mutex_lock(&g->p2p_lock);
    cddp__store32(&p->state, CDDP__SEND_FREE);
    pthread_mutex_unlock(&g->p2p_lock);
  } else if (!cddp__swap32(&p->state, CDDP__POSTED_TO(m.peer), CDDP__SEND_FREE)) {
    deadline = cddp__now() + 5;
    while (cddp__send_open(g, send) && !cddp__rank_gone(g, m.peer) && cddp__now() < deadline)
      cddp__sleep(1e-5);
  }
  return r;
}

/* Gives up a receive, which then ends at once; false: its message has come, or it has failed. */
static bool cddp__close_recv(cddp_work *q) {
  bool open;
  pthread_mutex_lock(&q->group->p2p_lock);
  if ((open = !q->done)) q->result = CDDP_ABORTED;
  q->done = true;
  pthread_mutex_unlock(&q->group->p2p_lock);
  return open;
}

/* The rank whose message this thread received last; -1: none yet. */
static __thread int cddp__last_source = -1;

static cddp_result cddp__finish_recv(cddp_group *g, cddp_work *q, double limit) {
  cddp__p2p m = {q, -1, q->call.root, q->call.tag, 0};
  cddp_work **at = &g->recvs;
  cddp_result r = cddp__p2p_wait(g, &m, limit);
  if (r == CDDP_TIMEOUT && limit >= 0) return r;
  pthread_mutex_lock(&g->p2p_lock);
  while (*at != q) at = &(*at)->next;
  *at = q->next;
  pthread_mutex_unlock(&g->p2p_lock);
  if (r == CDDP_OK && q->result == CDDP_OK) {
    cddp__last_source = q->from;
    if (cddp__record_at(g, q->record) != NULL) cddp__record_at(g, q->record)->root = q->from;
  }
  if (r != CDDP_OK || q->result == CDDP_OK || q->text[0] == 0) return r != CDDP_OK ? r : q->result;
  return cddp__fail(q->result, "%s", q->text);
}

CDDP__COLD

/* >>hosts --------------------------------------------------------------------------------------
   Rounds and collectives of groups whose ranks are on several hosts.
   Job: carry the headers of a round, the bytes of collectives and messages, and failures, from host
   to host.
   Owns: cddp__hosts, its connections and its scratch. Locks: p2p_lock for MESSAGES connections;
   DATA connections belong to the thread that runs the group's collectives.
   May touch: headers and staging buffers of remote ranks on this host's control block, which nobody
   else writes.
   Entry points: those in >>hooks for rooms above; its carrier, cddp__hosts_run and _average;
   cddp__hosts_attach and _leave. Works as follows.

   ROUNDS. The control block of such a group has headers for all its ranks on each of the hosts. The
   lowest rank of a host in the group leads it: in a round it waits for its host's ranks, sends
   their headers to the other leaders, gets theirs, and writes those into the remote ranks' places.
   So all ranks compare all headers, as on one host: disagreement, small all_reduce, splits and what
   a cddp_ddp agrees on need nothing else. Up to CDDP__DIRECT_HOSTS leaders exchange directly; more
   in log2(hosts) exchanges, in each of which a leader passes on all it has. Directly, the ranks'
   shares of a short collective ride along, out of their staging buffers and into those of the
   remote ranks: it is the one round of >>collectives then, and costs what a barrier costs. A local
   round is one of the host's ranks alone.

   COLLECTIVES. What does not fit into headers or staging buffers begins with one round, which tells
   where buffers are, and then moves in chunks (cddp__flow). Each rank owns a part of the chunk. All
   hosts send the owner what they have for it (A), sums straight out of their ranks' buffers, or
   bytes; the owner sends the hosts what it has (B). all_reduce, reduce and broadcast are A and B,
   which moves the fewest bytes; reduce_scatter, scatter and all_to_all are A alone, the
   gathers B alone. For a host one of its ranks acts, so that what several want or have passes once.
   Parts go in pieces: while one is added up others are on their way. A short all_reduce goes to all
   at once, and all add up all. What ranks of the same host must see of each other's buffers, and
   cannot, passes through shared scratch, which bounds a chunk; else a call is one chunk.

   THE CANONICAL SUM over hosts: a host adds up those subtrees of the canonical tree whose ranks are
   all its own (of hosts with consecutive ranks, aligned: one) and sends these, f16 and bf16 as f32
   once anything was added; the owner adds the rest of the tree. So the bits are those of one host.
   Ranks scattered over hosts have many such subtrees and send more.

   MESSAGES (send, recv) to another host are written to their connection at once as far as the
   system takes them; the rest is copied and goes out in later calls, of any group. Whatever comes
   is read into memory, unless nobody waits for it and 256 MiB have come already.

   FAILURE. The rank that breaks the group sends the ranks of the other hosts a notice (in large
   groups: the lowest rank of each host). Every rank that knows of the failure ends its DATA
   connections. How a rank died is known on its own host only, so a rank whose connection has ended
   waits CDDP__CAUSE_S for a notice. In a healthy group a rank that sees one of its host dead, or
   leaves because another group has failed, sends an early notice: no call fails of that, but a call
   that fails of a loss later names the dead.

   tests/bench/scale.md reckons what all of this costs with 4,096 ranks on 512 hosts. */

#define CDDP__DIRECT_HOSTS 8 /* above, headers go by exchanges */
#define CDDP__NEWS_S 0.1     /* for a failure's cause to arrive */
#define CDDP__LOOK_S 1e-3    /* between a leader's looks for notices: giving up takes longer */
#define CDDP__CAUSE_S 0.5    /* the same where other ranks may have seen how one ended */
#define CDDP__HEADER_BYTES sizeof(cddp__op_header) /* on the wire too */
#define CDDP__PIECE ((size_t)64 << 10) /* bytes of a part of a piece; of all parts at most: */
#define CDDP__PIECE_MOST ((size_t)2 << 20)
#define CDDP__WHOLE_MOST ((size_t)32 << 10) /* bytes of a slice, times hosts, that all add up */
#define CDDP__AHEAD 4 /* pieces on their way before the first comes back */
#define CDDP__SLOTS (CDDP__AHEAD + 1)
#define CDDP__FRAMES (2 * CDDP__SLOTS) /* posted for one host at a time, at most */
#define CDDP__SCRATCH ((size_t)2 << 20) /* bytes of a rank's share in shared scratch */
#define CDDP__RECV_AREA ((size_t)1 << 20) /* and of what comes in for its host */
#define CDDP__HALF (CDDP__SCRATCH + CDDP__RECV_AREA) /* there are two of each, used in turn */

/* --- messages on their way --- */

static bool cddp__is_lost(const cddp_group *g, int rank) {
  return cddp__load32(&g->hosts->peers[rank].lost) != 0;
}

/* Notes that a peer is gone, once, and how its connection ended. */
static void cddp__note_lost(cddp_group *g, int rank, int error) {
  cddp__peer *p = &g->hosts->peers[rank];
  if (cddp__load32(&p->lost) != 0) return;
  p->lost_at = cddp__now();
  p->error = error;
  cddp__store32(&p->lost, 1);
}

/* Begins to call a rank of the group; NULL with the error set. */
static cddp__link *cddp__call_rank(const cddp_group *g, int rank, int purpose) {
  cddp__link *l = cddp__link_call(g->hosts->net, g->world[rank], purpose, g->id);
  if (l != NULL) l->rank = rank;
  return l;
}

/* The MESSAGES connection to a rank; NULL with the error set. p2p_lock held. */
static cddp__link *cddp__p2p_link(cddp_group *g, int peer) {
  cddp__link **at = &g->hosts->links;
  while (*at != NULL && (*at)->rank != peer) at = &(*at)->next;
  if (*at == NULL) *at = cddp__call_rank(g, peer, CDDP__LINK_MESSAGES);
  return *at;
}

/* Bytes of messages that wait to be sent. p2p_lock held. */
static size_t cddp__p2p_queued(const cddp_group *g) {
  const cddp__link *l;
  size_t sum = 0;
  for (l = g->hosts->links; l != NULL; l = l->next) sum += cddp__buffer_size(&l->out);
  return sum;
}

static void cddp__p2p_flush(cddp_group *g) { /* p2p_lock held */
  cddp__link *l;
  for (l = g->hosts->links; l != NULL; l = l->next) {
    cddp__link_flush(g->hosts->net, l);
    if (l->state == CDDP__LINK_DEAD) cddp__note_lost(g, l->rank, l->error);
  }
}

/* Accepts connections, hears of failures elsewhere, sends what is left of all groups' messages. */
static void cddp__hosts_look(cddp_group *g) {
  cddp__host *h = g->host;
  cddp__net_look(h);
  if (pthread_mutex_trylock(&h->lock) != 0) return;
  for (g = h->groups; g != NULL; g = g->next) {
    if (g->hosts == NULL || pthread_mutex_trylock(&g->p2p_lock) != 0) continue;
    cddp__p2p_flush(g);
    pthread_mutex_unlock(&g->p2p_lock);
  }
  pthread_mutex_unlock(&h->lock);
}

/* --- failure --- */

static void cddp__hosts_hang_up(cddp_group *g) {
  int p;
  for (p = 0; p < g->size; p++) {
    const cddp__link *l = __atomic_load_n(&g->hosts->peers[p].data, __ATOMIC_ACQUIRE);
    if (l != NULL) shutdown(l->fd, SHUT_WR);
  }
}

/* Whether a rank of another host is gone, and a notice that says why is here or has had time to
   arrive: none follows a goodbye, and a rank that was alone on its host leaves none to send one. */
static bool cddp__hosts_gone(const cddp_group *g, int rank, char *how, size_t n) {
  const cddp__peer *p = &g->hosts->peers[rank];
  bool brief;
  if (!cddp__is_lost(g, rank)) return false;
  if (how != NULL) cddp__describe_link_end(p->error, how, n);
  brief = p->error == CDDP__LEFT || g->hosts->nodes[p->host].size == 1;
  return cddp__has_cause(&g->block->cause) ||
         cddp__now() >= p->lost_at + (brief ? CDDP__NEWS_S : CDDP__CAUSE_S);
}

/* In a healthy group: sends the other hosts an early notice if a rank of this host has died, which
   they cannot see, or (leaving) if another group has failed of a loss. A rank that exited with code
   0 may have done so in good order, unless this rank leaves with it. */
static void cddp__early_notice(cddp_group *g, bool leaving) {
  const cddp__net *n = g->hosts->net;
  char who[160], how[96], text[CDDP__ERROR_MAX] = "";
  int p;
  if (cddp__load32(&g->block->broken) != 0 || cddp__load32(&g->block->cause.state) != 0) return;
  for (p = 0; p < g->size && text[0] == 0; p++) {
    if (p == g->rank || g->members[p] < 0 || !cddp__rank_gone(g, p) ||
        cddp__load32(&cddp__slot_of(g, p)->state) == CDDP__SLOT_LEFT)
      continue;
    cddp__describe_end(g, p, how, sizeof how);
    if (!leaving && strcmp(how, "exited with code 0") == 0) continue;
    cddp__name_rank(g, p, who, sizeof who);
    snprintf(text, sizeof text, "%s %s; rank %d %s", who, how, g->rank,
             leaving ? "left the group after that" : "saw it end");
  }
  if (text[0] == 0 && leaving && cddp__has_cause(&n->loss))
    snprintf(text, sizeof text, "rank %d left the group after a failure in another one: %.*s",
             g->rank, CDDP__ERROR_MAX - 80, n->loss.text);
  if (text[0] != 0 && cddp__note_cause(&g->block->cause, CDDP_PEER_LOST, text))
    cddp__tell_all(n, g->id, g->world, g->size, CDDP__NOTICE_EARLY | (uint32_t)CDDP_PEER_LOST,
                   text);
}

/* --- send and recv --- */

/* Whether a send without a handle has room: its connection is made, and not too much waits. */
static bool cddp__hosts_room(cddp_group *g, int peer, size_t bytes) { /* p2p_lock held */
  const cddp__link *l = cddp__p2p_link(g, peer);
  size_t queued = cddp__p2p_queued(g);
  if (l == NULL || l->state == CDDP__LINK_GREETING || l->state == CDDP__LINK_DEAD) return false;
  return queued == 0 || bytes + queued <= CDDP__STAGED_MAX;
}

/* Sends a message to a rank of another host as far as the system takes it, and keeps the rest.
   *posted false: there is no room yet (but for always), or the rank is lost. */
static cddp_result cddp__hosts_post(cddp_group *g, const cddp__call *c, bool always, bool *posted) {
  const cddp__net *n = g->hosts->net;
  size_t bytes = c->count * c->esize, sent = 0, skip;
  cddp__frame_head head =
      cddp__link_head(CDDP__FRAME_MESSAGE, (uint32_t)c->tag, c->dtype, c->count, bytes);
  cddp_result r = CDDP_OK;
  cddp__link *l;
  pthread_mutex_lock(&g->p2p_lock);
  if ((l = cddp__p2p_link(g, c->root)) == NULL) {
    pthread_mutex_unlock(&g->p2p_lock);
    return CDDP_SYSTEM;
  }
  cddp__link_flush(n, l);
  *posted = l->state != CDDP__LINK_DEAD && (always || cddp__hosts_room(g, c->root, bytes));
  if (*posted && l->state == CDDP__LINK_UP && cddp__buffer_size(&l->out) == 0)
    (void)cddp__link_io(l, &head, c->send, bytes, &sent, true);
  if (*posted && sent < sizeof head + bytes && l->state != CDDP__LINK_DEAD) {
    if (cddp__buffer_reserve(&l->out, sizeof head + bytes - sent)) {
      skip = cddp__min(sent, sizeof head);
      cddp__buffer_add(&l->out, (const char *)&head + skip, sizeof head - skip);
      sent -= skip;
      if (sent < bytes) cddp__buffer_add(&l->out, (const char *)c->send + sent, bytes - sent);
    } else {
      r = CDDP_OUT_OF_MEMORY;
      if (sent > 0) cddp__link_end(l, ENOMEM); /* what follows could not be told from the rest */
    }
  }
  if (l->state == CDDP__LINK_DEAD) cddp__note_lost(g, c->root, l->error);
  pthread_mutex_unlock(&g->p2p_lock);
  return r;
}

/* Gives the oldest message that fits, if there is one, to a recv. p2p_lock held. */
static void cddp__hosts_match(cddp_group *g, cddp_work *q) {
  cddp__mailbox *b = &g->hosts->mailbox;
  cddp__message **at = &b->first, *m;
  while ((m = *at) != NULL && (m->tag != q->call.tag || m->from != q->from)) at = &m->next;
  if (m == NULL) return;
  *at = m->next;
  if (m->next == NULL) b->end = at;
  b->bytes -= m->size;
  if (cddp__recv_fits(g, q, m->count, m->dtype)) {
    if (m->size > 0) memcpy(q->call.recv, m + 1, m->size);
    cddp__complete_recv(q, CDDP_OK);
  }
  cddp__free(&g->hosts->net->allocator, m);
}

/* Whether a recv from that rank waits that no message fits yet. p2p_lock held. */
static bool cddp__p2p_wanted(const cddp_group *g, int rank) {
  const cddp_work *q;
  for (q = g->recvs; q != NULL; q = q->next)
    if (!q->done && (q->call.root == rank || q->call.root == CDDP_ANY)) return true;
  return false;
}

/* Sends and receives messages as far as possible without waiting. p2p_lock held. */
static void cddp__hosts_serve(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp__link **at, *l;
  cddp__message *m;
  cddp__net_look(g->host);
  for (at = &x->links; *at != NULL;) at = &(*at)->next;
  while ((*at = cddp__net_claim(g, CDDP__LINK_MESSAGES)) != NULL) at = &(*at)->next;
  for (l = x->links; l != NULL; l = l->next) {
    cddp__link_flush(x->net, l);
    while (l->state == CDDP__LINK_UP &&
           (x->mailbox.bytes <= CDDP__STAGED_MAX || cddp__p2p_wanted(g, l->rank)) &&
           (m = cddp__link_receive(x->net, l, SIZE_MAX / 16)) != NULL) {
      *x->mailbox.end = m;
      x->mailbox.end = &m->next;
      x->mailbox.bytes += m->size;
    }
    if (l->state == CDDP__LINK_DEAD) cddp__note_lost(g, l->rank, l->error);
  }
}

/* Sleeps for so many ms at most, or until there is news of one of n connections or somebody calls
   this rank. There is room for one more at the end of fds. */
static void cddp__hosts_sleep(cddp_group *g, struct pollfd *fds, int n, int ms) {
  const cddp__net *net = g->hosts->net;
  fds[n].fd = cddp__load32(&net->deaf) != 0 ? -1 : net->listener;
  fds[n].events = POLLIN;
  poll(fds, (nfds_t)n + 1, ms);
  cddp__hosts_look(g);
}

/* Sleeps until there may be news for a thread that waits for a message from or to peer: a few ms at
   most. The connection to the peer (CDDP_ANY: to each), made if need be, ends when that rank
   does. */
static void cddp__hosts_poll(cddp_group *g, int peer) {
  cddp__hosts *x = g->hosts;
  struct pollfd fds[4];
  cddp__link *l;
  bool any = peer == CDDP_ANY, remote = !any && g->members[peer] < 0;
  int n = 0, p;
  pthread_mutex_lock(&g->p2p_lock);
  for (p = 0; p < g->size; p++)
    if ((any || p == peer) && g->members[p] < 0 && (l = cddp__p2p_link(g, p)) != NULL)
      cddp__link_answered(l);
  for (l = x->links; l != NULL && n < 3; l = l->next) {
    bool out = l->state == CDDP__LINK_GREETING || cddp__buffer_size(&l->out) > 0;
    if (l->state == CDDP__LINK_DEAD || (l->rank != peer && !any && !out)) continue;
    fds[n].fd = l->fd;
    fds[n].events = POLLIN;
    if (out && l->state != CDDP__LINK_PROVING) fds[n].events = POLLIN | POLLOUT;
    n++;
  }
  pthread_mutex_unlock(&g->p2p_lock);
  cddp__hosts_sleep(g, fds, n, remote ? 5 : 1);
  cddp__early_notice(g, false);
}

/* --- moving frames of collectives --- */

/* A wait of this rank for frames to move. On its thread's stack. */
typedef struct cddp__traffic {
  cddp_group *g;
  cddp__wait wait;
  cddp_result result; /* once not CDDP_OK nothing moves any more */
  bool moved;         /* anything, in this round */
  int late;           /* a rank with which there is something left to do: a lost one, if any is */
  int nfds;           /* connections that this round waits for, in hosts.fds */
} cddp__traffic;

/* Takes over the DATA connections that others have made to this rank. */
static void cddp__claim_data(cddp_group *g) {
  cddp__link *l;
  while ((l = cddp__net_claim(g, CDDP__LINK_DATA)) != NULL) {
    if (g->hosts->peers[l->rank].data == NULL)
      __atomic_store_n(&g->hosts->peers[l->rank].data, l, __ATOMIC_RELEASE);
    else
      cddp__link_free(g->hosts->net, l);
  }
}

/* Nothing could be moved: polls, then sleeps until a watched descriptor is ready, for at most a
   few ms. It calls a late rank to which it has no DATA connection: the call ends when that does. */
static cddp_result cddp__traffic_pause(cddp__traffic *t) {
  cddp_group *g = t->g;
  cddp__hosts *x = g->hosts;
  cddp__slot *slot = cddp__slot_of(g, g->rank);
  bool joining = t->nfds == 0;
  cddp__link *l;
  cddp_result r;
  int i;
  if (t->wait.yields-- > 0) { /* with a core per rank it polls */
    if (g->spin < CDDP__SPIN) sched_yield();
    return CDDP_OK;
  }
  if ((r = cddp__wait_tick(g, &t->wait)) != CDDP_OK) return r;
  cddp__store32(&slot->awaits_at, (uint32_t)(uint64_t)(cddp__now() * 1000));
  cddp__store32(&slot->awaits, (uint32_t)t->late + 1);
  for (i = 0; i < g->size; i++) {
    if ((l = x->peers[i].data) == NULL) continue;
    if (l->state < CDDP__LINK_UP) joining = true;
    if (t->wait.due) cddp__link_answered(l);
  }
  cddp__hosts_sleep(g, x->fds, t->nfds, joining ? 1 : 5);
  if (t->wait.due) {
    if ((r = cddp__look_after_peers(g)) != CDDP_OK) return r;
    cddp__claim_data(g);
    pthread_mutex_lock(&g->p2p_lock);
    l = x->peers[t->late].data == NULL ? cddp__p2p_link(g, t->late) : NULL;
    if (l != NULL) cddp__link_answered(l);
    pthread_mutex_unlock(&g->p2p_lock);
  }
  if (cddp__hosts_gone(g, t->late, NULL, 0)) return cddp__report_lost(g, t->late, NULL);
  return t->wait.late ? cddp__break_late(g, t->late) : CDDP_OK;
}

/* The next pause ends when the link can go on. */
static void cddp__traffic_watch(cddp__traffic *t, const cddp__link *l, bool out) {
  struct pollfd *p = &t->g->hosts->fds[t->nfds];
  if (l == NULL || t->nfds >= 2 * t->g->size) return;
  p->fd = l->fd;
  p->events = out ? POLLOUT : POLLIN;
  p->revents = 0;
  t->nfds++;
}

/* The DATA connection to a rank, made if need be; NULL: it is not up yet, or the rank is lost. */
static cddp__link *cddp__data_link(cddp__traffic *t, int rank) {
  cddp_group *g = t->g;
  cddp__link *l = g->hosts->peers[rank].data;
  if (l == NULL && g->world[g->rank] < g->world[rank]) {
    l = cddp__call_rank(g, rank, CDDP__LINK_DATA);
    if (l == NULL) t->result = cddp__break(g, CDDP_SYSTEM);
    __atomic_store_n(&g->hosts->peers[rank].data, l, __ATOMIC_RELEASE);
  } else if (l == NULL) {
    cddp__claim_data(g);
    l = g->hosts->peers[rank].data;
  }
  if (l == NULL || cddp__link_shake(g->hosts->net, l)) return l;
  if (l->state == CDDP__LINK_DEAD)
    cddp__note_lost(g, rank, l->error);
  else
    cddp__traffic_watch(t, l, l->state != CDDP__LINK_PROVING);
  return NULL;
}

/* Posts a frame of `size` bytes to be sent or received. Those of one rank go in the order in which
   they were posted. */
static cddp__item *cddp__post_frame(cddp_group *g, bool out, int rank, const void *data,
                                    size_t size) {
  cddp__hosts *x = g->hosts;
  cddp__item *it = out ? &x->outs[x->out_count++] : &x->ins[x->in_count++];
  it->rank = rank;
  it->data = data;
  it->least = it->size = size;
  it->step = x->step;
  return it;
}

/* Goes on with the posted frames of one direction; whether some of a step before `due` are left. */
static bool cddp__traffic_round(cddp__traffic *t, cddp__item *items, int *count, bool out,
                                long due) {
  cddp__hosts *x = t->g->hosts;
  bool left = false;
  int i, done, kept = 0;
  x->pass++;
  for (i = 0; i < *count; i++) {
    cddp__item it = items[i];
    cddp__peer *p = &x->peers[it.rank];
    cddp__link *l = NULL;
    if (p->pass != x->pass && t->result == CDDP_OK) l = cddp__data_link(t, it.rank);
    if (l != NULL) {
      size_t *moved = out ? &l->sent : &l->got, before = *moved;
      done = cddp__link_data(l, it.data, it.least, it.size, out);
      t->moved = t->moved || done > 0 || *moved != before; /* slow is not late */
      if (done > 0) continue;
      if (done == 0) cddp__traffic_watch(t, l, out);
      if (done < 0) cddp__note_lost(t->g, it.rank, l->error);
    }
    p->pass = x->pass; /* the rank's other frames wait for this one */
    items[kept++] = it;
    if (it.step >= due) continue;
    left = true;
    if (t->late < 0 || !cddp__is_lost(t->g, t->late)) t->late = it.rank;
  }
  *count = kept;
  return left;
}

/* Moves posted frames until all that are to come have come, and all to be sent that were posted in
   a step before `due` have gone. The deadline runs as long as nothing moves, and a moment longer:
   ranks that know more of a late one can say so first. */
static cddp_result cddp__deliver(cddp_group *g, long due) {
  cddp__hosts *x = g->hosts;
  cddp__traffic t;
  bool left;
  memset(&t, 0, sizeof t);
  t.g = g;
  t.moved = true;
  do {
    if (t.moved)
      cddp__wait_begin(&t.wait, g->timeout_s + CDDP__NEWS_S, g->spin >= CDDP__SPIN ? 100 : 1);
    t.moved = false;
    t.late = -1;
    t.nfds = 0;
    left = cddp__traffic_round(&t, x->outs, &x->out_count, true, due);
    left = cddp__traffic_round(&t, x->ins, &x->in_count, false, LONG_MAX) || left;
    if (left && !t.moved && t.result == CDDP_OK) t.result = cddp__traffic_pause(&t);
  } while (left && t.result == CDDP_OK);
  cddp__store32(&cddp__slot_of(g, g->rank)->awaits, 0);
  if (t.result != CDDP_OK) x->out_count = x->in_count = 0;
  return t.result;
}

/* --- rounds --- */

/* The i-th of the group's ranks on a host; 0: the host's leader. */
static int cddp__rank_on(const cddp__hosts *x, int host, int i) {
  return x->ranks[x->nodes[host].first + i];
}

/* The header of the i-th rank of a host, as its leader has it. */
static cddp__op_header *cddp__header_in(const cddp__hosts *x, int host, int i) {
  return (cddp__op_header *)(void *)(x->headers + x->nodes[host].headers_at) + i;
}

/* Bytes of a rank's staging buffer that ride with the headers of a round, by one of them. */
static size_t cddp__ride_of(const cddp_group *g, const cddp__op_header *header, int rank) {
  uint32_t kind = header->call & 255, dtype = header->call >> 8 & 255;
  size_t element;
  if (header->call >> 24 != CDDP__PHASE_STAGED || kind >= CDDP__KIND_GROUP_NEW || dtype > CDDP_I64)
    return 0;
  element = cddp__dtype_size((cddp_dtype)dtype);
  if (cddp__shapes[kind].scatters) element *= (size_t)g->size;
  if (header->count > g->staging_size / element || header->count <= CDDP__INLINE / element)
    return 0;
  if (cddp__shapes[kind].from_root && rank != header->root) return 0;
  return element * (size_t)header->count;
}

/* Copies what rides with a host's headers from its ranks' staging buffers to its place behind them,
   or from there. Returns the bytes of all. */
static size_t cddp__ride_copy(cddp_group *g, int host, bool out) {
  cddp__hosts *x = g->hosts;
  char *headers = (char *)cddp__header_in(x, host, 0);
  size_t sum = (size_t)x->nodes[host].size * CDDP__HEADER_BYTES;
  int i;
  for (i = 0; i < x->nodes[host].size; i++) {
    int rank = cddp__rank_on(x, host, i);
    size_t bytes = cddp__ride_of(g, cddp__header_in(x, host, 0), rank);
    void *staging = cddp__staging_of(g, rank, g->round);
    if (bytes > 0) memcpy(out ? headers + sum : staging, out ? staging : headers + sum, bytes);
    sum += bytes;
  }
  return sum;
}

/* The leaders' exchange. Of up to CDDP__DIRECT_HOSTS hosts all leaders send all others what they
   have; of more, one that has d hosts' headers, this host's and those that follow, gets as many
   more. A host whose call differs may send another number of bytes than this rank's call has: all
   ranks will find that in its headers. */
static cddp_result cddp__exchange_headers(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  size_t have = (size_t)g->local_size * CDDP__HEADER_BYTES;
  cddp_result r = CDDP_OK;
  int d, i, n, count = x->count;
  if (count <= CDDP__DIRECT_HOSTS) {
    have = cddp__ride_copy(g, x->mine, true);
    for (i = 1; i < count; i++) {
      int host = (x->mine + i) % count, leader = cddp__rank_on(x, host, 0);
      size_t least = (size_t)x->nodes[host].size * CDDP__HEADER_BYTES, size = least;
      for (n = 0; n < x->nodes[host].size; n++)
        size += cddp__ride_of(g, cddp__header_in(x, x->mine, 0), cddp__rank_on(x, host, n));
      cddp__post_frame(g, true, leader, x->headers, have);
      cddp__post_frame(g, false, leader, x->headers + x->nodes[host].headers_at, size)->least =
          least;
    }
    return cddp__deliver(g, LONG_MAX);
  }
  for (d = 1; r == CDDP_OK && d < count; d *= 2) {
    int to = (x->mine + count - d) % count, from = (x->mine + d) % count;
    size_t out = 0, in = 0;
    n = d < count - d ? d : count - d;
    for (i = 0; i < n; i++) {
      out += (size_t)x->nodes[(x->mine + i) % count].size * CDDP__HEADER_BYTES;
      in += (size_t)x->nodes[(from + i) % count].size * CDDP__HEADER_BYTES;
    }
    cddp__post_frame(g, true, cddp__rank_on(x, to, 0), x->headers, out);
    cddp__post_frame(g, false, cddp__rank_on(x, from, 0), x->headers + have, in);
    r = cddp__deliver(g, LONG_MAX);
    have += in;
  }
  return r;
}

/* Writes the other hosts' headers, and what came with them, into their places; the lowest remote
   rank's last, for which ranks of this host wait first. */
static cddp_result cddp__mirror_headers(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  int p, h;
  for (h = 0; h < x->count && x->count <= CDDP__DIRECT_HOSTS; h++) {
    const cddp__link *l = x->peers[cddp__rank_on(x, h, 0)].data;
    if (h == x->mine) continue;
    if (cddp__ride_copy(g, h, false) == l->in_head.size) continue;
    cddp__fail(CDDP_NETWORK, "rank %d sent a message to rank %d that is not as long as was due",
               l->rank, g->rank);
    return cddp__break(g, CDDP_NETWORK);
  }
  for (p = g->size - 1; p >= 0; p--) {
    cddp__op_header *header = cddp__op_header_of(g, p, g->round);
    const cddp__op_header *in = cddp__header_in(x, x->peers[p].host, x->peers[p].number);
    if (g->members[p] >= 0) continue;
    if (in->seq.v != g->round) {
      cddp__fail(CDDP_NETWORK, "rank %d is at round %u of the group, rank %d at %u", p, in->seq.v,
                 g->rank, g->round);
      return cddp__break(g, CDDP_NETWORK);
    }
    memcpy((char *)header + sizeof in->seq, (const char *)in + sizeof in->seq,
           CDDP__HEADER_BYTES - sizeof in->seq);
    cddp__exchange32(&header->seq, g->round);
  }
  if (!g->oversubscribed && cddp__load32(&g->block->sleepers) != 0)
    cddp__futex_wake(&cddp__op_header_of(g, x->lowest_remote, g->round)->seq);
  return CDDP_OK;
}

/* The leader waits until its host's other ranks have announced the round; leaders exchange. */
static cddp_result cddp__hosts_meet(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp_result r = CDDP_OK;
  int i;
  double now;
  if (g->local_rank != 0) return CDDP_OK;
  if ((now = cddp__now()) >= x->looked + CDDP__LOOK_S) {
    x->looked = now;
    cddp__hosts_look(g); /* the others may have given up and left their headers behind */
    if ((r = cddp__check_failure(g)) != CDDP_OK) return r;
  }
  if (g->oversubscribed)
    r = cddp__wait_word(g, &g->block->arrivals, g->arrive_target + (uint32_t)g->local_size - 1);
  for (i = 0; i < g->local_size; i++) {
    cddp__op_header *header = cddp__op_header_of(g, cddp__rank_on(x, x->mine, i), g->round);
    if (r == CDDP_OK && !g->oversubscribed) r = cddp__wait_word(g, &header->seq, g->round);
    if (r != CDDP_OK) return r;
    memcpy(cddp__header_in(x, x->mine, i), header, CDDP__HEADER_BYTES);
  }
  if ((r = cddp__exchange_headers(g)) != CDDP_OK) return r;
  return cddp__mirror_headers(g);
}

/* --- sums --- */

/* The subtrees of the canonical tree over leaves [low, high) that lie on one host; of two leaves
   and more there are two subtrees at least. */
static void cddp__find_subtrees(cddp__hosts *x, int low, int high) {
  int host = x->peers[x->leaves[low]].host, r, half = 1;
  for (r = low; r < high && x->peers[x->leaves[r]].host == host; r++) {}
  if (r == high && (high - low == 1 || high - low < x->leaf_count)) {
    cddp__subtree *s = &x->subtrees[x->subtree_count];
    s->low = low;
    s->high = high;
    s->host = host;
    x->widths[x->subtree_count++] = high - low;
    return;
  }
  while (2 * half < high - low) half *= 2;
  cddp__find_subtrees(x, low, low + half);
  cddp__find_subtrees(x, low + half, high);
}

/* The ranks that are summed over: all, or those whose header of this round does not say that they
   have joined. */
static void cddp__set_leaves(const cddp_group *g, cddp__hosts *x, bool present) {
  int p;
  x->leaf_count = x->subtree_count = 0;
  for (p = 0; p < g->size; p++)
    if (!present || cddp__op_header_of(g, p, g->round)->u.bytes[0] == 0)
      x->leaves[x->leaf_count++] = p;
  cddp__find_subtrees(x, 0, x->leaf_count);
}

/* The sum of one of this host's subtrees over what its ranks have `offset` bytes behind sources[its
   number]: into space, or a single rank's memory itself. */
static const void *cddp__subtree_sum(cddp__hosts *x, const cddp__call *c, int subtree,
                                     void *const *sources, size_t offset, size_t n, void *space) {
  const cddp__subtree *s = &x->subtrees[subtree];
  int r;
  for (r = s->low; r < s->high; r++)
    x->pointers[r - s->low] = (const char *)sources[x->peers[x->leaves[r]].number] + offset;
  if (s->high - s->low == 1) return x->pointers[0];
  cddp__reduce_part(space, x->pointers, s->high - s->low, n, (cddp_dtype)c->dtype,
                    (cddp_op)c->op);
  return space;
}

/* This host's sums, as another one gets them: one behind the other in `out`. */
static void cddp__sum_here(cddp__hosts *x, const cddp__call *c, void *const *sources,
                           size_t offset, size_t n, char *out) {
  int i;
  for (i = 0; i < x->subtree_count; i++) {
    char *to = out + n * x->subtrees[i].at;
    if (x->subtrees[i].host == x->mine)
      cddp__copy(to, cddp__subtree_sum(x, c, i, sources, offset, n, to), n * c->esize);
  }
}

/* The sum of all ranks, from those of the other hosts, which lie in `in`: for each byte of an
   element there is room for `room` of them. This host's sums go to their place there. */
static void cddp__sum_all(cddp__hosts *x, const cddp__call *c, void *const *sources, size_t offset,
                          size_t n, char *in, size_t room, void *result) {
  int i;
  for (i = 0; i < x->subtree_count; i++) {
    const cddp__subtree *s = &x->subtrees[i];
    char *at = in + room * x->nodes[s->host].bytes_at + n * s->at;
    x->sums[i] = s->host == x->mine ? cddp__subtree_sum(x, c, i, sources, offset, n, at) : at;
  }
  if (x->subtree_count > 1)
    cddp__reduce_nodes(result, x->sums, x->widths, x->subtree_count, x->leaf_count, n,
                       (cddp_dtype)c->dtype, (cddp_op)c->op);
  else
    cddp__copy(result, x->sums[0], n * c->esize);
}

/* Bytes an element of every host's subtrees, and where each begins among its host's: those of
   several ranks first, as their elements may be wider, not being rounded yet. Returns the bytes of
   all. */
static size_t cddp__count_bytes(cddp__hosts *x, const cddp__call *c) {
  size_t wide = c->dtype == CDDP_F16 || c->dtype == CDDP_BF16 ? 4 : c->esize, sum = 0;
  int i, pass;
  for (i = 0; i < x->count; i++) x->nodes[i].bytes = 0;
  for (pass = 0; pass < 2; pass++)
    for (i = 0; i < x->subtree_count; i++) {
      cddp__group_node *m = &x->nodes[x->subtrees[i].host];
      if ((x->widths[i] == 1) != pass) continue;
      x->subtrees[i].at = m->bytes;
      m->bytes += pass ? c->esize : wide;
    }
  for (i = 0; i < x->count; sum += x->nodes[i++].bytes) x->nodes[i].bytes_at = sum;
  return sum;
}

/* --- a chunk's way through the hosts --- */

/* Elements [begin, begin + n) of each share of a call. Each rank OWNS a part of the chunk: its
   share where there is one for each rank; else its slice of the array, if there is a rank with its
   number on every host. What goes: (A) to the owner of a part what the hosts have for it, sums or
   bytes; (B) from the owner its part to the hosts. For a whole host acts one of its ranks, the
   owner's deputy there. Parts go in pieces. In step s = -ahead, -ahead + 1, .. a rank sends (A)
   piece s + ahead of others' parts and (B) piece s - 1 of its own; it receives (A) piece s of its
   own, adds it up, and receives (B) piece s - ahead - 1 of others. So each connection has A0 .. A4
   (A5 B0) (A6 B1) .., less those that have no bytes or no purpose. */
typedef struct cddp__flow {
  cddp_group *g;
  const cddp__call *c;
  size_t begin, n;
  size_t part; /* elements of a piece of a part, at most */
  long pieces, ahead;
  bool there, back; /* there are A, B */
  bool one, adds;   /* the call is in one buffer; A are sums */
  bool each;        /* every two ranks have bytes of their own: there are no deputies */
  bool whole;       /* short all_reduce: all hosts add up all, so hosts' slices are the same */
  int root_host, root; /* -1 without one; the root's number if it is on this host, else -1 */
  int half;            /* of the scratch */
  char *out, *in, *result; /* in hosts.stage; of out and result there are CDDP__SLOTS */
} cddp__flow;

/* Which of a host's ranks acts for it towards the owner of a part: they take turns. */
static int cddp__deputy(const cddp__hosts *x, int host, int owner) {
  return cddp__rank_on(x, host, x->peers[owner].number % x->nodes[host].size);
}

/* How many elements piece k of a rank's part has. *begin: before it, of its share or the array. */
static size_t cddp__piece_of(const cddp__flow *f, int rank, long k, size_t *begin) {
  const cddp__hosts *x = f->g->hosts;
  const cddp__peer *p = &x->peers[rank];
  size_t end = f->n, granule = CDDP__CACHE_LINE / f->c->esize;
  *begin = 0;
  if (f->one && p->number >= x->min_locals) return 0;
  if (f->one && f->whole)
    cddp__slice(f->n, granule, x->min_locals, p->number, begin, &end);
  else if (f->one)
    cddp__slice(f->n, granule, x->min_locals * x->count, p->number * x->count + p->host, begin,
                &end);
  *begin = cddp__min(*begin + (size_t)k * f->part, end);
  return cddp__min(f->part, end - *begin);
}

/* Whether rank `from` sends rank `to`, of another host, frames A, or (back) B. */
static bool cddp__goes(const cddp__flow *f, int from, int to, bool back) {
  const cddp__hosts *x = f->g->hosts;
  const cddp__shape *s = &cddp__shapes[f->c->kind];
  int other = back ? to : from, host = x->peers[other].host;
  if (!(back ? f->back : f->there)) return false;
  if (f->each) return cddp__sends(f->c, from) && cddp__receives(f->c, to);
  if (other != cddp__deputy(x, host, back ? from : to)) return false;
  if (s->from_root) return back != (host == f->root_host);
  return !back || !s->to_root || host == f->root_host;
}

/* Local rank t's share of the chunk for rank `to` (with counts in a buffer: for this one), or the
   array, where this rank can see it: in t's buffer, or in its scratch. */
static char *cddp__share_of(const cddp__flow *f, int t, int to) {
  const cddp__hosts *x = f->g->hosts;
  const cddp__call *c = f->c;
  size_t at = cddp__shapes[c->kind].scatters ? (size_t)to : 0;
  if (f->g->buffers[t] != NULL) {
    size_t first = c->parts != NULL ? c->parts[cddp__rank_on(x, x->mine, t)].there : at * c->count;
    return (char *)f->g->buffers[t] + (first + f->begin) * c->esize;
  }
  if (at > 0 && !f->adds && !cddp__overwrites(c)) at = (size_t)x->peers[to].number;
  return x->scratch[t] + (size_t)f->half * CDDP__HALF + at * f->n * c->esize;
}

/* The array as the rank sees it that matters on this host: the root, or this one. */
static char *cddp__array_at(const cddp__flow *f, size_t begin) {
  int t = f->root >= 0 ? f->root : f->g->local_rank;
  return cddp__share_of(f, t, 0) + begin * f->c->esize;
}

/* Where a remote rank's share of an all_gather comes in: in the scratch of its deputy here. */
static char *cddp__recv_area(const cddp__flow *f, int rank) {
  const cddp__hosts *x = f->g->hosts;
  int t = x->peers[cddp__deputy(x, x->mine, rank)].number;
  return x->scratch[t] + (size_t)f->half * CDDP__HALF + CDDP__SCRATCH +
         (size_t)rank * f->n * f->c->esize;
}

/* Where this rank's piece of its own part is, once all have given theirs: at its place in the
   buffer of a rank that wants it, if there is one here. */
static char *cddp__own_piece(const cddp__flow *f, long k, size_t begin) {
  const cddp__call *c = f->c;
  if (f->one && f->root < 0 && cddp__shapes[c->kind].to_root)
    return f->result + (size_t)(k % CDDP__SLOTS) * f->part * c->esize;
  if (f->one) return cddp__array_at(f, begin);
  return (char *)c->recv + (f->begin + begin) * c->esize;
}

/* Where this host's sums for piece k of a rank's part wait to be sent. */
static char *cddp__sums_out(const cddp__flow *f, long k, int owner) {
  const cddp__hosts *x = f->g->hosts;
  int mine = x->nodes[x->mine].size, most = (x->max_locals + mine - 1) / mine;
  size_t slot = (size_t)(k % CDDP__SLOTS) * (size_t)(x->count * most);
  slot += (size_t)(x->peers[owner].host * most + x->peers[owner].number / mine);
  return f->out + slot * f->part * x->nodes[x->mine].bytes;
}

/* Finds where this rank sees the shares of all ranks here for rank `to`. */
static void **cddp__find_shares(const cddp__flow *f, int to) {
  void **shares = f->g->slices;
  int t;
  for (t = 0; t < f->g->local_size; t++) shares[t] = cddp__share_of(f, t, to);
  return shares;
}

/* Where a frame to or from rank p lies, of n elements behind `begin` of a part's piece k. Sums for
   another host are made first. */
static const char *cddp__frame_at(const cddp__flow *f, int p, long k, size_t begin, size_t n,
                                  bool back, bool out) {
  cddp_group *g = f->g;
  cddp__hosts *x = g->hosts;
  const cddp__call *c = f->c;
  size_t at = (f->begin + begin) * c->esize;
  char *sums;
  if (back && out && f->one) return cddp__own_piece(f, k, begin);
  if (f->adds && !back && !out) return f->in + f->part * x->nodes[x->peers[p].host].bytes_at;
  if (f->adds && !back && g->local_size == 1 && !f->whole)
    return cddp__share_of(f, 0, p) + begin * c->esize;
  if (f->adds && !back) {
    sums = cddp__sums_out(f, k, p);
    cddp__sum_here(x, c, cddp__find_shares(f, p), begin * c->esize, n, sums);
    return sums;
  }
  if (f->one) return cddp__array_at(f, begin);
  if (out && cddp__overwrites(c)) return cddp__share_of(f, g->local_rank, p);
  if (out) return cddp__share_for(c, p) + at;
  if (f->each || g->local_size == 1) return cddp__share_from(c, p) + at;
  return cddp__recv_area(f, p);
}

/* Posts the frames A, or (back) B, of piece k, if there is such a piece. Nobody sends a frame
   without bytes. */
static void cddp__post_piece(const cddp__flow *f, long k, bool back, bool out) {
  cddp_group *g = f->g;
  const cddp__hosts *x = g->hosts;
  size_t begin, n, bytes;
  int i, p, me = g->rank;
  if (k < 0 || k >= f->pieces) return;
  for (i = 1; i < g->size; i++) {
    p = (me + i) % g->size;
    if (g->members[p] >= 0 || !cddp__goes(f, out ? me : p, out ? p : me, back)) continue;
    if ((n = cddp__piece_of(f, back == out ? me : p, k, &begin)) == 0) continue;
    if (f->adds && !back)
      bytes = n * x->nodes[out ? x->mine : x->peers[p].host].bytes;
    else
      bytes = out ? cddp__bytes_for(f->c, p, f->begin + begin, n)
                  : cddp__bytes_from(f->c, p, f->begin + begin, n);
    if (bytes > 0)
      cddp__post_frame(g, out, p, cddp__frame_at(f, p, k, begin, n, back, out), bytes);
  }
}

/* Copies what this rank has of piece k of the array to the other ranks of this host. */
static void cddp__copy_piece(const cddp__flow *f, long k) {
  cddp_group *g = f->g;
  const cddp__hosts *x = g->hosts;
  size_t begin, n;
  int h, t;
  for (h = 0; h < x->count && g->local_rank < x->min_locals; h++) {
    if (f->whole && h != x->mine) continue;
    n = cddp__piece_of(f, cddp__rank_on(x, h, g->local_rank), k, &begin) * f->c->esize;
    begin *= f->c->esize;
    for (t = 0; t < g->local_size && n > 0; t++)
      cddp__copy(cddp__share_of(f, t, 0) + begin, cddp__array_at(f, 0) + begin, n);
  }
}

/* Moves a chunk: this host's ranks can see its sources, and all see the results once all have come
   to a round behind it. */
static cddp_result cddp__flow_run(const cddp__flow *f) {
  cddp_group *g = f->g;
  cddp__hosts *x = g->hosts;
  long s, done, last = f->pieces + f->ahead;
  bool copies = f->one && !cddp__shapes[f->c->kind].to_root;
  cddp_result r = CDDP_OK;
  size_t begin, n;
  for (s = -f->ahead; r == CDDP_OK && s <= last; s++) {
    x->step = s;
    done = s - f->ahead - 1;
    cddp__post_piece(f, s + f->ahead, false, true);
    cddp__post_piece(f, s - 1, true, true);
    cddp__post_piece(f, s, false, false);
    cddp__post_piece(f, done, true, false);
    /* what the next step writes over must have been sent */
    r = cddp__deliver(g, s == last ? LONG_MAX : s + 2 - CDDP__SLOTS);
    if (r == CDDP_OK && f->adds && s >= 0 && s < f->pieces &&
        (n = cddp__piece_of(f, g->rank, s, &begin)) > 0)
      cddp__sum_all(x, f->c, cddp__find_shares(f, g->rank), begin * f->c->esize, n, f->in, f->part,
                    cddp__own_piece(f, s, begin));
    if (r == CDDP_OK && copies && done >= 0) cddp__copy_piece(f, done);
  }
  return r;
}

static cddp__flow cddp__flow_of(cddp_group *g, const cddp__call *c) {
  const cddp__hosts *x = g->hosts;
  const cddp__shape *s = &cddp__shapes[c->kind];
  cddp__flow f;
  memset(&f, 0, sizeof f);
  f.g = g;
  f.c = c;
  f.one = cddp__in_one_buffer(c);
  f.adds = s->reduces;
  f.each = !s->reduces && (s->scatters || (s->gathers && s->to_root));
  f.there = f.one || s->scatters;
  f.back = !s->scatters;
  f.root_host = c->root >= 0 ? x->peers[c->root].host : -1;
  f.root = f.root_host == x->mine ? x->peers[c->root].number : -1;
  return f;
}

/* Makes room for sums on their way: for others' parts, from others, of this rank's part. */
static cddp_result cddp__flow_room(cddp__flow *f, size_t all) {
  cddp__hosts *x = f->g->hosts;
  size_t mine = (size_t)x->nodes[x->mine].size, most = ((size_t)x->max_locals + mine - 1) / mine;
  size_t out = CDDP__SLOTS * f->part * x->nodes[x->mine].bytes * (size_t)x->count * most;
  size_t in = cddp__round_up(f->part * all, CDDP__CACHE_LINE), bytes;
  out = cddp__round_up(out, CDDP__CACHE_LINE);
  bytes = out + in + CDDP__SLOTS * f->part * f->c->esize;
  if (x->stage_size < bytes) {
    cddp__free(&x->net->allocator, x->stage);
    x->stage = (char *)cddp__malloc(&x->net->allocator, bytes);
    x->stage_size = x->stage != NULL ? bytes : 0;
    if (x->stage == NULL) return cddp__break(f->g, CDDP_OUT_OF_MEMORY);
  }
  f->out = x->stage;
  f->in = f->out + out;
  f->result = f->in + in;
  return CDDP_OK;
}

/* Divides a chunk into pieces and moves it. */
static cddp_result cddp__move_chunk(cddp__flow *f) {
  cddp__hosts *x = f->g->hosts;
  size_t granule = CDDP__CACHE_LINE / f->c->esize, hosts = (size_t)x->count, longest = f->n;
  size_t all = cddp__count_bytes(x, f->c), lanes = (size_t)x->min_locals;
  cddp_result r = CDDP_OK;
  f->whole = f->c->kind == CDDP__KIND_ALL_REDUCE && f->n / lanes * all <= CDDP__WHOLE_MOST;
  if (f->one) f->back = !f->whole;
  if (!f->whole) lanes *= hosts;
  if (f->one) longest = ((f->n + granule - 1) / granule + lanes - 1) / lanes * granule;
  f->part = longest;
  if (!f->whole && (f->one || f->adds))
    f->part = cddp__min(longest, cddp__min(CDDP__PIECE, CDDP__PIECE_MOST / hosts) * hosts / all);
  f->part = cddp__round_up(cddp__max(f->part, 1), granule);
  f->pieces = (long)((longest + f->part - 1) / f->part);
  f->ahead = f->pieces > CDDP__AHEAD ? CDDP__AHEAD : f->pieces - 1;
  if (f->adds) r = cddp__flow_room(f, all);
  return r == CDDP_OK ? cddp__flow_run(f) : r;
}

/* --- a call: buffers and scratch --- */

/* Whether ranks of its host must see a rank's buffer and cannot, or what it has is written over. */
static bool cddp__unseen(const cddp_group *g, const cddp__call *c, int rank, const cddp__ref *ref) {
  const cddp__hosts *x = g->hosts;
  if (ref->kind != CDDP__REF_NONE || !(cddp__in_one_buffer(c) || cddp__is_read(c, rank)))
    return false;
  return cddp__overwrites(c) || x->nodes[x->peers[rank].host].size > 1;
}

/* Whether a rank of this host needs scratch. */
static bool cddp__needs_scratch(const cddp_group *g, const cddp__call *c, int rank,
                                const cddp__ref *ref) {
  return cddp__unseen(g, c, rank, ref) || (cddp__gathers_to_all(c) && g->local_size > 1);
}

/* Finds the buffers of this host's ranks from the refs of the current round, NULL where one is not
   shared, and the scratch of those that need it. *direct: no buffer's bytes, on any host, have to
   pass through scratch for others to see. */
static cddp_result cddp__hosts_locate(cddp_group *g, const cddp__call *c, bool *direct) {
  cddp__hosts *x = g->hosts;
  cddp_result r = CDDP_OK;
  int p;
  *direct = true;
  for (p = 0; r == CDDP_OK && p < g->size; p++) {
    const cddp__ref *ref = &cddp__op_header_of(g, p, g->round)->u.ref;
    const cddp__ref *scratch = &cddp__slot_of(g, p)->scratch;
    void *at = NULL;
    if (cddp__unseen(g, c, p, ref)) *direct = false;
    if (g->members[p] < 0) continue;
    if (cddp__needs_scratch(g, c, p, ref) && scratch->kind == CDDP__REF_NONE)
      r = cddp__fail(CDDP_OUT_OF_MEMORY, "rank %d has no memory for pieces of messages", p);
    else if (cddp__needs_scratch(g, c, p, ref))
      r = cddp__locate(g->host, scratch, &at);
    if (at != NULL) x->scratch[x->peers[p].number] = (char *)at;
    at = NULL;
    if (p == g->rank && !cddp__unseen(g, c, p, ref))
      memcpy(&at, &c->send, sizeof at);
    else if (r == CDDP_OK && ref->kind > CDDP__REF_UNUSED)
      r = cddp__locate(g->host, ref, &at);
    g->buffers[x->peers[p].number] = at;
  }
  return r == CDDP_OK ? r : cddp__break(g, r);
}

/* Copies this rank's shares into its scratch, if its buffer is not shared and others of this host
   want them: of what is only moved, the shares for ranks here. */
static void cddp__show(const cddp__flow *f) {
  cddp_group *g = f->g;
  const cddp__call *c = f->c;
  const cddp__shape *s = &cddp__shapes[c->kind];
  int me = g->rank, p;
  if (g->buffers[g->local_rank] != NULL || !cddp__is_read(c, me)) return;
  for (p = 0; p < g->size; p++) {
    bool here = s->reduces || cddp__overwrites(c) || g->members[s->to_root ? c->root : p] >= 0;
    if (here && (s->scatters || p == me))
      memcpy(cddp__share_of(f, g->local_rank, p), cddp__share_for(c, p) + f->begin * c->esize,
             cddp__bytes_for(c, p, f->begin, f->n));
  }
}

/* Takes what this host's ranks have for this one; (remote) what they have received for it. */
static void cddp__collect(const cddp__flow *f, bool remote) {
  cddp_group *g = f->g;
  const cddp__call *c = f->c;
  size_t at = f->begin * c->esize;
  int p, me = g->rank;
  for (p = 0; p < g->size && cddp__receives(c, me); p++) {
    const char *from = (const char *)c->send + at;
    if (remote != (g->members[p] < 0) || !cddp__sends(c, p)) continue;
    if (remote)
      from = cddp__recv_area(f, p);
    else if (p != me || cddp__shapes[c->kind].scatters)
      from = cddp__share_of(f, g->hosts->peers[p].number, me);
    cddp__copy(cddp__share_from(c, p) + at, from, cddp__bytes_from(c, p, f->begin, f->n));
  }
}

/* The other hosts take the round too, at their own time: the numbers stay the same everywhere. */
static cddp_result cddp__piece_round(cddp_group *g, const cddp__call *c) {
  return cddp__round_of(g, CDDP__SCOPE_HOST, c, CDDP__PHASE_PIECE, NULL, 0);
}

/* A chunk of a call: what is not shared passes through scratch, and (one buffer) back. Behind the
   second round nobody reads this rank's buffer any more. */
static cddp_result cddp__run_chunk(cddp__flow *f, bool direct) {
  cddp_group *g = f->g;
  const cddp__call *c = f->c;
  cddp_result r = CDDP_OK;
  cddp__show(f);
  if (!direct) r = cddp__piece_round(g, c);
  if (r == CDDP_OK) r = cddp__move_chunk(f);
  if (r == CDDP_OK && !f->one && !f->adds) cddp__collect(f, false);
  if (r == CDDP_OK) r = cddp__piece_round(g, c);
  if (r != CDDP_OK) return r;
  if (cddp__gathers_to_all(c) && g->local_size > 1) cddp__collect(f, true);
  if (f->one && g->buffers[g->local_rank] == NULL && cddp__is_written(c, g->rank))
    memcpy((char *)c->recv + f->begin * c->esize, cddp__share_of(f, g->local_rank, 0),
           f->n * c->esize);
  return CDDP_OK;
}

static cddp_result cddp__hosts_run(cddp_group *g, const cddp__call *c) {
  const cddp__shape *s = &cddp__shapes[c->kind];
  cddp__hosts *x = g->hosts;
  cddp__ref ref = cddp__call_ref(g, c);
  bool all = s->reduces || cddp__overwrites(c), direct = false;
  char **mine = &x->scratch[g->local_rank];
  size_t most = SIZE_MAX, shown = !s->scatters ? 1 : (size_t)(all ? g->size : x->max_locals);
  cddp__flow f = cddp__flow_of(g, c);
  cddp_result r;
  if (*mine == NULL && cddp__needs_scratch(g, c, g->rank, &ref)) {
    *mine = (char *)cddp__arena_alloc(g->host, 2 * CDDP__HALF, CDDP__FOR_MESSAGE);
    if (*mine != NULL)
      cddp__slot_of(g, g->rank)->scratch = cddp__ref_of(g->host, *mine, 2 * CDDP__HALF);
  }
  r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_PLACES, &ref, sizeof ref);
  if (r == CDDP_OK) r = cddp__enter(g);
  if (r == CDDP_OK) r = cddp__hosts_locate(g, c, &direct);
  if (!direct) most = CDDP__SCRATCH / (shown * c->esize);
  if (cddp__gathers_to_all(c) && x->max_locals > 1)
    most = cddp__min(most, CDDP__RECV_AREA / ((size_t)g->size * c->esize));
  for (; r == CDDP_OK && f.begin < c->count; f.begin += f.n, f.half ^= 1) {
    f.n = cddp__min(most, c->count - f.begin);
    r = cddp__run_chunk(&f, direct);
  }
  /* its last chunk is collected from the scratch of others, who may leave after this call */
  if (r == CDDP_OK && cddp__gathers_to_all(c) && x->max_locals > 1)
    r = cddp__piece_round(g, c);
  return cddp__exit(g, r);
}

/* Over the ranks that have not joined. */
static cddp_result cddp__hosts_average(cddp_group *g, const cddp__call *c, char *const *mirrors,
                                       size_t at) {
  cddp__hosts *x = g->hosts;
  cddp__flow f = cddp__flow_of(g, c);
  cddp_result r;
  int k;
  f.n = c->count;
  for (k = 0; k < g->local_size; k++) g->buffers[k] = mirrors[k] + at;
  cddp__set_leaves(g, x, true);
  r = cddp__move_chunk(&f);
  cddp__set_leaves(g, x, false);
  return r;
}

static const cddp__carrier cddp__hosts_carrier = {false, cddp__hosts_run, cddp__hosts_average, NULL,
                                                  NULL};

/* --- a group's life --- */

/* Numbers the hosts by their lowest ranks; lists the ranks of each. index[hosts of the job]: 0. */
static void cddp__sort_hosts(cddp_group *g, cddp__hosts *x, int *index) {
  int p, h, first = 0;
  size_t at = 0;
  for (p = 0; p < g->size; p++) {
    int *known = &index[x->net->homes[g->world[p]].host];
    if (*known == 0) *known = ++x->count;
    x->peers[p].host = *known - 1;
    x->peers[p].number = x->nodes[x->peers[p].host].size++;
  }
  x->min_locals = g->size;
  for (h = 0; h < x->count; h++) {
    cddp__group_node *m = &x->nodes[h];
    m->first = first;
    first += m->size;
    x->max_locals = m->size > x->max_locals ? m->size : x->max_locals;
    x->min_locals = m->size < x->min_locals ? m->size : x->min_locals;
  }
  for (p = g->size - 1; p >= 0; p--) {
    x->ranks[x->nodes[x->peers[p].host].first + x->peers[p].number] = p;
    if (g->members[p] < 0) x->lowest_remote = p;
  }
  x->mine = x->peers[g->rank].host;
  if (x->count <= CDDP__DIRECT_HOSTS)
    g->staging_size = CDDP__RIDE / (size_t)g->size / CDDP__CACHE_LINE * CDDP__CACHE_LINE;
  for (h = 0; h < x->count; h++) {
    cddp__group_node *m = &x->nodes[(x->mine + h) % x->count];
    m->headers_at = at;
    at += (size_t)m->size * (CDDP__HEADER_BYTES + g->staging_size);
  }
}

static void *cddp__cut(char **at, size_t bytes) {
  void *p = *at;
  *at += cddp__round_up(bytes, 16);
  return p;
}

/* The struct with all of its arrays in one piece of memory. */
static cddp__hosts *cddp__hosts_new(const cddp_group *g) {
  size_t n = (size_t)g->size, frames = CDDP__FRAMES * n;
  size_t each = sizeof(cddp__peer) + sizeof(cddp__group_node) + sizeof(cddp__subtree) +
                3 * sizeof(int) + 3 * sizeof(void *) + 2 * sizeof(struct pollfd) +
                CDDP__HEADER_BYTES;
  char *at = (char *)cddp__calloc(&g->host->allocator, 1,
                                  sizeof(cddp__hosts) + n * each +
                                      2 * frames * sizeof(cddp__item) + CDDP__RIDE + 1024);
  cddp__hosts *x;
  if (at == NULL) return NULL;
  x = (cddp__hosts *)cddp__cut(&at, sizeof *x);
  x->peers = (cddp__peer *)cddp__cut(&at, n * sizeof *x->peers);
  x->nodes = (cddp__group_node *)cddp__cut(&at, n * sizeof *x->nodes);
  x->subtrees = (cddp__subtree *)cddp__cut(&at, n * sizeof *x->subtrees);
  x->outs = (cddp__item *)cddp__cut(&at, frames * sizeof *x->outs);
  x->ins = (cddp__item *)cddp__cut(&at, frames * sizeof *x->ins);
  x->pointers = (const void **)cddp__cut(&at, n * sizeof(void *));
  x->sums = (const void **)cddp__cut(&at, n * sizeof(void *));
  x->scratch = (char **)cddp__cut(&at, n * sizeof(void *));
  x->fds = (struct pollfd *)cddp__cut(&at, (2 * n + 2) * sizeof *x->fds);
  x->ranks = (int *)cddp__cut(&at, n * sizeof(int));
  x->widths = (int *)cddp__cut(&at, n * sizeof(int));
  x->leaves = (int *)cddp__cut(&at, n * sizeof(int));
  x->headers = (unsigned char *)cddp__cut(&at, n * CDDP__HEADER_BYTES + CDDP__RIDE);
  return x;
}

/* Tells a new group of a job of several hosts which ranks of the job its ranks are (NULL: the
   same), and prepares it to span hosts, if it does. */
static cddp_result cddp__hosts_attach(cddp_group *g, const int *world) {
  cddp__net *net = g->host->net;
  cddp__hosts *x;
  int p;
  if (net == NULL) return CDDP_OK;
  g->world = (int *)cddp__calloc(&g->host->allocator, (size_t)g->size + (size_t)net->host_count,
                                 sizeof *g->world);
  if (g->world == NULL) return CDDP_OUT_OF_MEMORY;
  for (p = 0; p < g->size; p++) g->world[p] = world != NULL ? world[p] : p;
  if (g->local_size == g->size) return CDDP_OK;
  if ((x = cddp__hosts_new(g)) == NULL) return CDDP_OUT_OF_MEMORY;
  x->net = net;
  x->mailbox.end = &x->mailbox.first;
  cddp__sort_hosts(g, x, g->world + g->size);
  cddp__set_leaves(g, x, false);
  g->round_most = cddp__max(g->staging_size, CDDP__INLINE);
  g->carrier = &cddp__hosts_carrier;
  pthread_mutex_lock(&g->host->lock); /* from now on failures of the group elsewhere are heard */
  g->hosts = x;
  pthread_mutex_unlock(&g->host->lock);
  return CDDP_OK;
}

/* Messages that were sent but are still here get a moment to leave. */
static void cddp__p2p_linger(cddp_group *g) {
  size_t left = SIZE_MAX, before;
  double deadline = 0;
  do {
    before = left;
    pthread_mutex_lock(&g->p2p_lock);
    cddp__p2p_flush(g);
    left = cddp__p2p_queued(g);
    pthread_mutex_unlock(&g->p2p_lock);
    if (left < before) deadline = cddp__now() + 1;
    if (left > 0) cddp__sleep(2e-4);
  } while (left > 0 && cddp__now() < deadline && cddp__check_failure(g) == CDDP_OK);
}

/* This rank leaves: says goodbye on all connections and closes them. */
static void cddp__hosts_leave(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  cddp__net *net = g->host->net;
  cddp__link *l;
  cddp__message *m;
  int p;
  if (x == NULL) return;
  cddp__early_notice(g, true);
  cddp__p2p_linger(g);
  pthread_mutex_lock(&net->lock);
  net->left[net->left_count++ % CDDP__LEFT_GROUPS] = g->id + 1;
  pthread_mutex_unlock(&net->lock);
  cddp__claim_data(g);
  cddp__hosts_serve(g); /* takes over what has come for MESSAGES */
  for (p = 0; p < g->size; p++)
    if (x->peers[p].data != NULL) cddp__link_leave(net, x->peers[p].data);
  for (; (l = x->links) != NULL; cddp__link_leave(net, l)) x->links = l->next;
  for (; (m = x->mailbox.first) != NULL; cddp__free(&net->allocator, m)) x->mailbox.first = m->next;
  cddp__arena_free(g->host, x->scratch[g->local_rank]);
  cddp__free(&net->allocator, x->stage);
}

CDDP__COLD_END

#ifdef CDDP_MPI
/* >>mpi ----------------------------------------------------------------------------------------
   Collectives through the cluster's MPI, for backend "mpi".
   Job: move and add up what is too large to ride in a step.
   Owns: the group's communicator, cddp__mpi_lock under which one thread at a time asks MPI.
   May touch: the caller's buffers.
   Entry points: cddp__mpi_carrier; cddp__mpi_start and _split for the first group.
   Works as follows: ranks meet, agree on each call and watch each other in rounds, as ever. Calls
   too large to ride in a round then go to MPI: each rank starts the nonblocking collective on the
   group's own communicator and tests it, with an eye on its peers and the deadline. A second round
   ends the call, so that no rank that is done is taken for lost. One thread at a time asks MPI,
   under cddp__mpi_lock. The order of sums is MPI's. An operation that a failure has cut off cannot
   be taken back from MPI: its buffers, and copies made for it, stay reserved. send and recv do not
   come here. */

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

/* Waits for an operation of the call c; code: what MPI said when it began. */
static cddp_result cddp__mpi_wait(cddp_group *g, const cddp__call *c, int code,
                                  MPI_Request *request) {
  cddp_result r = CDDP_OK;
  cddp__wait w;
  int i, done = 0;
  cddp__wait_begin(&w, g->timeout_s, 0);
  g->round++; /* whoever has not announced the next one is in this operation, or lost in it */
  for (i = 0; r == CDDP_OK && code == MPI_SUCCESS; i++) {
    pthread_mutex_lock(&cddp__mpi_lock);
    code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
    pthread_mutex_unlock(&cddp__mpi_lock);
    if (code != MPI_SUCCESS || done) break;
    if (i < g->spin) continue;
    sched_yield();
    if (cddp__now() < w.look) continue;
    if ((r = cddp__wait_tick(g, &w)) == CDDP_OK) r = cddp__look_after_peers(g);
    if (r == CDDP_OK && w.late) r = cddp__break_late(g, -1);
  }
  g->round--;
  if (code != MPI_SUCCESS)
    r = cddp__break(g, cddp__mpi_fail(code, cddp__shapes[c->kind].name));
  if (r != CDDP_OK) cddp__store32(&cddp__mpi_stuck, 1);
  return r;
}

static MPI_Datatype cddp__mpi_type(int dtype) { /* f16 and bf16: as bits */
  const MPI_Datatype types[] = {MPI_FLOAT,  MPI_DOUBLE,  MPI_UINT16_T, MPI_UINT16_T,
                                MPI_INT8_T, MPI_UINT8_T, MPI_INT32_T,  MPI_INT64_T};
  return types[dtype];
}

/* Reduces n elements of send into recv: everybody's (root -1) or root's; send may be recv. */
static cddp_result cddp__mpi_reduce(cddp_group *g, const cddp__call *c, const void *send,
                                    void *recv, size_t n, int root) {
  const MPI_Op ops[] = {MPI_SUM, MPI_SUM,  MPI_PROD, MPI_MIN,
                        MPI_MAX, MPI_BAND, MPI_BOR,  MPI_BXOR};
  cddp_dtype dtype = (cddp_dtype)c->dtype;
  bool half = dtype == CDDP_F16 || dtype == CDDP_BF16, gets = root < 0 || root == g->rank;
  MPI_Datatype type = half ? MPI_FLOAT : cddp__mpi_type(dtype);
  MPI_Request request = MPI_REQUEST_NULL;
  const void *in = send;
  void *out = recv;
  cddp_result r;
  int code;
  if (half) { /* summed in f32, as everywhere */
    in = out = cddp__malloc(&g->host->allocator, n * sizeof(float));
    if (out == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
    cddp__convert(out, CDDP_F32, send, dtype, n);
  }
  if (gets && in == out) in = MPI_IN_PLACE;
  pthread_mutex_lock(&cddp__mpi_lock);
  code = root < 0 ? MPI_Iallreduce(in, out, (int)n, type, ops[c->op], g->mpi->comm, &request)
                  : MPI_Ireduce(in, gets ? out : NULL, (int)n, type, ops[c->op], root,
                                g->mpi->comm, &request);
  pthread_mutex_unlock(&cddp__mpi_lock);
  if ((r = cddp__mpi_wait(g, c, code, &request)) != CDDP_OK) return r; /* a copy is left to MPI */
  if (gets && c->op == CDDP_AVG)
    cddp__pick_kernels()[half ? CDDP_F32 : dtype].scale(out, n, (double)g->size, true);
  if (gets && half) cddp__convert(recv, dtype, out, CDDP_F32, n);
  if (half) cddp__free(&g->host->allocator, out);
  return CDDP_OK;
}

/* Elements [begin, begin + n) of each share, of a call that moves and does not add. A piece is n
   elements, and as far from the next rank's as a share is long. */
static cddp_result cddp__mpi_move(cddp_group *g, const cddp__call *c, const char *send,
                                  size_t begin, size_t n) {
  const char *from = send + begin * c->esize;
  char *to = (char *)c->recv + begin * c->esize;
  int root = c->root, code;
  MPI_Comm comm = g->mpi->comm;
  MPI_Request q = MPI_REQUEST_NULL;
  MPI_Datatype block, p;
  pthread_mutex_lock(&cddp__mpi_lock);
  MPI_Type_contiguous((int)n, cddp__mpi_type(c->dtype), &block);
  MPI_Type_create_resized(block, 0, (MPI_Aint)(c->count * c->esize), &p);
  MPI_Type_commit(&p);
  MPI_Type_free(&block);
  if (!cddp__receives(c, g->rank)) to = NULL;
  if (!cddp__sends(c, g->rank)) from = NULL;
  switch (c->kind) {
  case CDDP__KIND_BROADCAST: code = MPI_Ibcast(to, 1, p, root, comm, &q); break;
  case CDDP__KIND_ALL_GATHER: code = MPI_Iallgather(from, 1, p, to, 1, p, comm, &q); break;
  case CDDP__KIND_GATHER: code = MPI_Igather(from, 1, p, to, 1, p, root, comm, &q); break;
  case CDDP__KIND_SCATTER: code = MPI_Iscatter(from, 1, p, to, 1, p, root, comm, &q); break;
  default: code = MPI_Ialltoall(from, 1, p, to, 1, p, comm, &q);
  }
  MPI_Type_free(&p); /* when the operation is over */
  pthread_mutex_unlock(&cddp__mpi_lock);
  return cddp__mpi_wait(g, c, code, &q);
}

/* The same of a call with counts. Each pair of ranks has a type, which says where its elements
   lie. */
static cddp_result cddp__mpi_move_parts(cddp_group *g, const cddp__call *c, const char *send,
                                        size_t begin, size_t n) {
  size_t each = 2 * sizeof(int) + 2 * sizeof(MPI_Datatype), size = (size_t)g->size;
  MPI_Datatype *out = (MPI_Datatype *)cddp__calloc(&g->host->allocator, size, each);
  MPI_Datatype *in = out + size, type = cddp__mpi_type(c->dtype);
  int *ones = (int *)(void *)(in + size), *zeros = ones + size, q, code, length;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Aint at;
  cddp_result r;
  if (out == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  pthread_mutex_lock(&cddp__mpi_lock);
  for (q = 0; q < g->size; q++) {
    const cddp__part *p = &c->parts[q];
    ones[q] = 1;
    at = (MPI_Aint)((p->out_at + begin) * c->esize);
    length = (int)(cddp__bytes_for(c, q, begin, n) / c->esize);
    MPI_Type_create_hindexed(1, &length, &at, type, &out[q]);
    at = (MPI_Aint)((p->in_at + begin) * c->esize);
    length = (int)(cddp__bytes_from(c, q, begin, n) / c->esize);
    MPI_Type_create_hindexed(1, &length, &at, type, &in[q]);
    MPI_Type_commit(&out[q]);
    MPI_Type_commit(&in[q]);
  }
  code = MPI_Ialltoallw(send, ones, zeros, out, c->recv, ones, zeros, in, g->mpi->comm, &request);
  pthread_mutex_unlock(&cddp__mpi_lock);
  if ((r = cddp__mpi_wait(g, c, code, &request)) != CDDP_OK) return r; /* out is left to MPI */
  pthread_mutex_lock(&cddp__mpi_lock);
  for (q = 0; q < 2 * g->size; q++) MPI_Type_free(&out[q]);
  pthread_mutex_unlock(&cddp__mpi_lock);
  cddp__free(&g->host->allocator, out);
  return CDDP_OK;
}

/* The call, from `send`: CDDP__MPI_MOST elements of each share at a time. */
static cddp_result cddp__mpi_data(cddp_group *g, const cddp__call *c, const char *send) {
  size_t begin, n;
  cddp_result r = CDDP_OK;
  int p;
  for (begin = 0; r == CDDP_OK && begin < c->count; begin += n) {
    n = cddp__min(CDDP__MPI_MOST, c->count - begin);
    if (c->parts != NULL)
      r = cddp__mpi_move_parts(g, c, send, begin, n);
    else if (!cddp__shapes[c->kind].reduces)
      r = cddp__mpi_move(g, c, send, begin, n);
    for (p = 0; r == CDDP_OK && cddp__shapes[c->kind].reduces && p < g->size; p++) {
      bool one = cddp__in_one_buffer(c); /* else reduce_scatter: each rank's in turn */
      size_t at = one ? begin : (size_t)p * c->count + begin;
      r = cddp__mpi_reduce(g, c, send + at * c->esize, (char *)c->recv + begin * c->esize, n,
                           one ? c->root : p);
      if (one) break;
    }
  }
  return r;
}

static cddp_result cddp__mpi_run(cddp_group *g, const cddp__call *c) {
  const char *send = (const char *)c->send, *recv = (const char *)c->recv;
  void *copy = NULL;
  size_t bytes, got;
  cddp_result r;
  cddp__buffer_bytes(g, c, &bytes, &got);
  r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_CALL, NULL, 0);
  if (r == CDDP_OK) r = cddp__enter(g);
  if (r == CDDP_OK && !cddp__in_one_buffer(c) && send != NULL && recv != NULL &&
      send < recv + got && recv < send + bytes) { /* MPI wants them apart */
    copy = cddp__malloc(&g->host->allocator, bytes);
    if (copy == NULL) r = cddp__break(g, CDDP_OUT_OF_MEMORY);
    if (copy != NULL) memcpy(copy, send, bytes);
    send = (const char *)copy;
  }
  if (r == CDDP_OK) r = cddp__mpi_data(g, c, send);
  if (r == CDDP_OK) {
    r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_DONE, NULL, 0);
    cddp__free(&g->host->allocator, copy);
  }
  return cddp__exit(g, r);
}

/* Over all ranks, in place, of any number of elements. */
static cddp_result cddp__mpi_average(cddp_group *g, const cddp__call *c, char *const *mirrors,
                                     size_t at) {
  (void)mirrors, (void)at;
  return cddp__mpi_data(g, c, (const char *)c->send);
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

static void cddp__mpi_leave(cddp_group *g) {
  int over = 1;
  pthread_mutex_lock(&cddp__mpi_lock);
  if (cddp__load32(&g->block->broken) == 0 && MPI_Finalized(&over) == MPI_SUCCESS && !over)
    MPI_Comm_free(&g->mpi->comm);
  pthread_mutex_unlock(&cddp__mpi_lock);
  cddp__free(&g->host->allocator, g->mpi);
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
  to->round_most = CDDP__INLINE;
  if (from != NULL) to->carrier = from->carrier;
  return CDDP_OK;
}

static const cddp__carrier cddp__mpi_carrier = {true, cddp__mpi_run, cddp__mpi_average,
                                                cddp__mpi_split, cddp__mpi_leave};
#endif /* CDDP_MPI */

/* >>work ------------------------------------------------------------------------------------------
   Asynchronous operations.
   Owns: cddp_work and the engine of a group. Lock: engine.lock.
   Touches a slot's works alone.
   Entry points: cddp__work_new, cddp__engine_push and _drain, cddp__work_wait and _done.
   Works as follows: a collective with a handle goes into its group's queue. A thread that waits
   for it and finds that it has not begun runs the queue up to it itself, at the cost of a call
   without a handle. Operations that no thread waits for are run by the engine, a thread that the
   first such operation starts: it looks at the queue every CDDP__LINGER_S while operations come,
   takes what has been there since its last look, and sleeps when none has come for a while. So
   an operation costs no wake-up of a thread. Buckets of a cddp_ddp begin on the engine at once.
   A collective without a handle waits until the queue is empty, likewise. Sends and receives
   need no thread, see >>p2p. */

#define CDDP__LINGER_S 2e-4    /* how long an operation is left to a thread that waits for it */
#define CDDP__LINGERS 50       /* looks at an empty queue before the engine sleeps */
#define CDDP__SPIN_ENGINE 250  /* polls of the engine where ranks and engines share the cores */

/* more: bytes behind it. */
static cddp_work *cddp__work_new(cddp_group *g, size_t more) {
  cddp_work *w = (cddp_work *)cddp__malloc(&g->host->allocator, sizeof *w + more);
  if (w == NULL) return NULL;
  memset(w, 0, offsetof(cddp_work, text));
  w->text[0] = 0;
  w->group = g;
  w->send = -1;
  return w;
}

/* Counts operations of the group that are not done. lock held. */
static void cddp__count_works(const cddp_group *g, uint32_t more) {
  cddp__atomic_u32 *works = &cddp__slot_of(g, g->rank)->works;
  cddp__store32(works, cddp__load32(works) + more);
}

/* Runs the first operation of the queue on this thread. lock held; free meanwhile. */
static void cddp__engine_run(cddp__engine *e) {
  cddp_work *w = e->first;
  cddp__site site = cddp__this_site;
  e->first = w->next;
  if (e->first == NULL) e->last = NULL;
  e->urgent = e->urgent && e->first != NULL;
  e->busy = true;
  pthread_mutex_unlock(&e->lock);
  CDDP__POINT("engine");
  cddp__this_site = w->site;
  w->result = w->run(w);
  if (w->result != CDDP_OK) snprintf(w->text, sizeof w->text, "%s", cddp__error_text);
  cddp__this_site = site;
  pthread_mutex_lock(&e->lock);
  e->busy = false;
  w->done = true;
  cddp__count_works(w->group, (uint32_t)-1);
  if (e->waiters > 0) pthread_cond_broadcast(&e->changed);
  if (e->first != NULL && e->asleep) pthread_cond_signal(&e->work);
}

static void *cddp__engine_main(void *arg) {
  cddp_group *g = (cddp_group *)arg;
  cddp__engine *e = &g->engine;
  int spin;
  cddp__own_engine = e;
  pthread_mutex_lock(&e->lock);
  while (e->first != NULL || !e->stop) {
    bool due = e->first != NULL && (e->urgent || e->stop || e->first->tick != e->tick);
    if (e->busy || (e->first == NULL && e->idle > CDDP__LINGERS)) {
      e->asleep = true;
      pthread_cond_wait(&e->work, &e->lock);
      e->asleep = false;
      continue;
    }
    if (!due) {
      if (!cddp__cond_wait_until(&e->work, &e->lock, cddp__now() + CDDP__LINGER_S)) {
        e->tick++;
        e->idle++;
      }
      continue;
    }
    spin = g->spin;
    if (g->host->cores < 2 * g->local_size) { /* the cores are wanted by the training threads too */
      g->spin = g->oversubscribed ? 0 : CDDP__SPIN_ENGINE;
      g->yields = 0; /* a training thread would keep the core for long */
    }
    cddp__engine_run(e);
    g->spin = spin;
    g->yields = CDDP__YIELDS;
  }
  pthread_mutex_unlock(&e->lock);
  return NULL;
}

static void cddp__engine_hurry(cddp__engine *e) { /* lock held */
  if (e->first == NULL || e->urgent) return;
  e->urgent = true;
  if (!e->busy) pthread_cond_signal(&e->work);
}

/* Puts w at the end of its group's queue; starts the engine if need be. */
static cddp_result cddp__engine_push(cddp_work *w) {
  cddp__engine *e = &w->group->engine;
  cddp_result r = CDDP_OK;
  w->next = NULL;
  CDDP__POINT("push");
  pthread_mutex_lock(&e->lock);
  if (!e->started) {
    r = cddp__thread_start(&e->thread, cddp__engine_main, w->group, true);
    e->started = r == CDDP_OK;
  }
  if (r == CDDP_OK) {
    if (e->last != NULL)
      e->last->next = w;
    else
      e->first = w;
    e->last = w;
    cddp__count_works(w->group, 1);
    e->idle = w->anywhere ? 0 : CDDP__LINGERS + 1; /* what is pushed urgently wakes it */
    w->tick = e->tick;
    if (!w->anywhere)
      cddp__engine_hurry(e);
    else if (e->asleep && !e->busy)
      pthread_cond_signal(&e->work);
  }
  pthread_mutex_unlock(&e->lock);
  return r;
}

/* Waits until w (NULL: all of the queue) has run, or until that time: false then. Without a
   deadline this thread runs what it finds in the queue itself. */
static bool cddp__engine_wait(cddp__engine *e, const cddp_work *w, double deadline) {
  bool ok = true;
  pthread_mutex_lock(&e->lock);
  if (deadline < INFINITY && !w->done) cddp__engine_hurry(e);
  while (w != NULL ? !w->done : e->busy || e->first != NULL) {
    if (!e->busy && e->first->anywhere && !(deadline < INFINITY)) {
      cddp__engine_run(e);
      continue;
    }
    if (!ok) break;
    e->waiters++;
    if (!(deadline < INFINITY)) cddp__add32(&e->awaited, 1);
    ok = cddp__cond_wait_until(&e->changed, &e->lock, deadline);
    if (!(deadline < INFINITY)) cddp__add32(&e->awaited, (uint32_t)-1);
    e->waiters--;
  }
  pthread_mutex_unlock(&e->lock);
  return ok || (w != NULL && w->done);
}

/* Waits until all asynchronous collectives of g have run. */
static void cddp__engine_drain(cddp_group *g) {
  cddp__engine *e = &g->engine;
  if (!e->started) return; /* written only by the thread that calls this group's collectives */
  if (pthread_equal(e->thread, pthread_self())) return;
  cddp__engine_wait(e, NULL, INFINITY);
}

/* Ends the engine. What is still in the queue fails, with the group. */
static void cddp__engine_stop(cddp_group *g) {
  cddp__engine *e = &g->engine;
  bool busy;
  if (!e->started) return;
  pthread_mutex_lock(&e->lock);
  busy = e->busy || e->first != NULL;
  e->stop = true;
  pthread_cond_signal(&e->work);
  pthread_mutex_unlock(&e->lock);
  if (busy)
    cddp__break(g, cddp__fail(CDDP_ABORTED, "rank %d destroyed the group while an operation was in "
                                            "flight", g->rank));
  pthread_join(e->thread, NULL);
  e->started = false;
}

/* limit: seconds to wait at most; negative: until the operation has ended, by its group's deadline
   at the latest. With a limit CDDP_TIMEOUT leaves the handle valid. */
static cddp_result cddp__work_wait(cddp_work *w, double limit) {
  double deadline = limit >= 0 ? cddp__now() + limit : INFINITY, nap = 1e-5;
  cddp_group *g = w->group;
  bool ended = true;
  cddp_result r = CDDP_OK;
  if (w->backend != NULL) { /* CUDA's own wait knows no limit */
    while (limit >= 0 && !(ended = w->backend->done(w)) && cddp__now() < deadline) {
      cddp__sleep(nap);
      nap = nap < 1e-3 ? 2 * nap : nap;
    }
    if (ended) return w->backend->wait(w);
  } else if (w->call.kind == CDDP__KIND_RECV) {
    r = cddp__finish_recv(g, w, limit);
  } else if (w->run == NULL) {
    r = cddp__finish_send(g, w->send, limit);
  } else if ((ended = cddp__engine_wait(&g->engine, w, deadline))) {
    r = w->result;
    if (r != CDDP_OK) cddp__fail(r, "%s", w->text);
  }
  if (!ended)
    return cddp__fail(CDDP_TIMEOUT, "cddp_wait_for: no end of %s on rank %d after %g s; it goes on",
                      cddp__shapes[w->call.kind].name, g->rank, limit);
  if (r == CDDP_TIMEOUT && limit >= 0) return r;
  if (w->run == NULL) cddp__record_finish(g, w->record, r);
  cddp__free(&g->host->allocator, w);
  return r;
}

static void cddp__abandon_recv(void *work) { /* a thread that waits for it is cancelled */
  (void)cddp__close_recv((cddp_work *)work);
  (void)cddp__work_wait((cddp_work *)work, -1);
}

/* A function of its own, since the cleanup's setjmp may clobber its caller's variables. */
static cddp_result cddp__recv_now(cddp_work *w) {
  cddp_result r;
  pthread_cleanup_push(cddp__abandon_recv, w);
  r = cddp__work_wait(w, -1);
  pthread_cleanup_pop(0);
  return r;
}

/* Sends or receives a message; work not NULL: begins to, and gives the handle. */
static cddp_result cddp__start_message(cddp_group *g, const cddp__call *c, cddp_work **work) {
  bool receives = c->kind == CDDP__KIND_RECV, taken = false;
  cddp_work *w = NULL;
  uint64_t record;
  int send = -1;
  cddp_result r = cddp__check_group(g);
  if (r == CDDP_OK && g->backend != NULL) r = g->backend->start(g, c, work, &taken);
  if (r != CDDP_OK || taken) return r; /* taken: the buffer lies on a device */
  if ((receives || work != NULL) && (w = cddp__work_new(g, 0)) == NULL) return CDDP_OUT_OF_MEMORY;
  record = cddp__record_new(g, cddp__shapes[c->kind].name, c->count, c->dtype, -1,
                            c->root == CDDP_ANY ? -1 : c->root);
  if (cddp__record_at(g, record) != NULL) cddp__record_at(g, record)->tag = c->tag;
  cddp__record_start(g, record, 0);
  if (w != NULL) w->call = *c;
  if (w != NULL) w->record = record;
  if (receives) {
    cddp__post_recv(g, w);
    if (work == NULL) return cddp__recv_now(w);
  } else {
    r = cddp__start_send(g, c, work != NULL, &send);
    if (work == NULL && r == CDDP_OK) r = cddp__finish_send(g, send, -1);
    if (work == NULL || r != CDDP_OK) {
      cddp__record_finish(g, record, r);
      cddp__free(&g->host->allocator, w);
      return r;
    }
    w->send = send;
  }
  *work = w;
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_cancel(cddp_work *w) {
  const char *why = "a message is sent or not, and a collective needs all ranks";
  CDDP__CHECK(w != NULL, "the work is NULL");
  if (w->call.kind == CDDP__KIND_RECV && (w->backend == NULL || w->stage != NULL)) {
    if (cddp__close_recv(w)) {
      (void)cddp__work_wait(w, -1);
      return CDDP_OK;
    }
    why = "its message has come, or it has failed";
  } else if (w->backend != NULL) {
    why = "it is on a device";
  }
  return cddp__fail(CDDP_UNSUPPORTED,
                    "cddp_cancel: the operation cannot be given up: %s; the work is valid still: "
                    "cddp_wait it",
                    why);
}

static bool cddp__work_done(cddp_work *w) {
  cddp_group *g = w->group;
  bool done, receives = w->call.kind == CDDP__KIND_RECV;
  cddp__p2p m = {receives ? w : NULL, w->send, -1, 0, 0};
  if (w->backend != NULL) return w->backend->done(w);
  if (w->run == NULL) {
    if (cddp__load32(&g->block->broken) != 0) return true;
    if (!receives && w->send < 0) return true;
    return cddp__p2p_ready(g, &m);
  }
  pthread_mutex_lock(&g->engine.lock);
  done = w->done;
  if (!done) cddp__engine_hurry(&g->engine);
  pthread_mutex_unlock(&g->engine.lock);
  return done;
}
/* >>collectives -----------------------------------------------------------------------------------
   The collectives of one host; those of several go on in >>hosts, or in >>mpi.
   Owns: the bytes in headers and staging buffers.
   Touches: peers' buffers, between cddp__enter and cddp__exit.
   Entry points: cddp__start_call (with a handle or without), cddp__run_call.
   Works as follows: every collective is one of three sequences of rounds. Which one is decided
   from the size, and from the refs of all ranks: alike on every rank.
     one round   up to CDDP__ROUND_MOST (in a group of several hosts, its part of CDDP__RIDE): each
                 rank puts its share into its header (up to 40 bytes) or staging buffer, and takes
                 what it needs from all. A small all_reduce is thus one exchange of cache lines;
                 every rank adds all values, in the same order.
     direct      the buffers that others need lie in shared memory: one round to tell where, each
                 rank reads (all_reduce: also writes) its peers' buffers in place, one round to
                 say it is done. all_reduce: rank r owns the r-th slice, reads every replica of it
                 once and writes the result into every replica: the fewest bytes that can move;
                 broadcast, where all buffers are shared, likewise, so that the root's core works
                 too.
     staged      any other memory: the share goes through the staging buffers piece by piece, one
                 round a piece; they stay in cache, so main memory sees one read and one write.
                 all_reduce of three ranks and more: each adds up a slice of the piece, and takes
                 the others' sums in a second round. The first piece is in the staging buffers when
                 the ranks tell where their buffers lie: if these are not shared, no round is lost.

   The kernel's copies between processes (process_vm_readv) take as long as the staging buffers do,
   or up to twice as long: there is no such way. */

#define CDDP__LOOK ((size_t)1 << 20) /* bytes written to a peer between looks at the group */

/* A call's elements [begin, begin + n) of each share, as they pass through headers or staging
   buffers. */
typedef struct cddp__chunk {
  size_t begin, n;
  bool in_header; /* small enough for the headers */
} cddp__chunk;

/* Where rank 0's space is in a round, and how many bytes behind it rank 1's. */
static char *cddp__spaces(const cddp_group *g, uint32_t round, const cddp__chunk *k,
                          size_t *apart) {
  *apart = 2 * (k->in_header ? sizeof(cddp__op_header) : g->staging_size);
  return k->in_header ? (char *)cddp__op_header_of(g, 0, round)->u.bytes
                      : (char *)cddp__staging_of(g, 0, round);
}

/* This rank's shares of the chunk go into its space. Inside the caller's loop compilers make it a
   tenth slower for 1 KiB. */
static void cddp__put(const cddp_group *g, const cddp__call *c, const cddp__chunk *k) {
  size_t bytes = k->n * c->esize, shares = cddp__send_shares(g, c), apart, r;
  char *space = cddp__spaces(g, g->round + 1, k, &apart) + (size_t)g->rank * apart;
  const char *from = (const char *)c->send + k->begin * c->esize;
  if (!cddp__sends(c, g->rank)) return;
  if (CDDP__UNLIKELY(c->parts != NULL)) {
    for (r = 0; r < shares; r++, space += bytes)
      memcpy(space, cddp__share_for(c, (int)r) + k->begin * c->esize,
             cddp__bytes_for(c, (int)r, k->begin, k->n));
    return;
  }
  apart = c->count * c->esize;
  for (; shares > 0; shares--, space += bytes, from += apart) memcpy(space, from, bytes);
}

/* This rank takes its result of the chunk out of all ranks' spaces. */
static void cddp__take(const cddp_group *g, const cddp__call *c, const cddp__chunk *k) {
  size_t bytes = k->n * c->esize, at = k->begin * c->esize, apart;
  char *space = cddp__spaces(g, g->round, k, &apart);
  const void *own = cddp__sends(c, g->rank) ? cddp__share_for(c, g->rank) + at : NULL;
  const void **srcs = (const void **)(void *)g->slices;
  int r, n = g->size;
  if (!cddp__receives(c, g->rank)) return;
  if (cddp__shapes[c->kind].scatters) space += (size_t)g->rank * bytes;
  for (r = 0; r < n; r++, space += apart) srcs[r] = space;
  if (cddp__shapes[c->kind].reduces) {
    srcs[g->rank] = own;
    cddp__reduce((char *)c->recv + at, srcs, g->size, k->n, (cddp_dtype)c->dtype, (cddp_op)c->op);
    return;
  }
  for (r = 0; r < g->size; r++) {
    char *to = cddp__share_from(c, r) + at;
    if (cddp__sends(c, r) && (r != g->rank || to != own))
      memcpy(to, srcs[r], cddp__bytes_from(c, r, k->begin, k->n));
  }
}

/* This rank takes its result of an all_reduce's chunk as cddp__take does, but in two steps: it adds
   up its slice of the chunk, and takes the other slices when all ranks have. Of many ranks' values
   each is then read twice, not by every rank. */
static cddp_result cddp__take_slices(cddp_group *g, const cddp__call *c, const cddp__chunk *k) {
  size_t apart, begin, end, granule = CDDP__CACHE_LINE / c->esize;
  char *space = cddp__spaces(g, g->round, k, &apart);
  char *sums = cddp__spaces(g, g->round + 1, k, &apart);
  char *recv = (char *)c->recv + k->begin * c->esize;
  cddp_result result;
  int r;
  cddp__slice(k->n, granule, g->size, g->rank, &begin, &end);
  for (r = 0; r < g->size; r++) g->slices[r] = space + (size_t)r * apart + begin * c->esize;
  cddp__reduce(sums + (size_t)g->rank * apart + begin * c->esize,
               (const void *const *)g->slices, g->size, end - begin, (cddp_dtype)c->dtype,
               (cddp_op)c->op);
  result = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_PIECE, NULL, 0);
  for (r = 0; result == CDDP_OK && r < g->size; r++, sums += apart) {
    cddp__slice(k->n, granule, g->size, r, &begin, &end);
    memcpy(recv + begin * c->esize, sums + begin * c->esize, (end - begin) * c->esize);
  }
  return result;
}

/* The chunk of the call that begins there. */
static cddp__chunk cddp__chunk_at(const cddp_group *g, const cddp__call *c, size_t begin) {
  size_t element = c->esize * cddp__send_shares(g, c);
  size_t room = cddp__max(g->staging_size, CDDP__INLINE);
  cddp__chunk k;
  k.begin = begin;
  k.n = c->count - begin;
  if (k.n * element > room) k.n = room / element; /* a division takes long in a small call */
  k.in_header = k.n * element <= CDDP__INLINE;
  return k;
}

/* Chunk by chunk: this rank's shares go into its space, a round, and it takes its result. met: the
   first chunk is in all ranks' spaces already. */
static cddp_result cddp__run_staged(cddp_group *g, const cddp__call *c, bool met) {
  bool slices = c->kind == CDDP__KIND_ALL_REDUCE && g->size > 2 && g->hosts == NULL;
  cddp__chunk k;
  size_t begin;
  cddp_result r = CDDP_OK;
  for (begin = 0; begin < c->count && r == CDDP_OK; begin += k.n, met = false) {
    k = cddp__chunk_at(g, c, begin);
    if (!met) {
      cddp__put(g, c, &k);
      r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_STAGED, NULL, 0);
      if (r != CDDP_OK) return r;
    }
    if (slices && k.n * c->esize > CDDP__ROUND_MOST_OVERSUBSCRIBED)
      r = cddp__take_slices(g, c, &k);
    else
      cddp__take(g, c, &k);
  }
  return r;
}

/* Broadcast. Where every rank's buffer is shared, this rank copies its slice of the root's array to
   all; else it takes the whole array for itself. Blocks stay in the cache for the next copy. */
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
    n = cddp__min(end - begin, g->size == 2 ? CDDP__LOOK : CDDP__STAGING_MIN);
    if (cddp__load32(&g->block->broken) != 0) return;
    for (r = 0; r < g->size; r++)
      if (r != c->root) memcpy(bufs[r] + begin, bufs[c->root] + begin, n);
  }
}

/* all_reduce and reduce: this rank's slice of all buffers, block by block. */
static void cddp__reduce_slices(const cddp_group *g, const cddp__call *c, char *const *bufs,
                                void **slices) {
  cddp_dtype dtype = (cddp_dtype)c->dtype;
  size_t begin, end, n;
  int r;
  cddp__slice(c->count, CDDP__CACHE_LINE / c->esize, g->size, g->rank, &begin, &end);
  for (; begin < end && cddp__load32(&g->block->broken) == 0; begin += n) {
    n = cddp__min(end - begin, CDDP__LOOK / c->esize);
    for (r = 0; r < g->size; r++) slices[r] = bufs[r] + begin * c->esize;
    if (c->kind == CDDP__KIND_ALL_REDUCE)
      cddp__reduce_all(slices, g->size, n, dtype, (cddp_op)c->op);
    else
      cddp__reduce(slices[c->root], (const void *const *)slices, g->size, n, dtype, (cddp_op)c->op);
  }
}

/* The direct moves, bufs[r] being rank r's buffer where it is read. What writes to peers' memory
   stops when the group breaks. */
static cddp_result cddp__move(cddp_group *g, const cddp__call *c, char *const *bufs,
                              void **slices) {
  size_t share = c->count * c->esize, me = (size_t)g->rank, r, i, n = (size_t)g->size, at;
  cddp_dtype dtype = (cddp_dtype)c->dtype;
  cddp_op op = (cddp_op)c->op;
  char *recv = (char *)c->recv;
  switch (c->kind) {
  case CDDP__KIND_ALL_REDUCE:
  case CDDP__KIND_REDUCE:
    cddp__reduce_slices(g, c, bufs, slices);
    break;
  case CDDP__KIND_REDUCE_SCATTER:
    for (r = 0; r < n; r++) slices[r] = bufs[r] + me * share;
    cddp__reduce(recv, (const void *const *)slices, g->size, c->count, dtype, op);
    break;
  case CDDP__KIND_BROADCAST: cddp__spread(g, c, bufs); break;
  default:
    for (i = 0; i < n && cddp__receives(c, g->rank); i++) {
      r = (me + i) % n; /* each begins with its neighbour: readers spread over the owners */
      if (!cddp__sends(c, (int)r)) continue;
      at = c->parts != NULL ? c->parts[r].there * c->esize : me * share;
      cddp__copy(cddp__share_from(c, (int)r),
                 r == me ? cddp__share_for(c, (int)me)
                         : bufs[r] + (cddp__shapes[c->kind].scatters ? at : 0),
                 cddp__bytes_from(c, (int)r, 0, c->count));
    }
  }
  return cddp__check_group(g);
}

/* Direct, where each buffer that others read is in shared memory; else staged. A rank whose buffer
   is not has put its first chunk into its space: where none is, the round is that chunk's too. */
static cddp_result cddp__run_large(cddp_group *g, const cddp__call *c) {
  cddp__ref ref = cddp__call_ref(g, c);
  cddp__chunk first = cddp__chunk_at(g, c, 0);
  bool direct = true, staged = true;
  cddp_result r;
  int p;
  if (ref.kind <= CDDP__REF_UNUSED) cddp__put(g, c, &first);
  r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_PLACES, &ref, sizeof ref);
  for (p = 0; r == CDDP_OK && p < g->size; p++) {
    ref = cddp__op_header_of(g, p, g->round)->u.ref;
    g->buffers[p] = NULL; /* needed by no rank, or not known */
    if (ref.kind == CDDP__REF_NONE) {
      direct = direct && !cddp__is_read(c, p);
    } else if (ref.kind != CDDP__REF_UNUSED) {
      staged = staged && !cddp__is_read(c, p);
      if (direct && (r = cddp__locate(g->host, &ref, &g->buffers[p])) != CDDP_OK)
        r = cddp__break(g, r);
    }
  }
  if (r == CDDP_OK && !direct)
    r = cddp__run_staged(g, c, staged);
  else if (r == CDDP_OK && (r = cddp__enter(g)) == CDDP_OK &&
           (r = cddp__move(g, c, (char *const *)g->buffers, g->slices)) == CDDP_OK)
    r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_DONE, NULL, 0);
  return cddp__exit(g, r);
}

static cddp_result cddp__run_sized(cddp_group *g, const cddp__call *c) {
  size_t element = c->esize * cddp__send_shares(g, c);
  if (c->count <= g->round_most / element) return cddp__run_staged(g, c, false);
  return g->carrier->run(g, c);
}

/* The ranks of a call with counts tell each other how long their shares are and where these begin;
   c->count becomes the length of the longest of all. *host: whether this rank's lie in host memory,
   then whether any rank's do. */
static cddp_result cddp__exchange_counts(cddp_group *g, cddp__call *c, bool *host) {
  uint64_t *told = (uint64_t *)(void *)(c->parts + g->size), *heard = told + CDDP__TOLD * g->size;
  char here[320];
  size_t most = 0;
  cddp__call x = *c;
  cddp_result r;
  int p;
  for (p = 0; p < g->size; p++)
    most = cddp__max(most, cddp__max(c->parts[p].out, c->parts[p].in));
  for (p = 0; p < g->size; p++) {
    told[CDDP__TOLD * p] = c->parts[p].out;
    told[CDDP__TOLD * p + 1] = c->parts[p].out_at;
    told[CDDP__TOLD * p + 2] = most;
    told[CDDP__TOLD * p + 3] = *host;
  }
  x.parts = NULL;
  x.count = CDDP__TOLD * sizeof *told / c->esize;
  x.send = told;
  x.recv = heard;
  r = cddp__run_sized(g, &x);
  for (p = 0; r == CDDP_OK && p < g->size; p++, heard += CDDP__TOLD) {
    c->parts[p].there = (size_t)heard[1];
    most = cddp__max(most, (size_t)heard[2]);
    *host = *host || heard[3] != 0;
    if (heard[0] == c->parts[p].in) continue;
    cddp__describe_here(g, here, sizeof here);
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree: rank %d sends %" PRIu64 " elements to rank %d, which expects %zu, "
               "in %s",
               p, heard[0], g->rank, c->parts[p].in, here);
    r = cddp__break(g, CDDP_MISMATCH);
  }
  c->count = most;
  return r;
}

static cddp_result cddp__run_counted(cddp_group *g, const cddp__call *c) {
  cddp__call sized = *c;
  bool host = true;
  cddp_result r = cddp__exchange_counts(g, &sized, &host);
  return r == CDDP_OK && sized.count > 0 ? cddp__run_sized(g, &sized) : r;
}

static uint64_t cddp__record_call(const cddp_group *g, const cddp__call *c) {
  size_t count = c->count, sent;
  if (CDDP__LIKELY(g->host->record == NULL)) return 0;
  if (c->parts != NULL) {
    cddp__buffer_bytes(g, c, &sent, &count);
    count /= c->esize;
  }
  return cddp__record_new(g, cddp__shapes[c->kind].name, count, c->dtype,
                          cddp__shapes[c->kind].reduces ? c->op : -1, c->root);
}

/* Records the beginning of what is no cddp__call. */
static uint64_t cddp__record_begin(const cddp_group *g, int kind, uint64_t sequence,
                                   uint64_t count) {
  uint64_t record = cddp__record_new(g, cddp__shapes[kind].name, count, -1, -1, -1);
  cddp__record_start(g, record, sequence);
  return record;
}

/* Runs a collective on the calling thread. record: of cddp__record_call. */
static cddp_result cddp__run_recorded(cddp_group *g, const cddp__call *c, uint64_t record) {
  size_t element = c->esize * cddp__send_shares(g, c);
  cddp_result r = cddp__check_group(g);
  if (r != CDDP_OK) goto done;
  g->calls++;
  if (!g->internal) g->unshared = cddp__load32(&g->host->unshared);
  cddp__record_start(g, record, g->calls);
  if (c->count == 0)
    r = cddp__round_of(g, CDDP__SCOPE_ALL, c, CDDP__PHASE_CALL, NULL, 0);
  else if (g->size == 1)
    cddp__copy(c->recv, c->send, c->count * c->esize); /* any op of one value is the value */
  else if (c->count * element <= g->round_most)
    r = cddp__run_staged(g, c, false);
  else
    r = c->parts != NULL ? cddp__run_counted(g, c) : g->carrier->run(g, c);
done:
  cddp__record_finish(g, record, r);
  return r;
}

static cddp_result cddp__run_call(cddp_group *g, const cddp__call *c) {
  return cddp__run_recorded(g, c, cddp__record_call(g, c));
}

static cddp_result cddp__run_work_call(cddp_work *w) {
  return cddp__run_recorded(w->group, &w->call, w->record);
}

static cddp_result cddp__run_simple(cddp_group *g, int kind, const void *send, void *recv,
                                    size_t count, cddp_dtype dtype, int root) {
  cddp__call c = cddp__make_call(kind, send, recv, count, dtype, CDDP_SUM, root);
  return cddp__run_call(g, &c);
}

/* Collective: all ranks return the failure of the first rank that has one, with its text. Without a
   failure `all` gets each rank's n bytes of payload. */
static cddp_result cddp__consensus(cddp_group *g, cddp_result mine, const void *payload, size_t n,
                                   void *all) {
  size_t each = n + 4; /* a result and the payload */
  char *votes, *own, text[CDDP__ERROR_MAX];
  cddp_result r;
  int p;
  if (g == NULL || g->size == 1) {
    if (n > 0) memcpy(all, payload, n);
    return mine;
  }
  snprintf(text, sizeof text, "%s", cddp__error_text);
  votes = (char *)cddp__malloc(&g->host->allocator, each * ((size_t)g->size + 1));
  if (votes == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  own = votes + each * (size_t)g->size;
  cddp__put32(own, (uint32_t)mine);
  if (n > 0) memcpy(own + 4, payload, n);
  r = cddp__run_simple(g, CDDP__KIND_ALL_GATHER, own, votes, each, CDDP_U8, -1);
  for (p = 0; r == CDDP_OK && p < g->size; p++) {
    const char *vote = votes + (size_t)p * each;
    cddp_result theirs = (cddp_result)cddp__get32(vote);
    if (n > 0) memcpy((char *)all + (size_t)p * n, vote + 4, n);
    if (theirs == CDDP_OK) continue;
    r = cddp__run_simple(g, CDDP__KIND_BROADCAST, text, text, sizeof text, CDDP_U8, p);
    if (r != CDDP_OK) break;
    r = p == g->rank ? cddp__fail(theirs, "%s", text) : cddp__fail(theirs, "rank %d: %s", p, text);
  }
  cddp__free(&g->host->allocator, votes);
  return r;
}

/* Hands a collective to the engine. */
static cddp_result cddp__enqueue(cddp_work *w) {
  w->anywhere = true;
  w->site = cddp__this_site;
  w->record = cddp__record_call(w->group, &w->call);
  if (cddp__record_at(w->group, w->record) != NULL)
    cddp__record_at(w->group, w->record)->engine = 1;
  return cddp__engine_push(w);
}

static cddp_result cddp__start_work(cddp_group *g, const cddp__call *c, cddp_work **work) {
  cddp_result r;
  cddp_work *w;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if ((w = cddp__work_new(g, c->parts != NULL ? cddp__parts_bytes(g) : 0)) == NULL)
    return CDDP_OUT_OF_MEMORY;
  w->call = *c;
  w->run = cddp__run_work_call;
  if (c->parts != NULL) {
    w->call.parts = (cddp__part *)(void *)(w + 1);
    memcpy(w->call.parts, c->parts, (size_t)g->size * sizeof *c->parts);
  }
  if ((r = cddp__enqueue(w)) == CDDP_OK)
    *work = w;
  else
    cddp__free(&g->host->allocator, w);
  return r;
}

/* Runs a validated collective now, or hands it to the engine. */
static cddp_result cddp__start_call(cddp_group *g, const cddp__call *c, cddp_work **work) {
  bool taken = false;
  if (CDDP__UNLIKELY(g->backend != NULL)) {
    cddp_result r = g->backend->start(g, c, work, &taken);
    if (taken || r != CDDP_OK) return r;
  }
  if (work != NULL) return cddp__start_work(g, c, work);
  cddp__engine_drain(g);
  return cddp__run_call(g, c);
}

/* What is wrong with the buffers of a call; NULL: nothing. They must be there, and apart or in
   place as the call's comment says. */
static const char *cddp__wrong_buffers(const cddp_group *g, const cddp__call *c) {
  uintptr_t send = (uintptr_t)c->send, recv = (uintptr_t)c->recv, own;
  bool in_place = false;
  size_t sent, received;
  cddp__buffer_bytes(g, c, &sent, &received);
  if (sent > 0 && c->send == NULL) return cddp__in_one_buffer(c) ? "buf is NULL" : "send is NULL";
  if (received > 0 && c->recv == NULL) return "recv is NULL";
  if (cddp__in_one_buffer(c) || sent == 0 || received == 0 || send >= recv + received ||
      recv >= send + sent)
    return NULL;
  own = c->parts != NULL ? c->parts[g->rank].in_at * c->esize
                         : (uintptr_t)g->rank * c->count * c->esize;
  if (c->kind != CDDP__KIND_ALL_TO_ALL_V)
    in_place = sent > received   ? recv == send + own
               : sent < received ? send == recv + own
                                 : send == recv;
  return in_place ? NULL
                  : "send and recv overlap, and not in the way that is in place (see the "
                    "function's comment in cddp.h)";
}

static cddp_result cddp__check_call(const cddp_group *g, const cddp__call *c) {
  const cddp__shape *shape = &cddp__shapes[c->kind];
  bool one = cddp__in_one_buffer(c), message = c->kind >= CDDP__KIND_SEND;
  const char *wrong = NULL;
  if (g == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "the group is NULL");
  if ((message || shape->from_root || shape->to_root) && (c->root < 0 || c->root >= g->size) &&
      (c->root != CDDP_ANY || c->kind != CDDP__KIND_RECV))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is %d; the group has ranks 0 to %d",
                      message ? "peer" : "root", c->root, g->size - 1);
  if (c->count > SIZE_MAX / 16 / CDDP__MAX_RANKS && /* divisions take long in a small call */
      c->parts == NULL &&
      c->count > SIZE_MAX / 2 / c->esize / (one ? 1 : (size_t)g->size))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "count %zu is beyond the address space", c->count);
  if (!cddp__dtype_ok((cddp_dtype)c->dtype))
    wrong = "dtype is not a cddp_dtype";
  else if (c->op > CDDP_MAX && (c->op > CDDP_BXOR || c->dtype <= CDDP_BF16))
    wrong = c->op > CDDP_BXOR ? "op is not a cddp_op"
                              : "CDDP_BAND, CDDP_BOR and CDDP_BXOR are for integers";
  else if (c->tag < 0)
    wrong = "tag is negative";
  else if (c->count > 0 && (!one || c->send == NULL))
    wrong = cddp__wrong_buffers(g, c);
  return wrong == NULL ? CDDP_OK : cddp__fail(CDDP_INVALID_ARGUMENT, "%s", wrong);
}

CDDP__COLD

/* >>groups ----------------------------------------------------------------------------------------
   Creation, splitting and destruction of groups.
   Owns: nothing but what it makes: the control block is the arena's, which frees it.
   Touches: all of a group that no other room has yet, or has any more.
   Entry points: cddp__init, cddp__split, cddp__group_leave.
   Works as follows: a split takes two rounds of the parent: colors and keys; where each new group's
   control block lies. Then all ranks agree that every one could map its own. A rank that leaves
   marks its slot and counts itself in the control block; the rank that made the block frees it
   once all have left (>>arena). */

/* The ranks of the current round with this color, by (key, rank); returns how many. */
static int cddp__pick_members(const cddp_group *g, int color, int *members) {
  int n = 0, p, i;
  for (p = 0; color >= 0 && p < g->size; p++) {
    const int32_t *theirs = cddp__op_header_of(g, p, g->round)->u.split;
    if (theirs[0] != color) continue;
    for (i = n++; i > 0; i--) {
      if (cddp__op_header_of(g, members[i - 1], g->round)->u.split[1] <= theirs[1]) break;
      members[i] = members[i - 1];
    }
    members[i] = p;
  }
  return n;
}

/* Allocates the control block on the first member of each host, maps it on the others; *block is
   NULL, with the error set, if this rank could not. */
static cddp_result cddp__share_block(cddp_group *g, const int *members, int n, cddp__ref *ref,
                                     char **block) {
  void *p = NULL;
  cddp_result r;
  size_t bytes;
  int first = 0, here = 0, i; /* the host's first member; how many it has */
  for (i = n - 1; i >= 0; i--) {
    if (g->members[members[i]] < 0) continue;
    first = i;
    here++;
  }
  bytes = cddp__block_bytes(n, here);
  *block = NULL;
  memset(ref, 0, sizeof *ref);
  if (n > 0 && members[first] == g->rank) {
    p = cddp__arena_alloc(g->host, bytes, CDDP__FOR_BLOCK);
    if (p != NULL) {
      cddp__store32(&((cddp__control_block *)p)->size, (uint32_t)here);
      *ref = cddp__ref_of(g->host, p, bytes);
    }
  }
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_GROUP_NEW, CDDP__PHASE_BLOCK, 0, ref, sizeof *ref);
  if (r != CDDP_OK || n == 0) return r;
  *ref = cddp__op_header_of(g, members[first], g->round)->u.ref;
  if (ref->kind == CDDP__REF_NONE)
    cddp__fail(CDDP_OUT_OF_MEMORY, "rank %d had no memory for the new group", members[first]);
  else if (cddp__locate(g->host, ref, &p) == CDDP_OK)
    *block = (char *)p;
  return CDDP_OK;
}

/* Leaves the group: what peers wait for from now on is lost. Keeps this thread's error text. */
static void cddp__group_leave(cddp_group *g) {
  cddp__slot *slot = cddp__slot_of(g, g->rank);
  cddp__host *h = g->host;
  cddp_group **at;
  char text[CDDP__ERROR_MAX];
  int i;
  memcpy(text, cddp__error_text, sizeof text);
  if (g->backend != NULL) g->backend->leave(g);
  cddp__engine_stop(g);
  pthread_mutex_lock(&h->lock);
  for (at = &h->groups; *at != g; at = &(*at)->next) {}
  *at = g->next;
  pthread_mutex_unlock(&h->lock);
  cddp__hosts_leave(g);
  for (i = cddp__send_count(g) - 1; i >= 0; i--) /* messages not yet received stay */
    if (!cddp__send_open(g, i)) cddp__arena_free(h, cddp__send_at(g, i)->stage);
  if (g->carrier->leave != NULL) g->carrier->leave(g);
  (void)cddp__swap32(&slot->state, CDDP__SLOT_TAKEN, CDDP__SLOT_LEFT);
  cddp__wake_all(g);
  if (cddp__add32(&g->block->left, 1) == (uint32_t)g->local_size) /* no rank looks for sends now */
    for (i = 1; i < CDDP__SEND_BLOCKS; i++) cddp__arena_free(h, g->sends[i]);
  if (g->block_ref.kind == CDDP__REF_NONE) { /* the first group of its host */
    size_t bytes = cddp__block_bytes(g->size, g->local_size);
    h->slots = NULL;
    if (!h->threads || g->size == 1)
      munmap(g->block, cddp__round_up(bytes, cddp__page_size()));
  }
  pthread_mutex_destroy(&g->fail_lock);
  pthread_mutex_destroy(&g->p2p_lock);
  pthread_mutex_destroy(&g->engine.lock);
  pthread_cond_destroy(&g->engine.changed);
  pthread_cond_destroy(&g->engine.work);
  cddp__free(&h->allocator, g->world);
  cddp__free(&h->allocator, g->hosts);
  cddp__free(&h->allocator, g);
  cddp__host_release(h);
  memcpy(cddp__error_text, text, sizeof text);
}

/* check: a hash that must agree on all ranks of g. */
static cddp_result cddp__split(cddp_group *g, int color, int key, uint64_t check,
                               cddp_group **out) {
  const cddp_allocator *a = &g->host->allocator;
  int *members = (int *)cddp__calloc(a, 2 * (size_t)g->size, sizeof *members), n, i, rank = 0;
  int32_t mine[2];
  uint64_t record, id[3];
  cddp__ref ref;
  char *block = NULL;
  cddp_result r = CDDP_OUT_OF_MEMORY;
  *out = NULL;
  if (members == NULL) return cddp__break(g, r);
  mine[0] = color;
  mine[1] = key;
  g->calls++;
  record = cddp__record_begin(g, CDDP__KIND_GROUP_NEW, g->calls, 0);
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_GROUP_NEW, CDDP__PHASE_CALL, check, mine,
                  sizeof mine);
  if (r != CDDP_OK) goto done;
  n = cddp__pick_members(g, color, members);
  if ((r = cddp__share_block(g, members, n, &ref, &block)) != CDDP_OK) goto done;
  for (i = 0; i < n; i++) {
    if (members[i] == g->rank) rank = i;
    members[g->size + i] = g->members[members[i]];
  }
  if (n > 0) r = CDDP_OUT_OF_MEMORY;
  if (block != NULL)
    r = cddp__group_build(out, g->host, rank, n, members + g->size, block, g->timeout_s);
  if (*out != NULL) {
    (*out)->block_ref = ref;
    id[0] = g->id; /* all of these go into a hash: ranks of other hosts know a group by its id */
    id[1] = g->calls;
    id[2] = (uint64_t)color;
    (*out)->id = cddp__hash64(0, id, sizeof id);
    for (i = 0; g->world != NULL && i < n; i++) members[i + g->size] = g->world[members[i]];
    r = cddp__hosts_attach(*out, members + g->size);
  }
  r = cddp__consensus(g, r, NULL, 0, NULL);
  if (r == CDDP_OK && *out != NULL && (*out)->hosts != NULL) /* hosts get to know each other */
    r = cddp__round(*out, CDDP__SCOPE_ALL, CDDP__KIND_GROUP_NEW, CDDP__PHASE_CONNECTED, 0, NULL, 0);
  if (r == CDDP_OK && g->carrier->split != NULL) r = g->carrier->split(g, *out, color, rank);
  if (*out != NULL && r != CDDP_OK) {
    cddp__group_leave(*out);
    *out = NULL;
  }
done:
  cddp__free(a, members);
  cddp__record_finish(g, record, r);
  return r;
}

static cddp_result cddp__init(cddp_group **out, const cddp_group_desc *d) {
  cddp__place at;
  cddp__host *h;
  unsigned char job[8]; /* rank 0's names the job */
  cddp_group *g = NULL;
  int size;
  cddp_result r;
  if ((r = cddp__discover(&at, d)) != CDDP_OK) return r;
  size = at.rank < at.world_size ? at.world_size : at.rank + 1;
  h = cddp__host_create(&d->allocator, &d->logger, size, at.rank);
  if (h == NULL) return CDDP_OUT_OF_MEMORY;
  h->threads = at.world_size == 1 && !at.joins;
  r = at.joins              ? cddp__join(&g, &at, d, h)
      : at.world_size > 1 ? cddp__meet(&g, &at, d, h)
                          : cddp__world_group(&g, h, 0, 1, at.timeout_s);
  cddp__host_release(h);
  if (at.joins && r != CDDP_OK && g != NULL) cddp__group_leave(g);
  if (g == NULL || at.joins) {
    *out = r == CDDP_OK ? g : NULL;
    return r;
  }
  cddp__put64(job, cddp__record_job());
  if (r == CDDP_OK) r = cddp__hosts_attach(g, NULL);
  if (r == CDDP_OK)
    r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_BARRIER, CDDP__PHASE_CALL, 0, job, sizeof job);
  if (r == CDDP_OK)
    r = cddp__record_open(&g->host->record,
                          cddp__get64(cddp__op_header_of(g, 0, g->round)->u.bytes), g->rank,
                          g->size, 0);
#ifdef CDDP_MPI
  if (r == CDDP_OK && cddp__backend_name(d) != NULL && strcmp(cddp__backend_name(d), "mpi") == 0) {
    r = cddp__consensus(g, cddp__mpi_start(g), NULL, 0, NULL);
    if (r == CDDP_OK) r = cddp__mpi_split(NULL, g, 0, g->rank);
    if (r == CDDP_OK) g->carrier = &cddp__mpi_carrier;
  }
#endif
  if (r != CDDP_OK) {
    cddp__group_leave(g);
    return r;
  }
  cddp__log(&d->logger, 2, "rank %d of %d is ready (pid %d, %d cores%s)", at.rank, at.world_size,
            (int)getpid(), g->host->cores, g->oversubscribed ? ", shared by more ranks" : "");
  *out = g;
  return r;
}
CDDP__COLD_END

/* >>sparse -------------------------------------------------------------------------------------
   Gradients that are rows of a parameter, as an embedding's are. Pure. Owns: a cddp__sparse and
   its lists of rows. Touches: the packets that it is given. Entry points: cddp__sparse_new and
   _free; cddp__rows_add for backward; cddp__rows_pack and cddp__rows_merge for the step.
   Works as follows: backward adds (number of the row, values) as it finds them. At the step each
   rank sorts those of each of its shards by number and adds up those of one number, in the order in
   which they came, into a packet that its peers read. Each rank then walks through the sorted lists
   of all shards at once. A row's mean is the canonical sum, in which a shard without the row counts
   as zeros, so the bits are a dense gradient's. */

typedef struct cddp__row_order {
  int64_t number;
  size_t at; /* its place in the list */
} cddp__row_order;

/* Rows of a matrix, by number; owner: cddp__sparse. */
typedef struct cddp__rows {
  size_t n, capacity;
  int64_t *number;   /* [capacity] */
  char *values;      /* [capacity] rows of `bytes` bytes */
  cddp__row_order *order; /* [capacity] scratch for sorting */
} cddp__rows;

/* A parameter whose gradient is rows. Owned by its cddp_ddp; one thread at a time. */
typedef struct cddp__sparse {
  size_t rows, width, bytes; /* of the parameter; elements and bytes of a row */
  cddp__rows added;          /* since the last step, as they came; a number may come again */
  cddp__rows mean;           /* of the last cddp_ddp_wait, each number once, ascending */
  char *zeros;               /* a row */
  size_t *ends;              /* [shards of a rank] added.n when each shard of the step ended */
} cddp__sparse;

/* One shard's list while it is merged. */
typedef struct cddp__row_list {
  const int64_t *number;
  const char *values;
  size_t n, next; /* rows, and the first that is not merged */
  char *packet;   /* what follows in the shard's packet */
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
  cddp__free(a, p->ends);
  cddp__free(a, p);
}

static cddp__sparse *cddp__sparse_new(const cddp_allocator *a, const cddp_param *p, size_t rows,
                                      int shards) {
  cddp__sparse *s = (cddp__sparse *)cddp__calloc(a, 1, sizeof *s);
  if (s == NULL) return NULL;
  s->rows = rows;
  s->width = p->count / rows;
  s->bytes = s->width * cddp__dtype_size(p->dtype);
  s->zeros = (char *)cddp__calloc(a, 1, s->bytes);
  s->ends = (size_t *)cddp__calloc(a, (size_t)shards, sizeof *s->ends);
  if (s->zeros != NULL && s->ends != NULL) return s;
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

/* Writes n of the rows added, from `first` on, sorted and summed by number, to packet. */
static void cddp__rows_pack(cddp__sparse *s, size_t first, size_t n, cddp_dtype dtype,
                            char *packet) {
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
    order[i].number = s->added.number[first + i];
    order[i].at = first + i;
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
}

/* The mean over n shards' lists, which stand at this parameter's list; sources: scratch [n]. */
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
/* >>optim --------------------------------------------------------------------------------------
   Optimizers: torch.optim.SGD, to the last bit, and AdamW. Owns: a cddp_optim and its states,
   unless these lie in shares (>>ddp) or on a device (>>kernels). Touches: the caller's parameters,
   gradients and copies. Entry points: the public functions; for a cddp_ddp's step cddp__update_of,
   _update_run and cddp__optim_rows.
   Works as follows: an optimizer is a table, cddp__algorithm: the states that it keeps of each
   parameter (arrays as long as it), the scalars of a step, and a function that steps one block.
   What is done to an element depends on nothing but its own values and the scalars, so that any
   piece of a parameter may be stepped on its own. Scalars are computed in double and rounded once
   to the type of the arithmetic. With master_weights f16 and bf16 are that of weights and gradients
   only: all else is f32, and each block of weights is rounded from its master. SGD: every a + s * b
   is one fused multiply-add, as in PyTorch's AVX2 kernels. f16 and bf16 compute each operation in
   f32 and round its result, as PyTorch's vector loops do; its scalar loops, which take the last
   elements of each thread's chunk of bf16, round the product too. AdamW: the operations of
   PyTorch's fused CPU kernel, see CDDP__ADAMW_STEP; powers of beta1 and beta2 are products, as pow
   differs from libm to libm. */

typedef struct cddp__update cddp__update;

/* The settings of all optimizers, of which each has its own. */
typedef struct cddp__settings {
  double lr, weight_decay, momentum, dampening, beta1, beta2, eps;
  bool nesterov, maximize, amsgrad, master_weights;
  const double *lr_scales, *weight_decays;
  cddp_ddp *ddp;
  void *stream;
  void *const *copies;
  cddp_dtype copy_dtype;
} cddp__settings;

/* An optimizer's arithmetic. */
typedef struct cddp__algorithm {
  const char *name;
  const char *states[CDDP__STATES]; /* their names in files */
  bool counts; /* a step depends on its number, which is in files too */
  bool wide;   /* f32 and f64 with dense gradients only */
  /* Scalars of the step that parameter i takes next, and the loop that can do all of it. */
  void (*begin)(const cddp_optim *o, int i, cddp__update *u);
  /* Steps a block of n elements, all of them in the type of the arithmetic. */
  void (*block)(const cddp__update *u, void *weights, const void *gradient, void *const *states,
                size_t n);
  /* Steps n segments on a device, of parameters whose step is that of parameter i. */
  int (*launch)(const cddp_optim *o, int i, const cddp_kernels *k, const cddp_segment *segments,
                int n, double factor, const double *clip, unsigned flags, void *stream);
} cddp__algorithm;

struct cddp_optim { /* all fields: the thread that calls cddp_optim_* or cddp_ddp_step */
  cddp_allocator allocator;
  cddp_param *params;  /* [count], the caller's */
  int count;
  const cddp__algorithm *algorithm;
  cddp__settings desc; /* lr may change */
  uint64_t settings, check; /* hashes without lr, with it; never 0; bit 0 is clear */
  uint64_t paired;     /* id of the cddp_ddp that it was last found to suit; 0: none */
  int states;          /* of each parameter; with master_weights the last one is its master */
  void **state;        /* [states][count] each as long as its parameter; NULL: none yet */
  float *steps;        /* [count] that the parameter has taken, as PyTorch counts them; 0: its
                          states have no value */
  const unsigned char *used; /* [count] 0: skip the parameter; NULL: use all. The cddp_ddp's */
  cddp__sparse *const *sparse; /* [count] NULL: dense; NULL: all are. The cddp_ddp's */
  void *share;         /* states that a cddp_ddp keeps in pieces; NULL: those above are whole */
  void (*drop)(cddp_optim *o); /* frees the share and NULLs it; set along with share */
  const cddp__optim_backend *backend; /* parameters on a device; NULL: in host memory */
  void *flat;                         /* their states in one piece; NULL: none */
  void **copies;                      /* [count] of desc.copy_dtype, the caller's; or NULL */
  double *lr_scales, *weight_decays;  /* [count] */
  bool *launched;                     /* [count] scratch of a step on a device */
  bool *fresh;                        /* [count] the master is to begin as the weights are */
};

/* One step of one parameter. */
struct cddp__update {
  const cddp__algorithm *algorithm;
  const cddp__kernels *kernels; /* by dtype */
  cddp_dtype stored; /* type of the weights and gradients */
  cddp_dtype dtype;  /* of the states, and of each result: stored, or with a master f32 */
  cddp__scalars scalars;
  char *states[CDDP__STATES]; /* where they begin; NULL: there is none */
  char *master;               /* likewise */
  bool fresh;                 /* it is to begin as the weights are */
  /* Does a data-parallel step of an f32 parameter in one loop; NULL: not this one. */
  void (*loop)(const cddp__fused_args *args, int ranks, size_t n);
};

/* --- SGD --- */

static void cddp__sgd_begin(const cddp_optim *o, int i, cddp__update *u) {
  cddp__scalars *s = &u->scalars;
  s->sign = o->desc.maximize ? -1.0 : 1.0;
  s->step = -o->desc.lr * o->lr_scales[i];
  s->decay = o->weight_decays[i];
  s->keep = o->desc.momentum;
  s->take = 1.0 - o->desc.dampening;
  s->nesterov = o->desc.nesterov;
  s->first = o->steps[i] == 0;
  if (s->keep != 0 && !s->nesterov && !s->first) u->loop = u->kernels[CDDP_F32].sgd_loop;
}

static double cddp__sgd_scalar(cddp_dtype dtype, double x) {
  float y = cddp__round_odd(x);
  if (dtype == CDDP_F16) return (double)cddp__f16_to_f32(cddp__f32_to_f16(y));
  if (dtype == CDDP_BF16) return (double)cddp__bf16_to_f32(cddp__f32_to_bf16(y));
  return x;
}

static void cddp__sgd_round(const cddp__update *u, void *d, size_t n) {
  uint16_t rounded[CDDP__BLOCK_BYTES / sizeof(float)];
  if (!cddp__dtype_half(u->dtype)) return;
  u->kernels[u->dtype].narrow(rounded, (cddp__f32 *)d, n);
  u->kernels[u->dtype].widen((cddp__f32 *)d, rounded, n);
}

static void cddp__sgd_add(const cddp__update *u, void *d, const void *a, const void *b, size_t n,
                          double f) { /* d = a + f * b */
  f = cddp__sgd_scalar(u->dtype, f);
  u->kernels[cddp__compute_type(u->dtype)].mix(d, a, b, n, 1.0, f);
  cddp__sgd_round(u, d, n);
}

static void cddp__sgd_mix(const cddp__update *u, void *m, const void *b, size_t n) {
  const cddp__scalars *s = &u->scalars; /* m = keep * m + take * b */
  if (!cddp__dtype_half(u->dtype)) {
    u->kernels[u->dtype].mix(m, m, b, n, s->keep, s->take);
    return;
  }
  u->kernels[CDDP_F32].scale(m, n, cddp__sgd_scalar(u->dtype, s->keep), false);
  cddp__sgd_round(u, m, n);
  cddp__sgd_add(u, m, m, b, n, s->take);
}

/* Works as follows, on a block that stays in the first cache:
   d = g; d = -d if maximize; d = d + decay * p; m = first ? d : momentum * m + (1 - dampening) * d;
   d = nesterov ? d + momentum * m : m; p = p - lr * d. d is g or m itself where it is equal. */
static void cddp__sgd_block(const cddp__update *u, void *p, const void *g, void *const *states,
                            size_t n) {
  double buf[CDDP__BLOCK_BYTES / sizeof(double)];
  const cddp__scalars *s = &u->scalars;
  cddp_dtype type = cddp__compute_type(u->dtype);
  const void *d = g;
  void *m = states[0];
  if (s->sign < 0) {
    memcpy(buf, g, n * cddp__dtype_size(type));
    u->kernels[type].scale(buf, n, -1.0, false);
    d = buf;
  }
  if (s->decay != 0) {
    cddp__sgd_add(u, buf, d, p, n, s->decay);
    d = buf;
  }
  if (m != NULL) {
    if (s->first) memcpy(m, d, n * cddp__dtype_size(type));
    else cddp__sgd_mix(u, m, d, n);
    if (s->nesterov) cddp__sgd_add(u, buf, d, m, n, s->keep);
    d = s->nesterov ? buf : m;
  }
  cddp__sgd_add(u, p, p, d, n, s->step);
}

static int cddp__sgd_launch(const cddp_optim *o, int i, const cddp_kernels *k,
                            const cddp_segment *segments, int n, double factor,
                            const double *clip, unsigned flags, void *stream) {
  cddp_sgd_desc d;
  memset(&d, 0, sizeof d);
  d.lr = o->desc.lr * o->lr_scales[i];
  d.momentum = o->desc.momentum;
  d.dampening = o->desc.dampening;
  d.weight_decay = o->weight_decays[i];
  d.nesterov = o->desc.nesterov;
  d.maximize = o->desc.maximize;
  if (d.momentum != 0 && o->steps[i] == 0) flags |= (unsigned)CDDP_SGD_FIRST;
  return k->sgd(segments, n, o->params[i].dtype, &d, factor, clip, flags, stream);
}

static const cddp__algorithm cddp__sgd = {"SGD", {"momentum_buffer", NULL, NULL}, false, false,
                                          cddp__sgd_begin, cddp__sgd_block, cddp__sgd_launch};

/* --- AdamW --- */

static double cddp__power(double x, uint32_t n) {
  double y = 1.0;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) y *= x;
  return y;
}

static void cddp__adamw_begin(const cddp_optim *o, int i, cddp__update *u) {
  const cddp__settings *d = &o->desc;
  uint32_t t = (uint32_t)o->steps[i] + 1;
  cddp__scalars *s = &u->scalars;
  double lr = d->lr * o->lr_scales[i];
  s->sign = d->maximize ? -1.0 : 1.0;
  s->step = -lr / (1.0 - cddp__power(d->beta1, t));
  s->decay = 1.0 - lr * o->weight_decays[i];
  s->lerp = 1.0 - d->beta1;
  s->keep = d->beta2;
  s->take = 1.0 - d->beta2;
  s->root = sqrt(1.0 - cddp__power(d->beta2, t));
  s->eps = d->eps;
  if (!d->amsgrad) u->loop = u->kernels[CDDP_F32].adamw_loop;
}

static void cddp__adamw_block(const cddp__update *u, void *weights, const void *gradient,
                              void *const *states, size_t n) {
  u->kernels[u->dtype].adamw(weights, gradient, states, n, &u->scalars);
}

static int cddp__adamw_launch(const cddp_optim *o, int i, const cddp_kernels *k,
                              const cddp_segment *segments, int n, double factor,
                              const double *clip, unsigned flags, void *stream) {
  cddp__update u;
  cddp_adamw_step a;
  memset(&u, 0, sizeof u);
  u.kernels = cddp__pick_kernels();
  cddp__adamw_begin(o, i, &u);
  a.step = u.scalars.step;
  a.decay = u.scalars.decay;
  a.lerp = u.scalars.lerp;
  a.keep = u.scalars.keep;
  a.take = u.scalars.take;
  a.root = u.scalars.root;
  a.eps = u.scalars.eps;
  a.maximize = o->desc.maximize;
  a.amsgrad = o->desc.amsgrad;
  a.stride = (size_t)((char *)o->state[o->count + i] - (char *)o->state[i]);
  return k->adamw(segments, n, o->params[i].dtype, &a, factor, clip, flags, stream);
}

static const cddp__algorithm cddp__adamw = {
    "AdamW", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, true, true,
    cddp__adamw_begin, cddp__adamw_block, cddp__adamw_launch};

/* --- a step of a piece of a parameter, whatever the optimizer --- */

static cddp_dtype cddp__state_type(const cddp_optim *o, int i) {
  cddp_dtype dtype = o->params[i].dtype;
  return o->desc.master_weights ? cddp__compute_type(dtype) : dtype;
}

/* State k is its master. */
static bool cddp__is_master(const cddp_optim *o, int k) {
  return o->desc.master_weights && k == o->states - 1;
}

static bool cddp__has_state(const cddp_optim *o, int k, int i) {
  return !cddp__is_master(o, k) || cddp__dtype_half(o->params[i].dtype);
}

/* The step that parameter i takes next, with states that begin at state[k * stride]. */
static cddp__update cddp__update_of(const cddp_optim *o, int i, void *const *state, int stride) {
  cddp__update u;
  int k;
  memset(&u, 0, sizeof u);
  u.algorithm = o->algorithm;
  u.kernels = cddp__pick_kernels();
  u.stored = o->params[i].dtype;
  u.dtype = cddp__state_type(o, i);
  u.fresh = o->fresh[i];
  for (k = 0; k < o->states; k++) {
    char *at = (char *)state[k * stride];
    if (!cddp__is_master(o, k)) u.states[k] = at;
    else if (cddp__has_state(o, k, i)) u.master = at;
  }
  o->algorithm->begin(o, i, &u);
  return u;
}

/* A block of F16 or BF16: widened, computed, narrowed. */
static void cddp__half_block(const cddp__update *u, void *weights, const void *gradient,
                             void *const *states, size_t n) {
  float wide[2 + CDDP__STATES][CDDP__BLOCK_BYTES / sizeof(float)];
  void *wide_states[CDDP__STATES];
  int k;
  u->kernels[u->dtype].widen(wide[0], weights, n);
  u->kernels[u->dtype].widen(wide[1], gradient, n);
  for (k = 0; k < CDDP__STATES; k++) {
    wide_states[k] = states[k] != NULL ? wide[2 + k] : NULL;
    if (states[k] != NULL) u->kernels[u->dtype].widen(wide[2 + k], states[k], n);
  }
  u->algorithm->block(u, wide[0], wide[1], wide_states, n);
  u->kernels[u->dtype].narrow(weights, wide[0], n);
  for (k = 0; k < CDDP__STATES; k++)
    if (states[k] != NULL) u->kernels[u->dtype].narrow(states[k], wide[2 + k], n);
}

/* A block of F16 or BF16 with a master, which is stepped in their place. */
static void cddp__master_block(const cddp__update *u, void *master, void *weights,
                               const void *gradient, void *const *states, size_t n) {
  float wide[CDDP__BLOCK_BYTES / sizeof(float)];
  if (u->fresh) u->kernels[u->stored].widen((cddp__f32 *)master, weights, n);
  u->kernels[u->stored].widen(wide, gradient, n);
  u->algorithm->block(u, master, wide, states, n);
  u->kernels[u->stored].narrow(weights, (cddp__f32 *)master, n);
}

/* Steps n elements, whose states are those of u from element `first` on. */
static void cddp__update_run(const cddp__update *u, size_t first, void *weights,
                             const void *gradient, size_t n) {
  size_t esize = cddp__dtype_size(u->stored), size = cddp__dtype_size(u->dtype), done, m;
  size_t block = CDDP__BLOCK_BYTES / cddp__dtype_size(cddp__compute_type(u->dtype));
  void *states[CDDP__STATES];
  int k;
  for (done = 0; done < n; done += m) {
    char *p = (char *)weights + done * esize;
    const char *g = (const char *)gradient + done * esize;
    m = cddp__min(block, n - done);
    for (k = 0; k < CDDP__STATES; k++)
      states[k] = u->states[k] != NULL ? u->states[k] + (first + done) * size : NULL;
    if (u->master != NULL)
      cddp__master_block(u, u->master + (first + done) * size, p, g, states, m);
    else if (cddp__dtype_half(u->dtype)) cddp__half_block(u, p, g, states, m);
    else u->algorithm->block(u, p, g, states, m);
  }
}

/* --- what callers pass --- */

static bool cddp__dtype_trains(cddp_dtype d) { return (unsigned)d <= (unsigned)CDDP_BF16; }

static const char *cddp__param_name(const cddp_param *p, int index, char *space, size_t n) {
  if (p->name != NULL) return p->name;
  snprintf(space, n, "#%d", index);
  return space;
}

enum { CDDP__HAS_NAME = 1, CDDP__HAS_DATA = 2, CDDP__IS_TRAINED = 4 };

/* Parameters or buffers of a caller, of which these rules hold. */
static cddp_result cddp__check_params(const cddp_param *params, int count, int rules) {
  char space[24];
  int i;
  if (count < 0 || (count > 0 && params == NULL))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "params is NULL or count %d is negative", count);
  for (i = 0; i < count; i++) {
    const cddp_param *p = &params[i];
    const char *wrong = NULL;
    if ((rules & CDDP__HAS_NAME) != 0 && p->name == NULL)
      wrong = "has no name, by which a file knows it";
    else if ((rules & CDDP__IS_TRAINED) != 0 && !cddp__dtype_trains(p->dtype))
      wrong = "must be f32, f64, f16 or bf16";
    else if (!cddp__dtype_ok(p->dtype))
      wrong = "has a dtype that is no cddp_dtype";
    else if (p->count > SIZE_MAX / 64)
      wrong = "has too many elements";
    else if ((rules & CDDP__HAS_DATA) != 0 && p->data == NULL && p->count > 0)
      wrong = "has data NULL";
    if (wrong != NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "parameter \"%s\" %s",
                        cddp__param_name(p, i, space, sizeof space), wrong);
  }
  return CDDP_OK;
}

static cddp_result cddp__check_sparse(const cddp_param *params, int count, const size_t *rows) {
  char space[24];
  int i;
  for (i = 0; rows != NULL && i < count; i++) {
    const char *name = cddp__param_name(&params[i], i, space, sizeof space);
    if (rows[i] == 0) continue;
    if (params[i].count == 0 || params[i].count % rows[i] != 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "parameter \"%s\" cannot have %zu sparse rows, with %zu elements", name,
                        rows[i], params[i].count);
    if (params[i].grad != NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "parameter \"%s\" has sparse rows; its grad must be NULL", name);
  }
  return CDDP_OK;
}

/* Memory that belongs to one parameter. */
typedef struct cddp__owned {
  uintptr_t begin, end;
  const char *what; /* "data", "grad" or "copy" */
  int param;
} cddp__owned;

static int cddp__by_address(const void *x, const void *y) {
  const cddp__owned *a = (const cddp__owned *)x, *b = (const cddp__owned *)y;
  if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
  return a->param < b->param ? -1 : a->param > b->param;
}

static void cddp__own(cddp__owned *list, size_t *n, int param, const char *what, const void *p,
                      size_t bytes) {
  if (p == NULL || bytes == 0) return;
  list[*n].begin = (uintptr_t)p;
  list[*n].end = (uintptr_t)p + bytes;
  list[*n].what = what;
  list[(*n)++].param = param;
}

static cddp_result cddp__fail_overlap(const cddp_param *params, const cddp__owned *a,
                                      const cddp__owned *b) {
  char space[2][24];
  const cddp__owned *first = a->param <= b->param ? a : b, *second = first == a ? b : a;
  bool tied = strcmp(a->what, "data") == 0 && strcmp(b->what, "data") == 0;
  return cddp__fail(
      CDDP_INVALID_ARGUMENT, "%s of parameter \"%.100s\" and %s of \"%.100s\" %s; %s",
      first->what, cddp__param_name(&params[first->param], first->param, space[0], 24),
      second->what, cddp__param_name(&params[second->param], second->param, space[1], 24),
      a->begin == b->begin && a->end == b->end ? "are the same memory" : "overlap",
      tied ? "list tied weights once, and let both backward passes add to the one gradient"
           : "each must have memory of its own");
}

/* No two parameters may share weights, gradients or copies: a fused step would update them twice,
   or on two ranks at once. copies: NULL, or [count] of 2 bytes an element. */
static cddp_result cddp__check_own_memory(const cddp_param *params, int count,
                                          void *const *copies, const cddp_allocator *a) {
  cddp__owned *list = (cddp__owned *)cddp__calloc(a, 3 * (size_t)count, sizeof *list);
  cddp_result r = CDDP_OK;
  size_t n = 0, k;
  int i;
  if (list == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < count; i++) {
    size_t bytes = params[i].count * cddp__dtype_size(params[i].dtype);
    cddp__own(list, &n, i, "data", params[i].data, bytes);
    cddp__own(list, &n, i, "grad", params[i].grad, bytes);
    if (copies != NULL) cddp__own(list, &n, i, "copy", copies[i], params[i].count * 2);
  }
  qsort(list, n, sizeof *list, cddp__by_address);
  for (k = 1; k < n && r == CDDP_OK; k++)
    if (list[k].begin < list[k - 1].end) r = cddp__fail_overlap(params, &list[k - 1], &list[k]);
  cddp__free(a, list);
  return r;
}

/* --- a step of all parameters --- */

static bool cddp__optim_skips(const cddp_optim *o, int i) {
  return o->params[i].count == 0 || (o->used != NULL && !o->used[i]);
}

/* Brings n elements of parameter i's copy, if it has one, up to date. */
static void cddp__optim_copy(const cddp_optim *o, int i, size_t from, size_t n) {
  if (o->copies != NULL && o->copies[i] != NULL)
    cddp__convert((uint16_t *)o->copies[i] + from, o->desc.copy_dtype,
                  (const float *)o->params[i].data + from, CDDP_F32, n);
}

/* Brings all copies up to date. */
static cddp_result cddp__write_copies(cddp_optim *o) {
  int i;
  if (o->backend != NULL && o->copies != NULL) return o->backend->copy(o);
  for (i = 0; i < o->count; i++)
    if (o->params[i].data != NULL) cddp__optim_copy(o, i, 0, o->params[i].count);
  return CDDP_OK;
}

/* A parameter with a dense gradient; its copy while the new weights are in the cache. */
static void cddp__optim_dense(cddp_optim *o, int i) {
  const cddp_param *p = &o->params[i];
  cddp__update u = cddp__update_of(o, i, o->state + i, o->count);
  size_t size = cddp__dtype_size(p->dtype), at, n;
  bool copied = o->copies != NULL && o->copies[i] != NULL;
  for (at = 0; at < p->count; at += n) {
    n = copied ? cddp__min(p->count - at, (size_t)CDDP__BLOCK_BYTES / sizeof(float)) : p->count;
    cddp__update_run(&u, at, (char *)p->data + at * size, (char *)p->grad + at * size, n);
    cddp__optim_copy(o, i, at, n);
  }
}

/* A parameter whose gradient is rows: what a dense gradient with zeros elsewhere would do. Without
   states the other rows stay as they are and are not looked at. */
static void cddp__optim_rows(cddp_optim *o, int i, const cddp__sparse *g) {
  const cddp_param *p = &o->params[i];
  cddp__update u = cddp__update_of(o, i, o->state + i, o->count);
  bool every = o->states > 0, has;
  size_t k = 0, row;
  for (row = 0; every ? row < g->rows : k < g->mean.n; row++, k += has) {
    if (!every) row = (size_t)g->mean.number[k];
    has = k < g->mean.n && (size_t)g->mean.number[k] == row;
    cddp__update_run(&u, row * g->width, (char *)p->data + row * g->bytes,
                     has ? g->mean.values + k * g->bytes : g->zeros, g->width);
    cddp__optim_copy(o, i, row * g->width, g->width);
  }
}

static cddp_result cddp__check_rows(const cddp_optim *o, int i) {
  char space[24];
  if (o->weight_decays[i] == 0 && !o->algorithm->wide) return CDDP_OK;
  return cddp__fail(CDDP_UNSUPPORTED,
                    "parameter \"%s\" has rows as its gradient, which go without %s; have a dense "
                    "gradient, or %s",
                    cddp__param_name(&o->params[i], i, space, sizeof space),
                    o->algorithm->wide ? o->algorithm->name : "weight_decay",
                    o->algorithm->wide ? "use SGD" : "set that to 0");
}

static cddp__sparse *cddp__optim_sparse(const cddp_optim *o, int i) { /* NULL: it is dense */
  return o->sparse != NULL ? o->sparse[i] : NULL;
}

/* Memory for parameter i's states, zeroed; those that are there stay. */
static cddp_result cddp__need_states(cddp_optim *o, int i) {
  const cddp_param *p = &o->params[i];
  int k;
  for (k = i; k < o->count * o->states; k += o->count) {
    if (o->state[k] != NULL || !cddp__has_state(o, k / o->count, i)) continue;
    o->state[k] = cddp__calloc(&o->allocator, p->count, cddp__dtype_size(cddp__state_type(o, i)));
    if (o->state[k] == NULL) return CDDP_OUT_OF_MEMORY;
  }
  return CDDP_OK;
}

static void cddp__count_step(cddp_optim *o, int i) {
  o->steps[i]++;
  o->fresh[i] = false;
}

/* Checks and allocates all that a step needs, so that a step is done as a whole or not at all. */
static cddp_result cddp__optim_prepare(cddp_optim *o) {
  cddp_result r = CDDP_OK;
  char space[24];
  int i;
  if (o->share != NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "after cddp_ddp_step each rank holds its part of the states only; call "
                      "cddp_ddp_wait before cddp_optim_step");
  for (i = 0; r == CDDP_OK && i < o->count; i++) {
    const cddp_param *p = &o->params[i];
    const char *name = cddp__param_name(p, i, space, sizeof space);
    bool sparse = cddp__optim_sparse(o, i) != NULL;
    if (cddp__optim_skips(o, i)) continue;
    if (sparse && (r = cddp__check_rows(o, i)) != CDDP_OK) return r;
    if (p->data == NULL)
      return cddp__fail(CDDP_INVALID_ARGUMENT, "parameter \"%s\" has no data", name);
    if (p->grad == NULL && !sparse)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "parameter \"%s\" has no gradient; set grad, or have cddp_ddp_create place "
                        "it, or (sparse) set ddp in cddp_sgd_desc", name);
    if (!cddp__dtype_trains(p->dtype))
      return cddp__fail(CDDP_INVALID_ARGUMENT, "parameter \"%s\" now has dtype %d", name,
                        (int)p->dtype);
    if (o->backend == NULL) r = cddp__need_states(o, i);
  }
  return r;
}

CDDPDEF cddp_result cddp_optim_step(cddp_optim *o) {
  int i;
  CDDP__CHECK(o != NULL, "the cddp_optim is NULL");
  CDDP__TRY(cddp__optim_prepare(o));
  if (o->backend != NULL) CDDP__TRY(o->backend->step(o));
  for (i = 0; i < o->count; i++) {
    if (cddp__optim_skips(o, i)) continue;
    if (o->backend == NULL && cddp__optim_sparse(o, i) != NULL)
      cddp__optim_rows(o, i, o->sparse[i]);
    else if (o->backend == NULL)
      cddp__optim_dense(o, i);
    cddp__count_step(o, i);
  }
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_optim_zero_grad(cddp_optim *o) {
  int i;
  CDDP__CHECK(o != NULL, "the cddp_optim is NULL");
  if (o->backend != NULL) CDDP__TRY(o->backend->zero(o));
  for (i = 0; i < o->count; i++) {
    cddp_param *p = &o->params[i];
    if (o->backend == NULL && p->grad != NULL)
      memset(p->grad, 0, p->count * cddp__dtype_size(p->dtype));
    if (cddp__optim_sparse(o, i) != NULL) o->sparse[i]->mean.n = 0;
  }
  return CDDP_OK;
}

/* --- settings, creation and destruction --- */

static void cddp__set_lr(cddp_optim *o, double lr) {
  o->desc.lr = lr;
  o->check = (cddp__hash64(o->settings, &lr, sizeof lr) & ~(uint64_t)1) | 2;
}

CDDPDEF cddp_result cddp_optim_set_lr(cddp_optim *o, double lr) {
  CDDP__CHECK(o != NULL, "the cddp_optim is NULL");
  CDDP__CHECK(lr >= 0 && lr <= DBL_MAX, "lr is %g; it must be finite and at least 0", lr);
  cddp__set_lr(o, lr);
  return CDDP_OK;
}

CDDPDEF double cddp_optim_lr(const cddp_optim *o) { return o != NULL ? o->desc.lr : 0.0; }

CDDPDEF cddp_result cddp_optim_write_copies(cddp_optim *o) {
  CDDP__CHECK(o != NULL, "the cddp_optim is NULL");
  memset(o->fresh, true, (size_t)o->count * sizeof *o->fresh);
  return cddp__named(__func__, cddp__write_copies(o));
}

CDDPDEF void cddp_optim_destroy(cddp_optim *o) {
  cddp_allocator a;
  int i;
  if (o == NULL) return;
  if (o->share != NULL) o->drop(o);
  if (o->backend != NULL) o->backend->leave(o);
  a = o->allocator;
  for (i = 0; o->backend == NULL && i < o->count * o->states; i++) cddp__free(&a, o->state[i]);
  cddp__free(&a, o);
}

static cddp_result cddp__check_number(const char *what, double x, double below) {
  if (x >= 0 && x < below && x <= DBL_MAX) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is %g; it must be finite and at least 0%s", what, x,
                    below <= 1 ? ", and below 1" : "");
}

/* What parameter i asks of the settings. */
static cddp_result cddp__check_param_settings(const cddp_param *p, int i,
                                              const cddp__algorithm *algorithm,
                                              const cddp__settings *d) {
  char space[24], what[160];
  const char *name = cddp__param_name(p, i, space, sizeof space);
  cddp_result r = CDDP_OK;
  if (d->copies != NULL && d->copies[i] != NULL && p->dtype != CDDP_F32)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "parameter \"%s\" is %s; only f32 weights have copies",
                      name, cddp__dtype_names[p->dtype]);
  if (algorithm->wide && cddp__dtype_half(p->dtype) && !d->master_weights)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "parameter \"%s\" is %s; %s steps f32 and f64: set master_weights, or pass "
                      "f32 weights, and those as copies",
                      name, cddp__dtype_names[p->dtype], algorithm->name);
  snprintf(what, sizeof what, "lr_scales of parameter \"%.100s\"", name);
  if (d->lr_scales != NULL) r = cddp__check_number(what, d->lr_scales[i], INFINITY);
  snprintf(what, sizeof what, "weight_decays of parameter \"%.100s\"", name);
  if (r == CDDP_OK && d->weight_decays != NULL)
    r = cddp__check_number(what, d->weight_decays[i], INFINITY);
  return r;
}

static cddp_result cddp__check_settings(const cddp_param *params, int count,
                                        const cddp__algorithm *algorithm,
                                        const cddp__settings *d) {
  cddp_result r = cddp__check_number("lr", d->lr, INFINITY);
  int i;
  if (r == CDDP_OK) r = cddp__check_number("momentum", d->momentum, INFINITY);
  if (r == CDDP_OK) r = cddp__check_number("weight_decay", d->weight_decay, INFINITY);
  if (r == CDDP_OK) r = cddp__check_number("beta1", d->beta1, 1.0);
  if (r == CDDP_OK) r = cddp__check_number("beta2", d->beta2, 1.0);
  if (r == CDDP_OK) r = cddp__check_number("eps", d->eps, INFINITY);
  if (r != CDDP_OK) return r;
  if (!(fabs(d->dampening) <= DBL_MAX))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "dampening is %g; it must be finite", d->dampening);
  if (d->nesterov && (!(d->momentum > 0) || d->dampening != 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "nesterov needs momentum > 0 and dampening 0; they are %g and %g",
                      d->momentum, d->dampening);
  if (d->copies != NULL && !cddp__dtype_half(d->copy_dtype))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "copy_dtype is %d; it must be CDDP_F16 or CDDP_BF16",
                      (int)d->copy_dtype);
  if (d->ddp != NULL && (d->ddp->params != params || d->ddp->count != count))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "desc.ddp was made for other parameters");
  for (i = 0; r == CDDP_OK && i < count; i++)
    r = cddp__check_param_settings(&params[i], i, algorithm, d);
  return r;
}

/* What must agree between ranks, but for lr. */
static uint64_t cddp__hash_settings(const cddp_optim *o) {
  const cddp__settings *d = &o->desc;
  uint64_t h = (uint64_t)d->nesterov | (uint64_t)d->maximize << 1 | (uint64_t)d->amsgrad << 2 |
               (uint64_t)d->master_weights << 3;
  double numbers[5];
  numbers[0] = d->momentum;
  numbers[1] = d->dampening;
  numbers[2] = d->beta1;
  numbers[3] = d->beta2;
  numbers[4] = d->eps;
  h = cddp__hash64(h, o->algorithm->name, strlen(o->algorithm->name));
  h = cddp__hash64(h, numbers, sizeof numbers);
  h = cddp__hash64(h, o->lr_scales, (size_t)o->count * sizeof *o->lr_scales);
  h = cddp__hash64(h, o->weight_decays, (size_t)o->count * sizeof *o->weight_decays);
  return (h & ~(uint64_t)1) | 2;
}

/* Memory and settings; *out is NULL after a failure. */
static cddp_result cddp__optim_new(cddp_optim **out, const cddp__algorithm *algorithm, int states,
                                   cddp_param *params, int count, const cddp__settings *d,
                                   const cddp_allocator *a) {
  cddp_result r = cddp__check_params(params, count, CDDP__IS_TRAINED);
  size_t n = (size_t)count, pointers = n * (size_t)(states + (d->copies != NULL));
  cddp_optim *o;
  int i;
  if (r == CDDP_OK) r = cddp__check_settings(params, count, algorithm, d);
  if (r != CDDP_OK) return r;
  o = (cddp_optim *)cddp__calloc(
      a, 1, sizeof *o + n * (2 * sizeof(double) + sizeof(float) + 2 * sizeof(bool)) +
                pointers * sizeof(void *));
  if ((*out = o) == NULL) return CDDP_OUT_OF_MEMORY;
  if (a != NULL) o->allocator = *a;
  o->params = params;
  o->count = count;
  o->algorithm = algorithm;
  o->desc = *d;
  o->states = states;
  o->lr_scales = (double *)(void *)(o + 1);
  o->weight_decays = o->lr_scales + n;
  o->state = (void **)(void *)(o->weight_decays + n);
  o->steps = (float *)(void *)(o->state + pointers);
  o->launched = (bool *)(void *)(o->steps + n);
  o->fresh = o->launched + n;
  memset(o->fresh, true, n * sizeof *o->fresh);
  if (d->copies != NULL)
    o->copies = (void **)memcpy(o->state + n * (size_t)states, d->copies, n * sizeof *o->copies);
  for (i = 0; i < count; i++) {
    o->lr_scales[i] = d->lr_scales != NULL ? d->lr_scales[i] : 1.0;
    o->weight_decays[i] = d->weight_decays != NULL ? d->weight_decays[i] : d->weight_decay;
  }
  if (d->ddp != NULL) {
    o->used = d->ddp->used;
    o->sparse = d->ddp->sparse;
  }
  o->settings = cddp__hash_settings(o);
  cddp__set_lr(o, d->lr);
  return CDDP_OK;
}

static cddp_result cddp__optim_create(cddp_optim **out, const cddp__algorithm *algorithm,
                                      int states, cddp_param *params, int count,
                                      const cddp__settings *d) {
  cddp_result r =
      cddp__optim_new(out, algorithm, states + d->master_weights, params, count, d, NULL);
  if (r != CDDP_OK) return r;
  r = cddp__check_own_memory(params, count, d->copies, NULL);
  if (r == CDDP_OK) r = cddp__attach_optim(*out);
  if (r == CDDP_OK) r = cddp__write_copies(*out);
  if (r == CDDP_OK) return r;
  cddp_optim_destroy(*out);
  *out = NULL;
  return r;
}

static cddp__settings cddp__sgd_settings(const cddp_sgd_desc *d) {
  cddp__settings s;
  memset(&s, 0, sizeof s);
  s.lr = d->lr;
  s.weight_decay = d->weight_decay;
  s.momentum = d->momentum;
  s.dampening = d->dampening;
  s.nesterov = d->nesterov;
  s.maximize = d->maximize;
  s.ddp = d->ddp;
  s.stream = d->stream;
  s.copies = d->copies;
  s.copy_dtype = d->copy_dtype;
  s.lr_scales = d->lr_scales;
  s.weight_decays = d->weight_decays;
  s.master_weights = d->master_weights;
  return s;
}

CDDPDEF cddp_result cddp_sgd_create(cddp_optim **out, cddp_param *params, int count,
                                    const cddp_sgd_desc *desc) {
  cddp__settings s;
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__CHECK(desc != NULL, "desc is NULL; the learning rate has no default");
  s = cddp__sgd_settings(desc);
  return cddp__named(__func__, cddp__optim_create(out, &cddp__sgd, s.momentum != 0, params, count,
                                                  &s));
}

CDDPDEF cddp_result cddp_adamw_create(cddp_optim **out, cddp_param *params, int count,
                                      const cddp_adamw_desc *desc) {
  cddp__settings s;
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__CHECK(desc != NULL, "desc is NULL; the learning rate has no default");
  memset(&s, 0, sizeof s);
  s.lr = desc->lr;
  s.weight_decay = desc->weight_decay;
  s.beta1 = desc->beta1 != 0 ? desc->beta1 : 0.9;
  s.beta2 = desc->beta2 != 0 ? desc->beta2 : 0.999;
  s.eps = desc->eps != 0 ? desc->eps : 1e-8;
  s.amsgrad = desc->amsgrad;
  s.maximize = desc->maximize;
  s.ddp = desc->ddp;
  s.stream = desc->stream;
  s.copies = desc->copies;
  s.copy_dtype = desc->copy_dtype;
  s.lr_scales = desc->lr_scales;
  s.weight_decays = desc->weight_decays;
  s.master_weights = desc->master_weights;
  return cddp__named(__func__, cddp__optim_create(out, &cddp__adamw, s.amsgrad ? 3 : 2, params,
                                                  count, &s));
}
/* >>device -------------------------------------------------------------------------------------
   Groups whose ranks have GPUs. Owns: a group's device context (streams, events, communicator,
   scratch memory, two threads). Touches: the group's slots, where each rank logs its calls on
   device memory, and its failure. Entry points: cddp__device_backend at the end, which gives device
   memory to NCCL or, with backend "cpu", takes it through the host; cddp__give_device; for data
   parallel: cddp__issue, cddp__log_call, cddp__stream_after, cddp__device_scratch.

   OPERATIONS. A call is logged (number, what it was, a hash of all calls so far), issued to a
   stream, and followed there by events (cddp__track). Operations are issued one at a time
   (device.turn). gather, scatter and all_to_all are sends and receives in one NCCL group.

   COMMUNICATORS are made non-blocking, so that no call of NCCL can hang the host: whatever it
   returns is polled until it is done, with an eye on peers and deadline. Ranks first tell each
   other their devices over the control plane, which catches what NCCL would say in a log only;
   rank 0's id goes the same way. How NCCL's own connections find their way between hosts is the
   affair of NCCL and its NCCL_* variables. A sub-group's comes from ncclCommSplit, and shares
   nothing with its group's (config.splitShare would save memory): what a failed model leaves on its
   streams only an abort ends, and the group must live on. What ends a
   communicator blocks all the same (ncclCommAbort for streams and CUDA graphs, ncclCommDestroy for
   the host's other ranks too), so a thread of its own does it.

   TWO THREADS of a context look at it every few milliseconds. The watcher calls no function of
   CUDA, and of NCCL only those that touch host memory: another thread may hold CUDA's lock (in
   cudaFree, cudaMalloc or a kernel's first launch) while it waits for an operation that only an
   abort will end. The watcher sees whether the group was broken, NCCL failed, a process
   died, ranks of the host called different things, or an operation is late. It then breaks the
   group and aborts the communicator, so that the streams of all ranks come to an end. What CUDA
   has to say (which events have come, whether the device failed) the poller asks, and the watcher
   reads its latest answer: if the poller is held up, operations count as under way.

   CALLS are compared at the latest one that two ranks have both made: equal hashes mean that all
   calls before were alike. Nobody waits for it. Ranks of different hosts compare in cddp_barrier
   and cddp_group_split, where they meet anyway. */

static const cddp_kernels *cddp__registered_kernels;

#ifdef CDDP_CUDA
/* A communicator and what ends it. Two own it: the device context, and the thread that ends it, for
   NCCL's calls that end one wait for streams, for CUDA graphs and for other ranks. */
typedef struct cddp__communicator {
  cddp__atomic_u32 refs;
  cddp__atomic_u32 users; /* threads inside a call of NCCL with it */
  cddp__atomic_u32 ended; /* CDDP__COMM_*: from then on no thread begins such a call */
  cddp__atomic_u32 done;  /* 1: NCCL has let go of it */
  ncclComm_t comm;        /* NULL: a single rank, or no NCCL; as it is made NCCL's thread writes */
  ncclRedOp_t half_sum;   /* of f16, for means: see cddp__nccl_op */
  int device;
} cddp__communicator;
enum { CDDP__COMM_ALIVE, CDDP__COMM_DESTROYED, CDDP__COMM_ABORTED };

/* An event behind an operation, and what is known of it. lock of the device context. */
typedef struct cddp__marker {
  cudaEvent_t event;       /* records: turn; queries: any thread, without a lock */
  uint32_t recorded, seen; /* how often it was; the last record that was seen done */
  double since;            /* when it was recorded */
} cddp__marker;
enum { CDDP__LATEST, CDDP__OLDEST, CDDP__MARKERS, CDDP__SPARE_EVENTS = 8, CDDP__SCRATCHES = 64 };

/* A group's device context: its GPU, streams and communicator. turn: held while an operation is
   issued. lock: held for a moment, never in a call of CUDA or NCCL, also by the watcher; it guards
   what is marked so. */
typedef struct cddp__device {
  cddp_group *group;
  struct cddp__device *owner; /* of a cddp_ddp's private groups the context of the user's group,
                                 which logs their calls and fails with them; else itself */
  int device;
  bool staged;         /* operations go through the host */
  cudaStream_t side;   /* operations with a work handle, buckets; of high priority */
  cudaEvent_t fork;    /* orders side after the caller's stream for messages; turn. For a model's
                          buckets; cddp_ddp.lock */
  cudaEvent_t join;    /* orders the two; the thread that calls collectives */
  pthread_mutex_t turn, lock;
  cddp__communicator *comm;
  const cddp_kernels *kernels; /* those of every rank; NULL: some have none */
  pthread_t threads[2];        /* the watcher; the poller */
  int thread_count;            /* of them that run */
  pid_t pid;                   /* of the process whose threads they are */
  cddp__atomic_u32 stop;       /* 1: they are to end; they sleep on it */
  cddp__atomic_u32 captured; /* 1: a CUDA graph may hold its operations and run them at any time */
  cddp__marker markers[CDDP__MARKERS]; /* behind the latest operation; the oldest not seen done */
  cddp__atomic_u32 fault;              /* the cudaError_t with which the device failed */
  cddp__atomic_u32 polling;            /* 1: the poller is in a call of CUDA about it */
  double polled_at;                    /* lock; when the poller last came out of one */
  double left_since;   /* watcher; when a peer was first seen to have left; 0: none has */
  uint32_t calls;      /* logged; lock */
  uint64_t hash;       /* of those calls; lock */
  uint64_t *hashes;    /* [CDDP__HASHES] the hash after each of the latest calls, a ring; lock */
  cddp_work *messages; /* sends and receives to be issued together, oldest first; turn */
  cudaEvent_t spare[CDDP__SPARE_EVENTS]; /* for work handles; lock */
  int spares;
  void *scratch[CDDP__SCRATCHES]; /* used on side; the thread that calls collectives */
  int scratch_count;
  size_t scratch_bytes; /* of the last one */
} cddp__device;

/* What every rank tells about its device when groups form. */
typedef struct cddp__device_report {
  int32_t device, kernels;
  char gpu[40];  /* by which NCCL tells GPUs of a host apart; "": ranks may share one */
  char host[96]; /* identity of the machine */
  char name[96]; /* rank, pid and host, for messages */
} cddp__device_report;

#define CDDP__WATCH_S 0.005 /* between two looks of the watcher, and of the poller */
#define CDDP__SPIN_S 3e-4   /* to yield before the first nap: NCCL's work on a call takes 0.1 ms */
#define CDDP__GONE_S 0.1    /* to see that what NCCL began is done, after a peer has gone */
#define CDDP__CALLS_S 0.5   /* for other threads to come out of NCCL before an abort */
#ifndef CDDP__LEFT_S
#define CDDP__LEFT_S 2.0 /* to finish operations on a device after a peer has left the group */
#endif
#define CDDP__ENDED_S 0.05 /* the same after one has ended: the poller has looked by then */
#define CDDP__HASHES 4096 /* by how many calls ranks may be apart, a power of two */
#ifndef CDDP__COMM_FROM
#define CDDP__COMM_FROM 2 /* ranks from which on a group has a communicator; tests say 1 */
#endif
#ifndef CDDP__SHARD_PIECE
#define CDDP__SHARD_PIECE ((size_t)8 << 20) /* elements of gradients whose nodes go round at once */
#endif
#ifndef CDDP__WARM_UP
#define CDDP__WARM_UP ((size_t)8 << 20) /* bytes of the largest operation of a warm-up */
#endif

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

static cddp__device *cddp__device_of(const cddp_group *g) { return (cddp__device *)g->device; }
static cudaStream_t cddp__main_stream(const cddp_group *g) { return (cudaStream_t)g->stream; }

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

/* At the start of a call: the group's device is the thread's, and its stream may be used. */
static cddp_result cddp__device_enter(const cddp__device *p) {
  enum cudaStreamCaptureStatus status;
  cddp_result r = cddp__use_device(p->device);
  if (r != CDDP_OK ||
      cudaStreamIsCapturing(cddp__main_stream(p->group), &status) == cudaSuccess)
    return r;
  if (cudaGetLastError() != cudaErrorStreamCaptureImplicit) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "a stream is being captured in a CUDA graph while the group's is the default "
                    "stream, which no call may use then: give the captured one to cddp_set_stream");
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

static cddp_result cddp__device_copy(void *to, const void *from, size_t bytes, void *stream) {
  if (bytes == 0 || to == from) return CDDP_OK;
  return cddp__cuda_result(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)stream), "cudaMemcpyAsync");
}

static cddp_result cddp__device_zero(void *p, size_t bytes, void *stream) {
  if (bytes == 0) return CDDP_OK;
  return cddp__cuda_result(cudaMemsetAsync(p, 0, bytes, (cudaStream_t)stream), "cudaMemsetAsync");
}

enum { CDDP__MEMORY_HOST, CDDP__MEMORY_DEVICE };

/* Where p lies: on the rank's device, in host memory, or (an error) on another device. */
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

/* Whether a call's buffers lie on the device; an error if only one of them does. */
static cddp_result cddp__memory_of_call(const cddp__device *p, const cddp__call *c, bool *device) {
  bool one = cddp__in_one_buffer(c);
  const void *send, *recv;
  size_t sent, received;
  int memory[2] = {CDDP__MEMORY_DEVICE, CDDP__MEMORY_DEVICE};
  cddp_result r = CDDP_OK;
  *device = true;
  cddp__buffer_bytes(p->group, c, &sent, &received);
  send = sent > 0 ? c->send : NULL;
  recv = received > 0 ? c->recv : NULL;
  if (send == NULL && recv == NULL) return CDDP_OK;
  if (send != NULL) r = cddp__memory_of(p->device, send, one ? "buf" : "send", &memory[0]);
  if (r == CDDP_OK && recv != NULL && recv != send)
    r = cddp__memory_of(p->device, recv, "recv", &memory[1]);
  if (r == CDDP_OK && send != NULL && recv != NULL && recv != send && memory[0] != memory[1])
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "send and recv must both lie on the device, or both in host memory");
  *device = memory[send == NULL] == CDDP__MEMORY_DEVICE;
  return r;
}

/* Yields for as long as most waits take, then sleeps for a sixteenth of what it has waited. */
static void cddp__device_nap(double since) {
  double waited = cddp__now() - since;
  if (waited < CDDP__SPIN_S)
    sched_yield();
  else
    cddp__sleep(waited < 16e-3 ? waited / 16 : 1e-3);
}

/* --- the log of calls --- */

/* Appends what this rank calls to the log of the context's owner. */
static void cddp__log_call(cddp__device *from, const cddp__call *c, bool device) {
  cddp__device *p = from->owner;
  cddp__slot *slot = cddp__slot_of(p->group, p->group->rank);
  cddp__logged_call *to;
  struct {
    uint64_t count;
    uint32_t call;
    int32_t root;
  } what;
  if (p->group->size == 1 || p->staged) return; /* staged calls are compared as they meet */
  memset(&what, 0, sizeof what);
  what.call = cddp__call_code(c, device ? 0 : CDDP__PHASE_HOST);
  what.count = c->count;
  what.root = (int32_t)c->root;
  pthread_mutex_lock(&p->lock);
  p->hash = cddp__hash64(p->hash, &what, sizeof what);
  to = &slot->call_log[++p->calls & (CDDP__CALL_LOG - 1)];
  p->hashes[p->calls & (CDDP__HASHES - 1)] = p->hash;
  cddp__exchange32(&to->number, 0); /* a fence, which gcc's tsan lacks; so is cddp__add32 below */
  to->call = what.call;
  to->count = what.count;
  to->root = what.root;
  to->hash = p->hash;
  to->site[0] = 0;
  if (c->kind != CDDP__KIND_DDP_BUCKET) cddp__describe_site(to->site, sizeof to->site);
  cddp__store32(&to->number, p->calls);
  cddp__store32(&slot->calls, p->calls);
  pthread_mutex_unlock(&p->lock);
}

/* A copy of what a rank of this host logged of call number n; false if it was overwritten. */
static bool cddp__read_logged(const cddp_group *g, int rank, uint32_t n, cddp__logged_call *out) {
  cddp__logged_call *from = &cddp__slot_of(g, rank)->call_log[n & (CDDP__CALL_LOG - 1)];
  if (cddp__load32(&from->number) != n) return false;
  out->call = from->call;
  out->count = from->count;
  out->root = from->root;
  out->hash = from->hash;
  memcpy(out->site, from->site, sizeof out->site - 1);
  out->site[sizeof out->site - 1] = 0;
  return cddp__add32(&from->number, 0) == n;
}

/* The calls of this rank and another one of its host differ in number n or before. */
static cddp_result cddp__break_calls(cddp__device *p, int rank, uint32_t n) {
  cddp_group *g = p->group;
  bool low = g->rank < rank;
  int first = low ? g->rank : rank, second = low ? rank : g->rank;
  cddp__logged_call a, b;
  char what[2][160];
  uint32_t i;
  for (i = n < CDDP__CALL_LOG ? 1 : n - CDDP__CALL_LOG + 1; i <= n; i++) {
    if (!cddp__read_logged(g, first, i, &a) || !cddp__read_logged(g, second, i, &b)) continue;
    if (a.call == b.call && a.count == b.count && a.root == b.root) continue;
    cddp__describe_call(what[0], sizeof what[0], a.call, a.count, a.root);
    cddp__describe_call(what[1], sizeof what[1], b.call, b.count, b.root);
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree in call %" PRIu32 " of the group: rank %d called %s%s, rank %d "
               "called %s%s%s",
               i, first, what[0], a.site, second, what[1], b.site,
               a.call == b.call && (a.call & 255) == CDDP__KIND_DDP_STEP
                   ? " with other settings: learning rate, momentum or others"
                   : "");
    return cddp__break(g, CDDP_MISMATCH);
  }
  cddp__fail(CDDP_MISMATCH, "ranks %d and %d disagree in call %" PRIu32 " of the group or before",
             first, second, n);
  return cddp__break(g, CDDP_MISMATCH);
}

/* Compares what the ranks of this host have called so far, without waiting for any. */
static cddp_result cddp__compare_logs(cddp__device *p) {
  cddp_group *g = p->group;
  cddp__logged_call theirs;
  int q;
  for (q = 0; q < g->size; q++) {
    uint32_t n, behind;
    uint64_t mine;
    if (q == g->rank || g->members[q] < 0) continue;
    n = cddp__load32(&cddp__slot_of(g, q)->calls);
    pthread_mutex_lock(&p->lock);
    if ((int32_t)(n - p->calls) > 0) n = p->calls;
    behind = p->calls - n;
    mine = p->hashes[n & (CDDP__HASHES - 1)];
    pthread_mutex_unlock(&p->lock);
    if (n == 0 || behind >= CDDP__HASHES || !cddp__read_logged(g, q, n, &theirs)) continue;
    if (theirs.hash != mine) return cddp__break_calls(p, q, n);
  }
  return CDDP_OK;
}

/* --- the end of a communicator --- */

static cddp__atomic_u32 cddp__endings; /* communicators of this process that are on their way out */

/* Between these two a communicator is there to be called; false: it is on its way out. */
static bool cddp__comm_enter(cddp__communicator *x) {
  cddp__add32(&x->users, 1);
  if (cddp__add32(&x->ended, 0) == CDDP__COMM_ALIVE) return true;
  cddp__add32(&x->users, (uint32_t)-1);
  return false;
}

static void cddp__comm_exit(cddp__communicator *x) { cddp__add32(&x->users, (uint32_t)-1); }

static ncclComm_t cddp__comm_of(const cddp__communicator *x) {
  return __atomic_load_n(&x->comm, __ATOMIC_RELAXED);
}

static void cddp__comm_release(cddp__communicator *x) {
  if (x != NULL && cddp__add32(&x->refs, (uint32_t)-1) == 0) free(x);
}

/* An abort begins with NCCL's flags, before any call of CUDA, for which it might have to wait. What
   fails in an end in good order leaves NCCL's group open, in which an abort would do nothing. */
static void *cddp__comm_end_main(void *communicator) {
  cddp__communicator *x = (cddp__communicator *)communicator;
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  double deadline = cddp__now() + CDDP__CALLS_S;
  ncclComm_t comm = cddp__comm_of(x);
  ncclResult_t e = ncclSuccess;
  while (cddp__add32(&x->users, 0) != 0 && cddp__now() < deadline) cddp__sleep(1e-4);
  if (comm != NULL && cddp__load32(&x->ended) == CDDP__COMM_ABORTED) {
    ncclCommAbort(comm);
  } else if (comm != NULL) {
    (void)cudaSetDevice(x->device);
    cudaThreadExchangeStreamCaptureMode(&mode); /* what is freed here is no part of a graph */
    if (ncclCommGetAsyncError(comm, &e) != ncclSuccess || e != ncclSuccess) {
      ncclCommAbort(comm);
    } else if (ncclCommDestroy(comm) != ncclSuccess) {
      (void)ncclGroupEnd();
      ncclCommAbort(comm);
    }
    cudaThreadExchangeStreamCaptureMode(&mode); /* the thread may be the caller's */
  }
  cddp__store32(&x->done, 1);
  cddp__comm_release(x);
  cddp__add32(&cddp__endings, (uint32_t)-1);
  return NULL;
}

/* Gives the communicator to a thread that ends it. how: CDDP__COMM_ABORTED, for which the group has
   been broken before, makes all operations on this rank's streams end at once. Never waits. */
static void cddp__comm_end(cddp__communicator *x, uint32_t how) {
  pthread_t thread;
  if (!cddp__swap32(&x->ended, CDDP__COMM_ALIVE, how)) return;
  cddp__add32(&x->refs, 1);
  cddp__add32(&cddp__endings, 1);
  if (cddp__comm_of(x) != NULL &&
      cddp__thread_start(&thread, cddp__comm_end_main, x, true) == CDDP_OK)
    pthread_detach(thread);
  else
    cddp__comm_end_main(x);
}

static void cddp__device_abort(cddp__device *p) { cddp__comm_end(p->comm, CDDP__COMM_ABORTED); }

/* After an abort: until NCCL's threads have let go of the operations' memory. That takes a moment;
   where there is a CUDA graph with the group's operations the rest of it waits for the graph. */
static void cddp__await_abort(cddp__device *p) {
  double deadline = cddp__now() + (cddp__load32(&p->captured) != 0 ? 0.1 : CDDP__LEFT_S);
  if (cddp__load32(&p->comm->ended) != CDDP__COMM_ABORTED) return;
  while (cddp__load32(&p->comm->done) == 0 && cddp__now() < deadline) cddp__sleep(1e-4);
}

/* --- the watcher --- */

/* In a group of several hosts: hears of failures elsewhere. The hosts' leaders watch each other in
   a ring, by connections that end with a leader; other ranks are watched by those of their host.
   Never waits; any thread. */
static void cddp__watch_hosts(cddp_group *g) {
  cddp__hosts *x = g->hosts;
  if (x == NULL) return;
  if (g->local_rank != 0) {
    cddp__hosts_look(g);
    return;
  }
  pthread_mutex_lock(&g->p2p_lock);
  cddp__hosts_serve(g);
  (void)cddp__p2p_link(g, cddp__rank_on(x, (x->mine + 1) % x->count, 0));
  pthread_mutex_unlock(&g->p2p_lock);
}

/* Breaks the group if a rank's process is gone. */
static cddp_result cddp__break_dead(cddp_group *g, const char *doing) {
  int q;
  for (q = 0; q < g->size; q++)
    if (q != g->rank && cddp__rank_gone(g, q)) return cddp__report_lost(g, q, doing);
  return CDDP_OK;
}

/* Breaks the group over a failure of NCCL. A death has many faces, some of which are seen before
   the death itself: it, or another rank's failure, gets a moment to show. */
static cddp_result cddp__break_nccl(cddp__device *p, ncclResult_t e, const char *what) {
  bool mine = e == ncclInvalidArgument || e == ncclInvalidUsage;
  double deadline = cddp__now() + (mine ? 0.01 : CDDP__CAUSE_S);
  cddp_group *g = p->group;
  char text[CDDP__ERROR_MAX];
  cddp_result r;
  snprintf(text, sizeof text, "rank %d: %s: %s (%.300s)", g->rank, what, ncclGetErrorString(e),
           ncclGetLastError(NULL));
  do {
    cddp__watch_hosts(g);
    if ((r = cddp__check_failure(g)) != CDDP_OK) return r;
    if ((r = cddp__break_dead(g, what)) != CDDP_OK) return r;
    cddp__sleep(0.002);
  } while (cddp__now() < deadline);
  cddp__fail(CDDP_NCCL, "%s", text);
  return cddp__break(g, CDDP_NCCL);
}

/* Whether operations of the group are on the device, as far as the poller knows, those of graphs
   left aside; *late: for longer than a deadline allows. */
static bool cddp__device_pending(cddp__device *p, bool *late) {
  bool pending = false;
  double seen;
  int i;
  *late = false;
  pthread_mutex_lock(&p->lock);
  seen = cddp__load32(&p->polling) != 0 ? cddp__now() : p->polled_at;
  for (i = 0; i < CDDP__MARKERS; i++) {
    if (p->markers[i].recorded == p->markers[i].seen) continue;
    pending = true;
    *late = *late || seen - p->markers[i].since > p->group->timeout_s;
  }
  pthread_mutex_unlock(&p->lock);
  return pending;
}

/* By how many calls a rank of this host is behind; of another host's ranks that is not known. */
static int cddp__calls_behind(const cddp__device *p, int rank) {
  const cddp_group *g = p->owner->group;
  uint32_t calls;
  if (g->members[rank] < 0) return 0;
  calls = cddp__load32(&cddp__slot_of(g, g->rank)->calls);
  return (int)(calls - cddp__load32(&cddp__slot_of(g, rank)->calls));
}

static cddp_result cddp__break_pending(cddp__device *p) { /* an operation is too late */
  cddp_group *g = p->group;
  const cddp_group *owner = p->owner->group;
  char who[160], late[256] = "", what[160] = "none";
  cddp__logged_call latest;
  int q, n = 0;
  for (q = 0; q < g->size; q++) {
    if (cddp__calls_behind(p, q) <= 0) continue;
    cddp__name_rank(g, q, who, sizeof who);
    if (n++ < 2)
      snprintf(late + strlen(late), sizeof late - strlen(late), "%s%s", n > 1 ? ", " : ": ", who);
  }
  if (!cddp__read_logged(owner, g->rank, cddp__load32(&cddp__slot_of(owner, g->rank)->calls),
                         &latest))
    latest.site[0] = 0;
  else
    cddp__describe_call(what, sizeof what, latest.call, latest.count, latest.root);
  cddp__fail(CDDP_TIMEOUT,
             "timed out after %g s: an operation of rank %d on cuda:%d has not ended%s%s%s; the "
             "rank's latest is %s%s",
             g->timeout_s, g->rank, p->device, n > 0 ? "; behind it in calls" : "", late,
             n > 2 ? " and others" : "", what, latest.site);
  return cddp__break(g, CDDP_TIMEOUT);
}

/* Breaks the group if operations wait for a rank that is gone. One that ended after the same number
   of calls may have done its part: what is still on the device here, as far as the poller knows,
   gets a moment, and more of it if that rank took its leave. CUDA does not tell
   whether a captured graph runs: with a rank that died it would never end, while one that left has
   seen the end of its own. */
static cddp_result cddp__look_for_lost(cddp__device *p, bool pending) {
  cddp_group *g = p->group;
  char doing[64];
  int q;
  for (q = 0; q < g->size; q++) {
    bool behind, left;
    if (q == g->rank || !cddp__rank_gone(g, q)) continue;
    left = cddp__rank_left(g, q);
    behind = cddp__calls_behind(p, q) > 0;
    if (!behind && !pending && (left || cddp__load32(&p->captured) == 0)) continue;
    if (!behind) {
      if (p->left_since == 0) p->left_since = cddp__now();
      if (cddp__now() - p->left_since < (left ? CDDP__LEFT_S : CDDP__ENDED_S)) continue;
    }
    snprintf(doing, sizeof doing, "operations with it on cuda:%d", p->device);
    return cddp__report_lost(g, q, doing);
  }
  return CDDP_OK;
}

static cddp_result cddp__look_at_device(cddp__device *p) {
  ncclResult_t e = ncclSuccess;
  cudaError_t fault = (cudaError_t)cddp__load32(&p->fault);
  bool late, pending;
  cddp_result r;
  cddp__watch_hosts(p->group);
  if ((r = cddp__check_failure(p->group)) != CDDP_OK) return r;
  if (p->owner == p && (r = cddp__compare_logs(p)) != CDDP_OK) return r;
  pending = cddp__device_pending(p, &late);
  if ((r = cddp__look_for_lost(p, pending)) != CDDP_OK) return r;
  if (cddp__comm_enter(p->comm)) {
    if (ncclCommGetAsyncError(p->comm->comm, &e) != ncclSuccess) e = ncclInternalError;
    cddp__comm_exit(p->comm);
  }
  if (e != ncclSuccess && e != ncclInProgress)
    return cddp__break_nccl(p, e, "an asynchronous NCCL operation");
  if (fault != cudaSuccess) {
    cddp__fail(CDDP_CUDA, "rank %d: cuda:%d failed during the group's operations: %s (%s)",
               p->group->rank, p->device, cudaGetErrorString(fault), cudaGetErrorName(fault));
    return cddp__break(p->group, CDDP_CUDA);
  }
  return late ? cddp__break_pending(p) : CDDP_OK;
}

/* A private group and its owner's, whose work is on the same streams: the private one fails with
   the other, the other over what may leave streams with undefined results. */
static void cddp__break_both(cddp_group *private_group, cddp_group *owner) {
  cddp_result r = cddp__check_failure(owner);
  if (r != CDDP_OK) {
    if (cddp__load32(&private_group->block->broken) == 0) (void)cddp__break(private_group, r);
    return;
  }
  r = cddp__check_failure(private_group);
  if (r == CDDP_PEER_LOST || r == CDDP_TIMEOUT || r == CDDP_NCCL || r == CDDP_CUDA)
    (void)cddp__break(owner, r);
}

/* The watcher. Whoever asks after an abort must hear of the failure, as what streams do then is
   undefined: both groups are broken before it. */
static void *cddp__watch_main(void *context) {
  cddp__device *p = (cddp__device *)context;
  while (cddp__load32(&p->stop) == 0) {
    if (cddp__load32(&p->comm->ended) == CDDP__COMM_ALIVE) {
      cddp_result r = cddp__look_at_device(p);
      if (p->owner != p) cddp__break_both(p->group, p->owner->group);
      if (r != CDDP_OK) cddp__device_abort(p);
    }
    cddp__futex_wait(&p->stop, 0, CDDP__WATCH_S);
  }
  return NULL;
}

/* Asks which of the events behind operations have come. May wait for whoever holds CUDA's lock. */
static void cddp__poll_events(cddp__device *p) {
  uint32_t n[CDDP__MARKERS];
  cudaError_t e;
  int i;
  pthread_mutex_lock(&p->lock);
  for (i = 0; i < CDDP__MARKERS; i++) n[i] = p->markers[i].recorded;
  pthread_mutex_unlock(&p->lock);
  for (i = 0; i < CDDP__MARKERS; i++) {
    if ((e = cudaEventQuery(p->markers[i].event)) != cudaSuccess)
      (void)cudaGetLastError(); /* cudaErrorNotReady counts as one */
    pthread_mutex_lock(&p->lock);
    p->polled_at = cddp__now();
    if (e != cudaErrorNotReady) p->markers[i].seen = n[i];
    pthread_mutex_unlock(&p->lock);
    if (e != cudaSuccess && e != cudaErrorNotReady && e != cudaErrorCudartUnloading)
      cddp__store32(&p->fault, (uint32_t)e);
  }
}

/* The poller. Its first call of CUDA takes its device: another would get a context. */
static void *cddp__poll_main(void *context) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cddp__device *p = (cddp__device *)context;
  bool late, ready = false;
  while (cddp__load32(&p->stop) == 0) {
    if (cddp__device_pending(p, &late)) {
      cddp__store32(&p->polling, 1);
      if (!ready) (void)cudaSetDevice(p->device);
      if (!ready) cudaThreadExchangeStreamCaptureMode(&mode); /* no part of anyone's graph */
      ready = true;
      cddp__poll_events(p);
      cddp__store32(&p->polling, 0);
    }
    cddp__futex_wait(&p->stop, 0, CDDP__WATCH_S);
  }
  return NULL;
}

static cddp__atomic_u32 cddp__watched; /* contexts of this process that have threads */

static cddp_result cddp__watch(cddp__device *p) {
  void *(*const mains[])(void *) = {cddp__watch_main, cddp__poll_main};
  cddp_result r;
  p->pid = getpid();
  cddp__add32(&cddp__watched, 1);
  while (p->thread_count < 2) {
    r = cddp__thread_start(&p->threads[p->thread_count], mains[p->thread_count], p, true);
    if (r != CDDP_OK) return r;
    p->thread_count++;
  }
  return CDDP_OK;
}

/* Ends the threads; that of a poller which waits for CUDA may take an abort. */
static void cddp__unwatch(cddp__device *p) {
  if (p->pid != getpid()) return; /* never watched, or a forked child */
  cddp__store32(&p->stop, 1);
  cddp__futex_wake(&p->stop);
  while (p->thread_count > 0) pthread_join(p->threads[--p->thread_count], NULL);
  p->pid = 0;
  cddp__add32(&cddp__watched, (uint32_t)-1);
}

/* Without contexts the process may end soon: NCCL's threads get a moment to be out of the way. */
static void cddp__await_endings(void) {
  double deadline = cddp__now() + CDDP__LEFT_S;
  if (cddp__load32(&cddp__watched) != 0) return;
  while (cddp__load32(&cddp__endings) != 0 && cddp__now() < deadline) cddp__sleep(1e-4);
}

/* Puts markers behind an operation just enqueued. turn held. */
static cddp_result cddp__track(cddp__device *p, cudaStream_t s) {
  bool capturing = cddp__capturing(s), wanted;
  cddp_result r = CDDP_OK;
  int i;
  if (capturing) cddp__store32(&p->captured, 1);
  for (i = 0; r == CDDP_OK && i < CDDP__MARKERS; i++) {
    cddp__marker *m = &p->markers[i];
    pthread_mutex_lock(&p->lock);
    wanted = !capturing && (i == CDDP__LATEST || m->recorded == m->seen);
    pthread_mutex_unlock(&p->lock);
    if (wanted) r = cddp__cuda_result(cudaEventRecord(m->event, s), "cudaEventRecord");
    if (r != CDDP_OK || !wanted) continue;
    pthread_mutex_lock(&p->lock);
    m->recorded++;
    m->since = cddp__now();
    pthread_mutex_unlock(&p->lock);
  }
  return r;
}

/* --- device contexts --- */

/* Aborts the communicator, if it is not at its end, and waits for what is on the device. */
static void cddp__device_delete(cddp__device *p) {
  const cddp_allocator *a = &p->group->host->allocator;
  int i;
  if (p->comm != NULL) {
    cddp__device_abort(p);
    cddp__unwatch(p);
    cddp__await_abort(p);
  }
  if (p->side != NULL) (void)cudaStreamSynchronize(p->side);
  while (p->scratch_count > 0) cudaFree(p->scratch[--p->scratch_count]);
  cddp__event_free(&p->fork);
  cddp__event_free(&p->join);
  for (i = 0; i < CDDP__MARKERS; i++) cddp__event_free(&p->markers[i].event);
  while (p->spares > 0) cddp__event_free(&p->spare[--p->spares]);
  if (p->side != NULL) cudaStreamDestroy(p->side);
  pthread_mutex_destroy(&p->turn);
  pthread_mutex_destroy(&p->lock);
  cddp__comm_release(p->comm);
  cddp__free(a, p->hashes);
  cddp__free(a, p);
}

/* A context without a communicator, not yet watched. */
static cddp_result cddp__device_new(cddp__device **out, cddp_group *g, int device) {
  const cddp_allocator *a = &g->host->allocator;
  cddp__device *p = (cddp__device *)cddp__calloc(a, 1, sizeof *p);
  int least = 0, greatest = 0, i;
  cddp_result r;
  *out = NULL;
  if (p == NULL) return CDDP_OUT_OF_MEMORY;
  cddp__store32(&cddp__device_groups, 1);
  p->group = g;
  p->owner = p;
  p->device = device;
  pthread_mutex_init(&p->turn, NULL);
  pthread_mutex_init(&p->lock, NULL);
  p->hashes = (uint64_t *)cddp__calloc(a, CDDP__HASHES, sizeof *p->hashes);
  p->comm = (cddp__communicator *)cddp__calloc(NULL, 1, sizeof *p->comm); /* may outlive g */
  if (p->comm != NULL) p->comm->refs.v = 1;
  if (p->comm != NULL) p->comm->device = device;
  r = p->hashes != NULL && p->comm != NULL ? cddp__use_device(device) : CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                          "cudaDeviceGetStreamPriorityRange");
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaStreamCreateWithPriority(&p->side, cudaStreamNonBlocking, greatest),
                          "cudaStreamCreateWithPriority");
  if (r == CDDP_OK) r = cddp__event_new(&p->fork);
  if (r == CDDP_OK) r = cddp__event_new(&p->join);
  for (i = 0; r == CDDP_OK && i < CDDP__MARKERS; i++) r = cddp__event_new(&p->markers[i].event);
  if (r == CDDP_OK) *out = p;
  else cddp__device_delete(p);
  return r;
}

/* Device memory for an operation on the side stream. It at least doubles: what it was stays, as
   operations and CUDA graphs may use it. */
static cddp_result cddp__device_scratch(cddp__device *p, size_t bytes, void **out) {
  cddp_result r = CDDP_OK;
  if (p->scratch_bytes < bytes) {
    CDDP_ASSERT(p->scratch_count < CDDP__SCRATCHES);
    bytes = cddp__max(bytes, 2 * p->scratch_bytes);
    r = cddp__cuda_result(cudaMalloc(&p->scratch[p->scratch_count], bytes), "cudaMalloc");
    if (r != CDDP_OK) return r;
    p->scratch_bytes = bytes;
    p->scratch_count++;
  }
  *out = p->scratch_count > 0 ? p->scratch[p->scratch_count - 1] : NULL;
  return r;
}

static void *cddp__device_alloc(cddp_group *g, size_t bytes) {
  void *p = NULL;
  cddp_result r = cddp__use_device(cddp__device_of(g)->device);
  if (r == CDDP_OK) r = cddp__cuda_result(cudaMalloc(&p, bytes > 0 ? bytes : 1), "cudaMalloc");
  return r == CDDP_OK ? p : NULL;
}

static void cddp__device_free(void *p) {
  if (p != NULL && cudaFree(p) != cudaSuccess) (void)cudaGetLastError();
}

/* Waits on the host for the stream, or an event on it, as long as the group is healthy. The
   deadline is for what the watcher has no event behind: operations in a CUDA graph. */
static cddp_result cddp__await_stream(cddp__device *p, cudaStream_t s, cudaEvent_t event) {
  double start = cddp__now();
  cudaError_t e;
  cddp_result r;
  while ((e = event != NULL ? cudaEventQuery(event) : cudaStreamQuery(s)) == cudaErrorNotReady) {
    if ((r = cddp__check_group(p->group)) != CDDP_OK) return r;
    cddp__device_nap(start);
    if (cddp__now() < start + p->group->timeout_s) continue;
    cddp__fail(CDDP_TIMEOUT, "timed out after %g s: rank %d's work on cuda:%d has not ended",
               p->group->timeout_s, p->group->rank, p->device);
    return cddp__break(p->group, CDDP_TIMEOUT);
  }
  (void)cudaGetLastError(); /* cudaErrorNotReady counts as one */
  if ((r = cddp__check_group(p->group)) != CDDP_OK) return r;
  return cddp__cuda_result(e, "work on the group's stream");
}

/* --- operations through the host ---

   For ranks that share a GPU. What a rank contributes is copied to host memory that the ranks
   share, once the stream has come that far; the CPU's collective or message goes from there; what
   came is copied back, with a work handle when that is waited for. Not fast. */

/* Copies on the side stream and waits for it. */
static cddp_result cddp__copy_now(cddp__device *p, void *to, const void *from, size_t bytes) {
  cddp_result r = cddp__device_copy(to, from, bytes, p->side);
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(cudaStreamSynchronize(p->side), "cudaStreamSynchronize");
}

static cddp_result cddp__staged_no_graph(cudaStream_t s) {
  if (!cddp__capturing(s)) return CDDP_OK;
  return cddp__fail(CDDP_UNSUPPORTED,
                    "backend \"cpu\" cannot be captured in a CUDA graph; backend \"nccl\" can");
}

/* Bytes of the result that a call has on this rank. */
static size_t cddp__result_bytes(const cddp_group *g, const cddp__call *c) {
  size_t sent, received;
  cddp__buffer_bytes(g, c, &sent, &received);
  return c->kind != CDDP__KIND_SEND && cddp__is_written(c, g->rank) ? received : 0;
}

/* After the operation on stage, which had the result r: `bytes` at `from` go to the device. */
static cddp_result cddp__stage_end(cddp__device *p, cudaStream_t s, char *stage, void *to,
                                   const void *from, size_t bytes, cddp_result r) {
  if (r == CDDP_OK && bytes > 0) {
    r = cddp__use_device(p->device);
    if (r == CDDP_OK) r = cddp__stream_after(p->side, s, p->join);
    if (r == CDDP_OK) r = cddp__copy_now(p, to, from, bytes);
    if (r != CDDP_OK) r = cddp__break(p->group, r);
  }
  cddp__arena_free(p->group->host, stage);
  return r;
}

/* A collective or message. */
static cddp_result cddp__stage_call(cddp__device *p, const cddp__call *c, cudaStream_t s,
                                    cddp_work **work) {
  bool message = c->kind >= CDDP__KIND_SEND;
  cddp_group *g = p->group;
  size_t sends, recvs, second;
  cddp__call inner = *c;
  cddp_work *w = NULL;
  char *stage;
  cddp_result r = cddp__staged_no_graph(s);
  if (r != CDDP_OK || c->count == 0) return r;
  cddp__buffer_bytes(g, c, &sends, &recvs);
  second = cddp__in_one_buffer(c) ? 0 : cddp__round_up(sends, CDDP__CACHE_LINE);
  stage = (char *)cddp__arena_alloc(g->host, second + recvs, CDDP__FOR_USER);
  if (stage == NULL) return message ? CDDP_OUT_OF_MEMORY : cddp__break(g, CDDP_OUT_OF_MEMORY);
  if (c->kind != CDDP__KIND_RECV && cddp__sends(c, g->rank)) {
    r = cddp__stream_after(p->side, s, p->join);
    if (r == CDDP_OK) r = cddp__copy_now(p, stage, c->send, sends);
    if (r != CDDP_OK && !message) r = cddp__break(g, r);
  }
  inner.send = stage;
  inner.recv = stage + second;
  if (r == CDDP_OK)
    r = message ? cddp__start_message(g, &inner, work != NULL ? &w : NULL)
                : cddp__start_call(g, &inner, work != NULL ? &w : NULL);
  if (r != CDDP_OK || work == NULL)
    return cddp__stage_end(p, s, stage, c->recv, inner.recv, cddp__result_bytes(g, c), r);
  w->backend = g->backend;
  w->context = c->recv;
  w->stage = stage;
  *work = w;
  return CDDP_OK;
}

/* --- operations by NCCL --- */

/* Sends and receives the shares of gather, scatter, all_to_all and calls with counts; inside an
   NCCL group. */
static ncclResult_t cddp__post_shares(const cddp__device *p, const cddp__call *c,
                                      ncclDataType_t type, cudaStream_t s) {
  int me = p->group->rank, q;
  ncclResult_t e = ncclSuccess;
  for (q = 0; q < p->group->size && e == ncclSuccess; q++) {
    size_t out = cddp__sends(c, me) && cddp__receives(c, q)
                     ? cddp__bytes_for(c, q, 0, c->count) / c->esize
                     : 0;
    size_t in = cddp__sends(c, q) && cddp__receives(c, me)
                    ? cddp__bytes_from(c, q, 0, c->count) / c->esize
                    : 0;
    const char *from = out > 0 ? cddp__share_for(c, q) : NULL;
    char *to = in > 0 ? cddp__share_from(c, q) : NULL;
    if (q == me) {
      if (cddp__device_copy(to, from, out * c->esize, s) != CDDP_OK) e = ncclUnhandledCudaError;
      continue;
    }
    if (out > 0) e = ncclSend(from, out, type, q, p->comm->comm, s);
    if (in > 0 && e == ncclSuccess) e = ncclRecv(to, in, type, q, p->comm->comm, s);
  }
  return e;
}

/* The smallest that is no less than n. */
static int cddp__power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

/* What NCCL is asked for to form c's result, and by what that is to be multiplied. NCCL's own mean
   multiplies by 1/n before it adds, in the operands' type: in bf16 and f16 1/n is off by up to
   0.2 % unless n is a power of two, and NVLink's switches, which only add, take no part. So NCCL
   adds and a kernel multiplies by 1/n. A sum in f16 may pass 65,504: NCCL halves its operands k
   times first, which is exact, with 2^k at least n, and the kernel multiplies by 2^k/n. A model's
   gradients: see cddp__gpu_reduce. */
static ncclRedOp_t cddp__nccl_op(const cddp__device *p, const cddp__call *c, double *factor) {
  static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclProd, ncclMin, ncclMax};
  int n = p->group->size, power = cddp__power_of_two(n);
  bool half = c->dtype == CDDP_F16;
  *factor = 1;
  if (c->op != CDDP_AVG || p->kernels == NULL || c->dtype > CDDP_BF16 || (half && n == power))
    return ops[c->op];
  *factor = (half ? (double)power : 1.0) / n;
  return half ? p->comm->half_sum : ncclSum;
}

/* The second half of c's mean, behind NCCL's. */
static cddp_result cddp__scale_mean(const cddp__device *p, const cddp__call *c, cudaStream_t s) {
  cddp_segment result = {NULL, NULL, NULL, 0, NULL};
  double factor;
  (void)cddp__nccl_op(p, c, &factor);
  if (factor == 1 || !cddp__receives(c, p->group->rank)) return CDDP_OK;
  result.grad = c->recv;
  result.count = c->count;
  return cddp__cuda_result((cudaError_t)p->kernels->scale(&result, 1, (cddp_dtype)c->dtype, factor,
                                                          NULL, (void *)s),
                           "the kernel that scales a mean");
}

static ncclResult_t cddp__post(const cddp__device *p, const cddp__call *c, cudaStream_t s) {
  static const int types[] = {7, 8, 6, 9, 0, 1, 2, 4}; /* bf16 is not named in every nccl.h */
  ncclDataType_t type = (ncclDataType_t)types[c->dtype];
  ncclComm_t comm = p->comm->comm;
  double factor;
  ncclRedOp_t op = cddp__nccl_op(p, c, &factor);
  switch (c->kind) {
  case CDDP__KIND_ALL_REDUCE:
    return ncclAllReduce(c->send, c->recv, c->count, type, op, comm, s);
  case CDDP__KIND_REDUCE:
    return ncclReduce(c->send, c->recv, c->count, type, op, c->root, comm, s);
  case CDDP__KIND_BROADCAST:
    return ncclBroadcast(c->send, c->recv, c->count, type, c->root, comm, s);
  case CDDP__KIND_ALL_GATHER:
    return ncclAllGather(c->send, c->recv, c->count, type, comm, s);
  case CDDP__KIND_REDUCE_SCATTER:
    return ncclReduceScatter(c->send, c->recv, c->count, type, op, comm, s);
  case CDDP__KIND_SEND:
    return ncclSend(c->send, c->count, type, c->root, comm, s);
  case CDDP__KIND_RECV:
    return ncclRecv(c->recv, c->count, type, c->root, comm, s);
  default:
    return cddp__post_shares(p, c, type, s);
  }
}

/* Polls until NCCL has done what it began: e is what it returned then, of which success says
   nothing: up to NCCL 2.23 single operations return it too early. Up to 2.25 ncclCommGetAsyncError
   does not end NCCL's work in this thread, which would be in the way of another communicator's;
   ncclCommCount does. A rank that is gone may have done its part: NCCL gets a moment to say so. */
static cddp_result cddp__settle(cddp__device *p, ncclResult_t e, const char *what) {
  cddp_group *g = p->group;
  double start = cddp__now(), now, look = start + CDDP__NAP_S, gone_since = start;
  ncclComm_t comm = cddp__comm_of(p->comm);
  cddp_result r;
  int q, ranks;
  if (e == ncclSuccess) e = ncclInProgress;
  for (; e == ncclInProgress; cddp__device_nap(start)) {
    if ((r = cddp__check_group(g)) != CDDP_OK) return r;
    e = ncclInternalError;
    if (cddp__comm_enter(p->comm)) {
      if (ncclCommGetAsyncError(comm, &e) != ncclSuccess) e = ncclInternalError;
      if (e == ncclSuccess) e = ncclCommCount(comm, &ranks);
      cddp__comm_exit(p->comm);
    }
    if (e != ncclInProgress) break;
    if ((now = cddp__now()) < look) continue;
    look = now + CDDP__NAP_S;
    cddp__watch_hosts(g);
    for (q = 0; q < g->size && (q == g->rank || !cddp__rank_gone(g, q)); q++) {}
    if (q == g->size) gone_since = now;
    if (now - gone_since > CDDP__GONE_S && (r = cddp__break_dead(g, what)) != CDDP_OK) return r;
    if (now < start + g->timeout_s) continue;
    cddp__fail(CDDP_TIMEOUT, "timed out after %g s: rank %d in %s; not all ranks came to it%s",
               g->timeout_s, g->rank, what,
               g->hosts == NULL ? "" : ", or NCCL finds no way between the hosts: it takes the "
                                       "interface that NCCL_SOCKET_IFNAME names, and with "
                                       "NCCL_DEBUG=INFO it says what it does");
    return cddp__break(g, CDDP_TIMEOUT);
  }
  return CDDP__LIKELY(e == ncclSuccess) ? CDDP_OK : cddp__break_nccl(p, e, what);
}

/* Enqueues n operations on s as one. turn held. */
static cddp_result cddp__issue_held(cddp__device *p, const cddp__call *c, int n, cudaStream_t s) {
  ncclResult_t e = ncclSuccess, end;
  cddp_result r;
  bool group = n > 1 || c->parts != NULL || c->kind == CDDP__KIND_GATHER ||
               c->kind == CDDP__KIND_SCATTER || c->kind == CDDP__KIND_ALL_TO_ALL;
  int i;
  if (s == cudaStreamPerThread) /* NCCL enqueues in a thread of its own */
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the group's stream is cudaStreamPerThread, which to "
                      "NCCL is another stream; make one with cudaStreamCreate");
  if (!cddp__comm_enter(p->comm)) {
    if ((r = cddp__check_failure(p->group)) != CDDP_OK) return r;
    return cddp__fail(CDDP_ABORTED, "the group's communicator is gone");
  }
  if (group) e = ncclGroupStart();
  for (i = 0; i < n && (e == ncclSuccess || e == ncclInProgress); i++) e = cddp__post(p, &c[i], s);
  if (group) {
    end = ncclGroupEnd();
    if (e == ncclSuccess || e == ncclInProgress) e = end;
  }
  cddp__comm_exit(p->comm);
  r = cddp__settle(p, e, cddp__shapes[c->kind].name);
  for (i = 0; i < n && r == CDDP_OK; i++) r = cddp__scale_mean(p, &c[i], s);
  return r == CDDP_OK ? cddp__track(p, s) : r;
}

/* After an operation that failed with the group: makes the buffers the caller's again. */
static cddp_result cddp__let_go(cddp__device *p, cddp_result r) {
  if (r == CDDP_OK || cddp__load32(&p->group->block->broken) == 0) return r;
  cddp__device_abort(p);
  cddp__await_abort(p);
  return r;
}

/* Operations on device memory, in order, behind what is on s now. */
static cddp_result cddp__issue(cddp__device *p, const cddp__call *c, int n, cudaStream_t s) {
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < n && p->staged; i++) r = cddp__stage_call(p, &c[i], s, NULL);
  for (i = 0; r == CDDP_OK && i < n && !p->staged && p->comm->comm == NULL; i++)
    r = cddp__device_copy(c[i].recv, c[i].send, c[i].count * c[i].esize, s); /* a single rank */
  if (n == 0 || p->staged || p->comm->comm == NULL) return r;
  pthread_mutex_lock(&p->turn);
  r = cddp__issue_held(p, c, n, s);
  pthread_mutex_unlock(&p->turn);
  return cddp__let_go(p, r);
}

/* Through a copy, always on the side stream: two of them share the memory for it. */
static cddp_result cddp__issue_in_place(cddp__device *p, const cddp__call *call, cudaStream_t s) {
  cddp__call c = *call;
  size_t bytes = c.count * c.esize * (size_t)p->group->size;
  void *scratch;
  cddp_result r = cddp__device_scratch(p, bytes, &scratch);
  if (r == CDDP_OK && s != p->side) r = cddp__stream_after(p->side, s, p->join);
  if (r == CDDP_OK) r = cddp__device_copy(scratch, c.send, bytes, p->side);
  c.send = scratch;
  if (r == CDDP_OK) r = cddp__issue(p, &c, 1, p->side);
  if (r == CDDP_OK && s != p->side) r = cddp__stream_after(s, p->side, p->join);
  return r;
}

/* --- handles and messages --- */

/* Keeps a work's event for the next one. */
static void cddp__spare_event(cddp__device *p, cddp_work *w) {
  cudaEvent_t event = (cudaEvent_t)w->event;
  w->event = NULL;
  pthread_mutex_lock(&p->lock);
  if (event != NULL && p->spares < CDDP__SPARE_EVENTS) {
    p->spare[p->spares++] = event;
    event = NULL;
  }
  pthread_mutex_unlock(&p->lock);
  cddp__event_free(&event);
}

static void cddp__device_work_free(cddp_work *w) {
  cddp__spare_event(cddp__device_of(w->group), w);
  cddp__free(&w->group->host->allocator, w);
}

static cddp_result cddp__work_record(cddp_work *w, cudaStream_t s) {
  cddp__device *p = cddp__device_of(w->group);
  cudaEvent_t event = NULL;
  cddp_result r = CDDP_OK;
  pthread_mutex_lock(&p->lock);
  if (p->spares > 0) event = p->spare[--p->spares];
  pthread_mutex_unlock(&p->lock);
  if (event == NULL) r = cddp__event_new(&event);
  w->event = (void *)event;
  return r == CDDP_OK ? cddp__cuda_result(cudaEventRecord(event, s), "cudaEventRecord") : r;
}

/* Issues the sends and receives posted with a handle; each gets the result. only: nothing is done
   if another thread has issued that one; NULL: any. */
static cddp_result cddp__send_messages(cddp__device *p, const cddp_work *only) {
  const cddp_allocator *a = &p->group->host->allocator;
  cddp__call *calls = NULL;
  cddp_result r = CDDP_OK;
  cddp_work *w;
  int n = 0;
  pthread_mutex_lock(&p->turn);
  if (only == NULL || !only->done)
    for (w = p->messages; w != NULL; w = w->next) n++;
  if (n > 0) {
    calls = (cddp__call *)cddp__malloc(a, (size_t)n * sizeof *calls);
    r = calls == NULL ? CDDP_OUT_OF_MEMORY
                      : cddp__stream_after(p->side, cddp__main_stream(p->group), p->fork);
    for (n = 0, w = p->messages; r == CDDP_OK && w != NULL; w = w->next) calls[n++] = w->call;
    if (r == CDDP_OK) r = cddp__issue_held(p, calls, n, p->side);
    if (r != CDDP_OK) r = cddp__break(p->group, r); /* the others wait for these */
    while ((w = p->messages) != NULL) {
      p->messages = w->next;
      w->result = r == CDDP_OK ? cddp__work_record(w, p->side) : r;
      w->done = true;
      snprintf(w->text, sizeof w->text, "%s", cddp__error_text);
    }
    cddp__free(a, calls);
  }
  pthread_mutex_unlock(&p->turn);
  return cddp__let_go(p, r);
}

/* Through the host: waits there for the operation, whose work is the CPU's. */
static cddp_result cddp__device_wait(cddp_work *w) {
  cddp_group *g = w->group;
  cddp__device *p = cddp__device_of(g);
  cudaStream_t stream = cddp__main_stream(g);
  cddp_result r = cddp__use_device(p->device); /* the default stream is the current device's */
  if (p->staged) {
    char *stage = (char *)w->stage;
    void *to = w->context, *from = w->call.recv;
    size_t bytes = cddp__result_bytes(g, &w->call);
    w->backend = NULL;
    return cddp__stage_end(p, stream, stage, to, from, bytes, cddp__work_wait(w, -1));
  }
  if (w->call.count > 0) (void)cddp__send_messages(p, w);
  if (r == CDDP_OK && w->result != CDDP_OK) r = cddp__fail(w->result, "%s", w->text);
  if (r == CDDP_OK) r = cddp__check_group(g);
  if (r == CDDP_OK && w->event != NULL)
    r = cddp__cuda_result(cudaStreamWaitEvent(stream, (cudaEvent_t)w->event, 0),
                          "cudaStreamWaitEvent");
  cddp__device_work_free(w);
  return r;
}

static bool cddp__device_done(cddp_work *w) {
  cddp__device *p = cddp__device_of(w->group);
  cudaError_t e;
  bool done;
  if (p->staged) {
    w->backend = NULL;
    done = cddp__work_done(w);
    w->backend = w->group->backend;
    return done;
  }
  if (cddp__use_device(p->device) != CDDP_OK) return true;
  if (cddp__capturing(cddp__main_stream(w->group))) return false; /* a look would void that */
  if (w->call.count > 0) (void)cddp__send_messages(p, w);
  if (w->result != CDDP_OK || w->event == NULL) return true;
  if (cddp__load32(&w->group->block->broken) != 0) return true;
  e = cudaEventQuery((cudaEvent_t)w->event);
  if (e == cudaErrorNotReady) (void)cudaGetLastError();
  return e != cudaErrorNotReady;
}

/* --- the calls of a group --- */

/* Collective: whether the ranks of all hosts have called the same so far. */
static cddp_result cddp__compare_hosts(cddp__device *p, const uint64_t mine[2]) {
  uint64_t first[2], theirs[2]; /* a hash; calls */
  cddp_group *g = p->group;
  cddp_result r;
  int q;
  if (g->hosts == NULL || p->comm->comm == NULL) return CDDP_OK;
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_BARRIER, CDDP__PHASE_DONE, 0, mine,
                  sizeof first);
  if (r != CDDP_OK) return r;
  memcpy(first, cddp__op_header_of(g, 0, g->round)->u.bytes, sizeof first);
  for (q = 1; q < g->size; q++) {
    memcpy(theirs, cddp__op_header_of(g, q, g->round)->u.bytes, sizeof theirs);
    if (memcmp(first, theirs, sizeof first) == 0) continue;
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree in what they called on device memory: rank 0 made %" PRIu64
               " calls in the group and its cddp_ddps and rank %d %" PRIu64 ", and if that is "
               "alike an earlier one or its settings differ",
               first[1], q, theirs[1]);
    return cddp__break(g, CDDP_MISMATCH);
  }
  return CDDP_OK;
}

/* What this rank has called so far. */
static void cddp__calls_so_far(const cddp__device *p, uint64_t out[2]) {
  out[0] = p->hash;
  out[1] = p->calls;
}

/* Waits on the host for what was on the group's stream, then for the ranks. */
static cddp_result cddp__run_barrier(cddp_work *w) {
  cddp_group *g = w->group;
  cddp__device *p = cddp__device_of(g);
  cddp_result r = cddp__use_device(p->device);
  if (r == CDDP_OK) r = cddp__await_stream(p, NULL, (cudaEvent_t)w->event);
  cddp__spare_event(p, w);
  if (r == CDDP_OK) r = cddp__run_recorded(g, &w->call, w->record);
  if (r == CDDP_OK) r = cddp__compare_hosts(p, (const uint64_t *)(const void *)(w + 1));
  return r == CDDP_OK && g->size > 1 ? cddp__compare_logs(p) : r; /* all have called all before */
}

static cddp_result cddp__device_barrier(cddp__device *p, const cddp__call *c, cddp_work **work) {
  cudaStream_t s = cddp__main_stream(p->group);
  cddp_work *w;
  cddp_result r;
  if (cddp__capturing(s))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "a barrier waits on the host and cannot be captured in a CUDA graph");
  if ((r = cddp__check_group(p->group)) != CDDP_OK) return r;
  w = cddp__work_new(p->group, 2 * sizeof(uint64_t));
  if (w == NULL) return CDDP_OUT_OF_MEMORY;
  w->call = *c;
  w->run = cddp__run_barrier;
  cddp__calls_so_far(p, (uint64_t *)(void *)(w + 1));
  r = cddp__work_record(w, s);
  if (work == NULL) {
    cddp__engine_drain(p->group);
    w->record = cddp__record_call(p->group, c);
    if (r == CDDP_OK) r = cddp__run_barrier(w);
  } else if (r == CDDP_OK && (r = cddp__enqueue(w)) == CDDP_OK) {
    *work = w;
    return r;
  }
  cddp__device_work_free(w);
  return r;
}

/* The exchange of counts before NCCL sends what they say. A rank that has nothing to send or
   receive has no memory that would tell where the others' is: theirs may be the host's. */
static cddp_result cddp__counts_on_device(cddp_group *g, cddp__call *c) {
  bool host = false;
  size_t sent, received;
  cddp_result r;
  cddp__engine_drain(g);
  r = cddp__exchange_counts(g, c, &host);
  if (r != CDDP_OK || !host) return r;
  cddp__buffer_bytes(g, c, &sent, &received);
  if (sent + received > 0)
    return cddp__fail(CDDP_MISMATCH, "ranks disagree: rank %d's buffers in %s lie on its device, "
                                     "another rank's in host memory",
                      g->rank, cddp__shapes[c->kind].name);
  r = cddp__run_sized(g, c);
  c->count = 0;
  return r;
}

/* A collective by NCCL on the group's stream, or with a handle on the side stream. */
static cddp_result cddp__nccl_call(cddp__device *p, const cddp__call *c, cddp_work **work) {
  cddp_group *g = p->group;
  cudaStream_t s = work != NULL ? p->side : cddp__main_stream(g);
  uint64_t record = cddp__record_call(g, c);
  cddp__call sized = *c;
  cddp_work *w = NULL;
  cddp_result r = CDDP_OK;
  if (work != NULL && (w = cddp__work_new(g, 0)) == NULL) r = CDDP_OUT_OF_MEMORY;
  if (w != NULL) w->backend = g->backend;
  if (r == CDDP_OK && c->parts != NULL) r = cddp__counts_on_device(g, &sized);
  c = &sized;
  if (r == CDDP_OK && w != NULL) r = cddp__stream_after(p->side, cddp__main_stream(g), p->join);
  if (r == CDDP_OK && c->count > 0)
    r = g->size > 1 && cddp__overwrites(c) ? cddp__issue_in_place(p, c, s)
                                           : cddp__issue(p, c, 1, s);
  if (r == CDDP_OK && w != NULL) r = cddp__work_record(w, s);
  if (r != CDDP_OK && g->size > 1) r = cddp__break(g, r); /* the others will wait for this call */
  cddp__record_finish(g, record, r);                       /* on the device it goes on */
  if (r != CDDP_OK && w != NULL) cddp__device_work_free(w);
  if (r == CDDP_OK && work != NULL) *work = w;
  return r;
}

/* A message by NCCL; one with a handle waits for others, see cddp__send_messages. */
static cddp_result cddp__nccl_message(cddp__device *p, const cddp__call *c, cddp_work **work) {
  cddp_group *g = p->group;
  cddp_work *w, **link;
  cddp_result r;
  if (g->size == 1)
    return cddp__fail(CDDP_UNSUPPORTED, "a single rank cannot send device memory to itself");
  if (c->root == CDDP_ANY)
    return cddp__fail(CDDP_UNSUPPORTED, "NCCL receives from no rank but a certain one: name it, or "
                                        "receive in host memory");
  if (work == NULL && c->root == g->rank)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "rank %d sends to itself: on a device both send and recv need a work handle",
                      g->rank);
  if (work == NULL) {
    r = cddp__issue(p, c, 1, cddp__main_stream(g));
    return r == CDDP_OK ? r : cddp__break(g, r);
  }
  if ((w = cddp__work_new(g, 0)) == NULL) return CDDP_OUT_OF_MEMORY;
  w->backend = g->backend;
  w->call = *c;
  pthread_mutex_lock(&p->turn);
  for (link = &p->messages; *link != NULL; link = &(*link)->next) {}
  *link = w;
  pthread_mutex_unlock(&p->turn);
  *work = w;
  return CDDP_OK;
}

static cddp_result cddp__device_start(cddp_group *g, const cddp__call *c, cddp_work **work,
                                      bool *taken) {
  cddp__device *p = cddp__device_of(g);
  bool message = c->kind >= CDDP__KIND_SEND;
  size_t sent, received;
  cddp_result r;
  *taken = true;
  if (work != NULL) *work = NULL;
  if ((r = cddp__device_enter(p)) != CDDP_OK) return r;
  if ((r = cddp__memory_of_call(p, c, taken)) != CDDP_OK) return r;
  cddp__buffer_bytes(g, c, &sent, &received);
  *taken = *taken && (sent + received > 0 || !(message || p->staged));
  if ((!message || (work == NULL && *taken)) && (r = cddp__send_messages(p, NULL)) != CDDP_OK)
    return r;
  if (c->kind == CDDP__KIND_BARRIER) {
    *taken = true;
    return cddp__device_barrier(p, c, work);
  }
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if (*taken && !p->staged && c->op > CDDP_MAX)
    return cddp__fail(CDDP_UNSUPPORTED, "NCCL has no bitwise operations: reduce integers in host "
                                        "memory, or in a group with backend \"cpu\"");
  if (!message) cddp__log_call(p, c, *taken || c->parts != NULL);
  if (!*taken) return CDDP_OK;
  if (p->staged) return cddp__stage_call(p, c, cddp__main_stream(g), work);
  return message ? cddp__nccl_message(p, c, work) : cddp__nccl_call(p, c, work);
}

static cddp_result cddp__device_synchronize(cddp_group *g) {
  cddp__device *p = cddp__device_of(g);
  cddp_result r;
  cddp__engine_drain(g);
  if ((r = cddp__device_enter(p)) != CDDP_OK) return r;
  if ((r = cddp__send_messages(p, NULL)) != CDDP_OK) return r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  return cddp__await_stream(p, cddp__main_stream(g), NULL);
}

/* --- communicators: connected, split, left --- */

static cddp_result cddp__all_connected(cddp_group *g) {
  return cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_GROUP_NEW, CDDP__PHASE_CONNECTED, 0, NULL, 0);
}

/* Collective: sums and means of several sizes. NCCL connects the ranks when it first uses an
   algorithm, and the host waits for that: here, and then in no all-reduce of a step. */
static cddp_result cddp__warm_up(cddp__device *p) {
  cddp__call calls[16];
  char *room = NULL;
  size_t bytes, at = 0;
  uint16_t halving = cddp__f32_to_f16(1.0f / (float)cddp__power_of_two(p->group->size));
  ncclResult_t e = ncclInternalError;
  cddp_result r;
  int n = 0;
  if (cddp__comm_enter(p->comm)) {
    e = ncclRedOpCreatePreMulSum(&p->comm->half_sum, &halving, ncclFloat16,
                                 ncclScalarHostImmediate, p->comm->comm);
    cddp__comm_exit(p->comm);
  }
  if (e != ncclSuccess) return cddp__break_nccl(p, e, "ncclRedOpCreatePreMulSum");
  r = cddp__cuda_result(cudaMalloc((void **)&room, 3 * CDDP__WARM_UP), "cudaMalloc");
  if (r == CDDP_OK) r = cddp__device_zero(room, 3 * CDDP__WARM_UP, p->side);
  for (bytes = 8; r == CDDP_OK && bytes <= CDDP__WARM_UP && n < 16; bytes *= 32, n += 2) {
    calls[n] = cddp__make_call(CDDP__KIND_ALL_REDUCE, room + at, room + at, bytes / 4, CDDP_F32,
                               CDDP_SUM, -1);
    calls[n + 1] = cddp__make_call(CDDP__KIND_ALL_REDUCE, room + at + bytes, room + at + bytes,
                                   bytes / 2, CDDP_F16, CDDP_AVG, -1);
    at += 2 * bytes;
  }
  if (r == CDDP_OK) r = cddp__issue(p, calls, n, p->side);
  if (r == CDDP_OK) r = cddp__await_stream(p, p->side, NULL);
  if (r != CDDP_OK) r = cddp__break(p->group, r);
  if (room != NULL) cudaFree(room);
  /* A rank that ends right after this call is not to take operations of the others along. */
  return r == CDDP_OK ? cddp__all_connected(p->group) : r;
}

/* Collective: a communicator that is there is used from now on. */
static cddp_result cddp__nccl_begin(cddp__device *p) {
  cddp_result r = cddp__all_connected(p->group);
  if (r != CDDP_OK) return r;
  r = cddp__watch(p);
  return r == CDDP_OK ? cddp__warm_up(p) : cddp__break(p->group, r);
}

/* Collective: connects a communicator over all ranks of the context's group. */
static cddp_result cddp__nccl_connect(cddp__device *p) {
  cddp_group *g = p->group;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id;
  ncclResult_t e = ncclSuccess;
  cddp_result r = CDDP_OK;
  int version = 0;
  if (ncclGetVersion(&version) == ncclSuccess && version < 21900)
    cddp__log(&g->host->logger, 1,
              "NCCL %d.%d can crash when another thread aborts a communicator, which cddp does "
              "after a failure; 2.19 and later do not",
              version / 10000, version / 100 % 100);
  cddp__watch_hosts(g); /* from now on leaders see each other's end */
  if (g->rank == 0 && (e = ncclGetUniqueId(&id)) != ncclSuccess)
    r = cddp__fail(CDDP_NCCL, "ncclGetUniqueId: %s (%.300s)", ncclGetErrorString(e),
                   ncclGetLastError(NULL));
  if ((r = cddp__consensus(g, r, NULL, 0, NULL)) != CDDP_OK) return r;
  r = cddp__run_simple(g, CDDP__KIND_BROADCAST, &id, &id, sizeof id, CDDP_U8, 0);
  if (r != CDDP_OK) return r;
  config.blocking = 0;
  e = ncclCommInitRankConfig(&p->comm->comm, g->size, id, g->rank, &config);
  r = cddp__settle(p, e, "ncclCommInitRankConfig");
  return r == CDDP_OK ? cddp__nccl_begin(p) : r;
}

/* Every rank of p's group: the communicators of the groups that it has been split into. child: NULL
   for a rank that gets none. After a failure NCCL's thread may still write to `made`, which stays.
*/
static cddp_result cddp__nccl_split(cddp__device *p, int color, cddp__device *child) {
  ncclComm_t *made = (ncclComm_t *)cddp__calloc(NULL, 1, sizeof *made);
  ncclResult_t e = ncclInvalidUsage;
  cddp_result r;
  if (made == NULL) return cddp__break(p->group, CDDP_OUT_OF_MEMORY);
  if (child != NULL) cddp__watch_hosts(child->group); /* now leaders see each other's end */
  pthread_mutex_lock(&p->turn);
  if (cddp__comm_enter(p->comm)) {
    e = ncclCommSplit(p->comm->comm, child != NULL ? color : NCCL_SPLIT_NOCOLOR,
                      child != NULL ? child->group->rank : 0, made, NULL);
    cddp__comm_exit(p->comm);
  }
  r = cddp__settle(p, e, "ncclCommSplit");
  pthread_mutex_unlock(&p->turn);
  if (r != CDDP_OK) return r;
  if (child != NULL) child->comm->comm = *made;
  free(made);
  if (child != NULL) r = cddp__settle(child, ncclSuccess, "ncclCommSplit");
  return r == CDDP_OK && child != NULL ? cddp__nccl_begin(child) : r;
}

/* Every rank of g, after cddp__split: device contexts for the new groups. */
static cddp_result cddp__device_split(cddp_group *g, cddp_group *child, int color, bool internal) {
  uint64_t calls[2];
  cddp__device *p = cddp__device_of(g), *c = NULL;
  cddp_result r = cddp__use_device(p->device);
  if (r == CDDP_OK) r = cddp__send_messages(p, NULL);
  if (r == CDDP_OK && child != NULL) r = cddp__device_new(&c, child, p->device);
  if (c != NULL) {
    child->stream = g->stream;
    c->kernels = p->kernels;
    c->staged = p->staged;
    if (internal) c->owner = p->owner;
  }
  if (p->comm->comm != NULL) {
    if (r == CDDP_OK) r = cddp__await_stream(p, p->side, NULL);
    if (r == CDDP_OK) r = cddp__await_stream(p, cddp__main_stream(g), NULL);
    if (r != CDDP_OK) r = cddp__break(g, r); /* the other ranks count on this one */
    cddp__calls_so_far(p, calls);
    if (r == CDDP_OK) r = cddp__compare_hosts(p, calls);
    if (r == CDDP_OK)
      r = cddp__nccl_split(p, color, c != NULL && child->size >= CDDP__COMM_FROM ? c : NULL);
    r = cddp__consensus(g, r, NULL, 0, NULL);
  } else if (r != CDDP_OK && child != NULL) {
    r = cddp__break(child, r);
  }
  if (r == CDDP_OK && c != NULL) {
    child->backend = g->backend;
    child->device = c;
  } else if (c != NULL) {
    cddp__device_delete(c);
  }
  return r;
}

/* Ends the communicator in an orderly way: what peers still read from this rank goes out first.
   Ranks that go on must not hear of it, so nothing here breaks the group. */
static void cddp__device_leave(cddp_group *g) {
  const cddp__atomic_u32 *broken = &g->block->broken;
  cddp__device *p = cddp__device_of(g);
  bool late;
  (void)cddp__use_device(p->device);
  (void)cddp__send_messages(p, NULL);
  while (cddp__load32(broken) == 0) {
    cddp__poll_events(p);
    if (!cddp__device_pending(p, &late)) break;
    cddp__sleep(1e-4);
  }
  if (cddp__load32(broken) == 0) cddp__comm_end(p->comm, CDDP__COMM_DESTROYED);
  cddp__device_delete(p);
  g->backend = NULL;
  g->device = NULL;
}

/* --- which device a rank takes --- */

static const cddp__backend cddp__device_backend = {
    cddp__device_start, cddp__device_wait,  cddp__device_done,  cddp__device_synchronize,
    cddp__device_alloc, cddp__device_split, cddp__device_leave, cddp__device_free};

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
  *device = local != NULL && local[0] >= '0' && local[0] <= '9' ? atoi(local) : g->local_rank;
  if (!nccl || count == 1) *device %= count; /* a rank that sees one GPU has been given it */
  if (*device < count) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "local rank %d has no GPU of its own: %d %s visible; start at most %d rank%s "
                    "here, or let them share with backend \"cpu\"",
                    *device, count, count == 1 ? "is" : "are", count, count == 1 ? "" : "s");
}

static cddp_result cddp__report_device(const cddp_group *g, const cddp_group_desc *desc, bool nccl,
                                       cddp__device_report *out) {
  const char *blocking = getenv("NCCL_COMM_BLOCKING"), *id = getenv("NCCL_HOSTID");
  const char *several = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  struct cudaDeviceProp about;
  cddp_result r;
  int device = 0, version = 0, i;
  bool may_share = ncclGetVersion(&version) == ncclSuccess && version >= 23000 &&
                   several != NULL && strcmp(several, "1") == 0;
  memset(out, 0, sizeof *out);
  memset(&about, 0, sizeof about);
  r = cddp__pick_device(g, desc, nccl, &device);
  if (r == CDDP_OK && nccl && blocking != NULL && strcmp(blocking, "1") == 0)
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "NCCL_COMM_BLOCKING=1 makes NCCL's calls block, which no deadline ends; unset "
                   "it");
  if (r == CDDP_OK) r = cddp__cuda_result(cudaSetDevice(device), "cudaSetDevice");
  if (r == CDDP_OK)
    r = cddp__cuda_result(cudaGetDeviceProperties(&about, device), "cudaGetDeviceProperties");
  for (i = 0; i < 16 && !may_share; i++) /* the uuid of a GPU, or of a part of one */
    snprintf(out->gpu + 2 * i, 3, "%02x", (unsigned char)about.uuid.bytes[i]);
  out->device = device;
  out->kernels = cddp__registered_kernels != NULL &&
                 cddp__registered_kernels->version == CDDP_VERSION;
  cddp__host_identity(out->host, sizeof out->host);
  if (id != NULL) /* NCCL goes by it: ranks may so share a GPU, for tests */
    snprintf(out->host, sizeof out->host, "%s", id);
  snprintf(out->name, sizeof out->name, "rank %d (pid %d on %.48s)", g->rank, (int)getpid(),
           g->host->name);
  return r;
}

/* Collective: a device for a group that has none. */
static cddp_result cddp__give_device(cddp_group *g, const cddp_group_desc *desc) {
  const cddp_allocator *a = &g->host->allocator;
  const char *backend = cddp__backend_name(desc);
  bool nccl = backend == NULL || strcmp(backend, "nccl") == 0;
  cddp__device_report mine, *all;
  cddp__device *p = NULL;
  bool kernels = true;
  cddp_result r;
  int i, k;
  all = (cddp__device_report *)cddp__malloc(a, (size_t)g->size * sizeof *all);
  if (all == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  r = cddp__report_device(g, desc, nccl, &mine);
  r = cddp__consensus(g, r, &mine, sizeof mine, all);
  for (i = 0; r == CDDP_OK && i < g->size; i++) {
    kernels = kernels && all[i].kernels != 0;
    for (k = 0; r == CDDP_OK && nccl && k < i; k++) /* the result is the same on every rank */
      if (all[i].gpu[0] != 0 && strcmp(all[i].gpu, all[k].gpu) == 0 &&
          strcmp(all[i].host, all[k].host) == 0)
        r = cddp__fail(CDDP_INVALID_ARGUMENT,
                       "%s and %s both have cuda:%d (%s), but NCCL needs a GPU for each rank: "
                       "set device to \"cuda\" for cuda:LOCAL_RANK, start fewer ranks, or let "
                       "them share with backend \"cpu\"",
                       all[k].name, all[i].name, all[i].device, all[i].gpu);
  }
  cddp__free(a, all);
  if (r != CDDP_OK) return r;
  if ((r = cddp__device_new(&p, g, mine.device)) != CDDP_OK) return cddp__break(g, r);
  p->staged = !nccl;
  if (kernels) p->kernels = cddp__registered_kernels;
  if (mine.kernels != 0)
    r = cddp__cuda_result((cudaError_t)cddp__registered_kernels->load(), "loading kernels");
  if (r != CDDP_OK) r = cddp__break(g, r);
  if (r == CDDP_OK && nccl && g->size >= CDDP__COMM_FROM) r = cddp__nccl_connect(p);
  if (r != CDDP_OK) {
    cddp__device_delete(p);
    return r;
  }
  g->backend = &cddp__device_backend;
  g->device = p;
  return CDDP_OK;
}
/* Whether p lies in memory that the host cannot read. */
static bool cddp__on_device(const void *p) {
  struct cudaPointerAttributes a;
  if (p == NULL || !cddp__cuda_in_use()) return false;
  if (cudaPointerGetAttributes(&a, p) == cudaSuccess) return a.type == cudaMemoryTypeDevice;
  (void)cudaGetLastError();
  return false;
}

/* Waits for what is on the group's stream; without a group with a device, for all of the
   device's. */
static cddp_result cddp__settle_device(cddp_group *g) {
  if (g == NULL || g->backend == NULL)
    return cddp__cuda_result(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (cddp__capturing(cddp__main_stream(g)))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "a checkpoint waits on the host and cannot be captured in a CUDA graph");
  return g->backend->synchronize(g);
}

/* Copies between the host's memory and a device's; returns when that is done. */
static cddp_result cddp__transfer(cddp_group *g, void *to, const void *from, size_t bytes) {
  if (g != NULL && g->backend != NULL) return cddp__copy_now(cddp__device_of(g), to, from, bytes);
  return cddp__cuda_result(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}
#else
static cddp_result cddp__give_device(cddp_group *g, const cddp_group_desc *desc) {
  (void)g, (void)desc;
  return cddp__fail(CDDP_UNSUPPORTED, "this build has no CUDA");
}
static bool cddp__on_device(const void *p) { return (void)p, false; }
static cddp_result cddp__settle_device(cddp_group *g) { return (void)g, CDDP_OK; }
static cddp_result cddp__transfer(cddp_group *g, void *to, const void *from, size_t bytes) {
  (void)g, memcpy(to, from, bytes);
  return CDDP_OK;
}
#endif

/* Device and backend: known, in this build, and fit for each other. */
static cddp_result cddp__check_device(const cddp_group_desc *d) {
  const char *device = d->device != NULL ? d->device : "cpu";
  const char *backend = cddp__backend_name(d) != NULL ? cddp__backend_name(d) : "cpu";
  bool cuda = strncmp(device, "cuda", 4) == 0;
  bool nccl = strcmp(backend, "nccl") == 0, mpi = strcmp(backend, "mpi") == 0;
  const char *gpu = cuda && device[4] == ':' ? device + 5 : ""; /* its number */
  if (!nccl && !mpi && strcmp(backend, "cpu") != 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "backend \"%s\" is not known; it may be \"cpu\", \"mpi\" or \"nccl\"",
                      backend);
  if ((nccl && !CDDP__HAS_CUDA) || (mpi && !CDDP__HAS_MPI))
    return cddp__fail(CDDP_UNSUPPORTED,
                      "this build has no \"%s\" backend; compile cddp's implementation with %s for "
                      "it", backend, nccl ? "-DCDDP_CUDA" : "mpicc -DCDDP_MPI");
  if ((nccl && !cuda) || (mpi && cuda))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "backend \"%s\" needs device \"%s\"", backend,
                      nccl ? "cuda" : "cpu");
  if (cuda && !CDDP__HAS_CUDA)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "this build has no CUDA; compile cddp's implementation with -DCDDP_CUDA and "
                      "link -lnccl -lcudart, or use device \"cpu\"");
  if (cuda ? device[4] == 0 || (gpu[0] != 0 && strlen(gpu) <= 4 &&
                                strspn(gpu, "0123456789") == strlen(gpu))
           : strcmp(device, "cpu") == 0)
    return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "device \"%s\" is not known; it may be \"cpu\", \"cuda\" or a certain GPU: "
                    "\"cuda:0\"", device);
}

/* Collective: the device that the description asks for, if any. A failure takes the group away. */
static cddp_result cddp__attach_device(cddp_group **g, const cddp_group_desc *desc) {
  cddp_result r = CDDP_OK;
  if (desc->device != NULL && strncmp(desc->device, "cuda", 4) == 0)
    r = cddp__give_device(*g, desc);
  if (r != CDDP_OK) {
    cddp__group_leave(*g);
    *g = NULL;
  }
  return r;
}

/* --- for checkpoints: memory anywhere --- */

/* If *data lies on the device: replaces it by *copy in host memory, which is to be freed, when what
   is on the group's stream now has been done. */
static cddp_result cddp__from_device(cddp_group *g, const void **data, size_t bytes, void **copy) {
  cddp_result r;
  if (bytes == 0 || !cddp__on_device(*data)) return CDDP_OK;
  if ((r = cddp__settle_device(g)) != CDDP_OK) return r;
  *copy = cddp__malloc(&g->host->allocator, bytes);
  if (*copy == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__transfer(g, *copy, *data, bytes);
  *data = *copy;
  return r;
}

/* cddp__split of a healthy group, and for every new group its device context. */
static cddp_result cddp__split_devices(cddp_group *g, int color, int key, uint64_t check,
                                      bool internal, cddp_group **out) {
  cddp_result r, device;
  char text[CDDP__ERROR_MAX];
  cddp__engine_drain(g);
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  r = cddp__split(g, color, key, check, out);
  if (g->backend == NULL || (r != CDDP_OK && r != CDDP_OUT_OF_MEMORY)) return r;
  snprintf(text, sizeof text, "%s", cddp__error_text);
  device = g->backend->split(g, *out, color, internal); /* the other ranks count on this one */
  if (r != CDDP_OK) return cddp__fail(r, "%s", text);
  if (device != CDDP_OK && *out != NULL) cddp__group_leave(*out);
  if (device != CDDP_OK) *out = NULL;
  return device;
}
/* >>kernels ------------------------------------------------------------------------------------
   What cddp_kernels.cuh does on a device: an optimizer's step, copies of weights, compression.
   Owns: the states of a cddp_optim whose parameters lie on a device. Touches: parameters,
   gradients, copies and buckets there. Entry points: cddp__attach_optim, cddp__device_optim,
   cddp__device_update and _copies for a cddp_ddp's step, cddp__compress_hook.
   Works as follows: kernels are registered before main by the one .cu file that includes
   cddp_kernels.cuh; without it these calls are CDDP_UNSUPPORTED. One launch takes all parameters of
   a dtype that have the same settings. States are one piece of memory, made with the cddp_optim,
   and stay where they are: a CUDA graph may have their addresses. */

static cddp__sparse *cddp__sparse_of(const cddp_ddp *d, int i) { /* NULL: it is dense */
  return d->sparse != NULL ? d->sparse[i] : NULL;
}

static cddp__call cddp__average_call(void *buf, size_t count, cddp_dtype dtype) {
  return cddp__make_call(CDDP__KIND_ALL_REDUCE, buf, buf, count, dtype, CDDP_AVG, -1);
}

/* Makes what buckets leave in the arena the mean of the ranks that have data: it is a sum, or has
   been divided by the number of all ranks, or is that mean. */
static double cddp__mean_factor(const cddp_ddp *d, cddp_dtype dtype) {
  bool by_all =
      d->desc.comm_hook != NULL || d->comm->carrier->foreign || d->group->backend != NULL;
  if (d->sums && dtype != CDDP_F16) return 1.0 / d->active_count;
  return by_all ? (double)d->group->size / d->active_count : 1;
}

#ifdef CDDP_CUDA
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

/* Where parameter i's gradient lies on the device; d NULL: for cddp_optim_step. */
static void *cddp__device_gradient(const cddp_optim *s, const cddp_ddp *d, int i) {
  if (d == NULL && cddp__optim_sparse(s, i) == NULL) return s->params[i].grad;
  if (d == NULL) d = s->desc.ddp;
  return d->arena + (cddp__sparse_of(d, i) != NULL ? d->tensors[i].dense : d->tensors[i].offset);
}

/* Whether one launch can update parameters i and j. d: as below. */
static bool cddp__same_launch(const cddp_optim *s, const cddp_ddp *d, int i, int j) {
  bool steps = s->algorithm->counts ? s->steps[i] == s->steps[j]
                                    : (s->steps[i] == 0) == (s->steps[j] == 0);
  return steps && s->params[i].dtype == s->params[j].dtype &&
         s->lr_scales[i] == s->lr_scales[j] && s->weight_decays[i] == s->weight_decays[j] &&
         (d == NULL || (cddp__sparse_of(d, i) == NULL) == (cddp__sparse_of(d, j) == NULL));
}

/* Updates all weights of this rank: a launch for all parameters of the same dtype and settings that
   have taken as many steps. d: in cddp_ddp_step, whose gradients lie in the arena, those that are
   rows, or are clipped, as means; else NULL. */
static cddp_result cddp__device_update(cddp_optim *s, const cddp_ddp *d, unsigned flags,
                                       cddp_segment *segments, cudaStream_t stream) {
  bool capturing = cddp__capturing(stream), clips = d != NULL && d->desc.max_grad_norm > 0;
  const cddp_kernels *k;
  cddp_result r = cddp__need_kernels(&k, s->algorithm->name);
  int i, j, n, left = 0;
  for (i = 0; i < s->count; i++) {
    s->launched[i] = cddp__optim_skips(s, i);
    left += !s->launched[i];
  }
  for (i = s->count - 1; r == CDDP_OK && left > 0; i--) { /* ascending in a cddp_ddp's arena */
    bool sum = d != NULL && cddp__sparse_of(d, i) == NULL && !clips; /* to be made a mean */
    if (s->launched[i]) continue;
    if (capturing && s->algorithm->counts)
      return cddp__fail(CDDP_UNSUPPORTED, "a CUDA graph would repeat the numbers of one step of %s",
                        s->algorithm->name);
    if (capturing && s->states > 0 && s->steps[i] == 0)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "take two steps before you capture one in a CUDA graph: the first starts "
                        "momentum");
    for (n = 0, j = i; j >= 0; j--) {
      if (s->launched[j] || !cddp__same_launch(s, d, i, j)) continue;
      segments[n].data = s->params[j].data;
      segments[n].grad = cddp__device_gradient(s, d, j);
      segments[n].momentum = s->states > (int)s->desc.master_weights ? s->state[j] : NULL;
      segments[n].master = NULL;
      if (s->desc.master_weights && cddp__has_state(s, s->states - 1, j))
        segments[n].master = s->state[(s->states - 1) * s->count + j];
      if (segments[n].master != NULL && s->fresh[j] && r == CDDP_OK)
        r = cddp__kernel_result(k->convert(segments[n].master, CDDP_F32, segments[n].data,
                                           s->params[j].dtype, s->params[j].count, (void *)stream),
                                "the kernel that begins masters");
      segments[n++].count = s->params[j].count;
      s->launched[j] = true;
    }
    left -= n;
    if (r != CDDP_OK) return r;
    r = cddp__kernel_result(
        s->algorithm->launch(s, i, k, segments, n,
                             sum ? cddp__mean_factor(d, s->params[i].dtype) : 1,
                             clips && d->used[i] ? d->clip : NULL, flags, (void *)stream),
        "the optimizer's kernel");
  }
  return r;
}

/* That of the cddp_ddp, whose device becomes this thread's. */
static cudaStream_t cddp__optim_stream(const cddp_optim *s) {
  if (s->desc.ddp == NULL || s->desc.ddp->side == NULL) return (cudaStream_t)s->desc.stream;
  (void)cddp__use_device(cddp__device_of(s->desc.ddp->group)->device);
  return cddp__main_stream(s->desc.ddp->group);
}

#define CDDP__COPIES 64 /* of a launch */

static cddp_result cddp__device_copies(const cddp_optim *s, cudaStream_t stream) {
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

static cddp_result cddp__device_step(cddp_optim *s) {
  cudaStream_t stream = cddp__optim_stream(s);
  cddp_segment *segments;
  cddp_result r;
  segments = (cddp_segment *)cddp__malloc(&s->allocator, (size_t)s->count * sizeof *segments);
  if (segments == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__device_update(s, NULL, 0, segments, stream);
  cddp__free(&s->allocator, segments);
  return r == CDDP_OK ? cddp__device_copies(s, stream) : r;
}

/* All gradients that a cddp_ddp has placed at once, the caller's own one by one. */
static cddp_result cddp__device_zero_grad(cddp_optim *s) {
  cudaStream_t stream = cddp__optim_stream(s);
  const cddp_ddp *d = s->desc.ddp;
  cddp_result r = d != NULL ? cddp__device_zero(d->arena, d->bytes, stream) : CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < s->count; i++) {
    if (s->params[i].grad != NULL && (d == NULL || !d->tensors[i].placed))
      r = cddp__device_zero(s->params[i].grad,
                            s->params[i].count * cddp__dtype_size(s->params[i].dtype), stream);
  }
  return r;
}

static cddp_result cddp__device_write_copies(cddp_optim *s) {
  return cddp__device_copies(s, cddp__optim_stream(s));
}

/* CUDA graphs hold a state's address: it stays where it is. */
static cddp_result cddp__states_clear(const cddp_optim *s, void *state, size_t bytes) {
  cudaStream_t stream = cddp__optim_stream(s);
  cddp_result r = cddp__device_zero(state, bytes, stream);
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

/* Zeroed states of all parameters, in one piece of device memory. */
static cddp_result cddp__states_alloc(cddp_optim *s) {
  size_t bytes = 0;
  cddp_result r;
  int k;
  for (k = 0; k < s->count * s->states; k++) {
    const cddp_param *p = &s->params[k % s->count];
    s->state[k] = (void *)(uintptr_t)bytes;
    if (cddp__has_state(s, k / s->count, k % s->count))
      bytes += cddp__round_up(p->count * cddp__dtype_size(cddp__state_type(s, k % s->count)), 256);
  }
  (void)cddp__optim_stream(s); /* its device is this thread's */
  r = cddp__cuda_result(cudaMalloc(&s->flat, bytes > 0 ? bytes : 1), "cudaMalloc of states");
  if (r != CDDP_OK) return r;
  for (k = 0; k < s->count * s->states; k++)
    s->state[k] = (char *)s->flat + (uintptr_t)s->state[k];
  return cddp__states_clear(s, s->flat, bytes);
}

static void cddp__states_free(cddp_optim *s) { cddp__device_free(s->flat); }

static const cddp__optim_backend cddp__device_optim = {
    cddp__device_step, cddp__device_zero_grad, cddp__states_free, cddp__states_clear,
    cddp__device_write_copies};

/* cddp__compress_hook on a device. */
static cddp_result cddp__gpu_compress(cddp_bucket *b, cddp_dtype small) {
  cddp__device *p = cddp__device_of(b->group);
  void *stream = b->group->stream, *small_copy;
  const cddp_kernels *k;
  cddp__call c;
  cddp_result r;
  if ((r = cddp__need_kernels(&k, "gradient compression")) != CDDP_OK) return r;
  if ((r = cddp__device_scratch(p, 2 * b->count, &small_copy)) != CDDP_OK) return r;
  r = cddp__kernel_result(k->convert(small_copy, small, b->data, b->dtype, b->count, stream),
                          "the kernel that compresses");
  c = cddp__average_call(small_copy, b->count, small);
  if (r == CDDP_OK) r = cddp__start_call(b->group, &c, NULL);
  if (r != CDDP_OK) return r;
  return cddp__kernel_result(k->convert(b->data, b->dtype, small_copy, small, b->count, stream),
                             "the kernel that expands");
}
#endif

static cddp_result cddp__compress_hook(cddp_bucket *b, cddp_dtype small) {
  cddp__call c = cddp__average_call(b->data, b->count, b->dtype);
  void *copy;
  cddp_result r;
  if (cddp__dtype_size(b->dtype) <= 2) return cddp__start_call(b->group, &c, NULL);
#ifdef CDDP_CUDA
  if (b->group->backend != NULL) return cddp__gpu_compress(b, small);
#endif
  copy = cddp__arena_alloc(b->group->host, b->count * 2, CDDP__FOR_USER);
  if (copy == NULL) return CDDP_OUT_OF_MEMORY;
  cddp__convert(copy, small, b->data, b->dtype, b->count);
  c = cddp__average_call(copy, b->count, small);
  r = cddp__start_call(b->group, &c, NULL);
  if (r == CDDP_OK) cddp__convert(b->data, b->dtype, copy, small, b->count);
  cddp__arena_free(b->group->host, copy);
  return r;
}

/* An optimizer whose first parameter lies on a device has all of them there. */
static cddp_result cddp__attach_optim(cddp_optim *s) {
#ifdef CDDP_CUDA
  int i, count = 0, on_device = 0;
  if (s->desc.ddp != NULL ? s->desc.ddp->side == NULL : !cddp__cuda_in_use()) return CDDP_OK;
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
  if (on_device == 0) return CDDP_OK;
  s->backend = &cddp__device_optim;
  if (s->states == 0) return CDDP_OK;
  return cddp__states_alloc(s); /* zeroed before any stream steps */
#else
  (void)s;
  return CDDP_OK;
#endif
}
/* Whether s may step d: made for the same parameters, not in use by another cddp_ddp. */
static cddp_result cddp__check_pair(const cddp_ddp *d, cddp_optim *s) {
  cddp_result r;
  int i;
  const char *wrong =
      s->params != d->params || s->count != d->count
          ? "the cddp_optim was made for other parameters than the cddp_ddp"
      : s->share != NULL && ((cddp__share *)s->share)->ddp != d
          ? "the cddp_optim already steps another cddp_ddp"
      : d->no_sync ? "no_sync is on; switch it off for the backward pass that is stepped"
                   : NULL;
  if (wrong != NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "%s", wrong);
  if (d->desc.elastic && s->desc.master_weights)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "master_weights and elastic in cddp_ddp_desc exclude each other; set copies");
  for (i = 0; i < d->count && s->paired != d->id; i++)
    if (cddp__sparse_of(d, i) != NULL && (r = cddp__check_rows(s, i)) != CDDP_OK) return r;
  s->paired = d->id;
  return CDDP_OK;
}

/* >>ddp ----------------------------------------------------------------------------------------
   Distributed data parallel training: one engine for gradients in host memory and on devices.
   Owns: a cddp_ddp, its gradients, its private groups, and the shares of momentum. Touches: the
   caller's parameters, on a host also those of the other ranks between cddp__enter and cddp__exit;
   momentum and counts of the cddp_optim of a step. Entry points: cddp__ddp_new, _setup and _free;
   cddp_ddp_ready, cddp__ddp_meet and _step; cddp_ddp_next_shard, _join. Called by the thread that
   trains, but for cddp_ddp_ready (any) and cddp__run_bucket (the engine of d->comm); what both
   touch is guarded by d->lock.
   Works as follows: all gradients lie in one arena per rank, dtype by dtype, last parameter first,
   and never move. A bucket is a list of parameters, so new buckets (in order of arrival, after the
   first step) move nothing. ready() marks a gradient. When a bucket and all before it are full, its
   reduction begins. wait() and step() compare what is ready on d->control, start what is left, and
   go on when all buckets are reduced. What differs between kinds of memory is behind
   cddp__ddp_memory, d->memory:
   On the host the arena is shared memory. The group's thread reduces a bucket in two rounds: every
   rank has it; every rank has done its slice. step() on gradients that nobody has reduced yet takes
   one pass instead: each rank walks through its part of the arena block by block, adds up the block
   of all ranks, applies SGD with its share of the momentum, writes the new weights to every rank
   and zeroes the block everywhere. The block stays in the first-level cache between these, or (f32,
   momentum, 1, 2 or 4 ranks) one loop does it all. After a step() the reduction of the next buckets
   therefore waits for step(). Weights in memory that is not shared are published through the
   gradients' places. With max_grad_norm there is a pass before that one: each rank leaves the mean
   of its part in its own arena, and the sums of squares of that part's pieces behind it; a round;
   every rank adds up all sums, in the order of the arena. cddp_ddp_reduce_scatter is that pass
   alone, cddp_ddp_all_gather what follows the update of a block.
   With NCCL a bucket's all-reduce goes onto the side stream, behind an event of the backward pass;
   the caller's stream then waits for the side stream, and one kernel updates all weights and zeroes
   the gradients. The host waits for no device, and for other ranks only where d->meets. Every rank
   keeps all of the momentum. Without NCCL it is the same, but that the group's thread reduces the
   buckets, by all-reduces that take their way through the host.
   More shards than ranks (d->spread): behind its arena a rank has slots, each as large, with f32
   for f16 and bf16. A shard that has ended goes from the arena into a slot and is added to those
   before it with which it makes a node of the canonical tree over all shards (cddp__merges, in
   >>plan); the last one may stay in the arena. Where each rank has which nodes then is known since
   creation (d->nodes). Buckets wait for the step, which takes the mean over all ranks' nodes in
   place of their arenas: cddp__reduce_shards. Ranks that do not see each other's memory gather all
   nodes first. On devices all nodes lie in slots, and each rank gets all nodes of a part of the
   arena, takes the mean of these, and all gather the parts (cddp__gpu_gather_piece); with NCCL,
   whose own order is not the canonical one, also if shards are as many as ranks. Rows are packed
   shard by shard, and merged as if each shard were a rank's.
   From ready() to the new weight on a host: cddp_ddp_ready; cddp_ddp_step, cddp__ddp_step,
   cddp__ddp_meet (one round), cddp__finish, cddp__host_step, cddp__fuse_parts, cddp__fuse_loop, the
   kernel.
   Uneven inputs: each meeting tells which ranks have joined (cddp__step_header), so all know over
   how many ranks the mean goes; the first round of a bucket tells it too, since that may come
   before the meeting. A rank that has joined announces ddp_join, which agrees with any call of the
   others that begins with a meeting, looks at what that was, and does its part with gradients that
   count for nothing. After a cddp_ddp_wait the others step as they like, so weights here become out
   of date; they and the momentum come from a rank that has data before the next step(), or from the
   last one to join when all have. */

#define CDDP__BLOCK ((size_t)2048) /* elements of a block of step() */

/* Keeps the first failure, which all later calls return. ready() may fail in several threads. */
static cddp_result cddp__ddp_fail(cddp_ddp *d, cddp_result r) {
  pthread_mutex_lock(&d->lock);
  if (!d->failed) {
    d->failed = true;
    d->fail_result = r;
    snprintf(d->fail_text, sizeof d->fail_text, "%s", cddp__error_text);
  }
  r = cddp__fail(d->fail_result, "%s", d->fail_text);
  pthread_mutex_unlock(&d->lock);
  return r;
}

/* Wakes the members that wait for a change. */
static void cddp__elastic_changed(cddp__board *b) {
  cddp__add32(&b->changes, 1);
  if (cddp__load32(&b->sleepers) != 0) cddp__futex_wake(&b->changes);
}

/* Ends what peers wait for, now or in the background: this model is of no more use to any rank. */
static cddp_result cddp__give_up(cddp_ddp *d, cddp_result r) {
  cddp_group *groups[3];
  char text[CDDP__ERROR_MAX];
  int i;
  if (d->elastic != NULL) {
    cddp__note_cause(&d->elastic->board->failure, r, cddp__error_text);
    cddp__elastic_changed(d->elastic->board);
    return cddp__ddp_fail(d, r);
  }
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

/* --- creation: comparing the model with rank 0's --- */

/* What must agree between ranks of one parameter: a hash, and in words what it is of. */
typedef struct cddp__param_info {
  uint64_t hash;
  char text[176];
} cddp__param_info;

static void cddp__describe_param(const cddp_ddp *d, int i, cddp__param_info *out) {
  const cddp_param *p = &d->params[i];
  const char *name = p->name != NULL ? p->name : "";
  uint64_t rows = cddp__sparse_of(d, i) != NULL ? d->sparse[i]->rows : 0, numbers[3];
  memset(out, 0, sizeof *out);
  numbers[0] = p->count;
  numbers[1] = rows;
  numbers[2] = (uint64_t)p->dtype;
  out->hash = cddp__hash64(strlen(name), name, strlen(name));
  out->hash = cddp__hash64(out->hash, numbers, sizeof numbers);
  snprintf(out->text, sizeof out->text, "\"%.100s\" (%zu %s", name, p->count,
           cddp__dtype_names[p->dtype]);
  if (rows > 0) cddp__append(out->text, sizeof out->text, ", %" PRIu64 " sparse rows", rows);
  cddp__append(out->text, sizeof out->text, ")");
}

/* Compares own parameters with rank 0's; the first difference is the failure. */
static cddp_result cddp__compare_params(const cddp_ddp *d, const cddp__param_info *theirs,
                                        uint64_t count) {
  int i, rank = d->group->rank;
  cddp__param_info mine;
  for (i = 0; (uint64_t)i < count && i < d->count; i++) {
    cddp__describe_param(d, i, &mine);
    if (mine.hash != theirs[i].hash)
      return cddp__fail(CDDP_MISMATCH, "parameter %d is %s on rank %d, %s on rank 0", i, mine.text,
                        rank, theirs[i].text);
  }
  if (count == (uint64_t)d->count) return CDDP_OK;
  return cddp__fail(CDDP_MISMATCH, "rank %d has %d parameters, rank 0 has %" PRIu64, rank, d->count,
                    count);
}

/* All ranks learn of the first rank whose shards or parameters differ from rank 0's. */
static cddp_result cddp__agree_on_params(cddp_ddp *d) {
  cddp_group *g = d->control;
  uint64_t model[4], count;
  double norm;
  cddp__param_info *theirs;
  cddp_result r;
  int i;
  model[0] = (uint64_t)d->count;
  model[1] = (uint64_t)d->desc.shards;
  memcpy(&model[2], &d->desc.max_grad_norm, sizeof norm);
  model[3] = d->desc.elastic;
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_DDP_CREATE, CDDP__PHASE_CALL, d->meets, model,
                  sizeof model); /* all ranks meet in each step, or none */
  if (r != CDDP_OK) return r;
  memcpy(model, cddp__op_header_of(g, 0, g->round)->u.bytes, sizeof model);
  if (model[1] != (uint64_t)d->desc.shards)
    r = cddp__fail(CDDP_MISMATCH, "shards in cddp_ddp_desc is %d on rank %d, %d on rank 0",
                   d->desc.shards, g->rank, (int)model[1]);
  if (model[3] != (uint64_t)d->desc.elastic)
    r = cddp__fail(CDDP_MISMATCH, "elastic in cddp_ddp_desc is %s on rank %d, not on rank 0",
                   d->desc.elastic ? "set" : "not set", g->rank);
  memcpy(&norm, &model[2], sizeof norm);
  if (norm != d->desc.max_grad_norm)
    r = cddp__fail(CDDP_MISMATCH, "max_grad_norm in cddp_ddp_desc is %g on rank %d, %g on rank 0",
                   d->desc.max_grad_norm, g->rank, norm);
  if ((r = cddp__consensus(g, r, NULL, 0, NULL)) != CDDP_OK) return r;
  count = model[0];
  theirs = (cddp__param_info *)cddp__calloc(&g->host->allocator, (size_t)count, sizeof *theirs);
  if (theirs == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  for (i = 0; g->rank == 0 && i < d->count; i++) cddp__describe_param(d, i, &theirs[i]);
  r = cddp__run_simple(g, CDDP__KIND_BROADCAST, theirs, theirs, (size_t)count * sizeof *theirs,
                       CDDP_U8, 0);
  if (r == CDDP_OK && (r = cddp__compare_params(d, theirs, count)) != CDDP_OK)
    cddp__fail_in(r, "the ranks' models differ: ");
  cddp__free(&g->host->allocator, theirs);
  return cddp__consensus(g, r, NULL, 0, NULL);
}

/* --- the arena --- */

/* Elements of parameter i's gradient that buckets reduce. */
static size_t cddp__dense_count(const cddp_ddp *d, int i) {
  return cddp__sparse_of(d, i) == NULL ? d->params[i].count : 0;
}

/* The arena is dealt out in equal parts to the ranks of the host; each rank steps its part. No
   piece (see cddp__pieces) is cut. */
static void cddp__part_of(const cddp_ddp *d, int rank, size_t *begin, size_t *end) {
  cddp__slice(d->bytes, CDDP__BLOCK_BYTES, d->group->local_size, rank, begin, end);
}

/* Into how many pieces a stretch of the arena is cut at multiples of CDDP__BLOCK_BYTES. Squares are
   added up piece by piece, so that a norm depends on the model alone, not on the ranks' parts. */
static size_t cddp__pieces(size_t begin, size_t end) {
  if (begin >= end) return 0;
  return (end - 1) / CDDP__BLOCK_BYTES - begin / CDDP__BLOCK_BYTES + 1;
}

/* Where parameter i's share of a rank's part begins and ends, in bytes of the arena, and where its
   states are in the rank's share; false if there is none. rank: its number among the group's ranks
   on this host, here and below. */
static bool cddp__tensor_slice(const cddp_ddp *d, int i, int rank, size_t *begin, size_t *end,
                               size_t *state) {
  const cddp__tensor *t = &d->tensors[i];
  size_t first;
  cddp__part_of(d, rank, &first, end);
  *begin = cddp__max(first, t->offset);
  *end = cddp__min(*end, t->offset + t->bytes);
  *state = *begin - first;
  return *begin < *end;
}

/* All gradients of a dtype take a multiple of so many bytes. Ranks with GPUs that add up shards do
   it in parts of one size. */
static size_t cddp__dtype_granule(const cddp_ddp *d) {
  bool parts = d->spread && d->group->backend != NULL;
  return CDDP__CACHE_LINE * (parts ? (size_t)d->group->size : 1);
}

/* Places every parameter in the arena: dtype by dtype, last parameters first. */
static void cddp__lay_out(cddp_ddp *d) {
  size_t pieces = 0;
  int dtype, i;
  d->bytes = 0;
  for (dtype = 0; dtype < CDDP__TRAINED; dtype++) {
    if (dtype == CDDP_F16) d->halves = d->bytes; /* these and bf16 are the last */
    for (i = d->count - 1; i >= 0; i--) {
      cddp__tensor *t = &d->tensors[i];
      if ((int)d->params[i].dtype != dtype) continue;
      t->offset = d->bytes;
      t->bytes = cddp__dense_count(d, i) * cddp__dtype_size(d->params[i].dtype);
      t->room = cddp__round_up(t->bytes, CDDP__CACHE_LINE);
      d->bytes += t->room;
    }
    d->bytes = cddp__round_up(d->bytes, cddp__dtype_granule(d));
  }
  d->slot_bytes = d->slot_room = 2 * d->bytes - d->halves;
  for (i = 0; i < d->count; i++) {
    cddp__tensor *t = &d->tensors[i];
    cddp__tensor_slice(d, i, d->group->local_rank, &t->begin, &t->end, &t->state);
    t->piece = pieces;
    pieces += cddp__pieces(t->offset, t->offset + t->bytes);
    t->placed = d->params[i].grad == NULL;
    t->used = true;
    d->used[i] = 1;
  }
  for (i = 0; i < d->count && d->group->backend != NULL; i++) { /* behind what is reduced */
    d->tensors[i].dense = d->bytes;
    if (cddp__sparse_of(d, i) != NULL)
      d->bytes += cddp__round_up(d->sparse[i]->rows * d->sparse[i]->bytes, CDDP__CACHE_LINE);
  }
  d->squares_at = d->bytes + (size_t)d->slots * d->slot_bytes;
  d->whole = d->squares_at + pieces * sizeof(double);
}

/* Every rank tells where its p lies; out[i] is the address here of the p of this host's i-th rank.
   *all: every rank has one. */
static cddp_result cddp__exchange_refs(cddp_group *g, const void *p, size_t bytes, char **out,
                                       bool *all) {
  void *at = NULL;
  cddp__ref ref;
  cddp_result r;
  int k;
  *all = true;
  memset(&ref, 0, sizeof ref);
  if (p != NULL) ref = cddp__ref_of(g->host, p, bytes);
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_DDP_CREATE, CDDP__PHASE_PLACES, bytes, &ref,
                  sizeof ref);
  if (r != CDDP_OK) return r;
  for (k = 0; k < g->size; k++)
    if (cddp__op_header_of(g, k, g->round)->u.ref.kind == CDDP__REF_NONE) *all = false;
  for (k = 0; *all && k < g->size; k++) {
    if (g->members[k] < 0) continue;
    if ((r = cddp__locate(g->host, &cddp__op_header_of(g, k, g->round)->u.ref, &at)) != CDDP_OK)
      return cddp__break(g, r);
    *out++ = (char *)at;
  }
  return CDDP_OK;
}

/* Finds the mirrors of the host's ranks and, for step() there, their weights. */
static cddp_result cddp__map_peers(cddp_ddp *d) {
  cddp_group *g = d->control;
  bool all = true;
  cddp_result r;
  int i;
  if (d->group->backend != NULL) return CDDP_OK;
  if ((r = cddp__exchange_refs(g, d->mirror, d->whole, d->mirrors, &all)) != CDDP_OK) return r;
  if (!all)
    return cddp__fail(CDDP_OUT_OF_MEMORY,
                      "no shared memory for %zu bytes of gradients on every rank", d->whole);
  for (i = 0; i < g->local_size; i++) d->slot_areas[i] = d->mirrors[i] + d->bytes;
  for (i = 0; i < d->count; i++) {
    char **places = d->addresses + (size_t)g->local_size * (size_t)i;
    size_t bytes = d->params[i].count * cddp__dtype_size(d->params[i].dtype);
    r = cddp__exchange_refs(g, d->params[i].data, bytes, places, &all);
    if (r != CDDP_OK) return r;
    d->tensors[i].data = all ? places : NULL;
  }
  return CDDP_OK;
}

/* A stretch of the arena. */
typedef struct cddp__range {
  size_t begin, end; /* bytes */
} cddp__range;

/* --- more shards than ranks: sums of several shards in slots --- */

/* All gradients of a dtype; false if there are none. */
static bool cddp__range_of(const cddp_ddp *d, int dtype, cddp__range *range) {
  int i;
  range->begin = d->bytes;
  range->end = 0;
  for (i = 0; i < d->count; i++) {
    const cddp__tensor *t = &d->tensors[i];
    if ((int)d->params[i].dtype != dtype) continue;
    range->begin = cddp__min(range->begin, t->offset);
    range->end = cddp__max(range->end, t->offset + t->room);
  }
  range->end = cddp__round_up(range->end, cddp__dtype_granule(d));
  return range->begin < range->end;
}

/* Bytes of a stretch of the arena in memory that has f32 for f16 and bf16. */
static size_t cddp__wide_bytes(const cddp_ddp *d, size_t begin, size_t end) {
  size_t halves = cddp__max(begin, d->halves);
  return end - begin + (end > halves ? end - halves : 0);
}

/* Where a rank of this host has, in a slot (-1: in its arena), what belongs to offset `at` of the
   arena. */
static char *cddp__in_slot(const cddp_ddp *d, int rank, int slot, size_t at) {
  if (slot < 0) return d->mirrors[rank] + at;
  return d->slot_areas[rank] + (size_t)slot * d->slot_room + cddp__wide_bytes(d, 0, at);
}

/* The mean over all shards, of n elements from offset `at` of the arena on. sources: [shards]. */
static void cddp__reduce_shards(const cddp_ddp *d, void *out, const void **sources, size_t at,
                                size_t n, cddp_dtype dtype) {
  int i;
  for (i = 0; i < d->node_count; i++)
    sources[i] = cddp__in_slot(d, d->nodes[i].rank, d->nodes[i].slot, at);
  if (d->leaves) cddp__reduce(out, sources, d->shards, n, dtype, CDDP_AVG);
  else
    cddp__reduce_nodes(out, sources, d->widths, d->node_count, d->shards, n, dtype, CDDP_AVG);
}

/* Adds up, in the slot `out`, nodes of this rank (number `me` here) that together are one. widths:
   as cddp__reduce_nodes takes them. clear: the arena becomes zero. */
static cddp_result cddp__merge_nodes(cddp_ddp *d, int me, int out, const int *slots,
                                     const int *widths, int count, bool clear) {
  const void *sources[CDDP__FOLD_DEPTH + 1];
  cddp__range range;
  size_t at, n;
  int dtype, i;
  for (dtype = 0; dtype < CDDP__TRAINED; dtype++) {
    size_t esize = cddp__dtype_size((cddp_dtype)dtype);
    if (!cddp__range_of(d, dtype, &range)) continue;
    for (at = range.begin; at < range.end; at += n * esize) {
      char *to = cddp__in_slot(d, me, out, at);
      n = cddp__min(CDDP__BLOCK, (range.end - at) / esize);
      for (i = 0; i < count; i++) sources[i] = cddp__in_slot(d, me, slots[i], at);
      if (count > 1)
        cddp__reduce_subtree(to, sources, widths, count, n, (cddp_dtype)dtype);
      else
        cddp__convert(to, cddp__compute_type((cddp_dtype)dtype), sources[0], (cddp_dtype)dtype, n);
      if (clear) memset(d->mirror + at, 0, n * esize);
    }
  }
  return CDDP_OK;
}

/* Gradients that are the program's own become zero for the next shard. */
static cddp_result cddp__clear_own(cddp_ddp *d) {
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < d->count; i++)
    if (!d->tensors[i].placed)
      r = d->memory->zero(d->params[i].grad, d->tensors[i].bytes, d->group->stream);
  return r;
}

/* The shard that has ended goes into a slot, added to those nodes with which it makes a greater
   one, and gradients become zero for the next. A host rank's last one may stay in the arena. */
static cddp_result cddp__end_shard(cddp_ddp *d) {
  int slots[CDDP__FOLD_DEPTH + 1], widths[CDDP__FOLD_DEPTH + 1];
  int shard = d->first_shard + d->taken - 1, merged, slot, i;
  bool last = d->taken == d->shard_count;
  cddp_result r = d->memory->use != NULL ? d->memory->use(d) : CDDP_OK;
  for (i = 0; d->sparse != NULL && i < d->count; i++)
    if (d->sparse[i] != NULL) d->sparse[i]->ends[d->taken - 1] = d->sparse[i]->added.n;
  merged = cddp__merges(d->starts, d->depth, shard, d->shards);
  if (last && merged == 0 && d->group->backend == NULL) return CDDP_OK;
  slot = d->depth - merged;
  CDDP_ASSERT(slot < d->slots);
  d->starts[d->depth] = shard;
  for (i = 0; i < merged; i++) {
    slots[i] = slot + i;
    widths[i] = d->starts[slot + i + 1] - d->starts[slot + i];
    if (widths[i] == 1) widths[i] = -1; /* in the compute type, as all in slots */
  }
  slots[merged] = -1;
  widths[merged] = 1;
  if (r == CDDP_OK)
    r = d->memory->merge_nodes(d, d->group->local_rank, slot, slots, widths, merged + 1, !last);
  if (r == CDDP_OK && !last) r = cddp__clear_own(d);
  d->depth = slot + 1;
  return r;
}

/* Where ranks do not see all mirrors: every rank gets all nodes and takes the mean of them, which
   goes into its own arena. */
static cddp_result cddp__gather_shards(cddp_ddp *d) {
  const cddp_allocator *a = &d->group->host->allocator;
  size_t ranks = (size_t)d->group->size, most = (size_t)d->most_nodes, n, at, esize, csize;
  size_t block = cddp__max(CDDP__BLOCK, ((size_t)2 << 20) / (ranks * most));
  char *mine = (char *)cddp__malloc(a, (ranks + 1) * most * block * sizeof(double)), *all;
  cddp__range range;
  cddp_result r = CDDP_OK;
  int dtype, i, k, rank;
  if (mine == NULL) return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  for (dtype = 0; r == CDDP_OK && dtype < CDDP__TRAINED; dtype++) {
    if (!cddp__range_of(d, dtype, &range)) continue;
    esize = cddp__dtype_size((cddp_dtype)dtype);
    csize = cddp__max(esize, sizeof(float));
    for (at = range.begin; r == CDDP_OK && at < range.end; at += n * esize) {
      n = cddp__min(block, (range.end - at) / esize);
      all = mine + most * n * csize;
      for (i = k = 0, rank = -1; i < d->node_count; i++, k++) {
        const cddp__shard_node *node = &d->nodes[i];
        if (node->rank != rank) k = 0;
        rank = node->rank;
        d->sources[i] = all + ((size_t)rank * most + (size_t)k) * n * csize;
        if (rank == d->group->rank)
          memcpy(mine + (size_t)k * n * csize,
                 cddp__in_slot(d, d->group->local_rank, node->slot, at),
                 n * (node->slot < 0 ? esize : csize));
      }
      r = cddp__run_simple(d->control, CDDP__KIND_ALL_GATHER, mine, all, most * n * csize, CDDP_U8,
                           -1);
      if (r == CDDP_OK)
        cddp__reduce_nodes(d->arena + at, d->sources, d->widths, d->node_count, d->shards, n,
                           (cddp_dtype)dtype, CDDP_AVG);
    }
  }
  cddp__free(a, mine);
  return r;
}

/* --- reducing a bucket in memory that the ranks of a host share --- */

/* The next stretch of used parameters of the bucket from sorted[*i] on; false at the end. */
static bool cddp__next_range(const cddp_ddp *d, const cddp__bucket_state *b, int *i,
                             cddp__range *range) {
  const cddp__tensor *t;
  while (*i < b->count && !d->tensors[b->sorted[*i]].used) ++*i;
  if (*i >= b->count) return false;
  t = &d->tensors[b->sorted[(*i)++]];
  range->begin = t->offset;
  range->end = t->offset + t->room;
  while (*i < b->count) {
    t = &d->tensors[b->sorted[*i]];
    if (t->offset != range->end || !t->used) break;
    range->end += t->room;
    ++*i;
  }
  return true;
}

static size_t cddp__bucket_bytes(const cddp_ddp *d, const cddp__bucket_state *b) {
  cddp__range range;
  size_t bytes = 0;
  int i = 0;
  while (cddp__next_range(d, b, &i, &range)) bytes += range.end - range.begin;
  return bytes;
}

/* This rank's slice of the bucket: the mean of the mirrors of all ranks that have data goes into
   all mirrors. The bucket's first round tells who has joined. */
static void cddp__reduce_slice(cddp_ddp *d, const cddp__bucket_state *b) {
  cddp_dtype dtype = d->params[b->sorted[0]].dtype;
  const cddp_group *g = d->comm;
  size_t begin, end, at = 0;
  cddp__range range;
  int i = 0, k;
  cddp__slice(cddp__bucket_bytes(d, b), CDDP__CACHE_LINE, g->size, g->rank, &begin, &end);
  for (; cddp__next_range(d, b, &i, &range); at += range.end - range.begin) {
    size_t low = cddp__max(begin, at), high = cddp__min(end, at + range.end - range.begin);
    size_t from = range.begin + (low - at), n;
    int active = 0;
    if (low >= high) continue;
    n = (high - low) / cddp__dtype_size(dtype);
    if (d->spread)
      cddp__reduce_shards(d, d->mirror + from, (const void **)(void *)d->buffers, from, n, dtype);
    for (k = 0; !d->spread && k < g->size; k++)
      if (cddp__op_header_of(g, k, g->round)->u.bytes[0] == 0)
        d->buffers[active++] = d->mirrors[k] + from;
    if (active == g->size) {
      cddp__reduce_all(d->buffers, active, n, dtype, CDDP_AVG);
      continue;
    }
    if (!d->spread)
      cddp__reduce(d->mirror + from, (const void *const *)d->buffers, active, n, dtype, CDDP_AVG);
    for (k = 0; k < g->size; k++)
      if (k != g->rank) memcpy(d->mirrors[k] + from, d->mirror + from, high - low);
  }
}

/* The mean of the bucket into all mirrors; where ranks do not see all of them, by the carrier. */
static cddp_result cddp__reduce_bucket(cddp_ddp *d, cddp__bucket_state *b) {
  cddp_group *g = d->comm;
  cddp__call c = cddp__make_call(CDDP__KIND_ALL_REDUCE, NULL, NULL, 0,
                                 d->params[b->sorted[0]].dtype, CDDP_AVG, -1);
  cddp__range range;
  int i = 0;
  uint64_t index = (uint64_t)(b - d->buckets);
  unsigned char joined = (unsigned char)d->joined;
  uint64_t record;
  cddp_result r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  g->calls++;
  record = cddp__record_begin(g, CDDP__KIND_DDP_BUCKET, g->calls, index);
  if (cddp__record_at(g, record) != NULL) cddp__record_at(g, record)->engine = 1;
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_DDP_BUCKET, CDDP__PHASE_CALL, index, &joined, 1);
  if (r == CDDP_OK && (r = cddp__enter(g)) == CDDP_OK) {
    if (g->carrier->average == NULL) cddp__reduce_slice(d, b);
    while (r == CDDP_OK && g->carrier->average != NULL && cddp__next_range(d, b, &i, &range)) {
      c.send = c.recv = d->mirror + range.begin;
      c.count = (range.end - range.begin) / c.esize;
      r = g->carrier->average(g, &c, d->mirrors, range.begin);
    }
    if (r == CDDP_OK) /* all ranks of this host have done their part of it */
      r = cddp__round(g, CDDP__SCOPE_HOST, CDDP__KIND_DDP_BUCKET, CDDP__PHASE_DONE, index, NULL, 0);
  }
  r = cddp__exit(g, r);
  cddp__record_finish(g, record, r);
  return r;
}

/* Copies between the bucket's places in the arena and a contiguous buffer. */
static cddp_result cddp__pack(const cddp_ddp *d, const cddp__bucket_state *b, void *buffer,
                              bool back) {
  cddp__range range;
  char *flat = (char *)buffer;
  cddp_result r = CDDP_OK;
  int i = 0;
  while (r == CDDP_OK && cddp__next_range(d, b, &i, &range)) {
    size_t n = range.end - range.begin;
    char *place = d->arena + range.begin;
    r = d->memory->copy(back ? place : flat, back ? flat : place, n, d->side);
    flat += n;
  }
  return r;
}

/* Hands the bucket to the hook: in place when its parameters lie side by side, else in scratch. */
static cddp_result cddp__hook_bucket(cddp_ddp *d, cddp__bucket_state *b) {
  size_t bytes = cddp__bucket_bytes(d, b);
  cddp_bucket bucket;
  cddp__range range;
  bool packed;
  cddp_result r = CDDP_OK;
  int i = 0;
  if (!cddp__next_range(d, b, &i, &range)) return CDDP_OK; /* no rank used any of it */
  memset(&bucket, 0, sizeof bucket);
  bucket.index = (int)(b - d->buckets);
  bucket.bucket_count = d->plan.bucket_count;
  bucket.dtype = d->params[b->sorted[0]].dtype;
  bucket.count = bytes / cddp__dtype_size(bucket.dtype);
  bucket.group = d->hooks;
  bucket.params = b->sorted;
  bucket.param_count = b->count;
  bucket.data = d->arena + range.begin;
  packed = range.end - range.begin != bytes;
  if (bytes == 0) return CDDP_OK;
  if (packed) r = d->memory->scratch(d, bytes, &bucket.data);
  if (r == CDDP_OK && packed) r = cddp__pack(d, b, bucket.data, false);
  if (r == CDDP_OK) r = d->desc.comm_hook(&bucket, d->desc.comm_hook_data);
  if (r == CDDP_OK && packed) r = cddp__pack(d, b, bucket.data, true);
  return r == CDDP_OK ? r
                      : cddp__fail_in(r, "communication hook on bucket %d of rank %d: ",
                                      bucket.index, d->group->rank);
}

static cddp_result cddp__run_bucket(cddp_work *w) { /* on the engine's thread */
  cddp__bucket_state *b = (cddp__bucket_state *)w->context;
  cddp_ddp *d = b->ddp;
  bool hooked = d->desc.comm_hook != NULL;
  cddp_group *g = hooked ? d->hooks : d->comm;
  int first = b->sorted[0];
  cddp_result r;
  char space[24];
  if ((r = cddp__check_group(g)) == CDDP_OK && d->memory->use != NULL) r = d->memory->use(d);
  if (r == CDDP_OK) r = hooked ? cddp__hook_bucket(d, b) : d->memory->reduce_bucket(d, b);
  if (r == CDDP_OK) return r;
  if (hooked) return cddp__break(g, r); /* or later buckets' calls would meet this one's there */
  return cddp__fail_in(r, "bucket %d (parameter \"%.60s\"%s): ", (int)(b - d->buckets),
                       cddp__param_name(&d->params[first], first, space, sizeof space),
                       b->count > 1 ? " and others" : "");
}

/* Leaves the bucket to the engine. */
static cddp_result cddp__push_bucket(cddp_ddp *d, cddp__bucket_state *b) {
  memset(&b->work, 0, sizeof b->work);
  b->work.group = d->comm;
  b->work.run = cddp__run_bucket;
  b->work.context = b;
  return cddp__engine_push(&b->work);
}

/* Waits for the engine; the first failure is the result. */
static cddp_result cddp__await_buckets(cddp_ddp *d) {
  int b;
  cddp__engine_drain(d->comm);
  for (b = 0; b < d->plan.bucket_count; b++) {
    cddp_work *w = &d->buckets[b].work;
    if (d->buckets[b].launched && w->result != CDDP_OK) return cddp__fail(w->result, "%s", w->text);
  }
  return CDDP_OK;
}

/* --- gradients in host memory --- */

static cddp_result cddp__host_copy(void *to, const void *from, size_t bytes, void *stream) {
  (void)stream;
  cddp__copy(to, from, bytes);
  return CDDP_OK;
}

static cddp_result cddp__host_zero(void *p, size_t bytes, void *stream) {
  (void)stream;
  if (bytes > 0) memset(p, 0, bytes);
  return CDDP_OK;
}

/* Without memory d->mirror stays NULL, which cddp__map_peers tells all ranks. */
static cddp_result cddp__host_alloc(cddp_ddp *d) {
  d->arena = d->mirror = (char *)cddp__arena_alloc(d->group->host, d->whole, CDDP__FOR_USER);
  return CDDP_OK;
}

static cddp_result cddp__host_scratch(cddp_ddp *d, size_t bytes, void **out) {
  if (d->scratch_bytes < bytes) {
    cddp__arena_free(d->group->host, d->scratch);
    d->scratch = (char *)cddp__arena_alloc(d->group->host, bytes, CDDP__FOR_USER);
    d->scratch_bytes = d->scratch != NULL ? bytes : 0;
  }
  *out = d->scratch;
  return d->scratch != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
}

static cddp_result cddp__host_broadcast(cddp_ddp *d, cddp_param *params, int count, int root) {
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; r == CDDP_OK && i < count; i++)
    r = cddp__run_simple(d->control, CDDP__KIND_BROADCAST, params[i].data, params[i].data,
                         params[i].count, params[i].dtype, root);
  return r;
}

static cddp_result cddp__host_scale(cddp_ddp *d) {
  double factor = cddp__mean_factor(d, CDDP_F32);
  int i;
  for (i = 0; factor != 1 && i < d->count; i++)
    if (d->tensors[i].used)
      cddp__scale(d->arena + d->tensors[i].offset, cddp__dense_count(d, i), d->params[i].dtype,
                  factor);
  return CDDP_OK;
}

/* The squares of bytes [begin, end) of the arena, which are parameter i's and, if it is not there,
   lie at `grad`; of each piece to where this rank has its sums. */
static void cddp__add_squares(cddp_ddp *d, int i, const char *grad, size_t begin, size_t end) {
  const cddp__tensor *t = &d->tensors[i];
  double *sums = (double *)(void *)(d->mirror + d->squares_at) + t->piece;
  size_t at, n;
  for (at = begin; at < end; at += n) {
    n = cddp__min(CDDP__BLOCK_BYTES - at % CDDP__BLOCK_BYTES, end - at);
    sums[at / CDDP__BLOCK_BYTES - t->offset / CDDP__BLOCK_BYTES] =
        cddp__sum_squares(grad + (at - begin), n / cddp__dtype_size(d->params[i].dtype),
                          d->params[i].dtype);
  }
}

/* By what a clip multiplies, having set d->norm: from the sums that the owner of each part has, or
   (alone) this rank has of all parts. */
static double cddp__clip_factor(cddp_ddp *d, double max_norm, bool alone) {
  size_t begin, end, at, k, n;
  double sum = 0;
  const double *sums;
  int i, p;
  for (i = d->count - 1; i >= 0; i--) {
    const cddp__tensor *t = &d->tensors[i];
    const cddp__sparse *s = cddp__sparse_of(d, i);
    if (!d->used[i]) continue;
    if (s != NULL)
      sum += cddp__sum_squares(s->mean.values, s->mean.n * s->width, d->params[i].dtype);
    for (p = 0; p < d->group->local_size; p++) {
      if (!cddp__tensor_slice(d, i, p, &begin, &end, &at)) continue;
      sums = (const double *)(void *)((alone ? d->mirror : d->mirrors[p]) + d->squares_at);
      k = t->piece + begin / CDDP__BLOCK_BYTES - t->offset / CDDP__BLOCK_BYTES;
      for (n = cddp__pieces(begin, end); n > 0; n--) sum += sums[k++];
    }
  }
  d->norm = sqrt(sum);
  d->has_norm = true;
  return max_norm / (d->norm + 1e-6);
}

static void cddp__clip_rows(cddp_ddp *d, double factor) {
  int i;
  for (i = 0; i < d->count; i++) {
    cddp__sparse *s = cddp__sparse_of(d, i);
    if (s != NULL && d->used[i])
      cddp__scale(s->mean.values, s->mean.n * s->width, d->params[i].dtype, factor);
  }
}

static cddp_result cddp__host_norm(cddp_ddp *d, double *norm) {
  *norm = d->norm;
  return CDDP_OK;
}

static cddp_result cddp__host_clip(cddp_ddp *d, double max_norm, double *norm) {
  double factor;
  int i;
  for (i = 0; i < d->count; i++) {
    const cddp__tensor *t = &d->tensors[i];
    if (d->used[i])
      cddp__add_squares(d, i, (char *)d->params[i].grad, t->offset, t->offset + t->bytes);
  }
  factor = cddp__clip_factor(d, max_norm, true);
  for (i = 0; factor < 1 && i < d->count; i++)
    if (d->used[i])
      cddp__scale(d->params[i].grad, cddp__dense_count(d, i), d->params[i].dtype, factor);
  if (factor < 1) cddp__clip_rows(d, factor);
  return norm != NULL ? cddp__host_norm(d, norm) : CDDP_OK;
}

/* --- one pass: a step on gradients in host memory --- */

/* The ranks that see each other's memory meet. */
static cddp_result cddp__control_barrier(cddp_ddp *d, int kind, enum cddp__phase phase) {
  return cddp__round(d->control, CDDP__SCOPE_HOST, kind, phase, 0, NULL, 0);
}

static void cddp__share_free(cddp_optim *s) {
  cddp__share *h = (cddp__share *)s->share, **link = &h->ddp->shares;
  while (*link != h) link = &(*link)->next;
  *link = h->next;
  s->share = NULL;
  s->drop = NULL;
  cddp__arena_free(h->ddp->group->host, h->mine);
  cddp__free(&h->ddp->group->host->allocator, h);
}

/* Bytes that a state has of a stretch of the arena. */
static size_t cddp__share_bytes(const cddp_ddp *d, const cddp_optim *o, size_t begin, size_t end) {
  return o->desc.master_weights ? cddp__wide_bytes(d, begin, end) : end - begin;
}

/* Where state k of what lies `at` bytes behind the beginning of a rank's slice is. */
static char *cddp__share_at(const cddp__share *h, int rank, int k, size_t at) {
  size_t begin, end;
  cddp__part_of(h->ddp, rank, &begin, &end);
  return h->all[rank] + (size_t)k * cddp__share_bytes(h->ddp, h->optim, begin, end) +
         cddp__share_bytes(h->ddp, h->optim, begin, begin + at);
}

/* Copies between a rank's share and the whole states of every parameter that has them. */
static void cddp__share_copy(cddp__share *h, int rank, bool gather) {
  cddp_optim *o = h->optim;
  size_t begin, end, at;
  int i, k;
  for (k = 0; k < o->count * o->states; k++) {
    char *whole = (char *)o->state[k], *part;
    i = k % o->count;
    if (whole == NULL || !cddp__tensor_slice(h->ddp, i, rank, &begin, &end, &at)) continue;
    whole += cddp__share_bytes(h->ddp, o, h->ddp->tensors[i].offset, begin);
    part = cddp__share_at(h, rank, k / o->count, at);
    memcpy(gather ? whole : part, gather ? part : whole, cddp__share_bytes(h->ddp, o, begin, end));
  }
}

/* Collective: makes the share of an optimizer that takes its first fused step, from its states. */
static cddp_result cddp__share_create(cddp_ddp *d, cddp_optim *s) {
  const cddp_allocator *a = &d->group->host->allocator;
  size_t n = (size_t)d->group->local_size, begin, end, bytes;
  cddp__share *h = (cddp__share *)cddp__calloc(a, 1, sizeof *h + n * sizeof *h->all);
  bool all = false;
  cddp_result r;
  int k;
  if (h == NULL) return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  cddp__part_of(d, d->group->local_rank, &begin, &end);
  h->all = (char **)(void *)(h + 1);
  bytes = cddp__share_bytes(d, s, begin, end) * (size_t)s->states;
  h->mine = (char *)cddp__arena_alloc(d->group->host, bytes, CDDP__FOR_USER);
  h->ddp = d;
  h->optim = s;
  /* the parts differ in size, the exchange compares its count: 0 */
  r = cddp__exchange_refs(d->control, h->mine, 0, h->all, &all);
  if (r == CDDP_OK && !all) {
    cddp__fail(CDDP_OUT_OF_MEMORY, "no shared memory for the optimizer's states on every rank");
    r = cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  }
  if (r != CDDP_OK) {
    cddp__arena_free(d->group->host, h->mine);
    cddp__free(a, h);
    return r;
  }
  h->next = d->shares;
  d->shares = h;
  s->share = h;
  s->drop = cddp__share_free;
  memset(h->mine, 0, bytes);
  cddp__share_copy(h, d->group->local_rank, false);
  for (k = 0; k < s->count * s->states; k++) {
    if (cddp__sparse_of(d, k % s->count) != NULL) continue;
    cddp__free(&s->allocator, s->state[k]);
    s->state[k] = NULL;
  }
  return CDDP_OK;
}

/* Collective: brings whole states back to every rank, for unfused steps. */
static cddp_result cddp__share_gather(cddp__share *h) {
  cddp_ddp *d = h->ddp;
  cddp_result r = cddp__enter(d->control);
  int i;
  for (i = 0; r == CDDP_OK && i < d->count; i++)
    if (h->optim->steps[i] > 0 && cddp__need_states(h->optim, i) != CDDP_OK)
      r = cddp__break(d->control, CDDP_OUT_OF_MEMORY);
  for (i = 0; r == CDDP_OK && i < d->group->local_size; i++) cddp__share_copy(h, i, true);
  if (r == CDDP_OK) r = cddp__control_barrier(d, CDDP__KIND_DDP_WAIT, CDDP__PHASE_DONE);
  r = cddp__exit(d->control, r);
  if (r == CDDP_OK) cddp__share_free(h->optim);
  return r;
}

/* What one fused step works with. */
typedef struct cddp__fused {
  cddp_ddp *d;
  cddp_optim *s;
  bool averaged; /* this rank's part of the arena holds the mean already */
  double clip;   /* below 1: the mean is multiplied by it first */
  bool one_loop; /* all ranks have gradients, and are as many as cddp__update.loop takes */
} cddp__fused;

/* This rank's part of parameter i in one loop, block by block for the sake of its copy. */
static void cddp__fuse_loop(const cddp__fused *f, int i, const cddp__update *u) {
  const cddp_ddp *d = f->d;
  const cddp__tensor *t = &d->tensors[i];
  size_t at = (t->begin - t->offset) / sizeof(float), n;
  size_t end = (t->end - t->offset) / sizeof(float);
  int k, others = 0, size = d->group->local_size;
  cddp__fused_args args;
  args.scalars = &u->scalars;
  args.mean = (float)u->scalars.sign / (float)size;
  for (k = 0; k < CDDP__STATES; k++) args.states[k] = (cddp__f32 *)(void *)u->states[k];
  args.weights[0] = (cddp__f32 *)d->params[i].data + at;
  for (k = 0; k < size; k++) {
    args.gradients[k] = (cddp__f32 *)(void *)(d->mirrors[k] + t->begin);
    if (k != d->group->local_rank) args.weights[++others] = (cddp__f32 *)(void *)t->data[k] + at;
  }
  for (; at < end; at += n) {
    n = cddp__min(CDDP__BLOCK, end - at);
    u->loop(&args, size, n);
    cddp__optim_copy(f->s, i, at, n);
    for (k = 0; k < CDDP__STATES; k++)
      if (args.states[k] != NULL) args.states[k] += n;
    for (k = 0; k < size; k++) args.gradients[k] += n;
    for (k = 0; k < size; k++) args.weights[k] += n;
  }
}

/* The mean of n elements of parameter i from arena offset `at` on, to out. False: the parameter is
   not used. */
static bool cddp__mean_block(cddp_ddp *d, int i, void *out, size_t at, size_t n) {
  cddp_dtype dtype = d->params[i].dtype;
  int k;
  if (d->spread) {
    cddp__reduce_shards(d, out, d->sources, at, n, dtype);
    return true;
  }
  if (!d->tensors[i].used) return false;
  for (k = 0; k < d->active_count; k++) d->sources[k] = d->mirrors[d->active[k]] + at;
  cddp__reduce(out, d->sources, d->active_count, n, dtype, CDDP_AVG);
  return true;
}

/* New weights of parameter i, `bytes` from arena offset `at` on, to all ranks of the host; its
   gradients there become zero. */
static void cddp__publish_block(cddp_ddp *d, int i, size_t at, size_t bytes) {
  const cddp__tensor *t = &d->tensors[i];
  size_t inside = at - t->offset;
  const char *weights = (const char *)d->params[i].data + inside;
  int k, me = d->group->local_rank;
  for (k = 0; k < d->group->local_size; k++) {
    if (t->data != NULL && k != me) memcpy(t->data[k] + inside, weights, bytes);
    if (t->data != NULL || k != me) memset(d->mirrors[k] + at, 0, bytes);
  }
  if (t->data == NULL) memcpy(d->arena + at, weights, bytes); /* the others fetch it from here */
}

/* The mean of this rank's part to its arena, unless it is there (averaged), and what all parts'
   squares say that it is to be multiplied by (1 without max_grad_norm). */
static cddp_result cddp__mean_part(cddp_ddp *d, int kind, bool averaged, double *factor) {
  bool clips = d->desc.max_grad_norm > 0;
  size_t at, n;
  cddp_result r;
  int i;
  *factor = 1;
  for (i = d->count - 1; i >= 0; i--) { /* ascending in the arena */
    const cddp__tensor *t = &d->tensors[i];
    size_t esize = cddp__dtype_size(d->params[i].dtype);
    for (at = t->begin; at < t->end; at += n) { /* in pieces, which stay in the cache */
      n = cddp__min(CDDP__BLOCK_BYTES - at % CDDP__BLOCK_BYTES, t->end - at);
      if (!averaged) (void)cddp__mean_block(d, i, d->arena + at, at, n / esize);
      if (clips && d->used[i]) cddp__add_squares(d, i, d->arena + at, at, at + n);
    }
  }
  if (!clips) return CDDP_OK;
  r = cddp__control_barrier(d, kind, CDDP__PHASE_NORM);
  if (r == CDDP_OK) *factor = cddp__clip_factor(d, d->desc.max_grad_norm, false);
  return r;
}

/* Reduces, updates and publishes n elements of parameter i from arena offset `at` on. */
static void cddp__fuse_block(const cddp__fused *f, int i, const cddp__update *u, size_t at,
                             size_t n) {
  double sum[CDDP__BLOCK];
  cddp_ddp *d = f->d;
  const cddp_param *p = &d->params[i];
  const cddp__tensor *t = &d->tensors[i];
  const void *gradient = d->arena + at;
  if (!f->averaged && cddp__mean_block(d, i, sum, at, n)) gradient = sum;
  if (f->clip < 1 && d->used[i]) cddp__scale(d->arena + at, n, p->dtype, f->clip);
  cddp__update_run(u, (at - t->begin) / cddp__dtype_size(p->dtype),
                   (char *)p->data + (at - t->offset), gradient, n);
  cddp__publish_block(d, i, at, n * cddp__dtype_size(p->dtype));
}

/* This rank's part of all parameters. */
static void cddp__fuse_parts(const cddp__fused *f) {
  cddp_ddp *d = f->d;
  void *states[CDDP__STATES + 1];
  cddp__update u;
  size_t at, n;
  int i, k;
  for (i = d->count - 1; i >= 0; i--) { /* ascending in the arena */
    const cddp__tensor *t = &d->tensors[i];
    size_t esize = cddp__dtype_size(d->params[i].dtype);
    if (t->begin >= t->end || cddp__optim_skips(f->s, i)) continue;
    for (k = 0; k < f->s->states; k++)
      states[k] = cddp__share_at((cddp__share *)f->s->share, d->group->local_rank, k, t->state);
    u = cddp__update_of(f->s, i, states, 1);
    if (f->one_loop && u.loop != NULL && d->params[i].dtype == CDDP_F32 && t->used &&
        (t->data != NULL || d->group->local_size == 1)) {
      cddp__fuse_loop(f, i, &u);
      continue;
    }
    for (at = t->begin; at < t->end; at += n * esize) {
      n = cddp__min(CDDP__BLOCK, (t->end - at) / esize);
      cddp__fuse_block(f, i, &u, at, n);
      cddp__optim_copy(f->s, i, (at - t->offset) / esize, n);
    }
  }
}

/* What other ranks of this host have stepped: weights that are not shared come from their arenas,
   where the places are cleared then; copies follow. s NULL: an optimizer of the caller's own. */
static cddp_result cddp__fetch_weights(cddp_ddp *d, const cddp_optim *s) {
  int i, p, me = d->group->local_rank, kind = s ? CDDP__KIND_DDP_STEP : CDDP__KIND_DDP_GATHER;
  size_t begin, end, at;
  cddp_result r;
  bool any = false;
  for (i = 0; i < d->count; i++) {
    cddp__tensor *t = &d->tensors[i];
    bool fetched = t->data == NULL;
    if ((s != NULL && cddp__optim_skips(s, i)) || (!fetched && (s == NULL || s->copies == NULL)))
      continue;
    any = any || fetched;
    for (p = 0; p < d->group->local_size; p++) {
      size_t esize = cddp__dtype_size(d->params[i].dtype);
      if (p == me || !cddp__tensor_slice(d, i, p, &begin, &end, &at)) continue;
      at = begin - t->offset;
      if (fetched) memcpy((char *)d->params[i].data + at, d->mirrors[p] + begin, end - begin);
      if (s != NULL) cddp__optim_copy(s, i, at / esize, (end - begin) / esize);
    }
  }
  if (!any) return CDDP_OK;
  if ((r = cddp__control_barrier(d, kind, CDDP__PHASE_WEIGHTS)) != CDDP_OK) return r;
  for (i = 0; i < d->count; i++) {
    const cddp__tensor *t = &d->tensors[i];
    if (t->data == NULL && !(s != NULL && cddp__optim_skips(s, i)) && t->begin < t->end)
      memset(d->arena + t->begin, 0, t->end - t->begin);
  }
  return CDDP_OK;
}

/* Updates this rank's part of all weights, between two rounds of the control group, then fetches
   what the others have updated. averaged: the arena holds the means already. wrote: ranks have
   written to their arenas since the last round, so that nobody may read them before another. */
static cddp_result cddp__host_step(cddp_ddp *d, cddp_optim *s, bool averaged, bool wrote) {
  int i, size = d->group->local_size;
  cddp__fused f;
  cddp_result r = CDDP_OK;
  if (wrote) r = cddp__control_barrier(d, CDDP__KIND_DDP_STEP, CDDP__PHASE_GRADIENTS);
  if (r == CDDP_OK) r = cddp__enter(d->control);
  if (r == CDDP_OK && s->states > 0 && s->share == NULL) r = cddp__share_create(d, s);
  if (r != CDDP_OK) return r;
  f.d = d;
  f.s = s;
  f.clip = 1;
  f.averaged = averaged || d->desc.max_grad_norm > 0;
  f.one_loop = !f.averaged && !d->spread && d->active_count == size &&
               (size == 1 || size == 2 || size == 4);
  if (d->desc.max_grad_norm > 0)
    r = cddp__mean_part(d, CDDP__KIND_DDP_STEP, averaged, &f.clip);
  if (r != CDDP_OK) return r;
  if (f.clip < 1) cddp__clip_rows(d, f.clip);
  CDDP__POINT("fuse");
  cddp__fuse_parts(&f);
  for (i = 0; i < d->count; i++) { /* rows: every rank updates its own copy of the weights */
    if (cddp__sparse_of(d, i) == NULL || cddp__optim_skips(s, i)) continue;
    if (cddp__need_states(s, i) != CDDP_OK) return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
    cddp__optim_rows(s, i, d->sparse[i]);
  }
  r = cddp__control_barrier(d, CDDP__KIND_DDP_STEP, CDDP__PHASE_DONE);
  if (r == CDDP_OK) r = cddp__fetch_weights(d, s);
  return r == CDDP_OK ? cddp__exit(d->control, r) : r;
}

/* The mean of this rank's part for an optimizer of the caller's own; arguments as above. */
static cddp_result cddp__host_scatter(cddp_ddp *d, bool averaged, bool wrote) {
  const int kind = CDDP__KIND_DDP_SCATTER;
  double factor = 1;
  cddp_result r = wrote ? cddp__control_barrier(d, kind, CDDP__PHASE_GRADIENTS) : CDDP_OK;
  int i;
  if (r == CDDP_OK) r = cddp__enter(d->control);
  if (r == CDDP_OK) r = cddp__mean_part(d, kind, averaged, &factor);
  if (r != CDDP_OK) return r;
  for (i = 0; factor < 1 && i < d->partition_count; i++) {
    const cddp_partition *p = &d->partitions[i];
    if (d->used[p->param]) cddp__scale(p->grad, p->count, d->params[p->param].dtype, factor);
  }
  if (factor < 1) cddp__clip_rows(d, factor);
  return cddp__exit(d->control, r);
}

static const cddp__ddp_memory cddp__host_memory = {
    NULL, cddp__host_copy, cddp__host_zero, cddp__host_alloc, NULL, cddp__host_scratch, NULL,
    cddp__push_bucket, cddp__reduce_bucket, cddp__merge_nodes, cddp__gather_shards,
    cddp__await_buckets, cddp__host_broadcast, NULL,
    cddp__host_scale, cddp__host_clip, cddp__host_norm, cddp__host_step};

#ifdef CDDP_CUDA
/* --- gradients in device memory --- */

static cddp_result cddp__gpu_use(const cddp_ddp *d) {
  return cddp__device_enter(cddp__device_of(d->group));
}

static cddp_result cddp__gpu_scratch(cddp_ddp *d, size_t bytes, void **out) {
  return cddp__device_scratch(cddp__device_of(d->comm), bytes, out);
}

/* *met: the ranks need not meet on the host. With NCCL the watchers compare what each rank called;
   while a graph is captured ranks are not compared. */
static cddp_result cddp__gpu_meet(cddp_ddp *d, int kind, uint64_t check, bool *met) {
  bool capturing = cddp__capturing(cddp__main_stream(d->group));
  char space[24];
  cddp__call note;
  cddp_result r;
  int i;
  *met = capturing || (!d->meets && d->rebuilt);
  if (!*met) return CDDP_OK;
  if (capturing && cddp__device_of(d->group)->staged)
    return cddp__staged_no_graph(cddp__main_stream(d->group));
  if (capturing && (d->sparse != NULL || d->desc.uneven_inputs))
    return cddp__fail(CDDP_UNSUPPORTED,
                      "a step with sparse_rows or uneven_inputs waits for the other ranks and "
                      "cannot be captured in a CUDA graph");
  if (capturing && !d->rebuilt && !d->desc.find_unused_parameters)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "take two steps before you capture one in a CUDA graph: the first arranges "
                      "the buckets");
  if ((r = cddp__check_group(d->control)) != CDDP_OK) return r;
  for (i = 0; i < d->count; i++)
    if (!d->tensors[i].ready)
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "gradient \"%s\" was not marked ready on rank %d; call cddp_ddp_ready for "
                        "every parameter, or set find_unused_parameters",
                        cddp__param_name(&d->params[i], i, space, sizeof space), d->group->rank);
  if (capturing) return CDDP_OK;
  memset(&note, 0, sizeof note);
  note.kind = (uint8_t)kind;
  note.count = check;
  note.root = -1;
  cddp__log_call(cddp__device_of(d->comm), &note, true);
  d->control->calls++;
  return CDDP_OK;
}

/* The bucket's all-reduce, on the side stream. NCCL adds up, so that NVLink's switches may do it,
   and the kernel of cddp_ddp_step divides, or if none is to come one of the bucket's: to the same
   bits. f16, whose sums could overflow: as in cddp__nccl_op. */
static cddp_result cddp__gpu_reduce(cddp_ddp *d, cddp__bucket_state *b) {
  cddp__device *p = cddp__device_of(d->comm);
  cddp_dtype dtype = d->params[b->sorted[0]].dtype;
  bool adds = p->kernels != NULL && dtype != CDDP_F16 && !p->staged;
  cddp__range range;
  cddp__call c;
  cddp_result r;
  int i = 0, n = 0;
  memset(&c, 0, sizeof c);
  c.kind = CDDP__KIND_DDP_BUCKET;
  c.op = CDDP__KIND_ALL_REDUCE;
  c.count = (size_t)(b - d->buckets);
  c.root = -1;
  cddp__log_call(p, &c, true);
  while (cddp__next_range(d, b, &i, &range)) {
    if (range.begin == range.end) continue;
    memset(&d->segments[n], 0, sizeof d->segments[n]);
    d->segments[n].grad = d->arena + range.begin;
    d->segments[n].count = (range.end - range.begin) / cddp__dtype_size(dtype);
    d->calls[n] = cddp__average_call(d->segments[n].grad, d->segments[n].count, dtype);
    if (adds) d->calls[n].op = CDDP_SUM;
    n++;
  }
  r = cddp__issue(p, d->calls, n, p->side);
  if (r != CDDP_OK || n == 0 || !adds || d->sums) return r;
  return cddp__kernel_result(p->kernels->scale(d->segments, n, dtype, 1.0 / d->group->size, NULL,
                                               (void *)p->side),
                             "the kernel that scales");
}

static cddp_result cddp__gpu_merge_nodes(cddp_ddp *d, int me, int out, const int *slots,
                                         const int *widths, int count, bool clear) {
  const void *nodes[CDDP__FOLD_DEPTH + 1];
  cddp__range range;
  cddp_result r = CDDP_OK;
  int dtype, i;
  for (dtype = 0; r == CDDP_OK && dtype < CDDP__TRAINED; dtype++) {
    size_t esize = cddp__dtype_size((cddp_dtype)dtype);
    if (!cddp__range_of(d, dtype, &range)) continue;
    for (i = 0; i < count; i++) nodes[i] = cddp__in_slot(d, me, slots[i], range.begin);
    r = cddp__kernel_result(
        cddp__registered_kernels->sum(cddp__in_slot(d, me, out, range.begin), (cddp_dtype)dtype,
                                      nodes, widths, count, 0, (range.end - range.begin) / esize,
                                      d->group->stream),
        "the kernel that adds shards");
    if (r == CDDP_OK && clear)
      r = cddp__device_zero(d->arena + range.begin, range.end - range.begin, d->group->stream);
  }
  return r;
}

/* n elements for each rank from offset `at` of the arena on: ranks exchange their nodes, so that
   each has all nodes of its n elements, takes the mean over the shards, and all gather the means.
*/
static cddp_result cddp__gpu_gather_piece(cddp_ddp *d, cddp_dtype dtype, size_t at, size_t n) {
  cddp_dtype wide = dtype == CDDP_F64 ? CDDP_F64 : CDDP_F32;
  size_t ranks = (size_t)d->group->size, part = n * cddp__dtype_size(wide), k = 0;
  char *mine = d->arena + at + (size_t)d->group->rank * n * cddp__dtype_size(dtype);
  cddp__device *p = cddp__device_of(d->comm);
  cudaStream_t stream = cddp__main_stream(d->group);
  cddp__call calls[2 * CDDP__FOLD_DEPTH], means;
  void *scratch = NULL;
  cddp_result r = CDDP_OK;
  int i, me = d->group->local_rank;
  if (ranks > 1) r = cddp__device_scratch(p, (size_t)d->most_nodes * ranks * part, &scratch);
  if (r != CDDP_OK) return r;
  for (i = 0; i < d->most_nodes && ranks > 1; i++)
    calls[i] = cddp__make_call(CDDP__KIND_ALL_TO_ALL, cddp__in_slot(d, me, i, at),
                               (char *)scratch + (size_t)i * ranks * part, n, wide, CDDP_SUM, -1);
  if (ranks > 1) r = cddp__issue(p, calls, d->most_nodes, stream);
  for (i = 0; i < d->node_count; i++) {
    k = i > 0 && d->nodes[i].rank == d->nodes[i - 1].rank ? k + 1 : 0;
    d->sources[i] = ranks == 1 ? cddp__in_slot(d, me, (int)k, at)
                               : (char *)scratch + (k * ranks + (size_t)d->nodes[i].rank) * part;
  }
  if (r == CDDP_OK)
    r = cddp__kernel_result(cddp__registered_kernels->sum(mine, dtype, d->sources, d->widths,
                                                          d->node_count, d->shards, n,
                                                          d->group->stream),
                            "the kernel that adds shards");
  means = cddp__make_call(CDDP__KIND_ALL_GATHER, mine, d->arena + at, n, dtype, CDDP_SUM, -1);
  return r == CDDP_OK && ranks > 1 ? cddp__issue(p, &means, 1, stream) : r;
}

static cddp_result cddp__gpu_gather_shards(cddp_ddp *d) {
  size_t at, n, each, ranks = (size_t)d->group->size;
  cddp__range range;
  cddp_result r = CDDP_OK;
  int dtype;
  for (dtype = 0; r == CDDP_OK && dtype < CDDP__TRAINED; dtype++) {
    if (!cddp__range_of(d, dtype, &range)) continue;
    each = ranks * cddp__dtype_size((cddp_dtype)dtype);
    for (at = range.begin; r == CDDP_OK && at < range.end; at += n * each) {
      n = cddp__min((range.end - at) / each, cddp__round_up(CDDP__SHARD_PIECE / ranks, 64));
      r = cddp__gpu_gather_piece(d, (cddp_dtype)dtype, at, n);
    }
  }
  return r;
}

/* Behind what is on the caller's stream now. Through the host the engine does it, which waits. */
static cddp_result cddp__gpu_begin(cddp_ddp *d, cddp__bucket_state *b) {
  cddp__device *p = cddp__device_of(d->comm);
  cddp_result r = cddp__stream_after(p->side, cddp__main_stream(d->group), p->fork);
  if (r != CDDP_OK) return r;
  if (p->staged) return cddp__push_bucket(d, b);
  return d->desc.comm_hook != NULL ? cddp__hook_bucket(d, b) : cddp__gpu_reduce(d, b);
}

/* The caller's stream goes on when all buckets are reduced. */
static cddp_result cddp__gpu_fence(cddp_ddp *d) {
  cddp__device *p = cddp__device_of(d->comm);
  cddp_result r = cddp__await_buckets(d);
  if (r != CDDP_OK || (d->group->size == 1 && d->desc.comm_hook == NULL)) return r;
  if ((r = cddp__check_group(d->comm)) != CDDP_OK) return r;
  return cddp__stream_after(cddp__main_stream(d->group), p->side, p->join);
}

/* Those in device memory in one NCCL group. */
static cddp_result cddp__gpu_broadcast(cddp_ddp *d, cddp_param *params, int count, int root) {
  cddp__device *p = cddp__device_of(d->comm);
  cddp_result r = cddp__check_group(d->comm);
  bool device = false;
  int i, n = 0;
  for (i = 0; r == CDDP_OK && i < count; i++) {
    cddp__call c = cddp__make_call(CDDP__KIND_BROADCAST, params[i].data, params[i].data,
                                   params[i].count, params[i].dtype, CDDP_SUM, root);
    if (c.count == 0 || (r = cddp__memory_of_call(p, &c, &device)) != CDDP_OK) continue;
    if (device) {
      cddp__log_call(p, &c, true);
      d->calls[n++] = c;
    } else {
      r = cddp__start_call(d->comm, &c, NULL);
    }
  }
  return r == CDDP_OK ? cddp__issue(p, d->calls, n, cddp__main_stream(d->group)) : r;
}

/* Writes the mean rows into gradients that are zero elsewhere: SGD's kernel takes these. */
static cddp_result cddp__gpu_place_rows(cddp_ddp *d) {
  void *stream = d->group->stream;
  cddp_result r = CDDP_OK;
  size_t k, end;
  int i;
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    const cddp__sparse *s = cddp__sparse_of(d, i);
    char *at = d->arena + d->tensors[i].dense;
    if (s == NULL) continue;
    r = cddp__device_zero(at, s->rows * s->bytes, stream);
    for (k = 0; r == CDDP_OK && k < s->mean.n; k = end) {
      for (end = k + 1; end < s->mean.n && s->mean.number[end] == s->mean.number[end - 1] + 1;)
        end++;
      r = cddp__device_copy(at + (size_t)s->mean.number[k] * s->bytes,
                            s->mean.values + k * s->bytes, (end - k) * s->bytes, stream);
    }
  }
  return r;
}

/* Lists the gradients of a dtype: the dense ones in the arena, or with those that are rows, or the
   caller's as of the last step. Returns how many. */
enum { CDDP__LIST_DENSE, CDDP__LIST_ALL, CDDP__LIST_CALLERS };
static int cddp__gpu_list(cddp_ddp *d, int dtype, int which) {
  int i, n = 0;
  for (i = d->count - 1; i >= 0; i--) {
    const cddp_param *p = &d->params[i];
    if ((int)p->dtype != dtype || p->count == 0 || !d->used[i]) continue;
    if (which == CDDP__LIST_DENSE && cddp__sparse_of(d, i) != NULL) continue;
    memset(&d->segments[n], 0, sizeof d->segments[n]);
    d->segments[n].grad = which == CDDP__LIST_CALLERS && !d->tensors[i].placed
                              ? p->grad
                              : cddp__device_gradient(NULL, d, i);
    d->segments[n++].count = p->count;
  }
  return n;
}

/* Makes the arena's gradients means. */
static cddp_result cddp__gpu_scale(cddp_ddp *d) {
  const cddp_kernels *k;
  cddp_result r = CDDP_OK;
  int dtype, n;
  for (dtype = 0; r == CDDP_OK && dtype < CDDP__TRAINED; dtype++) {
    double factor = cddp__mean_factor(d, (cddp_dtype)dtype);
    if (factor == 1 || (n = cddp__gpu_list(d, dtype, CDDP__LIST_DENSE)) == 0) continue;
    r = cddp__need_kernels(&k, "a mean over fewer ranks, as some have joined,");
    if (r == CDDP_OK)
      r = cddp__kernel_result(
          k->scale(d->segments, n, (cddp_dtype)dtype, factor, NULL, d->group->stream),
          "the kernel that scales");
  }
  return r;
}

/* clip[0] = the sum of squares, clip[1] = what to multiply by. */
static cddp_result cddp__gpu_squares(cddp_ddp *d, const cddp_kernels *k, double max_norm,
                                     int which) {
  cddp_result r = cddp__use_device(cddp__device_of(d->group)->device);
  int dtype, n, e = 0;
  if (r == CDDP_OK) r = cddp__device_zero(d->clip, sizeof *d->clip, d->group->stream);
  if (r != CDDP_OK) return r;
  for (dtype = 0; e == 0 && dtype < CDDP__TRAINED; dtype++)
    if ((n = cddp__gpu_list(d, dtype, which)) > 0)
      e = k->squares(d->segments, n, (cddp_dtype)dtype, d->clip, true, d->group->stream);
  if (e == 0) e = k->factor(d->clip, max_norm, d->group->stream);
  d->has_norm = e == 0;
  return cddp__kernel_result(e, "the kernels of the norm");
}

static cddp_result cddp__gpu_norm(cddp_ddp *d, double *norm) {
  cudaStream_t stream = cddp__main_stream(d->group);
  cddp__device *p = cddp__device_of(d->group);
  double sum = 0;
  cddp_result r;
  if (cddp__capturing(stream))
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "the norm is waited for, which cannot be captured in a CUDA graph; clip with "
                      "norm NULL, and ask for it with cddp_ddp_grad_norm later");
  if ((r = cddp__use_device(p->device)) != CDDP_OK) return r;
  if ((r = cddp__await_stream(p, stream, NULL)) != CDDP_OK) return r;
  r = cddp__device_copy(&sum, d->clip, sizeof sum, stream);
  if (r == CDDP_OK) r = cddp__await_stream(p, stream, NULL);
  *norm = sqrt(sum);
  return r;
}

static cddp_result cddp__gpu_clip(cddp_ddp *d, double max_norm, double *norm) {
  const cddp_kernels *k;
  int dtype, n, e = 0;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (norm != NULL && cddp__capturing(cddp__main_stream(d->group))) return cddp__gpu_norm(d, norm);
  if ((r = cddp__need_kernels(&k, "cddp_ddp_clip_grad_norm")) != CDDP_OK) return r;
  if ((r = cddp__gpu_squares(d, k, max_norm, CDDP__LIST_CALLERS)) != CDDP_OK) return r;
  for (dtype = 0; e == 0 && dtype < CDDP__TRAINED; dtype++)
    if ((n = cddp__gpu_list(d, dtype, CDDP__LIST_CALLERS)) > 0)
      e = k->scale(d->segments, n, (cddp_dtype)dtype, 1, d->clip, d->group->stream);
  if ((r = cddp__kernel_result(e, "the kernels that clip")) != CDDP_OK) return r;
  return norm != NULL ? cddp__gpu_norm(d, norm) : CDDP_OK;
}

static cddp_result cddp__gpu_step(cddp_ddp *d, cddp_optim *s, bool averaged, bool wrote) {
  cudaStream_t stream = cddp__main_stream(d->group);
  cddp_result r = CDDP_OK;
  (void)averaged, (void)wrote; /* here buckets are always reduced, and peers read no arena */
  if (d->desc.max_grad_norm > 0)
    r = cddp__gpu_squares(d, cddp__registered_kernels, d->desc.max_grad_norm, CDDP__LIST_ALL);
  if (r == CDDP_OK)
    r = cddp__device_update(s, d, (unsigned)CDDP_SGD_ZERO, d->segments, stream);
  return r == CDDP_OK ? cddp__device_copies(s, stream) : r;
}

/* The arena, and behind it what a clip needs. */
static cddp_result cddp__gpu_alloc(cddp_ddp *d) {
  const cddp_kernels *k = cddp__registered_kernels;
  void *p = NULL;
  cddp_result r = cddp__cuda_result(
      cudaMalloc(&p, d->whole + (k != NULL ? k->scratch_bytes : 1)), "cudaMalloc of gradients");
  if (r != CDDP_OK) return r;
  d->arena = d->mirrors[d->group->local_rank] = (char *)p;
  d->slot_areas[d->group->local_rank] = d->arena + d->bytes;
  d->clip = (double *)(void *)(d->arena + d->whole);
  d->side = (void *)cddp__device_of(d->comm)->side;
  if (d->hooks != NULL) d->hooks->stream = d->side;
  return cddp__device_zero(p, d->bytes, d->group->stream);
}

static void cddp__gpu_free(cddp_ddp *d) {
  cddp__device *p = d->comm != NULL ? cddp__device_of(d->comm) : NULL;
  if (p == NULL) return;
  (void)cddp__use_device(p->device);
  cddp__engine_drain(d->comm);
  (void)cddp__await_stream(cddp__device_of(d->group), cddp__main_stream(d->group), NULL);
  if (cddp__await_stream(p, p->side, NULL) != CDDP_OK) cddp__device_abort(p);
  cddp__await_abort(p);
  (void)cudaStreamSynchronize(p->side); /* what ran at the failure, too */
  (void)cudaStreamSynchronize(cddp__main_stream(d->group));
  cddp__device_free(d->arena);
}

static const cddp__ddp_memory cddp__gpu_memory = {
    cddp__gpu_use, cddp__device_copy, cddp__device_zero, cddp__gpu_alloc, cddp__gpu_free,
    cddp__gpu_scratch, cddp__gpu_meet, cddp__gpu_begin, cddp__gpu_reduce, cddp__gpu_merge_nodes,
    cddp__gpu_gather_shards, cddp__gpu_fence, cddp__gpu_broadcast, cddp__gpu_place_rows,
    cddp__gpu_scale, cddp__gpu_clip, cddp__gpu_norm, cddp__gpu_step};

/* Parameters lie on the group's device. */
static cddp_result cddp__check_on_device(const cddp_ddp *d) {
  int device = cddp__device_of(d->group)->device, i, k, memory;
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

#endif

/* --- assigning buckets --- */

/* By offset in the arena, where a bucket's parameters (of one dtype) lie last parameter first. */
static int cddp__by_offset(const void *a, const void *b) {
  int x = *(const int *)a, y = *(const int *)b;
  return x < y ? 1 : x > y ? -1 : 0;
}

/* Replaces the plan: order NULL = reverse order of declaration, else the given order of arrival. */
static void cddp__set_plan(cddp_ddp *d, const int *order) {
  cddp__bucket_plan *plan = &d->plan;
  int b, i;
  cddp__plan_buckets(plan, d->plan_memory, d->params, d->count, order, d->limits, 2);
  if (order == NULL) cddp__plan_reverse(plan);
  memcpy(d->plan_order, plan->params, (size_t)d->count * sizeof *plan->params);
  for (b = 0; b < plan->bucket_count; b++) {
    cddp__bucket_state *s = &d->buckets[b];
    s->ddp = d;
    s->sorted = d->plan_order + plan->offsets[b];
    s->count = plan->offsets[b + 1] - plan->offsets[b];
    qsort(s->sorted, (size_t)s->count, sizeof *s->sorted, cddp__by_offset);
    for (i = 0; i < s->count; i++) d->tensors[s->sorted[i]].bucket = b;
  }
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

/* --- taking shards --- */

/* The shard that this rank has taken, with which it should be done; -1: none. */
static int cddp__held_shard(const cddp_ddp *d) {
  if (d->elastic != NULL) return d->elastic->shard;
  return d->taken > 0 ? d->first_shard + d->taken - 1 : -1;
}

/* False: there are no more, or the model has failed. */
CDDPDEF bool cddp_ddp_next_shard(cddp_ddp *d, int *shard) {
  int held, i = 0;
  char space[24];
  if (d == NULL || shard == NULL || d->failed) return false;
  if (d->elastic == NULL && d->taken == d->shard_count && !d->no_sync) return false;
  held = cddp__held_shard(d);
  while (held >= 0 && i < d->count && d->tensors[i].ready) i++;
  if (d->no_sync || (held >= 0 && i < d->count)) {
    if (d->no_sync)
      cddp__fail(CDDP_INVALID_ARGUMENT,
                 "cddp_ddp_next_shard: no_sync is on on rank %d; turn it off before the last "
                 "cddp_ddp_ready of a shard",
                 d->group->rank);
    else
      cddp__fail(CDDP_INVALID_ARGUMENT,
                 "cddp_ddp_next_shard: gradient \"%s\" of shard %d was not marked ready on rank "
                 "%d; call cddp_ddp_ready for every parameter first",
                 cddp__param_name(&d->params[i], i, space, sizeof space), held, d->group->rank);
    (void)cddp__give_up(d, CDDP_INVALID_ARGUMENT);
    return false;
  }
  if (d->elastic != NULL) return cddp__elastic_next(d, shard);
  if (d->taken > 0) {
    cddp_result r = cddp__end_shard(d);
    if (r != CDDP_OK) (void)cddp__give_up(d, r);
    if (r != CDDP_OK) return false;
    cddp__arm(d);
  }
  *shard = d->first_shard + d->taken++;
  return true;
}

/* --- ready --- */

/* Starts every bucket that is full and whose predecessors have started. lock held. */
static cddp_result cddp__launch(cddp_ddp *d) {
  cddp_result r = CDDP_OK;
  if (d->group->size == 1 && d->desc.comm_hook == NULL && !d->spread) return CDDP_OK;
  while (r == CDDP_OK && d->next_bucket < d->plan.bucket_count) {
    cddp__bucket_state *b = &d->buckets[d->next_bucket];
    if (b->remaining > 0) break;
    b->launched = true;
    d->next_bucket++;
    r = d->memory->begin_bucket(d, b);
  }
  return r;
}

/* The caller's gradient of parameter i into the arena, if that is not where it is. */
static cddp_result cddp__fetch_gradient(cddp_ddp *d, int i) {
  const cddp__tensor *t = &d->tensors[i];
  if (t->placed) return CDDP_OK;
  return d->memory->copy(d->arena + t->offset, d->params[i].grad, t->bytes, d->group->stream);
}

/* Marked twice, it fails the model: a caller that ignores this would train on wrong sums. */
CDDPDEF cddp_result cddp_ddp_ready(cddp_ddp *d, int param) {
  cddp__tensor *t;
  cddp__host *h;
  bool noted, twice;
  char space[24];
  cddp_result r = CDDP_OK;
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  CDDP__CHECK(param >= 0 && param < d->count, "param is %d; there are %d", param, d->count);
  CDDP__CHECK(d->params[param].grad != NULL || cddp__dense_count(d, param) == 0,
              "the parameter's grad is NULL");
  t = &d->tensors[param];
  h = d->group->host;
  CDDP__POINT("ready");
  cddp__note_thread(h);
  pthread_mutex_lock(&d->lock);
  noted = d->no_sync; /* for a later step only */
  twice = !noted && t->ready;
  if (noted) t->noted = true;
  else if (!twice) {
    t->ready = true;
    d->arrival[d->arrived++] = param;
  }
  pthread_mutex_unlock(&d->lock);
  if (twice) {
    cddp__fail(CDDP_INVALID_ARGUMENT,
               "cddp_ddp_ready: parameter \"%s\" was marked ready twice in one step on rank %d; "
               "call it once, when its gradient is complete",
               cddp__param_name(&d->params[param], param, space, sizeof space), d->group->rank);
    return cddp__give_up(d, CDDP_INVALID_ARGUMENT);
  }
  cddp__record_finish(d->comm, cddp__record_new(d->comm, "ready", (uint64_t)param, -1, -1, -1),
                      CDDP_OK);
  if (noted) return CDDP_OK;
  if (d->memory->use != NULL && (r = d->memory->use(d)) != CDDP_OK) return r;
  if ((r = cddp__fetch_gradient(d, param)) != CDDP_OK) return r;
  pthread_mutex_lock(&d->lock);
  CDDP_ASSERT(d->buckets[t->bucket].remaining > 0);
  d->buckets[t->bucket].remaining--;
  if (d->early) r = cddp__launch(d);
  pthread_mutex_unlock(&d->lock);
  return r == CDDP_OK ? r : cddp__give_up(d, r); /* the bucket counts as started */
}

/* --- agreeing on what is ready --- */

/* What must agree between ranks, but for lr. States in shares are an agreement too. */
static uint64_t cddp__optim_settings(const cddp_optim *s) {
  return s->settings | (uint64_t)(s->share != NULL);
}

static cddp__step_header cddp__header_of(const cddp_ddp *d, int rank) { /* as of the last meeting */
  cddp__step_header m;
  memcpy(&m, cddp__op_header_of(d->control, rank, d->control->round)->u.bytes, sizeof m);
  return m;
}

/* All ranks meet, unless their memory has other means. *missing: parameters not ready anywhere,
   summed over ranks. The same call, the same settings (check) on all of them is part of the round,
   but for ranks that have joined. s: the cddp_optim of the call or NULL. */
static cddp_result cddp__ddp_meet(cddp_ddp *d, int kind, uint64_t check, const cddp_optim *s,
                              uint64_t *missing) {
  cddp_group *g = d->control;
  cddp__step_header m;
  bool met = false;
  cddp_result r = d->memory->use != NULL ? d->memory->use(d) : CDDP_OK;
  int p;
  *missing = 0;
  if (r == CDDP_OK && d->memory->meet != NULL) r = d->memory->meet(d, kind, check, &met);
  if (r != CDDP_OK || met) return r;
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  memset(&m, 0, sizeof m);
  pthread_mutex_lock(&d->lock);
  if (d->joined == 0) m.missing = (uint64_t)(d->count - d->arrived);
  pthread_mutex_unlock(&d->lock);
  m.settings = s != NULL ? cddp__optim_settings(s) : 0;
  m.lr = s != NULL ? s->desc.lr : 0;
  m.joined = d->joined;
  g->calls++;
  r = cddp__round(g, CDDP__SCOPE_ALL, kind, CDDP__PHASE_CALL, check, &m, sizeof m);
  if (r != CDDP_OK) return r;
  d->active_count = 0;
  for (p = 0; p < g->size; p++) {
    memcpy(&m, cddp__op_header_of(g, p, g->round)->u.bytes, sizeof m);
    *missing += m.missing;
    if (m.joined == 0) d->active[d->active_count++] = p;
  }
  if (d->active_count > 0 && d->active_count < g->size) d->had_joined = true;
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

#define CDDP__FLAG_JOINED 2 /* the rank has joined: neither used nor forgotten */

/* Some parameters are not ready: with find_unused_parameters decides which count as zero and which
   are left alone, without it fails on every rank. */
static cddp_result cddp__settle_unused(cddp_ddp *d) {
  size_t n = (size_t)d->count, i, p;
  unsigned char *mine = d->flags + n * (size_t)d->group->size;
  cddp_result r;
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
    if (mine[i] || !t->used) { /* accumulated under no_sync, or to be left as it is */
      r = cddp__fetch_gradient(d, (int)i);
    } else {
      r = d->memory->zero(d->arena + t->offset, t->room, d->group->stream);
      if (cddp__sparse_of(d, (int)i) != NULL) d->sparse[i]->added.n = 0;
    }
    t->ready = true;
    d->buckets[t->bucket].remaining--;
  }
  pthread_mutex_unlock(&d->lock);
  return r;
}

/* Starts the buckets that are left, and goes on behind them all. stepping: an optimizer's kernel
   follows, which makes their results means unless they are clipped first. */
static cddp_result cddp__finish_buckets(cddp_ddp *d, bool stepping) {
  cddp_result r;
  int i;
  pthread_mutex_lock(&d->lock);
  for (i = 0; i < d->count && d->joined != 0; i++) { /* this rank has no gradients to wait for */
    cddp__tensor *t = &d->tensors[i];
    if (!t->ready) d->buckets[t->bucket].remaining--;
    t->ready = true;
  }
  r = cddp__launch(d);
  pthread_mutex_unlock(&d->lock);
  if (r == CDDP_OK) r = d->memory->fence(d);
  if (r != CDDP_OK || (stepping && d->side != NULL && !(d->desc.max_grad_norm > 0))) return r;
  return d->memory->scale(d);
}

/* The step has been done. After the first one buckets follow the order in which rank 0's gradients
   arrived (or the first rank's that has data). */
static cddp_result cddp__complete(cddp_ddp *d, bool stepping) {
  cddp_result r = CDDP_OK;
  d->early = !d->spread && (d->eager || (d->group->size > 1 && !stepping));
#ifdef CDDP_CUDA
  d->sums = stepping && d->side != NULL && !cddp__device_of(d->comm)->staged &&
            cddp__device_of(d->comm)->kernels != NULL && d->desc.comm_hook == NULL &&
            d->group->size > 1 && !(d->desc.max_grad_norm > 0) && !d->spread;
#endif
  d->present = d->active_count;
  d->taken = d->depth = 0;
  d->steps++;
  if (!d->rebuilt && !d->desc.find_unused_parameters) {
    r = cddp__run_simple(d->control, CDDP__KIND_BROADCAST, d->arrival, d->arrival,
                         (size_t)d->count, CDDP_I32, d->active[0]);
    if (r == CDDP_OK) cddp__set_plan(d, d->arrival);
    d->rebuilt = r == CDDP_OK;
  }
  cddp__arm(d);
  return r;
}

/* --- gradients that are rows --- */

/* Merges the packets of the ranks that have data. all: memory in which every rank's lies, `each`
   bytes apart; NULL: they lie where the current round says. */
static cddp_result cddp__merge_rows(cddp_ddp *d, char *all, size_t each) {
  cddp_group *g = d->control;
  void *at = NULL;
  cddp_result r = CDDP_OK;
  int i, k, shard, first, count, lists = 0;
  for (k = 0; r == CDDP_OK && k < d->active_count; k++) {
    char *packet = all + (size_t)d->active[k] * each;
    if (all == NULL) {
      r = cddp__locate(g->host, &cddp__op_header_of(g, d->active[k], g->round)->u.ref, &at);
      packet = (char *)at;
    }
    cddp__deal_shards(d->shards, g->size, d->active[k], &first, &count);
    for (shard = 0; r == CDDP_OK && shard < count; shard++) {
      d->lists[lists++].packet = packet;
      for (i = 0; shard + 1 < count && i < d->count; i++)
        if (cddp__sparse_of(d, i) != NULL)
          packet += cddp__row_list_bytes(
              d->sparse[i], (size_t)((const cddp__row_head *)(const void *)packet)->bound);
    }
  }
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    if (cddp__sparse_of(d, i) == NULL) continue;
    r = cddp__rows_merge(&g->host->allocator, d->sparse[i], d->lists, lists, d->sources,
                         d->params[i].dtype);
    if (d->tensors[i].used) d->sparse[i]->added.n = 0;
  }
  return r;
}

/* This rank's rows, one packet for each of its shards, to `packet`; NULL: nothing is written.
   Returns how many bytes. */
static size_t cddp__pack_rows(cddp_ddp *d, char *packet) {
  size_t bytes = 0;
  int shard, i;
  for (shard = 0; shard < d->shard_count; shard++)
    for (i = 0; i < d->count; i++) {
      cddp__sparse *s = cddp__sparse_of(d, i);
      size_t first, end;
      if (s == NULL) continue;
      first = shard > 0 ? s->ends[shard - 1] : 0;
      end = shard + 1 < d->shard_count ? s->ends[shard] : s->added.n;
      if (!d->tensors[i].used) end = first;
      if (packet != NULL)
        cddp__rows_pack(s, first, end - first, d->params[i].dtype, packet + bytes);
      bytes += cddp__row_list_bytes(s, end - first);
    }
  return bytes;
}

/* Collective: all ranks get the mean of what each has added. Ranks read each other's packets; where
   they do not see each other's memory all packets go to all, as long as the longest. */
static cddp_result cddp__exchange_rows(cddp_ddp *d, int kind) {
  cddp_group *g = d->control;
  const cddp_allocator *a = &g->host->allocator;
  size_t bytes = cddp__pack_rows(d, NULL), each = 0;
  cddp__ref ref; /* or, over hosts, the size */
  void *packet = NULL;
  char *at, *all;
  cddp_result r;
  int i;
  if ((r = cddp__host_scratch(d, bytes, &packet)) != CDDP_OK) return cddp__break(g, r);
  (void)cddp__pack_rows(d, (char *)packet);
  memset(&ref, 0, sizeof ref);
  if (g->hosts != NULL)
    cddp__put64((unsigned char *)&ref, bytes);
  else
    ref = cddp__ref_of(g->host, packet, bytes);
  r = cddp__round(g, CDDP__SCOPE_ALL, kind, CDDP__PHASE_ROWS, 0, &ref, sizeof ref);
  if (r != CDDP_OK) return r;
  if (g->hosts != NULL) {
    for (i = 0; i < g->size; i++)
      each = cddp__max(each, (size_t)cddp__get64(cddp__op_header_of(g, i, g->round)->u.bytes));
    all = (char *)cddp__malloc(a, each * (size_t)(g->size + 1) + 1);
    if (all == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
    at = (char *)memcpy(all + each * (size_t)g->size, packet, bytes);
    r = cddp__run_simple(g, CDDP__KIND_ALL_GATHER, at, all, each, CDDP_U8, -1);
    if (r == CDDP_OK && (r = cddp__merge_rows(d, all, each)) != CDDP_OK) r = cddp__break(g, r);
    cddp__free(a, all);
  } else {
    if ((r = cddp__enter(g)) == CDDP_OK) {
      if ((r = cddp__merge_rows(d, NULL, 0)) != CDDP_OK) r = cddp__break(g, r);
      if (r == CDDP_OK) r = cddp__control_barrier(d, kind, CDDP__PHASE_ROWS_DONE);
    }
    r = cddp__exit(g, r);
  }
  return r == CDDP_OK && d->memory->place_rows != NULL ? d->memory->place_rows(d) : r;
}

/* --- wait and step --- */

/* Collective: after steps that ranks which have joined did not take, brings them root's weights
   and states, none of which is in shares. */
static cddp_result cddp__catch_up(cddp_ddp *d, cddp_optim *s, int root) {
  cddp_result r;
  int k;
  if (!d->out_of_date) return CDDP_OK;
  d->out_of_date = false;
  r = d->memory->broadcast(d, d->params, d->count, root);
  if (r != CDDP_OK || s == NULL) return r;
  r = cddp__run_simple(d->control, CDDP__KIND_BROADCAST, s->steps, s->steps, (size_t)d->count,
                       CDDP_F32, root);
  for (k = 0; r == CDDP_OK && k < s->count * s->states; k++) {
    cddp_param p = d->params[k % s->count];
    if (s->steps[k % s->count] == 0) continue;
    if (cddp__need_states(s, k % s->count) != CDDP_OK)
      return cddp__break(d->control, CDDP_OUT_OF_MEMORY);
    if (!cddp__has_state(s, k / s->count, k % s->count)) continue;
    p.data = s->state[k];
    p.dtype = cddp__state_type(s, k % s->count);
    r = d->memory->broadcast(d, &p, 1, root);
  }
  return r == CDDP_OK ? cddp__write_copies(s) : r;
}

/* What an update by s (NULL: none) leaves: a step more; gradients that it did not clear become
   zero. cleared: the arena is zero but for what s has skipped; else all of it becomes so, also for
   a hook, which gets a joined rank's arena as it is. */
static cddp_result cddp__clear_gradients(cddp_ddp *d, cddp_optim *s, bool cleared) {
  void *stream = d->group->stream;
  cddp_result r = cleared ? CDDP_OK : d->memory->zero(d->arena, d->bytes, stream);
  int i;
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    const cddp__tensor *t = &d->tensors[i];
    if (s != NULL && cddp__optim_skips(s, i))
      r = d->memory->zero(d->arena + t->offset, t->room, stream);
    else if (s != NULL)
      cddp__count_step(s, i);
    if (cddp__sparse_of(d, i) != NULL) d->sparse[i]->added.n = d->sparse[i]->mean.n = 0;
    if (r == CDDP_OK && !t->placed) r = d->memory->zero(d->params[i].grad, t->bytes, stream);
  }
  return r;
}

/* What follows the meeting of a step, or (s NULL) of a wait or reduce_scatter, on ranks that have
   joined too. */
static cddp_result cddp__finish(cddp_ddp *d, int kind, cddp_optim *s, uint64_t missing) {
  bool gathers = d->spread && (d->group->carrier->average != NULL || d->group->backend != NULL);
  bool waits = kind == CDDP__KIND_DDP_WAIT; /* all ranks get all of the mean */
  bool averaged = waits || d->early || gathers, wrote = missing > 0 && !averaged;
  cddp_result r = missing > 0 ? cddp__settle_unused(d) : CDDP_OK;
  int i;
  for (i = 0; i < d->count; i++) d->used[i] = d->tensors[i].used;
  while (r == CDDP_OK && waits && d->shares != NULL) r = cddp__share_gather(d->shares);
  if (r == CDDP_OK && averaged) {
    r = gathers ? d->memory->gather_shards(d) : cddp__finish_buckets(d, s != NULL);
    wrote = gathers || d->desc.comm_hook != NULL || cddp__mean_factor(d, CDDP_F32) != 1;
  }
  if (r == CDDP_OK && s != NULL) r = cddp__catch_up(d, s, d->active[0]); /* behind the buckets */
  if (r == CDDP_OK && d->sparse != NULL) r = cddp__exchange_rows(d, kind);
  if (waits && d->active_count < d->group->size) d->out_of_date = true; /* others will step */
  for (i = 0; r == CDDP_OK && waits && i < d->count; i++)
    if (!d->tensors[i].placed && d->used[i])
      r = d->memory->copy(d->params[i].grad, d->arena + d->tensors[i].offset, d->tensors[i].bytes,
                          d->group->stream);
  if (r == CDDP_OK && s != NULL) r = d->memory->step(d, s, averaged, wrote);
  if (r == CDDP_OK && s != NULL) r = cddp__clear_gradients(d, s, true);
  d->scattered = r == CDDP_OK && kind == CDDP__KIND_DDP_SCATTER;
  if (r == CDDP_OK && kind == CDDP__KIND_DDP_SCATTER) r = cddp__host_scatter(d, averaged, wrote);
  if (r != CDDP_OK) return cddp__exit(d->control, cddp__give_up(d, r));
  if (!d->scattered) r = cddp__complete(d, s != NULL);
  return r == CDDP_OK ? r : cddp__ddp_fail(d, r);
}

/* cddp_ddp_step, or (s NULL) _wait or _reduce_scatter. */
static cddp_result cddp__ddp_step(cddp_ddp *d, int kind, cddp_optim *s) {
  uint64_t record, missing = 0;
  cddp_result r;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (d->scattered)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_ddp_all_gather must come first, which ends the "
                                             "step that cddp_ddp_reduce_scatter has begun");
  if (s == NULL && d->no_sync) return CDDP_OK;
#ifdef CDDP_CUDA
  const cddp_kernels *kernels;
  if (s != NULL && d->side != NULL)
    if ((r = cddp__need_kernels(&kernels, "cddp_ddp_step")) != CDDP_OK) return r;
#endif
  record = cddp__record_begin(d->control, kind, d->control->calls + 1, 0);
  if (d->desc.shards > 0 && d->taken < d->shard_count) {
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "rank %d still has %d of its %d shards of this step to do; call "
                   "cddp_ddp_next_shard until it returns false",
                   d->group->rank, d->shard_count - d->taken, d->shard_count);
  } else {
    r = d->spread && d->arrived == d->count ? cddp__end_shard(d) /* else the meeting will fail */
                                            : CDDP_OK;
    if (r == CDDP_OK)
      r = cddp__ddp_meet(d, kind, s != NULL ? s->check | (uint64_t)(s->share != NULL) : 0, s,
                         &missing);
  }
  r = r == CDDP_OK ? cddp__finish(d, kind, s, missing) : cddp__give_up(d, r);
  cddp__record_finish(d->control, record, r);
  return r;
}

/* Ends what cddp_ddp_reduce_scatter has begun: the caller has stepped this rank's partitions. */
static cddp_result cddp__publish(cddp_ddp *d) {
  const int kind = CDDP__KIND_DDP_GATHER;
  cddp_group *g = d->control;
  uint64_t record;
  cddp_result r;
  int i;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  record = cddp__record_begin(g, kind, ++g->calls, 0);
  if ((r = cddp__check_group(g)) == CDDP_OK)
    r = cddp__round(g, CDDP__SCOPE_ALL, kind, CDDP__PHASE_CALL, 0, NULL, 0);
  if (r == CDDP_OK) r = cddp__enter(g);
  for (i = d->count - 1; r == CDDP_OK && i >= 0; i--) {
    const cddp__tensor *t = &d->tensors[i];
    if (t->begin < t->end) cddp__publish_block(d, i, t->begin, t->end - t->begin);
  }
  if (r == CDDP_OK) r = cddp__control_barrier(d, kind, CDDP__PHASE_DONE);
  if (r == CDDP_OK) r = cddp__fetch_weights(d, NULL);
  if (r == CDDP_OK) r = cddp__exit(g, r);
  if (r == CDDP_OK) r = cddp__clear_gradients(d, NULL, true);
  if (r == CDDP_OK) r = cddp__complete(d, true);
  d->scattered = r != CDDP_OK;
  if (r != CDDP_OK) r = cddp__exit(g, cddp__give_up(d, r));
  cddp__record_finish(g, record, r);
  return r;
}

/* The state of parameter i, whose stretches lie on the ranks that own them, to all ranks. Each host
   has all stretches: the first one's are taken, cut as its ranks have them. */
static cddp_result cddp__gather_state(cddp_ddp *d, int i, const cddp_param *state) {
  const cddp__hosts *x = d->control->hosts;
  const cddp__tensor *t = &d->tensors[i];
  size_t begin, end, esize = cddp__dtype_size(d->params[i].dtype);
  int p, size = x != NULL ? x->nodes[0].size : d->group->size;
  cddp_result r = CDDP_OK;
  for (p = 0; r == CDDP_OK && p < size; p++) {
    cddp__slice(d->bytes, CDDP__BLOCK_BYTES, size, p, &begin, &end);
    begin = cddp__max(begin, t->offset);
    end = cddp__min(end, t->offset + t->bytes);
    if (begin < end) {
      char *at = (char *)state->data + (begin - t->offset) / esize * cddp__dtype_size(state->dtype);
      r = cddp__run_simple(d->control, CDDP__KIND_BROADCAST, at, at, (end - begin) / esize,
                           state->dtype, x != NULL ? cddp__rank_on(x, 0, p) : p);
    }
  }
  return r;
}

/* --- uneven inputs --- */

/* This rank's part of what the others have called; for a step with the cddp_optim of theirs. */
static cddp_result cddp__take_part(cddp_ddp *d, cddp_optim *s, uint64_t missing) {
  int lead = d->active[0];
  uint32_t kind = cddp__op_header_of(d->control, lead, d->control->round)->call & 255;
  cddp__step_header theirs = cddp__header_of(d, lead);
  cddp_result r;
  if (kind == CDDP__KIND_DDP_BUFFERS)
    return d->memory->broadcast(d, d->desc.buffers, d->desc.buffer_count, lead);
  if (kind == CDDP__KIND_DDP_WAIT) {
    r = cddp__finish(d, (int)kind, NULL, missing);
    return r == CDDP_OK ? cddp__clear_gradients(d, NULL, false) : r;
  }
  if (s == NULL || theirs.settings != cddp__optim_settings(s)) {
    cddp__fail(CDDP_MISMATCH,
               s == NULL ? "rank %d called ddp_join without a cddp_optim, rank %d called ddp_step; "
                           "pass the one of the training loop"
                         : "the cddp_optim that rank %d passed to ddp_join has other settings than "
                           "the one that rank %d passed to ddp_step",
               d->group->rank, lead);
    return cddp__break(d->control, CDDP_MISMATCH);
  }
  cddp__set_lr(s, theirs.lr);
  return cddp__finish(d, (int)kind, s, missing);
}

/* All ranks have joined: the last to do so has the newest state. */
static cddp_result cddp__end_join(cddp_ddp *d, cddp_optim *s) {
  int p, last = 0;
  cddp_result r;
  if (!d->had_joined) return CDDP_OK;
  while (last < d->group->size - 1 && cddp__header_of(d, last).joined != CDDP__JOINED_NOW) last++;
  for (p = 0; p < d->group->size; p++)
    if (cddp__header_of(d, p).settings != (s != NULL ? cddp__optim_settings(s) : 0))
      return cddp__fail(CDDP_MISMATCH,
                        "ranks %d and %d called ddp_join with cddp_optim's of other settings, or "
                        "one of them with none",
                        d->group->rank, p);
  if (s != NULL) cddp__set_lr(s, cddp__header_of(d, last).lr);
  r = cddp__catch_up(d, s, last);
  if (r == CDDP_OK)
    r = d->memory->broadcast(d, d->desc.buffers, d->desc.buffer_count, last);
  d->had_joined = false;
  return r;
}

CDDPDEF cddp_result (cddp_ddp_join)(cddp_ddp *d, cddp_optim *s) {
  uint64_t missing = 0, record;
  char space[24];
  cddp_result r;
  int i;
  cddp__enter_call(__func__);
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  CDDP__CHECK(d->meets, "on a GPU with NCCL set uneven_inputs in cddp_ddp_desc");
  if (d->desc.shards > 0 || d->elastic != NULL)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "cddp_ddp_join: every rank does its shards in each step; go without shards "
                      "in cddp_ddp_desc");
  if (s != NULL) CDDP__TRY(cddp__check_pair(d, s));
  CDDP__CHECK(!d->no_sync, "no_sync is on; end the step that it began first");
  for (i = 0; i < d->count && !d->failed; i++)
    CDDP__CHECK(!d->tensors[i].ready && !d->tensors[i].noted,
                "parameter \"%s\" is ready; end the step that it belongs to first",
                cddp__param_name(&d->params[i], i, space, sizeof space));
  if (d->failed) CDDP__TRY(cddp__fail(d->fail_result, "%s", d->fail_text));
  record = cddp__record_begin(d->control, CDDP__KIND_DDP_JOIN, d->control->calls + 1, 0);
  if ((r = d->memory->use != NULL ? d->memory->use(d) : CDDP_OK) == CDDP_OK)
    r = cddp__clear_gradients(d, NULL, false);
  for (d->joined = CDDP__JOINED_NOW; r == CDDP_OK; d->joined = CDDP__JOINED) {
    r = cddp__ddp_meet(d, CDDP__KIND_DDP_JOIN, 0, s, &missing);
    if (r != CDDP_OK || d->active_count == 0) break;
    r = cddp__take_part(d, s, missing);
  }
  if (r == CDDP_OK) r = cddp__end_join(d, s);
  d->joined = 0;
  if (r != CDDP_OK) r = cddp__give_up(d, r);
  cddp__record_finish(d->control, record, r);
  return r == CDDP_INVALID_ARGUMENT ? cddp__named(__func__, r) : r;
}

/* --- creation and destruction --- */

static void cddp__ddp_free(cddp_ddp *d) { /* keeps this thread's error text */
  cddp__host *h = d->group->host;
  const cddp_allocator *a = &h->allocator;
  char text[CDDP__ERROR_MAX];
  int i;
  memcpy(text, cddp__error_text, sizeof text);
  while (d->shares != NULL) {
    cddp_optim *s = d->shares->optim; /* its states go with the share: it starts anew */
    memset(s->steps, 0, (size_t)s->count * sizeof *s->steps);
    cddp__share_free(s);
  }
  for (i = 0; i < d->count; i++)
    if (d->tensors[i].placed) d->params[i].grad = NULL;
  if (d->memory->free != NULL) d->memory->free(d);
  if (d->hooks != NULL) cddp__group_leave(d->hooks);
  if (d->comm != NULL) cddp__group_leave(d->comm);
  if (d->control != NULL) cddp__group_leave(d->control);
  cddp__arena_free(h, d->mirror);
  cddp__arena_free(h, d->scratch);
  pthread_mutex_destroy(&d->lock);
  for (i = 0; d->sparse != NULL && i < d->count; i++) cddp__sparse_free(a, d->sparse[i]);
  cddp__free(a, d); /* and all that cddp__ddp_new has put behind it */
  memcpy(cddp__error_text, text, sizeof text);
}

static uint64_t cddp__models_made; /* in this process */

/* The next `bytes` of the memory behind a cddp_ddp. */
static void *cddp__carve(char **at, size_t bytes) {
  void *p = *at;
  *at += cddp__round_up(bytes, sizeof(double));
  return p;
}

/* The cddp_ddp and its arrays in one piece of memory, zeroed. */
static cddp_ddp *cddp__ddp_alloc(cddp_group *g, int count, int buffers, int shards) {
  size_t n = (size_t)count, size = (size_t)g->size, parts = cddp__max(size, (size_t)shards);
  size_t bytes = sizeof(cddp_ddp) + n * (sizeof(cddp__tensor) + sizeof(cddp__bucket_state)) +
                 n * sizeof(cddp_partition) +
                 (size * n + 4 * parts + n) * sizeof(void *) +
                 parts * (sizeof(cddp__row_list) + sizeof(cddp__shard_node) + sizeof(int)) +
                 (CDDP__PLAN_INTS(n) + 2 * n + size) * sizeof(int) + n * (size + 2) +
                 16 * sizeof(double) + (n + (size_t)buffers) * sizeof(cddp__call) +
                 n * sizeof(cddp_segment);
  cddp_ddp *d = (cddp_ddp *)cddp__calloc(&g->host->allocator, 1, bytes);
  char *at = (char *)(d + 1);
  if (d == NULL) return NULL;
  d->tensors = (cddp__tensor *)cddp__carve(&at, n * sizeof *d->tensors);
  d->partitions = (cddp_partition *)cddp__carve(&at, n * sizeof *d->partitions);
  d->calls = (cddp__call *)cddp__carve(&at, (n + (size_t)buffers) * sizeof *d->calls);
  d->segments = (cddp_segment *)cddp__carve(&at, n * sizeof *d->segments);
  d->sparse_room = (cddp__sparse **)cddp__carve(&at, n * sizeof *d->sparse_room);
  d->lists = (cddp__row_list *)cddp__carve(&at, parts * sizeof *d->lists);
  d->addresses = (char **)cddp__carve(&at, size * n * sizeof *d->addresses);
  d->mirrors = (char **)cddp__carve(&at, parts * sizeof *d->mirrors);
  d->slot_areas = (char **)cddp__carve(&at, parts * sizeof *d->slot_areas);
  d->buffers = (void **)cddp__carve(&at, parts * sizeof *d->buffers);
  d->sources = (const void **)cddp__carve(&at, parts * sizeof *d->sources);
  d->nodes = (cddp__shard_node *)cddp__carve(&at, parts * sizeof *d->nodes);
  d->widths = (int *)cddp__carve(&at, parts * sizeof *d->widths);
  d->active = (int *)cddp__carve(&at, size * sizeof *d->active);
  d->buckets = (cddp__bucket_state *)cddp__carve(&at, n * sizeof *d->buckets);
  d->plan_memory = (int *)cddp__carve(&at, CDDP__PLAN_INTS(n) * sizeof *d->plan_memory);
  d->plan_order = (int *)cddp__carve(&at, n * sizeof *d->plan_order);
  d->arrival = (int *)cddp__carve(&at, n * sizeof *d->arrival);
  d->flags = (unsigned char *)cddp__carve(&at, n * (size + 1));
  d->used = (unsigned char *)cddp__carve(&at, n);
  return d;
}

static cddp_ddp *cddp__ddp_new(cddp_group *g, cddp_param *params, int count,
                               const cddp_ddp_desc *desc) {
  double cap = desc->bucket_cap_mb > 0 ? desc->bucket_cap_mb : 25;
  double first = desc->first_bucket_mb > 0 ? desc->first_bucket_mb
                 : desc->bucket_cap_mb > 0 ? cap
                                           : 1;
  cddp_ddp *d = cddp__ddp_alloc(g, count, desc->buffer_count, desc->shards);
  int i, slots, nodes;
  if (d == NULL) return NULL;
  d->group = g;
  d->id = __atomic_add_fetch(&cddp__models_made, 1, __ATOMIC_RELAXED);
  d->params = params;
  d->count = count;
  d->desc = *desc;
  d->memory = &cddp__host_memory;
  d->meets = true;
#ifdef CDDP_CUDA
  if (g->backend != NULL) d->memory = &cddp__gpu_memory;
  d->meets = g->backend == NULL || cddp__device_of(g)->staged;
#endif
  d->shards = desc->shards > g->size ? desc->shards : g->size;
  d->spread = !desc->elastic && /* NCCL's own order is not the canonical one */
              (d->shards > g->size || (desc->shards > 0 && !d->meets));
  cddp__deal_shards(d->shards, g->size, g->rank, &d->first_shard, &d->shard_count);
  for (i = 0; i < g->size && !desc->elastic; i++) {
    nodes = cddp__plan_nodes(d->shards, g->size, i, d->nodes + d->node_count,
                             d->widths + d->node_count, &slots);
    if (g->backend != NULL) slots = nodes > slots ? nodes : slots; /* all nodes lie in them */
    d->node_count += nodes;
    d->most_nodes = nodes > d->most_nodes ? nodes : d->most_nodes;
    d->slots = slots > d->slots ? slots : d->slots;
  }
  d->eager = desc->comm_hook != NULL || g->carrier->average != NULL || g->backend != NULL;
  d->early = !d->spread && !desc->elastic && (d->eager || g->size > 1);
  d->limits[0] = first * 1048576 < (double)SIZE_MAX ? (size_t)(first * 1048576) : SIZE_MAX;
  d->limits[1] = cap * 1048576 < (double)SIZE_MAX ? (size_t)(cap * 1048576) : SIZE_MAX;
  pthread_mutex_init(&d->lock, NULL);
  for (i = 0; i < g->size; i++) d->active[d->active_count++] = i;
  for (i = 0; desc->sparse_rows != NULL && i < count; i++) {
    if (desc->sparse_rows[i] == 0) continue;
    d->sparse = d->sparse_room;
    d->sparse[i] = cddp__sparse_new(&g->host->allocator, &params[i], desc->sparse_rows[i],
                                    d->shard_count);
    if (d->sparse[i] != NULL) continue;
    cddp__ddp_free(d);
    return NULL;
  }
  d->meets = d->meets || desc->find_unused_parameters || desc->uneven_inputs || d->sparse != NULL;
  if (desc->comm_hook != NULL && desc->comm_hook != cddp_bf16_compress_hook &&
      desc->comm_hook != cddp_fp16_compress_hook)
    cddp__note_several(g->host); /* it may call what it likes, on the engine's thread */
  return d;
}

static cddp_result cddp__check_shards(const cddp_ddp *d) {
  const cddp_group *g = d->group;
  const char *other = d->desc.comm_hook != NULL          ? "comm_hook"
                      : d->desc.find_unused_parameters ? "find_unused_parameters"
                      : d->desc.uneven_inputs          ? "uneven_inputs"
                                                       : NULL;
  const char *lacks = !d->desc.elastic                          ? NULL
                      : other != NULL                           ? other
                      : d->sparse != NULL                       ? "sparse_rows"
                      : d->desc.max_grad_norm > 0               ? "max_grad_norm"
                      : g->hosts != NULL                        ? "several hosts"
                      : g->backend != NULL                      ? "a GPU"
                      : g->carrier->average != NULL             ? "MPI"
                                                                : NULL;
  if (lacks != NULL)
    return cddp__fail(CDDP_UNSUPPORTED, "elastic in cddp_ddp_desc and %s exclude each other",
                      lacks);
  if (d->desc.shards == 0) return CDDP_OK;
  if (d->desc.shards < d->group->size)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "shards in cddp_ddp_desc is %d, but the group has %d ranks; each rank needs "
                      "at least one",
                      d->desc.shards, d->group->size);
  if (other != NULL)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "shards and %s in cddp_ddp_desc exclude each other: the mean is over all "
                      "shards, in one order",
                      other);
#ifdef CDDP_CUDA
  if (d->spread && d->group->backend != NULL && cddp__device_of(d->group)->kernels == NULL)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "shards on a GPU need cddp's kernels on every rank: include cddp_kernels.cuh "
                      "in one .cu file");
#endif
  if (d->spread && d->group->backend != NULL && d->node_count > CDDP_NODES)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "%d shards on %d ranks leave %d sums of shards to add, on GPUs at most %d",
                      d->shards, d->group->size, d->node_count, CDDP_NODES);
  return CDDP_OK;
}

/* The collective part of creation. */
static cddp_result cddp__ddp_setup(cddp_ddp *d) {
  cddp_group *g = d->group;
  cddp_result r, local = CDDP_OK;
  int i;
  if (d->memory->use != NULL && (r = d->memory->use(d)) != CDDP_OK) return r;
  if ((r = cddp__split(g, 0, g->rank, CDDP__KIND_DDP_CREATE, &d->control)) != CDDP_OK) return r;
  local = cddp__check_shards(d);
#ifdef CDDP_CUDA
  if (local == CDDP_OK && g->backend != NULL) local = cddp__check_on_device(d);
#endif
  if ((r = cddp__consensus(d->control, local, NULL, 0, NULL)) != CDDP_OK) return r;
  r = cddp__split_devices(g, 0, g->rank, CDDP__KIND_DDP_CREATE, true, &d->comm);
  if (r != CDDP_OK) return r;
  d->control->internal = d->comm->internal = true;
  if ((r = cddp__agree_on_params(d)) != CDDP_OK) return r;
  if (d->desc.comm_hook != NULL)
    r = cddp__split_devices(g, 0, g->rank, CDDP__KIND_DDP_CREATE + 1, true, &d->hooks);
  if (r != CDDP_OK) return r;
  cddp__lay_out(d);
  local = d->memory->alloc(d);
  if ((r = cddp__consensus(d->control, local, NULL, 0, NULL)) != CDDP_OK) return r;
  if ((r = cddp__map_peers(d)) != CDDP_OK) return r;
  if ((r = d->memory->broadcast(d, d->params, d->count, 0)) != CDDP_OK) return r;
  r = d->memory->broadcast(d, d->desc.buffers, d->desc.buffer_count, 0);
  if (r != CDDP_OK) return r;
  cddp__set_plan(d, NULL);
  cddp__arm(d);
  for (i = 0; i < d->count; i++) {
    const cddp__tensor *t = &d->tensors[i];
    cddp_partition *part = &d->partitions[d->partition_count];
    size_t esize = cddp__dtype_size(d->params[i].dtype);
    if (t->placed && cddp__sparse_of(d, i) == NULL) d->params[i].grad = d->arena + t->offset;
    if (t->begin >= t->end || g->backend != NULL) continue;
    part->param = i;
    part->first = (t->begin - t->offset) / esize;
    part->count = (t->end - t->begin) / esize;
    part->data = (char *)d->params[i].data + (t->begin - t->offset);
    part->grad = d->arena + t->begin;
    d->partition_count++;
  }
  return CDDP_OK;
}

/* >>elastic ------------------------------------------------------------------------------------
   Models whose ranks are lost, and come: cddp_ddp_desc.elastic. Ranks of one host, gradients in
   host memory.
   Owns: the board, a member's entry, its kit. Touches: of a cddp_ddp what >>ddp does; other
   members' weights and gradients in an update. Entry points: cddp__elastic_create, or for a rank
   that joins _attach and _enter; _next and _step; cddp_ddp_group; _leave. All are called by the
   thread that trains.
   Works as follows: after creation ranks meet on the board alone, never in rounds, as a group that
   has lost a rank is broken. The board outlives each of them. What is to be done in step t is cut
   into units, shards and then parts of the update. A unit is a word {step, state, owner} that is
   FREE (all of an earlier step are), then TAKEN by compare-and-swap, then DONE. A member whose
   process has ended is made LOST by whoever waits and looks at its pidfd; others take its units.
   What a member has written stays, as it lies in the memory that all share.
   The deal says which units a member takes first: those of the members that whoever began the step
   first has seen, see cddp__elastic_begin. Where ranks are not all there, or one is late, units are
   done by others; what comes out is the same, as nothing depends on who does what.
   Shards: gradients of a shard that has ended are a node of the canonical tree. A member adds up
   those of its nodes that together are one, into a slot that is not in use; then one store, of
   member.nodes, puts the new table of its nodes in force; then the shard is DONE. DONE is for ever,
   and what a table has stays as it is until the step is over. When all shards are DONE, the tables
   of all members, living and lost, have each shard once.
   The update begins when all living members have come to it (member.at) and called the same. A part
   is done block by block:
     1 the block's new weights and states are computed into the owner's log
     2 part.progress = its place, odd: the log has it
     3 log to states, log to the weights of all living members, and their gradients become zero
     4 part.progress = the place of the next block, even
   A member that is lost at 1 has changed nothing that is read, at 3 nothing that is not written
   again: who takes the part over does the block at an even place anew, and publishes that at an odd
   one once more, from the log of the lost member. So there is no bad moment. A block lies in the
   first or second cache meanwhile. When all parts are DONE board.step is raised. Weights that no
   other rank can write to go to an area on the board, from which each rank copies them; the means
   of a cddp_ddp_wait go to another one, and all ranks copy these. States lie on the board.
   A rank that is late may still look at step t while others are in t + 1, but no further: so what a
   member says of a step has two places. */

#define CDDP__ELASTIC_LOOK_S 0.01 /* between looks after the other members */
#define CDDP__ELASTIC_PART ((size_t)32 << 10) /* bytes of a part, if there are not too many */
#define CDDP__ELASTIC_PARTS 256

enum { CDDP__UNIT_FREE, CDDP__UNIT_TAKEN, CDDP__UNIT_DONE };

/* A unit's word. log: the member in whose log the part's block is. */
static uint64_t cddp__unit(uint64_t step, int state, int owner, int log) {
  return step << 26 | (uint64_t)log << 14 | (uint64_t)owner << 2 | (uint64_t)state;
}
static int cddp__unit_owner(uint64_t word) { return (int)(word >> 2 & 4095); }
static int cddp__unit_log(uint64_t word) { return (int)(word >> 14 & 4095); }
static int cddp__unit_state(uint64_t word, uint64_t step) {
  if (word >> 26 == step) return (int)(word & 3);
  return word >> 26 < step ? CDDP__UNIT_FREE : CDDP__UNIT_DONE;
}

/* Of a member's two tables number `which` is in force, with `count` nodes. */
static uint64_t cddp__table_word(uint64_t step, int count, int which) {
  return step << 14 | (uint64_t)count << 1 | (uint64_t)which;
}

/* A block's place in the arena, of a step. Whatever has not that step is of an earlier one. */
#define CDDP__PLACE_BITS 42
static uint64_t cddp__progress(uint64_t step, uint64_t at) {
  return (step + 1) << CDDP__PLACE_BITS | at;
}

static uint64_t cddp__member_state(int state, uint64_t life_or_step) {
  return life_or_step << 8 | (uint64_t)state;
}

static bool cddp__member_is(const cddp__elastic *e, int member, int state) {
  return (cddp__load64(&e->members[member].state) & 255) == (uint64_t)state;
}

/* --- the board, and what of it and of members is mapped here --- */

static cddp_result cddp__elastic_failure(const cddp_ddp *d) { /* of the model */
  cddp__elastic *e = d->elastic;
  const cddp__cause *c = &e->board->failure;
  if (CDDP__UNLIKELY(cddp__has_cause(c)))
    return cddp__fail((cddp_result)(cddp__load32(&c->state) - 2), "%s", c->text);
  if (CDDP__LIKELY(cddp__load32(&d->group->host->unshared) == e->unshared)) return CDDP_OK;
  return cddp__fail(CDDP_ABORTED,
                    "rank %d took its memory out of sharing, as an operation of another group "
                    "failed while one of its ranks was stopped; make the cddp_ddp anew",
                    d->group->rank);
}

/* When the process began, in clock ticks since the system's start; 0: it has ended. */
static uint64_t cddp__process_born(uint32_t pid) {
  char path[32], text[1024], *at;
  int fd, field;
  ssize_t n;
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) return 0;
  n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  at = strrchr(text, ')'); /* behind the name */
  if (at == NULL || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
  for (field = 2; field < 22 && at != NULL; field++) at = strchr(at + 1, ' ');
  return at != NULL ? strtoull(at, NULL, 10) : 0;
}

/* What all ranks of the model must have alike. */
static uint64_t cddp__elastic_model(const cddp_ddp *d) {
  uint64_t h = cddp__hash64((uint64_t)d->shards, &d->bytes, sizeof d->bytes);
  cddp__param_info info;
  int i;
  for (i = 0; i < d->count; i++) {
    cddp__describe_param(d, i, &info);
    h = cddp__hash64(h, &info, sizeof info);
  }
  return h;
}

/* Where things lie behind the board (NULL: it is not there yet); returns its bytes. */
static size_t cddp__board_layout(const cddp_ddp *d, char *board, int parts, cddp__elastic *e) {
  size_t page = d->bytes < CDDP__HUGE_PAGE ? cddp__page_size() : CDDP__HUGE_PAGE;
  size_t members = cddp__round_up(sizeof(cddp__board), CDDP__CACHE_LINE);
  size_t shards = members + (size_t)d->shards * sizeof *e->members;
  size_t first = shards + (size_t)d->shards * sizeof *e->shards;
  size_t bytes = first + (size_t)parts * sizeof *e->parts;
  size_t areas = cddp__round_up(bytes + (size_t)d->count, page);
  e->area_room = cddp__round_up(d->bytes, page);
  if (board != NULL) {
    e->board = (cddp__board *)(void *)board;
    e->members = (cddp__elastic_member *)(void *)(board + members);
    e->shards = (cddp__atomic_u64 *)(void *)(board + shards);
    e->parts = (cddp__elastic_part *)(void *)(board + first);
    e->in_area = (unsigned char *)board + bytes;
    e->areas = board + areas;
  }
  return areas + CDDP__AREAS * e->area_room;
}

static char *cddp__area(const cddp__elastic *e, int area, size_t at) {
  return e->areas + (size_t)area * e->area_room + at;
}

static int cddp__table_room(const cddp_ddp *d) { return d->shards / 2 + 1; } /* nodes, at most */

static cddp__elastic_node *cddp__table(const cddp_ddp *d, char *kit, uint64_t word) {
  size_t bytes = (size_t)cddp__table_room(d) * sizeof(cddp__elastic_node);
  return (cddp__elastic_node *)(void *)(kit + (word & 1) * bytes);
}

/* Nodes that the member has in step `step`. */
static int cddp__table_count(const cddp__elastic *e, int member, uint64_t step, uint64_t *word) {
  *word = cddp__load64(&e->members[member].nodes);
  return *word >> 14 == step ? (int)(*word >> 1 & 8191) : 0;
}

/* Local: d->elastic, on a board that is mapped here, and a kit. */
static cddp_result cddp__elastic_attach(cddp_ddp *d, char *board, int parts) {
  const cddp_allocator *a = &d->group->host->allocator;
  size_t n = (size_t)d->shards, tables = 2 * (size_t)cddp__table_room(d);
  size_t page = cddp__page_size(), bytes;
  cddp__elastic *e = (cddp__elastic *)cddp__calloc(
      a, 1, sizeof *e + n * (sizeof *e->views + 3 * sizeof(int)) +
                (size_t)d->count * sizeof *e->order);
  int dtype, i, placed = 0;
  if (e == NULL) return CDDP_OUT_OF_MEMORY;
  e->views = (cddp__elastic_view *)(void *)(e + 1);
  e->dealt = (int *)(void *)(e->views + n);
  e->living = e->dealt + n;
  e->arrived = e->living + n;
  e->order = e->arrived + n;
  for (dtype = 0; dtype < CDDP__TRAINED; dtype++) /* as cddp__lay_out */
    for (i = d->count - 1; i >= 0; i--)
      if ((int)d->params[i].dtype == dtype) e->order[placed++] = i;
  e->me = e->shard = -1;
  e->unshared = cddp__load32(&d->group->host->unshared);
  (void)cddp__board_layout(d, board, parts, e);
  e->log_at = cddp__round_up(tables * sizeof(cddp__elastic_node), CDDP__CACHE_LINE);
  e->refs_at = e->log_at + (1 + CDDP__STATES) * CDDP__BLOCK * sizeof(double);
  e->slots_at = cddp__round_up(e->refs_at + (size_t)d->count * sizeof(cddp__ref), page);
  d->slot_room = cddp__round_up(d->slot_bytes, page);
  bytes = e->slots_at + ((size_t)cddp__table_room(d) + 1) * d->slot_room;
  e->kit = (char *)cddp__arena_alloc(d->group->host, bytes, CDDP__FOR_KIT);
  if (e->kit == NULL) {
    cddp__free(a, e);
    return CDDP_OUT_OF_MEMORY;
  }
  d->elastic = e;
  return CDDP_OK;
}

/* Fills the entry of a member that this rank is; the caller has made it JOINING, and makes it LIVE
   with its new life. */
static void cddp__elastic_enter(cddp_ddp *d, int member) {
  cddp__elastic *e = d->elastic;
  cddp__elastic_member *m = &e->members[member];
  cddp__host *h = d->group->host;
  cddp__ref *refs = (cddp__ref *)(void *)(e->kit + e->refs_at);
  int i;
  e->me = member;
  d->mirrors[member] = d->arena;
  d->slot_areas[member] = e->kit + e->slots_at;
  m->pid = (uint32_t)getpid();
  m->born = cddp__process_born(m->pid);
  m->rank = d->group->rank;
  m->index = h->index;
  m->arena = cddp__ref_of(h, d->arena, d->bytes);
  m->kit = cddp__ref_of(h, e->kit, e->slots_at);
  for (i = 0; i < d->count; i++) {
    size_t bytes = d->params[i].count * cddp__dtype_size(d->params[i].dtype);
    if (!e->in_area[i]) refs[i] = cddp__ref_of(h, d->params[i].data, bytes);
  }
  cddp__add32(&m->life, 1);
}

/* Maps what the member has, unless it is mapped. */
static cddp_result cddp__elastic_see(cddp_ddp *d, int member) {
  cddp__elastic *e = d->elastic;
  const cddp__elastic_member *m = &e->members[member];
  cddp__elastic_view *v = &e->views[member];
  cddp__host *h = d->group->host;
  uint32_t life = cddp__load32(&m->life);
  void *arena = NULL, *kit = NULL, *at;
  const cddp__ref *refs;
  cddp_result r = CDDP_OK;
  int i;
  if (CDDP__LIKELY(v->life == life)) return CDDP_OK;
  if (v->life != 0) cddp__close_fd(&v->pidfd);
  v->life = 0;
  v->pidfd = -1;
  if (!h->threads && member != e->me) v->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)m->pid, 0u);
  if (v->pidfd >= 0 && cddp__process_born(m->pid) != m->born) cddp__close_fd(&v->pidfd);
  if (v->data == NULL)
    v->data = (char **)cddp__calloc(&h->allocator, (size_t)d->count, sizeof *v->data);
  if (v->data == NULL) r = CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK) r = cddp__locate(h, &m->arena, &arena);
  if (r == CDDP_OK) r = cddp__locate(h, &m->kit, &kit);
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    refs = (const cddp__ref *)(void *)((char *)kit + e->refs_at);
    at = NULL;
    if (refs[i].kind != CDDP__REF_NONE) r = cddp__locate(h, &refs[i], &at);
    v->data[i] = (char *)at;
  }
  if (r != CDDP_OK) {
    cddp__close_fd(&v->pidfd);
    return r;
  }
  v->kit = (char *)kit;
  d->mirrors[member] = (char *)arena;
  d->slot_areas[member] = v->kit + e->slots_at;
  v->life = life;
  return CDDP_OK;
}

/* Collective over d->control: rank 0 makes the board, and all ranks enter. */
static cddp_result cddp__elastic_create(cddp_ddp *d) {
  cddp_group *g = d->control;
  size_t most = d->bytes / CDDP__ELASTIC_PART, bytes;
  int parts = (int)cddp__max(1, cddp__min(most, CDDP__ELASTIC_PARTS)), i;
  cddp_result r = CDDP_OK;
  void *at = NULL;
  cddp__elastic e;
  cddp__ref ref;
  memset(&ref, 0, sizeof ref);
  bytes = cddp__board_layout(d, NULL, parts, &e);
  if (g->rank == 0) at = cddp__arena_alloc(g->host, bytes, CDDP__FOR_BOARD);
  if (at != NULL) {
    (void)cddp__board_layout(d, (char *)at, parts, &e);
    e.board->self = cddp__ref_of(g->host, at, bytes);
    e.board->model = cddp__elastic_model(d);
    e.board->arena_bytes = d->bytes;
    e.board->capacity = e.board->shards = d->shards;
    e.board->parts = parts;
    e.board->params = d->count;
    for (i = 0; i < d->count; i++) e.in_area[i] = d->tensors[i].data == NULL;
    ref = e.board->self;
  }
  r = cddp__round(g, CDDP__SCOPE_ALL, CDDP__KIND_DDP_CREATE, CDDP__PHASE_BLOCK, 0, &ref,
                  sizeof ref);
  if (r != CDDP_OK) return r;
  ref = cddp__op_header_of(g, 0, g->round)->u.ref;
  if (ref.kind == CDDP__REF_NONE)
    r = cddp__fail(CDDP_OUT_OF_MEMORY, "rank 0 had no memory for what ranks share");
  else
    r = cddp__locate(g->host, &ref, &at);
  if (r == CDDP_OK) r = cddp__elastic_attach(d, (char *)at, parts);
  if (r == CDDP_OK) {
    cddp__elastic_enter(d, g->rank);
    cddp__store64(&d->elastic->members[g->rank].state,
                  cddp__member_state(CDDP__MEMBER_LIVE, 1));
  }
  return cddp__consensus(g, r, NULL, 0, NULL);
}

/* --- who is there --- */

static void cddp__name_member(const cddp_ddp *d, int member, char *out, size_t n) {
  const cddp__elastic_member *m = &d->elastic->members[member];
  cddp__append(out, n, "rank %d (%spid %u)", m->rank,
               d->group->host->threads ? "a thread of " : "", m->pid);
}

/* Whether the member's process has ended, or (a thread) its function. */
static bool cddp__member_gone(const cddp_ddp *d, int member) {
  const cddp__elastic_member *m = &d->elastic->members[member];
  const cddp__host *h = d->group->host;
  uint32_t state;
  struct pollfd fd;
  if (h->threads) {
    state = h->slots != NULL ? cddp__load32(&h->slots[m->index].state) : 0;
    return state == CDDP__SLOT_DEAD || state == CDDP__SLOT_LEFT;
  }
  fd.fd = d->elastic->views[member].life == cddp__load32(&m->life)
              ? d->elastic->views[member].pidfd
              : -1;
  fd.events = POLLIN;
  fd.revents = 0;
  if (fd.fd >= 0 && poll(&fd, 1, 0) == 1) return true;
  return fd.fd < 0 && cddp__process_born(m->pid) != m->born;
}

/* What a member that is not there any more had taken: a shard that is in its table is done. */
static cddp_result cddp__free_shard(cddp_ddp *d, int shard, uint64_t word) {
  cddp__elastic *e = d->elastic;
  int owner = cddp__unit_owner(word), count, i, state = CDDP__UNIT_FREE;
  const cddp__elastic_node *nodes;
  uint64_t table;
  cddp_result r = cddp__elastic_see(d, owner);
  if (r != CDDP_OK) return r;
  count = cddp__table_count(e, owner, e->step, &table);
  nodes = cddp__table(d, e->views[owner].kit, table);
  for (i = 0; i < count; i++)
    if (shard >= nodes[i].first && shard < nodes[i].first + nodes[i].width)
      state = CDDP__UNIT_DONE;
  CDDP__POINT("elastic free");
  if (cddp__swap64(&e->shards[shard], word, cddp__unit(e->step, state, owner, 0)))
    cddp__elastic_changed(e->board);
  return CDDP_OK;
}

/* Looks after the other members: who is gone is lost, and its shards are free. */
static cddp_result cddp__elastic_look(cddp_ddp *d) {
  cddp__elastic *e = d->elastic;
  cddp_result r = CDDP_OK;
  uint64_t word, now;
  char who[64];
  int m, shard;
  for (m = 0; m < d->shards; m++) {
    word = cddp__load64(&e->members[m].state);
    if (m == e->me || (word & 255) != CDDP__MEMBER_LIVE || !cddp__member_gone(d, m)) continue;
    now = cddp__load64(&e->board->step); /* the member may have been a step ahead of this rank */
    CDDP__POINT("elastic lost");
    if (!cddp__swap64(&e->members[m].state, word, cddp__member_state(CDDP__MEMBER_LOST, now)))
      continue;
    who[0] = 0;
    cddp__name_member(d, m, who, sizeof who);
    cddp__log(&d->group->host->logger, 1, "%s is lost; the others do its shards of step %" PRIu64,
              who, d->steps);
    cddp__record_event(d->group, "lost", (uint64_t)e->members[m].rank, CDDP_PEER_LOST);
    cddp__elastic_changed(e->board);
  }
  for (shard = 0; r == CDDP_OK && shard < d->shards; shard++) {
    word = cddp__load64(&e->shards[shard]);
    if (cddp__unit_state(word, e->step) != CDDP__UNIT_TAKEN || word >> 26 != e->step) continue;
    if (cddp__member_is(e, cddp__unit_owner(word), CDDP__MEMBER_LIVE)) continue;
    r = cddp__free_shard(d, shard, word);
  }
  return r;
}

/* Waits for board.changes to be no longer `seen`, or for a moment. w: begins anew whenever
   something has changed; its deadline is the caller's to look at. */
static cddp_result cddp__elastic_wait(cddp_ddp *d, cddp__wait *w, uint32_t seen) {
  cddp__elastic *e = d->elastic;
  cddp__board *b = e->board;
  double left;
  cddp_result r = cddp__elastic_failure(d);
  int i;
  if (r != CDDP_OK) return r;
  if (w->deadline == 0 || seen != e->seen) {
    double look = w->look;
    cddp__wait_begin(w, d->group->timeout_s, d->group->yields);
    w->look = w->look - CDDP__NAP_S + CDDP__ELASTIC_LOOK_S;
    if (look != 0 && look < w->look) w->look = look;
    e->seen = seen;
  }
  for (i = 0; i < d->group->spin; i++) {
    if (cddp__load32(&b->changes) != seen) return CDDP_OK;
    cddp__pause();
  }
  if (cddp__wait_yields(w)) return CDDP_OK;
  cddp__serve_idle(d->group);
  cddp__wait_look(w);
  if (w->due) {
    w->look = cddp__now() + CDDP__ELASTIC_LOOK_S;
    if ((r = cddp__elastic_look(d)) != CDDP_OK) return r;
  }
  left = w->deadline - cddp__now();
  if (left > CDDP__ELASTIC_LOOK_S) left = CDDP__ELASTIC_LOOK_S;
  cddp__add32(&b->sleepers, 1);
  if (cddp__load32(&b->changes) == seen) cddp__futex_wait(&b->changes, seen, left);
  cddp__add32(&b->sleepers, (uint32_t)-1);
  if (cddp__load32(&b->changes) != seen) w->late = false;
  return CDDP_OK;
}

/* The members that are LIVE now into `living`; returns the hash of them and their lives. */
static uint64_t cddp__see_living(const cddp__elastic *e, int capacity, uint64_t *living) {
  uint64_t identity = 1;
  uint32_t seen[2];
  int m;
  memset(living, 0, CDDP__MAX_RANKS / 8);
  for (m = 0; m < capacity; m++) {
    if (!cddp__member_is(e, m, CDDP__MEMBER_LIVE)) continue;
    living[m / 64] |= (uint64_t)1 << m % 64;
    seen[0] = (uint32_t)m;
    seen[1] = cddp__load32(&e->members[m].life);
    identity = cddp__hash64(identity, seen, sizeof seen);
  }
  return identity | 1;
}

/* The members in that set are dealt all shards. */
static void cddp__take_deal(cddp_ddp *d, const uint64_t *living) {
  cddp__elastic *e = d->elastic;
  int m, i, first, count;
  e->living_count = 0;
  for (m = 0; m < d->shards; m++)
    if ((living[m / 64] >> m % 64 & 1) != 0) e->living[e->living_count++] = m;
  for (m = 0; m < e->living_count; m++) {
    cddp__deal_shards(d->shards, e->living_count, m, &first, &count);
    for (i = first; i < first + count; i++) e->dealt[i] = e->living[m];
  }
  cddp__record_event(d->group, "dealt", (uint64_t)e->living_count, CDDP_OK);
}

/* This rank begins its step: takes the deal that is in force, or puts its own in force. */
static void cddp__elastic_begin(cddp_ddp *d) {
  cddp__elastic *e = d->elastic;
  cddp__elastic_member *m = &e->members[e->me];
  int slot = (int)(e->step & 1);
  uint64_t deal = cddp__load64(&e->board->deal);
  if (e->begun) return;
  if (deal >> 12 != e->step + 1) {
    m->identity[slot] = cddp__see_living(e, d->shards, m->living[slot]);
    CDDP__POINT("elastic deal");
    (void)cddp__swap64(&e->board->deal, deal, (e->step + 1) << 12 | (uint64_t)e->me);
    deal = cddp__load64(&e->board->deal);
    CDDP__POINT("elastic dealt");
  }
  CDDP_ASSERT(deal >> 12 == e->step + 1);
  m = &e->members[deal & 4095];
  if (m->identity[slot] != e->identity) cddp__take_deal(d, m->living[slot]);
  e->identity = m->identity[slot];
  e->begun = true;
}

/* --- shards --- */

/* Puts this rank's nodes in force, in which `node` takes the place of those in [low, high). */
static void cddp__put_nodes(cddp_ddp *d, const cddp__elastic_node *node, int low, int high) {
  cddp__elastic *e = d->elastic;
  uint64_t word;
  int count = cddp__table_count(e, e->me, e->step, &word), which = (int)(word & 1) ^ 1;
  const cddp__elastic_node *old = cddp__table(d, e->kit, word);
  cddp__elastic_node *new_ = cddp__table(d, e->kit, (uint64_t)which);
  CDDP_ASSERT(count + 1 - (high - low) <= cddp__table_room(d));
  memcpy(new_, old, (size_t)low * sizeof *new_);
  new_[low] = *node;
  memcpy(new_ + low + 1, old + high, (size_t)(count - high) * sizeof *new_);
  CDDP__POINT("elastic nodes");
  cddp__store64(&e->members[e->me].nodes,
                cddp__table_word(e->step, count + 1 - (high - low), which));
  CDDP__POINT("elastic nodes put");
}

/* A slot that no node is in. */
static int cddp__spare_slot(cddp_ddp *d, const cddp__elastic_node *nodes, int count) {
  cddp__elastic *e = d->elastic;
  int slot = 0, i;
  for (i = 0; i < count; i++)
    if (nodes[i].slot == slot) slot++, i = -1;
  CDDP_ASSERT(slot <= cddp__table_room(d));
  if (slot >= e->slots_used) {
    e->slots_used = slot + 1;
    cddp__populate(e->kit + e->slots_at + (size_t)slot * d->slot_room, d->slot_room,
                   d->group->host->fd >= 0);
  }
  return slot;
}

/* The shard in the arena is a node, or becomes one with others. more: the arena is to be clear, for
   the next one. */
static void cddp__keep_shard(cddp_ddp *d, int shard, bool more) {
  cddp__elastic *e = d->elastic;
  int slots[CDDP__FOLD_DEPTH + 1], widths[CDDP__FOLD_DEPTH + 1], low, high, at, i, n = 0;
  cddp__elastic_node node;
  uint64_t word;
  int count = cddp__table_count(e, e->me, e->step, &word);
  const cddp__elastic_node *nodes = cddp__table(d, e->kit, word);
  bool kept = e->arena == CDDP__ARENA_NODE; /* as a node, which now goes to a slot */
  at = cddp__siblings(nodes, count, shard, d->shards, &low, &high);
  if (kept) high = low + 1;
  node.first = shard;
  node.width = 1;
  node.slot = -1;
  for (i = low; i <= high && !kept; i++) { /* the shard itself at its place among them */
    const cddp__elastic_node *from = i < at ? &nodes[i] : i > at ? &nodes[i - 1] : &node;
    slots[n] = from->slot;
    widths[n++] = from->width == 1 && from->slot >= 0 ? -1 : from->width;
  }
  if (low < high && !kept) {
    node.first = at > low ? nodes[low].first : shard;
    for (i = low; i < high; i++) node.width += nodes[i].width;
  }
  if (kept) slots[n] = -1, widths[n++] = 1;
  if (n > 1 || more) {
    node.slot = cddp__spare_slot(d, nodes, count);
    cddp__merge_nodes(d, e->me, node.slot, slots, widths, n, more);
    if (more) cddp__clear_own(d);
  }
  e->arena = more ? CDDP__ARENA_CLEAR : n > 1 ? CDDP__ARENA_SPENT : CDDP__ARENA_NODE;
  cddp__put_nodes(d, &node, low, high);
}

/* The shard that this rank may take next, -1: none. *all_done: nor will there be one. */
static int cddp__pick_shard(const cddp_ddp *d, bool *all_done) {
  const cddp__elastic *e = d->elastic;
  int i, other = -1;
  *all_done = true;
  for (i = 0; i < d->shards; i++) {
    int state = cddp__unit_state(cddp__load64(&e->shards[i]), e->step);
    if (state != CDDP__UNIT_DONE) *all_done = false;
    if (state != CDDP__UNIT_FREE) continue;
    if (e->dealt[i] == e->me) return i;
    if (other < 0 && !cddp__member_is(e, e->dealt[i], CDDP__MEMBER_LIVE)) other = i;
  }
  return other;
}

/* Takes that shard, unless another member has. */
static bool cddp__take_shard(cddp_ddp *d, int shard) {
  cddp__elastic *e = d->elastic;
  uint64_t word = cddp__load64(&e->shards[shard]), table;
  const cddp__elastic_node *nodes;
  int i;
  if (cddp__unit_state(word, e->step) != CDDP__UNIT_FREE) return false;
  CDDP__POINT("elastic take");
  if (!cddp__swap64(&e->shards[shard], word, cddp__unit(e->step, CDDP__UNIT_TAKEN, e->me, 0)))
    return false;
  CDDP__POINT("elastic taken");
  e->shard = shard;
  if (e->arena == CDDP__ARENA_NODE) { /* one without a slot */
    (void)cddp__table_count(e, e->me, e->step, &table);
    nodes = cddp__table(d, e->kit, table);
    for (i = 0; nodes[i].slot >= 0; i++) {}
    cddp__keep_shard(d, nodes[i].first, true);
  } else if (e->arena == CDDP__ARENA_SPENT) {
    memset(d->arena, 0, d->bytes);
    cddp__clear_own(d);
    e->arena = CDDP__ARENA_CLEAR;
  }
  d->taken++;
  return true;
}

/* The deadline has passed: names the members that are waited for. update: in an update. */
static cddp_result cddp__elastic_late(cddp_ddp *d, bool update) {
  cddp__elastic *e = d->elastic;
  char text[CDDP__ERROR_MAX] = "";
  int i, n = 0;
  for (i = 0; i < d->shards && n < 4 && !update; i++) {
    uint64_t word = cddp__load64(&e->shards[i]);
    int state = cddp__unit_state(word, e->step);
    if (state == CDDP__UNIT_DONE) continue;
    cddp__append(text, sizeof text, "%s", n++ > 0 ? ", " : "");
    cddp__name_member(d, state == CDDP__UNIT_TAKEN ? cddp__unit_owner(word) : e->dealt[i], text,
                      sizeof text);
    cddp__append(text, sizeof text, " %s shard %d",
                 state == CDDP__UNIT_TAKEN ? "is not done with" : "has not taken", i);
  }
  for (i = 0; i < d->shards && n < 4 && update; i++) {
    bool late = cddp__load64(&e->members[i].at) <= 2 * e->step;
    if (i == e->me || !cddp__member_is(e, i, CDDP__MEMBER_LIVE)) continue;
    if (!late && cddp__load32(&e->members[i].inside) == 0) continue;
    cddp__append(text, sizeof text, "%s", n++ > 0 ? ", " : "");
    cddp__name_member(d, i, text, sizeof text);
    cddp__append(text, sizeof text, " %s", late ? "did not come to" : "is not done with");
  }
  return cddp__fail(CDDP_TIMEOUT, "timed out after %g s in step %" PRIu64 ": %s%s",
                    d->group->timeout_s, d->steps, text, update ? " the update" : "");
}

/* *taken: this rank has the shard e->shard to do. False: all are done. */
static cddp_result cddp__next_of_step(cddp_ddp *d, bool *taken) {
  cddp__elastic *e = d->elastic;
  bool all_done = false;
  cddp_result r = CDDP_OK;
  cddp__wait w;
  int shard;
  memset(&w, 0, sizeof w);
  *taken = false;
  cddp__elastic_begin(d);
  while (r == CDDP_OK) {
    uint32_t seen = cddp__load32(&e->board->changes);
    if ((r = cddp__elastic_failure(d)) != CDDP_OK) return r;
    shard = cddp__pick_shard(d, &all_done);
    if (e->shard >= 0) {
      cddp__keep_shard(d, e->shard, shard >= 0);
      cddp__store64(&e->shards[e->shard], cddp__unit(e->step, CDDP__UNIT_DONE, e->me, 0));
      CDDP__POINT("elastic done");
      e->shard = -1;
      cddp__arm(d);
      cddp__elastic_changed(e->board);
      continue;
    }
    *taken = shard >= 0 && cddp__take_shard(d, shard);
    if (*taken || all_done) return CDDP_OK;
    if (shard < 0) r = cddp__elastic_wait(d, &w, seen);
    if (r == CDDP_OK && w.late) r = cddp__elastic_late(d, false);
  }
  return r;
}

static bool cddp__elastic_next(cddp_ddp *d, int *shard) {
  bool taken;
  cddp_result r = cddp__next_of_step(d, &taken);
  if (r != CDDP_OK) (void)cddp__give_up(d, r);
  if (!taken) return false;
  *shard = d->elastic->shard;
  return true;
}

/* --- the update --- */

/* One update, as this rank does its parts of it. */
typedef struct cddp__elastic_update {
  cddp_ddp *d;
  cddp_optim *s;  /* NULL: the means alone, for cddp_ddp_wait */
  bool own_states; /* states are still where cddp_optim_step has them */
  bool collected; /* ddp.nodes are those of this step */
} cddp__elastic_update;

/* What the members' tables have: each shard once. Needs a part that this rank has taken, so that
   the step is not over. */
static cddp_result cddp__collect_nodes(cddp_ddp *d) {
  cddp__elastic *e = d->elastic;
  int shard = 0, n = 0, i, count, owner;
  const cddp__elastic_node *nodes;
  uint64_t table;
  cddp_result r;
  d->leaves = true;
  while (shard < d->shards) {
    owner = cddp__unit_owner(cddp__load64(&e->shards[shard]));
    if ((r = cddp__elastic_see(d, owner)) != CDDP_OK) return r;
    count = cddp__table_count(e, owner, e->step, &table);
    nodes = cddp__table(d, e->views[owner].kit, table);
    for (i = 0; i < count && nodes[i].first != shard; i++) {}
    CDDP_ASSERT(i < count);
    d->nodes[n].rank = owner;
    d->nodes[n].slot = nodes[i].slot;
    d->widths[n++] = nodes[i].width == 1 && nodes[i].slot >= 0 ? -1 : nodes[i].width;
    if (nodes[i].slot >= 0) d->leaves = false;
    shard += nodes[i].width;
  }
  d->node_count = n;
  return CDDP_OK;
}

/* The states and weights of a block in a member's log: k = 0 .. CDDP__STATES. */
static char *cddp__log_at(const cddp__elastic *e, char *kit, int k) {
  return kit + e->log_at + (size_t)k * CDDP__BLOCK * sizeof(double);
}

/* The new weights and states of n elements of parameter i, from offset `at` of the arena on, into
   this rank's log. u: its states begin in the log. */
static void cddp__compute_block(const cddp__elastic_update *x, int i, const cddp__update *u,
                                size_t at, size_t n) {
  double sum[CDDP__BLOCK];
  cddp_ddp *d = x->d;
  cddp__elastic *e = d->elastic;
  size_t bytes = n * cddp__dtype_size(u->dtype), inside = at - d->tensors[i].offset;
  char *weights = cddp__log_at(e, e->kit, CDDP__STATES);
  cddp__fused_args args;
  int k;
  memcpy(weights, (char *)d->params[i].data + inside, bytes);
  for (k = 0; k < x->s->states; k++) {
    const char *old = (const char *)x->s->state[k * x->s->count + i];
    if (!x->own_states) old = cddp__area(e, CDDP__AREA_STATES + k, at);
    else if (old != NULL) old += inside;
    if (old != NULL) memcpy(u->states[k], old, bytes);
    else memset(u->states[k], 0, bytes);
    args.states[k] = (cddp__f32 *)(void *)u->states[k];
  }
  cddp__reduce_shards(d, sum, d->sources, at, n, u->dtype);
  if (u->loop == NULL || u->dtype != CDDP_F32) {
    cddp__update_run(u, 0, weights, sum, n);
    return;
  }
  args.scalars = &u->scalars;
  args.mean = (float)u->scalars.sign;
  args.gradients[0] = (cddp__f32 *)(void *)sum;
  args.weights[0] = (cddp__f32 *)(void *)weights;
  u->loop(&args, 1, n);
}

/* Writes a block from a log to where it belongs. Again and again, if need be. */
static void cddp__write_block(const cddp__elastic_update *x, int i, char *kit, size_t at,
                                size_t n) {
  cddp_ddp *d = x->d;
  cddp__elastic *e = d->elastic;
  size_t bytes = n * cddp__dtype_size(d->params[i].dtype), inside = at - d->tensors[i].offset;
  const char *weights = cddp__log_at(e, kit, CDDP__STATES);
  int k, m;
  for (k = 0; k < x->s->states; k++)
    memcpy(cddp__area(e, CDDP__AREA_STATES + k, at), cddp__log_at(e, kit, k), bytes);
  if (e->in_area[i]) memcpy(cddp__area(e, CDDP__AREA_WEIGHTS, at), weights, bytes);
  for (k = 0; k < e->arrived_count; k++) {
    m = e->arrived[k];
    if (!e->in_area[i]) memcpy(e->views[m].data[i] + inside, weights, bytes);
    memset(d->mirrors[m] + at, 0, bytes);
  }
}

/* The block of parameter i at offset `at`, of n elements: into the log, and out of it. logged: it
   is in the log of the member `log` already. */
static void cddp__do_block(const cddp__elastic_update *x, int part, int i, const cddp__update *u,
                           size_t at, size_t n, bool logged, int log) {
  cddp__elastic *e = x->d->elastic;
  cddp__elastic_part *p = &e->parts[part];
  if (x->s == NULL) {
    cddp__reduce_shards(x->d, cddp__area(e, CDDP__AREA_MEANS, at), x->d->sources, at, n, u->dtype);
    return;
  }
  if (!logged) {
    cddp__compute_block(x, i, u, at, n);
    CDDP__POINT("elastic computed");
    cddp__store64(&p->progress, cddp__progress(e->step, at | 1));
  }
  CDDP__POINT("elastic logged");
  cddp__write_block(x, i, logged ? e->views[log].kit : e->kit, at, n);
  CDDP__POINT("elastic published");
  cddp__store64(&p->progress,
                cddp__progress(e->step, at + n * cddp__dtype_size(u->dtype)));
  if (logged && log != e->me) /* whose block it was is of no use any more */
    cddp__store64(&p->word, cddp__unit(e->step, CDDP__UNIT_TAKEN, e->me, e->me));
  CDDP__POINT("elastic block");
}

/* A part that this rank has taken, from where its owner before has come to. */
static void cddp__do_part(const cddp__elastic_update *x, int part, int log) {
  cddp_ddp *d = x->d;
  cddp__elastic *e = d->elastic;
  uint64_t progress = cddp__load64(&e->parts[part].progress);
  size_t begin, end, at, n, high;
  cddp__update u;
  bool logged;
  int i, j, k;
  cddp__slice(d->bytes, CDDP__CACHE_LINE, e->board->parts, part, &begin, &end);
  logged = progress >> CDDP__PLACE_BITS == cddp__progress(e->step, 0) >> CDDP__PLACE_BITS;
  if (logged) begin = (size_t)(progress & (((uint64_t)1 << CDDP__PLACE_BITS) - 2));
  logged = logged && (progress & 1) != 0;
  if (x->s == NULL) cddp__store64(&e->parts[part].progress, cddp__progress(e->step, begin));
  for (j = 0; j < d->count; j++) {
    const cddp__tensor *t = &d->tensors[i = e->order[j]];
    size_t esize = cddp__dtype_size(d->params[i].dtype);
    at = cddp__max(begin, t->offset);
    high = cddp__min(end, t->offset + t->bytes);
    if (at >= high) continue;
    memset(&u, 0, sizeof u);
    if (x->s != NULL) u = cddp__update_of(x->s, i, x->s->state + i, x->s->count);
    u.dtype = d->params[i].dtype;
    for (k = 0; x->s != NULL && k < x->s->states; k++) u.states[k] = cddp__log_at(e, e->kit, k);
    for (; at < high; at += n * esize, logged = false) {
      n = cddp__min(CDDP__BLOCK, (high - at) / esize);
      cddp__do_block(x, part, i, &u, at, n, logged, log);
    }
  }
}

/* The part that this rank does next, taken; -1: none. *over: all are done. Parts dealt to it come
   first, as the deal has them; then any. */
static int cddp__claim_part(cddp_ddp *d, int *log, bool *over) {
  cddp__elastic *e = d->elastic;
  int parts = e->board->parts, first = 0, count = parts, k, part, owner;
  for (k = 0; k < e->living_count && e->living[k] != e->me; k++) {}
  if (k < e->living_count) cddp__deal_shards(parts, e->living_count, k, &first, &count);
  *over = true;
  for (k = 0; k < parts; k++) {
    uint64_t word = cddp__load64(&e->parts[part = (first + k) % parts].word);
    int state = cddp__unit_state(word, e->step);
    if (state == CDDP__UNIT_DONE) continue;
    *over = false;
    owner = cddp__unit_owner(word);
    if (state == CDDP__UNIT_TAKEN && cddp__member_is(e, owner, CDDP__MEMBER_LIVE)) continue;
    *log = state == CDDP__UNIT_TAKEN ? cddp__unit_log(word) : e->me;
    CDDP__POINT("elastic part");
    if (cddp__swap64(&e->parts[part].word, word,
                     cddp__unit(e->step, CDDP__UNIT_TAKEN, e->me, *log)))
      return part;
    k--; /* another member has been faster: what has it become? */
  }
  return -1;
}

/* All parts of the update, with the other members; on return the step is completed. */
static cddp_result cddp__do_parts(cddp__elastic_update *x) {
  cddp_ddp *d = x->d;
  cddp__elastic *e = d->elastic;
  cddp_result r = CDDP_OK;
  int part, log = 0;
  bool over;
  cddp__wait w;
  memset(&w, 0, sizeof w);
  while (r == CDDP_OK && cddp__load64(&e->board->step) == e->step) {
    uint32_t seen = cddp__load32(&e->board->changes);
    part = cddp__claim_part(d, &log, &over);
    if (part >= 0) {
      if (!x->collected && (r = cddp__collect_nodes(d)) != CDDP_OK) return r;
      x->collected = true;
      if ((r = cddp__elastic_see(d, log)) != CDDP_OK) return r;
      CDDP__POINT("elastic part taken");
      cddp__do_part(x, part, log);
      cddp__store64(&e->parts[part].word, cddp__unit(e->step, CDDP__UNIT_DONE, e->me, 0));
      CDDP__POINT("elastic part done");
      r = cddp__elastic_failure(d);
    } else if (over) {
      CDDP__POINT("elastic step");
      (void)cddp__swap64(&e->board->step, e->step, e->step + 1);
      cddp__elastic_changed(e->board);
    } else {
      r = cddp__elastic_wait(d, &w, seen);
      if (r == CDDP_OK && w.late) r = cddp__elastic_late(d, true);
    }
  }
  return r;
}

/* Whether a member has called what this rank has. */
static cddp_result cddp__compare_members(cddp_ddp *d) {
  cddp__elastic *e = d->elastic;
  const cddp__elastic_call *mine = &e->members[e->me].calls[e->step & 1], *c;
  char who[64] = "", mode[2][96];
  int m;
  for (m = 0; m < d->shards; m++) {
    c = &e->members[m].calls[e->step & 1];
    if (!cddp__member_is(e, m, CDDP__MEMBER_LIVE) || c->kind == CDDP__KIND_DDP_JOIN) continue;
    if (c->kind == mine->kind && c->check == mine->check && c->fp_mode == mine->fp_mode &&
        c->steps == mine->steps)
      continue;
    cddp__name_member(d, m, who, sizeof who);
    if (c->kind != mine->kind)
      return cddp__fail(CDDP_MISMATCH,
                        "ranks disagree in step %" PRIu64 ": rank %d called %s, %s called %s",
                        d->steps, d->group->rank, cddp__shapes[mine->kind].name, who,
                        cddp__shapes[c->kind].name);
    if (c->steps != mine->steps)
      return cddp__fail(CDDP_MISMATCH,
                        "ranks disagree: rank %d is in step %" PRIu64 ", %s in step %" PRIu64
                        "; load the same checkpoint on all ranks",
                        d->group->rank, d->steps, who, c->steps);
    cddp__describe_fp_mode(mine->fp_mode, mode[0], sizeof mode[0]);
    cddp__describe_fp_mode(c->fp_mode, mode[1], sizeof mode[1]);
    return cddp__fail(CDDP_MISMATCH,
                      "ranks disagree in step %" PRIu64 ": %s called %s with other %s than rank %d",
                      d->steps, who, cddp__shapes[c->kind].name,
                      c->fp_mode == mine->fp_mode ? "settings (learning rate, momentum ...)"
                                                  : "floating-point settings",
                      d->group->rank);
  }
  return CDDP_OK;
}

/* This rank comes to the update, and waits for the other members. */
static cddp_result cddp__meet_members(cddp_ddp *d, const cddp_optim *s) {
  cddp__elastic *e = d->elastic;
  cddp__elastic_member *mine = &e->members[e->me];
  cddp__elastic_call *c = &mine->calls[e->step & 1];
  cddp_result r = CDDP_OK;
  int m = 0;
  cddp__wait w;
  memset(&w, 0, sizeof w);
  c->kind = s != NULL ? CDDP__KIND_DDP_STEP : CDDP__KIND_DDP_WAIT;
  c->check = s != NULL ? s->check | (uint64_t)(s->share != NULL) : 0;
  c->steps = d->steps;
  c->fp_mode = cddp__fp_mode();
  cddp__exchange32(&mine->inside, 1);
  CDDP__POINT("elastic arrive");
  cddp__store64(&mine->at, 2 * e->step + 1);
  CDDP__POINT("elastic arrived");
  cddp__elastic_changed(e->board);
  while (r == CDDP_OK) {
    uint32_t seen = cddp__load32(&e->board->changes);
    while (m < d->shards && (!cddp__member_is(e, m, CDDP__MEMBER_LIVE) ||
                             cddp__load64(&e->members[m].at) > 2 * e->step))
      m++;
    if (m == d->shards) break;
    r = cddp__elastic_wait(d, &w, seen);
    if (r == CDDP_OK && w.late) r = cddp__elastic_late(d, true);
  }
  if (r == CDDP_OK) r = cddp__elastic_failure(d);
  if (r == CDDP_OK) r = cddp__compare_members(d);
  e->arrived_count = 0;
  for (m = 0; m < d->shards && r == CDDP_OK; m++) { /* those that are lost meanwhile do no harm */
    if (!cddp__member_is(e, m, CDDP__MEMBER_LIVE)) continue;
    if (e->members[m].calls[e->step & 1].kind == CDDP__KIND_DDP_JOIN) continue;
    r = cddp__elastic_see(d, m);
    e->arrived[e->arrived_count++] = m;
  }
  return r;
}

/* After an update that has failed: the other members may still write to this rank's memory. Like
   cddp__exit. */
static void cddp__leave_update(cddp_ddp *d) {
  cddp__elastic *e = d->elastic;
  double deadline = cddp__now() + 5;
  int m;
  for (m = 0; m < d->shards; m++)
    while (cddp__member_is(e, m, CDDP__MEMBER_LIVE) &&
           cddp__load32(&e->members[m].inside) != 0 && !cddp__member_gone(d, m)) {
      if (cddp__now() >= deadline) {
        cddp__arena_unshare(d->group->host);
        return;
      }
      cddp__sleep(1e-5);
    }
}

/* States that lie on the board come back to where cddp_optim_step has them. */
static cddp_result cddp__fetch_states(cddp_ddp *d) {
  cddp_optim *s;
  int i, k;
  if (d->shares == NULL) return CDDP_OK;
  s = d->shares->optim;
  for (i = 0; i < d->count; i++) {
    if (cddp__optim_skips(s, i)) continue;
    if (cddp__need_states(s, i) != CDDP_OK) return CDDP_OUT_OF_MEMORY;
    for (k = 0; k < s->states; k++)
      memcpy(s->state[k * s->count + i],
             cddp__area(d->elastic, CDDP__AREA_STATES + k, d->tensors[i].offset),
             d->tensors[i].bytes);
  }
  cddp__share_free(s);
  return CDDP_OK;
}

/* From now on the states of s lie on the board. */
static cddp_result cddp__share_states(cddp_ddp *d, cddp_optim *s) {
  const cddp_allocator *a = &d->group->host->allocator;
  cddp__share *h;
  int k;
  if (s->states == 0 || s->share != NULL) return CDDP_OK;
  if ((h = (cddp__share *)cddp__calloc(a, 1, sizeof *h)) == NULL) return CDDP_OUT_OF_MEMORY;
  h->ddp = d;
  h->optim = s;
  d->shares = h;
  s->share = h;
  s->drop = cddp__share_free;
  for (k = 0; k < s->count * s->states; k++) {
    cddp__free(&s->allocator, s->state[k]);
    s->state[k] = NULL;
  }
  return CDDP_OK;
}

/* What this rank takes from the board when the step is completed: weights, or (s NULL) means. */
static void cddp__fetch_results(cddp_ddp *d, const cddp_optim *s) {
  cddp__elastic *e = d->elastic;
  int i, area = s != NULL ? CDDP__AREA_WEIGHTS : CDDP__AREA_MEANS;
  for (i = 0; i < d->count; i++) {
    const cddp__tensor *t = &d->tensors[i];
    void *to = s != NULL ? d->params[i].data : d->params[i].grad;
    if (s == NULL || e->in_area[i]) cddp__copy(to, cddp__area(e, area, t->offset), t->bytes);
  }
}

/* Areas that the update writes get huge pages, the first time. */
static void cddp__use_areas(cddp_ddp *d, const cddp_optim *s) {
  cddp__elastic *e = d->elastic;
  int k;
  for (k = 0; k < CDDP__AREAS; k++) {
    bool used = k == CDDP__AREA_MEANS     ? s == NULL
                : k == CDDP__AREA_WEIGHTS ? memchr(e->in_area, 1, (size_t)d->count) != NULL
                                          : s != NULL && k < CDDP__AREA_STATES + s->states;
    if (!used || (e->areas_used >> k & 1) != 0) continue;
    e->areas_used |= 1u << k;
    cddp__populate(cddp__area(e, k, 0), e->area_room, d->group->host->fd >= 0);
  }
}

static cddp_result cddp__elastic_update_all(cddp_ddp *d, cddp_optim *s) {
  cddp__elastic *e = d->elastic;
  cddp__elastic_update x;
  cddp_result r = cddp__meet_members(d, s);
  x.d = d;
  x.s = s;
  x.own_states = s != NULL && s->share == NULL;
  x.collected = false;
  if (r == CDDP_OK) cddp__use_areas(d, s);
  if (r == CDDP_OK) r = cddp__do_parts(&x);
  cddp__store32(&e->members[e->me].inside, 0);
  if (r != CDDP_OK) return r;
  cddp__fetch_results(d, s);
  if (s == NULL) return cddp__fetch_states(d);
  r = cddp__share_states(d, s);
  if (r == CDDP_OK) r = cddp__write_copies(s);
  if (r == CDDP_OK) r = cddp__clear_gradients(d, s, true);
  return r;
}

/* cddp_ddp_step, or (s NULL) cddp_ddp_wait, of an elastic model. */
static cddp_result cddp__elastic_step(cddp_ddp *d, cddp_optim *s) {
  cddp__elastic *e = d->elastic;
  bool done = true;
  cddp_result r;
  uint64_t record;
  if (d->failed) return cddp__fail(d->fail_result, "%s", d->fail_text);
  if (s == NULL && d->no_sync) return CDDP_OK;
  record = cddp__record_begin(d->group, s != NULL ? CDDP__KIND_DDP_STEP : CDDP__KIND_DDP_WAIT,
                              d->steps, 0);
  cddp__elastic_begin(d);
  (void)cddp__pick_shard(d, &done);
  r = cddp__elastic_failure(d);
  if (r == CDDP_OK && (e->shard >= 0 || !done))
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "rank %d came to the update of step %" PRIu64 " before all shards are done; "
                   "call cddp_ddp_next_shard until it returns false",
                   d->group->rank, d->steps);
  if (r == CDDP_OK && s != NULL && s->share == NULL && d->shares != NULL)
    r = cddp__fail(CDDP_UNSUPPORTED, "an elastic cddp_ddp steps with one cddp_optim; destroy the "
                                     "other, or call cddp_ddp_wait in between");
  if (r == CDDP_OK) r = cddp__elastic_update_all(d, s);
  if (r == CDDP_OK) {
    e->step++;
    e->begun = false;
    e->arena = CDDP__ARENA_CLEAR;
    d->taken = 0;
    d->steps++;
    d->present = e->living_count;
    cddp__arm(d);
  } else {
    r = cddp__give_up(d, r);
    cddp__store32(&e->members[e->me].inside, 0);
    cddp__leave_update(d);
    r = cddp__ddp_fail(d, r);
  }
  cddp__record_finish(d->group, record, r);
  return r;
}

/* --- the group of those that are there; leaving --- */

/* The control block for the group of the living: this rank's, or another's that was faster. */
static cddp_result cddp__living_block(cddp_ddp *d, cddp__ref *ref, char **block) {
  cddp__elastic *e = d->elastic;
  cddp__host *h = d->group->host;
  size_t bytes = cddp__block_bytes(e->living_count, e->living_count);
  uint64_t identity = e->identity & ~(uint64_t)4095, word = cddp__load64(&e->board->grouped);
  cddp_result r;
  void *at = NULL;
  if ((word & ~(uint64_t)4095) != identity) {
    if ((at = cddp__arena_alloc(h, bytes, CDDP__FOR_BLOCK)) == NULL) return CDDP_OUT_OF_MEMORY;
    cddp__store32(&((cddp__control_block *)at)->size, (uint32_t)e->living_count);
    e->members[e->me].block = cddp__ref_of(h, at, bytes);
    CDDP__POINT("elastic group");
    if (!cddp__swap64(&e->board->grouped, word, identity | (uint64_t)e->me))
      cddp__arena_free(h, at);
    word = cddp__load64(&e->board->grouped);
  }
  *ref = e->members[word & 4095].block;
  r = cddp__locate(h, ref, &at);
  *block = (char *)at;
  return r;
}

CDDPDEF cddp_group *cddp_ddp_group(cddp_ddp *d) {
  cddp__elastic *e = d != NULL ? d->elastic : NULL;
  cddp__ref ref;
  char *block;
  cddp_result r;
  int rank = -1, k, *indices;
  cddp__enter_call(__func__);
  if (d == NULL) cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_ddp_group: the cddp_ddp is NULL");
  if (e == NULL) return d != NULL ? d->group : NULL;
  if (d->failed) cddp__fail(d->fail_result, "%s", d->fail_text);
  if (d->failed) return NULL;
  cddp__elastic_begin(d);
  if (e->group != NULL && e->grouped == e->identity) return e->group;
  if (e->group != NULL) cddp__group_leave(e->group);
  e->group = NULL;
  indices = (int *)cddp__calloc(&d->group->host->allocator, (size_t)d->shards, sizeof *indices);
  if (indices == NULL || cddp__living_block(d, &ref, &block) != CDDP_OK) return NULL;
  for (k = 0; k < e->living_count; k++) {
    indices[k] = e->members[e->living[k]].index;
    if (e->living[k] == e->me) rank = k;
  }
  CDDP_ASSERT(rank >= 0);
  r = cddp__group_build(&e->group, d->group->host, rank, e->living_count, indices, block,
                        d->group->timeout_s);
  cddp__free(&d->group->host->allocator, indices);
  if (r != CDDP_OK) return NULL;
  e->group->block_ref = ref;
  e->group->id = e->identity;
  e->grouped = e->identity;
  return e->group;
}

/* Local: this rank is no member any more. What others still need of it stays where it is. */
static void cddp__elastic_leave(cddp_ddp *d) {
  cddp__elastic *e = d->elastic;
  cddp__host *h = d->group->host;
  bool alone = true, needed;
  uint64_t word;
  int m;
  if (e->me >= 0) {
    cddp__store64(&e->members[e->me].state,
                  cddp__member_state(CDDP__MEMBER_LEFT, cddp__load64(&e->board->step)));
    cddp__elastic_changed(e->board);
  }
  for (m = 0; m < d->shards; m++)
    if (cddp__member_is(e, m, CDDP__MEMBER_LIVE) || cddp__member_is(e, m, CDDP__MEMBER_JOINING))
      alone = false;
  needed = !alone && e->me >= 0 &&
           cddp__table_count(e, e->me, cddp__load64(&e->board->step), &word) > 0;
  if (!needed) cddp__arena_free(h, e->kit);
  else d->mirror = NULL; /* goes with the process */
  if (alone) { /* the rank that made the board frees it */
    cddp__store32(&e->board->block.size, 1);
    cddp__store32(&e->board->block.left, 1);
  }
  if (e->group != NULL) cddp__group_leave(e->group);
  for (m = 0; m < d->shards; m++) {
    if (e->views[m].life != 0) cddp__close_fd(&e->views[m].pidfd);
    cddp__free(&h->allocator, e->views[m].data);
  }
  cddp__free(&h->allocator, e);
  d->elastic = NULL;
}

/* >>sampler ------------------------------------------------------------------------------------
   torch.utils.data.DistributedSampler: the same generator and the same shuffle. Pure.
   Owns: a cddp_sampler's permutation.
   Entry points: the public functions; cddp__sampler_begin, for a checkpoint.
   Works as follows: a rank (or shard) has places rank, rank + W, ... of the permutation, after
   those that were taken before a resumption; for even shares it is repeated from its start. It is
   made when an epoch's first index is asked for, and freed when another epoch is set or
   cddp_sampler_next has come to the end. */

/* The generator of PyTorch on the CPU. On the stack of its user. */
typedef struct cddp__mt19937 {
  uint32_t state[624];
  int next; /* word of state to give out; 624: make new ones */
} cddp__mt19937;

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

/* How many of `left` samples a rank gets. */
static size_t cddp__sampler_share(const cddp_sampler_desc *d, int rank, size_t left) {
  size_t w = (size_t)d->world_size;
  bool more = d->exact ? (size_t)rank < left % w : !d->drop_last && left % w != 0;
  return left / w + (size_t)more;
}

static void cddp__sampler_free(cddp_sampler *s) {
  free(s->order);
  s->order = NULL;
}

/* Begins an epoch, of which all ranks together have taken `start` samples. */
static void cddp__sampler_begin(cddp_sampler *s, uint64_t epoch, uint64_t start, bool resumed) {
  size_t n = s->desc.dataset_size;
  if (s->epoch != epoch) cddp__sampler_free(s);
  s->position = 0;
  s->result = CDDP_OK;
  s->epoch = epoch;
  s->start = start < n ? (size_t)start : n;
  s->size = cddp__sampler_share(&s->desc, s->desc.rank, n - s->start);
  s->resumed = resumed;
}

/* Writes n indices of the epoch: those at place, place + W, ... of its permutation. */
static cddp_result cddp__sampler_deal(cddp_sampler *s, size_t place, size_t n, size_t *indices) {
  size_t samples = s->desc.dataset_size, i;
  if (n > 0 && s->desc.shuffle && s->order == NULL) {
    s->order = (uint64_t *)malloc(samples * sizeof *s->order);
    if (s->order == NULL)
      return cddp__fail(CDDP_OUT_OF_MEMORY, "no memory for the permutation of %zu samples",
                        samples);
    cddp__randperm(s->order, samples, s->desc.seed + s->epoch);
  }
  for (i = 0; i < n; i++, place += (size_t)s->desc.world_size) {
    size_t at = place % samples;
    indices[i] = s->order != NULL ? (size_t)s->order[at] : at;
  }
  return CDDP_OK;
}

CDDPDEF cddp_result cddp_sampler_init(cddp_sampler *s, const cddp_sampler_desc *desc) {
  cddp_sampler_desc d;
  CDDP__CHECK(s != NULL, "s is NULL");
  memset(s, 0, sizeof *s);
  CDDP__CHECK(desc != NULL, "desc is NULL");
  d = *desc;
  if (d.world_size == 0) d.world_size = 1;
  CDDP__CHECK(d.world_size > 0, "world_size %d is negative", d.world_size);
  CDDP__CHECK(d.rank >= 0 && d.rank < d.world_size, "rank %d is not in 0 .. world_size - 1 = %d",
              d.rank, d.world_size - 1);
  CDDP__CHECK(!d.drop_last || !d.exact, "drop_last and exact exclude each other");
  CDDP__CHECK(d.dataset_size <= SIZE_MAX / 16, "dataset_size %zu is too large", d.dataset_size);
  s->desc = d;
  cddp__sampler_begin(s, 0, 0, false);
  return CDDP_OK;
}

CDDPDEF void cddp_sampler_set_epoch(cddp_sampler *s, uint64_t epoch) {
  if (s == NULL || s->desc.world_size == 0) return;
  if (s->resumed && s->epoch == epoch) s->resumed = false; /* it goes on where the checkpoint is */
  else cddp__sampler_begin(s, epoch, 0, false);
}

CDDPDEF uint64_t cddp_sampler_epoch(const cddp_sampler *s) { return s != NULL ? s->epoch : 0; }

CDDPDEF size_t cddp_sampler_size(const cddp_sampler *s) { return s != NULL ? s->size : 0; }

CDDPDEF bool cddp_sampler_next(cddp_sampler *s, size_t *index) {
  size_t next;
  if (s == NULL) return false;
  s->result = CDDP_OK;
  if (s->position >= s->size) {
    cddp__sampler_free(s);
    return false;
  }
  next = s->start + (size_t)s->desc.rank + s->position * (size_t)s->desc.world_size;
  s->result = cddp__named(__func__, cddp__sampler_deal(s, next, 1, &next));
  if (s->result != CDDP_OK) return false;
  if (index != NULL) *index = next;
  s->position++;
  return true;
}

static cddp_result cddp__sampler_batch(cddp_sampler *s, int shard, size_t batch, size_t size,
                                       size_t *indices, size_t *n) {
  size_t all, world = (size_t)s->desc.world_size;
  if (shard < 0 || shard >= s->desc.world_size)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "shard is %d; the sampler has %d, its world_size",
                      shard, s->desc.world_size);
  if (size == 0 || indices == NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "size is 0 or indices is NULL");
  all = cddp__sampler_share(&s->desc, shard, s->desc.dataset_size);
  if (batch > all / size) return CDDP_OK;
  *n = cddp__min(size, all - batch * size);
  return cddp__sampler_deal(s, (size_t)shard + batch * size * world, *n, indices);
}

CDDPDEF size_t cddp_sampler_batch(cddp_sampler *s, int shard, size_t batch, size_t size,
                                  size_t *indices) {
  size_t n = 0;
  if (s == NULL) return 0;
  s->result = cddp__named(__func__, cddp__sampler_batch(s, shard, batch, size, indices, &n));
  return s->result == CDDP_OK ? n : 0;
}

CDDPDEF void cddp_sampler_destroy(cddp_sampler *s) {
  if (s == NULL) return;
  cddp__sampler_free(s);
  s->position = s->size = s->start = 0;
}

CDDP__COLD

/* >>safetensors --------------------------------------------------------------------------------
   The header of a safetensors file, read and written. A file is a u64 N, N bytes of JSON and the
   tensors' bytes: {"__metadata__": {string: string}, NAME: {"dtype": "F32", "shape": [2, 3],
   "data_offsets": [begin, end]}, ...}.
   Owns: cddp_safetensors. Touches no file: that is >>checkpoint's.
   Entry points: cddp__st_new, _parse, _find, _value, _close; for writing cddp__st_place, _write.
   Works as follows: the text is not trusted. It is checked for UTF-8 as a whole and read once by a
   cursor that stops at the first failure; anything that the format does not have is one. Strings
   are decoded in place, which never makes them longer, and end with a NUL where their quote was:
   names point into the text. Then the tensors are sorted by position, where each must begin where
   the one before ended and the last one must end with the file, and by name, where equal names
   meet. No size is computed without a check for overflow. Memory is taken once, for as much as a
   text of that length and so many commas can say; no number in it counts. */

#define CDDP__HEADER_MAX 100000000u /* bytes of JSON, as in the reference implementation */
#define CDDP__DIMS_MAX 64           /* of a tensor, as in PyTorch and NumPy */

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

typedef struct cddp__st_name { /* of a tensor, in the order of names */
  const char *name;
  const cddp_tensor_info *tensor;
} cddp__st_name;

struct cddp_safetensors { /* nothing changes once it is open */
  cddp_allocator allocator;
  char *text; /* behind this struct: the JSON, decoded in place, and a NUL */
  size_t text_size;
  uint64_t data_bytes;       /* that follow the header in the file */
  cddp_tensor_info *tensors; /* by position in the file; begins the memory of the next four */
  cddp__st_name *by_name;    /* [count] */
  cddp_metadata *metadata;   /* by key */
  uint64_t *next_shape;      /* behind the tensors' shapes */
  size_t count, metadata_count;
  bool has_metadata;
  int fd; /* the open file; -1: none */
};

/* A file whose header has so many bytes, which the caller puts into text. NULL: no memory. */
static cddp_safetensors *cddp__st_new(const cddp_allocator *a, size_t text_size) {
  cddp_safetensors *f = (cddp_safetensors *)cddp__malloc(a, sizeof *f + text_size + 1);
  if (f == NULL) return NULL;
  memset(f, 0, sizeof *f);
  if (a != NULL) f->allocator = *a;
  f->fd = -1;
  f->text = (char *)(f + 1);
  f->text_size = text_size;
  f->text[text_size] = 0;
  return f;
}

static void cddp__st_close(cddp_safetensors *f) {
  cddp_allocator a;
  if (f == NULL) return;
  a = f->allocator;
  cddp__close_fd(&f->fd);
  cddp__free(&a, f->tensors);
  cddp__free(&a, f);
}

/* --- UTF-8 --- */

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

/* --- JSON --- */

typedef struct cddp__json {
  const char *begin;
  char *at, *end;     /* a NUL is at end */
  cddp_result result; /* the first failure, after which nothing more is read */
} cddp__json;

CDDP__PRINTF(2, 3)
static void cddp__json_fail(cddp__json *j, const char *format, ...) {
  va_list args;
  if (j->result != CDDP_OK) return;
  va_start(args, format);
  vsnprintf(cddp__error_text, sizeof cddp__error_text, format, args);
  va_end(args);
  j->result = cddp__fail_in(CDDP_IO, "its header is wrong at byte %zu: ",
                            (size_t)(j->at - j->begin));
  j->at = j->end;
}

static void cddp__json_space(cddp__json *j) {
  while (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t') j->at++;
}

/* Steps over spaces, and over c if that is next. */
static bool cddp__json_next(cddp__json *j, char c) {
  cddp__json_space(j);
  if (j->at == j->end || *j->at != c) return false;
  j->at++;
  return true;
}

/* Steps to item n of a list or an object: over the opening bracket, or over a comma. False: the
   closing bracket came, or a failure. */
static bool cddp__json_item(cddp__json *j, const char *brackets, size_t n, const char *what) {
  if (n == 0 && !cddp__json_next(j, brackets[0])) cddp__json_fail(j, "%s is expected", what);
  if (cddp__json_next(j, brackets[1])) return false;
  if (n > 0 && !cddp__json_next(j, ','))
    cddp__json_fail(j, "a comma or a %c is expected", brackets[1]);
  return j->result == CDDP_OK;
}

static bool cddp__json_hex(cddp__json *j, uint32_t *v) { /* four digits */
  char digits[5] = {0};
  if (strspn(j->at, "0123456789abcdefABCDEF") < 4) return false;
  memcpy(digits, j->at, 4);
  *v = (uint32_t)strtoul(digits, NULL, 16);
  j->at += 4;
  return true;
}

/* Decodes the escape sequence at the cursor to `to`; NULL if it is none. */
static char *cddp__json_escape(cddp__json *j, char *to) {
  static const char messages[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
  static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
  const char *k = (const char *)memchr(messages, j->at[1], sizeof messages - 1);
  uint32_t c, low;
  int more; /* bytes of UTF-8 behind the first */
  j->at += 2;
  if (k != NULL) {
    *to = meant[k - messages];
    return to + 1;
  }
  if (j->at[-1] != 'u' || !cddp__json_hex(j, &c) || c == 0) return NULL; /* no C string holds NUL */
  if (c >= 0xd800 && c < 0xe000) { /* half of a pair */
    if (c >= 0xdc00 || j->at[0] != '\\' || j->at[1] != 'u') return NULL;
    j->at += 2;
    if (!cddp__json_hex(j, &low) || low < 0xdc00 || low > 0xdfff) return NULL;
    c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
  }
  more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  *to++ = (char)(lead[more] | c >> (6 * more));
  while (more-- > 0) *to++ = (char)(0x80 | (c >> (6 * more) & 0x3f));
  return to;
}

static const char *cddp__json_string(cddp__json *j) { /* "" after a failure */
  char *to, *string;
  if (!cddp__json_next(j, '"')) cddp__json_fail(j, "a string is expected");
  for (to = string = j->at; j->at < j->end && *j->at != '"';) {
    if ((unsigned char)*j->at < 0x20) {
      cddp__json_fail(j, "a control character in a string");
    } else if (*j->at != '\\') {
      *to++ = *j->at++;
    } else if (j->at + 1 == j->end || (to = cddp__json_escape(j, to)) == NULL) {
      cddp__json_fail(j, "no escape sequence that a name or a value may have");
    }
  }
  if (j->at == j->end) cddp__json_fail(j, "a string does not end");
  if (j->result != CDDP_OK) return "";
  j->at++;
  *to = 0;
  return string;
}

static const char *cddp__json_key(cddp__json *j) {
  const char *key = cddp__json_string(j);
  if (!cddp__json_next(j, ':')) cddp__json_fail(j, "a colon is expected");
  return key;
}

/* Reads [n, n, ...], at most max of them; how many there are. */
static size_t cddp__json_numbers(cddp__json *j, uint64_t *v, size_t max) {
  size_t n;
  char *after;
  for (n = 0; cddp__json_item(j, "[]", n, "a list of numbers"); n++) {
    uint64_t number;
    cddp__json_space(j);
    errno = 0;
    number = strtoull(j->at, &after, 10);
    if (*j->at < '0' || *j->at > '9' || (*j->at == '0' && after > j->at + 1))
      cddp__json_fail(j, "a whole number from 0 on is expected");
    else if (errno != 0)
      cddp__json_fail(j, "a number beyond 64 bits");
    else if (n == max)
      cddp__json_fail(j, "a list is too long");
    if (j->result != CDDP_OK) return n;
    v[n] = number;
    j->at = after;
  }
  return n;
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

static void cddp__st_tensor(cddp_safetensors *f, cddp__json *j, const char *name) {
  static const char *const fields[] = {"dtype", "shape", "data_offsets"};
  const cddp__st_type *type = NULL;
  cddp_tensor_info *t = &f->tensors[f->count];
  uint64_t *shape = f->next_shape, offsets[2] = {0, 0};
  size_t n, ends = 0;
  unsigned k, seen = 0;
  memset(t, 0, sizeof *t);
  for (n = 0; cddp__json_item(j, "{}", n, "a tensor's object"); n++) {
    const char *key = cddp__json_key(j);
    for (k = 0; k < 3 && strcmp(key, fields[k]) != 0; k++) {}
    if (k == 3) cddp__json_fail(j, "\"%.60s\" is no field that a tensor has in this format", key);
    else if ((seen & 1u << k) != 0) cddp__json_fail(j, "%s comes twice", key);
    if (k == 0 && (type = cddp__st_type_named(cddp__json_string(j))) == NULL)
      cddp__json_fail(j, "its dtype is not one of the format's");
    if (k == 1) t->dims = (int)cddp__json_numbers(j, shape, CDDP__DIMS_MAX);
    if (k == 2) ends = cddp__json_numbers(j, offsets, 2);
    seen |= 1u << k;
  }
  if (seen != 7 || ends != 2)
    cddp__json_fail(j, "a tensor needs dtype, shape and two data_offsets");
  if (j->result != CDDP_OK) return;
  if (!cddp__st_size(shape, t->dims, type->bits, &t->count, &t->bytes))
    cddp__json_fail(j, "a shape's size exceeds 64 bits, or is not whole bytes");
  else if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != t->bytes)
    j->result = cddp__fail(CDDP_IO, "tensor \"%.60s\" takes %" PRIu64 " bytes by its shape, but "
                           "its data_offsets are %" PRIu64 " and %" PRIu64, name, t->bytes,
                           offsets[0], offsets[1]);
  t->name = name;
  t->type = type->name;
  t->dtype = type->dtype;
  t->shape = shape;
  t->begin = offsets[0];
  f->count++;
  f->next_shape += t->dims;
}

static void cddp__st_metadata(cddp_safetensors *f, cddp__json *j) {
  size_t n;
  if (f->has_metadata) cddp__json_fail(j, "__metadata__ comes twice");
  f->has_metadata = true;
  cddp__json_space(j);
  if (strncmp(j->at, "null", 4) == 0) {
    j->at += 4;
    return;
  }
  for (n = 0; cddp__json_item(j, "{}", n, "an object of strings"); n++) {
    f->metadata[n].key = cddp__json_key(j);
    f->metadata[n].value = cddp__json_string(j);
    f->metadata_count = n + 1;
  }
}

static cddp_result cddp__st_object(cddp_safetensors *f) { /* the whole text */
  cddp__json j;
  size_t n;
  memset(&j, 0, sizeof j);
  j.begin = j.at = f->text;
  j.end = f->text + f->text_size;
  if (*j.at != '{') cddp__json_fail(&j, "it must begin with {");
  for (n = 0; cddp__json_item(&j, "{}", n, "{"); n++) {
    const char *name = cddp__json_key(&j);
    if (strcmp(name, "__metadata__") == 0) cddp__st_metadata(f, &j);
    else cddp__st_tensor(f, &j, name);
  }
  cddp__json_space(&j);
  if (j.at != j.end) cddp__json_fail(&j, "only spaces may follow the last }");
  return j.result;
}

static int cddp__st_by_position(const void *a, const void *b) {
  const cddp_tensor_info *x = (const cddp_tensor_info *)a, *y = (const cddp_tensor_info *)b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1) : strcmp(x->name, y->name);
}

/* Each byte of the data belongs to one tensor. Sorts them by position. */
static cddp_result cddp__st_check_places(cddp_safetensors *f) {
  uint64_t at = 0;
  size_t i;
  if (f->count > 1) qsort(f->tensors, f->count, sizeof *f->tensors, cddp__st_by_position);
  for (i = 0; i < f->count; i++) {
    const cddp_tensor_info *t = &f->tensors[i];
    if (t->begin != at)
      return cddp__fail(CDDP_IO,
                        "tensor \"%.60s\" begins at byte %" PRIu64 " of the data, %s byte %" PRIu64,
                        t->name, t->begin,
                        t->begin < at ? "inside another that ends at"
                                      : "but no tensor has the bytes from",
                        at);
    at += t->bytes;
  }
  if (at != f->data_bytes)
    return cddp__fail(CDDP_IO,
                      "its tensors take %" PRIu64 " bytes, but %" PRIu64 " follow the header%s", at,
                      f->data_bytes, f->data_bytes < at ? ": it was cut off" : "");
  return CDDP_OK;
}

static int cddp__st_by_name(const void *a, const void *b) { /* elements that begin with a name */
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Sorts an array whose elements begin with a name. A name that comes twice, or NULL. */
static const char *cddp__st_sort_names(void *names, size_t count, size_t size) {
  const char *p = (const char *)names;
  if (count > 1) qsort(names, count, size, cddp__st_by_name);
  for (; count > 1; count--, p += size)
    if (cddp__st_by_name(p, p + size) == 0) return *(const char *const *)(const void *)p;
  return NULL;
}

/* A tensor has three commas of its own and one before the next, a list of numbers one between two,
   and so have the metadata. */
static cddp_result cddp__st_reserve(cddp_safetensors *f) {
  static const char shortest[] = "\"\":{\"dtype\":\"\",\"shape\":[],\"data_offsets\":[0,0]}";
  size_t i, commas = 0, tensors, pairs, sizes;
  for (i = 0; i < f->text_size; i++) commas += f->text[i] == ',';
  tensors = cddp__min(commas / 4, f->text_size / strlen(shortest)) + 1; /* one may be broken off */
  pairs = cddp__min(commas, f->text_size / strlen("\"\":\"\"")) + 1;
  sizes = cddp__min(commas, f->text_size / strlen("0,")) + CDDP__DIMS_MAX;
  f->tensors = (cddp_tensor_info *)cddp__malloc(
      &f->allocator, tensors * (sizeof *f->tensors + sizeof *f->by_name) +
                         pairs * sizeof *f->metadata + sizes * sizeof *f->next_shape);
  if (f->tensors == NULL) return CDDP_OUT_OF_MEMORY;
  f->by_name = (cddp__st_name *)(f->tensors + tensors);
  f->metadata = (cddp_metadata *)(f->by_name + tensors);
  f->next_shape = (uint64_t *)(f->metadata + pairs);
  return CDDP_OK;
}

/* Reads f->text; f has no tensors yet. */
static cddp_result cddp__st_parse(cddp_safetensors *f) {
  const unsigned char *p = (const unsigned char *)f->text;
  const char *twice;
  size_t at, n, i;
  cddp_result r;
  for (at = 0; at < f->text_size; at += n)
    if ((n = cddp__utf8(p + at, f->text_size - at)) == 0)
      return cddp__fail(CDDP_IO, "its header is not UTF-8 at byte %zu", at);
  if ((r = cddp__st_reserve(f)) != CDDP_OK) return r;
  if ((r = cddp__st_object(f)) != CDDP_OK) return r;
  if ((r = cddp__st_check_places(f)) != CDDP_OK) return r;
  for (i = 0; i < f->count; i++) {
    f->by_name[i].name = f->tensors[i].name;
    f->by_name[i].tensor = &f->tensors[i];
  }
  if ((twice = cddp__st_sort_names(f->by_name, f->count, sizeof *f->by_name)) != NULL)
    return cddp__fail(CDDP_IO, "two tensors are named \"%.60s\"", twice);
  twice = cddp__st_sort_names(f->metadata, f->metadata_count, sizeof *f->metadata);
  return twice == NULL ? CDDP_OK : cddp__fail(CDDP_IO, "the metadata has \"%.60s\" twice", twice);
}

/* The length of the header after the first 8 bytes of a file of so many bytes. */
static cddp_result cddp__st_header_size(const unsigned char *first, uint64_t file_bytes,
                                        size_t *size) {
  uint64_t n = file_bytes >= 8 ? cddp__get64(first) : 2; /* no header is shorter than {} */
  if (n > CDDP__HEADER_MAX)
    return cddp__fail(CDDP_IO, "it is no safetensors file: its header would have %" PRIu64
                      " bytes, and at most %u are allowed", n, CDDP__HEADER_MAX);
  if (file_bytes < 8 || n > file_bytes - 8)
    return cddp__fail(CDDP_IO, "it has %" PRIu64 " bytes where its header alone needs %" PRIu64
                      ": it was cut off", file_bytes, n + 8);
  *size = (size_t)n;
  return CDDP_OK;
}

static const cddp_tensor_info *cddp__st_find(const cddp_safetensors *f, const char *name) {
  const cddp__st_name *found = (const cddp__st_name *)bsearch(
      &name, f->by_name, f->count, sizeof *f->by_name, cddp__st_by_name);
  return found != NULL ? found->tensor : NULL;
}

static const char *cddp__st_value(const cddp_safetensors *f, const char *key) {
  const cddp_metadata *found = NULL;
  if (f->metadata_count > 0)
    found = (const cddp_metadata *)bsearch(&key, f->metadata, f->metadata_count,
                                           sizeof *f->metadata, cddp__st_by_name);
  return found != NULL ? found->value : NULL;
}

/* --- writing a header --- */

/* A tensor of a checkpoint, in memory and in the file. */
typedef struct cddp__st_item {
  const char *name;
  const cddp__st_type *type; /* in memory; of a file that is written too */
  cddp_shape shape;
  bool any_shape; /* none was asked for */
  size_t count;   /* elements */
  void *data;     /* NULL: no elements, in pieces on the ranks, or no memory yet */
  int param;      /* of an optimizer's state: whose, and where the optimizer has its address; */
  void **place;   /* NULL: at data. param -1: it is no such state */
  uint64_t begin, bytes;        /* of a file that is written */
  const cddp_tensor_info *from; /* load: the tensor in the file; NULL: it is not there */
} cddp__st_item;

/* Orders the tensors as the reference implementation does and gives each its place. */
static int cddp__st_item_order(const void *a, const void *b) {
  const cddp__st_item *x = (const cddp__st_item *)a, *y = (const cddp__st_item *)b;
  if (x->type != y->type) return x->type < y->type ? -1 : 1;
  return strcmp(x->name, y->name);
}

static uint64_t cddp__st_place(cddp__st_item *items, size_t count) { /* bytes of all */
  uint64_t at = 0;
  size_t i;
  if (count > 1) qsort(items, count, sizeof *items, cddp__st_item_order);
  for (i = 0; i < count; i++) {
    items[i].begin = at;
    at += items[i].bytes;
  }
  return at;
}

CDDP__PRINTF(2, 3)
static void cddp__st_print(cddp__buffer *b, const char *format, ...) {
  char piece[64];
  va_list args;
  va_start(args, format);
  vsnprintf(piece, sizeof piece, format, args);
  va_end(args);
  cddp__buffer_add(b, piece, strlen(piece));
}

/* A JSON string. If it is not UTF-8, that shows when the header is read back. */
static void cddp__st_quote(cddp__buffer *b, const char *s) {
  static const char meant[] = "\"\\\b\f\n\r\t", messages[] = "\"\\bfnrt";
  for (cddp__buffer_add(b, "\"", 1); *s != 0; s++) {
    const char *k = strchr(meant, *s);
    if (k != NULL) cddp__st_print(b, "\\%c", messages[k - meant]);
    else if ((unsigned char)*s < 0x20) cddp__st_print(b, "\\u%04x", (unsigned)*s);
    else cddp__buffer_add(b, s, 1);
  }
  cddp__buffer_add(b, "\"", 1);
}

/* Adds N and the JSON, so that the data is aligned to 8 bytes. b->failed: there was no memory. */
static void cddp__st_write(const cddp_allocator *a, cddp__buffer *b, const cddp__st_item *items,
                           size_t count, const cddp_metadata *metadata, size_t metadata_count) {
  size_t i;
  int k;
  b->allocator = a;
  cddp__buffer_add_number(b, 0, 8);
  cddp__st_print(b, "{\"__metadata__\":{");
  for (i = 0; i < metadata_count; i++) {
    if (i > 0) cddp__st_print(b, ",");
    cddp__st_quote(b, metadata[i].key);
    cddp__st_print(b, ":");
    cddp__st_quote(b, metadata[i].value);
  }
  cddp__st_print(b, "}");
  for (i = 0; i < count; i++) {
    cddp__st_print(b, ",");
    cddp__st_quote(b, items[i].name);
    cddp__st_print(b, ":{\"dtype\":\"%s\",\"shape\":[", items[i].type->name);
    for (k = 0; k < items[i].shape.dims; k++)
      cddp__st_print(b, "%s%" PRIu64, k > 0 ? "," : "", items[i].shape.size[k]);
    cddp__st_print(b, "],\"data_offsets\":[%" PRIu64, items[i].begin);
    cddp__st_print(b, ",%" PRIu64 "]}", items[i].begin + items[i].bytes);
  }
  cddp__st_print(b, "}");
  while (cddp__buffer_size(b) % 8 != 0 && !b->failed) cddp__st_print(b, " ");
  if (!b->failed) cddp__put64(b->data + b->start, cddp__buffer_size(b) - 8);
}

/* >>checkpoint ---------------------------------------------------------------------------------
   Saving and loading, for a group or for one process.
   Owns: the file while it is written, cddp__checkpoint (one call of cddp_save or cddp_load).
   May touch: parameters, an optimizer's states and learning rate, the sampler, a cddp_ddp's step
   count; peers' memory for states in pieces.
   Entry points: the public functions.
   Works as follows. Both calls list the tensors of the checkpoint in memory, and the ranks compare
   their lists. Saving: rank 0 writes, reading the other ranks' pieces of the states where they lie.
   It writes to PATH.tmp, locked, which takes PATH's name only when all of it is on the disk: a
   reader of PATH sees the old file or the new one. PATH.tmp is always a new file; an old one is
   removed, unless a process of this user holds its lock. Loading: rank 0 reads the header and
   broadcasts its text; every rank parses it and finds its tensors there, so that all come to the
   same conclusion; then rank 0 reads the tensors and broadcasts them. After each part
   cddp__consensus makes the first failure the result on all ranks.
   Memory of a device passes through a few MiB of the host's, piece by piece. */

/* --- files --- */

/* Opens the file and reads its header, unparsed. */
static cddp_result cddp__st_open(cddp_safetensors **out, const cddp_allocator *a,
                                 const char *path) {
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused, not waited for */
  unsigned char first[8] = {0};
  struct stat st;
  size_t size = 0;
  cddp_result r = CDDP_OK;
  *out = NULL;
  if (fd < 0) return cddp__fail(CDDP_IO, "open: %s", strerror(errno));
  if (fstat(fd, &st) != 0) r = cddp__fail(CDDP_IO, "fstat: %s", strerror(errno));
  else if (!S_ISREG(st.st_mode)) r = cddp__fail(CDDP_IO, "it is not a regular file");
  else if (st.st_size >= 8) r = cddp__file_io(fd, false, first, 8, 0);
  if (r == CDDP_OK) r = cddp__st_header_size(first, (uint64_t)st.st_size, &size);
  if (r == CDDP_OK && (*out = cddp__st_new(a, size)) == NULL) r = CDDP_OUT_OF_MEMORY;
  if (*out == NULL) {
    close(fd);
    return r;
  }
  (*out)->fd = fd;
  (*out)->data_bytes = (uint64_t)st.st_size - 8 - size;
  return cddp__file_io(fd, false, (*out)->text, size, 8);
}

/* A checkpoint's file and what it replaces. */
typedef struct cddp__target {
  char path[4096]; /* what the caller's path leads to: never a symbolic link */
  char temporary[4100];
  struct stat was; /* of a file that is there already */
  bool exists;
  int fd; /* of the temporary file; -1: none */
} cddp__target;

static const char *cddp__file_kind(mode_t mode) {
  return S_ISDIR(mode) ? "a directory" : S_ISSOCK(mode) ? "a socket" : S_ISFIFO(mode) ? "a pipe"
         : S_ISLNK(mode) ? "a symbolic link" : "a device";
}

/* Finds the file that is to be replaced: a regular one, or none. Links of another user are not
   followed: in a directory that all may write to they could lead to any file of this user's. */
static cddp_result cddp__find_target(cddp__target *t, const char *path) {
  char to[sizeof t->path];
  int links;
  snprintf(to, sizeof to, "%s", strlen(path) < sizeof to ? path : "");
  for (links = 0; links < 40; links++) { /* the kernel's limit; `to` is relative to its link */
    char *slash = strrchr(t->path, '/');
    size_t keep = to[0] != '/' && slash != NULL ? (size_t)(slash - t->path) + 1 : 0;
    ssize_t n = -1;
    if (to[0] == 0 || keep + strlen(to) >= sizeof t->path)
      return cddp__fail(CDDP_IO, "%s", strerror(ENAMETOOLONG));
    memcpy(t->path + keep, to, strlen(to) + 1);
    if (lstat(t->path, &t->was) != 0)
      return errno == ENOENT ? CDDP_OK
                             : cddp__fail(CDDP_IO, "lstat %s: %s", t->path, strerror(errno));
    t->exists = S_ISREG(t->was.st_mode);
    if (t->exists) return CDDP_OK;
    if (S_ISLNK(t->was.st_mode)) n = readlink(t->path, to, sizeof to - 1);
    if (n < 0)
      return cddp__fail(CDDP_IO, "%s is %s, which a checkpoint does not replace", t->path,
                        cddp__file_kind(t->was.st_mode));
    if (t->was.st_uid != geteuid() && t->was.st_uid != 0)
      return cddp__fail(CDDP_IO, "%s is a symbolic link of another user (uid %u); pass the path "
                        "that it leads to", t->path, (unsigned)t->was.st_uid);
    to[n] = 0;
  }
  return cddp__fail(CDDP_IO, "%s: %s", t->path, strerror(ELOOP));
}

/* Makes the temporary file: new, and locked while it is written. No other user can open it, or lock
   it, until it is whole. What has its name is removed: a killed process left it, or another user
   put it there. But a file that a process of this user has locked is being written. */
static cddp_result cddp__make_temporary(cddp__target *t) {
  const char *path = t->temporary;
  struct stat old;
  cddp_result r = CDDP_OK;
  int tries;
  snprintf(t->temporary, sizeof t->temporary, "%s.tmp", t->path);
  for (tries = 0; r == CDDP_OK && tries < 100; tries++) {
    bool made, locked;
    t->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    made = t->fd >= 0;
    if (!made && errno != EEXIST)
      return cddp__fail(CDDP_IO, "open %s: %s", path, strerror(errno));
    if (!made && lstat(path, &old) != 0) continue; /* the next open says why, if it is not gone */
    if (!made && old.st_uid == geteuid()) {
      if (!S_ISREG(old.st_mode))
        return cddp__fail(CDDP_IO, "%s is %s; remove it", path, cddp__file_kind(old.st_mode));
      t->fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    }
    locked = t->fd >= 0 && flock(t->fd, LOCK_EX | LOCK_NB) == 0;
    if (t->fd >= 0 && !locked && errno != EWOULDBLOCK)
      r = cddp__fail(CDDP_IO, "flock %s: %s", path, strerror(errno));
    else if (t->fd >= 0 && !locked && !made)
      r = cddp__fail(CDDP_IO, "somebody else is just writing %s", path);
    else if (made && locked && cddp__file_is_named(t->fd, path))
      return CDDP_OK; /* before it was locked, another process may have taken it for a dead one's */
    else if (!made && (t->fd < 0 || cddp__file_is_named(t->fd, path)) && unlink(path) != 0 &&
             errno != ENOENT)
      r = cddp__fail(CDDP_IO, "unlink %s, which belongs to uid %u: %s; remove it, or save in a "
                     "directory of your own", path, (unsigned)old.st_uid, strerror(errno));
    cddp__close_fd(&t->fd);
  }
  if (r != CDDP_OK) return r;
  return cddp__fail(CDDP_IO, "%s is made and removed by others again and again", path);
}

/* The process's umask. (umask() itself would change it for all threads.) */
static mode_t cddp__umask(void) {
  char text[1024];
  const char *line;
  int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
  cddp__close_fd(&fd);
  text[n > 0 ? n : 0] = 0;
  line = strstr(text, "\nUmask:");
  return line != NULL ? (mode_t)strtoul(line + 7, NULL, 8) : 077;
}

/* Gives the temporary file, which is 0600 until then, the mode, owner and group of the file that it
   replaces. Where the group cannot be kept, the new one and all others get what both had. */
static void cddp__set_owner(const cddp__target *t) {
  mode_t mode = t->exists ? t->was.st_mode & 0777 : 0666 & ~cddp__umask();
  mode_t both = mode >> 3 & mode & 7;
  if (t->exists && fchown(t->fd, t->was.st_uid, t->was.st_gid) != 0 &&
      fchown(t->fd, (uid_t)-1, t->was.st_gid) != 0)
    mode = (mode & 0700) | both << 3 | both;
  if (fchmod(t->fd, mode) != 0) return; /* this file system has no modes, or it stays 0600 */
}

/* After a failure removes the temporary file, else gives it its name. */
static cddp_result cddp__finish_target(cddp__target *t, cddp_result r) {
  bool ours = t->fd >= 0 && cddp__file_is_named(t->fd, t->temporary);
  char *slash = strrchr(t->temporary, '/'), *folder = t->temporary;
  if (r == CDDP_OK) cddp__set_owner(t);
  if (r == CDDP_OK && fsync(t->fd) != 0) r = cddp__fail(CDDP_IO, "fsync: %s", strerror(errno));
  if (r == CDDP_OK && !ours)
    r = cddp__fail(CDDP_IO, "another user removed %s while it was written", t->temporary);
  if (r == CDDP_OK && rename(t->temporary, t->path) != 0)
    r = cddp__fail(CDDP_IO, "rename of %s: %s", t->temporary, strerror(errno));
  if (r != CDDP_OK && ours) unlink(t->temporary);
  cddp__close_fd(&t->fd); /* after that: the lock ends here */
  if (r != CDDP_OK) return r;
  strcpy(slash != NULL ? slash + 1 : folder, "."); /* its name there lasts when that is synced */
  t->fd = open(folder, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
  if (t->fd < 0 || (fsync(t->fd) != 0 && errno != EINVAL)) /* EINVAL: nothing to sync there */
    r = cddp__fail(CDDP_IO, "fsync of %s: %s; the checkpoint is there, but may not outlast a crash",
                   folder, strerror(errno));
  cddp__close_fd(&t->fd);
  return r;
}

/* --- what saving and loading share --- */

/* The error text of a call on a file: which call, which file, and nothing in the words of the file
   that a terminal would obey. */
static cddp_result cddp__fail_on_file(const char *function, const char *path, cddp_result r) {
  if (r == CDDP_OK) return r;
  cddp__fail_in(r, "%s(\"%.200s\"): ", function, path != NULL ? path : "NULL");
  cddp__make_printable(cddp__error_text);
  return r;
}

/* Metadata that is a number. */
static const char *const cddp__number_keys[] = {
    "cddp.sampler.epoch", "cddp.sampler.samples", "cddp.sampler.dataset_size",
    "cddp.sampler.seed", "cddp.sampler.shuffle", "cddp.ddp.steps", "cddp.ddp.shards"};
enum { CDDP__OF_SAMPLER = 5, CDDP__NUMBERS = sizeof cddp__number_keys / sizeof *cddp__number_keys };

typedef struct cddp__checkpoint {
  cddp_group *g; /* NULL: none */
  const cddp_allocator *allocator;
  const cddp_param *params;
  int count;
  const cddp_checkpoint_desc *desc;
  cddp_checkpoint_desc none; /* if the caller passed none */
  bool saves;
  bool first;                /* this is rank 0 */
  bool device;               /* something may lie on a device */
  cddp__st_item *items;      /* the parameters, the learning rate, the optimizer's states */
  size_t item_count;
  char *names; /* of the states */
  double lr;
  uint64_t numbers[CDDP__NUMBERS]; /* as cddp__number_keys */
  char *staging; /* [2 * CDDP__FILE_STAGING] between the file and a device; NULL: not needed yet */
  /* save: */
  cddp__buffer header;
  char digits[CDDP__NUMBERS][24]; /* of the numbers */
  /* load: */
  cddp_safetensors *file;   /* rank 0's has the descriptor */
  bool has_lr, has_sampler, has_steps; /* the file has */
} cddp__checkpoint;

static cddp_result cddp__check_checkpoint(cddp__checkpoint *c, const char *path) {
  const cddp_checkpoint_desc *d = c->desc;
  const cddp__share *share = d->optim != NULL ? (const cddp__share *)d->optim->share : NULL;
  uint64_t elements, bytes;
  cddp_result r;
  int i;
  if (path == NULL || path[0] == 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "the path is NULL or empty");
  r = cddp__check_params(c->params, c->count, CDDP__HAS_NAME | CDDP__HAS_DATA);
  if (r != CDDP_OK) return r;
  c->device = (c->g != NULL && c->g->backend != NULL) ||
              (d->optim != NULL && d->optim->backend != NULL);
  for (i = 0; i < c->count; i++) {
    const cddp_shape *s = d->shapes != NULL ? &d->shapes[i] : NULL;
    if (c->params[i].count > 0 && cddp__on_device(c->params[i].data)) c->device = true;
    if (s != NULL && (s->dims < 0 || s->dims > 8))
      return cddp__fail(CDDP_INVALID_ARGUMENT, "shape %d has %d dimensions; 8 are possible", i,
                        s->dims);
    if (s != NULL && s->dims > 0 && (!cddp__st_size(s->size, s->dims, 64, &elements, &bytes) ||
                                     elements != c->params[i].count))
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "the shape of parameter \"%s\" does not come to its count, %zu",
                        c->params[i].name, c->params[i].count);
  }
  if (c->device && c->g != NULL && c->g->size > 1 && c->g->backend == NULL)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "parameters lie on a GPU, but the group has device \"cpu\"; pass one with "
                      "device \"cuda\", or NULL");
  if (d->optim != NULL)
    r = cddp__check_params(d->optim->params, d->optim->count, CDDP__HAS_NAME);
  if (r != CDDP_OK) return r;
  if (share != NULL && share->ddp->group != c->g && share->ddp->group->size > 1)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "the momentum lies in pieces on the ranks of the cddp_ddp's group; pass that "
                      "group, on all of its ranks");
  if (d->metadata_count < 0 || (d->metadata_count > 0 && d->metadata == NULL))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "metadata is NULL or metadata_count negative");
  for (i = 0; i < d->metadata_count; i++) {
    const cddp_metadata *m = &d->metadata[i];
    if (m->key == NULL || (c->saves && (m->value == NULL || strncmp(m->key, "cddp.", 5) == 0)))
      return cddp__fail(CDDP_INVALID_ARGUMENT,
                        "metadata %d, \"%s\", has no key or no value, or begins with cddp., which "
                        "is reserved", i, m->key != NULL ? m->key : "");
  }
  return CDDP_OK;
}

static cddp__st_item *cddp__add_item(cddp__checkpoint *c, const char *name, cddp_dtype dtype,
                                     size_t count, const cddp_shape *shape, void *data) {
  cddp__st_item *item = &c->items[c->item_count++];
  const cddp__st_type *type = cddp__st_types;
  while (type->dtype != (int)dtype) type++;
  item->name = name;
  item->type = type;
  item->count = count;
  item->data = data;
  item->param = -1;
  item->bytes = (uint64_t)count * cddp__dtype_size(dtype);
  item->any_shape = shape == NULL || shape->dims == 0;
  if (!item->any_shape) item->shape = *shape;
  if (item->any_shape) item->shape.dims = 1, item->shape.size[0] = count;
  return item;
}

/* What an optimizer keeps of each parameter, as torch.optim names it. */
static const char *cddp__state_name(const cddp_optim *o, int k) {
  if (k == o->states) return "step";
  return cddp__is_master(o, k) ? "master" : o->algorithm->states[k];
}

static cddp_result cddp__list_items(cddp__checkpoint *c) {
  const cddp_optim *o = c->desc->optim;
  const cddp_shape *shapes = c->desc->shapes;
  int i, k, states = o != NULL ? o->states + o->algorithm->counts : 0;
  size_t names = 0, n = (size_t)c->count + 1;
  char *name;
  for (i = 0; o != NULL && i < o->count; i++)
    for (k = 0; k < states; k++, n++)
      names += strlen("optimizer..") + strlen(cddp__state_name(o, k)) +
               strlen(o->params[i].name) + 1;
  c->items = (cddp__st_item *)cddp__calloc(c->allocator, n, sizeof *c->items);
  c->names = name = (char *)cddp__malloc(c->allocator, names);
  if (c->items == NULL || c->names == NULL) return CDDP_OUT_OF_MEMORY;
  for (i = 0; i < c->count; i++)
    cddp__add_item(c, c->params[i].name, c->params[i].dtype, c->params[i].count,
                   shapes != NULL ? &shapes[i] : NULL, c->params[i].data);
  if (o == NULL) return CDDP_OK;
  c->lr = o->desc.lr;
  cddp__add_item(c, "optimizer.lr", CDDP_F64, 1, NULL, &c->lr)->shape.dims = 0;
  if (o->params != c->params || o->count > c->count) shapes = NULL;
  for (i = 0; i < o->count; i++) {
    const cddp_param *p = &o->params[i];
    for (k = 0; k < states && p->count > 0; k++) {
      bool step = k == o->states; /* one number, which is read into its place */
      cddp__st_item *item;
      if (!step && !cddp__has_state(o, k, i)) continue;
      item = cddp__add_item(c, name, step ? CDDP_F32 : cddp__state_type(o, i), step ? 1 : p->count,
                            shapes != NULL && !step ? &shapes[i] : NULL,
                            step ? &o->steps[i] : NULL);
      if (step) item->shape.dims = 0;
      else item->place = &o->state[k * o->count + i];
      item->param = i;
      name += sprintf(name, "optimizer.%s.%s", cddp__state_name(o, k), p->name) + 1;
    }
  }
  return CDDP_OK;
}

/* Checks the arguments and lists the items. */
static cddp_result cddp__checkpoint_begin(cddp__checkpoint *c, bool saves, cddp_group *g,
                                          const char *path, const cddp_param *params, int count,
                                          const cddp_checkpoint_desc *desc) {
  cddp_result r;
  memset(c, 0, sizeof *c);
  c->g = g;
  c->allocator = g != NULL ? &g->host->allocator : NULL;
  c->params = params;
  c->count = count;
  c->desc = desc != NULL ? desc : &c->none;
  c->first = g == NULL || g->rank == 0;
  c->saves = saves;
  if (g != NULL) cddp__engine_drain(g);
  r = cddp__check_checkpoint(c, path);
  if (r == CDDP_OK && c->device) r = cddp__settle_device(g);
  return r == CDDP_OK ? cddp__list_items(c) : r;
}

static void cddp__checkpoint_end(cddp__checkpoint *c) {
  const cddp_optim *s = c->desc->optim;
  size_t i;
  for (i = 0; i < c->item_count; i++) /* states that a load has not put in their places */
    if (c->items[i].from != NULL && c->items[i].place != NULL && s->backend == NULL)
      cddp__free(&s->allocator, c->items[i].data);
  cddp__free(c->allocator, c->items);
  cddp__free(c->allocator, c->names);
  cddp__free(c->allocator, c->staging);
  cddp__buffer_clear(&c->header, 0);
  cddp__st_close(c->file);
}

/* Collective: cddp__consensus, and all ranks have passed the same. */
static cddp_result cddp__compare_calls(cddp__checkpoint *c, cddp_result r) {
  uint64_t *all, h = (uint64_t)(c->desc->ddp != NULL) << 2 |
                     (uint64_t)(c->desc->sampler != NULL) << 1 | c->desc->partial;
  size_t i, n = c->g != NULL ? (size_t)c->g->size : 1;
  for (i = 0; i < c->item_count; i++) {
    const cddp__st_item *item = &c->items[i];
    h = cddp__hash64(h, &item->bytes, sizeof item->bytes);
    h = cddp__hash64(h, item->type->name, strlen(item->type->name));
    h = cddp__hash64(h, item->name, strlen(item->name));
  }
  all = (uint64_t *)cddp__calloc(c->allocator, n, sizeof h);
  if (all == NULL) return c->g != NULL ? cddp__break(c->g, CDDP_OUT_OF_MEMORY) : CDDP_OUT_OF_MEMORY;
  r = cddp__consensus(c->g, r, &h, sizeof h, all);
  for (i = 0; r == CDDP_OK && i < n; i++)
    if (all[i] != all[0])
      r = cddp__fail(CDDP_MISMATCH, "rank %zu passed other parameters (names, counts, dtypes) or "
                     "other options than rank 0", i);
  cddp__free(c->allocator, all);
  return r;
}

/* Copies an item between memory and the place `at` of the file. On its way to or from a device or
   another dtype it passes through c->staging, piece by piece. */
static cddp_result cddp__copy_item(cddp__checkpoint *c, int fd, const cddp__st_item *item,
                                   uint64_t at) {
  bool save = item->from == NULL;
  cddp_dtype dtype = (cddp_dtype)item->type->dtype;
  cddp_dtype filed = save ? dtype : (cddp_dtype)item->from->dtype; /* in the file */
  size_t size = cddp__dtype_size(dtype), file_size = cddp__dtype_size(filed), done, n;
  bool device = cddp__on_device(item->data), direct = !device && filed == dtype;
  size_t most = direct ? item->count : CDDP__FILE_STAGING / cddp__max(size, file_size);
  cddp_result r = CDDP_OK;
  if (!direct && c->staging == NULL)
    c->staging = (char *)cddp__malloc(c->allocator, 2 * CDDP__FILE_STAGING);
  if (!direct && c->staging == NULL) return CDDP_OUT_OF_MEMORY;
  for (done = 0; r == CDDP_OK && done < item->count; done += n) {
    char *memory = (char *)item->data + done * size, *raw = direct ? memory : c->staging;
    char *converted = filed == dtype ? raw : device ? c->staging + CDDP__FILE_STAGING : memory;
    n = cddp__min(item->count - done, most);
    if (save && device) r = cddp__transfer(c->g, raw, memory, n * size);
    if (r == CDDP_OK) r = cddp__file_io(fd, save, raw, n * file_size, at + done * file_size);
    if (r == CDDP_OK && converted != raw) cddp__convert(converted, dtype, raw, filed, n);
    if (r == CDDP_OK && !save && device) r = cddp__transfer(c->g, memory, converted, n * size);
  }
  return r;
}

/* --- saving --- */

/* Leaves out states that no step has made yet. */
static void cddp__find_states(cddp__checkpoint *c) {
  const cddp_optim *s = c->desc->optim;
  size_t i, n = 0;
  for (i = 0; i < c->item_count; i++) {
    cddp__st_item *item = &c->items[i];
    if (item->param >= 0 && s->steps[item->param] == 0) continue;
    if (item->place != NULL) item->data = *item->place;
    if (item->place != NULL && item->data == NULL && s->share == NULL) continue;
    c->items[n++] = *item;
  }
  c->item_count = n;
}

/* Writes the header to c->header with this metadata, and refuses one that cannot be read back:
   duplicate names, wrong UTF-8. */
static cddp_result cddp__make_header(cddp__checkpoint *c, const cddp_metadata *metadata,
                                     size_t metadata_count) {
  uint64_t data_bytes = cddp__st_place(c->items, c->item_count);
  cddp_safetensors *f;
  cddp_result r;
  size_t n;
  cddp__st_write(c->allocator, &c->header, c->items, c->item_count, metadata, metadata_count);
  if (c->header.failed) return CDDP_OUT_OF_MEMORY;
  n = cddp__buffer_size(&c->header) - 8;
  if (n > CDDP__HEADER_MAX)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "names and metadata make a header of %zu bytes; %u are allowed", n,
                      CDDP__HEADER_MAX);
  if ((f = cddp__st_new(c->allocator, n)) == NULL) return CDDP_OUT_OF_MEMORY;
  memcpy(f->text, c->header.data + 8, n);
  f->data_bytes = data_bytes;
  r = cddp__st_parse(f);
  cddp__st_close(f);
  return r != CDDP_IO ? r
                      : cddp__fail_in(CDDP_INVALID_ARGUMENT, "what was passed makes no file: ");
}

/* The metadata of numbers first .. end - 1; where the next goes. */
static cddp_metadata *cddp__put_numbers(cddp__checkpoint *c, cddp_metadata *m, int first, int end) {
  for (; first < end; first++, m++) {
    snprintf(c->digits[first], sizeof c->digits[first], "%" PRIu64, c->numbers[first]);
    m->key = cddp__number_keys[first];
    m->value = c->digits[first];
  }
  return m;
}

/* The metadata, then all of the header. */
static cddp_result cddp__save_header(cddp__checkpoint *c) {
  const cddp_checkpoint_desc *d = c->desc;
  const cddp_sampler *s = d->sampler;
  cddp_metadata *all, *m;
  cddp_result r;
  int i;
  all = m = (cddp_metadata *)cddp__calloc(
      c->allocator, (size_t)d->metadata_count + CDDP__NUMBERS + 1, sizeof *m);
  if (m == NULL) return CDDP_OUT_OF_MEMORY;
  m->key = "format"; /* some of PyTorch's loaders insist on it */
  m++->value = "pt";
  if (s != NULL) {
    c->numbers[0] = s->epoch;
    c->numbers[1] = cddp__min(s->start + s->position * (size_t)s->desc.world_size,
                              s->desc.dataset_size); /* what all ranks together have taken */
    c->numbers[2] = s->desc.dataset_size;
    c->numbers[3] = s->desc.seed;
    c->numbers[4] = s->desc.shuffle;
    m = cddp__put_numbers(c, m, 0, CDDP__OF_SAMPLER);
  }
  if (d->ddp != NULL) {
    c->numbers[5] = d->ddp->steps;
    c->numbers[6] = (uint64_t)d->ddp->shards;
    m = cddp__put_numbers(c, m, CDDP__OF_SAMPLER, CDDP__NUMBERS);
  }
  for (i = 0; i < d->metadata_count; i++) {
    if (strcmp(d->metadata[i].key, "format") == 0) all[0].value = d->metadata[i].value;
    else *m++ = d->metadata[i];
  }
  cddp__find_states(c);
  r = cddp__make_header(c, all, (size_t)(m - all));
  cddp__free(c->allocator, all);
  return r;
}

/* Writes a state that lies in pieces, from the ranks' shares in shared memory. */
static cddp_result cddp__write_shares(const cddp_optim *o, int fd, const cddp__st_item *item,
                                      uint64_t at) {
  const cddp__share *h = (const cddp__share *)o->share;
  size_t begin, end, from, n;
  cddp_result r = CDDP_OK;
  int p, k = (int)(item->place - o->state) / o->count;
  for (p = 0; r == CDDP_OK && p < h->ddp->group->local_size; p++) {
    if (!cddp__tensor_slice(h->ddp, item->param, p, &begin, &end, &from)) continue;
    n = cddp__share_bytes(h->ddp, o, begin, end);
    r = cddp__file_io(fd, true, cddp__share_at(h, p, k, from), n, at);
    at += n;
  }
  return r;
}

/* Rank 0's part of saving. */
static cddp_result cddp__write_checkpoint(cddp__checkpoint *c, const char *path) {
  bool peers = c->g != NULL && c->g->size > 1;
  cddp__target t;
  cddp_result r, left;
  size_t i;
  memset(&t, 0, sizeof t);
  t.fd = -1;
  r = cddp__find_target(&t, path);
  if (r == CDDP_OK) r = cddp__make_temporary(&t);
  if (r == CDDP_OK && peers) r = cddp__enter(c->g); /* it reads their memory */
  if (r == CDDP_OK) r = cddp__file_io(t.fd, true, c->header.data, c->header.end, 0);
  for (i = 0; r == CDDP_OK && i < c->item_count; i++) {
    const cddp__st_item *item = &c->items[i];
    uint64_t at = c->header.end + item->begin;
    CDDP__POINT("save");
    r = item->data == NULL && item->place != NULL
            ? cddp__write_shares(c->desc->optim, t.fd, item, at)
            : cddp__copy_item(c, t.fd, item, at);
  }
  left = peers ? cddp__exit(c->g, CDDP_OK) : CDDP_OK;
  return cddp__finish_target(&t, r == CDDP_OK ? left : r);
}

CDDPDEF cddp_result (cddp_save)(cddp_group *g, const char *path, const cddp_param *params,
                                int count, const cddp_checkpoint_desc *desc) {
  cddp__checkpoint c;
  cddp_result r;
  cddp__enter_call(__func__);
  r = cddp__checkpoint_begin(&c, true, g, path, params, count, desc);
  if ((r = cddp__compare_calls(&c, r)) == CDDP_OK) {
    if (c.first) r = cddp__save_header(&c);
    if (c.first && r == CDDP_OK) r = cddp__write_checkpoint(&c, path);
    r = cddp__consensus(g, r, NULL, 0, NULL);
  }
  cddp__checkpoint_end(&c);
  return cddp__fail_on_file(__func__, path, r);
}

/* --- loading --- */

static cddp_result cddp__lacks(const char *what, const char *name) {
  return cddp__fail(CDDP_INVALID_ARGUMENT,
                    "the file has no %s \"%s\"; set partial to leave such things as they are", what,
                    name);
}

/* Whether the tensor of the file is one for this item. */
static cddp_result cddp__check_match(const cddp__st_item *item, const cddp_tensor_info *t) {
  cddp_dtype dtype = (cddp_dtype)item->type->dtype;
  bool converts = t->dtype >= 0 && cddp__dtype_trains((cddp_dtype)t->dtype) &&
                  cddp__dtype_trains(dtype);
  if (t->count != item->count)
    return cddp__fail(CDDP_INVALID_ARGUMENT,
                      "\"%.60s\" has %" PRIu64 " elements in the file, the parameter has %zu",
                      t->name, t->count, item->count);
  if (t->dtype != (int)dtype && !converts)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "\"%.60s\" is %s in the file, the parameter is %s",
                      t->name, t->type, cddp__dtype_names[dtype]);
  if (item->param < 0 && !item->any_shape &&
      (item->shape.dims != t->dims ||
       memcmp(item->shape.size, t->shape, (size_t)t->dims * sizeof *t->shape) != 0))
    return cddp__fail(CDDP_INVALID_ARGUMENT, "\"%.60s\" has another shape in the file", t->name);
  return CDDP_OK;
}

/* Finds the items in the file, and memory for states, which take their places only when all is
   read: but on a device they are read into them. Nothing may be left over in the file, but without
   an optimizer its states. */
static cddp_result cddp__match_items(cddp__checkpoint *c) {
  const cddp_optim *s = c->desc->optim;
  bool partial = c->desc->partial;
  bool *taken = (bool *)cddp__calloc(c->allocator, c->file->count, sizeof *taken);
  cddp_result r = taken != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
  size_t i;
  for (i = 0; r == CDDP_OK && i < c->item_count; i++) {
    cddp__st_item *item = &c->items[i];
    const cddp_tensor_info *t = cddp__st_find(c->file, item->name);
    bool sibling = item->param >= 0 && item[-1].param == item->param;
    if (item->param >= 0 && !c->has_lr) continue; /* partial, and the file has no optimizer */
    if (t == NULL) { /* all states of a parameter may be missing: no step had touched it */
      if (!partial && (item->param < 0 || (sibling && item[-1].from != NULL)))
        r = cddp__lacks("tensor", item->name);
      continue;
    }
    if (!partial && sibling && item[-1].from == NULL) r = cddp__lacks("tensor", item[-1].name);
    if (r != CDDP_OK) break;
    r = cddp__check_match(item, t);
    taken[t - c->file->tensors] = true;
    c->has_lr = c->has_lr || item->data == &c->lr;
    if (r == CDDP_OK && item->place != NULL) {
      item->data = s->backend != NULL ? *item->place
                                      : cddp__calloc(&s->allocator, 1, (size_t)item->bytes);
      if (item->data == NULL) r = CDDP_OUT_OF_MEMORY;
    }
    item->from = t;
  }
  for (i = 0; r == CDDP_OK && !partial && i < c->file->count; i++)
    if (!taken[i] && (s != NULL || strncmp(c->file->tensors[i].name, "optimizer.", 10) != 0))
      r = cddp__fail(CDDP_INVALID_ARGUMENT,
                     "the file has a tensor \"%.60s\", which is not among the parameters%s; set "
                     "partial to leave it", c->file->tensors[i].name,
                     s != NULL ? " or this optimizer's states" : "");
  cddp__free(c->allocator, taken);
  return r;
}

/* Numbers first .. end - 1 of the file. *found: it has them; without partial it must. */
static cddp_result cddp__match_numbers(cddp__checkpoint *c, int first, int end, bool *found) {
  for (; first < end; first++) {
    const char *key = cddp__number_keys[first], *text = cddp__st_value(c->file, key);
    char *rest = NULL;
    if (text == NULL) return c->desc->partial ? CDDP_OK : cddp__lacks("metadata", key);
    errno = 0;
    c->numbers[first] = strtoull(text, &rest, 10);
    if (text[0] < '0' || text[0] > '9' || *rest != 0 || errno != 0)
      return cddp__fail(CDDP_IO, "its metadata \"%s\" is not a number", key);
  }
  *found = true;
  return CDDP_OK;
}

/* Finds in the file all that is asked for; changes nothing outside c. */
static cddp_result cddp__match(cddp__checkpoint *c) {
  const cddp_checkpoint_desc *d = c->desc;
  const cddp_sampler_desc *s = d->sampler != NULL ? &d->sampler->desc : NULL;
  const uint64_t *v = c->numbers;
  cddp_result r = cddp__st_parse(c->file);
  size_t needed = 0;
  int i;
  if (r == CDDP_OK) r = cddp__match_items(c);
  if (r == CDDP_OK && s != NULL) r = cddp__match_numbers(c, 0, CDDP__OF_SAMPLER, &c->has_sampler);
  if (c->has_sampler && v[1] != 0 &&
      (v[2] != s->dataset_size || v[3] != s->seed || v[4] != (uint64_t)s->shuffle))
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "it was saved in the middle of an epoch over %" PRIu64 " samples, seed %" PRIu64
                   ", shuffle %d; the sampler has %zu, seed %" PRIu64 ", shuffle %d",
                   v[2], v[3], v[4] != 0, s->dataset_size, s->seed, s->shuffle);
  if (r == CDDP_OK && d->ddp != NULL)
    r = cddp__match_numbers(c, CDDP__OF_SAMPLER, CDDP__NUMBERS, &c->has_steps);
  if (c->has_steps && d->ddp->desc.shards != 0 && v[6] != (uint64_t)d->ddp->shards)
    r = cddp__fail(CDDP_INVALID_ARGUMENT,
                   "it was saved with %" PRIu64 " shards in a step; the cddp_ddp has %d", v[6],
                   d->ddp->shards);
  for (i = 0; r == CDDP_OK && i < d->metadata_count; i++) {
    const char *value = cddp__st_value(c->file, d->metadata[i].key);
    if (value != NULL) needed += strlen(value) + 1;
  }
  if (needed > 0 && (d->text == NULL || d->text_size < needed))
    r = cddp__fail(CDDP_INVALID_ARGUMENT, "text has %zu bytes; the metadata's values need %zu",
                   d->text != NULL ? d->text_size : 0, needed);
  return r;
}

/* Rank 0's values on all ranks. */
static cddp_result cddp__broadcast_bytes(const cddp__checkpoint *c, void *data, size_t bytes) {
  if (c->g == NULL) return CDDP_OK;
  return cddp__run_simple(c->g, CDDP__KIND_BROADCAST, data, data, bytes, CDDP_U8, 0);
}

/* The header, alike on all ranks, and what each rank finds in it. */
static cddp_result cddp__load_header(cddp__checkpoint *c, const char *path, cddp_result r) {
  uint64_t sizes[2] = {0, 0}; /* of the text and the data */
  if (r == CDDP_OK && c->first) r = cddp__st_open(&c->file, c->allocator, path);
  if ((r = cddp__compare_calls(c, r)) != CDDP_OK) return r;
  if (c->first) sizes[0] = c->file->text_size, sizes[1] = c->file->data_bytes;
  if ((r = cddp__broadcast_bytes(c, sizes, sizeof sizes)) != CDDP_OK) return r;
  if (!c->first) c->file = cddp__st_new(c->allocator, (size_t)sizes[0]);
  r = cddp__consensus(c->g, c->file != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY, NULL, 0, NULL);
  if (r == CDDP_OK) r = cddp__broadcast_bytes(c, c->file->text, c->file->text_size);
  if (r != CDDP_OK) return r;
  c->file->data_bytes = sizes[1];
  return cddp__consensus(c->g, cddp__match(c), NULL, 0, NULL);
}

static cddp_result cddp__load_tensors(cddp__checkpoint *c) {
  cddp_result r = CDDP_OK;
  size_t i;
  for (i = 0; c->first && r == CDDP_OK && i < c->item_count; i++) {
    const cddp__st_item *item = &c->items[i];
    float *steps = item->param >= 0 && item->place == NULL ? (float *)item->data : NULL;
    if (item->from == NULL) continue;
    r = cddp__copy_item(c, c->file->fd, item, 8 + c->file->text_size + item->from->begin);
    if (r != CDDP_OK || steps == NULL) continue;
    if (*steps >= 0 && *steps <= 0x1p24f) continue; /* f32 cannot count further */
    r = cddp__fail(CDDP_IO, "its \"%.100s\" is %g", item->name, (double)*steps);
    *steps = 0;
  }
  if (c->first && r == CDDP_OK && c->has_lr && !(c->lr >= 0 && c->lr <= DBL_MAX))
    r = cddp__fail(CDDP_IO, "its learning rate is %g", c->lr);
  r = cddp__consensus(c->g, r, NULL, 0, NULL);
  for (i = 0; r == CDDP_OK && c->g != NULL && i < c->item_count; i++) {
    cddp__st_item *item = &c->items[i];
    cddp__call call;
    if (item->from == NULL) continue;
    call = cddp__make_call(CDDP__KIND_BROADCAST, item->data, item->data, item->count,
                           (cddp_dtype)item->type->dtype, CDDP_SUM, 0);
    r = cddp__start_call(c->g, &call, NULL);
  }
  if (r == CDDP_OK && c->device)
    r = cddp__settle_device(c->g); /* cudaMemcpy may return before the bytes are there */
  return r;
}

/* Puts the states that were loaded in their places; cannot fail in host memory. */
static cddp_result cddp__take_states(cddp__checkpoint *c) {
  cddp_optim *s = c->desc->optim;
  cddp_result r = CDDP_OK;
  size_t i;
  if (s->share != NULL) s->drop(s); /* the next step makes it */
  for (i = 0; r == CDDP_OK && i < c->item_count; i++) {
    cddp__st_item *item = &c->items[i];
    bool found = item->from != NULL;
    if (item->param < 0) continue;
    if (item->place == NULL) {
      if (!found) *(float *)item->data = 0;
      continue;
    }
    if (!s->algorithm->counts)
      s->steps[item->param] = found || (item[-1].param == item->param && s->steps[item->param] > 0);
    if (cddp__is_master(s, (int)(item->place - s->state) / s->count))
      s->fresh[item->param] = !found;
    if (s->backend == NULL) {
      cddp__free(&s->allocator, *item->place);
      *item->place = item->data;
      item->data = NULL;
    } else if (!found) {
      r = s->backend->clear(s, *item->place, (size_t)item->bytes);
    }
  }
  return r == CDDP_OK ? cddp_optim_set_lr(s, c->lr) : r;
}

static cddp_result cddp__load_commit(cddp__checkpoint *c) {
  const cddp_checkpoint_desc *d = c->desc;
  char *text = d->text;
  cddp_result r;
  int i;
  if (d->optim != NULL) memset(d->optim->fresh, true, (size_t)d->optim->count);
  if (c->has_lr && (r = cddp__take_states(c)) != CDDP_OK) return r;
  if (c->has_steps) d->ddp->steps = c->numbers[5];
  if (c->has_sampler) cddp__sampler_begin(d->sampler, c->numbers[0], c->numbers[1], true);
  for (i = 0; i < d->metadata_count; i++) {
    const char *value = cddp__st_value(c->file, d->metadata[i].key);
    d->metadata[i].value = value != NULL ? text : NULL;
    if (value == NULL) continue;
    memcpy(text, value, strlen(value) + 1);
    text += strlen(value) + 1;
  }
  return d->optim != NULL ? cddp__write_copies(d->optim) : CDDP_OK;
}

CDDPDEF cddp_result (cddp_load)(cddp_group *g, const char *path, cddp_param *params, int count,
                                const cddp_checkpoint_desc *desc) {
  cddp__checkpoint c;
  cddp_result r;
  cddp__enter_call(__func__);
  r = cddp__checkpoint_begin(&c, false, g, path, params, count, desc);
  r = cddp__load_header(&c, path, r);
  if (r == CDDP_OK) r = cddp__load_tensors(&c);
  if (r == CDDP_OK) r = cddp__load_commit(&c);
  cddp__checkpoint_end(&c);
  return cddp__fail_on_file(__func__, path, r);
}

/* --- any file --- */

CDDPDEF cddp_result cddp_safetensors_open(cddp_safetensors **out, const char *path) {
  cddp_safetensors *f;
  cddp_result r;
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__CHECK(path != NULL, "path is NULL");
  r = cddp__st_open(&f, NULL, path);
  if (r == CDDP_OK) r = cddp__st_parse(f);
  if (r == CDDP_OK) *out = f;
  else cddp__st_close(f);
  return cddp__fail_on_file(__func__, path, r);
}

CDDPDEF int cddp_safetensors_count(const cddp_safetensors *f) {
  return f != NULL ? (int)f->count : -1;
}

CDDPDEF cddp_result cddp_safetensors_get(const cddp_safetensors *f, int index,
                                         cddp_tensor_info *out) {
  CDDP__CHECK(f != NULL && out != NULL, "the file or out is NULL");
  CDDP__CHECK(index >= 0 && (size_t)index < f->count, "index is %d; the file has %zu tensors",
              index, f->count);
  *out = f->tensors[index];
  return CDDP_OK;
}

CDDPDEF int cddp_safetensors_find(const cddp_safetensors *f, const char *name) {
  const cddp_tensor_info *t = f != NULL && name != NULL ? cddp__st_find(f, name) : NULL;
  return t != NULL ? (int)(t - f->tensors) : -1;
}

CDDPDEF cddp_result cddp_safetensors_read(const cddp_safetensors *f, int index, void *data,
                                          size_t bytes) {
  cddp_tensor_info t;
  memset(&t, 0, sizeof t); /* a compiler that does not see far believes it unset */
  CDDP__TRY(cddp_safetensors_get(f, index, &t));
  CDDP__CHECK(bytes == t.bytes && (data != NULL || bytes == 0),
              "data is NULL, or has %zu bytes where the tensor has %" PRIu64, bytes, t.bytes);
  return cddp__named(__func__,
                     cddp__file_io(f->fd, false, data, bytes, 8 + f->text_size + t.begin));
}

CDDPDEF const char *cddp_safetensors_metadata(const cddp_safetensors *f, const char *key) {
  return f != NULL && key != NULL ? cddp__st_value(f, key) : NULL;
}

CDDPDEF void cddp_safetensors_close(cddp_safetensors *f) { cddp__st_close(f); }

/* >>spawn --------------------------------------------------------------------------------------
   Ranks as processes and ranks as threads.
   Owns: the children of cddp_spawn and their pidfds; the groups and threads of cddp_run_threads.
   Entry points: the public functions.
   Works as follows. Processes: all children are forked, then begin together. The parent sleeps in
   poll(2) on their pidfds and reaps those that have ended, by their pids: other children are the
   program's. The first failure is kept; the others have a second to notice it, then get SIGTERM,
   and 5 s later SIGKILL; but a child of an elastic job is forked again. Threads: all groups are
   built on one block of memory before a thread starts; a thread that ends badly marks its slot as
   dead, which ends the others' waits. */

#define CDDP__NOTICE_S 1.0 /* after a failure, for the others to notice it and say so themselves */
#define CDDP__GRACE_S 5.0  /* between SIGTERM and SIGKILL */

typedef struct cddp__spawn_job {
  int (*fn)(int, void *);
  void *arg;
  int n, port, listen_fd; /* rank 0's store listens on listen_fd, at this port */
  int start[2];           /* a pipe: each child begins when it has read a byte */
  bool elastic;           /* a child that fails is forked again, */
  int restarts;           /* so many times more */
  bool succeeded;         /* a child has returned 0 */
  char secret[64];        /* CDDP_JOB_SECRET */
  pid_t parent;
  pid_t *pids; /* [n] behind fds. 0: not forked, or ended; -1: to be forked again */
  int alive;
  bool blind;         /* there are no pidfds on this system: look every 10 ms */
  struct pollfd *fds; /* [n] pidfds, -1: none */
  cddp_result result; /* the first failure, */
  char text[CDDP__ERROR_MAX]; /* in words; */
  bool by_signal;  /* a signal killed that child */
  int next_signal; /* that the others get at deadline; 0: no child has failed yet */
  double deadline;
} cddp__spawn_job;

static void cddp__setenv_int(const char *name, int value) {
  char text[16];
  snprintf(text, sizeof text, "%d", value);
  setenv(name, text, 1);
}

/* OpenMP, where the program has it. GNU's runtime keeps its threads for the next parallel region,
   and a child of fork, where they do not exist, waits for them for ever: told to pause, it lets
   them go (clang's runtime and OpenBLAS's own threads handle fork themselves). Like GNU's, OpenBLAS
   has read OMP_NUM_THREADS when the program began, so a child tells it its number of threads. */
#define CDDP__WEAK(result, name, arguments, symbol)                                               \
  static result name arguments __attribute__((weakref(symbol)))
CDDP__WEAK(int, cddp__omp_pause, (int), "omp_pause_resource_all");
CDDP__WEAK(int, cddp__omp_procs, (void), "omp_get_num_procs");
CDDP__WEAK(int, cddp__omp_threads, (void), "omp_get_max_threads");
CDDP__WEAK(void, cddp__omp_set_threads, (int), "omp_set_num_threads");
CDDP__WEAK(int, cddp__blas_procs, (void), "openblas_get_num_procs");
CDDP__WEAK(int, cddp__blas_threads, (void), "openblas_get_num_threads");
CDDP__WEAK(void, cddp__blas_set_threads, (int), "openblas_set_num_threads");

/* One thread for each rank, as torchrun has it, unless the user or the program has chosen. */
static void cddp__one_thread(void) {
  bool omp = cddp__omp_procs != NULL && cddp__omp_threads != NULL && cddp__omp_set_threads != NULL;
  bool blas = cddp__blas_procs != NULL && cddp__blas_threads != NULL &&
              cddp__blas_set_threads != NULL;
  if (cddp__env("OMP_NUM_THREADS") != NULL) return;
  setenv("OMP_NUM_THREADS", "1", 1);
  if (omp && cddp__omp_threads() == cddp__omp_procs()) cddp__omp_set_threads(1);
  if (cddp__env("OPENBLAS_NUM_THREADS") != NULL) return;
  if (blas && cddp__blas_threads() == cddp__blas_procs()) cddp__blas_set_threads(1);
}

/* The life of a child of cddp_spawn: never returns. joins: others have begun without it. */
static void cddp__child(const cddp__spawn_job *job, int rank, bool joins) {
  char byte;
  int code;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != job->parent) _exit(1); /* the parent died before the line above */
  close(job->start[1]);
  while ((code = (int)read(job->start[0], &byte, 1)) < 0 && errno == EINTR) {}
  if (code != 1) _exit(1); /* another child could not be started */
  close(job->start[0]);
  cddp__setenv_int("RANK", rank);
  cddp__setenv_int("WORLD_SIZE", job->n);
  cddp__setenv_int("LOCAL_RANK", rank);
  cddp__setenv_int("LOCAL_WORLD_SIZE", job->n);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  cddp__setenv_int("MASTER_PORT", job->port);
  setenv("CDDP_JOB_SECRET", job->secret, 1);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  unsetenv("CDDP_LISTEN_FD");
  unsetenv("CDDP_JOIN");
  if (joins) setenv("CDDP_JOIN", "1", 1);
  else if (rank == 0) cddp__setenv_int("CDDP_LISTEN_FD", job->listen_fd);
  else close(job->listen_fd);
  if (job->n > 1) cddp__one_thread();
  if (!isatty(1)) setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* or lines of ranks would mix */
  cddp__error_text[0] = 0;
  code = job->fn(rank, job->arg);
  fflush(NULL);
  _exit(code >= 0 && code <= 255 ? code : 255);
}

/* Keeps the first failure; the other children get SIGTERM after these seconds. */
static void cddp__spawn_failed(cddp__spawn_job *job, cddp_result r, double seconds) {
  job->result = r;
  snprintf(job->text, sizeof job->text, "%s", cddp__error_text);
  job->next_signal = SIGTERM;
  job->deadline = cddp__now() + seconds;
}

/* Reaps the children that have ended. Of several at once a signal comes before an exit code:
   survivors of a killed rank exit because of it. */
static void cddp__reap_children(cddp__spawn_job *job) {
  bool fresh = job->next_signal == 0, known;
  int i, status, tries;
  char how[96];
  for (i = 0; i < job->n; i++) {
    pid_t pid = job->pids[i], got = pid != 0 ? waitpid(pid, &status, WNOHANG) : 0;
    if (got == 0) continue;
    for (tries = 0; got < 0 && kill(pid, 0) == 0 && tries < 100; tries++)
      cddp__sleep(0.001); /* another thread is just reaping it: then the kernel keeps the status */
    /* If the program ignores SIGCHLD, or waits for any child in a handler or a thread, only Linux
       6.15 and later still have the status. */
    known = got > 0 || cddp__exit_status(job->fds[i].fd, (uint32_t)pid, &status);
    job->pids[i] = 0;
    job->alive--;
    cddp__close_fd(&job->fds[i].fd);
    if (!known && job->result == CDDP_OK) {
      job->result = CDDP_SYSTEM; /* unless a child fails later */
      snprintf(job->text, sizeof job->text,
               "rank %d (pid %d) has ended, but its exit status was taken by another part of this "
               "program (SIGCHLD ignored, SA_NOCLDWAIT, or waitpid(-1) in a handler or a thread); "
               "during cddp_spawn leave SIGCHLD at SIG_DFL and wait for no child", i, (int)pid);
    }
    if (known && status == 0) job->succeeded = true;
    if (!known || status == 0 || !fresh) continue;
    if (job->next_signal != 0 && (!WIFSIGNALED(status) || job->by_signal)) continue;
    if (job->elastic && (job->succeeded || job->alive > 0)) {
      if (job->restarts > 0) job->pids[i] = -1;
      continue;
    }
    cddp__describe_status(status, how, sizeof how);
    cddp__fail(CDDP_PEER_LOST, "rank %d (pid %d) %s", i, (int)pid, how);
    cddp__spawn_failed(job, CDDP_PEER_LOST, CDDP__NOTICE_S);
    job->by_signal = WIFSIGNALED(status);
  }
}

static cddp_result cddp__fork_child(cddp__spawn_job *job, int i, bool joins) {
  pid_t pid = fork();
  if (pid < 0) return cddp__fail_errno("fork");
  if (pid == 0) cddp__child(job, i, joins);
  job->pids[i] = pid;
  job->alive++;
  job->fds[i].events = POLLIN;
  job->fds[i].fd = (int)syscall(SYS_pidfd_open, pid, 0u);
  if (job->fds[i].fd >= 0) return CDDP_OK;
  if (errno != ENOSYS && errno != EPERM) /* valgrind 3.19; old Docker */
    return cddp__fail(CDDP_SYSTEM, "pidfd_open: %s%s", strerror(errno),
                      errno == EMFILE ? "; raise ulimit -n: each rank takes a descriptor" : "");
  job->blind = true;
  return CDDP_OK;
}

/* Elastic: forks lost children again, while there are others that they can join. */
static void cddp__fork_again(cddp__spawn_job *job) {
  cddp_result r = CDDP_OK;
  int i;
  for (i = 0; i < job->n; i++) {
    if (job->pids[i] != -1) continue;
    job->pids[i] = 0;
    if (r != CDDP_OK || job->next_signal != 0 || job->alive == 0 || job->succeeded ||
        job->restarts == 0)
      continue;
    job->restarts--;
    fflush(NULL);
    r = cddp__fork_child(job, i, true);
    if (r == CDDP_OK && write(job->start[1], "", 1) != 1) r = cddp__fail_errno("write");
    if (r != CDDP_OK) cddp__spawn_failed(job, r, 0);
  }
}

static cddp_result cddp__watch_children(cddp__spawn_job *job) {
  int i, ms;
  while (job->alive > 0) {
    if (job->next_signal != 0 && cddp__now() >= job->deadline) {
      for (i = 0; i < job->n; i++)
        if (job->pids[i] > 0) kill(job->pids[i], job->next_signal);
      job->deadline = cddp__now() + (job->next_signal == SIGTERM ? CDDP__GRACE_S : 1);
      job->next_signal = SIGKILL;
    }
    ms = job->blind ? 10 : job->next_signal == 0 ? -1 : cddp__poll_ms(job->deadline, 1000);
    if (poll(job->fds, (nfds_t)job->n, ms) < 0 && errno != EINTR)
      cddp__sleep(0.01); /* poll takes no more descriptors than ulimit -n */
    cddp__reap_children(job);
    cddp__fork_again(job);
  }
  return job->result == CDDP_OK ? CDDP_OK : cddp__fail(job->result, "%s", job->text);
}

/* Forks all children. They begin together, when all can be watched: the status of one that ends
   before that may be lost. */
static cddp_result cddp__fork_children(cddp__spawn_job *job) {
  char bytes[CDDP__MAX_RANKS];
  cddp_result r = CDDP_OK;
  int i;
  fflush(NULL); /* or the children would print it again */
  if (cddp__omp_pause != NULL) cddp__omp_pause(1 /* omp_pause_soft */);
  for (i = 0; i < job->n; i++) job->fds[i].fd = -1;
  for (i = 0; i < job->n && r == CDDP_OK; i++) r = cddp__fork_child(job, i, false);
  if (r != CDDP_OK) return r;
  memset(bytes, 0, sizeof bytes);
  return write(job->start[1], bytes, (size_t)job->n) == job->n ? CDDP_OK
                                                               : cddp__fail_errno("write");
}

/* restarts -1: not elastic. */
static cddp_result cddp__spawn(int (*fn)(int rank, void *arg), void *arg, int nprocs,
                               int restarts) {
  cddp__spawn_job job;
  uint64_t dice[2];
  cddp_result r;
  memset(&job, 0, sizeof job);
  job.fn = fn;
  job.arg = arg;
  job.n = nprocs;
  job.elastic = restarts >= 0;
  job.restarts = restarts;
  job.parent = getpid();
  if ((r = cddp__random(dice, sizeof dice)) != CDDP_OK) return r;
  if ((r = cddp__listen_any(&job.listen_fd, &job.port)) != CDDP_OK) return r;
  snprintf(job.secret, sizeof job.secret, "%d:%016" PRIx64 "%016" PRIx64, job.port, dice[0],
           dice[1]);
  if (syscall(SYS_pipe2, job.start, O_CLOEXEC) != 0) {
    r = cddp__fail_errno("pipe2");
    close(job.listen_fd);
    return r;
  }
  job.fds = (struct pollfd *)calloc((size_t)nprocs, sizeof *job.fds + sizeof *job.pids);
  if (job.fds != NULL) job.pids = (pid_t *)(job.fds + nprocs);
  if (job.fds != NULL) r = cddp__fork_children(&job);
  else r = cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d processes", nprocs);
  if (r != CDDP_OK) cddp__spawn_failed(&job, r, 0);
  close(job.listen_fd); /* rank 0 has it */
  if (r != CDDP_OK) cddp__close_fd(&job.start[1]); /* children do not begin */
  r = cddp__watch_children(&job);
  close(job.start[0]);
  cddp__close_fd(&job.start[1]);
  free(job.fds);
  return r;
}

CDDPDEF cddp_result cddp_spawn(int (*fn)(int rank, void *arg), void *arg, int nprocs) {
  CDDP__CHECK(fn != NULL, "fn is NULL");
  CDDP__CHECK(nprocs >= 1 && nprocs <= CDDP__MAX_RANKS, "nprocs is %d; it must be from 1 to %d",
              nprocs, CDDP__MAX_RANKS);
  return cddp__spawn(fn, arg, nprocs, -1);
}

CDDPDEF cddp_result cddp_spawn_elastic(int (*fn)(int rank, void *arg), void *arg, int nprocs,
                                       int max_restarts) {
  CDDP__CHECK(fn != NULL, "fn is NULL");
  CDDP__CHECK(nprocs >= 1 && nprocs <= CDDP__MAX_RANKS, "nprocs is %d; it must be from 1 to %d",
              nprocs, CDDP__MAX_RANKS);
  CDDP__CHECK(max_restarts >= 0, "max_restarts is %d; it must be 0 or more", max_restarts);
  return cddp__spawn(fn, arg, nprocs, max_restarts);
}

/* --- ranks as threads --- */

typedef struct cddp__thread_rank {
  int (*fn)(cddp_group *, void *);
  void *arg;
  pthread_t thread;
  cddp_group *group;
  cddp__host *host; /* kept until all threads have ended: others may still look at its memory */
  int code;
  bool returned;           /* false: fn called pthread_exit, or was cancelled */
  cddp__atomic_u32 *order; /* counts endings, so that the first failure can be told */
  uint32_t ended;
  char text[CDDP__ERROR_MAX]; /* the thread's last error, for the caller's message */
} cddp__thread_rank;

/* However a thread's fn ends: if not well, the others are told. */
static void cddp__thread_end(void *p) {
  cddp__thread_rank *t = (cddp__thread_rank *)p;
  snprintf(t->text, sizeof t->text, "%s", cddp__error_text);
  t->ended = cddp__add32(t->order, 1);
  if (!t->returned || t->code != 0) {
    cddp__exchange32(&cddp__slot_of(t->group, t->group->rank)->state, CDDP__SLOT_DEAD);
    cddp__wake_all(t->group);
  }
  cddp__group_leave(t->group);
}

static void *cddp__thread_main(void *p) {
  cddp__thread_rank *t = (cddp__thread_rank *)p;
  pthread_cleanup_push(cddp__thread_end, t);
  t->code = t->fn(t->group, t->arg);
  t->returned = true;
  pthread_cleanup_pop(1);
  return NULL;
}

/* Starts the threads and waits for them. If one cannot be started, the others lose a peer. */
static cddp_result cddp__run_thread_ranks(cddp__thread_rank *t, int n, cddp_result r) {
  char text[CDDP__ERROR_MAX];
  int i, started = 0, first = -1;
  while (r == CDDP_OK && started < n) {
    r = cddp__thread_start(&t[started].thread, cddp__thread_main, &t[started], false);
    if (r == CDDP_OK) started++;
  }
  for (i = started; i < n; i++)
    if (t[i].group != NULL) cddp__group_leave(t[i].group);
  for (i = 0; i < started; i++) pthread_join(t[i].thread, NULL);
  if (r != CDDP_OK) return r;
  for (i = 0; i < n; i++)
    if ((!t[i].returned || t[i].code != 0) && (first < 0 || t[i].ended < t[first].ended)) first = i;
  if (first < 0) return CDDP_OK;
  snprintf(text, sizeof text, "returned %d", t[first].code);
  return cddp__fail(CDDP_PEER_LOST, "rank %d (a thread) %s%s%s", first,
                    t[first].returned ? text : "did not return: pthread_exit or pthread_cancel",
                    t[first].text[0] ? "; its last error: " : "", t[first].text);
}

CDDPDEF cddp_result cddp_run_threads(int (*fn)(cddp_group *g, void *arg), void *arg, int n) {
  cddp__thread_rank *t;
  char *block;
  cddp__atomic_u32 order = {0};
  uint64_t job = cddp__record_job();
  double timeout_s;
  cddp_result r = cddp__discover_timeout(0, &timeout_s);
  int i;
  CDDP__CHECK(fn != NULL, "fn is NULL");
  CDDP__CHECK(n >= 1 && n <= CDDP__MAX_RANKS, "n is %d; it must be from 1 to %d", n,
              CDDP__MAX_RANKS);
  t = (cddp__thread_rank *)calloc((size_t)n, sizeof *t);
  block = cddp__map_memory(-1, 0, cddp__block_bytes(n, n));
  if (t == NULL || block == NULL)
    r = cddp__fail(CDDP_OUT_OF_MEMORY, "out of memory for %d threads", n);
  for (i = 0; r == CDDP_OK && i < n; i++) {
    t[i].fn = fn;
    t[i].arg = arg;
    t[i].order = &order;
    if ((t[i].host = cddp__host_create(NULL, NULL, n, i)) == NULL) {
      r = CDDP_OUT_OF_MEMORY;
      break;
    }
    t[i].host->threads = true;
    r = cddp__record_open(&t[i].host->record, job, i, n, 0);
    if (r == CDDP_OK)
      r = cddp__group_build(&t[i].group, t[i].host, i, n, NULL, block, timeout_s);
  }
  if (t != NULL) r = cddp__run_thread_ranks(t, n, r);
  for (i = 0; t != NULL && i < n; i++) cddp__host_release(t[i].host);
  if (block != NULL) munmap(block, cddp__block_bytes(n, n));
  free(t);
#ifdef CDDP_CUDA
  cddp__await_endings();
#endif
  return r;
}

CDDP__COLD_END

/* >>public ---------------------------------------------------------------------------------------
   The public functions that do not lie in the room of what they do.
   Owns and touches nothing.
   Works as follows: a function checks its arguments, so that CDDP_INVALID_ARGUMENT comes with a
   sentence before anything is done, and calls the room that does the work. Where a macro of CALL
   SITES has a function's name, the definition has it in parentheses, which macros pass over. */

/* --- results, dtypes, launchers --- */

CDDPDEF const char *cddp_result_name(cddp_result r) {
  return (unsigned)r < CDDP__RESULT_COUNT ? cddp__result_names[r] : "not a cddp_result";
}

CDDPDEF const char *cddp_result_text(cddp_result r) {
  return (unsigned)r < CDDP__RESULT_COUNT ? cddp__result_texts[r] : "not a cddp_result";
}

CDDPDEF const char *cddp_error(void) { return cddp__error_text; }

CDDPDEF size_t cddp_dtype_size(cddp_dtype dtype) { return cddp__dtype_size(dtype); }

CDDPDEF int cddp_launcher_rank(void) {
  cddp__place at;
  int i;
  memset(&at, 0, sizeof at);
  at.joins = cddp__env("CDDP_JOIN") != NULL;
  if (cddp__env_ranks(&at) != CDDP_OK) return 0;
  for (i = 0; i < CDDP__LAUNCHERS; i++)
    if (cddp__launched_by(i)) return at.rank;
  return -1;
}

/* --- groups --- */

static cddp_result cddp__check_allocator(const cddp_allocator *a) {
  if ((a->alloc == NULL) == (a->free == NULL)) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "allocator needs both alloc and free, or neither");
}

CDDPDEF cddp_result cddp_init(cddp_group **out, const cddp_group_desc *desc) {
  static cddp_group_desc defaults; /* never written: C++ wants values for a const one */
  const cddp_group_desc *d = desc != NULL ? desc : &defaults;
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__TRY(cddp__check_device(d));
  CDDP__CHECK(d->world_size >= 0 && d->world_size <= CDDP__MAX_RANKS,
              "world_size is %d; it must be from 1 to %d, or 0 for the environment's",
              d->world_size, CDDP__MAX_RANKS);
  CDDP__CHECK(d->world_size == 0 ||
                  (d->rank >= 0 && (d->rank < d->world_size || cddp__env("CDDP_JOIN") != NULL)),
              "rank is %d but world_size is %d; ranks go from 0 to %d", d->rank, d->world_size,
              d->world_size - 1);
  CDDP__CHECK(d->timeout_s >= 0, "timeout_s is negative");
  CDDP__TRY(cddp__check_allocator(&d->allocator));
  CDDP__TRY(cddp__init(out, d));
  return cddp__named(__func__, cddp__attach_device(out, d));
}

CDDPDEF cddp_result (cddp_group_split)(cddp_group *g, int color, int key, cddp_group **out) {
  cddp__enter_call(__func__);
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__CHECK(g != NULL, "the group is NULL");
  return cddp__split_devices(g, color, key, 0, false, out);
}

CDDPDEF cddp_result (cddp_group_new)(cddp_group *g, const int *ranks, int count, cddp_group **out) {
  int i, j, color = -1, key = 0;
  cddp__enter_call(__func__);
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__CHECK(g != NULL, "the group is NULL");
  CDDP__CHECK(ranks != NULL && count > 0, "the list of ranks is empty");
  for (i = 0; i < count; i++) {
    CDDP__CHECK(ranks[i] >= 0 && ranks[i] < g->size, "rank %d is not in the group (0 to %d)",
                ranks[i], g->size - 1);
    for (j = 0; j < i; j++) CDDP__CHECK(ranks[j] != ranks[i], "rank %d is listed twice", ranks[i]);
    if (ranks[i] == g->rank) color = 0, key = i;
  }
  return cddp__split_devices(g, color, key,
                             cddp__hash64((uint64_t)count, ranks, (size_t)count * sizeof *ranks),
                             false, out);
}

CDDPDEF cddp_group *cddp_at(cddp_group *g, const char *file, int line) {
  cddp__next_site.file = file;
  cddp__next_site.line = line;
  return g;
}

CDDPDEF cddp_ddp *cddp_ddp_at(cddp_ddp *d, const char *file, int line) {
  (void)cddp_at(NULL, file, line);
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
CDDPDEF int cddp_local_rank(const cddp_group *g) { return g != NULL ? g->local_rank : -1; }
CDDPDEF int cddp_local_world_size(const cddp_group *g) { return g != NULL ? g->local_size : -1; }

CDDPDEF void *cddp_alloc(cddp_group *g, size_t bytes) {
  if (g == NULL) cddp__fail(CDDP_INVALID_ARGUMENT, "cddp_alloc: the group is NULL");
  if (g == NULL) return NULL;
  return g->backend != NULL ? g->backend->alloc(g, bytes)
                            : cddp__arena_alloc(g->host, bytes, CDDP__FOR_USER);
}

CDDPDEF void cddp_free(cddp_group *g, void *p) {
  if (g == NULL) return;
  if (g->backend != NULL) g->backend->free(p);
  else cddp__arena_free(g->host, p);
}

CDDPDEF cddp_result cddp_set_device(cddp_group *g, const char *device, const char *backend) {
  cddp_group_desc d;
  CDDP__CHECK(g != NULL, "the group is NULL");
  CDDP__CHECK(device != NULL && strncmp(device, "cuda", 4) == 0,
              "device is not \"cuda\" or a certain GPU, such as \"cuda:0\"");
  memset(&d, 0, sizeof d);
  d.device = device;
  d.backend = backend;
  CDDP__TRY(cddp__check_device(&d));
  CDDP__CHECK(g->backend == NULL && !g->carrier->foreign,
              "the group has a device already, or its backend is \"mpi\"");
  cddp__engine_drain(g);
  CDDP__TRY(cddp__check_group(g));
  return cddp__named(__func__, cddp__give_device(g, &d));
}

CDDPDEF void cddp_set_stream(cddp_group *g, void *stream) {
  if (g != NULL && g->backend != NULL) g->stream = stream;
}

CDDPDEF void *cddp_stream(const cddp_group *g) {
  return g != NULL ? g->stream : NULL;
}

CDDPDEF cddp_result cddp_synchronize(cddp_group *g) {
  CDDP__CHECK(g != NULL, "the group is NULL");
  if (g->backend != NULL) return g->backend->synchronize(g);
  cddp__engine_drain(g);
  return cddp__check_group(g);
}

CDDPDEF void cddp_register_kernels(const cddp_kernels *kernels) {
  cddp__registered_kernels = kernels;
}

/* --- collectives --- */

static cddp_result cddp__start(const char *function, cddp_group *g, const cddp__call *c,
                               cddp_work **work) {
  cddp_result r;
  cddp__enter_call(function);
  if (work != NULL) *work = NULL;
  if ((r = cddp__check_call(g, c)) != CDDP_OK) return cddp__named(function, r);
  return c->kind < CDDP__KIND_SEND ? cddp__start_call(g, c, work)
                                   : cddp__start_message(g, c, work);
}

CDDPDEF cddp_result (cddp_all_reduce)(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                      cddp_op op, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_ALL_REDUCE, buf, buf, count, dtype, op, -1);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_reduce)(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                  cddp_op op, int root, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_REDUCE, buf, buf, count, dtype, op, root);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_broadcast)(cddp_group *g, void *buf, size_t count, cddp_dtype dtype,
                                     int root, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_BROADCAST, buf, buf, count, dtype, CDDP_SUM, root);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_all_gather)(cddp_group *g, const void *send, void *recv,
                                      size_t count_per_rank, cddp_dtype dtype, cddp_work **work) {
  cddp__call c =
      cddp__make_call(CDDP__KIND_ALL_GATHER, send, recv, count_per_rank, dtype, CDDP_SUM, -1);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_gather)(cddp_group *g, const void *send, void *recv,
                                  size_t count_per_rank, cddp_dtype dtype, int root,
                                  cddp_work **work) {
  cddp__call c =
      cddp__make_call(CDDP__KIND_GATHER, send, recv, count_per_rank, dtype, CDDP_SUM, root);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_scatter)(cddp_group *g, const void *send, void *recv,
                                   size_t count_per_rank, cddp_dtype dtype, int root,
                                   cddp_work **work) {
  cddp__call c =
      cddp__make_call(CDDP__KIND_SCATTER, send, recv, count_per_rank, dtype, CDDP_SUM, root);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_reduce_scatter)(cddp_group *g, const void *send, void *recv,
                                          size_t count_per_rank, cddp_dtype dtype, cddp_op op,
                                          cddp_work **work) {
  cddp__call c =
      cddp__make_call(CDDP__KIND_REDUCE_SCATTER, send, recv, count_per_rank, dtype, op, -1);
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_all_to_all)(cddp_group *g, const void *send, void *recv,
                                      size_t count_per_rank, cddp_dtype dtype, cddp_work **work) {
  cddp__call c =
      cddp__make_call(CDDP__KIND_ALL_TO_ALL, send, recv, count_per_rank, dtype, CDDP_SUM, -1);
  return cddp__start(__func__, g, &c, work);
}

/* With counts [world_size]; send_counts NULL: one share for all, which recv_counts has too. */
static cddp_result cddp__start_counted(const char *function, cddp_group *g, cddp__call *c,
                                       const size_t *send_counts, const size_t *recv_counts,
                                       cddp_work **work) {
  bool scatters = cddp__shapes[c->kind].scatters;
  size_t sent = 0, received = 0, most = SIZE_MAX / 2 / c->esize;
  cddp__part *parts;
  cddp_result r;
  int p;
  if (g == NULL || recv_counts == NULL || (scatters && send_counts == NULL)) {
    cddp__enter_call(function);
    return cddp__named(function, cddp__fail(CDDP_INVALID_ARGUMENT, "%s is NULL",
                                            g == NULL ? "the group" : "an array of counts"));
  }
  parts = (cddp__part *)cddp__malloc(&g->host->allocator, cddp__parts_bytes(g));
  if (parts == NULL) return CDDP_OUT_OF_MEMORY;
  for (p = 0; p < g->size; p++) {
    cddp__part *part = &parts[p];
    part->out = scatters ? send_counts[p] : recv_counts[g->rank];
    part->in = recv_counts[p];
    part->out_at = scatters ? sent : 0;
    part->in_at = received;
    if (part->out > most - part->out_at || part->in > most - received) break;
    sent += part->out;
    received += part->in;
  }
  if (sent == 0) c->send = g; /* for sums of addresses, in which NULL is undefined */
  if (received == 0) c->recv = g;
  c->count = g->size > 1 ? CDDP__COUNTED : received;
  c->parts = g->size > 1 ? parts : NULL;
  if (p < g->size)
    r = cddp__named(function, cddp__fail(CDDP_INVALID_ARGUMENT,
                                         "the counts up to rank %d's are beyond the address space",
                                         p));
  else if (g->size == 1 && sent != received)
    r = cddp__fail(CDDP_MISMATCH, "rank 0 sends itself %zu elements and expects %zu", sent,
                   received);
  else
    r = cddp__start(function, g, c, work);
  cddp__free(&g->host->allocator, parts);
  return r;
}

CDDPDEF cddp_result (cddp_all_gather_v)(cddp_group *g, const void *send, void *recv,
                                        const size_t *counts, cddp_dtype dtype, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_ALL_GATHER_V, send, recv, 0, dtype, CDDP_SUM, -1);
  return cddp__start_counted(__func__, g, &c, NULL, counts, work);
}

CDDPDEF cddp_result (cddp_all_to_all_v)(cddp_group *g, const void *send,
                                        const size_t *send_counts, void *recv,
                                        const size_t *recv_counts, cddp_dtype dtype,
                                        cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_ALL_TO_ALL_V, send, recv, 0, dtype, CDDP_SUM, -1);
  return cddp__start_counted(__func__, g, &c, send_counts, recv_counts, work);
}

CDDPDEF cddp_result (cddp_barrier)(cddp_group *g) {
  cddp__call c = cddp__make_call(CDDP__KIND_BARRIER, NULL, NULL, 0, CDDP_F32, CDDP_SUM, -1);
  return cddp__start(__func__, g, &c, NULL);
}

CDDPDEF cddp_result (cddp_barrier_async)(cddp_group *g, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_BARRIER, NULL, NULL, 0, CDDP_F32, CDDP_SUM, -1);
  CDDP__CHECK(work != NULL, "work is NULL");
  return cddp__start(__func__, g, &c, work);
}

/* --- messages and handles --- */

CDDPDEF cddp_result (cddp_send)(cddp_group *g, const void *buf, size_t count, cddp_dtype dtype,
                                int peer, int tag, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_SEND, buf, NULL, count, dtype, CDDP_SUM, peer);
  memcpy(&c.recv, &buf, sizeof buf); /* recv's is not const, a send does not write to it */
  c.tag = tag;
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF cddp_result (cddp_recv)(cddp_group *g, void *buf, size_t count, cddp_dtype dtype, int peer,
                                int tag, cddp_work **work) {
  cddp__call c = cddp__make_call(CDDP__KIND_RECV, buf, buf, count, dtype, CDDP_SUM, peer);
  c.tag = tag;
  return cddp__start(__func__, g, &c, work);
}

CDDPDEF int cddp_source(void) { return cddp__last_source; }

CDDPDEF cddp_result cddp_wait(cddp_work *w) {
  cddp__enter_call(__func__);
  CDDP__CHECK(w != NULL, "the work is NULL");
  return cddp__work_wait(w, -1);
}

CDDPDEF cddp_result cddp_wait_for(cddp_work *w, double timeout_s) {
  cddp__enter_call(__func__);
  CDDP__CHECK(w != NULL, "the work is NULL");
  CDDP__CHECK(timeout_s >= 0, "timeout_s is negative");
  return cddp__work_wait(w, timeout_s < 1e9 ? timeout_s : 1e9);
}

CDDPDEF cddp_result cddp_test(cddp_work *w, bool *done) {
  CDDP__CHECK(w != NULL && done != NULL, "the work or done is NULL");
  *done = cddp__work_done(w);
  return CDDP_OK;
}

/* --- data parallel --- */

CDDPDEF cddp_result (cddp_ddp_create)(cddp_ddp **out, cddp_group *g, cddp_param *params, int count,
                                      const cddp_ddp_desc *desc) {
  static cddp_ddp_desc defaults; /* never written */
  cddp_ddp *d;
  cddp_result r;
  cddp__enter_call(__func__);
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  if (desc == NULL) desc = &defaults;
  CDDP__CHECK(g != NULL, "the group is NULL");
  CDDP__CHECK(count != 0, "there are no parameters");
  CDDP__TRY(cddp__check_params(params, count, CDDP__HAS_DATA | CDDP__IS_TRAINED));
  CDDP__TRY(cddp__check_params(desc->buffers, desc->buffer_count, CDDP__HAS_DATA));
  CDDP__TRY(cddp__check_sparse(params, count, desc->sparse_rows));
  CDDP__CHECK(desc->bucket_cap_mb >= 0 && desc->first_bucket_mb >= 0,
              "bucket_cap_mb and first_bucket_mb must be at least 0");
  CDDP__CHECK(desc->shards >= 0 && desc->shards <= CDDP__MAX_RANKS,
              "shards is %d; it must be from 0 to %d", desc->shards, CDDP__MAX_RANKS);
  CDDP__CHECK(desc->max_grad_norm >= 0, "max_grad_norm must be at least 0");
  CDDP__TRY(cddp__check_own_memory(params, count, NULL, &g->host->allocator));
  cddp__engine_drain(g);
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if ((d = cddp__ddp_new(g, params, count, desc)) == NULL) return CDDP_OUT_OF_MEMORY;
  r = cddp__ddp_setup(d);
  if (r == CDDP_OK && desc->elastic) r = cddp__elastic_create(d);
  if (r != CDDP_OK) {
    cddp_ddp_destroy(d);
    return cddp__named(__func__, r);
  }
  *out = d;
  return CDDP_OK;
}

CDDPDEF uint64_t cddp_ddp_steps(const cddp_ddp *d) { return d != NULL ? d->steps : 0; }

CDDPDEF cddp_result cddp_ddp_add_rows(cddp_ddp *d, int param, const int64_t *rows,
                                      const void *values, size_t n) {
  char space[24];
  const char *name;
  void *copy = NULL;
  cddp__sparse *s;
  cddp_result r;
  size_t i;
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  CDDP__CHECK(param >= 0 && param < d->count, "param is %d; there are %d", param, d->count);
  name = cddp__param_name(&d->params[param], param, space, sizeof space);
  s = cddp__sparse_of(d, param);
  CDDP__CHECK(s != NULL, "parameter \"%s\" is dense; set sparse_rows in cddp_ddp_desc", name);
  CDDP__CHECK(n == 0 || (rows != NULL && values != NULL), "rows or values is NULL");
  for (i = 0; i < n; i++)
    CDDP__CHECK(rows[i] >= 0 && (uint64_t)rows[i] < s->rows,
                "row %" PRId64 " of parameter \"%s\", which has rows 0 to %zu", rows[i], name,
                s->rows - 1);
  CDDP__CHECK(n <= SIZE_MAX / 4 / (s->bytes + 64), "n is beyond the address space");
  r = cddp__from_device(d->group, &values, n * s->bytes, &copy);
  if (r == CDDP_OK)
    r = cddp__rows_add(&d->group->host->allocator, &s->added, s->bytes, rows, values, n);
  cddp__free(&d->group->host->allocator, copy);
  return r;
}

CDDPDEF size_t cddp_ddp_rows(const cddp_ddp *d, int param, const int64_t **rows,
                             const void **values) {
  const cddp__sparse *s =
      d != NULL && param >= 0 && param < d->count ? cddp__sparse_of(d, param) : NULL;
  if (rows != NULL) *rows = s != NULL ? s->mean.number : NULL;
  if (values != NULL) *values = s != NULL ? s->mean.values : NULL;
  return s != NULL ? s->mean.n : 0;
}

CDDPDEF cddp_result (cddp_ddp_wait)(cddp_ddp *d) {
  cddp_result r;
  cddp__enter_call(__func__);
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  r = d->elastic != NULL ? cddp__elastic_step(d, NULL)
                         : cddp__ddp_step(d, CDDP__KIND_DDP_WAIT, NULL);
  return r == CDDP_INVALID_ARGUMENT ? cddp__named(__func__, r) : r;
}

CDDPDEF cddp_result (cddp_ddp_step)(cddp_ddp *d, cddp_optim *s) {
  cddp_result r;
  cddp__enter_call(__func__);
  CDDP__CHECK(d != NULL && s != NULL, "the cddp_ddp or the cddp_optim is NULL");
  if (s->paired != d->id || d->no_sync) CDDP__TRY(cddp__check_pair(d, s));
  r = d->elastic != NULL ? cddp__elastic_step(d, s)
                         : cddp__ddp_step(d, CDDP__KIND_DDP_STEP, s);
  return r == CDDP_INVALID_ARGUMENT ? cddp__named(__func__, r) : r;
}

CDDPDEF int cddp_ddp_partitions(const cddp_ddp *d, const cddp_partition **out) {
  if (out != NULL) *out = d != NULL ? d->partitions : NULL;
  return d != NULL ? d->partition_count : 0;
}

/* Whether d's weights are stepped in partitions. */
static cddp_result cddp__check_partitions(const cddp_ddp *d) {
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  if (d->group->backend != NULL || d->desc.elastic)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "weights are not stepped in partitions %s; call cddp_ddp_wait, and step all "
                      "of them on every rank",
                      d->desc.elastic ? "by elastic ranks" : "on GPUs, where each rank has all");
  return CDDP_OK;
}

CDDPDEF cddp_result (cddp_ddp_reduce_scatter)(cddp_ddp *d) {
  cddp_result r;
  cddp__enter_call(__func__);
  CDDP__TRY(cddp__check_partitions(d));
  CDDP__CHECK(!d->no_sync, "no_sync is on; switch it off for the backward pass that is stepped");
  r = cddp__ddp_step(d, CDDP__KIND_DDP_SCATTER, NULL);
  return r == CDDP_INVALID_ARGUMENT ? cddp__named(__func__, r) : r;
}

CDDPDEF cddp_result (cddp_ddp_all_gather)(cddp_ddp *d) {
  cddp__enter_call(__func__);
  CDDP__TRY(cddp__check_partitions(d));
  CDDP__CHECK(d->scattered || d->failed, "cddp_ddp_reduce_scatter must come before it");
  return cddp__publish(d);
}

CDDPDEF cddp_result (cddp_ddp_gather_states)(cddp_ddp *d, const cddp_param *states) {
  cddp_result r = CDDP_OK;
  int i;
  cddp__enter_call(__func__);
  CDDP__TRY(cddp__check_partitions(d));
  CDDP__TRY(cddp__check_params(states, d->count, 0));
  for (i = 0; i < d->count; i++)
    CDDP__CHECK(states[i].data == NULL || states[i].count == d->params[i].count,
                "state %d has %zu elements, its parameter %zu", i, states[i].count,
                d->params[i].count);
  for (i = 0; r == CDDP_OK && i < d->count; i++)
    if (states[i].data != NULL) r = cddp__gather_state(d, i, &states[i]);
  return r;
}

CDDPDEF int cddp_ddp_present(const cddp_ddp *d) { return d != NULL ? d->present : -1; }

CDDPDEF void cddp_ddp_no_sync(cddp_ddp *d, bool on) {
  if (d == NULL) return;
  pthread_mutex_lock(&d->lock);
  d->no_sync = on;
  pthread_mutex_unlock(&d->lock);
}

CDDPDEF cddp_result cddp_ddp_clip_grad_norm(cddp_ddp *d, double max_norm, double *norm) {
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  CDDP__CHECK(max_norm > 0, "max_norm must be above 0");
  return d->memory->clip(d, max_norm, norm);
}

CDDPDEF cddp_result cddp_ddp_grad_norm(cddp_ddp *d, double *norm) {
  CDDP__CHECK(d != NULL && norm != NULL, "the cddp_ddp or norm is NULL");
  CDDP__CHECK(d->has_norm, "no gradient has been clipped; set max_grad_norm in cddp_ddp_desc");
  return d->memory->norm(d, norm);
}

CDDPDEF cddp_result (cddp_ddp_sync_buffers)(cddp_ddp *d) {
  uint64_t missing;
  cddp__enter_call(__func__);
  CDDP__CHECK(d != NULL, "the cddp_ddp is NULL");
  if (d->failed) CDDP__TRY(cddp__fail(d->fail_result, "%s", d->fail_text));
  if (d->elastic != NULL)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "cddp_ddp_sync_buffers of an elastic model; broadcast its buffers in "
                      "cddp_ddp_group");
  if (d->meets) /* else no rank has joined */
    CDDP__TRY(cddp__ddp_meet(d, CDDP__KIND_DDP_BUFFERS, 0, NULL, &missing));
  return d->memory->broadcast(d, d->desc.buffers, d->desc.buffer_count, d->active[0]);
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
  if (d->elastic != NULL) cddp__elastic_leave(d);
  cddp__ddp_free(d);
}

CDDPDEF cddp_result cddp_bf16_compress_hook(cddp_bucket *bucket, void *user_data) {
  (void)user_data;
  CDDP__CHECK(bucket != NULL, "the bucket is NULL");
  return cddp__compress_hook(bucket, CDDP_BF16);
}

CDDPDEF cddp_result cddp_fp16_compress_hook(cddp_bucket *bucket, void *user_data) {
  (void)user_data;
  CDDP__CHECK(bucket != NULL, "the bucket is NULL");
  return cddp__compress_hook(bucket, CDDP_F16);
}

/* --- the store --- */

/* count keys of a store, each NULL or not. */
static cddp_result cddp__check_keys(const cddp_store *s, const char *const *keys, int count) {
  int i;
  if (s == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "the store is NULL");
  if (count < 0 || (unsigned)count > CDDP__KEYS_MAX)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "count is %d; it is from 0 to %u", count,
                      CDDP__KEYS_MAX);
  if (keys == NULL && count > 0) return cddp__fail(CDDP_INVALID_ARGUMENT, "keys is NULL");
  for (i = 0; i < count; i++) {
    if (keys[i] == NULL) return cddp__fail(CDDP_INVALID_ARGUMENT, "the key is NULL");
    if (strlen(keys[i]) >= CDDP__KEY_MAX) /* a "/" is put before it */
      return cddp__fail(CDDP_INVALID_ARGUMENT, "the key '%.32s...' has more than %u bytes", keys[i],
                        CDDP__KEY_MAX - 1u);
  }
  return CDDP_OK;
}

static cddp_result cddp__check_value(const char *what, const void *value, size_t size) {
  if (value == NULL && size > 0)
    return cddp__fail(CDDP_INVALID_ARGUMENT, "%s is NULL and its size is not 0", what);
  if (size <= CDDP__VALUE_MAX) return CDDP_OK;
  return cddp__fail(CDDP_INVALID_ARGUMENT, "%s has %zu bytes; a value has at most %u", what, size,
                    CDDP__VALUE_MAX);
}

CDDPDEF cddp_result cddp_store_create(cddp_store **out, const cddp_store_desc *desc) {
  cddp__store_options o;
  CDDP__CHECK(out != NULL, "out is NULL");
  *out = NULL;
  CDDP__CHECK(desc != NULL, "desc is NULL");
  CDDP__CHECK(desc->init_method != NULL, "desc->init_method is NULL");
  CDDP__CHECK(desc->timeout_s >= 0, "desc->timeout_s is %g; it is in seconds, and 0 or more",
              desc->timeout_s);
  CDDP__TRY(cddp__check_allocator(&desc->allocator));
  memset(&o, 0, sizeof o);
  o.desc = *desc;
  CDDP__TRY(cddp__discover_timeout(desc->timeout_s, &o.desc.timeout_s));
  o.elect = true;
  o.listen_fd = -1;
  o.deadline = cddp__now() + o.desc.timeout_s;
  return cddp__store_open(out, &o);
}

CDDPDEF void cddp_store_destroy(cddp_store *s) { cddp__store_close(s); }

CDDPDEF int cddp_store_port(const cddp_store *s) {
  return s == NULL ? 0 : cddp__address_port(&s->addresses[0]);
}

CDDPDEF cddp_result cddp_store_set(cddp_store *s, const char *key, const void *value, size_t size) {
  cddp__request q = cddp__request_of(CDDP__SET, &key, 1);
  CDDP__TRY(cddp__check_keys(s, &key, 1));
  CDDP__TRY(cddp__check_value("value", value, size));
  q.values[0] = cddp__span_of(value, size);
  return cddp__store_run(s, &q, 0);
}

CDDPDEF cddp_result cddp_store_get(cddp_store *s, const char *key, void *value, size_t capacity,
                                   size_t *size) {
  cddp__request q = cddp__request_of(CDDP__GET, &key, 1);
  cddp_result r;
  CDDP__TRY(cddp__check_keys(s, &key, 1));
  CDDP__CHECK(value != NULL || capacity == 0, "value is NULL");
  CDDP__CHECK(size != NULL, "size is NULL");
  q.out = value;
  q.capacity = capacity;
  q.size = size;
  r = cddp__store_wait(s, &key, 1, 0);
  return r == CDDP_OK ? cddp__store_run(s, &q, 0) : r;
}

CDDPDEF cddp_result cddp_store_add(cddp_store *s, const char *key, int64_t amount, int64_t *total) {
  cddp__request q = cddp__request_of(CDDP__ADD, &key, 1);
  cddp_result r;
  CDDP__TRY(cddp__check_keys(s, &key, 1));
  q.number = (uint64_t)amount;
  r = cddp__store_run(s, &q, 0);
  if (r == CDDP_OK && total != NULL) *total = (int64_t)q.number;
  return r;
}

/* *swapped = the answer is `desired`, as in c10d, whose answer cannot tell apart that the value was
   `desired` before: of several that write the same bytes, all are told that they have. Make them
   differ (a rank or nonce in them) to elect one. */
CDDPDEF cddp_result cddp_store_compare_set(cddp_store *s, const char *key, const void *expected,
                                           size_t expected_size, const void *desired,
                                           size_t desired_size, void *value, size_t capacity,
                                           size_t *size, bool *swapped) {
  cddp__request q;
  cddp_result r;
  CDDP__TRY(cddp__check_keys(s, &key, 1));
  CDDP__TRY(cddp__check_value("expected", expected, expected_size));
  CDDP__TRY(cddp__check_value("desired", desired, desired_size));
  CDDP__CHECK(value != NULL || capacity == 0, "value is NULL");
  CDDP__CHECK(size != NULL && swapped != NULL, "size or swapped is NULL");
  q = cddp__request_of(CDDP__COMPARE_SET, &key, 1);
  q.values[0] = cddp__span_of(expected, expected_size);
  q.values[1] = cddp__span_of(desired, desired_size);
  q.out = value;
  q.capacity = capacity;
  q.size = size;
  r = cddp__store_run(s, &q, 0);
  *swapped = q.equal;
  return r;
}

CDDPDEF cddp_result cddp_store_wait(cddp_store *s, const char *const *keys, int count,
                                    double timeout_s) {
  CDDP__TRY(cddp__check_keys(s, keys, count));
  CDDP__CHECK(timeout_s >= 0, "timeout_s is %g; it is in seconds, and 0 or more", timeout_s);
  return cddp__store_wait(s, keys, count, timeout_s);
}

CDDPDEF cddp_result cddp_store_check(cddp_store *s, const char *const *keys, int count,
                                     bool *all_exist) {
  cddp__request q = cddp__request_of(CDDP__CHECK, keys, count);
  cddp_result r;
  CDDP__TRY(cddp__check_keys(s, keys, count));
  CDDP__CHECK(all_exist != NULL, "all_exist is NULL");
  r = cddp__store_run(s, &q, 0);
  *all_exist = r == CDDP_OK && q.number == 0;
  return r;
}

CDDPDEF cddp_result cddp_store_delete(cddp_store *s, const char *key, bool *deleted) {
  cddp__request q = cddp__request_of(CDDP__DELETE_KEY, &key, 1);
  cddp_result r;
  CDDP__TRY(cddp__check_keys(s, &key, 1));
  r = cddp__store_run(s, &q, 0);
  if (r == CDDP_OK && deleted != NULL) *deleted = q.number != 0;
  return r;
}

CDDPDEF cddp_result cddp_store_num_keys(cddp_store *s, int64_t *count) {
  cddp__request q = cddp__request_of(CDDP__GETNUMKEYS, NULL, 0);
  cddp_result r;
  CDDP__CHECK(s != NULL, "the store is NULL");
  CDDP__CHECK(count != NULL, "count is NULL");
  r = cddp__store_run(s, &q, 0);
  if (r == CDDP_OK) *count = (int64_t)q.number;
  return r;
}
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
#define cddp_all_gather_v(g, ...) cddp_all_gather_v(CDDP__AT(g), __VA_ARGS__)
#define cddp_all_to_all_v(g, ...) cddp_all_to_all_v(CDDP__AT(g), __VA_ARGS__)
#define cddp_barrier(g) cddp_barrier(CDDP__AT(g))
#define cddp_barrier_async(g, work) cddp_barrier_async(CDDP__AT(g), work)
#define cddp_send(g, ...) cddp_send(CDDP__AT(g), __VA_ARGS__)
#define cddp_recv(g, ...) cddp_recv(CDDP__AT(g), __VA_ARGS__)
#define cddp_group_split(g, ...) cddp_group_split(CDDP__AT(g), __VA_ARGS__)
#define cddp_group_new(g, ...) cddp_group_new(CDDP__AT(g), __VA_ARGS__)
#define cddp_ddp_create(out, g, ...) cddp_ddp_create(out, CDDP__AT(g), __VA_ARGS__)
#define cddp_ddp_wait(d) cddp_ddp_wait(CDDP__DDP_AT(d))
#define cddp_ddp_step(d, s) cddp_ddp_step(CDDP__DDP_AT(d), s)
#define cddp_ddp_reduce_scatter(d) cddp_ddp_reduce_scatter(CDDP__DDP_AT(d))
#define cddp_ddp_all_gather(d) cddp_ddp_all_gather(CDDP__DDP_AT(d))
#define cddp_ddp_gather_states(d, s) cddp_ddp_gather_states(CDDP__DDP_AT(d), s)
#define cddp_ddp_sync_buffers(d) cddp_ddp_sync_buffers(CDDP__DDP_AT(d))
#define cddp_save(g, ...) cddp_save(CDDP__AT(g), __VA_ARGS__)
#define cddp_load(g, ...) cddp_load(CDDP__AT(g), __VA_ARGS__)
#define cddp_ddp_join(d, s) cddp_ddp_join(CDDP__DDP_AT(d), s)
#endif

/* >>history ---------------------------------------------------------------------------------------
   0.3 (2026-11)
     New      cddp_wait_for and cddp_cancel; CDDP_CHECKED: compilers warn about ignored failures.
              Uneven inputs (with NCCL: cddp_ddp_desc.uneven_inputs) and sparse gradients on GPUs.
              Shards: the same bits on any number of ranks (cddp_ddp_next_shard, cddp_ddp_steps),
              on CPUs and on GPUs.
              cddp_spawn_elastic and cddprun --elastic: a rank that fails is started again.
              CDDP_BAND, CDDP_BOR, CDDP_BXOR; receiving from CDDP_ANY, and cddp_source;
              cddp_all_gather_v, cddp_all_to_all_v, cddp_barrier_async.
              AdamW; lr_scales and weight_decays, settings of a parameter's own for both optimizers.
              max_grad_norm: cddp_ddp_step clips; cddp_ddp_grad_norm.
              master_weights: f16 and bf16 weights and gradients, f32 masters in the optimizer.
              Optimizers of one's own in parts: cddp_ddp_reduce_scatter, _all_gather, _partitions,
              _gather_states.
     Changed  Ranks of a host meet by a socket of their own, with one connection to the store.
              On GPUs cddp_ddp_step reduces buckets while backward runs and updates all weights in
              one kernel; momentum is allocated with the cddp_optim and never moves; no host waits
              for another in a step; memory is not registered with NCCL. Means are sums that a
              kernel divides.
              file:// ends with the process that opened it first, honours the secret, and trusts
              no link and no other user's file.
     Gone     cddp_launch: fork and exec examples/cddprun.c, whose options are its desc.
              PyTorch 1.x's dialect of the store, CDDP_STORE_PROTO, the store's commands for
              queues, barriers and lists of keys. cddp_sgd_desc.separate_mul_add.
     Mended   Groups: split or destroyed by several threads at once. Buffers that overlap are
              refused. cddp_send with a handle never blocks; a handle costs little. A rank that
              was stopped and goes on after its failure leaves the others' buffers alone.
              Ranks that wait for each other in different groups of a host are CDDP_MISMATCH at
              once; time-outs say where late ranks wait.
              Models: parameters that share memory (tied weights) are refused; a second ready() in
              a step fails it; other floating-point modes on a rank are CDDP_MISMATCH; an infinite
              bucket_cap_mb is one bucket; 100,000 parameters; infinite lr or momentum are refused.
              Meeting: jobs that are given one port; 1,000 ranks with ulimit -n 1024; ulimit -f;
              containers of one pod; other users at the port; another backend, world size or
              secret on a rank is told at once.
              Between hosts: an all_gather after which a rank leaves at once gave its neighbours
              wrong bytes; a receiver may be late by more than 20 s; a death shows although a
              forked child lives on; cddp_ddp_join gives the bits of one host; short messages take
              a third less time, buffers that no rank of the same host has to see are not copied.
              Checkpoints: mode, owner and links of the old file are kept, devices refused, another
              user's path.tmp is not trusted, a file size limit is an error, fields that the format
              does not have are refused. cddp_destroy leaves cddp_error() as it was.
              Starting: SIGCHLD ignored or reaped by others; pidfd_open denied; OpenMP before
              cddp_spawn; OMP_NUM_THREADS=1; lines of ranks stay whole; stacks of 64 KiB; a secret
              for each job of cddp_spawn and cddprun; interactive and heterogeneous Slurm jobs;
              CDDP_TIMEOUT_S=2.5 in any locale; cddprun with closed files, prompts, binary output.
              The store: programs that fork; strangers; foreign services on its port are named;
              sandboxes; any key. System headers may come before the implementation.
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
