"""Reading stories and instructions, drawing instructions from stories; `words_used`, the reward, and its blind spots.

A stories file is TinyStories' own format: plain text with `<|endoftext|>` between stories. A TinyStories-Instruct
file (fields `Words:`, `Features:`, `Summary:`, `Story:` in any order) is read the same way, and its own `Words:`
become the instruction.
An instructions file has a JSON line per instruction: `{"words": ["kite", "river", "brave"]}`.

Instructions are drawn from any story in hindsight: three of the six words that mark it out most, so they name its
subject, as the prompts of TinyStories do (Eldan and Li 2023, arXiv 2305.07759, section 2).
"""

import hashlib
import itertools
import json
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from runtime import Count, UserError, bound, check

END_OF_TEXT = "<|endoftext|>"
TRAIN_INSTRUCTIONS = Path("data/instructions-train.jsonl")
HELDOUT_INSTRUCTIONS = Path("data/instructions-heldout.jsonl")
HELDOUT_STORIES = Path("data/stories-heldout.txt")
TRAIN_STORIES = Path("data/stories-train.jsonl")

# A letter of any alphabet, or an accent written behind it; of apostrophes text has several.
LETTER = r"(?:[^\W\d_]|[\u0300-\u036f])"
APOSTROPHE = "['\u2018\u2019\u02bc\uff07]"
WORD = re.compile(rf"{LETTER}+(?:{APOSTROPHE}{LETTER}+)?")
INSIDE = re.compile(rf"(?<=[a-z,] ){LETTER}+")  # of a sentence, where a capital marks a name
FIELD = re.compile(r"^(Words|Features|Summary|Story|Random sentence):", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Story:
    """A story and the words that an instruction for it names; none where they are still to be drawn."""

    text: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawConfig:
    """Which words may stand in an instruction."""

    words: Count = 3  # words an instruction names
    marking: int = 6  # the words of a story they are drawn from: its highest count x log inverse document frequency
    least_stories: Count = 20  # stories a word must be in: below, the model cannot have learned it
    # Share of stories a word may be in: above, a story uses it unasked.
    most_share: Annotated[float, bound("more than 0, at most 1", lambda share: 0 < share <= 1)] = 0.1
    heldout_one_in: Count = 200  # stories of which one is held out whole

    def __post_init__(self) -> None:
        check(self, "--draw.")
        if self.marking < self.words:
            raise ValueError(f"--draw.marking {self.marking}: at least {self.words}")


def composed(text: str) -> str:
    """Text with each accent in one character with its letter (NFC), and with the straight apostrophe only."""
    return re.sub(APOSTROPHE, "'", unicodedata.normalize("NFC", text))


def plain(word: str) -> str:
    """A word as it is compared: composed, in lower case."""
    return composed(word).lower()


def uses(story: str, words: Iterable[str]) -> dict[str, int]:
    """How often `story` uses each of the distinct `words`: a word of the story begins with it, as `plain` writes both.

    "help" is used by "helped" and by "HELP!", not by "whelp". What stands after an end of text is not part of the
    story.
    Raises: ValueError without words.
    """
    wanted = dict.fromkeys(map(plain, words))
    if not wanted:
        raise ValueError("an instruction without words has no reward")
    said = [plain(word) for word in WORD.findall(story.split(END_OF_TEXT, 1)[0])]
    return {stem: sum(word.startswith(stem) for word in said) for stem in wanted}


def words_used(story: str, words: Iterable[str]) -> float:
    """Share of the distinct `words`, 0 to 1, that `story` uses at least once: the reward.

    Raises: ValueError without words.
    """
    times = uses(story, words)
    return sum(number > 0 for number in times.values()) / len(times)


def word_repeats(told: Iterable[tuple[str, Iterable[str]]]) -> float:
    """How often a requested word that a story uses stands in it, on average: 1 is never again; 0 where none is used.

    told: stories with the words they were asked to use.
    """
    times = [number for story, words in told for number in uses(story, words).values() if number]
    return sum(times) / len(times) if times else 0.0


def marked(story: str, words: Iterable[str]) -> list[tuple[str, int]]:
    """The story in pieces, joined again its text: each with 0, or, where it uses a requested word, with how often so
    far, from 1.
    """
    wanted = dict.fromkeys(map(plain, words), 0)
    pieces: list[tuple[str, int]] = []
    done = 0
    for found in WORD.finditer(story.split(END_OF_TEXT, 1)[0]):
        stem = next((stem for stem in wanted if plain(found[0]).startswith(stem)), None)
        if stem is not None:
            wanted[stem] += 1
            pieces += [(story[done : found.start()], 0), (found[0], wanted[stem])]
            done = found.end()
    return [piece for piece in (*pieces, (story[done:], 0)) if piece[0]]


def distinct_pairs(rows: Sequence[Sequence[int]]) -> float:
    """Share of distinct pairs among all pairs of neighbouring tokens, over all rows; 0 without pairs."""
    pairs = Counter(pair for row in rows for pair in itertools.pairwise(row))
    return len(pairs) / pairs.total() if pairs else 0.0


def repeated_4grams(rows: Sequence[Sequence[int]]) -> float:
    """Share of runs of four tokens that stood earlier in the same row, over all rows; 0 without such runs."""
    runs = [[tuple(row[start : start + 4]) for start in range(len(row) - 3)] for row in rows]
    total = sum(map(len, runs))
    return sum(len(own) - len(set(own)) for own in runs) / total if total else 0.0


def read_text(path: Path, maker: str) -> str:
    """The text of a file; `maker` says what to run when it is missing.

    Raises: UserError where it is missing, empty or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {maker}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): convert it, then run again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {maker}") from None
    if not text.strip():
        raise UserError(f"{path} is empty: {maker}")
    return text


def lines_of(text: str) -> list[str]:
    """Lines of a file of JSON lines; only a newline ends one, not the separators that may stand inside a JSON text."""
    return text.removesuffix("\n").split("\n")


def read_stories(path: Path) -> list[Story]:
    """The distinct stories of a file, in its order.

    Raises: UserError where the file is missing, empty, not UTF-8, or has no story.
    """
    advice = "python prepare.py --stories PATH takes any file of stories"
    pieces = read_text(path, advice).split(END_OF_TEXT)
    stories = {story.text: story for piece in pieces if (story := parsed_story(piece)).text}
    if not stories:
        raise UserError(f"{path} has no stories: {advice}")
    return list(stories.values())


def parsed_story(piece: str) -> Story:
    """A story from one piece of a file, plain or with TinyStories-Instruct's fields."""
    if not re.search(r"^Story:", piece, re.MULTILINE):
        return Story(piece.strip())
    _, *parts = FIELD.split(piece)
    fields = dict(zip(parts[::2], parts[1::2], strict=True))
    words = dict.fromkeys(plain(word.strip()) for word in fields.get("Words", "").split(",") if word.strip())
    return Story(fields["Story"].strip(), tuple(words))


def is_heldout(text: str, one_in: int) -> bool:
    """Whether a story is held out: decided by its text alone, so a re-run or a bigger download keeps the split."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") % one_in == 0


def marking_words(stories: Sequence[str], config: DrawConfig) -> list[list[str]]:
    """Of each story the words that mark it out most, best first: highest count x log inverse document frequency.

    Left out are words in too few or too many stories, and names: words mostly written with a capital inside a sentence.
    """
    counts = [Counter(map(plain, WORD.findall(story))) for story in stories]
    document_frequency = Counter(word for count in counts for word in count)
    inside = Counter(word for story in stories for word in INSIDE.findall(story))
    lower: Counter[str] = Counter()
    capital: Counter[str] = Counter()
    for word, times in inside.items():
        cased = lower if word.islower() else capital
        cased[plain(word)] += times
    most = max(config.most_share * len(stories), config.least_stories)
    weight = {
        word: math.log(len(stories) / frequency)
        for word, frequency in document_frequency.items()
        if config.least_stories <= frequency <= most
        and lower[word] > capital[word]
        and len(word) > 2
        and word.isalpha()
    }
    chosen = []
    for count in counts:
        scores = {word: number * weight[word] for word, number in count.items() if word in weight}
        chosen.append(sorted(scores, key=lambda word: (-scores[word], word))[: config.marking])
    return chosen


def drawn_instructions(marking: Sequence[str], config: DrawConfig, rng: random.Random) -> list[tuple[str, ...]]:
    """Instructions drawn without replacement from a story's marking words: two of six words, else one or none."""
    shuffled = rng.sample(list(marking), len(marking))
    groups = [tuple(shuffled[start : start + config.words]) for start in range(0, len(shuffled), config.words)]
    return [group for group in groups if len(group) == config.words]


def checked_words(words: object) -> tuple[str, ...]:
    """The words of an instruction that stood in a file.

    Raises: ValueError where they are not a list of words.
    """
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"{words!r} is not a list of words")
    return tuple(words)


def read_instructions(path: Path) -> list[tuple[str, ...]]:
    """The word lists of an instructions file.

    Raises: UserError where the file is missing, empty or has a line that is no instruction.
    """
    instructions = []
    for number, line in enumerate(lines_of(read_text(path, "python prepare.py makes it")), start=1):
        try:
            instructions.append(checked_words(json.loads(line)["words"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{path}, line {number} is not {{"words": [...]}}: python prepare.py makes it anew'
            ) from None
    return instructions
