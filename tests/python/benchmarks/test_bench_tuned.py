"""`pydist bench -v`: what was in use at the end."""

import pytest

from pydist.benchmarks import report
from pydist.benchmarks.collective_cases import cases_of
from pydist.benchmarks.tuned import Tuned, class_bytes, tuned_for
from pydist.cli import main

KIB = 1024


def one(
    kind: str,
    bytes_: int,
    memory: str = "ordinary",
    ranks: int = 2,
    sends_too: bool = False,
) -> Tuned:
    way = (128 * KIB, False, False)
    times = ((way, 9.5), ((0, False, False), 8.25))
    return Tuned(kind, memory, ranks, bytes_, way, times, sends_too)


def test_a_case_belongs_to_the_class_of_what_a_rank_contributes() -> None:
    for collective, bytes_ in (("all_reduce", 1 << 20), ("all_gather", 1 << 19)):
        ((case, *_),) = cases_of(collective, [1 << 20], 2)
        assert class_bytes(case) == bytes_
    ((case, *_),) = cases_of("all_reduce", [(1 << 20) - 4096], 2)
    assert class_bytes(case) == 1 << 20


def test_the_rank_that_chooses_is_asked() -> None:
    ((broadcast, *_),) = cases_of("broadcast", [1 << 20], 2, roots="1")
    ((all_reduce, *_),) = cases_of("all_reduce", [1 << 20], 2)
    known = [one("all_reduce", 1 << 20)], [one("broadcast", 1 << 20)]
    assert tuned_for(broadcast, "ordinary", known) is known[1][0]
    assert tuned_for(all_reduce, "ordinary", known) is known[0][0]
    assert tuned_for(all_reduce, "symmetric", known) is None
    assert tuned_for(all_reduce, "ordinary", ([one("all_reduce", 1 << 20, ranks=3)], [])) is None


def test_messages_are_known_by_who_sends() -> None:
    for memory, lies_in in (
        ("ordinary", "ordinary"),
        ("symmetric", "ordinary"),
        ("shared", "shared"),
    ):
        for size in (512 << 10, 1 << 20):
            known = [one("recv", size, lies_in, sends_too=both) for both in (False, True)]
            for ranks in (2, 3):
                ((case, *_),) = cases_of("send_recv", [size], ranks)
                comes_ahead = lies_in == "ordinary" and size == 512 << 10
                expected = known[ranks == 2 and not comes_ahead]
                assert tuned_for(case, memory, [known] * ranks) is expected


def test_lines_for_people() -> None:
    cases = [case for case, *_ in cases_of("all_reduce", [8, 1 << 20], 2)]
    assert list(report.tuned_lines(cases, "ordinary", ([one("all_reduce", 1 << 20)], []))) == [
        "# In use, all_reduce 8 B: as is usual",
        "# In use, all_reduce 1 MiB: pieces of 128 KiB (one shot: 8.25 us; pieces of 128 KiB: 9.5 "
        "us)",
    ]


@pytest.mark.timeout(110)
def test_what_was_in_use_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYDIST_TUNING", "uncached")
    sizes = ("-b", "8", "-e", "512K", "-f", "65536", "--seconds", "0", "-n", "30")
    assert main(["bench", "all_reduce", "-p", "2", "-v", *sizes]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("# In use")]
    assert lines[0] == "# In use, all_reduce 8 B: as is usual"
    assert lines[1].startswith("# In use, all_reduce 512 KiB: ")
    assert "pieces of 64 KiB: " in lines[1]
