#include "communicator/communicator.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"

namespace pydist {

bool Communicator::takes(DeviceType type) const {
  const std::vector<Device> devices = capabilities().devices;
  return std::any_of(devices.begin(), devices.end(),
                     [type](const Device& device) { return device.type == type; });
}

int Communicator::run(Operation&& operation) {
  const OpKind kind = operation.kind;
  return wait_for(*submit(std::move(operation)), kind);
}

int Communicator::wait_for(Work& work, OpKind kind) {
  work.wait_or_end([&] { abort_interrupted(kind); });
  return work.source_rank();
}

void Communicator::abort_interrupted(OpKind kind) {
  Blame own = culprit(rank(), "was interrupted");
  own.operation = join(to_string(kind), " of group '", name(), "'");
  abort(Aborted(
      join("rank ", rank(), " was interrupted in ", own.operation, " (", kWhatInterrupts, ")."),
      own));
}

std::vector<WorkPtr> Communicator::submit_grouped(std::vector<Operation> operations) {
  for (const Operation& operation : operations) {
    check(operation);
  }
  std::vector<WorkPtr> works;
  works.reserve(operations.size());
  try {
    for (Operation& operation : operations) {
      works.push_back(submit(std::move(operation)));
    }
  } catch (...) {
    std::rethrow_exception(fail_started(works));
  }
  return works;
}

std::exception_ptr Communicator::fail_started(std::span<const WorkPtr> started) {
  std::exception_ptr error = std::current_exception();
  if (started.empty()) {
    return error;
  }
  try {
    auto [kind, what, blame] = describe(error);
    // What may be a peer's doing names that peer, if anybody.
    if (blame.ranks.empty() && kind != ErrorKind::kPeerLost && kind != ErrorKind::kTimeout) {
      blame = culprit(rank(), what);
    }
    abort(Error(kind,
                join("rank ", rank(), " of group '", name(),
                     "' could not start all of the operations that it submitted together: ", what),
                std::move(blame)));
  } catch (...) {  // no memory for the words
    shutdown();
  }
  for (const WorkPtr& work : started) {
    bool is_interrupted = false;
    try {
      work->wait_or_end([&is_interrupted] { is_interrupted = true; });
    } catch (...) {
      if (is_interrupted) {
        error = std::current_exception();
      }
    }
  }
  return error;
}

std::string places_of_ranks(const Communicator& communicator) {
  std::string text;
  for (const std::string& line : communicator.whereabouts()) {
    text += (text.empty() ? "" : " ") + line + ".";
  }
  return text;
}

}  // namespace pydist
