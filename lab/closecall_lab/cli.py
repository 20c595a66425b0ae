"""The lab's commands for the `closecall` command line: every `cli.py` below this folder lists its own in COMMANDS."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def add_commands(commands: Any) -> None:
    """Adds the parser of every command of the lab: a new command needs only its `cli.py`."""
    for path in sorted(HERE.glob("*/**/cli.py")):
        room = ".".join(path.relative_to(HERE).with_suffix("").parts)
        for add in importlib.import_module(f"{__package__}.{room}").COMMANDS:
            add(commands)
