#include "c10d/gloo/gloo_communicator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/interruption.h"
#include "base/log.h"
#include "c10d/elastic_threads.h"
#include "c10d/gloo/gloo_channel.h"
#include "c10d/gloo/gloo_collectives.h"
#include "c10d/gloo/gloo_death_watch.h"
#include "c10d/gloo/gloo_group.h"
#include "c10d/gloo/gloo_introduction.h"
#include "c10d/gloo/gloo_meeting.h"
#include "c10d/memory_tensor.h"
#include "c10d/serial_queue.h"
#include "c10d/store.h"
#include "communicator/departure.h"
#include "communicator/gathered_call_mismatch.h"
#include "communicator/open_communicators.h"
#include "communicator/peer_news.h"
#include "communicator/splits.h"
#include "topology/hosts.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// How long shutdown() waits for operations that it has cut off.
constexpr std::chrono::seconds kShutdownPatience{5};
// How long it waits until the others have been told of a failure.
constexpr milliseconds kTellingPatience{500};

MemoryPtr allocate_on_cpu(std::size_t bytes) {
  try {
    return std::make_shared<AllocatedMemory>(
        c10::GetCPUAllocator()->allocate(std::max(bytes, std::size_t{1})), bytes);
  } catch (const c10::Error&) {
    throw TransportError(join("The system has no memory for ", bytes, " bytes."));
  }
}

class GlooCommunicator : public Communicator, public PeerNews {
 public:
  GlooCommunicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
                   milliseconds timeout, GlooFactory factory, CheckHope check_hope,
                   Deadline meeting, milliseconds long_wait, GlooNode::Place place)
      : store_(std::move(store)),
        factory_(std::move(factory)),
        rank_(rank),
        size_(size),
        name_(std::move(name)),
        timeout_(timeout),
        long_wait_(long_wait),
        place_(std::move(place)),
        group_(std::make_shared<GlooGroup>(
            factory_(poll_store(store_, GlooGroup::kNewsKey, std::move(check_hope), meeting), rank,
                     size, timeout),
            adapt_store(store_, kRollCallPatience), rank, size, name_, long_wait)) {}

  ~GlooCommunicator() override {
    shutdown();
    if (in_forked_child()) {
      // The backend's threads, which its destructor joins, are the parent's.
      group_->channel.abandon();
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  const std::string& name() const noexcept override { return name_; }

  Capabilities capabilities() const override {
    return {
        .backend = "gloo",
        .devices = {Device{}},
        .spans_hosts = std::any_of(
            processes_.begin(), processes_.end(),
            [this](const auto& each) { return each.machine != processes_.front().machine; }),
        .symmetric_memory = false,
        .any_source = true,
        .ragged = true,
        .wire_dtypes = {kWireDTypes.begin(), kWireDTypes.end()},
        .equal_on_all_ranks = true,
        .equal_from_run_to_run = true,
        .equal_for_all_chunkings = false,
        .numerics =
            "Sums of float32, float64 and complex types are added around gloo's ring, in "
            "an order that depends on an element's position; 16-bit types are summed in "
            "float32 and rounded once; averages are divided once, after the sum. Sums in a wire "
            "type are combined in rank order, in float32, and rounded once. Other "
            "operators, and integers that gloo does not have, are combined in rank order; "
            "min and max propagate NaN.",
    };
  }

  bool takes(DeviceType type) const override { return type == DeviceType::kCpu; }

  std::string why_unsupported(OpKind kind, ReduceOp op, DType dtype) const override {
    if (has_op(kind) && !is_supported(op, dtype)) {
      return join("op '", to_string(op), "' is not defined for ", to_string(dtype), ".");
    }
    return {};
  }

  void check(const Operation& operation) const override {
    require_not_forked();
    group_->require_sound();
    validate(operation, rank_, size_);
    for (const auto* buffers : {&operation.inputs, &operation.outputs}) {
      for (const Buffer& buffer : *buffers) {
        if (buffer.device != Device{}) {
          throw InvalidUsage("The gloo backend moves CPU memory only.");
        }
      }
    }
    if (is_point_to_point(operation.kind)) {
      if (operation.tag >= GlooChannel::kUserTags) {
        throw InvalidUsage(join("The gloo backend has tags from 0 to ", GlooChannel::kUserTags - 1,
                                ", got ", operation.tag, "."));
      }
      if (operation.peer == rank_) {
        throw InvalidUsage(join("The gloo backend cannot send from rank ", rank_,
                                " to itself; copy the tensor instead."));
      }
    }
  }

  WorkPtr submit(Operation operation) override {
    check(operation);
    const Deadline deadline = deadline_of(operation);
    auto work = std::make_shared<Work>();
    if (is_point_to_point(operation.kind)) {
      start_message(std::move(operation), deadline, work);
      return work;
    }
    if (queue_.runs_here()) {
      throw InvalidUsage(join("A collective of group '", name_,
                              "' was called while this thread is in another one of it: by a signal "
                              "handler that ran while that waited. Note the signal in the handler, "
                              "and call the collective once the other one has ended."));
    }
    const bool is_posted =
        queue_.post([group = group_, operation = std::move(operation), deadline, work] {
          finish_with(*work, [&] { return run_collective(*group, operation, deadline); });
        });
    if (!is_posted) {
      throw Aborted(join("The group '", name_, "' is being shut down."));
    }
    return work;
  }

  // On this thread if the group does nothing else: to hand a small operation to another thread and
  // to be woken by it takes a quarter of its time.
  int run(Operation&& operation) override {
    // A wait for messages can't be looked at from inside.
    const bool has_messages = is_point_to_point(operation.kind) ||
                              operation.kind == OpKind::kGather ||
                              operation.kind == OpKind::kScatter;
    if (has_messages) {
      return Communicator::run(std::move(operation));
    }
    check(operation);
    const Deadline deadline = deadline_of(operation);
    const std::shared_ptr<GlooGroup> group = group_;
    std::exception_ptr error;
    std::exception_ptr interruption;
    bool is_aborted = false;
    // The operation has to end before its buffers go back to the caller. It may have come to its
    // end while a handler ran, so it gets until the next look.
    const auto look = [&] {
      if (interruption == nullptr) {
        try {
          queue_.leave(&check_interruption);
        } catch (...) {
          interruption = std::current_exception();
        }
      } else if (!std::exchange(is_aborted, true)) {
        abort_interrupted(operation.kind);
      }
    };
    const bool has_run = queue_.run_if_idle([&] {
      try {
        group->channel.while_waiting(look);
        run_collective(*group, operation, deadline);
      } catch (...) {
        error = std::current_exception();
      }
      group->channel.while_waiting(nullptr);
    });
    if (!has_run) {
      return Communicator::run(std::move(operation));
    }
    rethrow_if_any(interruption);
    rethrow_if_any(error);
    return -1;
  }

  MemoryPtr allocate(std::size_t bytes, Device device) override {
    require_not_forked();
    group_->require_sound();
    if (device != Device{}) {
      throw InvalidUsage("The gloo backend allocates CPU memory only.");
    }
    return allocate_on_cpu(bytes);
  }

  CommunicatorPtr split(const std::vector<int>& ranks) override {
    require_not_forked();
    group_->require_sound();
    const StorePtr asked = adapt_store(store_, std::min<milliseconds>(kStorePatience, timeout()));
    // The new group keeps it, and may live longer.
    const CheckHope check_hope = [group = std::weak_ptr(group_), ranks] {
      if (const auto parent = group.lock()) {
        parent->require_hope(ranks);
      }
    };
    return splits_.next(
        ranks, rank_, size_, *asked, name_, Deadline::in(timeout()), check_hope,
        [this](int rank) { return group_->known(rank); },
        [&](int rank, const std::string& split, const KnownProcesses& members) {
          std::string name = join(name_, "/", split);
          auto store = c10::make_intrusive<c10d::PrefixStore>(name, store_);
          return create_gloo_communicator(store, rank, static_cast<int>(ranks.size()),
                                          std::move(name), timeout(), factory_, check_hope,
                                          long_wait_, members, place_);
        },
        [&](const std::string& split) {
          const std::optional<ToldError> told = GlooGroup::told_failure(*store_of(split));
          return told ? std::optional(told->error) : std::nullopt;
        },
        [&](const std::string& split, const ErrorDescription& why) {
          const StorePtr its = store_of(split);
          GlooGroup::tell_of_failure(*its, {rank_, why});
          const std::optional<ToldError> told = GlooGroup::told_failure(*its);
          return told ? told->error : why;
        });
  }

  void require_hope(const std::vector<int>& ranks) override {
    const std::exception_ptr error = failure();
    // A group that failed otherwise says nothing of one that is made of its ranks anew.
    if (!is_shut_down_ && (error == nullptr || describe(error).kind == ErrorKind::kAborted)) {
      group_->require_hope(ranks);
    }
  }

  milliseconds timeout() const override { return timeout_.load(); }
  void set_timeout(milliseconds timeout) override { timeout_ = timeout; }

  void abort(const Error& reason) override {
    require_not_forked();
    group_->fail(make_error(reason.kind(), reason.what(), blame_of(reason, rank_)));
  }

  std::exception_ptr failure() const override { return group_->failure(); }

  void shutdown() noexcept override {
    if (is_shut_down_.exchange(true) || in_forked_child()) {
      return;
    }
    group_->mark_shut_down();
    if (!queue_.is_idle() || group_->has_messages()) {
      const Blame own = own_blame(rank_, in_words(own_departure()));
      group_->fail(make_error(ErrorKind::kAborted,
                              join("The group '", name_, "' was shut down on rank ", rank_,
                                   " while an operation was under way."),
                              own),
                   make_error(ErrorKind::kPeerLost,
                              join("rank ", rank_, " (", name_of_process(own.pid, own.host), ") ",
                                   own.cause, "."),
                              own));
    }
    const bool have_all_ended = queue_.stop();
    const bool is_quiet = group_->wait_for_messages(kShutdownPatience);
    watch_.reset();
    // A reason says more than that this rank has left.
    group_->wait_until_told(kTellingPatience);
    if (size_ > 1) {
      group_->say_left();
    }
    const bool is_unwatched = group_->stop_watching(kShutdownPatience);
    // An operation that goes on, as a signal handler has interrupted it or it let go of the group
    // itself, uses the backend until it ends.
    if (have_all_ended) {
      if (!is_unwatched || !is_quiet) {
        group_->channel.abandon();
      }
      group_->channel.release();
    }
    at_work_.end();
  }

  PeerNews* peer_news() noexcept override { return this; }
  std::optional<Absence> absence() const override {
    return size_ == 1 ? std::nullopt : group_->absence();
  }
  void set_farewell(std::uint64_t done) noexcept override { group_->set_farewell(done); }

  // Lets this rank know of the others' deaths, and connects them by connections of our own, too.
  // Collective; when it returns all ranks are connected: one that leaves before that is lost to
  // those that still connect.
  void meet(Deadline deadline) {
    // Not as an operation of the group's: whoever makes it says who has not come.
    const auto work = std::make_shared<Work>();
    const bool is_posted = queue_.post([this, work, deadline] {
      finish_with(*work, [&] {
        processes_ = introduce_on_gloo(group_->channel, name_, place_, deadline);
        return -1;
      });
    });
    PYDIST_CHECK(is_posted);  // nobody else has the group yet
    work->wait();
    group_->know_processes(processes_);
    const ProcessIdentity& own = processes_[static_cast<std::size_t>(rank_)];
    try {
      watch_ = std::make_unique<DeathWatch>(processes_, own, [this](std::size_t rank) {
        group_->note_end_of(static_cast<int>(rank), processes_[rank].description());
      });
    } catch (const TransportError& error) {
      log_line(LogLevel::kWarning, join("deaths of ranks of group '", name_,
                                        "' are seen by their connections alone: ", error.what()));
    }
  }

  void watch_peers() override {
    if (size_ > 1) {
      group_->watch_neighbours();
    }
  }

  std::vector<std::string> whereabouts() const override { return {}; }
  Blame culprit(int rank, std::string cause) const override {
    return group_->culprit(rank, std::move(cause));
  }

 private:
  // That of a group that is split off.
  [[nodiscard]] StorePtr store_of(const std::string& split) const {
    return adapt_store(c10::make_intrusive<c10d::PrefixStore>(join(name_, "/", split), store_),
                       kRollCallPatience);
  }

  // Counts a message as under way.
  class UnderWay {
   public:
    explicit UnderWay(GlooGroup& group) : group_(group) { group_.message_started(); }
    UnderWay(const UnderWay&) = delete;
    UnderWay& operator=(const UnderWay&) = delete;
    ~UnderWay() { group_.message_finished(); }

   private:
    GlooGroup& group_;
  };

  // gloo sends no empty messages, so a message without elements is one byte long.
  struct Message {
    explicit Message(const Operation& operation)
        : is_send(operation.kind == OpKind::kSend),
          buffer(is_send ? operation.inputs[0] : operation.outputs[0]) {}

    GlooChannel::Message post(GlooChannel& channel, const Operation& operation) {
      void* const data = buffer.count == 0 ? &nothing : buffer.data;
      const std::size_t bytes = std::max(buffer.bytes(), std::size_t{1});
      return is_send ? channel.post_send(data, bytes, operation.peer, operation.tag)
                     : channel.post_recv(data, bytes, operation.peer, operation.tag);
    }

    bool is_send;
    Buffer buffer;
    std::uint8_t nothing = 0;
  };

  template <typename Function>
  static void finish_with(Work& work, const Function& function) {
    try {
      const int source = function();
      work.finish(nullptr, source);
    } catch (...) {
      work.finish(std::current_exception());
    }
  }

  static int run_collective(GlooGroup& group, const Operation& operation, Deadline deadline) {
    group.perform_collective(operation, [&] {
      check_agreement(operation, group.channel.rank(), group.channel.size(),
                      [&](const void* mine, void* all, std::size_t bytes) {
                        group.channel.gather_records(mine, all, bytes, deadline);
                      });
      run_gloo_collective(group.channel, operation, deadline);
    });
    return -1;
  }

  void start_message(Operation operation, Deadline deadline, const WorkPtr& work) {
    // Posted here, so that messages to one peer leave in the order of the calls.
    auto under_way = std::make_shared<UnderWay>(*group_);
    auto state = std::make_shared<Message>(operation);
    GlooChannel::Message message;
    group_->perform(operation, [&] {
      message = state->post(group_->channel, operation);
      return -1;
    });
    try {
      messages_.post([group = group_, operation = std::move(operation), deadline, work, state,
                      under_way = std::move(under_way), message = std::move(message)]() mutable {
        finish_with(*work, [&] {
          return group->perform(operation, [&] { return GlooChannel::finish(message, deadline); });
        });
        message.reset();
        under_way.reset();
      });
    } catch (...) {
      // The message is on its way already, and nobody will wait for it.
      const auto [kind, what, blame] = describe(std::current_exception());
      static_cast<void>(group_->fail(make_error(
          kind,
          join("rank ", rank_, " of group '", name_, "' could not wait for a message: ", what),
          own_blame(rank_, what))));
      throw;
    }
  }

  GroupAtWork at_work_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlooFactory factory_;
  const int rank_;
  const int size_;
  const std::string name_;
  std::atomic<milliseconds> timeout_;
  const milliseconds long_wait_;
  const GlooNode::Place place_;
  std::atomic<bool> is_shut_down_{false};
  Splits splits_;
  const std::shared_ptr<GlooGroup> group_;
  std::vector<ProcessIdentity> processes_;  // of all ranks, once they have met
  ElasticThreads messages_;
  SerialQueue queue_{"pydist-gloo"};
  std::unique_ptr<DeathWatch> watch_;  // null: none is to be had, or not yet, or not any more
};

}  // namespace

CommunicatorPtr create_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                         std::string name, std::chrono::milliseconds timeout,
                                         GlooFactory factory, CheckHope check_hope,
                                         std::chrono::milliseconds long_wait,
                                         KnownProcesses processes, GlooNode::Place place) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidUsage(join("Rank ", rank, " of ", size, " is not a rank of a group."));
  }
  if (!store) {
    throw InvalidUsage("A group needs a store for its ranks to meet at, and got None.");
  }
  require_not_forked();
  if (processes.empty()) {
    processes = strangers(size);
  }
  PYDIST_CHECK(processes.size() == static_cast<std::size_t>(size));
  const Deadline deadline = Deadline::in(timeout);
  // Gloo keeps the store, and with it what is called there.
  const auto meeting = std::make_shared<GlooMeeting>(
      adapt_store(store, std::min<std::chrono::milliseconds>(timeout, kStorePatience)), rank, name,
      std::move(processes), std::move(check_hope));
  std::shared_ptr<GlooCommunicator> communicator;
  const auto connect = [&] {
    communicator = std::make_shared<GlooCommunicator>(
        store, rank, size, name, timeout, factory, [meeting] { meeting->check_hope(); }, deadline,
        long_wait, std::move(place));
  };
  if (size == 1) {
    connect();
  } else {
    try {
      meeting->say_here(deadline);
      connect();
      meeting->run([&] { communicator->meet(deadline); });
    } catch (const std::exception&) {
      meeting->tell_and_throw_why();
    }
  }
  note_open(communicator);
  return communicator;
}

}  // namespace pydist
