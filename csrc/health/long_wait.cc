#include "health/long_wait.h"

#include "base/error.h"

namespace pydist {

std::string long_wait_text(const std::string& who, const std::string& operation,
                           std::chrono::nanoseconds patience, const std::string& why) {
  return join(who, " has been in ", operation, " for ",
              std::chrono::duration<double>(patience).count(), " s", why.empty() ? "" : ": ", why,
              ".");
}

}  // namespace pydist
