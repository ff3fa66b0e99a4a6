"""A stage of a pipeline that torch's tracer has cut, whose replicas average once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydist._torch import traced_stage_class
from pydist.pipelining.stage import ReplicatedStage

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

_Traced: Any = traced_stage_class()


class TracedStage(ReplicatedStage, _Traced):  # type: ignore[misc]
    """What `build_stage` makes: `PipelineStage` says what it does."""


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> TracedStage:
    """torch's function of this name, for a `pydist.DataParallel` around a module of a `Pipe`.

    Takes torch's arguments. All else is as with `PipelineStage`.

    Args:
        stage_module: `pipe.get_stage_module(stage_index)`, in a `pydist.DataParallel` over the
            stage's replicas.
        stage_index: Which stage it is, from 0.
        pipe_info: `pipe.info()`.
        device: Of this rank.
        group: The stages of this replica. Default: all ranks.

    Example:
        >>> pipe = pipeline(module, mb_args=(x,), split_spec=where)  # doctest: +SKIP
        >>> part = pipe.get_stage_module(0)  # doctest: +SKIP
        >>> model = pydist.DataParallel(part, process_group=replicas)  # doctest: +SKIP
        >>> stage = build_stage(model, 0, pipe.info(), device, group=chain)  # doctest: +SKIP
    """
    # The type is that of the other class of stages, which has other arguments.
    traced: Any = TracedStage
    return traced(stage_module, stage_index, pipe_info, device, group)  # type: ignore[no-any-return]
