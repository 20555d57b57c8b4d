"""Which part may import which, and what `import ampwatch` may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "ampwatch": ROOT / "ampwatch",
    "ampwatch_server": ROOT / "server" / "ampwatch_server",
    "ampwatch_dashboard": ROOT / "dashboard" / "ampwatch_dashboard",
}
# What each may import of the others: nothing, but for these.
ALLOWED = {
    ("ampwatch_server", "ampwatch_dashboard"),
    *(
        ("ampwatch_server", f"ampwatch.{part}")
        for part in ("records", "spool", "diagnosis", "replay", "errors", "settings", "filesystems")
    ),
    ("ampwatch_server", "ampwatch.stats.layout"),
}
HEAVY = ("torch", "triton", "numpy", "httpx", "fastapi", "sqlalchemy", "typer", "rich", "ampwatch_server")


def imported_by(path):
    """Absolute names of the modules of our packages that a file imports, wherever in it."""
    package = next(name for name, folder in PACKAGES.items() if path.is_relative_to(folder))
    parents = [package, *path.relative_to(PACKAGES[package]).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def crossings(package):
    for path in sorted(PACKAGES[package].rglob("*.py")):
        for name in imported_by(path):
            if name.split(".")[0] in PACKAGES.keys() - {package}:
                yield path.relative_to(ROOT).as_posix(), name


def is_allowed(package, name):
    return any(name == to or name.startswith(f"{to}.") for by, to in ALLOWED if by == package)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_of_the_others_only_what_it_may(package):
    outside_commands = [
        (path, name) for path, name in crossings(package) if not path.startswith("ampwatch/cli/")
    ]
    assert [crossing for crossing in outside_commands if not is_allowed(package, crossing[1])] == []


def test_a_command_imports_the_server_inside_itself():
    for path in (PACKAGES["ampwatch"] / "cli").glob("*.py"):
        tree = ast.parse(path.read_text())
        top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = [getattr(node, "module", None) or node.names[0].name for node in top_level]
        assert not [name for name in modules if name.startswith("ampwatch_")], path


def loaded_by(statement):
    script = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_loads_nothing_heavy():
    assert loaded_by("import ampwatch") & set(HEAVY) == set()


@pytest.mark.parametrize(
    "module", ["records", "spool", "diagnosis", "replay", "errors", "settings", "recorder", "cli"]
)
def test_what_both_sides_share_loads_no_torch_and_no_server(module):
    loaded = loaded_by(f"import ampwatch.{module}")
    assert loaded & {"torch", "triton", "fastapi", "sqlalchemy", "ampwatch_server"} == set()
