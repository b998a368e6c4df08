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

// The same for a type and that of the result: the same one, or a half type of fp32.
template <class F>
void with_types(Dtype dtype, Dtype result, F&& f) {
  if (dtype == Dtype::f32 && result != Dtype::f32) return with_type(result, [&](auto type) { f(float{}, type); });
  with_type(dtype, [&](auto type) { f(type, type); });
}

}  // namespace megappo
