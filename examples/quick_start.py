"""The quick start: a float16 training loop on the CPU, watched. Records go to ./ampwatch_runs."""

import torch

import ampwatch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = ampwatch.GradScaler("cpu", model=model)  # instead of torch.amp.GradScaler("cpu")

for _ in range(100):
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
