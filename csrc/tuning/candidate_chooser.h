// Which of several ways to do the same thing is the fastest, found by the times that they take.
//
// Whoever does it again and again asks next() each time for the way to go, and tells note() how
// long that took where the plan says so. The chooser holds *sessions*: in one, all candidates take
// turns in an order drawn anew for each round, and their times are compared at its end; where those
// differ too much among themselves to tell, the best two go on. One is
// held in the beginning; one as soon as the way in use takes another time than before; and one now
// and then, since another way may have become faster without that.
//
// Note [What trying may cost]
// Trying is paid from a credit that grows by one use in kUsesForOneTry and is charged with every
// use that goes another way than the best known one: with the time lost, and at least with one use.
// So what is lost stays under 1 % of the time, however bad the worst candidate is. The time lost is
// taken from the medians of the session: one use in which the machine paused says nothing about its
// candidate, and must not use up the credit of a whole job. A session that has found a better way
// has paid for itself: what it has taken is given back.
//
// A value; not thread safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace pydist {

// When a chooser tries what. Tests take other values.
struct TuningRhythm {
  // Uses before the first session. What is used more rarely is never tried.
  std::size_t uses_before_first = 16;
  // Times of each candidate in a session.
  std::size_t rounds = 7;
  // Of the uses between sessions, one of so many is timed.
  std::size_t uses_for_one_look = 16;
  // Sessions follow each other without a pause, whatever they cost.
  bool always_tries = false;
};

class CandidateChooser {
 public:
  struct Plan {
    std::size_t candidate = 0;
    bool is_timed = false;
  };

  // Of `count` candidates, two or more; `usual` is used until another one has been found better.
  // Each time is taken from the second of two uses in a row, since the first finds in the caches
  // what another candidate has left there.
  CandidateChooser(std::size_t count, std::size_t usual, std::uint64_t seed,
                   const TuningRhythm& rhythm);

  // For the next use. A time may be noted up to one plan later.
  [[nodiscard]] Plan next();
  void note(std::size_t candidate, double time);

  // How many of the uses that follow the last plan go the current way and are not timed, and that
  // the caller has taken so many of them without next().
  [[nodiscard]] std::size_t quiet_uses() const noexcept;
  void pass(std::size_t uses) noexcept;

  // A use that has gone another way than the best one known, without having been planned.
  void charge() noexcept;

  // The best one known.
  [[nodiscard]] std::size_t current() const noexcept { return current_; }
  // Whether a session has begun: before, `usual` is only what is usual.
  [[nodiscard]] bool has_begun() const noexcept { return phase_ != Phase::kSettling; }
  // Sessions that were judged.
  [[nodiscard]] std::uint64_t judged() const noexcept { return judged_; }
  // Medians of the last session, by candidate; nothing for one that was not tried often enough.
  [[nodiscard]] const std::vector<std::optional<double>>& medians() const noexcept {
    return medians_;
  }

 private:
  enum class Phase {
    kSettling,  // before the first session
    kSession,   // trying; goes on to kEnding
    kEnding,    // one use, in which the last time of the session comes; then kSteady, or a runoff
    kSteady,    // between sessions; goes on to kSession
  };

  [[nodiscard]] bool is_due() const noexcept;  // a session
  void begin_session();
  void begin_runoff(std::size_t rival);
  void plan_round();
  void drop_hopeless();
  void charge_slow_ones();
  void judge();
  void watch(double time);
  [[nodiscard]] bool is_better(std::size_t candidate) const;
  // Of the round that ends: who leads the current one by a lot, where none does beyond doubt.
  [[nodiscard]] std::optional<std::size_t> undecided_rival() const;
  [[nodiscard]] std::size_t draw(std::size_t below) noexcept;

  const TuningRhythm rhythm_;
  const double session_cost_;  // uses of a session that go another way than the current one
  std::uint64_t random_;
  std::size_t current_;
  Phase phase_ = Phase::kSettling;
  std::uint64_t uses_ = 0;
  std::size_t uses_since_look_ = 0;
  std::uint64_t judged_ = 0;
  double credit_ = 0;
  // Of the session under way, or of the last one.
  double credit_before_ = 0;
  std::size_t round_ = 0;
  bool is_runoff_ = false;
  std::vector<Plan> script_;  // of the round, in reverse
  std::vector<bool> is_in_;   // by candidate
  std::vector<std::vector<double>> times_;
  std::vector<std::optional<double>> medians_;
  // What the current way took in the last session, and since then.
  double expected_ = 0;
  std::vector<double> seen_;
  bool has_changed_ = false;
};

}  // namespace pydist
