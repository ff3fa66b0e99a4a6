"""A script as users write it, for Transformers' own Trainer and for ours: prints its losses."""

import sys
import tempfile

from transformers import TrainingArguments
from transformers_runs import Lines, Records, language_model

if sys.argv[1] == "ours":
    import pydist
    from pydist.integrations.transformers import Trainer

    pydist.init()
else:
    from transformers import Trainer


def main(folder: str) -> None:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    records = Records()
    trainer = Trainer(language_model(), arguments, train_dataset=Lines(32), callbacks=[records])
    trainer.train()
    if trainer.is_world_process_zero():
        for loss in records.losses:
            print(f"loss {loss:.4f}")


with tempfile.TemporaryDirectory() as folder:
    main(folder)
