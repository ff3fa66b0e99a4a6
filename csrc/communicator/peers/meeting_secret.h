// The secret by which the ranks of a group that meet know each other, and where each has it from:
// the group that theirs is split off, or PYDIST_JOB_SECRET, or rank 0, which makes one up: the
// ranks of its host read it in a file of their user's, those of other hosts in the job's store,
// where everybody can who reaches it.

#pragma once

#include <memory>
#include <optional>
#include <string>

#include "memory/job_secret.h"

namespace pydist {

class MeetingSecret {
 public:
  // `given`: the parent group's, or null. `of_environment`: PYDIST_JOB_SECRET.
  MeetingSecret(std::shared_ptr<const JobSecret> given, std::optional<std::string> of_environment);

  // What ranks must have alike, for their settings: so that those with other variables learn it,
  // and do not wait in vain.
  [[nodiscard]] std::string setting() const;
  // Rank 0: makes one up, unless there is one; returns the folder of its file, or nothing.
  [[nodiscard]] std::string make(const std::string& token);
  void forget() noexcept;
  // Rank 0: what the ranks of other hosts are to be told; empty where they know it.
  [[nodiscard]] std::string to_tell() const { return made_ ? made_->key() : std::string(); }
  void hear(const std::string& told) { told_.emplace(told); }

  // The secret. `folder` and `token` are rank 0's.
  [[nodiscard]] JobSecret get(const std::string& folder, const std::string& token) const;

 private:
  std::shared_ptr<const JobSecret> given_;
  std::optional<std::string> of_environment_;
  std::optional<JobSecret> told_;
  std::optional<JobSecret> made_;
  std::optional<SecretFile> file_;  // until everybody has read it, or nobody will
};

}  // namespace pydist
