"""How the kernels of a step are called: segments, threads, GPUs, and what they refuse."""

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import torch
from launch import run_ranks
from optimizer_rules import (
    ADAMS,
    COUNT,
    DTYPES,
    SGDS,
    Adam,
    Arrays,
    Rule,
    Sgd,
    arrays_of,
    ordinary_values,
)
from torch import Tensor

import pydist
from pydist import _native

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would wait for each other wherever somebody else uses the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step_many(segments: list[Arrays], step: float | list[float] | list[Tensor] = 3.0) -> None:
    """Takes the step of that number, or those that tensors count."""
    numbers = step if isinstance(step, list) else [step] * len(segments)
    steps = [at if isinstance(at, Tensor) else torch.tensor(at - 1) for at in numbers]
    states = list(zip(*[arrays.states for arrays in segments], strict=True)) or [[], []]
    _native.adam_step(
        [arrays.parameter for arrays in segments],
        [arrays.gradient for arrays in segments],
        None,
        *states,
        step=steps,
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=True,
    )


def cut(arrays: Arrays, bounds: list[int]) -> list[Arrays]:
    """Views, which begin where they begin."""
    return [
        Arrays(
            arrays.parameter[begin:end],
            arrays.gradient[begin:end],
            [state[begin:end] for state in arrays.states],
        )
        for begin, end in itertools.pairwise(bounds)
    ]


def test_segments_and_threads_change_nothing() -> None:
    torch.manual_seed(0)
    count = 300_007
    start = Arrays(torch.randn(count), torch.randn(count), [torch.randn(count), torch.rand(count)])
    whole = copy.deepcopy(start)
    step_many([whole])
    bounds = sorted([0, 0, 5, 5, 77, 100_000, 100_001, 180_000, count])
    for thread_count in (1, 2, 5):
        torch.set_num_threads(thread_count)
        pieces = copy.deepcopy(start)
        step_many(cut(pieces, bounds))
        assert torch.equal(pieces.parameter, whole.parameter)
        for mine, its in zip(pieces.states, whole.states, strict=True):
            assert torch.equal(mine, its)


def test_each_segment_may_be_at_a_step_of_its_own() -> None:
    torch.manual_seed(0)
    start = Arrays(torch.randn(300), torch.randn(300), [torch.randn(300), torch.rand(300)])
    together, apart = copy.deepcopy(start), copy.deepcopy(start)
    step_many(cut(together, [0, 100, 200, 300]), [1.0, 9.0, 9.0])
    for piece, step in zip(cut(apart, [0, 100, 300]), (1.0, 9.0), strict=True):
        step_many([piece], step)
    assert torch.equal(together.parameter, apart.parameter)


def test_nothing_to_do() -> None:
    _native.adam_step(
        [], [], None, [], [], step=[], lr=1, beta1=0, beta2=0, eps=0, weight_decay=0, decoupled=True
    )
    nothing = Arrays(torch.empty(0), torch.empty(0), [torch.empty(0), torch.empty(0)])
    step_many([nothing, nothing])


def test_autograd_sees_the_writes() -> None:
    parameter = torch.randn(4, requires_grad=True)
    loss = parameter.square().sum()
    with torch.no_grad():
        Sgd(momentum=0.0).ours(Arrays(parameter, torch.ones(4)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_traffic_changes_nothing() -> None:
    parameter, state = torch.randn(1000), torch.randn(1000)
    before = parameter.clone(), state.clone()
    _native.step_traffic([parameter], [torch.randn(1000)], None, [[state]])
    assert torch.equal(parameter, before[0])
    assert torch.equal(state, before[1])


def test_steps_in_tensors_are_counted_on() -> None:
    torch.manual_seed(0)
    start = Arrays(torch.randn(300), torch.randn(300), [torch.randn(300), torch.rand(300)])
    counted, numbered = copy.deepcopy(start), copy.deepcopy(start)
    steps = [torch.tensor(0.0), torch.tensor(8.0, dtype=torch.float64), torch.tensor(8.0)]
    bounds = [0, 100, 200, 300]
    for past in (0, 1):
        step_many(cut(counted, bounds), steps)
        step_many(cut(numbered, bounds), [1.0 + past, 9.0 + past, 9.0 + past])
        assert [step.item() for step in steps] == [1 + past, 9 + past, 9 + past]
    assert torch.equal(counted.parameter, numbered.parameter)
    for wrong in (torch.zeros(2), torch.tensor(1), torch.tensor(1.0, device="meta")):
        with pytest.raises(pydist.InvalidUsage, match=r"step\[1\] must be a CPU tensor"):
            step_many(cut(counted, bounds), [steps[0], wrong, steps[2]])
    with pytest.raises(pydist.InvalidUsage, match="step holds 2 values for 3 parameters"):
        step_many(cut(counted, bounds), steps[:2])
    # What was refused has counted nothing.
    assert [step.item() for step in steps] == [2, 10, 10]


def test_gradients_may_be_one_tensor() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(50)
    apart = [Arrays(torch.randn(50), gradient.clone(), []) for _ in range(3)]
    together = copy.deepcopy(apart)
    for arrays in apart:
        Sgd(momentum=0.0).ours(arrays)
    _native.sgd_step(
        [arrays.parameter for arrays in together],
        [gradient, gradient, gradient],
        None,
        None,
        begins=[False] * 3,
        lr=0.1,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
    )
    for mine, its in zip(together, apart, strict=True):
        assert torch.equal(mine.parameter, its.parameter)


def moved(arrays: Arrays, device: str) -> Arrays:
    """A copy."""
    master = None if arrays.master is None else arrays.master.to(device, copy=True)
    return Arrays(
        arrays.parameter.to(device, copy=True),
        arrays.gradient.to(device, copy=True),
        [state.to(device, copy=True) for state in arrays.states],
        master,
    )


def assert_as_on_the_cpu(device: Arrays, host: Arrays, what: str) -> None:
    for mine, its in zip(
        [device.values, device.parameter, *device.states],
        [host.values, host.parameter, *host.states],
        strict=True,
    ):
        torch.testing.assert_close(
            mine.cpu(),
            its,
            rtol=0.0,
            atol=0.0,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )


def step_on_the_gpu() -> None:
    gpu_ranks.install(delay_us=500)
    assert not _native.cuda_kernels_obstacle(torch.cuda.current_device())
    other_stream = torch.cuda.Stream() if gpu_ranks.IS_REAL else None
    rules: list[Rule] = [*ADAMS, *SGDS]
    for dtypes in DTYPES:
        if torch.float64 in dtypes:
            continue
        for rule in rules:
            torch.manual_seed(0)
            host = arrays_of(dtypes[0], rule.state_count, ordinary_values, dtypes[1])
            device = moved(host, "cuda")
            gpu_ranks.synchronize()
            with torch.cuda.stream(other_stream) if other_stream else fake_cuda.Stream():
                # Behind what the stream was given before, and before what it is given now.
                device.gradient.mul_(2.0)
                rule.ours(device, 0.37)
                after = moved(device, "cuda")
                for tensor in (device.values, device.parameter, *device.states):
                    tensor.zero_()
            host.gradient.mul_(2.0)
            rule.ours(host, 0.37)
            gpu_ranks.synchronize()
            assert_as_on_the_cpu(after, host, f"{rule}, {dtypes}")

    # Segments that are at steps of their own, and buffers of which some begin.
    torch.manual_seed(0)
    host = Arrays(torch.randn(300), torch.randn(300), [torch.randn(300), torch.rand(300)])
    device = moved(host, "cuda")
    bounds = [0, 100, 100, 201, 300]
    steps = [[torch.tensor(at) for at in (0.0, 8.0, 8.0, 2.0)] for _ in range(2)]
    for _ in range(2):
        step_many(cut(host, bounds), steps[0])
        step_many(cut(device, bounds), steps[1])
    assert steps[0] == steps[1]
    for pieces in (cut(host, bounds), cut(device, bounds)):
        _native.sgd_step(
            [piece.parameter for piece in pieces],
            [piece.gradient for piece in pieces],
            None,
            [piece.states[0] for piece in pieces],
            begins=[True, False, True, False],
            lr=0.1,
            momentum=0.9,
            dampening=0.1,
            weight_decay=0.1,
            nesterov=False,
        )
    assert_as_on_the_cpu(device, host, "several segments")

    step_many([])
    wide = moved(arrays_of(torch.float64, 2, ordinary_values), "cuda")
    with pytest.raises(pydist.InvalidUsage, match=r"parameters\[0\] is of type Double"):
        ADAMS[0].ours(wide)
    mixed = moved(host, "cuda")
    mixed.gradient = host.gradient
    with pytest.raises(pydist.InvalidUsage, match=r"gradients\[0\] is on cpu, parameters\[0\]"):
        ADAMS[0].ours(mixed)
    with pytest.raises(pydist.InvalidUsage, match="lr must be a finite number"):
        Adam(lr=math.nan).ours(moved(host, "cuda"))


@gpu_ranks.needs_gpu_ranks
def test_cuda_tensors_are_stepped_on_the_current_stream() -> None:
    run_ranks(step_on_the_gpu, 1, timeout=50)


def refused(match: str, rule: Rule, **changes: Any) -> None:
    arrays = arrays_of(torch.float32, rule.state_count, ordinary_values)
    for name, value in changes.items():
        if name == "states":
            arrays.states = value(arrays.states)
        else:
            setattr(arrays, name, value(getattr(arrays, name)))
    before = copy.deepcopy(arrays)
    with pytest.raises(pydist.InvalidUsage, match=match):
        rule.ours(arrays)
    assert torch.equal(arrays.parameter, before.parameter)


def test_what_does_not_fit_is_refused_by_name() -> None:
    refused(
        r"gradients\[0\] has shape \[7\], its parameter \[4099\]", Adam(), gradient=lambda g: g[:7]
    )
    refused(
        r"gradients\[0\] must be a contiguous CPU or CUDA tensor",
        Adam(),
        gradient=lambda g: torch.stack([g, g], 1)[:, 0],
    )
    refused(r"gradients\[0\] must be a contiguous", Adam(), gradient=lambda g: g.to("meta"))
    refused(
        "a gradient in float32, bfloat16 or float16, not in float64", Adam(), gradient=Tensor.double
    )
    refused("needs a float32 master copy", Adam(), parameter=Tensor.bfloat16)
    refused("takes no master copy", Adam(), master=lambda _: torch.zeros(COUNT))
    refused(
        "float16, bfloat16, float32 and float64 parameters, not int32", Adam(), parameter=Tensor.int
    )
    refused(
        r"exp_avg_sqs\[0\] is of type BFloat16, expected Float for a parameter of type Float",
        Adam(),
        states=lambda states: [states[0], states[1].bfloat16()],
    )
    refused(
        r"exp_avgs\[0\] and exp_avg_sqs\[0\] share memory",
        Adam(),
        states=lambda states: [states[0], states[0]],
    )
    refused("momentum is 0.9, so momentum_buffers must be given", Sgd(), states=lambda _: [])
    refused(
        "momentum is 0, so momentum_buffers must be None",
        Sgd(momentum=0.0),
        states=lambda _: [torch.zeros(COUNT)],
    )
    refused("steps count from 1, this one included; got 0", Adam(step=0))
    refused("beta1 must be from 0 to less than 1, got 1", Adam(betas=(1.0, 0.9)))


def test_lists_of_other_lengths_are_refused() -> None:
    start = Arrays(torch.randn(8), torch.randn(8), [torch.randn(8), torch.rand(8)])
    pieces = cut(start, [0, 4, 8])
    with pytest.raises(pydist.InvalidUsage, match="step holds 3 values for 2 parameters"):
        step_many(pieces, [1.0, 2.0, 3.0])
    with pytest.raises(pydist.InvalidUsage, match="gradients holds 1 tensors, parameters 2"):
        _native.sgd_step(
            [piece.parameter for piece in pieces],
            [pieces[0].gradient],
            None,
            None,
            begins=[True] * 2,
            lr=1,
            momentum=0,
            dampening=0,
            weight_decay=0,
            nesterov=False,
        )
    with pytest.raises(pydist.InvalidUsage, match=r"\[0\] and .*\[1\] share memory"):
        step_many([pieces[0], cut(start, [3, 8])[0]])


def test_a_number_that_leaves_out_steps_is_for_gpus() -> None:
    parameter = torch.ones(4)
    with pytest.raises(
        pydist.InvalidUsage,
        match=r"sgd_step: found_inf must be one float32 element on the CUDA device of the "
        r"parameters, not 1 of Float on cpu",
    ):
        _native.sgd_step(
            [parameter],
            [torch.ones(4)],
            None,
            None,
            begins=[True],
            lr=0.1,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            found_inf=torch.zeros(()),
        )
    assert torch.equal(parameter, torch.ones(4))
