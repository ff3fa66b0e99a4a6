#include "c10d/gloo_communicator.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/engine_thread.h"
#include "base/error.h"
#include "base/fork.h"
#include "c10d/elastic_threads.h"
#include "c10d/gloo_channel.h"
#include "c10d/gloo_collectives.h"
#include "c10d/gloo_roll_call.h"
#include "c10d/serial_queue.h"
#include "c10d/store.h"
#include "communicator/agreement.h"
#include "communicator/open_communicators.h"
#include "communicator/splits.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// How long shutdown() waits for operations that it has cut off.
constexpr std::chrono::seconds kShutdownPatience{5};

// The key under which the first failure of a group stands in its store, and how often ranks look
// there.
constexpr const char* kNewsKey = "failed/why";
constexpr milliseconds kNewsInterval{500};
// How long the reason for a lost connection may be on its way to the store.
constexpr std::chrono::seconds kReasonPatience{1};
// After how many questions without an answer, of a second or so each, the store is gone.
constexpr int kMostSilences = 20;
// How long a farewell may take to be on its way.
constexpr milliseconds kFarewellPatience{500};

class OrdinaryMemory : public Memory {
 public:
  explicit OrdinaryMemory(std::size_t bytes) : bytes_(bytes) {
    constexpr std::size_t kAlignment = 64;
    const std::size_t rounded =
        (std::max(bytes, std::size_t{1}) + kAlignment - 1) & ~(kAlignment - 1);
    data_ = std::aligned_alloc(kAlignment, rounded);
    if (data_ == nullptr) {
      throw TransportError(join("The system has no memory for ", bytes, " bytes."));
    }
  }
  ~OrdinaryMemory() override { std::free(data_); }

  void* data() const noexcept override { return data_; }
  std::size_t bytes() const noexcept override { return bytes_; }
  bool is_symmetric() const noexcept override { return false; }

 private:
  std::size_t bytes_;
  void* data_;
};

// What operations under way share with the communicator, which they may outlive.
class Group : public std::enable_shared_from_this<Group> {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> backend, StorePtr store, int rank, int size,
        std::string name)
      : channel(std::move(backend), rank, size), store_(std::move(store)), name_(std::move(name)) {}

  GlooChannel channel;

  void require_sound() const {
    const std::lock_guard lock(mutex_);
    if (is_shut_down_) {
      throw InvalidUsage(join("The group '", name_, "' has been shut down."));
    }
    if (failure_ != nullptr) {
      std::rethrow_exception(failure_);
    }
  }

  [[nodiscard]] std::exception_ptr failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  // The first failure stays; the connections go, so that peers learn of it and waiters wake.
  // Returns the group's failure.
  std::exception_ptr fail(const std::exception_ptr& error) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_ != nullptr) {
        return failure_;
      }
      failure_ = error;
    }
    channel.close();
    // For ranks that are in no operation of this group, and so notice no closed connection.
    ElasticThreads::shared().post(
        [store = store_, text = describe(error).message] { tell_of_failure(*store, text); });
    return error;
  }

  // A failure that another rank has told of, or the loss of a neighbour. Never waits: the store is
  // asked on another thread.
  std::optional<Absence> absence() {
    const std::lock_guard lock(news_mutex_);
    if (!is_asking_ && next_question_.has_passed()) {
      is_asking_ = true;
      ElasticThreads::shared().post([self = shared_from_this()] { self->ask_for_news(); });
    }
    return news_.empty() ? loss_ : Absence{.what = news_};
  }

  void set_farewell(std::uint64_t done) noexcept { farewell_ = done; }

  // Note [Neighbours] When a rank dies, its connections are cut, but gloo tells only a rank that
  // waits for a message from it. So each rank waits for a message from both of its neighbours, a
  // farewell, on a thread for each, for as long as the group lives. A rank that shuts the group
  // down says farewell first, by the connection itself, because the store may go with the rank. A
  // rank that fails writes its reason into the store. If a connection is lost without either, the
  // neighbour has died, and the rank that sees this tells the others through the store.
  void watch_neighbours() {
    for (const int peer : neighbours()) {
      {
        const std::lock_guard lock(mutex_);
        if (is_shut_down_) {
          return;
        }
        is_watching_ = true;
        ++listeners_;
      }
      try {
        start_engine_thread("pydist-gloo-ear", [self = shared_from_this(), peer] {
          if (const auto done = self->channel.wait_for_farewell(peer)) {
            self->note_loss(
                {.what = join("rank ", peer, " has left"), .is_orderly = true, .done = *done});
          } else {
            self->explain_loss_of(peer);
          }
          const std::lock_guard lock(self->mutex_);
          --self->listeners_;
          self->quiet_.notify_all();
        }).detach();
      } catch (...) {
        const std::lock_guard lock(mutex_);
        --listeners_;
        throw;
      }
    }
  }

  // Precondition: the group has been marked as shut down. Returns false if listeners do not end in
  // time.
  bool stop_watching(std::chrono::seconds patience) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (!is_watching_) {
        return true;
      }
    }
    if (const std::exception_ptr error = failure()) {
      tell_of_failure(*store_, describe(error).message);
    } else {
      const Deadline deadline = Deadline::in(kFarewellPatience);
      for (const int peer : neighbours()) {
        channel.say_farewell(peer, farewell_, deadline);
      }
    }
    channel.close();
    std::unique_lock lock(mutex_);
    return quiet_.wait_for(lock, patience, [this] { return listeners_ == 0; });
  }

  void mark_shut_down() {
    const std::lock_guard lock(mutex_);
    is_shut_down_ = true;
  }

  // Runs `step` of an operation; a failure is the group's, named after the operation.
  template <typename Step>
  int perform(const Operation& operation, const Step& step) {
    try {
      return step();
    } catch (...) {
      const auto [kind, what] = describe(std::current_exception());
      std::rethrow_exception(
          fail(make_error(kind, join(name_of(operation), " on rank ", channel.rank(), " of ",
                                     channel.size(), " of group '", name_, "' failed: ", what))));
    }
  }

  // perform() for a collective, whose failure says who is missing.
  template <typename Step>
  void perform_collective(const Operation& operation, const Step& step) {
    ++collectives_;
    perform(operation, [&] {
      if (const std::exception_ptr earlier = failure()) {
        std::rethrow_exception(earlier);
      }
      try {
        step();
      } catch (...) {
        const auto [kind, what] = describe(std::current_exception());
        if (kind == ErrorKind::kMismatch || failure() != nullptr) {
          throw;
        }
        channel.close();
        const std::string who = call_roll(*store_, collectives_, channel.rank(), channel.size());
        if (who.empty()) {
          throw;
        }
        std::rethrow_exception(make_error(kind, join(what, what.ends_with('.') ? " " : ". ", who)));
      }
      return -1;
    });
  }

  // Messages under way, on threads that nobody joins. Throws where the group takes none.
  void message_started() {
    require_sound();
    const std::lock_guard lock(mutex_);
    if (is_shut_down_) {
      throw Aborted(join("The group '", name_, "' is being shut down."));
    }
    ++messages_;
  }
  void message_finished() {
    const std::lock_guard lock(mutex_);
    --messages_;
    quiet_.notify_all();
  }
  [[nodiscard]] bool has_messages() const {
    const std::lock_guard lock(mutex_);
    return messages_ != 0;
  }
  bool wait_for_messages(std::chrono::seconds patience) {
    std::unique_lock lock(mutex_);
    return quiet_.wait_for(lock, patience, [this] { return messages_ == 0; });
  }

 private:
  [[nodiscard]] std::vector<int> neighbours() const {
    const int size = channel.size();
    std::vector<int> both{(channel.rank() + 1) % size};
    if (size > 2) {
      both.push_back((channel.rank() + size - 1) % size);
    }
    return both;
  }

  void note_loss(Absence loss) {
    const std::lock_guard lock(news_mutex_);
    if (!loss_ || loss.is_worse_than(*loss_)) {
      loss_ = std::move(loss);
    }
  }

  [[nodiscard]] bool is_over() const {
    const std::lock_guard lock(mutex_);
    return is_shut_down_ || failure_ != nullptr;
  }

  // Where others look for it.
  static void tell_of_failure(KeyValueStore& store, const std::string& text) noexcept {
    try {
      static_cast<void>(store.get(kNewsKey, Deadline::in(std::chrono::nanoseconds::zero())));
      return;  // the first failure stays
    } catch (const std::exception&) {
      // None yet.
    }
    try {
      store.set(kNewsKey, text);
    } catch (const std::exception&) {
      // Whoever hosts the store is gone; that is news as well.
    }
  }

  // Throws where the store does not answer.
  [[nodiscard]] bool is_told(const std::string& key) const {
    try {
      static_cast<void>(store_->get(key, Deadline::in(std::chrono::nanoseconds::zero())));
      return true;
    } catch (const Timeout&) {
      return false;
    }
  }

  // What has become of a neighbour whose connection is lost.
  void explain_loss_of(int peer) {
    const Deadline patience = Deadline::in(kReasonPatience);
    try {
      // Waits until it is known that this rank has cut the connection itself, or why another one
      // did.
      while (!is_over() && !is_told(kNewsKey)) {
        if (patience.has_passed()) {
          const std::string loss = join("rank ", peer, " has died, or the network between rank ",
                                        channel.rank(), " and it");
          note_loss({.what = loss});
          store_->set(kNewsKey, loss);
          return;
        }
        std::this_thread::sleep_for(milliseconds(50));
      }
    } catch (const std::exception&) {
      // The neighbour may have cut the connection because of the rank that hosted the store.
      if (!is_over()) {
        const std::lock_guard lock(news_mutex_);
        // The rank that left before is the likely reason.
        loss_ = Absence{.what = join(loss_ ? loss_->what + ". Since then " : "",
                                     "the connection between rank ", channel.rank(), " and rank ",
                                     peer, " is lost, and the job's store does not answer")};
      }
    }
  }

  void ask_for_news() {
    std::string news;
    bool is_silent = false;
    try {
      news = store_->get(kNewsKey, Deadline::in(std::chrono::nanoseconds::zero()));
    } catch (const Timeout&) {
      // None.
    } catch (const std::exception& error) {
      news = error.what();
      is_silent = true;
    }
    const std::lock_guard lock(news_mutex_);
    silences_ = is_silent ? silences_ + 1 : 0;
    // A store that is slow for a while says nothing about the ranks.
    if (!is_silent || silences_ >= kMostSilences) {
      news_ = std::move(news);
    }
    is_asking_ = false;
    next_question_ = Deadline::in(kNewsInterval);
  }

  static std::string name_of(const Operation& operation) {
    std::string name(to_string(operation.kind));
    if (operation.kind == OpKind::kSend) {
      name += join(" to rank ", operation.peer);
    } else if (operation.kind == OpKind::kRecv && operation.peer >= 0) {
      name += join(" from rank ", operation.peer);
    }
    return operation.label.empty() ? name : name + " (" + operation.label + ")";
  }

  const StorePtr store_;
  const std::string name_;
  std::uint64_t collectives_ = 0;           // by the queue's thread only
  std::atomic<std::uint64_t> farewell_{0};  // Absence::done
  mutable std::mutex mutex_;
  std::condition_variable quiet_;
  std::exception_ptr failure_;  // guarded by mutex_
  bool is_shut_down_ = false;   // guarded by mutex_
  int messages_ = 0;            // guarded by mutex_
  int listeners_ = 0;           // guarded by mutex_
  bool is_watching_ = false;    // guarded by mutex_
  std::mutex news_mutex_;
  std::string news_;             // guarded by news_mutex_
  std::optional<Absence> loss_;  // guarded by news_mutex_; of a neighbour
  int silences_ = 0;             // guarded by news_mutex_; of the store, one after the other
  bool is_asking_ = false;       // guarded by news_mutex_
  Deadline next_question_ = Deadline::in(kNewsInterval);  // guarded by news_mutex_
};

class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
                   milliseconds timeout, GlooFactory factory)
      : store_(std::move(store)),
        factory_(std::move(factory)),
        rank_(rank),
        size_(size),
        name_(std::move(name)),
        timeout_(timeout),
        group_(std::make_shared<Group>(factory_(store_, rank, size, timeout),
                                       adapt_store(store_, kRollCallPatience), rank, size, name_)) {
  }

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

  WorkPtr submit(Operation operation) override {
    check(operation);
    const Deadline deadline = deadline_of(operation);
    auto work = std::make_shared<Work>();
    if (is_point_to_point(operation.kind)) {
      start_message(std::move(operation), deadline, work);
      return work;
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

  WorkPtr submit_grouped(std::vector<Operation> operations) override {
    for (const Operation& operation : operations) {
      check(operation);
    }
    std::vector<WorkPtr> works;
    works.reserve(operations.size());
    for (Operation& operation : operations) {
      works.push_back(submit(std::move(operation)));
    }
    return combine(std::move(works));
  }

  MemoryPtr allocate(std::size_t bytes, Device device) override {
    require_not_forked();
    group_->require_sound();
    if (device != Device{}) {
      throw InvalidUsage("The gloo backend allocates CPU memory only.");
    }
    return std::make_shared<OrdinaryMemory>(bytes);
  }

  CommunicatorPtr split(const std::vector<int>& ranks) override {
    require_not_forked();
    group_->require_sound();
    const Splits::Split split = splits_.next(ranks, rank_, size_);
    std::string name = join(name_, "/", split.name);
    auto store = c10::make_intrusive<c10d::PrefixStore>(name, store_);
    return create_gloo_communicator(store, split.rank, static_cast<int>(ranks.size()),
                                    std::move(name), timeout(), factory_);
  }

  milliseconds timeout() const override { return timeout_.load(); }
  void set_timeout(milliseconds timeout) override { timeout_ = timeout; }

  void abort(const Error& reason) override {
    require_not_forked();
    group_->fail(make_error(reason.kind(), reason.what()));
  }

  std::exception_ptr failure() const override { return group_->failure(); }

  void shutdown() noexcept override {
    if (is_shut_down_.exchange(true) || in_forked_child()) {
      return;
    }
    group_->mark_shut_down();
    if (!queue_.is_idle() || group_->has_messages()) {
      group_->fail(
          std::make_exception_ptr(Aborted(join("The group '", name_, "' was shut down on rank ",
                                               rank_, " while an operation was under way."))));
    }
    queue_.stop();
    const bool is_quiet = group_->wait_for_messages(kShutdownPatience);
    if (!group_->stop_watching(kShutdownPatience) || !is_quiet) {
      group_->channel.abandon();
    }
    group_->channel.release();
    at_work_.end();
  }

  std::optional<Absence> absence() const override {
    return size_ == 1 ? std::nullopt : group_->absence();
  }
  void set_farewell(std::uint64_t done) noexcept override { group_->set_farewell(done); }

  void watch_peers() override {
    if (size_ > 1) {
      group_->watch_neighbours();
    }
  }

  std::vector<std::string> whereabouts() const override { return {}; }

 private:
  // Counts a message as under way.
  class UnderWay {
   public:
    explicit UnderWay(Group& group) : group_(group) { group_.message_started(); }
    UnderWay(const UnderWay&) = delete;
    UnderWay& operator=(const UnderWay&) = delete;
    ~UnderWay() { group_.message_finished(); }

   private:
    Group& group_;
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

  static int run_collective(Group& group, const Operation& operation, Deadline deadline) {
    group.perform_collective(operation, [&] {
      // It costs about one round trip of gloo's, which large operations do not notice.
      check_agreement(operation, group.channel.rank(), group.channel.size(),
                      [&](const void* mine, void* all, std::size_t bytes) {
                        group.channel.all_gather(mine, all, bytes, deadline);
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
    messages_.post([group = group_, operation = std::move(operation), deadline, work, state,
                    under_way = std::move(under_way), message = std::move(message)]() mutable {
      finish_with(*work, [&] {
        return group->perform(operation, [&] { return GlooChannel::finish(message, deadline); });
      });
      message.reset();
      under_way.reset();
    });
  }

  void check(const Operation& operation) const {
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

  [[nodiscard]] Deadline deadline_of(const Operation& operation) const {
    return operation.deadline ? *operation.deadline : Deadline::in(timeout());
  }

  GroupAtWork at_work_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlooFactory factory_;
  const int rank_;
  const int size_;
  const std::string name_;
  std::atomic<milliseconds> timeout_;
  std::atomic<bool> is_shut_down_{false};
  Splits splits_;
  const std::shared_ptr<Group> group_;
  ElasticThreads messages_;
  SerialQueue queue_{"pydist-gloo"};
};

// torch's gloo waits for its peers inside a call of the store, and a TCPStore serves one call at a
// time. On a shared connection a group that one thread makes would keep all other threads from the
// store until every rank has joined that group, which those threads may have to bring about.
c10::intrusive_ptr<c10d::Store> with_own_connection(c10::intrusive_ptr<c10d::Store> store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // Stores that are written in Python need not implement clone().
  }
}

}  // namespace

CommunicatorPtr create_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                         std::string name, std::chrono::milliseconds timeout,
                                         GlooFactory factory) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidUsage(join("Rank ", rank, " of ", size, " is not a rank of a group."));
  }
  if (!store) {
    throw InvalidUsage("A group needs a store for its ranks to meet at, and got None.");
  }
  require_not_forked();
  if (size > 1) {
    // A store whose host is stopped is to be told here: torch's gloo would ask it without limit.
    const StorePtr asked =
        adapt_store(store, std::min<std::chrono::milliseconds>(timeout, kStorePatience));
    if (rank == 0) {
      asked->erase(kNewsKey);  // of a group of that name which has failed
    }
    const std::string key = join("here/", rank);
    asked->set(key, "1");
    (void)asked->get(key, Deadline::in(timeout));
    store = with_own_connection(std::move(store));
  }
  auto communicator = std::make_shared<GlooCommunicator>(
      std::move(store), rank, size, std::move(name), timeout, std::move(factory));
  if (size > 1) {
    // A rank that is connected may leave the group at once; to one that still connects, it is lost.
    Operation barrier;
    barrier.kind = OpKind::kBarrier;
    communicator->submit(std::move(barrier))->wait();
  }
  note_open(communicator);
  return communicator;
}

}  // namespace pydist
