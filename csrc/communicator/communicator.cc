#include "communicator/communicator.h"

#include <algorithm>
#include <utility>

#include "base/interruption.h"

namespace pydist {

bool Communicator::takes(DeviceType type) const {
  const std::vector<Device> devices = capabilities().devices;
  return std::any_of(devices.begin(), devices.end(),
                     [type](const Device& device) { return device.type == type; });
}

int Communicator::run(Operation&& operation) {
  const OpKind kind = operation.kind;
  const WorkPtr work = submit(std::move(operation));
  work->wait_or_end([&] {
    Blame own = culprit(rank(), "was interrupted");
    own.operation = join(to_string(kind), " of group '", name(), "'");
    abort(Aborted(
        join("rank ", rank(), " was interrupted in ", own.operation, " (", kWhatInterrupts, ")."),
        own));
  });
  return work->source_rank();
}

WorkPtr Communicator::submit_one_by_one(std::vector<Operation> operations) {
  std::vector<WorkPtr> works;
  works.reserve(operations.size());
  for (Operation& operation : operations) {
    works.push_back(submit(std::move(operation)));
  }
  return combine(std::move(works));
}

std::string places_of_ranks(const Communicator& communicator) {
  std::string text;
  for (const std::string& line : communicator.whereabouts()) {
    text += (text.empty() ? "" : " ") + line + ".";
  }
  return text;
}

}  // namespace pydist
