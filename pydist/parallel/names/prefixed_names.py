"""Warns programs that look for torch's prefix `module.` in names, where pydist has none.

torch's DistributedDataParallel puts `module.` before every name. So programs written for it select
parameters by `name.startswith("module.encoder.")`, and cut seven characters off the keys of a
state. Under the wrapped module's own names the first selects nothing and the second leaves garbage,
neither with an error. Names have to be plain strings all the same, because they become keys of
files that are read elsewhere. So the code that asks for them is looked at instead, once for each
place: the loop or the comprehension over the names, what follows in the same function, and the
functions that the loop calls or that are handed the names. Variables, attributes and items count by
what they hold at that time, be it a string, strings, a checkpoint, or a compiled pattern. What asks
a state for a name is told by `plain_state`.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import types
import warnings
import weakref
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from pydist.parallel.names.state_names import PREFIX

# What patterns and regular expressions with the prefix begin with.
_BEGINNINGS = (PREFIX, "module\\.", "^module.", "^module\\.", "module[.]", "^module[.]")
# Calls that select by their argument. Other calls may rename; without the prefix, these change
# nothing.
_SELECTING = {
    "startswith",
    "get",
    "pop",
    "find",
    "index",
    "match",
    "fullmatch",
    "search",
    "compile",
    "fnmatch",
    "fnmatchcase",
    "filter",
}
# Those that take the pattern second.
_PATTERN_SECOND = {"fnmatch", "fnmatchcase", "filter"}
_COMPARING = {"COMPARE_OP", "CONTAINS_OP"}
_STORING = ("STORE_", "LIST_EXTEND", "SET_UPDATE")
_INLINE = {"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
# The globals of nn.Module's own methods, which use no names that they hand out.
_OF_MODULES = vars(sys.modules[nn.Module.__module__])
# How far before a call its statement may begin.
_LINES_BEFORE = 6

# The places that were looked at: code, and instructions in it.
_seen: weakref.WeakKeyDictionary[types.CodeType, set[int]] = weakref.WeakKeyDictionary()


def warn_of_prefix(method: str) -> None:
    """Warns where the caller of a wrapper's method looks for the prefix in what that returns.

    Args:
        method: The name of the method, which calls this directly.
    """
    try:
        frame = sys._getframe(2)
    except ValueError:
        return  # a thread was started with the method itself
    if frame.f_globals is _OF_MODULES:
        return  # `parameters()`, `zero_grad()` and the like, in each step
    if torch.compiler.is_compiling():
        return  # the frames are those of the compiler
    places = _seen.setdefault(frame.f_code, set())
    if frame.f_lasti in places:
        return
    places.add(frame.f_lasti)
    try:
        line = _line_of_use(frame)
    except Exception:
        return  # what the program's own objects say may be anything, and is no reason to end it
    if line is None:
        return
    warnings.warn(
        f"line {line} of {frame.f_code.co_filename} looks for names that begin with {PREFIX!r}, "
        f"or cuts that off, in what {method}() of a pydist.DataParallel gives. There are none: "
        "names are those of the wrapped module, without the prefix that torch's "
        "DistributedDataParallel puts before them. Leave the prefix out; if the code is right "
        "without it as well, ignore this",
        UserWarning,
        stacklevel=3,
    )


def _line_of_use(frame: types.FrameType) -> int | None:
    """The line that looks for the prefix, in what follows the call at which a frame stands."""
    code, last, line = frame.f_code, frame.f_lasti, frame.f_lineno
    instructions = _of(code)
    after = [i for i in instructions if i.offset > last]
    uses = _uses_of_stored(after)
    inside = _loop(after[:12], after)
    end = max([line, *(n for i in inside if (n := _line(i)) is not None)])
    own = ChainMap(frame.f_locals, frame.f_globals)
    places = [_Place(after, own), _Place(inside, own, is_of_names=True)]
    spans = [(line - _LINES_BEFORE, end)]
    for use in uses:
        places.append(_Place(_loop(after[use : use + 8], after), own, is_of_names=True))
        at = _line(after[use]) or line
        spans.append((at, at))
    places += [
        _Place(_of(inner), own, is_of_names=True)
        for span in spans
        for inner in _inline(code, *span)
    ]
    handed = _of_statement(instructions, last)
    for use in uses:
        handed += after[max(0, use - 6) : use]
    for function in _called(own, inside + handed):
        called = function.__code__
        lines = [number for _, _, number in called.co_lines() if number]
        places += [
            _Place(_of(each), function.__globals__, is_of_names=True)
            for each in (called, *_inline(called, min(lines, default=0), max(lines, default=0)))
        ]
    for place in places:
        if (found := _search(place)) is not None:
            return found or line
    return None


@dataclass(frozen=True)
class _Place:
    """Instructions that may use the names."""

    instructions: list[dis.Instruction]
    variables: Mapping[str, Any]
    # Whether that is what they are there for. Others may cut something else, or hold names that are
    # not compared with these.
    is_of_names: bool = False


_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME", "NOT_TAKEN"}


def _of(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _NOTHING]


def _line(instruction: dis.Instruction) -> int | None:
    positions = getattr(instruction, "positions", None)  # not in Python 3.10
    number = positions.lineno if positions is not None else instruction.starts_line
    return int(number) if number else None


def _loop(first: list[dis.Instruction], after: list[dis.Instruction]) -> list[dis.Instruction]:
    """The body of the loop that begins among the first of some instructions; empty if none does."""
    for instruction in first:
        if instruction.opname == "FOR_ITER":
            begin, end = instruction.offset, instruction.argval
            return [i for i in after if begin <= i.offset < end]
    return []


def _of_statement(instructions: list[dis.Instruction], last: int) -> list[dis.Instruction]:
    """What a statement does before the call at which it stands: it may hand the names on."""
    begun: list[dis.Instruction] = []
    for instruction in instructions:
        if instruction.offset >= last:
            break
        ends = instruction.opname.startswith(("STORE_", "POP_", "RETURN_", "FOR_ITER"))
        begun = [] if ends else [*begun, instruction]
    return begun


def _uses_of_stored(after: list[dis.Instruction]) -> list[int]:
    """Where the variable is used that the names are put into, if they are."""
    stored = next((i.argval for i in after[:8] if i.opname.startswith("STORE_")), None)
    return [
        position
        for position, instruction in enumerate(after)
        if stored is not None
        and instruction.opname.startswith("LOAD_")
        and instruction.argval == stored
    ]


def _inline(code: types.CodeType, first: int, last: int) -> Iterator[types.CodeType]:
    """Comprehensions and lambdas between two lines."""
    for constant in code.co_consts:
        is_inline = isinstance(constant, types.CodeType) and constant.co_name in _INLINE
        if is_inline and first <= constant.co_firstlineno <= last:
            yield constant
            yield from _inline(constant, first, last)


def _called(
    variables: Mapping[str, Any], body: list[dis.Instruction]
) -> Iterator[types.FunctionType]:
    """The functions of Python that some instructions have names of."""
    for name in dict.fromkeys(i.argval for i in body if i.opname.startswith(("LOAD_", "CALL_"))):
        if not isinstance(name, str):
            continue
        value: Any = variables.get(name)
        if value is None:  # a method
            value = inspect.getattr_static(type(variables.get("self")), name, None)
        if isinstance(value, types.FunctionType):
            yield value


def _search(place: _Place) -> int | None:
    """The line of the first instruction that selects by the prefix; 0 where that is not known."""
    instructions, variables = place.instructions, place.variables
    harmless = _conversions(instructions, variables)
    held: Any = None
    asked: dis.Instruction | None = None  # what stands before the variable in which that is held
    line = 0
    for position, instruction in enumerate(instructions):
        line = _line(instruction) or line
        earlier = instructions[max(0, position - 2) : position]
        before = earlier[-1] if earlier else None
        behind = instructions[position + 1 : position + 4]
        if instruction.opname.startswith(_VARIABLES):
            asked = before
        held = _held(instruction, before, held, variables)
        if position in harmless:
            continue
        if _has_prefix(instruction, variables) and _selects(earlier, behind, instructions):
            return line
        if not place.is_of_names:
            continue
        if _is_of_prefixes(held) or _is_setting(instruction, held, asked, behind):
            return line
        if _is_cut(instruction, before, behind, variables):
            return line
        # `int(name.split(".")[1])`: under torch's names that would be no number.
        is_number = earlier[:1] != [] and earlier[0].argval == "int"
        following = instructions[position + 1 : position + 8]
        if not is_number and _is_cut_at_dot(instruction, following):
            return line
    return None


def _conversions(instructions: list[dis.Instruction], variables: Mapping[str, Any]) -> set[int]:
    """What belongs to a prefix that is cut off where it is there: `k[7:] if k.startswith(...)`.

    Such code is right with and without it: what has none goes on as it is, which is no jump back.
    """
    found: set[int] = set()
    for position in range(len(instructions)):
        jumps = instructions[position : position + 8]
        asks = [i.argval for i in jumps[:2]] == ["startswith", PREFIX]
        jump = next((i for i in jumps if i.opname.startswith("POP_JUMP")), None)
        if not asks or jump is None or not jump.opname.endswith("IF_FALSE"):
            continue
        branch = [
            number
            for number, each in enumerate(instructions)
            if jump.offset < each.offset < jump.argval
        ]
        if any(
            _is_cut(instructions[n], instructions[n - 1], instructions[n + 1 : n + 4], variables)
            for n in branch
        ):
            found |= {*range(position, branch[-1] + 1)}
    return found


def _is_setting(
    instruction: dis.Instruction,
    held: object,
    asked: dis.Instruction | None,
    behind: list[dis.Instruction],
) -> bool:
    """Whether a string with the prefix, held by an object, decides: `n.startswith(args.freeze)`."""
    if instruction.opname.startswith(_VARIABLES) or not _begins_with_prefix(held):
        return False  # variables themselves were looked at
    following = behind[0] if behind else None
    if following is not None and (
        following.opname in _COMPARING or following.argval in ("split", "strip")
    ):
        return True
    return asked is not None and asked.argval in _SELECTING


_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL")


def _has_prefix(instruction: dis.Instruction, variables: Mapping[str, Any]) -> bool:
    """Whether a constant, or a variable with its value of now, has the prefix."""
    value = instruction.argval
    if instruction.opname.startswith(_VARIABLES):
        value = variables.get(value)
    elif not instruction.opname.startswith("LOAD_CONST"):
        return False
    items = value if isinstance(value, (tuple, frozenset)) else (value,)
    return any(_begins_with_prefix(item) for item in items)


def _begins_with_prefix(item: object) -> bool:
    return isinstance(item, str) and item.startswith(_BEGINNINGS)


def _held(
    instruction: dis.Instruction,
    before: dis.Instruction | None,
    held: Any,
    variables: Mapping[str, Any],
) -> Any:
    """What an instruction loads, where that is a variable, or in one: `cfg.frozen["names"]`.

    Args:
        held: What the instruction before has loaded.
    """
    name = instruction.argval
    if instruction.opname.startswith(_VARIABLES):
        return variables.get(name)
    if instruction.opname.startswith("LOAD_CONST"):
        if isinstance(held, _Asked) and held.key is None:
            return _Asked(held.table, name)
        return held  # the key of `table[key]`, or a default
    if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and isinstance(name, str):
        if name == "get" and isinstance(held, dict):
            return _Asked(held)
        return getattr(held, "__dict__", {}).get(name)
    if instruction.opname.startswith("CALL") and isinstance(held, _Asked):
        return dict.get(held.table, held.key)
    if instruction.opname.startswith("BINARY_") and before is not None and isinstance(held, dict):
        return dict.get(held, before.argval)
    return None


class _Asked(NamedTuple):
    """A dictionary whose `get` is about to be called, with the key once that is known."""

    table: dict[Any, Any]
    key: Any = None


# How many of its names are looked at.
_MOST_PREFIXES = 1000


def _is_of_prefixes(held: object) -> bool:
    """Whether something is a list of strings with the prefix, or a pattern that begins with it."""
    if isinstance(held, re.Pattern):
        return _begins_with_prefix(held.pattern)
    if not isinstance(held, (list, tuple, set, frozenset, dict)):
        return False
    return any(map(_begins_with_prefix, islice(held, _MOST_PREFIXES)))


def _selects(
    earlier: list[dis.Instruction], behind: list[dis.Instruction], all_: list[dis.Instruction]
) -> bool:
    """Whether a constant with the prefix decides about names."""
    if earlier and earlier[-1].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        is_of_constant = len(earlier) > 1 and earlier[-2].opname.startswith("LOAD_CONST")
        return earlier[-1].argval in _SELECTING and not is_of_constant
    function = earlier[-2] if len(earlier) > 1 else None
    if (
        function is not None
        and function.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"))
        and function.argval in _PATTERN_SECOND
    ):
        return True
    # `name == "module.x"`, `name in (...)`; and with the operands in the other order.
    names_first = bool(behind) and behind[0].opname in _COMPARING
    names_last = len(behind) > 1 and behind[1].opname in _COMPARING
    if names_first or (names_last and behind[0].opname.startswith("LOAD_")):
        return True
    is_stored = bool(behind) and behind[0].opname.startswith(_STORING)
    calls = [i.argval for i in all_ if i.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return is_stored and "startswith" in calls


def _is_cut(
    instruction: dis.Instruction,
    before: dis.Instruction | None,
    behind: list[dis.Instruction],
    variables: Mapping[str, Any],
) -> bool:
    """Whether the first seven characters of something are cut off: `key[7:]`."""
    length = len(PREFIX)
    if instruction.opname.startswith("LOAD_CONST") and instruction.argval == slice(length, None):
        return True
    is_length = instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
    is_length = is_length and instruction.argval == length
    if not is_length and instruction.opname.startswith("CALL") and before is not None:
        is_length = _has_prefix(before, variables)  # len("module.")
    ends = [i.opname for i in behind[:2]]
    return (
        is_length
        and len(ends) == 2
        and behind[0].opname.startswith("LOAD_CONST")
        and behind[0].argval is None
        and ends[1] in ("BINARY_SLICE", "BUILD_SLICE")
    )


# What cuts a name at its first dot, by the method and the constants up to what it keeps.
_CUTS_AT_DOT: dict[str, list[list[object]]] = {
    "split": [[".", 1, None], [".", slice(1, None)], [".", 1, 1], [".", 1, -1]],
    "partition": [[".", 2], [".", -1]],
}


def _is_cut_at_dot(instruction: dis.Instruction, behind: list[dis.Instruction]) -> bool:
    """Whether the first part of something is cut off: `".".join(key.split(".")[1:])`."""
    if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return False
    constants: list[object] = []
    for following in behind:
        if following.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(following.argval)
        elif following.opname.startswith(("BINARY_", "BUILD_SLICE")):
            is_part = instruction.argval == "split" and constants[:1] == ["."]
            if is_part and len(constants) == 2 and type(constants[1]) is int:
                return constants[1] > 0
            return constants in _CUTS_AT_DOT.get(instruction.argval, [])
    return False
