"""`pydist info`: what pydist finds on this machine, and what it can use."""

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from pydist import _build, _native
from pydist.benchmarks.machine import free_in_dev_shm
from pydist.benchmarks.sizes import size_text
from pydist.cli.parser import Parser
from pydist.cli.topology import show_topology
from pydist.cli.tuning import show_tuning
from pydist.config import in_force
from pydist.config.fields import ENGINE
from pydist.config.processor_name import processor_name
from pydist.config.variables import unknown_variables
from pydist.errors import Error, InvalidUsage
from pydist.gpu.nccl import find_nccl
from pydist.job.gloo_factory import gloo_factory
from pydist.job.launchers import read_placement
from pydist.job.meeting.gloo_network import GlooNetwork
from pydist.job.meeting.gpu_assignment import identify_gpus
from pydist.job.meeting.nccl_obstacles import why_no_nccl_here

__all__ = ["collect", "main"]

_PROBE_TIMEOUT_S = 10.0


def _versions() -> dict[str, str]:
    return {
        "pydist": _build.VERSION,
        "built for torch": _build.TORCH_VERSION,
        "built with": f"{_build.COMPILER}, {_build.BUILD_TYPE}"
        + (f", sanitize={_build.SANITIZE}" if _build.SANITIZE else ""),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "CUDA kernels": _cuda_kernels(),
        "Python": platform.python_version(),
        "numpy": numpy.__version__,
        "Linux": platform.release(),
    }


def _cuda_kernels() -> str:
    """For which architectures the kernel library has code: "75-real" is that of sm_75."""
    targets = _build.CUDA_TARGETS.split()
    if not targets:
        return "none: built without nvcc"
    real = [f"sm_{target.removesuffix('-real')}" for target in targets if target.endswith("-real")]
    return f"for {', '.join(real)} and later ones"


def _processor() -> dict[str, Any]:
    affinity = len(os.sched_getaffinity(0))
    return {
        "name": processor_name(),
        "architecture": platform.machine(),
        **_instruction_sets(),
        "cores": os.cpu_count(),
        "cores this process may use": affinity,
        "cgroup quota in cores": _native.processor_quota(),
        "threads of torch": torch.get_num_threads(),
    }


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """What CUDA shows to this process, in CUDA's numbering; where it shows nothing, why."""
    identities, problem = identify_gpus()
    gpus = []
    for index, identity in enumerate(identities):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({"name": properties.name, "memory": properties.total_memory, **identity})
    return gpus, problem


def _nccl() -> dict[str, Any]:
    found = find_nccl()
    if found.problem:
        return {"version": None, "path": None, "problem": found.problem, "device_bytes": None}
    taken = _bytes_of_a_group(found.path)
    return {"version": found.version, "path": found.path, "problem": None, "device_bytes": taken}


def _bytes_of_a_group(library: str) -> int | None:
    """What a group of this process alone takes of its GPU; None where that can't be measured."""
    if why_no_nccl_here():
        return None
    try:
        host = _native.create_native(dist.HashStore(), 0, 1, "info")
        group = _native.create_nccl(host, 0, library)
    except Error:
        return None
    taken: int = group.capabilities()["device_bytes"]
    group.shutdown()
    host.shutdown()
    return taken


def _instruction_sets() -> dict[str, str]:
    try:
        usable = _native.usable_cpu_isas()
    except InvalidUsage:  # PYDIST_CPU_ISA, or another variable; reported by itself
        return {}
    return {
        "instruction sets usable": ", ".join(usable),
        "instruction set chosen": usable[-1],
    }


def _probe(create: Callable[[], _native.Communicator]) -> str:
    """An empty string if a world of one works on the backend, or why it does not."""
    try:
        communicator = create()
        communicator.all_reduce(torch.ones(1), torch.empty(1), "sum", False)
        communicator.shutdown()
    except Error as error:
        return str(error)
    except RuntimeError as error:  # torch's own, from gloo
        return str(error)
    return ""


def _backends() -> dict[str, str]:
    def gloo() -> _native.Communicator:
        return _native.create_gloo(
            dist.HashStore(),
            0,
            1,
            "info",
            _PROBE_TIMEOUT_S,
            gloo_factory(GlooNetwork(address="127.0.0.1")),
        )

    return {
        "native": _probe(lambda: _native.create_native(dist.HashStore(), 0, 1, "info")),
        "gloo": _probe(gloo),
        "nccl": why_no_nccl_here(),
    }


def _variables() -> list[dict[str, Any]]:
    names = ("name", "values", "default", "meaning", "value")
    return [dict(zip(names, variable, strict=True)) for variable in _native.environment_variables()]


def _configuration() -> tuple[list[dict[str, Any]], str]:
    """What is in force, with where it is from; or why it can't be said."""
    try:
        return [dataclasses.asdict(each) for each in in_force.settings()], ""
    except InvalidUsage as error:
        return [], str(error)


def _launcher() -> str:
    try:
        placement = read_placement()
    except InvalidUsage as error:
        return str(error)
    doubt = f" ({placement.doubt})" if placement.doubt else ""
    return f"{placement.launcher}: rank {placement.rank} of {placement.world_size}{doubt}"


def collect() -> dict[str, Any]:
    """Everything that `pydist info --json` prints."""
    problem = ""
    try:
        _native.read_environment()
    except InvalidUsage as error:
        problem = str(error)
    configuration, no_configuration = _configuration()
    gpus, no_gpu = _gpus()
    room, limited_by = _native.memory_room()
    return {
        "versions": _versions(),
        "processor": _processor(),
        "gpus": gpus,
        "no_gpu": no_gpu or None,
        "nccl": _nccl(),
        "memory": {
            "room for shared memory": room,
            "what limits it": limited_by,
            "free in /dev/shm": free_in_dev_shm(),
        },
        "backends": {
            name: {"usable": not why, "why_not": why or None} for name, why in _backends().items()
        },
        "launcher": _launcher(),
        "configuration": configuration,
        "variables": _variables(),
        "unknown_variables": [
            {"name": name, "nearest": nearest} for name, nearest in unknown_variables()
        ],
        "invalid_environment": problem or no_configuration or None,
    }


def _pairs(title: str, pairs: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, "none" if value is None else str(value))
    return table


def _print(report: dict[str, Any], console: Console) -> None:
    console.print(_pairs("Versions", report["versions"]))
    console.print(_pairs("\nProcessor", report["processor"]))
    gpus: dict[str, Any] = {
        str(index): f"{gpu['name']}, {size_text(gpu['memory'])}, {gpu['uuid']}, bus {gpu['pci']}"
        for index, gpu in enumerate(report["gpus"])
    }
    nccl = report["nccl"]
    gpus = gpus or {"none": report["no_gpu"]}
    gpus["NCCL"] = nccl["problem"] or f"{nccl['version']}, {nccl['path']}"
    taken = nccl["device_bytes"]
    gpus["a group on NCCL"] = (
        "unmeasured here" if taken is None else f"{size_text(taken)} of the GPU, with one rank"
    )
    console.print(_pairs("\nGPUs", gpus))
    memory = {
        name: size_text(value) if isinstance(value, int) else value
        for name, value in report["memory"].items()
    }
    console.print(_pairs("\nShared memory", memory))
    usable = {
        name: "usable" if state["usable"] else f"not usable: {state['why_not']}"
        for name, state in report["backends"].items()
    }
    console.print(_pairs("\nBackends (PYDIST_BACKEND)", usable))
    console.print(_pairs("\nLauncher", {"environment": report["launcher"]}))
    settings = [
        each
        for each in report["configuration"]
        if each["section"] != ENGINE or each["source"] != in_force.DEFAULT
    ]
    table = Table(
        title="\nConfiguration (PYDIST_CONFIG)", title_justify="left", box=None, pad_edge=False
    )
    for header in ("name", "value", "from"):
        table.add_column(header, overflow="fold", no_wrap=header == "name")
    for each in settings:
        is_default = each["source"] == in_force.DEFAULT
        name, value = f"{each['section']}.{each['name']}", json.dumps(each["value"])
        table.add_row(name, value, each["source"], style=None if is_default else "bold")
    console.print(table)
    table = Table(title="\nVariables", title_justify="left", box=None, pad_edge=False)
    for header in ("name", "value", "default", "values", "meaning"):
        table.add_column(header, overflow="fold", no_wrap=header == "name")
    for variable in report["variables"]:
        table.add_row(
            variable["name"],
            variable["value"] or "",
            variable["default"],
            variable["values"],
            variable["meaning"],
            style="bold" if variable["value"] else None,
        )
    console.print(table)
    for unknown in report["unknown_variables"]:
        console.print(
            f"{unknown['name']} is set, but there is no such variable; did you mean "
            f"{unknown['nearest']}?",
            style="red",
        )
    if report["invalid_environment"]:
        console.print(report["invalid_environment"], style="red")


def _parser() -> Parser:
    parser = Parser(
        prog="pydist info",
        description="Prints what pydist finds on this machine, and what it can use.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--tuning",
        action="store_true",
        help="instead: which ways of moving data earlier jobs have found to be fastest here, and "
        "what there is to choose from",
    )
    instead.add_argument(
        "--topology",
        action="store_true",
        help="instead: this host's processors, GPUs and network interfaces. Started on every rank "
        "by a launcher (`pydist run -n 2 -m pydist info --topology`): the hosts and ranks of the "
        "job, and what the links between hosts do, which takes some seconds",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints what pydist finds on this machine, or on those of a job.

    Args:
        arguments: nothing, or `--json`, `--topology` or `--tuning`, `--json` with one of these.

    Returns:
        0; 1 where the ranks of a job did not come together, or one of them failed.

    Raises:
        InvalidUsage: the arguments or the environment make no sense.
    """
    options = _parser().parse_args(list(arguments))
    if options.topology:
        return show_topology(as_json=options.json)
    if options.tuning:
        return show_tuning(as_json=options.json)
    report = collect()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        console = Console(highlight=False, markup=False)
        _print(report, console)
    return 0
