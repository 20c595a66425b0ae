from __future__ import annotations

import gc
import os

# The cases are small: threads only get into each other's way, and into the other workers'.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import interpreter
from engines import ENGINES, FUZZ, Engine

# A normal run is the same everywhere; a fuzz run differs every time and prints how to repeat what it found.
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", deadline=None, database=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("fuzz", deadline=None, database=None, print_blob=True, suppress_health_check=slow)
settings.load_profile("fuzz" if FUZZ else "ci")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    interpreter.quicken()


@pytest.fixture(scope="session", params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Every backend and tier in turn. Session scope, because hypothesis shares fixtures between examples."""
    found: Engine = request.param
    return found


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What is there when a module's tests begin stays to the end: libraries, tests, caches, millions of objects. Set
    apart, they are not walked through by every collection. That took minutes."""
    gc.collect()
    gc.freeze()
