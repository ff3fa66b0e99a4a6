"""How bench/peers/compare.py tells the states of the machine apart, with made-up programs."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from compare import Cores, Program, compare, measure_case, verdict

from pydist.benchmarks.noise import Ratio

pytestmark = pytest.mark.timeout(20)

ONCE_MORE = argparse.Namespace(retries=1, seconds=0.0, timeout=1.0)


class MadeUpCores(Cores):
    """That are as far from each other as it is told."""

    def __init__(self, *distances_ns: float) -> None:
        super().__init__(Path("bench_engine"), 2)
        self._told: Iterator[float] = iter(distances_ns)

    def measure_ns(self) -> float:
        return next(self._told)


class MadeUp(Program):
    """Takes a microsecond more each time."""

    def run(self, kind: str, size: int, seconds: float, timeout_s: float) -> dict[str, float]:
        self.runs = getattr(self, "runs", 0) + 1
        return dict.fromkeys(self.arms, float(self.runs))


def programs() -> list[MadeUp]:
    return [MadeUp(name, [], [], ("ordinary",)) for name in ("engine", "peer")]


def test_a_round_in_which_cores_were_moved_is_measured_again() -> None:
    cores, turns = MadeUpCores(40, 250, 240, 40, 30, 50), programs()
    measure_case(turns, cores, "all_reduce", 8, ONCE_MORE)
    assert [program.times["all_reduce"][8]["ordinary"] for program in turns] == [[2.0], [2.0]]
    assert cores.distances == {("all_reduce", 8): [40]}
    assert (cores.moved, cores.states) == (0, [""])


def test_what_is_moved_at_every_try_does_not_count() -> None:
    cores, turns = MadeUpCores(40, 250, 240, 240, 40, 50), programs()
    measure_case(turns, cores, "all_reduce", 8, ONCE_MORE)
    assert cores.moved == 1
    assert cores.states == [""]
    assert compare(*turns, "all_reduce", lambda kind, size: cores.rounds(kind, size, "")) == {}


def test_each_state_has_its_own_rounds() -> None:
    cores, turns = MadeUpCores(40, 40, 50, 250, 240, 260, 30, 30, 30), programs()
    for _ in range(3):
        measure_case(turns, cores, "all_reduce", 8, ONCE_MORE)
    assert cores.states == ["near", "apart"]
    assert cores.rounds("all_reduce", 8, "near") == [0, 2]
    assert cores.rounds("all_reduce", 8, "apart") == [1]
    assert cores.rounds("all_reduce", 16, "near") == []
    assert "30 to 40 ns" in cores.describe("near")
    (row,) = compare(
        *turns, "all_reduce", lambda kind, size: cores.rounds(kind, size, "apart")
    ).values()
    assert (row["rounds"], row["engine_us"]["ordinary"]) == (1, 2.0)


def test_few_rounds_tell_nothing() -> None:
    clearly_faster = Ratio(2.0, 1.9, 2.1)
    assert verdict(clearly_faster, 4) == "unknown"
    assert verdict(clearly_faster, 5) == "faster"
