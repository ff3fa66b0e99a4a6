"""Lightning's Trainer with sharded optimizers, beside its own DDP on gloo."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
import torch.distributed as dist
import toy_training as toy
from launch import Ranks, run_ranks
from torch import nn
from torch.optim import lr_scheduler

import pydist
from pydist.integrations.sharded_optimizers import shard

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: make test-frameworks installs it",
)

LIMIT_S = 50.0
SHARDED = ["pydist_sharded", "pydist_sharded_stage_2"]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, runs.TORCHRUN) as ranks:
        yield ranks


def one_group(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def groups_and_schedule(model: Any) -> Any:
    """Named parameters in two groups, and a schedule that is made of two."""
    first, _, second = model.network
    groups = [
        {"params": list(first.named_parameters("first"))},
        {"params": list(second.named_parameters("second")), "lr": 0.02, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    later = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, later], milestones=[2])
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def plateau(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "loss"}


def with_optimizers(package: str, configure: Callable[[Any], Any], **sizes: Any) -> Any:
    """The regression with optimizers of the test's own."""
    model = runs.regression(package, **sizes)
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"configure_optimizers": configure})
    return model


@toy.leaving()
def trained(
    package: str, strategy: str, path: str, configure: Callable[[Any], Any], settings: Any
) -> Any:
    """Two epochs of four steps; the losses, and what the checkpoint holds."""
    trainer = runs.trainer_of(package, strategy, 2, max_epochs=2, **settings)
    # So says a schedule that does not know of the optimizer's steps.
    warnings.filterwarnings("error", r".*optimizer\.step\(\)")
    model = with_optimizers(package, configure, length=24, batch_size=3)
    trainer.fit(model)
    kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    names = ("state_dict", "optimizer_states", "lr_schedulers")
    kept = {name: runs.plain(saved[name]) for name in names}
    # Texts can't be close to each other.
    kept["lr_schedulers"] = [
        {key: value for key, value in schedule.items() if not isinstance(value, str)}
        for schedule in kept["lr_schedulers"]
    ]
    return model.losses, kinds, kept


def without_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """torch keeps the names of parameters that were given with names."""
    for state in checkpoint["optimizer_states"]:
        for group in state["param_groups"]:
            group.pop("param_names", None)
    return checkpoint


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    ("package", "configure", "settings"),
    [
        ("lightning", one_group, {}),
        ("pytorch_lightning", one_group, {}),
        ("lightning", groups_and_schedule, {}),
        ("lightning", plateau, {}),
        ("lightning", one_group, {"accumulate_grad_batches": 2}),
        ("lightning", one_group, {"gradient_clip_val": 0.1}),
        (
            "lightning",
            one_group,
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
        ("lightning", one_group, {"precision": "bf16-mixed"}),
    ],
    ids=["one", "other tree", "groups", "plateau", "accumulation", "norm", "value", "bf16"],
)
def test_the_same_losses_and_checkpoint_as_ddp(
    two: Ranks,
    tmp_path: Path,
    strategy: str,
    package: str,
    configure: Callable[[Any], Any],
    settings: dict[str, Any],
) -> None:
    ours, theirs = (
        two.run(trained, package, name, str(tmp_path / name), configure, settings, timeout=LIMIT_S)
        for name in (strategy, "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert len(own[0]) == 8
        assert own[0] == pytest.approx(their[0], rel=1e-5)
        assert own[1] == ["ShardedOptimizer"]
        kept, expected = without_names(own[2]), without_names(their[2])
        assert kept.keys() == expected.keys()
        torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)


@toy.leaving()
def went_on(strategy: str, ranks: int, path: str, resumes: bool) -> Any:
    """Three epochs of three steps, with a checkpoint after the fifth; or what follows it."""
    callbacks = [] if resumes else [runs.saving_at("lightning", 5, path)]
    trainer = runs.trainer_of("lightning", strategy, ranks, max_epochs=3, callbacks=callbacks)
    sizes = {"length": 36, "batch_size": 12 // ranks}
    model = with_optimizers("lightning", groups_and_schedule, **sizes)
    trainer.fit(model, ckpt_path=path if resumes else None)
    return model.losses, runs.plain(model.state_dict())


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        ("pydist_sharded", "pydist_sharded", 3),
        ("pydist_sharded", "pydist_sharded_stage_2", 1),
        ("pydist_sharded_stage_2", "pydist", 2),
        ("pydist", "pydist_sharded_stage_2", 2),
    ],
)
def test_a_checkpoint_goes_on_with_other_ranks_and_strategies(
    two: Ranks, tmp_path: Path, before: str, after: str, ranks: int
) -> None:
    path = str(tmp_path / "amid.ckpt")
    whole = two.run(went_on, before, 2, path, False, timeout=LIMIT_S)
    rest = run_ranks(went_on, ranks, after, ranks, path, True, env=runs.TORCHRUN, timeout=LIMIT_S)

    def means(outcomes: list[Any]) -> list[float]:
        columns = zip(*(losses for losses, _ in outcomes), strict=True)
        return [sum(column) / len(column) for column in columns]

    assert len(means(rest)) == 4
    assert means(rest) == pytest.approx(means(whole)[5:], rel=1e-5)
    for _, weights in rest:
        torch.testing.assert_close(weights, whole[0][1], rtol=1e-5, atol=1e-6)


def counting(state: dict[str, Any]) -> None:
    """A hook's work, with all ranks: how many parameters there is a state of, on all of them."""
    count = torch.tensor(len(state["state"]))
    dist.all_reduce(count)
    state["count"] = int(count)


@toy.leaving()
def saved_with_collectives(strategy: str, path: str) -> list[Any]:
    """What hooks have added to a checkpoint that call collectives while it is made."""
    trainer = runs.trainer_of("lightning", strategy, 2, max_epochs=1)

    def configure(model: Any) -> Any:
        optimizer = one_group(model)
        optimizer.register_state_dict_post_hook(lambda _, state: counting(state))
        return optimizer

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        counting({"state": checkpoint["optimizer_states"][0]["state"]})
        checkpoint["ranks"] = int(self.all_gather(torch.tensor(1)).sum())

    model = with_optimizers("lightning", configure, length=24, batch_size=3)
    model.__class__ = type("Hooked", (type(model),), {"on_save_checkpoint": on_save_checkpoint})
    trainer.fit(model)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    return [saved["optimizer_states"][0]["count"], saved["ranks"]]


@pytest.mark.parametrize("strategy", ["pydist_sharded", "ddp"])
def test_hooks_may_call_collectives_while_a_checkpoint_is_made(
    two: Ranks, tmp_path: Path, strategy: str
) -> None:
    path = str(tmp_path / "hooked.ckpt")
    assert two.run(saved_with_collectives, strategy, path, timeout=LIMIT_S) == [[8, 2]] * 2


@toy.leaving()
def in_16_bits(strategy: str, path: str, resumes: bool) -> Any:
    """An epoch in which a part of the model gets no gradients, and another one in which it does."""
    epochs = 2 if resumes else 1
    trainer = runs.trainer_of("lightning", strategy, 2, max_epochs=epochs, precision="bf16-true")
    model = runs.regression("lightning", length=24, batch_size=3)
    model.unused = nn.Linear(2, 1, bias=False)
    kind = type(model)

    def training_step(self: Any, batch: Any, step: int) -> Any:
        return kind.training_step(self, batch, step) + (self.unused.weight.sum() if resumes else 0)

    model.__class__ = type(kind.__name__, (kind,), {"training_step": training_step})
    trainer.fit(model, ckpt_path=path if resumes else None)
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
    return len(model.losses), sorted(state)


def test_16_bits_go_on_unsharded_where_a_parameter_was_never_updated(
    two: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / "bf16.ckpt")
    before = two.run(in_16_bits, "pydist_sharded", path, False, timeout=LIMIT_S)
    assert before == [(4, [0, 1, 2, 3])] * 2
    after = two.run(in_16_bits, "pydist", path, True, timeout=LIMIT_S)
    assert after == [(4, [0, 1, 2, 3, 4])] * 2


@pytest.mark.parametrize("strategy", SHARDED)
def test_two_optimizers_by_hand(two: Ranks, strategy: str) -> None:
    ours = two.run(runs.gan, strategy, timeout=LIMIT_S)
    theirs = two.run(runs.gan, "ddp_find_unused_parameters_true", timeout=LIMIT_S)
    for own, their in zip(ours, theirs, strict=True):
        assert len(own[0]) == 16
        assert own[0] == pytest.approx(their[0], rel=1e-5)
        torch.testing.assert_close(own[1], their[1], rtol=1e-4, atol=1e-5)


@toy.leaving()
def twice_and_tested(strategy: str) -> Any:
    """Two trainings of one model, and its loss over all samples."""
    model = runs.regression("lightning", length=24, batch_size=3)
    for _ in range(2):
        runs.trainer_of("lightning", strategy, 2, max_epochs=1).fit(model)
    trainer = runs.trainer_of("lightning", strategy, 2)
    (results,) = trainer.test(model, verbose=False)
    return model.losses, results["val_loss"]


def test_a_model_is_trained_again_and_tested(two: Ranks) -> None:
    ours, theirs = (
        two.run(twice_and_tested, name, timeout=LIMIT_S) for name in ("pydist_sharded", "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert len(own[0]) == 8
        assert own[0] == pytest.approx(their[0], rel=1e-5)
        assert own[1] == pytest.approx(their[1], rel=1e-5)


class _Forgetful(torch.optim.SGD):
    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=0.01 * scale)


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters())


def forgetful(model: Any) -> Any:
    return _Forgetful(model.parameters(), scale=2.0)


def of_another(model: Any) -> Any:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("configure", "said"),
    [(lbfgs, "LBFGS"), (forgetful, "given as scale"), (of_another, "no model that is set up")],
)
def test_what_cannot_be_sharded_is_refused(
    two: Ranks, tmp_path: Path, configure: Callable[[Any], Any], said: str
) -> None:
    arguments = ("lightning", "pydist_sharded", str(tmp_path / "never"), configure, {})
    for outcome in two.outcomes(trained, *arguments, timeout=LIMIT_S):
        assert outcome.error == "InvalidUsage"
        assert said in outcome.message


class Around(torch.optim.SGD):
    """A program's own optimizer, which has another one beside its own state."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([nn.Parameter(torch.zeros(3))], lr=0.1)
        self.optimizer = optimizer


@toy.leaving()
def states_of_wrappers() -> list[Any]:
    """How many parameters the state of Lightning's wrapper is of, and that of a program's."""
    trainer = runs.trainer_of("lightning", "pydist_sharded", 2, max_epochs=1, limit_val_batches=0)
    model = runs.regression("lightning", 12, 3)
    counts = []

    def on_train_end(self: Any) -> None:
        wrapper = self.optimizers()
        for optimizer in (wrapper, Around(wrapper.optimizer)):
            state = trainer.strategy.optimizer_state(optimizer)
            counts.append(len(state["param_groups"][0]["params"]) if state else 0)

    model.__class__ = type("Asks", (type(model),), {"on_train_end": on_train_end})
    trainer.fit(model)
    return counts


def test_only_lightnings_wrapper_stands_for_what_is_in_it(two: Ranks) -> None:
    # The whole state of what is sharded is on rank 0, and the other one is each rank's.
    assert two.run(states_of_wrappers, timeout=LIMIT_S) == [[4, 1], [0, 1]]


@toy.leaving()
def made_by_hand() -> list[str]:
    """A class that can't be made anew, sharded by the program."""

    def configure(model: Any) -> Any:
        wrapper = model.trainer.strategy.model
        return pydist.ShardedOptimizer(wrapper, _Forgetful, scale=2.0)

    trainer = runs.trainer_of("lightning", "pydist_sharded", 2, max_epochs=1)
    trainer.fit(with_optimizers("lightning", configure, length=24, batch_size=3))
    return [optimizer.optimizer_class.__name__ for optimizer in trainer.optimizers]


def test_a_program_may_shard_an_optimizer_itself(two: Ranks) -> None:
    assert two.run(made_by_hand, timeout=LIMIT_S) == [["_Forgetful"]] * 2


# Of torch.optim: those that treat every element for itself.
ELEMENT_WISE = [
    *("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
]


@toy.leaving()
def every_class() -> list[str]:
    """Shards one of each."""
    pydist.init()
    made = []
    for name in ELEMENT_WISE:
        network = toy.network()
        wrapper = pydist.DataParallel(network)
        given = getattr(torch.optim, name)(wrapper.parameters())
        (optimizer,) = shard([given], [], caller="a test", otherwise="leave it")
        wrapper(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        made.append(optimizer.optimizer_class.__name__)
    return made


def test_each_class_of_torchs_that_can_be_sharded_is(two: Ranks) -> None:
    assert two.run(every_class, timeout=LIMIT_S) == [ELEMENT_WISE] * 2
