"""A fatal finding, on every way to be watched: said once in the job's own log, and a way for the job to stop."""

import pytest
import torch

import ampwatch

MOST = 3000  # steps, were nobody to stop
BROKEN = 5  # the step from which the loss is NaN


class Stop:
    """What a job gives as `on_finding`; false until it is called."""

    def __init__(self):
        self.kinds = []

    def __call__(self, finding):
        self.kinds.append(finding.kind)

    def __bool__(self):
        return bool(self.kinds)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Trains by a function of (stop, options of the watch); answers what was told, and how often it was logged."""
    monkeypatch.delenv("AMPWATCH_QUIET", raising=False)

    def told(train, capsys):
        stop = Stop()
        settings = ampwatch.Settings.load(environ={}, dir=tmp_path / "runs", flush_s=0.02)
        try:
            steps = train(stop, {"on_finding": stop, "settings": settings})
        finally:
            ampwatch.finish()
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ampwatch: fatal: ")]
        assert steps < MOST
        return stop.kinds, said

    return told


def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def loss_of(model, step):
    return model(torch.randn(16, 8)).square().mean() * (torch.nan if step >= BROKEN else 1.0)


def by_scaler(make):
    def train(stop, options):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = make(model=model, **options)
        for step in range(MOST):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            if stop:
                return step
        return MOST

    return train


def by_optimizer(stop, options):
    model = net()
    optimizer = ampwatch.watch_optimizer(torch.optim.AdamW(model.parameters()), model=model, **options)
    for step in range(MOST):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if stop:
            return step
    return MOST


def by_accelerate(stop, options):
    accelerate = pytest.importorskip("accelerate")
    from ampwatch.integrations.accelerate import watch

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    watch(accelerator, model, **options)
    for step in range(MOST):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, step))
        optimizer.step()
        if stop:
            return step
    return MOST


def by_transformers(stop, options):
    transformers = pytest.importorskip("transformers")
    from ampwatch.integrations.transformers import Callback

    class Broken(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            return loss_of(model, self.state.global_step)

    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = bool(stop)

    arguments = transformers.TrainingArguments(
        "out", use_cpu=True, fp16=True, max_steps=MOST, save_strategy="no", report_to="none", logging_strategy="no",
        dataloader_pin_memory=False, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    callbacks = [Callback(**options), Stopping()]
    trainer = Broken(net(), arguments, train_dataset=[{"x": 0}] * 8, callbacks=callbacks)
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu")
    trainer.train()
    return trainer.state.global_step


def by_lightning(stop, options):
    pytorch = pytest.importorskip("lightning.pytorch")
    from ampwatch.integrations.lightning import Callback

    class Broken(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            self.trainer.should_stop = bool(stop)
            return loss_of(self.net, index)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pytorch.Trainer(accelerator="cpu", max_epochs=1, callbacks=[Callback(**options)], **quiet)
    trainer.fit(Broken(), torch.utils.data.DataLoader(torch.zeros(MOST, 1)))
    return trainer.global_step


WAYS = {
    "GradScaler": by_scaler(lambda **options: ampwatch.GradScaler("cpu", **options)),
    "watch": by_scaler(lambda **options: ampwatch.watch(torch.amp.GradScaler("cpu"), **options)),
    "watch_optimizer": by_optimizer,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
    "lightning": by_lightning,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fatal_finding_is_said_once_and_stops_the_job(way, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kinds, said = told(WAYS[way], capsys)
    without_scaler = way in ("watch_optimizer", "lightning")
    assert kinds[0] in (["weights_poisoned"] if without_scaler else ["nonfinite_forward", "dead_zone"])
    assert len(kinds) == len(set(kinds)) >= len(said) == len(set(said)) >= 1
