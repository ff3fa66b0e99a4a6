// What the processes of a job know and no other user of the machine does.
//
// Addresses of sockets and names of segments travel through the job's store, which any local user
// can read, and write to. So whoever asks for a segment, and whoever answers, proves that it knows
// the job's secret, by a keyed digest of what it says. The secret itself is never sent. It comes
// from the environment (PYDIST_JOB_SECRET, which a launcher sets), or else rank 0 makes one and
// leaves it in a file that nobody but its user can read, until all ranks have read it.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pydist {

// A value.
class JobSecret {
 public:
  explicit JobSecret(std::string key) : key_(std::move(key)) {}
  [[nodiscard]] static JobSecret random();

  // Another secret that follows from this one, and does not betray it.
  [[nodiscard]] JobSecret derive(std::string_view purpose) const;

  // 64 hexadecimal digits that nobody who does not know the secret can tell.
  [[nodiscard]] std::string sign(std::string_view text) const;
  [[nodiscard]] bool has_signed(std::string_view text, std::string_view signature) const;

  // Not to be printed, nor sent to anybody.
  [[nodiscard]] const std::string& key() const noexcept { return key_; }

 private:
  std::string key_;
};

// A file with a secret, removed when this object goes. It lies in a folder of the user's own under
// XDG_RUNTIME_DIR or, failing that, the temporary folder.
class SecretFile {
 public:
  // `name`: no other file's. Throws TransportError where there is no place for it.
  SecretFile(std::string name, const JobSecret& secret);
  SecretFile(const SecretFile&) = delete;
  SecretFile& operator=(const SecretFile&) = delete;
  ~SecretFile();

  [[nodiscard]] const std::string& folder() const noexcept { return folder_; }

 private:
  std::string name_;
  std::string folder_;
};

// The secret in the file `name` of `folder`. Throws TransportError unless file and folder are this
// user's, nobody else may read or change them, and neither is a link.
[[nodiscard]] JobSecret read_secret(const std::string& folder, const std::string& name);

// A name that no other process has: 128 random bits in hexadecimal.
[[nodiscard]] std::string random_token();
// 64 bits of such a name, never 0.
[[nodiscard]] std::uint64_t number_of_token(const std::string& token);

}  // namespace pydist
