"""The CUDA kernels beside the copy bandwidth of the card: python bench/gpu/cuda_kernels.py

Every kernel is bound by memory, so what counts is how many bytes a second it moves, read and
written, as a share of what a copy moves in the same run. The aim is 85 %. Calls are replayed as
CUDA graphs, so that the time is the device's, over several sets of buffers, so that nothing is
found in the cache; medians. Exits with 1 where a kernel misses the aim, with 2 where there is no
GPU.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
import cuda_library
import gpu_figures
from cuda_library import CudaLibrary

AIM = 0.85
REPEATS = 20
# Tensors that a bucket is made of.
TENSORS = 64


def seconds(work: Sequence[Callable[[], None]]) -> float:
    """The median time of one of `work`, which run one after the other."""
    for call in work:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # So that the device is at work while the host launches what counts.
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(work))
    return statistics.median(times[1:])


# Makes buffers; returns a call of a kernel on them and the bytes that it moves.
Make = Callable[[], tuple[Callable[[], None], int]]


def cases(library: CudaLibrary, size: int, device: str = "cuda") -> list[tuple[str, Make]]:
    """Of every kernel, on about `size` bytes an array of float32."""

    def filled(bytes_each: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(bytes_each // dtype.itemsize, device=device).to(dtype)

    def reduction(dtypes: Sequence[torch.dtype], output: torch.dtype, op: str = "sum") -> Make:
        def make() -> tuple[Callable[[], None], int]:
            count = size // 4
            inputs = [filled(count * dtype.itemsize, dtype) for dtype in dtypes]
            result = torch.empty(count, dtype=output, device=device)
            moved = sum(tensor.nbytes for tensor in inputs) + result.nbytes
            return lambda: library.reduce(inputs, result, op, divisor=len(inputs)), moved

        return make

    def conversion(source: torch.dtype, target: torch.dtype, count: int) -> Make:
        def make() -> tuple[Callable[[], None], int]:
            each = size // 4 // count
            pairs = [
                (
                    filled(each * source.itemsize, source),
                    torch.empty(each, dtype=target, device=device),
                )
                for _ in range(count)
            ]
            moved = sum(a.nbytes + b.nbytes for a, b in pairs)
            return lambda: library.convert(pairs, scale=0.5), moved

        return make

    def step(
        take: Callable[[list[dict[str, Tensor | None]]], None],
        states: Sequence[str],
        gradient: torch.dtype,
        parameter: torch.dtype | None = None,
    ) -> Make:
        def make() -> tuple[Callable[[], None], int]:
            count = size // 4 // TENSORS
            entries: list[dict[str, Tensor | None]] = []
            moved = 0
            for _ in range(TENSORS):
                master = filled(4 * count, torch.float32)
                entry: dict[str, Tensor | None] = {
                    name: filled(4 * count, torch.float32).abs() for name in states
                }
                entry["master"] = master
                entry["gradient"] = filled(gradient.itemsize * count, gradient)
                entry["parameter"] = None if parameter is None else master.to(parameter)
                # All but the gradient are read and written.
                read_and_written = 4 * (1 + len(states)) + (parameter.itemsize if parameter else 0)
                moved += count * (2 * read_and_written + gradient.itemsize)
                entries.append(entry)
            return lambda: take(entries), moved

        return make

    def adam(*dtypes: torch.dtype) -> Make:
        def take(entries: list[dict[str, Tensor | None]]) -> None:
            library.adam(entries, step=3, lr=1e-3, weight_decay=0.1, decoupled=True)

        return step(take, ("exp_avg", "exp_avg_sq"), *dtypes)

    def sgd(*dtypes: torch.dtype) -> Make:
        def take(entries: list[dict[str, Tensor | None]]) -> None:
            library.sgd(entries, first_step=False, lr=1e-3, momentum=0.9)

        return step(take, ("momentum",), *dtypes)

    f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
    i32, i8 = torch.int32, torch.int8
    return [
        ("reduce 2 float32", reduction([f32, f32], f32)),
        ("reduce 2 float32, mean", reduction([f32, f32], f32, "mean")),
        ("reduce 2 bfloat16", reduction([bf16, bf16], bf16)),
        ("reduce 2 float16, mean", reduction([f16, f16], f16, "mean")),
        ("scale bfloat16", reduction([bf16], bf16, "mean")),
        ("reduce 2 float64", reduction([f64, f64], f64)),
        ("reduce 2 int32", reduction([i32, i32], i32)),
        ("reduce 2 int8, max", reduction([i8, i8], i8, "max")),
        ("ring step float32 + bfloat16", reduction([f32, bf16], f32)),
        ("ring step bfloat16 + float32", reduction([bf16, f32], bf16)),
        ("float32, scaled", conversion(f32, f32, 1)),
        ("float32 to bfloat16, scaled", conversion(f32, bf16, 1)),
        ("bfloat16 to float32, scaled", conversion(bf16, f32, 1)),
        (f"pack {TENSORS} bfloat16 as float32", conversion(bf16, f32, TENSORS)),
        (f"unpack {TENSORS} float32 as float16", conversion(f32, f16, TENSORS)),
        ("AdamW float32", adam(f32)),
        ("AdamW bfloat16, float32 master", adam(bf16, bf16)),
        ("SGD float32, momentum", sgd(f32)),
        ("SGD bfloat16, float32 master", sgd(bf16, bf16)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mib", nargs="?", type=int, default=256, help="of each array")
    gpu_figures.add_option(parser)
    given = parser.parse_args(arguments)
    why_not = cuda_library.why_not_real()
    if why_not:
        print(f"The CUDA kernels were not measured: {why_not}.")
        return 2
    library = cuda_library.real()
    size = given.mib << 20
    library.load_kernels()

    sources = [torch.randn(size // 4, device="cuda") for _ in range(3)]
    targets = [torch.empty_like(source) for source in sources]
    copy_time = seconds(
        [
            lambda a=a, b=b: b.copy_(a)  # type: ignore[misc]
            for a, b in zip(sources, targets, strict=True)
        ]
    )
    copy_rate = 2 * size / copy_time
    del sources, targets
    print(f"{torch.cuda.get_device_name()}, kernels for {library.targets}")
    print(f"copy of {size >> 20} MiB: {copy_rate * 1e-9:.0f} GB/s, read and written\n")
    print(f"{'kernel':36} {'GB/s':>8} {'of copy':>8}")
    missed = []
    kept = gpu_figures.Kept(given.json)
    kept.add("copy", f"{copy_rate * 1e-9:.0f} GB/s", bytes_per_s=copy_rate)
    for name, make in cases(library, size):
        made = [make() for _ in range(3)]
        rate = made[0][1] / seconds([call for call, _ in made])
        del made
        share = rate / copy_rate
        mark = "" if share >= AIM else "  below the aim"
        print(f"{name:36} {rate * 1e-9:8.0f} {share:8.0%}{mark}")
        kept.add(name, f"{share:.0%}", bytes_per_s=rate, of_copy=share)
        if share < AIM:
            missed.append(name)
    print(
        f"\n{len(missed)} below {AIM:.0%} of the copy" if missed else f"\nall at {AIM:.0%} or more"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
