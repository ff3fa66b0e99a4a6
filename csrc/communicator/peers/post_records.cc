#include "communicator/peers/post_records.h"

#include <cstring>

#include "transport/tcp/frame.h"

namespace pydist {
namespace {

constexpr std::size_t kFirstLineBodyBytes = offsetof(Post, lines) - sizeof(Counter);

std::size_t lines_bytes(const Post& post) noexcept {
  return post.offer() == Offer::kInLines ? kPostBodyBytes - kFirstLineBodyBytes : 0;
}
std::size_t counts_bytes(const Post& post, std::size_t size) noexcept {
  return (post.flags & Post::kRagged) != 0 ? size * sizeof(std::uint64_t) : 0;
}

std::span<const std::byte> take(std::span<const std::byte>& bytes, std::size_t count) {
  if (bytes.size() < count) {
    throw BadFrame("a post that is cut off");
  }
  const std::span<const std::byte> front = bytes.first(count);
  bytes = bytes.subspan(count);
  return front;
}

}  // namespace

std::size_t most_record_bytes(std::size_t size) noexcept {
  return size * (sizeof(std::int32_t) + kPostBodyBytes + sizeof(PostDetail) +
                 size * sizeof(std::uint64_t));
}

void append_post(std::vector<std::byte>& records, const GroupSegment& segment, int rank,
                 std::size_t slot, std::size_t size) {
  RankControl& control = segment.control(rank);
  const std::int32_t number = rank;
  // What the first line says is read once, whoever may be damaging the memory.
  Post first{};
  std::byte* const body = body_of(control.posts[slot]);
  std::memcpy(body_of(first), body, kFirstLineBodyBytes);
  const auto append = [&records](const void* data, std::size_t bytes) {
    const auto* const begin = static_cast<const std::byte*>(data);
    records.insert(records.end(), begin, begin + bytes);
  };
  append(&number, sizeof number);
  append(body_of(first), kFirstLineBodyBytes);
  append(body + kFirstLineBodyBytes, lines_bytes(first));
  append(&control.details[slot], sizeof(PostDetail));
  append(segment.block_counts(rank, slot), counts_bytes(first, size));
}

PostRecord take_record(std::span<const std::byte>& records, std::size_t size) {
  PostRecord record;
  std::int32_t rank = 0;
  std::memcpy(&rank, take(records, sizeof rank).data(), sizeof rank);
  if (rank < 0 || static_cast<std::size_t>(rank) >= size) {
    throw BadFrame("a post of a rank that there is not");
  }
  record.rank = rank;
  // What follows depends on what the post says.
  Post first{};
  std::span<const std::byte> rest = records;
  std::memcpy(body_of(first), take(rest, kFirstLineBodyBytes).data(), kFirstLineBodyBytes);
  record.body = take(records, kFirstLineBodyBytes + lines_bytes(first));
  record.detail = take(records, sizeof(PostDetail));
  record.counts = take(records, counts_bytes(first, size));
  return record;
}

void write_post(const PostRecord& record, const GroupSegment& segment, std::uint64_t sequence) {
  const std::size_t slot = sequence % kPostDepth;
  RankControl& control = segment.control(record.rank);
  Post& post = control.posts[slot];
  std::memcpy(body_of(post), record.body.data(), record.body.size());
  std::memcpy(&control.details[slot], record.detail.data(), record.detail.size());
  if (!record.counts.empty()) {
    std::memcpy(segment.block_counts(record.rank, slot), record.counts.data(),
                record.counts.size());
  }
  post.sequence.store(sequence, std::memory_order_release);
}

}  // namespace pydist
