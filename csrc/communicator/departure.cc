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

bool is_departure(std::string_view words) noexcept {
  return words == in_words(Departure::kShutdown) || words == in_words(Departure::kProgramEnd);
}

Departure own_departure() noexcept { return own.load(std::memory_order_relaxed); }

void note_program_end() noexcept { own.store(Departure::kProgramEnd, std::memory_order_relaxed); }

}  // namespace pydist
