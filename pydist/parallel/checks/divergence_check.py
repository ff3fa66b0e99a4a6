"""Watches that the ranks' models stay alike (`check_every=`).

Note [Divergence]
Before every `check_every`-th forward that averages, each rank takes a fingerprint of every
parameter and buffer, and all gather a digest of these: one small operation. Where the digests
differ, they exchange the fingerprints, and all raise the same Mismatch.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING

from torch import Tensor

from pydist.errors import InvalidUsage, Mismatch
from pydist.job.log import logger
from pydist.job.outcome import exchange
from pydist.job.rank_names import culprits
from pydist.parallel.checks.fingerprints import fingerprints_of

if TYPE_CHECKING:
    from pydist._native import Communicator
    from pydist.parallel.rank_local import RankLocal

_LABEL = "pydist.DataParallel(check_every=)"


def checked_every(value: object) -> int | None:
    """The argument `check_every`, if it is valid.

    Raises:
        InvalidUsage: It is not.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidUsage(
            f"check_every is {value!r}; it must be a number of steps, 1 or more, or None"
        )
    return value


class Sentinel:
    """What one wrapper watches.

    Args:
        every: In every how many steps models are compared; None: never.

    Attributes:
        is_comparing: Whether models are compared.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        # Forwards that average, with the present one: steps, where each has one.
        self._step = 0
        self._has_told_cost = False
        # False since a forward that did not average, and may have changed this rank's buffers.
        self._has_buffers_of_all = True

    @property
    def is_comparing(self) -> bool:
        return self._every is not None

    def is_due(self) -> bool:
        """Whether the next forward that averages compares."""
        return self._every is not None and (self._step + 1) % self._every == 0

    def note_other_forward(self, in_training: bool) -> None:
        """Takes note of a forward that does not average; in training, buffers may change in it."""
        if in_training:
            self._has_buffers_of_all = False

    def before_forward(
        self, communicator: Communicator, local: RankLocal, has_buffers: bool
    ) -> None:
        """Takes note of a step that begins. All ranks call it, before a forward that averages.

        Args:
            communicator: The ranks.
            local: The module.
            has_buffers: Whether buffers are copied to all ranks at the end of a backward.

        Raises:
            Mismatch: The models differ (on every rank).
        """
        self._step += 1
        has_buffers = has_buffers and self._has_buffers_of_all
        self._has_buffers_of_all = True
        if self._every is None or communicator.size == 1:
            return
        if self._step % self._every == 0:
            began = time.monotonic()
            named: list[tuple[str, Tensor]] = [
                (f"parameter {name}", each) for name, each in local.shared_parameters()
            ]
            if has_buffers:
                named += [(f"buffer {name}", each) for name, each in local.shared_buffers()]
            found = fingerprints_of(named)
            digest = hashlib.sha256(json.dumps(found).encode()).digest()
            digests = exchange(communicator, digest, _LABEL)
            self._tell_cost(time.monotonic() - began, named)
            if any(each != digest for each in digests):
                _raise_where_different(communicator, self._step, found)

    def _tell_cost(self, seconds: float, named: list[tuple[str, Tensor]]) -> None:
        if self._has_told_cost:
            return
        self._has_told_cost = True
        count = sum(each.numel() * each.element_size() for _, each in named)
        logger.info(
            "check_every=%d: comparing %d tensors of %.1f MiB takes %.1f ms, once in %d steps",
            self._every,
            len(named),
            count / 2**20,
            seconds * 1e3,
            self._every,
        )


def _raise_where_different(communicator: Communicator, step: int, found: dict[str, int]) -> None:
    """Raises on all ranks, and names the first tensor that differs.

    Digests may be unlike for another reason: buffers that only some ranks had reason to compare.
    """
    told = exchange(communicator, json.dumps(found).encode(), _LABEL)
    everybody: list[dict[str, int]] = [json.loads(each) for each in told]
    common = [name for name in found if all(name in each for each in everybody)]
    for name in common:
        by_value: dict[int, list[int]] = {}
        for rank, theirs in enumerate(everybody):
            by_value.setdefault(theirs[name], []).append(rank)
        if len(by_value) > 1:
            # The most ranks are right. Of as many of each, nobody can tell.
            groups = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks[0]))
            odd = sorted(rank for ranks in groups[1:] for rank in ranks)
            is_clear = len(groups[0]) > len(groups[1])
            blamed = odd if is_clear else sorted([*odd, *groups[0]])
            different = sum(len({each[n] for each in everybody}) > 1 for n in common)
            raise Mismatch(
                f"the model differs between ranks at the beginning of step {step}: {name} of rank "
                f"{', '.join(map(str, odd))} is not that of rank "
                f"{', '.join(map(str, groups[0]))}; {different} of {len(common)} tensors differ. "
                "Something changed it on some ranks only since the last comparison: code under "
                "`if rank == 0`, an optimizer with other options or states, memory that is broken",
                **culprits(communicator, blamed, "its model differs"),
            )
