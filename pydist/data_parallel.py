"""`pydist.DataParallel`: the same model on every rank, trained on the mean of their gradients."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pydist import groups, process
from pydist.buffer_sync import BufferSync
from pydist.errors import InvalidUsage, Mismatch
from pydist.gradient_sync import (
    CommunicationStats,
    make_reducer,
    names_of_sparse,
    outputs_with_graph,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pydist._native import Communicator

__all__ = ["CommunicationStats", "DataParallel"]

# Small enough that most of the traffic is over when backward ends, large enough that the cost of
# starting an operation does not show on any backend.
_DEFAULT_BUCKET_CAP_MB = 8.0


class DataParallel(nn.Module):
    """Wraps a module so that every backward leaves the mean of all ranks' gradients.

    All ranks construct it together, with the same module. It joins the job from the environment by
    itself (`pydist.init()`), and talks in a group of its own, so it never gets in the way of
    collectives of yours.

    To everything that goes by names, the wrapper is the module: `state_dict`, `named_parameters`,
    `named_buffers` and `named_modules` have no `module.` prefix, and attributes of the module are
    attributes of the wrapper. Copies (`copy.deepcopy`, pickle, `torch.save`) are of the module
    alone, without the wrapper.

    A parameter that the backward of this rank did not reach counts as zero in the mean if another
    rank's did, and keeps the gradient that it had (None, as a rule) if none did. Gradients live in
    memory that all ranks share: `parameter.grad` is a view of it, and `zero_grad()` may set it to
    None as always.

    Buffers of rank 0 are copied to all ranks at the end of every synchronised backward. Hence
    they are the same everywhere whenever no step is under way, and a forward talks to nobody:
    one rank may evaluate alone.

    If backward raises on one rank, the others get a `pydist.Error` that names it at the end of
    theirs, and all can go on with the next step.

    Args:
        module: The module, on the CPU, with its parameters in their final dtypes.
        device_ids: Accepted for compatibility; the parameters say where they are.
        output_device: Accepted for compatibility.
        dim: Accepted for compatibility.
        broadcast_buffers: Whether to copy rank 0's buffers to all ranks, at construction and after
            each backward. Default: True.
        init_sync: Whether to compare the module with the other ranks' and to copy rank 0's
            parameters and buffers at construction. If False, seeing to it that all ranks start
            from the same values is up to you.
        process_group: The ranks to average over; default: all.
        bucket_cap_mb: How many MiB of gradients travel in one operation. Default: 8.
        find_unused_parameters: Accepted for compatibility: they are always found, at no cost.
        check_reduction: Accepted for compatibility.
        gradient_as_bucket_view: Accepted for compatibility: gradients always are.
        static_graph: Accepted for compatibility: nothing is assumed about the graph.
        delay_all_reduce_named_params: Not supported.
        param_to_hook_all_reduce: Not supported.
        mixed_precision: Not supported; use `torch.autocast`.
        device_mesh: A mesh of one dimension, instead of `process_group`.
        skip_all_reduce_unused_params: Accepted for compatibility.
        bucket_cap_mb_list: Not supported; give one `bucket_cap_mb`.
        batched_grad_copy: Accepted for compatibility.
        forward_sync_buffers: torch's newer name for `broadcast_buffers`, which it then overrides,
            but for the copy at construction.

    Raises:
        InvalidUsage: A parameter is not on the CPU or not dense, or an argument is not supported.
        Mismatch: The module differs between ranks (on every rank, naming the first difference).

    Example:
        >>> model = pydist.DataParallel(torch.nn.Linear(2, 1))
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[4., 4.]])
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        if device_mesh is not None:
            if process_group is not None:
                raise InvalidUsage("pass either process_group or device_mesh, not both")
            process_group = device_mesh.get_group()
        if bucket_cap_mb is None:
            bucket_cap_mb = _DEFAULT_BUCKET_CAP_MB
        if not bucket_cap_mb > 0:
            raise InvalidUsage(f"bucket_cap_mb is {bucket_cap_mb}; it must be greater than zero")
        _check_parameters(module)
        sync_buffers = broadcast_buffers is not False
        if forward_sync_buffers is not None:
            sync_buffers = forward_sync_buffers

        # Note [One set of names]: the wrapper shares the module's tables instead of holding the
        # module as a child, so that all of nn.Module finds the same names in both.
        self.__dict__.update(
            module=module,
            training=module.training,
            _parameters=module._parameters,
            _buffers=module._buffers,
            _non_persistent_buffers_set=module._non_persistent_buffers_set,
            _modules=module._modules,
        )
        process.init()
        # A group of its own: the user's collectives can't be taken for these, or these for theirs.
        parent = groups.communicator_of(process_group)
        self._communicator = groups.split(parent, range(parent.size))
        if init_sync:
            _check_same_module(self._communicator, module)
            _copy_from_rank_0(
                self._communicator,
                module,
                with_buffers=broadcast_buffers is not False or forward_sync_buffers is not None,
            )
        named = list(module.named_parameters())
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        has_buffers = next(module.buffers(), None) is not None
        self._reducer = make_reducer(
            self._communicator,
            [(name, p) for name, p in named if p.requires_grad],
            BufferSync(self._communicator, module) if sync_buffers and has_buffers else None,
            int(bucket_cap_mb * 2**20),
            names_of_sparse(module),
        )

    # -- computation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Talks to no other rank."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InvalidUsage(
                    f"parameter {name} was frozen (requires_grad=False) when pydist.DataParallel "
                    "wrapped the module, so its gradient would not be averaged: unfreeze it "
                    "first, then wrap the module"
                )
        self._reducer.prepare_forward()
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in outputs_with_graph(outputs):
                self._reducer.watch(tensor)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without averaging them, in every backward that runs inside.

        The next backward outside averages what has been accumulated, also of parameters that it
        does not reach itself. All ranks do the same.
        """
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def stats(self) -> CommunicationStats:
        """What averaging has cost this rank since construction or the last `reset_stats()`."""
        return self._reducer.stats

    def reset_stats(self) -> None:
        """Lets `stats()` count from zero."""
        self._reducer.reset_stats()

    # -- the wrapper stands for the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None:
                raise
            return getattr(module, name)

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
    ) -> None:
        """Lets a communication hook of torch's kind average the gradients, bucket by bucket.

        Torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unmodified. All ranks
        register the same one, once, before the first backward. Sparse gradients do not pass
        through it. Complex ones arrive as pairs of real numbers.

        Args:
            state: The first argument of every call.
            hook: `hook(state, bucket)` starts averaging `bucket.buffer()` and returns a future of
                the mean: in the bucket's dtype, or in one that is converted to it. It is called on
                the thread that runs backward, in the order of `bucket.index()`.

        Raises:
            InvalidUsage: `hook` can't be called so, or there is a hook already, or a backward was.
        """
        if not callable(hook):
            raise InvalidUsage(f"hook is a {type(hook).__name__}; it must be callable")
        try:
            inspect.signature(hook).bind(state, None)
        except TypeError as error:
            raise InvalidUsage(
                f"hook must take two arguments, the state and a torch.distributed.GradBucket: "
                f"{error}"
            ) from None
        except ValueError:
            pass  # a builtin without a signature
        self._reducer.register_comm_hook(state, hook)

    def join(self, *args: object, **kwargs: object) -> None:
        """Not built yet.

        Raises:
            InvalidUsage: always.
        """
        raise InvalidUsage(
            "pydist.DataParallel does not join uneven inputs yet: give every rank the same number "
            "of batches, or use torch's DistributedDataParallel on backend 'pydist'."
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state saved with or without the `module.` prefix of torch's wrapper.

        All ranks load the same state: nothing is copied between them.

        Args:
            state_dict: Names and values.
            strict: Whether missing and unexpected names are an error.
            assign: Not supported: the parameters stay the ones that were wrapped.

        Returns:
            The missing and unexpected names, like `torch.nn.Module.load_state_dict`.
        """
        if assign:
            raise InvalidUsage(
                "load_state_dict(assign=True) would replace the parameters that pydist."
                "DataParallel has hooked: load the module first, then wrap it"
            )
        return self.module.load_state_dict(_without_prefix(state_dict, self.module), strict)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.module._load_from_state_dict(*args)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The module and those within it, under the module's own names."""
        yield from self.module.named_modules(*args, **kwargs)

    def train(self, mode: bool = True) -> DataParallel:
        """Sets training mode in the module."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> DataParallel:
        """Applies `fn` to the module and those within it."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DataParallel:
        self.module._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Where it runs, for `repr`."""
        return f"ranks={self._communicator.size}, backend={self._communicator.backend}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        from copy import deepcopy

        return deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _unwrapped, (self.module,)


def _unwrapped(module: nn.Module) -> nn.Module:
    return module


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value:
            raise InvalidUsage(f"pydist.DataParallel does not support {name}")


def _check_parameters(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidUsage(f"pydist.DataParallel wraps a torch.nn.Module, not a {type(module)}")
    if isinstance(module, DataParallel):
        raise InvalidUsage("the module is a pydist.DataParallel already")
    for kind, tensors in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, tensor in tensors:
            if nn.parameter.is_lazy(tensor):
                raise InvalidUsage(
                    f"{kind} {name} has no shape yet: run one forward before wrapping the module"
                )
            if tensor.device.type != "cpu":
                raise InvalidUsage(
                    f"{kind} {name} is on {tensor.device}; pydist.DataParallel trains on the CPU"
                )
            if tensor.layout != torch.strided:
                raise InvalidUsage(
                    f"{kind} {name} is {tensor.layout}; pydist.DataParallel needs dense tensors"
                )


def _facts(module: nn.Module) -> list[str]:
    """What must be the same on all ranks, a line for each parameter and buffer."""
    lines = []
    for name, parameter in module.named_parameters():
        kind = "parameter" if parameter.requires_grad else "frozen parameter"
        lines.append(f"{kind} {name}: {tuple(parameter.shape)} {parameter.dtype}")
    for name, buffer in module.named_buffers():
        lines.append(f"buffer {name}: {tuple(buffer.shape)} {buffer.dtype}")
    return lines


def _check_same_module(communicator: Communicator, module: nn.Module) -> None:
    facts = _facts(module)
    text = json.dumps(facts).encode()
    # Digests first: a large model's names are long, and in all but the faulty case the same.
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    heads = _gather(communicator, torch.tensor([digest, len(text)]))
    if all(torch.equal(head, heads[0]) for head in heads):
        return
    padded = text.ljust(int(max(head[1] for head in heads)))
    texts = _gather(communicator, torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    everybody = [json.loads(bytes(gathered.tolist())) for gathered in texts]
    other = next(rank for rank, lines in enumerate(everybody) if lines != everybody[0])
    raise Mismatch(
        f"the module differs between ranks 0 and {other}: {_difference(everybody, other)}; build "
        "the same module on every rank before wrapping it"
    )


def _difference(facts: list[list[str]], other: int) -> str:
    first, second = facts[0], facts[other]
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours}, where rank {other} has {theirs}"
    longer, shorter = (0, other) if len(first) > len(second) else (other, 0)
    extra = facts[longer][len(facts[shorter])]
    return f"rank {longer} has {extra}, which rank {shorter} lacks"


def _gather(communicator: Communicator, tensor: Tensor) -> list[Tensor]:
    gathered = tensor.new_empty(communicator.size * tensor.numel())
    communicator.all_gather(tensor, gathered, False)
    return list(gathered.view(communicator.size, -1))


def _copy_from_rank_0(communicator: Communicator, module: nn.Module, *, with_buffers: bool) -> None:
    tensors = [*module.parameters(), *(module.buffers() if with_buffers else ())]
    for tensor in tensors:
        # Byte by byte, because not every backend can carry every dtype.
        memory = tensor.detach().contiguous()
        communicator.broadcast(memory.view(-1).view(torch.uint8), 0, False)
        if communicator.rank != 0:
            with torch.no_grad():
                tensor.copy_(memory)


def _without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Takes `module.` off all names, unless it is the module that has them."""
    prefix = "module."
    if not state_dict or not all(name.startswith(prefix) for name in state_dict):
        return state_dict
    own = module.state_dict()
    if own and all(name.startswith(prefix) for name in own):
        stripped = all(name.removeprefix(prefix) in own for name in state_dict)
        if not stripped:
            return state_dict
    plain = OrderedDict((name.removeprefix(prefix), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        plain._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name.removeprefix("module").removeprefix("."), value)
            for name, value in metadata.items()
            if name.startswith("module")
        )
    return plain
