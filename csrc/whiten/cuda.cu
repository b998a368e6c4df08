#include "common/cuda.cuh"
#include "whiten/whiten.h"

namespace megappo::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void whiten_kernel(WhitenArgs a) {
  const double count = a.moments[0], total = a.moments[1], squares = a.moments[2];
  const double mean = total / fmax(count, 1.0);
  // The difference of two large numbers can come out just below 0 for constant advantages.
  const double variance = fmax((squares - total * mean) / fmax(count - 1.0, 1.0), 0.0);
  const double scale = 1.0 / sqrt(variance + kWhitenEpsilon);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; t < a.num_tokens; t += step) {
    const double white = (static_cast<double>(a.advantage[t]) - mean) * scale;
    a.out[t] = count > 1.0 && a.mask[t] ? static_cast<float>(white) : 0.0f;
  }
}

}  // namespace

void whiten(const WhitenArgs& args, Stream stream) {
  const std::int64_t wanted = (args.num_tokens + kThreads - 1) / kThreads;
  // Enough blocks to fill any GPU of today; the loop takes the rest.
  launch("whiten", whiten_kernel, dim3(static_cast<unsigned>(wanted < 2048 ? wanted : 2048)), kThreads, 0, stream, args);
}

}  // namespace megappo::cuda
