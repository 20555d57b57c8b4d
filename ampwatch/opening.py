"""Where a watch records: from the arguments that `GradScaler`, `watch` and `watch_optimizer` share, to a recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .registry import Owner, Sink
from .settings import Settings
from .stats.choose import check
from .succession import opened

if TYPE_CHECKING:
    from .diagnosis.findings import Finding


def given_of(**arguments: Any) -> dict[str, Any]:
    """The settings among the arguments that were given."""
    return {name: value for name, value in arguments.items() if value not in (None, ())}


def source_of(
    settings: Settings | None,
    given: Mapping[str, Any],
    on_finding: Callable[[Finding], object] | None,
    sink: Sink | None,
    owner: Owner | None,
) -> Callable[[], Sink]:
    """Where the recorder comes from, which is opened when that is called.

    Arguments:
        settings: used with what is given, and instead of the environment.
        given: settings by name, see `given_of`.
        on_finding: called with each fatal finding.
        sink: is the recorder, where there is one.
        owner: of the parameters that will be trained, as far as that is known.
    Errors: SettingsError, before anything is opened.
    """
    if sink is not None:
        return lambda: sink
    loaded = replace(settings, **given) if settings is not None else Settings.load(**given)
    check(loaded.statistics)
    return lambda: opened(loaded, on_finding, owner)
