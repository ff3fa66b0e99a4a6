#include "communicator/departure.h"

#include <atomic>

namespace pydist {
namespace {

std::atomic<Departure> own{Departure::kShutdown};

}  // namespace

const char* in_words(Departure departure) noexcept {
  switch (departure) {
    case Departure::kProgramEnd:
      return "has left the group (its program has ended)";
    case Departure::kLost:
      return "is lost: it has died, or its host or the network to it has failed";
    default:
      return "has left the group (shutdown)";
  }
}

Departure own_departure() noexcept { return own.load(std::memory_order_relaxed); }

void note_program_end() noexcept { own.store(Departure::kProgramEnd, std::memory_order_relaxed); }

}  // namespace pydist
