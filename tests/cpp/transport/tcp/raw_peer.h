// The other end of a connection, as a test plays it: it sends whatever bytes it likes.

#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory/file_descriptor.h"
#include "memory/job_secret.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/socket_address.h"

namespace pydist::testing {

// Two connected stream sockets that do not block: the engine's end, and the test's. Each takes
// about `buffer_bytes` that the other end has not read; 0: what the system gives.
struct SocketPair {
  explicit SocketPair(int buffer_bytes = 0);

  FileDescriptor engine;
  FileDescriptor test;
};

// Sends what the system takes at once; returns how much that was.
std::size_t send_some(int socket, std::string_view bytes);
// Sends all of it; false where the other end has closed the connection, or takes nothing for long.
bool send_all(int socket, std::string_view bytes);
// What has come by now, up to `most` bytes.
[[nodiscard]] std::string receive_some(int socket, std::size_t most = std::size_t{1} << 20);
// Waits for so many bytes; returns fewer where the other end has closed, or nothing comes for long.
[[nodiscard]] std::string receive_all(int socket, std::size_t bytes);
// Whether the system says that there is something to read, the end included.
[[nodiscard]] bool is_readable(int socket, int wait_ms = 0);
// Waits until the other end has closed the connection, and reads what comes before. False where it
// does not for long.
[[nodiscard]] bool is_closed_soon(int socket);

// Looks again and again whether `condition` holds; false where it does not for long.
[[nodiscard]] bool eventually(const std::function<bool()>& condition);

// As frames travel; `header.bytes` is set.
[[nodiscard]] std::string frame_text(FrameHeader header, std::string_view payload = {});

// Connects, blocking; the socket does not block from then on. When it closes, the system forgets
// the connection at once, so that there may be many.
[[nodiscard]] FileDescriptor connect_raw(const SocketAddress& address);
// Connects, and proves to be `meeters.dialer`; no descriptor where the other end does not agree.
[[nodiscard]] FileDescriptor connect_as(const Meeters& meeters, const JobSecret& secret,
                                        const SocketAddress& address);

[[nodiscard]] std::size_t descriptors_in_use();

// Takes frames down.
class RecordingSink final : public FrameSink {
 public:
  struct Frame {
    FrameHeader header;
    std::string payload;
    std::uint64_t sender;
  };

  // Called before a frame is taken down.
  std::function<void(const FrameHeader&)> on_place;
  std::function<void(const Frame&)> on_take;
  // Whether payloads go to memory of this sink.
  bool has_place = false;
  std::vector<Frame> frames;
  std::vector<std::uint64_t> lost;

  [[nodiscard]] std::byte* place(const FrameHeader& header, std::uint64_t sender) override;
  void take(const FrameHeader& header, const std::byte* payload, std::uint64_t sender) override;
  void lose(std::uint64_t sender) override { lost.push_back(sender); }

 private:
  std::vector<std::byte> place_;
};

}  // namespace pydist::testing
