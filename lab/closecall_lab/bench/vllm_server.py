"""A vLLM server on the loopback interface, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closecall.models import catalogue
from closecall.models.get import get

HOST = "127.0.0.1"
# Small, quiet and offline; what the caller's environment says goes first.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def model_directory(name: str) -> str:
    """The directory of a model that `closecall get` knows, fetched if missing; any other name is left to vLLM."""
    return str(get(name)) if name.lower() in catalogue.sources() else name


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """A running server: `url` is the OpenAI endpoint."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def serving(
    model: str, closecall: dict[str, Any] | None, *options: str, environment: dict[str, str] | None = None,
    patience: float = 1800.0,
) -> Iterator[Server]:  # fmt: skip
    """Serves `model`, with the plugin's settings or (None) as plain vLLM, and stops the server at the end."""
    port = free_port()
    call = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", HOST]
    call += ["--port", str(port), *options]
    if closecall is not None:
        call += ["--additional-config", json.dumps({"closecall": closecall})]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        with log.open("wb") as out:
            env = ENVIRONMENT | dict(os.environ) | (environment or {})
            process = subprocess.Popen(call, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        server = Server(port, log, process)
        try:
            give_up = time.monotonic() + patience
            while not _answers(f"http://{HOST}:{port}/health"):
                if process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"the server did not start:\n{server.text[-3000:]}")
                time.sleep(1.0)
            yield server
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes that it started: they are a session of their own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            break
