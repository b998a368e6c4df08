// Statistics (m, s, t, z_y) of one vocabulary shard and the gradient of its logits straight from hidden states; see
// megappo/ops/linear_stats.py, which has the other ways to compute them.
#pragma once

#include <cstdint>

#include "common/stream.h"

namespace megappo {

struct LinearArgs {
  const void* hidden;          // [num_tokens, hidden_size] bf16, from a 16-byte address
  const void* weight;          // [num_valid or more, hidden_size] bf16, from a 16-byte address
  const std::int64_t* target;  // [num_tokens] ids of the whole vocabulary
  const float* row_inv_temp;   // [num_tokens] 1/temperature, or null: inv_temp for all
  std::int64_t num_tokens, hidden_size, vocab_start, num_valid, ignore_index;
  float inv_temp;
  bool bf16_logits;  // logits are rounded to bf16 before anything else
};

struct LinearStatsArgs : LinearArgs {
  bool want_entropy;
  float* partial;  // [splits, num_tokens, 4] where splits > 1
  float* stats;    // [num_tokens, 4]
  void* logits;    // [num_tokens, num_valid] before the temperature, bf16 if rounded and else fp32; null: they are not kept
};

struct LinearGradientArgs : LinearArgs {
  const float *lse, *entropy, *g_logprob, *g_entropy;  // [num_tokens]; g_entropy may be null
  void* out;                                           // [num_tokens, num_valid] bf16
};

namespace cuda {
// The rows of `partial` that linear_stats_wgmma needs on the current device. The sums of a token are cut at the splits'
// borders: for bits that do not depend on the batch, ask for a number of tokens that does not. Raises where there is no such
// kernel.
int linear_stats_splits(std::int64_t num_tokens, std::int64_t num_valid);
void linear_stats_wgmma(const LinearStatsArgs&, int splits, Stream);
void linear_dlogits_wgmma(const LinearGradientArgs&, Stream);
}  // namespace cuda

}  // namespace megappo
