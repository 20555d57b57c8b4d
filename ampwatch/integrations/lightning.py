"""Lightning: a callback of its Trainer, for automatic and manual optimization.

trainer = Trainer(precision="16-mixed", callbacks=[ampwatch.integrations.lightning.Callback()])
"""

# ruff: noqa: ARG002 - the Trainer calls its hooks with all of these

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import callbacks
except ImportError:  # the same under its older name
    from pytorch_lightning import callbacks

from ampwatch.recorder import log

from ._watch import watch_either


class Callback(callbacks.Callback):
    """Watches the scaler of the precision plugin, or the optimizers where it has none, and logs step, epoch and batch.

    Arguments:
        options: `run`, `project`, `server`, … as for `ampwatch.watch`.
    Synchronisation: none.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers have been built.

        Errors: SettingsError for an option that cannot be used.
        """
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        watch_either(scaler, trainer.optimizers, pl_module, **self._options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Lightning's own step number, which counts the steps of all optimizers."""
        log(step=trainer.global_step, epoch=trainer.current_epoch, batch_id=batch_idx)
