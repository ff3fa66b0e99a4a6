"""What `pydist.ShardedOptimizer` refuses, and by which words."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from training import Runner, joined
from twins import TIME_LIMIT

import pydist

pytestmark = TIME_LIMIT


def refuse() -> None:
    joined()
    linear = nn.Linear(4, 4)
    for bad, match in (
        (torch.optim.LBFGS, "LBFGS takes inner products"),
        (torch.optim.Adafactor, "Adafactor factors"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse"),
        (getattr(torch.optim, "Muon", torch.optim.LBFGS), "whole matrices|inner products"),
        *((type(n, (torch.optim.Adam,), {}), f"{n} scales by") for n in ("Lamb", "FusedLAMB")),
        (torch.optim.Adam(linear.parameters()), "not an instance"),
        (nn.Linear, "class of optimizers"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=match):
            pydist.ShardedOptimizer(linear.parameters(), bad)  # type: ignore[arg-type]
    adam = torch.optim.Adam
    with pytest.raises(pydist.InvalidUsage, match="stage is 3"):
        pydist.ShardedOptimizer(linear.parameters(), adam, stage=3)  # type: ignore[arg-type]
    for name, value, match in (
        ("stage", True, "stage is True; it must be 1 or 2"),
        ("stage", "2", "stage is '2'; it must be 1 or 2"),
        ("master_weights", "yes", "master_weights is 'yes'; it must be a bool or 'auto'"),
        ("share_parameters", "no", "share_parameters is 'no', a str; it must be a bool"),
        ("process_group", 3, "process_group= is an int; it must be a process group"),
    ):
        wrong: Any = {name: value}
        with pytest.raises(pydist.InvalidUsage, match=match):
            pydist.ShardedOptimizer(linear.parameters(), adam, **wrong)
    with pytest.raises(pydist.InvalidUsage, match="stage=2 frees gradients"):
        pydist.ShardedOptimizer(linear.parameters(), adam, stage=2)
    with pytest.raises(pydist.InvalidUsage, match=r"wrap it in pydist\.DataParallel"):
        pydist.ShardedOptimizer(linear, adam)
    weight = nn.Linear(2, 2).weight
    for no_groups, match in (
        ([], "empty list.*takes a pydist.DataParallel model, parameters"),
        (5, "model_or_params is an int; pydist.ShardedOptimizer takes"),
        ("weights", "item 0 of model_or_params is a str"),
        ({weight}, "in a set, whose order differs between processes"),
        ([{"params": {weight}}], "in a set, whose order differs between processes"),
        ([1], "item 0 of model_or_params is an int"),
        ([weight, {"params": [weight]}], "item 1 of model_or_params is a dict"),
        ([{"lr": 1}], "parameter group 0 has no 'params', but 'lr'"),
        ([{"params": weight}, {}], "parameter group 1 has no 'params', but nothing"),
        ([{"params": weight}, weight], "parameter group 1 is a Parameter, where the first is"),
        ([{"params": 5}], "'params' of parameter group 0 is an int; it must be a parameter"),
        ([{"params": [("weight", 5)]}], "item 0 of 'params' of parameter group 0 is an int"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=match):
            pydist.ShardedOptimizer(no_groups, adam)  # type: ignore[arg-type]
    plain = pydist.ShardedOptimizer([weight], adam)
    for no_group, match in (
        ({"lr": 1}, "parameter group 1 has no 'params'"),
        ({"params": ["weight"]}, "item 0 of 'params' of parameter group 1 is a str"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=match):
            plain.add_param_group(no_group)
    mesh = init_device_mesh("cpu", (pydist.world_size(),))
    distributed = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    with pytest.raises(pydist.InvalidUsage, match=r"parameter 0 is a DTensor.*distribute_tensor"):
        pydist.ShardedOptimizer([distributed], adam)
    parted = nn.Linear(4, 4)
    parted.weight = distributed
    with pytest.raises(pydist.InvalidUsage, match="parameter weight is a DTensor, made of other"):
        pydist.DataParallel(parted)
    with pytest.raises(pydist.InvalidUsage, match="differentiable=True"):
        pydist.ShardedOptimizer(linear.parameters(), adam, differentiable=True)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        pydist.ShardedOptimizer(linear.parameters(), adam, lr=-1.0)
    model = pydist.DataParallel(linear)
    with pytest.raises(pydist.InvalidUsage, match="several models"):
        pydist.ShardedOptimizer([*model.parameters(), *nn.Linear(2, 2).parameters()], adam)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="has a gradient already"):
        pydist.ShardedOptimizer(model, adam)
    model.zero_grad()
    optimizer = pydist.ShardedOptimizer(model, adam)
    with pytest.raises(pydist.InvalidUsage, match=r"another pydist\.ShardedOptimizer"):
        pydist.ShardedOptimizer(model, adam)
    with pytest.raises(pydist.InvalidUsage, match="join"), model.join():
        pass
    with pytest.raises(pydist.InvalidUsage, match="hook"):
        model.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(pydist.InvalidUsage, match="does not have"):
        optimizer.gradient_of(torch.ones(1))
    sparse = pydist.DataParallel(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(pydist.InvalidUsage, match="weight is sparse"):
        pydist.ShardedOptimizer(sparse, adam)
    with pytest.raises(pydist.Mismatch, match="setting"):
        pydist.ShardedOptimizer(
            pydist.DataParallel(nn.Linear(2, 2)), adam, stage=2 if pydist.rank() else 1
        )


def test_refusals(run_sharded: Runner) -> None:
    run_sharded(refuse)
