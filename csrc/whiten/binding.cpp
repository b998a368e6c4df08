#include "common/torch.h"
#include "whiten/whiten.h"

namespace megappo {

Tensor whiten_apply(Tensor advantage, Tensor mask, Tensor moments) {
  const int64_t num_tokens = advantage.numel();
  check_vector(advantage, num_tokens, "advantage");
  check_vector(mask, num_tokens, "mask");
  check_type(mask, ScalarType::Bool, "mask", "bool");
  check_vector(moments, 3, "moments");
  check_type(moments, ScalarType::Double, "moments", "fp64");
  check_device(mask, advantage, "mask");
  check_device(moments, advantage, "moments");

  const Tensor x = as_floats(advantage), kept = torch::stable::contiguous(mask), sums = torch::stable::contiguous(moments);
  Tensor white = torch::stable::new_empty(x, {num_tokens});
  const WhitenArgs args{data<float>(x), data<bool>(kept), data<double>(sums), out<float>(white), num_tokens};
  on_device_of(
      x,
      [&] {
        torch::stable::parallel_for(0, num_tokens, 1 << 15, [&](int64_t b, int64_t e) { pick_whiten_tokens()(args, b, e); });
      },
      MEGAPPO_ON_CUDA(cuda::whiten(args, stream)));
  return white;
}

MEGAPPO_OP(whiten_apply, "(Tensor advantage, Tensor mask, Tensor moments) -> Tensor")

}  // namespace megappo
