"""Whether a class of optimizers can be sharded: tries it out on small tensors.

Nothing tells from outside whether a class treats each element for itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist.sharding.state.ranges import is_of_range

# A schedule may begin with a rate of zero, which would show nothing. And classes that estimate how
# far to go multiply the estimate by the rate, so with less it would grow too slowly.
_LEAST_LR = 1.0


def unhooked_step(optimizer: Optimizer) -> None:
    """Steps without the hooks and profiles of an optimizer of its own."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Lets trials run on the host, and leave no trace in torch's random numbers."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the steps that count say it
        yield


class Trial:
    """An optimizer over tensors of nobody's, stepped by each of some lists of gradients.

    Made within `apart()`.

    Args:
        optimizer_class: The class.
        options: That it is given.
        groups: Tensors and their own options, for each parameter group.
        gradients: For each step those of the tensors, which are the same in every group.

    Attributes:
        optimizer: As it is after the steps.
        changed_option: The key of a group that they have changed or added; None: they left all.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
        groups: Sequence[tuple[Sequence[Tensor], Mapping[str, Any]]],
        gradients: Sequence[Sequence[Tensor]],
    ) -> None:
        self.optimizer = optimizer_class(
            [{**copy_of(own), "params": list(tensors)} for tensors, own in groups],
            **copy_of(options),
        )
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()  # classes that average parameters only step in this mode
        for group in self.optimizer.param_groups:
            _let_it_move(group)
        before = [copy_of(without_tensors(g)) for g in self.optimizer.param_groups]
        for given in gradients:
            for tensors, _ in groups:
                for tensor, gradient in zip(tensors, given, strict=True):
                    tensor.grad = gradient.clone()
            unhooked_step(self.optimizer)
        after = [without_tensors(g) for g in self.optimizer.param_groups]
        changed = (changed_key(*pair) for pair in zip(before, after, strict=True))
        self.changed_option = next((key for key in changed if key is not None), None)


def copy_of(value: Any) -> Any:
    """An option, or several, that nobody else writes into."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copy_of(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_of(item) for item in value)
    return value


def changed_key(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """What was added or changed in a dictionary of which there is a `copy_of`."""
    return next((k for k, v in after.items() if k not in before or not _same(before[k], v)), None)


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        after = after.detach().cpu()
        return before.dtype == after.dtype and torch.equal(before, after)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return before.keys() == after.keys() and changed_key(before, after) is None
    if type(before) in (list, tuple) and type(before) is type(after):
        return len(before) == len(after) and all(map(_same, before, after))
    return before is after or (type(before) is type(after) and bool(before == after))


def without_tensors(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group, but for its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _let_it_move(group: dict[str, Any]) -> None:
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        lr.clamp_(min=_LEAST_LR)
    elif isinstance(lr, (int, float)):
        group["lr"] = max(lr, _LEAST_LR)


# -- whole parameters, and the same in pieces

# The second shape of the second set is for classes that treat convolutions differently. A class
# that takes matrices alone raises there; it has been tried with the first set. The third set is for
# what classes do only from some size on: factors from 16 or 128 rows, 8 bits from 4096 elements.
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((8, 12), (12, 8)),
    ((8, 12), (6, 4, 2, 2)),
    ((160, 136), (136, 160)),
)
# Where pieces end: vector code rounds the ends of arrays in its own way.
_PIECE_MULTIPLE = 32
# Number of the parameter, begin and end.
_Piece = tuple[int, int, int]
# How the gradients are scaled, step by step, so that bounds on norms, and on ratios to earlier
# norms, come into play.
_SCALES = (1.0, 0.5, 2.0, 100.0, 1.0, 0.1)
# Element-wise classes differ by rounding at most: in float64 by 1e-15 of how far a parameter moves,
# and some digits more where that is a difference. What depends on the shapes or norms of pieces,
# whose elements and gradients differ in scale, is another number altogether. float32 is for
# classes that take nothing else.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass
class Verdict:
    """What trials tell of a class with some options; see `try_in_pieces`.

    Attributes:
        changed_option: A key of its parameter groups that its step changes.
        keeps_common_state: Whether it keeps state that is of no parameter.
        undivided_state: A key of the state of pieces whose value is neither of their shape nor one
            number.
        is_torn: Whether pieces get other values than whole parameters.
        error: What pieces make it raise, and whole parameters don't.
    """

    changed_option: str | None = None
    keeps_common_state: bool = False
    undivided_state: str | None = None
    is_torn: bool = False
    error: Exception | None = None

    @property
    def is_against(self) -> bool:
        """Whether pieces are no good, so that no further trial is needed."""
        return self.is_torn or self.undivided_state is not None or self.error is not None


def try_in_pieces(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    group_options: Sequence[Mapping[str, Any]],
) -> Verdict:
    """Steps a class on whole parameters, and on their pieces in optimizers of their own.

    Tells nothing of a class that raises on whole parameters for a reason of its own, and not
    whether pieces differ where two runs on whole parameters do, as with random numbers.

    Args:
        optimizer_class: The class.
        options: That it is given.
        group_options: The own ones of each parameter group.
    """
    verdict = Verdict()
    with apart():
        for shapes in _SHAPES:
            if verdict.is_against:
                break  # what multiplies matrices of all elements takes long with larger ones
            for dtype in _TOLERANCES:
                starts, given = _problem(shapes, dtype)
                if _try_problem(verdict, optimizer_class, options, group_options, starts, given):
                    break
    return verdict


def _try_problem(
    verdict: Verdict,
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    group_options: Sequence[Mapping[str, Any]],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> bool:
    """Adds to a verdict; returns whether the class takes whole parameters like these."""

    def run(
        cut: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> tuple[Trial, list[list[Tensor]]]:
        groups = [(cut(starts), own) for own in group_options]
        trial = Trial(optimizer_class, options, groups, [cut(given) for given in gradients])
        return trial, [[tensor.detach() for tensor in tensors] for tensors, _ in groups]

    try:
        trial, whole = run(_copies)
        _, again = run(_copies)
    except Exception:  # whatever it needs
        return False
    verdict.changed_option = verdict.changed_option or trial.changed_option
    verdict.keeps_common_state |= any(not isinstance(k, Tensor) for k in trial.optimizer.state)
    if not _all_near(starts, whole, again):
        return True
    layout = _pieces_of(starts)
    try:
        cuts = [run(functools.partial(_cut, pieces)) for pieces in layout]
    except Exception as error:
        verdict.error = error
        return True
    undivided = (_undivided_state(trial.optimizer) for trial, _ in cuts)
    verdict.undivided_state = next((key for key in undivided if key is not None), None)
    of_groups = zip(*(tensors for _, tensors in cuts), strict=True)
    joined = [_joined(layout, parts, starts) for parts in of_groups]
    verdict.is_torn |= not _all_near(starts, whole, joined)
    return True


def _problem(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values of parameters, and their gradients for each step.

    Gradients have something in common, so that estimates of how far to go grow.
    """
    random = torch.Generator().manual_seed(0)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")

    def rows(shape: tuple[int, ...], least: float, most: float) -> Tensor:
        scales = torch.logspace(
            math.log10(least), math.log10(most), shape[0], dtype=torch.float64, device="cpu"
        )
        return scales.view(-1, *[1] * (len(shape) - 1))

    starts = [numbers(shape) * rows(shape, 0.2, 5.0) for shape in shapes]
    common = [numbers(shape) for shape in shapes]
    gradients = []
    for scale in _SCALES:
        given = [
            (shared + numbers(shape)) * rows(shape, 3.0, 0.3) * scale
            for shape, shared in zip(shapes, common, strict=True)
        ]
        # Gradients orthogonal to the values, as in front of a normalisation, which some classes
        # look for.
        value, gradient = starts[1].flatten(1), given[1].flatten(1)
        along = (value * gradient).sum(1, keepdim=True) / value.square().sum(1, keepdim=True)
        given[1] = (gradient - along * value).view(shapes[1])
        gradients.append(given)
    return [t.to(dtype) for t in starts], [[t.to(dtype) for t in given] for given in gradients]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [nn.Parameter(tensor.clone()) for tensor in tensors]


def _pieces_of(tensors: Sequence[Tensor]) -> list[list[_Piece]]:
    """Two tensors in three optimizers, as shards have them."""
    first, second = (tensor.numel() for tensor in tensors)
    one, two = (count // 3 // _PIECE_MULTIPLE * _PIECE_MULTIPLE for count in (first, second))
    return [[(0, 0, one)], [(0, one, first), (1, 0, two)], [(1, two, second)]]


def _undivided_state(optimizer: Optimizer) -> str | None:
    """The name of state that can't be cut along with its piece; None if there is none."""
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, Tensor) and isinstance(values, Mapping):
            for key, value in values.items():
                is_tensor = isinstance(value, Tensor) and value.numel() > 1
                is_odd = is_tensor and value.shape != parameter.shape
                if is_odd or is_of_range(value, parameter.numel()):
                    return str(key)
    return None


def _cut(pieces: Sequence[_Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[number].flatten()[begin:end].clone() for number, begin, end in pieces]


def _joined(
    layout: Sequence[Sequence[_Piece]],
    parts: Sequence[Sequence[Tensor]],
    starts: Sequence[Tensor],
) -> list[Tensor]:
    """Whole tensors again, of the pieces that every optimizer has of one group."""
    joined = [torch.empty_like(start) for start in starts]
    for pieces, tensors in zip(layout, parts, strict=True):
        for (number, begin, end), tensor in zip(pieces, tensors, strict=True):
            joined[number].view(-1)[begin:end] = tensor
    return joined


def _all_near(
    starts: Sequence[Tensor],
    wanted: Sequence[Sequence[Tensor]],
    found: Sequence[Sequence[Tensor]],
) -> bool:
    """Whether values are the same but for rounding; anything is, where NaN is wanted."""
    for of_group, other in zip(wanted, found, strict=True):
        for start, one, two in zip(starts, of_group, other, strict=True):
            moved = (one - start).nan_to_num(0.0, 0.0, 0.0).abs().max()
            rounding = 32 * torch.finfo(start.dtype).eps * start.abs().max()
            allowed = _TOLERANCES[start.dtype] * moved + rounding
            near = ((one - two).abs() <= allowed) | (one == two) | one.isnan()
            if not near.all():
                return False
    return True
