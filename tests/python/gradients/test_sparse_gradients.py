"""Embeddings with sparse gradients."""

import contextlib
import copy

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, joined

import pydist

pytestmark = TIME_LIMIT


class Tables(nn.Module):
    def __init__(self, with_head: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.rare = nn.EmbeddingBag(5, 3, sparse=True, mode="sum", dtype=torch.float64)
        self.never = nn.Embedding(2, 3, sparse=True)
        self.head = nn.Linear(3, 2, dtype=torch.float64) if with_head else nn.Identity()

    def forward(self, words: Tensor, rare: Tensor | None) -> Tensor:
        x = self.words(words).sum(0)
        if rare is not None:
            x = x + self.rare(rare.view(1, -1))[0]
        out: Tensor = self.head(x)
        return out.square().sum()


def train_tables(with_head: bool, set_to_none: bool) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Tables(with_head))
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + r)
        words = torch.randint(0, 7, (r + 1,), generator=generator)
        # On one rank alone; with step 3 on none.
        rare = torch.tensor([step % 5, 4]) if r == step % size and step != 3 else None
        out: Tensor = net(words, rare)
        return out

    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            loss(model, rank, 10 + step).backward()
        loss(model, rank, step).backward()
        for r in range(size):
            ((loss(reference, r, step) + loss(reference, r, 10 + step)) / size).backward()
        assert model.module.never.weight.grad is None
        for name, theirs in reference.named_parameters():
            ours = model.get_parameter(name)
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert ours.grad.layout == theirs.grad.layout
                assert_near(ours.grad.to_dense(), theirs.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients(ranks: Ranks, with_head: bool, set_to_none: bool) -> None:
    ranks.run(train_tables, with_head, set_to_none, timeout=LIMIT_S)


def average_twice() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Tables(with_head=True))
    reference = copy.deepcopy(model)
    everywhere, here = torch.tensor([1, 2]), torch.tensor([3])
    model(everywhere, here).backward()
    # Without zeroing, and the second table on rank 0 alone.
    model(everywhere, here if rank == 0 else None).backward()
    for _ in range(size):
        (reference(everywhere, here) / size).backward()
    for r in range(size):
        (reference(everywhere, here if r == 0 else None) / size).backward()
    for name, theirs in reference.named_parameters():
        ours = model.get_parameter(name)
        if theirs.grad is not None:
            assert_near(ours.grad.to_dense(), theirs.grad.to_dense())


def test_averaged_gradients_may_be_added_to(run: Runner) -> None:
    run(average_twice)


def hold_across_steps() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Tables(with_head=True))
    reference = copy.deepcopy(model.module)
    words = torch.tensor([rank])
    model(words, torch.tensor([1])).backward()
    held = model.module.rare.weight.grad
    assert held is not None
    # No gradients are zeroed, and rank 0 alone uses the table again.
    model(words, torch.tensor([2]) if rank == 0 else None).backward()
    assert model.module.rare.weight.grad is held
    for r in range(size):
        (reference(torch.tensor([r]), torch.tensor([1])) / size).backward()
        rare = torch.tensor([2]) if r == 0 else None
        (reference(torch.tensor([r]), rare) / size).backward()
    assert_near(held.to_dense(), reference.rare.weight.grad.to_dense())


def test_a_held_gradient_stays_the_parameters(ranks: Ranks) -> None:
    ranks.run(hold_across_steps, timeout=LIMIT_S)


class ManyTables(nn.Module):
    """Types and widths of many kinds, and more rows than one thread adds up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        kinds = ((40, 3, torch.float64), (9, 1, torch.float32), (3000, 80, torch.float64))
        self.tables = nn.ModuleList(
            nn.Embedding(rows, width, sparse=True, dtype=dtype)
            for _ in range(3)
            for rows, width, dtype in kinds
        )

    def forward(self, rows: Tensor) -> Tensor:
        parts = [table(rows % table.num_embeddings) for table in self.tables]
        return sum((part.double().sin().sum() for part in parts), torch.zeros(()))


def train_many_tables() -> None:
    rank, size = joined()
    model = pydist.DataParallel(ManyTables())
    reference = ManyTables()
    for step in range(3):
        shares = [
            torch.randint(
                0,
                3000,
                (0 if peer == step % size else 2500,),
                generator=torch.Generator().manual_seed(10 * step + peer),
            )
            for peer in range(size)
        ]
        model.zero_grad()
        reference.zero_grad()
        model(shares[rank]).backward()
        for share in shares:
            (reference(share) / size).backward()
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert own.grad is not None
            assert expected.grad is not None
            assert own.grad.is_coalesced()
            # A row of the small table adds up about a thousand values of up to 1, each addition to
            # within 2^-24 of the sum, in another order. A rank's part that is lost would be tens.
            exact = {"rtol": 1e-5, "atol": 5e-3} if own.dtype is torch.float32 else {}
            torch.testing.assert_close(own.grad.to_dense(), expected.grad.to_dense(), **exact)


def test_tables_of_many_kinds(ranks: Ranks) -> None:
    ranks.run(train_many_tables, timeout=LIMIT_S)


def round_once(dtype: torch.dtype, weighted: bool) -> None:
    rank, size = joined()
    weights = [1.0 + r / 3 for r in range(size)] if weighted else [1.0] * size
    model = pydist.DataParallel(nn.Embedding(2, 64, sparse=True, dtype=dtype))
    for step in range(5):
        slopes = [
            torch.randn(64, generator=torch.Generator().manual_seed(10 * step + r)).to(dtype)
            for r in range(size)
        ]
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            if weighted:
                stack.enter_context(model.weighted(weights[rank]))
            (model(torch.tensor([1]))[0] * slopes[rank]).sum().backward()
        exact = sum(w * s.double() for w, s in zip(weights, slopes, strict=True)) / sum(weights)
        assert isinstance(exact, Tensor)
        ours = model.module.weight.grad.to_dense()[1]
        # Half a unit in the last place, and what float32 adds to it.
        half = torch.finfo(dtype).eps / 2 * (1 + 1e-3)
        torch.testing.assert_close(ours.double(), exact, rtol=half, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_rounded_once(ranks: Ranks, dtype: torch.dtype, weighted: bool) -> None:
    ranks.run(round_once, dtype, weighted, timeout=LIMIT_S)
