// A second mapping of a shared segment, in which what this process writes stays its own.
//
// It is copy-on-write: pages that the process has only read are those of the segment, so that what
// anybody writes into the segment itself shows here at once and takes no memory. The first write
// into a page makes a copy of it, which stays as it is until `forget`.
//
// Not thread safe: nobody reads or writes the mapping while `forget` or `share` runs. Owned by
// whoever holds the object; moving it leaves the addresses as they are.

#pragma once

#include <cstddef>
#include <vector>

#include "memory/shared_segment.h"

namespace pydist {

class PrivateView {
 public:
  // Bytes [begin, end) of the segment.
  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;

    friend bool operator==(const Range&, const Range&) = default;
  };

  PrivateView() = default;
  // Throws TransportError where the system has no room for the mapping. `pagemap`, which outlives
  // the view, is where the system tells which pages are copies.
  explicit PrivateView(const SharedSegment& segment, const char* pagemap = "/proc/self/pagemap");
  PrivateView(PrivateView&& other) noexcept;
  PrivateView& operator=(PrivateView&& other) noexcept;
  PrivateView(const PrivateView&) = delete;
  PrivateView& operator=(const PrivateView&) = delete;
  ~PrivateView();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  // The whole pages that are copies, in order. All of the view where the system does not tell.
  [[nodiscard]] std::vector<Range> written() const;

  // Drops all copies: from now on, the segment's own values show everywhere.
  void forget();

  // Whether what the process writes goes into the segment itself from now on. Copies are dropped.
  void share(bool is_shared);

 private:
  SharedSegment segment_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  const char* pagemap_ = nullptr;
};

}  // namespace pydist
