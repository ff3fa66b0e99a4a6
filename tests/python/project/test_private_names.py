"""Private names of torch are used in `pydist/_torch.py` alone, and all of them are there."""

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pydist import _torch

PACKAGE = Path(_torch.__file__).parent
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_torch.py")
NAMES = {
    name
    for table in (_torch.PRIVATE_NAMES, _torch.LATER_NAMES)
    for own in table.values()
    for name in own
}
# Of Python's: there is no public road to a caller's frame, to argparse's idea of a number, to
# whether a process is being started, or to another exit status once the interpreter ends.
OF_PYTHON = {"_getframe", "_negative_number_matcher", "_inheriting", "_exit"}
# Of frameworks, in the one module of each that meets it. Where a version of the framework has
# dropped one, tests/frameworks fails.
OF_FRAMEWORKS = {
    "integrations/accelerate/accelerator.py": {"_dataloaders", "_models"},
    "integrations/lightning/__init__.py": {"_ForwardRedirection"},
    "integrations/lightning/strategies.py": {
        "_combined_loader",
        "_current_fx_name",
        "_ddp_comm_hook",
        "_ddp_comm_state",
        "_ddp_comm_wrapper",
        "_ddp_kwargs",
        "_determine_ddp_device_ids",
        "_evaluation_loop",
        "_mode",
        "_process_group_backend",
        "_redirection_class",
        "_setup_distributed",
    },
    "integrations/transformers.py": {"_loss_shifts_labels"},
}
# Texts that are no name of torch's: a mark of ours, and the end of names of CUDA's.
HARMLESS = {"_pydist_has_run", "_id"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# What torch or programs call on a wrapper, a module or a loader: a method of that name in a class
# of ours takes the place of torch's.
OVERRIDABLE = {
    name
    for holder in (DistributedDataParallel, DataLoader)
    for name in filter(is_private, dir(holder))
}


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to something itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:  # `take_attributes(loader, _feed=...)`
            yield node.arg


@functools.cache
def own_names() -> set[str]:
    """What pydist's own files define."""
    return {name for path in OTHERS for name in defined_in(ast.parse(path.read_text()))}


def names_of_torch(tree: ast.AST) -> Iterator[str]:
    """What a file says that is, or can only be, a private name of torch's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            holder = ast.unparse(node.value)
            of_itself = holder in ("self", "cls", "super()")
            if node.attr not in own_names() | OF_PYTHON or (node.attr in NAMES and not of_itself):
                yield f"{holder}.{node.attr}"
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            text = str(node.value)
            ours = own_names() | OF_PYTHON | HARMLESS
            if is_private(text) and (text in NAMES or text not in ours):
                yield repr(text)
        elif isinstance(node, ast.FunctionDef) and node.name in OVERRIDABLE:
            yield f"def {node.name}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                path = f"{module}.{name.name}".removeprefix(".").split(".")
                if path[0] == "torch" and any(map(is_private, path)):
                    yield f"import of {'.'.join(path)}"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_uses_one(path: Path) -> None:
    known = OF_FRAMEWORKS.get(str(path.relative_to(PACKAGE)), set())
    names = names_of_torch(ast.parse(path.read_text()))
    assert not [name for name in names if name.rpartition(".")[2] not in known]


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.utils import _pytree",
        "tensor._version",
        "self.never_defined._anywhere",
        "torch._foreach_add_(a, b)",
        "getattr(tensor, '_version')",
        "getattr(torch.serialization, '_never_defined')",
        "{'torch.serialization': ('_never_defined',)}",
        "class Wrapper(nn.Module):\n    def _apply(self): ...",
        "class Wrapper(nn.Module):\n    def _register_fused_optim(self): ...",
        "class Wrapper(nn.Module):\n    def _get_ddp_logging_data(self): ...",
    ],
)
def test_the_search_finds_them(line: str) -> None:
    assert list(names_of_torch(ast.parse(line)))


def test_the_tables_have_all_that_are_used() -> None:
    tree = ast.parse(Path(_torch.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    parts = {part for holder in _torch.PRIVATE_NAMES for part in holder.split(".")}
    own = set(defined_in(tree)) | {"_C", *parts} | OF_PYTHON
    assert {name for name in used - own if is_private(name)} <= NAMES
    assert set(defined_in(tree)) & OVERRIDABLE <= NAMES


def imported_without(name: str) -> ModuleType:
    """Imports `_torch.py` where torch seems to lack a name."""
    spec = importlib.util.spec_from_file_location("of_another_torch", _torch.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    seems = lambda holder, what: what != name and hasattr(holder, what)  # noqa: E731
    module.__dict__["hasattr"] = seems
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [n for own in _torch.PRIVATE_NAMES.values() for n in own])
def test_a_torch_without_it_is_refused_by_name(name: str) -> None:
    with pytest.raises(ImportError, match=rf"has no torch\..*\b{name}, a private name"):
        imported_without(name)


def hooked() -> Callable[..., None]:
    def hook(*_: object) -> None: ...

    nn.Linear(1, 1).register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    return hook


def ignoring() -> nn.Module:
    module = nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    return module


def compiler() -> ModuleType:
    import torch._dynamo.eval_frame

    return torch._dynamo.eval_frame


def replicating() -> ModuleType:
    return importlib.import_module("torch.distributed._composable.replicate")


# What has each of the names that torch makes later.
MADE: dict[str, Callable[[], object]] = {
    "a hook behind state_dict()": hooked,
    "a module with names to ignore": ignoring,
    "a tensor with such a name": lambda: ignoring().weight,
    "a function that is not to be compiled": lambda: torch.compiler.disable(lambda: None),
    "a compiled module": lambda: torch.compile(nn.Linear(1, 1)),
    "torch._dynamo.eval_frame": compiler,
    "torch.distributed._composable.replicate": replicating,
    "torch.distributed.checkpoint.filesystem": lambda: importlib.import_module(
        "torch.distributed.checkpoint.filesystem"
    ),
    "torch.distributed.checkpoint.metadata": lambda: importlib.import_module(
        "torch.distributed.checkpoint.metadata"
    ),
    "torch.distributed.pipelining.stage": lambda: importlib.import_module(
        "torch.distributed.pipelining.stage"
    ),
    "torch.distributed.fsdp": lambda: importlib.import_module("torch.distributed.fsdp"),
    "an optimizer": lambda: torch.optim.SGD([torch.zeros(1)]),
    "a loader": lambda: DataLoader([]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("holder", "name"), [(h, n) for h, own in _torch.LATER_NAMES.items() for n in own]
)
def test_torch_still_makes(holder: str, name: str) -> None:
    assert hasattr(MADE[holder](), name)
