"""`check_finite=` finds the first gradient that is not finite."""

import math
import types
from typing import Any

import pytest
import torch
from launch import run_ranks
from thorough import everyday
from training import normalized_model, train_normalized

import pydist
from pydist.parallel.checks.finite_check import FiniteCheck

pytestmark = pytest.mark.timeout(90)

BACKENDS = everyday("native", thorough=("gloo",))


def not_finite(value: float) -> tuple[str, str]:
    model = normalized_model(check_finite=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_normalized(model, optimizer, 2)
    inputs = torch.randn(5, 4)
    outputs = model(inputs).sum()
    if pydist.rank() == 1:
        outputs = outputs * value
    try:
        outputs.backward()
    except (FloatingPointError, pydist.Error) as error:
        # Both go on.
        optimizer.zero_grad()
        train_normalized(model, optimizer, 1)
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", everyday(float("nan"), thorough=(float("inf"),)))
def test_a_gradient_that_is_not_finite(value: float, backend: str) -> None:
    first, second = run_ranks(not_finite, 2, value, env={"PYDIST_BACKEND": backend})
    assert second[0] == "FloatingPointError"
    assert "the gradient of parameter 2." in second[1]
    assert "on rank 1 has" in second[1]
    assert "in step 3" in second[1]
    assert first[0] == "Error"
    assert "rank 1" in first[1]


def not_finite_while_accumulating() -> list[tuple[str, str]]:
    """Steps of two backwards each; in the second one, the first backward of rank 1 has a NaN."""
    model = normalized_model(check_finite=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    for step in (1, 2, 3):
        bad = step == 2 and pydist.rank() == 1
        try:
            with model.no_sync():
                (model(torch.randn(5, 4)).sum() * (math.nan if bad else 1.0)).backward()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            told.append(("", ""))
        except (FloatingPointError, pydist.Error) as error:
            told.append((type(error).__name__, str(error)))
        optimizer.zero_grad()
    # Thrown away: nobody is told.
    with model.no_sync():
        (model(torch.randn(5, 4)).sum() * math.nan).backward()
    optimizer.zero_grad()
    train_normalized(model, optimizer, 1)
    # Averaged outside of backward.
    with model.no_sync():
        bad = pydist.rank() == 1
        (model(torch.randn(5, 4)).sum() * (math.nan if bad else 1.0)).backward()
    with pytest.raises(FloatingPointError if bad else pydist.Error, match="rank 1"):
        model.sync_gradients()
    optimizer.zero_grad()
    train_normalized(model, optimizer, 1)
    # Training apart, which averages nothing.
    with model.no_sync():
        (model(torch.randn(5, 4)).sum() * math.inf).backward()
        with pytest.raises(FloatingPointError, match=r"in step 6; .*, which accumulates,"):
            optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return told


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_finite_while_accumulating(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    first, second = run_ranks(not_finite_while_accumulating, 2, env=env)
    assert [error for error, _ in first] == ["", "Error", ""]
    assert [error for error, _ in second] == ["", "FloatingPointError", ""]
    assert "rank 1" in first[1][1]
    assert "in step 2" in second[1][1]


def watched(parameter: torch.nn.Parameter, check: FiniteCheck) -> None:
    averaging: Any = types.SimpleNamespace(is_in_backward=True, pending=[])
    check.watch([("p", parameter, False)], 0, averaging)


def test_a_parameter_is_watched_once() -> None:
    check = FiniteCheck(True)
    parameter = torch.nn.Parameter(torch.ones(3))
    for _ in range(2):
        watched(parameter, check)
    (parameter * 2).sum().backward()
    with pytest.raises(FloatingPointError, match="gradient of parameter p on rank 0 has 3 NaN"):
        (parameter * float("nan")).sum().backward()


def test_imaginary_parts_are_looked_at() -> None:
    check = FiniteCheck(True)
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    watched(parameter, check)
    parameter.clone().backward(torch.full((3,), complex(1.0, 2.0)))
    with pytest.raises(FloatingPointError, match="has 0 NaN and 3 Inf among 3 elements"):
        parameter.clone().backward(torch.full((3,), complex(1.0, float("inf"))))
