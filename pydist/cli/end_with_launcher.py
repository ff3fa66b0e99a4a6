"""What `pydist run` does so that nothing that it has started outlives it."""

import argparse
import os
import signal
import sys

from pydist.job.tied_start import tied


def tie(options: argparse.Namespace) -> None:
    """Lets torchrun's options start processes that the kernel ends with this process.

    Args:
        options: torchrun's, parsed; they are changed to start the same by way of a small program.
            Not where they name a file that torch runs in processes that it forks (`--run-path`):
            those it ties itself. What such a process starts in turn, the rank below a shell say,
            ends by `pydist.job.processes.end_with_torchrun`.
    """
    if options.run_path or (options.no_python and options.module):
        return
    command = [options.training_script, *options.training_script_args]
    by_this_python = False
    if not options.no_python:
        command = ["-u", *(["-m"] if options.module else []), *command]
        # torch names a failed job after the first argument that is no flag: the script, unless the
        # interpreter is another one than this.
        if (python := os.environ.get("PYTHON_EXEC", sys.executable)) != sys.executable:
            command.insert(0, python)
        else:
            by_this_python = True
    options.no_python, options.module = True, False
    options.training_script = sys.executable
    options.training_script_args = tied(command, by_this_python=by_this_python)


def signals_to_handle() -> str:
    """The signals by which the launcher is told to end, for TORCHELASTIC_SIGNALS_TO_HANDLE.

    Without those that this process was started to ignore: by `nohup`, so that it goes on when its
    shell ends, or by a shell that started it in the background.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return ",".join(n.name for n in numbers if signal.getsignal(n) is not signal.SIG_IGN)
