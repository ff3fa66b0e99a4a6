#include "health/process_page.h"

#include <cstring>
#include <memory>

#include "base/error.h"

namespace pydist {
namespace {

using PageWord = std::atomic<std::uint64_t>;
constexpr std::size_t kPageWords = sizeof(ProcessPage) / sizeof(PageWord);
static_assert(sizeof(ProcessPage) % sizeof(PageWord) == 0);

}  // namespace

std::vector<std::byte> copy_of_page(const ProcessPage& page) {
  std::vector<std::byte> bytes(sizeof page);
  const auto* words = reinterpret_cast<const PageWord*>(&page);
  for (std::size_t index = 0; index < kPageWords; ++index) {
    const std::uint64_t word = words[index].load(std::memory_order_relaxed);
    std::memcpy(bytes.data() + index * sizeof word, &word, sizeof word);
  }
  return bytes;
}

void write_page(ProcessPage& mirror, std::span<const std::byte> bytes, std::int64_t ahead_ns) {
  PYDIST_CHECK(bytes.size() == sizeof mirror);
  const auto page = std::make_unique<ProcessPage>();
  std::memcpy(static_cast<void*>(page.get()), bytes.data(), bytes.size());
  if (page->heartbeat_ns.load(std::memory_order_relaxed) != 0) {
    page->heartbeat_ns.fetch_add(ahead_ns, std::memory_order_relaxed);
  }
  page->journal.shift_times(ahead_ns);
  auto* words = reinterpret_cast<PageWord*>(&mirror);
  const auto* news = reinterpret_cast<const PageWord*>(page.get());
  for (std::size_t index = 0; index < kPageWords; ++index) {
    words[index].store(news[index].load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}

}  // namespace pydist
