"""Tells torch of the backend "pydist" before anybody imports pydist.

torch calls `register` at the end of `import torch`, through the entry point `torch.backends`, so
`init_process_group("pydist")` works in programs that import torch alone. This module lies outside
of the package, since every module inside runs `pydist/__init__` first, which needs a torch that is
fully imported. TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it. From 2.14 on torch also
looks for "pydist" among the entry points `torch.distributed.backends` when a program names it.
"""

from typing import Any


def _create_process_group(options: Any, pg_options: Any = None) -> Any:
    """Makes a group's backend: imports pydist, whose own function does it."""
    from pydist.job.backends import create_process_group

    return create_process_group(options, pg_options)


def register() -> None:
    """Registers the backend. Imports nothing and never raises: `import torch` must go on."""
    try:
        from torch.distributed import Backend

        if not hasattr(Backend, "PYDIST"):
            Backend.register_backend(
                "pydist", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
            )
    except Exception:
        # A torch without torch.distributed, or one that we do not know: `import pydist` says more.
        return
