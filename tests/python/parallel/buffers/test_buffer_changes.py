"""Buffers that change between steps on some ranks only: a warning says so."""

import copy
import re
import warnings
from unittest import mock

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    batch,
    joined,
)

import pydist

pytestmark = TIME_LIMIT


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


def set_past_autograd(module: Tempered, value: float) -> None:
    module.temperature.data.fill_(value)


def set_by_numpy(module: Tempered, value: float) -> None:
    module.temperature.numpy()[:] = value


def reset_statistics(module: Tempered, value: float) -> None:
    if value:
        module.norm.reset_running_stats()


ALL_WAYS = (
    set_in_place,
    set_by_assignment,
    load_state,
    reset_statistics,
    set_past_autograd,
    set_by_numpy,
)
WAYS = {f.__name__: f for f in ALL_WAYS}


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
@pytest.mark.parametrize(
    "way", ["set_in_place", "set_by_assignment", "load_state", "set_past_autograd", "set_by_numpy"]
)
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
    "by .data",
    "by .data before one without gradients",
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
                elif step == 1 and rank == 0 and "by .data" in kind:
                    module.temperature.data.fill_(2.0)
                elif step == 1 and rank == 0 and kind not in SAME_AS_IN_TORCH:
                    module.temperature.fill_(2.0)
                if kind == "two forwards":
                    with torch.no_grad():
                        module.temperature.fill_(1.0 + step)
                    net(batch(rank, 5, 4, step=step))
                elif kind == "update_bn":
                    update_bn([batch(rank, 5, 4, step=step + i) for i in range(2)], net)
                elif kind.endswith(("in eval", "in training", "before one without gradients")):
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


class Quantized(nn.Module):
    """Moves codes in each forward, as codebooks do, past torch's version counters."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("codes", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(300_000))

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        out: Tensor = self.fc(x) - self.codes.clone()
        return out.square().mean()


def move_codes_in_forward() -> list[str]:
    rank, size = joined()
    model = pydist.DataParallel(Quantized())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if rank == 0:
                with torch.no_grad():
                    model(batch(rank, 5, 4, step=step + 1))
            if step == 3 and rank == size - 1:
                model.module.large.data[0] += 1
            model(batch(rank, 5, 4, step=step)).backward()
    return [str(warning.message) for warning in caught]


def test_what_a_forward_writes_past_version_counters_is_no_change(three: Ranks) -> None:
    told = three.run(move_codes_in_forward, timeout=LIMIT_S)
    assert [list(names) for names in named_by(told)] == [[], [], ["large"]]


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


def take_gradients_alone(averages_between: bool) -> list[str]:
    rank, _ = joined()
    module = Tempered()
    model = pydist.DataParallel(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            loss = model(batch(rank, 3, 4, step=step))
            torch.autograd.grad(loss, list(module.parameters()), retain_graph=averages_between)
            if averages_between:
                loss.backward()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("averages_between", [False, True])
def test_buffers_that_no_backward_exchanges(three: Ranks, averages_between: bool) -> None:
    for told in three.run(take_gradients_alone, averages_between, timeout=LIMIT_S):
        if averages_between:
            assert not told
        else:
            [said] = told
            assert "buffers of the model (calls) have changed" in said
