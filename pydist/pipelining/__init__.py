"""Stages of a pipeline whose replicas average once a step.

`torch.distributed.pipelining` cuts a batch into micro-batches, and calls a stage's module once for
each. Every backward of a `pydist.DataParallel` among these would average. Here the last one of a
step begins to, while it runs, with the gradients of those before it.
"""

from pydist.pipelining.stage import PipelineStage
from pydist.pipelining.traced_stage import build_stage
from pydist.pipelining.weighted_loss import WeightedLoss

__all__ = ["PipelineStage", "WeightedLoss", "build_stage"]
