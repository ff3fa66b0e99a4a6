"""Going on in mid-epoch, on any number of ranks: the state of a sampler, and what fits it.

A state is a position in the order of an epoch, up to which all ranks together have trained. Neither
the order nor the position knows of ranks. Those that go on share out what is left
(`pydist.sampling.rank_shares`), however many they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from pydist.errors import InvalidUsage
from pydist.sampling.order import Order, Sequential, Shuffled, name_digest

_VERSION = 1
_KEYS = ("version", "length", "order", "seed", "epoch", "position", "batch")


def state_at(
    order: Order, *, seed: int | None, epoch: int, position: int, batch: int
) -> dict[str, int | None]:
    """The state of whoever is at a position of an epoch, in batches of so many samples."""
    return {
        "version": _VERSION,
        "length": len(order),
        "order": name_digest(order),
        "seed": seed,
        "epoch": epoch,
        "position": position,
        "batch": batch,
    }


def read_state(state: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of a state, checked for what can be without a sampler; the seed if it has one."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise InvalidUsage(
            f"this is no state of a sampler of pydist's: expected a dict with {', '.join(_KEYS)}; "
            f"got {state!r:.100}."
        )
    if state["version"] != _VERSION:
        raise InvalidUsage(
            f"the state is of version {state['version']}, and this pydist reads {_VERSION}: load "
            "it with the pydist that made it."
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise InvalidUsage(f"the sampler's state has no {', '.join(missing)}.")
    length = whole_number("length", state["length"], 1, 2**63)
    seed = {}
    if state["seed"] is not None:
        seed["seed"] = whole_number("seed", state["seed"], -(2**63), 2**64)
    return {
        **seed,
        "length": length,
        "order": whole_number("order", state["order"], 0, 2**32),
        "epoch": whole_number("epoch", state["epoch"], 0, 2**63),
        "position": whole_number("position", state["position"], 0, length + 1),
        "batch": whole_number("batch", state["batch"], 0, 2**63),
    }


def require_same_order(values: Mapping[str, int], order: Order) -> None:
    """Raises InvalidUsage where a state, as `read_state` gives it, is not one of this order."""
    if values["length"] != len(order):
        raise InvalidUsage(
            f"the state is of an epoch of {values['length']} samples, and this one has "
            f"{len(order)}: positions in one mean nothing in the other. Give the data set "
            "that the state was made with, or begin an epoch anew (set_epoch)."
        )
    if values["order"] != name_digest(order):
        raise InvalidUsage(
            f"the state is of another order of samples than '{order.name}'"
            f"{_hint_at_shuffle(values['order'])}: make the sampler with the same shuffle= and "
            "order=, or begin an epoch anew (set_epoch)."
        )


def require_same_batch(of_state: int, batch: int, ranks: int) -> None:
    """Raises InvalidUsage where the batches of a state from mid-epoch are of another size.

    Args:
        of_state: Samples of a batch over all ranks, of the state; 0 where unknown, which fits any.
        batch: The same of the batches that are to follow.
        ranks: How many ranks share these.
    """
    if not batch or not of_state or batch == of_state:
        return
    each, rest = divmod(of_state, ranks)
    evenly = "" if rest or not each else f"batch_size={each}, a rank's, on these {ranks} ranks, or "
    raise InvalidUsage(
        f"the state is from the middle of an epoch with batches of {of_state} samples over all "
        f"ranks, and those of these {ranks} ranks are of {batch}: what follows would be another "
        f"training. Keep {of_state}: {evenly}batch_size={of_state} of all ranks together, which "
        "any number up to that can share (pydist.prepare(loader, split_batches=True), Accelerate's "
        "DataLoaderConfiguration(split_batches=True), pydist.BatchSampler(sampler, "
        f"global_batch_size={of_state})). Or resume from the end of an epoch. If other batches are "
        "what you want, load {**state, 'batch': 0} into the sampler or loader."
    )


def _hint_at_shuffle(digest: int) -> str:
    for order in (Shuffled(1), Sequential(1)):
        if digest == name_digest(order):
            return f" (of '{order.name}')"
    return ""


def whole_number(name: str, value: Any, low: int, end: int) -> int:
    """A number from `low` to before `end`; tensors and numpy's numbers are taken, too."""
    try:
        number = operator.index(value)
    except TypeError:
        number = end
    if not low <= number < end:
        raise InvalidUsage(
            f"{name}={value!r} is not valid; use a whole number from {low} to {end - 1}."
        )
    return number
