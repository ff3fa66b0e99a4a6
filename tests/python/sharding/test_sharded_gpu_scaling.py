"""Steps that `torch.amp.GradScaler` lets the GPU leave out, beside torch's optimizer on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import gpu_ranks
import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, LIMIT_S, STAGES, assert_near, start
from launch import run_ranks
from torch import Tensor, nn
from training import batch

import pydist

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"lr": 0.01}),
]


class Pair:
    """A model on the GPU, whose optimizer leaves out steps itself, and the whole on the CPU."""

    def __init__(self, stage: int, optimizer_class: Any, **options: Any) -> None:
        self.rank, self.size = start()
        torch.manual_seed(2)
        self.reference = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 7))
        module = copy.deepcopy(self.reference).to("cuda")
        self.model = pydist.DataParallel(module, bucket_cap_mb=0.0005)
        self.ours = pydist.ShardedOptimizer(
            self.model, optimizer_class, stage=stage, fused=True, **options
        )
        self.theirs = optimizer_class(self.reference.parameters(), **options)
        given = {"init_scale": 2.0**8, "growth_interval": 2}
        self.scalers = (gpu_ranks.scaler(**given), torch.amp.GradScaler("cpu", **given))

    def loss(self, net: nn.Module, rank: int, step: int, *, is_bad: bool) -> Tensor:
        loss: Tensor = net(batch(rank, 6, 10, step=step, dtype=torch.float32).to(self._device(net)))
        loss = loss.square().mean()
        if is_bad and rank == 1:
            # In the last bucket alone, so that the shard of one rank shows it in stage 2.
            loss = loss + net.get_parameter("2.bias")[0] * float("inf")
        return loss

    @staticmethod
    def _device(net: nn.Module) -> torch.device:
        return next(net.parameters()).device

    def step(self, number: int, *, is_bad: bool) -> None:
        self.ours.zero_grad()
        self.theirs.zero_grad()
        ours, theirs = self.scalers
        ours.scale(self.loss(self.model, self.rank, number, is_bad=is_bad)).backward()
        for rank in range(self.size):
            loss = self.loss(self.reference, rank, number, is_bad=is_bad) / self.size
            theirs.scale(loss).backward()
        sides: list[tuple[Any, Any, nn.Module]] = [
            (ours, self.ours, self.model),
            (theirs, self.theirs, self.reference),
        ]
        for scaler, optimizer, net in sides:
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    def check(self, what: str) -> None:
        assert self.scalers[0].get_scale() == self.scalers[1].get_scale(), what
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            assert_near(ours, theirs, what)

    def check_state(self, what: str) -> None:
        """Reads it, as a checkpoint does."""
        found = self.ours.sharded_state().parameters
        for name, parameter in self.reference.named_parameters():
            expected = {n: v for n, v in self.theirs.state[parameter].items() if v is not None}
            for piece in found[name].ranges:
                where = f"{what}: {name}"
                assert piece.values.keys() == expected.keys(), where
                for key, value in expected.items():
                    its = value if value.dim() == 0 else value.reshape(-1)[piece.begin : piece.end]
                    assert_near(torch.as_tensor(piece.values[key]), its, f"{where}: {key}")


# The first step, the one after it, one that is clipped, and two in a row.
BAD_STEPS = {0, 1, 5, 8, 9}


def leave_out(stage: int) -> None:
    for optimizer_class, options in CLASSES:
        pair = Pair(stage, optimizer_class, **options)
        assert pair.ours._step_supports_amp_scaling
        for number in range(12):
            what = f"{optimizer_class.__name__} {options}, step {number}"
            pair.step(number, is_bad=number in BAD_STEPS)
            assert "found_inf" not in vars(pair.ours), what
            # Not after each: the next step finds out by itself, too.
            if number in (0, 4, 5, 9, 11):
                pair.check(what)
            if number in (3, 9, 11):
                pair.check_state(what)


@STAGES
def test_steps_are_left_out_as_by_torch(stage: int) -> None:
    run_ranks(leave_out, 2, stage, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


def leave_out_what_no_kernel_steps() -> None:
    """In float64 torch's class steps, whose number the host reads."""
    start()
    model = pydist.DataParallel(nn.Linear(4, 3, dtype=torch.float64).to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5, fused=True)
    for found in (1.0, 0.0):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.float64).to("cuda")).sum().backward()
        optimizer.grad_scale = torch.tensor(4.0).to("cuda")
        optimizer.found_inf = torch.tensor(found).to("cuda")
        optimizer.step()
        step = 0.0 if found else 0.125
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert_near(parameter, value.cpu() - step, f"found {found}")


def test_what_torchs_class_steps_is_left_out_too() -> None:
    run_ranks(leave_out_what_no_kernel_steps, 2, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


def forget() -> None:
    """What a step that raises was given is not of the next one."""
    pair = Pair(1, torch.optim.SGD, lr=0.5)
    pair.ours.grad_scale = torch.tensor(4.0).to("cuda")
    pair.ours.found_inf = torch.tensor(1.0).to("cuda")
    with pair.model.no_sync():
        pair.model(torch.ones(1, 10).to("cuda")).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="no_sync"):
        pair.ours.step()
    assert not {"grad_scale", "found_inf"} & vars(pair.ours).keys()
    pair.model.sync_gradients()
    before = pair.model.get_parameter("2.bias").detach().clone()
    pair.ours.step()
    assert not torch.equal(pair.model.get_parameter("2.bias").detach(), before)


def test_a_step_that_raises_forgets_what_it_was_given() -> None:
    run_ranks(forget, 2, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


def step_without_gradients() -> None:
    """As the idle half of a GAN: torch's scaler makes of no gradients the number 0."""
    start()
    model = pydist.DataParallel(nn.Linear(3, 2).to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.Adam, lr=0.1, fused=True)
    before = [p.detach().cpu() for p in model.parameters()]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0).to("cuda"), 0
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().cpu(), value)


def test_a_step_without_gradients_changes_nothing() -> None:
    run_ranks(step_without_gradients, 2, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


def declared(options: dict[str, Any]) -> bool:
    start()
    given = dict(options)
    module = nn.Linear(3, 2, dtype=given.pop("dtype", torch.float32)).to("cuda")
    if given.pop("own", False):
        module._ddp_params_and_buffers_to_ignore = ["bias", ".bias"]
    model = pydist.DataParallel(module)
    made = pydist.ShardedOptimizer(model, given.pop("class", torch.optim.Adam), lr=0.1, **given)
    return made._step_supports_amp_scaling


@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [
        ("nccl", {"fused": True}, True),
        ("nccl", {}, False),
        ("nccl", {"fused": True, "offload": "cpu"}, False),
        ("nccl", {"fused": True, "own": True}, False),
        ("nccl", {"fused": True, "dtype": torch.float16}, False),
        ("nccl", {"fused": True, "dtype": torch.bfloat16}, False),
        ("nccl", {"fused": True, "class": torch.optim.Adagrad}, False),
        ("native", {"fused": True}, False),
    ],
)
def test_who_leaves_out_steps(backend: str, options: dict[str, Any], expected: bool) -> None:
    """Where a kernel does not step all, or ranks talk by the host, the scaler reads its number."""
    found = run_ranks(declared, 2, options, env=ENVIRONMENTS[backend], timeout=LIMIT_S)
    assert found == [expected] * 2
