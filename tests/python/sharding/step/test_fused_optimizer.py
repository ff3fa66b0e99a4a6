"""`pydist.ShardedOptimizer(..., fused=True)`: pydist's kernels in the place of torch's class."""

import copy
import itertools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gpu_ranks
import pytest
import torch
from fused_cases import CASES, Class, counted_calls
from launch import Ranks, run_ranks
from thorough import everyday
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Runner, batch, joined
from twins import ManyKinds, Twins, small_model

import pydist
from pydist import _native
from pydist.sharding.buckets import Member, dense_strides, move_in
from pydist.sharding.step import fused_step as steps
from pydist.sharding.step.bucket_step import BucketStep

LIMIT_S = 40.0

pytestmark = pytest.mark.timeout(60)

# Where torch's own loops round a product and its sum once, as the kernels do everywhere.
TORCH_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.fixture(scope="module", params=everyday(3, thorough=(1, 2)))
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": "native", "PYDIST_DEBUG": "1"}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


@pytest.fixture
def run_two(two_ranks: Ranks) -> Runner:
    return lambda function, *args: two_ranks.run(function, *args, timeout=LIMIT_S)


# ---- one step, to the ulp -----------------------------------------------------------------


def ulp(values: Tensor) -> Tensor:
    """Of float32, at magnitudes in float64."""
    info = torch.finfo(torch.float32)
    return torch.exp2(torch.floor(torch.log2(values.abs().clamp(info.smallest_normal)))) * info.eps


def by_begin(state: pydist.ShardedState) -> dict[tuple[str, int], dict[str, Any]]:
    """Copies, on the CPU."""
    return {
        (name, part.begin): {
            key: value.clone().cpu() if isinstance(value, Tensor) else value
            for key, value in part.values.items()
        }
        for name, known in state.parameters.items()
        for part in known.ranges
    }


def step_by_torch(
    optimizer_class: Class,
    options: dict[str, Any],
    values: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
) -> tuple[Tensor, dict[str, Any]]:
    """The unfused class's step on a copy of a segment, in float32."""
    parameter = nn.Parameter(values.float().clone())
    parameter.grad = gradient.float()
    unfused = optimizer_class([parameter], **options, foreach=False)  # type: ignore[call-arg]
    if state:
        unfused.state[parameter] = copy.deepcopy(state)
    unfused.step()
    return parameter.detach(), unfused.state[parameter]


def assert_step(before: Tensor, ours: Tensor, theirs: Tensor, is_sgd: bool, what: str) -> int:
    """docs/numerics.md: the bits for SGD; for Adam an ulp of the parameter, two of the update.

    Returns how many updates are small beside their parameter: those are held to 1 ulp.
    """
    if is_sgd and TORCH_FUSES:
        assert torch.equal(ours, theirs), what
        return ours.numel()
    before, ours, theirs = before.double(), ours.double(), theirs.double()
    update = (ours - before).abs()
    larger = torch.maximum(before.abs(), ours.abs())
    difference = (ours - theirs).abs()
    # An older processor rounds the terms of sums once more.
    extra = 1 if TORCH_FUSES else 3
    excess = difference / (ulp(larger) + 2 * ulp(update))
    worst = int(excess.argmax())
    where = f"{what}: {before[worst]} became {ours[worst]}, by torch {theirs[worst]}"
    assert excess.max() <= extra, where
    is_small = update < before.abs() / 8
    assert difference.le(extra * ulp(larger))[is_small].all(), what
    return int(is_small.sum())


def compare_steps(dtype: torch.dtype, stage: Any, device: str = "cpu") -> None:
    """Every step of every segment beside the unfused class's on copies of it, on the CPU."""
    rank, _ = joined()
    for optimizer_class, options in CASES:
        model = pydist.DataParallel(small_model(dtype).to(device), bucket_cap_mb=0.002)
        optimizer = pydist.ShardedOptimizer(
            model, optimizer_class, stage=stage, fused=True, **options
        )
        is_sgd = optimizer_class is torch.optim.SGD
        small = 0
        for step in range(3):
            what = f"{optimizer_class.__name__} {options}, step {step}"
            optimizer.zero_grad()
            x = batch(rank, 6, 10, step=step, dtype=dtype)
            model(x.to(device)).square().mean().backward()
            before = by_begin(optimizer.sharded_state())
            olds = {n: p.detach().clone() for n, p in model.named_parameters()}
            whole = {n: optimizer.gradient_of(p) for n, p in model.named_parameters()}
            with counted_calls() as calls:
                optimizer.step()
            assert calls, what
            after = by_begin(optimizer.sharded_state())
            for name, (dims, ranges) in optimizer.ranges().items():
                gradient = whole[name]
                assert gradient is not None
                for begin, end in ranges:
                    state, states = before.get((name, begin), {}), after.get((name, begin), {})
                    old, new, slope = (
                        t.detach().permute(dims).reshape(-1)[begin:end].clone().cpu()
                        for t in (olds[name], model.get_parameter(name), gradient)
                    )
                    if dtype != torch.float32:
                        old, master = state.pop("master"), states.pop("master")
                        assert torch.equal(master.to(dtype), new), what
                        new = master
                    theirs, expected = step_by_torch(optimizer_class, options, old, slope, state)
                    small += assert_step(old, new, theirs, is_sgd, f"{what}, {name}")
                    assert states.keys() == expected.keys(), what
                    for key, value in states.items():
                        kind = (value.dtype, value.shape, value.device)
                        assert kind == (expected[key].dtype, expected[key].shape, value.device)
                        if TORCH_FUSES or key == "step":
                            assert torch.equal(value, expected[key]), f"{what}, {key}"
                        else:
                            torch.testing.assert_close(value, expected[key])
        assert small > 1000, f"{optimizer_class.__name__} {options}: {small}"


@pytest.mark.parametrize("stage", everyday(1, thorough=(2,)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_is_within_an_ulp_of_the_unfused_class(
    run: Runner, stage: int, dtype: torch.dtype
) -> None:
    run(compare_steps, dtype, stage)


def compare_steps_on_the_gpu() -> None:
    gpu_ranks.install()
    for stage, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        compare_steps(dtype, stage, "cuda")


@gpu_ranks.needs_gpu_ranks
def test_a_step_on_a_gpu_is_within_an_ulp() -> None:
    run_ranks(compare_steps_on_the_gpu, 2, env={"PYDIST_BACKEND": "nccl"}, timeout=LIMIT_S)


# ---- where torch's class runs -------------------------------------------------------------


class Derived(torch.optim.AdamW):
    """Might do anything in its step()."""


def run_torchs_class() -> None:
    """To the bits of torch's class with fused=True, without one call of ours."""
    joined()

    def train(twins: Twins, steps: int = 3) -> None:
        with counted_calls() as calls:
            for step in range(steps):
                twins.step(step)
        twins.check("torch's own")
        assert not calls

    train(Twins(small_model(), Derived, options={"lr": 1e-2, "fused": True}))
    train(Twins(small_model(), torch.optim.Adagrad, options={"lr": 1e-2, "fused": True}))
    train(Twins(small_model(), torch.optim.AdamW, options={"lr": 1e-2, "fused": False}))
    train(Twins(small_model(), torch.optim.AdamW, options={"lr": 1e-2, "fused": None}))
    bits16 = small_model(torch.bfloat16)
    train(
        Twins(
            bits16,
            torch.optim.AdamW,
            options={"lr": 1e-2, "fused": True},
            master_weights=False,
        )
    )
    # A number that no kernel takes, from a schedule say.
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": 1e-2, "fused": True})
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"] = -1e-2
    train(twins)
    # Complex parameters in a group that does not ask for it, beside others that do.
    torch.manual_seed(1)
    module = ManyKinds()
    models = [pydist.DataParallel(copy.deepcopy(module)) for _ in range(2)]
    optimizers: list[Any] = []
    for model, make in zip(
        models, (pydist.ShardedOptimizer, lambda groups, kind, **o: kind(groups, **o)), strict=True
    ):
        others = [p for p in model.parameters() if not p.is_complex()]
        pairs = {"params": [p for p in model.parameters() if p.is_complex()], "fused": False}
        optimizers.append(make([{"params": others}, pairs], torch.optim.Adam, fused=True))
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = batch(pydist.rank(), 6, 10, step=step, dtype=torch.float32)
            model(x).sum().backward()
            optimizer.step()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if a.is_complex():
            assert torch.equal(a.detach(), b.detach()), name
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-5)


def test_torchs_class_runs_where_no_kernel_does(run_two: Runner) -> None:
    run_two(run_torchs_class)


# ---- on a GPU -----------------------------------------------------------------------------


def lay_out(values: list[Tensor]) -> Any:
    """A bucket of copies of parameters, all of them one rank's shard."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    layout = _native.ShardLayout([p.numel() for p in parameters], values[0].itemsize, 1)
    members = [
        Member(number, f"{number}", parameter, offset, dense_strides(parameter))
        for number, (parameter, offset) in enumerate(zip(parameters, layout.offsets, strict=True))
    ]
    memory = torch.empty(layout.count, dtype=values[0].dtype, device=values[0].device)
    alone: Any = types.SimpleNamespace(rank=0, size=1)
    with torch.no_grad():
        return move_in("bucket", memory, layout, members, None, alone, with_masters=True)


@torch.no_grad()
def step_buckets_on_the_gpu() -> None:
    gpu_ranks.install(delay_us=200)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        values = [torch.randn(*shape).to(dtype) for shape in ((7, 5), (33,), (0, 2), (4,))]
        gradients = [[torch.randn_like(value) for value in values] for _ in range(4)]
        for optimizer_class, options in CASES:
            buckets = [
                lay_out([value.to(device) for value in values]) for device in ("cpu", "cuda")
            ]
            for bucket, own in zip(buckets, (options, copy.deepcopy(options)), strict=True):
                group = {"params": bucket.parameters, "fused": True, **own}
                step = BucketStep(
                    bucket, [group], lambda groups, kind=optimizer_class: kind(groups, lr=0.5)
                )
                device = bucket.memory.device
                for number, slopes in enumerate(gradients):
                    for parameter, slope in zip(bucket.parameters, slopes, strict=True):
                        parameter.grad = slope.to(device)
                    if number == 1:
                        bucket.parameters[1].grad = None
                    with counted_calls() as calls:
                        step.run([group])
                    assert calls == [2 if number == 1 else 3]  # nothing has no segment
                states = bucket.optimizer.state.values()
                assert all(state["step"].is_cpu for state in states if "step" in state)
            what = f"{optimizer_class.__name__} {options}"
            host, gpu = buckets
            tolerance = {} if gpu_ranks.IS_REAL else {"rtol": 0.0, "atol": 0.0}
            for ours, its in zip(gpu.segments, host.segments, strict=True):
                for name in ("values", "updated"):
                    torch.testing.assert_close(
                        getattr(ours, name).cpu(),
                        getattr(its, name),
                        msg=lambda text, what=what: f"{what}: {text}",
                        **tolerance,
                    )
    # A number of steps that torch's fused class has left on the GPU comes to the host.
    (segment, *_) = gpu.segments
    optimizer = torch.optim.AdamW([segment.updated], fused=True)
    group = optimizer.param_groups[0]
    step = steps.fused_step(optimizer, group, [segment])
    assert step is not None
    optimizer.state[segment.updated] = {
        "step": torch.tensor(7.0, device="cuda"),
        "exp_avg": torch.zeros_like(segment.updated),
        "exp_avg_sq": torch.zeros_like(segment.updated),
    }
    assert step.run([torch.ones_like(segment.values)])
    assert torch.equal(optimizer.state[segment.updated]["step"], torch.tensor(8.0))
    # float64 there, and everything where pydist was built without nvcc, is for torch's class.
    wide = lay_out([torch.ones(5, dtype=torch.float64, device="cuda")]).segments
    own = torch.optim.AdamW([wide[0].updated], fused=True)
    assert steps.fused_step(own, own.param_groups[0], wide) is None
    with mock.patch.object(steps, "_has_cuda_kernels", return_value=False):
        assert steps.fused_step(optimizer, group, [segment]) is None


@gpu_ranks.needs_gpu_ranks
def test_buckets_on_a_gpu() -> None:
    run_ranks(step_buckets_on_the_gpu, 1, timeout=LIMIT_S)


def fused_on_a_foreign_gpu() -> None:
    gpu_ranks.install()
    bucket = lay_out([torch.ones(5, device="cuda")])
    optimizer = torch.optim.AdamW([bucket.segments[0].updated], fused=True)
    assert "error 209" in _native.cuda_kernels_obstacle(0)
    assert steps.fused_step(optimizer, optimizer.param_groups[0], bucket.segments) is None


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
@gpu_ranks.needs_gpu_ranks
def test_a_gpu_that_the_kernels_do_not_know_is_left_to_torchs_class() -> None:
    run_ranks(fused_on_a_foreign_gpu, 1, env={"FAKE_CUDA_KERNELS": "foreign"}, timeout=LIMIT_S)


# ---- what a step costs --------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The bytes that operators have made, rather than returned what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            value.untyped_storage().data_ptr()
            for value in itertools.chain(args, *[a for a in args if isinstance(a, (list, tuple))])
            if isinstance(value, Tensor)
        }
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given:
                self.bytes += value.nbytes
        return result


def count_bytes() -> None:
    """No float32 copy of the gradients of 16-bit parameters, nor anything of that size."""
    rank, size = joined()
    width = 256
    made = {}
    for fused in (True, None):
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(2)])
        model = pydist.DataParallel(module.bfloat16())
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=2, fused=fused)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, 2, width, step=step, dtype=torch.bfloat16)).sum().backward()
            optimizer.finish()
            allocations = Allocations()
            with allocations:
                optimizer.step()
            made[fused] = allocations.bytes
    gradients = 4 * 2 * width * width / size
    assert made[None] >= gradients  # otherwise it counts nothing
    assert made[True] < gradients / 50


def test_gradients_in_16_bits_are_not_copied(run_two: Runner) -> None:
    run_two(count_bytes)


def count_calls() -> None:
    """One call a bucket; lists are made again only where other segments step."""
    rank, _ = joined()
    model = pydist.DataParallel(
        nn.Sequential(*[nn.Linear(10, 10) for _ in range(20)]), bucket_cap_mb=0.002
    )
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, 6, 10, step=step, dtype=torch.float32)).sum().backward()
        with counted_calls() as calls:
            optimizer.step()
    own = [s for s in optimizer.sharded_state().parameters.values() if s.ranges]
    assert sum(calls) == sum(len(s.ranges) for s in own)
    assert len(calls) < sum(calls)


def test_a_bucket_takes_one_call(run_two: Runner) -> None:
    run_two(count_calls)
