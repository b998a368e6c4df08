// KL-shaped rewards, GAE under two lambdas and whitening moments over packed sequences; see megappo/ops/advantages.py.
//
// All kernels walk a sequence from its last token to its first with one number per lambda, x: what the tokens after t contribute
// to A_t. With u = reward - value,
//     sampled token  A = u + x, then x <- gamma value + gamma lambda A
//     other token    x stays
//     end of sequence  x <- gamma bootstrap + score, before its last token
// and with steps, weights w and traces c of tokens (V-trace; turns as time steps)
//     step             A = w (u + x), then x <- gamma value + gamma lambda c A
//     sampled, no step x <- reward + x, its value is not read
// It is the recurrence of Schulman et al. 2016 with delta's gamma V_next and the decayed advantage in one term; as an affine map
// of x a stretch of tokens is x <- a x + c, so that stretches compose. Everything is fp64 and rounded to fp32 once.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/log_ratio.h"
#include "common/stream.h"

namespace megappo {

enum class Kl : std::int32_t { none, k1, k2, k3 };

struct Lambda {
  double all;          // of every sequence, where `each` is null
  const double* each;  // [num_sequences] or null
};

struct AdvantageArgs {
  // Reward of a sampled token: -kl_coef * KL of the log-probs, plus token_reward, on the last one plus score.
  const float* logprob;       // [num_tokens], read where kl is not none
  const float* ref_logprob;   // the same
  const float* token_reward;  // [num_tokens] or null
  const float* score;         // [num_sequences]
  const float* value;         // [num_tokens]
  const bool* mask;           // [num_tokens]
  const bool* steps;          // [num_tokens] or null: which of the sampled tokens are time steps; null: all
  const double* weight;       // [num_tokens] or null: 1
  const double* trace;        // [num_tokens] or null: 1
  const std::int32_t* cu32;   // [num_sequences + 1], this
  const std::int64_t* cu64;   // or this
  const float* bootstrap;     // [num_sequences] or null
  double gamma;
  Lambda policy, critic;
  Kl kl;
  double kl_coef;
  float* reward;              // [num_tokens]
  float* advantage;           // [num_tokens]
  float* returns;             // [num_tokens]
  double* moments;            // [3]; on the CPU [advantage_tasks(num_tokens), 3], to be added in order
  std::int64_t num_tokens, num_sequences;

  // True if tokens differ by more than being sampled: such kernels carry more for each.
  bool is_general() const { return steps || weight || trace; }
};

// On the CPU a task has the sequences that start in its stretch of tokens: the split, and with it the order in which moments are
// added, does not depend on the number of threads.
constexpr std::int64_t kTokensPerTask = 1 << 14;

inline std::int64_t advantage_tasks(std::int64_t num_tokens) { return (num_tokens + kTokensPerTask - 1) / kTokensPerTask; }

// Tasks [begin, end); needs cu64, which must be sound: from 0, never falling, to num_tokens.
MEGAPPO_CPU_KERNEL(advantage_tokens, const AdvantageArgs&, std::int64_t begin, std::int64_t end)

namespace cuda {
// Bytes of scratch memory, uninitialised, that `advantages` wants.
std::int64_t advantages_scratch(std::int64_t num_tokens);
// cu_seqlens that are not sound make every output NaN: looking at them first would stop the stream.
void advantages(const AdvantageArgs&, void* scratch, Stream);
}  // namespace cuda

}  // namespace megappo
