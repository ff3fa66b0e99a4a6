// What a rank says of itself to the ranks that it is about to meet, with what stands behind it
// until they have met: the process's endpoint, and the secret, where this rank makes it up, which
// it does when all have come.
//
// The meeting of a group makes it by itself, unless the caller has: ranks that have to tell each
// other something else first, tell this together with it.

#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/env.h"
#include "communicator/peers/endpoint.h"
#include "communicator/peers/meeting_secret.h"
#include "memory/job_secret.h"

namespace pydist {

class OwnIntroduction {
 public:
  // `secret`: that of the group which the new one is split off, or null. `endpoint`: null for the
  // process's own. What this process lacks to take part is in the text: the others must learn it.
  OwnIntroduction(int rank, const Environment& environment,
                  std::shared_ptr<const JobSecret> secret = nullptr,
                  std::shared_ptr<Endpoint> endpoint = nullptr);

  // As Introduction.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

  // Null where it could not be made, which the text says.
  [[nodiscard]] const std::shared_ptr<Endpoint>& endpoint() const noexcept { return endpoint_; }
  // For the group that is made. Once.
  [[nodiscard]] EndpointUse take_use() noexcept { return std::move(use_); }
  [[nodiscard]] MeetingSecret& secret() noexcept { return secret_; }

  // The ranks have met, or will not: takes back what only a meeting needs. Idempotent.
  void end() noexcept {
    secret_.forget();
    use_.end();
  }

 private:
  std::shared_ptr<Endpoint> endpoint_;
  EndpointUse use_;
  MeetingSecret secret_;
  std::string text_;
};

}  // namespace pydist
