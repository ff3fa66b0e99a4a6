#include "communicator/peers/wait_loop.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace pydist {
namespace {

constexpr std::chrono::microseconds kShortestNap{100};
constexpr std::chrono::microseconds kLongestNap{1000};

}  // namespace

void Drivable::settle(Work& work, std::exception_ptr error, int source_rank) {
  Work::Notice notice = work.settle(std::move(error), source_rank);
  if (!notice.is_empty()) {
    due_.push_back(std::move(notice));
  }
}

void Drivable::give_back(Right right) {
  std::vector<Work::Notice> due;
  due.swap(due_);
  right.unlock();
  for (const Work::Notice& notice : due) {
    notice.deliver();
  }
}

Drivable::Drivable(std::shared_ptr<ProgressThread> progress, HandOver way)
    : progress_(std::move(progress)), way_(way) {
  progress_->enroll();
}

Drivable::~Drivable() { progress_->dismiss(); }

void Drivable::hand_over() { progress_->hand_over(shared_from_this(), way_); }

void Drivable::hand_over_unattended() {
  progress_->hand_over(shared_from_this(), HandOver::kAtOnce);
}

void Drivable::prepare() { progress_->start(); }

ProgressThread::ProgressThread(std::shared_ptr<Doorbell> doorbell, std::chrono::nanoseconds spin)
    : doorbell_(std::move(doorbell)), spin_ns_(spin.count()), nap_(kShortestNap) {}

void ProgressThread::stop() noexcept {
  if (birth_.is_inherited()) {
    return;  // the thread does not exist here, and may have held the lock
  }
  EngineThread thread;
  std::vector<std::shared_ptr<Drivable>> dropped;
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    thread = std::move(thread_);
    dropped.swap(handed_over_);
    has_news_.notify_all();
  }
  wake_all();
  thread.join();
}

void ProgressThread::set_network(std::shared_ptr<TcpNode> network) {
  const std::lock_guard lock(mutex_);
  network_ = std::move(network);
  polled_network_.store(network_.get(), std::memory_order_release);
}

void ProgressThread::enroll() {
  const std::lock_guard lock(mutex_);
  handed_over_.reserve(enrolled_ + 1);
  ++enrolled_;
}

void ProgressThread::dismiss() noexcept {
  if (!birth_.is_inherited()) {
    const std::lock_guard lock(mutex_);
    --enrolled_;
  }
}

void ProgressThread::start() {
  if (has_thread_.load(std::memory_order_relaxed)) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (thread_.has_started() || is_stopping_) {
    return;
  }
  thread_ = EngineThread("pydist-progress", [self = shared_from_this()] { self->run(); });
  has_thread_.store(true, std::memory_order_relaxed);
}

void ProgressThread::hand_over(const std::shared_ptr<Drivable>& drivable, HandOver way) {
  const std::lock_guard lock(mutex_);
  if (std::find(handed_over_.begin(), handed_over_.end(), drivable) == handed_over_.end()) {
    handed_over_.push_back(drivable);
  }
  if (way == HandOver::kSoon) {
    came_soon_ = true;
    if (is_napping_) {
      return;
    }
  }
  has_news_.notify_all();
  wake_all();
}

void ProgressThread::run() {
  std::vector<std::shared_ptr<Drivable>> drivables;
  while (take_work(drivables)) {
    is_driving_.store(true, std::memory_order_relaxed);
    const auto drive_all = [&drivables] {
      bool moved = false;
      for (const auto& drivable : drivables) {
        if (auto right = drivable->try_attend()) {
          moved = drivable->drive() || moved;
          drivable->give_back(std::move(right));
        }
      }
      return moved;
    };
    if (drive_all()) {
      end_polling();  // it may have sent more than goes at once
    } else if (!poll_network(/*stays=*/false)) {
      leave_network();
      Sleeper sleeper(*doorbell_);
      if (!drive_all()) {
        sleeper.sleep(kLongestSleep);
      }
    }
  }
}

void ProgressThread::rest(std::unique_lock<std::mutex>& lock) {
  is_driving_.store(false, std::memory_order_relaxed);
  if (!std::exchange(came_soon_, false)) {
    nap_ = kShortestNap;
    has_news_.wait(lock);
    return;
  }
  is_napping_ = true;
  has_news_.wait_for(lock, nap_);
  is_napping_ = false;
  nap_ = std::min(2 * nap_, kLongestNap);
}

bool ProgressThread::take_work(std::vector<std::shared_ptr<Drivable>>& drivables) {
  // The last reference to a Drivable may be the last one to everything that it needs, this object's
  // owner included. So no reference is dropped under the lock.
  drivables.clear();
  std::vector<std::shared_ptr<Drivable>> dropped;
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    // This thread leaves alone operations that are done, and those that a waiter drives: a waiter
    // hands over what it does not finish.
    const auto ours = std::partition(
        handed_over_.begin(), handed_over_.end(), [](const std::shared_ptr<Drivable>& drivable) {
          return !drivable->is_attended_.load() && drivable->has_work();
        });
    dropped.insert(dropped.end(), std::make_move_iterator(ours),
                   std::make_move_iterator(handed_over_.end()));
    handed_over_.erase(ours, handed_over_.end());
    if (!handed_over_.empty()) {
      drivables = handed_over_;
      nap_ = kShortestNap;
      return true;
    }
    if (dropped.empty()) {
      rest(lock);
      continue;
    }
    lock.unlock();
    dropped.clear();
    lock.lock();
  }
  return false;
}

}  // namespace pydist
