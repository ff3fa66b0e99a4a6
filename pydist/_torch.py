"""Every private name of torch that pydist uses. Tested against torch 2.11 to 2.14.

No other file of pydist touches a private name of torch's (`tests/python/project/
test_private_names.py` sees to that). A new torch may rename any of them: then the import of this
file fails and names what is gone, and this is the place to look for what does the same there. Only
tests look up `LATER_NAMES`, which are not there yet at the import. The file is long because it is
the one list of all of them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

T = TypeVar("T")

Hooks = dict[int, Callable[..., Any]]


# -- the names

# Each private name that this file uses, under the object that has it, with its purpose or the
# public way that is missing. "torch.nn.Module()" stands for an instance, the others for themselves.
PRIVATE_NAMES: dict[str, dict[str, str]] = {
    "torch.nn.Module()": {
        "_parameters": "the wrapper shares this table; the public methods give copies of it",
        "_buffers": "the same; every forward looks there, and buffers() takes far longer",
        "_modules": "the same; children() leaves out a module that is there twice",
        "_non_persistent_buffers_set": "the same; nothing public tells which buffers are saved",
        "_state_dict_pre_hooks": "a wrapper runs its own hooks; they can only be registered",
        "_state_dict_hooks": "the same",
        "_load_state_dict_pre_hooks": "the same",
        "_load_state_dict_post_hooks": "the same",
    },
    "torch.nn.Module": {
        "_apply": "where to(), cuda(), half() and all others end, with nothing public in common",
        "_load_from_state_dict": "what a module above calls; there is nothing public to override",
        "_compiled_call_impl": "left by compile(), and not to be copied: it can't be asked for",
    },
    "torch.nn.Module().state_dict()": {
        "_metadata": "the versions of modules, lost where names change; nothing public copies it",
    },
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": "the batch norms have no public base",
        "_NormBase": "nor do all the layers that keep statistics",
    },
    "torch.nn.modules.loss": {"_Loss": "the losses have no public base, either"},
    "torch.nn.parallel.DistributedDataParallel": {
        "_set_params_and_buffers_to_ignore_for_model": "torch's only way to have names ignored",
        "_active_ddp_module": "dynamo cuts graphs for the wrapper that is there, and for no other",
        "_pre_forward": "what replicate() calls, and no forward, before which hooks would run",
        "_set_static_graph": "programs call it on a wrapper that is made; nothing public does",
        "_register_builtin_comm_hook": "the same; the public method takes no hook of C++",
        "_register_fused_optim": "the same; what to do instead has to be said",
        "_get_ddp_logging_data": "the same",
    },
    "torch.distributed": {
        "_DEFAULT_FIRST_BUCKET_BYTES": "dynamo wants no bucket to be smaller, and says it nowhere",
    },
    "torch.Tensor": {
        "_version": "whether a tensor was written; `increment_version` alone is public",
        "_backward_hooks": "autograd asks each leaf for it, and each question has a public name",
        "_indices": "indices() of a sparse tensor wants it coalesced, which takes memory",
        "_values": "the same",
    },
    "torch.UntypedStorage": {
        "_cdata": "tells storages apart that have no memory; data_ptr() is 0 for all of them",
    },
    "torch": {
        "_has_compatible_shallow_copy_type": "`parameter.data = ...` calls it on our own tensors",
        "_foreach_mul_": "optimizers and clip_grad_norm_ call its family of functions",
        "_foreach_norm": "clip_grad_norm_ calls it on our own tensors",
        "_amp_foreach_non_finite_check_and_unscale_": "GradScaler calls it on our own tensors",
    },
    "torch._C": {
        "DisableTorchFunctionSubclass": "the default __torch_function__ also converts the result",
        "Future": "torch's C++ returns it where Python has torch.futures.Future, made from it",
    },
    "torch._C._functorch": {
        "is_functorch_wrapped_tensor": "torch.func has no way to ask",
        "get_unwrapped": "nor to look inside",
    },
    "torch.utils._pytree": {
        "tree_map_only": "torch.utils.pytree is not in 2.11",
        "tree_leaves": "the same",
        "register_pytree_node": "the same",
        "MappingKey": "the same",
    },
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": "torch's own notes tell to take it from there",
    },
    "torch._subclasses.fake_tensor": {
        "FakeTensorMode": "the same",
    },
    "torch._C._dynamo.eval_frame": {
        "_FrameAction": "torch.compiler.disable imports dynamo, which takes seconds",
        "_FrameExecStrategy": "the same",
        "set_code_exec_strategy": "the same",
    },
    "torch.jit._state": {
        "_jit_caching_layer": "scripted functions run without what waits for their arguments",
    },
    "torch.serialization": {
        "_get_layout": "pickles of torch's checkpoints name it, and nothing public stands there",
    },
    "torch.distributed.distributed_c10d": {
        "_world": "the store in which a group has met, and the count of groups; neither is public",
        "_new_process_group_helper": "knows whose time-out a group gets: is_timeout_torchs_own",
    },
    "torch.distributed.ProcessGroup": {
        "_device_types": "whether a group is on backend pydist; the public name is a string",
        "_get_backend": "the same",
    },
    "torch.distributed.ProcessGroupGloo": {
        "_Options": "where gloo listens, which only variables of the environment say publicly",
    },
    "torch.distributed.ProcessGroupGloo._Options": {
        "_devices": "the same",
        "_threads": "the same",
        "_timeout": "the same, and how long a program lets operations of a group take",
    },
    "torch.cuda": {
        "_lazy_call": "set_device would start CUDA, which takes seconds, and memory of the GPU",
    },
    "torch.utils.data.DataLoader": {
        "_index_sampler": "see FedLoader",
        "_get_iterator": "see FedLoader",
    },
}

# The same for names that do not exist yet when this file is imported, under a description of the
# object that has them later. Tests look these names up.
LATER_NAMES: dict[str, dict[str, str]] = {
    "a hook behind state_dict()": {
        "_from_public_api": "such a hook returns nothing, and torch refuses what it returns",
    },
    "a module with names to ignore": {
        "_ddp_params_and_buffers_to_ignore": "programs set it, as torch's class does",
    },
    "a tensor with such a name": {
        "_ddp_ignored": "the mark that torch's class leaves on it",
    },
    "a function that is not to be compiled": {
        "_torchdynamo_disable": "the mark that torch.compiler.disable leaves, without dynamo",
        "_torchdynamo_disable_msg": "the reason that it gives",
    },
    "a compiled module": {
        "_orig_mod": "the module in it, which has no public name",
    },
    "torch._dynamo.eval_frame": {
        "cached_backends": "whether anything was compiled; torch.compiler tells of this frame only",
        "OptimizedModule": "the class of compiled modules",
    },
    "torch.distributed.checkpoint.filesystem": {
        "_StorageInfo": "where a piece of a checkpoint lies, as torch's reader wants it told",
    },
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING": "pickles name it, as they do _get_layout",
    },
    "torch.distributed.pipelining.stage": {
        "_PipelineStage": "the class of stages that the tracer has cut; only its makers are public",
    },
    "torch.distributed._composable.replicate": {
        "DDP": "the class that a replicated module gets; the module is no wrapper",
    },
    "torch.distributed.fsdp": {
        "_traversal_utils": "goes through modules, to look what is sharded already; nothing public "
        "tells that apart from what is about to be",
    },
    "an optimizer": {
        "_optimizer_step_pre_hooks": "hooks move to a sharded optimizer in the place of another",
        "_optimizer_step_post_hooks": "the same",
        "_optimizer_state_dict_pre_hooks": "see the hooks of modules",
        "_optimizer_state_dict_post_hooks": "the same",
        "_optimizer_load_state_dict_pre_hooks": "the same",
        "_optimizer_load_state_dict_post_hooks": "the same",
    },
    "a loader": {
        "_iterator": "the workers that persist, which a copy of a loader must not share",
    },
}


def _look_up(names: Mapping[str, Collection[str]]) -> None:
    """Raises ImportError where this torch lacks any of some private names."""
    for holder, own in names.items():
        found: Any = torch
        for part in holder.split(".")[1:]:
            found = getattr(found, part.removesuffix("()"), None)
            found = found() if part.endswith("()") and found is not None else found
        for name in own:
            if not hasattr(found, name):
                raise ImportError(
                    f"torch {torch.__version__} has no {holder}.{name}, a private name that pydist "
                    "uses: install a torch that this version of pydist is made for"
                )


_look_up(PRIVATE_NAMES)

# -- modules and their states

# Only whoever compiles or plans needs more of dynamo than this; importing it takes seconds.
_eval_frame: Any = torch._C._dynamo.eval_frame

BatchNormBase = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase
# The losses of torch.nn: modules that have no mode.
LossBase = nn.modules.loss._Loss

# Of a module's attributes, those that stand for what is in it.
TABLES = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
# Of a module that stands for another one, the attributes that a copy of it does not take over.
OF_MODULE = TABLES | {"module", "_compiled_call_impl"}


def share_tables(stand_in: StandIn, module: nn.Module) -> None:
    """Lets a module stand for another one: see Note [One set of names]."""
    stand_in.__dict__.update({name: getattr(module, name) for name in TABLES}, module=module)


class StandIn(nn.Module):
    """A module that stands for another one.

    Note [One set of names]: it shares the module's tables instead of holding the module as a child,
    so that all of nn.Module finds the same names in both.
    """

    module: nn.Module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.module._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """For where a module above it loads: runs its own hooks, then the module's part."""
        for hook in load_state_dict_pre_hooks(self).values():
            hook(state_dict, prefix, *args)
        self._match_names(state_dict, prefix)
        self.module._load_from_state_dict(state_dict, prefix, *args)

    def _match_names(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Gives what is to be loaded below `prefix` the module's names, in place."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None] | None:
    """The table of a module's own parameters; None in TorchScript, which has no such table."""
    table = module._parameters
    return table if isinstance(table, dict) else None


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's buffers: looking there is much faster than asking for attributes."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules in a module, by name: those that are there twice, too."""
    return module._modules


def with_parts(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes with what is in its tables, as programs write the paths to it."""
    found = dict(attributes)
    for table in ("_modules", "_parameters", "_buffers"):
        found.update(found.pop(table, None) or {})
    return found


def state_dict_pre_hooks(module: nn.Module) -> Hooks:
    """Hooks before a module's `state_dict()`: a wrapper that asks its module has to run its own."""
    hooks: Hooks = module._state_dict_pre_hooks
    return hooks


def state_dict_post_hooks(module: nn.Module) -> Hooks:
    """Hooks behind a module's `state_dict()`."""
    hooks: Hooks = module._state_dict_hooks
    return hooks


def is_public_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook behind `state_dict()` must return nothing; others may replace it."""
    return getattr(hook, "_from_public_api", False)


def load_state_dict_pre_hooks(module: nn.Module) -> Hooks:
    """Hooks before a module loads a state."""
    hooks: Hooks = module._load_state_dict_pre_hooks
    return hooks


def load_state_dict_post_hooks(module: nn.Module) -> Hooks:
    """Hooks behind the loading of a state."""
    hooks: Hooks = module._load_state_dict_post_hooks
    return hooks


def metadata_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """By path, what modules have noted in a state beside its values: their versions; None if none.

    A state that somebody has put together has no such notes.
    """
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: MutableMapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Notes beside the values of a state what `metadata_of` returns."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]


_table_of_children = operator.attrgetter("_modules")


def with_children(module: nn.Module) -> list[nn.Module]:
    """The modules within a module, and itself, that have parts; TorchScript has no such table."""
    parts = (part for part in module.modules() if part._modules)
    return [part for part in parts if isinstance(part._modules, dict)]


def children_of_each(modules: list[nn.Module]) -> list[tuple[nn.Module | None, ...]]:
    """The parts of each of some modules. Asked before every forward."""
    return list(map(tuple, map(dict.values, map(_table_of_children, modules))))


# -- torch's own wrapper

# What programs set in a module, by hand or by torch's class: names to ignore.
IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"

# Dynamo wants its first bucket, of this size, to be no larger than the others.
LEAST_BUCKET_BYTES = int(dist._DEFAULT_FIRST_BUCKET_BYTES)


def ignored_names(module: nn.Module) -> frozenset[str]:
    """The names that torch's DistributedDataParallel would ignore in a module."""
    return frozenset(getattr(module, IGNORED_NAMES, ()))


def set_ignored_names(module: nn.Module, names: Collection[str]) -> None:
    """Does what torch's class does: sets the attribute, and marks the tensors for torch.compile."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def is_marked_as_ignored(tensor: Tensor) -> bool:
    """Whether `set_ignored_names` has named a tensor, where the model is not known."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def active_wrapper() -> Any:
    """What dynamo takes for the wrapper whose forward runs in this process; None as a rule.

    One of torch's DistributedDataParallel, or what `set_active_wrapper` has put there.
    """
    return DistributedDataParallel._active_ddp_module


def set_active_wrapper(wrapper: Any) -> None:
    """Lets dynamo cut graphs for a wrapper: it reads nothing of it but `bucket_bytes_cap`."""
    DistributedDataParallel._active_ddp_module = wrapper


def active_torch_wrapper() -> DistributedDataParallel | None:
    """The DistributedDataParallel of torch's whose forward runs in this process, if any does."""
    active = active_wrapper()
    return active if isinstance(active, DistributedDataParallel) else None


class WrapperStandIn(StandIn):
    """A stand-in with what programs call on torch's wrapper by private names."""

    # What subclasses define: what is done under those names.
    _take_static_graph: Callable[[], None]
    _take_builtin_hook: Callable[[Any], None]
    _refuse_fused_optimizer: Callable[[], None]
    _logging_data: Callable[[], dict[str, Any]]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Lets each rank have some parameters and buffers of a module alone, as torch's class does.

        Called before the module is wrapped. They are not copied, averaged or compared.

        Args:
            module: To be wrapped.
            params_and_buffers_to_ignore: Their names in the module. A parameter of the module
                itself has its name twice, once with a dot before it.
        """
        set_ignored_names(module, params_and_buffers_to_ignore)

    def _set_static_graph(self) -> None:
        self._take_static_graph()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._take_builtin_hook(comm_hook_type)

    def _register_fused_optim(self, *_: Any, **__: Any) -> None:
        self._refuse_fused_optimizer()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self._logging_data()


def before_first_use(wrapper: DistributedDataParallel, call: Callable[[], None]) -> None:
    """Calls a function before a wrapper of torch's, which may still fail to be made, first runs."""

    @runs_uncompiled_throughout
    def prepare(*args: Any, **kwargs: Any) -> Any:
        call()
        del wrapper.__dict__["_pre_forward"]
        return wrapper._pre_forward(*args, **kwargs)

    wrapper.__dict__["_pre_forward"] = prepare


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's `replicate` averages a module, beside which its wrapper lies."""
    replicating = sys.modules.get("torch.distributed._composable.replicate")
    made: Any = getattr(replicating, "DDP", ())
    return isinstance(module, made)


def is_about_to_shard(caller: Mapping[str, Any]) -> bool:
    """Whether code of torch's with these globals looks for modules to cut into shards.

    Its file that only looks what is sharded already serves torch.distributed.checkpoint, too.
    """
    name: str = caller.get("__name__", "")
    package = "torch.distributed.fsdp"
    return name.startswith(f"{package}.") and name != f"{package}._traversal_utils"


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether a module is torch's FullyShardedDataParallel, which most programs never import."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    made: Any = getattr(sharding, "FullyShardedDataParallel", ())
    return isinstance(module, made)


# -- tensors

# torch's functions that ask a tensor for such attributes, as `__torch_function__` is told of them.
VERSION: Any = Tensor._version.__get__  # type: ignore[attr-defined]
BACKWARD_HOOKS: Any = Tensor._backward_hooks.__get__  # type: ignore[union-attr]
HAS_COMPATIBLE_TYPE: Any = torch._has_compatible_shallow_copy_type

# What happens inside is done to tensors of a class of their own as to plain ones.
as_plain_tensors = torch._C.DisableTorchFunctionSubclass

# What torch's own C++ returns of a future, and the base of `torch.futures.Future`.
Future = torch._C.Future

tree_map_only = torch.utils._pytree.tree_map_only
tree_leaves = torch.utils._pytree.tree_leaves
register_pytree_node = torch.utils._pytree.register_pytree_node
MappingKey: Any = torch.utils._pytree.MappingKey
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# What torch calls an operation on many tensors at once.
EACH = "_foreach_"
NORM_OF_EACH = "_foreach_norm"
UNSCALE_EACH = "_amp_foreach_non_finite_check_and_unscale_"


def on_each(name: str, tensors: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """Runs the operation that torch calls by a name beginning with `EACH`, in place."""
    getattr(torch, name)(tensors, *args, **kwargs)


def unscale_each(tensors: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiplies tensors, and sets `found_inf` to 1 where one has a value that is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse_scale)


def version_of(tensor: Tensor | None) -> int:
    """How often a tensor was written in place, as autograd counts; -1 where it does not count."""
    try:
        return -1 if tensor is None else tensor._version
    except RuntimeError:  # made in inference mode
        return -1


def is_of_functorch(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` stands for a tensor, which then has no values."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def without_functorch(tensor: Tensor) -> Tensor:
    """The tensor for which transforms of `torch.func` stand, or the tensor itself."""
    while is_of_functorch(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def uncoalesced_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor as they are: several may be of one place."""
    values: Tensor = tensor._values()
    return values


def bytes_of(tensor: Tensor) -> int:
    """The memory of a tensor, sparse or not. Takes none itself."""
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def identity_of(storage: torch.UntypedStorage) -> int:
    """Tells storages that live apart, also those of fake tensors, which have no memory."""
    return int(storage._cdata)


def fake_tensors(*, allow_non_fake_inputs: bool) -> FakeTensorMode:
    """A mode in which tensors have shapes and no values."""
    mode = torch._subclasses.fake_tensor.FakeTensorMode
    return mode(allow_non_fake_inputs=allow_non_fake_inputs)


# The logger of what makes fake tensors: it logs an exception beside raising it.
FAKE_TENSORS_LOG = torch._subclasses.fake_tensor.__name__


# -- compilers

_Function = TypeVar("_Function", bound=Callable[..., Any])


def runs_uncompiled(function: _Function) -> _Function:
    """Lets dynamo leave a function alone, and yet compile what it calls.

    What `torch.compiler.disable(recursive=False)` does, without importing dynamo, which takes
    seconds, for those who compile nothing.
    """
    return _left_alone(function, _eval_frame._FrameAction.DEFAULT)


def runs_uncompiled_throughout(function: _Function) -> _Function:
    """Lets dynamo leave a function alone, with all that it calls.

    What `torch.compiler.disable` does, as above. What was given to `torch.compile` by itself, such
    as the model that a closure calls, is compiled all the same.
    """
    return _left_alone(function, _eval_frame._FrameAction.SKIP)


# What torch.compile(fullgraph=True) says where it comes upon one.
_WHY_UNCOMPILED = "pydist talks to other ranks there, between compiled graphs: leave out fullgraph"


def _left_alone(function: _Function, what_it_calls: Any) -> _Function:
    # The first is for those who would inline it, the second for when it runs.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY_UNCOMPILED  # type: ignore[attr-defined]
    strategy = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, what_it_calls)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _dynamo() -> Any:
    """The part of dynamo that wraps what is compiled; None where nobody has imported it."""
    return sys.modules.get("torch._dynamo.eval_frame")


def is_dynamo_there() -> bool:
    """Whether anything of this process has imported dynamo, without which nothing is compiled."""
    return _dynamo() is not None


def compiles_anything() -> bool:
    """Whether this process has compiled something with torch.compile, or is about to."""
    dynamo = _dynamo()
    backends = getattr(dynamo, "cached_backends", {None: dynamo})
    return any(backend is not None for backend in backends.values())


def scripts_any_function() -> bool:
    """Whether this process has compiled a function with `torch.jit.script`."""
    return bool(torch.jit._state._jit_caching_layer)


# What torch.compile calls the module that it wraps.
COMPILED = "_orig_mod"


def uncompiled(module: Any) -> Any:
    """What `torch.compile` was given, where it has wrapped a module; anything else as it is."""
    dynamo = _dynamo()  # without it, nothing is wrapped
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = getattr(module, COMPILED)
    return module


# -- optimizers


_OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@contextmanager
def without_optimizer_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Runs none of the hooks that were registered on an optimizer."""
    hooks = [getattr(optimizer, name) for name in _OPTIMIZER_HOOKS]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def share_optimizer_hooks(optimizer: Optimizer, other: Optimizer) -> None:
    """Has an optimizer run the other one's hooks, too, before its own.

    Both have the same dictionaries from then on, so a handle by which the program removes a hook
    still does.
    """
    for name in _OPTIMIZER_HOOKS:
        shared = getattr(other, name)
        shared.update(getattr(optimizer, name))
        setattr(optimizer, name, shared)


def run_state_dict_pre_hooks(optimizer: Optimizer) -> None:
    """Runs what was registered to run before `state_dict()`."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def has_state_dict_post_hooks(optimizer: Optimizer) -> bool:
    """Whether `run_state_dict_post_hooks` has anything to run."""
    return bool(optimizer._optimizer_state_dict_post_hooks)


def run_state_dict_post_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Runs what was registered to run behind `state_dict()`, and may replace what that returns."""
    return _replaced(optimizer._optimizer_state_dict_post_hooks, optimizer, state_dict)


def run_load_state_dict_pre_hooks(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Runs what was registered to run before a state is loaded, and may replace it."""
    return _replaced(optimizer._optimizer_load_state_dict_pre_hooks, optimizer, state_dict)


def run_load_state_dict_post_hooks(optimizer: Optimizer) -> None:
    """Runs what was registered to run after a state was loaded."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _replaced(
    hooks: Mapping[int, Callable[..., Any]], optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    for hook in hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


# -- processes


def is_timeout_torchs_own() -> bool:
    """Whether nobody gave the group that torch is making a time-out, so that torch took its own.

    For the function that torch calls to make a group's backend. Where a program gives no time-out,
    torch passes its constant `default_pg_timeout` on (as some frameworks do by themselves); the
    backend gets a copy, which looks like 30 minutes that the program asked for. Only
    `_new_process_group_helper`, the function of torch's that calls the backend's, still holds the
    object itself.
    """
    maker = dist.distributed_c10d._new_process_group_helper.__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_locals.get("timeout") is default_pg_timeout


def timeout_of_group(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a group on a backend of torch's; None where that keeps none."""
    for backend in backends_of(group):
        # A backend of somebody else's may have no options.
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def may_be_torchs_own(timeout: timedelta) -> bool:
    """Whether a group has this time-out if nobody gave it one: it keeps no more than the number."""
    return timeout in (default_pg_timeout, dist.constants.default_pg_nccl_timeout)


def store_of_group(group: dist.ProcessGroup) -> dist.Store | None:
    """The key-value store that the ranks of a group share; None if it has none."""
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return store


def groups_of_process() -> list[dist.ProcessGroup]:
    """All groups of torch.distributed that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


def forget_failed_world() -> None:
    """Lets torch count its groups from the beginning, where there is no default group.

    torch names groups by their count, and puts the name before every key in the store. A default
    group that could not be made counts, until one is destroyed: ranks that have tried unequally
    often would never meet.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    """The backends of a group, the one for the CPU first."""
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        yield group._get_backend(torch.device(device))


def gloo_options(devices: list[Any], timeout: timedelta) -> Any:
    """Options for torch's gloo: where it listens, and how long operations may take."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave its options out
    options = gloo._Options()
    options._devices = devices
    options._threads = 2 * len(devices)  # as torch has it: two for each
    options._timeout = timeout
    return options


def threads_of(options: Any) -> int:
    """How many threads a group on gloo starts that is made with such options."""
    count: int = options._threads
    return count


def when_cuda_starts(call: Callable[[], None]) -> None:
    """Calls a function once this process first uses CUDA; at once, if it has already."""
    torch.cuda._lazy_call(call)


# -- loaders


class Indices(Protocol):
    """What a loader's iterators go through: the indices of a batch, or of a sample, at a time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class FedLoader(DataLoader[T]):
    """A loader whose iterators get their indices from elsewhere than the samplers that it shows.

    Subclasses define both methods.
    """

    def feed(self) -> Indices:
        """What iterators ask for indices."""
        raise NotImplementedError

    def starting(self) -> AbstractContextManager[None]:
        """Entered while an iterator is made, with its workers."""
        raise NotImplementedError

    # torch chooses between `sampler` and `batch_sampler` here. Those are public, and libraries put
    # them into other loaders, so they have to stay what anybody can iterate over.
    @property
    def _index_sampler(self) -> Indices:
        return self.feed()

    # torch calls this for each iterator; with persistent workers, once. `__iter__` is no
    # substitute: a loader's own class may ask for torch's iterator at any time.
    def _get_iterator(self) -> Any:
        with self.starting():
            return super()._get_iterator()


def take_attributes(loader: DataLoader[Any], **attributes: Any) -> None:
    """Gives a copied loader other attributes, also those that torch refuses to have set.

    It starts without an iterator, whatever the one that it is a copy of has.
    """
    loader.__dict__.update(attributes, _iterator=None)


# -- checkpoints

# Where bytes lie in a checkpoint of torch.distributed.checkpoint.
STORAGE_INFO = "_StorageInfo"
# What its pickle names for each tensor: the memory formats, and the function that finds a layout.
MEMORY_FORMAT = "_MEM_FORMAT_ENCODING"
LAYOUT_MAKER = "_get_layout"


def storage_info(file: str, offset: int, length: int) -> Any:
    """One of those."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


# -- pipelines


def traced_stage_class() -> Any:
    """What `torch.distributed.pipelining.build_stage` makes one of."""
    from torch.distributed.pipelining.stage import _PipelineStage

    return _PipelineStage
