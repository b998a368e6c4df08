// What every CUDA kernel of megappo uses: launching with error checks, reductions over a warp and a block, half types. The tests
// compile the same kernels for the CPU against tests/ops/cuda_on_cpu/cuda_runtime.h; what is used here of CUDA has its twin there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/dtype.h"
#include "common/stream.h"

namespace megappo::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// The dynamic shared memory of a launch.
#ifdef MEGAPPO_CUDA_ON_CPU
#define MEGAPPO_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(cuda_on_cpu::block->dynamic_shared.data())
#else
#define MEGAPPO_DYNAMIC_SHARED(T, name)                     \
  extern __shared__ __align__(16) unsigned char name##_[]; \
  T* name = reinterpret_cast<T*>(name##_)
#endif

// kernel<<<blocks, threads, shared_bytes, stream>>>(args...); a launch that CUDA refuses raises with the kernel's name. An empty
// grid launches nothing.
template <class... Parameters, class... Args>
void launch(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes, Stream stream,
            Args&&... args) {
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return;
#ifdef MEGAPPO_CUDA_ON_CPU
  run_on_cpu(blocks, threads, shared_bytes, [&] { kernel(static_cast<Parameters>(args)...); });
  (void)stream, (void)name;
#else
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), name);
  }
  kernel<<<blocks, threads, shared_bytes, stream>>>(static_cast<Parameters>(args)...);
  check(cudaGetLastError(), name);
#endif
}

// How many blocks of a kernel the current device runs at one time.
template <class... Parameters>
unsigned blocks_at_once(const char* name, void (*kernel)(Parameters...), int threads, size_t shared_bytes) {
#ifdef MEGAPPO_CUDA_ON_CPU
  (void)name, (void)kernel, (void)threads, (void)shared_bytes;
  return 2;
#else
  int device = 0, processors = 0, of_each = 0;
  check(cudaGetDevice(&device), name);
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), name);
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, threads, shared_bytes), name);
  return static_cast<unsigned>(processors * (of_each > 0 ? of_each : 1));
#endif
}

// Copies 16 or 8 bytes from global to shared memory without waiting; they are there, for this thread, after `copies_arrived`.
template <int kBytes>
__device__ inline void copy_async(void* to, const void* from) {
  static_assert(kBytes == 16 || kBytes == 8);
#ifdef MEGAPPO_CUDA_ON_CPU
  cuda_on_cpu::copy_late(to, from, kBytes);
#else
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
  }
#endif
}

__device__ inline void copies_arrived() {
#ifdef MEGAPPO_CUDA_ON_CPU
  cuda_on_cpu::make_late_copies();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float to_float(f16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline bf16 from_float<bf16>(float x) { return {__bfloat16_as_ushort(__float2bfloat16_rn(x))}; }
template <>
__device__ inline f16 from_float<f16>(float x) { return {__half_as_ushort(__float2half_rn(x))}; }

// Sum over the lanes of a warp in a fixed tree: every lane gets the same bits.
template <class T>
__device__ inline T warp_sum(T x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

template <class T>
__device__ inline T warp_max(T x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, x, offset);
    x = x > other ? x : other;
  }
  return x;
}

// Sum over a block of full warps, in warp order; valid in every thread. `scratch` has one T per warp and is free again after it.
template <class T>
__device__ inline T block_sum(T x, T* scratch) {
  const int warps = blockDim.x / kWarp;
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  T total = scratch[0];
  for (int w = 1; w < warps; ++w) total += scratch[w];
  __syncthreads();
  return total;
}

}  // namespace megappo::cuda
