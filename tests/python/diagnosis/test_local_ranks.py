"""`pydist doctor <pid>` and PYDIST_DUMP: what the ranks of this host are in."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, run_command
from thorough import everyday

import pydist
from pydist.cli import main
from pydist.diagnosis import local_ranks, report
from pydist.diagnosis.local_ranks import LocalRank, Operation, first_disagreement
from pydist.diagnosis.stacks import stacks_of

pytestmark = pytest.mark.timeout(90)


def operation(sequence: int, kind: str = "all_reduce", state: str = "succeeded") -> Operation:
    finished = None if state == "running" else 1.0
    return Operation(7, sequence, kind, state, 8, "", 2.0, finished)


def rank_of(number: int, *operations: Operation, **values: Any) -> LocalRank:
    known = {"state": "waiting", "has_page": True, **values}
    return LocalRank(100 + number, number, operations=list(operations), **known)


def test_ranks_that_agree() -> None:
    ranks = [rank_of(0, operation(2, state="running"), operation(1)) for _ in range(2)]
    assert first_disagreement(ranks) == ("", set())
    assert first_disagreement([rank_of(0, operation(2)), rank_of(1, operation(1))])[0] == ""


def test_the_one_that_never_came() -> None:
    waiting = [rank_of(each, operation(5, state="running"), operation(4)) for each in range(3)]
    verdict, odd = first_disagreement([*waiting, rank_of(3, operation(4))])
    assert odd == {103}
    assert verdict.startswith("rank 3 never entered all_reduce #5")
    verdict, odd = first_disagreement([*waiting, rank_of(3)])
    assert odd == {103}
    assert verdict.endswith("which others wait in, unless it is a group without them")


def test_the_one_that_never_came_is_named_when_others_have_failed() -> None:
    failed = [rank_of(each, operation(5, state="failed"), operation(4)) for each in range(2)]
    verdict, odd = first_disagreement([*failed, rank_of(2, operation(4))])
    assert odd == {102}
    assert re.fullmatch(r"rank 2 never entered all_reduce #5 .*, which others waited in", verdict)
    assert first_disagreement([*failed, rank_of(2)])[0] == ""  # of another group, perhaps
    later = Operation(8, 1, "barrier", "succeeded", 0, "", 0.5, 0.2)
    gone_on = [rank_of(each, later, operation(5, state="failed")) for each in range(2)]
    assert first_disagreement([*gone_on, rank_of(2, later, operation(4))])[0] == ""


@pytest.mark.parametrize("state", ["stopped", "traced", "dead"])
def test_who_does_not_run_is_named(state: str) -> None:
    waiting = [rank_of(each, operation(5, state="running")) for each in range(2)]
    verdict, odd = first_disagreement([*waiting, rank_of(2, operation(4), state=state)])
    assert odd == {102}
    assert verdict.startswith(f"rank 2 is {state}; rank 2 never entered all_reduce #5")
    halted = rank_of(2, operation(5, state="running"), state=state)
    assert first_disagreement([*waiting, halted]) == (f"rank 2 is {state}", {102})
    assert first_disagreement([rank_of(2, state="dead", has_departed=True)])[0] == ""


def test_who_is_in_another_group_is_not_blamed() -> None:
    in_a_part = [rank_of(0, operation(5, state="running")), rank_of(1, operation(4))]
    verdict, odd = first_disagreement([*in_a_part, rank_of(2), rank_of(3)])
    assert odd == {101}
    assert verdict.endswith("which others wait in")


def test_the_one_that_called_something_else() -> None:
    alike = [rank_of(each, operation(5, "barrier"), operation(4)) for each in range(3)]
    verdict, odd = first_disagreement([*alike, rank_of(3, operation(5), operation(4))])
    assert odd == {103}
    assert "rank 3 is in all_reduce #5" in verdict
    text = report.as_text([*alike, rank_of(3, operation(5), operation(4))])
    assert re.search(r"^>> +3 +103 ", text, re.M)
    assert "First disagreement: they called different operations" in text


def test_what_a_group_did_before_it_was_made_anew_does_not_count() -> None:
    again = [operation(1, "barrier", "running"), operation(2), operation(1)]
    fresh = rank_of(1, operation(1, "barrier", "running"))
    assert first_disagreement([rank_of(0, *again), fresh])[0] == ""


def test_a_process_is_known_by_the_page_that_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, Any] = {"pid": os.getpid(), "rank": 3, "silent_s": 50.0, "entries": []}
    before["has_departed"] = True
    now = {**before, "silent_s": 0.1, "has_departed": False}
    for pages in ([before, now], [now, before]):
        monkeypatch.setattr(local_ranks, "_pages_of", lambda *_, pages=pages, **__: iter(pages))
        [found] = local_ranks.find(os.getpid())
        assert not found.has_departed


def test_messages_do_not_count() -> None:
    first = rank_of(0, operation(9, "send", "running"), operation(1))
    assert first_disagreement([first, rank_of(1, operation(1))])[0] == ""


def test_words_for_what_a_rank_is_in() -> None:
    assert rank_of(0, operation(5, state="running")).activity().startswith("in all_reduce #5")
    assert "which failed" in rank_of(0, operation(5, state="failed")).activity()
    assert rank_of(0).activity() == "has not entered any operation yet"
    assert rank_of(0, has_departed=True).activity() == "has left the job"
    assert "no journal" in rank_of(0, has_page=False).activity()


def test_a_process_that_is_no_rank() -> None:
    other = subprocess.Popen(["sleep", "60"])  # this process may have joined a job in another test
    try:
        with pytest.raises(pydist.InvalidUsage, match="no rank of a pydist job"):
            local_ranks.find(other.pid)
    finally:
        other.kill()
        other.wait()
    with pytest.raises(pydist.InvalidUsage, match="there is no process"):
        local_ranks.find(2**22 + 1)


def wait_for_the_other() -> str:
    pydist.init(timeout=20)
    pydist.barrier()
    worker = os.fork()  # as a data loader does
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    if pydist.rank() == 1:
        time.sleep(5)
    pydist.all_reduce(torch.ones(2))
    os.kill(worker, signal.SIGKILL)
    return "done"


def in_background(ranks: Ranks) -> threading.Thread:
    thread = threading.Thread(target=ranks.run, args=(wait_for_the_other,))
    thread.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            found = local_ranks.find(ranks.pids[1])
        except pydist.InvalidUsage:
            continue
        if first_disagreement(found)[0]:
            return thread
    thread.join()
    raise AssertionError("the ranks never waited for each other")


def test_a_job_that_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The variables of these ranks are not those that their processes began with: pages count.
    monkeypatch.setattr(local_ranks, "_rank_of", lambda _: 5)
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        thread = in_background(ranks)
        try:
            # Either leads to both.
            for pid in ranks.pids:
                found = local_ranks.find(pid)
                assert {each.rank: each.pid for each in found} == dict(enumerate(ranks.pids))
            verdict, odd = first_disagreement(found)
            assert "never entered all_reduce" in verdict
            assert odd == {ranks.pids[1]}
            assert main(["doctor", str(ranks.pids[0])]) == 1
        finally:
            thread.join()
    assert "First disagreement" in capsys.readouterr().out


DUMPING = """
import os, signal, sys, time
import pydist
pydist.init()
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.2)
print("went on", flush=True)
if sys.argv[1:] == ["fail"]:
    raise ValueError("broken")
"""


@pytest.mark.parametrize("fails", everyday(False, thorough=(True,)))
def test_a_dump(tmp_path: Path, fails: bool) -> None:
    arguments = ["fail"] if fails else []
    done = run_command(
        [sys.executable, "-c", DUMPING, *arguments], env={"PYDIST_DUMP": str(tmp_path / "d")}
    )
    assert "went on" in done.stdout, done.stderr
    (file,) = (tmp_path / "d").iterdir()
    text = file.read_text()
    assert "most recent call first" in text
    assert "SIGUSR1" in text
    assert ("ValueError: broken" in text) == fails
    assert done.returncode == int(fails)


def test_a_folder_that_can_not_be() -> None:
    done = run_command([sys.executable, "-c", "import pydist"], env={"PYDIST_DUMP": "/proc/no"})
    assert "PYDIST_DUMP='/proc/no' can't be written to" in done.stderr


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it() -> None:
    from pydist.diagnosis.stacks import _handles

    assert not _handles(os.getpid(), signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert _handles(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


WAITING = """
import threading
import pydist
pydist.init()
threading.Thread(target=threading.Event().wait, daemon=True).start()
def where_the_program_waits():
    print("ready", flush=True)
    threading.Event().wait()
where_the_program_waits()
"""


def test_the_stacks_of_all_threads_are_read(tmp_path: Path) -> None:
    variables = {**os.environ, "PYDIST_DUMP": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=variables, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        stacks = stacks_of(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert "in where_the_program_waits" in stacks
    assert "SIGUSR1" not in stacks
