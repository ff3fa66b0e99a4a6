"""Deep copies of a wrapper: they cost nothing until they train, and then average."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.swa_utils import AveragedModel, update_bn
from training import TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.encode(x)))
        return out


def mean_gradients(net: nn.Module, ranks: int) -> list[Tensor | None]:
    """What one process has as the mean of the ranks' gradients."""
    reference = copy.deepcopy(net)
    for rank in range(ranks):
        (reference(batch(rank, 5, 4)).square().mean() / ranks).backward()
    return [parameter.grad for parameter in reference.parameters()]


def require_averaging(model: Any) -> None:
    """One averaged backward, beside one process."""
    rank, size = joined()
    module = model.module.requires_grad_(True)
    expected = mean_gradients(module, size)
    model.zero_grad()
    model(batch(rank, 5, 4)).square().mean().backward()
    assert model.has_joined
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert_near(parameter.grad, gradient)


def train_copies() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Net())
    first, second = copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))
    assert type(first) is pydist.DataParallel
    assert not first.has_joined
    assert "has not joined" in repr(first)
    for number, net in enumerate((first, model, second, first)):
        assert not net.is_retired
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        require_averaging(net)
        optimizer.step()
        assert net.plan, number
    # What ranks have is the same, and each model is its own.
    for net in (first, model, second):
        for parameter in net.parameters():
            of_first = parameter.detach().clone()
            pydist.broadcast(of_first, root=0)
            assert torch.equal(of_first, parameter)
    assert not torch.equal(model.module.fc.weight, first.module.fc.weight)
    assert torch.equal(model.module.fc.weight, second.module.fc.weight)
    assert f"ranks={size}" in repr(first)
    assert rank == pydist.rank()


def test_copies_average(run_on_each: Runner) -> None:
    run_on_each(train_copies)


def evaluate_alone() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    x = batch(rank, 5, 4)
    if rank == 1:
        best = copy.deepcopy(model).eval()
        with torch.no_grad():
            expected = model.module.eval()(x)
            model.train()
            assert torch.equal(best(x), expected)
            assert torch.equal(best.encode(x), model.module.encode(x))
        with torch.inference_mode():
            best(x)
        # Also with gradients, of the inputs alone.
        teacher = copy.deepcopy(model).requires_grad_(False)
        inputs = x.clone().requires_grad_()
        (teacher(inputs).sum() + teacher.encode(inputs).sum()).backward()
        assert inputs.grad is not None
        average = AveragedModel(model)
        average.update_parameters(model)
        update_bn([x], average)
        assert not any(net.has_joined for net in (best, teacher, average.module))
        for unseen in (lambda: best.plan, best.stats, best.reset_stats, best._get_ddp_logging_data):
            with pytest.raises(pydist.InvalidUsage, match="a copy that has not met the other"):
                unseen()
    require_averaging(model)


def test_one_rank_copies_and_evaluates_alone(run: Runner) -> None:
    run(evaluate_alone)


def use_before_joining() -> None:
    rank, _ = joined()
    net = Net().float()
    model = pydist.DataParallel(net)
    model.epoch = 3
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    copied = copy.deepcopy(model)
    assert (copied.epoch, copied.fc.in_features) == (3, 4)
    assert [name for name, _ in copied.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert copied.state_dict().keys() == net.state_dict().keys()
    copied.double().requires_grad_(False)
    state = {name: torch.full_like(value, 0.5) for name, value in copied.state_dict().items()}
    copied.load_state_dict({f"module.{name}": value for name, value in state.items()})
    copied.apply(lambda part: isinstance(part, nn.Linear) and nn.init.eye_(part.weight))
    assert copied.eval().module.norm.training is False
    copied.train()
    assert net.fc.weight.dtype == torch.float32
    assert not copied.has_joined
    require_averaging(copied)
    assert calls == ["forward"]
    assert copied.fc.weight.grad.dtype == torch.float64
    assert type(pickle.loads(pickle.dumps(copy.deepcopy(model)))) is Net
    with pytest.raises(pydist.InvalidUsage, match=r"is a pydist\.DataParallel already"):
        pydist.DataParallel(copy.deepcopy(model))
    assert rank == pydist.rank()


def test_what_needs_no_ranks_works_before_joining(run: Runner) -> None:
    run(use_before_joining)


def join_by_calling(how: str) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    copied = copy.deepcopy(model)
    x = batch(rank, 5, 4)
    if how == "a method of the module":
        loss = copied.encode(x).sum()
        assert copied.has_joined
        loss.backward()
        local = torch.autograd.grad(model.module.encode(x).sum(), model.module.fc.weight)[0]
        pydist.all_reduce(local, "mean")
        assert_near(copied.fc.weight.grad, local)
    elif how == "weighted":
        with copied.weighted(2.0):
            assert copied.has_joined
            copied(x).sum().backward()
    elif how == "join":
        with copied.join():
            for _ in range(1 + rank):
                copied(x).sum().backward()
    elif how == "sync_gradients":
        gradient = torch.full_like(copied.fc.weight, float(rank))
        copied.fc.weight.grad = gradient
        copied.sync_gradients()
        assert_near(copied.fc.weight.grad, torch.full_like(gradient, 1.0))
    elif how == "a communication hook":
        copied.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        optimizer = pydist.ShardedOptimizer(
            copied if how == "the model sharded" else copied.parameters(), torch.optim.SGD, lr=0.1
        )
        assert copied.has_joined
        before = copied.fc.weight.detach().clone()
        copied(x).sum().backward()
        optimizer.step()
        assert not torch.equal(copied.fc.weight, before)
        of_first = copied.fc.weight.detach().clone()
        pydist.broadcast(of_first, root=0)
        assert torch.equal(of_first, copied.fc.weight)
        return
    assert copied.has_joined
    copied.zero_grad()
    require_averaging(copied)


@pytest.mark.parametrize(
    "how",
    [
        "a method of the module",
        "weighted",
        "join",
        "sync_gradients",
        "a communication hook",
        "the model sharded",
        "parameters sharded",
    ],
)
def test_what_needs_all_ranks_joins(run: Runner, how: str) -> None:
    run(join_by_calling, how)


def accumulate(is_copied_inside: bool) -> None:
    rank, size = joined()
    model = pydist.DataParallel(Net())
    if is_copied_inside:
        with model.no_sync():
            copied = copy.deepcopy(model)
        assert not copied.require_backward_grad_sync
        copied.require_backward_grad_sync = True
    else:
        copied = copy.deepcopy(model)
    expected = mean_gradients(model.module, size)
    with copied.no_sync():
        assert not copied.require_backward_grad_sync
        copied(batch(rank, 5, 4)).square().mean().backward()
    assert copied.require_backward_grad_sync
    copied(batch(rank, 5, 4)).square().mean().backward()
    for parameter, gradient in zip(copied.parameters(), expected, strict=True):
        assert gradient is not None
        assert_near(parameter.grad, 2 * gradient)


@pytest.mark.parametrize("is_copied_inside", [False, True])
def test_copies_accumulate(run: Runner, is_copied_inside: bool) -> None:
    run(accumulate, is_copied_inside)


def keep_settings() -> None:
    rank, size = joined()
    group = dist.new_group([0, 1])
    if rank > 1:
        return
    model = pydist.DataParallel(
        Net(), process_group=group, reduction="sum", bucket_cap_mb=1e-6, compress="bf16"
    )
    model.broadcast_buffers = False
    copied = copy.deepcopy(model)
    assert copied.process_group is group
    assert not copied.broadcast_buffers
    (expected,) = mean_gradients(model.module, 2)[:1]
    copied(batch(rank, 5, 4)).square().mean().backward()
    assert expected is not None
    assert_near(copied.module.fc.weight.grad, 2 * expected)
    assert len(copied.plan.buckets) == 6
    own = copied.module.norm.running_mean.clone()
    dist.broadcast(own, src=0, group=group)
    assert torch.equal(own, copied.module.norm.running_mean) == (rank == 0)
    with pytest.raises(pydist.InvalidUsage, match="compress="):
        copied.register_comm_hook(None, default_hooks.allreduce_hook)
    assert size == 3


def test_settings_are_kept(run: Runner) -> None:
    run(keep_settings)


class Own(pydist.DataParallel):
    """Plans one bucket for each parameter, and counts the buckets that it averages."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["averaged"] = []
        super().__init__(module)

    def plan_buckets(
        self, parameters: Sequence[pydist.PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        return [[parameter.index] for parameter in parameters]

    def average_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.averaged.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, async_op=True)
        size = dist.get_world_size()
        future: torch.futures.Future[Tensor] = work.get_future().then(
            lambda done: done.value()[0] / size
        )
        return future


def copy_a_class_of_ones_own() -> None:
    joined()
    model = Own(Net())
    copied = copy.deepcopy(model)
    assert type(copied) is Own
    require_averaging(copied)
    assert (len(copied.averaged), len(model.averaged)) == (6, 0)


def test_a_class_of_ones_own_is_kept(run: Runner) -> None:
    run(copy_a_class_of_ones_own)


def hook_the_original() -> None:
    joined()
    model = pydist.DataParallel(Net())

    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return default_hooks.allreduce_hook(state, bucket).then(lambda done: done.value() * 2)

    model.register_comm_hook(None, doubled)
    require_averaging(copy.deepcopy(model))  # torch's copies have no communication hook either


def test_communication_hooks_stay_behind(run: Runner) -> None:
    run(hook_the_original)


def ignore_parameters() -> None:
    rank, size = joined()
    net = Net()
    pydist.DataParallel._set_params_and_buffers_to_ignore_for_model(net, ["out.weight", "out.bias"])
    with torch.no_grad():
        net.out.weight += rank
    model = pydist.DataParallel(net)
    copied = copy.deepcopy(model)
    assert copied.has_alone(copied.module.out.weight)
    x = batch(rank, 5, 4)
    copied(x).sum().backward()
    (local,) = torch.autograd.grad(model.module(x).sum(), [model.module.out.weight])
    assert_near(copied.module.out.weight.grad, local)
    others = [torch.empty_like(copied.module.fc.weight) for _ in range(size)]
    dist.all_gather(others, copied.module.fc.weight.grad)
    assert all(torch.equal(other, others[0]) for other in others)


def test_ignored_parameters_stay_each_ranks_own(run: Runner) -> None:
    run(ignore_parameters)


def differ_at_joining() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    copied = copy.deepcopy(model)
    if rank == 1:
        copied.module.more = nn.Linear(4, 4).double()
    for _ in range(2):
        with pytest.raises(pydist.Mismatch, match=r"rank 1 has parameter more\.weight"):
            copied(batch(rank, 5, 4))
    assert not copied.has_joined
    if rank == 1:
        del copied.module.more
    require_averaging(copied)


def test_copies_that_differ_raise_on_all_ranks(run: Runner) -> None:
    run(differ_at_joining)


def copy_buffers(make: Callable[[], nn.Module]) -> None:
    """Ranks whose buffers differ have rank 0's from the first forward on, as in torch."""
    rank, _ = joined()
    model = pydist.DataParallel(make())
    for by_method in (False, True):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.module.norm.running_mean.fill_(float(rank))
        copied.module.norm.eval()
        x = batch(rank, 5, 4)
        (copied.encode(x) if by_method else copied(x)).sum().backward()
        assert copied.module.norm.running_mean.tolist() == [0.0] * 3


def test_buffers_are_rank_0s(run: Runner) -> None:
    run(copy_buffers, Net)


def save_and_load(folder: str) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Net())
    copied = copy.deepcopy(model)
    pydist.save(f"{folder}/saved", model=copied)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    pydist.load(f"{folder}/saved", model=copied)
    assert not copied.has_joined
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    require_averaging(copied)
    assert rank == pydist.rank()


def test_copies_are_saved_and_loaded(run: Runner, tmp_path: Path) -> None:
    run(save_and_load, str(tmp_path))


def synchronize_batch_norm() -> None:
    rank, size = joined()
    whole = Net()
    model = pydist.DataParallel(pydist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)))
    copied = copy.deepcopy(model)
    copied(batch(rank, 5, 4)).square().mean().backward()
    whole(torch.cat([batch(r, 5, 4) for r in range(size)])).square().mean().backward()
    for ours, theirs in zip(copied.parameters(), whole.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


def test_synchronized_batch_norm_in_a_copy(run: Runner) -> None:
    run(synchronize_batch_norm)


def copy_with_its_optimizer() -> None:
    joined()
    model = pydist.DataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other, stepping = copy.deepcopy((model, optimizer))
    require_averaging(other)
    before = other.module.fc.weight.detach().clone()
    kept = model.module.fc.weight.detach().clone()
    stepping.step()
    assert not torch.equal(other.module.fc.weight, before)
    assert torch.equal(model.module.fc.weight, kept)


def test_a_copy_beside_its_optimizer(run: Runner) -> None:
    run(copy_with_its_optimizer)


def compile_a_copy() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Net())
    copied = copy.deepcopy(model)
    expected = mean_gradients(model.module, size)
    compiled = torch.compile(copied, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        compiled(batch(rank, 5, 4)).square().mean().backward()
    assert copied.has_joined
    for parameter, gradient in zip(copied.parameters(), expected, strict=True):
        assert_near(parameter.grad, gradient)


def test_a_compiled_copy_joins(run: Runner) -> None:
    run(compile_a_copy)
