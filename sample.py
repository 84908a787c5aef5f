"""Writes a story or solves a word problem with a trained model; `generate` is the repository's only decoding loop.

    python sample.py kite river brave               a story with these words, seconds
    python sample.py --problem 7                    a held-out problem: gold, greedy and eight sampled answers
    python sample.py --problem 7 --problems data/gsm8k/test.jsonl
    python sample.py --model checkpoints/ppo-0.05/final.pt rain cake jump

Rows whose prompts differ in length decode together without padding: all rows read the tokens of the shortest prompt,
then a row with a longer one is forced through its own tokens while the others sample. A calculator's result is forced
by the same mechanism.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

import checkpoint
import distributed
import problems
import runtime
import situations
import stories
import tokenizer
from model import GPT, Cache, padded
from problems import Problem
from runtime import Count, Device, Precision, Seed, UserError
from tokenizer import Tokenizer

OPENING = "Once upon a time, there was a little"  # of a plain story, whose next words show what changed
NEXT_WORDS = 5


@dataclass(frozen=True, slots=True)
class Config:
    """What to write, and with which model."""

    # Words the story is asked to use.
    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="WORD")] = ("rain", "cake", "jump")
    model: Path = checkpoint.FINETUNED
    # Number of a word problem to solve in place of a story.
    problem: Annotated[int | None, runtime.bound("the first is 1", lambda number: number >= 1)] = None
    problems: Path | None = None  # GSM8K file to take the problem from; generated held-out ones otherwise
    answers: Count = 8  # sampled answers to a problem
    limit: Count = 200  # tokens of a story or an answer
    temperature: Annotated[float, runtime.NOT_NEGATIVE] = 1.0  # 0 always takes the likeliest token
    top_k: Annotated[int, runtime.at_least(0)] = 0  # sample from the k likeliest tokens only; 0 is off
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        runtime.check(self)
        for word in self.words:
            if not stories.WORD.fullmatch(word):
                raise ValueError(f"word {word!r}: one word of letters, such as kite or can't")


Stop = Literal["end", "limit", "context"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote after one prompt."""

    prompt: list[int]
    ids: list[int]  # the answer: sampled and forced tokens, the end of text where the model wrote it
    sampled: list[bool]  # for each of `ids`, whether the model chose it
    stop: Stop  # why it ends: an end of text, the row's token limit, or the context

    @property
    def ended(self) -> bool:
        return self.stop == "end"


@dataclass(frozen=True, slots=True)
class Instruction:
    """Words to use and the prompt that asks for them."""

    words: tuple[str, ...]
    prompt: list[int]


# What the program writes into an answer, given the answer's ids so far: tokens to force next, or none.
Forcing = Callable[[list[int]], list[int]]


def sampled_tokens(logits: Tensor, uniform: Tensor, temperature: float, top_k: int) -> Tensor:
    """(B,) tokens drawn from logits (B, V) by inverse CDF at `uniform` (B,) in [0, 1); the likeliest at temperature 0.

    With `top_k`, tokens that tie with the k-th likeliest are kept too, so more than k may be left, as in transformers.
    On the CPU this takes a sixth of the time of softmax and `torch.multinomial` over a vocabulary of 4,096.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    cumulative = logits.softmax(-1).cumsum(-1)  # (B, V)
    # Scaled by the last entry, as a float32 sum of thousands of terms is not exactly 1: the draw stays below it.
    return torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    limit: int | Sequence[int],
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    forcing: Forcing | None = None,
    forcing_after: frozenset[int] = frozenset(),
) -> list[Completion]:
    """A completion of each prompt.

    prompts: ids, at least one each and fewer than the context. end: id of the end of text. limit: tokens of an
    answer, for all or for each row. forcing: called with a row's answer so far when its last sampled token is in
    `forcing_after`.
    Each row has its own random numbers, drawn before the first token, so a row that finishes changes no other row's
    story. Of several processes each writes its share of the rows, with the same random numbers.
    """
    context = model.config.context
    limits = [limit] * len(prompts) if isinstance(limit, int) else list(limit)
    lengths = [len(prompt) for prompt in prompts]
    assert prompts, "nothing to write"
    assert min(lengths) >= 1, lengths
    assert max(lengths) < context, (lengths, context)
    assert min(limits) >= 1, limits
    stops = [min(length + most, context) for length, most in zip(lengths, limits, strict=True)]  # length of a full row
    uniform = torch.rand(len(prompts), max(stops), generator=generator)  # (B, width)
    own = distributed.share(len(prompts))
    mine = prompts[own], limits[own], uniform[own]
    return distributed.gathered(written(model, *mine, end, temperature, top_k, forcing, forcing_after))


@torch.no_grad()
def written(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    uniform: Tensor,
    end: int,
    temperature: float,
    top_k: int,
    forcing: Forcing | None,
    forcing_after: frozenset[int],
) -> list[Completion]:
    """The completions of `generate`, given each row's limit and its random numbers, `uniform` (B, width)."""
    if not prompts:  # more processes than rows
        return []
    context, device, uniform = model.config.context, model.device, uniform.to(model.device)
    lengths = [len(prompt) for prompt in prompts]
    stops = [min(length + most, context) for length, most in zip(lengths, limits, strict=True)]  # length of a full row
    width, start = max(stops), min(lengths)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    forced = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        forced[row, : len(prompt)] = True
    ids, forced = ids.to(device), forced.to(device)
    ended = [False] * len(prompts)
    lasts = list(stops)  # length of each row when it is done
    rows = torch.arange(len(prompts), device=device)  # rows still being written
    full = torch.tensor(stops, device=device)
    cache = None
    new = ids[:, :start]
    for position in range(start, width):
        if cache is None:
            dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
            cache = Cache(model.config, len(prompts), width, device, dtype)
        logits = model.head(model.hidden(new, cache)[:, -1])  # (B, V) of the rows still being written
        drawn = sampled_tokens(logits, uniform[rows, position], temperature, top_k)
        choosing = ~forced[rows, position]  # (B,)
        new = torch.where(choosing, drawn, ids[rows, position])  # (B,)
        ids[rows, position] = new
        done = (choosing & (new == end)) | (full[rows] == position + 1)
        for index, (row, token) in enumerate(zip(rows.tolist(), new.tolist(), strict=True)):
            if token in forcing_after and forcing is not None and choosing[index] and not done[index]:
                supplied = forcing(ids[row, lengths[row] : position + 1].tolist())[: stops[row] - position - 1]
                ids[row, position + 1 : position + 1 + len(supplied)] = torch.tensor(
                    supplied, dtype=torch.long, device=device
                )
                forced[row, position + 1 : position + 1 + len(supplied)] = True
        if done.any():
            for row, token, chosen in zip(
                rows[done].tolist(), new[done].tolist(), choosing[done].tolist(), strict=True
            ):
                ended[row], lasts[row] = chosen and token == end, position + 1
            left = int((~done).sum())
            if not left:
                break
            kept = torch.arange(left, device=device)
            kept[done[:left]] = left + (~done[left:]).nonzero()[:, 0]  # the last rows take the places that are free
            rows, new, cache = rows[kept], new[kept], cache.kept(kept)
        new = new[:, None]
    completions = []
    for row, length in enumerate(lengths):
        span = slice(length, lasts[row])
        stop: Stop = "end" if ended[row] else "limit" if limits[row] <= context - length else "context"
        answer, chosen_mask = ids[row, span].tolist(), (~forced[row, span]).tolist()
        completions.append(Completion(list(prompts[row]), answer, chosen_mask, stop))
    return completions


def packed(completions: Sequence[Completion], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts and answers as one batch: ids (B, T), and mask (B, T-1), true at t where the model chose token t+1."""
    rows = [one.prompt + one.ids for one in completions]
    return padded(rows, [[False] * len(one.prompt) + one.sampled for one in completions], device)


def calculator_forcing(coder: Tokenizer) -> tuple[Forcing, frozenset[int]]:
    """What `generate` needs to run the calculator: its `forcing`, and the tokens after which to ask it."""

    def forcing(answer: list[int]) -> list[int]:
        result = problems.calculator_call(coder.decode(answer))
        return [] if result is None else coder.encode(f"{result}>>")

    return forcing, frozenset(token for token, piece in enumerate(coder.pieces) if piece.endswith("="))


def solve(
    model: GPT,
    coder: Tokenizer,
    questions: Sequence[str],
    *,
    limit: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> list[Completion]:
    """An answer to each question, with the calculator in the loop."""
    forcing, forcing_after = calculator_forcing(coder)
    return generate(
        model,
        [coder.prompt(question) for question in questions],
        end=coder.end,
        limit=limit,
        generator=generator,
        temperature=temperature,
        forcing=forcing,
        forcing_after=forcing_after,
    )


def right_answers(
    model: GPT,
    coder: Tokenizer,
    asked: Sequence[Problem],
    *,
    answers: int,
    limit: int,
    batch: int,
    generator: torch.Generator,
    temperature: float,
) -> list[int]:
    """For each problem how many of `answers` answers to it are right, calculator in the loop."""
    rows = [number for number in range(len(asked)) for _ in range(answers)]
    rows.sort(key=lambda number: len(asked[number].question))  # rows of a batch read prompts of similar lengths
    right = [0] * len(asked)
    for start in tqdm(range(0, len(rows), batch), "problems", unit="batch", disable=None, leave=False):
        part = rows[start : start + batch]
        questions = [asked[number].question for number in part]
        told = solve(model, coder, questions, limit=limit, generator=generator, temperature=temperature)
        for number, answer in zip(part, told, strict=True):
            right[number] += problems.grade(coder.answer_text(answer.ids), asked[number].answer)
    return right


@torch.no_grad()
def likeliest_next(
    model: GPT, coder: Tokenizer, opening: str = OPENING, number: int = NEXT_WORDS
) -> list[tuple[str, float]]:
    """The likeliest tokens after a plain story's opening, with their probabilities."""
    ids = torch.tensor([[coder.end, *coder.encode(opening)]], device=model.device)  # (1, T)
    top = model(ids)[0, -1].float().softmax(-1).topk(min(number, coder.vocabulary))
    return [
        (coder.decode([token]), chance) for chance, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def fitting_instructions(path: Path, coder: Tokenizer, longest: int) -> list[Instruction]:
    """The instructions of a file whose prompt has up to `longest` tokens, in its order; says how many have more.

    Raises: UserError where none does, or the file cannot be read.
    """
    asked = stories.read_instructions(path)
    known = [Instruction(words, coder.prompt(tokenizer.story_request(words))) for words in asked]
    kept = [instruction for instruction in known if len(instruction.prompt) <= longest]
    if not kept:
        raise UserError(f"no line of {path} leaves room for a story, {longest} tokens at most: lower --limit")
    if len(kept) < len(known):
        print(f"{len(known) - len(kept):,} of {len(known):,} instructions in {path} left out: over {longest} tokens")
    return kept


def fits(model: GPT, prompt: Sequence[int]) -> bool:
    """Whether a prompt leaves room for at least one token of answer."""
    return len(prompt) < model.config.context


def show_problem(model: GPT, coder: Tokenizer, config: Config, number: int) -> None:
    """Prints a problem, its gold answer, the greedy answer and sampled ones, each marked right or wrong."""
    if config.problems is not None:
        known = problems.read_problems(config.problems)
    else:
        known = situations.generated_problems(number, config.seed, "test")
    if number > len(known):
        raise UserError(f"--problem {number}: {config.problems} has {len(known)} problems")
    problem = known[number - 1]
    if not fits(model, coder.prompt(problem.question)):
        raise UserError(
            f"--problem {number}: the question does not fit the model's context of {model.config.context} tokens"
        )
    print(f"{problem.question}\n\ngold\n{problem.answer}\n")
    source = runtime.generator(config.seed)
    greedy = solve(model, coder, [problem.question], limit=config.limit, generator=source, temperature=0.0)
    samples = solve(
        model,
        coder,
        [problem.question] * config.answers,
        limit=config.limit,
        generator=source,
        temperature=config.temperature,
    )
    for name, answer in zip(
        ["greedy", *(f"sample {i}" for i in range(1, config.answers + 1))], greedy + samples, strict=True
    ):
        text = coder.answer_text(answer.ids)
        print(f"{name}: {'right' if problems.grade(text, problem.answer) else 'wrong'}\n{text}\n")


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    model, _ = checkpoint.load(config.model, device, coder.vocabulary)
    with runtime.autocast(device, config.precision):
        if config.problem is not None:
            show_problem(model, coder, config, config.problem)
            return
        prompt = coder.prompt(tokenizer.story_request(config.words))
        if not fits(model, prompt):
            raise UserError(
                f"{len(config.words)} words do not fit the context of {model.config.context} tokens: ask for fewer"
            )
        story = generate(
            model,
            [prompt],
            end=coder.end,
            limit=config.limit,
            generator=runtime.generator(config.seed),
            temperature=config.temperature,
            top_k=config.top_k,
        )[0]
    print(coder.answer_text(story.ids))


if __name__ == "__main__":
    runtime.run(main)
