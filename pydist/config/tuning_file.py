"""What earlier jobs have found to be fastest on this kind of machine, in a file of the user's.

One file for each processor model and kernel release, in `$XDG_CACHE_HOME/pydist` or
`~/.cache/pydist`. The ranks of a job begin with what it says, and lowest ranks of hosts write what
their job has learnt. It is a cache: where it can't be used, a line of the log says why, and the
ranks begin with nothing.
"""

import hashlib
import json
import logging
import math
import os
import platform
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydist import _native
from pydist.config.processor_name import processor_name
from pydist.errors import InvalidUsage

# Grows when what stands here means something else.
FORMAT = 4

_MOST_BYTES = 1 << 20

_logger = logging.getLogger("pydist")


class Unusable(Exception):  # noqa: N818
    """Why the file is not read, nor replaced unless it is `damaged`."""

    def __init__(self, why: str, *, damaged: bool = False) -> None:
        super().__init__(why)
        self.damaged = damaged


def path() -> Path:
    """The file for this processor and this kernel; there may be none yet."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # What is not absolute counts as not given, says the XDG Base Directory Specification.
    folder = Path(given) if given.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
    machine = f"{processor_name()}\n{platform.release()}"
    return folder / "pydist" / f"tuning-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"


def load() -> None:
    """Has the groups that this process makes from now on begin with what the file says.

    Where PYDIST_TUNING is not "on", with nothing.
    """
    classes: list[_native.TunedClass] = []
    if _is_on():
        with _saying_why_not("read"):
            classes = read()
    _native.replace_tuning_table(classes)


def save(local_rank: int) -> None:
    """Writes what this process has learnt, over what the file says of the same classes.

    Args:
        local_rank: the process's; one of a host writes.
    """
    table = _native.tuning_table()
    learnt = [each for each in table if each.is_learnt]
    if local_rank != 0 or not learnt or not _is_on():
        return
    with _saying_why_not("written"):
        try:
            known = read()
        except Unusable as error:
            if not error.damaged:
                return
            known = []
        merged = {_key(each): each for each in (*known, *learnt)}
        _write([merged[key] for key in sorted(merged)])
        # What is written is not learnt any more.
        _native.replace_tuning_table([_made(_as_dict(each)) for each in table])


def read() -> list[_native.TunedClass]:
    """What the file says; nothing where there is none.

    Raises:
        Unusable: it is not this user's, or damaged, or of another format.
        OSError: it can't be read.
    """
    file_path = path()
    if not file_path.is_absolute():
        raise Unusable("this user has no home folder; XDG_CACHE_HOME names another")
    try:
        descriptor = os.open(file_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise Unusable("it is no regular file")
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unusable("others than this process's user can write it")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise Unusable(f"it has more than {_MOST_BYTES} bytes", damaged=True)
    try:
        document = json.loads(content)
        number = document["format"]
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if is_number and number > FORMAT:
            raise Unusable(f"it is of format {number}, that of a newer pydist")
        if is_number and 0 < number < FORMAT:
            raise Unusable(f"it is of format {number}, that of an older pydist", damaged=True)
        if not is_number or number != FORMAT:
            raise ValueError(f"format is {number!r} instead of {FORMAT}")
        if (document["processor"], document["kernel"]) != (processor_name(), platform.release()):
            raise Unusable("it is of another machine", damaged=True)
        return [_made(each) for each in document["classes"]]
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        RecursionError,
        InvalidUsage,
    ) as error:
        text = " ".join(str(error).split())[:200]
        raise Unusable(f"it is damaged ({type(error).__name__}: {text})", damaged=True) from None


def _is_on() -> bool:
    try:
        return _native.read_environment().tuning == "on"
    except InvalidUsage:  # which joining tells all ranks
        return False


class _saying_why_not:  # noqa: N801
    """Ends in a line of the log where the file can't be used."""

    def __init__(self, done: str) -> None:
        self._done = done

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Unusable):
            _logger.warning("%s is not %s: %s.", path(), self._done, error)
        elif isinstance(error, OSError):
            # Many a container has no home that can be written.
            _logger.info("%s is not %s: %s.", path(), self._done, error.strerror or error)
        elif isinstance(error, Exception):
            # A fault of this file's, which must not keep a job from beginning or ending.
            _logger.warning("%s is not %s: %r.", path(), self._done, error)
        else:
            return False
        return True


def _key(each: _native.TunedClass) -> tuple[str, str, int, int, bool]:
    return each.kind, each.memory, each.ranks, each.bytes, each.sends_too


def _as_dict(each: _native.TunedClass) -> dict[str, Any]:
    told = {
        "kind": each.kind,
        "memory": each.memory,
        "ranks": each.ranks,
        "bytes": each.bytes,
        "way": list(each.way),
        "times_us": [[list(way), round(us, 3)] for way, us in each.times_us],
    }
    return {**told, "sends_too": True} if each.sends_too else told


def _made(given: dict[str, Any]) -> _native.TunedClass:
    times = [(tuple(way), float(us)) for way, us in given["times_us"]]
    for _, us in times:
        if not (math.isfinite(us) and us >= 0):
            raise ValueError(f"times_us holds {us}: must be finite and 0 or more")
    fields = {name: given[name] for name in ("kind", "memory", "ranks", "bytes")}
    return _native.TunedClass(
        **fields,
        way=tuple(given["way"]),
        times_us=times,
        sends_too=given.get("sends_too", False),
    )


def _write(classes: list[_native.TunedClass]) -> None:
    document = {
        "format": FORMAT,
        "processor": processor_name(),
        "kernel": platform.release(),
        "classes": [_as_dict(each) for each in classes],
    }
    target = path()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=".tuning-", dir=target.parent)
    try:
        with open(descriptor, "w") as file:
            json.dump(document, file, separators=(",", ":"))
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
