"""The command `pydist`.

A subcommand is a module of this package with a function `main(arguments) -> exit status`; it is
imported only when it is called. Bad usage ends with status 2 and one line that says what is wrong.
"""

import importlib
import sys
from collections.abc import Sequence

from pydist import __version__
from pydist.errors import Error

__all__ = ["main"]

# Name, module and one line for the help.
_COMMANDS = {
    "run": ("pydist.cli.run", "run a script on several processes, as torchrun does"),
    "bench": ("pydist.cli.bench", "measure collectives, training steps and starting up"),
    "plan": ("pydist.cli.plan", "the bytes that training a model takes on each rank"),
    "view": ("pydist.cli.view", "a page over the runs that pydist.monitor has written"),
    "doctor": ("pydist.cli.doctor", "what would go wrong on this machine, or between the ranks"),
    "info": ("pydist.cli.info", "what pydist finds on this machine, and what it can use"),
}


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: pydist <command> [arguments]",
            "",
            *lines,
            "",
            "`pydist <command> --help` says more; `pydist --version` prints the version.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: what follows the command's name; by default that of this process.

    Returns:
        The exit status: 0, 2 for bad usage, or the subcommand's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"pydist {__version__}")
        return 0
    if given[0] not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        print(f"pydist: no command '{given[0]}'; use one of: {known}.", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(_COMMANDS[given[0]][0])
        status: int = module.main(given[1:])
    except KeyboardInterrupt:
        return 130
    except Error as error:
        print(f"pydist {given[0]}: {error}", file=sys.stderr)
        return 2
    return status
