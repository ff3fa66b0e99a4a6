// The collectives of one native group, in the order of submission: one runs, the rest wait.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "communicator/native/group_health.h"
#include "communicator/native/native_work.h"
#include "communicator/operation.h"
#include "health/long_wait.h"

namespace pydist {

// Thread safe.
class CollectiveQueue final : public WaitableDrivable {
 public:
  // Makes the state machine of an operation, which outlives it. Group::begin() has numbered it.
  // `is_posted`: AtOnce has begun it.
  using MakeTask = std::function<Task(const Operation& operation, bool is_posted)>;
  // What AtOnce takes.
  using MakeCall = std::function<Call(const Operation& operation)>;

  // Only the holder of the right to drive uses `group`. `runs_at_once` (see Note [At once]) is
  // false where the user has pinned another algorithm than run_shared_memory(). `fence_heap` keeps
  // the other ranks out of this rank's symmetric memory, see Note [Fence].
  CollectiveQueue(std::shared_ptr<ProgressThread> progress, std::shared_ptr<GroupHealth> health,
                  Group& group, MakeTask make_task, MakeCall make_call,
                  std::function<void()> fence_heap, bool runs_at_once);

  // Adds an operation; the progress thread or a waiter runs it when its turn comes.
  [[nodiscard]] WorkPtr submit(Operation operation, Deadline deadline) {
    return enqueue(std::move(operation), deadline, nullptr);
  }

  // Runs an operation on this thread when nothing is in front of it, otherwise submits it and
  // waits. Throws its error. An interruption fails the group. `timeout` is for an operation without
  // a deadline of its own; it counts once there is something to wait for.
  void run(Operation&& operation, std::chrono::nanoseconds timeout);
  // The same for an operation of a kind of its own: `make_task` instead of the queue's. It outlives
  // the call.
  void run_with(const MakeTask& make_task, Operation operation, Deadline deadline);

  [[nodiscard]] std::string diagnosis() override;

  // Ends everything that is under way with the group's failure. Call after the group has failed.
  void drain();

 protected:
  bool drive() override;
  [[nodiscard]] bool has_work() override { return pending_count_.load() != 0; }

 private:
  struct Pending {
    Pending(Operation the_operation, Deadline the_deadline, std::shared_ptr<Work> the_work,
            const MakeTask* the_make_task)
        : operation(std::move(the_operation)),
          deadline(the_deadline),
          work(std::move(the_work)),
          make_task(the_make_task) {}

    Operation operation;
    Deadline deadline;
    std::shared_ptr<Work> work;  // null while the caller runs it
    const MakeTask* make_task;   // null for the queue's
    std::optional<Execution> execution;
    std::optional<Journal::Ticket> ticket;  // once it has begun
    LongWait notice;
    bool is_posted = false;  // by AtOnce
    bool is_done = false;
    std::exception_ptr error;
  };

  WorkPtr enqueue(Operation operation, Deadline deadline, const MakeTask* make_task);
  [[nodiscard]] WorkPtr make_work();
  void wait_for(Work& work, OpKind kind);
  // Note [At once]. False: the operation, which then has begun if there is a ticket, goes on as any
  // other. Throws the group's failure.
  bool try_at_once(const Operation& operation, std::optional<Journal::Ticket>& ticket);
  // Fails the group, since an operation that had begun here has thrown and the ranks are out of
  // step. The caller is handling the operation's exception.
  void fail_begun(const std::optional<Journal::Ticket>& ticket);
  void run_here(Right right, std::unique_ptr<Pending> pending);
  [[nodiscard]] Journal::Ticket note_begin(const Operation& operation);
  [[nodiscard]] Pending* head();
  void start(Pending& pending);
  // Moves the head along; false when it has to wait.
  bool step(Pending& pending);
  // Throws what makes waiting vain: the group's failure, a lost peer, the deadline. Warns of a wait
  // that lasts.
  void check_hope(Pending& pending);
  // For people: "all_reduce #812 (bucket 7) of group 'world'", of the head.
  [[nodiscard]] std::string describe_head(const Operation& operation) const;
  void finish(Pending& pending, std::exception_ptr error);
  void show_awaiting_nobody() noexcept;
  // Note [Fence]
  // In collectives on symmetric memory ranks write into each other's. A rank whose operation fails
  // gives its buffers back, so nobody may write there any more. Each rank says so while it writes
  // (HeapWriting), and does not begin to once the group has failed. So it is enough to wait for
  // those who write just now. One that is stopped amid its writing may go on at any time: then this
  // rank leaves the shared memory, which others may write into, and keeps a copy at the same
  // addresses.
  void fence(const Pending& pending) noexcept;

  const std::shared_ptr<GroupHealth> health_;
  Group& group_;
  const MakeTask make_task_;
  const MakeCall make_call_;
  const std::function<void()> fence_heap_;
  const bool runs_at_once_;
  std::mutex mutex_;
  std::deque<std::unique_ptr<Pending>> queue_;  // guarded by mutex_
  std::atomic<std::size_t> pending_count_{0};   // of queue_
  Pending* running_here_ = nullptr;             // with the right to drive
  unsigned looks_ = 0;                          // with the right to drive
  bool has_fenced_ = false;                     // with the right to drive
  bool shows_awaited_ = false;                  // to peers; with the right to drive
  // For diagnosis(), which has no right to drive.
  std::atomic<int> waits_for_rank_{-1};
  std::atomic<std::uint64_t> waits_in_sequence_{0};
  std::atomic<OpKind> waits_in_kind_{OpKind::kBarrier};
};

}  // namespace pydist
