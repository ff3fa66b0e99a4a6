"""`pydist.initialize`: model, optimizer, loader and scheduler, ready for several ranks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pydist.config import in_force
from pydist.config.fields import fields_of
from pydist.config.in_force import Configuration
from pydist.errors import InvalidUsage
from pydist.job import groups, membership
from pydist.job.arguments import a_type
from pydist.parallel.checks.replica_check import check_same
from pydist.sampling.loader import PreparedLoader, prepare
from pydist.sharding.made_anew import sharded_like
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.training.batch_sizes import batch_sizes
from pydist.training.engine import Engine


@in_force.taken_back_by_errors()
def initialize(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    data: Dataset[Any] | DataLoader[Any] | None = None,
    *,
    lr_scheduler: Callable[[Optimizer], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Configuration | None = None,
) -> tuple[Engine, Optimizer, PreparedLoader[Any] | None, Any]:
    """Makes what DeepSpeed's `initialize` makes, of a model and a configuration. All ranks call it.

    Joins the job if need be. `Config.from_deepspeed` reads DeepSpeed's own configurations.

    Args:
        model: As for `pydist.DataParallel`; with `training.dtype` its parameters are converted.
        optimizer: One of torch's over parameters of the model, which has made no step; or what
            makes one of parameters. By default the class `optimizer.name` of torch.optim with
            `optimizer.params`. With `optimizer.stage` 1 or 2, a `pydist.ShardedOptimizer` of its
            class, groups, options and hooks takes its place.
        data: A data set, which is shuffled and cut into batches of `training.micro_batch_size`; or
            a loader, as for `pydist.prepare`, whose batches have that size. Ranks get equally many
            samples, so some come twice in an epoch that can't be shared evenly; a loader that is
            prepared already stays as it is.
        lr_scheduler: Makes a scheduler of the optimizer, as `lambda optimizer: StepLR(optimizer,
            10)`. It steps with the optimizer.
        collate_fn: Of the loader that is made of a data set.
        config: As for `pydist.init`; by default what is in force.

    Returns:
        The model, whose `backward` and `step` are called for each batch; the optimizer; the
        prepared loader and the scheduler, each None where there is none.

    Raises:
        InvalidUsage: An argument is not supported; sizes of batches contradict each other; there is
            no optimizer, or one that can't be sharded; or as for `pydist.init`.
    """
    configuration = in_force.configuration_of(config)
    membership.init(config=configuration)
    # Of several models, each has its own: nothing is left of the configuration before.
    settings = in_force.current() if configuration is None else in_force.over_file(configuration)
    training, choice = settings["training"], settings["optimizer"]
    _require_same(training, choice)
    in_force.note("training", {}, training)
    sizes = batch_sizes(
        training.get("batch_size"),
        training.get("micro_batch_size"),
        training.get("accumulation_steps"),
        membership.world_size(),
    )
    stage = choice.get("stage", fields_of("optimizer")["stage"].default)
    dtype = training.get("dtype")
    clip_grad_norm = training.get("clip_grad_norm")
    if data is not None and settings["loader"].get("split_batches"):
        raise InvalidUsage(
            "loader.split_batches=True would divide training.micro_batch_size among the ranks once "
            "more: leave it out"
        )
    if dtype == "bfloat16" and stage == 0:
        raise InvalidUsage(
            "training.dtype='bfloat16' updates weights in float32, and a pydist.ShardedOptimizer "
            "keeps these: set optimizer.stage to 1 or 2"
        )
    if choice.get("offload") is not None and stage == 0:
        raise InvalidUsage(
            f"optimizer.offload={choice['offload']!r} is of a pydist.ShardedOptimizer: set "
            "optimizer.stage to 1 or 2"
        )
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise InvalidUsage(
            f"lr_scheduler is {a_type(lr_scheduler)}; pass what makes one of the optimizer, as "
            "lambda optimizer: StepLR(optimizer, 10)"
        )
    if dtype is not None:
        model.to(getattr(torch, dtype))
    engine = Engine(model)
    engine.expect_any_order()  # forwards may run ahead; the program has written no no_sync()
    engine.accumulation_steps = sizes.accumulation_steps
    engine.clip_grad_norm = clip_grad_norm
    engine.optimizer = _optimizer(engine, optimizer, choice, stage)
    if lr_scheduler is not None:
        engine.lr_scheduler = lr_scheduler(engine.optimizer)
        if isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise InvalidUsage(
                "ReduceLROnPlateau steps by a measure, which model.step() does not have: step it "
                "in the program, with what pydist.initialize returns as the optimizer"
            )
    loader = None if data is None else _loader(data, sizes.micro_batch_size, collate_fn, training)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _require_same(training: dict[str, Any], choice: dict[str, Any]) -> None:
    """Raises Mismatch where ranks would train by different settings."""
    facts = [
        f"{section}.{name}={value!r}"
        for section, table in (("training", training), ("optimizer", choice))
        for name, value in sorted(table.items())
    ]
    check_same(
        groups.communicator_of(None, "process_group"),
        "pydist.initialize's configuration",
        facts,
        "give all ranks the same configuration, or files with the same content",
    )


def _require_in(optimizer: Optimizer, model: nn.Module) -> None:
    own = set(model.parameters())
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
    if others:
        raise InvalidUsage(
            f"the optimizer has {len(others)} parameters that are not the model's: make it of "
            "model.parameters()"
        )


def _optimizer(
    engine: Engine,
    given: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    choice: dict[str, Any],
    stage: int,
) -> Optimizer:
    if given is None:
        name = choice.get("name")
        if name is None:
            raise InvalidUsage(
                "there is no optimizer: pass one, or set optimizer.name to a class of torch.optim"
            )
        found = getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            near = difflib.get_close_matches(name, dir(torch.optim), 1)
            raise InvalidUsage(
                f"optimizer.name is {name!r}, and torch.optim has no such class"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        params = choice.get("params", {})
        try:
            made = found(engine.parameters(), **params)
        except (TypeError, ValueError) as error:
            raise InvalidUsage(f"optimizer.params does not fit {name}: {error}") from error
    elif "name" in choice or "params" in choice:
        raise InvalidUsage(
            "an optimizer is passed, and the configuration names another one: leave out "
            "optimizer.name and optimizer.params, or don't pass it"
        )
    else:
        made = given if isinstance(given, Optimizer) else given(engine.parameters())
        if not isinstance(made, Optimizer):
            raise InvalidUsage(f"optimizer makes {a_type(made)}; it must make a torch optimizer")
    _require_in(made, engine)
    if isinstance(made, ShardedOptimizer):
        return made  # and what it was made with stays noted
    if stage == 0:
        in_force.note("optimizer", {}, choice)
        return made
    if "step" in vars(made):  # as a scheduler does, to count the steps
        raise InvalidUsage(
            f"optimizer.stage={stage} makes the {type(made).__name__} anew, and something has "
            "replaced its step(), as a scheduler does that was made of it, which would miss the "
            "new one: pass lr_scheduler=lambda optimizer: ..., wrap the optimizer that "
            "pydist.initialize returns, or set optimizer.stage to 0"
        )
    sharded: Optimizer = sharded_like(
        made, f"optimizer.stage={stage}", "set optimizer.stage to 0", stage=stage
    )
    in_force.note("optimizer", {}, choice)  # in place of what it was made anew with
    return sharded


def _loader(
    data: Dataset[Any] | DataLoader[Any],
    micro_batch_size: int | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    training: dict[str, Any],
) -> PreparedLoader[Any]:
    if not isinstance(data, DataLoader):
        if isinstance(data, IterableDataset):
            raise InvalidUsage(
                "data is an iterable data set, which takes its share by itself: pass a loader of it"
            )
        if micro_batch_size is None:
            raise InvalidUsage(
                "a data set needs training.micro_batch_size or training.batch_size; or pass a "
                "loader, which has a batch size of its own"
            )
        drop_last = training.get("drop_last", False)
        data = DataLoader(
            data, micro_batch_size, shuffle=True, collate_fn=collate_fn, drop_last=drop_last
        )
    elif collate_fn is not None or training.get("drop_last"):
        raise InvalidUsage(
            "collate_fn and training.drop_last are for the loader that is made of a data set: give "
            "them to the loader that is passed"
        )
    elif micro_batch_size is not None and data.batch_size not in (None, micro_batch_size):
        raise InvalidUsage(
            f"the loader's batch_size is {data.batch_size}, and the configuration's "
            f"micro_batch_size {micro_batch_size}: set one of them to the other, or pass the data "
            "set instead"
        )
    return data if isinstance(data, PreparedLoader) else prepare(data)
