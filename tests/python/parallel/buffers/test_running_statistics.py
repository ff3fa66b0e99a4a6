"""Forwards that compute with running statistics of BatchNorm that are another on each rank."""

import math
import warnings

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import LIMIT_S, TIME_LIMIT, batch, joined

import pydist

pytestmark = TIME_LIMIT


# When a forward in eval mode comes, whose outputs the loss is computed with.
MOVED_STATISTICS = ("between", "between, without gradients")
COMMON_STATISTICS = (
    "before",
    "after",
    "between, of layers that are frozen",
    "between, synchronized",
)


def run_in_eval_mode(kind: str) -> tuple[list[float], list[float], int]:
    """The losses here and in torch, with batch norm; and warnings."""
    rank, _ = joined()
    losses: list[list[float]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for wrap in (pydist.DataParallel, DistributedDataParallel):
            torch.manual_seed(0)
            norm = pydist.SyncBatchNorm if "synchronized" in kind else nn.BatchNorm1d
            module = nn.Sequential(nn.Linear(4, 4), norm(4)).to(torch.float64)
            net = wrap(module)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            losses.append([])

            def evaluated(step: int, net: nn.Module = net) -> Tensor:
                net.eval()
                with torch.set_grad_enabled("without" not in kind):
                    target = net(batch(rank, 5, 4, step=step + 10))
                net.train()
                return target

            for step in range(3):
                optimizer.zero_grad()
                target = torch.zeros(5, 4, dtype=torch.float64)
                if kind == "before":
                    target = evaluated(step).detach()
                if "frozen" in kind:
                    module[1].eval()
                outputs = net(batch(rank, 5, 4, step=step))
                if "between" in kind:
                    target = evaluated(step)
                loss = (outputs - target).square().mean()
                try:
                    loss.backward()
                except RuntimeError as error:
                    # torch 2.11 copies buffers in place that the first forward has saved.
                    if wrap is pydist.DataParallel or "by an inplace operation" not in str(error):
                        raise
                    losses[-1] = [math.nan]
                    break
                optimizer.step()
                losses[-1].append(loss.item())
                if kind == "after":
                    losses[-1].append(evaluated(step).mean().item())
    told = [str(warning.message) for warning in caught if "running statistics (1)" in str(warning)]
    return losses[0], losses[1], len(told)


@pytest.mark.parametrize("kind", [*MOVED_STATISTICS, *COMMON_STATISTICS])
def test_where_running_statistics_differ_from_torchs_a_warning_says_so(
    three: Ranks, kind: str
) -> None:
    found = three.run(run_in_eval_mode, kind, timeout=LIMIT_S)
    assert {warned for _, _, warned in found} == {int(kind in MOVED_STATISTICS)}
    if not any(math.isnan(theirs[0]) for _, theirs, _ in found):
        differ = any(ours != pytest.approx(theirs, rel=1e-9) for ours, theirs, _ in found)
        assert differ == (kind in MOVED_STATISTICS)
