#include "memory/job_secret.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/file_descriptor.h"
#include "memory/sha256.h"

namespace pydist {
namespace {

constexpr mode_t kOthers = 077;
constexpr std::size_t kKeyLength = 64;

// Two jobs may make and remove the folder at the same time.
constexpr int kAttempts = 100;

std::string own_folder_in(const std::string& parent) {
  return join(parent, "/pydist-", ::geteuid());
}

std::vector<std::string> possible_folders() {
  std::vector<std::string> folders;
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/') {
    folders.push_back(own_folder_in(runtime));
  }
  std::error_code error;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
  folders.push_back(own_folder_in(error ? "/tmp" : temporary.string()));
  // Everybody may make folders there, also one of that name.
  folders.push_back(join(folders.back(), "-", random_token()));
  return folders;
}

void require_private(int fd, const std::string& path, mode_t kind) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw system_error("Cannot inspect " + path, errno);
  }
  if ((status.st_mode & S_IFMT) != kind || status.st_uid != ::geteuid() ||
      (status.st_mode & kOthers) != 0) {
    throw TransportError(
        join(path, " is not what pydist keeps a job's secret in: it must belong to user ",
             ::geteuid(), " and be open to nobody else. Remove it."));
  }
}

FileDescriptor open_folder(const std::string& folder) {
  FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!opened) {
    throw system_error("Cannot open " + folder, errno);
  }
  require_private(opened.get(), folder, S_IFDIR);
  return opened;
}

// False where the folder has just been removed.
bool try_write(const std::string& folder, const std::string& name, const std::string& text) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    throw system_error("Cannot make " + folder, errno);
  }
  FileDescriptor opened_folder;
  try {
    opened_folder = open_folder(folder);
  } catch (const TransportError&) {
    if (::access(folder.c_str(), F_OK) != 0 && errno == ENOENT) {
      return false;
    }
    throw;
  }
  const FileDescriptor file(::openat(opened_folder.get(), name.c_str(),
                                     O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) {
    if (errno == ENOENT) {
      return false;
    }
    throw system_error(join("Cannot make ", folder, "/", name), errno);
  }
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    const int code = errno;
    ::unlinkat(opened_folder.get(), name.c_str(), 0);
    throw system_error(join("Cannot write ", folder, "/", name), code);
  }
  return true;
}

// As read_secret(), but its errors do not say what to do.
JobSecret read_private(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  if (!folder.starts_with('/') || name.find('/') != std::string::npos) {
    throw TransportError(path + " is not where pydist keeps a job's secret.");
  }
  const FileDescriptor opened_folder = open_folder(folder);
  const FileDescriptor file(
      ::openat(opened_folder.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    throw system_error("Cannot open " + path, errno);
  }
  require_private(file.get(), path, S_IFREG);
  std::array<char, kKeyLength + 1> text{};
  if (::read(file.get(), text.data(), text.size()) != static_cast<ssize_t>(kKeyLength)) {
    throw TransportError(path + " holds no secret of pydist's.");
  }
  return JobSecret(std::string(text.data(), kKeyLength));
}

}  // namespace

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::getrandom(bytes.data() + filled, bytes.size() - filled, 0);
    if (got < 0 && errno != EINTR) {
      throw system_error("Cannot get random bytes", errno);
    }
    filled += got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  return to_hex(bytes);
}

JobSecret JobSecret::random() { return JobSecret(random_token() + random_token()); }

JobSecret JobSecret::derive(std::string_view purpose) const {
  return JobSecret(to_hex(hmac_sha256(key_, join("derive\n", purpose))));
}

std::string JobSecret::sign(std::string_view text) const {
  return to_hex(hmac_sha256(key_, join("sign\n", text)));
}

bool JobSecret::has_signed(std::string_view text, std::string_view signature) const {
  return equal_in_constant_time(sign(text), signature);
}

SecretFile::SecretFile(std::string name, const JobSecret& secret) : name_(std::move(name)) {
  PYDIST_CHECK(secret.key().size() == kKeyLength);
  std::string complaints;
  for (const std::string& folder : possible_folders()) {
    try {
      for (int attempt = 0; attempt < kAttempts; ++attempt) {
        if (try_write(folder, name_, secret.key())) {
          folder_ = folder;
          return;
        }
      }
    } catch (const TransportError& error) {
      complaints += join(" ", error.what());
    }
  }
  throw TransportError(
      "There is no place for the file by which the ranks of a job know each other; "
      "PYDIST_JOB_SECRET, set alike on all of them, makes up for it." +
      complaints);
}

SecretFile::~SecretFile() {
  std::error_code ignored;
  std::filesystem::remove(folder_ + "/" + name_, ignored);
  std::filesystem::remove(folder_, ignored);  // unless another job has a file there
}

JobSecret read_secret(const std::string& folder, const std::string& name) {
  try {
    return read_private(folder, name);
  } catch (const TransportError& error) {
    throw TransportError(join(
        "The secret that rank 0 has left for the ranks of its host cannot be read. ", error.what(),
        " Ranks that do not share that folder with rank 0 (in containers, say) need "
        "PYDIST_JOB_SECRET, alike on all ranks."));
  }
}

std::uint64_t number_of_token(const std::string& token) {
  return std::stoull(token.substr(0, 16), nullptr, 16) | 1;
}

}  // namespace pydist
