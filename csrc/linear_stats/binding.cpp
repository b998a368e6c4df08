#include "common/torch.h"
#include "linear_stats/linear_stats.h"

// CUDA only: on the CPU the op is a GEMM of a chunk and the row operations (megappo/ops/linear_stats.py).
#ifdef MEGAPPO_CUDA

namespace megappo {
namespace {

// The batch for which the work is divided in invariant mode, whatever the batch is.
constexpr int64_t kInvariantTokens = 8192;

// Contiguous and at a 16-byte address, as the copy engine wants it; copied where it is not.
Tensor as_matrix(const Tensor& x) {
  const Tensor dense = torch::stable::contiguous(x);
  return reinterpret_cast<std::uintptr_t>(dense.data_ptr()) % 16 == 0 ? dense : torch::stable::clone(dense);
}

}  // namespace

// Which calls of linear_stats this one takes is said in megappo/ops/cuda/linear_stats.py. invariant: the bits of a token do not
// depend on the others.
Tensor linear_stats_wgmma(Tensor hidden, Tensor weight, Tensor target, int64_t vocab_start, int64_t num_valid, double inv_temp,
                          OptionalTensor row_inv_temp, int64_t ignore_index, bool want_entropy, bool bf16_logits,
                          bool invariant) {
  STD_TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2, "hidden and weight must be matrices");
  const int64_t num_tokens = hidden.size(0), hidden_size = hidden.size(1);
  check_type(hidden, ScalarType::BFloat16, "hidden", "bf16");
  check_type(weight, ScalarType::BFloat16, "weight", "bf16");
  STD_TORCH_CHECK(weight.size(1) == hidden_size, "weight must have ", hidden_size, " columns, as hidden, not ", weight.size(1));
  STD_TORCH_CHECK(hidden_size > 0 && hidden_size % 8 == 0, "hidden must have a multiple of 8 columns, not ", hidden_size);
  STD_TORCH_CHECK(num_valid >= 0 && num_valid <= weight.size(0), "num_valid must be 0 to ", weight.size(0), ", not ", num_valid);
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  STD_TORCH_CHECK(num_tokens < kMost && num_valid < kMost && hidden_size < kMost, "no side may have 2^31 - 256 rows or columns");
  check_vector(target, num_tokens, "target");
  check_type(target, ScalarType::Long, "target", "int64");
  check_device(weight, hidden, "weight");
  check_device(target, hidden, "target");
  if (row_inv_temp.has_value()) {
    check_vector(*row_inv_temp, num_tokens, "row_inv_temp");
    check_device(*row_inv_temp, hidden, "row_inv_temp");
    row_inv_temp = as_floats(*row_inv_temp);
  }

  const Tensor x = as_matrix(hidden), w = as_matrix(weight), ids = torch::stable::contiguous(target);
  const CudaContext context(x);
  const int64_t divided_for = invariant && num_tokens > 0 ? kInvariantTokens : num_tokens;
  const int splits = cuda::linear_stats_splits(divided_for, num_valid);
  const Tensor stats = torch::stable::new_empty(x, {num_tokens, 4}, ScalarType::Float);
  const Tensor partial = splits > 1 ? torch::stable::new_empty(x, {splits, num_tokens, 4}, ScalarType::Float) : stats;
  cuda::linear_stats_wgmma({x.data_ptr(), w.data_ptr(), data<int64_t>(ids), data<float>(row_inv_temp), out<float>(partial),
                            out<float>(stats), num_tokens, hidden_size, vocab_start, num_valid, ignore_index,
                            static_cast<float>(inv_temp), want_entropy, bf16_logits},
                           splits, context.stream);
  return stats;
}

#define MEGAPPO_LINEAR_STATS_SCHEMA                                                                              \
  "(Tensor hidden, Tensor weight, Tensor target, int vocab_start, int num_valid, float inv_temp, Tensor? row_inv_temp, " \
  "int ignore_index, bool want_entropy, bool bf16_logits, bool invariant) -> Tensor"

#ifdef MEGAPPO_CUDA_ON_CPU
MEGAPPO_OP(linear_stats_wgmma, MEGAPPO_LINEAR_STATS_SCHEMA)
#else
STABLE_TORCH_LIBRARY_FRAGMENT(MEGAPPO_NAMESPACE, m) { m.def("linear_stats_wgmma" MEGAPPO_LINEAR_STATS_SCHEMA); }
MEGAPPO_OP_ON_CUDA(linear_stats_wgmma)
#endif

}  // namespace megappo

#endif  // MEGAPPO_CUDA
