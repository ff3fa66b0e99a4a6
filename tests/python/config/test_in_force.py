"""Whose word counts: the program's, a variable's, a file's, a default's."""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks, run_command, run_ranks, set_environment
from torch.utils.data import DataLoader

import pydist
from pydist.cli import main
from pydist.config import in_force

FILE = {
    "engine": {"timeout": 77, "chunk_bytes": 65536},
    "model": {"compress": "bf16", "bucket_cap_mb": 1, "reduction": "sum"},
    "optimizer": {"stage": 2},
    "loader": {"pad": "drop", "seed": 5},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(FILE))
    return str(path)


@pytest.fixture(scope="module")
def fresh(file: str) -> Iterator[Ranks]:
    """One rank, which imports pydist where the file and a variable are given already."""
    env = {"PYDIST_CONFIG": file, "PYDIST_CHUNK_BYTES": "131072"}
    with Ranks(1, env, method="spawn") as ranks:
        yield ranks


def sources() -> dict[str, tuple[Any, str]]:
    return {f"{s.section}.{s.name}": (s.value, s.source) for s in in_force.settings()}


def use_all() -> tuple[dict[str, tuple[Any, str]], float, dict[str, Any], dict[str, Any]]:
    """Makes a wrapper, an optimizer and a loader of which the program says a little."""
    pydist.init()
    timeout = pydist.job.current.job.membership.communicator.timeout
    model = pydist.DataParallel(torch.nn.Linear(3, 1), compress=None)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    loader = pydist.prepare(DataLoader(range(5), batch_size=1, shuffle=True))
    made = {
        "reduction": model._settings.reduction,
        "compress": model._settings.compress,
        "caps": model._settings.caps_bytes,
        "batches": len(loader),
    }
    with pytest.raises(pydist.InvalidUsage, match="stage=2"):
        # The file's, which a model in no wrapper of ours can't have.
        pydist.ShardedOptimizer(torch.nn.Linear(1, 1).parameters(), torch.optim.SGD)
    del optimizer
    seen = sources(), timeout, made, in_force.to_save()
    pydist.shutdown()
    return seen


def test_the_program_goes_before_variables_and_these_before_the_file(
    fresh: Ranks, file: str
) -> None:
    found, timeout, made, saved = fresh.run(use_all)[0]
    assert timeout == 77
    assert made == {"reduction": "sum", "compress": None, "caps": (1 << 20,), "batches": 5}
    assert found["engine.timeout"] == ("77", file)
    assert found["engine.chunk_bytes"] == ("131072", "PYDIST_CHUNK_BYTES")
    assert found["engine.debug"] == ("0", "default")
    assert found["model.compress"] == (None, "argument")
    assert found["model.reduction"] == ("sum", file)
    assert found["model.init_sync"] == (True, "default")
    assert found["loader.pad"] == ("drop", file)
    assert saved["model"] == {"compress": None, "bucket_cap_mb": 1, "reduction": "sum"}
    assert saved["engine"]["timeout"] == "77"
    assert "config" not in saved["engine"]


def given_to_init(file: str) -> list[Any]:
    config = pydist.Config.from_file(file).updated(engine={"chunk_bytes": 262144})
    pydist.init(config=config)
    seen = [
        sources()["engine.chunk_bytes"],
        sources()["engine.timeout"],
        pydist.DataParallel(torch.nn.Linear(3, 1))._settings.reduction,
    ]
    pydist.init(config={"model": config["model"]})
    with pytest.raises(pydist.InvalidUsage, match=r"engine\.chunk_bytes=4096 comes too late"):
        pydist.init(config={"engine": {"chunk_bytes": 4096}})
    pydist.init(config={"engine": {"debug": False}, "model": {"reduction": "mean"}})
    seen.append(pydist.DataParallel(torch.nn.Linear(3, 1))._settings.reduction)
    pydist.shutdown()
    seen.append(sources()["engine.chunk_bytes"])
    seen.append(sources()["model.compress"])
    return seen


def test_what_init_is_given_lasts_until_shutdown(file: str) -> None:
    env = {"PYDIST_CHUNK_BYTES": "131072", "PYDIST_TIMEOUT": "99"}
    for seen in run_ranks(given_to_init, 2, file, env=env):
        assert seen == [
            # What the program says goes before the variable, what its file says does not.
            ("262144", "argument"),
            ("99", "PYDIST_TIMEOUT"),
            "sum",
            "mean",
            ("131072", "PYDIST_CHUNK_BYTES"),
            (None, "default"),
        ]


def arguments_of_init(folder: str) -> list[Any]:
    pydist.init(timeout=33, backend="gloo", config={"engine": {"timeout": 44}})
    pydist.save(folder, model=torch.nn.Linear(1, 1))
    seen = [sources()[f"engine.{name}"] for name in ("timeout", "backend", "debug")]
    pydist.init(config={"model": {"reduction": "mean"}})
    seen.append(pydist.checkpoint.config_of(folder)["engine"])
    pydist.shutdown()
    return [*seen, sources()["engine.timeout"]]


def test_arguments_of_init_are_in_force(fresh: Ranks, file: str, tmp_path: Path) -> None:
    *told, saved, after = fresh.run(arguments_of_init, str(tmp_path / "c"))[0]
    assert told == [(33.0, "argument"), ("gloo", "argument"), ("0", "default")]
    assert (saved["timeout"], saved["backend"]) == (33.0, "gloo")
    assert after == ("77", file)


def takes_what_is_refused() -> list[str]:
    told = []
    for model, given in (
        ({"bucket_cap_mb": -1}, {}),
        ({"reduction": "sum"}, {"bucket_cap_mb": -1}),
    ):
        pydist.init(config={"model": model})
        with pytest.raises(pydist.InvalidUsage, match="bucket_cap_mb is -1") as caught:
            pydist.DataParallel(torch.nn.Linear(1, 1), **given)
        told.append(str(caught.value).rpartition(" (")[2])
        pydist.shutdown()
    return told


def test_an_error_says_which_of_its_values_is_from_the_configuration() -> None:
    for from_config, from_program in run_ranks(takes_what_is_refused, 2):
        assert from_config == "bucket_cap_mb is from the configuration)"
        assert "is from" not in from_program


def sets_a_variable_later(file: str) -> list[Any]:
    with mock.patch.dict(os.environ):
        os.environ["PYDIST_TIMEOUT"] = "5"
        pydist.init()
        seen = [sources()["engine.timeout"], pydist.job.current.job.membership.communicator.timeout]
        pydist.init(config={"model": {"reduction": "mean"}})
        pydist.init(config=file)  # says 77, and the variable goes before it
        pydist.shutdown()
        return [*seen, os.environ["PYDIST_TIMEOUT"]]


def test_a_variable_that_the_program_sets_counts_and_stays(fresh: Ranks, file: str) -> None:
    assert fresh.run(sets_a_variable_later, file) == [[("5", "PYDIST_TIMEOUT"), 5.0, "5"]]


def says_it_in_another_way() -> tuple[bool, tuple[int, ...], int]:
    pydist.init(
        config={
            "model": {"forward_sync_buffers": True, "bucket_cap_mb_list": [1, 2]},
            "loader": {"seed": 3},
        }
    )
    module = torch.nn.Linear(1, 1)
    settings = pydist.DataParallel(module, broadcast_buffers=False, bucket_cap_mb=7)._settings
    sampler = pydist.DistributedSampler(range(4))  # type: ignore[arg-type]
    loader: Any = pydist.prepare(DataLoader(range(4), sampler=sampler))  # type: ignore[arg-type]
    return settings.copies_buffers, settings.caps_bytes, len(loader)


def test_what_the_program_says_in_another_way_counts() -> None:
    assert run_ranks(says_it_in_another_way, 2) == [(False, (7 << 20,), 2)] * 2


def saves_and_asks(folder: str) -> list[Any]:
    pydist.init(config={"model": {"reduction": "sum"}, "engine": {"host_id": "a"}})
    caps: Any = (1, 2)
    model = pydist.DataParallel(torch.nn.Linear(3, 1), compress="fp16", bucket_cap_mb_list=caps)
    pydist.save(folder, model=model)
    config = pydist.checkpoint.config_of(folder)
    pydist.shutdown()
    pydist.init(config=config)
    again = pydist.DataParallel(torch.nn.Linear(3, 1))._settings
    return [config["model"], config["engine"].get("host_id"), again.reduction, again.compress]


def test_a_checkpoint_knows_how_its_training_was_set_up(tmp_path: Path) -> None:
    for found in run_ranks(saves_and_asks, 2, str(tmp_path / "c")):
        kept = {"reduction": "sum", "compress": "fp16", "bucket_cap_mb_list": [1, 2]}
        assert found == [kept, None, "sum", "fp16"]


def test_spawned_ranks_read_the_file_by_themselves(file: str, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[engine]\ntimeout = 55\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pydist\n"
        "def ask():\n"
        f"    pydist.init(config={str(other)!r})\n"
        "    return pydist.job.current.job.membership.communicator.timeout\n"
        "if __name__ == '__main__':\n"
        "    print(pydist.spawn(ask, nprocs=1), os.environ['PYDIST_TIMEOUT'])\n"
    )
    done = run_command([sys.executable, str(program)], env={"PYDIST_CONFIG": file})
    assert done.stdout == "[55.0] 77\n", done.stderr


STAGE = ("optimizer", "stage")


def default_stages() -> list[Any]:
    pydist.init()
    model = pydist.DataParallel(torch.nn.Linear(3, 1))
    pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    seen = [sources()["optimizer.stage"]]
    pydist.initialize(torch.nn.Linear(3, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    return [*seen, sources()["optimizer.stage"]]


def test_the_default_stage_is_that_of_the_call() -> None:
    assert run_ranks(default_stages, 2) == [[(1, "default"), (0, "default")]] * 2


def test_info_tells_where_values_are_from(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "pydist", "info", "--json"]
    report = json.loads(run_command(command, env={"PYDIST_CONFIG": file}).stdout)
    found = {f"{s['section']}.{s['name']}": s for s in report["configuration"]}
    assert (found["model.compress"]["value"], found["model.compress"]["source"]) == ("bf16", file)
    assert found["optimizer.stage"]["source"] == file
    assert found["model.check_every"]["source"] == "default"
    set_environment(monkeypatch, {})
    assert main(["info", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["configuration"]
    stages = [each["value"] for each in plain if (each["section"], each["name"]) == STAGE]
    assert stages == [0]  # that of pydist.initialize
    shown = run_command(command[:-1], env={"PYDIST_CONFIG": file}).stdout
    assert re.search(rf"model\.compress +\"bf16\" +{re.escape(file[:20])}", shown), shown


def join_in_vain() -> str:
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.init()
    return str(caught.value)


def test_a_file_that_is_not_valid_is_told_by_info_and_refused_by_init(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[model]\ncompres = 'bf16'\n")
    env = {"PYDIST_CONFIG": str(path)}
    report = json.loads(
        run_command([sys.executable, "-m", "pydist", "info", "--json"], env=env).stdout
    )
    assert "did you mean model.compress?" in report["invalid_environment"]
    [told] = run_ranks(join_in_vain, 1, env=env)
    assert told.startswith(f"{path}: there is no model.compres")


def warns_of_lines() -> list[tuple[str, str]]:
    pydist.init()

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    module = torch.nn.Linear(1, 1)
    module._ddp_params_and_buffers_to_ignore = ["none"]  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pydist.prepare(DataLoader(Stream()))
        pydist.DataParallel(module)
        pydist.DataParallel(torch.nn.Linear(1, 1), check_reduction=True)
    return [(Path(each.filename).name, str(each.message)[:20]) for each in caught]


def test_warnings_are_of_the_programs_lines() -> None:
    """Not of the call that takes something from a configuration."""
    for told in run_ranks(warns_of_lines, 2):
        assert [name for name, _ in told] == ["test_in_force.py"] * 3, told
