"""TensorBoard's event files, where `tensorboard` is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydist.errors import InvalidUsage
from pydist.job.log import logger

# Curves beside the program's own values.
_CURVES = ("step_s", "samples_per_s", "waiting_share", "bytes")


class EventFiles:
    """Writes what the lines say, as scalars.

    Args:
        folder: Of the run.
        first_step: TensorBoard forgets what files of an earlier start say of it and of later ones.

    Raises:
        ImportError: there is no tensorboard.
        OSError: the folder can't be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Adds some steps. What fails ends these files, with a warning, and nothing else."""
        if self._writer is None:
            return
        try:
            for line in lines:
                self._write(line)
            self._writer.flush()
        except Exception as error:  # of a foreign library, on whose files no training depends
            self._give_up(error)

    def _write(self, line: dict[str, Any]) -> None:
        scalars = dict(line["values"])
        scalars |= {f"pydist/{name}": line[name] for name in _CURVES}
        lags = [lag for lag in line["ranks"]["lag_s"] if lag is not None]
        scalars["pydist/lag_s"] = max(lags) if lags else None
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, line["step"], walltime=line["time"])

    def close(self) -> None:
        """Idempotent."""
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._give_up(error)
            self._writer = None

    def _give_up(self, error: Exception) -> None:
        logger.warning("pydist.monitor writes no more event files for TensorBoard: %s", error)
        self._writer = None


def open_event_files(folder: Path, first_step: int, wanted: bool | None) -> EventFiles | None:
    """The event files of a run.

    Args:
        folder: Of the run.
        first_step: The first step that will be written.
        wanted: None: where tensorboard is installed.

    Raises:
        InvalidUsage: they are wanted, and tensorboard is not installed.
        OSError: the folder can't be written.
    """
    if wanted is False:
        return None
    try:
        return EventFiles(folder, first_step)
    except OSError:
        raise
    except Exception as error:  # libraries that don't fit each other raise whatever they like
        if wanted:
            raise InvalidUsage(
                f"pydist.monitor(tensorboard=True) needs tensorboard, which can't be used "
                f"({error}): pip install tensorboard, or leave tensorboard= out."
            ) from error
        return None
