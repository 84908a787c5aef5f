"""Raw text to `data/`: tokenizer, token files for pre-training, stories with instructions for fine-tuning, word lists.

    python prepare.py                       downloads 60 MB of TinyStories, then 1 minute
    python prepare.py --stories PATH        the same from a local file, plain or TinyStories-Instruct
    python prepare.py --gsm8k               brings GSM8K's word problems to data/gsm8k/, 5 MB, and nothing else

Reads TinyStoriesV2-GPT4 (Eldan and Li 2023, arXiv 2305.07759; CDLA-Sharing-1.0), or a local file. Writes
`data/tokens-train.npy` and `data/tokens-heldout.npy` (uint16, an end of text before each story; their SHA-256 behind),
`data/stories-train.jsonl` (a story and its words a line), and `data/instructions-train.jsonl` and `-heldout.jsonl`
(word lists only). The shipped tokenizer is kept, as the shipped model knows no other; `--new-tokenizer` trains one on
these stories and generated problems.
"""

import dataclasses
import hashlib
import http.client
import itertools
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy
import rustbpe
from tqdm import tqdm

import problems
import runtime
import situations
import stories
import tokenizer
from runtime import Checked, Count, Seed, UserError
from stories import DrawConfig, Story
from tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of a preparation."""

    stories: Path | None = None  # local file of stories to use in place of the download
    megabytes: Count = 60  # of TinyStories to download; 60 are about 75,000 stories
    new_tokenizer: bool = False  # train a tokenizer, which no trained model can read
    # Tokens, the special ones among them: small, as the head is a sixth of the model's work.
    vocabulary: Annotated[
        int, runtime.bound("between 300 and 65536, as token files hold 16 bits a token", lambda n: 300 <= n <= 65_536)
    ] = 4_096
    # Generated word problems the tokenizer sees beside the stories.
    problems: Annotated[int, runtime.NOT_NEGATIVE] = 20_000
    seed: Seed = 1
    url: str = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt"
    gsm8k: bool = False  # bring only GSM8K's files (Cobbe et al. 2021; MIT), to data/gsm8k/
    gsm8k_url: str = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
    timeout_s: Count = 30  # seconds without an answer before a download counts as broken off
    draw: DrawConfig = dataclasses.field(default_factory=DrawConfig)  # which words stand in an instruction


DOWNLOAD = Path("data/tinystories-download.txt")
TRAIN_TOKENS = Path("data/tokens-train.npy")
HELDOUT_TOKENS = Path("data/tokens-heldout.npy")
GSM8K = Path("data/gsm8k")
GSM8K_BYTES = 10_000_000  # more than either of its files has


def download(url: str, path: Path, size: int, timeout_s: int, otherwise: str) -> None:
    """Brings the first `size` bytes of `url` to `path` by HTTP range, going on behind what an earlier try left there.

    otherwise: what a user who is offline can do.
    Raises: UserError where the connection fails or the server's answer is not the range asked for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    have = path.stat().st_size if path.exists() else 0
    if have >= size:
        return
    again = f"run python prepare.py again to go on, or {otherwise}"
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-{size - 1}"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer, path.open("ab") as file:
            whole = answer.headers.get("Content-Range", "")
            if answer.status != 206 or not whole.startswith(f"bytes {have}-"):
                raise UserError(f"{url} does not serve parts of a file (status {answer.status}): {again}")
            last = min(size, int(whole.rpartition("/")[2]))
            with tqdm(total=last, initial=have, unit="B", unit_scale=True, desc="download", disable=None) as bar:
                while block := answer.read(1 << 16):
                    file.write(block)
                    bar.update(len(block))
    except (http.client.HTTPException, OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # the whole file is here, and is smaller than asked for
        raise UserError(f"{url} cannot be read ({error}): {again}") from None
    if path.stat().st_size != last:
        raise UserError(f"{url} broke off after {path.stat().st_size} of {last} bytes: {again}")


def downloaded_stories(path: Path, size: int) -> list[Story]:
    """The whole stories among the first `size` bytes of the download; the last, cut one is left out."""
    with path.open("rb") as file:
        text = file.read(size).decode("utf-8", errors="ignore")  # only a character cut at the end can fail to decode
    whole = text.rpartition(stories.END_OF_TEXT)[0].split(stories.END_OF_TEXT)
    return [Story(story) for story in dict.fromkeys(piece.strip() for piece in whole) if story]


def new_ranks(texts: Iterable[str], vocabulary: int) -> dict[bytes, int]:
    """Merges of a byte-level BPE trained on the texts; with the special tokens they make `vocabulary` ids."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts, vocabulary - len(tokenizer.SPECIAL), pattern=tokenizer.PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) + len(tokenizer.SPECIAL) != vocabulary:
        raise UserError(
            f"these stories give {len(ranks)} tokens, not {vocabulary}: pass more stories or a smaller --vocabulary"
        )
    return ranks


def token_stream(texts: list[str], coder: Tokenizer, name: str) -> numpy.ndarray:
    """uint16 ids of the texts, an end of text before each: every story starts as one does when it is sampled."""
    pieces = ([coder.end, *coder.encode(text)] for text in tqdm(texts, desc=name, unit="story", disable=None))
    return numpy.fromiter(itertools.chain.from_iterable(pieces), dtype=numpy.uint16)


def write_tokens(path: Path, ids: numpy.ndarray) -> None:
    """Writes the ids as an array file, whole or not at all, and the 32 bytes of their SHA-256 behind them.

    Raises: UserError where it cannot be written.
    """

    def write(file: BinaryIO) -> None:
        numpy.save(file, ids)
        file.write(hashlib.sha256(ids.tobytes()).digest())

    try:
        runtime.write_whole(path, write)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): free it, then run again") from None


def write_lines(path: Path, rows: Iterable[dict[str, object]]) -> int:
    """Writes a JSON line a row and returns how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def with_instructions(
    all_stories: list[Story], config: DrawConfig, rng: random.Random
) -> tuple[list[Story], list[Story]]:
    """Training and held-out stories with an instruction each.

    A training story gets one of its two draws, a held-out one both: there are few of those, and each instruction is
    one more to measure on.
    """
    marking = stories.marking_words([story.text for story in all_stories], config)
    train: list[Story] = []
    heldout: list[Story] = []
    for story, words in zip(all_stories, marking, strict=True):
        drawn = [story.words] if story.words else stories.drawn_instructions(words, config, rng)
        if stories.is_heldout(story.text, config.heldout_one_in):
            heldout.extend(Story(story.text, words) for words in drawn)
        else:
            train.extend(Story(story.text, words) for words in drawn[:1])
    return train, heldout


def prepare(config: Config) -> None:
    """Makes everything in `data/` from the stories.

    Raises: UserError where the source cannot be read, or has too few stories to hold some out.
    """
    if config.stories is None:
        otherwise = "pass a local file with --stories PATH"
        download(config.url, DOWNLOAD, config.megabytes * 1_000_000, config.timeout_s, otherwise)
        all_stories = downloaded_stories(DOWNLOAD, config.megabytes * 1_000_000)
    else:
        all_stories = stories.read_stories(config.stories)
    texts = {
        held: [s.text for s in all_stories if stories.is_heldout(s.text, config.draw.heldout_one_in) == held]
        for held in (False, True)
    }
    if not texts[True] or not texts[False]:
        source = config.stories or DOWNLOAD
        raise UserError(
            f"{source} has {len(all_stories)} stories, of which none is held out: pass a file with more stories"
        )
    if config.new_tokenizer or not tokenizer.PATH.exists():
        examples = situations.generated_problems(config.problems, config.seed, "train")
        tokenizer.save(
            new_ranks(
                itertools.chain(texts[False], (f"{p.question}\n{p.answer}" for p in examples)), config.vocabulary
            ),
            tokenizer.PATH,
        )
    coder = tokenizer.load()
    for path, held in ((TRAIN_TOKENS, False), (HELDOUT_TOKENS, True)):
        ids = token_stream(texts[held], coder, path.stem)
        write_tokens(path, ids)
        print(f"{path}: {len(texts[held]):,} stories, {len(ids):,} tokens")
    train, heldout = with_instructions(all_stories, config.draw, random.Random(config.seed))
    number = write_lines(stories.TRAIN_STORIES, ({"words": story.words, "story": story.text} for story in train))
    print(f"{stories.TRAIN_STORIES}: {number:,} stories with instructions")
    for path, told in ((stories.TRAIN_INSTRUCTIONS, train), (stories.HELDOUT_INSTRUCTIONS, heldout)):
        number = write_lines(path, ({"words": words} for words in dict.fromkeys(story.words for story in told)))
        print(f"{path}: {number:,} instructions")


def bring_gsm8k(config: Config) -> None:
    """Downloads GSM8K's training and test problems and reads them once.

    Raises: UserError where they cannot be had, or are not what they should be.
    """
    for name in ("train.jsonl", "test.jsonl"):
        otherwise = "copy the file there yourself"
        download(f"{config.gsm8k_url}/{name}", GSM8K / name, GSM8K_BYTES, config.timeout_s, otherwise)
        print(f"{GSM8K / name}: {len(problems.read_problems(GSM8K / name)):,} problems")


def main() -> None:
    config = runtime.parse(Config, __doc__)
    if config.gsm8k:
        bring_gsm8k(config)
    else:
        prepare(config)


if __name__ == "__main__":
    runtime.run(main)
