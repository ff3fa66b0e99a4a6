"""Says which Python, torch and GPU the steps run with; exits with 1 where something is missing."""

import importlib.util
import sys

# What building and testing import.
NEEDED = (
    *("torch", "numpy", "rich", "pip", "cmake", "ninja", "scikit_build_core"),
    *("pytest", "pytest_timeout", "xdist", "hypothesis", "psutil"),
)

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} finds no {', '.join(missing)}: see docs/gpu.md")

import torch  # noqa: E402  (missing modules are named first)

gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {gpu}")
