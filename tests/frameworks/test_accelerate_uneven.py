"""Accelerate on pydist where processes have different numbers of samples, and what is refused."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launch import Ranks, rank_outcomes, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

if importlib.util.find_spec("accelerate") is None:
    pytest.skip(
        "accelerate is not installed: make test-frameworks installs it", allow_module_level=True
    )

import accelerate_runs as runs
import toy_training as toy

import pydist

LIMIT_S = 50.0


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@runs.leaving()
def gathered(length: int, even: bool) -> Any:
    """Of each batch the numbers of samples, as tensors and as objects."""
    from accelerate import DataLoaderConfiguration

    config = DataLoaderConfiguration(even_batches=even)
    accelerator = runs.accelerator_of("ours", dataloader_config=config)
    loader = accelerator.prepare(DataLoader(toy.Points(length), batch_size=2))
    tensors, objects = [], []
    for numbers, *_ in loader:
        tensors += accelerator.gather_for_metrics([numbers])[0].tolist()
        objects += accelerator.gather_for_metrics([str(int(number)) for number in numbers])
    return tensors, objects


@pytest.mark.parametrize("even", [True, False], ids=["padded", "uneven"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_metrics_have_each_sample_once_in_order(ranks: int, even: bool) -> None:
    length = 2 * ranks + max(1, 2 * ranks - 2)
    for tensors, objects in run_ranks(gathered, ranks, length, even, timeout=LIMIT_S):
        assert tensors == list(range(length))
        assert objects == [str(number) for number in range(length)]


@runs.leaving()
def joined(even_batches: bool | None) -> Any:
    """An epoch of 13 samples in batches of 4: the last batch has one, on rank 0 alone."""
    accelerator = runs.accelerator_of("ours")
    model = toy.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(toy.Points(13), batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for _, inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    return batches, loader.base_dataloader.distributed_sampler.pad, toy.weights_of(model).tolist()


@runs.leaving()
def weighted_by_hand(length: int, accumulated: int) -> tuple[Tensor, Tensor]:
    """What a step changes by a rate of 1, and the gradient that one process has of all samples."""
    from accelerate import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = runs.accelerator_of(
        "ours", dataloader_config=config, gradient_accumulation_steps=accumulated
    )
    model = toy.network().double()
    before = toy.weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(toy.Points(length), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for numbers, x, y in loader:
        with accelerator.accumulate(model), model.weighted(len(numbers)):
            accelerator.backward(nn.functional.mse_loss(model(x.double()), y.double()))
            optimizer.step()
    return before - toy.weights_of(model), toy.gradient_of_all(length)


@pytest.mark.parametrize(("length", "accumulated"), [(7, 1), (13, 2)])
def test_weights_given_by_hand_leave_the_gradient_of_one_process(
    two: Ranks, length: int, accumulated: int
) -> None:
    for change, gradient in two.run(weighted_by_hand, length, accumulated, timeout=LIMIT_S):
        torch.testing.assert_close(change, gradient)


def test_uneven_inputs_are_joined_with_the_weights_of_one_process(two: Ranks) -> None:
    ((_, _, expected),) = run_ranks(joined, 1, None, timeout=LIMIT_S)
    outcomes = two.run(joined, False, timeout=LIMIT_S)
    assert [batches for batches, *_ in outcomes] == [4, 3]
    for _, pad, weights in outcomes:
        assert pad == "repeat"
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert [batches for batches, *_ in two.run(joined, None, timeout=LIMIT_S)] == [4, 4]


@runs.leaving()
def locally(whose: str) -> Any:
    """Six steps of LocalSGD, of which every second averages the parameters."""
    from accelerate.local_sgd import LocalSGD

    accelerator = runs.accelerator_of(whose)
    model = toy.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    points = toy.Points(24)
    weights = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for step in range(6):
            _, inputs, targets = points[4 * step + 2 * accelerator.process_index + torch.arange(2)]
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            weights.append(toy.weights_of(model).tolist())
    return weights


def test_local_sgd_is_that_of_ddp(two: Ranks) -> None:
    ours, theirs = (two.run(locally, whose, timeout=LIMIT_S) for whose in ("ours", "stock"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ours[0][1] == ours[1][1]
    assert ours[0][2] != ours[1][2]


@runs.leaving()
def triggered(whose: str) -> Any:
    """Two forwards under no_sync, and an average in the second backward."""
    accelerator = runs.accelerator_of(whose)
    model = accelerator.prepare(toy.network())
    points = toy.Points(8)
    _, inputs, targets = points[4 * accelerator.process_index + torch.arange(4)]
    with accelerator.no_sync(model):
        first = nn.functional.mse_loss(model(inputs[:2]), targets[:2])
        second = nn.functional.mse_loss(model(inputs[2:]), targets[2:])
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


def test_a_backward_can_average_what_forwards_without_have_begun(two: Ranks) -> None:
    ours, theirs = (two.run(triggered, whose, timeout=LIMIT_S) for whose in ("ours", "stock"))
    assert len(ours[0]) == 4
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(8))


@runs.leaving()
def streamed() -> list[int]:
    accelerator = runs.accelerator_of("ours")
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    return [number for batch in loader for number in batch.tolist()]


def test_accelerate_shares_out_an_iterable_data_set(two: Ranks) -> None:
    shares = two.run(streamed, timeout=LIMIT_S)
    assert sorted(shares[0] + shares[1]) == list(range(8))


@runs.leaving()
def of_other_samples() -> list[int]:
    accelerator = runs.accelerator_of("ours")
    sampler = SequentialSampler(range(8))
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2, sampler=sampler))
    return [number for batch in loader for number in batch.tolist()]


def test_accelerate_shares_out_what_a_sampler_chooses(two: Ranks) -> None:
    shares = two.run(of_other_samples, timeout=LIMIT_S)
    assert sorted(shares[0] + shares[1]) == list(range(8))


@runs.leaving()
def prepared_twice() -> Any:
    """A loader of pydist's is not shared out again, nor one that was prepared before."""
    accelerator = runs.accelerator_of("ours")
    own = pydist.prepare(DataLoader(toy.Points(8), batch_size=2))
    loader = accelerator.prepare_data_loader(accelerator.prepare_data_loader(own))
    return [number for numbers, *_ in loader for number in numbers.tolist()]


def test_samples_are_shared_out_once(two: Ranks) -> None:
    shares = two.run(prepared_twice, timeout=LIMIT_S)
    assert sorted(shares[0] + shares[1]) == list(range(8))


@runs.leaving()
def shared_by_torch() -> None:
    accelerator = runs.accelerator_of("ours")
    points = toy.Points(8)
    sampler = DistributedSampler(points, accelerator.num_processes, accelerator.process_index)
    accelerator.prepare(DataLoader(points, batch_size=2, sampler=sampler))


@runs.leaving()
def without_cpu() -> None:
    from pydist.integrations.accelerate import Accelerator

    Accelerator()


@runs.leaving()
def loaded_with(batch_size: int, path: str) -> None:
    accelerator = runs.accelerator_of("ours")
    loader = accelerator.prepare(DataLoader(toy.Points(24), batch_size=batch_size))
    if path.endswith("saved"):
        next(iter(loader))
        accelerator.save_state(path)
        accelerator.wait_for_everyone()
        path = path.removesuffix("saved")
        return
    accelerator.load_state(f"{path}saved")


def test_what_cannot_be_is_refused(two: Ranks, tmp_path: Any) -> None:
    two.run(loaded_with, 3, f"{tmp_path}/saved", timeout=LIMIT_S)
    for function, arguments, said in (
        (shared_by_torch, (), "DistributedSampler"),
        (without_cpu, (), "cpu=True"),
        (loaded_with, (4, f"{tmp_path}/"), "batch"),
    ):
        if function is without_cpu and torch.cuda.is_available():
            continue
        for outcome in rank_outcomes(function, 2, *arguments, timeout=LIMIT_S):
            assert outcome.error == "InvalidUsage", outcome.describe()
            assert said in outcome.message
