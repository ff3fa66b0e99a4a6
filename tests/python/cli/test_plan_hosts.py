"""`pydist plan --hosts`: step times and efficiency, and what is said to be assumed."""

import itertools
from pathlib import Path

import pytest
import torch
from planned import planned
from torch import nn
from training import TIME_LIMIT

from pydist.cli import main
from pydist.planning.costs import LINK_BETA, FittedCosts, default_costs, ethernet_beta
from pydist.planning.exchange_time import Shape, seconds
from pydist.planning.scaling_estimate import scaling
from pydist.planning.scaling_plan import numbers_of_hosts
from pydist.planning.step_measurement import measure_step
from pydist.planning.step_time import Compute

pytestmark = TIME_LIMIT

# 8 layers of 1 MiB each.
SOURCE = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

sample = torch.ones(2, 512)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "eight_layers.py"
    path.write_text(SOURCE)
    return str(path)


def test_table(capsys: pytest.CaptureFixture[str], source: str) -> None:
    assert main(["plan", source, "--hosts", "64", "--link", "25", "--step-ms", "120"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "optimizer state",
        "on 64 ranks",
        "a step by number of hosts, predicted",
        "efficiency",
        "exposed",
        "a link of 25 Gbit/s carries 23.54 Gbit/s of data each way",
        "not measured: a message takes 30 µs from host to host",
        "one rank on each host",
        "a step computes 120 ms on every rank, as given; two thirds of it are backward",
        "in the reverse order of registration",
        "none is late",
    ):
        assert text in printed


def test_json(capsys: pytest.CaptureFixture[str], source: str) -> None:
    flags = ("--hosts", "100", "--ranks-per-host", "4", "--link", "10", "--step-ms", "10,20,3")
    found = planned(capsys, source, *flags)
    assert found["ranks"] == 400
    assert found["scaling"]["compute_s"] == pytest.approx(
        {"forward": 0.01, "backward": 0.02, "optimizer": 0.003}
    )
    rows = found["scaling"]["rows"]
    assert [row["hosts"] for row in rows] == [1, 8, 16, 32, 64, 100]
    assert [row["ranks"] for row in rows] == [4, 32, 64, 128, 256, 400]
    for kind in ("ddp", "sharded"):
        for row in rows:
            step = row[kind]
            assert 0 < step["efficiency"] < 1
            share = 1 if kind == "ddp" else 1 / row["ranks"]
            assert step["step_s"] == pytest.approx(0.03 + 0.003 * share + step["exposed_s"])
        steps = [row[kind]["exposed_s"] for row in rows]
        # With more hosts the first and the last message of an exchange hide more: Note [Stages].
        assert all(few <= 1.01 * many for few, many in itertools.pairwise(steps))
        # Of 8 MiB to 8 hosts: 7/8 to and fro.
        assert rows[1][kind]["link_bytes"] == pytest.approx(2 * (8 << 20) * 7 / 8, rel=0.01)
    assert rows[0]["ddp"]["link_bytes"] == 0


def test_nothing_is_invented_where_the_compute_time_is_unknown(
    capsys: pytest.CaptureFixture[str], source: str
) -> None:
    flags = ("--hosts", "8", "--link", "1")
    found = planned(capsys, source, *flags)["scaling"]
    assert found["compute_s"] is None
    for row in found["rows"]:
        assert [row["ddp"][name] for name in ("step_s", "efficiency", "exposed_s")] == [None] * 3
    # The link is what takes the time.
    least_s = 2 * (8 << 20) * 7 / 8 * ethernet_beta(1.0)
    assert least_s < found["rows"][1]["ddp"]["communication_s"] < 1.2 * least_s
    assert any("give --step-ms or --measure-step" in text for text in found["assumptions"])
    assert main(["plan", source, *flags]) == 0
    printed = capsys.readouterr().out
    assert "communication" in printed
    assert "efficiency" not in printed.partition("assumed:")[0]


def test_ranks_and_hosts_give_ranks_of_a_host(
    capsys: pytest.CaptureFixture[str], source: str
) -> None:
    flags = (source, "--hosts", "8", "--link", "1")
    assert planned(capsys, *flags, "--ranks", "16") == planned(
        capsys, *flags, "--ranks-per-host", "2"
    )
    alone = planned(capsys, source, "--hosts", "1", "--step-ms", "5")["scaling"]
    assert [row["ddp"]["step_s"] for row in alone["rows"]] == [pytest.approx(0.005)]


def test_fitted_costs(capsys: pytest.CaptureFixture[str], source: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    costs = default_costs(1.0).with_value("link.alpha_s", 123e-6)
    fit = FittedCosts(costs, ("link.alpha_s", LINK_BETA), 8, 0.09, "four namespaces")
    path.write_text(fit.as_json())
    flags = (source, "--hosts", "8", "--step-ms", "1", "--fitted", str(path))
    slow = planned(capsys, *flags)["scaling"]
    fast = planned(capsys, *flags, "--link", "25")["scaling"]
    both = [each["rows"][1]["ddp"]["communication_s"] for each in (slow, fast)]
    assert both[0] > 5 * both[1]
    text = " ".join(slow["assumptions"])
    assert "fitted to four namespaces, off by up to 9%" in text
    assert "more than 8 ranks are extrapolated: a message takes 123 µs" in text
    assert "a link carries 0.941 Gbit/s" in text
    assert "not fitted, but assumed: a rank combines 10 GB/s" in text
    assert "in place of the link that was measured" in " ".join(fast["assumptions"])


def test_a_measured_step(capsys: pytest.CaptureFixture[str], source: str) -> None:
    for sample in (("--sample", "sample"), ("--input", "2x512")):
        flags = ("--hosts", "8", "--link", "1", "--measure-step", *sample)
        found = planned(capsys, source, *flags)["scaling"]
        assert all(value > 0 for value in found["compute_s"].values())
        assert any("median of" in text for text in found["assumptions"])
        assert not any("reverse order" in text for text in found["assumptions"])


def test_the_moments_of_gradients_are_seen() -> None:
    """In the opposite order of forward, the last one at the end of backward at the latest."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    found = measure_step(model, torch.ones(64, 256), torch.optim.SGD, {"lr": 1e-3})
    shares = [found.ready_shares[f"{layer}.weight"] for layer in range(6)]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] <= 1


def test_buckets_leave_when_gradients_were_seen() -> None:
    """Gradients that all come early are hidden by the rest of backward."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    costs = default_costs(10.0)
    exposed = [
        scaling(model, 8, 1, costs, compute=Compute(0.1, 0.2), bucket_cap_mb=1, ready_shares=shares)
        .rows[-1]
        .ddp.exposed_s
        for shares in ({"0.weight": 0.5, "1.weight": 0.1}, {"0.weight": 1.0, "1.weight": 0.1}, {})
    ]
    one_s = seconds("all_reduce", costs, Shape(8, 1), 4 << 20)
    note_s = seconds("all_reduce", costs, Shape(8, 1), 256)
    assert exposed == pytest.approx([note_s, one_s + note_s, 2 * one_s + note_s])


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (8, [1, 8]),
        (24, [1, 8, 16, 24]),
        (1024, [1, 8, 16, 32, 64, 128, 256, 512, 1024]),
    ],
)
def test_numbers_of_hosts(most: int, expected: list[int]) -> None:
    assert numbers_of_hosts(most) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2", "--link", "25"], "--link is for a plan of several hosts"),
        (["--ranks", "2", "--measure-step"], "--measure-step is for a plan of several hosts"),
        (["--hosts", "4"], "--hosts needs the rate of a host's link: --link 25"),
        (["--hosts", "0", "--link", "1"], "--hosts 0: there is one at least"),
        (["--hosts", "2000", "--link", "1"], "2000 hosts: the model predicts 1 to 1024"),
        (["--hosts", "4", "--link", "0"], "a link of 0.0 Gbit/s"),
        (["--hosts", "4", "--link", "1", "--ranks", "6"], "can't be spread evenly over 4 hosts"),
        (
            ["--hosts", "4", "--link", "1", "--ranks", "6", "--ranks-per-host", "2"],
            "--ranks 6 is not 4 hosts with 2 ranks each",
        ),
        (
            ["--hosts", "4", "--link", "1", "--step-ms", "fast"],
            "--step-ms fast: write milliseconds",
        ),
        (["--hosts", "4", "--link", "1", "--step-ms", "1,2"], "FORWARD,BACKWARD,OPTIMIZER"),
        (["--hosts", "4", "--link", "1", "--step-ms", "-1"], "--step-ms -1: write milliseconds"),
        (["--hosts", "4", "--link", "1", "--measure-step"], "--measure-step needs an input"),
        (
            [
                "--hosts",
                "4",
                "--link",
                "1",
                "--measure-step",
                "--sample",
                "sample",
                "--step-ms",
                "1",
            ],
            "not allowed with",
        ),
        (["--hosts", "4", "--fitted", "nowhere.json"], "nowhere.json can't be read"),
    ],
)
def test_what_makes_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    assert main(["plan", source, *arguments]) == 2
    assert message in capsys.readouterr().err
