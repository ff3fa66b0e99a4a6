#include "communicator/departure.h"

#include <atomic>

namespace pydist {
namespace {

std::atomic<Departure> own{Departure::kShutdown};

}  // namespace

const char* in_words(Departure departure) noexcept {
  return departure == Departure::kProgramEnd ? "has left the group (its program has ended)"
                                             : "has left the group (shutdown)";
}

Departure own_departure() noexcept { return own.load(std::memory_order_relaxed); }

void note_program_end() noexcept { own.store(Departure::kProgramEnd, std::memory_order_relaxed); }

}  // namespace pydist
