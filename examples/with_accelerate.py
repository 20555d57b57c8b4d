"""A plain loop of Accelerate in float16, watched. Records go to ./ampwatch_runs."""

import torch
from accelerate import Accelerator

from ampwatch.integrations.accelerate import watch

accelerator = Accelerator(mixed_precision="fp16")
if accelerator.device.type == "cpu":  # for a CPU Accelerate makes no scaler, though torch has one
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
watch(accelerator, model)

for _ in range(50):
    x = 20 * torch.randn(64, 16, device=accelerator.device)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
