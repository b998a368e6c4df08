// Instruction sets of the CPU kernels. Every csrc/*/cpu.cpp is compiled once for each of them, with MEGAPPO_ISA set to the name of
// the namespace its functions go to; the process picks one when the library is loaded. A build therefore runs on every machine of
// a cluster, whichever machine built it.
#pragma once

namespace megappo {

#if defined(__x86_64__)
#define MEGAPPO_X86 1
#endif

// The set in use: "avx512", "avx2" or "baseline". The environment variable MEGAPPO_CPU_ISA asks for a lesser one.
const char* cpu_isa();

// Declares `name` in the namespace of every instruction set and `pick_name()`, which returns the one to call.
#ifdef MEGAPPO_X86
#define MEGAPPO_CPU_KERNEL(name, ...)              \
  namespace baseline { void name(__VA_ARGS__); }   \
  namespace avx2 { void name(__VA_ARGS__); }       \
  namespace avx512 { void name(__VA_ARGS__); }     \
  inline auto pick_##name() {                      \
    const char first = cpu_isa()[3];               \
    return first == '5' ? &avx512::name : first == '2' ? &avx2::name : &baseline::name; \
  }
#else
#define MEGAPPO_CPU_KERNEL(name, ...)            \
  namespace baseline { void name(__VA_ARGS__); } \
  inline auto pick_##name() { return &baseline::name; }
#endif

}  // namespace megappo
