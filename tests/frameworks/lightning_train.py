"""A small training with Lightning on two processes, which Lightning starts: ``lightning_train.py BACKEND``."""

from __future__ import annotations

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy


class Model(lightning.LightningModule):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(1)
inputs = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, 8))
if trainer.global_rank == 0:
    print("backend", torch.distributed.get_backend())
    print("loss", f"{trainer.callback_metrics['loss'].item():.6f}")
