"""What a `pydist.DataParallel` was told when it was made, without any word with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.job.arguments import flag
from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES
from pydist.parallel.checks.divergence_check import checked_every
from pydist.parallel.like_torch.torch_arguments import caps_of, group_of, replicas_of
from pydist.parallel.several_devices.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """Arguments of the constructor, checked. Copies of a wrapper have the same.

    Attributes:
        device_ids: The GPU to which forward moves its arguments; see `input_device_of`. Several:
            see `replicas`.
        output_device: That GPU again, or None.
        replicas: What runs the module on several devices; None: it runs on one.
        process_group: The ranks to average over; None: all.
        caps_bytes: The sizes at which buckets are closed; empty: chosen by measurements.
        has_list_of_caps: Whether they were given as a list.
        caps_as_given: What the caps were made of, to be compared with other ranks'.
        init_sync: Whether construction copies rank 0's parameters.
        copies_buffers: Whether training copies rank 0's buffers.
        copies_buffers_first: Whether construction with `init_sync` copies them.
        gradients_are_views: Whether the next backward writes into gradients that the program holds.
        reduction: What backward leaves.
        compress: What float32 gradients travel in; None: their own dtype.
        check_every: In every how many steps ranks compare their models; None: never.
        check_finite: Whether gradients that are not finite raise.
        of_torch: Arguments that are only there to be read, as attributes of torch's class.
    """

    device_ids: Sequence[int | str | torch.device] | None
    output_device: object
    replicas: Replicas | None
    process_group: ProcessGroup | None
    caps_bytes: tuple[int, ...]
    has_list_of_caps: bool
    caps_as_given: tuple[str, ...]
    init_sync: bool
    copies_buffers: bool
    copies_buffers_first: bool
    gradients_are_views: bool
    reduction: Literal["mean", "sum"]
    compress: Literal["bf16", "fp16"] | None
    check_every: int | None
    check_finite: bool
    of_torch: dict[str, Any]

    @property
    def graph_cap_bytes(self) -> int:
        """The size at which torch.compile cuts its graphs."""
        return max(self.caps_bytes, default=DEFAULT_CAP_BYTES)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype in which float32 gradients travel, if not their own."""
        return None if self.compress is None else _WIRE_DTYPES[self.compress]

    def facts(self) -> list[str]:
        """What must be the same on all ranks."""
        return [
            *self.caps_as_given,
            f"reduction={self.reduction!r}",
            f"compress={self.compress!r}",
            f"init_sync={self.init_sync}",
            f"synchronized buffers={self.copies_buffers}",
            f"check_every={self.check_every}",
            f"PYDIST_DEBUG={int(_native.read_environment().debug)}",
        ]


def settings_of(
    *,
    device_ids: Sequence[int | str | torch.device] | None,
    output_device: object,
    broadcast_buffers: bool | None,
    init_sync: bool,
    process_group: ProcessGroup | None,
    bucket_cap_mb: float | None,
    gradient_as_bucket_view: bool,
    device_mesh: DeviceMesh | None,
    bucket_cap_mb_list: list[int] | None,
    forward_sync_buffers: bool | None,
    reduction: Literal["mean", "sum"],
    compress: Literal["bf16", "fp16"] | None,
    check_every: int | None,
    check_finite: bool,
    mixed_precision: None,
    dim: int,
    **flags_of_torch: bool,
) -> Settings:
    """Checks the constructor's arguments by themselves, without the module.

    Raises:
        InvalidUsage: One of them is not supported, or of a wrong type.
    """
    for name, value in flags_of_torch.items():
        flag(name, value)
    process_group = group_of(process_group, device_mesh)
    caps_bytes = caps_of(bucket_cap_mb, bucket_cap_mb_list)
    if reduction not in ("mean", "sum"):
        raise InvalidUsage(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if compress is not None and not (isinstance(compress, str) and compress in _WIRE_DTYPES):
        raise InvalidUsage(f"compress is {compress!r}; it must be 'bf16', 'fp16' or None")
    copies_buffers_first = copies_buffers = broadcast_buffers is None or flag(
        "broadcast_buffers", broadcast_buffers
    )
    if forward_sync_buffers is not None:
        # Where only the values at the start are up to the user, torch's first forward would copy
        # the buffers.
        copies_buffers_first = True
        copies_buffers = flag("forward_sync_buffers", forward_sync_buffers)
    return Settings(
        device_ids=device_ids,
        output_device=output_device,
        replicas=replicas_of(device_ids, output_device, dim),
        process_group=process_group,
        caps_bytes=caps_bytes,
        has_list_of_caps=bool(bucket_cap_mb_list),
        caps_as_given=(
            f"bucket_cap_mb={bucket_cap_mb}",
            f"bucket_cap_mb_list={bucket_cap_mb_list}",
        ),
        init_sync=flag("init_sync", init_sync),
        copies_buffers=copies_buffers,
        copies_buffers_first=copies_buffers_first,
        gradients_are_views=flag("gradient_as_bucket_view", gradient_as_bucket_view),
        reduction=reduction,
        compress=compress,
        check_every=checked_every(check_every),
        check_finite=flag("check_finite", check_finite),
        of_torch={
            "dim": dim,
            "mixed_precision": mixed_precision,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            **flags_of_torch,
        },
    )
