// In blocks of tokens: vector code for what a token has alone (KL, reward - value, rounding, moments), and between them the serial
// recurrence, one multiply-add per token and lambda on its chain of dependent operations.
#include <algorithm>
#include <cstring>

#include "advantages/advantages.h"

namespace megappo {
namespace {

constexpr int kLanes = 8;
using Doubles = double __attribute__((vector_size(8 * kLanes)));
using Longs = std::int64_t __attribute__((vector_size(8 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Bytes = std::uint8_t __attribute__((vector_size(kLanes)));

}  // namespace

namespace MEGAPPO_ISA {
namespace {

// The block's five arrays of doubles stay in the L1 cache.
constexpr int kBlock = 256;

struct Block {
  alignas(64) double shaped[kBlock];                      // reward
  alignas(64) double u[kBlock], value[kBlock];            // reward - value and value; 0 where masked
  alignas(64) double x_policy[kBlock], x_critic[kBlock];  // x as the token meets it
};

// Sums in lanes: the same order whatever the length of the vector registers.
struct Moments {
  Longs count{};
  Doubles sum{}, squares{};

  void store(double* out) const {
    out[0] = out[1] = out[2] = 0.0;
    for (int l = 0; l < kLanes; ++l) {
      out[0] += static_cast<double>(count[l]);
      out[1] += sum[l];
      out[2] += squares[l];
    }
  }
};

// What goes on from a block to the one before it.
struct Carry {
  std::int64_t sequence;  // where the next token to come is, or a later one
  bool scored = false;    // whether the sequence's score has found its token
  double x_policy = 0.0, x_critic = 0.0;
};

// The first `count` lanes; the rest is 0.
template <class V, class T>
inline V load(const T* at, int count) {
  V x{};
  std::memcpy(&x, at, count < kLanes ? static_cast<std::size_t>(count) * sizeof(T) : sizeof(V));
  return x;
}

template <class V, class T>
inline void store(T* at, const V& x, int count) {
  std::memcpy(at, &x, count < kLanes ? static_cast<std::size_t>(count) * sizeof(T) : sizeof(V));
}

inline Doubles load_floats(const float* at, int count) { return __builtin_convertvector(load<Floats>(at, count), Doubles); }

inline void store_floats(float* at, Doubles x, int count) { store(at, __builtin_convertvector(x, Floats), count); }

// -1 where sampled.
inline Longs load_mask(const bool* at, int count) { return __builtin_convertvector(load<Bytes>(at, count), Longs) != 0; }

// e^x - 1 for x <= 20 to 1e-16 of max(|x|, result), for many lanes at once.
inline Doubles expm1_below_20(Doubles x) {
  x = x < -60.0 ? Doubles{} - 60.0 : x;  // e^-60 is below the last bit of -1; false for NaN, which stays
  constexpr double kShift = 0x1.8p52, kLog2E = 0x1.71547652b82fep0;
  constexpr double kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
  const Doubles shifted = x * kLog2E + kShift;  // its last bits are x / ln 2, rounded to an integer
  const Doubles n = shifted - kShift;
  const Doubles r = (x - n * kLn2High) - n * kLn2Low;  // |r| <= ln 2 / 2
  Doubles p = Doubles{} + 1.0 / 6227020800.0;          // Taylor to r^13: the rest is below 2^-57
  for (const double k : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0}) {
    p = p * r + 1.0 / k;
  }
  p = p * r * r + r;
  const Longs exponent = (reinterpret_cast<const Longs&>(shifted) + 1023) << 52;
  const Doubles power = reinterpret_cast<const Doubles&>(exponent);
  return power * p + (power - 1.0);
}

inline Doubles kl_of(Kl kind, Doubles log_ratio) {
  if (kind == Kl::k1) return log_ratio;
  if (kind == Kl::k2) return 0.5 * log_ratio * log_ratio;
  const Doubles minus = -log_ratio;
  return expm1_below_20(minus > kMaxLogRatio ? Doubles{} + kMaxLogRatio : minus) + log_ratio;
}

inline Doubles load_reward(const AdvantageArgs& a, std::int64_t t, int count) {
  if (a.reward) return load_floats(a.reward + t, count);
  if (a.kl == Kl::none) return Doubles{};
  return -a.kl_coef * kl_of(a.kl, load_floats(a.logprob + t, count) - load_floats(a.ref_logprob + t, count));
}

void prepare(const AdvantageArgs& a, std::int64_t first, int n, Block& block) {
  for (int i = 0; i < n; i += kLanes) {
    const Longs sampled = load_mask(a.mask + first + i, n - i);
    const Doubles value = sampled ? load_floats(a.value + first + i, n - i) : Doubles{};
    const Doubles reward = sampled ? load_reward(a, first + i, n - i) : Doubles{};
    store(block.shaped + i, reward, kLanes);
    store(block.value + i, value, kLanes);
    store(block.u + i, reward - value, kLanes);
  }
}

// Tokens [low, high) of the block, one sequence or part of one. The factor of a masked token is 1 and its u and value are 0, which
// leaves x as it is without a branch.
template <bool kDone>
void recur(const AdvantageArgs& a, std::int64_t first, int low, int high, Block& block, Carry& carry) {
  const double gamma = a.gamma;
  const double by_policy[2] = {1.0, gamma * (a.policy.each ? a.policy.each[carry.sequence] : a.policy.all)};
  const double by_critic[2] = {1.0, gamma * (a.critic.each ? a.critic.each[carry.sequence] : a.critic.all)};
  const bool *mask = a.mask + first, *done = kDone ? a.done + first : nullptr;
  double x_policy = carry.x_policy, x_critic = carry.x_critic;
  for (int i = high - 1; i >= low; --i) {
    if (kDone && done[i]) x_policy = x_critic = 0.0;
    block.x_policy[i] = x_policy;
    block.x_critic[i] = x_critic;
    const double after = gamma * block.value[i], u = block.u[i];
    const double decay = by_policy[mask[i]], critic_decay = by_critic[mask[i]];
    x_policy = decay * x_policy + (decay * u + after);
    x_critic = critic_decay * x_critic + (critic_decay * u + after);
  }
  carry.x_policy = x_policy;
  carry.x_critic = x_critic;
}

void put_score(const AdvantageArgs& a, std::int64_t first, int low, int high, Block& block, Carry& carry) {
  for (int i = high - 1; i >= low && !carry.scored; --i) {
    if (!a.mask[first + i]) continue;
    block.shaped[i] += a.score[carry.sequence];
    carry.scored = true;
  }
}

// Every run of one sequence in tokens [first, first + n), from the last.
void walk(const AdvantageArgs& a, std::int64_t first, int n, Block& block, Carry& carry) {
  for (std::int64_t end = first + n; end > first;) {
    while (a.cu64[carry.sequence] >= end) --carry.sequence;  // passes over empty sequences
    const std::int64_t s = carry.sequence;
    if (end == a.cu64[s + 1]) {
      const double score = a.reward ? 0.0 : static_cast<double>(a.score[s]);
      carry.x_policy = carry.x_critic = (a.bootstrap ? a.gamma * static_cast<double>(a.bootstrap[s]) : 0.0) + score;
      carry.scored = a.reward != nullptr;
    }
    const int low = static_cast<int>(std::max(a.cu64[s], first) - first), high = static_cast<int>(end - first);
    put_score(a, first, low, high, block, carry);
    if (a.done) {
      recur<true>(a, first, low, high, block, carry);
    } else {
      recur<false>(a, first, low, high, block, carry);
    }
    end = first + low;
  }
}

void finish(const AdvantageArgs& a, std::int64_t first, int n, const Block& block, Moments& moments) {
  for (int i = 0; i < n; i += kLanes) {
    const Longs sampled = load_mask(a.mask + first + i, n - i);
    const Doubles u = load<Doubles>(block.u + i, kLanes), value = load<Doubles>(block.value + i, kLanes);
    const Doubles advantage = sampled ? u + load<Doubles>(block.x_policy + i, kLanes) : Doubles{};
    const Doubles returns = sampled ? u + load<Doubles>(block.x_critic + i, kLanes) + value : Doubles{};
    const Floats rounded = __builtin_convertvector(advantage, Floats);
    store(a.advantage + first + i, rounded, n - i);
    store_floats(a.returns + first + i, returns, n - i);
    if (a.shaped) store_floats(a.shaped + first + i, load<Doubles>(block.shaped + i, kLanes), n - i);
    const Doubles kept = __builtin_convertvector(rounded, Doubles);
    moments.count -= sampled;
    moments.sum += kept;
    moments.squares += kept * kept;
  }
}

void one_task(const AdvantageArgs& a, std::int64_t low, std::int64_t high, std::int64_t last_sequence, Moments& moments) {
  Block block;
  Carry carry{last_sequence};
  for (std::int64_t end = high; end > low;) {
    const std::int64_t first = std::max(low, end - kBlock);
    const int n = static_cast<int>(end - first);
    prepare(a, first, n, block);
    walk(a, first, n, block, carry);
    finish(a, first, n, block, moments);
    end = first;
  }
}

}  // namespace

void advantage_tokens(const AdvantageArgs& a, std::int64_t begin, std::int64_t end) {
  const std::int64_t *cu = a.cu64, *starts_end = a.cu64 + a.num_sequences;
  for (std::int64_t task = begin; task < end; ++task) {
    const std::int64_t from = std::lower_bound(cu, starts_end, task * kTokensPerTask) - cu;
    const std::int64_t to = std::lower_bound(cu + from, starts_end, (task + 1) * kTokensPerTask) - cu;
    Moments moments;
    one_task(a, cu[from], cu[to], to - 1, moments);
    moments.store(a.moments + 3 * task);
  }
}

}  // namespace MEGAPPO_ISA
}  // namespace megappo
