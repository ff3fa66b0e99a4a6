#include "communicator/native/wait_check.h"

#include <utility>

#include "base/error.h"

namespace pydist {

WaitCheck::WaitCheck(GroupHealth& health, int rank, const Deadline& deadline, LongWait& notice)
    : health_(health), rank_(rank), loss_(health.why_vain(rank)) {
  // Read once for all three questions: a spinning waiter comes here every few looks.
  const auto now = Deadline::Clock::now();
  is_late_ = deadline.has_passed(now);
  if (loss_) {
    return;
  }
  if (notice.is_time_to_ask(now)) {
    health_.refresh();
  }
  const bool looks = is_late_ || notice.is_time_to_look(now);
  is_circle_ = looks && rank >= 0 && health.leads_into_circle(health.keeper_behind(rank).rank);
  is_long_ = !is_late_ && health.is_due(notice, now);
  if (is_circle_) {
    notice.set_told();
  }
}

void WaitCheck::end_or_warn(const std::string& operation, const Where& where) {
  const std::string me = health_.who(health_.rank());
  if (loss_) {
    loss_->blame.operation = operation;
    throw PeerLost(join(loss_->what, ". ", me, " waited for it in ", operation,
                        ". The group is of no further use; save what you need and start again."),
                   std::move(loss_->blame));
  }
  std::string why;  // empty where any rank would do
  Blame blame;
  if (rank_ >= 0) {
    GroupHealth::Keeper keeper = health_.keeper_behind(rank_);
    why = keeper.way + where(keeper);
    blame = health_.blame(keeper.rank, std::move(keeper.cause));
  }
  if (is_circle_) {
    why +=
        ". So they wait for each other, in several groups: every rank must call the collectives "
        "of all its groups in the same order";
  }
  if (!is_late_) {
    health_.warn_of_wait(operation, is_long_ ? health_.long_wait() : kCircleWait, why);
    return;
  }
  blame.operation = operation;
  throw Timeout(join(me, " timed out in ", operation, why.empty() ? "" : ": ", why, "."),
                std::move(blame));
}

}  // namespace pydist
