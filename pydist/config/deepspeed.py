"""DeepSpeed's configuration in pydist's words."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pydist.errors import InvalidUsage

# What makes DeepSpeed's training faster, lets it tell more, or is about its checkpoints, and gives
# the same weights.
_WITHOUT_EFFECT = {
    "steps_per_print",
    "log_level",
    "vocabulary_size",
    "disable_python_gc",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_scatter",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.load_from_fp32_weights",
    # Of the host's memory: always pinned here, bucket by bucket, whatever their buffers are.
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.fast_init",
    "checkpoint",
    "nebula",
    "activation_checkpointing",
    "timers",
    "aio",
    # When each gradient is added in float32, not to what.
    "bf16.immediate_grad_update",
    "bfloat16.immediate_grad_update",
}

# What begins so is read by stage 3 alone.
_OF_STAGE_3 = (
    "zero_optimization.stage3_",
    "zero_optimization.sub_group_size",
    "zero_optimization.offload_param",
    "zero_optimization.leaf_module",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.override_module_apply",
)

# DeepSpeed's defaults, which files spell out, and which change nothing. Of other names, what is
# false or null, and a table of such values or with `enabled` false, changes nothing either.
_DEFAULTS: dict[str, Any] = {
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "seq_parallel_communication_data_type": "fp32",
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 0,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.offload_optimizer.ratio": 1.0,
}

# What DeepSpeed knows besides, and nobody has misspelt.
_THEIRS = {
    "scheduler",
    "amp",
    "autotuning",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "data_types.keep_in_fp32_modules",
    "elasticity",
    "pipeline",
    "prescale_gradients",
    "progressive_layer_drop",
    "sparse_attention",
    "sparse_gradients",
    "tensor_parallel",
    "bf16.check_grad_overflow",
    "bfloat16.check_grad_overflow",
}


class _Taken:
    """Tables of which keys are taken one by one, so that those that are left can be named."""

    def __init__(self, tables: Mapping[str, Any], where: str, within: str = "") -> None:
        self._tables = dict(tables)
        self._prefix = f"{within}." if within else ""
        self.where = where
        # All names that were asked for, given or not.
        self.understood: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """A value; "auto", which another library replaces, is refused."""
        self.understood.add(self._prefix + name)
        value = self._tables.pop(name, default)
        if value == "auto":
            raise InvalidUsage(
                f"{self.where}: {name} is 'auto', which the Trainer of Transformers fills in from "
                "its own arguments, and nobody here: write the value"
            )
        return value

    def number(self, name: str, least: float, kind: type[int | float] = float) -> Any:
        """A number, at least so large; None where it is not there."""
        value = self.take(name)
        kinds = (int,) if kind is int else (int, float)
        if value is not None and (type(value) not in kinds or not value >= least):
            a_number = "a whole number" if kind is int else "a number"
            raise InvalidUsage(
                f"{self.where}: {name} is {value!r}; it must be {a_number}, {least} or more"
            )
        return value

    def table(self, name: str) -> _Taken:
        """A table within this one; an empty one where it is not there."""
        value = self.take(name, {})
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise InvalidUsage(f"{self.where}: {name} is {value!r}; it must be a table")
        return _Taken(value, f"{self.where}: {name}", self._prefix + name)

    def switch(self, name: str) -> bool:
        """A value that says yes or no."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise InvalidUsage(f"{self.where}: {name} is {value!r}; it must be true or false")
        return value

    def rest(self) -> dict[str, Any]:
        """All that is left, taken."""
        return {name: self.take(name) for name in list(self._tables)}

    def left(self, changes_nothing: bool = False) -> list[str]:
        """The names of what nobody took, and which is not, or is, what DeepSpeed does anyway."""
        return [
            self._prefix + name
            for name, value in self._tables.items()
            if _changes_nothing(self._prefix + name, value) == changes_nothing
        ]


def _changes_nothing(name: str, value: Any) -> bool:
    if value is not None and name in _DEFAULTS:
        return bool(value == _DEFAULTS[name])
    if _is_off(value):
        return True
    return isinstance(value, Mapping) and all(
        _changes_nothing(f"{name}.{within}", each) for within, each in value.items()
    )


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        is_disabled = value.get("enabled") is False or value.get("device") == "none"
        return is_disabled or all(map(_is_off, value.values()))
    return value is None or value is False


def translate(tables: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The sections of a `pydist.Config` that mean the same.

    Args:
        tables: DeepSpeed's configuration.
        where: its name, for messages.

    Raises:
        InvalidUsage: some of it would change the training, and is not understood.
    """
    given = _Taken(tables, where)
    training: dict[str, Any] = {
        "batch_size": given.number("train_batch_size", 1, int),
        "micro_batch_size": given.number("train_micro_batch_size_per_gpu", 1, int),
        "accumulation_steps": given.number("gradient_accumulation_steps", 1, int),
        "clip_grad_norm": _clipping(given),
        "drop_last": given.switch("dataloader_drop_last") or None,
    }
    zero = given.table("zero_optimization")
    stage = zero_stage = zero.take("stage", 0)
    if stage not in (0, 1, 2):
        raise InvalidUsage(
            f"{where}: zero_optimization.stage is {stage!r}; pydist shards the optimizer's state "
            "and gradients (stages 1 and 2), and keeps parameters whole on every rank"
        )
    bf16 = [given.table("bf16"), given.table("bfloat16")]
    switches = [each.switch("enabled") for each in bf16]
    if any(switches):
        training["dtype"] = "bfloat16"
        # The weights that are updated are kept in float32, as theirs are in every stage. Ours are
        # where the state is sharded. But without sharding theirs add up gradients in float32, too.
        steps = training["accumulation_steps"]
        if steps is None and None not in (training["batch_size"], training["micro_batch_size"]):
            steps = 0  # whatever is left for it
        if stage == 0 and steps not in (None, 1):
            raise InvalidUsage(
                f"{where}: bf16 without zero_optimization adds up gradients in float32, and pydist "
                "in bfloat16: set zero_optimization.stage to 1, which does so there as well, or "
                "gradient_accumulation_steps to 1"
            )
        stage = stage or 1
    types = given.table("data_types")
    summed_in, own = types.take("grad_accum_dtype"), "bf16" if any(switches) else "fp32"
    if summed_in not in (None, own):
        raise InvalidUsage(
            f"{where}: data_types.grad_accum_dtype is {summed_in!r}, and gradients are added up in "
            f"the type of the model here, which is {own!r}: take it out"
        )
    if given.table("fp16").switch("enabled"):
        raise InvalidUsage(
            f"{where}: fp16.enabled is true: use bf16, or torch.autocast and torch.amp.GradScaler "
            "around the model"
        )
    optimizer = _optimizer(given.table("optimizer"))
    if stage:
        optimizer["stage"] = stage
    offload = zero.table("offload_optimizer")
    is_offloaded = _is_offloaded(offload)
    if is_offloaded:
        if not zero_stage:
            raise InvalidUsage(
                f"{where}: zero_optimization.offload_optimizer.device is 'cpu', which takes "
                "zero_optimization.stage 1 or 2"
            )
        optimizer["offload"] = "cpu"
    read = [given, zero, types, *(bf16 if any(switches) else ())]
    read += [offload] if is_offloaded else []
    left = [name for tables in read for name in tables.left()]
    understood = {name for tables in read for name in tables.understood}
    changing = [
        name for name in left if name not in _WITHOUT_EFFECT and not name.startswith(_OF_STAGE_3)
    ]
    if changing:
        named = ", ".join(_with_nearest(name, understood) for name in changing)
        raise InvalidUsage(
            f"{where}: pydist does not know {named}, which would change the training: take it "
            "out, or do it in the program"
        )
    # What is switched off may still be misspelt.
    off = [name for tables in read for name in tables.left(changes_nothing=True)]
    left += [told for name in off if (told := _with_nearest(name, understood)) != name]
    if left:
        warnings.warn(f"{where}: of no effect here: {', '.join(left)}", stacklevel=3)
    return {
        "training": {name: value for name, value in training.items() if value is not None},
        "optimizer": optimizer,
    }


def _is_offloaded(given: _Taken) -> bool:
    """Whether the optimizer's state is to be on the host."""
    device = given.take("device")
    if device in (None, "none"):
        return False
    if device != "cpu":
        raise InvalidUsage(
            f"{given.where}.device is {device!r}; pydist keeps the optimizer's state on the host "
            "('cpu') or where the parameters are ('none')"
        )
    return True


def _clipping(given: _Taken) -> float | None:
    """The largest norm of gradients; None where nothing is clipped."""
    norm: float | None = given.number("gradient_clipping", 0)
    if norm is None:
        warnings.warn(
            f"{given.where}: gradient_clipping is not given, so nothing is clipped, as with older "
            "versions of DeepSpeed; newer ones (0.19.5) clip at 1.0 then: write what you want, 0.0 "
            "for no clipping",
            stacklevel=4,
        )
    return norm or None


def _with_nearest(name: str, understood: Iterable[str]) -> str:
    """A name that is not understood, and the one that was meant, where it looks misspelt."""
    known = [*understood, *_DEFAULTS, *_WITHOUT_EFFECT, *_THEIRS]
    if name in known or name.startswith(_OF_STAGE_3):
        return name
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f"{name} (did you mean {near[0]}?)" if near else name


def _optimizer(given: _Taken) -> dict[str, Any]:
    kind = given.take("type")
    if kind is None:
        return {}
    params = given.table("params").rest()
    if left := given.left():
        raise InvalidUsage(f"{given.where}: pydist does not know {', '.join(left)}")
    name = str(kind)
    if name.lower() in ("adam", "adamw"):
        # Their Adam decays weights as AdamW does unless told otherwise, and their own kernels
        # decay nothing by default, where torch's AdamW does.
        mode = params.pop("adam_w_mode", True)
        if not isinstance(mode, bool):
            raise InvalidUsage(f"{given.where}: adam_w_mode is {mode!r}; it must be true or false")
        decays_apart = mode or name.lower() == "adamw"
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
        name = "AdamW" if decays_apart else "Adam"
        if params.pop("bias_correction", True) is not True:
            raise InvalidUsage(f"{given.where}: torch's {name} always corrects its bias")
    elif name.lower() == "sgd":
        name = "SGD"
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise InvalidUsage(
            f"{given.where}.type is {kind!r}, and torch.optim has no such class: pass an optimizer "
            "to pydist.initialize"
        )
    return {"name": name, "params": params}
