/* hostcuda.h - CUDA, cuBLAS and NCCL without a GPU, for tests.

   A test double, not an emulator: it runs the calls cddp makes, on threads of the host, and is
   strict where the real thing is. What it shows to be right may still fail on a GPU; what it shows
   to be wrong is wrong there too.

   Streams are threads that execute what was queued, each operation after a random pause, so that an
   event wait that is missing shows as wrong numbers. Device memory may be touched on those threads
   alone where the processor has protection keys: a host thread that reads it gets SIGSEGV. It
   starts out as NaN bytes and ends at a guard page. A process that forked after its first CUDA call
   has no CUDA. Graphs replay in any order that their edges allow.

   Environment, read at the first call:
     HOSTCUDA_DEVICES=8          how many; 0: no device; "no-driver": cudaErrorInsufficientDriver
     HOSTCUDA_MEMORY_MB=4096     of each device and process
     HOSTCUDA_SEED=1             of the pauses and of the order of graph nodes
     HOSTCUDA_DELAY_US=50        the longest pause before an operation of a stream; 0: none
     HOSTCUDA_PROTECT=1          0: device memory is readable by the host
     HOSTCUDA_PARTS=1            each process has parts of the GPUs (MIG), with uuids of their own;
                                 NCCL sees the GPUs; unset: whole ones
     HOSTCUDA_CONTEXTS=0         a process that makes a context ends, with exit code 86
     CUDA_LAUNCH_BLOCKING=1      whoever puts an operation on a stream waits for its end
     HOSTCUDA_FAIL=NAME:N:CODE[@RANK],...
                                 the Nth call of the API function NAME returns CODE (on the rank
                                 whose RANK is in the environment, else on all); NAME "op" is the
                                 Nth operation of a stream: all later calls return CODE
     HOSTNCCL_FAIL=WHAT:N[:CODE][@RANK],... at the Nth NCCL operation (1 = first) of the process:
                                 stall: it never ends, until ncclCommAbort
                                 error: the same; ncclCommGetAsyncError says CODE (6 if absent)
                                 die: SIGKILL; init: the Nth communicator never comes up
     HOSTNCCL_TRANSPORT=shm      net: survivors of a rank that died get ncclRemoteError; with shm
                                 they wait, as over NVLink
     HOSTNCCL_VERSION=22809      what ncclGetVersion says; before 22600 all communicators behave as
                                 those of old versions, from there on none; unset: half of them

   NCCL, where it is easy to take it for more than it is: a non-blocking communicator hands every
   operation to a thread of its own, and the stream (or its capture) has it only when the state is
   ncclSuccess again; ncclCommSplit shows its child then, too. Old versions call a single operation
   ncclSuccess before, and a thread that has seen the end of one by polling must still make a call
   on that communicator before it turns to another. The first small and the first large collective
   of a communicator, and the first message to a peer, wait for the other ranks' before the stream
   has them. ncclCommAbort and ncclCommDestroy wait for the streams that carry the communicator's
   operations, whatever they have to do before, until its graphs are destroyed, and for the host's
   other processes; but of ranks in one process the last abort does all that, the others return when
   NCCL's thread is through with what was called. A failed ncclCommDestroy leaves the thread's group
   open, in which an abort frees nothing.

   Memory cannot be registered with a communicator, nor objects with a graph: what asks for either
   does not compile. Both cost aborts and ends that NCCL does not survive, or that nobody sees.

   CUDA, likewise: whatever a thread calls makes a context on its current device, which is 0 at
   first. cudaFree, now and then cudaMalloc, and a kernel's first launch lock it while they wait for
   the device, and every call of another thread waits for them. */
#ifndef HOSTCUDA_H
#define HOSTCUDA_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime.h> /* of this folder; for tests/gpu/real.c the real one */

#ifdef __cplusplus
extern "C" {
#endif

/* How often this process has called an API function; "kernel": launches, "op": operations that
   streams have executed. */
uint64_t hostcuda_calls(const char *name);
size_t hostcuda_bytes(void);        /* of device memory that this process has allocated */
/* What this process has not given back: bytes of device and pinned memory, and streams. *threads:
   those that serve default streams, which nobody destroys; *fds: of the double's memory. */
size_t hostcuda_left(int *streams, int *threads, int *fds);
void *hostcuda_unreadable(size_t bytes); /* device memory that the host cannot read; NULL: it can */
int hostcuda_contexts(void);        /* devices on which this process has a context */
int hostnccl_ids(void);           /* made by this process, with a descriptor each */
int hostnccl_communicators(void); /* those of this process that have not been reclaimed */
/* NCCL's thread comes to the process's next collective, of up to 64 KiB, a moment after the abort:
   the kernel starts all the same, and reads what it is to send. */
void hostnccl_late(void);
/* So many times whoever asks for a communicator's state hears that it is in progress. */
void hostnccl_busy(int times);

/* What the files of hostcuda share. */

typedef struct hostcuda_op { /* drop frees arg after the last run; graphs run an operation often */
  void (*run)(void *arg);
  void (*drop)(void *arg);
  void *arg;
} hostcuda_op;

/* Counts the call; an error when it has to fail: no device, a forked process, HOSTCUDA_FAIL. */
cudaError_t hostcuda_enter(const char *name);
/* The code that HOSTCUDA_FAIL has for this call, or 0. Counts it too. For cuBLAS and NCCL. */
int hostcuda_injected(const char *name);
/* Keeps e for cudaGetLastError. */
cudaError_t hostcuda_leave(cudaError_t e);
/* Puts op at the end of stream, or into the graph it captures. ordered: not at once with another
   such operation of a graph. On failure op is dropped. */
cudaError_t hostcuda_enqueue(cudaStream_t stream, hostcuda_op op, bool ordered);
bool hostcuda_is_device(const void *p, size_t bytes); /* all of it lies in device memory */
int hostcuda_stream_device(cudaStream_t stream);      /* -1: no such stream */
double hostcuda_now(void);                            /* seconds */
/* The next number of a sequence (splitmix64). */
uint64_t hostcuda_random(uint64_t *state);
uint64_t hostcuda_seed(void);
/* The device current in this thread. */
int hostcuda_device(void);
/* Makes a context on the device, if there is none yet; waits for calls that hold its lock. */
void hostcuda_context(int device);
/* A kernel is launched: the first time it waits for the device, with its context locked. */
cudaError_t hostcuda_load(const void *kernel);

#ifdef __cplusplus
}
#endif
#endif
