#include "communicator/splits.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <utility>

#include "base/error.h"
#include "topology/told_error.h"

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
  return numbers_[members]++;
}

CommunicatorPtr Splits::next(const std::vector<int>& ranks, int rank, int size,
                             KeyValueStore& store, const std::string& topic, Deadline deadline,
                             const CheckHope& check_hope, const KnownOf& known_of, const Make& make,
                             const ToldOf& told_of, const Decline& decline) {
  const std::string members = text_of(ranks, rank, size);
  KnownProcesses processes;
  for (const int member : ranks) {
    processes.push_back(known_of(member));
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  const int own_rank = static_cast<int>(own - ranks.begin());
  const int number = take(members);
  const std::string name = join(members, "#", number);
  const std::string open_key = join(topic, "/", name, "/open");
  const std::string over_key = join(topic, "/", name, "/over");
  if (ranks.size() == 1) {
    return make(own_rank, name, processes);
  }
  const Blame self = processes[static_cast<std::size_t>(own_rank)].blame({});
  if (own_rank == 0) {
    store.set(open_key, "");
    try {
      return make(own_rank, name, processes);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      try {
        store.set(over_key, ToldError{-1, why_given_up(self)}.to_text());
      } catch (const std::exception&) {
        // The store is gone, and with it everybody who waits there.
      }
      std::rethrow_exception(error);
    }
  }
  try {
    static_cast<void>(get_while_hoping(store, open_key, deadline, [&] {
      if (const std::optional<ErrorDescription> told = told_of(name)) {
        throw_described(*told);
      }
      if (check_hope) {
        check_hope();
      }
    }));
  } catch (const Timeout&) {
    // Before the deadline it is what has befallen others.
    throw_told(decline(name, deadline.has_passed()
                                 ? lateness(processes, join(topic, "/", name), {0})
                                 : why_given_up(self)));
  } catch (...) {
    throw_told(decline(name, why_given_up(self)));
  }
  if (const std::optional<std::string> over = look_up(store, over_key)) {
    throw_described(ToldError::from_text(*over).error);
  }
  return make(own_rank, name, processes);
}

}  // namespace pydist
