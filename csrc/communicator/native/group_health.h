// Whether a group is sound, why not, and who is to blame.
//
// The first rank that meets an error writes it into the group's shared memory, on every host; every
// waiter of the group, on every rank, finds it there. Who waits in vain learns it here: from a
// peer's death, its departure, or a deadline, together with a sentence that says where the peer is.
// Thread safe.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/op_kind.h"
#include "collectives/group_segment.h"
#include "communicator/peer_news.h"
#include "communicator/peers/endpoint.h"
#include "communicator/peers/remote_ranks.h"
#include "health/known_processes.h"
#include "health/long_wait.h"

namespace pydist {

class GroupHealth {
 public:
  // `long_wait`: how long an operation may last before the log tells for whom it waits. `remote`:
  // null where all ranks are on one host.
  GroupHealth(std::string name, int rank, std::shared_ptr<Endpoint> endpoint, GroupSegment segment,
              std::vector<PeerPtr> peers, std::chrono::nanoseconds long_wait,
              std::shared_ptr<RemoteRanks> remote = nullptr);

  // -- the group's error --------------------------------------------------------------------
  // Cheap: whether failure() would return anything.
  [[nodiscard]] bool has_failed() const noexcept {
    return has_left_.load(std::memory_order_relaxed) || segment_.failure().is_set();
  }
  // The group's error, null while it is sound.
  [[nodiscard]] std::exception_ptr failure();
  // Fails the group, here and on every other rank. The first error wins.
  void fail(ErrorKind kind, const std::string& message, const Blame& blame = {}) noexcept;
  // As fail(), for an exception that was thrown here: tells the peers on which rank.
  void fail(const std::exception_ptr& error) noexcept;
  // The caller gives the buffers of an operation back that has failed, wherever it did. Nothing is
  // sent from them any more.
  void release_buffers() noexcept;
  // Fails the group on this rank alone, and tells the peers that the rank is gone.
  void leave() noexcept;
  // Sets what leave() tells the peers: Absence::done.
  void set_farewell(std::uint64_t done) noexcept;

  // -- the state of peers -------------------------------------------------------------------
  struct Loss {
    std::string what;  // "rank 3 (pid 71 on host b) has died"
    Blame blame;
  };
  // What makes waiting for `rank` vain: it has left, or any rank of the group has crashed. Nothing
  // while there is hope. `rank` may be -1 for anybody.
  [[nodiscard]] std::optional<Loss> why_vain(int rank) const;
  // As PeerNews::absence().
  [[nodiscard]] std::optional<Absence> absence() const;
  // As PeerNews::not_begun().
  [[nodiscard]] std::vector<int> not_begun(std::uint64_t fingerprint, std::uint64_t number) const;
  // "rank 3 (pid 71 on host b)".
  [[nodiscard]] std::string who(int rank) const;
  // For those who make a group with it.
  [[nodiscard]] KnownProcess known(int rank) const;
  // Once the group has failed: waits until no other rank writes into symmetric memory. False where
  // one does not end that, because it is stopped, or within `patience`.
  [[nodiscard]] bool wait_for_heap_writers(std::chrono::nanoseconds patience);

  // Of one rank of this group.
  [[nodiscard]] Blame blame(int rank, std::string cause) const;

  // Note [Who keeps all waiting]
  // A rank that is waited for may itself only wait for another one, as the neighbours in a ring do.
  // Every process shows on its page whom it waits for, in an operation of any group or to make one.
  // From there the way leads on, to a rank that waits for nobody of this group, or that is stopped
  // or shows no sign of life, whatever it waited for then. Where the way leads back to where it has
  // been and all are well, nobody in particular is to blame: it ends at the first rank that waits
  // elsewhere, or stays at the rank that it began with.
  struct Keeper {
    int rank;
    std::string way;    // "it waits for rank 1, which waits for rank 2. "; empty where it is direct
    std::string cause;  // in words, for Blame
  };
  [[nodiscard]] Keeper keeper_behind(int rank) const;
  // Shows the peers whom this rank waits for.
  void show_awaited(int rank) noexcept {
    const ProcessPage& page = *peers_[static_cast<std::size_t>(rank)]->page;
    endpoint_->page().awaited.set(fingerprint_, rank, page.number.load(std::memory_order_relaxed));
  }
  void show_awaiting_nobody() noexcept { endpoint_->page().awaited.clear(); }

  // Note [A circle of waits]
  // Two ranks that call collectives of groups A and B in opposite orders wait for each other: one
  // in A, the other in B. Neither goes on, unless another thread of one of them calls what the
  // other waits for. Nobody can know that no thread will. So a circle is logged at once, but ends
  // in a Timeout like any other wait.

  // Whether the way from `rank`, which this one has waited for, leads to where it has been, at
  // least once through another group since, and all have waited for a while. It is followed among
  // the ranks of this group.
  [[nodiscard]] bool leads_into_circle(int rank) const;

  // Where a rank is, seen from collective `sequence`: "never entered all_reduce #812; it is in
  // all_reduce #811 since 5.2 s".
  [[nodiscard]] std::string where(int rank, OpKind kind, std::uint64_t sequence) const;
  // What the rank does, from its journal: "is in all_reduce #811 since 5.2 s".
  [[nodiscard]] std::string activity(int rank) const;
  [[nodiscard]] std::vector<std::string> whereabouts() const;

  // Gets the news of ranks on other hosts, now and then: for waits that last.
  void refresh() {
    if (remote_) {
      remote_->refresh_pages();
    }
  }

  // -- operations that last ------------------------------------------------------------------
  [[nodiscard]] bool is_due(LongWait& notice, LongWait::Clock::time_point now) const noexcept {
    return notice.is_due(long_wait_, now);
  }
  // Logs that this rank has been in `operation` for so long, and why. Does not wait for the log.
  void warn_of_wait(const std::string& operation, std::chrono::nanoseconds lasting,
                    const std::string& why);
  [[nodiscard]] std::chrono::nanoseconds long_wait() const noexcept { return long_wait_; }

  // -- the journal --------------------------------------------------------------------------
  [[nodiscard]] Journal& journal() noexcept { return endpoint_->page().journal; }
  // What the entries of its operations on the host are marked with; the same on every rank.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(peers_.size()); }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 private:
  // Whether all other ranks end writing into symmetric memory before the deadline.
  [[nodiscard]] bool is_heap_at_rest(Deadline deadline) const;
  void wake_everybody() noexcept;
  // A rank that has died without having shut down; nothing if there is none.
  [[nodiscard]] std::optional<Loss> death() const;
  // Whether it is known that the rank does not run, so that it waits for nobody.
  [[nodiscard]] bool is_frozen(int rank) const;
  // The rank of this group that a rank waits for, in whatever group; nothing where there is none.
  [[nodiscard]] std::optional<int> awaited_by(int rank) const;
  // "is stopped (SIGSTOP or a debugger)", or for how long it has shown no sign of life; empty where
  // there is nothing to tell.
  [[nodiscard]] std::string plight(int rank) const;
  // Whether the rank's journal has collective `sequence`, or a later one.
  [[nodiscard]] bool has_begun(int rank, std::uint64_t sequence) const;
  [[nodiscard]] bool has_left(int rank) const;
  [[nodiscard]] bool is_of_group(const JournalEntry& entry) const noexcept {
    return entry.group == fingerprint_ || entry.group == fingerprint_on_gpu_;
  }
  // How the rank has left the group, or leaves it now, as a cause.
  [[nodiscard]] const char* how_left(int rank) const;
  [[nodiscard]] std::string departure_of(int rank) const;

  const std::string name_;
  const int rank_;
  const std::uint64_t fingerprint_;
  const std::uint64_t fingerprint_on_gpu_;
  const std::shared_ptr<Endpoint> endpoint_;
  const GroupSegment segment_;
  const std::vector<PeerPtr> peers_;  // by rank; this rank's entry is its own page
  const std::chrono::nanoseconds long_wait_;
  const std::shared_ptr<RemoteRanks> remote_;
  std::atomic<bool> has_left_{false};
};

}  // namespace pydist
