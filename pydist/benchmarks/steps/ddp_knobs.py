"""torch's DistributedDataParallel at its default knobs and at its best ones."""

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

BUCKETS_MB = (1, 5, 25, 50, 200)

DEFAULT = "DDP"

# Not in every torch that pydist runs with.
_NEWER: dict[str, Any] = {
    name: True
    for name in ("batched_grad_copy",)
    if name in inspect.signature(DistributedDataParallel).parameters
}


def _tuned(cap_mb: int) -> dict[str, Any]:
    return {
        "bucket_cap_mb": cap_mb,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        **_NEWER,
    }


def arm_of(cap_mb: int) -> str:
    """The arm with the best knobs and buckets of so many MiB."""
    return f"DDP, {cap_mb} MiB"


# By arm. Which bucket size is best depends on the model, so all of them take part. Sparse gradients
# travel beside the buckets, which all of these knobs allow.
KNOBS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    **{arm_of(cap_mb): _tuned(cap_mb) for cap_mb in BUCKETS_MB},
}

# With DDP's own bucket size; for where the best one was not measured.
USUAL_BEST = arm_of(25)
