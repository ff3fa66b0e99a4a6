"""How much memory a forward saves for backward, found without computing anything."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pydist._torch import FAKE_TENSORS_LOG, fake_tensors, identity_of, tree_map_only
from pydist.errors import InvalidUsage


def saved_activation_bytes(module: nn.Module, sample: Any, dtype: torch.dtype | None) -> int:
    """Bytes of what autograd saves in one forward, and of the output.

    Forward runs on fake tensors, which have shapes and no values, in the module's present mode.
    Memory that several operations save counts once; parameters and buffers don't count.

    Args:
        module: On any device, "meta" included, which stands for the CPU.
        sample: A tensor, a tuple of arguments, or a dictionary of keywords.
        dtype: Of floating-point parameters, buffers and inputs; default: what they have.

    Raises:
        InvalidUsage: Forward fails on it, or asks for values.
    """
    fake_mode = fake_tensors(allow_non_fake_inputs=True)
    # Only storages that are alive have names of their own.
    own: dict[int, torch.UntypedStorage] = {}
    saved: dict[int, torch.UntypedStorage] = {}

    def fake(tensor: Tensor) -> Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        with fake_mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
        return made.requires_grad_(tensor.requires_grad)

    def save(value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            if identity_of(storage) not in own:
                saved[identity_of(storage)] = storage
        return value

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        made = fake(tensor)
        own[identity_of(made.untyped_storage())] = made.untyped_storage()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    args, kwargs = _arguments(sample)
    try:
        shadow = copy.deepcopy(module, memo)
        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda value: value)
        with _quiet(FAKE_TENSORS_LOG), fake_mode, hooks:
            output = shadow(*args, **kwargs)
    except Exception as error:
        raise InvalidUsage(
            f"activations can't be predicted: forward of the sample without values raised "
            f"{type(error).__name__}: {error}; correct the sample, or plan without it"
        ) from error
    tree_map_only(Tensor, save, output)
    return sum(storage.nbytes() for storage in saved.values())


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the log that torch writes of an exception beside raising it."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}
