"""Every argument and attribute of torch's DistributedDataParallel is honoured, or refused."""

import copy
import inspect
import re
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss(net: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = net(batch(rank, 5, 4, step=step)).square().mean()
    return out


def test_arguments_are_in_the_order_of_torch() -> None:
    ours = inspect.signature(pydist.DataParallel.__init__).parameters
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    # The first is documented by itself; torch 2.11 and 2.12 say True for the second, and mean it.
    others = {"gradient_as_bucket_view", "broadcast_buffers"}
    for name in theirs.keys() - others:
        assert ours[name].default == theirs[name].default, name
    assert ours["broadcast_buffers"].default in (None, theirs["broadcast_buffers"].default)


# What leaves the results as they are, and is accepted for that: with the docstring's reason.
ACCEPTED: dict[str, Any] = {
    "dim": 1,
    "find_unused_parameters": True,
    "static_graph": True,
    "skip_all_reduce_unused_params": True,
    "batched_grad_copy": True,
    "bucket_cap_mb_list": [0.0001, 0.001],
    "broadcast_buffers": True,
    "forward_sync_buffers": True,
}


def train_with(name: str, value: Any) -> None:
    joined()
    model = pydist.DataParallel(build(), **{name: value})
    if name in ("dim", "find_unused_parameters", "static_graph", "batched_grad_copy"):
        assert getattr(model, name) == value
    train_like_reference(model, build(), loss)


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_what_changes_no_result_is_accepted(three: Ranks, name: str) -> None:
    three.run(train_with, name, ACCEPTED[name], timeout=LIMIT_S)
    assert name in cast(str, pydist.DataParallel.__doc__)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixed_precision": ({"mixed_precision": object()}, "by torch.autocast"),
    "delayed": (
        {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": None},
        "averages all parameters of the module as backward completes them",
    ),
    "hooked": ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "leave it out"),
    "device_ids": ({"device_ids": [0]}, "device_ids=None for a module on the CPU"),
    "output_device": ({"output_device": "cuda:0"}, "output_device is 'cuda:0' without device_ids"),
    "several": ({"device_ids": [0, 1]}, "on cpu, and the first of device_ids is cuda:0: move"),
    "mixed": ({"device_ids": ["cpu", 0]}, "devices of kind cpu and cuda; name GPUs alone"),
    "twice": ({"device_ids": [1, 1]}, "a GPU can have one replica alone"),
    "elsewhere": ({"device_ids": [0, 1], "output_device": 2}, "outputs go to one of these"),
    "no dimension": ({"device_ids": ["cpu"] * 2, "dim": "rows"}, "dim is a str"),
}


def refuse(kind: str) -> None:
    joined()
    arguments, message = REFUSED[kind]
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.DataParallel(build(), **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_is_not_supported_says_so(three: Ranks, kind: str) -> None:
    three.run(refuse, kind, timeout=LIMIT_S)


# Of a wrong type, with what the error says. Text that says no would otherwise mean yes.
FLAGS = (
    *("broadcast_buffers", "init_sync", "find_unused_parameters", "check_reduction"),
    *("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params"),
    *("batched_grad_copy", "forward_sync_buffers", "check_finite"),
)
WRONG: list[tuple[str, Any, str]] = [
    *((name, "False", f"{name} is 'False', a str; it must be a bool") for name in FLAGS),
    ("static_graph", torch.ones(2), "static_graph is tensor.*; it must be a bool"),
    ("device_ids", 1, "device_ids is 1; it must be a list of one GPU"),
    ("device_ids", "cuda:0", "device_ids is 'cuda:0'; it must be a list"),
    ("process_group", 3, "process_group= is an int; it must be a process group"),
    ("bucket_cap_mb", "8", "bucket_cap_mb is '8'; it must be a number of MiB"),
    ("bucket_cap_mb_list", 8, "bucket_cap_mb_list is 8; it must be a list of sizes in MiB"),
    ("bucket_cap_mb_list", ["8"], "a size in bucket_cap_mb_list is '8'"),
    ("device_mesh", 3, "device_mesh is an int; it must be a DeviceMesh of one dimension"),
    ("reduction", 1, "reduction is 1; it must be 'mean' or 'sum'"),
    ("compress", ["bf16"], "compress is ['bf16']; it must be 'bf16', 'fp16' or None"),
    ("check_every", "often", "check_every is 'often'; it must be a number of steps"),
    ("module", nn.Linear, "wraps a torch.nn.Module, not a type"),
]


def refuse_wrong_types() -> None:
    joined()
    for name, value, message in WRONG:
        with pytest.raises(pydist.InvalidUsage) as caught:
            pydist.DataParallel(**{"module": build(), name: value})
        assert re.search(message, str(caught.value)) or message in str(caught.value), name
    model = pydist.DataParallel(build())
    for weight in ("two", None, torch.ones(2)):
        with (
            pytest.raises(pydist.InvalidUsage, match="it must be a number"),
            model.weighted(weight),
        ):
            pass


def test_arguments_of_a_wrong_type_are_refused(three: Ranks) -> None:
    three.run(refuse_wrong_types, timeout=LIMIT_S)


def keep_buffers_by_a_zero() -> list[float]:
    """0 is a no, as in torch."""
    rank, _ = joined()
    found = []
    for wrap in (pydist.DataParallel, DistributedDataParallel):
        module = nn.BatchNorm1d(2).double()
        module.get_buffer("running_mean").fill_(rank)
        net: Any = wrap(module, broadcast_buffers=0, init_sync=1)
        net(torch.full((2, 2), float(rank), dtype=torch.float64)).sum().backward()
        net(torch.full((2, 2), float(rank), dtype=torch.float64))
        found.append(module.get_buffer("running_mean").sum().item())
    return found


def test_numbers_are_flags_as_in_torch(three: Ranks) -> None:
    for ours, theirs in three.run(keep_buffers_by_a_zero, timeout=LIMIT_S):
        assert ours == pytest.approx(theirs, rel=1e-12)


def warn_of_check_reduction() -> None:
    joined()
    with pytest.warns(FutureWarning, match="check_reduction is deprecated"):
        pydist.DataParallel(build(), check_reduction=True)


def test_check_reduction_warns_as_in_torch(run: Runner) -> None:
    run(warn_of_check_reduction)


def cut_buckets_by_a_list() -> None:
    joined()
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    size_mb = 64 / 2**20
    model = pydist.DataParallel(module, bucket_cap_mb=99, bucket_cap_mb_list=[size_mb, 2 * size_mb])
    # The list counts, in the order in which buckets travel; its last size for all that follow.
    assert [len(bucket.parameters) for bucket in model.plan.buckets] == [1, 2, 2, 1]


def test_a_list_of_bucket_sizes(run: Runner) -> None:
    run(cut_buckets_by_a_list)


def average_over_a_mesh() -> None:
    rank, size = joined()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = pydist.DataParallel(build(), device_mesh=mesh)
    assert model.process_group is mesh.get_group()
    train_like_reference(model, build(), loss)
    with pytest.raises(pydist.InvalidUsage, match="not both"):
        pydist.DataParallel(build(), process_group=dist.group.WORLD, device_mesh=mesh)
    square = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    with pytest.raises(pydist.InvalidUsage, match=r"has 2 dimensions, \('pp', 'dp'\)"):
        pydist.DataParallel(build(), device_mesh=square)
    part = pydist.DataParallel(build(), device_mesh=square["dp"])
    assert part.process_group.size() == size
    assert rank < size


def test_device_mesh(run: Runner) -> None:
    run(average_over_a_mesh)


def start_with_other_buffers(is_synced: bool) -> list[float]:
    """Only the values at the start are up to the user: torch's first forward copies buffers."""
    rank, _ = joined()
    found = []
    for wrap in (pydist.DataParallel, DistributedDataParallel):
        torch.manual_seed(0)
        module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double().eval()
        module[1].running_mean.fill_(rank)
        module[0].bias.data.fill_(2 * rank)
        net: Any = wrap(module, init_sync=False, broadcast_buffers=is_synced)
        found.append(net(torch.ones(1, 2, dtype=torch.float64)).sum().item())
        assert module[0].bias.tolist() == [2.0 * rank] * 2
    return found


@pytest.mark.parametrize("is_synced", [True, False])
def test_buffers_without_a_copy_at_the_start(three: Ranks, is_synced: bool) -> None:
    for ours, theirs in three.run(start_with_other_buffers, is_synced, timeout=LIMIT_S):
        assert ours == pytest.approx(theirs, rel=1e-12)


class Named(nn.Module):
    """Has attributes by the names of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1, dtype=torch.float64)
        self.dim = 512

    @property
    def device(self) -> str:
        return "the module's"

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def read_attributes() -> None:
    rank, size = joined()
    module = build()
    ours, theirs = pydist.DataParallel(module), DistributedDataParallel(build())
    for name in (
        *("device", "device_ids", "output_device", "process_group", "dim", "static_graph"),
        *("find_unused_parameters", "broadcast_buffers", "forward_sync_buffers"),
        *("require_backward_grad_sync", "require_forward_param_sync", "mixed_precision"),
        *("skip_all_reduce_unused_params", "batched_grad_copy", "gradient_as_bucket_view"),
        "parameters_to_ignore",
    ):
        # Some came with later versions of torch.
        assert getattr(ours, name) == getattr(theirs, name, getattr(ours, name)), name
    assert dist.get_world_size(ours.process_group) == size
    assert ours.module is module
    for model in (ours, theirs, pydist.DataParallel(nn.BatchNorm1d(2))):
        assert model.will_sync_module_buffers() == any(True for _ in model.buffers())
    told = ours._get_ddp_logging_data()
    known = theirs._get_ddp_logging_data()
    for name in ("module_name", "rank", "world_size", "num_parameter_tensors", "has_sync_bn"):
        assert told[name] == known[name], name
    assert told["total_parameter_size_bytes"] == known["total_parameter_size_bytes"]
    assert told["can_set_static_graph"]
    # Attributes of the module come first.
    named = pydist.DataParallel(Named())
    assert named.dim == 512
    assert named.device == "the module's"
    assert rank == told["rank"]


def test_attributes_are_those_of_torch(run: Runner) -> None:
    run(read_attributes)


class Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, rank: int) -> Tensor:
        self.count = self.count + rank + 1
        return self.fc(torch.ones(1, 2, dtype=torch.float64)).sum()


def switch_buffers_off_and_on() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Counting())
    model(rank).backward()
    assert model.count.item() == 1
    model.broadcast_buffers = False
    assert not model.forward_sync_buffers
    model(rank).backward()
    assert model.count.item() == 1 + rank + 1
    model.forward_sync_buffers = True
    model(rank).backward()
    assert model.count.item() == 3
    model.require_forward_param_sync = True
    with pytest.raises(pydist.InvalidUsage, match="set forward_sync_buffers"):
        model.require_forward_param_sync = False
    without = pydist.DataParallel(Counting(), broadcast_buffers=False)
    without.broadcast_buffers = False
    with pytest.raises(pydist.InvalidUsage, match="can't be switched on later"):
        without.broadcast_buffers = True
    with without.join():
        for _ in range(rank + 1):
            without(rank).backward()
    # Who does not copy buffers does not at the end of join() either.
    assert without.count.item() == (rank + 1) ** 2
    assert size


def test_copying_buffers_may_be_switched_off(run: Runner) -> None:
    run(switch_buffers_off_and_on)


def register_builtin_hooks(kind: str) -> None:
    rank, size = joined()
    model = pydist.DataParallel(copy.deepcopy(build()))
    reference = build()
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    loss(model, rank, 0).backward()
    for r in range(size):
        (loss(reference, r, 0) / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad, 1e-12 if kind == "ALLREDUCE" else 2e-3)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_communication_hooks(three: Ranks, kind: str) -> None:
    three.run(register_builtin_hooks, kind, timeout=LIMIT_S)


def join_by_torch() -> None:
    joined()
    model: Any = pydist.DataParallel(build())
    with pytest.raises(pydist.InvalidUsage, match=r"put the loop into `with model.join\(\):`"):
        Join([model])


def test_torchs_join_is_refused(run: Runner) -> None:
    run(join_by_torch)


def set_attributes() -> None:
    joined()
    module: Any = Named()
    model = pydist.DataParallel(module)
    with pytest.warns(UserWarning, match=r"model\.module\.dim = \.\.\. to say which is meant"):
        model.dim = 5
    assert module.dim == 5
    model.dim = 6  # once
    assert module.dim == model.dim == 6
    model.note = "the wrapper's"
    assert not hasattr(module, "note")
    model.require_backward_grad_sync = False
    model.process_group = None
    assert not hasattr(module, "process_group")
    with pytest.warns(UserWarning, match="setting 'fc' on a pydist"):
        model.fc = nn.Linear(4, 1, dtype=torch.float64)
    assert module.fc is model.fc


def test_setting_an_attribute_of_the_module_warns_once(run: Runner) -> None:
    run(set_attributes)
