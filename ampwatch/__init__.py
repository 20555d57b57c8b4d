"""Gradient health for mixed-precision training: what is wrong, since when, where, and what to change.

    import ampwatch
    scaler = ampwatch.GradScaler("cuda", model=model)  # instead of torch.amp.GradScaler("cuda")

Importing this package loads neither torch nor the network: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import AmpwatchError, InvalidBatch, MissingExtra, RunNotFound, SettingsError, SpoolError

if TYPE_CHECKING:
    from .checks import check
    from .diagnosis import diagnose
    from .diagnosis.findings import Finding
    from .optimizer import watch_optimizer
    from .recorder import finish, log
    from .scaler import GradScaler, watch
    from .settings import Settings
    from .sharded import ShardedGradScaler

    __version__: str

_HOME = {
    "Finding": ".diagnosis.findings",
    "GradScaler": ".scaler",
    "Settings": ".settings",
    "ShardedGradScaler": ".sharded",
    "check": ".checks",
    "diagnose": ".diagnosis",
    "finish": ".recorder",
    "log": ".recorder",
    "watch": ".scaler",
    "watch_optimizer": ".optimizer",
}

__all__ = [
    "AmpwatchError",
    "Finding",
    "GradScaler",
    "InvalidBatch",
    "MissingExtra",
    "RunNotFound",
    "Settings",
    "SettingsError",
    "ShardedGradScaler",
    "SpoolError",
    "__version__",
    "check",
    "diagnose",
    "finish",
    "log",
    "watch",
    "watch_optimizer",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("ampwatch")
    if name not in _HOME:
        raise AttributeError(f"module 'ampwatch' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOME[name], "ampwatch"), name)
    return value


def __dir__() -> list[str]:
    return __all__
