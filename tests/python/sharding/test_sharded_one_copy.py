"""`share_parameters=True`: one copy of the parameters for all ranks of a host."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import nn
from training import batch, joined
from twins import LIMIT_S, TIME_LIMIT, ManyKinds, Twins, assert_same, small_model

import pydist

pytestmark = TIME_LIMIT

Write = Callable[[nn.Module], None]


def writing_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def writing_past_versions(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
        parameter.data.add_(0.25)


def writing_many_at_once(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.5)


def writing_through_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            values = parameter.detach().numpy()
            np.multiply(values, 0.5, out=values)


def writing_a_vector(model: nn.Module) -> None:
    """Which gives parameters other memory."""
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def writing_one_element(model: nn.Module) -> None:
    """Beside parameters, and other ranks' shards of this one, on the same page."""
    list(model.parameters())[1].view(-1)[3:5] -= 1.0


def clamping(model: nn.Module) -> None:
    """As for a Wasserstein distance."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 0.5


def other_memory_of_the_same_values(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()


def copying_an_average(model: nn.Module) -> None:
    """As who trains on with an average of the weights."""
    average = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        for ours, averaged in zip(model.parameters(), average.parameters(), strict=True):
            ours.copy_(averaged * 0.9)


def swapping_an_average(model: nn.Module) -> None:
    """For an evaluation on rank 0 alone, as libraries for averages of weights do."""
    if pydist.rank() == 0:
        stored = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.copy_(parameter.detach() * 0.9)
        for parameter, before in zip(model.parameters(), stored, strict=True):
            parameter.data.copy_(before)


def loading_a_state(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def loading_the_module(model: Any) -> None:
    """Not through the wrapper, as libraries do that unwrap models."""
    module = model.module
    module.load_state_dict({k: v * 0.5 for k, v in module.state_dict().items()})
    module[0].load_state_dict({k: v * 3.0 for k, v in module[0].state_dict().items()})


def initialising_anew(model: Any) -> None:
    torch.manual_seed(8)
    model.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)


WRITES: list[Write] = [
    writing_in_place,
    writing_past_versions,
    writing_many_at_once,
    writing_through_numpy,
    writing_a_vector,
    writing_one_element,
    clamping,
    other_memory,
    other_memory_of_the_same_values,
    copying_an_average,
    swapping_an_average,
    loading_a_state,
    loading_the_module,
    initialising_anew,
]


def write_alike(write: Write) -> None:
    """On all ranks, as a program without sharing does: it means what it means there."""
    for dtype in (torch.float32, torch.bfloat16):
        twins = Twins(small_model(dtype), torch.optim.AdamW, share_parameters=True)
        before_the_first = copy.deepcopy(twins.models[1].module)
        for number in range(3):
            with torch.no_grad():
                for model in twins.models:
                    write(model)
            twins.check("written")
            pydist.barrier()
            twins.check("written by all")
            if dtype == torch.float32:
                twins.step(number)
                twins.check("stepped")
            else:  # through float32 copies, which the double has none of
                twins.ours.zero_grad()
                loss = twins.models[0](batch(twins.rank, 6, 10, step=number, dtype=dtype))
                loss.square().mean().backward()
                with torch.no_grad():
                    written = [p.detach().clone() for p in twins.models[0].parameters()]
                for group in twins.ours.param_groups:
                    group["lr"] = 0.0
                twins.ours.step()
                for ours, theirs in zip(twins.models[0].parameters(), written, strict=True):
                    assert_same(ours.detach(), theirs, "a step that changes nothing", exact=True)
            if number == 0 and write is not swapping_an_average:
                unchanged = zip(
                    twins.models[1].parameters(), before_the_first.parameters(), strict=True
                )
                is_same = all(torch.equal(a, b) for a, b in unchanged)
                values_stay = write in (other_memory_of_the_same_values, writing_through_numpy)
                assert not is_same or (values_stay and dtype == torch.bfloat16), write


def train() -> None:
    """The same training as without sharing, with a copy of the parameters for all ranks."""
    for dtype in (torch.float32, torch.bfloat16):
        twins = Twins(
            small_model(dtype),
            torch.optim.AdamW,
            options={"lr": 0.01},
            share_parameters=True,
            master_weights=False,
        )
        for step in range(4):
            twins.step(step)
        twins.check("one copy")
        assert no_own_pages(twins.ours)


def no_own_pages(optimizer: pydist.ShardedOptimizer) -> bool:
    """Whether this rank has a copy of nothing."""
    return not any(one_copy.written() for one_copy in optimizer._layout.copies)


def write_all_kinds() -> None:
    """Complex numbers, layouts, scalars, no elements, parameters that join."""
    joined()
    torch.manual_seed(2)
    module = ManyKinds()
    models = [pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=0.001) for _ in range(2)]
    kinds = [True, False]
    optimizers = [
        pydist.ShardedOptimizer(m, torch.optim.SGD, lr=0.1, momentum=0.9, share_parameters=shared)
        for m, shared in zip(models, kinds, strict=True)
    ]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(pydist.rank(), 2, 30, step=number, dtype=torch.float32)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.75)
                if number == 1:
                    model.image.weight.data = model.image.weight.detach() * 2.0
                    model.pairs.data = model.pairs.detach() * 2.0
            optimizer.step()
            if number == 0:
                model.frozen.requires_grad_(True)
        for (name, ours), theirs in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            assert_same(ours.detach(), theirs.detach(), f"{name} of step {number}")


def write_beside_own() -> None:
    """Ranks have parameters of their own among those that they share: more on each than before."""
    rank, _ = joined()
    nets = []
    for shared in (True, False):
        torch.manual_seed(4)
        module = nn.Module()
        module.first = nn.Linear(10, 33)
        module.experts = nn.ModuleList(nn.Linear(33, 33) for _ in range(rank + 1))
        module.last = nn.Linear(33, 1)
        names = [f"experts.{name}" for name, _ in module.experts.named_parameters()]
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        torch.manual_seed(4)
        for parameter in module.last.parameters():
            nn.init.normal_(parameter)
        model = pydist.DataParallel(module, bucket_cap_mb=0.001)
        optimizer = pydist.ShardedOptimizer(
            model, torch.optim.AdamW, lr=0.01, share_parameters=shared
        )
        nets.append((model, module, optimizer))
    for number in range(3):
        for model, module, optimizer in nets:
            optimizer.zero_grad()
            x = module.first(batch(rank, 4, 10, step=number, dtype=torch.float32))
            for expert in module.experts:
                x = expert(x).tanh()
            module.last(x).square().mean().backward()
            model.sync_gradients()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.75)
                module.experts[0].weight.data = module.experts[0].weight.detach() * (1.0 + rank)
            optimizer.step()
        ours, theirs = (model.named_parameters() for model, _, _ in nets)
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            assert_same(a.detach(), b.detach(), f"{name} of step {number}")
    model, module, optimizer = nets[0]
    with (
        pytest.raises(pydist.Error, match=r"experts\.0\.bias, which was written inside"),
        optimizer.writing(),
        torch.no_grad(),
    ):
        module.experts[0].bias.zero_()


def write_apart() -> None:
    """Values that the ranks do not have alike; the model stays as it was."""
    twins = Twins(small_model(), torch.optim.SGD, options={"lr": 0.1}, share_parameters=True)
    model, optimizer = twins.models[0], twins.ours
    for number in range(2):  # before the first step, and between two
        state = {name: value.clone() for name, value in model.state_dict().items()}
        others = "by rank 1 alone"
        for wrong, who in (
            (lambda p: p.data[0, 0].add_(1.0), others),
            (lambda p: setattr(p, "data", p.detach() * 2.0), others),
            (lambda p: p.detach()[0, 0].add_(float(pydist.rank())), "by ranks 1, 2 alone"),
            (lambda p: p.detach()[0, 0].add_(1.0 + pydist.rank()), "with other values on some"),
        ):
            pydist.barrier()
            weight = model.module[2].weight
            if who != others or twins.rank == 1:
                wrong(weight)
            for _ in range(2):
                with pytest.raises(
                    pydist.Mismatch, match=rf"parameter 2\.weight was written {who}"
                ):
                    optimizer.step()
            # Whoever puts it right goes on.
            model.load_state_dict(state)
        twins.step(number)
        twins.check("put right")


def save_what_is_written(folder: str) -> None:
    """Each rank saves a part of the parameters: a checkpoint of different ones would be torn."""
    rank, _ = joined()
    model = pydist.DataParallel(small_model())
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, share_parameters=True)
    name, parameter = next(iter(model.named_parameters()))
    if rank == 0:
        with torch.no_grad():
            parameter.mul_(0.5)
    with pytest.raises(pydist.Mismatch, match=f"{re.escape(name)} written by the program"):
        pydist.save(folder, model=model, optimizer=optimizer)
    if rank != 0:
        with torch.no_grad():
            parameter.mul_(0.5)
    halved = parameter.detach().clone()
    pydist.save(folder, model=model, optimizer=optimizer)
    optimizer.step()
    pydist.load(folder, model=model, optimizer=optimizer)
    assert torch.equal(parameter, halved)


def write_without_sharing() -> None:
    """The same program: every rank has parameters of its own, and writes them."""
    twins = Twins(small_model(), torch.optim.SGD, options={"lr": 0.1})
    twins.step(0)
    with twins.ours.writing() as mine:
        assert mine
        next(twins.models[0].parameters()).mul_(0.5)
    with torch.no_grad():
        next(twins.models[1].parameters()).mul_(0.5)
    twins.step(1)
    twins.check("own parameters")
    with (
        pytest.raises(pydist.InvalidUsage, match="inside"),
        twins.ours.writing(),
        twins.ours.writing(),
    ):
        raise AssertionError("not reached")


@pytest.fixture(scope="module", params=everyday("native", thorough=("gloo",)))
def run_shared(request: pytest.FixtureRequest) -> Any:
    with Ranks(3, {"PYDIST_BACKEND": request.param}) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def test_one_copy_of_the_parameters(run_shared: Any) -> None:
    run_shared(train)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_all_ranks_write_counts_once(run_shared: Any, write: Write) -> None:
    run_shared(write_alike, write)


def test_what_all_ranks_write_into_parameters_of_all_kinds(run_shared: Any) -> None:
    run_shared(write_all_kinds)


def test_what_is_written_beside_parameters_of_ranks_alone(run_shared: Any) -> None:
    run_shared(write_beside_own)


def test_what_ranks_write_apart_is_refused(run_shared: Any) -> None:
    run_shared(write_apart)


def test_what_ranks_write_apart_is_not_saved(run_shared: Any, tmp_path: Path) -> None:
    run_shared(save_what_is_written, str(tmp_path / "checkpoint"))


def test_writing_for_all_where_nothing_is_shared(run_shared: Any) -> None:
    run_shared(write_without_sharing)


def write_alone() -> None:
    for write in WRITES:
        write_alike(write)
    write_all_kinds()
    write_without_sharing()


def test_a_world_of_one() -> None:
    with Ranks(1, {"PYDIST_BACKEND": "native"}) as ranks:
        ranks.run(write_alone, timeout=LIMIT_S)
