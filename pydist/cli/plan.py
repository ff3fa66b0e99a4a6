"""`pydist plan`: the bytes that training a model takes on each rank, and the time on many hosts."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pydist._torch import tree_map_only
from pydist.cli.model_source import build_model, find, guarded, load_source
from pydist.cli.parser import Parser
from pydist.cli.scaling_options import add_arguments, ranks_of, scaling_of
from pydist.errors import InvalidUsage
from pydist.planning.memory_estimate import plan

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

_OPTIMIZERS = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
}

_DESCRIPTION = """\
Predicts the bytes that training takes on each rank, term by term: with pydist.DataParallel, and
with pydist.ShardedOptimizer in stages 1 and 2. Nothing is allocated: the model is made on torch's
device "meta" where it can be. With --hosts: step time and efficiency on so many hosts, too, and
what was assumed for them.
"""

_EXAMPLES = """\
examples:
  pydist plan model.py --ranks 8 --dtype bf16 --optimizer adamw
  pydist plan model.py:build_large --ranks 64 --input 4x1024:int64
  pydist plan my_package.models:GPT --ranks 8 --optimizer sgd --set momentum=0.9
  pydist plan model.py --ranks 8 --dtype bf16 --offload
  pydist plan model.py --hosts 64 --ranks-per-host 8 --link 25 --step-ms 180

The file is imported, so training stands behind `if __name__ == "__main__":`.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pydist plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="FILE.py or MODULE, and :NAME of a torch.nn.Module or of what makes one without "
        "arguments; default: build_model, model or Model",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="of the job; with --hosts it follows from those"
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="of the model and of the input: bf16, fp16, fp32, fp64; default: as it is made",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="of torch.optim in any case, or MODULE:CLASS; default: adamw",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the optimizer, such as amsgrad=True; may be repeated",
    )
    parser.add_argument(
        "--no-master-weights",
        action="store_true",
        help="no float32 copies of 16-bit parameters",
    )
    parser.add_argument(
        "--share-parameters",
        action="store_true",
        help="one copy of the parameters a host, in the sharded stages",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="the optimizer's state on the host, in the sharded stages (offload='cpu')",
    )
    parser.add_argument(
        "--delayed",
        action="store_true",
        help="with --offload: the host steps beside the next forward and backward",
    )
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        metavar="N",
        help="for --share-parameters and --hosts; default: all, and with --hosts --ranks by hosts, "
        "or 1",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=float,
        metavar="MIB",
        help="as for pydist.DataParallel; default: by the bytes of all gradients, as sharded "
        "optimizers have it: 8 for 100 MB, and as their square root, from 0.25 to 64",
    )
    sample = parser.add_mutually_exclusive_group()
    sample.add_argument(
        "--input",
        action="append",
        metavar="SHAPE[:TYPE]",
        help="shape of an argument of forward, such as 32x3x224x224 or 4x1024:int64, to predict "
        "activations; repeated for further arguments",
    )
    sample.add_argument(
        "--sample",
        metavar="NAME",
        help="in the model's file: the arguments of forward, or a function that returns them; a "
        "tensor, a tuple, or a dictionary of keywords",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _dtype_of(text: str) -> torch.dtype:
    found = _DTYPES.get(text) or getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise InvalidUsage(
            f"no type {text!r}: use {', '.join(_DTYPES)}, or a name of torch's, such as int64"
        )
    return found


def _optimizer_of(text: str) -> type[Optimizer]:
    place, _, name = text.partition(":")
    if name:
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ImportError as error:
            raise InvalidUsage(f"--optimizer {text}: {error}") from error
        if isinstance(found, type) and issubclass(found, Optimizer):
            return found
        raise InvalidUsage(f"--optimizer {text}: {place} has no such class of optimizers")
    if text.lower() not in _OPTIMIZERS:
        raise InvalidUsage(
            f"no optimizer {text!r} in torch.optim: use one of {', '.join(sorted(_OPTIMIZERS))}, "
            "or MODULE:CLASS"
        )
    return _OPTIMIZERS[text.lower()]


def _option_of(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise InvalidUsage(f"--set {text}: write OPTION=VALUE, such as amsgrad=True")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError) as error:
        raise InvalidUsage(f"--set {text}: {value!r} is not a number, True or the like") from error


def _input_of(text: str) -> torch.Tensor:
    shape, _, dtype = text.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise InvalidUsage(f"--input {text}: write the shape as 32x3x224x224 or 4x1024:int64")
    extents = [int(extent) for extent in shape.split("x")]
    return torch.empty(extents, dtype=_dtype_of(dtype) if dtype else None, device="meta")


def _sample_of(options: argparse.Namespace, module: ModuleType) -> Any:
    if options.input:
        return tuple(_input_of(text) for text in options.input)
    if options.sample:
        found = find(module, options.sample)
        return guarded(f"{options.sample}()", found) if callable(found) else found
    return None


def _with_values(
    options: argparse.Namespace, module: ModuleType, name: str, dtype: torch.dtype | None
) -> tuple[nn.Module, Any]:
    """The model and its input, to be computed with."""
    sample = _sample_of(options, module)
    if sample is None:
        raise InvalidUsage("--measure-step needs an input: --input SHAPE, or --sample NAME")
    model = build_model(module, name, on_meta=False)

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.device.type != "meta":
            return tensor.to(kind)
        return torch.zeros(tensor.shape, dtype=kind)

    return model if dtype is None else model.to(dtype), tree_map_only(torch.Tensor, filled, sample)


def main(arguments: Sequence[str]) -> int:
    """Prints a plan.

    Args:
        arguments: the model, and flags.

    Returns:
        0.

    Raises:
        InvalidUsage: the arguments make no sense, or there is no such model.
    """
    options = _parser().parse_args(list(arguments))
    ranks, ranks_per_host = ranks_of(options)
    module, name = load_source(options.model)
    model = build_model(module, name)
    optimizer = _optimizer_of(options.optimizer)
    optimizer_options = dict(_option_of(text) for text in options.set)
    dtype = _dtype_of(options.dtype) if options.dtype else None
    found = plan(
        model,
        ranks,
        optimizer=optimizer,
        dtype=dtype,
        master_weights=False if options.no_master_weights else "auto",
        share_parameters=options.share_parameters,
        offload="cpu" if options.offload else None,
        delayed=options.delayed,
        ranks_per_host=ranks_per_host,
        bucket_cap_mb=options.bucket_cap_mb,
        sample=_sample_of(options, module),
        **optimizer_options,
    )
    if options.hosts is None:
        print(json.dumps(found.to_dict(), indent=2) if options.json else found)
        return 0

    def with_values() -> tuple[nn.Module, Any]:
        return _with_values(options, module, name, dtype)

    times = scaling_of(
        options, model, ranks // options.hosts, dtype, with_values, optimizer, optimizer_options
    )
    if options.json:
        print(json.dumps({**found.to_dict(), "scaling": times.to_dict()}, indent=2))
    else:
        print(f"{found}\n\n{times}")
    return 0
