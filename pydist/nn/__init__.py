"""Collectives with a gradient, and losses over the outputs of all ranks.

What holds for all of them:

- Every rank of the group calls them, in the same order; `send` and `recv` match by (peer, tag)
  instead. Ranks compare first what they call, so that those that disagree raise `Mismatch`.
- If any rank's input requires a gradient, every rank's output does, and every rank runs backward
  through it, in the same order, also one whose own input requires none. A rank that leaves it out
  keeps the others waiting until the group's time-out, and their `Timeout` names it.
- The gradient of a rank's input is that of the sum of all ranks' losses. `pydist.DataParallel`
  divides by the number of ranks. So what remains is the gradient of the mean of their losses: of
  the loss itself, where all ranks compute the same. There is no factor to remember.
- They leave their input as it is, take any strides, and return new memory.
- They can be differentiated again, but for `send`, `recv` and `contrastive_loss`, which say so.
- `torch.compile` leaves them out: it cuts the graph before and after, and compiles the rest. With
  `fullgraph=True` it refuses, because what they return depends on other ranks.
- `group` is as in `pydist.all_reduce`; each operation may take as long as the group's time-out.

Note [Compiled graphs]
An operator that the compiler knew could be dropped, moved or computed again in backward, on one
rank and not on another, whose shapes have led to another graph. Ranks would then call different
collectives.
"""

from pydist.nn.blocks import all_gather, all_to_all, broadcast, gather, scatter
from pydist.nn.contrastive import contrastive_loss
from pydist.nn.gathered_outputs import whole_batch
from pydist.nn.messages import recv, send
from pydist.nn.reductions import all_reduce, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "contrastive_loss",
    "gather",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
    "whole_batch",
]
