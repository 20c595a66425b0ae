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
    pytest.skip("Ray is an extra: pip install 'closecall-lab[ray]'", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for all tests here, on the loopback interface only."""
    ray = executors.connect(None, 2)
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own files and sockets
def test_ray_equals_local_and_a_killed_worker_is_made_good(tiny: Path, tmp_path: Path) -> None:
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
    workers.close()


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_errors_in_workers_are_told_as_they_are(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such directory"):
        executors.Ray(str(tmp_path / "nothing"), jobs=1)
    with Store(tmp_path / "results.db") as store, pytest.raises(ValueError, match=r"length 1[46] is too short"):
        runner.run(grid_of(tiny, contexts=(16,)), store, executor="ray", jobs=1)
