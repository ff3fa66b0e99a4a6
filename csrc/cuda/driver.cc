#include "cuda/driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/error.h"

namespace pydist::cuda {
namespace {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kMulticastSupported = 132;  // CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED

// CU_STREAM_LEGACY, the other name of the null stream.
// NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's own constant
const Stream kStreamLegacy = reinterpret_cast<Stream>(1);

}  // namespace

// Those that are called. The names are the driver's own, with the versions that its headers choose.
// clang-format off: a name a line
#define PYDIST_FUNCTIONS(each)                                                                    \
  each(cuInit, (unsigned))                                                                        \
  each(cuDeviceGetCount, (int*))                                                                  \
  each(cuDeviceGet, (int*, int))                                                                  \
  each(cuDeviceGetAttribute, (int*, int, int))                                                    \
  each(cuDevicePrimaryCtxRetain, (void**, int))                                                   \
  each(cuCtxGetCurrent, (void**))                                                                 \
  each(cuCtxSetCurrent, (void*))                                                                  \
  each(cuCtxSynchronize, ())                                                                      \
  each(cuCtxGetStreamPriorityRange, (int*, int*))                                                 \
  each(cuGetErrorString, (int, const char**))                                                     \
  each(cuStreamCreateWithPriority, (void**, unsigned, int))                                       \
  each(cuStreamDestroy_v2, (void*))                                                               \
  each(cuStreamGetCaptureInfo_v2,                                                                 \
       (void*, int*, std::uint64_t*, void**, const void***, std::size_t*))                        \
  each(cuStreamGetId, (void*, unsigned long long*))                                               \
  each(cuStreamQuery, (void*))                                                                    \
  each(cuStreamWaitEvent, (void*, void*, unsigned))                                               \
  each(cuEventCreate, (void**, unsigned))                                                         \
  each(cuEventDestroy_v2, (void*))                                                                \
  each(cuEventRecord, (void*, void*))                                                             \
  each(cuEventQuery, (void*))                                                                     \
  each(cuMemcpyAsync, (std::size_t, std::size_t, std::size_t, void*))                             \
  each(cuMemAlloc_v2, (std::size_t*, std::size_t))                                                \
  each(cuMemFree_v2, (std::size_t))                                                               \
  each(cuMemGetInfo_v2, (std::size_t*, std::size_t*))                                             \
  each(cuThreadExchangeStreamCaptureMode, (int*))
// clang-format on

struct Driver::Functions {
#define PYDIST_DECLARE(name, arguments) int(*name) arguments;
  PYDIST_FUNCTIONS(PYDIST_DECLARE)
#undef PYDIST_DECLARE
};

struct Driver::Opened {
  std::string why_missing;
  Functions functions = {};

  Opened() {
    // Never closed: streams and events may outlive the object that first opened the library.
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why_missing = "this machine has no CUDA driver (libcuda.so.1)";
      return;
    }
    const auto resolve = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(  // NOLINT
          ::dlsym(library, name));
      if (function == nullptr && why_missing.empty()) {
        why_missing = join("the CUDA driver lacks ", name, ": it is too old (CUDA 12 is needed)");
      }
    };
#define PYDIST_RESOLVE(name, arguments) resolve(functions.name, #name);
    PYDIST_FUNCTIONS(PYDIST_RESOLVE)
#undef PYDIST_RESOLVE
    if (!why_missing.empty()) {
      return;
    }
    int count = 0;
    const int code = functions.cuInit(0);
    if (code != kSuccess || functions.cuDeviceGetCount(&count) != kSuccess || count == 0) {
      why_missing = join("the CUDA driver sees no GPU (cuInit says ", code,
                         "); CUDA_VISIBLE_DEVICES may hide it");
    }
  }
};

const Driver::Opened& Driver::opened() {
  static const auto* const opened = new Opened;  // threads may outlive static destructors
  return *opened;
}

const std::string& Driver::why_missing() { return opened().why_missing; }

const Driver& Driver::get() {
  if (!why_missing().empty()) {
    throw TransportError(join("CUDA cannot be used: ", why_missing(), "."));
  }
  static const Driver driver(opened().functions);
  return driver;
}

void Driver::check(int code, const char* what) const {
  if (code != kSuccess) {
    const char* text = nullptr;
    functions_.cuGetErrorString(code, &text);
    throw TransportError(join("CUDA could not ", what, ": ",
                              text == nullptr ? "unknown error" : text, " (CUresult ", code, ")."));
  }
}

Stream Driver::create_stream() const {
  int least = 0;
  int greatest = 0;
  check(functions_.cuCtxGetStreamPriorityRange(&least, &greatest), "tell its priorities");
  Stream stream = nullptr;
  check(functions_.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, greatest),
        "create a stream");
  return stream;
}

namespace {

// Calls `function` in a context; which one the thread had before, it has afterwards.
template <typename Functions, typename Function>
void in_context(const Functions& functions, Context context, const Function& function) noexcept {
  Context previous = nullptr;
  functions.cuCtxGetCurrent(&previous);
  if (previous == context) {
    function();
    return;
  }
  if (functions.cuCtxSetCurrent(context) == kSuccess) {
    function();
    functions.cuCtxSetCurrent(previous);
  }
}

}  // namespace

void Driver::destroy_stream(Stream stream, Context context) const noexcept {
  in_context(functions_, context, [&] { functions_.cuStreamDestroy_v2(stream); });
}

std::uint64_t Driver::id_of(Stream stream) const {
  unsigned long long id = 0;
  check(functions_.cuStreamGetId(stream, &id), "tell which stream it is");
  return id;
}

std::optional<std::uint64_t> Driver::capture_of(Stream stream) const {
  // Not even asked: the answer is an error while a stream is captured that waits for the legacy
  // one.
  if (stream == nullptr || stream == kStreamLegacy) {
    return std::nullopt;
  }
  int status = 0;
  std::uint64_t id = 0;
  check(functions_.cuStreamGetCaptureInfo_v2(stream, &status, &id, nullptr, nullptr, nullptr),
        "tell whether a stream is captured");
  return status == 0 ? std::nullopt : std::optional(id);
}

bool Driver::is_idle(Stream stream) const {
  const int code = functions_.cuStreamQuery(stream);
  if (code == kNotReady) {
    return false;
  }
  check(code, "finish what was put on a stream");
  return true;
}

Event Driver::create_event() const {
  Event event = nullptr;
  check(functions_.cuEventCreate(&event, kEventDisableTiming), "create an event");
  return event;
}

void Driver::destroy_event(Event event, Context context) const noexcept {
  in_context(functions_, context, [&] { functions_.cuEventDestroy_v2(event); });
}

void Driver::record(Event event, Stream stream) const {
  check(functions_.cuEventRecord(event, stream), "record an event");
}

void Driver::wait(Stream stream, Event event) const {
  check(functions_.cuStreamWaitEvent(stream, event, 0), "make a stream wait");
}

bool Driver::is_done(Event event) const {
  const int code = functions_.cuEventQuery(event);
  if (code == kNotReady) {
    return false;
  }
  check(code, "finish what was before an event");
  return true;
}

void Driver::copy(void* to, const void* from, std::size_t bytes, Stream stream) const {
  if (bytes != 0) {
    check(functions_.cuMemcpyAsync(reinterpret_cast<std::size_t>(to),
                                   reinterpret_cast<std::size_t>(from), bytes, stream),
          "copy memory");
  }
}

bool Driver::has_multicast(int device) const {
  int handle = 0;
  int value = 0;
  check(functions_.cuDeviceGet(&handle, device), "find a device");
  // A driver of CUDA 12.0 does not know the attribute, and cannot multicast.
  return functions_.cuDeviceGetAttribute(&value, kMulticastSupported, handle) == kSuccess &&
         value != 0;
}

Context Driver::current_context() const {
  Context context = nullptr;
  check(functions_.cuCtxGetCurrent(&context), "tell the current context");
  return context;
}

void Driver::synchronize() const { check(functions_.cuCtxSynchronize(), "finish"); }

void* Driver::try_allocate(std::size_t bytes) const {
  std::size_t data = 0;
  const int code = functions_.cuMemAlloc_v2(&data, bytes == 0 ? 1 : bytes);
  if (code == kOutOfMemory) {
    return nullptr;
  }
  check(code, "allocate memory");
  return reinterpret_cast<void*>(data);  // NOLINT: the driver's addresses are numbers
}

Room Driver::room() const {
  Room room;
  check(functions_.cuMemGetInfo_v2(&room.free_bytes, &room.total_bytes),
        "tell how much memory is free");
  return room;
}

void Driver::free(void* data) const noexcept {
  functions_.cuMemFree_v2(reinterpret_cast<std::size_t>(data));
}

DeviceGuard::DeviceGuard(int device) {
  // Retained once and for the life of the process, as the runtime does; torch uses the same one.
  static auto& mutex = *new std::mutex;
  static auto& contexts = *new std::map<int, void*>;
  const Driver& driver = Driver::get();
  void* context = nullptr;
  {
    const std::lock_guard lock(mutex);
    void*& known = contexts[device];
    if (known == nullptr) {
      int handle = 0;  // the driver's, of the device that the process counts as `device`
      driver.check(driver.functions_.cuDeviceGet(&handle, device), "find a device");
      driver.check(driver.functions_.cuDevicePrimaryCtxRetain(&known, handle),
                   "open a device's context");
    }
    context = known;
  }
  previous_ = driver.current_context();
  if (previous_ != context) {
    driver.check(driver.functions_.cuCtxSetCurrent(context), "choose a context");
    is_changed_ = true;
  }
}

RelaxedCapture::RelaxedCapture() noexcept : previous_(kCaptureModeRelaxed) {
  Driver::get().functions_.cuThreadExchangeStreamCaptureMode(&previous_);
}

RelaxedCapture::~RelaxedCapture() {
  Driver::get().functions_.cuThreadExchangeStreamCaptureMode(&previous_);
}

DeviceGuard::~DeviceGuard() {
  if (is_changed_) {
    Driver::get().functions_.cuCtxSetCurrent(previous_);
  }
}

}  // namespace pydist::cuda
