"""What makes the workers of Ray Train join one job of pydist."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.train.torch import TorchConfig

from pydist.config.variables import default_timeout, parse_timeout
from pydist.errors import InvalidUsage
from pydist.job.backends import register

# Ray's class that starts a process group on the workers.
_TorchBackend: Any = TorchConfig(backend="gloo").backend_cls


class _PydistBackend(_TorchBackend):
    """Lets every worker know of backend "pydist" before Ray makes the process group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        # It travels by its name, so a worker imports pydist to find it.
        worker_group.execute(register)
        super().on_start(worker_group, backend_config)


@dataclass
class PydistConfig(TorchConfig):
    """What `TorchTrainer(torch_config=)` takes to train on pydist.

    The workers' default process group is on backend "pydist". Which engine of pydist that is,
    PYDIST_BACKEND says in the workers' environment, as
    `ray.init(runtime_env={"env_vars": {"PYDIST_BACKEND": "native"}})` sets it.

    Args:
        backend: "pydist", and nothing else.
        init_method: "env" or "tcp", as for Ray's `TorchConfig`.
        timeout_s: Seconds that joining, and later each operation, may take; by default the value of
            PYDIST_TIMEOUT where this object is made, and 600 without one.

    Raises:
        InvalidUsage: The backend is another one, the method is unknown, or the time-out is no
            positive number of seconds.
    """

    backend: str = "pydist"
    timeout_s: float = field(default_factory=lambda: default_timeout().total_seconds())

    def __post_init__(self) -> None:
        if self.backend != "pydist":
            raise InvalidUsage(
                f"PydistConfig(backend={self.backend!r}) is not possible: the workers' process "
                "group is pydist's own. Leave it out, and choose what pydist runs on by "
                "PYDIST_BACKEND=native, gloo or nccl in the workers' environment; or give "
                "TorchTrainer Ray's TorchConfig for a group of torch's."
            )
        if self.init_method not in ("env", "tcp"):
            raise InvalidUsage(
                f"PydistConfig(init_method={self.init_method!r}) is unknown: it must be 'env' or "
                "'tcp'."
            )
        parse_timeout(self.timeout_s)

    @property
    def backend_cls(self) -> type:
        """The class by which Ray starts and ends the workers' process group."""
        return _PydistBackend
