"""In which generation of the job an error is raised."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from launch import run_ranks

import pydist
from pydist.errors import Aborted, Error
from pydist.job import current, last_words, processes


def keep_meeting() -> None:
    while True:
        pydist.barrier()


def fail_twice(backend: str) -> list[tuple[int, tuple[int, ...]]]:
    seen = []
    for culprit in (0, 1):
        pydist.init(backend)
        if pydist.rank() == culprit:
            pydist.barrier()
            pydist.abort("enough")
        with pytest.raises(Aborted) as caught:
            keep_meeting()
        seen.append((caught.value.generation, caught.value.ranks))
        pydist.shutdown()
    return seen


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_a_failure_is_of_its_generation_alone(backend: str) -> None:
    assert run_ranks(fail_twice, 2, backend, timeout=40) == [[(1, (0,)), (2, (1,))]] * 2


def test_an_error_outside_of_a_job_is_of_no_generation() -> None:
    assert Error("said").generation == current.job.generation == 0
    assert Error("said", generation=3).blame["generation"] == 3


def test_a_failure_of_the_generation_before_is_no_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its culprit may be among the survivors."""
    own = processes.own_process()
    other = replace(own, pid=own.pid + 1)
    job = current.Job(2)
    job.agreement = SimpleNamespace(processes=(own, other))  # type: ignore[assignment]
    monkeypatch.setattr(current, "job", job)
    for generation, is_echo in ((1, False), (2, True)):
        error = ValueError("a bug")
        error.__context__ = Aborted(
            "enough", ranks=[1], host=other.host, pid=other.pid, generation=generation
        )
        assert last_words.is_echo(error) == is_echo
