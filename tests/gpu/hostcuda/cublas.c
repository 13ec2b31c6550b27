/* cublas.c - the matrix product of hostcuda: a test double, see hostcuda.h. */
#include "cublas_v2.h"

#include <stdlib.h>

#include "hostcuda.h"

struct cublasContext { cudaStream_t stream; int device; };

typedef struct product {
  int ta, tb, m, n, k, lda, ldb, ldc, count;
  long long next_a, next_b, next_c; /* from a matrix to the next one of its batch */
  float alpha, beta;
  const float *a, *b;
  float *c;
} product;

static void multiply(const product *p, const float *a, const float *b, float *to) {
  int i, j, l;
  for (j = 0; j < p->n; j++)
    for (i = 0; i < p->m; i++) {
      float *c = to + (size_t)j * (size_t)p->ldc + i, sum = 0;
      for (l = 0; l < p->k; l++) {
        size_t at = p->ta ? (size_t)i * (size_t)p->lda + (size_t)l
                          : (size_t)l * (size_t)p->lda + (size_t)i;
        size_t bt = p->tb ? (size_t)l * (size_t)p->ldb + (size_t)j
                          : (size_t)j * (size_t)p->ldb + (size_t)l;
        sum += a[at] * b[bt];
      }
      *c = p->alpha * sum + (p->beta != 0 ? p->beta * *c : 0); /* beta 0: c may be NaN */
    }
}

static void run(void *arg) {
  const product *p = (const product *)arg;
  int i;
  for (i = 0; i < p->count; i++)
    multiply(p, p->a + i * p->next_a, p->b + i * p->next_b, p->c + i * p->next_c);
}

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  int device;
  if (hostcuda_injected("cublasCreate") != 0) return CUBLAS_STATUS_ALLOC_FAILED;
  if (cudaGetDevice(&device) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = (cublasHandle_t)calloc(1, sizeof **handle);
  if (*handle == NULL) return CUBLAS_STATUS_ALLOC_FAILED;
  (*handle)->device = device;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  free(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream) {
  *stream = handle->stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  (void)handle;
  (void)mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes) {
  (void)handle;
  (void)workspace;
  (void)bytes;
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t enqueue(cublasHandle_t handle, product p) {
  hostcuda_op op = {run, free, NULL};
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.count < 0 || p.lda < (p.ta ? p.k : p.m) ||
      p.ldb < (p.tb ? p.n : p.k) || p.ldc < p.m || p.lda < 1 || p.ldb < 1 || p.ldc < 1)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (hostcuda_stream_device(handle->stream) != handle->device) return CUBLAS_STATUS_INVALID_VALUE;
  op.arg = malloc(sizeof p);
  if (op.arg == NULL) return CUBLAS_STATUS_ALLOC_FAILED;
  *(product *)op.arg = p;
  return hostcuda_enqueue(handle->stream, op, false) == cudaSuccess
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m,
                           int n, int k, const float *alpha, const float *a, int lda,
                           const float *b, int ldb, const float *beta, float *c, int ldc) {
  product p = {ta, tb, m, n, k, lda, ldb, ldc, 1, 0, 0, 0, *alpha, *beta, a, b, c};
  if (hostcuda_injected("cublasSgemm") != 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  return enqueue(handle, p);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t ta,
                                         cublasOperation_t tb, int m, int n, int k,
                                         const float *alpha, const float *a, int lda,
                                         long long next_a, const float *b, int ldb,
                                         long long next_b, const float *beta, float *c, int ldc,
                                         long long next_c, int count) {
  product p = {ta,     tb,     m,      n,      k,     lda, ldb, ldc, count, next_a,
               next_b, next_c, *alpha, *beta, a, b, c};
  if (hostcuda_injected("cublasSgemmStridedBatched") != 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  return enqueue(handle, p);
}
