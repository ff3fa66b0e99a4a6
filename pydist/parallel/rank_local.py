"""What of a wrapped module is each rank's own, such as its experts or its part of an embedding.

torch calls it ignored: `module._ddp_params_and_buffers_to_ignore` has the names. Such parameters
and buffers are neither compared with other ranks' nor copied to them, and their gradients are not
averaged. Each rank may have others, of other shapes and in another number.

Note [Names that torch looks up]
torch's DistributedDataParallel looks a parameter up twice. For the copy at construction it asks for
the name that `named_parameters()` has. For averages it asks for every place of the parameter: the
path of the module, a dot, and the name there. So a parameter of the outermost module is `.scale`
there, and one that two layers share has two names. A list that has only some of these names leaves
a parameter half-ignored: torch then averages gradients of values that differ between ranks. Here,
that is refused.
"""

from __future__ import annotations

import warnings
import weakref

from torch import Tensor, nn

from pydist._torch import IGNORED_NAMES, ignored_names
from pydist.errors import InvalidUsage


class RankLocal:
    """Tells the parameters and buffers of a module that are each rank's own from those of all.

    What was the rank's own once remains so. What the module gets later is the rank's own if the
    list has its name then.

    Args:
        module: The one that is wrapped, not its wrapper.

    Raises:
        InvalidUsage: The list has some names of a parameter, and lacks others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._own_parameters: dict[int, weakref.ref[Tensor]] = {}
        # By the module that has the buffer, because steps may replace buffers.
        self._own_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self.look_again()

    def look_again(self) -> None:
        """Takes note of what has joined the module."""
        names = ignored_names(self.module)
        if names:
            for parameter in _named_parameters(self.module, names):
                if not self.has(parameter):
                    self._own_parameters[id(parameter)] = weakref.ref(parameter)
        for name, _ in self.module.named_buffers():
            path, _, key = name.rpartition(".")
            known = self._own_buffers.setdefault(self.module.get_submodule(path), {})
            known.setdefault(key, name in names)

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter is the rank's own."""
        reference = self._own_parameters.get(id(parameter))
        return reference is not None and reference() is parameter

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The rank's own ones, by the module's names."""
        return [(name, p) for name, p in self.module.named_parameters() if self.has(p)]

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The rank's own ones, by the module's names."""
        return [(name, b) for name, b in self.module.named_buffers() if self._has_buffer(name)]

    def shared_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The ones that all ranks have alike, by the module's names."""
        return [(name, p) for name, p in self.module.named_parameters() if not self.has(p)]

    def shared_buffers(self) -> list[tuple[str, Tensor]]:
        """The ones that all ranks have alike, by the module's names."""
        return [(name, b) for name, b in self.module.named_buffers() if not self._has_buffer(name)]

    def warn_of_unknown(self) -> None:
        """Warns of names in the list that nothing in the module has, as in torch."""
        known = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        for path, part in self.module.named_modules():
            known |= {f"{path}.{key}" for key, _ in part.named_parameters(recurse=False)}
        unknown = sorted(ignored_names(self.module) - known)
        if not unknown:
            return
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        warnings.warn(
            "_ddp_params_and_buffers_to_ignore of the module has "
            f"{', '.join(map(repr, unknown[:3]))}{more}, which nothing in the module is called, so "
            "nothing is ignored for that, as in torch's DistributedDataParallel: give names as "
            "named_parameters() and named_buffers() of this module have them",
            UserWarning,
            stacklevel=4,  # past the constructor, and past what gives it its configuration
        )

    def _has_buffer(self, name: str) -> bool:
        path, _, key = name.rpartition(".")
        return self._own_buffers.get(self.module.get_submodule(path), {}).get(key, False)


def _named_parameters(module: nn.Module, names: frozenset[str]) -> list[nn.Parameter]:
    """The parameters that a list names; see Note [Names that torch looks up]."""
    places: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        for key, parameter in part.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append(f"{path}.{key}")
    found = []
    for name, parameter in module.named_parameters():
        own = places.get(id(parameter), [name])
        missing = [place for place in own if place not in names]
        # A frozen parameter is never averaged, so all its places need not be named.
        if parameter.requires_grad and (name in names) != (not missing):
            lacking = missing if name in names else [name]
            raise InvalidUsage(
                f"the module's {IGNORED_NAMES} has some names of parameter {name} and lacks "
                f"{', '.join(map(repr, lacking))}: torch's DistributedDataParallel would ignore it "
                "in one respect only (its values or its gradients). Put in all of "
                f"{', '.join(map(repr, dict.fromkeys([name, *own])))}, or none"
            )
        if name in names:
            found.append(parameter)
    return found
