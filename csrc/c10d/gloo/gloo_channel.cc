#include "c10d/gloo/gloo_channel.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/interruption.h"
#include "c10d/tensors.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kCloseTag = 0x7ffffffe;
constexpr std::uint64_t kFarewellTag = 0x7ffffffd;

// Zero means "the default" to gloo.
milliseconds timeout_of(Deadline deadline) {
  const auto left = deadline.remaining(std::chrono::hours(24 * 30));
  return std::max(std::chrono::ceil<milliseconds>(left), milliseconds(1));
}

at::Tensor bytes_at(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte);
}

bool contains_any(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(), [text](std::string_view part) {
    return text.find(part) != std::string_view::npos;
  });
}

// gloo throws plain exceptions whose text is all there is to tell them apart.
[[noreturn]] void rethrow_typed() {
  std::string text;
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    text = error.what();
  }
  text = text.substr(0, text.find('\n'));
  // "[/path/to/gloo/file.cc:12] what happened"
  if (const auto end = text.find("] "); text.starts_with("[/") && end != std::string::npos) {
    text = text.substr(end + 2);
  }
  // Advice that does not apply here follows some messages.
  text = text.substr(0, text.find(" This is typically"));
  if (contains_any(text, {"imed out", "imeout"})) {
    if (text.starts_with("Timed out")) {
      text[0] = 't';
    }
    throw Timeout("gloo: " + text);
  }
  if (contains_any(
          text, {"closed by peer", "reset by peer", "Broken pipe", "not connected", "refused"})) {
    throw PeerLost("gloo: " + text);
  }
  throw TransportError("gloo: " + text);
}

template <typename Function>
auto typed(const Function& function) -> decltype(function()) {
  try {
    return function();
  } catch (...) {
    rethrow_typed();
  }
}

}  // namespace

struct GlooChannel::MessageState {
  c10::intrusive_ptr<c10d::Work> work;
};

GlooChannel::GlooChannel(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size)
    : backend_(std::move(backend)), rank_(rank), size_(size) {
  if (!backend_) {
    throw InvalidUsage("Expected torch's gloo backend, got None.");
  }
  if (backend_->getRank() != rank || backend_->getSize() != size) {
    throw InvalidUsage(join("The gloo backend is rank ", backend_->getRank(), " of ",
                            backend_->getSize(), ", expected rank ", rank, " of ", size, "."));
  }
}

GlooChannel::~GlooChannel() = default;

bool GlooChannel::can_sum(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kInt8:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8:
    case DType::kComplex64:
    case DType::kComplex128:
      return true;
    default:
      // 16-bit floats too, but summed in their own precision.
      return false;
  }
}

void GlooChannel::all_reduce_sum(void* data, std::size_t count, DType dtype, Deadline deadline) {
  if (size_ == 1 || count == 0) {
    return;
  }
  auto elements = static_cast<std::int64_t>(count);
  if (is_complex(dtype)) {
    dtype = dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
    elements *= 2;
  }
  typed([&] {
    std::vector<at::Tensor> tensors{at::from_blob(data, {elements}, scalar_type_of(dtype))};
    c10d::AllreduceOptions options;
    options.timeout = timeout_of(deadline);
    await(*backend_->allreduce(tensors, options));
  });
}

void GlooChannel::await(c10d::Work& work) const {
  while (look_ && !work.isCompleted()) {
    try {
      work.wait(kInterruptionInterval);
    } catch (const std::exception&) {
      // Either the interval has passed or the work has failed, which is seen below.
      if (!work.isCompleted()) {
        look_();
        require_not_forked();  // by a handler, whose child has nobody to complete the work
      }
    }
  }
  work.wait();
}

void GlooChannel::copy_own_block(const void* input, void* output, std::size_t bytes) const {
  auto* const own = static_cast<std::byte*>(output) + static_cast<std::size_t>(rank_) * bytes;
  if (own != input && bytes != 0) {
    std::memcpy(own, input, bytes);
  }
}

void GlooChannel::all_gather(const void* input, void* output, std::size_t bytes,
                             Deadline deadline) {
  if (bytes == 0) {
    return;
  }
  copy_own_block(input, output, bytes);
  if (size_ == 1) {
    return;
  }
  typed([&] {
    at::Tensor gathered = bytes_at(output, bytes * static_cast<std::size_t>(size_));
    // In place: gloo copies the input to its block of the output, where it already is.
    at::Tensor own =
        bytes_at(static_cast<std::byte*>(output) + static_cast<std::size_t>(rank_) * bytes, bytes);
    c10d::AllgatherOptions options;
    options.timeout = timeout_of(deadline);
    await(*backend_->_allgather_base(gathered, own, options));
  });
}

void GlooChannel::broadcast(void* data, std::size_t bytes, int root, Deadline deadline) {
  if (size_ == 1 || bytes == 0) {
    return;
  }
  typed([&] {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout_of(deadline);
    await(*backend_->broadcast(tensors, options));
  });
}

void GlooChannel::all_to_all(const void* input, const std::vector<std::int64_t>& input_bytes,
                             void* output, const std::vector<std::int64_t>& output_bytes,
                             Deadline deadline) {
  std::size_t sent = 0;
  std::size_t received = 0;
  for (std::size_t peer = 0; peer < input_bytes.size(); ++peer) {
    sent += static_cast<std::size_t>(input_bytes[peer]);
    received += static_cast<std::size_t>(output_bytes[peer]);
  }
  if (size_ == 1) {
    if (received != 0) {
      std::memcpy(output, input, received);
    }
    return;
  }
  typed([&] {
    at::Tensor source = bytes_at(input, sent);
    at::Tensor target = bytes_at(output, received);
    std::vector<std::int64_t> target_splits = output_bytes;
    std::vector<std::int64_t> source_splits = input_bytes;
    c10d::AllToAllOptions options;
    options.timeout = timeout_of(deadline);
    await(*backend_->alltoall_base(target, source, target_splits, source_splits, options));
  });
}

void GlooChannel::barrier(Deadline deadline) {
  if (size_ == 1) {
    return;
  }
  typed([&] {
    c10d::BarrierOptions options;
    options.timeout = timeout_of(deadline);
    await(*backend_->barrier(options));
  });
}

void GlooChannel::gather_records(const void* mine, void* all, std::size_t bytes,
                                 Deadline deadline) {
  if (control_) {
    control_->all_gather(mine, all, bytes, deadline, look_);
  } else {
    all_gather(mine, all, bytes, deadline);
  }
}

void GlooChannel::use_control(std::unique_ptr<GlooControl> control) noexcept {
  const std::lock_guard lock(end_mutex_);
  control_ = std::move(control);
}

GlooChannel::Message GlooChannel::post_send(const void* data, std::size_t bytes, int peer,
                                            std::uint64_t tag) {
  return typed([&] {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    return std::make_shared<MessageState>(
        MessageState{backend_->send(tensors, peer, static_cast<int>(tag))});
  });
}

GlooChannel::Message GlooChannel::post_recv(void* data, std::size_t bytes, int peer,
                                            std::uint64_t tag) {
  return typed([&] {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    return std::make_shared<MessageState>(
        MessageState{peer < 0 ? backend_->recvAnysource(tensors, static_cast<int>(tag))
                              : backend_->recv(tensors, peer, static_cast<int>(tag))});
  });
}

int GlooChannel::finish(const Message& message, Deadline deadline) {
  return typed([&] {
    message->work->wait(timeout_of(deadline));
    const auto type = message->work->retrieveOpType();
    const bool is_recv = type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
    return is_recv ? message->work->sourceRank() : -1;
  });
}

std::optional<std::uint64_t> GlooChannel::wait_for_farewell(int peer) noexcept {
  // gloo reports the loss of a peer only to a thread that waits for a message.
  std::uint64_t number = 0;
  Message message;
  try {
    message = post_recv(&number, sizeof number, peer, kFarewellTag);
    finish(message, Deadline::never());
    return number;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void GlooChannel::say_farewell(int peer, std::uint64_t number, Deadline deadline) noexcept {
  Message message;
  try {
    message = post_send(&number, sizeof number, peer, kFarewellTag);
    finish(message, deadline);
  } catch (const std::exception&) {
    // It is gone itself, or has never listened.
  }
}

void GlooChannel::close() noexcept {
  const std::lock_guard lock(end_mutex_);
  if (size_ == 1 || !backend_) {
    return;
  }
  if (control_) {
    control_->close();
  }
  // gloo has no call for it, but a receive that runs out of time cuts all its connections. From
  // whom is of no matter, but that it starts: one from a peer that is gone fails before.
  for (int step = 1; step < size_; ++step) {
    try {
      std::uint8_t nothing = 0;
      const Message message = post_recv(&nothing, 1, (rank_ + step) % size_, kCloseTag);
      message->work->wait(milliseconds(1));
    } catch (const std::exception&) {
      // As intended.
    }
  }
}

void GlooChannel::release() noexcept {
  const std::lock_guard lock(end_mutex_);
  backend_.reset();
}

void GlooChannel::abandon() noexcept {
  const std::lock_guard lock(end_mutex_);
  (void)backend_.release();
  (void)control_.release();
}

}  // namespace pydist
