"""The fused optimizer steps beside torch's unfused classes. In this one process."""

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_rules import (
    ADAMS,
    COUNT,
    DTYPES,
    SGDS,
    Adam,
    Arrays,
    Rule,
    Sgd,
    Values,
    arrays_of,
    ordinary_values,
)
from torch import Tensor

pytestmark = pytest.mark.timeout(60)

# Where torch's own loops round a product and its sum once, as ours do everywhere.
TORCH_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would wait for each other wherever somebody else uses the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def special_values(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, subnormals, huge, infinite, NaN and every magnitude between."""
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = [0.0, -0.0, tiny, -tiny / 8, huge, -huge, math.inf, -math.inf, math.nan, 1.0]
    ordinary = torch.randn(count, dtype=torch.float64)
    ordinary *= torch.exp(torch.randn(count, dtype=torch.float64) * 8)
    ordinary[torch.randint(count, (count // 4,))] = torch.tensor(special, dtype=torch.float64)[
        torch.randint(len(special), (count // 4,))
    ]
    return ordinary.to(dtype)


def torchs_step(rule: Rule, arrays: Arrays, gradient_scale: float = 1.0) -> Arrays:
    """What torch's class makes of copies of the values and states, all in their own type."""
    after = copy.deepcopy(arrays)
    parameter = torch.nn.Parameter(after.values.clone())
    parameter.grad = after.gradient.to(parameter.dtype).mul_(gradient_scale)
    rule.torchs(after, parameter)
    after.parameter = parameter.detach()
    return after


def ours_step(rule: Rule, arrays: Arrays, gradient_scale: float = 1.0) -> Arrays:
    after = copy.deepcopy(arrays)
    rule.ours(after, gradient_scale)
    if after.master is not None:
        rounded = after.master.to(after.parameter.dtype)
        assert torch.equal(rounded.nan_to_num(7.0), after.parameter.nan_to_num(7.0))
    return after


@pytest.fixture
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's square roots correctly rounded, which those of its builds with MKL are not."""
    sqrt = Tensor.sqrt
    monkeypatch.setattr(
        Tensor, "sqrt", lambda self: torch.from_numpy(np.sqrt(self.detach().numpy()))
    )
    yield
    monkeypatch.setattr(Tensor, "sqrt", sqrt)


def named(value: object) -> str:
    return str(value).replace("torch.", "")


@pytest.mark.skipif(not TORCH_FUSES, reason="torch rounds otherwise on this processor")
@pytest.mark.usefixtures("exact_roots")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.parametrize("values", [special_values, ordinary_values])
def test_equals_torch_with_exact_roots(
    dtypes: tuple[torch.dtype, torch.dtype], values: Values
) -> None:
    torch.manual_seed(0)
    rules: list[Rule] = [*ADAMS, *SGDS]
    for rule, scale in itertools.product(rules, [1.0, 0.37, 2.0**-16]):
        before = arrays_of(dtypes[0], rule.state_count, values, dtypes[1])
        scale = float(torch.tensor(scale))  # as it is in torch, a float32
        ours, torchs = ours_step(rule, before, scale), torchs_step(rule, before, scale)
        for mine, its in zip(
            [ours.values, *ours.states], [torchs.parameter, *torchs.states], strict=True
        ):
            torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True, msg=str(rule))


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Of `dtype`, at magnitudes in float64."""
    least = torch.finfo(dtype).smallest_normal
    return torch.exp2(torch.floor(torch.log2(magnitude.clamp(least)))) * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize("rule", ADAMS, ids=str)
def test_adam_is_within_an_ulp_of_torch(dtype: torch.dtype, rule: Adam) -> None:
    """The claim as it stands: torch as it is, whatever it fuses and however it takes roots."""
    torch.manual_seed(0)
    before = arrays_of(dtype, rule.state_count, ordinary_values)
    ours, torchs = ours_step(rule, before), torchs_step(rule, before)
    value, slope = before.parameter.double(), before.gradient.double()
    if rule.decoupled:
        value = value * (1 - rule.lr * rule.weight_decay)
        slope_ulp = torch.zeros(1)
    else:
        decay = rule.weight_decay * value
        slope_ulp = ulp(torch.maximum(slope.abs(), decay.abs()), dtype)
        slope = slope + (-decay if rule.maximize else decay)
    average_ulp = slope_ulp + ulp(
        torch.maximum(before.states[0].double().abs(), slope.abs()), dtype
    )
    if TORCH_FUSES:
        assert torch.equal(ours.states[0], torchs.states[0])
        assert torch.equal(ours.states[1], torchs.states[1])
        average_ulp = torch.zeros(1)
        slope_ulp = torch.zeros(1)
    else:
        assert (ours.states[0].double() - torchs.states[0].double()).abs().le(average_ulp).all()
    square = ours.states[1].double()
    square_ulp = 2 * ulp(square, dtype) + 2 * (1 - rule.betas[1]) * slope.abs() * slope_ulp
    assert (square - torchs.states[1].double()).abs().le(square_ulp).all()
    if rule.amsgrad:
        square = ours.states[2].double()
    root = (square / (1 - rule.betas[1] ** rule.step)).sqrt() + rule.eps
    step_size = rule.lr / (1 - rule.betas[0] ** rule.step)
    update = (step_size * ours.states[0].double() / root).abs()
    allowed = ulp(torch.maximum(value.abs(), ours.parameter.double().abs()), dtype)
    allowed += 2 * ulp(update, dtype) + step_size * average_ulp / root
    if not TORCH_FUSES:
        allowed += update * square_ulp / square
    difference = (ours.parameter.double() - torchs.parameter.double()).abs()
    assert difference.le(allowed).all()
    if rule.lr <= 1e-3 and TORCH_FUSES:
        # Where a step is small beside its parameter: one ulp of it, and rarely that.
        is_small = update < value.abs() / 4
        assert is_small.sum() > COUNT / 4
        larger = torch.maximum(value.abs(), ours.parameter.double().abs())
        assert difference.le(ulp(larger, dtype))[is_small].all()
        assert (difference > 0)[is_small].float().mean() < 0.05


@pytest.mark.parametrize("rule", [ADAMS[0], ADAMS[3], SGDS[3], SGDS[4]], ids=str)
def test_fifty_steps_agree_in_float64(rule: Rule) -> None:
    torch.manual_seed(0)
    start = torch.randn(COUNT, dtype=torch.float64)
    states = [torch.zeros(COUNT, dtype=torch.float64) for _ in range(rule.state_count)]
    ours = Arrays(start.clone(), torch.zeros_like(start), states)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = rule.optimizer(theirs)
    for step in range(1, 51):
        gradient = torch.randn(COUNT, dtype=torch.float64)
        ours.gradient = gradient
        theirs.grad = gradient.clone()
        changes: dict[str, Any] = {"begins": step == 1} if isinstance(rule, Sgd) else {"step": step}
        type(rule)(**{**vars(rule), **changes}).ours(ours)
        optimizer.step()
    torch.testing.assert_close(ours.parameter, theirs.detach(), rtol=1e-12, atol=1e-12)
