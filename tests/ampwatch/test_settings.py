from dataclasses import fields
from pathlib import Path

import pytest

from ampwatch import settings as module
from ampwatch.errors import SettingsError
from ampwatch.settings import Settings

DOCS = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()


def test_an_argument_wins_over_the_environment_and_that_over_the_default():
    environ = {"AMPWATCH_PROJECT": "vision", "AMPWATCH_RUN": "from-environment"}
    settings = Settings.load(environ, run="from-argument", project=None)
    assert (settings.run, settings.project, settings.dir) == (
        "from-argument",
        "vision",
        Path("ampwatch_runs"),
    )


def test_every_variable_is_read_as_its_type():
    environ = {
        "AMPWATCH_SERVER": "https://a.example",
        "AMPWATCH_TOKEN": "secret",
        "AMPWATCH_DIR": "/data/runs",
        "AMPWATCH_PROJECT": "p",
        "AMPWATCH_RUN": "r",
        "AMPWATCH_NAME": "first try",
        "AMPWATCH_TAGS": "a, b,,c",
        "AMPWATCH_TENSOR_EVERY": "10",
        "AMPWATCH_FLUSH_S": "0.5",
        "AMPWATCH_SPOOL_MAX_BYTES": "1000",
        "AMPWATCH_SPOOL_MIN_FREE_BYTES": "2000",
        "AMPWATCH_STATS": "reference",
        "AMPWATCH_OBSERVERS": "0",
        "AMPWATCH_DISABLED": "1",
        "AMPWATCH_QUIET": "yes",
    }
    assert Settings.load(environ) == Settings(
        server="https://a.example",
        token="secret",
        dir=Path("/data/runs"),
        project="p",
        run="r",
        name="first try",
        tags=("a", "b", "c"),
        tensor_every=10,
        flush_s=0.5,
        spool_max_bytes=1000,
        spool_min_free_bytes=2000,
        statistics="reference",
        observers=False,
        enabled=False,
        quiet=True,
    )
    assert environ.keys() == {module.variable_of(f) for f in fields(Settings)} - {""}


def test_an_empty_variable_is_not_set():
    assert Settings.load({"AMPWATCH_DIR": "", "AMPWATCH_DISABLED": ""}) == Settings()


@pytest.mark.parametrize(
    ("environ", "given", "message"),
    [
        ({"AMPWATCH_TENSOR_EVERY": "often"}, {}, "AMPWATCH_TENSOR_EVERY: got 'often'"),
        ({"AMPWATCH_QUIET": "perhaps"}, {}, "AMPWATCH_QUIET: got 'perhaps': it must be 1 or 0"),
        ({"AMPWATCH_RUN": "../up"}, {}, r"run: got '\.\./up', it must be 1 to 128 of"),
        ({}, {"tensor_every": 0}, "tensor_every: got 0, it must be above 0"),
        ({}, {"spool_min_free_bytes": -1}, "spool_min_free_bytes: got -1, it must be 0 or above"),
        ({}, {"flush_s": float("nan")}, "flush_s: got nan, it must be above 0"),
        ({}, {"serer": "x"}, "serer: no such setting; there are server, token, dir"),
    ],
)
def test_what_cannot_be_used_is_named(environ, given, message):
    with pytest.raises(SettingsError, match=message):
        Settings.load(environ, **given)


def test_the_token_is_neither_shown_nor_recorded():
    settings = Settings(server="https://a.example", token="secret")
    assert "secret" not in repr(settings)
    assert "token" not in settings.public()
    assert settings.public()["server"] == "https://a.example"


def test_the_token_is_read_from_the_users_file(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "AMPWATCH_SERVER": "http://127.0.0.1:1"}
    assert Settings.load(environ).token is None
    module.token_path(environ).parent.mkdir()
    module.token_path(environ).write_text("from-file\n")
    assert Settings.load(environ).token == "from-file"
    assert Settings.load(environ | {"AMPWATCH_TOKEN": "from-environment"}).token == "from-environment"


def test_the_token_file_is_not_looked_for_without_a_server(tmp_path):
    (tmp_path / "ampwatch").mkdir()
    (tmp_path / "ampwatch" / "token").write_text("from-file")
    assert Settings.load({"XDG_CONFIG_HOME": str(tmp_path)}).token is None


def test_the_configuration_lies_in_the_users_home():
    assert module.config_dir({}) == Path.home() / ".config" / "ampwatch"
    assert module.config_dir({"XDG_CONFIG_HOME": "/c"}) == Path("/c/ampwatch")


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda setting: setting.name)
def test_the_documentation_has_every_setting(setting):
    row = (
        f"| `{setting.name}` | {f'`{module.variable_of(setting)}`' if module.variable_of(setting) else '–'} |"
    )
    assert row in DOCS
