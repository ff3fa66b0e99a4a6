"""Makes what averages the gradients of a module while backward still runs.

What happens during backward is C++: csrc/reducer/reducer.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.parallel.bucket_planner import PlannedParameter

if TYPE_CHECKING:
    from pydist.parallel.buffers.buffer_sync import BufferSync
    from pydist.parallel.rank_local import RankLocal

CommunicationStats = _native.ReducerStats
BucketStats = _native.BucketStats

# Names, parameters, and whether their gradients are sparse.
Trained = list[tuple[str, nn.Parameter, bool]]

# Plans buckets: takes the parameters in the order in which their gradients are expected, the
# seconds that the smallest all-reduce takes, and the seconds for each byte beyond that. Returns the
# buckets, each a list of indices.
Planner = Callable[[Sequence[PlannedParameter], float, float], list[list[int]]]

# Bytes. A smaller gradient is still in the caches when it is copied to where it travels from, which
# takes less than to foresee where autograd will make it.
LEAST_MADE_IN_PLACE = 64 << 10


def make_reducer(
    communicator: _native.Communicator,
    trained: Trained,
    planner: Planner,
    buffers: BufferSync | None,
    *,
    sums: bool,
    wire_dtype: torch.dtype | None,
    measures_link: bool,
    gradients_are_views: bool,
    rank: int,
) -> _native.Reducer:
    """Lays out the gradients of a module and hooks its parameters. All ranks call it together.

    Args:
        communicator: The ranks to average over; used by nobody else.
        trained: The parameters that require gradients, in the order of registration. The reducer's
            own list, to which `add` appends.
        planner: Cuts them into buckets; called on rank 0.
        buffers: What copies the buffers between ranks, if anything.
        sums: Whether gradients are summed instead of averaged.
        wire_dtype: The 16-bit dtype in which float32 gradients travel, if not their own.
        measures_link: Whether `planner` wants to know how fast the ranks are connected.
        gradients_are_views: Whether the next step writes into gradients that the program holds.
        rank: This process's rank in the job, for traces.
    """

    def plan(
        order: list[int],
        regular: list[int],
        blocks: list[int],
        latency_s: float,
        seconds_per_byte: float,
    ) -> list[list[int]]:
        is_regular = set(regular)
        parameters = [
            PlannedParameter(
                index,
                trained[index][0],
                trained[index][1].numel() * trained[index][1].element_size(),
                blocks[index],
                index in is_regular,
            )
            for index in order
        ]
        return planner(parameters, latency_s, seconds_per_byte)

    return _native.Reducer(
        communicator,
        list(trained),
        plan,
        sums,
        wire_dtype,
        measures_link,
        gradients_are_views,
        LEAST_MADE_IN_PLACE,
        rank,
        buffers,
    )


def require_reducible(
    communicator: _native.Communicator,
    module: RankLocal,
    reduction: Literal["mean", "sum"],
    wire_dtype: torch.dtype | None,
) -> None:
    """Raises InvalidUsage, on all ranks, where the group can't reduce gradients on the GPU.

    In a backward it would come while other ranks are in the middle of theirs.
    """
    trained = [p for _, p in module.shared_parameters() if p.requires_grad]
    on_gpu = [p for p in trained if p.device.type == "cuda"]
    for dtype in dict.fromkeys(p.dtype for p in on_gpu):
        if why := communicator.why_unsupported("all_reduce", reduction, dtype):
            raise InvalidUsage(f"pydist.DataParallel: {why.removesuffix('.')}.")
    narrowed = next((p for p in on_gpu if wire_dtype and p.dtype == torch.float32), None)
    if narrowed is not None and not communicator.capabilities()["wire_dtypes"]:
        nothing = narrowed.new_empty(0)
        # Refused, with the reason.
        communicator.all_reduce(nothing, nothing, reduction, wire_dtype=wire_dtype)


def outputs_with_graph(outputs: Any, within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Finds the tensors in the outputs of a forward that a backward can start from.

    Args:
        outputs: Tensors in any nesting of lists, tuples, mappings and dataclasses.
        within: The ids of what they are part of, which may be part of itself.
    """
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            yield outputs
        return
    parts: Iterable[Any]
    if isinstance(outputs, dict):
        parts = outputs.values()
    elif isinstance(outputs, (list, tuple)):
        parts = outputs
    elif hasattr(outputs, "__dataclass_fields__"):
        parts = (getattr(outputs, name, None) for name in outputs.__dataclass_fields__)
    else:
        return
    if id(outputs) not in within:
        for part in parts:
            yield from outputs_with_graph(part, (*within, id(outputs)))
