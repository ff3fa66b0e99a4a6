"""A state of a wrapper tells those who ask it for torch's prefix, and is plain otherwise."""

import copy
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from named_model import build, one, warned_twice
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_map
from training import LIMIT_S, TIME_LIMIT

__all__ = ["one"]

pytestmark = TIME_LIMIT

# --- states are asked for names ------------------------------------------------------------------


def saved_with_prefix(model: Any) -> OrderedDict[str, Any]:
    """As a run under torch's wrapper has saved it."""
    state = model.module.state_dict()
    return OrderedDict((f"module.{name}", torch.ones_like(value)) for name, value in state.items())


def load_what_fits(model: Any) -> None:
    own, saved = model.state_dict(), saved_with_prefix(model)
    own.update({name: value for name, value in saved.items() if name in own})
    model.load_state_dict(own)


def copy_what_fits(model: Any) -> None:
    own = model.state_dict()
    for name, value in saved_with_prefix(model).items():
        if own.get(name) is not None:
            own[name].copy_(value)


def ask_for_a_name(model: Any) -> None:
    assert "module.0.weight" not in model.state_dict()
    assert model.state_dict().pop("module.0.weight", None) is None


def look_among_the_names(model: Any) -> None:
    names = model.state_dict().keys()
    assert not any(name in names for name in saved_with_prefix(model))
    assert "0.weight" in names
    assert names == model.module.state_dict().keys()
    assert not names & saved_with_prefix(model).keys()


def run_twice(name: str) -> list[tuple[str, str]]:
    return warned_twice(globals()[name])


ASKING = [load_what_fits, copy_what_fits, ask_for_a_name, look_among_the_names]


@pytest.mark.parametrize("function", ASKING, ids=lambda function: function.__name__)
def test_asking_a_state_for_the_prefix_warns(one: Ranks, function: Callable[[Any], None]) -> None:
    [told] = one.run(run_twice, function.__name__, timeout=LIMIT_S)
    asked = r"asked for 'module\.\S+', and has it as '\d\S+'"
    found = [filename for message, filename in told if re.search(asked, message)]
    # Once for each state, of which two runs take one or two each.
    assert len(found) == (4 if function is ask_for_a_name else 2)
    assert {Path(filename) for filename in found} == {Path(__file__)}


def load_partly() -> None:
    model = build()
    saved = saved_with_prefix(model)
    saved["epoch"] = torch.tensor(3)
    saved["2.head.bias"] = saved.pop("module.2.head.bias")
    result = model.load_state_dict(saved, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([], ["epoch"])
    assert all(bool((value == 1).all()) for value in model.state_dict().values())
    with pytest.raises(RuntimeError, match="epoch"):
        model.load_state_dict(saved)


def load_both_spellings() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = model.state_dict()
    state.update(saved_with_prefix(model))
    with pytest.warns(UserWarning, match=r"has both 0\.weight and module\.0\.weight") as told:
        model.load_state_dict(state, strict=False)
    assert told[0].filename == __file__
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())


def load_in_a_module_above() -> None:
    model = build()
    holder = nn.ModuleDict({"net": model, "other": nn.Linear(1, 1)})
    saved = OrderedDict((f"net.{name}", value) for name, value in saved_with_prefix(model).items())
    saved |= {name: value for name, value in holder.state_dict().items() if "other" in name}
    given = list(saved)
    holder.load_state_dict(saved)
    assert list(saved) == given
    assert all(bool((value == 1).all()) for value in model.state_dict().values())
    average = torch.optim.swa_utils.AveragedModel(model)
    ones = saved_with_prefix(model).items()
    average.load_state_dict(
        OrderedDict((f"module.{name}", 2 * value) for name, value in ones), strict=False
    )
    assert all(bool((value == 2).all()) for value in average.module.state_dict().values())


def load_without_a_count() -> None:
    # Of a version of BatchNorm that had none: its note says so.
    model = build()
    for prefix in ("", "module."):
        saved = OrderedDict((f"{prefix}{n}", v) for n, v in model.module.state_dict().items())
        del saved[f"{prefix}1.num_batches_tracked"]
        saved._metadata = OrderedDict({f"{prefix}1": {"version": 2}})  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            model.load_state_dict(saved)
        saved._metadata = OrderedDict({f"{prefix}1": {"version": 1}})  # type: ignore[attr-defined]
        model.load_state_dict(saved)


def test_notes_of_versions_are_kept(one: Ranks) -> None:
    one.run(load_without_a_count, timeout=LIMIT_S)


def test_names_with_and_without_the_prefix_load_together(one: Ranks) -> None:
    one.run(load_partly, timeout=LIMIT_S)


def test_a_state_with_both_spellings_warns(one: Ranks) -> None:
    one.run(load_both_spellings, timeout=LIMIT_S)


def test_the_prefix_is_taken_off_where_a_module_above_loads(one: Ranks) -> None:
    one.run(load_in_a_module_above, timeout=LIMIT_S)


def use_state_in_every_way() -> None:
    model = build()
    state = model.state_dict()
    assert isinstance(state, OrderedDict)
    assert list(state) == list(model.module.state_dict())
    assert state._metadata == model.module.state_dict()._metadata
    for copied in (copy.copy(state), copy.deepcopy(state), state.copy()):
        assert type(copied) is OrderedDict
    state._has_warned = True
    assert type(pickle.loads(pickle.dumps(state))) is OrderedDict
    assert not hasattr(copy.copy(state), "_has_warned")
    doubled = tree_map(lambda value: 2 * value, state)
    assert torch.equal(doubled["0.weight"], 2 * model.module[0].weight)
    [(path, _), *_] = tree_flatten_with_path(state)[0]
    assert path[0].key == "0.weight"
    kept: OrderedDict[str, Any] = OrderedDict(before=1)
    assert model.state_dict(destination=kept) is kept
    assert state.pop("nothing", default=None) is None
    assert "0.weight" in state
    unknown = "module.unknown"
    assert unknown not in state
    with pytest.raises(KeyError):
        state["module.0.weight"]
    model.load_state_dict(state)


def test_a_state_is_what_torch_returns(one: Ranks) -> None:
    one.run(use_state_in_every_way, timeout=LIMIT_S)
