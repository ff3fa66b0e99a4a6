"""The models that the benchmarks of training run.

Imports nothing of pydist: processes that measure torch alone load this file by its path.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Training(NamedTuple):
    """A model and the batch of one rank."""

    # For tables.
    title: str
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    # Whether some of its gradients are.
    is_sparse: bool = False


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.mix(self.norms[1](x))
        return out


class GPT(nn.Module):
    """33.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16384, 512)
        self.blocks = nn.Sequential(*(Block(512) for _ in range(8)))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.blocks(self.words(tokens)) @ self.words.weight.t()
        return logits


class Residual(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, came: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(came, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.past: nn.Module = nn.Identity()
        if stride != 1 or came != width:
            self.past = nn.Sequential(
                nn.Conv2d(came, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.past(x))


class ResNet18(nn.Sequential):
    """For pictures of 32x32, 10 classes: 11.2 million parameters.

    The stem is a 3x3 convolution without pooling, as usual for pictures so small.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        ]
        came = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [Residual(came, width, stride), Residual(width, width, 1)]
            came = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Recommender(nn.Module):
    """Tables of embeddings with sparse gradients, 25.6 million parameters, and a small MLP."""

    TABLES, ROWS, WIDTH, FEATURES = 8, 100_000, 32, 13

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(self.ROWS, self.WIDTH, mode="sum", sparse=True)
            for _ in range(self.TABLES)
        )
        self.bottom = nn.Sequential(
            nn.Linear(self.FEATURES, 64), nn.ReLU(), nn.Linear(64, self.WIDTH), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear((self.TABLES + 1) * self.WIDTH, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, features: Tensor, rows: Tensor) -> Tensor:
        """Of features (batch, 13) and rows (batch, tables, bag)."""
        found = [table(rows[:, number]) for number, table in enumerate(self.tables)]
        score: Tensor = self.top(torch.cat([self.bottom(features), *found], dim=1))
        return score


def _gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(), (torch.randint(0, 16384, (2, 64)),)


def _wide() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(8, 2048),)


def _deep() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [layer for _ in range(200) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(8, 64),)


def _resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResNet18(), (torch.randn(4, 3, 32, 32),)


def _recommender() -> tuple[nn.Module, tuple[Tensor, ...]]:
    rows = torch.randint(0, Recommender.ROWS, (128, Recommender.TABLES, 4))
    return Recommender(), (torch.randn(128, Recommender.FEATURES), rows)


def _tiny() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), (torch.randn(4, 64),)


MODELS = {
    "gpt": Training("GPT, 8 layers, 33.6M parameters, batch 2x64", _gpt),
    "wide": Training("MLP 6x2048, batch 8", _wide),
    "deep": Training("200 layers of 64x64, batch 8", _deep),
    "resnet": Training("ResNet-18, 32x32 pictures, batch 4", _resnet),
    "recommender": Training("8 sparse tables of 100kx32, batch 128", _recommender, is_sparse=True),
    # To see whether everything works.
    "tiny": Training("MLP of 4.7k parameters, batch 4", _tiny),
}
DEFAULT_MODELS = tuple(name for name in MODELS if name != "tiny")
