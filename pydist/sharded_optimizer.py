"""`pydist.ShardedOptimizer`: each rank updates, and keeps the optimizer's state of, its share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist import _native, groups, process
from pydist.bucket_plan import DEFAULT_CAP_BYTES, PlannedParameter, plan_buckets
from pydist.compiled_graphs import compiles_anything
from pydist.data_parallel import DataParallel, wrapper_of
from pydist.element_wise import require_element_wise, require_plain_options
from pydist.errors import InvalidUsage
from pydist.module_agreement import check_same
from pydist.parameter_audit import ParameterAudit
from pydist.sharded_gradient import ShardedGradient, part_norm, whole_norms
from pydist.sharded_parameters import (
    Bucket,
    Member,
    Segment,
    dense_strides,
    gather,
    move_in,
)
from pydist.sharded_state import (
    MASTER,
    ParameterState,
    ShardedState,
    StateRange,
    cut_out,
    from_whole,
    is_per_element,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ParameterState", "ShardedOptimizer", "ShardedState", "StateRange"]

# What a parameter group has beside the options of the optimizer's class.
_NOT_OPTIONS = {"params", "param_names"}


class ShardedOptimizer(Optimizer):
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

    Parameters move into memory of the ranks' group. `step()` returns before all updates have
    arrived; whoever reads a parameter waits for those of its bucket, so they travel while the next
    forward runs.

    Args:
        model_or_params: A `pydist.DataParallel` model, or what any optimizer takes: parameters,
            named parameters, or groups with options; of a `pydist.DataParallel` model or of none.
            Frozen parameters may be among them: they train once they are unfrozen.
        optimizer_class: An element-wise class, such as `torch.optim.AdamW`.
        stage: 1 shards the optimizer's state, 2 the gradients as well: what is outside of the shard
            is freed as soon as its bucket was reduced. 2 needs a `pydist.DataParallel` model.
        master_weights: Whether to update float32 copies of float16 and bfloat16 shards; "auto":
            yes.
        share_parameters: Whether all ranks map one copy of the parameters, which takes one host.
            Nothing is gathered then; each rank writes its shard where the others read it, between
            two barriers. So nobody else may write parameters, unless all ranks do, the same, and
            meet before anybody reads. `PYDIST_DEBUG=1` notices who does.
        process_group: The ranks, where they aren't those of a `pydist.DataParallel` model; default:
            all.
        **defaults: The options of `optimizer_class`.

    Raises:
        InvalidUsage: The class is not element-wise, a gradient is sparse, a parameter has a
            gradient now or another optimizer, or an argument is not supported.
        Mismatch: Parameters or arguments differ between ranks (on every rank).

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

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        stage: Literal[1, 2] = 1,
        master_weights: bool | Literal["auto"] = "auto",
        share_parameters: bool = False,
        process_group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        require_element_wise(optimizer_class)
        if stage not in (1, 2):
            raise InvalidUsage(f"stage is {stage!r}; it must be 1 or 2")
        if master_weights not in (True, False, "auto"):
            raise InvalidUsage(f"master_weights is {master_weights!r}; it must be a bool or 'auto'")
        param_groups = _groups_of(model_or_params)
        self._class = optimizer_class
        self._options = dict(defaults)
        self._with_masters = master_weights is not False
        self._is_one_copy = bool(share_parameters)
        self._audit: ParameterAudit | None = None
        if share_parameters and _native.read_environment().debug:
            self._audit = ParameterAudit()
        self._wrapper = _wrapper_of(model_or_params, param_groups)
        if self._wrapper is None and stage == 2:
            raise InvalidUsage(
                "stage=2 frees gradients as they are reduced, which pydist.DataParallel does: wrap "
                "the model in it, or use stage=1"
            )
        process.init()
        if self._wrapper is not None:
            if process_group is not None:
                raise InvalidUsage(
                    "process_group belongs to the pydist.DataParallel model: leave it out here"
                )
            parent = self._wrapper._communicator
        else:
            parent = groups.communicator_of(process_group)
        self._buckets: list[Bucket] = []
        self._indices: dict[int, int] = {}
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._segments: dict[int, Segment] = {}
        self._shown: list[ShardedGradient] = []
        self._placed: set[int] = set()
        self._loaded: ShardedState | None = None
        self._changes = 0
        self._norms: tuple[object, dict[int, Tensor]] = (None, {})
        self._failed = ""
        self._is_ready = False
        prototype = self._prototype([dict(group) for group in param_groups])
        super().__init__(param_groups, dict(prototype.defaults))
        # Not before all that a rank may refuse by itself.
        self._communicator = groups.split(parent, range(parent.size))
        self._stage = stage
        self._seen_shardings = -1
        facts = [
            f"optimizer_class={optimizer_class.__qualname__}",
            f"stage={stage}",
            f"master_weights={master_weights!r}",
            f"share_parameters={share_parameters!r}",
            f"pydist.DataParallel model={self._wrapper is not None}",
        ]
        check_same(self._communicator, "pydist.ShardedOptimizer's setting", facts)
        self._is_ready = True
        self._number = 0 if self._wrapper is None else self._wrapper.add_owner(weakref.ref(self))
        self._enter(self.param_groups)

    # -- what it is made of

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The class that updates the shards."""
        return self._class

    def _prototype(self, param_groups: list[dict[str, Any]]) -> Optimizer:
        """The wrapped class over nothing: checks options, and has all of them."""
        for group in param_groups:
            tensors = [
                item[1] if isinstance(item, tuple) else item for item in _listed(group["params"])
            ]
            group["params"] = [
                torch.empty(0, dtype=t.dtype, device=t.device)
                for t in tensors[:1]
                if isinstance(t, Tensor)
            ]
            group.pop("param_names", None)
        prototype = self._class(param_groups, **self._options)
        for group in prototype.param_groups:
            require_plain_options(group)
        return prototype

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as any optimizer does. All ranks call it, with the same.

        Args:
            param_group: "params", and options where they differ from the defaults.

        Raises:
            InvalidUsage: As for the constructor.
            Mismatch: The parameters differ between ranks.
        """
        given = dict(param_group)
        if not self._is_ready:
            super().add_param_group(given)
            return
        found = _wrapper_of(None, [given])
        if found is not self._wrapper:
            raise InvalidUsage(
                "add_param_group() was given parameters of "
                + ("no" if found is None else "another")
                + " pydist.DataParallel model, unlike those that the optimizer has"
            )
        self._prototype([dict(given)])
        super().add_param_group(given)
        try:
            self._enter(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    def _enter(self, param_groups: list[dict[str, Any]]) -> None:
        """Takes up the parameters of groups that are new. All ranks call it."""
        names = {} if self._wrapper is None else _names_in(self._wrapper)
        entering: list[int] = []
        for group in param_groups:
            given = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                index = len(self._parameters)
                name = names.get(id(parameter)) or (given[position] if given else f"{index}")
                self._parameters.append(parameter)
                self._names.append(name)
                self._indices[id(parameter)] = index
                self._shown.append(ShardedGradient.of(_Parts(self), index, parameter))
                entering.append(index)
        facts = [
            f"{self._names[index]}: {tuple(p.shape)} {p.dtype}, "
            f"{'trained' if p.requires_grad else 'frozen'}, "
            f"gradient={'none' if p.grad is None else 'present'}, "
            f"strides {dense_strides(p)}"
            for index in entering
            for p in [self._parameters[index]]
        ]
        try:
            check_same(self._communicator, "what pydist.ShardedOptimizer was given", facts)
            for index in entering:
                self._require_shardable(index)
        except BaseException:
            for index in reversed(entering):
                del self._indices[id(self._parameters[index])]
                for entries in (self._parameters, self._names, self._shown):
                    entries.pop()
            raise
        if self._wrapper is None:
            self._lay_out(entering)
        else:
            self._shard_gradients(entering)

    def _require_shardable(self, index: int) -> None:
        parameter, name = self._parameters[index], self._names[index]
        if parameter.device.type != "cpu" or parameter.layout != torch.strided:
            raise InvalidUsage(
                f"parameter {name} is {parameter.layout} on {parameter.device}; "
                "pydist.ShardedOptimizer trains dense parameters on the CPU"
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise InvalidUsage(f"parameter {name} is {parameter.dtype}, which nothing can train")
        if self._wrapper is None:
            return
        if any(o is not self and o.owns(parameter) for o in self._wrapper.shard_owners()):
            raise InvalidUsage(f"parameter {name} has another pydist.ShardedOptimizer already")
        if parameter.grad is not None:
            raise InvalidUsage(
                f"parameter {name} has a gradient already, and the ranks' shards of it would not "
                "be averaged: call zero_grad(set_to_none=True) before making, or adding to, a "
                "pydist.ShardedOptimizer"
            )
        self._wrapper.require_shardable(name, parameter)

    def _lay_out(self, entering: list[int]) -> None:
        """Without a reducer: the parameters from the last to the first, as backward would."""
        blocks = {
            dtype: number
            for number, dtype in enumerate(
                dict.fromkeys(self._parameters[index].dtype.to_real() for index in entering)
            )
        }
        planned = [
            PlannedParameter(index, self._names[index], p.nbytes, blocks[p.dtype.to_real()], True)
            for index in reversed(entering)
            for p in [self._parameters[index]]
        ]
        new: list[tuple[str, _native.ShardLayout, list[Member], Tensor | None]] = []
        for bucket in plan_buckets(planned, DEFAULT_CAP_BYTES):
            first = self._parameters[bucket[0]].dtype.to_real()
            counts = [
                self._parameters[i].numel() * (2 if self._parameters[i].is_complex() else 1)
                for i in bucket
            ]
            layout = _native.ShardLayout(counts, first.itemsize, self._communicator.size)
            members = [
                Member(i, self._names[i], self._parameters[i], offset, dense_strides(p))
                for i, offset in zip(bucket, layout.offsets, strict=True)
                for p in [self._parameters[i]]
            ]
            number = len(self._buckets) + len(new)
            new.append(
                (f"bucket {number}, first parameter {members[0].name}", layout, members, None)
            )
        self._move_in(new)

    def _shard_gradients(self, entering: list[int]) -> None:
        """With one: what it averages now, in shards; the rest once it is unfrozen."""
        assert self._wrapper is not None
        reducer = self._wrapper._reducer
        slots = {id(p): slot for slot, p in enumerate(reducer.parameters)}
        present = [index for index in entering if id(self._parameters[index]) in slots]
        if present:
            reducer.shard(
                self._number,
                self._stage,
                [slots[id(self._parameters[index])] for index in present],
                [self._shown[index] for index in present],
            )
            self._wrapper.note_sharded(self._parameters[index] for index in present)
        self._adopt_buckets()

    def _adopt_buckets(self) -> None:
        """Takes up buckets that the reducer has made. Ranks notice them at the same step."""
        if self._wrapper is None:
            return
        reducer = self._wrapper._reducer
        if reducer.shardings == self._seen_shardings:
            return
        self._seen_shardings = reducer.shardings
        parameters = reducer.parameters
        new = []
        for made in reducer.sharded_buckets(self._number):
            if made["number"] in self._placed:
                continue
            self._placed.add(made["number"])
            members = []
            for slot, offset, strides in made["members"]:
                index = self._indices[id(parameters[slot])]
                parameter = self._parameters[index]
                members.append(Member(index, self._names[index], parameter, offset, tuple(strides)))
            new.append((made["label"], made["layout"], members, made["shard"]))
        self._move_in(new)

    def _move_in(
        self, new: Sequence[tuple[str, _native.ShardLayout, list[Member], Tensor | None]]
    ) -> None:
        """Makes buckets. All ranks call it."""
        counts: dict[torch.dtype, int] = {}
        for _, layout, members, _ in new:
            dtype = members[0].parameter.dtype.to_real()
            counts[dtype] = counts.get(dtype, 0) + layout.count
        blocks = {
            dtype: self._communicator.one_copy(count, dtype)
            if self._is_one_copy
            else self._communicator.symmetric_empty([count], dtype)
            for dtype, count in counts.items()
        }
        group_of = {
            id(parameter): number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        with torch.no_grad():
            for label, layout, members, gradients in new:
                dtype = members[0].parameter.dtype.to_real()
                memory = blocks[dtype][: layout.count]
                blocks[dtype] = blocks[dtype][layout.count :]
                bucket = move_in(
                    label,
                    memory,
                    layout,
                    members,
                    gradients,
                    self._communicator,
                    with_masters=self._with_masters,
                    is_one_copy=self._is_one_copy,
                )
                self._equip(bucket, group_of)
                self._buckets.append(bucket)
                for segment in bucket.segments:
                    self._segments[segment.member.index] = segment
        if self._loaded is not None:
            self._take_over(self._loaded, self._buckets[-len(new) :])

    def _equip(self, bucket: Bucket, group_of: dict[int, int]) -> None:
        """Makes the optimizer of a bucket's segments."""
        param_groups = []
        for number, group in enumerate(self.param_groups):
            updated = [
                segment.updated
                for segment in bucket.segments
                if group_of[id(segment.member.parameter)] == number
            ]
            if updated:
                param_groups.append({**_options(group), "params": updated, "number": number})
        if param_groups:
            bucket.optimizer = self._class(param_groups, **self._options)

    # -- stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's shard, and starts gathering the others'. All ranks call it.

        Args:
            closure: Evaluates the model again and returns the loss, first of all.

        Returns:
            What `closure` returned.

        Raises:
            InvalidUsage: Gradients were accumulated under `no_sync()` and not averaged since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_sound()
        if self._wrapper is not None and self._wrapper._reducer.has_pending:
            raise InvalidUsage(
                "ShardedOptimizer.step() would use gradients that were accumulated under no_sync() "
                "and never averaged: run the last backward outside of no_sync(), or call "
                "sync_gradients() first; each rank updates a part of every parameter, so ranks "
                "can't train apart"
            )
        self.finish()
        self._adopt_buckets()
        if self._is_one_copy:
            self._communicator.barrier(False, "before parameters are written")
            self._check_writers()
        try:
            if self._is_one_copy:
                self._step_one_copy()
                return loss
            # What backward completes last, forward needs first.
            for bucket in reversed(self._buckets):
                self._step_bucket(bucket)
                gather(bucket, self._communicator)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            self._communicator.abort(
                f"ShardedOptimizer.step() raised on rank {self._communicator.rank}, "
                f"so the ranks' parameters are incomplete: {self._failed}"
            )
            raise
        return loss

    def _check_writers(self) -> None:
        if self._audit is not None:
            try:
                self._audit.check(self._buckets, self._communicator)
            except InvalidUsage as error:
                self._failed = str(error)  # of all ranks
                raise

    def _step_one_copy(self) -> None:
        """Updates what all ranks read: none reads it any more, and none does before it is whole."""
        for bucket in self._buckets:
            self._step_bucket(bucket)
        if self._audit is not None:
            self._audit.note(self._buckets)
        self._communicator.barrier(False, "after parameters were written")

    def _step_bucket(self, bucket: Bucket) -> None:
        bucket.take_back_strays()
        if bucket.has_masters:
            for segment in bucket.segments:
                segment.refresh_master()
        torch.autograd.graph.increment_version(bucket.parameters)
        if bucket.optimizer is None:
            return
        for group in bucket.optimizer.param_groups:
            group.update(_options(self.param_groups[group["number"]]))
        stepping = []
        for segment in bucket.segments:
            gradient = self._gradient_of(segment)
            if gradient is not None and segment.has_master:
                gradient = gradient.to(segment.updated.dtype)
            segment.updated.grad = gradient
            if gradient is not None:
                stepping.append(segment)
        _unhooked_step(bucket.optimizer)
        for segment in stepping:
            if segment.has_master:
                segment.values.copy_(segment.updated)
            segment.updated.grad = None
        if bucket.has_masters:
            for segment in bucket.segments:
                segment.version = segment.member.parameter._version

    def _gradient_of(self, segment: Segment) -> Tensor | None:
        whole = segment.member.parameter.grad
        if whole is None:
            return None
        if isinstance(whole, ShardedGradient):
            return segment.gradient
        if whole.is_sparse:
            raise InvalidUsage(
                f"the gradient of parameter {segment.member.name} is sparse, and "
                "pydist.ShardedOptimizer takes dense ones: build the embedding with sparse=False"
            )
        return segment.of(whole)

    def finish(self) -> None:
        """Returns once all parameters have arrived that the last step has updated."""
        for bucket in self._buckets:
            bucket.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, as any optimizer does. Waits for nobody.

        Args:
            set_to_none: Whether to set them to None rather than to zero.
        """
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.grad = None

    def _require_sound(self) -> None:
        if self._failed:
            raise InvalidUsage(
                f"an earlier step of pydist.ShardedOptimizer failed ({self._failed}), so the "
                "parameters are incomplete: load a checkpoint, and make the model and the "
                "optimizer anew"
            )

    # -- gradients

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm, as of one vector, is `max_norm` at most.

        All ranks call it. What `torch.nn.utils.clip_grad_norm_` does, and faster.

        Args:
            max_norm: Of the whole gradient, over all ranks' shards.
            norm_type: The order of the norm; may be infinite.
            error_if_nonfinite: Whether to raise where the norm is not finite.

        Returns:
            The norm before scaling, the same on every rank.
        """
        return torch.nn.utils.clip_grad_norm_(
            self._parameters, max_norm, norm_type, error_if_nonfinite, foreach=None
        )

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The whole averaged gradient of a parameter. All ranks call it, for the same one.

        Args:
            parameter: One of the optimizer's.

        Returns:
            A tensor of its own; None if there is no gradient.
        """
        index = self._indices.get(id(parameter))
        if index is None:
            raise InvalidUsage("gradient_of() was given a tensor that the optimizer does not have")
        gradient = parameter.grad
        if gradient is None or not isinstance(gradient, ShardedGradient):
            return None if gradient is None else gradient.detach().clone()
        member = next(m for b in self._buckets for m in b.members if m.index == index)
        flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        segment = self._segments.get(index)
        if segment is not None and segment.gradient is not None:
            flat[segment.begin : segment.end] = segment.gradient
        self._communicator.all_reduce(flat, flat, "sum", False)
        return flat.as_strided(parameter.shape, member.strides)

    def _all_norms(self, order: float) -> dict[int, Tensor]:
        """Of all gradients that are sharded, in one operation for as many as are asked for."""
        assert self._wrapper is not None
        key = (order, self._changes, self._wrapper._reducer.round)
        if self._norms[0] != key:
            indices = [
                index
                for index, parameter in enumerate(self._parameters)
                if isinstance(parameter.grad, ShardedGradient)
            ]
            parts = [part_norm(self._part_of(index), order) for index in indices]
            norms = torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64)
            norms = whole_norms(norms, order, self._combine)
            self._norms = (key, dict(zip(indices, norms.unbind(), strict=True)))
        return self._norms[1]

    def _part_of(self, index: int) -> Tensor:
        segment = self._segments.get(index)
        if segment is None or segment.gradient is None:
            return torch.zeros(0, dtype=self._parameters[index].dtype)
        return segment.gradient

    def _combine(self, tensor: Tensor, op: str) -> None:
        self._communicator.all_reduce(tensor, tensor, op, False)

    def bytes_in_flight(self) -> int:
        """What gradients take for buckets that fill or travel, in stage 2, on this rank."""
        if self._wrapper is None:
            return 0
        staging_bytes: int = self._wrapper._reducer.staging_bytes(self._number)
        return staging_bytes

    # -- state

    def sharded_state(self) -> ShardedState:
        """This rank's part of the state: ranges of parameters, by name. Talks to nobody.

        The tensors are the optimizer's own memory, not copies. The parts of all ranks, in any
        order, are the whole: `ShardedState.merged` puts parts together, `load_sharded_state` takes
        any that cover what the rank needs, whatever ranks and stage they come from.
        """
        self._require_sound()
        states = {
            name: ParameterState(tuple(p.shape), tuple(range(p.dim())))
            for name, p in zip(self._names, self._parameters, strict=True)
        }
        for bucket in self._buckets:
            for member in bucket.members:
                states[member.name].dims = member.dims
            for segment in bucket.segments:
                assert bucket.optimizer is not None
                values = dict(bucket.optimizer.state.get(segment.updated, {}))
                if segment.has_master:
                    values[MASTER] = segment.updated
                if values:
                    state = states[segment.member.name]
                    state.ranges.append(StateRange(segment.begin, segment.end, values))
        return ShardedState(states, self._named_groups())

    def ranges(self) -> dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]]:
        """What of a state `load_sharded_state` needs on this rank. Talks to nobody.

        Returns:
            By the parameters' names: the order of dimensions, as in `ParameterState`, and ranges of
            elements. All of a parameter that has no place yet, because it is frozen.
        """
        self._require_sound()
        needed: dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]] = {
            name: (tuple(range(p.dim())), [(0, p.numel())])
            for name, p in zip(self._names, self._parameters, strict=True)
        }
        for bucket in self._buckets:
            for member in bucket.members:
                needed[member.name] = (member.dims, [])
            for segment in bucket.segments:
                needed[segment.member.name][1].append((segment.begin, segment.end))
        return needed

    def load_sharded_state(self, state: ShardedState) -> None:
        """Takes over a state, by the names of the parameters. Talks to nobody.

        Args:
            state: Its ranges cover what this rank's shard has of each parameter; what is beside
                that is not looked at. Copied.

        Raises:
            InvalidUsage: Parameters or groups are not those of this optimizer, or elements of the
                shard are missing.
        """
        self._require_sound()
        unknown = sorted(set(state.parameters) ^ set(self._names))
        if unknown:
            whose = "the optimizer" if unknown[0] in state.parameters else "the state"
            raise InvalidUsage(
                f"a state of other parameters was loaded: {unknown[0]} is unknown to {whose}"
            )
        ours = [group["params"] for group in self._named_groups()]
        theirs = [group["params"] for group in state.groups]
        if ours != theirs:
            raise InvalidUsage(
                f"a state of other parameter groups was loaded: {_lengths(theirs)} parameters, "
                f"where the optimizer has {_lengths(ours)}, or other ones"
            )
        for index, name in enumerate(self._names):
            shape = tuple(self._parameters[index].shape)
            if state.parameters[name].shape != shape:
                raise InvalidUsage(
                    f"the state of parameter {name} is of {state.parameters[name].shape}, where "
                    f"the parameter is {shape}"
                )
        self.finish()
        self.note_written()
        for group, loaded in zip(self.param_groups, state.groups, strict=True):
            group.update(_options(loaded))
        self._take_over(state, self._buckets)
        # For parameters that have no place yet.
        is_placed = {member.index for bucket in self._buckets for member in bucket.members}
        self._loaded = state if len(is_placed) < len(self._parameters) else None

    def _take_over(self, state: ShardedState, buckets: Sequence[Bucket]) -> None:
        with torch.no_grad():
            for bucket in buckets:
                if bucket.optimizer is None:
                    continue
                for segment in bucket.segments:
                    self._take_over_segment(state, bucket.optimizer, segment)

    def _take_over_segment(
        self, state: ShardedState, optimizer: Optimizer, segment: Segment
    ) -> None:
        member = segment.member
        values = cut_out(
            member.name, state.parameters[member.name], member.dims, segment.begin, segment.end
        )
        values = {} if values is None else values
        master = values.pop(MASTER, None)
        if segment.has_master:
            segment.updated.copy_(segment.values if master is None else master)
            if master is not None:
                segment.values.copy_(segment.updated)
        count = segment.end - segment.begin
        own = optimizer.state[segment.updated]
        own.clear()
        for key, value in values.items():
            if is_per_element(value, count) and value.dtype.is_floating_point:
                wide = value.to(segment.updated.dtype)
                own[key] = wide.clone() if wide is value else wide
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value
        if not own:
            del optimizer.state[segment.updated]

    def _named_groups(self) -> list[dict[str, Any]]:
        return [
            {
                **_options(group),
                "params": [self._names[self._indices[id(p)]] for p in group["params"]],
            }
            for group in self.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in the form of torch's optimizers. Talks to nobody.

        As in any optimizer, "param_groups" has the options and the parameters' numbers, and
        "state" is by number. What is there is a list of ranges: (begin, end, values), as in
        `sharded_state()`, whose shapes and orders of dimensions are in "parameters" with the
        names. Every rank saves its own, or `consolidated_state_dict()` makes one for torch's class.
        """
        local = self.sharded_state()
        numbers = {name: number for number, name in enumerate(self._names)}
        return {
            "state": {
                numbers[name]: [(r.begin, r.end, r.values) for r in state.ranges]
                for name, state in local.parameters.items()
                if state.ranges
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in local.groups
            ],
            "parameters": [
                (name, local.parameters[name].shape, local.parameters[name].dims)
                for name in self._names
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a `state_dict()`, or one of an unsharded optimizer of the class. Copies it.

        Args:
            state_dict: This rank's own, from as many ranks; or one of the wrapped class, from
                torch, whole: every rank takes its part.

        Raises:
            InvalidUsage: As for `load_sharded_state`.
        """
        if "parameters" in state_dict:
            self.load_sharded_state(_from_state_dict(state_dict))
            return
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        ordered = [p for group in self.param_groups for p in group["params"]]
        if len(numbers) != len(ordered):
            raise InvalidUsage(
                f"a state of {len(numbers)} parameters was loaded, where the optimizer has "
                f"{len(ordered)}"
            )
        names = {
            number: self._names[self._indices[id(parameter)]]
            for number, parameter in zip(numbers, ordered, strict=True)
        }
        parameters = {
            names[number]: from_whole(parameter, state_dict["state"].get(number, {}))
            for number, parameter in zip(numbers, ordered, strict=True)
        }
        loaded = [
            {**_options(group), "params": [names[number] for number in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        self.load_sharded_state(ShardedState(parameters, loaded))

    # -- for DataParallel

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of the optimizer's."""
        return id(parameter) in self._indices

    def entry_of(self, parameter: Tensor) -> tuple[int, ShardedGradient]:
        """What the reducer needs to know of a parameter that was unfrozen."""
        return self._number, self._shown[self._indices[id(parameter)]]

    def note_written(self) -> None:
        """All ranks have written the same into parameters, on purpose."""
        if self._audit is not None:
            self._audit.forget()

    def before_forward(self, module: nn.Module) -> None:
        """Waits for all parameters where forward may read some past torch's dispatch."""
        if not any(bucket.gather is not None for bucket in self._buckets):
            return
        if compiles_anything() or any(
            isinstance(part, torch.jit.ScriptModule) for part in module.modules()
        ):
            self.finish()


class _Parts:
    """What stands for gradients asks here; does not keep the optimizer alive."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _get(self) -> ShardedOptimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise InvalidUsage("the pydist.ShardedOptimizer that has this gradient is gone")
        return optimizer

    def name_of(self, index: int) -> str:
        return self._get()._names[index]

    def part(self, index: int) -> Tensor:
        return self._get()._part_of(index)

    def norms(self, order: float) -> dict[int, Tensor]:
        return self._get()._all_norms(order)

    def combine(self, tensor: Tensor, op: str) -> None:
        self._get()._combine(tensor, op)

    def note_change(self) -> None:
        self._get()._changes += 1


def _unhooked_step(optimizer: Optimizer) -> None:
    """Steps without the hooks and profiles of an optimizer of its own: it is a part of one."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _lengths(names: list[list[str]]) -> str:
    return " and ".join(str(len(group)) for group in names) or "no"


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _groups_of(model_or_params: nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups, as torch's optimizers understand their first argument."""
    if isinstance(model_or_params, nn.Module):
        if not isinstance(model_or_params, DataParallel):
            raise InvalidUsage(
                f"model_or_params is a {type(model_or_params).__name__}: wrap it in "
                "pydist.DataParallel first, or pass model.parameters() if something else averages "
                "its gradients"
            )
        named = list(model_or_params.named_parameters())
        return [{"params": named}]
    if isinstance(model_or_params, Tensor):
        raise InvalidUsage("model_or_params is a tensor; pass a list of parameters")
    items = list(model_or_params)
    if not items:
        raise InvalidUsage("pydist.ShardedOptimizer got an empty list of parameters")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    return [{**group, "params": _listed(group["params"])} for group in items]


def _parameters_in(param_groups: Iterable[dict[str, Any]]) -> Iterator[Tensor]:
    for group in param_groups:
        for item in _listed(group["params"]):
            yield item[1] if isinstance(item, tuple) else item


def _wrapper_of(
    model: nn.Module | Iterable[Any] | None, param_groups: list[dict[str, Any]]
) -> DataParallel | None:
    """The wrapped model that the parameters are of."""
    if isinstance(model, DataParallel):
        return model
    found = {id(w): w for p in _parameters_in(param_groups) for w in [wrapper_of(p)]}
    if len(found) > 1:
        raise InvalidUsage(
            "pydist.ShardedOptimizer was given parameters of several models, or of a "
            "pydist.DataParallel model and of others: make one for each"
        )
    return next(iter(found.values()), None)


def _names_in(wrapper: DataParallel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in wrapper.named_parameters()}


def _from_state_dict(state_dict: dict[str, Any]) -> ShardedState:
    parameters = {
        name: ParameterState(
            tuple(shape),
            tuple(dims),
            [StateRange(*found) for found in state_dict["state"].get(number, [])],
        )
        for number, (name, shape, dims) in enumerate(state_dict["parameters"])
    }
    names = [name for name, _, _ in state_dict["parameters"]]
    loaded = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return ShardedState(parameters, loaded)
