"""Ranks that die, and those that are left, for tests of failures."""

import os
import signal
from typing import Any

from launch import Outcome


def die() -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def survivors_of(outcomes: list[Outcome], victims: list[int]) -> list[Any]:
    """What the survivors returned; checks of the victims that they were killed."""
    for rank in victims:
        assert outcomes[rank].exit_code == -signal.SIGKILL, outcomes[rank].describe()
    left = [outcome for outcome in outcomes if outcome.rank not in victims]
    assert all(outcome.ok for outcome in left), "\n".join(each.describe() for each in outcomes)
    return [outcome.value for outcome in left]
