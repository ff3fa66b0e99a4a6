"""What ranks tell each other in the backward of a loss over the whole batch.

Note [Weights of a whole batch]
Inside `weighted()`, DataParallel leaves the sum of w_r g_r over the ranks, divided by the sum of
the weights w_r. A loss over the rows of all ranks is the same on each of them, and counts rows by
itself, so there is nothing for weights to make up for; where they differ, they would spoil it: a
rank's rows would count by its weight once more. Equal weights, as micro-batches of different size
have when their gradients are accumulated, leave the gradient of the loss. So weights have to be
equal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydist.errors import InvalidUsage, Mismatch
from pydist.job.outcome import exchange
from pydist.job.rank_names import first_that_differs, who_said_what
from pydist.parallel.ownership import newest_first
from pydist.parallel.wrapper_parts.uneven_inputs import is_joining

if TYPE_CHECKING:
    from pydist._native import Communicator


def refuse_join(call: str) -> None:
    """Raises InvalidUsage inside `join()`, where ranks without batches would be missing.

    Args:
        call: The public function's name.
    """
    if is_joining():
        raise InvalidUsage(
            f"pydist.nn.{call} needs all ranks, and join() leaves out those that have no more "
            "batches: give every rank as many batches, without rows where it has none left."
        )


def tell(communicator: Communicator, call: str, values: list[float]) -> list[list[float]]:
    """Some numbers of each rank, in rank order. All ranks call it, in backward.

    Args:
        communicator: The ranks.
        call: The public function's name.
        values: This rank's numbers.

    Raises:
        Mismatch: The ranks have given this backward different weights, on all of them alike.
    """
    weights = [each.weight_of_backward for each in reversed(newest_first())]
    mine = {"values": values, "weights": [float(each) for each in weights if each is not None]}
    label = f"backward of pydist.nn.{call}"
    told = [json.loads(each) for each in exchange(communicator, json.dumps(mine).encode(), label)]
    said = [", ".join(map(str, each["weights"])) or "none" for each in told]
    other = first_that_differs(said)
    if other is not None:
        raise Mismatch(
            f"pydist.nn.{call} is a loss over the rows of all ranks, in which each row counts once "
            f"already, and weighted() has given this backward the weights {who_said_what(said)}: "
            "leave weighted() out, or give all ranks the same weight.",
            ranks=(0, other),
        )
    return [each["values"] for each in told]
