"""The instrumented scaler for FSDP1: torch's ShardedGradScaler, which sums found_inf over the ranks, and a record.

With FSDP2 (`fully_shard`) take the plain `GradScaler`: gradients are DTensors there, whose found_inf torch reduces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import sharded_grad_scaler as _torchs

from .opening import given_of, source_of
from .registry import Sink
from .scaler import Watched, attach
from .settings import Settings

if TYPE_CHECKING:
    from .diagnosis.findings import Finding

__all__ = ["ShardedGradScaler"]

# As torch found it when that module was loaded; None stands for the default group too.
_DEFAULT_GROUP: Final = (
    inspect.signature(_torchs.ShardedGradScaler.__init__).parameters["process_group"].default
)


class ShardedGradScaler(Watched, _torchs.ShardedGradScaler):
    """torch.distributed.fsdp's ShardedGradScaler that records every attempt of every rank.

        scaler = ampwatch.ShardedGradScaler("cuda", model=model)  # of FullyShardedDataParallel

    Each rank records the statistics of its own shards; found_inf, and with it every skip, is that of all ranks.
    Gradients and scale may lie on the CPU (`CPUOffload`).

    Arguments:
        device, init_scale, backoff_factor, growth_factor, growth_interval, enabled, process_group: torch's own, in
            torch's order: `backoff_factor` comes before `growth_factor`, the other way round than in `GradScaler`.
        model, run, project, server, dir, config, tags, on_finding, settings, recorder: as for `GradScaler`.
    Errors: torch's own; SettingsError for a setting that cannot be used.
    Synchronisation: none beyond torch's.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = _DEFAULT_GROUP,
        *,
        model: nn.Module | None = None,
        run: str | None = None,
        project: str | None = None,
        server: str | None = None,
        dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        on_finding: Callable[[Finding], object] | None = None,
        settings: Settings | None = None,
        recorder: Sink | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, backoff_factor, growth_factor, growth_interval, enabled, process_group
        )
        given = given_of(run=run, project=project, server=server, dir=dir, config=config, tags=tags)
        attach(self, model, source_of(settings, given, on_finding, recorder, model), asked=enabled)
