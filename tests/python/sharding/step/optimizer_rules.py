"""The optimizers' rules: a step of each by torch's class, and one by the kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from pydist import _native

COUNT = 4099


@dataclass
class Arrays:
    """A segment, as `adam_step` and `sgd_step` take it."""

    parameter: Tensor
    gradient: Tensor
    states: list[Tensor] = field(default_factory=list)
    master: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.parameter if self.master is None else self.master


def ordinary_values(count: int, dtype: torch.dtype) -> Tensor:
    scale = torch.exp(torch.randn(count, dtype=torch.float64) * 3)
    return (torch.randn(count, dtype=torch.float64) * scale).to(dtype)


Values = Callable[[int, torch.dtype], Tensor]


def arrays_of(
    dtype: torch.dtype, state_count: int, values: Values, gradient_dtype: torch.dtype | None = None
) -> Arrays:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    state = [values(COUNT, wide) for _ in range(state_count)]
    master = values(COUNT, wide)
    is_16_bit = dtype.itemsize == 2
    return Arrays(
        parameter=master.to(dtype),
        gradient=values(COUNT, wide).to(gradient_dtype or dtype),
        # The first moment may be negative, the second and its maximum not.
        states=[tensor.abs() if i else tensor for i, tensor in enumerate(state)],
        master=master if is_16_bit else None,
    )


def in_lists(arrays: Arrays) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    """Parameters, gradients and masters of one segment."""
    master = None if arrays.master is None else [arrays.master]
    return [arrays.parameter], [arrays.gradient], master


class Rule:
    """The keyword arguments of a class of torch's, with what pydist's step takes beside them."""

    # Those that torch's class does not have.
    beside: ClassVar[tuple[str, ...]]
    # How many states there are for each element.
    state_count: int

    def options(self) -> dict[str, Any]:
        """The arguments of torch's class."""
        return {key: value for key, value in vars(self).items() if key not in self.beside}

    def optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        """Torch's, unfused, over one parameter."""
        raise NotImplementedError

    def ours(self, arrays: Arrays, gradient_scale: float = 1.0) -> None:
        """Steps by pydist's kernel."""
        raise NotImplementedError

    def torchs(self, arrays: Arrays, parameter: Tensor) -> None:
        """Steps by torch's class, from the states in `arrays`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Rule):
    beside: ClassVar = ("decoupled", "step")

    decoupled: bool = True
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    step: int = 3

    @property
    def state_count(self) -> int:
        return 3 if self.amsgrad else 2

    def optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind([parameter], **self.options(), foreach=False)

    def ours(self, arrays: Arrays, gradient_scale: float = 1.0) -> None:
        options = {key: value for key, value in vars(self).items() if key not in _NAMED_OTHERWISE}
        beta1, beta2 = self.betas
        states = [[state] for state in arrays.states]
        _native.adam_step(
            *in_lists(arrays),
            *states,
            beta1=beta1,
            beta2=beta2,
            gradient_scale=gradient_scale,
            step=[torch.tensor(self.step - 1.0)],
            **options,
        )

    def torchs(self, arrays: Arrays, parameter: Tensor) -> None:
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        optimizer = self.optimizer(parameter)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(self.step - 1)),
            **dict(zip(keys, arrays.states, strict=False)),
        }
        optimizer.step()


# The kernel takes two numbers, sees by the states whether there is a third one, and counts steps.
_NAMED_OTHERWISE = ("betas", "amsgrad", "step")


@dataclass(frozen=True)
class Sgd(Rule):
    beside: ClassVar = ("begins",)

    lr: float = 0.1
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    begins: bool = False

    @property
    def state_count(self) -> int:
        return 1 if self.momentum else 0

    def optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter], **self.options(), foreach=False)

    def ours(self, arrays: Arrays, gradient_scale: float = 1.0) -> None:
        options = {**vars(self), "begins": [self.begins]}
        _native.sgd_step(
            *in_lists(arrays), arrays.states or None, gradient_scale=gradient_scale, **options
        )

    def torchs(self, arrays: Arrays, parameter: Tensor) -> None:
        optimizer = self.optimizer(parameter)
        if self.momentum and not self.begins:
            optimizer.state[parameter] = {"momentum_buffer": arrays.states[0]}
        optimizer.step()
        if self.momentum:
            arrays.states = [optimizer.state[parameter]["momentum_buffer"]]


ADAMS = [
    Adam(),
    Adam(step=1, weight_decay=0.0),
    Adam(amsgrad=True, maximize=True, step=1000),
    Adam(decoupled=False, weight_decay=0.1),
    Adam(decoupled=False, weight_decay=0.0, amsgrad=True),
    Adam(lr=50.0, betas=(0.3, 0.6), eps=0.0, step=2),
    Adam(betas=(0.0, 0.0), maximize=True),
]

SGDS = [
    Sgd(momentum=0.0),
    Sgd(momentum=0.0, weight_decay=0.1, maximize=True),
    Sgd(begins=True, weight_decay=0.1),
    Sgd(dampening=0.3, maximize=True, lr=30.0),
    Sgd(nesterov=True, weight_decay=0.1),
    Sgd(nesterov=True, begins=True),
]


DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]
