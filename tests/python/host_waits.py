"""How often the host waits for the GPU while it does something, with the name of each call.

On a GPU CUPTI tells it to torch's profiler, of CUDA's runtime: what pydist's engine asks of the
driver is not among that. The stand-in counts what stops the thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import fake_cuda
import gpu_ranks
import torch

# torch's copies from or to ordinary memory end with the first.
_WAITING_CALLS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
)


def host_waits_of(act: Callable[[], object]) -> list[str]:
    """The names of the calls, on a GPU sorted. What was under way before is waited for first."""
    gpu_ranks.synchronize()
    if not gpu_ranks.IS_REAL:
        fake_cuda.take_host_waits()
        act()
        return fake_cuda.take_host_waits()
    _profiled(lambda: None)  # a first one takes what others do not
    seen = _profiled(lambda: float(torch.ones((), device="cuda")))
    assert any(seen.values()), "the profiler tells of no wait of the host: it has no CUPTI here"
    # Leaving the profiler waits for the GPU by itself.
    left = _profiled(lambda: None)
    found = _profiled(act)
    return [name for name in _WAITING_CALLS for _ in range(found[name] - left[name])]


def _profiled(act: Callable[[], object]) -> dict[str, int]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        act()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {name: counts.get(name, 0) for name in _WAITING_CALLS}
