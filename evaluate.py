"""Compares checkpoints: what training bought in words used, and what it cost in everything else.

    python evaluate.py                                  the models it finds in checkpoints/
    python evaluate.py checkpoints/ppo-0.05/final.pt    only these, next to the fine-tuned model
    python evaluate.py --problems 0                     without word problems, half the time

Reads `data/instructions-heldout.jsonl`, `data/stories-heldout.txt` and held-out generated problems. Writes
`runs/evaluate/results.json`, `comparison.png` and `frontier.png`, and prints a table. Every model meets the same
instructions with the same random numbers: a difference is the model's. Intervals are 95 % bootstraps (Efron 1979) over
instructions or problems, and for differences to the fine-tuned model over pairs of the same instruction.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import checkpoint
import problems
import runtime
import stories
import tokenizer
from model import GPT, mean_loss, padded, token_log_probs
from problems import Problem
from runtime import Device, Precision, UserError
from sample import Completion, fits, generate, solve
from tokenizer import Tokenizer

FOLDER = Path("runs/evaluate")


@dataclass(frozen=True, slots=True)
class Config:
    """What to compare, and on how much."""

    checkpoints: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()  # models; without any, those that are found
    baseline: Path = checkpoint.FINETUNED  # the model that the others are compared with
    instructions: int = 200  # held-out instructions, a story each
    problems: int = 100  # held-out word problems; 0 leaves them out
    answers: int = 8  # answers to a problem, for pass@k
    limit: int = 200  # tokens of a story or an answer
    batch: int = 100  # rows decoded together
    loss_batch: int = 16  # rows scored together
    resamples: int = 10_000  # of a bootstrap
    opening: str = "Once upon a time, there was a little"  # whose next words are shown
    next_words: int = 5  # of them
    seed: int = 1
    device: Device = "auto"
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        for name, least in (
            ("instructions", 1),
            ("problems", 0),
            ("answers", 1),
            ("limit", 1),
            ("batch", 1),
            ("loss_batch", 1),
            ("resamples", 1),
            ("next_words", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least {least}")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one model."""

    name: str
    scores: list[float]  # words used by instruction, 0 to 1
    words_used: Estimate  # share of the requested words, 0 to 1
    gained: Estimate  # words used minus the baseline's, paired by instruction
    loss: float  # on plain held-out stories, nats a token
    ended: float  # share of stories with an end of text within the limit
    length: float  # tokens a story
    distinct_2: float  # share of distinct pairs of neighbouring tokens
    repeated_4: float  # share of 4-grams that stood in the same story before
    kl: float  # from the baseline, nats a story
    next_words: list[tuple[str, float]]  # likeliest after the opening, with probabilities
    accuracy: Estimate | None  # share of problems solved by the greedy answer
    pass_1: Estimate | None
    pass_8: Estimate | None  # at `answers` answers
    facts: dict[str, Any]  # of the checkpoint


@dataclass(frozen=True, slots=True)
class Material:
    """What every model is measured on."""

    words: list[tuple[str, ...]]
    prompts: list[list[int]]
    plain: list[list[int]]  # ids of the held-out stories between two ends of text
    problems: list[Problem]


def bootstrap(values: Sequence[float], resamples: int, seed: int) -> Estimate:
    """Mean of the values with the 2.5th and 97.5th percentile of the means of resamples. Source: Efron 1979."""
    data = numpy.asarray(values, dtype=numpy.float64)
    rng = numpy.random.default_rng(seed)
    means = [data[rng.integers(len(data), size=len(data))].mean() for _ in range(resamples)]
    low, high = numpy.percentile(means, (2.5, 97.5))
    return Estimate(float(data.mean()), float(low), float(high))


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Chance that k of `answers` answers, `right` of them right, hold a right one.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n-c, k) / C(n, k).
    Raises: ValueError where k answers are not to be had.
    """
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass@{k} of {answers} answers, {right} right")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def distinct_pairs(rows: Sequence[Sequence[int]]) -> float:
    """Share of distinct pairs among all pairs of neighbouring tokens, over all rows; 0 without pairs."""
    pairs = Counter(pair for row in rows for pair in itertools.pairwise(row))
    return len(pairs) / pairs.total() if pairs else 0.0


def repeated_4grams(rows: Sequence[Sequence[int]]) -> float:
    """Share of runs of four tokens that stood earlier in the same row, over all rows; 0 without such runs."""
    runs = [[tuple(row[start : start + 4]) for start in range(len(row) - 3)] for row in rows]
    total = sum(map(len, runs))
    return sum(len(own) - len(set(own)) for own in runs) / total if total else 0.0


@torch.no_grad()
def story_log_probs(model: GPT, told: Sequence[Completion], batch: int) -> list[float]:
    """Log-probability of each story after its prompt, nats."""
    found: list[float] = []
    for start in range(0, len(told), batch):
        part = told[start : start + batch]
        rows = [story.prompt + story.ids for story in part]
        counts = [[False] * len(story.prompt) + story.sampled for story in part]
        ids, mask = padded(rows, counts, model.device)
        found += token_log_probs(model, ids, mask).double().sum(1).tolist()
    return found


@torch.no_grad()
def likeliest_next(model: GPT, coder: Tokenizer, opening: str, number: int) -> list[tuple[str, float]]:
    """The likeliest tokens after a plain story's opening, with their probabilities."""
    ids = torch.tensor([[coder.end, *coder.encode(opening)]], device=model.device)
    top = model(ids)[0, -1].float().softmax(-1).topk(min(number, coder.vocabulary))
    return [
        (coder.decode([token]), chance) for chance, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def stories_of(model: GPT, coder: Tokenizer, prompts: Sequence[list[int]], config: Config) -> list[Completion]:
    """A story for each prompt, the same random numbers for every model."""
    source = runtime.generator(config.seed, 1)
    told: list[Completion] = []
    for start in tqdm(range(0, len(prompts), config.batch), desc="stories", unit="batch", disable=None, leave=False):
        part = prompts[start : start + config.batch]
        told += generate(model, part, end=coder.end, limit=config.limit, generator=source)
    return told


def answers_right(
    model: GPT, coder: Tokenizer, asked: Sequence[Problem], config: Config, temperature: float
) -> list[bool]:
    """Whether the model's answer to each problem is right, calculator in the loop."""
    source = runtime.generator(config.seed, 2)
    right: list[bool] = []
    for start in tqdm(range(0, len(asked), config.batch), desc="problems", unit="batch", disable=None, leave=False):
        part = asked[start : start + config.batch]
        questions = [problem.question for problem in part]
        told = solve(model, coder, questions, limit=config.limit, generator=source, temperature=temperature)
        right += [
            problems.grade(coder.answer_text(answer.ids), problem.answer)
            for answer, problem in zip(told, part, strict=True)
        ]
    return right


def problem_estimates(
    model: GPT, coder: Tokenizer, asked: Sequence[Problem], config: Config
) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    """Accuracy of greedy answers, pass@1 and pass@`answers` of sampled ones; None without problems."""
    if not asked:
        return None, None, None
    greedy = answers_right(model, coder, asked, config, 0.0)
    repeated = [problem for problem in asked for _ in range(config.answers)]
    flat = answers_right(model, coder, repeated, config, 1.0)
    right = [sum(flat[start : start + config.answers]) for start in range(0, len(flat), config.answers)]
    first, last = (
        bootstrap([pass_at_k(config.answers, count, k) for count in right], config.resamples, config.seed)
        for k in (1, config.answers)
    )
    return bootstrap(greedy, config.resamples, config.seed), first, last


def material(coder: Tokenizer, context: int, config: Config) -> Material:
    """What to measure on; what does not fit the context is dropped and said.

    Raises: UserError where nothing is left.
    """
    told = stories.read_stories(stories.HELDOUT_STORIES)
    plain = [[coder.end, *coder.encode(story.text), coder.end] for story in told]
    kept = [ids for ids in plain if len(ids) <= context]
    if not kept:
        raise UserError(f"{stories.HELDOUT_STORIES}: every story is longer than the context of {context} tokens")
    if len(kept) < len(plain):
        print(f"{len(plain) - len(kept)} of {len(plain)} held-out stories are longer than the context, left out")
    known = stories.read_instructions(stories.HELDOUT_INSTRUCTIONS)[: config.instructions]
    prompts = [coder.prompt(tokenizer.story_request(words)) for words in known]
    if max(map(len, prompts)) >= context:
        raise UserError(f"{stories.HELDOUT_INSTRUCTIONS}: an instruction does not fit the context of {context} tokens")
    if len(known) < config.instructions:
        print(f"{stories.HELDOUT_INSTRUCTIONS} has {len(known)} instructions, fewer than --instructions asks for")
    asked = problems.generated_problems(config.problems, config.seed, "test")
    return Material(known, prompts, kept, asked)


def measured(
    name: str,
    model: GPT,
    facts: dict[str, Any],
    baseline: GPT,
    before: list[float] | None,
    on: Material,
    coder: Tokenizer,
    config: Config,
) -> Result:
    """Everything about one model; `before` are the baseline's scores by instruction, None for the baseline itself."""
    with runtime.autocast(model.device, config.precision):
        told = stories_of(model, coder, on.prompts, config)
        own = story_log_probs(model, told, config.loss_batch)
        others = own if model is baseline else story_log_probs(baseline, told, config.loss_batch)
        counts = [[False] + [True] * (len(ids) - 1) for ids in on.plain]
        loss = mean_loss(model, on.plain, counts, config.loss_batch)
        next_words = likeliest_next(model, coder, config.opening, config.next_words)
        asked = [problem for problem in on.problems if fits(model, coder.prompt(problem.question))]
        accuracy, pass_1, pass_8 = problem_estimates(model, coder, asked, config)
    scores = [
        stories.words_used(coder.answer_text(story.ids), words) for story, words in zip(told, on.words, strict=True)
    ]
    gains = [score - other for score, other in zip(scores, before or scores, strict=True)]
    ids = [story.ids for story in told]
    return Result(
        name=name,
        scores=scores,
        words_used=bootstrap(scores, config.resamples, config.seed),
        gained=bootstrap(gains, config.resamples, config.seed),
        loss=loss,
        ended=sum(story.ended for story in told) / len(told),
        length=sum(map(len, ids)) / len(ids),
        distinct_2=distinct_pairs(ids),
        repeated_4=repeated_4grams(ids),
        kl=sum(mine - theirs for mine, theirs in zip(own, others, strict=True)) / len(own),
        next_words=next_words,
        accuracy=accuracy,
        pass_1=pass_1,
        pass_8=pass_8,
        facts=facts,
    )


def found(config: Config) -> list[Path]:
    """The checkpoints to compare: those named, else every final model that is there, the baseline first."""
    named = config.checkpoints or (
        checkpoint.DPO,
        *sorted(checkpoint.FOLDER.glob("*/final.pt")),
    )
    there = [path for path in named if config.checkpoints or path.exists()]
    return list(dict.fromkeys([config.baseline, *there]))


def table(results: Sequence[Result]) -> str:
    """The comparison as text: a row a model, a column a measure."""
    head = (
        "model",
        "words used",
        "gained",
        "loss",
        "ended",
        "length",
        "distinct-2",
        "repeated-4",
        "KL",
        "accuracy",
        "pass@1",
        "pass@8",
    )
    rows: list[tuple[str, ...]] = [head]
    for one in results:
        rows.append(
            (
                one.name,
                percent(one.words_used),
                percent(one.gained, sign="+"),
                f"{one.loss:.3f}",
                f"{one.ended:.0%}",
                f"{one.length:.0f}",
                f"{one.distinct_2:.3f}",
                f"{one.repeated_4:.3f}",
                f"{one.kl:.2f}",
                *(percent(value) if value else "-" for value in (one.accuracy, one.pass_1, one.pass_8)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def percent(value: Estimate, sign: str = "") -> str:
    """A share in percent with its interval."""
    return f"{100 * value.mean:{sign}.1f} [{100 * value.low:{sign}.1f}, {100 * value.high:{sign}.1f}]"


BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#7F7F7F"  # of Okabe and Ito's palette, told apart by all


def draw_comparison(results: Sequence[Result], path: Path) -> None:
    """Words used as bars with intervals, and the loss on plain stories beside them."""
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [one.name for one in results]
    means = [100 * one.words_used.mean for one in results]
    below = [100 * (one.words_used.mean - one.words_used.low) for one in results]
    above = [100 * (one.words_used.high - one.words_used.mean) for one in results]
    left.barh(names, means, xerr=[below, above], color=BLUE, capsize=3)
    left.set_xlabel("requested words used (%), 95 % interval")
    right.barh(names, [one.loss for one in results], color=ORANGE)
    right.set_xlabel("loss on plain held-out stories (nats a token)")
    left.invert_yaxis()
    figure.savefig(path, dpi=150)


def draw_frontier(results: Sequence[Result], saved: Sequence[dict[str, Any]], path: Path) -> None:
    """Words used against KL: the models compared, and every saved rollout of every run."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for weight in sorted({facts["kl_weight"] for facts in saved}):
        run = sorted((facts for facts in saved if facts["kl_weight"] == weight), key=lambda facts: int(facts["step"]))
        label = f"rollouts at KL weight {weight:g} (their own 50 instructions)"
        axes.plot([f["kl"] for f in run], [100 * f["words_used"] for f in run], "o-", ms=3, color=GREY, label=label)
    for one in results:
        axes.plot(one.kl, 100 * one.words_used.mean, "s", color=BLUE)
        axes.annotate(one.name, (one.kl, 100 * one.words_used.mean), textcoords="offset points", xytext=(5, 4))
    axes.set_xlabel("KL from the fine-tuned model (nats a story)")
    axes.set_ylabel("requested words used (%)")
    if saved:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def saved_rollouts() -> list[dict[str, Any]]:
    """Facts of every rollout that a run saved with its words used and KL."""
    paths = sorted(checkpoint.FOLDER.glob("ppo-*/rollout-*.pt"))
    known = [checkpoint.read(path, "python ppo.py").get("facts", {}) for path in paths]
    return [facts for facts in known if {"words_used", "kl", "kl_weight", "step"} <= facts.keys()]


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    baseline, _ = checkpoint.load(config.baseline, device)
    on = material(coder, baseline.config.context, config)
    results: list[Result] = []
    for path in found(config):
        model, facts = checkpoint.load(path, device)
        if path == config.baseline:
            model = baseline
        before = results[0].scores if results else None
        if model.config.vocabulary != coder.vocabulary or model.config.context != baseline.config.context:
            raise UserError(f"{path} has another vocabulary or context than {tokenizer.PATH} and {config.baseline}")
        name = (
            path.stem if path.parent == checkpoint.FOLDER else path.parent.name if path.stem == "final" else str(path)
        )
        results.append(measured(name, model, facts, baseline, before, on, coder, config))
        print(f"{name}: {percent(results[-1].words_used)} % of the words used", flush=True)
    print("\n" + table(results) + "\n")
    for one in results:
        print(
            f"{one.name}: {config.opening} ... "
            + ", ".join(f"{word.strip()} {chance:.0%}" for word, chance in one.next_words)
        )
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        facts = runtime.machine_facts(device, config.precision, config.seed)
        content = {"machine": facts, "models": [asdict(one) for one in results]}
        (FOLDER / "results.json").write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        draw_comparison(results, FOLDER / "comparison.png")
        draw_frontier(results, saved_rollouts(), FOLDER / "frontier.png")
    except OSError as error:
        raise UserError(f"{FOLDER} cannot be written ({error.strerror}): free it, then run again") from None
    print(f"{FOLDER / 'results.json'}, comparison.png, frontier.png")


if __name__ == "__main__":
    runtime.run(main)
