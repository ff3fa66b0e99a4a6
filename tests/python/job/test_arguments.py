"""Words for what was given where something else was wanted."""

import numpy as np
import pytest
import torch

from pydist.job.arguments import a_type, with_article


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "an int"),
        ("text", "a str"),
        (None, "None"),
        (np.zeros(1), "an ndarray"),
        (np.uint8(1), "a uint8"),
        (torch.zeros(1), "a Tensor"),
    ],
)
def test_types_have_their_article(value: object, words: str) -> None:
    assert a_type(value) == words


def test_names_are_spoken() -> None:
    an = ["SGD", "LSTM", "OrderedDict", "IterableDataset", "Unpickler", "RMSprop", "X", "object"]
    a = ["StepLR", "UniformSampler", "UserDict", "UUID", "OneCycleLR", "Linear", "DeviceMesh"]
    assert [with_article(name) for name in an] == [f"an {name}" for name in an]
    assert [with_article(name) for name in a] == [f"a {name}" for name in a]
