// The functions of csrc/linear_stats/hopper.cuh on the CPU, with the behaviour that the PTX ISA documents: transaction barriers
// with phases and byte counts, box copies that write 128-byte swizzled rows and zeros for what lies outside, warpgroup products
// that read both operands through their descriptors out of swizzled shared memory and spread the result over the threads.
// Written from the ISA's tables, not from the kernel, so that a wrong offset, swizzle, phase or fragment shows as a wrong
// result or a deadlock.
//
// Products are computed as late as the ISA allows, when a wait demands them: a stage that is released too early, or a result
// that is read too early, is wrong here. Copies are done at once; the consumers, whose fibers run first, still meet unfilled
// stages. What a GPU's memory order does, and how fast it is, does not show.
//
// MEGAPPO_ON_CPU_FAULT names one fault to build into this machine (fault() below), for the tests that want to see it detected.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace megappo::cuda::hopper {

using cuda_on_cpu::block;

inline bool fault(std::string_view name) {
  const char* wanted = std::getenv("MEGAPPO_ON_CPU_FAULT");
  return wanted != nullptr && name == wanted;
}

struct TensorMap {
  const std::uint16_t* base;
  std::int64_t rows, columns;
  int box_rows;
};

inline TensorMap tensor_map(const void* base, std::uint64_t rows, std::uint64_t columns, std::uint32_t box_rows) {
  if (reinterpret_cast<std::uintptr_t>(base) % 16 != 0 || columns % 8 != 0 || box_rows > 256 || rows == 0 || columns == 0) {
    throw std::runtime_error("cuTensorMapEncodeTiled refuses this matrix");
  }
  return {static_cast<const std::uint16_t*>(base), static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns),
          static_cast<int>(box_rows)};
}

// Of the machine that is played here: two clusters of two, so that small problems have more items than clusters.
inline int multiprocessors() { return 4; }

// As on the GPU, an address has the block's rank in the cluster above its offset.
constexpr unsigned kRankShift = 24;

inline unsigned cluster_rank() { return block->rank; }

inline std::uint32_t shared_address(const void* at) {
  const auto offset = static_cast<const char*>(at) - block->dynamic_shared.data();
  return static_cast<std::uint32_t>(offset) | block->rank << kRankShift;
}

inline char* shared_memory(std::uint32_t address, size_t bytes) {
  auto& memory = block->cluster->at(address >> kRankShift)->dynamic_shared;
  const size_t offset = address & ((1u << kRankShift) - 1);
  if (offset + bytes > memory.size()) {
    std::fprintf(stderr, "cuda_on_cpu: shared memory is accessed outside its %zu bytes, at %zu\n", memory.size(), offset);
    std::abort();
  }
  return memory.data() + offset;
}

// --- transaction barriers ---

struct Mbarrier {
  std::int64_t expected : 12, pending : 12, bytes : 28, parity : 12;
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier& mbarrier(std::uint32_t address) { return *reinterpret_cast<Mbarrier*>(shared_memory(address, 8)); }

inline void end_phase_if_complete(Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.expected;
  b.parity = b.parity ^ 1;
  block->moved = true;
}

inline void mbarrier_init(std::uint32_t at, unsigned arrivals) {
  mbarrier(at) = {static_cast<std::int64_t>(arrivals), static_cast<std::int64_t>(arrivals), 0, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect_tx(std::uint32_t at, unsigned bytes) {
  Mbarrier& b = mbarrier(at);
  b.bytes = b.bytes + bytes;
  b.pending = b.pending - 1;
  end_phase_if_complete(b);
}

inline void mbarrier_arrive_cluster(std::uint32_t at, unsigned rank) {
  Mbarrier& b = mbarrier((at & ((1u << kRankShift) - 1)) | rank << kRankShift);
  if (b.pending == 0) {
    std::fprintf(stderr, "cuda_on_cpu: more arrivals at a barrier than it was initialised for\n");
    std::abort();
  }
  b.pending = b.pending - 1;
  end_phase_if_complete(b);
}

inline void complete_bytes(std::uint32_t at, int bytes) {
  Mbarrier& b = mbarrier(at);
  b.bytes = b.bytes - bytes;
  end_phase_if_complete(b);
}

inline void mbarrier_wait(std::uint32_t at, unsigned parity) {
  while (static_cast<unsigned>(mbarrier(at).parity & 1) == parity) cuda_on_cpu::yield();
}

// --- bulk tensor copies ---

inline void prefetch_tensor_map(const TensorMap&) {}

// The 128-byte swizzle: bits 4-6 of an address are combined with its bits 7-9.
inline std::uint32_t swizzled(std::uint32_t address) { return address ^ (address >> 3 & 0x70u); }

inline void copy_box_multicast(std::uint32_t to, const TensorMap& map, std::uint32_t barrier, int row, int column,
                               unsigned short blocks) {
  constexpr std::uint32_t offset = (1u << kRankShift) - 1;
  const bool swizzle = !fault("no_swizzle");
  for (unsigned rank = 0; rank < block->cluster->size(); ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    const bool lost = fault("half_weight") && rank != cluster_rank();
    const std::uint32_t box = (to & offset) | rank << kRankShift;
    for (int r = 0; r < map.box_rows; ++r) {
      for (int c = 0; c < 64; ++c) {
        const bool inside = row + r >= 0 && row + r < map.rows && column + c >= 0 && column + c < map.columns;
        const std::uint16_t value = inside ? map.base[(row + r) * map.columns + column + c] : std::uint16_t{0};
        const std::uint32_t at = box + 128 * r + 2 * c;
        if (!lost) std::memcpy(shared_memory(swizzle ? swizzled(at) : at, 2), &value, 2);
      }
    }
    complete_bytes((barrier & offset) | rank << kRankShift, map.box_rows * 128);
  }
}

inline void copy_box(std::uint32_t to, const TensorMap& map, std::uint32_t barrier, int row, int column) {
  copy_box_multicast(to, map, barrier, row, column, static_cast<unsigned short>(1u << cluster_rank()));
}

// --- warpgroup matrix products ---

struct Product {
  float* d;
  std::uint64_t a, b;
  bool accumulate;
};

// The products of each thread that are issued and not yet computed; `group` counts the commits.
struct Pending {
  std::vector<std::pair<int, Product>> products;
  int committed = 0;
};

inline Pending& pending() {
  auto& of_thread = block->fibers[block->thread]->pending;
  if (!of_thread) of_thread = std::make_shared<Pending>();
  return *std::static_pointer_cast<Pending>(of_thread);
}

// Element (row, k) of an operand: the descriptor's address and stride between groups of 8 rows, 128 bytes from row to row.
inline float operand(std::uint64_t descriptor, int row, int k) {
  const auto field = [descriptor](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  if (descriptor >> 62 != 1) {
    std::fprintf(stderr, "cuda_on_cpu: only 128-byte swizzled operands are modelled\n");
    std::abort();
  }
  const auto r = static_cast<std::uint32_t>(row);
  const std::uint32_t at = field(0) + r / 8 * field(32) + r % 8 * 128 + 2 * static_cast<std::uint32_t>(k);
  std::uint16_t bits;
  std::memcpy(&bits, shared_memory(swizzled(at) | cluster_rank() << kRankShift, 2), 2);
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

// This thread's part of a product (PTX ISA: accumulator fragment of m64nNk16). The others' parts are their own.
inline void compute(const Product& product) {
  const int t = static_cast<int>(block->thread % 128), eight = fault("rows_swapped") ? -8 : 8, second = eight < 0 ? 1 : 0;
  float a[2][16];
  for (int h = 0; h < 2; ++h) {
    for (int k = 0; k < 16; ++k) a[h][k] = operand(product.a, 16 * (t / 32) + t % 32 / 4 + 8 * second + eight * h, k);
  }
  for (int j = 0; j < 32; ++j) {
    for (int i = 0; i < 2; ++i) {
      float b[16];
      for (int k = 0; k < 16; ++k) b[k] = operand(product.b, 8 * j + 2 * (t % 4) + i, k);
      for (int h = 0; h < 2; ++h) {
        float& d = product.d[4 * j + 2 * h + i];
        float sum = product.accumulate ? d : 0.0f;
        for (int k = 0; k < 16; ++k) sum += a[h][k] * b[k];
        d = sum;
      }
    }
  }
}

inline void wgmma_fence() {}

inline void wgmma_m64n256k16(float (&d)[128], std::uint64_t a, std::uint64_t b, int accumulate) {
  pending().products.push_back({pending().committed, {d, a, b, accumulate != 0}});
}

inline void wgmma_commit() { ++pending().committed; }

template <int kPending>
inline void wgmma_wait(float (&)[128]) {
  const int left = fault("no_wait") ? pending().committed : kPending;
  auto& products = pending().products;
  size_t done = 0;
  while (done < products.size() && products[done].first < pending().committed - left) compute(products[done++].second);
  products.erase(products.begin(), products.begin() + static_cast<std::ptrdiff_t>(done));
}

// --- registers, warps, clusters ---

template <int>
inline void registers_down() {}
template <int>
inline void registers_up() {}

inline void named_barrier(int number, int threads, bool waits) {
  auto& barriers = block->named;
  if (static_cast<int>(barriers.size()) <= number) barriers.resize(static_cast<size_t>(number) + 1);
  cuda_on_cpu::Barrier& b = barriers[static_cast<size_t>(number)];
  b.members = static_cast<unsigned>(threads);
  const std::uint64_t seen = b.generation;
  ++b.arrived;
  cuda_on_cpu::release_if_full(b);
  while (waits && block->named[static_cast<size_t>(number)].generation == seen) cuda_on_cpu::yield();
}
inline void named_arrive(int number, int threads) { named_barrier(number, threads, false); }
inline void named_sync(int number, int threads) { named_barrier(number, threads, true); }

inline void cluster_sync() { cuda_on_cpu::wait(*block->cluster_barrier); }

// --- arithmetic ---

inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }
inline float round_to_bf16(float x) { return __uint_as_float(static_cast<unsigned>(__float2bfloat16_rn(x).bits) << 16); }
inline unsigned pack_bf16(float low, float high) {
  return __float2bfloat16_rn(low).bits | static_cast<unsigned>(__float2bfloat16_rn(high).bits) << 16;
}
inline float exp2_fast(float x) {
  const float e = std::exp2(x);
  return e < 1.17549435e-38f ? 0.0f : e;
}

template <class... Parameters, class... Args>
void launch_clusters(const char*, void (*kernel)(Parameters...), unsigned blocks, unsigned cluster, int threads,
                     size_t shared_bytes, CUstream_st*, Args&&... args) {
  run_on_cpu(dim3(blocks), threads, shared_bytes, [&] { kernel(static_cast<Parameters>(args)...); }, cluster);
}

}  // namespace megappo::cuda::hopper
