// Happens-before, by vector clocks: a write must come after all that used the memory, a read after its last write.
#include "state.h"

#include <set>

namespace host_cuda {
namespace {

struct Access {
  int slot = -1;
  uint64_t tick = 0;
  const char* what = "";
};
struct Segment {
  uintptr_t end;
  Access writer;
  std::vector<Access> readers;  // one per stream
};

std::map<uintptr_t, Segment> segments;
Clock host;  // what the host has waited for
bool watched = setting("HOST_CUDA_RACES", true);

const char* lasting(const char* what) {
  static std::set<std::string> names;
  return names.insert(what).first->c_str();
}

bool is_over(const Access& access, const Clock& clock) {
  return access.slot < 0 || (access.slot < static_cast<int>(clock.size()) && clock[access.slot] >= access.tick);
}

// A segment ends at `at`, where there is one around it.
void cut(uintptr_t at) {
  auto next = segments.upper_bound(at);
  if (next == segments.begin()) return;
  --next;
  if (next->first == at || next->second.end <= at) return;
  Segment rest = next->second;
  next->second.end = at;
  segments.emplace(at, std::move(rest));
}

std::string race(const Stream& stream, const char* what, const Range& range, const Access& earlier, bool wrote) {
  return std::string("race: ") + what + " on stream " + std::to_string(stream.slot) + (range.is_write ? " writes " : " reads ") +
         std::to_string(range.bytes) + " bytes that " + earlier.what + " on stream " + std::to_string(earlier.slot) +
         (wrote ? " writes" : " reads") + ", and nothing makes the one wait for the other";
}

bool check(const Stream& stream, const char* what, const Range& range, const Segment& segment) {
  if (!is_over(segment.writer, stream.clock)) {
    refuse(cudaSuccess, race(stream, what, range, segment.writer, true));
    return false;
  }
  for (const Access& reader : segment.readers)
    if (range.is_write && !is_over(reader, stream.clock)) {
      refuse(cudaSuccess, race(stream, what, range, reader, false));
      return false;
    }
  return true;
}

bool access(const Stream& stream, const char* what, const Range& range, const Access& now) {
  const uintptr_t end = range.start + range.bytes;
  cut(range.start);
  cut(end);
  auto first = segments.lower_bound(range.start);
  for (auto at = first; at != segments.end() && at->first < end; ++at)
    if (!check(stream, what, range, at->second)) return false;
  if (range.is_write) {
    while (first != segments.end() && first->first < end) first = segments.erase(first);
    segments.emplace(range.start, Segment{end, now, {}});
    return true;
  }
  for (; first != segments.end() && first->first < end; ++first) {
    auto& readers = first->second.readers;
    bool known = false;
    for (Access& reader : readers)
      if (reader.slot == now.slot) reader = now, known = true;
    if (!known) readers.push_back(now);
  }
  return true;
}

}  // namespace

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i)
    if (into[i] < other[i]) into[i] = other[i];
}

void host_waited_for(const Clock& clock) {
  Guard guard(mutex);
  merge(host, clock);
}

void forget_range(uintptr_t start, uint64_t bytes) {
  cut(start);
  cut(start + bytes);
  segments.erase(segments.lower_bound(start), segments.lower_bound(start + bytes));
}

bool operate(Stream& stream, const char* what, const Range* ranges, int num_ranges) {
  merge(stream.clock, host);
  if (static_cast<int>(stream.clock.size()) <= stream.slot) stream.clock.resize(stream.slot + 1);
  const Access now{stream.slot, ++stream.clock[stream.slot], lasting(what)};
  if (!watched) return true;
  for (int i = 0; i < num_ranges; ++i)
    // Pageable memory of the host is nobody's but the host's.
    if (ranges[i].bytes && block_of(reinterpret_cast<void*>(ranges[i].start)))
      if (!access(stream, what, ranges[i], now)) return false;
  return true;
}

}  // namespace host_cuda

// 1: races are refused, 0: they are let through, and give the numbers of late copies. Returns what it was.
extern "C" int host_cuda_watch_races(int wanted) {
  host_cuda::Guard guard(host_cuda::mutex);
  const int before = host_cuda::watched;
  host_cuda::watched = wanted;
  return before;
}
