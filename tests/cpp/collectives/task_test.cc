#include "collectives/task.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

struct Scene {
  Counter a{0};
  Counter b{0};
  std::vector<std::string> log;
};

// Says when it is destroyed.
class Local {
 public:
  Local(Scene& scene, std::string name) : scene_(scene), name_(std::move(name)) {}
  Local(const Local&) = delete;
  Local& operator=(const Local&) = delete;
  ~Local() { scene_.log.push_back("~" + name_); }

 private:
  Scene& scene_;
  std::string name_;
};

Task straight(Scene& scene) {
  scene.log.push_back("ran");
  co_return;
}

Task waits(Scene& scene, std::uint64_t target) {
  const Local local(scene, "inner");
  co_await Condition(scene.a, 4, target);
  scene.log.push_back("a");
}

Task nested(Scene& scene) {
  const Local local(scene, "outer");
  co_await waits(scene, 1);
  co_await Condition(scene.b, 5, 1);
  scene.log.push_back("b");
  co_await waits(scene, 2);
}

Task fails(Scene& scene, bool waits_first) {
  const Local local(scene, "failing");
  if (waits_first) {
    co_await Condition(scene.a, 0, 1);
  }
  throw Mismatch("as planned");
}

Task catches(Scene& scene, bool waits_first) {
  try {
    co_await fails(scene, waits_first);
    scene.log.push_back("not reached");
  } catch (const Mismatch& error) {
    scene.log.push_back(error.what());
  }
  co_await Condition(scene.b, 0, 1);
  scene.log.push_back("went on");
}

Task passes_on(Scene& scene) {
  const Local local(scene, "between");
  co_await fails(scene, true);
}

using Log = std::vector<std::string>;

TEST(TaskTest, NothingRunsBeforeTheFirstResume) {
  Scene scene;
  Execution execution(straight(scene));
  EXPECT_TRUE(scene.log.empty());
  EXPECT_FALSE(execution.is_done());
  EXPECT_TRUE(execution.is_ready());
  execution.resume();
  EXPECT_TRUE(execution.is_done());
  EXPECT_EQ(scene.log, Log{"ran"});
}

TEST(TaskTest, AConditionThatHoldsDoesNotSuspend) {
  Scene scene;
  scene.a = 2;
  scene.b = 1;
  Execution execution(nested(scene));
  execution.resume();
  EXPECT_TRUE(execution.is_done());
  EXPECT_EQ(scene.log, (Log{"a", "~inner", "b", "a", "~inner", "~outer"}));
}

TEST(TaskTest, NestedTasksSuspendAndGoOnInside) {
  Scene scene;
  Execution execution(nested(scene));
  execution.resume();
  EXPECT_FALSE(execution.is_done());
  EXPECT_FALSE(execution.is_ready());
  EXPECT_EQ(execution.condition().rank(), 4);
  scene.a = 1;
  EXPECT_TRUE(execution.is_ready());
  execution.resume();
  EXPECT_EQ(scene.log, (Log{"a", "~inner"}));
  EXPECT_EQ(execution.condition().rank(), 5);
  EXPECT_FALSE(execution.is_ready());
  scene.b = 1;
  ASSERT_TRUE(execution.is_ready());
  execution.resume();
  EXPECT_FALSE(execution.is_done());
  EXPECT_EQ(execution.condition().rank(), 4);
  scene.a = 2;
  ASSERT_TRUE(execution.is_ready());
  execution.resume();
  EXPECT_TRUE(execution.is_done());
  EXPECT_EQ(scene.log, (Log{"a", "~inner", "b", "a", "~inner", "~outer"}));
}

TEST(TaskTest, ExceptionsComeOutOfResume) {
  Scene scene;
  Execution at_once(fails(scene, false));
  EXPECT_THROW(at_once.resume(), Mismatch);
  EXPECT_TRUE(at_once.is_done());
  Execution later(passes_on(scene));
  later.resume();
  scene.a = 1;
  EXPECT_THROW(later.resume(), Mismatch);
  EXPECT_TRUE(later.is_done());
  EXPECT_EQ(scene.log, (Log{"~failing", "~failing", "~between"}));
}

TEST(TaskTest, AnOuterTaskCatchesWhatAnInnerOneThrows) {
  for (const bool waits_first : {false, true}) {
    Scene scene;
    Execution execution(catches(scene, waits_first));
    execution.resume();
    if (waits_first) {
      EXPECT_TRUE(scene.log.empty());
      scene.a = 1;
      execution.resume();
    }
    EXPECT_EQ(scene.log, (Log{"~failing", "as planned"}));
    scene.b = 1;
    execution.resume();
    EXPECT_TRUE(execution.is_done());
    EXPECT_EQ(scene.log.back(), "went on");
  }
}

TEST(TaskTest, DestructionWhileSuspendedUnwindsEveryLevel) {
  Scene scene;
  {
    Execution execution(nested(scene));
    execution.resume();
    EXPECT_FALSE(execution.is_done());
  }
  EXPECT_EQ(scene.log, (Log{"~inner", "~outer"}));
}

TEST(TaskTest, DestructionBeforeTheStartRunsNothing) {
  Scene scene;
  {
    Execution execution(nested(scene));
  }
  {
    Task unused = nested(scene);
  }
  EXPECT_TRUE(scene.log.empty());
}

TEST(TaskTest, AMovedTaskIsTheSameTask) {
  Scene scene;
  Task first = straight(scene);
  Task second = std::move(first);
  Task third = waits(scene, 1);
  third = std::move(second);
  Execution execution(std::move(third));
  execution.resume();
  EXPECT_EQ(scene.log, Log{"ran"});
}

TEST(TaskTest, AnOperationOwnsItsArguments) {
  // Arguments by value live in the coroutine's own memory.
  const auto keeps = [](std::shared_ptr<int> value, Scene& scene) -> Task {
    co_await Condition(scene.a, 0, 1);
    *value = 7;
  };
  Scene scene;
  auto value = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = value;
  {
    Execution execution(keeps(std::move(value), scene));
    execution.resume();
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

Task loops(Scene& scene, int times, int& count) {
  for (int i = 0; i < times; ++i) {
    co_await straight(scene);
    scene.log.clear();
    ++count;
  }
}

Task descends(Scene& scene, int depth) {
  if (depth == 0) {
    co_await Condition(scene.a, 0, 1);
  } else {
    co_await descends(scene, depth - 1);
  }
}

TEST(TaskTest, ALongLoopOfTasksThatNeverWait) {
  // As many as a ring has segments in a buffer of gigabytes.
  Scene scene;
  int count = 0;
  Execution execution(loops(scene, 20'000, count));
  execution.resume();
  EXPECT_TRUE(execution.is_done());
  EXPECT_EQ(count, 20'000);
}

TEST(TaskTest, DeepNesting) {
  Scene scene;
  Execution execution(descends(scene, 200));
  execution.resume();
  EXPECT_FALSE(execution.is_done());
  scene.a = 1;
  execution.resume();
  EXPECT_TRUE(execution.is_done());
}

TEST(TaskTest, ManyTasksTakeTurns) {
  std::vector<std::unique_ptr<Scene>> scenes;
  std::vector<std::unique_ptr<Execution>> executions;
  for (int i = 0; i < 10; ++i) {
    scenes.push_back(std::make_unique<Scene>());
    executions.push_back(std::make_unique<Execution>(nested(*scenes.back())));
    executions.back()->resume();
  }
  for (int i = 9; i >= 0; --i) {
    auto& scene = *scenes[static_cast<std::size_t>(i)];
    scene.a = 2;
    scene.b = 1;
    for (int j = 0; j < 10; ++j) {
      auto& execution = *executions[static_cast<std::size_t>(j)];
      if (!execution.is_done() && execution.is_ready()) {
        execution.resume();
      }
      EXPECT_EQ(execution.is_done(), j >= i);
    }
  }
}

}  // namespace
}  // namespace pydist
