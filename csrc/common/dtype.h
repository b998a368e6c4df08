// Element types of the kernels' large inputs, without torch headers so that kernels can be compiled alone.
#pragma once

#include <cstdint>

namespace megappo {

enum class Dtype : std::int32_t { f32, bf16, f16 };

struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

// Calls f with a value of the C++ type that stands for `dtype`.
template <class F>
void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f32: return f(float{});
    case Dtype::bf16: return f(bf16{});
    case Dtype::f16: return f(f16{});
  }
}

}  // namespace megappo
