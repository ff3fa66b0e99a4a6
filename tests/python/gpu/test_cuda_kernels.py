"""The CUDA kernels against torch in float64, on a GPU, or where there is none in emulation.

On a GPU every result is also compared with the emulation, bit for bit; the C++ tests compare that
with the kernels of the CPU.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import cuda_kernels
import cuda_library
import pytest
import torch
from cuda_library import CudaLibrary
from torch import Tensor

from pydist import _native

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.float32, torch.float16, torch.bfloat16)
# A rounding of each type, relative.
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in FLOATS}

Call = Callable[[CudaLibrary, list[Tensor]], list[Tensor]]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and cuda_library.emulated() is None:
        pytest.skip(f"the C++ tests are not built ({cuda_library.EMULATED} does not exist)")
    if request.param == "cuda" and cuda_library.why_not_real():
        pytest.skip(cuda_library.why_not_real())
    return str(request.param)


def at(tensor: Tensor, device: str, skew: int = 0) -> Tensor:
    """A copy on `device` that begins `skew` elements past where memory is aligned."""
    storage = torch.empty(tensor.numel() + skew, dtype=tensor.dtype, device=device)
    copied = storage[skew:]
    copied.copy_(tensor.reshape(-1))
    return copied


def assert_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


def on(
    device: str, call: Call, tensors: Sequence[Tensor], skews: Sequence[int] = (0,)
) -> list[Tensor]:
    """What `call` makes of copies of `tensors`, on the CPU; the same bits on every device."""

    def run(library: CudaLibrary, where: str) -> list[Tensor]:
        copies = [at(tensor, where, skew) for tensor, skew in zip(tensors, itertools.cycle(skews))]
        return [result.cpu() for result in call(library, copies)]

    emulated = cuda_library.emulated()
    if device == "cpu":
        assert emulated is not None
        return run(emulated, "cpu")
    results = run(cuda_library.real(), "cuda")
    if emulated is not None:
        assert_same_bits(results, run(emulated, "cpu"))
    return results


def random(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (count,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


# ---- reductions ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [1, 1000, 300_007])
def test_sums_and_means(device: str, dtype: torch.dtype, count: int) -> None:
    inputs = [random(dtype, count, seed) for seed in range(2)]
    exact = torch.stack([tensor.double() for tensor in inputs]).sum(0)
    for skews in ((0,), (1,), (1, 0)):
        for op, divisor in (("sum", 1.0), ("mean", 3.0)):

            def reduce(
                library: CudaLibrary, tensors: list[Tensor], op: str = op, divisor: float = divisor
            ) -> list[Tensor]:
                library.reduce(tensors, tensors[1], op, divisor=divisor)
                return [tensors[1]]

            (result,) = on(device, reduce, inputs, skews)
            torch.testing.assert_close(
                result.double(), exact / divisor, rtol=EPSILON[dtype], atol=4 * EPSILON[dtype]
            )


EXPECTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: (a + b) / 2,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": lambda a, b: a * b,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
    "premul_sum": lambda a, b: 0.5 * a - 2.0 * b,
}


@pytest.mark.parametrize("dtype", cuda_library.DTYPES, ids=str)
def test_every_operation_on_every_type(device: str, dtype: torch.dtype) -> None:
    is_number = dtype.is_floating_point or dtype.is_complex
    inputs = [random(dtype, 4099, seed) for seed in range(2)]
    for op in cuda_library.OPS:
        if op in ("mean", "premul_sum") and not is_number:
            continue
        if op in ("band", "bor", "bxor") and is_number:
            continue
        if op in ("min", "max") and dtype.is_complex:
            continue

        def reduce(library: CudaLibrary, tensors: list[Tensor], op: str = op) -> list[Tensor]:
            library.reduce(tensors, tensors[0], op, factors=[0.5, -2.0], divisor=2.0)
            return [tensors[0]]

        (result,) = on(device, reduce, inputs)
        wide = torch.complex128 if dtype.is_complex else torch.float64 if is_number else torch.int64
        a, b = (tensor.to(wide) for tensor in inputs)
        expected = EXPECTED[op](a, b)
        if is_number:
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(result.to(wide), expected, rtol=tolerance, atol=tolerance)
        elif dtype == torch.bool:
            assert torch.equal(result, expected.bool() if op != "bxor" else expected % 2 == 1)
        else:
            assert torch.equal(result, expected.to(dtype)), op


def test_nan_infinity_and_zeros(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([nan, 1.0, -0.0, 0.0, inf, inf, -nan])
    b = torch.tensor([1.0, nan, 0.0, -0.0, -inf, 1.0, nan])
    for dtype in FLOATS:
        for op in ("min", "max", "sum", "prod"):

            def reduce(library: CudaLibrary, tensors: list[Tensor], op: str = op) -> list[Tensor]:
                library.reduce(tensors, tensors[1], op)
                return [tensors[1]]

            (result,) = on(device, reduce, [a.to(dtype), b.to(dtype)])
            assert result[[0, 1, 6]].isnan().all()
            if op in ("min", "max"):
                assert torch.equal(result[2:4].signbit(), torch.tensor([True, False]))


@pytest.mark.parametrize("wire", NARROW, ids=str)
def test_a_ring_step(device: str, wire: torch.dtype) -> None:
    """Own float32 values and a partial sum that came in 16 bits (or in float32)."""
    partial, own = random(wire, 70_001, 1), random(torch.float32, 70_001, 2)
    for output in NARROW:

        def step(
            library: CudaLibrary, tensors: list[Tensor], output: torch.dtype = output
        ) -> list[Tensor]:
            result = torch.empty_like(tensors[0], dtype=output)
            library.reduce(tensors, result, "sum", wire=wire)
            return [result]

        (result,) = on(device, step, [partial, own])
        expected = (partial.float() + own.to(wire).float()).to(
            wire if output.itemsize == 4 else output
        )
        assert torch.equal(result, expected.to(output))


# ---- segments -----------------------------------------------------------------------------


def test_conversion_is_torchs(device: str) -> None:
    for source, target in itertools.product(FLOATS, FLOATS):
        for skews in ((0,), (1,)):

            def convert(
                library: CudaLibrary, tensors: list[Tensor], target: torch.dtype = target
            ) -> list[Tensor]:
                results = [torch.empty_like(tensor, dtype=target) for tensor in tensors]
                library.convert(list(zip(tensors, results, strict=True)))
                return results

            tensors = [random(source, count, count) for count in (0, 1, 5000, 4096, 70_001)]
            for given, result in zip(tensors, on(device, convert, tensors, skews), strict=True):
                if source == torch.float64 and target.itemsize == 2:
                    # torch rounds twice, by way of float32.
                    torch.testing.assert_close(result, given.to(target))
                else:
                    assert torch.equal(result, given.to(target))


def test_pack_and_unpack_with_scale(device: str) -> None:
    tensors = [random(NARROW[i % 3], i * 97 % 1000, i) for i in range(300)]
    sizes = [tensor.numel() for tensor in tensors]

    def there_and_back(library: CudaLibrary, tensors: list[Tensor]) -> list[Tensor]:
        flat = torch.full((sum(sizes),), -1.0, device=tensors[0].device)
        library.convert(list(zip(tensors, flat.split(sizes), strict=True)), scale=0.5)
        back = [torch.empty_like(tensor) for tensor in tensors]
        library.convert(list(zip(flat.split(sizes), back, strict=True)), scale=2.0)
        return [flat, *back]

    flat, *back = on(device, there_and_back, tensors)
    assert torch.equal(flat, torch.cat([tensor.float() * 0.5 for tensor in tensors]))
    for given, result in zip(tensors, back, strict=True):
        assert torch.equal(given, result)


@pytest.mark.parametrize("number", [0.75, -3.0, 0.0])
def test_a_scale_on_the_device_of_which_zero_clears_all(device: str, number: float) -> None:
    for source, target in itertools.product(FLOATS, FLOATS):
        tensors = [random(source, count, count) for count in (0, 1, 5000, 70_001)]
        tensors[2][0] = math.nan

        def convert(
            library: CudaLibrary, tensors: list[Tensor], target: torch.dtype = target
        ) -> list[Tensor]:
            results = [torch.full_like(tensor, -1.0, dtype=target) for tensor in tensors]
            scale = torch.tensor(4 * number, dtype=torch.float64, device=tensors[0].device)
            library.convert(list(zip(tensors, results, strict=True)), 2.0, scale, scale * 0 + 4)
            return results

        wide = torch.promote_types(torch.promote_types(source, target), torch.float32)
        # On the way from float64 to 16 bits torch rounds twice.
        eps = EPSILON[target] if wide.itemsize == 8 and target.itemsize == 2 else 0.0
        for given, result in zip(tensors, on(device, convert, tensors), strict=True):
            expected = (given.to(wide) * (2 * number)).to(target) if number else result * 0
            torch.testing.assert_close(result, expected, rtol=eps, atol=0, equal_nan=True)


# ---- optimizer steps ----------------------------------------------------------------------

ADAM: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": True},
    {"amsgrad": True, "maximize": True, "betas": (0.3, 0.7), "eps": 1e-4},
]


def awkward(count: int, seed: int) -> Tensor:
    """With zeros, subnormals, infinities and NaN among the values."""
    values = random(torch.float32, count, seed)
    special = torch.tensor([0.0, -0.0, 1e-40, -3e-39, 1e-20, 3e38, math.inf, -math.inf, math.nan])
    places = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: count // 4]
    values[places] = special[torch.arange(len(places)) % len(special)]
    return values


@pytest.mark.parametrize("options", ADAM, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_adam_has_the_bits_of_the_cpus_kernels(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    gradients = [awkward(5001, 10 + step).to(dtype) for step in range(4)]
    start = [awkward(5001, 1), *(torch.zeros(5001) for _ in range(3))]

    def train(library: CudaLibrary, tensors: list[Tensor]) -> list[Tensor]:
        names = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        entry: dict[str, Tensor | None] = dict(zip(names, tensors, strict=True))
        for number, gradient in enumerate(gradients, 1):
            entry["gradient"] = gradient.to(tensors[0].device)
            library.adam([entry], step=number, lr=0.01, gradient_scale=0.3, **options)
        return tensors

    master, *states = (tensor.clone() for tensor in start)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    for number, gradient in enumerate(gradients, 1):
        _native.adam_step(
            [master],
            [gradient],
            None,
            [states[0]],
            [states[1]],
            [states[2]] if options.get("amsgrad") else None,
            step=[torch.tensor(number - 1.0)],
            lr=0.01,
            beta1=beta1,
            beta2=beta2,
            eps=options.get("eps", 1e-8),
            weight_decay=options.get("weight_decay", 0.0),
            decoupled=options.get("decoupled", False),
            maximize=options.get("maximize", False),
            gradient_scale=0.3,
        )
    assert_same_bits(on(device, train, start, (0, 1)), [master, *states])


SGD: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.2},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_has_the_bits_of_the_cpus_kernels(device: str, options: dict[str, Any]) -> None:
    gradients = [awkward(5001, 10 + step).bfloat16() for step in range(4)]
    start = [awkward(5001, 1), torch.zeros(5001)]

    def train(library: CudaLibrary, tensors: list[Tensor]) -> list[Tensor]:
        entry: dict[str, Tensor | None] = {"master": tensors[0], "momentum": tensors[1]}
        for number, gradient in enumerate(gradients):
            entry["gradient"] = gradient.to(tensors[0].device)
            library.sgd([entry], first_step=number == 0, lr=30.0, gradient_scale=0.3, **options)
        return tensors

    master, momentum = (tensor.clone() for tensor in start)
    for number, gradient in enumerate(gradients):
        _native.sgd_step(
            [master],
            [gradient],
            None,
            [momentum] if "momentum" in options else None,
            begins=[number == 0],
            lr=30.0,
            momentum=options.get("momentum", 0.0),
            dampening=options.get("dampening", 0.0),
            weight_decay=options.get("weight_decay", 0.0),
            nesterov=options.get("nesterov", False),
            maximize=options.get("maximize", False),
            gradient_scale=0.3,
        )
    assert_same_bits(on(device, train, start, (0, 1)), [master, momentum])


@pytest.mark.parametrize("options", ADAM, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_adam_is_torchs(device: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    starts = [random(torch.float32, count, count) for count in (1, 7, 5001, 8192)]
    gradients = [
        [(random(torch.float32, len(start), 100 + step) / 8).to(dtype) for start in starts]
        for step in range(5)
    ]
    exact = [torch.nn.Parameter(start.double()) for start in starts]
    chosen = {key: value for key, value in options.items() if key != "decoupled"}
    kind = torch.optim.AdamW if "decoupled" in options else torch.optim.Adam
    optimizer = kind(exact, lr=0.01, foreach=False, fused=False, **{"weight_decay": 0.0, **chosen})
    for step in gradients:
        for parameter, gradient in zip(exact, step, strict=True):
            parameter.grad = gradient.double() * 0.5
        optimizer.step()

    def train(library: CudaLibrary, tensors: list[Tensor]) -> list[Tensor]:
        entries: list[dict[str, Tensor | None]] = [
            {
                "master": master,
                "parameter": master.to(dtype, copy=True),
                **{
                    name: torch.zeros_like(master)
                    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
                },
            }
            for master in tensors
        ]
        for number, step in enumerate(gradients, 1):
            for entry, gradient in zip(entries, step, strict=True):
                entry["gradient"] = gradient.to(tensors[0].device)
            library.adam(
                entries,
                step=number,
                lr=0.01,
                gradient_scale=0.5,
                **options,  # type: ignore[arg-type]
            )
        return [entry[name] for name in ("master", "parameter") for entry in entries]  # type: ignore[misc]

    results = on(device, train, starts, (0, 1))
    for master, parameter, expected in zip(results[:4], results[4:], exact, strict=True):
        torch.testing.assert_close(master.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(parameter, master.to(dtype))


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_is_torchs(device: str, options: dict[str, object]) -> None:
    starts = [random(torch.float32, count, count) for count in (3, 5001)]
    gradients = [
        [random(torch.bfloat16, len(start), 100 + step) for start in starts] for step in range(4)
    ]
    exact = [torch.nn.Parameter(start.double()) for start in starts]
    optimizer = torch.optim.SGD(exact, lr=0.1, foreach=False, **options)  # type: ignore[arg-type]
    for step in gradients:
        for parameter, gradient in zip(exact, step, strict=True):
            parameter.grad = gradient.double()
        optimizer.step()

    def train(library: CudaLibrary, tensors: list[Tensor]) -> list[Tensor]:
        entries: list[dict[str, Tensor | None]] = [
            # Never read before it is written.
            {"master": master, "momentum": torch.full_like(master, float("nan"))}
            for master in tensors
        ]
        for number, step in enumerate(gradients):
            for entry, gradient in zip(entries, step, strict=True):
                entry["gradient"] = gradient.to(tensors[0].device)
            library.sgd(entries, first_step=number == 0, lr=0.1, **options)  # type: ignore[arg-type]
        return tensors

    for master, expected in zip(on(device, train, starts), exact, strict=True):
        torch.testing.assert_close(master.double(), expected.detach(), rtol=1e-5, atol=1e-5)


# ---- what only a GPU has ------------------------------------------------------------------


@pytest.fixture
def gpu() -> CudaLibrary:
    if cuda_library.why_not_real():
        pytest.skip(cuda_library.why_not_real())
    return cuda_library.real()


def test_without_a_gpu_the_library_says_so() -> None:
    if not cuda_library.REAL.exists():
        pytest.skip(cuda_library.why_not_real())
    library = cuda_library.real()
    assert "-virtual" in library.targets
    assert "-real" in library.targets
    error, count = library.device_count()
    if not torch.cuda.is_available():
        assert count == 0
        assert error == 0 or library.error_text(error)


def test_a_faulty_call_is_refused_before_the_device_is_asked() -> None:
    if not cuda_library.REAL.exists():
        pytest.skip(cuda_library.why_not_real())
    tensor = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"pydist_cuda_reduce: .* \(error 1\)"):
        cuda_library.real().reduce([], tensor)
    # Nothing to do: no device is needed.
    cuda_library.real().reduce([tensor[:0]], tensor[:0])


def test_every_kernel_can_be_loaded(gpu: CudaLibrary) -> None:
    gpu.load_kernels()


def test_a_graph_captures_every_kernel(gpu: CudaLibrary) -> None:
    values = torch.randn(100_000, device="cuda")
    total, half = torch.empty_like(values), torch.empty_like(values, dtype=torch.bfloat16)
    gpu.load_kernels()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.reduce([values, values], total)
        gpu.convert([(total, half)])
    for replay in range(3):
        values.normal_()
        if replay == 1:
            values[7] = float("inf")
        graph.replay()
        assert torch.equal(half, (values + values).bfloat16())


def test_more_elements_than_32_bits_count(gpu: CudaLibrary) -> None:
    count = (1 << 32) + 4099
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip(f"the GPU has less than {3 * count >> 30} GiB free")
    values = torch.ones(count, dtype=torch.uint8, device="cuda")
    values[-1] = 5
    gpu.reduce([values, values], values)
    assert values[-1] == 10
    assert values[: 1 << 20].eq(2).all()
    assert values[-4099:-1].eq(2).all()


# ---- the benchmark ------------------------------------------------------------------------


def test_the_benchmark_calls_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cuda_library.emulated()
    if library is None:
        pytest.skip(f"the C++ tests are not built ({cuda_library.EMULATED} does not exist)")
    called: set[str] = set()
    call = CudaLibrary._call

    def note(self: CudaLibrary, name: str, *args: Any) -> None:
        called.add(name)
        call(self, name, *args)

    monkeypatch.setattr(CudaLibrary, "_call", note)
    for name, make in cuda_kernels.cases(library, 16 << 10, "cpu"):
        work, moved = make()
        work()
        assert moved >= 3 * (4 << 10), name  # at least three arrays of int8
    assert called == {"reduce", "convert", "adam", "sgd"}
