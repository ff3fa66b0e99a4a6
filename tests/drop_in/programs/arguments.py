"""The arguments of torch's DDP: each has its effect, or is refused."""

from typing import Any

import torch
from harness import Library, Record, program
from nets import batch, mlp
from torch import nn
from torch.nn import functional


def train(lib: Library, record: Record, module: nn.Module, **arguments: Any) -> None:
    model = lib.DataParallel(module.to(lib.device), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def gradients_as_views_of_buckets(lib: Library, record: Record) -> None:
    train(lib, record, mlp(), gradient_as_bucket_view=True)


@program(needs="batched_grad_copy")
def gradients_copied_in_one_go(lib: Library, record: Record) -> None:
    train(lib, record, mlp(), batched_grad_copy=True)


@program()
def devices_that_do_not_matter_on_a_cpu(lib: Library, record: Record) -> None:
    train(lib, record, mlp(), device_ids=None, output_device=None, dim=0)


@program("torch DDP")
def models_that_begin_apart(lib: Library, record: Record) -> None:
    train(lib, record, mlp(), init_sync=False)


@program("torch DDP", needs="forward_sync_buffers")
def buffers_left_alone(lib: Library, record: Record) -> None:
    module = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    train(lib, record, module, forward_sync_buffers=False)


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(inputs)
        return out


@program()
def unused_parameters_that_do_not_travel(lib: Library, record: Record) -> None:
    arguments = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    train(lib, record, OneHead(), **arguments)


@program()
def a_size_for_each_bucket(lib: Library, record: Record) -> None:
    train(lib, record, mlp(), bucket_cap_mb_list=[1, 2])


@program(
    without_ddp="torch's DDP does not wait for what it delays",
    refused="delay_all_reduce_named_params",
)
def gradients_that_travel_later(lib: Library, record: Record) -> None:
    module = mlp()
    late = [("2.weight", module[2].weight)]
    first = module[0].weight
    train(lib, record, module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=first)


@program()
def a_mesh_of_devices(lib: Library, record: Record) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (lib.world_size,))
    train(lib, record, mlp(), device_mesh=mesh)
