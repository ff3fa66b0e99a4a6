"""A script as users write it, for Accelerate's own Accelerator and for ours: prints its losses."""

import sys

import torch
import toy_training as toy
from torch import nn
from torch.utils.data import DataLoader

if sys.argv[1] == "ours":
    from pydist.integrations.accelerate import Accelerator
else:
    from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = toy.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(toy.Points(24), batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for _, inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean():.9g}")
    accelerator.end_training()


main()
