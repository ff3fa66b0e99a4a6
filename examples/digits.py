"""Learns to read handwritten digits: scikit-learn's 1797 images of 8 x 8 pixels, in seconds.

    python examples/digits.py
    pydist run -n 2 examples/digits.py

The batch is that of the whole job, so any number of processes that divides it trains the same
model. The accuracy is exact: every test image counts once, also where the processes can't share
them evenly. What is special to training on several processes is marked with "pydist:".
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pydist

TEST_IMAGES = 360


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the same split on every process."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def build() -> nn.Module:
    """Two convolutions and a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that the model reads right, over all processes."""
    rank, world_size = pydist.rank(), pydist.world_size()
    # pydist: each process takes every n-th image; one may get fewer than another
    images, labels = images[rank::world_size], labels[rank::world_size]
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    # pydist: whole counts are summed, so it does not matter how many images each one had
    counts = pydist.all_reduce(torch.stack([right, torch.tensor(len(labels))]))
    return (counts[0] / counts[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images over all processes together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for losses and accuracy, as JSON")
    arguments = parser.parse_args()

    pydist.init()  # pydist: joins the job that the launcher describes; without one, a job of one
    rank, world_size = pydist.rank(), pydist.world_size()
    if arguments.batch % world_size:
        raise SystemExit(f"--batch {arguments.batch} does not divide among {world_size} processes")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // pydist.local_world_size()))
    torch.manual_seed(arguments.seed)

    images, labels, test_images, test_labels = load(arguments.seed)
    model = pydist.DataParallel(build())  # pydist: averages the gradients of all processes
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    losses = []
    for epoch in range(arguments.epochs):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(arguments.seed + epoch)
        )
        whole = len(order) // arguments.batch * arguments.batch
        for batch in order[:whole].split(arguments.batch):
            mine = batch[rank::world_size]  # pydist: each process takes its share of the batch
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # pydist: the loss of the whole batch is the mean of the shares'
            losses.append(pydist.all_reduce(loss.detach(), "mean").item())
        if rank == 0:
            print(f"epoch {epoch + 1:2}  loss {losses[-1]:.4f}")
    result = accuracy(model, test_images, test_labels)
    if rank == 0:
        print(f"accuracy {result:.2%} on {len(test_labels)} test images")
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"losses": losses, "accuracy": result}))
    pydist.shutdown()


if __name__ == "__main__":
    main()
