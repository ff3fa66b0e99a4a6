// The point-to-point messages of one native group that are under way.

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "communicator/native/group_health.h"
#include "communicator/native/native_work.h"
#include "communicator/operation.h"
#include "health/long_wait.h"
#include "transport/messages.h"

namespace pydist {

// Thread safe.
class MessageQueue final : public WaitableDrivable {
 public:
  MessageQueue(std::shared_ptr<ProgressThread> progress, std::shared_ptr<GroupHealth> health,
               Messages messages);

  // Starts a send or a receive. The work of a receive tells the source rank.
  [[nodiscard]] WorkPtr submit(Operation operation, Deadline deadline);
  // The same for a caller that waits for the work next, and so drives it: no thread is woken.
  [[nodiscard]] WorkPtr submit_awaited(Operation operation, Deadline deadline);

  // Runs a message on this thread that its sender need not wait with, where nothing is in front of
  // it, and a receive's has come or `may_wait` and it comes soon. False: nothing has happened, but
  // the buffer of a receive may have changed. Throws the group's failure where the ends differ.
  [[nodiscard]] bool try_at_once(const Operation& operation, bool may_wait);

  [[nodiscard]] std::string diagnosis() override;

  // Ends everything that is under way with the group's failure. Call after the group has failed.
  void drain();

 protected:
  bool drive() override;
  [[nodiscard]] bool has_work() override { return pending_count_.load() != 0; }

 private:
  struct Pending {
    Operation operation;
    Deadline deadline;
    std::shared_ptr<NativeWork> work;
    std::uint64_t number = 0;
    Journal::Ticket ticket = 0;
    LongWait notice = {};
  };
  using PendingList = std::list<Pending>;

  [[nodiscard]] bool try_with_right(const Operation& operation,
                                    std::optional<Journal::Ticket>& ticket, unsigned looks);
  void enqueue(Operation operation, Deadline deadline, std::shared_ptr<NativeWork> work);
  [[nodiscard]] std::shared_ptr<NativeWork> make_work();
  [[nodiscard]] Journal::Ticket note_begin(const Operation& operation, std::uint64_t number);
  void start_submitted();
  // Whether it has moved anything: then nobody has been given up.
  [[nodiscard]] bool check_hope();
  void show_awaited();
  void show_awaiting_nobody() noexcept;
  void finish_done();
  void fail_all(const std::exception_ptr& error);
  [[nodiscard]] std::string describe(const Pending& pending) const;

  const std::shared_ptr<GroupHealth> health_;
  std::mutex mutex_;
  PendingList submitted_;                      // guarded by mutex_
  std::atomic<std::size_t> pending_count_{0};  // of submitted_ and running_
  // With the right to drive:
  Messages messages_;
  PendingList running_;
  struct Done {
    PendingList::iterator pending;
    int peer;
  };
  std::vector<Done> done_;
  std::uint64_t started_ = 0;
  unsigned looks_ = 0;
  bool shows_awaited_ = false;  // to the peers, whom this rank waits for
  // For diagnosis(), which has no right to drive.
  std::atomic<int> waits_for_rank_{-1};
};

}  // namespace pydist
