"""DeepSpeed's configurations in pydist's words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pydist import Config, InvalidUsage

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
    optimizer = Config.from_deepspeed({"optimizer": given})["optimizer"]
    assert (optimizer["name"], optimizer["params"]) == (name, params)


def test_16_bits_without_sharding_keep_their_float32_weights_in_a_sharded_optimizer() -> None:
    assert Config.from_deepspeed({"bf16": {"enabled": True}})["optimizer"]["stage"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"scheduler": {"type": "WarmupLR"}, "curriculum_learning": {"enabled": True}},
            "pydist does not know scheduler, curriculum_learning, which would change the training",
        ),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true"),
        ({"train_batch_size": "auto"}, "train_batch_size is 'auto'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "torch.optim has no such class"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "lr is 'auto'"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update"),
        (
            {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4},
            "adds up gradients in float32",
        ),
        ({"bf16": {"enabled": "false"}}, "enabled is 'false'; it must be true or false"),
        ({"bf16": True}, "bf16 is True; it must be a table"),
    ],
)
def test_what_would_change_the_training_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        Config.from_deepspeed(given)


def test_what_only_makes_it_faster_or_talkative_is_named_in_a_warning() -> None:
    given = {"steps_per_print": 10, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    with pytest.warns(UserWarning, match=r"steps_per_print, zero_optimization.overlap_comm"):
        config = Config.from_deepspeed(given)
    assert config["optimizer"] == {"stage": 1}
