#include "topology/told_error.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <exception>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "topology/hosts.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

constexpr std::string_view kForm = "pydist error";
// Of a text, before the ranks.
constexpr std::size_t kParts = 8;

int number_in(const std::string& text) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, code] = std::from_chars(text.data(), end, number);
  PYDIST_CHECK(code == std::errc() && rest == end);
  return number;
}

}  // namespace

Blame own_blame(int rank, std::string cause) {
  return {.ranks = {rank},
          .host = host_name(),
          .pid = ::getpid(),
          .operation = {},
          .cause = std::move(cause)};
}

Blame blame_of(const Error& reason, int rank) {
  const bool is_own = reason.kind() == ErrorKind::kAborted || reason.kind() == ErrorKind::kError ||
                      reason.kind() == ErrorKind::kInvalidUsage;
  if (!is_own || !reason.blame().ranks.empty()) {
    return reason.blame();
  }
  Blame blame = own_blame(rank, reason.what());
  blame.operation = reason.blame().operation;
  return blame;
}

std::string own_place() { return join(::getpid(), " ", host_name()); }

void set_place(Blame& blame, const std::string& place) {
  const std::size_t space = place.find(' ');
  int pid = 0;
  const char* const begin = place.data();
  const char* const end = begin + std::min(space, place.size());
  const auto [rest, code] = std::from_chars(begin, end, pid);
  if (space != std::string::npos && code == std::errc() && rest == end) {
    blame.pid = pid;
    blame.host = place.substr(space + 1);
  }
}

std::string ToldError::to_text() const {
  const Blame& blame = error.blame;
  std::vector<std::string> parts{std::string(kForm),
                                 std::to_string(teller),
                                 std::to_string(static_cast<int>(error.kind)),
                                 error.message,
                                 blame.host,
                                 std::to_string(blame.pid),
                                 blame.operation,
                                 blame.cause};
  for (const int rank : blame.ranks) {
    parts.push_back(std::to_string(rank));
  }
  return pack(parts);
}

ToldError ToldError::from_text(const std::string& text) {
  try {
    const std::vector<std::string> parts = unpack(text);
    PYDIST_CHECK(parts.size() >= kParts && parts[0] == kForm);
    ToldError told;
    told.teller = number_in(parts[1]);
    const int kind = number_in(parts[2]);
    PYDIST_CHECK(kind >= 0 && kind < kErrorKindCount);
    told.error.kind = static_cast<ErrorKind>(kind);
    told.error.message = parts[3];
    Blame& blame = told.error.blame;
    blame.host = parts[4];
    blame.pid = number_in(parts[5]);
    blame.operation = parts[6];
    blame.cause = parts[7];
    for (std::size_t i = kParts; i < parts.size(); ++i) {
      blame.ranks.push_back(number_in(parts[i]));
    }
    return told;
  } catch (const std::exception&) {
    return {.teller = -1, .error = {ErrorKind::kPeerLost, text, {}}};
  }
}

}  // namespace pydist
