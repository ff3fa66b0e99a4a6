"""One process on several devices trains as one device does on the whole batch."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import LIMIT_S, TIME_LIMIT, Runner, assert_like_reference, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT

PAIR: list[Any] = ["cpu", torch.device("cpu")]


class Net(nn.Module):
    """A layer used twice, one never used, one frozen, and several kinds of outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.fc = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.never = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)
        self.double()
        self.seen = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        self.seen = len(x)
        y = self.fc(self.fc(x).tanh() + self.frozen(x))
        return {"out": (self.out(y) * scale, [y.square().sum(1)]), "none": None}


def loss_of(outputs: dict[str, Any]) -> Tensor:
    first, (second,) = outputs["out"]
    loss: Tensor = (first.sin().squeeze(1) + second).mean()
    return loss


# The rows of each rank's batch in each step: cut evenly and not, and too few for all devices.
ROWS = [4, 5, 1, 3, 2]


def train_beside(devices: int, kind: str) -> None:
    rank, size = joined()
    reference = Net()
    model = pydist.DataParallel(Net(), device_ids=["cpu"] * devices)
    if kind == "sharded":
        ours: Any = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    else:
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step, rows in enumerate(ROWS):
        counts = [rows + (r if kind == "weighted" else 0) for r in range(size)]
        micro = 2 if kind == "accumulated" else 1
        ours.zero_grad()
        theirs.zero_grad()
        for part in range(micro):
            batches = [batch(r, n, 4, step=10 * step + part) for r, n in enumerate(counts)]
            weight = (
                model.weighted(counts[rank]) if kind == "weighted" else contextlib.nullcontext()
            )
            with model.no_sync(enabled=part + 1 < micro), weight:
                loss_of(model(batches[rank], scale=2.0)).backward()
            loss_of(reference(torch.cat(batches), scale=2.0)).backward()
        ours.step()
        theirs.step()
        assert model.module.seen == -(-counts[rank] // devices)  # the first replica's
    if kind == "sharded":
        ours.finish()
    assert_like_reference(model, reference, 1e-10, gradients=kind != "sharded")
    assert model.never.weight.grad is None


@pytest.mark.parametrize("kind", ["plain", "weighted", "accumulated", "sharded"])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_those_of_one_device(
    sizes: Callable[[int], Ranks], size: int, kind: str
) -> None:
    sizes(size).run(train_beside, 2 if kind == "plain" else 3, kind, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def sizes(backend: str) -> Any:
    with (
        Ranks(1, {"PYDIST_BACKEND": backend}) as one,
        Ranks(2, {"PYDIST_BACKEND": backend}) as two,
    ):
        yield lambda size: one if size == 1 else two


def train_batch_norm() -> None:
    """Each replica normalizes its share; the first one's statistics stay."""
    rank, size = joined()
    build = lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double()  # noqa: E731
    torch.manual_seed(1)
    reference = build()
    model = pydist.DataParallel(copy.deepcopy(reference), device_ids=PAIR)
    for step in range(3):
        shares = [batch(r, 7, 4, step=step).chunk(2) for r in range(size)]
        model.zero_grad()
        reference.zero_grad()
        model(torch.cat(shares[rank])).square().mean().backward()
        kept = None
        for own in shares:
            first = reference(own[0])
            kept = copy.deepcopy(reference[1].state_dict()) if kept is None else kept
            (torch.cat([first, reference(own[1])]).square().mean() / size).backward()
        assert kept is not None
        for name in ("running_mean", "running_var", "num_batches_tracked"):  # rank 0's
            reference[1].get_buffer(name).copy_(kept[name])
        assert_like_reference(model, reference)
        with torch.no_grad():
            for net in (model, reference):
                for parameter in net.parameters():
                    parameter.sub_(0.1 * parameter.grad)
    model.eval()
    reference.eval()
    assert_near(model(batch(0, 5, 4)), reference(batch(0, 5, 4)))


def test_batch_norm_keeps_the_first_replicas_statistics(sizes: Callable[[int], Ranks]) -> None:
    sizes(2).run(train_batch_norm, timeout=LIMIT_S)


class Own(nn.Module):
    """Whose forward is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2).double()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.fc, *args, **kwargs)


def wrapped(function: Callable[..., Any], **arguments: Any) -> pydist.DataParallel:
    return pydist.DataParallel(Own(function), device_ids=PAIR, **arguments)


@dataclasses.dataclass(frozen=True)
class Pieces:
    x: Tensor
    name: str = "x"


@dataclasses.dataclass
class Results:
    y: Tensor
    more: Any = None


Pair = collections.namedtuple("Pair", "first second")


def nest() -> None:
    joined()
    x = batch(0, 5, 2)
    seen = []

    def spread(fc: nn.Module, pieces: Pieces, pair: Any, table: Any, *, flag: bool) -> Any:
        seen.append((len(pieces.x), len(pair.first), len(table["t"][0]), flag, pieces.name))
        y = fc(pieces.x)
        return Results(y, Pair(y.mean(), collections.OrderedDict(a=[y], b=None)))

    model = wrapped(spread)
    table = collections.defaultdict(list, t=[x])
    got = model(Pieces(x), Pair(x, 3), table, flag=True)
    assert sorted(seen) == [(2, 2, 2, True, "x"), (3, 3, 3, True, "x")]
    assert isinstance(got.more, Pair)
    y = model.fc(x)
    assert_near(got.y, y)
    assert_near(got.more.first, torch.stack([y[:3].mean(), y[3:].mean()]))
    assert_near(got.more.second["a"][0], y)
    assert got.more.second["b"] is None
    # Without a tensor there is nothing to cut, so the first device alone computes.
    assert wrapped(lambda fc, n: fc(x[:n]))(3).shape == (3, 2)
    # Along another dimension.
    along = wrapped(lambda fc, x: fc(x.t()).t(), dim=1)
    assert_near(along(x.t()), along.fc(x).t())
    assert_near(wrapped(lambda fc, x: fc(x))(x[:0]), y[:0])


def test_nested_arguments_and_outputs(run: Runner) -> None:
    run(nest)


def refuse_what_cannot_be_cut_or_joined() -> None:
    joined()
    x = batch(0, 4, 2)
    packed = nn.utils.rnn.pack_sequence([x, x])
    cases: list[tuple[Callable[..., Any], Any, str]] = [
        (lambda fc, x, y: fc(x), (x, x[:1]), "argument 1 of forward has 1 rows along dim=0"),
        # As many pieces, of rows that do not belong together.
        (lambda fc, x, y: fc(x), (x, x.repeat(2, 1)), "argument 1 of forward has 8 rows"),
        (lambda fc, x: x, (x.sum(),), "argument 0 of forward has 0 dimensions, and can't be cut"),
        (lambda fc, x: x, ([packed],), r"argument 0\[0\] is a PackedSequence"),
        (
            lambda fc, x: {"n": [len(x)]},
            (x,),
            r"output of forward at \['n'\]\[0\] is an int, which",
        ),
        (
            lambda fc, x: {"y": fc(x)[: 1 + int(x[0, 0] == 7)].flatten()[None]},
            (torch.where(torch.arange(4)[:, None] == 2, 7.0, x),),
            r"at \['y'\] is \(1, 2\) torch.float64 on cpu in the first replica and \(1, 4\)",
        ),
        (
            lambda fc, x: {str(int(x[0, 0] == 7)): fc(x)},
            (torch.where(torch.arange(4)[:, None] == 2, 7.0, x),),
            r"has \['0'\] in the first replica and \['1'\] in replica 1",
        ),
        (
            lambda fc, x: fc(x) if x[0, 0] == 7 else None,
            (torch.where(torch.arange(4)[:, None] == 2, 7.0, x),),
            "output of forward is None.* in the first replica and .*Tensor in replica 1",
        ),
    ]
    for function, arguments, message in cases:
        with pytest.raises(pydist.InvalidUsage, match=message):
            wrapped(function)(*arguments)
    with pytest.raises(pydist.InvalidUsage, match=r"has 1 dimensions, .* joined along dim=1"):
        wrapped(lambda fc, x: x.sum(1), dim=1)(x)


def test_what_cannot_be_cut_or_joined_is_named(run: Runner) -> None:
    run(refuse_what_cannot_be_cut_or_joined)


def refuse_modules() -> None:
    joined()
    frozen = pydist.DataParallel(nn.Linear(2, 2))
    frozen.requires_grad_(False)
    for part, message in (
        (frozen, "1 of the module is a pydist.DataParallel, which can't be copied"),
        (pydist.SyncBatchNorm(2), "1 of the module is a SyncBatchNorm"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=message):
            pydist.DataParallel(nn.Sequential(nn.Linear(2, 2), part), device_ids=PAIR)


def test_modules_that_cannot_be_copied_are_refused(run: Runner) -> None:
    run(refuse_modules)


def compute_in_other_ways() -> None:
    joined()
    x = batch(0, 5, 2)
    for is_reentrant in (False, True):
        model = wrapped(lambda fc, x, r=is_reentrant: checkpoint(fc, x, use_reentrant=r))
        reference = nn.Linear(2, 2).double()
        reference.load_state_dict(model.fc.state_dict())
        for net in (model, reference):
            net(x.clone().requires_grad_()).sin().mean().backward()
        assert_like_reference(model, reference)
    # A copy has the same devices.
    seen = []
    twin = copy.deepcopy(wrapped(lambda fc, x: seen.append(len(x)) or fc(x)))
    with torch.no_grad():
        assert_near(twin(x), twin.fc(x))
    assert twin.device_ids == [torch.device("cpu")] * 2
    compiled: Any = torch.compile(wrapped(lambda fc, x: fc(x).tanh()), backend="eager")
    y = compiled(x)
    assert_near(y, compiled.fc(x).tanh())
    y.sum().backward()
    inside = pydist.DataParallel(
        torch.compile(nn.Linear(2, 2).double(), backend="eager"),  # type: ignore[arg-type]
        device_ids=PAIR,
    )
    y = inside(x)
    assert_near(y, inside.module(x))
    y.sum().backward()
    assert inside.weight.grad is not None


def test_checkpoints_copies_and_compiled_modules(sizes: Callable[[int], Ranks]) -> None:
    sizes(2).run(compute_in_other_ways, timeout=LIMIT_S)
