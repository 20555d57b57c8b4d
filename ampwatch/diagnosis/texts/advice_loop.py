"""Advice where the training loop, its optimizers or its dtypes are at fault."""

from __future__ import annotations

from typing import Final

from ampwatch.diagnosis.findings import Advice

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

_CALLS: Final = [
    Advice(
        "Call scale → backward → (unscale_ → clip) → step → update, each once for each update of the weights.",
        _LOOP,
    )
]

LOOP: Final[dict[str, list[Advice]]] = {
    "call_order": _CALLS,
    "scaler_bypassed": _CALLS,
    "useless_scaler": [
        Advice(
            "Enable the scaler with float16 autocast only. {dtype} has float32's range and needs none.",
            "scaler = ampwatch.GradScaler(device, enabled=dtype is torch.float16, model=model)",
        ),
        Advice(
            "If you kept it to skip steps that are not finite: it does, and thereby hides the fault those skips are."
        ),
    ],
}
