// What hooks on the graph set off; a round itself is in round.cc and round_after_closing.cc,
// what is asked outside of backward in outside_backward.cc.

#include "reducer/reducer.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "c10d/cpu_allocator.h"
#include "c10d/device_streams.h"
#include "c10d/errors.h"
#include "reducer/end_of_several_reducers.h"

namespace pydist {
namespace {

// How long a gradient waits for memory that other ranks have yet to give back.
constexpr std::chrono::milliseconds kMemoryPatience{2'000};

}  // namespace

// One outermost backward; only the engine's callbacks keep it alive.
class Reducer::Backward final : public EndingBackward,
                                public std::enable_shared_from_this<Backward> {
 public:
  Backward(std::shared_ptr<Reducer> owner, bool synchronizes, bool accumulates,
           std::optional<Weight> weight)
      : synchronizes(synchronizes),
        accumulates(accumulates),
        weight(std::move(weight)),
        owner_(std::move(owner)) {
    const std::lock_guard lock(owner_->open_mutex_);
    ++owner_->open_backwards_;
  }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() override {
    if (!is_over_) {
      owner_->abandon(*this);
      end();
    }
  }

  // The engine's callback.
  void finish() {
    if (owner_->finish(*this)) {
      end_together(shared_from_this());
    } else {
      end();
    }
  }

  [[nodiscard]] std::uint64_t place() const override { return owner_->place_; }

  void close() noexcept override {
    end();
    try {
      owner_->close_or_give_up();
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  void conclude(bool is_alone) override {
    owner_->ends_alone_ = owner_->ends_alone_ && is_alone;
    rethrow_if_any(error_);
    owner_->conclude_round(/*learns=*/true);
  }

  bool synchronizes;  // or accumulates only, so far
  // Known to be a backward() that fills gradients, even where it reaches no parameter.
  const bool accumulates;
  const std::optional<Weight> weight;
  const Instant began = now_ns();
  std::optional<std::uint64_t> round;   // once it has entered one
  std::optional<std::size_t> replaced;  // see forget_weights_of_nothing()
  Factor factor;                        // of its gradients in the arena
  bool is_captured = false;             // into a CUDA graph, where it began

 private:
  void end() {
    is_over_ = true;
    {
      const std::lock_guard lock(owner_->open_mutex_);
      --owner_->open_backwards_;
    }
    owner_->open_changed_.notify_all();
  }

  const std::shared_ptr<Reducer> owner_;
  bool is_over_ = false;
  std::exception_ptr error_;
};

// -- what the hooks call

void Reducer::watch(const at::Tensor& output) {
  forward_ended_ = now_ns();
  if (!output.requires_grad() || output.is_leaf()) {
    return;
  }
  // The graph keeps the reducer: who drops the wrapper after forward still gets averaged gradients.
  on_backward(output, first_node_of_forward_,
              [self = shared_from_this(), averages = is_enabled_, on_cpu = output.is_cpu()] {
                guarded_for_torch([&] { self->announce(averages, on_cpu); });
              });
}

// Called outside of backward: waits until autograd has released a backward that threw. What is left
// of that backward would otherwise be taken for part of the next one.
void Reducer::await_thrown() {
  if (is_within_backward()) {
    return;
  }
  // The thread that let the exception out releases it right afterwards. The limit is for another
  // backward that runs on a thread of the user's: nobody should wait for the end of that.
  constexpr std::chrono::seconds kLongEnough(5);
  std::unique_lock lock(open_mutex_);
  (void)open_changed_.wait_for(lock, kLongEnough, [this] { return open_backwards_ == 0; });
}

// `runs_on_cpu`: whether this is the thread that works for the CPU, of the backward's threads.
void Reducer::announce(bool averages, bool runs_on_cpu) {
  const std::lock_guard turn(turn_);
  if (!retired_.empty()) {
    throw InvalidUsage(retired_);
  }
  if (const auto backward = current_.lock(); backward == nullptr) {
    begin(averages,
          std::any_of(hooks_.begin(), hooks_.end(),
                      [](const auto& hooks) { return hooks->will_run(); }),
          runs_on_cpu);
  } else if (averages && !backward->synchronizes) {
    let_average(*backward);
  }
}

std::shared_ptr<Reducer::Backward> Reducer::require_backward() {
  if (auto backward = current_.lock(); backward != nullptr) {
    return backward;
  }
  has_bypassed_ = has_bypassed_ || !a_forward_averages_;
  return begin(a_forward_averages_.value_or(false), /*accumulates=*/true, /*runs_on_cpu=*/true);
}

at::Tensor Reducer::arriving(std::size_t index, const at::Tensor& gradient) {
  const std::lock_guard turn(turn_);
  const CpuAllocator::OwnBlocks own_blocks;
  // Nothing may write into the arena while an earlier round is under way.
  const std::shared_ptr<Backward> backward = require_backward();
  enter(*backward);
  GradientSlot& slot = arena_.slots()[index];
  slot.has_arrived = gradient.defined();
  if (!gradient.defined()) {
    return gradient;
  }
  if (is_late(slot)) {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor counted = scaled(gradient, backward->factor);
    slot.late = slot.late.defined() ? slot.late.add(counted) : counted.clone();
    return {};
  }
  if (is_sharded(slot) && take_memory(*backward, arena_.buckets()[slot.bucket])) {
    const c10::AutoGradMode no_grad(false);
    move_in(slot);
  }
  if (adds_up() || slot.owner != 0) {
    const c10::AutoGradMode no_grad(false);
    check_aside(slot);
    if (is_averaged(slot)) {
      set_aside(slot);
    }
  }
  if (!slot.parameter.grad().defined() && slot.landing == 0 &&
      !forecast_.arrives_in_place(slot, gradient)) {
    arena_.lent().make_room(slot);
  }
  at::Tensor landed = land(slot, gradient, backward->factor);
  ++slot.landing;
  return landed;
}

// Takes memory for the bucket in which a gradient is about to land. If another bucket still has
// that memory, because the other ranks have yet to launch their part of it, this rank waits for
// them. It would have to wait in the end anyway, and until then whole gradients would pile up.
//
// While this rank waits, no rank may be waiting for it, in a collective of the user's within
// backward, say. As a rule none is: all ranks launch buckets in one order, and launch them as soon
// as they are complete. That does not hold where ranks have to hear each other's openings first,
// where a parameter is unused on some of them, or where they may come to several models in
// different orders; then this rank does not wait. The wait has a limit all the same, because the
// ranks may behave otherwise in this step than in the last.
bool Reducer::take_memory(const Backward& backward, const GradientBucket& bucket) {
  if (arena_.bind(bucket, /*is_next=*/false)) {
    return true;
  }
  const bool may_wait = backward.synchronizes && !weights_.has_weighted &&
                        joining_ == Joining::kNot && all_use_alike_ && ends_alone_;
  if (!may_wait || round_.has_waited_in_vain || bucket.berth->unlaunched()) {
    return false;
  }
  bucket.berth->wait_quietly(Deadline::in(kMemoryPatience));
  round_.has_waited_in_vain = !arena_.bind(bucket, /*is_next=*/false);
  return !round_.has_waited_in_vain;
}

void Reducer::accumulated(std::size_t index) {
  const std::lock_guard turn(turn_);
  const CpuAllocator::OwnBlocks own_blocks;
  const std::shared_ptr<Backward> backward = require_backward();
  GradientSlot& slot = arena_.slots()[index];
  slot.landing = std::max(slot.landing - 1, 0);
  if (backward->synchronizes && slot.fired_in != round_.number) {
    slot.fired_in = round_.number;
    slot.fires = 0;
    ++round_.fired;
  }
  if (is_late(slot)) {
    ++slot.fires;
    return;
  }
  if (slot.has_arrived) {
    if (!slot.parameter.grad().defined()) {
      if (backward->synchronizes) {
        throw_taken_away(slot);
      }
      return;
    }
    if (!holds_gradient(slot) && slot.landing == 0) {
      arena_.lent().take_in(slot);
    }
    slot.is_pending = true;
    weights_.has_gradients = true;
    note_seen(slot, /*by_value=*/adds_up());
    note_stream(slot);
  }
  if (!backward->synchronizes) {
    return;
  }
  if (++slot.fires == slot.expected_fires) {
    note_complete(slot);
  }
  launch_what_is_ready();
}

void Reducer::note_complete(const GradientSlot& slot) {
  order_.note(slot.index);
  if (arena_.buckets().empty()) {
    return;
  }
  std::size_t& missing = arena_.buckets()[slot.bucket].missing;
  PYDIST_CHECK(missing > 0);
  if (--missing == 0) {
    round_.times->buckets[slot.bucket].ready = now_ns();
  }
}

// Gradients that were landing when a hook threw will never arrive.
void Reducer::end_landings() {
  for (GradientSlot& slot : arena_.slots()) {
    slot.landing = 0;
  }
}

// Notes the stream on which a gradient has come: the bucket waits for it, whichever thread launches
// the bucket.
void Reducer::note_stream(const GradientSlot& slot) {
  if (!has_place(slot) || slot.view.is_cpu()) {
    return;
  }
  std::vector<c10::Stream>& streams = arena_.buckets()[slot.bucket].streams;
  const c10::Stream stream = current_stream(device_of(slot.view.device()));
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

// Returns whether there is something to conclude at the end of backward.
bool Reducer::finish(Backward& backward) {
  const std::lock_guard turn(turn_);
  forecast_.end();
  current_.reset();
  end_landings();
  if (backward.accumulates) {
    enter(backward);
    if (!backward.synchronizes) {
      warn_of_earlier_forward();
    }
  }
  has_left_out_average_ = backward.synchronizes && !backward.accumulates;
  if (!begins_round(backward)) {
    return false;
  }
  a_forward_averages_.reset();
  round_.times->computed = now_ns();
  open_or_give_up();
  is_held_ = is_holding_;
  if (is_held_) {
    round_.times->held = now_ns();
  }
  return !is_held_;
}

// Keeps the ranks in step after a backward that threw here. The peers are in the same round or will
// be: they get everything they wait for, and are told that it is worth nothing.
void Reducer::abandon(Backward& backward) noexcept {
  const std::lock_guard turn(turn_);
  forecast_.end();
  current_.reset();
  end_landings();
  const bool was_given_up = backward.round && *backward.round != round_.number;
  if (backward.synchronizes) {
    a_forward_averages_.reset();
  }
  if (was_given_up || !begins_round(backward)) {
    return;
  }
  program_goes_on_ = true;
  bool is_known = false;
  try {
    enter(backward);
  } catch (const std::exception&) {
    // All ranks know why a round could not be prepared, and a failed group has told everybody.
    is_known = communicator_->failure() != nullptr || round_.times == nullptr;
  }
  if (!is_known) {
    give_up();
  }
  program_goes_on_ = false;
}

// -- beginning

std::shared_ptr<Reducer::Backward> Reducer::begin(bool averages, bool accumulates,
                                                  bool runs_on_cpu) {
  if (is_held_) {
    lose_held("another backward");
    throw InvalidUsage(why_lost_);
  }
  if (averages) {
    why_lost_.clear();
  }
  auto backward = std::make_shared<Backward>(shared_from_this(), averages, accumulates, weight_);
  backward->is_captured = is_capturing();
  // Now, and not when it enters a round: should it throw before that, the program goes on.
  backward->replaced = forget_weights_of_nothing();
  current_ = backward;
  if (accumulates && runs_on_cpu && !arena_.device()) {
    forecast_.begin();
  }
  at_end_of_backward([backward] { guarded_for_torch([&] { backward->finish(); }); });
  return backward;
}

// Lets a backward begin its round. Called before its first gradient, or at its end if it had none.
void Reducer::enter(Backward& backward) {
  if (backward.round) {
    return;
  }
  if (backward.synchronizes) {
    prepare_round(backward.began);
    round_.is_captured = round_.is_captured || backward.is_captured;
  } else {
    drain();
    // The plan is laid out already now, because this backward may turn out to average after all,
    // and by then its gradients lie in their places.
    apply_plan();
    arena_.lent().set_fixed(is_plan_fixed_ || is_capturing());
  }
  backward.round = round_.number;
  if (is_frozen()) {
    return;
  }
  if (backward.replaced) {
    throw_replaced(arena_.slots()[*backward.replaced]);
  }
  (backward.weight ? weights_.has_weighted : weights_.has_plain) = true;
  if (backward.weight) {
    backward.factor = count_weight(backward);
  }
}

Factor Reducer::count_weight(const Backward& backward) {
  const Weight& weight = *backward.weight;
  if (std::holds_alternative<double>(weight)) {
    // Both arguments are about weights that a GPU computes.
    return weights_.count(weight, /*is_alone=*/false, /*device=*/std::nullopt);
  }
  const std::vector<GradientSlot>& slots = arena_.slots();
  const bool is_alone =
      backward.synchronizes &&
      std::none_of(slots.begin(), slots.end(), [](const auto& slot) { return slot.is_sparse; });
  return weights_.count(weight, is_alone, device_of_weights());
}

// For a backward that has begun from a forward that averages nothing, and comes to one that does.
// What has arrived before then leaves at its end.
void Reducer::let_average(Backward& backward) {
  backward.synchronizes = true;
  why_lost_.clear();
  if (backward.round) {
    prepare_round(backward.began);
    round_.is_captured = round_.is_captured || backward.is_captured;
  }
}

// Once the program has set the gradients of earlier backwards to zero or None, their weights no
// longer count. Returns a slot whose gradient the program has replaced between passes with weights.
std::optional<std::size_t> Reducer::forget_weights_of_nothing() {
  if (!weights_.has_gradients) {
    return std::nullopt;
  }
  if (!has_pending()) {
    weights_ = {};
  }
  if (weights_.has_weighted) {
    for (const GradientSlot& slot : arena_.slots()) {
      if (is_still_pending(slot) && !is_seen(slot)) {
        return slot.index;
      }
    }
  }
  return std::nullopt;
}

// Decided from what all ranks have in common: a model that is frozen everywhere has no gradients.
bool Reducer::begins_round(const Backward& backward) const {
  return backward.synchronizes && (round_.fired != 0 || backward.accumulates) &&
         !(is_frozen() && (!buffers_ || buffers_->memory.numel() == 0));
}

bool Reducer::is_frozen() const {
  return std::none_of(arena_.slots().begin(), arena_.slots().end(),
                      [](const auto& slot) { return slot.parameter.requires_grad(); });
}

// Whether no operation of the ranks uses the slot's home, before a backward has written there: none
// is left of an earlier round, and in this one its bucket has yet to leave.
bool Reducer::may_write(const GradientSlot& slot) const {
  const std::shared_ptr<Backward> backward = current_.lock();
  return backward != nullptr && (backward->round ? !is_late(slot) : is_idle());
}

bool Reducer::is_in_backward() const {
  const std::lock_guard turn(turn_);
  const auto backward = current_.lock();
  return backward != nullptr && backward->synchronizes;
}

// See Note [Set aside].
bool Reducer::adds_up() const {
  return options_.sums || weights_.has_weighted || joining_ != Joining::kNot;
}

void Reducer::prepare_round(Instant began) {
  drain();
  if (!out_of_step_.empty()) {
    std::rethrow_exception(make_error(ErrorKind::kError, out_of_step_));
  }
  try {
    if (next_plan_) {
      // Allocates nothing, for which ranks wait for each other: whoever has buckets cut anew has
      // the plan applied at once.
      beside_program([this] { apply_plan(); });
    }
    arena_.lent().set_fixed(is_plan_fixed_ || is_capturing());
    round_.is_bare = is_frozen();
    round_.times = std::make_shared<RoundTimes>(arena_.buckets().size());
    round_.times->forward_began = forward_began_;
    round_.times->forward_ended = forward_ended_;
    round_.times->began = began;
    round_.is_captured = is_capturing();
  } catch (...) {
    fall_out_of_step();  // the others begin the round, and would wait for this rank's part of it
    throw;
  }
}

// A plan is laid out when the next round begins, and not when the ranks agree on it. At that time
// most gradients are None as a rule, so nothing has to move.
void Reducer::apply_plan() {
  if (!next_plan_) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  arena_.arrange(*std::exchange(next_plan_, std::nullopt));
  policy_->adapt(arena_);
  digest_.reset();
  count_missing();
  stats_.buckets.clear();
  stats_.bucket_rounds = 0;
}

}  // namespace pydist
