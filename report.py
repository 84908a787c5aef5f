"""What is read of a comparison: the table, stories side by side, the pictures, and a page that holds all in one file.

The page needs nothing beside it: pictures stand in it as data, and it loads and runs nothing, whatever a story says.
"""

import base64
import html
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import checkpoint
import pictures
import runtime
from pictures import Estimate
from runtime import UserError
from stories import marked

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  background: #fff }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem }
th, td { border-bottom: 1px solid #ccc; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top }
.numbers td, .numbers th { white-space: nowrap }
.stories td { min-width: 16rem; white-space: pre-wrap }
img { max-width: 100% }
figure { margin: 1.5rem 0 }
mark { background: #cfe6f5; font-weight: bold }
mark.again { background: #f6d6b8 }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
PICTURES = ("comparison", "frontier", "cost", "solving", "health")  # those that `drawn` may draw


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one model."""

    name: str
    scores: list[float]  # words used by instruction, 0 to 1
    words_used: Estimate  # share of the requested words, 0 to 1
    gained: Estimate  # words used minus the baseline's, paired by instruction
    losses: list[float]  # of each plain held-out story, nats
    loss: float  # on all of them, nats a token
    added: Estimate  # loss minus the baseline's, nats a token, paired by story
    cost: float | None  # loss added for a percentage point of words used gained; None where none is sure to be
    ended: float  # share of stories with an end of text within the limit
    length: float  # tokens a story, its end of text among them
    distinct_2: float  # share of distinct pairs of neighbouring tokens
    repeated_4: float  # share of 4-grams that stood in the same story before
    word_repeats: float  # how often a requested word that a story uses stands in it
    kl: float  # from the baseline, nats a story
    next_words: list[tuple[str, float]]  # likeliest after the opening, with probabilities
    accuracy: Estimate | None  # share of problems solved by the greedy answer; None without problems
    pass_at: dict[int, Estimate]  # by k, from 1 to all of a problem's answers; empty without problems
    stories: list[str]  # of the first instructions, to be read
    facts: dict[str, Any]  # of the checkpoint


def percent(value: Estimate, sign: str = "") -> str:
    """A share in percent with its interval."""
    return f"{100 * value.mean:{sign}.1f} [{100 * value.low:{sign}.1f}, {100 * value.high:{sign}.1f}]"


def rows_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The comparison as cells: a row of headings, then a row a model."""
    measures = ("words used %", "gained", "loss", "added", "ended", "length", "distinct-2", "repeated-4", "repeats")
    shown = sorted({min(results[0].pass_at), max(results[0].pass_at)}) if results[0].pass_at else []
    solving = ("accuracy %", *(f"pass@{k} %" for k in shown)) if results[0].accuracy else ()
    rows: list[tuple[str, ...]] = [("model", *measures, "KL", *solving)]
    for one in results:
        rows.append(
            (
                one.name,
                percent(one.words_used),
                percent(one.gained, sign="+"),
                f"{one.loss:.3f}",
                f"{one.added.mean:+.3f} [{one.added.low:+.3f}, {one.added.high:+.3f}]",
                f"{one.ended:.0%}",
                f"{one.length:.0f}",
                f"{one.distinct_2:.3f}",
                f"{one.repeated_4:.3f}",
                f"{one.word_repeats:.2f}",
                f"{one.kl:.2f}",
                *(percent(value) for value in (one.accuracy, *(one.pass_at[k] for k in shown)) if value),
            )
        )
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Cells as a Markdown table with a column a model: a page is too narrow for a column a measure."""
    lines = (" | ".join(cell.replace("|", "\\|") for cell in column) for column in zip(*rows, strict=True))
    head, *rest = (f"| {line} |" for line in lines)
    return "\n".join((head, "| --- " * len(rows) + "|", *rest))


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def side_by_side(told: Mapping[str, str], words: Iterable[str], width: int, narrowest: int) -> str:
    """Stories in columns under their names, requested words between asterisks, in lines of up to `width` characters.

    Columns that would be narrower than `narrowest` stand below each other instead.
    """
    words = list(words)
    room = (width - 3 * (len(told) - 1)) // len(told)
    if room < narrowest and len(told) > 1:
        return "\n\n".join(side_by_side({name: text}, words, width, narrowest) for name, text in told.items())
    columns = []
    for name, text in told.items():
        shown = "".join(f"*{piece}*" if times else piece for piece, times in marked(printable(text), words))
        lines = [line for part in shown.split("\n") for line in textwrap.wrap(part, max(1, room))]
        columns.append([*textwrap.wrap(name, max(1, room)), "", *(lines or ["(no text)"])])
    return "\n".join(
        "   ".join(cell.ljust(room) for cell in row).rstrip() for row in itertools.zip_longest(*columns, fillvalue="")
    )


def saved_rollouts() -> dict[str, list[tuple[float, float]]]:
    """Of each PPO run KL and words used of its saved rollouts, in order.

    A file that is cut short is left out and said: the comparison is measured by then.
    """
    runs: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(checkpoint.FOLDER.glob("ppo-*/rollout-*.pt")):
        try:
            facts = checkpoint.read(path, "python ppo.py").get("facts", {})
        except UserError as error:
            print(f"left out of the picture: {error}")
            continue
        if {"words_used", "kl"} <= facts.keys():
            runs.setdefault(path.parent.name, []).append((facts["kl"], facts["words_used"]))
    return runs


def logged_runs() -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Of each PPO run that has logged all of them, the metrics of `pictures.HEALTH` by rollout.

    A run whose metrics cannot be read is left out and said.
    """
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted(Path("runs").glob("ppo-*/metrics.jsonl")):
        try:
            lines = [line for line in runtime.logged(path.parent) if pictures.HEALTH.keys() <= line.keys()]
        except (OSError, ValueError) as error:
            print(f"left out of the picture: {path} ({error})")
            continue
        if lines:
            runs[path.parent.name] = {
                metric: [(line["step"], line[metric]) for line in lines] for metric in pictures.HEALTH
            }
    return runs


def drawn(results: Sequence[Result]) -> dict[str, tuple[Figure, str]]:
    """The pictures there is something to draw in, by name, each with what it shows."""
    first, *rest = results
    figures = {
        "comparison": (
            pictures.comparison(
                [one.name for one in results],
                [one.words_used for one in results],
                [one.loss for one in results],
                [one.added for one in results],
            ),
            "Requested words used on held-out instructions, and the loss on plain held-out stories.",
        ),
        "frontier": (
            pictures.frontier(
                {one.name: (one.kl, one.words_used) for one in results}, saved_rollouts(), baseline=first.name
            ),
            f"Words used against KL from {first.name}: the models, and every saved rollout of every PPO run.",
        ),
    }
    if rest:
        prices = {one.name: (one.gained, one.added, one.cost) for one in rest}
        text = "What the gained words cost: loss added on plain stories against words used gained."
        figures["cost"] = (pictures.cost(prices, baseline=first.name), text)
    if first.pass_at:
        text = "Word problems with a right answer among k sampled ones."
        figures["solving"] = (pictures.solving({one.name: one.pass_at for one in results}), text)
    runs = logged_runs()
    if runs:
        figures["health"] = (pictures.health(runs), "The reward of each PPO run, and what it does not see.")
    return figures


def marked_html(story: str, words: Iterable[str]) -> str:
    """A story with its requested words marked, from the second use of a word on with how often so far."""
    pieces = [
        f'<mark class="again">{html.escape(text)}<sup>{times}</sup></mark>'
        if times > 1
        else f"<mark>{html.escape(text)}</mark>"
        if times
        else html.escape(text)
        for text, times in marked(story, words)
    ]
    return "".join(pieces).strip() or "<i>no text</i>"


def html_table(rows: Sequence[Sequence[str]], kind: str) -> str:
    """Cells, which are HTML already, as a table; the first row and the first of each are headings."""
    head, *rest = rows
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += [f"<tr><th>{row[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rest]
    return f'<div class="wide"><table class="{kind}">\n' + "\n".join(lines) + "\n</table></div>"


def page(
    results: Sequence[Result],
    asked: Sequence[Sequence[str]],
    opening: str,
    drawn: Mapping[Path, str],
    facts: Mapping[str, str],
) -> str:
    """The comparison as one HTML file.

    asked: words of the instructions whose stories are shown. opening: what the likeliest next words follow. drawn: SVG
    pictures with what each shows. facts: where the numbers come from.
    """
    shown = ["", *(html.escape(one.name) for one in results)]
    told = [
        [html.escape(", ".join(words)), *(marked_html(one.stories[number], words) for one in results)]
        for number, words in enumerate(asked)
    ]
    likeliest = [
        [html.escape(one.name), *(f"{html.escape(word.strip())} {chance:.0%}" for word, chance in one.next_words)]
        for one in results
    ]
    figures = [
        f'<figure><img alt="{html.escape(text)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"><figcaption>{html.escape(text)}</figcaption></figure>'
        for path, text in drawn.items()
    ]
    ranks = ["model", *(str(rank) for rank in range(1, len(results[0].next_words) + 1))]
    source = "<br>".join(f"{html.escape(name)}: {html.escape(text)}" for name, text in facts.items())
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>Fable: {len(results)} models compared</title><style>{STYLE}</style></head><body>",
            f"<h1>Models compared</h1>\n<p>{source}</p>",
            html_table([[html.escape(cell) for cell in row] for row in rows_of(results)], "numbers"),
            "<p>In brackets: 95 % intervals. Gained, added (to the loss) and KL: compared with the first model. Loss:",
            "nats a token of plain held-out stories. Repeats: how often a used word stands in its story.</p>",
            *figures,
            f"<h2>Likeliest after “{html.escape(opening)}”</h2>",
            html_table([ranks, *likeliest], "numbers"),
            "<h2>The same instructions, answered by each</h2>",
            "<p>Requested words are <mark>marked</mark>, and with a number "
            '<mark class="again">where they come again<sup>2</sup></mark>.</p>',
            html_table([shown, *told], "stories"),
            "</body></html>\n",
        )
    )
