"""How the conductor makes series of answers, and rows of series; with ranks that are made up."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import pydist
from pydist.benchmarks import machine
from pydist.benchmarks.collective_cases import IN_PLACE, OUT_OF_PLACE, Case
from pydist.benchmarks.processes.arms import Arm, Unsupported
from pydist.benchmarks.processes.conductor import Conductor, Effort, Series
from pydist.benchmarks.processes.rank_commands import Check, Distance, Failed, Reserve, Time, obey
from pydist.benchmarks.processes.ranks import Ranks
from pydist.benchmarks.report import comparison_cells, footer, line
from pydist.benchmarks.results import Results, rows_of
from pydist.errors import Error

pytestmark = pytest.mark.timeout(20)

CASE = Case("all_reduce", "float32", "sum", -1, 250, 2, IN_PLACE)


class MadeUp(Ranks):
    """Two ranks that answer as they are told."""

    def __init__(self, arms: list[str], answer: Callable[[Any], list[Any]]) -> None:
        self.arms = arms
        self.asked: list[Any] = []
        self._answer = answer

    def ask(self, command: Any) -> list[Any]:
        self.asked.append(command)
        return self._answer(command)

    def close(self) -> None:
        pass


def times(first: float, second: float) -> Callable[[Any], list[Any]]:
    """Of each call on the two ranks, in turn slow and fast."""

    def answer(command: Any) -> list[Any]:
        if isinstance(command, Check):
            return [0, 3]
        assert isinstance(command, Time)
        if not command.each:
            return [[first], [second]]
        pattern = [first * 0.5, first * 1.5]
        return [
            (pattern * command.calls)[: command.calls],
            ([second] * command.calls)[: command.calls],
        ]

    return answer


@pytest.mark.parametrize("scale", [1e-6, 1e-3])
def test_a_round_is_the_slowest_ranks_mean(scale: float) -> None:
    """Also where calls are long, each is timed, and the slowest changes from call to call."""
    ranks = MadeUp(["a"], times(2 * scale, 2.1 * scale))
    (one,) = Conductor([ranks], Effort(seconds=0, calls=4, checks=2)).measure([CASE])
    assert one.rounds == pytest.approx([2.1 * scale] * 10)
    assert sorted(one.singles) == pytest.approx([2.1 * scale] * 20 + [3 * scale] * 20)
    assert one.wrong == 6
    assert one.calls == 4


def test_calls_fill_a_turn() -> None:
    for once_s, calls in ((1e-6, 2000), (1e-3, 5), (1.0, 1)):
        ranks = MadeUp(["a"], times(once_s, once_s))
        (one,) = Conductor([ranks], Effort(seconds=0)).measure([CASE])
        assert one.calls == pytest.approx(calls, rel=0.01) or one.calls == calls * 2


def test_arms_take_turns_there_and_back() -> None:
    order: list[str] = []

    def noted(command: Any) -> list[Any]:
        order.append(command.arm)
        return times(1e-3, 1e-3)(command)

    groups = [MadeUp([name], noted) for name in "ab"]
    Conductor(groups, Effort(seconds=0, checks=0)).measure([CASE])
    turns = "".join(order)[-8:]
    assert turns in ("abbaabba", "baabbaab")


def test_what_an_arm_lacks_is_no_failure() -> None:
    lacking = MadeUp(["b"], lambda command: [Failed("no such thing", True)] * 2)
    series = Conductor([MadeUp(["a"], times(1e-3, 1e-3)), lacking], Effort(seconds=0)).measure(
        [CASE]
    )
    assert [one.unsupported for one in series] == [None, "no such thing"]
    rows = rows_of(series)
    assert rows[1].time_us is None
    assert rows[0].ratio is None
    assert len(lacking.asked) == 1


@pytest.mark.parametrize("failing", [Check, Time])
def test_a_failure_is_one(failing: type) -> None:
    def answer(command: Any) -> list[Any]:
        if isinstance(command, failing):
            return [[1e-3], Failed("TypeError: a bug", False)]
        return [0, 0]

    conductor = Conductor([MadeUp(["a"], answer)], Effort(seconds=0))
    with pytest.raises(pydist.Error, match="a: all_reduce: rank 1: TypeError: a bug"):
        conductor.measure([CASE])


class Broken(Arm):
    description = "broken"

    def __init__(self, error: Exception) -> None:
        super().__init__(0, 1)
        self._error = error

    def barrier(self) -> None:
        pass

    def _all_reduce(self, case: Case, buffers: Any) -> Callable[[], object]:
        if isinstance(self._error, Unsupported):
            raise self._error

        def call() -> None:
            raise self._error

        return call


@pytest.mark.parametrize(
    ("error", "is_unsupported"),
    [(Unsupported("none"), True), (TypeError("a bug"), False), (RuntimeError("closed"), False)],
)
def test_only_what_an_arm_says_it_lacks_is_unsupported(
    error: Exception, is_unsupported: bool
) -> None:
    arms: dict[str, Arm] = {"a": Broken(error)}
    obey(Reserve(1000), arms)
    for command in (Check("a", CASE), Time("a", CASE, 1, each=True)):
        answer = obey(command, arms)
        assert isinstance(answer, Failed)
        assert answer.is_unsupported == is_unsupported


def series_of(arm: str, place: str, seconds: float) -> Series:
    case = Case("all_reduce", "float32", "sum", -1, 250, 2, place)
    return Series(arm, case, rounds=[seconds] * 10, singles=[seconds] * 10, wrong=0)


def test_like_is_compared_with_like() -> None:
    ours = [series_of("pydist", OUT_OF_PLACE, 4e-6), series_of("pydist", IN_PLACE, 1e-6)]
    out_only = series_of("mpi", OUT_OF_PLACE, 8e-6)
    both = [series_of("gloo", OUT_OF_PLACE, 1e-6), series_of("gloo", IN_PLACE, 3e-6)]
    cells = comparison_cells([*ours, out_only, *both], "pydist")
    assert cells["pydist"][0] == pytest.approx(1)
    assert cells["mpi"][1] is not None
    assert cells["mpi"][1].median == pytest.approx(2)
    assert cells["gloo"][1] is not None
    assert cells["gloo"][1].median == pytest.approx(3)


def test_a_probe_is_one_turn() -> None:
    ranks = MadeUp(["a", "b"], times(2e-6, 3e-6))
    assert Conductor([ranks], Effort()).probe("b", CASE) == pytest.approx(3e-6)
    # As many calls as fill a turn, and the results are the measurements' to check.
    assert ranks.asked == [Time("b", CASE, 5, each=True), Time("b", CASE, 1666, each=False)]


def test_the_state_of_the_machine_is_said() -> None:
    series = series_of("pydist", IN_PLACE, 1e-6)
    series.rounds = [1e-6] * 6 + [2e-6] * 4
    rows = rows_of([series])
    assert (rows[0].low_us, rows[0].high_us) == (pytest.approx(1), pytest.approx(2))
    results = Results("", machine.describe(), 2, True, {"pydist": ""}, rows, [])
    said = list(footer(results))
    states = (
        "# Two states at 1000 B, in-place: 1.000 us in 60% of the rounds, 2.000 us in the others"
    )
    assert states in said
    assert not any("State of the machine" in each for each in said)
    for measured, words in (
        ([0.5], "an all_reduce of 8 B takes 0.500 us before"),
        ([0.5, 0.9], "an all_reduce of 8 B takes 0.500 us before, 0.900 us after"),
        (
            [0.5, 0.6, 0.7, 0.9],
            "an all_reduce of 8 B takes 0.500 us before, 0.600 to 0.700 us between, 0.900 us after",
        ),
    ):
        results.state_us = measured
        assert f"# State of the machine  : {words}" in list(footer(results))


def test_how_far_cores_are_from_each_other_is_said() -> None:
    ranks = MadeUp(["roofline"], lambda command: [[40.0, 55.0], [40.0]])
    assert Conductor([ranks], Effort()).distance_ns() == 55
    assert ranks.asked == [Distance()]
    nobody_can = MadeUp(["roofline"], lambda command: [[], []])
    assert Conductor([nobody_can], Effort()).distance_ns() is None
    failing = MadeUp(["roofline"], lambda command: [[1.0], Failed("gone", is_unsupported=False)])
    with pytest.raises(Error, match="rank 1: gone"):
        Conductor([failing], Effort()).distance_ns()
    results = Results("", machine.describe(), 2, True, {"pydist": ""}, [], [])
    assert not results.have_cores_moved
    assert not any("core to core" in each for each in footer(results))
    results.core_to_core_ns = [30.0, 52.0, 49.0]
    words = "a cache line takes 30.00 ns before, 52.00 to 52.00 ns between, 49.00 ns after"
    assert f"# From core to core     : {words}" in list(footer(results))
    assert not results.have_cores_moved
    results.core_to_core_ns.append(250.0)
    assert results.have_cores_moved
    assert json.loads(results.as_json())["core_to_core_ns"] == [30, 52, 49, 250]


def test_wrong_elements_are_counted_and_said() -> None:
    series = [series_of("pydist", IN_PLACE, 1e-6), series_of("roofline", IN_PLACE, 1e-6)]
    series[0].wrong, series[1].wrong = 7, 99
    rows = rows_of(series)
    results = Results("", machine.describe(), 2, True, {"pydist": "", "roofline": ""}, rows, [])
    assert results.wrong == 7  # nobody takes the roofline's for a result
    assert "# Out of bounds values : 7 FAILED" in list(footer(results))
    assert line(rows, "pydist").split()[-1] == "7"
    assert not results.failed
    assert rows[0].percent_of_roofline == pytest.approx(100)
    series[0].wrong = 0
    results.rows = rows_of(series)
    assert "# Out of bounds values : 0 OK" in list(footer(results))
