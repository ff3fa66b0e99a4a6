"""Runs a module on several devices of one process, as torch.nn.DataParallel does.

    batch ──scatter──▶ a share for each device ──a replica each──▶ outputs ──gather──▶ output

Each replica's parameters are differentiable copies of the module's own, so that backward adds up
the gradients of all replicas in these. Autograd adds them before it accumulates: what averages over
ranks sees one gradient for each parameter, once.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pydist._torch import StandIn, runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.parallel.nested_wrappers import parts_by_path
from pydist.parallel.several_devices.shares import Arguments, cut, join
from pydist.parallel.sync_batch_norm import SyncBatchNorm


class Replicas(abc.ABC):
    """Where the replicas of a module run.

    Args:
        devices: The module's own device first; all of one kind.
        output_device: Where outputs go.
        dim: Along which arguments are cut, and outputs joined.
    """

    def __init__(
        self, devices: Sequence[torch.device], output_device: torch.device, dim: int
    ) -> None:
        self.devices = list(devices)
        self.output_device = output_device
        self.dim = dim

    def require_copyable(self, module: nn.Module) -> None:
        """Raises InvalidUsage for a module that can't have replicas on these devices."""
        self._require_on_first(module)
        for path, part in parts_by_path(module):
            where = f"{path} of the module" if path else "the module"
            if isinstance(part, StandIn):
                raise InvalidUsage(
                    f"{where} is a pydist.DataParallel, which can't be copied to several "
                    "device_ids: put its .module there"
                )
            if isinstance(part, (SyncBatchNorm, nn.SyncBatchNorm)):
                raise InvalidUsage(
                    f"{where} is a SyncBatchNorm, whose forward waits for the other ranks, and "
                    "with several device_ids each replica would wait by itself: use "
                    "torch.nn.BatchNorm, or start a process for each device"
                )

    @runs_uncompiled_throughout
    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the module's forward on a share of the arguments on each device.

        Raises:
            InvalidUsage: The module is elsewhere by now, or arguments can't be cut, or outputs
                can't be joined.
        """
        self._require_on_first(module)
        outputs = self._run(module, cut(args, kwargs, self._scatter, self.dim))
        return join(outputs, self._gather, self.dim)

    def _require_on_first(self, module: nn.Module) -> None:
        for named in (module.named_parameters(), module.named_buffers()):
            for name, tensor in named:
                if tensor.device != self.devices[0]:
                    raise InvalidUsage(
                        f"{name} of the module is on {tensor.device}, and the first of device_ids "
                        f"is {self.devices[0]}: move the module there, from where replicas are "
                        "copied to the others"
                    )

    @abc.abstractmethod
    def _scatter(self, tensor: Tensor) -> Sequence[Tensor]: ...

    @abc.abstractmethod
    def _run(self, module: nn.Module, shares: Sequence[Arguments]) -> list[Any]: ...

    @abc.abstractmethod
    def _gather(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def _dim_of(self, tensors: Sequence[Tensor]) -> int:
        return 0 if tensors[0].dim() == 1 else self.dim


class GpuReplicas(Replicas):
    """By the parts of torch.nn.DataParallel: each replica in a thread, on its GPU."""

    def _scatter(self, tensor: Tensor) -> Sequence[Tensor]:
        return nn.parallel.scatter(tensor, self._indices, self.dim)

    def _run(self, module: nn.Module, shares: Sequence[Arguments]) -> list[Any]:
        indices = self._indices[: len(shares)]
        replicas = [module]
        if len(shares) > 1:
            replicas = nn.parallel.replicate(module, indices, detach=not torch.is_grad_enabled())
        # torch calls them, and asks nothing else of a module.
        called: list[Any] = [_UnderAutocast(replica) for replica in replicas]
        return nn.parallel.parallel_apply(
            called,
            [args for args, _ in shares],
            [kwargs for _, kwargs in shares],
            indices,
        )

    def _gather(self, tensors: Sequence[Tensor]) -> Tensor:
        on_cpu = self.output_device.type == "cpu"
        where: Any = "cpu" if on_cpu else self.output_device.index
        joined: Tensor = nn.parallel.gather(tensors, where, self._dim_of(tensors))
        return joined

    @property
    def _indices(self) -> list[Any]:
        return [device.index for device in self.devices]


class _UnderAutocast:
    """A replica under the autocast of the thread that made it.

    torch's `parallel_apply` hands on whether there is one, and not its dtype: bfloat16 would become
    float16 in the threads.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._replica = replica
        self._is_enabled = torch.is_autocast_enabled("cuda")
        self._dtype = torch.get_autocast_dtype("cuda")
        self._keeps_casts = torch.is_autocast_cache_enabled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_enabled:
            return self._replica(*args, **kwargs)
        with torch.autocast("cuda", self._dtype, cache_enabled=self._keeps_casts):
            return self._replica(*args, **kwargs)


class CpuReplicas(Replicas):
    """The same on one CPU, where torch has no such parts: for tests of programs without GPUs."""

    def _scatter(self, tensor: Tensor) -> Sequence[Tensor]:
        return [piece.clone() for piece in tensor.chunk(len(self.devices), self.dim)]

    def _run(self, module: nn.Module, shares: Sequence[Arguments]) -> list[Any]:
        copies = [_copies_of(module) for _ in shares[1:]]
        # One after another, because functional_call puts the copies into the module while it runs.
        # The module itself comes last: what its forward leaves in it is of the first share.
        others = [
            functional_call(module, own, args, kwargs)
            for own, (args, kwargs) in zip(copies, shares[1:], strict=True)
        ]
        args, kwargs = shares[0]
        return [module(*args, **kwargs), *others]

    def _gather(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), self._dim_of(tensors))


def _copies_of(module: nn.Module) -> dict[str, Tensor]:
    copies = {name: parameter.clone() for name, parameter in module.named_parameters()}
    copies |= {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return copies
