"""What a stage's module may be: frozen, without parameters, compiled, traced."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks, run_ranks
from pipelines import (
    MICRO_BATCHES,
    SAMPLES,
    WIDTH,
    Place,
    batch,
    require_same,
    sgd,
    whole_model,
)
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import pydist
from pydist.pipelining import PipelineStage, build_stage


def train_alone(model: nn.Sequential) -> None:
    """One process, two steps, of what is not frozen."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sgd(trained)
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def train_stages(place: Place, kind: str, stages: list[Any]) -> None:
    schedule = place.schedule(kind, stages, nn.functional.mse_loss)
    trained = [p for stage in stages for p in stage.submod.parameters() if p.requires_grad]
    optimizer = sgd(trained) if trained else None
    for step in range(2):
        if optimizer:
            optimizer.zero_grad()
        place.step(schedule, *batch(step))
        if optimizer:
            optimizer.step()


# Of each stage: whether it is in a DataParallel, and what is frozen of it.
MIXTURES = {
    "some frozen": ("1F1B", [True, True], ["0.0.weight", "2.0.weight", "3.0.bias"]),
    "first frozen": ("1F1B", [False, True], ["0.", "1."]),
    "middle frozen": ("Interleaved1F1B", [True, False, True, True], ["1.", "2.0.bias"]),
    "last frozen": ("1F1B", [True, False], ["2.", "3."]),
    "zero bubble": ("InterleavedZeroBubble", [True, False, True, True], ["1."]),
}


def with_frozen(case: str) -> None:
    kind, wraps, frozen = MIXTURES[case]
    place = Place(2, kind)
    model, expected = whole_model(), whole_model()
    for each in (model, expected):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))
    train_alone(expected)
    stages = [
        place.stage_of(
            pydist.DataParallel(part, process_group=place.peers) if wraps[stage] else part, stage
        )
        for part, stage in zip(place.parts(model), place.stages, strict=True)
    ]
    train_stages(place, kind, stages)
    for stage, layers in zip(stages, place.layers, strict=True):
        require_same(layers, stage.submod, expected)


@pytest.mark.parametrize("case", list(MIXTURES))
def test_frozen_parameters(four: Ranks, case: str) -> None:
    four.run(with_frozen, case)


def without_parameters(first: bool) -> None:
    """One of the two stages has nothing to train, so that it is in no DataParallel."""
    place = Place(2, "1F1B")
    layers, expected = whole_model(), whole_model()
    whole = [nn.Tanh(), expected] if first else [expected, nn.Tanh()]
    train_alone(nn.Sequential(*whole))
    if (place.position == 0) == first:
        module: nn.Module = nn.Tanh()
    else:
        module = pydist.DataParallel(layers, process_group=place.peers)
    train_stages(place, "1F1B", [place.stage_of(module, place.position)])
    if (place.position == 0) != first:
        require_same(range(4), module, expected)


@pytest.mark.parametrize("first", [False, True])
def test_a_stage_without_parameters(four: Ranks, first: bool) -> None:
    four.run(without_parameters, first)


def frozen_later() -> None:
    """All of one stage's parameters, after it was wrapped."""
    place = Place(2, "1F1B")
    model, expected = whole_model(), whole_model()
    (stage,) = place.make(model)
    expected[2:].requires_grad_(False)
    train_alone(expected)
    if place.position == 1:
        stage.submod.requires_grad_(False)
    train_stages(place, "1F1B", [stage])
    require_same(place.layers[0], stage.submod, expected)


def test_a_stage_that_is_frozen_once_it_is_wrapped(four: Ranks) -> None:
    four.run(frozen_later)


def wrapped_in_part() -> None:
    pydist.init()
    alone = [dist.new_group([rank]) for rank in range(pydist.world_size())][pydist.rank()]
    part = nn.Sequential(pydist.DataParallel(nn.Linear(WIDTH, WIDTH).double()), nn.Tanh())
    stage = PipelineStage(part, 0, 1, torch.device("cpu"), group=alone)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    with pytest.raises(pydist.InvalidUsage, match=r"has a pydist\.DataParallel in it, at 0"):
        schedule.step(batch(0)[0], target=batch(0)[1])


def test_a_wrapper_around_a_part_of_the_module_is_refused(four: Ranks) -> None:
    four.run(wrapped_in_part)


def compiled(kind: str, around: str, backend: str = "aot_eager") -> None:
    torch._dynamo.reset()
    place = Place(2, kind)
    expected = whole_model()
    train_alone(expected)
    wrappers: list[pydist.DataParallel] = []
    modules: list[Any] = []
    part: Any
    for part in place.parts(whole_model()):
        if around == "module":
            part = torch.compile(part, backend=backend)
        wrapper = pydist.DataParallel(part, process_group=place.peers)
        wrappers.append(wrapper)
        is_inside = around == "module"
        modules.append(wrapper if is_inside else torch.compile(wrapper, backend=backend))
    stages = [place.stage_of(*each) for each in zip(modules, place.stages, strict=True)]
    if kind == "InterleavedZeroBubble":  # which torch refuses
        with pytest.raises(RuntimeError, match=r"torch\.compile"):
            place.schedule(kind, stages, nn.functional.mse_loss)
        return
    before = [wrapper.stats().rounds for wrapper in wrappers]
    train_stages(place, kind, stages)
    for wrapper, rounds, layers in zip(wrappers, before, place.layers, strict=True):
        assert wrapper.stats().rounds - rounds == 2
        require_same(layers, wrapper, expected)


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        ("1F1B", "wrapper"),
        ("1F1B", "module"),
        ("InterleavedZeroBubble", "module"),
        pytest.param("InterleavedZeroBubble", "wrapper", marks=pytest.mark.thorough),
    ],
)
def test_compiled(four: Ranks, kind: str, around: str) -> None:
    four.run(compiled, kind, around)


# Generates C++ and compiles it, on all ranks.
@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize("around", ["wrapper", "module"])
def test_compiled_by_inductor(tmp_path: Path, around: str) -> None:
    env = {
        "PYDIST_BACKEND": "native",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes
    }
    with Ranks(4, env) as ranks:
        for kind in ("1F1B", "Interleaved1F1B"):
            ranks.run(compiled, kind, around, "inductor", timeout=90)


class Normalised(nn.Module):
    """A layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x))
        return y


def with_running_statistics() -> None:
    """Of stages that are told their shapes: they are of the micro-batches alone."""
    place = Place(1, "1F1B")
    torch.manual_seed(place.position)
    part = Normalised()
    alone = copy.deepcopy(part)
    x, y = batch(0)
    example = x[: SAMPLES // MICRO_BATCHES]
    stage = PipelineStage(
        pydist.DataParallel(part, process_group=place.peers),
        place.position,
        2,
        torch.device("cpu"),
        # What comes from another stage requires a gradient, and so does what goes there.
        input_args=example.clone().requires_grad_(place.position == 1),
        output_args=example.clone().requires_grad_(),
        group=place.chain,
    )
    place.step(place.schedule("1F1B", [stage], nn.functional.mse_loss), x, y)
    if place.position == 0:
        for micro_batch in x.chunk(MICRO_BATCHES):
            alone(micro_batch)
        torch.testing.assert_close(part.norm.running_mean, alone.norm.running_mean)
        torch.testing.assert_close(part.norm.running_var, alone.norm.running_var)
    assert part.norm.num_batches_tracked == MICRO_BATCHES


def test_running_statistics_of_stages_that_are_told_their_shapes() -> None:
    run_ranks(with_running_statistics, 2)


def traced() -> None:
    place = Place(2, "1F1B")
    expected = whole_model()
    train_alone(expected)
    pipe = pipeline(
        whole_model(),
        mb_args=(batch(0)[0][: SAMPLES // 2 // MICRO_BATCHES],),
        split_spec={"2": SplitPoint.BEGINNING},
    )
    part = pipe.get_stage_module(place.position)
    model = pydist.DataParallel(part, process_group=place.peers)
    before = model.stats().rounds
    stage = build_stage(model, place.position, pipe.info(), torch.device("cpu"), group=place.chain)
    train_stages(place, "1F1B", [stage])
    assert model.stats().rounds - before == 2
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {
        str(layer) for layer in place.layers[0]
    }
    require_same(place.layers[0], model, expected)


def test_a_stage_that_the_tracer_has_cut(four: Ranks) -> None:
    four.run(traced)
