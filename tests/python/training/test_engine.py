"""The model that `pydist.initialize` returns: weights of its backwards, and names that it lacks."""

import pytest
import torch
from launch import run_ranks
from torch import Tensor, nn

import pydist


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 1).double()


def weighted() -> tuple[Tensor, Tensor]:
    """What a step of uneven shares changes by a rate of 1, and one process's gradient of all."""
    x = torch.randn(10, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True).sin()
    reference = network()
    nn.functional.mse_loss(reference(x), y).backward()
    config = {"training": {"accumulation_steps": 2}}
    engine, *_ = pydist.initialize(
        network(), lambda parameters: torch.optim.SGD(parameters, lr=1.0), config=config
    )
    before = torch.cat([p.detach().flatten() for p in engine.parameters()])
    # 3 and 2 samples of the first five, 1 and 4 of the others.
    for own in ((slice(0, 3), slice(5, 6)), (slice(3, 5), slice(6, 10)))[pydist.rank()]:
        with engine.weighted(own.stop - own.start):
            engine.backward(nn.functional.mse_loss(engine(x[own]), y[own]))
        engine.step()
    after = torch.cat([p.detach().flatten() for p in engine.parameters()])
    gradients = [p.grad.flatten() for p in reference.parameters() if p.grad is not None]
    return before - after, torch.cat(gradients)


def test_weights_take_the_mean_over_accumulated_backwards() -> None:
    for change, gradient in run_ranks(weighted, 2):
        torch.testing.assert_close(change, gradient)


def test_names_of_deepspeeds_engine_say_what_there_is_here() -> None:
    engine, *_ = pydist.initialize(
        network(), lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    with pytest.raises(AttributeError, match=r"no save_checkpoint, which .*: use pydist\.save\("):
        engine.save_checkpoint("a")
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        engine.nothing  # noqa: B018
    pydist.shutdown()
