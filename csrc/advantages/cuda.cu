// One launch. A block takes a tile of 2048 tokens, 8 in a row to a thread, and turns them into an affine map of x (advantages.h);
// maps compose in the block, between tiles, and then every thread runs the recurrence over its tokens from its own x. Each input
// is read once and each output written once, 21 B a token without a KL: at 4.3 TB/s an H200 has 160 fp64 operations for a token
// and this takes about 25. 8 tokens a thread are 72 bytes asked for before anything waits, over 50 KiB per SM.
//
// Between tiles: two levels in an order fixed by position, so that results do not depend on which block was faster, as they would
// where a block takes the nearest prefix that happens to be ready. A tile publishes its map, and the last tile of 32 the map of
// the 32; a tile that ends within a sequence composes what is to its right until the end of the sequence cuts it off, a warp at a
// time: usually one map, at worst 31 and one for every 65,536 tokens. Tiles are numbered from the right by an atomic ticket, and
// a tile only waits for maps of lower tickets, which wait for nothing but lower tickets: progress needs no order of blocks.
#include "advantages/advantages.h"
#include "common/cuda.cuh"

namespace megappo::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;
constexpr int kGroup = kWarp;  // tiles whose map is published as one

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

struct Scratch {
  unsigned* ticket;      // the next tile; this and the next two are zero at the start
  unsigned* finished;    // tiles that are done
  unsigned* ready;       // [tiles + groups] whether the map is there
  Map* maps;             // [tiles + groups]
  double* moments;       // [tiles, 3]; the count is NaN where cu_seqlens is not sound
  unsigned num_tiles;
};

// One sequence as the tokens of a thread see it.
struct Run {
  std::int64_t index, start, end;
  double decay_policy, decay_critic;  // gamma lambda
};

// The tokens of a thread, and for each a bit. Rewards are not rounded before they are used. kGeneral: with rewards, steps, weights
// and traces of tokens.
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

// Lane l gets the map of lanes l to 31.
__device__ inline Map scan_from_right(Map map, int lane) {
  for (int by = 1; by < kWarp; by *= 2) {
    const Map right = shuffle_down(map, by);
    if (lane + by < kWarp) map = compose(map, right);
  }
  return map;
}

__device__ inline void publish(const Scratch& scratch, std::int64_t at, const Map& map) {
  scratch.maps[at] = map;
  __threadfence();
  *const_cast<volatile unsigned*>(scratch.ready + at) = 1;
}

// Past the L1 cache, which other blocks do not write to.
__device__ inline Map await(const Scratch& scratch, std::int64_t at) {
  while (*const_cast<volatile unsigned*>(scratch.ready + at) == 0) {
  }
  __threadfence();
  const Map* map = scratch.maps + at;
  return {__ldcg(&map->a_policy), __ldcg(&map->c_policy), __ldcg(&map->a_critic), __ldcg(&map->c_critic), __ldcg(&map->flags)};
}

// The sequence of token t: how many of cu_seqlens[1..] are not behind it. The whole block looks, 256 borders at a time.
__device__ inline std::int64_t find_sequence(const AdvantageArgs& a, std::int64_t t) {
  std::int64_t low = 0, high = a.num_sequences;
  while (low < high) {
    const std::int64_t stride = (high - low + kThreads - 1) / kThreads;
    const std::int64_t probe = low + (static_cast<std::int64_t>(threadIdx.x) + 1) * stride;
    const int passed = __syncthreads_count(probe <= high && border(a, probe) <= t);
    low += passed * stride;
    high = min(high, low + stride - 1);
  }
  return min(low, a.num_sequences - 1);
}

// The last sequence up to `index` that starts at t or before: steps that double, then halves.
__device__ inline std::int64_t find_below(const AdvantageArgs& a, std::int64_t t, std::int64_t index) {
  if (border(a, index) <= t) return index;
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

__device__ inline Run enter(const AdvantageArgs& a, std::int64_t index) {
  return {index, border(a, index), border(a, index + 1), a.gamma * (a.policy.each ? a.policy.each[index] : a.policy.all),
          a.gamma * (a.critic.each ? a.critic.each[index] : a.critic.all)};
}

// Calls ends(x) where a sequence ends behind token i, with the x it starts from, and token(i, run) where sampled.
template <bool kGeneral, class Ends, class Token>
__device__ inline void walk(const AdvantageArgs& a, const Chunk<kGeneral>& chunk, std::int64_t last_sequence, Ends&& ends,
                            Token&& token) {
  if (chunk.count == 0) return;
  Run run = enter(a, last_sequence);
  // Where no sequence starts or ends, as in all but a few chunks, nothing is compared: 64-bit positions cost more than the sums.
  if (chunk.count == kPerThread && run.start <= chunk.first && chunk.first + kPerThread < run.end) {
#pragma unroll
    for (int i = kPerThread - 1; i >= 0; --i) {
      if (chunk.sampled >> i & 1) token(i, run);
    }
    return;
  }
#pragma unroll
  for (int i = kPerThread - 1; i >= 0; --i) {
    if (i >= chunk.count) continue;
    const std::int64_t t = chunk.first + i;
    if (t < run.start) {
      std::int64_t index = run.index;
      while (index > 0 && border(a, index) > t) --index;
      run = enter(a, index);
    }
    if (t == run.end - 1) {
      const double score = a.score[run.index];
      ends((a.bootstrap ? a.gamma * static_cast<double>(a.bootstrap[run.index]) : 0.0) + score);
    }
    if (chunk.sampled >> i & 1) token(i, run);
  }
}

__device__ inline void read_floats(const float* at, int count, bool vectors, float (&x)[kPerThread]) {
  if (vectors && count == kPerThread) {
    const float4* quads = reinterpret_cast<const float4*>(at);
    const float4 p = __ldg(quads), q = __ldg(quads + 1);
    x[0] = p.x, x[1] = p.y, x[2] = p.z, x[3] = p.w, x[4] = q.x, x[5] = q.y, x[6] = q.z, x[7] = q.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) x[i] = i < count ? at[i] : 0.0f;
}

__device__ inline uint2 read_bytes(const bool* at, int count, bool vectors) {
  uint2 bytes{0, 0};
  if (vectors && count == kPerThread) return __ldg(reinterpret_cast<const uint2*>(at));
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

// `meanwhile` runs while the tokens are on their way from memory: nothing before it looks at them.
template <bool kGeneral, class Meanwhile>
__device__ inline Chunk<kGeneral> read_chunk(const AdvantageArgs& a, std::int64_t first, bool vectors, Meanwhile&& meanwhile) {
  Chunk<kGeneral> chunk;
  chunk.first = first;
  chunk.count = static_cast<int>(min(max(a.num_tokens - first, std::int64_t{0}), std::int64_t{kPerThread}));
  read_floats(a.value + first, chunk.count, vectors, chunk.value);
  const uint2 sampled = read_bytes(a.mask + first, chunk.count, vectors);
  float taken[kPerThread] = {}, reference[kPerThread] = {};
  if (a.kl != Kl::none) {
    read_floats(a.logprob + first, chunk.count, vectors, taken);
    read_floats(a.ref_logprob + first, chunk.count, vectors, reference);
  }
  meanwhile();
  chunk.sampled = bits_of(sampled);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const double log_ratio = static_cast<double>(taken[i]) - static_cast<double>(reference[i]);
    chunk.reward[i] = a.kl != Kl::none && (chunk.sampled >> i & 1) ? -a.kl_coef * kl_of(a.kl, log_ratio) : 0.0;
  }
  if constexpr (kGeneral) {
    chunk.steps = a.steps ? chunk.sampled & bits_of(read_bytes(a.steps + first, chunk.count, vectors)) : chunk.sampled;
    float inner[kPerThread] = {};
    if (a.token_reward) read_floats(a.token_reward + first, chunk.count, vectors, inner);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (chunk.sampled >> i & 1) chunk.reward[i] += static_cast<double>(inner[i]);
      if (!chunk.is_step(i)) chunk.value[i] = 0.0f;
    }
  }
  return chunk;
}

template <bool kGeneral>
__device__ inline Map map_of(const AdvantageArgs& a, const Chunk<kGeneral>& chunk, std::int64_t last_sequence) {
  Map map = no_tokens();
  walk(
      a, chunk, last_sequence, [&](double x) { map = {0.0, x, 0.0, x, kCut}; },
      [&](int i, const Run& run) {
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

// The map of all tiles to the right of this one, as far as they matter; called by a full warp. `own` is this tile's map.
__device__ inline Map look_right(const Scratch& scratch, unsigned ticket, const Map& own, bool open, int lane) {
  const int before = static_cast<int>(ticket % kGroup);
  const std::int64_t group = ticket / kGroup;
  const bool completes = before == kGroup - 1;
  Map right = no_tokens();
  if (!open && !completes) return right;
  right = scan_from_right(lane < before ? await(scratch, static_cast<std::int64_t>(ticket) - 1 - lane) : no_tokens(), lane);
  if (completes && lane == 0) publish(scratch, scratch.num_tiles + group, compose(own, right));
  for (std::int64_t g = group - 1; open && g >= 0; g -= kWarp) {
    if (__shfl_sync(kAllLanes, right.flags, 0) & kCut) break;
    right = compose(right, scan_from_right(lane <= g ? await(scratch, scratch.num_tiles + g - lane) : no_tokens(), lane));
  }
  return right;
}

// The recurrence over the tokens of a thread, and its outputs; adds to the moments.
template <bool kGeneral>
__device__ inline void run_chunk(const AdvantageArgs& a, const Chunk<kGeneral>& chunk, std::int64_t last_sequence, Entry in,
                                 bool vectors, double (&moments)[3]) {
  float reward[kPerThread], advantage[kPerThread] = {}, returns[kPerThread] = {};
  moments[0] += __popc(kGeneral ? chunk.steps : chunk.sampled);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) reward[i] = static_cast<float>(chunk.reward[i]);
  walk(
      a, chunk, last_sequence, [&](double x) { in = {x, x, false}; },
      [&](int i, const Run& run) {
        const double value = chunk.value[i], u = chunk.reward[i] - value, after = a.gamma * value;
        if (!in.seen) reward[i] = static_cast<float>(chunk.reward[i] + static_cast<double>(a.score[run.index]));
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
        moments[1] += kept;
        moments[2] += kept * kept;
      });
  write_floats(a.reward + chunk.first, chunk.count, vectors, reward);
  write_floats(a.advantage + chunk.first, chunk.count, vectors, advantage);
  write_floats(a.returns + chunk.first, chunk.count, vectors, returns);
}

// NaN where this tile's share of cu_seqlens is not sound, else 0.
__device__ inline double fault_in_borders(const AdvantageArgs& a, const Scratch& scratch, unsigned ticket) {
  const std::int64_t share = (a.num_sequences + scratch.num_tiles - 1) / scratch.num_tiles;
  const std::int64_t begin = share * ticket, end = min(begin + share, a.num_sequences);
  bool fault = ticket == 0 && (border(a, 0) != 0 || border(a, a.num_sequences) != a.num_tokens);
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) fault |= border(a, i) > border(a, i + 1);
  return fault ? nan("") : 0.0;
}

// The block that finishes last adds the moments of all tiles in the order of the tiles.
__device__ inline void finish(const AdvantageArgs& a, const Scratch& scratch, unsigned tile, double (&moments)[3]) {
  __shared__ double per_warp[3][kWarps];
  __shared__ bool is_last;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const double total = warp_sum(moments[k]);
    if (threadIdx.x % kWarp == 0) per_warp[k][threadIdx.x / kWarp] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      double total = per_warp[k][0];
      for (int w = 1; w < kWarps; ++w) total += per_warp[k][w];
      scratch.moments[3 * static_cast<std::int64_t>(tile) + k] = total;
    }
    __threadfence();
    is_last = atomicAdd(scratch.finished, 1u) == scratch.num_tiles - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  double sums[3] = {};
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

template <bool kGeneral>
__global__ void __launch_bounds__(kThreads, 3) advantages_kernel(AdvantageArgs a, Scratch scratch, bool aligned) {
  __shared__ unsigned my_ticket;
  __shared__ Map totals[kWarps];
  __shared__ Entry entry;
  if (threadIdx.x == 0) my_ticket = atomicAdd(scratch.ticket, 1u);
  __syncthreads();
  const unsigned ticket = my_ticket, tile = scratch.num_tiles - 1 - ticket;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t tile_first = static_cast<std::int64_t>(tile) * kTile;
  const std::int64_t tile_last = min(tile_first + kTile, a.num_tokens) - 1;
  const bool vectors = aligned && tile_first + kTile <= a.num_tokens;

  std::int64_t tile_sequence = 0;
  const Chunk<kGeneral> chunk = read_chunk<kGeneral>(a, tile_first + static_cast<int>(threadIdx.x) * kPerThread, vectors,
                                                     [&] { tile_sequence = find_sequence(a, tile_last); });
  const std::int64_t sequence = chunk.count ? find_below(a, chunk.first + chunk.count - 1, tile_sequence) : tile_sequence;

  const Map from_here = scan_from_right(map_of(a, chunk, sequence), lane);
  if (lane == 0) totals[warp] = from_here;
  Map behind = shuffle_down(from_here, 1);
  if (lane == kWarp - 1) behind = no_tokens();
  __syncthreads();
  Map of_warps = no_tokens();
  for (int w = kWarps - 1; w > warp; --w) of_warps = compose(totals[w], of_warps);
  behind = compose(behind, of_warps);

  if (warp == 0) {
    const Map own = compose(totals[0], of_warps);
    if (lane == 0) publish(scratch, ticket, own);
    const bool ended = border(a, tile_sequence + 1) == tile_last + 1;
    const Map right = look_right(scratch, ticket, own, !ended, lane);
    if (lane == 0) entry = apply(right, {0.0, 0.0, false});
  }
  double moments[3] = {fault_in_borders(a, scratch, ticket), 0.0, 0.0};
  __syncthreads();
  run_chunk(a, chunk, sequence, apply(behind, entry), vectors, moments);
  finish(a, scratch, tile, moments);
}

struct Layout {
  std::int64_t tiles, maps, zeroed, maps_at, moments_at, bytes;

  explicit Layout(std::int64_t num_tokens) {
    tiles = (num_tokens + kTile - 1) / kTile;
    maps = tiles + groups_of(tiles);
    zeroed = (2 + maps) * static_cast<std::int64_t>(sizeof(unsigned));
    maps_at = (zeroed + 15) / 16 * 16;
    moments_at = maps_at + maps * static_cast<std::int64_t>(sizeof(Map));
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
  // No kernel could zero them without being waited for, and they are 4 bytes for 2048 tokens.
  check(cudaMemsetAsync(memory, 0, static_cast<size_t>(layout.zeroed), stream), "advantages");
  const Scratch scratch{words, words + 1, words + 2, reinterpret_cast<Map*>(base + layout.maps_at),
                        reinterpret_cast<double*>(base + layout.moments_at), static_cast<unsigned>(layout.tiles)};
  bool aligned = is_aligned(args.mask, 8) && is_aligned(args.steps, 8);
  for (const float* at : {args.token_reward, args.logprob, args.ref_logprob, args.value}) {
    aligned = aligned && is_aligned(at, 16);
  }
  const bool is_general = args.is_general() || args.token_reward;
  const auto kernel = is_general ? advantages_kernel<true> : advantages_kernel<false>;
  launch("advantages", kernel, dim3(scratch.num_tiles), kThreads, 0, stream, args, scratch, aligned);
}

}  // namespace megappo::cuda
