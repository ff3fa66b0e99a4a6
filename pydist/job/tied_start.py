"""Commands for processes that the kernel ends with the one that starts them."""

import os
from collections.abc import Sequence

# What a process does before it becomes the command's: it asks the kernel to end it with the thread
# that has started it. A program that is killed tidies up nothing.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != {parent}: sys.exit(1)
command = {interpreter} + sys.argv[1:]
try: os.execvp(command[0], command)
except OSError as error: sys.exit(command[0] + ": " + str(error))
"""


def tied(command: Sequence[str], *, by_this_python: bool) -> list[str]:
    """The arguments of `sys.executable` by which it runs a command, and ends with this process.

    To be started by the main thread, whose end counts as that of the process.

    Args:
        command: The program with its arguments.
        by_this_python: Whether it is this interpreter that runs it, so that the program is left out
            of `command`.
    """
    interpreter = "[sys.executable]" if by_this_python else "[]"
    program = _TIE.format(parent=os.getpid(), interpreter=interpreter)
    return ["-I", "-S", f"-c{program}", *command]
