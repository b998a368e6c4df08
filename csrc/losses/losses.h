// Clipped policy and value losses: sum, gradient per token and metrics in one pass; see megappo/ops/losses.py.
//
// Both losses have the same frame. A pass over the tokens leaves for each block of tokens a column of fp64 partial results, and a
// second, tiny one adds the columns in order. Which tokens make a block depends on their number alone, so the result does not
// depend on the threads that were free.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/stream.h"
#include "losses/token.h"

namespace megappo {

struct LossArgs {
  const float* a;       // [num_tokens] logprob, or value
  const float* b;       // [num_tokens] log-prob or value of the policy or critic that sampled
  const float* c;       // [num_tokens] advantage, or return
  const float* weight;  // [num_tokens] 0: the token takes part in nothing
  float* gradient;      // [num_tokens] of the loss sum with respect to a
  double* partials;     // [results, num_blocks] results: counts, other sums, loss, maximum
  float* loss;          // [1]
  double* sums;         // [counts + other sums]
  double* maximum;      // [1]
  std::int64_t num_tokens;
  std::int64_t num_blocks;
};

// Tokens of a CPU block: few enough that two threads share 16 Ki tokens evenly, and that counts are exact in fp32; many enough
// that adding a block's partial results is nothing beside its 80 KiB of memory traffic.
constexpr std::int64_t kCpuLossBlock = 4096;

MEGAPPO_CPU_KERNEL(policy_loss_blocks, const LossArgs&, const PolicyRule&, std::int64_t begin, std::int64_t end)
MEGAPPO_CPU_KERNEL(value_loss_blocks, const LossArgs&, const ValueRule&, std::int64_t begin, std::int64_t end)
MEGAPPO_CPU_KERNEL(policy_loss_total, const LossArgs&)
MEGAPPO_CPU_KERNEL(value_loss_total, const LossArgs&)

namespace cuda {
std::int64_t loss_blocks(std::int64_t num_tokens);
void policy_loss(const LossArgs&, const PolicyRule&, Stream);
void value_loss(const LossArgs&, const ValueRule&, Stream);
}  // namespace cuda

}  // namespace megappo
