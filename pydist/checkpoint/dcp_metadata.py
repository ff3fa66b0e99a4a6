"""Reads where everything is in a checkpoint, and runs nothing that its author has written.

torch.distributed.checkpoint keeps this in `.metadata`, as a pickle, and a pickle may call any
function. Here it may call none: each class that torch's writer names stands for a record, which
only remembers what it was given. Torch's classes are then made of those records, once their fields
have been checked.

Note [A pickle takes no more than its bytes]
A few bytes of a pickle can make Python's unpickler in C reserve any amount of memory: the largest
index sizes its memo, and a length sizes a buffer before anyone looks whether as many follow.
Python's unpickler in Python keeps its memo in a dictionary, and cuts buffers out of the bytes that
are there. It makes only bytearrays beforehand, so `_Unpickler` refuses them. It also refuses keys
other than texts and records: to hash tuples that lie in each other, some hundred thousand deep,
overruns the stack and ends the process.

By its memo a pickle can also name one object many times: a list of a thousand pieces that a
thousand entries share is a million pieces. So every record is converted once, whoever names it,
entries that share pieces are refused, and so are tensors of more dimensions than anybody has.

Only functions import this module: torch's takes half a second to import.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pydist._torch import LAYOUT_MAKER, MEMORY_FORMAT, STORAGE_INFO
from pydist.checkpoint.manifest import METADATA
from pydist.errors import CheckpointError
from pydist.job.arguments import a_type, with_article


class _Record:
    """What a pickle makes of a class: the arguments of its constructor, and its state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None
    made: Any = None  # of it, once it was converted

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    # So that a pickle sets no attributes, neither of a record nor of its class.
    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Member(_Record):
    """Of an enumeration: some versions of Python, such as 3.11.2, write `getattr(class, name)`."""

    def __init__(self, enumeration: Any, name: Any) -> None:
        if enumeration is not _RECORDS[_METADATA_MODULE, MEMORY_FORMAT] or type(name) is not str:
            raise pickle.UnpicklingError("it asks for builtins.getattr")
        super().__init__(name)


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"

# By module and name: a class of records for each that torch's writer names.
_RECORDS: dict[tuple[str, str], type[_Record]] = {
    ("builtins", "getattr"): _Member,
} | {
    (module, name): type(name, (_Record,), {})
    for module, names in {
        _METADATA_MODULE: (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            MEMORY_FORMAT,
            "StorageMeta",
        ),
        "torch.distributed.checkpoint.filesystem": (STORAGE_INFO,),
        "torch": ("Size",),
        "torch.serialization": (LAYOUT_MAKER,),
        "pathlib": ("PosixPath",),
        "pathlib._local": ("PosixPath",),
    }.items()
    for name in names
}


_MOST_DIMENSIONS = 64

# What Python's unpickler does, by opcode.
_LOADS: dict[int, Any] = dict(pickle._Unpickler.dispatch)


class _Unpickler(pickle._Unpickler):
    """See Note [A pickle takes no more than its bytes]."""

    stack: list[Any]

    def find_class(self, module_name: str, global_name: str) -> Any:
        found: Any = _RECORDS.get((module_name, global_name))
        if found is None and module_name == "torch":
            found = getattr(torch, global_name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")
        return found

    def _refuse_opcode(self) -> NoReturn:
        _refuse("a bytearray, a set, or a dictionary made of a list of items")

    def _set_item(self) -> None:
        _check_keys(self.stack[-2:-1])
        _LOADS[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        _check_keys(self.stack[::2])
        _LOADS[pickle.SETITEMS[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {
        **_LOADS,
        **dict.fromkeys(
            pickle.BYTEARRAY8 + pickle.ADDITEMS + pickle.FROZENSET + pickle.DICT, _refuse_opcode
        ),
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if type(key) is not str and not isinstance(key, _Record):
            _refuse(f"a {type(key).__name__} in the place of a name")


@dataclass(frozen=True)
class _Place:
    """Where an entry's bytes are: what torch's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """What a checkpoint has, and where.

    Args:
        folder: Of the checkpoint.
        files: The names of its files: nothing lies elsewhere.

    Raises:
        CheckpointError: It can't be read, or is nothing that torch's writer writes.
    """
    path = folder / METADATA
    try:
        return _metadata_of(_Unpickler(io.BytesIO(path.read_bytes())).load(), files)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or was not written by torch.distributed.checkpoint: {error}"
        ) from error


def _metadata_of(record: Any, files: Collection[str]) -> Metadata:
    fields = _fields(record, "Metadata")
    known: dict[str, Any] = {}
    lists: set[int] = set()
    for name, entry in _checked(fields.get("state_dict_metadata"), dict).items():
        known[_checked(name, str)] = _entry_of(entry, lists)
    places: dict[MetadataIndex, _Place] = {}
    for index, place in _checked(fields.get("storage_data"), dict).items():
        places[_index_of(index)] = _place_of(place, files)
    return Metadata(known, storage_data=places)


def _entry_of(record: Any, lists: set[int]) -> TensorStorageMetadata | BytesStorageMetadata:
    """An entry; `lists` has the identities of the lists of pieces of others."""
    if _is_a(record, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    if record.made is not None:  # names of tied tensors share one
        entry: TensorStorageMetadata = record.made
        return entry
    properties = _record(fields.get("properties"), "TensorProperties").state
    dtype = _checked(_checked(properties, tuple)[0], torch.dtype)
    size = _size_of(fields.get("size"))
    pieces = _checked(fields.get("chunks"), list)
    if id(pieces) in lists:
        _refuse("pieces that belong to two entries")
    lists.add(id(pieces))
    chunks = [_chunk_of(piece, size) for piece in pieces]
    record.made = made = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return made


def _chunk_of(record: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    if record.made is not None and record.made[0] is whole:
        chunk: ChunkStorageMetadata = record.made[1]
        return chunk
    offsets, sizes = _size_of(fields.get("offsets")), _size_of(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(whole) or any(
        first + count > end for first, count, end in zip(offsets, sizes, whole, strict=True)
    ):
        _refuse(f"a piece of {tuple(sizes)} at {tuple(offsets)} of {tuple(whole)}")
    made = ChunkStorageMetadata(offsets, sizes)
    record.made = whole, made
    return made


def _index_of(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(
        _checked(fields.get("fqn"), str), None if offset is None else _size_of(offset)
    )


def _place_of(record: Any, files: Collection[str]) -> _Place:
    fields = _fields(record, STORAGE_INFO)
    path = _checked(fields.get("relative_path"), str)
    if path not in files:
        _refuse(f"the file {path!r}, which is none of the checkpoint's")
    if fields.get("transform_descriptors"):
        _refuse("transformed data")
    return _Place(path, _count(fields.get("offset")), _count(fields.get("length")))


def _size_of(record: Any) -> torch.Size:
    if _is_a(record, "Size") and record.made is not None:
        size: torch.Size = record.made
        return size
    (numbers,) = _record(record, "Size").arguments
    if len(_checked(numbers, tuple)) > _MOST_DIMENSIONS:
        _refuse(f"{len(numbers)} dimensions")
    record.made = made = torch.Size([_count(number) for number in numbers])
    return made


def _fields(record: Any, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = _checked(_record(record, name).state, dict)
    return fields


def _record(record: Any, name: str) -> _Record:
    if not _is_a(record, name):
        _refuse(f"{a_type(record)} in the place of a {name}")
    assert isinstance(record, _Record)
    return record


def _is_a(record: Any, name: str) -> bool:
    return isinstance(record, _Record) and type(record).__name__ == name


def _count(value: Any) -> int:
    if _checked(value, int) < 0:
        _refuse(f"the number {value}")
    return int(value)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        _refuse(f"{a_type(value)} in the place of {with_article(kind.__name__)}")
    return value


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"it has {what}")
