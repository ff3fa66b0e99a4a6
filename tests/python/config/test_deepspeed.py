"""DeepSpeed's configurations in pydist's words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pydist import Config, InvalidUsage


def read(given: dict[str, Any]) -> Config:
    """Of a file that says, unless it is about that, that nothing is clipped."""
    return Config.from_deepspeed({"gradient_clipping": 0.0, **given})


TYPICAL = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale_window": 100},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
}


def test_a_typical_one(tmp_path: Path) -> None:
    expected = {
        "training": {
            "batch_size": 32,
            "micro_batch_size": 4,
            "accumulation_steps": 4,
            "clip_grad_norm": 1.0,
            "dtype": "bfloat16",
        },
        "optimizer": {
            "name": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
            "stage": 2,
        },
    }
    assert Config.from_deepspeed(TYPICAL).to_dict() == expected
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TYPICAL))
    config = Config.from_deepspeed(path)
    assert config.to_dict() == expected
    assert config.source_of("optimizer", "stage") == str(path)


# Like a file of Megatron-DeepSpeed: every default is spelt out.
SPELT_OUT = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 1,
        "ignore_unused_parameters": True,
        "compute_grad_norm": True,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "cpu_offload": False,
        "sub_group_size": 1e9,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": None},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "sparse_gradients": False,
    "fp32_allreduce": False,
    "communication_data_type": None,
    "data_types": {"grad_accum_dtype": "bf16"},
    "tensor_parallel": {"autotp_size": 0},
    "sequence_parallel_size": 1,
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "amp": {"enabled": False, "opt_level": "O1"},
    "elasticity": {"enabled": False, "max_train_batch_size": 2000},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
}

# What of it is not even named in a warning.
_SILENT = set(SPELT_OUT) - {"steps_per_print", "checkpoint", "zero_allow_untested_optimizer"}
# What it says here.
SPELT_OUT_HERE = {
    "training": {
        "batch_size": 256,
        "micro_batch_size": 8,
        "clip_grad_norm": 1.0,
        "dtype": "bfloat16",
    },
    "optimizer": {"stage": 1},
}

# Like one for the Trainer of Transformers, its "auto" of the engine's own work left in.
OF_TRAINER = {
    "bf16": {"enabled": False, "check_grad_overflow": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_micro_batch_size_per_gpu": 16,
    "wall_clock_breakdown": False,
}


@pytest.mark.filterwarnings("error")
def test_defaults_that_are_spelt_out_change_nothing() -> None:
    quiet = {name: value for name, value in SPELT_OUT.items() if name in _SILENT}
    quiet["zero_optimization"] = {
        name: value
        for name, value in SPELT_OUT["zero_optimization"].items()  # type: ignore[attr-defined]
        if name not in ("load_from_fp32_weights", "sub_group_size")
    }
    assert Config.from_deepspeed(quiet).to_dict() == SPELT_OUT_HERE


def test_files_as_people_have_them() -> None:
    with pytest.warns(UserWarning, match="steps_per_print, checkpoint, zero_allow_untested_opt"):
        assert Config.from_deepspeed(SPELT_OUT).to_dict() == SPELT_OUT_HERE
    with pytest.warns(UserWarning, match="zero_optimization.stage3_prefetch_bucket_size"):
        found = Config.from_deepspeed(OF_TRAINER).to_dict()
    assert found["training"] == {
        "micro_batch_size": 16,
        "accumulation_steps": 1,
        "clip_grad_norm": 0.5,
    }
    assert found["optimizer"]["stage"] == 2


@pytest.mark.parametrize(
    ("given", "name", "params"),
    [
        # Their "Adam" decays as AdamW does, by 0 unless told, where torch's AdamW decays by 0.01.
        ({"type": "Adam"}, "AdamW", {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam", {"weight_decay": 0.0}),
        ({"type": "adamw", "params": {"adam_w_mode": False}}, "AdamW", {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"torch_adam": True}}, "AdamW", {}),
        ({"type": "AdamW", "params": {"weight_decay": 0.1}}, "AdamW", {"weight_decay": 0.1}),
        ({"type": "sgd", "params": {"lr": 1}}, "SGD", {"lr": 1}),
        ({"type": "Adagrad"}, "Adagrad", {}),
    ],
)
def test_optimizers_are_theirs(given: Any, name: str, params: Any) -> None:
    optimizer = read({"optimizer": given})["optimizer"]
    assert (optimizer["name"], optimizer["params"]) == (name, params)


def test_16_bits_without_sharding_keep_their_float32_weights_in_a_sharded_optimizer() -> None:
    assert read({"bf16": {"enabled": True}})["optimizer"]["stage"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"scheduler": {"type": "WarmupLR"}, "curriculum_learning": {"enabled": True}},
            "pydist does not know scheduler, curriculum_learning, which would change the training",
        ),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization: offload_optimizer.device is 'nvme'; pydist keeps",
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device is 'cpu', which takes zero_optimization.stage 1 or 2",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.3},
                }
            },
            "pydist does not know zero_optimization.offload_optimizer.ratio, which would change",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor, which would change"),
        # Of these DeepSpeed's default is true.
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation, which would"),
        ({"zero_optimization": {"ignore_unused_parameters": False}}, "ignore_unused_parameters"),
        ({"prescale_gradients": True}, "prescale_gradients, which would change"),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 4}}, "mics_shard_size"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype is 'bf16'"),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "grad_accum_dtype is 'fp32', and gradients are added up in the type of the model",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel, which would change"),
        ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto', which the Trainer of"),
        ({"train_batch_size": "auto"}, "train_batch_size is 'auto'"),
        (
            {"train_batch_size": "8"},
            "train_batch_size is '8'; it must be a whole number, 1 or more",
        ),
        ({"gradient_clipping": -1}, "gradient_clipping is -1; it must be a number, 0 or more"),
        ({"dataloader_drop_last": 3}, "dataloader_drop_last is 3; it must be true or false"),
        ({"optimizer": {"type": "OneBitAdam"}}, "torch.optim has no such class"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "lr is 'auto'"),
        (
            {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4},
            "adds up gradients in float32",
        ),
        ({"bf16": {"enabled": "false"}}, "enabled is 'false'; it must be true or false"),
        ({"bf16": True}, "bf16 is True; it must be a table"),
        ({"gradient_cliping": 1.0}, "gradient_cliping (did you mean gradient_clipping?), which"),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_sise": 1}},
            "zero_optimization.reduce_bucket_sise (did you mean zero_optimization.reduce_bucket_s",
        ),
        # Theirs skips a step whose gradients are not finite; false is what is done here.
        (
            {"bf16": {"enabled": True, "check_grad_overflow": True}},
            "pydist does not know bf16.check_grad_overflow, which would change the training",
        ),
    ],
)
def test_what_would_change_the_training_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        read(given)


def test_an_optimizer_on_the_host() -> None:
    offload = {"device": "cpu", "pin_memory": True, "ratio": 1.0, "buffer_count": 4}
    given = {
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "gradient_clipping": 1.0,
    }
    with pytest.warns(UserWarning, match=r"offload_optimizer\.pin_memory, .*\.buffer_count"):
        config = read(given)
    assert config["optimizer"] == {"stage": 2, "offload": "cpu"}


def test_what_only_makes_it_faster_or_talkative_is_named_in_a_warning() -> None:
    given = {
        "steps_per_print": 10,
        "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True, "immediate_grad_update": True},
    }
    with pytest.warns(UserWarning, match=r"steps_per_print, zero_optimization.overlap_comm"):
        config = read(given)
    assert config["optimizer"] == {"stage": 1}


def test_a_misspelt_name_that_is_switched_off_is_named_in_a_warning() -> None:
    given = {"gradient_acumulation_steps": None, "zero_optimization": {"overlap_com": False}}
    told = r"gradient_acumulation_steps \(did you mean gradient_accumulation_steps\?\), .*overlap_"
    with pytest.warns(UserWarning, match=told):
        read(given)


def test_newer_versions_clip_where_nothing_is_said() -> None:
    with pytest.warns(UserWarning, match="gradient_clipping is not given, so nothing is clipped"):
        assert Config.from_deepspeed({"train_batch_size": 8})["training"] == {"batch_size": 8}
    with pytest.warns(UserWarning, match="gradient_clipping is not given"):
        Config.from_deepspeed({"gradient_clipping": None})


def test_a_file_of_deepspeeds_that_is_given_as_pydists(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"optimizer": {"type": "Adam"}, "train_batch_size": 8, "gradient_clipping": 0.0}'
    )
    with pytest.raises(InvalidUsage, match=r"ds\.json: .*Config\.from_deepspeed reads it"):
        Config.from_file(file)
    assert Config.from_deepspeed(file)["training"] == {"batch_size": 8}
