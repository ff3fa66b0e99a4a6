"""`pydist.DataParallel`: the same model on every rank, trained on the mean of their gradients.

Here are the reference of its arguments, its construction, and copies. Its methods are in
`wrapper_parts`: each kind in a base class, in a file of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pydist._torch import OF_MODULE, share_tables
from pydist.config.in_force import takes_from_config
from pydist.errors import InvalidUsage
from pydist.job import membership
from pydist.job.arguments import a_type, flag
from pydist.parallel.backward_weights import BackwardWeights
from pydist.parallel.checks.divergence_check import Sentinel
from pydist.parallel.checks.finite_check import FiniteCheck
from pydist.parallel.like_torch.torch_arguments import (
    input_device_of,
    refuse_unsupported,
    warn_of_check_reduction,
)
from pydist.parallel.names.state_hooks import run_hooks_of_module
from pydist.parallel.nested_wrappers import refuse_wrapped
from pydist.parallel.ownership import note_wrapper
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.settings import Settings, settings_of
from pydist.parallel.trained_parameters import TrainedParameters, require_trainable
from pydist.parallel.wrapper_parts.accumulation import Accumulation
from pydist.parallel.wrapper_parts.forward import Forward, watch_outputs
from pydist.parallel.wrapper_parts.introspection import Introspection
from pydist.parallel.wrapper_parts.stands_for_module import StandsForModule
from pydist.parallel.wrapper_parts.torch_idioms import TorchIdioms
from pydist.parallel.wrapper_parts.uneven_inputs import UnevenInputs
from pydist.parallel.wrapper_parts.watched_methods import WatchedMethods
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Of a wrapper's attributes, those that its copies do not take over.
_NOT_COPIED = OF_MODULE | {"process_group"}

# The arguments that `pydist.Config` may have in its section "model".
_CONFIGURABLE = (
    *("broadcast_buffers", "forward_sync_buffers", "init_sync", "reduction", "compress"),
    *("bucket_cap_mb", "bucket_cap_mb_list", "gradient_as_bucket_view"),
    *("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"),
    *("check_every", "check_finite"),
)

# Of these, those that say the same in two ways.
_ALIKE = (("broadcast_buffers", "forward_sync_buffers"), ("bucket_cap_mb", "bucket_cap_mb_list"))


class DataParallel(
    Forward, Accumulation, UnevenInputs, Introspection, TorchIdioms, StandsForModule
):
    """Wraps a module so that every backward leaves the mean of all ranks' gradients.

    All ranks construct it together, with the same module. It joins the job from the environment by
    itself (`pydist.init()`), and talks in a group of its own, so it never gets in the way of
    collectives of yours.

    To everything that goes by names, the wrapper is the module: `state_dict`, `named_parameters`,
    `named_buffers` and `named_modules` have no `module.` prefix, and attributes of the module are
    attributes of the wrapper. Pickles (`torch.save` too) are of the module alone, without the
    wrapper.

    `copy.deepcopy(model)` is a wrapper with the same settings around a copy of the module. It talks
    to nobody, so one rank may make it and evaluate with it under `torch.no_grad()`. It joins the
    other ranks at its first forward with gradients enabled in which a parameter requires one, or
    when a method is called that needs all ranks (`weighted`, `join`, `register_comm_hook`, ...), or
    a `pydist.ShardedOptimizer` is made: on all ranks. Then modules are compared, and rank 0's
    buffers copied, but no parameters. `plan` and `stats()` are there from then on.

    A parameter that the backward of this rank did not reach counts as zero in the mean if another
    rank's did, and keeps the gradient that it had (None, as a rule) if none did. Gradients live in
    memory that all ranks share, and `zero_grad()` may set them to None as always. One that the
    program keeps beyond that keeps its values (see `gradient_as_bucket_view`).

    As in torch's wrapper, it is the forward that decides whether its backward averages: one inside
    `no_sync()` does not, nor does one of `model.module(...)`, past the wrapper. Methods of the
    module that are called through the wrapper, `model.encode(x)` say, count as forwards.

    Buffers of rank 0 are copied to all ranks at the end of every synchronised backward before
    which any rank changed its own. Hence they are the same everywhere between steps, unless the
    program changes them there, and a forward talks to nobody: one rank may evaluate alone.

    Parameters and buffers that `module._ddp_params_and_buffers_to_ignore` names, as for torch's
    class, are each rank's own: they are neither compared, copied nor averaged, and ranks may have
    others of them (docs/training.md).

    Parameters that are unfrozen or added later train from the next backward on, if all ranks do
    the same. Those added get rank 0's values at its end.

    A parameter is trained by one wrapper: whoever takes it up last, at construction or because it
    was unfrozen, retires any other that trains it, whatever still refers to that. Its `forward`,
    and `step()` of its `pydist.ShardedOptimizer`, raise InvalidUsage from then on.

    Two methods may be overridden: `plan_buckets` and `average_bucket`.

    If backward raises on one rank, the others get a `pydist.Error` that names it at the end of
    theirs, and all can go on with the next step. What raises outside of the module's part of
    backward, in the loss say, is nobody's but that rank's: it must not leave the step out.

    Args:
        module: The module, on the CPU or on CUDA devices (also several), with its parameters in
            their final dtypes.
        device_ids: One GPU, by number, to which forward moves its arguments. Default: they stay
            where they are. None for a module on the CPU. Several GPUs, the module's own first: as
            in torch.nn.DataParallel, forward cuts the tensors among its arguments along `dim`, runs
            a copy of the module on each GPU, and joins the outputs (tensors or None in any nesting;
            a scalar becomes a vector with an element for each GPU, so a mean over the batch, a
            loss say, is better computed from what forward returns). Fewer GPUs compute where the
            batch is smaller. Backward sums the gradients into the module's parameters, and they are
            averaged over the ranks then. The copy on the first GPU has the module's own buffers, so
            what it changes in place stays. `device_ids=["cpu", "cpu"]` does the same on the CPU, to
            try it. Methods other than forward run on the first device alone. A process for each GPU
            (`pydist run --gpus`) is faster.
        output_device: With several `device_ids`, where the joined outputs go: one of the GPUs, by
            number, or "cpu". Default: the first. Otherwise that GPU again, or None: outputs stay
            where the module computes them.
        dim: With several `device_ids`, the dimension along which arguments are cut and outputs
            joined. Default: 0. Of no effect otherwise, in torch's class as well: a rank's batch is
            its own. It can be read as `model.dim`.
        broadcast_buffers: Whether to copy rank 0's buffers to all ranks, at construction and after
            each backward. Default: True. `model.broadcast_buffers = False` stops it later.
        init_sync: Whether to copy rank 0's parameters at construction, and its buffers. If False,
            seeing to it that all ranks start from the same values is up to you; buffers are copied
            all the same where they are copied while training, as torch's first forward does.
        process_group: The ranks to average over, with this one among them; default: all.
        bucket_cap_mb: A bucket is closed once it holds at least so many MiB. Default: what a short
            measurement of the connection between the ranks finds best; with a
            `pydist.ShardedOptimizer`, the same in every run of the same model.
        find_unused_parameters: Either is accepted, because they are found always, at the end of
            backward, without a search through the graph.
        check_reduction: Deprecated in torch, and of no effect there: warns.
        gradient_as_bucket_view: If False, the default, a gradient that the program holds beyond the
            step (in a list, by a view, `detach()`, a NumPy array) keeps its values, and one that it
            has put into `parameter.grad` itself, such as a view of a flat buffer, stays there and
            receives the average. Gradients lie in shared memory either way, and only those that
            somebody holds are copied (`stats().copied_bytes`). If True, the next backward writes
            into what is held. Without meaning for gradients that a `pydist.ShardedOptimizer` has.
        static_graph: Either is accepted, because it allows torch a faster search and some uses
            (reentrant checkpoints, a layer twice in one backward) that need no leave here: nothing
            is assumed about the graph.
        delay_all_reduce_named_params: Not supported: all parameters of the module are averaged as
            backward completes them.
        param_to_hook_all_reduce: Not supported, like the one before.
        mixed_precision: Not supported; use `torch.autocast`.
        device_mesh: A mesh of one dimension, instead of `process_group`.
        skip_all_reduce_unused_params: Either is accepted: what all ranks leave unused keeps its
            gradient always, and buckets of such parameters alone are the last ones.
        bucket_cap_mb_list: The size of each bucket, in MiB, in the order in which they travel; the
            last one is that of all buckets that follow. Counts instead of `bucket_cap_mb`.
        batched_grad_copy: Either is accepted, because it is about copies of gradients into buckets,
            and gradients are in buckets from the beginning.
        forward_sync_buffers: torch's newer name for `broadcast_buffers`, which it then overrides,
            but for the copy at construction.
        reduction: What backward leaves: the "mean" over the ranks, or their "sum".
        compress: "bf16" or "fp16" lets float32 gradients travel between hosts in that type. The
            sum of each host is rounded to it, these are added up (in float32; in buckets of some
            KiB, on NCCL and on gloo each rank's gradient is rounded instead; on NCCL, and around a
            ring, every partial sum is rounded to the type, and "fp16" loses bits of what is below
            6e-5 times the number of ranks), and the result is rounded to it. On one host nothing is
            rounded. Default: as they are.
        check_every: In every how many steps the ranks compare their parameters, and the buffers
            that are copied; the same on all ranks. Each rank reads its model once for that, and a
            digest is gathered before the forward. Where models differ all ranks raise Mismatch
            there, which names the first tensor, the ranks and the step. Default: never. A step is a
            forward that averages. What it takes is logged (`PYDIST_LOG=info`).
        check_finite: Whether a backward raises FloatingPointError as soon as a gradient of this
            rank's has a NaN or Inf, with the parameter, the rank and the step; the other ranks get
            an Error that names the rank. What is accumulated under `no_sync()` raises when it is
            averaged. On a GPU, for which the host does not wait, a later backward that averages
            raises it, as a rule the next one, or `pydist.save(model=)`; a step has been taken with
            it by then. Reads every gradient, those of weight 0 as well. Not for use with a
            `GradScaler`, which provokes Inf and skips those steps, nor in a CUDA graph. Default:
            False.

    Raises:
        InvalidUsage: A parameter is on another device or not dense, none requires a gradient, a
            part of the module is wrapped already (also by torch's class), an argument is of a wrong
            type or not supported, `device_ids` names a GPU that the module is not on, or devices of
            several kinds, or a GPU twice, this rank is not in `process_group`, a parameter is named
            as ignored by some of its names only, or the backend can't reduce such gradients (NCCL,
            in a wire type or on the ring, without pydist's CUDA kernels).
        Mismatch: The module or an argument differs between ranks (on every rank, naming the first
            difference).

    Example:
        >>> model = pydist.DataParallel(torch.nn.Linear(2, 1))
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[4., 4.]])
    """

    module: nn.Module

    _own_names = frozenset(WrapperState.__annotations__.keys() - {"module"}) | {
        "_watched_methods",
        "stats_resets",
    }

    @takes_from_config("model", names=_CONFIGURABLE, alike=_ALIKE)
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: object = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        compress: Literal["bf16", "fp16"] | None = None,
        check_every: int | None = None,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        refuse_unsupported(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
        )
        warn_of_check_reduction(flag("check_reduction", check_reduction))
        settings = settings_of(
            device_ids=device_ids,
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            device_mesh=device_mesh,
            bucket_cap_mb_list=bucket_cap_mb_list,
            forward_sync_buffers=forward_sync_buffers,
            reduction=reduction,
            compress=compress,
            check_every=check_every,
            check_finite=check_finite,
            dim=dim,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            mixed_precision=None,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        if not isinstance(module, nn.Module):
            raise InvalidUsage(f"pydist.DataParallel wraps a torch.nn.Module, not {a_type(module)}")
        refuse_wrapped(module)
        local = RankLocal(module)
        local.warn_of_unknown()
        require_trainable(local)
        input_device = input_device_of(local, settings.device_ids, settings.output_device)
        if settings.replicas is not None:
            settings.replicas.require_copyable(module)
        membership.init()
        self._wrap(local, settings, input_device)
        self._join(
            with_parameters=init_sync,
            with_buffers=settings.copies_buffers_first if init_sync else settings.copies_buffers,
        )
        self.register_load_state_dict_post_hook(run_hooks_of_module)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_forget_late)  # type: ignore[no-untyped-call]
        note_wrapper(self)

    def _wrap(
        self, local: RankLocal, settings: Settings, input_device: torch.device | None
    ) -> None:
        module = local.module
        share_tables(self, module)
        self._settings = settings
        self._local = local
        self._input_device = input_device
        self._trained = TrainedParameters(local)
        self._buffer_sync = None
        self._sentinel = Sentinel(settings.check_every)
        self._finite_check = FiniteCheck(settings.check_finite)
        self._weights = BackwardWeights()
        self._owners = []
        self._sharded_parameters = {}
        # The reducer must not keep the wrapper alive, which keeps the reducer. Nor must methods.
        itself = weakref.ref(self)
        self._watched_methods = WatchedMethods(lambda outputs: watch_outputs(itself, outputs))
        self._why_retired = ""
        self._working_reducer = None
        self._torch_buckets = None
        self._has_comm_hook = False
        self._forwards = 0
        self.stats_resets = 0
        self._averages_when_joined = True
        self._take_torch_attributes(input_device, settings.process_group, **settings.of_torch)

    def _forget_late(self) -> None:
        """Tells of nothing that a GPU has computed until now: other values are loaded."""
        self._finite_check.forget()
        self._weights.forget()

    def _settle(self) -> None:
        """Waits for what is told late of earlier steps, because a GPU has computed it.

        Raises:
            FloatingPointError: A gradient was not finite (with `check_finite=True`).
            InvalidUsage: A weight was none.
        """
        if self._working_reducer is not None:
            self._weights.settle(self._working_reducer)
            self._finite_check.settle()

    def extra_repr(self) -> str:
        """The backend and the ranks, for `repr`."""
        if not self.has_joined:
            return "a copy that has not joined the other ranks"
        return f"ranks={self._communicator.size}, backend={self._communicator.backend}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A wrapper around a copy of the module, which joins when it is to train."""
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        memo[id(self)] = copied
        settings = dataclasses.replace(self._settings, copies_buffers=self.forward_sync_buffers)
        module = copy.deepcopy(self.module, memo)
        copied._wrap(RankLocal(module), settings, self._input_device)
        if not self.is_retired:
            copied._averages_when_joined = self.require_backward_grad_sync
        # Hooks, and attributes that the program has set. Communication hooks stay behind, as in
        # torch: they may keep state of the buckets.
        for name in self.__dict__.keys() - self._own_names - _NOT_COPIED:
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        note_wrapper(copied)
        return copied


def _forget_late(wrapper: DataParallel, _: object) -> None:
    wrapper._forget_late()
