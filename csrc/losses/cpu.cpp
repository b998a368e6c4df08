// One pass over the tokens, a register of them at a time: 16 bytes read and 4 written for each token.
#include <cstring>

#include "losses/losses.h"

namespace megappo {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Integers = std::int32_t __attribute__((vector_size(4 * kLanes)));
using Half = float __attribute__((vector_size(2 * kLanes)));
using Doubles = double __attribute__((vector_size(4 * kLanes)));

}  // namespace

template <>
struct IntegersOf<Floats> {
  using type = Integers;
};

namespace MEGAPPO_ISA {
namespace {

inline Floats load(const float* at) {
  Floats x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// The last tokens of a block that is no multiple of kLanes: weight 0 beyond its end.
inline Floats load(const float* at, std::int64_t count) {
  Floats x{};
  std::memcpy(&x, at, static_cast<std::size_t>(count) * sizeof(float));
  return x;
}

// kLanes fp32 terms added to half as many fp64 sums.
inline void add(Doubles& sum, Floats x) {
  Half low, high;
  std::memcpy(&low, &x, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
  sum += __builtin_convertvector(low, Doubles) + __builtin_convertvector(high, Doubles);
}

template <class V>
double total(const V& x) {
  double sum = 0.0;
  for (std::size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) sum += static_cast<double>(x[i]);
  return sum;
}

template <class Rule>
struct BlockSums {
  Floats counts[Rule::kCounts]{};
  Doubles values[Rule::kValues]{}, loss{};
  Floats maximum{};

  template <class Token>
  inline void take(const Token& token) {
    for (int i = 0; i < Rule::kCounts; ++i) counts[i] += token.counts[i];
    for (int i = 0; i < Rule::kValues; ++i) add(values[i], token.values[i]);
    add(loss, token.loss);
    maximum = nan_max(maximum, token.maximum);
  }

  void store(double* partials, std::int64_t stride) const {
    for (const Floats& count : counts) *partials = total(count), partials += stride;
    for (const Doubles& value : values) *partials = total(value), partials += stride;
    *partials = total(loss), partials += stride;
    float most = maximum[0];
    for (int i = 1; i < kLanes; ++i) most = nan_max(most, maximum[i]);
    *partials = most;
  }
};

template <class Rule>
void loss_block(const LossArgs& x, const Rule& rule, std::int64_t block) {
  const std::int64_t begin = block * kCpuLossBlock;
  const std::int64_t end = begin + kCpuLossBlock < x.num_tokens ? begin + kCpuLossBlock : x.num_tokens;
  BlockSums<Rule> sums;
  std::int64_t t = begin;
  for (; t + kLanes <= end; t += kLanes) {
    const auto token = rule(load(x.a + t), load(x.b + t), load(x.c + t), load(x.weight + t));
    std::memcpy(x.gradient + t, &token.gradient, sizeof token.gradient);
    sums.take(token);
  }
  if (t < end) {
    const std::int64_t rest = end - t;
    const auto token = rule(load(x.a + t, rest), load(x.b + t, rest), load(x.c + t, rest), load(x.weight + t, rest));
    std::memcpy(x.gradient + t, &token.gradient, static_cast<std::size_t>(rest) * sizeof(float));
    sums.take(token);
  }
  sums.store(x.partials + block, x.num_blocks);
}

template <class Rule>
void loss_total(const LossArgs& x) {
  constexpr int kSums = Rule::kCounts + Rule::kValues;
  const double* column = x.partials;
  const auto sum = [&] {
    double total = 0.0;
    for (std::int64_t block = 0; block < x.num_blocks; ++block) total += *column++;
    return total;
  };
  for (int i = 0; i < kSums; ++i) x.sums[i] = sum();
  *x.loss = static_cast<float>(sum());
  double most = 0.0;
  for (std::int64_t block = 0; block < x.num_blocks; ++block) most = nan_max(most, *column++);
  *x.maximum = most;
}

}  // namespace

void policy_loss_blocks(const LossArgs& args, const PolicyRule& rule, std::int64_t begin, std::int64_t end) {
  for (std::int64_t block = begin; block < end; ++block) loss_block(args, rule, block);
}

void value_loss_blocks(const LossArgs& args, const ValueRule& rule, std::int64_t begin, std::int64_t end) {
  for (std::int64_t block = begin; block < end; ++block) loss_block(args, rule, block);
}

void policy_loss_total(const LossArgs& args) { loss_total<PolicyRule>(args); }

void value_loss_total(const LossArgs& args) { loss_total<ValueRule>(args); }

}  // namespace MEGAPPO_ISA
}  // namespace megappo
