#include <algorithm>
#include <cmath>

#include "whiten/whiten.h"

namespace megappo::MEGAPPO_ISA {

void whiten_tokens(const WhitenArgs& a, std::int64_t begin, std::int64_t end) {
  const double count = a.moments[0], total = a.moments[1], squares = a.moments[2];
  const double mean = total / std::max(count, 1.0);
  // The difference of two large numbers can come out just below 0 for constant advantages.
  const double variance = std::max((squares - total * mean) / std::max(count - 1.0, 1.0), 0.0);
  const double scale = 1.0 / std::sqrt(variance + kWhitenEpsilon);
  const bool enough = count > 1.0;
  for (std::int64_t t = begin; t < end; ++t) {
    const double white = (static_cast<double>(a.advantage[t]) - mean) * scale;
    a.out[t] = enough && a.mask[t] ? static_cast<float>(white) : 0.0f;
  }
}

}  // namespace megappo::MEGAPPO_ISA
