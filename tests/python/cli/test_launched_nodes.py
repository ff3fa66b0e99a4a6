"""`pydist run` that srun, say, has started on each node. tests/hosts has real ones."""

import argparse
import os
import re
from collections.abc import Mapping

import pytest
from launch import clean_environment

from pydist.cli.launched_nodes import take_nodes_of_launcher

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "localhost,node04",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_TASK_ID": "sky-7",
}


def taken(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    options = argparse.Namespace(nnodes="1", node_rank=0, master_addr="127.0.0.1", master_port=None)
    monkeypatch.setattr(os, "environ", {**clean_environment(), **variables})
    take_nodes_of_launcher(options)
    return options


@pytest.mark.parametrize(
    ("variables", "address"), [(SRUN, "localhost"), (SKYPILOT, "10.0.0.4")], ids=["srun", "sky"]
)
def test_each_process_of_a_launcher_is_a_node(
    variables: dict[str, str],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = taken(variables, monkeypatch)
    assert (options.nnodes, options.node_rank, options.master_addr) == ("2", 1, address)
    assert capsys.readouterr().err == ""
    first = {name: "0" for name in variables if name.endswith(("PROCID", "NODE_RANK"))}
    assert taken({**variables, **first}, monkeypatch).master_port == options.master_port
    assert 1024 < options.master_port < 32768
    said = f"node 0 of 2, as .* waits for the others at {address}:{options.master_port}\n"
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # The batch script itself, and a shell of salloc.
        {**SRUN, "SLURM_STEP_ID": ""},
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
        # srun --pty bash, for one process and for several.
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "35427"},
        # A rank of a job under srun begins another one.
        {**SRUN, "RANK": "1", "WORLD_SIZE": "2"},
        {**SRUN, "TORCHELASTIC_RUN_ID": "none"},
        # Where rank 0 is can't be told.
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
    ids=["none", "batch", "salloc", "pty", "pty of 2", "rank", "torchrun", "mpirun"],
)
def test_all_else_is_a_job_of_its_own(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = taken(variables, monkeypatch)
    assert (options.nnodes, options.node_rank, options.master_port) == ("1", 0, None)
