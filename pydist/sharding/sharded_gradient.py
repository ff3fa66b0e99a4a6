"""What `parameter.grad` is where this rank has the average of a part of the gradient only.

Each rank has another part, so what torch's functions would make of it is nobody's gradient. Those
that people use before a step are done right, on all ranks' parts together: norms, and so
`torch.nn.utils.clip_grad_norm_`; scaling and clamping in place; the check of `torch.amp.GradScaler`
for values that are not finite. All others raise.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist._torch import (
    EACH,
    HAS_COMPATIBLE_TYPE,
    NORM_OF_EACH,
    UNSCALE_EACH,
    as_plain_tensors,
    on_each,
    runs_uncompiled,
    unscale_each,
)
from pydist.errors import InvalidUsage
from pydist.sharding.tensor_facts import FACTS

if TYPE_CHECKING:
    from pydist.sharding.gradient_norms import ReducedGradients
    from pydist.sharding.optimizer import ShardedOptimizer


class ShardedGradient(Tensor):
    """A gradient of which this rank has a part; has the shape and dtype of the whole, no values.

    What reads it past torch's dispatch, such as `torch.tensor(gradient)` or a transform of
    `torch.func`, finds NaN in every element.
    """

    _owner: weakref.ref[ShardedOptimizer]
    _index: int

    @staticmethod
    def of(owner: weakref.ref[ShardedOptimizer], index: int, parameter: Tensor) -> ShardedGradient:
        """Stands for the gradient of a parameter of an optimizer, which it does not keep alive."""
        # One element, expanded to the whole shape. Code that reads it past torch's functions sees
        # NaN (of integers, zeros).
        is_known = parameter.is_floating_point() or parameter.is_complex()
        nothing = complex(math.nan, math.nan) if parameter.is_complex() else math.nan
        stand_in = torch.full(
            (), nothing if is_known else 0, dtype=parameter.dtype, device=parameter.device
        )
        itself = stand_in.expand(parameter.shape).as_subclass(ShardedGradient)
        itself._owner = owner
        itself._index = index
        return itself

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEED_NO_VALUES:
            with as_plain_tensors():
                return func(*args, **kwargs)
        if func in _SAME_MEMORY:
            return args[0]
        if func == Tensor.data.__set__ and args[0] is args[1]:  # type: ignore[attr-defined]
            return None
        name = getattr(func, "__name__", str(func))
        handler = _HANDLERS.get(name)
        if handler is None:
            raise InvalidUsage(
                f"{_what_it_does(func, name)} of the gradient of {_names(args)}: each rank has the "
                "average of its part of it alone, as pydist.ShardedOptimizer updates no more; "
                "optimizer.gradient_of(parameter) gathers the whole one, norms and scaling in "
                "place work as they are"
            )
        return handler(name, *args, **kwargs)

    @property
    def _parts(self) -> ReducedGradients:
        owner = self._owner()
        if owner is None:
            raise InvalidUsage("the pydist.ShardedOptimizer that has this gradient is gone")
        return owner._gradients

    def __repr__(self) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return (
            f"ShardedGradient({self._parts.name_of(self._index)}, shape={shape}, "
            f"dtype={self.dtype}, {self._parts.part(self._index).numel()} elements here)"
        )

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise InvalidUsage(
            f"a copy of the gradient of {self._parts.name_of(self._index)}: each rank has its part "
            "of it alone; optimizer.gradient_of(parameter) gathers the whole one"
        )


@contextlib.contextmanager
@runs_uncompiled
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Sets gradients that are sharded to None, and puts them back afterwards."""
    with as_plain_tensors():
        hidden = [(p, p.grad) for p in parameters if isinstance(p.grad, ShardedGradient)]
        for parameter, _ in hidden:
            parameter.grad = None
    try:
        yield
    finally:
        with as_plain_tensors():
            for parameter, gradient in hidden:
                parameter.grad = gradient


def _what_it_does(func: Callable[..., Any], name: str) -> str:
    """For people: an attribute is a descriptor's method, `__get__` say."""
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    of = getattr(func, "__self__", None)  # of Python's properties, their function has the name
    attribute = getattr(getattr(of, "fget", of), "__name__", name)
    return {"__set__": "setting ", "__delete__": "deleting "}.get(name, "") + f".{attribute}"


def _names(args: Iterable[Any]) -> str:
    for value in args:
        if isinstance(value, ShardedGradient):
            return value._parts.name_of(value._index)
        if isinstance(value, (list, tuple)) and (name := _names(value)):
            return name
    return ""


def _part(gradient: ShardedGradient) -> Tensor:
    return gradient._parts.part(gradient._index)


def _convert(name: str, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> ShardedGradient:
    """For `module.to(...)`, where it changes nothing."""
    with as_plain_tensors():
        moved: Tensor = getattr(gradient, name)(*args, **kwargs)
    if moved is not gradient:
        raise InvalidUsage(
            f"the gradient of {_names([gradient])} can't be moved or converted: convert the model "
            "first, then wrap it, and make pydist.ShardedOptimizer last"
        )
    return gradient


def _check_operands(name: str, operands: Iterable[Any]) -> None:
    for value in operands:
        if isinstance(value, Tensor) and (isinstance(value, ShardedGradient) or value.numel() != 1):
            raise InvalidUsage(
                f"{name} of a gradient of which each rank has its part alone takes numbers, not "
                "tensors with several elements"
            )


def _change(name: str, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> ShardedGradient:
    _check_operands(name, [*args, *kwargs.values()])
    gradient._parts.require_same([*args, *kwargs.values()])
    getattr(_part(gradient), name)(*args, **kwargs)
    gradient._parts.note_change()
    return gradient


def _change_each(
    name: str, gradients: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Sequence[Tensor]:
    """What is done to many tensors at once, also with a factor for each."""
    if gradients and not any(isinstance(value, (list, tuple)) for value in args):
        _check_operands(name, [*args, *kwargs.values()])
        for owner in _owners(gradients):
            owner.require_same([*args, *kwargs.values()])
        parts = [_part(g) if isinstance(g, ShardedGradient) else g for g in gradients]
        parts = [part for part in parts if part.numel() != 0]
        is_scaled = name == f"{EACH}mul_" and isinstance(args[0], Tensor)
        with _scaling(gradients, args[0]) if is_scaled else contextlib.nullcontext():
            if parts:
                on_each(name, parts, *args, **kwargs)
        _note_changes(gradients)
        return gradients
    single = name.removeprefix(EACH)
    for number, gradient in enumerate(gradients):
        own = [value[number] if isinstance(value, (list, tuple)) else value for value in args]
        getattr(gradient, single)(*own, **kwargs)
    return gradients


def scale_each(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies gradients by a number, sharded ones and others; 16-bit ones are rounded once.

    torch's own operation on many tensors rounds the factor to their type on some devices. Waits for
    no device. All ranks call it where any of them is sharded.
    """
    for owner in _owners(gradients):
        owner.require_same([factor])
    with _scaling(gradients, factor):
        _scale_parts(gradients, factor)
    _note_changes(gradients)


@contextlib.contextmanager
def _scaling(gradients: Iterable[Tensor], factor: Tensor) -> Iterator[None]:
    """Around a multiplication in place, for who has copies of the gradients."""
    sharded = [g for g in gradients if isinstance(g, ShardedGradient)]
    with contextlib.ExitStack() as around:
        for owner in _owners(sharded):
            if owner.scaling is not None:
                indices = [g._index for g in sharded if g._parts is owner]
                if len(set(indices)) == len(indices):  # each once
                    around.enter_context(owner.scaling(factor, set(indices)))
        yield


def _scale_parts(gradients: Sequence[Tensor], factor: Tensor) -> None:
    parts = [_part(g) if isinstance(g, ShardedGradient) else g for g in gradients]
    parts = [part for part in parts if part.numel() != 0]
    for device in dict.fromkeys(part.device for part in parts):
        here, of_device = [part for part in parts if part.device == device], factor.to(device)
        narrow = [part for part in here if part.dtype in _NARROW]
        if len(narrow) < len(here):
            on_each(f"{EACH}mul_", [p for p in here if p.dtype not in _NARROW], of_device)
        for part in narrow:
            part.copy_(part.float().mul_(of_device))


def _note_changes(gradients: Iterable[Tensor]) -> None:
    """Tells the optimizer of each gradient that its gradients have changed."""
    for parts in _owners(gradients):
        parts.note_change()


def _owners(gradients: Iterable[Tensor]) -> list[ReducedGradients]:
    return list(dict.fromkeys(g._parts for g in gradients if isinstance(g, ShardedGradient)))


def _norm_of(gradient: ShardedGradient, order: Any, dtype: torch.dtype | None) -> Tensor:
    value = gradient._parts.norms(_order(order))[gradient._index]
    return value.to(dtype or gradient.dtype.to_real(), copy=True)


def _order(order: Any) -> float:
    if order is None or order == "fro":
        return 2.0
    if isinstance(order, (int, float)) or (isinstance(order, Tensor) and order.numel() == 1):
        return float(order)
    raise InvalidUsage(f"the norm {order!r} of a gradient of which each rank has its part alone")


def _norm(
    name: str,
    gradient: ShardedGradient,
    order: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Tensor:
    order = kwargs.pop("ord", kwargs.pop("p", order))
    if dim is not None or keepdim or any(value is not None for value in kwargs.values()):
        raise InvalidUsage(
            f"{name} along dimensions of the gradient of {_names([gradient])}, of which each rank "
            "has its part alone: optimizer.gradient_of(parameter) gathers the whole one"
        )
    return _norm_of(gradient, order, dtype)


def _linalg_norm(
    name: str, gradient: ShardedGradient, order: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """`torch.linalg.norm`: of all elements without an order; with one only of a vector."""
    order = kwargs.pop("ord", order)
    if order is not None and gradient.dim() != 1:
        raise InvalidUsage(
            f"{name} of order {order!r} of the gradient of {_names([gradient])}, of which each "
            "rank has its part alone: torch.linalg.vector_norm is of all elements, and "
            "optimizer.gradient_of(parameter) gathers the whole one"
        )
    return _norm(name, gradient, order, *args, **kwargs)


def _norm_of_each(
    _name: str,
    gradients: Sequence[Tensor],
    order: Any = 2,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> list[Tensor]:
    order = kwargs.pop("ord", order)
    return [
        _norm_of(gradient, order, dtype)
        if isinstance(gradient, ShardedGradient)
        else torch.linalg.vector_norm(gradient, order, dtype=dtype)
        for gradient in gradients
    ]


def _check_finite_and_unscale(
    _name: str, gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor
) -> None:
    """For `torch.amp.GradScaler`: a step is left out on all ranks, or on none."""
    parts = [_part(g) if isinstance(g, ShardedGradient) else g for g in gradients]
    parts = [part for part in parts if part.numel() != 0]
    if parts:
        unscale_each(parts, found_inf, inverse_scale)
        # Alone of those in place, this operation of torch's does not count itself.
        torch.autograd.graph.increment_version(parts)
    owners = _owners(gradients)
    for owner in owners:
        owner.note_own_finite(found_inf)
    # All owners have the same ranks, so any one of them can combine.
    owners[0].combine(found_inf, "max")
    _note_changes(gradients)


_NARROW = (torch.bfloat16, torch.float16)

_IN_PLACE = (
    "add_",
    "clamp_",
    "clamp_max_",
    "clamp_min_",
    "clip_",
    "div_",
    "mul_",
    "nan_to_num_",
    "neg_",
    "sign_",
    "sub_",
    "zero_",
)

_CONVERSIONS = ("bfloat16", "cpu", "cuda", "double", "float", "half", "to")

_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_IN_PLACE, _change),
    **{f"{EACH}{name}": _change_each for name in _IN_PLACE},
    "__imul__": lambda _name, *args: _change("mul_", *args),
    "__itruediv__": lambda _name, *args: _change("div_", *args),
    "linalg_norm": _linalg_norm,
    "linalg_vector_norm": _norm,
    **dict.fromkeys(_CONVERSIONS, _convert),
    "norm": _norm,
    NORM_OF_EACH: _norm_of_each,
    UNSCALE_EACH: _check_finite_and_unscale,
}

# No autograd graph has a gradient that is sharded: these would be the same over again, and what
# changes one in place changes the other.
_SAME_MEMORY: set[Any] = {
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.detach,
    torch.detach,
}

_NEED_NO_VALUES = FACTS | {Tensor.detach_, HAS_COMPATIBLE_TYPE}


def part_norm(part: Tensor, order: float) -> Tensor:
    """The term that a rank adds to a norm, in float64: see `whole_norms`."""
    if part.numel() == 0:
        nothing = math.inf if order == -math.inf else 0.0
        return torch.full((), nothing, dtype=torch.float64, device=part.device)
    wide = torch.complex128 if part.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(part, order, dtype=wide)
    return norm if math.isinf(order) or order == 0 else norm.pow(order)


def whole_norms(parts: Tensor, order: float, combine: Callable[[Tensor, str], None]) -> Tensor:
    """The norms of wholes, from what each rank's `part_norm` found. All ranks call it."""
    if math.isinf(order):
        combine(parts, "max" if order > 0 else "min")
        return parts
    combine(parts, "sum")
    return parts if order == 0 else parts.pow(1 / order)
