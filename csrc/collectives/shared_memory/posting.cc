#include "collectives/shared_memory/posting.h"

#include <bit>
#include <cstddef>
#include <cstdint>

#include "collectives/call_mismatch.h"
#include "collectives/shared_memory/tuning.h"

namespace pydist {
namespace {

// What is used is what has been looked at, whoever may be damaging the memory: one atomic load,
// which the compiler may not repeat, as it may that of a plain copy.
TuningWord copy_of_word(const TuningWord& shared) noexcept {
  static_assert(sizeof(TuningWord) == sizeof(std::uint64_t));
  static_assert(offsetof(PostDetail, word) % alignof(std::uint64_t) == 0);
  using Bits [[gnu::may_alias]] = std::uint64_t;
  const auto* const bits = reinterpret_cast<const Bits*>(&shared);
  return std::bit_cast<TuningWord>(__atomic_load_n(bits, __ATOMIC_RELAXED));
}

}  // namespace

// Note [One line at once]: peers that are early look at the line of this rank's next post all the
// time, and each look takes it away from this core. So the stores to it come last and close
// together, or the line travels several times.
void fill_post(Group& group, const Call& call, Given given) {
  const Offer offer = given.offer;
  Tuning* const tuning = group.tuning();
  const bool chooses = tuning != nullptr && tuning->chooses(call);
  std::optional<TuningWord> word;
  if (chooses) {
    word = tuning->begin(call, given.memory);
  }
  if (!is_ahead(offer) && offer != Offer::kInPieces) {
    const PostDetail places = places_of(group, call, offer);
    group.my_detail().input = places.input;
    group.my_detail().output = places.output;
  }
  if (group.size() > 1 && is_ahead(offer)) {
    const bool is_eager = offer == Offer::kEager;
    if (is_eager) {
      group.prepare_transit();
    }
    pack_contribution(group, call,
                      is_eager ? group.exchanged_transit(group.rank(), group.round())
                               : group.my_post().data(offer));
  }
  if (chooses) {
    tuning->note_given();
  }
  auto flags = static_cast<std::uint8_t>(offer);
  if (word) {
    group.my_detail().word = *word;
    flags |= Post::kTuned;
  }
  describe_call(group, call, flags);
}

Route agree_on_route(Group& group, const Call& call) {
  if (waits_for_posts(group, call)) {
    group.note_all_posted();
    // The common case, in which two words of each rank's post decide.
    if (call.kind == OpKind::kAllReduce && is_inline(group.post(group.rank()).offer()) &&
        all_posts_are_alike(group)) {
      return Route::kInline;
    }
    check_agreement(group, call, 0, group.size());
  }
  if ((group.post(call.root).flags & Post::kTuned) != 0) {
    const TuningWord word = copy_of_word(group.detail(call.root).word);
    if (group.tuning() == nullptr || !group.tuning()->is_sound(call, word)) {
      throw_damaged(group, call.root);
    }
    group.tuning()->hear(call, word);
    group.move_by(word);
  }
  return agreed_route(group, call);
}

}  // namespace pydist
