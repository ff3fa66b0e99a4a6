"""`pydist.evaluate`: measures a model on all ranks, with the result of one process.

Note [Whole batches]
Kernels round differently for batches of different sizes, so a rank that takes every n-th sample
gets losses that differ in the last digits with the number of ranks. Here ranks take every n-th
*batch* of the order of one process: each batch is computed as in one process, on whichever rank,
and sums are exact (Note [Exact sums] in `metrics/exact_sum.py`). A rank may have one batch less
than another, or none at all.

Note [The same order]
Each rank goes through the sampler's whole order, and picks its batches. That shares out every
sample once only if all ranks see the same order: they compare a digest of it at the end.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pydist._torch import take_attributes
from pydist.config.variables import parse_timeout
from pydist.errors import Error, InvalidUsage, Mismatch
from pydist.job import groups, membership
from pydist.job.arguments import a_type
from pydist.job.groups import Group
from pydist.job.outcome import failed, outcomes
from pydist.job.rank_names import culprits
from pydist.metrics.means import Mean
from pydist.metrics.metric import Metric, compute_all
from pydist.metrics.rows import Rows
from pydist.sampling.batch_sampler import BatchSampler
from pydist.sampling.sampler import DistributedSampler

if TYPE_CHECKING:
    from pydist._native import Communicator

Measure = Callable[[Any, Any], Mapping[str, Any]]


def evaluate(
    model: Any,
    data: DataLoader[Any] | Dataset[Any] | Iterable[Any],
    measure: Measure,
    *,
    metrics: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> dict[str, Any]:
    """Measures a model on all ranks together; each gets the result. Every rank calls it.

    The result is that of one process, to the last digit, whatever the number of ranks: each sample
    counts once, and nothing is rounded where ranks' numbers are put together (if ranks compute
    with as many threads as the one process, whose number can change a kernel's last digit).

    The model is in evaluation mode meanwhile, without gradients; afterwards each of its modules is
    in the mode that it was in. If `measure` or loading data raises on a rank, that rank raises
    this, and all others an `Error` that names it, once they are through with their own share.
    Joins the job by itself (`pydist.init()`).

    Args:
        model: given to `measure`: a module, wrapped or not, or anything else.
        data: the same on every rank:

            - a `DataLoader`, as in one process: the ranks share out its batches. So they do with
              any sampler that has the same order on every rank.
            - a `DataLoader` whose sampler gives each rank its own share already: one that has
              `num_replicas`, as `pydist.DistributedSampler` does (use `pad="none"`).
            - a map-style data set, with `batch_size`.
            - any other iterable of batches, also a `DataLoader` of an `IterableDataset`: taken as
              this rank's own share, of any length.
        measure: called as `measure(model, batch)`, returns for each name what there is to measure
            in this batch:

            - for a name in `metrics`: the arguments of its `update`, as a tuple, or the only one;
            - for any other name: a tensor with a value for each sample, or a pair of values and
              weights (`metrics.Mean.update`). Their mean is the result.
        metrics: by name; the same on every rank. Of `pydist.metrics`, or anything that has
            `reset()`, `update(...)` and a `compute()` that puts together the ranks', such as
            torchmetrics' objects. They are reset at first.
        batch_size: samples a batch, for a data set.
        group: the ranks; by default all. Objects of torchmetrics are told by themselves
            (`process_group=`).
        timeout: seconds (or a timedelta) that a rank that is done waits for the others; by default
            the group's own time-out.

    Returns:
        The result for each name in `metrics`, and each that any rank has measured; the same on
        every rank.

    Raises:
        InvalidUsage: an argument makes no sense, on whichever rank; a sampler repeats samples or
            leaves some out, or batches do, is that of other ranks, or is in the middle of an epoch.
        Mismatch: ranks have different metrics, or their samplers different orders.
        Error: another rank raised; the message names it and says what.

    Example:
        >>> import pydist, torch
        >>> data = [(torch.tensor([float(i)]), i % 2) for i in range(5)]
        >>> def measure(model, batch):
        ...     inputs, labels = batch
        ...     outputs = model(inputs)
        ...     return {"accuracy": (outputs[:, 0] > 2) == (labels == 1), "output": outputs}
        >>> pydist.evaluate(torch.nn.Identity(), data, measure, batch_size=2)
        {'accuracy': 0.6, 'output': 2.0}
    """
    if group is None:
        membership.init()
    communicator = groups.communicator_of(group)
    given: dict[str, Any] = {}
    means: dict[str, Mean] = {}
    batches: Iterable[Any] = ()
    share: _Share | None = None
    problem: Exception | None = None
    number = 0
    wait: float | None = None
    try:
        if timeout is not None:
            wait = parse_timeout(timeout).total_seconds()
        if not callable(measure):
            raise InvalidUsage(
                f"measure is {a_type(measure)}; it must be a function of the model and a batch."
            )
        given = _checked(metrics)
        for metric in given.values():
            metric.reset()
        batches, share = _batches(data, batch_size, communicator)
    except Exception as error:
        problem = error
    # Before anybody measures for nothing.
    kinds = {name: _kind(metric) for name, metric in sorted(given.items())}
    _agree(communicator, {"metrics": kinds}, problem, number, wait)
    modes = _modes_of(model)
    try:
        if isinstance(model, nn.Module):
            model.eval()
        with torch.no_grad(), _place_kept(data):
            for batch in batches:
                # Where the batch stands in the order of all ranks.
                place = None if share is None else number * communicator.size + communicator.rank
                _update(measure(model, batch), given, means, place)
                number += 1
    except Exception as error:
        problem = error
    finally:
        for module, training in modes:
            module.training = training
    facts = {"means": sorted(means), "order": "" if share is None else share.digest()}
    everybody = _agree(communicator, facts, problem, number, wait)
    names = sorted({name for told in everybody for name in told["means"]})
    every_mean = {name: means.get(name, Mean()) for name in names}
    return _results(given, every_mean, communicator, wait, group)


def _place_kept(data: Any) -> AbstractContextManager[None]:
    """Keeps the epoch and the state of a prepared loader: a training loop may be amid it."""
    sampler = getattr(data, "distributed_sampler", None)
    return sampler.place_kept() if isinstance(sampler, DistributedSampler) else nullcontext()


def _checked(metrics: object) -> dict[str, Any]:
    if metrics is None:
        return {}
    # As a collection of torchmetrics does, which is no Mapping.
    if not hasattr(metrics, "keys"):
        raise InvalidUsage(
            f"metrics= is {a_type(metrics)}; it must be a dict from names to metrics."
        )
    named: dict[str, Any] = dict(metrics)  # type: ignore[call-overload]
    for name, metric in named.items():
        if not isinstance(name, str):
            raise InvalidUsage(f"metrics= has a name {name!r}, which is no str.")
        lacks = [m for m in ("reset", "update", "compute") if not hasattr(metric, m)]
        if lacks or isinstance(metric, type):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
            raise InvalidUsage(
                f"metrics= has {what} for {name!r}; it must be a metric: an object with reset(), "
                "update() and compute(), such as pydist.metrics.Accuracy()."
            )
    return named


def _modes_of(model: Any) -> list[tuple[nn.Module, bool]]:
    if not isinstance(model, nn.Module):
        return []
    return [(module, module.training) for module in model.modules()]


def _kind(metric: Any) -> str:
    kind = f"{type(metric).__module__}.{type(metric).__qualname__}"
    return f"{kind} of {metric.state.numel()} numbers" if isinstance(metric, Metric) else kind


class _Share:
    """Every n-th item of an order that all ranks have: see Note [The same order]."""

    def __init__(self, order: Iterable[Any], rank: int, size: int) -> None:
        self._order = order
        self._rank = rank
        self._size = size
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._order):
            self._digest.update(repr(item).encode())
            if number % self._size == self._rank:
                yield item

    def digest(self) -> str:
        """The digest of the whole order, once iteration has come to its end."""
        return self._digest.hexdigest()


def _batches(
    data: Any, batch_size: int | None, communicator: Communicator
) -> tuple[Iterable[Any], _Share | None]:
    """This rank's batches, and how they were shared out, if they were shared out here."""
    if batch_size is not None:
        is_map = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if isinstance(data, (DataLoader, IterableDataset)) or not is_map:
            raise InvalidUsage(
                f"batch_size={batch_size} goes with a data set that has a length and can be "
                f"indexed, not with {a_type(data)}."
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidUsage(
                f"batch_size={batch_size!r} is not valid; it must be a whole number, 1 or more."
            )
        data = DataLoader(data, batch_size=batch_size)
    if not isinstance(data, DataLoader):
        if isinstance(data, Dataset):
            raise InvalidUsage(
                f"data is {a_type(data)}: give batch_size= with it, or a DataLoader."
            )
        if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
            raise InvalidUsage(
                f"data is {a_type(data)}; it must be a DataLoader, a data set with "
                "batch_size=, or this rank's batches."
            )
        return data, None
    if isinstance(data.dataset, IterableDataset):
        return data, None
    sampler = data.sampler if data.batch_sampler is None else data.batch_sampler
    inner = getattr(sampler, "sampler", sampler)
    for own in (sampler, inner):
        if hasattr(own, "num_replicas"):
            _check_shares(own, data.dataset, communicator)
            _check_batches(data, own)
            return _with_own_workers(data), None
    share = _Share(sampler, communicator.rank, communicator.size)
    # A copy and not a new one, so that it keeps all else: workers, collation, a subclass.
    loader = copy.copy(data)
    attribute = "sampler" if data.batch_sampler is None else "batch_sampler"
    take_attributes(loader, **{attribute: share})
    return loader, share


def _with_own_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader whose iterator does not end another one that the training loop is amid.

    Those of a loader whose workers persist share the workers.
    """
    sampler = getattr(loader, "distributed_sampler", None)
    if not loader.persistent_workers or not (
        isinstance(sampler, DistributedSampler) and sampler.is_amid_epoch
    ):
        return loader
    own = copy.copy(loader)
    take_attributes(own)
    return own


def _check_shares(sampler: Any, dataset: Any, communicator: Communicator) -> None:
    """Refuses a sampler whose shares are not, all together, every sample once."""
    remedy = (
        'Give pydist.evaluate the loader of one process, or one whose sampler has pad="none" '
        "(pydist.DistributedSampler, pydist.prepare)."
    )
    placement = (getattr(sampler, "rank", communicator.rank), sampler.num_replicas)
    if placement != (communicator.rank, communicator.size):
        raise InvalidUsage(
            f"the loader's sampler is that of rank {placement[0]} of {placement[1]}, and this is "
            f"rank {communicator.rank} of the {communicator.size} that evaluate, so samples would "
            f"be missing or count more than once. {remedy}"
        )
    samples, shares = len(dataset), getattr(sampler, "total_size", 0)
    if shares > samples:
        raise InvalidUsage(
            f"the loader's sampler repeats samples: {shares} for a data set of {samples}, so "
            f"{shares - samples} would count twice. {remedy}"
        )
    if isinstance(sampler, DistributedSampler):
        samples = len(sampler.order)
    if getattr(sampler, "drop_last", False) and shares < samples:
        raise InvalidUsage(
            f"the loader's sampler leaves out {samples - shares} of {samples} samples, to give all "
            f"ranks the same number. {remedy}"
        )
    if isinstance(sampler, DistributedSampler) and sampler.start > 0:
        raise InvalidUsage(
            f"the loader's sampler is in the middle of epoch {sampler.epoch}, from a state that "
            f"was loaded: the {sampler.start} samples before would be missing. Evaluate with a "
            "loader of its own."
        )


def _check_batches(loader: DataLoader[Any], sampler: Any) -> None:
    """Refuses to leave out a ragged last batch, whose samples depend on the number of ranks."""
    batched: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if not getattr(batched, "drop_last", False) or batched is sampler:
        return
    dataset: Any = loader.dataset
    samples = len(sampler.order) if isinstance(sampler, DistributedSampler) else len(dataset)
    if isinstance(batched, BatchSampler):
        together = batched.global_batch_size
    else:
        # A batch sampler of one's own may have batches of any size: those are its affair.
        size = getattr(batched, "batch_size", 1)
        together = 1 if size == 1 else size * sampler.num_replicas
    if samples % together:
        raise InvalidUsage(
            f"the loader has drop_last=True, so {samples % together} of {samples} samples would be "
            f"left out: they make no batch of {together} over the {sampler.num_replicas} ranks. "
            "Evaluate with drop_last=False, or give pydist.evaluate the loader of one process."
        )


def _update(
    measured: Any, metrics: Mapping[str, Any], means: dict[str, Mean], place: int | None
) -> None:
    if not isinstance(measured, Mapping):
        raise InvalidUsage(
            f"measure returned {a_type(measured)}; it must return a dict from names to "
            "what was measured."
        )
    for name, values in measured.items():
        if not isinstance(name, str):
            raise InvalidUsage(f"measure returned a name {name!r}, which is no str.")
        arguments = values if isinstance(values, tuple) else (values,)
        if name in metrics:
            metric = metrics[name]
            is_rows = isinstance(metric, Rows) and isinstance(values, Tensor) and values.dim() > 0
            if is_rows and place is not None:
                rows = torch.arange(len(values), device=values.device)
                arguments = (values, rows + (place << 32))
            try:
                metric.update(*arguments)
            except TypeError as error:
                raise InvalidUsage(
                    f"{name!r}: {type(metric).__name__} can't take what measure returned: {error}"
                ) from error
            continue
        if len(arguments) == 1 and not (isinstance(values, Tensor) and values.dim() > 0):
            raise InvalidUsage(
                f"measure returned {'one value' if isinstance(values, Tensor) else repr(values)} "
                f"for {name!r}, where the mean needs a value for each sample (such as a loss with "
                'reduction="none"), or a pair (value, number of samples).'
            )
        if len(arguments) > 2:
            raise InvalidUsage(
                f"measure returned {len(arguments)} things for {name!r}, which is not in metrics=, "
                "so that its mean is taken: give values, or a pair of values and weights."
            )
        try:
            means.setdefault(name, Mean()).update(*arguments)
        except InvalidUsage as error:
            raise InvalidUsage(f"{name!r}, which is not in metrics=, as a mean: {error}") from None


def _agree(
    communicator: Communicator,
    facts: dict[str, Any],
    problem: Exception | None,
    number: int,
    timeout: float | None,
) -> list[dict[str, Any]]:
    """Tells the other ranks some facts; returns those of all, or raises on all."""
    told = {**facts, "batch": number}
    try:
        everybody = outcomes(communicator, "evaluate", problem, told, timeout=timeout)
    except Error:
        if problem is not None:
            raise problem from None
        raise
    if problem is not None:
        raise problem
    if wrong := failed(everybody):
        first = everybody[wrong[0]]
        others = f" (so did ranks {wrong[1:]})" if wrong[1:] else ""
        kind = InvalidUsage if first.is_usage else Error
        raise kind(
            f"rank {wrong[0]} raised in pydist.evaluate, after {first.facts['batch']} "
            f"batches{others}: {first.said}",
            **culprits(communicator, wrong, first.said),
        )
    of_all = [outcome.facts for outcome in everybody]
    _check(communicator, of_all)
    return of_all


def _check(communicator: Communicator, everybody: list[dict[str, Any]]) -> None:
    """Raises on all ranks alike."""
    for rank, facts in enumerate(everybody):
        if facts.get("metrics") != everybody[0].get("metrics"):
            raise Mismatch(
                f"pydist.evaluate got metrics {everybody[0]['metrics']} on rank 0 and "
                f"{facts['metrics']} on rank {rank}; give the same on every rank.",
                **culprits(communicator, [0, rank], "gave other metrics than others"),
            )
        if facts.get("order") != everybody[0].get("order"):
            raise Mismatch(
                f"the loader's order of samples differs between ranks 0 and {rank}, so they can't "
                "share it out: don't shuffle what is evaluated, or seed the sampler's generator "
                "alike on every rank.",
                **culprits(communicator, [0, rank], "have samples in another order"),
            )


def _results(
    metrics: Mapping[str, Any],
    means: Mapping[str, Mean],
    communicator: Communicator,
    timeout: float | None,
    group: Group | None,
) -> dict[str, Any]:
    everything = {**metrics, **means}
    names = sorted(everything)
    ours = [name for name in names if isinstance(everything[name], Metric)]
    values = compute_all([everything[name] for name in ours], communicator, timeout=timeout)
    results = dict(zip(ours, values, strict=True))

    def compute(metric: Any) -> Any:
        if isinstance(metric, Rows):
            return metric.compute(group, timeout=timeout)
        return metric.compute()

    return {name: results[name] if name in results else compute(everything[name]) for name in names}
