#pragma once
#include "cuda_runtime.h"

struct __half { std::uint16_t bits; };
inline __half __float2half_rn(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  __half out;
  std::memcpy(&out.bits, &h, 2);
  return out;
}
inline std::uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(std::uint16_t bits) { return {bits}; }
inline float __half2float(__half x) {
  _Float16 h;
  std::memcpy(&h, &x.bits, 2);
  return static_cast<float>(h);
}
struct __half2 { __half x, y; };
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
