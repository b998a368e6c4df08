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

// The arguments that both ops share. Keeps what it had to copy alive.
struct Inputs {
  Tensor hidden, weight, target;
  OptionalTensor row_inv_temp;
  LinearArgs args;

  Inputs(const Tensor& hidden_, const Tensor& weight_, const Tensor& target_, int64_t vocab_start, int64_t num_valid,
         double inv_temp, const OptionalTensor& row_inv_temp_, int64_t ignore_index, bool bf16_logits);
  Tensor empty(int64_t columns, bool half) const {
    return torch::stable::new_empty(hidden, {args.num_tokens, columns}, half ? ScalarType::BFloat16 : ScalarType::Float);
  }
};

Inputs::Inputs(const Tensor& hidden_, const Tensor& weight_, const Tensor& target_, int64_t vocab_start, int64_t num_valid,
               double inv_temp, const OptionalTensor& row_inv_temp_, int64_t ignore_index, bool bf16_logits)
    : hidden(hidden_), weight(weight_), target(target_), row_inv_temp(row_inv_temp_) {
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

  hidden = as_matrix(hidden), weight = as_matrix(weight), target = torch::stable::contiguous(target);
  args = {hidden.data_ptr(), weight.data_ptr(), data<int64_t>(target), data<float>(row_inv_temp), num_tokens, hidden_size,
          vocab_start, num_valid, ignore_index, static_cast<float>(inv_temp), bf16_logits};
}

}  // namespace

// Which calls of linear_stats this one takes is said in megappo/ops/cuda/linear_stats.py. invariant: the bits of a token do not
// depend on the others. logits: [T, num_valid] if they are kept, else [0, 0].
std::tuple<Tensor, Tensor> linear_stats_wgmma(Tensor hidden, Tensor weight, Tensor target, int64_t vocab_start, int64_t num_valid,
                                              double inv_temp, OptionalTensor row_inv_temp, int64_t ignore_index,
                                              bool want_entropy, bool bf16_logits, bool keep_logits, bool invariant) {
  const Inputs in(hidden, weight, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index, bf16_logits);
  const int64_t num_tokens = in.args.num_tokens;
  const CudaContext context(in.hidden);
  const int64_t divided_for = invariant && num_tokens > 0 ? kInvariantTokens : num_tokens;
  const int splits = cuda::linear_stats_splits(divided_for, num_valid);
  const Tensor stats = in.empty(4, false), partial = splits > 1 ? in.empty(4 * splits, false) : stats;
  const ScalarType type = bf16_logits ? ScalarType::BFloat16 : ScalarType::Float;
  const Tensor logits = keep_logits ? in.empty(num_valid, bf16_logits) : torch::stable::new_empty(in.hidden, {0, 0}, type);
  void* keep = keep_logits ? logits.data_ptr() : nullptr;
  cuda::linear_stats_wgmma({in.args, want_entropy, out<float>(partial), out<float>(stats), keep}, splits, context.stream);
  return {stats, logits};
}

// Of a whole block: all rows of `weight` are vocabulary.
Tensor linear_dlogits_wgmma(Tensor hidden, Tensor weight, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob,
                            OptionalTensor g_entropy, int64_t vocab_start, double inv_temp, OptionalTensor row_inv_temp,
                            int64_t ignore_index, bool bf16_logits) {
  const int64_t num_valid = weight.size(0);
  const Inputs in(hidden, weight, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index, bf16_logits);
  const auto floats = [&](const Tensor& x, const char* name) {
    check_vector(x, in.args.num_tokens, name);
    check_device(x, in.hidden, name);
    return as_floats(x);
  };
  const Tensor l = floats(lse, "lse"), h = floats(entropy, "entropy"), g = floats(g_logprob, "g_logprob");
  OptionalTensor g_h;
  if (g_entropy.has_value()) g_h = floats(*g_entropy, "g_entropy");
  const CudaContext context(in.hidden);
  const Tensor dlogits = in.empty(num_valid, true);
  cuda::linear_dlogits_wgmma({in.args, data<float>(l), data<float>(h), data<float>(g), data<float>(g_h), dlogits.data_ptr()},
                             context.stream);
  return dlogits;
}

#ifdef MEGAPPO_CUDA_ON_CPU
#define MEGAPPO_WGMMA_OP MEGAPPO_OP
#else
#define MEGAPPO_WGMMA_OP(name, schema)                                        \
  STABLE_TORCH_LIBRARY_FRAGMENT(MEGAPPO_NAMESPACE, m) { m.def(#name schema); } \
  MEGAPPO_OP_ON_CUDA(name)
#endif
MEGAPPO_WGMMA_OP(linear_stats_wgmma,
                 "(Tensor hidden, Tensor weight, Tensor target, int vocab_start, int num_valid, float inv_temp, "
                 "Tensor? row_inv_temp, int ignore_index, bool want_entropy, bool bf16_logits, bool keep_logits, bool invariant) "
                 "-> (Tensor, Tensor)")
MEGAPPO_WGMMA_OP(linear_dlogits_wgmma,
                 "(Tensor hidden, Tensor weight, Tensor target, Tensor lse, Tensor entropy, Tensor g_logprob, Tensor? g_entropy, "
                 "int vocab_start, float inv_temp, Tensor? row_inv_temp, int ignore_index, bool bf16_logits) -> Tensor")

}  // namespace megappo

#endif  // MEGAPPO_CUDA
