"""The GPUs of this host and what runs on them, from NVML or nvidia-smi.

Asks the driver without starting CUDA. `pynvml` serves where it is installed, otherwise the program
nvidia-smi, which comes with the driver. Both number GPUs by their place on the bus.
"""

import importlib
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydist.errors import Error

_MAX_IDLE_BYTES = 2**30
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU of this host at one moment."""

    # Its place on the bus, which is CUDA's number with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    index: int
    uuid: str
    name: str
    # None where the driver does not say.
    used_bytes: int | None
    process_count: int

    @property
    def is_idle(self) -> bool:
        """No process computes on it, and (those of other containers don't show) little is used."""
        return self.process_count == 0 and (self.used_bytes or 0) <= _MAX_IDLE_BYTES

    @property
    def load(self) -> str:
        processes = f"{self.process_count} process{'' if self.process_count == 1 else 'es'}"
        if self.used_bytes is None:
            return processes
        return f"{processes}, {self.used_bytes / 2**30:.1f} GiB used"


def installed_gpus() -> list[InstalledGpu]:
    """Every GPU of this host, in the order of the bus.

    Raises:
        Error: neither pynvml nor nvidia-smi can tell; the message says what they said.
    """
    with suppress(ImportError):
        nvml: Any = importlib.import_module("pynvml")
        with suppress(nvml.NVMLError):
            return _from_nvml(nvml)
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Error(
            "there is no nvidia-smi on this host's PATH (nor the package nvidia-ml-py) to tell "
            "which GPUs are idle; name the GPUs instead."
        )
    return parse_nvidia_smi(
        _ask(program, "--query-gpu=index,uuid,name,memory.used"),
        _ask(program, "--query-compute-apps=gpu_uuid,pid"),
    )


def _from_nvml(nvml: Any) -> list[InstalledGpu]:
    nvml.nvmlInit()
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            used_bytes = None
            with suppress(nvml.NVMLError):  # not supported where host and GPU share memory
                used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            found.append(InstalledGpu(index, _text(uuid), _text(name), used_bytes, len(processes)))
        return found
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    # Old bindings return bytes.
    return value.decode() if isinstance(value, bytes) else value


def _ask(program: str, query: str) -> str:
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Error(f"nvidia-smi can't tell which GPUs are idle: {error}") from error
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())
        raise Error(f"nvidia-smi can't tell which GPUs are idle (status {done.returncode}): {said}")
    return done.stdout


def parse_nvidia_smi(gpus: str, processes: str) -> list[InstalledGpu]:
    """What nvidia-smi printed for the two queries, as records."""
    # The first column of a process is its GPU; a line of words says that there are none.
    where = [line.split(",")[0].strip() for line in processes.splitlines()]
    found = []
    for line in filter(str.strip, gpus.splitlines()):
        index, uuid, *name, used_mib = map(str.strip, line.split(","))
        used_bytes = int(used_mib) * 2**20 if used_mib.isdigit() else None
        found.append(InstalledGpu(int(index), uuid, ", ".join(name), used_bytes, where.count(uuid)))
    return sorted(found, key=lambda gpu: gpu.index)
