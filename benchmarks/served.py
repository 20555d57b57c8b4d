"""A server in a process of its own, for benchmarks of what runs beside one.

with server_process(folder) as (url, token): ...
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server_process(folder: str) -> Iterator[tuple[str, str]]:
    """Address and token of a server whose database lies in the folder."""
    command = [sys.executable, __file__, folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout
    try:
        url, token = json.loads(process.stdout.readline())
        yield url, token
    finally:
        process.stdin.close()
        process.wait()


def main() -> None:
    from ampwatch_server.serve import running

    with running(database=f"sqlite:///{sys.argv[1]}/db") as server:
        print(json.dumps([server.url, server.token]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
