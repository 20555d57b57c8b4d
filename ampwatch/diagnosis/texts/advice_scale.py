"""Advice where the loss scale or the size of the gradients is at fault."""

from __future__ import annotations

from typing import Final

from ampwatch.diagnosis.findings import Advice

AFTER_UNSEEN: Final = "not known, since gradients that are all zero do not show how small they are"

SCALE: Final[dict[str, list[Advice]]] = {
    "divergence": [
        Advice(
            "Stop, and go back to a checkpoint from before {first}: later ones hold the diverged weights.",
        ),
        Advice(
            "Lower the learning rate or lengthen the warm-up, and clip the true norm. Clipping comes after unscale_.",
            "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), {clip})",
        ),
        Advice("Not a cure: another scale or a minimum of the scale. It falls because the gradients grow."),
    ],
    "divergence.rate": [
        Advice(
            "Start again with a learning rate well below the size of the weights, and a warm-up.",
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
        ),
        Advice(
            "Not a cure: clipping, which does not change the size of such an optimizer's steps; another scale; or float32, in "
            "which these weights are finite and as worthless."
        ),
    ],
    "no_updates.rate": [
        Advice(
            "Look at what sets it: a schedule that has run past its end, is stepped by the batch where it counts epochs, or "
            "multiplies an initial rate of 0; or an optimizer made with lr=0.",
            "print([group['lr'] for group in optimizer.param_groups])",
        ),
        Advice(
            "If nothing is to be learned here, as while statistics of a BatchNorm settle, leave the step out: it costs a pass "
            "over all weights, and momenta go on."
        ),
    ],
    "no_updates.zero": [
        Advice(
            "Look for the factor that is 0: a weight of the loss, a mask without a sample, an average over a count that "
            "float16 holds as inf (1 / 70000 is 0 there), an output that a clamp or a ReLU holds at its end.",
            "for name, p in model.named_parameters():\n    print(name, p.grad.abs().max())  # after backward()",
        ),
        Advice("Compute the loss in float32.", "loss = criterion(output.float(), target)"),
        Advice(
            "Not a cure: another loss scale. Nothing shows that these zeros are gradients too small for float16."
        ),
    ],
    "no_updates.scale": [
        Advice(
            "Give the scaler a scale again, and look at what made this one: an update(new_scale) of the loop's own, or the "
            "scaler's state in a checkpoint.",
            "scaler.update(2.0**16)",
        ),
    ],
    "no_updates": [
        Advice(
            "The loss is finite, yet its gradients overflow at a scale of 1 and below: look for a loss that is summed over "
            "many elements, and take the mean.",
            "loss = loss.mean()",
        ),
        Advice(
            "Look for the backward pass of one operation that makes inf or NaN: it names itself in anomaly mode, once the "
            "scale has come down.",
            "with torch.autograd.detect_anomaly():\n    loss.backward()",
        ),
        Advice(
            "Not a cure: a minimum of the scale, or replacing NaN by zero in a hook. The first skips for ever, the "
            "second hides the fault from the scaler."
        ),
    ],
    "scale_floor": [
        Advice(
            "Find what makes the gradients inf or NaN at any scale: it names itself in anomaly mode.",
            "with torch.autograd.detect_anomaly():\n    loss.backward()",
        ),
        Advice("Take the minimum of the scale away: it hides the fault, and every step is skipped at it."),
        Advice("If the loss is a sum over very many elements, take the mean.", "loss = loss.mean()"),
    ],
    "dead_zone": [
        Advice(
            "Stop now and mend what makes every attempt overflow; the scale is not the cause. Start again from the last "
            "checkpoint with a fresh scaler.",
            "scaler = ampwatch.GradScaler(device, model=model)",
        ),
        Advice(
            "Stop a job that skips for long by itself.",
            "if scaler.get_scale() < 2.0**-32:\n    raise RuntimeError('every step is skipped')",
        ),
    ],
    "underflow": [
        Advice(
            "Raise the loss scale by a factor of 2^{raise_log2}, to {target}. Estimated loss there: {after}; the largest "
            "float16 gradient stays {headroom} binades below overflow.",
            "scaler = ampwatch.GradScaler(device, init_scale=2.0**{target_log2}, model=model)",
        ),
        Advice(
            "Let the scale grow by itself (a growth_interval that is reached within the run): it finds the ceiling, at one "
            "skipped step each time it probes.",
        ),
        Advice(
            "Not a cure: a lower scale. Zeros mean that the scale is too small, never that it is too large."
        ),
    ],
    "underflow.all": [
        Advice(
            "Raise the loss scale: start at 65536 and let it adapt, which costs a few skipped steps at most.",
            "scaler = ampwatch.GradScaler(device, init_scale=2.0**16, model=model)",
        ),
        Advice(
            "If the gradients stay zero at 65536, the loss does not depend on the parameters there: look at the loss."
        ),
    ],
    "accumulation": [
        Advice(
            "Divide the loss of each micro-batch by the number of micro-batches in its window, the last window's own too.",
            "loss = model(micro_batch) / len(window)",
        ),
        Advice(
            "If it is meant to be a sum, look at the clip, which sees a gradient that many times as large, and where steps go "
            "with the gradient, as SGD's, at the learning rate."
        ),
    ],
    "narrow_range": [
        Advice(
            "Train in bfloat16, which has float32's range, and drop the scaler.",
            "with torch.autocast(device, dtype=torch.bfloat16): ...",
        ),
        Advice(
            "Or compute the layers at one end in float32: {high}, whose gradients are large, or {low}, whose are small.",
            "with torch.autocast(device, enabled=False):\n    y = layer(x.float())",
        ),
        Advice("Not a cure: another scale. A larger one overflows, a smaller one loses more."),
    ],
    "summed_loss": [
        Advice(
            "To have the usual scales back, take the mean instead of the sum; where steps go with the gradient, as SGD's, with "
            "a learning rate to match.",
            "loss = loss.mean()",
        ),
    ],
    "calibration": [
        Advice(
            "To save these attempts next time, start at the scale it settled at. A lower start shortens this burst and "
            "nothing else.",
            "scaler = ampwatch.GradScaler(device, init_scale=2.0**{settled_log2}, model=model)",
        )
    ],
}
