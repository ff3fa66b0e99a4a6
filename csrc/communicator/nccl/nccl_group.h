// One NCCL communicator with its stream, and what is under way on it.
//
// Note [Streams]
// All collectives of a group run on one stream of its own, of the highest priority, in the order of
// their launches. Such a launch
//   1. makes the group's stream wait for what the caller's stream holds so far,
//   2. puts the collective on the group's stream,
//   3. records an event behind it.
// The caller's stream waits for that event when somebody asks for the result
// (Work::wait_on_stream), and the host never does. Buffers are kept alive by whoever submitted
// until the work has finished, and by the process where it could not be ended (kept_buffers.h):
// nothing here tells an allocator about streams.
//
// Note [How a group fails]
// NCCL's kernels wait for their peers without limit, so a group is watched from outside
// (nccl_watchdog.h): NCCL's own asynchronous errors, deadlines, and the health of `control`, a
// group of the same ranks on a host backend, which knows of deaths and carries the news. NCCL often
// notices first that a rank is gone, and cannot name it: so such an error of its own waits a while
// for `control` to say who and why. The first error stays. It is told to `control`, so that the
// peers stop too; then NCCL is aborted, on a thread of its own because that may hang
// (NVIDIA/nccl#1013), and once that is over, or has taken too long, what was under way finishes
// with the error. The process lives on.
//
// Note [How a group ends]
// Whoever ends a group waits for its operations. To finalize NCCL's communicator (from NCCL 2.31
// on) and to destroy it takes as long as its neighbours in the host go on, and so happens on a
// thread that nobody but the end of the job waits for (late_ends.h), as does every abort. Ranks
// that end a group together may wait for it, for a while (wait_for_end()).
//
// A rank that ends a group in order leaves `control` at once, too, and says farewell with the
// number of its last operation (Absence::done). A neighbour whose GPU is behind reads from this
// number which of its operations the leaver has done its part of. Those it lets come to their end,
// for which there is a deadline. One with a greater number would wait in vain, and fails soon, with
// the leaver's name. To leave `control` only once NCCL's communicator is gone would be too late to
// tell them apart: an NCCL before 2.31 is gone before the neighbours have caught up, and a later
// one keeps the news from those that wait in vain. The numbers agree because all ranks launch
// alike; operations that are recorded into graphs are not counted (turn_). The leaver's NCCL is
// aborted if it takes longer than half of Options::end_patience, so a neighbour that is further
// behind fails.
//
// Thread safe. Launches of all groups of a process are ordered by one lock, since NCCL's kernels
// must start in one order on all ranks.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/op_kind.h"
#include "communicator/communicator.h"
#include "communicator/nccl/communicator_life.h"
#include "communicator/nccl/kept_buffers.h"
#include "communicator/nccl/nccl_api.h"
#include "communicator/peer_news.h"
#include "communicator/work.h"
#include "cuda/driver.h"
#include "cuda/stream.h"
#include "health/failure_record.h"
#include "health/journal.h"
#include "health/long_wait.h"

namespace pydist {

class NcclWatchdog;

class NcclGroup : public std::enable_shared_from_this<NcclGroup> {
 public:
  struct Options {
    nccl::ApiPtr api;
    // Of the same ranks, with peer_news(); used for nothing else.
    CommunicatorPtr control;
    // Fails with this group, and this group with it; may be null.
    CommunicatorPtr companion;
    // Of the same ranks in the same order: its communicator is split. Null where there is none.
    std::shared_ptr<NcclGroup> parent = nullptr;
    int device = 0;
    // The journal in which this process notes the operation that it is in; may be null.
    std::shared_ptr<Journal> journal;
    std::shared_ptr<NcclWatchdog> watchdog;
    // How long NCCL may take to abort, or to end, before it is left to itself.
    std::chrono::milliseconds end_patience{10'000};
    // How long an error of NCCL's that a peer may be the reason for waits for its name.
    std::chrono::milliseconds name_patience{3'000};
    // How long the first operation that is under way may last before the log tells of it.
    std::chrono::milliseconds long_wait = kLongWait;
  };

  // The memory of the device that was taken by joining, as far as others took none meanwhile.
  [[nodiscard]] std::size_t device_bytes() const noexcept { return device_bytes_; }

  // Collective over `control`. Succeeds on every rank, or throws the same error on every rank.
  [[nodiscard]] static std::shared_ptr<NcclGroup> join(Options options, Deadline deadline);
  explicit NcclGroup(Options options);  // for join()
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup();

  [[nodiscard]] int rank() const noexcept { return control_->rank(); }
  [[nodiscard]] int size() const noexcept { return control_->size(); }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] const nccl::Api& api() const noexcept { return *api_; }
  [[nodiscard]] Communicator& control() const noexcept { return *control_; }

  struct Launch {
    OpKind kind;
    std::uint64_t bytes;
    std::string label;
    std::vector<nccl::StreamHandle> streams;  // the callers'
    Deadline deadline;
    KeptBuffers::Holding holding = {};  // until the operation is over, unless it is awaited
    // Whether those streams wait for it: then the memory may go at once, in their order.
    bool is_awaited = false;
  };
  // Puts on the stream what `enqueue` puts there, see Note [Streams]. An error of it fails the
  // group, since the other ranks may have launched. What throws InvalidUsage before anything is
  // enqueued belongs before the call.
  [[nodiscard]] WorkPtr launch(Launch launch, const std::function<void()>& enqueue);

  // -- for what enqueues, on the thread that launches
  // Throws the group's error: there may be no communicator any more.
  [[nodiscard]] nccl::CommHandle comm() const {
    rethrow_if_any(failure());
    return comm_;
  }
  [[nodiscard]] nccl::StreamHandle stream() const noexcept { return stream_->get(); }
  // Whether that capture holds the stream, and so goes on.
  [[nodiscard]] bool is_captured_by(std::uint64_t capture) const {
    const cuda::DeviceGuard guard(device_);
    return cuda::Driver::get().capture_of(stream()) == capture;
  }
  // Checks what NCCL has returned, and waits while it is setting up connections.
  void check(nccl::Result result, const char* what);
  // A function of NCCL's that ends with the communicator and the stream.
  template <typename Function, typename... Arguments>
  void call(const char* name, Function* function, Arguments... arguments) {
    check(function(arguments..., comm(), stream()), name);
  }
  // Calls of `body` become one launch.
  void grouped(const std::function<void()>& body);
  // Device memory for the time of one launch, reused by the next, and there since the group was
  // joined: a rank that finds no room for it in the middle of a launch would fail all. Of its own
  // for each CUDA graph, until the group ends, since a replay overlaps with other graphs and with
  // launches. What takes more is done in pieces.
  [[nodiscard]] std::byte* scratch();
  static constexpr std::size_t kScratchBytes = std::size_t{16} << 20;

  // Collective. Throws the same TransportError on every rank where any rank has a complaint;
  // otherwise returns whether all of them said yes.
  bool agree(const std::string& complaint, bool says_yes = true) {
    return agree(*control_, complaint, says_yes);
  }
  static bool agree(Communicator& control, const std::string& complaint, bool says_yes = true);
  // For Launch::holding.
  [[nodiscard]] KeptBuffers::Holding hold(std::span<const Operation> operations) const {
    return KeptBuffers::hold(operations, stream_, device_);
  }
  // The label by which ranks hear each other about NCCL.
  static constexpr const char* kAboutNccl = "whether NCCL is ready";
  // Makes memory known to NCCL; null where it does not want to know it.
  [[nodiscard]] void* register_memory(void* data, std::size_t bytes);
  // Undoes a registration. Returns false while NCCL cannot: registered memory must not be freed.
  [[nodiscard]] bool deregister(void* registration) noexcept;

  // Frees what this process has let go of on the device (freed_device_memory.h); keeps it where a
  // group is busy there for longer.
  void free_now();

  // -- health
  [[nodiscard]] std::exception_ptr failure() const;
  void fail(const std::exception_ptr& error) noexcept;
  // Note [Two threads that look]
  // Only the driver knows whether an operation has finished, and a question to the driver may block
  // for as long as an operation hangs, for instance while another thread frees memory. So one
  // thread asks the driver (settle). Another one (watch) never does: it looks for failures and ends
  // the group. Both return when to look again; the maximum means not before the next launch.
  std::chrono::milliseconds settle() noexcept;
  std::chrono::milliseconds watch() noexcept;
  // Returns once all operations under way have finished, or `deadline` has passed.
  void drain(Deadline deadline);
  // Waits for the operations under way; fails the group where they take too long. See Note [How a
  // group ends]. Idempotent.
  void end() noexcept;
  // After end(): until NCCL's communicator has ended, too; `deadline` at most. On all ranks at
  // about the same time, as NCCL waits for the neighbours.
  void wait_for_end(Deadline deadline) const noexcept;

 private:
  // How long an operation may go on after a rank has died, or has left without taking part in it.
  // The peers' own news of the reason may still be on its way.
  static constexpr std::chrono::milliseconds kVainPatience{500};

  class LaunchedWork;
  struct UnderWay {
    std::shared_ptr<LaunchedWork> work;
    Deadline deadline;
    OpKind kind;
    std::uint64_t sequence;
    std::uint64_t turn;
    std::string label;
    Journal::Ticket ticket;
    KeptBuffers::Holding holding;
    LongWait long_wait = {};

    [[nodiscard]] std::string title() const;
  };

  // Makes the communicator: from the parent's where all ranks can, otherwise by an id of rank 0's.
  void connect(const std::shared_ptr<NcclGroup>& parent, Deadline deadline);
  void meet(Deadline deadline);
  // Has the communicator split off that of `parent`. Returns false where not all ranks can.
  [[nodiscard]] bool split_off(NcclGroup& parent, Deadline deadline);
  // With the right to call NCCL for `parent`.
  void split_into(nccl::CommHandle& comm, NcclGroup& parent, Deadline deadline);
  // Waits for this communicator, or for that of another group, which must not fail meanwhile.
  void poll_until_ready(const char* what, Deadline deadline,
                        std::chrono::microseconds longest_pause = std::chrono::microseconds(200),
                        const NcclGroup* other = nullptr);
  void find_capture(const Launch& launch);
  [[nodiscard]] bool waits_on_registered_memory() const;
  // Throws what NCCL has returned, or the loss of the peer that explains it.
  [[noreturn]] void throw_failure(nccl::Result result, const char* what);
  // Where every rank is, as far as is known: sentences that follow others.
  [[nodiscard]] std::string places() const;
  void settle_done();
  [[nodiscard]] bool is_under_way() const;
  // Whether the operations of a group that ends are over. Once an abort has begun, they are as soon
  // as the stream is idle: NCCL itself may not return before the graphs that hold its operations
  // are gone.
  [[nodiscard]] bool is_at_rest() const noexcept;
  // True once the driver has been asked, since something went wrong, which operations have
  // finished, so that those do not fail. Called under the lock.
  [[nodiscard]] bool has_word();
  void wait_for_launches() const noexcept;
  void allocate_scratch();
  void free_scratch() noexcept;
  void end_communicator();
  void abort_communicator();
  // Ends the operations under way with the failure; keeps their buffers, unless the stream is known
  // to be done with them.
  void finish_all(bool is_quiet) noexcept;
  void keep(KeptBuffers::Holding holding) noexcept;
  // Nothing where the stream is done by `deadline`.
  void keep_unless_quiet(KeptBuffers::Holding holding, Deadline deadline) noexcept;
  // Returns whether the caller has to end NCCL's communicator, which must end only once. Called
  // under the same lock under which a failure is stored, so that whoever sees the failure can rely
  // on the end.
  [[nodiscard]] bool begin_end();
  // Runs `end` on a thread of its own; the operations under way finish after it.
  void end_on_thread(std::function<void()> end) noexcept;
  // Waits until nothing of an ended group is on its stream any more; returns whether that is so.
  [[nodiscard]] bool wait_until_quiet(Deadline deadline) const noexcept;
  [[nodiscard]] bool has_ended() const noexcept { return life_.now() == LifeStep::kEnded; }
  // Under the lock, so that nobody who holds it sees two steps.
  void step_to(LifeStep next);
  // What NCCL says of the communicator, which works on its own threads.
  [[nodiscard]] nccl::Result async_state() const;
  [[nodiscard]] std::exception_ptr failure_of_others() const;
  [[nodiscard]] std::exception_ptr find_fault(const std::exception_ptr& told,
                                              const std::optional<Absence>& absence);
  // The ranks of which is known that they have not launched the operation of that number, with
  // their processes, as names and as culprits; nobody where none is.
  [[nodiscard]] std::pair<std::string, Blame> not_launched(std::uint64_t sequence) const;
  [[nodiscard]] std::exception_ptr timeout_of(const UnderWay& late) const;
  [[nodiscard]] std::string warning_of(const std::string& title, std::uint64_t sequence) const;

  const nccl::ApiPtr api_;
  const CommunicatorPtr control_;
  PeerNews& news_;  // of `control_`
  const CommunicatorPtr companion_;
  const int device_;
  const std::shared_ptr<Journal> journal_;
  const std::uint64_t fingerprint_;
  const std::shared_ptr<NcclWatchdog> watchdog_;
  const std::chrono::milliseconds end_patience_;
  const std::chrono::milliseconds name_patience_;
  const std::chrono::milliseconds long_wait_;
  std::shared_ptr<const cuda::OwnedStream> stream_;
  nccl::CommHandle comm_ = nullptr;
  std::byte* scratch_ = nullptr;                       // from joining on, until the end
  std::size_t device_bytes_ = 0;                       // set by joining
  std::map<std::uint64_t, std::byte*> graph_scratch_;  // by capture; by the launching thread
  std::optional<std::uint64_t> capture_;               // by the launching thread
  Deadline launching_until_ = Deadline::never();       // by the launching thread
  std::mutex calls_mutex_;   // NCCL's functions, but for the question of errors
  std::mutex settle_mutex_;  // held while events are queried; locked before mutex_

  mutable std::mutex mutex_;
  std::deque<UnderWay> under_way_;  // guarded by mutex_; in order
  std::deque<UnderWay> given_up_;   // guarded by mutex_
  std::uint64_t sequence_ = 0;      // guarded by mutex_
  // The same without captured operations, so that all ranks give an operation the same number,
  // whatever they have recorded into graphs. And the number of the operation that is being
  // launched.
  std::uint64_t turn_ = 0;                 // guarded by mutex_
  std::uint64_t launching_turn_ = 0;       // guarded by mutex_
  FailureRecord failure_;                  // set under mutex_
  std::optional<Deadline> vain_until_;     // guarded by mutex_; once a rank has died or left
  std::optional<Deadline> name_until_;     // guarded by mutex_; once NCCL has failed
  std::optional<Deadline> word_until_;     // guarded by mutex_; once something is wrong
  std::uint64_t word_after_ = 0;           // guarded by mutex_; of the times that events were asked
  std::atomic<std::uint64_t> settled_{0};  // times that events were asked
  CommunicatorLife life_;  // its steps are drawn in communicator_life.h; under mutex_
  Deadline ending_until_ = Deadline::never();  // guarded by mutex_; from kEnding on
  std::atomic<bool> is_shut_down_{false};      // there are no more launches
  std::atomic<int> is_launching_{0};           // how many threads are
  std::atomic<bool> has_broken_off_{false};    // a launch of which a part may be on the stream
  std::atomic<bool> has_captured_{false};      // something that replays, unseen
};

}  // namespace pydist
