"""Cuts what a forward is given into a share for each device, and joins what the replicas return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type

# Arguments by position and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Parts of a nesting: what each adds to the path, and the part.
_Parts = list[tuple[str, Any]]


def cut(
    args: Any, kwargs: Any, scatter: Callable[[Tensor], Sequence[Tensor]], dim: int
) -> list[Arguments]:
    """The arguments of each replica: pieces of tensors, and all else as it is.

    Args:
        args: By position: tensors in any nesting of lists, tuples, mappings and dataclasses.
        kwargs: By name.
        scatter: Cuts a tensor along `dim`, and puts the pieces on the first devices.
        dim: The dimension of the batch.

    Returns:
        A share for each device, fewer where the batch has fewer rows, and one without any tensor.

    Raises:
        InvalidUsage: A tensor can't be cut, or has another number of rows than the first one.
    """
    pieces: dict[str, Sequence[Tensor]] = {}
    rows: dict[str, int] = {}
    arguments = {f"argument {number}": value for number, value in enumerate(args)}
    arguments |= {f"argument {name!r}": value for name, value in kwargs.items()}
    for name, value in arguments.items():
        for path, tensor in _tensors(value, name):
            if not -tensor.dim() <= dim < tensor.dim():
                raise InvalidUsage(
                    f"{path} of forward has {tensor.dim()} dimensions, and can't be cut along "
                    f"dim={dim} over the devices of device_ids: pass a number in place of a tensor "
                    "without dimensions, and let others have one that counts the samples"
                )
            pieces[path] = scatter(tensor)
            rows[path] = tensor.shape[dim]
    if not pieces:
        return [(args, kwargs)]
    first = next(iter(pieces))
    for path, count in rows.items():
        # Cut all the same, a table of another length would be in pieces that fit no samples.
        if count != rows[first]:
            raise InvalidUsage(
                f"{path} of forward has {count} rows along dim={dim}, which is cut over the "
                f"devices of device_ids, and {first} has {rows[first]}: give all tensors the same "
                "number of rows, or let the module keep what is no part of the batch as a buffer"
            )
    shares = []
    for number in range(len(pieces[first])):
        own = [_with_pieces(value, name, pieces, number) for name, value in arguments.items()]
        named = dict(zip(kwargs, own[len(args) :], strict=True))
        shares.append((tuple(own[: len(args)]), named))
    return shares


def join(
    outputs: Sequence[Any], gather: Callable[[Sequence[Tensor]], Tensor], dim: int, path: str = ""
) -> Any:
    """What one forward of the whole batch would have returned.

    Args:
        outputs: Of each replica: tensors and None, nested alike.
        gather: Joins the tensors of all replicas along `dim`; of vectors, along dimension 0.
        dim: Where the tensors may differ in size.
        path: Where in the outputs these are.

    Raises:
        InvalidUsage: Outputs can't be joined; names where they are.
    """
    where = f"the output of forward{f' at {path}' if path else ''}"
    first = outputs[0]
    for number, other in enumerate(outputs):
        if type(other) is not type(first):
            raise InvalidUsage(
                f"{where} is {a_type(first)} in the first replica and {a_type(other)} in replica "
                f"{number}: all devices of device_ids have to return the same kinds"
            )
    if first is None:
        return None
    if isinstance(first, Tensor):
        return gather(_joinable(outputs, dim, where))
    if (parts := _parts_of(first, where)) is None:
        raise InvalidUsage(
            f"{where} is {a_type(first)}, which can't be put together from the devices of "
            "device_ids: return tensors, or None"
        )
    keys = [key for key, _ in parts]
    columns = [parts]
    for number, other in enumerate(outputs[1:], 1):
        columns.append(_parts_of(other, where) or [])
        found = [key for key, _ in columns[-1]]
        if sorted(found) != sorted(keys):
            raise InvalidUsage(
                f"{where} has {', '.join(keys) or 'nothing'} in the first replica and "
                f"{', '.join(found) or 'nothing'} in replica {number}: all devices of device_ids "
                "have to return the same parts"
            )
    by_key = [dict(column) for column in columns]
    joined = [join([own[key] for own in by_key], gather, dim, path + key) for key in keys]
    return _rebuilt(first, joined)


def _joinable(tensors: Sequence[Tensor], dim: int, where: str) -> list[Tensor]:
    """The tensors, scalars as vectors, if they differ in their size along `dim` alone."""
    first = tensors[0]
    if first.dim() and not -first.dim() <= dim < first.dim():
        raise InvalidUsage(
            f"{where} has {first.dim()} dimensions, and outputs of the devices of device_ids are "
            f"joined along dim={dim}, as inputs are cut"
        )
    for number, other in enumerate(tensors):
        if _facts(other, dim) != _facts(first, dim):
            raise InvalidUsage(
                f"{where} is {_described(first)} in the first replica and {_described(other)} in "
                f"replica {number}: outputs of the devices of device_ids are joined along "
                f"dim={dim} and have to be alike otherwise, each on its own device"
            )
    return [tensor if tensor.dim() else tensor.view(1) for tensor in tensors]


def _facts(tensor: Tensor, dim: int) -> tuple[Any, ...]:
    sizes: list[int | None] = list(tensor.shape)
    if sizes and -len(sizes) <= dim < len(sizes):
        sizes[dim] = None
    return tensor.dtype, tensor.device.type, sizes


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, part in _parts_of(value, path) or ():
            yield from _tensors(part, path + key)


def _with_pieces(value: Any, path: str, pieces: dict[str, Sequence[Tensor]], number: int) -> Any:
    if isinstance(value, Tensor):
        return pieces[path][number]
    parts = _parts_of(value, path)
    if not parts:
        return value
    return _rebuilt(value, [_with_pieces(p, path + key, pieces, number) for key, p in parts])


def _parts_of(value: Any, where: str) -> _Parts | None:
    """The parts of a nesting; None for what is none."""
    if isinstance(value, PackedSequence):
        raise InvalidUsage(
            f"{where} is a PackedSequence, whose rows are not along one dimension, so it can't be "
            "cut over the devices of device_ids or joined from them: pack and unpack within the "
            "module"
        )
    if isinstance(value, MutableMapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
    return None


def _rebuilt(like: Any, parts: Iterable[Any]) -> Any:
    """A nesting like another one, with other parts."""
    if isinstance(like, MutableMapping):
        made = copy.copy(like)  # a defaultdict has more than its items
        for key, part in zip(like, parts, strict=True):
            made[key] = part
        return made
    if isinstance(like, (list, tuple)):
        make = getattr(type(like), "_make", type(like))
        return make(parts)
    made = copy.copy(like)
    for field, part in zip(dataclasses.fields(like), parts, strict=True):
        object.__setattr__(made, field.name, part)  # also of a frozen one
    return made
