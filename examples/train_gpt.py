"""Trains a small GPT on the sources of Python's standard library, byte by byte.

    python examples/train_gpt.py                      # one process
    pydist run -n 2 examples/train_gpt.py             # two
    pydist run --gpus 2 examples/train_gpt.py         # two, with a GPU each
    pydist run -n 4 examples/train_gpt.py --resume    # go on with four from the last checkpoint

The batch is that of the whole job, so any number of processes trains the same model: same samples,
same losses up to rounding. What is special to training on several processes is marked with
"pydist:".

Writes to --output: checkpoint, losses.json, loss.png, sample.txt.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import pydist

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
VOCABULARY = 256  # bytes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What determines the losses; a checkpoint goes on only with the same."""

    batch: int  # sequences a step, over all processes together
    context: int  # bytes a sequence
    width: int
    layers: int
    heads: int
    lr: float
    warmup: int  # steps
    seed: int


# -- the text


def read_text() -> Tensor:
    """The standard library's own sources, one after the other, as bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """A text, cut into inputs and targets: (context,) of int64, targets one byte ahead."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.context
        row = self.text[begin : begin + self.context + 1].long()
        return row[:-1], row[1:]


def endless(loader: DataLoader[T]) -> Iterator[T]:
    """The batches of one epoch after the other."""
    while True:
        yield from loader


# -- the model


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a normalisation and beside a bypass."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """Predicts each byte from the ones before it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.context = settings.context
        self.bytes = nn.Embedding(VOCABULARY, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(
            Block(settings.width, settings.heads) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.apply(self._initialize)
        for block in self.blocks:
            nn.init.normal_(block.project.weight, std=0.02 / math.sqrt(2 * settings.layers))
            nn.init.normal_(block.contract.weight, std=0.02 / math.sqrt(2 * settings.layers))
        self.head.weight = self.bytes.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float, seed: int) -> str:
        """Continues `prompt` by `count` bytes."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor(list(prompt))
        for _ in range(count):
            inputs = text[None, -self.context :].to(pydist.device())
            logits = self(inputs)[0, -1].cpu() / temperature
            choice = torch.multinomial(logits.softmax(0), 1, generator=generator)
            text = torch.cat([text, choice])
        return bytes(text.tolist()).decode(errors="replace")


def losses_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each byte of a batch, in nats."""
    device = pydist.device()  # pydist: this process's own GPU; the CPU where there is none
    logits = model(inputs.to(device)).flatten(0, 1)
    return F.cross_entropy(logits, targets.to(device).flatten(), reduction="none")


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay, but neither biases nor normalisations."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Rises linearly over the warm-up, then falls to a tenth along a cosine."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, steps - settings.warmup)
    return settings.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# -- files


def write_whole(path: Path, write: Any) -> None:
    """Replaces a file in one step: whatever happens, the old or the new one is there, complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def restore(
    path: Path,
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: pydist.PreparedLoader[Any],
) -> list[float]:
    """Loads a checkpoint, on every process; returns the losses up to there."""
    if not path.exists():
        raise SystemExit(f"--resume: there is no {path}; run without --resume first")
    saved = pydist.load(path, random=False)
    now = dataclasses.asdict(settings)
    different = [
        f"{name}={now[name]} (there: {value})"
        for name, value in saved["settings"].items()
        if now[name] != value
    ]
    if different:
        raise SystemExit(f"--resume: {path} was made with other settings: {', '.join(different)}")
    # pydist: whatever number of processes wrote it
    pydist.load(path, model=model, optimizer=optimizer, sampler=loader)
    losses: list[float] = saved["losses"]
    return losses


def draw_losses(path: Path, losses: list[float], validation: float) -> None:
    """Draws the loss over the steps, with a running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    smooth = list(itertools.accumulate(losses, lambda mean, loss: 0.95 * mean + 0.05 * loss))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(losses, alpha=0.3, label="training, each step")
    axes.plot(smooth, label="training, running mean")
    axes.axhline(validation, linestyle="--", color="gray", label=f"held out: {validation:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))


# -- the run


class Display:
    """A progress bar on a terminal, a line now and then elsewhere; silent but on rank 0."""

    def __init__(self, first_step: int, steps: int, tokens_per_step: int) -> None:
        self.console = Console(quiet=pydist.rank() != 0)
        self.first_step = first_step
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.begin_s = time.perf_counter()
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss [bold]{task.fields[loss]:.3f}[/]"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("waiting for communication {task.fields[waiting]:.1%}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal or pydist.rank() != 0,
        )
        self.task = self.progress.add_task(
            "", total=steps, completed=first_step, loss=math.nan, speed=0.0, waiting=0.0
        )

    def update(self, step: int, loss: float, exposed_s: float) -> None:
        elapsed_s = time.perf_counter() - self.begin_s
        speed = (step - self.first_step) * self.tokens_per_step / elapsed_s
        waiting = exposed_s / elapsed_s
        self.progress.update(self.task, completed=step, loss=loss, speed=speed, waiting=waiting)
        if self.progress.disable and (step % max(1, self.steps // 20) == 0 or step == self.steps):
            self.console.print(
                f"step {step}/{self.steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
                f"waiting for communication {waiting:.1%}",
                highlight=False,
            )


def train(arguments: argparse.Namespace, settings: Settings) -> None:
    pydist.init()  # pydist: joins the job that the launcher describes; without one, a job of one
    rank = pydist.rank()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // pydist.local_world_size()))
    torch.manual_seed(settings.seed)
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)

    text = read_text()
    held_out = len(text) // 20
    training = Sequences(text[:-held_out], settings.context)
    whole = DataLoader(training, settings.batch, shuffle=True, drop_last=True)
    # pydist: each process gets its share of every batch
    loader = pydist.prepare(whole, seed=settings.seed, split_batches=True)
    # pydist: averages the gradients of all processes
    model = pydist.DataParallel(GPT(settings).to(pydist.device()))
    optimizer = optimizer_for(model, settings.lr)
    losses: list[float] = []
    if arguments.resume:
        losses = restore(output / "checkpoint", settings, model, optimizer, loader)
    first_step = len(losses)
    last_step = min(arguments.steps, arguments.stop_at or arguments.steps)

    def checkpoint() -> None:
        # pydist: the processes share out the writing
        pydist.save(
            output / "checkpoint",
            model=model,
            optimizer=optimizer,
            sampler=loader,
            extra={"settings": dataclasses.asdict(settings), "losses": losses},
        )

    display = Display(first_step, arguments.steps, settings.batch * settings.context)
    display.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text, "
        f"{pydist.world_size()} process(es), backend {pydist.backend()}",
        highlight=False,
    )
    model.reset_stats()
    batches = endless(loader)
    with display.progress:
        for step in range(first_step, last_step):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, arguments.steps, settings)
            losses_here = losses_of(model, *next(batches))
            optimizer.zero_grad()
            # pydist: a process may have a sequence less than another, which weighs less then
            with model.weighted(len(losses_here)):
                losses_here.mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(pydist.metrics.mean(losses_here))  # pydist: over all processes' bytes
            display.update(step + 1, losses[-1], model.stats().exposed_s)
            if (step + 1) % arguments.checkpoint_every == 0:
                checkpoint()
    checkpoint()
    # pydist: the processes share out the held-out text, and all get the same result
    held_out_rows = Sequences(text[-held_out:], settings.context)
    few = Subset(held_out_rows, range(min(256, len(held_out_rows))))
    validation = pydist.evaluate(model, few, measure, batch_size=16)["loss"]
    if rank == 0:  # pydist: forward talks to nobody, so one process may generate alone
        report(model, settings, losses, validation, output, arguments, display.console)
    pydist.shutdown()


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """The loss of each byte."""
    return {"loss": losses_of(model, *batch)}


def report(
    model: nn.Module,
    settings: Settings,
    losses: list[float],
    validation: float,
    output: Path,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Writes a sample, the losses and their curve."""
    model.eval()
    sample = model.generate(b"def ", arguments.sample_bytes, 0.7, settings.seed)
    write_whole(output / "sample.txt", lambda file: file.write(sample.encode()))
    content = json.dumps({"losses": losses, "validation": validation}).encode()
    write_whole(output / "losses.json", lambda file: file.write(content))
    draw_losses(output / "loss.png", losses, validation)
    console.rule("a sample")
    console.print(sample, markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(
        f"loss on held-out text {validation:.3f} nats per byte; "
        f"checkpoint, sample and loss curve are in {output}/",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="length of the whole run")
    parser.add_argument("--stop-at", type=int, help="stop after this step, as if interrupted")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", default="runs/gpt", help="folder for all that is written")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--sample-bytes", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="sequences over all processes")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Settings)]
    train(arguments, Settings(**{name: getattr(arguments, name) for name in names}))


if __name__ == "__main__":
    main()
