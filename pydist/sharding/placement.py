"""Which parameters a sharded optimizer has, and the buckets that they lie in.

With a `pydist.DataParallel` model they are the buckets that its reducer makes for averaged shards;
without one, they are planned here. Parameters that each rank has alone (`rank_local`) lie in
buckets of this rank alone, whose shard is all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist import _native
from pydist._torch import is_marked_as_ignored
from pydist.errors import InvalidUsage
from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES, PlannedParameter, plan_buckets
from pydist.parallel.checks.replica_check import check_same
from pydist.parallel.names.state_names import distinct_names, plain_names
from pydist.parallel.trained_parameters import ids_of_sparse, require_plain
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.buckets import Bucket, Member, Segment, cut, dense_strides, move_in
from pydist.sharding.sharded_gradient import ShardedGradient

# A new bucket: its label, how it is cut, its members; and where a reducer has made it, the shard of
# averaged gradients, and its number there.
_NewBucket = tuple[str, _native.ShardLayout, list[Member], Tensor | None, int | None]

# What parameters of one bucket have in common: the real dtype, and the device.
_Kind = tuple[torch.dtype, torch.device]


class ShardedLayout:
    """The parameters of an optimizer, by number, and their places.

    Args:
        communicator: The ranks.
        wrapper: The model whose reducer averages the gradients, if any does.
        owner: The optimizer.
        stage: 1 or 2.
        with_masters: Whether to keep float32 copies of segments in 16 bits.
        is_one_copy: Whether all ranks map the same memory.
        require: Raises where a parameter, by name, can't be taken.

    Attributes:
        parameters: All there are; those that are frozen have no place.
        names: Theirs, as of when they entered, or the last `named()`: for errors.
        indices: Their numbers, by id.
        own: The numbers of those that are this rank's alone.
        some_have_own: Whether any rank has such; the same on all of them.
        shown: What stands for their gradients.
        buckets: What has a place, in the order in which it got one.
        segments: This rank's, by the number of the parameter.
        members: Of all that the reducer averages into shards, by number: also of buckets that the
            parameters have not moved into yet, as they do at the next step.
        gradients: This rank's parts of their gradients, with where they begin.
        number: The optimizer's, among those of the model.
        copies: The memory of buckets, where all ranks map the same.
        stage: Of the optimizer.
    """

    def __init__(
        self,
        communicator: _native.Communicator,
        wrapper: DataParallel | None,
        owner: weakref.ref[Any],
        *,
        stage: int,
        with_masters: bool,
        is_one_copy: bool,
        require: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.indices: dict[int, int] = {}
        self.own: set[int] = set()
        self.some_have_own = False
        self.shown: list[ShardedGradient] = []
        self.buckets: list[Bucket] = []
        self.copies: list[_native.OneCopy] = []
        self.segments: dict[int, Segment] = {}
        self.members: dict[int, Member] = {}
        self.gradients: dict[int, tuple[int, Tensor]] = {}
        self.number = 0 if wrapper is None else wrapper.add_owner(owner)
        self._communicator = communicator
        self._wrapper = wrapper
        self._owner = owner
        self.stage = stage
        self._with_masters = with_masters
        self._is_one_copy = is_one_copy
        self._require = require
        self._seen_shardings = -1
        self._placed: set[int] = set()
        self._noticed: list[_NewBucket] = []

    @property
    def shared_buckets(self) -> list[Bucket]:
        """Those of which each rank has a shard."""
        return [bucket for bucket in self.buckets if not bucket.is_own]

    def enter(self, param_groups: list[dict[str, Any]]) -> list[int]:
        """Takes up the parameters of groups that are new. All ranks call it.

        Where it raises, nothing has changed.

        Returns:
            Their numbers.
        """
        known = {} if self._wrapper is None else _names_in(self._wrapper)
        entering: list[int] = []
        own = list(self.names)
        for group in param_groups:
            given = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                index = len(self.parameters)
                is_own = self._is_own(parameter)
                # Numbers of shared parameters are the same on all ranks.
                number = f"own {len(self.own)}" if is_own else f"{index - len(self.own)}"
                own.append(given[position] if given else number)
                if is_own:
                    self.own.add(index)
                self.parameters.append(parameter)
                self.indices[id(parameter)] = index
                self.shown.append(ShardedGradient.of(self._owner, index, parameter))
                entering.append(index)
        # Of the names without a model, those that entered before keep theirs.
        self.names = distinct_names([known.get(id(p)) for p in self.parameters], own)
        shared = [index for index in entering if index not in self.own]
        # The numbers of devices differ between ranks, but every rank comes to its devices in the
        # same order.
        devices = list(dict.fromkeys(self.parameters[index].device for index in shared))
        facts = [
            f"{self.names[index]}: {tuple(p.shape)} {p.dtype} on {p.device.type}, "
            f"device {devices.index(p.device)} of these, "
            f"{'trained' if p.requires_grad else 'frozen'}, "
            f"gradient={'none' if p.grad is None else 'present'}, "
            f"strides {dense_strides(p)}"
            for index in shared
            for p in [self.parameters[index]]
        ]
        try:
            check_same(self._communicator, "what pydist.ShardedOptimizer was given", facts)
            for index in entering:
                self._require_shardable(index)
            having = torch.tensor([len(self.own)])
            self._communicator.all_reduce(having, having, "sum", False)
            self.some_have_own = bool(having.item())
        except BaseException:
            for index in reversed(entering):
                self.own.discard(index)
                del self.indices[id(self.parameters[index])]
                for entries in (self.parameters, self.names, self.shown):
                    entries.pop()
            raise
        if self._wrapper is not None:
            self._wrapper.add_shards(
                self.number, ((self.parameters[index], self.shown[index]) for index in entering)
            )
        return entering

    def named(self) -> dict[int, str]:
        """The present names of what the model has of the parameters, by number. Talks to nobody.

        The model may have changed since they entered: a layer that is put before others shifts
        their names, and one that takes the place of another gets that one's. What the model has
        no more is left out. Without a wrapped model, it is all, under the names that were given.
        """
        if self._wrapper is None:
            return dict(enumerate(self.names))
        known = _names_in(self._wrapper)
        present = {
            index: known[id(parameter)]
            for index, parameter in enumerate(self.parameters)
            if id(parameter) in known
        }
        for index, name in present.items():
            self.names[index] = name
            if index in self.members:
                self.members[index].name = name
        return present

    def place(self, entering: list[int]) -> list[Bucket]:
        """Gives parameters their places. All ranks call it.

        Where it raises, places and parameters are of no use any more.

        Returns:
            The buckets that they got.
        """
        shared = [index for index in entering if index not in self.own]
        new = self._lay_out_own([index for index in entering if index in self.own])
        new += self._lay_out(shared) if self._wrapper is None else self._shard_gradients(shared)
        return new

    def _is_own(self, parameter: Tensor) -> bool:
        """Whether a parameter is this rank's alone."""
        if self._wrapper is None:
            return is_marked_as_ignored(parameter)
        return self._wrapper.has_alone(parameter)

    def _require_shardable(self, index: int) -> None:
        parameter, name = self.parameters[index], self.names[index]
        if self._require is not None:
            self._require(name, parameter)
        require_plain(
            f"parameter {name}",
            parameter,
            "pydist.ShardedOptimizer",
            f", or use the optimizer's class on {name} without pydist.ShardedOptimizer",
        )
        if self._wrapper is not None:
            self._wrapper.require_unsharded(name, parameter)
        if index in self.own:
            self._require_dense(index)
            return
        devices = self._communicator.capabilities()["devices"]
        if parameter.device.type not in devices or parameter.layout != torch.strided:
            raise InvalidUsage(
                f"parameter {name} is {parameter.layout} on {parameter.device}; "
                "pydist.ShardedOptimizer trains dense parameters on what its group moves tensors "
                f"of: {', '.join(devices)}"
            )
        if self._is_one_copy and parameter.device.type != "cpu":
            raise InvalidUsage(
                f"parameter {name} is on {parameter.device}, and share_parameters=True maps memory "
                "of the host: leave it out, or train on the CPU"
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise InvalidUsage(f"parameter {name} is {parameter.dtype}, which nothing can train")
        if self._wrapper is None:
            return
        if parameter.grad is not None:
            raise InvalidUsage(
                f"parameter {name} has a gradient already, and the ranks' shards of it would not "
                "be averaged: call zero_grad(set_to_none=True) before making, or adding to, a "
                "pydist.ShardedOptimizer"
            )
        self._wrapper.require_shardable(name, parameter)

    def _require_dense(self, index: int) -> None:
        """For a parameter that is this rank's alone, which no group has to move."""
        parameter, name = self.parameters[index], self.names[index]
        sparse = set() if self._wrapper is None else ids_of_sparse(self._wrapper.module)
        if parameter.layout != torch.strided or id(parameter) in sparse:
            what = "a sparse gradient" if parameter.layout == torch.strided else parameter.layout
            raise InvalidUsage(
                f"parameter {name}, which this rank has alone, is of {what}, and "
                "pydist.ShardedOptimizer takes dense ones: give it an optimizer of its own"
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise InvalidUsage(f"parameter {name} is {parameter.dtype}, which nothing can train")

    def _lay_out_own(self, entering: list[int]) -> list[Bucket]:
        """Parameters that this rank has alone: buckets of each kind, in memory of its own."""
        kinds: dict[_Kind, list[int]] = {}
        for index in entering:
            kinds.setdefault(_kind_of(self.parameters[index]), []).append(index)
        made = []
        for (dtype, device), indices in kinds.items():
            layout, members = self._members(indices, ranks=1)
            with torch.no_grad():
                made.append(
                    move_in(
                        f"this rank's own, first parameter {members[0].name}",
                        torch.empty(layout.count, dtype=dtype, device=device),
                        layout,
                        members,
                        None,
                        None,
                        with_masters=self._with_masters,
                    )
                )
            self._note(made[-1])
        return made

    def _lay_out(self, entering: list[int]) -> list[Bucket]:
        """Without a reducer: the parameters from the last to the first, as backward would."""
        blocks = {
            kind: number
            for number, kind in enumerate(
                dict.fromkeys(_kind_of(self.parameters[index]) for index in entering)
            )
        }
        planned = [
            PlannedParameter(index, self.names[index], p.nbytes, blocks[_kind_of(p)], True)
            for index in reversed(entering)
            for p in [self.parameters[index]]
        ]
        new: list[_NewBucket] = []
        for bucket in plan_buckets(planned, DEFAULT_CAP_BYTES):
            layout, members = self._members(bucket, self._communicator.size)
            number = len(self.buckets) + len(new)
            new.append(
                (f"bucket {number}, first parameter {members[0].name}", layout, members, None, None)
            )
        return self._move_in(new)

    def _members(
        self, indices: Sequence[int], ranks: int
    ) -> tuple[_native.ShardLayout, list[Member]]:
        """The places of parameters of one kind in a bucket that so many ranks share."""
        parameters = [self.parameters[index] for index in indices]
        counts = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        layout = _native.ShardLayout(counts, parameters[0].dtype.to_real().itemsize, ranks)
        members = [
            Member(index, self.names[index], p, offset, dense_strides(p))
            for index, p, offset in zip(indices, parameters, layout.offsets, strict=True)
        ]
        return layout, members

    def _shard_gradients(self, entering: list[int]) -> list[Bucket]:
        """With one: what it averages now, in shards; the rest once it is unfrozen."""
        assert self._wrapper is not None
        reducer = self._wrapper._reducer
        slots = {id(p): slot for slot, p in enumerate(reducer.parameters)}
        present = [index for index in entering if id(self.parameters[index]) in slots]
        if present:
            reducer.shard(
                self.number,
                self.stage,
                [slots[id(self.parameters[index])] for index in present],
                [self.shown[index] for index in present],
            )
        return self.adopt_buckets()

    def notice_buckets(self) -> None:
        """Learns of buckets that the reducer has made, as of what was unfrozen. Talks to nobody."""
        if self._wrapper is None:
            return
        reducer = self._wrapper._reducer
        if reducer.shardings == self._seen_shardings:
            return
        self._seen_shardings = reducer.shardings
        parameters = reducer.parameters
        for made in reducer.sharded_buckets(self.number):
            if made["number"] in self._placed:
                continue
            self._placed.add(made["number"])
            members = []
            for slot, offset, strides in made["members"]:
                index = self.indices[id(parameters[slot])]
                parameter = self.parameters[index]
                members.append(Member(index, self.names[index], parameter, offset, tuple(strides)))
            layout, shard = made["layout"], made["shard"]
            self._noticed.append((made["label"], layout, members, shard, made["number"]))
            self.members.update((member.index, member) for member in members)
            for member, begin, part in cut(shard, layout, members, self._communicator.rank):
                self.gradients[member.index] = (begin, part)

    def adopt_buckets(self) -> list[Bucket]:
        """Moves parameters into what the reducer has made. All ranks call it, at the same step.

        Where it raises, places and parameters are of no use any more.
        """
        self.notice_buckets()
        made = self._move_in(self._noticed) if self._noticed else []
        self._noticed = []
        return made

    def _move_in(self, new: Sequence[_NewBucket]) -> list[Bucket]:
        """Makes buckets. All ranks call it."""
        # The numbers of devices differ between ranks, but every rank comes to its devices in the
        # same order.
        counts: dict[_Kind, int] = {}
        for _, layout, members, _, _ in new:
            kind = _kind_of(members[0].parameter)
            counts[kind] = counts.get(kind, 0) + layout.count
        blocks = {kind: self._memory_of(count, *kind) for kind, count in counts.items()}
        made = []
        with torch.no_grad():
            for label, layout, members, gradients, number in new:
                kind = _kind_of(members[0].parameter)
                memory, view = (block[: layout.count] for block in blocks[kind])
                left, left_of_view = (block[layout.count :] for block in blocks[kind])
                blocks[kind] = left, left_of_view
                bucket = move_in(
                    label,
                    memory,
                    layout,
                    members,
                    gradients,
                    self._communicator,
                    with_masters=self._with_masters,
                    view=view if self._is_one_copy else None,
                    number=number,
                )
                made.append(bucket)
                self._note(bucket)
        return made

    def _memory_of(
        self, count: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Memory for buckets, and what parameters become views of. All ranks call it."""
        if not self._is_one_copy:
            memory = self._communicator.symmetric_empty([count], dtype, device)
            return memory, memory
        copy = _native.OneCopy(self._communicator, count, dtype)
        self.copies.append(copy)
        return copy.memory, copy.view

    def _note(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        for segment in bucket.segments:
            self.segments[segment.member.index] = segment


def _kind_of(parameter: Tensor) -> _Kind:
    return parameter.dtype.to_real(), parameter.device


def _names_in(wrapper: DataParallel) -> dict[int, str]:
    named = dict(wrapper.named_parameters())
    plain = plain_names(wrapper, named)
    return {id(parameter): plain[name] for name, parameter in named.items()}
