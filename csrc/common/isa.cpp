#include "common/isa.h"

#include <cstdlib>
#include <cstring>

namespace megappo {
namespace {

int supported_level() {
#ifdef MEGAPPO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

const char* choose() {
  constexpr const char* names[] = {"baseline", "avx2", "avx512"};
  int level = supported_level();
  if (const char* wanted = std::getenv("MEGAPPO_CPU_ISA")) {
    for (int lesser = 0; lesser < level; ++lesser) {
      if (std::strcmp(wanted, names[lesser]) == 0) level = lesser;
    }
  }
  return names[level];
}

}  // namespace

const char* cpu_isa() {
  static const char* const chosen = choose();
  return chosen;
}

}  // namespace megappo
