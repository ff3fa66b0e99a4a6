"""`pydist.ShardedOptimizer`: each rank updates, and keeps the optimizer's state of, its share.

The class says in which order the ranks do what the other modules of this folder hold. Its methods
about gradients are in `gradient_methods.py`, those about state in `state/state_methods.py`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from pydist import _native
from pydist._torch import (
    compiles_anything,
    runs_uncompiled,
    runs_uncompiled_throughout,
    scripts_any_function,
)
from pydist.config.in_force import takes_from_config
from pydist.errors import InvalidUsage
from pydist.job import groups, membership
from pydist.job.arguments import flag
from pydist.parallel.checks.replica_check import check_same
from pydist.parallel.trained_parameters import registrations
from pydist.sharding.gradient_methods import GradientMethods
from pydist.sharding.gradient_norms import ReducedGradients
from pydist.sharding.leaving import arrive_before_leaving
from pydist.sharding.offload.offload import Offload
from pydist.sharding.offload.requirements import require_offload, requirement
from pydist.sharding.one_writer import OneWriter
from pydist.sharding.own_writes import OwnWrites
from pydist.sharding.parameter_groups import (
    checked_group,
    groups_of,
    model_of,
    named_like,
    options_of,
    prototype_of,
    require_model,
    require_sizes,
)
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.sharded_gradient import without_gradients
from pydist.sharding.state.shown_optimizer_state import StateOfShards
from pydist.sharding.state.state_methods import StateMethods
from pydist.sharding.step.element_wise import require_element_wise
from pydist.sharding.step.fused_step import FUSED_CLASSES, asks_for_kernels
from pydist.sharding.step.joint_step import JointStep
from pydist.sharding.step.same_options import facts_of_options, require_same_options
from pydist.sharding.step.scaled_step import ScaledStep, forget_scale
from pydist.sharding.step.shard_step import ShardStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The arguments that `pydist.Config` may have in its section "optimizer".
_CONFIGURABLE = ("stage", "master_weights", "share_parameters", "offload", "delayed")


def _leaving_nobody(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with its hooks; one that raises on this rank alone leaves no other rank waiting."""
    hooked_step = Optimizer.profile_hook_step(step)

    @runs_uncompiled_throughout
    @functools.wraps(step)
    def whole_step(self: ShardedOptimizer, *args: Any, **kwargs: Any) -> Any:
        # A subclass's own step has the hooks.
        run = hooked_step if type(self).step is whole_step else step
        self._joint.begin()
        try:
            with self._joint.under_way():
                return run(self, *args, **kwargs)
        except BaseException as error:
            forget_scale(self)
            self._joint.tell(error, is_told_later=self._writer.others_wait)
            raise

    whole_step.hooked = True  # type: ignore[attr-defined]
    return whole_step


class ShardedOptimizer(GradientMethods, StateMethods):
    """Runs an optimizer of torch's on equal shards of the parameters, one a rank (ZeRO).

    Each rank keeps the optimizer's state of its shard alone, updates that, and gathers the others'
    shards. All ranks construct it together, and call `step()` together. To schedulers, scalers and
    whoever asks, it is a `torch.optim.Optimizer` over whole parameters.

    With a `pydist.DataParallel` model, gradients are reduced into the shards: `parameter.grad` then
    stands for a gradient of which each rank has its part. `torch.nn.utils.clip_grad_norm_`,
    `clip_grad_value_` and `torch.amp.GradScaler` work on it as they are, called on all ranks; what
    else would look at its values raises; `gradient_of` gathers one. Everything else that the
    model's backward can do, it still can, but for communication hooks, sparse gradients and
    `join()`.

    With parameters of anything else, gradients are expected to be averaged already when `step()` is
    called, and the same on all ranks: torch's DistributedDataParallel sees to that.

    Parameters that each rank has alone (torch calls them ignored; see `pydist.DataParallel`) are
    updated by that rank, whole, with its own gradients; their state is that rank's.

    Parameters, which may be on GPUs, move into memory of the ranks' group. `step()` returns before
    all updates have arrived; whoever reads a parameter waits for those of its bucket, so they
    travel while the next forward runs. By NCCL, the reader's stream waits.

    Args:
        model_or_params: A `pydist.DataParallel` model, or what any optimizer takes: parameters,
            named parameters, or groups with options; of a `pydist.DataParallel` model or of none.
            Frozen parameters may be among them: they train once they are unfrozen.
        optimizer_class: An element-wise class, such as `torch.optim.AdamW`. Others than torch's are
            tried out on small parameters first.
        stage: 1 shards the optimizer's state, 2 the gradients as well: what is outside of the shard
            is freed as soon as its bucket was reduced. 2 needs a `pydist.DataParallel` model.
        master_weights: Whether to update float32 copies of float16 and bfloat16 shards; "auto":
            yes.
        share_parameters: Whether all ranks map one copy of the parameters, which takes one host.
            Nothing is gathered then; each rank writes its shard where the others read it, between
            two barriers. What the program itself writes stays the rank's own until the next step,
            which takes over what all ranks have written alike; `writing()` lets one rank write for
            all.
        offload: "cpu" keeps the optimizer's state of the shard, for parameters on GPUs, in the
            host's memory, and steps there, by the fused kernels; None: where the parameters are.
        delayed: Whether the host steps beside the next forward and backward, which offload="cpu"
            makes possible: every parameter is one step behind its gradients then. `finish()` takes
            over the step that is under way; what tells of state waits for it.
        process_group: The ranks, where they aren't those of a `pydist.DataParallel` model; default:
            all.
        **defaults: The options of `optimizer_class`. With `fused=True`, pydist's kernels step for
            torch's Adam, AdamW and SGD themselves, wherever they can (docs/sharding.md).

    Raises:
        InvalidUsage: The class is not element-wise, keeps state in its groups or state that can't
            be cut, a gradient is sparse, a parameter has a gradient now or another optimizer, an
            argument is not supported, or this rank is not in `process_group`.
        Mismatch: Parameters, options or arguments differ between ranks (on every rank).

    Note:
        ZeRO: Rajbhandari et al., arXiv 1910.02054. Shards cut through parameters, so they are equal
        whatever the parameters' sizes.

    Example:
        >>> model = pydist.DataParallel(torch.nn.Linear(2, 1))
        >>> optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    # Its step does, inside no_sync() as well, and tells the other ranks.
    refuses_pending_gradients = True

    @takes_from_config("optimizer", names=_CONFIGURABLE)
    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        stage: Literal[1, 2] = 1,
        master_weights: bool | Literal["auto"] = "auto",
        share_parameters: bool = False,
        offload: Literal["cpu"] | None = None,
        delayed: bool = False,
        process_group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        if isinstance(stage, bool) or stage not in (1, 2):
            raise InvalidUsage(f"stage is {stage!r}; it must be 1 or 2")
        if master_weights not in (True, False, "auto"):
            raise InvalidUsage(f"master_weights is {master_weights!r}; it must be a bool or 'auto'")
        param_groups = groups_of(model_or_params)
        require_element_wise(optimizer_class, defaults, [options_of(g) for g in param_groups])
        self._class = optimizer_class
        self._options = dict(defaults)
        self._is_one_copy = flag("share_parameters", share_parameters)
        require_offload(offload, delayed, optimizer_class, is_one_copy=self._is_one_copy)
        self._is_debugging = bool(_native.read_environment().debug)
        self._wrapper = model_of(model_or_params, param_groups)
        self._require_working_model()
        if self._wrapper is None and stage == 2:
            raise InvalidUsage(
                "stage=2 frees gradients as they are reduced, which pydist.DataParallel does: wrap "
                "the model in it, or use stage=1"
            )
        membership.init()
        if self._wrapper is not None:
            if process_group is not None:
                raise InvalidUsage(
                    "process_group belongs to the pydist.DataParallel model: leave it out here"
                )
            self._wrapper.require_joined()
            parent = self._wrapper._communicator
        else:
            parent = groups.communicator_of(process_group, "process_group")
        self._waiting = {}
        # Whether the model holds TorchScript, and when that was seen.
        self._scripts: tuple[int, bool] | None = None
        self._offload: Offload | None = None
        self._is_ready = False
        prototype = prototype_of(optimizer_class, self._options, param_groups)
        super().__init__(param_groups, dict(prototype.defaults))
        # Split only after everything that a single rank may refuse.
        self._communicator = groups.split(parent, range(parent.size))
        facts = [
            f"optimizer_class={optimizer_class.__qualname__}",
            f"stage={stage}",
            f"master_weights={master_weights!r}",
            f"share_parameters={share_parameters!r}",
            f"offload={offload!r}, delayed={delayed!r}",
            f"pydist.DataParallel model={self._wrapper is not None}",
            f"PYDIST_DEBUG={int(self._is_debugging)}",
            *facts_of_options(self.param_groups),
        ]
        check_same(self._communicator, "pydist.ShardedOptimizer's setting", facts)
        self._is_ready = True
        itself = weakref.ref(self)
        self._layout = ShardedLayout(
            self._communicator,
            self._wrapper,
            itself,
            stage=stage,
            # Offload makes them on the host.
            with_masters=master_weights is not False and offload is None,
            is_one_copy=self._is_one_copy,
            require=requirement(offload, with_masters=master_weights is not False),
        )
        self._joint = JointStep(self._communicator, self._wrapper, self._layout.number)
        if offload is not None:
            self._offload = Offload(self._communicator, is_delayed=delayed)
            if self._wrapper is not None:
                self._offload.watch(self._wrapper._reducer, self._layout.number)
        self._writes = OwnWrites(self._communicator, self._layout.buckets, self._layout.copies)
        writes = self._writes if self._is_one_copy else None
        self._writer = OneWriter(self._communicator, self._wrapper, self._layout, writes)
        self._shard_step = ShardStep(
            self._communicator,
            self._layout,
            self._joint,
            functools.partial(self._class, **self._options),
            self._waiting,
            writes,
            self._offload,
        )
        self._state = StateOfShards(
            self._layout,
            self._waiting,
            self._shard_step.forget_states,
            self._communicator.rank,
            self._communicator.size,
        )
        self._gradients = ReducedGradients(self._layout, self._communicator, self._wrapper)
        if self._offload is not None:
            self._gradients.scaling = self._offload.scaling
        arrive_before_leaving(self, self._layout.buckets, self._communicator, self._offload)
        self._place(self._layout.enter(self.param_groups))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "step" in cls.__dict__:
            cls.step = _leaving_nobody(cls.step)  # type: ignore[method-assign]

    # -- what it is made of

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The class that updates the shards."""
        return self._class

    @property
    def stage(self) -> int:
        """What is sharded: 1, the optimizer's state; 2, gradients as well."""
        return self._layout.stage

    @property
    def offloaded(self) -> Offload | None:
        """The steps on the host, for benchmarks; None: the state is where the parameters are."""
        return self._offload

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as any optimizer does. All ranks call it, with the same.

        Args:
            param_group: "params", and options where they differ from the defaults. Parameters
                without names get those of the model, where the optimizer's others have names.

        Raises:
            InvalidUsage: As for the constructor.
            Mismatch: The parameters differ between ranks.
        """
        if not self._is_ready:
            super().add_param_group(dict(param_group))
            return
        given = checked_group(param_group, len(self.param_groups))
        self._require_working_model()
        require_model(given, self._wrapper)
        if self._wrapper is not None and "param_names" in self.param_groups[0]:
            given["params"] = named_like(self._wrapper, given["params"])
        self._joint.require_sound()
        require_element_wise(self._class, self._options, [options_of(given)])
        prototype_of(self._class, self._options, [given])
        super().add_param_group(given)
        try:
            require_same_options(self._communicator, self.param_groups[-1:])
            entering = self._layout.enter(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise
        self._place(entering)

    def _place(self, entering: list[int]) -> None:
        self._group_sizes = [len(group["params"]) for group in self.param_groups]
        self._shard_step.place(entering, self.param_groups)

    # -- stepping

    @_leaving_nobody
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's shard, and starts gathering the others'. All ranks call it.

        Before anything changes, the ranks vote. Where the step can't be taken on one of them
        (something is in the way, or the closure, a hook or a subclass's own step raises before),
        all raise, the others a `pydist.Error` that quotes it; parameters and states are as they
        were, and the next step can be taken.

        What raises on one rank alone after that (the update itself, a hook behind it) ends the
        group of the optimizer, and that of its model: the others get a `pydist.Error` that names
        the rank. So does a closure, where no `pydist.DataParallel` averages the gradients.

        Args:
            closure: Evaluates the model again and returns the loss, first of all.

        Returns:
            What `closure` returned.

        Raises:
            InvalidUsage: Gradients were accumulated under `no_sync()`, or put into
                `parameter.grad` by hand, and not averaged since: `sync_gradients()` before `step()`
                does that. A gradient is sparse. A group, or a parameter of one, was removed. It is
                called while a CUDA graph is captured, or inside `writing()`.
            Mismatch: The ranks' options differ (on every rank).
            Error: Another rank can't take the step.
        """
        self._require_working_model()
        loss = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException as error:
                if self._wrapper is None and self._communicator.size > 1:
                    # The others may be anywhere.
                    self._joint.give_up("the closure of step()", error)
                raise
        self._joint.require_sound()
        scaled = ScaledStep(self, self._layout.parameters)
        self._writer.refuse("step()")
        self._shard_step.refuse_capture()
        self._gradients.refuse_pending()
        require_sizes(self.param_groups, self._group_sizes)
        self._shard_step.arrive()
        self._shard_step.join()
        self._shard_step.check()
        self._joint.vote(self.param_groups, self.defaults)
        if self._is_debugging:
            require_same_options(self._communicator, self.param_groups)
        self._state.note_state()
        self._shard_step.run(self.param_groups, scaled)
        self._joint.note_stepped()
        # Nobody knows what a scripted function reads, or when a graph runs outside of a wrapper.
        if scripts_any_function() or (self._wrapper is None and compiles_anything()):
            self._shard_step.arrive()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler` asks: whether `step()` itself leaves out what it must.

        The same on all ranks. True where kernels on GPUs take all steps; otherwise the scaler reads
        its number, and torch refuses to unscale gradients in float16.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        return (
            self._communicator.backend == "nccl"
            and self._offload is None
            and not self._layout.some_have_own
            and all(p.device.type == "cuda" and p.dtype == torch.float32 for p in parameters)
            and all(asks_for_kernels(group) for group in self.param_groups)
            and self.optimizer_class in FUSED_CLASSES
        )

    @contextlib.contextmanager
    @runs_uncompiled_throughout
    def writing(self) -> Iterator[bool]:
        """Lets one rank write into the parameters for all ranks. All ranks call it together.

        ::

            with optimizer.writing() as mine:
                if mine:
                    model.head.weight.normal_()

        Inside, autograd records nothing, as in `torch.no_grad()`.

        With `share_parameters=True`, `mine` is True on rank 0 of the optimizer's group alone. What
        it writes stays its own until the end; there, all ranks meet, and all have it. If any rank
        raises inside, all raise, and parameters stay as they were. Without it, every rank has
        parameters of its own, so `mine` is True on all, which write the same.

        It is for parameters that train: those that are frozen are each rank's own, so writing them
        inside raises. What all ranks write alike needs no `writing()`.

        Yields:
            Whether this rank is to write.

        Raises:
            InvalidUsage: It is called inside itself, or within backward; or a rank has written for
                which `mine` is False, or what is frozen.
            Mismatch: Ranks have written different values before it (on every rank).
            Error: Another rank raised inside.
        """
        self._require_working_model()
        self._joint.require_sound()
        self._writer.require_possible()
        self.finish()
        with self._writer.writing() as mine:
            yield mine

    @runs_uncompiled_throughout
    def finish(self) -> None:
        """Returns once all parameters have arrived that the last step has updated.

        Of those on a GPU, where NCCL brings them, the current stream waits in the host's place.
        With `delayed=True`, it takes over the step that is still under way, so all ranks call it.

        Raises:
            Error: That step has raised, here or on another rank.
        """
        self._shard_step.finish()

    def own_writes(self) -> str:
        """What the program has written into parameters of one copy since the last step, in words.

        Empty if nothing. Talks to nobody; the same on all ranks if they have written the same.
        """
        return self._writes.described() if self._is_one_copy else ""

    def _require_working_model(self) -> None:
        """Raises InvalidUsage, on all ranks, where the model's wrapper was retired."""
        if self._wrapper is not None:
            self._wrapper.require_working()

    # -- for DataParallel

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """All ranks write the same into parameters, and nobody reads them. All have met before."""
        self._writer.refuse("pydist.load()")
        self.finish()
        return self._writes.together()

    def before_forward(self, module: nn.Module) -> None:
        """Waits for all parameters where forward may read some past torch's dispatch."""
        if not any(bucket.gather is not None for bucket in self._layout.buckets):
            return
        if compiles_anything() or self._holds_scripts(module):
            self._shard_step.arrive()

    @runs_uncompiled
    def during_forward(self) -> contextlib.AbstractContextManager[None]:
        """Hides gradients from dynamo, which describes those of all parameters that it meets."""
        if compiles_anything():
            return without_gradients(self._layout.parameters)
        return contextlib.nullcontext()

    def _holds_scripts(self, module: nn.Module) -> bool:
        """Whether TorchScript is within a module; looks again only once that may have changed."""
        count = registrations()
        if self._scripts is None or self._scripts[0] != count:
            held = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
            self._scripts = (count, held)
        return self._scripts[1]
