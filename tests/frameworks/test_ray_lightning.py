"""Lightning's Trainer in the workers of Ray Train."""

import importlib.util
from pathlib import Path

import pytest
import torch
from ray_driver import results_of

pytestmark = [
    pytest.mark.skipif(
        None in map(importlib.util.find_spec, ("ray", "lightning")),
        reason="ray or lightning is not installed: make test-frameworks installs both",
    ),
    # Ray starts some ten processes for each driver, and three more for each training.
    pytest.mark.timeout(400),
]


def test_the_same_losses_and_weights_as_by_rays_strategy(tmp_path: Path) -> None:
    of = results_of("lightning", tmp_path, limit_s=300)
    for ours, theirs in zip(of["pydist"], of["ray"], strict=True):
        assert ours["wrapper"].startswith("pydist.")
        assert theirs["wrapper"].startswith("torch.")
        assert len(ours["losses"]) == 8
        assert ours["seen"] == theirs["seen"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["logged"] == pytest.approx(theirs["logged"], rel=1e-6)
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=1e-5, atol=1e-6)
