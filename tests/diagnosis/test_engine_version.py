"""A server judges stored runs anew where an engine before its own has judged them: the version must tell them apart."""

import hashlib
from pathlib import Path

from ampwatch import diagnosis
from ampwatch.diagnosis.engine import ENGINE_VERSION

# Of the engine that was given out last; written anew at each release, and the version is raised once after it.
GIVEN_OUT = (1, "1fc1c7a0a0ce6df7aa8cd42eb10c2522")


def digest_of(folder: Path) -> str:
    """Of all that is written there, by name."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def test_an_engine_that_differs_from_the_one_given_out_has_the_next_version():
    version, digest = GIVEN_OUT
    now = digest_of(Path(diagnosis.__file__).parent)
    wanted = version if now == digest else version + 1
    assert wanted == ENGINE_VERSION, f"the digest of the engine is {now}"
