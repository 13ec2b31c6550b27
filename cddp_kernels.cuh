/* cddp_kernels.cuh - GPUs for cddp.h - v1.1
   Public domain or MIT, at your choice (end of cddp.h). No warranty; use at your own risk.

   Keep this file beside cddp.h. A program in one .cu file (nvcc -O3 -arch=native train.cu -lnccl
   -lcublas):

       #define CDDP_IMPLEMENTATION
       #include "cddp_kernels.cuh"      // includes cddp.h with CDDP_CUDA

   If a C or C++ file of a program implements cddp.h with CDDP_CUDA, the program needs one .cu file,
   linked to the rest, with

       #define CDDP_KERNELS_IMPLEMENTATION
       #include "cddp_kernels.cuh"

   The file has two parts:
   - Kernels for optimizers, clipping, compression and layers, compiled by nvcc as C++17 (its
     default) or later. Their table registers itself before main. Without it groups have
     collectives, but models have no steps on GPUs.
   - Groups and models on GPUs, by NCCL, in C11 and C++11. The implementation of cddp.h includes
     this part if CDDP_CUDA is defined; no nvcc is needed.

   Other files, compiled by nvcc or by a C++ compiler, can include this one for the functions below.
   Define CDDP_KERNELS_NO_CUBLAS to leave out the linear layer and -lcublas.

   RULES.
   - Every function enqueues work on stream and does not block. It returns a cudaError_t: 0, or the
     reason why nothing or not everything was enqueued.
   - Pointers are to device memory, aligned to their element type. Sizes are 64-bit; 0 elements are
     allowed. Calls are fastest if all arrays of a call have 16-byte alignment.
   - Results are the same in every run: the order of a sum depends only on sizes.
   - All functions can be captured in a CUDA graph, with the values of their scalar arguments.
   - Matrices are row-major. A cuBLAS handle must be in host pointer mode, the default.
   - With --use_fast_math the results for subnormal numbers differ.

   A layer, forward and backward, of a batch of rows:

       cddp_cuda_linear(blas, x, w, b, h, rows, in, out, true, stream);      // h = relu(x w' + b)
       cddp_cuda_cross_entropy(h, labels, dh, stats, scratch, rows, out, stream);
       cddp_cuda_relu_backward(dh, h, (size_t)rows * out, stream);           // h came from relu
       cddp_cuda_linear_backward(blas, x, w, dh, dx, dw, db, rows, in, out, stream);

   Gradients of weights (dw, db, an embedding's dtable) are ADDED to; h, dh and dx are overwritten.
   cddp_ddp_ready for w and b follows. stats is double[2] in device memory, zeroed by you: each call
   ADDS its mean loss and its number of correct rows, so divide the loss by the number of calls.
   scratch is CDDP_CUDA_SCRATCH_BYTES of device memory that only one stream uses at a time.

   GROUPS AND MODELS ON GPUS (the basics: >>api-gpus in cddp.h)

   MODELS use the communicator of their group. So a misused model (ranks made different calls,
   forgot a gradient, or stepped with different settings) breaks its group. On CPUs, and with
   backend "cpu", the model fails alone.

   CUDA GRAPHS. A whole step with SGD can be captured after two eager steps like it, on a stream
   other than the default one. The learning rate is the captured one. Destroy graphs before the
   model, the optimizer and the group: graphs use their memory.

   In a captured step all gradients must be ready, also with find_unused_parameters. AdamW, elastic
   models, sparse_rows, uneven_inputs and backend "cpu" are CDDP_UNSUPPORTED (AdamW: and the model
   is broken).
   cddp_ddp_steps counts the captured step, but no launch of its graph: count launches yourself.

   ORDER. Call the operations of all groups of a GPU from one thread at a time, in the same order on
   every rank. A model's ready(), wait() and step() are operations of its group: between two ready()
   calls of a step call others only if all ranks mark gradients in one order. With several groups on
   a GPU, NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26) keeps the order on the GPU too.

   TESTED on one NVIDIA H200, in part with 2 and 4 ranks that share it (commit b128fc1; later ones
   have not run on a GPU). Only on a test double of CUDA and NCCL have run: several GPUs or hosts;
   with several ranks shards, elastic training, messages, checkpoints and more. The table is in
   tests/gpu/gpu-results.md. tests/gpu/gpu.sh tests this machine's GPU.

   WAITS. The host waits for other ranks
     - when groups and models are created, and in a model's first step
     - in the first message to or from a rank, also in cddp_test and cddp_wait_for, and in the first
       use of an algorithm of another collective than all_reduce
     - in each step with find_unused_parameters, uneven_inputs or sparse_rows.
   The first launch of a kernel that is not cddp's can wait for the device, unless
   CUDA_MODULE_LOADING=EAGER is set. Ranks can share a GPU, or parts of one (MIG), from NCCL 2.30 on
   if all have NCCL_MULTI_RANK_GPU_ENABLE=1.

   VERSIONS. NCCL 2.23 or later is recommended: in older versions the abort after a failure can
   crash an operation that does not return for 0.5 s. Without LOCAL_RANK a rank's position among the
   ranks of its host selects the GPU; with backend "cpu" LOCAL_RANK is taken modulo the number of
   GPUs.

   MESSAGES in device memory match in the order of calls between two ranks; tags are not compared.
   Messages with a handle are sent together, at the group's next other call, or at their cddp_wait
   or cddp_test: an exchange posts all, then waits.

   SUMS. NCCL's sums have equal bits on all ranks; another number of ranks, or another version of
   NCCL, can give other bits (cddp_ddp_desc.shards avoids that). MIN and MAX can ignore a NaN. Means
   of f16, and all means without the kernels, are NCCL's: unless world_size is a power of two they
   are off by up to 0.2 % in bf16, 0.03 % in f16. Other means of floats are the sum times
   1/world_size.

   TIME-OUTS. Two threads watch NCCL's and the device's errors, the other processes, their order of
   calls, and timeout_s. It counts from the enqueueing of an operation, in a CUDA graph from the
   beginning of cddp_synchronize or cddp_barrier. Calls of ranks on different hosts are compared in
   cddp_barrier and cddp_group_split.

   FAILURES. A failure breaks the group on all ranks and aborts its communicator: streams then end
   with undefined results, and cddp_synchronize, cddp_wait and every later call return the failure.
   cddp_destroy waits for the device while the group is healthy. With a process's last group it also
   waits until NCCL has destroyed its communicators, at most 2 s. A process that ends without it,
   while others have a graph with the group's operations, counts as lost.

   PARTITIONS. NCCL reduces a bucket only to the ranks with partitions in it if the previous step
   was of this kind too, without max_grad_norm; otherwise to all ranks. With shards, NCCL needs one
   more copy of the gradients, even with one shard for each rank.

   CAPTURING. Ranks are not compared: all must capture and launch alike, in mode thread-local or
   relaxed. A graph keeps the counts of cddp_all_to_all_v. Call cddp_wait for messages before a
   capture begins: those that have not been sent yet would become part of the graph.

   CONTEXTS. CUDA does not survive a fork: cddp_spawn comes first. In a program with the kernels, an
   optimizer without desc.ddp, cddp_save and cddp_load create a CUDA context, also for device "cpu".

   CONTENTS: search for the mark
     >>layouts       what cddp.h asks of kernels    >>declarations  the functions
     Kernels
     >>primitives    types, sums of a block         >>segments      SGD, AdamW, scale
     >>shards        sums of shards                 >>sums          squares, factor
     >>arrays        convert, fill                  >>layers        losses, embedding, linear
     >>table         registration
     Groups and models
     >>device        groups of ranks with GPUs      >>kernels       optimizers on devices
     >>ddp-device    a model's steps on GPUs        >>gpus          choice of a GPU: entry points */

#ifndef CDDP__DEVICE_ROOMS /* a file of the program includes this one, not cddp.h */
#if defined(CDDP_IMPLEMENTATION) && !defined(CDDP_KERNELS_IMPLEMENTATION)
#define CDDP_KERNELS_IMPLEMENTATION
#endif
#ifndef CDDP_CUDA
#define CDDP_CUDA
#endif
#include "cddp.h" /* its implementation includes this file, for the rooms at its end */
#endif

#ifndef CDDP_KERNELS_CUH
#define CDDP_KERNELS_CUH

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* >>layouts --------------------------------------------------------------------------------------
   What cddp.h's code for GPUs asks of the kernels. */

/* Device code for optimizers, clipping and compression. A constructor registers the table before
   main when one .cu file of the program includes this one. Segments are in host memory, the
   caller's again after the return. All functions enqueue on stream (a cudaStream_t) and return a
   cudaError_t. */
typedef struct cddp_segment { /* a stretch of a parameter, in device memory */
  void *data;     /* weights; NULL in calls that use only grad */
  void *grad;
  void *momentum; /* AdamW: exp_avg; NULL: none */
  size_t count;   /* elements */
  void *master;   /* NULL: none. Else data and grad are f16 or bf16, this and momentum f32 */
} cddp_segment;
enum {
  CDDP_SGD_FIRST = 1, /* momentum has no value yet: it becomes the gradient */
  CDDP_SGD_ZERO = 2   /* sets grad to 0 after the update */
};
typedef struct cddp_kernels {
  int version;          /* CDDP_VERSION when they were compiled; a table with another is ignored */
  size_t scratch_bytes; /* device memory for squares, factor and scale */
  int (*load)(void);    /* loads all kernels to the thread's current device */
  /* sgd and adamw use the gradient grad * factor, rounded to dtype. clip not NULL: that product is
     multiplied by clip[1], which is in device memory, and rounded again. */
  int (*sgd)(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_sgd_desc *rule,
             double factor, const double *clip, unsigned flags, void *stream);
  int (*adamw)(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_adamw_step *rule,
               double factor, const double *clip, unsigned flags,
               void *stream); /* of F32 and F64, or of F16 and BF16 with masters */
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
  /* out[count] = the canonical sum of n nodes, 1 to CDDP_NODES. Node i is the sum of widths[i]
     shards; a width's sign is ignored. The type of computing is f64 for f64, else f32.
     divisor 0: out has the type of computing. So have the nodes, except the last, of dtype.
     divisor > 0: out = sum / divisor, of dtype. All nodes have the type of computing. */
  int (*sum)(void *out, cddp_dtype dtype, const void *const *nodes, const int *widths, int n,
             int divisor, size_t count, void *stream);
} cddp_kernels;
#define CDDP_NODES 256 /* most nodes of a sum: their addresses are a kernel's parameter */
/* >>declarations ----------------------------------------------------------------------------------
   The functions that programs call. */

#define CDDP_CUDA_BLOCKS 1024 /* largest number of partial sums of a reduction */
#define CDDP_CUDA_SCRATCH_BYTES ((2 + 2 * CDDP_CUDA_BLOCKS) * sizeof(double))
#define CDDP_CUDA_ORDER_BYTES(n) ((size_t)(n) * 2 * sizeof(uint64_t)) /* to sort n ids */

/* One step of SGD on all segments, one launch for each 64 segments (one for a flat arena). Same
   bits as cddp_optim_step. flags: CDDP_SGD_FIRST, _ZERO. A segment's momentum can be NULL only if
   the rule has no momentum. */
cudaError_t cddp_cuda_sgd(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_sgd_desc *rule,
                          unsigned flags, cudaStream_t stream);
/* The same for f32 weights; copies[i][count] receives segment i's new weights as f16 or bf16. */
cudaError_t cddp_cuda_sgd_copies(const cddp_segment *s, void *const *copies, int n,
                                 cddp_dtype copy_dtype, const cddp_sgd_desc *rule, unsigned flags,
                                 cudaStream_t stream);
/* One step of AdamW on all segments, f32 or f64, with the bits of cddp_optim_step. flags:
   CDDP_SGD_ZERO. */
cudaError_t cddp_cuda_adamw(const cddp_segment *s, int n, cddp_dtype dtype,
                            const cddp_adamw_step *rule, unsigned flags, cudaStream_t stream);
/* copies[i][count] = segment i's f32 weights, as f16 or bf16. Its grad can be NULL. */
cudaError_t cddp_cuda_copies(const cddp_segment *s, void *const *copies, int n,
                             cddp_dtype copy_dtype, cudaStream_t stream);
/* scratch[0] = the sum of squares of all grad, in double; with add it is added to scratch[0]. */
cudaError_t cddp_cuda_squares(const cddp_segment *s, int n, cddp_dtype dtype, double *scratch,
                              bool add, cudaStream_t stream);
/* scratch[1] = min(1, max_norm / (sqrt(scratch[0]) + 1e-6)). */
cudaError_t cddp_cuda_factor(double *scratch, double max_norm, cudaStream_t stream);
/* grad *= scratch[1]. */
cudaError_t cddp_cuda_scale(const cddp_segment *s, int n, cddp_dtype dtype, const double *scratch,
                            cudaStream_t stream);

/* to[i] = from[i], rounded to the nearest, ties to even. Converts and copies F32, F64, F16 and
   BF16. to and from must not overlap. */
cudaError_t cddp_cuda_convert(void *to, cddp_dtype to_dtype, const void *from,
                              cddp_dtype from_dtype, size_t n, cudaStream_t stream);
/* x[i] = value. */
cudaError_t cddp_cuda_fill(void *x, cddp_dtype dtype, size_t n, double value, cudaStream_t stream);
/* x[i] = a uniform number in [-bound, bound): a hash of seed and i, the same on every device. */
cudaError_t cddp_cuda_uniform(float *x, size_t n, float bound, uint64_t seed, cudaStream_t stream);

/* dy[i] = 0 where y[i], the output of a ReLU, is not positive. */
cudaError_t cddp_cuda_relu_backward(float *dy, const float *y, size_t n, cudaStream_t stream);
/* Mean squared error: dy = its gradient; stats[0] += its value. dy can be y, or NULL. */
cudaError_t cddp_cuda_mse(const float *y, const float *target, float *dy, double *stats,
                          double *scratch, size_t n, cudaStream_t stream);
/* Softmax and cross-entropy, mean over rows: dy[rows][classes] = the gradient of y (dy can be y, or
   NULL); stats as above. Labels are 0 .. classes - 1; any other label makes the loss NaN. */
cudaError_t cddp_cuda_cross_entropy(const float *y, const int32_t *labels, float *dy, double *stats,
                                    double *scratch, int64_t rows, int classes,
                                    cudaStream_t stream);
/* out[i] = table[ids[i]]; an id outside 0 .. vocabulary - 1 gives NaN. */
cudaError_t cddp_cuda_embedding(const float *table, const int32_t *ids, float *out, int64_t n,
                                int vocabulary, int width, cudaStream_t stream);
/* dtable[ids[i]] += dout[i], in the order of i. Ids outside 0 .. vocabulary - 1 add nothing. n is
   at most 2^32. Sorts the ids, in n log n steps.
     order   CDDP_CUDA_ORDER_BYTES(n) of device memory, aligned to 8 bytes, that only one stream
             uses at a time */
cudaError_t cddp_cuda_embedding_backward(const float *dout, const int32_t *ids, float *dtable,
                                         void *order, int64_t n, int vocabulary, int width,
                                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* CDDP_KERNELS_CUH */

#if !defined(CDDP__DEVICE_ROOMS) && !defined(CDDP_KERNELS_NO_CUBLAS) && !defined(CDDP__LINEAR)
#define CDDP__LINEAR
#include <cublas_v2.h>

#ifdef __cplusplus
extern "C" {
#endif
/* y[rows][out] = x[rows][in] w[out][in]' + b[out], and its ReLU if relu is set. b can be NULL. A
   cuBLAS failure is cudaErrorUnknown. Sets the handle's stream. */
cudaError_t cddp_cuda_linear(cublasHandle_t blas, const float *x, const float *w, const float *b,
                             float *y, int rows, int in, int out, bool relu, cudaStream_t stream);
/* dw += dy' x, db += column sums of dy, dx = dy w. dx and db can be NULL. */
cudaError_t cddp_cuda_linear_backward(cublasHandle_t blas, const float *x, const float *w,
                                      const float *dy, float *dx, float *dw, float *db, int rows,
                                      int in, int out, cudaStream_t stream);
#ifdef __cplusplus
}
#endif
#endif

#if defined(CDDP_KERNELS_IMPLEMENTATION) && !defined(CDDP_KERNELS_IMPLEMENTATION_DONE) && \
    !defined(CDDP__DEVICE_ROOMS)
#define CDDP_KERNELS_IMPLEMENTATION_DONE
#if defined(CDDP_STATIC) && !defined(CDDP_IMPLEMENTATION)
#error "CDDP_STATIC: the file that implements cddp.h must be the .cu file with the kernels"
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <string.h>

/* >>primitives ------------------------------------------------------------------------------------
   Job: element types, packs of 16 bytes, sums over a block, launches.
   Touches: nothing. Entry points: all of it, for the rooms of kernels. */

#ifdef __CUDACC__
#define CDDP__CU_UNROLLED _Pragma("unroll")
#else /* a host compiler, in tests */
#define CDDP__CU_UNROLLED
#endif

enum {
  CDDP__CU_THREADS = 256, /* of a block */
  CDDP__CU_UNROLL = 4,    /* packs, or nodes, that a thread loads before it uses the first */
  CDDP__CU_PIECES = 64    /* most pieces of a launch: see cddp__cu_pieces */
};
#define CDDP__CU_KERNEL static __global__ void __launch_bounds__(CDDP__CU_THREADS)

/* C: the type of T's arithmetic; load and store convert between them. */
template <typename T> struct cddp__cu_type;
template <> struct cddp__cu_type<float> {
  typedef float C;
  static __device__ float load(float x) { return x; }
  static __device__ float store(float x) { return x; }
};
template <> struct cddp__cu_type<double> {
  typedef double C;
  static __device__ double load(double x) { return x; }
  static __device__ double store(double x) { return x; }
};
template <> struct cddp__cu_type<__half> {
  typedef float C;
  static __device__ float load(__half x) { return __half2float(x); }
  static __device__ __half store(float x) { return __float2half_rn(x); }
};
template <> struct cddp__cu_type<__nv_bfloat16> {
  typedef float C;
  static __device__ float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};

template <typename T> static __device__ typename cddp__cu_type<T>::C cddp__cu_load(T x) {
  return cddp__cu_type<T>::load(x);
}
template <typename T> static __device__ T cddp__cu_store(typename cddp__cu_type<T>::C x) {
  return cddp__cu_type<T>::store(x);
}
/* x rounded to type T. */
template <typename T>
static __device__ typename cddp__cu_type<T>::C cddp__cu_rounded(typename cddp__cu_type<T>::C x) {
  return cddp__cu_type<T>::load(cddp__cu_type<T>::store(x));
}

/* These intrinsics round each operation once, as CPUs do. nvcc would fuse a plain a * b + c, and
   approximate divisions and roots with --use_fast_math. */
static __device__ float cddp__cu_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
static __device__ double cddp__cu_fma(double a, double b, double c) { return __fma_rn(a, b, c); }
static __device__ float cddp__cu_mul(float a, float b) { return __fmul_rn(a, b); }
static __device__ double cddp__cu_mul(double a, double b) { return __dmul_rn(a, b); }
static __device__ float cddp__cu_add(float a, float b) { return __fadd_rn(a, b); }
static __device__ double cddp__cu_add(double a, double b) { return __dadd_rn(a, b); }
static __device__ float cddp__cu_sub(float a, float b) { return __fsub_rn(a, b); }
static __device__ double cddp__cu_sub(double a, double b) { return __dsub_rn(a, b); }
static __device__ float cddp__cu_div(float a, float b) { return __fdiv_rn(a, b); }
static __device__ double cddp__cu_div(double a, double b) { return __ddiv_rn(a, b); }
static __device__ float cddp__cu_sqrt(float a) { return __fsqrt_rn(a); }
static __device__ double cddp__cu_sqrt(double a) { return __dsqrt_rn(a); }

/* N elements that a thread loads or stores with one instruction: hence the alignment. */
template <typename T, size_t N> struct alignas(sizeof(T) * N) cddp__cu_pack { T v[N]; };

/* The thread's number in its grid, and the number of threads of the grid. */
static __device__ size_t cddp__cu_thread() {
  return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}
static __device__ size_t cddp__cu_all_threads() { return (size_t)gridDim.x * blockDim.x; }

/* Returns the block's sum in thread 0. All threads of the block must call it; blockDim.x is
   CDDP__CU_THREADS. */
static __device__ double cddp__cu_block_sum(double x) {
  __shared__ double warp_sums[CDDP__CU_THREADS / 32]; /* a warp has 32 threads (lanes) */
  int lane = (int)(threadIdx.x % 32), distance;
  for (distance = 16; distance > 0; distance /= 2)
    x += __shfl_down_sync(0xffffffffu /* all lanes */, x, (unsigned)distance);
  __syncthreads(); /* all warps have read the previous call's sums */
  if (lane == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < CDDP__CU_THREADS / 32 ? warp_sums[lane] : 0;
  for (distance = 16; distance > 0; distance /= 2)
    x += __shfl_down_sync(0xffffffffu /* all lanes */, x, (unsigned)distance);
  return x;
}

/* True while the thread loads kernels instead of launching them: see cddp__cu_table_load. */
static thread_local bool cddp__cu_loads;

/* Returns the error of this launch; errors of earlier calls stay pending. */
template <typename... P, typename... A>
static cudaError_t cddp__cu_launch_threads(void (*kernel)(P...), dim3 grid, unsigned threads,
                                           cudaStream_t stream, A... arguments) {
  cudaLaunchConfig_t config;
  cudaFuncAttributes attributes;
  if (cddp__cu_loads) /* this query loads the kernel */
    return cudaFuncGetAttributes(&attributes, (const void *)kernel);
  memset((void *)&config, 0, sizeof config);
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}
template <typename... P, typename... A>
static cudaError_t cddp__cu_launch(void (*kernel)(P...), dim3 grid, cudaStream_t stream,
                                   A... arguments) {
  return cddp__cu_launch_threads(kernel, grid, CDDP__CU_THREADS, stream, arguments...);
}

/* The number of blocks for n elements, `each` per block, at most `most`: a kernel's threads then
   process several elements each, in strides of the grid's size. */
static unsigned cddp__cu_blocks(size_t n, size_t each, size_t most) {
  size_t blocks = n / each + (n % each != 0);
  return (unsigned)(blocks < most ? blocks : most);
}

/* Blocks for n elements, of which a thread processes four or more. */
static unsigned cddp__cu_grid(size_t n) {
  return cddp__cu_blocks(n, 4 * CDDP__CU_THREADS, 1u << 16 /* blocks fill any GPU */);
}

/* The types that train are the first in cddp_dtype. A new one needs a cddp__cu_type, and its cases
   in the functions below. */
#define CDDP__X(name, text, type, cls, loops) \
  static_assert((CDDP__CLASS_##cls <= CDDP__CLASS_HALF) == (name <= CDDP_BF16), "kernels: " text);
CDDP__DTYPES(CDDP__X)
#undef CDDP__X
static bool cddp__cu_is_float(cddp_dtype d) { return (unsigned)d <= (unsigned)CDDP_BF16; }

/* >>segments -------------------------------------------------------------------------------------
   Job: run an operation on every element of a list of segments.
   How it works:
     1. A segment is cut into a short head and a piece with arrays that all start at a multiple of
        16 bytes. If the arrays have different alignments, the segment is one piece, read element by
        element.
     2. A launch has up to 64 pieces, passed by value.
     3. The pieces consist of chunks of a fixed number of elements. Chunks are divided among the
        blocks; a block finds a chunk's piece by bisection. */

typedef struct cddp__cu_piece {
  char *data, *grad, *momentum; /* the segment's arrays, from the piece's first element on */
  char *copy; /* receives data in half precision; if the segment has a master: that, f32 */
  size_t count, first_chunk; /* elements; number of chunks of all pieces before */
  bool packed; /* its arrays are aligned, so threads access packs of 16 bytes */
} cddp__cu_piece;

typedef struct cddp__cu_pieces {
  cddp__cu_piece piece[CDDP__CU_PIECES];
  size_t chunks; /* of all pieces */
  int count;     /* of pieces */
} cddp__cu_pieces;

static_assert(sizeof(cddp__cu_pieces) <= 3900, "4 KiB of parameters with the operation");

/* Bits for the arrays of a segment, in an operation's READS and WRITES. */
constexpr unsigned CDDP__CU_DATA = 1, CDDP__CU_GRAD = 2, CDDP__CU_MOMENTUM = 4;

/* The defaults of an operation. Each one also has READS and WRITES, begin(), which every thread
   calls first, apply() for one element, and copy(), which gets new weights. */
struct cddp__cu_each {
  enum {
    BLOCKS = 1 << 30,         /* largest number of blocks: in effect no limit */
    AT_ONCE = CDDP__CU_UNROLL /* packs that a thread loads together; fewer if registers are short */
  };
  /* Returns false if this launch leaves the array out, though READS or WRITES has it. */
  __device__ bool reads_momentum() const { return true; }
  __device__ bool writes_momentum() const { return true; }
  __device__ bool writes_grad() const { return true; }
  __device__ void end() const {} /* called after a block's last chunk */
  /* Called on the host after each launch, to enqueue what must follow it. */
  cudaError_t launched(unsigned, cudaStream_t) const { return cudaSuccess; }
};

/* Applies op to elements i to i + N - 1 of a piece: d, g and m are its data, grad and momentum. An
   operation that needs other arrays has its own overload. */
template <size_t N, typename T, typename Op>
static __device__ void cddp__cu_apply(const Op &op, const cddp__cu_piece &, size_t, T *d, T *g,
                                      T *m) {
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) op.apply(d[k], g[k], m[k]);
}

/* Runs op on K packs of N elements on one thread. All loads precede the first use, so that many are
   in flight.
     first   index of the thread's first pack; the next is CDDP__CU_THREADS further. All K packs
             must be inside the piece */
template <size_t N, size_t K, typename T, typename Op>
static __device__ void cddp__cu_do_packs(const cddp__cu_piece &p, size_t first, const Op &op) {
  typedef cddp__cu_pack<T, N> pack;
  pack d[K] = {}, g[K] = {}, m[K] = {}; /* zeros where op reads nothing */
  CDDP__CU_UNROLLED for (size_t u = 0; u < K; u++) {
    size_t i = first + u * CDDP__CU_THREADS;
    if (Op::READS & CDDP__CU_DATA) d[u] = ((const pack *)p.data)[i];
    if (Op::READS & CDDP__CU_GRAD) g[u] = ((const pack *)p.grad)[i];
  }
  if ((Op::READS & CDDP__CU_MOMENTUM) && op.reads_momentum())
    CDDP__CU_UNROLLED for (size_t u = 0; u < K; u++)
      m[u] = ((const pack *)p.momentum)[first + u * CDDP__CU_THREADS];
  CDDP__CU_UNROLLED for (size_t u = 0; u < K; u++) {
    size_t i = first + u * CDDP__CU_THREADS;
    cddp__cu_apply<N>(op, p, i * N, d[u].v, g[u].v, m[u].v);
    if (Op::WRITES & CDDP__CU_DATA) ((pack *)p.data)[i] = d[u];
    if ((Op::WRITES & CDDP__CU_GRAD) && op.writes_grad()) ((pack *)p.grad)[i] = g[u];
    if ((Op::WRITES & CDDP__CU_MOMENTUM) && op.writes_momentum()) ((pack *)p.momentum)[i] = m[u];
    op.template copy<N>(p, i * N, d[u].v); /* the new weights */
  }
}

/* A block processes every gridDim.x-th chunk of the pieces. */
template <typename T, typename Op>
CDDP__CU_KERNEL cddp__cu_segments_kernel(const cddp__cu_pieces s, const Op given) {
  const size_t N = 16 / sizeof(T); /* elements of a pack */
  const size_t chunk = (size_t)CDDP__CU_THREADS * CDDP__CU_UNROLL * N; /* elements of a chunk */
  Op op = given; /* begin() changes the thread's copy; parameters are constant */
  op.begin();
  for (size_t c = blockIdx.x; c < s.chunks; c += gridDim.x) {
    int low = 0, high = s.count - 1;
    while (low < high) { /* the last piece that starts at chunk c or before */
      int middle = (low + high + 1) / 2;
      if (s.piece[middle].first_chunk <= c) low = middle;
      else high = middle - 1;
    }
    const cddp__cu_piece &p = s.piece[low];
    size_t begin = (c - p.first_chunk) * chunk; /* elements of the piece */
    size_t end = begin + chunk < p.count ? begin + chunk : p.count;
    if (p.packed && end - begin == chunk) { /* whole: every thread has CDDP__CU_UNROLL packs */
      for (size_t u = 0; u < CDDP__CU_UNROLL; u += Op::AT_ONCE)
        cddp__cu_do_packs<N, Op::AT_ONCE, T>(p, begin / N + threadIdx.x + u * CDDP__CU_THREADS, op);
      continue;
    }
    /* The last chunk of a piece: pack by pack, then element by element. All chunks of a piece that
       is not packed: by elements. */
    for (size_t i = begin / N + threadIdx.x; p.packed && i < end / N; i += CDDP__CU_THREADS)
      cddp__cu_do_packs<N, 1, T>(p, i, op);
    size_t single = p.packed ? end - end % N : begin; /* the first element outside packs */
    for (size_t i = single + threadIdx.x; i < end; i += CDDP__CU_THREADS)
      cddp__cu_do_packs<1, 1, T>(p, i, op);
  }
  op.end();
}

/* The bytes by which the segment's arrays begin behind a multiple of 16; -1: the offsets differ, or
   there is no array. */
static int cddp__cu_offset(const cddp_segment *s, const void *copy, size_t size) {
  const void *p[3] = {s->data, s->grad, s->momentum};
  int offset = -1, i;
  if (s->master != NULL) /* states and masters are f32: their packs have 32 bytes */
    return (((uintptr_t)s->data | (uintptr_t)s->grad) % 16 |
            ((uintptr_t)s->momentum | (uintptr_t)s->master) % 32) == 0 ? 0 : -1;
  for (i = 0; i < 3; i++) {
    int its_offset = (int)((uintptr_t)p[i] % 16);
    if (p[i] == NULL) continue;
    if (offset >= 0 && its_offset != offset) return -1;
    offset = its_offset;
  }
  /* Copies of f32 weights: a pack has four f32, and their copies 8 bytes. Both must begin at the
     same element of a pack: its index is offset / size. */
  if (copy != NULL && offset >= 0 && (uintptr_t)copy % 8 != (uintptr_t)offset / size * 2) return -1;
  return offset;
}

/* The address `bytes` behind p; NULL stays NULL. */
static char *cddp__cu_at(void *p, size_t bytes) { return p != NULL ? (char *)p + bytes : NULL; }

/* Adds `count` elements of the segment, from `first` on, to the list. size: bytes of an element. */
static void cddp__cu_add_piece(cddp__cu_pieces *list, const cddp_segment *s, void *copy,
                               size_t first, size_t count, size_t size, bool packed) {
  const size_t chunk = (size_t)CDDP__CU_THREADS * CDDP__CU_UNROLL * (16 / size);
  cddp__cu_piece *piece = &list->piece[list->count++];
  piece->data = cddp__cu_at(s->data, first * size);
  piece->grad = cddp__cu_at(s->grad, first * size);
  piece->momentum = cddp__cu_at(s->momentum, first * (s->master != NULL ? sizeof(float) : size));
  piece->copy = s->master != NULL ? cddp__cu_at(s->master, first * sizeof(float))
                              : cddp__cu_at(copy, first * 2);
  piece->count = count;
  piece->first_chunk = list->chunks;
  piece->packed = packed;
  list->chunks += count / chunk + (count % chunk != 0);
}

/* Launches the pieces of the list, if any, and empties it. */
template <typename T, typename Op>
static cudaError_t cddp__cu_flush(cddp__cu_pieces *list, const Op &op, cudaStream_t stream) {
  unsigned blocks = cddp__cu_blocks(list->chunks, 1, Op::BLOCKS);
  cudaError_t e = cudaSuccess;
  if (list->count > 0)
    e = cddp__cu_launch(cddp__cu_segments_kernel<T, Op>, blocks, stream, *list, op);
  if (list->count > 0 && e == cudaSuccess) e = op.launched(blocks, stream);
  list->count = 0;
  list->chunks = 0;
  return e;
}

/* Runs op on n segments, in as few launches as possible. copies: [n] arrays of half precision;
   NULL: none. */
template <typename T, typename Op>
static cudaError_t cddp__cu_segments(const cddp_segment *s, void *const *copies, int n,
                                     const Op &op, cudaStream_t stream) {
  cddp__cu_pieces list;
  cudaError_t e = cudaSuccess;
  memset((void *)&list, 0, sizeof list);
  for (int i = 0; i < n && e == cudaSuccess; i++) {
    void *copy = copies != NULL ? copies[i] : NULL;
    int offset = cddp__cu_offset(&s[i], copy, sizeof(T));
    size_t head = offset > 0 ? (16 - (size_t)offset) / sizeof(T) : 0; /* up to an aligned pack */
    if (s[i].count == 0) continue;
    if (head > s[i].count) head = s[i].count; /* it ends before an aligned pack */
    if (list.count + 2 > CDDP__CU_PIECES) /* a segment has up to two pieces */
      e = cddp__cu_flush<T>(&list, op, stream);
    if (e != cudaSuccess) break;
    if (head > 0) cddp__cu_add_piece(&list, &s[i], copy, 0, head, sizeof(T), false);
    if (s[i].count > head)
      cddp__cu_add_piece(&list, &s[i], copy, head, s[i].count - head, sizeof(T), offset >= 0);
  }
  return e == cudaSuccess ? cddp__cu_flush<T>(&list, op, stream) : e;
}

/* Calls fn<T>(...) for dtype's type. */
#define CDDP__CU_DISPATCH_TYPE(dtype, fn, ...)                         \
  (dtype) == CDDP_F32    ? fn<float>(__VA_ARGS__)                   \
  : (dtype) == CDDP_F64  ? fn<double>(__VA_ARGS__)                  \
  : (dtype) == CDDP_F16  ? fn<__half>(__VA_ARGS__)                  \
  : (dtype) == CDDP_BF16 ? fn<__nv_bfloat16>(__VA_ARGS__)           \
                         : cudaErrorInvalidValue

/* SGD's rule in the type of the arithmetic: see cddp__cu_make_rule. */
template <typename C> struct cddp__cu_rule {
  C factor, clip; /* of the gradient */
  C step;         /* -lr */
  C keep;         /* momentum, not rounded to T */
  C momentum, intake, decay; /* momentum, rounded to T; 1 - dampening; weight_decay */
  bool has_factor, has_decay, has_momentum, first, zeroes, nesterov, maximize;
  const double *scratch; /* clipping: the factor is scratch[1]; NULL: none */
};

/* d = factor * g; d = clip * d; d = -d if maximize; d = d + decay * p
   m = first ? d : momentum * m + intake * d
   d = nesterov ? d + momentum * m : m
   p = p - lr * d
   p is the weight, d the gradient, m the momentum. Each a + f * b is rounded once. f16 and bf16
   round each result to their type, as >>optim in cddp.h does. Variants are flags, not separate
   kernels: a driver that compiles kernels at program start has fewer to compile. */
template <typename T, typename Copy> struct cddp__cu_sgd_op : cddp__cu_each {
  typedef typename cddp__cu_type<T>::C C;
  enum { READS = CDDP__CU_DATA | CDDP__CU_GRAD | CDDP__CU_MOMENTUM, WRITES = READS };
  cddp__cu_rule<C> rule;
  Copy copies;
  __device__ bool reads_momentum() const { return rule.has_momentum && !rule.first; }
  __device__ bool writes_momentum() const { return rule.has_momentum; }
  __device__ bool writes_grad() const { return rule.zeroes; }
  __device__ void begin() {
    if (rule.scratch != NULL) rule.clip = (C)rule.scratch[1];
  }
  __device__ C add(C a, C b, C f) const { /* a + f * b */
    return cddp__cu_rounded<T>(cddp__cu_fma(f, b, a));
  }
  __device__ void apply(T &data, T &grad, T &moment) const {
    C p = cddp__cu_load(data), d = cddp__cu_load(grad), m;
    if (rule.has_factor) d = cddp__cu_rounded<T>(cddp__cu_mul(d, rule.factor));
    if (rule.scratch != NULL) d = cddp__cu_rounded<T>(cddp__cu_mul(d, rule.clip));
    if (rule.maximize) d = -d;
    if (rule.has_decay) d = add(d, p, rule.decay);
    if (rule.has_momentum) {
      m = d; /* the first step's; PyTorch does not dampen it */
      if (!rule.first) {
        m = cddp__cu_rounded<T>(cddp__cu_mul(rule.keep, cddp__cu_load(moment)));
        m = add(m, d, rule.intake);
      }
      d = rule.nesterov ? add(d, m, rule.momentum) : m;
      moment = cddp__cu_store<T>(m);
    }
    data = cddp__cu_store<T>(add(p, d, rule.step));
    grad = cddp__cu_store<T>((C)0); /* stored only if writes_grad() */
  }
  template <size_t N> __device__ void copy(const cddp__cu_piece &p, size_t i, const T *d) const {
    copies.template copy<N>(p, i, d);
  }
};

/* An operation's copy(): none, or one that writes the new weights as H, f16 or bf16. */
struct cddp__cu_no_copy : cddp__cu_each {
  template <size_t N, typename T>
  __device__ void copy(const cddp__cu_piece &, size_t, const T *) const {}
};

template <typename H> struct cddp__cu_half_copy : cddp__cu_each {
  template <size_t N, typename T>
  __device__ void copy(const cddp__cu_piece &p, size_t i, const T *d) const {
    cddp__cu_pack<H, N> out;
    CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) out.v[k] = cddp__cu_store<H>((float)d[k]);
    *(cddp__cu_pack<H, N> *)((H *)p.copy + i) = out;
  }
};

/* Rounds x to T only once, although f32 is between them: first to an odd f32. Its lowest bit tells
   that bits were lost. f32, f64: the caller's cast rounds. */
template <typename T> static double cddp__cu_scalar(double x) { return x; }
static uint32_t cddp__cu_float_bits_odd(double x) {
  float y = (float)x;
  uint32_t u;
  memcpy(&u, &y, 4);
  if (x != x || (double)y == x) return u; /* NaN, or exact */
  if (fabs((double)y) > fabs(x)) u--; /* now rounded toward zero */
  return u | 1;
}
static double cddp__cu_bits_float(uint32_t u) {
  float y;
  memcpy(&y, &u, 4);
  return (double)y;
}
template <> double cddp__cu_scalar<__nv_bfloat16>(double x) {
  uint32_t u = cddp__cu_float_bits_odd(x);
  return cddp__cu_bits_float((u + 0x7fff + ((u >> 16) & 1) /* ties to even */) & 0xffff0000u);
}
template <> double cddp__cu_scalar<__half>(double x) {
  double y = cddp__cu_bits_float(cddp__cu_float_bits_odd(x)), a = fabs(y), unit;
  int e;
  if (!(a < 65520)) /* NaN, or nearer to infinity than to the largest f16, 65504 */
    return y != y ? y : y > 0 ? HUGE_VAL : -HUGE_VAL;
  frexp(a, &e);
  /* The value of the last of 11 binary places. Below 2^-14 (e < -13) f16 is subnormal. */
  unit = ldexp(1.0, (e < -13 ? -13 : e) - 11);
  return nearbyint(y / unit) * unit;
}

/* The rule's numbers as PyTorch rounds them: factors of an addition (alpha) to T, those of a
   multiplication alone (mul_) to the type of the arithmetic.
     factor   of the gradient: 1, or 1/n if the gradient is a sum
     clip     device memory: clip[1] is the factor of clipping; NULL: none */
template <typename T>
static cddp__cu_rule<typename cddp__cu_type<T>::C>
cddp__cu_make_rule(const cddp_sgd_desc *desc, double factor, const double *clip, unsigned flags) {
  typedef typename cddp__cu_type<T>::C C;
  cddp__cu_rule<C> rule;
  rule.factor = (C)factor;
  rule.clip = (C)1; /* begin() replaces it if clip is not NULL */
  rule.scratch = clip;
  rule.step = (C)cddp__cu_scalar<T>(-desc->lr);
  rule.keep = (C)desc->momentum;
  rule.momentum = (C)cddp__cu_scalar<T>(desc->momentum);
  rule.intake = (C)cddp__cu_scalar<T>(1.0 - desc->dampening);
  rule.decay = (C)cddp__cu_scalar<T>(desc->weight_decay);
  rule.has_factor = factor != 1; /* a factor of 1 changes nothing */
  rule.has_decay = desc->weight_decay != 0;
  rule.has_momentum = desc->momentum != 0;
  rule.first = (flags & CDDP_SGD_FIRST) != 0;
  rule.zeroes = (flags & CDDP_SGD_ZERO) != 0;
  rule.nesterov = desc->nesterov;
  rule.maximize = desc->maximize;
  return rule;
}

/* Runs op, an operation on f32, on the masters of weights of type H, and rounds the weights from
   them. op does not apply factor and clip: this does, to gradients of type H. */
template <typename H, typename Op> struct cddp__cu_master_op : cddp__cu_no_copy {
  enum {
    READS = CDDP__CU_GRAD, /* masters and states: in the overload of cddp__cu_apply below */
    WRITES = CDDP__CU_DATA | (Op::WRITES & CDDP__CU_GRAD),
    AT_ONCE = 2 /* each pack has two packs of the masters and of each state */
  };
  Op op;
  float factor, clip;
  const double *scratch; /* clipping: the factor is scratch[1]; NULL: none */
  __device__ bool writes_grad() const { return op.writes_grad(); }
  __device__ void begin() {
    if (scratch != NULL) clip = (float)scratch[1];
    op.begin();
  }
};

template <size_t N, typename H, typename Op>
static __device__ void cddp__cu_apply(const cddp__cu_master_op<H, Op> &op, const cddp__cu_piece &p,
                                      size_t i, H *d, H *g, H *) {
  typedef cddp__cu_pack<float, N> pack;
  pack *master = (pack *)(void *)(p.copy + i * sizeof(float));
  pack *moment = (pack *)(void *)(p.momentum + i * sizeof(float));
  pack weights = *master, moments = {}, gradients; /* f32 */
  if (op.op.reads_momentum()) moments = *moment; /* f32, so not among op's READS */
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) {
    gradients.v[k] = cddp__cu_rounded<H>(cddp__cu_mul(cddp__cu_load(g[k]), op.factor));
    if (op.scratch != NULL)
      gradients.v[k] = cddp__cu_rounded<H>(cddp__cu_mul(gradients.v[k], op.clip));
  }
  cddp__cu_apply<N>(op.op, p, i, weights.v, gradients.v, moments.v);
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) {
    d[k] = cddp__cu_store<H>(weights.v[k]);
    g[k] = cddp__cu_store<H>(0.0f); /* stored only if writes_grad() */
  }
  *master = weights;
  if (op.op.writes_momentum()) *moment = moments;
}

/* Runs op on the masters of n segments. factor, clip: of the gradients, as in cddp_kernels.sgd. */
template <typename H, typename Op>
static cudaError_t cddp__cu_on_masters(const cddp_segment *s, int n, const Op &op, double factor,
                                       const double *clip, cudaStream_t stream) {
  cddp__cu_master_op<H, Op> master_op = {};
  master_op.op = op;
  master_op.factor = (float)factor;
  master_op.scratch = clip;
  return cddp__cu_segments<H>(s, NULL /* copies */, n, master_op, stream);
}

/* SGD with arithmetic on type T. H is the type of the weights: T, or half precision if they have
   masters. */
template <typename T, typename H, typename Copy>
static cudaError_t cddp__cu_sgd_as(const cddp_segment *s, void *const *copies, int n,
                                   const cddp_sgd_desc *rule, double factor, const double *clip,
                                   unsigned flags, cudaStream_t stream) {
  cddp__cu_sgd_op<T, Copy> op = {};
  if constexpr (sizeof(H) < sizeof(T)) { /* masters */
    op.rule = cddp__cu_make_rule<T>(rule, 1 /* factor */, NULL /* clip */, flags);
    return cddp__cu_on_masters<H>(s, n, op, factor, clip, stream);
  }
  op.rule = cddp__cu_make_rule<T>(rule, factor, clip, flags);
  return cddp__cu_segments<T>(s, copies, n, op, stream);
}

/* Without masters and copies. One template parameter, for CDDP__CU_DISPATCH_TYPE. */
template <typename T>
static cudaError_t cddp__cu_sgd_plain(const cddp_segment *s, int n, const cddp_sgd_desc *rule,
                                      double factor, const double *clip, unsigned flags,
                                      cudaStream_t stream) {
  return cddp__cu_sgd_as<T, T, cddp__cu_no_copy>(s, NULL, n, rule, factor, clip, flags, stream);
}

/* All segments have masters, or none: cddp__cu_segments_ok. */
static bool cddp__cu_masters(const cddp_segment *s, int n) {
  return n > 0 && s[0].master != NULL;
}

/* All or none have masters, and those with elements have grad and, if asked for, data and
   momentum. */
static bool cddp__cu_segments_ok(const cddp_segment *s, int n, bool data, bool momentum) {
  if (n < 0 || (n > 0 && s == NULL)) return false;
  for (int i = 0; i < n; i++)
    if ((s[i].master != NULL) != cddp__cu_masters(s, n) ||
        (s[i].count > 0 && (s[i].grad == NULL || (data && s[i].data == NULL) ||
                            (momentum && s[i].momentum == NULL))))
      return false;
  return true;
}

/* Returns whether the copies are valid: those of segments with elements, which have data. */
static bool cddp__cu_copies_ok(const cddp_segment *s, void *const *copies, int n) {
  if (n < 0 || (n > 0 && (s == NULL || copies == NULL))) return false;
  for (int i = 0; i < n; i++)
    if (s[i].count > 0 && (s[i].data == NULL || copies[i] == NULL)) return false;
  return true;
}

/* cddp_kernels.sgd. */
static int cddp__cu_sgd(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_sgd_desc *rule,
                        double factor, const double *clip, unsigned flags, void *on) {
  cudaStream_t stream = (cudaStream_t)on;
  if (rule == NULL || !cddp__cu_segments_ok(s, n, true, rule->momentum != 0))
    return cudaErrorInvalidValue;
  if (cddp__cu_masters(s, n)) {
    if (dtype == CDDP_F16)
      return cddp__cu_sgd_as<float, __half, cddp__cu_no_copy>(s, NULL, n, rule, factor, clip, flags,
                                                              stream);
    if (dtype == CDDP_BF16)
      return cddp__cu_sgd_as<float, __nv_bfloat16, cddp__cu_no_copy>(s, NULL, n, rule, factor, clip,
                                                                     flags, stream);
    return cudaErrorInvalidValue;
  }
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_sgd_plain, s, n, rule, factor, clip, flags, stream);
}

extern "C" cudaError_t cddp_cuda_sgd(const cddp_segment *s, int n, cddp_dtype dtype,
                                     const cddp_sgd_desc *rule, unsigned flags,
                                     cudaStream_t stream) {
  return (cudaError_t)cddp__cu_sgd(s, n, dtype, rule, 1 /* factor */, NULL /* clip */, flags,
                                   stream);
}

extern "C" cudaError_t cddp_cuda_sgd_copies(const cddp_segment *s, void *const *copies, int n,
                                            cddp_dtype copy_dtype, const cddp_sgd_desc *rule,
                                            unsigned flags, cudaStream_t stream) {
  if (rule == NULL || !cddp__cu_segments_ok(s, n, true, rule->momentum != 0) ||
      !cddp__cu_copies_ok(s, copies, n))
    return cudaErrorInvalidValue;
  if (copy_dtype == CDDP_F16)
    return cddp__cu_sgd_as<float, float, cddp__cu_half_copy<__half>>(s, copies, n, rule, 1, NULL,
                                                                     flags, stream);
  if (copy_dtype == CDDP_BF16)
    return cddp__cu_sgd_as<float, float, cddp__cu_half_copy<__nv_bfloat16>>(
        s, copies, n, rule, 1, NULL, flags, stream);
  return cudaErrorInvalidValue;
}

/* AdamW, with the arithmetic of CDDP__ADAMW_MOMENTS and _WEIGHT in cddp.h. */
template <typename T> struct cddp__cu_adamw_op : cddp__cu_no_copy {
  enum {
    READS = CDDP__CU_DATA | CDDP__CU_GRAD | CDDP__CU_MOMENTUM,
    WRITES = READS,
    AT_ONCE = sizeof(T) == 8 ? 2 : CDDP__CU_UNROLL /* three arrays of f64: registers are short */
  };
  T factor, clip; /* of the gradient; with maximize, factor is negative */
  T step, decay, lerp, keep, take, root, eps; /* as in cddp_adamw_step, but see near */
  bool near; /* like torch.lerp, adds to the nearer end: the average, or (false: lerp is lerp - 1)
                the gradient */
  bool amsgrad, zeroes;
  size_t stride; /* bytes from one state to the next: cddp_adamw_step.stride */
  const double *scratch; /* clipping: the factor is scratch[1]; NULL: none */
  __device__ bool writes_grad() const { return zeroes; }
  __device__ void begin() {
    if (scratch != NULL) clip = (T)scratch[1];
  }
  /* One element: its weight, gradient, exp_avg, exp_avg_sq and max_exp_avg_sq. */
  __device__ void one(T &x, T &grad, T &average, T &square, T &most) const {
    T v = cddp__cu_mul(grad, factor), divisor;
    if (scratch != NULL) v = cddp__cu_mul(v, clip);
    average = cddp__cu_fma(lerp, cddp__cu_sub(v, average), near ? average : v);
    square = cddp__cu_fma(cddp__cu_mul(take, v), v, cddp__cu_mul(square, keep));
    most = amsgrad && (most > square || most != most /* stays NaN */) ? most : square;
    divisor = cddp__cu_add(cddp__cu_div(cddp__cu_sqrt(most), root), eps);
    x = cddp__cu_add(cddp__cu_mul(x, decay), cddp__cu_div(cddp__cu_mul(step, average), divisor));
    grad = 0; /* stored only if writes_grad() */
  }
};

template <size_t N, typename T>
static __device__ void cddp__cu_apply(const cddp__cu_adamw_op<T> &op, const cddp__cu_piece &p,
                                      size_t i, T *d, T *g, T *m) {
  typedef cddp__cu_pack<T, N> pack;
  pack *square = (pack *)(void *)(p.momentum + op.stride + i * sizeof(T));
  pack *most = (pack *)(void *)(p.momentum + 2 * op.stride + i * sizeof(T));
  pack squares = *square, maxima = squares; /* without amsgrad maxima are not used */
  if (op.amsgrad) maxima = *most;
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++)
    op.one(d[k], g[k], m[k], squares.v[k], maxima.v[k]);
  *square = squares;
  if (op.amsgrad) *most = maxima;
}

/* AdamW on weights of type H: f32 or f64, or f16 or bf16 if they have masters. */
template <typename H>
static cudaError_t cddp__cu_adamw_on(const cddp_segment *s, int n, const cddp_adamw_step *rule,
                                     double factor, const double *clip, unsigned flags,
                                     cudaStream_t stream) {
  typedef typename cddp__cu_type<H>::C T;
  cddp__cu_adamw_op<T> op = {};
  const bool masters = sizeof(H) < sizeof(T);
  /* with masters cddp__cu_master_op applies factor and clip */
  op.factor = (T)(masters ? 1 : factor) * (rule->maximize ? (T)-1 : (T)1);
  op.clip = (T)1;
  op.scratch = masters ? NULL : clip;
  op.step = (T)rule->step;
  op.decay = (T)rule->decay;
  op.lerp = (T)rule->lerp;
  op.near = op.lerp < (T)0.5;
  if (!op.near) op.lerp -= (T)1;
  op.keep = (T)rule->keep;
  op.take = (T)rule->take;
  op.root = (T)rule->root;
  op.eps = (T)rule->eps;
  op.stride = rule->stride;
  op.amsgrad = rule->amsgrad;
  op.zeroes = (flags & CDDP_SGD_ZERO) != 0;
  if constexpr (masters) return cddp__cu_on_masters<H>(s, n, op, factor, clip, stream);
  return cddp__cu_segments<T>(s, NULL, n, op, stream);
}

/* cddp_kernels.adamw. */
static int cddp__cu_adamw(const cddp_segment *s, int n, cddp_dtype dtype,
                          const cddp_adamw_step *rule, double factor, const double *clip,
                          unsigned flags, void *on) {
  cudaStream_t stream = (cudaStream_t)on;
  if (rule == NULL || !cddp__cu_segments_ok(s, n, true, true)) return cudaErrorInvalidValue;
  /* halves need masters, others cannot have any */
  if (cddp__cu_masters(s, n) != (dtype == CDDP_F16 || dtype == CDDP_BF16) ||
      rule->stride % (cddp__cu_masters(s, n) ? 32 : 16) != 0) /* bytes of a state's pack */
    return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_adamw_on, s, n, rule, factor, clip, flags, stream);
}

extern "C" cudaError_t cddp_cuda_adamw(const cddp_segment *s, int n, cddp_dtype dtype,
                                       const cddp_adamw_step *rule, unsigned flags,
                                       cudaStream_t stream) {
  return (cudaError_t)cddp__cu_adamw(s, n, dtype, rule, 1 /* factor */, NULL /* clip */, flags,
                                     stream);
}

/* Changes nothing, and copies the weights. */
template <typename H> struct cddp__cu_copy_op : cddp__cu_half_copy<H> {
  enum { READS = CDDP__CU_DATA, WRITES = 0 };
  __device__ void begin() {}
  __device__ void apply(float &, float &, float &) const {}
};

extern "C" cudaError_t cddp_cuda_copies(const cddp_segment *s, void *const *copies, int n,
                                        cddp_dtype copy_dtype, cudaStream_t stream) {
  if (!cddp__cu_copies_ok(s, copies, n)) return cudaErrorInvalidValue;
  if (copy_dtype == CDDP_F16)
    return cddp__cu_segments<float>(s, copies, n, cddp__cu_copy_op<__half>(), stream);
  if (copy_dtype == CDDP_BF16)
    return cddp__cu_segments<float>(s, copies, n, cddp__cu_copy_op<__nv_bfloat16>(), stream);
  return cudaErrorInvalidValue;
}

template <typename T> struct cddp__cu_scale_op : cddp__cu_no_copy {
  enum { READS = CDDP__CU_GRAD, WRITES = CDDP__CU_GRAD };
  const double *scratch; /* NULL: none; else the factor is scratch[1] */
  typename cddp__cu_type<T>::C factor;
  __device__ void begin() {
    if (scratch != NULL) factor = (typename cddp__cu_type<T>::C)scratch[1];
  }
  __device__ void apply(T &, T &grad, T &) const {
    grad = cddp__cu_store<T>(cddp__cu_mul(cddp__cu_load(grad), factor));
  }
};

template <typename T>
static cudaError_t cddp__cu_scale_as(const cddp_segment *s, int n, double factor,
                                     const double *scratch, cudaStream_t stream) {
  cddp__cu_scale_op<T> op;
  op.scratch = scratch;
  op.factor = (typename cddp__cu_type<T>::C)factor;
  return cddp__cu_segments<T>(s, NULL, n, op, stream);
}

/* grad *= scratch[1]; if scratch is NULL, grad *= factor. */
static int cddp__cu_scale(const cddp_segment *s, int n, cddp_dtype dtype, double factor,
                          const double *scratch, void *stream) {
  if (!cddp__cu_segments_ok(s, n, false, false)) return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_scale_as, s, n, factor, scratch,
                                (cudaStream_t)stream);
}

extern "C" cudaError_t cddp_cuda_scale(const cddp_segment *s, int n, cddp_dtype dtype,
                                       const double *scratch, cudaStream_t stream) {
  if (scratch == NULL) return cudaErrorInvalidValue;
  return (cudaError_t)cddp__cu_scale(s, n, dtype, 1 /* factor, not used */, scratch, stream);
}

/* >>shards ---------------------------------------------------------------------------------------
   Job: the canonical sum of nodes.
   How it works:
     1. A thread pushes each node's elements onto a stack of sums.
     2. After each push it merges the two sums on top, as many times as the host has computed: while
        they have the same width, or no node is left.
     3. Up to 15 shards need at most CDDP__CU_SHALLOW sums on the stack; a thread then sums a pack
        of elements at a time. With deeper stacks it sums one element at a time. */

enum {
  CDDP__CU_DEPTH = 16,  /* most sums on the stack */
  CDDP__CU_SHALLOW = 4 /* most with packs: the stack must fit into registers */
};

typedef struct cddp__cu_nodes {
  const void *at[CDDP_NODES]; /* [count] each node's array */
  unsigned char merges[CDDP_NODES]; /* number of merges after each node */
  int count;
  bool packed; /* the arrays are aligned and the stack is shallow: a thread sums packs */
  size_t elements; /* of each node */
  double divisor; /* of the sum; 0: none */
} cddp__cu_nodes;

/* Loads pack i of array `from` in the type of computing. */
template <typename T, size_t N>
static __device__ void cddp__cu_widen(typename cddp__cu_type<T>::C *to, const void *from,
                                      size_t i) {
  cddp__cu_pack<T, N> p = ((const cddp__cu_pack<T, N> *)from)[i];
  CDDP__CU_UNROLLED for (size_t e = 0; e < N; e++) to[e] = cddp__cu_load(p.v[e]);
}

/* Sums pack i of N elements. The last node's elements have type Last. The top of the stack is
   sums[0], and a push or a merge moves the whole stack: all indices are constants, so it stays in
   registers. CDDP__CU_UNROLL nodes are loaded before the first is added. */
template <typename Out, typename Last, size_t N, size_t DEPTH>
static __device__ void cddp__cu_sum_pack(const cddp__cu_nodes &s, void *out, size_t i) {
  typedef typename cddp__cu_type<Out>::C C;
  struct { C v[N]; } sums[DEPTH] = {}, node[CDDP__CU_UNROLL] = {};
  cddp__cu_pack<Out, N> result;
  for (int first = 0; first < s.count; first += CDDP__CU_UNROLL) {
    CDDP__CU_UNROLLED for (int u = 0; u < CDDP__CU_UNROLL; u++) {
      if (first + u < s.count - 1) /* not the last node */
        cddp__cu_widen<C, N>(node[u].v, s.at[first + u], i);
      else if (first + u < s.count) cddp__cu_widen<Last, N>(node[u].v, s.at[first + u], i);
    }
    CDDP__CU_UNROLLED for (int u = 0; u < CDDP__CU_UNROLL; u++) {
      if (first + u >= s.count) break;
      CDDP__CU_UNROLLED for (size_t at = DEPTH - 1; at > 0; at--) sums[at] = sums[at - 1];
      sums[0] = node[u];
      for (int merges = s.merges[first + u]; merges > 0; merges--) {
        CDDP__CU_UNROLLED for (size_t e = 0; e < N; e++)
          sums[0].v[e] = cddp__cu_add(sums[1].v[e], sums[0].v[e]);
        CDDP__CU_UNROLLED for (size_t at = 1; at < DEPTH - 1; at++) sums[at] = sums[at + 1];
      }
    }
  }
  CDDP__CU_UNROLLED for (size_t e = 0; e < N; e++) {
    C x = sums[0].v[e];
    result.v[e] = cddp__cu_store<Out>(s.divisor != 0 ? cddp__cu_div(x, (C)s.divisor) : x);
  }
  ((cddp__cu_pack<Out, N> *)out)[i] = result;
}

/* Sums packs first, then the remaining elements (all if the nodes are not packed) one by one. */
template <typename Out, typename Last>
CDDP__CU_KERNEL cddp__cu_sum_kernel(const cddp__cu_nodes s, void *out) {
  const size_t N = 16 / sizeof(typename cddp__cu_type<Out>::C);
  size_t packs = s.packed ? s.elements / N : 0, i;
  for (i = cddp__cu_thread(); i < packs; i += cddp__cu_all_threads())
    cddp__cu_sum_pack<Out, Last, N, CDDP__CU_SHALLOW>(s, out, i);
  for (i = packs * N + cddp__cu_thread(); i < s.elements; i += cddp__cu_all_threads())
    cddp__cu_sum_pack<Out, Last, 1, CDDP__CU_DEPTH>(s, out, i);
}

template <typename T>
static cudaError_t cddp__cu_sum_as(void *out, const cddp__cu_nodes &s, cudaStream_t stream) {
  typedef typename cddp__cu_type<T>::C C;
  dim3 blocks(cddp__cu_blocks(s.elements, CDDP__CU_THREADS * (16 / sizeof(C)), 8192));
  /* Out and Last: see cddp_kernels.sum. */
  if (s.divisor != 0) return cddp__cu_launch(cddp__cu_sum_kernel<T, C>, blocks, stream, s, out);
  return cddp__cu_launch(cddp__cu_sum_kernel<C, T>, blocks, stream, s, out);
}

/* cddp_kernels.sum. Merges the widths as the threads will merge the sums: this gives s.merges. */
static int cddp__cu_sum(void *out, cddp_dtype dtype, const void *const *nodes, const int *widths,
                        int n, int divisor, size_t count, void *stream) {
  int stack[CDDP__CU_DEPTH], depth = 0; /* the widths of the sums on it */
  cddp__cu_nodes s;
  if (count == 0) return cudaSuccess;
  if (out == NULL || nodes == NULL || widths == NULL || n < 1 || n > CDDP_NODES || divisor < 0)
    return cudaErrorInvalidValue;
  memset((void *)&s, 0, sizeof s);
  s.count = n;
  s.elements = count;
  s.divisor = (double)divisor;
  s.packed = (uintptr_t)out % 16 == 0;
  for (int i = 0; i < n; i++) {
    if (depth == CDDP__CU_DEPTH || nodes[i] == NULL) return cudaErrorInvalidValue;
    s.at[i] = nodes[i];
    s.packed = s.packed && (uintptr_t)nodes[i] % 16 == 0;
    stack[depth++] = widths[i] < 0 ? -widths[i] : widths[i];
    s.packed = s.packed && depth <= CDDP__CU_SHALLOW;
    /* after the last node all sums are merged */
    for (; depth > 1 && (i == n - 1 || stack[depth - 1] == stack[depth - 2]); depth--) {
      stack[depth - 2] += stack[depth - 1];
      s.merges[i]++;
    }
  }
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_sum_as, out, s, (cudaStream_t)stream);
}

/* >>sums -----------------------------------------------------------------------------------------
   Job: sums over all elements.
   How it works: each block writes its sum to scratch (block b to index 2 + b, behind the sum of
   squares and the factor). A second launch, of one block, adds these sums. The number of blocks
   depends only on the sizes, not on the device. */

/* Launched with one block. */
CDDP__CU_KERNEL cddp__cu_finish_kernel(double *to, const double *partial, int n, double factor) {
  double sum = 0;
  for (int i = (int)threadIdx.x; i < n; i += CDDP__CU_THREADS) sum += partial[i];
  sum = cddp__cu_block_sum(sum) * factor;
  if (threadIdx.x == 0) *to += sum;
}

/* *to += factor times the sum of the blocks' sums. */
static cudaError_t cddp__cu_finish(double *to, const double *partial, unsigned blocks,
                                   double factor, cudaStream_t stream) {
  return cddp__cu_launch(cddp__cu_finish_kernel, 1 /* block */, stream, to, partial, (int)blocks,
                         factor);
}

/* The sum of squares of all grad. Each launch of pieces is followed by one that adds to
   scratch[0]. */
template <typename T> struct cddp__cu_squares_op : cddp__cu_no_copy {
  enum { READS = CDDP__CU_GRAD, WRITES = 0, BLOCKS = CDDP_CUDA_BLOCKS };
  double *scratch;
  mutable double sum; /* of this thread; mutable, as apply() is const */
  __device__ void begin() { sum = 0; }
  __device__ void apply(T &, T &grad, T &) const {
    double v = (double)cddp__cu_load(grad);
    sum += v * v;
  }
  __device__ void end() const {
    double all = cddp__cu_block_sum(sum);
    if (threadIdx.x == 0) scratch[2 + blockIdx.x] = all;
  }
  cudaError_t launched(unsigned blocks, cudaStream_t stream) const {
    return cddp__cu_finish(scratch, scratch + 2, blocks, 1, stream);
  }
};

template <typename T>
static cudaError_t cddp__cu_squares(const cddp_segment *s, int n, double *scratch, bool add,
                                 cudaStream_t stream) {
  cddp__cu_squares_op<T> op;
  /* not add: scratch[0] = 0 */
  cudaError_t e = add ? cudaSuccess : cudaMemsetAsync(scratch, 0, sizeof *scratch, stream);
  op.scratch = scratch;
  op.sum = 0; /* begin() sets it; here only so that op has no undefined field */
  return e == cudaSuccess ? cddp__cu_segments<T>(s, NULL, n, op, stream) : e;
}

extern "C" cudaError_t cddp_cuda_squares(const cddp_segment *s, int n, cddp_dtype dtype,
                                         double *scratch, bool add, cudaStream_t stream) {
  if (!cddp__cu_segments_ok(s, n, false, false) || scratch == NULL) return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_squares, s, n, scratch, add, stream);
}

static __global__ void cddp__cu_factor_kernel(double *scratch, double max_norm) {
  double factor = max_norm / (sqrt(scratch[0]) + 1e-6);
  /* A NaN stays NaN. With max_norm inf nothing is clipped, and inf / inf would be NaN. */
  scratch[1] = factor > 1 || isinf(max_norm) ? 1 : factor;
}

extern "C" cudaError_t cddp_cuda_factor(double *scratch, double max_norm, cudaStream_t stream) {
  if (scratch == NULL) return cudaErrorInvalidValue;
  return cddp__cu_launch_threads(cddp__cu_factor_kernel, 1 /* block */, 1 /* thread */, stream,
                                 scratch, max_norm);
}

/* >>arrays ----------------------------------------------------------------------------------------
   Job: convert and fill arrays. Entry points: cddp_cuda_convert, _fill, _uniform. */

/* Converts an element, and rounds once. From f64 to a half there is a cast to f32 before the store:
   the specializations below. */
template <typename To, typename From> struct cddp__cu_conversion {
  static __device__ To of(From x) {
    return cddp__cu_store<To>((typename cddp__cu_type<To>::C)cddp__cu_load(x));
  }
};
template <typename To> struct cddp__cu_conversion<To, double> { /* as in cddp__cu_scalar */
  static __device__ To of(double x) {
    float y = __double2float_rz(x); /* toward zero; if inexact, then to an odd f32 */
    if ((double)y != x && x == x /* no NaN */) y = __uint_as_float(__float_as_uint(y) | 1);
    return cddp__cu_store<To>(y);
  }
};
template <> struct cddp__cu_conversion<float, double> {
  static __device__ float of(double x) { return (float)x; }
};
template <> struct cddp__cu_conversion<double, double> {
  static __device__ double of(double x) { return x; }
};

template <typename To, typename From>
CDDP__CU_KERNEL cddp__cu_convert_kernel(To *to, const From *from, size_t n, bool packed) {
  const size_t larger = sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From);
  const size_t N = 16 / larger; /* elements of a pack: that of the larger type has 16 bytes */
  size_t packs = packed ? n / N : 0;
  for (size_t i = cddp__cu_thread(); i < packs; i += cddp__cu_all_threads()) {
    cddp__cu_pack<From, N> in = ((const cddp__cu_pack<From, N> *)from)[i];
    cddp__cu_pack<To, N> out;
    CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) {
      out.v[k] = cddp__cu_conversion<To, From>::of(in.v[k]);
    }
    ((cddp__cu_pack<To, N> *)to)[i] = out;
  }
  for (size_t i = packs * N + cddp__cu_thread(); i < n; i += cddp__cu_all_threads())
    to[i] = cddp__cu_conversion<To, From>::of(from[i]);
}

template <typename To, typename From>
static cudaError_t cddp__cu_convert_from(void *to, const void *from, size_t n,
                                         cudaStream_t stream) {
  bool packed = ((uintptr_t)to | (uintptr_t)from) % 16 == 0; /* both are aligned */
  return cddp__cu_launch(cddp__cu_convert_kernel<To, From>, cddp__cu_grid(n), stream, (To *)to,
                         (const From *)from, n, packed);
}

/* dtype: that of `from`. */
template <typename To>
static cudaError_t cddp__cu_convert_to(void *to, const void *from, cddp_dtype dtype, size_t n,
                                    cudaStream_t stream) {
  switch (dtype) {
    case CDDP_F32: return cddp__cu_convert_from<To, float>(to, from, n, stream);
    case CDDP_F64: return cddp__cu_convert_from<To, double>(to, from, n, stream);
    case CDDP_F16: return cddp__cu_convert_from<To, __half>(to, from, n, stream);
    case CDDP_BF16: return cddp__cu_convert_from<To, __nv_bfloat16>(to, from, n, stream);
    default: return cudaErrorInvalidValue;
  }
}

extern "C" cudaError_t cddp_cuda_convert(void *to, cddp_dtype to_dtype, const void *from,
                                         cddp_dtype from_dtype, size_t n, cudaStream_t stream) {
  if (!cddp__cu_is_float(to_dtype) || !cddp__cu_is_float(from_dtype)) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  if (to == NULL || from == NULL) return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(to_dtype, cddp__cu_convert_to, to, from, from_dtype, n, stream);
}

template <typename T> CDDP__CU_KERNEL cddp__cu_fill_kernel(T *x, size_t n, double value) {
  T v = cddp__cu_conversion<T, double>::of(value);
  for (size_t i = cddp__cu_thread(); i < n; i += cddp__cu_all_threads()) x[i] = v;
}

template <typename T>
static cudaError_t cddp__cu_fill(void *x, size_t n, double value, cudaStream_t stream) {
  return cddp__cu_launch(cddp__cu_fill_kernel<T>, cddp__cu_grid(n), stream, (T *)x, n, value);
}

extern "C" cudaError_t cddp_cuda_fill(void *x, cddp_dtype dtype, size_t n, double value,
                                      cudaStream_t stream) {
  if (!cddp__cu_is_float(dtype)) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  if (x == NULL) return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_fill, x, n, value, stream);
}

CDDP__CU_KERNEL cddp__cu_uniform_kernel(float *x, size_t n, float bound, uint64_t seed) {
  for (size_t i = cddp__cu_thread(); i < n; i += cddp__cu_all_threads()) { /* splitmix64 */
    uint64_t start = (seed << 32) + seed; /* a small seed, too, sets bits in both halves */
    uint64_t z = start + ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z = (z ^ (z >> 31)) >> 40;
    /* z has 24 bits: divided by 2^23 it is in [0, 2), without rounding. */
    x[i] = cddp__cu_mul(cddp__cu_add((float)(uint32_t)z / 8388608.0f, -1.0f), bound);
  }
}

extern "C" cudaError_t cddp_cuda_uniform(float *x, size_t n, float bound, uint64_t seed,
                                         cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (x == NULL) return cudaErrorInvalidValue;
  return cddp__cu_launch(cddp__cu_uniform_kernel, cddp__cu_grid(n), stream, x, n, bound, seed);
}

/* >>layers ----------------------------------------------------------------------------------------
   Job: losses, activations, embedding and linear layer of the examples, for other programs too.
   Entry points: cddp_cuda_relu_backward, _mse, _cross_entropy, _embedding, _linear, and their
   backward passes. */

CDDP__CU_KERNEL cddp__cu_relu_backward_kernel(float *dy, const float *y, size_t n) {
  for (size_t i = cddp__cu_thread(); i < n; i += cddp__cu_all_threads())
    dy[i] = y[i] > 0 ? dy[i] : 0.0f;
}

extern "C" cudaError_t cddp_cuda_relu_backward(float *dy, const float *y, size_t n,
                                               cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (dy == NULL || y == NULL) return cudaErrorInvalidValue;
  return cddp__cu_launch(cddp__cu_relu_backward_kernel, cddp__cu_grid(n), stream, dy, y, n);
}

/* partial[b]: block b's sum of squared errors. factor: 2 / n, for the gradient of the mean. */
CDDP__CU_KERNEL cddp__cu_mse_kernel(const float *y, const float *target, float *dy, double *partial,
                                    size_t n, float factor) {
  double sum = 0;
  for (size_t i = cddp__cu_thread(); i < n; i += cddp__cu_all_threads()) {
    float error = y[i] - target[i];
    sum += (double)error * (double)error;
    if (dy != NULL) dy[i] = factor * error;
  }
  sum = cddp__cu_block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" cudaError_t cddp_cuda_mse(const float *y, const float *target, float *dy, double *stats,
                                     double *scratch, size_t n, cudaStream_t stream) {
  unsigned blocks = cddp__cu_blocks(n, CDDP__CU_THREADS, CDDP_CUDA_BLOCKS);
  cudaError_t e;
  if (n == 0) return cudaSuccess;
  if (y == NULL || target == NULL || stats == NULL || scratch == NULL)
    return cudaErrorInvalidValue;
  e = cddp__cu_launch(cddp__cu_mse_kernel, blocks, stream, y, target, dy, scratch + 2, n,
                      2.0f / (float)n);
  if (e != cudaSuccess) return e;
  return cddp__cu_finish(stats, scratch + 2, blocks, 1.0 / (double)n, stream);
}

/* A warp processes a row in three passes: the maximum and its index; the sum of exp(y - maximum),
   which cannot overflow; the gradient. Every lane returns the loss: log(sum) + maximum - y[label].
     dy      receives the gradient; NULL: not wanted
     share   of the row in the mean: 1 / rows
     right   whether the label is the index of the maximum */
static __device__ double cddp__cu_row_loss(const float *y, float *dy, int label, int classes,
                                        float share, bool *right) {
  int lane = (int)(threadIdx.x % 32), best = classes /* none yet */, k;
  float maximum = -INFINITY, sum = 0, target;
  for (k = lane; k < classes; k += 32)
    if (y[k] > maximum) maximum = y[k], best = k;
  for (k = 16; k > 0; k /= 2) { /* of all lanes; of equal maxima the first one counts */
    float other = __shfl_xor_sync(0xffffffffu, maximum, k);
    int where = __shfl_xor_sync(0xffffffffu, best, k);
    if (other > maximum || (!(maximum > other) && where < best)) maximum = other, best = where;
  }
  for (k = lane; k < classes; k += 32) sum += expf(y[k] - maximum);
  for (k = 16; k > 0; k /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, k);
  target = (unsigned)label < (unsigned)classes ? y[label] : NAN; /* read before dy is written */
  __syncwarp(); /* all lanes have read y, which dy may overwrite */
  for (k = lane; dy != NULL && k < classes; k += 32)
    dy[k] = (expf(y[k] - maximum) / sum - (k == label ? 1.0f : 0.0f)) * share;
  *right = best == label;
  return (double)(maximum - target) + (double)logf(sum);
}

/* partial[b]: block b's sum of losses; partial[CDDP_CUDA_BLOCKS + b]: its right rows. */
CDDP__CU_KERNEL cddp__cu_cross_entropy_kernel(const float *y, const int32_t *labels, float *dy,
                                              double *partial, int64_t rows, int classes,
                                              float share) {
  const int64_t warps = (int64_t)gridDim.x * (CDDP__CU_THREADS / 32);
  double loss = 0, hits = 0;
  for (int64_t row = (int64_t)(cddp__cu_thread() / 32); row < rows; row += warps) {
    bool right;
    double row_loss = cddp__cu_row_loss(y + row * classes, dy != NULL ? dy + row * classes : NULL,
                                        labels[row], classes, share, &right);
    if (threadIdx.x % 32 == 0) loss += row_loss, hits += right; /* one lane of the warp counts it */
  }
  loss = cddp__cu_block_sum(loss);
  hits = cddp__cu_block_sum(hits);
  if (threadIdx.x == 0) partial[blockIdx.x] = loss, partial[CDDP_CUDA_BLOCKS + blockIdx.x] = hits;
}

extern "C" cudaError_t cddp_cuda_cross_entropy(const float *y, const int32_t *labels, float *dy,
                                               double *stats, double *scratch, int64_t rows,
                                               int classes, cudaStream_t stream) {
  unsigned blocks;
  cudaError_t e;
  if (rows == 0) return cudaSuccess;
  if (rows < 0 || classes < 1 || y == NULL || labels == NULL || stats == NULL || scratch == NULL)
    return cudaErrorInvalidValue;
  blocks = cddp__cu_blocks((size_t)rows, CDDP__CU_THREADS / 32 /* warps */, CDDP_CUDA_BLOCKS);
  e = cddp__cu_launch(cddp__cu_cross_entropy_kernel, blocks, stream, y, labels, dy, scratch + 2,
                      rows, classes, 1.0f / (float)rows);
  if (e == cudaSuccess) e = cddp__cu_finish(stats, scratch + 2, blocks, 1.0 / (double)rows, stream);
  if (e != cudaSuccess) return e;
  return cddp__cu_finish(stats + 1, scratch + 2 + CDDP_CUDA_BLOCKS, blocks, 1 /* factor */, stream);
}

/* A block copies a row at a time: that of id i to row i of out. */
CDDP__CU_KERNEL cddp__cu_embedding_kernel(const float *table, const int32_t *ids, float *out,
                                          int64_t n, int vocabulary, int width) {
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    bool known = (unsigned)ids[i] < (unsigned)vocabulary;
    const float *row = table + (known ? (int64_t)ids[i] * width : 0); /* 0: not read */
    for (int k = (int)threadIdx.x; k < width; k += CDDP__CU_THREADS)
      out[i * width + k] = known ? row[k] : NAN;
  }
}

extern "C" cudaError_t cddp_cuda_embedding(const float *table, const int32_t *ids, float *out,
                                           int64_t n, int vocabulary, int width,
                                           cudaStream_t stream) {
  if (n == 0 || width == 0) return cudaSuccess;
  if (n < 0 || width < 0 || vocabulary < 0 || table == NULL || ids == NULL || out == NULL)
    return cudaErrorInvalidValue;
  return cddp__cu_launch(cddp__cu_embedding_kernel, cddp__cu_blocks((size_t)n, 1, 1u << 16), stream,
                         table, ids, out, n, vocabulary, width);
}

/* How the backward pass of an embedding works (no atomic additions: the order of sums is fixed):
     1. A key is id << 32 | index, so that sorted keys are ordered by id, then by index.
     2. Each thread sorts a run of keys by insertion. Then pairs of runs are merged, repeatedly.
     3. In a merge each thread writes CDDP__CU_RUN keys. It finds its start by a bisection.
     4. One block adds up a row of dtable, in the order of its keys. */
enum {
  CDDP__CU_RUN = 32, /* keys of a thread, in a sort and in a merge */
  CDDP__CU_ROWS = 8  /* rows of dout that a thread loads before it adds them */
};

/* Writes the keys of ids, in sorted runs of CDDP__CU_RUN keys. */
CDDP__CU_KERNEL cddp__cu_runs_kernel(const int32_t *ids, uint64_t *keys, size_t n) {
  const size_t stride = cddp__cu_all_threads() * CDDP__CU_RUN;
  for (size_t begin = cddp__cu_thread() * CDDP__CU_RUN; begin < n; begin += stride) {
    size_t end = begin + CDDP__CU_RUN < n ? begin + CDDP__CU_RUN : n;
    for (size_t i = begin; i < end; i++) {
      uint64_t key = (uint64_t)(uint32_t)ids[i] << 32 | i;
      size_t k = i; /* insertion: larger keys move up by one */
      for (; k > begin && keys[k - 1] > key; k--) keys[k] = keys[k - 1];
      keys[k] = key;
    }
  }
}

/* Merges pairs of runs of `run` keys. The first `before` keys of a merged pair are from both runs:
   the bisection finds how many are from the first. */
CDDP__CU_KERNEL cddp__cu_merge_kernel(const uint64_t *from, uint64_t *to, size_t n, size_t run) {
  const size_t stride = cddp__cu_all_threads() * CDDP__CU_RUN;
  for (size_t at = cddp__cu_thread() * CDDP__CU_RUN; at < n; at += stride) {
    size_t begin = at - at % (2 * run), before = at - begin;
    size_t middle = begin + run < n ? begin + run : n;
    size_t end = middle + run < n ? middle + run : n;
    /* Bounds of the number from the first run: the second has only end - middle keys. */
    size_t low = before > end - middle ? before - (end - middle) : 0;
    size_t high = before < middle - begin ? before : middle - begin;
    while (low < high) {
      size_t guess = (low + high) / 2;
      if (from[begin + guess] < from[middle + before - guess - 1]) low = guess + 1;
      else high = guess;
    }
    size_t a = begin + low, b = middle + before - low; /* the next key of each run */
    for (size_t i = at; i < at + CDDP__CU_RUN && i < n; i++)
      to[i] = b == end || (a < middle && from[a] < from[b]) ? from[a++] : from[b++];
  }
}

/* Returns the index of the first of keys i to n - 1 with another id than key i; n: none has. */
static __device__ size_t cddp__cu_row_end(const uint64_t *keys, size_t i, size_t n) {
  uint64_t next = ((keys[i] >> 32) + 1) << 32; /* the lowest key of the next id */
  while (i < n) {
    size_t middle = i + (n - i) / 2;
    if (keys[middle] < next) i = middle + 1;
    else n = middle;
  }
  return n;
}

/* Adds the rows of dout with one id to its row of dtable: the block of the id's first key does it.
   Additions of one sum depend on each other, so CDDP__CU_ROWS loads precede them. */
CDDP__CU_KERNEL cddp__cu_rows_kernel(const float *dout, const uint64_t *keys, float *dtable,
                                     size_t n, int vocabulary, int width) {
  for (size_t i = blockIdx.x; i < n; i += gridDim.x) {
    size_t id = (size_t)(keys[i] >> 32), end;
    bool first = i == 0 || keys[i - 1] >> 32 != id; /* of the id's keys */
    if (id >= (size_t)vocabulary || !first) continue;
    end = cddp__cu_row_end(keys, i, n);
    for (size_t k = threadIdx.x; k < (size_t)width; k += CDDP__CU_THREADS) {
      float sum = dtable[id * (size_t)width + k], part[CDDP__CU_ROWS];
      size_t j = i;
      for (; j + CDDP__CU_ROWS <= end; j += CDDP__CU_ROWS) {
        CDDP__CU_UNROLLED for (size_t u = 0; u < CDDP__CU_ROWS; u++)
          part[u] = dout[(size_t)(uint32_t)keys[j + u] * (size_t)width + k];
        CDDP__CU_UNROLLED for (size_t u = 0; u < CDDP__CU_ROWS; u++) sum += part[u];
      }
      for (; j < end; j++) sum += dout[(size_t)(uint32_t)keys[j] * (size_t)width + k];
      dtable[id * (size_t)width + k] = sum;
    }
  }
}

extern "C" cudaError_t cddp_cuda_embedding_backward(const float *dout, const int32_t *ids,
                                                    float *dtable, void *order, int64_t n,
                                                    int vocabulary, int width,
                                                    cudaStream_t stream) {
  uint64_t *keys = (uint64_t *)order, *other; /* halves of order: sorted so far; merged next */
  size_t run, count = (size_t)n; /* n is checked below */
  dim3 blocks(cddp__cu_blocks(count, (size_t)CDDP__CU_RUN * CDDP__CU_THREADS, 1u << 16));
  cudaError_t e;
  if (n == 0 || width == 0) return cudaSuccess;
  if (n < 0 || n > (int64_t)1 << 32 /* a key has 32 bits for an index */ || width < 0 ||
      vocabulary < 0 || dout == NULL || ids == NULL || dtable == NULL || order == NULL)
    return cudaErrorInvalidValue;
  other = keys + count;
  e = cddp__cu_launch(cddp__cu_runs_kernel, blocks, stream, ids, keys, count);
  for (run = CDDP__CU_RUN; e == cudaSuccess && run < count; run *= 2) {
    uint64_t *from = keys;
    e = cddp__cu_launch(cddp__cu_merge_kernel, blocks, stream, from, other, count, run);
    keys = other;
    other = from;
  }
  if (e != cudaSuccess) return e;
  return cddp__cu_launch(cddp__cu_rows_kernel, cddp__cu_blocks(count, 1, 1u << 16), stream, dout,
                         keys, dtable, count, vocabulary, width);
}

#ifndef CDDP_KERNELS_NO_CUBLAS

/* y[rows][out] += b (NULL: none), then ReLU if relu is set. A thread has one column. */
CDDP__CU_KERNEL cddp__cu_bias_kernel(float *y, const float *b, int rows, int out, bool relu) {
  int64_t column = (int64_t)cddp__cu_thread();
  if (column >= out) return;
  for (int row = (int)blockIdx.y; row < rows; row += (int)gridDim.y) {
    float *at = y + (int64_t)row * out + column, v = *at + (b != NULL ? b[column] : 0.0f);
    *at = relu && !(v > 0) && v == v ? 0.0f : v; /* NaN stays NaN */
  }
}

/* cublasSetStream discards the program's own workspace, so it is called only for a new stream. */
static bool cddp__cu_blas_on(cublasHandle_t blas, cudaStream_t stream) {
  cudaStream_t now = NULL;
  if (cublasGetStream(blas, &now) == CUBLAS_STATUS_SUCCESS && now == stream) return true;
  return cublasSetStream(blas, stream) == CUBLAS_STATUS_SUCCESS;
}

extern "C" cudaError_t cddp_cuda_linear(cublasHandle_t blas, const float *x, const float *w,
                                        const float *b, float *y, int rows, int in, int out,
                                        bool relu, cudaStream_t stream) {
  const float one = 1, zero = 0;
  if (rows == 0 || out == 0) return cudaSuccess;
  if (rows < 0 || in < 1 || out < 0) return cudaErrorInvalidValue;
  /* cuBLAS is column-major, so each matrix is transposed to it: y' = w x'. */
  if (!cddp__cu_blas_on(blas, stream) ||
      cublasSgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, out, rows, in, &one, w, in, x, in, &zero, y,
                  out) != CUBLAS_STATUS_SUCCESS)
    return cudaErrorUnknown;
  if (b == NULL && !relu) return cudaSuccess;
  return cddp__cu_launch(cddp__cu_bias_kernel,
                         dim3(cddp__cu_blocks((size_t)out, CDDP__CU_THREADS, 1u << 30),
                              cddp__cu_blocks((size_t)rows, 4, 65535 /* limit of CUDA */)),
                         stream, y, b, rows, out, relu);
}

/* sums[columns] += the column sums of x. A block sums 32 columns: each of its warps every 32nd row,
   with four loads in flight; then warp 0 adds the warps' sums. */
enum { CDDP__CU_COLUMN_WARPS = 32, CDDP__CU_COLUMN_ROWS = 4 };
static __global__ void __launch_bounds__(32 * CDDP__CU_COLUMN_WARPS)
    cddp__cu_columns_kernel(const float *x, float *sums, int rows, int columns) {
  __shared__ float warp_sums[CDDP__CU_COLUMN_WARPS][32];
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32), k;
  int64_t column = (int64_t)blockIdx.x * 32 + lane, row;
  float sum[CDDP__CU_COLUMN_ROWS] = {0, 0, 0, 0};
  for (row = warp; column < columns && row < rows;
       row += CDDP__CU_COLUMN_WARPS * CDDP__CU_COLUMN_ROWS)
    CDDP__CU_UNROLLED for (k = 0; k < CDDP__CU_COLUMN_ROWS; k++) {
      int64_t at = row + k * CDDP__CU_COLUMN_WARPS;
      sum[k] += at < rows ? x[at * columns + column] : 0;
    }
  warp_sums[warp][lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  __syncthreads();
  if (warp > 0 || column >= columns) return; /* after the barrier, which all threads must reach */
  sum[0] = sums[column]; /* db is added to */
  for (k = 0; k < CDDP__CU_COLUMN_WARPS; k++) sum[0] += warp_sums[k][lane];
  sums[column] = sum[0];
}

extern "C" cudaError_t cddp_cuda_linear_backward(cublasHandle_t blas, const float *x,
                                                 const float *w, const float *dy, float *dx,
                                                 float *dw, float *db, int rows, int in, int out,
                                                 cudaStream_t stream) {
  const float one = 1, zero = 0;
  if (rows == 0 || out == 0) return cudaSuccess;
  if (rows < 0 || in < 1 || out < 0) return cudaErrorInvalidValue;
  /* Column-major, as in cddp_cuda_linear: dw' += x' dy, dx' = w' dy'. */
  if (!cddp__cu_blas_on(blas, stream) ||
      cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, in, out, rows, &one, x, in, dy, out, &one, dw,
                  in) != CUBLAS_STATUS_SUCCESS)
    return cudaErrorUnknown;
  if (dx != NULL && cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, in, rows, out, &one, w, in, dy, out,
                                &zero, dx, in) != CUBLAS_STATUS_SUCCESS)
    return cudaErrorUnknown;
  if (db == NULL) return cudaSuccess;
  return cddp__cu_launch_threads(cddp__cu_columns_kernel,
                                 cddp__cu_blocks((size_t)out, 32, 1u << 30),
                                 32 * CDDP__CU_COLUMN_WARPS, stream, dy, db, rows, out);
}

#endif /* CDDP_KERNELS_NO_CUBLAS */

/* >>table ----------------------------------------------------------------------------------------
   Job: the table of functions that cddp.h calls. A constructor registers it before main, in any
   link order. cddp.h's C code has no CUDA types: the functions cast them. */

static int cddp__cu_table_copies(const cddp_segment *s, void *const *copies, int n,
                                 cddp_dtype copy_dtype, void *stream) {
  return (int)cddp_cuda_copies(s, copies, n, copy_dtype, (cudaStream_t)stream);
}
static int cddp__cu_table_convert(void *to, cddp_dtype to_dtype, const void *from,
                               cddp_dtype from_dtype, size_t n, void *stream) {
  return (int)cddp_cuda_convert(to, to_dtype, from, from_dtype, n, (cudaStream_t)stream);
}
static int cddp__cu_table_squares(const cddp_segment *s, int n, cddp_dtype dtype, double *scratch,
                               bool add, void *stream) {
  return (int)cddp_cuda_squares(s, n, dtype, scratch, add, (cudaStream_t)stream);
}
static int cddp__cu_table_factor(double *scratch, double max_norm, void *stream) {
  return (int)cddp_cuda_factor(scratch, max_norm, (cudaStream_t)stream);
}
/* Loads all kernels that cddp.h launches, by calls as for one element, of host memory:
   cddp__cu_loads keeps them from launching. Otherwise a kernel's first launch would wait for the
   device and other threads, and invalidate a capture. */
static int cddp__cu_table_load(void) {
  double element[2] = {0, 0};
  cddp_segment plain = {element, element, element, 1 /* count */, NULL};
  cddp_segment with_master = {element, element, element, 1, element};
  const void *node = element;
  void *copy = element;
  cddp_sgd_desc rule;
  cddp_adamw_step adamw;
  int e = 0 /* 0: all were loaded */, width = 1;
  memset((void *)&rule, 0, sizeof rule);
  memset((void *)&adamw, 0, sizeof adamw);
  cddp__cu_loads = true;
  for (int t = CDDP_F32; t <= CDDP_BF16; t++) {
    cddp_dtype dtype = (cddp_dtype)t;
    e |= cddp__cu_sgd(&plain, 1, dtype, &rule, 1, NULL, 0, NULL);
    if (dtype > CDDP_F64) e |= cddp__cu_sgd(&with_master, 1, dtype, &rule, 1, NULL, 0, NULL);
    /* AdamW steps f16 and bf16 only with masters */
    e |= cddp__cu_adamw(dtype > CDDP_F64 ? &with_master : &plain, 1, dtype, &adamw, 1, NULL, 0,
                        NULL);
    for (int to = CDDP_F32; to <= CDDP_BF16; to++)
      e |= cddp_cuda_convert(element, (cddp_dtype)to, element, dtype, 1, NULL);
    e |= cddp__cu_scale(&plain, 1, dtype, 1, NULL, NULL);
    e |= cddp_cuda_squares(&plain, 1, dtype, element, true, NULL);
    for (int divisor = 0; divisor < 2; divisor++) /* 0 and others have different kernels */
      e |= cddp__cu_sum(element, dtype, &node, &width, 1, divisor, 1, NULL);
  }
  e |= cddp_cuda_copies(&plain, &copy, 1, CDDP_F16, NULL);
  e |= cddp_cuda_copies(&plain, &copy, 1, CDDP_BF16, NULL);
  e |= cddp_cuda_factor(element, 1, NULL);
  cddp__cu_loads = false;
  return e != 0 ? (int)cudaGetLastError() : 0; /* e mixes the codes of several errors */
}

static const cddp_kernels cddp__cu_table = {
    CDDP_VERSION,           CDDP_CUDA_SCRATCH_BYTES, cddp__cu_table_load,
    cddp__cu_sgd,           cddp__cu_adamw,          cddp__cu_table_copies,
    cddp__cu_table_convert, cddp__cu_table_squares,  cddp__cu_table_factor,
    cddp__cu_scale,         cddp__cu_sum};

/* Its constructor runs before main. */
static struct cddp__cu_registers {
  cddp__cu_registers() { cddp_register_kernels(&cddp__cu_table); }
} cddp__cu_registered;

#endif /* CDDP_KERNELS_IMPLEMENTATION */

#ifdef CDDP__DEVICE_ROOMS

#include <nccl.h>
#if NCCL_VERSION_CODE < 21900 /* 2.18 can crash when another thread aborts a communicator */
#error "cddp_kernels.cuh: CDDP_CUDA needs NCCL 2.19 or later"
#endif

/* >>device -------------------------------------------------------------------------------------
   Job: run the operations of groups with GPUs: by NCCL, or through host memory (backend "cpu").
   Owns: a group's device context: streams, events, communicator, scratch memory, two threads.
   Touches: the group's slots, where each rank logs its calls on device memory; the group's failure;
   its engine (barriers); its links to other hosts (p2p.lock); the arena (copies on the host).
   Entry points: those of CDDP__DEVICE_FUNCTIONS; cddp__transfer and cddp__await_nccl_threads of
   >>hooks; for the rooms below contexts (cddp__device_open), streams, memory and calls.
   How an operation runs:
     1. Its call is logged, with a hash of all calls so far. Ranks of a host compare the hashes at
        the latest call that both have made, ranks of different hosts in cddp_barrier and
        cddp_group_split.
     2. It is issued to a stream, one operation at a time (device.issue_lock).
     3. An event follows it. A ring of these events shows since when the oldest operation runs.
   The communicator is non-blocking, so that no call of NCCL can hang the host. A call is polled
   until it is done, and meanwhile this rank checks the group and the deadline.
   Two threads of a context check it every few milliseconds:
     watcher   Finds that the group is broken, NCCL has failed, a rank has died, ranks have made
               different calls, or an operation is late. Then it breaks the group and aborts the
               communicator, which ends the operations on all ranks. Between the binding of its
               device and the abort it calls no function of CUDA: another thread can hold CUDA's
               lock until an abort ends an operation.
     poller    Asks CUDA which events have completed, and whether the device has failed. */

static const cddp_kernels *cddp__registered_kernels; /* of this version; NULL: not registered */

enum {
  CDDP__MARKER_COUNT = 16, /* most unfinished operations with an event of their own */
  CDDP__SPARE_EVENTS = 32, /* most events kept for reuse */
  CDDP__CALL_HASHES = 4096, /* no comparison if ranks are more calls apart; a power of two */
  CDDP__UNCOUNTED = 1 << 30, /* for a send in a CUDA graph, which can be sent many times */
  CDDP__SEVERAL_DEVICES = 1000000 /* in cddp__device_groups; no device has this number */
};

/* State of a watched communicator. The first call of cddp__device_end decides how it ends; then
   DETACHED and DONE are added. */
enum {
  CDDP__COMM_ALIVE,
  CDDP__COMM_DESTROYED, /* to be ended in good order */
  CDDP__COMM_ABORTED,   /* to be ended immediately */
  CDDP__COMM_HOW_MASK = 3,
  CDDP__COMM_DETACHED = 4, /* the watcher accesses the context only, no longer the group */
  CDDP__COMM_DONE = 8 /* after NCCL's end, and by the group: the second frees the context */
};

typedef struct cddp__marker {
  void *event;
  double since; /* when the operation was issued: the event was recorded */
} cddp__marker;

/* Device memory for temporary use, of a device context or a cddp_ddp. The last piece is the
   largest. */
enum { CDDP__SCRATCH_PIECES = 64 };
typedef struct cddp__scratch {
  void *at[CDDP__SCRATCH_PIECES]; /* [count] pieces of device memory */
  int count;
  size_t bytes; /* of the last piece; 0: there is none */
} cddp__scratch;

/* A model's memory on a GPU. Guarded by ddp.lock, or used only by the thread that steps. */
typedef struct cddp__gpu_work {
  cddp_segment *segments; /* [parameters] arguments of a launch */
  double *clip; /* device memory: [0] squared norm, [1] factor of clipping; then scratch */
  cddp__scratch scratch;  /* device memory: a bucket for a hook, or nodes of all ranks */
} cddp__gpu_work;

/* A group's device context. issue_lock: held while an operation is issued. lock: of the fields
   marked so. The watcher takes it: never held during a call of CUDA or NCCL. */
typedef struct cddp__device {
  cddp_group *group;
  int index;
  cudaStream_t side;   /* for operations with a work handle, and buckets; high priority */
  pthread_mutex_t issue_lock, lock;
  const cddp_kernels *kernels; /* NULL: some rank has none, so that all ranks do without */
  ncclComm_t comm;        /* NULL: a single rank, or no NCCL; NCCL's thread writes it at creation */
  cddp__atomic_u32 state; /* CDDP__COMM_*; both threads sleep on it */
  pthread_t poller;      /* valid if pid is not 0. The watcher is detached */
  pid_t pid;                 /* the process that has the threads; 0: no threads */
  cddp__atomic_u32 captured; /* 1: a CUDA graph may replay its operations */
  cddp__marker markers[CDDP__MARKER_COUNT]; /* a ring: marker n is at n % COUNT; lock */
  /* Number of markers, and of those seen completed by the poller; lock */
  uint32_t issued, completed;
  double gone_since;     /* watcher; since when a peer has left or ended; 0: none has */
  double gone_oldest;    /* watcher; start of the oldest operation at its last check */
  int late_checks;       /* watcher; checks in a row at which an operation was late */
  uint64_t hashes[CDDP__CALL_HASHES]; /* of all calls up to each of the latest, a ring; lock */
  cddp_work *messages; /* sends and receives to be issued together, oldest first; issue_lock */
  cddp__atomic_u32 received[CDDP__COUNTED_PEERS]; /* receives from each rank, without those in
                                                     graphs */
  cudaEvent_t spare[CDDP__SPARE_EVENTS]; /* [spares] events for reuse; lock */
  int spares;            /* lock */
  cddp__scratch scratch; /* used on `side`; owner: the thread that calls collectives */
} cddp__device;

/* What every rank announces when a group is created. */
typedef struct cddp__device_report {
  int32_t device, kernels; /* the GPU's number; 1: kernels are registered */
  char gpu[40];  /* uuid of a GPU or of a MIG partition; "": ranks can share it */
  uint64_t host; /* identity of the machine */
} cddp__device_report;

#define CDDP__WATCH_INTERVAL_S 0.005 /* between two checks of the watcher, and of the poller */
#define CDDP__YIELD_S 3e-4 /* of yields before the first sleep: NCCL takes 0.1 ms for a call */
/* Time for the cause of an error of NCCL to show: on a busy host the end of a process took more
   than half a second. */
#define CDDP__CAUSE_S 2.0
#define CDDP__CAUSE_ARGUMENTS_S 0.01 /* instead, if NCCL refuses this rank's arguments */
#define CDDP__CALLS_S 0.5  /* time for other threads to return from NCCL before an abort */
#ifndef CDDP__AWAIT_END_S
#define CDDP__AWAIT_END_S 2.0 /* longest wait for NCCL's threads to end */
#endif
#define CDDP__AWAIT_GRAPH_S 0.1 /* instead, if a CUDA graph may delay them */
#define CDDP__GRACE_ENDED_S 0.05 /* for operations of a peer that has ended: the poller may see
                                    their end later */
#define CDDP__LATE_CHECKS 20 /* a process that was stopped checks its device before it times out */
#define CDDP__LATE_S 0.5 /* other threads time out later than the watcher: its text says more */
#ifndef CDDP__COMM_MIN_RANKS
#define CDDP__COMM_MIN_RANKS 2 /* smallest group that gets a communicator; tests define 1 */
#endif
#ifndef CDDP__WARM_UP
#define CDDP__WARM_UP ((size_t)8 << 20) /* bytes of the largest operation of a warm-up */
#endif

/* code: a cudaError_t, of the CUDA call or kernel `what`. */
static cddp_result cddp__cuda_result(int code, const char *what) {
  cudaError_t e = (cudaError_t)code;
  if (CDDP__LIKELY(e == cudaSuccess)) return CDDP_OK;
  (void)cudaGetLastError(); /* else the program's next check would return it */
  return cddp__fail(CDDP_CUDA, "%s: %s (%s)%s", what, cudaGetErrorString(e), cudaGetErrorName(e),
                    e == cudaErrorDevicesUnavailable
                        ? ": another process uses the GPU, and its compute mode allows one; end "
                          "that process, or set the mode to default (nvidia-smi -c 0)"
                        : "");
}

#define CDDP__CUDA(function, ...) cddp__cuda_result((int)function(__VA_ARGS__), #function)

static cddp_result cddp__use_device(int device) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == device) return CDDP_OK;
  return CDDP__CUDA(cudaSetDevice, device);
}

/* A group's device context, and the stream of its operations (the caller's: cddp_set_stream). */
static cddp__device *cddp__device_of(const cddp_group *g) { return (cddp__device *)g->device; }
static cudaStream_t cddp__main_stream(const cddp_group *g) { return (cudaStream_t)g->stream; }

static cddp__atomic_u32 cddp__device_groups; /* 1 + the device of all groups so far, or
                                                CDDP__SEVERAL_DEVICES; 0: no groups */

/* Returns whether the program's memory can be on a device. If not, callers call no function of
   CUDA: a process that does not use CUDA must not initialize it. */
static bool cddp__cuda_in_use(void) {
  int version = 0;
  if (cddp__load32(&cddp__device_groups) != 0) return true;
  return cddp__registered_kernels != NULL && cudaDriverGetVersion(&version) == cudaSuccess &&
         version > 0; /* 0: no driver */
}

/* While any thread captures a stream, calls such as cudaMalloc and cudaEventQuery fail and
   invalidate the capture, except between these two functions on this thread. The first returns the
   mode that the second restores. */
static enum cudaStreamCaptureMode cddp__relax_capture(void) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  return mode;
}
static void cddp__restore_capture(enum cudaStreamCaptureMode mode) {
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

static bool cddp__capturing(cudaStream_t stream) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError(); /* the default stream, while another stream is captured */
  return false;
}

/* Fails with r if the stream is being captured. what: the call, and why no graph can have it. */
static cddp_result cddp__refuse_capture(cudaStream_t stream, cddp_result r, const char *what) {
  if (!cddp__capturing(stream)) return CDDP_OK;
  return cddp__fail(r, "%s and cannot be captured in a CUDA graph", what);
}

/* Makes the group's device current, and checks that its stream is usable. */
static cddp_result cddp__device_enter(const cddp_group *g) {
  enum cudaStreamCaptureStatus status;
  cddp_result r = cddp__use_device(cddp__device_of(g)->index);
  if (r != CDDP_OK || cudaStreamIsCapturing(cddp__main_stream(g), &status) == cudaSuccess) return r;
  if (cudaGetLastError() != cudaErrorStreamCaptureImplicit)
    return CDDP_OK; /* the operation itself reports this error */
  return CDDP__REFUSE(
      "a stream is being captured in a CUDA graph, and the group uses the default stream, which no "
      "call may use then: give the captured one to cddp_set_stream");
}

/* Takes the event of *from: keeps it for reuse, or destroys it. */
static void cddp__event_release(cddp__device *device, void **from) {
  cudaEvent_t event = (cudaEvent_t)*from;
  *from = NULL;
  pthread_mutex_lock(&device->lock);
  if (event != NULL && device->spares < CDDP__SPARE_EVENTS) {
    device->spare[device->spares++] = event;
    event = NULL;
  }
  pthread_mutex_unlock(&device->lock);
  if (event != NULL) cudaEventDestroy(event);
}

/* Records an event behind the work on the stream. cddp__event_release must follow. */
static cddp_result cddp__event_acquire(cddp__device *device, cudaStream_t stream, void **out) {
  cudaEvent_t event = NULL;
  cddp_result r = CDDP_OK;
  pthread_mutex_lock(&device->lock);
  if (device->spares > 0) event = device->spare[--device->spares];
  pthread_mutex_unlock(&device->lock);
  if (event == NULL) r = CDDP__CUDA(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
  *out = (void *)event;
  if (r == CDDP_OK) r = CDDP__CUDA(cudaEventRecord, event, stream);
  if (r != CDDP_OK) cddp__event_release(device, out);
  return r;
}

/* Makes stream `to` wait for the work that is now on `from`. The host does not wait. */
static cddp_result cddp__stream_after(cddp__device *device, cudaStream_t to, cudaStream_t from) {
  void *event;
  cddp_result r;
  if (to == from) return CDDP_OK;
  if ((r = cddp__event_acquire(device, from, &event)) != CDDP_OK) return r;
  r = CDDP__CUDA(cudaStreamWaitEvent, to, (cudaEvent_t)event, 0 /* flags */);
  cddp__event_release(device, &event); /* a later recording does not change this wait */
  return r;
}

/* Streams in tables are void *: cddp.h has no CUDA types without CDDP_CUDA. */
static cddp_result cddp__device_copy(void *to, const void *from, size_t bytes, void *stream) {
  if (bytes == 0 || to == from) return CDDP_OK;
  return CDDP__CUDA(cudaMemcpyAsync, to, from, bytes, cudaMemcpyDefault, (cudaStream_t)stream);
}

static cddp_result cddp__device_zero(void *p, size_t bytes, void *stream) {
  if (bytes == 0) return CDDP_OK;
  return CDDP__CUDA(cudaMemsetAsync, p, 0, bytes, (cudaStream_t)stream);
}

/* Fails if no kernels are registered. what: needs them, for the error text. */
static cddp_result cddp__need_kernels(const char *what) {
  if (cddp__registered_kernels != NULL) return CDDP_OK;
  return cddp__fail(CDDP_UNSUPPORTED,
                    "%s on a GPU: cddp's kernels are missing, or another version's; include "
                    "cddp_kernels.cuh in one .cu file",
                    what);
}

static cddp_result cddp__device_convert(const cddp_group *g, void *to, cddp_dtype to_dtype,
                                        const void *from, cddp_dtype from_dtype, size_t n) {
  cddp_result r = cddp__need_kernels("gradient compression");
  if (r != CDDP_OK) return r;
  return cddp__cuda_result(
      (cddp__registered_kernels->convert)(to, to_dtype, from, from_dtype, n, g->stream),
      "the kernel that compresses");
}

static cddp_result cddp__device_scale(void *p, size_t n, cddp_dtype dtype, double factor,
                                      void *stream) {
  cddp_result r = cddp__need_kernels("a mean over fewer ranks, as some have joined,");
  cddp_segment s;
  if (r != CDDP_OK) return r;
  memset(&s, 0, sizeof s);
  s.grad = p; /* the array that `scale` changes */
  s.count = n;
  return cddp__cuda_result((cddp__registered_kernels->scale)(&s, 1 /* segment */, dtype, factor,
                                                             NULL /* scratch */, stream),
                           "the kernel that scales");
}

/* *here: p is on the rank's device. Fails if it is on another. Managed memory counts as on every
   device. what: names p in the error text. */
static cddp_result cddp__memory_of(int device, const void *p, const char *what, bool *here) {
  struct cudaPointerAttributes attributes;
  cddp_result r = CDDP__CUDA(cudaPointerGetAttributes, &attributes, p);
  bool managed = r == CDDP_OK && attributes.type == cudaMemoryTypeManaged;
  *here = managed || (r == CDDP_OK && attributes.type == cudaMemoryTypeDevice);
  if (!*here || managed || attributes.device == device) return r;
  return CDDP__REFUSE("%s is on cuda:%d, but this rank's device is cuda:%d", what,
                      attributes.device, device);
}

/* *here: all buffers that this rank uses are on the device. Fails if one of two is not. */
static cddp_result cddp__memory_of_call(const cddp__device *device, const cddp__call *call,
                                        bool *here) {
  const char *send_name = cddp__in_one_buffer(call) ? "buf" : "send";
  const char *recv_name = cddp__in_one_buffer(call) ? "buf" : "recv";
  size_t sent, received;
  bool has_send, has_recv, send_here = true, recv_here = true;
  cddp_result r = CDDP_OK;
  cddp__call_bytes(device->group, call, &sent, &received);
  has_send = sent > 0 && call->send != NULL;
  has_recv = received > 0 && call->recv != NULL &&
             !(has_send && call->recv == call->send /* one buffer: a check of send suffices */);
  if (has_send) r = cddp__memory_of(device->index, call->send, send_name, &send_here);
  if (r == CDDP_OK && has_recv)
    r = cddp__memory_of(device->index, call->recv, recv_name, &recv_here);
  *here = send_here && recv_here;
  if (r != CDDP_OK || !has_send || !has_recv || send_here == recv_here) return r;
  return CDDP__REFUSE("send and recv must both be on the device, or both in host memory");
}

/* Receives notices of failures from other hosts. The leaders watch each other in a ring, by
   connections that end when a leader ends. Never waits. Any thread. */
static void cddp__watch_hosts(cddp_group *g) {
  cddp__hosts *hosts = g->hosts;
  if (hosts == NULL) return;
  cddp__poll_all_groups(g);
  if (g->local_rank != 0) return; /* not a leader */
  pthread_mutex_lock(&g->p2p.lock);
  cddp__hosts_read_messages(g);
  (void)cddp__ensure_link( /* to the leader of the next host; index 0 on it */
      g, cddp__rank_on(hosts, (hosts->mine + 1) % hosts->count, 0));
  pthread_mutex_unlock(&g->p2p.lock);
}

/* When the oldest unfinished operation was issued, as last polled; 0: none is unfinished.
   Operations in CUDA graphs do not count. */
static double cddp__busy_since(cddp__device *device) {
  double since = 0;
  pthread_mutex_lock(&device->lock);
  if (device->issued != device->completed)
    since = device->markers[device->completed % CDDP__MARKER_COUNT].since;
  pthread_mutex_unlock(&device->lock);
  return since;
}

/* The pause between two polls of the host, which waits for `what`. Fails if the group is broken;
   breaks it after the deadline. */
static cddp_result cddp__device_poll(cddp__device *device, cddp__wait *w, const char *what) {
  cddp_group *g = device->group;
  cddp_result r = cddp__check_group(g);
  if (r != CDDP_OK) return r;
  /* One yield, or none. After a message others may follow: no sleep. */
  w->yields = w->now - w->since < CDDP__YIELD_S || cddp__serve_all_recvs(g);
  w->deadline = w->since + g->timeout_s + (cddp__busy_since(device) > 0 ? CDDP__LATE_S : 0);
  if (cddp__wait_pause(w)) return CDDP_OK;
  r = cddp__fail(CDDP_TIMEOUT, "timed out after %g s: on rank %d, cuda:%d, %s has not ended%s",
                 g->timeout_s, g->rank, device->index, what,
                 g->hosts == NULL ? ""
                                  : ": not all ranks called it, or NCCL cannot connect the hosts: "
                                    "set NCCL_SOCKET_IFNAME to the interface between them; "
                                    "NCCL_DEBUG=INFO shows the connections");
  return cddp__break(g, r);
}

/* --- the log of calls --- */

/* The caller holds lock, or is the thread that logs. */
static uint32_t cddp__logged_calls(const cddp__device *device) {
  return cddp__load32(&cddp__slot_of(device->group, device->group->rank)->calls);
}

/* Logs a call for the other ranks' watchers. on_device: false for a call on host memory, which the
   other ranks must make there too. */
static void cddp__log_call(cddp__device *device, const cddp__call *call, bool on_device) {
  cddp__slot *slot = cddp__slot_of(device->group, device->group->rank);
  cddp__logged_call *entry;
  uint64_t hash;
  uint32_t n;
  /* No other rank; or backend "cpu": all calls go through the host, where rounds compare them. */
  if (device->group->size == 1 || !device->group->backend->enqueues) return;
  pthread_mutex_lock(&device->lock);
  n = cddp__logged_calls(device) + 1;
  hash = device->hashes[(n - 1) & (CDDP__CALL_HASHES - 1)];
  entry = &slot->call_log[n & (CDDP__CALL_LOG - 1)];
  cddp__exchange32(&entry->number, 0); /* invalid, before `what` changes: see cddp__read_logged */
  entry->what.call = cddp__call_code(call, on_device ? 0 : CDDP__PHASE_HOST);
  entry->what.count = call->count;
  entry->what.root = (int32_t)call->root;
  entry->hash = hash = cddp__hash64(hash, &entry->what, sizeof entry->what);
  device->hashes[n & (CDDP__CALL_HASHES - 1)] = hash;
  /* cddp_ddp_ready, which starts buckets, has no call site. */
  cddp__copy_text(entry->site, call->kind != CDDP__KIND_DDP_BUCKET ? cddp__describe_site().s : "",
                  sizeof entry->site);
  cddp__store32(&entry->number, n);
  cddp__store32(&slot->calls, n);
  pthread_mutex_unlock(&device->lock);
}

/* Copies the log entry of call n of a rank of this host. Returns false if it was overwritten: the
   writer invalidates the number before it writes, and it is read again at the end. Both accesses
   are read-modify-writes, which order the others: gcc's tsan does not know fences. */
static bool cddp__read_logged(const cddp_group *g, int rank, uint32_t n, cddp__logged_call *out) {
  cddp__logged_call *from = &cddp__slot_of(g, rank)->call_log[n & (CDDP__CALL_LOG - 1)];
  if (cddp__load32(&from->number) != n) return false;
  out->what = from->what;
  out->hash = from->hash;
  memcpy(out->site, from->site, sizeof out->site - 1);
  out->site[sizeof out->site - 1] = 0;
  return cddp__add32(&from->number, 0) == n; /* a read, as read-modify-write */
}

static cddp__text cddp__describe_logged(const cddp__logged_call *c) {
  return cddp__textf("%s%s", cddp__describe_call(c->what.call, c->what.count, c->what.root).s,
                     c->site);
}

/* Breaks the group: the calls of this rank and `rank` on this host differ in call n or before. */
static cddp_result cddp__break_mismatch(cddp__device *device, int rank, uint32_t n) {
  cddp_group *g = device->group;
  int first = g->rank < rank ? g->rank : rank, second = g->rank + rank - first;
  cddp__logged_call a, b;
  uint32_t i;
  /* For logs that no longer have the first different call. */
  cddp__fail(CDDP_MISMATCH, "ranks %d and %d disagree in call %" PRIu32 " of the group or before",
             first, second, n);
  for (i = n < CDDP__CALL_LOG ? 1 : n - CDDP__CALL_LOG + 1 /* the oldest kept */; i <= n; i++) {
    if (!cddp__read_logged(g, first, i, &a) || !cddp__read_logged(g, second, i, &b)) continue;
    if (memcmp(&a.what, &b.what, sizeof a.what) == 0) continue;
    cddp__fail(CDDP_MISMATCH,
               "ranks disagree in call %" PRIu32 " of the group: rank %d called %s, rank %d "
               "called %s%s",
               i, first, cddp__describe_logged(&a).s, second, cddp__describe_logged(&b).s,
               /* the lowest byte is the kind; a step's count is a hash of its settings */
               a.what.call == b.what.call && (a.what.call & 255) == CDDP__KIND_DDP_STEP
                   ? " with other settings: learning rate, momentum or others"
                   : "");
    break;
  }
  return cddp__break(g, CDDP_MISMATCH);
}

/* Compares, for each rank of this host, the hash of all calls up to the latest that both have made.
   Never waits. A rank's log has its last 64 hashes, its own memory the last 4,096: if one rank is
   more than 64 calls ahead, only that rank can compare. */
static cddp_result cddp__compare_logs(cddp__device *device) {
  cddp_group *g = device->group;
  cddp__logged_call theirs;
  int q;
  for (q = 0; q < g->size; q++) {
    uint32_t n, mine; /* calls that both ranks have made; calls of this rank */
    uint64_t my_hash;
    if (q == g->rank || g->host_index[q] < 0 /* on another host */) continue;
    n = cddp__load32(&cddp__slot_of(g, q)->calls);
    pthread_mutex_lock(&device->lock);
    mine = cddp__logged_calls(device);
    if ((int32_t)(mine - n) < 0) n = mine; /* q is ahead */
    my_hash = device->hashes[n & (CDDP__CALL_HASHES - 1)];
    pthread_mutex_unlock(&device->lock);
    /* No call of both yet; or the hash of call n is no longer known here, or in q's log. */
    if (n == 0 || mine - n >= CDDP__CALL_HASHES || !cddp__read_logged(g, q, n, &theirs)) continue;
    if (theirs.hash != my_hash) return cddp__break_mismatch(device, q, n);
  }
  return CDDP_OK;
}

/* --- the end of a communicator --- */

/* Numbers of contexts with threads, and of watchers. A watcher outlives its context's group until
   NCCL has ended. */
static cddp__atomic_u32 cddp__watched, cddp__watchers;

/* Whether the caller may call NCCL. issue_lock held. */
static bool cddp__comm_alive(const cddp__device *device) {
  return cddp__load32(&device->state) == CDDP__COMM_ALIVE;
}

/* NCCL's state of the communicator. Only one thread may ask at a time (two would both free NCCL's
   data of an ended operation): one with issue_lock, or the watcher after the communicator's
   life. */
static ncclResult_t cddp__comm_state(const cddp__device *device) {
  ncclComm_t comm = __atomic_load_n(&device->comm, __ATOMIC_RELAXED);
  ncclResult_t e = ncclSuccess;
  if (comm == NULL || ncclCommGetAsyncError(comm, &e) == ncclSuccess) return e;
  return ncclInternalError;
}

/* Called by the group, and by the watcher after NCCL's end. The second call frees the context. */
static void cddp__device_release(cddp__device *device) {
  if (cddp__add32(&device->state, CDDP__COMM_DONE) < 2 * CDDP__COMM_DONE) return; /* first */
  pthread_mutex_destroy(&device->issue_lock);
  pthread_mutex_destroy(&device->lock);
  cddp__free(NULL, device);
}

/* Waits until no other thread is inside NCCL. One that stays inside is ignored: only the abort may
   free it. */
static void cddp__await_issuers(cddp__device *device) {
  cddp__wait w;
  cddp__wait_begin(&w, CDDP__CALLS_S);
  while (pthread_mutex_trylock(&device->issue_lock) != 0) {
    if (!cddp__wait_pause(&w)) return;
    if (__atomic_load_n(&device->comm, __ATOMIC_RELAXED) == NULL)
      cddp__wait_begin(&w, CDDP__CALLS_S); /* the call that creates it is running */
  }
  pthread_mutex_unlock(&device->issue_lock);
}

/* Ends the communicator, on the watcher's thread. Threads that take issue_lock later find it no
   longer alive. ncclCommAbort can block until streams and CUDA graphs end. ncclCommDestroy can
   block until the other ranks of the host call it.
     aborts   false: ends in good order, if NCCL has no error */
static void cddp__comm_end(cddp__device *device, bool aborts) {
  ncclComm_t comm;
  cddp__await_issuers(device);
  comm = __atomic_load_n(&device->comm, __ATOMIC_RELAXED);
  if (comm == NULL) return;
  if (!aborts && cddp__comm_state(device) == ncclSuccess) {
    if (ncclCommDestroy(comm) == ncclSuccess) return;
    (void)ncclGroupEnd(); /* closes the group that the failure left open: no abort works in it */
  }
  ncclCommAbort(comm);
}

/* Tells the watcher to end the communicator, unless an earlier call has. how: CDDP__COMM_ABORTED
   also ends all operations; the group must be broken before. Never waits. */
static void cddp__device_end(cddp__device *device, uint32_t how) {
  if (cddp__compare_swap32(&device->state, CDDP__COMM_ALIVE, how)) cddp__futex_wake(&device->state);
}

/* After an abort: waits a short time until NCCL no longer uses the operations' memory. An abort
   waits for CUDA graphs with its operations. */
static void cddp__await_abort(cddp__device *device) {
  cddp__wait w;
  bool graph = cddp__load32(&device->captured) != 0;
  cddp__wait_begin(&w, graph ? CDDP__AWAIT_GRAPH_S : CDDP__AWAIT_END_S);
  if ((cddp__load32(&device->state) & CDDP__COMM_HOW_MASK) != CDDP__COMM_ABORTED)
    return; /* no abort: the operations have ended */
  /* The watcher adds CDDP__COMM_DONE when NCCL has ended. */
  while (cddp__load32(&device->state) < CDDP__COMM_DONE && cddp__wait_pause(&w)) {}
}

/* Called after an operation with result r, which it returns, so that the caller can free its
   buffers. If the group is broken, aborts the communicator and waits until NCCL no longer uses
   them. */
static cddp_result cddp__release_buffers(cddp__device *device, cddp_result r) {
  if (r == CDDP_OK || !cddp__is_broken(device->group)) return r;
  cddp__device_end(device, CDDP__COMM_ABORTED);
  cddp__await_abort(device);
  return r;
}

/* --- the watcher --- */

/* Breaks the group after NCCL's error e in operation `what`. The death of a rank causes various
   errors, some before it shows: so this waits for it, and prefers it in the error text. */
static cddp_result cddp__break_nccl(cddp__device *device, ncclResult_t e, const char *what) {
  bool arguments = e == ncclInvalidArgument || e == ncclInvalidUsage; /* this rank's own fault */
  cddp_group *g = device->group;
  /* now, before a later call of NCCL changes its last error */
  cddp__text text = cddp__textf("rank %d: %s: %s (%.300s)", g->rank, what, ncclGetErrorString(e),
                                ncclGetLastError(NULL));
  cddp__wait w;
  cddp_result r;
  int q;
  cddp__wait_begin(&w, arguments ? CDDP__CAUSE_ARGUMENTS_S : CDDP__CAUSE_S);
  do {
    cddp__watch_hosts(g);
    if ((r = cddp__check_failure(g)) != CDDP_OK) return r;
    for (q = 0; q < g->size; q++)
      if (q != g->rank && cddp__rank_gone(g, q)) return cddp__break_lost(g, q, what);
  } while (cddp__wait_pause(&w));
  return cddp__break(g, cddp__fail(CDDP_NCCL, "%s", text.s));
}

/* How many calls a rank of this host is behind this one (negative: ahead). Other hosts: 0. */
static int cddp__calls_behind(const cddp__device *device, int rank) {
  const cddp_group *g = device->group;
  if (g->host_index[rank] < 0) return 0;
  return (int)(cddp__logged_calls(device) - cddp__load32(&cddp__slot_of(g, rank)->calls));
}

/* Breaks the group if its oldest operation is unfinished after timeout_s, at more than
   CDDP__LATE_CHECKS checks in a row. */
static cddp_result cddp__check_late_operations(cddp__device *device) {
  cddp_group *g = device->group;
  cddp__logged_call latest;
  double oldest = cddp__busy_since(device);
  bool known;
  int q = 0;
  cddp__text behind = {""}; /* the likely cause: a rank that made fewer calls */
  if (oldest == 0 || cddp__now() - oldest <= g->timeout_s) {
    device->late_checks = 0;
    return CDDP_OK;
  }
  if (++device->late_checks <= CDDP__LATE_CHECKS) return CDDP_OK;
  while (q < g->size && cddp__calls_behind(device, q) <= 0) q++;
  if (q < g->size)
    behind = cddp__textf("; behind it in calls: %s, and perhaps others", cddp__name_rank(g, q).s);
  known = cddp__read_logged(g, g->rank, cddp__logged_calls(device), &latest);
  cddp__fail(CDDP_TIMEOUT,
             "timed out after %g s: an operation of rank %d on cuda:%d has not ended%s; the rank's "
             "latest is %s",
             g->timeout_s, g->rank, device->index, behind.s,
             known ? cddp__describe_logged(&latest).s : "none");
  return cddp__break(g, CDDP_TIMEOUT);
}

/* Counts a message on device memory, for cddp__lacks_message. The receiver reads the sender's
   count, in shared memory. */
static void cddp__count_message(cddp__device *device, const cddp__call *call) {
  bool captured = cddp__capturing(cddp__main_stream(device->group));
  /* call->root is the peer. Of ranks beyond the arrays no messages are counted. */
  if (call->root >= CDDP__COUNTED_PEERS || device->group->rank >= CDDP__COUNTED_PEERS) return;
  if (call->kind == CDDP__KIND_SEND)
    cddp__add32(&cddp__slot_of(device->group, device->group->rank)->sent[call->root],
                captured ? CDDP__UNCOUNTED : 1);
  else if (!captured)
    cddp__add32(&device->received[call->root], 1);
}

/* Returns whether this rank waits for a message that `rank`, which has left, has not sent. Unknown
   for ranks on other hosts. */
static bool cddp__lacks_message(const cddp__device *device, int rank) {
  const cddp_group *g = device->group;
  if (g->host_index[rank] < 0 || rank >= CDDP__COUNTED_PEERS || g->rank >= CDDP__COUNTED_PEERS)
    return false;
  return (int32_t)(cddp__load32(&device->received[rank]) -
                   cddp__load32(&cddp__slot_of(g, rank)->sent[g->rank])) > 0;
}

/* Breaks the group if operations need a rank that has ended, or left in good order (cddp_destroy).
   inside: a thread waits for NCCL, and thus possibly for other ranks.
     That rank                                      this rank
     made fewer calls, or left without a send       breaks the group immediately
     made as many; operations are unfinished        waits GRACE_ENDED_S or, if the rank left,
                                                    timeout_s: its part may be done
     made as many; nothing is unfinished, but a     does the same if the rank ended: the graph may
     CUDA graph was captured                        run, and would never end. (A rank leaves only
                                                    after the end of its graph)
     made as many; nothing is unfinished            continues */
static cddp_result cddp__check_lost_peers(cddp__device *device, bool inside) {
  double oldest = cddp__busy_since(device);
  bool waits = inside || oldest > 0;
  bool needed = false; /* some rank that has left or ended may be needed */
  cddp_group *g = device->group;
  int q;
  if (oldest != device->gone_oldest) device->gone_since = 0; /* there is progress */
  device->gone_oldest = oldest;
  for (q = 0; q < g->size; q++) {
    bool behind, left;
    if (q == g->rank || !cddp__rank_gone(g, q)) continue;
    left = cddp__rank_end(g, q) == CDDP__HAS_LEFT;
    behind = cddp__calls_behind(device, q) > 0 || (left && cddp__lacks_message(device, q));
    if (!behind && !waits && (left || cddp__load32(&device->captured) == 0))
      continue; /* the last row: not needed */
    needed = true;
    if (device->gone_since == 0) device->gone_since = cddp__now();
    if (!behind && /* its part may be done, so the operations can still end */
        cddp__now() - device->gone_since < (left ? g->timeout_s : CDDP__GRACE_ENDED_S))
      continue;
    return cddp__break_lost(g, q, cddp__textf("operations with it on cuda:%d", device->index).s);
  }
  if (!needed) device->gone_since = 0;
  return CDDP_OK;
}

/* Called first by both threads: their CUDA calls use this device (on another one they would create
   a context), and do not invalidate another thread's capture. */
static void cddp__bind_device(const cddp__device *device) {
  (void)cudaSetDevice(device->index);
  (void)cddp__relax_capture(); /* for the thread's whole life */
}

/* Breaks the group before the abort: results on streams are undefined afterwards, so a caller must
   see the failure. */
static void *cddp__watch_main(void *context) {
  cddp__device *device = (cddp__device *)context;
  cddp__bind_device(device);
  while (cddp__load32(&device->state) == CDDP__COMM_ALIVE) {
    bool inside = pthread_mutex_trylock(&device->issue_lock) != 0; /* then the holder asks NCCL */
    ncclResult_t e = inside ? ncclSuccess : cddp__comm_state(device);
    cddp_result r;
    if (!inside) pthread_mutex_unlock(&device->issue_lock);
    cddp__watch_hosts(device->group);
    r = cddp__check_failure(device->group);
    /* The order of these checks is that of their texts: the first tells the cause best. */
    if (r == CDDP_OK) r = cddp__compare_logs(device);
    if (r == CDDP_OK) r = cddp__check_lost_peers(device, inside);
    if (r == CDDP_OK && e != ncclSuccess && e != ncclInProgress)
      r = cddp__break_nccl(device, e, "an asynchronous NCCL operation");
    if (r == CDDP_OK) r = cddp__check_late_operations(device);
    if (r != CDDP_OK)
      cddp__device_end(device, CDDP__COMM_ABORTED);
    else
      cddp__futex_wait(&device->state, CDDP__COMM_ALIVE, CDDP__WATCH_INTERVAL_S);
  }
  /* From here on the group can be freed: cddp__device_stop waits for this. */
  cddp__comm_end(device, cddp__add32(&device->state, CDDP__COMM_DETACHED) ==
                             CDDP__COMM_DETACHED + CDDP__COMM_ABORTED);
  cddp__device_release(device); /* frees the context if the group has released it */
  cddp__add32(&cddp__watchers, (uint32_t)-1);
  return NULL;
}

/* Checks which operations have ended, oldest first. One that failed breaks the group, and counts as
   ended. */
static void *cddp__poll_main(void *context) {
  cddp__device *device = (cddp__device *)context;
  cddp__bind_device(device);
  while (cddp__load32(&device->state) == CDDP__COMM_ALIVE) {
    /* Without lock: only this thread changes `completed`, and no thread replaces the oldest. */
    void **oldest = &device->markers[device->completed % CDDP__MARKER_COUNT].event;
    cudaError_t e = cudaErrorNotReady; /* also if no operation is unfinished */
    if (cddp__busy_since(device) > 0) {
      e = cudaEventQuery((cudaEvent_t)*oldest);
      if (e != cudaSuccess) (void)cudaGetLastError(); /* also set by cudaErrorNotReady */
    }
    if (e == cudaErrorNotReady) {
      cddp__futex_wait(&device->state, CDDP__COMM_ALIVE, CDDP__WATCH_INTERVAL_S);
      continue;
    }
    if (e != cudaSuccess && e != cudaErrorCudartUnloading /* the process exits */) {
      cddp__fail(CDDP_CUDA, "rank %d: cuda:%d failed during the group's operations: %s (%s)",
                 device->group->rank, device->index, cudaGetErrorString(e), cudaGetErrorName(e));
      (void)cddp__break(device->group, CDDP_CUDA);
    }
    cddp__event_release(device, oldest);
    pthread_mutex_lock(&device->lock);
    device->completed++;
    pthread_mutex_unlock(&device->lock);
  }
  return NULL;
}

/* Starts the poller and the watcher of a context. If it fails, neither runs. */
static cddp_result cddp__start_watching(cddp__device *device) {
  pthread_t watcher;
  cddp_result r;
  cddp__store32(&device->state, CDDP__COMM_ALIVE);
  r = cddp__thread_start(&device->poller, cddp__poll_main, device, CDDP__THREAD_OF_CDDP);
  if (r == CDDP_OK &&
      (r = cddp__thread_start(&watcher, cddp__watch_main, device, CDDP__THREAD_OF_CDDP)) !=
          CDDP_OK) {
    cddp__device_end(device, CDDP__COMM_ABORTED); /* the poller ends */
    pthread_join(device->poller, NULL);
  }
  if (r != CDDP_OK) {
    cddp__store32(&device->state, CDDP__COMM_DONE); /* as if the watcher had ended */
    return r;
  }
  pthread_detach(watcher); /* it ends after NCCL, perhaps after the group is freed */
  device->pid = getpid();
  cddp__add32(&cddp__watched, 1);
  cddp__add32(&cddp__watchers, 1);
  return r;
}

/* The process may end soon: if no context is left, waits for NCCL's threads to end. */
static void cddp__await_nccl_threads(void) {
  cddp__wait w;
  cddp__wait_begin(&w, CDDP__AWAIT_END_S);
  if (cddp__load32(&cddp__watched) != 0) return; /* a group still uses NCCL */
  while (cddp__load32(&cddp__watchers) != 0 && cddp__wait_pause(&w)) {}
}

/* Records a marker behind an operation, for the poller. If all are in use, replaces the newest.
   issue_lock held: markers are in the order of operations. */
static cddp_result cddp__mark_operation(cddp__device *device, cudaStream_t stream) {
  void *event, *older;
  cddp__marker *marker;
  cddp_result r;
  if (cddp__capturing(stream)) {
    cddp__store32(&device->captured, 1); /* no event shows when a replay ends */
    return CDDP_OK;
  }
  if ((r = cddp__event_acquire(device, stream, &event)) != CDDP_OK) return r;
  pthread_mutex_lock(&device->lock);
  if (device->issued - device->completed < CDDP__MARKER_COUNT) device->issued++;
  marker = &device->markers[(device->issued - 1) % CDDP__MARKER_COUNT];
  older = marker->event;
  marker->event = event;
  marker->since = cddp__now();
  pthread_mutex_unlock(&device->lock);
  cddp__event_release(device, &older);
  return CDDP_OK;
}

/* --- device contexts --- */

/* No operation or CUDA graph uses the pieces any more. */
static void cddp__scratch_free(cddp__scratch *scratch) {
  while (scratch->count > 0) cudaFree(scratch->at[--scratch->count]);
  scratch->bytes = 0;
}

/* Aborts unfinished operations, and waits until both threads no longer use the group and the device
   has no more work. */
static void cddp__device_stop(cddp__device *device) {
  cddp__wait w;
  cddp__wait_begin(&w, INFINITY); /* no limit: the watcher leaves its loop soon */
  if (device->pid == getpid()) { /* else: no threads, or this is a forked child */
    cddp__device_end(device, CDDP__COMM_ABORTED);
    while ((cddp__load32(&device->state) & CDDP__COMM_DETACHED) == 0) cddp__wait_pause(&w);
    pthread_join(device->poller, NULL);
    cddp__add32(&cddp__watched, (uint32_t)-1);
    cddp__await_abort(device);
  }
  device->pid = 0;
  if (device->side != NULL) (void)cudaStreamSynchronize(device->side);
}

/* If the watcher still waits for NCCL, it frees the context. */
static void cddp__device_delete(cddp__device *device) {
  int i;
  cddp__device_stop(device); /* then only the watcher uses the context, for NCCL */
  cddp__scratch_free(&device->scratch);
  for (i = 0; i < CDDP__MARKER_COUNT; i++) cddp__event_release(device, &device->markers[i].event);
  while (device->spares > 0) cudaEventDestroy(device->spare[--device->spares]);
  if (device->side != NULL) cudaStreamDestroy(device->side);
  cddp__device_release(device);
}

/* *out: device memory for an operation, valid until the next call. Old pieces are kept, since
   operations and CUDA graphs may still use them; each new one is at least twice as large. */
static cddp_result cddp__device_scratch(cddp__scratch *scratch, size_t bytes, void **out) {
  enum cudaStreamCaptureMode mode;
  cddp_result r;
  if (scratch->bytes < bytes) {
    CDDP_ASSERT(scratch->count < CDDP__SCRATCH_PIECES);
    bytes = cddp__max(bytes, 2 * scratch->bytes);
    mode = cddp__relax_capture(); /* cudaMalloc would end a capture */
    r = CDDP__CUDA(cudaMalloc, &scratch->at[scratch->count], bytes);
    cddp__restore_capture(mode);
    if (r != CDDP_OK) return r;
    scratch->bytes = bytes;
    scratch->count++;
  }
  *out = scratch->count > 0 ? scratch->at[scratch->count - 1] : NULL;
  return CDDP_OK;
}

static void *cddp__device_alloc(cddp_group *g, size_t bytes) {
  void *p = NULL;
  cddp_result r = cddp__use_device(cddp__device_of(g)->index);
  if (r == CDDP_OK) r = CDDP__CUDA(cudaMalloc, &p, bytes > 0 ? bytes : 1 /* 0: no address */);
  return r == CDDP_OK ? p : NULL;
}

/* cudaFree waits for the current device, and would create a context on another: so `device` becomes
   current. An error is cleared and ignored. */
static void cddp__free_on(int device, void *p) {
  if (p == NULL) return;
  (void)cddp__use_device(device);
  if (cudaFree(p) != cudaSuccess) (void)cudaGetLastError();
}

static void cddp__device_free(const cddp_group *g, void *p) {
  cddp__free_on(cddp__device_of(g)->index, p);
}

/* Waits on the host for the event, or (NULL) for the stream, while the group is healthy. The
   deadline is for operations in CUDA graphs: others end by the watcher. */
static cddp_result cddp__await_stream(cddp__device *device, cudaStream_t stream,
                                      cudaEvent_t event) {
  enum cudaStreamCaptureMode mode = cddp__relax_capture();
  cudaError_t e;
  cddp_result r = CDDP_OK;
  cddp__wait w;
  cddp__wait_begin(&w, INFINITY); /* cddp__device_poll sets the deadline */
  while ((e = event != NULL ? cudaEventQuery(event) : cudaStreamQuery(stream)) ==
         cudaErrorNotReady) {
    (void)cudaGetLastError(); /* also set by cudaErrorNotReady */
    if ((r = cddp__device_poll(device, &w, "work on the stream")) != CDDP_OK) break;
  }
  cddp__restore_capture(mode);
  if (r != CDDP_OK || (r = cddp__check_group(device->group)) != CDDP_OK) return r;
  return cddp__cuda_result((int)e, "work on the group's stream");
}

/* Copies between host and device memory, and waits. g: its device's side stream copies; NULL, or a
   group without a device: the default stream. */
static cddp_result cddp__transfer(cddp_group *g, void *to, const void *from, size_t bytes) {
  cudaStream_t side;
  cddp_result r;
  if (g == NULL || !g->backend->on_device)
    return CDDP__CUDA(cudaMemcpy, to, from, bytes, cudaMemcpyDefault);
  side = cddp__device_of(g)->side;
  r = cddp__use_device(cddp__device_of(g)->index);
  if (r == CDDP_OK) r = cddp__device_copy(to, from, bytes, (void *)side);
  return r == CDDP_OK ? CDDP__CUDA(cudaStreamSynchronize, side) : r;
}

/* Breaks the group with r, as the other ranks wait. The text of a CUDA error gets this rank's
   number. */
static cddp_result cddp__break_waiting(cddp_group *g, cddp_result r) {
  if (r == CDDP_CUDA) r = cddp__fail_in(r, "rank %d: ", g->rank);
  return cddp__break(g, r);
}

/* --- operations through the host, for ranks that share a GPU ---

     1. Once the stream has reached the call, the rank's data is copied to shared host memory.
     2. The CPU's collective or message runs there.
     3. The result is copied back to the device; with a work handle, in cddp_wait. */

/* After a call on the host memory `stage`, with result r: copies received data to the device, at
   `to`, and frees the host memory. */
static cddp_result cddp__unstage(cddp_group *g, const cddp__call *call, void *to, void *stage,
                                 cddp_result r) {
  size_t sent, received;
  cddp__call_bytes(g, call, &sent, &received);
  if (r == CDDP_OK && call->kind != CDDP__KIND_SEND && cddp__is_written(call, g->rank)) {
    r = cddp__transfer(g, to, call->recv, received);
    if (r != CDDP_OK && cddp__load32(&g->left) == 0 /* this rank has not left */)
      r = cddp__break_waiting(g, r);
  }
  cddp__arena_free(g->host, stage);
  return r;
}

/* work NULL: runs the call to its end; else *work receives a handle, and cddp__unstage follows in
   its wait. */
static cddp_result cddp__stage_call(cddp__device *device, const cddp__call *call,
                                    cudaStream_t stream, cddp_work **work) {
  bool message = cddp__is_message(call);
  cddp_group *g = device->group;
  size_t sends, recvs, recv_offset; /* bytes */
  cddp_work *staged = NULL; /* the handle, if the caller wants one and the call has started */
  cddp__call inner = *call;
  char *stage;
  cddp_result r = cddp__refuse_capture(stream, CDDP_UNSUPPORTED,
                                       "with backend \"cpu\" a call waits on the host");
  if (r != CDDP_OK || call->count == 0 /* no data */) return r;
  cddp__call_bytes(g, call, &sends, &recvs);
  /* In `stage` the received data is behind the sent data, or replaces it. */
  recv_offset = cddp__in_one_buffer(call) ? 0 : cddp__round_up(sends, CDDP__CACHE_LINE);
  stage = (char *)cddp__arena_alloc(g->host, recv_offset + recvs, CDDP__EXTENT_OPEN);
  if (stage == NULL) /* of a message no rank knows yet; in a collective the others wait */
    return message ? CDDP_OUT_OF_MEMORY : cddp__break(g, CDDP_OUT_OF_MEMORY);
  r = cddp__stream_after(device, device->side, stream); /* on which cddp__transfer copies */
  if (r == CDDP_OK && call->kind != CDDP__KIND_RECV && cddp__sends(call, g->rank))
    r = cddp__transfer(g, stage, call->send, sends);
  if (r != CDDP_OK && !message) r = cddp__break_waiting(g, r);
  inner.send = stage;
  inner.recv = stage + recv_offset;
  if (r == CDDP_OK) r = cddp__cpu_start(g, &inner, work != NULL ? &staged : NULL);
  if (staged == NULL) return cddp__unstage(g, &inner, call->recv, stage, r);
  staged->context = call->recv; /* for cddp__device_wait, which calls cddp__unstage */
  staged->stage = stage;
  *work = staged;
  return CDDP_OK;
}

/* --- operations by NCCL --- */

/* Sends and receives the shares of gather, scatter, all_to_all and calls with counts. Called inside
   an NCCL group. */
static ncclResult_t cddp__nccl_post_shares(const cddp__device *device, const cddp__call *call,
                                           ncclDataType_t type, cudaStream_t stream) {
  int me = device->group->rank, q;
  ncclResult_t e = ncclSuccess;
  for (q = 0; q < device->group->size && e == ncclSuccess; q++) {
    bool sends = cddp__sends(call, me) && cddp__receives(call, q);
    bool receives = cddp__sends(call, q) && cddp__receives(call, me);
    size_t out = sends ? cddp__out_bytes(call, q, 0 /* begin */, call->count) : 0;
    size_t in = receives ? cddp__in_bytes(call, q, 0 /* begin */, call->count) : 0;
    const char *from = out > 0 ? cddp__share_for(call, q) : NULL;
    char *to = in > 0 ? cddp__share_from(call, q) : NULL;
    if (q == me) continue; /* cddp__copy_own_share has copied it */
    if (out > 0) e = ncclSend(from, out / call->esize, type, q, device->comm, stream);
    if (in > 0 && e == ncclSuccess)
      e = ncclRecv(to, in / call->esize, type, q, device->comm, stream);
  }
  return e;
}

/* The rank's own share, in the calls of cddp__nccl_post_shares. */
static cddp_result cddp__copy_own_share(const cddp__device *device, const cddp__call *call,
                                        cudaStream_t stream) {
  int me = device->group->rank;
  size_t bytes;
  if (call->kind != CDDP__KIND_GATHER && call->kind != CDDP__KIND_SCATTER &&
      call->kind != CDDP__KIND_ALL_TO_ALL && call->shares == NULL)
    return CDDP_OK;
  if (!cddp__sends(call, me) || !cddp__receives(call, me)) return CDDP_OK;
  bytes = cddp__out_bytes(call, me, 0 /* begin */, call->count);
  if (bytes == 0) return CDDP_OK;
  return cddp__device_copy(cddp__share_from(call, me), cddp__share_for(call, me), bytes, stream);
}

/* Returns whether NCCL computes a sum for a mean, and a kernel multiplies by 1/n afterwards. NCCL's
   own mean multiplies first, in the operands' type: in bf16 the error is up to 0.2 %, and NVLink's
   switches, which can only add, are not used. In f16 sums could exceed 65,504, and 1/n is precise
   enough. */
static bool cddp__averages_by_sum(const cddp__device *device, const cddp__call *call) {
  return call->op == CDDP_AVG && device->kernels != NULL && cddp__dtype_trains(call->dtype) &&
         call->dtype != CDDP_F16;
}

/* Called inside an NCCL group, so that it does not wait. */
static ncclResult_t cddp__nccl_post(const cddp__device *device, const cddp__call *call,
                                    cudaStream_t stream) {
  /* By cddp_dtype: ncclDataType_t as numbers, since some versions lack a name for bf16. */
  static const int types[] = {7, 8, 6, 9, 0, 1, 2, 4};
  static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclProd, ncclMin, ncclMax};
  CDDP__STATIC_ASSERT(sizeof types / sizeof *types == CDDP__DTYPE_COUNT, "a type of NCCL for each");
  CDDP__STATIC_ASSERT(sizeof ops / sizeof *ops == CDDP_MAX + 1, "an operation for each, up to MAX");
  ncclDataType_t type = (ncclDataType_t)types[call->dtype];
  ncclRedOp_t op = cddp__averages_by_sum(device, call) ? ncclSum : ops[call->op];
  ncclComm_t comm = device->comm;
  switch (call->kind) {
  case CDDP__KIND_ALL_REDUCE:
    return ncclAllReduce(call->send, call->recv, call->count, type, op, comm, stream);
  case CDDP__KIND_REDUCE:
    return ncclReduce(call->send, call->recv, call->count, type, op, call->root, comm, stream);
  case CDDP__KIND_BROADCAST:
    return ncclBroadcast(call->send, call->recv, call->count, type, call->root, comm, stream);
  case CDDP__KIND_ALL_GATHER:
    return ncclAllGather(call->send, call->recv, call->count, type, comm, stream);
  case CDDP__KIND_REDUCE_SCATTER:
    return ncclReduceScatter(call->send, call->recv, call->count, type, op, comm, stream);
  case CDDP__KIND_SEND:
    return ncclSend(call->send, call->count, type, call->root, comm, stream);
  case CDDP__KIND_RECV:
    return ncclRecv(call->recv, call->count, type, call->root, comm, stream);
  default:
    return cddp__nccl_post_shares(device, call, type, stream);
  }
}

/* Polls until NCCL has enqueued the operation that returned e; the watcher checks the other ranks.
   issue_lock held. ncclSuccess in e means nothing: up to NCCL 2.23 single operations return it too
   early. Up to 2.25 ncclCommGetAsyncError leaves work of NCCL to this thread, which would delay
   another communicator; ncclCommCount does it. */
static cddp_result cddp__await_nccl(cddp__device *device, ncclResult_t e, const char *what) {
  cddp_result r = CDDP_OK;
  cddp__wait w;
  int ranks;
  cddp__wait_begin(&w, INFINITY); /* cddp__device_poll sets the deadline */
  if (e == ncclSuccess) e = ncclInProgress;
  while (r == CDDP_OK && e == ncclInProgress && cddp__comm_alive(device)) {
    e = cddp__comm_state(device);
    if (e == ncclSuccess) e = ncclCommCount(device->comm, &ranks); /* for its effect, see above */
    if (e == ncclInProgress) r = cddp__device_poll(device, &w, what);
  }
  if (r != CDDP_OK) return r;
  if (!cddp__comm_alive(device)) return cddp__check_failure(device->group); /* the watcher's */
  return CDDP__LIKELY(e == ncclSuccess) ? CDDP_OK : cddp__break_nccl(device, e, what);
}

/* Enqueues n operations as one NCCL group, so that messages between the ranks can be in any order.
   issue_lock held. */
static cddp_result cddp__issue_held(cddp__device *device, const cddp__call *call, int n,
                                    cudaStream_t stream) {
  ncclResult_t e, end;
  cddp_result r;
  int i;
  if (stream == cudaStreamPerThread) /* NCCL enqueues on its own thread */
    return CDDP__REFUSE("the group's stream is cudaStreamPerThread, which is another stream in "
                        "NCCL's thread: create one with cudaStreamCreate");
  if (!cddp__comm_alive(device)) {
    if ((r = cddp__check_failure(device->group)) != CDDP_OK) return r;
    return cddp__fail(CDDP_ABORTED, "the group's communicator has been ended");
  }
  for (i = 0; i < n; i++)
    if ((r = cddp__copy_own_share(device, &call[i], stream)) != CDDP_OK) return r;
  e = ncclGroupStart();
  for (i = 0; i < n && (e == ncclSuccess || e == ncclInProgress); i++)
    e = cddp__nccl_post(device, &call[i], stream);
  end = ncclGroupEnd(); /* also after an error: the group would stay open */
  if (e == ncclSuccess || e == ncclInProgress) e = end;
  r = cddp__await_nccl(device, e, cddp__shapes[call->kind].name);
  /* After the sums, on the same stream: makes them means. */
  for (i = 0; r == CDDP_OK && i < n; i++)
    if (cddp__averages_by_sum(device, &call[i]) && cddp__receives(&call[i], device->group->rank))
      r = cddp__device_scale(call[i].recv, call[i].count, (cddp_dtype)call[i].dtype,
                             1.0 / device->group->size, (void *)stream);
  return r == CDDP_OK ? cddp__mark_operation(device, stream) : r;
}

/* Issues n operations on device memory, in order, behind the work on the stream. NCCL runs them.
   Without a communicator (one rank) they are copies. With backend "cpu" each one waits. */
static cddp_result cddp__issue(cddp__device *device, const cddp__call *call, int n,
                               cudaStream_t stream) {
  bool enqueues = device->group->backend->enqueues;
  cddp_result r = CDDP_OK;
  int i;
  if (n > 0 && enqueues && device->comm != NULL) {
    pthread_mutex_lock(&device->issue_lock);
    r = cddp__issue_held(device, call, n, stream);
    pthread_mutex_unlock(&device->issue_lock);
    return cddp__release_buffers(device, r);
  }
  for (i = 0; r == CDDP_OK && i < n; i++)
    r = enqueues
            ? cddp__device_copy(call[i].recv, call[i].send, call[i].count * call[i].esize, stream)
            : cddp__stage_call(device, &call[i], stream, NULL);
  return r;
}

/* --- handles and messages --- */

/* Creates a handle for an operation that is on *stream, or (NULL) not yet on a stream. */
static cddp_result cddp__device_work(cddp_group *g, const cddp__call *call,
                                     const cudaStream_t *stream, cddp_work **out) {
  cddp_work *work = cddp__work_new(g, 0);
  cddp_result r = CDDP_OK;
  if (work == NULL) return CDDP_OUT_OF_MEMORY;
  work->on_stream = true;
  work->call = *call;
  if (stream != NULL) r = cddp__event_acquire(cddp__device_of(g), *stream, &work->event);
  if (r == CDDP_OK) *out = work;
  else cddp__work_free(work);
  return r;
}

/* Issues the n posted messages. issue_lock held. A failure breaks the group. */
static cddp_result cddp__issue_posted(cddp__device *device, int n) {
  const cddp_allocator *allocator = &device->group->host->allocator;
  cddp__call *calls = (cddp__call *)cddp__malloc(allocator, (size_t)n * sizeof *calls);
  cddp_result r = calls != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
  cddp_work *work = device->messages;
  int i;
  for (i = 0; r == CDDP_OK && i < n; i++, work = work->next) calls[i] = work->call;
  if (r == CDDP_OK) /* the buffers are ready when the group's stream is here */
    r = cddp__stream_after(device, device->side, cddp__main_stream(device->group));
  if (r == CDDP_OK) r = cddp__issue_held(device, calls, n, device->side);
  while ((work = device->messages) != NULL) { /* also after a failure, so that waits end */
    device->messages = work->next;
    if (r == CDDP_OK) r = cddp__event_acquire(device, device->side, &work->event);
    work->done = true;
  }
  cddp__free(allocator, calls);
  return r == CDDP_OK ? r : cddp__break_waiting(device->group, r);
}

/* Issues all posted messages together. A failure breaks the group, and their waits return it. only:
   does nothing if this message was issued already; NULL: issues in any case. */
static cddp_result cddp__issue_messages(cddp__device *device, const cddp_work *only) {
  cddp_result r = CDDP_OK;
  const cddp_work *work;
  int n = 0;
  pthread_mutex_lock(&device->issue_lock);
  for (work = device->messages; work != NULL; work = work->next) n++;
  if (n > 0 && (only == NULL || !only->done /* issued */)) r = cddp__issue_posted(device, n);
  pthread_mutex_unlock(&device->issue_lock);
  return cddp__release_buffers(device, r);
}

/* cddp__backend.done: whether an operation has ended, or its wait would return a failure. */
static bool cddp__device_done(cddp_work *work) {
  cddp__device *device = cddp__device_of(work->group);
  enum cudaStreamCaptureMode mode;
  cudaError_t e;
  if (!work->on_stream) return cddp__cpu_done(work);
  if (cddp__use_device(device->index) != CDDP_OK) return true; /* the wait returns this error */
  /* A query would end the capture. */
  if (cddp__capturing(cddp__main_stream(work->group))) return false;
  /* A failure breaks the group: the checks below find it. */
  if (cddp__is_message(&work->call)) (void)cddp__issue_messages(device, work);
  /* No event: the issue failed. A group that was left (elastic: replaced) has no block, which would
     tell whether it is broken: its wait tells. */
  if (work->event == NULL || cddp__load32(&work->group->left) != 0 ||
      cddp__is_broken(work->group))
    return true;
  mode = cddp__relax_capture();
  e = cudaEventQuery((cudaEvent_t)work->event);
  cddp__restore_capture(mode);
  if (e != cudaSuccess) (void)cudaGetLastError(); /* also set by cudaErrorNotReady */
  return e != cudaErrorNotReady;
}

/* Fails if the group of a work is broken. A group that was left has no block: asks its context. */
static cddp_result cddp__check_work_group(const cddp_work *work) {
  cddp__device *device = cddp__device_of(work->group);
  if (cddp__load32(&work->group->left) == 0) return cddp__check_group(work->group);
  if ((cddp__load32(&device->state) & CDDP__COMM_HOW_MASK) != CDDP__COMM_ABORTED) return CDDP_OK;
  return cddp__fail(CDDP_PEER_LOST,
                    "the group of this operation has been replaced, as ranks changed");
}

/* cddp__backend.wait. Without a limit the group's stream waits, and the host does not. CUDA cannot
   wait with a limit: then the host polls until the operation has ended. */
static cddp_result cddp__device_wait(cddp_work *work, double limit) {
  cddp_group *g = work->group;
  cddp__device *device = cddp__device_of(g);
  cddp__wait w;
  cddp_result r;
  if (!work->on_stream) {
    r = cddp__cpu_wait(work, limit);
    if (work->stage == NULL /* on host memory */ || r == CDDP__CONTINUES) return r;
    r = cddp__unstage(g, &work->call, work->context, work->stage, r);
    work->context = work->stage = NULL;
    return r;
  }
  cddp__wait_begin(&w, limit); /* a negative limit: not used */
  while (limit >= 0 && !cddp__device_done(work))
    if (!cddp__wait_pause(&w)) return cddp__fail_unfinished(work, limit);
  r = cddp__use_device(device->index); /* the stream can be the default one: the current device's */
  if (cddp__is_message(&work->call)) (void)cddp__issue_messages(device, work);
  if (r == CDDP_OK) r = cddp__check_work_group(work);
  if (r == CDDP_OK && work->event != NULL)
    r = CDDP__CUDA(
        cudaStreamWaitEvent, cddp__main_stream(g), (cudaEvent_t)work->event, 0 /* flags */);
  cddp__event_release(device, &work->event); /* the work itself is freed by cddp__work_wait */
  return r;
}

/* --- the calls of a group --- */

/* On the engine's thread: waits for the group's stream, then for the other ranks, and compares the
   calls of this host's ranks. */
static cddp_result cddp__run_barrier(cddp_work *work) {
  cddp__device *device = cddp__device_of(work->group);
  cddp_result r = cddp__use_device(device->index);
  if (r == CDDP_OK) r = cddp__await_stream(device, NULL, (cudaEvent_t)work->event);
  cddp__event_release(device, &work->event);
  if (r == CDDP_OK) r = cddp__run_recorded(work->group, &work->call, work->record); /* a round */
  return r == CDDP_OK ? cddp__compare_logs(device) : r;
}

/* cddp_barrier: cddp__run_barrier in the engine. Ranks of several hosts compare the hashes of their
   calls as the barrier's count. */
static cddp_result cddp__device_barrier(cddp_group *g, const cddp__call *call, cddp_work **work) {
  cddp__device *device = cddp__device_of(g);
  cudaStream_t stream = cddp__main_stream(g);
  cddp_work *w;
  cddp_result r =
      cddp__refuse_capture(stream, CDDP_INVALID_ARGUMENT, "a barrier waits on the host");
  if (r == CDDP_OK) r = cddp__device_work(g, call, &stream, &w);
  if (r != CDDP_OK) return r;
  w->on_stream = false; /* its wait is for the engine, which runs it on the host */
  w->run = cddp__run_barrier;
  pthread_mutex_lock(&device->lock); /* of hashes */
  if (g->hosts != NULL && g->backend->enqueues)
    w->call.count = (size_t)device->hashes[cddp__logged_calls(device) & (CDDP__CALL_HASHES - 1)];
  pthread_mutex_unlock(&device->lock);
  if ((r = cddp__enqueue(w)) == CDDP_OK) {
    if (work == NULL) return cddp__work_wait(w, CDDP__NO_LIMIT);
    *work = w;
    return r;
  }
  cddp__event_release(device, &w->event);
  cddp__work_free(w);
  return r;
}

/* Exchanges the counts before NCCL transfers the data. A rank without data learns here whether the
   others' buffers are in host memory. Then the call runs here, and call->count becomes 0: nothing
   is left for NCCL. */
static cddp_result cddp__counts_on_device(cddp_group *g, cddp__call *call) {
  bool host_memory = false;
  size_t sent, received;
  cddp_result r;
  cddp__engine_drain(g); /* the exchange is in the order of calls */
  r = cddp__exchange_counts(g, call, &host_memory);
  if (r != CDDP_OK || !host_memory) return r;
  cddp__call_bytes(g, call, &sent, &received);
  if (sent + received > 0)
    return cddp__fail(CDDP_MISMATCH,
                      "ranks disagree: rank %d's buffers in %s are on its device, "
                      "another rank's in host memory",
                      g->rank, cddp__shapes[call->kind].name);
  r = cddp__run_by_size(g, call);
  call->count = 0;
  return r;
}

/* Runs a collective with NCCL on the group's stream; with a handle, or if it needs scratch memory
   (only `side` uses that), on the side stream. NCCL cannot exchange shares in place: the sent ones
   are copied. */
static cddp_result cddp__nccl_call(cddp_group *g, const cddp__call *given, cddp_work **work) {
  cddp__device *device = cddp__device_of(g);
  bool copied = g->size > 1 && cddp__is_in_place_all_to_all(given); /* from a copy */
  /* home: where the caller's data is ready */
  cudaStream_t home = cddp__main_stream(g), stream = work != NULL || copied ? device->side : home;
  uint64_t record = cddp__record_call(g, given);
  cddp__call call = *given;
  size_t bytes = call.count * call.esize * (size_t)g->size;
  void *copy;
  cddp_result r = call.shares != NULL ? cddp__counts_on_device(g, &call) : CDDP_OK;
  if (r == CDDP_OK) r = cddp__stream_after(device, stream, home);
  if (r == CDDP_OK && copied) {
    r = cddp__device_scratch(&device->scratch, bytes, &copy);
    if (r == CDDP_OK) r = cddp__device_copy(copy, call.send, bytes, stream);
    if (r == CDDP_OK) call.send = copy;
  }
  if (r == CDDP_OK && call.count > 0) r = cddp__issue(device, &call, 1 /* call */, stream);
  if (r == CDDP_OK)
    r = work != NULL ? cddp__device_work(g, &call, &stream, work)
                     : cddp__stream_after(device, home, stream);
  if (r != CDDP_OK && g->size > 1) r = cddp__break_waiting(g, r);
  cddp__record_finish(g, record, r); /* of the issue: the device may still be working */
  return r;
}

/* Posts a message for NCCL. Without a handle it is issued now, together with those posted
   before. */
static cddp_result cddp__nccl_message(cddp_group *g, const cddp__call *call, cddp_work **work) {
  cddp__device *device = cddp__device_of(g);
  cddp_work **link, *w;
  cddp_result r;
  if (call->root == CDDP_ANY)
    return cddp__fail(CDDP_UNSUPPORTED, "CDDP_ANY is not supported for device memory: name the "
                                        "sending rank, or receive in host memory");
  /* One rank has no communicator. Send and recv to itself must be issued together. */
  if (device->comm == NULL || (work == NULL && call->root == g->rank))
    return cddp__fail(device->comm == NULL ? CDDP_UNSUPPORTED : CDDP_INVALID_ARGUMENT,
                      "rank %d sends device memory to itself: with NCCL that needs a group of two "
                      "ranks, and a work handle for both send and recv",
                      g->rank);
  if ((r = cddp__device_work(g, call, NULL /* on no stream yet */, &w)) != CDDP_OK) return r;
  cddp__count_message(device, call);
  pthread_mutex_lock(&device->issue_lock);
  for (link = &device->messages; *link != NULL; link = &(*link)->next) {} /* to the end */
  *link = w;
  pthread_mutex_unlock(&device->issue_lock);
  if (work == NULL) return cddp__work_wait(w, CDDP__NO_LIMIT);
  *work = w;
  return CDDP_OK;
}

/* cddp__backend.start. Buffers in host memory: the call runs on the host. On the device: by NCCL
   or, with backend "cpu", through host memory. */
static cddp_result cddp__device_start(cddp_group *g, const cddp__call *call, cddp_work **work) {
  cddp__device *device = cddp__device_of(g);
  bool message = cddp__is_message(call), enqueues = g->backend->enqueues;
  bool here, runs_here; /* the buffers are on the device; the call runs there */
  size_t sent, received;
  cddp_result r;
  if (work != NULL) *work = NULL;
  if ((r = cddp__device_enter(g)) == CDDP_OK) r = cddp__memory_of_call(device, call, &here);
  /* Not the caller's mistake: the others have made the call and wait. */
  if (r == CDDP_CUDA && !message) return cddp__break_waiting(g, r);
  if (r != CDDP_OK) return r;
  cddp__call_bytes(g, call, &sent, &received);
  /* A call without data shows not where it runs. Messages, and all calls with backend "cpu", then
     run on the host, which compares them; NCCL's collectives are logged. */
  runs_here = here && (sent + received > 0 || (enqueues && !message));
  /* Posted messages are issued first: in the order of calls. */
  if (!message && (r = cddp__issue_messages(device, NULL)) != CDDP_OK) return r;
  if (call->kind == CDDP__KIND_BARRIER) return cddp__device_barrier(g, call, work);
  if ((r = cddp__check_group(g)) != CDDP_OK) return r;
  if (runs_here && enqueues && call->op > CDDP_MAX /* bitwise */)
    return cddp__fail(CDDP_UNSUPPORTED, "NCCL has no bitwise operations: reduce integers in host "
                                        "memory, or in a group with backend \"cpu\"");
  /* A call with counts is logged like one on the device: a rank without data cannot tell. */
  if (!message) cddp__log_call(device, call, runs_here || call->shares != NULL);
  if (!runs_here) return cddp__cpu_start(g, call, work);
  if (!enqueues) return cddp__stage_call(device, call, cddp__main_stream(g), work);
  return message ? cddp__nccl_message(g, call, work) : cddp__nccl_call(g, call, work);
}

/* cddp_synchronize: waits on the host for the group's stream. */
static cddp_result cddp__device_synchronize(cddp_group *g) {
  cddp__device *device = cddp__device_of(g);
  cddp_result r;
  cddp__engine_drain(g);
  if ((r = cddp__device_enter(g)) != CDDP_OK) return r;
  r = cddp__refuse_capture(cddp__main_stream(g), CDDP_INVALID_ARGUMENT,
                           "cddp_synchronize waits on the host");
  if (r == CDDP_OK) r = cddp__issue_messages(device, NULL);
  if (r == CDDP_OK) r = cddp__check_group(g);
  return r == CDDP_OK ? cddp__await_stream(device, cddp__main_stream(g), NULL) : r;
}

/* --- contexts: connected, left --- */

static cddp_result cddp__warm_up_sizes(cddp__device *device, void *buffer, cddp_dtype dtype,
                                       cddp_op op) {
  size_t bytes;
  cddp_result r = CDDP_OK;
  for (bytes = 8; r == CDDP_OK && bytes <= CDDP__WARM_UP; bytes *= 32) {
    cddp__call call = cddp__make_call(CDDP__KIND_ALL_REDUCE, buffer, buffer,
                                      bytes / cddp__dtype_size(dtype), dtype, op, -1);
    r = cddp__issue(device, &call, 1, device->side);
  }
  return r;
}

/* Collective: runs sums and means of several sizes. NCCL connects ranks at the first use of an
   algorithm, while the host waits: else the first training step would wait. */
static cddp_result cddp__warm_up(cddp__device *device) {
  void *buffer = NULL;
  cddp_result r = CDDP__CUDA(cudaMalloc, &buffer, CDDP__WARM_UP);
  if (r == CDDP_OK) r = cddp__device_zero(buffer, CDDP__WARM_UP, device->side);
  if (r == CDDP_OK) r = cddp__warm_up_sizes(device, buffer, CDDP_F32, CDDP_SUM);
  if (r == CDDP_OK) r = cddp__warm_up_sizes(device, buffer, CDDP_F16, CDDP_AVG);
  if (r == CDDP_OK) r = cddp__await_stream(device, device->side, NULL);
  if (r != CDDP_OK) r = cddp__break(device->group, r); /* the others wait; operations are aborted */
  if (buffer != NULL) cudaFree(buffer);
  if (r != CDDP_OK) return r;
  /* A rank that ends after this call must not end the warm-up of the others. */
  return cddp__round(device->group, CDDP__KIND_GROUP_NEW, CDDP__PHASE_CONNECTED, 0, NULL, 0);
}

/* Fails if the environment makes NCCL's calls block: no deadline could end them. */
static cddp_result cddp__check_blocking(void) {
  const char *blocking = getenv("NCCL_COMM_BLOCKING");
  if (blocking == NULL || strcmp(blocking, "1") != 0) return CDDP_OK;
  return CDDP__REFUSE("NCCL_COMM_BLOCKING=1 makes NCCL's calls block without a deadline: remove it "
                      "from the environment, and from NCCL's configuration files");
}

/* Collective: starts the context's threads, connects the group's ranks, and warms up. */
static cddp_result cddp__nccl_connect(cddp__device *device) {
  cddp_group *g = device->group;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id;
  ncclResult_t e = ncclSuccess;
  cddp_result r;
  cddp__watch_hosts(g); /* from now on leaders notice each other's end */
  r = cddp__start_watching(device);
  if (r == CDDP_OK && g->rank == 0 && (e = ncclGetUniqueId(&id)) != ncclSuccess)
    r = cddp__fail(CDDP_NCCL, "ncclGetUniqueId: %s (%.300s)", ncclGetErrorString(e),
                   ncclGetLastError(NULL));
  if (r == CDDP_OK) r = cddp__check_blocking(); /* NCCL has now read its configuration files */
  if ((r = cddp__consensus(g, r, NULL, 0, NULL)) != CDDP_OK) return r;
  r = cddp__broadcast(g, &id, sizeof id, 0 /* root */);
  if (r != CDDP_OK) return r;
  config.blocking = 0; /* NCCL's calls return ncclInProgress: see cddp__await_nccl */
  pthread_mutex_lock(&device->issue_lock);
  if (cddp__comm_alive(device)) {
    e = ncclCommInitRankConfig(&device->comm, g->size, id, g->rank, &config);
    r = cddp__await_nccl(device, e, "ncclCommInitRankConfig");
  } else { /* the watcher has broken the group meanwhile */
    r = cddp__check_failure(g);
  }
  pthread_mutex_unlock(&device->issue_lock);
  return r == CDDP_OK ? cddp__warm_up(device) : r;
}

/* Collective over g: creates its device context. If it fails, g is on the CPU.
     index      number of the GPU
     kernels    NULL: some rank has none
     connects   with a communicator, unless g is too small or the backend needs none */
static cddp_result cddp__device_open(cddp_group *g, int index, const cddp__backend *backend,
                                     const cddp_kernels *kernels, bool connects) {
  /* It can outlive g, and g's allocator: so NULL, malloc. */
  cddp__device *device = (cddp__device *)cddp__calloc(NULL, 1, sizeof *device);
  int least = 0, greatest = 0; /* priorities of streams */
  cddp_result r;
  if (device == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  /* Notes whether all groups of the process are on one device: for cddp__on_device. */
  if (!cddp__compare_swap32(&cddp__device_groups, 0, (uint32_t)index + 1) &&
      cddp__load32(&cddp__device_groups) != (uint32_t)index + 1)
    cddp__store32(&cddp__device_groups, CDDP__SEVERAL_DEVICES);
  device->state.v = CDDP__COMM_DONE; /* no communicator, and no watcher that has to end first */
  device->group = g;
  device->index = index;
  g->backend = backend;
  device->kernels = kernels;
  pthread_mutex_init(&device->issue_lock, NULL);
  pthread_mutex_init(&device->lock, NULL);
  r = cddp__use_device(index);
  if (r == CDDP_OK) r = CDDP__CUDA(cudaDeviceGetStreamPriorityRange, &least, &greatest);
  if (r == CDDP_OK)
    r = CDDP__CUDA(cudaStreamCreateWithPriority, &device->side, cudaStreamNonBlocking, greatest);
  while (r == CDDP_OK && device->spares < CDDP__SPARE_EVENTS) {
    cudaEvent_t *spare = &device->spare[device->spares];
    r = CDDP__CUDA(cudaEventCreateWithFlags, spare, cudaEventDisableTiming);
    if (r == CDDP_OK) device->spares++;
  }
  if (r != CDDP_OK) r = cddp__break(g, r);
  else if (connects && backend->enqueues /* NCCL */ && g->size >= CDDP__COMM_MIN_RANKS)
    r = cddp__nccl_connect(device);
  if (r == CDDP_OK) {
    g->device = device;
  } else {
    g->backend = &cddp__cpu_backend; /* the others' functions need g->device */
    cddp__device_delete(device);
  }
  return r;
}

/* cddp__backend.open. Collective over g: creates a context like that of group `from`, of which g
   has some or all ranks. */
static cddp_result cddp__device_open_like(const cddp_group *from, cddp_group *g) {
  const cddp__device *like = cddp__device_of(from);
  g->stream = from->stream;
  return cddp__device_open(g, like->index, from->backend, like->kernels, true /* connects */);
}

/* cddp__backend.prepare, before a split: waits for the device, so that no operation of g is in
   flight while NCCL connects the new group, and compares the calls. */
static cddp_result cddp__device_before_split(cddp_group *g) {
  cddp__call call = cddp__barrier_call();
  cddp__device *device = cddp__device_of(g);
  cddp_result r = cddp__device_enter(g);
  if (r == CDDP_OK)
    r = cddp__refuse_capture(cddp__main_stream(g), CDDP_INVALID_ARGUMENT,
                             "the creation of a group waits on the host");
  if (r != CDDP_OK) return r; /* not broken: all ranks fail alike, as they must capture alike */
  r = cddp__device_synchronize(g);
  if (r == CDDP_OK && device->comm != NULL) r = cddp__await_stream(device, device->side, NULL);
  if (r == CDDP_OK) r = cddp__device_barrier(g, &call, NULL);
  return r == CDDP_OK ? r : cddp__break(g, r); /* else the other ranks would wait in the split */
}

/* cddp__backend.leave. Ends the communicator in good order: first this rank finishes operations
   that peers still need. They end, or the watcher breaks the group. Nothing here breaks it, since
   the remaining ranks must not see a failure. */
static void cddp__device_leave(cddp_group *g) {
  cddp__device *device = cddp__device_of(g);
  cddp__wait w;
  cddp__wait_begin(&w, INFINITY);
  (void)cddp__use_device(device->index);
  (void)cddp__issue_messages(device, NULL);
  while (!cddp__is_broken(g) && cddp__busy_since(device) > 0) {
    cddp__futex_wake(&device->state); /* the poller looks for ended operations immediately */
    cddp__wait_pause(&w);
  }
  if (!cddp__is_broken(g)) cddp__device_end(device, CDDP__COMM_DESTROYED);
  cddp__device_stop(device);
}

/* cddp__backend.close: the group that was left has no models any more, which need its context to
   free memory. */
static void cddp__device_close(cddp_group *g) {
  (void)cddp__use_device(cddp__device_of(g)->index);
  cddp__device_delete(cddp__device_of(g));
}

/* >>kernels ------------------------------------------------------------------------------------
   Job: call the kernels: optimizer steps and copies of weights.
   Owns: the states of a cddp_optim with parameters on a device.
   Touches: parameters, gradients and copies on the device.
   Entry points: cddp__states_alloc; cddp__device_optim; cddp__device_step and cddp__device_copies
   for the step of a cddp_ddp.
   How it works:
     1. One launch updates all parameters of a dtype that have the same settings.
     2. The states are one piece of memory. It never moves, because a CUDA graph may have recorded
        its address. */

/* Parameter i's gradient on the device: in the arena of its model or, in cddp_optim_step (d is
   NULL), the caller's if it is dense. */
static void *cddp__device_gradient(const cddp_optim *optim, const cddp_ddp *d, int i) {
  if (d == NULL && cddp__optim_sparse(optim, i) == NULL) return optim->params[i].grad;
  if (d == NULL) d = optim->desc.ddp; /* sparse: its model has the mean as a dense gradient */
  return d->arena +
         (cddp__sparse_of(d, i) != NULL ? d->tensors[i].dense_offset : d->tensors[i].offset);
}

/* Returns whether one launch can update parameters i and j. A launch has one dtype, one list of
   scalars, and one factor, which differs for sparse gradients. d is NULL in cddp_optim_step. */
static bool cddp__same_launch(const cddp_optim *optim, const cddp_ddp *d, int i, int j) {
  /* AdamW's scalars depend on the number of steps, SGD's on whether it is the first. */
  bool same_steps = optim->algorithm->counts ? optim->steps[i] == optim->steps[j]
                                             : (optim->steps[i] == 0) == (optim->steps[j] == 0);
  return same_steps && optim->params[i].dtype == optim->params[j].dtype &&
         optim->desc.lr_scales[i] == optim->desc.lr_scales[j] &&
         optim->desc.weight_decays[i] == optim->desc.weight_decays[j] &&
         (d == NULL || (cddp__sparse_of(d, i) == NULL) == (cddp__sparse_of(d, j) == NULL));
}

/* The stream of the group of d, or (NULL) of desc.ddp, or of the desc. Makes the device current. */
static cudaStream_t cddp__optim_stream(const cddp_optim *optim, const cddp_ddp *d) {
  (void)cddp__use_device(optim->device);
  if (d == NULL) d = optim->desc.ddp;
  return d != NULL ? cddp__main_stream(d->group) : (cudaStream_t)optim->desc.stream;
}

/* Launches the step of n segments, with the scalars of parameter i. factor, clip, flags: as in
   cddp_kernels.sgd. Returns a cudaError_t. */
typedef int cddp__launch(const cddp_optim *optim, int i, const cddp_segment *segments, int n,
                         double factor, const double *clip, unsigned flags, void *stream);

static int cddp__launch_adamw(const cddp_optim *optim, int i, const cddp_segment *segments, int n,
                              double factor, const double *clip, unsigned flags, void *stream) {
  cddp__update update;
  memset(&update, 0, sizeof update);
  update.loops = cddp__pick_loops();
  cddp__adamw_begin(optim, i, &update);
  /* State k of all parameters is adjacent, and behind it state k + 1: one stride for all. */
  update.scalars.adamw.stride =
      (size_t)((char *)optim->state[optim->count + i] - (char *)optim->state[i]);
  return cddp__registered_kernels->adamw(segments, n, optim->params[i].dtype,
                                         &update.scalars.adamw, factor, clip, flags, stream);
}

static int cddp__launch_sgd(const cddp_optim *optim, int i, const cddp_segment *segments, int n,
                            double factor, const double *clip, unsigned flags, void *stream) {
  cddp_sgd_desc sgd;
  memset(&sgd, 0, sizeof sgd);
  sgd.lr = optim->desc.lr * optim->desc.lr_scales[i];
  sgd.momentum = optim->desc.momentum;
  sgd.dampening = optim->desc.dampening;
  sgd.weight_decay = optim->desc.weight_decays[i];
  sgd.nesterov = optim->desc.nesterov != 0;
  sgd.maximize = optim->desc.maximize != 0;
  if (sgd.momentum != 0 && optim->steps[i] == 0) flags |= (unsigned)CDDP_SGD_FIRST;
  return cddp__registered_kernels->sgd(segments, n, optim->params[i].dtype, &sgd, factor, clip,
                                       flags, stream);
}

/* NULL: the algorithm has only CPU code. */
static cddp__launch *cddp__launch_of(const cddp__algorithm *algorithm) {
  if (algorithm == &cddp__sgd) return cddp__launch_sgd;
  return algorithm == &cddp__adamw ? cddp__launch_adamw : NULL;
}

/* Sets the master of parameter i, its last state, to the weights. */
static cddp_result cddp__begin_master(const cddp_optim *optim, int i, cudaStream_t stream) {
  const cddp_partition *part = &optim->parts[i];
  const cddp_param *param = &optim->params[i];
  char *weights = (char *)param->data + part->first * cddp__dtype_size(param->dtype);
  return cddp__cuda_result(
      cddp__registered_kernels->convert(*cddp__state_of(optim, optim->state_count - 1, i),
                                        CDDP_F32, weights, param->dtype, part->count,
                                        (void *)stream),
      "the kernel that begins masters");
}

/* The part of parameter i that this rank steps. */
static cddp_segment cddp__segment_of(const cddp_optim *optim, const cddp_ddp *d, int i) {
  const cddp_partition *part = &optim->parts[i];
  size_t part_offset = part->first * cddp__dtype_size(optim->params[i].dtype);
  bool masters = optim->desc.master_weights != 0;
  int last = optim->state_count - 1; /* the masters, if any */
  cddp_segment segment;
  segment.data = (char *)optim->params[i].data + part_offset;
  segment.grad = (char *)cddp__device_gradient(optim, d, i) + part_offset;
  segment.momentum = optim->state_count > masters ? optim->state[i] /* the first state */ : NULL;
  segment.count = part->count;
  segment.master = NULL;
  if (masters && cddp__has_state(optim, last, i)) segment.master = *cddp__state_of(optim, last, i);
  return segment;
}

/* Refuses a capture of parameter i's step that a CUDA graph cannot repeat. */
static cddp_result cddp__check_captured_step(const cddp_optim *optim, int i) {
  if (optim->algorithm->counts)
    return cddp__fail(CDDP_UNSUPPORTED,
                      "%s cannot be captured in a CUDA graph, which would repeat one step number",
                      optim->algorithm->name);
  if (optim->state_count == 0 || optim->steps[i] != 0) return CDDP_OK;
  return CDDP__REFUSE(
      "take two steps before you capture one in a CUDA graph: the first starts momentum");
}

/* Updates the weights that this rank keeps states for.
     d         the model in cddp_ddp_step: the gradients are in its arena, and are zeroed; NULL:
               cddp_optim_step
     factors   by dtype: they make the gradients means. Sparse gradients, and all if they are
               clipped, are means already. NULL if d is. */
static cddp_result cddp__device_step(cddp_optim *optim, const cddp_ddp *d, const double *factors) {
  cudaStream_t stream = cddp__optim_stream(optim, d);
  cddp_segment *segments = optim->segments;
  bool *launched = (bool *)(segments + optim->count); /* [count] behind them; also the skipped */
  bool capturing = cddp__capturing(stream);
  bool clips = d != NULL && d->desc.max_grad_norm > 0; /* cddp__gpu_clip_by has set clip[1] */
  cddp_result r = CDDP_OK;
  int i, j, n;
  for (i = 0; i < optim->count; i++) launched[i] = cddp__optim_skips(optim, i);
  /* From the last parameter: its gradient is first in a cddp_ddp's arena, so addresses ascend. */
  for (i = optim->count - 1; r == CDDP_OK && i >= 0; i--) {
    double factor = 1;
    const double *clip = clips && d->step.used[i] ? d->gpu->clip : NULL;
    if (launched[i]) continue; /* with another parameter, or skipped */
    if (capturing && (r = cddp__check_captured_step(optim, i)) != CDDP_OK) return r;
    if (d != NULL && cddp__sparse_of(d, i) == NULL && !clips)
      factor = factors[optim->params[i].dtype];
    for (n = 0, j = i; r == CDDP_OK && j >= 0; j--) { /* all parameters that fit into i's launch */
      if (launched[j] || !cddp__same_launch(optim, d, i, j)) continue;
      launched[j] = true;
      if (optim->parts[j].count == 0) continue; /* another rank's */
      segments[n] = cddp__segment_of(optim, d, j);
      if (segments[n].master != NULL && optim->init_master[j])
        r = cddp__begin_master(optim, j, stream);
      n++;
    }
    if (r == CDDP_OK && n > 0)
      r = cddp__cuda_result(
          cddp__launch_of(optim->algorithm)(optim, i, segments, n, factor, clip,
                                            d != NULL ? (unsigned)CDDP_SGD_ZERO : 0,
                                            (void *)stream),
          "the optimizer's kernel");
  }
  return r;
}

/* Writes desc.copies from the weights, on the stream; nothing if there are none. */
static cddp_result cddp__device_copies(const cddp_optim *optim, const cddp_ddp *d) {
  cudaStream_t stream = cddp__optim_stream(optim, d);
  int i;
  if (optim->desc.copies == NULL) return CDDP_OK;
  memset(optim->segments, 0, (size_t)optim->count * sizeof *optim->segments); /* NULL: not used */
  for (i = 0; i < optim->count; i++) {
    optim->segments[i].data = optim->params[i].data;
    optim->segments[i].count = optim->desc.copies[i] != NULL ? optim->params[i].count : 0;
  }
  return cddp__cuda_result(cddp__registered_kernels->copies(optim->segments, optim->desc.copies,
                                                            optim->count, optim->desc.copy_dtype,
                                                            (void *)stream),
                           "the kernel that copies weights");
}

/* cddp__optim_backend.step. */
static cddp_result cddp__device_step_copies(cddp_optim *optim) {
  cddp_result r = cddp__device_step(optim, NULL, NULL);
  return r == CDDP_OK ? cddp__device_copies(optim, NULL) : r;
}

/* cddp__optim_backend.copy. Masters that the next step would begin (a checkpoint had none) get the
   weights now: a CUDA graph of that step would begin them in each replay. */
static cddp_result cddp__device_write_copies(const cddp_optim *optim) {
  cudaStream_t stream = cddp__optim_stream(optim, NULL);
  cddp_result r = CDDP_OK;
  int i;
  if (optim->desc.master_weights == 0) return cddp__device_copies(optim, NULL);
  for (i = 0; r == CDDP_OK && i < optim->count; i++) {
    if (!optim->init_master[i] || optim->steps[i] == 0 || optim->parts[i].count == 0 ||
        !cddp__has_state(optim, optim->state_count - 1 /* masters */, i))
      continue;
    r = cddp__begin_master(optim, i, stream);
    if (r == CDDP_OK) optim->init_master[i] = false;
  }
  return r == CDDP_OK ? cddp__device_copies(optim, NULL) : r;
}

/* cddp__optim_backend.zero. */
static cddp_result cddp__device_clear(const cddp_optim *optim, void *p, size_t bytes, bool waits) {
  cudaStream_t stream = cddp__optim_stream(optim, NULL);
  cddp_result r = cddp__device_zero(p, bytes, stream);
  return r == CDDP_OK && waits ? CDDP__CUDA(cudaStreamSynchronize, stream) : r;
}

/* Allocates zeroed states of this rank's parts, in one piece, each aligned to 256 bytes. */
static cddp_result cddp__states_alloc(cddp_optim *optim) {
  size_t bytes = 0;
  cddp_result r;
  int i, k;
  for (k = 0; k < optim->state_count; k++)
    for (i = 0; i < optim->count; i++) {
      size_t size = optim->parts[i].count * cddp__dtype_size(cddp__state_type(optim, i));
      /* the offset, until the memory is allocated */
      *cddp__state_of(optim, k, i) = (void *)(uintptr_t)bytes;
      if (cddp__has_state(optim, k, i)) bytes += cddp__round_up(size, 256);
    }
  (void)cddp__use_device(optim->device);
  r = cddp__cuda_result((int)cudaMalloc(&optim->flat, bytes > 0 ? bytes : 1),
                        "cudaMalloc of states");
  if (r != CDDP_OK) return r;
  for (k = 0; k < optim->count * optim->state_count; k++)
    optim->state[k] = (char *)optim->flat + (uintptr_t)optim->state[k];
  return cddp__device_clear(optim, optim->flat, bytes, true);
}

/* cddp__optim_backend.leave. */
static void cddp__states_free(cddp_optim *optim) {
  cddp__free(NULL, optim->segments);
  cddp__free_on(optim->device, optim->flat);
}

static const cddp__optim_backend cddp__device_optim = {
    true /* on_device */, cddp__device_step_copies, cddp__device_write_copies, cddp__device_clear,
    cddp__states_free};

/* >>ddp-device ------------------------------------------------------------------------------------
   Job: a model's gradients and steps in device memory: what >>ddp-host of cddp.h does on a host.
   Owns: the arena on the device, and d->gpu. Entry points: cddp__gpu_memory.
   How a step works:
     1. With NCCL a bucket's all-reduce is a call of the caller's group, on that group's side
        stream, after an event of the backward pass. The caller's stream then waits for the side
        stream, and one kernel updates all weights and zeroes the gradients. The host waits for no
        device, and for other ranks only if d->always_meets.
     2. Without NCCL the engine of a private group reduces the buckets through host memory.
     3. Every rank has complete states, or (sharded) those of its part. If the last step needed only
        parts of the mean, NCCL reduces a bucket to the ranks whose parts are in it
        (d->step.scatters). A step that needs the whole mean gathers it. */

/* The functions of cddp__ddp_memory, which describes their results, and their helpers. */

/* select_device: fails after cddp_destroy of the group. */
static cddp_result cddp__gpu_use(const cddp_ddp *d) {
  if (cddp__load32(&d->group->left) == 0) return cddp__device_enter(d->group);
  return CDDP__REFUSE(
      "the group of the cddp_ddp was destroyed: call cddp_ddp_destroy before cddp_destroy");
}

/* enter: refuses a capture if the step waits on the host. */
static cddp_result cddp__gpu_enter(const cddp_ddp *d) {
  bool waits = d->desc.elastic || d->desc.uneven_inputs || d->rows.sparse != NULL ||
               !d->group->backend->enqueues;
  cddp_result r = cddp__gpu_use(d);
  if (r != CDDP_OK || !waits) return r;
  return cddp__refuse_capture(cddp__main_stream(d->group), CDDP_UNSUPPORTED,
                              "a step of an elastic model, with sparse_rows, uneven_inputs or "
                              "backend \"cpu\", waits on the host");
}

static cddp_result cddp__gpu_scratch(cddp_ddp *d, size_t bytes, void **out) {
  return cddp__device_scratch(&d->gpu->scratch, bytes, out);
}

/* meet. *no_round: the ranks need not meet on the host. With NCCL the watchers compare the calls
   that are logged here. During a capture ranks are not compared, and all gradients must be ready:
   only a round finds those that no rank has used.
     kind, check   the kind of the call, and a hash of its settings: in the log, the count */
static cddp_result cddp__gpu_meet(cddp_ddp *d, int kind, uint64_t check, bool *no_round) {
  bool capturing = cddp__capturing(cddp__main_stream(d->group));
  cddp__call note;
  cddp_result r;
  int i;
  *no_round = capturing || (!d->always_meets && d->plan.rebuilt);
  if (!*no_round) return CDDP_OK;
  if (capturing && !d->plan.rebuilt && !d->desc.find_unused_parameters)
    return CDDP__REFUSE(
        "take two steps before you capture one in a CUDA graph: the first arranges the buckets");
  if ((r = cddp__check_group(d->control)) != CDDP_OK) return r;
  for (i = 0; i < d->count; i++)
    if (!d->tensors[i].ready)
      return CDDP__REFUSE("gradient \"%s\" was not marked ready on rank %d; %s",
                          cddp__param_name(d->params, i).s, d->group->rank,
                          capturing ? "a step in a CUDA graph needs all gradients"
                                    : "call cddp_ddp_ready for every parameter, or set "
                                      "find_unused_parameters");
  if (capturing) return CDDP_OK;
  note = cddp__make_call(kind, NULL, NULL, check /* count */, CDDP_F32, CDDP_SUM, -1);
  cddp__log_call(cddp__device_of(d->comm), &note, true /* on_device */);
  d->control->calls++; /* a round would count the call */
  return CDDP_OK;
}

/* Issues the bucket's all-reduce on the side stream, or (d->step.scatters) a reduce to each rank
   that has a part of it. It is a sum if the kernel of cddp_ddp_step divides (d->step.sums), with
   the same bits. f16 is never a sum, see cddp__averages_by_sum. */
static cddp_result cddp__gpu_reduce(cddp_ddp *d, cddp__bucket_state *b) {
  cddp__device *device = cddp__device_of(d->comm);
  cddp_dtype dtype = d->params[b->sorted[0]].dtype;
  /* The bucket in the log of calls. Its all-reduces themselves are not logged. */
  cddp__call logged = cddp__make_call(CDDP__KIND_DDP_BUCKET, NULL, NULL,
                                      (size_t)(b - d->plan.buckets) /* its index, as count */,
                                      dtype, CDDP_SUM, -1 /* no root */);
  cddp__call *calls = d->scratch.calls;
  size_t begin, end;
  cddp__range range;
  int i = 0, n = 0, k, parts = d->step.scatters ? d->group->size : 1;
  cddp__log_call(device, &logged, true /* on_device */);
  while (cddp__next_range(d, b->sorted, b->count, &i, &range))
    for (k = 0; k < parts; k++) {
      cddp__slice(d->layout.dense_bytes, CDDP__BLOCK_BYTES, parts, k, &begin, &end);
      begin = cddp__max(begin, range.begin); /* the intersection of range and part k */
      end = cddp__min(end, range.end);
      if (begin >= end) continue;
      calls[n] = cddp__average_call(d->arena + begin, (end - begin) / logged.esize, dtype);
      if (d->step.scatters) calls[n].kind = CDDP__KIND_REDUCE, calls[n].root = k; /* k's part */
      if (d->step.sums && dtype != CDDP_F16) calls[n].op = CDDP_SUM;
      n++;
    }
  return cddp__issue(device, calls, n, device->side);
}

/* sum. The last node has dtype if it is one shard (gradients that were just computed), else the
   compute type. */
static cddp_result cddp__gpu_sum(void *out, cddp_dtype dtype, const void *const *nodes,
                                 const int *widths, int count, int divisor, size_t n,
                                 void *stream) {
  if (divisor == 0 && widths[count - 1] != 1 && dtype != CDDP_F64)
    dtype = CDDP_F32; /* like the other nodes */
  return cddp__cuda_result(
      (cddp__registered_kernels->sum)(out, dtype, nodes, widths, count, divisor, n, stream),
      "the kernel that adds shards");
}

/* begin_bucket: reduces a bucket after the work on the caller's stream, which computes its
   gradients, and after posted messages. Through host memory the engine does it. d->lock held. */
static cddp_result cddp__gpu_begin(cddp_ddp *d, cddp__bucket_state *b) {
  cddp__device *device = cddp__device_of(d->comm);
  void *caller_stream = d->group->stream;
  cddp_result r = d->group->backend->enqueues ? cddp__issue_messages(device, NULL) : CDDP_OK;
  if (r == CDDP_OK) r = cddp__stream_after(device, device->side, cddp__main_stream(d->group));
  if (r != CDDP_OK) return r;
  if (!d->group->backend->enqueues) return cddp__push_bucket(d, b);
  if (d->desc.comm_hook == NULL) return cddp__gpu_reduce(d, b);
  d->hook_group->stream = (void *)device->side; /* the hook's operations are on it */
  r = cddp__hook_bucket(d, b);
  d->hook_group->stream = caller_stream;
  return r;
}

/* broadcast: the n broadcasts in d->scratch.calls, in one NCCL group. */
static cddp_result cddp__gpu_broadcast(cddp_ddp *d, int n) {
  cddp__device *device = cddp__device_of(d->comm);
  cddp_result r = cddp__check_group(d->comm);
  bool here;
  int i;
  if (r == CDDP_OK) r = cddp__issue_messages(device, NULL);
  for (i = 0; r == CDDP_OK && i < n; i++) {
    r = cddp__memory_of_call(device, &d->scratch.calls[i], &here);
    if (r == CDDP_OK) cddp__log_call(device, &d->scratch.calls[i], true /* on_device */);
  }
  if (r == CDDP_OK) r = cddp__issue(device, d->scratch.calls, n, cddp__main_stream(d->group));
  return r == CDDP_CUDA ? cddp__break_waiting(d->comm, r) : r;
}

/* fence: makes the caller's stream wait until all buckets are reduced. If each rank has only its
   part of the mean (step.scatters) but all is needed, the ranks broadcast their parts. */
static cddp_result cddp__gpu_fence(cddp_ddp *d, bool part) {
  cddp__device *device = cddp__device_of(d->comm);
  size_t begin, end;
  cddp_result r = cddp__await_buckets(d, part);
  int k, n = 0;
  /* One rank without a hook has put nothing on the side stream. */
  if (r != CDDP_OK || (d->group->size == 1 && d->desc.comm_hook == NULL)) return r;
  if ((r = cddp__check_group(d->comm)) != CDDP_OK) return r;
  r = cddp__stream_after(device, cddp__main_stream(d->group), device->side);
  if (r != CDDP_OK || part || !d->step.scatters) return r;
  for (k = 0; k < d->group->size; k++) {
    cddp__part_of(d, k, &begin, &end);
    if (begin < end)
      d->scratch.calls[n++] = cddp__broadcast_call(d->arena + begin, end - begin, CDDP_U8, k);
  }
  return cddp__gpu_broadcast(d, n);
}

/* await: waits on the host for the caller's stream. */
static cddp_result cddp__gpu_await(cddp_ddp *d) {
  return cddp__await_stream(cddp__device_of(d->comm), cddp__main_stream(d->group), NULL);
}

/* Which gradients cddp__gpu_list lists. */
enum {
  CDDP__LIST_NONE,
  CDDP__LIST_ALL,    /* in the arena, as buckets have left them */
  CDDP__LIST_PART,   /* this rank's part of those */
  CDDP__LIST_CALLERS /* where the caller has them, not the copies in the arena */
};

/* Lists the gradients of a dtype, without unused ones, in d->gpu->segments. Returns their
   number. */
static int cddp__gpu_list(cddp_ddp *d, int dtype, int which) {
  bool part = which == CDDP__LIST_PART;
  int i, n = 0;
  for (i = d->count - 1; i >= 0; i--) { /* ascending in the arena */
    const cddp_param *param = &d->params[i];
    const cddp__tensor *tensor = &d->tensors[i];
    cddp_segment *segment = &d->gpu->segments[n];
    if ((int)param->dtype != dtype || param->count == 0 || !d->step.used[i] ||
        (part && tensor->begin >= tensor->end /* another rank's */))
      continue;
    memset(segment, 0, sizeof *segment);
    segment->grad = part ? d->arena + tensor->begin : cddp__device_gradient(NULL, d, i);
    if (which == CDDP__LIST_CALLERS && tensor->storage == CDDP__STORAGE_COPIED)
      segment->grad = param->grad;
    segment->count =
        part ? (tensor->end - tensor->begin) / cddp__dtype_size(param->dtype) : param->count;
    n++;
  }
  return n;
}

/* Sets clip[0] to the sum of squares of the gradients that `normed` lists, and clip[1] to the
   factor of clipping. Multiplies those that `multiplied` lists. */
static cddp_result cddp__gpu_clip_by(cddp_ddp *d, double max_norm, int normed, int multiplied) {
  const cddp_kernels *kernels = cddp__registered_kernels;
  void *stream = d->group->stream;
  int dtype, n, e = 0;
  cddp_result r = cddp__device_zero(d->gpu->clip, sizeof *d->gpu->clip, stream); /* clip[0] = 0 */
  if (r != CDDP_OK) return r;
  for (dtype = 0; e == 0 && dtype < CDDP__DTYPE_COUNT; dtype++)
    if ((n = cddp__gpu_list(d, dtype, normed)) > 0)
      e = kernels->squares(
          d->gpu->segments, n, (cddp_dtype)dtype, d->gpu->clip, true /* adds */, stream);
  if (e == 0) e = kernels->factor(d->gpu->clip, max_norm, stream);
  d->step.has_norm = e == 0;
  for (dtype = 0; e == 0 && multiplied != CDDP__LIST_NONE && dtype < CDDP__DTYPE_COUNT; dtype++)
    if ((n = cddp__gpu_list(d, dtype, multiplied)) > 0)
      e = (kernels->scale)(
          d->gpu->segments, n, (cddp_dtype)dtype, 1 /* not used */, d->gpu->clip, stream);
  return cddp__cuda_result(e, "the kernels that clip");
}

/* norm: of the last clip, read from the device. Waits on the host. */
static cddp_result cddp__gpu_norm(cddp_ddp *d, double *norm) {
  double sum = 0;
  cddp_result r =
      cddp__refuse_capture(cddp__main_stream(d->group), CDDP_INVALID_ARGUMENT,
                           "a norm (not one asked of cddp_ddp_grad_norm later) is waited for");
  if (r == CDDP_OK)
    r = cddp__await_device(d->group, d->desc.elastic ? CDDP__AWAIT_STREAM : CDDP__AWAIT_GROUP);
  if (r == CDDP_OK) r = cddp__transfer(d->group, &sum, d->gpu->clip, sizeof sum);
  *norm = (sqrt)(sum); /* 0 after a failure */
  return r;
}

/* clip: norm receives the norm, for which the host waits; NULL: not wanted. */
static cddp_result cddp__gpu_clip(cddp_ddp *d, double max_norm, double *norm) {
  cddp_result r;
  if ((r = cddp__check_cause(&d->failure)) != CDDP_OK) return r;
  if (norm != NULL && cddp__capturing(cddp__main_stream(d->group)))
    return cddp__gpu_norm(d, norm); /* which refuses, before anything is captured */
  if ((r = cddp__need_kernels("cddp_ddp_clip_grad_norm")) != CDDP_OK) return r;
  r = cddp__gpu_clip_by(d, max_norm, CDDP__LIST_CALLERS, CDDP__LIST_CALLERS);
  return r == CDDP_OK && norm != NULL ? cddp__gpu_norm(d, norm) : r;
}

/* step: clips, updates this rank's weights, and sends them if states are sharded. optim NULL: only
   clips, for the caller's optimizer. Ignores averaged and wrote: the stream has reduced the buckets
   already, and peers do not read the arena. */
static cddp_result cddp__gpu_step(cddp_ddp *d, cddp_optim *optim, bool averaged, bool wrote) {
  double max_norm = d->desc.max_grad_norm, factors[CDDP__DTYPE_COUNT];
  int dtype;
  cddp_result r = CDDP_OK;
  (void)averaged, (void)wrote;
  if (max_norm > 0)
    r = cddp__gpu_clip_by(d, max_norm, CDDP__LIST_ALL,
                          optim == NULL ? CDDP__LIST_PART : CDDP__LIST_NONE);
  /* Without elements the optimizer has the CPU's backend, and nothing to step. */
  if (r != CDDP_OK || optim == NULL || !optim->backend->on_device) return r;
  for (dtype = 0; dtype < CDDP__DTYPE_COUNT; dtype++)
    factors[dtype] = cddp__mean_factor(d, (cddp_dtype)dtype);
  r = cddp__device_step(optim, d, factors);
  if (r == CDDP_OK && optim->partitioned)
    r = cddp__broadcast_arrays(d, d->params, d->count, CDDP__ROOT_ALL_OWNERS);
  return r == CDDP_OK ? cddp__device_copies(optim, d) : r;
}

/* Fails unless `at`, data or grad of parameter i, is on the group's device. */
static cddp_result cddp__check_param_on_device(const cddp_ddp *d, int i, const char *array,
                                               const void *at) {
  int device = cddp__device_of(d->group)->index;
  cddp__text what = cddp__textf("%s of parameter \"%.60s\"", array,
                                cddp__param_name(d->params, i).s);
  bool here;
  cddp_result r;
  if (at == NULL || d->params[i].count == 0) return CDDP_OK;
  if ((r = cddp__memory_of(device, at, what.s, &here)) != CDDP_OK || here) return r;
  return CDDP__REFUSE("%s is in host memory, but the group's device is cuda:%d; allocate it with "
                      "cddp_alloc or cudaMalloc",
                      what.s, device);
}

/* Fails unless all parameters are in the memory of the group's device, and the kernels can run the
   model. */
static cddp_result cddp__check_on_device(const cddp_ddp *d) {
  bool shards = d->shards.uses_slots || d->desc.elastic;
  /* of a sum; elastic: up to one for each shard */
  int most_nodes = d->desc.elastic ? d->shards.count : d->shards.node_count, i;
  cddp_result r = CDDP_OK;
  if (d->desc.max_grad_norm > 0) r = cddp__need_kernels("max_grad_norm in cddp_ddp_desc");
  else if (shards) r = cddp__need_kernels("shards in cddp_ddp_desc");
  if (r == CDDP_OK && shards && most_nodes > CDDP_NODES)
    r = cddp__fail(CDDP_UNSUPPORTED,
                   "%d shards on %d ranks leave %d sums of shards to add; GPUs add at most %d",
                   d->shards.count, d->group->size, most_nodes, CDDP_NODES);
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    r = cddp__check_param_on_device(d, i, "data", d->params[i].data);
    if (r == CDDP_OK) r = cddp__check_param_on_device(d, i, "grad", d->params[i].grad);
  }
  return r;
}

/* alloc: the zeroed arena and, behind it, the scratch memory of kernels (d->gpu->clip). */
static cddp_result cddp__gpu_alloc(cddp_ddp *d) {
  size_t scratch = /* without kernels nothing is clipped */
      cddp__registered_kernels != NULL ? cddp__registered_kernels->scratch_bytes : 1;
  void *memory = NULL;
  cddp_result r = cddp__check_on_device(d);
  if (r != CDDP_OK) return r;
  /* Buckets can be sums if NCCL reduces them and the step's kernel is next to read them. Hooks,
     clipping and sums of shards work on means. */
  d->step.divides = d->group->backend->enqueues && cddp__device_of(d->group)->kernels != NULL &&
                    d->desc.comm_hook == NULL && d->group->size > 1 &&
                    !(d->desc.max_grad_norm > 0) && !d->shards.uses_slots && !d->desc.elastic;
  d->gpu = (cddp__gpu_work *)cddp__calloc(
      &d->group->host->allocator, 1, sizeof *d->gpu + (size_t)d->count * sizeof *d->gpu->segments);
  if (d->gpu == NULL) return CDDP_OUT_OF_MEMORY;
  d->gpu->segments = (cddp_segment *)(void *)(d->gpu + 1);
  r = cddp__cuda_result((int)cudaMalloc(&memory, d->layout.arena_bytes + scratch),
                        "cudaMalloc of gradients");
  if (r != CDDP_OK) return r;
  d->arena = (char *)memory;
  d->gpu->clip = (double *)(void *)(d->arena + d->layout.arena_bytes);
  if (d->hook_group != NULL && d->hook_group != d->group) /* a private group: always on `side` */
    d->hook_group->stream = (void *)cddp__device_of(d->comm)->side;
  return cddp__device_zero(memory, d->layout.bytes, d->group->stream);
}

/* free: first waits until no operation uses the memory; after a failure it aborts them. */
static void cddp__gpu_free(cddp_ddp *d) {
  cddp__device *device = d->comm != NULL ? cddp__device_of(d->comm) : NULL;
  (void)cddp__use_device(cddp__device_of(d->group)->index);
  if (device != NULL) {
    cddp__drain_buckets(d);
    if (cddp__load32(&d->group->left) == 0)
      (void)cddp__await_stream(cddp__device_of(d->group), cddp__main_stream(d->group), NULL);
    if (cddp__load32(&d->comm->left) == 0)
      (void)cddp__release_buffers(device, cddp__await_stream(device, device->side, NULL));
    (void)cudaStreamSynchronize(device->side); /* with the work queued at a failure */
  }
  (void)cudaStreamSynchronize(cddp__main_stream(d->group));
  if (d->gpu != NULL) cddp__scratch_free(&d->gpu->scratch);
  cddp__free(&d->group->host->allocator, d->gpu);
  cddp__device_free(d->group, d->arena);
  d->arena = NULL;
}

/* place_rows: writes the mean rows into dense gradients, for the kernels. Adjacent rows are copied
   together. */
static cddp_result cddp__gpu_place_rows(cddp_ddp *d) {
  void *stream = d->group->stream;
  cddp_result r = CDDP_OK;
  size_t first, end;
  int i;
  for (i = 0; r == CDDP_OK && i < d->count; i++) {
    const cddp__sparse *sparse = cddp__sparse_of(d, i);
    char *dense = d->arena + d->tensors[i].dense_offset;
    if (sparse == NULL) continue;
    r = cddp__device_zero(dense, sparse->rows * sparse->row_bytes, stream);
    for (first = 0; r == CDDP_OK && first < sparse->mean.n; first = end) {
      const int64_t *number = sparse->mean.number; /* of each row */
      end = first + 1; /* [first, end): adjacent rows */
      while (end < sparse->mean.n && number[end] == number[end - 1] + 1) end++;
      r = cddp__device_copy(dense + (size_t)number[first] * sparse->row_bytes,
                            sparse->mean.values + first * sparse->row_bytes,
                            (end - first) * sparse->row_bytes, stream);
    }
  }
  return r;
}

static const cddp__ddp_memory cddp__gpu_memory = {
    cddp__gpu_use, cddp__gpu_enter, cddp__device_copy, cddp__device_zero, cddp__gpu_alloc,
    cddp__gpu_free, cddp__gpu_scratch, cddp__gpu_meet, cddp__gpu_begin, cddp__gpu_reduce,
    cddp__gpu_sum, cddp__gpu_fence, cddp__gpu_await, cddp__gpu_broadcast, cddp__device_scale,
    cddp__gpu_place_rows, cddp__gpu_clip, cddp__gpu_norm, cddp__gpu_step, NULL /* publish */};

/* >>gpus ------------------------------------------------------------------------------------------
   Job: the functions of cddp.h's >>hooks (cddp__transfer and cddp__await_nccl_threads: >>device).
   Owns: the backends of groups on devices. */

/* cddp__backend.scratch. */
static cddp_result cddp__group_scratch(const cddp_group *g, size_t bytes, void **out) {
  return cddp__device_scratch(&cddp__device_of(g)->scratch, bytes, out);
}

#define CDDP__DEVICE_FUNCTIONS \
  cddp__device_start, cddp__device_wait, cddp__device_done, cddp__device_synchronize, \
      cddp__device_alloc, cddp__device_free, cddp__device_convert, cddp__device_before_split, \
      cddp__device_open_like, cddp__device_leave, cddp__device_close, cddp__group_scratch, \
      &cddp__gpu_memory
/* on_device, enqueues, functions, models' functions */
static const cddp__backend cddp__nccl_backend = {true, true, CDDP__DEVICE_FUNCTIONS};
static const cddp__backend cddp__staged_backend = {true, false, CDDP__DEVICE_FUNCTIONS};

/* Sets *device to the number of this rank's GPU, of `count` visible ones. */
static cddp_result cddp__device_number(const cddp_group *g, const cddp_group_desc *desc, bool nccl,
                                       int count, int *device) {
  bool numbered = desc->device[4] == ':'; /* "cuda:N" */
  int env_local_rank = -1; /* not set */
  cddp_result r = CDDP_OK;
  if (!g->host->one_process || g->host->size == 1) /* else LOCAL_RANK is of all threads */
    r = cddp__env_int("LOCAL_RANK", 0, INT_MAX, &env_local_rank);
  if (r != CDDP_OK) return r;
  if (numbered) *device = atoi(desc->device + 5);
  else if (env_local_rank >= 0) *device = env_local_rank;
  else *device = g->host->one_process ? g->host->index : g->local_rank;
  if (!numbered && (!nccl || count == 1)) *device %= count; /* count 1: only its own is visible */
  if (*device < count) return CDDP_OK;
  return CDDP__REFUSE("rank %d needs cuda:%d, but the GPUs visible here are %d, from cuda:0 on: "
                      "start at most %d ranks here, or let them share with backend \"cpu\"",
                      g->rank, *device, count, count);
}

/* Chooses this rank's device, makes it current, and describes it for the other ranks.
     desc   device is "cuda" or "cuda:N"
     nccl   the backend is NCCL, with a GPU for each rank; with "cpu" ranks share GPUs */
static cddp_result cddp__choose_device(const cddp_group *g, const cddp_group_desc *desc, bool nccl,
                                       cddp__device_report *out) {
  const char *nccl_host = getenv("NCCL_HOSTID");
  const char *multi_rank = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  bool may_share;
  int device, count = 0, version = 0, i;
  struct cudaDeviceProp properties;
  cddp_result r;
  cudaError_t e = cudaGetDeviceCount(&count);
  memset(out, 0, sizeof *out);
  memset(&properties, 0, sizeof properties);
  if (e != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    (void)cudaRuntimeGetVersion(&version); /* for the text: 12040 is 12.4 */
    return cddp__fail(CDDP_CUDA,
                      "CUDA finds no GPU here (%s): the NVIDIA driver is missing or too old for "
                      "CUDA %d.%d, CUDA_VISIBLE_DEVICES hides all, or the process used CUDA before "
                      "it forked (cddp_spawn must come first); device \"cpu\" needs no GPU",
                      cudaGetErrorString(e), version / 1000, version % 1000 / 10);
  }
  if ((r = cddp__device_number(g, desc, nccl, count, &device)) != CDDP_OK) return r;
  if (nccl) r = cddp__check_blocking();
  if (r == CDDP_OK) r = CDDP__CUDA(cudaSetDevice, device);
  if (r == CDDP_OK) r = CDDP__CUDA(cudaGetDeviceProperties, &properties, device);
  may_share = ncclGetVersion(&version) == ncclSuccess && version >= 23000 /* 2.30 */ &&
              multi_rank != NULL && strcmp(multi_rank, "1") == 0;
  for (i = 0; i < 16 && !may_share; i++) /* the uuid of a GPU, or of a part of one */
    snprintf(out->gpu + 2 * i, 3, "%02x", (unsigned char)properties.uuid.bytes[i]);
  out->device = device;
  out->kernels = cddp__registered_kernels != NULL;
  out->host = cddp__host_identity(); /* a GPU is the same only on the same machine */
  if (nccl_host != NULL) /* NCCL's name of the host: with different names, tests share a GPU */
    out->host = cddp__hash64(1 /* seed */, nccl_host, strlen(nccl_host));
  return r;
}

/* Fails, on all ranks, if two of the n ranks have the same GPU and may not share it. */
static cddp_result cddp__check_gpus(const cddp_group *g, const cddp__device_report *reports,
                                    int n) {
  int i, k;
  for (i = 0; i < n; i++)
    for (k = 0; k < i; k++) {
      if (reports[i].gpu[0] == 0 /* may share */ || strcmp(reports[i].gpu, reports[k].gpu) != 0 ||
          reports[i].host != reports[k].host)
        continue;
      return CDDP__REFUSE(
          "%s and %s both have cuda:%d (%s), but NCCL needs a GPU for each rank: set device to "
          "\"cuda\" for cuda:LOCAL_RANK, start fewer ranks, or let them share with backend \"cpu\" "
          "or, from NCCL 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1",
          cddp__name_rank(g, k).s, cddp__name_rank(g, i).s, reports[i].device, reports[i].gpu);
    }
  return CDDP_OK;
}

/* Collective: creates the device context of a group that has none. Fails on all ranks if one cannot
   have its device. A process that joins an elastic job is alone in its first group, and connects in
   the model's groups later. */
static cddp_result cddp__give_device(cddp_group *g, const cddp_group_desc *desc) {
  const cddp_allocator *allocator = &g->host->allocator;
  const char *backend = cddp__backend_name(desc);
  bool nccl = backend == NULL /* the default */ || strcmp(backend, "nccl") == 0;
  cddp__device_report mine, *reports;
  bool kernels = true;
  bool joins = g->host->joined && g->id == 0; /* a joining process's first group: no exchange */
  int report_count = joins ? 1 : g->size, i;
  cddp_result r;
  reports = (cddp__device_report *)cddp__malloc(allocator, (size_t)g->size * sizeof *reports);
  if (reports == NULL) return cddp__break(g, CDDP_OUT_OF_MEMORY);
  r = cddp__choose_device(g, desc, nccl, &mine);
  if (joins) reports[0] = mine;
  else r = cddp__consensus(g, r, &mine, sizeof mine, reports);
  for (i = 0; r == CDDP_OK && i < report_count; i++) kernels = kernels && reports[i].kernels != 0;
  if (r == CDDP_OK && nccl) r = cddp__check_gpus(g, reports, report_count);
  cddp__free(allocator, reports);
  if (r != CDDP_OK) return r;
  if (mine.kernels != 0)
    r = cddp__cuda_result((cddp__registered_kernels->load)(), "loading kernels");
  if (r != CDDP_OK) return cddp__break(g, r);
  r = cddp__device_open(g, mine.device, nccl ? &cddp__nccl_backend : &cddp__staged_backend,
                        kernels ? cddp__registered_kernels : NULL, !joins);
  if (r == CDDP_OK && nccl && mine.gpu[0] != 0) /* for cddp__member.gpu; 0: ranks can share it */
    g->gpu = cddp__hash64( /* of gpu and host */
        1 /* seed */, mine.gpu, sizeof mine - offsetof(cddp__device_report, gpu));
  return r;
}

/* Returns whether p is device memory, or managed. g: a group, or NULL. CUDA's answer creates a
   context on the current device, so the group's device becomes current first. Without a group, the
   only device of all groups does, in a thread that has chosen none (its current one is 0). */
static bool cddp__on_device(const cddp_group *g, const void *p) {
  struct cudaPointerAttributes attributes;
  uint32_t only = cddp__load32(&cddp__device_groups); /* 1 + the device; 0: none; or several */
  int current = -1;
  if (p == NULL || !cddp__cuda_in_use()) return false;
  if (g != NULL && g->backend->on_device)
    (void)cddp__use_device(cddp__device_of(g)->index);
  else if (only > 1 && only != CDDP__SEVERAL_DEVICES && cudaGetDevice(&current) == cudaSuccess &&
           current == 0)
    (void)cddp__use_device((int)only - 1);
  if (cudaPointerGetAttributes(&attributes, p) == cudaSuccess)
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  (void)cudaGetLastError(); /* no device: no device memory */
  return false;
}

/* Waits on the host for the work on the group's stream, or without a device for all work on the
   current device. Refuses a capture. */
static cddp_result cddp__await_device(cddp_group *g, enum cddp__await what) {
  cddp_result r;
  if (g == NULL || !g->backend->on_device)
    return cddp__cuda_result((int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  r = cddp__refuse_capture(cddp__main_stream(g), CDDP_INVALID_ARGUMENT,
                           "a checkpoint waits on the host");
  if (r == CDDP_OK && what == CDDP__AWAIT_STREAM)
    return CDDP__CUDA(cudaStreamSynchronize, cddp__main_stream(g));
  return r == CDDP_OK ? cddp__device_synchronize(g) : r;
}

/* Selects the device's backend if the parameters are on a device, and allocates the states there.
   Otherwise the optimizer keeps the CPU's. */
static cddp_result cddp__select_optim_backend(cddp_optim *optim) {
  const cddp_ddp *d = optim->desc.ddp;
  struct cudaPointerAttributes attributes;
  const void *on_device = NULL, *on_host = NULL; /* the last parameter in each; NULL: none */
  cddp_result r;
  int i;
  /* Parameters of a model are where its group is, others where their addresses say. */
  if (d != NULL ? !d->group->backend->on_device : !cddp__cuda_in_use()) return CDDP_OK;
  for (i = 0; i < optim->count; i++) {
    const void *at = optim->params[i].count > 0 ? optim->params[i].data : NULL;
    if (cddp__on_device(d != NULL ? d->group : NULL, at)) on_device = at;
    else if (at != NULL) on_host = at;
  }
  if (on_device != NULL && on_host != NULL)
    return CDDP__REFUSE("some parameters are on a GPU and others in host memory: a cddp_optim "
                        "needs all in one place");
  if (on_device == NULL) return CDDP_OK;
  if ((r = CDDP__CUDA(cudaPointerGetAttributes, &attributes, on_device)) != CDDP_OK) return r;
  optim->device = d != NULL ? cddp__device_of(d->group)->index : attributes.device;
  if (cddp__launch_of(optim->algorithm) == NULL)
    return cddp__fail(CDDP_UNSUPPORTED, "%s has no kernel for GPUs: its parameters must be in host "
                      "memory", optim->algorithm->name);
  if ((r = cddp__need_kernels(optim->algorithm->name)) != CDDP_OK) return r;
  optim->segments = (cddp_segment *)cddp__malloc( /* and `launched` of cddp__device_step */
      NULL, (size_t)optim->count * (sizeof *optim->segments + sizeof(bool)));
  if (optim->segments == NULL) return CDDP_OUT_OF_MEMORY;
  optim->backend = &cddp__device_optim;
  if (optim->state_count == 0) return CDDP_OK; /* SGD without momentum */
  return cddp__states_alloc(optim); /* waits: zeroed before a step on any stream */
}

/* Returns whether the stream is known not to be captured: a query can fail. */
static bool cddp__not_captured(cudaStream_t stream) {
  enum cudaStreamCaptureStatus status;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusNone;
}

/* cddp_set_stream: the new stream waits for the work on the old one. Nothing is done if one is
   captured: the next call of the group returns an error, as cddp_set_stream has no result. */
static void cddp__follow_stream(cddp_group *g, void *stream) {
  cudaStream_t from = cddp__main_stream(g), to = (cudaStream_t)stream;
  if (cddp__use_device(cddp__device_of(g)->index) != CDDP_OK) return; /* the next call returns it */
  if (cddp__not_captured(from) && cddp__not_captured(to))
    (void)cddp__stream_after(cddp__device_of(g), to, from);
  (void)cudaGetLastError(); /* of the queries */
}

CDDPDEF void cddp_register_kernels(const cddp_kernels *kernels) {
  /* Kernels of another version could have other structs. */
  cddp__registered_kernels =
      kernels != NULL && kernels->version == CDDP_VERSION ? kernels : NULL;
}

#endif /* CDDP__DEVICE_ROOMS */
