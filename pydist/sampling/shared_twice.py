"""Refuses that a library shares out among ranks what one rank's share is already.

Note [Who asks]
Libraries that share out samples put a sampler of their own around the one that they find, which
asks it for indices and keeps every n-th; or they put a loader of their own around the loader, and
keep every n-th batch. Around a share of pydist's only a part of the data set would be left, without
any error. What such samplers and loaders have in common is no type but a number of shares among
their attributes (`num_replicas`, as torch's, or `num_processes`), or among the arguments that they
are made with. So a sampler or prepared loader of pydist's that is asked for something looks at the
methods that are running. Where one of them belongs to another one of several shares, and there
would be more shares of shares than ranks, it refuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch.utils.data import Sampler

from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type

# Attributes that hold a number of shares: of torch and Lightning, of Accelerate and Transformers.
_NUMBERS = ("num_replicas", "num_processes", "num_shards", "world_size")
# Attributes that come together where batches are shared out: how many shares, and which of them.
_PLACES = (("num_processes", "process_index"), ("num_replicas", "rank"), ("num_shards", "shard_id"))
# What stands above torch's loader does not ask for indices, but for batches.
_LOADER = "torch.utils.data.dataloader"
# Deeper than any chain of samplers.
_MOST_FRAMES = 16


def refuse_sharing_again(
    own: Sampler[object], shares: int, ranks: Callable[[], int], *, asks_loader: bool
) -> None:
    """Raises where the caller's caller shares out what `own` yields; see Note [Who asks].

    Args:
        own: the sampler that is asked.
        shares: how many ranks share its samples, 2 or more.
        ranks: tells how many there are.
        asks_loader: whether the loader of that sampler is asked, for batches.

    Raises:
        InvalidUsage: the message names the other sampler, and what to do.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_globals.get("__name__") == _LOADER:
            return
        asking = _self_of(frame)
        further = _shares_of(asking, frame, asks_loader) if asking is not own else 1
        if further > 1 and shares * further > ranks():
            raise InvalidUsage(
                f"{a_type(own)} of pydist's has shared out the samples among {shares} "
                f"ranks, and {a_type(asking)} (of {type(asking).__module__}) is about to share out "
                f"each rank's again, among {further}: most samples would never be trained on. "
                "Share them out once: give the library a plain DataLoader, as it was before "
                "pydist.prepare; or keep pydist's, and tell the library not to share it out "
                "(Lightning: Trainer(use_distributed_sampler=False); Accelerate: leave the loader "
                "out of accelerator.prepare())."
            )
        frame = frame.f_back


def _self_of(frame: FrameType) -> object:
    """The object whose method runs in a frame; None in a function of its own."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _shares_of(asking: object, frame: FrameType, asks_loader: bool) -> int:
    # What hands out indices is a sampler, whether it inherits from torch's or not.
    is_sampler = isinstance(asking, Sampler)
    is_of_pydist = type(asking).__module__.startswith("pydist.")
    if not is_sampler and (is_of_pydist or frame.f_code.co_name != "__iter__"):
        return 1
    # Attributes of its own only: a sampler that hands on others' has nothing to share out.
    known = dict(getattr(asking, "__dict__", {}))
    if frame.f_code.co_name == "__init__":
        known.update(frame.f_locals)  # it may ask before it has set them
    # What hands on batches may know how many ranks there are, and share out nothing, unless it
    # knows which of them it is for, too.
    numbers: tuple[str, ...] = _NUMBERS
    if asks_loader and not is_sampler:
        numbers = tuple(number for number, place in _PLACES if place in known)
    values = [known.get(name) for name in numbers]
    return max([1, *(value for value in values if isinstance(value, int))])
