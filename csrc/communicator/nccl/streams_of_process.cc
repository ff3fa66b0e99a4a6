#include "communicator/nccl/streams_of_process.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "communicator/departure.h"
#include "cuda/device_memory.h"
#include "cuda/driver.h"

namespace pydist {

StreamsOfProcess& StreamsOfProcess::of_process() {
  static auto* const streams = new StreamsOfProcess;  // see open_communicators.cc
  return *streams;
}

bool is_idle(const cuda::OwnedStream& stream, int device) {
  const cuda::DeviceGuard guard(device);
  const cuda::RelaxedCapture relaxed;
  const cuda::Driver& driver = cuda::Driver::get();
  return !driver.is_capturing(stream.get()) && driver.is_idle(stream.get());
}

std::shared_ptr<const cuda::OwnedStream> StreamsOfProcess::make(int device) {
  auto stream = std::make_shared<const cuda::OwnedStream>();
  const std::lock_guard lock(mutex_);
  streams_.push_back({stream, device});
  return stream;
}

void StreamsOfProcess::prune() noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_, [](const Entry& each) {
    try {
      return each.stream.use_count() == 1 && each.is_idle();
    } catch (const std::exception& error) {
      log_line(LogLevel::kError, error.what());  // CUDA has failed, and takes them with it
      return false;
    }
  });
}

std::optional<std::uint64_t> StreamsOfProcess::capture() {
  const std::lock_guard lock(mutex_);
  for (const Entry& each : streams_) {
    const cuda::DeviceGuard guard(each.device);
    if (const auto capture = cuda::Driver::get().capture_of(each.stream->get())) {
      return capture;
    }
  }
  return std::nullopt;
}

void require_no_capture(std::string_view what, int device) {
  if (in_forked_child() || own_departure() == Departure::kProgramEnd) {
    return;
  }
  if (cuda::is_thread_capturing(device) || StreamsOfProcess::of_process().capture()) {
    throw InvalidUsage(
        join(what,
             " while a CUDA graph is being captured, which would not survive it: call it "
             "before or after the capture."));
  }
}

bool StreamsOfProcess::wait_until_idle(int device, std::chrono::milliseconds patience) {
  const auto are_idle = [&] {
    const std::lock_guard lock(mutex_);
    return std::all_of(streams_.begin(), streams_.end(), [device](const Entry& each) {
      return each.device != device || each.is_idle();
    });
  };
  const Deadline deadline = Deadline::in(patience);
  while (!are_idle()) {
    if (deadline.has_passed()) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace pydist
