// Who moves operations along: whoever waits for one, otherwise the progress thread.
//
// A Drivable is a set of operations that one thread at a time moves along: the collectives of a
// group, or its point-to-point messages. A caller that waits drives what it waits for by itself,
// with the lowest latency; the progress thread (one a process) takes over whatever nobody attends.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/engine_thread.h"
#include "base/fork.h"
#include "communicator/peers/drive_lock.h"
#include "communicator/work.h"
#include "health/doorbell.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {

class ProgressThread;

// How the progress thread learns of what is handed over to it.
enum class HandOver : std::uint8_t {
  kAtOnce,  // it is woken
  kSoon,    // it looks by itself, see Note [Handed over soon]
};

class Drivable : public std::enable_shared_from_this<Drivable> {
 public:
  Drivable(const Drivable&) = delete;
  Drivable& operator=(const Drivable&) = delete;
  virtual ~Drivable();

  // The right to drive.
  using Right = std::unique_lock<DriveLock>;

  // Takes the right to drive; empty where somebody else has it.
  [[nodiscard]] Right try_attend() { return Right(drive_lock_, std::try_to_lock); }
  // Waits for it.
  [[nodiscard]] Right attend() { return Right(drive_lock_); }

  // Drives until `is_finished`, or for about `longest`. For a caller that holds the right.
  template <typename Finished>
  void attend_until(Finished is_finished, std::chrono::nanoseconds longest);

  // For a caller that looks whether an operation is over. Drives once what the progress thread has
  // not been woken for, where nobody does.
  void drive_in_passing() {
    if (way_ == HandOver::kAtOnce) {
      return;
    }
    if (Right right = try_attend()) {
      drive();
      leave(std::move(right));
    }
  }

  // Gives the right back, calls the callbacks of finished operations, and leaves the unfinished
  // ones to the progress thread. Contains a sequentially consistent fence.
  void leave(Right right) {
    if (due_.empty()) {
      right.unlock();
    } else {
      give_back(std::move(right));
    }
    if (has_work()) {
      hand_over();
    }
  }

  // Leaves what there is to drive to the progress thread. Cannot fail after prepare().
  void hand_over();
  // The same for operations that nobody is going to wait for: the thread begins at once.
  void hand_over_unattended();
  // Makes sure that there is a thread to hand over to. Throws TransportError where none is to be
  // had: whoever submits calls it before anything is queued.
  void prepare();

 protected:
  explicit Drivable(std::shared_ptr<ProgressThread> progress, HandOver way = HandOver::kAtOnce);

  // Whether a waiter may spin: where every rank has a core of its own.
  [[nodiscard]] bool may_spin() const noexcept;

  // Moves everything along that can be moved; returns whether anything was. Called with the right
  // to drive. Errors of operations end in their works; this does not throw.
  virtual bool drive() = 0;

  // Whether anything is left to drive. Any thread; see is_attended_ for the order of memory.
  [[nodiscard]] virtual bool has_work() = 0;

  // Finishes an operation from within drive(): its waiters wake now, its callbacks are called by
  // leave(), when nobody drives.
  void settle(Work& work, std::exception_ptr error, int source_rank = -1);

 private:
  friend class ProgressThread;

  // leave() for the progress thread, which goes on with the unfinished operations.
  void give_back(Right right);

  std::shared_ptr<ProgressThread> progress_;
  const HandOver way_;
  DriveLock drive_lock_;
  std::vector<Work::Notice> due_;  // guarded by drive_lock_
  // Set while a waiter drives: the progress thread keeps away. A waiter clears this and then looks
  // for work that it has to hand over; a submitter adds work and then hands it over to the progress
  // thread, which looks at this. Sequentially consistent, like the counts behind has_work(), so
  // that one of the two sees the other.
  std::atomic<bool> is_attended_{false};
};

// Note [Handed over soon]
// To wake a thread takes several times as long as a small message, and most messages are waited for
// right after they were started, by a thread that drives them. So nobody wakes the thread for them
// again while it naps: as long as such work comes, it looks for it from time to time, and the more
// seldom the longer nobody needs it.

// Thread safe. The thread keeps the object alive until stop().
class ProgressThread : public std::enable_shared_from_this<ProgressThread> {
 public:
  // `doorbell` is what peers ring. `spin` is how long a waiting caller spins before it sleeps.
  ProgressThread(std::shared_ptr<Doorbell> doorbell, std::chrono::nanoseconds spin);
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // Ends the thread and drops the operations that were handed over to it. Idempotent.
  void stop() noexcept;

  void set_spin(std::chrono::nanoseconds spin) noexcept {
    spin_ns_.store(spin.count(), std::memory_order_relaxed);
  }
  [[nodiscard]] std::chrono::nanoseconds spin() const noexcept {
    return std::chrono::nanoseconds(spin_ns_.load(std::memory_order_relaxed));
  }
  [[nodiscard]] Doorbell& doorbell() noexcept { return *doorbell_; }
  // Wakes all sleepers of this process, wherever they sleep. Call after the change is published.
  void wake_all() noexcept {
    doorbell_->ring();
    if (TcpNode* const network = polled_network_.load(std::memory_order_acquire)) {
      network->wake_sleeper();
    }
  }

  // What comes from other hosts comes over `network`, which whoever waits polls from now on.
  void set_network(std::shared_ptr<TcpNode> network);
  // `stays` as for TcpNode::poll(). While this thread has work, what comes for that must not wait
  // for a caller who polls and then goes its way: the network's thread serves, too.
  [[nodiscard]] bool poll_network(bool stays) {
    TcpNode* const network = polled_network_.load(std::memory_order_acquire);
    return network != nullptr &&
           network->poll(stays && !is_driving_.load(std::memory_order_relaxed));
  }
  // The caller polls no more, for now.
  void end_polling() noexcept {
    if (TcpNode* const network = polled_network_.load(std::memory_order_acquire)) {
      if (is_driving_.load(std::memory_order_relaxed)) {
        network->hand_over();  // a waiter that has slept in the network has kept its thread away
      } else {
        network->end_polling();
      }
    }
  }
  // In which a waiter sleeps. Null where that is no way to sleep: who shares this process's host
  // rings its doorbell.
  [[nodiscard]] TcpNode* network_to_sleep_in() const noexcept {
    return has_peers_here_.load(std::memory_order_relaxed)
               ? nullptr
               : polled_network_.load(std::memory_order_acquire);
  }
  // A process of this host may ring the doorbell from now on.
  void note_peer_here() noexcept { has_peers_here_.store(true, std::memory_order_relaxed); }
  // The caller goes to sleep.
  void leave_network() noexcept {
    if (TcpNode* const network = polled_network_.load(std::memory_order_acquire)) {
      network->hand_over();
    }
  }

  // Keeps room for one more Drivable, so that to hand it over takes no memory.
  void enroll();
  void dismiss() noexcept;
  // Starts the thread, if it has not been. Throws TransportError where that fails.
  void start();
  void hand_over(const std::shared_ptr<Drivable>& drivable, HandOver way);

 private:
  void run();
  // Waits for news, or naps.
  void rest(std::unique_lock<std::mutex>& lock);
  // Waits for something to drive; false when it is time to stop.
  bool take_work(std::vector<std::shared_ptr<Drivable>>& drivables);

  const Birth birth_;
  const std::shared_ptr<Doorbell> doorbell_;
  std::atomic<std::int64_t> spin_ns_;
  std::mutex mutex_;
  std::condition_variable has_news_;
  bool is_stopping_ = false;                            // guarded by mutex_
  std::size_t enrolled_ = 0;                            // guarded by mutex_
  std::vector<std::shared_ptr<Drivable>> handed_over_;  // guarded by mutex_
  bool came_soon_ = false;                              // since the last nap; guarded by mutex_
  bool is_napping_ = false;                             // guarded by mutex_
  std::chrono::microseconds nap_;     // how long the next one is; guarded by mutex_
  EngineThread thread_;               // guarded by mutex_
  std::shared_ptr<TcpNode> network_;  // guarded by mutex_; set once
  std::atomic<TcpNode*> polled_network_{nullptr};
  std::atomic<bool> has_peers_here_{false};
  std::atomic<bool> is_driving_{false};  // what has been handed over
  std::atomic<bool> has_thread_{false};  // for start() alone, which is called often
};

inline bool Drivable::may_spin() const noexcept { return progress_->spin().count() != 0; }

// A sleeper looks around this often even if nobody rings: a deadline may have passed, and a ring
// that was lost to a crash must not cost more than this.
inline constexpr std::chrono::milliseconds kLongestSleep{50};

// Where ranks share cores, a waiter offers its core so many times before it sleeps: a switch to a
// rank that can run costs less than a sleep and a wake-up.
inline constexpr unsigned kYields = 16;

template <typename Finished>
void Drivable::attend_until(Finished is_finished, std::chrono::nanoseconds longest) {
  is_attended_.store(true, std::memory_order_relaxed);
  Doorbell& doorbell = progress_->doorbell();
  // Set after the first spin: most waits are over before it would be worth a look at the clock.
  std::optional<Deadline> end;
  while (true) {
    // Spin: cheap looks first, the clock only now and then.
    const auto spin = progress_->spin();
    // Where ranks share cores, a wait that has come to a first sleep (there is an end) is mostly
    // sleep from then on. To take the network for each short look between two sleeps, and to hand
    // it over again, would wake its thread twice.
    const bool stays = spin.count() != 0 || !end;
    Deadline::Clock::time_point spin_end{};
    bool has_spin_end = false;
    bool is_over = false;
    for (unsigned turn = 0;; ++turn) {
      const bool moved = drive() || progress_->poll_network(stays);
      is_over = is_finished();
      if (is_over) {
        break;
      }
      if (moved) {
        has_spin_end = false;
        turn = 0;
        continue;
      }
      if (spin.count() == 0) {
        // The core may belong to the very rank that is waited for.
        if (turn == kYields) {
          break;
        }
        std::this_thread::yield();
        continue;
      }
      spin_pause();
      if (turn % 32 == 31) {
        const auto now = Deadline::Clock::now();
        if (!has_spin_end) {
          spin_end = now + spin;
          has_spin_end = true;
        } else if (now >= spin_end) {
          break;
        }
      }
    }
    if (is_over) {
      break;
    }
    if (!end) {
      end = Deadline::in(longest);
    }
    if (end->has_passed()) {
      break;
    }
    const auto sleep_in = [&](auto& sleeper) {
      if (!drive() && !is_finished()) {
        sleeper.sleep(end->remaining(kLongestSleep));
      }
    };
    if (TcpNode* const network = progress_->network_to_sleep_in()) {
      if (TcpNode::Sleeper sleeper(*network); sleeper.may_sleep()) {
        sleep_in(sleeper);
        continue;
      }
    }
    progress_->leave_network();
    Sleeper sleeper(doorbell);
    sleep_in(sleeper);
  }
  progress_->end_polling();
  is_attended_.store(false);
}

}  // namespace pydist
