"""`pydist.ShardedOptimizer` beside the same optimizer on whole parameters."""

import copy
from typing import Any

import pytest
import torch
from launch import Ranks
from test_sharded_failures import fail_alone, hook_once
from test_sharded_gradients import clip_and_scale
from test_sharded_joining import unfreeze
from test_sharded_state import save_and_load
from torch import Tensor, nn
from training import Runner, Tied, batch, joined
from twins import LIMIT_S, TIME_LIMIT, ManyKinds, Twins, assert_same, is_exact, small_model

import pydist
from pydist.sharding.step.element_wise import ELEMENT_WISE

pytestmark = TIME_LIMIT

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}, {"foreach": True}],
    "AdamW": [{"lr": 1e-2, "weight_decay": 0.1}],
    "Adagrad": [{"initial_accumulator_value": 0.1}],
    "SGD": [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ],
    "RMSprop": [{"momentum": 0.9, "centered": True}, {"foreach": True}],
}


def train_all_classes() -> None:
    joined()
    classes = ELEMENT_WISE if is_exact() else (torch.optim.AdamW, torch.optim.SGD)
    for stage in (1, 2):
        for optimizer_class in classes:
            for options in OPTIONS.get(optimizer_class.__name__, [{}]):
                twins = Twins(small_model(), optimizer_class, options=options, stage=stage)
                for step in range(4):
                    twins.step(step)
                twins.check(f"{optimizer_class.__name__} {options}, stage {stage}")


def test_every_class_is_what_it_is_on_whole_parameters(run_sharded: Runner) -> None:
    run_sharded(train_all_classes)


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def train_long() -> None:
    """Beside one process on all ranks' batches, and with pydist's kernels in the class's place."""
    rank, size = joined()
    cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (kind, options)
        for kind in ELEMENT_WISE
        for options in (({}, {"fused": True}) if kind in FUSED else ({},))
    ]
    for number, (kind, own) in enumerate(cases):
        # What takes roundings for signs, or divides by them, would not stay close for long.
        options: dict[str, Any] = {"lr": 1e-3} if kind is torch.optim.SGD else {}
        if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam):
            options = {"eps": 1e-5}
        torch.manual_seed(5)
        reference = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 3)).double()
        model = pydist.DataParallel(copy.deepcopy(reference), bucket_cap_mb=1.0)
        ours = pydist.ShardedOptimizer(
            model,
            kind,
            stage=1 + number % 2,  # type: ignore[arg-type]
            **options,
            **own,
        )
        assert ours.stage == 1 + number % 2
        theirs = kind(reference.parameters(), **options)
        losses: tuple[list[Tensor], list[Tensor]] = ([], [])
        for step in range(50):
            inputs = torch.stack([batch(r, 4, 10, step=step) for r in range(size)])
            for net, optimizer, x in (
                (model, ours, inputs[rank]),
                (reference, theirs, inputs.view(-1, 10)),
            ):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                losses[net is reference].append(loss.detach())
        mean, whole = (torch.stack(each) for each in losses)
        pydist.all_reduce(mean, "mean")
        what = f"losses of {kind.__name__} {own}"
        torch.testing.assert_close(
            mean, whole, rtol=1e-9, atol=1e-9, msg=lambda text, what=what: f"{what}: {text}"
        )
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            what = f"{kind.__name__} {own}, {name}"
            torch.testing.assert_close(
                a, b, rtol=1e-9, atol=1e-9, msg=lambda text, what=what: f"{what}: {text}"
            )


@pytest.mark.thorough
def test_fifty_steps_of_every_class() -> None:
    """On gloo; on native, steps are compared to the bit."""
    with Ranks(2, {"PYDIST_BACKEND": "gloo"}) as ranks:
        ranks.run(train_long, timeout=LIMIT_S)


def train_many_kinds(stage: int) -> None:
    torch.manual_seed(1)
    for cap_mb in (1e-6, 0.002, 1.0):
        twins = Twins(ManyKinds(), torch.optim.Adam, cap_mb=cap_mb, stage=stage)
        for step in range(3):
            twins.step(step)
        twins.check(f"buckets of {cap_mb} MB")
        # One range a segment, each element on one rank.
        state = twins.ours.sharded_state()
        counts = torch.tensor(
            [sum(r.end - r.begin for r in s.ranges) for s in state.parameters.values()]
        )
        pydist.all_reduce(counts)
        shapes = [p.numel() for p in twins.models[0].parameters()]
        unused = list(state.parameters).index("unused"), list(state.parameters).index("frozen")
        assert [c for i, c in enumerate(counts.tolist()) if i not in unused] == [
            n for i, n in enumerate(shapes) if i not in unused
        ]


@pytest.mark.parametrize("stage", [1, 2])
def test_dtypes_layouts_and_sizes(run_sharded: Runner, stage: int) -> None:
    run_sharded(train_many_kinds, stage)


def train_tied(stage: int) -> None:
    joined()
    torch.manual_seed(3)
    twins = Twins(Tied(torch.float32), torch.optim.AdamW, options={"lr": 1e-2}, stage=stage)
    for step in range(4):
        twins.step(step, width=8)
    twins.check("tied")


@pytest.mark.parametrize("stage", [1, 2])
def test_tied_weights(run_native: Runner, stage: int) -> None:
    run_native(train_tied, stage)


class MasterReference:
    """What float32 copies of 16-bit parameters come to, on whole parameters in one process."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, **options)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)


def train_with_masters(stage: Any, dtype: torch.dtype) -> None:
    rank, _ = joined()
    module = small_model(dtype)
    ours, theirs = (
        pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=0.002) for _ in range(2)
    )
    optimizer = pydist.ShardedOptimizer(ours, torch.optim.AdamW, stage=stage, lr=1e-3)
    reference = MasterReference(theirs, lr=1e-3)
    for step in range(6):
        for model, act in ((ours, optimizer.step), (theirs, reference.step)):
            for parameter in model.parameters():
                parameter.grad = None
            model(batch(rank, 6, 10, step=step, dtype=dtype)).square().mean().backward()
            act()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_same(a.detach(), b.detach(), name, exact=True if is_exact() else None)
    without = pydist.ShardedOptimizer(
        pydist.DataParallel(copy.deepcopy(module)), torch.optim.SGD, master_weights=False, lr=0.1
    )
    assert not any(
        "master" in r.values for s in without.sharded_state().parameters.values() for r in s.ranges
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_master_weights(run_native: Runner, stage: int) -> None:
    run_native(train_with_masters, stage, torch.bfloat16)
    run_native(train_with_masters, stage, torch.float16)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x).square().mean() for head in self.heads]


def step_between_backwards(stage: int) -> None:
    """What a step leaves alone, a later backward of the same forward may still use."""
    torch.manual_seed(3)
    # In one bucket.
    twins = Twins(TwoHeads(), torch.optim.AdamW, cap_mb=1, stage=stage, options={"lr": 0.1})
    for number in range(3):
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            for loss in model(batch(twins.rank, 6, 10, step=number, dtype=torch.float32)):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        twins.check("a step for each head")
    # What the step changes, it still may not.
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        optimizer.zero_grad()
        loss, _ = model(batch(twins.rank, 6, 10, dtype=torch.float32))
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    # A rank whose backward has raised waits for nobody, and must not leave those that still do.
    pydist.barrier()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_between_backwards(run_sharded: Runner, stage: int) -> None:
    run_sharded(step_between_backwards, stage)


def take_back_a_stray() -> None:
    """Whose values the step gathers, without a gradient: what was saved of them is of no use."""
    torch.manual_seed(3)
    model = pydist.DataParallel(TwoHeads(), bucket_cap_mb=1)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    first, second = model(batch(joined()[0], 6, 10, dtype=torch.float32))
    first.backward()
    weight = model.module.heads[1][2].weight
    weight.data = torch.ones(1, 8)
    optimizer.step()
    assert torch.equal(weight, torch.ones(1, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_stray_between_backwards(run_native: Runner) -> None:
    run_native(take_back_a_stray)


def use_plain_parameters() -> None:
    """Gradients that something else has averaged: torch's wrapper, or nobody."""
    rank, _ = joined()
    module = small_model(torch.float64)
    ours, theirs = (nn.parallel.DistributedDataParallel(copy.deepcopy(module)) for _ in range(2))
    groups = [
        {"params": [p for n, p in ours.named_parameters() if "weight" in n], "lr": 0.1},
        {"params": [p for n, p in ours.named_parameters() if "weight" not in n], "momentum": 0.5},
    ]
    optimizer = pydist.ShardedOptimizer(groups, torch.optim.SGD, lr=0.01)
    whole = torch.optim.SGD(
        [
            {
                **group,
                "params": [p for n, p in theirs.named_parameters() if ("weight" in n) == (i == 0)],
            }
            for i, group in enumerate(groups)
        ],
        lr=0.01,
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.3) for o in (optimizer, whole)]
    for step in range(5):
        for model, stepping, scheduler in zip(
            (ours, theirs), (optimizer, whole), schedulers, strict=True
        ):

            def closure(model: Any = model, stepping: Any = stepping, step: int = step) -> Tensor:
                stepping.zero_grad(set_to_none=step % 2 == 0)
                loss: Tensor = model(batch(rank, 4, 10, step=step)).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                return loss

            loss: Any = stepping.step(closure)  # type: ignore[arg-type]
            assert loss is not None
            scheduler.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(a.detach(), b.detach(), "plain")
    assert optimizer.param_groups[1]["lr"] == whole.param_groups[1]["lr"] != 0.01


def test_parameters_of_other_wrappers(run_sharded: Runner) -> None:
    run_sharded(use_plain_parameters)


def train_otherwise_wrapped() -> None:
    """In 16 bits on the way; sums; two optimizers, of which one has no shards."""
    for wrapping in ({"compress": "bf16"}, {"reduction": "sum"}):
        for stage in (1, 2):
            twins = Twins(
                small_model(), torch.optim.SGD, options={"lr": 1e-3}, wrapping=wrapping, stage=stage
            )
            for step in range(3):
                twins.step(step)
            twins.check(f"{wrapping}, stage {stage}")
    rank, _ = joined()
    ours, theirs = (pydist.DataParallel(small_model(), bucket_cap_mb=0.002) for _ in range(2))
    split = list(ours.parameters())
    optimizers = [
        [
            pydist.ShardedOptimizer(split[:3], torch.optim.Adam, stage=2),
            torch.optim.SGD(split[3:5], lr=0.1),
            pydist.ShardedOptimizer(split[5:], torch.optim.SGD, lr=0.1),
        ],
        [
            torch.optim.Adam(list(theirs.parameters())[:3]),
            torch.optim.SGD(list(theirs.parameters())[3:], lr=0.1),
        ],
    ]
    for step in range(4):
        for model, stepping in zip((ours, theirs), optimizers, strict=True):
            model(batch(rank, 6, 10, step=step, dtype=torch.float32)).square().mean().backward()
            for optimizer in stepping:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(a.detach(), b.detach(), "several optimizers")


def test_wires_sums_and_several_optimizers(run_sharded: Runner) -> None:
    run_sharded(train_otherwise_wrapped)


def be_alone() -> None:
    for stage in (1, 2):
        train_many_kinds(stage)
        clip_and_scale(stage)
        unfreeze(stage)
        save_and_load(stage)
    use_plain_parameters()
    fail_alone()
    hook_once()


def test_one_rank() -> None:
    with Ranks(1, {"PYDIST_BACKEND": "native"}) as ranks:
        ranks.run(be_alone, timeout=LIMIT_S)
