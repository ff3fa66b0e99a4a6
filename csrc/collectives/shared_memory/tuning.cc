#include "collectives/shared_memory/tuning.h"

#include <algorithm>

namespace pydist {
namespace {

std::uint64_t code_of(const Call& call, TunedMemory memory, int size_class) noexcept {
  return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(call.root) << 24 |
         static_cast<std::uint64_t>(call.kind) << 16 | static_cast<std::uint64_t>(memory) << 8 |
         static_cast<std::uint64_t>(size_class);
}

// That a word is about.
TunedMemory memory_of(const Call& call, const TuningWord& word) noexcept {
  if (call.wire_dtype != call.dtype) {
    return TunedMemory::kConverted;
  }
  return word.is_of_shared != 0 ? TunedMemory::kShared : TunedMemory::kOrdinary;
}

TuningWord::Next next_of(const Choice& choice) noexcept {
  if (choice.in_place) {
    return TuningWord::Next::kInPlace;
  }
  return choice.piece_bytes == 0 ? TuningWord::Next::kAhead : TuningWord::Next::kInPieces;
}

// Precondition: not kAsBefore.
Offer offer_after(TuningWord::Next next, TunedMemory memory) noexcept {
  switch (next) {
    case TuningWord::Next::kAhead:
      return Offer::kEager;
    case TuningWord::Next::kInPlace:
      return memory == TunedMemory::kShared ? Offer::kShared : Offer::kInItsProcess;
    default:
      return Offer::kInPieces;
  }
}

bool takes_part(OpKind kind) noexcept {
  return !is_point_to_point(kind) && kind != OpKind::kBarrier && kind != OpKind::kAllocate;
}

}  // namespace

Tuning::Tuning(int rank, int ranks, const TuningLimits& limits, const TuningRhythm& rhythm,
               TuningTable& table)
    : rank_(rank),
      ranks_(ranks),
      limits_(limits),
      rhythm_(rhythm),
      table_(table),
      most_ahead_(limits.one_shot_bytes ? 0 : limits.chunk_bytes) {}

std::size_t Tuning::tuned_bytes(const Call& call) noexcept {
  switch (call.kind) {
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
    case OpKind::kScatter:
      return call.inputs.empty() ? 0 : call.inputs.total() * element_size(call.wire_dtype);
    default:
      return takes_part(call.kind) ? call.count * element_size(call.wire_dtype) : 0;
  }
}

Tuning::Class& Tuning::class_of(const Call& call, TunedMemory memory, int size_class) {
  const std::uint64_t code = code_of(call, memory, size_class);
  if (code != last_code_) {
    last_ = &classes_[code];
    last_->key = {call.kind, memory, ranks_, size_class};
    last_code_ = code;
  }
  return *last_;
}

std::optional<Offer> Tuning::heard_way(const Call& call, TunedMemory memory,
                                       std::size_t bytes) const noexcept {
  const std::uint64_t code = code_of(call, memory, size_class_of(bytes));
  if (code == last_code_) {
    return last_->way;
  }
  const auto found = classes_.find(code);
  return found != classes_.end() ? found->second.way : std::nullopt;
}

bool Tuning::is_sound(const Call& call, const TuningWord& word) const noexcept {
  return takes_part(call.kind) && is_a_piece(word.piece_bytes, limits_.chunk_bytes, ranks_) &&
         word.size_class != 0 && word.size_class <= kLargestSizeClass && word.streams <= 1 &&
         word.is_of_shared <= 1 && is_a_way(call, word);
}

// No rank may rely on another one to be able to do what it can't.
bool Tuning::is_a_way(const Call& call, const TuningWord& word) const noexcept {
  switch (word.next) {
    case TuningWord::Next::kAsBefore:
    case TuningWord::Next::kInPieces:
      return true;
    case TuningWord::Next::kAhead:
      return top_of(word.size_class) <= most_ahead_;
    case TuningWord::Next::kInPlace:
      // What is converted on the way is never read where it lies.
      return memory_of(call, word) == TunedMemory::kShared ||
             (memory_of(call, word) == TunedMemory::kOrdinary && limits_.reads_processes &&
              has_single_copy(call.kind));
  }
  return false;
}

void Tuning::hear(const Call& call, const TuningWord& word) {
  if (word.next != TuningWord::Next::kAsBefore) {
    const TunedMemory memory = memory_of(call, word);
    class_of(call, memory, word.size_class).way = offer_after(word.next, memory);
  }
}

void Tuning::make_known(Class& its) {
  its.is_known = true;
  its.choices = candidates_for(its.key, limits_);
  if (its.choices.size() == 1) {
    return;
  }
  its.has_ways = its.key.memory != TunedMemory::kSymmetric &&
                 std::any_of(its.choices.begin(), its.choices.end(), [&its](const Choice& each) {
                   return next_of(each) != next_of(its.choices[0]);
                 });
  its.has_stores = std::any_of(its.choices.begin(), its.choices.end(), [&its](const Choice& each) {
    return each.streams != its.choices[0].streams;
  });
  const auto known = table_.find_near(its.key);
  const auto start =
      known ? std::find(its.choices.begin(), its.choices.end(), *known) : its.choices.end();
  its.is_from_table = start != its.choices.end();
  its.chooser.emplace(its.choices.size(),
                      its.is_from_table ? static_cast<std::size_t>(start - its.choices.begin()) : 0,
                      static_cast<std::uint64_t>(its.key.size_class) * 12 +
                          static_cast<std::uint64_t>(its.key.kind),
                      rhythm_);
  its.planned = its.chooser->next();
}

void Tuning::tell(Class& its) {
  its.told = its.chooser->judged();
  if (std::optional<TuningEntry> entry = found_by(*its.chooser, its.choices)) {
    entry->is_learnt = !limits_.pins_piece && !limits_.one_shot_bytes;
    table_.put(its.key, *std::move(entry));
  }
}

std::optional<TuningWord> Tuning::choose(const Call& call, TunedMemory memory, std::size_t bytes) {
  Class& its = class_of(call, memory, size_class_of(bytes));
  if (!its.is_known) {
    make_known(its);
  }
  if (!its.chooser) {
    return std::nullopt;
  }
  if (its.quiet > 0) {
    --its.quiet;
    return its.quiet_word;
  }
  running_ = &its;
  bytes_ = bytes;
  plan_ = its.planned;
  its.planned = its.chooser->next();
  if (its.chooser->judged() != its.told) {
    tell(its);
  }
  std::optional<TuningWord> word = word_of(its);
  its.quiet = plan_.is_timed || its.planned.is_timed || plan_.candidate != its.planned.candidate
                  ? 0
                  : its.chooser->quiet_uses();
  if (its.quiet > 0) {
    its.chooser->pass(its.quiet);
    its.quiet_word = word;
    if (its.quiet_word) {
      its.quiet_word->next = TuningWord::Next::kAsBefore;
    }
  }
  if (plan_.is_timed) {
    begun_ = std::chrono::steady_clock::now();
  }
  return word;
}

std::optional<TuningWord> Tuning::word_of(const Class& its) const {
  if (!its.chooser->has_begun() && !its.is_from_table) {
    return std::nullopt;
  }
  const Choice choice = its.choices[plan_.candidate];
  TuningWord word;
  word.piece_bytes = choice.piece_bytes != 0 ? choice.piece_bytes
                                             : static_cast<std::uint32_t>(limits_.chunk_bytes);
  word.streams = choice.streams ? 1 : 0;
  word.size_class = static_cast<std::uint8_t>(its.key.size_class);
  if (its.has_ways) {
    const TuningWord::Next next = next_of(its.choices[its.planned.candidate]);
    if (its.way != offer_after(next, its.key.memory)) {
      word.next = next;
    }
    word.is_of_shared = its.key.memory == TunedMemory::kShared ? 1 : 0;
  }
  // Without a word, pieces are chunks, and stores as they are usual for the very size.
  const bool says_what_is_so = word.piece_bytes == limits_.chunk_bytes && !its.has_stores &&
                               word.next == TuningWord::Next::kAsBefore;
  return says_what_is_so ? std::nullopt : std::optional(word);
}

bool Tuning::is_timed(Route route) const noexcept {
  if (running_ == nullptr || !plan_.is_timed) {
    return false;
  }
  if (running_->key.memory == TunedMemory::kSymmetric) {
    return route == Route::kSymmetric;
  }
  switch (next_of(running_->choices[plan_.candidate])) {
    case TuningWord::Next::kAhead:
      return route == Route::kOneShot;
    case TuningWord::Next::kInPlace:
      return route ==
             (running_->key.memory == TunedMemory::kShared ? Route::kShared : Route::kSingleCopy);
    default:
      return route == Route::kPipelined;
  }
}

void Tuning::note(std::chrono::nanoseconds time) {
  // As for the largest operation of the class, so that others of it compare.
  const double scale =
      static_cast<double>(top_of(running_->key.size_class)) / static_cast<double>(bytes_);
  running_->chooser->note(plan_.candidate,
                          static_cast<double>((given_in_ + time).count()) * 1e-3 * scale);
}

}  // namespace pydist
