"""`pydist run`: torch's elastic launcher, under a shorter name.

Every flag of torchrun is torchrun's own. Ours are `--gpus` and `--on-failure`, `-H` and what goes
with it (run_on_hosts.py), and two habits: `-n` for `--nproc-per-node`, and `--standalone` unless
the flags (or their PET_* variables) describe a job of several hosts or a meeting place.
"""

import argparse
import os
import re
import secrets
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from pydist.cli.end_with_launcher import signals_to_handle, tie
from pydist.cli.host_flags import add_host_flags
from pydist.cli.launched_nodes import take_nodes_of_launcher
from pydist.config import in_force
from pydist.errors import Error
from pydist.gpu.selection import choose_gpus, from_command_line, gpu_variables, process_count


class _UsageError(Exception):
    pass


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = "pydist run"
    parser.description = (
        "Runs a script on several processes. -n N starts N of them on this host, --gpus one for "
        "each GPU chosen; all other flags are torchrun's."
    )
    parser.add_argument("-n", dest="nproc_per_node", metavar="N", default=argparse.SUPPRESS)
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        help="the GPUs of each host to use, a process for each: 2 (the first two), 0,2 (these), 0, "
        "(the first), -1 (all), auto:2 (two on which nothing runs), or 0 (none: on the CPU). Sets "
        "CUDA_VISIBLE_DEVICES for the processes; numbers count among the GPUs that it shows now",
    )
    parser.add_argument(
        "--on-failure",
        choices=("stop", "continue"),
        default="stop",
        help="what becomes of the other ranks when one has failed: stop ends them (or starts all "
        "again, with --max-restarts), continue lets them go on (pydist.reform), on one host",
    )
    add_host_flags(parser)
    # To tell who said so, or nobody; torchrun's own default is its variable's value, or 1.
    parser.set_defaults(nproc_per_node=None)
    if "PET_SIGNALS_TO_HANDLE" not in os.environ:
        parser.set_defaults(signals_to_handle=signals_to_handle())
    if "PET_MASTER_PORT" not in os.environ:
        # Older versions of torchrun have a default here, which would look like a wish.
        parser.set_defaults(master_port=None)

    def error(message: str) -> NoReturn:
        raise _UsageError(f"{message} (`pydist run --help` lists the flags)")

    parser.error = error  # type: ignore[method-assign]
    # What begins as a negative number is a value, so that --gpus -1, gets an answer of its own.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    return parser


def _describes_a_meeting(options: argparse.Namespace) -> bool:
    return bool(
        options.nnodes not in ("1", "1:1")
        or options.rdzv_backend != "static"
        or options.rdzv_endpoint
        or options.node_rank != 0
        or options.master_addr != "127.0.0.1"
        or options.master_port is not None
    )


def _describes_hosts(options: argparse.Namespace) -> bool:
    return bool(
        options.standalone
        or options.nnodes not in ("1", "1:1")
        or options.rdzv_backend != "static"
        or options.rdzv_endpoint
        or options.node_rank != 0
    )


def _check_continuing(options: argparse.Namespace) -> None:
    """Refuses what a launcher that spares survivors can't do."""
    if _describes_a_meeting(options):
        raise _UsageError(
            "--on-failure=continue is for ranks of one host, which meet at the launcher: leave out "
            "--nnodes, --node-rank, --master-* and --rdzv-*"
        )
    if options.max_restarts > 0:
        raise _UsageError(
            "--on-failure=continue lets survivors go on, --max-restarts starts all ranks again: "
            "give one of them"
        )
    if options.run_path:
        raise _UsageError("--on-failure=continue can't be had with --run-path")


def _check_script(options: argparse.Namespace) -> None:
    script = options.training_script
    if options.no_python:
        if shutil.which(script) is None:
            raise _UsageError(f"no such program: {script}")
    elif options.module:
        try:
            found = find_spec(script) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise _UsageError(f"no such module: {script}")
    elif not Path(script).is_file():
        hint = ""
        if not script.endswith(".py") and Path(script).with_suffix(".py").is_file():
            hint = f"; did you mean {Path(script).with_suffix('.py')}?"
        elif script.startswith("-") or not script.endswith(".py"):
            hint = "; the first argument that is no flag must be the script (-m for a module)"
        raise _UsageError(f"no such script: {script}{hint}")


def _processes(options: argparse.Namespace) -> int:
    """How many processes to start on this host; lets them see the GPUs chosen, and no others."""
    asked = options.nproc_per_node
    source = f"-n {asked}"
    if asked is None and (asked := os.environ.get("PET_NPROC_PER_NODE")) is not None:
        source = f"PET_NPROC_PER_NODE={asked}"
    chosen: tuple[str, ...] = ()
    if options.gpus is not None:
        chosen = choose_gpus(from_command_line(options.gpus), "--gpus ")
        os.environ.update(gpu_variables(chosen))
    try:
        count = None if asked is None else int(torchrun.determine_local_world_size(asked))
    except ValueError as error:
        raise _UsageError(f"{source}: {error}") from error
    if count is not None and count < 1:
        raise _UsageError(f"{source}: at least one process is needed")
    if chosen:
        count = process_count(chosen, count, f"--gpus {options.gpus}", source)
    options.nproc_per_node = str(1 if count is None else count)
    return int(options.nproc_per_node)


def main(arguments: Sequence[str]) -> int:
    """Runs a script on several processes.

    Args:
        arguments: torchrun's flags, `-n N`, `--gpus GPUS`, or `-np N -H HOSTS`; then the script,
            then the script's own arguments.

    Returns:
        0 when all processes ended well, 1 when one failed, 2 for bad usage.
    """
    # A module to be run may lie in the folder that the command is given in, as with `python -m`.
    sys.path.insert(0, os.getcwd())
    # The ranks read the configuration by themselves.
    in_force.leave_environment()
    try:
        options = _parser().parse_args(list(arguments))
        if options.hosts is not None or options.hostfile is not None:
            if _describes_hosts(options):
                raise _UsageError(
                    "-H and --hostfile say which hosts there are and in which order: leave out "
                    "--standalone, --nnodes, --node-rank and --rdzv-*"
                )
            if options.on_failure == "continue":
                raise _UsageError("--on-failure=continue is for ranks of one host: leave out -H")
            from pydist.cli.run_on_hosts import run_on_hosts  # not at import: few need it

            return run_on_hosts(options)
        if options.processes is not None:
            if options.nproc_per_node is not None:
                raise _UsageError("-np and -n say the same here: give one of them")
            options.nproc_per_node = str(options.processes)
        if not _describes_a_meeting(options):
            take_nodes_of_launcher(options)
    except (_UsageError, Error) as error:
        print(f"pydist run: {error}", file=sys.stderr)
        return 2
    return run_here(options)


def run_here(options: argparse.Namespace) -> int:
    """Runs a script on several processes of this host.

    Args:
        options: torchrun's and ours, parsed; they may describe a job of several hosts, of which
            this is one.

    Returns:
        0 when all processes ended well, 1 when one failed, 2 for bad usage.
    """
    try:
        _check_script(options)
        if options.on_failure == "continue":
            _check_continuing(options)
        count = _processes(options)
    except (_UsageError, Error) as error:
        print(f"pydist run: {error}", file=sys.stderr)
        return 2
    if not _describes_a_meeting(options):
        options.standalone = True
    elif options.master_port is None:
        options.master_port = torchrun.get_args_parser().get_default("master_port")
    if options.standalone:
        # Launchers on several hosts would each make up another one.
        os.environ.setdefault("PYDIST_JOB_SECRET", secrets.token_hex(32))
    if count > 1:
        # As torchrun sets it, without its banner.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    tie(options)
    if options.on_failure == "continue":
        from pydist.cli.continuing_run import run_and_continue  # not at import: few need it

        return run_and_continue(options, count)
    try:
        record(torchrun.run)(options)
    except ChildFailedError as error:
        print(f"pydist run: {error}", file=sys.stderr)
        return 1
    return 0
