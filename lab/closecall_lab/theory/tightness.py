"""How close a certificate comes to the truth: dense attention in float64, for reports and not for use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from closecall.certify.certificate import Certificate, certify
from closecall.checks import check_scale
from closecall.selection import Selection


def dropped(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What every row really lost: its dropped softmax mass, and the 2-norm of its output's distance from the dense one;
    float64 `[B, H, M]`. One head and tile at a time, key by key."""
    scale = check_scale(scale, q.shape[-1])
    g, group = selection.geometry, q.shape[1] // k.shape[1]
    mass, error = (torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device) for _ in range(2))
    for b, t, rows, keys, pos in g.tiles():
        n = keys.stop - keys.start
        place = torch.arange(n, device=q.device)
        sees = place <= torch.arange(pos, n, device=q.device)[:, None]
        kept = selection.kept_mask((b, slice(None), t))[:, place // g.block]
        for h in range(q.shape[1]):
            logits = scale * (q[b, h, rows].double() @ k[b, h // group, keys].double().mT)
            logits = softcap * (logits / softcap).tanh() if softcap else logits
            logits = logits.masked_fill(~sees, -torch.inf)
            p = logits.softmax(1)
            values = v[b, h // group, keys].double()
            mine = logits.masked_fill(~kept[h], -torch.inf)
            weights = (mine - mine.amax(1, keepdim=True).clamp(min=-1e300)).exp()
            out = weights @ values / weights.sum(1, keepdim=True).clamp(min=1e-300)
            mass[b, h, rows] = (p * ~kept[h]).sum(1)
            error[b, h, rows] = torch.linalg.vector_norm(out - p @ values, dim=1)
    return mass, error


@dataclass(frozen=True)
class Tightness:
    """Means over the rows that lost something, and shares of all rows that lost at most `eps`."""

    mass: float
    mass_bound: float
    error: float
    error_bound: float
    certified: float  # provably
    certifiable: float  # really
    eps: float


def tightness(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, eps: float = 0.1, scale: float | None = None
) -> Tightness:
    """A certificate beside the truth. Costs dense attention in float64."""
    certificate: Certificate = certify(q, k, v, selection, scale=scale)
    mass, error = dropped(q, k, v, selection, scale=scale)
    real = certificate.real[:, None].expand_as(certificate.mass)
    cut = real & (certificate.mass > 0)
    m, m_bound, e, e_bound = (float(x[cut].double().mean()) for x in (mass, certificate.mass, error, certificate.error))
    really = float((mass[real] <= eps).double().mean())
    return Tightness(m, m_bound, e, e_bound, certificate.certified(eps), really, eps)
