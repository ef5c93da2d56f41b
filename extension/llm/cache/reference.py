"""The eager reference: the caches' byte layer in torch, behind ``update_and_attend`` run without a backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .arguments import check_heads, host_positions
from .config import CacheConfig
from .plan import LayerPlan, Mask
from .registry import register_builder
from .sequence import SequenceCache, grown_slots


class EagerSequenceCache(SequenceCache):
    """One sequence's keys and values in torch tensors, pools of [1, H, slots, D] per layer."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._dtype: torch.dtype = getattr(torch, config.kv_dtype)
        self._pools: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(config.layers)

    def attend(
        self, layer: int, positions: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As ``CacheLayout.attend``, on torch tensors."""
        host = host_positions(positions)
        plan = self.plan(layer, host)
        check_heads(layer, self.config.layers[layer], len(host), q, k, v)
        with self.writing(plan):
            return self._attended(plan, q, k, v, scale)

    def _attended(
        self, plan: LayerPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        pools = self._grown(plan, k.device)
        done = 0
        for run in plan.write:
            for pool, rows in zip(pools, (k, v), strict=True):
                pool[:, :, run.slot : run.slot + run.length] = rows[:, :, done : done + run.length].to(self._dtype)
            done += run.length
        keys, values = (
            torch.cat([pool[:, :, run.slot : run.slot + run.length] for run in plan.read], dim=2).to(q.dtype)
            for pool in pools
        )
        visible = None if plan.mask is Mask.NONE else _visible(plan, q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)

    def _grown(self, plan: LayerPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        layer, pools = self.config.layers[plan.layer], self._pools[plan.layer]
        slots = 0 if pools is None else pools[0].shape[2]
        if pools is None or slots < plan.pool_slots:
            size = grown_slots(self.config, slots, plan.pool_slots, self._policies[plan.layer].slots)
            grown = (
                torch.zeros(1, layer.n_kv_heads, size, layer.head_dim, dtype=self._dtype, device=device),
                torch.zeros(1, layer.n_kv_heads, size, layer.value_dim, dtype=self._dtype, device=device),
            )
            if pools is not None:
                for new, old in zip(grown, pools, strict=True):
                    new[:, :, :slots] = old
            self._pools[plan.layer] = pools = grown
        return pools

    def _forget(self) -> None:
        self._pools = [None] * len(self.config.layers)


def _visible(plan: LayerPlan, device: torch.device) -> torch.Tensor:
    """Bool [n, keys]: which keys each query of the step sees."""
    queries = torch.arange(plan.start, plan.stop, device=device)[:, None]
    keys = torch.arange(plan.first_key, plan.stop, device=device)[None, :]
    visible = keys <= queries
    return visible if plan.window is None else visible & (keys > queries - plan.window)


register_builder("eager", "sequence", EagerSequenceCache)
