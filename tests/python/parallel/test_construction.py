"""What `pydist.DataParallel(module)` checks and copies, and uses that it cannot work with."""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
from launch import Outcome, Ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Runner, joined, train_beside_reference

import pydist

pytestmark = TIME_LIMIT


def wrap_different_modules(kind: str) -> None:
    rank, size = joined()
    odd = rank == size - 1
    module: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    if odd and kind == "shape":
        module[1] = nn.Linear(3, 4)
    elif odd and kind == "name":
        module = nn.Sequential(OrderedDict(a=module[0], b=module[1], c=module[2]))
    elif odd and kind == "dtype":
        module[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    elif odd and kind == "frozen":
        module[1].bias.requires_grad_(False)
    elif odd and kind == "count":
        module[1] = nn.Linear(3, 2, bias=False)
    elif odd and kind == "buffer":
        module[2] = nn.BatchNorm1d(2, track_running_stats=False)
    elif odd and kind == "strides":
        module[0].weight = nn.Parameter(torch.zeros(2, 3).t())
    elif kind == "sparse":
        module.append(nn.Embedding(4, 2, sparse=odd))
    elif kind == "order":
        parts = [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))]
        module = nn.Sequential(OrderedDict(reversed(parts) if odd else parts))
    pydist.DataParallel(module, init_sync=kind not in {"strides", "sparse"})


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("shape", "rank 0 has parameter 1.weight: (2, 3) torch.float32, where rank 2 has"),
        ("name", "rank 0 has parameter 0.weight: (3, 2) torch.float32, where rank 2 has"),
        ("dtype", "rank 2 has parameter 1.bias: (2,) torch.float64"),
        ("frozen", "rank 2 has frozen parameter 1.bias"),
        ("count", "rank 0 has parameter 1.bias: (2,) torch.float32, where rank 2 has"),
        ("strides", "rank 2 has parameter 0.weight: (3, 2) torch.float32 with strides (1, 3)"),
        ("sparse", "rank 2 has parameter 3.weight: (4, 2) torch.float32, sparse gradient"),
        ("order", "rank 0 has parameter a.weight: (2, 2) torch.float32, where rank 2 has"),
        ("buffer", "rank 0 has buffer 2.running_mean: (2,) torch.float32, which rank 2 lacks"),
    ],
)
def test_mismatch_is_named_on_every_rank(three: Ranks, kind: str, named: str) -> None:
    outcomes = three.outcomes(wrap_different_modules, kind, timeout=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == ["Mismatch"] * 3
    for outcome in outcomes:
        assert named in outcome.message
    # The job goes on.
    three.run(wrap_different_modules, "same", timeout=LIMIT_S)


def start_from_different_values() -> None:
    rank, _ = joined()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[0].weight.requires_grad_(False)
    module[1].running_mean.fill_(rank + 5)
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    alone = pydist.DataParallel(copy.deepcopy(module), init_sync=False, broadcast_buffers=False)
    assert alone.module[1].running_mean[0] == rank + 5
    model = pydist.DataParallel(module)
    assert torch.equal(model.module[0].weight, first.weight)
    assert torch.equal(model.module[0].bias, first.bias)
    assert model.module[1].running_mean.tolist() == [5.0] * 3
    kept = nn.BatchNorm1d(3)
    kept.running_mean.fill_(rank)
    model = pydist.DataParallel(kept, broadcast_buffers=False)
    assert model.running_mean[0] == rank
    model = pydist.DataParallel(kept, forward_sync_buffers=False)
    assert model.running_mean[0] == 0


def test_values_come_from_rank_0(run: Runner) -> None:
    run(start_from_different_values)


def wrap_wrongly() -> None:
    joined()
    for wrong in (
        lambda: pydist.DataParallel(nn.Linear(2, 2, device="meta")),
        lambda: pydist.DataParallel(nn.LazyLinear(2)),
        lambda: pydist.DataParallel(nn.Linear(2, 2), bucket_cap_mb=0),
        lambda: pydist.DataParallel(nn.Linear(2, 2), bucket_cap_mb_list=[1, 0]),
        lambda: pydist.DataParallel(pydist.DataParallel(nn.Linear(2, 2))),
    ):
        with pytest.raises(pydist.InvalidUsage):
            wrong()
    for kind, view in (
        ("parameter", nn.Parameter(torch.ones(3, dtype=torch.complex64).conj())),
        ("buffer", torch.ones(3, dtype=torch.complex64).conj().imag),
    ):
        module = nn.Linear(2, 2)
        register = module.register_parameter if kind == "parameter" else module.register_buffer
        register("turned", view)  # type: ignore[operator]
        with pytest.raises(pydist.InvalidUsage, match=f"^{kind} turned is a conjugate or negative"):
            pydist.DataParallel(module)
    with pytest.raises(pydist.InvalidUsage, match="no parameter of the module requires a gradient"):
        pydist.DataParallel(nn.Linear(2, 2).requires_grad_(False))


def test_invalid_usage(run: Runner) -> None:
    run(wrap_wrongly)


@contextlib.contextmanager
def until_all_have_raised() -> Iterator[None]:
    """Keeps a rank that raises from leaving its groups, which may be what another one hears of."""
    try:
        yield
    finally:
        pydist.barrier()


class TiedSparsely(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) @ self.table.weight.t()


def tie_sparsely() -> None:
    joined()
    model = pydist.DataParallel(TiedSparsely())
    with until_all_have_raised():
        model(torch.tensor([1, 2])).sum().backward()


def update_in_a_hook() -> None:
    joined()
    module = nn.Linear(2, 1)

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    module.weight.register_post_accumulate_grad_hook(update)
    model = pydist.DataParallel(module)
    with until_all_have_raised():
        model(torch.ones(1, 2)).sum().backward()


def freeze_before_backward() -> None:
    joined()
    module = nn.Linear(2, 1)
    model = pydist.DataParallel(module)
    loss = model(torch.ones(1, 2)).sum()
    module.weight.requires_grad_(False)
    with until_all_have_raised():
        loss.backward()


def differentiate_twice() -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    with until_all_have_raised():
        model(torch.ones(1, 2)).square().sum().backward(create_graph=True)


def convert_afterwards() -> None:
    joined()
    model = pydist.DataParallel(nn.Sequential(OrderedDict(head=nn.Linear(2, 1)))).double()
    with until_all_have_raised():
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (tie_sparsely, "the gradient of parameter table.weight is dense"),
        (differentiate_twice, "create_graph=True"),
        (update_in_a_hook, "parameter weight was taken away by a hook"),
        (freeze_before_backward, "parameter weight was frozen (requires_grad_(False)) between"),
        (convert_afterwards, "parameter head.weight was (1, 2) torch.float32"),
    ],
)
def test_what_cannot_work_says_so(three: Ranks, function: Callable[[], None], message: str) -> None:
    outcomes: list[Outcome] = three.outcomes(function, timeout=LIMIT_S)
    for outcome in outcomes:
        assert outcome.error == "InvalidUsage", outcome.describe()
        assert message in outcome.message
    # The job goes on.
    assert max(three.run(train_beside_reference, "float64", 2, None, timeout=LIMIT_S)) < 1e-9
