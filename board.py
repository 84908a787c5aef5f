"""What a PPO run shows beside its curves: side-by-side charts, stories, pictures, and warnings.

TensorBoard's custom scalars page puts reward and KL of all runs beside each other; its text page has the demo story and
a table of samples, its images page the pictures of `pictures.py`, a set at each evaluation. Nothing here draws a random
number, so what is shown changes no run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pictures
from runtime import Log, logged, markdown
from stories import marked

LAYOUT = {
    "All runs": {
        "reward of the rollouts (share of words used)": ["Multiline", ["objective/scores"]],
        "held-out words used (share)": ["Multiline", ["eval/words_used"]],
        "KL of the rollouts (nats a story)": ["Multiline", ["objective/kl"]],
        "held-out KL (nats a story)": ["Multiline", ["eval/kl"]],
    },
    "What the reward does not see": {
        "uses of a used word (times)": ["Multiline", ["stories/word_repeats"]],
        "distinct-2 (share of pairs)": ["Multiline", ["stories/distinct_2"]],
        "repeated 4-grams (share)": ["Multiline", ["stories/repeated_4"]],
        "length (tokens)": ["Multiline", ["stories/length"]],
    },
}


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Where a run warns, once for each: docs/metrics.md says why there."""

    kl: float = 60.0  # nats a story; the source's run at 0.05 ended at 22
    flat: int = 3  # rollouts in a row whose stories all earned the same
    ended: float = 0.2  # share of stories that end
    clipfrac: float = 1 / 3  # share of tokens beyond the clip
    late: int = 20  # rollouts from which on a critic should explain something


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a policy wrote on held-out instructions, and for the demo."""

    words_used: float  # share, 0 to 1
    kl: float  # from the reference, nats a story
    lengths: list[int]  # tokens of each held-out story
    ended: list[bool]  # whether each has an end of text
    demo: str
    pieces: list[str]  # the demo token by token, its end of text among them
    policy: list[float]  # probability of each of those under the policy
    reference: list[float]  # and under the reference
    next_words: list[tuple[str, float]]  # likeliest after a plain story's opening, with probabilities


def warnings(history: Sequence[dict[str, float]], limits: LimitsConfig) -> dict[str, str]:
    """What the metrics of the rollouts so far say is going wrong, and what to do about it, by metric."""
    last, recent = history[-1], history[-limits.flat :]
    flat = len(recent) == limits.flat and all(one["scores_spread"] == 0 for one in recent)
    clipped, kl, ended = last.get("policy/clipfrac", 0.0), last["objective/kl"], last["stories/ended"]
    blind = len(history) >= limits.late and last["value/explained_variance"] < 0
    found = {
        "objective/kl": (kl > limits.kl, f"{kl:.0f} nats a story: stories leave the language; raise KL, or stop here"),
        "objective/scores": (flat, f"the same for all stories of {limits.flat} rollouts: they teach nothing"),
        "stories/ended": (ended < limits.ended, f"only {ended:.0%} of the stories end; raise KL"),
        "policy/clipfrac": (clipped > limits.clipfrac, f"{clipped:.0%} of the tokens are clipped; lower --lr"),
        "value/explained_variance": (blind, f"below 0 after {len(history)} rollouts; change --critic-lr"),
    }
    return {name: text for name, (wrong, text) in found.items() if wrong}


def bold(story: str, words: Iterable[str]) -> str:
    """A story as one Markdown table cell, its requested words in bold."""
    pieces = ((markdown(text), times) for text, times in marked(story, words))
    return "".join(f"**{text}**" if times else text for text, times in pieces)


def sample_table(samples: Iterable[tuple[Sequence[str], str, float, float]]) -> str:
    """Words, story, words used and KL in nats of each sample as a Markdown table."""
    rows = ["| instruction | story | words used | KL |", "| --- | --- | --- | --- |"]
    for words, story, score, kl in samples:
        rows.append(f"| {markdown(', '.join(words))} | {bold(story, words)} | {score:.0%} | {kl:.1f} |")
    return "\n".join(rows)


def show(log: Log, step: int, seen: Evaluation, words: Sequence[str], opening: str, limit: int) -> None:
    """Logs an evaluation: its numbers, the demo story for `words`, the likeliest next words, and the pictures."""
    log.scalars(step, {"eval/words_used": seen.words_used, "eval/kl": seen.kl})
    log.text(step, "demo", bold(seen.demo, words))
    likeliest = ", ".join(f"{markdown(word.strip())} {chance:.0%}" for word, chance in seen.next_words)
    log.text(step, "next_words", f"{markdown(opening)} ... {likeliest}")
    so_far = [(line["eval/kl"], line["eval/words_used"]) for line in logged(log.folder) if "eval/kl" in line]
    for name, figure in (
        ("words_used_against_kl", pictures.frontier({}, {log.folder.name: so_far}, "the reference")),
        ("heldout_lengths", pictures.lengths(seen.lengths, seen.ended, limit)),
        (
            "demo_tokens",
            pictures.token_chances(seen.pieces, {"policy": seen.policy, "reference": seen.reference}),
        ),
    ):
        log.board.add_figure(f"pictures/{name}", figure, step)
    log.board.flush()
