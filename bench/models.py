"""The models that the benchmarks of training run."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
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


def gpt() -> tuple[nn.Module, Tensor]:
    return GPT(), torch.randint(0, 16384, (2, 64))


def wide() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(8, 2048)


def deep() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(200) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(8, 64)


MODELS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Tensor]]]] = {
    "gpt": ("GPT, 8 layers, 33.6M parameters, batch 2x64", gpt),
    "wide": ("MLP 6x2048, batch 8", wide),
    "deep": ("200 layers of 64x64, batch 8", deep),
}
