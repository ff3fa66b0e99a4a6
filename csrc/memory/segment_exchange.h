// Handing shared segments from process to process on one host.
//
// Every process runs one SegmentServer: a listening socket with a random name in the abstract Unix
// namespace. A peer connects to it, asks for a segment by key, and receives the file descriptor on
// that connection; the kernel says whose process listens. That an answer comes at all is the proof
// that both are on one host (and in one network namespace); two hosts with the same boot id, or a
// LOCAL_WORLD_SIZE that lies, do not pass it.
//
// Note [Neighbours]
// Any user of the machine can see the sockets, connect to them, and publish sockets of his own
// under a rank's name in the job's store. So nobody is trusted by where he is. Both sides must be
// of one user, as the kernel sees them, and know the secret of the offer (JobSecret): a request
// carries a digest of the server's address, a random number and the key, so it serves nobody at
// another server, and an answer one that only holds for this request. The user's number alone would
// not do: root of another container may have the same. An answer goes to the end of the connection
// that has asked, and to nobody who comes after it.
//
// A connection is for one request, and is closed after the answer, or where there is none to come.
// The server keeps some connections whose request has yet to come, or comes before the offer: on a
// busy machine an asker may lose its core between connecting and asking. It keeps few, and drops
// those that are too old when it serves next, since each takes a descriptor; who is turned away
// asks again on another connection.

#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "memory/file_descriptor.h"
#include "memory/job_secret.h"

namespace pydist {

// Thread safe.
class SegmentServer {
 public:
  SegmentServer();

  // The name to publish to peers.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }

  // Becomes readable when there is something to serve.
  [[nodiscard]] int fd() const noexcept { return ready_.get(); }

  // Hands out a duplicate of `fd` to every process that asks for `key` and knows `secret`, until
  // withdrawn.
  void offer(const std::string& key, int fd, const JobSecret& secret);
  void withdraw(const std::string& key);

  // Answers requests whose segment is offered, as many as a turn may have; never blocks. Requests
  // that come earlier are answered by offer().
  void serve();

 private:
  struct Offer {
    FileDescriptor fd;
    JobSecret secret;
  };

  struct Request {
    std::string nonce;
    std::string key;
    std::string signature;
  };

  struct Caller {
    FileDescriptor connection;
    std::optional<Request> request;  // once it has come
    Deadline patience;
  };
  using Callers = std::map<int, Caller>;  // by descriptor

  enum class Outlook { kWaits, kOver };

  [[nodiscard]] static std::optional<Request> parse(const std::string& text);

  // With mutex_.
  [[nodiscard]] FileDescriptor accept();
  void accept_callers();
  [[nodiscard]] Outlook hear(Caller& caller);
  [[nodiscard]] Outlook answer(const Caller& caller);
  void keep(Caller& caller);
  Callers::iterator forget(Callers::iterator caller);

  FileDescriptor socket_;
  FileDescriptor ready_;  // an epoll of the socket and of the callers
  std::string address_;
  std::mutex mutex_;
  std::map<std::string, Offer> offers_;  // guarded by mutex_
  Callers callers_;                      // guarded by mutex_
  FileDescriptor spare_;  // to accept with where there is no other; guarded by mutex_
};

// An offer that is withdrawn when this object goes.
class SegmentOffer {
 public:
  SegmentOffer(SegmentServer& server, std::string key, int fd, const JobSecret& secret)
      : server_(&server), key_(std::move(key)) {
    server_->offer(key_, fd, secret);
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
  pid_t server_pid = 0;  // that listens; 0 where it is invisible from here
};

// Asks the server at `address` for `key`, which is offered to those who know `secret`, as soon as
// it is made: whoever needs several segments asks for all of them before it awaits the first.
class SegmentRequest {
 public:
  SegmentRequest(std::string address, std::string key, const JobSecret& secret);

  // To call once. Throws TransportError at once where no such server is reachable from here, or
  // this process can have no more descriptors; Timeout when the deadline passes before an answer
  // comes. `check_hope`, where given, is called every 20 ms or so, and throws to end the wait.
  [[nodiscard]] FetchedSegment await(Deadline deadline,
                                     const std::function<void()>& check_hope = nullptr);

 private:
  // Throws TransportError.
  void ask();
  // What comes before the connection ends, or has been open without an answer for too long.
  [[nodiscard]] FetchedSegment hear(const std::function<void()>& require_hope);

  std::string address_;
  std::string key_;
  JobSecret secret_;
  std::string nonce_;
  FileDescriptor connection_;  // with the request in it; none: it has to be asked again
};

[[nodiscard]] inline FetchedSegment fetch_segment(
    const std::string& address, const std::string& key, const JobSecret& secret, Deadline deadline,
    const std::function<void()>& check_hope = nullptr) {
  return SegmentRequest(address, key, secret).await(deadline, check_hope);
}

}  // namespace pydist
