// One connection of a link: reads frames to where they belong, and writes them.
//
// Reading is for one thread at a time, and so is writing; the two are independent.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fork.h"
#include "health/condition.h"
#include "memory/file_descriptor.h"
#include "transport/tcp/frame.h"

namespace pydist {

// A frame that is to be written.
struct OutgoingFrame {
  FrameHeader header;
  std::vector<std::byte> copy;      // the payload, where the frame keeps it
  const std::byte* data = nullptr;  // the payload, where it lies elsewhere and stays there
  Counter* written = nullptr;       // counts it, once nobody needs `data` any more
  std::size_t done = 0;             // bytes that are written, of header and payload

  [[nodiscard]] const std::byte* payload() const noexcept {
    return data != nullptr ? data : copy.data();
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return sizeof header + header.bytes; }
  [[nodiscard]] bool is_written() const noexcept { return done == bytes(); }
};

class FramedSocket {
 public:
  // The sink of a group; null where there is none (any more): the frame is dropped.
  using SinkOf = std::function<FrameSink*(std::uint64_t group)>;

  // `sender`: the process at the other end, as sinks know it.
  FramedSocket(FileDescriptor socket, std::uint64_t sender);

  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

  // What the server has asked the system to tell of it; nothing before it has asked at all.
  std::optional<std::uint32_t> watched_events;

  // Reads what has come, until there is no more or a large frame is whole, which is then best
  // worked on while it is in the cache. What it leaves, the system tells of. Returns whether
  // anything came.
  bool receive(const SinkOf& sink_of) noexcept;
  // Everything has been read that will ever come.
  [[nodiscard]] bool has_ended() const noexcept { return has_ended_; }
  // Why, in words; empty where the other end has closed the connection between two frames.
  [[nodiscard]] const std::string& end() const noexcept { return why_ended_; }
  // What is still to come of a frame for `sink`, of that kind or of any, is dropped.
  void drop(const FrameSink& sink, std::optional<FrameKind> kind = {}) noexcept;

  // Writes frames, one after the other, as far as the system takes them. Throws TransportError
  // where the connection has ended.
  void write(std::span<OutgoingFrame> frames);
  // Nothing more will be written.
  void finish_writing() noexcept;

 private:
  bool receive_frames(const SinkOf& sink_of);
  [[nodiscard]] std::size_t buffered() const noexcept { return end_ - begin_; }
  bool fill();
  void begin_frame(const SinkOf& sink_of);
  bool continue_payload();
  void read_payload();
  [[nodiscard]] bool note_read(std::ptrdiff_t count);

  FileDescriptor socket_;
  const NotInherited not_inherited_;  // goes before the socket is closed
  const std::uint64_t sender_;
  // Headers, and whatever small comes with them.
  std::array<std::byte, std::size_t{16} << 10> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  bool is_in_frame_ = false;
  FrameHeader header_;
  FrameSink* sink_ = nullptr;    // null: the frame is dropped
  std::byte* target_ = nullptr;  // of the payload
  std::vector<std::byte> own_;   // payloads that no sink has a place for
  std::size_t got_ = 0;          // bytes of the payload
  bool is_drained_ = false;      // nothing more has come, as far as is known
  bool has_ended_ = false;
  std::string why_ended_;
};

}  // namespace pydist
