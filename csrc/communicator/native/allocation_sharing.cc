#include "communicator/native/allocation_sharing.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <utility>

#include "base/error.h"
#include "health/text_field.h"
#include "memory/memory_room.h"
#include "memory/segment_exchange.h"
#include "memory/shared_segment.h"

namespace pydist {
namespace {

// What a rank tells the others.
struct Word {
  std::array<char, 128> address;  // of its segment server
  std::array<char, 64> token;     // in the key of its offer
  std::array<char, 512> error;    // empty: none
  std::uint64_t heap_bytes;
  ErrorKind kind;           // of the error
  std::uint8_t is_sharing;  // with all ranks of its host, so that there is nothing to do
};

std::string key_of(const std::string& token) { return join("allocations/", token); }

// The heap is sparse: what it may hold is no more than a bound. Half of what is free now, in equal
// parts: the rest is for the programs themselves.
std::size_t usual_bytes(std::size_t ranks) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 40;
  return std::clamp(memory_room().bytes / 2 / ranks, AllocationHeap::kGrainBytes, kMostBytes);
}

class Sharing {
 public:
  explicit Sharing(const SharingGroup& group)
      : group_(group),
        me_(group.communicator.rank()),
        here_(group.ranks.ranks_on(group.ranks.host_of(me_))) {}

  std::shared_ptr<AllocationHeap> run(std::optional<std::size_t> max_bytes,
                                      const std::string& refusal) {
    Word mine{};
    attempt(mine, [&] { offer(max_bytes, refusal, mine); });
    const std::vector<Word> words = hear(mine);
    require_no_error(words);
    if (std::all_of(words.begin(), words.end(), [](const Word& each) { return each.is_sharing; })) {
      return heap_;
    }
    mine = Word{};
    attempt(mine, [&] { open_windows(words); });
    // From here on this rank must be able to read what others offer: some may have heard already
    // that all have come so far, should this one fail to hear it.
    group_.endpoint.keep_allocation_heap(heap_);
    const std::vector<Word> outcomes = hear(mine);
    try {
      require_no_error(outcomes);
    } catch (...) {
      for (HeapWindow* const window : opened_) {
        window->close();
      }
      group_.endpoint.keep_allocation_heap(had_heap_ ? heap_ : nullptr);
      throw;
    }
    for (HeapWindow* const window : opened_) {
      window->switch_on();
    }
    return heap_;
  }

 private:
  [[nodiscard]] HeapWindow& window_of(int rank) const {
    return group_.peers[static_cast<std::size_t>(rank)]->window;
  }
  [[nodiscard]] bool is_alone() const noexcept { return here_.size() == 1; }

  template <typename Step>
  static void attempt(Word& word, const Step& step) {
    try {
      step();
    } catch (const std::exception& thrown) {
      const ErrorDescription what = describe(std::current_exception());
      word.kind = what.kind == ErrorKind::kInvalidUsage ? what.kind : ErrorKind::kTransport;
      write_text(word.error, what.message.empty() ? "it failed without a reason." : what.message);
    }
  }

  void offer(std::optional<std::size_t> max_bytes, const std::string& refusal, Word& mine) {
    if (!refusal.empty()) {
      throw InvalidUsage(refusal);
    }
    if (is_alone()) {
      mine.is_sharing = 1;
      return;
    }
    heap_ = group_.endpoint.allocation_heap();
    had_heap_ = heap_ != nullptr;
    if (heap_ && max_bytes &&
        round_up(*max_bytes, AllocationHeap::kGrainBytes) != heap_->segment().bytes()) {
      throw InvalidUsage(join("share_allocations: max_bytes is ", *max_bytes,
                              ", but this process shares a heap of ", heap_->segment().bytes(),
                              " bytes already, from the first call on. Give the same bound again, "
                              "or none."));
    }
    if (!heap_) {
      heap_ = AllocationHeap::create(max_bytes.value_or(usual_bytes(here_.size())));
    }
    mine.heap_bytes = heap_->segment().bytes();
    if (std::all_of(here_.begin(), here_.end(),
                    [&](int rank) { return window_of(rank).is_on(); })) {
      mine.is_sharing = 1;
    }
    // Also then: another rank may not have come so far.
    const std::string token = random_token();
    SegmentServer& server = group_.endpoint.server();
    offer_.emplace(server, key_of(token), heap_->read_only_descriptor().get(), group_.secret);
    write_text(mine.address, server.address());
    write_text(mine.token, token);
  }

  void open_windows(const std::vector<Word>& words) {
    if (is_alone()) {
      return;
    }
    const Deadline deadline = Deadline::in(group_.communicator.timeout());
    for (const int rank : here_) {
      if (window_of(rank).is_on()) {
        continue;
      }
      const Word& its = words[static_cast<std::size_t>(rank)];
      SharedSegment segment = rank == me_ ? heap_->segment() : fetch(rank, its, deadline);
      window_of(rank).open(std::move(segment));
      opened_.push_back(&window_of(rank));
    }
  }

  [[nodiscard]] SharedSegment fetch(int rank, const Word& its, Deadline deadline) const {
    const Peer& peer = *group_.peers[static_cast<std::size_t>(rank)];
    const auto require_hope = [&] {
      if (peer.has_crashed()) {
        throw PeerLost(join("rank ", rank, " (", peer.description, ") has died."));
      }
    };
    FetchedSegment fetched = fetch_segment(read_text(its.address), key_of(read_text(its.token)),
                                           group_.secret, deadline, require_hope);
    return SharedSegment::map(std::move(fetched.fd), its.heap_bytes, Access::kRead);
  }

  // What all ranks tell, by rank.
  [[nodiscard]] std::vector<Word> hear(Word& mine) const {
    static_assert(std::is_trivially_copyable_v<Word>);
    std::vector<Word> words(static_cast<std::size_t>(group_.communicator.size()));
    Operation operation;
    operation.kind = OpKind::kAllGather;
    operation.inputs = {Buffer{&mine, sizeof mine, DType::kUInt8}};
    operation.outputs = {Buffer{words.data(), words.size() * sizeof mine, DType::kUInt8}};
    operation.label = "share_allocations";
    group_.communicator.run(std::move(operation));
    return words;
  }

  // Throws the error of the lowest rank that has one.
  void require_no_error(const std::vector<Word>& words) const {
    for (std::size_t rank = 0; rank < words.size(); ++rank) {
      const std::string error = read_text(words[rank].error);
      if (!error.empty()) {
        std::rethrow_exception(
            make_error(words[rank].kind,
                       join("The ranks cannot share their allocations: rank ", rank, ": ", error),
                       group_.communicator.culprit(static_cast<int>(rank), error)));
      }
    }
  }

  const SharingGroup& group_;
  const int me_;
  const std::span<const int> here_;  // the ranks of this host
  std::shared_ptr<AllocationHeap> heap_;
  bool had_heap_ = false;
  std::optional<SegmentOffer> offer_;  // until all have it, or nobody will
  std::vector<HeapWindow*> opened_;
};

}  // namespace

std::shared_ptr<AllocationHeap> share_allocations(const SharingGroup& group,
                                                  std::optional<std::size_t> max_bytes,
                                                  const std::string& refusal) {
  return Sharing(group).run(max_bytes, refusal);
}

}  // namespace pydist
