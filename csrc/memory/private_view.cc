#include "memory/private_view.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/error.h"
#include "memory/file_descriptor.h"

namespace pydist {
namespace {

// Bits of an entry of a pagemap (Documentation/admin-guide/mm/pagemap.rst).
constexpr std::uint64_t kIsPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kIsSwapped = std::uint64_t{1} << 62;
// The page belongs to a file. All pages of a segment do; a private copy of a page does not.
constexpr std::uint64_t kIsOfFile = std::uint64_t{1} << 61;

[[nodiscard]] bool is_copy(std::uint64_t entry) noexcept {
  return (entry & (kIsPresent | kIsSwapped)) != 0 && (entry & kIsOfFile) == 0;
}

[[nodiscard]] std::byte* map(std::byte* at, std::size_t bytes, int flags, int fd) {
  void* const data = ::mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) {
    throw system_error(join("Cannot map ", bytes, " bytes of shared memory copy-on-write"), errno);
  }
  return static_cast<std::byte*>(data);
}

// Copies among the pages of [data, data + bytes); nothing where the system does not tell.
[[nodiscard]] std::optional<std::vector<PrivateView::Range>> copies_in(const std::byte* data,
                                                                       std::size_t bytes,
                                                                       const char* pagemap_path) {
  // Opened each time: in a forked child, a descriptor of the parent's shows the parent's pages.
  const FileDescriptor pagemap(::open(pagemap_path, O_RDONLY | O_CLOEXEC));
  if (!pagemap) {
    return std::nullopt;
  }
  const std::size_t page = page_bytes();
  const std::size_t first = reinterpret_cast<std::uintptr_t>(data) / page;
  std::vector<PrivateView::Range> found;
  std::array<std::uint64_t, 4096> entries{};
  for (std::size_t done = 0; done < bytes / page;) {
    const std::size_t wanted = std::min(entries.size(), bytes / page - done);
    const ssize_t got = ::pread(pagemap.get(), entries.data(), wanted * sizeof entries[0],
                                static_cast<off_t>((first + done) * sizeof entries[0]));
    if (got < static_cast<ssize_t>(sizeof entries[0])) {
      return std::nullopt;
    }
    const std::size_t count = static_cast<std::size_t>(got) / sizeof entries[0];
    for (std::size_t i = 0; i < count; ++i) {
      if (!is_copy(entries[i])) {
        continue;
      }
      const std::size_t begin = (done + i) * page;
      if (!found.empty() && found.back().end == begin) {
        found.back().end += page;
      } else {
        found.push_back({begin, begin + page});
      }
    }
    done += count;
  }
  return found;
}

}  // namespace

PrivateView::PrivateView(const SharedSegment& segment, const char* pagemap)
    : segment_(segment),
      data_(map(nullptr, segment.bytes(), MAP_PRIVATE, segment.fd())),
      bytes_(segment.bytes()),
      pagemap_(pagemap) {}

PrivateView::PrivateView(PrivateView&& other) noexcept
    : segment_(std::exchange(other.segment_, SharedSegment())),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      pagemap_(other.pagemap_) {}

PrivateView& PrivateView::operator=(PrivateView&& other) noexcept {
  std::swap(segment_, other.segment_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(pagemap_, other.pagemap_);
  return *this;
}

PrivateView::~PrivateView() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
}

std::vector<PrivateView::Range> PrivateView::written() const {
  if (bytes_ == 0) {
    return {};
  }
  std::optional<std::vector<Range>> found = copies_in(data_, bytes_, pagemap_);
  return found ? *std::move(found) : std::vector<Range>{{0, bytes_}};
}

void PrivateView::forget() {
  for (const Range& range : written()) {
    if (::madvise(data_ + range.begin, range.end - range.begin, MADV_DONTNEED) != 0) {
      throw system_error("Cannot drop copies of pages of shared memory", errno);
    }
  }
}

void PrivateView::share(bool is_shared) {
  if (data_ != nullptr) {
    data_ = map(data_, bytes_, MAP_FIXED | (is_shared ? MAP_SHARED : MAP_PRIVATE), segment_.fd());
  }
}

}  // namespace pydist
