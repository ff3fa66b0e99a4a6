"""Buffers: everybody has those of rank 0."""

import copy
import re
import warnings
from unittest import mock

import gpu_ranks
import pytest
import torch
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_like_reference,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


def train_with_buffers() -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module.register_buffer("flags", torch.tensor([True, False]))
    module.register_buffer("big", torch.arange(5.0)[::2])
    alone = copy.deepcopy(module)
    model = pydist.DataParallel(module)
    local = pydist.DataParallel(copy.deepcopy(module), broadcast_buffers=False)
    for step in range(3):
        # Two forwards, one backward: as a GAN's discriminator does.
        xs = [batch(rank, 8, 4, step=step + i, dtype=torch.float32) for i in (0, 50)]
        (model(xs[0]).mean() + model(xs[1]).square().mean()).backward()
        (local(xs[0]).mean() + local(xs[1]).square().mean()).backward()
        for i in (0, 50):
            alone(batch(0, 8, 4, step=step + i, dtype=torch.float32))
    # What rank 0 has seen is what it would have seen alone, and everybody has it.
    assert_near(model.module[1].running_mean, alone[1].running_mean, 1e-6)
    assert model.module[1].num_batches_tracked == 6
    if rank != 0:
        assert not torch.allclose(local.module[1].running_mean, alone[1].running_mean)
    if rank == 0:  # a forward talks to nobody
        model.eval()
        assert not module.training
        with torch.no_grad():
            model(batch(0, 8, 4, dtype=torch.float32))
        model.train()
    model(batch(rank, 8, 4, dtype=torch.float32)).mean().backward()


def test_buffers_follow_rank_0(run_on_each: Runner) -> None:
    run_on_each(train_with_buffers)


class Counting(nn.Module):
    """Buffers of many kinds, all of which a forward changes, some by assignment."""

    scalar: Tensor
    hidden: Tensor
    assigned: Tensor
    spaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("scalar", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("none", None)
        self.register_buffer("hidden", torch.zeros(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("assigned", torch.zeros(2, 3).t())
        self.register_buffer("spaced", torch.zeros(5, dtype=torch.bfloat16)[::2])
        self.other = nn.Module()
        self.other.register_buffer("shared", self.scalar)

    def forward(self, rank: int) -> Tensor:
        self.scalar += rank + 1
        self.hidden += complex(rank, 1)
        self.assigned = self.assigned + rank + 1
        self.spaced.add_(rank + 1)
        return (self.weight * (rank + 1)).sum()


def count_in_buffers() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Counting())
    for step in range(1, 4):
        model(rank).backward()
        assert model.scalar == step
        assert model.hidden.tolist() == [step * 1j] * 2
        assert torch.equal(model.assigned, torch.full((3, 2), float(step)))
        assert model.spaced.tolist() == [step] * 3
        assert model.none is None
    assert model.stats().rounds == 3


def test_buffers_of_all_kinds(run: Runner) -> None:
    run(count_in_buffers)


def reshape_a_buffer(everywhere: bool) -> None:
    rank, _ = joined()
    module = Counting()
    model = pydist.DataParallel(module)
    if everywhere or rank == 0:
        module.spaced = torch.zeros(7)
    message = "buffer spaced was" if everywhere or rank == 0 else "raised on rank 0"
    with pytest.raises(pydist.Error, match=message):
        model(rank).backward()
    pydist.barrier()  # whoever leaves earlier is lost to the others


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_buffer_that_changed_its_shape(run: Runner, everywhere: bool) -> None:
    run(reshape_a_buffer, everywhere)


def keep_graphs_alive() -> None:
    """In eval mode backward reads the running statistics, which a backward before it has set."""
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def losses(net: nn.Module, r: int) -> list[Tensor]:
        net.eval()
        first = net(batch(r, 5, 4)).sin().mean()
        second = net(batch(r, 5, 4, step=1)).sin().mean()
        return [first, second]

    for loss in losses(model, rank):
        loss.backward()
    for r in range(size):
        for loss in losses(reference, r):
            (loss / size).backward()
    assert_like_reference(model, reference)


def test_graphs_that_outlive_a_backward(run: Runner) -> None:
    run(keep_graphs_alive)


def normalize_in_both_modes() -> None:
    """Two forwards with BatchNorm before each backward, one of them in eval mode."""
    joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        one = net.train()(batch(rank, 5, 4, step=step))
        # With the statistics that this rank's forward has just left: they are its own.
        other = net.eval()(batch(rank, 5, 4, step=step + 50))
        return one.sin().mean() + other.sin().mean()  # type: ignore[no-any-return]

    train_like_reference(model, reference, loss)


def test_batch_norm_in_both_modes(run: Runner) -> None:
    run(normalize_in_both_modes)


class Rescaled(nn.Module):
    """Backward reads a buffer that each rank has set itself."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.5 + x.abs() * 0.5
        return (self.weight * self.scale).sum()


def go_back_twice() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Rescaled())
    x = torch.full((2,), rank + 1.0, dtype=torch.float64)
    loss = model(x)
    loss.backward(retain_graph=True)
    assert model.weight.grad.tolist() == [1 + size * 0.25 - 0.25] * 2
    # Rank 0's statistics are in the buffer by now: that gradient would be another's.
    model.zero_grad()
    assert model.scale.tolist() == [1.0] * 2
    message = "modified by an inplace operation|backward raised on rank"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    pydist.barrier()


def test_a_graph_that_needs_a_replaced_buffer_is_refused(run: Runner) -> None:
    run(go_back_twice)


def move_a_buffer() -> None:
    gpu_ranks.install()
    rank, _ = joined()
    module = nn.Linear(3, 2).to("cuda")
    module.register_buffer("count", torch.zeros(3, device="cuda"))
    model = pydist.DataParallel(module)
    module.count = torch.full((3,), rank + 1.0)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    assert module.count.device.type == "cpu"
    assert module.count.tolist() == [1.0] * 3


@gpu_ranks.needs_gpu_ranks
def test_a_buffer_may_move_off_its_device() -> None:
    run_ranks(move_a_buffer, 2, env={"PYDIST_BACKEND": "nccl"}, timeout=35)


# --- buffers that the program changes between steps ----------------------------------------------


class Tempered(nn.Module):
    """Computes with a buffer that the training loop sets, and with one that forward adds to."""

    temperature: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_buffer("temperature", torch.ones(1, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += x.abs().sum()
        out: Tensor = self.norm(self.fc(x)) * self.temperature * (1 + 0.01 * self.calls.clone())
        return out.square().mean()


def set_in_place(module: Tempered, value: float) -> None:
    module.temperature.fill_(value)


def set_by_assignment(module: Tempered, value: float) -> None:
    module.temperature = torch.full_like(module.temperature, value)


def load_state(module: Tempered, value: float) -> None:
    state = module.state_dict()
    module.load_state_dict({**state, "temperature": torch.full_like(module.temperature, value)})


def reset_statistics(module: Tempered, value: float) -> None:
    if value:
        module.norm.reset_running_stats()


WAYS = {f.__name__: f for f in (set_in_place, set_by_assignment, load_state, reset_statistics)}


def change_between_steps(way: str, who: str, when: int) -> list[str]:
    """Returns what was warned of, and in which step."""
    rank, size = joined()
    torch.manual_seed(0)
    module = Tempered()
    model = pydist.DataParallel(module)
    told = []
    for step in range(4):
        if step == when and (who == "all" or rank == {"first": 0, "last": size - 1}[who]):
            WAYS[way](module, 3.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch(rank, 5, 4, step=step)).backward()
        told += [f"{step}: {warning.message}" for warning in caught]
    # Rank 0's count by the end of a backward, as ever.
    for buffer in module.buffers():
        first = buffer.clone()
        pydist.broadcast(first, root=0)
        assert torch.equal(first, buffer)
    return told


def named_by(told: list[list[str]]) -> list[dict[str, str]]:
    """Of one warning on each rank: the buffers that this rank has changed, and their digests."""
    found = []
    for rank, messages in enumerate(told):
        assert len(messages) == 1, messages
        listed = re.search(rf"Rank {rank} had changed (.*?); a buffer differs where", messages[0])
        assert listed, messages
        found.append(dict(re.findall(r"(\S+) \((\w{8})\)", listed[1])))
    return found


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("way", ["set_in_place", "set_by_assignment", "load_state"])
@pytest.mark.parametrize("who", ["first", "last"])
def test_a_buffer_changed_on_one_rank_warns_all(
    three: Ranks, way: str, who: str, when: int
) -> None:
    told = three.run(change_between_steps, way, who, when, timeout=LIMIT_S)
    assert all(messages[0].startswith(f"{when}: buffers of the model were") for messages in told)
    changed = named_by(told)
    assert list(changed.pop(0 if who == "first" else -1)) == ["temperature"]
    assert changed == [{}, {}]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2).to(torch.float64)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean += x.mean()
        out: Tensor = self.fc(x).sum() - self.mean.clone()
        return out


def change_one_alike_and_one_not(how: str) -> list[str]:
    rank, size = joined()
    module = Counted()
    model = pydist.DataParallel(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            if how == "by the program":
                module.calls.fill_(7.0)
                module.mean.fill_(float(rank == size - 1))
            else:
                model(batch(rank, 5, 4, step=step))
            model(batch(rank, 5, 4, step=step)).backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("how", ["by the program", "by a forward"])
def test_warnings_tell_what_differs_from_what_was_changed_alike(three: Ranks, how: str) -> None:
    told = three.run(change_one_alike_and_one_not, how, timeout=LIMIT_S)
    assert "(also under no_grad)" in told[0][0]
    changed = named_by(told)
    assert len({ranks["calls"] for ranks in changed}) == 1
    # The program's zero is what all ranks had: no change.
    assert len({ranks.get("mean") for ranks in changed}) == (2 if how == "by the program" else 3)


def change_for_a_while(kind: str) -> list[str]:
    """What a rank does alone, without gradients, and what it puts back, differs from nothing."""
    rank, _ = joined()
    model = pydist.DataParallel(Tempered())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if kind == "put back":
                if rank == 0:
                    kept = copy.deepcopy(model.state_dict())
                    model.module.temperature.fill_(5.0)
                    model.module.norm.reset_running_stats()
                    with torch.no_grad():
                        model(batch(rank, 5, 4, step=step))
                    model.load_state_dict(kept)
            else:
                model.module.temperature.fill_(2.0 + step)
                if rank == 0:
                    with torch.no_grad():
                        model(batch(rank, 5, 4, step=step))
                model(batch(rank, 5, 4, step=step))
                # What the ranks have computed with before is a change again.
                model.module.calls.zero_()
                if kind == "put back after a forward" and step == 2 and rank == 0:
                    model.module.temperature.fill_(3.0)
            model(batch(rank, 5, 4, step=step)).backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", ["put back", "changed on all", "put back after a forward"])
def test_what_one_rank_does_without_gradients_differs_from_nothing(three: Ranks, kind: str) -> None:
    told = three.run(change_for_a_while, kind, timeout=LIMIT_S)
    if kind == "put back after a forward":
        first, second, third = (ranks["temperature"] for ranks in named_by(told))
        assert first != second == third
    else:
        assert told == [[], [], []]


def test_statistics_reset_on_one_rank_warn_all(three: Ranks) -> None:
    told = three.run(change_between_steps, "reset_statistics", "first", 2, timeout=LIMIT_S)
    assert list(named_by(told)[0]) == ["norm.running_mean", "norm.running_var"]


@pytest.mark.parametrize("way", list(WAYS))
def test_a_buffer_changed_alike_on_all_ranks_warns_nobody(three: Ranks, way: str) -> None:
    assert three.run(change_between_steps, way, "all", 2, timeout=LIMIT_S) == [[], [], []]


# Forwards without gradients, which may change buffers themselves: torch copies nothing after them.
OTHER_THAN_IN_TORCH = (
    "plainly",
    "by other memory",
    "two forwards",
    "under no_sync",
    "before one without gradients",
)
SAME_AS_IN_TORCH = ("in eval", "in training", "update_bn")


def change_before_a_forward(kind: str) -> tuple[list[float], list[float], int]:
    """The outputs here and in torch, with a buffer that is changed on rank 0; and warnings."""
    rank, _ = joined()
    outputs: list[list[float]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for wrap in (pydist.DataParallel, DistributedDataParallel):
            torch.manual_seed(0)
            module = Tempered()
            net = wrap(module)
            outputs.append([])
            for step in range(3):
                if step == 1 and rank == 0 and kind == "by other memory":
                    module.temperature.data = torch.full((1,), 2.0, dtype=torch.float64)
                elif step == 1 and rank == 0 and kind not in SAME_AS_IN_TORCH:
                    module.temperature.fill_(2.0)
                if kind == "two forwards":
                    with torch.no_grad():
                        module.temperature.fill_(1.0 + step)
                    net(batch(rank, 5, 4, step=step))
                elif kind == "update_bn":
                    update_bn([batch(rank, 5, 4, step=step + i) for i in range(2)], net)
                elif kind in ("in eval", "in training", "before one without gradients"):
                    net.train(kind != "in eval")
                    with torch.no_grad():
                        net(batch(rank, 5, 4, step=step))
                    net.train()
                elif kind == "under no_sync":
                    with net.no_sync():
                        net(batch(rank, 5, 4, step=step)).backward()
                    if step == 2 and rank == 0:
                        # In torch the next forward copies nothing either.
                        module.temperature.fill_(9.0)
                loss = net(batch(rank, 5, 4, step=step))
                loss.backward()
                outputs[-1].append(loss.item())
    told = [str(warning.message) for warning in caught if "of the model were" in str(warning)]
    return outputs[0], outputs[1], len(told)


@pytest.mark.parametrize("kind", [*OTHER_THAN_IN_TORCH, *SAME_AS_IN_TORCH])
def test_where_forwards_differ_from_torch_a_warning_says_so(three: Ranks, kind: str) -> None:
    found = three.run(change_before_a_forward, kind, timeout=LIMIT_S)
    differ = any(ours != pytest.approx(theirs, rel=1e-9) for ours, theirs, _ in found)
    assert {warned for _, _, warned in found} == {int(differ)}
    assert differ == (kind not in SAME_AS_IN_TORCH)


def run_forward_twice() -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.float64)
    model = pydist.DataParallel(net)
    for step in range(3):
        # As of a discriminator: on real samples, and on generated ones.
        losses = [model(batch(rank, 5, 4, step=2 * step + i)).square().mean() for i in range(2)]
        with mock.patch(
            "pydist.parallel.buffers.buffer_changes._bytes_of", side_effect=AssertionError
        ):
            again = model(batch(rank, 5, 4, step=9)).mean()
        (losses[0] + losses[1] + again).backward()


def test_the_counts_of_batch_norm_are_not_looked_at(run: Runner) -> None:
    run(run_forward_twice)


def change_inside_transforms() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Tempered())
    x = batch(rank, 5, 4)
    buffers = {"temperature": torch.full((1,), 2.0, dtype=torch.float64)}
    torch.func.functional_call(model, buffers, (x,)).backward()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    model.eval()
    torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)))(parameters)
    model.train()
    with torch.inference_mode():
        model.module.norm.running_mean = torch.ones(4, dtype=torch.float64)
    model.module.norm.eval()
    with torch.no_grad():
        model(x)
    model.module.norm.running_mean = torch.ones(4, dtype=torch.float64)
    model(x).backward()
    del model.module.temperature
    with pytest.raises((AttributeError, pydist.Error)):
        model(x).backward()


def test_buffers_of_transforms(run: Runner) -> None:
    run(change_inside_transforms)
