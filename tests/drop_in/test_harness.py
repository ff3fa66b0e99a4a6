"""The harness itself: it sees what differs, and a program that fails stands alone."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from arms import DDP, LIMIT_S, PYDIST, Arms, Recording
from comparison import require_drop_in, require_same_as_one_process, require_same_by_rank
from harness import PROGRAMS, Copy, Library, Program, Record, Step, program
from torch import nn

pytestmark = pytest.mark.timeout(4 * LIMIT_S)

OWN: dict[str, Program] = {}


_Text = TypeVar("_Text", bound=Callable[[Library, Record], None])


def own(**arguments: Any) -> Callable[[_Text], _Text]:
    """Declares a program of these tests, which is none of all the programs."""

    def declare(text: _Text) -> _Text:
        declared = program(**arguments)(text)
        OWN[text.__name__] = PROGRAMS.pop(text.__name__)
        return declared

    return declare


@own()
def trains(lib: Library, record: Record) -> None:
    torch.manual_seed(0)
    model = lib.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(lib.share(torch.arange(24.0).view(12, 2))).square().mean()
    loss.backward()
    optimizer.step()
    record(model, optimizer, loss)


@own()
def raises_on_one_rank(lib: Library, record: Record) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("a mistake of the program")
    record(number=1)


@own()
def dies_on_one_rank(lib: Library, record: Record) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    record(number=1)


@own()
def hangs_on_one_rank(lib: Library, record: Record) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(1000)
    record(number=1)


@own()
def averages_nothing(lib: Library, record: Record) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model(lib.share(torch.arange(24.0).view(12, 2))).square().mean().backward()
    record(model)


@own(refused="mistake")
def is_refused_everywhere(lib: Library, record: Record) -> None:
    if lib.name == "pydist":
        raise ValueError("a mistake of the program")
    record(number=1)


@own(warns="strange")
def warns_where_it_should(lib: Library, record: Record) -> None:
    if lib.name == "pydist":
        warnings.warn("how strange", stacklevel=1)
    record(number=1)


@own()
def warns_where_it_should_not(lib: Library, record: Record) -> None:
    if lib.name == "pydist":
        warnings.warn("how strange", stacklevel=1)
    record(number=1)


@own()
def draws_a_random_number(lib: Library, record: Record) -> None:
    if lib.name == "pydist":
        torch.rand(1)
    record(number=1)


def test_what_trains_alike_passes(arms: Arms) -> None:
    for arm in PYDIST[:3]:
        require_drop_in(arms, arm, OWN["trains"])
    step = arms.result(PYDIST[1], OWN["trains"]).recordings[1].steps[0]
    assert sorted(step.averaged) == ["loss"]
    assert {"parameter weight", "gradient weight", "state weight exp_avg"} <= step.shared.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            *("raises_on_one_rank", "a mistake of the program"), marks=pytest.mark.thorough
        ),
        ("dies_on_one_rank", "rank 1: process ended with status 3"),
        ("hangs_on_one_rank", r"ranks \[1\] of 2 took more than(.|\n)*in hangs_on_one_rank"),
    ],
)
def test_a_program_that_fails_is_named_and_stands_alone(name: str, message: str) -> None:
    with contextlib.closing(Arms(limit_s=3.0)) as arms:
        with pytest.raises(AssertionError, match=message):
            _ = arms.result(DDP[2], OWN[name]).recordings
        assert len(arms.result(DDP[2], OWN["trains"]).recordings) == 2


def test_gradients_that_are_not_averaged_are_seen(arms: Arms) -> None:
    with pytest.raises(AssertionError, match=r"step 0, rank 0: gradient weight is .* apart"):
        require_drop_in(arms, PYDIST[1], OWN["averages_nothing"])


def test_what_should_be_refused_has_to_be(arms: Arms) -> None:
    require_drop_in(arms, PYDIST[1], OWN["is_refused_everywhere"])
    with pytest.raises(AssertionError, match="not refused by 'mistake' on all ranks"):
        require_drop_in(arms, DDP[2], OWN["is_refused_everywhere"])


def test_warnings_are_compared(arms: Arms) -> None:
    require_drop_in(arms, PYDIST[1], OWN["warns_where_it_should"])
    with pytest.raises(AssertionError, match="there was no warning of 'strange'"):
        require_drop_in(arms, DDP[2], OWN["warns_where_it_should"])
    with pytest.raises(AssertionError, match="warnings that torch's DDP does not give"):
        require_drop_in(arms, PYDIST[1], OWN["warns_where_it_should_not"])


def test_random_numbers_are_compared(arms: Arms) -> None:
    with pytest.raises(AssertionError, match="rank 0: torch's random numbers were left"):
        require_drop_in(arms, PYDIST[1], OWN["draws_a_random_number"])


def recording(shared: dict[str, Any], loss: float = 1.0) -> Recording:
    copies = {
        name: Copy.of(value) if isinstance(value, torch.Tensor) else value
        for name, value in shared.items()
    }
    return Recording([Step(shared=copies, averaged={"loss": loss})], set(), "")


ONES = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"a": ONES + 1e-6}, "a is 1e-06 apart"),
        ({"a": ONES.float()}, "torch.float32"),
        ({"a": torch.ones(3, 1, dtype=torch.float64)}, "shape"),
        ({"a": None}, "a is None"),
        ({"a": 1.0}, "a is 1.0"),
        ({}, "a is missing"),
        ({"a": ONES, "b": 1}, "b is there, and should not be"),
        ({"a": ONES * float("nan")}, "a is nan apart"),
    ],
)
def test_differences_are_seen(ours: dict[str, Any], message: str) -> None:
    theirs = recording({"a": ONES})
    with pytest.raises(AssertionError, match=message):
        require_same_by_rank([theirs], [recording(ours)], 1e-9, what="")
    with pytest.raises(AssertionError, match=message):
        require_same_as_one_process(theirs, [recording(ours)] * 2, 1e-9, what="")


def test_losses_are_averaged_over_ranks() -> None:
    alone = recording({"a": ONES}, 2.0)
    ranks = [recording({"a": ONES}, 1.0), recording({"a": ONES}, 3.0)]
    require_same_as_one_process(alone, ranks, 1e-9, what="")
    with pytest.raises(AssertionError, match=r"mean of the ranks: loss is 2\.0, not 1\.0"):
        require_same_as_one_process(recording({"a": ONES}), ranks, 1e-9, what="")


def test_a_step_too_few_is_seen() -> None:
    with pytest.raises(AssertionError, match="0 steps were recorded, not 1"):
        require_same_as_one_process(recording({}), [Recording([], set(), "")], 1e-9, what="")
