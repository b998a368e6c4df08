// CUDA's execution model on the CPU, for tests of csrc/*/cuda.cu on machines without a GPU. Blocks run one after another, in
// rising order, those of a cluster together; the threads of a block are fibers that hand over where
// they wait at a barrier or a warp operation. It checks indexing,
// reductions, masks and shared memory against the oracle; it cannot show data races between blocks or what a GPU's memory order
// does.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
struct CUstream_st;
using cudaStream_t = CUstream_st*;
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}

namespace cuda_on_cpu {

// A copy to shared memory that is made when its thread waits for it: as late as CUDA allows.
struct LateCopy {
  void* to;
  const void* from;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  std::shared_ptr<void> pending;  // hopper.h: matrix products that are issued and not yet computed
  std::vector<LateCopy> copies;
};

// Threads that ended no longer count: a barrier waits for those that still run.
struct Barrier {
  unsigned members = 0, arrived = 0;
  std::uint64_t generation = 0;
};

struct Block {
  dim3 index, grid, size;
  unsigned thread = 0;  // the fiber that runs
  std::vector<std::unique_ptr<Fiber>> fibers;
  ucontext_t scheduler;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<std::uint64_t> lanes;  // exchange of the warp operations, two words per thread
  std::vector<char> dynamic_shared;
  std::function<void()> body;
  bool moved = false;  // whether any thread got on in this round
  unsigned rank = 0;   // in the cluster, which is this block alone unless the launch says otherwise
  std::vector<Block*>* cluster = nullptr;
  Barrier* cluster_barrier = nullptr;
  std::vector<Barrier> named;
};

inline Block* block = nullptr;

inline void yield() { swapcontext(&block->fibers[block->thread]->context, &block->scheduler); }

inline void release_if_full(Barrier& barrier) {
  if (barrier.members == 0 || barrier.arrived < barrier.members) return;
  barrier.arrived = 0;
  ++barrier.generation;
  block->moved = true;
}

inline void wait(Barrier& barrier) {
  const std::uint64_t seen = barrier.generation;
  ++barrier.arrived;
  release_if_full(barrier);
  while (barrier.generation == seen) yield();
}

inline void copy_late(void* to, const void* from, int bytes) {
  block->fibers[block->thread]->copies.push_back({to, from, bytes});
}

inline void make_late_copies() {
  auto& copies = block->fibers[block->thread]->copies;
  for (const LateCopy& copy : copies) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  copies.clear();
}

inline Barrier& my_warp() { return block->warps[block->thread / 32]; }

inline void fiber_main() {
  block->body();
  block->fibers[block->thread]->done = true;
  block->moved = true;
  --block->all.members;
  release_if_full(block->all);
  --my_warp().members;
  release_if_full(my_warp());
  --block->cluster_barrier->members;
  release_if_full(*block->cluster_barrier);
}

inline void start_block(Block& b) {
  b.all = Barrier{b.size.x};
  b.named.clear();
  // What a kernel has not written yet is as good as anything: NaN shows in results.
  std::fill(b.dynamic_shared.begin(), b.dynamic_shared.end(), static_cast<char>(0xff));
  b.warps.assign((b.size.x + 31) / 32, Barrier{});
  for (unsigned t = 0; t < b.size.x; ++t) ++b.warps[t / 32].members;
  for (auto& fiber : b.fibers) {
    fiber->done = false;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    fiber->context.uc_link = &b.scheduler;
    fiber->pending.reset();
    fiber->copies.clear();
    makecontext(&fiber->context, fiber_main, 0);
  }
}

// The fibers of a cluster's blocks take turns until all have ended; a round in which none gets on is a deadlock of the kernel.
inline void run_cluster(std::vector<Block*>& cluster) {
  Barrier of_cluster;
  for (Block* b : cluster) {
    of_cluster.members += b->size.x;
    b->cluster = &cluster;
    b->cluster_barrier = &of_cluster;
    start_block(*b);
  }
  for (bool running = true; running;) {
    bool moved = running = false;
    for (Block* b : cluster) {
      block = b;
      b->moved = false;
      for (b->thread = 0; b->thread < b->fibers.size(); ++b->thread) {
        Fiber& fiber = *b->fibers[b->thread];
        if (fiber.done) continue;
        swapcontext(&b->scheduler, &fiber.context);
        running |= !fiber.done;
      }
      moved |= b->moved;
    }
    if (running && !moved) {
      std::fprintf(stderr, "cuda_on_cpu: block (%u, %u): threads wait for each other\n", cluster[0]->index.x, cluster[0]->index.y);
      std::abort();
    }
  }
}

struct ThreadIndex {
  struct X { operator unsigned() const { return block->thread; } } x;
};
struct BlockIndex {
  struct X { operator unsigned() const { return block->index.x; } } x;
  struct Y { operator unsigned() const { return block->index.y; } } y;
};
struct BlockSize {
  struct X { operator unsigned() const { return block->size.x; } } x;
};
struct GridSize {
  struct X { operator unsigned() const { return block->grid.x; } } x;
  struct Y { operator unsigned() const { return block->grid.y; } } y;
};

template <class T>
T exchange(T value, unsigned source) {
  static_assert(sizeof(T) <= 16);
  const unsigned me = block->thread;
  std::memcpy(&block->lanes[2 * me], &value, sizeof(T));
  wait(my_warp());
  T result;
  std::memcpy(&result, &block->lanes[2 * source], sizeof(T));
  wait(my_warp());
  return result;
}

}  // namespace cuda_on_cpu

static const cuda_on_cpu::ThreadIndex threadIdx;
static const cuda_on_cpu::BlockIndex blockIdx;
static const cuda_on_cpu::BlockSize blockDim;
static const cuda_on_cpu::GridSize gridDim;

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block->all); }
inline void __syncwarp(unsigned = 0xffffffffu) { cuda_on_cpu::wait(cuda_on_cpu::my_warp()); }
inline void __threadfence() {}

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return cuda_on_cpu::exchange(value, cuda_on_cpu::block->thread ^ static_cast<unsigned>(lanes));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return cuda_on_cpu::exchange(value, cuda_on_cpu::block->thread / 32 * 32 + static_cast<unsigned>(lane) % 32);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  const unsigned me = cuda_on_cpu::block->thread, lane = me % 32;
  return cuda_on_cpu::exchange(value, lane + by < 32 ? me + by : me);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  const unsigned me = cuda_on_cpu::block->thread, lane = me % 32;
  return cuda_on_cpu::exchange(value, lane >= static_cast<unsigned>(by) ? me - by : me);
}
inline int __syncthreads_or(int value) {
  auto& b = *cuda_on_cpu::block;
  b.lanes[2 * b.thread] = static_cast<std::uint64_t>(value != 0);
  __syncthreads();
  int any = 0;
  for (unsigned t = 0; t < b.size.x; ++t) any |= static_cast<int>(b.lanes[2 * t]);
  __syncthreads();
  return any;
}
inline int __syncthreads_count(int value) {
  auto& b = *cuda_on_cpu::block;
  b.lanes[2 * b.thread] = static_cast<std::uint64_t>(value != 0);
  __syncthreads();
  int count = 0;
  for (unsigned t = 0; t < b.size.x; ++t) count += static_cast<int>(b.lanes[2 * t]);
  __syncthreads();
  return count;
}
inline unsigned __ballot_sync(unsigned, int value) {
  auto& b = *cuda_on_cpu::block;
  b.lanes[2 * b.thread] = static_cast<std::uint64_t>(value != 0);
  __syncwarp();
  unsigned lanes = 0;
  const unsigned first = b.thread / 32 * 32;
  for (unsigned lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(b.lanes[2 * (first + lane)]) << lane;
  __syncwarp();
  return lanes;
}
inline int __any_sync(unsigned lanes, int value) { return __ballot_sync(lanes, value) != 0; }
template <class T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = old + value;
  return old;
}

template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
T __ldcs(const T* at) { return *at; }
template <class T>
void __stcs(T* at, T value) { *at = value; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline long long __double_as_longlong(double x) { long long bits; std::memcpy(&bits, &x, 8); return bits; }
inline double __longlong_as_double(long long bits) { double x; std::memcpy(&x, &bits, 8); return x; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (bits & 31u));
}
inline float __fmul_rn(float x, float y) {
  volatile float product = x * y;  // never fused with what follows
  return product;
}
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
using std::isnan;
using std::isinf;
template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }

// cluster: neighbouring blocks that run together; it divides blocks.x.
template <class F>
void run_on_cpu(dim3 blocks, int threads, size_t shared_bytes, F&& body, unsigned cluster = 1) {
  std::vector<std::unique_ptr<cuda_on_cpu::Block>> together;
  std::vector<cuda_on_cpu::Block*> pointers;
  for (unsigned rank = 0; rank < cluster; ++rank) {
    together.push_back(std::make_unique<cuda_on_cpu::Block>());
    cuda_on_cpu::Block& b = *together.back();
    b.grid = blocks;
    b.size = dim3(static_cast<unsigned>(threads));
    b.rank = rank;
    b.lanes.resize(2 * static_cast<size_t>(threads));
    b.dynamic_shared.resize(shared_bytes + 64);
    b.body = body;
    for (int t = 0; t < threads; ++t) {
      b.fibers.push_back(std::make_unique<cuda_on_cpu::Fiber>());
      b.fibers.back()->stack.resize(64 * 1024);
    }
    pointers.push_back(&b);
  }
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; x += cluster) {
      for (unsigned rank = 0; rank < cluster; ++rank) together[rank]->index = dim3(x + rank, y);
      cuda_on_cpu::run_cluster(pointers);
    }
  }
  cuda_on_cpu::block = nullptr;
}
