"""What a program sets on a wrapper that the wrapped module does not have.

torch's DistributedDataParallel keeps it beside the module. A pydist.DataParallel stands for the
module, so a further module, parameter or buffer would become a part of that: it would be in its
state, train with it, and run where a forward goes through its parts.
"""

from typing import NoReturn

from torch import Tensor, nn

from pydist._torch import LossBase
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type


def can_be_kept_beside(value: nn.Module) -> bool:
    """Whether it is all the same where a module is: it has no state, and no mode."""
    has_state = any(True for _ in value.parameters()) or any(True for _ in value.buffers())
    return isinstance(value, LossBase) and not has_state


def refuse_addition(module: nn.Module, name: str, value: nn.Module | Tensor) -> NoReturn:
    """Raises InvalidUsage where `model.ema = ...` would make something a part of the module."""
    raise InvalidUsage(
        f"model.{name} = ... would make {a_type(value)} a part of the wrapped module, "
        f"{a_type(module)}, where torch's DistributedDataParallel would keep it beside the module: "
        f"keep it in a variable of the program's, or in a list (model.{name} = [...]); to have it "
        f"in the module, set model.module.{name}"
    )


def refuse_another_module() -> NoReturn:
    """Raises InvalidUsage for `model.module = ...`."""
    raise InvalidUsage(
        "model.module = ... would give a pydist.DataParallel another module, and it wraps one for "
        "life: make another wrapper, pydist.DataParallel(torch.compile(model.module)) say"
    )
