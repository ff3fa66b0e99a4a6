// How a reducer is made, given shards or a hook, and what its ranks must have in common.

#include <c10/core/GradMode.h>

#include <atomic>
#include <exception>
#include <utility>

#include "base/digest.h"
#include "base/error.h"
#include "c10d/errors.h"
#include "reducer/operations/communicator_policy.h"
#include "reducer/operations/hook_policy.h"
#include "reducer/reducer.h"
#include "topology/hosts.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

// Reducers are made in the same order on all of their ranks.
std::atomic<std::uint64_t> next_place = 0;

constexpr std::uint64_t kFirstRound = 1;

// On one host nothing is gained from rounding.
std::optional<DType> wire_dtype_for(const Communicator& communicator,
                                    const ReducerOptions& options) {
  return communicator.capabilities().spans_hosts ? options.wire_dtype : std::nullopt;
}

// Calls collectives that the other ranks have come to, or will. Where the system keeps this rank
// from starting one (no thread is left), that ends the group: nobody can go on, or is to wait.
template <typename Function>
auto telling_all(Communicator& communicator, const Function& function) -> decltype(function()) {
  try {
    return function();
  } catch (const TransportError& error) {
    if (communicator.failure() == nullptr) {
      const Blame own = own_blame(communicator.rank(), error.what());
      communicator.abort(TransportError(
          join("rank ", own.ranks[0], " (", name_of_process(own.pid, own.host), ") of group '",
               communicator.name(), "' could not make its part of a reducer: ", error.what()),
          own));
    }
    rethrow_if_any(communicator.failure());
    throw;
  }
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(CommunicatorPtr communicator,
                                         std::vector<NamedParameter> parameters, Planner planner,
                                         std::optional<BufferExchange> buffers,
                                         ReducerOptions options) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(communicator), std::move(planner),
                                               std::move(buffers), std::move(options)));
  for (NamedParameter& parameter : parameters) {
    reducer->add(std::move(parameter));
  }
  reducer->arena_.allocate();
  reducer->admitted_ = parameters.size();
  const std::exception_ptr error = telling_all(*reducer->communicator_, [&reducer] {
    if (reducer->options_.measures_link) {
      if (const at::Tensor block = reducer->arena_.largest_block(); block.defined()) {
        reducer->speed_ = measure_link(*reducer->communicator_, block);
      }
    }
    return reducer->exchange_plan();
  });
  reducer->forget();
  rethrow_if_any(error);
  reducer->apply_plan();
  reducer->order_ = ArrivalOrder(parameters.size());
  reducer->restart();
  return reducer;
}

Reducer::Reducer(CommunicatorPtr communicator, Planner planner,
                 std::optional<BufferExchange> buffers, ReducerOptions options)
    : communicator_(std::move(communicator)),
      planner_(std::move(planner)),
      buffers_(std::move(buffers)),
      options_(std::move(options)),
      place_(next_place.fetch_add(1)),
      arena_(communicator_, /*lends=*/!options_.gradients_are_views),
      forecast_(
          arena_.slots(), arena_.lent(), options_.least_made_in_place,
          [this](const GradientSlot& slot) { return may_write(slot); }, &may_run_program),
      order_(0),
      operations_(communicator_, arena_, wire_dtype_for(*communicator_, options_)),
      policy_(std::make_unique<CommunicatorPolicy>(operations_)),
      openings_(communicator_->rank(), communicator_->size()),
      votes_(communicator_->rank(), communicator_->size()) {
  if (!options_.timeline.empty()) {
    timeline_ = Timeline::open(options_.timeline, options_.timeline_rank);
  }
}

void Reducer::add(NamedParameter parameter) {
  GradientSlot& slot =
      arena_.add(std::move(parameter.name), std::move(parameter.parameter), parameter.is_sparse);
  slot.owner = parameter.owner;
  slot.shown = std::move(parameter.shown);
  parameters_.insert(slot.parameter.unsafeGetTensorImpl());
  hooks_.push_back(make_hooks(slot));
  order_.add_slot();
  digest_.reset();
  if (!arena_.buckets().empty()) {
    slot.bucket = arena_.buckets().size() - 1;
    ++arena_.buckets().back().missing;
  }
}

std::unique_ptr<AccumulationHooks> Reducer::make_hooks(const GradientSlot& slot) {
  // The hooks live as long as the parameters; they must not keep the rest alive.
  const std::weak_ptr<Reducer> weak = weak_from_this();
  return std::make_unique<AccumulationHooks>(
      slot.parameter,
      [weak, index = slot.index](const at::Tensor& gradient) {
        const auto self = weak.lock();
        return self == nullptr ? gradient
                               : guarded_for_torch([&] { return self->arriving(index, gradient); });
      },
      [weak, index = slot.index] {
        if (const auto self = weak.lock()) {
          guarded_for_torch([&] { self->accumulated(index); });
        }
      });
}

void Reducer::shard(int owner, int stage, const std::vector<std::size_t>& slots,
                    const std::vector<at::Tensor>& shown) {
  if (!current_.expired()) {
    throw InvalidUsage("an optimizer with shards is made outside of backward");
  }
  require_shardable();
  const c10::AutoGradMode no_grad(false);
  drain();
  arena_.shard(owner, stage, slots, shown);
  communicator_->trim();
  arena_.allocate();
  const std::exception_ptr error = exchange_plan();
  forget();
  rethrow_if_any(error);
  if (!next_plan_) {
    next_plan_ = arena_.plan();  // the same buckets, in other memory
  }
  apply_plan();
}

void Reducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook, bool plans_anew) {
  if (policy_->is_of_program()) {
    throw InvalidUsage("a communication hook is registered already; there can be one only");
  }
  require_combinable(/*has_hook=*/true, arena_.shardings() != 0);
  if (round_.number != kFirstRound || !current_.expired()) {
    throw InvalidUsage("a communication hook is registered before the first backward");
  }
  if (plans_anew) {
    rounds_before_hook_keeps_plan_ = 2;
    next_plan_ = planner_(order_.expected(), arena_.blocks(), speed_);
  } else if (!next_plan_) {
    next_plan_ = arena_.plan();  // the same buckets, in other places
  }
  arena_.pack();
  apply_plan();
  policy_ = std::make_unique<HookPolicy>(std::move(hook), options_.sums ? 1 : communicator_->size(),
                                         arena_);
}

// The only place that says what excludes what. Weights, sums, joining, accumulation, unused and
// sparse parameters go with any policy.
void Reducer::require_combinable(bool has_hook, bool has_shards) const {
  const char* const other = options_.wire_dtype ? "compress="
                            : has_shards        ? "pydist.ShardedOptimizer"
                                                : nullptr;
  if (has_hook && other != nullptr) {
    throw InvalidUsage(
        join("a communication hook (or average_bucket) gets whole gradients in their own type and "
             "returns what they become, so that ",
             other, " has no say in it: use one of the two"));
  }
}

// A digest of everything in the model and the plan that must be the same on all ranks.
std::uint64_t Reducer::model_digest() {
  if (digest_) {
    return *digest_;
  }
  Digest digest;
  for (const GradientSlot& slot : arena_.slots()) {
    digest.add(slot.name);
    digest.add(static_cast<std::uint64_t>(slot.parameter.scalar_type()));
    for (const std::int64_t extent : slot.parameter.sizes()) {
      digest.add(static_cast<std::uint64_t>(extent));
    }
    for (const std::int64_t stride : slot.strides) {
      digest.add(static_cast<std::uint64_t>(stride));
    }
    digest.add(slot.is_sparse ? std::uint64_t{1} : std::uint64_t{0});
    digest.add(static_cast<std::uint64_t>(slot.owner));
  }
  for (const std::vector<std::size_t>& bucket : arena_.plan()) {
    digest.add(std::uint64_t{bucket.size()});
    for (const std::size_t slot : bucket) {
      digest.add(std::uint64_t{slot});
    }
  }
  digest_ = digest.value();
  return *digest_;
}

}  // namespace pydist
