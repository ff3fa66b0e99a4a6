"""A training step through a framework: on pydist beside the framework's own DDP on gloo.

    python bench/frameworks/step.py --framework lightning [--models gpt deep] [--seconds 30]
    python bench/frameworks/step.py --framework accelerate

Each model trains in two jobs, with all of the framework around it: loops, hooks, the optimizer's
step. The jobs take turns of some steps, so that they meet the same noise; which goes first changes
from round to round. A round's time is that of the slowest rank. Ratios are medians over rounds with
the interval that holds them in 95 % of resamplings; above 1, pydist is faster.
"""

import argparse
import contextlib
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jobs import Turns, jobs_of
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pydist.benchmarks import machine
from pydist.benchmarks.noise import is_noisy, ratio_of
from pydist.benchmarks.steps.models import MODELS

_LEAST_ROUNDS = 15
_WARM_UP_STEPS = 5
# Of a turn: long beside the exchange of a word with the process that measures.
_TURN_S = 0.2
# Where a framework counts them.
_EPOCH_STEPS = 100_000


class _OneBatch(IterableDataset[tuple[Tensor, ...]]):
    """The same batch for ever, so that loading takes no time."""

    def __init__(self, batch: tuple[Tensor, ...]) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while True:
            yield self._batch


def train_by_lightning(turns: Turns, model: str, is_ours: bool) -> None:
    """Trains by Lightning's Trainer until the turns are over."""
    import lightning

    import pydist.integrations.lightning  # noqa: F401

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    network, batch = MODELS[model].make()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, inputs: tuple[Tensor, ...], step: int) -> Tensor:
            return self.network(*inputs).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class TakesTurns(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = not turns.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = not turns.after_step()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="pydist" if is_ours else "ddp",
        max_epochs=1,
        callbacks=[TakesTurns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(_OneBatch(batch), batch_size=None))


def train_by_accelerate(turns: Turns, model: str, is_ours: bool) -> None:
    """Trains by the loop that scripts for Accelerate have, until the turns are over."""
    if is_ours:
        from pydist.integrations.accelerate import Accelerator
    else:
        from accelerate import Accelerator

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    network, batch = MODELS[model].make()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    # Accelerate shares out numbers, and each stands for the same batch.
    numbers: Any = range(_EPOCH_STEPS)
    loader = DataLoader(numbers, batch_size=1, collate_fn=lambda _: batch)
    accelerator = Accelerator(cpu=True)
    wrapper, stepped, shared = accelerator.prepare(network, optimizer, loader)
    goes_on = turns.begin()
    while goes_on:
        for inputs in shared:
            accelerator.backward(wrapper(*inputs).square().mean())
            stepped.step()
            stepped.zero_grad()
            goes_on = turns.after_step()
            if not goes_on:
                break
    accelerator.end_training()


# What trains by a framework: gets its turns, the name of a model, and whether it is on pydist.
FRAMEWORKS: dict[str, Callable[[Turns, str, bool], None]] = {
    "lightning": train_by_lightning,
    "accelerate": train_by_accelerate,
}


def measure(framework: str, model: str, ranks: int, seconds: float) -> dict[bool, list[float]]:
    """Seconds a step, for each round: of pydist (True) and of the framework's own DDP (False)."""
    times: dict[bool, list[float]] = {True: [], False: []}
    order = [True, False]
    with jobs_of(ranks, FRAMEWORKS[framework], [(model, is_ours) for is_ours in order]) as jobs:
        job_of = dict(zip(order, jobs, strict=True))
        once_s = [job_of[is_ours].turn(_WARM_UP_STEPS) for is_ours in order]
        once_s = [job_of[is_ours].turn(_WARM_UP_STEPS) for is_ours in order]
        steps = max(1, round(_TURN_S / max(once_s)))
        end_s = time.perf_counter() + seconds
        while len(times[True]) < _LEAST_ROUNDS or time.perf_counter() < end_s:
            order.reverse()
            for is_ours in order:
                times[is_ours].append(job_of[is_ours].turn(steps))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dense = [name for name, training in MODELS.items() if not training.is_sparse]
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=dense,
        metavar="NAME",
        default=[name for name in dense if name != "tiny"],
        help=f"some of {', '.join(dense)} (default: all but tiny)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many (default: 2)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="time for each model (default: 30)"
    )
    arguments = parser.parse_args()
    print(machine.describe())
    print(f"{'model':<50}{'pydist ms':>11}{'ddp ms':>9}{'rounds':>8}  {'ddp/pydist':<22}")
    for model in arguments.models:
        times = measure(arguments.framework, model, arguments.ranks, arguments.seconds)
        ours_ms, theirs_ms = (1e3 * statistics.median(times[is_ours]) for is_ours in (True, False))
        print(
            f"{MODELS[model].title:<50}{ours_ms:>11.2f}{theirs_ms:>9.2f}{len(times[True]):>8}  "
            f"{ratio_of(times[False], times[True])!s:<22}"
            f"{'noisy' if is_noisy(times[True]) else ''}",
            flush=True,
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
