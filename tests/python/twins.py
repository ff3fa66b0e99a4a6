"""Models with a sharded optimizer, beside doubles with an unsharded one; the ranks to train on."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, batch, joined

import pydist
from pydist.sharding.gather import gather
from pydist.sharding.step import bucket_step

# Of a call on all ranks, and of a test: the first says more when it passes.
LIMIT_S = 40.0
TIME_LIMIT = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=everyday("native-3", thorough=("native-2", "gloo-3")))
def sharded_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run_sharded(sharded_ranks: Ranks) -> Runner:
    """On each backend, on 2 and 3 ranks."""
    return lambda function, *args: sharded_ranks.run(function, *args, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def native_three() -> Iterator[Ranks]:
    with Ranks(3, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


@pytest.fixture
def run_native(native_three: Ranks) -> Runner:
    return lambda function, *args: native_three.run(function, *args, timeout=LIMIT_S)


def steps_late(seconds: float) -> Any:
    """Lets this rank's shards set out later than the others' do, once all ranks may step."""

    def late(*arguments: Any) -> None:
        time.sleep(seconds)
        gather(*arguments)

    return mock.patch.object(bucket_step, "gather", late)


def is_exact() -> bool:
    return pydist.backend() == "native"


def assert_same(ours: Tensor, theirs: Tensor, what: str, *, exact: bool | None = None) -> None:
    """To the bit where sums don't depend on the size of buffers, otherwise nearly."""
    if is_exact() if exact is None else exact:
        assert torch.equal(ours, theirs), f"{what}: {(ours - theirs).abs().max()} apart"
    else:
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{what}: {text}")


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 70), nn.LayerNorm(70), nn.Linear(70, 1)
    ).to(dtype)


class Twins:
    """A model with a sharded optimizer, and its double with an unsharded one."""

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        cap_mb: float = 0.004,
        options: dict[str, Any] | None = None,
        wrapping: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.rank, self.size = joined()
        self.models = [
            pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=cap_mb, **(wrapping or {}))
            for _ in range(2)
        ]
        options = options or {}
        # Schedules change rates in tensors in place.
        own, others = copy.deepcopy(options), copy.deepcopy(options)
        self.ours = pydist.ShardedOptimizer(self.models[0], optimizer_class, **arguments, **own)
        self.theirs = optimizer_class(self.models[1].parameters(), **others)
        self.optimizers = [self.ours, self.theirs]

    def each(self, act: Callable[[Any, Any], Any]) -> list[Any]:
        return [act(m, o) for m, o in zip(self.models, self.optimizers, strict=True)]

    def step(self, number: int, *, width: int = 10, exact: bool | None = None) -> None:
        def act(model: Any, optimizer: Any) -> Tensor:
            optimizer.zero_grad()
            dtype = list(model.parameters())[-1].dtype
            loss: Tensor = model(batch(self.rank, 6, width, step=number, dtype=dtype))
            loss = loss.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        ours, theirs = self.each(act)
        assert_same(ours, theirs, f"loss of step {number}", exact=exact)

    def scaled_step(
        self, number: int, scalers: Sequence[torch.amp.GradScaler], *, overflows_on: int
    ) -> None:
        """With a scaler each. Every other step clips; that of number 2 overflows on a rank."""
        for model, optimizer, scaler in zip(self.models, self.optimizers, scalers, strict=True):
            optimizer.zero_grad()
            x = batch(self.rank, 4, 10, step=number, dtype=torch.float32)
            loss = model(x).square().mean()
            if number == 2 and self.rank == overflows_on:
                loss = loss + list(model.parameters())[-1].sum() * float("inf")
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()

    def check(self, what: str, *, exact: bool | None = None) -> None:
        names = [name for name, _ in self.models[0].named_parameters()]
        for name, a, b in zip(
            names, self.models[0].parameters(), self.models[1].parameters(), strict=True
        ):
            assert_same(a.detach(), b.detach(), f"{what}, {name}", exact=exact)


class ManyKinds(nn.Module):
    """Dtypes, layouts, sizes: none divides by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.twofold = nn.Parameter(torch.randn(5, 77, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(301))
        self.pairs = nn.Parameter(torch.randn(91, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.image = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.randn(31, 9).t())
        self.unused = nn.Parameter(torch.randn(40))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            (self.twofold * x.double().sum()).sin().mean().float(),
            (self.single * x.sum()).cos().mean(),
            (self.pairs * x.sum()).abs().square().mean(),
            self.scalar * x.mean(),
            self.empty.sum(),
            self.image(x.view(2, 5, 6, 1).expand(2, 5, 6, 3).float()).square().mean(),
            (self.transposed.t() @ torch.ones(9)).sin().mean() * x.sum() + self.frozen.sum(),
        ]
        return torch.stack([part.real for part in parts])


class Pause(torch.autograd.Function):
    """In backward, until what is on its way has arrived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Pausing(nn.Module):
    """More buckets than are on their way at a time, and time between them; with layers to skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(10, 10, dtype=torch.float64) for _ in range(8))

    def forward(self, x: Tensor, pause_s: float, skipped: tuple[int, ...] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = Pause.apply(layer(x).tanh(), pause_s)
        return x.square().mean()
