"""Checkpoints of a model's parts load into parts that are cut otherwise, or it is said why not."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks
from torch import nn

import pydist
import pydist.checkpoint.saving as saving
from pydist.checkpoint import from_parts
from pydist.checkpoint.dcp_files import Contents
from pydist.sharding.state.ranges import MASTER

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


def layers(first: int, stop: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    whole = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    return nn.Sequential(OrderedDict(list(whole.named_children())[first:stop]))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **options)


def saved(folder: Path, model: nn.Module, optimizer: Any, step: int | None = None) -> Path:
    """A checkpoint after a step, so that the optimizer has a state."""
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    pydist.save(folder, model=model, optimizer=optimizer, step=step)
    return folder


def test_parts_become_a_whole_and_other_parts(tmp_path: Path) -> None:
    models = [layers(0, 1), layers(1, 4)]
    optimizers = [adam(model, lr=0.25) for model in models]
    paths = [
        saved(tmp_path / str(number), model, optimizer)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    expected = {k: v for model in models for k, v in model.state_dict().items()}
    moments = {
        name: optimizer.state[parameter]["exp_avg"]
        for model, optimizer in zip(models, optimizers, strict=True)
        for name, parameter in model.named_parameters()
    }
    for first, stop in ((0, 4), (0, 2), (2, 4)):
        model = layers(first, stop, seed=1)
        optimizer = adam(model, lr=1.0)
        from_parts(paths, model=model, optimizer=optimizer)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])
            assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[name])
        assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_whole_is_one_part(tmp_path: Path) -> None:
    whole = layers(0, 4)
    path = saved(tmp_path / "whole", whole, adam(whole))
    part = layers(1, 3, seed=1)
    from_parts([path], model=part)
    assert torch.equal(part.get_parameter("2.weight"), whole.get_parameter("2.weight"))


def test_values_that_are_no_numbers_load_as_others_do(tmp_path: Path) -> None:
    whole = layers(0, 2)
    with torch.no_grad():
        whole.get_parameter("1.weight")[0, 0] = torch.nan
    path = saved(tmp_path / "whole", whole, adam(whole))
    part = layers(1, 2, seed=1)
    from_parts([path, path], model=part)
    loaded, expected = (module.get_parameter("1.weight") for module in (part, whole))
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0, equal_nan=True)


def refused(paths: list[Path], model: nn.Module, optimizer: Any, message: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    with pytest.raises(pydist.InvalidUsage, match=message):
        from_parts(paths, model=model, optimizer=optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    if optimizer is not None:
        assert optimizer.state_dict() == state  # of an optimizer that has not stepped: options


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first, second = layers(0, 2), layers(2, 4)
    a = saved(tmp_path / "a", first, adam(first, lr=0.1))
    b = saved(tmp_path / "b", second, adam(second, lr=0.2))
    renamed = nn.Sequential(*second)
    c = saved(tmp_path / "c", renamed, adam(renamed, lr=0.1))
    whole = layers(0, 4, seed=1)

    refused([], whole, None, "paths is empty")
    refused([a], whole, None, r"none of .*a has 2.weight: pass the checkpoints of all parts")
    refused([a, c], whole, None, r"a and .*c both have 0.weight, with .*names of the whole")
    refused([a, b], whole, adam(whole), r"lr=0.1 and 0.2: put them into groups of their own")
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
    refused([a, b], whole, sgd, "a is of Adam, and the optimizer is SGD")
    pydist.save(tmp_path / "d", model=second)
    refused([a, tmp_path / "d"], whole, adam(whole), "state of 2.weight; .*d was saved without an")
    refused([a, a], first, adam(first), "a and .*a both have the optimizer's state of 0.weight")
    with pytest.raises(pydist.InvalidUsage, match="model is a mapping, and from_parts loads one"):
        from_parts([a, b], model={"G": whole})  # type: ignore[arg-type]
    from_parts([a, tmp_path / "d"], model=whole)  # whose values alone are wanted

    for name, part, step in (("e", first, 10), ("f", second, 20)):
        saved(tmp_path / name, part, adam(part), step)
    refused([tmp_path / "e", tmp_path / "f"], whole, None, "after different steps, .* after 10, ")


def test_options_of_two_groups_go_on_in_two_groups(tmp_path: Path) -> None:
    def grouped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        weights = [p for n, p in named if n.endswith("weight")]
        biases = [p for n, p in named if n.endswith("bias")]
        return torch.optim.Adam(
            [{"params": weights, "weight_decay": 0.5}, {"params": biases}], **options
        )

    models = [layers(0, 2), layers(2, 4)]
    paths = [saved(tmp_path / str(i), m, grouped(m, lr=0.1)) for i, m in enumerate(models)]
    whole = layers(0, 4)
    optimizer = grouped(whole, lr=1.0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    from_parts(paths, model=whole, optimizer=optimizer)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1]


def test_a_frozen_part_has_no_optimizer_and_one_path_is_one_part(tmp_path: Path) -> None:
    frozen, second = layers(0, 2).requires_grad_(False), layers(2, 4)
    pydist.save(tmp_path / "a", model=frozen)
    b = saved(tmp_path / "b", second, adam(second))
    whole = layers(0, 4, seed=1)
    whole[:2].requires_grad_(False)
    for given in (list(whole.parameters()), list(whole[2:].parameters())):
        optimizer = torch.optim.Adam(given)
        from_parts([tmp_path / "a", b], model=whole, optimizer=optimizer)
        assert torch.equal(whole[0].weight, frozen.get_parameter("0.weight"))
        assert set(optimizer.state) == set(whole[2:].parameters())
    from_parts(str(b), model=layers(2, 4, seed=1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.embed(x))
        return y


def alone(name: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict([(name, nn.Linear(3, 3, bias=False))]))


def test_tied_weights(tmp_path: Path) -> None:
    tied = Tied()
    optimizer = adam(tied)
    path = saved(tmp_path / "tied", tied, optimizer)
    head = alone("head", 1)
    of_head = adam(head)
    from_parts([path], model=head, optimizer=of_head)
    weight = head.get_parameter("head.weight")
    assert torch.equal(weight, tied.embed.weight)
    moment = optimizer.state[tied.embed.weight]["exp_avg"]
    assert torch.equal(of_head.state[weight]["exp_avg"], moment)

    untied = [alone("embed", 2), alone("head", 3)]
    paths = [saved(tmp_path / str(i), m, adam(m)) for i, m in enumerate(untied)]
    refused(paths, Tied(), None, "one tensor as embed.weight and head.weight, and the parts have")


class WithBuffer(nn.Module):
    """A layer, and a table that all parts have."""

    def __init__(self, names: tuple[str, ...], value: float = 1.0) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))
        self.register_buffer("table", torch.full((3,), value))


def test_a_buffer_of_several_parts(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        pydist.save(tmp_path / name, model=WithBuffer((name,), value))
    from_parts([tmp_path / "a", tmp_path / "b"], model=WithBuffer(("a", "b"), 0.0))
    paths = [tmp_path / "a", tmp_path / "c"]
    refused(paths, WithBuffer(("a", "c")), None, "both have table, with different values")
    part = nn.Sequential(OrderedDict([("a", nn.Linear(3, 3))]))
    from_parts(paths, model=part)  # which does not want it


def sharded(
    seed: int, dtype: torch.dtype, lr: float = 1e-4
) -> tuple[pydist.DataParallel, pydist.ShardedOptimizer]:
    model = pydist.DataParallel(layers(0, 2, seed).to(dtype))
    return model, pydist.ShardedOptimizer(model, torch.optim.Adam, lr=lr)


def masters(optimizer: Any) -> list[torch.Tensor]:
    known = optimizer.sharded_state().parameters.values()
    return [piece.values[MASTER] for each in known for piece in each.ranges]


def test_float32_copies_of_16_bits_go_on(tmp_path: Path) -> None:
    model, optimizer = sharded(0, torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    pydist.save(tmp_path / "bf16", model=model, optimizer=optimizer)
    again, its = sharded(1, torch.bfloat16)
    from_parts([tmp_path / "bf16"], model=again, optimizer=its)
    assert masters(its)
    for found, expected in zip(masters(its), masters(optimizer), strict=True):
        assert torch.equal(found, expected)
    by_load, by_parts = layers(0, 2, 2), layers(0, 2, 3)
    pydist.load(tmp_path / "bf16", model=by_load, optimizer=adam(by_load))
    from_parts([tmp_path / "bf16"], model=by_parts)
    for name, value in by_load.state_dict().items():
        assert torch.equal(by_parts.state_dict()[name], value), name


def all_values(model: nn.Module, optimizer: pydist.ShardedOptimizer) -> dict[str, Any]:
    """Copies of all that loading may change on this rank."""
    state = optimizer.sharded_state()
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "state": {
            (name, piece.begin, key): copy.deepcopy(value)
            for name, known in state.parameters.items()
            for piece in known.ranges
            for key, value in piece.values.items()
        },
        "groups": copy.deepcopy(state.groups),
    }


def one_step(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
    optimizer.step()


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["groups"] == expected["groups"]
    for kind in ("model", "state"):
        torch.testing.assert_close(found[kind], expected[kind], rtol=0, atol=0)


class FailsLate:
    """Reads as checkpoints do, but for one of the reads, which fails as a broken disk does."""

    def __init__(self, at: int) -> None:
        self.at, self.reads = at, 0
        self._read = Contents.read_tensors

    def __call__(self, contents: Contents, wanted: Any) -> None:
        self.reads += 1
        if self.reads == self.at:
            raise OSError(5, "Input/output error")
        self._read(contents, wanted)

    def under_way(self) -> Any:
        return mock.patch.object(Contents, "read_tensors", lambda *args: self(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_read_that_fails_late_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = sharded(0, dtype)
    one_step(model, optimizer, dtype)
    pydist.save(tmp_path / "a", model=model, optimizer=optimizer)
    again, its = sharded(1, dtype, lr=1.0)
    one_step(again, its, dtype)
    before = all_values(again, its)
    at = 0
    while True:
        at += 1
        reading = FailsLate(at)
        with reading.under_way():
            try:
                from_parts([tmp_path / "a"], model=again, optimizer=its)
            except OSError:
                require_same(all_values(again, its), before)
                continue
        break
    # Of each parameter its value, and then at least its two moments.
    assert at > 3 * len(list(again.parameters()))
    require_same(all_values(again, its), all_values(model, optimizer))


def with_a_fault_on_one_rank(folder: str) -> list[str]:
    """What each of three calls raised, in which rank 1 finds a fault after all have begun."""
    pydist.init()
    place = Path(folder) / "part"
    model, optimizer = sharded(0, torch.bfloat16)
    one_step(model, optimizer, torch.bfloat16)
    pydist.save(place, model=model, optimizer=optimizer)
    saved_then = all_values(model, optimizer)
    told = []

    one_step(model, optimizer, torch.bfloat16)
    later = all_values(model, optimizer)
    write = saving._write_own

    def fails(*arguments: Any) -> Any:
        if pydist.rank() == 1:
            write(*arguments)  # all of its file is there
            raise OSError(28, "No space left on device")
        return write(*arguments)

    with mock.patch.object(saving, "_write_own", fails), pytest.raises(pydist.Error) as error:
        pydist.save(place, model=model, optimizer=optimizer)
    told.append(f"{error.type.__name__}: {error.value}")
    require_same(all_values(model, optimizer), later)

    # The checkpoint before is whole. One rank fails amid it, which its peers don't hear of.
    again, its = sharded(1, torch.bfloat16, lr=1.0)
    one_step(again, its, torch.bfloat16)
    before = all_values(again, its)
    reading = FailsLate(6 if pydist.rank() == 1 else 0)
    with reading.under_way():
        if pydist.rank() == 1:
            with pytest.raises(OSError, match="Input/output error"):
                from_parts(place, model=again, optimizer=its)
            require_same(all_values(again, its), before)
        from_parts(place, model=again, optimizer=its)
    require_same(all_values(again, its), saved_then)

    # The same fault in a call that all ranks leave together.
    reading = FailsLate(6 if pydist.rank() == 1 else 0)
    with reading.under_way(), pytest.raises(pydist.CheckpointError) as error:
        pydist.load(place, model=again, optimizer=its)
    told.append(str(error.value))
    pydist.load(place, model=again, optimizer=its)
    require_same(all_values(again, its), saved_then)
    return told


def test_a_fault_that_one_rank_finds_late(two: Ranks, tmp_path: Path) -> None:
    for while_saving, while_loading in two.run(with_a_fault_on_one_rank, str(tmp_path)):
        assert while_saving.startswith("CheckpointError: ")
        assert "rank 1" in while_saving
        assert "No space left on device" in while_saving
        assert "half-way, so that what was loaded is of no use, failed" in while_loading
        assert "rank 1: OSError" in while_loading
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
