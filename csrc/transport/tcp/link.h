// The way to one other process on the network: a few connections, over which all groups that both
// are in send their frames.
//
// Small frames go over the first connection, in order. Segments wait in one line for whichever
// connection can take the next one, so that the slowest does not decide. Sending never blocks: what
// the system does not take at once waits here, and is sent by whoever serves the network.
//
// Thread safe, but for what says that it is the server's: the thread that holds the right to serve
// the network (TcpNode).

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/tcp/framed_socket.h"

namespace pydist {

class Link {
 public:
  // Called once, by the server, when the process can't be reached any more: with the reason, in
  // words, empty where it has closed the connection as it does when it ends.
  using OnLoss = std::function<void(const std::string& why)>;

  // `peer` is the name of the process, `number` what sinks know it by. `wake` is called where
  // something waits to be sent.
  Link(std::string peer, std::uint64_t number, std::function<void()> wake, OnLoss on_loss);

  [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

  // Sends a frame; the payload is copied where it can't go at once. After a loss it does nothing.
  void send(const FrameHeader& header, std::span<const std::byte> payload = {});
  // The same for some that belong together, which take one call of the system and not several.
  void send(std::span<const Frame> frames);
  // Sends a small frame as soon as there is a connection for something else.
  void send_once_up(const FrameHeader& header);
  // Sends a segment, which stays where it is until `written` has counted it.
  void send_segment(const FrameHeader& header, const std::byte* data, Counter& written);
  // No segment of that group is needed any more where it is: those that have not been sent are
  // copied, since a rank that leaves has sent them.
  void release_segments(std::uint64_t group);

  // Whether anything can be sent.
  [[nodiscard]] bool is_up() const noexcept { return is_up_.load(std::memory_order_acquire); }
  [[nodiscard]] bool is_lost() const noexcept { return is_lost_.load(std::memory_order_acquire); }
  // Whether something waits for a connection that takes it.
  [[nodiscard]] bool has_to_send() const noexcept {
    return has_to_send_.load(std::memory_order_relaxed);
  }

  // -- for the server --------------------------------------------------------------------------
  // A connection that both ends have agreed on.
  void add(FileDescriptor socket);
  [[nodiscard]] const std::vector<std::unique_ptr<FramedSocket>>& sockets() const noexcept {
    return sockets_;
  }
  // Sends what can be sent.
  void flush();
  // Bytes that the other end's system has not got, of what was sent.
  [[nodiscard]] std::size_t untaken_bytes();
  // Reads what has come over all connections; returns whether anything did.
  bool receive(const FramedSocket::SinkOf& sink_of);
  // Whether it is over, and why: nothing as long as anything may come. The connections of a process
  // that ends end one after the other, and each may still hold what was sent before.
  [[nodiscard]] std::optional<std::string> end();
  // It will be over within a moment.
  [[nodiscard]] bool is_ending() const noexcept { return last_words_.has_value() || is_broken(); }
  // As FramedSocket::drop().
  void drop(const FrameSink& sink, std::optional<FrameKind> kind = {}) noexcept;
  // Gives the connections up. Where that is a loss, tells it.
  void lose(const std::string& why);
  // Nothing more is sent; what waits has been flushed, as far as that was possible.
  void finish_writing() noexcept;

 private:
  // Of one connection.
  struct Lane {
    FramedSocket* socket;
    std::deque<OutgoingFrame> frames;  // the first may be written in part
  };

  void send_now_or_later(std::span<OutgoingFrame> frames, bool is_segment);
  bool write_lane(std::size_t index);
  [[nodiscard]] bool is_broken() const noexcept {
    return is_broken_.load(std::memory_order_acquire);
  }
  void note_broken(const std::exception& error) noexcept;
  static void count(OutgoingFrame& frame) noexcept;

  const std::string peer_;
  const std::uint64_t number_;
  const std::function<void()> wake_;
  OnLoss on_loss_;
  std::vector<std::unique_ptr<FramedSocket>> sockets_;  // the server's
  std::optional<Deadline> last_words_;                  // once one has ended; the server's
  std::atomic<bool> is_up_{false};
  std::atomic<bool> is_lost_{false};
  std::atomic<bool> is_broken_{false};
  std::atomic<bool> has_to_send_{false};
  std::mutex mutex_;                    // of sending
  std::vector<Lane> lanes_;             // guarded by mutex_
  std::deque<OutgoingFrame> small_;     // before there is a connection; guarded by mutex_
  std::deque<OutgoingFrame> segments_;  // that no connection has begun; guarded by mutex_
  std::string broken_by_;               // guarded by mutex_
};

using LinkPtr = std::shared_ptr<Link>;

}  // namespace pydist
