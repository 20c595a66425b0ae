"""Two optimisers: Muon for the matrices, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import nn

MUON_RATE = 0.02
ADAMW_RATE = 3e-3


class Optimizers:
    """Steps both, scales both learning rates, and saves both."""

    def __init__(self, model: nn.Module) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            # An embedding is a table of rows: making its update orthogonal would move rows that were not read.
            is_matrix = parameter.ndim == 2 and "embed" not in name
            (matrices if is_matrix else others).append(parameter)
        self.all: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
            torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.rates = [MUON_RATE, ADAMW_RATE]

    def step(self, scale: float) -> None:
        """One update at `scale` times the learning rates."""
        for optimizer, rate in zip(self.all, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> list[dict[str, object]]:
        return [optimizer.state_dict() for optimizer in self.all]

    def load(self, state: list[dict[str, object]]) -> None:
        for optimizer, saved in zip(self.all, state, strict=True):
            optimizer.load_state_dict(saved)
