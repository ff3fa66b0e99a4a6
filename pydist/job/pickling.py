"""Says which part of an object can't be sent to another process, by attribute path.

pickle names a type at best ("cannot pickle '_thread.lock' object"), not where it sits.
"""

import functools
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydist._torch import with_parts

_DEEPEST = 32


def find_unpicklable(value: object, path: str, dumps: Callable[[object], bytes]) -> str:
    """Finds the smallest part of `value` that can't be pickled.

    Args:
        value: what could not be pickled.
        path: what to call it: "args".
        dumps: the pickler that failed.

    Returns:
        One phrase: the part's path, what it is, and what the pickler said.
    """
    found_path, found, error = _search(value, path, dumps, set(), 0) or (path, value, None)
    if error is None:
        return f"{found_path} is {_describe(found)}"
    return f"{found_path} is {_describe(found)}: {error}"


_Found = tuple[str, object, BaseException | None]


def _search(
    value: object, path: str, dumps: Callable[[object], bytes], seen: set[int], depth: int
) -> _Found | None:
    if id(value) in seen or depth > _DEEPEST:
        return None
    seen.add(id(value))
    try:
        dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        for child_path, child in _parts(value, path):
            inner = _search(child, child_path, dumps, seen, depth + 1)
            if inner is not None:
                return inner
        return path, value, error
    return None


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}[{key!r}]", item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield f"an element of {path}", item
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield from _parts(value.args, f"{path}.args")
        yield from _parts(value.keywords, f"{path}.keywords")
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _closure(value, path)
    if not isinstance(value, (type, types.FunctionType)):
        yield from _attributes(value, path)


def _closure(function: types.FunctionType, path: str) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name} (a variable that {path} uses)", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{name} (a global that {path} uses)", function.__globals__[name]
    yield from _parts(function.__defaults__ or (), f"{path}.__defaults__")


def _attributes(value: object, path: str) -> Iterator[tuple[str, object]]:
    attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    # A module of torch keeps its parts in three dicts, which nobody writes in a path.
    for name, item in with_parts(attributes).items():
        yield f"{path}.{name}", item


def _describe(value: object) -> str:
    if isinstance(value, types.FunctionType):
        code = value.__code__
        what = "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
        return f"{what} defined in {code.co_filename}:{code.co_firstlineno}"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    kind = type(value)
    name = (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    )
    return f"a {name}"
