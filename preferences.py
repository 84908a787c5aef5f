"""Pairs for DPO: the model writes four stories per instruction; most of the words is preferred to fewest.

    python preferences.py           2,000 pairs
    python preferences.py 500       fewer

Reads `checkpoints/finetuned.pt` and `data/instructions-train.jsonl`. Writes `data/pairs.jsonl`, whole or not at all: a
JSON line a pair, with the words, and of both stories the text and the ids. Ids are kept because a story cut at the
limit has no end of text, which its text does not show.

There is no reward model and no human: `stories.words_used` is the preference. A group of which all stories use equally
many words, identical ones among them, says nothing and is dropped and counted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from tqdm import tqdm

import checkpoint
import runtime
import stories
import tokenizer
from model import GPT
from runtime import Checked, Count, Device, Precision, Seed, UserError
from sample import Completion, Instruction, fitting_instructions, generate
from tokenizer import Tokenizer

PAIRS = Path("data/pairs.jsonl")


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of the pairs."""

    # To write.
    pairs: Annotated[Count, tyro.conf.Positional, tyro.conf.arg(metavar="PAIRS")] = 2_000
    group: Annotated[int, runtime.at_least(2)] = 4  # stories an instruction, of which the best and the worst are kept
    batch: Count = 32  # instructions written together: 128 stories
    limit: Count = 200  # tokens of a story
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED


@dataclass(frozen=True, slots=True)
class Pair:
    """Two stories for one instruction, the first preferred."""

    words: tuple[str, ...]
    chosen: list[int]  # ids of the story; they end in the end of text where the model wrote it, not where it was cut
    rejected: list[int]


def preferred(words: tuple[str, ...], told: Sequence[Completion], coder: Tokenizer) -> Pair | None:
    """Most of the words against fewest, the first story of equals; None where all tie, as identical stories do."""
    scores = [stories.words_used(coder.answer_text(story.ids), words) for story in told]
    most, fewest = max(scores), min(scores)
    if most == fewest:
        return None
    return Pair(words, told[scores.index(most)].ids, told[scores.index(fewest)].ids)


def written_pairs(
    model: GPT, instructions: Sequence[Instruction], coder: Tokenizer, config: Config
) -> tuple[list[Pair], int]:
    """`config.pairs` pairs and the number of groups dropped on the way; fewer where the instructions run out."""
    order = torch.randperm(len(instructions), generator=runtime.generator(config.seed, 1)).tolist()
    writing = runtime.generator(config.seed, 2)
    pairs: list[Pair] = []
    dropped = 0
    with tqdm(total=config.pairs, desc="pairs", unit="pair", disable=None) as bar:
        for start in range(0, len(order), config.batch):
            asked = [instructions[index] for index in order[start : start + config.batch]]
            rows = [instruction.prompt for instruction in asked for _ in range(config.group)]
            with runtime.autocast(model.device, config.precision):
                told = generate(model, rows, end=coder.end, limit=config.limit, generator=writing)
            for index, instruction in enumerate(asked):
                pair = preferred(instruction.words, told[index * config.group : (index + 1) * config.group], coder)
                if pair is None:
                    dropped += 1
                    continue
                pairs.append(pair)
                bar.update()
                if len(pairs) == config.pairs:
                    return pairs, dropped
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
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8")
    try:
        runtime.write_whole(path, lambda file: file.write(lines))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): free it, then run again") from None


def story_ids(row: dict[str, Any], side: str, coder: Tokenizer) -> list[int]:
    """Ids of the chosen or the rejected story of a line.

    Raises: ValueError where they are no story, or not the one whose text stands beside them: the tokenizer is another.
    """
    ids = row[f"{side}_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"{side}_ids is not a list of ids")
    if not 0 <= min(ids) <= max(ids) < coder.vocabulary or coder.end in ids[:-1]:
        raise ValueError(f"{side}_ids is no story of this tokenizer")
    if coder.answer_text(ids) != row[side]:
        raise ValueError(f"{side}_ids and {side} differ")
    return ids


def read_pairs(path: Path, coder: Tokenizer) -> list[Pair]:
    """The pairs of a file.

    Raises: UserError where it is missing, empty, or has a line that is no pair or was written with another tokenizer.
    """
    pairs = []
    lines = stories.lines_of(stories.read_text(path, "python preferences.py makes it"))
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            words = stories.checked_words(row["words"])
            pairs.append(Pair(words, story_ids(row, "chosen", coder), story_ids(row, "rejected", coder)))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}, line {number} is no pair of this tokenizer: python preferences.py makes it anew"
            ) from None
    return pairs


def main() -> None:
    config = runtime.parse(Config, __doc__)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    model, _ = checkpoint.load(config.model, device, coder.vocabulary)
    if config.limit >= model.config.context:
        raise UserError(f"--limit {config.limit}: less than the model's context of {model.config.context} tokens")
    instructions = fitting_instructions(stories.TRAIN_INSTRUCTIONS, coder, model.config.context - config.limit)
    pairs, dropped = written_pairs(model, instructions, coder, config)
    if not pairs:
        raise UserError(
            f"all {dropped} groups tied: the model's stories use the words equally often; pass a better --model"
        )
    write_pairs(pairs, coder, PAIRS)
    ran_out = "; the instructions ran out" if len(pairs) < config.pairs else ""
    print(f"{PAIRS}: {len(pairs):,} of {config.pairs:,} pairs; {dropped:,} groups that tied dropped{ran_out}")


if __name__ == "__main__":
    runtime.run(main)
