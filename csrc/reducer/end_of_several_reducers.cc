#include "reducer/end_of_several_reducers.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "c10d/errors.h"
#include "reducer/autograd_hooks.h"

namespace pydist {
namespace {

class BackwardEnd {
 public:
  explicit BackwardEnd(int graph_task) : graph_task_(graph_task) {}

  [[nodiscard]] int graph_task() const noexcept { return graph_task_; }

  void add(std::shared_ptr<EndingBackward> ending) { endings_.push_back(std::move(ending)); }

  // Every one of them concludes, also after another has thrown; the peers do the same.
  void run() {
    std::vector<std::shared_ptr<EndingBackward>> endings = std::exchange(endings_, {});
    std::sort(endings.begin(), endings.end(),
              [](const auto& a, const auto& b) { return a->place() < b->place(); });
    for (const auto& ending : endings) {
      ending->close();
    }
    std::exception_ptr error;
    for (const auto& ending : endings) {
      try {
        ending->conclude(endings.size() == 1);
      } catch (...) {
        error = error != nullptr ? error : std::current_exception();
      }
    }
    rethrow_if_any(error);
  }

 private:
  const int graph_task_;
  std::vector<std::shared_ptr<EndingBackward>> endings_;
};

// Owned by the engine's callback alone, so it goes with a backward that throws.
thread_local std::weak_ptr<BackwardEnd> current_end;

}  // namespace

void end_together(std::shared_ptr<EndingBackward> ending) {
  std::shared_ptr<BackwardEnd> end = current_end.lock();
  // A callback may itself go backward.
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (end == nullptr || end->graph_task() != graph_task) {
    end = std::make_shared<BackwardEnd>(graph_task);
    current_end = end;
    // Autograd also calls callbacks that are queued while it calls the others.
    at_end_of_backward([end] {
      current_end.reset();
      guarded_for_torch([&] { end->run(); });
    });
  }
  end->add(std::move(ending));
}

}  // namespace pydist
