"""Arguments of a wrong type are refused by `pydist.save` and `load`, on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from saved_training import Keeps
from torch import nn
from training import joined

import pydist

pytestmark = pytest.mark.timeout(60)
LIMIT_S = 50.0


def refuse_wrong_types(folder: str) -> None:
    """On one rank alone is enough; what was loaded into stays as it was."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    place = str(Path(folder) / "checkpoint")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pydist.save(place, model=model, optimizer=optimizer, scheduler=Keeps(1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for name, value, match in (
        ("path", 3, "path=3 is not valid"),
        ("model", [model], "model is a list; it must be a module, or a mapping"),
        ("optimizer", model, "optimizer is a DataParallel; it must be an optimizer"),
        ("scheduler", 3, "scheduler is an int, which has no (load_)?state_dict"),
        ("stateful", [Keeps(1)], "stateful is a list; it must be a mapping of names to objects"),
    ):
        given: Any = {"path": place, "model": model, "scheduler": Keeps(1)}
        # What models are given says whose lane it is, so all ranks give the same kind.
        is_wrong = rank == 1 or name == "model"
        wrong: Any = {**given, name: value if is_wrong else given.get(name)}
        for call in (pydist.save, pydist.load):
            with pytest.raises(pydist.InvalidUsage, match=match):
                call(**wrong)
    for call, flag in ((pydist.save, "asynchronous"), (pydist.load, "random")):
        with pytest.raises(pydist.InvalidUsage, match=f"{flag} is 'no', a str; it must be a bool"):
            call(place, model=model, **{flag: "no" if rank == 1 else False})  # type: ignore[operator]
        with pytest.raises(pydist.InvalidUsage, match="process_group= is an int"):
            call(place, model=model, process_group=3)  # type: ignore[operator]
    for name in ("step", "keep"):
        numbers: Any = {"step": 1, "keep": 2, name: "3"}
        with pytest.raises(pydist.InvalidUsage, match=f"{name}='3' is not valid"):
            pydist.save(Path(folder) / "steps", model=model, **numbers)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.equal(value)
    pydist.load(place, model=model)


def test_arguments_of_a_wrong_type(tmp_path: Path) -> None:
    env = {"PYDIST_BACKEND": "native"}
    run_ranks(refuse_wrong_types, 2, str(tmp_path), timeout=LIMIT_S, env=env)
