"""Builds the wheel, installs it into an empty environment without torch, and looks at what a user gets."""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {"ampwatch", "ampwatch_server", "ampwatch_dashboard"}
SHIPPED = ("ampwatch/py.typed", "ampwatch_dashboard/static/index.html", "ampwatch_server/migrations/env.py")


def run(*command: str | Path, ok: bool = True) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd="/")
    if ok and done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def contents(wheel: Path) -> set[str]:
    names = set(zipfile.ZipFile(wheel).namelist())
    return {name for name in names if ".dist-info/" not in name}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "-w", folder, ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        names = contents(wheel)
        assert {name.split("/")[0] for name in names} == TOP_LEVEL, names
        assert all(name in names for name in SHIPPED), [n for n in SHIPPED if n not in names]
        venv.create(f"{folder}/empty", with_pip=True)
        bin_dir = Path(folder, "empty", "bin")
        run(bin_dir / "pip", "-q", "--disable-pip-version-check", "install", wheel)
        assert "0.1.0" in run(bin_dir / "ampwatch", "--version")
        for command, extra in (("serve", "server"), ("demo", "torch")):
            said = run(bin_dir / "ampwatch", command, ok=False)
            assert f"pip install 'ampwatch[{extra}" in said, said
        print(
            f"wheel: {len(names)} files, {wheel.stat().st_size / 1024:.0f} KiB, installs and says what it lacks"
        )


if __name__ == "__main__":
    main()
