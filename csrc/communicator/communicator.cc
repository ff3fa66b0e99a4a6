#include "communicator/communicator.h"

#include <utility>

#include "base/interruption.h"

namespace pydist {

int Communicator::run(Operation&& operation) {
  const OpKind kind = operation.kind;
  const WorkPtr work = submit(std::move(operation));
  work->wait_or_end([&] {
    abort(Aborted(join("rank ", rank(), " was interrupted in ", to_string(kind), " of group '",
                       name(), "' (", kWhatInterrupts, ").")));
  });
  return work->source_rank();
}

}  // namespace pydist
