"""`pydist.ShardedOptimizer(..., fused=True)`: pydist's kernels in the place of torch's class."""

import contextlib
import copy
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gpu_ranks
import pytest
import torch
from launch import Ranks, run_ranks
from thorough import everyday
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Runner, batch, joined
from twins import ManyKinds, Twins, small_model

import pydist
from pydist import _native
from pydist.sharding import step as steps
from pydist.sharding.buckets import Member, dense_strides, move_in
from pydist.sharding.step import BucketStep

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


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """How many segments each call of a kernel has stepped."""
    calls: list[int] = []

    def counting(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(parameters: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(len(parameters))
            kernel(parameters, *args, **kwargs)

        return call

    with (
        mock.patch.object(_native, "adam_step", counting(_native.adam_step)),
        mock.patch.object(_native, "sgd_step", counting(_native.sgd_step)),
    ):
        yield calls


Class = type[torch.optim.Optimizer]

CASES: list[tuple[Class, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"lr": 1e-3, "betas": (0.3, 0.6)}),
    (torch.optim.Adam, {"lr": torch.tensor(1e-3), "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


def steady(kind: Class, options: dict[str, Any]) -> tuple[Class, dict[str, Any]]:
    """For long training, where roundings must stay small.

    Adam takes gradients that are rounding alone for nothing, the loss does not grow beyond limits,
    and a rate in a tensor is of float64, the type in which torch then computes.
    """
    eps = {} if kind is torch.optim.SGD else {"eps": 1e-5}
    rate = options["lr"]
    rate = rate.double() if isinstance(rate, Tensor) else rate
    return kind, {**options, **eps, "lr": rate, "maximize": False}


STEADY_CASES = [steady(*case) for case in CASES]


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


@pytest.mark.parametrize("stage", [1, 2])
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


# ---- training -----------------------------------------------------------------------------


def assert_equal_training(twins: Twins, what: str, tolerance: float = 1e-9) -> None:
    for (name, ours), theirs in zip(
        twins.models[0].named_parameters(), twins.models[1].parameters(), strict=True
    ):
        torch.testing.assert_close(
            ours.detach(),
            theirs.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )


def train_long(stage: Any, is_one_copy: bool) -> None:
    """50 steps: gradients clipped and accumulated, schedules of the rate and of the betas."""
    for optimizer_class, options in STEADY_CASES:
        twins = Twins(
            small_model(torch.float64),
            optimizer_class,
            options=options,
            stage=stage,
            fused=True,
            share_parameters=is_one_copy,
        )
        # Numbers that change: of lr alone where it is a tensor, otherwise of momentum or betas too.
        schedulers: list[Any] = [
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                0.01,
                total_steps=60,
                cycle_momentum="betas" in options or "momentum" in options,
            )
            if not isinstance(options["lr"], Tensor)
            else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
            for optimizer in twins.optimizers
        ]
        for step in range(50):
            losses = []
            for model, optimizer, scheduler in zip(
                twins.models, twins.optimizers, schedulers, strict=True
            ):
                with model.no_sync():
                    model(batch(twins.rank, 4, 10, step=100 + step)).square().mean().backward()
                loss = model(batch(twins.rank, 4, 10, step=step)).square().mean()
                loss.backward()
                if step % 3 == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
        assert_equal_training(twins, f"{optimizer_class.__name__} {options}")


@pytest.mark.parametrize("stage", [1, 2])
def test_fifty_steps_agree(run: Runner, stage: int) -> None:
    run(train_long, stage, False)


def test_fifty_steps_agree_on_one_copy(run: Runner) -> None:
    run(train_long, 2, True)


class WithUnused(nn.Module):
    """All dtypes that kernels take, layouts, a scalar, nothing, and what not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kinds = ManyKinds()
        # No fused step takes complex numbers.
        self.kinds.pairs.requires_grad_(False)
        self.sometimes = nn.Linear(10, 30)
        self.never = nn.Linear(10, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.kinds(x).sum()
        return out + self.sometimes(x.float()).square().mean() if both else out


def train_unused(stage: Any) -> None:
    for optimizer_class, options in CASES:
        twins = Twins(
            WithUnused(), optimizer_class, options=options, cap_mb=0.002, stage=stage, fused=True
        )
        for step in range(6):

            def act(model: Any, optimizer: Any, step: int = step) -> None:
                optimizer.zero_grad()
                x = batch(pydist.rank(), 6, 10, step=step, dtype=torch.float32)
                model(x, step in (1, 2, 4)).backward()
                optimizer.step()

            twins.each(act)
        assert_equal_training(twins, f"{optimizer_class.__name__} {options}", 1e-5)
        states = twins.ours.sharded_state().parameters
        assert not any(part.values for part in states["never.weight"].ranges)
        for part in states["sometimes.weight"].ranges:
            if "step" in part.values:
                assert part.values["step"].item() == 3


@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters_dtypes_and_layouts(run: Runner, stage: int) -> None:
    run(train_unused, stage)


def train_groups() -> None:
    """Each group has its options, may ask for the kernels or not, and goes in one call a bucket."""
    joined()
    module = small_model(torch.float64)

    def groups(model: Any) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        return [
            {"params": [named["0.weight"], named["2.weight"]], "weight_decay": 0.3},
            {"params": biases, "lr": 0.02, "betas": (0.5, 0.9), "amsgrad": True},
            {"params": [named["3.weight"], named["4.weight"]], "maximize": True, "fused": None},
        ]

    models = [pydist.DataParallel(copy.deepcopy(module)) for _ in range(2)]
    options = {"lr": 0.01, "eps": 1e-5}
    ours = pydist.ShardedOptimizer(groups(models[0]), torch.optim.Adam, fused=True, **options)
    theirs = torch.optim.Adam(groups(models[1]), **options)
    for step in range(8):
        if step == 4:
            ours.param_groups[2]["fused"] = True
            ours.param_groups[0]["fused"] = False
            for optimizer in (ours, theirs):
                optimizer.param_groups[1]["lr"] = torch.tensor(0.005, dtype=torch.float64)
        with counted_calls() as calls:
            for model, optimizer in ((models[0], ours), (models[1], theirs)):
                optimizer.zero_grad()
                x = batch(pydist.rank(), 6, 10, step=step)
                model(x).square().mean().backward()
                optimizer.step()
        assert len(calls) <= 2
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-10, atol=1e-10)


def test_groups(run: Runner) -> None:
    run(train_groups)


def scale(stage: Any) -> None:
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": 1e-2}, stage=stage, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    for step in range(6):
        twins.scaled_step(step, scalers, overflows_on=0)
        assert_equal_training(twins, f"step {step}", 1e-5)
    steps = [
        part.values["step"].item()
        for state in twins.ours.sharded_state().parameters.values()
        for part in state.ranges
    ]
    assert set(steps) == {5}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_scaler_leaves_out_steps(run: Runner, stage: int) -> None:
    run(scale, stage)


def overwrite() -> None:
    """Written values are taken over, by masters too; memory that was replaced moves in again."""
    joined()
    for dtype in (torch.float32, torch.bfloat16):
        models = [pydist.DataParallel(small_model(dtype)) for _ in range(2)]
        fused = pydist.ShardedOptimizer(models[0], torch.optim.AdamW, lr=1e-2, fused=True)
        plain = pydist.ShardedOptimizer(models[1], torch.optim.AdamW, lr=1e-2, foreach=False)
        for step in range(4):
            for model, optimizer in ((models[0], fused), (models[1], plain)):
                optimizer.zero_grad()
                model(
                    batch(pydist.rank(), 6, 10, step=step, dtype=dtype)
                ).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    if step == 1:
                        model.get_parameter("2.weight").mul_(2.0)
                    if step == 2:
                        weight = model.get_parameter("0.weight")
                        weight.data = weight.detach().clone() + 1
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach())


def test_what_others_write_is_taken_over(run: Runner) -> None:
    run(overwrite)


def write_on_one_rank() -> None:
    rank, size = joined()
    twins = Twins(
        small_model(), torch.optim.SGD, options={"lr": 0.1}, fused=True, share_parameters=True
    )
    model, optimizer = twins.models[0], twins.ours
    for _ in range(2):
        model(batch(rank, 6, 10, dtype=torch.float32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    pydist.barrier()
    if rank == 0:
        with torch.no_grad():
            next(model.parameters())[0, 0] = 43.0
    if size == 1:
        optimizer.step()
        assert next(model.parameters())[0, 0] == 43.0
        return
    with pytest.raises(pydist.Mismatch, match=r"0.weight was written by rank 0 alone"):
        optimizer.step()


def test_what_one_rank_writes_alone_is_refused(run: Runner) -> None:
    run(write_on_one_rank)


def use_other_gradients() -> None:
    """Whatever lies in `.grad` where nothing of pydist's reduces it."""
    joined()
    torch.manual_seed(0)
    starts = [torch.randn(6, 5), torch.randn(7), torch.randn(7)]
    same = torch.randn(7)
    gradients = [torch.randn(5, 6).t(), same, same]
    results = []
    for fused in (True, None):
        parameters = [nn.Parameter(start.clone()) for start in starts]
        optimizer = pydist.ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1, fused=fused)
        with counted_calls() as calls:
            for _ in range(2):
                parameters[0].grad = gradients[0]
                parameters[1].grad = gradients[1]
                parameters[2].grad = gradients[2]
                optimizer.step()
                parameters[1].grad = torch.ones(1).expand(7)
                optimizer.step()
        assert len(calls) == (4 if fused else 0) or not optimizer.ranges()
        optimizer.finish()
        results.append([p.detach().clone() for p in parameters])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_other_wrappers(run: Runner) -> None:
    run(use_other_gradients)


# ---- state --------------------------------------------------------------------------------


def gathered(optimizer: pydist.ShardedOptimizer) -> pydist.ShardedState:
    everybody: list[Any] = [None] * pydist.world_size()
    torch.distributed.all_gather_object(everybody, optimizer.sharded_state())
    return pydist.ShardedState.merged(everybody)


def exchange_states(folder: str) -> None:
    """Fused, torch's on shards, and torch's on whole parameters go on from one another's state."""
    rank, size = joined()
    for number, (optimizer_class, options) in enumerate(STEADY_CASES):
        module = small_model(torch.float64)

        def make(fused: bool | None, stage: Any) -> tuple[Any, Any]:
            model = pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=0.002)  # noqa: B023
            return model, pydist.ShardedOptimizer(
                model,
                optimizer_class,  # noqa: B023
                stage=stage,
                fused=fused,
                **options,  # noqa: B023
            )

        def train(model: Any, optimizer: Any, first: int, count: int) -> None:
            for step in range(first, first + count):
                optimizer.zero_grad()
                model(batch(rank, 6, 10, step=step)).square().mean().backward()
                optimizer.step()

        reference = pydist.DataParallel(copy.deepcopy(module))
        whole = optimizer_class(reference.parameters(), **options)
        train(reference, whole, 0, 8)

        model, optimizer = make(True, 1)
        train(model, optimizer, 0, 2)
        # By state_dict(), on each rank its own; the option is the loaded one, as in torch.
        values, local = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model, optimizer = make(None, 2)
        model.load_state_dict(values)
        optimizer.load_state_dict(local)
        assert optimizer.param_groups[0]["fused"] is True
        optimizer.param_groups[0]["fused"] = False
        train(model, optimizer, 2, 2)
        # In place, as a user would who compares.
        optimizer.param_groups[0]["fused"] = True
        train(model, optimizer, 4, 1)
        state = gathered(optimizer)
        values = copy.deepcopy(model.state_dict())
        # A loaded state takes the place of one that the kernels have worked with.
        model, optimizer = make(True, 1)
        train(model, optimizer, 90, 1)
        optimizer.zero_grad()
        model.load_state_dict(values)
        optimizer.load_sharded_state(state)
        train(model, optimizer, 5, 1)
        # Through a checkpoint, into torch's class on whole parameters.
        path = f"{folder}/{size}-{number}"
        pydist.save(path, model=model, optimizer=optimizer)
        plain = copy.deepcopy(module)
        unsharded = optimizer_class(plain.parameters(), **options)
        pydist.load(path, model=plain, optimizer=unsharded)
        wrapped = pydist.DataParallel(plain)
        for group in unsharded.param_groups:
            group["fused"] = None
        train(wrapped, unsharded, 6, 1)
        # And back.
        model, optimizer = make(True, 2)
        model.load_state_dict(wrapped.state_dict())
        optimizer.load_state_dict(unsharded.state_dict())
        optimizer.param_groups[0]["fused"] = True
        with counted_calls() as calls:
            train(model, optimizer, 7, 1)
        assert calls
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-11, atol=1e-11)


def test_states_are_exchanged(run: Runner, tmp_path: Any) -> None:
    run(exchange_states, str(tmp_path))


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
