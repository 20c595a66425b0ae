"""Ctrl-C and `kill PID` at once, also in the middle of a kernel that runs for minutes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminable() -> Iterator[None]:
    """Makes `kill PID` raise KeyboardInterrupt, as Ctrl-C does: what is under way can say how to go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: set by other than Python


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Ends the process with `message` and code 130 on Ctrl-C and on `kill PID`.

    Python raises KeyboardInterrupt only once native code has returned. So a second thread waits for the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listen, wake = socket.socketpair()
    wake.setblocking(False)

    def watch() -> None:
        while received := listen.recv(1):
            if received[0] in (signal.SIGINT, signal.SIGTERM):
                print(message, file=sys.stderr, flush=True)
                os._exit(130)

    before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        with terminable():
            yield
    finally:
        signal.set_wakeup_fd(before)
        wake.close()
        thread.join()
        listen.close()
