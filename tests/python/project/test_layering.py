"""The layers: what may include or import what, and how files are named."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "pydist"

# Low to high. A folder includes only itself and folders before it.
CPP_LAYERS = (
    "base",
    "cuda",
    "kernels",
    "topology",
    "memory",
    "health",
    "tuning",
    "transport",
    "collectives",
    "communicator",
    "communicator/peers",
    "communicator/native",
    "communicator/nccl",
    "bucketing",
    "sampling",
    "c10d",
    "c10d/gloo",
    "reducer/gradients",
    "reducer/operations",
    "reducer",
    "bindings",
)
TORCH_FREE = CPP_LAYERS[: CPP_LAYERS.index("c10d")]
FOREIGN = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")

# Low to high. A folder, or a module at the root, imports only from itself and from those before it.
PYTHON_LAYERS = (
    "_build",
    "_native",
    "_load",
    "_torch",
    "errors",
    "config",
    "gpu",
    "job",
    "collectives",
    "sampling",
    "metrics",
    "evaluation",
    "parallel",
    "nn",
    "sharding",
    "training",
    "pipelining",
    "checkpoint",
    "planning",
    "testing",
    "diagnosis",
    "monitoring",
    "__init__",
    "integrations",
    "topology",
    "viewing",
    "benchmarks",
    "cli",
    "__main__",
)

# Without C++ tests of their own: what needs torch is tested by Python, the driver of CUDA by what
# calls it on the stand-in, and the collectives as a communicator runs them.
TESTED_FROM_ABOVE = {
    *("bindings", "c10d/sparse", "c10d/staged", "cuda"),
    *("reducer", "reducer/gradients", "reducer/operations"),
}

VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}

CPP_FILES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cc", ".cu", ".cuh"})
PYTHON_FILES = sorted(PACKAGE.rglob("*.py")) + sorted(PACKAGE.rglob("*.pyi"))


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (bracket, name) of each include of a C++ file."""
    for line in path.read_text().splitlines():
        if match := re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line):
            yield match[1], match[2]


def python_imports(path: Path) -> Iterator[str]:
    """Yields the full name of each module of pydist that a file imports.

    Imports inside functions count; those under `if TYPE_CHECKING:` do not exist at run time.
    """
    package = ["pydist", *path.relative_to(PACKAGE).parent.parts]
    stack: list[ast.AST] = [ast.parse(path.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module == "pydist":
                # `from pydist import x`: x is a module, or a name of the package itself.
                yield from (f"pydist.{alias.name}" for alias in node.names)
            else:
                yield module
        stack.extend(ast.iter_child_nodes(node))


def python_layer(parts: tuple[str, ...]) -> str:
    """The layer of a path or dotted name below the package: its first part, without suffix."""
    name = parts[0].split(".")[0] if parts else "__init__"
    is_module = (PACKAGE / name).is_dir() or name in PYTHON_LAYERS
    is_module = is_module or any((PACKAGE / f"{name}{end}").exists() for end in (".py", ".pyi"))
    return name if is_module else "__init__"


def cpp_layer(path: Path) -> str:
    """The layer of a path below csrc/: its folder, where that is in the list, or the one above."""
    folder = str(path.parent)
    return folder if folder in CPP_LAYERS else folder.partition("/")[0]


def test_every_folder_is_a_layer() -> None:
    assert {cpp_layer(p.relative_to(CSRC)) for p in CPP_FILES} <= set(CPP_LAYERS)
    assert all(len(p.relative_to(CSRC).parts) <= 3 for p in CPP_FILES), "folders nest once"


@pytest.mark.parametrize("path", CPP_FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_cpp_includes_go_down(path: Path) -> None:
    own = cpp_layer(path.relative_to(CSRC))
    for bracket, name in includes(path):
        if bracket == "<":
            if own in TORCH_FREE:
                assert not name.startswith(FOREIGN), f"{own} is torch-free but includes <{name}>"
            assert not (CSRC / name).is_file(), f'own headers take quotes: "{name}"'
            continue
        assert "/" in name, f'"{name}" must be written from csrc/, as "{own}/{name}"'
        assert (CSRC / name).exists(), f'"{name}" does not exist below csrc/'
        assert CPP_LAYERS.index(cpp_layer(Path(name))) <= CPP_LAYERS.index(own), (
            f'{own} includes "{name}" above it'
        )


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_imports_go_down(path: Path) -> None:
    own = python_layer(path.relative_to(PACKAGE).parts)
    assert own in PYTHON_LAYERS, f"add {own} to PYTHON_LAYERS at its place"
    for module in python_imports(path):
        top, *parts = module.split(".")
        if top != "pydist":
            continue
        used = python_layer(tuple(parts))
        assert used in PYTHON_LAYERS, f"add {used} to PYTHON_LAYERS at its place"
        assert PYTHON_LAYERS.index(used) <= PYTHON_LAYERS.index(own), f"{own} imports {module}"


def test_python_circles_are_impossible_within_a_package() -> None:
    """A package is one layer above; within it, its modules must not form a circle either."""
    graph: dict[str, set[str]] = {}
    for path in PYTHON_FILES:
        name = ".".join(["pydist", *path.relative_to(PACKAGE).with_suffix("").parts])
        graph.setdefault(name.removesuffix(".__init__"), set()).update(python_imports(path))

    sound: set[str] = set()  # from which no way leads into a circle

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join([*trail, name])}"
        if name not in sound:
            for used in graph.get(name, ()):
                visit(used, (*trail, name))
            sound.add(name)

    for name in graph:
        visit(name, ())


def test_the_root_of_the_package_shows_its_rooms() -> None:
    """What a user or a newcomer looks for, what packaging needs, and folders."""
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {
        "__init__.py",
        "__main__.py",
        "_build.py.in",
        "_build.pyi",
        "_load.py",
        "_native.pyi",
        "_torch.py",
        "collectives.py",
        "errors.py",
        "py.typed",
    }


@pytest.mark.parametrize("name", ["bench", "csrc", "docs", "examples", "pydist", "tests"])
def test_a_folder_holds_few_files(name: str) -> None:
    folder = ROOT / name
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        if each.name == "__pycache__":
            continue
        files = [path for path in each.iterdir() if path.is_file()]
        assert len(files) <= 25, f"{each.relative_to(ROOT)} holds {len(files)} files: divide it"


def test_a_long_file_says_why() -> None:
    """Beyond 500 lines, a sentence in the first ones begins with "The file is long because"."""
    folders = (CSRC, PACKAGE, *(ROOT / f for f in ("tests", "bench", "examples", "third_party")))
    silent = []
    for path in (path for folder in folders for path in folder.rglob("*.*")):
        if path.suffix not in {".h", ".cc", ".cu", ".cuh", ".py"}:  # the stubs are generated
            continue
        lines = path.read_text().splitlines()
        opening = " ".join(line.removeprefix("//").strip() for line in lines[:25])
        if len(lines) > 500 and "The file is long because" not in opening:
            silent.append(f"{path.relative_to(ROOT)} has {len(lines)} lines")
    assert silent == [], "say why in the first lines, or divide it"


def test_folders_of_tests_mirror_the_source() -> None:
    tests = ROOT / "tests" / "cpp"
    folders = [path.relative_to(tests) for path in tests.rglob("*") if path.is_dir()]
    assert [folder for folder in folders if not (CSRC / folder).is_dir()] == []
    sources = {path.parent.relative_to(CSRC) for path in CSRC.rglob("*.cc")}
    assert {str(folder) for folder in sources - set(folders)} == TESTED_FROM_ABOVE
    rooms = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    # Tested by tests/frameworks, where the frameworks are installed.
    rooms.remove("integrations")
    assert rooms <= {path.name for path in (ROOT / "tests" / "python").iterdir()}


def test_names_tell_what_a_file_holds() -> None:
    folders = [CSRC, PACKAGE, *(ROOT / f for f in ("tests", "bench", "examples", "third_party"))]
    for folder in folders:
        for path in folder.rglob("*"):
            words = set(re.split(r"[_.\-]", path.name.lower()))
            assert not words & VAGUE_NAMES, f"{path.relative_to(ROOT)}: name it after its one idea"


@pytest.mark.parametrize(
    ("listing", "folder"),
    [(CSRC / "CMakeLists.txt", CSRC), (ROOT / "tests/cpp/CMakeLists.txt", ROOT / "tests/cpp")],
    ids=["csrc", "tests/cpp"],
)
def test_every_source_is_listed(listing: Path, folder: Path) -> None:
    listed = set(re.findall(r"[\w/]+\.(?:cc|cu)\b", listing.read_text()))
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in {".cc", ".cu"}}
    assert present == listed
