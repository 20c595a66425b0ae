"""A Ray cluster of two local workers gives what one process gives, also when a worker is killed under way."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import grid_of, results

from closecall_lab.eval import executors, runner
from closecall_lab.eval.store import Store

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is an extra: pip install './lab[ray]'", allow_module_level=True)


@pytest.fixture
def cluster() -> Iterator[None]:
    """On the loopback interface only."""
    ray = executors.connect(None, 2)
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own files and sockets
def test_ray_equals_local_and_tells_errors_and_a_killed_worker_is_made_good(tiny: Path, tmp_path: Path) -> None:
    grid = grid_of(tiny)
    with Store(tmp_path / "local.db") as store:
        runner.run(grid, store)
    expected = results(tmp_path / "local.db")

    workers = executors.Ray(str(tiny), jobs=2)
    before = workers.pids()
    assert len(set(before)) == 2
    run = workers.run

    def kill_one_on_the_way(jobs: Iterator[executors.Job]) -> Iterator[executors.Result]:
        for i, result in enumerate(run(jobs)):
            if i == 3:
                os.kill(before[0], signal.SIGKILL)
            yield result

    workers.run = kill_one_on_the_way  # type: ignore[method-assign]
    with Store(tmp_path / "killed.db") as store:
        runner.run_model(grid, store, workers, jobs=2)
        assert store.connection.execute("SELECT count(*) FROM runs").fetchone() == (len(expected),)
    assert results(tmp_path / "killed.db") == expected
    after = workers.pids()
    assert before[0] not in after
    assert before[1] in after

    too_short = grid_of(tiny, contexts=(16,), tasks=("probe-needle",))  # of two, either might be refused first
    with Store(tmp_path / "none.db") as store, pytest.raises(ValueError, match=r"at least 102 tokens, got 16"):
        runner.run_model(too_short, store, workers)
    workers.close()

    with Store(tmp_path / "none.db") as store, pytest.raises(OSError, match="no such directory"):
        runner.run(grid_of(tmp_path / "nothing"), store, executor="ray", jobs=1)
