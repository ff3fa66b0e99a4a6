"""Jobs that a launcher starts: how it starts them, and how they end."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launch import run_command
from thorough import everyday

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, sys, torch, pydist
pydist.init()
t = torch.tensor([float(pydist.rank())])
pydist.all_reduce(t)
threads = os.environ["OMP_NUM_THREADS"]
line = f"{pydist.rank()}/{pydist.world_size()} {float(t)} {threads} {sys.argv[1:]}"
os.write(1, f"{line}\\n".encode())
"""


def run(
    *arguments: str, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> CompletedProcess[str]:
    variables = {"OMP_NUM_THREADS": None, **(env or {})}
    return run_command(
        [sys.executable, "-m", "pydist", *arguments], timeout=90, env=variables, cwd=cwd
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_run_starts_ranks_and_passes_arguments_on(script: Path) -> None:
    done = run("run", "-n", "2", str(script), "-n", "7", "--lr=1")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{rank}/2 1.0 1 ['-n', '7', '--lr=1']" for rank in range(2)]
    assert "Setting OMP_NUM_THREADS" not in done.stderr


def test_run_of_a_module_with_torchruns_flags_and_meeting_place(script: Path) -> None:
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    flags = [*meeting, "--nnodes=1:1", "--max-restarts=0", "--nproc-per-node=2", "-m", "train"]
    # The number of threads is one that the user has chosen.
    done = run("run", *flags, cwd=script.parent, env={"OMP_NUM_THREADS": "3"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0/2 1.0 3 []", "1/2 1.0 3 []"]


def test_plain_torchrun_works(script: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0/2 1.0 1 []", "1/2 1.0 1 []"]


def test_a_failing_rank_is_named_and_the_status_is_1(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import os\nif os.environ['RANK'] == '1': raise SystemExit(5)\n")
    done = run("run", "-n", "2", str(path))
    assert done.returncode == 1
    assert "rank      : 1" in done.stderr
    assert "exitcode  : 5" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_of_all_ranks() -> None:
    done = run("run", "-n", "2", "-m", "pydist", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("[{")]
    found = {(each["subject"], each["where"]): each for each in json.loads(line)}
    assert found["versions", "all ranks"]["text"] == "the same on all 2 ranks"
    assert found["clocks", "all ranks"]["verdict"] == "fine"
    assert ("launcher", "rank 0") in found
    assert ("launcher", "rank 1") in found


FAILING = """
import sys, time
import torch
import pydist

pydist.init()
pydist.barrier()
if pydist.rank() == 1:
    raise ValueError("no such sample")
pydist.barrier()
"""


@pytest.mark.parametrize("launcher", everyday("pydist", thorough=("torch.distributed.run",)))
def test_the_launcher_reports_the_cause_and_not_its_echoes(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    words = ["run"] if launcher == "pydist" else ["--standalone"]
    count = ["-n", "2"] if launcher == "pydist" else ["--nproc-per-node", "2"]
    done = run_command([sys.executable, "-m", launcher, *words, *count, str(script)], timeout=120)
    assert done.returncode == 1
    cause = done.stderr.rpartition("Root Cause")[2]
    assert "rank      : 1" in cause, done.stderr
    assert "ValueError: no such sample" in cause, done.stderr
    # The echoes say whose they are.
    assert "Aborted: rank 1 (pid " in done.stderr
    assert "has ended with ValueError: no such sample" in done.stderr


EXIT_SCRIPT = """
import ctypes, sys, time
import numpy as np
import torch
import torch.distributed as dist
import pydist

dist.init_process_group("pydist")
rank = dist.get_rank()
if sys.argv[2] == "held to the end":
    # As torch 2.14 does: no destructor of the group ever runs.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD._get_backend(torch.device("cpu"))))
if sys.argv[1] == "broadcast":
    tensor = torch.full((4,), float(rank))
    if rank == 2:
        time.sleep(1.5)
    dist.broadcast(tensor, 0)
    assert tensor.tolist() == [0.0] * 4
elif rank == 0:
    dist.all_reduce(torch.from_numpy(np.ones(200_000, np.float32)), async_op=True)
else:
    time.sleep(1.5)
# In one piece: the launcher's ranks do not buffer, and print() writes word by word.
sys.stdout.write(f"ended {rank}\\n")
"""


@pytest.mark.parametrize("life", everyday("ends with the script", thorough=("held to the end",)))
@pytest.mark.parametrize("what", everyday("broadcast", thorough=("work under way",)))
def test_a_script_may_end_without_destroying_its_group(
    tmp_path: Path, what: str, life: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXIT_SCRIPT)
    done = run("run", "-n", "3", str(script), what, life)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ended 0", "ended 1", "ended 2"]


TRAINING = """
import sys, torch, pydist
torch.manual_seed(0)
model = pydist.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        print(f"rank {pydist.rank()} step {step}", flush=True)
    pydist.save(sys.argv[1], model=model)
except pydist.Error as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def run_training(text: str, folder: Path) -> CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(TRAINING)
    env = {"PYDIST_FAULTS": text, "PYDIST_BACKEND": "native"}
    return run("run", "-n", "2", str(script), str(folder / "c"), env=env)


def test_a_fault_by_a_variable(tmp_path: Path) -> None:
    done = run_training("kill rank=1 step=3 phase=backward", tmp_path)
    assert done.returncode != 0
    assert "rank 1 step 2" in done.stdout
    assert "rank 1 step 3" not in done.stdout
    assert "kill on purpose in step 3, backward on rank 1" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["start-up", "checkpoint"])
def test_a_fault_by_a_variable_at_a_rare_phase(tmp_path: Path, phase: str) -> None:
    done = run_training(f"raise rank=1 phase={phase}", tmp_path)
    assert done.returncode != 0
    assert f"raised on purpose in {phase} on rank 1" in done.stderr + done.stdout
    assert ("rank 1 step 4" in done.stdout) == (phase == "checkpoint")
