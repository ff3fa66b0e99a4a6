#include "communicator/splits.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <utility>

#include "base/error.h"
#include "communicator/departure.h"

namespace pydist {
namespace {

// The members as text; throws where they cannot make up a group.
std::string text_of(const std::vector<int>& ranks, int rank, int size) {
  std::string members;
  std::vector<bool> seen(static_cast<std::size_t>(size), false);
  for (const int member : ranks) {
    const bool exists = member >= 0 && member < size;
    if (!exists || seen[static_cast<std::size_t>(member)]) {
      throw InvalidUsage(join("split: rank ", member, " is ",
                              exists ? "named twice" : "not a rank of the group",
                              "; ranks are 0 to ", size - 1, ", each at most once."));
    }
    seen[static_cast<std::size_t>(member)] = true;
    if (!members.empty()) {
      members += ',';
    }
    members += std::to_string(member);
  }
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
    throw InvalidUsage(join("split: rank ", rank, " is not among the ranks of the new group (",
                            members, "); only its members make a group."));
  }
  return members;
}

}  // namespace

int Splits::take(const std::string& members) {
  const std::lock_guard lock(mutex_);
  Numbers& numbers = numbers_[members];
  if (numbers.skipped.empty()) {
    return numbers.next++;
  }
  return numbers.skipped.extract(numbers.skipped.begin()).value();
}

void Splits::put_back(const std::string& members, int number) {
  const std::lock_guard lock(mutex_);
  numbers_[members].skipped.insert(number);
}

CommunicatorPtr Splits::next(const std::vector<int>& ranks, int rank, int size,
                             KeyValueStore& store, const std::string& topic, Deadline deadline,
                             const CheckHope& check_hope, const KnownOf& known_of, const Make& make,
                             const Decline& decline) {
  const std::string members = text_of(ranks, rank, size);
  KnownProcesses processes;
  for (const int member : ranks) {
    processes.push_back(known_of(member));
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  const int own_rank = static_cast<int>(own - ranks.begin());
  const auto name_of = [&](int number) { return join(members, "#", number); };
  const auto open_key = [&](int number) { return join(topic, "/", name_of(number), "/open"); };
  const auto over_key = [&](int number) { return join(topic, "/", name_of(number), "/over"); };
  if (ranks.size() == 1) {
    return make(own_rank, name_of(take(members)), processes);
  }
  if (own_rank == 0) {
    const int number = take(members);
    store.set(open_key(number), "");
    try {
      return make(own_rank, name_of(number), processes);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      try {
        store.set(over_key(number), "");
      } catch (const std::exception&) {
        // The store is gone, and with it everybody who waits there.
      }
      std::rethrow_exception(error);
    }
  }
  std::optional<std::string> last_over;  // of the meetings that this rank came to too late
  for (;;) {
    const int number = take(members);
    try {
      static_cast<void>(get_while_hoping(store, open_key(number), deadline, check_hope));
    } catch (const Timeout&) {
      put_back(members, number);
      ErrorDescription late = lateness(processes, join(topic, "/", members), {0});
      throw Timeout(late.message, std::move(late.blame));
    } catch (const TransportError&) {
      put_back(members, number);
      throw;  // the store is gone
    } catch (...) {
      const KnownProcess& self = processes[static_cast<std::size_t>(own_rank)];
      ErrorDescription told =
          decline(name_of(number), why_given_up(join(topic, "/", name_of(number)), self.blame({})));
      // Who has left, rather than died, may have done so for what ended that meeting.
      if (last_over && is_departure(told.blame.cause)) {
        told = decline(*last_over, told);
      }
      throw_told(told);
    }
    if (!look_up(store, over_key(number))) {
      return make(own_rank, name_of(number), processes);
    }
    last_over = name_of(number);
  }
}

}  // namespace pydist
