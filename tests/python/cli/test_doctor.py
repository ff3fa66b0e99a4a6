"""`pydist doctor`, before a run: what would go wrong."""

import json
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from launch import free_port, run_command, set_environment

from pydist.cli import machine_checks, main
from pydist.cli.machine_checks import between_ranks, facts, on_this_machine
from pydist.testing import faults

DOCTOR = [sys.executable, "-m", "pydist", "doctor"]


def verdicts(found: list[machine_checks.Finding]) -> dict[str, str]:
    return {each.subject: each.verdict for each in found}


Examine = Callable[[Mapping[str, str]], tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examine:
    """What doctor says, in this process, where variables are set; and its status."""

    def examine(env: Mapping[str, str]) -> tuple[int, dict[str, dict[str, str]]]:
        with monkeypatch.context() as patch:
            set_environment(patch, env)
            status = main(["doctor", "--json"])
        return status, {each["subject"]: each for each in json.loads(capsys.readouterr().out)}

    return examine


def test_a_healthy_machine() -> None:
    done = run_command(DOCTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    for subject in ("shared memory", "descriptors", "ports", "interfaces", "cores", "huge pages"):
        assert subject in done.stdout


def test_variables_that_are_wrong(examined: Examine) -> None:
    status, found = examined({"PYDIST_TIMEOUT": "soon"})
    assert status == 1
    assert found["variables"]["verdict"] == "problem"
    assert "PYDIST_TIMEOUT" in found["variables"]["text"]
    status, found = examined({"PYDIST_TIMEOUTS": "3"})
    assert status == 0
    assert "did you mean PYDIST_TIMEOUT?" in found["variables"]["text"]


def test_half_a_launcher(examined: Examine) -> None:
    status, found = examined({"RANK": "0", "WORLD_SIZE": "2"})
    assert status == 1
    assert "MASTER_ADDR" in found["launcher"]["text"]


def test_an_unknown_flag_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lazy"]) == 2
    assert "--lazy" in capsys.readouterr().err


def test_few_descriptors() -> None:
    with faults.exhausted("descriptors", spare=100):
        assert verdicts([machine_checks._descriptors()]) == {"descriptors": "problem"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    try:
        assert verdicts([machine_checks._descriptors()]) == {"descriptors": "warning"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert verdicts(on_this_machine())["meeting place"] == "fine"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        found = [each for each in on_this_machine() if each.subject == "meeting place"]
    assert [each.verdict for each in found] == ["problem"]
    assert f"127.0.0.1:{port}" in found[0].text


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = [each for each in machine_checks._interfaces() if each.verdict == "problem"]
    assert len(found) == 1
    assert "GLOO_SOCKET_IFNAME names nowhere0" in found[0].text


def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"RANK": "0", "WORLD_SIZE": "4096", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4096"}
    for name, value in {**many, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert verdicts(on_this_machine())["cores"] == "warning"


class TestBetweenRanks:
    """What every rank told, compared."""

    def told(self, **changes: Any) -> list[dict[str, Any]]:
        first = {**facts(), "host": "a", "cores": [0, 1]}
        return [first, {**first, **changes}]

    def test_alike(self) -> None:
        assert set(verdicts(between_ranks(self.told())).values()) == {"fine"}

    def test_versions(self) -> None:
        newer = {**facts()["versions"], "torch": "99.1"}
        found = [e for e in between_ranks(self.told(versions=newer)) if e.verdict == "problem"]
        assert [each.subject for each in found] == ["versions"]
        assert f"torch differs: {torch.__version__} on rank 0; 99.1 on rank 1" in found[0].text

    def test_clocks(self) -> None:
        found = between_ranks(self.told(clock=facts()["clock"] + 60, host="b"))
        late = next(each for each in found if each.subject == "clocks")
        assert late.verdict == "warning"
        assert "rank 1 (b)" in late.text

    def test_ranks_that_share_a_core(self) -> None:
        first = {**facts(), "host": "a", "cores": [0]}
        assert verdicts(between_ranks([first, first]))["cores of all ranks"] == "warning"
        assert verdicts(between_ranks([first, {**first, "host": "b"}]))["cores of all ranks"] == (
            "fine"
        )
