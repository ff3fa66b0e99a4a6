"""How the processes that are left of a job agree on who goes on."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import pydist
from pydist.job import processes
from pydist.job.processes import Process
from pydist.job.recovery.survivors import Patience, Survivor, Verdict, agree_on_survivors

pytestmark = pytest.mark.timeout(60)


def test_nobody_is_left_out_because_the_time_of_another_one_is_up() -> None:
    store = dist.HashStore()
    other = subprocess.Popen(["sleep", "60"])
    roster = [processes.own_process(), processes._own(other.pid)]

    def agree(process: Process, limit_s: float) -> Verdict:
        patience = Patience(settle_s=10.0, deadline_s=time.monotonic() + limit_s)
        return agree_on_survivors(store, Survivor(process, "a host", 1, 1), roster, 0, patience)

    try:
        with pytest.raises(pydist.Timeout, match=r"rank 1 \(pid \d+ on .*\) has not called it"):
            agree(roster[0], 0.2)
        with ThreadPoolExecutor(2) as both:
            verdicts = list(both.map(agree, roster, (20.0, 20.0)))
    finally:
        other.kill()
        other.wait()
    for verdict in verdicts:
        assert [survivor.process for survivor in verdict.survivors] == roster
        assert verdict.turn == 1
