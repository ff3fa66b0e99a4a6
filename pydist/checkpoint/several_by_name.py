"""What `pydist.save` and `pydist.load` are given of a kind: one object, or several by name.

    pydist.save(path, model={"G": generator, "D": critic}, optimizer={"G": first, "D": second})

In a checkpoint, several models are what one `nn.ModuleDict` of them would be: a parameter is called
`G.0.weight`, wherever that name is needed. Of what else there is several, each is called by its
kind and its name, `optimizer.G`; which kinds those are says the entry `parts`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type

if TYPE_CHECKING:
    from pydist.checkpoint.dcp_files import Contents

# The entry of a checkpoint that lists, for each kind that it has several objects of, their names.
PARTS = "parts"

# A checkpoint keeps one `state_dict()` of each object of these kinds, for all ranks.
SHARED_KINDS = ("scheduler", "scaler", "sampler")

# A checkpoint keeps one `state_dict()` of each object of this kind for each rank.
STATEFUL = "stateful"

# A name is a part of the names of entries, in which dots and "@" say what belongs to what.
_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Part:
    """One object of a kind.

    Attributes:
        kind: "model", "optimizer", "scheduler", ...: what the argument is called.
        key: The name that it was given; None where it is the only one.
        value: Itself.
    """

    kind: str
    key: str | None
    value: Any

    @property
    def entry(self) -> str:
        """The name of its entry in a checkpoint."""
        return self.kind if self.key is None else f"{self.kind}.{self.key}"

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return self.kind if self.key is None else f"{self.kind} {self.key!r}"

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Lets what is wrong with it say which of several it is."""
        try:
            yield
        except InvalidUsage as error:
            if self.key is None:
                raise
            raise InvalidUsage(f"{self.label}: {error}") from error


def parts_of(kind: str, given: Any) -> list[Part]:
    """The objects of a kind, by name where there are several: in an order that all ranks have.

    Args:
        kind: What the argument is called.
        given: One object, a mapping of names to objects, or None.

    Raises:
        InvalidUsage: A name is no name, or stands for None.
    """
    if given is None:
        return []
    if not is_several(given):
        return [Part(kind, None, given)]
    for key, value in given.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise InvalidUsage(
                f"{kind}= has the name {key!r}; names are text of letters, digits, '_' and '-'"
            )
        if value is None:
            raise InvalidUsage(f"{kind}[{key!r}] is None: leave out what there is none of")
    return [Part(kind, key, given[key]) for key in sorted(given)]


def stateful_parts(given: Any) -> list[Part]:
    """What `stateful=` has, by name.

    Raises:
        InvalidUsage: It is no mapping of names to what has a state.
    """
    if given is not None and not is_several(given):
        raise InvalidUsage(
            f"stateful is {a_type(given)}; it must be a mapping of names to objects, as "
            'in stateful={"loader": loader}'
        )
    parts = parts_of(STATEFUL, given)
    for part in parts:
        require_loading(part)
    return parts


def require_loading(part: Part) -> None:
    """Raises InvalidUsage where an object can't load a state."""
    if not hasattr(part.value, "load_state_dict"):
        raise InvalidUsage(_stateless(part, "load_state_dict"))


def state_of(part: Part) -> Any:
    """What its `state_dict()` gives.

    Raises:
        InvalidUsage: It has none.
    """
    if not hasattr(part.value, "state_dict"):
        raise InvalidUsage(_stateless(part, "state_dict"))
    return part.value.state_dict()


def _stateless(part: Part, lacking: str) -> str:
    return (
        f"{part.label} is {a_type(part.value)}, which has no {lacking}(): pass what has "
        "state_dict() and load_state_dict(), and other values in extra="
    )


def values_of(parts: Sequence[Part]) -> list[Any]:
    """The objects themselves."""
    return [part.value for part in parts]


def is_several(given: Any) -> bool:
    """Whether it is a mapping of names to objects, rather than an object."""
    return isinstance(given, Mapping) and not hasattr(given, "state_dict")


def names_of(arguments: Mapping[str, Any]) -> dict[str, list[str]]:
    """The entry `parts`: the arguments of which there are several, and their names."""
    return {kind: sorted(given) for kind, given in arguments.items() if is_several(given)}


def require_entry(contents: Contents, part: Part) -> None:
    """Raises InvalidUsage where a checkpoint does not have an object."""
    if part.entry in contents.names:
        return
    raise InvalidUsage(f"the checkpoint has no {part.label}: {what_it_has(contents, part.kind)}")


def what_it_has(contents: Contents, kind: str) -> str:
    """What a checkpoint has of a kind, and how to ask for it."""
    names = contents.parts.get(kind)
    if names:
        several = ", ".join(f"{name!r}: ..." for name in names)
        listed = ", ".join(map(repr, names))
        return f"it was saved with several, {listed}: pass {kind}={{{several}}}"
    if kind in contents.names or (kind == "model" and contents.of_all_ranks(f"{kind}.")):
        return f"it was saved with one that has no name: pass {kind}= by itself"
    return "it was saved without one"
