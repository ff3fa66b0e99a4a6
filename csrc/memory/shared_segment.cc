#include "memory/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "memory/memory_room.h"

namespace pydist {

class SharedSegment::Mapping {
 public:
  Mapping(FileDescriptor fd, std::size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (data == MAP_FAILED) {
      throw system_error(join("Cannot map ", bytes, " bytes of shared memory"), errno);
    }
    data_ = static_cast<std::byte*>(data);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(data_, bytes_); }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  FileDescriptor fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

std::shared_ptr<SharedSegment::Mapping> SharedSegment::find_or_map(FileDescriptor fd) {
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) {
    throw system_error("Cannot inspect shared memory", errno);
  }
  // Leaked on purpose: segments may outlive static destruction.
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>>;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Mapping>& entry = known[{status.st_dev, status.st_ino}];
  std::shared_ptr<Mapping> mapping = entry.lock();
  if (!mapping) {
    mapping = std::make_shared<Mapping>(std::move(fd), static_cast<std::size_t>(status.st_size));
    entry = mapping;
  }
  return mapping;
}

SharedSegment SharedSegment::create(const std::string& label, std::size_t bytes) {
  bytes = round_up(bytes, page_bytes());
  FileDescriptor fd(::memfd_create(("pydist:" + label).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw system_error("Cannot create shared memory (memfd_create)", errno);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw system_error(join("Cannot size shared memory to ", bytes, " bytes"), errno);
  }
  // Nobody can shrink it under a reader's feet.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw system_error("Cannot seal shared memory", errno);
  }
  return map(std::move(fd), bytes);
}

SharedSegment SharedSegment::map(FileDescriptor fd, std::size_t bytes) {
  SharedSegment segment;
  segment.mapping_ = find_or_map(std::move(fd));
  segment.data_ = segment.mapping_->data();
  if (bytes != 0 && segment.bytes() != bytes) {
    throw TransportError(
        join("A shared segment has ", segment.bytes(), " bytes where ", bytes, " were expected."));
  }
  return segment;
}

std::size_t SharedSegment::bytes() const noexcept { return mapping_ ? mapping_->bytes() : 0; }

int SharedSegment::fd() const noexcept { return mapping_ ? mapping_->fd() : -1; }

void SharedSegment::reserve(std::size_t offset, std::size_t length,
                            const std::string& purpose) const {
  if (length == 0) {
    return;
  }
  check_memory_room(length, purpose);
  int code = 0;
  do {
    code = ::posix_fallocate(fd(), static_cast<off_t>(offset), static_cast<off_t>(length));
  } while (code == EINTR);
  if (code != 0) {
    throw system_error(join("Cannot reserve ", length, " bytes of shared memory (", purpose, ")"),
                       code);
  }
}

void SharedSegment::discard(std::size_t offset, std::size_t length) const noexcept {
  [[maybe_unused]] const int result =
      ::fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(length));
}

void SharedSegment::populate(std::size_t offset, std::size_t length) const noexcept {
#ifdef MADV_POPULATE_WRITE
  const std::size_t start = offset / page_bytes() * page_bytes();
  // Older kernels refuse; the pages are then entered one by one at first use.
  [[maybe_unused]] const int result =
      ::madvise(data_ + start, offset + length - start, MADV_POPULATE_WRITE);
#else
  static_cast<void>(offset);
  static_cast<void>(length);
#endif
}

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace pydist
