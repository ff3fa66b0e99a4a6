"""Trainings of both Lightning packages, which tests run on ranks and compare."""

import importlib
import warnings
from typing import Any

import torch
import toy_training as toy
from torch import Tensor, nn
from torch.utils.data import DataLoader

# What torchrun tells Lightning, beside what launch.py sets.
TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}


def trainer_of(package: str, strategy: str, devices: Any, **settings: Any) -> Any:
    """A quiet Trainer on the CPU.

    Args:
        package: `lightning` or `pytorch_lightning`.
        strategy: `ddp`, or one of pydist's.
        devices: The number of ranks, or "auto".
        **settings: Of the Trainer.
    """
    warnings.simplefilter("ignore")
    importlib.import_module("pydist.integrations.lightning")
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    settings = {**defaults, **settings}
    return tree_of(package).Trainer(
        devices=devices,
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def fabric_of(package: str, strategy: str, devices: int = 2) -> Any:
    """A Fabric on the CPU that has launched.

    Args:
        package: `lightning` or `lightning_fabric`.
        strategy: `ddp`, or one of pydist's.
        devices: The number of ranks.
    """
    importlib.import_module("pydist.integrations.lightning")
    tree = importlib.import_module("lightning.fabric" if package == "lightning" else package)
    fabric = tree.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    return fabric


def two_processors() -> Any:
    """An accelerator that finds two devices: Lightning's own for the CPU always finds one."""

    class TwoProcessors(tree_of("lightning").accelerators.CPUAccelerator):  # type: ignore[misc]
        @staticmethod
        def auto_device_count() -> int:
            return 2

    return TwoProcessors()


def tree_of(package: str) -> Any:
    """The module that has Trainer and LightningModule."""
    return importlib.import_module("lightning.pytorch" if package == "lightning" else package)


def regression(
    package: str, length: int, batch_size: int, *, shuffle: bool = False, num_workers: int = 0
) -> Any:
    """A LightningModule that takes down its losses, and the numbers of the samples it got."""

    class Regression(tree_of(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = toy.network()
            self.losses: list[float] = []
            self.seen: list[list[int]] = []
            self.seen_outside: list[int] = []

        def training_step(self, batch: Any, step: int) -> Tensor:
            numbers, inputs, targets = batch
            loss = nn.functional.mse_loss(self.network(inputs), targets)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.losses.append(loss.item())
            self.seen.append(numbers.tolist())
            return loss

        def validation_step(self, batch: Any, step: int) -> None:
            numbers, inputs, targets = batch
            loss = nn.functional.mse_loss(self.network(inputs), targets)
            self.log("val_loss", loss, sync_dist=True, batch_size=len(numbers))
            self.seen_outside += numbers.tolist()

        test_step = validation_step

        def predict_step(self, batch: Any, step: int) -> Tensor:
            numbers, inputs, _ = batch
            return torch.cat([numbers[:, None], self.network(inputs)], dim=1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

        def train_dataloader(self) -> Any:
            return DataLoader(
                toy.Points(length), batch_size, shuffle=shuffle, num_workers=num_workers
            )

        def val_dataloader(self) -> Any:
            return DataLoader(toy.Points(length), batch_size)

        test_dataloader = val_dataloader

        def predict_dataloader(self) -> Any:
            # Lightning can't make such a loader anew if its batch size is given by position.
            return DataLoader(toy.Points(length), batch_size=batch_size)

    return Regression()


def plain(value: Any) -> Any:
    """Tensors as lists: what ranks return, and what is compared to the last digit."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def saving_at(package: str, step: int, path: str) -> Any:
    """A callback that saves a checkpoint after a step."""

    class SavesAmidEpoch(tree_of(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(path)

    return SavesAmidEpoch()


@toy.leaving()
def gan(strategy: str) -> Any:
    """Lightning's GAN tutorial in small: two optimizers by hand, each for a part of the model."""
    trainer = trainer_of("lightning", strategy, 2, max_epochs=2)

    class Gan(tree_of("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(5)
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
            self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
            self.losses: list[float] = []

        def judged(self, samples: Tensor, word: float) -> Tensor:
            verdict = self.discriminator(samples)
            return nn.functional.binary_cross_entropy_with_logits(
                verdict, torch.full_like(verdict, word)
            )

        def training_step(self, batch: Any, step: int) -> None:
            numbers, real, _ = batch
            noise = torch.stack([torch.sin(numbers * k) for k in (1.0, 2.0, 3.0, 4.0)], dim=1)
            of_generator, of_discriminator = self.optimizers()
            self.toggle_optimizer(of_generator)
            loss = self.judged(self.generator(noise), 1.0)
            self.manual_backward(loss)
            of_generator.step()
            of_generator.zero_grad()
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_discriminator)
            fake = self.generator(noise).detach()
            other = (self.judged(real, 1.0) + self.judged(fake, 0.0)) / 2
            self.manual_backward(other)
            of_discriminator.step()
            of_discriminator.zero_grad()
            self.untoggle_optimizer(of_discriminator)
            self.losses += [loss.item(), other.item()]

        def configure_optimizers(self) -> Any:
            return (
                torch.optim.Adam(self.generator.parameters(), lr=0.02),
                torch.optim.Adam(self.discriminator.parameters(), lr=0.02),
            )

        def train_dataloader(self) -> Any:
            return DataLoader(toy.Points(24), 3)

    model = Gan()
    trainer.fit(model)
    return model.losses, plain(model.state_dict())
