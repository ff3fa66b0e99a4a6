#include "reducer/gradients/gradient_forecast.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/fork.h"
#include "c10d/cpu_allocator.h"

namespace pydist {
namespace {

// Torch's own allocator aligns blocks so, and kernels rely on it.
constexpr std::uintptr_t kAlignment = 64;
constexpr std::size_t kMostAgreeing = 1024;

}  // namespace

// The forecast's ears on the thread of one backward, which may find out later that it is over.
class GradientForecast::Listener final : public BlockSource {
 public:
  explicit Listener(GradientForecast& forecast) : forecast_(forecast) {}

  void end() noexcept { is_over_ = true; }
  // A child that was forked amid the backward must not write where its parent does.
  [[nodiscard]] bool is_over() const noexcept override { return is_over_ || birth_.is_inherited(); }
  [[nodiscard]] c10::intrusive_ptr<c10::StorageImpl> offer(std::size_t bytes) override {
    return forecast_.offer(bytes);
  }
  void note(std::size_t bytes, const void* block) override { forecast_.note(bytes, block); }

 private:
  GradientForecast& forecast_;
  const Birth birth_;
  std::atomic<bool> is_over_{false};
};

GradientForecast::GradientForecast(std::vector<GradientSlot>& slots, LentMemory& lent,
                                   std::size_t least_bytes,
                                   std::function<bool(const GradientSlot&)> may_write,
                                   std::function<bool()> may_run_program)
    : slots_(slots),
      lent_(lent),
      least_bytes_(std::max<std::size_t>(least_bytes, 1)),
      may_write_(std::move(may_write)),
      may_run_program_(std::move(may_run_program)) {}

GradientForecast::~GradientForecast() { end(); }

bool GradientForecast::is_foreseeable(const GradientSlot& slot) const {
  return slot.home.defined() && slot.home.is_cpu() && slot.home.nbytes() >= least_bytes_;
}

// Whether there is anything to foresee, and torch's allocator can be replaced.
bool GradientForecast::is_possible() {
  if (!is_installed_ && std::any_of(slots_.begin(), slots_.end(),
                                    [this](const auto& slot) { return is_foreseeable(slot); })) {
    is_installed_ = CpuAllocator::get().install().empty();
  }
  return is_installed_.value_or(false);
}

void GradientForecast::begin() {
  end();
  if (!is_possible()) {
    return;
  }
  histories_.resize(slots_.size());
  blocks_.clear();
  for (const GradientSlot& slot : slots_) {
    History& history = histories_[slot.index];
    history.came_as.reset();
    history.was_offered = history.was_made_in_place = false;
    if (is_foreseeable(slot)) {
      Blocks& blocks = blocks_[slot.home.nbytes()];
      if (history.agreeing >= history.needed) {
        blocks.slots[history.number] = slot.index;
      }
    }
  }
  listener_ = std::make_shared<Listener>(*this);
  CpuAllocator::ask(listener_);
}

void GradientForecast::end() noexcept {
  if (listener_ == nullptr) {
    return;
  }
  listener_->end();
  listener_.reset();
  for (History& history : histories_) {
    learn(history);
  }
}

void GradientForecast::learn(History& history) {
  if (history.was_offered && !history.was_made_in_place) {
    history.needed = std::min(2 * history.needed, kMostAgreeing);
    history.agreeing = 0;
  }
  if (!history.came_as) {
    return;  // it had a gradient already, or none came
  }
  history.agreeing = history.number == *history.came_as ? history.agreeing + 1 : 1;
  history.number = *history.came_as;
}

// Not where gradients are differentiated again: there autograd keeps them. And not in what the
// program does within backward: it may keep what it makes, and it need not repeat itself.
bool GradientForecast::looks() const { return !c10::GradMode::is_enabled() && !may_run_program_(); }

c10::intrusive_ptr<c10::StorageImpl> GradientForecast::offer(std::size_t bytes) {
  const auto blocks = blocks_.find(bytes);
  if (blocks == blocks_.end() || !looks()) {
    return {};
  }
  const auto foreseen = blocks->second.slots.find(blocks->second.places.size());
  if (foreseen == blocks->second.slots.end()) {
    return {};
  }
  GradientSlot& slot = slots_[foreseen->second];
  const bool is_undefined = !slot.parameter.grad().defined() && slot.landing == 0;
  if (!is_undefined || !lent_.has_free_home(slot) || !may_write_(slot) ||
      reinterpret_cast<std::uintptr_t>(slot.home.const_data_ptr()) % kAlignment != 0) {
    return {};
  }
  histories_[slot.index].was_offered = true;
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      slot.home.storage().unsafeGetStorageImpl());
}

void GradientForecast::note(std::size_t bytes, const void* block) {
  if (const auto blocks = blocks_.find(bytes); blocks != blocks_.end() && looks()) {
    blocks->second.places.push_back(block);
  }
}

bool GradientForecast::arrives_in_place(GradientSlot& slot, const at::Tensor& gradient) {
  if (listener_ == nullptr || slot.index >= histories_.size() || !is_foreseeable(slot) ||
      !gradient.has_storage() || gradient.nbytes() != slot.home.nbytes() ||
      gradient.strides() != slot.home.strides()) {
    return false;
  }
  const auto blocks = blocks_.find(slot.home.nbytes());
  if (blocks == blocks_.end()) {
    return false;
  }
  // The last one there: a block may have been freed and given out again.
  const std::vector<const void*>& places = blocks->second.places;
  const auto found = std::find(places.rbegin(), places.rend(), gradient.const_data_ptr());
  if (found == places.rend()) {
    return false;
  }
  History& history = histories_[slot.index];
  history.came_as = static_cast<std::size_t>(places.rend() - found) - 1;
  history.was_made_in_place = history.was_offered && lent_.is_made_at_home(slot, gradient);
  return history.was_made_in_place;
}

}  // namespace pydist
