"""Sums and means without rounding on the way: the float64 nearest to the true value."""

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.job.groups import Group
from pydist.metrics.exact_sum import LENGTH, add_count, add_up, as_float64, quotient, total
from pydist.metrics.metric import Metric


def _tensor(values: Tensor | float, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, (bool, int, float)):
        raise InvalidUsage(f"{name} is {a_type(values)}; it must be a tensor or a number.")
    dtype = torch.float64 if isinstance(values, float) else torch.int64
    return torch.tensor(values, dtype=dtype)


class Sum(Metric[float]):
    """The sum of all values.

    Example:
        >>> from pydist import metrics
        >>> total = metrics.Sum()
        >>> total.update(torch.tensor([1e16, 1.0, -1e16]))
        >>> total.compute()
        1.0
    """

    def __init__(self) -> None:
        super().__init__(LENGTH)

    def update(self, values: Tensor | float) -> None:
        """Adds values of this rank.

        Args:
            values: any shape, also empty: bool, integers up to int64, or floating point.
        """
        wide = as_float64(_tensor(values, "values"))
        add_up(self.on(wide.device), wide)

    def result(self, state: Tensor) -> float:
        """The sum: the nearest float64."""
        return total(state)


class Mean(Metric[float]):
    """The mean of all values, each with its weight: sum(weight x value) / sum(weight).

    Sums are kept without rounding, and the quotient is rounded once. So the result depends on the
    values and their weights alone, not on how they are shared out or in which order they come. A
    product of weight and value is rounded once, to float64, where the two have more than 53 bits
    together; those of float32 and narrower types never do.

    NaN where there are no values, or the weights add up to zero. What has weight zero counts for
    nothing, even if it is NaN.

    Example:
        >>> from pydist import metrics
        >>> loss = metrics.Mean()
        >>> loss.update(torch.tensor([0.5, 1.0, 3.0]))  # one value for each sample
        >>> loss.update(7.5, weights=3)  # the mean over three more
        >>> loss.compute()
        4.5
    """

    def __init__(self) -> None:
        super().__init__(2 * LENGTH)

    def update(self, values: Tensor | float, weights: Tensor | float | None = None) -> None:
        """Adds values of this rank.

        Args:
            values: any shape, also empty: bool, integers or floating point.
            weights: of each value, or one for all: counts of samples or tokens, a mask. Not
                negative; 1 by default. Broadcast to the shape of `values`.

        Raises:
            InvalidUsage: the shapes do not go together, or the dtype is complex.
        """
        given = _tensor(values, "values").detach()
        sums, totals = self.on(given.device).split(LENGTH)
        if weights is None:
            add_up(sums, as_float64(given))
            add_count(totals, given.numel())
            return
        scale = _tensor(weights, "weights").detach().to(given.device)
        try:
            scale = scale.expand(given.shape)
        except RuntimeError:
            raise InvalidUsage(
                f"weights have shape {tuple(scale.shape)}, values {tuple(given.shape)}: give one "
                "weight for each value, or one for all of them."
            ) from None
        wide_scale = as_float64(scale, "weights")
        products = as_float64(given) * scale.to(torch.float64)
        add_up(sums, products.where(scale != 0, 0.0))
        add_up(totals, wide_scale)

    def result(self, state: Tensor) -> float:
        """The mean: the nearest float64."""
        return quotient(*state.split(LENGTH))


def mean(
    values: Tensor | float,
    weights: Tensor | float | None = None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> float:
    """The mean over all ranks of values that each rank has some of. Every rank calls it.

    For example `mean(loss.detach(), len(batch))`: the mean over all samples of a step, where ranks
    have different numbers of them, or none.

    Args:
        values, weights: see `Mean.update`; any number of values on each rank, or none.
        group, timeout: see `Metric.compute`.

    Returns:
        The mean on every rank; NaN where nobody has values.

    Example:
        >>> from pydist import metrics
        >>> metrics.mean(torch.tensor([1.0, 2.0, 6.0]))
        3.0
    """
    measured = Mean()
    measured.update(values, weights)
    return measured.compute(group, timeout=timeout)
