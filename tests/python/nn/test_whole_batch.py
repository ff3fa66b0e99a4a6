"""Losses over the outputs of all ranks, through DataParallel, against one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from launch import Ranks
from torch import Tensor, nn
from training import LIMIT_S, RanksOfHosts, Runner, assert_like_reference, batch, joined

import pydist

pytestmark = pytest.mark.timeout(30)


class Towers(nn.Module):
    """Two towers, a scale, and a part of the output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5, dtype=torch.float64)
        self.second = nn.Linear(4, 5, dtype=torch.float64)
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "rows": (F.normalize(self.first(x)), F.normalize(self.second(x.sin()))),
            "scale": self.log_scale.exp(),
            "name": "towers",
        }


def contrastive(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    similarities = scale * first @ second.t()
    pairs = torch.arange(len(first))
    both = F.cross_entropy(similarities, pairs) + F.cross_entropy(similarities.t(), pairs)
    return both / 2


def batch_hard_triplet(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    distances = torch.cdist(first, second)
    nearest_other = (distances + 9 * torch.eye(len(first))).amin(1)
    return (scale * distances.diagonal() - nearest_other + 1).relu().mean()


def correlation(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """That of canonical correlation analysis: by the covariances of the whole batch."""
    a, b = first - first.mean(0), second - second.mean(0)
    eye = torch.eye(5, dtype=torch.float64)
    inverse_a = torch.linalg.inv(a.t() @ a / len(a) + 0.1 * eye)
    inverse_b = torch.linalg.inv(b.t() @ b / len(b) + 0.1 * eye)
    across = a.t() @ b / len(a)
    return -scale * (inverse_a @ across @ inverse_b @ across.t()).trace()


def ranking(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    scores = (first * second).sum(1) * scale
    return F.softplus(scores[:, None] - scores[None, :]).triu(1).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "contrastive": contrastive,
    "triplet": batch_hard_triplet,
    "correlation": correlation,
    "ranking": ranking,
}

ROWS = [5, 2, 0, 3]


def gathered_loss(outputs: dict[str, Any], loss: str, **options: Any) -> Tensor:
    first, second = pydist.nn.whole_batch(outputs["rows"], **options)
    return LOSSES[loss](first, second, outputs["scale"])


def train_on_whole_batch(loss: str, options: dict[str, Any]) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = Towers()
    model = pydist.DataParallel(copy.deepcopy(reference))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, reference)]
    for step in range(3):
        inputs = [batch(each, ROWS[each], 4, step=step) for each in range(size)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if loss == "lean":
            outputs = model(inputs[rank])
            ours = pydist.nn.contrastive_loss(*outputs["rows"], outputs["scale"], **options)
        else:
            ours = gathered_loss(model(inputs[rank]), loss, **options)
        ours.backward()
        outputs = reference(torch.cat(inputs))
        theirs = LOSSES["contrastive" if loss == "lean" else loss](
            *outputs["rows"], outputs["scale"]
        )
        theirs.backward()
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
        assert_like_reference(model, reference, 1e-10)


@pytest.mark.parametrize("loss", [*LOSSES, "lean"])
def test_trains_like_one_process(run: Runner, loss: str) -> None:
    run(train_on_whole_batch, loss, {})


def test_without_a_check(run: Runner) -> None:
    run(train_on_whole_batch, "contrastive", {"check": False})


def backward_alone() -> None:
    """Without the check a backward talks to nobody: one rank may run it."""
    rank, size = joined()
    rows = batch(rank, ROWS[rank], 4).requires_grad_()
    loss = pydist.nn.whole_batch(rows, check=False).sin().sum()
    if rank == 0:
        loss.backward()
        torch.testing.assert_close(rows.grad, size * rows.detach().cos())


def test_a_backward_without_a_check_talks_to_nobody(run: Runner) -> None:
    run(backward_alone)


def sixteen_bits() -> None:
    rank, size = joined()
    rows = batch(rank, 3, 4, dtype=torch.bfloat16).t().requires_grad_()  # not contiguous
    pull = torch.arange(4.0 * size).to(torch.bfloat16)[:, None]
    (pydist.nn.whole_batch(rows) * pull).sum().backward()
    own = pull.split(4)[rank].expand(4, 3) * size
    torch.testing.assert_close(rows.grad, own)


def test_rows_of_sixteen_bits(run: Runner) -> None:
    run(sixteen_bits)


def one_number_a_row(dtype: torch.dtype) -> None:
    rank, size = joined()
    whole = torch.cat([batch(each, ROWS[each], 1)[:, 0] for each in range(size)]).to(dtype)
    rows = whole.split(ROWS[:size])[rank].clone().requires_grad_()
    pydist.nn.whole_batch(rows).abs().square().sum().backward()
    # Where there is no wrapper that divides by the number of ranks, its factor is left.
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, 2 * size * rows.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_rows_of_one_number(run: Runner, dtype: torch.dtype) -> None:
    run(one_number_a_row, dtype)


def changed_in_place() -> None:
    rank, size = joined()
    rows = torch.full((ROWS[rank], 2), rank + 1.0).requires_grad_()
    gathered = pydist.nn.whole_batch(rows)
    gathered /= 2
    gathered.sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.full_like(rows, size / 2))


def test_the_rows_may_be_changed_in_place(run: Runner) -> None:
    run(changed_in_place)


def reduce_own_parts() -> None:
    """Each rank has the loss of its own rows against all; their sum makes one loss of them."""
    rank, size = joined()
    torch.manual_seed(0)
    reference = Towers()
    model = pydist.DataParallel(copy.deepcopy(reference))
    inputs = [batch(each, ROWS[each], 4) for each in range(size)]
    outputs = model(inputs[rank])
    first, second = outputs["rows"]
    everyone = pydist.nn.all_gather(second)
    own = torch.arange(len(first)) + sum(ROWS[:rank])
    similarities = outputs["scale"] * first @ everyone.t()
    parts = F.cross_entropy(similarities, own, reduction="none")
    loss = pydist.nn.all_reduce(parts.sum()) / len(everyone)
    loss.backward()
    outputs = reference(torch.cat(inputs))
    first, second = outputs["rows"]
    similarities = outputs["scale"] * first @ second.t()
    expected = F.cross_entropy(similarities, torch.arange(len(first)))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    assert_like_reference(model, reference, 1e-10)


def test_a_loss_put_together_from_own_rows(run: Runner) -> None:
    run(reduce_own_parts)


def step_on_shards(stage: int) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = Towers()
    model = pydist.DataParallel(copy.deepcopy(reference))
    ours = pydist.ShardedOptimizer(model, torch.optim.Adam, lr=0.1, stage=stage)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(3):
        inputs = [batch(each, ROWS[each], 4, step=step) for each in range(size)]
        ours.zero_grad()
        theirs.zero_grad()
        gathered_loss(model(inputs[rank]), "contrastive").backward()
        outputs = reference(torch.cat(inputs))
        contrastive(*outputs["rows"], outputs["scale"]).backward()
        ours.step()
        theirs.step()
    assert_like_reference(model, reference, 1e-8, gradients=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_with_a_sharded_optimizer(run: Runner, stage: int) -> None:
    run(step_on_shards, stage)


def train_by_torchs_wrapper() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = Towers()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(reference))
    inputs = [batch(each, ROWS[each], 4) for each in range(size)]
    gathered_loss(model(inputs[rank]), "contrastive").backward()
    outputs = reference(torch.cat(inputs))
    contrastive(*outputs["rows"], outputs["scale"]).backward()
    assert_like_reference(model, reference, 1e-10)


def test_through_torchs_wrapper(run: Runner) -> None:
    run(train_by_torchs_wrapper)


def train_two_wrappers(lean: bool) -> None:
    """Each tower is a model of its own, with an output for the one loss."""
    rank, size = joined()
    torch.manual_seed(0)
    references = [nn.Linear(4, 5, dtype=torch.float64) for _ in range(2)]
    models = [pydist.DataParallel(copy.deepcopy(each)) for each in references]
    one = torch.tensor(1.0, dtype=torch.float64)
    for step in range(2):
        inputs = [batch(each, ROWS[each], 4, step=step) for each in range(size)]
        for each in (*models, *references):
            each.zero_grad()
        outputs = [model(inputs[rank]) for model in models]
        if lean:
            pydist.nn.contrastive_loss(outputs[0], outputs[1]).backward()
        else:
            contrastive(*pydist.nn.whole_batch(outputs), one).backward()
        contrastive(*(each(torch.cat(inputs)) for each in references), one).backward()
        for model, reference in zip(models, references, strict=True):
            assert_like_reference(model, reference, 1e-10)


@pytest.mark.parametrize("lean", [False, True])
def test_two_wrapped_models_have_one_loss(run: Runner, lean: bool) -> None:
    run(train_two_wrappers, lean)


def on_hosts(loss: str) -> None:
    """Four ranks on two hosts: each host has a loss, and their mean is what is trained on."""
    rank, _ = joined()
    torch.manual_seed(0)
    reference = Towers()
    model = pydist.DataParallel(copy.deepcopy(reference))
    inputs = [batch(each, ROWS[each], 4) for each in range(4)]
    for _ in range(2):  # the second time the ranks know who shares a host
        for each in (model, reference):
            each.zero_grad()
        outputs = model(inputs[rank])
        if loss == "lean":
            found = pydist.nn.contrastive_loss(*outputs["rows"], outputs["scale"], group="host")
        else:
            found = gathered_loss(outputs, loss, group="host")
        found.backward()
        losses = []
        for ranks in ((0, 1), (2, 3)):
            outputs = reference(torch.cat([inputs[each] for each in ranks]))
            losses.append(contrastive(*outputs["rows"], outputs["scale"]))
        torch.testing.assert_close(found, losses[rank // 2], rtol=1e-11, atol=1e-11)
        (sum(losses, torch.zeros(())) / 2).backward()
        assert_like_reference(model, reference, 1e-10)


@pytest.fixture(scope="module")
def two_hosts(backend: str) -> Any:
    with RanksOfHosts(4, {"PYDIST_BACKEND": backend}, ranks_of_a_host=2) as ranks:
        yield ranks


@pytest.mark.parametrize("loss", ["contrastive", "lean"])
def test_over_the_ranks_of_a_host(two_hosts: Ranks, loss: str) -> None:
    two_hosts.run(on_hosts, loss, timeout=LIMIT_S)


def accumulate() -> None:
    """Two micro-batches of different size, of which each has a loss, weighed by their sizes."""
    rank, size = joined()
    torch.manual_seed(0)
    reference = Towers()
    model = pydist.DataParallel(copy.deepcopy(reference))
    total = torch.zeros((), dtype=torch.float64)
    counts = []
    for step, factor in enumerate((1, 2)):
        inputs = [batch(each, ROWS[each] * factor, 4, step=step) for each in range(size)]
        counts.append(sum(map(len, inputs)))
        with model.no_sync(enabled=step == 0):
            outputs = model(inputs[rank])
        with model.weighted(counts[step]):
            gathered_loss(outputs, "contrastive").backward()
        outputs = reference(torch.cat(inputs))
        total = total + counts[step] * contrastive(*outputs["rows"], outputs["scale"])
    (total / sum(counts)).backward()
    assert_like_reference(model, reference, 1e-10)


def test_accumulates_with_equal_weights(run: Runner) -> None:
    run(accumulate)


def penalty() -> None:
    """The loss and the squared norm of its gradient at the outputs, as one process has them."""
    rank, size = joined()
    inputs = [batch(each, ROWS[each], 4) for each in range(size)]
    mine = inputs[rank].clone().requires_grad_()
    whole = torch.cat(inputs).requires_grad_()

    def loss_of(rows: Tensor) -> Tensor:
        return (rows @ rows.t()).tanh().logsumexp(1).mean()

    (gradient,) = torch.autograd.grad(loss_of(pydist.nn.whole_batch(mine)), mine, create_graph=True)
    # Each rank has its rows, which count N times: its own part of a loss that is to be averaged.
    torch.testing.assert_close(gradient / size, expected_part(whole, loss_of, rank))
    (second,) = torch.autograd.grad((gradient / size).square().sum(), mine)
    (first_of_whole,) = torch.autograd.grad(loss_of(whole), whole, create_graph=True)
    (expected,) = torch.autograd.grad(first_of_whole.square().sum(), whole)
    torch.testing.assert_close(second, expected.split(ROWS[:size])[rank])


def expected_part(whole: Tensor, loss_of: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    (gradient,) = torch.autograd.grad(loss_of(whole), whole)
    return gradient.split(ROWS[: pydist.world_size()])[rank]


def test_can_be_differentiated_twice(run: Runner) -> None:
    run(penalty)


def evaluate_without_graph() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Towers())
    with torch.no_grad():
        outputs = pydist.nn.whole_batch(model(batch(rank, ROWS[rank], 4))["rows"])
        loss = pydist.nn.contrastive_loss(*(rows[rank : rank + 1] for rows in outputs))
    assert all(len(rows) == sum(ROWS[:size]) for rows in outputs)
    assert not loss.requires_grad
    labels = pydist.nn.whole_batch({"labels": torch.full((rank,), rank)})["labels"]
    assert labels.tolist() == [each for each in range(size) for _ in range(each)]


def test_gathers_without_a_graph(run: Runner) -> None:
    run(evaluate_without_graph)


# -- mistakes


def own_rows_only() -> None:
    rank, size = joined()
    rows = batch(rank, 4, 3).requires_grad_()
    gathered = pydist.nn.whole_batch(rows)
    own = gathered.split([4] * size)[rank]
    loss = F.cross_entropy(own @ gathered.t(), torch.arange(4) + 4 * rank)
    with pytest.raises(pydist.Mismatch, match=r"the loss of rank 1 is not that of rank 0.*all_gat"):
        loss.backward()
    # Which is right for it: the sum of all ranks' losses.
    rows.grad = None
    gathered = pydist.nn.all_gather(rows)
    own = gathered.split([4] * size)[rank]
    F.cross_entropy(own @ gathered.t(), torch.arange(4) + 4 * rank).backward()
    whole = torch.cat([batch(each, 4, 3) for each in range(size)]).requires_grad_()
    (size * F.cross_entropy(whole @ whole.t(), torch.arange(4 * size))).backward()
    assert whole.grad is not None
    torch.testing.assert_close(rows.grad, whole.grad.split(4)[rank])


def test_a_loss_of_own_rows_is_found_out(run: Runner) -> None:
    run(own_rows_only)


def losses_that_differ(kind: str) -> None:
    """Ranks of which each has another loss, whose gradients have rows of the same norms."""
    rank, size = joined()
    dtype = {"complex": torch.complex64, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    rows = batch(rank, 6, 2 * size).to(dtype).requires_grad_()
    gathered = pydist.nn.whole_batch(rows)
    if kind == "sign":
        loss = (1 if rank == 0 else -1) * gathered.sum()
    elif kind == "columns":
        loss = gathered[:, 2 * rank : 2 * rank + 2].sum()
    elif kind == "complex":
        loss = (gathered * (1j if rank == 1 else 1)).real.sum()
    else:
        mask = torch.rand(gathered.shape, generator=torch.Generator().manual_seed(rank)) > 0.1
        loss = (gathered * mask).sum()
    with pytest.raises(pydist.Mismatch, match=r"the loss of rank \d is not that of rank 0"):
        loss.backward()


@pytest.mark.parametrize("kind", ["sign", "columns", "complex", "dropout", "bfloat16"])
def test_losses_that_differ_are_found_out(run: Runner, kind: str) -> None:
    run(losses_that_differ, kind)


def uneven_weights(lean: bool) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Towers())
    outputs = model(batch(rank, ROWS[rank], 4))
    if lean:
        loss = pydist.nn.contrastive_loss(*outputs["rows"], outputs["scale"])
    else:
        loss = gathered_loss(outputs, "contrastive")
    name = "contrastive_loss" if lean else "whole_batch"
    said = rf"{name} is a loss over .* weights 5.0 on rank 0; 2.0 on rank 1; 0.0 on rank 2: leave"
    with model.weighted(ROWS[rank]), pytest.raises(pydist.Mismatch, match=said):
        loss.backward()


@pytest.mark.parametrize("lean", [False, True])
def test_weights_that_differ_are_refused(run: Runner, lean: bool) -> None:
    run(uneven_weights, lean)


def wrong_calls() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Towers())
    with model.join():
        for call in (
            lambda: pydist.nn.whole_batch(torch.ones(2, 3)),
            lambda: pydist.nn.contrastive_loss(torch.ones(2, 3), torch.ones(2, 3)),
        ):
            with pytest.raises(pydist.InvalidUsage, match=r"join\(\) leaves out those"):
                call()
    for outputs, problem in (
        ("rows", "outputs holds no tensor"),
        (torch.tensor(1.0), "a tensor has no dimension"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=problem):
            pydist.nn.whole_batch(outputs)
    with pytest.raises(
        pydist.InvalidUsage, match='group=\'node\' is unknown; it is "world", "host"'
    ):
        pydist.nn.whole_batch(torch.ones(2, 3), group="node")  # type: ignore[arg-type]
    x = torch.ones(2, 3)
    for first, second, scale, problem in (
        (x, x[:1], 1.0, r"first has shape \(2, 3\).*second \(1, 3\)"),
        (x.int(), x.int(), 1.0, "of floating point"),
        (x, x, x, "scale has 6 elements"),
        (x, x, "1", "scale is a str"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=problem):
            pydist.nn.contrastive_loss(first, second, scale)  # type: ignore[arg-type]
    error = pydist.InvalidUsage if rank == 1 else pydist.Error
    with pytest.raises(error, match="second is None"):
        pydist.nn.contrastive_loss(x, None if rank == 1 else x)  # type: ignore[arg-type]


def test_wrong_calls_are_told(run: Runner) -> None:
    run(wrong_calls)
