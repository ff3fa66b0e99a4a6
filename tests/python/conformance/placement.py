"""Tensors in every memory layout, with the memory around them watched."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.references import values
from conformance.suite import check_bits


@dataclass
class Placed:
    """A tensor in some layout, and the memory around it that nobody may touch."""

    tensor: Tensor
    around: Tensor
    margin: Tensor
    before: Tensor

    def check_margin(self) -> None:
        check_bits(self.around[self.margin], self.before, "memory outside the tensor")


LAYOUTS = ("dense", "offset", "strided", "transposed", "channels_last", "scalar")


def place(elements: Tensor, layout: str) -> Placed:
    """A tensor that holds `elements` in logical order, in a layout.

    Args:
        elements: one-dimensional. Layouts of several dimensions want a multiple of 6, "scalar" 1.
        layout: one of LAYOUTS.
    """
    count = elements.numel()
    dtype = elements.dtype
    fill = functools.partial(values, dtype, rank=5, salt=17)
    if layout == "dense":
        around = elements.clone()
        tensor = around
    elif layout == "offset":
        # Odd, so that no vector load is aligned.
        around = fill(count + 10)
        tensor = around[3 : 3 + count]
    elif layout == "strided":
        around = fill(2 * count + 3)
        tensor = around[1 : 1 + 2 * count : 2]
    elif layout == "transposed":
        around = fill(count)
        tensor = around.view(count // 3, 3).t()
    elif layout == "channels_last":
        around = fill(count)
        tensor = around.view(1, count // 6, 2, 3).permute(0, 3, 1, 2)
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    elif layout == "scalar":
        around = fill(3)
        tensor = around[1]
    else:
        raise AssertionError(layout)
    tensor.copy_(elements.view(tensor.shape))
    marks = torch.arange(around.numel()).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    margin = torch.ones(around.numel(), dtype=torch.bool)
    margin[marks.flatten()] = False
    return Placed(tensor, around, margin, around[margin].clone())
