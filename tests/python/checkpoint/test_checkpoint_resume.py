"""Training that goes on from a checkpoint: on other ranks, in another stage, with other classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from saved_training import (
    LIMIT_S,
    STAGE_1,
    STAGE_2,
    WHOLE,
    Kind,
    Training,
    assert_same,
)
from thorough import everyday
from torch import Tensor
from training import joined

import pydist
import pydist.checkpoint.dcp_files as dcp_files

pytestmark = pytest.mark.timeout(60)


Pairs = list[tuple[int, Kind, int, Kind]]


def resume(
    folder: str,
    pairs: Pairs,
    dtype_name: str,
    steps: int,
    class_name: str = "AdamW",
    given: dict[str, Any] | None = None,
    other_layout: torch.memory_format = torch.channels_last,
) -> int:
    """Saves on N ranks, loads on M; trains on, and compares."""
    rank, size = joined()
    dtype = getattr(torch, dtype_name)
    kind_of_training: Any = {"optimizer_class": getattr(torch.optim, class_name), **(given or {})}
    groups = {n: pydist.new_group(range(n)) for n in range(1, size + 1)}
    # A convolution rounds differently in another layout.
    is_laid_out_anew = other_layout is not torch.channels_last
    saved: dict[tuple[int, Kind], list[Tensor]] = {}
    compared = 0
    for many, kind, other, other_kind in pairs:
        path = f"{folder}/{dtype_name}-{many}-{kind}"
        if (many, kind) not in saved:
            saved[many, kind] = []
            if rank < many:
                training = Training(groups[many], kind, dtype=dtype, **kind_of_training)
                training.run(range(5))
                pydist.save(path, **training.parts, extra=[many])
                saved[many, kind] = training.run(range(5, 5 + steps))
            pydist.barrier()
        if rank < other:
            again = Training(
                groups[other],
                other_kind,
                seed=1,
                dtype=dtype,
                layout=other_layout,
                **kind_of_training,
            )
            again.run(range(70, 71))
            assert pydist.load(path, **again.parts) == [many]
            found = again.run(range(5, 5 + steps))
            if rank < many:
                exact = (many, kind) == (other, other_kind) and not is_laid_out_anew
                what = f"{many} ranks, stage {kind} to {other} ranks, stage {other_kind}"
                assert_same(found, saved[many, kind], what, exact=exact)
                compared += 1
        pydist.barrier()
    return compared


@pytest.mark.parametrize("steps", everyday(5, thorough=(50,)))
def test_resume_on_other_ranks_and_stages(four: Ranks, tmp_path: Path, steps: int) -> None:
    counts = range(1, 5)
    # For N = M the stage is the same, and the result to the bit.
    pairs = [(n, 1 + n % 2, m, 1 + m % 2) for n in counts for m in counts]
    pairs += [(3, a, 3, b) for a in range(3) for b in range(3)]
    pairs += [(1, WHOLE, 4, STAGE_2), (4, STAGE_2, 1, WHOLE)]
    compared = four.run(resume, str(tmp_path), pairs, "float64", steps, timeout=LIMIT_S)
    assert compared[0] == len(pairs)


def test_resume_in_16_bits_keeps_masters(four: Ranks, tmp_path: Path) -> None:
    pairs = [(3, STAGE_1, 3, STAGE_1), (4, STAGE_2, 4, STAGE_2)]
    four.run(resume, str(tmp_path), pairs, "bfloat16", 10, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("is_from_eight", "steps"),
    [
        (True, 5),
        *(pytest.param(is_from, 50, marks=pytest.mark.thorough) for is_from in (True, False)),
    ],
)
def test_resume_from_and_on_eight(tmp_path: Path, is_from_eight: bool, steps: int) -> None:
    if is_from_eight:
        pairs = [(8, STAGE_2, 8, STAGE_2), (8, STAGE_2, 4, WHOLE), (8, STAGE_2, 4, STAGE_1)]
        pairs += [(8, STAGE_2, n, 1 + n % 2) for n in (1, 2, 3)]
    else:
        pairs = [(1, WHOLE, 8, STAGE_2), (1, STAGE_1, 8, STAGE_1)]
        pairs += [(n, 2 - n % 2, 8, 1 + n % 2) for n in (2, 3, 4)]
    with Ranks(8, {"PYDIST_BACKEND": "native"}) as ranks:
        ranks.run(resume, str(tmp_path), pairs, "float64", steps, timeout=LIMIT_S)


# To the same ranks and to others, in the same stage and in the other one.
FEW_PAIRS: Pairs = [
    (2, STAGE_1, 2, STAGE_1),
    (3, STAGE_2, 3, STAGE_2),
    (2, STAGE_1, 3, STAGE_2),
    (3, STAGE_2, 1, STAGE_1),
    (2, STAGE_1, 4, STAGE_1),
]


@pytest.mark.parametrize(
    ("class_name", "options"),
    [
        ("AdamW", {"fused": True, "amsgrad": True}),
        ("ASGD", {"t0": 3}),  # whose state has numbers besides `step`
        ("Adagrad", {"initial_accumulator_value": 0.1}),  # which has a state before it steps
        *(
            pytest.param("SGD", {"momentum": 0.9, way: True}, marks=pytest.mark.thorough)
            for way in ("nesterov", "fused")
        ),
    ],
)
def test_resume_of_other_classes(
    four: Ranks, tmp_path: Path, class_name: str, options: dict[str, Any]
) -> None:
    arguments = (FEW_PAIRS, "float64", 8, class_name, options)
    compared = four.run(resume, str(tmp_path), *arguments, timeout=LIMIT_S)
    assert compared[0] == len(FEW_PAIRS)


def test_resume_in_another_layout(four: Ranks, tmp_path: Path) -> None:
    """From a parameter in channels-last layout, as in other tests, to a contiguous one."""
    arguments = (FEW_PAIRS, "float64", 8, "AdamW", {}, torch.contiguous_format)
    four.run(resume, str(tmp_path), *arguments, timeout=LIMIT_S)


def contents_of(path: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    contents = dcp_files.Contents(Path(path))
    found = {}
    for name in sorted(contents.names):
        if (entry := contents.tensor(name)) is not None:
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            contents.read_tensors([(name, (0,) * found[name].dim(), found[name])])
    return found


def save_again(folder: str) -> None:
    """What was saved on N ranks and loaded on M is saved there to the bit, float32 copies too."""
    rank, size = joined()
    groups = {n: pydist.new_group(range(n)) for n in range(1, size + 1)}
    for number, (many, kind, other, other_kind) in enumerate(FEW_PAIRS):
        first, second = (f"{folder}/{number}-{name}" for name in ("first", "second"))
        if rank < many:
            training = Training(groups[many], kind, dtype=torch.bfloat16, fused=True)
            training.run(range(4))
            pydist.save(first, **training.parts)
        pydist.barrier()
        if rank < other:
            again = Training(groups[other], other_kind, seed=1, dtype=torch.bfloat16)
            again.run(range(70, 71))
            pydist.load(first, **again.parts)
            pydist.save(second, **again.parts)
        pydist.barrier()
        before, after = contents_of(first), contents_of(second)
        assert before.keys() == after.keys()
        assert "optimizer.state.inside.weight.master" in before
        for name, value in before.items():
            assert torch.equal(value, after[name]), name


def test_16_bits_on_other_ranks(four: Ranks, tmp_path: Path) -> None:
    four.run(save_again, str(tmp_path), timeout=LIMIT_S)
