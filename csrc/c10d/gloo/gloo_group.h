// A group on gloo, as operations under way share it with the communicator, which they may outlive:
// its channel, its failure, and what is known of its neighbours.
//
// Thread safe, but for the channel's collectives.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "c10d/gloo/gloo_channel.h"
#include "c10d/gloo/gloo_roll_call.h"
#include "communicator/operation.h"
#include "communicator/peer_news.h"
#include "health/failure_record.h"
#include "health/known_processes.h"
#include "health/long_wait.h"
#include "health/process_identity.h"
#include "health/process_state.h"
#include "topology/key_value_store.h"
#include "topology/told_error.h"

namespace pydist {

class GlooGroup : public std::enable_shared_from_this<GlooGroup> {
 public:
  // `long_wait`: how long an operation may last before the log tells for whom it waits.
  GlooGroup(c10::intrusive_ptr<c10d::Backend> backend, StorePtr store, int rank, int size,
            std::string name, std::chrono::nanoseconds long_wait)
      : channel(std::move(backend), rank, size),
        store_(std::move(store)),
        name_(std::move(name)),
        long_wait_(long_wait) {}

  // Under which the first failure of a group stands in its store.
  static constexpr const char* kNewsKey = "failed/why";
  // Unless the store holds an earlier failure.
  static void tell_of_failure(KeyValueStore& store, const ToldError& told) noexcept;
  // What a rank has told; nothing where none has, or the store does not answer.
  static std::optional<ToldError> told_failure(KeyValueStore& store) noexcept;
  // Under which a rank says own_place().
  static std::string place_key(int rank) { return join("here/", rank); }

  GlooChannel channel;

  void require_sound() const;
  // For a group of these ranks that is to be made: throws also what is heard of their ends and
  // departures, and that the group was aborted elsewhere. Asks the store.
  void require_hope(const std::vector<int>& ranks);

  [[nodiscard]] std::exception_ptr failure() const { return failure_.error(); }

  // The first failure stays; the connections go, so that peers learn of it and waiters wake.
  // Returns the group's failure. `for_others`, where given, is what the other ranks are told
  // instead.
  std::exception_ptr fail(const std::exception_ptr& error,
                          const std::exception_ptr& for_others = nullptr);

  // The processes of all ranks, once they are known, and this one as one of them.
  void know_processes(std::vector<ProcessIdentity> processes);
  // For those who make a group with it.
  [[nodiscard]] KnownProcess known(int rank) const;
  // A rank of the group as a culprit: of another one, the store knows the process.
  [[nodiscard]] Blame culprit(int rank, std::string cause) const;

  // A failure that another rank has told of, or the loss of a neighbour. Never waits: the store is
  // asked on another thread.
  std::optional<Absence> absence();

  void set_farewell(std::uint64_t done) noexcept { farewell_ = done; }

  // Note [Deaths on gloo] gloo tells of a rank's death by the connections that the system closes
  // then: to those ranks alone that move data with it, not by name, and not at all while a process
  // lives that was forked from it (a data-loader worker), which holds them open. So each rank
  // watches the processes of its host (c10d/gloo/gloo_death_watch.h). A rank that leaves the group
  // says so in the store before its process can end. One whose process ends without that has died:
  // those that see it say so in the store, which tells ranks of other hosts too, and soon cut their
  // connections, so that whatever is under way there fails and names the rank.
  void note_end_of(int rank, const std::string& process);
  // This rank is about to leave the group. Takes as long as the store takes.
  void say_left() noexcept;

  // Note [Neighbours] When a rank dies, its connections are cut, but gloo tells only a rank that
  // waits for a message from it. So each rank waits for a message from both of its neighbours, a
  // farewell, on a thread for each, for as long as the group lives. A rank that shuts the group
  // down says farewell first, by the connection itself, because the store may go with the rank. A
  // rank that fails writes its reason into the store. If a connection is lost without either, the
  // neighbour has died, and the rank that sees this tells the others through the store.
  void watch_neighbours();

  // Precondition: the group has been marked as shut down. Returns false if listeners do not end in
  // time.
  bool stop_watching(std::chrono::seconds patience) noexcept;

  void mark_shut_down();

  // Runs `step` of an operation; a failure is the group's, named after the operation.
  template <typename Step>
  int perform(const Operation& operation, const Step& step, std::uint64_t number = 0) {
    const UnderWay noted(*this, operation, number);
    try {
      return step();
    } catch (...) {
      fail_in(operation, std::current_exception());
    }
  }

  // perform() for a collective: where it fails, the error is the one that another rank has
  // reported, or names the ranks that are missing.
  template <typename Step>
  void perform_collective(const Operation& operation, const Step& step) {
    const auto explained = [&] {
      rethrow_if_any(failure());
      try {
        step();
      } catch (...) {
        explain(std::current_exception());
      }
      return -1;
    };
    perform(operation, explained, ++collectives_);
  }

  // Waits until the store has what fail() tells the others, for a rank that is about to end.
  void wait_until_told(std::chrono::milliseconds patience);

  // Messages under way, on threads that nobody joins. Throws where the group takes none.
  void message_started();
  void message_finished();
  [[nodiscard]] bool has_messages() const;
  // For a group that has been marked as shut down: also for the thread that looks at them.
  bool wait_for_messages(std::chrono::seconds patience);

 private:
  // Note [Long waits on gloo]
  // gloo waits by itself, and does not know what the other ranks do. So a thread of the group looks
  // from outside at what is under way. It comes with an operation, and goes when it finds none. Of
  // a collective that lasts half as long as the log allows, a rank says in the store that it is in
  // it. When the time is up the log names the ranks that have not said so: they have not come, only
  // lately, or have left, as the root of a broadcast does before the others.
  struct Operating {
    const Operation& operation;
    std::uint64_t number;  // of a collective, from 1, the same on every rank; 0: a message
    LongWait half;
    LongWait whole;
  };
  // Notes an operation as under way.
  class UnderWay {
   public:
    UnderWay(GlooGroup& group, const Operation& operation, std::uint64_t number);
    UnderWay(const UnderWay&) = delete;
    UnderWay& operator=(const UnderWay&) = delete;
    ~UnderWay();

   private:
    GlooGroup& group_;
    std::list<Operating>::iterator self_;
  };
  [[nodiscard]] bool is_under_way() const;
  void look_at_waits();
  void say_in(std::uint64_t number);
  // Why an operation lasts, as far as it can be told.
  [[nodiscard]] std::string why_long(std::uint64_t number, int peer) const;

  // "rank 3 (pid 71 on host b)"; without the process before it is known.
  [[nodiscard]] std::string who(int rank) const { return known(rank).who(); }
  // Of a process of this host; kUnknown for others.
  [[nodiscard]] ProcessState state_of(int rank) const { return known(rank).state(); }
  // What keeps a rank from its part: how it has gone, or that it does not run; empty where nothing
  // is known. Asks the store.
  [[nodiscard]] std::string plight_of(int rank) const;
  // What is known of ranks that have not answered, as sentences, and whom to blame for it: those of
  // which is known that they cannot answer, otherwise all.
  [[nodiscard]] std::string silence_of(const std::vector<int>& missing, Blame& blame) const;

  // How often a rank looks into the store for other ranks' failures.
  static constexpr std::chrono::milliseconds kNewsInterval{500};

  [[nodiscard]] std::vector<int> neighbours() const;

  void note_loss(Absence loss);

  // Fails the group with the error of an operation, and throws that.
  [[noreturn]] void fail_in(const Operation& operation, const std::exception_ptr& error);
  // Throws the reason for the error of a collective, as far as the other ranks and the store know
  // it, otherwise the error.
  [[noreturn]] void explain(const std::exception_ptr& error);
  // What a rank has told of its own failure. `of_others`: also what it has told of another one,
  // where this rank cannot find that out itself.
  [[nodiscard]] std::optional<ErrorDescription> confession(bool of_others = false) const;

  // The same of any rank's, which may take a moment to tell.
  [[nodiscard]] std::optional<ErrorDescription> await_confession() const;

  [[nodiscard]] bool is_over() const;

  // The rank that has died, as far as this rank sees it.
  [[nodiscard]] std::optional<Absence> death() const;
  // Only of a neighbour.
  [[nodiscard]] bool has_said_farewell(int rank);

  // Throws where the store does not answer.
  [[nodiscard]] bool is_told(const std::string& key) const;

  // What has become of a neighbour whose connection is lost.
  void explain_loss_of(int peer);

  void ask_for_news();

  static std::string name_of(const Operation& operation);

  const StorePtr store_;
  const std::string name_;
  const std::chrono::nanoseconds long_wait_;
  std::uint64_t collectives_ = 0;           // by whose turn it is in the queue
  std::atomic<std::uint64_t> farewell_{0};  // Absence::done
  mutable std::mutex mutex_;
  std::condition_variable quiet_;
  FailureRecord failure_;
  std::optional<Absence> death_;            // guarded by mutex_
  std::vector<ProcessIdentity> processes_;  // guarded by mutex_; empty before they are known
  std::list<Operating> under_way_;          // guarded by mutex_; what is being performed
  bool is_looking_ = false;                 // guarded by mutex_; a thread, at what is under way
  std::string said_;  // by that thread; the last key of this rank under which it is in a collective
  bool is_shut_down_ = false;  // guarded by mutex_
  int messages_ = 0;           // guarded by mutex_
  int listeners_ = 0;          // guarded by mutex_
  bool is_watching_ = false;   // guarded by mutex_
  bool is_telling_ = false;    // guarded by mutex_; the others, of the failure
  std::mutex news_mutex_;
  std::optional<Absence> news_;  // guarded by news_mutex_; of the store
  std::optional<Absence> loss_;  // guarded by news_mutex_; of a neighbour
  int silences_ = 0;             // guarded by news_mutex_; of the store, one after the other
  bool is_asking_ = false;       // guarded by news_mutex_
  Deadline next_question_ = Deadline::in(kNewsInterval);  // guarded by news_mutex_
};

}  // namespace pydist
