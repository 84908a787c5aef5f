"""Compares checkpoints: what training bought in words used, and what it cost in everything else.

    python evaluate.py                          the models it finds in checkpoints/
    python evaluate.py ppo-0.05 dpo             only these, next to the fine-tuned model
    python evaluate.py --problems 0             without word problems, half the time
    python evaluate.py --problems 400 --problems-file data/gsm8k/test.jsonl
    python evaluate.py --compare ppo-0.05 dpo   stories of these side by side, and nothing measured

Reads `data/instructions-heldout.jsonl`, `data/stories-heldout.txt`, held-out generated problems, and of PPO runs the
saved rollouts and `runs/ppo-*/metrics.jsonl`. Prints a table and writes to `runs/evaluate/` (`--folder`)
`results.json`, `table.md`, `report.html`, which needs nothing beside it, and pictures as PNG and SVG, in place of
earlier ones. Every model meets the same instructions with the same random numbers: a difference is the model's.
Intervals are 95 % bootstraps (Efron 1979) over instructions, stories or problems, and for differences to the
fine-tuned model over pairs of the same instruction or story.
"""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from tqdm import tqdm

import checkpoint
import distributed
import pictures
import problems
import report
import runtime
import sample
import situations
import stories
import tokenizer
from model import GPT, ModelConfig, token_log_probs
from pictures import Estimate
from problems import Problem, pass_at_k
from report import Result, percent
from runtime import Checked, Count, Device, Precision, Seed, UserError
from sample import Completion, fits, generate, likeliest_next, packed, right_answers
from tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """What to compare, and on how much."""

    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # names or files; without any, all it finds
    compare: tuple[str, ...] = ()  # names or files of models whose stories are printed side by side, and no more
    baseline: Path = checkpoint.FINETUNED  # the model that the others are compared with
    instructions: Count = 200  # held-out instructions, a story each
    problems: Annotated[int, runtime.at_least(0)] = 100  # held-out word problems; 0 leaves them out
    problems_file: Path | None = None  # GSM8K file to take them from; generated ones otherwise
    answers: Count = 8  # answers to a problem, for pass@k
    limit: Count = 200  # tokens of a story or an answer
    batch: Count = 100  # rows decoded together
    loss_batch: Count = 16  # rows scored together
    resamples: Count = 10_000  # of a bootstrap
    shown: Count = 3  # held-out instructions whose stories are printed or stand in the report
    narrowest: Count = 30  # characters of a column of stories; narrower ones stand below each other
    opening: str = sample.OPENING  # whose next words are shown
    next_words: Count = sample.NEXT_WORDS  # of them
    folder: Path = Path("runs/evaluate")  # for the report and its pictures
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"


@dataclass(frozen=True, slots=True)
class Material:
    """What every model is measured on."""

    words: list[tuple[str, ...]]
    prompts: list[list[int]]
    plain: list[list[int]]  # ids of the held-out stories between two ends of text
    problems: list[Problem]
    dropped: dict[str, int]  # stories and problems that are longer than the context, left out


def bootstrap(totals: Sequence[float], resamples: int, seed: int, counts: Sequence[float] | None = None) -> Estimate:
    """Sum of the totals over sum of the counts, with the 2.5th and 97.5th percentile of that of resamples of both.

    totals: of each instruction, problem or story. counts: what each is the total of, such as a story's tokens; 1
    without, which gives the mean.
    Equal values, such as no right answer at all, give an interval of no width, which is narrower than the truth.
    Source: Efron 1979.
    """
    over, under = numpy.asarray(totals, dtype=numpy.float64), numpy.asarray(counts or [1] * len(totals))
    assert over.shape == under.shape, (over.shape, under.shape)
    rng = numpy.random.default_rng(seed)
    draws = (rng.integers(len(over), size=len(over)) for _ in range(resamples))
    low, high = numpy.percentile([over[drawn].sum() / under[drawn].sum() for drawn in draws], (2.5, 97.5))
    return Estimate(float(over.sum() / under.sum()), float(low), float(high))


def cost_of_a_point(gained: Estimate, added: Estimate) -> float | None:
    """Loss added for each percentage point of words used gained; None where the interval of the gain reaches 0."""
    return added.mean / (100 * gained.mean) if gained.low > 0 else None


@torch.no_grad()
def story_log_probs(model: GPT, told: Sequence[Completion], batch: int) -> list[float]:
    """Log-probability of each story after its prompt, nats."""
    found: list[float] = []
    for start in range(0, len(told), batch):
        ids, mask = packed(told[start : start + batch], model.device)
        found += token_log_probs(model, ids, mask).cpu().double().sum(1).tolist()  # MPS has no float64
    return found


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
    drawn = (
        problems.read_problems(config.problems_file)[: config.problems]
        if config.problems_file
        else situations.generated_problems(config.problems, config.seed, "test")
    )
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
    before: Result | None,
    on: Material,
    coder: Tokenizer,
    config: Config,
) -> Result:
    """Everything about one model; `before` is the baseline's result, None for the baseline itself."""
    with runtime.autocast(model.device, config.precision):
        told = stories_of(model, coder, on.prompts, config)
        own = story_log_probs(model, told, config.loss_batch)
        others = story_log_probs(baseline, told, config.loss_batch)
        plain = [Completion(ids[:1], ids[1:], [True] * (len(ids) - 1), "end") for ids in on.plain]
        losses = [-log_prob for log_prob in story_log_probs(model, plain, config.loss_batch)]
        next_words = likeliest_next(model, coder, config.opening, config.next_words)
        accuracy, pass_at = problem_estimates(model, coder, on.problems, config)
    texts = [coder.answer_text(story.ids) for story in told]
    scores = [stories.words_used(text, words) for text, words in zip(texts, on.words, strict=True)]
    gains = [score - other for score, other in zip(scores, before.scores if before else scores, strict=True)]
    more = [loss - other for loss, other in zip(losses, before.losses if before else losses, strict=True)]
    tokens = [len(story.ids) for story in plain]
    gained = bootstrap(gains, config.resamples, config.seed)
    added = bootstrap(more, config.resamples, config.seed, tokens)
    ids = [story.ids for story in told]
    return Result(
        name=name,
        scores=scores,
        words_used=bootstrap(scores, config.resamples, config.seed),
        gained=gained,
        losses=losses,
        loss=sum(losses) / sum(tokens),
        added=added,
        cost=cost_of_a_point(gained, added),
        ended=sum(story.ended for story in told) / len(told),
        length=sum(map(len, ids)) / len(ids),
        distinct_2=stories.distinct_pairs(ids),
        repeated_4=stories.repeated_4grams(ids),
        word_repeats=stories.word_repeats(zip(texts, on.words, strict=True)),
        kl=sum(mine - theirs for mine, theirs in zip(own, others, strict=True)) / len(own),
        next_words=next_words,
        accuracy=accuracy,
        pass_at=pass_at,
        stories=texts[: config.shown],
        facts=facts,
    )


def known_models(baseline: Path) -> dict[str, Path]:
    """The models that are there, by the name they go by: baseline, DPO, and every run's final or best."""
    runs = [path for name in ("final", "best") for path in sorted(checkpoint.FOLDER.glob(f"*/{name}.pt"))]
    there = [path for path in (checkpoint.FINETUNED, checkpoint.DPO, *runs) if path.exists()]
    return {name_of(path): path for path in (baseline, *there)}


def located(name: str, known: Mapping[str, Path]) -> Path:
    """The file of a model that is named, or is a file itself.

    Raises: UserError where it is neither.
    """
    path = known.get(name, Path(name))
    if name not in known and path.suffix != ".pt" and not path.is_file():
        raise UserError(f"{name} is no model here: there are {', '.join(known)}, or give a file")
    return path


def found(config: Config) -> list[Path]:
    """The checkpoints to compare: those named, else all that are known; the baseline first."""
    known = known_models(config.baseline)
    named = [located(name, known) for name in config.checkpoints] or known.values()
    return list({path.resolve(): path for path in (config.baseline, *named)}.values())


def loaded(path: Path, device: torch.device, coder: Tokenizer, shape: ModelConfig | None) -> tuple[GPT, dict[str, Any]]:
    """A checkpoint's model and facts; its context must be that of `shape`.

    Raises: UserError where it is not, or where the checkpoint cannot be loaded.
    """
    model, facts = checkpoint.load(path, device, coder.vocabulary)
    if shape is not None and model.config.context != shape.context:
        raise UserError(f"{path} has a context of {model.config.context} tokens, the baseline {shape.context}")
    return model, facts


def name_of(path: Path) -> str:
    """What a checkpoint is called in tables: its run, `finetuned` or `dpo`, or else its path."""
    if path.parent == checkpoint.FOLDER:
        return path.stem
    return path.parent.name if path.stem in ("final", "best") and path.parent.parent == checkpoint.FOLDER else str(path)


def write_results(results: Sequence[Result], on: Material, config: Config, device: torch.device) -> None:
    """Writes the numbers, the pictures and the report; says where."""
    machine = runtime.machine_facts(device, config.precision, config.seed)
    content = {
        "command": sys.argv,
        "config": asdict(config),
        "machine": machine,
        "dropped": on.dropped,
        "models": [asdict(one) for one in results],
    }
    text = json.dumps(content, indent=1, default=str)  # paths as text
    with writing(config.folder):
        (config.folder / "results.json").write_text(text + "\n", encoding="utf-8")
        table = report.markdown_table(report.rows_of(results))
        (config.folder / "table.md").write_text(table + "\n", encoding="utf-8")
        for name in report.PICTURES:  # one that is not drawn this time would show other models
            for kind in ("png", "svg"):
                (config.folder / f"{name}.{kind}").unlink(missing_ok=True)
        shown: dict[Path, str] = {}
        for name, (figure, says) in report.drawn(results).items():
            pictures.save(figure, config.folder / name)
            shown[config.folder / f"{name}.svg"] = says
        facts = {
            "Command": runtime.command_line(sys.argv[1:]),
            "Stories": f"{len(on.words)} held-out instructions, a story each; {len(on.plain)} plain held-out stories",
            "Problems": f"{len(on.problems)}, with {config.answers} sampled answers each",
            "Machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        }
        page = report.page(results, on.words[: config.shown], config.opening, shown, facts)
        (config.folder / "report.html").write_text(page, encoding="utf-8")
    drawn = ", ".join(path.stem for path in shown)
    print(f"{config.folder / 'report.html'}, results.json, table.md, {drawn} (.png, .svg)")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context whose failure to write to `folder` is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): free it, then run again") from None


def print_stories(config: Config, device: torch.device, coder: Tokenizer) -> None:
    """Prints the stories of the models of `--compare` for a few held-out instructions, in columns.

    Raises: UserError where a model is unknown or an instruction does not fit it.
    """
    known = known_models(config.baseline)
    paths = dict.fromkeys(located(name, known) for name in config.compare)
    asked = stories.read_instructions(stories.HELDOUT_INSTRUCTIONS)[: config.shown]
    prompts = [coder.prompt(tokenizer.story_request(words)) for words in asked]
    told: dict[str, list[str]] = {}
    for path in paths:
        model, _ = loaded(path, device, coder, None)
        if not all(fits(model, prompt) for prompt in prompts):
            raise UserError(f"{stories.HELDOUT_INSTRUCTIONS}: an instruction does not fit the context of {path}")
        with runtime.autocast(device, config.precision):
            written = stories_of(model, coder, prompts, config)
        told[name_of(path)] = [coder.answer_text(story.ids) for story in written]
    width = shutil.get_terminal_size().columns
    for number, words in enumerate(asked):
        columns = {name: texts[number] for name, texts in told.items()}
        title = report.printable(", ".join(words))
        print(f"== {title}\n\n{report.side_by_side(columns, words, width, config.narrowest)}\n")


def time_left(seconds: float, models: int) -> str:
    """How long models still take when each takes so many seconds, and how to make it less."""
    total = seconds * models
    lasts = f"{total / 60:.0f} minutes" if total >= 90 else f"{total:.0f} seconds"
    return (
        f"{models} more, about {lasts}; fewer of them: python evaluate.py NAME NAME; less of each: --instructions 50, "
        "--problems 0"
    )


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    if config.compare:
        print_stories(config, device, coder)
        return
    baseline, _ = loaded(config.baseline, device, coder, None)
    on = material(coder, baseline, config)
    paths = found(config)
    for path in paths:  # what cannot be loaded or written is said before the first is measured, which takes minutes
        loaded(path, device, coder, baseline.config)
    if distributed.leads():
        with writing(config.folder):
            config.folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for path in paths:
        began = time.monotonic()
        model, facts = loaded(path, device, coder, baseline.config)
        before = results[0] if results else None
        results.append(measured(name_of(path), model, facts, baseline, before, on, coder, config))
        print(f"{results[-1].name}: {percent(results[-1].words_used)} % of the words used", flush=True)
        if len(results) == 1 < len(paths):
            print(time_left(time.monotonic() - began, len(paths) - 1), flush=True)
    print("\n" + report.table(report.rows_of(results)) + "\n")
    for one in results:
        likeliest = ", ".join(f"{report.printable(word.strip())} {chance:.0%}" for word, chance in one.next_words)
        print(f"{one.name}: {config.opening} ... {likeliest}")
    if distributed.leads():
        write_results(results, on, config, device)


if __name__ == "__main__":
    runtime.run(main)
