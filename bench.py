"""Says where the time goes, and how far each piece is from what this machine can do.

    python bench.py                        all parts
    python bench.py ppo train --repeats 1  two parts, measured once
    python bench.py ppo --stories 16 --plain
    python bench.py --scale                how time and memory grow with stories, their length, and the model's size

Reads `checkpoints/finetuned.pt` (without it, an untrained model of the default size stands in) and what the scripts
read of `data/` that comes with the repository. Pre-training and fine-tuning read random tokens. Writes no file.

How it measures:
1. it calls the scripts' own functions with a watch on some of the names they call, so nothing is a copy;
2. each part runs in a process of its own, whose peak memory is then the part's own;
3. a warm-up, then repeats: medians, with the least and the most in brackets;
4. a piece's floor is the time that its matrix products take at the rate measured in the same run at the model's
   shapes: those it cannot do without, so padding and logits that nobody reads are not in it.
"""

import contextlib
import copy
import functools
import io
import multiprocessing
import pkgutil
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from unittest.mock import patch

import numpy
import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

import checkpoint
import distributed
import evaluate
import finetune
import ppo
import problems
import reinforce
import runtime
import situations
import stories
import tokenizer
import train
import training
from finetune import Conversation
from model import GPT, ModelConfig
from runtime import Count, Device, Log, Precision, Seed, UserError
from sample import Completion, fitting_instructions
from training import Guard, Learner, Session

Part = Literal["ppo", "reinforce", "train", "finetune", "evaluate"]
ResultT = TypeVar("ResultT")
REST = "the rest"
LEFT_OUT = "left out"  # what a step of training does not do each time: evaluation, saving, logging
COPIED = 2**28  # bytes, far beyond any cache


@dataclass(frozen=True, slots=True)
class Config:
    """What to measure, and how much of it."""

    parts: Annotated[tuple[Part, ...], tyro.conf.Positional] = get_args(Part)
    stories: int = 128  # of a PPO rollout; a multiple of 8, its groups
    limit: Count = 200  # tokens of a story
    answers: int = 256  # of a REINFORCE step, 16 to a problem
    evaluated: Count = 48  # instructions that evaluation measures a model on, and half as many problems
    steps: Count = 4  # of pre-training or fine-tuning in a repeat
    repeats: Count = 3  # after the warm-up
    plain: bool = False  # PPO the plain way, too: float32, no cache, multinomial draws, logits of all positions
    scale: bool = False  # untrained models of many sizes in place of the parts
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)  # of --stories, in --scale
    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)  # of --limit, in --scale
    sizes: tuple[tuple[int, int, int], ...] = (
        *((3, 2, 128), (5, 3, 192), (6, 4, 256)),
        *((6, 6, 384), (8, 8, 512)),
    )  # layers, heads and channels in --scale: 1 to 27 million parameters
    rows: Count = 1024  # of the matrix products that scoring and training are compared with
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED

    def __post_init__(self) -> None:
        runtime.check(self)
        for name, group in (("stories", ppo.Config().group), ("answers", reinforce.Config().answers)):
            if getattr(self, name) < group or getattr(self, name) % group:
                raise ValueError(f"--{name} {getattr(self, name)}: a multiple of {group}, the size of a group")


@dataclass(slots=True)
class Spent:
    """What a piece took."""

    seconds: float = 0.0
    tokens: int = 0  # written, or scored
    writing: float = 0.0  # FLOPs of writing, a token of each story at a time
    reading: float = 0.0  # FLOPs of reading whole texts, forward and backward


Lap = dict[str, Spent]  # pieces in the order they ran, the rest last
Laps = Generator[Lap, None, None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the repeats of a part took."""

    name: str
    laps: list[Lap]
    start: int | None  # bytes at the peak before the first lap: Python, torch and the model
    memory: int | None  # bytes at the peak; None where the system does not say
    parameters: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do, measured: a number for each repeat."""

    writing: dict[str, list[float]]  # FLOP/s of products with a row for each story, by precision
    reading: dict[str, list[float]]  # FLOP/s of products with --rows rows
    copying: list[float]  # bytes/s, read and written


def flops(config: ModelConfig, length: int, logits: int) -> float:
    """FLOPs of the matrix products that read a text of `length` tokens once and make logits at `logits` positions.

    A product of (M, K) and (K, N) has 2 M K N. A layer's matrices hold 12 C^2 weights; a query meets the keys before
    it and its own, in two products.
    """
    pairs = length * (length + 1) / 2
    matrices = 2 * length * 12 * config.channels**2 + 4 * pairs * config.channels
    return config.layers * matrices + 2 * logits * config.channels * config.vocabulary


def flops_written(config: ModelConfig, completions: Sequence[Completion]) -> tuple[float, float]:
    """FLOPs without which these answers cannot be written: token by token, and those of the shortest prompt at once.

    Each token is read once, the last of a row never.
    """
    whole = sum(flops(config, len(one.prompt) + len(one.ids) - 1, sum(one.sampled)) for one in completions)
    at_once = len(completions) * flops(config, min(len(one.prompt) for one in completions), 0)
    return whole - at_once, at_once


def flops_scored(config: ModelConfig, mask: Tensor) -> float:
    """FLOPs without which the tokens that count, mask (B, T-1), cannot be scored; what is behind them is not read."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths = (mask * places).amax(1).tolist()  # (B,) tokens up to the last that is read
    return sum(flops(config, length, logits) for length, logits in zip(lengths, mask.sum(1).tolist(), strict=True))


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


class Watch:
    """Time and arithmetic of pieces; a piece that runs within another counts as the other's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: Lap = defaultdict(Spent)
        self.running: str | None = None
        self.owed = 0.0  # FLOPs of the backward pass that is to come

    @contextlib.contextmanager
    def piece(self, name: str) -> Iterator[None]:
        """Context whose time is a piece's."""
        if self.running is not None:
            yield
            return
        self.running, began = name, now(self.device)
        try:
            yield
        finally:
            self.pieces[name].seconds += now(self.device) - began
            self.running = None

    def count(self, name: str, arguments: Sequence[Any], result: Any) -> None:
        """Adds the arithmetic of a call of the function `name` to the piece that runs."""
        spent = self.pieces[self.running or REST]
        if name == "generate":
            writing, reading = flops_written(arguments[0].config, result)
            spent.writing += writing
            spent.reading += reading
            spent.tokens += sum(len(one.ids) for one in result)
        elif name == "backward":
            spent.reading += self.owed
            self.owed = 0.0
        elif name in ("token_log_probs", "forward"):
            ids = arguments[1]
            counts = arguments[2] if name == "token_log_probs" else torch.ones_like(ids, dtype=torch.bool)
            forward = flops_scored(arguments[0].config, counts)
            spent.reading += forward
            spent.tokens += int(counts.sum())
            self.owed += 2 * forward if torch.is_grad_enabled() else 0.0  # a gradient for each factor of a product

    @contextlib.contextmanager
    def on(self, names: Mapping[str, str | None]) -> Iterator[None]:
        """Context in which calls of the named functions are pieces; those that name none only add their arithmetic."""
        with contextlib.ExitStack() as stack:
            for target, piece in names.items():
                stack.enter_context(patch(target, self.watched(pkgutil.resolve_name(target), piece)))
            yield

    def watched(self, function: Callable[..., Any], piece: str | None) -> Callable[..., Any]:
        """The function, watched."""

        @functools.wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            with self.piece(piece) if piece else contextlib.nullcontext():
                result = function(*arguments, **options)
                self.count(function.__name__.removeprefix("plain_"), arguments, result)
            return result

        return watched

    @contextlib.contextmanager
    def lap(self) -> Iterator[None]:
        """Context of the whole; what is no piece is the rest."""
        began = now(self.device)
        yield
        named = sum(spent.seconds for spent in self.pieces.values())
        self.pieces[REST].seconds = now(self.device) - began - named
        self.pieces[REST] = self.pieces.pop(REST)  # last
        self.pieces.pop(LEFT_OUT, None)


LEARNING = {"torch.Tensor.backward": "update: backward", "training.Guard.step": "update: optimizer"}
WRITTEN = {
    "ppo.generate": "writing",
    "ppo.policy_outputs": "scoring: old, values",
    "ppo.token_log_probs": "scoring: reference",
    "ppo.score": "scoring: reward",
}
UPDATED = {"ppo.policy_outputs": "update: forward", "ppo.token_log_probs": "update: forward", **LEARNING}
ANSWERED = {
    **{"sample.generate": "writing", "problems.grade": "grading"},
    **{"reinforce.token_log_probs": "update: forward", **LEARNING},
}
TRAINED = {
    **{"train.token_log_probs": "update: forward", **LEARNING},
    **{"train.mean_loss": LEFT_OUT, "training.write_state": LEFT_OUT, "checkpoint.save": LEFT_OUT},
    **{"runtime.Log.scalars": LEFT_OUT},
}
FINETUNED = {
    **{"finetune.token_log_probs": "update: forward", **LEARNING},
    **{"finetune.mean_loss": LEFT_OUT, "training.write_state": LEFT_OUT, "runtime.Log.scalars": LEFT_OUT},
}
EVALUATED = {
    **{"evaluate.stories_of": "stories", "evaluate.story_log_probs": "KL and loss"},
    **{"evaluate.problem_estimates": "problems", "evaluate.bootstrap": "intervals"},
    **dict.fromkeys(("evaluate.generate", "sample.generate", "evaluate.token_log_probs")),
}


@torch.no_grad()
def plain_generate(
    model: GPT, prompts: Sequence[Sequence[int]], *, end: int, limit: int, generator: torch.Generator
) -> list[Completion]:
    """`sample.generate` the plain way: for each token the whole text is read anew, and rows that are done go on."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    width = max(map(len, prompts)) + limit
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=model.device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for position in range(int(lengths.min()), width):
        logits = model(ids[:, :position])[:, -1]  # (B, V)
        drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(model.device)
        ids[:, position] = torch.where(lengths <= position, drawn, ids[:, position])
        ended |= (lengths <= position) & (drawn == end)
        if (ended | (lengths + limit <= position + 1)).all():
            break
    completions = []
    for prompt, row in zip(prompts, ids.tolist(), strict=True):
        answer = row[len(prompt) : len(prompt) + limit]
        stops = answer.index(end) + 1 if end in answer else limit
        stop: Literal["end", "limit"] = "end" if end in answer else "limit"
        completions.append(Completion(list(prompt), answer[:stops], [True] * stops, stop))
    return completions


def plain_token_log_probs(model: GPT, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """`model.token_log_probs` the plain way: logits of all positions, of which those that count are kept."""
    log_probs = (model(ids[:, :-1]) / temperature).log_softmax(-1)  # (B, T-1, V)
    told: Tensor = log_probs.gather(-1, ids[:, 1:, None])[:, :, 0]  # (B, T-1)
    return told.masked_fill(~mask, 0.0)


def loaded(config: Config, shape: ModelConfig | None) -> GPT:
    """The model of --model; an untrained one where a shape is asked for, or the file is missing."""
    device = runtime.device_for(config.device)
    if shape is None and config.model.exists():
        return checkpoint.load(config.model, device, tokenizer.load().vocabulary)[0]
    runtime.seed_everything(config.seed)
    return GPT(shape or ModelConfig(vocabulary=tokenizer.load().vocabulary)).to(device).eval()


def ppo_laps(model: GPT, config: Config) -> Laps:
    """Rollouts of PPO, each with its update."""
    coder = tokenizer.load()
    own = ppo.Config(
        groups=config.stories // ppo.Config().group, limit=config.limit, seed=config.seed, precision=config.precision
    )
    room = model.config.context - config.limit
    if room < 1:
        raise UserError(f"--limit {config.limit}: less than the model's context of {model.config.context} tokens")
    known = ppo.by_length(fitting_instructions(stories.TRAIN_INSTRUCTIONS, coder, room))
    learner = ppo.learner_for(model, own)
    while True:
        watch = Watch(model.device)
        with watch.lap():
            instructions = ppo.drawn_instructions(known, own.groups, own.group, learner.draws)
            with watch.on(WRITTEN):
                batch = ppo.rollout(learner, instructions, coder, own)
            with watch.on(UPDATED):
                ppo.update(learner, batch, own)
            ppo.rollout_metrics(batch, coder)
        yield watch.pieces


def plain_laps(model: GPT, config: Config) -> Laps:
    """The same the plain way."""
    with patch("ppo.generate", plain_generate), patch("ppo.token_log_probs", plain_token_log_probs):
        yield from ppo_laps(model, replace(config, precision="float32"))


def reinforce_laps(model: GPT, config: Config) -> Laps:
    """Steps of REINFORCE. A coin decides what is right, so that every group has something to teach, at any skill."""
    coder, coins, grade = tokenizer.load(), random.Random(config.seed), problems.grade
    own = reinforce.Config(problems=config.answers // reinforce.Config().answers, precision=config.precision)
    learner = reinforce.learner_for(model, own)
    writing, shuffling = learner.generators
    drawn = situations.generated_problems(own.problems * (config.repeats + 1), config.seed, "train")
    known = reinforce.fitting(drawn, coder, model, own.limit, "problems")

    def tossed(text: str, gold: str) -> bool:
        grade(text, gold)
        return coins.random() < 0.5

    while True:
        watch = Watch(model.device)
        with watch.lap(), patch("problems.grade", tossed), watch.on(ANSWERED):
            asked = reinforce.problems_of(learner.step, known, own)
            batch = reinforce.rollout(model, asked, coder, own, writing)
            reinforce.update(model, learner.guard, batch, own, shuffling)
        learner.step += 1
        yield watch.pieces


def per_step(lap: Lap, steps: int) -> Lap:
    """A lap of several steps as one of them."""
    return {
        name: Spent(spent.seconds / steps, spent.tokens // steps, spent.writing / steps, spent.reading / steps)
        for name, spent in lap.items()
    }


@contextlib.contextmanager
def scratch(config: object) -> Iterator[Log]:
    """Context of a folder of its own and a log in it, as a training loop writes checkpoints, and prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        log = Log(Path("runs"), config, {})
        with contextlib.redirect_stdout(io.StringIO()), log:
            yield log


def train_laps(model: GPT, config: Config) -> Laps:
    """Steps of pre-training on random tokens."""
    own = train.Config(passes=1, evaluate_every=sys.maxsize, precision=config.precision, model=model.config)
    rng = numpy.random.default_rng(config.seed)
    sizes = (model.config.context * (own.batch * config.steps + 1) + 2, 2 * model.config.context + 2)
    tokens, heldout = (rng.integers(model.config.vocabulary, size=size, dtype=numpy.uint16) for size in sizes)
    while True:
        optimizer = training.adamw(model, own.lr, own.beta2, own.weight_decay)
        watch, learner = Watch(model.device), Learner(model, Guard(optimizer, own.max_norm))
        with scratch(own) as log, watch.lap(), watch.on(TRAINED):
            train.train(learner, tokens, heldout, own, log, {}, Session())
        yield per_step(watch.pieces, config.steps)


def finetune_laps(model: GPT, config: Config) -> Laps:
    """Steps of fine-tuning on random tokens, texts of half the context to all of it, of which the last half counts."""
    own = finetune.Config(passes=1, heldout=1, evaluate_every=sys.maxsize, precision=config.precision)
    model = GPT(replace(model.config, dropout=own.dropout)).to(model.device)
    rng, context = numpy.random.default_rng(config.seed), model.config.context
    conversations = [
        Conversation(rng.integers(model.config.vocabulary, size=size).tolist(), [2 * at >= size for at in range(size)])
        for size in rng.integers(context // 2, context + 1, size=own.heldout + own.batch * config.steps).tolist()
    ]
    while True:
        optimizer = training.adamw(model, own.lr, own.beta2, own.weight_decay)
        watch, learner = Watch(model.device), Learner(model, Guard(optimizer, own.max_norm))
        with scratch(own) as log, watch.lap(), watch.on(FINETUNED):
            finetune.finetune(learner, conversations, own, log, Session())
        yield per_step(watch.pieces, config.steps)


def evaluate_laps(model: GPT, config: Config) -> Laps:
    """Evaluations of a model, compared with itself."""
    coder = tokenizer.load()
    own = evaluate.Config(
        instructions=config.evaluated,
        problems=config.evaluated // 2,
        limit=config.limit,
        seed=config.seed,
        precision=config.precision,
    )
    baseline = copy.deepcopy(model)
    on = evaluate.material(coder, baseline, own)
    while True:
        watch = Watch(model.device)
        with watch.lap(), watch.on(EVALUATED):
            evaluate.measured("model", model, {}, baseline, None, on, coder, own)
        yield watch.pieces


LAPS: dict[str, Callable[[GPT, Config], Laps]] = {
    "ppo": ppo_laps,
    "plain": plain_laps,
    "reinforce": reinforce_laps,
    "train": train_laps,
    "finetune": finetune_laps,
    "evaluate": evaluate_laps,
}


def measured(name: str, config: Config, shape: ModelConfig | None = None) -> Measured:
    """The laps of a part after the warm-up, and the peak memory of this process."""
    model = loaded(config, shape)
    start = peak_memory(model.device)
    with contextlib.closing(LAPS[name](model, config)) as laps:
        next(laps)
        kept = [dict(next(laps)) for _ in range(config.repeats)]
    parameters = sum(weight.numel() for weight in model.parameters())
    return Measured(name, kept, start, peak_memory(model.device), parameters)


def peak_memory(device: torch.device) -> int | None:
    """Bytes this process held at its peak, on a GPU the tensors there; None on Windows, which does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def prepared(threads: int) -> None:
    """Makes a new process like this one."""
    runtime.keep_memory()
    torch.set_num_threads(threads)


def apart(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """The function's result, from a process of its own; under torchrun from this one, which the others know.

    Raises: UserError where the system ended it.
    """
    if distributed.size() > 1:
        return function(*arguments)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=prepared, initargs=(torch.get_num_threads(),)) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise UserError("the system ended a measurement, as it does for memory: lower --stories") from None


@torch.no_grad()
def product_rates(shape: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device, repeats: int) -> list[float]:
    """FLOP/s of the matrix products of a forward pass over that many rows, once for each repeat, after a warm-up."""
    channels = shape.channels
    block = [(channels, 3 * channels), (channels, channels), (channels, 4 * channels), (4 * channels, channels)]
    sizes = [*block * shape.layers, (channels, shape.vocabulary)]
    weights = [torch.randn(wide, deep, device=device, dtype=dtype) for deep, wide in sizes]
    inputs = {deep: torch.randn(rows, deep, device=device, dtype=dtype) for deep, _ in sizes}
    found = []
    for _ in range(repeats + 1):
        began = now(device)
        for weight, (deep, _) in zip(weights, sizes, strict=True):
            F.linear(inputs[deep], weight)
        found.append(2 * rows * sum(deep * wide for deep, wide in sizes) / (now(device) - began))
    return found[1:]


def copy_rates(device: torch.device, repeats: int) -> list[float]:
    """Bytes/s, read and written, of copies far larger than a cache, once for each repeat, after a warm-up."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target, found = torch.empty_like(source), []
    for _ in range(repeats + 1):
        began = now(device)
        target.copy_(source)
        found.append(2 * COPIED / (now(device) - began))
    return found[1:]


def limits_of(shape: ModelConfig, config: Config) -> Limits:
    """What this machine can do at a model's shapes."""
    device = runtime.device_for(config.device)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    writing, reading = (
        {name: product_rates(shape, rows, dtype, device, config.repeats) for name, dtype in kinds.items()}
        for rows in (config.stories, config.rows)
    )
    return Limits(writing, reading, copy_rates(device, config.repeats))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of the power law a * size^b nearest to the values in logarithms: 1 grows like the size."""
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(values), 1)[0])


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 2) -> str:
    """Median with the least and the most."""
    middle, low, high = (value / unit for value in (statistics.median(values), min(values), max(values)))
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def totals(measured: Measured) -> list[float]:
    """Seconds of each lap."""
    return [sum(spent.seconds for spent in lap.values()) for lap in measured.laps]


def line(name: str, laps: Sequence[Iterable[Spent]], tokens: float, limits: Limits, precision: str) -> str:
    """A line of the table: what some pieces took together in each lap, tokens a second, floor, and times the floor."""
    seconds = [sum(spent.seconds for spent in lap) for lap in laps]
    floors = [
        sum(spent.writing for spent in lap) / statistics.median(limits.writing[precision])
        + sum(spent.reading for spent in lap) / statistics.median(limits.reading[precision])
        for lap in laps
    ]
    middle, floor = statistics.median(seconds), statistics.median(floors)
    rate = f"{tokens / middle:,.0f}" if tokens and middle else "-"
    ratio = f"{middle / floor:.1f}" if floor else "-"
    return f"  {name:22}{spread(seconds):>26}{rate:>11}{floor:>10.2f}{ratio:>9}"


def table(measured: Measured, title: str, limits: Limits, precision: str) -> str:
    """A part's pieces with their sum; the sum's tokens are those written, or without any those read forward."""
    memory = measured.memory
    peak = "" if memory is None else f", {memory / 1e9:.2f} GB at the peak"
    lines = [f"{title}{peak}", f"  {'':22}{'seconds':>26}{'tokens/s':>11}{'floor':>10}{'x floor':>9}"]
    for name in dict.fromkeys(name for lap in measured.laps for name in lap):
        laps = [[lap.get(name, Spent())] for lap in measured.laps]
        tokens = statistics.median(spent.tokens for (spent,) in laps)
        lines.append(line(name, laps, tokens, limits, precision))
    counted = [lap_tokens(lap) for lap in measured.laps]
    whole = [list(lap.values()) for lap in measured.laps]
    lines.append(line("together", whole, statistics.median(counted), limits, precision))
    return "\n".join(lines)


def lap_tokens(lap: Lap) -> int:
    """Tokens written in a lap; without any, those scored."""
    written = sum(spent.tokens for spent in lap.values() if spent.writing)
    return written or sum(spent.tokens for spent in lap.values())


def notes(config: Config, device: torch.device, precision: str) -> list[str]:
    """What this machine and folder keep from being measured, or change about it."""
    found = []
    if not config.model.exists():
        found.append(f"{config.model} is missing: an untrained model stands in, whose stories all run to the limit")
    if device.type == "cpu" and torch.get_num_threads() == 1:
        found.append("one thread: rates and floors are those of one core")
    if not runtime.multiplies_bfloat16(device):
        found.append(f"no hardware for bfloat16: the parts run in {precision}; bfloat16's rate below is emulated")
    if distributed.size() > 1:
        found.append(
            f"{distributed.size()} processes share each step: seconds are the step's, floors those of one process"
        )
    if sys.platform == "win32" and device.type != "cuda":
        found.append("left out on Windows: peak memory")
    return found


def series(name: str, sizes: Sequence[float], runs: Sequence[Measured]) -> str:
    """How seconds and memory grow along a series."""
    seconds = [statistics.median(totals(run)) for run in runs]
    lines = [f"{name:>22}{'seconds':>26}{'tokens/s':>11}{'GB':>10}"]
    for size, run, middle in zip(sizes, runs, seconds, strict=True):
        rate = statistics.median(map(lap_tokens, run.laps)) / middle
        memory = "-" if run.memory is None else f"{run.memory / 1e9:.2f}"
        lines.append(f"{size:>22,.4g}{spread(totals(run)):>26}{rate:>11,.0f}{memory:>10}")
    grows = [f"seconds like size^{exponent(sizes, seconds):.2f}"] if len(sizes) > 1 else []
    added = [run.memory - run.start for run in runs if run.memory is not None and run.start is not None]
    if len(added) == len(sizes) > 1:
        grows.append(f"memory beyond that of the start like size^{exponent(sizes, [max(1, one) for one in added]):.2f}")
    return "\n".join([*lines, f"  {', '.join(grows)}"])


def show_scale(config: Config, shape: ModelConfig) -> None:
    """Prints how a PPO rollout with its update grows; with untrained models, whose stories all run to the limit."""
    group = ppo.Config().group
    counts = sorted({max(group, round(factor * config.stories / group) * group) for factor in config.factors})
    limits = sorted({max(1, round(share * config.limit)) for share in config.shares})
    shapes = [replace(shape, layers=one[0], heads=one[1], channels=one[2]) for one in config.sizes]
    runs = [apart(measured, "ppo", replace(config, stories=count), shape) for count in counts]
    print(series("stories", counts, runs) + "\n", flush=True)
    runs = [apart(measured, "ppo", replace(config, limit=limit), shape) for limit in limits]
    print(series("tokens of a story", limits, runs) + "\n", flush=True)
    runs = [apart(measured, "ppo", config, one) for one in shapes]
    print(series("parameters", [run.parameters for run in runs], runs), flush=True)


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    if config.plain and distributed.size() > 1:
        raise UserError("--plain: the plain way knows of one process only: python bench.py ppo --plain")
    facts = runtime.machine_facts(device, config.precision, config.seed)
    precision = facts["precision"]
    shown = ("commit", "torch", "system", "device", "precision", "threads")
    print(", ".join(f"{name} {facts[name]}" for name in shown))
    for note in notes(config, device, precision):
        print(f"note: {note}")
    shape = loaded(config, None).config
    limits = limits_of(shape, config)
    for rows, rates in ((config.stories, limits.writing), (config.rows, limits.reading)):
        for name, measurements in rates.items():
            print(f"matrix products of {rows:,} rows in {name}: {spread(measurements, 1e9, 1)} GFLOP/s")
    print(f"memory copies: {spread(limits.copying, 1e9, 1)} GB/s\n", flush=True)
    if config.scale:
        show_scale(config, shape)
        return
    titles = {
        "ppo": f"PPO: a rollout of {config.stories} stories and its update",
        "plain": f"PPO the plain way: a rollout of {config.stories} stories and its update",
        "reinforce": f"REINFORCE: a step of {config.answers} answers, half of them called right",
        "train": f"pre-training: a step of {train.Config().batch} windows",
        "finetune": f"fine-tuning: a step of {finetune.Config().batch} conversations",
        "evaluate": f"evaluation on {config.evaluated} instructions and {config.evaluated // 2} problems",
    }
    seconds: dict[str, float] = {}  # of a part
    for part in dict.fromkeys((*config.parts, *(("ppo", "plain") if config.plain else ()))):
        found = apart(measured, part, config)
        seconds[part] = statistics.median(totals(found))
        print(table(found, titles[part], limits, "float32" if part == "plain" else precision) + "\n", flush=True)
    if config.plain:
        ratio = seconds["plain"] / seconds["ppo"]
        print(f"the plain way takes {ratio:.1f} times as long as the scripts' own", flush=True)


if __name__ == "__main__":
    runtime.run(main)
