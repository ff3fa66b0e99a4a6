"""What a rank that ends with an exception takes for its own, and how it tells it."""

import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pydist.errors import PeerLost
from pydist.job import current, last_words, processes


def test_a_failure_after_going_on_is_no_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the error of the job before for a context."""
    error = ValueError("a bug")
    host = socket.gethostname()
    error.__context__ = PeerLost("rank 1 has died", ranks=[1], host=host, pid=4711)
    assert last_words.is_echo(error)
    own = processes.own_process()
    agreed = SimpleNamespace(processes=(own,))
    monkeypatch.setattr(current.job, "agreement", agreed)
    assert not last_words.is_echo(error)
    other = replace(own, pid=4711)
    monkeypatch.setattr(current.job, "agreement", SimpleNamespace(processes=(own, other)))
    assert last_words.is_echo(error)


def test_a_rank_of_a_smaller_group_is_not_taken_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 of the job reads that rank 1 of a group, which is another one, has left."""
    monkeypatch.setattr(current.job, "membership", SimpleNamespace(rank=1))
    assert last_words.is_echo(PeerLost("rank 1 has left", ranks=[1], cause="has left"))
    host, pid = socket.gethostname(), os.getpid()
    assert not last_words.is_echo(PeerLost("lost", ranks=[0], host=host, pid=pid))


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_that_cannot_be_told_is_told_of() -> None:
    assert last_words.in_words(ValueError("x")) == "ValueError: x"
    assert last_words.in_words(MuteError()) == "MuteError, whose text can't be had (RuntimeError)"
