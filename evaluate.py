"""Compares checkpoints: what training bought in words used, and what it cost in everything else.

    python evaluate.py                                  the models it finds in checkpoints/
    python evaluate.py checkpoints/ppo-0.05/final.pt    only these, next to the fine-tuned model
    python evaluate.py --problems 0                     without word problems, half the time

Reads `data/instructions-heldout.jsonl`, `data/stories-heldout.txt` and held-out generated problems. Writes
`runs/evaluate/results.json`, `comparison.png` and `frontier.png`, and prints a table. Every model meets the same
instructions with the same random numbers: a difference is the model's. Intervals are 95 % bootstraps (Efron 1979) over
instructions or problems, and for differences to the fine-tuned model over pairs of the same instruction.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import checkpoint
import runtime
import situations
import stories
import tokenizer
from model import GPT, ModelConfig, mean_loss, token_log_probs
from problems import Problem, pass_at_k
from runtime import Device, Precision, UserError
from sample import Completion, fits, generate, packed, right_answers
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
    length: float  # tokens a story, its end of text among them
    distinct_2: float  # share of distinct pairs of neighbouring tokens
    repeated_4: float  # share of 4-grams that stood in the same story before
    kl: float  # from the baseline, nats a story
    next_words: list[tuple[str, float]]  # likeliest after the opening, with probabilities
    accuracy: Estimate | None  # share of problems solved by the greedy answer; None without problems
    pass_at: dict[int, Estimate]  # by k, from 1 to all of a problem's answers; empty without problems
    facts: dict[str, Any]  # of the checkpoint


@dataclass(frozen=True, slots=True)
class Material:
    """What every model is measured on."""

    words: list[tuple[str, ...]]
    prompts: list[list[int]]
    plain: list[list[int]]  # ids of the held-out stories between two ends of text
    problems: list[Problem]
    dropped: dict[str, int]  # stories and problems that are longer than the context, left out


def bootstrap(values: Sequence[float], resamples: int, seed: int) -> Estimate:
    """Mean of the values with the 2.5th and 97.5th percentile of the means of resamples.

    Equal values, such as no right answer at all, give an interval of no width, which is narrower than the truth.
    Source: Efron 1979.
    """
    data = numpy.asarray(values, dtype=numpy.float64)
    rng = numpy.random.default_rng(seed)
    means = [data[rng.integers(len(data), size=len(data))].mean() for _ in range(resamples)]
    low, high = numpy.percentile(means, (2.5, 97.5))
    return Estimate(float(data.mean()), float(low), float(high))


@torch.no_grad()
def story_log_probs(model: GPT, told: Sequence[Completion], batch: int) -> list[float]:
    """Log-probability of each story after its prompt, nats."""
    found: list[float] = []
    for start in range(0, len(told), batch):
        ids, mask = packed(told[start : start + batch], model.device)
        found += token_log_probs(model, ids, mask).double().sum(1).tolist()
    return found


@torch.no_grad()
def likeliest_next(model: GPT, coder: Tokenizer, opening: str, number: int) -> list[tuple[str, float]]:
    """The likeliest tokens after a plain story's opening, with their probabilities."""
    ids = torch.tensor([[coder.end, *coder.encode(opening)]], device=model.device)  # (1, T)
    top = model(ids)[0, -1].float().softmax(-1).topk(min(number, coder.vocabulary))
    return [
        (coder.decode([token]), chance) for chance, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def stories_of(model: GPT, coder: Tokenizer, prompts: Sequence[list[int]], config: Config) -> list[Completion]:
    """A story for each prompt, the same random numbers for every model."""
    source = runtime.generator(config.seed, 1)
    told: list[Completion] = []
    for start in tqdm(range(0, len(prompts), config.batch), "stories", unit="batch", disable=None, leave=False):
        part = prompts[start : start + config.batch]
        told += generate(model, part, end=coder.end, limit=config.limit, generator=source)
    return told


def problem_estimates(
    model: GPT, coder: Tokenizer, asked: Sequence[Problem], config: Config
) -> tuple[Estimate | None, dict[int, Estimate]]:
    """Accuracy of greedy answers, and pass@k of sampled ones by k; none of them without problems."""
    if not asked:
        return None, {}
    how = {"limit": config.limit, "batch": config.batch}
    greedy = right_answers(
        model, coder, asked, answers=1, generator=runtime.generator(config.seed, 2), temperature=0.0, **how
    )
    right = right_answers(
        model, coder, asked, answers=config.answers, generator=runtime.generator(config.seed, 3), temperature=1.0, **how
    )
    pass_at = {
        k: bootstrap([pass_at_k(config.answers, count, k) for count in right], config.resamples, config.seed)
        for k in range(1, config.answers + 1)
    }
    return bootstrap(greedy, config.resamples, config.seed), pass_at


def material(coder: Tokenizer, baseline: GPT, config: Config) -> Material:
    """What to measure on; what does not fit the context is dropped and said.

    Raises: UserError where that leaves nothing to measure on.
    """
    context = baseline.config.context
    told = stories.read_stories(stories.HELDOUT_STORIES)
    plain = [[coder.end, *coder.encode(story.text), coder.end] for story in told]
    kept = [ids for ids in plain if len(ids) <= context]
    if not kept:
        raise UserError(f"{stories.HELDOUT_STORIES}: every story is longer than the context of {context} tokens")
    known = stories.read_instructions(stories.HELDOUT_INSTRUCTIONS)[: config.instructions]
    prompts = [coder.prompt(tokenizer.story_request(words)) for words in known]
    if not all(fits(baseline, prompt) for prompt in prompts):
        raise UserError(f"{stories.HELDOUT_INSTRUCTIONS}: an instruction does not fit the context of {context} tokens")
    if len(known) < config.instructions:
        print(f"{stories.HELDOUT_INSTRUCTIONS} has {len(known)} instructions, fewer than --instructions asks for")
    if len(coder.encode(config.opening)) >= context:
        raise UserError(f"--opening {config.opening[:20]!r}...: shorter than the context of {context} tokens")
    drawn = situations.generated_problems(config.problems, config.seed, "test")
    asked = [problem for problem in drawn if fits(baseline, coder.prompt(problem.question))]
    if drawn and not asked:
        raise UserError(f"--problems {len(drawn)}: none fits the context of {context} tokens; --problems 0 leaves out")
    dropped = {"stories": len(plain) - len(kept), "problems": len(drawn) - len(asked)}
    for name, of in (("stories", len(plain)), ("problems", len(drawn))):
        if dropped[name]:
            print(f"{dropped[name]} of {of} held-out {name} are longer than the context of {context} tokens, left out")
    return Material(known, prompts, kept, asked, dropped)


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
        others = story_log_probs(baseline, told, config.loss_batch)
        counts = [[False] + [True] * (len(ids) - 1) for ids in on.plain]
        loss = mean_loss(model, on.plain, counts, config.loss_batch)
        next_words = likeliest_next(model, coder, config.opening, config.next_words)
        accuracy, pass_at = problem_estimates(model, coder, on.problems, config)
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
        distinct_2=stories.distinct_pairs(ids),
        repeated_4=stories.repeated_4grams(ids),
        kl=sum(mine - theirs for mine, theirs in zip(own, others, strict=True)) / len(own),
        next_words=next_words,
        accuracy=accuracy,
        pass_at=pass_at,
        facts=facts,
    )


def found(config: Config) -> list[Path]:
    """The checkpoints to compare: those named, else every run's final or best model; the baseline first."""
    runs = [path for name in ("final", "best") for path in sorted(checkpoint.FOLDER.glob(f"*/{name}.pt"))]
    there = [path for path in (checkpoint.DPO, *runs) if path.exists()]
    by_place = {path.resolve(): path for path in (config.baseline, *(config.checkpoints or there))}
    return list(by_place.values())


def loaded(path: Path, device: torch.device, coder: Tokenizer, shape: ModelConfig | None) -> tuple[GPT, dict[str, Any]]:
    """A checkpoint's model and facts; its vocabulary must be the tokenizer's, its context that of `shape`.

    Raises: UserError where they are not, or where the checkpoint cannot be loaded.
    """
    model, facts = checkpoint.load(path, device)
    if model.config.vocabulary != coder.vocabulary:
        raise UserError(
            f"{path} has {model.config.vocabulary} tokens, {tokenizer.PATH} {coder.vocabulary}: train it with that one"
        )
    if shape is not None and model.config.context != shape.context:
        raise UserError(f"{path} has a context of {model.config.context} tokens, the baseline {shape.context}")
    return model, facts


def name_of(path: Path) -> str:
    """What a checkpoint is called in tables: its run, `finetuned` or `dpo`, or else its path."""
    if path.parent == checkpoint.FOLDER:
        return path.stem
    return path.parent.name if path.stem in ("final", "best") else str(path)


def table(results: Sequence[Result]) -> str:
    """The comparison as text: a row a model, a column a measure."""
    measures = ("words used %", "gained", "loss", "ended", "length", "distinct-2", "repeated-4", "KL")
    shown = sorted({min(results[0].pass_at), max(results[0].pass_at)}) if results[0].pass_at else []
    solving = ("accuracy %", *(f"pass@{k} %" for k in shown)) if results[0].accuracy else ()
    rows: list[tuple[str, ...]] = [("model", *measures, *solving)]
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
                *(percent(value) for value in (one.accuracy, *(one.pass_at[k] for k in shown)) if value),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def percent(value: Estimate, sign: str = "") -> str:
    """A share in percent with its interval."""
    return f"{100 * value.mean:{sign}.1f} [{100 * value.low:{sign}.1f}, {100 * value.high:{sign}.1f}]"


# Okabe and Ito's palette, told apart by everybody.
BLUE, ORANGE = "#0072B2", "#E69F00"
RUNS = ("#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "ovD^*"


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


def draw_frontier(results: Sequence[Result], saved: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Words used against KL: the models compared, with intervals, and every saved rollout of every run."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    looks = zip(saved.items(), itertools.cycle(RUNS), itertools.cycle(MARKERS), strict=False)
    for (name, run), color, marker in looks:
        used = [100 * facts["words_used"] for facts in run]
        axes.plot(
            [facts["kl"] for facts in run], used, marker=marker, ms=4, color=color, label=f"{name}, while it trained"
        )
    for index, one in enumerate(results):
        mean = 100 * one.words_used.mean
        error = [[mean - 100 * one.words_used.low], [100 * one.words_used.high - mean]]
        axes.errorbar(one.kl, mean, yerr=error, fmt="s", color=BLUE, capsize=3)
        side = (6, -14) if index % 2 else (6, 5)  # below and above in turn: models may lie close together
        axes.annotate(one.name, (one.kl, mean), textcoords="offset points", xytext=side)
    axes.margins(x=0.15)  # room for the last name
    axes.set_xlabel("KL from the fine-tuned model (nats a story)")
    axes.set_ylabel("requested words used (%), 95 % interval")
    if saved:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def saved_rollouts() -> dict[str, list[dict[str, Any]]]:
    """Of each run the facts of its saved rollouts, in order, those with words used and KL.

    A file that is cut short is left out and said: the comparison is measured by then.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(checkpoint.FOLDER.glob("ppo-*/rollout-*.pt")):
        try:
            facts = checkpoint.read(path, "python ppo.py").get("facts", {})
        except UserError as error:
            print(f"left out of the picture: {error}")
            continue
        if {"words_used", "kl"} <= facts.keys():
            runs.setdefault(path.parent.name, []).append(facts)
    return runs


def write_results(results: Sequence[Result], on: Material, config: Config, device: torch.device) -> None:
    """Writes the numbers and the two pictures."""
    content = {
        "command": sys.argv,
        "config": asdict(config),
        "machine": runtime.machine_facts(device, config.precision, config.seed),
        "dropped": on.dropped,
        "models": [asdict(one) for one in results],
    }
    text = json.dumps(content, indent=1, default=str)  # paths as text
    with writing():
        (FOLDER / "results.json").write_text(text + "\n", encoding="utf-8")
        draw_comparison(results, FOLDER / "comparison.png")
        draw_frontier(results, saved_rollouts(), FOLDER / "frontier.png")


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Context whose failure to write is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{FOLDER} cannot be written ({error.strerror}): free it, then run again") from None


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    baseline, _ = loaded(config.baseline, device, coder, None)
    on = material(coder, baseline, config)
    paths = found(config)
    for path in paths:  # what cannot be loaded or written is said before the first is measured, which takes minutes
        loaded(path, device, coder, baseline.config)
    with writing():
        FOLDER.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for path in paths:
        model, facts = loaded(path, device, coder, baseline.config)
        before = results[0].scores if results else None
        results.append(measured(name_of(path), model, facts, baseline, before, on, coder, config))
        print(f"{results[-1].name}: {percent(results[-1].words_used)} % of the words used", flush=True)
    print("\n" + table(results) + "\n")
    for one in results:
        likeliest = ", ".join(f"{word.strip()} {chance:.0%}" for word, chance in one.next_words)
        print(f"{one.name}: {config.opening} ... {likeliest}")
    write_results(results, on, config, device)
    print(f"{FOLDER / 'results.json'}, comparison.png, frontier.png")


if __name__ == "__main__":
    runtime.run(main)
