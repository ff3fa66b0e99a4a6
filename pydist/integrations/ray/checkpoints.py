"""Checkpoints of pydist where Ray Train keeps its own, so that restarts go on from them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch.distributed as dist

import pydist
from pydist.errors import InvalidUsage


def report(metrics: Mapping[str, Any], **saved: Any) -> None:
    """`ray.train.report` with a checkpoint of `pydist.save`. All workers call it.

    The workers write the checkpoint straight into the run's folder, each its part, and nothing is
    copied. Ray learns of it once it is whole, hands it to `restore` after a restart, and removes
    old ones as its `CheckpointConfig` says.

    Args:
        metrics: Of rank 0, as for `ray.train.report`.
        **saved: `model`, `optimizer`, `scheduler`, `scaler`, `sampler`, `stateful` and `extra` of
            `pydist.save`. Without any, metrics alone are reported.

    Raises:
        InvalidUsage: The run's storage is no file system that is mounted on the workers; or
            `step`, `keep` or `asynchronous` is given: Ray names, removes and waits for checkpoints.
        CheckpointError, InvalidUsage, Mismatch: As from `pydist.save`.
    """
    if not saved:
        ray.train.report(dict(metrics))
        return
    own = sorted({"step", "keep", "asynchronous", "process_group"} & saved.keys())
    if own:
        raise InvalidUsage(
            f"pydist.integrations.ray.report got {own}, which Ray decides on: give the step in "
            "extra=, and ray.train.CheckpointConfig(num_to_keep=) to the trainer's RunConfig."
        )
    storage = ray.train.get_context().get_storage()
    files = storage.storage_filesystem
    if not isinstance(files, pyarrow.fs.LocalFileSystem):
        raise InvalidUsage(
            f"the run's storage_path is on {files.type_name}, and pydist.save writes to a folder "
            "that all workers have mounted: give RunConfig a storage_path on one; or call "
            "pydist.save on such a folder, and ray.train.report with its Checkpoint on rank 0, "
            "which Ray then uploads."
        )
    pydist.init()
    # A new name each time: what an attempt that failed has left is never written over.
    name = [f"checkpoint_{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name, src=0)
    path = Path(storage.experiment_fs_path) / name[0]
    pydist.save(path, **saved)
    ray.train.report(
        dict(metrics),
        checkpoint=ray.train.Checkpoint(str(path), files),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def restore(**loaded: Any) -> Any:
    """`pydist.load` of the checkpoint from which Ray has this run go on. All workers call it.

    Args:
        **loaded: `model`, `optimizer`, `scheduler`, `scaler`, `sampler`, `stateful` and `random` of
            `pydist.load`.

    Returns:
        What was saved as `extra`; None where there is no checkpoint, and training begins.

    Raises:
        CheckpointError, InvalidUsage, Mismatch: As from `pydist.load`.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as path:
        return pydist.load(path, **loaded)
