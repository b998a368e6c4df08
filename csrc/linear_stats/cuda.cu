// linear_stats and linear_dlogits on Hopper: hidden x weight^T by WGMMA, and on the accumulators the reduction to (m, s, t, z_y) or
// the logits' gradient, so that a logit leaves the registers only where the caller wants to keep it. bf16, fp32 sums.
//
// A cluster of two blocks takes 256 tokens, 128 each, against the same 256 ids at a time; each block copies half of the weight
// tile to both, which halves the weight's traffic from L2: a lone block would read 48 bytes each clock, near what an SM can get
// from L2. In a block, one thread keeps 4 stages of 64 columns of hidden and weight (192 KiB) on their way by TMA; two
// warpgroups multiply 64 tokens x 256 ids each. The second one starts two stages behind the first: while one reduces its
// accumulators, about 1,500 clocks of 65,000 at H = 4096, the other's products keep the tensor cores busy for the most part.
//
// Statistics of a row live in registers over a run of vocabulary tiles (a split); a second kernel merges the splits in rising
// order, so equal calls on equal devices give equal bits. Splits are chosen such that every cluster gets about the same number
// of tiles. At one time 8 pairs of token tiles share their weight tiles: hidden and weight then stay in L2 with about
// sqrt(clusters) tiles of each, and HBM is read at a tenth of its rate.
//
// Results in memory are written by the thread that has them, two neighbouring columns at once: the four threads of a row fill a
// sector of 32 bytes of fp32 and half of one of bf16, whose other half follows at once. 4 KiB to 8 KiB for each thousand clocks of
// products; marked to leave L2 first, where hidden and weight are at home.
//
// Checked by compilation (no spills, no serialised products) and, instruction by instruction, in emulation on the CPU
// (tests/ops/test_linear_stats_cuda.py). Statistics have run on an H100 at the speed of its matrix units (docs/kernels.md); kept
// logits and the gradient have not run on a GPU.
#include <cmath>
#include <type_traits>

#include "linear_stats/hopper.cuh"
#include "linear_stats/linear_stats.h"

namespace megappo::cuda {
namespace wgmma_stats {

using hopper::TensorMap;

inline constexpr int kCluster = 2;
inline constexpr int kTokenTile = 128, kVocabTile = 256, kColumns = 64;  // of one block; columns of hidden and weight in a stage
inline constexpr int kPairTokens = kCluster * kTokenTile;
inline constexpr int kConsumers = 2, kWarpgroup = 128;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
inline constexpr int kStages = 4, kLag = 2;
inline constexpr int kHiddenBytes = kTokenTile * kColumns * 2, kWeightBytes = kVocabTile * kColumns * 2;
inline constexpr int kStageBytes = kHiddenBytes + kWeightBytes;
// The swizzle's pattern starts at multiples of 1024 bytes, the dynamic shared memory need not; the barriers come last.
inline constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 2 * 8);
// Registers of a thread after the split of roles: 128 x 40 + 256 x 232 of 65,536.
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
inline constexpr int kPairsTogether = 8;
inline constexpr int kMergeThreads = 128;
// e^-120 is 0 in fp32: the bound changes no sum, it keeps e^d d of a -inf logit at 0.
inline constexpr float kExponentFloor = -120.0f;
inline constexpr float kLog2E = 1.4426950408889634f;

// Which tokens and ids a cluster works on; an item is one pair of token tiles and one split of the vocabulary tiles.
struct Schedule {
  int pairs, vocab_tiles, splits;

  __host__ __device__ int items() const { return pairs * splits; }
  __device__ int first_tile(int split) const {
    return static_cast<int>(static_cast<std::int64_t>(split) * vocab_tiles / splits);
  }
  // Items that run at one time: the splits of kPairsTogether pairs, pairs fastest.
  __device__ void locate(int item, int& pair, int& split) const {
    const int group = item / (kPairsTogether * splits), first = group * kPairsTogether;
    const int together = min(kPairsTogether, pairs - first), inside = item - first * splits;
    pair = first + inside % together;
    split = inside / together;
  }
};

#ifdef MEGAPPO_HOPPER_CODE

// One row's statistics over some of its columns.
struct RowStats {
  float m = -INFINITY, s = 0.0f, t = 0.0f, z = -INFINITY;
};

__device__ __forceinline__ float exponential(float d) { return hopper::exp2_fast(d * kLog2E); }
__device__ __forceinline__ float shift(float x, float base) { return hopper::max_nan(x - base, kExponentFloor); }
// What is subtracted before the exponential: m, but 0 where every logit so far is -inf, as -inf - -inf is NaN.
__device__ __forceinline__ float base_of(float m) { return m == -INFINITY ? 0.0f : m; }

template <bool kEntropy>
__device__ __forceinline__ void rescale(RowStats& row, float base) {
  const float d = shift(row.m, base), w = exponential(d);
  if (kEntropy) row.t = w * (row.t + d * row.s);
  row.s *= w;
}

template <bool kEntropy>
__device__ __forceinline__ RowStats merge(RowStats a, RowStats b) {
  const float m = hopper::max_nan(a.m, b.m), base = base_of(m);
  rescale<kEntropy>(a, base);
  rescale<kEntropy>(b, base);
  return {m, a.s + b.s, a.t + b.t, hopper::max_nan(a.z, b.z)};
}

// The columns that this thread holds of its two rows: register 4 j + 2 h + i is row h, column `first` + 8 j + i. Row 0 is token
// `token`, row 1 is 8 further.
struct Rows {
  float inv_temp[2];
  int target[2];  // column of the shard, or -1 where it is not in the shard

  __device__ __forceinline__ Rows(const LinearArgs& a, std::int64_t token) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = token + 8 * h;
      const bool exists = row < a.num_tokens;
      const std::int64_t id = exists ? a.target[row] : a.ignore_index, local = id - a.vocab_start;
      target[h] = id != a.ignore_index && local >= 0 && local < a.num_valid ? static_cast<int>(local) : -1;
      inv_temp[h] = exists && a.row_inv_temp != nullptr ? a.row_inv_temp[row] : a.inv_temp;
    }
  }
};

template <int h>
__device__ __forceinline__ void round_row(float (&x)[128]) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    x[4 * j + 2 * h] = hopper::round_to_bf16(x[4 * j + 2 * h]);
    x[4 * j + 2 * h + 1] = hopper::round_to_bf16(x[4 * j + 2 * h + 1]);
  }
}

__device__ __forceinline__ void store_pair(float* at, float x, float y) {
  __stcs(reinterpret_cast<float2*>(at), make_float2(x, y));
}
__device__ __forceinline__ void store_pair(bf16* at, float x, float y) {
  __stcs(reinterpret_cast<unsigned*>(at), hopper::pack_bf16(x, y));
}

// Writes row h of a tile to the row `to` of `num_valid` columns.
template <int h, class T>
__device__ __forceinline__ void store_row(const float (&x)[128], T* to, int first, int num_valid) {
  if (num_valid % 2 == 0) {  // pairs are whole, and whole words
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (first + 8 * j < num_valid) store_pair(to + first + 8 * j, x[4 * j + 2 * h], x[4 * j + 2 * h + 1]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    if (first + 8 * j < num_valid) to[first + 8 * j] = from_float<T>(x[4 * j + 2 * h]);
    if (first + 8 * j + 1 < num_valid) to[first + 8 * j + 1] = from_float<T>(x[4 * j + 2 * h + 1]);
  }
}

// Adds the row h of a tile of logits. Four chains each for the maximum and the sums: one would wait for its own latency.
template <bool kEntropy, int h>
__device__ __forceinline__ void add_row(RowStats& row, const Rows& rows, float (&x)[128], int first, int num_valid) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    x[4 * j + 2 * h] *= rows.inv_temp[h];
    x[4 * j + 2 * h + 1] *= rows.inv_temp[h];
  }
  if (first - first % kVocabTile + kVocabTile > num_valid) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (first + 8 * j >= num_valid) x[4 * j + 2 * h] = -INFINITY;
      if (first + 8 * j + 1 >= num_valid) x[4 * j + 2 * h + 1] = -INFINITY;
    }
  }
  const int wanted = rows.target[h] - first;
  if (wanted >= 0 && wanted < kVocabTile) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (wanted == 8 * j) row.z = x[4 * j + 2 * h];
      if (wanted == 8 * j + 1) row.z = x[4 * j + 2 * h + 1];
    }
  }
  float top[4] = {row.m, row.m, row.m, row.m};
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    top[j % 2] = hopper::max_nan(top[j % 2], x[4 * j + 2 * h]);
    top[2 + j % 2] = hopper::max_nan(top[2 + j % 2], x[4 * j + 2 * h + 1]);
  }
  const float m = hopper::max_nan(hopper::max_nan(top[0], top[1]), hopper::max_nan(top[2], top[3])), base = base_of(m);
  rescale<kEntropy>(row, base);
  row.m = m;
  float s[4] = {}, t[4] = {};
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float d = shift(x[4 * j + 2 * h + i], base), e = exponential(d);
      s[2 * i + j % 2] += e;
      if (kEntropy) t[2 * i + j % 2] += e * d;
    }
  }
  row.s += (s[0] + s[1]) + (s[2] + s[3]);
  if (kEntropy) row.t += (t[0] + t[1]) + (t[2] + t[3]);
}

// What becomes of the tiles of logits of two rows: their statistics, and with kKeep the logits themselves in memory.
template <bool kEntropy, bool kKeep>
struct Statistics {
  using Args = LinearStatsArgs;
  Rows rows;
  RowStats stats[2];

  __device__ __forceinline__ Statistics(const Args& a, std::int64_t token) : rows(a, token) {}

  template <int h>
  __device__ __forceinline__ void take(const Args& a, std::int64_t token, float (&x)[128], int first) {
    const int num_valid = static_cast<int>(a.num_valid);
    if (a.bf16_logits) round_row<h>(x);
    if (kKeep && token < a.num_tokens) {
      if (a.bf16_logits) {
        store_row<h>(x, static_cast<bf16*>(a.logits) + token * a.num_valid, first, num_valid);
      } else {
        store_row<h>(x, static_cast<float*>(a.logits) + token * a.num_valid, first, num_valid);
      }
    }
    add_row<kEntropy, h>(stats[h], rows, x, first, num_valid);
  }

  // By the four threads of a row.
  template <int h>
  __device__ __forceinline__ void finish(const Args& a, std::int64_t token, int split) {
    RowStats row = stats[h];
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      row = merge<kEntropy>(row, {__shfl_xor_sync(kAllLanes, row.m, offset), __shfl_xor_sync(kAllLanes, row.s, offset),
                                  __shfl_xor_sync(kAllLanes, row.t, offset), __shfl_xor_sync(kAllLanes, row.z, offset)});
    }
    if (threadIdx.x % 4 == 0 && token < a.num_tokens) {
      if (a.target[token] == a.ignore_index) row = RowStats{};  // what vocab_stats has for it: an empty shard
      reinterpret_cast<float4*>(a.partial)[split * a.num_tokens + token] = make_float4(row.m, row.s, row.t, row.z);
    }
  }
};

// Or their gradient in memory, inv_temp [g (1[v=y] - p) - g_h p (log p + H)].
template <bool kEntropy>
struct Gradient {
  using Args = LinearGradientArgs;
  Rows rows;
  float lse[2], entropy[2], g[2], g_h[2];
  bool counts[2];

  __device__ __forceinline__ Gradient(const Args& a, std::int64_t first_token) : rows(a, first_token) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t token = first_token + 8 * h;
      const bool exists = token < a.num_tokens;
      lse[h] = exists ? a.lse[token] : 0.0f;
      entropy[h] = kEntropy && exists ? a.entropy[token] : 0.0f;
      g[h] = exists ? a.g_logprob[token] : 0.0f;
      g_h[h] = kEntropy && exists ? a.g_entropy[token] : 0.0f;
      counts[h] = exists && a.target[token] != a.ignore_index && (g[h] != 0.0f || g_h[h] != 0.0f);
      g[h] *= rows.inv_temp[h], g_h[h] *= rows.inv_temp[h];
    }
  }

  template <int h>
  __device__ __forceinline__ float elsewhere(float x) const {
    const float d = __fmul_rn(x, rows.inv_temp[h]) - lse[h], p = exponential(d);
    return kEntropy ? -p * (g[h] + g_h[h] * hopper::max_nan(d + entropy[h], kExponentFloor)) : -p * g[h];
  }
  template <int h>
  __device__ __forceinline__ float at_target(float x) const {
    const float d = __fmul_rn(x, rows.inv_temp[h]) - lse[h], grad = -g[h] * expm1f(d);
    return kEntropy ? grad - g_h[h] * expf(d) * hopper::max_nan(d + entropy[h], kExponentFloor) : grad;
  }

  template <int h>
  __device__ __forceinline__ void take(const Args& a, std::int64_t token, float (&x)[128], int first) {
    if (a.bf16_logits) round_row<h>(x);
    const int wanted = rows.target[h] - first;
    const bool here = wanted >= 0 && wanted < kVocabTile;
    float target = 0.0f;
    if (here) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (wanted == 8 * j) target = x[4 * j + 2 * h];
        if (wanted == 8 * j + 1) target = x[4 * j + 2 * h + 1];
      }
      target = at_target<h>(target);
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) {  // a row that does not count is 0 even if it is NaN
      x[4 * j + 2 * h] = counts[h] ? elsewhere<h>(x[4 * j + 2 * h]) : 0.0f;
      x[4 * j + 2 * h + 1] = counts[h] ? elsewhere<h>(x[4 * j + 2 * h + 1]) : 0.0f;
    }
    if (here && counts[h]) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (wanted == 8 * j) x[4 * j + 2 * h] = target;
        if (wanted == 8 * j + 1) x[4 * j + 2 * h + 1] = target;
      }
    }
    if (token >= a.num_tokens) return;
    store_row<h>(x, static_cast<bf16*>(a.out) + token * a.num_valid, first, static_cast<int>(a.num_valid));
  }

  template <int h>
  __device__ __forceinline__ void finish(const Args&, std::int64_t, int) {}
};

// Stages of the ring in the order in which all roles use them.
struct Ring {
  std::uint32_t stages, barriers;
  int stage = 0;
  unsigned parity = 0;

  __device__ std::uint32_t hidden() const { return stages + stage * kStageBytes; }
  __device__ std::uint32_t weight() const { return hidden() + kHiddenBytes; }
  __device__ std::uint32_t full() const { return barriers + 16 * stage; }
  __device__ std::uint32_t empty() const { return full() + 8; }
  __device__ void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// Runs on one thread of a block: keeps the ring full. A stage is free again when both blocks' consumers have read it, because
// each block's half of the weight tile goes to both.
__device__ __forceinline__ void produce(Ring ring, const TensorMap& hidden, const TensorMap& weight, const Schedule& schedule,
                                        int column_tiles, int rank) {
  constexpr int kHalf = kVocabTile / kCluster;
  for (int item = blockIdx.x / kCluster; item < schedule.items(); item += gridDim.x / kCluster) {
    int pair, split;
    schedule.locate(item, pair, split);
    const int token = pair * kPairTokens + rank * kTokenTile;
    for (int tile = schedule.first_tile(split); tile < schedule.first_tile(split + 1); ++tile) {
      for (int k = 0; k < column_tiles; ++k) {
        hopper::mbarrier_wait(ring.empty(), ring.parity ^ 1);
        hopper::mbarrier_arrive_expect_tx(ring.full(), kStageBytes);
        hopper::copy_box(ring.hidden(), hidden, ring.full(), token, k * kColumns);
        hopper::copy_box_multicast(ring.weight() + rank * (kWeightBytes / kCluster), weight, ring.full(),
                                   tile * kVocabTile + rank * kHalf, k * kColumns, (1 << kCluster) - 1);
        ring.next();
      }
    }
  }
}

// Tells both blocks' producers that this warp is done with the stage.
__device__ __forceinline__ void release(const Ring& ring) {
  const unsigned lane = threadIdx.x % kWarp;
  if (lane < kCluster) hopper::mbarrier_arrive_cluster(ring.empty(), lane);
}

// x = the 64 x 256 logits of one tile before the temperature, over all columns of hidden. A stage is released one step late,
// when the products that read it have ended while the next ones run. `leads`: the warpgroup that lets the other one start.
__device__ __forceinline__ void multiply(float (&x)[128], Ring& ring, int consumer, int column_tiles, bool leads) {
  Ring done = ring;
  for (int k = 0; k < column_tiles; ++k) {
    hopper::mbarrier_wait(ring.full(), ring.parity);
    const std::uint64_t a = hopper::matrix_descriptor(ring.hidden() + consumer * (kHiddenBytes / kConsumers));
    const std::uint64_t b = hopper::matrix_descriptor(ring.weight());
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      hopper::wgmma_m64n256k16(x, a + step * 2, b + step * 2, k > 0 || step > 0);
    }
    hopper::wgmma_commit();
    if (leads && k == min(kLag, column_tiles) - 1) hopper::named_arrive(1, kConsumers * kWarpgroup);
    hopper::wgmma_wait<1>(x);
    if (k > 0) {
      release(done);
      done.next();
    }
    ring.next();
  }
  hopper::wgmma_wait<0>(x);
  release(done);
}

template <class Epilogue>
__device__ __forceinline__ void consume(Ring ring, const typename Epilogue::Args& a, const Schedule& schedule, int column_tiles,
                                        int rank) {
  const int consumer = threadIdx.x / kWarpgroup, warp = threadIdx.x % kWarpgroup / kWarp, lane = threadIdx.x % kWarp;
  const int column = 2 * (lane % 4);
  bool leads = consumer == 0;
  if (!leads) hopper::named_sync(1, kConsumers * kWarpgroup);
  for (int item = blockIdx.x / kCluster; item < schedule.items(); item += gridDim.x / kCluster) {
    int pair, split;
    schedule.locate(item, pair, split);
    const std::int64_t block_token = static_cast<std::int64_t>(pair) * kPairTokens + rank * kTokenTile;
    const std::int64_t token = block_token + consumer * 64 + warp * 16 + lane / 4;  // of row 0; row 1 is 8 further
    Epilogue epilogue(a, token);
    for (int tile = schedule.first_tile(split); tile < schedule.first_tile(split + 1); ++tile) {
      float x[128];
      multiply(x, ring, consumer, column_tiles, leads);
      leads = false;
      epilogue.template take<0>(a, token, x, tile * kVocabTile + column);
      epilogue.template take<1>(a, token + 8, x, tile * kVocabTile + column);
    }
    epilogue.template finish<0>(a, token, split);
    epilogue.template finish<1>(a, token + 8, split);
  }
}

#endif  // MEGAPPO_HOPPER_CODE

// Statistics or the gradient, as the arguments say.
template <class Args, bool kEntropy, bool kKeep>
__global__ void __launch_bounds__(kThreads, 1)
    linear_kernel(const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight, Args a, Schedule schedule) {
#ifdef MEGAPPO_HOPPER_CODE
  using Epilogue =
      std::conditional_t<std::is_same_v<Args, LinearStatsArgs>, Statistics<kEntropy, kKeep>, Gradient<kEntropy>>;
  MEGAPPO_DYNAMIC_SHARED(unsigned char, shared);
  Ring ring{(hopper::shared_address(shared) + 1023u) & ~1023u, 0};
  ring.barriers = ring.stages + kStages * kStageBytes;
  const int rank = static_cast<int>(hopper::cluster_rank());
  const int column_tiles = static_cast<int>((a.hidden_size + kColumns - 1) / kColumns);
  if (threadIdx.x == 0) {
    Ring each = ring;
    for (int stage = 0; stage < kStages; ++stage, each.next()) {
      hopper::mbarrier_init(each.full(), 1);
      hopper::mbarrier_init(each.empty(), kCluster * kConsumers * (kWarpgroup / kWarp));
    }
    hopper::fence_mbarrier_init();
    hopper::prefetch_tensor_map(hidden);
    hopper::prefetch_tensor_map(weight);
  }
  hopper::cluster_sync();
  if (threadIdx.x >= kConsumers * kWarpgroup) {
    hopper::registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kWarpgroup) produce(ring, hidden, weight, schedule, column_tiles, rank);
  } else {
    hopper::registers_up<kConsumerRegisters>();
    consume<Epilogue>(ring, a, schedule, column_tiles, rank);
  }
  // A block must not end while the other one may still copy into its shared memory or arrive at its barriers.
  hopper::cluster_sync();
#else
  __trap();  // linear_stats_splits() has refused every device that this code is for
#endif
}

// One thread for each token. No split at all (an empty shard): m = z = -inf, s = t = 0.
template <bool kEntropy>
__global__ void __launch_bounds__(kMergeThreads) linear_stats_merge(LinearStatsArgs a, int splits) {
#ifdef MEGAPPO_HOPPER_CODE
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
  if (token >= a.num_tokens) return;
  RowStats row;
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    const float4 part = reinterpret_cast<const float4*>(a.partial)[split * a.num_tokens + token];
    row = merge<kEntropy>(row, {part.x, part.y, part.z, part.w});
  }
  reinterpret_cast<float4*>(a.stats)[token] = make_float4(row.m, row.s, row.t, row.z);
#else
  __trap();
#endif
}

inline int ceil_div(std::int64_t a, std::int64_t b) { return static_cast<int>((a + b - 1) / b); }

template <bool kEntropy, bool kKeep, class Args>
void run(const char* name, const Args& a, int splits, Stream stream) {
  const Schedule schedule{ceil_div(a.num_tokens, kPairTokens), ceil_div(a.num_valid, kVocabTile), splits};
  const TensorMap hidden = hopper::tensor_map(a.hidden, a.num_tokens, a.hidden_size, kTokenTile);
  const TensorMap weight = hopper::tensor_map(a.weight, a.num_valid, a.hidden_size, kVocabTile / kCluster);
  const int clusters = hopper::multiprocessors() / kCluster;
  const unsigned blocks = kCluster * (schedule.items() < clusters ? schedule.items() : clusters);
  hopper::launch_clusters(name, linear_kernel<Args, kEntropy, kKeep>, blocks, kCluster, kThreads, kSharedBytes, stream, hidden,
                          weight, a, schedule);
}

template <bool kEntropy>
void run_stats(LinearStatsArgs a, int splits, Stream stream) {
  if (splits == 1) a.partial = a.stats;
  const auto tiles = a.logits != nullptr ? run<kEntropy, true, LinearStatsArgs> : run<kEntropy, false, LinearStatsArgs>;
  if (splits > 0) tiles("linear_stats", a, splits, stream);
  if (splits != 1) {
    const dim3 blocks(static_cast<unsigned>(ceil_div(a.num_tokens, kMergeThreads)));
    launch("linear_stats_merge", linear_stats_merge<kEntropy>, blocks, kMergeThreads, 0, stream, a, splits);
  }
}

}  // namespace wgmma_stats

int linear_stats_splits(std::int64_t num_tokens, std::int64_t num_valid) {
  using namespace wgmma_stats;
  const int clusters = hopper::multiprocessors() / kCluster;
  const std::int64_t pairs = ceil_div(num_tokens, kPairTokens), tiles = ceil_div(num_valid, kVocabTile);
  if (pairs == 0 || tiles == 0) return 0;
  // The busiest cluster's time in tiles; starting and ending a split costs about a tenth of one. With more than two groups of
  // pairs at work their hidden states do not stay in L2 but come from HBM for every tile: 5 % is a guess of what that costs.
  // Past 4 splits for each cluster the balance cannot gain what they cost.
  int best = 1;
  double least = INFINITY;
  for (int splits = 1; splits <= tiles && splits <= 4 * clusters; ++splits) {
    const bool from_hbm = pairs > 2 * kPairsTogether && ceil_div(clusters, kPairsTogether * splits) > 2;
    const double time = ceil_div(pairs * splits, clusters) * (ceil_div(tiles, splits) + 0.1) * (from_hbm ? 1.05 : 1.0);
    if (time < least) best = splits, least = time;
  }
  return best;
}

void linear_stats_wgmma(const LinearStatsArgs& args, int splits, Stream stream) {
  if (args.num_tokens == 0) return;
  using namespace wgmma_stats;
  args.want_entropy ? run_stats<true>(args, splits, stream) : run_stats<false>(args, splits, stream);
}

void linear_dlogits_wgmma(const LinearGradientArgs& args, Stream stream) {
  const int splits = linear_stats_splits(args.num_tokens, args.num_valid);
  if (splits == 0) return;
  using namespace wgmma_stats;
  const auto tiles = args.g_entropy != nullptr ? run<true, false, LinearGradientArgs> : run<false, false, LinearGradientArgs>;
  tiles("linear_dlogits", args, splits, stream);
}

}  // namespace megappo::cuda
