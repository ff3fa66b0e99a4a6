"""What tests of Accelerate and Transformers run on ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import toy_training as toy
from accelerate.state import AcceleratorState, GradientState, PartialState

import pydist


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """As for every framework, and Accelerate forgets the job, too."""
    try:
        with toy.leaving():
            yield
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def accelerator_of(whose: str, **settings: Any) -> Any:
    """`ours`, `stock`, or `stock on pydist`, which joins a group of pydist's."""
    if whose == "ours":
        from pydist.integrations.accelerate import Accelerator

        return Accelerator(cpu=True, **settings)
    from accelerate import Accelerator as Stock

    if whose == "stock on pydist":
        pydist.init()
    return Stock(cpu=True, **settings)


def mean_of(steps: list[list[float]]) -> list[float]:
    """The mean over ranks, of each step."""
    return [sum(losses) / len(losses) for losses in zip(*steps, strict=True)]
