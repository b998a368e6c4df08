#include <algorithm>
#include <cmath>

#include "common/huge_pages.h"
#include "common/torch.h"
#include "vocab_stats/vocab_stats.h"

namespace megappo {
namespace {

// Columns of a segment: 16 KiB of fp32 stay in a core's L1 between the two passes over them. On a GPU a segment is what one block
// reads, and a row is cut evenly.
constexpr int64_t kCpuSegment = 4096, kCudaSegment = 32768;

struct Segments {
  int64_t count, columns;
};

Segments cut(int64_t columns, const Tensor& like) {
#ifdef MEGAPPO_CUDA
  if (is_for_cuda(like)) {
    const int64_t count = (columns + kCudaSegment - 1) / kCudaSegment;
    const int64_t even = (columns + std::max<int64_t>(count, 1) - 1) / std::max<int64_t>(count, 1);
    return {count, (even + 7) / 8 * 8};  // 8 columns of bf16 are one 16-byte load
  }
#endif
  return {(columns + kCpuSegment - 1) / kCpuSegment, kCpuSegment};
}

// Units of work per thread that are worth handing out: 64 Ki elements.
int64_t grain(int64_t columns) { return std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(columns, 1)); }

Tensor with_adjacent_columns(const Tensor& logits) {
  const bool adjacent = logits.stride(1) == 1 || logits.size(1) <= 1;
  return adjacent ? logits : torch::stable::contiguous(logits);
}

// The arguments all three ops that read logits share. Keeps what it had to copy alive.
struct Rows {
  Tensor logits, target;
  OptionalTensor row_inv_temp;
  VocabRows args;

  Rows(const Tensor& given, const Tensor& target_, int64_t vocab_start, int64_t num_valid, double inv_temp,
       const OptionalTensor& row_inv_temp_, int64_t ignore_index)
      : logits(given) {
    STD_TORCH_CHECK(given.dim() == 2, "logits must be [tokens, vocabulary]");
    const int64_t num_tokens = given.size(0);
    const Dtype dtype = dtype_of(given, "logits");
    STD_TORCH_CHECK(0 <= num_valid && num_valid <= given.size(1), "num_valid must be within the columns of logits");
    check_vector(target_, num_tokens, "target");
    check_type(target_, ScalarType::Long, "target", "int64");
    check_device(target_, given, "target");
    logits = with_adjacent_columns(given);
    target = torch::stable::contiguous(target_);
    if (row_inv_temp_.has_value()) {
      check_vector(*row_inv_temp_, num_tokens, "row_inv_temp");
      check_device(*row_inv_temp_, given, "row_inv_temp");
      row_inv_temp = as_floats(*row_inv_temp_);
    }
    args = {logits.data_ptr(), dtype, logits.stride(0), data<int64_t>(target), data<float>(row_inv_temp),
            static_cast<float>(inv_temp), num_tokens, vocab_start, num_valid, ignore_index};
  }
};

Tensor per_token(const Tensor& x, int64_t num_tokens, const Tensor& like, const char* name) {
  check_vector(x, num_tokens, name);
  check_device(x, like, name);
  return as_floats(x);
}

void backward_into(const Tensor& out, const Rows& rows, const Tensor& lse, const Tensor& entropy, const Tensor& g_logprob,
                   const OptionalTensor& g_entropy) {
  const Tensor& like = rows.logits;
  const int64_t num_tokens = rows.args.num_tokens;
  const Tensor l = per_token(lse, num_tokens, like, "lse"), h = per_token(entropy, num_tokens, like, "entropy");
  const Tensor g = per_token(g_logprob, num_tokens, like, "g_logprob");
  OptionalTensor g_h;
  if (g_entropy.has_value()) g_h = per_token(*g_entropy, num_tokens, like, "g_entropy");
  const Segments cuts = cut(out.size(1), like);
  const VocabBackwardArgs args{rows.args, data<float>(l), data<float>(h), data<float>(g), data<float>(g_h), out.data_ptr(),
                               dtype_of(out, "out"), out.stride(0), out.size(1), cuts.count, cuts.columns};
  on_device_of(
      like,
      [&] {
        torch::stable::parallel_for(0, num_tokens * cuts.count, grain(std::min(cuts.columns, out.size(1))),
                                    [&](int64_t b, int64_t e) { pick_vocab_backward()(args, b, e); });
      },
      MEGAPPO_ON_CUDA(cuda::vocab_backward(args, stream)));
}

}  // namespace

Tensor vocab_stats(Tensor logits, Tensor target, int64_t vocab_start, int64_t num_valid, double inv_temp,
                   OptionalTensor row_inv_temp, int64_t ignore_index, bool want_entropy) {
  const Rows rows(logits, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index);
  const int64_t num_tokens = rows.args.num_tokens;
  const Segments cuts = cut(num_valid, logits);
  const auto empty = [&](int64_t columns) { return torch::stable::new_empty(logits, {num_tokens, columns}, ScalarType::Float); };
  if (cuts.count == 0) {  // a shard of padding alone
    const Tensor stats = torch::stable::new_zeros(logits, {num_tokens, 4}, ScalarType::Float);
    torch::stable::fill_(torch::stable::select(stats, 1, 0), -INFINITY);
    torch::stable::fill_(torch::stable::select(stats, 1, 3), -INFINITY);
    return stats;
  }
  const Tensor segments = empty(4 * cuts.count);
  const VocabStatsArgs args{rows.args, out<VocabStats>(segments), cuts.count, cuts.columns, want_entropy};
  on_device_of(
      logits,
      [&] {
        torch::stable::parallel_for(0, num_tokens * cuts.count, grain(std::min(cuts.columns, num_valid)),
                                    [&](int64_t b, int64_t e) { pick_vocab_segments()(args, b, e); });
      },
      MEGAPPO_ON_CUDA(cuda::vocab_segments(args, stream)));
  if (cuts.count == 1) return segments;
  const Tensor stats = empty(4);
  const VocabFoldArgs folding{data<VocabStats>(segments), out<VocabStats>(stats), num_tokens, cuts.count};
  on_device_of(
      logits,
      [&] {
        torch::stable::parallel_for(0, num_tokens, grain(16 * cuts.count),
                                    [&](int64_t b, int64_t e) { pick_vocab_fold()(folding, b, e); });
      },
      MEGAPPO_ON_CUDA(cuda::vocab_fold(folding, stream)));
  return stats;
}

std::tuple<Tensor, Tensor, Tensor> vocab_stats_merge(Tensor gathered, Tensor target, int64_t ignore_index) {
  STD_TORCH_CHECK(gathered.dim() == 3 && gathered.size(2) == 4 && gathered.size(0) > 0, "gathered must be [ranks, tokens, 4]");
  check_type(gathered, ScalarType::Float, "gathered", "fp32");
  const int64_t num_tokens = gathered.size(1);
  check_vector(target, num_tokens, "target");
  check_type(target, ScalarType::Long, "target", "int64");
  check_device(target, gathered, "target");
  const Tensor stats = torch::stable::contiguous(gathered), labels = torch::stable::contiguous(target);
  const auto empty = [&] { return torch::stable::new_empty(gathered, {num_tokens}); };
  Tensor logprob = empty(), entropy = empty(), lse = empty();
  const VocabMergeArgs args{data<VocabStats>(stats), data<int64_t>(labels), out<float>(logprob), out<float>(entropy),
                            out<float>(lse), gathered.size(0), num_tokens, ignore_index};
  on_device_of(
      gathered,
      [&] {
        torch::stable::parallel_for(0, num_tokens, grain(32 * gathered.size(0)),
                                    [&](int64_t b, int64_t e) { pick_vocab_merge()(args, b, e); });
      },
      MEGAPPO_ON_CUDA(cuda::vocab_merge(args, stream)));
  return {logprob, entropy, lse};
}

Tensor vocab_logits_backward(Tensor logits, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob, OptionalTensor g_entropy,
                             int64_t vocab_start, int64_t num_valid, double inv_temp, OptionalTensor row_inv_temp,
                             int64_t ignore_index) {
  const Rows rows(logits, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index);
  const Tensor grad = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)});
  if (!logits.is_cuda()) prefer_huge_pages(grad.data_ptr(), static_cast<size_t>(grad.numel()) * grad.element_size());
  backward_into(grad, rows, lse, entropy, g_logprob, g_entropy);
  return grad;
}

void vocab_logits_backward_into(Tensor logits, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob,
                                OptionalTensor g_entropy, int64_t vocab_start, int64_t num_valid, double inv_temp,
                                OptionalTensor row_inv_temp, int64_t ignore_index, Tensor out) {
  const Rows rows(logits, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index);
  check_device(out, logits, "out");
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == logits.size(0) && out.size(1) == logits.size(1),
                  "out must have the logits' shape");
  STD_TORCH_CHECK(rows.args.dtype == Dtype::f32 || out.scalar_type() == logits.scalar_type(), "out must have the logits' type");
  STD_TORCH_CHECK((out.stride(1) == 1 || out.size(1) <= 1) && (out.stride(0) >= out.size(1) || out.size(0) <= 1),
                  "out that is overwritten needs adjacent columns and rows that do not overlap");
  backward_into(out, rows, lse, entropy, g_logprob, g_entropy);
}

void vocab_logits_backward_(Tensor logits, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob, OptionalTensor g_entropy,
                            int64_t vocab_start, int64_t num_valid, double inv_temp, OptionalTensor row_inv_temp,
                            int64_t ignore_index) {
  const Rows rows(logits, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index);
  const bool one_row_after_the_other = logits.stride(0) >= logits.size(1) || logits.size(0) <= 1;
  STD_TORCH_CHECK(rows.logits.data_ptr() == logits.data_ptr() && one_row_after_the_other,
                  "logits that are overwritten need adjacent columns and rows that do not overlap");
  backward_into(logits, rows, lse, entropy, g_logprob, g_entropy);
}

MEGAPPO_OP(vocab_stats,
           "(Tensor logits, Tensor target, int vocab_start, int num_valid, float inv_temp, Tensor? row_inv_temp, "
           "int ignore_index, bool want_entropy) -> Tensor")
MEGAPPO_OP(vocab_stats_merge, "(Tensor gathered, Tensor target, int ignore_index) -> (Tensor, Tensor, Tensor)")
MEGAPPO_OP(vocab_logits_backward,
           "(Tensor logits, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob, Tensor? g_entropy, int vocab_start, "
           "int num_valid, float inv_temp, Tensor? row_inv_temp, int ignore_index) -> Tensor")
MEGAPPO_OP(vocab_logits_backward_into,
           "(Tensor logits, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob, Tensor? g_entropy, int vocab_start, "
           "int num_valid, float inv_temp, Tensor? row_inv_temp, int ignore_index, Tensor(a!) out) -> ()")
MEGAPPO_OP(vocab_logits_backward_,
           "(Tensor(a!) logits, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob, Tensor? g_entropy, int vocab_start, "
           "int num_valid, float inv_temp, Tensor? row_inv_temp, int ignore_index) -> ()")

}  // namespace megappo
