"""`pydist.plan`: the bytes that training takes on each rank, before anything is allocated.

Arithmetic on the shapes of parameters, which follows how memory is laid out:

- `pydist.DataParallel` has a slot for each gradient, from a multiple of 64 bytes on
  (csrc/reducer/gradients/gradient_arena.cc); buckets are parts of that memory.
- `pydist.ShardedOptimizer` has parameters and gradients in buckets, each from a multiple of 128
  bytes on; a bucket is cut into equal shards that end at such multiples
  (csrc/bucketing/shard_layout.h). In stage 2 only shards of gradients stay. Up to three buckets are
  on their way at a time, in as many buffers that buckets take in turns: each is as large as the
  largest of every third bucket.

What an optimizer keeps, and what its step makes meanwhile, is found by steps of it on a few
elements (pydist/planning/step_memory.py).
"""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.bucket_planner import (
    PlannedParameter,
    cap_bytes_of,
    plan_buckets,
    typical_cap_bytes,
)
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.trained_parameters import ids_of_sparse
from pydist.parallel.wrapper import DataParallel
from pydist.planning.activation_memory import saved_activation_bytes
from pydist.planning.memory_table import MemoryPlan, RankMemory
from pydist.planning.offload_estimate import host_memory, step_bytes
from pydist.planning.step_memory import StepMemory, step_memory, temporaries
from pydist.sharding.offload.requirements import require_offload, require_offloadable_dtype
from pydist.sharding.step.element_wise import require_element_wise, require_plain_options
from pydist.sharding.step.fused_step import FUSED_CLASSES

_SLOT_ALIGNMENT_BYTES = 64
_SHARD_ALIGNMENT_BYTES = 128
# Of buckets on their way in stage 2.
_BERTHS = 3

_SHORT = (torch.float16, torch.bfloat16)
_MASTER_BYTES = 4
# Before its step, a float32 copy is compared with the parameter: another one, and truth values.
_COMPARISON_BYTES = _MASTER_BYTES + 1


def plan(
    model: nn.Module,
    ranks: int,
    *,
    optimizer: type[Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype | None = None,
    master_weights: bool | Literal["auto"] = "auto",
    share_parameters: bool = False,
    offload: Literal["cpu"] | None = None,
    delayed: bool = False,
    ranks_per_host: int | None = None,
    bucket_cap_mb: float | None = None,
    sample: Any = None,
    **options: Any,
) -> MemoryPlan:
    """Predicts the bytes that training takes on each rank, term by term. Talks to nobody.

    Args:
        model: On any device; on `torch.device("meta")` it takes no memory itself. Its values are
            never read.
        ranks: That share the optimizer's state.
        optimizer: The class, element-wise.
        dtype: That its floating-point parameters, buffers and `sample` would have; default: those
            they have.
        master_weights: Whether float32 copies of float16 and bfloat16 parameters are kept and
            updated; "auto": yes. In all three columns, so that they compare.
        share_parameters: Whether the sharded optimizer keeps one copy of the parameters a host; a
            rank's part of it counts.
        offload: As for `pydist.ShardedOptimizer`: "cpu" puts the sharded optimizer's state on the
            host, and `host` of the plan tells what it takes there.
        delayed: As there.
        ranks_per_host: For `share_parameters`; default: all.
        bucket_cap_mb: As for pydist.DataParallel. Buffers of stage 2 depend on it, and what the
            step of a sharded optimizer makes.
        sample: Input of one forward: a tensor, a tuple of arguments, or a dictionary of keywords.
            Its values are not read. Without it activations are not predicted.
        **options: Of the optimizer's class, `foreach` and `fused` too. Without either, its step is
            that for the model's device: on GPUs torch's classes take `foreach=True`, elsewhere
            (and on "meta") they update one tensor after the other.

    Returns:
        Bytes with DataParallel and with a sharded optimizer in stages 1 and 2.

    Raises:
        InvalidUsage: An argument makes no sense, a parameter or buffer has no shape yet, or the
            optimizer is not element-wise, or can't step.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1024, 1024)
        >>> pydist.plan(model, ranks=8, dtype=torch.bfloat16).stage1.total
        5772808
    """
    if not isinstance(model, nn.Module):
        raise InvalidUsage(
            f"plan: model is {a_type(model)}; it must be a torch.nn.Module, which "
            'torch.device("meta") makes without memory (`pydist plan` takes the name of a file)'
        )
    for name, value in (("ranks", ranks), ("ranks_per_host", ranks_per_host)):
        is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not (is_count or (value is None and name == "ranks_per_host")):
            raise InvalidUsage(f"plan: {name} is {value!r}; it must be a whole number, such as 8")
    if ranks < 1 or (ranks_per_host is not None and not 1 <= ranks_per_host <= ranks):
        raise InvalidUsage(
            f"plan: ranks={ranks}, ranks_per_host={ranks_per_host}: there is at least one rank, "
            "and a host has from one to all of them"
        )
    if master_weights not in (True, False, "auto"):
        raise InvalidUsage(f"master_weights is {master_weights!r}; it must be a bool or 'auto'")
    cap_bytes = cap_bytes_of(bucket_cap_mb)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidUsage(
            f"dtype is {dtype!r}; it must be a floating-point type of torch's, such as "
            "torch.bfloat16"
        )
    require_element_wise(optimizer, options)
    require_plain_options(options)
    require_offload(offload, delayed, optimizer, is_one_copy=share_parameters)
    module = model.module if isinstance(model, DataParallel) else model
    named = list(module.named_parameters())
    for kind, tensors in (("parameter", named), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if nn.parameter.is_lazy(tensor):
                raise InvalidUsage(
                    f"{kind} {name} has no shape yet: run one forward before planning"
                )
    sparse = ids_of_sparse(module)
    has_choice = _has_choice(optimizer, options)
    if has_choice and any(p.device.type == "cuda" for _, p in named):
        options["foreach"] = True
        has_choice = False
    trained = [
        _Trained.of(name, p, _dtype_of(p, dtype), optimizer, options, master_weights is not False)
        for name, p in named
        if p.requires_grad and id(p) not in sparse
    ]
    parameters = sum(_bytes(p, dtype) for _, p in named)
    buffers = sum(_bytes(buffer, dtype) for buffer in module.buffers())
    activations = None if sample is None else saved_activation_bytes(module, sample, dtype)
    handover = max((t.count * t.dtype.itemsize for t in trained), default=0)
    whole = RankMemory(
        parameters=parameters,
        buffers=buffers,
        gradients=sum(_up(t.count * t.dtype.itemsize, _SLOT_ALIGNMENT_BYTES) for t in trained),
        state=sum(t.state_bytes(t.count, segments=1) for t in trained),
        master=sum(t.master_bytes(t.count) for t in trained),
        buckets=0,
        activations=activations,
        handover=handover,
        step=_step_bytes([(t, t.count) for t in trained]),
    )
    # pydist's kernels read gradients in their own dtype.
    has_kernel = bool(options.get("fused")) and optimizer in FUSED_CLASSES
    if offload is not None:
        has_kernel = True
        for name, p in named:
            if p.requires_grad:
                has_masters = master_weights is not False
                require_offloadable_dtype(name, _dtype_of(p, dtype), has_masters)
    alone = {name for name, _ in RankLocal(module).parameters()}
    shared = [t for t in trained if t.name not in alone]
    total_bytes = sum(_sizes(shared))
    cap_bytes = cap_bytes or typical_cap_bytes(total_bytes)
    sharded = _Sharded.of(shared, ranks, cap_bytes, has_kernel)
    # What each rank has alone is updated there, in one bucket for each type.
    own = [t for t in trained if t.name in alone]
    owned = _Sharded.of(own, 1, sys.maxsize, has_kernel)
    frozen = parameters - sum(_sizes(shared))
    copies = (ranks_per_host or ranks) if share_parameters else 1
    state, master = sharded.state + owned.state, sharded.master + owned.master
    step, host = max(sharded.step, owned.step), None
    if offload is not None:
        host = host_memory(sharded.shards + owned.whole, state + master, delayed)
        step, state, master = step_bytes(max(sharded.largest // ranks, owned.largest)), 0, 0
    stage1, stage2 = (
        RankMemory(
            parameters=frozen + -(-sharded.whole // copies),
            buffers=buffers,
            gradients=gradients + sum(_sizes(own)),
            state=state,
            master=master,
            buckets=buckets,
            activations=activations,
            handover=on_their_way,
            step=step,
        )
        for gradients, buckets, on_their_way in (
            (sharded.whole, 0, handover),
            (sharded.shards, sharded.berths, max([sharded.largest, *_sizes(own)])),
        )
    )
    notes = []
    if has_choice:
        notes.append(
            "the step updates one tensor after the other, as it does on the CPU; on GPUs torch "
            "takes foreach=True, which makes more at a time: give the option for a plan of that"
        )
    if sparse:
        notes.append(
            f"{len(sparse)} embeddings with sparse gradients: neither those nor their optimizer's "
            "state are counted, and a sharded optimizer refuses them"
        )
    if alone:
        notes.append(
            f"{len(alone)} parameters are each rank's own (the module's list of ignored ones), so "
            "they are neither averaged nor sharded; they are counted as this module has them"
        )
    if sample is None:
        notes.append("activations are predicted from a sample of the input only; none was given")
    return MemoryPlan(
        whole,
        stage1,
        stage2,
        elements=sum(p.numel() for _, p in named),
        trained=sum(p.numel() for _, p in named if p.requires_grad),
        ranks=ranks,
        optimizer=optimizer.__name__,
        notes=tuple(notes),
        host=host,
    )


def _sizes(trained: Sequence[_Trained]) -> list[int]:
    return [t.count * t.dtype.itemsize for t in trained]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * _dtype_of(tensor, dtype).itemsize


@dataclass(frozen=True)
class _Trained:
    """A trained parameter: `count` elements of the real `dtype`, `factor` for each of its own."""

    name: str
    count: int
    dtype: torch.dtype
    factor: int
    has_master: bool
    memory: StepMemory

    @staticmethod
    def of(
        name: str,
        parameter: Tensor,
        dtype: torch.dtype,
        optimizer: type[Optimizer],
        options: Mapping[str, Any],
        with_masters: bool,
    ) -> _Trained:
        has_master = with_masters and dtype in _SHORT
        updated = torch.float32 if has_master else dtype
        factor = 2 if dtype.is_complex else 1
        memory = step_memory(optimizer, updated, options)
        return _Trained(
            name, parameter.numel() * factor, dtype.to_real(), factor, has_master, memory
        )

    def state_bytes(self, count: int, segments: int) -> int:
        return count // self.factor * self.memory.per_element + segments * self.memory.per_tensor

    def master_bytes(self, count: int) -> int:
        return count * _MASTER_BYTES if self.has_master else 0


def _step_bytes(updated: Sequence[tuple[_Trained, int]]) -> int:
    """The bytes that one step of the class takes for its duration.

    Args:
        updated: What it updates, in its order: the parameter, and how many of its real elements.
    """
    gradients = sum(trained.master_bytes(count) for trained, count in updated)
    return gradients + temporaries((t.memory, count // t.factor) for t, count in updated)


def _sharded_step_bytes(updated: Sequence[tuple[_Trained, int]]) -> int:
    """The bytes that the step of one bucket takes on a rank for its duration.

    Args:
        updated: The rank's segments, as for `_step_bytes`.
    """
    most = gradients = 0
    for trained, count in updated:
        if trained.has_master:
            most = max(most, gradients + count * _COMPARISON_BYTES)
        gradients += trained.master_bytes(count)
    return max(most, _step_bytes(updated))


def _has_choice(optimizer: type[Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether the class looks at the device to choose between its ways to step."""
    if options.get("foreach") is not None or options.get("fused") is not None:
        return False
    known = inspect.signature(optimizer).parameters.get("foreach")
    return known is not None and known.default is None


@dataclass(frozen=True)
class _Sharded:
    """Bytes of buckets that are cut into shards.

    Attributes:
        whole: Of all buckets.
        shards: Of one rank's shards.
        largest: Of the largest bucket.
        berths: Of the buckets that are on their way in stage 2.
        step: What a step makes meanwhile, on the rank that has the most. It goes from bucket to
            bucket.
        state: Of the optimizer on the rank that has the most.
        master: Likewise.
    """

    whole: int
    shards: int
    largest: int
    berths: int
    step: int
    state: int
    master: int

    @staticmethod
    def of(trained: Sequence[_Trained], ranks: int, cap_bytes: int, has_kernel: bool) -> _Sharded:
        blocks = {t: number for number, t in enumerate(dict.fromkeys(t.dtype for t in trained))}
        planned = [
            PlannedParameter(index, t.name, t.count * t.dtype.itemsize, blocks[t.dtype], True)
            for index, t in reversed(list(enumerate(trained)))
        ]
        whole = shards = step = 0
        berths: dict[torch.dtype, list[int]] = {}
        state, master = [0] * ranks, [0] * ranks
        for bucket in plan_buckets(planned, cap_bytes):
            members = [trained[index] for index in bucket]
            dtype = members[0].dtype
            shard, segments = shard_counts([t.count for t in members], dtype.itemsize, ranks)
            whole += shard * ranks * dtype.itemsize
            shards += shard * dtype.itemsize
            berths.setdefault(dtype, []).append(shard * ranks * dtype.itemsize)
            updated: list[list[tuple[_Trained, int]]] = [[] for _ in range(ranks)]
            for member, rank, count in segments:
                state[rank] += members[member].state_bytes(count, segments=1)
                master[rank] += members[member].master_bytes(count)
                updated[rank].append((members[member], count))
            if not has_kernel:
                step = max(step, *(_sharded_step_bytes(own) for own in updated))
        most = max(range(ranks), key=lambda rank: state[rank] + master[rank])
        return _Sharded(
            whole,
            shards,
            max((size for sizes in berths.values() for size in sizes), default=0),
            sum(
                max(sizes[turn::_BERTHS], default=0)
                for sizes in berths.values()
                for turn in range(_BERTHS)
            ),
            step,
            state[most],
            master[most],
        )


def shard_counts(
    counts: Iterable[int], element_bytes: int, ranks: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """How a bucket is cut: see csrc/bucketing/shard_layout.h.

    Args:
        counts: Elements of each slot.
        element_bytes: Of each element.
        ranks: That get a shard.

    Returns:
        Elements of a shard; and slot, rank and elements of each segment.
    """
    alignment = _SHARD_ALIGNMENT_BYTES // element_bytes
    begins = []
    end = 0
    sizes = list(counts)
    for count in sizes:
        begins.append(end)
        end += _up(count, alignment)
    shard = _up(-(-end // ranks), alignment)
    segments = []
    for slot, (begin, count) in enumerate(zip(begins, sizes, strict=True)):
        place = begin
        while place < begin + count:
            rank = place // shard
            stop = min(begin + count, (rank + 1) * shard)
            segments.append((slot, rank, stop - place))
            place = stop
    return shard, segments
