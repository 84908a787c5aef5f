"""Generated grade-school word problems, as many as asked: seeded, with whole answers, training and test apart.

    python situations.py              prints five problems with their answers
    python situations.py 20 --seed 3

A problem is a chain of calculations (how a quantity comes about, how it changes, what is asked of it), a row of people
compared, two amounts that meet, or changes to undo. Each part has many kinds and each kind several phrasings: what must
be learned is which operation a sentence means. All of them stand in `data/problems.toml`, whose top says how to add
one. Problems are in GSM8K's format (`problems.py`), and a question is a test question or not by a hash of its text, so
no seed brings one into both.
"""

import hashlib
import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import tyro

import runtime
from problems import Problem
from runtime import Checked, Count, Seed
from wording import CHAIN, MEETING, THEME, Content, Kind, read_content

Split = Literal["train", "test"]
AnyT = TypeVar("AnyT")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """How many problems to print."""

    # Of problems.
    number: Annotated[Count, tyro.conf.Positional, tyro.conf.arg(metavar="NUMBER")] = 5
    seed: Seed = 1
    split: Split = "train"


@dataclass(frozen=True, slots=True)
class MixConfig:
    """What generated problems are like."""

    steps: tuple[float, ...] = (0.1, 0.3, 0.3, 0.3)  # shares with one to four steps
    distractor: float = 0.15  # share with a sentence that has nothing to do with the question
    pronoun: float = 0.4  # share of sentences that say he or she where that is clear
    largest: int = 400  # no number of a problem is above it; GSM8K's are mostly below
    start: int = 60  # first amounts are from 2 to this; no 1 anywhere, as "1 apples" is no English
    change: int = 30  # moves add or take from 2 to this
    factor: int = 9  # moves multiply by 2 to this and divide by 2 to one more
    per: int = 20  # boxes hold, days bring and things cost from 2 to this
    test_one_in: int = 10  # questions of which one is a test question, by a hash of its text


class Unfit(Exception):
    """Numbers or people do not allow what was drawn."""


@dataclass(slots=True)
class Draft:
    """A problem while it is put together: what the question gives, how the answer follows, and the text of both."""

    rng: random.Random
    mix: MixConfig
    content: Content
    theme: dict[str, str]
    name: str
    others: list[str]  # people not yet mentioned; taken from the end
    colors: list[str]  # the first two come next
    kinds: list[str]  # the sort of problem, then kinds of what is told, in order
    steps: list[tuple[str, str, str, str]] = field(default_factory=list)  # result, operation, left, right quantity
    sentences: list[str] = field(default_factory=list)  # of the question
    lines: list[str] = field(default_factory=list)  # of the answer
    values: dict[str, int] = field(default_factory=dict)  # of quantities: g0, g1 ... given, s0, s1 ... worked out
    crowded: bool = True  # whether `he` or `she` would be unclear in the next sentence
    compared: tuple[str, str] | None = None  # a person whose amount an opening told, and that quantity

    def give(self, value: int) -> str:
        """Names a quantity that the question gives."""
        name = f"g{len(self.values)}"
        self.values[name] = value
        return name

    def work_out(self, operation: str, left: str, right: str, line: str) -> str:
        """Adds a step and its line, in which `@` stands for the calculation; names its result."""
        a, b = self.values[left], self.values[right]
        assert operation != "/" or a % b == 0, (a, b)
        name, calculation, result = f"s{len(self.steps)}", f"{a}{operation}{b}", OPERATIONS[operation](a, b)
        self.values[name] = result
        self.steps.append((name, operation, left, right))
        self.lines.append(line.replace("@", f"{calculation}=<<{calculation}={result}>>{result}"))
        return name

    def number(self, step: str, have: int) -> int:
        """A number for a step on `have`: results are whole, at least 2, and not above the largest."""
        mix, operation, back = self.mix, step[2], step.startswith("b")
        top = {
            "+": min(mix.change, mix.largest - have),
            "-": min(mix.change, mix.largest - have if back else have - 2),
            "*": min(mix.factor, mix.largest // have),
            "/": min(mix.factor + 1, have // 2),
        }[operation]
        fitting = [n for n in range(2, top + 1) if operation != "/" or have % n == 0]
        if step[-1].isdigit():  # half, twice: the words imply it
            fitting = [n for n in fitting if n == int(step[-1])]
        if not fitting:
            raise Unfit
        return fitting[0] if step[-1].isdigit() else self.rng.choice(fitting) + have * back

    def words(self, other: str = "", draws: bool = True) -> dict[str, str | int]:
        """What the blanks of a text stand for; uses up two colors, in place."""
        content = self.content
        he, his = ("she", "her") if self.name in content.she else ("he", "his")
        red, blue, *rest = self.colors
        self.colors = [*rest, red, blue]
        giver = (self.rng.choice(content.givers) if draws else content.givers[0]).format(his=his)
        own = {"N": self.name, "M": other, "G": giver, "he": he, "He": he.capitalize(), "red": red, "blue": blue}
        return {**self.theme, **own}

    def say(self, texts: Sequence[str], words: dict[str, str | int]) -> None:
        """Adds one of the texts to the question; N is often he or she where nobody else was just mentioned."""
        mix, text = self.mix, self.rng.choice(texts)
        if not self.crowded and text.startswith("{N} ") and self.rng.random() < mix.pronoun:
            text = "{He}" + text[3:]
        elif self.crowded and text.startswith("{He}"):
            text = "{N}" + text[4:]
        self.crowded = "{M}" in text or "{G}" in text
        text = text.format(**words)
        self.sentences.append(text[0].upper() + text[1:])


def pick(rng: random.Random, options: Sequence[AnyT]) -> AnyT:
    """One of them; draws nothing where there is only one."""
    return rng.choice(options) if len(options) > 1 else options[0]


def told(draft: Draft, kind: Kind, now: str | None = None) -> str:
    """Tells a kind, on the quantity `now` or on a first amount where there is none yet; names the new quantity."""
    rng, mix, step = draft.rng, draft.mix, kind.step
    draft.kinds.append(kind.name)
    if step.endswith("m") and draft.compared is None:
        raise Unfit
    other, theirs = draft.compared if step.endswith("m") and draft.compared else (draft.others.pop(), None)
    words = draft.words(other)
    first = rng.randint(2, mix.factor if step.startswith("a *") else mix.start)
    left = now or draft.give(first)
    have = draft.values[left]
    if not step:
        draft.say(kind.says, {**words, "a": have})
        return left
    each = now is None and step == "a * b"
    right = theirs or draft.give(rng.randint(2, mix.per) if each else draft.number(step, have))
    if step.startswith("m"):
        draft.compared = other, left
    words |= {"a": have, "b": draft.values[right], "m": draft.values[theirs or left]}
    draft.say(kind.says, words)
    line = rng.choice(kind.works).format(**words)
    return draft.work_out(step[2], *((right, left) if step.startswith("b") else (left, right)), line)


def chain(draft: Draft, steps: int) -> None:
    """Tells an opening, moves and an ending with as many steps in all."""
    rng, (sort,) = draft.rng, draft.kinds
    openings, moves, endings, asks = (draft.content.kinds(part, sort) for part in CHAIN)
    opens, ends = rng.random() < 0.6, rng.random() < 0.7
    if steps == 1:  # one of the three takes the only step
        opens, ends = rng.choice(((True, False), (False, True), (False, False)))
    if sort == "parts" and steps == opens + ends:
        raise Unfit  # the rest of what?
    now = told(draft, rng.choice([kind for kind in openings if bool(kind.step) == opens]))
    for _ in range(steps - opens - ends):
        now = told(draft, rng.choice(moves), now)
    if any(kind.once and draft.kinds.count(kind.name) > 1 for kind in moves):
        raise Unfit
    told(draft, rng.choice(endings if ends else asks), now)


def people(draft: Draft, steps: int) -> None:
    """Compares people in a row, told in any order; asks for the last one's amount or for all of them together."""
    rng = draft.rng
    openings, moves, endings, asks = (draft.content.kinds(part, "people") for part in CHAIN)
    add_up = steps in (2, 4) and rng.random() < 0.6  # half the steps are comparisons, the others add up
    words = draft.words(draws=False)
    amounts = [draft.give(rng.randint(2, draft.mix.start))]
    facts = [pick(rng, pick(rng, openings).says).format(**words, a=draft.values[amounts[0]])]
    for _ in range(steps // 2 if add_up else steps):
        kind = rng.choice(moves)
        words |= {"N": draft.others.pop(), "M": words["N"]}
        number = draft.number(kind.step, draft.values[amounts[-1]])
        facts.append(pick(rng, kind.says).format(**words, b=number))
        line = pick(rng, kind.works).format(**words)
        amounts.append(draft.work_out(kind.step[2], amounts[-1], draft.give(number), line))
        draft.kinds.append(kind.name)
    order = rng.choice(("told forward", "told backward"))
    ask = pick(rng, endings if add_up else asks)
    draft.sentences += [*(facts if order == "told forward" else facts[::-1]), pick(rng, ask.says).format(**words)]
    draft.kinds += [order, ask.name]
    now = amounts[0] if add_up else amounts[-1]
    for amount in amounts[1:] if add_up else ():
        now = draft.work_out("+", now, amount, pick(rng, ask.works).format(**words))


def meeting(draft: Draft, steps: int) -> None:
    """Tells amounts of two sorts of things; asks for their sum, their difference, or what follows from the sum."""
    rng, mix = draft.rng, draft.mix
    if steps == 1:
        raise Unfit
    sort = "prices" if rng.random() < 0.5 else "amounts"
    openings, endings, meets = (draft.content.kinds(part, sort) for part in MEETING)
    words = draft.words(draws=False)
    sides: list[str] = []
    for who, things in ((draft.name, words["T"]), (f"{words['He']} also", words["O"])):
        each = not sides or steps > 2  # else the second amount takes no step
        kind = pick(rng, [kind for kind in openings if bool(kind.step) == each])
        a, b = (rng.randint(2, mix.factor), rng.randint(2, mix.per)) if each else (rng.randint(2, mix.start), 0)
        own = {**words, "T": things, "a": a, "b": b}
        draft.sentences.append(pick(rng, kind.says).format(**{**own, "N": who}))
        side = draft.give(a)
        sides.append(draft.work_out("*", side, draft.give(b), pick(rng, kind.works).format(**own)) if each else side)
        draft.kinds.append(kind.name)
    one, two = sides
    less = steps < 4 and draft.values[one] > draft.values[two] and rng.random() < 0.5
    ask = pick(rng, [kind for kind in meets if ("-" in kind.step) == less])
    draft.kinds.append(ask.name)
    now = draft.work_out(ask.step[2], one, two, pick(rng, ask.works).format(**words))
    if steps == 4:
        told(draft, pick(rng, endings), now)
    else:
        draft.sentences.append(pick(rng, ask.says).format(**words))


def undoing(draft: Draft, steps: int) -> None:
    """Tells changes and what is left, and asks for the start: each step undoes a change, the last one first."""
    rng, texts, moves = draft.rng, draft.content.undoing, draft.content.kinds("moves", "undoing")
    have = rng.randint(2, draft.mix.start)
    draft.say(texts["begins"], draft.words())
    undo: list[tuple[str, int]] = []
    for _ in range(steps):
        kind = rng.choice(moves)
        number, operation = draft.number(kind.step, have), kind.step[2]
        draft.say(kind.says, {**draft.words(), "b": number})
        draft.kinds.append(f"un-{kind.name}")
        have = OPERATIONS[operation](have, number)
        undo.append((INVERSE[operation], number))
    draft.say(texts["leaves"], {**draft.words(), "a": have})
    words = draft.words()
    draft.say(texts["asks"], words)
    now = draft.give(have)
    for operation, number in reversed(undo):
        now = draft.work_out(operation, now, draft.give(number), pick(rng, texts["works"]).format(**words))


def distract(draft: Draft) -> None:
    """Adds a sentence with a number that does not matter, where no `them`, `he` or `she` can mean it; in place."""
    rng, things = draft.rng, draft.theme["T"]
    unclear = re.compile(r"\b([Hh]e|[Ss]he|them|they|also|[Tt]hen|rest|others)\b")
    places = [
        i for i, text in enumerate(draft.sentences) if i == 0 or (f" {things}" in text and not unclear.search(text))
    ]
    words = {"M": draft.others.pop(), "O": draft.theme["O"], "b": rng.randint(2, draft.mix.start)}
    words |= {"day": rng.randint(2, 28), "age": rng.randint(3, 12)}
    kind = rng.randrange(len(draft.content.distractors))
    draft.sentences.insert(rng.choice(places), draft.content.distractors[kind].format(**words))
    draft.kinds.append(f"distractor {kind}")


def draft_problem(rng: random.Random, mix: MixConfig, content: Content) -> Draft:
    """A problem of random kinds and numbers; draws anew, with as many steps, until the numbers allow what was drawn."""
    steps = rng.choices(range(1, len(mix.steps) + 1), mix.steps)[0]
    while True:
        sort = rng.choice(content.sorts)
        names = [*content.she, *content.he]
        name, *others = rng.sample(names, len(names))
        theme = rng.choice(content.efforts if sort == "effort" else content.goods).split(", ")
        draft = Draft(rng, mix, content, dict(zip(THEME, theme, strict=True)), name, others, content.colors, [sort])
        try:
            {"people": people, "meeting": meeting, "undoing": undoing}.get(sort, chain)(draft, steps)
        except Unfit:
            continue
        if len(draft.steps) == steps and min(draft.values.values()) >= 2 and max(draft.values.values()) <= mix.largest:
            if rng.random() < mix.distractor:
                distract(draft)
            return draft


def problem_of(draft: Draft) -> Problem:
    """The draft's text."""
    return Problem(" ".join(draft.sentences), "\n".join([*draft.lines, f"#### {draft.values[draft.steps[-1][0]]}"]))


def is_test(question: str, one_in: int) -> bool:
    """Whether a question is a test question: decided by its text alone, so that no seed puts it in training."""
    return int.from_bytes(hashlib.sha256(question.encode("utf-8")).digest()[:8], "big") % one_in == 0


def generated_problems(number: int, seed: int, split: Split, mix: MixConfig | None = None) -> list[Problem]:
    """`number` different problems of a split; no question is in both, whatever the seeds."""
    mix, content = mix or MixConfig(), read_content()
    rng = random.Random(f"{seed} {split}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = problem_of(draft_problem(rng, mix, content))
        if is_test(problem.question, mix.test_one_in) == (split == "test"):
            found.setdefault(problem.question, problem)
    return list(found.values())


def main() -> None:
    config = runtime.parse(Config, __doc__)
    for problem in generated_problems(config.number, config.seed, config.split):
        print(f"{problem.question}\n{problem.answer}\n")


if __name__ == "__main__":
    runtime.run(main)
