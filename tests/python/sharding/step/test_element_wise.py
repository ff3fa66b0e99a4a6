"""Which optimizers `pydist.ShardedOptimizer` and `pydist.plan` refuse after trying them out."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import TIME_LIMIT, Runner, joined
from twins import Twins, small_model

import pydist
from pydist.sharding.step.element_wise import ELEMENT_WISE, require_element_wise

pytestmark = TIME_LIMIT


class Plain(torch.optim.Optimizer):
    """What the stand-ins below have in common: one rule for each parameter."""

    def __init__(self, params: Any, lr: Any = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        average.mul_(0.9).add_(p.grad, alpha=0.1)
        state["step"] = state.get("step", 0) + 1
        p.add_(average / (1 - 0.9 ** state["step"]), alpha=-float(group["lr"]))


class TrustRatio(Plain):
    """As LAMB."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = p.grad / (p.grad.abs() + 1e-8) + 0.01 * p
        p.sub_(update * (p.norm() / update.norm()).clamp(0, 10), alpha=float(group["lr"]))


class Clipping(Plain):
    """Bounds what is large beside the past, which most gradients are not."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        norm = p.grad.norm()
        scale = (3 * state.get("norm", norm) / norm).clamp(max=1)
        state["norm"] = 0.9 * state.get("norm", norm) + 0.1 * norm
        p.sub_(p.grad * scale, alpha=float(group["lr"]))


class RowsAndColumns(Plain):
    """As Adafactor, SM3, CAME."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = p.grad.square()
        if p.dim() > 1:
            square = square.flatten(1)
            square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
        p.sub_(p.grad / square.view_as(p).sqrt(), alpha=float(group["lr"]))


class FactorsLarge(RowsAndColumns):
    """As others do from 16 or 128 rows on."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if min(p.shape) < 128:
            Plain.update(self, p, state, group)
        else:
            super().update(p, state, group)


class Centred(Plain):
    """As gradient centralisation, of convolutions alone."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = p.grad - p.grad.mean((1, 2, 3), keepdim=True) if p.dim() > 3 else p.grad
        p.sub_(grad, alpha=float(group["lr"]))


class Projected(Plain):
    """As AdamP: without what is along the values, of what normalisation follows."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = p.grad.sign()
        if p.dim() > 1:
            rows, own = p.flatten(1), p.grad.flatten(1)
            cosines = nn.functional.cosine_similarity(rows, own, dim=1).abs()
            if cosines.max() < 0.1 / own.shape[1] ** 0.5:
                along = (rows * update.flatten(1)).sum(1, keepdim=True) / rows.square().sum()
                update = update - (along * rows).view_as(p)
        p.sub_(update, alpha=float(group["lr"]))


class Distance(Plain):
    """As Prodigy and D-Adaptation: one estimate of how far to go, of all parameters."""

    def step(self, closure: Any = None) -> Any:
        inner, total = 0.0, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                start = self.state[p].setdefault("start", p.detach().clone())
                inner += float((p.grad * (start - p.detach())).sum())
                total += float(p.grad.abs().sum())
        for group in self.param_groups:
            for p in group["params"]:
                far = self.state[p]["far"] = max(self.state[p].get("far", 1e-6), inner / total)
                p.data.sub_(p.grad.sign(), alpha=far * float(group["lr"]))


class MatricesOnly(Plain):
    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() != 2:
            raise ValueError("matrices, please")
        super().update(p, state, group)


class Single(Plain):
    """That takes only float32."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dtype != torch.float32:
            raise TypeError("float32, please")
        p.sub_(p.grad / p.grad.norm(), alpha=float(group["lr"]))


class NoNumbers(Plain):
    """Of which pieces make no numbers."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        ratio = torch.tensor(float(p.dim() - 1))
        p.sub_(p.grad * (ratio / ratio), alpha=float(group["lr"]))


class TrainedOnly(Plain):
    """Leaves what does not require a gradient, as no shard does."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.requires_grad:
            super().update(p, state, group)


class OneOfTwo(Plain):
    """What it does, its groups say."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group.get("normalised"):
            p.sub_(p.grad / p.grad.norm(), alpha=float(group["lr"]))
        else:
            super().update(p, state, group)


TORN = (
    TrustRatio,
    Clipping,
    RowsAndColumns,
    FactorsLarge,
    Centred,
    Projected,
    Distance,
    Single,
    NoNumbers,
    TrainedOnly,
)


@pytest.mark.parametrize("kind", TORN)
def test_wholes(kind: type[Plain]) -> None:
    for lr in (1e-2, 0.0, torch.tensor(0.0)):
        with pytest.raises(pydist.InvalidUsage, match=rf"{kind.__name__} can't update shards.*use"):
            require_element_wise(kind, {"lr": lr})
    with pytest.raises(pydist.InvalidUsage, match=rf"{kind.__name__} can't update shards"):
        pydist.plan(nn.Linear(3, 3), 2, optimizer=kind)


class Scales(Plain):
    """As 8-bit classes keep for each block, of what has 4096 elements or more."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, state, group)
        if p.numel() >= 4096:
            blocks = p.flatten().split(256)
            state["scales"] = group["form"]([block.abs().max() for block in blocks])


class Columns(Plain):
    """A state of as many elements, which a flat one can't replace."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, state, group)
        state["column"] = p.reshape(-1, 1).clone()


def in_one_list(values: list[Tensor]) -> list[Tensor]:
    return [torch.stack(values)]


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (Scales, {"form": torch.stack}, "scales"),
        (Scales, {"form": in_one_list}, "scales"),
        (Columns, {}, "column"),
    ],
)
def test_state_of_no_element(kind: type[Plain], options: dict[str, Any], key: str) -> None:
    text = rf"{kind.__name__} can't update shards: .*keeps '{key}' in its state.*; use one of"
    with pytest.raises(pydist.InvalidUsage, match=text):
        require_element_wise(kind, options)
    with pytest.raises(pydist.InvalidUsage, match=text):
        pydist.plan(nn.Linear(3, 3), 2, optimizer=kind, **options)


def test_names() -> None:
    for name in (
        "AdafactorBigVision",
        "FusedLAMB",
        "lars8bit",
        "MuonWithAuxAdam",
        "fused_lamb",
        "DASH",
    ):
        with pytest.raises(pydist.InvalidUsage, match=f"{name} .* so it can't update shards"):
            require_element_wise(type(name, (Plain,), {}), {})
    for name in ("LambdaAdam", "Soapy", "NotMuon", "Dashing"):
        require_element_wise(type(name, (Plain,), {}), {})


def test_that_a_refused_class_is_not_tried_further() -> None:
    """What has a matrix of all elements of a flat piece would take very long with large ones."""
    largest = 0

    class Watched(TrustRatio):
        def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
            nonlocal largest
            largest = max(largest, p.numel())
            super().update(p, state, group)

    with pytest.raises(pydist.InvalidUsage, match="Watched can't"):
        require_element_wise(Watched, {})
    assert largest == 96


def test_pieces_that_raise() -> None:
    with pytest.raises(pydist.InvalidUsage, match=r"raise ValueError: matrices, please; use one"):
        require_element_wise(MatricesOnly, {})


def test_options_of_groups() -> None:
    require_element_wise(OneOfTwo, {})
    require_element_wise(OneOfTwo, {}, [{}, {"lr": 1.0}])
    with pytest.raises(pydist.InvalidUsage, match="OneOfTwo can't update shards: with these"):
        require_element_wise(OneOfTwo, {}, [{}, {"normalised": True}])


def count_in_defaults(group: dict[str, Any]) -> None:
    group["count"] += 1


def count_unannounced(group: dict[str, Any]) -> None:
    group["count"] = group.get("count", 0) + 1


def count_in_a_tensor(group: dict[str, Any]) -> None:
    group["tensor"].add_(1)


def count_within(group: dict[str, Any]) -> None:
    group["nested"]["list"][0].append(1)


class Counting(Plain):
    """That has in its groups what others have with the parameters."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["how"](group)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        (count_in_defaults, "count"),
        (count_unannounced, "count"),
        (count_in_a_tensor, "tensor"),
        (count_within, "nested"),
    ],
)
def test_state_in_groups(how: Callable[[dict[str, Any]], None], key: str) -> None:
    given = {"how": how, "tensor": torch.zeros(2), "nested": {"list": [[]]}}
    given |= {"count": 0} if how is count_in_defaults else {}
    text = rf"Counting keeps state in its parameter groups.*changes '{key}'.*optimizer\.state"
    with pytest.raises(pydist.InvalidUsage, match=text):
        require_element_wise(Counting, given)
    with pytest.raises(pydist.InvalidUsage, match=text):
        pydist.plan(nn.Linear(3, 3), 2, optimizer=Counting, **given)
    assert torch.equal(given["tensor"], torch.zeros(2))
    assert given["nested"] == {"list": [[]]}


class HasModes(Counting):
    """As schedule-free classes: steps in the mode for training only."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> Any:
        if not self.is_training:
            raise RuntimeError("call train() first")
        super().step()


def test_state_in_groups_of_classes_with_modes() -> None:
    with pytest.raises(pydist.InvalidUsage, match="HasModes keeps state in its parameter groups"):
        require_element_wise(HasModes, {"how": count_in_defaults, "count": 0})


class CountsOnDevice(Counting):
    """That cannot be tried out."""

    is_there = False

    def step(self, closure: Any = None) -> Any:
        if not self.is_there:
            raise RuntimeError("on the GPU, please")
        super().step()


class CommonState(Plain):
    def step(self, closure: Any = None) -> Any:
        super().step()
        self.state["all"]["count"] = 1  # type: ignore[index]


def test_state_of_no_parameter() -> None:
    with pytest.raises(pydist.InvalidUsage, match=r"CommonState keeps state .* of no parameter"):
        require_element_wise(CommonState, {})


class Noisy(Plain):
    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(p.grad + torch.randn_like(p), alpha=float(group["lr"]))


class NeedsClosure(Plain):
    def step(self, closure: Any) -> Any:
        return closure()


class NeedsDevice(Plain):
    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise RuntimeError("on the GPU, please")


class Divergent(Plain):
    """With values that are no numbers, there is nothing to compare."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.fill_(float("nan"))


class Warning(Plain):
    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        warnings.warn("not now", stacklevel=1)
        super().update(p, state, group)


class Renamed(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "kind", [Plain, Noisy, NeedsClosure, NeedsDevice, Divergent, Warning, Renamed, *ELEMENT_WISE]
)
def test_accepted(kind: type[torch.optim.Optimizer]) -> None:
    before = torch.get_rng_state()
    require_element_wise(kind, {})
    with torch.device("meta"):
        require_element_wise(kind, {"lr": 0.0}, [{}, {"lr": 0.5}])
    assert torch.equal(torch.get_rng_state(), before)


def test_derived_classes_with_all_options() -> None:
    for options in (
        {"amsgrad": True, "foreach": True},
        {"fused": True, "maximize": True},
        {"lr": torch.tensor(0.1), "weight_decay": 0.5},
    ):
        require_element_wise(Renamed, options)
    for base in ELEMENT_WISE:
        require_element_wise(type("Derived", (base,), {}), {})


def test_that_tested_classes_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("pydist.sharding.step.element_wise.try_in_pieces", fail)
    for kind in ELEMENT_WISE:
        require_element_wise(kind, {})
    with pytest.raises(pydist.InvalidUsage, match="optimizer_class is partial"):
        require_element_wise(functools.partial(Plain, lr=0.1), {})  # type: ignore[arg-type]


def refuse_and_train() -> None:
    """On all ranks, before they talk: whoever is refused may go on."""
    rank, _ = joined()
    parameter = nn.Parameter(torch.ones(3))
    for kind in (TrustRatio, Distance, Counting):
        with pytest.raises(pydist.InvalidUsage, match=f"{kind.__name__} "):
            pydist.ShardedOptimizer([parameter], kind, how=count_unannounced)
    with pytest.raises(pydist.InvalidUsage, match="OneOfTwo can't"):
        pydist.ShardedOptimizer([{"params": [parameter], "normalised": True}], OneOfTwo)
    optimizer = pydist.ShardedOptimizer([parameter], OneOfTwo)
    other: Tensor = nn.Parameter(torch.ones(3))
    with pytest.raises(pydist.InvalidUsage, match="OneOfTwo can't"):
        optimizer.add_param_group({"params": [other], "normalised": True})
    optimizer.add_param_group({"params": [other], "normalised": False})
    twins = Twins(small_model(), Plain)
    for number in range(3):
        twins.step(number)
    twins.check("plain")
    # What could not be tried out is refused at its first step, by the rank that has it.
    optimizer = pydist.ShardedOptimizer([parameter], CountsOnDevice, how=count_unannounced)
    pydist.barrier()  # where one rank raises while another is still making its own, that raises too
    CountsOnDevice.is_there = True
    parameter.grad = torch.ones(3)
    match = "CountsOnDevice keeps state in its parameter groups" + ("" if rank == 0 else "|rank 0")
    with pytest.raises(pydist.Error, match=match):  # noqa: PT012
        optimizer.step()
        _ = parameter + 1


def test_on_ranks(run: Runner) -> None:
    run(refuse_and_train)
