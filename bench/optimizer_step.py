"""The fused optimizer step beside torch's fused one, and beside memory.

    python bench/optimizer_step.py [--elements 25000000] [--threads 1 2] [--rounds 60]

All take turns on the same tensors. "traffic" reads and writes what a step does, and computes
nothing; "of bandwidth" is its time over that of the step, so 1 is a step whose arithmetic is free.
Times are medians of wall-clock time; ratios those of `pydist.benchmarks.noise`.

torch's fused step has no master copy: for bfloat16 parameters it keeps its moments in bfloat16 as
well, half the bytes, so it is compared for float32 only.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pydist import _native
from pydist.benchmarks import machine
from pydist.benchmarks.noise import is_noisy, ratio_of

_BETAS = (0.9, 0.999)
_LR, _EPS, _WEIGHT_DECAY = 1e-3, 1e-8, 1e-2


@dataclass(frozen=True)
class Arms:
    """What takes turns, on the same tensors.

    Attributes:
        ours: AdamW by pydist.
        traffic: its reads and writes alone.
        torchs: AdamW by torch's fused class; None where its arithmetic differs.
        bytes: that a step reads and writes, each byte once.
    """

    ours: Callable[[], None]
    traffic: Callable[[], None]
    torchs: Callable[[], None] | None
    bytes: int


def arms_of(elements: int, dtype: torch.dtype) -> Arms:
    """For one flat parameter of `dtype`, float32 or a 16-bit type with a float32 master copy."""
    torch.manual_seed(0)
    values = torch.randn(elements)
    has_master = dtype != torch.float32
    parameters, masters = ([values.to(dtype)], [values]) if has_master else ([values], None)
    gradients = [(torch.randn(elements) / 10).to(dtype)]
    exp_avgs, exp_avg_sqs = [torch.zeros(elements)], [torch.zeros(elements)]
    step = torch.tensor(0.0)

    def ours() -> None:
        _native.adam_step(
            parameters,
            gradients,
            masters,
            exp_avgs,
            exp_avg_sqs,
            step=[step],
            lr=_LR,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            eps=_EPS,
            weight_decay=_WEIGHT_DECAY,
            decoupled=True,
        )

    def traffic() -> None:
        _native.step_traffic(parameters, gradients, masters, [exp_avgs, exp_avg_sqs])

    def torchs() -> None:
        # What torch.optim.AdamW(fused=True).step() calls, without its few microseconds of Python.
        step.add_(1)
        torch._fused_adamw_(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step],
            lr=_LR,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            weight_decay=_WEIGHT_DECAY,
            eps=_EPS,
            amsgrad=False,
            maximize=False,
        )

    # Values and moments are read and written, gradients only read, rounded parameters only written.
    moved = 6 * values.nbytes + gradients[0].nbytes + (parameters[0].nbytes if has_master else 0)
    return Arms(ours, traffic, None if has_master else torchs, moved)


def measure(arms: Arms, rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round; which goes first changes from round to round."""
    calls = {"ours": arms.ours, "traffic": arms.traffic}
    if arms.torchs is not None:
        calls["torch"] = arms.torchs
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for call in calls.values():
        call()
    for _ in range(rounds):
        order = order[1:] + order[:1]
        for name in order:
            start_s = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start_s)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[100_000, 25_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    print(machine.describe())
    print(
        f"{'dtype':<9}{'elements':>10}{'threads':>8}{'ours ms':>9}{'GB/s':>7}"
        f"  {'ours/torch':<22}{'of bandwidth':<22}"
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for elements in arguments.elements:
            for dtype in (torch.float32, torch.bfloat16):
                arms = arms_of(elements, dtype)
                times = measure(arms, arguments.rounds)
                ours_s = statistics.median(times["ours"])
                to_torch = str(ratio_of(times["ours"], times["torch"])) if "torch" in times else "-"
                print(
                    f"{str(dtype)[6:]:<9}{elements:>10}{threads:>8}{ours_s * 1e3:>9.3f}"
                    f"{arms.bytes / ours_s / 1e9:>7.1f}  {to_torch:<22}"
                    f"{ratio_of(times['traffic'], times['ours'])!s:<22}"
                    f"{'noisy' if is_noisy(times['ours']) else ''}"
                )


if __name__ == "__main__":
    main()
