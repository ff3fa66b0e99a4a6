"""What Accelerate's `Accelerator` does otherwise on pydist."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import DistributedType
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    recursively_apply,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import pydist
from pydist.errors import InvalidUsage
from pydist.integrations.accelerate.loaders import ResumableLoader, can_resume, resumable
from pydist.parallel.ownership import newest_first

# Beside Accelerate's own files in a checkpoint's folder: the place in the data.
_PLACE_IN_DATA = "pydist_place_in_data.json"
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator`, with pydist's wrapper, samplers and `join`.

    Every process makes one, which joins the job where `pydist.init` has not. Models are wrapped in
    `pydist.DataParallel`, in a job of one process as well. Loaders made with `shuffle=` share their
    samples through `pydist.prepare` and can be resumed; Accelerate shares out the others.

    Args:
        *args: Accelerate's own.
        weights_uneven_batches: Whether `backward` weights a loss by this process's share of the
            step's samples, where shares differ: for a loss that is a mean over this process's
            samples, as most are. False for a script that scales its losses by itself.
        **kwargs: Accelerate's own.

    Raises:
        InvalidUsage: Accelerate counts other processes than the job has, or was asked for something
            that pydist does not do: DeepSpeed, FSDP, Megatron-LM, or another backend.
    """

    # What a script gives, so that Accelerate counts processes on a machine without GPUs.
    _needed_on_cpus = "Accelerator(cpu=True)"

    def __init__(self, *args: Any, weights_uneven_batches: bool = True, **kwargs: Any) -> None:
        given = [
            handler
            for handler in kwargs.get("kwargs_handlers") or []
            if isinstance(handler, InitProcessGroupKwargs)
        ]
        pydist.init(timeout=given[0].timeout if given else None)
        super().__init__(*args, **kwargs)
        self.weights_uneven_batches = weights_uneven_batches
        if self.distributed_type not in _SUPPORTED:
            raise InvalidUsage(
                f"pydist's Accelerator was set up for {self.distributed_type.value}, which does "
                "what pydist does: use Accelerate's own, or leave that plugin out."
            )
        if self.num_processes != pydist.world_size():
            raise InvalidUsage(
                f"the job has {pydist.world_size()} processes, and Accelerate counts "
                f"{self.num_processes}: on CPUs it needs {self._needed_on_cpus}. Start several "
                "processes there by torchrun, by `pydist run -n 2`, or by `accelerate launch "
                "--multi_gpu --num_processes 2`; with --cpu that starts one."
            )
        self.register_save_state_pre_hook(self._save_place)
        self.register_load_state_pre_hook(self._load_place)

    # --- preparing -------------------------------------------------------------------------------

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Accelerate's, with `pydist.DataParallel` for its DDP. Every process calls it."""
        if isinstance(model, pydist.DataParallel):
            super().prepare_model(model.module, device_placement, evaluation_mode=True)
            return model
        is_wanted = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not is_wanted:
            return prepared
        handler = self.ddp_handler
        settings = {} if handler is None else handler.to_kwargs()
        device_ids = [self.device] if self.device.type == "cuda" else None
        wrapper = pydist.DataParallel(prepared, device_ids=device_ids, **settings)
        if handler is not None:
            handler.register_comm_hook(wrapper)
        return wrapper

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Accelerate's, with samples shared out by pydist; see the class for which loaders."""
        if isinstance(data_loader, ResumableLoader):
            if all(each is not data_loader for each in self._dataloaders):
                self._dataloaders.append(data_loader)
            return data_loader
        if self.dispatch_batches or not can_resume(data_loader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if device_placement is None:
            device_placement = self.device_placement
        seed = None
        if self.use_seedable_sampler:
            given = self.dataloader_config.data_seed
            # Ranks may have been seeded apart (`set_seed(device_specific=True)`): rank 0's counts.
            own = torch.initial_seed() if given is None else given
            seed = int(broadcast_object_list([own])[0])
        prepared = ResumableLoader(
            resumable(
                data_loader, seed=seed, pads=self.even_batches, split_batches=self.split_batches
            ),
            evaluates=lambda: bool(self._models) and not any(m.training for m in self._models),
            device=self.device if device_placement else None,
            # The samplers agree by themselves.
            rng_types=[kind for kind in self.rng_types if str(kind) != "generator"],
            _drop_last=data_loader.drop_last,
            _non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model without pydist's wrapper, and without Accelerate's layers."""
        if isinstance(model, pydist.DataParallel):
            model = model.module
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped

    # --- training --------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accelerate's; a loss of uneven batches counts by the samples it is the mean of.

        Inside `model.weighted()` it counts for that weight instead, in the mean over all backwards
        of a step.
        """
        loader = self.gradient_state.active_dataloader
        if any(each.weight_of_backward is not None for each in newest_first()):
            loss = loss * self.gradient_accumulation_steps  # by which Accelerate divides
        elif self.weights_uneven_batches and isinstance(loader, ResumableLoader):
            shares = loader.shares_of_step()
            if len(set(shares)) > 1:
                loss = loss * (shares[self.process_index] * len(shares) / sum(shares))
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[pydist.DataParallel], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Lets processes have different numbers of batches, by `pydist.DataParallel.join`.

        Every process enters it, around the loop. On CPUs, too, where Accelerate's has no effect.

        Args:
            joinables: One model that `prepare` has returned.
            even_batches: In place of Accelerate's setting, for loaders that are iterated inside.
        """
        loaders = [each for each in self._dataloaders if isinstance(each, ResumableLoader)]
        samplers = [loader.base_dataloader.distributed_sampler for loader in loaders]
        before = [sampler.pad for sampler in samplers]
        if even_batches is None:
            even_batches = self.even_batches
        else:
            for sampler in samplers:
                sampler.pad = "repeat" if even_batches else "none"
        try:
            with contextlib.ExitStack() as joined:
                for model in joinables:
                    joined.enter_context(model.join(enable=not even_batches))
                yield
        finally:
            for sampler, pad in zip(samplers, before, strict=True):
                sampler.pad = pad

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Lets the backward inside average what forwards under `no_sync` have begun."""
        yield
        if isinstance(model, pydist.DataParallel):
            model.sync_gradients()

    # --- metrics ---------------------------------------------------------------------------------

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all processes have of a batch, in the order of the data, each sample once.

        Every process calls it, in each step. Processes may have different numbers of samples.
        """
        loader = self.gradient_state.active_dataloader
        if not isinstance(loader, ResumableLoader):
            return super().gather_for_metrics(input_data, use_gather_object)
        # What fills up the last batch comes after the samples.
        samples = loader.samples_of_step()
        end = samples if samples < loader.total_batch_size else None
        are_tensors = not use_gather_object
        if are_tensors:
            try:
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:
                are_tensors = False
        if are_tensors:
            return recursively_apply(lambda tensor: _in_order(tensor)[:end], input_data)
        lists = [list(each) for each in gather_object([input_data])]
        turns = range(max(map(len, lists)))
        return [each[turn] for turn in turns for each in lists if turn < len(each)][:end]

    # --- checkpoints -----------------------------------------------------------------------------

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Begins the epoch behind its first batches, wherever `load_state` has put the loader.

        Returns:
            The same loader, whose next epoch begins at its front, where pydist shares its samples.
        """
        if not isinstance(dataloader, ResumableLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.skip_to(num_batches)
        return dataloader

    def _save_place(self, models: Any, weights: Any, folder: str) -> None:
        on_each = self.project_configuration.save_on_each_node
        if not (self.is_local_main_process if on_each else self.is_main_process):
            return
        loaders = [
            loader.state_dict() if isinstance(loader, ResumableLoader) else None
            for loader in self._dataloaders
        ]
        text = json.dumps({"step": self.step, "loaders": loaders})
        Path(folder, _PLACE_IN_DATA).write_text(text)

    def _load_place(self, models: Any, folder: str) -> None:
        path = Path(folder, _PLACE_IN_DATA)
        if not path.exists():  # one of Accelerate's own
            return
        place = json.loads(path.read_text())
        states = place["loaders"]
        if len(states) != len(self._dataloaders):
            raise InvalidUsage(
                f"the checkpoint in {folder} has {len(states)} prepared loaders, and this program "
                f"has {len(self._dataloaders)}: prepare the same ones, in the same order."
            )
        # Accelerate keeps it in a file for each process, which further ones have not.
        self.step = place["step"]
        for loader, state in zip(self._dataloaders, states, strict=True):
            if state is not None and isinstance(loader, ResumableLoader):
                loader.load_state_dict(state)


def _in_order(tensor: Tensor) -> Tensor:
    """All processes' rows: their first ones, then their second ones, and so on."""
    rows = pydist.nn.all_gather(tensor.detach())
    own = torch.tensor([tensor.shape[0] if tensor.dim() else 1], device=tensor.device)
    counts = pydist.all_gather(own).tolist()
    turns = torch.cat([torch.arange(count) for count in counts])
    return rows[turns.argsort(stable=True).to(rows.device)]
