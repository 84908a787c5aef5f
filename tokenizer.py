"""Text to token ids and back, the special tokens, and the template of a conversation.

Byte-level BPE with 4,096 tokens, digits one by one, stored as a standard `.tiktoken` file
(`data/tokenizer.tiktoken`, made by `prepare.py`) and run by tiktoken. Every text round-trips.

A conversation is `<|user|>PROMPT<|assistant|>ANSWER<|endoftext|>`. The three special tokens are added by id and text
is encoded without them, so `<|endoftext|>` in a user's text is just characters. Prompt and answer are encoded apart
and joined, so the prompt's ids are a prefix of the conversation's whatever the answer is.
"""

import base64
import binascii
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tiktoken

from runtime import UserError
from stories import composed

PATH = Path("data/tokenizer.tiktoken")
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # they take the last ids of the vocabulary

# Text is cut before merges into contractions, words with a space or sign before them, digits, signs, white space.
PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    """The tokenizer whose merges are `ranks`: token bytes -> id, without the special tokens."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.ranks = ranks
        self.end, self.user, self.assistant = range(len(ranks), len(ranks) + len(SPECIAL))
        special = dict(zip(SPECIAL, (self.end, self.user, self.assistant), strict=True))
        self.encoding = tiktoken.Encoding("fable", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.vocabulary = len(ranks) + len(SPECIAL)

    def encode(self, text: str) -> list[int]:
        """Ids of the text; never a special one."""
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens by name, bytes that are no UTF-8 as the replacement character."""
        return self.encoding.decode(list(ids))

    def answer_text(self, ids: Sequence[int]) -> str:
        """Text of an answer's ids before its first end of text."""
        ids = list(ids)
        return self.decode(ids[: ids.index(self.end)] if self.end in ids else ids)

    def prompt(self, text: str) -> list[int]:
        """Ids that a model continues with its answer to `text`."""
        return [self.user, *self.encode(text), self.assistant]

    @cached_property
    def pieces(self) -> list[str]:
        """Text of each token of the vocabulary, by id."""
        return [self.decode([token]) for token in range(self.vocabulary)]


def story_request(words: Sequence[str]) -> str:
    """What a user says to ask for a story with these words, the same however their accents and apostrophes are typed.

    Raises: ValueError without words.
    """
    if not words:
        raise ValueError("a story is asked for with at least one word")
    *most, last = map(composed, words)
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"Write a story that uses the word{'s' if most else ''} {listed}."


def load(path: Path = PATH) -> Tokenizer:
    """The tokenizer stored at `path`.

    Raises: UserError where the file is missing or is no tokenizer.
    """
    # tiktoken's own reader caches files by *name* in the system's temporary folder: a retrained one would go unseen.
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in (line.split() for line in lines)}
    except FileNotFoundError:
        raise UserError(f"{path} is missing: python prepare.py makes it") from None
    except (ValueError, binascii.Error, OSError) as error:
        raise UserError(f"{path} is not a tokenizer ({error}): python prepare.py --new-tokenizer makes one") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([value]) in ranks for value in range(256)):
        raise UserError(f"{path} is not a whole tokenizer: python prepare.py --new-tokenizer makes one")
    return Tokenizer(ranks)


def save(ranks: dict[bytes, int], path: Path) -> None:
    """Writes the merges as a `.tiktoken` file: a line a token, its bytes in base64 and its rank."""
    lines = (
        f"{base64.b64encode(token).decode()} {rank}\n"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="ascii")
