"""Signs of other processes, whose ranks nobody can tell: errors, and sentences of warning."""

import pytest
from test_environment import KUBEFLOW, SRUN, place

from pydist.errors import InvalidUsage
from pydist.job.launchers import read_placement


@pytest.mark.parametrize(
    "signs",
    [
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-a-1@1"},
        {"PALS_RANKID": "0"},
        {"ALPS_APP_PE": "0"},
        {"MPIRUN_RANK": "0", "MPIRUN_NPROCS": "2"},
        {"MP_CHILD": "1"},
        {"FLUX_TASK_RANK": "0"},
        {"JSM_NAMESPACE_RANK": "0"},
        {"HOROVOD_RANK": "0"},
        {"SKYPILOT_NODE_RANK": "0"},
        {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_NUM_NODES": "2"},
        {"SM_HOSTS": '["algo-1", "algo-2"]'},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"MV2_COMM_WORLD_LOCAL_RANK": "0"},
        {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        {"PMI_LOCAL_RANK": "1"},
        {"LSF_PM_TASKID": "1"},
        {"PMI_ID": "0", "PMI_SIZE": "2"},
        {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2"},
        {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"},
        {"MLP_ROLE_INDEX": "0", "MLP_WORKER_NUM": "2"},
        {**KUBEFLOW, "PET_NPROC_PER_NODE": "2"},
        {**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"},
        {**KUBEFLOW, "PET_NNODES": "1:2"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
        {"PET_NNODES": "1:4"},
        {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"},
        {"NODE_RANK": "1", "MASTER_ADDR": "a"},
        {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "a"},
        {"PET_NNODES": "many"},
    ],
    ids=lambda signs: next(iter(signs)),
)
def test_signs_of_other_processes_are_refused_by_name(signs: dict[str, str]) -> None:
    variable = next(iter(signs))
    with pytest.raises(InvalidUsage, match=variable) as caught:
        read_placement(signs)
    assert "If this process is to train alone, set RANK=0 WORLD_SIZE=1." in str(caught.value)
    assert "torchrun" in str(caught.value)
    assert "pydist run" in str(caught.value)
    alone = read_placement({**signs, "RANK": "0", "WORLD_SIZE": "1"})
    assert place(alone) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    "signs",
    [
        {"MPIRUN_RANK": "0", "MPIRUN_NPROCS": "1"},
        {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_NUM_NODES": "1"},
        {"SM_HOSTS": '["algo-1"]'},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"},
        {"PET_NNODES": "1:1"},
        {"PET_NODE_RANK": "0"},
        {"NODE_RANK": "0", "NNODES": "1"},
        {"PET_MASTER_ADDR": "a"},
        {"MASTER_ADDR": "127.0.0.1"},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "-1"},
        # One task of srun, with the PMIx plugin.
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},
    ],
    ids=lambda signs: " ".join(signs)[:40],
)
def test_evidently_one_process_is_a_world_of_one(signs: dict[str, str]) -> None:
    placement = read_placement(signs)
    assert place(placement) == (0, 1, 0, 1)
    assert placement.rendezvous is None
    assert placement.doubt == ""


@pytest.mark.parametrize(
    ("variables", "variable"),
    [
        ({**SRUN, "SLURM_STEP_ID": ""}, "SLURM_NTASKS=8"),
        ({"SLURM_JOB_ID": "77", "SLURM_NNODES": "4"}, "SLURM_NNODES=4"),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS_PER_NODE": "4"}, "SLURM_NTASKS_PER_NODE=4"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto"),
        ({"PET_RDZV_ENDPOINT": "node:29400"}, "PET_RDZV_ENDPOINT=node:29400"),
        ({"NNODES": "2"}, "NNODES=2"),
        ({"AZUREML_NODE_COUNT": "2"}, "AZUREML_NODE_COUNT=2"),
        ({"DMLC_NUM_WORKER": "4", "DMLC_ROLE": "worker"}, "DMLC_NUM_WORKER=4"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "TF_CONFIG={"),
        ({"TF_CONFIG": '{"cluster": "a:1"}'}, "TF_CONFIG={"),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3"),
        ({"VC_TASK_INDEX": "0"}, "VC_TASK_INDEX=0"),
        ({"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "3"}, "BATCH_TASK_INDEX=0"),
    ],
)
def test_planned_processes_that_nobody_started_are_a_doubt(
    variables: dict[str, str], variable: str
) -> None:
    placement = read_placement(variables)
    assert place(placement) == (0, 1, 0, 1)
    assert variable in placement.doubt
    assert read_placement({**variables, "RANK": "0", "WORLD_SIZE": "1"}).doubt == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"NNODES": "1"},
        {"TF_CONFIG": '{"cluster": {"chief": ["a:1"]}}'},
        {"TF_CONFIG": "{}"},
        {"DMLC_NUM_WORKER": "1"},
        {"AZUREML_NODE_COUNT": "1"},
    ],
)
def test_a_plan_for_one_process_is_no_doubt(variables: dict[str, str]) -> None:
    assert read_placement(variables).doubt == ""
