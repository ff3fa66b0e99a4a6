#include "collectives/group.h"

#include <utility>

namespace pydist {

Group::Group(int rank, int size, GroupSegment segment, std::vector<Doorbell*> doorbells,
             const SymmetricHeap& heap, Announcer* announcer,
             std::optional<std::size_t> one_shot_bytes, Tuning* tuning,
             std::vector<const HeapWindow*> windows, std::vector<ProcessMemory> processes)
    : rank_(rank),
      size_(size),
      segment_(std::move(segment)),
      doorbells_(std::move(doorbells)),
      heap_(heap),
      announcer_(announcer),
      one_shot_bytes_(one_shot_bytes),
      tuning_(tuning),
      windows_(std::move(windows)),
      processes_(std::move(processes)) {}

Condition Group::reached_by_all(CounterOf counter, std::uint64_t target) const noexcept {
  return {segment_.control(0).*counter, segment_.control_stride(), size_, rank_, target};
}

std::uint64_t Group::least(CounterOf counter, std::uint64_t own) const noexcept {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) {
      own = std::min(own, (segment_.control(rank).*counter).load(std::memory_order_acquire));
    }
  }
  return own;
}

Condition Group::may_post() noexcept {
  if (sequence_ <= known_completed_ + kPostDepth) {
    return {};
  }
  // The caller waits for it before anything else happens, so it may be noted at once.
  known_completed_ = sequence_ - kPostDepth;
  return reached_by_all(&RankControl::completed, known_completed_);
}

void Group::publish_post(std::size_t eager_bytes) {
  if (announcer_ == nullptr) {
    publish_post_quietly();
    notify();
    return;
  }
  publish_post_on_host(eager_bytes);
  announcer_->send_post(sequence_, round_);
}

void Group::publish_post_on_host(std::size_t eager_bytes) {
  my_detail().eager_bytes = eager_bytes;
  publish_post_quietly();
  notify();
}

void Group::publish_passed_on() noexcept {
  segment_.control(rank_).passed_on.store(sequence_, std::memory_order_release);
  notify();
}

std::uint64_t Group::posted_count(int rank, int block) const noexcept {
  const Post& posted = post(rank);
  return (posted.flags & Post::kRagged) != 0
             ? segment_.block_counts(rank, slot())[static_cast<std::size_t>(block)]
             : posted.count;
}

void Group::complete() noexcept {
  complete_quietly();
  notify();
}

Condition Group::may_deposit(std::uint64_t round) noexcept {
  if (round < known_consumed_ + kTransitSlots) {
    return {};
  }
  known_consumed_ = round + 1 - kTransitSlots;
  return reached_by_all(&RankControl::consumed, known_consumed_);
}

void Group::prepare_transit() {
  if (!has_transit_) {
    segment_.reserve_transit(rank_);
    if (may_exchange_transits()) {
      segment_.reserve_transit(1 - rank_);
    }
    has_transit_ = true;
  }
}

void Group::publish(CounterOf counter, std::uint64_t round) noexcept {
  publish_quietly(counter, round);
  notify();
}

Condition Group::done_by(CounterOf counter, int rank, std::uint64_t round) const noexcept {
  return {segment_.control(rank).*counter, rank, round + 1};
}

const std::byte* Group::arrived(int rank, std::uint64_t round, std::size_t bytes) const noexcept {
  const RankControl::Arrival& arrival = segment_.control(rank).arrivals[round % kTransitSlots];
  return arrival.round == round && arrival.bytes == bytes ? segment_.transit(rank, round) : nullptr;
}

Condition Group::done_by_all(CounterOf counter, std::uint64_t round) const noexcept {
  return reached_by_all(counter, round + 1);
}

void Group::notify() noexcept {
  if (size_ == 1) {
    return;
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_after_fence();
}

}  // namespace pydist
