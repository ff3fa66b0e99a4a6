"""Ranks with different numbers of batches: `DataParallel.join()`."""

import contextlib
import copy
import time
from collections.abc import Callable

import pytest
import torch
from launch import Ranks
from torch import nn
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.spare = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hit = self.table(x[:, 0].abs().long().clamp(max=4))
        return self.layer(self.norm(x) + hit).square().mean()


def batches_of(rank: int, size: int) -> int:
    return [4, 0, 2, 4][rank] if size > 2 else [1, 3][rank]


def train_unevenly(by_world_size: bool, reduction: str) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    module = Net()
    # One reference for each rank's statistics; their parameters are kept alike.
    references = [copy.deepcopy(module) for _ in range(size)]
    model = pydist.DataParallel(module, reduction=reduction, bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = [batches_of(r, size) for r in range(size)]
    with model.join(divide_by_initial_world_size=by_world_size):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            with model.no_sync():
                model(batch(rank, 6, 3, step=100 + step)).backward()
            model(batch(rank, 6, 3, step=step)).backward()
            optimizer.step()
    for step in range(max(counts)):
        present = [r for r in range(size) if counts[r] > step]
        for r in present:
            references[r].zero_grad()
            references[r](batch(r, 6, 3, step=100 + step)).backward()
            references[r](batch(r, 6, 3, step=step)).backward()
        divisor = 1 if reduction == "sum" else size if by_world_size else len(present)
        for parameters in zip(*(net.parameters() for net in references), strict=True):
            gradients = [parameters[r].grad for r in present]
            if gradients[0] is None:
                continue
            total = torch.stack([g.to_dense() for g in gradients if g is not None]).sum(0)
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= 0.1 * total / divisor
        # At the end of a step everybody has the buffers of the last rank that took part in it.
        for r in range(size):
            for ours, theirs in zip(
                references[r].buffers(), references[present[-1]].buffers(), strict=True
            ):
                ours.copy_(theirs)
    for ours, theirs in zip(model.parameters(), references[0].parameters(), strict=True):
        assert_near(ours, theirs)
    for ours, theirs in zip(model.buffers(), references[0].buffers(), strict=True):
        assert_near(ours, theirs)
    # Afterwards everything is as before.
    model.zero_grad()
    model(batch(0, 6, 3)).backward()
    assert model.spare.weight.grad is None


@pytest.mark.parametrize(
    ("by_world_size", "reduction"), [(True, "mean"), (False, "mean"), (True, "sum")]
)
def test_uneven_batches(ranks: Ranks, by_world_size: bool, reduction: str) -> None:
    ranks.run(train_unevenly, by_world_size, reduction, timeout=LIMIT_S)


def weigh_unevenly() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    total = torch.zeros(1, 2, dtype=torch.float64)
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            with model.weighted(rank + 1 + step):
                model(batch(rank, 1, 2, step=step)).sum().backward()
            total += model.weight.grad
    for step in range(rank + 1):
        present = range(step, size)
        weights = torch.tensor([r + 1.0 + step for r in present], dtype=torch.float64)
        rows = torch.cat([batch(r, 1, 2, step=step) for r in present])
        total -= (weights @ rows / weights.sum()).view(1, 2)
    assert_near(total, torch.zeros_like(total))


def test_uneven_batches_with_weights(run: Runner) -> None:
    run(weigh_unevenly)


def stop_early() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    done = []

    def loop() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(1 if rank == 1 else 3):
                model(torch.ones(1, 2)).sum().backward()
                done.append(step)

    with pytest.raises(pydist.Error, match="rank 1 has no more batches"):
        loop()
    assert done == [0]
    # All are still in step.
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]


def test_stop_when_the_first_rank_has_no_more(run: Runner) -> None:
    run(stop_early)


def raise_within() -> str:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))

    def loop() -> None:
        with model.join():
            for step in range(3 - rank):
                if (rank, step) == (0, 1):
                    raise ZeroDivisionError
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()

    with pytest.raises((ZeroDivisionError, pydist.Error)) as caught:
        loop()
    # Rank 0's message was for the second step; nobody waits for a third.
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_an_exception_within_join_reaches_the_others(run: Runner) -> None:
    first, *others = run(raise_within)
    assert first == ""
    assert all("raised on rank 0" in message for message in others)


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the loss")


def raise_in_the_loss() -> str:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))

    def loop() -> None:
        with model.join():
            for step in range(3):
                loss = model(torch.ones(1, 2)).sum()
                (Refuse.apply(loss) if (rank, step) == (0, 1) else loss).backward()

    with pytest.raises((ZeroDivisionError, pydist.Error)) as caught:
        loop()
    return str(caught.value)


def test_a_loss_that_raises_within_join_reaches_the_others(run: Runner) -> None:
    first, *others = run(raise_in_the_loss)
    assert "in the loss" in first
    assert all("raised on rank 0" in message for message in others)


def join_when_it_cannot_work() -> None:
    joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(2, 2), pydist.SyncBatchNorm(2)))
    with pytest.raises(pydist.InvalidUsage, match="SyncBatchNorm"), model.join():
        pass
    with model.join(enable=False):
        pass
    with pydist.DataParallel(nn.Linear(2, 1)).join():
        pass  # no rank has a batch


def test_where_join_cannot_work(run: Runner) -> None:
    run(join_when_it_cannot_work)


def come_late() -> float:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    start_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.join())
        if rank == 0:
            for _ in range(3):
                time.sleep(0.2)
                model(torch.ones(1, 2)).sum().backward()
    return time.monotonic() - start_s


def test_those_without_batches_wait_for_the_others(run: Runner) -> None:
    assert min(run(come_late)) > 0.6


def fail_in_the_step_after_a_failure() -> str:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 2))
    seen = []

    def explode(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    def loop() -> None:
        with model.join():
            for step in range(3):
                model.zero_grad()
                if (rank, step) == (0, 2):
                    raise KeyError("data loading")
                x = torch.ones(1, 2, requires_grad=True)
                if (rank, step) == (1, 1):
                    x.register_hook(explode)
                try:
                    model(x).sum().backward()
                except (ZeroDivisionError, pydist.Error) as error:
                    seen.append(f"{step}: {error}")
                    if step == 2:
                        raise

    with pytest.raises((KeyError, pydist.Error)) as caught:
        loop()
    assert [text[0] for text in seen] == (["1"] if rank == 0 else ["1", "2"])
    assert rank == 1 or "backward raised on rank 1" in seen[0]
    # Nobody is left waiting.
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.tolist() == [[2.0] * 2] * 2
    return str(caught.value)


def test_an_exception_within_join_reaches_the_others_after_a_failed_step(run: Runner) -> None:
    first, *others = run(fail_in_the_step_after_a_failure)
    assert first == "'data loading'"
    assert all("raised on rank 0" in message for message in others)


def leave_with_gradients_accumulated(by_world_size: bool) -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    with model.join(divide_by_initial_world_size=by_world_size):
        # Rank 0 has no second micro-batch for its second step.
        for micro in range(3 if rank == 0 else 4):
            if micro % 2 == 0:
                model.zero_grad()
            with model.no_sync(enabled=micro % 2 == 0), model.weighted(1 + rank + micro):
                model(batch(rank, 1, 2, step=micro)).sum().backward()
            last = model.weight.grad.clone()
    if rank == 0:
        return
    weighted = [(1 + r + m, batch(r, 1, 2, step=m)) for r in range(1, size) for m in (2, 3)]
    mean = torch.stack([w * x for w, x in weighted]).sum(0) / sum(w for w, _ in weighted)
    assert_near(last, mean)


@pytest.mark.parametrize("by_world_size", [True, False])
def test_what_is_left_over_when_a_rank_runs_out_counts_for_nothing(
    run: Runner, by_world_size: bool
) -> None:
    run(leave_with_gradients_accumulated, by_world_size)


def go_through_a_frozen_model_within_join() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    with model.join():
        for _ in range(rank + 1):
            model.requires_grad_(False)
            x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
            model(x).sum().backward()
            model.requires_grad_(True)
            model.zero_grad()
            model(x.detach()).sum().backward()
            last = model.weight.grad.clone()
    # The mean over all ranks in this rank's last step.
    assert_near(last, torch.full((1, 2), (size - rank) / size, dtype=torch.float64))


def test_join_does_not_count_backwards_through_a_frozen_model(run: Runner) -> None:
    run(go_through_a_frozen_model_within_join)


def join_two() -> None:
    rank, size = joined()
    models = [pydist.DataParallel(nn.Linear(2, 1, bias=False)) for _ in range(2)]
    with (
        models[0].join(),
        pytest.raises(pydist.InvalidUsage, match=r"another pydist\.DataParallel is in join"),
        models[1].join(),
    ):
        pass
    # One after the other is as it should be.
    for model in models:
        with model.join():
            for _ in range(rank + 1):
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                last = model.weight.grad.clone()
        torch.testing.assert_close(last, torch.full((1, 2), (size - rank) / size))


def test_two_models_in_join_at_once_are_refused(run: Runner) -> None:
    run(join_two)


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1, bias=False)
        self.rarely = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        out: torch.Tensor = self.always(x).sum()
        return out if step else out + self.rarely(x).sum()


def compare_within_join() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Rare())
    with model.join():
        for step in range(rank + 1):
            model.zero_grad(set_to_none=False)
            model(torch.ones(1, 2), step).backward()
            last = model.always.weight.grad.clone()
    torch.testing.assert_close(last, torch.full((1, 2), (size - rank) / size))


def test_gradients_are_compared_among_those_with_batches(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend, "PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(compare_within_join, timeout=LIMIT_S)


def end_with_the_first_rank() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    for _ in range(2):
        with model.join():
            for _ in range(2 if rank else 4):
                model(torch.randn(4, 3)).sum().backward()


def require_warning_of_rank_0(backend: str, function: Callable[[], None], said: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        for outcome in ranks.outcomes(function, timeout=LIMIT_S):
            assert outcome.ok, outcome.describe()
            assert outcome.output.count(said) == (1 if outcome.rank == 0 else 0)


def test_buffers_of_a_rank_without_another_batch_are_warned_of(backend: str) -> None:
    said = "this step has begun with the buffers of rank 1; torch's join() would have"
    require_warning_of_rank_0(backend, end_with_the_first_rank, said)


def accumulate_onto_averages() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(3, 2))
    with model.join():
        for _ in range(3 - rank):
            model(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 2.5 if rank == 0 else 2.0))


def test_averages_that_torch_would_make_smaller_are_warned_of(backend: str) -> None:
    said = "gradients accumulate onto averaged ones"
    require_warning_of_rank_0(backend, accumulate_onto_averages, said)
