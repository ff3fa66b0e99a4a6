"""A state that tells programs which look for torch's prefix `module.` in it that there is none.

Checkpoints of earlier runs under torch's wrapper have the prefix. Programs load what fits of one:
`own.update({k: v for k, v in saved.items() if k in own})`. Under the module's own names nothing
fits, and training would begin anew without a word. See `prefixed_names` for other ways.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, KeysView
from typing import Any

from pydist._torch import MappingKey, metadata_of, register_pytree_node, set_metadata
from pydist.parallel.names.state_names import PREFIX

_NOTHING = object()


class PlainState(OrderedDict[str, Any]):
    """What `state_dict()` of a wrapper returns. Copies and pickles of it are plain dictionaries.

    It warns once.
    """

    _has_warned = False

    @classmethod
    def of(cls, state: Any) -> Any:
        """The same entries and metadata; what is no plain state stays as it is."""
        if type(state) is not OrderedDict:
            return state
        plain = cls(state)
        metadata = metadata_of(state)
        if metadata is not None:
            set_metadata(plain, metadata)
        return plain

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._lacks(key)

    def keys(self) -> Any:
        return _Names(self)

    def get(self, key: str, default: Any = None) -> Any:
        if not super().__contains__(key):
            self._lacks(key)
        return super().get(key, default)

    def pop(self, key: str, default: Any = _NOTHING) -> Any:
        if default is _NOTHING:
            return super().pop(key)
        if not super().__contains__(key):
            self._lacks(key)
        return super().pop(key, default)

    def __reduce__(self) -> Any:
        attributes = {name: value for name, value in vars(self).items() if name != "_has_warned"}
        return OrderedDict, (), attributes or None, None, iter(self.items())

    def copy(self) -> Any:
        return OrderedDict(self)

    def _lacks(self, key: object) -> bool:
        """Warns where a name is here without the prefix; False."""
        if not self._has_warned and isinstance(key, str) and key.startswith(PREFIX):
            plain = key[len(PREFIX) :]
            if super().__contains__(plain):
                self._has_warned = True
                warnings.warn(
                    f"a state of pydist.DataParallel was asked for {key!r}, and has it as "
                    f"{plain!r}: names are those of the wrapped module, without the prefix that "
                    "torch's DistributedDataParallel puts before them. load_state_dict() takes "
                    "names with the prefix; elsewhere, cut it off (key.removeprefix('module.')). "
                    "If the code is right without it as well, ignore this",
                    UserWarning,
                    stacklevel=3,
                )
        return False


class _Names(KeysView[str]):
    """Of a state: whoever looks for a name with the prefix there is warned, too."""

    _mapping: PlainState

    def __contains__(self, key: object) -> bool:
        return OrderedDict.__contains__(self._mapping, key) or self._mapping._lacks(key)


def _flattened(state: PlainState) -> tuple[list[Any], list[str]]:
    return list(state.values()), list(state)


def _unflattened(values: Iterable[Any], names: list[str]) -> PlainState:
    return PlainState(zip(names, values, strict=True))


def _flattened_with_names(state: PlainState) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(MappingKey(name), value) for name, value in state.items()], list(state)


register_pytree_node(
    PlainState,
    _flattened,
    _unflattened,
    serialized_type_name="pydist.PlainState",
    flatten_with_keys_fn=_flattened_with_names,
)
