// Device memory is the host's, filled with 0x7f so that reading what nobody wrote gives enormous numbers.
#include "state.h"

#include <cstdlib>
#include <cstring>

namespace host_cuda {

std::recursive_mutex mutex;
int64_t counted[max_devices][counters];
static std::map<uintptr_t, Block> blocks;

const Block* block_of(const void* pointer, uintptr_t* start) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  --next;
  if (at >= next->first + next->second.bytes) return nullptr;
  if (start) *start = next->first;
  return &next->second;
}

static cudaError_t take(void** out, size_t bytes, int device) {
  Guard guard(mutex);
  const bool is_pinned = device < 0;
  const int owner = is_pinned ? current_device() : device;
  int64_t* count = counted[owner];
  *out = nullptr;
  if (!is_pinned && count[allocated] + bytes > device_bytes())
    return refuse(cudaErrorMemoryAllocation, "out of memory");
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return refuse(cudaErrorMemoryAllocation, "the host is out of memory");
  memset(*out, 0x7f, bytes);
  blocks[reinterpret_cast<uintptr_t>(*out)] = {bytes, device, owner, true};
  const Counter now = is_pinned ? pinned : allocated, most = is_pinned ? pinned_peak : peak;
  count[now] += bytes;
  if (count[now] > count[most]) count[most] = count[now];
  count[allocations] += !is_pinned;
  return cudaSuccess;
}

static cudaError_t give_back(void* pointer) {
  if (!pointer) return cudaSuccess;
  Guard guard(mutex);
  const auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks.end()) return refuse(cudaErrorInvalidValue, "freed memory that was not allocated");
  const Block block = found->second;
  // As a real cudaFree: it waits for all that runs on the device.
  finish_device(block.owner);
  forget_range(found->first, block.bytes);
  blocks.erase(reinterpret_cast<uintptr_t>(pointer));
  if (!block.ours) return cudaSuccess;
  counted[block.owner][block.device < 0 ? pinned : allocated] -= block.bytes;
  free(pointer);
  return cudaSuccess;
}

}  // namespace host_cuda

using namespace host_cuda;

extern "C" {

cudaError_t cudaMalloc(void** out, size_t bytes) { return take(out, bytes, current_device()); }
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return take(out, bytes, current_device()); }
cudaError_t cudaFree(void* pointer) { return give_back(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return give_back(pointer); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return take(out, bytes, -1); }
cudaError_t cudaMallocHost(void** out, size_t bytes) { return take(out, bytes, -1); }
cudaError_t cudaFreeHost(void* pointer) { return give_back(pointer); }

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Guard guard(mutex);
  blocks[reinterpret_cast<uintptr_t>(pointer)] = {bytes, -1, current_device(), false};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) { return give_back(pointer); }
cudaError_t cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  *out = pointer;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  Guard guard(mutex);
  *total = device_bytes();
  *unused = *total - counted[current_device()][allocated];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  Guard guard(mutex);
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeUnregistered;
  const Block* block = block_of(pointer);
  if (!block) return cudaSuccess;
  out->type = block->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->device = block->device < 0 ? current_device() : block->device;
  out->devicePointer = out->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// For whoever measures, by ctypes.
int64_t host_cuda_counter(int device, int counter) {
  Guard guard(mutex);
  return counted[device][counter];
}
void host_cuda_reset_peak(int device) {
  Guard guard(mutex);
  counted[device][peak] = counted[device][allocated];
  counted[device][pinned_peak] = counted[device][pinned];
}
// Sizes of the live blocks of a device (-1: page-locked memory); returns how many there are, which may be more than `room`.
int host_cuda_blocks(int device, int64_t* sizes, int room) {
  Guard guard(mutex);
  int found = 0;
  for (const auto& [start, block] : blocks)
    if (block.device == device && block.ours && found++ < room) sizes[found - 1] = block.bytes;
  return found;
}

}  // extern "C"
