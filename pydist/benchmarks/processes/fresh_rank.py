"""What a process does until it has joined a job, or made a first step; a script, run by fresh_job.

It prints one line of JSON: when each stage was over, in seconds on the clock that all processes of
a host share. Nothing but the standard library is imported before the first stage; an arm of torch's
never imports pydist.

    fresh_rank.py PARENT ARM CPU meet         says when it has imported, and joins when told to
    fresh_rank.py PARENT ARM CPU MODELS NAME  joins, and makes a step of a model of the file MODELS

PARENT is the process that it ends with, ARM `pydist` or `gloo`, CPU the one to run on, or -1.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1


def main(parent: int, arm: str, cpu: int, what: list[str]) -> None:
    # Without its parent, this rank would wait for the other ranks until its timeout.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it was gone before this process could ask to end with it
    stages = {"began_s": time.monotonic()}
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})
    import torch

    stages["torch_s"] = time.monotonic()
    if arm == "pydist":
        import pydist
    else:
        import torch.distributed as dist
    stages["imported_s"] = time.monotonic()
    if what == ["meet"]:
        # Joining is timed from where all ranks are ready, lest it be waiting for their imports.
        print("ready", flush=True)
        sys.stdin.readline()
    stages["told_s"] = time.monotonic()
    if arm == "pydist":
        pydist.init()
    else:
        dist.init_process_group("gloo")
    stages["joined_s"] = time.monotonic()
    if what != ["meet"]:
        path, name = what
        model, inputs = runpy.run_path(path)["MODELS"][name].make()
        if arm == "pydist":
            wrapped: torch.nn.Module = pydist.DataParallel(model)
        else:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(*inputs).square().mean().backward()
        stages["stepped_s"] = time.monotonic()
    print(json.dumps(stages), flush=True)
    # Leaves together with the others, who may still be talking to it.
    sys.stdin.readline()
    if arm != "pydist":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
