"""Draws the pictures of docs/cache.md, from caches that have been driven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch

from executorch_mlx.extension.llm.cache import CacheConfig, LayerConfig, build

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Rectangle

COLOURS = {"A": "#7aa6dc", "B": "#f0b26b", "C": "#8cc48c", "AB": "#b9a3d0"}
DOCS = Path(__file__).resolve().parents[1] / "docs"


def feed(cache: Any, ids: Sequence[int] | int) -> None:
    """Run a step: of tokens of each id named, or of so many tokens of the one sequence there is."""
    if isinstance(ids, int):
        positions = list(range(cache.position, cache.position + ids))
    else:
        assert cache.declare_step(ids)
        positions = [cache.pos(seq_id) + list(ids[:row]).count(seq_id) for row, seq_id in enumerate(ids)]
    rows = torch.randn(1, 1, len(positions), 4)
    with cache.step():
        for layer in range(len(cache.config.layers)):
            cache.attend(layer, positions, rows, rows, rows, 1.0)


def draw(name: str, pools: dict[str, list[tuple[str, str] | None]], note: str) -> None:
    """Draw a row of slots for each pool: (owner, position) in those that hold a token."""
    width = max(map(len, pools.values()))
    figure, axis = pyplot.subplots(figsize=(0.55 * width + 2.6, 0.85 * len(pools) + 0.7), layout="constrained")
    for row, (title, slots) in enumerate(pools.items()):
        y = -1.4 * row
        axis.text(-0.3, y + 0.5, title, ha="right", va="center", fontsize=10)
        for slot, held in enumerate(slots):
            colour = COLOURS[held[0]] if held else "white"
            axis.add_patch(Rectangle((slot, y), 1, 1, facecolor=colour, edgecolor="#444444"))
            if held:
                axis.text(slot + 0.5, y + 0.5, f"{held[0]}{held[1]}", ha="center", va="center", fontsize=8)
            axis.text(slot + 0.5, y - 0.2, str(slot), ha="center", va="center", fontsize=6, color="#777777")
    axis.text(0, 1.3, note, fontsize=9, color="#444444")
    axis.set(xlim=(-3.4, width + 0.2), ylim=(-1.4 * len(pools) + 0.9, 1.8))
    axis.axis("off")
    figure.savefig(DOCS / f"{name}.png", dpi=110)
    pyplot.close(figure)


def slots_of(cache: Any, layer: int, owner: str, num_slots: int) -> list[tuple[str, str] | None]:
    """Return what a sequence's pool holds."""
    policy, position = cache._policies[layer], cache.position
    slots: list[tuple[str, str] | None] = [None] * num_slots
    for p in range(max(0, position - policy.slots), position):
        (run,) = policy.runs(p, p + 1)
        slots[run.slot] = (owner, str(p))
    return slots


def main() -> None:
    """Draw all three."""
    flat, ring = LayerConfig(1, 4), LayerConfig(1, 4, window=4)
    one = build("eager", "sequence", CacheConfig(16, [flat, ring], "float32", max_write=2))
    for _ in range(5):
        feed(one, 2)
    draw(
        "cache-sequence",
        {"full history": slots_of(one, 0, "A", 16), "window 4, max_write 2": slots_of(one, 1, "A", 5)},
        "ten tokens, two a step; A9 is the token at position 9",
    )
    private = build("eager", "batched-sequence", CacheConfig(32, [flat], "float32"))
    first, second = private.seq_new(), private.seq_new()
    feed(private, [first] * 5 + [second] * 3)
    fork = private.seq_clone(first, 3)
    feed(private, [first, second, fork, fork])
    names = {"A": first, "B": second, "C": fork}
    draw(
        "cache-batched-sequence",
        {f"pool of {name}": slots_of(private._live[seq_id], 0, name, 8) for name, seq_id in names.items()},
        "C was cloned from A below position 3: a copy of the prefix",
    )
    cells = build("eager", "batched-cell", CacheConfig(16, [flat], "float32"))
    first = cells.seq_new()
    feed(cells, [first] * 4)
    fork = cells.seq_clone(first, 3)
    for _ in range(3):
        feed(cells, [first, fork])
    owners: list[tuple[str, str]] = [("", "")] * 16
    for name, seq_id in (("A", first), ("B", fork)):
        tokens = cells.tokens(seq_id)
        for cell, position in zip(tokens.cells, tokens.positions, strict=True):
            owners[cell] = (owners[cell][0] + name, str(position))
    draw(
        "cache-batched-cell",
        {"one pool of cells": [held if held[0] else None for held in owners]},
        "B was cloned from A below position 3: AB0 to AB2 belong to both, nothing was copied",
    )


if __name__ == "__main__":
    main()
