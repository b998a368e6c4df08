// One launch of as many blocks as run at one time. A block takes a tile of 2048 tokens after the other, 8 in a row to a thread, and
// turns them into an affine map of x (advantages.h); maps compose in the block, between tiles, and then every thread runs the
// recurrence over its tokens from its own x. Each input is read once and each output written once, 21 B a token without a KL: at
// 3.0 TB/s an H100 has 300 fp64 operations for a token and this takes about 25. What a tile waits for costs more than what it
// moves (border, neighbours, barriers), so the tokens of a block's next tile are copied to shared memory, and its sequence is looked
// up, while this tile's map travels; benchmarks/predict_kernels.py counts.
//
// Between tiles: two levels in an order fixed by position, so that results do not depend on which block was faster, as they would
// where a block takes the nearest prefix that happens to be ready. A tile publishes its map, and the last tile of 32 the map of
// the 32; a tile that ends within a sequence composes what is to its right until the end of the sequence cuts it off, a warp at a
// time: usually one map, at worst 31 and one for every 65,536 tokens. Tiles are numbered from the right by an atomic ticket. A
// block works on its tickets in rising order, and a tile only waits for maps of lower tickets: of all that are not done, the lowest
// belongs to a running block that is at it and waits for nothing, so progress needs no order of blocks.
#include <type_traits>

#include "advantages/advantages.h"
#include "common/cuda.cuh"

namespace megappo::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;
constexpr int kGroup = kWarp;  // tiles whose map is published as one
constexpr int kPerWarp = kWarp * kPerThread;

// x <- a x + c over a stretch of tokens, from its right edge to its left.
struct Map {
  double a_policy, c_policy, a_critic, c_critic;
  unsigned flags;
};
constexpr unsigned kCut = 1;   // a sequence ends in it: what is to its right does not matter, not even a NaN
constexpr unsigned kSeen = 2;  // it has sampled tokens of the sequence at its left edge

// What comes in at the right edge of a tile.
struct Entry {
  double x_policy, x_critic;
  bool seen;  // whether the sequence has sampled tokens further right
};

using Word = unsigned long long;
constexpr Word kUnset = ~Word{0};
constexpr int kWords = 5;  // of a map in memory

// All bits of `ticket`, `finished` and `maps` are set at the start: -1, and words that are not there.
struct Scratch {
  unsigned* ticket;    // of the last tile that was taken
  unsigned* finished;  // blocks that are done, less 1
  Word* maps;          // [kWords, num_maps]: of tiles, then of groups
  double* moments;     // [tiles, 3]; the count is NaN where cu_seqlens is not sound
  unsigned num_tiles;
  std::int64_t num_maps, borders_each;  // borders that a tile checks
  double decay_policy, decay_critic;    // gamma lambda of sequences without one of their own
};

// One sequence as the tokens of a thread see it.
struct Run {
  std::int64_t index, start, end;
  double decay_policy, decay_critic;  // gamma lambda
};

// The tokens of a thread, and for each a bit. Rewards are not rounded before they are used. kGeneral: with steps, weights and
// traces of tokens.
template <bool kGeneral>
struct Chunk {
  std::int64_t first;
  int count;  // below kPerThread at the end of the batch
  unsigned sampled = 0, steps = 0;  // steps: in general, among the sampled
  double reward[kPerThread];
  float value[kPerThread];

  __device__ bool is_step(int i) const { return !kGeneral || (steps >> i & 1); }
  // Weight and trace are read where they are used: eight of each would take 32 registers.
  __device__ double weight(const AdvantageArgs& a, int i) const {
    if constexpr (!kGeneral) return 1.0;
    return a.weight && is_step(i) ? __ldg(a.weight + first + i) : 1.0;
  }
  __device__ double trace(const AdvantageArgs& a, int i) const {
    if constexpr (!kGeneral) return 1.0;
    return a.trace && is_step(i) ? __ldg(a.trace + first + i) : 1.0;
  }
};

std::int64_t groups_of(std::int64_t tiles) { return tiles / kGroup; }

__device__ inline std::int64_t border(const AdvantageArgs& a, std::int64_t i) {
  return a.cu64 ? a.cu64[i] : static_cast<std::int64_t>(a.cu32[i]);
}

__device__ inline Map no_tokens() { return {1.0, 0.0, 1.0, 0.0, 0}; }

__device__ inline Map compose(const Map& left, const Map& right) {
  if (left.flags & kCut) return left;
  return {left.a_policy * right.a_policy, left.a_policy * right.c_policy + left.c_policy, left.a_critic * right.a_critic,
          left.a_critic * right.c_critic + left.c_critic, left.flags | right.flags};
}

__device__ inline Entry apply(const Map& map, const Entry& in) {
  const bool cut = map.flags & kCut, seen = map.flags & kSeen;
  return {cut ? map.c_policy : map.a_policy * in.x_policy + map.c_policy,
          cut ? map.c_critic : map.a_critic * in.x_critic + map.c_critic, cut ? seen : seen || in.seen};
}

__device__ inline Map shuffle_down(const Map& map, int by) {
  return {__shfl_down_sync(kAllLanes, map.a_policy, by), __shfl_down_sync(kAllLanes, map.c_policy, by),
          __shfl_down_sync(kAllLanes, map.a_critic, by), __shfl_down_sync(kAllLanes, map.c_critic, by),
          __shfl_down_sync(kAllLanes, map.flags, by)};
}

// Lane l gets the map of lanes l to kLanes - 1.
template <int kLanes = kWarp>
__device__ inline Map scan_from_right(Map map, int lane) {
#pragma unroll
  for (int by = 1; by < kLanes; by *= 2) {
    const Map right = shuffle_down(map, by);
    if (lane + by < kLanes) map = compose(map, right);
  }
  return map;
}

__device__ inline Word word_of(double x) {
  const Word bits = static_cast<Word>(__double_as_longlong(x));
  return bits == kUnset ? static_cast<Word>(__double_as_longlong(nan(""))) : bits;
}

// Every word says for itself whether it is there: a fence and a flag would take two ways through L2 where this takes one.
__device__ inline void publish(const Scratch& scratch, std::int64_t at, const Map& map) {
  const Word words[kWords] = {word_of(map.a_policy), word_of(map.c_policy), word_of(map.a_critic), word_of(map.c_critic), map.flags};
#pragma unroll
  for (int k = 0; k < kWords; ++k) const_cast<volatile Word*>(scratch.maps)[k * scratch.num_maps + at] = words[k];
}

// Volatile: past the L1 cache, which other blocks do not write to.
__device__ inline Map await(const Scratch& scratch, std::int64_t at) {
  Word words[kWords];
  bool there = false;
  while (!there) {
    there = true;
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = const_cast<volatile Word*>(scratch.maps)[k * scratch.num_maps + at];
#pragma unroll
    for (int k = 0; k < kWords; ++k) there = there && words[k] != kUnset;
  }
  const auto number = [&](int k) { return __longlong_as_double(static_cast<long long>(words[k])); };
  return {number(0), number(1), number(2), number(3), static_cast<unsigned>(words[4])};
}

// The sequence of token t: how many of cu_seqlens[1..] are not behind it. A warp looks, 32 borders at a time.
__device__ inline std::int64_t find_sequence(const AdvantageArgs& a, std::int64_t t, int lane) {
  std::int64_t low = 0, high = a.num_sequences;
  while (low < high) {
    const std::int64_t stride = (high - low + kWarp - 1) / kWarp;
    const std::int64_t probe = low + (lane + 1) * stride;
    const int passed = __popc(__ballot_sync(kAllLanes, probe <= high && border(a, probe) <= t));
    low += passed * stride;
    high = min(high, low + stride - 1);
  }
  return min(low, a.num_sequences - 1);
}

// The last sequence up to `index`, which starts behind t, that starts at t or before: steps that double, then halves.
__device__ inline std::int64_t find_below(const AdvantageArgs& a, std::int64_t t, std::int64_t index) {
  std::int64_t high = index, low = max(index - 1, std::int64_t{0});
  for (std::int64_t step = 2; low > 0 && border(a, low) > t; step *= 2) {
    high = low;
    low = max(low - step, std::int64_t{0});
  }
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (border(a, middle) <= t ? low : high) = middle;
  }
  return low;
}

__device__ inline Run enter(const AdvantageArgs& a, const Scratch& scratch, std::int64_t index, bool inner) {
  return {index, inner ? 0 : border(a, index), inner ? 0 : border(a, index + 1),
          a.policy.each ? a.gamma * a.policy.each[index] : scratch.decay_policy,
          a.critic.each ? a.gamma * a.critic.each[index] : scratch.decay_critic};
}

// Where a thread's tokens are: the sequence of the last one, and whether no sequence starts or ends within them, as in all but a few
// chunks.
struct Spot {
  std::int64_t sequence;
  bool inner;
};

template <bool kGeneral>
__device__ inline Spot locate(const AdvantageArgs& a, const Chunk<kGeneral>& chunk, std::int64_t of_tile) {
  if (chunk.count == 0) return {of_tile, false};
  std::int64_t sequence = of_tile, start = border(a, of_tile);
  const std::int64_t end = border(a, of_tile + 1);
  if (start <= chunk.first && chunk.first + kPerThread < end) return {sequence, chunk.count == kPerThread};
  if (start > chunk.first + chunk.count - 1) sequence = find_below(a, chunk.first + chunk.count - 1, of_tile);
  return {sequence, false};
}

// Calls ends(x) where a sequence ends behind token i, with the x it starts from, and token(i, run, false) where sampled. Where all
// tokens are inner and sampled, and the sequence has sampled ones further right, nothing is asked and it is token(i, run, true):
// 64-bit positions and branches cost more than the sums.
template <bool kGeneral, class Ends, class Token>
__device__ inline void walk(const AdvantageArgs& a, const Scratch& scratch, const Chunk<kGeneral>& chunk, const Spot& spot,
                            bool seen, Ends&& ends, Token&& token) {
  if (spot.inner && chunk.sampled == 0) return;
  if (spot.inner && seen && chunk.sampled == (1u << kPerThread) - 1) {
    const Run run = enter(a, scratch, spot.sequence, true);
#pragma unroll
    for (int i = kPerThread - 1; i >= 0; --i) token(i, run, std::true_type{});
    return;
  }
  if (chunk.count == 0) return;
  Run run = enter(a, scratch, spot.sequence, false);
#pragma unroll
  for (int i = kPerThread - 1; i >= 0; --i) {
    if (i >= chunk.count) continue;
    const std::int64_t t = chunk.first + i;
    if (t < run.start) {
      std::int64_t index = run.index;
      while (index > 0 && border(a, index) > t) --index;
      run = enter(a, scratch, index, false);
    }
    if (t == run.end - 1) {
      const double score = a.score[run.index];
      ends((a.bootstrap ? a.gamma * static_cast<double>(a.bootstrap[run.index]) : 0.0) + score);
    }
    if (chunk.sampled >> i & 1) token(i, run, std::false_type{});
  }
}

// Inputs of a block's tile in shared memory; a warp copies and reads its own tokens.
struct Stage {
  unsigned char* memory;

  static __host__ __device__ int after_kl(const AdvantageArgs& a) { return a.kl == Kl::none ? 1 : 3; }
  static __host__ __device__ int after_reward(const AdvantageArgs& a) { return after_kl(a) + (a.token_reward ? 1 : 0); }
  static std::size_t bytes(const AdvantageArgs& a) { return kTile * (1 + 4 * after_reward(a) + (a.steps ? 1 : 0)); }
  __device__ bool* mask() const { return reinterpret_cast<bool*>(memory); }
  __device__ float* floats(int field) const { return reinterpret_cast<float*>(memory + kTile * (1 + 4 * field)); }
  __device__ float* value() const { return floats(0); }
  __device__ float* logprob() const { return floats(1); }
  __device__ float* ref_logprob() const { return floats(2); }
  __device__ float* token_reward(const AdvantageArgs& a) const { return floats(after_kl(a)); }
  __device__ bool* steps(const AdvantageArgs& a) const { return reinterpret_cast<bool*>(floats(after_reward(a))); }

  // from: of the tile's first token. Lanes side by side, so that every instruction moves whole lines.
  __device__ void copy(float* to, const float* from) const {
    const int at = static_cast<int>(threadIdx.x) / kWarp * kPerWarp + static_cast<int>(threadIdx.x) % kWarp * 4;
    copy_async<16>(to + at, from + at);
    copy_async<16>(to + at + kPerWarp / 2, from + at + kPerWarp / 2);
  }
  __device__ void copy(bool* to, const bool* from) const {
    copy_async<8>(to + threadIdx.x * kPerThread, from + threadIdx.x * kPerThread);
  }
};

// Starts the copies of a whole tile, which `copies_arrived` waits for.
template <bool kGeneral>
__device__ inline void fetch(const AdvantageArgs& a, const Stage& stage, std::int64_t tile_first) {
  stage.copy(stage.value(), a.value + tile_first);
  stage.copy(stage.mask(), a.mask + tile_first);
  if (a.kl != Kl::none) {
    stage.copy(stage.logprob(), a.logprob + tile_first);
    stage.copy(stage.ref_logprob(), a.ref_logprob + tile_first);
  }
  if (a.token_reward) stage.copy(stage.token_reward(a), a.token_reward + tile_first);
  if constexpr (kGeneral) {
    if (a.steps) stage.copy(stage.steps(a), a.steps + tile_first);
  }
}

// The thread's tokens of a field: of `staged`, where the tile is, else of memory.
__device__ inline void read_floats(const float* at, const float* staged, int count, bool is_staged, float (&x)[kPerThread]) {
  if (is_staged) {
    const float4* quads = reinterpret_cast<const float4*>(staged + threadIdx.x * kPerThread);
    const float4 p = quads[0], q = quads[1];
    x[0] = p.x, x[1] = p.y, x[2] = p.z, x[3] = p.w, x[4] = q.x, x[5] = q.y, x[6] = q.z, x[7] = q.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) x[i] = i < count ? at[i] : 0.0f;
}

__device__ inline uint2 read_bytes(const bool* at, const bool* staged, int count, bool is_staged) {
  if (is_staged) return *reinterpret_cast<const uint2*>(staged + threadIdx.x * kPerThread);
  uint2 bytes{0, 0};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) (i < 4 ? bytes.x : bytes.y) |= i < count && at[i] ? 1u << i % 4 * 8 : 0u;
  return bytes;
}

// Bit i is set where byte i is.
__device__ inline unsigned bits_of(uint2 bytes) {
  // 0x01 bytes times this constant gather in the top byte's low four bits.
  return (bytes.x * 0x01020408u >> 24 & 15u) | (bytes.y * 0x01020408u >> 24 & 15u) << 4;
}

// `vectors` holds for the whole warp. Neighbouring lanes swap halves, so that every instruction writes whole 32-byte sectors.
__device__ inline void write_floats(float* at, int count, bool vectors, const float (&x)[kPerThread]) {
  if (!vectors) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i < count) at[i] = x[i];
    }
    return;
  }
  const bool odd = threadIdx.x % 2;
  float4 first, second;
  const float give[4] = {odd ? x[0] : x[4], odd ? x[1] : x[5], odd ? x[2] : x[6], odd ? x[3] : x[7]};
  float got[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) got[i] = __shfl_xor_sync(kAllLanes, give[i], 1);
  first = odd ? make_float4(got[0], got[1], got[2], got[3]) : make_float4(x[0], x[1], x[2], x[3]);
  second = odd ? make_float4(x[4], x[5], x[6], x[7]) : make_float4(got[0], got[1], got[2], got[3]);
  float4* to = reinterpret_cast<float4*>(at) - (odd ? 1 : 0);
  to[0] = first;
  to[2] = second;
}

__device__ inline double kl_of(Kl kind, double log_ratio) {
  if (kind == Kl::k1) return log_ratio;
  if (kind == Kl::k2) return 0.5 * log_ratio * log_ratio;
  const double minus = -log_ratio;
  return expm1(minus > kMaxLogRatio ? kMaxLogRatio : minus) + log_ratio;
}

template <bool kGeneral>
__device__ inline Chunk<kGeneral> read_chunk(const AdvantageArgs& a, const Stage& stage, std::int64_t first, bool is_staged) {
  Chunk<kGeneral> chunk;
  chunk.first = first;
  chunk.count = kPerThread;
  if (!is_staged) chunk.count = static_cast<int>(min(max(a.num_tokens - first, std::int64_t{0}), std::int64_t{kPerThread}));
  read_floats(a.value + first, stage.value(), chunk.count, is_staged, chunk.value);
  chunk.sampled = bits_of(read_bytes(a.mask + first, stage.mask(), chunk.count, is_staged));
  float taken[kPerThread] = {}, reference[kPerThread] = {};
  if (a.kl != Kl::none) {
    read_floats(a.logprob + first, stage.logprob(), chunk.count, is_staged, taken);
    read_floats(a.ref_logprob + first, stage.ref_logprob(), chunk.count, is_staged, reference);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const double log_ratio = static_cast<double>(taken[i]) - static_cast<double>(reference[i]);
    chunk.reward[i] = a.kl != Kl::none && (chunk.sampled >> i & 1) ? -a.kl_coef * kl_of(a.kl, log_ratio) : 0.0;
  }
  if (a.token_reward) {
    float inner[kPerThread];
    read_floats(a.token_reward + first, stage.token_reward(a), chunk.count, is_staged, inner);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (chunk.sampled >> i & 1) chunk.reward[i] += static_cast<double>(inner[i]);
    }
  }
  if constexpr (kGeneral) {
    chunk.steps = chunk.sampled;
    if (a.steps) chunk.steps &= bits_of(read_bytes(a.steps + first, stage.steps(a), chunk.count, is_staged));
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (!chunk.is_step(i)) chunk.value[i] = 0.0f;
    }
  }
  return chunk;
}

template <bool kGeneral>
__device__ inline Map map_of(const AdvantageArgs& a, const Scratch& scratch, const Chunk<kGeneral>& chunk, const Spot& spot) {
  Map map = no_tokens();
  walk(
      a, scratch, chunk, spot, true, [&](double x) { map = {0.0, x, 0.0, x, kCut}; },
      [&](int i, const Run& run, auto) {
        const double value = chunk.value[i], u = chunk.reward[i] - value, after = a.gamma * value;
        double decay_policy = run.decay_policy, decay_critic = run.decay_critic;
        if constexpr (kGeneral) {
          const double passes = chunk.weight(a, i) * chunk.trace(a, i);
          decay_policy = chunk.is_step(i) ? decay_policy * passes : 1.0;
          decay_critic = chunk.is_step(i) ? decay_critic * passes : 1.0;
        }
        map.c_policy = decay_policy * (map.c_policy + u) + after;
        map.c_critic = decay_critic * (map.c_critic + u) + after;
        map.a_policy *= decay_policy;
        map.a_critic *= decay_critic;
        map.flags |= kSeen;
      });
  return map;
}

// The map of all tiles to the right of this one, as far as they matter, in place of this tile's; called by a full warp. `map` is lane
// 0's, in shared memory: registers are dear.
__device__ inline void look_right(const Scratch& scratch, unsigned ticket, Map& map, bool open, int lane) {
  const int before = static_cast<int>(ticket % kGroup);
  const std::int64_t group = ticket / kGroup;
  const bool completes = before == kGroup - 1;
  unsigned flags = kCut;
  if (open || completes) {
    const Map right =
        scan_from_right(lane < before ? await(scratch, static_cast<std::int64_t>(ticket) - 1 - lane) : no_tokens(), lane);
    if (completes && lane == 0) publish(scratch, scratch.num_tiles + group, compose(map, right));
    if (lane == 0) map = right;
    flags = open ? __shfl_sync(kAllLanes, right.flags, 0) : kCut;
  } else if (lane == 0) {
    map = no_tokens();
  }
#pragma unroll 1
  for (std::int64_t g = group - 1; !(flags & kCut) && g >= 0; g -= kWarp) {
    const Map groups = scan_from_right(lane <= g ? await(scratch, scratch.num_tiles + g - lane) : no_tokens(), lane);
    if (lane == 0) map = compose(map, groups);
    flags = __shfl_sync(kAllLanes, groups.flags, 0);
  }
}

// The recurrence over the tokens of a thread, and its outputs; adds to the moments.
template <bool kGeneral>
__device__ inline void run_chunk(const AdvantageArgs& a, const Scratch& scratch, const Chunk<kGeneral>& chunk, const Spot& spot,
                                 Entry in, bool vectors, double (&moments)[2]) {
  float reward[kPerThread], advantage[kPerThread] = {}, returns[kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) reward[i] = static_cast<float>(chunk.reward[i]);
  walk(
      a, scratch, chunk, spot, in.seen, [&](double x) { in = {x, x, false}; },
      [&](int i, const Run& run, auto inner) {
        const double value = chunk.value[i], u = chunk.reward[i] - value, after = a.gamma * value;
        if (!inner && !in.seen) reward[i] = static_cast<float>(chunk.reward[i] + static_cast<double>(a.score[run.index]));
        double of_policy = u + in.x_policy, of_critic = u + in.x_critic;
        if constexpr (kGeneral) {
          if (!chunk.is_step(i)) {
            in = {of_policy, of_critic, true};
            return;
          }
          const double weight = chunk.weight(a, i), trace = chunk.trace(a, i);
          of_policy *= weight;
          of_critic *= weight;
          in = {run.decay_policy * trace * of_policy + after, run.decay_critic * trace * of_critic + after, true};
        } else {
          in = {run.decay_policy * of_policy + after, run.decay_critic * of_critic + after, true};
        }
        advantage[i] = static_cast<float>(of_policy);
        returns[i] = static_cast<float>(of_critic + value);
        const double kept = advantage[i];
        moments[0] += kept;
        moments[1] += kept * kept;
      });
  write_floats(a.reward + chunk.first, chunk.count, vectors, reward);
  write_floats(a.advantage + chunk.first, chunk.count, vectors, advantage);
  write_floats(a.returns + chunk.first, chunk.count, vectors, returns);
}

// Whether this tile's share of cu_seqlens is not sound; called by a full warp.
__device__ inline bool has_fault(const AdvantageArgs& a, const Scratch& scratch, unsigned ticket, int lane) {
  const std::int64_t begin = scratch.borders_each * ticket, end = min(begin + scratch.borders_each, a.num_sequences);
  bool fault = ticket == 0 && (border(a, 0) != 0 || border(a, a.num_sequences) != a.num_tokens);
#pragma unroll 1
  for (std::int64_t i = begin + lane; i < end; i += kWarp) fault |= border(a, i) > border(a, i + 1);
  return __any_sync(kAllLanes, fault);
}

// The sums over a warp of x[0] in the lanes below 16, of x[1] in the others: one reduction for both.
__device__ inline double sums_of_pair(const double (&x)[2], int lane) {
  const bool upper = lane >= kWarp / 2;
  double sum = (upper ? x[1] : x[0]) + __shfl_xor_sync(kAllLanes, upper ? x[0] : x[1], kWarp / 2);
  for (int offset = kWarp / 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// Adds the moments of a tile's warps, in their order.
__device__ inline void add_warps(const Scratch& scratch, unsigned tile, const double (&of_warps)[3][kWarps], int lane) {
  if (lane >= 3) return;
  double total = of_warps[lane][0];
  for (int w = 1; w < kWarps; ++w) total += of_warps[lane][w];
  scratch.moments[3 * static_cast<std::int64_t>(tile) + lane] = total;
}

// The block that finishes last adds the moments of all tiles in the order of the tiles.
__device__ inline void finish(const AdvantageArgs& a, const Scratch& scratch, double (&per_warp)[3][kWarps]) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(scratch.finished, 1u) + 1u == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  double sums[3] = {};
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < scratch.num_tiles; i += kThreads) {
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] += __ldcg(scratch.moments + 3 * i + k);
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] = block_sum(sums[k], per_warp[k]);
  const bool sound = !isnan(sums[0]);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < 3; ++k) a.moments[k] = sound ? sums[k] : nan("");
  }
  for (std::int64_t t = threadIdx.x; !sound && t < a.num_tokens; t += kThreads) {
    a.reward[t] = a.advantage[t] = a.returns[t] = nanf("");
  }
}

__device__ inline unsigned take_ticket(const Scratch& scratch) { return atomicAdd(scratch.ticket, 1u) + 1u; }

// Blocks that an SM's registers are to hold: three make the compiler spill where tokens carry more, and before Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <bool kGeneral>
constexpr int kBlocks = kGeneral ? 2 : 3;
#else
template <bool kGeneral>
constexpr int kBlocks = 2;
#endif

template <bool kGeneral>
__global__ void __launch_bounds__(kThreads, kBlocks<kGeneral>) advantages_kernel(AdvantageArgs a, Scratch scratch, bool aligned) {
  MEGAPPO_DYNAMIC_SHARED(unsigned char, staged);
  __shared__ unsigned next_ticket, done;  // done: the tile before
  __shared__ std::int64_t next_sequence;
  __shared__ bool fault, ended;
  __shared__ Map totals[kWarps + 1];  // of the warps, then of what is behind each; the last: of the tile
  __shared__ Entry entry;             // of the tile
  __shared__ double of_warps[3][kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Stage stage{staged};
  const auto first_of = [&](unsigned ticket) { return static_cast<std::int64_t>(scratch.num_tiles - 1 - ticket) * kTile; };
  const auto last_of = [&](unsigned ticket) { return min(first_of(ticket) + kTile, a.num_tokens) - 1; };
  const auto is_whole = [&](unsigned ticket) { return aligned && first_of(ticket) + kTile <= a.num_tokens; };

  if (threadIdx.x == 0) next_ticket = take_ticket(scratch);
  __syncthreads();
  unsigned ticket = next_ticket;
  if (threadIdx.x == 0) done = scratch.num_tiles;  // none
  if (ticket < scratch.num_tiles) {
    if (is_whole(ticket)) fetch<kGeneral>(a, stage, first_of(ticket));
    const std::int64_t found = find_sequence(a, last_of(ticket), lane);
    if (threadIdx.x == 0) next_sequence = found;
  }
  __syncthreads();
  while (ticket < scratch.num_tiles) {
    unsigned taken = 0;  // on its way while the tokens are worked on
    if (threadIdx.x == 0) taken = take_ticket(scratch);
    const bool vectors = is_whole(ticket);
    copies_arrived();
    __syncwarp();
    const Chunk<kGeneral> chunk =
        read_chunk<kGeneral>(a, stage, first_of(ticket) + static_cast<int>(threadIdx.x) * kPerThread, vectors);
    const std::int64_t of_last = next_sequence;
    if (threadIdx.x == 0) ended = border(a, of_last + 1) == last_of(ticket) + 1;
    const Spot spot = locate(a, chunk, of_last);
    const Map from_here = scan_from_right(map_of(a, scratch, chunk, spot), lane);
    if (lane == 0) totals[warp] = from_here;
    Map behind = shuffle_down(from_here, 1);
    if (lane == kWarp - 1) behind = no_tokens();
    if (threadIdx.x == 0) next_ticket = taken;
    __syncthreads();

    const unsigned next = next_ticket;
    if (warp == 0) {
      const Map from_warp = scan_from_right<kWarps>(lane < kWarps ? totals[lane] : no_tokens(), lane);
      if (lane == 0) {
        totals[kWarps] = from_warp;
        publish(scratch, ticket, from_warp);
      }
      const Map behind_warp = shuffle_down(from_warp, 1);
      if (lane < kWarps) totals[lane] = behind_warp;
      look_right(scratch, ticket, totals[kWarps], !ended, lane);
      if (lane == 0) entry = apply(totals[kWarps], {0.0, 0.0, false});
    } else if (warp == 1 && next < scratch.num_tiles) {
      const std::int64_t found = find_sequence(a, last_of(next), lane);
      if (lane == 0) next_sequence = found;
    } else if (warp == 2 && done < scratch.num_tiles) {
      add_warps(scratch, done, of_warps, lane);
    } else if (warp == 3) {
      const bool found = has_fault(a, scratch, ticket, lane);
      if (lane == 0) fault = found;
    }
    if (next < scratch.num_tiles && is_whole(next)) fetch<kGeneral>(a, stage, first_of(next));
    __syncthreads();
    double moments[2] = {};
    run_chunk(a, scratch, chunk, spot, apply(behind, apply(totals[warp], entry)), vectors, moments);
    const int count = warp_sum(__popc(kGeneral ? chunk.steps : chunk.sampled));
    const double sums = sums_of_pair(moments, lane);
    if (lane == 0) of_warps[0][warp] = fault ? nan("") : count;
    if (lane % 16 == 0) of_warps[1 + lane / 16][warp] = sums;
    if (threadIdx.x == 0) done = scratch.num_tiles - 1 - ticket;
    ticket = next;
  }
  __syncthreads();
  if (warp == 2 && done < scratch.num_tiles) add_warps(scratch, done, of_warps, lane);
  finish(a, scratch, of_warps);
}

struct Layout {
  std::int64_t tiles, maps, maps_at, moments_at, bytes;

  explicit Layout(std::int64_t num_tokens) {
    tiles = (num_tokens + kTile - 1) / kTile;
    maps = tiles + groups_of(tiles);
    maps_at = 2 * static_cast<std::int64_t>(sizeof(unsigned));
    moments_at = maps_at + maps * kWords * static_cast<std::int64_t>(sizeof(Word));
    bytes = moments_at + tiles * 3 * static_cast<std::int64_t>(sizeof(double));
  }
};

bool is_aligned(const void* at, std::uintptr_t bytes) { return reinterpret_cast<std::uintptr_t>(at) % bytes == 0; }

}  // namespace

std::int64_t advantages_scratch(std::int64_t num_tokens) { return Layout(num_tokens).bytes; }

void advantages(const AdvantageArgs& args, void* memory, Stream stream) {
  if (args.num_tokens == 0) {
    return check(cudaMemsetAsync(args.moments, 0, 3 * sizeof(double), stream), "advantages");
  }
  const Layout layout(args.num_tokens);
  char* base = static_cast<char*>(memory);
  unsigned* words = static_cast<unsigned*>(memory);
  // No kernel could set them without being waited for, and they are 41 bytes for 2048 tokens.
  check(cudaMemsetAsync(memory, 0xff, static_cast<size_t>(layout.moments_at), stream), "advantages");
  const Scratch scratch{words, words + 1, reinterpret_cast<Word*>(base + layout.maps_at),
                        reinterpret_cast<double*>(base + layout.moments_at), static_cast<unsigned>(layout.tiles), layout.maps,
                        (args.num_sequences + layout.tiles - 1) / layout.tiles, args.gamma * args.policy.all,
                        args.gamma * args.critic.all};
  bool aligned = is_aligned(args.mask, 8) && is_aligned(args.steps, 8);
  for (const float* at : {args.token_reward, args.logprob, args.ref_logprob, args.value}) {
    aligned = aligned && is_aligned(at, 16);
  }
  const auto kernel = args.is_general() ? advantages_kernel<true> : advantages_kernel<false>;
  const std::size_t shared = Stage::bytes(args);
  const unsigned blocks = min(scratch.num_tiles, blocks_at_once("advantages", kernel, kThreads, shared));
  launch("advantages", kernel, dim3(blocks), kThreads, shared, stream, args, scratch, aligned);
}

}  // namespace megappo::cuda
