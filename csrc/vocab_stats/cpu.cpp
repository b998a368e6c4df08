#include <cmath>
#include <cstring>
#include <limits>

#include "common/simd.h"
#include "vocab_stats/vocab_stats.h"

namespace megappo::MEGAPPO_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Column of the target within this shard, or -1.
std::int64_t owned_column(const VocabRows& a, std::int64_t row) {
  const std::int64_t column = a.target[row] - a.vocab_start;
  return a.target[row] != a.ignore_index && column >= 0 && column < a.num_valid ? column : -1;
}

float inverse_temperature(const VocabRows& a, std::int64_t row) {
  return a.row_inv_temp != nullptr ? a.row_inv_temp[row] : a.inv_temp;
}

// f(x, chain) for 16 columns after the other; missing lanes of the last ones are -inf. They take turns over `kChains`
// accumulators, so that an addition need not wait for the one before it.
template <int kChains, class T, class F>
MEGAPPO_INLINE void for_lanes(const T* x, std::int64_t count, F&& f) {
  std::int64_t at = 0;
  for (; at + kChains * kLanes <= count; at += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) f(load(x + at + chain * kLanes), chain);
  }
  for (; at + kLanes <= count; at += kLanes) f(load(x + at), 0);
  if (at < count) f(load_first(x + at, count - at, -kInfinity), 0);
}

template <class T>
float largest(const T* x, std::int64_t count, float inv_temp) {
  const Floats scale = splat(inv_temp);
  Floats m[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
  for_lanes<4>(x, count, [&](Floats v, int chain) MEGAPPO_INLINE_LAMBDA { m[chain] = max(v * scale, m[chain]); });
  return max_of(max(max(m[0], m[1]), max(m[2], m[3])));
}

// s of a segment without a maximum: 0 where all is -inf, NaN where there are NaN, which no comparison finds.
template <class T>
float nothing_or_nan(const T* x, std::int64_t count) {
  Floats total = splat(0.0f);
  for_lanes<1>(x, count, [&](Floats v, int) MEGAPPO_INLINE_LAMBDA { total = total + v; });
  const float all = sum(total);
  return all == all ? 0.0f : all;
}

// The segment lies in the L1 cache after `largest`, so the memory is read once. A term e^(x-m) of a -inf column is e^-87 here,
// which leaves a sum that has a term 1 as it is.
template <bool kEntropy, class T>
VocabStats segment_stats(const T* x, std::int64_t count, float inv_temp) {
  const float m = largest(x, count, inv_temp);
  if (m == -kInfinity) return {m, nothing_or_nan(x, count), 0.0f, -kInfinity};
  const Floats scale = splat(inv_temp), top = splat(m);
  Floats s[2] = {}, t[2] = {};
  for_lanes<2>(x, count, [&](Floats v, int chain) MEGAPPO_INLINE_LAMBDA {
    const Floats d = max(splat(kExpLowest), rounded(v * scale) - top);
    const Floats e = exp_within(d);
    s[chain] = s[chain] + e;
    if constexpr (kEntropy) t[chain] = t[chain] + e * d;
  });
  return {m, sum(s[0] + s[1]), sum(t[0] + t[1]), -kInfinity};
}

// The fold of two neighbours; an empty one (s = 0) is the identity. NaN in either stays.
VocabStats fold(VocabStats a, VocabStats b) {
  const float z = a.z > b.z ? a.z : b.z;
  if (b.s == 0.0f) return {a.m, a.s, a.t, z};
  if (a.s == 0.0f) return {b.m, b.s, b.t, z};
  const float m = a.m > b.m ? a.m : b.m;
  const float da = a.m - m, db = b.m - m;
  const float wa = std::exp(da), wb = std::exp(db);
  // a difference of -inf has weight 0, and 0 * -inf would be NaN
  const float ta = wa == 0.0f ? 0.0f : wa * (a.t + da * a.s), tb = wb == 0.0f ? 0.0f : wb * (b.t + db * b.s);
  return {m, wa * a.s + wb * b.s, ta + tb, z};
}

struct RowGradient {
  float inv_temp, lse, entropy, g, g_h;
};

template <bool kEntropy, class T, class Out>
void segment_gradient(const T* x, Out* out, std::int64_t count, RowGradient r) {
  const Floats scale = splat(r.inv_temp), lse = splat(r.lse), h = splat(r.entropy), g = splat(-r.g), g_h = splat(-r.g_h);
  const Floats lowest = splat(kExpLowest), highest = splat(kExpHighest), zero = splat(0.0f);
  const auto gradient = [&](Floats v) MEGAPPO_INLINE_LAMBDA {
    const Floats log_p = rounded(v * scale) - lse, near = min(highest, max(lowest, log_p));
    const Floats p = where_below(log_p, lowest, zero, exp_within(near));
    if constexpr (!kEntropy) return p * g;
    return p * ((near + h) * g_h + g);
  };
  std::int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) store(out + at, gradient(load(x + at)));
  if (at < count) store_first(out + at, count - at, gradient(load_first(x + at, count - at, 0.0f)));
}

float widen_one(float x) { return x; }
template <class T>
float widen_one(T x) {
  float lane[kLanes];
  store(lane, load_first(&x, 1, 0.0f));
  return lane[0];
}

float at_target(float x, const RowGradient& r) {
  const float d = x * r.inv_temp - r.lse;
  const float grad = -r.g * std::expm1(d);
  if (r.g_h == 0.0f) return grad;
  const float floored = d < kExponentFloor ? kExponentFloor : d;
  return grad - r.g_h * std::exp(floored) * (floored + r.entropy);
}

}  // namespace

void vocab_segments(const VocabStatsArgs& a, std::int64_t begin, std::int64_t end) {
  with_type(a.rows.dtype, [&](auto type) {
    using T = decltype(type);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t row = unit / a.num_segments, first = unit % a.num_segments * a.segment_columns;
      if (a.rows.target[row] == a.rows.ignore_index) {
        a.segments[unit] = {-kInfinity, 0.0f, 0.0f, -kInfinity};
        continue;
      }
      const std::int64_t left = a.rows.num_valid - first, count = left < a.segment_columns ? left : a.segment_columns;
      const T* x = static_cast<const T*>(a.rows.logits) + row * a.rows.row_stride + first;
      const float inv_temp = inverse_temperature(a.rows, row);
      VocabStats stats = a.want_entropy ? segment_stats<true>(x, count, inv_temp) : segment_stats<false>(x, count, inv_temp);
      const std::int64_t column = owned_column(a.rows, row) - first;
      if (column >= 0 && column < count) stats.z = widen_one(x[column]) * inv_temp;
      a.segments[unit] = stats;
    }
  });
}

void vocab_fold(const VocabFoldArgs& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    VocabStats folded = a.segments[row * a.num_segments];
    for (std::int64_t i = 1; i < a.num_segments; ++i) folded = fold(folded, a.segments[row * a.num_segments + i]);
    a.out[row] = folded;
  }
}

void vocab_merge(const VocabMergeArgs& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    VocabStats all = a.gathered[row];
    for (std::int64_t rank = 1; rank < a.num_ranks; ++rank) all = fold(all, a.gathered[rank * a.num_tokens + row]);
    const float log_s = std::log(all.s);
    const bool ignored = a.target[row] == a.ignore_index;
    a.lse[row] = all.m + log_s;
    a.logprob[row] = ignored ? 0.0f : all.z - a.lse[row];
    a.entropy[row] = ignored ? 0.0f : log_s - all.t / all.s;
  }
}

void vocab_backward(const VocabBackwardArgs& a, std::int64_t begin, std::int64_t end) {
  with_types(a.rows.dtype, a.out_dtype, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t row = unit / a.num_segments, first = unit % a.num_segments * a.segment_columns;
      const std::int64_t left = a.num_columns - first, columns = left < a.segment_columns ? left : a.segment_columns;
      Out* out = static_cast<Out*>(a.out) + row * a.out_stride + first;
      const float inv_temp = inverse_temperature(a.rows, row);
      const float g_logprob = a.g_logprob[row], g_entropy = a.g_entropy != nullptr ? a.g_entropy[row] : 0.0f;
      if (a.rows.target[row] == a.rows.ignore_index || (g_logprob == 0.0f && g_entropy == 0.0f)) {
        std::memset(out, 0, static_cast<size_t>(columns) * sizeof(Out));
        continue;
      }
      const RowGradient r{inv_temp, a.lse[row], a.entropy[row], g_logprob * inv_temp, g_entropy * inv_temp};
      const T* x = static_cast<const T*>(a.rows.logits) + row * a.rows.row_stride + first;
      const std::int64_t valid_left = a.rows.num_valid - first;
      const std::int64_t valid = valid_left < 0 ? 0 : valid_left < columns ? valid_left : columns;
      const std::int64_t column = owned_column(a.rows, row) - first;
      const bool owned = column >= 0 && column < valid;
      const float target_gradient = owned ? at_target(widen_one(x[column]), r) : 0.0f;  // before `out` may overwrite x
      if (a.g_entropy != nullptr) {
        segment_gradient<true>(x, out, valid, r);
      } else {
        segment_gradient<false>(x, out, valid, r);
      }
      if (owned) store_first(out + column, 1, splat(target_gradient));
      std::memset(out + valid, 0, static_cast<size_t>(columns - valid) * sizeof(Out));
    }
  });
}

}  // namespace megappo::MEGAPPO_ISA
