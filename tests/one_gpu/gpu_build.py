"""What a part runs in: a virtual environment over the Python that has torch, with pydist in it.

Nothing is downloaded. The environment finds what that Python has; what else it needs comes from a
folder of wheels.
"""

import os
import shlex
import sys
import venv
from pathlib import Path


def make_environment(folder: Path) -> dict[str, str]:
    """Makes the virtual environment; returns the variables of commands that run in it."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, symlinks=True)
        # venv has an option for that, but it passes over a Python that is in an environment itself.
        ours = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        theirs = [path for path in sys.path if path.endswith("-packages")]
        (ours / "of_the_python_with_torch.pth").write_text("\n".join(theirs) + "\n")
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "PYTHONUNBUFFERED": "1",
    }


def build_commands(folder: Path, wheels: Path) -> list[str]:
    """What shows the Python, and builds pydist for this GPU where it has not done so before."""
    architecture = (
        'import torch; print("".join(map(str, torch.cuda.get_device_capability()))'
        ' if torch.cuda.is_available() else "75")'
    )
    install = "python -m pip --disable-pip-version-check install --quiet --no-index --no-deps"
    commands = [
        "python tests/one_gpu/show_python.py",
        f"{install} --no-build-isolation -C build-dir={shlex.quote(str(folder))} "
        f"-C cmake.define.PYDIST_CUDA_ARCHITECTURES=$(python -c '{architecture}') --editable .",
    ]
    if found := sorted(wheels.glob("*.whl")):
        commands.insert(0, f"{install} {shlex.join(map(str, found))}")
    # torch loads the backends that it finds installed, and a pydist of earlier may not be whole.
    return [f"export TORCH_DEVICE_BACKEND_AUTOLOAD=0; {command}" for command in commands]
