"""Checkpoints of several models, optimizers and schedulers, and of states that ranks have alone."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forged_checkpoint import facts_of, write_as_before
from launch import Ranks, run_ranks
from saved_training import Keeps
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import joined

import pydist

pytestmark = pytest.mark.timeout(60)
LIMIT_S = 50.0

NATIVE = {"PYDIST_BACKEND": "native"}
SAMPLES = 48


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, NATIVE) as ranks:
        yield ranks


class Gan:
    """A generator with a sharded optimizer, a critic with a whole one; each has a schedule."""

    def __init__(self, seed: int = 0, *, stage: Any = 2) -> None:
        joined()
        torch.manual_seed(seed)
        generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).double()
        critic = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 1))
        self.g = pydist.DataParallel(generator, bucket_cap_mb=0.0002)
        self.d = pydist.DataParallel(
            pydist.SyncBatchNorm.convert_sync_batchnorm(critic.double()), bucket_cap_mb=0.0002
        )
        self.og: Any = pydist.ShardedOptimizer(self.g, torch.optim.AdamW, stage=stage, lr=1e-2)
        self.od = torch.optim.SGD(self.d.parameters(), lr=1e-2, momentum=0.9)
        self.sg = torch.optim.lr_scheduler.StepLR(self.og, 3, 0.5)
        self.sd = torch.optim.lr_scheduler.ExponentialLR(self.od, 0.9)
        data: Any = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)).double()
        loader = DataLoader(data, 12 // pydist.world_size(), shuffle=True)
        self.loader = pydist.prepare(loader, seed=5)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": {"G": self.g, "D": self.d},
            "optimizer": {"G": self.og, "D": self.od},
            "scheduler": {"D": self.sd, "G": self.sg},
            "sampler": self.loader,
        }

    def train(self, steps: int) -> list[float]:
        """The losses of all ranks' batches, which are the same on any number of ranks."""
        losses = []
        iterator = iter(self.loader)
        for _ in range(steps):
            real = next(iterator, None)
            if real is None:
                iterator = iter(self.loader)
                real = next(iterator)
            noise = real[:, [0, 1, 2, 0]].sin()
            self.d.requires_grad_(True)
            self.od.zero_grad()
            loss = self.d(self.g(noise).detach()).mean() - self.d(real).mean()
            loss.backward()
            self.od.step()
            self.d.requires_grad_(False)
            self.og.zero_grad()
            fooled = -self.d(self.g(noise)).mean()
            fooled.backward()
            self.og.step()
            self.sg.step()
            self.sd.step()
            both = torch.stack([loss.detach(), fooled.detach()])
            pydist.all_reduce(both, "mean")
            losses += both.tolist()
        return losses

    def values(self) -> dict[str, Tensor]:
        found = {}
        for key, model in (("G", self.g), ("D", self.d)):
            for name, value in model.state_dict().items():
                found[f"{key}.{name}"] = value.detach().clone()
        return found


def train_through() -> tuple[list[float], dict[str, Tensor]]:
    gan = Gan()
    return gan.train(8), gan.values()


def train_and_save(folder: str) -> None:
    gan = Gan()
    gan.train(3)  # of the four steps of an epoch
    handle = pydist.save(
        folder, **gan.parts, step=3, keep=2, extra={"best": 0.5}, asynchronous=True
    )
    gan.train(1)  # while it is written
    handle.wait()


def resume(folder: str, stage: Any) -> tuple[list[float], dict[str, Tensor]]:
    gan = Gan(seed=9, stage=stage)
    gan.train(1)
    found = pydist.load(folder, **gan.parts)
    assert found == {"best": 0.5}
    assert (found.step, found.path.name) == (3, "step-000003")
    assert pydist.checkpoint.step_of(folder) == 3
    return gan.train(5), gan.values()


def test_a_gan_goes_on_amid_an_epoch(tmp_path: Path) -> None:
    """On as many ranks to the bit, and on others to rounding."""
    folder = str(tmp_path / "gan")
    losses, values = run_ranks(train_through, 2, env=NATIVE)[0]
    run_ranks(train_and_save, 2, folder, env=NATIVE)
    for count, stage in ((2, 2), (2, 1), (3, 2), (1, 1)):
        for again, restored in run_ranks(resume, count, folder, stage, env=NATIVE):
            if count == 2:
                assert again == losses[6:]
            assert again == pytest.approx(losses[6:], rel=1e-9)
            for name, value in values.items():
                if count == 2:
                    assert torch.equal(restored[name], value), name
                # Adam divides by roots of small gradients' squares.
                torch.testing.assert_close(restored[name], value, rtol=1e-8, atol=1e-8)


def name_what_differs(folder: str) -> None:
    gan = Gan()
    gan.train(2)
    pydist.save(f"{folder}/several", **gan.parts)
    pydist.save(f"{folder}/one", model=gan.g, optimizer=gan.og, scheduler=gan.sg)
    before = gan.values()
    swapped: Any = {"G": gan.d, "D": gan.g}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("several", {"model": gan.g}, r"another model.*saved with several, 'D', 'G': pass model="),
        ("several", {"model": swapped}, r"model 'D': the checkpoint is of another model"),
        ("several", {"model": {"H": gan.g}}, r"model 'H': .*another model.*several, 'D', 'G'"),
        (
            "several",
            {"optimizer": gan.og},
            r"has no optimizer: it was saved with several, 'D', 'G'",
        ),
        ("several", {"optimizer": {"H": gan.og}}, r"has no optimizer 'H': .*several, 'D', 'G'"),
        (
            "several",
            {"model": gan.parts["model"], "optimizer": {"D": gan.og}},
            "optimizer 'D': the checkpoint is of SGD",
        ),
        ("several", {"scheduler": gan.sg}, r"no scheduler: it was saved with several, 'D', 'G'"),
        ("several", {"sampler": {"G": gan.loader}}, r"no sampler 'G': .*one that has no name"),
        ("several", {"stateful": {"it": gan.loader}}, r"no stateful 'it': it was saved without"),
        ("one", {"model": {"G": gan.g}}, r"model 'G': the checkpoint is of another model"),
        ("one", {"optimizer": {"G": gan.og}}, r"no optimizer 'G': .*one that has no name"),
        ("one", {"scaler": {"G": gan.sg}}, r"no scaler 'G': it was saved without one"),
    ]
    for name, arguments, match in cases:
        with pytest.raises(pydist.InvalidUsage, match=match):
            pydist.load(f"{folder}/{name}", **arguments)
    for name, value in gan.values().items():
        assert torch.equal(value, before[name]), name
    # Some of several.
    other = Gan(seed=3)
    pydist.load(f"{folder}/several", model={"G": other.g}, optimizer={"G": other.og})
    for name, value in other.values().items():
        if name.startswith("G.") or name == "D.0.weight":
            assert torch.equal(value, before[name]) == name.startswith("G."), name


def test_what_does_not_fit_is_named(two: Ranks, tmp_path: Path) -> None:
    two.run(name_what_differs, str(tmp_path), timeout=LIMIT_S)


def exchange_with_torch(folder: str) -> None:
    gan = Gan()
    gan.train(3)
    pydist.save(f"{folder}/several", **gan.parts, extra=[1, 2])
    assert pydist.load(f"{folder}/several") == [1, 2]
    plain = pydist.checkpoint.to_torch(f"{folder}/several")
    assert plain["extra"] == [1, 2]
    assert plain["scheduler"]["G"] == gan.sg.state_dict()
    generator, critic = (copy.deepcopy(net.module) for net in (gan.g, gan.d))
    whole = torch.optim.AdamW(generator.parameters())
    generator.load_state_dict(plain["model"]["G"])
    critic.load_state_dict(plain["model"]["D"])
    whole.load_state_dict(plain["optimizer"]["G"])
    assert whole.param_groups[0]["lr"] == gan.og.param_groups[0]["lr"]
    other = Gan(seed=4, stage=1)
    pydist.checkpoint.from_torch(
        plain, model=other.parts["model"], optimizer=other.parts["optimizer"]
    )
    for (name, value), known in zip(other.values().items(), gan.values().values(), strict=True):
        assert torch.equal(value, known), name
    with pytest.raises(pydist.InvalidUsage, match=r"the state has no model 'H', but 'D', 'G'"):
        pydist.checkpoint.from_torch(plain, model={"H": other.g})
    with pytest.raises(pydist.InvalidUsage, match="optimizer 'D': the state"):
        pydist.checkpoint.from_torch(plain, optimizer={"D": other.og})
    # Several models are what one module of them is.
    both = nn.ModuleDict({"G": copy.deepcopy(gan.g.module), "D": copy.deepcopy(gan.d.module)})
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.zero_()
    pydist.load(f"{folder}/several", model=both)
    for name, value in gan.values().items():
        assert torch.equal(both.state_dict()[name], value), name
    pydist.save(f"{folder}/module", model=both)
    third = Gan(seed=6)
    pydist.load(f"{folder}/module", model=third.parts["model"])
    for (name, value), known in zip(third.values().items(), gan.values().values(), strict=True):
        assert torch.equal(value, known), name
    read = {"model.D.0.weight": torch.zeros(7, 3, dtype=torch.float64)}
    dcp.load(read, checkpoint_id=f"{folder}/several", no_dist=True)
    assert torch.equal(read["model.D.0.weight"], gan.d.state_dict()["0.weight"])


def test_several_to_and_from_torch(two: Ranks, tmp_path: Path) -> None:
    two.run(exchange_with_torch, str(tmp_path), timeout=LIMIT_S)


def share_a_layer(folder: str) -> None:
    """Saved once, and one optimizer over both models."""
    joined()

    def made() -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
        encoder = nn.Linear(3, 5)
        nets: dict[str, nn.Module] = {
            name: nn.Sequential(encoder, nn.Linear(5, 1)) for name in ("actor", "critic")
        }
        unique = {id(p): p for net in nets.values() for p in net.parameters()}
        return nets, torch.optim.AdamW(list(unique.values()))

    nets, optimizer = made()
    model = pydist.DataParallel(nn.ModuleDict(nets))
    for net in nets.values():
        net(torch.ones(2, 3)).sum().backward()
    model.sync_gradients()
    optimizer.step()
    pydist.save(folder, model=nets, optimizer={"both": optimizer})
    other_nets, other = made()
    pydist.load(folder, model=other_nets, optimizer={"both": other})
    for name, net in nets.items():
        for key, value in net.state_dict().items():
            assert torch.equal(other_nets[name].state_dict()[key], value), (name, key)
    ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    for number, values in ours.items():
        assert all(torch.equal(value, theirs[number][key]) for key, value in values.items())


def test_models_that_share_a_layer(two: Ranks, tmp_path: Path) -> None:
    two.run(share_a_layer, str(tmp_path / "shared"), timeout=LIMIT_S)


# -- what each rank has for itself


class Stream:
    """A loader of another library: each rank is somewhere else in files of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(100 + pydist.rank())
        self.buffer: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.generator.getstate(), "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.setstate(state["random"])
        self.buffer = state["buffer"]

    def draw(self, count: int = 5) -> list[float]:
        drawn = [self.generator.random() for _ in range(count)]
        self.buffer += [torch.tensor(value) for value in drawn]
        return drawn


def save_streams(folder: str) -> list[Any]:
    joined()
    stream, other = Stream(), Stream()
    stream.draw(3 + pydist.rank())
    other.draw(1)
    model = nn.Linear(2, 1)
    pydist.save(
        folder, model=model, stateful={"loader": stream, "other": other}, asynchronous=True
    ).wait()
    return [float(value) for value in stream.buffer] + stream.draw()


def load_streams(folder: str) -> list[Any]:
    joined()
    stream = Stream()
    pydist.load(folder, stateful={"loader": stream})
    return [float(value) for value in stream.buffer] + stream.draw()


def refuse_streams(folder: str) -> str:
    joined()
    stream, model = Stream(), nn.Linear(2, 1)
    before = stream.state_dict()
    with pytest.raises(pydist.CheckpointError) as caught:
        pydist.load(folder, model=model, stateful={"loader": stream, "other": Stream()})
    assert stream.state_dict() == before
    # The rest loads on any number.
    assert pydist.load(folder, model=model).step is None
    return str(caught.value)


def test_each_ranks_own_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "streams")
    saved = run_ranks(save_streams, 2, folder, env=NATIVE)
    assert saved[0] != saved[1]
    assert run_ranks(load_streams, 2, folder, env=NATIVE) == saved
    for count in (1, 3):
        for message in run_ranks(refuse_streams, count, folder, env=NATIVE):
            assert "was saved by 2 ranks" in message
            assert "stateful.loader@rank0" in message
            assert f"can't be loaded by {count}" in message
    for rank in range(2):
        plain = pydist.checkpoint.to_torch(folder, rank=rank)
        assert len(plain["stateful"]["loader"]["buffer"]) == 3 + rank
        assert set(plain["stateful"]) == {"loader", "other"}
    assert "stateful" not in pydist.checkpoint.to_torch(folder)
    with pytest.raises(pydist.InvalidUsage, match="rank=2"):
        pydist.checkpoint.to_torch(folder, rank=2)


def refuse_code(folder: str) -> None:
    """Naming the object, and the place in it; on all ranks, whichever has it."""
    rank, _ = joined()
    place = f"{folder}/code"
    cases: list[tuple[Any, str]] = [
        ({"a": [1, {"f": lambda: 1}]}, r"it holds a function at \['a'\]\[1\]\['f'\]"),
        ({"a": (torch.ones(1), Stream())}, r"Stream at \['a'\]\[1\]"),
        ({"a": torch.ones(2).numpy()}, r"it holds a numpy\.ndarray at \['a'\]"),
        (Stream(), r"it is a .*Stream"),
    ]
    for state, match in cases:
        mine = state if rank == 1 else {}
        with pytest.raises(
            pydist.InvalidUsage, match=rf"rank 1: the state of stateful 'odd' can't.*{match}"
        ):
            pydist.save(place, stateful={"fine": Keeps({"n": 1}), "odd": Keeps(mine)})
        with pytest.raises(pydist.InvalidUsage, match=rf"the state of scheduler can't.*{match}"):
            pydist.save(place, scheduler=Keeps(state))
    model = pydist.DataParallel(nn.Linear(4, 4))
    sharded = pydist.ShardedOptimizer(model, torch.optim.AdamW)
    with pytest.raises(pydist.InvalidUsage, match=r"use pydist\.save\(optimizer=\)"):
        pydist.save(place, stateful={"optimizer": sharded})
    assert not Path(place).exists()
    pydist.save(place, model=model, stateful={"fine": Keeps({"n": [rank, None, True, "x", 1j]})})
    fine = Keeps(None)
    pydist.load(place, stateful={"fine": fine})
    assert fine.state == {"n": [rank, None, True, "x", 1j]}
    with pytest.raises(pydist.InvalidUsage, match=r"no stateful 'f': .*several, 'fine'"):
        pydist.load(place, stateful={"f": fine})


def test_state_that_would_run_code_is_refused(two: Ranks, tmp_path: Path) -> None:
    two.run(refuse_code, str(tmp_path), timeout=LIMIT_S)


def refuse_what_differs(folder: str) -> None:
    rank, _ = joined()
    place = f"{folder}/differs"
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    plateau.step(0.5 + rank)  # by the rank's own loss
    match = r"the state of scheduler differs between ranks 0 and 1: rank 0 has scheduler\['best'\] "
    match += (
        r"= 0\.5, where rank 1 has scheduler\['best'\] = 1\.5; .*stateful=\{'scheduler': \.\.\.\}"
    )
    with pytest.raises(pydist.Mismatch, match=match):
        pydist.save(place, scheduler=plateau)
    with pytest.raises(pydist.Mismatch, match=r"scheduler 'G' differs.*G\['best'\]"):
        pydist.save(place, scheduler={"G": plateau})
    for kind in ("scaler", "sampler"):
        for mine in ({"a": [1, rank]}, {"a": torch.full((3,), rank)}, {str(rank): 1}, [0] * rank):
            with pytest.raises(pydist.Mismatch, match=f"the state of {kind} differs.*stateful="):
                pydist.save(place, **{kind: Keeps(mine)})
    samples: Any = range(40)
    loader = pydist.prepare(DataLoader(samples, 4), seed=3)
    iterator = iter(loader)
    for _ in range(1 + rank):
        next(iterator)
    with pytest.raises(pydist.Mismatch, match=r"sampler\['position'\] = 8, .* = 16"):
        pydist.save(place, sampler=loader)
    assert not Path(place).exists()
    # Kept of each.
    pydist.save(place, stateful={"scheduler": plateau})
    other = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    pydist.load(place, stateful={"scheduler": other})
    assert other.best == 0.5 + rank
    # Values that are equal, however they came to be.
    text = "".join(["ab", "c"]) if rank else "abc"
    pydist.save(place, scheduler=Keeps({"x": [text, text], "nan": float("nan"), "t": (1, 2.0)}))


def test_states_that_differ_are_not_taken_from_one_rank(two: Ranks, tmp_path: Path) -> None:
    two.run(refuse_what_differs, str(tmp_path), timeout=LIMIT_S)


def tell_steps(folder: str) -> None:
    joined()
    model = nn.Linear(2, 1)
    for step in (7, 12):
        pydist.save(f"{folder}/steps", model=model, step=step, extra={"step": "its own"})
    found = pydist.load(f"{folder}/steps", model=model)
    assert (found.step, dict(found)) == (12, {"step": "its own"})
    assert pydist.load(f"{folder}/steps/step-000007").step == 7
    # What was loaded is saved again, by either.
    pydist.save(f"{folder}/again", extra={"before": found, **found})
    assert pydist.load(f"{folder}/again") == {"before": dict(found), "step": "its own"}
    pydist.save(f"{folder}/again", extra=found, step=None)
    assert pydist.load(f"{folder}/again") == dict(found)
    torch.save(found, f"{folder}/rank{pydist.rank()}.pt")
    assert torch.load(f"{folder}/rank{pydist.rank()}.pt", weights_only=True) == dict(found)
    assert pydist.checkpoint.step_of(f"{folder}/steps") == 12
    pydist.save(f"{folder}/plain", model=model)
    loaded = pydist.load(f"{folder}/plain")
    assert (loaded, loaded.step, loaded.path.name) == ({}, None, "plain")
    assert pydist.checkpoint.step_of(f"{folder}/plain") is None
    with pytest.raises(pydist.CheckpointError, match="there is no checkpoint"):
        pydist.checkpoint.step_of(f"{folder}/nowhere")
    for extra in (5, 0, False, "x", [1], (1, 2)):
        pydist.save(f"{folder}/plain", extra=extra)
        assert pydist.load(f"{folder}/plain") == extra
        assert type(pydist.load(f"{folder}/plain")) is type(extra)
    # Earlier versions told the step by the folder's name alone.
    pydist.barrier()
    if pydist.rank() == 0:
        before = Path(f"{folder}/steps/step-000012")
        assert facts_of(before)["step"] == 12
        write_as_before(before, "step")
    pydist.barrier()
    assert pydist.load(f"{folder}/steps", model=model).step == 12


def test_the_step_is_told(two: Ranks, tmp_path: Path) -> None:
    two.run(tell_steps, str(tmp_path), timeout=LIMIT_S)


def save_from_groups(folder: str) -> None:
    rank, _ = joined()
    alone = pydist.new_group([rank]) if rank == 0 else None
    pydist.new_group([0]) if rank else None
    models = {"all": pydist.DataParallel(nn.Linear(2, 1)), "more": nn.Linear(3, 1)}
    pydist.save(f"{folder}/fine", model=models)
    if rank == 0:
        mixed = {**models, "own": pydist.DataParallel(nn.Linear(2, 1), process_group=alone)}
        with pytest.raises(pydist.InvalidUsage, match="rank 0 of 2 and rank 0 of 1"):
            pydist.save(f"{folder}/mixed", model=mixed)
        pydist.save(f"{folder}/own", model={"own": mixed["own"]})
    pydist.barrier()


def test_models_of_several_groups(two: Ranks, tmp_path: Path) -> None:
    two.run(save_from_groups, str(tmp_path), timeout=LIMIT_S)
