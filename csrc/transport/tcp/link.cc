#include "transport/tcp/link.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "transport/tcp/sockets.h"

namespace pydist {
namespace {

// Once one connection has ended, how long the others may take.
constexpr std::chrono::milliseconds kLastWords{500};

OutgoingFrame outgoing(const Frame& frame) {
  OutgoingFrame its;
  its.header = frame.header;
  its.header.bytes = static_cast<std::uint32_t>(frame.payload.size());
  its.data = frame.payload.data();
  return its;
}

}  // namespace

Link::Link(std::string peer, std::uint64_t number, std::function<void()> wake, OnLoss on_loss)
    : peer_(std::move(peer)),
      number_(number),
      wake_(std::move(wake)),
      on_loss_(std::move(on_loss)) {}

void Link::count(OutgoingFrame& frame) noexcept {
  if (frame.written != nullptr) {
    std::exchange(frame.written, nullptr)->fetch_add(1, std::memory_order_release);
  }
}

void Link::note_broken(const std::exception& error) noexcept {
  if (!is_broken_.load(std::memory_order_relaxed)) {
    broken_by_ = error.what();
    is_broken_.store(true, std::memory_order_release);
  }
}

std::optional<std::string> Link::end() {
  std::string why;
  bool has_all = true;
  for (const std::unique_ptr<FramedSocket>& socket : sockets_) {
    has_all = has_all && socket->has_ended();
    if (why.empty()) {
      why = socket->end();
    }
  }
  if (is_broken()) {
    const std::lock_guard lock(mutex_);
    why = why.empty() ? broken_by_ : why;
  } else if (std::none_of(sockets_.begin(), sockets_.end(),
                          [](const auto& socket) { return socket->has_ended(); })) {
    return std::nullopt;
  }
  if (!last_words_) {
    last_words_ = Deadline::in(kLastWords);
  }
  return has_all || last_words_->has_passed() ? std::optional(why) : std::nullopt;
}

void Link::send(const FrameHeader& header, std::span<const std::byte> payload) {
  OutgoingFrame frame = outgoing({header, payload});
  send_now_or_later({&frame, 1}, /*is_segment=*/false);
}

void Link::send(std::span<const Frame> frames) {
  std::vector<OutgoingFrame> all(frames.size());
  std::transform(frames.begin(), frames.end(), all.begin(), outgoing);
  send_now_or_later(all, /*is_segment=*/false);
}

void Link::send_once_up(const FrameHeader& header) {
  {
    const std::lock_guard lock(mutex_);
    if (lanes_.empty() && !is_lost()) {
      OutgoingFrame frame;
      frame.header = header;
      small_.push_back(std::move(frame));
      return;
    }
  }
  send(header);
}

void Link::send_segment(const FrameHeader& header, const std::byte* data, Counter& written) {
  OutgoingFrame frame;
  frame.header = header;
  frame.data = data;
  frame.written = &written;
  send_now_or_later({&frame, 1}, /*is_segment=*/true);
}

void Link::send_now_or_later(std::span<OutgoingFrame> frames, bool is_segment) {
  bool waits = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_lost() || is_broken()) {
      std::for_each(frames.begin(), frames.end(), &Link::count);
      return;
    }
    try {
      const auto free = [](const Lane& lane) { return lane.frames.empty(); };
      const auto lane =
          is_segment ? std::find_if(lanes_.begin(), lanes_.end(), free) : lanes_.begin();
      const bool is_next =
          lane != lanes_.end() && free(*lane) && (!is_segment || segments_.empty());
      if (is_next) {
        lane->socket->write(frames);
      }
      auto& line = is_next || (!is_segment && lane != lanes_.end()) ? lane->frames
                   : is_segment                                     ? segments_
                                                                    : small_;
      for (OutgoingFrame& frame : frames) {
        if (frame.is_written()) {
          count(frame);
          continue;
        }
        if (!is_segment && frame.header.bytes != 0) {
          frame.copy.assign(frame.data, frame.data + frame.header.bytes);
          frame.data = nullptr;
        }
        line.push_back(std::move(frame));
        has_to_send_.store(true, std::memory_order_relaxed);
        waits = true;
      }
    } catch (const std::exception& error) {
      std::for_each(frames.begin(), frames.end(), &Link::count);
      note_broken(error);
      waits = true;
    }
  }
  if (waits) {
    wake_();
  }
}

bool Link::write_lane(std::size_t index) {
  Lane& lane = lanes_[index];
  while (true) {
    if (lane.frames.empty()) {
      if (segments_.empty()) {
        return false;
      }
      lane.frames.push_back(std::move(segments_.front()));
      segments_.pop_front();
    }
    OutgoingFrame& frame = lane.frames.front();
    lane.socket->write({&frame, 1});
    if (!frame.is_written()) {
      return true;
    }
    count(frame);
    lane.frames.pop_front();
  }
}

void Link::flush() {
  const std::lock_guard lock(mutex_);
  if (is_lost() || is_broken()) {
    return;
  }
  try {
    bool has_more = lanes_.empty() && !(small_.empty() && segments_.empty());
    for (std::size_t index = 0; index < lanes_.size(); ++index) {
      has_more = write_lane(index) || has_more;
    }
    has_to_send_.store(has_more, std::memory_order_relaxed);
  } catch (const std::exception& error) {
    note_broken(error);
  }
}

std::size_t Link::untaken_bytes() {
  std::size_t bytes = 0;
  const auto add = [&bytes](const OutgoingFrame& frame) { bytes += frame.bytes() - frame.done; };
  const std::lock_guard lock(mutex_);
  std::for_each(segments_.begin(), segments_.end(), add);
  for (const Lane& lane : lanes_) {
    std::for_each(lane.frames.begin(), lane.frames.end(), add);
    bytes += unacknowledged_bytes(lane.socket->fd());
  }
  return bytes;
}

void Link::release_segments(std::uint64_t group) {
  const auto release = [group](OutgoingFrame& frame) {
    if (frame.header.group == group && frame.written != nullptr) {
      frame.copy.assign(frame.data, frame.data + frame.header.bytes);
      frame.data = nullptr;
      count(frame);
    }
  };
  const std::lock_guard lock(mutex_);
  std::for_each(segments_.begin(), segments_.end(), release);
  for (Lane& lane : lanes_) {
    std::for_each(lane.frames.begin(), lane.frames.end(), release);
  }
}

void Link::add(FileDescriptor socket) {
  sockets_.push_back(std::make_unique<FramedSocket>(std::move(socket), number_));
  {
    const std::lock_guard lock(mutex_);
    Lane& lane = lanes_.emplace_back();
    lane.socket = sockets_.back().get();
    if (lanes_.size() == 1) {
      lane.frames = std::move(small_);
      small_.clear();
    }
  }
  is_up_.store(true, std::memory_order_release);
  flush();
}

bool Link::receive(const FramedSocket::SinkOf& sink_of) {
  bool has_come = false;
  for (const std::unique_ptr<FramedSocket>& socket : sockets_) {
    has_come = socket->receive(sink_of) || has_come;
  }
  if (has_come && std::none_of(sockets_.begin(), sockets_.end(),
                               [](const auto& socket) { return socket->has_ended(); })) {
    last_words_.reset();  // what has failed is sending alone: there is more to read
  }
  return has_come;
}

void Link::drop(const FrameSink& sink, std::optional<FrameKind> kind) noexcept {
  for (const std::unique_ptr<FramedSocket>& socket : sockets_) {
    socket->drop(sink, kind);
  }
}

void Link::lose(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    is_lost_.store(true, std::memory_order_release);
    is_up_.store(false, std::memory_order_release);
    has_to_send_.store(false, std::memory_order_relaxed);
    for (Lane& lane : lanes_) {
      std::for_each(lane.frames.begin(), lane.frames.end(), &Link::count);
    }
    std::for_each(segments_.begin(), segments_.end(), &Link::count);
    lanes_.clear();
    small_.clear();
    segments_.clear();
  }
  sockets_.clear();
  if (const OnLoss on_loss = std::exchange(on_loss_, nullptr)) {
    on_loss(why);
  }
}

void Link::finish_writing() noexcept {
  for (const std::unique_ptr<FramedSocket>& socket : sockets_) {
    socket->finish_writing();
  }
}

}  // namespace pydist
