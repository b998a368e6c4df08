// Fresh memory in large pages. The first write to a new page costs a fault, and 64 Ki faults of 4 KiB take longer than a kernel
// that writes 256 MiB; Linux maps 2 MiB at a time where it is asked to (transparent_hugepage = madvise or always).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace megappo {

// A hint about memory that is about to be written for the first time; without effect where the system has no such pages.
inline void prefer_huge_pages(void* begin, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = 2 << 20;
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(begin) + kPage - 1) / kPage * kPage;
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(begin) + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

}  // namespace megappo
