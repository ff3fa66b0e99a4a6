"""Optimizers whose model had layers replaced, inserted or deleted since they were made."""

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from torch.optim import AdamW
from training import LIMIT_S, batch, joined

import pydist
from pydist.parallel.names.state_names import distinct_names

pytestmark = pytest.mark.timeout(60)

# The stage, or torch's own class.
WHOLE, STAGE_1, STAGE_2 = KINDS = 0, 1, 2

ROWS = 12
CHANGE_AT, SAVE_AT, END = 3, 6, 9

# Sums of float64 in another order.
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def two(backend: str) -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.neck = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Tanh())
        self.head = nn.Linear(9, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.neck(x))
        return out


Change = Callable[[Net], nn.Module | None]

# Each returns the layer that is new.


def another_head(net: Net) -> nn.Module:
    net.head = nn.Linear(9, 5).double()
    return net.head


def head_of_the_same_shape(net: Net) -> nn.Module:
    net.head = nn.Linear(9, 3).double()
    return net.head


def inserted_layer(net: Net) -> nn.Module:
    """Those behind it have other names now."""
    net.neck.insert(1, nn.Linear(9, 9).double())
    return net.neck[1]


def deleted_layer(net: Net) -> None:
    """The one behind it has its name now."""
    del net.neck[1]


CHANGES = everyday(another_head, inserted_layer, thorough=(head_of_the_same_shape, deleted_layer))


def changed(model: Any, optimizer: torch.optim.Optimizer, change: Change) -> None:
    """Changes the model, and adds what is new to the optimizer, with a rate of its own."""
    torch.manual_seed(1)
    if (layer := change(getattr(model, "module", model))) is not None:
        optimizer.add_param_group({"params": parted(model, layer)[1], "lr": 2e-2})


def parted(model: nn.Module, layer: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of the model that are not a layer's, and those that are."""
    own = {id(p) for p in layer.parameters()}
    named = list(model.named_parameters())
    return [[n for n in named if (id(n[1]) in own) == is_own] for is_own in (False, True)]


def optimizer_of(kind: int, params: Iterable[Any]) -> torch.optim.Optimizer:
    if kind == WHOLE:
        return AdamW(params, lr=1e-2)
    return pydist.ShardedOptimizer(params, AdamW, stage=kind, lr=1e-2)  # type: ignore[arg-type]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Trains; returns the losses, of a wrapped model the mean over the ranks."""
    losses = []
    is_shared = isinstance(model, pydist.DataParallel)
    for step in steps:
        x = batch(0, ROWS, 4, step=step)
        share = x.chunk(pydist.world_size())[pydist.rank()] if is_shared else x
        loss = model(share).sin().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(pydist.metrics.mean(loss) if is_shared else float(loss.detach()))
    return losses


def trained(kind: int, change: Change) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As it is when the checkpoint is saved."""
    model = pydist.DataParallel(Net(), bucket_cap_mb=0.0005)
    optimizer = optimizer_of(kind, model.named_parameters())
    run(model, optimizer, range(CHANGE_AT))
    changed(model, optimizer, change)
    run(model, optimizer, range(CHANGE_AT, SAVE_AT))
    return model, optimizer


def in_plain_torch(change: Change) -> tuple[list[float], dict[str, Any]]:
    """What all others are to come to, computed by each rank for itself; the state on the way."""
    model = Net()
    optimizer = optimizer_of(WHOLE, model.named_parameters())
    run(model, optimizer, range(CHANGE_AT))
    changed(model, optimizer, change)
    run(model, optimizer, range(CHANGE_AT, SAVE_AT))
    state = copy.deepcopy(optimizer.state_dict())
    return run(model, optimizer, range(SAVE_AT, END)), state


def save_and_go_back(folder: str, kind: int, change: Change) -> None:
    """Into the objects that were saved, by files and by dictionaries."""
    joined()
    expected, torchs = in_plain_torch(change)
    model, optimizer = trained(kind, change)
    pydist.save(folder, model=model, optimizer=optimizer)
    values = copy.deepcopy(model.state_dict())
    own = copy.deepcopy(optimizer.state_dict())

    def from_own() -> None:
        model.load_state_dict(values)
        optimizer.load_state_dict(own)

    def from_torchs() -> None:
        pydist.checkpoint.from_torch(
            {"model": values, "optimizer": torchs}, model=model, optimizer=optimizer
        )

    def from_files() -> None:
        pydist.load(folder, model=model, optimizer=optimizer)

    losses = run(model, optimizer, range(SAVE_AT, END))
    assert losses == pytest.approx(expected, rel=ROUNDING)
    for load in (from_own, from_torchs, from_files):
        load()
        again = run(model, optimizer, range(SAVE_AT, END))
        assert again == pytest.approx(expected, rel=ROUNDING), load.__name__


def resume(folder: str, kind: int, change: Change) -> None:
    """In a program that has built the changed model, of which the optimizer is."""
    joined()
    expected, _ = in_plain_torch(change)
    net = Net()
    layer = change(net)
    model = pydist.DataParallel(net)
    groups = [list(model.named_parameters())] if layer is None else parted(model, layer)
    optimizer = optimizer_of(kind, [{"params": group} for group in groups])
    pydist.load(folder, model=model, optimizer=optimizer)
    if layer is not None:
        assert optimizer.param_groups[1]["lr"] == 2e-2
    losses = run(model, optimizer, range(SAVE_AT, END))
    assert losses == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_going_back_and_on(two: Ranks, three: Ranks, kind: int, change: Any, tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    two.run(save_and_go_back, folder, kind, change, timeout=LIMIT_S)
    three.run(resume, folder, kind, change, timeout=LIMIT_S)
    # The other way of sharding.
    two.run(resume, folder, STAGE_2 - kind, change, timeout=LIMIT_S)


def replace_twice(folder: str, kind: int) -> None:
    """So that one group has no parameter left; what has gone keeps its state."""
    joined()
    model, optimizer = trained(kind, head_of_the_same_shape)
    changed(model, optimizer, head_of_the_same_shape)
    run(model, optimizer, range(1))
    pydist.save(folder, model=model, optimizer=optimizer)
    expected = run(model, optimizer, range(SAVE_AT, END))
    pydist.load(folder, model=model, optimizer=optimizer)
    assert run(model, optimizer, range(SAVE_AT, END)) == expected
    if kind == WHOLE:
        steps = [
            [int(optimizer.state[p]["step"]) for p in g["params"]] for g in optimizer.param_groups
        ]
        assert steps == [[10] * 6 + [3] * 2, [3] * 2, [4] * 2]

    net = Net()
    again = pydist.DataParallel(net)
    groups = [{"params": group} for group in parted(again, net.head)]
    optimizer = optimizer_of(kind, groups)
    pydist.load(folder, model=again, optimizer=optimizer)
    losses = run(again, optimizer, range(SAVE_AT, END))
    assert losses == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_without_parameters(two: Ranks, kind: int, tmp_path: Path) -> None:
    two.run(replace_twice, str(tmp_path / "checkpoint"), kind, timeout=LIMIT_S)


def refuse(folder: str) -> None:
    """What is not to be left out in silence, on all ranks and before anything is written."""
    joined()
    for kind in (WHOLE, STAGE_1):
        model = pydist.DataParallel(Net())
        optimizer = optimizer_of(kind, model.named_parameters())
        model.module.load_state_dict(Net().state_dict(), assign=True)
        with pytest.raises(pydist.InvalidUsage, match=r"none of the optimizer's .* any more"):
            pydist.save(folder, model=model, optimizer=optimizer)
        assert not Path(folder).exists()
        # On one rank alone, a layer was taken out, or an optimizer made of less.
        model = pydist.DataParallel(Net())
        optimizer = optimizer_of(kind, model.named_parameters())
        run(model, optimizer, range(1))
        if pydist.rank() == 1:
            model.module.head = nn.Identity()
        with pytest.raises(pydist.InvalidUsage, match=r"head\.bias on rank 0 and not on rank 1"):
            pydist.save(folder, optimizer=optimizer, model=model)
        assert not Path(folder).exists()
    # One group of all, where there were two.
    model, optimizer = trained(STAGE_1, another_head)
    pydist.save(folder, model=model, optimizer=optimizer)
    net = Net()
    another_head(net)
    model = pydist.DataParallel(net)
    with pytest.raises(pydist.InvalidUsage, match=r"\[6, 2\] and \[8\] parameters"):
        pydist.load(folder, model=model, optimizer=optimizer_of(STAGE_1, model.parameters()))


def test_what_is_refused(two: Ranks, tmp_path: Path) -> None:
    two.run(refuse, str(tmp_path / "checkpoint"), timeout=LIMIT_S)


def keep_what_is_beside(folder: str, kind: int) -> None:
    """A loss has parameters as well, by names that the model has too: they are kept apart."""
    joined()

    def made() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model, weigh = nn.Linear(4, 1).double(), nn.Linear(1, 1).double()
        named = [*model.named_parameters(), *weigh.named_parameters()]
        return model, weigh, optimizer_of(kind, named)

    def go_on(model: nn.Module, weigh: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        return run(nn.Sequential(model, weigh), optimizer, range(3))

    model, weigh, optimizer = made()
    go_on(model, weigh, optimizer)
    pydist.save(folder, model=model, optimizer=optimizer, extra=weigh.state_dict())
    own = copy.deepcopy(optimizer.state_dict())
    values = copy.deepcopy([model.state_dict(), weigh.state_dict()])
    expected = go_on(model, weigh, optimizer)
    model, weigh, optimizer = made()
    weigh.load_state_dict(pydist.load(folder, model=model, optimizer=optimizer))
    assert go_on(model, weigh, optimizer) == expected
    model.load_state_dict(values[0])
    weigh.load_state_dict(values[1])
    optimizer.load_state_dict(own)
    assert go_on(model, weigh, optimizer) == expected


@pytest.mark.parametrize("kind", [WHOLE, STAGE_1])
def test_names_that_are_given_twice(two: Ranks, kind: int, tmp_path: Path) -> None:
    two.run(keep_what_is_beside, str(tmp_path / "checkpoint"), kind, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("known", "own", "expected"),
    [
        ([None, None], ["a", "b"], ["a", "b"]),
        (["b", None], ["a", "b"], ["b", "b (1)"]),
        ([None, "b"], ["b", "b"], ["b (0)", "b"]),
        ([None, None, None], ["a", "a", "a"], ["a", "a (1)", "a (2)"]),
        (["a (1)", None, "a"], ["x", "a", "x"], ["a (1)", "a (1) (1)", "a"]),
    ],
)
def test_names_are_distinct(known: list[str | None], own: list[str], expected: list[str]) -> None:
    assert distinct_names(known, own) == expected
