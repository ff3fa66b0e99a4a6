"""Checkpoints of strangers, and damaged ones: nothing of theirs runs, and the culprit is named."""

import io
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forged_checkpoint import sign, write_as_before
from launch import Ranks, run_command
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import pydist
from pydist.checkpoint.dcp_metadata import read_metadata
from pydist.checkpoint.manifest import MANIFEST, METADATA, FileSum, read_manifest, sum_of

pytestmark = pytest.mark.timeout(60)

Found = tuple[Path, dict[str, torch.Tensor]]


def save(folder: str, *steps: int) -> dict[str, torch.Tensor]:
    pydist.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for step in steps or (None,):
        pydist.save(folder, model=model, optimizer=optimizer, extra={"e": 1}, step=step)
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    with Ranks(1) as alone:
        yield folder, alone.run(save, str(folder))[0]


@pytest.fixture
def place(saved: Found, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to change."""
    place = tmp_path / "checkpoint"
    place.mkdir()
    for file in saved[0].iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def load(place: Path) -> Any:
    return pydist.checkpoint.to_torch(place)


def refuse(place: Path, name: str) -> str:
    with pytest.raises(pydist.CheckpointError, match=re.escape(name)) as caught:
        load(place)
    return str(caught.value)


def test_any_byte_of_the_list_counts(place: Path) -> None:
    file = place / MANIFEST
    content = file.read_bytes()
    generator = random.Random(0)
    for number in range(len(content)):
        other = (content[number] + generator.randrange(1, 256)) % 256
        file.write_bytes(content[:number] + bytes([other]) + content[number + 1 :])
        refuse(place, MANIFEST)
    for end in (0, 1, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:end])
        refuse(place, MANIFEST)
    file.write_bytes(content + b" ")
    refuse(place, MANIFEST)
    file.write_bytes(b"[" * 100_000)
    refuse(place, MANIFEST)


def test_the_first_format_is_read(saved: Found, place: Path) -> None:
    write_as_before(place)
    for name, value in load(place)["model"].items():
        torch.testing.assert_close(value, saved[1][name], rtol=0, atol=0)
    file = place / MANIFEST
    content = file.read_text()
    sha256 = read_manifest(place)[METADATA].sha256
    file.write_text(content.replace(sha256, "0" * 64))
    refuse(place, MANIFEST)


@pytest.mark.parametrize(
    "name", ["/dev/zero", "../outside", "within/inside", "", ".", "..", "a\0b", "/etc/passwd"]
)
def test_a_name_that_leads_elsewhere(place: Path, name: str) -> None:
    (place.parent / "outside").write_bytes(b"x")
    files = read_manifest(place)
    sign(place, {**files, name: FileSum(1, "0" * 64)})
    refuse(place, MANIFEST)


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder"])
def test_a_file_that_is_none(place: Path, kind: str) -> None:
    files = read_manifest(place)
    file = place / "__0_0.distcp"
    moved = place.parent / "moved"
    file.rename(moved)
    if kind == "link":
        file.symlink_to(moved)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    sign(place, files)
    assert "no plain file" in refuse(place, file.name)


class Calls:
    """Its pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._what = (function, arguments)

    def __reduce__(self) -> Any:
        return self._what


def forge(place: Path, metadata: Any) -> None:
    content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (place / METADATA).write_bytes(content)
    sign(place)


def test_metadata_that_calls(place: Path) -> None:
    trace = place.parent / "trace"
    for function, *arguments in (
        (os.mkdir, trace),
        (os.system, f"touch {trace}"),
        (getattr, torch.Size, "numel"),
        (eval, f"open({str(trace)!r}, 'w')"),
        (torch.load, trace),
        (torch.hub.load, str(trace), "f"),
        (io.open, str(trace), "w"),
    ):
        forge(place, Calls(function, *arguments))
        assert "asks for" in refuse(place, METADATA)
        assert not trace.exists()
    assert "asks for" in refuse_bytes(place, b"ctorch\nload\n.")
    assert "asks for" in refuse_bytes(place, b"ctorch\nSize.__new__\n.")


def refuse_bytes(place: Path, content: bytes) -> str:
    forge(place, content)
    return refuse(place, METADATA)


@pytest.mark.parametrize("kind", ["plain", "pipe", "link"])
def test_metadata_that_is_not_listed(place: Path, kind: str) -> None:
    """Nobody would compare it with anything; a pipe lets who opens it wait for ever."""
    file = place / METADATA
    files = read_manifest(place)
    del files[METADATA]
    if kind != "plain":
        file.rename(place.parent / "moved")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(place.parent / "moved")
    sign(place, files)
    assert f"does not list {METADATA}" in refuse(place, MANIFEST)


READS_WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
import psutil
import pydist
from pydist.checkpoint.dcp_metadata import read_metadata

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
# The highest that was is forgotten: a process takes it over from the one that starts it.
Path("/proc/self/clear_refs").write_text("5")
before = psutil.Process().memory_info().rss
try:
    read_metadata(Path(sys.argv[1]), set())
except pydist.CheckpointError as error:
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    print(highest // 1024 - before // 2**20, type(error.__cause__).__name__, error)
"""
LONG = (6 << 30).to_bytes(8, "little")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"Nr" + (250_000_000).to_bytes(4, "little") + b".", id="index of the memo"),
        pytest.param(b"})" + b"\x85" * 2_000_000 + b"Ns.", id="deep key"),
        *(
            pytest.param(content, id=name, marks=pytest.mark.thorough)
            for name, content in {
                "bytes": b"\x8e" + LONG + b".",
                "frame": b"\x95" + LONG + b".",
                "index of the memo as text": b"Np250000000\n.",
                "text": b"\x8d" + LONG + b".",
                "bytearray": b"\x96" + LONG + b".",
                "deep keys": b"}()" + b"\x85" * 2_000_000 + b"Nu.",
                "deep keys of a list": b"()" + b"\x85" * 2_000_000 + b"Nd.",
                "deep item of a frozen set": b"()" + b"\x85" * 2_000_000 + b"\x91.",
                "deep item of a set": b"\x8f()" + b"\x85" * 2_000_000 + b"\x90.",
            }.items()
        ),
    ],
)
def test_metadata_that_takes_more_than_there_is(place: Path, content: bytes) -> None:
    """In a process of its own, which must neither grow nor end."""
    (place / METADATA).write_bytes(b"\x80\x04" + content)
    done = run_command([sys.executable, "-c", READS_WITH_LITTLE_MEMORY, str(place)], timeout=50)
    grown, cause, said = done.stdout.split(" ", 2)
    assert str(place / METADATA) in said
    assert cause != "MemoryError"
    assert int(grown) < 1000, "MiB"


def test_metadata_that_changes_classes(place: Path) -> None:
    """It would by the state of a class, or of what a class is made of."""
    for name in (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch\nSize\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch\nfloat32\n",
    ):
        for state in (b"(dVstate\nI5\ns", b"N(dVstate\nI5\ns\x86"):
            refuse_bytes(place, name + state + b"b.")
    load_again = place.parent / "again"
    with Ranks(1) as alone:
        alone.run(save, str(load_again))
    load(load_again)


def metadata_of(place: Path) -> Metadata:
    found: Metadata = dcp.FileSystemReader(place).read_metadata()
    return found


def test_it_reads_what_torch_reads(place: Path) -> None:
    theirs, ours = metadata_of(place), read_metadata(place, read_manifest(place))
    assert theirs.state_dict_metadata == ours.state_dict_metadata
    assert theirs.storage_data is not None
    assert ours.storage_data is not None
    assert theirs.storage_data.keys() == ours.storage_data.keys()
    for index, expected in theirs.storage_data.items():
        found = ours.storage_data[index]
        assert (found.relative_path, found.offset, found.length) == (
            expected.relative_path,
            expected.offset,
            expected.length,
        )


def test_it_reads_what_other_versions_of_python_write(place: Path) -> None:
    def by_name(member: Any, _protocol: int) -> Any:
        return getattr, (type(member), member.name)

    metadata = metadata_of(place)
    with mock.patch.object(dcp.metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name):
        forge(place, metadata)
    assert b"getattr" in (place / METADATA).read_bytes()
    load(place)


def forgeries(metadata: Metadata) -> Iterator[str]:
    """Changes it, a thing at a time, to what torch's writer never writes."""
    known: dict[str, Any] = metadata.state_dict_metadata
    places: dict[MetadataIndex, Any] = metadata.storage_data  # type: ignore[assignment]
    name, tensor = next(
        (name, of) for name, of in known.items() if isinstance(of, TensorStorageMetadata)
    )
    index = MetadataIndex(name, tensor.chunks[0].offsets)
    for path in ("/dev/zero", "../moved", "manifest.json", "__1_0.distcp", ""):
        before, places[index].relative_path = places[index].relative_path, path
        yield f"{path!r}, which is none"
        places[index].relative_path = before
    for field in ("offset", "length"):
        before = getattr(places[index], field)
        for value in (-1, "1", 1.0, None, True):
            setattr(places[index], field, value)
            yield "it has"
        setattr(places[index], field, before)
    places[index].transform_descriptors = ["zstd"]
    yield "transformed"
    places[index].transform_descriptors = None
    chunk = tensor.chunks[0]
    for offsets, sizes in (((9, 9), chunk.sizes), (chunk.offsets, (1 << 40,)), ((), ())):
        tensor.chunks[0] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        yield "a piece"
    tensor.chunks[0] = chunk
    known["twin"] = TensorStorageMetadata(tensor.properties, tensor.size, tensor.chunks)
    yield "two entries"
    del known["twin"]
    for value in (None, [], (2, 3), torch.Size([]), torch.Size([1] * 65)):
        before, tensor.size = tensor.size, value
        yield "it has"
        tensor.size = before
    for other in (None, 5, [], "x", Metadata({}, storage_data={})):
        known[name] = other
        yield "it has"
    known[name] = tensor


def test_metadata_that_does_not_fit(place: Path) -> None:
    metadata = metadata_of(place)
    for said in forgeries(metadata):
        forge(place, metadata)
        assert said in refuse(place, METADATA)
    forge(place, metadata)
    load(place)
    for other in (None, 5, {}, [metadata]):
        forge(place, other)
        assert "it has" in refuse(place, METADATA)


def test_metadata_that_lacks_a_tensor_or_a_part_of_one(place: Path) -> None:
    metadata = metadata_of(place)
    known: dict[str, Any] = metadata.state_dict_metadata
    momenta = [name for name in known if name.endswith("momentum_buffer")]
    assert momenta
    for name in momenta:
        tensor = known.pop(name)
        forge(place, metadata)
        assert name in refuse(place, METADATA)
        known[name] = TensorStorageMetadata(tensor.properties, tensor.size, [])
        forge(place, metadata)
        assert f"lacks elements of {name}" in refuse(place, METADATA)
        known[name] = tensor


def test_what_many_names_share_is_made_once(place: Path) -> None:
    metadata = metadata_of(place)
    known = metadata.state_dict_metadata
    entry = next(of for of in known.values() if isinstance(of, TensorStorageMetadata))
    entry.size = torch.Size([1] * 64)
    entry.chunks = [ChunkStorageMetadata(torch.Size([0] * 64), entry.size)] * 10_000
    known.update({f"alias {number}": entry for number in range(1000)})
    forge(place, metadata)
    read = read_metadata(place, read_manifest(place)).state_dict_metadata
    one, other = read["alias 0"], read["alias 999"]
    assert one is other
    assert isinstance(one, TensorStorageMetadata)
    assert one.chunks[0] is one.chunks[-1]


def test_files_that_end_before_what_is_in_them(place: Path) -> None:
    file = place / "__0_0.distcp"
    content = file.read_bytes()
    for end in (0, 100, len(content) // 2, len(content) - 100):
        file.write_bytes(content[:end])
        sign(place)
        refuse(place, str(file))


def test_mutations_of_metadata(place: Path) -> None:
    """They end in an error that names the file, or are read; and nothing else happens."""
    file = place / METADATA
    content = file.read_bytes()
    files = read_manifest(place)
    generator = random.Random(1)
    refused = []
    count = int(os.environ.get("PYDIST_TEST_FUZZ", "1500"))
    for _ in range(count):
        mutated = bytearray(content)
        for _ in range(generator.choice((1, 1, 2, 8))):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        file.write_bytes(mutated)
        try:
            read_metadata(place, files)
        except pydist.CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > count / 2
    assert all(str(file) in said for said in refused)


def test_a_damaged_list_hides_no_later_checkpoint(tmp_path: Path) -> None:
    """Where what is damaged is the order of the checkpoints."""
    with Ranks(1) as alone:
        alone.run(save, str(tmp_path), 1, 2)
    manifest = tmp_path / "step-000002" / MANIFEST
    text = manifest.read_text()
    assert '"sequence": 2' in text
    manifest.write_text(text.replace('"sequence": 2', '"sequence": 0'))
    assert "damaged" in refuse(tmp_path, f"step-000002/{MANIFEST}")
    (tmp_path / "step-000001" / MANIFEST).write_text("")
    manifest.write_text(text)
    load(tmp_path)


def test_files_changed_after_signing(place: Path) -> None:
    for name in (METADATA, "__0_0.distcp"):
        file = place / name
        content = file.read_bytes()
        generator = random.Random(2)
        for number in generator.sample(range(len(content)), 40):
            other = (content[number] + generator.randrange(1, 256)) % 256
            file.write_bytes(content[:number] + bytes([other]) + content[number + 1 :])
            refuse(place, name)
        file.write_bytes(content)
    assert sum_of(place / METADATA) == read_manifest(place)[METADATA]
