#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 { std::uint16_t bits; };
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned u = __float_as_uint(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)}; }
