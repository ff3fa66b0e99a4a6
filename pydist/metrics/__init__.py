"""Measuring over all ranks, exactly: the same result however samples are shared out."""

from pydist.metrics.classification import Accuracy, ConfusionMatrix
from pydist.metrics.means import Mean, Sum, mean
from pydist.metrics.metric import Metric
from pydist.metrics.ragged import all_gather_ragged, gather_ragged
from pydist.metrics.rows import Rows

__all__ = [
    "Accuracy",
    "ConfusionMatrix",
    "Mean",
    "Metric",
    "Rows",
    "Sum",
    "all_gather_ragged",
    "gather_ragged",
    "mean",
]
