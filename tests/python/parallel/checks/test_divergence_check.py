"""`check_every=` finds models that have come to differ."""

from typing import Any

import pytest
import torch
from launch import Ranks, rank_outcomes, run_ranks
from thorough import everyday
from training import normalized_model, train_normalized

import pydist
from pydist.testing import faults

__all__ = ["Ranks"]

pytestmark = pytest.mark.timeout(90)

BACKENDS = everyday("native", thorough=("gloo",))


def make_optimizer(kind: str, model: pydist.DataParallel) -> Any:
    if kind == "sharded":
        return pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.01)


def diverge(kind: str, what: str, finds: int | None) -> str:
    """Changes something on rank 1 in step 3, compares in steps 2, 4, 6."""
    model = normalized_model(check_every=2)
    optimizer = make_optimizer(kind, model)
    train_normalized(model, optimizer, 2)
    if pydist.rank() == 1 and what:
        with torch.no_grad():
            dict([*model.named_parameters(), *model.named_buffers()])[what].view(-1)[0] += 1
    try:
        train_normalized(model, optimizer, 6)
    except pydist.Mismatch as error:
        # The group is sound: all have raised alike.
        pydist.barrier()
        return str(error)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_models_that_stay_alike_are_let_be(kind: str, backend: str) -> None:
    assert run_ranks(diverge, 2, kind, "", None, env={"PYDIST_BACKEND": backend}) == ["", ""]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", everyday(2, thorough=(3,)))
def test_a_parameter_that_differs(size: int, backend: str) -> None:
    texts = run_ranks(diverge, size, "plain", "2.bias", 4, env={"PYDIST_BACKEND": backend})
    assert len(set(texts)) == 1
    others = ", ".join(str(rank) for rank in range(size) if rank != 1)
    assert "at the beginning of step 4: parameter 0.weight of rank 1" in texts[0] or (
        "at the beginning of step 4: parameter 2.bias of rank 1" in texts[0]
    )
    assert f"is not that of rank {others}" in texts[0]


def move(what: str) -> str:
    """Moves values about on rank 1, so that every tensor's or the model's sum stays the same."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(6, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    model = pydist.DataParallel(torch.nn.Sequential(*layers), check_every=1)
    if pydist.rank() == 1:
        with torch.no_grad():
            weights = [each.weight for each in model.module]
            if what == "rows":
                weights[0].copy_(weights[0].flip(0))
            elif what == "layers":
                first = weights[1].clone()
                weights[1].copy_(weights[2])
                weights[2].copy_(first)
    try:
        model(torch.arange(6)).sum().backward()
    except pydist.Mismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("what", "named"), [("rows", "0.weight"), ("layers", "1.weight"), ("nothing", "")]
)
def test_values_that_swap_their_places(what: str, named: str, backend: str) -> None:
    for text in run_ranks(move, 2, what, env={"PYDIST_BACKEND": backend}):
        assert (f"parameter {named} of rank 1" in text) if named else not text


def diverge_alone(odd: int) -> tuple[str, tuple[int, ...]]:
    model = normalized_model(check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with faults.inject(faults.Fault("corrupt", rank=odd, step=2, phase="step")):
        try:
            train_normalized(model, optimizer, 5)
        except pydist.Mismatch as error:
            return str(error), error.ranks
    return "", ()


def test_the_only_tensor_that_differs_is_named() -> None:
    (first, _), (second, _) = run_ranks(diverge_alone, 2, 1)
    assert first == second
    assert "step 3: parameter 0.weight of rank 1 is not that of rank 0" in first
    assert "1 of 9 tensors" in first


@pytest.mark.parametrize(("ranks", "blamed"), [(2, (0, 1)), (3, (0,))])
def test_of_two_models_that_differ_nobody_can_tell_which_is_wrong(
    ranks: int, blamed: tuple[int, ...]
) -> None:
    assert [who for _, who in run_ranks(diverge_alone, ranks, 0)] == [blamed] * ranks


def buffers_of_each() -> str:
    model = normalized_model(check_every=1, broadcast_buffers=False)
    train_normalized(model, torch.optim.SGD(model.parameters(), lr=0.01), 4)
    return "trained"


def test_buffers_that_each_rank_has_alone_are_not_compared() -> None:
    assert run_ranks(buffers_of_each, 2) == ["trained", "trained"]


def ignore_some() -> tuple[list[float], str]:
    """Trains with a parameter and a buffer of this rank's own; says what the comparison found."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    pydist.init()
    with torch.no_grad():
        net[0].bias.fill_(pydist.rank())
        net[1].running_mean.fill_(pydist.rank())
    own = ["0.bias", "1.running_mean"]
    pydist.DataParallel._set_params_and_buffers_to_ignore_for_model(net, own)
    model = pydist.DataParallel(net, check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_normalized(model, optimizer, 3)
    kept = net[0].bias.tolist()
    with torch.no_grad():
        net[2].bias += pydist.rank()  # which is compared
    with pytest.raises(pydist.Mismatch) as raised:
        train_normalized(model, optimizer, 1)
    return kept, str(raised.value)


def test_what_is_ignored_is_not_compared() -> None:
    (first, told), (second, also_told) = run_ranks(ignore_some, 2)
    assert first != second
    assert told == also_told
    assert "parameter 2.bias of rank 1" in told
    assert "1 of 7 tensors" in told


def evaluate_alone() -> str:
    model = normalized_model(check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_normalized(model, optimizer, 2)
    if pydist.rank() == 0:
        with torch.no_grad():
            model(torch.ones(3, 4))
    with model.no_sync():
        model(torch.ones(3, 4)).sum().backward()
    optimizer.zero_grad()
    train_normalized(model, optimizer, 2)
    return "trained"


def test_one_rank_may_evaluate_alone() -> None:
    """Also in training, and without averaging: buffers that differ then will be copied."""
    assert run_ranks(evaluate_alone, 2) == ["trained", "trained"]


def joined() -> None:
    with normalized_model(check_every=1).join():
        pass


def test_join_is_refused() -> None:
    for outcome in rank_outcomes(joined, 2):
        assert outcome.error == "InvalidUsage"
        assert "check_every" in outcome.message


def disagree() -> None:
    normalized_model(check_every=1 + pydist.rank() if pydist.is_initialized() else 1)


def checked_differently() -> None:
    pydist.init()
    disagree()


def test_ranks_compare_in_the_same_steps() -> None:
    for outcome in rank_outcomes(checked_differently, 2):
        assert outcome.error == "Mismatch"
        assert "check_every=" in outcome.message


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "10"])
def test_a_value_that_makes_no_sense(value: Any) -> None:
    with pytest.raises(pydist.InvalidUsage, match="check_every"):
        normalized_model(check_every=value)
