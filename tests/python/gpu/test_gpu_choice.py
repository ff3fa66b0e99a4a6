"""Which GPUs a job takes: the forms of --gpus and gpus=, what is visible, what is idle."""

import math
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpus import fake_gpus
from torch.distributed import run as torchrun

import pydist
from pydist.cli import main
from pydist.gpu import inventory
from pydist.gpu.inventory import InstalledGpu, installed_gpus, parse_nvidia_smi
from pydist.gpu.selection import Choice, choose_gpus, from_command_line, process_count
from pydist.gpu.visible import (
    VARIABLE,
    listed_gpus,
    narrow_to_own_instance,
    visible_gpus,
    why_none,
)
from pydist.job.spawn_results import Course, result_file

MIGS = ("MIG-a", "MIG-b", "MIG-c", "MIG-d")
FOUR = ("4", "5", "6", "7")


def unasked() -> list[InstalledGpu]:
    raise AssertionError("asked for the load of GPUs")


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        (0, ()),
        (1, ("4",)),
        (3, ("4", "5", "6")),
        (-1, FOUR),
        ([], ()),
        ([0], ("4",)),
        ([3, 1], ("7", "5")),
        (range(2), ("4", "5")),
        (np.array([3, 1]), ("7", "5")),
        (torch.tensor([2], dtype=torch.int16), ("6",)),
        (np.array([], int), ()),
        (np.array(2), ("4", "5")),
        (torch.tensor(-1), FOUR),
        ("0", ("4",)),
        ("0,", ("4",)),
        ("2,", ("6",)),
        ("2", ("4", "5")),
        ("0,2", ("4", "6")),
        (" 3 , 0 ", ("7", "4")),
        ("-1", FOUR),
    ],
)
def test_forms(gpus: Any, chosen: tuple[str, ...]) -> None:
    assert choose_gpus(gpus, visible=lambda: FOUR, installed=unasked) == chosen


def test_the_same_gpus_by_other_words() -> None:
    def chosen(gpus: Any) -> Choice:
        return Choice(gpus, choose_gpus(gpus, visible=lambda: FOUR), FOUR)

    for first, second in [(2, [0, 1]), (1, "0"), (-1, 4), ("0,1", 2), (0, [])]:
        assert chosen(first).is_of(second)
        assert chosen(second).is_of(first)
    assert Choice("auto:2", ("5", "6"), FOUR).is_of("auto:2")
    for second in (0, 3, [1, 0], [9], "auto:2"):
        assert not chosen(2).is_of(second)
    assert not Choice(0, (), ()).is_of(2)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("0", ()), ("2", ("4", "5")), ("-1", FOUR), ("0,", ("4",)), ("0,2", ("4", "6"))],
)
def test_forms_of_the_command_line(text: str, chosen: tuple[str, ...]) -> None:
    gpus = from_command_line(text)
    assert choose_gpus(gpus, "--gpus ", visible=lambda: FOUR, installed=unasked) == chosen


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (5, "gpus=5 asks for more GPUs than there are: 0 to 3 are visible."),
        ([0, 4], r"gpus=\[0, 4\]: there is no GPU 4: 0 to 3 are visible."),
        ("4,", "gpus='4,': there is no GPU 4"),
        ([1, 1], r"gpus=\[1, 1\] names GPU 1 twice.*set CUDA_VISIBLE_DEVICES"),
        ([-1], "-1 is no number of a GPU; they count from 0"),
        ([True], "True is no number of a GPU"),
        (["0"], "'0' is no number of a GPU"),
        (-2, "gpus=-2 is not valid; use a number"),
        (True, "gpus=True is not valid"),
        (0.5, "gpus=0.5 is not valid"),
        (b"0", "gpus=b'0' is not valid"),
        (np.array([[0, 1]]), r"\[0, 1\] is no number of a GPU"),
        (np.array([0.0, 1.0]), r"0\.0 is no number of a GPU"),
        (torch.tensor([True]), "True is no number of a GPU"),
        (torch.tensor(True), "is not valid; use a number"),
        ("", "gpus='' is not valid"),
        (",", "gpus=',' is not valid"),
        ("-1,", "gpus='-1,' is not valid: .*For all of them write -1 alone"),
        ("0,-1", "gpus='0,-1' is not valid: numbers of GPUs count from 0"),
        ("0,,1", "is not valid"),
        ("0;1", "is not valid"),
        ("GPU-1", "is not valid.* For GPUs by UUID set CUDA_VISIBLE_DEVICES."),
        ("auto", "is not valid; use a number.*auto:2"),
        ("auto:two", "is not valid"),
        ("auto:0", "auto: takes the number of idle GPUs to use, 1 or more, or -1"),
        ("auto:-2", "1 or more"),
        ("auto:5", "gpus='auto:5' asks for more GPUs than there are: 0 to 3 are visible"),
    ],
)
def test_what_is_refused(gpus: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(pydist.InvalidUsage, match=said):
        choose_gpus(gpus, visible=lambda: FOUR, installed=unasked)


def test_errors_say_what_limits_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    with pytest.raises(pydist.InvalidUsage, match=r"only GPU 0 is visible \(by CUDA_VISIBLE_DEV"):
        choose_gpus([1], visible=lambda: ("5",))
    with pytest.raises(pydist.InvalidUsage, match=r"gpus=-1: there is no GPU to take: .*CUDA"):
        choose_gpus(-1, visible=lambda: ())


@pytest.mark.parametrize(
    ("value", "listed", "visible"),
    [
        (None, None, ("0", "1", "2")),
        ("", (), ()),
        ("-1", (), ()),
        ("4,5", ("4", "5"), ("4", "5")),
        ("2, 0", ("2", "0"), ("2", "0")),
        ("0,x,1", ("0",), ("0",)),
        ("0,-1,1", ("0",), ("0",)),
        ("1,1", (), ()),
        ("GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd"), ("GPU-ab", "GPU-cd")),
        ("0,1,2,7", ("0", "1", "2", "7"), ("0", "1", "2")),
        ("MIG-a,MIG-b,MIG-c,MIG-d", MIGS, MIGS),
    ],
)
def test_visible_gpus(
    value: str | None,
    listed: tuple[str, ...] | None,
    visible: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_gpus("a", "b", "c"):
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        assert listed_gpus() == listed
        assert visible_gpus() == visible


def test_instances_that_cuda_does_not_find_are_not_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_gpus():
        monkeypatch.setenv(VARIABLE, "MIG-a,MIG-b")
        assert visible_gpus() == ()
        with pytest.raises(pydist.InvalidUsage, match="'MIG-a,MIG-b' names none that CUDA finds"):
            choose_gpus(2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "CUDA finds none on this host"),
        ("", "CUDA_VISIBLE_DEVICES='' hides them all"),
        ("-1", "hides them all"),
        ("2,2", "names 2 twice"),
        ("9", "names none that CUDA finds"),
    ],
)
def test_why_no_gpu_is_visible(
    value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpus():
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        assert said in why_none()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert why_none() == f"torch {torch.__version__} is built without CUDA"
    assert visible_gpus() == ()


def test_a_rank_keeps_its_own_mig_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus("a") as gpus:
        for value, local_rank, left in [
            ("MIG-a,MIG-b", 1, "MIG-b"),
            ("MIG-a,MIG-b", 2, "MIG-a"),
            ("MIG-a,MIG-b", None, "MIG-a,MIG-b"),
            ("MIG-b", 1, "MIG-b"),
            ("0,1", 1, "0,1"),
        ]:
            monkeypatch.setenv(VARIABLE, value)
            narrow_to_own_instance(local_rank)
            assert os.environ[VARIABLE] == left
        gpus.start_cuda()  # too late by then
        monkeypatch.setenv(VARIABLE, "MIG-a,MIG-b")
        narrow_to_own_instance(1)
        assert os.environ[VARIABLE] == "MIG-a,MIG-b"


def gpu(index: int, used_mib: int | None = 0, processes: int = 0, name: str = "H200") -> Any:
    used_bytes = None if used_mib is None else used_mib * 2**20
    return InstalledGpu(index, f"GPU-{'abcd'[index]}0{index}", name, used_bytes, processes)


BUSY = [gpu(0, 400), gpu(1, 9000, 2), gpu(2, 300), gpu(3, 0)]


@pytest.mark.parametrize(
    ("gpus", "listed", "chosen"),
    [
        # The least used ones, by UUID, in the order of the bus.
        ("auto:1", None, ("GPU-d03",)),
        ("auto:2", None, ("GPU-c02", "GPU-d03")),
        ("auto:-1", None, ("GPU-a00", "GPU-c02", "GPU-d03")),
        # As the user's own list has them, and in its order.
        ("auto:2", "3,1,0", ("3", "0")),
        ("auto:1", "GPU-b0,GPU-c", ("GPU-c",)),
    ],
)
def test_idle_gpus(
    gpus: str, listed: str | None, chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpus(*"abcd") as fake:
        if listed is not None:
            monkeypatch.setenv(VARIABLE, listed)
            fake.patch.setattr(torch.cuda, "device_count", lambda: listed.count(",") + 1)
        assert choose_gpus(gpus, installed=lambda: BUSY) == chosen


@pytest.mark.parametrize(
    ("gpus", "listed", "installed", "said"),
    [
        (
            "auto:4",
            None,
            BUSY,
            r"3 of 4 visible GPUs are idle \(GPU 1: 2 processes, 8.8 GiB used\)",
        ),
        ("auto:5", None, BUSY, "asks for more GPUs than there are"),
        ("auto:-1", "1", BUSY, "0 of 1 visible GPUs are idle"),
        ("auto:1", "MIG-a", BUSY, "whether MIG-a, a MIG instance, is idle can't be told"),
        ("auto:1", "GPU-x", BUSY, "GPU GPU-x is not among those that the driver names"),
        ("auto:1", "GPU-a", [gpu(0), gpu(0)], "more than one"),
        ("auto:1", "1", [gpu(0), gpu(1, name="A2")], "set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    ],
)
def test_too_few_idle_gpus(
    gpus: str,
    listed: str | None,
    installed: list[InstalledGpu],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_gpus(*("abcd" if listed is None else "a")):
        if listed is not None:
            monkeypatch.setenv(VARIABLE, listed)
        with pytest.raises(pydist.InvalidUsage, match=said):
            choose_gpus(gpus, installed=lambda: installed)
        if "PCI_BUS_ID" in said:
            monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            assert choose_gpus(gpus, installed=lambda: installed) == ("1",)


def test_a_gpu_that_hides_its_memory_is_judged_by_its_processes() -> None:
    assert gpu(0, None).is_idle
    assert not gpu(0, None, 1).is_idle
    assert not gpu(0, 1025).is_idle
    assert gpu(1, None, 1).load == "1 process"


def test_what_nvidia_smi_prints() -> None:
    gpus = "1, GPU-b, NVIDIA H200, 5120\n0, GPU-a, Odd, Name, [N/A]\n\n"
    processes = "GPU-b, 123\nGPU-b, 124\n"
    assert parse_nvidia_smi(gpus, processes) == [
        InstalledGpu(0, "GPU-a", "Odd, Name", None, 0),
        InstalledGpu(1, "GPU-b", "NVIDIA H200", 5 * 2**30, 2),
    ]
    assert parse_nvidia_smi("0, GPU-a, H200, 3\n", "No running processes found\n")[0].is_idle


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A program of that name, alone on the PATH, that runs some lines of shell."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def install(body: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    return install


def test_asking_nvidia_smi(nvidia_smi: Callable[[str], None]) -> None:
    with pytest.raises(pydist.Error, match="there is no nvidia-smi on this host's PATH"):
        installed_gpus()
    nvidia_smi(
        'case "$*" in\n'
        '*--query-gpu=*) echo "0, GPU-a, H200, 4" ;;\n'
        '*--query-compute-apps=*) echo "GPU-a, 17" ;;\n'
        "esac"
    )
    assert installed_gpus() == [InstalledGpu(0, "GPU-a", "H200", 4 * 2**20, 1)]
    nvidia_smi("echo 'NVML: Driver/library version mismatch'; exit 18")
    with pytest.raises(pydist.Error, match=r"\(status 18\): NVML: Driver/library version"):
        installed_gpus()


def test_an_nvidia_smi_that_hangs(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("exit 0")

    def hang(argv: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(pydist.Error, match=r"can't tell which GPUs are idle: .*timed out"):
        installed_gpus()


def test_asking_nvml(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def memory(handle: int) -> Any:
        if handle == 1:
            raise NVMLError("not supported")
        return types.SimpleNamespace(used=7)

    calls: list[str] = []
    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [None] * handle,
        nvmlDeviceGetUUID=lambda handle: b"GPU-a" if handle == 0 else "GPU-b",
        nvmlDeviceGetName=lambda _: "H200",
    )
    monkeypatch.setattr(inventory.importlib, "import_module", lambda _: nvml)
    assert installed_gpus() == [
        InstalledGpu(0, "GPU-a", "H200", 7, 0),
        InstalledGpu(1, "GPU-b", "H200", None, 1),
    ]
    assert calls == ["init", "shutdown"]

    def no_driver() -> None:
        raise NVMLError("driver not loaded")

    nvml.nvmlInit = no_driver
    with pytest.raises(pydist.Error, match="there is no nvidia-smi"):
        installed_gpus()


def test_as_many_processes_as_gpus() -> None:
    assert process_count(("4", "6"), None, "", "") == 2
    assert process_count(("4", "6"), 2, "", "") == 2
    with pytest.raises(
        pydist.InvalidUsage, match=r"--gpus 0,2 takes 2 GPUs .* but -n 4 asks for 4: leave one"
    ):
        process_count(("4", "6"), 4, "--gpus 0,2", "-n 4")


@pytest.mark.parametrize(
    ("flags", "outcome"),
    [
        (["--gpus", "2"], (2, "4,5")),
        (["--gpus=-1"], (3, "4,5,6")),
        (["--gpus", "-1"], (3, "4,5,6")),
        (["--gpus", "0,2"], (2, "4,6")),
        (["--gpus", "2,", "-n", "1"], (1, "6")),
        (["--gpus", "2", "-n", "gpu"], (2, "4,5")),
        (["--gpus", "0"], (1, "")),
        (["--gpus", "0", "-n", "4"], (4, "")),
        (["-n", "4"], (4, "4,5,6")),
        ([], (1, "4,5,6")),
        (["--gpus", "0,2", "-n", "4"], "--gpus 0,2 takes 2 GPUs for a process each, but -n 4"),
        (["--gpus", "3,"], "--gpus 3,: there is no GPU 3: 0 to 2 are visible (by CUDA_VISIBLE_"),
        (["--gpus", "some"], "--gpus some is not valid; use a number"),
        (["--gpus", ""], "--gpus '' is not valid; use a number"),
        (["--gpus", "-1,"], "--gpus -1, is not valid: numbers of GPUs count from 0. For all of"),
        (["--gpus", "2", "-n", "0"], "-n 0: at least one process is needed"),
    ],
)
def test_pydist_run_gpus(
    flags: list[str],
    outcome: tuple[int, str] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    started = []
    monkeypatch.setattr(
        torchrun, "run", lambda o: started.append((int(o.nproc_per_node), os.environ[VARIABLE]))
    )
    monkeypatch.setattr("pydist.cli.run.record", lambda function: function)
    with fake_gpus("a", "b", "c") as fake:
        monkeypatch.setenv(VARIABLE, "4,5,6")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(sys, "path", list(sys.path))
        fake.patch.setattr(torch.cuda, "is_available", lambda: True)
        fake.patch.setattr(torch.cuda, "device_count", lambda: len(listed_gpus() or ()))
        status = main(["run", *flags, str(script)])
    if isinstance(outcome, str):
        error = capsys.readouterr().err
        assert (status, started) == (2, [])
        assert outcome in error
        assert error.count("\n") == 1
    else:
        assert (status, started) == (0, [outcome])


def test_processes_by_torchruns_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    started = []
    monkeypatch.setattr(torchrun, "run", lambda o: started.append(int(o.nproc_per_node)))
    monkeypatch.setattr("pydist.cli.run.record", lambda function: function)

    def answer(value: str, *flags: str) -> str:
        monkeypatch.setenv("PET_NPROC_PER_NODE", value)
        with fake_gpus("a", "b"):
            status = main(["run", *flags, str(script)])
        return capsys.readouterr().err if status else ""

    disagree = "--gpus -1 takes 2 GPUs for a process each, but "
    assert disagree + "PET_NPROC_PER_NODE=3 asks for 3" in answer("3", "--gpus", "-1")
    # What was typed is named by what was typed.
    assert disagree + "-n 4 asks for 4" in answer("3", "--gpus", "-1", "-n", "4")
    assert disagree + "-n 3 asks for 3" in answer("3", "--gpus", "-1", "--nproc-per-node", "3")
    assert "PET_NPROC_PER_NODE=0: at least one process is needed" in answer("0")
    assert "PET_NPROC_PER_NODE=two: Unsupported nproc_per_node value" in answer("two")
    assert answer("2", "--gpus", "-1") == answer("3") == answer("3", "-n", "1") == ""
    assert started == [2, 3, 1]


@pytest.mark.parametrize(
    ("gpus", "nprocs", "outcome"),
    [
        (2, None, (2, "4,5")),
        ([2], 1, (1, "6")),
        ("0", None, (1, "4")),
        (0, 3, (3, "")),
        (None, 3, (3, None)),
        (2, 3, "gpus=2 takes 2 GPUs for a process each, but nprocs=3 asks for 3"),
        (4, None, "gpus=4 asks for more GPUs than there are"),
    ],
)
def test_spawn_on_gpus(
    gpus: Any,
    nprocs: int | None,
    outcome: tuple[int, str | None] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    def start(folder: Path, variables: dict[str, str], count: int, *__: object) -> Course:
        started.append((count, variables.get(VARIABLE)))
        assert variables["WORLD_SIZE"] == str(count)
        for rank in range(count):
            result_file(folder, rank).write_bytes(pickle.dumps(rank))
        return Course([0] * count, list(range(count)), {}, math.inf)

    monkeypatch.setattr(sys.modules["pydist.job.spawn"], "_run", start)
    with fake_gpus("a", "b", "c"):
        monkeypatch.setenv(VARIABLE, "4,5,6")
        if isinstance(outcome, str):
            with pytest.raises(pydist.InvalidUsage, match=outcome):
                pydist.spawn(max, ((1, 2),), nprocs, gpus=gpus)
        else:
            assert pydist.spawn(max, ((1, 2),), nprocs, gpus=gpus) == list(range(outcome[0]))
            assert started == [outcome]
