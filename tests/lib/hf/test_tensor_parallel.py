"""Two processes with half of the heads each select what one process with all of them selects."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import closecall
import families
from closecall.api import PlannedCall
from closecall.ranking import alone
from families import tokens

RANKS = 2
IMPORTED = [
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
]  # once, by the process that both are forked from
POLICIES = {
    "quantile": closecall.policy("router-on-quest", block=16, tile=16, budget=5, tile_factor=1, rho=1.4),
    "per-cell": closecall.policy(
        "router", block=16, tile=16, budget=5, tile_factor=1, rho=1.4, q=0.3, trigger="per-cell"
    ),
    "shared": closecall.policy("router-on-quest", block=16, tile=16, budget=5, tile_factor=1, rho=1.4, share="group"),
}


def selections(
    model: Any, policy: closecall.Policy, *, compiled: bool = False, apart: bool = False
) -> tuple[torch.Tensor, list[Any]]:
    """The logits of a batch with padding, and every layer's selection; `apart`, each rank by its own heads only."""
    kept = []
    select = PlannedCall.select

    def spy(call: PlannedCall) -> Any:
        kept.append(select(call))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedCall, "select", spy)
        x = tokens(2, 200)
        mask = torch.ones_like(x)
        mask[0, :41] = 0
        called = torch.compile(model, backend="eager") if compiled else model
        with torch.no_grad(), closecall.attach(model, policy) as handle:
            if apart:
                handle._settings.all_heads = alone
            logits = called(x, attention_mask=mask, use_cache=False).logits
    return logits, [{part: getattr(s, part) for part in ("kv_idx", "counts", "triggered")} for s in kept]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    try:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        plan = DistributedConfig(tp_plan="auto", tp_size=RANKS)
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=plan)
        found: dict[str, Any] = {name: selections(model, policy) for name, policy in POLICIES.items()}
        found["compiled"] = selections(model, POLICIES["quantile"], compiled=True)
        found["apart"] = selections(model, POLICIES["quantile"], apart=True)
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_select_what_one_process_selects(tmp_path: Path) -> None:
    model = families.model("llama")
    model.save_pretrained(tmp_path / "model")
    multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(work, args=(str(tmp_path),), nprocs=RANKS, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for name in (*POLICIES, "compiled"):
        logits, whole = selections(model, POLICIES.get(name, POLICIES["quantile"]))
        assert len(whole) == 3
        for layer, expected in enumerate(whole):
            parts = [rank[name][1][layer] for rank in ranks]
            assert [part["counts"].shape[1] for part in parts] == [2, 2]  # each rank has its own heads only
            for key, value in expected.items():
                assert torch.equal(torch.cat([part[key] for part in parts], 1), value), f"{name}: {key} of {layer}"
        assert any(bool(layer["triggered"].any()) for layer in whole)
        for rank in ranks:
            assert float((rank[name][0] - logits).abs().max()) < 1e-4 * float(logits.abs().max())
    # Ranks that do not ask each other disagree: without the exchange this test would fail.
    first, second = (rank["apart"][1][0]["triggered"] for rank in ranks)
    assert not torch.equal(first, second)
