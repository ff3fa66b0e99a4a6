"""The command `pydist plan`."""

from pathlib import Path

import pytest
from planned import planned
from training import TIME_LIMIT

from pydist.cli import main
from pydist.parallel.bucket_planner import typical_cap_bytes

pytestmark = TIME_LIMIT


SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def forward(self, x, scale=1.0):
        return self.layer(x) * scale

def wide():
    return Model(256)

def sample():
    return {"x": torch.zeros(4, 64), "scale": 2.0}

def looks_at_values():
    model = Model()
    assert float(model.layer.weight.abs().sum()) > 0
    return model

ready = Model()
number = 7

def broken():
    raise KeyError("oh")

if __name__ == "__main__":
    raise SystemExit("trained")
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "some_model.py"
    path.write_text(SOURCE)
    return str(path)


def test_command(capsys: pytest.CaptureFixture[str], source: str) -> None:
    default = planned(capsys, source, "--ranks", "8", "--dtype", "bf16", "--optimizer", "adamw")
    assert default["trained"] == 64 * 65
    assert default["bytes"]["ddp"]["total"] == 64 * 65 * 16 + 2 * 4
    for name in ("ready", "looks_at_values", "Model"):
        same = planned(capsys, f"{source}:{name}", "--ranks", "8", "--dtype", "bf16")
        assert same == default
    wide = planned(capsys, f"{source}:wide", "--ranks", "2", "--input", "9x256")
    assert wide["bytes"]["ddp"]["activations"] == 2 * 9 * 256 * 4
    complete = ("--bucket-cap-mb", "8", "--set", "foreach=True", "--sample", "sample")
    assert planned(capsys, source, "--ranks", "2", *complete)["notes"] == []
    sgd = planned(capsys, source, "--ranks", "2", "--optimizer", "SGD", "--set", "momentum=0.9")
    assert sgd["bytes"]["ddp"]["state"] == 64 * 65 * 4
    named = planned(capsys, "torch.nn:ReLU", "--ranks", "1", "--optimizer", "torch.optim:Adam")
    assert named["elements"] == 0


def test_help_on_the_size_of_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "8 for 100 MB, and as their square root, from 0.25 to 64" in text
    sizes = [typical_cap_bytes(count) / 2**20 for count in (10**8, 4 * 10**8, 1, 10**11)]
    assert sizes == [8, 16, 0.25, 64]


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str], source: str) -> None:
    assert main(["plan", source, "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "4,160 parameters",
        "on 8 ranks",
        "stage 2",
        "optimizer state",
        "temporaries of the step",
        "16.00 B",
        "on GPUs torch takes foreach=True",
    ):
        assert text in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py", "--ranks", "2"], "no such file: nowhere.py"),
        (["nowhere", "--ranks", "2"], "no such module: 'nowhere'; a file ends with .py"),
        (["SOURCE"], "--ranks"),
        (["SOURCE:nope", "--ranks", "2"], "has no nope; it defines: Model, broken"),
        (["SOURCE:number", "--ranks", "2"], "number in some_model.py is an int; it must be"),
        (["SOURCE:sample", "--ranks", "2"], "sample() in some_model.py returned a dict"),
        (["SOURCE:broken", "--ranks", "2"], "broken() in some_model.py raised KeyError: 'oh'"),
        (["SOURCE", "--ranks", "2", "--dtype", "bf61"], "no type 'bf61'"),
        (["SOURCE", "--ranks", "2", "--optimizer", "adamm"], "no optimizer 'adamm'"),
        (["SOURCE", "--ranks", "2", "--optimizer", "torch:nn"], "no such class of optimizers"),
        (["SOURCE", "--ranks", "2", "--set", "momentum"], "write OPTION=VALUE"),
        (["SOURCE", "--ranks", "2", "--set", "lr=much"], "'much' is not a number"),
        (["SOURCE", "--ranks", "2", "--input", "4,64"], "write the shape as"),
        (["SOURCE", "--ranks", "0"], "there is at least one rank"),
        (["json", "--ranks", "2"], "json defines none of build_model, model, Model"),
    ],
)
def test_command_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    assert main(["plan", *(text.replace("SOURCE", source) for text in arguments)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pydist plan: ")
    assert message in printed
