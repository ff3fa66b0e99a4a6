#include "communicator/nccl/nccl_communicator.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/interruption.h"
#include "base/log.h"
#include "communicator/complaints.h"
#include "communicator/gathered_call_mismatch.h"
#include "communicator/nccl/freed_device_memory.h"
#include "communicator/nccl/kept_buffers.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_collectives.h"
#include "communicator/nccl/nccl_group.h"
#include "communicator/nccl/nccl_watchdog.h"
#include "communicator/nccl/streams_of_process.h"
#include "communicator/open_communicators.h"
#include "communicator/peers/endpoint.h"
#include "cuda/device_memory.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// Memory that NCCL has allocated. Once it is registered, NCCL moves it without copies of its own.
// Where NCCL cannot allocate, it is plain device memory. Registration only makes collectives
// faster; they are right on any memory that is registered on all ranks or on none.
class NcclMemory final : public Memory {
 public:
  NcclMemory(std::shared_ptr<NcclGroup> group, std::size_t bytes)
      : group_(std::move(group)), bytes_(bytes) {
    const cuda::DeviceGuard guard(group_->device());
    const cuda::RelaxedCapture relaxed;
    const nccl::Functions& functions = group_->api().functions();
    data_ = cuda::allocate_memory(group_->device(), bytes, [&] {
      void* data = nullptr;
      is_nccls_ =
          group_->api().has_registration() &&
          functions.ncclMemAlloc(&data, std::max(bytes, std::size_t{1})) == nccl::Result::kSuccess;
      return is_nccls_ ? data : cuda::Driver::get().try_allocate(bytes);
    });
    if (is_nccls_ && bytes != 0) {
      try {
        registration_ = group_->register_memory(data_, bytes);
      } catch (...) {
        static_cast<void>(functions.ncclMemFree(data_));
        throw;
      }
    }
  }

  [[nodiscard]] bool is_registered() const noexcept { return registration_ != nullptr; }
  // Takes that back; throws where it cannot.
  void deregister(Deadline deadline) {
    const cuda::DeviceGuard guard(group_->device());
    const cuda::RelaxedCapture relaxed;
    while (is_registered() && !group_->deregister(registration_)) {
      rethrow_if_any(group_->failure());
      if (deadline.has_passed()) {
        throw Timeout("ncclCommDeregister waited in vain for a launch to return.");
      }
      check_interruption();
      std::this_thread::sleep_for(milliseconds(1));
    }
    registration_ = nullptr;
  }

  ~NcclMemory() override {
    if (data_ == nullptr || in_forked_child()) {
      return;
    }
    FreedDeviceMemory::of_process().free_later(
        group_->device(),
        [group = std::weak_ptr(group_), free_nccls = group_->api().functions().ncclMemFree,
         data = data_, registration = registration_, is_nccls = is_nccls_] {
          // A group that is gone has ended its communicator, and with it every registration.
          if (const auto known = group.lock();
              known != nullptr && registration != nullptr && !known->deregister(registration)) {
            return false;
          }
          if (is_nccls) {
            static_cast<void>(free_nccls(data));
          } else {
            cuda::Driver::get().free(data);
          }
          return true;
        });
  }

  [[nodiscard]] void* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }
  [[nodiscard]] bool is_symmetric() const noexcept override { return false; }

 private:
  const std::shared_ptr<NcclGroup> group_;
  const std::size_t bytes_;
  void* data_ = nullptr;
  void* registration_ = nullptr;
  bool is_nccls_ = false;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(NcclOptions options, std::shared_ptr<NcclGroup> group)
      : options_(std::move(options)),
        host_(options_.host),
        group_(std::move(group)),
        settings_{options_.kernels, options_.why_no_kernels,
                  options_.environment.algorithm == AlgorithmChoice::kRing} {}

  ~NcclCommunicator() override { shutdown(); }

  [[nodiscard]] int rank() const noexcept override { return host_->rank(); }
  [[nodiscard]] int size() const noexcept override { return host_->size(); }
  [[nodiscard]] const std::string& name() const noexcept override { return host_->name(); }

  [[nodiscard]] Capabilities capabilities() const override {
    Capabilities can = host_->capabilities();
    const std::string host = join("On the CPU (", can.backend, "): ", can.numerics);
    can.backend = "nccl";
    can.devices = {Device{}, Device{DeviceType::kCuda, options_.device}};
    can.needs_host = false;
    can.takes_device_factors = settings_.has_kernels() && !settings_.pins_ring;
    can.device_bytes = group_->device_bytes();
    if (!settings_.has_kernels()) {
      can.wire_dtypes.clear();
    }
    // NCCL promises neither from run to run, nor for other sizes of buckets.
    can.equal_from_run_to_run = false;
    can.equal_for_all_chunkings = false;
    can.numerics = join("On the GPU: ", numerics_on_nccl(settings_), " ", host);
    return can;
  }

  [[nodiscard]] bool takes(DeviceType /*type*/) const override { return true; }

  [[nodiscard]] std::string why_unsupported(OpKind kind, ReduceOp op, DType dtype) const override {
    return why_not_on_nccl(settings_, kind, op, dtype, /*has_wire_dtype=*/false);
  }

  void check(const Operation& operation) const override {
    check_own(operation);
    if (!is_for_gpu(operation)) {
      host_->check(operation);
    }
  }

  [[nodiscard]] WorkPtr submit(Operation operation) override {
    check_own(operation);
    drain_before(operation);
    return is_for_gpu(operation) ? launch({std::move(operation)})
                                 : host_->submit(std::move(operation));
  }

  // The host's first: a launch may have to wait for ranks that wait for a message of this one.
  [[nodiscard]] std::vector<WorkPtr> submit_grouped(std::vector<Operation> operations) override {
    for (const Operation& operation : operations) {
      check(operation);
    }
    std::vector<WorkPtr> works(operations.size());
    std::vector<bool> are_for_gpu;
    std::vector<Operation> on_gpu;
    std::vector<Operation> on_host;
    for (Operation& operation : operations) {
      drain_before(operation);
      are_for_gpu.push_back(is_for_gpu(operation));
      (are_for_gpu.back() ? on_gpu : on_host).push_back(std::move(operation));
    }
    const std::vector<WorkPtr> hosts = host_->submit_grouped(std::move(on_host));
    WorkPtr launched;
    if (!on_gpu.empty()) {
      try {
        launched = launch(std::move(on_gpu));
      } catch (...) {
        std::rethrow_exception(fail_started(hosts));
      }
    }
    auto next = hosts.begin();
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i] = are_for_gpu[i] ? launched : *next++;
    }
    return works;
  }

  using Communicator::run;
  // An operation on the GPU is over, for the caller, once the caller's stream waits for it.
  int run(Operation&& operation) override {
    check_own(operation);
    drain_before(operation);
    if (!is_for_gpu(operation)) {
      return host_->run(std::move(operation));
    }
    static_cast<void>(launch({std::move(operation)}, /*is_awaited=*/true));
    return -1;
  }

  [[nodiscard]] MemoryPtr allocate(std::size_t bytes, Device device) override {
    require_open("allocate");
    if (device.type == DeviceType::kCpu) {
      return host_->allocate(bytes, device);
    }
    require_own(device, "allocate");
    require_no_capture(join("allocate on the group '", name(), "'"), options_.device);
    std::shared_ptr<NcclMemory> memory;
    std::string complaint;
    try {
      group_->free_now();
      memory = std::make_shared<NcclMemory>(group_, bytes);
    } catch (const Error& error) {
      complaint = join(bytes, " bytes on the GPU: ", error.what());
    } catch (...) {  // an interruption
      group_->agree("was interrupted");
      throw;
    }
    if (!group_->agree(complaint, memory != nullptr && memory->is_registered())) {
      memory->deregister(Deadline::in(timeout()));
    }
    return memory;
  }

  [[nodiscard]] std::vector<std::byte*> symmetric_addresses(const void* data,
                                                            std::size_t bytes) const override {
    return host_->symmetric_addresses(data, bytes);
  }

  [[nodiscard]] Blame culprit(int rank, std::string cause) const override {
    return host_->culprit(rank, std::move(cause));
  }
  void require_hope(const std::vector<int>& ranks) override { host_->require_hope(ranks); }
  [[nodiscard]] Timeout with_keeper(const Timeout& late) const override {
    return host_->with_keeper(late);
  }

  [[nodiscard]] CommunicatorPtr split(const std::vector<int>& ranks) override {
    require_open("split");
    NcclOptions options = options_;
    options.host = host_->split(ranks);
    // All ranks of the parent have to call a split.
    const bool has_all = std::cmp_equal(ranks.size(), size()) && std::ranges::is_sorted(ranks);
    options.parent = has_all ? group_ : nullptr;
    return create_nccl_communicator(std::move(options));
  }

  [[nodiscard]] CommunicatorPtr split_on_host(const std::vector<int>& ranks) override {
    require_open("split");
    return host_->split(ranks);
  }

  [[nodiscard]] milliseconds timeout() const override { return host_->timeout(); }
  void set_timeout(milliseconds timeout) override { host_->set_timeout(timeout); }

  void abort(const Error& reason) override {
    require_not_forked();
    group_->fail(make_error(reason.kind(), reason.what(), reason.blame()));
  }

  [[nodiscard]] std::exception_ptr failure() const override {
    if (std::exception_ptr error = group_->failure()) {
      return error;
    }
    return host_->failure();
  }

  void check_shutdown() const override {
    if (!is_closed_) {
      require_no_capture(join("shutdown of the group '", name(), "'"), options_.device);
    }
  }

  void shutdown() noexcept override {
    if (is_closed_.exchange(true) || in_forked_child()) {
      return;
    }
    group_->end();
    host_->shutdown();
  }

  void wait_for_end(Deadline deadline) noexcept override {
    if (!in_forked_child()) {
      group_->wait_for_end(deadline);
    }
  }

  [[nodiscard]] std::vector<std::string> whereabouts() const override {
    return host_->whereabouts();
  }

 private:
  // Messages go by the host, whatever they hold.
  static bool is_for_gpu(const Operation& operation) {
    const Buffer* const buffer = operation.first_buffer();
    return buffer != nullptr && buffer->device.type == DeviceType::kCuda &&
           !is_point_to_point(operation.kind);
  }

  void require_open(std::string_view what) const {
    require_not_forked();
    if (is_closed_.load(std::memory_order_relaxed)) {
      throw InvalidUsage(join(what, " on the group '", name(), "', which has been shut down."));
    }
    rethrow_if_any(group_->failure());
  }

  void require_own(Device device, std::string_view what) const {
    if (device.index != options_.device) {
      throw InvalidUsage(join(what, ": a tensor is on cuda:", device.index, ", but rank ", rank(),
                              " of group '", name(), "' works on cuda:", options_.device,
                              ". Move it there; pydist.device() tells a rank's device."));
    }
  }

  // A barrier is reached once what this rank has on the GPU has ended.
  void drain_before(const Operation& operation) const {
    if (operation.kind == OpKind::kBarrier) {
      group_->drain(deadline_of(operation));
    }
  }

  // check() without what the host looks at by itself.
  void check_own(const Operation& operation) const {
    require_open(to_string(operation.kind));
    if (!is_for_gpu(operation)) {
      return;
    }
    validate(operation, rank(), size());
    const Buffer& buffer = *operation.first_buffer();
    require_own(buffer.device, to_string(operation.kind));
    const bool has_wire = operation.wire_dtype && *operation.wire_dtype != buffer.dtype;
    if (const std::string why =
            why_not_on_nccl(settings_, operation.kind, operation.op, buffer.dtype, has_wire);
        !why.empty()) {
      throw InvalidUsage(join(to_string(operation.kind), ": ", why, "."));
    }
  }

  // In one launch, so that they follow each other without a gap. Where it is awaited, the callers'
  // streams wait for it.
  [[nodiscard]] WorkPtr launch(std::vector<Operation> operations, bool is_awaited = false) {
    const Operation& first = operations.front();
    Deadline deadline = deadline_of(first);
    std::uint64_t bytes = 0;
    for (const Operation& operation : operations) {
      deadline = deadline.earlier_of(deadline_of(operation));
      for (const Buffers* buffers : {&operation.inputs, &operation.outputs}) {
        std::uint64_t each = 0;
        for (const Buffer& buffer : *buffers) {
          each += buffer.bytes();
        }
        bytes = std::max(bytes, each);
      }
    }
    if (options_.environment.debug) {
      // Compared before the launch, during which all other launches of this process have to wait.
      compare_with_others(operations, deadline);
    }
    std::vector<nccl::StreamHandle> streams;
    for (const Operation& operation : operations) {
      if (std::find(streams.begin(), streams.end(), operation.stream) == streams.end()) {
        streams.push_back(operation.stream);
      }
    }
    std::string label = first.label;
    if (needs_one_form(settings_, first, size())) {
      // For a time-out: ranks that have given other forms wait for each other.
      label += join(label.empty() ? "" : ", ", "blocks ", form_of_blocks(first, size()));
    }
    return group_->launch({first.kind, bytes, std::move(label), std::move(streams), deadline,
                           group_->hold(operations), is_awaited},
                          [&] {
                            for (const Operation& operation : operations) {
                              enqueue_on_nccl(*group_, settings_, operation);
                            }
                          });
  }

  // Throws a Mismatch on every rank, and fails the group, where the ranks called different things.
  void compare_with_others(const std::vector<Operation>& operations, Deadline deadline) {
    const auto all_gather = [&](const void* mine, void* all, std::size_t bytes) {
      Operation exchange;
      exchange.deadline = deadline;
      exchange.kind = OpKind::kAllGather;
      exchange.inputs = {Buffer{const_cast<void*>(mine), bytes, DType::kUInt8, {}}};
      exchange.outputs = {Buffer{all, bytes * static_cast<std::size_t>(size()), DType::kUInt8, {}}};
      exchange.label = "what each rank called";
      group_->control().run(std::move(exchange));
    };
    try {
      compare_captures(operations.front(), all_gather);
      for (const Operation& operation : operations) {
        check_agreement(operation, rank(), size(), all_gather,
                        needs_one_form(settings_, operation, size()));
      }
    } catch (...) {
      group_->fail(std::current_exception());
      throw;
    }
  }

  // If one rank only records the operation into a graph, the GPUs of the others wait for it.
  void compare_captures(const Operation& operation, const AllGatherBytes& all_gather) const {
    const cuda::DeviceGuard guard(options_.device);
    const std::uint8_t mine = cuda::Driver::get().is_capturing(operation.stream) ? 1 : 0;
    std::vector<std::uint8_t> all(static_cast<std::size_t>(size()));
    all_gather(&mine, all.data(), sizeof mine);
    const auto with = std::find(all.begin(), all.end(), 1);
    const auto without = std::find(all.begin(), all.end(), 0);
    if (with != all.end() && without != all.end()) {
      throw InvalidUsage(join(to_string(operation.kind), ": rank ", with - all.begin(),
                              " captures it into a CUDA graph, but rank ", without - all.begin(),
                              " does not capture it; do so on all ranks or on none."));
    }
  }

  const NcclOptions options_;
  const CommunicatorPtr host_;
  const std::shared_ptr<NcclGroup> group_;
  const NcclSettings settings_;
  std::atomic<bool> is_closed_{false};
};

// Throws on all ranks where one has no NCCL. Which way an operation takes depends on whether there
// are kernels, so all ranks have them or none uses any. Collective.
void use_what_all_have(Communicator& control, NcclOptions& options) {
  NcclGroup::agree(control, options.why_no_api);
  if (options.why_no_kernels.empty()) {
    // Before the first collective: CUDA may wait for running kernels when it loads one.
    options.why_no_kernels = options.kernels->reason_not_to_run_on(options.device);
  }
  const auto lack = hear_all(control, options.why_no_kernels, NcclGroup::kAboutNccl).first;
  if (!lack) {
    return;
  }
  const std::string group = join("group '", options.host->name(), "'");
  if (options.why_no_kernels.empty()) {
    options.why_no_kernels =
        join("rank ", lack->rank, " of ", group, " cannot use them: ", lack->text);
  }
  options.kernels = nullptr;
  static std::atomic<bool> has_warned{false};  // once in a process, whatever its groups
  if (!has_warned.exchange(true)) {
    log_line(LogLevel::kWarning,
             join(group, " does without pydist's CUDA kernels: ", options.why_no_kernels));
  }
}

}  // namespace

void let_go_of_nccl() noexcept {
  if (in_forked_child()) {
    return;  // all of it is the parent's, and a driver may wait there for threads of the parent's
  }
  LateEnds::of_process().join();
  KeptBuffers::of_process().release();
  LateEnds::of_process().join(Deadline::in(kFreePatience));
  FreedDeviceMemory::of_process().free_all(Deadline::in(kFreePatience));
}

CommunicatorPtr create_nccl_communicator(NcclOptions options) {
  require_not_forked();
  // CUDA has been started, which no child that is forked from now on can use.
  static const GroupAtWork for_ever;
  PYDIST_CHECK(options.host != nullptr && (options.api == nullptr) != options.why_no_api.empty());
  PYDIST_CHECK((options.kernels == nullptr) != options.why_no_kernels.empty());
  require_no_capture(join("joining the group '", options.host->name(), "'"), options.device);
  nccl::warn_of_blocking_communicators();
  const Deadline deadline = Deadline::in(options.host->timeout());
  if (options.endpoint == nullptr) {
    options.endpoint = Endpoint::of_process(options.environment);
  }
  std::vector<int> everybody(static_cast<std::size_t>(options.host->size()));
  std::iota(everybody.begin(), everybody.end(), 0);

  NcclGroup::Options group;
  group.api = options.api;
  group.control = options.host->split(everybody);
  PYDIST_CHECK(group.control->peer_news() != nullptr);
  use_what_all_have(*group.control, options);
  group.companion = options.host;
  group.parent = std::move(options.parent);
  group.device = options.device;
  group.journal = std::shared_ptr<Journal>(options.endpoint, &options.endpoint->page().journal);
  group.watchdog = NcclWatchdog::of_process();
  group.end_patience = options.end_patience;
  group.name_patience = options.name_patience;
  group.long_wait = options.long_wait;
  auto communicator =
      std::make_shared<NcclCommunicator>(options, NcclGroup::join(std::move(group), deadline));
  note_open(communicator);
  return communicator;
}

}  // namespace pydist
