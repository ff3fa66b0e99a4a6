"""The name of this machine's processor."""

import platform
from contextlib import suppress
from pathlib import Path


def processor_name() -> str:
    """The processor's name, as the system gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
