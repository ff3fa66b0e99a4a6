"""What a configuration may say: which sections there are, and which names in each.

Most are arguments of public calls, and stand in their signatures alone: `takes_from_config` notes
them, and gives the call what the configuration in force says of an argument that the program has
left out. The section "engine" has the variables that the engine declares.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydist import _native
from pydist.config.hints import holds_nan, in_words, matches
from pydist.errors import InvalidUsage

ENGINE = "engine"
SECTIONS = (ENGINE, "model", "optimizer", "loader", "training")

# Types of the engine's variables, by their names in a configuration; any other one is text. The
# text of the variable itself will do for each: environments and checkpoints have it.
_ENGINE_TYPES: dict[str, Any] = {
    "timeout": float | str,
    "interface": list[str] | str,
    "ports": int | str,
    "sockets": int | str,
    "spin_us": float | str,
    "chunk_bytes": int | str,
    "one_shot_bytes": int | str,
    "rounds_from": int | str,
    "rounds_bytes": int | str,
    "staging_bytes": int | str,
    "heartbeat_warning": float | str,
    "heartbeat_timeout": float | str,
    "debug": bool | Literal[0, 1] | str,
}

# Variables that a configuration doesn't have: a secret would get into every checkpoint, and a file
# can't say that it is the file.
_NOT_ENGINE = ("PYDIST_JOB_SECRET", "PYDIST_CONFIG")


@dataclass(frozen=True)
class Field:
    """A name in a section."""

    section: str
    name: str
    hint: Any
    default: Any
    # Of a number.
    is_more_than_0: bool = False

    @property
    def key(self) -> str:
        """The name with its section, as messages have it: "model.compress"."""
        return f"{self.section}.{self.name}"

    def require(self, value: object, source: str) -> None:
        """Raises InvalidUsage where a value is of another type, or a number makes no sense."""
        if not matches(value, self.hint):
            raise InvalidUsage(
                f"{source}: {self.key} is {value!r}; it must be {in_words(self.hint)}"
            )
        if holds_nan(value):
            raise InvalidUsage(f"{source}: {self.key} is {value!r}; nan is no setting of anything")
        if self.is_more_than_0 and isinstance(value, (int, float)) and not value > 0:
            raise InvalidUsage(
                f"{source}: {self.key} is {value!r}; it must be more than 0, or left out"
            )


# By section and name. What stands here is not asked of a signature.
_fields: dict[str, dict[str, Field]] = {
    # What `pydist.initialize` reads, and nothing else.
    "training": {
        field.name: field
        for field in (
            Field("training", "batch_size", int | None, None, True),
            Field("training", "micro_batch_size", int | None, None, True),
            Field("training", "accumulation_steps", int | None, None, True),
            Field("training", "clip_grad_norm", float | None, None, True),
            Field("training", "dtype", Literal["float32", "bfloat16"] | None, None),
            Field("training", "drop_last", bool, False),
        )
    },
    "optimizer": {
        field.name: field
        for field in (
            Field("optimizer", "name", str | None, None),
            Field("optimizer", "params", dict[str, Any], {}),
            # pydist.ShardedOptimizer takes it from here as well: its stage is 1 or 2, by default 1.
            Field("optimizer", "stage", Literal[0, 1, 2], 0),
        )
    },
}


def variable_of(name: str) -> str:
    """The variable that a name in the section "engine" stands for."""
    return f"PYDIST_{name.upper()}"


def text_of(value: object) -> str:
    """A value of the section "engine" as its variable has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def add_arguments(
    section: str, signature: inspect.Signature, names: Iterable[str], scope: dict[str, Any]
) -> None:
    """Adds arguments of a call to a section.

    Args:
        section: one of `SECTIONS`.
        signature: the call's.
        names: of the arguments that can be written in a file.
        scope: the globals of the call's module, by which annotations are understood.
    """

    def annotated() -> None: ...

    annotated.__annotations__ = {name: signature.parameters[name].annotation for name in names}
    for name, hint in typing.get_type_hints(annotated, scope).items():
        default = signature.parameters[name].default
        _fields.setdefault(section, {}).setdefault(name, Field(section, name, hint, default))


def fields_of(section: str) -> Mapping[str, Field]:
    """The names of a section."""
    if section != ENGINE:
        return _fields.get(section, {})
    return {
        name: Field(ENGINE, name, _ENGINE_TYPES.get(name, str), default or None)
        for variable, _, default, *_ in _native.environment_variables()
        if variable not in _NOT_ENGINE
        for name in (variable.removeprefix("PYDIST_").lower(),)
    }


def require_section(section: str, source: str) -> None:
    """Raises InvalidUsage where there is no such section, with the nearest."""
    if section not in SECTIONS:
        near = difflib.get_close_matches(str(section), SECTIONS, 1, cutoff=0)[0]
        raise InvalidUsage(
            f"{source}: there is no section {section!r}; did you mean {near!r}? "
            f"There are {', '.join(SECTIONS)}."
        )


def find(section: str, name: str, source: str) -> Field:
    """A name in a section that there is.

    Raises:
        InvalidUsage: there is no such name; the message has the nearest.
    """
    known = fields_of(section)
    if name in known:
        return known[name]
    if section == ENGINE and variable_of(name) in _NOT_ENGINE:
        raise InvalidUsage(
            f"{source}: {section}.{name} can't be in a configuration, which is saved with every "
            f"checkpoint: set {variable_of(name)}."
        )
    # Also one that is spelt like its variable.
    meant = name.lower().removeprefix("pydist_")
    elsewhere = [other for other in SECTIONS if meant in fields_of(other)]
    if elsewhere:
        raise InvalidUsage(
            f"{source}: there is no {section}.{name}; did you mean {elsewhere[0]}.{meant}?"
        )
    near = difflib.get_close_matches(meant, known, 1, cutoff=0)[0]
    raise InvalidUsage(f"{source}: there is no {section}.{name}; did you mean {section}.{near}?")
