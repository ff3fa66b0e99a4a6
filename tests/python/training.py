"""What the tests of training share: ranks on each backend, batches, and a model with a reference.

Every rank computes the reference itself: the same model, on the batches of all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn

import pydist
from pydist.parallel import reducer

# Of a call on all ranks, and of a test: the first says more when it passes.
LIMIT_S = 25.0
TIME_LIMIT = pytest.mark.timeout(40)
Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=everyday("native", thorough=("gloo",)))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=everyday(3, thorough=(4,)))
def ranks(request: pytest.FixtureRequest, backend: str) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(backend: str) -> Iterator[Ranks]:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(three: Ranks) -> Runner:
    return lambda function, *args: three.run(function, *args, timeout=LIMIT_S)


@pytest.fixture
def run_on_each(ranks: Ranks) -> Runner:
    """On 3 and 4 ranks."""
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


class RanksOfHosts(Ranks):
    """Ranks of which so many count as of one host: the engine connects these by TCP."""

    def __init__(self, nprocs: int, env: Mapping[str, str | None], ranks_of_a_host: int) -> None:
        self._ranks_of_a_host = ranks_of_a_host
        super().__init__(nprocs, env)

    def _rank_environment(self, rank: int, env: Mapping[str, str | None] | None) -> dict[str, str]:
        host = f"host {rank // self._ranks_of_a_host}"
        return super()._rank_environment(rank, {**(env or {}), "PYDIST_HOST_ID": host})


@pytest.fixture(scope="module")
def three_hosts(backend: str) -> Iterator[Ranks]:
    with RanksOfHosts(3, {"PYDIST_BACKEND": backend}, ranks_of_a_host=1) as ranks:
        yield ranks


@pytest.fixture
def run_over_hosts(three_hosts: Ranks) -> Runner:
    """On 3 ranks, each of a host of its own."""
    return lambda function, *args: three_hosts.run(function, *args, timeout=LIMIT_S)


def joined() -> tuple[int, int]:
    """Joins the job; returns this process's rank and the number of ranks.

    From then on gradients of all sizes are made in place, so that small models show as much as
    large ones.
    """
    reducer.LEAST_MADE_IN_PLACE = 1
    torch.set_num_threads(1)
    pydist.init()
    return pydist.rank(), pydist.world_size()


def assert_near(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def batch(rank: int, *shape: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A rank's inputs in a step, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Parts(nn.ModuleDict):
    """Of which each forward takes one."""

    def forward(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = self[name](x)
        return out


class Branches(nn.Module):
    """Of several branches, each forward takes one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(4, 1, dtype=torch.float64) for _ in range(count))
        self.never = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.branches[which](self.trunk(x).tanh())
        return out.mean()


class Waves(nn.Module):
    """Layers, and a norm whose statistics they share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        out: Tensor = self.norm(x)
        return out


def wave_loss(net: nn.Module, rank: int, step: int) -> Tensor:
    device = next(net.parameters()).device
    out: Tensor = net(batch(rank, 5, 6, step=step).to(device))
    # Not the squares: their mean is the same whatever BatchNorm normalizes.
    return (out * torch.arange(6, dtype=torch.float64, device=device)).sin().mean()


class Tied(nn.Module):
    """A shared weight, a frozen one, one in channels-last layout, and mixed precision inside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16, dtype=dtype)
        image = nn.Conv2d(2, 3, 2, dtype=dtype)
        self.image = image.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Parameter(torch.randn(16, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))
        self.outside = nn.Linear(16, 8, bias=False, dtype=dtype)
        self.outside.weight = nn.Parameter(self.inside.weight.detach().t().clone().t())
        self.again = nn.Linear(8, 16, dtype=dtype)
        self.again.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x).tanh() + self.frozen
        z = self.outside.weight.reshape(16, 8)
        y = self.again((y * self.scale).to(x.dtype) @ z)
        image: Tensor = self.image(x.view(-1, 2, 2, 2))
        out: Tensor = y.square().mean(-1) + image.square().mean((1, 2, 3))
        return out


def normalized_model(**settings: Any) -> pydist.DataParallel:
    """Two layers with batch normalisation between them, wrapped."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    return pydist.DataParallel(nn.Sequential(*layers), **settings)


def train_normalized(model: pydist.DataParallel, optimizer: Any, steps: int) -> None:
    """Steps on batches of this rank's."""
    generator = torch.Generator().manual_seed(pydist.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


class Cut(nn.Module):
    """Cut over two devices and the CPU: buffers, a shared weight, a branch that no rank takes."""

    @classmethod
    def with_reference(cls, first: str, second: str) -> tuple["Cut", "Cut"]:
        """One on these devices, and the same on the CPU."""
        torch.manual_seed(5)
        reference, module = cls("cpu", "cpu"), cls(first, second)
        module.load_state_dict(reference.state_dict())
        return module, reference

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.places = first, second
        self.table = nn.Embedding(7, 6, dtype=torch.float64).to(first)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64).to(first)
        self.inside = nn.Linear(6, 8, dtype=torch.float64).to(first)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex128, device="cpu").to(second))
        self.outside = nn.Linear(8, 1, dtype=torch.float64).to(second)
        self.never = nn.Linear(8, 1, dtype=torch.float64).to(second)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        first, second = self.places
        y = self.norm(x.to(first) + self.table(words.to(first)))
        y = self.inside(self.inside(y).tanh()[:, :6]).to(second)
        y = (y * self.turn).abs()
        loss: Tensor = self.outside(y).cpu() + self.bias
        return loss.square().mean()


def loss_of_cut(model: nn.Module, rank: int, step: int) -> Tensor:
    """For `train_like_reference`."""
    words = torch.arange(5) * (rank + 1) % 7
    loss: Tensor = model(batch(rank, 5, 6, step=step), words)
    return loss


def train_beside_reference(dtype_name: str, steps: int, cap_mb: float | None) -> float:
    """Trains `Tied` here and on the whole batch; returns how far the parameters ever were apart."""
    dtype = getattr(torch, dtype_name)
    rank, size = joined()
    torch.manual_seed(3)
    reference = Tied(dtype)
    torch.manual_seed(3 if rank == 0 else 4)  # the values come from rank 0
    module = Tied(dtype)
    model = pydist.DataParallel(module, bucket_cap_mb=cap_mb)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(steps):
        batches = [batch(r, 6, 8, step=step, dtype=dtype) for r in range(size)]
        ours.zero_grad(set_to_none=step % 2 == 0)
        model(batches[rank]).mean().backward()
        ours.step()
        theirs.zero_grad()
        reference(torch.cat(batches)).mean().backward()
        theirs.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            worst = max(worst, (a - b).abs().max().item())
    return worst


def assert_like_reference(
    model: nn.Module, reference: nn.Module, tolerance: float = 1e-12, *, gradients: bool = True
) -> None:
    """Compares parameters, buffers and gradients, in order; the model may be on a device."""

    def compare(name: str, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(
            ours.to(theirs.device),
            theirs,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"{name}: {text}",
        )

    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        compare(name, ours, theirs)
        if gradients:
            assert (ours.grad is None) == (theirs.grad is None), name
        if gradients and ours.grad is not None and theirs.grad is not None:
            compare(f"gradient of {name}", ours.grad, theirs.grad)
    buffers = zip(model.named_buffers(), reference.buffers(), strict=True)
    for (name, buffer), other in buffers:
        compare(f"buffer {name}", buffer, other)


def train_like_reference(
    model: Any,
    reference: nn.Module,
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    steps: Iterable[int] = range(3),
    tolerance: float = 1e-12,
) -> None:
    """Trains `model` on this rank's `loss(net, rank, step)`, and `reference` on the ranks' mean.

    After each step gradients, parameters and buffers are the same, and each backward of `model`
    was averaged exactly once.
    """
    rank, size = joined()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        rounds = model.stats().rounds
        loss(model, rank, step).backward()
        assert model.stats().rounds == rounds + 1
        before = [buffer.clone() for buffer in reference.buffers()]
        for r in reversed(range(size)):  # rank 0 last: everybody has its buffers
            for buffer, value in zip(reference.buffers(), before, strict=True):
                buffer.copy_(value)
            (loss(reference, r, step) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_like_reference(model, reference, tolerance)
