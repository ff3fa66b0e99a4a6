"""`pydist.DataParallel`: the same model on every rank, trained on the mean of their gradients.

The file is long because the class is, a third of it the reference of its arguments and methods: the
class only says in which order what the other modules of this folder do is done.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pydist import _native
from pydist._torch import (
    OF_MODULE,
    Future,
    runs_uncompiled,
    runs_uncompiled_throughout,
    share_tables,
    tree_map_only,
)
from pydist.config.in_force import takes_from_config
from pydist.errors import Error, InvalidUsage, Timeout
from pydist.job import current, groups, membership
from pydist.job.arguments import a_type, flag
from pydist.parallel.backward_weights import BackwardWeights
from pydist.parallel.bucket_planner import (
    BucketPlan,
    PlannedBucket,
    PlannedParameter,
    best_cap_bytes,
    plan_buckets,
    typical_cap_bytes,
)
from pydist.parallel.buffers.buffer_sync import BufferSync
from pydist.parallel.checks.divergence_check import Sentinel
from pydist.parallel.checks.finite_check import FiniteCheck
from pydist.parallel.checks.replica_check import check_same, copy_from, facts_of
from pydist.parallel.checks.step_guard import guard_steps
from pydist.parallel.compiled_graphs import graphs_cut_at
from pydist.parallel.like_torch.torch_arguments import (
    input_device_of,
    refuse_unsupported,
    warn_of_check_reduction,
)
from pydist.parallel.like_torch.torch_buckets import TorchBuckets
from pydist.parallel.like_torch.torch_idioms import TorchIdioms, refuse_zero_hook
from pydist.parallel.like_torch.torchs_stages import warn_of_torchs_stage
from pydist.parallel.names.state_hooks import run_hooks_of_module
from pydist.parallel.nested_wrappers import (
    look_at_torchs_wrappers,
    refuse_active_torch,
    refuse_wrapped,
)
from pydist.parallel.ownership import ids_in_any, note_wrapper, trainers_of
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.reducer import (
    CommunicationStats,
    Trained,
    make_reducer,
    outputs_with_graph,
    require_reducible,
)
from pydist.parallel.settings import Settings, settings_of
from pydist.parallel.stands_for_module import StandsForModule
from pydist.parallel.sync_batch_norm import refuse_under_join, talk_apart
from pydist.parallel.trained_parameters import TrainedParameters, require_trainable
from pydist.parallel.watched_methods import WatchedMethods

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

# The groups of wrappers that are gone. The other ranks have yet to be told that an average was
# given up; when they make another wrapper with this rank, they have been. Reducers, which have the
# parameters, need not stay: what is under way keeps its own memory.
_giving_up: list[_native.Communicator] = []

# The wrapper that is in join(). There may be only one: ranks that wait for each other in two of
# them would wait in a circle.
_joining: weakref.ref[DataParallel] | None = None


class ShardOwner(Protocol):
    """An optimizer that updates shards of parameters, for what the wrapper asks of it."""

    def before_forward(self, module: nn.Module) -> None:
        """Waits for what the forward of this module would not wait for itself."""

    def during_forward(self) -> contextlib.AbstractContextManager[None]:
        """Hides from the forward what it can't do with."""

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """All ranks write the same into parameters, and nobody reads them. All have met before."""

    def finish(self) -> None:
        """Returns once all parameters have arrived that the last step has updated."""

    def own_writes(self) -> str:
        """What the program has written into parameters that all ranks share, in words; or ""."""


class DataParallel(TorchIdioms, StandsForModule):
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

    _own_names = frozenset(
        {
            "_communicator",
            "_working_reducer",
            "_why_retired",
            "_settings",
            "_trained",
            "_averages_when_joined",
            "_input_device",
            "_owners",
            "_sharded_parameters",
            "_local",
            "_buffer_sync",
            "_finite_check",
            "_sentinel",
            "_weights",
            "_torch_attributes",
            "_watched_methods",
            "_torch_buckets",
            "_has_comm_hook",
            "stats_resets",
        }
    )

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

    # Note [Joining]
    # A wrapper is made in two parts. `_wrap` talks to nobody; from then on the wrapper stands for
    # the module. `_join` meets the other ranks, and makes what averages: a communicator, memory for
    # gradients. The constructor does both. A copy (`copy.deepcopy`) is only wrapped, and joins when
    # it is to train: at the first forward with gradients enabled that a parameter requires, or when
    # a method is called that needs all ranks. So copies that never train, such as averages of the
    # weights, cost nothing, and one rank alone may make them.

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
        # The optimizers that update shards, by their numbers from 1.
        self._owners: list[weakref.ref[Any]] = []
        # For each parameter that an optimizer has, whether it trains now or not: the number of the
        # optimizer, and what stands for the gradient. It stays when the optimizer is gone, because
        # gradients go on being reduced into its shards.
        self._sharded_parameters: dict[Tensor, tuple[int, Tensor]] = {}
        # The reducer must not keep the wrapper alive, which keeps the reducer. Nor must methods.
        itself = weakref.ref(self)
        self._watched_methods = WatchedMethods(lambda outputs: watch_outputs(itself, outputs))
        self._why_retired = ""
        self._working_reducer: _native.Reducer | None = None
        self._torch_buckets: TorchBuckets | None = None  # with a communication hook
        self._has_comm_hook = False
        self._forwards = 0
        # How often the program has called `reset_stats()`, for who counts beside it.
        self.stats_resets = 0
        # What becomes the reducer's `enabled`.
        self._averages_when_joined = True
        self._take_torch_attributes(input_device, settings.process_group, **settings.of_torch)

    @runs_uncompiled_throughout
    def _join(self, *, with_parameters: bool, with_buffers: bool) -> None:
        """Meets the other ranks, which all call it. Where it raises, nothing has changed.

        Args:
            with_parameters: Whether to copy rank 0's parameters.
            with_buffers: Whether to copy rank 0's buffers.
        """
        settings, local = self._settings, self._local
        local.look_again()
        require_trainable(local)
        input_device = input_device_of(local, settings.device_ids, settings.output_device)
        if settings.replicas is not None:
            settings.replicas.require_copyable(local.module)
        membership.init()
        # A group of its own: the user's collectives can't be taken for these, or these for theirs.
        parent = groups.communicator_of(settings.process_group, "process_group")
        communicator = groups.split(parent, range(parent.size))
        talk_apart(local.module, settings.process_group, communicator)
        averages_itself = type(self).average_bucket is not DataParallel.average_bucket
        facts = [*settings.facts(), f"average_bucket of its own={averages_itself}"]
        check_same(communicator, "pydist.DataParallel's setting", facts)
        check_same(communicator, "the module", facts_of(local))
        require_reducible(communicator, local, settings.reduction, settings.wire_dtype)
        copy_from(
            communicator, 0, local, with_parameters=with_parameters, with_buffers=with_buffers
        )
        trained = TrainedParameters(local)
        trained.add_all()
        buffer_sync = BufferSync(communicator, local) if settings.copies_buffers else None
        itself = weakref.ref(self)
        reducer = make_reducer(
            communicator,
            trained.known,
            lambda *arguments: _plan(itself(), settings.caps_bytes, *arguments),
            buffer_sync,
            sums=settings.reduction == "sum",
            wire_dtype=settings.wire_dtype,
            measures_link=not settings.caps_bytes,
            gradients_are_views=settings.gradients_are_views,
            rank=membership.rank(),
        )
        reducer.enabled = self._averages_when_joined
        if buffer_sync is not None:
            buffer_sync.changes.reducer = weakref.ref(reducer)
        if averages_itself:
            self._let_hook_average(reducer, itself, _average_bucket)
        self._take_up(trained.known, "wrapped anew")
        self._communicator, self._input_device = communicator, input_device
        self._trained, self._buffer_sync = trained, buffer_sync
        self._working_reducer = reducer
        # Nobody can conclude what is held once the wrapper is gone.
        weakref.finalize(self, _give_up_held, weakref.ref(reducer), communicator).atexit = False
        _forget_given_up()
        if _forget_given_up not in current.before_closing:
            current.before_closing.append(_forget_given_up)
        self._finite_check.watch(trained.known, membership.rank(), reducer)
        guard_steps()
        look_at_torchs_wrappers()

    @property
    def has_joined(self) -> bool:
        """Whether the wrapper has met the other ranks. A copy does so when it is to train."""
        return self._working_reducer is not None or self.is_retired

    def require_joined(self) -> None:
        """Lets a copy join, if it has not yet. All ranks call it together."""
        if not self.has_joined:
            try:
                self._join(with_parameters=False, with_buffers=self._settings.copies_buffers)
            except Timeout as error:
                raise Timeout(
                    "a copy of a pydist.DataParallel joins the other ranks at its first forward "
                    "with gradients enabled, which all ranks call, and some did not come. To "
                    f"evaluate it on some ranks alone, use torch.no_grad(). ({error})",
                    **error.blame,
                ) from error

    def communicator_to_split(self) -> _native.Communicator:
        """One of the ranks that train the model, also before a copy has joined them."""
        if self.has_joined:
            return self._communicator
        membership.init()
        return groups.communicator_of(self._settings.process_group)

    def _join_after_forward(self) -> None:
        """Lets a copy join of which a method has run, whose graph may need its buffers."""
        self._join(with_parameters=False, with_buffers=False)
        if self._buffer_sync is not None:
            self._buffer_sync.forget()

    # -- computation

    # Of what this calls, dynamo is to compile the module's forward, and nothing of ours.
    @runs_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Talks to no other rank, but for `check_every=`."""
        args, kwargs, during = self._begin_forward(args, kwargs)
        with during:
            replicas = self._settings.replicas
            if replicas is not None:
                outputs = replicas.run(self.module, args, kwargs)
            else:
                outputs = self.module(*args, **kwargs)
        watch_outputs(weakref.ref(self), outputs)
        return outputs

    @runs_uncompiled_throughout
    def _begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], contextlib.ExitStack]:
        """What comes before the module's forward: its arguments, and what it is to run in."""
        self.require_working()
        refuse_active_torch(self)
        warn_of_torchs_stage()
        self._forwards += 1
        # Not in an evaluation, which one rank may do alone.
        trains = torch.is_grad_enabled()
        if trains and (joining := self._trained.joined()):
            if self.has_joined:
                self._add(joining)
            else:
                self.require_joined()
        replicas = self._settings.replicas
        for owner in self.shard_owners():
            owner.finish() if replicas is not None else owner.before_forward(self.module)
        if self._input_device is not None:
            # A packed sequence moves whole: its sizes of batches stay on the CPU.
            args, kwargs = tree_map_only(
                (Tensor, PackedSequence),
                lambda value: value.to(self._input_device),
                (args, kwargs),
                is_leaf=lambda value: isinstance(value, PackedSequence),
            )
        reducer = self._working_reducer
        if reducer is not None:
            self._weights.look_back(reducer)
            reducer.prepare_forward(trains and self.module.training)
            if trains and self._buffer_sync is not None:
                self._buffer_sync.before_forward(averages=reducer.enabled)
            self._let_sentinel_look(averages=trains and reducer.enabled)
        with contextlib.ExitStack() as during:
            during.enter_context(graphs_cut_at(self._settings.graph_cap_bytes))
            for owner in self.shard_owners():
                during.enter_context(owner.during_forward())
            if reducer is not None and self._buffer_sync is not None and not trains:
                during.enter_context(self._buffer_sync.during_forward_without_gradients())
            return args, kwargs, during.pop_all()

    def _let_sentinel_look(self, *, averages: bool) -> None:
        """Compares the models of the ranks before a forward, if that is asked for and due."""
        sentinel = self._sentinel
        if not averages:
            sentinel.note_other_forward(self.module.training)
            return
        if sentinel.is_due():
            for owner in self.shard_owners():
                owner.finish()
        has_buffers = self._buffer_sync is not None
        sentinel.before_forward(self._communicator, self._local, has_buffers)

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Accumulates gradients without averaging them, in backwards of forwards that run inside.

        It is the forward that counts, as in torch's wrapper, wherever its backward runs; a backward
        from several averages if any of them was outside. The next one that averages takes in what
        has been accumulated, also of parameters that it does not reach itself; so does
        `sync_gradients()`. All ranks do the same. An optimizer that is to use gradients of this
        rank alone, or that were averaged by other means, steps inside.

        Args:
            enabled: If False, nothing changes: `with model.no_sync(enabled=step % 4 != 3)`.
        """
        before = self.require_backward_grad_sync
        self._set_averages(before and not enabled)
        try:
            yield
        finally:
            self._set_averages(before)

    def expect_any_order(self) -> None:
        """A schedule chooses the order of backwards: one under `no_sync()` may overtake another.

        Otherwise that is warned of, once, because torch's wrapper would average the wrong one.
        """
        self.require_joined()
        if self._working_reducer is not None:
            self._working_reducer.expect_any_order()

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def holding_average(self) -> Iterator[None]:
        """Lets a backward that ends inside return before its gradients are averaged.

        What is ready of them is on its way by then. `conclude_average()` waits for the rest, and
        all ranks call it before anything else of the model but evaluation: a forward with gradients
        enabled, or a backward, that comes first gives the average up. Then `conclude_average()`, or
        the optimizer's step, raises here, and the other ranks get a `pydist.Error`.
        """
        self.require_joined()
        reducer = self._reducer
        before, reducer.holding = reducer.holding, True
        try:
            yield
        finally:
            reducer.holding = before

    @runs_uncompiled_throughout
    def conclude_average(self) -> None:
        """Returns once gradients are averaged of a backward that ended in `holding_average()`.

        All ranks call it. Does nothing where there was none.

        Raises:
            InvalidUsage: A forward, or something else, came first, and gave the average up.
            Error: Another rank gave it up; or what that backward would have raised at its end.
        """
        if self._working_reducer is not None:
            self._working_reducer.conclude_held()

    def give_up_average(self) -> None:
        """Lets the other ranks know that the average is not wanted that `holding_average()` holds.

        They get a `pydist.Error` from `conclude_average()`. Does nothing where none is held.
        """
        if self._working_reducer is not None:
            self._working_reducer.give_up_held()

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def weighted(self, weight: float | Tensor) -> Iterator[None]:
        """Lets every backward that runs inside count for `weight` in the mean.

        The mean over tokens of the whole job, where each rank's loss is the mean over its own::

            with model.weighted(mask.sum()):
                loss.backward()

        Together with `no_sync()`, the mean is over all backwards that a step accumulates: each has
        its weight, whichever rank and micro-batch it belongs to. So don't divide the loss by their
        number as well. The weights are summed in float64,
        and every gradient is rounded once, after the sum over the ranks; what one rank accumulates
        is rounded as it is added, as always. With `reduction="sum"`, gradients are
        multiplied by their weights and added. A communication hook gets gradients that were
        multiplied so that their mean (or sum) over the ranks is the weighted one.

        Every rank gives a weight to each of the backwards of a step, or none does.

        Args:
            weight: Not negative; 0 for a batch that counts for nothing, even where its loss is NaN.
                One that a GPU computes stays there where gradients travel by NCCL and the kernels
                of pydist, without a communication hook: the host does not wait for it. Elsewhere
                it does.

        Raises:
            InvalidUsage: The weight is negative or not finite; or an earlier one was, which had
                stayed on a GPU, and has left gradients of NaN on every rank; a forward raises it,
                too.
            Error: At the end of backward, if only some of the step's backwards had a weight.
        """
        self.require_joined()
        reducer = self._reducer
        before, reducer.weight = reducer.weight, self._weights.taken(weight, reducer)
        try:
            yield
        finally:
            reducer.weight = before

    @runs_uncompiled_throughout
    def sync_gradients(self) -> None:
        """Averages gradients outside of backward: those that were not yet. All ranks call it.

        That is what was accumulated under `no_sync()`, and what was put into `parameter.grad` by
        hand, from `torch.autograd.grad` say, which accumulates nothing and so averages nothing.
        A backward averages what was put by hand before it, too, with its own, for the weight of
        the first backward that the step accumulates. What `holding_average()` holds is concluded
        first.

        Raises:
            InvalidUsage: A gradient that accumulates on top of an averaged one was changed or
                replaced in between (with sums, weights or a `pydist.ShardedOptimizer`), or one that
                accumulates with weights was replaced (backward raises both as well); or it was
                summed, and then changed in place.
        """
        self.require_joined()
        self._reducer.synchronize(self._finite_check.before_sync)

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Lets ranks have different numbers of batches: whoever has no more joins the others.

        Around the training loop, on all ranks. A rank that leaves it goes on taking part in the
        others' steps, with gradients of zero, until all have left; then every rank has the model of
        the rank that ran the most forwards, also under `no_sync()`, the last one if several did.
        Buffers come from the last rank that has a batch, and in all steps after the first `join()`
        from the last rank, as in torch; before it, from rank 0. A rank's gradients are those of its
        own last step. It takes no part in the others' steps of the optimizer, whose
        state so misses them. Backwards under `no_sync()` are nobody else's concern.

        Args:
            divide_by_initial_world_size: Whether ranks without a batch count as zeros in the mean,
                so that each sample weighs the same in all steps of the epoch. If False, the mean
                is over the ranks that have a batch.
            enable: If False, nothing is done.
            throw_on_early_termination: Whether all ranks raise as soon as one has no more batches.

        Raises:
            InvalidUsage: The module holds a SyncBatchNorm, a `pydist.ShardedOptimizer` updates the
                model, or another wrapped model is in `join()`.
            Error: A rank had no more batches, and `throw_on_early_termination` is set.
        """
        if not enable:
            yield
            return
        self.require_working()
        self.require_joined()
        refuse_under_join(self.module)
        if self._sentinel.is_comparing:
            raise InvalidUsage(
                "join() leaves ranks without batches out of the forwards, in which all ranks "
                "compare their models (check_every=): leave one of them out"
            )
        if self._sharded_parameters:
            raise InvalidUsage(
                "join() leaves ranks without batches out of the optimizer's steps, and each rank's "
                "pydist.ShardedOptimizer updates a part of every parameter: give all ranks as many "
                "batches, those of weighted(0) if need be"
            )
        global _joining
        if _joining is not None:
            raise InvalidUsage(
                "another pydist.DataParallel is in join() already: ranks without batches would "
                "have to take part in the steps of both, in an order that they can't know"
            )
        is_mean = self._settings.reduction == "mean"
        if not divide_by_initial_world_size and self._has_comm_hook and is_mean:
            warnings.warn(
                "with a communication hook, torch's join() leaves what the hook returns as it is: "
                "a hook that divides by the number of ranks goes on counting those without a "
                "batch. Here its buckets are multiplied beforehand, so that the mean is over the "
                "ranks that have a batch, as divide_by_initial_world_size=False asks for",
                UserWarning,
                stacklevel=3,
            )
        _joining = weakref.ref(self)
        forwards_before = self._forwards
        self._reducer.set_joining(
            "zeros" if divide_by_initial_world_size else "absent", throw_on_early_termination
        )
        try:
            yield
            # The gradients of this rank's own last step, which rounds without a batch of this
            # rank's would take away. If gradients are views, such a round would also write into
            # them.
            are_views = self._settings.gradients_are_views
            kept = [
                (parameter, gradient.clone() if are_views else gradient)
                for _, parameter, _ in self._trained.known
                if (gradient := parameter.grad) is not None
            ]
            try:
                while self._reducer.join_round():
                    pass
            finally:
                for parameter, gradient in kept:
                    parameter.grad = gradient
        except BaseException:
            if not self.is_retired:
                self._reducer.leave_join()
            raise
        finally:
            _joining = None
            self._reducer.set_joining("", False)
        root = self._last_of_most(self._forwards - forwards_before)
        copy_from(self._communicator, root, self._local, with_buffers=self.forward_sync_buffers)

    def _last_of_most(self, forwards: int) -> int:
        """The rank that has run most forwards, the last one if several have. All ranks call it."""
        rank, size = self._communicator.rank, self._communicator.size
        last = torch.tensor([forwards * size + rank], device="cpu")
        self._communicator.all_reduce(last, last, "max", label="who left join() last")
        return int(last.item()) % size

    # -- measuring

    @property
    def plan(self) -> BucketPlan:
        """The buckets in which gradients travel, in the order of launching; prints as a table.

        Agreed by all ranks. After the first steps it follows the order in which backward has
        completed the gradients; parameters that not every rank uses are in buckets of their own, at
        the end.
        """
        seen = self._reducer.stats.buckets
        return BucketPlan(
            tuple(
                PlannedBucket(
                    size_bytes,
                    tuple(self._trained.known[index][0] for index in members),
                    seen[number].ready_s if seen else None,
                )
                for number, (_, size_bytes, members) in enumerate(self._reducer.buckets)
            )
        )

    def stats(self) -> CommunicationStats:
        """What averaging has cost this rank since construction or the last `reset_stats()`.

        In total, and for each bucket when it was ready, launched and done. `PYDIST_TIMELINE=path`
        writes the same of every step as a trace that Perfetto shows.
        """
        return self._reducer.stats

    def reset_stats(self) -> None:
        """Lets `stats()` count from zero."""
        self._reducer.reset_stats()
        self.stats_resets += 1

    # -- to override

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        """Cuts the gradients into buckets. Override it to choose them yourself.

        Called on rank 0 alone, by the constructor of this class, after steps whose order did not
        fit the plan (the 1st, 2nd, 4th, 8th, ... at most), and when parameters have joined. All
        ranks get what it returns.

        Args:
            parameters: Those with dense gradients, in the order in which backward is expected to
                complete them: at first the reverse of registration.
            bucket_cap_bytes: `bucket_cap_mb`, or what measurements found best; with a
                `pydist.ShardedOptimizer`, what is best for a model of that size on a typical link.

        Returns:
            The buckets in the order of launching, each a list of `PlannedParameter.index`: every
            parameter exactly once, and in one bucket only such of one `block`.
        """
        return plan_buckets(parameters, bucket_cap_bytes)

    def average_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What happens when a bucket is ready. Override it to average in a way of your own.

        A method instead of a hook: all of `register_comm_hook` holds. Unless it is overridden, it
        is never called, and the engine averages.

        Args:
            bucket: `bucket.buffer()` holds this rank's gradients, `bucket.parameters()` says whose.

        Returns:
            A future of their mean, or, with `reduction="sum"`, of their sum.
        """
        raise NotImplementedError

    # -- whether and how backward averages

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards of the forwards that follow average: what `no_sync()` switches off.

        Torch's name; may be set.
        """
        self.require_working()
        reducer = self._working_reducer
        return self._averages_when_joined if reducer is None else reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.require_working()
        self._set_averages(value)

    def _set_averages(self, value: bool) -> None:
        self._averages_when_joined = value
        if self._working_reducer is not None:
            self._working_reducer.enabled = value

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
    ) -> None:
        """Lets a communication hook of torch's kind average the gradients, bucket by bucket.

        Torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unmodified. All ranks
        register the same one, once, before the first backward. Unless `plan_buckets` is overridden,
        the buckets are then those of torch's DistributedDataParallel, with its sizes: some hooks
        treat a bucket as one thing. The first backward has one for each dtype (of the sizes asked
        for, with `find_unused_parameters=True`); later ones have buckets in the order of the first.
        With `static_graph=True` the first two have, and later ones follow the second. Complex
        gradients arrive as pairs of real numbers. The sparse gradient of an embedding is a bucket
        of its own, as in torch: `bucket.buffer()` is sparse, and `bucket.gradients()` empty.
        These buckets are the last, and come in every step, also where no rank has used the
        embedding.

        Args:
            state: The first argument of every call.
            hook: `hook(state, bucket)` starts averaging `bucket.buffer()` and returns a future of
                the mean over the ranks, or, with `reduction="sum"`, of the sum: in the bucket's
                dtype, or in one that is converted to it. It is called on the thread that runs
                backward, in the order of `bucket.index()`. What it returns is what the gradients
                become; the engine divides nothing. Where ranks count by share (`weighted()`,
                `join(divide_by_initial_world_size=False)`), the bucket holds gradients that were
                multiplied by this rank's share, so that their mean or sum is the right one.

        Raises:
            InvalidUsage: `hook` can't be called so, or there is a hook already, or a backward was;
                or with `compress=`, or with a `pydist.ShardedOptimizer`, as a hook gets whole
                gradients in their own type; or it is torch's `hook_with_zero_step`.
        """
        if not callable(hook):
            raise InvalidUsage(f"hook is {a_type(hook)}; it must be callable")
        refuse_zero_hook(hook)
        try:
            inspect.signature(hook).bind(state, None)
        except TypeError as error:
            raise InvalidUsage(
                f"hook must take two arguments, the state and a torch.distributed.GradBucket: "
                f"{error}"
            ) from None
        except ValueError:
            pass  # a builtin without a signature
        self.require_joined()
        self._let_hook_average(self._reducer, state, hook)
        self._has_comm_hook = True

    def _let_hook_average(
        self, reducer: _native.Reducer, state: object, hook: Callable[..., Any]
    ) -> None:
        plans_anew = type(self).plan_buckets is DataParallel.plan_buckets
        before = self._torch_buckets
        if plans_anew:
            told = {**self._settings.of_torch, **self._torch_attributes}
            may_be_unused = told["find_unused_parameters"]
            self._torch_buckets = TorchBuckets(
                self._settings.caps_bytes,
                cuts_first=(
                    (may_be_unused and not told["static_graph"]) or self._settings.has_list_of_caps
                ),
                may_be_unused=may_be_unused,
            )
        try:
            reducer.register_comm_hook(state, _returning_future(hook), plans_anew)
        except BaseException:
            self._torch_buckets = before
            raise

    @property
    def _is_static(self) -> bool:
        """Whether torch would take the graph for static: `_set_static_graph()` may come late."""
        told = {**self._settings.of_torch, **self._torch_attributes, **self.__dict__}
        return bool(told["static_graph"])

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

    @property
    def weight_of_backward(self) -> float | Tensor | None:
        """What a backward that begins now counts for, by `weighted()`; None outside of that.

        A tensor of one element where it stays on a GPU.
        """
        reducer = self._working_reducer
        return None if reducer is None else reducer.weight

    # -- which wrapper trains a parameter

    @property
    def is_retired(self) -> bool:
        """Whether others have taken up parameters of this wrapper, which trains nothing since."""
        return bool(self._why_retired)

    @property
    def _reducer(self) -> _native.Reducer:
        self.require_working()
        if self._working_reducer is None:
            raise InvalidUsage(
                "this pydist.DataParallel is a copy that has not met the other ranks yet, so there "
                "is nothing to show: it joins them at its first forward that is to train"
            )
        return self._working_reducer

    def require_working(self) -> None:
        """Raises InvalidUsage where another wrapper has taken up a parameter of this one."""
        if self.is_retired:
            raise InvalidUsage(self._why_retired)

    def trains(self, parameter: Tensor) -> bool:
        """Whether the wrapper averages a parameter's gradients, or did before it was retired."""
        return self._trained.knows(parameter)

    def has_alone(self, parameter: Tensor) -> bool:
        """Whether a parameter is this rank's own, so that nothing of it is averaged."""
        return self._local.has(parameter)

    def _add(self, joining: Trained) -> None:
        """Trains more parameters, from the next backward on. Talks to nobody."""
        self._take_up(joining, "unfrozen in, or added to, another pydist.DataParallel")
        for name, parameter, is_sparse in joining:
            shards = self._sharded_parameters.get(parameter, ())
            if shards and is_sparse:
                raise _sparse_error(name)
            self._reducer.add(name, parameter, is_sparse, *shards)
            self._trained.add(name, parameter, is_sparse)
        self._finite_check.watch(joining, membership.rank(), self._reducer)

    def _take_up(self, trained: Trained, how: str) -> None:
        """Retires whoever else trains any of some parameters. Talks to nobody."""
        parameters = [parameter for _, parameter, _ in trained]
        for other in trainers_of(parameters):
            if other is not self:
                other.retire(parameters, how)

    def retire(self, taken: Sequence[Tensor] | None, how: str) -> None:
        """Trains nothing from now on, as others train parameters of the model. Talks to nobody.

        Args:
            taken: Those parameters, and perhaps others; None: all that train here.
            how: What was done to them, for the errors that follow.
        """
        known = self._trained.known
        ids = {id(parameter) for parameter in (taken or [p for _, p, _ in known])}
        named = [name for name, parameter, _ in known if id(parameter) in ids]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        reason = (
            f"this pydist.DataParallel was retired: its parameters {', '.join(named[:3])}{more} "
            f"were {how}, and two can't average one gradient. Use the new wrapper, with optimizers "
            "made for it; put modules that share parameters into one module (in an nn.ModuleDict, "
            "say), whose forward runs them, and wrap that"
        )
        if _joining is not None and _joining() is self:
            raise InvalidUsage(f"in join() of that wrapper, which has to be over first: {reason}")
        for owner in self.shard_owners():
            with contextlib.suppress(Error):  # of a group that failed; then nothing arrives
                owner.finish()
        self._finite_check.stop()
        self._reducer.retire(reason)
        self._working_reducer, self._why_retired = None, reason

    # -- for optimizers that update shards

    def shard_owners(self) -> list[ShardOwner]:
        """The optimizers that update shards of the model's parameters."""
        # In two parts: the compiler of torch 2.11 takes a reference that is called in a condition
        # for the object that it refers to.
        owners = (reference() for reference in self._owners)
        return [owner for owner in owners if owner is not None]

    def removed(self) -> list[Tensor]:
        """Parameters that have trained here, and that no wrapped model has any more."""
        own = {id(parameter) for parameter in self.module.parameters()}
        former = [p for _, p, _ in self._trained.known if id(p) not in own]
        elsewhere = ids_in_any() if former else set()
        return [parameter for parameter in former if id(parameter) not in elsewhere]

    def add_owner(self, owner: weakref.ref[Any]) -> int:
        """Makes an optimizer known that updates shards, before it takes any. Returns its number."""
        self._owners.append(owner)
        return len(self._owners)

    def add_shards(self, number: int, shown: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Gives parameters to an optimizer for good, with what stands for their gradients."""
        for parameter, gradient in shown:
            self._sharded_parameters[parameter] = (number, gradient)

    def require_unsharded(self, name: str, parameter: Tensor) -> None:
        """Raises InvalidUsage where an optimizer has a parameter, or had it and is gone."""
        if parameter in self._sharded_parameters:
            raise InvalidUsage(
                f"parameter {name} has another pydist.ShardedOptimizer already, or had one that is "
                "gone, and its gradient is reduced into shards of that one: keep that one, or wrap "
                "the module anew"
            )

    def require_shardable(self, name: str, parameter: Tensor) -> None:
        """Raises InvalidUsage where no optimizer can have shards of a parameter."""
        self._reducer.require_shardable()
        if any(p is parameter and is_sparse for _, p, is_sparse in self._trained.known):
            raise _sparse_error(name)

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


def is_joining() -> bool:
    """Whether a wrapper is in `join()`, so that ranks without batches run no forward."""
    return _joining is not None


def _give_up_held(itself: weakref.ref[_native.Reducer], communicator: _native.Communicator) -> None:
    reducer = itself()
    if reducer is not None and reducer.is_held:
        reducer.give_up_held()
        _giving_up.append(communicator)


def _forget_given_up() -> None:
    _giving_up.clear()


@runs_uncompiled_throughout
def watch_outputs(wrapper: weakref.ref[DataParallel], outputs: Any) -> None:
    """Lets the backward that comes from the outputs of a forward average, or only accumulate."""
    watching = wrapper()
    if watching is None or watching.is_retired or not torch.is_grad_enabled():
        return
    tensors = list(outputs_with_graph(outputs))
    if not watching.has_joined:
        if not tensors or not watching._trained.joined():
            return  # not to be trained
        watching._join_after_forward()
    reducer = watching._reducer
    watching._finite_check.after_forward(averages=reducer.enabled)
    reducer.note_forward()
    for tensor in tensors:
        reducer.watch(tensor)


def _forget_late(wrapper: DataParallel, _: object) -> None:
    wrapper._forget_late()


def _sparse_error(name: str) -> InvalidUsage:
    return InvalidUsage(
        f"the gradient of parameter {name} is sparse, and pydist.ShardedOptimizer takes dense "
        "ones: build the embedding with sparse=False, or give it an optimizer of its own"
    )


def _plan(
    wrapper: DataParallel | None,
    caps_bytes: tuple[int, ...],
    parameters: Sequence[PlannedParameter],
    latency_s: float,
    seconds_per_byte: float,
) -> list[list[int]]:
    if wrapper is not None and wrapper._torch_buckets is not None:
        return wrapper._torch_buckets.plan(parameters, is_static=wrapper._is_static)
    if not caps_bytes:
        total_bytes = sum(parameter.size_bytes for parameter in parameters)
        if wrapper is not None and any(wrapper.shard_owners()):
            caps_bytes = (typical_cap_bytes(total_bytes),)
        else:
            caps_bytes = (best_cap_bytes(total_bytes, latency_s, seconds_per_byte),)
    # Without the wrapper, a last backward of its graph is under way.
    if wrapper is None or type(wrapper).plan_buckets is DataParallel.plan_buckets:
        return plan_buckets(parameters, caps_bytes)
    return wrapper.plan_buckets(parameters, max(caps_bytes))


def _returning_future(hook: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def checked(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        # torch's C++ returns the base class of its Python one.
        if not isinstance(future, Future):
            raise InvalidUsage(
                f"what averages a bucket returned {a_type(future)}; it must return a "
                "torch.futures.Future of the mean"
            )
        return future

    return checked


def _average_bucket(
    itself: weakref.ref[DataParallel], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    wrapper = itself()
    if wrapper is None:
        raise InvalidUsage(
            "the pydist.DataParallel whose average_bucket() averages gradients is gone: keep it "
            "until backward is over"
        )
    return wrapper.average_bucket(bucket)
