"""Transformers: a callback of its Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ampwatch.integrations.transformers.Callback()])
"""

# ruff: noqa: ARG002 - the Trainer calls its hooks with all of these

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ampwatch.recorder import log

from ._watch import watch_either


class Callback(TrainerCallback):
    """Watches the scaler of a Trainer, or its optimizer where it has none, and logs its steps and epochs.

    Arguments:
        options: `run`, `project`, `server`, … as for `ampwatch.watch`.
    Synchronisation: none.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """The optimizer has been prepared by Accelerate, which leaves its scaler there.

        Errors: SettingsError for an option that cannot be used.
        """
        watch_either(getattr(optimizer, "scaler", None), [optimizer], model, **self._options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer's own step number, which counts skipped steps too."""
        log(step=state.global_step, epoch=state.epoch)
