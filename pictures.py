"""Figures of plain numbers, for the README, the report and TensorBoard.

Each function returns a matplotlib `Figure`; `save` writes one as PNG and SVG. Colours are Okabe and Ito's (2008), told
apart by everybody, and no difference is told by colour alone; every axis names its unit, every interval is 95 %. The
width suits a README: 8 inches are 1,200 pixels.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#767676"
COLOURS = ("#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00", "#0072B2")
MARKERS = "ovD^*P"
SIDES: tuple[dict[str, Any], ...] = (
    {"xytext": (6, 5), "ha": "left", "va": "bottom"},
    {"xytext": (6, -5), "ha": "left", "va": "top"},
    {"xytext": (-6, 5), "ha": "right", "va": "bottom"},
    {"xytext": (-6, -5), "ha": "right", "va": "top"},
)  # of a point its name may stand on, in turn: models may lie close together
WIDTH = 8.0  # inches
LINE = 96  # characters of a story a line
HEALTH = {
    "objective/scores": "reward (share of words used)",
    "stories/word_repeats": "uses of a used word (times)",
    "stories/distinct_2": "distinct-2 (share of pairs)",
    "stories/repeated_4": "repeated 4-grams (share)",
}  # of what a run logs: the reward, and what it does not see


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def has_glyph(char: str) -> bool:
    """Whether matplotlib's own fonts draw a character: Latin letters and English punctuation."""
    return char.isprintable() and (ord(char) < 0x250 or 0x2010 <= ord(char) <= 0x2026 or char == "↵")


def plain(text: str) -> str:
    """Text of a user or model as matplotlib shows it and does not obey it: no formula, no missing glyph."""
    known = (char if has_glyph(char) else "\N{REPLACEMENT CHARACTER}" for char in text)
    shown = "".join(known).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown  # a legend leaves out what begins with _


def whiskers(values: Sequence[Estimate], scale: float = 1.0) -> list[list[float]]:
    """How far the intervals reach below and above their means, as `errorbar` takes them."""
    below = [scale * (value.mean - value.low) for value in values]
    return [below, [scale * (value.high - value.mean) for value in values]]


def comparison(
    names: Sequence[str], used: Sequence[Estimate], losses: Sequence[float], added: Sequence[Estimate]
) -> Figure:
    """Words used of each model as bars, and the loss on plain stories beside them.

    used: shares, 0 to 1. losses: nats a token. added: losses minus the baseline's, nats a token.
    """
    figure = Figure(figsize=(WIDTH, 1.4 + 0.4 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = range(len(names))
    left.barh(rows, [100 * one.mean for one in used], xerr=whiskers(used, 100), color=BLUE, capsize=3)
    left.set_xlabel("requested words used (%)\nwith 95 % interval")
    left.set_yticks(rows, [plain(name) for name in names])
    left.invert_yaxis()
    right.errorbar(losses, rows, xerr=whiskers(added), fmt="o", color="#D55E00", capsize=3)
    right.set_xlabel("loss on plain held-out stories (nats a token)\nwith 95 % interval of the difference to the first")
    right.margins(x=0.2)
    right.grid(axis="x", alpha=0.3)
    return figure


def frontier(
    models: Mapping[str, tuple[float, Estimate]], runs: Mapping[str, Sequence[tuple[float, float]]], baseline: str
) -> Figure:
    """Words used against KL from the baseline: models as squares with intervals, the saved rollouts of runs as lines.

    models: by name, KL in nats a story and the share of words used. runs: by name, the same two of each rollout.
    """
    figure = Figure(figsize=(WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, points), colour, marker in zip(
        runs.items(), itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False
    ):
        kl, used = [one for one, _ in points], [100 * share for _, share in points]
        axes.plot(kl, used, marker=marker, ms=4, lw=1, color=colour, label=f"{plain(name)}, as it trained")
    for (name, (apart, share)), side in zip(models.items(), itertools.cycle(SIDES), strict=False):
        axes.errorbar(apart, 100 * share.mean, yerr=whiskers([share], 100), fmt="s", color=BLUE, capsize=3)
        axes.annotate(plain(name), (apart, 100 * share.mean), textcoords="offset points", **side)
    axes.margins(x=0.15)  # room for the last name
    axes.set_xlabel(f"KL from {plain(baseline)} (nats a story)")
    axes.set_ylabel("requested words used (%)" + (", with 95 % interval" if models else ""))
    axes.grid(alpha=0.3)
    if runs:
        axes.legend(fontsize="small")
    return figure


def cost(models: Mapping[str, tuple[Estimate, Estimate, float | None]], baseline: str) -> Figure:
    """What words cost in language: the loss added on plain stories against the words used gained, of each model.

    models: by name, words used minus the baseline's, 0 to 1; loss minus the baseline's, nats a token; and loss for a
    gained point, None where the gain is not told from none.
    """
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color=GREY, lw=0.8)
    axes.axvline(0, color=GREY, lw=0.8)
    looks = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(SIDES), strict=False)
    for (name, (gained, added, price)), (colour, marker, side) in zip(models.items(), looks, strict=False):
        across, up = whiskers([gained], 100), whiskers([added])
        axes.errorbar(100 * gained.mean, added.mean, xerr=across, yerr=up, fmt=marker, color=colour, capsize=3)
        text = plain(name) + ("" if price is None else f"\n{price:.4f} nats a point")
        axes.annotate(text, (100 * gained.mean, added.mean), textcoords="offset points", fontsize=9, **side)
    axes.margins(0.25)
    axes.set_xlabel(f"words used, gained over {plain(baseline)} (percentage points, with 95 % interval)")
    axes.set_ylabel("loss on plain stories, added\n(nats a token, with 95 % interval)")
    axes.grid(alpha=0.3)
    return figure


def solving(curves: Mapping[str, Mapping[int, Estimate]]) -> Figure:
    """Share of word problems with a right answer among k, against k, of each model."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    shift = 0.0  # so that intervals do not cover each other
    for (name, pass_at), colour, marker in zip(
        curves.items(), itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False
    ):
        values = list(pass_at.values())
        k = [number + shift for number in pass_at]
        means = [100 * value.mean for value in values]
        axes.errorbar(
            k, means, yerr=whiskers(values, 100), marker=marker, color=colour, capsize=2, lw=1, label=plain(name)
        )
        shift += 0.05
    axes.set_xticks(sorted({number for pass_at in curves.values() for number in pass_at}))
    axes.set_xlabel("k (answers to a problem)")
    axes.set_ylabel("pass@k: problems with a right answer\namong k (%), with 95 % interval")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def health(runs: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> Figure:
    """The reward of each run beside what it does not see, by rollout.

    runs: by run and metric of `HEALTH`, rollouts with their values.
    """
    figure = Figure(figsize=(WIDTH, 5.5), layout="constrained")
    for (metric, label), axes in zip(HEALTH.items(), figure.subplots(2, 2, sharex=True).flat, strict=True):
        for (name, curves), colour, style in zip(
            runs.items(), itertools.cycle(COLOURS), itertools.cycle(("-", "--", "-.", ":")), strict=False
        ):
            steps, values = [step for step, _ in curves[metric]], [value for _, value in curves[metric]]
            axes.plot(steps, values, style, marker=".", ms=3, color=colour, lw=1, label=plain(name))
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    for axes in figure.axes[-2:]:
        axes.set_xlabel("rollout")
    figure.axes[0].legend(fontsize="x-small")
    return figure


def lengths(told: Sequence[int], ended: Sequence[bool], limit: int) -> Figure:
    """How many stories have which length, those with an end of text apart from those that were cut.

    told: tokens of each story. ended: whether it has an end of text.
    """
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    of_kind = [[length for length, end in zip(told, ended, strict=True) if end == kind] for kind in (True, False)]
    axes.hist(of_kind, bins=20, range=(0, limit), stacked=True, color=(BLUE, ORANGE), label=("ended", "cut"))
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("stories")
    axes.legend(fontsize="small")
    return figure


def token_chances(pieces: Sequence[str], chances: Mapping[str, Sequence[float]]) -> Figure:
    """A story token by token on the colour of its probability, once for each model.

    pieces: text of each token. chances: by model, the probability of each token given those before it.
    """
    places, lines = token_places(pieces)
    height = 0.6 + len(chances) * (0.35 + 0.19 * lines)
    figure = Figure(figsize=(9, height), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(chances), 1, squeeze=False).flat)
    for axes, (name, values) in zip(panels, chances.items(), strict=True):
        boxes = [Rectangle((x, y), max(len(text), 1), 0.9) for text, x, y in places]
        colours = PatchCollection(boxes, cmap="cividis")
        colours.set_array(values)
        colours.set_clim(0, 1)
        axes.add_collection(colours)
        for (text, x, y), chance in zip(places, values, strict=True):
            shade = "white" if chance < 0.5 else "black"
            axes.text(x, y + 0.7, plain(text), family="monospace", fontsize=8, color=shade, in_layout=False)
        axes.set_xlim(0, LINE + 12)
        axes.set_ylim(lines, 0)
        axes.set_axis_off()
        axes.set_title(plain(name), loc="left", fontsize=10)
    figure.colorbar(colours, ax=panels, label="probability of the token", aspect=10 * len(chances), pad=0.01)
    return figure


def token_places(pieces: Sequence[str]) -> tuple[list[tuple[str, int, int]], int]:
    """Text, column and line of each token on lines of about `LINE` characters, and the number of lines."""
    places = []
    x, y = 0, 0
    for piece in pieces:
        text = piece.replace("\n", "↵")
        if x and x + len(text) > LINE:
            x, y = 0, y + 1
        places.append((text, x, y))
        x += len(text)
        if "\n" in piece:
            x, y = 0, y + 1
    return places, y + 1


def save(figure: Figure, stem: Path) -> None:
    """Writes the figure as `stem` with `.png` and `.svg` behind; the same figure gives the same bytes."""
    figure.savefig(f"{stem}.png", dpi=150)
    with matplotlib.rc_context({"svg.hashsalt": "fable"}):
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
