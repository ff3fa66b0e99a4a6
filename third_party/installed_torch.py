"""The torch beside the interpreter of a build: run by CMake, and imported by the build backend.

torch is not imported for it: reading torch/version.py is quick, and works on a wheel whose CUDA
libraries this machine lacks.
"""

import importlib.util
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def installed_torch() -> tuple[Path, str] | None:
    """The folder and the version of torch; None where it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    return root, runpy.run_path(str(root / "version.py"))["__version__"]


class WheelMetadata:
    """What a wheel requires beyond pyproject.toml: the torch minor that it is compiled against."""

    def build_state(self, state: str) -> None:
        """Called first: whether the backend makes a wheel, or an archive of the sources."""
        self._is_wheel = state != "sdist"

    def dynamic_metadata(
        self, _settings: Mapping[str, Any], _project: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Adds nothing where there is no torch: CMake says then what to do."""
        torch = installed_torch() if self._is_wheel else None
        if torch is None:
            return {}
        minor = ".".join(torch[1].split(".")[:2])
        return {"dependencies": [f"torch=={minor}.*"]}

    def dynamic_wheel(self, _settings: Mapping[str, Any]) -> dict[str, bool]:
        """Wheels made from the same sources differ in this field."""
        return {"dependencies": True}


if __name__ == "__main__":
    if torch := installed_torch():
        print(*torch, sep=";")
