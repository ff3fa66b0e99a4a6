"""The GPUs that a job is to use, as people name them.

| `pydist run` | in Python | |
|---|---|---|
| `--gpus 2` | `2`, `"2"` | the first two |
| `--gpus 0` | `0`, `[]` | none: the job runs on the CPU |
| `--gpus -1` | `-1`, `"-1"` | all that are visible |
| `--gpus 0,2` | `[0, 2]`, `"0,2"`, an array or tensor of integers | these |
| `--gpus 0,` | `[0]`, `"0,"`, `"0"` | the first |
| `--gpus auto:2` | `"auto:2"` | two on which nothing runs; `auto:-1` takes all such |

A number counts GPUs, also in a string; a list, or a string with a comma, names them. The one
exception is the string "0": nobody writes it to have none, so it is the first GPU. (On the command
line there are no strings: `--gpus 0` is the number.) Numbers count among the visible GPUs: with
CUDA_VISIBLE_DEVICES=4,5 the first is 4.

What is chosen becomes the job's CUDA_VISIBLE_DEVICES, so all its ranks see all of its GPUs, and the
i-th rank of the host takes the i-th of them (`pydist.device`).
"""

import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.gpu.inventory import InstalledGpu, installed_gpus
from pydist.gpu.visible import VARIABLE, are_instances, listed_gpus, visible_gpus, why_none

Gpus = int | str | Sequence[int] | npt.NDArray[Any] | Tensor

_FORMS = "a number (0 for none, -1 for all), a list as in 0,2, or auto:2 for idle ones"


@dataclass(frozen=True)
class _Wish:
    """What was asked for; a count of None stands for as many as there are."""

    # As it was written, for messages.
    text: str
    count: int | None = None
    indices: tuple[int, ...] | None = None
    is_idle: bool = False


def from_command_line(text: str) -> int | str:
    """`--gpus` as it would be written in Python: digits are a number there, not a string."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text.strip()) else text


def choose_gpus(
    gpus: Gpus,
    where: str = "gpus=",
    *,
    visible: Callable[[], tuple[str, ...]] = visible_gpus,
    installed: Callable[[], list[InstalledGpu]] = installed_gpus,
) -> tuple[str, ...]:
    """Chooses GPUs of this host.

    Args:
        gpus: a number of GPUs, a list of their numbers, or a string; see the module.
        where: its source, for messages: "--gpus ", "gpus=".
        visible: what finds the visible GPUs.
        installed: what finds the load of GPUs; only asked for idle ones.

    Returns:
        Entries for CUDA_VISIBLE_DEVICES, in the order in which local ranks take them; empty where
        none was asked for.

    Raises:
        InvalidUsage: `gpus` has none of the forms, names a GPU twice, or one that is not visible,
            or more than are visible (or idle).
        Error: the load of GPUs can't be told.
    """
    wish = _parse(gpus, where)
    if wish.count == 0:
        return ()
    entries = visible()
    if not entries:
        raise InvalidUsage(f"{wish.text}: there is no GPU to take: {why_none()}.")
    _check_count(wish, entries)
    if wish.is_idle:
        return _idle(wish, entries, installed())
    if wish.indices is None:
        return entries[: wish.count]
    outside = [index for index in wish.indices if index >= len(entries)]
    if outside:
        raise InvalidUsage(f"{wish.text}: there is no GPU {outside[0]}: {_visible(entries)}.")
    return tuple(entries[index] for index in wish.indices)


def process_count(chosen: tuple[str, ...], asked: int | None, gpus: str, processes: str) -> int:
    """How many processes a host starts for the GPUs chosen: one each.

    Args:
        chosen: the GPUs; not none.
        asked: how many processes were asked for; None if nobody said.
        gpus: what chose the GPUs, for the message: "--gpus 0,2".
        processes: what asked for processes: "-n 4".

    Raises:
        InvalidUsage: the numbers differ.
    """
    if asked is None or asked == len(chosen):
        return len(chosen)
    raise InvalidUsage(
        f"{gpus} takes {len(chosen)} GPU{'' if len(chosen) == 1 else 's'} for a process each, but "
        f"{processes} asks for {asked}: leave one of the two out. For processes that share GPUs "
        f"set {VARIABLE} instead."
    )


@dataclass(frozen=True)
class Choice:
    """What a program has asked for, and what it got of the GPUs that were visible then."""

    asked: Gpus
    entries: tuple[str, ...]
    visible: tuple[str, ...]

    def is_of(self, gpus: Gpus) -> bool:
        """Whether another wish is for the same GPUs, however it is written.

        Raises:
            InvalidUsage: it has none of the forms.
        """
        wish = _parse(gpus, "gpus=")
        if replace(wish, text="") == replace(_parse(self.asked, "gpus="), text=""):
            return True
        if wish.is_idle:  # which are idle has changed since
            return False
        try:
            return choose_gpus(gpus, visible=lambda: self.visible) == self.entries
        except InvalidUsage:
            return False  # there are no such GPUs


def gpu_variables(chosen: tuple[str, ...]) -> dict[str, str]:
    """The variables that tell the processes of a job which GPUs are theirs."""
    return {VARIABLE: ",".join(chosen)}


def _parse(gpus: Gpus, where: str) -> _Wish:
    # What is empty shows nothing, and comes of a variable of the shell's that is not set.
    is_typed = not where.endswith("=") and str(gpus).strip() != ""
    text = f"{where}{gpus}" if is_typed else f"{where}{gpus!r}"
    if isinstance(gpus, np.ndarray | Tensor):
        gpus = gpus.tolist()
    if isinstance(gpus, str):
        return _parse_string(gpus.strip(), text)
    if isinstance(gpus, bool | bytes):
        raise _no_form(text)
    if isinstance(gpus, Sequence):
        return _listing(gpus, text)
    try:
        count = operator.index(gpus)
    except TypeError:
        raise _no_form(text) from None
    return _counting(count, text)


def _parse_string(value: str, text: str) -> _Wish:
    if "," in value and re.search(r"-\d", value):
        raise InvalidUsage(
            f"{text} is not valid: numbers of GPUs count from 0. For all of them write -1 alone, "
            "without a comma."
        )
    if idle := re.fullmatch(r"auto:([+-]?\d+)", value):
        count = int(idle[1])
        if count == 0 or count < -1:
            raise InvalidUsage(
                f"{text} is not valid; auto: takes the number of idle GPUs to use, 1 or more, or "
                "-1 for all that are idle."
            )
        return _Wish(text, None if count == -1 else count, is_idle=True)
    if value == "0":
        return _Wish(text, indices=(0,))
    if re.fullmatch(r"[+-]?\d+", value):
        return _counting(int(value), text)
    if not re.fullmatch(r"\d+\s*(,\s*\d+\s*)*,?", value):
        raise _no_form(text)
    return _listing([int(index) for index in value.rstrip(",").split(",")], text)


def _counting(count: int, text: str) -> _Wish:
    if count < -1:
        raise _no_form(text)
    return _Wish(text, None if count == -1 else count)


def _listing(gpus: Sequence[object], text: str) -> _Wish:
    indices = []
    for gpu in gpus:
        try:
            index = -1 if isinstance(gpu, bool) else operator.index(gpu)  # type: ignore[arg-type]
        except TypeError:
            index = -1
        if index < 0:
            raise InvalidUsage(
                f"{text} is not valid: {gpu!r} is no number of a GPU; they count from 0."
            )
        if index in indices:
            raise InvalidUsage(
                f"{text} names GPU {index} twice; each process takes one of its own. For processes "
                f"that share a GPU set {VARIABLE}, and how many processes to start."
            )
        indices.append(index)
    return _Wish(text, indices=tuple(indices)) if indices else _Wish(text, count=0)


def _no_form(text: str) -> InvalidUsage:
    by_name = f" For GPUs by UUID set {VARIABLE}." if re.search("(GPU|MIG)-", text) else ""
    return InvalidUsage(f"{text} is not valid; use {_FORMS}.{by_name}")


def _visible(entries: tuple[str, ...]) -> str:
    """Which numbers there are, and what limits them, for messages."""
    count = len(entries)
    listed = os.environ.get(VARIABLE)
    by = f" (by {VARIABLE}={listed})" if listed is not None else ""
    return f"only GPU 0 is visible{by}" if count == 1 else f"0 to {count - 1} are visible{by}"


def _check_count(wish: _Wish, entries: tuple[str, ...]) -> None:
    if wish.count is not None and wish.count > len(entries):
        raise InvalidUsage(f"{wish.text} asks for more GPUs than there are: {_visible(entries)}.")


def _idle(wish: _Wish, entries: tuple[str, ...], installed: list[InstalledGpu]) -> tuple[str, ...]:
    """The least loaded of those on which nothing runs, in the order in which they are listed."""
    is_listed = listed_gpus() is not None
    candidates = [(entry, _find(wish, entry, installed)) for entry in entries]
    idle = [(entry, gpu) for entry, gpu in candidates if gpu.is_idle]
    wanted = 1 if wish.count is None else wish.count
    if len(idle) < wanted:
        busy = "; ".join(
            f"GPU {index}: {gpu.load}"
            for index, (_, gpu) in enumerate(candidates)
            if not gpu.is_idle
        )
        raise InvalidUsage(
            f"{wish.text}: {len(idle)} of {len(entries)} visible GPUs "
            f"{'is' if len(idle) == 1 else 'are'} idle ({busy})."
        )
    idle.sort(key=lambda pair: pair[1].used_bytes or 0)
    taken = idle[: wish.count]
    # CUDA may number GPUs by speed; without a list of the user's, a UUID can't be misread.
    return tuple(
        entry if is_listed else gpu.uuid for entry, gpu in candidates if (entry, gpu) in taken
    )


def _find(wish: _Wish, entry: str, installed: list[InstalledGpu]) -> InstalledGpu:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES stands for."""
    if are_instances((entry,)):
        raise InvalidUsage(
            f"{wish.text}: whether {entry}, a MIG instance, is idle can't be told; name instances "
            "by their numbers, as in 0,2."
        )
    if not entry.isdigit():
        found = [gpu for gpu in installed if gpu.uuid.startswith(entry)]
    else:
        # By speed and by bus are one order where all are of one kind.
        is_bus_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if not is_bus_order and listed_gpus() and len({gpu.name for gpu in installed}) > 1:
            raise InvalidUsage(
                f"{wish.text}: this host has GPUs of several kinds, which CUDA and nvidia-smi may "
                f"number differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or UUIDs in {VARIABLE}."
            )
        found = [gpu for gpu in installed if gpu.index == int(entry)]
    if len(found) != 1:
        raise InvalidUsage(
            f"{wish.text}: GPU {entry} is {'not' if not found else 'more than one'} among those "
            f"that the driver names ({', '.join(gpu.uuid for gpu in installed)})."
        )
    return found[0]
