// The cap of log-ratios, of which ratios and KL estimates are exponentials; megappo/algo/kl.py has the same number.
#pragma once

namespace megappo {

// exp(20) = 4.9e8: beyond this log-ratio k3 and the ratios of PPO are capped, so that one token cannot turn the batch into inf.
constexpr float kMaxLogRatio = 20.0f;  // exact in fp32, so fp64 kernels read the same number

}  // namespace megappo
