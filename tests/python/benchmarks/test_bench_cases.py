"""What the micro-benchmarks measure and check: sizes, buffers, predicted values, rates."""

import pytest
import torch

import pydist
from pydist.benchmarks.collective_cases import (
    COLLECTIVES,
    IN_PLACE,
    OUT_OF_PLACE,
    Buffers,
    Case,
    cases_of,
)
from pydist.benchmarks.patterns import count_wrong, fill
from pydist.benchmarks.sizes import parse_size, size_text, sweep

pytestmark = pytest.mark.timeout(20)

MOVING = [name for name in COLLECTIVES if name != "barrier"]


# -- sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8", 8), ("0", 0), ("16K", 16 << 10), ("1.5m", 3 << 19), ("2GiB", 2 << 30), ("64kb", 65536)],
)
def test_sizes_are_read_in_powers_of_1024(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-8", "8 bits", "1e3", "K"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(pydist.InvalidUsage, match="is not a size"):
        parse_size(text)


def test_sizes_are_written_for_people() -> None:
    assert [size_text(size) for size in (0, 8, 1023, 1024, 25 << 20, 3 << 29)] == [
        "0 B",
        "8 B",
        "1023 B",
        "1 KiB",
        "25 MiB",
        "1.5 GiB",
    ]


def test_a_sweep_includes_both_ends() -> None:
    assert sweep(8, 512, 4, None) == [8, 32, 128, 512]
    assert sweep(8, 511, 4, None) == [8, 32, 128]
    assert sweep(100, 300, None, 100) == [100, 200, 300]
    assert sweep(8, 8, 2, None) == [8]
    # A factor that would stand still moves on.
    assert sweep(1, 4, 1.1, None) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 4, 2.0, None), "no size"),
        ((0, 4, 2.0, None), "1 byte"),
        ((1, 4, 1.0, None), "more than 1"),
        ((1, 4, None, 0), "1 byte or more"),
        ((1, 4, 2.0, 8), "exclude each other"),
    ],
)
def test_a_sweep_without_sizes_is_refused(
    arguments: tuple[int, int, float | None, int | None], message: str
) -> None:
    with pytest.raises(pydist.InvalidUsage, match=message):
        sweep(*arguments)


# -- cases


def test_sizes_are_rounded_down_to_whole_blocks() -> None:
    counts = [cases[0].count for cases in cases_of("all_gather", [8, 12, 100, 101], 3)]
    assert counts == [3, 24]  # 8 bytes hold no block for each; 100 and 101 are the same case
    assert [cases[0].count for cases in cases_of("all_reduce", [8, 101], 3)] == [2, 25]


def test_every_combination_is_measured() -> None:
    cases = cases_of("reduce", [64], 2, dtypes="bf16,double", ops="all", roots="all")
    seen = {(c.dtype, c.op, c.root, c.place) for group in cases for c in group}
    assert len(cases) == 2 * 5 * 2
    assert len(seen) == 2 * 5 * 2 * 2
    integers = cases_of("all_reduce", [64], 2, dtypes="int32", ops="all")
    assert "mean" not in {c.op for group in integers for c in group}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": "complex"}, "-d complex: unknown"),
        ({"ops": "xor"}, "-o xor: unknown"),
        ({"dtypes": "int8", "ops": "avg"}, "not defined"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(pydist.InvalidUsage, match=message):
        cases_of("all_reduce", [64], 2, **options)


def test_roots_are_ranks() -> None:
    with pytest.raises(pydist.InvalidUsage, match="from 0 to 1"):
        cases_of("broadcast", [64], 2, roots="2")
    with pytest.raises(pydist.InvalidUsage, match="holds an element"):
        cases_of("broadcast", [3], 2)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bandwidths_follow_nccl_tests(collective: str, factor: float) -> None:
    case = Case(collective, "float32", "sum", 0, 1000, 4, OUT_OF_PLACE)
    assert case.algorithm_bandwidth(2.0) == 2000
    assert case.bus_bandwidth(2.0) == 2000 * factor


# -- buffers and values


def simulate(case: Case, buffers: list[Buffers]) -> None:
    """The collective, done here for all ranks."""
    sent = [one.sent.clone() for one in buffers]
    if case.kind.has_op:
        stacked = torch.stack([one.double() for one in sent])
        combined = {
            "sum": stacked.sum(0),
            "prod": stacked.prod(0),
            "min": stacked.amin(0),
            "max": stacked.amax(0),
            "mean": stacked.mean(0),
        }[case.op].to(case.torch_dtype)
    for rank, one in enumerate(buffers):
        block = slice(rank * case.block, (rank + 1) * case.block)
        if case.collective in ("reduce", "gather") and rank != case.root:
            continue
        if case.collective in ("all_reduce", "reduce"):
            one.received.copy_(combined)
        elif case.collective == "reduce_scatter":
            one.received.copy_(combined[block])
        elif case.collective in ("all_gather", "gather"):
            one.received.copy_(torch.cat(sent))
        elif case.collective == "broadcast":
            one.received.copy_(sent[case.root])
        elif case.collective == "scatter":
            one.received.copy_(sent[case.root][block])
        elif case.collective == "all_to_all":
            one.received.copy_(torch.cat([other[block] for other in sent]))
        else:
            one.received.copy_(sent[rank - 1])


def prepared(case: Case) -> list[Buffers]:
    everyone = []
    for rank in range(case.ranks):
        send, receive = (torch.full((case.size_bytes,), 7, dtype=torch.uint8) for _ in range(2))
        everyone.append(Buffers.of(case, rank, send, receive))
        fill(case, rank, everyone[-1])
    return everyone


def all_cases() -> list[Case]:
    cases = []
    for name in MOVING:
        for ranks in (1, 2, 3, 5):
            for group in cases_of(name, [4 * 1001], ranks, ops="all", roots="all"):
                cases += group
        for dtype in ("bfloat16", "float16", "uint8", "int64"):
            for group in cases_of(name, [4 * 1001], 4, dtypes=dtype, ops="all"):
                cases += group
    return cases


def test_right_results_are_found_right() -> None:
    for case in all_cases():
        buffers = prepared(case)
        simulate(case, buffers)
        assert [count_wrong(case, rank, one) for rank, one in enumerate(buffers)] == [
            0
        ] * case.ranks, case


def test_a_call_that_does_nothing_is_noticed() -> None:
    for case in all_cases():
        buffers = prepared(case)
        receiver = case.ranks - 1
        if case.collective in ("reduce", "gather"):
            receiver = case.root
        elif case.collective in ("broadcast", "scatter"):
            receiver = (case.root + 1) % case.ranks
        if case.ranks == 1 and case.place == IN_PLACE:
            continue  # nothing is the right thing to do
        # In place, what was sent is right where this rank happens to have the smallest, say.
        assert count_wrong(case, receiver, buffers[receiver]) > case.received // 16, case


@pytest.mark.parametrize("collective", MOVING)
def test_one_wrong_element_counts_one(collective: str) -> None:
    case = Case(collective, "float32", "sum", 0, 3000, 3, COLLECTIVES[collective].places[0])
    for index in (0, 1, -1):
        buffers = prepared(case)
        simulate(case, buffers)
        buffers[0].received[index] += 1
        assert count_wrong(case, 0, buffers[0]) == 1


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "uint8"])
def test_a_sum_that_misses_a_rank_is_wrong_everywhere(op: str, dtype: str) -> None:
    if (op, dtype) == ("mean", "uint8"):
        op = "prod"
    for count in (1, 2, 3, 4, 100):
        for ranks in (2, 3):
            for lost in range(ranks):
                case = Case("all_reduce", dtype, op, -1, count, ranks, OUT_OF_PLACE)
                buffers = prepared(case)
                buffers[lost].sent.fill_(1 if op == "prod" else 0)
                simulate(case, buffers)
                assert count_wrong(case, 0, buffers[0]) == count


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_blocks_in_another_order_are_wrong(collective: str) -> None:
    case = Case(collective, "int32", "none", -1, 4096 * 2, 2, OUT_OF_PLACE)
    buffers = prepared(case)
    simulate(case, buffers)
    received = buffers[0].received
    received.copy_(torch.cat([received[case.block :], received[: case.block]]))
    assert count_wrong(case, 0, buffers[0]) > case.count // 2


def test_the_check_of_large_buffers_goes_by_pieces() -> None:
    case = Case("all_reduce", "uint8", "sum", -1, (2 << 20) + 3, 2, OUT_OF_PLACE)
    buffers = prepared(case)
    simulate(case, buffers)
    assert count_wrong(case, 1, buffers[1]) == 0
    buffers[1].received[-1] += 1
    assert count_wrong(case, 1, buffers[1]) == 1
