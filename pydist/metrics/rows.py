"""Outputs of a model, one for each sample, from all ranks in one order."""

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.job.groups import Group
from pydist.metrics.metric import require_tensor
from pydist.metrics.ragged import all_gather_ragged


class Rows:
    """Collects rows of any shape and dtype; the result has those of all ranks, in order.

    In `pydist.evaluate`, where that shares out the batches of a loader or a data set, the result
    is in their order, as in one process. Elsewhere give `positions`.

    Example:
        >>> from pydist import metrics
        >>> outputs = metrics.Rows()
        >>> outputs.update(torch.tensor([30, 10]), torch.tensor([3, 1]))
        >>> outputs.update(torch.tensor([20]), torch.tensor([2]))
        >>> outputs.compute()
        tensor([10, 20, 30])
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._positions: list[Tensor] = []

    def update(self, rows: Tensor, positions: Tensor | None = None) -> None:
        """Adds rows of this rank.

        Args:
            rows: (n, ...); all of the same dtype and shape but for n. Kept on their device.
            positions: int64, (n,): where each belongs, see `all_gather_ragged`; always or never.

        Raises:
            InvalidUsage: only some updates give positions.
        """
        require_tensor("rows", rows)
        if positions is not None:
            require_tensor("positions", positions)
        if self._rows and (positions is None) != (not self._positions):
            raise InvalidUsage("Rows.update gets positions in some calls only; give them in all.")
        self._rows.append(rows.detach())
        if positions is not None:
            self._positions.append(positions)

    def reset(self) -> None:
        """Forgets this rank's rows."""
        self._rows.clear()
        self._positions.clear()

    def compute(self, group: Group | None = None, *, timeout: float | None = None) -> Tensor:
        """The rows of all ranks, on each of them. Every rank calls it.

        Args:
            group, timeout: see `all_gather_ragged`.

        Returns:
            In the order of positions; without any, in rank order. Of shape (0,) if nobody has rows.

        Raises:
            InvalidUsage, Mismatch: as in `all_gather_ragged`.
        """
        rows = torch.cat(self._rows) if self._rows else torch.empty(0)
        positions = torch.cat(self._positions) if self._positions else None
        return all_gather_ragged(rows, positions=positions, group=group, timeout=timeout)
