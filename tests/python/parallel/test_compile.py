"""`torch.compile`, around the wrapper and inside it, and TorchScript."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from training import (
    TIME_LIMIT,
    Branches,
    Runner,
    Waves,
    assert_near,
    batch,
    joined,
    train_like_reference,
    wave_loss,
)

import pydist

pytestmark = TIME_LIMIT

# Dynamo, AOTAutograd and their caches live as long as the process: each function starts afresh.
# The backend "aot_eager" is all of torch.compile but the generated kernels.
BACKEND = "aot_eager"


@pytest.fixture(scope="module")
def backend() -> str:
    """Compiled code is the same whatever carries the gradients: one backend is enough."""
    return "native"


def wrap_compiled(module: nn.Module, how: str, backend: str, **options: Any) -> Any:
    if how == "compiled, then wrapped":
        return pydist.DataParallel(torch.compile(module, backend=backend), **options)  # type: ignore[arg-type]
    if how == "wrapped, then compiled":
        return torch.compile(pydist.DataParallel(module, **options), backend=backend)
    if how == "module in place":
        module.compile(backend=backend)
        return pydist.DataParallel(module, **options)
    model = pydist.DataParallel(module, **options)
    if how == "wrapper in place":
        model.compile(backend=backend)
    return model


WAYS = [
    "compiled, then wrapped",
    "wrapped, then compiled",
    "module in place",
    "wrapper in place",
]


def train_compiled(how: str, backend: str) -> None:
    joined()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    module = Waves()
    reference = copy.deepcopy(module)
    model = wrap_compiled(module, how, backend)
    train_like_reference(model, reference, wave_loss, steps=range(4), tolerance=1e-10)
    counters = torch._dynamo.utils.counters
    # The model was compiled, in one piece that was good for all steps.
    assert counters["stats"]["unique_graphs"] == 1, counters
    assert counters["stats"]["calls_captured"] > 6, counters


# tests/drop_in has the first two as well.
@pytest.mark.parametrize("how", everyday(*WAYS[1:], thorough=(WAYS[0],)))
def test_compiled_models(run: Runner, how: str) -> None:
    run(train_compiled, how, BACKEND)


def train_sharded() -> None:
    """Compiling again, for another batch, while parameters have gradients of shards."""
    rank, size = joined()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh())
    reference = copy.deepcopy(module)
    model = wrap_compiled(module, "compiled, then wrapped", "eager")
    ours = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, count in enumerate((8, 5, 7)):
        loss = model(batch(rank, count, 6, step=step)).square().mean()
        ours.zero_grad()
        loss.backward()
        ours.step()
        theirs.zero_grad()
        losses = [reference(batch(r, count, 6, step=step)).square().mean() for r in range(size)]
        (sum(losses) / size).backward()
        theirs.step()
    # What forward hides, it gives back.
    before = ours.gradient_of(module[0].weight)
    model.eval()
    with torch.no_grad():
        assert_near(model(batch(0, 4, 6)), reference(batch(0, 4, 6)))
    assert_near(before, reference[0].weight.grad)
    assert_near(ours.gradient_of(module[0].weight), reference[0].weight.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1


def test_compiling_again_with_sharded_gradients(run: Runner) -> None:
    run(train_sharded)


def compile_sharded_steps(how: str, stage: int) -> None:
    """Steps, under a schedule, that are called from compiled code."""
    rank, size = joined()
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh())
    reference = copy.deepcopy(module)
    model = pydist.DataParallel(module)
    ours: Any = pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]

    def train(x: Tensor) -> None:
        ours.zero_grad()
        model(x).square().mean().backward()
        ours.clip_grad_norm_(0.01)
        ours.step()

    compiled: Any = torch.compile(
        {"function": lambda: ours.step(), "method": ours.step, "training": train}[how],
        backend="eager",
    )
    for step in range(3):
        x = batch(rank, 5, 6, step=step)
        if how == "training":
            compiled(x)
        else:
            ours.zero_grad()
            model(x).square().mean().backward()
            ours.clip_grad_norm_(0.01)
            compiled()
        theirs.zero_grad()
        for r in range(size):
            (reference(batch(r, 5, 6, step=step)).square().mean() / size).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        theirs.step()
        for schedule in schedules:
            schedule.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(a, b, 1e-9)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["function", "method", "training"])
def test_compiled_steps_of_sharded_optimizers(run: Runner, how: str, stage: int) -> None:
    run(compile_sharded_steps, how, stage)


# Generates C++ and compiles it, on both ranks.
@pytest.mark.thorough
@pytest.mark.timeout(100)
def test_inductor(tmp_path: Path) -> None:
    env = {
        "PYDIST_BACKEND": "native",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes
    }
    with Ranks(2, env) as ranks:
        ranks.run(train_compiled, "wrapped, then compiled", "inductor", timeout=90)


def compile_the_step() -> None:
    joined()
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Waves()
    reference = copy.deepcopy(module)
    model = pydist.DataParallel(module)
    compiled: Any = torch.compile(wave_loss, backend=BACKEND)

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = (wave_loss if net is reference else compiled)(net, rank, step)
        return out

    train_like_reference(model, reference, loss, tolerance=1e-10)


def test_a_compiled_loss_function(run: Runner) -> None:
    run(compile_the_step)


def accumulate_compiled() -> None:
    rank, size = joined()
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Waves()
    reference = copy.deepcopy(module)
    model: Any = torch.compile(pydist.DataParallel(module), backend=BACKEND)
    for step in (0, 10):
        rounds = model.stats().rounds
        with model.no_sync():
            wave_loss(model, rank, step).backward()
        assert model.stats().rounds == rounds
        wave_loss(model, rank, step + 1).backward()
        assert model.stats().rounds == rounds + 1
        for r in range(size):
            ((wave_loss(reference, r, step) + wave_loss(reference, r, step + 1)) / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad, 1e-10)


def test_accumulation_of_a_compiled_model(run: Runner) -> None:
    run(accumulate_compiled)


def choose_compiled_branches() -> None:
    _, size = joined()
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Branches(size)
    reference = copy.deepcopy(module)
    model: Any = torch.compile(pydist.DataParallel(module), backend=BACKEND)

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = net(batch(rank, 5, 4, step=step), (rank + step) % size)
        return out

    # Every rank is in another branch, so in another graph.
    train_like_reference(model, reference, loss, tolerance=1e-10)


def test_compiled_graphs_that_differ_between_ranks(run: Runner) -> None:
    run(choose_compiled_branches)


class Normalized(nn.Module):
    """One layer, followed by another, and a buffer that ranks exchange."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = norm
        self.register_buffer("changed", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def step_of_an_engine() -> Callable[[Tensor], None]:
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    config = {"training": {"accumulation_steps": 2}}
    engine: Any = pydist.initialize(Normalized(nn.Identity()), make, config=config)[0]

    def train(x: Tensor) -> None:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()

    return train


def step_of(made: str) -> Callable[[Tensor], None]:
    if made == "engine":
        return step_of_an_engine()
    norm = pydist.SyncBatchNorm(4) if made == "synchronized" else nn.Identity()
    model: Any = pydist.DataParallel(Normalized(norm))
    trained: Any = copy.deepcopy(model) if made == "copied" else model
    optimizer: Any = (
        pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=2)
        if made == "sharded"
        else torch.optim.SGD(trained.parameters(), lr=0.1)
    )

    def go_backward(x: Tensor) -> Tensor:
        loss: Tensor = trained(x).square().mean()
        loss.backward()
        return loss

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        if made == "accumulated":
            with trained.no_sync():
                go_backward(x)
            trained.sync_gradients()
        elif made == "weighted":
            with trained.weighted(2.0):
                go_backward(x)
        elif made != "closure":
            go_backward(x)
        if made == "sharded":
            optimizer.clip_grad_norm_(1.0)
        optimizer.step(*([lambda: go_backward(x)] if made == "closure" else []))

    return train


def functions_compiled(made: str) -> tuple[set[str], set[str]]:
    """Of the test's, and of ours, in steps that are compiled whole."""
    rank, _ = joined()
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch.manual_seed(0)
    compiled: Any = torch.compile(step_of(made), backend="eager")
    for step in range(2):
        compiled(batch(rank, 5, 4, step=step).float())
    ours = str(Path(pydist.__file__).parent)
    metrics = torch._dynamo.utils.get_compilation_metrics()
    names = [(each.co_filename or "", each.co_name or "") for each in metrics]
    return (
        {name for file, name in names if file == __file__},
        {name for file, name in names if file.startswith(ours)},
    )


@pytest.mark.parametrize(
    "made", ["copied", "sharded", "accumulated", "weighted", "closure", "engine"]
)
def test_the_models_code_is_compiled_and_none_of_ours(run: Runner, made: str) -> None:
    for of_test, of_pydist in run(functions_compiled, made):
        assert "forward" in of_test
        assert of_pydist == set()


def test_of_a_layer_that_synchronizes_the_choice_is_compiled(run: Runner) -> None:
    for of_test, of_pydist in run(functions_compiled, "synchronized"):
        assert "forward" in of_test
        resumed = {name for name in of_pydist if name.startswith("torch_dynamo_resume_in_forward")}
        assert of_pydist - resumed == {"forward"}


def evaluate_compiled() -> None:
    joined()
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Normalized(pydist.SyncBatchNorm(4)).eval()
    compiled: Any = torch.compile(module, backend="eager", fullgraph=True)
    x = torch.ones(3, 4)
    assert torch.equal(compiled(x), module(x))


def test_a_layer_that_synchronizes_is_compiled_whole_in_evaluations(run: Runner) -> None:
    run(evaluate_compiled)


# --- overlap -------------------------------------------------------------------------------------

# What happened in a backward, in order: "first layer" and the names of parameters.
_events: list[str] = []


@torch.library.custom_op("pydist_tests::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    _events.append("first layer")
    return x.clone()


@torch.library.custom_op("pydist_tests::pass_on", mutates_args=())
def pass_on(x: Tensor) -> Tensor:
    return x.clone()


note.register_fake(torch.empty_like)
pass_on.register_fake(torch.empty_like)
pass_on.register_autograd(lambda ctx, gradient: note(gradient))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # 1 MiB each.
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = pass_on(self.layers[0](x))
        out: Tensor = self.layers[2](self.layers[1](x).tanh())
        return out


def order_of_backward(how: str) -> list[str]:
    joined()
    torch._dynamo.reset()
    module = Wide()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: _events.append(n))
    # A layer a bucket: the measured plan of a busy machine may put all three into one.
    model = wrap_compiled(module, how, BACKEND, bucket_cap_mb=1)
    for _ in range(2):
        _events.clear()
        model(torch.ones(2, 512)).sum().backward()
    buckets = model.stats().buckets
    assert len(buckets) == 3
    assert buckets[0].launched_s < buckets[-1].ready_s, "it left while backward went on"
    return list(_events)


@pytest.mark.parametrize(
    "how", everyday("eager", "wrapped, then compiled", thorough=(WAYS[0], *WAYS[2:]))
)
def test_gradients_come_during_backward(run: Runner, how: str) -> None:
    for events in run(order_of_backward, how):
        assert sorted(events) == ["first layer", *(f"layers.{i}.weight" for i in range(3))]
        assert events.index("layers.2.weight") < events.index("first layer"), events


# --- TorchScript ---------------------------------------------------------------------------------


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.first(x).tanh()
        out: Tensor = self.last(x)
        return out


def train_scripted(convert: str) -> None:
    joined()
    torch.manual_seed(0)
    module = Scripted()
    reference = copy.deepcopy(module)
    script: Callable[..., nn.Module] = getattr(torch.jit, convert)
    scripted = script(module, batch(0, 5, 6)) if convert == "trace" else script(module)
    model = pydist.DataParallel(scripted)
    assert list(model.state_dict()) == list(reference.state_dict())
    train_like_reference(model, reference, wave_loss, tolerance=1e-10)


@pytest.mark.parametrize("convert", ["script", "trace"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(run: Runner, convert: str) -> None:
    run(train_scripted, convert)
