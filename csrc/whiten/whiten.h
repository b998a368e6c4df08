// Whitening of advantages with given global moments; see megappo/ops/whiten.py.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/stream.h"

namespace megappo {

struct WhitenArgs {
  const float* advantage;  // [num_tokens]
  const bool* mask;        // [num_tokens]
  const double* moments;   // [3] count, sum, sum of squares
  float* out;              // [num_tokens]
  std::int64_t num_tokens;
};

// Added to the variance, so that constant advantages become 0 and not noise divided by noise.
constexpr double kWhitenEpsilon = 1e-8;

MEGAPPO_CPU_KERNEL(whiten_tokens, const WhitenArgs&, std::int64_t begin, std::int64_t end)
namespace cuda {
void whiten(const WhitenArgs&, Stream);
}

}  // namespace megappo
