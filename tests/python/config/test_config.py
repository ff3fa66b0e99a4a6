"""What a configuration takes, from where, and what it refuses."""

import json
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydist import Config, InvalidUsage, _native
from pydist.config.fields import fields_of
from pydist.config.hints import in_words, matches

TOML = """
[engine]
timeout = 77
debug = true
interface = ["eth0", "eth1"]

[model]
compress = "bf16"
bucket_cap_mb = 4

[optimizer]
name = "AdamW"
params = { lr = 0.001, betas = [0.9, 0.95] }
stage = 2
"""
TABLES = {
    "engine": {"timeout": 77, "debug": True, "interface": ["eth0", "eth1"]},
    "model": {"compress": "bf16", "bucket_cap_mb": 4},
    "optimizer": {"name": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95]}, "stage": 2},
}


def test_where_the_state_of_an_optimizer_is() -> None:
    both = {"offload": "cpu", "delayed": True}
    assert Config(optimizer=both)["optimizer"] == both
    with pytest.raises(InvalidUsage, match=r"optimizer\.offload is 'gpu'; it must be 'cpu' or"):
        Config(optimizer={"offload": "gpu"})


def test_a_file_of_either_kind_says_the_same_as_a_dict(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.json").write_text(json.dumps(TABLES))
    of_toml = Config.from_file(tmp_path / "a.toml")
    assert of_toml.to_dict() == TABLES
    assert of_toml == Config.from_file(tmp_path / "a.json") == Config.from_dict(TABLES)
    assert of_toml == Config(**TABLES) == pickle.loads(pickle.dumps(of_toml))
    assert of_toml.source_of("model", "compress") == str(tmp_path / "a.toml")
    assert Config(**TABLES).source_of("model", "compress") == "argument"
    assert of_toml.source_of("model", "reduction") is None


def test_what_is_written_over_a_file_keeps_the_rest_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    config = Config.from_file(tmp_path / "a.toml")
    updated = config.updated(model={"compress": None})
    assert updated["model"] == {"compress": None, "bucket_cap_mb": 4}
    assert updated.source_of("model", "compress") == "argument"
    assert updated.source_of("model", "bucket_cap_mb") == str(tmp_path / "a.toml")
    assert config["model"]["compress"] == "bf16"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"modle": {}}, "there is no section 'modle'; did you mean 'model'?"),
        ({"model": 3}, "model is 3; it must be a table of names"),
        ({"model": {"compres": None}}, "no model.compres; did you mean model.compress?"),
        ({"loader": {"stage": 1}}, "no loader.stage; did you mean optimizer.stage?"),
        ({"model": {"compress": "int8"}}, "'int8'; it must be 'bf16', 'fp16' or None"),
        ({"model": {"bucket_cap_mb": "25"}}, "'25'; it must be a number or None"),
        ({"model": {"init_sync": 1}}, "model.init_sync is 1; it must be true or false"),
        ({"model": {"process_group": None}}, "there is no model.process_group"),
        ({"optimizer": {"stage": True}}, "optimizer.stage is True; it must be 0, 1 or 2"),
        ({"training": {"batch_size": 2.5}}, "2.5; it must be a whole number or None"),
        ({"training": {"accumulation_steps": 0}}, "is 0; it must be more than 0, or left out"),
        ({"training": {"clip_grad_norm": -1}}, "is -1; it must be more than 0, or left out"),
        ({"training": {"clip_grad_norm": math.nan}}, "clip_grad_norm is nan; nan is no setting"),
        ({"optimizer": {"params": {"betas": (0.9, math.nan)}}}, "optimizer.params is {'betas': ["),
        ({"engine": {"timeout": -1}}, "engine.timeout='-1' is not valid"),
        ({"engine": {"timeout": 1e-7}}, "seconds, 0.001 or more"),
        ({"engine": {"timeout": True}}, "engine.timeout is True; it must be a number or text"),
        ({"engine": {"chunk_bytes": 4096.5}}, "4096.5; it must be a whole number or text"),
        ({"engine": {"debug": 2}}, "engine.debug is 2; it must be true or false, 0, 1 or text"),
        ({"engine": {"host_id": 7}}, "engine.host_id is 7; it must be text"),
        ({"engine": {"interface": [1]}}, "[1]; it must be a list of texts or text"),
        ({"engine": {"backend": "mpi"}}, "engine.backend='mpi' is not valid"),
        ({"engine": {"PYDIST_TIMEOUT": 3}}, "did you mean engine.timeout?"),
        ({"engine": {"chunk_byte": 1}}, "did you mean engine.chunk_bytes?"),
        ({"engine": {"interface": "a\0b"}}, "which no variable can be"),
        ({"engine": {"job_secret": "x" * 40}}, "set PYDIST_JOB_SECRET"),
    ],
)
def test_what_is_not_known_or_not_valid_is_refused(
    tables: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        Config.from_dict(tables)
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        Config(**tables)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(tables))
    with pytest.raises(InvalidUsage, match=re.escape(message)) as caught:
        Config.from_file(path)
    assert str(path) in str(caught.value)


def test_what_contains_itself_is_refused() -> None:
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(InvalidUsage, match="contains itself"):
        Config(optimizer={"params": {"betas": circular}})
    same = [1, 2]
    assert Config(optimizer={"params": {"a": same, "b": same}})


@pytest.mark.parametrize("content", ["[model\n", '["a"]', "", "[" * 100_000])
@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: str, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text(content)
    if (content, suffix) == ("", "toml"):
        assert Config.from_file(path).to_dict() == {}
        return
    with pytest.raises(InvalidUsage, match=re.escape(str(path))):
        Config.from_file(path)


@pytest.mark.parametrize("read", [Config.from_file, Config.from_deepspeed])
def test_a_name_that_is_given_twice_is_refused(tmp_path: Path, read: Callable[..., Any]) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"optimizer": {"stage": 1, "name": "SGD", "stage": 2}}')
    with pytest.raises(InvalidUsage, match=r"a\.json can't be read: 'stage' is given twice"):
        read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"none\.toml can't be read"):
        Config.from_file(tmp_path / "none.toml")


def test_a_refused_value_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_TIMEOUT", "5")
    monkeypatch.delenv("PYDIST_CHUNK_BYTES", raising=False)
    before = dict(os.environ)
    with pytest.raises(InvalidUsage):
        Config(engine={"timeout": 3, "chunk_bytes": 1})
    assert dict(os.environ) == before


def test_another_variable_is_not_the_files_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYDIST_TIMEOUT", "soon")
    path = tmp_path / "a.toml"
    path.write_text("[engine]\nchunk_bytes = 65536\n")
    assert Config.from_file(path)["engine"] == {"chunk_bytes": 65536}
    path.write_text("[engine]\nchunk_bytes = 1\n")
    with pytest.raises(InvalidUsage, match=r"engine\.chunk_bytes='1'"):
        Config.from_file(path)
    assert os.environ["PYDIST_TIMEOUT"] == "soon"


def test_each_variable_that_is_a_number_or_a_switch_has_its_type() -> None:
    for variable, values, *_ in _native.environment_variables():
        name = variable.removeprefix("PYDIST_").lower()
        is_text = re.match(r"\d|seconds|microseconds|first-last", values) is None
        if name in fields_of("engine"):
            assert matches(2, fields_of("engine")[name].hint) == (not is_text and name != "debug")
            assert matches(True, fields_of("engine")[name].hint) == (name == "debug")
            assert matches("2", fields_of("engine")[name].hint)


def test_a_tuple_is_the_list_that_a_file_has() -> None:
    config = Config(optimizer={"params": {"betas": (0.9, 0.95)}}, engine={"interface": ("a", "b")})
    assert config["optimizer"]["params"] == {"betas": [0.9, 0.95]}
    assert config["engine"] == {"interface": ["a", "b"]}
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_values_are_of_exactly_the_annotated_type() -> None:
    assert matches(1, float)
    assert not matches(True, float)
    assert not matches(True, int)
    assert not matches(1.0, int)
    assert matches([1, 2], list[int] | None)
    assert not matches([1, "2"], list[int])
    assert matches({"a": [1]}, dict[str, Any])
    assert in_words(list[int] | None) == "a list of whole numbers or None"


def test_what_is_in_it_stays_as_it_was() -> None:
    params: dict[str, Any] = {"betas": [0.9, 0.95]}
    config = Config(optimizer={"params": params})
    params["betas"].append(1.0)
    config["optimizer"]["params"]["lr"] = 1
    assert config["optimizer"] == {"params": {"betas": [0.9, 0.95]}}
    with pytest.raises(InvalidUsage, match="which no file could have"):
        Config(optimizer={"params": {"lr": object()}})
    with pytest.raises(InvalidUsage, match=r"there is no model\.1"):
        Config.from_dict({"model": {1: 2}})
