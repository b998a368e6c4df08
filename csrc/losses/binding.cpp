#include <limits>
#include <tuple>

#include "common/torch.h"
#include "losses/losses.h"

namespace megappo {
namespace {

using Losses = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr float kNone = std::numeric_limits<float>::infinity();
// Fewer than 8 Ki tokens cost less than waking a thread.
constexpr int64_t kBlocksPerTask = 2;

struct Inputs {
  Tensor a, b, c, weight;
};

Tensor input(const Tensor& x, const Tensor& like, const char* name) {
  check_vector(x, like.numel(), name);
  check_device(x, like, name);
  return as_floats(x);
}

int64_t num_blocks(const Tensor& x) {
#ifdef MEGAPPO_CUDA
  if (is_for_cuda(x)) return cuda::loss_blocks(x.numel());
#endif
  return (x.numel() + kCpuLossBlock - 1) / kCpuLossBlock;
}

// A loss' outputs, and the kernels' view of them and of its inputs.
struct Run {
  Losses outputs;
  Tensor partials;
  LossArgs args;
};

template <class Rule>
Run prepare(const Inputs& in) {
  constexpr int64_t kSums = Rule::kCounts + Rule::kValues;
  const int64_t tokens = in.a.numel(), blocks = num_blocks(in.a);
  Tensor loss = torch::stable::new_empty(in.a, {}), gradient = torch::stable::new_empty(in.a, {tokens});
  Tensor sums = torch::stable::new_empty(in.a, {kSums}, ScalarType::Double);
  Tensor maxima = torch::stable::new_empty(in.a, {1}, ScalarType::Double);
  Tensor partials = torch::stable::new_empty(in.a, {kSums + 2, blocks}, ScalarType::Double);
  const LossArgs args{data<float>(in.a), data<float>(in.b), data<float>(in.c), data<float>(in.weight),
                      out<float>(gradient), out<double>(partials), out<float>(loss), out<double>(sums), out<double>(maxima),
                      tokens, blocks};
  return {{loss, gradient, sums, maxima}, partials, args};
}

}  // namespace

Losses policy_loss(Tensor logprob, Tensor old_logprob, Tensor advantage, Tensor weight, double clip_low, double clip_high,
                   std::optional<double> dual_clip) {
  const Inputs in{input(logprob, logprob, "logprob"), input(old_logprob, logprob, "old_logprob"),
                  input(advantage, logprob, "advantage"), input(weight, logprob, "weight")};
  const PolicyRule rule{static_cast<float>(1.0 - clip_low), static_cast<float>(1.0 + clip_high),
                        dual_clip ? static_cast<float>(*dual_clip) : kNone};
  const Run run = prepare<PolicyRule>(in);
  on_device_of(
      in.a,
      [&] {
        torch::stable::parallel_for(0, run.args.num_blocks, kBlocksPerTask, [&](int64_t b, int64_t e) {
          pick_policy_loss_blocks()(run.args, rule, b, e);
        });
        pick_policy_loss_total()(run.args);
      },
      MEGAPPO_ON_CUDA(cuda::policy_loss(run.args, rule, stream)));
  return run.outputs;
}

Losses value_loss(Tensor value, Tensor old_value, Tensor returns, Tensor weight, std::optional<double> clip) {
  const Inputs in{input(value, value, "value"), input(old_value, value, "old_value"), input(returns, value, "returns"),
                  input(weight, value, "weight")};
  const ValueRule rule{clip ? static_cast<float>(*clip) : kNone, clip.has_value()};
  const Run run = prepare<ValueRule>(in);
  on_device_of(
      in.a,
      [&] {
        torch::stable::parallel_for(0, run.args.num_blocks, kBlocksPerTask, [&](int64_t b, int64_t e) {
          pick_value_loss_blocks()(run.args, rule, b, e);
        });
        pick_value_loss_total()(run.args);
      },
      MEGAPPO_ON_CUDA(cuda::value_loss(run.args, rule, stream)));
  return run.outputs;
}

MEGAPPO_OP(policy_loss,
           "(Tensor logprob, Tensor old_logprob, Tensor advantage, Tensor weight, float clip_low, float clip_high, "
           "float? dual_clip) -> (Tensor, Tensor, Tensor, Tensor)")
MEGAPPO_OP(value_loss,
           "(Tensor value, Tensor old_value, Tensor returns, Tensor weight, float? clip) -> (Tensor, Tensor, Tensor, Tensor)")

}  // namespace megappo
