// By blocks of tokens: vector code for a token alone (KL, reward - value, rounding, moments), and between them the serial
// recurrence, one multiply-add per token and lambda on its chain of dependent operations.
#include <algorithm>
#include <bit>
#include <cstring>

#include "advantages/advantages.h"

namespace megappo {
namespace {

constexpr int kLanes = 8;
using Doubles = double __attribute__((vector_size(8 * kLanes)));
using Longs = std::int64_t __attribute__((vector_size(8 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));

}  // namespace

namespace MEGAPPO_ISA {
namespace {

// The block's arrays of doubles, five but for kGeneral, stay in the L1 cache.
constexpr int kBlock = 256;

struct Block {
  alignas(64) double reward[kBlock];                      // 0 where masked
  alignas(64) double u[kBlock], value[kBlock];            // reward - value and value; 0 where masked, value 0 at no step
  alignas(64) double x_policy[kBlock], x_critic[kBlock];  // x as the token meets it
  alignas(64) double weight[kBlock], passes[kBlock];      // kGeneral: w, and w c at steps, 1 at other tokens
  bool step[kBlock];                                      // kGeneral: sampled, and a time step
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

template <class V, class T>
inline V load(const T* at) {
  V x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

template <class V, class T>
inline void store(T* at, const V& x) {
  std::memcpy(at, &x, sizeof x);
}

// Eight tokens at once, or fewer at the end of a block: those lanes are 0.
struct Whole {
  template <class V, class T>
  V read(const T* at) const { return load<V>(at); }
  template <class V, class T>
  void write(T* at, const V& x) const { store(at, x); }
};

struct Part {
  int count;
  template <class V, class T>
  V read(const T* at) const {
    V x{};
    std::memcpy(&x, at, static_cast<std::size_t>(count) * sizeof(T));
    return x;
  }
  template <class V, class T>
  void write(T* at, const V& x) const { std::memcpy(at, &x, static_cast<std::size_t>(count) * sizeof(T)); }
};

template <class Lanes>
inline Doubles read_floats(const Lanes& lanes, const float* at) {
  return __builtin_convertvector(lanes.template read<Floats>(at), Doubles);
}

template <class Lanes>
inline void write_floats(const Lanes& lanes, float* at, const Doubles& x) {
  lanes.write(at, __builtin_convertvector(x, Floats));
}

// -1 where sampled. The eight bytes go to every lane and each shifts its own down, which needs no widening of bytes.
template <class Lanes>
inline Longs read_mask(const Lanes& lanes, const bool* at) {
  static_assert(std::endian::native == std::endian::little);
  constexpr Longs kByte = {0, 8, 16, 24, 32, 40, 48, 56};
  struct Bytes {
    std::int64_t all;
  };
  return -(((Longs{} + lanes.template read<Bytes>(at).all) >> kByte) & 1);
}

inline Doubles where(const Longs& mask, const Doubles& x) {
  return std::bit_cast<Doubles>(mask & std::bit_cast<Longs>(x));
}

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
  const Doubles power = std::bit_cast<Doubles>((std::bit_cast<Longs>(shifted) + 1023) << 52);
  return power * p + (power - 1.0);
}

inline Doubles kl_of(Kl kind, Doubles log_ratio) {
  if (kind == Kl::k1) return log_ratio;
  if (kind == Kl::k2) return 0.5 * log_ratio * log_ratio;
  const Doubles minus = -log_ratio;
  return expm1_below_20(minus > kMaxLogRatio ? Doubles{} + kMaxLogRatio : minus) + log_ratio;
}

template <class Lanes>
inline Doubles read_reward(const AdvantageArgs& a, const Lanes& lanes, std::int64_t t) {
  Doubles reward{};
  if (a.kl != Kl::none) {
    reward = -a.kl_coef * kl_of(a.kl, read_floats(lanes, a.logprob + t) - read_floats(lanes, a.ref_logprob + t));
  }
  return a.token_reward ? reward + read_floats(lanes, a.token_reward + t) : reward;
}

// -1 where a token is a time step.
template <class Lanes>
inline Longs read_steps(const AdvantageArgs& a, const Lanes& lanes, std::int64_t t, const Longs& sampled) {
  return a.steps ? sampled & read_mask(lanes, a.steps + t) : sampled;
}

// Numbers of time steps; 1 for other tokens, and without any.
template <class Lanes>
inline Doubles read_of_steps(const Lanes& lanes, const double* at, const Longs& step) {
  const Doubles one = Doubles{} + 1.0;
  return at ? std::bit_cast<Doubles>((step & std::bit_cast<Longs>(lanes.template read<Doubles>(at))) |
                                     (~step & std::bit_cast<Longs>(one)))
            : one;
}

template <bool kGeneral, class Lanes>
inline void prepare(const AdvantageArgs& a, const Lanes& lanes, std::int64_t first, int i, Block& block) {
  const Longs sampled = read_mask(lanes, a.mask + first + i);
  const Longs step = kGeneral ? read_steps(a, lanes, first + i, sampled) : sampled;
  const Doubles value = where(step, read_floats(lanes, a.value + first + i));
  const Doubles reward = where(sampled, read_reward(a, lanes, first + i));
  store(block.reward + i, reward);
  store(block.value + i, value);
  store(block.u + i, reward - value);
  if constexpr (kGeneral) {
    const Doubles weight = read_of_steps(lanes, a.weight ? a.weight + first + i : nullptr, step);
    store(block.weight + i, weight);
    store(block.passes + i, weight * read_of_steps(lanes, a.trace ? a.trace + first + i : nullptr, step));
    for (int l = 0; l < kLanes; ++l) block.step[i + l] = step[l] != 0;
  }
}

// Tokens [low, high) of the block, one sequence or part of one. The factor of a masked token is 1, its u and value are 0, which
// leaves x as it is without a branch; that of a sampled token that is no step is 1 too, and its u is its reward.
template <bool kGeneral>
void recur(const AdvantageArgs& a, std::int64_t first, int low, int high, Block& block, Carry& carry) {
  const double gamma = a.gamma;
  const double by_policy[2] = {1.0, gamma * (a.policy.each ? a.policy.each[carry.sequence] : a.policy.all)};
  const double by_critic[2] = {1.0, gamma * (a.critic.each ? a.critic.each[carry.sequence] : a.critic.all)};
  const bool* step = kGeneral ? block.step : a.mask + first;
  double x_policy = carry.x_policy, x_critic = carry.x_critic;
  for (int i = high - 1; i >= low; --i) {
    block.x_policy[i] = x_policy;
    block.x_critic[i] = x_critic;
    const double after = gamma * block.value[i], u = block.u[i];
    double decay = by_policy[step[i]], critic_decay = by_critic[step[i]];
    if constexpr (kGeneral) {
      decay *= block.passes[i];
      critic_decay *= block.passes[i];
    }
    x_policy = decay * x_policy + (decay * u + after);
    x_critic = critic_decay * x_critic + (critic_decay * u + after);
  }
  carry.x_policy = x_policy;
  carry.x_critic = x_critic;
}

void put_score(const AdvantageArgs& a, std::int64_t first, int low, int high, Block& block, Carry& carry) {
  for (int i = high - 1; i >= low && !carry.scored; --i) {
    if (!a.mask[first + i]) continue;
    block.reward[i] += a.score[carry.sequence];
    carry.scored = true;
  }
}

// Every run of one sequence in tokens [first, first + n), from the last.
template <bool kGeneral>
void walk(const AdvantageArgs& a, std::int64_t first, int n, Block& block, Carry& carry) {
  for (std::int64_t end = first + n; end > first;) {
    while (a.cu64[carry.sequence] >= end) --carry.sequence;  // passes over empty sequences
    const std::int64_t s = carry.sequence;
    if (end == a.cu64[s + 1]) {
      const double score = a.score[s];
      carry.x_policy = carry.x_critic = (a.bootstrap ? a.gamma * static_cast<double>(a.bootstrap[s]) : 0.0) + score;
      carry.scored = false;
    }
    const int low = static_cast<int>(std::max(a.cu64[s], first) - first), high = static_cast<int>(end - first);
    put_score(a, first, low, high, block, carry);
    recur<kGeneral>(a, first, low, high, block, carry);
    end = first + low;
  }
}

template <bool kGeneral, class Lanes>
inline void finish(const AdvantageArgs& a, const Lanes& lanes, std::int64_t first, int i, const Block& block, Moments& moments) {
  Longs sampled = read_mask(lanes, a.mask + first + i);
  const Doubles u = load<Doubles>(block.u + i), value = load<Doubles>(block.value + i);
  Doubles of_policy = u + load<Doubles>(block.x_policy + i), of_critic = u + load<Doubles>(block.x_critic + i);
  if constexpr (kGeneral) {
    sampled = read_steps(a, lanes, first + i, sampled);
    const Doubles weight = load<Doubles>(block.weight + i);
    of_policy *= weight;
    of_critic *= weight;
  }
  const Floats rounded = __builtin_convertvector(where(sampled, of_policy), Floats);
  lanes.write(a.advantage + first + i, rounded);
  write_floats(lanes, a.returns + first + i, where(sampled, of_critic + value));
  write_floats(lanes, a.reward + first + i, load<Doubles>(block.reward + i));
  const Doubles kept = __builtin_convertvector(rounded, Doubles);
  moments.count -= sampled;
  moments.sum += kept;
  moments.squares += kept * kept;
}

// Whole sequences in tokens [low, high); by value, so that no store can change the arguments under the loops.
template <bool kGeneral>
Moments one_task(const AdvantageArgs a, std::int64_t low, std::int64_t high, std::int64_t last_sequence) {
  Block block;
  Moments moments;
  Carry carry{last_sequence};
  for (std::int64_t end = high; end > low;) {
    const std::int64_t first = std::max(low, end - kBlock);
    const int n = static_cast<int>(end - first);
    // From the last token here too: the hardware fetches ahead in a stream of one direction.
    const int whole = n / kLanes * kLanes;
    if (whole < n) prepare<kGeneral>(a, Part{n - whole}, first, whole, block);
    for (int i = whole - kLanes; i >= 0; i -= kLanes) prepare<kGeneral>(a, Whole{}, first, i, block);
    walk<kGeneral>(a, first, n, block, carry);
    if (whole < n) finish<kGeneral>(a, Part{n - whole}, first, whole, block, moments);
    for (int i = whole - kLanes; i >= 0; i -= kLanes) finish<kGeneral>(a, Whole{}, first, i, block, moments);
    end = first;
  }
  return moments;
}

}  // namespace

void advantage_tokens(const AdvantageArgs& a, std::int64_t begin, std::int64_t end) {
  const std::int64_t *cu = a.cu64, *starts_end = a.cu64 + a.num_sequences;
  for (std::int64_t task = begin; task < end; ++task) {
    const std::int64_t from = std::lower_bound(cu, starts_end, task * kTokensPerTask) - cu;
    const std::int64_t to = std::lower_bound(cu + from, starts_end, (task + 1) * kTokensPerTask) - cu;
    const Moments moments = a.is_general() ? one_task<true>(a, cu[from], cu[to], to - 1) : one_task<false>(a, cu[from], cu[to], to - 1);
    moments.store(a.moments + 3 * task);
  }
}

}  // namespace MEGAPPO_ISA
}  // namespace megappo
