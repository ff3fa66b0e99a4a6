"""What the tests of evaluation evaluate, and with which measures."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import (
    TensorDataset,
)

from pydist import metrics

SAMPLES = 103  # which no number of ranks divides

CLASSES = 5


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (samples,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, CLASSES)
    )


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    inputs, targets = batch
    scores = model(inputs)
    return {
        "loss": F.cross_entropy(scores, targets, reduction="none"),
        "weighted": (F.cross_entropy(scores, targets), len(targets)),
        "right": scores.argmax(1) == targets,
        "accuracy": (scores, targets),
        "confusion": (scores, targets),
        "outputs": scores,
    }


def measures() -> dict[str, Any]:
    return {
        "accuracy": metrics.Accuracy(),
        "confusion": metrics.ConfusionMatrix(CLASSES),
        "outputs": metrics.Rows(),
    }


Job = dict[str, Any]
