"""The arguments of torch's DistributedDataParallel: what is refused, and what the others mean."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.bucket_planner import cap_bytes_of
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.several_devices.replicas import CpuReplicas, GpuReplicas, Replicas

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REFUSED = {
    "delay_all_reduce_named_params": (
        "it says when torch averages some parameters, and pydist.DataParallel averages all "
        "parameters of the module as backward completes them: leave it out, with "
        "param_to_hook_all_reduce"
    ),
    "param_to_hook_all_reduce": "leave it out, with delay_all_reduce_named_params",
    "mixed_precision": (
        "compute in 16 bits by torch.autocast, and let gradients travel in 16 bits by compress="
    ),
}


def refuse_unsupported(**arguments: object) -> None:
    """Raises InvalidUsage for what was given and is not supported."""
    for name, value in arguments.items():
        if value is not None:
            raise InvalidUsage(f"pydist.DataParallel does not support {name}: {_REFUSED[name]}")


def warn_of_check_reduction(check_reduction: bool) -> None:
    """As torch does, where it has no effect either."""
    if check_reduction:
        warnings.warn(
            "check_reduction is deprecated, and without effect in torch's DistributedDataParallel "
            "as in pydist.DataParallel, which finds unused parameters always: leave it out",
            FutureWarning,
            stacklevel=4,  # past the constructor, and past what gives it its configuration
        )


def group_of(
    process_group: ProcessGroup | None, device_mesh: DeviceMesh | None
) -> ProcessGroup | None:
    """The ranks to average over; None: all."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise InvalidUsage("pass either process_group or device_mesh, not both")
    if not isinstance(device_mesh, DeviceMesh):
        raise InvalidUsage(
            f"device_mesh is {a_type(device_mesh)}; it must be a DeviceMesh of one "
            "dimension, as torch.distributed.device_mesh.init_device_mesh makes, or None"
        )
    if device_mesh.ndim != 1:
        raise InvalidUsage(
            f"device_mesh has {device_mesh.ndim} dimensions, {device_mesh.mesh_dim_names}; it must "
            'have one: pass the dimension to average over, as in device_mesh["dp"]'
        )
    return device_mesh.get_group()


def caps_of(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[int, ...]:
    """The sizes at which buckets are closed, in bytes, the last for all that follow; empty: none.

    As in torch, the list counts where both are given.
    """
    _require_list("bucket_cap_mb_list", bucket_cap_mb_list, "sizes in MiB")
    if bucket_cap_mb_list:
        caps = [cap_bytes_of(size, "a size in bucket_cap_mb_list") for size in bucket_cap_mb_list]
        return tuple(cap for cap in caps if cap is not None)
    cap = cap_bytes_of(bucket_cap_mb)
    return () if cap is None else (cap,)


def input_device_of(
    module: RankLocal, device_ids: Sequence[int | str | torch.device] | None, output_device: object
) -> torch.device | None:
    """Where forward's arguments are to be; None: where they are.

    Raises:
        InvalidUsage: The module is not there, or outputs were to be elsewhere.
    """
    places = {parameter.device for _, parameter in module.shared_parameters()}
    where = ", ".join(sorted(map(str, places)))
    if not device_ids:
        if output_device:
            raise InvalidUsage(
                f"output_device is {output_device!r} without device_ids: outputs stay where the "
                "module computes them, so leave it out"
            )
        return None
    if len(device_ids) > 1:
        return None  # each replica gets its share where it is
    if all(place.type == "cpu" for place in places):
        raise InvalidUsage(
            f"device_ids is {list(device_ids)}, and the module's parameters are on {where}: pass "
            "device_ids=None for a module on the CPU"
        )
    device = _gpu("device_ids", device_ids[0])
    if device not in places:
        raise InvalidUsage(
            f"device_ids is {list(device_ids)}, and the module's parameters are on {where}: move "
            "the module there, or leave device_ids out"
        )
    if output_device is not None and _gpu("output_device", output_device) != device:
        raise InvalidUsage(
            f"output_device is {output_device!r}, and device_ids is {list(device_ids)}: outputs "
            "stay where the module computes them, so leave output_device out"
        )
    return device


def replicas_of(
    device_ids: Sequence[int | str | torch.device] | None, output_device: object, dim: object
) -> Replicas | None:
    """What runs a module on several devices; None: there is one, or none is named.

    Raises:
        InvalidUsage: The devices are not all GPUs or all the CPU, or one GPU is named twice or is
            not there.
    """
    _require_list("device_ids", device_ids, "one GPU, as in device_ids=[pydist.device()]")
    if not device_ids or len(device_ids) == 1:
        return None
    given = f"device_ids is {list(device_ids)}"
    if not isinstance(dim, int):
        raise InvalidUsage(f"dim is {a_type(dim)}; it must be the number of a dimension")
    devices = [_numbered(_gpu("device_ids", named)) for named in device_ids]
    kinds = {device.type for device in devices}
    if kinds not in ({"cuda"}, {"cpu"}):
        raise InvalidUsage(
            f"{given}, devices of kind {' and '.join(sorted(kinds))}; name GPUs alone, or the CPU "
            'several times, as in ["cpu", "cpu"]'
        )
    onto = devices[0] if output_device is None else _numbered(_gpu("output_device", output_device))
    if kinds == {"cpu"}:
        if onto.type != "cpu":
            raise InvalidUsage(
                f"output_device is {output_device!r}, and {given}: leave output_device out"
            )
        return CpuReplicas(devices, onto, dim)
    if len(set(devices)) < len(devices):
        raise InvalidUsage(f"{given}; a GPU can have one replica alone, so name each once")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if missing := [device for device in devices if device.index >= count]:
            raise InvalidUsage(f"{given}, and {missing[0]} is not there: this process sees {count}")
    if onto not in (*devices, torch.device("cpu")):
        raise InvalidUsage(
            f"output_device is {output_device!r}, and {given}: outputs go to one of these, or to "
            '"cpu"'
        )
    return GpuReplicas(devices, onto, dim)


def _numbered(device: torch.device) -> torch.device:
    """The device with its number, where "cuda" means the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _gpu(argument: str, named: Any) -> torch.device:
    try:
        return torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise InvalidUsage(
            f"{argument} names {named!r}; name a GPU by its number, or as a torch.device: {error}"
        ) from None


def _require_list(argument: str, value: object, of_what: str) -> None:
    if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise InvalidUsage(f"{argument} is {value!r}; it must be a list of {of_what}, or None")
