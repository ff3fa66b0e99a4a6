"""What averages the buckets in the engine's place: a hook of torch's kind, or an own method."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydist._torch import Future
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.like_torch.torch_buckets import TorchBuckets
from pydist.parallel.wrapper_parts.buckets import Buckets

if TYPE_CHECKING:
    from pydist import _native

# The file of torch's hooks that step an optimizer of torch's while gradients travel.
_ZERO_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"


class CommunicationHooks(Buckets):
    """The part of `pydist.DataParallel` that lets the program average."""

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
        _refuse_zero_hook(hook)
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

    @property
    def _averages_itself(self) -> bool:
        """Whether `average_bucket` is overridden."""
        return type(self).average_bucket is not CommunicationHooks.average_bucket

    def _let_itself_average(self, reducer: _native.Reducer) -> None:
        """Lets `average_bucket` average."""
        self._let_hook_average(reducer, weakref.ref(self), _average_bucket)

    def _let_hook_average(
        self, reducer: _native.Reducer, state: object, hook: Callable[..., Any]
    ) -> None:
        plans_anew = type(self).plan_buckets is Buckets.plan_buckets
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


def _refuse_zero_hook(hook: Callable[..., Any]) -> None:
    """Raises InvalidUsage for a hook that steps a ZeroRedundancyOptimizer, or wraps one that does.

    Such a hook waits for a wrapper of torch's to say that its buckets are final.
    """
    cells = getattr(hook, "__closure__", None) or ()
    wrapped = [cell.cell_contents for cell in cells if cell != types.CellType()]
    if any(getattr(each, "__module__", None) == _ZERO_HOOKS for each in (hook, *wrapped)):
        raise InvalidUsage(
            "hook is one of torch's hook_with_zero_step, which steps a ZeroRedundancyOptimizer by "
            "what torch's DistributedDataParallel knows of its buckets, and pydist.DataParallel "
            "has other ones: use pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=...), which "
            "shards the optimizer's state too, and no hook"
        )


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
    itself: weakref.ref[CommunicationHooks], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    wrapper = itself()
    if wrapper is None:
        raise InvalidUsage(
            "the pydist.DataParallel whose average_bucket() averages gradients is gone: keep it "
            "until backward is over"
        )
    return wrapper.average_bucket(bucket)
