"""Which rank a process is, told from the variables of every launcher that is understood."""

import logging
import os
import time
from pathlib import Path

import pytest
import torch
from launch import NO_LAUNCHER, rank_outcomes, run_ranks

import pydist
from pydist.errors import InvalidUsage
from pydist.job import log
from pydist.job.launchers import Placement, Rendezvous, first_host, read_placement

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-9425@1",
}
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "04250000-3b00-a71c-ba60-060078455939",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_JOBID": "kvs_71_0",
}
FLUX = {
    "FLUX_JOB_ID": "f2Sxgn7X",
    "FLUX_JOB_SIZE": "2",
    "FLUX_JOB_NNODES": "1",
    "FLUX_TASK_RANK": "1",
    "FLUX_TASK_LOCAL_ID": "1",
    # Flux speaks PMI as well.
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "jsm 8",
}
PALS = {
    "PALS_RANKID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_APID": "8f1c",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.7",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40123",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_TASK_ID": "sky-2026-11-01-03-30-45-123456_cluster_id-1",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def place(placement: Placement) -> tuple[int, int, int | None, int | None]:
    return (
        placement.rank,
        placement.world_size,
        placement.local_rank,
        placement.local_world_size,
    )


def test_nothing_set_is_a_world_of_one() -> None:
    assert read_placement({"PATH": "/bin"}) == Placement(0, 1, 0, 1, None, "no launcher")


def test_empty_values_count_as_not_set() -> None:
    assert read_placement(dict.fromkeys(TORCHRUN, "")).world_size == 1


def test_torchrun() -> None:
    placement = read_placement(TORCHRUN)
    assert place(placement) == (2, 4, 0, 2)
    assert placement.rendezvous == Rendezvous("node1", 29500)


def test_local_variables_are_optional() -> None:
    bare = {name: value for name, value in TORCHRUN.items() if "LOCAL" not in name}
    assert place(read_placement(bare)) == (2, 4, None, None)


def test_torchrun_wins_over_the_launcher_that_started_it() -> None:
    assert place(read_placement({**OPEN_MPI, **SRUN, **TORCHRUN})) == (2, 4, 0, 2)


@pytest.mark.parametrize(
    ("launcher", "local_size"),
    [(MVAPICH, 2), (FLUX, None), (JSRUN, 2), (PALS, 2), (HOROVODRUN, 2)],
    ids=["mvapich", "flux", "jsrun", "pals", "horovodrun"],
)
def test_launchers_of_one_host_meet_on_the_loopback(
    launcher: dict[str, str], local_size: int | None
) -> None:
    placement = read_placement(launcher)
    assert place(placement) == (1, 2, 1, local_size)
    assert placement.rendezvous is not None
    assert placement.rendezvous.address == "127.0.0.1"
    assert placement.rendezvous.job
    again = {name: value.replace("1", "0") for name, value in launcher.items() if "RANK" in name}
    again |= {name: "0" for name in launcher if name == "FLUX_TASK_LOCAL_ID"}
    other_rank = read_placement({**launcher, **again})
    assert (other_rank.rank, other_rank.rendezvous) == (0, placement.rendezvous)


def test_skypilot_is_a_process_on_each_node() -> None:
    placement = read_placement(SKYPILOT)
    assert place(placement) == (1, 2, None, None)
    assert placement.rendezvous is not None
    assert placement.rendezvous.address == "10.0.0.4"
    # Older versions give the addresses alone.
    older = {name: value for name, value in SKYPILOT.items() if name != "SKYPILOT_NUM_NODES"}
    assert read_placement(older) == placement
    alone = {**SKYPILOT, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4"}
    assert place(read_placement({**alone, "SKYPILOT_NUM_NODES": "1"})) == (0, 1, 0, 1)


def test_kubeflow_is_a_process_on_each_node() -> None:
    placement = read_placement(KUBEFLOW)
    assert place(placement) == (1, 2, None, None)
    assert placement.rendezvous == Rendezvous("job-node-0-0.job", 29400)
    defaults = {
        n: v for n, v in KUBEFLOW.items() if n not in ("PET_NPROC_PER_NODE", "PET_MASTER_PORT")
    }
    assert place(read_placement(defaults)) == (1, 2, None, None)
    assert read_placement(defaults).rendezvous == Rendezvous("job-node-0-0.job", 29500)
    # A task may call another launcher; torchrun reads these variables itself.
    assert place(read_placement({**KUBEFLOW, **TORCHRUN})) == (2, 4, 0, 2)
    assert place(read_placement({**KUBEFLOW, **OPEN_MPI})) == (1, 2, 1, 2)
    for value in ("x", "0", "70000"):
        with pytest.raises(InvalidUsage, match=f"^PET_MASTER_PORT='?{value}'? is not valid"):
            read_placement({**KUBEFLOW, "PET_MASTER_PORT": value})
    with pytest.raises(InvalidUsage, match="PET_NODE_RANK=2 and PET_NNODES=2"):
        read_placement({**KUBEFLOW, "PET_NODE_RANK": "2"})


@pytest.mark.parametrize("launcher", [MVAPICH, FLUX, HOROVODRUN], ids=["mvapich", "flux", "hvd"])
def test_launchers_of_several_hosts_ask_for_a_meeting_place(launcher: dict[str, str]) -> None:
    names = [name for name in launcher if name.endswith("_SIZE") and "LOCAL" not in name]
    hosts = {"FLUX_JOB_NNODES": "2"} if launcher is FLUX else {}
    with pytest.raises(InvalidUsage, match="Set MASTER_ADDR"):
        read_placement({**launcher, **dict.fromkeys(names, "4"), **hosts})


def test_a_world_of_one_needs_no_meeting_place() -> None:
    assert read_placement({"RANK": "0", "WORLD_SIZE": "1"}).rendezvous is None


@pytest.mark.parametrize("launcher", [TORCHRUN, OPEN_MPI, SRUN, {"PMIX_RANK": "3"}])
def test_rank_0_of_1_is_alone_under_any_launcher(launcher: dict[str, str]) -> None:
    alone = read_placement({**launcher, "RANK": "0", "WORLD_SIZE": "1"})
    assert alone == Placement(0, 1, 0, 1, None, "torchrun's variables")


def test_open_mpi() -> None:
    placement = read_placement(OPEN_MPI)
    assert place(placement) == (1, 2, 1, 2)
    assert placement.rendezvous is not None
    assert placement.rendezvous.address == "127.0.0.1"
    assert 1024 < placement.rendezvous.port < 32768


def test_intel_mpi() -> None:
    assert place(read_placement(INTEL_MPI)) == (1, 2, 1, 2)


def test_ranks_of_a_job_meet_and_jobs_do_not() -> None:
    here = read_placement(OPEN_MPI).rendezvous
    other_rank = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    other_job = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-9426@1"}
    assert read_placement(other_rank).rendezvous == here
    assert read_placement(other_job).rendezvous != here


def test_a_given_meeting_place_is_taken() -> None:
    given = {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
    for launcher in (OPEN_MPI, INTEL_MPI, SRUN):
        rendezvous = read_placement({**launcher, **given}).rendezvous
        assert rendezvous == Rendezvous("node7", 1234)


def test_hydra_without_a_job_id_asks_for_a_meeting_place() -> None:
    mpich = {name: value for name, value in INTEL_MPI.items() if "UUID" not in name}
    with pytest.raises(InvalidUsage, match="Set MASTER_PORT"):
        read_placement(mpich)


def test_mpirun_on_several_hosts_asks_for_a_meeting_place() -> None:
    with pytest.raises(InvalidUsage, match="Set MASTER_ADDR"):
        read_placement({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})


def test_srun() -> None:
    placement = read_placement(SRUN)
    assert place(placement) == (3, 4, 1, None)
    assert placement.rendezvous is not None
    assert placement.rendezvous.address == "gpu03"
    assert placement.rendezvous.job == "slurm 77.0"


def test_srun_on_one_host_meets_on_the_loopback() -> None:
    rendezvous = read_placement({**SRUN, "SLURM_STEP_NUM_NODES": "1"}).rendezvous
    assert rendezvous is not None
    assert rendezvous.address == "127.0.0.1"


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # a shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_a_slurm_shell_is_no_rank(change: dict[str, str]) -> None:
    assert place(read_placement({**SRUN, **change})) == (0, 1, 0, 1)


def join_and_count() -> int:
    pydist.init()
    size = pydist.world_size()
    pydist.shutdown()
    return size


def test_a_plain_process_in_a_slurm_shell_warns_in_a_sentence() -> None:
    shell = {**NO_LAUNCHER, "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    (warned,) = rank_outcomes(join_and_count, 1, env=shell)
    assert warned.value == 1, warned.describe()
    assert warned.output.count("warning: job: SLURM_NTASKS=8 is set, but srun") == 1
    (meant,) = rank_outcomes(join_and_count, 1, env={**shell, "RANK": "0", "WORLD_SIZE": "1"})
    assert (meant.value, meant.output) == (1, ""), meant.describe()


def test_mpich_under_slurm_is_mpich() -> None:
    # Hydra starts its proxies by srun: the step's variables count hosts, not ranks.
    placement = read_placement({**SRUN, **INTEL_MPI})
    assert place(placement) == (1, 2, 1, 2)
    assert placement.launcher == "mpirun (MPICH or Intel MPI)"


def test_srun_with_a_pmi_plugin_is_srun() -> None:
    assert read_placement({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "srun"


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT missing"),
        ({"LOCAL_RANK": "1"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT missing"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE missing"),
        ({"PMI_RANK": "0"}, "PMI_SIZE missing"),
    ],
)
def test_half_a_job_names_what_is_missing(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(InvalidUsage, match=missing) as caught:
        read_placement(variables)
    assert all(name in str(caught.value) for name in variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "two"}, "RANK='two' is not valid"),
        ({"RANK": "-1"}, "RANK='-1' is not valid"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict"),
        ({"WORLD_SIZE": "0"}, "contradict"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not valid"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=4"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not valid"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not valid"),
    ],
)
def test_values_that_make_no_sense(change: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        read_placement({**TORCHRUN, **change})


def test_a_port_without_an_address_is_checked_too() -> None:
    with pytest.raises(InvalidUsage, match="MASTER_PORT=70000 is not valid"):
        read_placement({**SRUN, "MASTER_PORT": "70000"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-07,12],gpu1", "node03"),
        ("rack[2-3]n[10,11]-ib", "rack2n10-ib"),
        ("a[1]", "a1"),
    ],
)
def test_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


def sum_under(launcher: str, job: str) -> tuple[float, int]:
    """Joins by the variables that a launcher of two ranks sets, instead of torchrun's."""
    rank = os.environ["RANK"]
    for name in [name for name in os.environ if name.startswith(TORCHRUNS)]:
        del os.environ[name]
    variables = {
        "open mpi": {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": job,
        },
        "intel mpi": {
            "PMI_RANK": rank,
            "MPI_LOCALRANKID": rank,
            "PMI_SIZE": "2",
            "MPI_LOCALNRANKS": "2",
            "I_MPI_HYDRA_UUID": job,
        },
        "srun": {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
        },
    }
    os.environ.update(variables[launcher])
    pydist.init(timeout=30)
    assert pydist.local_rank() == pydist.rank() == int(rank)
    assert pydist.local_world_size() == 2
    total = torch.tensor([float(pydist.rank())])
    pydist.all_reduce(total)
    size = pydist.world_size()
    pydist.shutdown()
    return float(total), size


@pytest.mark.parametrize("launcher", ["open mpi", "intel mpi", "srun"])
def test_ranks_find_each_other_by_a_launchers_variables_alone(launcher: str) -> None:
    job = f"job-{os.getpid()}-{time.monotonic_ns()}"
    assert run_ranks(sum_under, 2, launcher, job) == [(1.0, 2)] * 2


def test_a_folder_within_a_folder_logs_under_the_name_of_the_outer_one() -> None:
    path = Path(pydist.__file__).parent / "job" / "recovery" / "survivors.py"
    record = logging.LogRecord("pydist", logging.WARNING, str(path), 1, "text", None, None)
    assert "warning: job: text" in log._LikeTheEngine().format(record)
