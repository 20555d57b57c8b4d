"""Settings: what a training job may configure, by argument or by environment, and where the token is kept.

An argument wins over its `AMPWATCH_*` variable, the variable over the default (docs/settings.md). Nothing is
read at import: `Settings.load` reads the environment when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import SettingsError
from .records import RUN_ID, RUN_ID_RULE

PREFIX = "AMPWATCH_"


def _flag(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError("it must be 1 or 0")


def _not_flag(text: str) -> bool:
    return not _flag(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _env(name: str, parse: Callable[[str], Any] = str) -> dict[str, Any]:
    """Metadata of a field: the variable that sets it, and how the variable's text is read."""
    return {"env": PREFIX + name, "parse": parse}


@dataclass(frozen=True)
class Settings:
    """What a training job may configure; docs/settings.md says what each setting does. Immutable.

    Errors: SettingsError where a value cannot be used.
    """

    server: str | None = field(default=None, metadata=_env("SERVER"))
    token: str | None = field(default=None, metadata=_env("TOKEN"), repr=False)
    dir: Path = field(default=Path("ampwatch_runs"), metadata=_env("DIR", Path))
    project: str = field(default="default", metadata=_env("PROJECT"))
    run: str | None = field(default=None, metadata=_env("RUN"))
    name: str = field(default="", metadata=_env("NAME"))
    tags: tuple[str, ...] = field(default=(), metadata=_env("TAGS", _words))
    config: Mapping[str, Any] = field(default_factory=dict, metadata={"env": ""})
    tensor_every: int = field(default=25, metadata=_env("TENSOR_EVERY", int))
    flush_s: float = field(default=1.0, metadata=_env("FLUSH_S", float))
    spool_max_bytes: int = field(default=2 << 30, metadata=_env("SPOOL_MAX_BYTES", int))
    spool_min_free_bytes: int | None = field(default=None, metadata=_env("SPOOL_MIN_FREE_BYTES", int))
    statistics: str = field(default="auto", metadata=_env("STATS"))
    observers: bool = field(default=True, metadata=_env("OBSERVERS", _flag))
    enabled: bool = field(default=True, metadata=_env("DISABLED", _not_flag))
    quiet: bool = field(default=False, metadata=_env("QUIET", _flag))

    def __post_init__(self) -> None:
        object.__setattr__(self, "dir", Path(self.dir))
        object.__setattr__(self, "tags", tuple(self.tags))
        for name in ("tensor_every", "flush_s", "spool_max_bytes"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name}: got {getattr(self, name)!r}, it must be above 0")
        if (floor := self.spool_min_free_bytes) is not None and floor < 0:
            raise SettingsError(f"spool_min_free_bytes: got {floor!r}, it must be 0 or above")
        if self.run is not None and not RUN_ID.match(self.run):
            raise SettingsError(f"run: got {self.run!r}, it must be {RUN_ID_RULE}")

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Settings from arguments, else from the environment, else the defaults.

        Arguments:
            environ: the environment; that of the process if None.
            **given: settings by name; None means not given.
        Errors: SettingsError for a name that is no setting, or a value that cannot be used.
        """
        known = {f.name: f for f in fields(cls)}
        if unknown := given.keys() - known.keys():
            raise SettingsError(f"{min(unknown)}: no such setting; there are {', '.join(known)}")
        values = _from_environment(known.values(), os.environ if environ is None else environ)
        values |= {name: value for name, value in given.items() if value is not None}
        if values.get("server") and not values.get("token"):
            values["token"] = read_token(environ)
        return cls(**values)

    def public(self) -> dict[str, Any]:
        """The settings as JSON-ready builtins, without the token."""
        hidden = {"token", "config", "tags"}
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        return shown | {"dir": str(self.dir)}


def _from_environment(known: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in known:
        text = environ.get(variable_of(setting), "")
        if not text:  # an empty variable is how a job script unsets one
            continue
        try:
            values[setting.name] = setting.metadata["parse"](text)
        except ValueError as error:
            raise SettingsError(f"{variable_of(setting)}: got {text!r}: {error}") from error
    return values


def variable_of(setting: Field[Any]) -> str:
    """Name of the environment variable of a field of `Settings`; empty where it has none."""
    name: str = setting.metadata["env"]
    return name


def config_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the user's ampwatch configuration: `$XDG_CONFIG_HOME/ampwatch`, else `~/.config/ampwatch`."""
    base = (os.environ if environ is None else environ).get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "ampwatch"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of what ampwatch can make again: `$XDG_CACHE_HOME/ampwatch`, else `~/.cache/ampwatch`."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "ampwatch"


def token_path(environ: Mapping[str, str] | None = None) -> Path:
    """File in which a server leaves its first token, mode 0600, for clients of the same user."""
    return config_dir(environ) / "token"


def read_token(environ: Mapping[str, str] | None = None) -> str | None:
    """The token a client of this user presents: `AMPWATCH_TOKEN`, else the file of `token_path`, else None."""
    given = (os.environ if environ is None else environ).get(PREFIX + "TOKEN", "")
    if given:
        return given
    try:
        return token_path(environ).read_text(encoding="utf-8").strip() or None
    except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: no home folder can be told
        return None
