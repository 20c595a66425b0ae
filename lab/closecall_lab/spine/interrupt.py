"""Ctrl-C at once, also in the middle of a kernel that runs for minutes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Ends the process with `message` and code 130 on Ctrl-C.

    Python raises KeyboardInterrupt only once native code has returned. So a second thread waits for the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listen, wake = socket.socketpair()
    wake.setblocking(False)

    def watch() -> None:
        while received := listen.recv(1):
            if received[0] == signal.SIGINT:
                print(message, file=sys.stderr, flush=True)
                os._exit(130)

    before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wake.close()
        thread.join()
        listen.close()
