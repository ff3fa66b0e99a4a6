"""Checkpoints of models that are wrapped or typed otherwise, or do not fit; torch's own files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from saved_training import LIMIT_S, SAMPLES, STAGE_1, STAGE_2, WHOLE, Training, assert_same
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.optim import ZeroRedundancyOptimizer
from training import Tied, joined

import pydist
import pydist.checkpoint.dcp_files as dcp_files

pytestmark = pytest.mark.timeout(60)


def convert(folder: str) -> None:
    rank, size = joined()
    world = pydist.new_group(range(size))
    training = Training(world, STAGE_2)
    training.run(range(4))
    place = Path(folder) / "native"
    pydist.save(place, **training.parts)
    state = pydist.checkpoint.to_torch(place)
    expected = training.run(range(4, 8))
    # Into plain torch: an unwrapped module and the class itself, on all samples.
    module = Tied(torch.float64)
    module.load_state_dict(state["model"])
    named = list(module.named_parameters())
    plain: Any = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1]},
            {"params": [p for _, p in named if p.dim() <= 1]},
        ]
    )
    plain.load_state_dict(copy.deepcopy(state["optimizer"]))  # which it would write into
    schedule = torch.optim.lr_scheduler.StepLR(plain, 3, 0.5)
    schedule.load_state_dict(state["scheduler"])
    for step in range(4, 8):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        plain.zero_grad()
        module(batch).mean().backward()
        plain.step()
        schedule.step()
    found = [p.detach() for p in module.parameters()]
    assert_same(found, expected, "in plain torch", exact=False)
    # And back, under the names that torch's wrapper gives.
    wrapped = {f"module.{name}": value for name, value in state["model"].items()}
    for kind in (WHOLE, STAGE_1, STAGE_2):
        again = Training(world, kind, seed=2)
        pydist.checkpoint.from_torch(
            {"model": wrapped, "optimizer": copy.deepcopy(state["optimizer"])},
            model=again.model,
            optimizer=again.optimizer,
        )
        again.scheduler.load_state_dict(state["scheduler"])
        assert_same(again.run(range(4, 8)), expected, f"into stage {kind}", exact=False)
    # torch's own tool reads the files.
    if rank == 0:
        dcp_to_torch_save(place, Path(folder) / "torch.pt")
        flat = torch.load(Path(folder) / "torch.pt", weights_only=True)
        for name, value in state["model"].items():
            assert torch.equal(flat[f"model.{name}"], value), name
    pydist.barrier()


def convert_zero(folder: str) -> None:
    """What torch's ZeroRedundancyOptimizer under its DistributedDataParallel has saved."""
    rank, size = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 31), nn.Tanh(), nn.Linear(31, 2)).double()
    ours = pydist.DataParallel(copy.deepcopy(module))
    sharded = pydist.ShardedOptimizer(ours, torch.optim.AdamW, stage=2, lr=1e-2)
    theirs = nn.parallel.DistributedDataParallel(module)
    zero = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=1e-2)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(size * step + rank)
            optimizer.zero_grad()
            batch = torch.randn(5, 8, generator=generator, dtype=torch.float64)
            model(batch).square().mean().backward()
            optimizer.step()

    run(theirs, zero, range(5))
    zero.consolidate_state_dict(0)
    if rank == 0:
        saved = {"model": theirs.state_dict(), "optimizer": zero.state_dict()}
        torch.save(saved, Path(folder) / "zero.pt")
    pydist.barrier()
    pydist.checkpoint.from_torch(Path(folder) / "zero.pt", model=ours, optimizer=sharded)
    # A wrapper of torch's is saved under the module's own names as well.
    pydist.save(Path(folder) / "ddp", model=theirs)
    run(theirs, zero, range(5, 8))
    run(ours, sharded, range(5, 8))
    first, second = ([p.detach() for p in model.parameters()] for model in (ours, theirs))
    assert_same(first, second, "from ZeroRedundancyOptimizer", exact=False)
    pydist.load(Path(folder) / "ddp", model=ours)
    pydist.load(Path(folder) / "ddp", model=module)
    first, second = ([p.detach() for p in model.parameters()] for model in (ours, module))
    assert_same(first, second, "of a wrapper of torch's", exact=True)


def test_to_and_from_torch(four: Ranks, tmp_path: Path) -> None:
    four.run(convert, str(tmp_path), timeout=LIMIT_S)
    four.run(convert_zero, str(tmp_path), timeout=LIMIT_S)


def deep_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 2)))


def save_wrapped(folder: str) -> None:
    """However torch has wrapped or compiled it, a model is saved under its own names."""
    _, size = joined()
    group: Any = pydist.new_group(range(size))

    def compiled(module: nn.Module) -> Any:
        return torch.compile(module, backend="eager")

    def compiled_within() -> nn.Module:
        module = deep_model()
        module[2] = compiled(module[2])
        return module

    def ddp_within() -> nn.Module:
        module = deep_model()
        module[0] = nn.parallel.DistributedDataParallel(module[0])
        return module

    ddp: Any = nn.parallel.DistributedDataParallel
    makers: list[Any] = [
        lambda: pydist.DataParallel(deep_model(), process_group=group),
        lambda: pydist.DataParallel(compiled(deep_model()), process_group=group),
        lambda: compiled(pydist.DataParallel(deep_model(), process_group=group)),
        lambda: pydist.DataParallel(compiled_within(), process_group=group),
        lambda: ddp(compiled(deep_model())),
        lambda: compiled(ddp(deep_model())),
        ddp_within,
    ]
    names = [f"model.{name}" for name in deep_model().state_dict()]
    for number, make in enumerate(makers):
        model = make()
        if number < 4:
            optimizer: Any = pydist.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        place = f"{folder}/wrapped-{number}"
        pydist.save(place, model=model, optimizer=optimizer)
        assert sorted(dcp_files.Contents(Path(place)).names & set(names)) == sorted(names)
        other = makers[(number + 1) % len(makers)]()
        second: Any = torch.optim.SGD(other.parameters(), lr=0.2)
        pydist.load(place, model=other, optimizer=second)
        assert all(float(p.detach().mean()) == number for p in other.parameters())
        assert second.param_groups[0]["lr"] == 0.1
        # From plain torch as well, with whatever has wrapped it there.
        third = makers[(number + 2) % len(makers)]()
        states = [pydist.checkpoint.to_torch(place)["model"]]
        if number < 6:
            states.append(model.state_dict())
        for state in states:
            pydist.checkpoint.from_torch({"model": state}, model=third)
            assert all(float(p.detach().mean()) == number for p in third.parameters())
            if isinstance(third, pydist.DataParallel):
                with torch.no_grad():
                    next(third.parameters()).zero_()
                third.load_state_dict(state)
                assert float(next(third.parameters()).detach().mean()) == number
        pydist.barrier()


def test_names_without_wrappers(four: Ranks, tmp_path: Path) -> None:
    four.run(save_wrapped, str(tmp_path), timeout=LIMIT_S)


def refuse_what_does_not_fit() -> None:
    """Before anything has changed."""
    _, size = joined()
    world: Any = pydist.new_group(range(size))
    for kind in (WHOLE, STAGE_1, STAGE_2):
        training = Training(world, kind)
        training.run(range(2))
        before = training.values()
        plain = Tied(torch.float64)
        named = list(plain.named_parameters())
        groups = [{"params": [p for _, p in named if (p.dim() > 1) == w]} for w in (True, False)]
        adam: Any = torch.optim.AdamW(groups)
        plain(torch.ones(SAMPLES, 8, dtype=torch.float64)).mean().backward()
        adam.step()
        model, state = plain.state_dict(), adam.state_dict()
        zero = ZeroRedundancyOptimizer(copy.deepcopy(plain).parameters(), torch.optim.AdamW)

        def changed(
            state: dict[str, Any] = state, number: int = 0, **values: Any
        ) -> dict[str, Any]:
            return {**state, "state": {**state["state"], number: values}}

        def of_class(name: str, given: Any = adam.param_groups) -> dict[str, Any]:
            fresh = [{"params": group["params"]} for group in given]
            found: dict[str, Any] = getattr(torch.optim, name)(fresh, lr=0.1).state_dict()
            return found

        cases: list[tuple[str, dict[str, Any]]] = [
            ("Missing key.*scale", {"model": {k: v for k, v in model.items() if k != "scale"}}),
            ("Unexpected key.*more", {"model": {**model, "more": torch.ones(1)}}),
            ("size mismatch for scale", {"model": {**model, "scale": torch.ones(3)}}),
            (r"class than AdamW: .*lacks amsgrad.*has momentum", {"optimizer": of_class("SGD")}),
            ("lacks amsgrad", {"optimizer": of_class("RAdam")}),
            ("its decoupled_weight_decay is False", {"optimizer": of_class("Adam")}),
            ("no 'state'", {"optimizer": {"param_groups": state["param_groups"]}}),
            ("all of it, Zero", {"optimizer": zero.optim.state_dict()}),
            ("in none of its groups", {"optimizer": changed(number=99)}),
            ("exp_avg of shape", {"optimizer": changed(exp_avg=torch.ones(2, 2))}),
        ]
        if kind == WHOLE:
            part = Training(world, STAGE_1).optimizer.state_dict()
            cases.append(("one rank's part of a pydist", {"optimizer": part}))
        for match, wrong in cases:
            with pytest.raises(pydist.InvalidUsage, match=match):
                pydist.checkpoint.from_torch(
                    {"model": model, "optimizer": state, **wrong},
                    model=training.model,
                    optimizer=training.optimizer,
                )
            for ours, theirs in zip(training.values(), before, strict=True):
                assert torch.equal(ours, theirs), match
        with pytest.raises(RuntimeError, match="consolidate"):
            zero.state_dict()
        training.run(range(2, 4))


def test_what_does_not_fit_changes_nothing(four: Ranks) -> None:
    four.run(refuse_what_does_not_fit, timeout=LIMIT_S)


class Blocks(torch.optim.Optimizer):
    """Keeps what is of blocks of elements, and cannot be tried out."""

    is_there = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.is_there:
            raise RuntimeError("on the GPU, please")
        for p in (p for group in self.param_groups for p in group["params"]):
            blocks = p.flatten().split(240)
            self.state[p]["scales"] = torch.stack([block.abs().max() for block in blocks])
            p.sub_(p.grad, alpha=0.1)


def refuse_blocks(folder: str) -> None:
    """What can't be cut is not saved, where some ranks have it, nor loaded into other shards."""
    rank, _ = joined()
    Blocks.is_there = False

    model = pydist.DataParallel(nn.Linear(10, 100, bias=False))
    linear = nn.Linear(10, 100)
    linear.weight.requires_grad_(False)
    frozen = pydist.DataParallel(linear)
    ours, waiting = (pydist.ShardedOptimizer(each, Blocks) for each in (model, frozen))
    whole = nn.Linear(10, 100, bias=False)
    theirs = Blocks(whole.parameters())
    Blocks.is_there = True
    for module, optimizer in ((model, ours), (whole, theirs)):
        module(torch.ones(1, 10)).sum().backward()
        optimizer.step()
    (part,) = ours.sharded_state().parameters["weight"].ranges
    assert part.values["scales"].numel() == (1 if rank == 3 else 2)
    text = r"Blocks keeps 'scales' for \d+ elements of parameter weight.*; use"
    for asynchronous in (False, True):
        with pytest.raises(pydist.InvalidUsage, match=text):
            pydist.save(f"{folder}/ours", model=model, optimizer=ours, asynchronous=asynchronous)
    assert not Path(folder, "ours").exists()

    # As it was cut, it stays good; and so it does where it is whole.
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    (again,) = ours.sharded_state().parameters["weight"].ranges
    assert torch.equal(again.values["scales"], part.values["scales"])
    pydist.save(f"{folder}/theirs", model=whole, optimizer=theirs)
    scales = theirs.state[whole.weight].pop("scales")
    pydist.load(f"{folder}/theirs", model=whole, optimizer=theirs)
    assert torch.equal(theirs.state[whole.weight]["scales"], scales)

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(pydist.InvalidUsage, match=text):
        pydist.load(f"{folder}/theirs", model=model, optimizer=ours)
    state, turned, held = ours.sharded_state(), ours.sharded_state(), waiting.sharded_state()
    turned.parameters["weight"].dims = (1, 0)
    for known in (state, turned, held):
        one = pydist.StateRange(0, 1000, {"scales": scales})
        known.parameters["weight"].ranges = [one]
        known.groups[0]["lr"] = 7.0
    for load in (
        lambda: ours.load_sharded_state(state),
        lambda: ours.load_sharded_state(turned),
        lambda: waiting.load_sharded_state(held),
    ):
        with pytest.raises(pydist.InvalidUsage, match="keeps 'scales' for 1000 elements"):
            load()
    assert ours.param_groups[0]["lr"] == waiting.param_groups[0]["lr"] == 0.1
    (again,) = ours.sharded_state().parameters["weight"].ranges
    assert torch.equal(again.values["scales"], part.values["scales"])
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new.detach())


def test_state_that_cannot_be_cut(four: Ranks, tmp_path: Path) -> None:
    four.run(refuse_blocks, str(tmp_path), timeout=LIMIT_S)


def change_precision(folder: str) -> None:
    """From 16 bits with float32 copies to float32 and back: nothing is rounded on the way."""
    _, size = joined()
    world: Any = pydist.new_group(range(size))
    first = Training(world, STAGE_1, dtype=torch.bfloat16)
    first.run(range(4))
    pydist.save(f"{folder}/short", **first.parts)
    masters = dcp_files.Contents(Path(f"{folder}/short"))
    for kind in (STAGE_2, WHOLE):
        wide = Training(world, kind, seed=1, dtype=torch.float32)
        wide.run(range(70, 71))
        pydist.load(f"{folder}/short", **wide.parts)
        for name, parameter in wide.model.named_parameters():
            entry = masters.tensor(f"optimizer.state.{name}.master")
            if entry is None:  # one that is frozen, or in float64
                continue
            flat = torch.empty(parameter.numel())
            masters.read_tensors([(f"optimizer.state.{name}.master", (0,), flat)])
            assert torch.equal(flat.sort().values, parameter.detach().reshape(-1).sort().values)
            assert not torch.equal(flat, flat.bfloat16().float())
        pydist.save(f"{folder}/wide", **wide.parts)
        again = Training(world, STAGE_2, seed=2, dtype=torch.bfloat16)
        again.run(range(70, 71))
        pydist.load(f"{folder}/wide", **again.parts)
        pydist.save(f"{folder}/again", **again.parts)
        pydist.barrier()
        before, after = (
            dcp_files.Contents(Path(f"{folder}/{name}")) for name in ("short", "again")
        )
        assert before.names == after.names
        for name in sorted(before.names):
            if (entry := before.tensor(name)) is not None:
                pair = [torch.empty(entry.size, dtype=entry.properties.dtype) for _ in range(2)]
                for contents, box in zip((before, after), pair, strict=True):
                    contents.read_tensors([(name, (0,) * box.dim(), box)])
                assert torch.equal(*pair), name
        pydist.barrier()
    # What was written into a parameter since is no rounding of its copy.
    with torch.no_grad():
        first.model.inside.weight.mul_(2.0)
    pydist.save(f"{folder}/written", **first.parts)
    wide = Training(world, STAGE_2, seed=1, dtype=torch.float32)
    pydist.load(f"{folder}/written", **wide.parts)
    assert torch.equal(wide.model.inside.weight, first.model.inside.weight.float())


def test_other_precision(four: Ranks, tmp_path: Path) -> None:
    four.run(change_precision, str(tmp_path), timeout=LIMIT_S)
