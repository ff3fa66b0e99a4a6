#include "tuning/candidate_chooser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <vector>

namespace pydist {
namespace {

// Uses of a way of which each candidate takes a time of its own, as Tuning plans them: one ahead.
class Uses {
 public:
  explicit Uses(std::vector<double> times, double noise = 0.03, std::size_t usual = 0,
                const TuningRhythm& rhythm = {}, unsigned seed = 3)
      : times_(std::move(times)),
        noise_(noise),
        random_(seed),
        chooser_(times_.size(), usual, /*seed=*/5, rhythm),
        planned_(chooser_.next()) {}

  void one() {
    const CandidateChooser::Plan plan = planned_;
    planned_ = chooser_.next();
    double time = times_[plan.candidate];
    spent_ += time;
    ++count_;
    others_ += plan.candidate != chooser_.current() ? 1 : 0;
    std::lognormal_distribution<double> noise(0, noise_);
    time *= noise(random_);
    if (spike_ != 1 && random_() % 10 == 0) {
      time *= spike_;
    }
    if (pause_ != 0 && plan.is_timed && plan.candidate != chooser_.current()) {
      time += pause_;
      pause_ = 0;
    }
    const std::size_t before = chooser_.current();
    if (plan.is_timed && !loses_times_) {
      chooser_.note(plan.candidate, time);
    }
    changes_ += before != known_ ? 1 : 0;
    known_ = before;
  }
  void many(std::size_t uses) {
    for (std::size_t i = 0; i < uses; ++i) {
      one();
    }
  }
  // How many uses it takes until `candidate` is the current one; at most `most`.
  [[nodiscard]] std::size_t until(std::size_t candidate, std::size_t most) {
    std::size_t uses = 0;
    for (; uses < most && chooser_.current() != candidate; ++uses) {
      one();
    }
    return uses;
  }
  void set_times(std::vector<double> times) { times_ = std::move(times); }
  void set_spike(double factor) { spike_ = factor; }
  // One time of a candidate that is not the current one takes so much longer.
  void pause_once(double time) { pause_ = time; }
  [[nodiscard]] bool has_paused() const { return pause_ == 0; }
  void lose_times() { loses_times_ = true; }
  void forget_spent() {
    spent_ = 0;
    count_ = others_ = 0;
  }

  [[nodiscard]] std::size_t current() const { return chooser_.current(); }
  [[nodiscard]] const CandidateChooser& chooser() const { return chooser_; }
  [[nodiscard]] std::size_t changes() const { return changes_; }
  // Of all time since forget_spent(), what the current candidate would not have taken.
  [[nodiscard]] double lost_share() const {
    return spent_ / (static_cast<double>(count_) * times_[chooser_.current()]) - 1;
  }
  [[nodiscard]] double share_of_others() const {
    return static_cast<double>(others_) / static_cast<double>(count_);
  }

 private:
  std::vector<double> times_;
  double noise_;
  double spike_ = 1;
  double pause_ = 0;
  bool loses_times_ = false;
  std::mt19937_64 random_;
  CandidateChooser chooser_;
  CandidateChooser::Plan planned_;
  double spent_ = 0;
  std::size_t count_ = 0;
  std::size_t others_ = 0;
  std::size_t changes_ = 0;
  std::size_t known_ = 0;
};

TEST(CandidateChooserTest, FindsTheBestWithinTheFirstHundredUses) {
  for (std::size_t best = 0; best < 4; ++best) {
    std::vector<double> times = {20, 21, 22, 20.5};
    times[best] = 15;
    Uses uses(times);
    uses.many(100);
    EXPECT_EQ(uses.current(), best);
  }
}

TEST(CandidateChooserTest, KeepsTheUsualOneWhereOthersAreHardlyBetter) {
  Uses uses({20, 19.5, 19.4, 19.6}, 0.01);
  uses.many(20'000);
  EXPECT_EQ(uses.current(), 0u);
  EXPECT_GE(uses.chooser().judged(), 2u);
}

TEST(CandidateChooserTest, TriesNothingThatIsUsedRarely) {
  Uses uses({20, 10, 10, 10});
  uses.many(15);
  EXPECT_EQ(uses.share_of_others(), 0);
  EXPECT_FALSE(uses.chooser().has_begun());
}

TEST(CandidateChooserTest, FollowsAChangeOfStateWithinSomeHundredUses) {
  // The numbers of a machine that was met: in its other state, what was fast takes five times as
  // long, and another size of pieces hardly longer than before.
  Uses uses({97, 52, 60, 80});
  uses.many(3'000);
  ASSERT_EQ(uses.current(), 1u);
  uses.set_times({97, 260, 130, 80});
  EXPECT_LE(uses.until(3, 1'000), 250u);
  uses.many(200);
  // And back, soon after; the current way takes the same in both, so the next session finds it.
  uses.set_times({97, 52, 60, 80});
  EXPECT_LE(uses.until(1, 20'000), 12'000u);
}

TEST(CandidateChooserTest, FollowsAChangeAfterAPauseOfTheMachine) {
  for (const double pause_us : {1e4, 1e6}) {
    Uses uses({50, 60, 60, 60, 60, 60});
    uses.many(1'000);  // the first session is over
    uses.pause_once(pause_us);
    for (int i = 0; i < 40'000 && !uses.has_paused(); ++i) {
      uses.one();
    }
    ASSERT_TRUE(uses.has_paused());
    // As much credit as half a session costs comes back with 9,000 uses.
    uses.many(10'000);
    ASSERT_EQ(uses.current(), 0u);
    uses.set_times({150, 60, 50, 60, 60, 60});
    EXPECT_LE(uses.until(2, 200'000), 300u) << "after a pause of " << pause_us << " us";
  }
}

TEST(CandidateChooserTest, FindsWhatHasBecomeFasterByItself) {
  Uses uses({20, 30, 40, 30});
  uses.many(3'000);
  ASSERT_EQ(uses.current(), 0u);
  uses.set_times({20, 30, 10, 30});
  EXPECT_LE(uses.until(2, 20'000), 12'000u);
}

TEST(CandidateChooserTest, CostsLessThanOnePercentWhereNothingChanges) {
  for (const std::vector<double>& times :
       {std::vector<double>{20, 21}, std::vector<double>{20, 22, 21, 20.4},
        std::vector<double>{20, 40, 30, 60}, std::vector<double>{20, 100, 200, 100},
        std::vector<double>{20, 24, 28, 32, 24, 28, 32, 36}}) {
    Uses uses(times);
    uses.many(1'000);  // the first session is over
    uses.forget_spent();
    uses.many(200'000);
    EXPECT_EQ(uses.current(), 0u);
    EXPECT_LT(uses.lost_share(), 0.01);
    EXPECT_LT(uses.share_of_others(), 1.0 / 100);
    EXPECT_GT(uses.share_of_others(), 1.0 / 2000);
  }
}

TEST(CandidateChooserTest, CostsLessThanOnePercentHoweverSlowACandidateIs) {
  Uses uses({20, 1'000});
  uses.many(1'000);
  uses.forget_spent();
  uses.many(3'000'000);
  EXPECT_GE(uses.chooser().judged(), 10u);
  EXPECT_LT(uses.lost_share(), 0.01);
}

TEST(CandidateChooserTest, DoesNotFlapBetweenEquals) {
  for (const double noise : {0.05, 0.3, 1.0}) {
    Uses uses({20, 20, 20, 20}, noise);
    uses.many(300'000);
    EXPECT_GE(uses.chooser().judged(), 20u);
    EXPECT_LE(uses.changes(), 4u) << "with noise of " << noise;
    EXPECT_LT(uses.share_of_others(), 1.0 / 100);
  }
}

TEST(CandidateChooserTest, SeesThroughSpikes) {
  Uses uses({20, 20, 14, 20}, 0.1);
  uses.set_spike(20);  // every tenth
  uses.many(20'000);
  EXPECT_EQ(uses.current(), 2u);
}

TEST(CandidateChooserTest, FindsAMuchBetterOneAmidNoise) {
  int found = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    Uses uses({20, 22, 15, 20, 22, 20, 22, 20, 22, 20}, 0.25, 0, {}, seed);
    uses.many(1'000);
    found += uses.current() == 2 ? 1 : 0;
  }
  // Without a runoff it is 13.
  EXPECT_GE(found, 26);
}

TEST(CandidateChooserTest, ChangesNothingWithoutTimes) {
  Uses uses({20, 10});
  uses.lose_times();
  uses.many(20'000);
  EXPECT_EQ(uses.current(), 0u);
  EXPECT_LT(uses.share_of_others(), 1.0 / 100);
}

TEST(CandidateChooserTest, KeepsNoStepWithAProgramThatRepeatsItself) {
  // Some operations in turn, of which one takes half as long whatever the candidate.
  for (const int period : {3, 4, 5}) {
    CandidateChooser chooser(2, 0, 5, {});
    CandidateChooser::Plan planned = chooser.next();
    for (int i = 0; i < 100'000; ++i) {
      const CandidateChooser::Plan plan = planned;
      planned = chooser.next();
      if (plan.is_timed) {
        chooser.note(plan.candidate, i % period == 0 ? 20 : 40);
      }
      ASSERT_EQ(chooser.current(), 0u) << "every " << period;
    }
    EXPECT_GE(chooser.judged(), 10u);
  }
}

TEST(CandidateChooserTest, BeginsWithWhatIsKnown) {
  Uses uses({30, 20, 25}, 0.03, /*usual=*/1);
  uses.many(16);
  EXPECT_EQ(uses.current(), 1u);
  EXPECT_EQ(uses.share_of_others(), 0);
}

// Tensors that can't go the usual way, say.
TEST(CandidateChooserTest, AWayThatNoOperationGoesIsReplacedByTheBestOther) {
  CandidateChooser chooser(3, /*usual=*/0, /*seed=*/5, TuningRhythm());
  for (int use = 0; use < 200; ++use) {
    const CandidateChooser::Plan plan = chooser.next();
    if (plan.is_timed && plan.candidate != 0) {
      chooser.note(plan.candidate, plan.candidate == 1 ? 20 : 10);
    }
  }
  EXPECT_EQ(chooser.current(), 2u);
  EXPECT_FALSE(chooser.medians()[0].has_value());
  EXPECT_EQ(chooser.medians()[2], 10);
}

// Uses that went another way without a plan are paid from the same credit, but no debt lasts for
// ever.
TEST(CandidateChooserTest, WhatIsChargedPutsTheNextSessionOff) {
  CandidateChooser free(2, 0, /*seed=*/1, {});
  CandidateChooser charged(2, 0, /*seed=*/1, {});
  const auto use = [](CandidateChooser& chooser, int uses, bool is_charged) {
    for (int i = 0; i < uses; ++i) {
      if (const CandidateChooser::Plan plan = chooser.next(); plan.is_timed) {
        chooser.note(plan.candidate, plan.candidate == 0 ? 1 : 2);
      }
      if (is_charged && i % 100 == 99) {
        chooser.charge();
      }
    }
  };
  use(free, 40'000, /*is_charged=*/false);
  use(charged, 40'000, /*is_charged=*/true);
  EXPECT_GE(free.judged(), 4U);
  EXPECT_EQ(charged.judged(), 1U);
  use(charged, 20'000, /*is_charged=*/false);
  EXPECT_GT(charged.judged(), 1U);
}

}  // namespace
}  // namespace pydist
