"""Metrics of classifiers: counts of right and wrong."""

import math

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.metrics.metric import Metric, require_tensor


def _classes(predictions: Tensor, targets: Tensor) -> Tensor:
    """The class that is predicted for each target, in the shape of `targets`."""
    if targets.is_floating_point() or targets.is_complex():
        raise InvalidUsage(
            f"targets have dtype {targets.dtype}; they must be classes, as integers."
        )
    predictions = predictions.detach()
    if _are_scores(predictions, targets):
        return predictions.argmax(1)
    if predictions.shape == targets.shape and not predictions.is_floating_point():
        return predictions
    raise InvalidUsage(
        f"predictions have shape {tuple(predictions.shape)} and dtype {predictions.dtype}, targets "
        f"shape {tuple(targets.shape)}; predictions must be classes in the shape of the targets "
        "(compare probabilities with a threshold first), or scores with a dimension 1 for the "
        "classes."
    )


def _are_scores(predictions: Tensor, targets: Tensor) -> bool:
    shape = predictions.shape
    return predictions.dim() == targets.dim() + 1 and shape[:1] + shape[2:] == targets.shape


class Accuracy(Metric[float]):
    """The share of targets that are predicted right: the float64 nearest to right / all.

    NaN where there are no targets.

    Args:
        top_k: a prediction is right if the target is among this many highest scores.
        ignore_index: targets of this value do not count.

    Raises:
        InvalidUsage: `top_k` is less than 1.

    Example:
        >>> from pydist import metrics
        >>> accuracy = metrics.Accuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> accuracy.compute()
        0.5
    """

    def __init__(self, *, top_k: int = 1, ignore_index: int | None = None) -> None:
        super().__init__(2)
        if top_k < 1:
            raise InvalidUsage(f"top_k={top_k} is not valid; it must be 1 or more.")
        self.top_k = top_k
        self.ignore_index = ignore_index

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Adds samples of this rank.

        Args:
            predictions: classes in the shape of `targets`, as integers; or scores (N, C, ...) of
                C classes, where `targets` is (N, ...).
            targets: classes, as integers; also empty.

        Raises:
            InvalidUsage: shapes or dtypes do not fit; `top_k` without scores, or of fewer classes.
        """
        require_tensor("predictions", predictions)
        require_tensor("targets", targets)
        targets = targets.detach()
        if self.top_k == 1:
            right = _classes(predictions, targets) == targets
        else:
            if not _are_scores(predictions, targets) or predictions.shape[1] < self.top_k:
                raise InvalidUsage(
                    f"top_k={self.top_k} needs scores of that many classes or more in dimension 1; "
                    f"predictions have shape {tuple(predictions.shape)}, targets "
                    f"{tuple(targets.shape)}."
                )
            best = predictions.detach().topk(self.top_k, 1).indices
            right = (best == targets.unsqueeze(1)).any(1)
        counts = torch.ones_like(right)
        if self.ignore_index is not None:
            counts = targets != self.ignore_index
        self.on(targets.device).add_(torch.stack([(right & counts).sum(), counts.sum()]))

    def result(self, state: Tensor) -> float:
        """Right / all."""
        right, count = state.tolist()
        return float(right / count) if count else math.nan


class ConfusionMatrix(Metric[Tensor]):
    """How often each class was predicted for each: int64, (targets, predictions).

    Args:
        classes: the number of classes C, which are 0 to C - 1.
        ignore_index: targets of this value do not count.

    Raises:
        InvalidUsage: `classes` is less than 1.

    Example:
        >>> from pydist import metrics
        >>> confusion = metrics.ConfusionMatrix(2)
        >>> confusion.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> confusion.compute()
        tensor([[1, 1],
                [0, 1]])
    """

    def __init__(self, classes: int, *, ignore_index: int | None = None) -> None:
        if classes < 1:
            raise InvalidUsage(f"classes={classes} is not valid; it must be 1 or more.")
        super().__init__(classes * classes)
        self.classes = classes
        self.ignore_index = ignore_index

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Adds samples of this rank.

        Args:
            predictions: classes in the shape of `targets`, as integers; or scores (N, C, ...),
                where `targets` is (N, ...).
            targets: classes, as integers; also empty.

        Raises:
            InvalidUsage: shapes or dtypes do not fit, or a class is out of range.
        """
        require_tensor("predictions", predictions)
        require_tensor("targets", targets)
        targets = targets.detach()
        predicted = _classes(predictions, targets).reshape(-1).to(torch.int64)
        actual = targets.reshape(-1).to(torch.int64)
        if self.ignore_index is not None:
            counts = actual != self.ignore_index
            predicted, actual = predicted[counts], actual[counts]
        if actual.numel() == 0:
            return
        for name, values in (("predictions", predicted), ("targets", actual)):
            low, high = (int(value) for value in values.aminmax())
            if low < 0 or high >= self.classes:
                raise InvalidUsage(
                    f"{name} hold classes from {low} to {high}; of {self.classes} classes they "
                    f"must be from 0 to {self.classes - 1}."
                )
        cells = actual * self.classes + predicted
        self.on(cells.device).add_(cells.bincount(minlength=self.classes**2))

    def result(self, state: Tensor) -> Tensor:
        """The matrix: int64, (C, C)."""
        return state.clone().view(self.classes, self.classes)
