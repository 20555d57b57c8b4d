"""The catalogue of everything the diagnosis says: headlines, evidence, advice. Read by people at 3 a.m.

Headlines are one sentence: what, since which step, whether it recovers by itself. Advice is in order of
preference. Nothing here repeats the folk rules that docs/numerics.md, section 6, shows to be wrong.
"""

from __future__ import annotations

import math
from typing import Final

from .facts import Moment
from .findings import Advice

HEALTHY: Final = "Healthy: {taken} steps taken, {skipped} skipped{why}; loss scale {scale}."
NO_DATA: Final = "No attempts recorded yet."

# placeholders are filled by the rule that says the sentence; `{first}` is a step, with the attempt where it differs

HEADLINES: Final = {
    "calibration.open": (
        "The loss scale is still coming down to what these gradients allow: {skips} since {first}, scale "
        "now {scale}. It ends by itself at the first step taken."
    ),
    "calibration": (
        "The loss scale came down from {scale_first} to {scale} in {skips}, {first} to {last}. Healthy, "
        "nothing to do."
    ),
    "growth_probe": (
        "{skips} at the ceiling of the loss scale, {first} to {last}, {share} of all: as many as loss scaling costs. "
        "Healthy, nothing to do."
    ),
    "spike": (
        "{skips} at a lower loss scale than usual, since {first}, with a finite loss: gradients were for a "
        "moment larger than before. {recovery}"
    ),
    "bad_batch": (
        "The loss was {loss} at {first}, for one attempt only. The step was skipped, so the weights are "
        "unharmed; {recovery}"
    ),
    "nonfinite_forward": "The loss is not finite since {first}{where}. {recovery}",
    "forward_overflow": (
        "Values inside {module} exceed float16 (65504) in the forward pass since {first}. {recovery}"
    ),
    "divergence": (
        "Training diverges since {first}: loss {loss_ratio} × and gradient norm {norm_ratio} × what they were. {recovery}"
    ),
    "divergence.early": (
        "Loss and gradient norm grow together since {first}: {loss_ratio} × and {norm_ratio} × what they were. If it "
        "goes on, training diverges; nothing is lost yet."
    ),
    "no_updates": (
        "Nothing has been learned since {first}: {skips} in a row, loss scale down to {scale}. It does not "
        "recover by itself."
    ),
    "underflow": (
        "Gradients underflow since {first}: {share} of the elements computed in float16 are lost{bound}, most in "
        "{tensor}. {recovery}"
    ),
    "underflow.all": (
        "Every gradient is exactly zero since {first} although the loss is not, at loss scale {scale}: they "
        "underflow. {recovery}"
    ),
    "useless_scaler": (
        "A GradScaler runs with {dtype} autocast, where it protects nothing. Training is not harmed, but every "
        "step pays a pass over the gradients."
    ),
    "useless_scaler.growths": (
        "The loss scale grew {growths} times without one overflow and the gradients are bfloat16: the GradScaler "
        "protects nothing."
    ),
    "call_order": "The training loop calls the scaler in a wrong order since {first}: {fault}. {raised}",
    "scaler_bypassed": "The training loop goes past the scaler since {first}: {fault}. {raised}",
}

RECOVERY: Final = {
    "never": "It does not recover by itself: every step since then is skipped and nothing is learned.",
    "recovered": "It recovered at {closed}.",
    "unknown": "Another attempt will tell whether it recovers.",
    "went on": "training went on at {closed}.",
    "open": "whether it recovers the next attempt will tell.",
    "diverged": "It does not recover by itself: stop and go back to a checkpoint from before {first}.",
    "fixed": "It does not recover by itself: the scale does not grow.",
    "grows": "The scale grows by itself, but needs about {attempts} clean attempts to get there.",
}

FAULTS: Final = {
    "unscale_twice": "unscale_() was called twice for {optimizer} before update()",
    "unscale_after_step": "unscale_() was called for {optimizer} after its step()",
    "step_twice": "step() was called twice for {optimizer} before update()",
    "update_without_step": "update() was called although no optimizer was stepped or unscaled",
    "step_without_scale": "step() was called for {optimizer} although no loss went through scale()",
    "unscale_in_accumulation": "unscale_() is called inside an accumulation window, so that {optimizer} adds scaled gradients to unscaled ones",
    "update_in_accumulation": "update() is called inside an accumulation window, so that gradients of two scales may be added",
    "step_outside_scaler": "{optimizer} is stepped directly, with gradients that are still scaled",
    "missing_update": "update() is missing after step() of {optimizer}, so that the scale never adapts",
    "closure": "step() of {optimizer} was given a closure, which GradScaler does not support",
}

RAISED: Final = {
    True: "torch refuses it with an error.",
    False: "torch does not complain, and it goes on until the loop is mended.",
}

_LOOP: Final = """\
optimizer.zero_grad()
for micro_batch in window:                        # one, without accumulation
    with torch.autocast(device, dtype=torch.float16):
        loss = model(micro_batch) / len(window)
    scaler.scale(loss).backward()
scaler.unscale_(optimizer)                        # only to clip, once, after the last backward
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()                                   # once, after every optimizer's step, also if you skip step"""

CALLS: Final = [
    Advice(
        "Call scale → backward → (unscale_ → clip) → step → update, each once for each update of the weights.",
        _LOOP,
    )
]

_SCORES: Final = """\
with torch.autocast(x.device.type, enabled=False):           # this block in float32
    scores = (q.float() * d ** -0.5) @ k.float().transpose(-2, -1)
weights = scores.masked_fill(mask, -torch.inf).softmax(-1).to(v.dtype)"""

FORWARD_OVERFLOW: Final = [
    Advice(
        "Compute what overflows in {module} in float32. In attention these are the scores: float32 for the product, "
        "with q scaled before it. This changes only the range, not the model.",
        _SCORES,
    ),
    Advice(
        "Or train in bfloat16, which has float32's range, and drop the scaler. It has 3 bits of precision less.",
        "with torch.autocast(device, dtype=torch.bfloat16): ...",
    ),
    Advice(
        "Look at why the values grew: weights, learning rate, a missing normalisation before {module}. Weights taken "
        "from a bfloat16 model may need values above 65504."
    ),
    Advice(
        "Not a cure: a lower loss scale, a forced minimum of the scale, or gradient clipping. The forward pass does "
        "not see the scale, and clipping an infinite norm gives zeros or NaN."
    ),
]

NONFINITE_FORWARD: Final = [
    Advice(
        "Find the first module whose output is not finite: watch the model with the scaler, and the next attempt "
        "names it.",
        "scaler = ampwatch.GradScaler(device, model=model)",
    ),
    Advice(
        "Run the same batch in float32: if the loss is finite there, the range of float16 is the cause.",
        "with torch.autocast(device, enabled=False):\n    print(model(batch))",
    ),
    Advice("Not a cure: a lower loss scale. The loss is not finite before it is scaled."),
]

BAD_INPUTS: Final = [
    Advice(
        "The batch itself holds inf or NaN: mend the data, or drop such samples before the forward pass.",
        "assert torch.isfinite(batch).all()",
    )
]

LOSS_ITSELF: Final = [
    Advice(
        "Every output of the model is finite, so the loss makes inf or NaN itself: compute it in float32, from "
        "logits, with functions that are stable there.",
        "loss = torch.nn.functional.cross_entropy(logits.float(), target)",
    )
]

POISONED: Final = [
    Advice(
        "Parameters are not finite any more: no scale and no batch mends that. Go back to the last checkpoint "
        "from before the loss broke.",
    )
]

BAD_BATCH: Final = [
    Advice(
        "If it comes again, log which batch it was; the same batch twice proves that the data is the cause.",
        "ampwatch.log(batch_id=index)",
    )
]

DIVERGENCE: Final = [
    Advice(
        "Stop, and go back to a checkpoint from before {first}: later ones hold the diverged weights.",
    ),
    Advice(
        "Lower the learning rate or lengthen the warm-up, and clip the true norm. Clipping comes after unscale_.",
        "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), {clip})",
    ),
    Advice("Not a cure: another scale or a minimum of the scale. It falls because the gradients grow."),
]

NO_UPDATES: Final = [
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
]

UNDERFLOW: Final = [
    Advice(
        "Raise the loss scale by 2^{raise_log2}, to {target}. Estimated loss there: {after}; the largest "
        "float16 gradient stays {headroom} binades below overflow.",
        "scaler = ampwatch.GradScaler(device, init_scale=2.0**{target_log2}, model=model)",
    ),
    Advice(
        "Let the scale grow by itself (a growth_interval that is reached within the run): it finds the ceiling, at one "
        "skipped step each time it probes.",
    ),
    Advice("Not a cure: a lower scale. Zeros mean that the scale is too small, never that it is too large."),
]

AFTER_UNSEEN: Final = "not known, since gradients that are all zero do not show how small they are"

UNDERFLOW_ALL: Final = [
    Advice(
        "Raise the loss scale: start at 65536 and let it adapt, which costs a few skipped steps at most.",
        "scaler = ampwatch.GradScaler(device, init_scale=2.0**16, model=model)",
    ),
    Advice(
        "If the gradients stay zero at 65536, the loss does not depend on the parameters there: look at the loss."
    ),
]

USELESS_SCALER: Final = [
    Advice(
        "Enable the scaler with float16 autocast only. {dtype} has float32's range and needs none.",
        "scaler = ampwatch.GradScaler(device, enabled=dtype is torch.float16, model=model)",
    ),
    Advice(
        "If you kept it to skip steps that are not finite: it does, and thereby hides the fault those skips are."
    ),
]

CALIBRATION: Final = [
    Advice(
        "To save these attempts next time, start at the scale it settled at. A lower start shortens this burst and "
        "nothing else.",
        "scaler = ampwatch.GradScaler(device, init_scale=2.0**{settled_log2}, model=model)",
    )
]


def at(moment: Moment) -> str:
    """`step 120`, and the attempt beside it where they differ."""
    return at_step(moment.step, moment.attempt)


def at_step(step: int, attempt: int) -> str:
    """The same from the two numbers; a step that is not known is -1."""
    if step < 0:
        return f"attempt {attempt}"
    return f"step {step}" + ("" if step == attempt else f" (attempt {attempt})")


def power(scale: float) -> str:
    """A loss scale for the eye: a power of two as `2^16`, anything else by four digits."""
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:.4g}"


def module(name: str) -> str:
    """A module's name for a sentence; the root module is the model, and a bare number is said to be a module."""
    if not name:
        return "the model"
    return name if any(map(str.isalpha, name)) else f"module {name}"


def percent(share: float) -> str:
    """A share as a percentage, with two significant digits."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def skipped(count: int) -> str:
    """`1 skipped attempt`, `3 skipped attempts`."""
    return times(count, "skipped attempt")


def times(count: int, thing: str = "attempt") -> str:
    """`1 attempt`, `3 attempts`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def fill(advice: list[Advice], **values: object) -> list[Advice]:
    """Advice with its placeholders filled in."""
    named = {key: str(value) for key, value in values.items()}
    return [Advice(_put(a.text, named), _put(a.code, named)) for a in advice]


def _put(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
