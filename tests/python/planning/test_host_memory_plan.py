"""`pydist.plan(offload="cpu")`: what stays on a GPU, and what is on the host."""

from typing import Any

import pytest
import torch
from torch import nn
from training import TIME_LIMIT

import pydist

pytestmark = TIME_LIMIT


def wide_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(130, 211), nn.Linear(211, 77))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_host_is_none_on_the_gpu(dtype: torch.dtype, delayed: bool) -> None:
    """Ren et al., arXiv 2101.06840: bytes for each parameter, with Adam on 4 ranks."""
    plan = pydist.plan(
        wide_model(), 4, dtype=dtype, bucket_cap_mb=8, offload="cpu", delayed=delayed
    )
    half, kept = (4, 8) if dtype is torch.float32 else (2, 12)
    assert plan.stage1.total / plan.trained == pytest.approx(2 * half, rel=0.005)
    kept_on_gpu = plan.stage2.total - plan.stage2.buckets
    assert kept_on_gpu / plan.trained == pytest.approx(half + half / 4, rel=0.005)
    assert plan.ddp.state + plan.ddp.master == pytest.approx(kept * plan.trained, rel=0.005)
    host = plan.host
    assert host is not None
    assert host.pinned / plan.trained == pytest.approx((3 if delayed else 2) * half / 4, rel=0.005)
    assert host.state / plan.trained == pytest.approx(kept / 4, rel=0.005)
    for flow in (host.to_host, host.to_device):
        assert flow / plan.trained == pytest.approx(half / 4, rel=0.005)
    # The gradient, values and state there and back.
    stepped = half + 2 * half + 2 * kept
    assert host.stepped / plan.trained == pytest.approx(stepped / 4, rel=0.005)
    told = repr(plan)
    for label in ("on the host: pinned", "gradients to the host", "parameters to the GPU"):
        assert label in told
    assert plan.to_dict()["host"]["pinned"] == host.pinned
    assert "host" not in pydist.plan(wide_model(), 4).to_dict()


def test_a_plan_refuses_what_the_host_can_not_step() -> None:
    options: list[tuple[dict[str, Any], str]] = [
        ({"offload": "cpu", "optimizer": torch.optim.Adagrad}, "kernels for the host, which know"),
        ({"offload": "cpu", "share_parameters": True}, "leave one of them out"),
        ({"delayed": True}, "takes offload='cpu'"),
        (
            {"offload": "cpu", "dtype": torch.bfloat16, "master_weights": False},
            "parameter 0.weight is torch.bfloat16, and the host steps float32 copies",
        ),
    ]
    for given_options, message in options:
        with pytest.raises(pydist.InvalidUsage, match=message):
            pydist.plan(small_model(), 2, **given_options)
