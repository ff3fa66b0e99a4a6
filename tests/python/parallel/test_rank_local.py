"""Parameters and buffers that each rank has alone: torch's ignored ones."""

import copy

import pytest
import torch
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT

IGNORED = "_ddp_params_and_buffers_to_ignore"


class Experts(nn.Module):
    """A trunk that all ranks share, and an expert, a scale and a counter of each rank's own."""

    seen: Tensor
    shift: Tensor

    def __init__(self, own: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.expert = nn.Sequential(
            nn.Linear(4, own, dtype=torch.float64), nn.Linear(own, 4, dtype=torch.float64)
        )
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + x.abs().sum()
            self.shift = self.shift + x.detach().mean(0)
        y = self.norm(self.trunk(x)).tanh() * self.frozen + self.shift
        return (self.expert(y) * self.scale).square().mean()


LOCAL = {
    *(f"expert.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")),
    *("scale", ".scale", "frozen", "seen"),
}


def build(seed: int, own: int = 4) -> Experts:
    torch.manual_seed(seed)
    module = Experts(own)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {name: tensor.detach().clone() for name, tensor in named.items()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.detach().clone()
    return found


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    a, b = state(ours), state(theirs)
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def train_like_torch(names: list[str]) -> None:
    rank, _ = joined()
    modules = [build(rank), build(rank)]
    before = state(modules[0])
    for module in modules:
        pydist.DataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    assert modules[0].scale._ddp_ignored
    # Buffers are copied at other moments.
    ours = pydist.DataParallel(modules[0], broadcast_buffers=False)
    theirs = DistributedDataParallel(modules[1], broadcast_buffers=False)
    for name in LOCAL - {".scale"}:
        assert torch.equal(state(modules[0])[name], before[name]), name
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (ours, theirs)]
    for step in range(4):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            net(batch(rank, 6, 4, step=step)).backward()
            optimizer.step()
        assert_same_state(modules[0], modules[1])
    own = modules[0].expert[0].weight.detach()
    others = own.clone()
    pydist.broadcast(others, root=0)
    assert rank == 0 or not torch.allclose(own, others)
    planned = {name for bucket in ours.plan.buckets for name in bucket.parameters}
    assert planned.isdisjoint(LOCAL)


def test_ignored_parameters_train_apart_as_in_torch(run_on_each: Runner) -> None:
    run_on_each(train_like_torch, sorted(LOCAL))


def keep_own_buffers() -> None:
    """Each forward changes two buffers: all ranks get rank 0's of one, and keep their other."""
    rank, size = joined()
    module = build(0)
    module._ddp_params_and_buffers_to_ignore = ["seen"]  # type: ignore[assignment]
    alone = [copy.deepcopy(module) for _ in range(size)]
    model = pydist.DataParallel(module)
    for step in range(3):
        model(batch(rank, 6, 4, step=step)).backward()
        for r in range(size):
            alone[r](batch(r, 6, 4, step=step))
        assert_near(module.seen, alone[rank].seen)
        assert_near(module.shift, alone[0].shift)
        alone[rank].load_state_dict({**alone[0].state_dict(), "seen": alone[rank].seen})


def test_ignored_buffers_stay_the_ranks_own(run: Runner) -> None:
    run(keep_own_buffers)


class Uneven(nn.Module):
    """As many experts as the rank has: none, one or two, of other shapes; one table is sparse."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3, dtype=torch.float64)
        self.experts = nn.ModuleList(
            nn.Linear(3, rank + 1, dtype=torch.float64) for _ in range(rank)
        )
        self.table = nn.Embedding(3 + rank, 3, sparse=True, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(rank, dtype=torch.int64))
        local = [f"experts.{i}.{kind}" for i in range(rank) for kind in ("weight", "bias")]
        self._ddp_params_and_buffers_to_ignore = [*local, "table.weight", "calls"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x) + self.table(torch.zeros(len(x), dtype=torch.int64))
        return torch.stack([y.sum(), *(expert(y).sum() for expert in self.experts)]).square().sum()


def train_uneven_numbers() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    modules = []
    for r in range(size):
        torch.manual_seed(r)
        modules.append(Uneven(r))
    references = copy.deepcopy(modules)
    for reference in references:
        reference.trunk.load_state_dict(references[0].trunk.state_dict())
    model = pydist.DataParallel(modules[rank])
    nets = [model.module, *references]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(rank, 5, 3, step=step)).backward()
        for r, reference in enumerate(references):
            reference(batch(r, 5, 3, step=step)).backward()
        for name in ("weight", "bias"):
            gradients = [getattr(reference.trunk, name).grad for reference in references]
            mean = torch.stack(gradients).mean(0)
            for gradient in gradients:
                gradient.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        for (name, ours), theirs in zip(
            model.named_parameters(), references[rank].parameters(), strict=True
        ):
            assert ours.grad is not None, name
            assert theirs.grad is not None
            assert_near(ours.grad.to_dense(), theirs.grad.to_dense())
            assert_near(ours, theirs)
    assert model.module.table.weight.grad.is_sparse


@pytest.mark.parametrize("debug", ["0", "1"])
def test_ranks_may_ignore_other_numbers_of_parameters(backend: str, debug: str) -> None:
    env = {"PYDIST_BACKEND": backend, "PYDIST_DEBUG": debug}
    run_ranks(train_uneven_numbers, 3, env=env, timeout=LIMIT_S)


def name_half_of_it(kind: str) -> str:
    joined()
    module: nn.Module = build(0)
    if kind == "with a dot":
        names = [".scale"]
    elif kind == "without the dot":
        names = ["scale"]
    else:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = module[0].weight
        names = ["0.weight"]
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.DataParallel(module)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("with a dot", "lacks 'scale'"),
        ("without the dot", "lacks '.scale'"),
        ("shared", "lacks '1.weight'"),
    ],
)
def test_half_ignored_parameters_are_refused(three: Ranks, kind: str, lacks: str) -> None:
    for message in three.run(name_half_of_it, kind, timeout=LIMIT_S):
        assert lacks in message


def name_what_is_not_there() -> None:
    joined()
    module = nn.Sequential(nn.Linear(2, 2))
    module._ddp_params_and_buffers_to_ignore = ["0.weight", "1.weight"]  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"'1\.weight', which nothing in the module is called"):
        pydist.DataParallel(module)
    setattr(module, IGNORED, ["0.weight", "0.bias"])
    with pytest.raises(pydist.InvalidUsage, match="beside those that it lets each rank have"):
        pydist.DataParallel(module)


def test_names_that_ignore_nothing(run: Runner) -> None:
    run(name_what_is_not_there)


def ignore_on_one_rank() -> str:
    rank, _ = joined()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank == 1:
        setattr(module, IGNORED, ["1.weight"])
    with pytest.raises(pydist.Mismatch) as caught:
        pydist.DataParallel(module)
    return str(caught.value)


def test_ignoring_on_some_ranks_is_refused_on_all(three: Ranks) -> None:
    messages = three.run(ignore_on_one_rank, timeout=LIMIT_S)
    assert len(set(messages)) == 1
    assert "rank 0 has parameter 1.weight: (2, 2) torch.float32, where rank 1 has" in messages[0]


def join_with_own_parts() -> None:
    rank, size = joined()
    module = build(rank)
    setattr(module, IGNORED, sorted(LOCAL))
    model = pydist.DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(rank, 5, 4, step=step)).backward()
            optimizer.step()
        before = state(module)
    after = state(module)
    for name in LOCAL - {".scale"}:
        assert torch.equal(before[name], after[name]), name
    last = module.trunk.weight.detach().clone()
    pydist.broadcast(last, root=size - 1)
    assert torch.equal(last, module.trunk.weight)


def test_join_leaves_ignored_parts_alone(run: Runner) -> None:
    run(join_with_own_parts)


def change_own_parts() -> None:
    """Experts that are unfrozen, replaced or added while training stay the rank's own."""
    rank, size = joined()
    module = Uneven(2)
    module.experts[0].requires_grad_(False)
    model = pydist.DataParallel(module)
    model(batch(rank, 5, 3)).backward()
    module.experts[0].requires_grad_(True)
    torch.manual_seed(rank)
    if rank == 1:
        module.experts[1] = nn.Linear(3, 7, dtype=torch.float64)
    module.experts.append(nn.Linear(3, rank + 1, dtype=torch.float64))
    module._ddp_params_and_buffers_to_ignore += ["experts.2.weight", "experts.2.bias"]
    model.zero_grad()
    expected = copy.deepcopy(module)
    model(batch(rank, 5, 3)).backward()
    expected(batch(rank, 5, 3)).backward()
    for (name, ours), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert_near(ours, theirs)
        if "expert" in name:
            assert_near(ours.grad, theirs.grad)
    gradient = module.trunk.weight.grad.clone()
    pydist.broadcast(gradient, root=size - 1)
    assert torch.equal(gradient, module.trunk.weight.grad)
    # Wrapped anew, they still are.
    again = pydist.DataParallel(model.module)
    assert_near(module.experts[2].weight, expected.experts[2].weight)
    again(batch(rank, 5, 3)).backward()


def test_own_parts_may_change(run: Runner) -> None:
    run(change_own_parts)


def step_with_own_gradients() -> None:
    """What is accumulated for a rank's own parameters needs no average before a step."""
    rank, _ = joined()
    module = build(0)
    setattr(module, IGNORED, sorted(LOCAL))
    model = pydist.DataParallel(module)
    own = torch.optim.SGD(module.expert.parameters(), lr=0.1)
    with model.no_sync():
        model(batch(rank, 5, 4)).backward()
    own.step()
    with pytest.raises(pydist.InvalidUsage, match="never averaged"):
        torch.optim.SGD(module.trunk.parameters(), lr=0.1).step()


def test_steps_of_own_parameters_are_not_guarded(run: Runner) -> None:
    run(step_with_own_gradients)
