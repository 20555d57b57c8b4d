"""A process that has imported everything, and forks the jobs and servers of the tests: a restart costs no import.

Each line on stdin is a JSON object {"what", "arguments", "environ", "output"}; the answer is a process id.
"""

import json
import os
import signal
import sys

import training

from ampwatch_server.serve import serve


def job(*arguments):
    """A training job, see training.py."""
    print(training.train(*arguments), flush=True)


def server(port, database):
    """A server."""
    serve(port=port, database=database, ready=lambda link: print("ready", flush=True))


def become(order):
    """The process that was asked for: it ends as any other does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= order["environ"]
    globals()[order["what"]](*order["arguments"])
    sys.exit()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    for line in sys.stdin:
        if not (pid := os.fork()):
            become(json.loads(line))
        print(pid, flush=True)
