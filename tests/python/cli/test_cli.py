"""The command line: `pydist run`, `pydist info`."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from launch import run_command, set_environment
from torch.distributed import run as torchrun

import pydist
from pydist.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "missing.py"], "no such script: missing.py"),
        (["run", "-n", "2", "train"], "no such script: train; did you mean train.py?"),
        (["run", "-m", "no_such_module"], "no such module: no_such_module"),
        (["run", "--no-python", "no-such-program"], "no such program: no-such-program"),
        (["run", "-n", "two", "train.py"], "-n two: Unsupported nproc_per_node value: two"),
        (["run", "-n", "0", "train.py"], "at least one process is needed"),
        (["run"], "training_script"),
        (["run", "--no-such-flag", "1"], "no such script: 1"),
        (["fly"], "no command 'fly'; use one of: run, bench, plan, view, doctor, info"),
        (["info", "--xml"], "unrecognized arguments: --xml"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if arguments[1:2] == ["--no-such-flag"]:
        said = "unrecognized arguments: --no-such-flag"
        arguments = ["run", "--no-such-flag", str(script)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "run" in text
    assert "info" in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pydist {pydist.__version__}\n"
    assert main([]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    assert "-n N" in capsys.readouterr().out


def test_info_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_environment(monkeypatch, {"PYDIST_BACKEND": "gloo", "PYDIST_TIMEOT": "3", "RANK": "0"})
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["pydist"] == pydist.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["processor"]["cores this process may use"] == len(os.sched_getaffinity(0))
    assert report["memory"]["room for shared memory"] > 0
    assert report["backends"]["native"] == {"usable": True, "why_not": None}
    assert report["backends"]["gloo"] == {"usable": True, "why_not": None}
    assert report["backends"]["nccl"]["usable"] == torch.cuda.is_available()
    assert torch.cuda.is_available() or "no GPU" in report["backends"]["nccl"]["why_not"]
    variables = {variable["name"]: variable for variable in report["variables"]}
    assert variables["PYDIST_BACKEND"]["value"] == "gloo"
    assert variables["PYDIST_TIMEOUT"]["value"] is None
    assert all(variable["meaning"] for variable in variables.values())
    assert report["unknown_variables"] == [{"name": "PYDIST_TIMEOT", "nearest": "PYDIST_TIMEOUT"}]
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing" in report["launcher"]


def test_info_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environment(monkeypatch, {"PYDIST_BAKEND": "gloo", "PYDIST_TIMEOUT": "soon"})
    assert main(["info"]) == 0
    told = capsys.readouterr().out
    for text in ("native", "PYDIST_CHUNK_BYTES", "room for shared memory", "no launcher"):
        assert text in told
    folded = " ".join(told.split())
    assert "PYDIST_BAKEND is set, but there is no such variable; did you mean PYDIST_BACKEND?" in (
        folded
    )
    assert "PYDIST_TIMEOUT='soon' is not valid" in folded


def test_importing_the_command_line_loads_no_subcommand() -> None:
    script = (
        "import sys, pydist; before = set(sys.modules); import pydist.cli;"
        "print(sorted(set(sys.modules) - before))"
    )
    done = run_command([sys.executable, "-c", script])
    assert (done.returncode, done.stdout) == (0, "['pydist.cli']\n"), done.stderr


@pytest.mark.parametrize("default", [None, 29500], ids=["new torchrun", "old torchrun"])
def test_run_asks_for_no_port_unless_told(
    default: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs on one host would ask for the same one."""
    script = tmp_path / "train.py"
    script.touch()
    parser_of_torch = torchrun.get_args_parser

    def parser() -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = parser_of_torch()
        made.set_defaults(master_port=default)
        return made

    started = []
    monkeypatch.setattr(torchrun, "get_args_parser", parser)
    monkeypatch.setattr(torchrun, "run", lambda o: started.append((o.standalone, o.master_port)))
    monkeypatch.setattr("pydist.cli.run.record", lambda function: function)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for flags in ([], ["--master-port", "29500"], ["--nnodes", "2", "--master-addr", "a"]):
        assert main(["run", "-n", "2", *flags, str(script)]) == 0
    assert started == [(True, None), (False, 29500), (False, default)]
