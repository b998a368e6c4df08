// Streams and events. A copy waits in its stream's queue until a wait, or an operation that follows it there, needs it.
#include "state.h"

#include <cstring>
#include <memory>
#include <unordered_map>

namespace host_cuda {

static std::vector<std::unique_ptr<Stream>> streams;
static Stream* default_streams[max_devices];
// Handles are given back by CUDA to whoever polls: so many polls are answered with "not ready" before the work is done.
constexpr int patience = 200;

static Stream* make_stream(int device, bool blocking, int priority) {
  Guard guard(mutex);
  auto* stream = new Stream{static_cast<int>(streams.size()), device, priority, blocking, {}, 0, 0, {}};
  streams.emplace_back(stream);
  return stream;
}

Stream& stream_of(int device, cudaStream_t handle) {
  // 0, cudaStreamLegacy and cudaStreamPerThread
  if (reinterpret_cast<uintptr_t>(handle) > 2) return *reinterpret_cast<Stream*>(handle);
  Guard guard(mutex);
  if (!default_streams[device]) default_streams[device] = make_stream(device, false, 0);
  return *default_streams[device];
}

Stream& stream_of(cudaStream_t handle) { return stream_of(current_device(), handle); }

// The default stream and the streams made without cudaStreamNonBlocking follow one another.
static void wait_for_default(Stream& stream) {
  Stream* legacy = default_streams[stream.device];
  if (!legacy) return;
  for (auto& other : streams)
    if (other->device == stream.device && other.get() != &stream && other->blocking && (&stream == legacy)) {
      finish(*other);
      merge(stream.clock, other->clock);
    }
  if (stream.blocking) {
    finish(*legacy);
    merge(stream.clock, legacy->clock);
  }
}

void enqueue(Stream& stream, std::function<void()> run) {
  stream.queue.push_back({std::move(run), nullptr, 0});
  ++stream.issued;
}

void finish(Stream& stream, uint64_t position) {
  Guard guard(mutex);
  while (stream.done < position && !stream.queue.empty()) {
    Stream::Item item = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (item.run)
      item.run();
    else
      finish(*item.awaited, item.position);
    ++stream.done;
  }
}

void finish(Stream& stream) { finish(stream, stream.issued); }

void finish_device(int device) {
  Guard guard(mutex);
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i]->device == device) {
      finish(*streams[i]);
      host_waited_for(streams[i]->clock);
    }
}

static void (*watcher)() = nullptr;

// A wait of the host. Before the mutex is taken: the watcher takes Python's lock.
static void notice_wait(int device) {
  {
    Guard guard(mutex);
    ++counted[device][waits];
  }
  if (watcher) watcher();
}

static cudaError_t synchronize(Stream& stream) {
  Guard guard(mutex);
  wait_for_default(stream);
  finish(stream);
  host_waited_for(stream.clock);
  return cudaSuccess;
}

static cudaError_t synchronize(const Event& event) {
  Guard guard(mutex);
  if (!event.stream) return cudaSuccess;
  finish(*event.stream, event.position);
  host_waited_for(event.clock);
  return cudaSuccess;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, Stream& stream, bool may_wait) {
  if (!bytes) return cudaSuccess;
  Guard guard(mutex);
  wait_for_default(stream);
  const Block *target = block_of(to), *source = block_of(from);
  const Range ranges[] = {{reinterpret_cast<uintptr_t>(to), bytes, 1}, {reinterpret_cast<uintptr_t>(from), bytes, 0}};
  if (!operate(stream, "copy", ranges, 2)) return refuse(cudaErrorIllegalState, last_refusal());
  int64_t* count = counted[stream.device];
  ++count[copies];
  count[copied] += bytes;
  // The driver takes pageable memory through buffers of its own, at once.
  if (may_wait && target && source) {
    ++count[async_copies];
    count[async_copied] += bytes;
    enqueue(stream, [=] { memmove(to, from, bytes); });
    return cudaSuccess;
  }
  finish(stream);
  memmove(to, from, bytes);
  if (!target || target->device < 0) host_waited_for(stream.clock);
  return cudaSuccess;
}

}  // namespace host_cuda

using namespace host_cuda;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  *out = reinterpret_cast<cudaStream_t>(make_stream(current_device(), !(flags & cudaStreamNonBlocking), priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  finish(stream_of(handle));  // CUDA lets the work run to its end; the object stays, for events name it
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return refuse(cudaErrorNotSupported, "CUDA graphs do not exist on this device");
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream& stream = stream_of(handle);
  notice_wait(stream.device);
  return synchronize(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  static std::unordered_map<Stream*, int> asked;
  Guard guard(mutex);
  Stream& stream = stream_of(handle);
  if (stream.done < stream.issued && ++asked[&stream] < patience) return cudaErrorNotReady;
  asked.erase(&stream);
  return synchronize(stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Guard guard(mutex);
  Stream& stream = stream_of(handle);
  const auto* awaited = reinterpret_cast<Event*>(event);
  if (!awaited->stream) return cudaSuccess;  // as on a GPU: an event that was not recorded holds nobody up
  merge(stream.clock, awaited->clock);
  if (awaited->stream != &stream) {
    stream.queue.push_back({{}, awaited->stream, awaited->position});
    ++stream.issued;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  notice_wait(current_device());
  finish_device(current_device());
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Guard guard(mutex);
  enqueue(stream_of(handle), [=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  Guard guard(mutex);
  enqueue(stream_of(handle), [=] { function(handle, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  Guard guard(mutex);
  Stream& stream = stream_of(handle);
  wait_for_default(stream);
  operate(stream, "event", nullptr, 0);
  *reinterpret_cast<Event*>(event) = {&stream, stream.issued, stream.clock, 0, std::chrono::steady_clock::now()};
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) { return cudaEventRecordWithFlags(event, handle, 0); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto* awaited = reinterpret_cast<Event*>(event);
  if (awaited->stream) notice_wait(awaited->stream->device);
  return synchronize(*awaited);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard guard(mutex);
  auto* asked = reinterpret_cast<Event*>(event);
  if (asked->stream && asked->stream->done < asked->position && ++asked->queries < patience) return cudaErrorNotReady;
  return synchronize(*asked);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  const auto *first = reinterpret_cast<Event*>(from), *last = reinterpret_cast<Event*>(to);
  if (!first->stream || !last->stream) return refuse(cudaErrorInvalidResourceHandle, "an event was not recorded");
  *ms = std::chrono::duration<float, std::milli>(last->time - first->time).count();  // of the host's calls
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  Stream& stream = stream_of(nullptr);
  notice_wait(stream.device);
  Guard guard(mutex);
  const cudaError_t result = copy(to, from, bytes, stream, false);
  host_waited_for(stream.clock);
  return result;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream_of(stream), true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream_of(stream), true);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t result = copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                                    width, stream_of(stream), true);
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t handle) {
  Guard guard(mutex);
  Stream& stream = stream_of(handle);
  wait_for_default(stream);
  const Range range{reinterpret_cast<uintptr_t>(pointer), bytes, 1};
  if (!operate(stream, "memset", &range, 1)) return refuse(cudaErrorIllegalState, last_refusal());
  enqueue(stream, [=] { memset(pointer, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  const cudaError_t result = cudaMemsetAsync(pointer, value, bytes, nullptr);
  finish(stream_of(nullptr));
  return result;
}

// Called before a kernel computes on the host: the stream catches up, and the kernel's accesses are remembered.
// 0, or 1 with the reason in host_cuda_reason.
int host_cuda_begin(int device, void* handle, const char* what, const Range* ranges, int num_ranges) {
  Guard guard(mutex);
  Stream& stream = stream_of(device, static_cast<cudaStream_t>(handle));
  wait_for_default(stream);
  finish(stream);
  return operate(stream, what, ranges, num_ranges) ? 0 : 1;
}
// A copy whose source the caller keeps until the stream is through: the end of a collective.
int host_cuda_queue_copy(int device, void* handle, void* to, const void* from, uint64_t bytes) {
  Guard guard(mutex);
  Stream& stream = stream_of(device, static_cast<cudaStream_t>(handle));
  const Range range{reinterpret_cast<uintptr_t>(to), bytes, 1};
  if (!operate(stream, "collective", &range, 1)) return 1;
  const std::string kept(static_cast<const char*>(from), bytes);
  enqueue(stream, [=] { memcpy(to, kept.data(), bytes); });
  return 0;
}
// The host waits for a stream: what a kernel does whose result the host reads.
void host_cuda_wait(int device, void* handle) {
  notice_wait(device);
  Guard guard(mutex);
  Stream& stream = stream_of(device, static_cast<cudaStream_t>(handle));
  finish(stream);
  host_waited_for(stream.clock);
}
// `run` is called before each wait of the host, null: no more.
void host_cuda_watch_waits(void (*run)()) { watcher = run; }
const char* host_cuda_reason() { return last_refusal().c_str(); }

}  // extern "C"
