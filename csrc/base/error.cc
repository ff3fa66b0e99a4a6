#include "base/error.h"

#include <cstring>
#include <utility>

namespace pydist {
namespace {

bool says_timed_out(const std::string& message) {
  return message.find("timed out") != std::string::npos;
}

}  // namespace

Error::Error(ErrorKind kind, const std::string& message, Blame blame)
    : std::runtime_error(kind == ErrorKind::kTimeout && !says_timed_out(message)
                             ? "timed out: " + message
                             : message),
      kind_(kind),
      blame_(std::make_shared<const Blame>(std::move(blame))) {}

std::exception_ptr make_error(ErrorKind kind, const std::string& message, const Blame& blame) {
  switch (kind) {
    case ErrorKind::kInvalidUsage:
      return std::make_exception_ptr(InvalidUsage(message, blame));
    case ErrorKind::kMismatch:
      return std::make_exception_ptr(Mismatch(message, blame));
    case ErrorKind::kPeerLost:
      return std::make_exception_ptr(PeerLost(message, blame));
    case ErrorKind::kTimeout:
      return std::make_exception_ptr(Timeout(message, blame));
    case ErrorKind::kAborted:
      return std::make_exception_ptr(Aborted(message, blame));
    case ErrorKind::kTransport:
      return std::make_exception_ptr(TransportError(message, blame));
    case ErrorKind::kError:
      break;
  }
  return std::make_exception_ptr(Error(ErrorKind::kError, message, blame));
}

ErrorDescription describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& typed) {
    return {typed.kind(), typed.what(), typed.blame()};
  } catch (const std::exception& other) {
    return {ErrorKind::kError, other.what(), {}};
  } catch (...) {
    return {ErrorKind::kError, "unknown exception", {}};
  }
}

TransportError system_error(std::string_view what, int code) {
  return TransportError(join(what, ": ", std::strerror(code), " (errno ", code, ")"));
}

namespace internal {

void check_failed(const char* file, int line, const char* condition) {
  throw Error(ErrorKind::kError,
              join("pydist broke an invariant of its own (", condition, " at ", file, ":", line,
                   "). This is a bug; please report it with this line."));
}

}  // namespace internal
}  // namespace pydist
