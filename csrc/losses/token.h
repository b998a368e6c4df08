// The losses of one token, or of a vector of tokens: the same text is compiled for float (CUDA) and for GCC's vector types (CPU),
// so the branches exist once. Conditions are bool or a vector mask; `condition ? x : y` selects in both. Every comparison is written
// so that a NaN of a token with weight reaches its loss and its gradient.
#pragma once

#include <bit>
#include <cstdint>

#include "common/log_ratio.h"

#ifdef __CUDACC__
#define MEGAPPO_TOKEN __host__ __device__ __forceinline__
#else
#define MEGAPPO_TOKEN inline __attribute__((always_inline))
#endif

namespace megappo {

template <class F>
struct IntegersOf;
template <>
struct IntegersOf<float> {
  using type = std::int32_t;
};

template <class F, int kCounts, int kValues>
struct TokenLoss {
  F loss, gradient, maximum;
  F counts[kCounts];  // 0 or 1: sums of up to 2^24 of them are exact in fp32
  F values[kValues];
};

template <class F>
MEGAPPO_TOKEN F clamp(F x, F low, F high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// The larger, or NaN if either is.
template <class F>
MEGAPPO_TOKEN F nan_max(F most, F x) {
  return (x > most) | (x != x) ? x : most;
}

// exp(x) to 1 ulp and exp(x) - 1 - x for |x| <= 20. With x = n log 2 + f, |f| <= log(2) / 2: e^f - 1 - f = f^2 q(f) by its Taylor
// series, whose first omitted term is 4e-8 of q. For n = 0 the difference needs no subtraction, so it is exact to 2^-22 where
// ratios are close to 1, where all of them are at first.
template <class F>
MEGAPPO_TOKEN void exp_and_remainder(F x, F& exponential, F& remainder) {
  using Int = typename IntegersOf<F>::type;
  const F shift = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
  const F shifted = x * 1.44269504f + shift;
  const F n = shifted - shift;
  const F f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F q = f * (1.0f / 5040) + 1.0f / 720;
  q = q * f + 1.0f / 120;
  q = q * f + 1.0f / 24;
  q = q * f + 1.0f / 6;
  q = q * f + 0.5f;
  const F small = f * f * q;
  const F scale = std::bit_cast<F>((std::bit_cast<Int>(shifted) + 127) << 23);
  exponential = (small + f + 1.0f) * scale;
  remainder = n == F{} ? small : exponential - 1.0f - x;
}

// max(-A r, -A clip(r)), at most -A dual where A < 0. Counts: tokens, cut by the lower, upper and dual clip; values: k3 estimate
// of KL(old || new), ratio; maximum: ratio.
struct PolicyRule {
  static constexpr int kCounts = 4, kValues = 2;
  float low, high, dual;  // bounds of the ratio; dual is infinite where there is none

  template <class F>
  MEGAPPO_TOKEN TokenLoss<F, kCounts, kValues> operator()(F logprob, F old_logprob, F advantage, F weight) const {
    const F zero{}, one = zero + 1.0f;
    const auto valid = weight != zero;
    const F log_ratio = valid ? logprob - old_logprob : zero;
    const F adv = valid ? advantage : zero;
    const F bounded = clamp(log_ratio, zero - kMaxLogRatio, zero + kMaxLogRatio);
    F ratio, k3;
    exp_and_remainder(bounded, ratio, k3);
    const F plain = -adv * ratio;
    const F clipped = -adv * clamp(ratio, zero + low, zero + high);
    // Strictly: at the bound and inside it both are the same and the gradient is the plain one.
    const auto cut = clipped > plain;
    F loss = cut ? clipped : plain;
    const F limit = -adv * dual;
    const auto dual_cut = (adv < zero) & (loss > limit);
    loss = dual_cut ? limit : loss;
    const auto flat = cut | dual_cut | (log_ratio > bounded) | (log_ratio < bounded);
    const F seen = valid ? ratio : zero;
    return {
        .loss = valid ? weight * loss : zero,
        .gradient = flat ? zero : weight * plain,
        .maximum = seen,
        .counts = {valid ? one : zero, cut & (adv < zero) ? one : zero, cut & (adv > zero) ? one : zero, dual_cut ? one : zero},
        .values = {k3, seen},
    };
  }
};

// max((v - R)^2, (v_clipped - R)^2) / 2. Counts: tokens, cut by the clip; values: v - R, its square, v; maximum: |v - R|.
struct ValueRule {
  static constexpr int kCounts = 2, kValues = 3;
  float clip;  // infinite where there is none
  bool clips;  // without a clip the old value is not read, whatever stands there

  template <class F>
  MEGAPPO_TOKEN TokenLoss<F, kCounts, kValues> operator()(F value, F old_value, F returns, F weight) const {
    const F zero{}, one = zero + 1.0f;
    const auto valid = weight != zero;
    const F v = valid ? value : zero, target = valid ? returns : zero, old = valid ? old_value : zero;
    const F moved = clips ? v - old : zero;
    // An old value that is NaN would lose every comparison.
    const F error = moved != moved ? moved : v - target;
    const F squared = error * error;
    const F clipped_error = old + clamp(moved, zero - clip, zero + clip) - target;
    const F clipped = clipped_error * clipped_error;
    // Inside the clip both are the same up to rounding: only tokens outside may be cut.
    const auto cut = (clipped > squared) & ((moved > zero + clip) | (moved < zero - clip));
    return {
        .loss = 0.5f * weight * (cut ? clipped : squared),
        .gradient = cut ? zero : weight * error,
        .maximum = error < zero ? -error : error,
        .counts = {valid ? one : zero, cut ? one : zero},
        .values = {error, squared, v},
    };
  }
};

}  // namespace megappo
