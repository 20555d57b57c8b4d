"""The rules by which loss scalers move their scale, exactly: one class for each scaler (docs/replay.md).

A policy is made with the arguments of the scaler it follows, under their names, and has that scaler's counters.

    policy = Torch(init_scale=2.0**16, growth_interval=2000)
    policy.update(overflow=True)
    policy.scale                     # 32768.0

`N` is the number of clean attempts up to and including the one that grows. Scalers that keep the scale in a
tensor round it to float32, those that keep it in a Python number do not; where no floor or cap is named there is
none, and the scale reaches 0 or infinity and stays there.
"""

from __future__ import annotations

from typing import Final

from ._base import NEVER, Policy, Stopped
from .jax import ApplyIfFinite, Fixed, Flax, Jmp
from .large_models import ColossalAI, DeepSpeedFP16, DeepSpeedZeRO, DeepSpeedZeRO016, Fairseq, Megatron
from .others import Keras, Keras2, MindSporeCell, MindSporeManager, Paddle, PaddleStatic
from .pytorch import Apex, ApexFP16Utils, ShardedOnCpu, Torch

POLICIES: Final[dict[str, type[Policy]]] = {
    "torch": Torch,
    "fsdp-cpu": ShardedOnCpu,
    "apex": Apex,
    "apex-fp16-utils": ApexFP16Utils,
    "deepspeed": DeepSpeedZeRO,
    "deepspeed-0.16": DeepSpeedZeRO016,
    "deepspeed-fp16": DeepSpeedFP16,
    "megatron": Megatron,
    "colossalai": ColossalAI,
    "fairseq": Fairseq,
    "paddle": Paddle,
    "paddle-static": PaddleStatic,
    "keras": Keras,
    "keras2": Keras2,
    "jmp": Jmp,
    "flax": Flax,
    "mindspore": MindSporeCell,
    "mindspore-manager": MindSporeManager,
    "optax": ApplyIfFinite,
    "fixed": Fixed,
}

__all__ = [
    "NEVER",
    "POLICIES",
    "Apex",
    "ApexFP16Utils",
    "ApplyIfFinite",
    "ColossalAI",
    "DeepSpeedFP16",
    "DeepSpeedZeRO",
    "DeepSpeedZeRO016",
    "Fairseq",
    "Fixed",
    "Flax",
    "Jmp",
    "Keras",
    "Keras2",
    "Megatron",
    "MindSporeCell",
    "MindSporeManager",
    "Paddle",
    "PaddleStatic",
    "Policy",
    "ShardedOnCpu",
    "Stopped",
    "Torch",
]
