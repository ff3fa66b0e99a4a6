"""What programs for torch's DistributedDataParallel read, set and call on a wrapped model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pydist._torch import WrapperStandIn, ignored_names
from pydist.errors import InvalidUsage
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _as_torch_has_it(device: torch.device) -> int | torch.device:
    """A GPU's number, and other devices as they are."""
    return device.index if device.type == "cuda" else device


class TorchIdioms(WrapperState, WrapperStandIn):
    """The part of `pydist.DataParallel` that is there for such programs alone."""

    if TYPE_CHECKING:  # another part has it

        def register_comm_hook(self, state: object, hook: Any) -> None: ...

    def _take_torch_attributes(
        self,
        input_device: torch.device | None,
        process_group: ProcessGroup | None,
        **arguments: object,
    ) -> None:
        """Has the attributes of torch's class, but for those that the module has by the same name.

        Args:
            input_device: To which forward moves its arguments.
            process_group: As it was given, or of the mesh that was given.
            **arguments: Of the constructor, which torch's class has as attributes.
        """
        devices = [] if input_device is None else [input_device]
        onto = input_device
        if self._settings.replicas is not None:
            devices, onto = self._settings.replicas.devices, self._settings.replicas.output_device
        attributes = {
            **arguments,
            "device": self._local.shared_parameters()[0][1].device,
            "device_ids": [_as_torch_has_it(device) for device in devices] or None,
            "output_device": None if onto is None else _as_torch_has_it(onto),
            "process_group": dist.group.WORLD if process_group is None else process_group,
            "parameters_to_ignore": set(ignored_names(self.module)),
        }
        self._torch_attributes = {
            name: value for name, value in attributes.items() if not hasattr(self.module, name)
        }
        self.__dict__.update(self._torch_attributes)

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether rank 0's buffers are copied to all ranks while training. May be switched off."""
        if not self.has_joined:
            return self._settings.copies_buffers
        return self._buffer_sync is not None and self._buffer_sync.is_enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        if not self.has_joined:
            self._settings = dataclasses.replace(self._settings, copies_buffers=bool(value))
        elif self._buffer_sync is not None:
            self._buffer_sync.is_enabled = bool(value)
        elif value:
            raise InvalidUsage(
                "the pydist.DataParallel was made without copying buffers, which can't be switched "
                "on later: pass forward_sync_buffers=True when wrapping the module"
            )

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name for `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_forward_param_sync(self) -> bool:
        """torch's note on whether the next forward copies buffers; here it never does."""
        return True

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        if not value:
            raise InvalidUsage(
                "require_forward_param_sync=False would leave out one forward's copy of buffers in "
                "torch; pydist.DataParallel copies them at the end of backward: set "
                "forward_sync_buffers, before that backward and on all ranks"
            )

    def will_sync_module_buffers(self) -> bool:
        """Whether buffers of rank 0 are copied to the others, if there are any."""
        return self.forward_sync_buffers and bool(self._local.shared_buffers())

    def _take_static_graph(self) -> None:
        """Accepted for compatibility: nothing is assumed about the graph."""
        if "static_graph" in self._torch_attributes:
            self.__dict__["static_graph"] = True

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuses `torch.distributed.algorithms.Join`, which needs a collective in every forward.

        Raises:
            InvalidUsage: Always.
        """
        raise InvalidUsage(
            "torch.distributed.algorithms.Join can't join a pydist.DataParallel, whose forward "
            "talks to nobody: put the loop into `with model.join():`"
        )

    def _take_builtin_hook(self, kind: Any) -> None:
        """Registers the hook of Python that does what one of torch's C++ hooks does."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        kinds = torch.distributed.BuiltinCommHookType
        hooks = {
            kinds.ALLREDUCE: default_hooks.allreduce_hook,
            kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        group = self._torch_attributes.get("process_group", dist.group.WORLD)
        self.register_comm_hook(group, hooks[kind])

    def _refuse_fused_optimizer(self) -> None:
        """Refuses to step an optimizer within backward.

        Raises:
            InvalidUsage: Always.
        """
        raise InvalidUsage(
            "_register_fused_optim() steps an optimizer bucket by bucket within backward, and the "
            "averages of pydist.DataParallel are there at its end: call optimizer.step() after it, "
            "with pydist.ShardedOptimizer(model, torch.optim.AdamW, fused=True) if time or memory "
            "is short"
        )

    def _logging_data(self) -> dict[str, Any]:
        """What is known here of torch's logging data, under torch's names."""
        reducer = self._reducer
        parameters = [p for _, p in self._local.shared_parameters() if p.requires_grad]
        is_simple = (bool, int, str)
        return {
            "module_name": type(self.module).__name__,
            "backend_name": self._communicator.backend,
            "rank": self._communicator.rank,
            "world_size": self._communicator.size,
            "iteration": reducer.stats.rounds,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
            "bucket_sizes": ", ".join(str(size) for _, size, _ in reducer.buckets),
            "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
            "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in self.modules())),
            "broadcast_buffers": int(self.forward_sync_buffers),
            # Nothing is assumed about the graph, so there is nothing that it could violate.
            "can_set_static_graph": 1,
            **{k: v for k, v in self._torch_attributes.items() if isinstance(v, is_simple)},
        }
