"""A training job that is killed and begun again: float16, a loss scaler, overflows of its own, a checkpoint every few steps.

Prints `ready` after its first step. What the server acknowledges is noted in a file, a line each, before the client
hears of it.
"""

import gzip
import hashlib
import os
import pickle
import time
from pathlib import Path

import httpx
import torch

from ampwatch import GradScaler, records  # all that a job loads is loaded before any is forked
from ampwatch.recorder import Recorder

torch.set_num_threads(1)
CHECKPOINT_EVERY = 10
PAUSE_S = 0.01  # a step, so that there is time to be killed in


class Noting(httpx.BaseTransport):
    """The network, and a note of each batch that a server has acknowledged."""

    def __init__(self, path):
        self._network = httpx.HTTPTransport()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle_request(self, request):
        batch = records.from_bytes(gzip.decompress(request.read()))
        response = self._network.handle_request(request)
        if response.status_code == 200:
            os.write(self._fd, f"{batch.producer} {batch.seq} {batch.digest}\n".encode())
        return response


def scaler_of(model, recorder):
    how = {"init_scale": 2.0**14, "growth_interval": 20}
    if recorder is None:
        return torch.amp.GradScaler("cpu", **how)
    return GradScaler("cpu", model=model, recorder=recorder, **how)


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    size = 300.0 if step % 40 == 7 else 1.0  # overflows in the backward pass
    return size * torch.randn(8, 16, generator=generator)


def train(steps, checkpoint, acknowledged=""):
    """Train from the checkpoint, if there is one, to `steps`; the digest of the weights and the scale.

    Arguments:
        acknowledged: the file of notes; without one the scaler is PyTorch's, and nothing is recorded.
    """
    torch.manual_seed(0)
    checkpoint = Path(checkpoint)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recorder = Recorder(http=Noting(acknowledged)) if acknowledged else None
    scaler = scaler_of(model, recorder)
    parts, first = (model, optimizer, scaler), 0
    if checkpoint.exists():
        first, states = pickle.loads(checkpoint.read_bytes())
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    for step in range(first, steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch_of(step)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if (step + 1) % CHECKPOINT_EVERY == 0:
            new = checkpoint.with_suffix(".new")
            new.write_bytes(pickle.dumps((step + 1, [part.state_dict() for part in parts])))
            new.replace(checkpoint)
        if step == first:
            print("ready", flush=True)
        time.sleep(PAUSE_S)
    if recorder is not None:
        recorder.finish()
    return digest(model, scaler)


def digest(model, scaler):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights + repr(scaler.get_scale()).encode()).hexdigest()
