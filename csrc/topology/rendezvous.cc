#include "topology/rendezvous.h"

#include <charconv>
#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/interruption.h"
#include "topology/hosts.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

// Rank 0 has waited its time; a rank that came in the meantime is not missing. All that are left
// are given so long together: the others do not wait for rank 0 for ever.
constexpr std::chrono::milliseconds kLastLook{20};

// How long one look into the store waits while there is hope to check.
constexpr std::chrono::milliseconds kLook{200};

// An answer begins so, or says why there is none.
constexpr const char* kAll = "all";

std::string answer_of_success(const std::string& summary) { return pack({kAll, summary}); }

std::string answer_of_failure(ErrorDescription error) {
  return pack({"failed", ToldError{-1, std::move(error)}.to_text()});
}

ErrorDescription lateness_by_number(const std::string& topic, int size,
                                    const std::vector<int>& missing) {
  std::string numbers;
  for (const int rank : missing) {
    numbers += (numbers.empty() ? "" : ", ") + std::to_string(rank);
  }
  return {ErrorKind::kTimeout,
          join("Of ", size, " ranks, these did not come to '", topic, "' in time: ", numbers,
               ". They never started, have died, were interrupted, or are elsewhere; look at their "
               "output first."),
          Blame{.ranks = missing, .cause = "did not come in time"}};
}

std::string said(const std::string& topic, int rank) { return join(topic, "/", rank); }

std::optional<ErrorDescription> failure_in(const std::string& answer) {
  const std::vector<std::string> parts = unpack(answer);
  PYDIST_CHECK(parts.size() == 2);
  return parts[0] == kAll ? std::nullopt : std::optional(ToldError::from_text(parts[1]).error);
}

// The summary that an answer holds; throws where it is a failure.
std::string summary_in(const std::string& answer) {
  if (const std::optional<ErrorDescription> failure = failure_in(answer)) {
    throw_described(*failure);
  }
  return unpack(answer)[1];
}

std::string answer_key(const std::string& topic) { return topic + "/all"; }

// For the handler of what has ended a wait: whether the user has, and no fault of the engine's.
bool is_interruption() {
  try {
    throw;
  } catch (const Error&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  } catch (const std::logic_error&) {
    return false;
  } catch (...) {
    return true;
  }
}

// For rank 0, while it waits for the others: the answer is there before it has answered.
struct Answered : std::exception {
  explicit Answered(std::string its_answer) : answer(std::move(its_answer)) {}
  std::string answer;
};

}  // namespace

std::string get_while_hoping(KeyValueStore& store, const std::string& key, Deadline deadline,
                             const CheckHope& check_hope) {
  const Deadline::Clock::time_point since = Deadline::Clock::now();
  bool has_asked = false;
  while (check_hope) {
    std::exception_ptr lost;
    try {
      check_hope();
    } catch (...) {
      lost = std::current_exception();
    }
    try {
      // What a rank wrote before it left counts: one more look.
      const std::chrono::milliseconds look = lost ? std::chrono::milliseconds(0) : kLook;
      const Deadline end = deadline.earlier_of(Deadline::in(look));
      return has_asked ? store.go_on_waiting(key, end, since) : store.get(key, end);
    } catch (const Timeout&) {
      has_asked = true;
      rethrow_if_any(lost);
      if (deadline.has_passed()) {
        throw;
      }
    }
  }
  return store.get(key, deadline);
}

std::string pack(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) {
    text += std::to_string(part.size()) + ":" + part;
  }
  return text;
}

std::vector<std::string> unpack(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t colon = text.find(':', at);
    PYDIST_CHECK(colon != std::string::npos);
    std::size_t length = 0;
    const char* const end = text.data() + colon;
    const auto [rest, code] = std::from_chars(text.data() + at, end, length);
    PYDIST_CHECK(code == std::errc() && rest == end && length <= text.size() - colon - 1);
    parts.push_back(text.substr(colon + 1, length));
    at = colon + 1 + length;
  }
  return parts;
}

std::string exchange(KeyValueStore& store, const std::string& topic, int rank, int size,
                     const std::string& mine, const Summarize& summarize, Deadline deadline,
                     const CheckHopeOf& check_hope, const LatenessOf& lateness) {
  if (size == 1) {
    return summarize({mine});
  }
  if (!lateness) {
    return exchange(store, topic, rank, size, mine, summarize, deadline, check_hope,
                    [&](const auto& missing) { return lateness_by_number(topic, size, missing); });
  }
  // Note [One answer]
  // Under one key in the store stands the summary of what all have said, or why there is none. Rank
  // 0 writes it, or before that the first rank whose wait ends otherwise. So all read the same.
  Deadline next_look = Deadline::in(kLook);
  const auto hope_of = [&](int awaited) -> CheckHope {
    if (rank != 0 && !check_hope) {
      return nullptr;
    }
    return [&, awaited] {
      if (check_hope) {
        check_hope(awaited);
      }
      if (rank == 0 && next_look.has_passed()) {
        next_look = Deadline::in(kLook);
        if (std::optional<std::string> answer = look_up(store, answer_key(topic))) {
          throw Answered(*std::move(answer));
        }
      }
    };
  };
  try {
    if (rank != 0) {
      store.set(said(topic, rank), mine);
      const Deadline patient =
          deadline.is_never() ? deadline : Deadline::at(deadline.when() + kGraceAfterRankZero);
      std::string answer;
      try {
        answer = get_while_hoping(store, answer_key(topic), patient, hope_of(0));
      } catch (const Timeout&) {
        if (!deadline.has_passed()) {
          throw;  // it is what has befallen others
        }
        answer = store.settle(answer_key(topic), answer_of_failure(lateness({0})));
      }
      return summary_in(answer);
    }
    std::vector<std::string> parts{mine};
    std::vector<int> missing;
    Deadline last_look = deadline;
    for (int peer = 1; peer < size; ++peer) {
      try {
        parts.push_back(missing.empty()
                            ? get_while_hoping(store, said(topic, peer), deadline, hope_of(peer))
                            : store.get(said(topic, peer), last_look));
        store.erase(said(topic, peer));
      } catch (const Timeout&) {
        if (!deadline.has_passed()) {
          throw;  // it is what has befallen others
        }
        if (missing.empty()) {
          last_look = Deadline::in(kLastLook);
        }
        missing.push_back(peer);
      }
    }
    const std::string answer = missing.empty() ? answer_of_success(summarize(parts))
                                               : answer_of_failure(lateness(missing));
    return summary_in(store.settle(answer_key(topic), answer));
  } catch (const Answered& it) {
    return summary_in(it.answer);
  } catch (...) {
    throw_told(decline(store, topic, why_given_up(lateness({rank}).blame)));
  }
}

ErrorDescription why_given_up(Blame self) {
  ErrorDescription why = describe(std::current_exception());
  if (is_interruption()) {
    self.cause = "was interrupted";
    const std::string process =
        self.pid == 0 ? "" : join(" (", name_of_process(self.pid, self.host), ")");
    return {ErrorKind::kAborted,
            join("rank ", self.ranks.at(0), process, " was interrupted (", kWhatInterrupts,
                 ") while the ranks met."),
            std::move(self)};
  }
  if (why.blame.ranks.empty() && why.kind != ErrorKind::kTransport) {
    why.message = join("rank ", self.ranks.at(0), ": ", why.message);
    why.blame = std::move(self);
  }
  return why;
}

void throw_told(const ErrorDescription& told) {
  if (is_interruption()) {
    throw;
  }
  throw_described(told);
}

void throw_described(const ErrorDescription& error) {
  std::rethrow_exception(make_error(error.kind, error.message, error.blame));
}

ErrorDescription decline(KeyValueStore& store, const std::string& topic, ErrorDescription why) {
  try {
    return failure_in(store.settle(answer_key(topic), answer_of_failure(why))).value_or(why);
  } catch (const std::exception&) {
    return why;  // the store is gone, and with it everybody who waits there
  }
}

std::optional<ErrorDescription> declined(KeyValueStore& store, const std::string& topic) {
  const std::optional<std::string> answer = look_up(store, answer_key(topic));
  return answer ? failure_in(*answer) : std::nullopt;
}

}  // namespace pydist
