// A CUDA driver without a GPU: device memory is host memory, a stream is a queue with a thread of
// its own, so what no event orders really happens in any order.
//
// FAKE_NVSWITCH=1   the devices reach each other through one
//
// Streams that are not its own belong to the fake device of torch (tests/fake_cuda), which enqueues
// for them. Nothing is ever destroyed but queues that ended: threads may run until the process
// ends.
//
// The file is long because streams, events, captures and graphs share one state under one lock.

#include "cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

// Buffers without elements may be null.
void move_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) {
    std::memmove(to, from, bytes);
  }
}

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kMulticastSupported = 132;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureIsolation = 905;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kCaptureImplicit = 906;
// Handles of devices are not what the process counts.
constexpr int kFirstDevice = 40;
constexpr long kNotCaptured = -1;

using Job = std::function<void()>;

std::atomic<int> longest_delay_us{0};
std::atomic<int> faults{0};
std::atomic<int> blocks{0};
std::atomic<long> limit_bytes{std::numeric_limits<long>::max()};
std::atomic<long> used_bytes{0};
std::atomic<bool> queries_wait{false};
const pid_t owner = ::getpid();
thread_local void* current_context = nullptr;
thread_local int capture_mode = 0;

class Queue {
 public:
  Queue() : thread_([this] { serve(); }) {}

  void post(Job job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return jobs_.empty() && !is_busy_;
  }
  // What was posted is still done.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
      changed_.notify_all();
    }
    thread_.detach();
  }

 private:
  void serve() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 6));
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !jobs_.empty() || is_closed_; });
      if (jobs_.empty()) {
        return;
      }
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      is_busy_ = true;
      lock.unlock();
      if (const int longest = longest_delay_us.load(); longest > 0) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(random() % static_cast<unsigned>(longest)));
      }
      job();
      lock.lock();
      is_busy_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool is_busy_ = false;
  bool is_closed_ = false;
  std::thread thread_;
};

// A point in a stream's work; what waits for it holds it.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_passed = false;

  void pass() {
    const std::lock_guard lock(mutex);
    is_passed = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return is_passed; });
  }
};

struct Event {
  void* context = nullptr;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
  long captured_point = kNotCaptured;
};

struct Node {
  Job job;  // none for an event
  std::vector<std::size_t> after;
};

struct Capture {
  static constexpr long kMostNodes = 1'000'000;

  std::uint64_t id = 0;
  void* origin = nullptr;
  std::map<void*, std::vector<std::size_t>> ends;  // of each stream: its next node comes after them
  std::vector<Node> nodes;
  bool is_broken = false;

  // Returns the node's name among those of all captures.
  long add(void* stream, Job job) {
    std::vector<std::size_t>& end = ends[stream];
    nodes.push_back({std::move(job), end});
    end = {nodes.size() - 1};
    return static_cast<long>(id) * kMostNodes + static_cast<long>(end[0]);
  }

  [[nodiscard]] bool has(long node) const { return node / kMostNodes == static_cast<long>(id); }

  // Whether the stream that began it waits for all that is in it.
  [[nodiscard]] bool is_joined() const {
    std::vector<bool> is_awaited(nodes.size());
    for (const std::size_t last : ends.at(origin)) {
      is_awaited[last] = true;
    }
    for (std::size_t i = nodes.size(); i-- > 0;) {
      if (!is_awaited[i] && nodes[i].job != nullptr) {
        return false;
      }
      for (const std::size_t earlier : nodes[i].after) {
        is_awaited[earlier] = is_awaited[earlier] || is_awaited[i];
      }
    }
    return true;
  }

  [[nodiscard]] std::vector<Job> jobs_in_another_order() const {
    std::vector<std::size_t> missing(nodes.size());
    std::vector<std::vector<std::size_t>> before(nodes.size());
    std::priority_queue<std::size_t> ready;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      missing[i] = nodes[i].after.size();
      if (missing[i] == 0) {
        ready.push(i);
      }
      for (const std::size_t earlier : nodes[i].after) {
        before[earlier].push_back(i);
      }
    }
    std::vector<Job> jobs;
    while (!ready.empty()) {
      const std::size_t next = ready.top();
      ready.pop();
      if (nodes[next].job != nullptr) {
        jobs.push_back(nodes[next].job);
      }
      for (const std::size_t later : before[next]) {
        if (--missing[later] == 0) {
          ready.push(later);
        }
      }
    }
    return jobs;
  }
};

struct State {
  std::set<void*> foreign;  // streams of torch's fake device
  std::mutex mutex;
  std::map<void*, void*> streams;  // with their contexts
  std::set<void*> events;
  std::map<void*, long> memory;  // with the bytes
  std::set<void*> contexts;
  std::vector<std::unique_ptr<Capture>> captures;  // under way, in the order of their beginnings
  std::uint64_t captures_begun = 0;
  std::unique_ptr<Queue> legacy;
  std::vector<void*> kept;  // queues, which are never destroyed
  std::set<Capture*> graphs;
};

State& state() {
  static auto* const the_state = new State;
  return *the_state;
}

// Under the lock.
Capture* capture_of(void* stream) {
  for (const auto& each : state().captures) {
    if (each->ends.count(stream) != 0) {
      return each.get();
    }
  }
  return nullptr;
}

bool is_captured(void* stream) {
  const std::lock_guard lock(state().mutex);
  return capture_of(stream) != nullptr;
}

// What an event is to remember of the stream.
long captured_point(void* stream) {
  const std::lock_guard lock(state().mutex);
  Capture* const capture = capture_of(stream);
  return capture != nullptr ? capture->add(stream, nullptr) : kNotCaptured;
}

// Whether it was, because the stream is captured.
bool record(void* stream, const Job& job) {
  const std::lock_guard lock(state().mutex);
  Capture* const capture = capture_of(stream);
  if (capture != nullptr) {
    capture->add(stream, job);
  }
  return capture != nullptr;
}

// Under the lock.
int break_captures() {
  for (const auto& each : state().captures) {
    each->is_broken = true;
  }
  return kCaptureUnsupported;
}

bool permits_unsafe_call() {
  const std::lock_guard lock(state().mutex);
  if (state().captures.empty() || capture_mode == kCaptureModeRelaxed) {
    return true;
  }
  break_captures();
  return false;
}

// Whether it has been made, and not destroyed.
bool is_event(void* handle) {
  const std::lock_guard lock(state().mutex);
  return state().events.count(handle) != 0;
}

void post(void* stream, const Job& job) {
  if (record(stream, job)) {
    return;
  }
  Queue* queue = nullptr;
  {
    const std::lock_guard lock(state().mutex);
    if (state().streams.count(stream) != 0) {
      queue = static_cast<Queue*>(stream);
    }
  }
  if (queue != nullptr) {
    queue->post(job);
    return;
  }
  using Enqueue = void (*)(void*, void (*)(void*), void*);
  static const auto foreign = reinterpret_cast<Enqueue>(::dlsym(RTLD_DEFAULT, "fake_cuda_enqueue"));
  if (foreign != nullptr) {
    {
      const std::lock_guard lock(state().mutex);
      state().foreign.insert(stream);
    }
    foreign(
        stream,
        [](void* argument) {
          const std::unique_ptr<Job> owned(static_cast<Job*>(argument));
          (*owned)();
        },
        new Job(job));
    return;
  }
  const std::lock_guard lock(state().mutex);
  if (state().legacy == nullptr) {
    state().legacy = std::make_unique<Queue>();
  }
  state().legacy->post(job);
}

int device_count() {
  const char* const count = std::getenv("FAKE_CUDA_DEVICES");
  return count == nullptr ? 8 : std::atoi(count);
}

// Calls that need a context fail without one, as the driver's do.
bool has_context() {
  if (current_context == nullptr) {
    ++faults;
  }
  return current_context != nullptr;
}

// In a forked child a driver may wait for threads of the parent's.
void require_own_process() {
  if (::getpid() != owner) {
    ::_exit(99);
  }
}

}  // namespace

extern "C" {

void fake_driver_enqueue(void* stream, const Job* job) { post(stream, *job); }
void fake_driver_delay_us(int longest) { longest_delay_us = longest; }
int fake_driver_faults() { return faults.load(); }

void fake_driver_begin_capture(void* stream) {
  const std::lock_guard lock(state().mutex);
  Capture& capture = *state().captures.emplace_back(std::make_unique<Capture>());
  capture.id = ++state().captures_begun;
  capture.origin = stream;
  capture.ends[stream] = {};
}

int fake_driver_is_captured(void* stream) { return is_captured(stream) ? 1 : 0; }

int fake_driver_is_broken(void* stream) {
  const std::lock_guard lock(state().mutex);
  const Capture* const capture = capture_of(stream);
  return capture != nullptr && capture->is_broken ? 1 : 0;
}

long fake_driver_captured_point(void* stream) { return captured_point(stream); }

int fake_driver_join_capture(void* stream, long point) {
  const std::lock_guard lock(state().mutex);
  for (const auto& each : state().captures) {
    Capture* const other = capture_of(stream);
    if (each->has(point) && (other == nullptr || other == each.get())) {
      each->ends[stream].push_back(static_cast<std::size_t>(point % Capture::kMostNodes));
      return 1;
    }
  }
  return 0;
}

void* fake_driver_end_capture(void* stream) {
  Capture* capture = nullptr;
  {
    const std::lock_guard lock(state().mutex);
    auto& captures = state().captures;
    const auto found = std::find_if(captures.begin(), captures.end(),
                                    [&](const auto& each) { return each->origin == stream; });
    capture = found->release();
    captures.erase(found);
    state().graphs.insert(capture);
  }
  if (capture->is_broken || !capture->is_joined()) {
    fake_driver_destroy_graph(capture);
    return nullptr;
  }
  return capture;
}

int fake_driver_contexts() {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().contexts.size());
}

const void* fake_driver_current_context() { return current_context; }

const void* fake_driver_context_of(void* stream) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().streams.find(stream);
  return found == state().streams.end() ? nullptr : found->second;
}

int fake_driver_permits_unsafe_call() { return permits_unsafe_call() ? 1 : 0; }

const void* fake_driver_capture() {
  const std::lock_guard lock(state().mutex);
  return state().captures.empty() ? nullptr : state().captures.front().get();
}

int fake_driver_record(void* stream, const Job* job) { return record(stream, *job) ? 1 : 0; }

void fake_driver_destroy_graph(void* handle) {
  auto* const graph = static_cast<Capture*>(handle);
  {
    const std::lock_guard lock(state().mutex);
    state().graphs.erase(graph);
  }
  delete graph;
}

void fake_driver_queries_wait(bool wait) { queries_wait = wait; }
int fake_driver_blocks() { return blocks.load(); }
void fake_driver_limit_memory(std::size_t bytes) { limit_bytes = static_cast<long>(bytes); }
int fake_driver_reserve(long bytes) {
  if ((used_bytes += bytes) > limit_bytes && bytes > 0) {
    used_bytes -= bytes;
    return 0;
  }
  return 1;
}

void fake_driver_replay(void* graph, void* stream) {
  for (const Job& job : static_cast<Capture*>(graph)->jobs_in_another_order()) {
    post(stream, job);
  }
}

int cuInit(unsigned) { return device_count() > 0 ? kSuccess : 100; }

int cuDeviceGetCount(int* count) {
  *count = device_count();
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = kFirstDevice + ordinal;
  return ordinal < 0 || ordinal >= device_count() ? kInvalidDevice : kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  if (attribute != kMulticastSupported) {
    return kInvalidValue;
  }
  *value = std::getenv("FAKE_NVSWITCH") != nullptr ? 1 : 0;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < kFirstDevice || device >= kFirstDevice + device_count()) {
    return kInvalidDevice;
  }
  static char contexts[64];
  *context = &contexts[device - kFirstDevice];
  const std::lock_guard lock(state().mutex);
  state().contexts.insert(*context);
  return kSuccess;
}

int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return kSuccess;
}

int cuCtxSetCurrent(void* context) {
  current_context = context;
  return kSuccess;
}

int cuCtxSynchronize() {
  if (!has_context()) {
    return kInvalidContext;
  }
  std::map<void*, void*> own;
  std::set<void*> foreign;
  {
    const std::lock_guard lock(state().mutex);
    if (!state().captures.empty()) {
      return break_captures();  // in any mode
    }
    own = state().streams;
    foreign = state().foreign;
  }
  using Synchronize = void (*)(void*);
  static const auto finish =
      reinterpret_cast<Synchronize>(::dlsym(RTLD_DEFAULT, "fake_cuda_synchronize"));
  for (void* const stream : foreign) {
    finish(stream);
  }
  for (const auto& [stream, context] : own) {
    while (context == current_context && !static_cast<Queue*>(stream)->is_idle()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return kSuccess;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return has_context() ? kSuccess : kInvalidContext;
}

int cuGetErrorString(int, const char** text) {
  *text = "an error of the fake driver";
  return kSuccess;
}

int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  if (!has_context()) {
    return kInvalidContext;
  }
  const std::lock_guard lock(state().mutex);
  *stream = new Queue;
  state().streams[*stream] = current_context;
  state().kept.push_back(*stream);
  return kSuccess;
}

int cuStreamDestroy_v2(void* stream) {
  require_own_process();
  has_context();
  {
    const std::lock_guard lock(state().mutex);
    if (state().streams.erase(stream) == 0) {
      return kInvalidHandle;
    }
  }
  static_cast<Queue*>(stream)->close();
  return kSuccess;
}

int cuStreamGetCaptureInfo_v2(void* stream, int* status, std::uint64_t* id, void**, const void***,
                              std::size_t*) {
  require_own_process();
  if (!has_context()) {
    return kInvalidContext;
  }
  const std::lock_guard lock(state().mutex);
  // Every stream of the fake is one that the legacy stream waits for.
  if (!state().captures.empty() && stream == nullptr) {
    return kCaptureImplicit;
  }
  const Capture* const capture = capture_of(stream);
  *status = capture != nullptr ? 1 : 0;
  if (capture != nullptr) {
    *id = capture->id;
  }
  return kSuccess;
}

// Queues are never destroyed, so no two have one address.
int cuStreamGetId(void* stream, unsigned long long* id) {
  *id = reinterpret_cast<std::uintptr_t>(stream);
  return has_context() ? kSuccess : kInvalidContext;
}

int cuStreamQuery(void* stream) {
  {
    const std::lock_guard lock(state().mutex);
    if (state().streams.count(stream) == 0) {
      return kInvalidHandle;
    }
    if (capture_of(stream) != nullptr) {
      return break_captures();  // in any mode
    }
  }
  if (!permits_unsafe_call()) {
    return kCaptureUnsupported;
  }
  return static_cast<Queue*>(stream)->is_idle() ? kSuccess : kNotReady;
}

int cuEventCreate(void** event, unsigned) {
  if (!has_context()) {
    return kInvalidContext;
  }
  auto* const made = new Event;
  made->context = current_context;
  *event = made;
  const std::lock_guard lock(state().mutex);
  state().events.insert(made);
  return kSuccess;
}

int cuEventDestroy_v2(void* event) {
  require_own_process();
  has_context();
  {
    const std::lock_guard lock(state().mutex);
    if (state().events.erase(event) == 0) {
      return kInvalidHandle;
    }
  }
  delete static_cast<Event*>(event);
  return kSuccess;
}

int cuEventRecord(void* handle, void* stream) {
  if (!is_event(handle)) {
    return kInvalidHandle;
  }
  const void* const context = fake_driver_context_of(stream);
  if (context != nullptr && context != static_cast<Event*>(handle)->context) {
    return kInvalidHandle;
  }
  auto& event = *static_cast<Event*>(handle);
  auto mark = std::make_shared<Mark>();
  {
    const std::lock_guard lock(event.mutex);
    event.mark = mark;
    event.captured_point = captured_point(stream);
    if (event.captured_point != kNotCaptured) {
      return kSuccess;
    }
  }
  post(stream, [mark] { mark->pass(); });
  return kSuccess;
}

int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  if (!is_event(handle)) {
    return kInvalidHandle;
  }
  auto& event = *static_cast<Event*>(handle);
  std::shared_ptr<Mark> mark;
  long captured_point = kNotCaptured;
  {
    const std::lock_guard lock(event.mutex);
    mark = event.mark;
    captured_point = event.captured_point;
  }
  if (mark == nullptr) {
    return kSuccess;  // never recorded
  }
  using Note = void (*)(void*);
  static const auto note = reinterpret_cast<Note>(::dlsym(RTLD_DEFAULT, "fake_cuda_note_wait"));
  if (note != nullptr) {
    note(stream);
  }
  if (captured_point != kNotCaptured) {
    return fake_driver_join_capture(stream, captured_point) != 0 ? kSuccess : kCaptureUnsupported;
  }
  if (is_captured(stream)) {
    const std::lock_guard lock(state().mutex);
    break_captures();
    return kCaptureIsolation;
  }
  post(stream, [mark] { mark->wait(); });
  return kSuccess;
}

int cuEventQuery(void* handle) {
  if (!is_event(handle)) {
    return kInvalidHandle;
  }
  auto& event = *static_cast<Event*>(handle);
  const std::lock_guard lock(event.mutex);
  if (event.captured_point != kNotCaptured) {
    const std::lock_guard state_lock(state().mutex);
    return break_captures();
  }
  if (!permits_unsafe_call()) {
    return kCaptureUnsupported;
  }
  if (event.mark == nullptr) {
    return kSuccess;
  }
  if (queries_wait) {
    event.mark->wait();
  }
  const std::lock_guard mark_lock(event.mark->mutex);
  return event.mark->is_passed ? kSuccess : kNotReady;
}

int cuMemcpyAsync(std::size_t to, std::size_t from, std::size_t bytes, void* stream) {
  post(stream, [=] {
    move_bytes(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
  return kSuccess;
}

int cuMemAlloc_v2(std::size_t* data, std::size_t bytes) {
  if (!has_context()) {
    return kInvalidContext;
  }
  if (!permits_unsafe_call()) {
    return kCaptureUnsupported;
  }
  if (fake_driver_reserve(static_cast<long>(bytes)) == 0) {
    return kOutOfMemory;
  }
  void* const memory = std::malloc(bytes);
  std::memset(memory, 0xff, bytes);
  *data = reinterpret_cast<std::size_t>(memory);
  ++blocks;
  const std::lock_guard lock(state().mutex);
  state().memory[memory] = static_cast<long>(bytes);
  return kSuccess;
}

int cuMemFree_v2(std::size_t data) {
  if (!has_context()) {
    return kInvalidContext;
  }
  if (!permits_unsafe_call()) {
    return kCaptureUnsupported;
  }
  {
    const std::lock_guard lock(state().mutex);
    const auto found = state().memory.find(reinterpret_cast<void*>(data));
    if (found == state().memory.end()) {
      return kInvalidValue;
    }
    used_bytes -= found->second;
    state().memory.erase(found);
  }
  std::free(reinterpret_cast<void*>(data));
  --blocks;
  return kSuccess;
}

int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *total = static_cast<std::size_t>(limit_bytes);
  *free = static_cast<std::size_t>(std::max(0L, limit_bytes - used_bytes));
  return has_context() ? kSuccess : kInvalidContext;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}
}
