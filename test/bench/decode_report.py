"""Tables and the picture of what ``decode.py`` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import CELL, FLOOR, FORKED, HOST_LINES, ROOFLINE


def figure(value: float | None, per: float = 1, digits: int = 2) -> str:
    """Return a figure as text."""
    return "failed" if value is None else f"{value / per:,.{digits}f}"


def tables(results: dict[str, Any]) -> list[str]:
    """Return the results as Markdown."""
    rows, lines = results["decode"], []
    if rows:
        names = list(rows[0]["ms"])
        lines += [f"| tokens | B | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        batch, ms = row["batch"], row["ms"]
        cells = [figure(it) + (f" ({figure(1e3 * batch / it, digits=0)})" if it else "") for it in ms.values()]
        lines.append(f"| {span(row)} | {batch} | {' | '.join(cells)} |")
    if results["bandwidth"]:
        lines += ["", f"A copy reads and writes {results['bandwidth'] / 1e9:,.1f} GB/s."]
    if results["host"]:
        lines += ["", f"| B | {' | '.join(HOST_LINES)} | ratio |", "|---|---|---|---|"]
    for row in results["host"]:
        ours, through = (row["ms"][label] for label in HOST_LINES)
        ratio = figure(through / ours if ours and through else None)
        lines.append(f"| {row['batch']} | {figure(ours)} | {figure(through)} | {ratio} |")
    held, prompt = results["layouts"]["held"], results["prefill"]
    lines += [
        "",
        f"| | prefill of {prompt}, tokens/s | fork of {FORKED:,} tokens, ms | MB added | first step of both, ms"
        f" | pools of {held['batch']} sequences of {held['least']} to {held['most']} tokens, MB |",
        "|---|---|---|---|---|---|",
    ]
    for kind, row in results["layouts"]["kinds"].items():
        rate = prompt / row["prefill_s"] if row["prefill_s"] else None
        lines.append(
            f"| {kind} | {figure(rate, digits=0)} | {figure(row['fork_s'], 1e-3)} | {figure(row['bytes'], 2**20, 1)}"
            f" | {figure(row['step_s'], 1e-3)} | {figure(row['pool_bytes'], 2**20, 1)} |"
        )
    lines += ["", f"The tokens of these {held['batch']} sequences need {held['bytes'] / 2**20:,.1f} MB."]
    if "long" in results:
        row = results["long"]
        first, last = (figure(row[key], 1e-3) for key in ("first_s", "last_s"))
        lines += [
            "",
            f"{row['steps']} steps of two sequences in *{CELL}*: {first} ms in the first {row['part']}, {last} in the"
            f" last {row['part']}.",
        ]
    return lines


def span(row: dict[str, Any]) -> str:
    """Return the lengths of a row's sequences as text."""
    return f"{max(1, row['history'] // row['spread'])} to {row['history']}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step over the number of sequences, a panel per lengths."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(span(row), []).append(row)
    drawing = Figure(figsize=(4 * len(panels), 4.4), layout="constrained")
    all_axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, its) in zip(all_axes, panels.items(), strict=True):
        for label in rows[0]["ms"]:
            points = [(row["batch"], row["ms"][label]) for row in its if row["ms"].get(label)]
            is_floor = label in (FLOOR, ROOFLINE)
            style = (
                {"color": "gray" if label == FLOOR else "silver", "linestyle": "--"} if is_floor else {"marker": "o"}
            )
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row["batch"] for row in its])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{title} tokens each", fontsize=10)
        axes.set_xlabel("sequences")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("step, ms")
    handles, labels = all_axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    drawing.savefig(path, dpi=110)
