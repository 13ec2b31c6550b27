/* cddp_kernels.cuh - the CUDA kernels of cddp.h - v1.0
   Public domain or MIT, at your choice (end of cddp.h). No warranty; use at your own risk.

   A program in one .cu file (nvcc -O3 -arch=native train.cu -lnccl -lcublas):

       #define CDDP_IMPLEMENTATION
       #include "cddp_kernels.cuh"      // includes cddp.h with CDDP_CUDA

   If a C or C++ file of a program implements cddp.h, the program needs one .cu file, linked to the
   rest, with

       #define CDDP_KERNELS_IMPLEMENTATION
       #include "cddp_kernels.cuh"

   cddp.h then uses these kernels for optimizers, clipping and compression: their table registers
   itself before main. Other files, compiled by nvcc or by a C++ compiler, can include this one for
   the functions below. Define CDDP_KERNELS_NO_CUBLAS to leave out the linear layer and -lcublas.

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

   scratch is CDDP_CUDA_SCRATCH_BYTES of device memory that only one stream uses at a time. stats is
   double[2] in device memory: the mean loss and the number of rows classified correctly are ADDED
   to it, so that a loop can read it once an epoch. Zero it with cudaMemsetAsync.

   CONTENTS  >>declarations  >>primitives  >>segments (SGD, AdamW, scale)  >>shards  >>sums
             >>arrays  >>layers  >>table */

#ifndef CDDP_KERNELS_CUH
#define CDDP_KERNELS_CUH

#if defined(CDDP_IMPLEMENTATION) && !defined(CDDP_KERNELS_IMPLEMENTATION)
#define CDDP_KERNELS_IMPLEMENTATION
#endif
#ifndef CDDP_CUDA
#define CDDP_CUDA
#endif
#include "cddp.h"

#include <cuda_runtime.h>
#ifndef CDDP_KERNELS_NO_CUBLAS
#include <cublas_v2.h>
#endif

/* >>declarations ------------------------------------------------------------------------------- */

#define CDDP_CUDA_BLOCKS 1024 /* largest number of partial sums of a reduction */
#define CDDP_CUDA_SCRATCH_BYTES ((2 + 2 * CDDP_CUDA_BLOCKS) * sizeof(double))
#define CDDP_CUDA_ORDER_BYTES(n) ((size_t)(n) * 2 * sizeof(uint64_t)) /* to sort n ids */

#ifdef __cplusplus
extern "C" {
#endif

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
#ifndef CDDP_KERNELS_NO_CUBLAS
/* y[rows][out] = x[rows][in] w[out][in]' + b[out], and its ReLU if relu is set. b can be NULL. A
   cuBLAS failure is cudaErrorUnknown. Sets the handle's stream. */
cudaError_t cddp_cuda_linear(cublasHandle_t blas, const float *x, const float *w, const float *b,
                             float *y, int rows, int in, int out, bool relu, cudaStream_t stream);
/* dw += dy' x, db += column sums of dy, dx = dy w. dx and db can be NULL. */
cudaError_t cddp_cuda_linear_backward(cublasHandle_t blas, const float *x, const float *w,
                                      const float *dy, float *dx, float *dw, float *db, int rows,
                                      int in, int out, cudaStream_t stream);
#endif

#ifdef __cplusplus
}
#endif
#endif /* CDDP_KERNELS_CUH */

#if defined(CDDP_KERNELS_IMPLEMENTATION) && !defined(CDDP_KERNELS_IMPLEMENTATION_DONE)
#define CDDP_KERNELS_IMPLEMENTATION_DONE

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <string.h>

/* >>primitives --------------------------------------------------------------------------------- */

#ifdef __CUDACC__
#define CDDP__CU_UNROLLED _Pragma("unroll")
#else
#define CDDP__CU_UNROLLED
#endif

enum { CDDP__CU_THREADS = 256, CDDP__CU_UNROLL = 4, CDDP__CU_PIECES = 64 };
#define CDDP__CU_KERNEL static __global__ void __launch_bounds__(CDDP__CU_THREADS)

/* An element's type, the type of its arithmetic, and the conversions between them. */
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

/* N elements that a thread loads or stores with one instruction. */
template <typename T, size_t N> struct alignas(sizeof(T) * N) cddp__cu_pack { T v[N]; };

static __device__ size_t cddp__cu_thread() {
  return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}
static __device__ size_t cddp__cu_all_threads() { return (size_t)gridDim.x * blockDim.x; }

/* Returns the block's sum in thread 0: each warp adds its lanes pairwise, then warp 0 adds the
   warps' sums. All threads of the block must call it; blockDim.x is CDDP__CU_THREADS. */
static __device__ double cddp__cu_block_sum(double x) {
  __shared__ double warp[CDDP__CU_THREADS / 32];
  int lane = (int)(threadIdx.x % 32), i;
  for (i = 16; i > 0; i /= 2) x += __shfl_down_sync(0xffffffffu, x, (unsigned)i);
  __syncthreads(); /* all warps have read the previous call's sums */
  if (lane == 0) warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < CDDP__CU_THREADS / 32 ? warp[lane] : 0;
  for (i = 16; i > 0; i /= 2) x += __shfl_down_sync(0xffffffffu, x, (unsigned)i);
  return x;
}

/* True while the thread loads kernels instead of launching them: see cddp__cu_table_load. */
static thread_local bool cddp__cu_loads;

/* Launches a kernel and returns the error of this launch; errors of earlier calls stay pending. */
template <typename... P, typename... A>
static cudaError_t cddp__cu_launch_threads(void (*kernel)(P...), dim3 grid, unsigned threads,
                                           cudaStream_t stream, A... arguments) {
  cudaLaunchConfig_t c;
  cudaFuncAttributes about;
  if (cddp__cu_loads) return cudaFuncGetAttributes(&about, (const void *)kernel);
  memset((void *)&c, 0, sizeof c);
  c.gridDim = grid;
  c.blockDim = dim3(threads);
  c.stream = stream;
  return cudaLaunchKernelEx(&c, kernel, static_cast<P>(arguments)...);
}
template <typename... P, typename... A>
static cudaError_t cddp__cu_launch(void (*kernel)(P...), dim3 grid, cudaStream_t stream,
                                   A... arguments) {
  return cddp__cu_launch_threads(kernel, grid, CDDP__CU_THREADS, stream, arguments...);
}

/* Blocks for n elements, `each` per block, at most `most`: kernels stride over the grid. */
static unsigned cddp__cu_blocks(size_t n, size_t each, size_t most) {
  size_t blocks = n / each + (n % each != 0);
  return (unsigned)(blocks < most ? blocks : most);
}

/* Blocks for n elements, of which a thread processes four or more. */
static unsigned cddp__cu_grid(size_t n) {
  return cddp__cu_blocks(n, 4 * CDDP__CU_THREADS, 1u << 16);
}

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
  char *data, *grad, *momentum;
  char *copy; /* in half precision; or the master, f32 */
  size_t count, first_chunk; /* elements; chunks of all pieces before */
  bool packed;
} cddp__cu_piece;

typedef struct cddp__cu_pieces {
  cddp__cu_piece piece[CDDP__CU_PIECES];
  size_t chunks;
  int count;
} cddp__cu_pieces;

static_assert(sizeof(cddp__cu_pieces) <= 3900, "a kernel's parameters take up to 4 KiB");

/* Bits for the arrays of a segment, in an operation's READS and WRITES. */
enum { CDDP__CU_DATA = 1, CDDP__CU_GRAD = 2, CDDP__CU_MOMENTUM = 4 };

/* The defaults of an operation. */
struct cddp__cu_each {
  enum {
    BLOCKS = 1 << 30,         /* largest number of blocks */
    AT_ONCE = CDDP__CU_UNROLL /* packs that a thread loads together; fewer if registers are short */
  };
  /* Returns false if this launch leaves the array out, though READS or WRITES has it. */
  __device__ bool reads_momentum() const { return true; }
  __device__ bool writes_momentum() const { return true; }
  __device__ bool writes_grad() const { return true; }
  __device__ void end() const {} /* called after a block's last chunk */
  /* Called on the host after a launch. */
  cudaError_t launched(unsigned, cudaStream_t) const { return cudaSuccess; }
};

/* Elements i .. i + N of a piece. Operations on further arrays have their own overload. */
template <size_t N, typename T, typename Op>
static __device__ void cddp__cu_apply(const Op &op, const cddp__cu_piece &, size_t, T *d, T *g,
                                      T *m) {
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) op.apply(d[k], g[k], m[k]);
}

/* Runs K packs of N elements each on one thread. All loads come first, so that many are in flight.
   All packs must exist. */
template <size_t N, size_t K, typename T, typename Op>
static __device__ void cddp__cu_do_packs(const cddp__cu_piece &p, size_t first, const Op &op) {
  typedef cddp__cu_pack<T, N> pack;
  pack d[K] = {}, g[K] = {}, m[K] = {};
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
    op.template copy<N>(p, i * N, d[u].v);
  }
}

template <typename T, typename Op>
CDDP__CU_KERNEL cddp__cu_segments_kernel(const cddp__cu_pieces s, const Op given) {
  const size_t N = 16 / sizeof(T), chunk = (size_t)CDDP__CU_THREADS * CDDP__CU_UNROLL * N;
  Op op = given;
  op.begin();
  for (size_t c = blockIdx.x; c < s.chunks; c += gridDim.x) {
    int low = 0, high = s.count - 1;
    while (low < high) { /* the last piece that starts at or before chunk c */
      int middle = (low + high + 1) / 2;
      if (s.piece[middle].first_chunk <= c) low = middle;
      else high = middle - 1;
    }
    const cddp__cu_piece &p = s.piece[low];
    size_t at = (c - p.first_chunk) * chunk, end = at + chunk < p.count ? at + chunk : p.count;
    if (p.packed && end - at == chunk) {
      for (size_t u = 0; u < CDDP__CU_UNROLL; u += Op::AT_ONCE)
        cddp__cu_do_packs<N, Op::AT_ONCE, T>(p, at / N + threadIdx.x + u * CDDP__CU_THREADS, op);
      continue;
    }
    for (size_t i = at / N + threadIdx.x; p.packed && i < end / N; i += CDDP__CU_THREADS)
      cddp__cu_do_packs<N, 1, T>(p, i, op);
    for (size_t i = (p.packed ? end - end % N : at) + threadIdx.x; i < end; i += CDDP__CU_THREADS)
      cddp__cu_do_packs<1, 1, T>(p, i, op);
  }
  op.end();
}

/* The offset of the arrays from a multiple of 16 bytes; -1: the offsets differ. */
static int cddp__cu_offset(const cddp_segment *s, const void *copy, size_t size) {
  const void *p[3] = {s->data, s->grad, s->momentum};
  int offset = -1, i;
  if (s->master != NULL) /* packs of states and masters have twice the size */
    return (((uintptr_t)s->data | (uintptr_t)s->grad) % 16 |
            ((uintptr_t)s->momentum | (uintptr_t)s->master) % 32) == 0 ? 0 : -1;
  for (i = 0; i < 3; i++) {
    int mine = (int)((uintptr_t)p[i] % 16);
    if (p[i] == NULL) continue;
    if (offset >= 0 && mine != offset) return -1;
    offset = mine;
  }
  if (copy != NULL && offset >= 0 && (uintptr_t)copy % 8 != (uintptr_t)offset / size * 2) return -1;
  return offset;
}

static char *cddp__cu_at(void *p, size_t bytes) { return p != NULL ? (char *)p + bytes : NULL; }

static void cddp__cu_add_piece(cddp__cu_pieces *t, const cddp_segment *s, void *copy, size_t at,
                            size_t count, size_t size, bool packed) {
  const size_t chunk = (size_t)CDDP__CU_THREADS * CDDP__CU_UNROLL * (16 / size);
  cddp__cu_piece *p = &t->piece[t->count++];
  p->data = cddp__cu_at(s->data, at * size);
  p->grad = cddp__cu_at(s->grad, at * size);
  p->momentum = cddp__cu_at(s->momentum, at * (s->master != NULL ? sizeof(float) : size));
  p->copy = s->master != NULL ? cddp__cu_at(s->master, at * sizeof(float))
                              : cddp__cu_at(copy, at * 2);
  p->count = count;
  p->first_chunk = t->chunks;
  p->packed = packed;
  t->chunks += count / chunk + (count % chunk != 0);
}

template <typename T, typename Op>
static cudaError_t cddp__cu_flush(cddp__cu_pieces *t, const Op &op, cudaStream_t stream) {
  unsigned blocks = cddp__cu_blocks(t->chunks, 1, Op::BLOCKS);
  cudaError_t e = cudaSuccess;
  if (t->count > 0) e = cddp__cu_launch(cddp__cu_segments_kernel<T, Op>, blocks, stream, *t, op);
  if (t->count > 0 && e == cudaSuccess) e = op.launched(blocks, stream);
  t->count = 0;
  t->chunks = 0;
  return e;
}

template <typename T, typename Op>
static cudaError_t cddp__cu_segments(const cddp_segment *s, void *const *copies, int n,
                                     const Op &op, cudaStream_t stream) {
  cddp__cu_pieces t;
  cudaError_t e = cudaSuccess;
  memset((void *)&t, 0, sizeof t);
  for (int i = 0; i < n && e == cudaSuccess; i++) {
    void *copy = copies != NULL ? copies[i] : NULL;
    int offset = cddp__cu_offset(&s[i], copy, sizeof(T));
    size_t head = offset > 0 ? (16 - (size_t)offset) / sizeof(T) : 0;
    if (s[i].count == 0) continue;
    if (head > s[i].count) head = s[i].count;
    if (t.count + 2 > CDDP__CU_PIECES) e = cddp__cu_flush<T>(&t, op, stream);
    if (e != cudaSuccess) break;
    if (head > 0) cddp__cu_add_piece(&t, &s[i], copy, 0, head, sizeof(T), false);
    if (s[i].count > head)
      cddp__cu_add_piece(&t, &s[i], copy, head, s[i].count - head, sizeof(T), offset >= 0);
  }
  return e == cudaSuccess ? cddp__cu_flush<T>(&t, op, stream) : e;
}

/* Calls fn<T>(...) for dtype's type. */
#define CDDP__CU_DISPATCH_TYPE(dtype, fn, ...)                         \
  (dtype) == CDDP_F32    ? fn<float>(__VA_ARGS__)                   \
  : (dtype) == CDDP_F64  ? fn<double>(__VA_ARGS__)                  \
  : (dtype) == CDDP_F16  ? fn<__half>(__VA_ARGS__)                  \
  : (dtype) == CDDP_BF16 ? fn<__nv_bfloat16>(__VA_ARGS__)           \
                         : cudaErrorInvalidValue

/* The rule's numbers in the type of the arithmetic. */
template <typename C> struct cddp__cu_rule {
  C factor, clip, step, keep, momentum, intake, decay; /* keep: momentum, not rounded to T */
  bool has_factor, has_decay, has_momentum, first, zeroes, nesterov, maximize;
  const double *scratch; /* clipping: the factor is scratch[1]; NULL: none */
};

/* d = factor * g; d = clip * d; d = -d if maximize; d = d + decay * p
   m = first ? d : momentum * m + intake * d
   d = nesterov ? d + momentum * m : m
   p = p - lr * d
   Each a + f * b is rounded once. f16 and bf16 round each result to their type, as >>optim in
   cddp.h does. Variants of the rule are flags, the same for all threads, and not separate kernels:
   a driver that compiles kernels at program start has fewer to compile. */
template <typename T, typename Copy> struct cddp__cu_sgd_op : cddp__cu_each {
  typedef typename cddp__cu_type<T>::C C;
  enum { READS = CDDP__CU_DATA | CDDP__CU_GRAD | CDDP__CU_MOMENTUM, WRITES = READS };
  cddp__cu_rule<C> r;
  Copy copies;
  __device__ bool reads_momentum() const { return r.has_momentum && !r.first; }
  __device__ bool writes_momentum() const { return r.has_momentum; }
  __device__ bool writes_grad() const { return r.zeroes; }
  __device__ void begin() {
    if (r.scratch != NULL) r.clip = (C)r.scratch[1];
  }
  __device__ C add(C a, C b, C f) const { /* a + f * b */
    return cddp__cu_rounded<T>(cddp__cu_fma(f, b, a));
  }
  __device__ void apply(T &data, T &grad, T &moment) const {
    C p = cddp__cu_load(data), d = cddp__cu_load(grad), m;
    if (r.has_factor) d = cddp__cu_rounded<T>(cddp__cu_mul(d, r.factor));
    if (r.scratch != NULL) d = cddp__cu_rounded<T>(cddp__cu_mul(d, r.clip));
    if (r.maximize) d = -d;
    if (r.has_decay) d = add(d, p, r.decay);
    if (r.has_momentum) {
      m = d;
      if (!r.first) {
        m = cddp__cu_rounded<T>(cddp__cu_mul(r.keep, cddp__cu_load(moment)));
        m = add(m, d, r.intake);
      }
      d = r.nesterov ? add(d, m, r.momentum) : m;
      moment = cddp__cu_store<T>(m);
    }
    data = cddp__cu_store<T>(add(p, d, r.step));
    grad = cddp__cu_store<T>((C)0); /* stored only if writes_grad() */
  }
  template <size_t N> __device__ void copy(const cddp__cu_piece &p, size_t i, const T *d) const {
    copies.template copy<N>(p, i, d);
  }
};

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

/* Rounds x to T only once: first x is rounded to odd, then to the nearest T. */
template <typename T> static double cddp__cu_scalar(double x) { return x; }
static uint32_t cddp__cu_float_bits_odd(double x) {
  float y = (float)x;
  uint32_t u;
  memcpy(&u, &y, 4);
  if (x != x || (double)y == x) return u;
  if (fabs((double)y) > fabs(x)) u--;
  return u | 1;
}
static double cddp__cu_bits_float(uint32_t u) {
  float y;
  memcpy(&y, &u, 4);
  return (double)y;
}
template <> double cddp__cu_scalar<__nv_bfloat16>(double x) {
  uint32_t u = cddp__cu_float_bits_odd(x);
  return cddp__cu_bits_float((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}
template <> double cddp__cu_scalar<__half>(double x) {
  double y = cddp__cu_bits_float(cddp__cu_float_bits_odd(x)), a = fabs(y), unit;
  int e;
  if (!(a < 65520)) return y != y ? y : y > 0 ? HUGE_VAL : -HUGE_VAL;
  frexp(a, &e);
  unit = ldexp(1.0, (e < -13 ? -13 : e) - 11); /* the value of the last place */
  return nearbyint(y / unit) * unit;
}

template <typename T>
static cddp__cu_rule<typename cddp__cu_type<T>::C>
cddp__cu_make_rule(const cddp_sgd_desc *d, double factor, const double *clip, unsigned flags) {
  typedef typename cddp__cu_type<T>::C C;
  cddp__cu_rule<C> r;
  r.factor = (C)factor;
  r.clip = (C)1;
  r.scratch = clip;
  r.step = (C)cddp__cu_scalar<T>(-d->lr);
  r.keep = (C)d->momentum;
  r.momentum = (C)cddp__cu_scalar<T>(d->momentum);
  r.intake = (C)cddp__cu_scalar<T>(1.0 - d->dampening);
  r.decay = (C)cddp__cu_scalar<T>(d->weight_decay);
  r.has_factor = factor != 1;
  r.has_decay = d->weight_decay != 0;
  r.has_momentum = d->momentum != 0;
  r.first = (flags & CDDP_SGD_FIRST) != 0;
  r.zeroes = (flags & CDDP_SGD_ZERO) != 0;
  r.nesterov = d->nesterov;
  r.maximize = d->maximize;
  return r;
}

/* Runs op, an operation on f32, on the masters of weights of type H. */
template <typename H, typename Op> struct cddp__cu_master_op : cddp__cu_no_copy {
  enum {
    READS = CDDP__CU_GRAD,
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
  pack w = *master, m = {}, v;
  if (op.op.reads_momentum()) m = *moment;
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) {
    v.v[k] = cddp__cu_rounded<H>(cddp__cu_mul(cddp__cu_load(g[k]), op.factor));
    if (op.scratch != NULL) v.v[k] = cddp__cu_rounded<H>(cddp__cu_mul(v.v[k], op.clip));
  }
  cddp__cu_apply<N>(op.op, p, i, w.v, v.v, m.v);
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) {
    d[k] = cddp__cu_store<H>(w.v[k]);
    g[k] = cddp__cu_store<H>(0.0f);
  }
  *master = w;
  if (op.op.writes_momentum()) *moment = m;
}

template <typename H, typename Op>
static cudaError_t cddp__cu_on_masters(const cddp_segment *s, int n, const Op &op, double factor,
                                       const double *clip, cudaStream_t stream) {
  cddp__cu_master_op<H, Op> m = {};
  m.op = op;
  m.factor = (float)factor;
  m.scratch = clip;
  return cddp__cu_segments<H>(s, NULL, n, m, stream);
}

/* H: the type of the weights: T, or half precision with masters of type T. Also below. */
template <typename T, typename H, typename Copy>
static cudaError_t cddp__cu_sgd_as(const cddp_segment *s, void *const *copies, int n,
                                   const cddp_sgd_desc *rule, double factor, const double *clip,
                                   unsigned flags, cudaStream_t stream) {
  cddp__cu_sgd_op<T, Copy> op = {};
  if constexpr (sizeof(H) < sizeof(T)) {
    op.r = cddp__cu_make_rule<T>(rule, 1, NULL, flags);
    return cddp__cu_on_masters<H>(s, n, op, factor, clip, stream);
  }
  op.r = cddp__cu_make_rule<T>(rule, factor, clip, flags);
  return cddp__cu_segments<T>(s, copies, n, op, stream);
}

template <typename T>
static cudaError_t cddp__cu_sgd_plain(const cddp_segment *s, int n, const cddp_sgd_desc *rule,
                                      double factor, const double *clip, unsigned flags,
                                      cudaStream_t stream) {
  return cddp__cu_sgd_as<T, T, cddp__cu_no_copy>(s, NULL, n, rule, factor, clip, flags, stream);
}

/* Returns whether the segments have masters. All have one, or none: cddp__cu_segments_ok. */
static bool cddp__cu_masters(const cddp_segment *s, int n) {
  return n > 0 && s[0].master != NULL;
}

static bool cddp__cu_segments_ok(const cddp_segment *s, int n, bool data, bool momentum) {
  if (n < 0 || (n > 0 && s == NULL)) return false;
  for (int i = 0; i < n; i++)
    if ((s[i].master != NULL) != cddp__cu_masters(s, n) ||
        (s[i].count > 0 && (s[i].grad == NULL || (data && s[i].data == NULL) ||
                            (momentum && s[i].momentum == NULL))))
      return false;
  return true;
}

static int cddp__cu_sgd(const cddp_segment *s, int n, cddp_dtype dtype, const cddp_sgd_desc *rule,
                        double factor, const double *clip, unsigned flags, void *on) {
  cudaStream_t stream = (cudaStream_t)on;
  if (rule == NULL || !cddp__cu_segments_ok(s, n, true, rule->momentum != 0))
    return cudaErrorInvalidValue;
  if (cddp__cu_masters(s, n))
    return dtype == CDDP_F16 ? cddp__cu_sgd_as<float, __half, cddp__cu_no_copy>(
                                   s, NULL, n, rule, factor, clip, flags, stream)
           : dtype == CDDP_BF16 ? cddp__cu_sgd_as<float, __nv_bfloat16, cddp__cu_no_copy>(
                                      s, NULL, n, rule, factor, clip, flags, stream)
                                : cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_sgd_plain, s, n, rule, factor, clip, flags, stream);
}

extern "C" cudaError_t cddp_cuda_sgd(const cddp_segment *s, int n, cddp_dtype dtype,
                                     const cddp_sgd_desc *rule, unsigned flags,
                                     cudaStream_t stream) {
  return (cudaError_t)cddp__cu_sgd(s, n, dtype, rule, 1, NULL, flags, stream);
}

extern "C" cudaError_t cddp_cuda_sgd_copies(const cddp_segment *s, void *const *copies, int n,
                                            cddp_dtype copy_dtype, const cddp_sgd_desc *rule,
                                            unsigned flags, cudaStream_t stream) {
  if (rule == NULL || !cddp__cu_segments_ok(s, n, true, rule->momentum != 0) ||
      (n > 0 && copies == NULL))
    return cudaErrorInvalidValue;
  for (int i = 0; i < n; i++)
    if (s[i].count > 0 && copies[i] == NULL) return cudaErrorInvalidValue;
  if (copy_dtype == CDDP_F16)
    return cddp__cu_sgd_as<float, float, cddp__cu_half_copy<__half>>(s, copies, n, rule, 1, NULL,
                                                                     flags, stream);
  if (copy_dtype == CDDP_BF16)
    return cddp__cu_sgd_as<float, float, cddp__cu_half_copy<__nv_bfloat16>>(
        s, copies, n, rule, 1, NULL, flags, stream);
  return cudaErrorInvalidValue;
}

/* AdamW, with the arithmetic of CDDP__ADAMW_STEP in cddp.h. */
template <typename T> struct cddp__cu_adamw_op : cddp__cu_no_copy {
  enum {
    READS = CDDP__CU_DATA | CDDP__CU_GRAD | CDDP__CU_MOMENTUM,
    WRITES = READS,
    AT_ONCE = sizeof(T) == 8 ? 2 : CDDP__CU_UNROLL
  };
  T factor, clip, step, decay, lerp, keep, take, root, eps;
  bool near, amsgrad, zeroes;
  size_t stride;
  const double *scratch; /* clipping: the factor is scratch[1]; NULL: none */
  __device__ bool writes_grad() const { return zeroes; }
  __device__ void begin() {
    if (scratch != NULL) clip = (T)scratch[1];
  }
  __device__ void one(T &x, T &grad, T &a, T &b, T &most) const {
    T v = cddp__cu_mul(grad, factor), w;
    if (scratch != NULL) v = cddp__cu_mul(v, clip);
    a = cddp__cu_fma(lerp, cddp__cu_sub(v, a), near ? a : v);
    b = cddp__cu_fma(cddp__cu_mul(take, v), v, cddp__cu_mul(b, keep));
    most = amsgrad && (most > b || most != most) ? most : b;
    w = cddp__cu_add(cddp__cu_div(cddp__cu_sqrt(most), root), eps);
    x = cddp__cu_add(cddp__cu_mul(x, decay), cddp__cu_div(cddp__cu_mul(step, a), w));
    grad = 0; /* stored only if writes_grad() */
  }
};

template <size_t N, typename T>
static __device__ void cddp__cu_apply(const cddp__cu_adamw_op<T> &op, const cddp__cu_piece &p,
                                      size_t i, T *d, T *g, T *m) {
  typedef cddp__cu_pack<T, N> pack;
  pack *square = (pack *)(void *)(p.momentum + op.stride + i * sizeof(T));
  pack *most = (pack *)(void *)(p.momentum + 2 * op.stride + i * sizeof(T));
  pack b = *square, c = b;
  if (op.amsgrad) c = *most;
  CDDP__CU_UNROLLED for (size_t k = 0; k < N; k++) op.one(d[k], g[k], m[k], b.v[k], c.v[k]);
  *square = b;
  if (op.amsgrad) *most = c;
}

/* H: f32, f64, or f16 and bf16 with masters. */
template <typename H>
static cudaError_t cddp__cu_adamw_on(const cddp_segment *s, int n, const cddp_adamw_step *rule,
                                     double factor, const double *clip, unsigned flags,
                                     cudaStream_t stream) {
  typedef typename cddp__cu_type<H>::C T;
  cddp__cu_adamw_op<T> op = {};
  const bool masters = sizeof(H) < sizeof(T);
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

static int cddp__cu_adamw(const cddp_segment *s, int n, cddp_dtype dtype,
                          const cddp_adamw_step *rule, double factor, const double *clip,
                          unsigned flags, void *on) {
  cudaStream_t stream = (cudaStream_t)on;
  if (rule == NULL || !cddp__cu_segments_ok(s, n, true, true)) return cudaErrorInvalidValue;
  if (cddp__cu_masters(s, n) != (dtype == CDDP_F16 || dtype == CDDP_BF16) ||
      rule->stride % (cddp__cu_masters(s, n) ? 32 : 16) != 0) /* bytes of a state's pack */
    return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_adamw_on, s, n, rule, factor, clip, flags, stream);
}

extern "C" cudaError_t cddp_cuda_adamw(const cddp_segment *s, int n, cddp_dtype dtype,
                                       const cddp_adamw_step *rule, unsigned flags,
                                       cudaStream_t stream) {
  return (cudaError_t)cddp__cu_adamw(s, n, dtype, rule, 1, NULL, flags, stream);
}

template <typename H> struct cddp__cu_copy_op : cddp__cu_half_copy<H> {
  enum { READS = CDDP__CU_DATA, WRITES = 0 };
  __device__ void begin() {}
  __device__ void apply(float &, float &, float &) const {}
};

extern "C" cudaError_t cddp_cuda_copies(const cddp_segment *s, void *const *copies, int n,
                                        cddp_dtype copy_dtype, cudaStream_t stream) {
  if (n < 0 || (n > 0 && (s == NULL || copies == NULL))) return cudaErrorInvalidValue;
  for (int i = 0; i < n; i++)
    if (s[i].count > 0 && (s[i].data == NULL || copies[i] == NULL)) return cudaErrorInvalidValue;
  if (copy_dtype == CDDP_F16)
    return cddp__cu_segments<float>(s, copies, n, cddp__cu_copy_op<__half>(), stream);
  if (copy_dtype == CDDP_BF16)
    return cddp__cu_segments<float>(s, copies, n, cddp__cu_copy_op<__nv_bfloat16>(), stream);
  return cudaErrorInvalidValue;
}

template <typename T> struct cddp__cu_scale_op : cddp__cu_no_copy {
  enum { READS = CDDP__CU_GRAD, WRITES = CDDP__CU_GRAD };
  const double *scratch;
  typename cddp__cu_type<T>::C f;
  __device__ void begin() {
    if (scratch != NULL) f = (typename cddp__cu_type<T>::C)scratch[1];
  }
  __device__ void apply(T &, T &grad, T &) const {
    grad = cddp__cu_store<T>(cddp__cu_mul(cddp__cu_load(grad), f));
  }
};

template <typename T>
static cudaError_t cddp__cu_scale_as(const cddp_segment *s, int n, double factor,
                                     const double *scratch, cudaStream_t stream) {
  cddp__cu_scale_op<T> op;
  op.scratch = scratch;
  op.f = (typename cddp__cu_type<T>::C)factor;
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
  return (cudaError_t)cddp__cu_scale(s, n, dtype, 1, scratch, stream);
}

/* >>shards ---------------------------------------------------------------------------------------
   Job: the canonical sum of nodes.
   How it works:
     1. A thread pushes each node's elements onto a stack of sums.
     2. After each push it merges the two sums on top, as many times as the host has computed: while
        they have the same width, or no node is left.
     3. Up to 15 shards need at most CDDP__CU_SHALLOW sums on the stack; a thread then sums a pack
        of elements at a time. With deeper stacks it sums one element at a time. */

enum { CDDP__CU_DEPTH = 16, CDDP__CU_SHALLOW = 4 };

typedef struct cddp__cu_nodes {
  const void *at[CDDP_NODES];
  unsigned char merges[CDDP_NODES]; /* number of merges after each node */
  int count;
  bool packed;
  size_t elements;
  double divisor; /* 0: none */
} cddp__cu_nodes;

template <typename T, size_t N>
static __device__ void cddp__cu_widen(typename cddp__cu_type<T>::C *to, const void *from,
                                      size_t i) {
  cddp__cu_pack<T, N> p = ((const cddp__cu_pack<T, N> *)from)[i];
  CDDP__CU_UNROLLED for (size_t e = 0; e < N; e++) to[e] = cddp__cu_load(p.v[e]);
}

/* Sums pack i of N elements. The last node's elements have type Last. The top of the stack is
   sums[0], and a push or a merge moves the whole stack: all indices are constants, so the stack
   stays in registers. CDDP__CU_UNROLL nodes are loaded before the first of them is added. */
template <typename Out, typename Last, size_t N, size_t DEPTH>
static __device__ void cddp__cu_sum_pack(const cddp__cu_nodes &s, void *out, size_t i) {
  typedef typename cddp__cu_type<Out>::C C;
  struct { C v[N]; } sums[DEPTH] = {}, node[CDDP__CU_UNROLL] = {};
  cddp__cu_pack<Out, N> result;
  for (int first = 0; first < s.count; first += CDDP__CU_UNROLL) {
    CDDP__CU_UNROLLED for (int u = 0; u < CDDP__CU_UNROLL; u++) {
      if (first + u < s.count - 1) cddp__cu_widen<C, N>(node[u].v, s.at[first + u], i);
      else if (first + u < s.count) cddp__cu_widen<Last, N>(node[u].v, s.at[first + u], i);
    }
    CDDP__CU_UNROLLED for (int u = 0; u < CDDP__CU_UNROLL; u++) {
      if (first + u >= s.count) break;
      CDDP__CU_UNROLLED for (size_t at = DEPTH - 1; at > 0; at--) sums[at] = sums[at - 1];
      sums[0] = node[u];
      for (int m = s.merges[first + u]; m > 0; m--) {
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
  if (s.divisor != 0) return cddp__cu_launch(cddp__cu_sum_kernel<T, C>, blocks, stream, s, out);
  return cddp__cu_launch(cddp__cu_sum_kernel<C, T>, blocks, stream, s, out);
}

static int cddp__cu_sum(void *out, cddp_dtype dtype, const void *const *nodes, const int *widths,
                        int n, int divisor, size_t count, void *stream) {
  int sizes[CDDP__CU_DEPTH], depth = 0;
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
    sizes[depth++] = widths[i] < 0 ? -widths[i] : widths[i];
    s.packed = s.packed && depth <= CDDP__CU_SHALLOW;
    for (; depth > 1 && (i == n - 1 || sizes[depth - 1] == sizes[depth - 2]); depth--) {
      sizes[depth - 2] += sizes[depth - 1];
      s.merges[i]++;
    }
  }
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_sum_as, out, s, (cudaStream_t)stream);
}

/* >>sums -----------------------------------------------------------------------------------------
   Job: sums over all elements.
   How it works: each block writes its sum to scratch (block b to index 2 + b). A second launch, of
   one block, adds these sums. The number of blocks depends only on the sizes, not on the device. */

CDDP__CU_KERNEL cddp__cu_finish_kernel(double *to, const double *partial, int n, double factor) {
  double sum = 0;
  for (int i = (int)threadIdx.x; i < n; i += CDDP__CU_THREADS) sum += partial[i];
  sum = cddp__cu_block_sum(sum) * factor;
  if (threadIdx.x == 0) *to += sum;
}

/* *to += factor times the sum of the blocks' sums. */
static cudaError_t cddp__cu_finish(double *to, const double *partial, unsigned blocks,
                                   double factor, cudaStream_t stream) {
  return cddp__cu_launch(cddp__cu_finish_kernel, 1, stream, to, partial, (int)blocks, factor);
}

/* Squares of all elements; scratch[0] grows after each launch. */
template <typename T> struct cddp__cu_squares_op : cddp__cu_no_copy {
  enum { READS = CDDP__CU_GRAD, WRITES = 0, BLOCKS = CDDP_CUDA_BLOCKS };
  double *scratch;
  mutable double sum; /* of this thread */
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
  cudaError_t e = add ? cudaSuccess : cudaMemsetAsync(scratch, 0, sizeof *scratch, stream);
  op.scratch = scratch;
  op.sum = 0;
  return e == cudaSuccess ? cddp__cu_segments<T>(s, NULL, n, op, stream) : e;
}

extern "C" cudaError_t cddp_cuda_squares(const cddp_segment *s, int n, cddp_dtype dtype,
                                         double *scratch, bool add, cudaStream_t stream) {
  if (!cddp__cu_segments_ok(s, n, false, false) || scratch == NULL) return cudaErrorInvalidValue;
  return CDDP__CU_DISPATCH_TYPE(dtype, cddp__cu_squares, s, n, scratch, add, stream);
}

static __global__ void cddp__cu_factor_kernel(double *scratch, double max_norm) {
  double factor = max_norm / (sqrt(scratch[0]) + 1e-6);
  scratch[1] = factor > 1 || isinf(max_norm) ? 1 : factor; /* NaN stays NaN */
}

extern "C" cudaError_t cddp_cuda_factor(double *scratch, double max_norm, cudaStream_t stream) {
  if (scratch == NULL) return cudaErrorInvalidValue;
  return cddp__cu_launch_threads(cddp__cu_factor_kernel, 1, 1, stream, scratch, max_norm);
}

/* >>arrays ------------------------------------------------------------------------------------- */

template <typename To, typename From> struct cddp__cu_conversion {
  static __device__ To of(From x) {
    return cddp__cu_store<To>((typename cddp__cu_type<To>::C)cddp__cu_load(x));
  }
};
template <typename To> struct cddp__cu_conversion<To, double> { /* to odd, then to the nearest */
  static __device__ To of(double x) {
    float y = __double2float_rz(x);
    if ((double)y != x && x == x) y = __uint_as_float(__float_as_uint(y) | 1);
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
  const size_t N = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
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
  bool packed = ((uintptr_t)to | (uintptr_t)from) % 16 == 0;
  return cddp__cu_launch(cddp__cu_convert_kernel<To, From>, cddp__cu_grid(n), stream, (To *)to,
                         (const From *)from, n, packed);
}

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
    uint64_t z = (seed << 32) + seed + ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z = (z ^ (z >> 31)) >> 40;
    x[i] = cddp__cu_mul(cddp__cu_add((float)(uint32_t)z / 8388608.0f, -1.0f), bound);
  }
}

extern "C" cudaError_t cddp_cuda_uniform(float *x, size_t n, float bound, uint64_t seed,
                                         cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (x == NULL) return cudaErrorInvalidValue;
  return cddp__cu_launch(cddp__cu_uniform_kernel, cddp__cu_grid(n), stream, x, n, bound, seed);
}

/* >>layers ------------------------------------------------------------------------------------- */

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

/* A warp processes a row in three passes: the maximum and its index; the sum of exp(y - maximum);
   the gradient. No exponent is positive, so no value overflows. */
static __device__ double cddp__cu_row_loss(const float *y, float *dy, int label, int classes,
                                        float share, bool *right) {
  int lane = (int)(threadIdx.x % 32), best = classes, k;
  float top = -INFINITY, sum = 0, target;
  for (k = lane; k < classes; k += 32)
    if (y[k] > top) top = y[k], best = k;
  for (k = 16; k > 0; k /= 2) { /* of equal maxima the first one counts */
    float other = __shfl_xor_sync(0xffffffffu, top, k);
    int where = __shfl_xor_sync(0xffffffffu, best, k);
    if (other > top || (!(top > other) && where < best)) top = other, best = where;
  }
  for (k = lane; k < classes; k += 32) sum += expf(y[k] - top);
  for (k = 16; k > 0; k /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, k);
  target = (unsigned)label < (unsigned)classes ? y[label] : NAN;
  __syncwarp(); /* all lanes have read y, which dy may overwrite */
  for (k = lane; dy != NULL && k < classes; k += 32)
    dy[k] = (expf(y[k] - top) / sum - (k == label ? 1.0f : 0.0f)) * share;
  *right = best == label;
  return (double)(top - target) + (double)logf(sum);
}

CDDP__CU_KERNEL cddp__cu_cross_entropy_kernel(const float *y, const int32_t *labels, float *dy,
                                              double *partial, int64_t rows, int classes,
                                              float share) {
  const int64_t warps = (int64_t)gridDim.x * (CDDP__CU_THREADS / 32);
  double loss = 0, hits = 0;
  for (int64_t r = (int64_t)(cddp__cu_thread() / 32); r < rows; r += warps) {
    bool right;
    double mine = cddp__cu_row_loss(y + r * classes, dy != NULL ? dy + r * classes : NULL,
                                    labels[r], classes, share, &right);
    if (threadIdx.x % 32 == 0) loss += mine, hits += right;
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
  blocks = cddp__cu_blocks((size_t)rows, CDDP__CU_THREADS / 32, CDDP_CUDA_BLOCKS);
  e = cddp__cu_launch(cddp__cu_cross_entropy_kernel, blocks, stream, y, labels, dy, scratch + 2,
                      rows, classes, 1.0f / (float)rows);
  if (e == cudaSuccess) e = cddp__cu_finish(stats, scratch + 2, blocks, 1.0 / (double)rows, stream);
  if (e != cudaSuccess) return e;
  return cddp__cu_finish(stats + 1, scratch + 2 + CDDP_CUDA_BLOCKS, blocks, 1, stream);
}

CDDP__CU_KERNEL cddp__cu_embedding_kernel(const float *table, const int32_t *ids, float *out,
                                          int64_t n, int vocabulary, int width) {
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    bool known = (unsigned)ids[i] < (unsigned)vocabulary;
    const float *row = table + (known ? (int64_t)ids[i] * width : 0);
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

/* How the backward pass of an embedding works:
     1. A key is id << 32 | index, so that sorted keys are ordered by id, then by index.
     2. Each thread sorts a run of keys by insertion. Then pairs of runs are merged, repeatedly.
     3. In a merge each thread writes CDDP__CU_RUN keys. It finds its start by a bisection.
     4. One block adds up a row of dtable, in the order of its keys. */
enum { CDDP__CU_RUN = 32, CDDP__CU_ROWS = 8 };

CDDP__CU_KERNEL cddp__cu_runs_kernel(const int32_t *ids, uint64_t *keys, size_t n) {
  const size_t each = cddp__cu_all_threads() * CDDP__CU_RUN;
  for (size_t at = cddp__cu_thread() * CDDP__CU_RUN; at < n; at += each) {
    size_t end = at + CDDP__CU_RUN < n ? at + CDDP__CU_RUN : n;
    for (size_t i = at; i < end; i++) {
      uint64_t key = (uint64_t)(uint32_t)ids[i] << 32 | i;
      size_t k = i;
      for (; k > at && keys[k - 1] > key; k--) keys[k] = keys[k - 1];
      keys[k] = key;
    }
  }
}

/* Merges pairs of runs of `run` keys to runs of twice that. The first `before` keys of a merged
   pair consist of keys from both runs: the bisection finds how many are from the first run. */
CDDP__CU_KERNEL cddp__cu_merge_kernel(const uint64_t *from, uint64_t *to, size_t n, size_t run) {
  const size_t each = cddp__cu_all_threads() * CDDP__CU_RUN;
  for (size_t at = cddp__cu_thread() * CDDP__CU_RUN; at < n; at += each) {
    size_t begin = at - at % (2 * run), before = at - begin;
    size_t middle = begin + run < n ? begin + run : n;
    size_t end = middle + run < n ? middle + run : n;
    size_t low = before > end - middle ? before - (end - middle) : 0;
    size_t high = before < middle - begin ? before : middle - begin;
    while (low < high) {
      size_t half = (low + high) / 2;
      if (from[begin + half] < from[middle + before - half - 1]) low = half + 1;
      else high = half;
    }
    size_t a = begin + low, b = middle + before - low;
    for (size_t i = at; i < at + CDDP__CU_RUN && i < n; i++)
      to[i] = b == end || (a < middle && from[a] < from[b]) ? from[a++] : from[b++];
  }
}

/* The first of keys i .. n with another id than key i. */
static __device__ size_t cddp__cu_row_end(const uint64_t *keys, size_t i, size_t n) {
  uint64_t next = ((keys[i] >> 32) + 1) << 32;
  while (i < n) {
    size_t half = i + (n - i) / 2;
    if (keys[half] < next) i = half + 1;
    else n = half;
  }
  return n;
}

/* The additions of one sum depend on each other, so CDDP__CU_ROWS loads are started before them. */
CDDP__CU_KERNEL cddp__cu_rows_kernel(const float *dout, const uint64_t *keys, float *dtable,
                                     size_t n, int vocabulary, int width) {
  for (size_t i = blockIdx.x; i < n; i += gridDim.x) {
    size_t id = (size_t)(keys[i] >> 32), end;
    if (id >= (size_t)vocabulary || (i > 0 && keys[i - 1] >> 32 == id)) continue;
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
  uint64_t *keys = (uint64_t *)order, *other;
  size_t run, count = (size_t)n;
  dim3 blocks(cddp__cu_blocks(count, CDDP__CU_RUN * CDDP__CU_THREADS, 1u << 16));
  cudaError_t e;
  if (n == 0 || width == 0) return cudaSuccess;
  if (n < 0 || n > (int64_t)1 << 32 || width < 0 || vocabulary < 0 || dout == NULL ||
      ids == NULL || dtable == NULL || order == NULL)
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

CDDP__CU_KERNEL cddp__cu_bias_kernel(float *y, const float *b, int rows, int out, bool relu) {
  int64_t c = (int64_t)cddp__cu_thread();
  if (c >= out) return;
  for (int r = (int)blockIdx.y; r < rows; r += (int)gridDim.y) {
    float *at = y + (int64_t)r * out + c, v = *at + (b != NULL ? b[c] : 0.0f);
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
  if (!cddp__cu_blas_on(blas, stream) ||
      cublasSgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, out, rows, in, &one, w, in, x, in, &zero, y,
                  out) != CUBLAS_STATUS_SUCCESS)
    return cudaErrorUnknown;
  if (b == NULL && !relu) return cudaSuccess;
  return cddp__cu_launch(cddp__cu_bias_kernel,
                         dim3(cddp__cu_blocks((size_t)out, CDDP__CU_THREADS, 1u << 30),
                              cddp__cu_blocks((size_t)rows, 4, 65535)),
                         stream, y, b, rows, out, relu);
}

/* A block sums 32 columns. Each of its warps adds every 32nd row, with four loads in flight; then
   warp 0 adds the warps' sums. */
enum { CDDP__CU_COLUMN_WARPS = 32, CDDP__CU_COLUMN_ROWS = 4 };
static __global__ void __launch_bounds__(32 * CDDP__CU_COLUMN_WARPS)
    cddp__cu_columns_kernel(const float *x, float *sums, int rows, int columns) {
  __shared__ float part[CDDP__CU_COLUMN_WARPS][32];
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32), k;
  int64_t c = (int64_t)blockIdx.x * 32 + lane, r;
  float sum[CDDP__CU_COLUMN_ROWS] = {0, 0, 0, 0};
  for (r = warp; c < columns && r < rows; r += CDDP__CU_COLUMN_WARPS * CDDP__CU_COLUMN_ROWS)
    CDDP__CU_UNROLLED for (k = 0; k < CDDP__CU_COLUMN_ROWS; k++) {
      int64_t at = r + k * CDDP__CU_COLUMN_WARPS;
      sum[k] += at < rows ? x[at * columns + c] : 0;
    }
  part[warp][lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  __syncthreads();
  if (warp > 0 || c >= columns) return;
  sum[0] = sums[c];
  for (k = 0; k < CDDP__CU_COLUMN_WARPS; k++) sum[0] += part[k][lane];
  sums[c] = sum[0];
}

extern "C" cudaError_t cddp_cuda_linear_backward(cublasHandle_t blas, const float *x,
                                                 const float *w, const float *dy, float *dx,
                                                 float *dw, float *db, int rows, int in, int out,
                                                 cudaStream_t stream) {
  const float one = 1, zero = 0;
  if (rows == 0 || out == 0) return cudaSuccess;
  if (rows < 0 || in < 1 || out < 0) return cudaErrorInvalidValue;
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
   link order. */

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
/* Loads all kernels that cddp.h launches. Otherwise a kernel's first launch would wait for the
   device and other threads' CUDA calls, and invalidate a stream capture. */
static int cddp__cu_table_load(void) {
  double room[2] = {0, 0};
  cddp_segment s = {room, room, room, 1, NULL}, m = {room, room, room, 1, room};
  const void *node = room;
  void *copy = room;
  cddp_sgd_desc rule;
  cddp_adamw_step adamw;
  int e = 0, width = 1;
  memset((void *)&rule, 0, sizeof rule);
  memset((void *)&adamw, 0, sizeof adamw);
  cddp__cu_loads = true;
  for (int t = CDDP_F32; t <= CDDP_BF16; t++) {
    cddp_dtype dtype = (cddp_dtype)t;
    e |= cddp__cu_sgd(&s, 1, dtype, &rule, 1, NULL, 0, NULL);
    if (dtype > CDDP_F64) e |= cddp__cu_sgd(&m, 1, dtype, &rule, 1, NULL, 0, NULL);
    e |= cddp__cu_adamw(dtype > CDDP_F64 ? &m : &s, 1, dtype, &adamw, 1, NULL, 0, NULL);
    for (int to = CDDP_F32; to <= CDDP_BF16; to++)
      e |= cddp_cuda_convert(room, (cddp_dtype)to, room, dtype, 1, NULL);
    e |= cddp__cu_scale(&s, 1, dtype, 1, NULL, NULL);
    e |= cddp_cuda_squares(&s, 1, dtype, room, true, NULL);
    for (int divisor = 0; divisor < 2; divisor++)
      e |= cddp__cu_sum(room, dtype, &node, &width, 1, divisor, 1, NULL);
  }
  e |= cddp_cuda_copies(&s, &copy, 1, CDDP_F16, NULL);
  e |= cddp_cuda_copies(&s, &copy, 1, CDDP_BF16, NULL);
  e |= cddp_cuda_factor(room, 1, NULL);
  cddp__cu_loads = false;
  return e != 0 ? (int)cudaGetLastError() : 0;
}

static const cddp_kernels cddp__cu_table = {
    CDDP_VERSION,           CDDP_CUDA_SCRATCH_BYTES, cddp__cu_table_load,
    cddp__cu_sgd,           cddp__cu_adamw,          cddp__cu_table_copies,
    cddp__cu_table_convert, cddp__cu_table_squares,  cddp__cu_table_factor,
    cddp__cu_scale,         cddp__cu_sum};

static struct cddp__cu_registers {
  cddp__cu_registers() { cddp_register_kernels(&cddp__cu_table); }
} cddp__cu_registered;

#endif /* CDDP_KERNELS_IMPLEMENTATION */
