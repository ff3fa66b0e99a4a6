"""`pydist.initialize`: the weights of a loop written by hand, and of one process."""

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, rank_outcomes, run_ranks
from thorough import everyday
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pydist
from pydist.config import in_force
from pydist.training.batch_sizes import BatchSizes, batch_sizes

SAMPLES = 48


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def by_one_process(make: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    """Six steps of eight samples each, in the order of the data, clipped and scheduled."""
    model = network()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for x, y in DataLoader(data(), batch_size=8):
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def train(config: dict[str, Any], way: str) -> tuple[int, list[Tensor], str]:
    model = network()
    optimizer: Any = {"made": adamw, "given": adamw(model.parameters()), "named": None}[way]
    engine, optimizer, loader, schedule = pydist.initialize(
        model,
        optimizer,
        DataLoader(data(), batch_size=2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        config=config,
    )
    assert loader is not None
    assert schedule.optimizer is optimizer
    for x, y in loader:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    return (
        engine.global_steps,
        [p.detach().clone() for p in engine.parameters()],
        str(type(optimizer)),
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", ["made", "given", "named"])
def test_training_is_that_of_one_process(stage: int, way: str) -> None:
    config: dict[str, Any] = {
        "training": {"batch_size": 8, "micro_batch_size": 2, "clip_grad_norm": 0.1},
        "optimizer": {"stage": stage},
    }
    if way == "named":
        config["optimizer"] |= {"name": "AdamW", "params": {"lr": 0.05}}
    expected = by_one_process(adamw)
    for steps, parameters, kind in run_ranks(train, 2, config, way):
        assert steps == SAMPLES // 8
        assert ("ShardedOptimizer" in kind) == (stage > 0)
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def trains_in_16_bits() -> list[list[Tensor]]:
    """With DeepSpeed's configuration, and by hand."""
    config = pydist.Config.from_deepspeed(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 1},
        }
    )
    torch.manual_seed(3)
    engine, _, loader, _ = pydist.initialize(network(), data=data(), config=config)
    assert loader is not None
    for x, y in loader:
        engine.backward(nn.functional.mse_loss(engine(x.bfloat16()), y.bfloat16()))
        engine.step()

    torch.manual_seed(3)
    model = pydist.DataParallel(network().bfloat16())
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0)
    loader = pydist.prepare(DataLoader(data(), batch_size=4, shuffle=True))
    for index, (x, y) in enumerate(loader):
        with contextlib.nullcontext() if index % 2 else model.no_sync():
            (nn.functional.mse_loss(model(x.bfloat16()), y.bfloat16()) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [[p.detach().clone() for p in each.parameters()] for each in (engine, model)]


def test_deepspeeds_configuration_trains_in_16_bits() -> None:
    for by_engine, by_hand in run_ranks(trains_in_16_bits, 2):
        assert {p.dtype for p in by_engine} == {torch.bfloat16}
        assert all(map(torch.equal, by_engine, by_hand))
        assert not torch.equal(by_engine[0], network()[0].weight.bfloat16())


def rounds(config: dict[str, Any]) -> int:
    engine, *_ = pydist.initialize(network(), adamw, config=config)
    before = engine.stats().rounds
    for x, y in DataLoader(data(), batch_size=4):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    return engine.stats().rounds - before


def test_accumulated_gradients_travel_once() -> None:
    assert run_ranks(rounds, 2, {"training": {"accumulation_steps": 4}}) == [3, 3]


def over_epochs() -> tuple[list[int], list[Tensor]]:
    """Three batches an epoch, and two to a step."""
    engine, *_ = pydist.initialize(network(), adamw, config={"training": {"accumulation_steps": 2}})
    steps = []
    for _ in range(3):
        for x, y in DataLoader(data(), batch_size=16):
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
        steps.append(engine.global_steps)
    return steps, [p.detach().clone() for p in engine.parameters()]


def test_a_step_goes_on_in_the_next_epoch() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    batches = list(DataLoader(data(), batch_size=16)) * 3
    for (x, y), (x2, y2) in zip(batches[:-1:2], batches[1::2], strict=True):
        loss = nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(model(x2), y2)
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps, parameters = run_ranks(over_epochs, 2)[0]
    assert steps == [1, 3, 4]  # the last batch of all is the first one of a step that never comes
    for found, wanted in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)


def clipped(stage: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """The norms of gradients after they were clipped to 1, by the engine and by torch."""
    return [clipped_once(stage, dtype, trial) for trial in range(8)]


def clipped_once(stage: int, dtype: torch.dtype, trial: int) -> tuple[float, float]:
    torch.manual_seed(trial)
    engine, optimizer, *_ = pydist.initialize(
        nn.Linear(11, 7, dtype=dtype),
        lambda p: torch.optim.SGD(p, lr=0.0),
        config={"training": {"clip_grad_norm": 1.0}, "optimizer": {"stage": stage}},
    )
    by_engine = []

    def note(*_: Any) -> None:
        by_engine.append(norm_of([gradient_of(engine, p) for p in engine.parameters()]))

    optimizer.register_step_pre_hook(note)
    engine.backward(engine(torch.randn(3, 11, dtype=dtype) * 5).square().sum())
    copies = [gradient_of(engine, p).clone().requires_grad_() for p in engine.parameters()]
    for each in copies:
        each.grad = each.detach().clone()
    nn.utils.clip_grad_norm_(copies, 1.0)
    engine.step()
    return by_engine[0], norm_of([each.grad for each in copies if each.grad is not None])


def clipped_by_the_optimizer() -> list[float]:
    """The norms of 16-bit gradients that a `pydist.ShardedOptimizer` has clipped to 1."""
    norms = []
    for trial in range(8):
        torch.manual_seed(trial)
        model = pydist.DataParallel(nn.Linear(11, 7, dtype=torch.bfloat16))
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.0, stage=2)
        model(torch.randn(3, 11, dtype=torch.bfloat16) * 5).square().sum().backward()
        optimizer.clip_grad_norm_(1.0)
        gradients = [optimizer.gradient_of(p) for p in model.parameters()]
        norms.append(norm_of([each for each in gradients if each is not None]))
    return norms


def norm_of(tensors: list[Tensor]) -> float:
    return torch.cat([each.detach().double().flatten() for each in tensors]).norm().item()


def gradient_of(engine: Any, parameter: Tensor) -> Tensor:
    if isinstance(engine.optimizer, pydist.ShardedOptimizer):
        gradient = engine.optimizer.gradient_of(parameter)
    else:
        gradient = parameter.grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("stage", everyday(2, thorough=(0, 1)))
def test_gradients_of_16_bits_are_clipped_in_float32(stage: int) -> None:
    with Ranks(2) as ranks:
        norms = ranks.run(clipped, stage, torch.bfloat16)[0]
        of_float32 = ranks.run(clipped, stage, torch.float32)[0]
        by_optimizer = ranks.run(clipped_by_the_optimizer)[0] if stage == 2 else []
    # What is left is the rounding of the gradients themselves, whose errors even out.
    assert max(abs(norm - 1) for norm in [*by_optimizer, *(n for n, _ in norms)]) < 1.5e-3
    assert all(norm == pytest.approx(of_torch, rel=1e-6) for norm, of_torch in of_float32)


def stepped_before() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A network, its optimizer, which has made a step, and what that was made with."""
    model = network()
    optimizer = adamw(model.parameters())
    x, y = data()[:8]
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x, y


def hooked(stage: int) -> list[str]:
    """Hooks of an optimizer that has made a step before."""
    model, optimizer, x, y = stepped_before()
    told = []

    def telling(name: str) -> Callable[..., None]:
        return lambda optimizer, *_: told.append(f"{name} {type(optimizer).__name__}")

    optimizer.register_step_pre_hook(telling("before step"))
    removed = optimizer.register_step_post_hook(telling("after step"))
    optimizer.register_state_dict_pre_hook(telling("before state"))
    optimizer.register_state_dict_post_hook(telling("after state"))
    optimizer.register_load_state_dict_pre_hook(telling("before load"))
    optimizer.register_load_state_dict_post_hook(telling("after load"))
    engine, made, *_ = pydist.initialize(model, optimizer, config={"optimizer": {"stage": stage}})
    for _ in range(2):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        removed.remove()
    made.load_state_dict(made.state_dict())
    return told


def scheduled_before() -> str:
    model = network()
    optimizer = adamw(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.initialize(model, optimizer, config={"optimizer": {"stage": 1}})
    return str(caught.value)


def test_hooks_of_the_optimizer_are_kept() -> None:
    with Ranks(2) as ranks:
        plain, sharded = (ranks.run(hooked, stage)[0] for stage in (0, 2))
        (scheduled, _) = ranks.run(scheduled_before)
    assert plain == [
        *("before step AdamW", "after step AdamW", "before step AdamW"),
        *("before state AdamW", "after state AdamW", "before load AdamW", "after load AdamW"),
    ]
    assert sharded == [each.replace("AdamW", "ShardedOptimizer") for each in plain]
    assert "something has replaced its step(), as a scheduler does" in scheduled


def out_of_turn() -> list[str]:
    engine, *_ = pydist.initialize(network(), adamw)
    told = []
    with pytest.raises(pydist.InvalidUsage) as caught:
        engine.step()
    told.append(str(caught.value))
    x, y = data()[:4]
    engine.backward(nn.functional.mse_loss(engine(x), y))
    with pytest.raises(pydist.InvalidUsage) as caught:
        engine.backward(nn.functional.mse_loss(engine(x), y))
    told.append(str(caught.value))
    return told


def test_calls_out_of_turn_are_refused() -> None:
    (first, second), _ = run_ranks(out_of_turn, 2)
    assert "call backward(loss) before" in first
    assert "backward() was called twice" in second


def initialize(config: dict[str, Any], optimizer: str, batch_size: int | None) -> None:
    given = {"": None, "made": adamw, "other": adamw(network().parameters())}[optimizer]
    loader: Any = data() if batch_size is None else DataLoader(data(), batch_size=batch_size)
    pydist.initialize(network(), given, loader, config=config)


@pytest.mark.parametrize(
    ("config", "optimizer", "batch_size", "message"),
    [
        ({}, "", 2, "there is no optimizer"),
        ({"optimizer": {"name": "AdmW"}}, "", 2, "no such class; did you mean 'AdamW'?"),
        ({"optimizer": {"name": "SGD", "params": {"l": 1}}}, "", 2, "does not fit SGD"),
        ({"optimizer": {"name": "SGD"}}, "made", 2, "names another one"),
        ({}, "other", 2, "4 parameters that are not the model's"),
        ({}, "made", None, "needs training.micro_batch_size"),
        ({"training": {"micro_batch_size": 3}}, "made", 2, "batch_size is 2"),
        ({"training": {"batch_size": 7}}, "made", None, "7, which 2 ranks can't share evenly"),
        ({"training": {"drop_last": True}}, "made", 2, "give them to the loader that is passed"),
        ({"training": {"clip_grad_norm": -1.0}}, "made", 2, "it must be more than 0"),
        ({"loader": {"split_batches": True}}, "made", 2, "loader.split_batches=True"),
        ({"training": {"dtype": "bfloat16"}}, "made", 2, "set optimizer.stage to 1 or 2"),
        ({"optimizer": {"offload": "cpu"}}, "made", 2, "is of a pydist.ShardedOptimizer: set"),
        ({"training": {"batch_sizes": 7}}, "made", 2, "did you mean training.batch_size?"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    config: dict[str, Any], optimizer: str, batch_size: int | None, message: str
) -> None:
    for outcome in rank_outcomes(initialize, 2, config, optimizer, batch_size):
        assert outcome.error == "InvalidUsage", outcome
        assert re.search(re.escape(message), outcome.message), outcome.message


def test_sizes_complete_each_other() -> None:
    assert batch_sizes(32, None, None, 4) == BatchSizes(8, 1)
    assert batch_sizes(32, 2, None, 4) == BatchSizes(2, 4)
    assert batch_sizes(32, None, 2, 4) == BatchSizes(4, 2)
    assert batch_sizes(32, 4, 2, 4) == BatchSizes(4, 2)
    assert batch_sizes(None, 4, None, 4) == BatchSizes(4, 1)
    assert batch_sizes(None, None, 3, 4) == BatchSizes(None, 3)
    for wrong in ((32, 4, 3, 4), (30, None, None, 4), (3, 4, None, 4)):
        with pytest.raises(pydist.InvalidUsage):
            batch_sizes(*wrong)


def tries_again() -> None:
    sizes = {"batch_size": 7, "micro_batch_size": 3}
    with pytest.raises(pydist.InvalidUsage, match="is not micro_batch_size"):
        pydist.initialize(network(), adamw, data(), config={"training": sizes})
    pydist.initialize(network(), adamw, DataLoader(data(), batch_size=2))


def test_a_refused_configuration_is_not_in_force() -> None:
    run_ranks(tries_again, 2)


def other_settings() -> None:
    pydist.init()
    clip = [0.1, 1.0][pydist.rank()]
    pydist.initialize(network(), adamw, config={"training": {"clip_grad_norm": clip}})


def test_ranks_with_other_settings_are_told() -> None:
    for outcome in rank_outcomes(other_settings, 2):
        assert outcome.error == "Mismatch"
        assert "clip_grad_norm" in outcome.message


def goes_on(folder: str) -> tuple[Any, str]:
    config: Any = {"optimizer": {"name": "SGD", "params": {"lr": 0.1}, "stage": 1}}
    engine, optimizer, *_ = pydist.initialize(network(), config=config)
    pydist.save(folder, model=engine, optimizer=optimizer)
    kept = pydist.checkpoint.config_of(folder)
    pydist.shutdown()
    _, optimizer, *_ = pydist.initialize(network(), config=kept)
    assert isinstance(optimizer, pydist.ShardedOptimizer)
    return kept["optimizer"], optimizer.optimizer_class.__name__


def test_a_checkpoint_has_what_makes_the_same_optimizer(tmp_path: Path) -> None:
    for kept, kind in run_ranks(goes_on, 2, str(tmp_path / "c")):
        assert kept == {"name": "SGD", "params": {"lr": 0.1}, "stage": 1}
        assert kind == "SGD"


def sharded_by_hand() -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return pydist.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1, stage=2)

    pydist.initialize(network(), make, config={"training": {"clip_grad_norm": 1.0}})
    return in_force.to_save()


def test_the_program_s_own_sharded_optimizer_is_noted() -> None:
    saved = {"training": {"clip_grad_norm": 1.0}, "optimizer": {"stage": 2}}
    assert run_ranks(sharded_by_hand, 1) == [saved]


def copies() -> tuple[str, Any]:
    engine, *_ = pydist.initialize(network(), adamw)
    copied = copy.deepcopy(engine)
    x, y = data()[:4]
    copied.backward(nn.functional.mse_loss(copied(x), y))
    with pytest.raises(pydist.InvalidUsage) as caught:
        copied.step()
    return str(caught.value), engine.optimizer is not None


def test_a_copy_does_not_step() -> None:
    told = ("a copy of the model has no optimizer: step the one it was made of", True)
    assert run_ranks(copies, 2) == [told] * 2


def two_in_turn() -> list[tuple[float | None, int]]:
    clipping: Any = {"training": {"clip_grad_norm": 0.1, "accumulation_steps": 2}}
    first, *_ = pydist.initialize(network(), adamw, config=clipping)
    second, *_ = pydist.initialize(network(), adamw, config={"training": {}})
    return [(each.clip_grad_norm, each.accumulation_steps) for each in (first, second)]


def test_a_second_model_has_a_configuration_of_its_own() -> None:
    assert run_ranks(two_in_turn, 2) == [[(0.1, 2), (None, 1)]] * 2


class Scaled(torch.optim.SGD):
    """Doesn't tell in its defaults what it was given."""

    def __init__(self, params: Any, lr: float, scale: float) -> None:
        super().__init__(params, lr=lr)
        self.scale = scale


def with_options_of_its_own(stage: int) -> str:
    try:
        _, optimizer, *_ = pydist.initialize(
            network(),
            lambda parameters: Scaled(parameters, 0.1, 2.0),
            config={"optimizer": {"stage": stage}},
        )
    except pydist.InvalidUsage as error:
        return str(error)
    return str(optimizer.scale)  # type: ignore[attr-defined]


def test_an_optimizer_that_can_not_be_made_anew_is_not_sharded() -> None:
    assert run_ranks(with_options_of_its_own, 2, 0) == ["2.0"] * 2
    for told in run_ranks(with_options_of_its_own, 2, 1):
        assert "what it was given as scale" in told
        assert "set optimizer.stage to 0" in told


def with_a_state(stage: int) -> list[Tensor]:
    model, optimizer, x, y = stepped_before()
    config: Any = {"optimizer": {"stage": stage}}
    engine, *_ = pydist.initialize(model, optimizer, config=config)
    engine.backward(nn.functional.mse_loss(engine(x), y))
    engine.step()
    return [p.detach().clone() for p in engine.parameters()]


def test_the_state_that_an_optimizer_has_goes_on() -> None:
    whole, sharded = (run_ranks(with_a_state, 2, stage)[0] for stage in (0, 1))
    assert all(map(torch.equal, whole, sharded))


def one_bias_apart() -> list[float]:
    engine, *_ = pydist.initialize(
        nn.Linear(2, 1), lambda parameters: torch.optim.SGD(list(parameters)[:1], lr=0.0)
    )
    norms = []
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 2)).sum())
        assert engine.bias.grad is not None
        norms.append(engine.bias.grad.item())
        engine.step()
    return norms


def test_gradients_of_other_parameters_do_not_pile_up() -> None:
    assert run_ranks(one_bias_apart, 2) == [[3.0, 3.0]] * 2
