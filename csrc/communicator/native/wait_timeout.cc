#include "communicator/native/wait_timeout.h"

#include <utility>

#include "base/error.h"

namespace pydist {

WaitCheck::WaitCheck(GroupHealth& health, int rank, const Deadline& deadline, LongWait& notice)
    : health_(health),
      rank_(rank),
      loss_(health.why_vain(rank)),
      is_late_(deadline.has_passed()),
      is_long_(!loss_ && !is_late_ && health.is_due(notice)) {}

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
  if (!is_late_) {
    health_.warn_of_wait(operation, why);
    return;
  }
  blame.operation = operation;
  throw Timeout(join(me, " timed out in ", operation, why.empty() ? "" : ": ", why, "."),
                std::move(blame));
}

}  // namespace pydist
