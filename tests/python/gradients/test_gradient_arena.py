"""Where gradients live: `parameter.grad` is a view of shared memory."""

import torch
from torch import nn
from training import TIME_LIMIT, Parts, Runner, Tied, batch, joined

import pydist

pytestmark = TIME_LIMIT


def gradients_stay_in_place() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Tied(torch.float64))

    def places() -> list[int]:
        model(batch(rank, 6, 8)).mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.stride() == parameter.stride()
        return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]

    first = places()
    assert len(set(first)) == 7
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters() if p.requires_grad)
        assert places() == first
    # Under no_sync as well, and with a gradient of the user's own.
    model.zero_grad()
    with model.no_sync():
        assert places() == first
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    assert places() == first
    # Module.to() moves the gradients' memory under their feet.
    model.to(torch.float32).to(torch.float64)
    model.zero_grad(set_to_none=False)
    before = [p.detach().clone() for p in model.parameters()]
    assert places() == first
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_gradients_stay_in_the_arena(run: Runner) -> None:
    run(gradients_stay_in_place)


def clip_out_of_place() -> None:
    rank, size = joined()
    module = Parts({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    model = pydist.DataParallel(module)
    with model.no_sync():
        model("b", torch.full((1, 2), rank + 1.0)).sum().backward()
    model.module.b.weight.grad = model.module.b.weight.grad.clamp(max=100.0)
    model("a", torch.ones(1, 2)).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert model.module.b.weight.grad.tolist() == [[mean, mean]]


def test_a_gradient_that_was_moved_is_averaged(run: Runner) -> None:
    run(clip_out_of_place)
