// Hopper's asynchronous instructions as functions: transaction barriers, bulk tensor copies (TMA), warpgroup matrix products
// (WGMMA), thread block clusters. One function for each instruction, named after it, from the PTX ISA; what they are put together
// to is the kernels' business. Everything is addressed by 32-bit shared memory addresses, so that the tests can replace this
// file's functions by those of tests/ops/cuda_on_cpu/hopper.h, which do the same on the CPU.
//
// Device code for sm_90a only: MEGAPPO_HOPPER_CODE is defined in the passes that may use it.
#pragma once

#include "common/cuda.cuh"

#ifdef MEGAPPO_CUDA_ON_CPU
#include "hopper.h"
#define MEGAPPO_HOPPER_CODE 1
#else
#include <cuda.h>  // types of the driver; nothing of it is linked

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MEGAPPO_HOPPER_CODE 1
#endif

namespace megappo::cuda::hopper {

using TensorMap = CUtensorMap;

// A row-major bf16 matrix [rows, columns], copied by boxes of [box_rows, 64 columns = 128 bytes]: a row of the box is 128 bytes
// of shared memory, its 16-byte pieces permuted by the row's number modulo 8 (the 128-byte swizzle, without which the 8 rows
// that a matrix product reads at once are in the same banks). What lies outside the matrix arrives as 0. `base` and the row's
// size must be multiples of 16 bytes. The encoder is the driver's; the runtime finds it, so that libcuda is needed to run but
// not to link.
inline TensorMap tensor_map(const void* base, std::uint64_t rows, std::uint64_t columns, std::uint32_t box_rows) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
#else
  check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result), "cuTensorMapEncodeTiled");
#endif
  if (found == nullptr || result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("cuTensorMapEncodeTiled: this driver has no bulk tensor copies; install one for CUDA 12.0 or later");
  }
  using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                          const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                          CUtensorMapFloatOOBfill);
  const cuuint64_t sizes[] = {columns, rows}, row_bytes[] = {columns * 2};
  const cuuint32_t box[] = {64, box_rows}, step[] = {1, 1};
  TensorMap map;
  const CUresult status = reinterpret_cast<Encode*>(found)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), sizes, row_bytes, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refused a matrix of [" + std::to_string(rows) + ", " +
                             std::to_string(columns) + "] bf16: error " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

// Multiprocessors of the current device. Raises where it is not a Hopper GPU or this build has no code for one.
inline int multiprocessors() {
#ifndef MEGAPPO_SM90A
  throw std::runtime_error("this build of megappo has no code for sm_90a: build it with MEGAPPO_CUDA_ARCHS=9.0a");
#endif
  int device = 0, major = 0, minor = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0) {
    const std::string found = std::to_string(major) + "." + std::to_string(minor);
    throw std::runtime_error("this kernel is for GPUs of compute capability 9.0, not " + found);
  }
  return count;
}

#ifdef MEGAPPO_HOPPER_CODE

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// --- transaction barriers: a phase ends when its arrivals and the bytes they announced are complete ---

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the other blocks of the cluster and to the copy engine; cluster_sync() follows.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at this address.
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t barrier, unsigned rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier), "r"(rank)
      : "memory");
}

// Whether the phase of this parity has ended: phases count 0, 1, 0, ...; parity 1 on a new barrier has.
__device__ __forceinline__ bool mbarrier_ended(std::uint32_t barrier, unsigned parity) {
  unsigned ended;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// Waits for it. A wait takes microseconds; after a minute it is a deadlock, and an error is better than a run that hangs.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, unsigned parity) {
  if (mbarrier_ended(barrier, parity)) return;
  const std::uint64_t start = nanoseconds();
  while (!mbarrier_ended(barrier, parity)) {
    if (nanoseconds() - start > 60'000'000'000u) __trap();
  }
}

// --- bulk tensor copies ---

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

// Box at (row, column) of the matrix to shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void copy_box(std::uint32_t to, const TensorMap& map, std::uint32_t barrier, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same to this address in every block of the cluster whose bit is set in `blocks`, counted at each one's barrier.
__device__ __forceinline__ void copy_box_multicast(std::uint32_t to, const TensorMap& map, std::uint32_t barrier, int row,
                                                   int column, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// --- warpgroup matrix products ---

// Orders register and shared memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` of the committed groups are unfinished. The accumulators are operands, so that the compiler
// keeps what reads them behind the wait.
template <int kPending>
__device__ __forceinline__ void wgmma_wait(float (&d)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64, 256] fp32 = (accumulate ? d : 0) + a[64, 16] b[256, 16]^T of bf16 in shared memory. Of d, thread t of the warpgroup
// holds in register 4 j + 2 h + i the row 16 (t / 32) + 8 h + t % 32 / 4 and the column 8 j + 2 (t % 4) + i.
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], std::uint64_t a, std::uint64_t b, int accumulate) {
#define MEGAPPO_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MEGAPPO_D64(i)                                                                                                       \
  MEGAPPO_D8(i), MEGAPPO_D8(i + 8), MEGAPPO_D8(i + 16), MEGAPPO_D8(i + 24), MEGAPPO_D8(i + 32), MEGAPPO_D8(i + 40), \
      MEGAPPO_D8(i + 48), MEGAPPO_D8(i + 56)
  asm volatile(
      "{\n .reg .pred p;\n"
      " setp.ne.b32 p, %130, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, "
      "%72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, "
      "%88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, "
      "%104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
      : MEGAPPO_D64(0), MEGAPPO_D64(64)
      : "l"(a), "l"(b), "r"(accumulate));
#undef MEGAPPO_D64
#undef MEGAPPO_D8
}

// --- registers, warps, clusters ---

// All warps of a warpgroup hand registers back, or ask for more, to have this many each.
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A named barrier for `threads` threads of the block, of which some only arrive.
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; memory written before is visible after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

// --- arithmetic ---

// The larger one; NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The nearest bf16. In one instruction block on float registers: bit casts in C++ make the compiler keep accumulators as
// integers, which it then copies between the products, and ptxas serialises those.
__device__ __forceinline__ float round_to_bf16(float x) {
  float rounded;
  asm("{\n .reg .b16 h;\n cvt.rn.bf16.f32 h, %1;\n cvt.f32.bf16 %0, h;\n}\n" : "=f"(rounded) : "f"(x));
  return rounded;
}

// The nearest bf16 of two neighbours, the first in the low half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// 2^x within 2 units in the last place; results below the normal numbers are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}

#endif  // MEGAPPO_HOPPER_CODE

// launch() with the blocks in clusters of `cluster`, which divides their number.
template <class... Parameters, class... Args>
void launch_clusters(const char* name, void (*kernel)(Parameters...), unsigned blocks, unsigned cluster, int threads,
                     size_t shared_bytes, Stream stream, Args&&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), name);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...), name);
}

}  // namespace megappo::cuda::hopper

#endif  // MEGAPPO_CUDA_ON_CPU

#ifdef MEGAPPO_HOPPER_CODE
namespace megappo::cuda::hopper {

// Descriptor of a matrix in shared memory, 64 bf16 columns to a row of 128 bytes and 128-byte swizzled as tensor_map() copies
// it. `at` is a multiple of 1024 (where the swizzle's pattern starts) plus 32 for each 16 columns. Bits 0-13: address / 16;
// 16-29: leading offset, without meaning for a swizzled row; 32-45: 1024 / 16, from 8 rows to the next 8; 62-63: 1 for the
// 128-byte swizzle.
__device__ inline std::uint64_t matrix_descriptor(std::uint32_t at) {
  return (at & 0x3ffffu) >> 4 | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}

}  // namespace megappo::cuda::hopper
#endif
