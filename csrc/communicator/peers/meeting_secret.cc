#include "communicator/peers/meeting_secret.h"

#include <utility>

namespace pydist {

MeetingSecret::MeetingSecret(std::shared_ptr<const JobSecret> given,
                             std::optional<std::string> of_environment)
    : given_(std::move(given)), of_environment_(std::move(of_environment)) {}

std::string MeetingSecret::setting() const {
  return given_ || !of_environment_
             ? std::string()
             : " PYDIST_JOB_SECRET=#" + JobSecret(*of_environment_).sign("whether it is the same");
}

std::string MeetingSecret::make(const std::string& token) {
  if (given_ || of_environment_) {
    return {};
  }
  made_ = JobSecret::random();
  file_.emplace(token, *made_);
  return file_->folder();
}

void MeetingSecret::forget() noexcept { file_.reset(); }

JobSecret MeetingSecret::get(const std::string& folder, const std::string& token) const {
  if (given_) {
    return *given_;
  }
  if (of_environment_) {
    return JobSecret(*of_environment_);
  }
  if (made_ || told_) {
    return made_ ? *made_ : *told_;
  }
  return read_secret(folder, token);
}

}  // namespace pydist
