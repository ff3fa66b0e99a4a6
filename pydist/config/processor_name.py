"""The name of this machine's processor."""

import platform
from contextlib import suppress


def processor_name() -> str:
    """The processor's name, as the system gives it."""
    # Not the whole file, for which the system asks each processor about its state.
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
