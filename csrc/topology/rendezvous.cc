#include "topology/rendezvous.h"

#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "topology/told_error.h"

namespace pydist {
namespace {

// How much longer than rank 0 the others wait, so that they hear from it who was missing.
constexpr std::chrono::seconds kGrace{10};

// Rank 0 has waited its time; a rank that came in the meantime is not missing.
constexpr std::chrono::milliseconds kLastLook{20};

// How long one look into the store waits while there is hope to check.
constexpr std::chrono::milliseconds kLook{200};

// What a rank says in place of its part when it gives up, so that nobody waits for it.
constexpr std::string_view kGivenUp = "given up";

// Waits with get_while_hoping(). If an exception (of an interrupting user, say) cuts the wait
// short, tells the ranks that wait for this one.
template <typename Tell>
std::string get_or_give_up(KeyValueStore& store, const std::string& key, Deadline deadline,
                           const CheckHope& check_hope, const Tell& tell) {
  try {
    return get_while_hoping(store, key, deadline, check_hope);
  } catch (const Timeout&) {
    throw;
  } catch (const TransportError&) {
    throw;  // the store is gone: nobody can be told
  } catch (...) {
    try {
      tell();
    } catch (const std::exception&) {
      // What ended the wait counts.
    }
    throw;
  }
}

// What rank 0 answers in place of what all have said.
std::string answer_of_failure(ErrorDescription error) {
  error.kind = ErrorKind::kTimeout;
  return pack({"missing", ToldError{0, std::move(error)}.to_text()});
}

// The error with which rank 0 answers when an exception, which is being handled, ends its wait for
// the others.
ErrorDescription why_rank_0_gave_up(const std::string& topic, const LatenessOf& lateness) {
  ErrorDescription why = describe(std::current_exception());
  if (why.kind == ErrorKind::kPeerLost && !why.blame.ranks.empty()) {
    return why;
  }
  why.blame = lateness({0}).blame;  // as which rank this one is known
  why.blame.cause = "was interrupted";
  why.message =
      join("rank ", why.blame.ranks.at(0), " gave up on '", topic, "': it was interrupted.");
  return why;
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

[[noreturn]] void throw_described(const ErrorDescription& error) {
  std::rethrow_exception(make_error(error.kind, error.message, error.blame));
}

std::string said(const std::string& topic, int rank) { return join(topic, "/", rank); }

}  // namespace

std::string get_while_hoping(KeyValueStore& store, const std::string& key, Deadline deadline,
                             const CheckHope& check_hope) {
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
      return store.get(key, deadline.earlier_of(Deadline::in(look)));
    } catch (const Timeout&) {
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
    const std::size_t length = std::stoull(text.substr(at, colon - at));
    PYDIST_CHECK(length <= text.size() - colon - 1);
    parts.push_back(text.substr(colon + 1, length));
    at = colon + 1 + length;
  }
  return parts;
}

std::vector<std::string> exchange(KeyValueStore& store, const std::string& topic, int rank,
                                  int size, const std::string& mine, Deadline deadline,
                                  const CheckHopeOf& check_hope, const LatenessOf& lateness) {
  if (size == 1) {
    return {mine};
  }
  if (!lateness) {
    return exchange(store, topic, rank, size, mine, deadline, check_hope,
                    [&](const auto& missing) { return lateness_by_number(topic, size, missing); });
  }
  const auto hope_of = [&check_hope](int awaited) {
    return check_hope ? CheckHope([&check_hope, awaited] { check_hope(awaited); }) : nullptr;
  };
  const std::string answer_key = topic + "/all";
  if (rank != 0) {
    store.set(said(topic, rank), mine);
    const Deadline patient =
        deadline.is_never() ? deadline : Deadline::at(deadline.when() + kGrace);
    std::string answer;
    try {
      answer = get_or_give_up(store, answer_key, patient, hope_of(0),
                              [&] { store.set(said(topic, rank), std::string(kGivenUp)); });
    } catch (const Timeout&) {
      throw_described(lateness({0}));
    }
    std::vector<std::string> parts = unpack(answer);
    PYDIST_CHECK(!parts.empty());
    if (parts[0] == "missing") {
      throw_described(ToldError::from_text(parts.at(1)).error);
    }
    parts.erase(parts.begin());
    PYDIST_CHECK(parts.size() == static_cast<std::size_t>(size));
    return parts;
  }

  std::vector<std::string> parts{mine};
  std::vector<int> missing;
  for (int peer = 1; peer < size; ++peer) {
    try {
      const std::string part =
          missing.empty()
              ? get_or_give_up(store, said(topic, peer), deadline, hope_of(peer),
                               [&] {
                                 store.set(answer_key,
                                           answer_of_failure(why_rank_0_gave_up(topic, lateness)));
                               })
              : store.get(said(topic, peer), Deadline::in(kLastLook));
      store.erase(said(topic, peer));
      if (part == kGivenUp) {
        throw Timeout("given up");
      }
      parts.push_back(part);
    } catch (const Timeout&) {
      missing.push_back(peer);
    }
  }
  if (!missing.empty()) {
    const ErrorDescription late = lateness(missing);
    store.set(answer_key, answer_of_failure(late));
    throw_described(late);
  }
  std::vector<std::string> answer{"all"};
  answer.insert(answer.end(), parts.begin(), parts.end());
  store.set(answer_key, pack(answer));
  return parts;
}

void decline(KeyValueStore& store, const std::string& topic, int rank) noexcept {
  try {
    store.set(said(topic, rank), std::string(kGivenUp));
  } catch (const std::exception&) {
    // The store is gone, and with it everybody who waits there.
  }
}

}  // namespace pydist
