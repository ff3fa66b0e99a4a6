"""`pydist.plan` and `pydist plan`: predictions held against what is allocated."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from training import TIME_LIMIT

import pydist
from pydist import _native
from pydist.planning.memory_estimate import shard_counts
from pydist.planning.step_memory import step_memory, temporaries
from pydist.sharding.step.element_wise import ELEMENT_WISE

pytestmark = TIME_LIMIT


def small_model() -> nn.Module:
    """Sizes that nothing divides."""
    return nn.Sequential(
        nn.Linear(130, 211), nn.BatchNorm1d(211), nn.ReLU(), nn.Linear(211, 77), nn.Linear(77, 3)
    )


def wide_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])


# ---- arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_takes_what_the_literature_says(dtype: torch.dtype, ranks: int) -> None:
    """Rajbhandari et al., arXiv 1910.02054: bytes for each parameter, with Adam."""
    plan = pydist.plan(wide_model(), ranks, dtype=dtype, bucket_cap_mb=8)
    whole, kept = (8, 8) if dtype is torch.float32 else (4, 12)
    half = whole // 2
    in_flight = plan.stage2.buckets
    for memory, expected in (
        (plan.ddp.total, whole + kept),
        (plan.stage1.total, whole + kept / ranks),
        (plan.stage2.total - in_flight, half + (kept + half) / ranks),
    ):
        assert memory / plan.trained == pytest.approx(expected, rel=0.005)
    assert in_flight == pytest.approx(3 * 8 * 2**20, rel=0.1)


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=8),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 9),
)
def test_shards_are_equal_and_hold_every_element_once(
    counts: list[int], element_bytes: int, ranks: int
) -> None:
    shard, segments = shard_counts(counts, element_bytes, ranks)
    assert shard * element_bytes % 128 == 0
    for slot, count in enumerate(counts):
        assert sum(held for s, _, held in segments if s == slot) == count
    for rank in range(ranks):
        assert sum(held for _, r, held in segments if r == rank) <= shard
    assert [(s, r) for s, r, _ in segments] == sorted({(s, r) for s, r, _ in segments})


@pytest.mark.skipif(not hasattr(_native, "ShardLayout"), reason="built without shards")
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=8),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 9),
)
def test_shards_are_those_of_the_engine(counts: list[int], element_bytes: int, ranks: int) -> None:
    native: Any = _native
    layout = native.ShardLayout(counts, element_bytes, ranks)
    shard, segments = shard_counts(counts, element_bytes, ranks)
    assert (shard, shard * ranks) == (layout.shard, layout.count)
    for rank in range(ranks):
        held = [(slot, count) for slot, _, count, _ in layout.segments(rank)]
        assert held == [(slot, count) for slot, r, count in segments if r == rank]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_state_is_what_the_optimizer_keeps(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = small_model()
    made = optimizer(list(model.parameters()), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    kept = [v for s in made.state.values() for v in s.values() if isinstance(v, Tensor)]
    plan = pydist.plan(model, 3, optimizer=optimizer, **options)
    assert plan.ddp.state == sum(tensor.nbytes for tensor in kept)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_are_what_the_reducer_allocates(dtype: torch.dtype) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1, 33, 0, 1000))
    model.append(nn.Parameter(torch.zeros(7, dtype=dtype), requires_grad=False))
    predicted = pydist.plan(model, 1)
    wrapped = pydist.DataParallel(model)
    assert predicted.ddp.gradients == sum(b.size_bytes for b in wrapped.plan.buckets)
    assert predicted.ddp == pydist.plan(wrapped, 1).ddp
    assert (predicted.elements, predicted.trained) == (1041, 1034)


def test_terms_of_special_models() -> None:
    model = small_model()
    tied = nn.Sequential(model, model)
    assert pydist.plan(tied, 2).ddp == pydist.plan(model, 2).ddp
    frozen = small_model().requires_grad_(False)
    nothing = pydist.plan(frozen, 2)
    assert nothing.stage2.total == nothing.stage1.total == nothing.ddp.total
    assert nothing.ddp.total == nothing.ddp.parameters + nothing.ddp.buffers
    assert nothing.ddp.buffers == 2 * 211 * 4 + 8
    shared = pydist.plan(model, 8, share_parameters=True, ranks_per_host=4)
    assert shared.stage1.parameters * 4 == pydist.plan(model, 8).stage1.parameters
    assert shared.ddp == pydist.plan(model, 8).ddp
    plain = pydist.plan(model, 8, dtype=torch.bfloat16, master_weights=False)
    assert plain.ddp.master == plain.stage1.master == 0
    assert plain.ddp.state < pydist.plan(model, 8, dtype=torch.bfloat16).ddp.state
    sparse = pydist.plan(nn.Embedding(10, 4, sparse=True), 2)
    assert sparse.ddp.state == sparse.ddp.gradients == 0
    assert "sparse gradients" in str(sparse)


def test_what_makes_no_sense_is_refused() -> None:
    model = small_model()
    for match, call in (
        ("ranks=0", lambda: pydist.plan(model, 0)),
        ("ranks is 2.5; it must be a whole number", lambda: pydist.plan(model, 2.5)),  # type: ignore[arg-type]
        ("ranks is True", lambda: pydist.plan(model, True)),
        ("ranks_per_host is '2'", lambda: pydist.plan(model, 8, ranks_per_host="2")),  # type: ignore[arg-type]
        ("model is a str; it must be a torch.nn.Module", lambda: pydist.plan("model.py", 2)),  # type: ignore[arg-type]
        ("dtype is 'bf16'.*such as torch.bfloat16", lambda: pydist.plan(model, 8, dtype="bf16")),  # type: ignore[arg-type]
        (
            "bucket_cap_mb is 'a'; it must be a number",
            lambda: pydist.plan(model, 8, bucket_cap_mb="a"),
        ),  # type: ignore[arg-type]
        ("bucket_cap_mb is inf", lambda: pydist.plan(model, 8, bucket_cap_mb=float("inf"))),
        ("bucket_cap_mb is 'a'", lambda: pydist.DataParallel(model, bucket_cap_mb="a")),  # type: ignore[arg-type]
        ("ranks_per_host=9", lambda: pydist.plan(model, 8, ranks_per_host=9)),
        ("master_weights is 'no'", lambda: pydist.plan(model, 8, master_weights="no")),  # type: ignore[arg-type]
        ("bucket_cap_mb is 0", lambda: pydist.plan(model, 8, bucket_cap_mb=0)),
        ("must be a floating-point type", lambda: pydist.plan(model, 8, dtype=torch.int8)),
        ("AdamW can't update a flat tensor.*nonsense", lambda: pydist.plan(model, 8, nonsense=1)),
        ("Muon orthogonalises", lambda: pydist.plan(model, 8, optimizer=torch.optim.Muon)),
        ("Adafactor factors", lambda: pydist.plan(model, 8, optimizer=torch.optim.Adafactor)),
        ("LBFGS takes", lambda: pydist.plan(model, 8, optimizer=torch.optim.LBFGS)),
        ("capturable=True is for", lambda: pydist.plan(model, 8, capturable=True)),
        ("parameter weight has no shape yet", lambda: pydist.plan(nn.LazyLinear(3), 8)),
        (
            "buffer running_mean has no shape yet",
            lambda: pydist.plan(nn.LazyBatchNorm1d(affine=False), 8),
        ),
        (
            "forward of the sample.*RuntimeError",
            lambda: pydist.plan(model, 8, sample=torch.zeros(2, 3)),
        ),
    ):
        with pytest.raises(pydist.InvalidUsage, match=match):
            call()


# ---- activations --------------------------------------------------------------------------


def saved_bytes(module: nn.Module, sample: Tensor) -> int:
    """What a real forward saves, without its parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(module(sample))
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return result


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (small_model, (5, 130)),
        (Checkpointed, (5, 130)),
        (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (3, 17, 32)),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.AvgPool2d(2)), (2, 3, 16, 16)),
    ],
)
def test_activations_are_what_forward_saves(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, sample = make(), torch.randn(shape)
    plan = pydist.plan(model, 1, sample=sample)
    assert plan.ddp.activations is not None
    assert plan.ddp.activations == pytest.approx(saved_bytes(model, sample), rel=0.02)
    assert plan.ddp.peak >= plan.ddp.total + plan.ddp.activations + plan.ddp.handover
    with torch.device("meta"):
        unborn = make()
    assert pydist.plan(unborn, 1, sample=sample.to("meta")).ddp == plan.ddp


def test_samples_take_keywords_and_the_dtype() -> None:
    model = nn.Bilinear(6, 7, 8)
    sample = {"input1": torch.randn(100, 6), "input2": torch.randn(100, 7)}
    in_float = pydist.plan(model, 1, sample=sample).ddp.activations
    in_half = pydist.plan(model, 1, sample=sample, dtype=torch.bfloat16).ddp.activations
    assert in_float is not None
    assert in_half is not None
    assert in_float == 2 * in_half > 0


# ---- the sharded optimizer itself ---------------------------------------------------------


def uneven_model() -> nn.Module:
    """One layer of 1 MB among many of some KB."""
    widths = [130, 40, 30, 500, 500, 30, 130, 60, 130, 60, 3]
    return nn.Sequential(*[nn.Linear(*pair) for pair in itertools.pairwise(widths)])


def allocated(make: Callable[[], nn.Module], stage: int, dtype: torch.dtype) -> dict[str, int]:
    """On each rank: bytes of each term, after some steps."""
    torch.manual_seed(0)
    model = pydist.DataParallel(make().to(dtype), bucket_cap_mb=0.02)
    sharded: Any = pydist.ShardedOptimizer(  # type: ignore[attr-defined]
        model, torch.optim.AdamW, stage=stage
    )
    for _ in range(2):
        model(torch.randn(8, 130, dtype=dtype)).float().sum().backward()
        sharded.step()
        sharded.zero_grad()
    sharded.finish()
    buckets = sharded._layout.buckets
    states = [s for b in buckets if b.optimizer for s in b.optimizer.state.values()]
    segments = [segment for bucket in buckets for segment in bucket.segments]
    whole = sum(bucket.memory.nbytes for bucket in buckets)
    return {
        "parameters": whole,
        "gradients": whole if stage == 1 else sum(bucket.shard.nbytes for bucket in buckets),
        "state": sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor)),
        "master": sum(s.updated.nbytes for s in segments if s.has_master),
        "buckets": sharded.bytes_in_flight(),
    }


@pytest.mark.skipif(not hasattr(pydist, "ShardedOptimizer"), reason="no sharded optimizer here")
def test_stages_take_what_was_predicted() -> None:
    cases = itertools.product((small_model, uneven_model), (1, 2), (torch.float32, torch.bfloat16))
    with Ranks(3) as ranks:
        for make, stage, dtype in cases:
            found = ranks.run(allocated, make, stage, dtype)
            plan = pydist.plan(make(), 3, dtype=dtype, bucket_cap_mb=0.02)
            predicted = plan.stage1 if stage == 1 else plan.stage2
            for term in ("parameters", "gradients", "state", "master", "buckets"):
                most = max(bytes_of[term] for bytes_of in found)
                assert getattr(predicted, term) == pytest.approx(most, rel=0.02), term


def test_buckets_share_memory_with_their_like() -> None:
    """One large bucket does not make the memory of all others as large."""
    plan = pydist.plan(uneven_model(), 3, bucket_cap_mb=0.02)
    assert plan.stage2.handover < plan.stage2.buckets < 1.5 * plan.stage2.handover
    # Up to three buckets, nothing is shared, and shards come on top.
    few = pydist.plan(small_model(), 4, bucket_cap_mb=0.02)
    assert few.stage2.total > few.stage1.total


# ---- the peak -----------------------------------------------------------------------------


def most_allocated(call: Callable[[], object]) -> int:
    """Bytes that torch's allocator for the CPU had at most, beyond those that it had before."""
    # acc_events: some versions warn of its absence.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        call()
    result: Any = profiled.profiler
    events = [event for event in result.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


# Not to be told from what an optimizer keeps for each tensor, and activations.
SMALL_BYTES = 32 * 1024

VARIANTS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


# One that keeps nothing, one with kernels of all kinds, and one whose steps are not alike.
SGD, ADAM, RADAM = torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam


@pytest.mark.parametrize(
    "optimizer",
    everyday(
        SGD, ADAM, RADAM, thorough=tuple(c for c in ELEMENT_WISE if c not in (SGD, ADAM, RADAM))
    ),
)
def test_temporaries_are_what_torch_allocates(optimizer: type[torch.optim.Optimizer]) -> None:
    counts = [30_000, 200_000, 0, 5_000, 150_000, 170_000]
    known = inspect.signature(optimizer).parameters
    for options in [*VARIANTS, {"maximize": True}, {"weight_decay": 0.1}]:
        if not known.keys() >= options.keys():
            continue
        parameters = [nn.Parameter(torch.ones(count)) for count in counts]
        made = optimizer(parameters, **options)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(6):  # RAdam's sixth step takes more than those before
            made.step()
        memory = step_memory(optimizer, torch.float32, options)
        predicted = temporaries([(memory, count) for count in counts])
        found = most_allocated(made.step)
        assert predicted == pytest.approx(found, rel=0.02, abs=SMALL_BYTES), options


def layers_of_three_buckets() -> nn.Module:
    """Of 512 KiB, 1 MiB, 768 KiB and 384 KiB; three buckets of 1 MiB or little more."""
    torch.manual_seed(0)
    widths = (256, 512, 512, 384, 256)
    return nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)])


CAP_MB = 1.0


class ByHand:
    """The class on float32 copies of whole parameters in 16 bits."""

    def __init__(self, parameters: list[nn.Parameter], made: Any, **options: Any) -> None:
        self._short = parameters
        self._masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self._optimizer = made(self._masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        for short, master in zip(self._short, self._masters, strict=True):
            assert short.grad is not None
            master.grad = short.grad.float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        for short, master in zip(self._short, self._masters, strict=True):
            short.copy_(master)

    def zero_grad(self) -> None:
        for short in self._short:
            short.grad = None


def allocated_by_training(
    stage: int, dtype: torch.dtype, optimizer: Any, options: dict[str, Any]
) -> int:
    """The most at a time of what comes and goes in the second step. Stage 0: DDP.

    In later ones, gradients of DDP may be made in place (gradient_forecast.h), so less does.
    """
    model = pydist.DataParallel(layers_of_three_buckets().to(dtype), bucket_cap_mb=CAP_MB)
    parameters = list(model.parameters())
    made: Any
    if stage:
        made = pydist.ShardedOptimizer(model, optimizer, stage=stage, **options)  # type: ignore[arg-type]
    elif dtype is torch.float32:
        made = optimizer(parameters, **options)
    else:
        made = ByHand(parameters, optimizer, **options)
    inputs = torch.ones(1, 256, dtype=dtype)

    def train() -> None:
        model(inputs).float().sum().backward()
        made.step()
        made.zero_grad()

    train()
    return most_allocated(train)


def test_the_peak_is_what_torch_allocates() -> None:
    """What comes and goes, within 2 % of itself but for what is small.

    In stage 2, gradients wait where all buffers travel, a bucket of them at most; here, there is a
    buffer for each bucket, so that they do not, and the largest gradient is all.
    """
    cases: list[tuple[Any, dict[str, Any]]] = [
        (made, {**options, **own})
        for made, own in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}))
        for options in VARIANTS
    ]
    with Ranks(2, env={"PYDIST_BACKEND": "native"}) as ranks:
        for dtype, (made, options) in itertools.product((torch.float32, torch.bfloat16), cases):
            # Products in 16 bits need memory themselves, which torch's allocator gives, too.
            small_bytes = SMALL_BYTES if dtype is torch.float32 else 4 * SMALL_BYTES
            plan = pydist.plan(
                layers_of_three_buckets(),
                2,
                dtype=dtype,
                optimizer=made,
                bucket_cap_mb=CAP_MB,
                sample=torch.ones(1, 256),
                **options,
            )
            for stage, column in enumerate((plan.ddp, plan.stage1, plan.stage2)):
                case = f"{made.__name__}, {options}, {dtype}, stage {stage}: {column}"
                found = max(ranks.run(allocated_by_training, stage, dtype, made, options))
                predicted = column.peak - column.total
                assert found <= 1.02 * predicted + small_bytes, case
                waiting = column.handover - plan.stage1.handover
                assert found >= 0.98 * (predicted - waiting) - small_bytes, case


# ---- the command --------------------------------------------------------------------------


def test_what_a_rank_has_alone_is_not_shared_out() -> None:
    shared, own = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
    without = pydist.plan(nn.ModuleList([shared]), ranks=4)
    module = nn.ModuleList([shared, own])
    all_shared = pydist.plan(module, ranks=4)
    module._ddp_params_and_buffers_to_ignore = ["1.weight"]  # type: ignore[assignment]
    found = pydist.plan(module, ranks=4)
    own_bytes = 64 * 32 * 4
    for name in ("stage1", "stage2"):
        ours, theirs = getattr(found, name), getattr(without, name)
        assert ours.gradients == theirs.gradients + own_bytes
        assert ours.parameters == theirs.parameters + own_bytes
        # Two moments and a step.
        assert ours.state == theirs.state + 2 * own_bytes + (
            found.ddp.state - without.ddp.state - 2 * own_bytes
        )
        assert ours.state > getattr(all_shared, name).state
    assert found.ddp.state == all_shared.ddp.state
    assert any("1 parameters are each rank's own" in note for note in found.notes)
