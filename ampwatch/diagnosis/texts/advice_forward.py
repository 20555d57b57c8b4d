"""Advice where the forward pass, the data or the weights are at fault."""

from __future__ import annotations

from typing import Final

from ampwatch.diagnosis.findings import Advice

_SCORES: Final = """\
with torch.autocast(x.device.type, enabled=False):           # this block in float32
    scores = (q.float() * d ** -0.5) @ k.float().transpose(-2, -1)
weights = scores.masked_fill(mask, -torch.inf).softmax(-1).to(v.dtype)"""

_NOT_CLEANED: Final = Advice(
    "Not a cure: a hook that makes numbers of NaN. The scaler skips such a step by itself, and with the hook it is taken."
)

_GO_BACK: Final = (
    "Stop, and go back to the last checkpoint from before {first}. No scale and no batch mends weights."
)
_IN_DATA: Final = "missing values, empty targets, labels out of range, sequences shorter than their targets. Leave it out, or mend it."
_NAMED: Final = Advice(
    "Where the order of the data is not known, log which batch each is: the next one is then named.",
    "ampwatch.log(batch_id=index)",
)

FORWARD: Final[dict[str, list[Advice]]] = {
    "forward_overflow": [
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
    ],
    "forward_overflow.first_steps": [
        Advice(
            "The loss was finite at the first weights and is not after {steps} at learning rate {rate}: run these batches "
            "again with a tenth of it. If the loss stays finite, the steps were too large, and what follows is not needed."
        ),
    ],
    "nonfinite_forward.born": [
        Advice(
            "Look in {module} for what makes NaN of finite numbers: 0/0, a root or logarithm of a negative number, inf - inf, "
            "0 · inf as of a mask times a large constant, exp(). Anomaly mode does not tell it, a look at each line does.",
            "assert y.isfinite().all(), y.abs().max()",
        ),
        Advice(
            "Run that module in float32 for one batch: where its output is finite there, float16's range is the cause."
        ),
    ],
    "nonfinite_forward": [
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
    ],
    "nonfinite_forward.inputs": [
        Advice(
            "The batch itself holds inf or NaN: mend the data, or drop such samples before the forward pass.",
            "assert torch.isfinite(batch).all()",
        )
    ],
    "nonfinite_forward.loss": [
        Advice(
            "Every output of the model is finite, so the loss makes inf or NaN itself: compute it in float32, from "
            "logits, with functions that are stable there.",
            "loss = torch.nn.functional.cross_entropy(logits.float(), target)",
        )
    ],
    "nonfinite_forward.loaded": [
        Advice(
            "Parameters held inf or NaN before the first step: look at how they are initialised or what was loaded.",
            "[name for name, p in model.named_parameters() if not p.isfinite().all()]",
        )
    ],
    "mask_constant": [
        Advice(
            "Leave no row without a key to look at: let a padded query see itself, or drop rows that hold padding only.",
            "mask = mask & ~mask.all(-1, keepdim=True)             # True: masked out",
        ),
        Advice(
            "Mask with a constant that float16 holds, and take the softmax in float32. -1e9 is -inf in float16.",
            "scores = scores.float().masked_fill(mask, torch.finfo(torch.float32).min).softmax(-1).to(v.dtype)",
        ),
        Advice(
            "Not a cure: -inf as the constant, or another loss scale. The softmax of a row of -inf is NaN."
        ),
    ],
    "loss_in_fp16": [
        Advice(
            "Compute the loss in float32, outside autocast, from logits, with functions that are stable there.",
            "with torch.autocast(device, enabled=False):\n"
            "    loss = torch.nn.functional.cross_entropy(logits.float(), target)",
        ),
        Advice(
            "Replace log(softmax(x)) by log_softmax(x), log(sigmoid(x)) by logsigmoid(x), and sums by means: in float16 "
            "1 - 1e-4 rounds to 1, and a sum ends at 65504."
        ),
        Advice("If it stays so in float32, look at the targets: they were not looked at here."),
        Advice("Not a cure: a lower loss scale. The loss is not finite before it is scaled."),
    ],
    "weights_poisoned": [
        Advice(_GO_BACK),
        Advice(
            "Look at what writes them: a step outside the scaler, an optimizer whose state or eps is float16, code "
            "that changes weights by hand (weight decay, clamping, averaging). A check after each step catches it.",
            "assert all(p.isfinite().all() for p in model.parameters())",
        ),
    ],
    "weights_poisoned.scale": [
        Advice(
            f"{_GO_BACK} Take a fresh scaler: it was its scale that destroyed them.",
            "scaler = ampwatch.GradScaler(device, model=model)",
        ),
        Advice("Mend what made attempt after attempt overflow before; the scale is not the cause."),
    ],
    "buffers_poisoned": [
        Advice(
            "Restore the buffers from a checkpoint from before {first}, or reset the statistics and let them settle again "
            "over a few hundred batches; parameters are unharmed.",
            "for m in model.modules():\n"
            "    if isinstance(m, torch.nn.modules.batchnorm._BatchNorm):\n"
            "        m.reset_running_stats()",
        ),
        Advice(
            "Then mend what made that forward pass infinite: look at the batch and at the layers before the buffer. The "
            "scaler skips the step, but a forward pass is not undone."
        ),
    ],
    "bad_batch.batch": [
        Advice(f"Look at batch {{batch}}: {_IN_DATA}"),
        _NOT_CLEANED,
    ],
    "bad_batch.place": [
        Advice(
            f"Look at the data that attempt {{place}} of each epoch is given (the first is attempt 0): {_IN_DATA}"
        ),
        _NAMED,
        _NOT_CLEANED,
    ],
    "bad_batch.period": [
        Advice(
            f"Look at the data that is loaded at {{first}}, and again every {{period}} attempts: {_IN_DATA}"
        ),
        _NAMED,
        _NOT_CLEANED,
    ],
    "bad_batch": [
        Advice(
            "If it comes again, log which batch it was; the same batch twice proves that the data is the cause.",
            "ampwatch.log(batch_id=index)",
        ),
        _NOT_CLEANED,
    ],
}
