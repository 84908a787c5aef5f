"""Grade-school word problems: generated ones, GSM8K's files, the calculator and the grader.

    python problems.py              prints five generated problems with their answers
    python problems.py 20 --seed 3

A problem is in GSM8K's own format (Cobbe et al. 2021, arXiv 2110.14168): a question, and an answer worked out step by
step with calculator calls, `<<48/2=24>>`, whose last line is `#### 24`. When a model writes an answer, the program
computes what stands between `=` and `>>`. It parses + - * / and parentheses itself and bounds the work before doing it:
no text can run code or stall.

A generated problem tells how a quantity comes about (an opening), how it changes (moves), and what is asked of it (an
ending). Each of the three has many kinds and each kind several phrasings: what must be learned is which operation a
sentence means.
"""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import tyro

import runtime

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Config:
    """How many problems to print."""

    number: Annotated[int, tyro.conf.Positional] = 5
    seed: int = 1
    split: Split = "train"

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"NUMBER {self.number}: at least 1")


@dataclass(frozen=True, slots=True)
class MixConfig:
    """What generated problems are like."""

    steps: tuple[float, ...] = (0.35, 0.3, 0.2, 0.15)  # shares of problems with one, two, three, four steps
    distractor: float = 0.15  # share with a sentence that has nothing to do with the question
    largest: int = 400  # no number of a problem is above it; GSM8K's are mostly below
    start: int = 60  # openings draw from 2 to this
    change: int = 40  # moves add or take from 2 to this
    factor: int = 9  # moves multiply or divide by 2 to this
    test_one_in: int = 10  # questions of which one is a test question, by a hash of its text


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its worked answer, which ends in `#### NUMBER`."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Step:
    """One calculation: `name` = `left` `operation` `right`, the operands being quantities named before."""

    name: str
    operation: str  # one of + - * /
    left: str
    right: str


@dataclass(slots=True)
class Draft:
    """A problem while it is put together: what the question gives, how the answer follows, and the text of both."""

    given: dict[str, int] = field(default_factory=dict)  # quantities the question names
    steps: list[Step] = field(default_factory=list)
    asked: str = ""  # quantity the question is about
    kinds: list[str] = field(default_factory=list)  # kinds of opening, moves and ending, in order: the situation
    sentences: list[str] = field(default_factory=list)  # of the question
    lines: list[str] = field(default_factory=list)  # of the answer
    values: dict[str, int] = field(default_factory=dict)  # of all quantities

    def give(self, value: int) -> str:
        """Names a quantity that the question gives."""
        name = f"g{len(self.given)}"
        self.given[name] = self.values[name] = value
        return name

    def work_out(self, operation: str, left: str, right: str, line: str) -> str:
        """Adds a step and its line, in which `@` stands for the calculation; names its result."""
        a, b = self.values[left], self.values[right]
        if operation == "/":
            assert b, (a, b)
            assert a % b == 0, (a, b)
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
        name = f"s{len(self.steps)}"
        self.steps.append(Step(name, operation, left, right))
        self.values[name] = result
        self.lines.append(line.replace("@", f"{a}{operation}{b}=<<{a}{operation}{b}={result}>>{result}"))
        return name


# Names with their pronouns.
PEOPLE = tuple(
    (name, pronoun)
    for pronoun, names in (
        ("she", "Lily Anna Mia Sue Lucy Emma Sara Amy Jane Kate Molly Rose Ella Nina Zoe Eva"),
        ("he", "Tom Ben Max Tim Sam Jack Leo Bob Dan Joe Finn Mark Nick Paul Adam Luke"),
    )
    for name in names.split()
)

# A theme: things, how they come and go, what holds them, and another thing for a sentence that does not matter.
# (things, gaining verb, losing verb, container, containers, distractor)
THEMES = (
    ("apples", "picks", "eats", "basket", "baskets", "pears"),
    ("books", "buys", "gives away", "shelf", "shelves", "pens"),
    ("marbles", "wins", "loses", "bag", "bags", "balls"),
    ("stickers", "gets", "uses", "sheet", "sheets", "crayons"),
    ("cookies", "bakes", "eats", "plate", "plates", "cakes"),
    ("flowers", "picks", "sells", "vase", "vases", "leaves"),
    ("shells", "finds", "loses", "jar", "jars", "stones"),
    ("coins", "saves", "spends", "purse", "purses", "keys"),
    ("eggs", "collects", "breaks", "box", "boxes", "hens"),
    ("cards", "trades for", "gives away", "pack", "packs", "dice"),
    ("blocks", "gets", "loses", "tower", "towers", "dolls"),
    ("candies", "buys", "eats", "bag", "bags", "toys"),
    ("balloons", "blows up", "pops", "bunch", "bunches", "hats"),
    ("pencils", "buys", "breaks", "case", "cases", "rulers"),
    ("fish", "catches", "lets go", "tank", "tanks", "frogs"),
    ("carrots", "pulls up", "cooks", "bunch", "bunches", "beans"),
    ("muffins", "makes", "sells", "tray", "trays", "cups"),
    ("toy cars", "gets", "breaks", "box", "boxes", "trains"),
    ("beads", "finds", "uses", "string", "strings", "ribbons"),
    ("stamps", "collects", "mails", "page", "pages", "letters"),
    ("nuts", "gathers", "eats", "hole", "holes", "birds"),
    ("grapes", "washes", "eats", "bowl", "bowls", "plums"),
    ("buttons", "finds", "sews on", "tin", "tins", "needles"),
    ("lemons", "buys", "squeezes", "crate", "crates", "limes"),
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a problem is about."""

    name: str
    pronoun: str
    other: str
    things: str
    gains: str
    loses: str
    container: str
    containers: str
    distractor: str


def told(rng: random.Random, phrasings: Sequence[str], cast: Cast, **numbers: int) -> str:
    """One of the phrasings with the cast and numbers in place; N and M are the people, P the pronoun, T the things."""
    text = rng.choice(phrasings)
    words = {"N": cast.name, "M": cast.other, "P": cast.pronoun, "T": cast.things}
    words |= {"gains": cast.gains, "loses": cast.loses, "box": cast.container, "boxes": cast.containers}
    text = text.format(**words, **numbers)
    return text[0].upper() + text[1:]


def opening(draft: Draft, kind: str, rng: random.Random, cast: Cast, mix: MixConfig) -> str:
    """Tells how many things there are at first; names that quantity. All kinds but `has` take a step."""
    phrasings: tuple[str, ...]
    small = rng.randint(2, mix.factor)
    amount = rng.randint(2, mix.start)
    draft.kinds.append(kind)
    if kind == "has":
        phrasings = ("{N} has {a} {T}.", "There are {a} {T} on {N}'s table.", "{N} starts with {a} {T}.")
        draft.sentences.append(told(rng, phrasings, cast, a=amount))
        return draft.give(amount)
    if kind == "boxes":
        per = rng.randint(2, 20)
        phrasings = (
            "{N} has {a} {boxes} with {b} {T} in each.",
            "{N} fills {a} {boxes}. Each {box} holds {b} {T}.",
            "There are {b} {T} in each {box}, and {N} has {a} {boxes}.",
        )
        draft.sentences.append(told(rng, phrasings, cast, a=small, b=per))
        line = told(rng, ("{N} has @ {T}.", "There are @ {T} in the {boxes}."), cast)
        return draft.work_out("*", draft.give(small), draft.give(per), line)
    if kind == "days":
        per = rng.randint(2, 20)
        phrasings = (
            "{N} {gains} {a} {T} every day for {b} days.",
            "Each day {N} {gains} {a} {T}. {P} does this for {b} days.",
            "For {b} days, {N} {gains} {a} {T} a day.",
        )
        draft.sentences.append(
            told(rng, phrasings, cast, a=per, b=small).replace(". he ", ". He ").replace(". she ", ". She ")
        )
        line = told(rng, ("In all the days {N} gets @ {T}.", "That makes @ {T}."), cast)
        return draft.work_out("*", draft.give(per), draft.give(small), line)
    if kind == "together":
        second = rng.randint(2, mix.start)
        phrasings = (
            "{N} has {a} {T} and {M} has {b} {T}. {M} gives all of them to {N}.",
            "{N} {gains} {a} {T} in the morning and {b} {T} in the evening.",
            "{N} has {a} red {T} and {b} blue {T}.",
        )
        draft.sentences.append(told(rng, phrasings, cast, a=amount, b=second))
        line = told(rng, ("{N} has @ {T}.", "Together that is @ {T}."), cast)
        return draft.work_out("+", draft.give(amount), draft.give(second), line)
    if kind == "more":
        phrasings = ("{M} has {a} {T}. {N} has {b} more {T} than {M}.", "{N} has {b} more {T} than {M}, who has {a}.")
        draft.sentences.append(told(rng, phrasings, cast, a=amount, b=small))
        return draft.work_out("+", draft.give(amount), draft.give(small), told(rng, ("{N} has @ {T}.",), cast))
    if kind == "fewer":
        phrasings = ("{M} has {a} {T}. {N} has {b} fewer {T} than {M}.", "{N} has {b} fewer {T} than {M}, who has {a}.")
        draft.sentences.append(told(rng, phrasings, cast, a=amount + small, b=small))
        return draft.work_out("-", draft.give(amount + small), draft.give(small), told(rng, ("{N} has @ {T}.",), cast))
    assert kind == "times", kind
    phrasings = ("{M} has {a} {T}. {N} has {b} times as many.", "{N} has {b} times as many {T} as {M}, who has {a}.")
    draft.sentences.append(told(rng, phrasings, cast, a=amount, b=small))
    return draft.work_out("*", draft.give(amount), draft.give(small), told(rng, ("{N} has @ {T}.",), cast))


def move(draft: Draft, kind: str, now: str, rng: random.Random, cast: Cast, mix: MixConfig) -> str | None:
    """Tells how the quantity `now` changes, in one step; names the new one, or None where the numbers forbid it."""
    phrasings: tuple[str, ...]
    have = draft.values[now]
    draft.kinds.append(kind)
    if kind == "gain":
        amount = rng.randint(2, mix.change)
        phrasings = ("{N} {gains} {a} more.", "{M} gives {N} {a} more {T}.", "Then {N} {gains} {a} more {T}.")
        draft.sentences.append(told(rng, phrasings, cast, a=amount))
        return draft.work_out(
            "+", now, draft.give(amount), told(rng, ("Then {N} has @ {T}.", "That makes @ {T}."), cast)
        )
    if kind == "lose":
        if have < 3:
            return None
        amount = rng.randint(1, min(have - 1, mix.change))
        phrasings = (
            "{N} {loses} {a} of them.",
            "{N} gives {a} {T} to {M}.",
            "Then {N} {loses} {a} {T}.",
            "{a} of the {T} get lost.",
        )
        draft.sentences.append(told(rng, phrasings, cast, a=amount))
        return draft.work_out(
            "-", now, draft.give(amount), told(rng, ("Then {N} has @ {T}.", "That leaves @ {T}."), cast)
        )
    if kind == "multiply":
        factor = rng.randint(2, 4)
        word = {2: "twice", 3: "three times", 4: "four times"}[factor]
        phrasings = (f"A week later {{N}} has {word} as many.", f"After a good day {{N}} has {word} as many {{T}}.")
        draft.sentences.append(told(rng, phrasings, cast))
        return draft.work_out(
            "*", now, draft.give(factor), told(rng, ("Then {N} has @ {T}.", "That makes @ {T}."), cast)
        )
    assert kind == "half", kind
    if have % 2 or have < 4:
        return None
    phrasings = ("{N} gives half of them to {M}.", "{N} {loses} half of the {T}.", "Half of the {T} get lost.")
    draft.sentences.append(told(rng, phrasings, cast))
    return draft.work_out("/", now, draft.give(2), told(rng, ("Then {N} has @ {T}.", "Half of them is @ {T}."), cast))


def ending(draft: Draft, kind: str, now: str, rng: random.Random, cast: Cast, mix: MixConfig) -> str | None:
    """Asks about `now`, in a step but for the kind `now`; names the answer, None where the numbers forbid it."""
    phrasings: tuple[str, ...]
    have = draft.values[now]
    draft.kinds.append(kind)
    if kind == "now":
        phrasings = (
            "How many {T} does {N} have now?",
            "How many {T} are there now?",
            "How many {T} does {N} have in the end?",
        )
        draft.sentences.append(told(rng, phrasings, cast))
        return now
    if kind in ("each", "bags"):
        divisors = [k for k in range(2, 11) if have % k == 0 and have > k]
        if not divisors:
            return None
        k = rng.choice(divisors)
        phrasings = (
            (
                "{N} shares them equally among {a} friends. How many {T} does each friend get?",
                "How many {T} does each child get if {N} shares them equally among {a} children?",
            )
            if kind == "each"
            else (
                "{N} packs them into {boxes} of {a}. How many {boxes} does {N} need?",
                "If {a} {T} fit in one {box}, how many {boxes} can {N} fill?",
            )
        )
        draft.sentences.append(told(rng, phrasings, cast, a=k))
        lines = ("Each one gets @ {T}.",) if kind == "each" else ("{N} needs @ {boxes}.", "That fills @ {boxes}.")
        return draft.work_out("/", now, draft.give(k), told(rng, lines, cast))
    if kind == "money":
        price = rng.randint(2, mix.factor)
        phrasings = (
            "{N} sells them for ${a} each. How many dollars does {N} get?",
            "Each of the {T} is worth ${a}. How many dollars are all of them worth?",
        )
        draft.sentences.append(told(rng, phrasings, cast, a=price))
        return draft.work_out(
            "*", now, draft.give(price), told(rng, ("That is @ dollars.", "{N} gets @ dollars."), cast)
        )
    if kind in ("ahead", "both"):
        theirs = rng.randint(2, max(2, have - 1)) if kind == "ahead" else rng.randint(2, mix.start)
        if kind == "ahead" and theirs >= have:
            return None
        phrasings = (
            (
                "{M} has {a} {T}. How many more {T} does {N} have than {M}?",
                "How many fewer {T} does {M} have, who has {a}?",
            )
            if kind == "ahead"
            else (
                "{M} has {a} {T}. How many {T} do they have together?",
                "If {M} has {a} {T}, how many do both have in all?",
            )
        )
        draft.sentences.append(told(rng, phrasings, cast, a=theirs))
        operation, lines = ("-", ("{N} has @ more {T}.",)) if kind == "ahead" else ("+", ("Together they have @ {T}.",))
        return draft.work_out(operation, now, draft.give(theirs), told(rng, lines, cast))
    assert kind == "need", kind
    wanted = have + rng.randint(2, mix.change)
    phrasings = (
        "{N} wants to have {a} {T}. How many more does {N} need?",
        "How many {T} are missing if {N} needs {a}?",
    )
    draft.sentences.append(told(rng, phrasings, cast, a=wanted))
    return draft.work_out(
        "-", draft.give(wanted), now, told(rng, ("{N} needs @ more {T}.", "@ {T} are missing."), cast)
    )


def inverse(draft: Draft, steps: int, rng: random.Random, cast: Cast, mix: MixConfig) -> str:
    """Tells the changes and what is left, and asks for the start: each step undoes a change, the last one first."""
    phrasings: tuple[str, ...]
    have = rng.randint(2, mix.start)
    draft.sentences.append(told(rng, ("{N} has some {T}.", "At first {N} has a number of {T}."), cast))
    undo: list[tuple[str, int]] = []
    for _ in range(steps):
        kind = rng.choice(("gain", "lose") if have > 3 else ("gain",))
        amount = rng.randint(2, mix.change) if kind == "gain" else rng.randint(1, min(have - 1, mix.change))
        phrasings = (
            ("{N} {gains} {a} more.", "{M} gives {N} {a} more {T}.")
            if kind == "gain"
            else ("{N} {loses} {a} of them.", "{N} gives {a} {T} to {M}.")
        )
        draft.sentences.append(told(rng, phrasings, cast, a=amount))
        draft.kinds.append(f"un-{kind}")
        have += amount if kind == "gain" else -amount
        undo.append(("-" if kind == "gain" else "+", amount))
    draft.sentences.append(told(rng, ("Now {N} has {a} {T}.", "In the end {N} has {a} {T}."), cast, a=have))
    draft.sentences.append(
        told(rng, ("How many {T} did {N} have at first?", "How many {T} were there at the start?"), cast)
    )
    now = draft.give(have)
    for operation, amount in reversed(undo):
        now = draft.work_out(operation, now, draft.give(amount), told(rng, ("Before that {N} had @ {T}.",), cast))
    return now


OPENINGS = ("boxes", "days", "together", "more", "fewer", "times")
MOVES = ("gain", "lose", "multiply", "half")
ENDINGS = ("each", "bags", "money", "ahead", "both", "need")


def draft_problem(rng: random.Random, mix: MixConfig) -> Draft | None:
    """A problem of random kinds and numbers, or None where the numbers did not allow what was drawn."""
    (name, pronoun), (other, _) = rng.sample(PEOPLE, 2)
    cast = Cast(name, pronoun, other, *rng.choice(THEMES))
    steps = rng.choices(range(1, len(mix.steps) + 1), mix.steps)[0]
    draft = Draft(kinds=[cast.things])
    if rng.random() < 0.12:
        draft.asked = inverse(draft, steps, rng, cast, mix)
    else:
        opens, ends = rng.random() < 0.6, rng.random() < 0.7
        if steps == 1:  # one of the three takes the only step
            opens, ends = rng.choice(((True, False), (False, True), (False, False)))
        now: str | None = opening(draft, rng.choice(OPENINGS) if opens else "has", rng, cast, mix)
        for _ in range(steps - opens - ends):
            assert now is not None
            now = move(draft, rng.choice(MOVES), now, rng, cast, mix)
            if now is None:
                return None
        assert now is not None
        asked = ending(draft, rng.choice(ENDINGS) if ends else "now", now, rng, cast, mix)
        if asked is None:
            return None
        draft.asked = asked
    if rng.random() < mix.distractor:
        idle = f"{other} has {rng.randint(2, mix.start)} {cast.distractor}."
        draft.sentences.insert(rng.randrange(len(draft.sentences)), idle)
        draft.kinds.append("distractor")
    return draft if max(draft.values.values()) <= mix.largest else None


def problem_of(draft: Draft) -> Problem:
    """The draft's text."""
    return Problem(" ".join(draft.sentences), "\n".join([*draft.lines, f"#### {draft.values[draft.asked]}"]))


def is_test(question: str, one_in: int) -> bool:
    """Whether a question is a test question: decided by its text alone, so that no seed puts it in training."""
    return int.from_bytes(hashlib.sha256(question.encode("utf-8")).digest()[:8], "big") % one_in == 0


def generated_problems(number: int, seed: int, split: Split, mix: MixConfig | None = None) -> list[Problem]:
    """`number` different problems of a split; no question is in both, whatever the seeds."""
    mix = mix or MixConfig()
    rng = random.Random(f"{seed} {split}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        draft = draft_problem(rng, mix)
        if draft is None:
            continue
        problem = problem_of(draft)
        if is_test(problem.question, mix.test_one_in) == (split == "test"):
            found.setdefault(problem.question, problem)
    return list(found.values())


def read_problems(path: Path) -> list[Problem]:
    """The problems of a file in GSM8K's format, one JSON object a line.

    Raises: ValueError, a line that names the place, where it is missing, empty, not UTF-8, or has a broken line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: GSM8K's train.jsonl and test.jsonl have the format") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    known = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            question, answer = row["question"], row["answer"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path}, line {number} is not {{"question": ..., "answer": ...}}') from None
        if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
            raise ValueError(f"{path}, line {number}: question and answer must be text")
        if final_number(answer) is None:
            raise ValueError(f"{path}, line {number}: the answer has no '#### NUMBER'")
        known.append(Problem(question, answer))
    if not known:
        raise ValueError(f"{path} is empty")
    return known


CALL = re.compile(r"<<([^<>\n]*)=$")
SUPPLIED = re.compile(r"(<<[^<>\n=]*=)([^<>\n]*>>)")
NUMBER = re.compile(r"-?\$?-?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)")
LITERAL = re.compile(r"(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]*)?|\.[0-9]+)%?")
LONGEST = 100  # characters of an expression; GSM8K's longest have about 60
DEEPEST = 10  # parentheses inside one another


def segments(answer: str) -> list[tuple[str, bool]]:
    """The pieces of an answer; false for what the calculator supplies (`24>>` after `<<48/2=`), true for the rest."""
    pieces, start = [], 0
    for match in SUPPLIED.finditer(answer):
        pieces += [(answer[start : match.end(1)], True), (match.group(2), False)]
        start = match.end()
    return [piece for piece in [*pieces, (answer[start:], True)] if piece[0]]


def calculator_call(text: str) -> str | None:
    """The calculator's result where `text` ends in an open call, `<<48/2=`; None without a call or a result."""
    match = CALL.search(text[-LONGEST - 3 :])
    return calculator(match.group(1)) if match else None


def calculator(expression: str) -> str | None:
    """The value of an expression of numbers, + - * / and parentheses; None where it has none.

    Whole results print as whole numbers, others with up to six decimals. `1,000` is a number and `20%` a fifth.
    """
    text = expression.replace(" ", "").replace("$", "")
    if not 0 < len(text) <= LONGEST:
        return None
    value, end = total(text, 0, 0)
    if value is None or end != len(text):
        return None
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def total(text: str, start: int, depth: int) -> tuple[Fraction | None, int]:
    """Value of the sum that starts at `start`, and where it ends; the value is None where there is none."""
    value, end = product(text, start, depth)
    while value is not None and end < len(text) and text[end] in "+-":
        sign = 1 if text[end] == "+" else -1
        term, end = product(text, end + 1, depth)
        value = None if term is None else value + sign * term
    return value, end


def product(text: str, start: int, depth: int) -> tuple[Fraction | None, int]:
    """Value of the product that starts at `start`, and where it ends."""
    value, end = factor(text, start, depth)
    while value is not None and end < len(text) and text[end] in "*/":
        operation = text[end]
        term, end = factor(text, end + 1, depth)
        if term is None or (operation == "/" and term == 0):
            return None, end
        value = value * term if operation == "*" else value / term
    return value, end


def factor(text: str, start: int, depth: int) -> tuple[Fraction | None, int]:
    """Value of the number, negated factor or parenthesis that starts at `start`, and where it ends."""
    if start >= len(text) or depth > DEEPEST:
        return None, start
    if text[start] == "-":
        value, end = factor(text, start + 1, depth + 1)
        return None if value is None else -value, end
    if text[start] == "(":
        value, end = total(text, start + 1, depth + 1)
        return (value, end + 1) if text[end : end + 1] == ")" else (None, end)
    match = LITERAL.match(text, start)
    if match is None:
        return None, start
    digits = match.group().replace(",", "")
    return (Fraction(digits[:-1]) / 100 if digits.endswith("%") else Fraction(digits)), match.end()


def final_number(text: str) -> Fraction | None:
    """The number behind the last `####`; None without a marker or number."""
    _, marker, tail = text.rpartition("####")
    match = NUMBER.match(tail.lstrip()) if marker else None
    return Fraction(match.group().replace(",", "").replace("$", "").replace("--", "")) if match else None


def grade(answer: str, gold: str) -> bool:
    """Whether an answer's final number equals the gold answer's.

    Raises: ValueError where the gold answer has none: a missing gold answer is an error, not a match.
    """
    right = final_number(gold)
    if right is None:
        raise ValueError(f"a gold answer without '#### NUMBER': {gold[-80:]!r}")
    return final_number(answer) == right


def main() -> None:
    config = runtime.parse(Config, __doc__)
    for problem in generated_problems(config.number, config.seed, config.split):
        print(f"{problem.question}\n{problem.answer}\n")


if __name__ == "__main__":
    runtime.run(main)
