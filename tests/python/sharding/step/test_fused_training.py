"""Training with the fused step beside training with torch's class."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_cases import CASES, Class, counted_calls
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, batch, joined
from twins import ManyKinds, Twins, small_model

import pydist

LIMIT_S = 40.0

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=everyday(2, thorough=(1, 3)))
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": "native", "PYDIST_DEBUG": "1"}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


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


@pytest.mark.parametrize("stage", everyday(2, thorough=(1,)))
def test_fifty_steps_agree(run: Runner, stage: int) -> None:
    run(train_long, stage, False)


@pytest.mark.thorough
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
