"""What is run on a machine with one NVIDIA GPU, most valuable first, in parts.

A part takes `PART_S` at most. It may have to build first, on a machine that has nothing yet, and
what is then left is divided among its steps: the limit of each keeps one that hangs from taking the
time of the others. Benchmarks leave what they find in the folder of reports, $REPORTS.
"""

from dataclasses import dataclass

# Of a whole part, and of that for the build.
PART_S = 540.0
BUILD_S = 180.0


@dataclass(frozen=True)
class Step:
    """A command, as it is typed in the repository's root with pydist installed.

    $REPORTS is the folder of reports.
    """

    what: str
    command: str
    limit_s: float


@dataclass(frozen=True)
class Part:
    what: str
    steps: tuple[Step, ...]


def tests(what: str, arguments: str, limit_s: float) -> Step:
    return Step(what, f"python -m pytest -p no:benchmark {arguments}", limit_s)


_GPU = "tests/python/gpu"
_CONFORMANCE = "tests/python/collectives/test_conformance.py"
_SHARDING = "tests/python/sharding"

PARTS = (
    Part(
        "training on NCCL",
        (
            Step("the machine: GPUs, driver, NCCL, kernels", "pydist info", 60),
            tests(
                "2 and 4 ranks that share the GPU: DataParallel and DDP against one process, "
                "`auto`, a rank that is killed in mid-collective, also as if between hosts",
                f"{_GPU}/test_nccl.py {_GPU}/test_nccl_leaving.py",
                210,
            ),
            tests(
                "weights that the GPU computes, also beside SyncBatchNorm and in steps that fail",
                f"{_GPU}/test_weights_on_device.py {_GPU}/test_weights_in_step.py",
                90,
            ),
        ),
    ),
    Part(
        "every collective on NCCL",
        (
            tests(
                "each collective, dtype and operator on 2 and 4 ranks, the ring on 3",
                f"{_CONFORMANCE} -k nccl",
                360,
            ),
        ),
    ),
    Part(
        "CUDA graphs and kernels",
        (
            tests(
                "capture of collectives and of a training step with its optimizer, by torch itself",
                f"{_GPU}/test_cuda_graphs.py",
                120,
            ),
            tests(
                "a captured step whose buffer is replaced",
                "tests/python/parallel/buffers/test_buffers.py -k graph",
                30,
            ),
            tests(
                "every kernel against torch in float64 and, bit for bit, against the CPU's; "
                "captures, counts beyond 32 bits",
                f"{_GPU}/test_cuda_kernels.py -rs",
                90,
            ),
            tests(
                "fused steps against the CPU's, on the current stream",
                f"{_SHARDING}/step/test_optimizer_step_calls.py -k cuda",
                30,
            ),
            Step(
                "the kernels' memory accesses",
                "compute-sanitizer --error-exitcode 1 "
                f'python -m pytest {_GPU}/test_cuda_kernels.py -k "not graph"',
                90,
            ),
        ),
    ),
    Part(
        "the sharded optimizer, and gradients that move",
        (
            tests(
                "ShardedOptimizer, its gathers and checkpoints, on NCCL and staged",
                f"{_SHARDING}/test_sharded_gpu.py {_SHARDING}/test_sharded_gpu_scaling.py "
                f"{_SHARDING}/test_sharded_gpu_captures.py "
                f"{_SHARDING}/test_sharded_gpu_checkpoints.py",
                240,
            ),
            tests(
                "fused steps of ShardedOptimizer",
                f"{_SHARDING}/step/test_fused_optimizer.py -k gpu",
                60,
            ),
            tests(
                "gradients that the program holds, whose memory moves, on NCCL and staged",
                "tests/python/gradients/test_held_gradients.py -k gpus",
                60,
            ),
        ),
    ),
    Part(
        "features, on NCCL and staged",
        (
            tests(
                "sparse gradients, which the fake device has not got",
                f"{_GPU}/test_gpu_features.py -k sparse",
                40,
            ),
            tests(
                "torch.compile, with Triton's kernels too",
                f"{_GPU}/test_gpu_features.py -k compiled",
                100,
            ),
            tests(
                "SyncBatchNorm on uneven and empty batches, each dtype and layout, and in training",
                f"{_GPU}/test_gpu_features.py -k sync_batch_norm",
                80,
            ),
            tests(
                "communication hooks: torch's own, PowerSGD, one that answers in other memory",
                f"{_GPU}/test_gpu_features.py -k hooks",
                50,
            ),
            tests(
                "weighted() and join()",
                f'{_GPU}/test_gpu_features.py -k "weighted or join"',
                50,
            ),
            tests(
                "pydist.metrics and pydist.evaluate, bit for bit",
                f"{_GPU}/test_gpu_features.py -k metrics",
                40,
            ),
        ),
    ),
    Part(
        "speed, and examples",
        (
            Step(
                "the kernels' share of the copy bandwidth (goal: 85 %)",
                "python bench/gpu/cuda_kernels.py --json $REPORTS/kernels.json",
                60,
            ),
            Step(
                "staging beside plain copies, cudaHostRegister of the shared heap at work",
                "python bench/gpu/staging.py --seconds 1 --json $REPORTS/staging.json",
                60,
            ),
            Step(
                "the ring beside NCCL's own all-reduce, both by sockets",
                "python bench/gpu/nccl_ring.py --seconds 1 --json $REPORTS/ring.json",
                60,
            ),
            Step(
                "the latency of an all-reduce of 8 B to 64 KiB beside torch's ProcessGroupNCCL, "
                "by sockets",
                "CUDA_VISIBLE_DEVICES=0 python bench/gpu/gpu_latency.py "
                "--sizes 8,64,512,4K,16K,64K --seconds 1 --json $REPORTS/latency.json",
                60,
            ),
            Step(
                "an example on a shared GPU, staged",
                "PYDIST_BACKEND=native pydist run -n 2 examples/train_gpt.py",
                60,
            ),
            Step(
                "the idle GPU, by NVML or nvidia-smi",
                "pydist run --gpus auto:1 examples/digits.py",
                60,
            ),
        ),
    ),
    Part(
        "training steps beside DDP: time, memory, waits of the host",
        (
            Step(
                "GPT, ResNet-18 and a recommender: time, memory, and how often the host waits",
                "python bench/gpu/ddp_steps.py --json $REPORTS/ddp_steps.json",
                240,
            ),
            tests(
                "the host waits as often as on the stand-in, in steps of each kind",
                f"{_GPU}/test_host_waits.py",
                120,
            ),
        ),
    ),
    Part(
        "staging",
        (
            tests(
                "streams, lifetimes, order, a GPU that is late, a rank that dies, DataParallel, "
                "DDP, hooks, compress, buffers",
                f"{_GPU}/test_staging.py",
                180,
            ),
            tests(
                "each collective, dtype and operator on native (3 ranks) and gloo (2)",
                f'{_CONFORMANCE} -k "device and not nccl"',
                180,
            ),
        ),
    ),
    Part(
        "everything else, as a user's machine runs it",
        (
            Step(
                "the everyday tests in Python",
                'python -m pytest -p no:benchmark -n 8 --dist loadfile -m "not thorough"',
                360,
            ),
        ),
    ),
    Part(
        "an optimizer's state on the host",
        (
            tests(
                "values and checkpoints, with and without",
                f"{_SHARDING}/offload/test_offload_values.py "
                f"{_SHARDING}/offload/test_offload_checkpoints.py",
                240,
            ),
            Step(
                "the flows of a step: GB/s, and which bounds it",
                "pydist bench sharded --offload -p 1 --models gpt --seconds 10 "
                "--json $REPORTS/offload.json",
                60,
            ),
        ),
    ),
    Part(
        "training steps beside DDP: 4 ranks, and staged",
        tuple(
            Step(
                f"{ranks} ranks on {backend}",
                f"python bench/gpu/ddp_steps.py --ranks {ranks} --backend {backend} --seconds 1 "
                "--limit 33 "
                f"--json $REPORTS/ddp_steps_{ranks}_{backend}.json",
                120,
            )
            for ranks, backend in ((4, "nccl"), (2, "native"), (4, "native"))
        ),
    ),
)
