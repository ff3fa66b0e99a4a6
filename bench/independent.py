"""all_reduce timed as simply as can be: pydist run -n 2 bench/independent.py

Shares nothing with `pydist bench`; bench/agreement.py sees whether the two agree.
"""

import os
import time

import torch
import torch.distributed as dist

import pydist


def main() -> None:
    pydist.init()
    gloo = dist.new_group(backend="gloo")
    # gloo's threads have started, and may run anywhere.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[pydist.rank()]})
    torch.set_num_threads(1)
    for size in (8, 16 << 10, 1 << 20, 16 << 20):
        x = torch.zeros(size // 4)
        for name in ("pydist", "gloo"):
            calls = 2000 if size < 1 << 20 and name == "pydist" else 50
            for _ in ("untimed", "timed"):
                dist.barrier(gloo)
                start = time.perf_counter()
                for _ in range(calls):
                    pydist.all_reduce(x) if name == "pydist" else dist.all_reduce(x, group=gloo)
                taken = torch.tensor((time.perf_counter() - start) / calls * 1e6)
                dist.all_reduce(taken, dist.ReduceOp.MAX, group=gloo)
            if pydist.rank() == 0:
                print(name, size, float(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
