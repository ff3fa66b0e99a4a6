"""The files of a checkpoint, as torch's distributed checkpoints have them.

torch.distributed.checkpoint's own writer and reader do the work, and its `load` and
`dcp_to_torch_save` read what was written. What differs is who plans: ranks know what they have, so
that no plan travels, and what they have written is told through pydist's collectives.

Only functions import this module: torch's takes half a second to import.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from pydist._torch import storage_info
from pydist.checkpoint.dcp_metadata import read_metadata
from pydist.checkpoint.manifest import METADATA, read_manifest
from pydist.checkpoint.own_names import owner_in
from pydist.checkpoint.packing import unpack
from pydist.checkpoint.several_by_name import PARTS
from pydist.checkpoint.who_writes_what import Piece
from pydist.errors import CheckpointError
from pydist.job.outcome import is_of_signal_handler


class Entry(NamedTuple):
    """An object, or a piece of a tensor, that a rank has put into its file; in plain values."""

    name: str
    # Of a piece: its offsets, its sizes and those of its tensor, and the dtype; None for an object.
    piece: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype] | None
    # Of the values, and where they lie.
    bytes: int
    file: str
    offset: int
    length: int

    @property
    def place(self) -> MetadataIndex:
        """By which torch finds it."""
        return MetadataIndex(self.name, None if self.piece is None else torch.Size(self.piece[0]))


class _Source(DefaultSavePlanner):
    """Hands the writer what it asks for, one piece at a time."""

    def __init__(self, found: dict[MetadataIndex, Piece | bytes]) -> None:
        super().__init__()
        self._found = found

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found = self._found[write_item.index]
        return io.BytesIO(found) if isinstance(found, bytes) else found.values().cpu()


def file_of(rank: int) -> str:
    """What the writer calls a rank's file."""
    return f"__{rank}_0.distcp"


def write_file(
    folder: Path, rank: int, pieces: Iterable[Piece], objects: dict[str, bytes]
) -> list[Entry]:
    """Writes a rank's file to the disk. Talks to nobody."""
    found: dict[MetadataIndex, Piece | bytes] = {}
    items = []
    for piece in pieces:
        index = MetadataIndex(piece.name, piece.offsets)
        found[index] = piece
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        properties = TensorProperties(dtype=piece.source.dtype)
        data = TensorWriteData(chunk, properties, torch.Size(piece.whole))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    for name, packed in objects.items():
        index = MetadataIndex(name)
        found[index] = packed
        size = BytesIOWriteData(nbytes=len(packed))
        items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=size))
    writer = FileSystemWriter(folder)
    plans = [*(SavePlan([]) for _ in range(rank)), SavePlan(items)]
    plan = writer.prepare_global_plan(plans)[rank]
    entries = []
    for result in writer.write_data(plan, _Source(found)).wait():
        written = found[result.index]
        described = None
        if isinstance(written, Piece):
            box = tuple(written.offsets), tuple(written.sizes), tuple(written.whole)
            described = (*box, written.source.dtype)
        at = result.storage_data
        name, length = result.index.fqn, result.size_in_bytes
        entries.append(Entry(name, described, length, at.relative_path, at.offset, at.length))
    return entries


def write_metadata(folder: Path, parts: Sequence[Sequence[Entry]], aliases: dict[str, str]) -> None:
    """Writes where everything is. One rank does.

    Args:
        folder: Of the checkpoint.
        parts: What all ranks have written.
        aliases: Second names of tensors, with the first.
    """
    known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in (entry for part in parts for entry in part):
        if entry.piece is None:
            known[entry.name] = BytesStorageMetadata()
            continue
        *box, dtype = entry.piece
        offsets, sizes, whole = map(torch.Size, box)
        tensor = known.setdefault(
            entry.name, TensorStorageMetadata(TensorProperties(dtype=dtype), whole, [])
        )
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.chunks.append(ChunkStorageMetadata(offsets, sizes))
    every = list(map(list, parts))
    for alias, first in aliases.items():
        known[alias] = known[first]
        every.append([Entry(alias, *e[1:]) for part in parts for e in part if e.name == first])
    results = [
        [WriteResult(e.place, e.bytes, storage_info(e.file, e.offset, e.length)) for e in part]
        for part in every
    ]
    FileSystemWriter(folder).finish(Metadata(known), results)


class _Destination(DefaultLoadPlanner):
    """Takes what the reader has read."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[MetadataIndex, Tensor] = {}
        self.objects: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self.tensors[read_item.dest_index]
        for dim, (first, count) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, first, count)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class Contents:
    """A checkpoint to read from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = read_metadata(folder, read_manifest(folder))
        self._reader.set_up_storage_reader(self._metadata, True)

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self._folder

    @property
    def names(self) -> set[str]:
        """The names of all entries."""
        return set(self._metadata.state_dict_metadata)

    @functools.cached_property
    def parts(self) -> dict[str, list[str]]:
        """The kinds of objects of which it has several, with their names (several_by_name.py)."""
        found: dict[str, list[str]] = {}
        if PARTS in self.names:
            found = self.read_objects([PARTS])[PARTS]
        return found

    @property
    def saved_by(self) -> int:
        """The number of ranks that have saved it."""
        return sum(name.startswith("random.") for name in self.names)

    def of_all_ranks(self, prefix: str) -> list[str]:
        """The names that begin so."""
        return [name for name in self.names if name.startswith(prefix)]

    def of_rank(self, rank: int, prefix: str) -> list[str]:
        """The names that begin so, without those of what other ranks have alone."""
        return [name for name in self.of_all_ranks(prefix) if owner_in(name) in (None, rank)]

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None if there is none of that name."""
        entry = self._metadata.state_dict_metadata.get(name)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def names_of(self, name: str) -> list[str]:
        """All names of a tensor, in order: tied weights have several."""
        return next((names for names in self._shared if name in names), [name])

    @functools.cached_property
    def _shared(self) -> list[list[str]]:
        """The names of each tensor that has several: what is in one place of a file."""
        found: dict[tuple[str, int], list[str]] = {}
        for index, place in self._metadata.storage_data.items():
            if index.offset is not None and not any(index.offset):
                found.setdefault((place.relative_path, place.offset), []).append(index.fqn)
        return [sorted(names) for names in found.values() if len(names) > 1]

    def require_tensor(self, name: str) -> TensorStorageMetadata:
        """What is known of a tensor that other entries of the checkpoint refer to.

        Raises:
            CheckpointError: There is none of that name.
        """
        entry = self.tensor(name)
        if entry is None:
            raise CheckpointError(f"{self._folder / METADATA} has no tensor {name}")
        return entry

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Objects, by name."""
        destination = _Destination()
        items = [
            ReadItem(
                LoadItemType.BYTE_IO,
                MetadataIndex(name),
                torch.Size((0,)),
                MetadataIndex(name),
                torch.Size((0,)),
                torch.Size((0,)),
            )
            for name in names
        ]
        with self._naming_files({item.dest_index.fqn for item in items}):
            self._reader.read_data(LoadPlan(items), destination).wait()
            return {name: unpack(packed) for name, packed in destination.objects.items()}

    def read_tensors(self, wanted: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> None:
        """Reads boxes: of the tensor of a name, at these offsets, into a tensor of the box's size.

        Raises:
            CheckpointError: Some elements are in no file.
        """
        destination = _Destination()
        items: list[ReadItem] = []
        for name, offsets, tensor in wanted:
            if tensor.numel() == 0:
                continue
            entry = self.require_tensor(name)
            box = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            found = create_read_items_for_chunk_list(name, entry, [box])
            if sum(item.lengths.numel() for item in found) != tensor.numel():
                raise CheckpointError(f"{self._folder / METADATA} lacks elements of {name}")
            destination.tensors[MetadataIndex(name, offsets)] = tensor
            items += found
        names = {item.storage_index.fqn for item in items}
        with warnings.catch_warnings(), torch.no_grad(), self._naming_files(names):
            warnings.simplefilter("ignore", FutureWarning)
            self._reader.read_data(LoadPlan(items), destination).wait()

    @contextmanager
    def _naming_files(self, names: set[str]) -> Iterator[None]:
        """For what reads these entries; torch's reader fails without saying where."""
        try:
            yield
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            places = {
                str(self._folder / place.relative_path)
                for index, place in self._metadata.storage_data.items()
                if index.fqn in names
            }
            raise CheckpointError(
                f"{', '.join(sorted(places))}: what {METADATA} says is there can't be read "
                f"({type(error).__name__}: {error})"
            ) from error
