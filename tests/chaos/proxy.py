"""A network that can be cut and slowed down: a TCP proxy in the test."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards connections to a port of this machine.

    `mode` is "pass"; "cut", which resets what is open and what comes; "deaf", which delivers what is sent and resets
    the connection instead of the answer; "slow", a thousand bytes at a time, ten times a second.
    """

    def __init__(self, port):
        self.mode = "pass"
        self._target = port
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode):
        """Change the mode; a cut ends what is open."""
        self.mode = mode
        if mode == "cut":
            for each in self._open:
                reset(each)

    def close(self):
        """End everything."""
        self.set("cut")
        reset(self._listener)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.mode == "cut":
                    reset(client)
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source, sink, is_answer):
        with contextlib.suppress(OSError):
            while data := source.recv(1000 if self.mode == "slow" else 1 << 16):
                if self.mode == "deaf" and is_answer:
                    break
                if self.mode == "slow":
                    time.sleep(0.1)
                sink.sendall(data)
        reset(source)
        reset(sink)


def reset(each):
    """Close a socket as a broken connection does."""
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        each.shutdown(socket.SHUT_RDWR)
    each.close()
