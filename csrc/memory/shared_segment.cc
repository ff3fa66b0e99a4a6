#include "memory/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "memory/memory_room.h"

namespace pydist {

namespace {

// Whether there is room is a matter of a dozen files. What takes less than this is small beside
// what has to stay free anyway (check_memory_room()), and a group takes several such ranges.
constexpr std::size_t kLookedFor = std::size_t{1} << 20;

FileDescriptor create_file(const std::string& label) {
  FileDescriptor fd(::memfd_create(("pydist:" + label).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw system_error("Cannot create shared memory (memfd_create)", errno);
  }
  return fd;
}

void resize(int fd, std::size_t bytes) {
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    throw system_error(join("Cannot size shared memory to ", bytes, " bytes"), errno);
  }
}

void seal(int fd, int seals) {
  if (::fcntl(fd, F_ADD_SEALS, seals) != 0) {
    throw system_error("Cannot seal shared memory", errno);
  }
}

struct stat status_of(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw system_error("Cannot inspect shared memory", errno);
  }
  return status;
}

}  // namespace

class SharedSegment::Mapping {
 public:
  Mapping(std::shared_ptr<const FileDescriptor> fd, std::size_t offset, std::size_t bytes,
          Access access)
      : fd_(std::move(fd)), offset_(offset), bytes_(bytes) {
    const int rights = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
    void* data = ::mmap(nullptr, bytes, rights, MAP_SHARED, fd_->get(), static_cast<off_t>(offset));
    if (data == MAP_FAILED) {
      throw system_error(join("Cannot map ", bytes, " bytes of shared memory"), errno);
    }
    data_ = static_cast<std::byte*>(data);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(data_, bytes_); }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t offset() const noexcept { return offset_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] int fd() const noexcept { return fd_->get(); }

 private:
  const std::shared_ptr<const FileDescriptor> fd_;
  std::byte* data_ = nullptr;
  const std::size_t offset_;  // in the file
  const std::size_t bytes_;
};

SharedSegment SharedSegment::find_or_map(const std::shared_ptr<const FileDescriptor>& fd,
                                         std::size_t offset, std::size_t bytes, Access access) {
  const struct stat status = status_of(fd->get());
  // Leaked on purpose: segments may outlive static destruction.
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<std::tuple<dev_t, ino_t, std::size_t>, std::weak_ptr<Mapping>>;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Mapping>& entry = known[{status.st_dev, status.st_ino, offset}];
  SharedSegment segment;
  segment.mapping_ = entry.lock();
  if (!segment.mapping_) {
    segment.mapping_ = std::make_shared<Mapping>(fd, offset, bytes, access);
    entry = segment.mapping_;
  }
  segment.data_ = segment.mapping_->data();
  if (segment.bytes() != bytes) {
    throw TransportError(
        join("A shared segment has ", segment.bytes(), " bytes where ", bytes, " were expected."));
  }
  return segment;
}

SharedSegment SharedSegment::create(const std::string& label, std::size_t bytes) {
  bytes = round_up(bytes, page_bytes());
  FileDescriptor fd = create_file(label);
  resize(fd.get(), bytes);
  // Nobody can shrink it under a reader's feet.
  seal(fd.get(), F_SEAL_SHRINK | F_SEAL_GROW);
  return map(std::move(fd), bytes);
}

SharedSegment SharedSegment::map(FileDescriptor fd, std::size_t bytes, Access access) {
  const auto size = static_cast<std::size_t>(status_of(fd.get()).st_size);
  if (bytes != 0 && size != bytes) {
    throw TransportError(
        join("A shared segment has ", size, " bytes where ", bytes, " were expected."));
  }
  return find_or_map(std::make_shared<const FileDescriptor>(std::move(fd)), 0, size, access);
}

void SharedSegment::refuse_further_writers() const noexcept {
#ifndef F_SEAL_FUTURE_WRITE
  constexpr int F_SEAL_FUTURE_WRITE = 0x10;
#endif
  [[maybe_unused]] const int result = ::fcntl(fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
}

SharedFile::SharedFile(FileDescriptor fd)
    : fd_(std::make_shared<const FileDescriptor>(std::move(fd))) {}

SharedFile SharedFile::create(const std::string& label) {
  SharedFile file(create_file(label));
  seal(file.fd(), F_SEAL_SHRINK);
  return file;
}

void SharedFile::grow(std::size_t bytes) const {
  if (bytes > static_cast<std::size_t>(status_of(fd()).st_size)) {
    resize(fd(), bytes);
  }
}

SharedSegment SharedFile::map(std::size_t offset, std::size_t bytes) const {
  const auto size = static_cast<std::size_t>(status_of(fd()).st_size);
  if (bytes == 0 || offset % page_bytes() != 0 || offset > size || bytes > size - offset) {
    throw TransportError(join("A shared file of ", size, " bytes has no ", bytes,
                              " bytes from byte ", offset, " on."));
  }
  return SharedSegment::find_or_map(fd_, offset, bytes, Access::kWrite);
}

std::size_t SharedSegment::bytes() const noexcept { return mapping_ ? mapping_->bytes() : 0; }

int SharedSegment::fd() const noexcept { return mapping_ ? mapping_->fd() : -1; }

void SharedSegment::reserve(std::size_t offset, std::size_t length,
                            const std::string& purpose) const {
  if (length == 0) {
    return;
  }
  if (length >= kLookedFor) {
    check_memory_room(length, purpose);
  }
  int code = 0;
  do {
    code = ::posix_fallocate(fd(), static_cast<off_t>(mapping_->offset() + offset),
                             static_cast<off_t>(length));
  } while (code == EINTR);
  if (code != 0) {
    throw system_error(join("Cannot reserve ", length, " bytes of shared memory (", purpose, ")"),
                       code);
  }
}

void SharedSegment::discard(std::size_t offset, std::size_t length) const noexcept {
  [[maybe_unused]] const int result =
      ::fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(mapping_->offset() + offset), static_cast<off_t>(length));
}

void SharedSegment::make_private(std::size_t offset, std::size_t length) const {
  check_memory_room(length, "a copy of shared memory");
  if (const int code = try_make_private(offset, length); code != 0) {
    throw system_error(join("Cannot copy ", length, " bytes of shared memory"), code);
  }
}

int SharedSegment::try_make_private(std::size_t offset, std::size_t length) const noexcept {
  std::byte* const begin = data_ + offset;
  if (::mmap(begin, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd(),
             static_cast<off_t>(mapping_->offset() + offset)) == MAP_FAILED) {
    return errno;
  }
  // Until a page is written, it shows what others write into the segment.
#ifdef MADV_POPULATE_WRITE
  if (::madvise(begin, length, MADV_POPULATE_WRITE) == 0) {
    return 0;
  }
  if (errno != EINVAL) {  // of a kernel that does not know it
    return errno;
  }
#endif
  for (std::size_t page = 0; page < length; page += page_bytes()) {
    // A write that changes nothing, whatever other threads do.
    auto& word = *reinterpret_cast<std::atomic<std::uint64_t>*>(begin + page);
    std::uint64_t value = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_strong(value, value, std::memory_order_relaxed)) {
    }
  }
  return 0;
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
