// Averages the gradients of a module over the ranks while backward still runs.
//
// A bucket of the arena is all-reduced, asynchronously, as soon as it and all buckets before it are
// complete; the end of backward launches what is left and waits for everything. Everything happens
// on the thread that runs backward, without the GIL; where parameters are on CUDA devices, each
// device has a thread for its hooks, and they take turns. A bucket waits, on the device, for the
// streams on which its gradients have come.
//
// Note [A backward, not a forward]
// A synchronisation belongs to one outermost backward. A hook on the outputs of forward announces
// it, because such a hook runs in the outermost graph task, also where all parameters get their
// gradients in reentrant ones (activation checkpointing). The engine's end-of-backward callback is
// queued there; it owns the Backward object, so that object dies without having been finished
// exactly when a backward has thrown. Where nothing announced it (the outputs of forward were in an
// object that nobody can look into), the first parameter does; a nested graph task may then be
// synchronised before the outer one, and what comes later goes in a second round. That costs time
// and changes nothing: averaging what is already the same on all ranks leaves it as it is.
//
// Note [Whether it averages]
// As in torch's DDP, that is decided in forward, where its outputs are watched: a backward that
// comes from any output of an averaging forward averages, and one that comes from outputs of others
// alone accumulates. A backward that nothing announced averages if any forward since the last
// averaged backward wanted that; where there was no forward (the loss came from the module itself,
// past the wrapper) it accumulates.
//
// Note [Rounds]
// What one synchronisation does, on every rank in the same order:
//   1. an opening: who is present, each rank's share in the average, digests of model and plan, and
//      of buffers that the program changed;
//   2. every bucket, in the order of the plan, with zeros where this rank has nothing. So ranks
//      that use different parameters never wait for each other;
//   3. a closing: whether backward threw anywhere, who used which parameter, and what else there is
//      to do. All of it is decided here, from all ranks' words, never from a rank's own;
//   4. that, if any: gradients that came after their bucket was sent, sparse ones (a hook of the
//      program gets them before 3, which tells whether it has raised), buffers, memory for new
//      parameters, a new plan.
// A parameter that no rank used keeps the gradient that it had. A backward that throws on one rank
// ends on all of them with an error after step 3.
//
// Note [Votes]
// Before an optimizer with shards changes anything, the ranks vote, by an all_gather of the same
// form as an opening. So a rank that votes and one that opens a round hear each other, wherever the
// program has gone apart: whoever voted then sends what the round needs, and tells that it is worth
// nothing. Nobody waits, all ranks raise, and their groups go on. Where a round was begun within
// the step, by its closure or a hook, that raises there, and its rank comes to the next vote. A
// rank that leaves join() by an exception does the same once.
//
// Note [Capture]
// A backward may be captured into a CUDA graph. Then its buckets are captured too, while the words
// of the round go between the hosts as ever; a replay repeats the buckets alone. So what words
// decide must come out as the graph will repeat it: every parameter used on every rank, no weights,
// no buffers to exchange, nothing late or sparse. Anything else raises, on all ranks. The graph
// holds the addresses of gradients, so the plan stays as it is from then on. Where only some ranks
// capture, the others' buckets wait on the device for what is not under way, so the group ends.
//
// Note [Held rounds]
// A backward may hold its round: it launches what can leave without waiting, and returns. The
// program does something more urgent, such as to send what the next rank of a pipeline waits for,
// and then calls conclude_held(), which closes and concludes the round as the end of backward does
// otherwise. synchronize() and the end of join() do so first. Where the program begins anything
// else with the reducer instead, but for a forward without gradients, the round is lost. The other
// ranks raise as after a backward that threw, and conclude_held() raises here, until a backward
// averages. Where the program knows that an exception came between, it calls give_up_held().
//
// Note [Set aside]
// The mean of gradients that all ranks share is what it was, so averaging what was averaged already
// does no harm, and gradients may be added on top. Not so for sums, or where ranks count by share
// or have joined, or have shards of it: then what was averaged is set aside while new gradients
// come, and added to their sum. A gradient that somebody has put into `parameter.grad` is this
// rank's own, and so a part of the sum.

#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bucketing/arrival_order.h"
#include "c10d/sparse/sparse_all_reduce.h"
#include "communicator/communicator.h"
#include "reducer/autograd_hooks.h"
#include "reducer/gradients/gradient_arena.h"
#include "reducer/gradients/gradient_forecast.h"
#include "reducer/gradients/weights.h"
#include "reducer/link_speed.h"
#include "reducer/operations/bucket_policy.h"
#include "reducer/operations/operations_under_way.h"
#include "reducer/reducer_options.h"
#include "reducer/round_times.h"
#include "reducer/round_words.h"
#include "reducer/timeline.h"

namespace c10d {
class CommHookInterface;
}

namespace pydist {

// Copies one rank's buffers to the others at the end of a round in which any rank changed its own.
struct BufferExchange {
  at::Tensor memory;                  // of bytes: the buffers as they were last exchanged
  std::function<bool()> has_changed;  // whether the buffers differ from `memory`
  std::function<void()> pack;         // on the rank they come from: writes them into `memory`
  std::function<void()> unpack;       // on the others: takes them over
  // Collective, after the module has changed: returns new `memory`, for its present buffers.
  std::function<at::Tensor()> renew;
};

// Makes a plan for slots that lie in the given blocks; called on rank 0 alone. The speed is zero
// where it was not measured.
using Planner = std::function<BucketPlan(const ArrivalOrder::Expected& expected,
                                         const std::vector<std::size_t>& blocks, LinkSpeed speed)>;

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
  bool is_sparse;
  // Of its shards; 0: it has none. And what stands for its gradient then.
  int owner = 0;
  at::Tensor shown;
};

// Serves one backward at a time, like the gradients themselves.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Collective: the same parameters on every rank, in the same order.
  [[nodiscard]] static std::shared_ptr<Reducer> create(CommunicatorPtr communicator,
                                                       std::vector<NamedParameter> parameters,
                                                       Planner planner,
                                                       std::optional<BufferExchange> buffers,
                                                       ReducerOptions options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Outside of backward: waits until autograd has let go of a backward that has thrown.
  void await_thrown();

  // Whether the last backward came from a forward that averages, and accumulated nothing, as that
  // of torch.autograd.grad: so there was no round.
  [[nodiscard]] bool has_left_out_average() const noexcept { return has_left_out_average_; }

  // After a forward whose outputs may go backward; see Note [Whether it averages].
  void note_forward() noexcept {
    a_forward_averages_ = is_enabled_ || a_forward_averages_.value_or(false);
  }

  // Before a forward: waits for what a backward that threw has left under way, and throws
  // InvalidUsage where a parameter has changed its type. Ranks that run different numbers of
  // forwards `is_for_training` between two rounds are warned of once.
  void prepare_forward(bool is_for_training);

  // A schedule chooses in which order the backwards of several forwards come. Nobody is warned of
  // one under no_sync() that comes before that of an earlier forward.
  void expect_any_order() noexcept { has_warned_of_forward_ = true; }

  // Announces the backward that will start from an output of forward; see
  // Note [A backward, not a forward] and Note [Whether it averages]. Tensors that are not part of a
  // graph are left alone.
  void watch(const at::Tensor& output);

  // A parameter that was unfrozen or joined the model. Its gradients are averaged from the next
  // backward on; it gets its place in a bucket after that.
  void add(NamedParameter parameter);

  // Collective: the optimizer `owner` updates shards of the parameters in `slots`. From then on
  // each rank gets the average of its own shard of their gradients alone; see gradient_shard.h. The
  // parameters have no gradient when this is called, and belong to no other optimizer. After a
  // backward, the tensors of `shown` stand for their gradients. In stage 2 the other ranks' shards
  // are not kept. A parameter that joins the model later may name its owner in add().
  void shard(int owner, int stage, const std::vector<std::size_t>& slots,
             const std::vector<at::Tensor>& shown);

  // Called around each launch of a bucket of the optimizer `owner`, on the launching thread and its
  // streams: before it without a work, after it with the one that fills the shard. Not in rounds
  // that are given up or captured.
  using Watcher = std::function<void(const GradientBucket& bucket, const WorkPtr& work)>;
  void watch_shards(int owner, Watcher watcher) { watchers_[owner] = std::move(watcher); }

  // From here on, this rank is in step() of the optimizer `owner`; 0: in none.
  void set_stepping(int owner) noexcept { stepping_ = owner; }
  // What the ranks said before a step. The same on all ranks.
  struct Vote {
    std::vector<int> refused;        // the ranks that can't step
    std::vector<int> went_backward;  // the ranks that opened a round instead, which has failed
    bool all_in_step = true;         // of the same optimizer, those in `went_backward` included
    bool options_agree = true;       // of those that can step
  };
  // Collective: whether all ranks can step, with the same options; see Note [Votes].
  [[nodiscard]] Vote vote(bool refuses, std::uint64_t options);

  // Called before a forward if the program has changed buffers since the last round. `first` is the
  // number of the first such buffer, from 1. The next round compares the ranks' digests. Several
  // calls between two rounds count together.
  void note_changed_buffers(std::size_t first, std::uint64_t digest);
  // The number, from 1, of the first buffer that the ranks had changed differently when the present
  // round began; 0 if there is none. Once the round is closed, all ranks give the same answer.
  [[nodiscard]] std::size_t first_differing_buffer() const {
    return openings_.first_differing_buffer();
  }

  // Lets `hook` combine the buckets instead of the communicator; see hook_policy.h. Gradients that
  // do not travel in buckets still go through the communicator. Called at most once, before the
  // first backward. With a hook, buckets follow the order of the first backward and are never
  // planned again, because a hook may keep state for each of them.
  // `plans_anew`: the planner is asked now, on every rank, and has the same plan for all; then on
  // rank 0 after each of the first two backwards.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook, bool plans_anew);
  // Throws InvalidUsage where no optimizer can have shards of the average.
  void require_shardable() const { require_combinable(policy_->is_of_program(), true); }

  // Whether backwards from forwards that end from now on are synchronised, or accumulate only.
  void set_enabled(bool enabled) noexcept { is_enabled_ = enabled; }
  [[nodiscard]] bool is_enabled() const noexcept { return is_enabled_; }

  // The weight of backwards that begin from now on; without a weight, each rank counts as one.
  void set_weight(std::optional<Weight> weight) noexcept { weight_ = std::move(weight); }
  [[nodiscard]] const std::optional<Weight>& weight() const noexcept { return weight_; }
  // Where weights stay, see Note [Weights on the device]; none: the host reads them.
  [[nodiscard]] std::optional<Device> device_of_weights() const;
  // Whether the current stream is captured into a CUDA graph.
  [[nodiscard]] bool is_capturing() const;

  // Whether rounds are held of backwards that end from now on; see Note [Held rounds].
  void set_holding(bool holding) noexcept { is_holding_ = holding; }
  [[nodiscard]] bool is_holding() const noexcept { return is_holding_; }
  [[nodiscard]] bool is_held() const noexcept { return is_held_; }
  // Collective, outside of backward: concludes the round that is held, if one is. Throws
  // InvalidUsage where it was lost.
  void conclude_held();
  // The program does not want the round any more that is held, if one is.
  void give_up_held() noexcept;
  // Why a round that was held is lost, from then on until a backward averages; empty: none is.
  [[nodiscard]] const std::string& why_lost() const noexcept { return why_lost_; }

  // Collective: averages what has not been yet, outside of backward: gradients that were
  // accumulated only, and those that somebody put into `parameter.grad`. Before that, it concludes
  // the round that is held, if one is.
  // `require` throws where this rank cannot take part; the others learn that.
  void synchronize(const std::function<void()>& require);

  // What happens when ranks have different numbers of batches: nothing special, or ranks without a
  // batch take part in the others' rounds, either as zeros or without counting.
  enum class Joining { kNot, kAsZeros, kNotAtAll };
  void set_joining(Joining joining, bool throws_on_first) noexcept;

  // For a rank without a batch: takes part in a round of the others. Returns whether any rank still
  // has batches.
  bool join_round();

  // For a rank that leaves join() because of an exception: tells the other ranks, in a round of
  // theirs or when they leave as well.
  void leave_join() noexcept;

  // Ends this reducer for good, on this rank alone, because another reducer averages some of its
  // parameters from now on. Gives up what is under way, and removes the hooks. A graph of an
  // earlier forward may still keep this object: a backward from it throws InvalidUsage with
  // `reason`, because nobody would average the parameters that the other reducer does not have.
  // Afterwards nothing may be called but the destructor and what that graph calls.
  void retire(std::string reason);

  // Grows with every round; the same on all ranks.
  [[nodiscard]] std::uint64_t round() const noexcept { return round_.number; }
  // How many rounds have come to their end, where nobody raised.
  [[nodiscard]] std::uint64_t rounds_concluded() const noexcept { return rounds_concluded_; }

  // Whether it averages a parameter's gradients. Only for the thread that adds parameters.
  [[nodiscard]] bool averages(const at::Tensor& parameter) const {
    return parameters_.contains(parameter.unsafeGetTensorImpl());
  }

  // Whether a backward that synchronises is under way.
  [[nodiscard]] bool is_in_backward() const;

  // Whether a parameter holds a gradient that was accumulated and not averaged.
  [[nodiscard]] bool has_pending() const;
  [[nodiscard]] std::vector<at::Tensor> pending() const;
  // The same, but for gradients that were set to zero, which it does not read; on any thread.
  [[nodiscard]] std::vector<at::Tensor> accumulated() const;
  // Whether a backward since the last round came from no forward of this model, so accumulated.
  [[nodiscard]] bool has_bypassed() const noexcept { return has_bypassed_; }

  [[nodiscard]] const GradientArena& arena() const noexcept { return arena_; }
  [[nodiscard]] const ReducerStats& stats() const noexcept { return stats_; }
  void reset_stats() noexcept { stats_ = {}; }

 private:
  static constexpr const char* kHooksOutOfStep =
      "a communication hook raised, so the hooks of the ranks are out of step: start again";

  class Backward;
  // The state of one round, which is reset when the next one begins.
  struct Round {
    std::uint64_t number = 0;
    std::size_t launched = 0;  // buckets
    std::size_t fired = 0;     // parameters
    bool is_bare = false;      // without gradients: all parameters are frozen at the time
    bool is_closed = false;
    bool is_captured = false;         // into a CUDA graph, on this rank
    bool has_waited_in_vain = false;  // for memory
    WorkPtr opening;
    std::optional<Combination> combination;  // once it is known
    std::shared_ptr<RoundTimes> times;
    double launching_s = 0.0;
    // Of all sparse gradients, what a hook of the program makes the results of.
    std::vector<at::Tensor> handed_over;
  };

  Reducer(CommunicatorPtr communicator, Planner planner, std::optional<BufferExchange> buffers,
          ReducerOptions options);
  [[nodiscard]] std::unique_ptr<AccumulationHooks> make_hooks(const GradientSlot& slot);
  [[nodiscard]] std::uint64_t model_digest();

  // -- what the hooks call
  std::shared_ptr<Backward> require_backward();
  void announce(bool averages, bool runs_on_cpu);
  [[nodiscard]] at::Tensor arriving(std::size_t index, const at::Tensor& gradient);
  [[nodiscard]] bool take_memory(const Backward& backward, const GradientBucket& bucket);
  void accumulated(std::size_t index);
  [[nodiscard]] bool finish(Backward& backward);
  void abandon(Backward& backward) noexcept;
  void note_stream(const GradientSlot& slot);
  void note_complete(const GradientSlot& slot);
  void end_landings();

  // -- beginning
  std::shared_ptr<Backward> begin(bool averages, bool accumulates, bool runs_on_cpu);
  void enter(Backward& backward);
  [[nodiscard]] Factor count_weight(const Backward& backward);
  void let_average(Backward& backward);
  [[nodiscard]] bool begins_round(const Backward& backward) const;
  [[nodiscard]] bool is_frozen() const;
  [[nodiscard]] bool is_late(const GradientSlot& slot) const;
  [[nodiscard]] bool may_write(const GradientSlot& slot) const;
  [[nodiscard]] bool adds_up() const;
  [[nodiscard]] std::optional<std::size_t> forget_weights_of_nothing();
  void take_over_by_hand(GradientSlot& slot);
  void prepare_round(Instant began);
  void apply_plan();
  void count_missing();
  void forget_pending();
  void drain();
  void restart();

  // -- a round; see Note [Rounds]
  void open_round();
  void say(Opening::Purpose purpose, std::uint64_t options);
  [[nodiscard]] bool may_launch();
  void decide_combination();
  [[nodiscard]] Combination combination_on_device();
  void launch(Closing::Status status);
  [[nodiscard]] bool has_memory(std::size_t bucket);
  [[nodiscard]] bool keeps_averages() const;
  void fill(GradientSlot& slot);
  void launch_what_is_ready();
  void launch_what_has_memory();
  void launch_rest(Closing::Status status);
  void fill_unplaced();
  void hand_over_sparse(Closing::Status status);
  [[nodiscard]] at::Tensor sparse_to_send(const GradientSlot& slot) const;
  void close_round(Closing::Status status);
  void require_same_model();
  void open_or_give_up();
  void close_or_give_up();
  void conclude_round(bool learns);
  void run_round();
  void give_up(Closing::Status status = Closing::Status::kThrew) noexcept;
  void lose_held(const char* to);
  void fall_out_of_step();
  void break_off();
  void wait();
  void finish_buckets();
  [[nodiscard]] bool has_hook_thrown() const;
  void warn_of_skipped_steps();
  void warn_of_earlier_forward();
  void warn_of_averages_kept();
  void warn_of_buffers_root(int root);
  [[nodiscard]] ErrorDescription why_worthless() const;
  // See Note [Capture].
  void note_capture();
  [[nodiscard]] bool is_captured_by_some() const;
  [[nodiscard]] std::string why_not_captured() const;
  void let_all_hear() noexcept;
  void do_the_rest();
  void send_late();
  [[nodiscard]] std::optional<SparseSums> send_sparse();
  void settle(bool learns);
  void admit_new();
  void exchange_buffers(int root);
  [[nodiscard]] std::exception_ptr exchange_plan();
  [[nodiscard]] std::exception_ptr compare_gradients();
  void finish_times();

  void require_combinable(bool has_hook, bool has_shards) const;

  // -- what is under way
  [[nodiscard]] bool is_idle() const;
  void forget();
  void orphan();
  void beside_program(const std::function<void()>& function);

  const CommunicatorPtr communicator_;
  const Planner planner_;
  std::optional<BufferExchange> buffers_;
  const ReducerOptions options_;
  const std::uint64_t place_;  // among all reducers
  std::shared_ptr<Timeline> timeline_;
  GradientArena arena_;
  GradientForecast forecast_;
  ArrivalOrder order_;
  LinkSpeed speed_;
  std::vector<std::unique_ptr<AccumulationHooks>> hooks_;  // by slot
  std::unordered_set<const c10::TensorImpl*> parameters_;  // of the slots, which keep them
  OperationsUnderWay operations_;
  std::unique_ptr<BucketPolicy> policy_;
  std::map<int, Watcher> watchers_;      // by owner
  std::optional<BucketPlan> next_plan_;  // agreed, for the next round
  std::uint64_t rounds_concluded_ = 0;
  int rounds_learned_ = 0;  // of whose backwards the order is known
  int rounds_before_hook_keeps_plan_ = 1;
  // In the last backward, no parameter was used on some ranks and unused on others.
  bool all_use_alike_ = true;
  bool ends_alone_ = true;               // no backward ever came through another reducer as well
  bool is_plan_fixed_ = false;           // by a graph that holds addresses
  std::optional<std::uint64_t> digest_;  // of the parameters and the plan, once computed
  std::size_t admitted_ = 0;             // slots that were there at construction or agreed on since

  bool program_goes_on_ = false;  // see Note [Beside the program]
  bool is_enabled_ = true;
  // Whether a forward since the last averaged backward asked for averaging; empty: there was none.
  std::optional<bool> a_forward_averages_;
  bool has_bypassed_ = false;
  bool has_left_out_average_ = false;
  std::optional<Weight> weight_;
  bool is_holding_ = false;
  bool is_held_ = false;
  std::string why_lost_;
  Joining joining_ = Joining::kNot;
  bool throws_on_first_ = false;
  bool is_present_ = true;

  // How many backwards are not over. When a backward on GPUs throws, the exception may reach the
  // caller before autograd's thread has released the backward.
  std::mutex open_mutex_;
  std::condition_variable open_changed_;
  int open_backwards_ = 0;  // guarded by open_mutex_

  // Held by the hooks, which run on a thread for each device.
  mutable std::recursive_mutex turn_;
  std::weak_ptr<Backward> current_;
  Weights weights_;
  Round round_;
  Openings openings_;
  Openings votes_;  // what was said last that was no round
  std::optional<Closings> closings_;
  Instant forward_began_ = 0;
  std::uint64_t first_node_of_forward_ = 0;
  Instant forward_ended_ = 0;

  std::size_t forwards_ = 0;  // since the last round
  bool has_warned_ = false;
  int root_outside_join_ = 0;  // whose buffers all ranks take over
  bool has_warned_of_forward_ = false;
  bool has_warned_of_averages_ = false;
  std::optional<int> buffers_root_;  // whose buffers all ranks took over last; see set_joining()
  bool has_warned_of_root_ = false;
  int stepping_ = 0;                      // see Opening::stepping
  std::uint64_t joined_before_ = 0;       // the first round since join() began
  std::uint64_t changed_buffers_ = 0;     // a digest; 0: none changed since the last round
  std::size_t first_changed_buffer_ = 0;  // by number from 1
  std::string out_of_step_;               // why nothing more can be averaged
  std::string retired_;                   // why it is; empty: it is not
  ReducerStats stats_;
};

}  // namespace pydist
