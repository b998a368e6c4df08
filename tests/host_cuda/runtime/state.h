// State of the host's CUDA device that its files share: blocks, streams, clocks. One mutex guards all of it.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace host_cuda {

constexpr int max_devices = 64;
extern std::recursive_mutex mutex;
using Guard = std::unique_lock<std::recursive_mutex>;

int num_devices();       // HOST_CUDA_DEVICES, 1 unless set
size_t device_bytes();   // HOST_CUDA_GIB, 8 unless set
int& current_device();   // of this thread
bool setting(const char* name, bool otherwise);

// The text that cudaGetErrorString gives for the last refusal of this thread.
cudaError_t refuse(cudaError_t code, std::string why);
const std::string& last_refusal();

// --- Streams. Work waits in its stream until something waits for it, as late as CUDA allows.
using Clock = std::vector<uint64_t>;  // per stream (by slot): how many of its operations are known to be over

struct Stream {
  struct Item {
    std::function<void()> run;
    Stream* awaited;     // run is empty: wait for `position` of this stream
    uint64_t position;
  };
  int slot, device, priority;
  bool blocking;         // waits for, and is awaited by, the default stream
  std::deque<Item> queue;
  uint64_t issued = 0, done = 0;
  Clock clock;           // what is known to be over when its next operation starts
};

struct Event {
  Stream* stream = nullptr;  // null until recorded
  uint64_t position = 0;
  Clock clock;
  int queries = 0;
  std::chrono::steady_clock::time_point time;
};

Stream& stream_of(cudaStream_t handle);
Stream& stream_of(int device, cudaStream_t handle);
void enqueue(Stream& stream, std::function<void()> run);
void finish(Stream& stream, uint64_t position);  // carries out what is queued up to there
void finish(Stream& stream);
void finish_device(int device);                  // and the host knows it

// --- Races. A range of memory remembers who wrote and read it last; an access that nothing orders after those is refused.
struct Range {
  uintptr_t start;
  uint64_t bytes;
  uint64_t is_write;
};

// One operation of `stream`: advances its clock, remembers its accesses. False, with the reason in last_refusal, at a race.
bool operate(Stream& stream, const char* what, const Range* ranges, int num_ranges);
void host_waited_for(const Clock& clock);  // all that is issued from now on comes after
void merge(Clock& into, const Clock& other);
void forget_range(uintptr_t start, uint64_t bytes);

// --- Memory.
struct Block {
  size_t bytes;
  int device;  // below 0: page-locked memory of the host
  int owner;   // the device in whose counters it is
  bool ours;   // false: registered, not allocated
};
const Block* block_of(const void* pointer, uintptr_t* start = nullptr);

// --- Counters, as host_cuda_counter reads them.
enum Counter { allocated, peak, allocations, pinned, pinned_peak, copies, copied, async_copies, async_copied, refused, waits, counters };
extern int64_t counted[max_devices][counters];

}  // namespace host_cuda
