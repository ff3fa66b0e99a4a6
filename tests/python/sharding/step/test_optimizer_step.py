"""The fused optimizer steps beside torch's unfused classes. In this one process."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fake_cuda
import gpu_ranks
import numpy as np
import pytest
import torch
from launch import run_ranks
from torch import Tensor

import pydist
from pydist import _native

pytestmark = pytest.mark.timeout(60)

COUNT = 4099

# Where torch's own loops round a product and its sum once, as ours do everywhere.
TORCH_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would wait for each other wherever somebody else uses the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Arrays:
    """A segment, as `adam_step` and `sgd_step` take it."""

    parameter: Tensor
    gradient: Tensor
    states: list[Tensor] = field(default_factory=list)
    master: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.parameter if self.master is None else self.master


def special_values(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, subnormals, huge, infinite, NaN and every magnitude between."""
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = [0.0, -0.0, tiny, -tiny / 8, huge, -huge, math.inf, -math.inf, math.nan, 1.0]
    ordinary = torch.randn(count, dtype=torch.float64)
    ordinary *= torch.exp(torch.randn(count, dtype=torch.float64) * 8)
    ordinary[torch.randint(count, (count // 4,))] = torch.tensor(special, dtype=torch.float64)[
        torch.randint(len(special), (count // 4,))
    ]
    return ordinary.to(dtype)


def ordinary_values(count: int, dtype: torch.dtype) -> Tensor:
    scale = torch.exp(torch.randn(count, dtype=torch.float64) * 3)
    return (torch.randn(count, dtype=torch.float64) * scale).to(dtype)


Values = Callable[[int, torch.dtype], Tensor]


def arrays_of(
    dtype: torch.dtype, state_count: int, values: Values, gradient_dtype: torch.dtype | None = None
) -> Arrays:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    state = [values(COUNT, wide) for _ in range(state_count)]
    master = values(COUNT, wide)
    is_16_bit = dtype.itemsize == 2
    return Arrays(
        parameter=master.to(dtype),
        gradient=values(COUNT, wide).to(gradient_dtype or dtype),
        # The first moment may be negative, the second and its maximum not.
        states=[tensor.abs() if i else tensor for i, tensor in enumerate(state)],
        master=master if is_16_bit else None,
    )


def in_lists(arrays: Arrays) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    """Parameters, gradients and masters of one segment."""
    master = None if arrays.master is None else [arrays.master]
    return [arrays.parameter], [arrays.gradient], master


class Rule:
    """The keyword arguments of a class of torch's, with what pydist's step takes beside them."""

    # Those that torch's class does not have.
    beside: ClassVar[tuple[str, ...]]
    # How many states there are for each element.
    state_count: int

    def options(self) -> dict[str, Any]:
        """The arguments of torch's class."""
        return {key: value for key, value in vars(self).items() if key not in self.beside}

    def optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        """Torch's, unfused, over one parameter."""
        raise NotImplementedError

    def ours(self, arrays: Arrays, gradient_scale: float = 1.0) -> None:
        """Steps by pydist's kernel."""
        raise NotImplementedError

    def torchs(self, arrays: Arrays, parameter: Tensor) -> None:
        """Steps by torch's class, from the states in `arrays`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Rule):
    beside: ClassVar = ("decoupled", "step")

    decoupled: bool = True
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    step: int = 3

    @property
    def state_count(self) -> int:
        return 3 if self.amsgrad else 2

    def optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind([parameter], **self.options(), foreach=False)

    def ours(self, arrays: Arrays, gradient_scale: float = 1.0) -> None:
        options = {key: value for key, value in vars(self).items() if key not in _NAMED_OTHERWISE}
        beta1, beta2 = self.betas
        states = [[state] for state in arrays.states]
        _native.adam_step(
            *in_lists(arrays),
            *states,
            beta1=beta1,
            beta2=beta2,
            gradient_scale=gradient_scale,
            **options,
        )

    def torchs(self, arrays: Arrays, parameter: Tensor) -> None:
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        optimizer = self.optimizer(parameter)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(self.step - 1)),
            **dict(zip(keys, arrays.states, strict=False)),
        }
        optimizer.step()


# The kernel takes two numbers, and sees by the states whether there is a third one.
_NAMED_OTHERWISE = ("betas", "amsgrad")


@dataclass(frozen=True)
class Sgd(Rule):
    beside: ClassVar = ("begins",)

    lr: float = 0.1
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    begins: bool = False

    @property
    def state_count(self) -> int:
        return 1 if self.momentum else 0

    def optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter], **self.options(), foreach=False)

    def ours(self, arrays: Arrays, gradient_scale: float = 1.0) -> None:
        _native.sgd_step(
            *in_lists(arrays), arrays.states or None, gradient_scale=gradient_scale, **vars(self)
        )

    def torchs(self, arrays: Arrays, parameter: Tensor) -> None:
        optimizer = self.optimizer(parameter)
        if self.momentum and not self.begins:
            optimizer.state[parameter] = {"momentum_buffer": arrays.states[0]}
        optimizer.step()
        if self.momentum:
            arrays.states = [optimizer.state[parameter]["momentum_buffer"]]


ADAMS = [
    Adam(),
    Adam(step=1, weight_decay=0.0),
    Adam(amsgrad=True, maximize=True, step=1000),
    Adam(decoupled=False, weight_decay=0.1),
    Adam(decoupled=False, weight_decay=0.0, amsgrad=True),
    Adam(lr=50.0, betas=(0.3, 0.6), eps=0.0, step=2),
    Adam(betas=(0.0, 0.0), maximize=True),
]
SGDS = [
    Sgd(momentum=0.0),
    Sgd(momentum=0.0, weight_decay=0.1, maximize=True),
    Sgd(begins=True, weight_decay=0.1),
    Sgd(dampening=0.3, maximize=True, lr=30.0),
    Sgd(nesterov=True, weight_decay=0.1),
    Sgd(nesterov=True, begins=True),
]


def torchs_step(rule: Rule, arrays: Arrays, gradient_scale: float = 1.0) -> Arrays:
    """What torch's class makes of copies of the values and states, all in their own type."""
    after = copy.deepcopy(arrays)
    parameter = torch.nn.Parameter(after.values.clone())
    parameter.grad = after.gradient.to(parameter.dtype).mul_(gradient_scale)
    rule.torchs(after, parameter)
    after.parameter = parameter.detach()
    return after


def ours_step(rule: Rule, arrays: Arrays, gradient_scale: float = 1.0) -> Arrays:
    after = copy.deepcopy(arrays)
    rule.ours(after, gradient_scale)
    if after.master is not None:
        rounded = after.master.to(after.parameter.dtype)
        assert torch.equal(rounded.nan_to_num(7.0), after.parameter.nan_to_num(7.0))
    return after


@pytest.fixture
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's square roots correctly rounded, which those of its builds with MKL are not."""
    sqrt = Tensor.sqrt
    monkeypatch.setattr(
        Tensor, "sqrt", lambda self: torch.from_numpy(np.sqrt(self.detach().numpy()))
    )
    yield
    monkeypatch.setattr(Tensor, "sqrt", sqrt)


DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]


def named(value: object) -> str:
    return str(value).replace("torch.", "")


@pytest.mark.skipif(not TORCH_FUSES, reason="torch rounds otherwise on this processor")
@pytest.mark.usefixtures("exact_roots")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.parametrize("values", [special_values, ordinary_values])
def test_equals_torch_with_exact_roots(
    dtypes: tuple[torch.dtype, torch.dtype], values: Values
) -> None:
    torch.manual_seed(0)
    rules: list[Rule] = [*ADAMS, *SGDS]
    for rule, scale in itertools.product(rules, [1.0, 0.37, 2.0**-16]):
        before = arrays_of(dtypes[0], rule.state_count, values, dtypes[1])
        scale = float(torch.tensor(scale))  # as it is in torch, a float32
        ours, torchs = ours_step(rule, before, scale), torchs_step(rule, before, scale)
        for mine, its in zip(
            [ours.values, *ours.states], [torchs.parameter, *torchs.states], strict=True
        ):
            torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True, msg=str(rule))


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Of `dtype`, at magnitudes in float64."""
    least = torch.finfo(dtype).smallest_normal
    return torch.exp2(torch.floor(torch.log2(magnitude.clamp(least)))) * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize("rule", ADAMS, ids=str)
def test_adam_is_within_an_ulp_of_torch(dtype: torch.dtype, rule: Adam) -> None:
    """The claim as it stands: torch as it is, whatever it fuses and however it takes roots."""
    torch.manual_seed(0)
    before = arrays_of(dtype, rule.state_count, ordinary_values)
    ours, torchs = ours_step(rule, before), torchs_step(rule, before)
    value, slope = before.parameter.double(), before.gradient.double()
    if rule.decoupled:
        value = value * (1 - rule.lr * rule.weight_decay)
        slope_ulp = torch.zeros(1)
    else:
        decay = rule.weight_decay * value
        slope_ulp = ulp(torch.maximum(slope.abs(), decay.abs()), dtype)
        slope = slope + (-decay if rule.maximize else decay)
    average_ulp = slope_ulp + ulp(
        torch.maximum(before.states[0].double().abs(), slope.abs()), dtype
    )
    if TORCH_FUSES:
        assert torch.equal(ours.states[0], torchs.states[0])
        assert torch.equal(ours.states[1], torchs.states[1])
        average_ulp = torch.zeros(1)
        slope_ulp = torch.zeros(1)
    else:
        assert (ours.states[0].double() - torchs.states[0].double()).abs().le(average_ulp).all()
    square = ours.states[1].double()
    square_ulp = 2 * ulp(square, dtype) + 2 * (1 - rule.betas[1]) * slope.abs() * slope_ulp
    assert (square - torchs.states[1].double()).abs().le(square_ulp).all()
    if rule.amsgrad:
        square = ours.states[2].double()
    root = (square / (1 - rule.betas[1] ** rule.step)).sqrt() + rule.eps
    step_size = rule.lr / (1 - rule.betas[0] ** rule.step)
    update = (step_size * ours.states[0].double() / root).abs()
    allowed = ulp(torch.maximum(value.abs(), ours.parameter.double().abs()), dtype)
    allowed += 2 * ulp(update, dtype) + step_size * average_ulp / root
    if not TORCH_FUSES:
        allowed += update * square_ulp / square
    difference = (ours.parameter.double() - torchs.parameter.double()).abs()
    assert difference.le(allowed).all()
    if rule.lr <= 1e-3 and TORCH_FUSES:
        # Where a step is small beside its parameter: one ulp of it, and rarely that.
        is_small = update < value.abs() / 4
        assert is_small.sum() > COUNT / 4
        larger = torch.maximum(value.abs(), ours.parameter.double().abs())
        assert difference.le(ulp(larger, dtype))[is_small].all()
        assert (difference > 0)[is_small].float().mean() < 0.05


@pytest.mark.parametrize("rule", [ADAMS[0], ADAMS[3], SGDS[3], SGDS[4]], ids=str)
def test_fifty_steps_agree_in_float64(rule: Rule) -> None:
    torch.manual_seed(0)
    start = torch.randn(COUNT, dtype=torch.float64)
    states = [torch.zeros(COUNT, dtype=torch.float64) for _ in range(rule.state_count)]
    ours = Arrays(start.clone(), torch.zeros_like(start), states)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = rule.optimizer(theirs)
    for step in range(1, 51):
        gradient = torch.randn(COUNT, dtype=torch.float64)
        ours.gradient = gradient
        theirs.grad = gradient.clone()
        changes: dict[str, Any] = {"begins": step == 1} if isinstance(rule, Sgd) else {"step": step}
        type(rule)(**{**vars(rule), **changes}).ours(ours)
        optimizer.step()
    torch.testing.assert_close(ours.parameter, theirs.detach(), rtol=1e-12, atol=1e-12)


def step_many(segments: list[Arrays], step: float | list[float] | list[Tensor] = 3.0) -> None:
    states = list(zip(*[arrays.states for arrays in segments], strict=True)) or [[], []]
    _native.adam_step(
        [arrays.parameter for arrays in segments],
        [arrays.gradient for arrays in segments],
        None,
        *states,
        step=step,
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=True,
    )


def cut(arrays: Arrays, bounds: list[int]) -> list[Arrays]:
    """Views, which begin where they begin."""
    return [
        Arrays(
            arrays.parameter[begin:end],
            arrays.gradient[begin:end],
            [state[begin:end] for state in arrays.states],
        )
        for begin, end in itertools.pairwise(bounds)
    ]


def test_segments_and_threads_change_nothing() -> None:
    torch.manual_seed(0)
    count = 300_007
    start = Arrays(torch.randn(count), torch.randn(count), [torch.randn(count), torch.rand(count)])
    whole = copy.deepcopy(start)
    step_many([whole])
    bounds = sorted([0, 0, 5, 5, 77, 100_000, 100_001, 180_000, count])
    for thread_count in (1, 2, 5):
        torch.set_num_threads(thread_count)
        pieces = copy.deepcopy(start)
        step_many(cut(pieces, bounds))
        assert torch.equal(pieces.parameter, whole.parameter)
        for mine, its in zip(pieces.states, whole.states, strict=True):
            assert torch.equal(mine, its)


def test_each_segment_may_be_at_a_step_of_its_own() -> None:
    torch.manual_seed(0)
    start = Arrays(torch.randn(300), torch.randn(300), [torch.randn(300), torch.rand(300)])
    together, apart = copy.deepcopy(start), copy.deepcopy(start)
    step_many(cut(together, [0, 100, 200, 300]), [1.0, 9.0, 9.0])
    for piece, step in zip(cut(apart, [0, 100, 300]), (1.0, 9.0), strict=True):
        step_many([piece], step)
    assert torch.equal(together.parameter, apart.parameter)


def test_nothing_to_do() -> None:
    _native.adam_step(
        [], [], None, [], [], step=1, lr=1, beta1=0, beta2=0, eps=0, weight_decay=0, decoupled=True
    )
    nothing = Arrays(torch.empty(0), torch.empty(0), [torch.empty(0), torch.empty(0)])
    step_many([nothing, nothing])


def test_autograd_sees_the_writes() -> None:
    parameter = torch.randn(4, requires_grad=True)
    loss = parameter.square().sum()
    with torch.no_grad():
        Sgd(momentum=0.0).ours(Arrays(parameter, torch.ones(4)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_traffic_changes_nothing() -> None:
    parameter, state = torch.randn(1000), torch.randn(1000)
    before = parameter.clone(), state.clone()
    _native.step_traffic([parameter], [torch.randn(1000)], None, [[state]])
    assert torch.equal(parameter, before[0])
    assert torch.equal(state, before[1])


def test_steps_in_tensors_are_counted_on() -> None:
    torch.manual_seed(0)
    start = Arrays(torch.randn(300), torch.randn(300), [torch.randn(300), torch.rand(300)])
    counted, numbered = copy.deepcopy(start), copy.deepcopy(start)
    steps = [torch.tensor(0.0), torch.tensor(8.0, dtype=torch.float64), torch.tensor(8.0)]
    bounds = [0, 100, 200, 300]
    for past in (0, 1):
        step_many(cut(counted, bounds), steps)
        step_many(cut(numbered, bounds), [1.0 + past, 9.0 + past, 9.0 + past])
        assert [step.item() for step in steps] == [1 + past, 9 + past, 9 + past]
    assert torch.equal(counted.parameter, numbered.parameter)
    for wrong in (torch.zeros(2), torch.tensor(1), torch.tensor(1.0, device="meta")):
        with pytest.raises(pydist.InvalidUsage, match=r"step\[1\] must be a CPU tensor"):
            step_many(cut(counted, bounds), [steps[0], wrong, steps[2]])
    with pytest.raises(pydist.InvalidUsage, match="step holds 2 values for 3 parameters"):
        step_many(cut(counted, bounds), steps[:2])
    # What was refused has counted nothing.
    assert [step.item() for step in steps] == [2, 10, 10]


def test_gradients_may_be_one_tensor() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(50)
    apart = [Arrays(torch.randn(50), gradient.clone(), []) for _ in range(3)]
    together = copy.deepcopy(apart)
    for arrays in apart:
        Sgd(momentum=0.0).ours(arrays)
    _native.sgd_step(
        [arrays.parameter for arrays in together],
        [gradient, gradient, gradient],
        None,
        None,
        begins=False,
        lr=0.1,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
    )
    for mine, its in zip(together, apart, strict=True):
        assert torch.equal(mine.parameter, its.parameter)


# ---- on a GPU -----------------------------------------------------------------------------


def moved(arrays: Arrays, device: str) -> Arrays:
    """A copy."""
    master = None if arrays.master is None else arrays.master.to(device, copy=True)
    return Arrays(
        arrays.parameter.to(device, copy=True),
        arrays.gradient.to(device, copy=True),
        [state.to(device, copy=True) for state in arrays.states],
        master,
    )


def assert_as_on_the_cpu(device: Arrays, host: Arrays, what: str) -> None:
    """The fakes compute with the CPU's kernels; a GPU rounds products and sums apart."""
    for mine, its in zip(
        [device.values, device.parameter, *device.states],
        [host.values, host.parameter, *host.states],
        strict=True,
    ):
        tolerance = {} if gpu_ranks.IS_REAL else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(
            mine.cpu(), its, equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance
        )


def step_on_the_gpu() -> None:
    gpu_ranks.install(delay_us=500)
    assert not _native.cuda_kernels_obstacle(torch.cuda.current_device())
    other_stream = torch.cuda.Stream() if gpu_ranks.IS_REAL else None
    rules: list[Rule] = [*ADAMS, *SGDS]
    for dtypes in DTYPES:
        if torch.float64 in dtypes:
            continue
        for rule in rules:
            torch.manual_seed(0)
            host = arrays_of(dtypes[0], rule.state_count, ordinary_values, dtypes[1])
            device = moved(host, "cuda")
            gpu_ranks.synchronize()
            with torch.cuda.stream(other_stream) if other_stream else fake_cuda.Stream():
                # Behind what the stream was given before, and before what it is given now.
                device.gradient.mul_(2.0)
                rule.ours(device, 0.37)
                after = moved(device, "cuda")
                for tensor in (device.values, device.parameter, *device.states):
                    tensor.zero_()
            host.gradient.mul_(2.0)
            rule.ours(host, 0.37)
            gpu_ranks.synchronize()
            assert_as_on_the_cpu(after, host, f"{rule}, {dtypes}")

    # Segments that are at steps of their own, and buffers of which some begin.
    torch.manual_seed(0)
    host = Arrays(torch.randn(300), torch.randn(300), [torch.randn(300), torch.rand(300)])
    device = moved(host, "cuda")
    bounds = [0, 100, 100, 201, 300]
    steps = [[torch.tensor(at) for at in (0.0, 8.0, 8.0, 2.0)] for _ in range(2)]
    for _ in range(2):
        step_many(cut(host, bounds), steps[0])
        step_many(cut(device, bounds), steps[1])
    assert steps[0] == steps[1]
    for pieces in (cut(host, bounds), cut(device, bounds)):
        _native.sgd_step(
            [piece.parameter for piece in pieces],
            [piece.gradient for piece in pieces],
            None,
            [piece.states[0] for piece in pieces],
            begins=[True, False, True, False],
            lr=0.1,
            momentum=0.9,
            dampening=0.1,
            weight_decay=0.1,
            nesterov=False,
        )
    assert_as_on_the_cpu(device, host, "several segments")

    step_many([])
    wide = moved(arrays_of(torch.float64, 2, ordinary_values), "cuda")
    with pytest.raises(pydist.InvalidUsage, match=r"parameters\[0\] is of type Double"):
        ADAMS[0].ours(wide)
    mixed = moved(host, "cuda")
    mixed.gradient = host.gradient
    with pytest.raises(pydist.InvalidUsage, match=r"gradients\[0\] is on cpu, parameters\[0\]"):
        ADAMS[0].ours(mixed)
    with pytest.raises(pydist.InvalidUsage, match="lr must be a finite number"):
        Adam(lr=math.nan).ours(moved(host, "cuda"))


@gpu_ranks.needs_gpu_ranks
def test_cuda_tensors_are_stepped_on_the_current_stream() -> None:
    run_ranks(step_on_the_gpu, 1, timeout=50)


# ---- refusals -----------------------------------------------------------------------------


def refused(match: str, rule: Rule, **changes: Any) -> None:
    arrays = arrays_of(torch.float32, rule.state_count, ordinary_values)
    for name, value in changes.items():
        if name == "states":
            arrays.states = value(arrays.states)
        else:
            setattr(arrays, name, value(getattr(arrays, name)))
    before = copy.deepcopy(arrays)
    with pytest.raises(pydist.InvalidUsage, match=match):
        rule.ours(arrays)
    assert torch.equal(arrays.parameter, before.parameter)


def test_what_does_not_fit_is_refused_by_name() -> None:
    refused(
        r"gradients\[0\] has shape \[7\], its parameter \[4099\]", Adam(), gradient=lambda g: g[:7]
    )
    refused(
        r"gradients\[0\] must be a contiguous CPU or CUDA tensor",
        Adam(),
        gradient=lambda g: torch.stack([g, g], 1)[:, 0],
    )
    refused(r"gradients\[0\] must be a contiguous", Adam(), gradient=lambda g: g.to("meta"))
    refused(
        "a gradient in float32, bfloat16 or float16, not in float64", Adam(), gradient=Tensor.double
    )
    refused("needs a float32 master copy", Adam(), parameter=Tensor.bfloat16)
    refused("takes no master copy", Adam(), master=lambda _: torch.zeros(COUNT))
    refused(
        "float16, bfloat16, float32 and float64 parameters, not int32", Adam(), parameter=Tensor.int
    )
    refused(
        r"exp_avg_sqs\[0\] is of type BFloat16, expected Float for a parameter of type Float",
        Adam(),
        states=lambda states: [states[0], states[1].bfloat16()],
    )
    refused(
        r"exp_avgs\[0\] and exp_avg_sqs\[0\] share memory",
        Adam(),
        states=lambda states: [states[0], states[0]],
    )
    refused("momentum is 0.9, so momentum_buffers must be given", Sgd(), states=lambda _: [])
    refused(
        "momentum is 0, so momentum_buffers must be None",
        Sgd(momentum=0.0),
        states=lambda _: [torch.zeros(COUNT)],
    )
    refused("steps count from 1, this one included; got 0", Adam(step=0))
    refused("beta1 must be from 0 to less than 1, got 1", Adam(betas=(1.0, 0.9)))


def test_lists_of_other_lengths_are_refused() -> None:
    start = Arrays(torch.randn(8), torch.randn(8), [torch.randn(8), torch.rand(8)])
    pieces = cut(start, [0, 4, 8])
    with pytest.raises(pydist.InvalidUsage, match="step holds 3 values for 2 parameters"):
        step_many(pieces, [1.0, 2.0, 3.0])
    with pytest.raises(pydist.InvalidUsage, match="gradients holds 1 tensors, parameters 2"):
        _native.sgd_step(
            [piece.parameter for piece in pieces],
            [pieces[0].gradient],
            None,
            None,
            begins=True,
            lr=1,
            momentum=0,
            dampening=0,
            weight_decay=0,
            nesterov=False,
        )
    with pytest.raises(pydist.InvalidUsage, match=r"\[0\] and .*\[1\] share memory"):
        step_many([pieces[0], cut(start, [3, 8])[0]])
