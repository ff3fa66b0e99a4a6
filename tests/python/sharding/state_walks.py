"""What programs do with an optimizer's state: they move, copy, reset and put back its tensors."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def move_values(optimizer: torch.optim.Optimizer) -> None:
    """What programs do that have loaded a state for the CPU."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to("cpu")


def apply_to_collection(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """As Lightning's utilities rebuild collections."""
    if isinstance(data, Tensor):
        return function(data)
    kind: Any = type(data)
    if isinstance(data, Mapping):
        found = OrderedDict((k, apply_to_collection(v, function)) for k, v in data.items())
        return kind(found)
    return data


def move_mappings(optimizer: torch.optim.Optimizer) -> None:
    """What Lightning's strategies do, at set-up and at teardown."""
    for parameter, values in optimizer.state.items():
        optimizer.state[parameter] = apply_to_collection(values, lambda value: value.to("cpu"))


def move_copies(optimizer: torch.optim.Optimizer) -> None:
    """The same, where that makes other tensors, as on a GPU."""
    for parameter, values in optimizer.state.items():
        optimizer.state[parameter] = apply_to_collection(values, lambda value: value.clone())


def put_back_all(optimizer: torch.optim.Optimizer) -> None:
    state = defaultdict(dict, optimizer.state)
    optimizer.state = state
    optimizer.state.update({})


def zero_in_place(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "exp_avg" in state:
                state["exp_avg"].mul_(0.5)
            if len(state) and "exp_avg_sq" in state.keys():  # noqa: SIM118
                state.get("exp_avg_sq").add_(0.25)
            if "momentum_buffer" in state:
                state["momentum_buffer"].zero_()


def reset_by_wholes(optimizer: torch.optim.Optimizer) -> None:
    """As who merges low-rank adapters does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in ("exp_avg", "momentum_buffer"):
                if name in dict(state):
                    state[name] = (
                        torch.arange(parameter.numel(), dtype=parameter.dtype)
                        .view(parameter.shape)
                        .mul(1e-3)
                    )


def set_steps(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.tensor(5.0)


def move_to_device(state: Any) -> Any:
    """As Accelerate's optimizer does with the state of the one that it is given."""
    if isinstance(state, (list, tuple)):
        return type(state)(move_to_device(item) for item in state)
    if isinstance(state, dict):
        return type(state)({key: move_to_device(value) for key, value in state.items()})
    return state.to("cpu") if isinstance(state, Tensor) else state


def move_state_dict(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(move_to_device(optimizer.state_dict()))


WALKS: list[Callable[[torch.optim.Optimizer], None]] = [
    move_values,
    move_mappings,
    move_copies,
    move_state_dict,
    put_back_all,
    zero_in_place,
    reset_by_wholes,
    set_steps,
]
