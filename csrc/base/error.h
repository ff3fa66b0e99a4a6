// The error tree. Python sees the same tree (pydist/errors.py), one class for one class.
//
// Caller's mistakes, lost peers and failed I/O throw these; a broken invariant of the engine
// itself uses PYDIST_CHECK. A message says what failed and where (rank, peer, host), what was
// expected and what was found, and what to do.

#pragma once

#include <array>
#include <exception>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/enum_names.h"

namespace pydist {

enum class ErrorKind : unsigned char {
  kError,         // pydist.Error(RuntimeError)
  kInvalidUsage,  // pydist.InvalidUsage(Error, ValueError)
  kMismatch,      // pydist.Mismatch: ranks disagree about an operation
  kPeerLost,      // pydist.PeerLost: a rank died or left
  kTimeout,       // pydist.Timeout(Error, TimeoutError): a deadline passed
  kAborted,       // pydist.Aborted: somebody aborted the communicator
  kTransport,     // pydist.TransportError: the operating system refused
};

// The names of the classes in pydist/errors.py.
inline constexpr auto kErrorKindNames = std::to_array<std::string_view>(
    {"Error", "InvalidUsage", "Mismatch", "PeerLost", "Timeout", "Aborted", "TransportError"});
inline constexpr int kErrorKindCount = kErrorKindNames.size();
static_assert(kErrorKindCount == static_cast<int>(ErrorKind::kTransport) + 1);

[[nodiscard]] constexpr std::string_view to_string(ErrorKind kind) noexcept {
  return name_in(kErrorKindNames, kind, "Error");
}

// Who made an error happen, and in what, as far as it is known.
struct Blame {
  std::vector<int> ranks{};  // ascending, numbered as in the group
  std::string host{};        // of the first of `ranks`
  int pid = 0;               // of the first of `ranks`
  std::string operation{};   // that failed: "all_reduce #812 of group 'world'"
  std::string cause{};       // what `ranks` did, or what befell them: "has died"

  friend bool operator==(const Blame&, const Blame&) = default;
};

class Error : public std::runtime_error {
 public:
  // The text of a kTimeout contains "timed out", which tools that restart jobs look for: where
  // `message` lacks these words, they come first.
  Error(ErrorKind kind, const std::string& message, Blame blame = {});

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  [[nodiscard]] const Blame& blame() const noexcept { return *blame_; }

 private:
  ErrorKind kind_;
  std::shared_ptr<const Blame> blame_;  // shared: to copy an exception must not throw
};

template <ErrorKind Kind>
class ErrorOf : public Error {
 public:
  explicit ErrorOf(const std::string& message, Blame blame = {})
      : Error(Kind, message, std::move(blame)) {}
};

using InvalidUsage = ErrorOf<ErrorKind::kInvalidUsage>;
using Mismatch = ErrorOf<ErrorKind::kMismatch>;
using PeerLost = ErrorOf<ErrorKind::kPeerLost>;
using Timeout = ErrorOf<ErrorKind::kTimeout>;
using Aborted = ErrorOf<ErrorKind::kAborted>;
using TransportError = ErrorOf<ErrorKind::kTransport>;

// Throws an error that was kept, if there is one.
inline void rethrow_if_any(const std::exception_ptr& error) {
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

// An exception of the class that belongs to `kind`.
[[nodiscard]] std::exception_ptr make_error(ErrorKind kind, const std::string& message,
                                            const Blame& blame = {});

// What any exception says (kError for one that is not ours).
struct ErrorDescription {
  ErrorKind kind = ErrorKind::kError;
  std::string message;
  Blame blame{};
};
[[nodiscard]] ErrorDescription describe(const std::exception_ptr& error);

// Joins its arguments with operator<<.
template <typename... Parts>
[[nodiscard]] std::string join(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// A TransportError for a failed system call: "what: strerror(code)".
[[nodiscard]] TransportError system_error(std::string_view what, int code);

namespace internal {
[[noreturn]] void check_failed(const char* file, int line, const char* condition);
}  // namespace internal

// An invariant of the engine. Throws, so that a fault of ours never kills the user's process.
#define PYDIST_CHECK(condition)                                         \
  do {                                                                  \
    if (!(condition)) [[unlikely]] {                                    \
      ::pydist::internal::check_failed(__FILE__, __LINE__, #condition); \
    }                                                                   \
  } while (false)

}  // namespace pydist
