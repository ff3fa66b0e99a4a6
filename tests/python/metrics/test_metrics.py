"""Metrics in one process: exact against rational arithmetic, however values are shared out."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pydist
from pydist import metrics

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LISTS = st.lists(FLOATS, max_size=40)
WEIGHTED = st.lists(
    st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 2**20)),
    max_size=40,
)


def nearest(numerator: Fraction, denominator: Fraction = Fraction(1)) -> float:
    if denominator == 0:
        return math.nan
    try:
        return float(numerator / denominator)
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def sum_of(values: Tensor) -> float:
    measured = metrics.Sum()
    measured.update(values)
    return measured.result(measured.state)


def mean_of(values: Tensor, weights: Tensor | float | None = None) -> float:
    measured = metrics.Mean()
    measured.update(values, weights)
    return measured.result(measured.state)


@given(LISTS)
def test_sum_is_the_nearest(values: list[float]) -> None:
    exact = sum(map(Fraction, values), Fraction(0))
    assert sum_of(torch.tensor(values, dtype=torch.float64)) == nearest(exact)


@given(LISTS)
def test_mean_is_the_nearest(values: list[float]) -> None:
    exact = nearest(sum(map(Fraction, values), Fraction(0)), Fraction(len(values)))
    assert same(mean_of(torch.tensor(values, dtype=torch.float64)), exact)


@given(WEIGHTED)
def test_weighted_mean_of_float32_is_the_nearest(pairs: list[tuple[float, int]]) -> None:
    values = torch.tensor([value for value, _ in pairs])
    weights = torch.tensor([weight for _, weight in pairs], dtype=torch.int64)
    numerator = sum((Fraction(v) * w for v, w in pairs), Fraction(0))
    exact = nearest(numerator, Fraction(sum(w for _, w in pairs)))
    assert same(mean_of(values, weights), exact)


@given(st.lists(st.tuples(FLOATS, st.integers(0, 3)), max_size=40))
@settings(max_examples=25)
def test_shares_and_order_do_not_matter(pairs: list[tuple[float, int]]) -> None:
    whole = metrics.Mean()
    whole.update(torch.tensor([value for value, _ in pairs], dtype=torch.float64))
    shares = [metrics.Mean() for _ in range(4)]
    for value, rank in reversed(pairs):
        shares[rank].update(value)
    summed = torch.stack([share.state for share in shares]).sum(0)
    assert same(whole.result(summed), whole.result(whole.state))


def test_many_values_carry() -> None:
    values = torch.full((3_000_000,), 1.7976931348623157e308, dtype=torch.float64)
    assert sum_of(values) == math.inf
    assert mean_of(values) == 1.7976931348623157e308
    values[::2] *= -1
    assert sum_of(values) == 0.0
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(600_000, generator=generator, dtype=torch.float64).exp()
    assert sum_of(values) == math.fsum(values.tolist())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.nan, 1.0], math.nan),
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e308], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([5e-324, 5e-324], 1e-323),
        ([-0.0], 0.0),
        ([], 0.0),
        ([1e308, 1e308, -1e308], 1e308),
        ([-1e308, -1e308], -math.inf),
    ],
)
def test_awkward_sums(values: list[float], expected: float) -> None:
    assert same(sum_of(torch.tensor(values, dtype=torch.float64)), expected)


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_real_dtype_and_layout(dtype: str) -> None:
    values = (torch.arange(24) % 5).to(getattr(torch, dtype)).view(4, 6).t()[::2]
    assert not values.is_contiguous()
    assert sum_of(values) == values.to(torch.float64).sum().item()
    weights = torch.arange(12).view(values.shape)
    expected = (values.to(torch.float64) * weights).sum() / weights.sum()
    assert mean_of(values, weights) == expected.item()


def test_int64_beyond_float64() -> None:
    values = torch.tensor([2**63 - 1, -(2**63), 5])
    assert sum_of(values) == 4.0
    assert mean_of(values) == 4 / 3


def test_weights() -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0]])
    assert mean_of(values, torch.tensor([[True, False], [True, True]])) == 3.0
    assert mean_of(values, torch.tensor([1.0, 0.0])) == 2.0  # for each column
    assert math.isnan(mean_of(values, 0))
    assert math.isnan(mean_of(torch.empty(0)))
    assert mean_of(torch.tensor(2.5), 4) == 2.5
    with pytest.raises(pydist.InvalidUsage, match=r"weights have shape \(3,\), values \(2, 2\)"):
        mean_of(values, torch.ones(3))
    with pytest.raises(pydist.InvalidUsage, match="real and imaginary parts apart"):
        mean_of(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(pydist.InvalidUsage, match="values is a list"):
        metrics.Sum().update([1.0])  # type: ignore[arg-type]


def test_metrics_go_on_after_a_result_and_reset() -> None:
    loss = metrics.Mean()
    loss.update(torch.tensor([1.0], requires_grad=True))
    assert loss.result(loss.state) == 1.0
    loss.update(3.0)
    assert loss.result(loss.state) == 2.0
    assert repr(loss) == "Mean(2.0 on this rank)"
    loss.reset()
    assert math.isnan(loss.result(loss.state))


def test_accuracy() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, 7, 3, generator=generator)
    targets = torch.randint(0, 7, (50, 3), generator=generator)
    accuracy = metrics.Accuracy()
    accuracy.update(scores, targets)
    right = int((scores.argmax(1) == targets).sum())
    assert accuracy.state.tolist() == [right, 150]
    assert accuracy.result(accuracy.state) == right / 150
    accuracy.update(scores.argmax(1), targets)
    accuracy.update(scores[:0], targets[:0])
    assert accuracy.state.tolist() == [2 * right, 300]

    best = metrics.Accuracy(top_k=3, ignore_index=2)
    best.update(scores, targets)
    counted = targets != 2
    within = (scores.topk(3, 1).indices == targets[:, None]).any(1)
    assert best.state.tolist() == [int((within & counted).sum()), int(counted.sum())]
    assert math.isnan(metrics.Accuracy().result(torch.zeros(2, dtype=torch.int64)))


def test_confusion_matrix() -> None:
    generator = torch.Generator().manual_seed(2)
    predictions = torch.randint(0, 4, (100,), generator=generator)
    targets = torch.randint(0, 5, (100,), generator=generator)
    confusion = metrics.ConfusionMatrix(4, ignore_index=4)
    confusion.update(predictions, targets)
    confusion.update(predictions[:0], targets[:0])
    expected = torch.zeros(4, 4, dtype=torch.int64)
    for p, t in zip(predictions.tolist(), targets.tolist(), strict=True):
        if t != 4:
            expected[t, p] += 1
    assert torch.equal(confusion.result(confusion.state), expected)
    scores = torch.nn.functional.one_hot(predictions, 4).float()
    confusion.update(scores, targets)
    assert torch.equal(confusion.result(confusion.state), 2 * expected)


@pytest.mark.parametrize(
    ("predictions", "targets"),
    [
        (torch.rand(4), torch.zeros(4, dtype=torch.int64)),  # probabilities
        (torch.zeros(4, dtype=torch.int64), torch.rand(4)),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        (torch.rand(4, 2, 3), torch.zeros(4, 2, dtype=torch.int64)),
        (torch.zeros(4, 2, 3), torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_what_does_not_fit_is_refused(predictions: Tensor, targets: Tensor) -> None:
    for metric in (metrics.Accuracy(), metrics.ConfusionMatrix(2)):
        with pytest.raises(pydist.InvalidUsage):
            metric.update(predictions, targets)
        assert not metric.state.any()


def test_nonsense_is_refused() -> None:
    with pytest.raises(pydist.InvalidUsage, match="top_k=0"):
        metrics.Accuracy(top_k=0)
    with pytest.raises(pydist.InvalidUsage, match="needs scores of that many classes"):
        metrics.Accuracy(top_k=3).update(torch.rand(2, 2), torch.tensor([0, 1]))
    with pytest.raises(pydist.InvalidUsage, match="classes=0"):
        metrics.ConfusionMatrix(0)
    with pytest.raises(pydist.InvalidUsage, match="predictions hold classes from 0 to 2"):
        metrics.ConfusionMatrix(2).update(torch.tensor([0, 2]), torch.tensor([0, 1]))
    rows = metrics.Rows()
    rows.update(torch.ones(1), torch.tensor([0]))
    with pytest.raises(pydist.InvalidUsage, match="give them in all"):
        rows.update(torch.ones(1))
