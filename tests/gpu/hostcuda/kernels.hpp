/* kernels.hpp - device code as plain C++: a test double, see hostcuda.h.

   Works as follows: a launch is an operation of its stream; it runs block after block. A block's
   threads run one after the other on one fiber; a thread that comes to a barrier leaves its fiber
   there, and the next thread gets a new one. When all threads wait, those at the same barrier go
   on: barriers mean what they mean on the device, and threads that wait at different ones are
   found. */
#ifndef HOSTCUDA_KERNELS_HPP
#define HOSTCUDA_KERNELS_HPP

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <vector>

#include "half.h"
#include "hostcuda.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HOSTCUDA_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define HOSTCUDA_ASAN 1
#endif
#ifndef HOSTCUDA_ASAN
#define HOSTCUDA_ASAN 0
#endif
#if HOSTCUDA_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void *attrs;
  unsigned numAttrs;
};

struct cudaFuncAttributes {
  int numRegs;
};

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *kernel) {
  cudaError_t e = hostcuda_enter("cudaFuncGetAttributes");
  out->numRegs = 0;
  return hostcuda_leave(e == cudaSuccess ? hostcuda_load(kernel) : e);
}

namespace hostcuda {

enum { STACK = 64 << 10, BLOCK_BARRIER = -1, RUNNABLE = -2, ENDED = -3 };

struct fiber {
  ucontext_t context;
  char *stack;
  void *fake;      /* the address sanitizer's part of it, mapped until the process ends: one anew for each block
                      costs more than all else */
  unsigned thread; /* its number in the block */
  int waits;       /* RUNNABLE, ENDED, BLOCK_BARRIER or the number of the warp it waits for */
  bool goes;
};

/* What the stream's thread is doing. */
struct machine {
  void (*body)(void *);
  void *argument;
  unsigned next, threads;
  fiber *now;
  ucontext_t scheduler;
  void *scheduler_fake;
  const void *scheduler_stack;
  size_t scheduler_size;
  std::vector<fiber *> fibers; /* kept from block to block */
  uint64_t exchange[1024];     /* shuffles: one slot for each thread */
  ~machine() {
    for (fiber *f : fibers) {
      free(f->stack);
      delete f;
    }
  }
};

inline machine &m() {
  static thread_local machine here;
  return here;
}

inline void set_thread(unsigned n) {
  threadIdx = dim3(n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y);
}

inline void leave(machine &s) { /* from a fiber to the scheduler */
  fiber *f = s.now;
#if HOSTCUDA_ASAN
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, s.scheduler_stack, s.scheduler_size);
#endif
  swapcontext(&f->context, &s.scheduler);
#if HOSTCUDA_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

/* It returns, to the scheduler (uc_link): the thread sanitizer counts the calls that a thread has
   not returned from, those of its fibers together, and writes past its table at 65,536. */
inline void fiber_main() {
  machine &s = m();
#if HOSTCUDA_ASAN
  __sanitizer_finish_switch_fiber(s.now->fake, &s.scheduler_stack, &s.scheduler_size);
#endif
  while (s.next < s.threads) {
    s.now->thread = s.next++;
    set_thread(s.now->thread);
    s.body(s.argument);
  }
  s.now->waits = ENDED;
#if HOSTCUDA_ASAN
  __sanitizer_start_switch_fiber(&s.now->fake, s.scheduler_stack, s.scheduler_size);
#endif
}

inline void resume(machine &s, fiber *f) {
  s.now = f;
  f->waits = RUNNABLE;
  set_thread(f->thread);
#if HOSTCUDA_ASAN
  __sanitizer_start_switch_fiber(&s.scheduler_fake, f->stack, STACK);
#endif
  swapcontext(&s.scheduler, &f->context);
#if HOSTCUDA_ASAN
  __sanitizer_finish_switch_fiber(s.scheduler_fake, nullptr, nullptr);
#endif
}

inline void begin(machine &s, size_t i) {
  if (i == s.fibers.size()) {
    s.fibers.push_back(new fiber());
    s.fibers[i]->stack = static_cast<char *>(malloc(STACK));
  }
  fiber *f = s.fibers[i];
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = STACK;
  f->context.uc_link = &s.scheduler;
  makecontext(&f->context, fiber_main, 0);
  f->thread = s.next;
  resume(s, f);
}

inline void wait_at(int barrier) {
  machine &s = m();
  s.now->waits = barrier;
  leave(s);
}

inline int warp_of(unsigned thread) { return static_cast<int>(thread / 32); }

/* Lets those go on that wait at a complete barrier: of all living threads, or of a warp's. */
inline bool release(machine &s, size_t count) {
  unsigned living = 0, at_block = 0, warp_living[32] = {}, warp_waiting[32] = {};
  for (size_t i = 0; i < count; i++) {
    const fiber *f = s.fibers[i];
    if (f->waits == ENDED) continue;
    living++, warp_living[f->thread / 32]++;
    if (f->waits == BLOCK_BARRIER) at_block++;
    else warp_waiting[f->thread / 32]++;
  }
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    fiber *f = s.fibers[i];
    unsigned w = f->thread / 32;
    f->goes = f->waits == BLOCK_BARRIER ? at_block == living
                                        : f->waits >= 0 && warp_waiting[w] == warp_living[w];
    any = any || f->goes;
  }
  if (living > 0 && !any) {
    fprintf(stderr, "hostcuda: the threads of a block wait at different barriers\n");
    abort();
  }
  return living > 0;
}

inline void run_block(machine &s) {
  size_t count = 0;
  s.next = 0;
  while (s.next < s.threads) begin(s, count++);
  while (release(s, count))
    for (size_t i = 0; i < count; i++)
      if (s.fibers[i]->goes) resume(s, s.fibers[i]);
}

inline void barrier() { wait_at(BLOCK_BARRIER); }
inline void warp_barrier() { wait_at(warp_of(m().now->thread)); }

template <typename T> inline T shuffle(T value, unsigned from_lane) {
  machine &s = m();
  unsigned mine = s.now->thread, from = mine / 32 * 32 + from_lane;
  static_assert(sizeof value <= 8, "a shuffle moves up to 8 bytes");
  memcpy(&s.exchange[mine], &value, sizeof value);
  warp_barrier();
  if (from_lane < 32 && from < s.threads) memcpy(&value, &s.exchange[from], sizeof value);
  warp_barrier();
  return value;
}

inline unsigned lane() { return m().now->thread % 32; }

template <typename... P> struct call {
  void (*kernel)(P...);
  std::tuple<P...> arguments;
  dim3 grid, block;
  call(void (*k)(P...), std::tuple<P...> a, dim3 g, dim3 b)
      : kernel(k), arguments(a), grid(g), block(b) {}
  static void body(void *self) {
    call *c = static_cast<call *>(self);
    std::apply(c->kernel, c->arguments);
  }
  static void run(void *self) {
    call *c = static_cast<call *>(self);
    machine &s = m();
    gridDim = c->grid, blockDim = c->block;
    s.body = body, s.argument = self;
    s.threads = c->block.x * c->block.y * c->block.z;
    for (unsigned z = 0; z < gridDim.z; z++)
      for (unsigned y = 0; y < gridDim.y; y++)
        for (unsigned x = 0; x < gridDim.x; x++) {
          blockIdx = dim3(x, y, z);
          run_block(s);
        }
  }
  static void drop(void *self) { delete static_cast<call *>(self); }
};

} /* namespace hostcuda */

template <typename... P, typename... A>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P...),
                                      A &&...arguments) {
  dim3 g = c->gridDim, b = c->blockDim;
  uint64_t threads = uint64_t(b.x) * b.y * b.z;
  cudaError_t e = hostcuda_enter("kernel");
  if (e == cudaSuccess) e = hostcuda_load((const void *)kernel);
  if (e != cudaSuccess) return hostcuda_leave(e);
  if (threads == 0 || threads > 1024 || b.z > 64 || uint64_t(g.x) * g.y * g.z == 0 ||
      g.x > 0x7fffffff || g.y > 65535 || g.z > 65535)
    return hostcuda_leave(cudaErrorInvalidConfiguration);
  if (hostcuda_stream_device(c->stream) != hostcuda_device())
    return hostcuda_leave(cudaErrorInvalidResourceHandle);
  typedef hostcuda::call<P...> call;
  static_assert(sizeof(std::tuple<P...>) <= 4096, "a kernel's parameters take up to 4 KiB");
  hostcuda_op op = {call::run, call::drop,
                    new call(kernel, std::tuple<P...>(static_cast<P>(arguments)...), g, b)};
  return hostcuda_leave(hostcuda_enqueue(c->stream, op, false));
}

inline void __syncthreads() { hostcuda::barrier(); }
inline void __syncwarp(unsigned = 0xffffffffu) { hostcuda::warp_barrier(); }
template <typename T> inline T __shfl_sync(unsigned, T v, int lane) {
  return hostcuda::shuffle(v, unsigned(lane));
}
template <typename T> inline T __shfl_down_sync(unsigned, T v, unsigned by) {
  return hostcuda::shuffle(v, hostcuda::lane() + by);
}
template <typename T> inline T __shfl_xor_sync(unsigned, T v, int with) {
  return hostcuda::shuffle(v, hostcuda::lane() ^ unsigned(with));
}

/* Arithmetic with one rounding each, which no compiler may contract. */
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { volatile float x = a * b; return x; }
inline float __fadd_rn(float a, float b) { volatile float x = a + b; return x; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dmul_rn(double a, double b) { volatile double x = a * b; return x; }
inline double __dadd_rn(double a, double b) { volatile double x = a + b; return x; }
inline float __fsub_rn(float a, float b) { volatile float x = a - b; return x; }
inline double __dsub_rn(double a, double b) { volatile double x = a - b; return x; }
inline float __fdiv_rn(float a, float b) { volatile float x = a / b; return x; }
inline double __ddiv_rn(double a, double b) { volatile double x = a / b; return x; }
inline float __fsqrt_rn(float a) { volatile float x = __builtin_sqrtf(a); return x; }
inline double __dsqrt_rn(double a) { volatile double x = __builtin_sqrt(a); return x; }
inline unsigned __float_as_uint(float x) { return hostcuda_float_to_bits(x); }
inline float __uint_as_float(unsigned u) { return hostcuda_bits_to_float(u); }
inline float __double2float_rz(double x) {
  float y = static_cast<float>(x);
  uint32_t u = hostcuda_float_to_bits(y);
  if (fabs(static_cast<double>(y)) > fabs(x)) u--;
  return hostcuda_bits_to_float(u);
}

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
inline float __half2float(__half h) { return hostcuda_half_to_float(h.bits); }
inline __half __float2half_rn(float f) { return __half{hostcuda_float_to_half(f)}; }
inline float __bfloat162float(__nv_bfloat16 h) { return hostcuda_bf16_to_float(h.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  return __nv_bfloat16{hostcuda_float_to_bf16(f)};
}

#endif
