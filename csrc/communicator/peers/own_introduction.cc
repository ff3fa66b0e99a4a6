#include "communicator/peers/own_introduction.h"

#include <unistd.h>

#include <exception>
#include <utility>

#include "communicator/peers/introduction.h"
#include "topology/hosts.h"

namespace pydist {

OwnIntroduction::OwnIntroduction(int rank, const Environment& environment,
                                 std::shared_ptr<const JobSecret> secret,
                                 std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)), secret_(std::move(secret), environment.job_secret) {
  Introduction mine;
  mine.card.host_name = host_name();
  mine.card.pid = ::getpid();
  mine.settings = settings_text(environment) + secret_.setting();
  try {
    if (!endpoint_) {
      endpoint_ = Endpoint::of_process(environment);
    }
    use_ = EndpointUse(endpoint_);
    if (rank == 0) {
      mine.token = random_token();
    }
    mine.card = endpoint_->card();
  } catch (const std::exception& error) {
    mine.complaint = words_of(error.what());
  }
  text_ = mine.to_text();
}

}  // namespace pydist
