"""A Trainer of Lightning in float16, watched by a callback. Records go to ./ampwatch_runs."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from ampwatch.integrations.lightning import Callback


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, _):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


device = "cuda" if torch.cuda.is_available() else "cpu"
precision = MixedPrecision("16-mixed", device)  # on a GPU Trainer(precision="16-mixed") makes the same
loader = torch.utils.data.DataLoader(20 * torch.randn(50 * 64, 16), batch_size=64)
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = Trainer(accelerator=device, plugins=[precision], max_epochs=1, callbacks=[Callback()], **quiet)
trainer.fit(Regression(), loader)
