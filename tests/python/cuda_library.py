"""The CUDA kernel library by its C interface (csrc/kernels/cuda/kernels.h), on tensors.

`real()` is the library that was built with nvcc; `emulated()` the one that the C++ tests use, whose
kernels run on the CPU, so that the same calls give the same bits on both.
"""

import ctypes
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path

import torch
from build_folder import BUILD
from torch import Tensor

from pydist import _native

REAL = Path(_native.__file__).with_name("libpydist_cuda.so")
EMULATED = BUILD / "tests" / "cpp" / "libpydist_emulated_cuda.so"

ABI_VERSION = 5

# In the order of csrc/base/dtype.h and csrc/base/reduce_op.h.
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
OPS = ("sum", "mean", "min", "max", "prod", "band", "bor", "bxor", "premul_sum")


class _Reduce(Structure):
    _fields_ = (
        ("inputs", POINTER(c_void_p)),
        ("input_dtypes", POINTER(c_uint8)),
        ("factors", POINTER(c_double)),
        ("output", c_void_p),
        ("count", c_uint64),
        ("divisor", c_double),
        ("input_count", c_uint32),
        ("op", c_uint8),
        ("output_dtype", c_uint8),
        ("wire_dtype", c_uint8),
    )


class _Segment(Structure):
    _fields_ = (
        ("from_", c_void_p),
        ("to", c_void_p),
        ("count", c_uint64),
        ("from_dtype", c_uint8),
        ("to_dtype", c_uint8),
    )


class _Convert(Structure):
    _fields_ = (
        ("segments", POINTER(_Segment)),
        ("segment_count", c_uint64),
        ("scale", c_double),
        ("device_scale", c_void_p),
        ("device_divisor", c_void_p),
    )


class _Step(Structure):
    _fields_ = (
        ("lr", c_double),
        ("weight_decay", c_double),
        ("gradient_scale", c_double),
        ("maximize", c_uint8),
        ("found_inf", c_void_p),
    )


class _AdamSegment(Structure):
    _fields_ = (
        ("gradient", c_void_p),
        ("master", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("max_exp_avg_sq", c_void_p),
        ("parameter", c_void_p),
        ("count", c_uint64),
        ("gradient_dtype", c_uint8),
        ("parameter_dtype", c_uint8),
    )


class _Adam(Structure):
    _fields_ = (
        ("segments", POINTER(_AdamSegment)),
        ("segment_count", c_uint64),
        ("common", _Step),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("step", c_uint64),
        ("decoupled_weight_decay", c_uint8),
        ("amsgrad", c_uint8),
    )


class _SgdSegment(Structure):
    _fields_ = (
        ("gradient", c_void_p),
        ("master", c_void_p),
        ("momentum", c_void_p),
        ("parameter", c_void_p),
        ("count", c_uint64),
        ("gradient_dtype", c_uint8),
        ("parameter_dtype", c_uint8),
    )


class _Sgd(Structure):
    _fields_ = (
        ("segments", POINTER(_SgdSegment)),
        ("segment_count", c_uint64),
        ("common", _Step),
        ("momentum", c_double),
        ("dampening", c_double),
        ("nesterov", c_uint8),
        ("first_step", c_uint8),
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None and tensor.numel() > 0 else None


def _dtype(tensor: Tensor | None) -> int:
    return DTYPES.index(tensor.dtype) if tensor is not None else 1


class CudaLibrary:
    """The library in a file. Calls are enqueued on torch's current stream."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("targets", "error_text"):
            getattr(self.library, f"pydist_cuda_{name}").restype = c_char_p
        version = self.library.pydist_cuda_abi_version()
        assert version == ABI_VERSION, f"{path} has interface {version}, expected {ABI_VERSION}"

    @property
    def targets(self) -> str:
        text: bytes = self.library.pydist_cuda_targets()
        return text.decode()

    def error_text(self, error: int) -> str:
        text: bytes = self.library.pydist_cuda_error_text(c_int(error))
        return text.decode()

    def device_count(self) -> tuple[int, int]:
        """The error and the count."""
        count = c_int(-1)
        error: int = self.library.pydist_cuda_device_count(ctypes.byref(count))
        return error, count.value

    def load_kernels(self) -> None:
        self._check("load_kernels", self.library.pydist_cuda_load_kernels())

    def _check(self, name: str, error: int) -> None:
        if error != 0:
            raise RuntimeError(f"pydist_cuda_{name}: {self.error_text(error)} (error {error})")

    def _call(self, name: str, descriptor: Structure, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        function = getattr(self.library, f"pydist_cuda_{name}")
        self._check(name, function(ctypes.byref(descriptor), c_void_p(stream)))

    def reduce(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        op: str = "sum",
        *,
        factors: Sequence[float] | None = None,
        divisor: float = 1.0,
        wire: torch.dtype = torch.float32,
    ) -> None:
        n = len(inputs)
        descriptor = _Reduce(
            inputs=(c_void_p * n)(*map(_pointer, inputs)),
            input_dtypes=(c_uint8 * n)(*map(_dtype, inputs)),
            factors=(c_double * n)(*factors) if factors is not None else None,
            output=_pointer(output),
            count=output.numel(),
            divisor=divisor,
            input_count=n,
            op=OPS.index(op),
            output_dtype=_dtype(output),
            wire_dtype=DTYPES.index(wire),
        )
        self._call("reduce", descriptor, output.device)

    def convert(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        scale: float = 1.0,
        device_scale: Tensor | None = None,
        device_divisor: Tensor | None = None,
    ) -> None:
        """Each pair's second tensor becomes the first times the scales, divided."""
        segments = (_Segment * len(pairs))(
            *(_Segment(_pointer(a), _pointer(b), a.numel(), _dtype(a), _dtype(b)) for a, b in pairs)
        )
        given = _pointer(device_scale), _pointer(device_divisor)
        descriptor = _Convert(segments, len(pairs), scale, *given)
        self._call("convert", descriptor, pairs[0][1].device)

    def adam(
        self,
        trained: Sequence[dict[str, Tensor | None]],
        *,
        step: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        amsgrad: bool = False,
        maximize: bool = False,
        gradient_scale: float = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """`trained`: gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, parameter."""
        names = ("gradient", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "parameter")
        segments = (_AdamSegment * len(trained))(
            *(_AdamSegment(*_trained(entry, names)) for entry in trained)
        )
        common = _Step(lr, weight_decay, gradient_scale, maximize, _pointer(found_inf))
        descriptor = _Adam(segments, len(trained), common, *betas, eps, step, decoupled, amsgrad)
        self._call("adam", descriptor, _device(trained))

    def sgd(
        self,
        trained: Sequence[dict[str, Tensor | None]],
        *,
        first_step: bool,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        gradient_scale: float = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """`trained`: gradient, master, momentum, parameter."""
        names = ("gradient", "master", "momentum", "parameter")
        segments = (_SgdSegment * len(trained))(
            *(_SgdSegment(*_trained(entry, names)) for entry in trained)
        )
        common = _Step(lr, weight_decay, gradient_scale, maximize, _pointer(found_inf))
        descriptor = _Sgd(segments, len(trained), common, momentum, dampening, nesterov, first_step)
        self._call("sgd", descriptor, _device(trained))


def _trained(entry: dict[str, Tensor | None], names: Sequence[str]) -> list[int | None]:
    gradient, parameter = entry["gradient"], entry.get("parameter")
    assert gradient is not None
    pointers = [_pointer(entry.get(name)) for name in names]
    return [*pointers, gradient.numel(), _dtype(gradient), _dtype(parameter)]


def _device(trained: Sequence[dict[str, Tensor | None]]) -> torch.device:
    gradient = trained[0]["gradient"]
    assert gradient is not None
    return gradient.device


@cache
def emulated() -> CudaLibrary | None:
    return CudaLibrary(EMULATED) if EMULATED.exists() else None


@cache
def why_not_real() -> str:
    """Why the kernels cannot run on a GPU here; empty where they can."""
    if not REAL.exists():
        return f"pydist was built without nvcc ({REAL} does not exist)"
    library = CudaLibrary(REAL)
    error, count = library.device_count()
    if error != 0:
        return f"no usable GPU: {library.error_text(error)}"
    if count == 0 or not torch.cuda.is_available():
        return "torch sees no GPU: install a CUDA build of torch on a machine that has one"
    return ""


@cache
def real() -> CudaLibrary:
    return CudaLibrary(REAL)
