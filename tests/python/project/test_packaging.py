"""The package as installed: versions, what loading it does, what it says when it cannot load."""

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from thorough import everyday

import pydist
from pydist import _build, _native

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_one_version_everywhere() -> None:
    declared = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)
    assert declared is not None
    assert pydist.__version__ == declared[1]
    assert declared[1] == _build.VERSION
    assert importlib.metadata.version("pydist") == declared[1]


def test_the_package_requires_the_torch_that_it_was_built_for() -> None:
    """And the range that pyproject.toml states holds it."""
    required = [r for r in importlib.metadata.requires("pydist") or [] if r.startswith("torch")]
    assert f"torch=={_build.TORCH_MINOR}.*" in required
    low, high = sorted(int(minor) for r in required for minor in re.findall(r"[<>]=?2\.(\d+)", r))
    assert low <= int(_build.TORCH_MINOR.split(".")[1]) < high
    assert _build.TORCH_VERSION.startswith(_build.TORCH_MINOR + ".")


@pytest.mark.parametrize(
    ("torch_version", "state", "added"),
    [
        ("2.12.1+cu130", "wheel", {"dependencies": ["torch==2.12.*"]}),
        ("2.12.1+cu130", "sdist", {}),
        (None, "wheel", {}),
    ],
)
def test_a_wheel_requires_the_torch_beside_its_build(
    tmp_path: Path, torch_version: str | None, state: str, added: dict[str, list[str]]
) -> None:
    code = (
        "import installed_torch; metadata = installed_torch.WheelMetadata();"
        f"metadata.build_state({state!r}); print(metadata.dynamic_metadata({{}}, {{}}))"
    )
    ended = subprocess.run(
        [fake_python(tmp_path, torch_version), "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "third_party")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == f"{added}\n", ended.stderr


@pytest.mark.parametrize(
    "version", everyday("2.99.1+cu130", thorough=("2.10.0", "3.0.0a0+git1234567"))
)
def test_another_torch_minor_is_named_at_import(version: str) -> None:
    ended = run_python(f"import torch; torch.__version__ = {version!r}; import pydist")
    assert ended.returncode == 1
    sentence = last_line(ended.stderr)
    assert sentence.startswith("ImportError: pydist ")
    assert f"built for torch {_build.TORCH_MINOR}" in sentence
    assert f"this is torch {version}" in sentence
    assert f"install torch {_build.TORCH_MINOR}.*" in sentence


def test_a_patch_release_of_the_same_minor_loads() -> None:
    code = f"import torch; torch.__version__ = '{_build.TORCH_MINOR}.77+cu130'; import pydist"
    assert run_python(code).returncode == 0


def test_the_kernel_library_lies_beside_the_module() -> None:
    library = Path(_native.__file__).with_name("libpydist_cuda.so")
    assert library.exists() == bool(_build.CUDA_TARGETS)


def hide(module: str) -> str:
    """Code after which `module` cannot be found."""
    return (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )


def test_a_source_tree_that_is_not_installed_says_so() -> None:
    ended = run_python(hide("pydist._build") + "import pydist")
    assert ended.returncode == 1
    assert last_line(ended.stderr).startswith("ImportError: pydist is not built: ")
    assert "pip install --no-build-isolation" in last_line(ended.stderr)


def test_a_module_for_another_python_is_named_at_import() -> None:
    ended = run_python(hide("pydist._native") + "import pydist")
    assert ended.returncode == 1
    sentence = last_line(ended.stderr)
    assert sentence.startswith(f"ImportError: pydist {_build.VERSION} was built for Python ")
    assert "rebuild" in sentence


USE = """
dist.init_process_group("pydist", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
print("used")
"""


def test_torch_knows_the_backend_before_the_import_of_pydist() -> None:
    ended = run_python(
        "import sys, torch\n"
        "import torch.distributed as dist\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] == 'pydist']\n"
        "assert not loaded, loaded\n"
        "assert dist.is_backend_available('pydist')\n"
        f"{USE}"
        "import pydist\n"
        f"{USE}"
    )
    assert ended.stdout == "used\nused\n", ended.stderr


def test_the_backend_is_the_same_where_pydist_comes_first() -> None:
    ended = run_python(f"import pydist\nimport torch, torch.distributed as dist\n{USE}")
    assert ended.stdout == "used\n", ended.stderr


def test_without_autoload_the_import_of_pydist_registers() -> None:
    ended = run_python(
        "import sys, torch, torch.distributed as dist\n"
        "assert '_pydist_backend' not in sys.modules\n"
        f"import pydist\n{USE}",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert ended.stdout == "used\n", ended.stderr


def test_a_pydist_that_cannot_load_does_not_break_torch() -> None:
    """The reason comes when the backend is used."""
    for broken in ("pydist", "pydist._native"):
        ended = run_python(
            f"{hide(broken)}import torch, torch.distributed as dist\n"
            "assert torch.ones(2).sum() == 2\n"
            "print('fine', flush=True)\n"
            f"{USE}"
        )
        assert ended.stdout == "fine\n"
        assert "used" not in ended.stdout
        assert last_line(ended.stderr).startswith(("ImportError: ", "ModuleNotFoundError: "))


# What `import torch` has registered is gone again: nothing has asked for it yet.
UNREGISTERED = (
    "import torch, _pydist_backend\n"
    "from torch.distributed import Backend\n"
    "registered = Backend.PYDIST\n"
    "del Backend.PYDIST\n"
    "Backend._plugins.pop('PYDIST')\n"
)


def test_a_torch_that_registers_otherwise_is_not_broken() -> None:
    ended = run_python(
        UNREGISTERED + "def refuse(*args, **kwargs): raise TypeError('another interface')\n"
        "Backend.register_backend = refuse\n"
        "_pydist_backend.register()\n"
        "print(registered)"
    )
    assert ended.stdout == "pydist\n", ended.stderr


def test_the_early_registration_costs_next_to_nothing() -> None:
    """It loads one module of a few lines, and nothing that torch has not loaded already."""
    ended = run_python(
        UNREGISTERED + "import sys, importlib\n"
        "before = set(sys.modules)\n"
        "del sys.modules['_pydist_backend']\n"
        "importlib.import_module('_pydist_backend').register()\n"
        "print(sorted(set(sys.modules) - before), Backend.PYDIST)"
    )
    assert ended.stdout == "[] pydist\n", ended.stderr


def test_import_starts_nothing() -> None:
    """No thread, socket, shared memory or process group comes from loading the package."""
    ended = run_python(
        "import os, torch, torch.distributed as dist\n"
        "def state():\n"
        "    links = []\n"
        "    for fd in os.listdir('/proc/self/fd'):\n"
        "        try: links.append(os.readlink(f'/proc/self/fd/{fd}'))\n"
        "        except OSError: pass\n"
        "    held = [x for x in links if x.startswith(('socket:', '/memfd:', 'anon_inode:'))]\n"
        "    maps = [x for x in open('/proc/self/maps') if '/dev/shm' in x or 'memfd' in x]\n"
        "    return len(os.listdir('/proc/self/task')), sorted(held), maps\n"
        "before = state()\n"
        "import pydist\n"
        "assert state() == before, (before, state())\n"
        "assert not dist.is_initialized()\n"
    )
    assert ended.returncode == 0, ended.stderr


def test_import_loads_no_heavy_module() -> None:
    """What only the command line and the examples need stays out of `import pydist`."""
    ended = run_python(
        "import sys, torch; before = set(sys.modules); import pydist\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "heavy = new & {'rich', 'typer', 'click', 'matplotlib', 'sklearn', 'pandas', 'scipy'}\n"
        "assert not heavy, heavy"
    )
    assert ended.returncode == 0, ended.stderr


def test_import_in_a_forked_child() -> None:
    """Data-loader workers fork, before or after the import."""
    ended = run_python(
        "import os, torch\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import pydist\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "import pydist\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import pydist._native\n"
        "    os._exit(8)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8\n"
    )
    assert ended.returncode == 0, ended.stderr


def test_every_public_name_exists() -> None:
    assert len(pydist.__all__) == len(set(pydist.__all__))
    for name in pydist.__all__:
        assert hasattr(pydist, name), name


def configure(
    folder: Path, *definitions: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *definitions],
        # cmake and ninja of the environment that runs the tests
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def sentence_of(ended: subprocess.CompletedProcess[str]) -> str:
    """CMake's error with its line breaks undone."""
    return " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("definitions", "sentence"),
    [
        (
            ["-DPYDIST_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND", "-DPYDIST_NVCC=/nowhere/nvcc"],
            "no nvcc was found that works with the C++ compiler: install the CUDA toolkit",
        ),
        (["-DPYDIST_CUDA=yes"], "PYDIST_CUDA=yes is not known: set it to AUTO, ON or OFF"),
        (["-DPYDIST_SANITIZE=memory"], "PYDIST_SANITIZE=memory is not known: set it to address"),
        (["-DPYDIST_SANITIZE=address,thread"], "exclude each other, so build twice"),
    ],
)
def test_a_wrong_option_ends_the_configuration_in_a_sentence(
    tmp_path: Path, definitions: list[str], sentence: str
) -> None:
    ended = configure(tmp_path, "-DPYDIST_BUILD_PYTHON=OFF", *definitions)
    assert ended.returncode != 0
    assert sentence in sentence_of(ended)


def fake_python(folder: Path, torch_version: str | None) -> Path:
    """An interpreter with no torch, or with one that has nothing but a version."""
    venv.create(folder, with_pip=False, symlinks=True)
    if torch_version is not None:
        site = next((folder / "lib").glob("python3*")) / "site-packages" / "torch"
        site.mkdir(parents=True)
        (site / "__init__.py").touch()
        (site / "version.py").write_text(f"__version__ = {torch_version!r}\n")
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("torch_version", "sentence"),
    [
        (None, "has none that this build can see: install torch 2.11 or later and below 2.15"),
        ("2.9.1+cpu", "does not support torch 2.9.1+cpu, which"),
        ("2.15.0", "does not support torch 2.15.0, which"),
        ("2.13.0", "reinstall torch from its official wheel"),
    ],
)
def test_a_missing_or_unsupported_torch_ends_the_configuration_in_a_sentence(
    tmp_path: Path, torch_version: str | None, sentence: str
) -> None:
    python = fake_python(tmp_path / "python", torch_version)
    ended = configure(tmp_path / "build", f"-DPython_EXECUTABLE={python}")
    assert ended.returncode != 0
    assert sentence in sentence_of(ended)


@pytest.mark.parametrize(
    ("version", "is_supported"), [("10.2.1", False), ("11.4.0", True), ("13.1.0", True)]
)
def test_an_old_compiler_ends_the_configuration_in_a_sentence(
    tmp_path: Path, version: str, is_supported: bool
) -> None:
    ended = configure(
        tmp_path,
        "-DPYDIST_BUILD_PYTHON=OFF",
        f"-DCMAKE_CXX_COMPILER_VERSION={version}",
        "-DCMAKE_CXX_COMPILER_ID=GNU",
        "-DCMAKE_CXX_COMPILER_ID_RUN=1",
        "-DCMAKE_CXX_COMPILER_FORCED=1",
        "-DCMAKE_CXX20_STANDARD_COMPILE_OPTION=-std=c++20",
        "-DCMAKE_CXX_STANDARD_COMPUTED_DEFAULT=17",
    )
    says_so = "pydist needs g++ 11 or later or clang 14 or later" in sentence_of(ended)
    assert says_so is not is_supported


def test_no_compiler_ends_the_configuration_in_a_sentence(tmp_path: Path) -> None:
    ended = configure(tmp_path, "-DPYDIST_BUILD_PYTHON=OFF", CXX="/nowhere/c++")
    assert ended.returncode != 0
    assert "No C++ compiler was found: install g++ 11 or later" in sentence_of(ended)
