"""Builds the CPU kernel of the statistics pass into the wheel, where there is a C compiler.

It is optional: without a compiler, on Windows, or if compiling fails, the wheel is pure Python and says so, and the
statistics are taken by plain torch. With it the wheel is for one platform, and for every Python: the library is no
extension module, but is called through ctypes.

    CC                       the compiler, else the one that Python was built with
    AMPWATCH_BUILD_CPU=0     builds a pure Python wheel in any case
    AMPWATCH_BUILD_CPU=1     fails where the kernel cannot be built
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "ampwatch/stats/native"
LIBRARY = "ampwatch/stats/_cpu.so"

# No -march: the library picks instructions when it runs, on machines that differ from this one. No -ffast-math: the
# linker would add code that turns subnormal numbers off in the whole process. OpenMP's pragmas for vectors, but not
# its runtime.
FLAGS = (
    "-std=c11",
    "-O3",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    "-pthread",
)


class CannotBuild(Exception):
    """Why there will be no library."""


class CpuKernel(BuildHookInterface[Any]):
    """The build hook of the wheel, also of the one that an editable install is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as one for this platform."""
        library = Path(self.root, LIBRARY)
        wanted = os.environ.get("AMPWATCH_BUILD_CPU", "")
        try:
            if wanted == "0":
                raise CannotBuild("AMPWATCH_BUILD_CPU is 0")
            compile_library(Path(self.root, SOURCES, "pass.c"), library)
        except CannotBuild as error:
            if wanted == "1":
                raise
            if version == "editable":
                library.unlink(missing_ok=True)  # it would be used, and is older
            self.app.display_warning(f"ampwatch is built without its CPU kernel, as pure Python: {error}")
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def compile_library(source: Path, library: Path) -> None:
    """Compile the one source that includes the others; a process that has the library open keeps the old one.

    Errors: CannotBuild with what the compiler said.
    """
    if sys.platform == "win32":
        raise CannotBuild("it is written for POSIX threads")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    new = library.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, str(source), "-o", str(new)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"no C compiler ({error})") from error
    if done.returncode:
        raise CannotBuild(f"{shlex.join(command)} failed:\n{done.stderr}")
    new.replace(library)


def platform_tag() -> str:
    """The platform as in a wheel's name, such as linux_x86_64."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())
