// Statistic and backward of vocabulary-parallel logits at the speed of the memory: every logit is read once (the backward writes
// it once), in 16-byte loads of which a thread has four under way. A block of 256 threads works on one segment of a row, and several
// blocks share a multiprocessor, so about 64 KiB are in flight on each: twice what the latency of an H100's memory asks for. Per
// logit there are about ten instructions and one exponential, half of what fits into the time that its two bytes take.
//
// Which thread takes which columns depends on the column alone, not on the address: rows of odd length (V = 50257 in bf16) start
// at any multiple of two bytes, and a row must have the same bits wherever it lies. A row that is not aligned is read as the two
// aligned neighbours of each 16 bytes; the second comes from the L1 cache.
#include <cmath>
#include <utility>

#include "common/cuda.cuh"
#include "vocab_stats/vocab_stats.h"

namespace megappo::cuda {
namespace {

constexpr int kMaxThreads = 256, kUnroll = 4;
constexpr float kInfinity = INFINITY;

template <class T>
constexpr int kVector = 16 / sizeof(T);

// -inf in every element of a word.
template <class T>
__device__ unsigned minus_infinities();
template <>
__device__ inline unsigned minus_infinities<float>() { return 0xff800000u; }
template <>
__device__ inline unsigned minus_infinities<bf16>() { return 0xff80ff80u; }
template <>
__device__ inline unsigned minus_infinities<f16>() { return 0xfc00fc00u; }

__device__ inline void unpack(uint4 raw, float (&x)[4], float) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y), x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}
template <class T>
__device__ inline void unpack(uint4 raw, float (&x)[8], T) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float(T{static_cast<std::uint16_t>(words[i])});
    x[2 * i + 1] = to_float(T{static_cast<std::uint16_t>(words[i] >> 16)});
  }
}

template <class Pair>
__device__ inline unsigned bits_as_word(Pair x) {
  static_assert(sizeof(Pair) == 4);
  unsigned word;
  memcpy(&word, &x, 4);
  return word;
}
__device__ inline unsigned pack_two(float low, float high, bf16) { return bits_as_word(__floats2bfloat162_rn(low, high)); }
__device__ inline unsigned pack_two(float low, float high, f16) { return bits_as_word(__floats2half2_rn(low, high)); }

// One group of results as it is stored: 16 bytes, or 8 where fp32 becomes a half type.
__device__ inline uint4 pack(const float (&x)[4], float) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
template <class T>
__device__ inline uint2 pack(const float (&x)[4], T type) {
  return make_uint2(pack_two(x[0], x[1], type), pack_two(x[2], x[3], type));
}
template <class T>
__device__ inline uint4 pack(const float (&x)[8], T type) {
  return make_uint4(pack_two(x[0], x[1], type), pack_two(x[2], x[3], type), pack_two(x[4], x[5], type),
                    pack_two(x[6], x[7], type));
}

__device__ inline unsigned misalignment(const void* at, unsigned bytes = 16) {
  return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(at) & (bytes - 1));
}

// The 16 bytes from `bytes` (1 to 15) on of two neighbours.
__device__ inline uint4 realigned(uint4 a, uint4 b, unsigned bytes) {
  unsigned w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  if (bytes & 8u) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (bytes & 4u) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  const unsigned bits = (bytes & 3u) * 8u;
  return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
                    __funnelshift_r(w[3], w[4], bits));
}

// Up to four groups of 16 bytes of a row, `stride` groups apart, from group `first` on; what lies behind `groups` is -inf. All 16
// bytes of a group belong to the row, so both neighbours of an unaligned group hold bytes of it and can be read.
template <class T>
__device__ inline void load_groups(const T* row, int first, int stride, int groups, uint4 (&raw)[kUnroll]) {
  const unsigned none = minus_infinities<T>(), bytes = misalignment(row);
  const uint4* base = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(row) - bytes);
  if (bytes == 0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int group = first + u * stride;
      raw[u] = group < groups ? __ldcs(base + group) : make_uint4(none, none, none, none);
    }
    return;
  }
  uint4 next[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int group = first + u * stride;
    raw[u] = next[u] = make_uint4(none, none, none, none);
    if (group < groups) raw[u] = base[group], next[u] = base[group + 1];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) raw[u] = realigned(raw[u], next[u], bytes);
}

// e^x by one instruction; 0 where it is below the smallest normal number. __expf pays three more for those.
__device__ inline float quick_exp(float x) {
#ifdef MEGAPPO_CUDA_ON_CPU
  return __expf(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896341f));
  return y;
#endif
}

// The running statistic of one thread; its maximum grows at most once for a batch of values.
struct Running {
  float m = -kInfinity, s = 0.0f, t = 0.0f;

  // e^(x - m) of a row that has only been -inf so far: 0, and NaN where x is NaN.
  __device__ float reference() const { return m == -kInfinity ? 0.0f : m; }

  __device__ void raise(float top) {
    if (top <= m) return;
    if (m != -kInfinity) {
      const float d = m - top, w = quick_exp(d);
      t = w * (t + d * s);
      s = w * s;
    }
    m = top;
  }

  template <bool kEntropy>
  __device__ void add(float x, float top) {
    const float d = x - top, e = quick_exp(d);
    s += e;
    if (kEntropy) t += e * fmaxf(d, kExponentFloor);  // e = 0 and d = -inf: 0
  }
};

// The larger one of all threads, in every thread; `scratch` has one float for each warp.
__device__ inline float block_max(float x, float* scratch) {
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float top = scratch[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / kWarp; ++w) top = fmaxf(top, scratch[w]);
  __syncthreads();
  return top;
}

__device__ inline float inverse_temperature(const VocabRows& a, std::int64_t row) {
  return a.row_inv_temp != nullptr ? a.row_inv_temp[row] : a.inv_temp;
}

// Column of the target in this shard, or -1.
__device__ inline std::int64_t owned_column(const VocabRows& a, std::int64_t target) {
  const std::int64_t column = target - a.vocab_start;
  return column >= 0 && column < a.num_valid ? column : -1;
}

template <class T, bool kEntropy>
__global__ void __launch_bounds__(kMaxThreads, 4) segments_kernel(VocabStatsArgs a) {
  __shared__ float scratch[kMaxThreads / kWarp];
  const std::int64_t unit = blockIdx.x, row = unit / a.num_segments, start = unit % a.num_segments * a.segment_columns;
  const std::int64_t target = a.rows.target[row];
  if (target == a.rows.ignore_index) {
    if (threadIdx.x == 0) a.segments[unit] = {-kInfinity, 0.0f, 0.0f, -kInfinity};
    return;
  }
  const float inv_temp = inverse_temperature(a.rows, row);
  const T* x = static_cast<const T*>(a.rows.logits) + row * a.rows.row_stride + start;
  const int count = static_cast<int>(min(a.segment_columns, a.rows.num_valid - start));
  const int groups = count / kVector<T>, threads = blockDim.x, me = threadIdx.x;

  Running running;
  for (int first = me; first < groups; first += kUnroll * threads) {
    uint4 raw[kUnroll];
    load_groups(x, first, threads, groups, raw);
    float v[kUnroll][kVector<T>], top = running.m;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      unpack(raw[u], v[u], T{});
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        v[u][i] = __fmul_rn(v[u][i], inv_temp);
        top = fmaxf(top, v[u][i]);
      }
    }
    running.raise(top);
    const float reference = running.reference();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) running.add<kEntropy>(v[u][i], reference);
    }
  }
  if (groups * kVector<T> + me < count) {  // less than a group
    const float v = __fmul_rn(to_float(x[groups * kVector<T> + me]), inv_temp);
    running.raise(fmaxf(running.m, v));
    running.add<kEntropy>(v, running.reference());
  }

  const float m = block_max(running.m, scratch);
  const float d = running.m == -kInfinity ? 0.0f : running.m - m, w = quick_exp(d);
  const float t = kEntropy ? block_sum(w * (running.t + d * running.s), scratch) : 0.0f;
  const float s = block_sum(w * running.s, scratch);
  if (me == 0) {
    const std::int64_t column = owned_column(a.rows, target) - start;
    const float z = column >= 0 && column < count ? __fmul_rn(to_float(x[column]), inv_temp) : -kInfinity;
    a.segments[unit] = {m, s, t, z};
  }
}

// The fold of two neighbours; an empty one (s = 0) is the identity. NaN in either stays.
__device__ inline VocabStats fold(VocabStats a, VocabStats b) {
  const float z = fmaxf(a.z, b.z);
  if (b.s == 0.0f) return {a.m, a.s, a.t, z};
  if (a.s == 0.0f) return {b.m, b.s, b.t, z};
  const float m = fmaxf(a.m, b.m), da = a.m - m, db = b.m - m, wa = expf(da), wb = expf(db);
  // a difference of -inf has weight 0, and 0 * -inf would be NaN
  const float ta = wa == 0.0f ? 0.0f : wa * (a.t + da * a.s), tb = wb == 0.0f ? 0.0f : wb * (b.t + db * b.s);
  return {m, wa * a.s + wb * b.s, ta + tb, z};
}

__global__ void fold_kernel(VocabFoldArgs a) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.num_tokens) return;
  VocabStats folded = a.segments[row * a.num_segments];
  for (std::int64_t i = 1; i < a.num_segments; ++i) folded = fold(folded, a.segments[row * a.num_segments + i]);
  a.out[row] = folded;
}

__global__ void merge_kernel(VocabMergeArgs a) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.num_tokens) return;
  VocabStats all = a.gathered[row];
  for (std::int64_t rank = 1; rank < a.num_ranks; ++rank) all = fold(all, a.gathered[rank * a.num_tokens + row]);
  const float log_s = logf(all.s), lse = all.m + log_s;
  const bool ignored = a.target[row] == a.ignore_index;
  a.lse[row] = lse;
  a.logprob[row] = ignored ? 0.0f : all.z - lse;
  a.entropy[row] = ignored ? 0.0f : log_s - all.t / all.s;
}

struct RowGradient {
  float inv_temp, lse, entropy, g, g_h;

  // dlogits of a column that is not the target: -p (g + g_h (log p + H)).
  template <bool kEntropy>
  __device__ float elsewhere(float x) const {
    const float d = __fmul_rn(x, inv_temp) - lse, p = quick_exp(d);
    return kEntropy ? -p * (g + g_h * fmaxf(d + entropy, kExponentFloor)) : -p * g;
  }

  template <bool kEntropy>
  __device__ float at_target(float x) const {
    const float d = __fmul_rn(x, inv_temp) - lse, grad = -g * expm1f(d);
    return kEntropy ? grad - g_h * expf(d) * fmaxf(d + entropy, kExponentFloor) : grad;
  }
};

// Threads share the columns in groups, 16 bytes of logits, that are aligned in `out`: nothing is summed here, so they may follow
// the address. `out` may be the logits: a thread reads what it then overwrites, and the one that has read the target writes its
// term last.
template <class T, class Out, bool kEntropy>
__global__ void __launch_bounds__(kMaxThreads, 4) backward_kernel(VocabBackwardArgs a) {
  using Group = decltype(pack(std::declval<const float (&)[kVector<T>]>(), Out{}));
  const std::int64_t unit = blockIdx.x, row = unit / a.num_segments, start = unit % a.num_segments * a.segment_columns;
  const int count = static_cast<int>(min(a.segment_columns, a.num_columns - start)), threads = blockDim.x, me = threadIdx.x;
  Out* out = static_cast<Out*>(a.out) + row * a.out_stride + start;
  const int ahead = static_cast<int>((sizeof(Group) - misalignment(out, sizeof(Group))) % sizeof(Group) / sizeof(Out));
  const int head = ahead < count ? ahead : count;
  const int groups = (count - head) / kVector<T>, behind = head + groups * kVector<T>;
  Group* out_groups = reinterpret_cast<Group*>(out + head);
  // the columns outside of the groups: thread i has one of the head or one of the rest
  const int single = me < head ? me : behind + me - head;

  const std::int64_t target = a.rows.target[row];
  const float g_logprob = a.g_logprob[row], g_entropy = kEntropy ? a.g_entropy[row] : 0.0f;
  if (target == a.rows.ignore_index || (g_logprob == 0.0f && g_entropy == 0.0f)) {
    for (int group = me; group < groups; group += threads) __stcs(out_groups + group, Group{});
    if (single < count) out[single] = from_float<Out>(0.0f);
    return;
  }
  const float inv_temp = inverse_temperature(a.rows, row);
  const RowGradient gradient{inv_temp, a.lse[row], a.entropy[row], g_logprob * inv_temp, g_entropy * inv_temp};
  const T* x = static_cast<const T*>(a.rows.logits) + row * a.rows.row_stride + start;
  const std::int64_t owned = owned_column(a.rows, target) - start, valid_left = a.rows.num_valid - start;
  const int mine = owned >= 0 && owned < count ? static_cast<int>(owned) : -1;
  const int valid = static_cast<int>(max(std::int64_t{0}, min(valid_left, static_cast<std::int64_t>(count))));
  bool have_target = false;
  float x_target = 0.0f;

  for (int first = me; first < groups; first += kUnroll * threads) {
    uint4 raw[kUnroll];
    load_groups(x + head, first, threads, groups, raw);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int group = first + u * threads, column = head + group * kVector<T>;
      if (group >= groups) break;
      float v[kVector<T>];
      unpack(raw[u], v, T{});
      if (mine >= column && mine < column + kVector<T>) {
        have_target = true;
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) x_target = column + i == mine ? v[i] : x_target;
      }
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) v[i] = gradient.elsewhere<kEntropy>(v[i]);
      if (column + kVector<T> > valid) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) v[i] = column + i < valid ? v[i] : 0.0f;
      }
      __stcs(out_groups + group, pack(v, Out{}));
    }
  }
  if (single < count) {
    const float v = to_float(x[single]);
    have_target |= single == mine;
    x_target = single == mine ? v : x_target;
    out[single] = from_float<Out>(single < valid ? gradient.elsewhere<kEntropy>(v) : 0.0f);
  }
  if (have_target) out[mine] = from_float<Out>(gradient.at_target<kEntropy>(x_target));
}

// Threads for a segment: no more warps than it has groups for.
template <class T>
int threads_for(std::int64_t columns) {
  const std::int64_t warps = (columns / kVector<T> + kWarp - 1) / kWarp;
  return static_cast<int>(warps < 1 ? 1 : warps > kMaxThreads / kWarp ? kMaxThreads / kWarp : warps) * kWarp;
}

dim3 one_block_each(std::int64_t units) {
  if (units > 0x7fffffff) throw std::runtime_error("vocab_stats: more than 2^31 - 1 rows and segments: split the rows");
  return dim3(static_cast<unsigned>(units));
}

dim3 one_thread_each(std::int64_t rows) { return one_block_each((rows + kMaxThreads - 1) / kMaxThreads); }

}  // namespace

void vocab_segments(const VocabStatsArgs& a, Stream stream) {
  with_type(a.rows.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = a.want_entropy ? segments_kernel<T, true> : segments_kernel<T, false>;
    const std::int64_t columns = a.segment_columns < a.rows.num_valid ? a.segment_columns : a.rows.num_valid;
    launch("vocab_stats", kernel, one_block_each(a.rows.num_tokens * a.num_segments), threads_for<T>(columns), 0, stream, a);
  });
}

void vocab_fold(const VocabFoldArgs& a, Stream stream) {
  launch("vocab_stats: fold", fold_kernel, one_thread_each(a.num_tokens), kMaxThreads, 0, stream, a);
}

void vocab_merge(const VocabMergeArgs& a, Stream stream) {
  launch("vocab_stats_merge", merge_kernel, one_thread_each(a.num_tokens), kMaxThreads, 0, stream, a);
}

void vocab_backward(const VocabBackwardArgs& a, Stream stream) {
  with_types(a.rows.dtype, a.out_dtype, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    const auto kernel = a.g_entropy != nullptr ? backward_kernel<T, Out, true> : backward_kernel<T, Out, false>;
    const std::int64_t columns = a.segment_columns < a.num_columns ? a.segment_columns : a.num_columns;
    const dim3 blocks = one_block_each(a.rows.num_tokens * a.num_segments);
    launch("vocab_logits_backward", kernel, blocks, threads_for<T>(columns), 0, stream, a);
  });
}

}  // namespace megappo::cuda
