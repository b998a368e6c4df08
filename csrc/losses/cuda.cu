// Both losses are bound by memory: 16 bytes read and 4 written for each token. A thread takes 4 tokens of each array with one
// 16-byte load, so a block has 16 KiB in flight; four blocks fit an SM (60 registers), which is more than twice the 23 KiB that
// hide the latency of an H200's memory (4.3 TB/s * 0.7 us / 132). Larger batches loop. Sums are fp64, at half the rate of fp32 on
// sm_80 and sm_90 hidden behind the memory, in an order that depends on num_tokens alone: thread, warp, block, then a second kernel of
// one block. No atomics, nothing to zero before, nothing left over after: a captured graph can replay it.
#include "common/cuda.cuh"
#include "losses/losses.h"

namespace megappo::cuda {
namespace {

constexpr int kThreads = 256, kPerThread = 4;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kBlockTokens = kThreads * kPerThread;
#ifdef MEGAPPO_CUDA_ON_CPU
constexpr std::int64_t kMaxBlocks = 3;  // so that the tests' batches are long enough for blocks to loop
#else
// Twice what an H200 holds at once; more would only leave more partial results to add.
constexpr std::int64_t kMaxBlocks = 1024;
#endif

struct Four {
  float x[kPerThread];
};

// Tokens from `at` on, 0 beyond `count` (so weight 0). `aligned` is the same for all threads.
__device__ inline Four load(const float* from, std::int64_t at, std::int64_t count, bool aligned) {
  if (aligned && count >= kPerThread) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(from + at));
    return {{v.x, v.y, v.z, v.w}};
  }
  Four v{};
  for (int i = 0; i < kPerThread; ++i) {
    if (i < count) v.x[i] = from[at + i];
  }
  return v;
}

__device__ inline void store(float* to, const Four& v, std::int64_t at, std::int64_t count, bool aligned) {
  if (aligned && count >= kPerThread) {
    *reinterpret_cast<float4*>(to + at) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    return;
  }
  for (int i = 0; i < kPerThread; ++i) {
    if (i < count) to[at + i] = v.x[i];
  }
}

// warp_max lets go of a NaN.
__device__ inline double warp_nan_max(double x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = nan_max(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Adds `results` (the last one: maximum) over the block; thread i < kResults returns the i-th. `scratch` [kWarps * kResults].
template <int kResults>
__device__ inline double reduce(double (&results)[kResults], double* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    const double x = i + 1 < kResults ? warp_sum(results[i]) : warp_nan_max(results[i]);
    if (lane == 0) scratch[warp * kResults + i] = x;
  }
  __syncthreads();
  double x = 0.0;
  if (threadIdx.x < kResults) {
    for (int w = 0; w < kWarps; ++w) {
      const double other = scratch[w * kResults + threadIdx.x];
      x = threadIdx.x + 1 < kResults ? x + other : nan_max(x, other);
    }
  }
  return x;
}

template <class Rule>
constexpr int kResultsOf = Rule::kCounts + Rule::kValues + 2;

template <class Rule>
__global__ __launch_bounds__(kThreads) void loss_kernel(LossArgs args, Rule rule, bool aligned) {
  constexpr int kResults = kResultsOf<Rule>;
  __shared__ double scratch[kWarps * kResults];
  float counts[Rule::kCounts] = {};
  double results[kResults] = {};
  float most = 0.0f;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kBlockTokens;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kBlockTokens + threadIdx.x * kPerThread;
  for (std::int64_t at = first; at < args.num_tokens; at += step) {
    const std::int64_t count = args.num_tokens - at;
    const Four a = load(args.a, at, count, aligned), b = load(args.b, at, count, aligned);
    const Four c = load(args.c, at, count, aligned), weight = load(args.weight, at, count, aligned);
    Four gradient;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const auto token = rule(a.x[i], b.x[i], c.x[i], weight.x[i]);
      gradient.x[i] = token.gradient;
      for (int k = 0; k < Rule::kCounts; ++k) counts[k] += token.counts[k];
      for (int k = 0; k < Rule::kValues; ++k) results[Rule::kCounts + k] += static_cast<double>(token.values[k]);
      results[kResults - 2] += static_cast<double>(token.loss);
      most = nan_max(most, token.maximum);
    }
    store(args.gradient, gradient, at, count, aligned);
  }
  for (int k = 0; k < Rule::kCounts; ++k) results[k] = counts[k];
  results[kResults - 1] = most;
  const double mine = reduce(results, scratch);
  if (threadIdx.x < kResults) args.partials[threadIdx.x * args.num_blocks + blockIdx.x] = mine;
}

template <class Rule>
__global__ __launch_bounds__(kThreads) void total_kernel(LossArgs args) {
  constexpr int kResults = kResultsOf<Rule>, kSums = kResults - 2;
  __shared__ double scratch[kWarps * kResults];
  double results[kResults] = {};
  for (std::int64_t block = threadIdx.x; block < args.num_blocks; block += kThreads) {
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      const double x = args.partials[i * args.num_blocks + block];
      results[i] = i + 1 < kResults ? results[i] + x : nan_max(results[i], x);
    }
  }
  const double mine = reduce(results, scratch);
  if (threadIdx.x < kSums) args.sums[threadIdx.x] = mine;
  if (threadIdx.x == kSums) *args.loss = static_cast<float>(mine);
  if (threadIdx.x == kSums + 1) *args.maximum = mine;
}

bool is_aligned(const LossArgs& args) {
  std::uintptr_t bits = 0;
  for (const void* at : {args.a, args.b, args.c, args.weight, static_cast<const float*>(args.gradient)}) {
    bits |= reinterpret_cast<std::uintptr_t>(at);
  }
  return bits % sizeof(float4) == 0;
}

template <class Rule>
void run(const char* name, const LossArgs& args, const Rule& rule, Stream stream) {
  const dim3 blocks(static_cast<unsigned>(args.num_blocks));
  launch(name, loss_kernel<Rule>, blocks, kThreads, 0, stream, args, rule, is_aligned(args));
  launch(name, total_kernel<Rule>, dim3(1), kThreads, 0, stream, args);
}

}  // namespace

std::int64_t loss_blocks(std::int64_t num_tokens) {
  const std::int64_t wanted = (num_tokens + kBlockTokens - 1) / kBlockTokens;
  return wanted < kMaxBlocks ? wanted : kMaxBlocks;
}

void policy_loss(const LossArgs& args, const PolicyRule& rule, Stream stream) { run("policy_loss", args, rule, stream); }

void value_loss(const LossArgs& args, const ValueRule& rule, Stream stream) { run("value_loss", args, rule, stream); }

}  // namespace megappo::cuda
