"""Parameters that are unfrozen, frozen or added after the module was wrapped."""

import copy
from collections.abc import Callable

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_like_reference,
    assert_near,
    batch,
    joined,
)

import pydist

pytestmark = TIME_LIMIT


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, dtype=torch.float64)
        self.table = nn.Embedding(5, 4, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)
        self.adapter: nn.Module | None = None
        for part in (self.body, self.table):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).tanh() + self.table(x[:, 0].abs().long().clamp(max=4))
        if self.adapter is not None:
            y = y + self.adapter(y)
        return self.head(y).square().mean()


def unfreeze(net: Net) -> None:
    net.body.requires_grad_(True)
    net.table.requires_grad_(True)


def add(net: Net) -> None:
    # Every rank has other values; rank 0's are to count.
    torch.manual_seed(pydist.rank())
    net.adapter = nn.Linear(4, 4, dtype=torch.float32).double()


def replace(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.full_like(net.head.weight, 0.5))


def freeze(net: Net) -> None:
    net.head.weight.requires_grad_(False)


CHANGES: dict[str, Callable[[Net], None]] = {
    "unfreeze": unfreeze,
    "add": add,
    "replace": replace,
    "freeze": freeze,
}


def places(model: nn.Module) -> list[int]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.data_ptr() for g in gradients if g.layout is torch.strided]


def train_and_change(name: str, cap_mb: float, reduction: str) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Net(), bucket_cap_mb=cap_mb, reduction=reduction)
    torch.manual_seed(0)
    reference = Net()
    for step in range(6):
        if step == 2:
            CHANGES[name](model.module)
            CHANGES[name](reference)
            if name == "add":
                # The first step still runs with each rank's own values.
                pydist.broadcast(reference.adapter.weight.data, root=0)
                pydist.broadcast(reference.adapter.bias.data, root=0)
                model.module.adapter.load_state_dict(reference.adapter.state_dict())
        model.zero_grad()
        model(batch(rank, 3, 4, step=step)).backward()
        reference.zero_grad()
        losses = [reference(batch(r, 3, 4, step=step)) for r in range(size)]
        (torch.stack(losses).sum() / (size if reduction == "mean" else 1)).backward()
        for (n, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (n, step)
            if ours.grad is not None and theirs.grad is not None:
                assert_near(ours.grad.to_dense(), theirs.grad.to_dense())
                assert_near(ours, theirs)
                with torch.no_grad():
                    ours -= 0.1 * ours.grad.to_dense()
                    theirs -= 0.1 * theirs.grad.to_dense()
    planned = {n for bucket in model.plan.buckets for n in bucket.parameters}
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "table" not in n}
    assert trained <= planned
    # What joined has a place of its own by now, which survives zero_grad().
    before = places(model)
    model.zero_grad()
    model(batch(rank, 3, 4)).backward()
    assert places(model) == before


@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize(("cap_mb", "reduction"), [(1e-6, "mean"), (1.0, "sum")])
def test_changes_are_followed(ranks: Ranks, name: str, cap_mb: float, reduction: str) -> None:
    ranks.run(train_and_change, name, cap_mb, reduction, timeout=LIMIT_S)


def insert_a_layer() -> None:
    """A container's insert() tells torch of nothing."""
    rank, size = joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double())
    torch.manual_seed(rank)
    layer = nn.Linear(4, 4).double()
    model(batch(rank, 3, 4)).sum().backward()
    model.module.insert(1, layer)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, 3, 4, step=step)).sin().sum().backward()
        if step == 0:
            continue  # which has brought rank 0's values
        reference = copy.deepcopy(model.module)
        reference.zero_grad()
        for r in range(size):
            (reference(batch(r, 3, 4, step=step)).sin().sum() / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)
    assert sum(len(bucket.parameters) for bucket in model.plan.buckets) == 6


def test_a_layer_that_is_inserted_trains(ranks: Ranks) -> None:
    ranks.run(insert_a_layer, timeout=LIMIT_S)


def add_other_values() -> None:
    joined()
    model = pydist.DataParallel(Net())
    add(model.module)
    model(batch(pydist.rank(), 3, 4)).backward()
    assert model.module.adapter is not None
    values = model.module.adapter.weight.detach().clone()
    pydist.broadcast(values, root=0)
    assert torch.equal(values, model.module.adapter.weight)


def test_added_parameters_get_the_values_of_rank_0(run: Runner) -> None:
    run(add_other_values)


def change_on_one_rank() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    model(batch(rank, 3, 4)).backward()
    if rank == 1:
        unfreeze(model.module)
    with pytest.raises(pydist.Mismatch, match="2 and 5 that train"):
        model(batch(rank, 3, 4)).backward()


def test_a_change_on_one_rank_is_refused_on_all(run: Runner) -> None:
    run(change_on_one_rank)


def replace_a_norm() -> None:
    rank, _ = joined()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = pydist.DataParallel(module)
    model(batch(rank, 5, 4, dtype=torch.float32)).sum().backward()
    module[1] = nn.BatchNorm1d(4)
    for step in range(2):
        model(batch(rank, 5, 4, step=step, dtype=torch.float32)).sum().backward()
        for buffer in module.buffers():
            first = buffer.clone()
            pydist.broadcast(first, root=0)
            assert torch.equal(first, buffer)


def test_buffers_that_come_with_new_parameters_are_the_same_everywhere(run: Runner) -> None:
    run(replace_a_norm)


def move_away(how: str) -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    if how == "meta":
        model.module.to("meta")
        with pytest.raises(pydist.InvalidUsage, match="parameter weight is on meta"):
            model(torch.ones(1, 2, device="meta"))
        return
    # Puts other parameters in place, without registering them.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.module.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    model(torch.full((1, 2), rank + 1.0, dtype=torch.float64)).sum().backward()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]


@pytest.mark.parametrize("how", ["meta", "overwrite"])
def test_conversions_that_replace_parameters(run: Runner, how: str) -> None:
    run(move_away, how)


def add_with_other_strides() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    model(batch(rank, 3, 4)).backward()
    weight = torch.randn(4, 4, dtype=torch.float64)
    model.module.adapter = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    model.module.adapter.weight = nn.Parameter(weight.t() if rank else weight)
    with pytest.raises(pydist.Mismatch, match=r"adapter\.weight"):
        model(batch(rank, 3, 4)).backward()


def test_added_parameters_of_other_strides_are_refused(run: Runner) -> None:
    run(add_with_other_strides)


def evaluate_alone_in_between() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    unfreeze(model.module)
    if rank == 0:
        with torch.no_grad():
            model(batch(rank, 3, 4))
    model(batch(rank, 3, 4)).backward()
    gradient = model.module.body.weight.grad.clone()
    pydist.broadcast(gradient, root=0)
    assert torch.equal(gradient, model.module.body.weight.grad)


def test_a_forward_of_one_rank_waits_for_nobody(run: Runner) -> None:
    run(evaluate_alone_in_between)


def unfreeze_the_last_layer() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).double()
    reference[4].requires_grad_(False)
    # Two layers to a bucket; what backward comes to first joins while others are complete.
    model = pydist.DataParallel(copy.deepcopy(reference), bucket_cap_mb=2 * 20 * 8 / 2**20)
    for step in range(4):
        if step == 2:
            model.module[4].requires_grad_(True)
            reference[4].requires_grad_(True)
        model.zero_grad()
        reference.zero_grad()
        model(batch(rank, 3, 4, step=step)).square().mean().backward()
        for r in range(size):
            (reference(batch(r, 3, 4, step=step)).square().mean() / size).backward()
        assert_like_reference(model, reference)
    assert "4.weight" in model.plan.buckets[0].parameters


def test_the_step_of_an_unfreezing_is_averaged_too(run: Runner) -> None:
    run(unfreeze_the_last_layer)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ParameterList(torch.ones(2) for _ in range(192))
        self.late = nn.ParameterList(torch.ones(2) for _ in range(60))
        self.late.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        used = [p for p in (*self.first, *self.late) if p.requires_grad]
        return torch.stack([(p * x).sum() for p in used]).sum()


def join_in_a_crowd() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Many())
    for step in range(4):
        if step == 2:
            model.module.late.requires_grad_(True)
        model.zero_grad()
        model(torch.full((2,), rank + 1.0)).backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert parameter.grad.tolist() == [(size + 1) / 2] * 2
    assert sum(len(bucket.parameters) for bucket in model.plan.buckets) == 252


def test_many_parameters_join_at_once(run: Runner) -> None:
    run(join_in_a_crowd)


def join_beside_one_without_shape() -> None:
    rank, size = joined()
    module = nn.Sequential(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    model = pydist.DataParallel(module)
    x = torch.ones(1, 2, dtype=torch.float64)
    module.register_parameter("lazy", nn.UninitializedParameter())
    good = nn.Parameter(torch.ones(1, dtype=torch.float64))
    module.register_parameter("good", good)
    for _ in range(2):
        with pytest.raises(pydist.InvalidUsage, match="parameter lazy has no shape yet"):
            model(x)
    del module.lazy
    for _ in range(2):
        model.zero_grad()
        (model(x).sum() + good.sum() * (rank + 1)).backward()
        assert good.grad is not None
        assert good.grad.tolist() == [(size + 1) / 2]
    assert "good" in {name for bucket in model.plan.buckets for name in bucket.parameters}


def test_a_parameter_that_cannot_join_keeps_no_other_from_it(run: Runner) -> None:
    run(join_beside_one_without_shape)
