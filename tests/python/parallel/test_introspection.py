"""What DataParallel tells of itself: `stats()`, traces, and the check of every gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import nn
from training import LIMIT_S, TIME_LIMIT, Tied, batch, joined

import pydist

pytestmark = TIME_LIMIT


def train(steps: int) -> dict[str, Any]:
    rank, _ = joined()
    model = pydist.DataParallel(Tied(torch.float64), bucket_cap_mb=1e-4)
    for step in range(steps):
        model.zero_grad()
        model(batch(rank, 6, 8, step=step)).mean().backward()
    stats = model.stats()
    return {
        "rounds": stats.rounds,
        "bytes": stats.bytes,
        "total_s": stats.compute_s + stats.exposed_s,
        "communication_s": stats.communication_s,
        "buckets": [(b.label, b.bytes, b.ready_s, b.launched_s, b.done_s) for b in stats.buckets],
    }


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_stats(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        for stats in ranks.run(train, 5, timeout=LIMIT_S):
            assert stats["rounds"] == 5
            assert stats["bytes"] == 5 * sum(b[1] for b in stats["buckets"])
            assert 0 < stats["communication_s"] < stats["total_s"]
            launched = [b[3] for b in stats["buckets"]]
            assert launched == sorted(launched)
            for number, (label, _, ready_s, launched_s, done_s) in enumerate(stats["buckets"]):
                assert label.startswith(f"bucket {number}, first parameter ")
                assert 0 < ready_s <= launched_s < done_s


def test_timeline(tmp_path: Path) -> None:
    with Ranks(2, {"PYDIST_TIMELINE": str(tmp_path / "trace.json")}) as ranks:
        stats = ranks.run(train, 3, timeout=LIMIT_S)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())
        assert {event["pid"] for event in events} == {rank}
        spans = [event for event in events if event["ph"] == "X"]
        assert [event["name"] for event in spans] == [
            "forward",
            "backward",
            "wait for averages",
        ] * 3
        ends = [event["ts"] + event["dur"] for event in spans]
        assert ends == sorted(ends)
        # Every bucket of every round begins and ends, between the beginning of its backward and
        # the end of the wait.
        begins = {e["id"]: e for e in events if e["ph"] == "b" and e["cat"] == "on its way"}
        finishes = {e["id"]: e for e in events if e["ph"] == "e" and e["cat"] == "on its way"}
        assert begins.keys() == finishes.keys()
        assert len(begins) == 3 * len(stats[rank]["buckets"])
        backward = [s for s in spans if s["name"] == "backward"]
        for name, begin in begins.items():
            number = int(name.split()[-2]) - 1
            assert backward[number]["ts"] <= begin["ts"] <= finishes[name]["ts"]
            assert begin["args"]["bytes"] > 0


def train_two() -> None:
    joined()
    models = [pydist.DataParallel(nn.Linear(2, 1)) for _ in range(2)]
    for _ in range(2):
        sum(model(torch.ones(1, 2)).sum() for model in models).backward()


def test_several_models_share_a_trace(tmp_path: Path) -> None:
    folder = tmp_path / "made"  # by the first that writes there
    with Ranks(2, {"PYDIST_TIMELINE": str(folder / "trace.json")}) as ranks:
        ranks.run(train_two, timeout=LIMIT_S)
    events = json.loads((folder / "trace.rank1.json").read_text())
    backward = [event for event in events if event.get("name") == "backward"]
    assert len(backward) == 4
    assert len({event["tid"] for event in backward}) == 2
    begins = [event["id"] for event in events if event["ph"] == "b"]
    assert len(begins) == len(set(begins))


def open_badly() -> None:
    joined()
    with pytest.raises(pydist.InvalidUsage, match=r"PYDIST_TIMELINE.*can't be written"):
        pydist.DataParallel(nn.Linear(2, 1))


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Ranks(2, {"PYDIST_TIMELINE": str(tmp_path / "file" / "trace.json")}) as ranks:
        ranks.run(open_badly, timeout=LIMIT_S)


def train_checked(steps: int) -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Tied(torch.float32), bucket_cap_mb=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        for micro in range(1 + step % 2):
            with model.no_sync(enabled=micro < step % 2):
                model(batch(rank, 6, 8, step=step, dtype=torch.float32)).mean().backward()
        optimizer.step()
    for parameter in model.parameters():
        values = parameter.detach().clone()
        pydist.broadcast(values, root=0)
        assert torch.equal(values, parameter)


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_gradients_are_the_same_bits_in_200_steps(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend, "PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(train_checked, 200, timeout=LIMIT_S)


def differ() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))

    def spoil(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() + rank)
        return future

    model.register_comm_hook(None, spoil)
    # Every rank finds it by itself, however fast the others are, and is in step afterwards.
    for _ in range(30):
        text = "gradient of weight differs between ranks 0 and 1"
        with pytest.raises(pydist.Mismatch, match=text):
            model(torch.ones(1, 2)).sum().backward()


def test_a_difference_is_named() -> None:
    with Ranks(2, {"PYDIST_DEBUG": "1"}) as ranks:
        ranks.run(differ, timeout=LIMIT_S)
