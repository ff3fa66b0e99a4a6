"""What is measured: a collective on buffers of one size.

Conventions of nccl-tests. The size is that of the larger of the two buffers, in bytes, rounded down
to a whole number of elements (of blocks, where each rank has one). `algbw` is size over time;
`busbw` is `algbw` times a factor that makes it comparable with the speed of a link, whatever the
number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pydist.errors import InvalidUsage

OPS = ("sum", "prod", "min", "max", "mean")
_OP_ALIASES = {"avg": "mean"}

_FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("int8", "uint8", "int32", "int64", *_FLOATS)
}
# As nccl-tests calls them.
_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
}

# "out" of place: the result lands in another buffer. "in" place: in the one that is sent.
Place = str
OUT_OF_PLACE, IN_PLACE = "out", "in"


@dataclass(frozen=True)
class Collective:
    """What the benchmark needs to know of one."""

    # Bus bandwidth over algorithm bandwidth, for a number of ranks.
    bus_factor: Callable[[int], float]
    # Whether a buffer is one rank's block only; the other holds the blocks of all.
    sends_block: bool = False
    receives_block: bool = False
    has_op: bool = False
    has_root: bool = False
    # Whether both buffers hold a block for each rank.
    exchanges_blocks: bool = False
    places: tuple[Place, ...] = (OUT_OF_PLACE, IN_PLACE)

    @property
    def has_blocks(self) -> bool:
        return self.sends_block or self.receives_block or self.exchanges_blocks


def _none(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(_twice, has_op=True),
    "reduce_scatter": Collective(_others, receives_block=True, has_op=True),
    "all_gather": Collective(_others, sends_block=True),
    # torch's and MPI's have one buffer only.
    "broadcast": Collective(_none, has_root=True, places=(IN_PLACE,)),
    "reduce": Collective(_none, has_op=True, has_root=True),
    "gather": Collective(_others, sends_block=True, has_root=True),
    "scatter": Collective(_others, receives_block=True, has_root=True),
    "all_to_all": Collective(_others, exchanges_blocks=True, places=(OUT_OF_PLACE,)),
    # Every rank sends to the next one and receives from the one before.
    "send_recv": Collective(_none, places=(OUT_OF_PLACE,)),
    "barrier": Collective(_none, places=(OUT_OF_PLACE,)),
}


@dataclass(frozen=True)
class Case:
    """One collective on buffers of one size; the same on every rank."""

    collective: str
    dtype: str
    op: str
    root: int
    # Elements of the larger buffer: a multiple of the ranks where there are blocks. 0 for barrier.
    count: int
    ranks: int
    place: Place

    @property
    def kind(self) -> Collective:
        return COLLECTIVES[self.collective]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.count * self.torch_dtype.itemsize

    @property
    def block(self) -> int:
        """Elements of one rank's block."""
        return self.count // self.ranks

    @property
    def sent(self) -> int:
        """Elements that each rank (or the root) sends."""
        return self.block if self.kind.sends_block else self.count

    @property
    def received(self) -> int:
        """Elements that each rank (or the root) receives."""
        return self.block if self.kind.receives_block else self.count

    @property
    def shown_count(self) -> int:
        """What nccl-tests calls the count: elements of a block, where there are blocks."""
        return self.block if self.kind.has_blocks else self.count

    def algorithm_bandwidth(self, seconds: float) -> float:
        """Bytes per second."""
        return self.size_bytes / seconds

    def bus_bandwidth(self, seconds: float) -> float:
        """Bytes per second."""
        return self.algorithm_bandwidth(seconds) * self.kind.bus_factor(self.ranks)


@dataclass(frozen=True)
class Buffers:
    """The tensors of a case on one rank: parts of two large ones, `send` and `receive`."""

    sent: Tensor
    received: Tensor

    @staticmethod
    def of(case: Case, rank: int, send: Tensor, receive: Tensor) -> "Buffers":
        """Cut from two tensors of bytes, at the same place on every rank.

        In place, the block that belongs to this rank lies within the blocks of all.
        """
        dtype = case.torch_dtype
        whole = (receive if case.kind.sends_block else send)[: case.size_bytes].view(dtype)
        own = whole[rank * case.block : (rank + 1) * case.block]
        if case.place == IN_PLACE:
            sent, received = whole, whole
            if case.kind.sends_block:
                sent = own
            elif case.kind.receives_block:
                received = own
            return Buffers(sent, received)
        item = dtype.itemsize
        return Buffers(
            send[: case.sent * item].view(dtype), receive[: case.received * item].view(dtype)
        )


def _choose(given: str, known: tuple[str, ...], aliases: dict[str, str], flag: str) -> list[str]:
    if given == "all":
        return list(known)
    chosen: dict[str, None] = {}
    for name in filter(None, given.split(",")):
        canonical = aliases.get(name.lower(), name.lower())
        if canonical not in known:
            also = sorted(alias for alias, meant in aliases.items() if meant in known)
            raise InvalidUsage(
                f"{flag} {name}: unknown; use one of {', '.join(known)}"
                + (f" (also {', '.join(also)})" if also else "")
                + ", several with commas between them, or all."
            )
        chosen[canonical] = None
    return list(chosen) or [known[0]]


def cases_of(
    collective: str,
    sizes: list[int],
    ranks: int,
    *,
    dtypes: str = "float32",
    ops: str = "sum",
    roots: str = "0",
) -> list[list[Case]]:
    """The cases of a sweep, in order; those of one size and different places together.

    Args:
        collective: one of COLLECTIVES.
        sizes: in bytes.
        ranks: how many take part.
        dtypes, ops: names with commas between them, or "all".
        roots: a rank, several, or "all".

    Raises:
        InvalidUsage: a name is unknown, an op has no meaning for a dtype, no size holds an element.
    """
    kind = COLLECTIVES[collective]
    chosen_dtypes = _choose(dtypes, tuple(DTYPES), _DTYPE_ALIASES, "-d")
    chosen_ops = _choose(ops, OPS, _OP_ALIASES, "-o") if kind.has_op else ["none"]
    chosen_roots = _roots(roots, ranks) if kind.has_root else [-1]
    if collective == "barrier":
        return [[Case("barrier", "uint8", "none", -1, 0, ranks, OUT_OF_PLACE)]]
    cases = []
    for dtype in chosen_dtypes:
        for op in chosen_ops:
            if op == "mean" and not DTYPES[dtype].is_floating_point:
                if ops == "all" or dtypes == "all":
                    continue
                raise InvalidUsage(f"-o mean -d {dtype}: a mean of integers is not defined.")
            for root in chosen_roots:
                counts = [_count(size, kind, ranks, DTYPES[dtype].itemsize) for size in sizes]
                for count in dict.fromkeys(count for count in counts if count > 0):
                    cases.append(
                        [
                            Case(collective, dtype, op, root, count, ranks, place)
                            for place in kind.places
                        ]
                    )
    if not cases:
        raise InvalidUsage(
            f"none of the sizes ({', '.join(map(str, sizes[:3]))}{', ...' if sizes[3:] else ''}) "
            f"holds an element of {', '.join(chosen_dtypes)} for each of {ranks} ranks; raise -e."
        )
    return cases


def _count(size: int, kind: Collective, ranks: int, item_bytes: int) -> int:
    unit = ranks if kind.has_blocks else 1
    return size // item_bytes // unit * unit


def _roots(given: str, ranks: int) -> list[int]:
    if given == "all":
        return list(range(ranks))
    roots: dict[int, None] = {}
    for text in filter(None, given.split(",")):
        if not text.isdigit() or int(text) >= ranks:
            raise InvalidUsage(f"-r {text}: the root must be a rank from 0 to {ranks - 1}, or all.")
        roots[int(text)] = None
    return list(roots) or [0]
