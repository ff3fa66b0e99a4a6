"""`compress=`: float32 gradients that travel in 16 bits."""

import pytest
import torch
from torch import nn
from training import LIMIT_S, TIME_LIMIT, RanksOfHosts, Runner, batch, joined

import pydist

pytestmark = TIME_LIMIT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Three(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part(x.to(part.weight.dtype)).sum().double() for part in self.values()]
        return torch.stack(parts).sum()


def average_compressed(compress: str, reduction: str) -> None:
    rank, size = joined()
    module = Three(
        {
            "one": nn.Linear(40, 1, bias=False),
            "two": nn.Linear(40, 1, bias=False, dtype=torch.float64),
            "three": nn.Linear(40, 1, bias=False, dtype=torch.bfloat16),
        }
    )
    model = pydist.DataParallel(module, compress=compress, reduction=reduction)
    inputs = [batch(r, 1, 40, dtype=torch.float32) for r in range(size)]

    def check(name: str, expected: torch.Tensor) -> None:
        assert torch.equal(module[name].weight.grad, expected), name

    for _ in range(2):
        model.zero_grad()
        model(inputs[rank]).backward()
        wire = DTYPES[compress]
        divisor = size if reduction == "mean" else 1
        # Rounded before and after; summed in float32, in the order of the ranks.
        total = torch.zeros(1, 40)
        for x in inputs:
            total += x.to(wire).float()
        check("one", (total / divisor).to(wire).float())
        # Other types travel as they are.
        exact = torch.zeros(1, 40, dtype=torch.float64)
        for x in inputs:
            exact += x.double()
        torch.testing.assert_close(
            module["two"].weight.grad, exact / divisor, rtol=1e-14, atol=1e-14
        )
        rounded = torch.zeros(1, 40)
        for x in inputs:
            rounded += x.to(torch.bfloat16).float()
        check("three", (rounded / divisor).to(torch.bfloat16))


@pytest.mark.parametrize("compress", list(DTYPES))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_compressed_gradients(run_over_hosts: Runner, compress: str, reduction: str) -> None:
    run_over_hosts(average_compressed, compress, reduction)


def average_on_one_host(compress: str) -> None:
    """In the bits of a model that nothing is said of."""
    rank, size = joined()
    gradients = []
    for choice in (compress, None):
        torch.manual_seed(1)
        model = pydist.DataParallel(nn.Linear(300, 70), compress=choice)
        model(batch(rank, 3, 300, dtype=torch.float32)).square().mean().backward()
        gradients.append(model.module.weight.grad)
    assert torch.equal(*gradients)
    narrow = gradients[0].to(DTYPES[compress]).float()
    assert size == 1 or not torch.equal(narrow, gradients[0])


@pytest.mark.parametrize("compress", list(DTYPES))
def test_on_one_host_nothing_is_rounded(run_on_each: Runner, compress: str) -> None:
    run_on_each(average_on_one_host, compress)


def average_large() -> None:
    """Of hosts with one rank and with two: what crosses is rounded, the sums of a host are not."""
    rank, size = joined()
    host_of = [r // 2 for r in range(size)]
    model = pydist.DataParallel(nn.Linear(60_000, 1, bias=False), compress="bf16", reduction="sum")
    inputs = [batch(r, 1, 60_000, dtype=torch.float32) for r in range(size)]
    model(inputs[rank]).sum().backward()
    total = torch.zeros(1, 60_000)
    for host in sorted(set(host_of)):
        sums = torch.zeros(1, 60_000)
        for r in range(size):
            sums += inputs[r] * (host_of[r] == host)
        total += sums.to(torch.bfloat16).float()
    assert torch.equal(model.module.weight.grad, total.to(torch.bfloat16).float())


def test_a_hosts_sum_is_rounded_when_it_leaves() -> None:
    with RanksOfHosts(3, {"PYDIST_BACKEND": "native"}, ranks_of_a_host=2) as ranks:
        ranks.run(average_large, timeout=LIMIT_S)


def refuse() -> None:
    rank, _ = joined()
    with pytest.raises(pydist.InvalidUsage, match="'bf16', 'fp16' or None"):
        pydist.DataParallel(nn.Linear(2, 1), compress="int8")
    with pytest.raises(pydist.Mismatch, match=r"compress='bf16'.*compress=None"):
        pydist.DataParallel(nn.Linear(2, 1), compress=None if rank else "bf16")
    model = pydist.DataParallel(nn.Linear(2, 1), compress="bf16")
    with pytest.raises(pydist.InvalidUsage, match="compress"):
        model.register_comm_hook(None, lambda state, bucket: bucket)


def test_what_cannot_be_compressed(run: Runner) -> None:
    run(refuse)
