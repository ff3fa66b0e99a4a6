"""A sampler that gives each rank its share of the samples, whole and resumable."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, distributed

from pydist.errors import InvalidUsage
from pydist.job import membership
from pydist.job.arguments import a_type
from pydist.job.launchers import read_placement
from pydist.sampling.agreed_seed import SeedChoice
from pydist.sampling.attendance import Attendance
from pydist.sampling.audit import Ledger
from pydist.sampling.epoch_pass import EpochPass
from pydist.sampling.order import Order, Sequential, Shuffled, sample_count
from pydist.sampling.rank_shares import Pad, Share, pad_of
from pydist.sampling.resumption import (
    read_state,
    require_same_batch,
    require_same_order,
    state_at,
    whole_number,
)
from pydist.sampling.shared_twice import refuse_sharing_again


# It is one of torch's, so that what looks for that (and calls set_epoch on it) finds it; nothing of
# torch's is used.
class DistributedSampler(distributed.DistributedSampler[int]):
    """Gives each rank its share of a data set's indices; replaces torch's `DistributedSampler`.

    The order of an epoch follows from the data set's length, the seed and the epoch alone; rank r
    of N takes every N-th of it, from the r-th on. So the samples of the first k batches of all
    ranks together are the same however many ranks share them, as long as their batch together is.
    It begins at once and takes no memory, whatever the length.

    The epoch goes on by itself when all indices have been handed out, never by asking for an
    iterator; `set_epoch` overrules that. Not collective; every rank makes its own, with the same
    arguments. Not thread-safe.

    Args:
        dataset: anything with a length.
        num_replicas: how many ranks share it; by default those of the job that pydist or
            torch.distributed has joined, or will, by what the launcher has set; 1 without any.
        rank: whose share this is; by default this process's.
        shuffle: whether to shuffle, in each epoch anew. Otherwise samples come as they stand.
        seed: the same on every rank; any whole number of 64 bits.
        drop_last: the same as `pad="drop"`.
        pad: what to do where the ranks can't have the same number of samples. "repeat", the
            default, gives some ranks a sample from the front of the epoch again; "drop" leaves out
            what is too much; "none" gives some ranks one more than others, so that every sample is
            there once: for evaluation, and for training under `model.join()`.
        order: an order of one's own (`pydist.Order`); `shuffle` has no meaning then.

    Raises:
        InvalidUsage: the data set is empty or has no length, or is a sampler or a loader; `rank` is
            not one of `num_replicas`; `pad="drop"` would leave nothing, with more ranks than
            samples; arguments are of a wrong type, or contradict each other. Where it is asked for
            indices or for its length: another sampler is about to share them out again.

    Example:
        >>> import pydist
        >>> sampler = pydist.DistributedSampler(range(10), num_replicas=3, rank=1, shuffle=False)
        >>> list(sampler), sampler.epoch
        ([1, 4, 7, 0], 1)
    """

    # None in a prepared loader, until the ranks have agreed on one.
    seed: int | None  # type: ignore[assignment]

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: Pad | None = None,
        order: Order | None = None,
    ) -> None:
        if isinstance(dataset, Sampler | DataLoader):
            raise InvalidUsage(
                f"a DistributedSampler shares out the samples of a data set, and got a "
                f"{type(dataset).__name__}: give it the data set itself. (An order of one's own is "
                "order=, see pydist.Order.)"
            )
        self.dataset = dataset
        self._dataset_length = sample_count(dataset)
        self.pad: Pad = pad_of(pad, drop_last)
        self.drop_last = self.pad == "drop"
        # What iterating looks at again: the job may have been joined since.
        self._is_rank_given, self._are_ranks_given = rank is not None, num_replicas is not None
        if num_replicas is None or rank is None:
            own_rank, ranks = placement()
            num_replicas = ranks if num_replicas is None else num_replicas
            rank = own_rank if rank is None else rank
        num_replicas = whole_number("num_replicas", num_replicas, 1, 2**63)
        rank = whole_number("rank", rank, -(2**63), 2**63)
        if not 0 <= rank < num_replicas:
            raise InvalidUsage(
                f"rank={rank} is not one of num_replicas={num_replicas}: ranks go from 0 to "
                f"{num_replicas - 1}."
            )
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed, -(2**63), 2**64)
        self._choice: SeedChoice | None = None
        self._attendance: Attendance | None = None
        if order is None:
            make = Shuffled if shuffle else Sequential
            order = make(self._dataset_length)
        if not isinstance(order, Order):
            raise InvalidUsage(
                f"order is {a_type(order)}; it must have name, __len__ and indices(), "
                "see pydist.Order."
            )
        self.order = order
        if len(order) < 1:
            raise InvalidUsage(f"the order '{order.name}' has {len(order)} positions.")
        if self.pad == "drop" and num_replicas > len(order):
            raise InvalidUsage(
                f"{len(order)} samples for {num_replicas} ranks with pad='drop' would leave every "
                "rank without any: use pad='repeat' or 'none', or fewer ranks."
            )
        # As torch has them: of an epoch, this rank's and, repeated ones included, all ranks'.
        self.num_samples = self.share(num_replicas).samples
        self.total_size = self.share(num_replicas).end
        self._epoch = 0
        # Where the next iterator begins, and the batch of all ranks that the state it comes from
        # was made with (0: unknown).
        self._start = 0
        # Whether the epoch is that of a state, and nobody has said one since.
        self.is_loaded = False
        # Whether an epoch that has ended comes again until set_epoch() says another one, as with
        # torch's sampler. An integration sets it while a framework alone says epochs.
        self.repeats_epoch = False
        # How to begin with the epoch after that, where the state was made at the end of one. For a
        # warning: an integration sets it where somebody else than the script sets epochs.
        self.begins_next_epoch = "calls set_epoch() with its epoch before"
        self._start_batch = 0
        # What the state depends on: that of the iterator which was begun last, or, of a prepared
        # loader, has delivered last; unless set_epoch has gone elsewhere.
        self._pass: EpochPass | None = None
        self._latest: EpochPass | None = None
        # The unfinished iterators of a prepared loader. One may run within another: a loop may look
        # at a batch of its own loader. set_epoch() drops them.
        self._open: list[EpochPass] = []

    def __iter__(self) -> Iterator[int]:
        self.refuse_sharing_again(self)
        return self.indices_of(self.begin_epoch())

    def __len__(self) -> int:
        """The number of this rank's samples in a whole epoch."""
        self.refuse_sharing_again(self)
        return self.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator goes through. Setting it is `set_epoch`."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next; without it they follow one another.

        It begins at its front, unless it is the epoch that the sampler is in already: one that was
        loaded from a state in its middle goes on from there.

        Args:
            epoch: from 0.
        """
        epoch = whole_number("epoch", epoch, 0, 2**63)
        self.is_loaded = False
        if epoch != self._epoch:
            self._epoch, self._start, self._start_batch = epoch, 0, 0
            self._pass, self._open = None, []
        elif self._pass is not None and self._pass.epoch != epoch:
            self._pass, self._open = None, []

    def state_dict(self, samples_seen: int | None = None) -> dict[str, int | None]:
        """Where training is in the data: the same on every rank that has done as many steps.

        Where it was prepared (`pydist.prepare`), the loader's progress is known: it counts what the
        loop has got, not what workers have fetched. Otherwise a sampler knows what it has handed
        out, but not what of it still lies in a loader's queues: within an epoch, and at its end,
        say what was trained on.

        Args:
            samples_seen: how many of the indices of its latest iterator this rank has trained on;
                `len(sampler)` at the end of an epoch that was not resumed.

        Returns:
            A few whole numbers, for any checkpoint. One rank's is enough for all; where ranks have
            different numbers of samples, that of rank 0, which has the most. The seed is None where
            a prepared loader has none yet.

        Raises:
            InvalidUsage: it would have to guess, or the number can't be.
        """
        current = self._pass
        steps = samples_seen
        if samples_seen is not None and current is not None:
            samples_seen = whole_number("samples_seen", samples_seen, 0, 2**63)
            steps = current.share.steps_of(samples_seen)
            if steps is None:
                raise InvalidUsage(
                    f"samples_seen={samples_seen!r} is not valid: this rank had "
                    f"{current.share.samples} samples of epoch {current.epoch} to go through, in "
                    f"steps of {current.share.samples_before(1)}."
                )
        return self.state_of(steps, "samples_seen", "samples")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was made, on any number of ranks. Every rank loads it.

        The seed is the state's, whatever this sampler was made with, unless the state has none.

        Args:
            state: what `state_dict` gave, of this sampler, a `BatchSampler` or a loader.

        Raises:
            InvalidUsage: it is no such state, or one of a data set of another length, or of another
                order. Nothing has changed then.
        """
        values = read_state(state)
        require_same_order(values, self.order)
        self.seed = values.get("seed", self.seed)
        self._epoch, self._start = values["epoch"], values["position"]
        self._start_batch = values["batch"]
        self.is_loaded = True
        self._pass = self._latest = None
        self._open = []

    def ledger(self) -> Ledger:
        """What this rank was given of the epoch that was iterated over last. Not collective.

        `ledger().combined()` adds up those of all ranks, which is collective. That of an epoch that
        was interrupted and resumed is the sum of both parts': `before + after`.

        Returns:
            Count and digest of the samples that the loop has got, of a prepared loader; of those
            that were handed out, otherwise.
        """
        return Ledger(self._epoch) if self._latest is None else self._latest.ledger()

    # --- for BatchSampler and prepared loaders ---------------------------------------------------

    def share(self, step: int, *, drops_last_step: bool = False, start: int = 0) -> Share:
        """This rank's part of an epoch that is consumed in steps of so many positions."""
        return Share(
            length=len(self.order),
            start=start,
            ranks=self.num_replicas,
            rank=self.rank,
            step=step,
            pad=self.pad,
            drops_last_step=drops_last_step,
        )

    def begin(
        self,
        step: int,
        *,
        drops_last_step: bool = False,
        batch: int = 0,
        is_counted: bool = False,
    ) -> EpochPass:
        """A pass over what is left of the epoch, which the state depends on from now on.

        Args:
            step: positions of a step.
            drops_last_step: whether a ragged last step is left out.
            batch: samples of a step, where steps are what the optimizer does; 0 where unknown.
            is_counted: whether the caller counts what arrives.

        Raises:
            InvalidUsage: the data set or the job has changed, or the batch is another one than that
                of the state that was loaded.
            Error: what `settle_seed` raises.
        """
        self._check_unchanged()
        self.check_batch(batch)
        if self._choice is not None and type(self.order) is Sequential:
            seed = 0  # nothing depends on it: no need to ask anybody
        else:
            seed = self.settle_seed()
        self._pass = self._latest = EpochPass(
            self.order,
            seed,
            self._epoch,
            self.share(step, drops_last_step=drops_last_step, start=self._start),
            batch=batch,
            is_counted=is_counted,
            on_end=self._go_on,
        )
        at_end = self._start >= len(self.order)
        if self.is_loaded and at_end and not self.repeats_epoch:
            warnings.warn(
                f"the state of the sampler was made with the last batch of epoch {self._epoch}, so "
                "what is left of it has no batches, and the next iteration is of the epoch after: "
                "that is right for a loop that goes on in this epoch. One that begins with the "
                "next, or that takes a number of batches (islice, zip, next), "
                f"{self.begins_next_epoch}.",
                stacklevel=3,
            )
        self.is_loaded = False
        if is_counted:
            self._open.append(self._pass)
        if self._attendance is not None:
            self._attendance.begin()
        return self._pass

    def begin_epoch(self, *, is_counted: bool = False) -> EpochPass:
        """A pass over what is left of the epoch, a sample a step."""
        return self.begin(self.num_replicas, is_counted=is_counted)

    def indices_of(self, begun: EpochPass) -> Iterator[int]:
        """What a pass goes through."""
        return begun.single_indices()

    @property
    def epoch_steps(self) -> int:
        """In how many steps `begin_epoch` goes through a whole epoch."""
        return self.num_samples

    def seed_by(self, choice: SeedChoice) -> None:
        """Leaves the seed to the first iteration."""
        self.seed, self._choice = None, choice

    def keep_attendance(self) -> None:
        """Warns from now on where other ranks leave their share out. Every rank calls it."""
        if self.num_replicas > 1 and self._attendance is None:
            what = f"{len(self.order)} {self.order.name}"
            self._attendance = Attendance(self.rank, self.num_replicas, what)

    def attend_for(self, empty: DistributedSampler) -> None:
        """Counts as having begun the other one's share, in which this rank has no samples."""
        self._attendance = empty._attendance

    def settle_seed(self) -> int:
        """The seed, which the ranks agree on if they have not yet; see `SeedChoice.settle`."""
        if self._choice is not None:
            self._check_unchanged()
            facts: dict[str, int | str] = {
                "samples": len(self.order),
                "order": self.order.name,
                "ranks": self.num_replicas,
            }
            self.seed = self._choice.settle(self.seed, self.rank, facts)
            self._choice = None
        assert self.seed is not None
        return self.seed

    def refuse_sharing_again(self, asked: Sampler[Any], *, asks_loader: bool = False) -> None:
        """Raises where somebody shares out again what `asked`, of these indices, yields."""
        if self.num_replicas > 1:
            refuse_sharing_again(
                asked, self.num_replicas, lambda: placement()[1], asks_loader=asks_loader
            )

    @property
    def start(self) -> int:
        """The position where the next iterator begins: beyond 0 where a state says so."""
        return self._start

    def count_step(self, begun: EpochPass) -> None:
        """Says that a loader's iterator has delivered a step: the state is of its pass now."""
        begun.count_step()
        if begun in self._open:
            self._pass = self._latest = begun
            if begun.steps == begun.share.steps:
                self._open.remove(begun)

    def close(self, finished: EpochPass) -> None:
        """Says that an iterator has come to its end: the state is of the next epoch from now on.

        Where the epoch comes again, the state is that of its end until a batch of it comes again.
        """
        finished.end()
        if self._pass is finished and not self.repeats_epoch:
            self._pass = None

    def drop(self, dropped: EpochPass) -> None:
        """Says that an iterator is gone: if left early, the state is that of one around it."""
        if dropped in self._open:
            self._open.remove(dropped)
            around = [begun for begun in self._open if begun.epoch == dropped.epoch]
            if self._pass is dropped and around:
                self._pass = self._latest = around[-1]

    @property
    def is_amid_epoch(self) -> bool:
        """Whether an iterator is in the middle of this rank's samples."""
        return self._pass is not None

    @contextmanager
    def place_kept(self) -> Iterator[None]:
        """Whatever is iterated over inside moves neither the epoch nor the state."""
        place = (self._epoch, self._start, self._start_batch, self._pass, self._open)
        is_loaded, self.is_loaded = self.is_loaded, False
        self._open = []
        try:
            yield
        finally:
            self._epoch, self._start, self._start_batch, self._pass, self._open = place
            self.is_loaded = is_loaded

    def check_batch(self, batch: int, state: Mapping[str, Any] | None = None) -> None:
        """Whether batches of so many samples fit a state in the middle of an epoch.

        Args:
            batch: of all ranks together; 0 where unknown, which fits any.
            state: by default the one that was loaded last.

        Raises:
            InvalidUsage: they don't.
        """
        position, of_state = self._start, self._start_batch
        if state is not None:
            values = read_state(state)
            position, of_state = values["position"], values["batch"]
        if 0 < position < len(self.order):
            require_same_batch(of_state, batch, self.num_replicas)

    def state_of(self, seen: int | None, argument: str, unit: str) -> dict[str, int | None]:
        """The state after so many steps of the latest pass; see `state_dict`."""
        current = self._pass
        epoch, position, batch = self._epoch, self._start, self._start_batch
        if seen is not None:
            if current is None:
                if seen != 0:
                    raise InvalidUsage(
                        f"{argument}={seen}, but nothing of epoch {epoch} has been asked for yet."
                    )
            else:
                seen = whole_number(argument, seen, 0, current.share.steps + 1)
                epoch, position = current.epoch, current.share.position_after(seen)
                batch = current.batch
        elif current is not None and current.is_counted:
            epoch, position = current.epoch, current.share.position_after(current.steps)
            batch = current.batch
        elif current is not None and current.handed:
            raise InvalidUsage(
                f"{current.handed} of {current.share.samples} samples of epoch {current.epoch} "
                "were handed out, but how many were trained on only you can know, since a loader "
                f"fetches ahead: call state_dict({argument}=...) with the number of {unit} since "
                "the iterator began, or let pydist.prepare(loader) count them."
            )
        return state_at(self.order, seed=self.seed, epoch=epoch, position=position, batch=batch)

    def _go_on(self, finished: EpochPass) -> None:
        # Of two iterators over the same epoch only one moves on.
        if self._epoch == finished.epoch:
            self._epoch += not self.repeats_epoch
            self._start, self._start_batch = 0, 0
        if self._attendance is not None:
            self._attendance.end()

    def _check_unchanged(self) -> None:
        length = sample_count(self.dataset)
        if length != self._dataset_length:
            raise InvalidUsage(
                f"the data set had {self._dataset_length} samples when its sampler was made, and "
                f"has {length} now: make a new sampler."
            )
        if membership.is_initialized() or dist.is_initialized():
            rank, ranks = placement()
            rank_fits = self._is_rank_given or rank == self.rank
            if not rank_fits or not (self._are_ranks_given or ranks == self.num_replicas):
                raise InvalidUsage(
                    f"the sampler was made as rank {self.rank} of {self.num_replicas}, and this "
                    f"process is rank {rank} of {ranks} now: make the sampler after pydist.init() "
                    "(or init_process_group), or give it num_replicas= and rank=."
                )


def placement() -> tuple[int, int]:
    """This process's rank in its job, and the number of ranks."""
    if membership.is_initialized():
        return membership.rank(), membership.world_size()
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    # A script may make its sampler before its model, which joins the job.
    job = read_placement()
    return job.rank, job.world_size
