"""Which parameters of a module train: when it is wrapped, and what joins them later."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pydist._torch import children_of_each, parameters_of, with_children
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.nested_wrappers import refuse_wrapped
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.reducer import Trained

# Counts how often any module anywhere was given a parameter or a submodule. A wrapper that has seen
# the present count knows all of its module's parameters, without walking through them every time.
_registrations = 0


def _note_registration(_module: nn.Module, _name: str, _value: Any) -> None:
    global _registrations
    _registrations += 1


_is_counting = False


def _count_registrations() -> None:
    """From the first wrapper on: until then, making modules costs what it costs without us."""
    global _is_counting
    if not _is_counting:
        nn.modules.module.register_module_parameter_registration_hook(_note_registration)
        nn.modules.module.register_module_module_registration_hook(_note_registration)
        _is_counting = True


def registrations() -> int:
    """How often any module was given a parameter or a submodule, since the first wrapper was made.

    Whoever has walked through a module at the present count need not do it again.
    """
    return _registrations


class TrainedParameters:
    """The parameters of a module that require gradients, and that are no rank's own.

    None is known at first.

    Attributes:
        known: Names, parameters, whether their gradients are sparse, in the order of `add`.
    """

    def __init__(self, module: RankLocal) -> None:
        _count_registrations()
        self._local = module
        self._module = module.module
        self._seen = -1
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self.known: Trained = []
        self._known_ids: set[int] = set()
        self._tables: list[dict[str, nn.Parameter | None]] = []
        self._standing: list[nn.Parameter | None] = []
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._containers: list[nn.Module] = []
        self._children: list[tuple[nn.Module | None, ...]] = []

    def add_all(self) -> None:
        """From now on, all that require gradients now are known, in the order of registration."""
        for joined in self._walk():
            self.add(*joined)

    def add(self, name: str, parameter: nn.Parameter, is_sparse: bool) -> None:
        """From now on, a parameter is known."""
        self.known.append((name, parameter, is_sparse))
        self._known_ids.add(id(parameter))

    def knows(self, parameter: Tensor) -> bool:
        """Whether a parameter is among those known."""
        return id(parameter) in self._known_ids

    def joined(self) -> Trained:
        """Parameters that require gradients and are not known: `add` makes them so.

        Raises:
            InvalidUsage: One of them can't be trained, or another wrapper was put into the module;
                the next call raises again.
        """
        if (
            self._seen == _registrations
            and not any(parameter.requires_grad for _, parameter in self._frozen)
            # Containers' insert() registers nothing.
            and children_of_each(self._containers) == self._children
            # Conversions and fully_shard may put others in place without registering them.
            and (self._all_stand() or not self._any_is_converted())
        ):
            return []
        joined = self._walk()
        if joined:
            self._seen = -1  # what is found once is found again until it is known
        return joined

    def _all_stand(self) -> bool:
        """Whether all stand where they stood; every forward asks, so without a loop in Python."""
        now = [*chain.from_iterable(map(dict.values, self._tables))]
        return len(now) == len(self._standing) and all(map(is_, now, self._standing))

    def _any_is_converted(self) -> bool:
        return any(
            (now := table.get(key)) is not before and _is_converted(now, before)
            for table, key, before in self._places
        )

    def _walk(self) -> Trained:
        seen = _registrations
        refuse_wrapped(self._module)
        self._local.look_again()
        # torch.func.functional_call puts tensors in the places of parameters for one forward. They
        # are the program's, and hide what stands there otherwise: so the next forward looks again.
        found = self._local.shared_parameters()
        named = [(name, p) for name, p in found if isinstance(p, nn.Parameter)]
        sparse = ids_of_sparse(self._module)
        joined = [
            (name, parameter, id(parameter) in sparse)
            for name, parameter in named
            if parameter.requires_grad and id(parameter) not in self._known_ids
        ]
        for name, parameter, _ in joined:
            require_ordinary("parameter", name, parameter)
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._containers = with_children(self._module)
        self._children = children_of_each(self._containers)
        tables = map(parameters_of, self._module.modules())
        self._tables = [table for table in tables if table is not None]
        self._standing = [*chain.from_iterable(map(dict.values, self._tables))]
        self._places = [
            (table, key, parameter)
            for table in self._tables
            for key, parameter in table.items()
            if parameter is not None
        ]
        self._seen = seen if len(named) == len(found) else -1
        return joined


def _is_converted(now: Tensor | None, before: nn.Parameter) -> bool:
    """Whether a parameter of another kind stands in the place of one.

    One of the same kind may be there for a moment: torch.func.functional_call does that.
    """
    if not isinstance(now, nn.Parameter):
        return False
    is_other = now.dtype != before.dtype or now.device != before.device
    return is_other or _is_made_of_others(now)


def ids_of_sparse(module: nn.Module) -> set[int]:
    """The parameters of a module whose gradients autograd makes sparse."""
    weights: list[Tensor] = [
        part.weight
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    ]
    return {id(weight) for weight in weights}


def require_trainable(module: RankLocal) -> None:
    """Raises InvalidUsage where the module holds what DataParallel can't train, or nothing."""
    for name, parameter in module.shared_parameters():
        require_ordinary("parameter", name, parameter)
    for name, buffer in module.shared_buffers():
        require_ordinary("buffer", name, buffer)
    if not any(parameter.requires_grad for _, parameter in module.shared_parameters()):
        beside = " beside those that it lets each rank have alone" if module.parameters() else ""
        raise InvalidUsage(
            f"no parameter of the module{beside} requires a gradient, so there is nothing to "
            "average: unfreeze what is to train before wrapping it, or use the module as it is"
        )


def _is_made_of_others(tensor: Tensor) -> bool:
    """Whether a tensor only stands for others, as DTensors do."""
    return hasattr(tensor, "__tensor_flatten__")


def require_plain(what: str, tensor: Tensor, taker: str, or_else: str = "") -> None:
    """Raises InvalidUsage where a tensor is made of others, as DTensors are."""
    if _is_made_of_others(tensor):
        raise InvalidUsage(
            f"{what} is {a_type(tensor)}, made of other tensors, and {taker} takes plain "
            "ones, which are whole on every rank: leave out what makes it so (for a DTensor: "
            f"fully_shard, parallelize_module or distribute_tensor){or_else}"
        )


def require_ordinary(kind: str, name: str, tensor: Tensor) -> None:
    """Raises InvalidUsage unless a tensor is plain, dense, and on the CPU or a CUDA device."""
    require_plain(f"{kind} {name}", tensor, "pydist.DataParallel")
    if nn.parameter.is_lazy(tensor):
        raise InvalidUsage(
            f"{kind} {name} has no shape yet: run one forward before wrapping the module"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidUsage(
            f"{kind} {name} is on {tensor.device}; pydist.DataParallel trains on the CPU and on "
            "CUDA devices"
        )
    if tensor.layout != torch.strided:
        raise InvalidUsage(
            f"{kind} {name} is {tensor.layout}; pydist.DataParallel needs dense tensors"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidUsage(
            f"{kind} {name} is a conjugate or negative view, whose memory holds other values than "
            "it has: make it of `tensor.resolve_conj().resolve_neg()` before wrapping the module"
        )
