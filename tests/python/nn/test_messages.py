"""Differentiable messages: what arrives, and the gradient that comes back."""

import pytest
import torch
from torch import Tensor
from training import Runner, batch, joined

import pydist

pytestmark = pytest.mark.timeout(30)


def relay() -> None:
    """Rank after rank applies its own layer: a model over all ranks, trained like one."""
    rank, size = joined()
    weights = [batch(each, 3, 3, step=1).requires_grad_() for each in range(size)]
    x = batch(0, 4, 3).t()[:, :3].requires_grad_()  # not contiguous
    mine = weights[rank].detach().clone().requires_grad_()
    own = x.detach().requires_grad_()
    value = own if rank == 0 else pydist.nn.recv(rank - 1)
    value = (value @ mine).tanh()
    if rank == size - 1:
        value.square().sum().backward()
    else:
        sent = pydist.nn.send(value, rank + 1)
        assert sent.shape == (0,)
        sent.sum().backward()
    whole: Tensor = x
    for weight in weights:
        whole = (whole @ weight).tanh()
    whole.square().sum().backward()
    torch.testing.assert_close(mine.grad, weights[rank].grad, rtol=1e-12, atol=1e-12)
    if rank == 0:
        torch.testing.assert_close(own.grad, x.grad, rtol=1e-12, atol=1e-12)


def test_a_gradient_goes_back_from_rank_to_rank(run: Runner) -> None:
    run(relay)


def in_a_ring() -> None:
    """Every rank sends to the next and receives from the one before, under a tag."""
    rank, size = joined()
    after, before = (rank + 1) % size, (rank - 1) % size
    leaf = torch.full((rank + 1,), float(rank), dtype=torch.bfloat16, requires_grad=True)
    if rank == 0:
        sent = pydist.nn.send(leaf, after, tag=7)
        received = pydist.nn.recv(before, tag=7)
    else:
        received = pydist.nn.recv(before, tag=7)
        sent = pydist.nn.send(leaf, after, tag=7)
    assert received.dtype == torch.bfloat16
    assert received.tolist() == [before] * (before + 1)
    (sent.sum() + (received * (rank + 2)).sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [after + 2] * (rank + 1)


def test_tags_types_and_sizes(run: Runner) -> None:
    run(in_a_ring)


def without_gradient() -> None:
    rank, size = joined()
    for value in (torch.arange(3), torch.empty(0, 2), torch.tensor(2.5)):
        if rank == 0:
            for peer in range(1, size):
                assert not pydist.nn.send(value, peer).requires_grad
        else:
            received = pydist.nn.recv(0)
            assert not received.requires_grad
            torch.testing.assert_close(received, value)


def test_what_requires_no_gradient_sends_none_back(run: Runner) -> None:
    run(without_gradient)


def refused() -> None:
    rank, _ = joined()
    leaf = torch.ones(2, requires_grad=True)
    if rank == 0:
        pydist.nn.send(leaf, 1)
        sent = pydist.nn.send(leaf, 1)
        (gradient,) = torch.autograd.grad(sent.sum(), leaf, create_graph=True)
        with pytest.raises(pydist.InvalidUsage, match="send can't be differentiated twice"):
            gradient.sum().backward()
    elif rank == 1:
        with torch.no_grad(), pytest.raises(pydist.InvalidUsage, match="rank 0 waits in its back"):
            pydist.nn.recv(0)
        pydist.nn.recv(0).sum().backward()


def test_what_is_refused(run: Runner) -> None:
    run(refused)
