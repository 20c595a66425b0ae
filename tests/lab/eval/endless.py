"""A parent with one worker that is never done: run as a script by test_runner.py."""

from __future__ import annotations

import time

from closecall_lab.eval import executors


class Endless:
    """A model that takes for ever to load, as a long prompt takes for ever to read."""

    def __init__(self, *_: object) -> None:
        print("at work", flush=True)
        time.sleep(3600)


executors.Worker = Endless  # type: ignore[assignment,misc]  # in the worker too, which imports this file first

if __name__ == "__main__":
    executors.Processes("none", jobs=1)
