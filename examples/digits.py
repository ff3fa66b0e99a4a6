"""Learns to read handwritten digits: scikit-learn's 1797 images of 8 x 8 pixels, in seconds.

    python examples/digits.py
    pydist run -n 2 examples/digits.py
    pydist run --gpus 2 examples/digits.py

The batch is that of the whole job, so any number of processes trains the same model: same images
in each batch, same losses up to rounding. With --checkpoint, a run that was interrupted goes on
where it was, also in the middle of an epoch and with another number of processes. The accuracy is
exact: every test image counts once. What is special to training on several processes is marked
with "pydist:".
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pydist

TEST_IMAGES = 360


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Images and labels to train and to test with; the same split on every process."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    training = TensorDataset(images[TEST_IMAGES:], labels[TEST_IMAGES:])
    return training, TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES])


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


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Which images of a batch the model reads right."""
    images, labels = (each.to(pydist.device()) for each in batch)
    return {"accuracy": model(images).argmax(1) == labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images over all processes together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for losses and accuracy, as JSON")
    parser.add_argument("--checkpoint", type=Path, help="go on from this folder, and write it")
    parser.add_argument("--stop-at", type=int, help="stop after this step, as if interrupted")
    arguments = parser.parse_args()

    pydist.init()  # pydist: joins the job that the launcher describes; without one, a job of one
    rank = pydist.rank()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // pydist.local_world_size()))
    torch.manual_seed(arguments.seed)
    device = pydist.device()  # pydist: this process's own GPU; the CPU where there is none

    training, testing = load(arguments.seed)
    whole = DataLoader(training, arguments.batch, shuffle=True, drop_last=True)
    # pydist: each process gets its share of every batch
    loader = pydist.prepare(whole, seed=arguments.seed, split_batches=True)
    # pydist: averages the gradients of all processes
    model = pydist.DataParallel(build().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    losses: list[float] = []
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        # pydist: whatever number of processes wrote it
        losses = pydist.load(arguments.checkpoint, model=model, optimizer=optimizer, sampler=loader)

    def checkpoint() -> None:
        if arguments.checkpoint is not None:  # pydist: the processes share out the writing
            pydist.save(
                arguments.checkpoint,
                model=model,
                optimizer=optimizer,
                sampler=loader,
                extra=losses,
            )

    while loader.distributed_sampler.epoch < arguments.epochs:
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            with model.weighted(len(labels)):  # pydist: some may have an image less than others
                loss.backward()
            optimizer.step()
            # pydist: the loss of the whole batch, over the images of all processes
            losses.append(pydist.metrics.mean(loss, len(labels)))
            if len(losses) == arguments.stop_at:
                checkpoint()
                return
        checkpoint()
        if rank == 0:
            print(f"epoch {loader.distributed_sampler.epoch:2}  loss {losses[-1]:.4f}")
    # pydist: the processes share out the test images; all get the same result
    accuracy = pydist.evaluate(model, testing, measure, batch_size=64)["accuracy"]
    if rank == 0:
        print(f"accuracy {accuracy:.2%} on {len(testing)} test images")
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"losses": losses, "accuracy": accuracy}))
    pydist.shutdown()


if __name__ == "__main__":
    main()
