"""Lightning, automatic and manual, with the callback and without: the same bits."""

import pytest
import torch
from recorded import MemoryRecorder

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision

from ampwatch.integrations.lightning import Callback

STEPS = 12
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Automatic(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def loss(self, x):
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, _):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Automatic):
    automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Theirs(torch.amp.GradScaler):
    """A scaler of somebody's own."""

    updates = 0

    def update(self, new_scale=None):
        self.updates += 1
        super().update(new_scale)


def train(recorder=None, *, module=Automatic, fp16=False, scaler=None, **arguments):
    seed_everything(0, verbose=False)
    model = module()
    if fp16:
        scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**22)
        arguments["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    callbacks = [] if recorder is None else [Callback(recorder=recorder)]
    batches = STEPS * arguments.get("accumulate_grad_batches", 1)
    loader = torch.utils.data.DataLoader(torch.randn(batches * 32, 16), batch_size=32)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **QUIET, **arguments)
    trainer.fit(model, loader)
    return model.state_dict(), trainer.optimizers[0].state_dict(), scaler and scaler.state_dict()


LOOPS = [
    {"fp16": True},
    {"fp16": True, "module": Manual},
    {"fp16": True, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-mixed", "module": Manual},
    {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: "-".join(loop) + loop.get("precision", ""))
def test_it_trains_to_the_same_bits(loop):
    recorder = MemoryRecorder()
    ours, theirs = train(recorder, **loop), train(**loop)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert recorder.column("attempt") == list(range(STEPS))
    assert (sum(recorder.column("skipped")) > 0) == ("fp16" in loop)
    assert recorder.events("fault", "call_fault") == []
    assert recorder.data("tensors")[0]["tensors"][0]["name"] == "net.0.weight"


def test_the_closures_loss_is_the_steps():
    recorder = MemoryRecorder()
    train(recorder, precision="bf16-mixed")
    assert recorder.column("losses") == [1] * STEPS
    assert recorder.column("loss")[0] > recorder.column("loss")[-1] > 0


def test_a_scaler_of_its_own_class_with_a_method_of_its_own_stays_what_it_is():
    theirs, given = Theirs("cpu", init_scale=2.0**22), []
    method = theirs._unscale_grads_

    def patched(*arguments):
        given.append(len(arguments))
        return method(*arguments)

    theirs._unscale_grads_ = patched
    recorder = MemoryRecorder()
    train(recorder, fp16=True, scaler=theirs)
    assert type(theirs).__name__ == "Theirs"
    assert isinstance(theirs, Theirs)
    assert theirs._unscale_grads_ is patched
    assert (theirs.updates, given) == (STEPS, [4] * STEPS)
    assert recorder.column("attempt") == list(range(STEPS))
