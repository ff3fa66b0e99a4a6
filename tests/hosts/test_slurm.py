"""Jobs under a real Slurm, a node in each network namespace. Their names can't be resolved: Slurm
knows their addresses alone."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from namespaces import Hosts
from slurm import Place, Slurm, made_slurm, why_no_slurm
from thorough import everyday

pytestmark = pytest.mark.timeout(150)

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"

SUMS = """
import os, sys, torch, pydist
pydist.init(timeout=30)
total = torch.tensor([float(pydist.rank() + 1)])
pydist.all_reduce(total)
text = f"{pydist.rank()}/{pydist.world_size()} {float(total)} local {pydist.local_rank()} "
sys.stdout.write(text + f"on {os.environ['SLURMD_NODENAME']}\\n")  # at once
sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    places = [Place(f"node{host.index}", host.address, host.command) for host in hosts]
    with made_slurm(places, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SUMS)
    return str(path)


def lines_of(ranks: Sequence[tuple[int, int]]) -> list[str]:
    """What the ranks print whose local rank and node are these."""
    size, total = len(ranks), len(ranks) * (len(ranks) + 1) / 2
    return [
        f"{rank}/{size} {total} local {local} on node{node}"
        for rank, (local, node) in enumerate(ranks)
    ]


def require_sums(
    done: CompletedProcess[str], slurm: Slurm, ranks: Sequence[tuple[int, int]]
) -> None:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{slurm.logs()}"
    assert sorted(done.stdout.splitlines()) == lines_of(ranks), done.stderr


@pytest.mark.thorough
def test_srun_on_one_node(slurm: Slurm, script: str) -> None:
    done = slurm.run(["srun", "-N1", "-n2", sys.executable, script])
    require_sums(done, slurm, [(0, 0), (1, 0)])


def test_srun_with_different_numbers_on_two_nodes(slurm: Slurm, script: str) -> None:
    done = slurm.run(["srun", "-N2", "-n3", sys.executable, script])
    require_sums(done, slurm, [(0, 0), (1, 0), (0, 1)])


@pytest.mark.thorough
def test_pydist_run_below_srun_makes_one_job_of_the_nodes(slurm: Slurm, script: str) -> None:
    srun = ["srun", "-N2", "--ntasks-per-node=1"]
    done = slurm.run([*srun, sys.executable, "-m", "pydist", "run", "-n", "2", script])
    require_sums(done, slurm, [(0, 0), (1, 0), (0, 1), (1, 1)])


@pytest.mark.parametrize("example", everyday("pydist_run", thorough=("srun", "torchrun")))
def test_the_examples_run(example: str, slurm: Slurm, script: str, tmp_path: Path) -> None:
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    few = ["--ntasks-per-node=2"] if example == "srun" else ["--cpus-per-task=2"]
    output = slurm.run_batch(
        [
            *few,
            f"--export=ALL,PROCESSES_PER_NODE=2,{path}",
            *(str(EXAMPLES / f"{example}.sbatch"), script),
        ],
        tmp_path,
    )
    lines = sorted(line for line in output.splitlines() if " local " in line)
    assert lines == lines_of([(0, 0), (1, 0), (0, 1), (1, 1)]), output


@pytest.mark.thorough
def test_two_nodes_on_one_machine(script: str, tmp_path: Path) -> None:
    if reason := why_no_slurm():
        pytest.skip(reason)
    places = [Place(f"node{number}", "127.0.0.1") for number in range(2)]
    with made_slurm(places, tmp_path) as slurm:
        done = slurm.run(["srun", "-N2", "-n3", sys.executable, script])
        require_sums(done, slurm, [(0, 0), (1, 0), (0, 1)])
