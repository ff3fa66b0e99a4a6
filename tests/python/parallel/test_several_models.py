"""Several wrapped models in one backward, and one through the other: GANs."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_like_reference,
    assert_near,
    batch,
    joined,
)

import pydist

pytestmark = TIME_LIMIT


def make_generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()


def make_discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def step_of_discriminator(g: nn.Module, d: nn.Module, rank: int, step: int, *, way: str) -> Tensor:
    real = batch(rank, 5, 4, step=step)
    noise = batch(rank, 5, 3, step=step + 50)
    if way == "detach":
        fake = g(noise).detach()
    else:
        with torch.no_grad():
            fake = g(noise)
    # Two forwards before one backward: BatchNorm changes its buffers in between.
    of_fake, of_real = d(fake), d(real)
    loss: Tensor = of_fake.square().mean() + (of_real - 1).square().mean()
    return loss


def step_of_generator(g: nn.Module, d: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = (d(g(batch(rank, 5, 3, step=step + 90))) - 1).square().mean()
    return out


class OfRank0:
    """Lets each rank's forward of a reference begin with the same buffers, and keeps rank 0's."""

    def __init__(self, *nets: nn.Module) -> None:
        self.nets = nets

    def ranks(self, size: int) -> Iterator[int]:
        buffers = [buffer for net in self.nets for buffer in net.buffers()]
        before = [buffer.clone() for buffer in buffers]
        for rank in reversed(range(size)):
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            yield rank


def train_gan(way: str) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    references: dict[str, nn.Module] = {"g": make_generator(), "d": make_discriminator()}
    models = {name: pydist.DataParallel(copy.deepcopy(net)) for name, net in references.items()}
    nets: list[dict[str, nn.Module]] = [references, dict(models)]
    optimizers = [
        {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in kind.items()}
        for kind in nets
    ]
    alone = OfRank0(*references.values())
    for step in range(3):
        for name in ("d", "g"):
            for kind, optimizer in zip(nets, optimizers, strict=True):
                g, d = kind["g"], kind["d"]
                # The generator's step leaves gradients in the discriminator, or does not.
                if way == "frozen":
                    d.requires_grad_(name == "d")
                optimizer[name].zero_grad()
                for r in alone.ranks(size) if kind is references else (rank,):
                    loss = (
                        step_of_discriminator(g, d, r, step, way=way)
                        if name == "d"
                        else step_of_generator(g, d, r, step)
                    )
                    (loss / size if kind is references else loss).backward()
                optimizer[name].step()
            assert_like_reference(models[name], references[name])


@pytest.mark.parametrize("way", ["detach", "no_grad", "frozen"])
def test_gan(run: Runner, way: str) -> None:
    run(train_gan, way)


def differ_in_buffers() -> float:
    rank, _ = joined()
    torch.manual_seed(0)
    generator = pydist.DataParallel(make_generator())
    discriminator = pydist.DataParallel(make_discriminator()).requires_grad_(False)
    step_of_generator(generator, discriminator, rank, 0).backward()
    return float(next(discriminator.buffers())[0])


def test_buffers_of_a_frozen_model_stay_the_same_everywhere(run: Runner) -> None:
    assert len(set(run(differ_in_buffers))) == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)


def train_two_in_one_backward(order: str) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = Pair()
    module = copy.deepcopy(reference)
    first = pydist.DataParallel(module.first)
    second = pydist.DataParallel(module.second)

    def loss(a: nn.Module, b: nn.Module, r: int, step: int) -> Tensor:
        x = batch(r, 5, 4, step=step)
        if order == "chain":
            return b(a(x).tanh()).sin().mean()  # type: ignore[no-any-return]
        parts = [a, b] if order == "same" or r % 2 == 0 else [b, a]
        return torch.stack([net(x).sin().mean() for net in parts]).sum()

    for step in range(3):
        loss(first, second, rank, step).backward()
        for r in range(size):
            (loss(reference.first, reference.second, r, step) / size).backward()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)
        assert first.stats().rounds == second.stats().rounds == step + 1


@pytest.mark.parametrize("order", ["same", "chain"])
def test_two_models_in_one_backward(run: Runner, order: str) -> None:
    run(train_two_in_one_backward, order)


def test_two_models_in_another_order_on_each_rank(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend, "PYDIST_TIMEOUT": "3"}) as ranks:
        ranks.run(train_two_in_one_backward, "different", timeout=LIMIT_S)


def train_two_with_shards() -> None:
    """More buckets than there is memory for: each rank waits in the model it comes to first."""
    rank, size = joined()
    torch.manual_seed(0)
    references = [
        nn.Sequential(*(nn.Linear(9, 9, dtype=torch.float64) for _ in range(8))) for _ in range(2)
    ]
    models = [pydist.DataParallel(copy.deepcopy(r), bucket_cap_mb=1e-6) for r in references]
    optimizers = [pydist.ShardedOptimizer(m, torch.optim.SGD, stage=2, lr=0.1) for m in models]

    def loss(nets: Sequence[nn.Module], r: int, step: int) -> Tensor:
        x = batch(r, 5, 9, step=step)
        order = nets if (r + step * (step + 1) // 2) % 2 == 0 or step % 3 == 0 else nets[::-1]
        return torch.stack([net(x).sin().mean() for net in order]).sum()

    for step in range(16):
        for one in (*optimizers, *references):
            one.zero_grad()
        loss(models, rank, step).backward()
        for r in range(size):
            (loss(references, r, step) / size).backward()
        for model, reference, optimizer in zip(models, references, optimizers, strict=True):
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert_near(optimizer.gradient_of(ours), theirs.grad)


def test_two_models_with_shards_in_another_order_on_each_rank(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(train_two_with_shards, timeout=LIMIT_S)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.experts[which](x)
        return out


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4, dtype=torch.float64)
        self.experts: nn.Module = Experts()
        self.after = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.after(self.experts(self.before(x).tanh(), which).tanh()).mean()  # type: ignore[no-any-return]


def train_a_wrapped_part() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = Whole()
    module = copy.deepcopy(reference)
    module.experts = pydist.DataParallel(module.experts)
    assert list(module.state_dict()) == list(reference.state_dict())
    assert len(list(module.parameters())) == len(list(reference.parameters()))
    for step in range(2):
        module(batch(rank, 5, 4, step=step), rank % 2).backward()
        for r in range(size):
            (reference(batch(r, 5, 4, step=step), r % 2) / size).backward()
    for ours, theirs in zip(
        module.experts.parameters(), reference.experts.parameters(), strict=True
    ):
        assert_near(ours.grad, theirs.grad)
    # The rest is this rank's own.
    local, whole = module.before.weight.grad, reference.before.weight.grad
    assert local is not None
    assert whole is not None
    assert not torch.allclose(local, whole)


def test_a_wrapped_part_of_a_model(run: Runner) -> None:
    run(train_a_wrapped_part)


def weigh_two_in_one_backward() -> None:
    rank, size = joined()
    models = [
        pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64)) for _ in range(2)
    ]
    xs = [batch(r, 1, 2) for r in range(size)]
    with models[0].weighted(rank + 1), models[1].weighted(2 * rank + 1):
        outs = [model(xs[rank]).sum() for model in (models if rank % 2 else reversed(models))]
        torch.stack(outs).sum().backward()
    for model, slope in zip(models, (1, 2), strict=True):
        weights = [slope * r + 1 for r in range(size)]
        mean = torch.stack([w * x for w, x in zip(weights, xs, strict=True)]).sum(0) / sum(weights)
        assert_near(model.weight.grad, mean)


def test_two_models_with_weights_in_another_order_on_each_rank(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend, "PYDIST_TIMEOUT": "3"}) as ranks:
        ranks.run(weigh_two_in_one_backward, timeout=LIMIT_S)
