// Handing shared segments from process to process on one host.
//
// Every process runs one SegmentServer: a datagram socket with a random name in the abstract Unix
// namespace. A peer asks it for a segment by key and receives the file descriptor, together with
// the server's process id as the kernel sees it. That an answer comes at all is the proof that
// both are on one host (and in one network namespace); two hosts with the same boot id, or a
// LOCAL_WORLD_SIZE that lies, do not pass it. Only processes of the same user are answered.
//
// The protocol has no state: a request that is lost, or comes before the offer, is asked again.

#pragma once

#include <sys/types.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "memory/file_descriptor.h"

namespace pydist {

// Thread safe.
class SegmentServer {
 public:
  SegmentServer();

  // The name to publish to peers.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }

  // Becomes readable when a request waits.
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

  // Hands out a duplicate of `fd` to every process that asks for `key`, until withdrawn.
  void offer(const std::string& key, int fd);
  void withdraw(const std::string& key);

  // Answers requests that wait, as many as a turn may have; never blocks.
  void serve();

 private:
  FileDescriptor socket_;
  std::string address_;
  std::mutex mutex_;
  std::map<std::string, FileDescriptor> offers_;  // guarded by mutex_
};

// An offer that is withdrawn when this object goes.
class SegmentOffer {
 public:
  SegmentOffer(SegmentServer& server, std::string key, int fd)
      : server_(&server), key_(std::move(key)) {
    server_->offer(key_, fd);
  }
  SegmentOffer(SegmentOffer&& other) noexcept
      : server_(std::exchange(other.server_, nullptr)), key_(std::move(other.key_)) {}
  SegmentOffer& operator=(SegmentOffer&&) = delete;
  ~SegmentOffer() {
    if (server_ != nullptr) {
      server_->withdraw(key_);
    }
  }

 private:
  SegmentServer* server_;
  std::string key_;
};

struct FetchedSegment {
  FileDescriptor fd;
  pid_t server_pid = 0;  // 0 where the server's process is invisible from here
};

// Asks the server at `address` for `key`. Throws TransportError at once where no such server is
// reachable from here, or this process can have no more descriptors; Timeout when the deadline
// passes before the key is offered.
[[nodiscard]] FetchedSegment fetch_segment(const std::string& address, const std::string& key,
                                           Deadline deadline);

// A name that no other process has: 128 random bits in hexadecimal.
[[nodiscard]] std::string random_token();

}  // namespace pydist
