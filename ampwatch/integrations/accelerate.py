"""Accelerate: what `Accelerator.prepare` has built is watched in place.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
ampwatch.integrations.accelerate.watch(accelerator, model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ._watch import watch_either

if TYPE_CHECKING:
    from accelerate import Accelerator


def watch(accelerator: Accelerator, model: nn.Module | None = None, **options: Any) -> Accelerator:
    """Watch the accelerator's scaler, or its optimizers where it has none (bfloat16, float32).

    Whether a step was skipped is read from the gradients. `optimizer.step_was_skipped` is not: Accelerate sees whether
    `step()` was called, and a fused optimizer is called for a skipped step as well.

    Arguments:
        accelerator: that has prepared its optimizers.
        model: prepared or not; names the tensors in the records.
        options: `run`, `project`, `server`, … as for `ampwatch.watch`.
    Returns: the accelerator.
    Errors: ValueError where it has neither a scaler nor optimizers yet; SettingsError.
    Synchronisation: none.
    """
    if accelerator.scaler is None and not accelerator._optimizers:
        raise ValueError(
            "the accelerator has neither a scaler nor an optimizer: call prepare() before watch()"
        )
    inner = None if model is None else accelerator.unwrap_model(model)
    watch_either(accelerator.scaler, accelerator._optimizers, inner, **options)
    return accelerator
