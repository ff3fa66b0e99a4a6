"""Keeps the optimizer's state of a shard in the host's memory, and steps there.

The gradients of a bucket are reduced on the GPU. Its shard of them goes to pinned memory, the fused
kernels of the host step it there, and the new parameters come back and are gathered, each bucket by
itself:

    reduce_scatter on the GPU -> send_gradients (HostShard) -> run_on_host (OffloadedStep)
        -> upload (HostShard) -> all_gather on the GPU

ZeRO-Offload: Ren et al., arXiv 2101.06840, whose delayed parameter update is Note [Delayed steps].
"""
