"""Notices forwards that compute with running statistics which are another on each rank.

A forward in training mode moves the running statistics of BatchNorm on every rank by its own batch.
The averaged backward then gives all ranks rank 0's. torch's DistributedDataParallel does so sooner,
at the beginning of the next forward. Between the two only a layer in eval mode computes with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn


class RunningStatistics:
    """What forwards do to the running statistics of one rank's layers.

    Args:
        layers: By name, those that have some which are a rank's own until they are exchanged.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        self._moved: list[str] = []
        self._has_warned = False

    def before_forward(self, *, averages: bool) -> None:
        """Warns where this forward computes, in eval mode, with what an earlier one has moved.

        Args:
            averages: Whether the backward of this forward averages.
        """
        if self._moved and not self._has_warned:
            self._warn_of([name for name in self._moved if not self._layers[name].training])
        # torch, too, copies nothing after a forward that does not average.
        self._moved = []
        if averages:
            self._moved = [name for name, layer in self._layers.items() if layer.training]

    def note_exchange(self) -> None:
        """All ranks have the same from now on."""
        self._moved = []

    def _warn_of(self, names: list[str]) -> None:
        if not names:
            return
        self._has_warned = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"a forward in eval mode computes with running statistics ({names[0]}{more}) that a "
            "forward in training mode has moved, on each rank by its own batch, and whose backward "
            "has not come yet. torch's DistributedDataParallel copies rank 0's statistics at the "
            "beginning of a forward, and pydist.DataParallel at the end of a backward: run such a "
            "forward before the one that trains, or after its backward, or convert the layers "
            "(pydist.SyncBatchNorm.convert_sync_batchnorm)",
            UserWarning,
            stacklevel=2,
        )
