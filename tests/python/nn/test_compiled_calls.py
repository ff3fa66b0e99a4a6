"""Differentiable collectives within compiled functions: the graph is cut around them."""

import pytest
import torch
from launch import Ranks
from torch import Tensor
from training import LIMIT_S, Runner, batch, joined

import pydist

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def backend() -> str:
    """Compiled code is the same whatever carries the data: one backend is enough."""
    return "native"


def loss_of(x: Tensor, weight: Tensor) -> Tensor:
    rows = (x @ weight).tanh()
    everyone = pydist.nn.all_gather(rows)
    highest = pydist.nn.all_reduce(rows.amax(0), "max")
    whole = pydist.nn.whole_batch(rows)
    lean = pydist.nn.contrastive_loss(rows, rows.sin())
    return (everyone.sin() @ highest).sum() + whole.square().mean() + lean


def compiled() -> None:
    rank, _ = joined()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    weight = batch(0, 3, 3, step=9)
    run_compiled = torch.compile(loss_of, backend="aot_eager")
    for step in range(2):
        x = batch(rank, rank + 2, 3, step=step)
        ours, theirs = (weight.clone().requires_grad_() for _ in range(2))
        loss = run_compiled(x, ours)
        loss.backward()
        expected = loss_of(x, theirs)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(ours.grad, theirs.grad)
    # What lies between the collectives was compiled.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1


def test_compiled_functions(run: Runner) -> None:
    run(compiled)


def in_one_graph() -> None:
    joined()
    torch._dynamo.reset()
    whole = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch.compiler.disable|marked as skip"):
        whole(torch.ones(2, 3), torch.ones(3, 3))


def test_a_full_graph_is_refused() -> None:
    with Ranks(1) as ranks:
        ranks.run(in_one_graph, timeout=LIMIT_S)
