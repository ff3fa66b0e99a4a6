"""How ranks join torch's groups on the engine, and what they train there."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pydist import _native


def join(timeout_s: float = 20.0) -> tuple[int, int]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("pydist", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def bridge() -> _native.ProcessGroup:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, _native.ProcessGroup)
    return backend


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch)
    return out.square().mean()
