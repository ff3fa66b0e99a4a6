"""Checkpoints of a model's parts load into parts that are cut otherwise, or it is said why not."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pydist
from pydist.checkpoint import from_parts

pytestmark = pytest.mark.usefixtures("world_of_one")


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


def refused(paths: list[Path], model: nn.Module, optimizer: Any, message: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(pydist.InvalidUsage, match=message):
        from_parts(paths, model=model, optimizer=optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first, second = layers(0, 2), layers(2, 4)
    a = saved(tmp_path / "a", first, adam(first, lr=0.1))
    b = saved(tmp_path / "b", second, adam(second, lr=0.2))
    renamed = nn.Sequential(*second)
    c = saved(tmp_path / "c", renamed, adam(renamed, lr=0.1))
    whole = layers(0, 4, seed=1)

    refused([], whole, None, "paths is empty")
    refused([a], whole, None, r"none of .*a has 2.weight: pass the checkpoints of all parts")
    refused([a, c], whole, None, r"a and .*c both have 0.bias: .*names of the whole model")
    refused([a, b], whole, adam(whole), r"lr=0.1 and 0.2: put them into groups of their own")
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
    refused([a, b], whole, sgd, "a is of Adam, and the optimizer is SGD")
    pydist.save(tmp_path / "d", model=second)
    refused([a, tmp_path / "d"], whole, adam(whole), "no optimizer: it was saved without one")
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
