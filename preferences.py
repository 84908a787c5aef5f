"""Pairs for DPO: the model writes four stories per instruction; most of the words is preferred to fewest.

    python preferences.py           2,000 pairs
    python preferences.py 500       fewer

Reads `checkpoints/finetuned.pt` and `data/instructions-train.jsonl`. Writes `data/pairs.jsonl`, whole or not at all: a
JSON line a pair, with the words, and of both stories the text and the ids. Ids are kept because a story cut at the
limit has no end of text, which its text does not show.

There is no reward model and no human: `stories.words_used` is the preference. A group whose best and worst story use
equally many words, or are the same story, says nothing and is dropped and counted.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

import checkpoint
import runtime
import stories
import tokenizer
from model import GPT
from runtime import Device, Precision, UserError
from sample import Completion, generate
from tokenizer import Tokenizer

PAIRS = Path("data/pairs.jsonl")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the pairs."""

    pairs: Annotated[int, tyro.conf.Positional] = 2_000  # to write
    group: int = 4  # stories an instruction, of which the best and the worst are kept
    batch: int = 32  # instructions written together: 128 stories
    limit: int = 200  # tokens of a story
    seed: int = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("PAIRS", self.pairs, 1),
            ("--group", self.group, 2),
            ("--batch", self.batch, 1),
            ("--limit", self.limit, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} {value}: at least {least}")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two stories for one instruction, the first preferred."""

    words: tuple[str, ...]
    chosen: list[int]  # ids of the story, the end of text where the model wrote it
    rejected: list[int]


def preferred(words: tuple[str, ...], told: Sequence[Completion], coder: Tokenizer) -> Pair | None:
    """Most of the words against fewest, the first story of equals; None where they tie or are one story."""
    scores = [stories.words_used(coder.answer_text(story.ids), words) for story in told]
    best, worst = told[scores.index(max(scores))], told[scores.index(min(scores))]
    if max(scores) == min(scores) or coder.answer_text(best.ids) == coder.answer_text(worst.ids):
        return None
    return Pair(words, best.ids, worst.ids)


def written_pairs(model: GPT, coder: Tokenizer, config: Config) -> tuple[list[Pair], int]:
    """Up to `config.pairs` pairs, and the number of groups dropped on the way; fewer where the instructions run out."""
    known = stories.read_instructions(stories.TRAIN_INSTRUCTIONS)
    room = model.config.context - config.limit
    prompts = [(words, coder.prompt(tokenizer.story_request(words))) for words in known]
    fitting = [(words, prompt) for words, prompt in prompts if len(prompt) <= room]
    if not fitting:
        raise UserError(
            f"no line of {stories.TRAIN_INSTRUCTIONS} leaves room for --limit {config.limit} tokens: lower it"
        )
    order = torch.randperm(len(fitting), generator=runtime.generator(config.seed, 1)).tolist()
    writing = runtime.generator(config.seed, 2)
    pairs: list[Pair] = []
    dropped = 0
    with tqdm(total=config.pairs, desc="pairs", unit="pair", disable=None) as bar:
        for start in range(0, len(order), config.batch):
            asked = [fitting[index] for index in order[start : start + config.batch]]
            rows = [prompt for _, prompt in asked for _ in range(config.group)]
            with runtime.autocast(model.device, config.precision):
                told = generate(model, rows, end=coder.end, limit=config.limit, generator=writing)
            for index, (words, _) in enumerate(asked):
                pair = preferred(words, told[index * config.group : (index + 1) * config.group], coder)
                dropped += pair is None
                if pair is not None and len(pairs) < config.pairs:
                    pairs.append(pair)
                    bar.update()
            if len(pairs) == config.pairs:
                break
    return pairs, dropped


def write_pairs(pairs: Sequence[Pair], coder: Tokenizer, path: Path) -> None:
    """Writes the pairs to `path`, whole or not at all.

    Raises: UserError where it cannot be written.
    """
    rows = [
        {
            "words": pair.words,
            "chosen": coder.answer_text(pair.chosen),
            "rejected": coder.answer_text(pair.rejected),
            "chosen_ids": pair.chosen,
            "rejected_ids": pair.rejected,
        }
        for pair in pairs
    ]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): free it, then run again") from None


def read_pairs(path: Path, vocabulary: int) -> list[Pair]:
    """The pairs of a file.

    Raises: UserError where it is missing, empty, or has a line that is no pair or an id beyond `vocabulary`.
    """
    pairs = []
    lines = stories.lines_of(stories.read_text(path, "python preferences.py makes it"))
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            sides = [row["chosen_ids"], row["rejected_ids"]]
            known = all(isinstance(token, int) and 0 <= token < vocabulary for side in sides for token in side)
            if not known or not all(sides):
                raise ValueError
            pairs.append(Pair(stories.checked_words(row["words"]), *sides))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number} is no pair: python preferences.py makes it anew") from None
    return pairs


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    model, _ = checkpoint.load(config.model, device)
    if config.limit >= model.config.context:
        raise UserError(f"--limit {config.limit}: less than the model's context of {model.config.context} tokens")
    pairs, dropped = written_pairs(model, coder, config)
    if not pairs:
        raise UserError(
            f"all {dropped} groups tied: the model's stories use the words equally often; ask a better model"
        )
    write_pairs(pairs, coder, PAIRS)
    print(f"{PAIRS}: {len(pairs):,} of {config.pairs:,} pairs; {dropped:,} groups that tied or were one story dropped")


if __name__ == "__main__":
    runtime.run(main)
