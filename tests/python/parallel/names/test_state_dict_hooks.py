"""Hooks of state_dict() and load_state_dict() on the wrapper run as in torch's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import TIME_LIMIT, Runner, joined

import pydist

pytestmark = TIME_LIMIT

Seen = list[tuple[Any, ...]]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def register(part: nn.Module, who: str, seen: Seen) -> None:
    """Registers a hook of each kind, which notes who was called how."""

    def note(kind: str, module: nn.Module, *facts: Any) -> None:
        seen.append((kind, who, module is part, *facts))

    part.register_state_dict_pre_hook(
        lambda module, prefix, keep: note("before saving", module, prefix, keep)
    )
    part.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: note("saved", module, prefix, len(state), metadata)
    )
    part.register_load_state_dict_pre_hook(
        lambda module, state, prefix, _, strict, *lists: note(
            "before loading", module, prefix, strict, len(state), lists
        )
    )
    part.register_load_state_dict_post_hook(
        lambda module, keys: note("loaded", module, list(keys.missing_keys))
    )


def what_hooks_see(wrap: Callable[[nn.Module], Any], is_nested: bool) -> Seen:
    seen: Seen = []
    module = build()
    net = wrap(module)
    register(net, "wrapper", seen)
    register(module, "module", seen)
    top = nn.ModuleDict({"net": net}) if is_nested else net
    state = top.state_dict()
    top.state_dict(keep_vars=True)
    saving = len(seen)
    top.load_state_dict(copy.deepcopy(state))
    # To know the module's names, loading looks at its state too.
    seen[saving:] = [entry for entry in seen[saving:] if "load" in entry[0]]
    # The module's names have no prefix.
    return [
        tuple(fact.removesuffix("module.") if isinstance(fact, str) else fact for fact in entry)
        for entry in seen
    ]


def compare_with_torch(is_nested: bool) -> None:
    joined()
    ours = what_hooks_see(pydist.DataParallel, is_nested)
    theirs = what_hooks_see(DistributedDataParallel, is_nested)
    assert len(theirs) == 12
    assert ours == theirs


@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_see_what_they_see_in_torch(run: Runner, is_nested: bool) -> None:
    run(compare_with_torch, is_nested)


def change_by_hooks() -> None:
    joined()
    change_states(pydist.DataParallel(build()))
    change_states(DistributedDataParallel(build()))


def change_states(net: Any) -> None:
    # An older kind of hook, which may return another state.
    handle = net._register_state_dict_hook(
        lambda _, state, prefix, __: {f"saved.{prefix}{name}": v for name, v in state.items()}
    )
    assert all(name.startswith("saved.") for name in net.state_dict())

    def rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert module is net
        for name in [name for name in state if name.startswith("saved.")]:
            state[prefix + name.removeprefix("saved.")] = state.pop(name)

    def forgive(module: Any, keys: Any) -> None:
        assert module is net
        keys.missing_keys.clear()

    net.register_load_state_dict_pre_hook(rename)
    saved = {name: torch.full_like(value, 3) for name, value in net.state_dict().items()}
    given = dict(saved)
    net.load_state_dict(given)
    assert given.keys() == saved.keys()
    assert all((value == 3).all() for value in net.parameters())
    handle.remove()

    given.popitem()
    with pytest.raises(RuntimeError, match=r"Missing key"):
        net.load_state_dict(given)
    forgiving = net.register_load_state_dict_post_hook(forgive)
    assert not net.load_state_dict(given).missing_keys
    forgiving.remove()
    with pytest.raises(RuntimeError, match=r"Missing key"):
        net.load_state_dict(given)

    def complain(*arguments: Any) -> None:
        arguments[-1].append("by order of the hook")

    net.register_load_state_dict_pre_hook(complain)
    with pytest.raises(RuntimeError, match="by order of the hook"):
        net.load_state_dict(saved)

    net.register_state_dict_post_hook(lambda *_: {})
    with pytest.raises(RuntimeError, match="post-hook must return None"):
        net.state_dict()


def test_hooks_may_change_states(run: Runner) -> None:
    run(change_by_hooks)
