"""What a training function does to its model and its loaders, in place of Ray's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray.train.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import pydist
from pydist.errors import InvalidUsage


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Moves a model to the worker's device, and wraps it. All workers call it.

    A drop-in for `ray.train.torch.prepare_model`. A single worker's model is wrapped as well, so
    that a program finds `model.module` on any number of workers.

    Args:
        model: As for `pydist.DataParallel`.
        move_to_device: Whether to move the model to `ray.train.torch.get_device()`, which is the
            default; or the device to move it to.
        parallel_strategy: "ddp" wraps in `pydist.DataParallel`, and None leaves the model alone.
        parallel_strategy_kwargs: Arguments of `pydist.DataParallel`, such as
            `{"compress": "bf16"}`.

    Raises:
        InvalidUsage: The strategy is another one; or what `pydist.DataParallel` refuses.
        Mismatch: What `pydist.DataParallel` finds to differ between workers.
    """
    if parallel_strategy not in ("ddp", None):
        raise InvalidUsage(
            f"prepare_model(parallel_strategy={parallel_strategy!r}) is not possible with pydist: "
            "it must be 'ddp' or None. pydist.ShardedOptimizer shards optimizer state, and Ray's "
            "own prepare_model wraps in torch's FSDP, whose groups may be on backend 'pydist' too."
        )
    model = ray.train.torch.prepare_model(model, move_to_device, parallel_strategy=None)
    if parallel_strategy is None:
        return model
    arguments = dict(parallel_strategy_kwargs or {})
    device = _target(move_to_device)
    if device.type != "cpu":
        arguments.setdefault("device_ids", [device])
    return pydist.DataParallel(model, **arguments)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool | torch.device = True,
    auto_transfer: bool = False,
    **sharing: Any,
) -> Any:
    """Shares out a loader's samples, and moves its batches to the worker's device.

    In place of `ray.train.torch.prepare_data_loader`. All workers prepare theirs in the same order.
    The loader can be resumed in mid-epoch: `report` and `restore` take it as `sampler=`. Its epochs
    shuffle anew by themselves; `set_epoch` may say which one comes next.

    Args:
        data_loader: As for `pydist.prepare`.
        add_dist_sampler: Whether to share out the samples. Without, every worker gets all.
        move_to_device: Whether batches, and tensors within mappings, lists and tuples, go to
            `ray.train.torch.get_device()`; or the device that they go to.
        auto_transfer: False. Ray's fetches a batch ahead of the loop, so that a position in
            mid-epoch would be off by one; `pin_memory=True` lets copies overlap.
        **sharing: Arguments of `pydist.prepare`: with `split_batches=True` the loader's
            `batch_size` is that of all workers together, and stays the same on another number.

    Raises:
        InvalidUsage: `auto_transfer` is asked for; or what `pydist.prepare` refuses.
    """
    if auto_transfer:
        raise InvalidUsage(
            "prepare_data_loader(auto_transfer=True) is not possible with pydist: batches would be "
            "fetched before the loop gets them, and a saved position would be off by one. Leave it "
            "out, and give the loader pin_memory=True, which lets copies to a GPU overlap."
        )
    if sharing and not add_dist_sampler:
        raise InvalidUsage(
            f"prepare_data_loader(add_dist_sampler=False) shares out nothing, so {sorted(sharing)} "
            "can't be had: leave one of the two out."
        )
    loader: Any = pydist.prepare(data_loader, **sharing) if add_dist_sampler else data_loader
    device = _target(move_to_device)
    return loader if device.type == "cpu" else _OnDevice(loader, device)


def _target(move_to_device: bool | torch.device) -> torch.device:
    if isinstance(move_to_device, torch.device):
        return move_to_device
    return ray.train.torch.get_device() if move_to_device else torch.device("cpu")


class _OnDevice:
    """A loader whose batches go to a device once the loop asks for them; otherwise as it is."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield _moved(batch, self._device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named one
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
