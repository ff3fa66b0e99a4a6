"""Parameters that each rank has alone, in sharded optimizers and in checkpoints."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, run_ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, assert_near, batch, joined
from twins import LIMIT_S, TIME_LIMIT, assert_same

import pydist

pytestmark = TIME_LIMIT


class Mixed(nn.Module):
    """A trunk of all ranks, and experts of the rank alone, in a number of its own."""

    seen: Tensor

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(10, 33)
        self.head = nn.Linear(33, 7, bias=False)
        torch.manual_seed(rank)
        self.experts = nn.ModuleList(nn.Linear(7, rank + 2) for _ in range(rank + 1))
        self.register_buffer("seen", torch.zeros(rank + 1))
        self.to(dtype)
        names = [f"experts.{i}.{kind}" for i in range(rank + 1) for kind in ("weight", "bias")]
        self._ddp_params_and_buffers_to_ignore = [*names, "seen"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().abs().mean()
        y = self.head(self.trunk(x).tanh())
        return torch.stack([expert(y).square().mean() for expert in self.experts]).sum()


class Pair:
    """A model with a sharded optimizer, and its double with the class on whole parameters."""

    def __init__(
        self, optimizer_class: Any, dtype: torch.dtype, options: dict[str, Any], **arguments: Any
    ) -> None:
        self.rank, self.size = joined()
        self.models = [
            pydist.DataParallel(Mixed(self.rank, dtype), bucket_cap_mb=0.001) for _ in range(2)
        ]
        self.ours = pydist.ShardedOptimizer(
            self.models[0], optimizer_class, **arguments, **copy.deepcopy(options)
        )
        self.theirs = optimizer_class(self.models[1].parameters(), **copy.deepcopy(options))

    def step(self, number: int) -> None:
        for model, optimizer in zip(self.models, (self.ours, self.theirs), strict=True):
            optimizer.zero_grad()
            dtype = model.trunk.weight.dtype
            model(batch(self.rank, 6, 10, step=number, dtype=dtype)).backward()
            optimizer.step()

    def check(self, what: str) -> None:
        for (name, a), b in zip(
            self.models[0].named_parameters(), self.models[1].parameters(), strict=True
        ):
            assert_same(a.detach(), b.detach(), f"{what}, {name}")


@pytest.fixture(scope="module", params=everyday("native-3", thorough=("gloo-2",)))
def ranks(request: pytest.FixtureRequest) -> Any:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def train_with_experts(stage: int, fused: bool) -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    pair = Pair(
        torch.optim.AdamW, torch.float32, options, stage=stage, **({"fused": True} if fused else {})
    )
    for number in range(4):
        pair.step(number)
        if fused:
            for a, b in zip(pair.models[0].parameters(), pair.models[1].parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            pair.check(f"step {number}")
    # All of a rank's own state is here, and it is nobody else's.
    state = pair.ours.sharded_state()
    own = state.parameters["experts.0.weight"]
    assert own.is_own
    assert [(r.begin, r.end) for r in own.ranges] == [(0, own.count)]
    pair.models[0].module.experts[0].weight.grad.fill_(1)
    assert torch.equal(
        pair.ours.gradient_of(pair.models[0].module.experts[0].weight),
        torch.ones_like(pair.models[0].module.experts[0].weight),
    )


@pytest.mark.parametrize(("stage", "fused"), [(1, False), (2, False), (1, True)])
def test_own_parameters_are_updated_here(run: Runner, stage: int, fused: bool) -> None:
    run(train_with_experts, stage, fused)


def train_in_sixteen_bits() -> None:
    """Own parameters in 16 bits have float32 copies too, which do not lose small updates."""
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank, torch.bfloat16))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    masters = {n: p.detach().float() for n, p in model.named_parameters() if "experts" in n}
    for number in range(6):
        optimizer.zero_grad()
        model(batch(rank, 6, 10, step=number, dtype=torch.bfloat16)).backward()
        gradients = {n: p.grad.float() for n, p in model.named_parameters() if n in masters}
        optimizer.step()
        for name, master in masters.items():
            master.add_(gradients[name], alpha=-0.1)
            assert torch.equal(model.get_parameter(name), master.bfloat16()), name


def test_own_parameters_in_sixteen_bits(run: Runner) -> None:
    run(train_in_sixteen_bits)


def clip_with_experts(order: float, limit: float) -> None:
    rank, size = joined()
    model = pydist.DataParallel(Mixed(rank, torch.float64))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(rank, 6, 10)).backward()
    trunk = {n: optimizer.gradient_of(p) for n, p in model.named_parameters() if "experts" not in n}
    own = {n: p.grad.clone() for n, p in model.named_parameters() if "experts" in n}
    flat = torch.cat([g.reshape(-1) for g in own.values()])
    norms: list[Any] = [None] * size
    torch.distributed.all_gather_object(norms, torch.linalg.vector_norm(flat, order).item())
    norms += [torch.linalg.vector_norm(g, order).item() for g in trunk.values() if g is not None]
    expected = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), order)
    total = optimizer.clip_grad_norm_(limit, order)
    assert_near(total, expected)
    factor = min(1.0, limit / (expected.item() + 1e-6))
    for name, parameter in model.named_parameters():
        before = own[name] if name in own else trunk[name]
        assert before is not None
        assert_near(optimizer.gradient_of(parameter), before * factor)


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_counts_every_ranks_own(run: Runner, order: float, limit: float) -> None:
    run(clip_with_experts, order, limit)


def clip_by_torch() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(rank, 6, 10, dtype=torch.float32)).backward()
    # Nothing is scaled on any rank, so there is nothing wrong.
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    with pytest.raises(pydist.Mismatch, match=r"clip by optimizer\.clip_grad_norm_\(\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    pydist.barrier()
    # Of what all ranks share, it is right.
    nn.utils.clip_grad_norm_(model.trunk.parameters(), 1e-3)
    optimizer.step()
    with torch.no_grad():
        model.module.experts[0].weight.grad.fill_(math.nan)
    assert optimizer.clip_grad_norm_(1.0).isnan()
    with pytest.raises(RuntimeError, match="can't be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_by_other_norms_is_refused(run: Runner) -> None:
    run(clip_by_torch)


def scale_with_experts() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Mixed(rank))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(3):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(batch(rank, 6, 10, step=number, dtype=torch.float32))
        scaler.scale(loss).backward()
        if number == 1 and rank == size - 1:
            model.module.experts[0].bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        changed = any(
            not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        )
        assert changed == (number != 1)
    assert scaler.get_scale() == 4.0


def test_a_step_is_left_out_on_all_ranks(run: Runner) -> None:
    run(scale_with_experts)


def add_own_parameters_later() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank))
    trunk = [p for n, p in model.named_parameters() if "experts" not in n]
    experts = [p for n, p in model.named_parameters() if "experts" in n]
    for expert in experts[:1]:
        expert.requires_grad_(False)
    optimizer = pydist.ShardedOptimizer(trunk, torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": experts, "lr": 0.5})
    before = [p.detach().clone() for p in experts]
    model(batch(rank, 6, 10, dtype=torch.float32)).backward()
    gradients = [p.grad.clone() for p in experts[1:]]
    optimizer.step()
    assert torch.equal(experts[0], before[0])
    for expert, old, gradient in zip(experts[1:], before[1:], gradients, strict=True):
        assert torch.equal(expert, old - 0.5 * gradient)
    experts[0].requires_grad_(True)
    optimizer.zero_grad()
    assert experts[1].grad is None
    model(batch(rank, 6, 10, step=1, dtype=torch.float32)).backward()
    optimizer.step()
    assert not torch.equal(experts[0], before[0])
    with pytest.raises(pydist.InvalidUsage, match="is each rank's own"):
        pydist.ShardedState.merged([optimizer.sharded_state(), optimizer.sharded_state()])
    with pytest.raises(pydist.InvalidUsage, match="has another pydist"):
        pydist.ShardedOptimizer(experts, torch.optim.SGD, lr=0.1)
    only = pydist.DataParallel(Mixed(rank))
    own_only = pydist.ShardedOptimizer(only.experts.parameters(), torch.optim.SGD, lr=0.1)
    only(batch(rank, 6, 10, dtype=torch.float32)).backward()
    own_only.step()


def test_own_parameters_in_groups(run: Runner) -> None:
    run(add_own_parameters_later)


def put_back_states() -> None:
    pair = Pair(torch.optim.AdamW, torch.float32, {"lr": 0.05})
    pair.step(0)
    saved = copy.deepcopy(pair.ours.state_dict())
    models = [copy.deepcopy(model.state_dict()) for model in pair.models]
    theirs = copy.deepcopy(pair.theirs.state_dict())
    pair.step(1)
    pair.ours.load_state_dict(saved)
    pair.theirs.load_state_dict(theirs)
    for model, state in zip(pair.models, models, strict=True):
        model.load_state_dict(state)
    pair.step(2)
    pair.check("after a state of its own")
    # Of the class on whole parameters, with the rank's own.
    pair.ours.load_state_dict(pair.theirs.state_dict())
    pair.step(3)
    pair.check("after a state of the class")


def test_states_have_a_ranks_own(run: Runner) -> None:
    run(put_back_states)


def keep_one_copy() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, share_parameters=True)
    before = model.module.experts[0].weight.detach().clone()
    for number in range(2):
        optimizer.zero_grad()
        model(batch(rank, 6, 10, step=number, dtype=torch.float32)).backward()
        gradient = model.module.experts[0].weight.grad.clone()
        optimizer.step()
        before.add_(gradient, alpha=-0.1)  # as SGD does: where multiply and add round once, too
        assert torch.equal(model.module.experts[0].weight, before)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_own_parameters_beside_one_copy(debug: str) -> None:
    env = {"PYDIST_BACKEND": "native", "PYDIST_DEBUG": debug}
    run_ranks(keep_one_copy, 3, env=env, timeout=LIMIT_S)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.table = nn.Embedding(3, 2, sparse=True)
        self._ddp_params_and_buffers_to_ignore = ["table.weight"]


def shard_sparsely() -> None:
    joined()
    with pytest.raises(pydist.InvalidUsage, match="is of a sparse gradient"):
        pydist.ShardedOptimizer(pydist.DataParallel(Tables()), torch.optim.SGD, lr=0.1)


def test_sparse_gradients_of_own_tables_are_refused(run: Runner) -> None:
    run(shard_sparsely)


# --- checkpoints ---------------------------------------------------------------------------------


def optimizer_for(kind: str, model: Any) -> Any:
    if kind == "whole":
        return torch.optim.AdamW(model.parameters(), lr=0.05)
    stage = 2 if kind == "stage 2" else 1
    return pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.05, stage=stage)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(pydist.rank(), 6, 10, step=step, dtype=torch.float32))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_and_go_on(folder: str, kind: str) -> tuple[list[float], dict[str, Any]]:
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank), bucket_cap_mb=0.001)
    optimizer = optimizer_for(kind, model)
    train(model, optimizer, range(2))
    pydist.save(folder, model=model, optimizer=optimizer, asynchronous=True).wait()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return train(model, optimizer, range(2, 5)), state


def load_and_go_on(folder: str, kind: str) -> tuple[list[float], dict[str, Any]]:
    rank, _ = joined()
    torch.manual_seed(77 + rank)
    model = pydist.DataParallel(Mixed(rank), bucket_cap_mb=0.001)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(rank)
    optimizer = optimizer_for(kind, model)
    pydist.load(folder, model=model, optimizer=optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return train(model, optimizer, range(2, 5)), state


@pytest.mark.parametrize(
    ("saved", "loaded"), [("stage 1", "stage 2"), ("whole", "stage 1"), ("stage 2", "whole")]
)
def test_checkpoints_keep_what_ranks_have_alone(
    ranks: Ranks, tmp_path: Path, saved: str, loaded: str
) -> None:
    path = str(tmp_path / "checkpoint")
    before = ranks.run(save_and_go_on, path, saved, timeout=LIMIT_S)
    after = ranks.run(load_and_go_on, path, loaded, timeout=LIMIT_S)
    for (losses, state), (again, restored) in zip(before, after, strict=True):
        assert state.keys() == restored.keys()
        for name, value in state.items():
            assert torch.equal(value, restored[name]), name
        assert losses == pytest.approx(again, rel=1e-5)
    # In plain torch: each rank's own by its number.
    with pytest.raises(pydist.InvalidUsage, match=r"experts\.0\.bias@rank0, and rank=None"):
        pydist.checkpoint.to_torch(path)
    for rank, (_, state) in enumerate(before):
        plain = pydist.checkpoint.to_torch(path, rank=rank)
        module = Mixed(rank)
        module.load_state_dict(plain["model"])
        for name, value in module.state_dict().items():
            assert torch.equal(value, state[name]), name
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.load_state_dict(plain["optimizer"])
        for parameter in module.parameters():
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def holders(rank: int) -> list[nn.Module]:
    """Models with a wrapper, or with a module that has a list, somewhere within."""
    model = pydist.DataParallel(Mixed(rank))
    plain = pydist.DataParallel(nn.Linear(2, 2))
    return [
        nn.ModuleDict({"g": model, "d": plain}),
        nn.Sequential(nn.Sequential(model)),
        torch.optim.swa_utils.AveragedModel(model),
        nn.ModuleDict({"copy": copy.deepcopy(model.module)}),
    ]


def save_and_load_within(folder: str) -> None:
    rank, _ = joined()
    for number, holder in enumerate(holders(rank)):
        path = f"{folder}/{number}"
        before = {name: value.clone() for name, value in holder.state_dict().items()}
        pydist.save(path, model=holder)
        with torch.no_grad():
            for tensor in (*holder.parameters(), *holder.buffers()):
                tensor.zero_()
        pydist.load(path, model=holder)
        for name, value in holder.state_dict().items():
            assert torch.equal(value, before[name]), (number, name)


def test_checkpoints_keep_what_ranks_have_alone_in_modules_within(
    run: Runner, tmp_path: Path
) -> None:
    run(save_and_load_within, str(tmp_path))


def load_elsewhere(folder: str, what: str) -> str:
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank))
    optimizer = optimizer_for("stage 1", model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(pydist.CheckpointError) as caught:
        pydist.load(
            folder,
            model=model if what != "optimizer" else None,
            optimizer=optimizer if what != "model" else None,
        )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert pydist.load(folder, random=False) == {}
    return str(caught.value)


@pytest.mark.parametrize("what", everyday("both", thorough=("model", "optimizer")))
def test_another_number_of_ranks_is_refused(tmp_path: Path, what: str) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save_and_go_on, 2, path, "stage 1", env={"PYDIST_BACKEND": "native"})
    for count in (1, 3):
        messages = run_ranks(load_elsewhere, count, path, what, env={"PYDIST_BACKEND": "native"})
        assert len(set(messages)) == 1
        assert "was saved by 2 ranks" in messages[0]
        assert "experts.0.bias@rank0" in messages[0]
        assert f"can't be loaded by {count}" in messages[0]


def save_plain(folder: str) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Mixed(rank))
    pydist.save(folder, model=model)
    shared = nn.Sequential(nn.Linear(2, 2))
    shared.register_parameter("odd@rank1", nn.Parameter(torch.ones(1)))
    with pytest.raises(pydist.InvalidUsage, match="'@rank' and a number"):
        pydist.save(folder + "2", model=shared)
    # A model without parts of the rank's own is another one.
    other = Mixed(rank)
    other._ddp_params_and_buffers_to_ignore = []
    with pytest.raises(pydist.InvalidUsage, match=r"the checkpoint is of another model.*@rank"):
        pydist.load(folder, model=other)


def test_names_of_what_ranks_have_alone(run: Runner, tmp_path: Path) -> None:
    run(save_plain, str(tmp_path / "checkpoint"))
