"""The contrastive loss in blocks: its value, its gradients, and how much memory it takes."""

from typing import Any
from weakref import finalize

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from thorough import everyday
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import Runner, batch, joined

import pydist

pytestmark = pytest.mark.timeout(30)


def plain(first: Tensor, second: Tensor, scale: Tensor | float) -> Tensor:
    similarities = scale * first @ second.t()
    pairs = torch.arange(len(first))
    return (F.cross_entropy(similarities, pairs) + F.cross_entropy(similarities.t(), pairs)) / 2


def compare(rows: list[int], scale: float, dtype_name: str, tolerance: float) -> None:
    """The loss and all gradients, with a loss of each rank that counts differently."""
    rank, size = joined()
    dtype = getattr(torch, dtype_name)
    firsts = [batch(each, rows[each], 6, dtype=dtype) for each in range(size)]
    seconds = [batch(each, rows[each], 6, step=1, dtype=dtype) for each in range(size)]
    mine = [firsts[rank].t().contiguous().t().requires_grad_(), seconds[rank].requires_grad_()]
    own_scale = torch.tensor([scale], requires_grad=True, dtype=torch.float64)
    loss = pydist.nn.contrastive_loss(mine[0], mine[1], own_scale)
    ours = torch.autograd.grad(loss * (rank + 1), [*mine, own_scale])
    # 16-bit rows as they are, computed in float64.
    whole = [torch.cat(each).detach().double().requires_grad_() for each in (firsts, seconds)]
    whole_scale = torch.tensor([scale], requires_grad=True, dtype=torch.float64)
    expected = plain(*whole, whole_scale)
    counted = sum(range(1, size + 1))
    theirs = torch.autograd.grad(expected * counted, [*whole, whole_scale])
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    for own, reference in zip(ours[:2], theirs[:2], strict=True):
        part = reference.split(rows[:size])[rank]
        torch.testing.assert_close(own.double(), part, rtol=tolerance, atol=tolerance)
    # The mean over the ranks, which DataParallel takes, leaves it as it is.
    torch.testing.assert_close(ours[2] * size, theirs[2], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "kind", everyday(("float64", 1e-9), ("bfloat16", 3e-2), thorough=(("float32", 1e-4),))
)
def test_equals_the_plain_loss(run: Runner, kind: tuple[str, float]) -> None:
    run(compare, [4, 4, 4, 4], 1.7, *kind)


@pytest.mark.parametrize("rows", [[5, 0, 2, 3], [0, 1, 0, 0]], ids=str)
@pytest.mark.parametrize("scale", [1.7, 0.0, 100.0])
def test_uneven_pairs_and_scales(run: Runner, rows: list[int], scale: float) -> None:
    run(compare, rows, scale, "float64", 1e-9)


def edges() -> None:
    rank, size = joined()
    empty = torch.empty(0, 3, requires_grad=True)
    loss = pydist.nn.contrastive_loss(empty, empty)
    assert loss.isnan()
    loss.backward()
    frozen = torch.eye(3)
    scale = torch.tensor(2.0, requires_grad=rank == 0)
    loss = pydist.nn.contrastive_loss(frozen, frozen, scale)
    loss.backward()  # on all ranks, though only one's scale is trained
    assert (scale.grad is not None) == (rank == 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = pydist.nn.contrastive_loss(frozen, frozen, 2.0)
    torch.testing.assert_close(same, loss.detach(), rtol=1e-6, atol=1e-6)
    leaf = torch.eye(3, requires_grad=True)
    loss = pydist.nn.contrastive_loss(leaf, leaf.detach())
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(pydist.InvalidUsage, match="contrastive_loss can't be differentiated twice"):
        gradient.sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="contrastive_loss can't be differentiated twice"):
        torch.autograd.grad(gradient.sum(), leaf, allow_unused=True)
    assert size == pydist.world_size()


def test_no_pairs_frozen_rows_and_autocast(run: Runner) -> None:
    run(edges)


class Elements(TorchDispatchMode):
    """Counts the elements of all memory that operations take, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, elements = storage.data_ptr(), storage.nbytes() // tensor.element_size()
        if address == 0 or address in self._known:
            return
        self._known.add(address)
        self.now += elements
        self.most = max(self.most, self.now)
        finalize(storage, self._forget, address, elements)

    def _forget(self, address: int, elements: int) -> None:
        self._known.discard(address)
        self.now -= elements


def memory() -> tuple[float, float]:
    """The most elements that the loss and the plain one take, in those of a block, B^2/N."""
    rank, size = joined()
    pairs, features = 64 * size, 2
    rows = [batch(rank, 64, features, step=step).requires_grad_() for step in (0, 1)]
    with Elements() as ours:
        pydist.nn.contrastive_loss(rows[0], rows[1], 3.0).backward()
    with Elements() as theirs:
        plain(*pydist.nn.whole_batch((rows[0], rows[1])), 3.0).backward()
    block = pairs * pairs / size
    return ours.most / block, theirs.most / block


def test_takes_little_memory(run: Runner) -> None:
    for ours, theirs in run(memory):
        # Two blocks, and tensors that have no more elements than the inputs.
        assert 2 <= ours < 2.5
        assert theirs > 4 * 3 - 1  # of them as many as in one process
