"""Lightning's Trainer and Fabric on pydist.

`import pydist.integrations.lightning` registers the strategies "pydist", "pydist_spawn" and
"pydist_notebook", which start processes as "ddp", "ddp_spawn" and "ddp_notebook" do::

    import pydist.integrations.lightning
    trainer = lightning.Trainer(strategy="pydist", devices=2)

`lightning` and `pytorch_lightning` are two packages with classes of their own, so each that is
installed gets strategies of its own. All methods here are those of Lightning's `DDPStrategy`;
only what differs is written down.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.data as torch_data
from torch import Tensor, nn

import pydist
from pydist.errors import InvalidUsage, Mismatch
from pydist.job import groups
from pydist.job.outcome import outcomes
from pydist.job.rank_names import culprits, who_said_what
from pydist.parallel.wrapper import watch_outputs
from pydist.sampling.order import sample_count

__all__ = ["register"]

# What the classes below stand before, which is another class in each package.
_Base: Any = object

# The names of strategies, and how each starts its processes.
_START_METHODS = {"pydist": "popen", "pydist_spawn": "spawn", "pydist_notebook": "fork"}

# torch's names of operators, and Lightning's, where pydist has another.
_OPERATORS = {"avg": "mean", "product": "prod"}


def _reduce(tensor: Any, group: Any, reduce_op: Any) -> Any:
    """Reduces a tensor, in place, in one collective; returns what is no tensor as it is.

    The mean of integers is a new tensor, of torch's default type: Lightning divides sums by means
    of counts, and one that was cut off to an integer makes every result over uneven shares wrong.
    """
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    operator = str(reduce_op).rpartition(".")[2].lower()
    operator = _OPERATORS.get(operator, operator)
    if operator != "mean" or tensor.is_floating_point() or tensor.is_complex():
        return pydist.all_reduce(tensor, operator, group=group)
    total = pydist.all_reduce(tensor.to(torch.int64, copy=True), "sum", group=group)
    return total / dist.get_world_size(group)


class _Logged(NamedTuple):
    """What `self.log` gets as `sync_dist_group`, so that `reduce` knows the logged value's name."""

    name: str
    group: Any


def _log(model: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """The model's own `log`, which passes the name on to `reduce`."""
    # Positions in Lightning's signature, behind the name; few pass a group, and fewer by position.
    position = 8
    if len(args) > position:
        args = (*args[:position], _Logged(name, args[position]), *args[position + 1 :])
    else:
        kwargs["sync_dist_group"] = _Logged(name, kwargs.get("sync_dist_group"))
    type(model).log(model, name, *args, **kwargs)


def _reduce_logged(value: Tensor, logged: _Logged, reduce_op: str, wrapper: Any) -> Tensor:
    """Reduces a number that all ranks have logged by the same name, in one collective.

    The digest of the name travels with the number. An all_reduce of numbers alone would mix what
    ranks have logged by different names.

    Raises:
        Mismatch: Ranks have logged different names (on every rank).
    """
    if not dist.is_initialized():
        return value
    digest = int.from_bytes(hashlib.sha256(logged.name.encode()).digest()[:8], "big", signed=True)
    bits = value.detach().reshape(1).to(torch.float64).view(torch.int64)
    own = torch.cat([bits.new_tensor([digest]), bits])
    if logged.group is None and isinstance(wrapper, pydist.DataParallel):
        communicator = wrapper._communicator
    else:
        communicator = groups.communicator_of(logged.group, "sync_dist_group")
    table = own.new_empty((communicator.size, 2))
    communicator.all_gather(own, table, label=f"self.log({logged.name!r})")
    if any(each != digest for each in table[:, 0].tolist()):
        everybody = outcomes(communicator, "self.log", None, {"name": logged.name})
        names = [repr(each.facts["name"]) for each in everybody]
        other = next(rank for rank, each in enumerate(names) if each != names[0])
        raise Mismatch(
            f"self.log(..., sync_dist=True) logs {who_said_what(names)}: log the same names in the "
            "same order on all ranks, or without sync_dist what only some of them have.",
            **culprits(communicator, [0, other], "logged different names"),
        )
    numbers = table[:, 1].contiguous().view(torch.float64)
    result: Tensor = getattr(numbers, {"max": "amax", "min": "amin"}.get(reduce_op, reduce_op))()
    is_float = value.is_floating_point()
    return result.to(value.dtype if is_float else torch.get_default_dtype()).reshape(value.shape)


def _wrap(module: nn.Module, device_ids: list[int] | None, arguments: dict[str, Any]) -> nn.Module:
    return pydist.DataParallel(module, device_ids=device_ids, **arguments)


class _JoinsPydist(_Base):
    """What the strategies of Trainer and of Fabric have in common."""

    def _get_process_group_backend(self) -> str:
        given = self._process_group_backend
        if given not in (None, "pydist"):
            raise InvalidUsage(
                f"process_group_backend={given!r} is not possible with strategy 'pydist', whose "
                "process group is pydist's own: leave it out, and choose what pydist runs on by "
                "PYDIST_BACKEND=native, gloo or nccl."
            )
        return "pydist"


class _TrainerMethods(_JoinsPydist):
    """Of a strategy for `Trainer`."""

    model: Any
    _is_in_training_step = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # DDP's own switches averaging off at the end of a forward in which backwards have run:
        # with optimization by hand, whose training step runs inside of the wrapper's forward.
        self._forward_redirection = self._redirection_class()

    def connect(self, model: Any) -> None:
        super().connect(model)
        model.log = functools.partial(_log, model)

    def setup_distributed(self) -> None:
        super().setup_distributed()
        pydist.init()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return _wrap(model, self.determine_ddp_device_ids(), self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is None:
            return
        if self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        self.model.register_comm_hook(self._ddp_comm_state, hook)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._is_in_training_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._is_in_training_step = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Lets a backward average that optimization by hand runs inside of the forward."""
        wrapper = self.model
        by_hand = not self.lightning_module.automatic_optimization
        if by_hand and isinstance(wrapper, pydist.DataParallel):
            watch_outputs(weakref.ref(wrapper), closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Does nothing: `pre_backward` has seen to it."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if isinstance(self.model, pydist.DataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(group, _Logged):
            # A rank that logs less goes on to the backward from a training step, and from anywhere
            # else to an operation of Lightning's, in all ranks' group. It is found at once where
            # both are in one group.
            wrapper = self.model if self._is_in_training_step else None
            return _reduce_logged(tensor, group, reduce_op, wrapper)
        return _reduce(tensor, group, reduce_op)

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        return _shared(dataloader, pads=trainer.training)

    def teardown(self) -> None:
        if isinstance(self.model, pydist.DataParallel):
            self.model = self.lightning_module
        # The model goes on without pydist, and is saved and copied as it came.
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("log", None)
        super().teardown()


class _TorchsShuffle:
    """The order of torch's DistributedSampler, so that a training is the same as under DDP."""

    name = "shuffled by torch"

    def __init__(self, length: int) -> None:
        self._length = length
        self._seed: int | None = None
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        """What stands at some positions."""
        if self._seed != seed + epoch:
            self._seed = seed + epoch
            generator = torch.Generator().manual_seed(self._seed)
            self._permutation = torch.randperm(self._length, generator=generator)
        return self._permutation[positions.start : positions.stop : positions.step]


def _shared(loader: Any, *, pads: bool) -> Any:
    """A loader that can be resumed in mid-epoch, in place of one that Lightning shares out.

    Args:
        loader: As Lightning has made it, with a sampler of torch's where it shares out samples.
        pads: Whether all ranks get equally many samples. In training they do; elsewhere a sample
            that comes twice would count twice.
    """
    sampler = getattr(loader, "sampler", None)
    batched = getattr(loader, "batch_sampler", None)
    if (
        type(sampler) is not torch_data.DistributedSampler
        or type(batched) is not torch_data.BatchSampler
        or isinstance(loader, pydist.PreparedLoader)
    ):
        return loader
    length = sample_count(sampler.dataset)
    order = _TorchsShuffle(length) if sampler.shuffle else pydist.Sequential(length)
    own = pydist.DistributedSampler(
        sampler.dataset,
        sampler.num_replicas,
        sampler.rank,
        seed=sampler.seed,
        pad="repeat" if pads else "none",
        order=order,
    )
    batches = pydist.BatchSampler(own, batched.batch_size, drop_last=batched.drop_last)
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    names += ["multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"]
    settings = {name: getattr(loader, name) for name in names}
    return pydist.prepare(torch_data.DataLoader(loader.dataset, batch_sampler=batches, **settings))


class _SyncControl(_Base):
    """Of Fabric, for `fabric.no_backward_sync`."""

    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        if not isinstance(module, pydist.DataParallel):
            raise InvalidUsage(
                f"fabric.no_backward_sync got a {type(module).__name__}, which is not wrapped in "
                "pydist.DataParallel: give it what fabric.setup has returned."
            )
        return module.no_sync(enabled)


class _FabricMethods(_JoinsPydist):
    """Of a strategy for `Fabric`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        pydist.init()

    def setup_module(self, module: nn.Module) -> nn.Module:
        return _wrap(module, self._determine_ddp_device_ids(), self._ddp_kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _reduce(tensor, group, reduce_op)


def _make(name: str, base: type, methods: type, **attributes: Any) -> type:
    """A strategy's class, at the root of this module: spawned processes get it by its name."""
    made = type(name, (methods, base), {"__module__": __name__, **attributes})
    globals()[name] = made
    return made


def register() -> list[str]:
    """Registers the strategies with each Lightning that is installed; importing this module does.

    Returns:
        The names of the packages that have them now.

    Raises:
        ImportError: Neither `lightning` nor `pytorch_lightning` is installed.
    """
    found = []
    for package, trainer, fabric in (
        ("lightning", "lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
    ):
        if importlib.util.find_spec(package) is None:
            continue
        found.append(package)
        strategies = importlib.import_module(f"{trainer}.strategies")
        redirection = importlib.import_module(f"{trainer}.strategies.strategy")._ForwardRedirection
        of_fabric = importlib.import_module(f"{fabric}.strategies")
        prefix = "Lightning" if package == "lightning" else "PytorchLightning"
        for_trainer = _make(
            f"{prefix}Strategy",
            strategies.DDPStrategy,
            _TrainerMethods,
            _redirection_class=redirection,
        )
        for_fabric = _make(f"{prefix}FabricStrategy", of_fabric.DDPStrategy, _FabricMethods)
        for registry, made in (
            (strategies.StrategyRegistry, for_trainer),
            (of_fabric.STRATEGY_REGISTRY, for_fabric),
        ):
            for name, method in _START_METHODS.items():
                registry.register(
                    name,
                    made,
                    description=f"pydist.DataParallel, with `start_method` '{method}'",
                    override=True,
                    start_method=method,
                )
    if not found:
        raise ImportError(
            "pydist.integrations.lightning needs Lightning: pip install 'pydist[lightning]'"
        )
    return found


register()
