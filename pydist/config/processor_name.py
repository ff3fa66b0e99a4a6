"""The name of this machine's processor."""

import platform
from contextlib import suppress
from functools import cache


@cache
def processor_name() -> str:
    """The processor's name, as the system gives it."""
    # Stops at the name: for each further processor the kernel has to ask that one.
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
