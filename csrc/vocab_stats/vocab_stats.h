// Statistic, merge and backward of vocabulary-parallel logits; see megappo/ops/vocab_stats.py for the formulas.
//
// A row is cut into segments of columns whose length depends on the width of the vocabulary alone. Each segment has a statistic
// of its own and the segments of a row are folded from left to right, so a row has the same bits whatever the other rows are and
// however many threads or blocks share the work. Few rows still fill a machine: the segments are the units of work.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/stream.h"

namespace megappo {

// m, s, t, z of a set of columns: their maximum, sum e^(x-m), sum e^(x-m) (x-m), x of the target (elsewhere: -inf).
struct alignas(16) VocabStats {
  float m, s, t, z;
};

struct VocabRows {
  const void* logits;  // [num_tokens, >= num_valid], columns adjacent
  Dtype dtype;
  std::int64_t row_stride;  // elements
  const std::int64_t* target;
  const float* row_inv_temp;  // [num_tokens] or null: inv_temp
  float inv_temp;
  std::int64_t num_tokens, vocab_start, num_valid, ignore_index;
};

struct VocabStatsArgs {
  VocabRows rows;
  VocabStats* segments;  // [num_tokens, num_segments]
  std::int64_t num_segments, segment_columns;
  bool want_entropy;
};

struct VocabFoldArgs {
  const VocabStats* segments;
  VocabStats* out;  // [num_tokens]
  std::int64_t num_tokens, num_segments;
};

struct VocabMergeArgs {
  const VocabStats* gathered;  // [num_ranks, num_tokens]
  const std::int64_t* target;
  float *logprob, *entropy, *lse;
  std::int64_t num_ranks, num_tokens, ignore_index;
};

struct VocabBackwardArgs {
  VocabRows rows;
  const float *lse, *entropy, *g_logprob, *g_entropy;  // [num_tokens]; g_entropy may be null
  void* out;                                           // may be the logits
  Dtype out_dtype;                                     // of the logits, or a half type where they are fp32
  std::int64_t out_stride, num_columns;                // columns from num_valid on become 0
  std::int64_t num_segments, segment_columns;
};

// Logits are clamped to this distance from lse before they are multiplied by e^(x - lse) = 0, so that -inf gives 0 and not NaN.
constexpr float kExponentFloor = -120.0f;

// Units of work are (row, segment), row by row.
MEGAPPO_CPU_KERNEL(vocab_segments, const VocabStatsArgs&, std::int64_t begin, std::int64_t end)
MEGAPPO_CPU_KERNEL(vocab_fold, const VocabFoldArgs&, std::int64_t begin, std::int64_t end)
MEGAPPO_CPU_KERNEL(vocab_merge, const VocabMergeArgs&, std::int64_t begin, std::int64_t end)
MEGAPPO_CPU_KERNEL(vocab_backward, const VocabBackwardArgs&, std::int64_t begin, std::int64_t end)
namespace cuda {
void vocab_segments(const VocabStatsArgs&, Stream);
void vocab_fold(const VocabFoldArgs&, Stream);
void vocab_merge(const VocabMergeArgs&, Stream);
void vocab_backward(const VocabBackwardArgs&, Stream);
}  // namespace cuda

}  // namespace megappo
