from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import RIGHT, add

from closecall_lab.eval.store import Store
from closecall_lab.report.gather import Gathered, gather


def fill(store: Store) -> None:
    """One model, one task and context, budget 8 (tile budget 16); what each policy answers is in RIGHT."""
    store.add_model("a" * 64, "tiny", {"label": "a made-up model", "context": 4096})
    more: dict[str, Any] = {
        "warnings": ["8192 tokens are more than the 4096 that tiny was trained for"],
        "hops": (0.9, 0.5),
    }
    add(store, RIGHT["dense"], policy="dense", effective=64.5, hit=(1, 1, 1), seconds=4.0, **more)
    for policy, answers in RIGHT.items():
        if policy == "dense":
            continue
        router = policy.startswith("router")
        triggers = router and policy != "router/matched"
        add(
            store,
            answers,
            policy=policy,
            budget=8,
            effective=20.25 if router else 15.5,
            seconds=3.0 if router else 2.0,
            triggered=0.4 if triggers else None,
            asked={"router": 0.25, "router/last": 1.0}.get(policy, 0.0),
            **more,
        )


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("store") / "results.db"
    with Store(found) as store:
        fill(store)
    return found


@pytest.fixture(scope="session")
def gathered(path: Path) -> Gathered:
    with Store(path, create=False) as store:
        return gather(store)
