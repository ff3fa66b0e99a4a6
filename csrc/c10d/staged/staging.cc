#include "c10d/staged/staging.h"

#include <array>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "c10d/errors.h"

namespace pydist {
namespace {

// See Note [Three slots].
constexpr std::size_t kSlots = 3;
// How long a failed operation waits for the copies that it has started. Such a copy waits only for
// work that was put on the device before it.
constexpr std::chrono::seconds kCopyPatience{1};

}  // namespace

void Staging::run(Staged& staged) {
  bool has_begun = false;
  Slots own;
  try {
    require_sound();
    run_parts(staged, own, has_begun);
    staged.finish();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!are_copies_over(staged.device)) {
      keep_for_ever(std::exchange(slots_, Slots()));
      keep_for_ever(std::move(own));
      if (has_begun) {
        keep_for_ever(std::move(staged.operation.owner));
      }
    }
    give_up(staged, error, has_begun);
  }
}

void Staging::send(const StagedPtr& staged) {
  std::shared_ptr<c10::DataPtr> memory;
  try {
    memory = message_memory(*staged);
    auto* const slot = static_cast<std::byte*>(memory->get());
    StagedPart part = part_of_message(staged->operation, slot);
    const Streams streams = streams_of(staged->device);
    wait_on_device(streams.to_host, *staged->ready);
    copy_to_host(part, slot, staged->device, streams);
    await(*staged, *record_event(streams.to_host));
    const WorkPtr sent = host_->submit(std::move(part.operation));
    sent->on_completion([staged, memory](const Work::Outcome& outcome) {
      staged->finish(outcome.error, outcome.source_rank);
    });
    sent->go_on_unattended();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!are_copies_over(staged->device)) {
      keep_for_ever(std::move(memory));
    }
    give_up(*staged, error, /*has_begun=*/false);
  }
}

void Staging::deliver(Staged& staged, const std::shared_ptr<c10::DataPtr>& memory,
                      int source_rank) {
  try {
    const Streams streams = streams_of(staged.device);
    auto* const slot = static_cast<std::byte*>(memory->get());
    wait_on_device(streams.to_device, *staged.ready);
    copy_to_device(part_of_message(staged.operation, slot), slot, staged.device, streams);
    await(staged, *record_event(streams.to_device));
    staged.finish(nullptr, source_rank);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!are_copies_over(staged.device)) {
      keep_for_ever(std::shared_ptr<c10::DataPtr>(memory));
      keep_for_ever(std::move(staged.operation.owner));
    }
    give_up(staged, error, /*has_begun=*/true);
  }
}

StagedPart Staging::part_of_message(const Operation& operation, void* memory) const {
  const StagingParts parts(operation, host_->rank(), host_->size(), slot_bytes_);
  return parts.part(0, static_cast<std::byte*>(memory));
}

std::shared_ptr<c10::DataPtr> Staging::message_memory(const Staged& staged) const {
  const StagingParts parts(staged.operation, host_->rank(), host_->size(), slot_bytes_);
  return std::make_shared<c10::DataPtr>(allocate_pinned(parts.slot_bytes()));
}

Staging::Streams Staging::streams_of(Device device) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(device.index);
  if (found != streams_.end()) {
    return found->second;
  }
  const Streams streams{high_priority_stream(device), high_priority_stream(device)};
  return streams_.emplace(device.index, streams).first->second;
}

void Staging::run_parts(const Staged& staged, Slots& own, bool& has_begun) {
  const Operation& operation = staged.operation;
  const StagingParts parts(operation, host_->rank(), host_->size(), slot_bytes_);
  if (parts.is_whole()) {
    own.ordinary = allocate_pinned(parts.slot_bytes());
    own.data = static_cast<std::byte*>(own.ordinary.get());
  }
  Slots& slots = parts.is_whole() ? own : shared_slots(staged.device);
  const Streams streams = streams_of(staged.device);
  // Also of an operation without inputs: no part goes on before the stream has come so far, so
  // copies to the device need not wait for it.
  wait_on_device(streams.to_host, *staged.ready);
  const auto slot_of = [&](std::size_t part) {
    return slots.data + part % kSlots * (parts.is_whole() ? 0 : parts.slot_bytes());
  };
  std::array<EventPtr, kSlots> arrived;
  std::array<EventPtr, kSlots> left;
  const auto begin = [&](std::size_t index) {
    const std::size_t slot = index % kSlots;
    if (left[slot]) {
      wait_on_device(streams.to_host, *left[slot]);
    }
    copy_to_host(parts.part(index, slot_of(index)), slot_of(index), staged.device, streams);
    arrived[slot] = record_event(streams.to_host);
  };
  begin(0);
  for (std::size_t index = 0; index < parts.count(); ++index) {
    const std::size_t slot = index % kSlots;
    if (index + 1 < parts.count()) {
      begin(index + 1);
    }
    await(staged, *arrived[slot]);
    StagedPart part = parts.part(index, slot_of(index));
    part.operation.deadline = staged.deadline;
    host_->run(std::move(part.operation));
    has_begun = true;
    copy_to_device(part, slot_of(index), staged.device, streams);
    left[slot] = record_event(streams.to_device);
  }
  await(staged, *left[(parts.count() - 1) % kSlots]);
}

void Staging::copy_to_host(const StagedPart& part, std::byte* slot, Device device,
                           const Streams& streams) {
  for (const StagedCopy& copy : part.before) {
    copy_async(slot + copy.offset, Device{}, copy.device, device, copy.bytes, streams.to_host);
  }
}

void Staging::copy_to_device(const StagedPart& part, const std::byte* slot, Device device,
                             const Streams& streams) {
  for (const StagedCopy& copy : part.after) {
    copy_async(copy.device, device, slot + copy.offset, Device{}, copy.bytes, streams.to_device);
  }
}

Staging::Slots& Staging::shared_slots(Device device) {
  if (slots_.data != nullptr) {
    return slots_;
  }
  const std::size_t bytes = kSlots * slot_bytes_;
  if (has_symmetric_memory_) {
    try {
      slots_.symmetric = host_->allocate(bytes, Device{});
      slots_.pinned = std::make_unique<PinnedRange>(slots_.symmetric->data(), bytes, device);
      slots_.data = static_cast<std::byte*>(slots_.symmetric->data());
      return slots_;
    } catch (const TransportError& error) {
      // On all ranks alike.
      log_line(LogLevel::kInfo,
               join("staging of device tensors takes ordinary memory: ", error.what()));
    }
  }
  slots_.ordinary = allocate_pinned(bytes);
  slots_.data = static_cast<std::byte*>(slots_.ordinary.get());
  return slots_;
}

void Staging::require_sound() const { rethrow_if_any(host_->failure()); }

void Staging::await(const Staged& staged, const c10::Event& event) const {
  if (wait_on_host(event, staged.deadline, [this] { return host_->failure() != nullptr; })) {
    return;
  }
  require_sound();
  throw Timeout(join(to_string(staged.operation.kind), " on rank ", host_->rank(), " of ",
                     host_->size(), " of group '", host_->name(),
                     "': the device did not come to it in time: what its stream was given "
                     "before has not finished."));
}

bool Staging::are_copies_over(Device device) noexcept {
  try {
    const Deadline deadline = Deadline::in(kCopyPatience);
    const Streams streams = streams_of(device);
    return wait_on_host(*record_event(streams.to_host), deadline) &&
           wait_on_host(*record_event(streams.to_device), deadline);
  } catch (const std::exception&) {
    return true;  // the device itself has failed
  }
}

void Staging::give_up(Staged& staged, const std::exception_ptr& error, bool has_begun) {
  const auto [kind, what, blame] = describe_briefly(error);
  if (host_->failure() == nullptr && (kind != ErrorKind::kInvalidUsage || has_begun)) {
    host_->abort(Error(kind,
                       join(to_string(staged.operation.kind), " on rank ", host_->rank(),
                            " could not be staged: ", what),
                       blame));
  }
  staged.finish(error);
}

}  // namespace pydist
