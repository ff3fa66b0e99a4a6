"""Trainings with Transformers' Trainer, which tests run on ranks and compare."""

import warnings
from typing import Any

import torch
from accelerate_runs import leaving
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import pydist


class Lines(Dataset[dict[str, Tensor]]):
    """Lines of tokens with 2 to 8 labels each. Remembers which lines were asked for."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(0, 16, (length, 8), generator=generator)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        tokens = self._tokens[index]
        seen = torch.arange(8) < 2 + index % 7
        return {"input_ids": tokens, "labels": tokens.where(seen, torch.tensor(-100))}


def language_model() -> nn.Module:
    """Takes num_items_in_batch; has no dropout."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))


class Tagger(nn.Module):
    """Tells each token's label; its loss is a mean, and it knows of no other items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores}


class Records(TrainerCallback):  # type: ignore[misc]
    """Takes down the losses that are logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


# Arguments of the Trainer, among settings; the others are those of TrainingArguments.
TRAINERS_OWN = ("optimizers", "sharded", "master_weights", "model_init")


def trainer_of(
    whose: str, model: nn.Module | None, folder: str, records: Records, **settings: Any
) -> Any:
    """A quiet Trainer on the CPU.

    Args:
        whose: `ours`, `stage 1` or `stage 2`, `stock`, or `stock on pydist`, which joins a group of
            pydist's.
        model: To train; None with `model_init`.
        folder: For what is saved.
        records: Takes down the losses.
        **settings: Of the Trainer, where it has such arguments, and of TrainingArguments; or
            `length`, in lines, of the data.
    """
    warnings.simplefilter("ignore")
    if whose == "stock on pydist":
        pydist.init()
    length = settings.pop("length", 32)
    given = {name: settings.pop(name) for name in TRAINERS_OWN if name in settings}
    if whose.startswith("stage"):
        given["sharded"] = int(whose[-1])
    settings = {
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        "dataloader_pin_memory": False,
        **settings,
    }
    arguments = TrainingArguments(folder, **settings)
    if whose.startswith("stock"):
        from transformers import Trainer
    else:
        from pydist.integrations.transformers import Trainer
    return Trainer(
        model,
        arguments,
        train_dataset=Lines(length),
        eval_dataset=Lines(8),
        callbacks=[records],
        **given,
    )


@leaving()
def trained(whose: str, kind: str, folder: str, settings: dict[str, Any], resume: Any) -> Any:
    """The losses of all steps, the weights, the wrapper's module, and this rank's lines."""
    model = Tagger() if kind == "tagger" else language_model()
    if kind == "language in bf16":
        model.bfloat16()
    records = Records()
    trainer = trainer_of(whose, model, folder, records, **settings)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    wrapper = type(trainer.model_wrapped).__module__
    return records.losses, weights, wrapper, trainer.train_dataset.asked
