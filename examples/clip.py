"""Learns which caption belongs to which picture, as CLIP does, from pictures made here, in seconds.

    python examples/clip.py
    pydist run -n 2 examples/clip.py
    pydist run --gpus 2 examples/clip.py

Each picture of a batch is compared with the captions of all the others, those on other processes
included: the loss is one over the whole batch. Any number of processes has the same losses, up to
rounding, also where it does not divide the batch. At the end the model names new pictures, by the
nearest of all captions, of which it was never told that they are classes. What is special to
training on several processes is marked with "pydist:".
"""

import argparse
import itertools
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pydist

SIDE = 16  # pixels
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
PLACES = {
    "left above": (4, 4),
    "right above": (4, 11),
    "left below": (11, 4),
    "right below": (11, 11),
}
SIZES = {"small": 2, "large": 4}
SHAPES = ("square", "cross", "ring")
CAPTIONS = list(itertools.product(SIZES, COLOURS, SHAPES, PLACES))
WORDS = [*SIZES, *COLOURS, *SHAPES, *PLACES]


def draw(caption: tuple[str, str, str, str]) -> Tensor:
    """The picture that a caption tells of, (3, SIDE, SIDE)."""
    size, colour, shape, place = caption
    row, column = PLACES[place]
    down = (torch.arange(SIDE) - row).abs()[:, None]
    across = (torch.arange(SIDE) - column).abs()[None, :]
    inside = torch.maximum(down, across) <= SIZES[size]
    if shape == "cross":
        inside &= (down == 0) | (across == 0)
    elif shape == "ring":
        inside &= torch.maximum(down, across) == SIZES[size]
    return inside * torch.tensor(COLOURS[colour], dtype=torch.float32)[:, None, None]


def make(count: int, seed: int) -> TensorDataset:
    """Noisy pictures, with the words and the number of the caption of each."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(CAPTIONS), (count,), generator=generator)
    drawn = torch.stack([draw(caption) for caption in CAPTIONS])[chosen]
    noise = torch.randn(drawn.shape, generator=generator)
    return TensorDataset(drawn + 0.3 * noise, all_words()[chosen], chosen)


def all_words() -> Tensor:
    """The captions as numbers of words, (captions, words)."""
    return torch.tensor([[WORDS.index(word) for word in caption] for caption in CAPTIONS])


class Clip(nn.Module):
    """A tower for pictures and one for captions, and the scale of their similarities."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 4) ** 2, width),
        )
        self.words = nn.EmbeddingBag(len(WORDS), width)
        self.captions = nn.Sequential(nn.ReLU(), nn.Linear(width, width))
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(self, pictures: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of length one for both, and the scale."""
        of_pictures = F.normalize(self.pictures(pictures))
        of_captions = F.normalize(self.captions(self.words(words)))
        return of_pictures, of_captions, self.log_scale.exp()


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Which pictures of a batch are nearest to the right one of all captions."""
    pictures, _, numbers = (each.to(pydist.device()) for each in batch)
    of_pictures, of_captions, _ = model(pictures, all_words().to(pydist.device()))
    return {"accuracy": (of_pictures @ of_captions.t()).argmax(1) == numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="pairs over all processes together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="compute the whole matrix everywhere")
    parser.add_argument("--output", type=Path, help="file for losses and accuracy, as JSON")
    arguments = parser.parse_args()

    pydist.init()  # pydist: joins the job that the launcher describes; without one, a job of one
    rank = pydist.rank()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // pydist.local_world_size()))
    torch.manual_seed(arguments.seed)
    device = pydist.device()  # pydist: this process's own GPU; the CPU where there is none

    training = make(2048, arguments.seed)
    whole = DataLoader(training, arguments.batch, shuffle=True, drop_last=True)
    # pydist: each process gets its share of every batch
    loader = pydist.prepare(whole, seed=arguments.seed, split_batches=True)
    # pydist: averages the gradients of all processes
    model = pydist.DataParallel(Clip().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    losses: list[float] = []
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for pictures, words, _ in itertools.islice(batches, arguments.steps):
        of_pictures, of_captions, scale = model(pictures.to(device), words.to(device))
        if arguments.plain:
            # pydist: the rows of all processes, from which each computes the same loss
            of_pictures, of_captions = pydist.nn.whole_batch((of_pictures, of_captions))
            loss = contrastive_loss(of_pictures, of_captions, scale)
        else:
            # pydist: the same loss, of which each process computes its rows
            loss = pydist.nn.contrastive_loss(of_pictures, of_captions, scale)
        optimizer.zero_grad()
        loss.backward()  # pydist: no weights; the loss is that of the whole batch on each process
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and len(losses) % 50 == 0:
            print(f"step {len(losses):4}  loss {losses[-1]:.4f}")
    # pydist: the processes share out the pictures; all get the same result
    accuracy = pydist.evaluate(model, make(480, arguments.seed + 1), measure, batch_size=64)
    if rank == 0:
        print(f"accuracy {accuracy['accuracy']:.2%} on 480 new pictures, {len(CAPTIONS)} captions")
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"losses": losses, **accuracy}))
    pydist.shutdown()


def contrastive_loss(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss, as one process writes it."""
    similarities = scale * first @ second.t()
    pairs = torch.arange(len(first), device=first.device)
    both = F.cross_entropy(similarities, pairs) + F.cross_entropy(similarities.t(), pairs)
    return both / 2


if __name__ == "__main__":
    main()
