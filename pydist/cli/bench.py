"""`pydist bench`: micro-benchmarks of the collectives, of a training step and of starting up."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from pydist.benchmarks import collectives, startup, tune
from pydist.benchmarks.collective_cases import COLLECTIVES
from pydist.benchmarks.interruption import INTERRUPTED, interruptible
from pydist.benchmarks.steps import overlap, sharded, step
from pydist.cli.parser import Parser
from pydist.errors import Error, InvalidUsage


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pydist bench",
        description="Micro-benchmarks. Under torchrun and other launchers: on the ranks it finds.",
    )
    commands = parser.add_subparsers(dest="collective", required=True, metavar="WHAT")
    for name in (*COLLECTIVES, "all"):
        text = "every collective in turn" if name == "all" else f"{name} by size"
        command = commands.add_parser(
            name, help=text, description=f"{text}, with nccl-tests' flags and columns."
        )
        collectives.add_arguments(command)
        command.set_defaults(run=collectives.main)
    for name, module, text in (
        ("step", step, "training steps beside torch's DDP: time, memory, starting up"),
        ("sharded", sharded, "steps with a sharded optimizer beside torch's ZeRO"),
        ("overlap", overlap, "how well backward hides a slow link"),
        ("startup", startup, "importing pydist and joining a job, by number of ranks"),
        ("tune", tune, "the native engine's limits for these ranks, as a configuration"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs a benchmark.

    Args:
        arguments: what is measured, and its flags.

    Returns:
        0; 1 where a result was wrong or a rank failed; 130 when interrupted.

    Raises:
        InvalidUsage: the arguments make no sense; nothing was measured.
    """
    options = _parser().parse_args(list(arguments))
    options.flags = shlex.join(list(arguments)[1:])
    try:
        with interruptible():
            status: int = options.run(options)
    except InvalidUsage:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except Error as error:
        print(f"pydist bench: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whoever read the output has seen enough
            print(f"pydist bench: can't write the output: {error.strerror}", file=sys.stderr)
        # Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
