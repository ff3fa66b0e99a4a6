// How an NCCL group is joined, and how it launches.
//
// The file is long because both keep each other away by one lock and one mark.

#include "communicator/nccl/nccl_group.h"

#include <algorithm>
#include <array>
#include <limits>
#include <list>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/interruption.h"
#include "communicator/complaints.h"
#include "communicator/nccl/nccl_launched_work.h"
#include "communicator/nccl/nccl_watchdog.h"
#include "communicator/nccl/streams_of_process.h"
#include "health/text_field.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

using nccl::Result;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// Orders the launches of all groups of this process.
std::mutex& launch_mutex() {
  static auto* const mutex = new std::mutex;  // never destroyed: see open_communicators.cc
  return *mutex;
}

// How long NCCL's own thread needs for an ordinary launch. That long, a wait does not sleep.
constexpr microseconds kLaunchTime{200};
// The longest pause between two looks at a communicator that is joining, which may take seconds.
constexpr microseconds kLongestJoiningPause{5'000};

// The number that stands for joining the group: no rank that has left has done its part of it.
constexpr std::uint64_t kAnyOperation = std::numeric_limits<std::uint64_t>::max();

// How long a split waits for what its parent has under way, before the ranks meet instead.
constexpr milliseconds kSplitPatience{1'000};

// How long an abort waits for a thread that is inside of NCCL. It sees the failure soon, unless
// NCCL itself does not return.
constexpr milliseconds kLaunchPatience{1'000};

// Whether this thread holds the launch mutex.
thread_local bool is_in_launch = false;

class LaunchMark {
 public:
  explicit LaunchMark(std::atomic<int>& is_launching) : is_launching_(is_launching) {
    is_in_launch = true;
    ++is_launching_;
  }
  LaunchMark(const LaunchMark&) = delete;
  LaunchMark& operator=(const LaunchMark&) = delete;
  ~LaunchMark() { end(); }

  void end() noexcept {
    if (!is_over_) {
      is_over_ = true;
      --is_launching_;
      is_in_launch = false;
    }
  }

 private:
  std::atomic<int>& is_launching_;
  bool is_over_ = false;
};

// Where NCCL writes communicators that are split off: there for as long as it may write, which is
// for ever where a split has broken off.
class CommPlaces {
 public:
  static CommPlaces& of_process() {
    static auto* const places = new CommPlaces;  // never destroyed: see open_communicators.cc
    return *places;
  }
  [[nodiscard]] nccl::CommHandle* add() {
    const std::lock_guard lock(mutex_);
    return &places_.emplace_back(nullptr);
  }
  // What has been written there; the place is not needed any more.
  [[nodiscard]] nccl::CommHandle take(const nccl::CommHandle* place) {
    const std::lock_guard lock(mutex_);
    const nccl::CommHandle comm = *place;
    places_.remove_if([place](const nccl::CommHandle& each) { return &each == place; });
    return comm;
  }

 private:
  std::mutex mutex_;
  std::list<nccl::CommHandle> places_;  // guarded by mutex_
};

}  // namespace

std::string NcclGroup::UnderWay::title() const {
  return pydist::join(to_string(kind), " #", sequence, label.empty() ? "" : " (" + label + ")");
}

NcclGroup::NcclGroup(Options options)
    : api_(std::move(options.api)),
      control_(std::move(options.control)),
      news_(*control_->peer_news()),
      companion_(std::move(options.companion)),
      device_(options.device),
      journal_(std::move(options.journal)),
      fingerprint_(fingerprint_on_gpu(control_->name())),
      watchdog_(std::move(options.watchdog)),
      end_patience_(options.end_patience),
      name_patience_(options.name_patience),
      long_wait_(options.long_wait) {}

NcclGroup::~NcclGroup() {
  if (in_forked_child()) {
    return;  // streams and communicators are the parent's
  }
  end();
  stream_.reset();
  StreamsOfProcess::of_process().prune();
}

std::shared_ptr<NcclGroup> NcclGroup::join(Options options, Deadline deadline) {
  const std::shared_ptr<NcclGroup> parent = std::move(options.parent);
  auto group = std::make_shared<NcclGroup>(std::move(options));
  const auto free_bytes = [&group] {
    const cuda::DeviceGuard guard(group->device_);
    return cuda::Driver::get().room().free_bytes;
  };
  try {
    group->news_.watch_peers();
    const std::size_t before = free_bytes();
    group->connect(parent, deadline);
    group->allocate_scratch();
    const std::size_t after = free_bytes();
    group->device_bytes_ = before > after ? before - after : 0;
    // The others' failures end this one too.
    group->agree(std::string());
  } catch (...) {
    // What `control` has heard of first is the error of all ranks.
    std::exception_ptr error = group->control_->failure();
    if (error == nullptr) {
      const bool is_vain = group->news_.absence().has_value();
      const ErrorDescription why = describe(std::current_exception());
      const bool is_of_peer = why.kind == ErrorKind::kTimeout || why.kind == ErrorKind::kPeerLost;
      error = make_error(
          is_vain ? ErrorKind::kPeerLost : ErrorKind::kTransport,
          pydist::join("NCCL cannot serve these ranks. Rank ", group->rank(), ": ", why.message),
          is_vain || is_of_peer || !why.blame.ranks.empty()
              ? why.blame
              : own_blame(group->rank(), why.message));
    }
    group->fail(error);
    std::rethrow_exception(error);
  }
  group->step_to(LifeStep::kOpen);
  if (group->watchdog_ != nullptr) {
    group->watchdog_->watch(group);
  }
  return group;
}

bool NcclGroup::agree(Communicator& control, const std::string& complaint, bool says_yes) {
  const Hearing hearing = hear_all(control, complaint, kAboutNccl, says_yes);
  if (hearing.first) {
    throw TransportError(pydist::join("NCCL cannot serve these ranks. Rank ", hearing.first->rank,
                                      ": ", hearing.first->text),
                         control.culprit(hearing.first->rank, hearing.first->text));
  }
  return hearing.all_say_yes;
}

void NcclGroup::connect(const std::shared_ptr<NcclGroup>& parent, Deadline deadline) {
  const cuda::DeviceGuard guard(device_);
  stream_ = StreamsOfProcess::of_process().make(device_);
  if (parent == nullptr || !split_off(*parent, deadline)) {
    meet(deadline);
  }
}

// Note [No launch amid a split]
// A split takes all ranks of the parent, and nothing of the parent may be launched meanwhile: a
// launch on one rank would wait for its peers' launches, and these for the split. So a rank whose
// parent is at work says no, and none enters NCCL. It never waits for the right to call NCCL:
// whoever has it may be waiting for a peer.
bool NcclGroup::split_off(NcclGroup& parent, Deadline deadline) {
  const auto can = [&] {
    return api_->functions().ncclCommSplit != nullptr && parent.failure() == nullptr &&
           !parent.is_shut_down_;
  };
  if (!agree({}, can())) {
    return false;
  }
  parent.drain(Deadline::in(kSplitPatience));
  std::unique_lock calls(parent.calls_mutex_, std::try_to_lock);
  if (!agree({}, can() && calls.owns_lock() && !parent.is_under_way())) {
    return false;
  }
  // NCCL writes the communicator there at a time of its own, perhaps after this group has gone.
  CommPlaces& places = CommPlaces::of_process();
  nccl::CommHandle* const place = places.add();
  try {
    split_into(*place, parent, deadline);
  } catch (...) {
    calls.unlock();
    parent.fail(std::current_exception());  // it is in the middle of something
    throw;
  }
  calls.unlock();
  comm_ = places.take(place);
  poll_until_ready("splitting off the group", deadline, kLongestJoiningPause);
  return true;
}

void NcclGroup::split_into(nccl::CommHandle& comm, NcclGroup& parent, Deadline deadline) {
  constexpr const char* kWhat = "splitting off the group";
  const LaunchMark mark(parent.is_launching_);  // an abort of the parent waits for it
  rethrow_if_any(parent.failure());
  nccl::Config config;
  const Result result =
      api_->functions().ncclCommSplit(parent.comm_, /*color=*/0, rank(), &comm, &config);
  if (result != Result::kSuccess && result != Result::kInProgress) {
    throw_failure(result, kWhat);
  }
  // There is no communicator before that.
  poll_until_ready(kWhat, deadline, kLongestJoiningPause, &parent);
}

void NcclGroup::meet(Deadline deadline) {
  // The id of rank 0, behind its complaint if it has none.
  struct Invitation {
    std::array<char, 512> complaint{};
    nccl::UniqueId id{};
  } invitation;
  if (rank() == 0) {
    const Result result = api_->functions().ncclGetUniqueId(&invitation.id);
    if (result != Result::kSuccess) {
      write_text(invitation.complaint, api_->describe(result, nullptr));
    }
  }
  Operation operation{.kind = OpKind::kBroadcast, .label = "NCCL's id"};
  Buffers& told = rank() == 0 ? operation.inputs : operation.outputs;
  told = {Buffer{&invitation, sizeof invitation, DType::kUInt8, {}}};
  control_->run(std::move(operation));
  if (invitation.complaint[0] != '\0') {
    const std::string complaint = read_text(invitation.complaint);
    throw TransportError(pydist::join("NCCL made no id: ", complaint),
                         control_->culprit(0, complaint));
  }
  nccl::Config config;
  const Result result =
      api_->functions().ncclCommInitRankConfig(&comm_, size(), invitation.id, rank(), &config);
  if (result != Result::kSuccess && result != Result::kInProgress) {
    comm_ = nullptr;
    throw_failure(result, "joining the group");
  }
  poll_until_ready("joining the group", deadline, kLongestJoiningPause);
}

void NcclGroup::poll_until_ready(const char* what, Deadline deadline, microseconds longest_pause,
                                 const NcclGroup* other) {
  microseconds pause{20};
  const Deadline at_once = Deadline::in(kLaunchTime);
  Deadline vain_until = Deadline::never();
  Deadline slice = Deadline::in(kInterruptionInterval);
  while (true) {
    Result state = Result::kInProgress;
    std::uint64_t launching = kAnyOperation;
    {
      const std::lock_guard lock(mutex_);
      rethrow_if_any(failure_.error());
      if (life_.has_joined()) {
        launching = launching_turn_;
      }
      if (other != nullptr) {
        rethrow_if_any(other->failure());
      }
      state = (other != nullptr ? other : this)->async_state();
    }
    if (state == Result::kSuccess) {
      return;
    }
    if (state != Result::kInProgress) {
      throw_failure(state, what);
    }
    rethrow_if_any(control_->failure());
    if (const auto absence = news_.absence(); !absence || !absence->lacks(launching)) {
      vain_until = Deadline::never();
    } else if (vain_until.is_never()) {
      vain_until = Deadline::in(kVainPatience);
    } else if (vain_until.has_passed()) {
      std::rethrow_exception(make_error(
          absence->kind, pydist::join(what, " in NCCL: ", absence->what, "."), absence->blame));
    }
    if (deadline.has_passed()) {
      throw Timeout(pydist::join(what, " in NCCL did not end in time.", places()));
    }
    if (slice.has_passed()) {
      check_interruption();
      slice = Deadline::in(kInterruptionInterval);
    }
    if (!at_once.has_passed()) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, longest_pause);
  }
}

void NcclGroup::check(Result result, const char* what) {
  if (result == Result::kInProgress) {
    poll_until_ready(what, launching_until_);
  } else if (result != Result::kSuccess) {
    throw_failure(result, what);
  }
}

void NcclGroup::throw_failure(Result result, const char* what) {
  const auto [kind, text, blame] = describe(api_->error_of(result, what, comm_));
  const Deadline patience = Deadline::in(name_patience_).earlier_of(launching_until_);
  Deadline slice = Deadline::in(kInterruptionInterval);
  while (may_be_of_a_peer(result)) {
    rethrow_if_any(failure());
    rethrow_if_any(control_->failure());
    if (const auto absence = news_.absence()) {
      std::rethrow_exception(make_error(
          absence->kind, pydist::join(text, " The reason: ", absence->what, "."), absence->blame));
    }
    if (patience.has_passed()) {
      break;
    }
    if (slice.has_passed()) {
      check_interruption();
      slice = Deadline::in(kInterruptionInterval);
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  std::rethrow_exception(
      make_error(kind, kind == ErrorKind::kTimeout ? text + places() : text, blame));
}

std::string NcclGroup::places() const {
  const std::string text = places_of_ranks(*control_);
  return text.empty() ? text : " " + text;
}

void NcclGroup::grouped(const std::function<void()>& body) {
  check(api_->functions().ncclGroupStart(), "ncclGroupStart");
  try {
    body();
  } catch (...) {
    static_cast<void>(api_->functions().ncclGroupEnd());  // or the thread stays inside of it
    throw;
  }
  check(api_->functions().ncclGroupEnd(), "ncclGroupEnd");
}

WorkPtr NcclGroup::launch(Launch launch, const std::function<void()>& enqueue) {
  if (const std::exception_ptr error = failure_of_others()) {
    fail(error);
  }
  if (is_in_launch) {
    throw InvalidUsage(
        "A collective on the GPU was started by a signal handler that interrupted another one.");
  }
  std::unique_lock order(launch_mutex());
  LaunchMark mark(is_launching_);
  rethrow_if_any(failure());
  if (is_shut_down_) {
    throw InvalidUsage(pydist::join(to_string(launch.kind), " on the group '", control_->name(),
                                    "', which has been shut down."));
  }
  find_capture(launch);
  if (capture_) {
    launch.holding.clear();  // nothing runs yet
  }
  UnderWay entry{nullptr, launch.deadline,         launch.kind, 0,
                 0,       std::move(launch.label), 0,           std::move(launch.holding)};
  {
    const std::lock_guard lock(mutex_);
    entry.sequence = ++sequence_;
    turn_ += capture_ ? 0 : 1;
    entry.turn = turn_;
    launching_turn_ = capture_ ? turn_ + 1 : turn_;
  }
  if (journal_ != nullptr) {
    entry.ticket =
        journal_->begin(fingerprint_, entry.sequence, static_cast<std::uint8_t>(entry.kind),
                        launch.bytes, entry.label);
  }
  const auto close_journal = [&](JournalState state) {
    if (journal_ != nullptr) {
      journal_->finish(entry.ticket, state);
    }
  };
  launching_until_ = launch.deadline;
  std::exception_ptr error;
  std::exception_ptr interruption;
  std::shared_ptr<LaunchedWork> work;
  try {
    const cuda::DeviceGuard guard(device_);
    work = std::make_shared<LaunchedWork>(weak_from_this(), device_, capture_);
    entry.work = work;
    for (nccl::StreamHandle each : launch.streams) {
      work->event().record(each);
      work->event().hold_back(stream());
    }
    {
      const std::lock_guard calls(calls_mutex_);
      enqueue();
    }
    work->event().record(stream());
    for (std::size_t i = 0; launch.is_awaited && i < launch.streams.size(); ++i) {
      work->event().hold_back(launch.streams[i]);
    }
  } catch (const Error& thrown) {
    error = make_error(
        thrown.kind(),
        pydist::join(entry.title(), " on rank ", rank(), " of ", size(), ": ", thrown.what()),
        thrown.blame());
  } catch (...) {
    interruption = std::current_exception();
    error = make_error(ErrorKind::kAborted,
                       pydist::join("rank ", rank(), " was interrupted in ", entry.title(), " (",
                                    kWhatInterrupts, ")."),
                       Blame{.ranks = {rank()}, .cause = "was interrupted"});
  }
  if (error == nullptr && capture_) {
    has_captured_ = true;
    close_journal(JournalState::kSucceeded);
    work->finish();
  } else if (error == nullptr) {
    const std::lock_guard lock(mutex_);
    error = failure_.error();  // then everything under way has been, or will be, given up
    if (error == nullptr) {
      if (launch.is_awaited) {
        entry.holding.clear();
      }
      under_way_.push_back(std::move(entry));
    }
  }
  if (error != nullptr && !capture_) {
    has_broken_off_ = true;
  }
  mark.end();  // after that: an abort waits for it, and then asks
  order.unlock();
  if (error != nullptr) {
    // Without the lock: the companion's callbacks may launch.
    fail(error);
    close_journal(JournalState::kFailed);
    // Some of it may be on the stream. NOLINTNEXTLINE(bugprone-use-after-move): not moved, then
    keep_unless_quiet(std::move(entry.holding), Deadline::in(end_patience_));
    rethrow_if_any(interruption);
    std::rethrow_exception(failure());
  }
  if (watchdog_ != nullptr) {
    watchdog_->wake();
  }
  return work;
}

// Waits until no thread is launching an operation here, but not for ever: NCCL may never return.
void NcclGroup::wait_for_launches() const noexcept {
  const Deadline patience = Deadline::in(kLaunchPatience);
  while (is_launching_ && !is_in_launch && !patience.has_passed()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void* NcclGroup::register_memory(void* data, std::size_t bytes) {
  if (waits_on_registered_memory()) {
    return nullptr;
  }
  const std::lock_guard order(launch_mutex());
  const LaunchMark mark(is_launching_);
  if (failure_.is_set() || is_shut_down_) {
    return nullptr;  // there may be no communicator any more
  }
  const std::lock_guard calls(calls_mutex_);
  void* registration = nullptr;
  const Result result = api_->functions().ncclCommRegister(comm_, data, bytes, &registration);
  if (result == Result::kInProgress) {
    poll_until_ready("ncclCommRegister", Deadline::in(end_patience_));
  }
  return result == Result::kSuccess || result == Result::kInProgress ? registration : nullptr;
}

bool NcclGroup::deregister(void* registration) noexcept {
  if (has_ended()) {
    return true;  // with the communicator, everything that it knew is forgotten
  }
  if (is_in_launch) {
    return false;
  }
  // Another launch may take long, where it sets up connections.
  const Deadline patience = Deadline::in(kLaunchPatience);
  std::unique_lock order(launch_mutex(), std::defer_lock);
  while (!order.try_lock()) {
    if (patience.has_passed()) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  const LaunchMark mark(is_launching_);  // an abort waits for it
  const std::lock_guard calls(calls_mutex_);
  if (failure_.is_set() || life_.now() >= LifeStep::kFinalizing) {
    return false;
  }
  static_cast<void>(api_->functions().ncclCommDeregister(comm_, registration));
  return true;
}

}  // namespace pydist
