"""Programs that look for torch's prefix `module.` in names are told that there is none."""

import _thread
import argparse
import fnmatch
import json
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from named_model import build, one, warned_twice
from torch import nn
from training import LIMIT_S, TIME_LIMIT

__all__ = ["one"]

pytestmark = TIME_LIMIT


# --- what selects by the prefix ------------------------------------------------------------------


def freeze_in_a_loop(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("module.0"):
            parameter.requires_grad = False


def select_in_a_comprehension(model: Any) -> None:
    _ = [p for name, p in model.named_parameters() if name.startswith("module.")]


def select_in_a_generator(model: Any) -> None:
    prefixes = ("module.0", "module.1")
    _ = all(p.requires_grad for n, p in model.named_parameters() if not n.startswith(prefixes))


def select_by_a_filter(model: Any) -> None:
    _ = list(filter(lambda item: item[0].startswith("module.2"), model.named_parameters()))


def is_head(name: str) -> bool:
    return name.startswith("module.2.head")


def select_by_a_function(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_head(name))


class Selector:
    def is_head(self, name: str) -> bool:
        return "module.2.head" in name

    def select(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.is_head(name))


def select_by_a_method(model: Any) -> None:
    Selector().select(model)


def select_by_an_expression(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.match(r"module\.[01]\.", name) is None)


def select_by_a_variable(model: Any) -> None:
    named = dict(model.named_parameters())
    prefix = "module.2."
    for name, parameter in named.items():
        if name.startswith(prefix):
            parameter.requires_grad_(False)


def select_by_equality(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name == "module.0.weight" or name in ("module.0.bias", "module.2.head.bias"):
            parameter.requires_grad_(False)


def look_up_with_a_default(model: Any) -> None:
    _ = dict(model.named_parameters()).get("module.0.weight")


def ask_whether_it_is_there(model: Any) -> None:
    names = {name for name, _ in model.named_modules()}
    if "module.2.head" in names:
        model.eval()


def select_buffers(model: Any) -> None:
    _ = [buffer for name, buffer in model.named_buffers() if name.startswith("module.1")]


def select_of_a_state(model: Any) -> None:
    _ = {key[7:]: v for key, v in model.state_dict().items() if key.startswith("module.")}


def cut_the_keys_of_a_state(model: Any) -> None:
    _ = {key[7:]: value for key, value in model.state_dict().items()}


def cut_by_splitting(model: Any) -> None:
    _ = {".".join(key.split(".")[1:]): value for key, value in model.state_dict().items()}


def cut_by_splitting_once(model: Any) -> None:
    state = model.state_dict()
    for key in list(state):
        state[key.split(".", 1)[1]] = state.pop(key)


def cut_by_a_partition(model: Any) -> None:
    _ = {key.partition(".")[2]: value for key, value in model.state_dict().items()}


def cut_by_a_length(model: Any) -> None:
    state = {}
    for key, value in model.state_dict().items():
        state[key[len("module.") :]] = value


def select_by_a_list(model: Any) -> None:
    frozen = ["module.0", "module.1"]
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in frozen):
            parameter.requires_grad_(False)


class Settings:
    def __init__(self) -> None:
        self.frozen = {"module.0.weight"}
        self.table = {"rates": {"module.2.head": 0.1, "other": 1.0}}


def select_by_a_setting(model: Any) -> None:
    settings = Settings()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in settings.frozen)


def select_by_a_table(model: Any) -> None:
    settings = Settings()
    rates = []
    for name, _ in model.named_parameters():
        for prefix, rate in settings.table["rates"].items():
            if name.startswith(prefix):
                rates.append(rate)


HEADS = re.compile(r"^module\.2\.head")


def select_by_a_string_of_a_setting(model: Any) -> None:
    arguments = argparse.Namespace(frozen="module.2")
    for name, parameter in model.named_parameters():
        if name.startswith(arguments.frozen):
            parameter.requires_grad_(False)


def select_by_several_in_a_string(model: Any) -> None:
    settings = {"frozen": "module.0,module.1"}
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in settings["frozen"].split(",")):
            parameter.requires_grad_(False)


def select_by_what_a_table_gives(model: Any) -> None:
    table = {"frozen": ["module.0", "module.1"]}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(table.get("frozen", ()))))


def take_what_a_checkpoint_has(model: Any) -> None:
    table = {"model": OrderedDict((f"module.{n}", p) for n, p in model.module.named_parameters())}
    for name, parameter in model.named_parameters():
        if name in table["model"]:
            parameter.data.copy_(table["model"][name])


class Awkward(Selector):
    """What reads its attributes, or those of its class, raises."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("not now")
        return super().__getattribute__(name)


def select_among_awkward_objects(model: Any) -> None:
    awkward = Awkward()
    prefix = "module.2."
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(awkward is None)


def select_by_a_pattern(model: Any) -> None:
    _ = [parameter for name, parameter in model.named_parameters() if HEADS.match(name)]


def select_by_names_of_the_module(model: Any) -> None:
    _ = [parameter for name, parameter in model.named_parameters() if name in NAMES]


def select_by_a_shell_pattern(model: Any) -> None:
    _ = [p for name, p in model.named_parameters() if fnmatch.fnmatch(name, "module.0*")]


NAMES = {"module.0.weight": 1.0}


def groups_of(named: Any) -> list[Any]:
    return [parameter for name, parameter in named if name.startswith("module.0.")]


def hand_names_on(model: Any) -> None:
    _ = groups_of(model.named_parameters())


def hand_names_on_later(model: Any) -> None:
    named = list(model.named_parameters())
    print(len(named))
    _ = groups_of(named)


def take_the_second_part(model: Any) -> None:
    _ = {name.split(".")[1] for name, _ in model.named_parameters()}


def cut_names(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.label = name[7:]


SELECTING = [
    select_by_a_string_of_a_setting,
    select_by_several_in_a_string,
    select_by_what_a_table_gives,
    take_what_a_checkpoint_has,
    select_among_awkward_objects,
    select_by_a_list,
    select_by_a_setting,
    select_by_a_table,
    select_by_a_pattern,
    select_by_a_shell_pattern,
    select_by_names_of_the_module,
    hand_names_on,
    hand_names_on_later,
    take_the_second_part,
    cut_names,
    freeze_in_a_loop,
    select_in_a_comprehension,
    select_in_a_generator,
    select_by_a_filter,
    select_by_a_function,
    select_by_a_method,
    select_by_an_expression,
    select_by_a_variable,
    select_by_equality,
    look_up_with_a_default,
    ask_whether_it_is_there,
    select_buffers,
    select_of_a_state,
    cut_the_keys_of_a_state,
    cut_by_splitting,
    cut_by_splitting_once,
    cut_by_a_partition,
    cut_by_a_length,
]


def run_twice(name: str) -> list[tuple[str, str]]:
    return warned_twice(globals()[name])


@pytest.mark.parametrize("function", SELECTING, ids=lambda function: function.__name__)
def test_selecting_by_the_prefix_warns_once(one: Ranks, function: Callable[[Any], None]) -> None:
    [told] = one.run(run_twice, function.__name__, timeout=LIMIT_S)
    assert len(told) == 1, told
    message, filename = told[0]
    assert Path(filename) == Path(__file__)
    found = re.match(r"line (\d+) of (\S+) looks for names that begin with 'module\.'", message)
    assert found is not None
    line = Path(__file__).read_text().splitlines()[int(found[1]) - 1]
    signs = ("module", "prefix", "[7:]", "split", "partition", "frozen", "table", "HEADS", "NAMES")
    assert any(sign in line for sign in signs), line


# --- what does not -------------------------------------------------------------------------------


def use_plain_names(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("0.") or name.endswith("bias"):
            parameter.requires_grad_(False)


def take_a_prefix_off(model: Any) -> None:
    _ = {name.replace("module.", ""): p for name, p in model.named_parameters()}
    _ = {key.removeprefix("module."): v for key, v in model.state_dict().items()}
    _ = [name.split("module.")[-1] for name, _ in model.named_modules()]


def put_a_prefix_on(model: Any) -> None:
    _ = {f"module.{name}": p for name, p in model.named_parameters()}
    _ = {"module." + key: value for key, value in model.state_dict().items()}


def load_what_torch_has_saved(state: dict[str, Any]) -> dict[str, Any]:
    return {k[7:] if k.startswith("module.") else k: v for k, v in state.items()}


def speak_of_modules(model: Any) -> None:
    """module.py is not a prefix."""
    loaded = load_what_torch_has_saved({"module.0.weight": torch.ones(2)})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in loaded)
    _ = [str(v)[7:] for v in model.parameters()]


def cut_where_it_is_there(model: Any) -> None:
    state = model.state_dict()
    print([7] * len(state))
    _ = {(key[7:] if key.startswith("module.") else key): v for key, v in state.items()}
    for key in list(state):
        plain = key
        if plain.startswith("module."):
            plain = plain[len("module.") :]
        state[plain] = state.pop(key)
    print("module.x".startswith("module."))


def take_a_part_of_something_else(model: Any) -> None:
    lines = [str(number) for number in range(9)]
    state = model.state_dict()
    print(lines[7:], len(state))


def read_the_number_of_a_layer(model: Any) -> None:
    for name, _ in model.named_parameters():
        with suppress(ValueError):
            print(int(name.split(".")[1]))


class Property(type):
    @property
    def is_thorny(cls) -> bool:
        raise RuntimeError("not now")


class WithProperty(metaclass=Property):
    def use(self, model: Any) -> None:
        for name, _ in model.named_parameters():
            print(name, hasattr(self, "is_thorny"))


def meet_a_property_that_raises(model: Any) -> None:
    WithProperty().use(model)


def ask_in_a_thread(model: Any) -> None:
    thread = threading.Thread(target=model.state_dict)
    thread.start()
    thread.join()
    done = threading.Event()
    _thread.start_new_thread(model.state_dict, ())
    done.wait(0.2)


def use_lists_without_a_prefix(model: Any) -> None:
    names, pattern = ["0.", "a module.x"], re.compile(r"\d+\.weight")
    for name, parameter in model.named_parameters():
        if name in names or pattern.match(name) or name.split(".")[0] == "2":
            parameter.requires_grad_(False)
    loaded = {"module.0.weight": torch.ones(2)}
    _ = load_what_torch_has_saved(loaded)


def ask_for_no_names(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    _ = list(model.buffers())


@pytest.mark.parametrize(
    "function",
    [
        use_plain_names,
        take_a_prefix_off,
        put_a_prefix_on,
        speak_of_modules,
        use_lists_without_a_prefix,
        cut_where_it_is_there,
        take_a_part_of_something_else,
        read_the_number_of_a_layer,
        meet_a_property_that_raises,
        ask_in_a_thread,
        ask_for_no_names,
    ],
    ids=lambda function: function.__name__,
)
def test_other_uses_of_names_do_not_warn(one: Ranks, function: Callable[[Any], None]) -> None:
    [told] = one.run(run_twice, function.__name__, timeout=LIMIT_S)
    assert told == []


# --- names are plain -----------------------------------------------------------------------------


def save_names(path: str) -> None:
    model = build()
    named = {name: p.detach() for name, p in model.named_parameters()}
    named |= dict(model.named_buffers())
    assert all(type(name) is str for name in [*named, *dict(model.named_modules())])
    torch.save(named, path)
    assert json.loads(json.dumps(list(named))) == list(named)
    assert pickle.loads(pickle.dumps(list(named))) == list(named)


def test_names_are_read_where_there_is_no_pydist(one: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "named.pt"
    one.run(save_names, str(path), timeout=LIMIT_S)
    program = (
        "import sys, torch\n"
        "print(sorted(torch.load(sys.argv[1], weights_only=True)))\n"
        "assert 'pydist' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "'0.bias'" in done.stdout, done.stderr
