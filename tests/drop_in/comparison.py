"""What differs between two runs of a program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from arms import ALONE, DDP, Arm, Arms, Recording
from harness import Copy, Program

_SHOWN = 12


def require_drop_in(arms: Arms, arm: Arm, program: Program) -> None:
    """Raises AssertionError where pydist does otherwise than the reference, or than is declared."""
    result = arms.result(arm, program)
    if program.refused:
        said = result.hung or "\n".join(outcome.describe() for outcome in result.outcomes)
        assert result.is_refused(program), (
            f"not refused by {program.refused!r} on all ranks: {said}"
        )
        return
    found = result.recordings
    if program.reference == "one process":
        alone = arms.result(ALONE, program).recordings[0]
        require_same_as_one_process(alone, found, program.tolerance, what="beside one process")
    known_warnings: set[str] = set()
    if not program.without_ddp:
        other = DDP[arm.nprocs]
        theirs = arms.result(other, program).recordings
        require_same_by_rank(
            theirs,
            found,
            program.tolerance,
            what="beside torch's DDP, rank by rank",
            buffers_of_rank_0=program.buffers_of_rank_0,
        )
        known_warnings = set().union(*(recording.warned for recording in theirs))
    more = set().union(*(recording.warned for recording in found)) - known_warnings
    if program.warns:
        assert any(re.search(program.warns, text) for text in more), (
            f"there was no warning of {program.warns!r}, only {sorted(more)}"
        )
    unexpected = [text for text in more if not (program.warns and re.search(program.warns, text))]
    assert not unexpected, f"warnings that torch's DDP does not give: {unexpected}"


def require_same_as_one_process(
    alone: Recording, ranks: list[Recording], tolerance: float, *, what: str
) -> None:
    """Raises AssertionError where some ranks together did not do what one process did."""
    found = [f"rank {r}: {text}" for r, rank in enumerate(ranks) for text in _counts(alone, rank)]
    if not found:
        for number, expected in enumerate(alone.steps):
            steps = [rank.steps[number] for rank in ranks]
            for r, step in enumerate(steps):
                for text in _in_values(expected.shared, step.shared, tolerance):
                    found.append(f"step {number}, rank {r}: {text}")
            mean = _mean([step.averaged for step in steps])
            for text in _in_values(expected.averaged, mean, tolerance):
                found.append(f"step {number}, mean of the ranks: {text}")
    _raise(found, what)


def require_same_by_rank(
    expected: list[Recording],
    found: list[Recording],
    tolerance: float,
    *,
    what: str,
    buffers_of_rank_0: bool = False,
) -> None:
    """Raises AssertionError where a rank did not do what the same rank of the other run did.

    With `buffers_of_rank_0`, every rank has to have the buffers of the other run's rank 0.
    """
    different = []
    for r, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        for text in _counts(theirs, ours):
            different.append(f"rank {r}: {text}")
        for number, (step, other) in enumerate(zip(theirs.steps, ours.steps, strict=False)):
            for kind in ("shared", "averaged", "local"):
                wanted = getattr(step, kind)
                if buffers_of_rank_0 and kind == "shared":
                    wanted = {**wanted, **_buffers(expected[0].steps[number].shared)}
                values = _in_values(wanted, getattr(other, kind), tolerance)
                different += [f"step {number}, rank {r}: {text}" for text in values]
        if theirs.random_state != ours.random_state:
            different.append(f"rank {r}: torch's random numbers were left in another state")
    _raise(different, what)


def _buffers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.startswith("buffer ")}


def _counts(expected: Recording, found: Recording) -> Iterator[str]:
    if len(expected.steps) != len(found.steps):
        yield f"{len(found.steps)} steps were recorded, not {len(expected.steps)}"


def _mean(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Over ranks, of what all of them have."""
    names = [name for name in values[0] if all(name in each for each in values)]
    return {name: _mean_of([each[name] for each in values]) for name in names}


def _mean_of(values: list[Any]) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], Copy):
        return Copy(values[0].dtype, np.mean([value.values for value in values], axis=0))
    return sum(values) / len(values)


def _in_values(
    expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float
) -> Iterator[str]:
    for name in expected.keys() - found.keys():
        yield f"{name} is missing"
    for name in found.keys() - expected.keys():
        yield f"{name} is there, and should not be"
    for name, value in expected.items():
        if name in found and (text := _in_value(value, found[name], tolerance)):
            yield f"{name} {text}"


def _in_value(expected: Any, found: Any, tolerance: float) -> str:
    if isinstance(expected, Copy) and isinstance(found, Copy):
        ours, theirs = found.values, expected.values
        if (found.dtype, ours.shape) != (expected.dtype, theirs.shape):
            return (
                f"is {found.dtype} of shape {ours.shape}, not {expected.dtype} of shape "
                f"{theirs.shape}"
            )
        if np.array_equal(ours, theirs):
            return ""
        is_rounded = theirs.dtype.kind in "fc"
        if is_rounded and np.allclose(ours, theirs, tolerance, tolerance, equal_nan=True):
            return ""
        apart = np.abs(ours.astype(complex) - theirs.astype(complex)).max()
        return f"is {apart:.3g} apart: {_short(found)}, not {_short(expected)}"
    if isinstance(expected, float) and isinstance(found, float):
        if math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance):
            return ""
        return f"is {found}, not {expected}"
    same = type(expected) is type(found) and expected == found
    return "" if same else f"is {_short(found)}, not {_short(expected)}"


def _short(value: Any) -> str:
    if isinstance(value, Copy):
        flat = value.values.flatten()
        return f"{flat[:4].tolist()}{' ...' if len(flat) > 4 else ''}"
    return repr(value)


def _raise(different: list[str], what: str) -> None:
    if different:
        more = f"\n... and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise AssertionError(f"{what}:\n" + "\n".join(different[:_SHOWN]) + more)
