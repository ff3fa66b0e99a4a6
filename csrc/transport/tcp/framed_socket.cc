#include "transport/tcp/framed_socket.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace pydist {
namespace {

// A frame of so many bytes is worked on before the next one is read.
constexpr std::size_t kLarge = std::size_t{16} << 10;

// The system is given so many frames in one call.
constexpr std::size_t kMostAtOnce = 16;

// Up to so many bytes go to the system in one piece: to copy them takes less time than the system
// takes for a list of pieces.
constexpr std::size_t kOnePiece = std::size_t{2} << 10;

// What nobody wants is read in such pieces.
constexpr std::size_t kDropped = std::size_t{64} << 10;

// As sendmsg().
ssize_t send_parts(int socket, std::span<iovec> parts) {
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
  std::size_t bytes = 0;
  for (const iovec& part : parts) {
    bytes += part.iov_len;
  }
  if (bytes > kOnePiece) {
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    return ::sendmsg(socket, &message, kFlags);
  }
  std::array<std::byte, kOnePiece> piece;
  std::byte* end = piece.data();
  for (const iovec& part : parts) {
    if (part.iov_len != 0) {
      end = std::copy_n(static_cast<const std::byte*>(part.iov_base), part.iov_len, end);
    }
  }
  return ::send(socket, piece.data(), bytes, kFlags);
}

}  // namespace

FramedSocket::FramedSocket(FileDescriptor socket, std::uint64_t sender)
    : socket_(std::move(socket)), not_inherited_(socket_.get()), sender_(sender) {}

bool FramedSocket::note_read(std::ptrdiff_t count) {
  if (count > 0) {
    return true;
  }
  is_drained_ = true;
  if (count == 0) {
    has_ended_ = true;
    if (is_in_frame_ || buffered() != 0) {
      throw TransportError("The connection has ended amid a frame.");
    }
  } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    throw system_error("The connection has ended", errno);
  }
  return false;
}

bool FramedSocket::fill() {
  std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
  end_ -= begin_;
  begin_ = 0;
  const std::size_t room = buffer_.size() - end_;
  const ssize_t count = ::recv(socket_.get(), buffer_.data() + end_, room, MSG_DONTWAIT);
  if (!note_read(count)) {
    return false;
  }
  end_ += static_cast<std::size_t>(count);
  is_drained_ = static_cast<std::size_t>(count) < room;
  return true;
}

void FramedSocket::begin_frame(const SinkOf& sink_of) {
  std::memcpy(&header_, buffer_.data() + begin_, sizeof header_);
  begin_ += sizeof header_;
  if (header_.magic != FrameHeader::kMagic || header_.kind < FrameKind::kHeartbeat ||
      header_.kind > FrameKind::kLast || header_.bytes > kMostPayload) {
    throw BadFrame(join("a header of kind ", static_cast<int>(header_.kind), " with ",
                        header_.bytes, " bytes."));
  }
  sink_ = sink_of(header_.group);
  target_ = sink_ != nullptr ? sink_->place(header_, sender_) : nullptr;
  if (target_ == nullptr) {
    own_.resize(sink_ != nullptr ? std::size_t{header_.bytes}
                                 : std::min<std::size_t>(header_.bytes, kDropped));
    target_ = own_.data();
  }
  got_ = 0;
  is_in_frame_ = true;
}

bool FramedSocket::continue_payload() {
  const std::size_t rest = header_.bytes - got_;
  const std::size_t ready = std::min(rest, buffered());
  if (sink_ != nullptr && ready != 0) {
    std::memcpy(target_ + got_, buffer_.data() + begin_, ready);
  }
  begin_ += ready;
  got_ += ready;
  if (got_ != header_.bytes) {
    return false;
  }
  is_in_frame_ = false;
  if (sink_ != nullptr) {
    std::exchange(sink_, nullptr)->take(header_, target_, sender_);
  }
  return true;
}

void FramedSocket::read_payload() {
  // The header of what follows may come with it.
  begin_ = end_ = 0;
  std::size_t rest = header_.bytes - got_;
  std::byte* target = target_ + got_;
  if (sink_ == nullptr) {
    rest = std::min(rest, own_.size());
    target = own_.data();
  }
  const bool is_to_the_end = got_ + rest == header_.bytes;
  std::array<iovec, 2> parts{iovec{target, rest}, iovec{buffer_.data(), buffer_.size()}};
  const ssize_t count = ::readv(socket_.get(), parts.data(), is_to_the_end ? 2 : 1);
  if (!note_read(count)) {
    return;
  }
  const auto all = static_cast<std::size_t>(count);
  got_ += std::min(all, rest);
  end_ = all - std::min(all, rest);
  is_drained_ = all < rest + (is_to_the_end ? buffer_.size() : 0);
}

bool FramedSocket::receive(const SinkOf& sink_of) noexcept {
  if (has_ended_) {
    return false;
  }
  try {
    return receive_frames(sink_of);
  } catch (const std::exception& error) {
    has_ended_ = true;
    why_ended_ = error.what();
    return true;
  }
}

bool FramedSocket::receive_frames(const SinkOf& sink_of) {
  bool has_come = false;
  is_drained_ = false;
  while (true) {
    if (!is_in_frame_) {
      if (buffered() < sizeof(FrameHeader)) {
        if (is_drained_ || !fill()) {
          return has_come;
        }
        has_come = true;
        continue;
      }
      begin_frame(sink_of);
    }
    if (continue_payload()) {
      has_come = true;
      if (header_.bytes >= kLarge) {
        // No further, but for what has come with it: the system would not tell of that again.
        is_drained_ = true;
      }
      continue;
    }
    if (is_drained_) {
      return has_come;
    }
    const std::size_t before = got_;
    read_payload();
    has_come = has_come || got_ != before;
  }
}

void FramedSocket::drop(const FrameSink& sink, std::optional<FrameKind> kind) noexcept {
  if (sink_ == &sink && kind.value_or(header_.kind) == header_.kind) {
    sink_ = nullptr;
    own_.resize(std::min<std::size_t>(header_.bytes, kDropped));
  }
}

void FramedSocket::write(std::span<OutgoingFrame> frames) {
  while (!frames.empty()) {
    std::array<iovec, 2 * kMostAtOnce> parts;
    std::size_t count_of_parts = 0;
    for (OutgoingFrame& frame : frames.first(std::min(frames.size(), kMostAtOnce))) {
      const std::size_t of_header = sizeof frame.header - std::min(frame.done, sizeof frame.header);
      const std::size_t of_payload = frame.done - (sizeof frame.header - of_header);
      parts[count_of_parts++] = {
          reinterpret_cast<std::byte*>(&frame.header) + (sizeof frame.header - of_header),
          of_header};
      parts[count_of_parts++] = {const_cast<std::byte*>(frame.payload()) + of_payload,
                                 frame.header.bytes - of_payload};
    }
    const ssize_t count = send_parts(socket_.get(), std::span(parts).first(count_of_parts));
    if (count < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      }
      throw system_error("The connection has ended", errno);
    }
    auto written = static_cast<std::size_t>(count);
    while (!frames.empty()) {
      OutgoingFrame& frame = frames.front();
      const std::size_t its = std::min(written, frame.bytes() - frame.done);
      frame.done += its;
      written -= its;
      if (!frame.is_written()) {
        break;
      }
      frames = frames.subspan(1);
    }
  }
}

void FramedSocket::finish_writing() noexcept { ::shutdown(socket_.get(), SHUT_WR); }

}  // namespace pydist
