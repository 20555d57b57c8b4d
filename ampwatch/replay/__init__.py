"""Replay: what other settings, and other frameworks' scalers, would have done to a recorded run. Torch-free."""

from __future__ import annotations

from .policies import POLICIES
from .recommend import Recommendation, recommend
from .recording import Recording, recording_of
from .whatif import Effect, WhatIf, what_if

__all__ = [
    "POLICIES",
    "Effect",
    "Recommendation",
    "Recording",
    "WhatIf",
    "recommend",
    "recording_of",
    "what_if",
]
