// Sixteen fp32 lanes on any instruction set: what the row kernels of csrc/*/cpu.cpp compute with. The number of lanes is the same
// everywhere, so sums run in the same order everywhere; the compiler vectors below it have the width of the machine.
//
// Included by cpu.cpp files only: everything lives in the namespace of the instruction set, so that the linker cannot merge code
// compiled for different machines.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtype.h"

#if defined(__F16C__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#define MEGAPPO_INLINE inline __attribute__((always_inline))
// For lambdas: [&](Floats x) MEGAPPO_INLINE_LAMBDA { ... }
#define MEGAPPO_INLINE_LAMBDA __attribute__((always_inline))

namespace megappo::MEGAPPO_ISA {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;

typedef float NativeFloats __attribute__((vector_size(4 * kNative)));
typedef std::int32_t NativeInts __attribute__((vector_size(4 * kNative)));
typedef std::uint32_t NativeWords __attribute__((vector_size(4 * kNative)));
typedef std::uint16_t NativeHalves __attribute__((vector_size(2 * kNative)));

struct Floats {
  NativeFloats part[kParts];
};

template <class To, class From>
MEGAPPO_INLINE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

MEGAPPO_INLINE NativeFloats native_splat(float x) { return NativeFloats{} + x; }

MEGAPPO_INLINE Floats splat(float x) {
  Floats y;
  for (int i = 0; i < kParts; ++i) y.part[i] = native_splat(x);
  return y;
}

MEGAPPO_INLINE Floats operator+(Floats a, Floats b) {
  for (int i = 0; i < kParts; ++i) a.part[i] += b.part[i];
  return a;
}
MEGAPPO_INLINE Floats operator-(Floats a, Floats b) {
  for (int i = 0; i < kParts; ++i) a.part[i] -= b.part[i];
  return a;
}
MEGAPPO_INLINE Floats operator*(Floats a, Floats b) {
  for (int i = 0; i < kParts; ++i) a.part[i] *= b.part[i];
  return a;
}

// The larger of two; where either is NaN, b: what x86's instruction does, which compilers do not always see in a comparison.
MEGAPPO_INLINE NativeFloats native_max(NativeFloats a, NativeFloats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
MEGAPPO_INLINE NativeFloats native_min(NativeFloats a, NativeFloats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
MEGAPPO_INLINE Floats max(Floats a, Floats b) {
  for (int i = 0; i < kParts; ++i) a.part[i] = native_max(a.part[i], b.part[i]);
  return a;
}
MEGAPPO_INLINE Floats min(Floats a, Floats b) {
  for (int i = 0; i < kParts; ++i) a.part[i] = native_min(a.part[i], b.part[i]);
  return a;
}

// `y` where x is below the bound, else `otherwise` (also for NaN).
MEGAPPO_INLINE Floats where_below(Floats x, Floats bound, Floats y, Floats otherwise) {
  for (int i = 0; i < kParts; ++i) x.part[i] = x.part[i] < bound.part[i] ? y.part[i] : otherwise.part[i];
  return x;
}

// Keeps the compiler from fusing the operation that made x into the next one: a product that is used twice must be one number.
MEGAPPO_INLINE Floats rounded(Floats x) {
#if defined(__AVX512F__)
  for (int i = 0; i < kParts; ++i) asm("" : "+v"(x.part[i]));
#elif defined(__SSE2__)
  for (int i = 0; i < kParts; ++i) asm("" : "+x"(x.part[i]));
#elif defined(__aarch64__)
  for (int i = 0; i < kParts; ++i) asm("" : "+w"(x.part[i]));
#endif
  return x;
}

// e^x to 2 roundings, for x in [-87, 88] or NaN: Cephes' polynomial on [-log 2 / 2, log 2 / 2].
constexpr float kExpLowest = -87.0f, kExpHighest = 88.0f;

MEGAPPO_INLINE NativeFloats native_exp(NativeFloats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const NativeFloats shifted = x * 1.44269504088896341f + kRound;
  const NativeFloats n = shifted - kRound;
  const NativeFloats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  NativeFloats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return bits_as<NativeFloats>(bits_as<NativeInts>(p) + (bits_as<NativeInts>(shifted) << 23));
}

MEGAPPO_INLINE Floats exp_within(Floats x) {
  for (int i = 0; i < kParts; ++i) x.part[i] = native_exp(x.part[i]);
  return x;
}

// The same for every x: what is outside is taken for the bound.
MEGAPPO_INLINE Floats exp(Floats x) { return exp_within(min(splat(kExpHighest), max(splat(kExpLowest), x))); }

MEGAPPO_INLINE float sum(Floats x) {
  float lane[kLanes];
  std::memcpy(lane, &x, sizeof(lane));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

MEGAPPO_INLINE float max_of(Floats x) {
  float lane[kLanes];
  std::memcpy(lane, &x, sizeof(lane));
  for (int i = 1; i < kLanes; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  return lane[0];
}

// ------------------------------------------------------------------------------------------------------- memory

template <class T>
MEGAPPO_INLINE T read(const void* at) {
  T x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}

MEGAPPO_INLINE NativeFloats widen(const float* at) { return read<NativeFloats>(at); }

// 16-bit numbers to the low halves of words and back. Compilers make several instructions of the generic conversion.
MEGAPPO_INLINE NativeWords words_of(const void* at) {
#if defined(__AVX512F__)
  return bits_as<NativeWords>(_mm512_maskz_cvtepu16_epi32(0xffff, read<__m256i>(at)));
#elif defined(__AVX2__)
  return bits_as<NativeWords>(_mm256_cvtepu16_epi32(read<__m128i>(at)));
#else
  return __builtin_convertvector(read<NativeHalves>(at), NativeWords);
#endif
}

MEGAPPO_INLINE NativeHalves halves_of(NativeWords x) {
#if defined(__AVX512F__)
  return bits_as<NativeHalves>(_mm512_maskz_cvtepi32_epi16(0xffff, bits_as<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i words = bits_as<__m256i>(x);
  return bits_as<NativeHalves>(_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  return __builtin_convertvector(x, NativeHalves);
#endif
}

MEGAPPO_INLINE NativeFloats widen(const bf16* at) { return bits_as<NativeFloats>(words_of(at) << 16); }

MEGAPPO_INLINE NativeFloats widen(const f16* at) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, read<__m256i>(at));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(read<__m128i>(at));
#else
  // Exponent and mantissa moved to their fp32 places are the number times 2^-112; infinities and NaN need the fp32 exponent.
  const NativeWords bits = words_of(at), rest = bits & 0x7fffu;
  const NativeFloats scaled = bits_as<NativeFloats>(rest << 13) * 0x1p112f;
  const NativeWords special = rest >= 0x7c00u ? NativeWords{} + 0x7f800000u : NativeWords{};
  return bits_as<NativeFloats>(bits_as<NativeWords>(scaled) | special | ((bits & 0x8000u) << 16));
#endif
}

MEGAPPO_INLINE void narrow(float* at, NativeFloats x) { std::memcpy(at, &x, sizeof(x)); }

MEGAPPO_INLINE void narrow(bf16* at, NativeFloats x) {
  const NativeWords bits = bits_as<NativeWords>(x);
  const NativeWords nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const NativeHalves half = halves_of(x == x ? nearest_even : NativeWords{} + 0x7fc0u);
  std::memcpy(at, &half, sizeof(half));
}

MEGAPPO_INLINE void narrow(f16* at, NativeFloats x) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const NativeWords bits = bits_as<NativeWords>(x), rest = bits & 0x7fffffffu;
  // Below 2^-14 the sum with 0.5 has the rounded half mantissa in its low bits.
  const NativeWords tiny = bits_as<NativeWords>(bits_as<NativeFloats>(rest) + 0.5f) - 0x3f000000u;
  const NativeWords normal = (rest - 0x37fff001u + ((rest >> 13) & 1u)) >> 13;
  const NativeWords large = rest > 0x7f800000u ? NativeWords{} + 0x7e00u : NativeWords{} + 0x7c00u;
  const NativeWords magnitude = rest < 0x38800000u ? tiny : (rest >= 0x47800000u ? large : normal);
  const NativeHalves half = halves_of(magnitude | ((bits >> 16) & 0x8000u));
#endif
  std::memcpy(at, &half, sizeof(half));
}

template <class T>
MEGAPPO_INLINE Floats load(const T* at) {
  Floats x;
  for (int i = 0; i < kParts; ++i) x.part[i] = widen(at + i * kNative);
  return x;
}

template <class T>
MEGAPPO_INLINE void store(T* at, Floats x) {
  for (int i = 0; i < kParts; ++i) narrow(at + i * kNative, x.part[i]);
}

// The first `count` lanes, 1 to 15; the others are `fill`.
template <class T>
MEGAPPO_INLINE Floats load_first(const T* at, std::int64_t count, float fill) {
  T near[kLanes] = {};
  std::memcpy(near, at, static_cast<size_t>(count) * sizeof(T));
  const Floats x = load(near);
  float lane[kLanes];
  std::memcpy(lane, &x, sizeof(lane));
  for (std::int64_t i = count; i < kLanes; ++i) lane[i] = fill;
  return load(lane);
}

template <class T>
MEGAPPO_INLINE void store_first(T* at, std::int64_t count, Floats x) {
  T near[kLanes];
  store(near, x);
  std::memcpy(at, near, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace megappo::MEGAPPO_ISA
