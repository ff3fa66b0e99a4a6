"""Ray Train on pydist, beside its own DDP on gloo."""

import importlib.util
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from ray_driver import results_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pydist.errors import InvalidUsage

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: make test-frameworks installs it",
    ),
    # Ray starts some ten processes for each driver, and three more for each training.
    pytest.mark.timeout(400),
]

LIMIT_S = 300.0


def test_the_same_losses_and_weights_as_on_gloo(tmp_path: Path) -> None:
    of = results_of("parity", tmp_path, limit_s=LIMIT_S)
    assert of["backend"] == ["pydist"]
    for ours, theirs in zip(of["pydist"], of["ray"], strict=True):
        assert ours["wrapper"].startswith("pydist.")
        assert theirs["wrapper"].startswith("torch.")
        assert len(ours["losses"]) == 8
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=1e-5, atol=1e-6)


def whole_losses(left: list[dict[str, Any]]) -> list[float]:
    """The mean over the samples of all workers, step by step."""
    means = []
    for parts in zip(*(each["losses"] for each in left), strict=True):
        means.append(sum(loss * count for loss, count in parts) / sum(n for _, n in parts))
    return means


def batches(left: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of all workers, step by step."""
    steps = zip(*(each["seen"] for each in left), strict=True)
    return [sorted(chain.from_iterable(parts)) for parts in steps]


def test_a_training_that_loses_a_worker_ends_with_the_same_weights(tmp_path: Path) -> None:
    of = results_of("loss_of_a_worker", tmp_path, limit_s=LIMIT_S)
    assert "rank 1" in (tmp_path / "lost" / "told").read_text()
    assert not (tmp_path / "whole" / "killed").exists()
    for lost, whole in zip(of["lost"], of["whole"], strict=True):
        # Killed before step 3; the last checkpoint was after step 2.
        assert (lost["began"], whole["began"]) == (2, 0)
        assert lost["seen"] == whole["seen"][2:]
        assert lost["losses"] == whole["losses"][2:]
        assert lost["weights"] == whole["weights"]
    # Of three that were reported, Ray has removed the oldest, as `num_to_keep` says.
    folders = [path for path in (tmp_path / "storage" / "lost").iterdir() if path.is_dir()]
    assert len(folders) == 2


@pytest.mark.parametrize("number", ["three", "one"])
def test_another_number_of_workers_goes_on(other_numbers: Any, number: str) -> None:
    started, rest, whole = (other_numbers[key] for key in (f"{number} started", number, "whole"))
    assert [each["began"] for each in rest] == [4] * len(rest)
    assert batches(started) + batches(rest) == batches(whole)
    assert sorted(chain.from_iterable(batches(whole))) == list(range(48))
    losses = whole_losses(started) + whole_losses(rest)
    assert losses == pytest.approx(whole_losses(whole), rel=1e-5)
    torch.testing.assert_close(rest[0]["weights"], whole[0]["weights"], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def other_numbers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results_of("other_numbers", tmp_path_factory.mktemp("numbers"), limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backend": "gloo"}, "backend='gloo'"),
        ({"init_method": "file"}, "init_method='file'"),
        ({"timeout_s": 0}, "timeout=0"),
    ],
)
def test_a_config_that_is_not_possible(arguments: dict[str, Any], said: str) -> None:
    from pydist.integrations.ray import PydistConfig

    with pytest.raises(InvalidUsage, match=said):
        PydistConfig(**arguments)


def test_the_time_out_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydist.integrations.ray import PydistConfig

    assert PydistConfig().timeout_s == 600
    monkeypatch.setenv("PYDIST_TIMEOUT", "7")
    assert PydistConfig().timeout_s == 7


def test_what_is_not_possible_is_refused() -> None:
    from pydist.integrations.ray import prepare_data_loader, prepare_model, report

    model, loader = nn.Linear(2, 2), DataLoader(list(range(4)))
    with pytest.raises(InvalidUsage, match="parallel_strategy='fsdp'"):
        prepare_model(model, parallel_strategy="fsdp")
    with pytest.raises(InvalidUsage, match="auto_transfer=True"):
        prepare_data_loader(loader, auto_transfer=True)
    with pytest.raises(InvalidUsage, match=r"shares out nothing, so \['seed'\]"):
        prepare_data_loader(loader, add_dist_sampler=False, seed=1)
    with pytest.raises(InvalidUsage, match=r"\['keep', 'step'\], which Ray decides on"):
        report({}, model=model, step=3, keep=2)


def test_storage_that_is_not_mounted_is_refused() -> None:
    import pyarrow.fs

    from pydist.integrations.ray import report

    elsewhere = pyarrow.fs.SubTreeFileSystem("/", pyarrow.fs.LocalFileSystem())
    with mock.patch("ray.train.get_context") as context:
        context().get_storage().storage_filesystem = elsewhere
        with pytest.raises(InvalidUsage, match="storage_path is on subtree"):
            report({}, model=nn.Linear(2, 2))


class Pair(NamedTuple):
    inputs: Tensor
    name: str


def test_batches_go_to_the_device_as_the_loop_gets_them() -> None:
    from pydist.integrations.ray import prepare_data_loader

    def collate(numbers: list[int]) -> Any:
        made = torch.tensor(numbers)
        return {"pair": Pair(made, "a"), "list": [made, made], "tuple": (made, 3)}

    plain: DataLoader[Any] = DataLoader(list(range(6)), batch_size=2, collate_fn=collate)
    loader = prepare_data_loader(plain, move_to_device=torch.device("meta"))
    assert len(loader) == 3
    batch = next(iter(loader))
    pair = batch["pair"]
    assert isinstance(pair, Pair)
    assert pair.name == "a"
    assert batch["tuple"][1] == 3
    assert isinstance(batch["tuple"], tuple)
    for moved in (pair.inputs, *batch["list"], batch["tuple"][0]):
        assert moved.device.type == "meta"
    # Ray's own wrapper would have fetched the next batch as well.
    assert loader.state_dict()["position"] == 2
