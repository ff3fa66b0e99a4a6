"""Averages the gradients of a module over the ranks while backward still runs.

What happens during backward is C++: csrc/reducer/reducer.h.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pydist import _native
from pydist.gradient_arena import GradientArena

if TYPE_CHECKING:
    from pydist.buffer_sync import BufferSync

CommunicationStats = _native.ReducerStats


def make_reducer(
    communicator: _native.Communicator,
    parameters: Sequence[tuple[str, nn.Parameter]],
    buffers: BufferSync | None,
    bucket_cap_bytes: int,
    sparse: Container[str] = (),
) -> _native.Reducer:
    """Lays out the gradients of a module and hooks its parameters. All ranks call it together.

    Args:
        communicator: The ranks to average over; used by nobody else.
        parameters: Names and parameters that require gradients, in the order of registration.
        buffers: What copies the buffers of rank 0, if anything.
        bucket_cap_bytes: A bucket is closed once it holds at least this much.
        sparse: Names of the parameters whose gradients are sparse.
    """
    arena = GradientArena(communicator, parameters, bucket_cap_bytes, sparse)
    return _native.Reducer(
        communicator,
        [(slot.name, slot.parameter, slot.view) for slot in arena.slots],
        [
            (bucket.label, bucket.memory, [slot.index for slot in bucket.slots])
            for bucket in arena.buckets
        ],
        arena.tail,
        *((buffers.memory, buffers.pack, buffers.unpack) if buffers is not None else ()),
    )


def names_of_sparse(module: nn.Module) -> set[str]:
    """The parameters of a module whose gradients autograd makes sparse."""
    weights = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in weights}


def outputs_with_graph(outputs: Any) -> Iterator[Tensor]:
    """Finds the tensors in the outputs of a forward that a backward can start from.

    Args:
        outputs: Tensors in any nesting of lists, tuples, mappings and dataclasses.
    """
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from outputs_with_graph(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from outputs_with_graph(value)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from outputs_with_graph(getattr(outputs, name, None))
