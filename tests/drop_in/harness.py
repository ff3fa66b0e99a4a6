"""What a program of this folder is made of: the names that it swaps, its record, its declaration.

    from harness import Library, Record, program

    @program()
    def one_step(lib: Library, record: Record) -> None:
        model = lib.DataParallel(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(lib.share(torch.ones(12, 6))).mean()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)

README.md says how to add a program, arms.py how programs are run, comparison.py what is compared.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# What a program is compared with.
# - "one process": the same program in one process on the whole batch. Torch's DDP is held to it as
#   well, and pydist to both.
# - "torch DDP": the same program under torch's DDP on as many ranks, rank by rank, for programs of
#   which one process makes something else: batch norm, ignored parameters, dropout, ...
Reference = Literal["one process", "torch DDP"]


@dataclass(frozen=True)
class Library:
    """The names that differ between libraries. All else in a program is torch's."""

    # "one process", "torch DDP" or "pydist".
    name: str
    DataParallel: Any
    DistributedSampler: Any
    SyncBatchNorm: Any
    # (model, class, **options): an optimizer that shards its state over the ranks.
    ShardedOptimizer: Any
    rank: int
    world_size: int
    device: torch.device

    def share(self, whole: Tensor) -> Tensor:
        """This rank's rows of a batch of all ranks together: every world_size-th of them."""
        return whole[self.rank :: self.world_size].to(self.device)


class Alone(nn.Module):
    """What data parallelism comes to in one process: nothing, under DDP's names."""

    require_backward_grad_sync = True

    def __init__(self, module: nn.Module, **ddp_arguments: object) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def join(self, **arguments: object) -> Iterator[None]:
        yield

    def register_comm_hook(self, state: object, hook: object) -> None:
        pass


@dataclass(frozen=True)
class Copy:
    """What a tensor held: as an array, which is sent between processes ten times as fast."""

    dtype: str
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, tensor: Tensor) -> Copy:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        plain = dense.cpu().resolve_conj().resolve_neg()
        if plain.dtype == torch.bfloat16:  # which numpy has not got
            plain = plain.float()
        # A copy: a view would be sent with all of the memory that it looks into.
        return cls(str(tensor.dtype), plain.numpy().copy())


@dataclass
class Step:
    """What one call of `record` has found on one rank."""

    # Of which every rank, and one process, has the same.
    shared: dict[str, Any] = field(default_factory=dict)
    # Whose mean over the ranks is what one process has.
    averaged: dict[str, Any] = field(default_factory=dict)
    # Each rank's own, of which one process has nothing.
    local: dict[str, Any] = field(default_factory=dict)


class Record:
    """Copies of everything that training has changed, under the plain names of the module."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        loss: object = None,
        *,
        local: Mapping[str, object] | None = None,
        averaged: Mapping[str, object] | None = None,
        **shared: object,
    ) -> None:
        """Takes down a step: parameters, gradients, buffers, optimizer state, and what is given.

        Args:
            model: One module, wrapped or not, or several by name.
            optimizer: One optimizer, or several by name.
            loss: This rank's; the mean over the ranks is compared with one process's.
            local: Values that each rank has of its own; compared with torch's DDP alone.
            averaged: More values like the loss.
            shared: Values that every rank, and one process, has.
        """
        step = Step()
        for given, values in (
            (shared, step.shared),
            ({"loss": loss, **(averaged or {})}, step.averaged),
            (local or {}, step.local),
        ):
            for name, value in given.items():
                values.update(_leaves(name, value))
        names: dict[int, str] = {}
        for prefix, module in _by_name(model):
            step.shared.update(_state_of_module(prefix, module, names))
        for prefix, stepped in _by_name(optimizer):
            step.shared.update(_state_of_optimizer(prefix, stepped, names))
        self.steps.append(step)


def _by_name(given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    return list(given.items()) if isinstance(given, Mapping) else [("", given)]


def _state_of_module(
    prefix: str, module: nn.Module, names: dict[int, str]
) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters():
        plain = _plain(prefix, name)
        names[id(parameter)] = plain
        yield from _leaves(f"parameter {plain}", parameter)
        yield from _leaves(f"gradient {plain}", parameter.grad)
    for name, buffer in module.named_buffers():
        yield from _leaves(f"buffer {_plain(prefix, name)}", buffer)


def _state_of_optimizer(
    prefix: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option != "params" and isinstance(value, (int, float, Tensor)):
                yield from _leaves(f"option {prefix}{number}.{option}", value)
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{prefix}{number}.{place}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _leaves(f"state {name} {key}", value)


def _plain(prefix: str, name: str) -> str:
    """A name without what wrappers and `torch.compile` put in front of it."""
    plain = re.sub(r"(^|\.)(?:(?:module|_orig_mod)\.)+", r"\1", name)
    return f"{prefix}.{plain}" if prefix else plain


def _leaves(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Copies of the tensors, numbers and strings in a value, by where they stand in it."""
    if isinstance(value, Tensor):
        yield name, Copy.of(value)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _leaves(f"{name}[{number}]", part)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, value
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, which can't be recorded")


@dataclass(frozen=True)
class Program:
    """A declared program; `program` says what its fields mean."""

    module: str
    name: str
    reference: Reference
    without_ddp: str
    refused: str
    warns: str
    warns_alone: bool
    on_gpu: bool
    tolerance: float
    buffers_of_rank_0: bool


_Text = Callable[[Library, Record], None]
_AnyText = TypeVar("_AnyText", bound=_Text)

# What has been declared, by name; `load_programs` declares all.
PROGRAMS: dict[str, Program] = {}


def program(
    reference: Reference = "one process",
    *,
    without_ddp: str = "",
    needs: str = "",
    refused: str = "",
    warns: str = "",
    warns_alone: bool = True,
    on_gpu: bool = True,
    tolerance: float = 1e-9,
    buffers_of_rank_0: bool = False,
) -> Callable[[_AnyText], _AnyText]:
    """Declares a function to be a program.

    Args:
        reference: What it is compared with.
        without_ddp: Why torch's DDP does not run it, or makes other numbers than one process; it is
            then left out.
        needs: An argument of torch's DDP that it passes. Where this torch has no such argument, the
            program is left out.
        refused: What pydist says when it refuses the program, a regular expression. Then nothing
            else is compared.
        warns: What pydist warns of and DDP does not, a regular expression.
        warns_alone: Whether it does so with one rank as well.
        on_gpu: Whether it runs on the stand-ins for CUDA and NCCL as well. What these have not got
            are copies of storages (deep copies of buffers and states, pickles), sparse tensors,
            inference mode, forward-mode derivatives, fused optimizers, and `torch.cuda` itself.
        tolerance: How far values may be from the reference's, relatively and absolutely; the
            default is for float64.
        buffers_of_rank_0: Whether buffers are recorded when torch's DDP has each rank's own. DDP
            copies rank 0's in the next forward, pydist at the end of backward. So pydist's buffers
            of every rank are compared with those of DDP's rank 0.
    """

    def declare(text: _AnyText) -> _AnyText:
        name = text.__name__
        assert name not in PROGRAMS, f"there are two programs {name}"
        assert not (without_ddp and reference == "torch DDP"), name
        if needs and needs not in inspect.signature(DistributedDataParallel).parameters:
            return text
        PROGRAMS[name] = Program(
            text.__module__,
            name,
            reference,
            without_ddp,
            refused,
            warns,
            warns_alone,
            on_gpu,
            tolerance,
            buffers_of_rank_0,
        )
        return text

    return declare


def load_programs() -> list[Program]:
    """Every program of the folder `programs`."""
    import programs

    for found in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"programs.{found.name}")
    return list(PROGRAMS.values())
