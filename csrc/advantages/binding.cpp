#include "advantages/advantages.h"

#include <tuple>

#include "common/torch.h"

namespace megappo {
namespace {

using Tokens = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Keeps contiguous copies alive for the call, checked for shape and device.
struct Inputs {
  Inputs(const Tensor& value_, const Tensor& mask_, const Tensor& cu_seqlens, const OptionalTensor& bootstrap_,
         const OptionalTensor& policy_, const OptionalTensor& critic_)
      : like(value_), num_tokens(value_.numel()), num_sequences(cu_seqlens.numel() - 1) {
    STD_TORCH_CHECK(cu_seqlens.dim() == 1 && (num_sequences > 0 || (num_sequences == 0 && num_tokens == 0)),
                    "cu_seqlens must be [sequences + 1], with a sequence where there are tokens");
    value = floats(value_, num_tokens, "value");
    mask = bools(mask_, "response_mask");
    check_device(cu_seqlens, like, "cu_seqlens");
    const bool is_int = cu_seqlens.scalar_type() == ScalarType::Int;
    STD_TORCH_CHECK(is_int || cu_seqlens.scalar_type() == ScalarType::Long, "cu_seqlens must be int32 or int64");
    cu = torch::stable::contiguous(cu_seqlens);
    if (bootstrap_) bootstrap = floats(*bootstrap_, num_sequences, "bootstrap");
    if (policy_) policy = doubles(*policy_, num_sequences, "lam_policy_each");
    if (critic_) critic = doubles(*critic_, num_sequences, "lam_value_each");
  }

  Tensor floats(const Tensor& x, int64_t size, const char* name) const {
    check_vector(x, size, name);
    check_device(x, like, name);
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double ||
                        x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half,
                    name, " must be floating-point");
    return as_floats(x);
  }

  Tensor bools(const Tensor& x, const char* name) const {
    check_vector(x, num_tokens, name);
    check_device(x, like, name);
    check_type(x, ScalarType::Bool, name, "bool");
    return torch::stable::contiguous(x);
  }

  Tensor doubles(const Tensor& x, int64_t size, const char* name) const {
    check_vector(x, size, name);
    check_device(x, like, name);
    check_type(x, ScalarType::Double, name, "fp64");
    return torch::stable::contiguous(x);
  }

  AdvantageArgs args(double gamma, double lam_policy, double lam_value) const {
    AdvantageArgs a{};
    a.value = data<float>(value);
    a.mask = data<bool>(mask);
    if (cu.scalar_type() == ScalarType::Int) {
      a.cu32 = data<int32_t>(cu);
    } else {
      a.cu64 = data<int64_t>(cu);
    }
    a.bootstrap = data<float>(bootstrap);
    a.gamma = gamma;
    a.policy = {lam_policy, data<double>(policy)};
    a.critic = {lam_value, data<double>(critic)};
    a.num_tokens = num_tokens;
    a.num_sequences = num_sequences;
    return a;
  }

  const Tensor& like;
  int64_t num_tokens, num_sequences;
  Tensor value, mask, cu;
  OptionalTensor bootstrap, policy, critic;
};

Kl kl_of(const std::string& kl_estimator) {
  if (kl_estimator == "k1") return Kl::k1;
  if (kl_estimator == "k2") return Kl::k2;
  STD_TORCH_CHECK(kl_estimator == "k3", "kl_estimator must be k1, k2 or k3");
  return Kl::k3;
}

void check_sound(const int64_t* cu, int64_t num_sequences, int64_t num_tokens) {
  bool sound = cu[0] == 0 && cu[num_sequences] == num_tokens;
  for (int64_t s = 0; s < num_sequences; ++s) sound &= cu[s] <= cu[s + 1];
  STD_TORCH_CHECK(sound, "cu_seqlens must go from 0 to the number of tokens and never fall");
}

Tensor run_on_cpu(AdvantageArgs a, const Tensor& cu_seqlens, const Tensor& value) {
  const Tensor cu = torch::stable::to(cu_seqlens, ScalarType::Long);
  a.cu64 = data<int64_t>(cu);
  check_sound(a.cu64, a.num_sequences, a.num_tokens);
  const int64_t tasks = advantage_tasks(a.num_tokens);
  Tensor partial = torch::stable::new_empty(value, {tasks, 3}, ScalarType::Double);
  a.moments = out<double>(partial);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t b, int64_t e) { pick_advantage_tokens()(a, b, e); });
  Tensor moments = torch::stable::new_zeros(value, {3}, ScalarType::Double);
  for (int64_t i = 0; i < 3 * tasks; ++i) out<double>(moments)[i % 3] += a.moments[i];
  return moments;
}

#ifdef MEGAPPO_CUDA
Tensor run_on_cuda(AdvantageArgs a, const Tensor& value, Stream stream) {
  Tensor scratch = torch::stable::new_empty(value, {cuda::advantages_scratch(a.num_tokens)}, ScalarType::Byte);
  Tensor moments = torch::stable::new_empty(value, {3}, ScalarType::Double);
  a.moments = out<double>(moments);
  cuda::advantages(a, out<void>(scratch), stream);
  return moments;
}
#endif

}  // namespace

Tokens token_advantages(Tensor logprob, OptionalTensor ref_logprob, Tensor score, Tensor value, Tensor response_mask,
                        Tensor cu_seqlens, OptionalTensor bootstrap, double gamma, double lam_policy, double lam_value,
                        OptionalTensor lam_policy_each, OptionalTensor lam_value_each, std::string kl_estimator, double kl_coef,
                        OptionalTensor token_reward, OptionalTensor steps, OptionalTensor weight, OptionalTensor trace) {
  const Inputs in(value, response_mask, cu_seqlens, bootstrap, lam_policy_each, lam_value_each);
  const Kl kind = kl_of(kl_estimator);
  const Tensor taken = in.floats(logprob, in.num_tokens, "logprob"), scores = in.floats(score, in.num_sequences, "score");
  OptionalTensor reference;
  if (ref_logprob) reference = in.floats(*ref_logprob, in.num_tokens, "ref_logprob");
  OptionalTensor inner, starts, weights, traces;
  if (token_reward) inner = in.floats(*token_reward, in.num_tokens, "token_reward");
  if (steps) starts = in.bools(*steps, "steps");
  if (weight) weights = in.doubles(*weight, in.num_tokens, "weight");
  if (trace) traces = in.doubles(*trace, in.num_tokens, "trace");

  AdvantageArgs a = in.args(gamma, lam_policy, lam_value);
  a.logprob = data<float>(taken);
  a.ref_logprob = data<float>(reference);
  a.score = data<float>(scores);
  a.kl = reference && kl_coef != 0.0 ? kind : Kl::none;
  a.kl_coef = kl_coef;
  a.token_reward = data<float>(inner);
  a.steps = data<bool>(starts);
  a.weight = data<double>(weights);
  a.trace = data<double>(traces);

  Tensor reward = torch::stable::new_empty(in.value, {in.num_tokens});
  Tensor advantage = torch::stable::new_empty(in.value, {in.num_tokens});
  Tensor returns = torch::stable::new_empty(in.value, {in.num_tokens});
  a.reward = out<float>(reward);
  a.advantage = out<float>(advantage);
  a.returns = out<float>(returns);
  Tensor moments;
  on_device_of(
      in.value, [&] { moments = run_on_cpu(a, in.cu, in.value); }, MEGAPPO_ON_CUDA(moments = run_on_cuda(a, in.value, stream)));
  return {reward, advantage, returns, moments};
}

MEGAPPO_OP(token_advantages,
           "(Tensor logprob, Tensor? ref_logprob, Tensor score, Tensor value, Tensor response_mask, Tensor cu_seqlens, "
           "Tensor? bootstrap, float gamma, float lam_policy, float lam_value, Tensor? lam_policy_each, Tensor? lam_value_each, "
           "str kl_estimator, float kl_coef, Tensor? token_reward, Tensor? steps, Tensor? weight, Tensor? trace) -> "
           "(Tensor, Tensor, Tensor, Tensor)")

}  // namespace megappo
