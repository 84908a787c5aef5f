"""Generated grade-school word problems, as many as asked: seeded, with whole answers, training and test apart.

    python situations.py              prints five problems with their answers
    python situations.py 20 --seed 3

A problem is a chain of calculations (how a quantity comes about, how it changes, what is asked of it), a row of people
compared, two amounts that meet, or changes to undo. Each part has many kinds and each kind several phrasings: what must
be learned is which operation a sentence means. Problems are in GSM8K's format (`problems.py`), and a question is a test
question or not by a hash of its text, so no seed brings one into both.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

import runtime
from problems import Problem

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Config:
    """How many problems to print."""

    # Of problems.
    number: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="NUMBER")] = 5
    seed: int = 1
    split: Split = "train"

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"NUMBER {self.number}: at least 1")


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


@dataclass(frozen=True, slots=True)
class Step:
    """One calculation: `name` = `left` `operation` `right`, the operands being quantities named before."""

    name: str
    operation: str  # one of + - * /
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A calculation and the ways to tell it: on the quantity so far, or in an opening on a first amount, `{a}`.

    In texts `{b}` is the calculation's number, N the person, M another, G a giver, T the things; `@` in lines is the
    calculation.
    """

    name: str
    operation: str  # + - * /; ~ takes the quantity so far from the number; nothing: no step
    phrasings: tuple[str, ...]
    lines: tuple[str, ...]
    fixed: int  # the number where the words imply it (half, twice); 0: drawn
    refers: bool  # the number is what an opening said of M


@dataclass(frozen=True, slots=True)
class Theme:
    """Things and what people do with them."""

    things: str
    gains: str
    loses: str
    lose: str
    box: str
    boxes: str
    others: str  # things for a sentence that does not matter


@dataclass(frozen=True, slots=True)
class Domain:
    """A sort of chain: the kinds that may open it, move it and end it, and questions that need no step."""

    openings: tuple[Kind, ...]
    moves: tuple[Kind, ...]
    endings: tuple[Kind, ...]
    asks: tuple[Kind, ...]
    themes: tuple[Theme, ...]
    moved: bool = False  # whether its endings and questions make sense after a move alone


def kinds(table: str) -> tuple[Kind, ...]:
    """Kinds: `name | operation | fixed number, or refers`; indented under it the phrasings, then lines behind `=`."""
    found = []
    for text in re.split(r"\n    (?! )", "\n" + table.strip("\n"))[1:]:
        head, *rest = (line.strip() for line in text.strip().splitlines())
        name, operation, extra = (cell.strip() for cell in (head + "||").split("|")[:3])
        phrasings = tuple(line for line in rest if line[0] != "=")
        lines = tuple(line[1:].strip() for line in rest if line[0] == "=")
        found.append(Kind(name, operation, phrasings, lines, int(extra) if extra.isdigit() else 0, extra == "refers"))
    return tuple(found)


def themes(table: str) -> tuple[Theme, ...]:
    """A theme a line."""
    return tuple(Theme(*(cell.strip() for cell in line.split(","))) for line in table.strip().splitlines())


PRONOUNS = {
    name: pronoun
    for pronoun, names in (
        ("she", "Lily Anna Mia Sue Lucy Emma Sara Amy Jane Kate Molly Rose Ella Nina Zoe Eva"),
        ("he", "Tom Ben Max Tim Sam Jack Leo Bob Dan Joe Finn Mark Nick Paul Adam Luke"),
    )
    for name in names.split()
}
GIVERS = "a friend|{his} mother|{his} father|{his} sister|{his} brother|{his} grandma|{his} teacher|a kind man"
COLORS = ("red", "blue", "green", "yellow", "white", "black", "pink", "brown", "purple", "orange")

GOODS = themes("""
    apples, picks, eats, eat, basket, baskets, pears
    books, buys, gives away, give away, shelf, shelves, pens
    marbles, wins, loses, lose, bag, bags, balls
    stickers, gets, uses, use, sheet, sheets, crayons
    cookies, bakes, eats, eat, plate, plates, cakes
    flowers, picks, sells, sell, vase, vases, leaves
    shells, finds, loses, lose, jar, jars, stones
    coins, saves, spends, spend, purse, purses, keys
    eggs, collects, breaks, break, box, boxes, hens
    cards, wins, gives away, give away, pack, packs, dice
    blocks, gets, loses, lose, chest, chests, dolls
    candies, buys, eats, eat, bag, bags, toys
    balloons, blows up, pops, pop, bunch, bunches, hats
    pencils, buys, breaks, break, case, cases, rulers
    fish, catches, sets free, set free, tank, tanks, frogs
    carrots, pulls up, cooks, cook, bunch, bunches, beans
    muffins, makes, sells, sell, tray, trays, cups
    toy cars, gets, breaks, break, box, boxes, trains
    beads, finds, uses, use, string, strings, ribbons
    stamps, collects, uses, use, page, pages, letters
    nuts, gathers, eats, eat, hole, holes, birds
    grapes, washes, eats, eat, bowl, bowls, plums
    buttons, finds, sews on, sew on, tin, tins, needles
    lemons, buys, squeezes, squeeze, crate, crates, limes
""")
# Here `gains` is the effort, `loses` and `lose` are not used, and the boxes are what the whole is called.
EFFORTS = themes("""
    pages, reads, skips, skip, book, books, pictures
    miles, walks, rests, rest, road, roads, hills
    laps, runs, rests, rest, race, races, flags
    laps, swims, rests, rest, race, races, boats
    steps, climbs, rests, rest, tower, towers, windows
    lines, writes, rests, rest, story, stories, pens
    words, learns, forgets, forget, list, lists, songs
    rows, knits, rests, rest, scarf, scarves, needles
    trees, plants, rests, rest, garden, gardens, bees
    windows, cleans, rests, rest, house, houses, doors
""")

GAIN, LOSE, HALF = kinds("""
    gain | +
        {N} {gains} {b} more {T}.
        {G} gives {N} {b} more {T}.
        Then {N} {gains} {b} more.
        = Then {N} has @ {T}.
        = That makes @ {T}.
        = Now there are @ {T}.
    lose | -
        {N} {loses} {b} of them.
        {N} gives {b} {T} to {G}.
        Then {N} {loses} {b} {T}.
        {b} of the {T} get lost.
        = Then {N} has @ {T}.
        = That leaves @ {T}.
        = Now there are @ {T}.
    half | / | 2
        {N} gives half of the {T} to {G}.
        {N} {loses} half of the {T}.
        Half of the {T} get lost.
        = Then {N} has @ {T}.
        = Half of them is @ {T}.
""")
MOVES = (
    *(GAIN, LOSE),
    *kinds("""
    twice | * | 2
        A week later {N} has twice as many {T} as before.
        Then {N} {gains} as many {T} as {he} already has.
        = Then {N} has @ {T}.
        = That makes @ {T}.
    thrice | * | 3
        A week later {N} has three times as many {T} as before.
        = Then {N} has @ {T}.
"""),
    HALF,
)
TOLD = kinds("""
    has
        {N} has {a} {T}.
        There are {a} {T} on {N}'s table.
        {N} starts with {a} {T}.
        {N} has a {box} with {a} {T} in it.
    boxes | *
        {N} has {a} {boxes} with {b} {T} in each.
        {N} fills {a} {boxes}. Each {box} holds {b} {T}.
        There are {b} {T} in each {box}, and {N} has {a} {boxes}.
        = {N} has @ {T}.
        = There are @ {T} in the {boxes}.
    days | *
        {N} {gains} {b} {T} every day for {a} days.
        For {a} days, {N} {gains} {b} {T} a day.
        Each day {N} {gains} {b} {T}. {He} does this for {a} days.
        = In {a} days that makes @ {T}.
        = That makes @ {T}.
    parts of day | +
        {N} {gains} {a} {T} in the morning and {b} {T} in the evening.
        On Monday {N} {gains} {a} {T}. On Tuesday {he} {gains} {b} {T}.
        = Together that is @ {T}.
    colors | +
        {N} has {a} {red} {T} and {b} {blue} {T}.
        = {N} has @ {T}.
        = Together that is @ {T}.
    givers | +
        {G} gives {N} {a} {T}, and {M} gives {N} {b} {T}.
        = {N} has @ {T}.
    more | +
        {M} has {a} {T}. {N} has {b} more {T} than {M}.
        {N} has {b} more {T} than {M}, who has {a}.
        = {N} has @ {T}.
    fewer | -
        {M} has {a} {T}. {N} has {b} fewer {T} than {M}.
        {N} has {b} fewer {T} than {M}, who has {a}.
        = {N} has @ {T}.
    times | *
        {M} has {a} {T}. {N} has {b} times as many.
        {N} has {b} times as many {T} as {M}, who has {a}.
        = {N} has @ {T}.
    half of | / | 2
        {M} has {a} {T}. {N} has half as many.
        {N} has half as many {T} as {M}, who has {a}.
        = {N} has @ {T}.
""")
COMPARED = ("more", "fewer", "times", "half of")  # openings that say how much M has: the first amount
DOMAINS = {
    "things": Domain(
        TOLD,
        MOVES,
        kinds("""
    share | /
        {N} shares the {T} equally among {b} friends. How many {T} does each friend get?
        How many {T} does each child get if {N} shares them equally among {b} children?
        {N} puts the same number of {T} into each of {b} {boxes}. How many {T} are in a {box}?
        = Each one gets @ {T}.
        = There are @ {T} in each.
    pack | /
        {N} packs the {T} into {boxes} of {b}. How many {boxes} does {N} need?
        If {b} {T} fit in one {box}, how many {boxes} can {N} fill?
        = {N} needs @ {boxes}.
        = That fills @ {boxes}.
    sell | *
        {N} sells the {T} for ${b} each. How many dollars does {N} get?
        Each of the {T} is worth ${b}. How many dollars are all of them worth?
        = That is @ dollars.
        = They bring @ dollars.
    ahead | -
        {M} has {b} {T}. How many more {T} does {N} have than {M}?
        How many more {T} does {N} have than {M}, who has {b}?
        = {N} has @ more {T}.
    behind | ~
        {M} has {b} {T}. How many more {T} does {M} have than {N}?
        = {M} has @ more {T}.
    both | +
        {M} has {b} {T}. How many {T} do they have together?
        If {M} has {b} {T}, how many do {N} and {M} have in all?
        = Together they have @ {T}.
    both known | + | refers
        How many {T} do {N} and {M} have together?
        How many {T} do the two children have in all?
        = Together they have @ {T}.
    need | ~
        {N} wants to have {b} {T}. How many more does {N} need?
        How many {T} are missing if {N} needs {b} {T}?
        = {N} needs @ more {T}.
        = @ {T} are missing.
    lost some | -
        Then {N} {loses} some {T} and has {b} left. How many {T} does {N} {lose}?
        Some {T} get lost, and only {b} are left. How many {T} get lost?
        = @ {T} are gone.
    got some | ~
        {G} gives {N} some more {T}, and then {N} has {b}. How many {T} does {N} get from {G}?
        = {N} gets @ {T}.
"""),
        kinds("""
    now
        How many {T} does {N} have now?
        How many {T} does {N} have in the end?
        How many {T} has {N} now?
"""),
        GOODS,
    ),
    "parts": Domain(
        TOLD[:3],
        kinds("""
    part | -
        {b} of the {T} are {red}.
        {b} {T} among them are {red}.
        {N} counts {b} {red} {T}.
        = That leaves @ {T}.
"""),
        kinds("""
    share rest | /
        The others are shared equally among {b} friends. How many {T} does each friend get?
        {N} shares the rest equally among {b} children. How many {T} does each child get?
        = Each one gets @ {T}.
    pack rest | /
        {N} packs the others into {boxes} of {b}. How many {boxes} does {N} need?
        If {b} {T} fit in one {box}, how many {boxes} can {N} fill with the rest?
        = That fills @ {boxes}.
"""),
        kinds("""
    rest
        The others are {blue}. How many {T} are {blue}?
        The rest are {blue}. How many {blue} {T} are there?
"""),
        GOODS,
        moved=True,
    ),
    "cost": Domain(
        kinds("""
    price | *
        {N} buys {a} {T} for ${b} each.
        One of the {T} costs ${b}. {N} buys {a} {T}.
        At the shop {N} gets {a} {T} at ${b} each.
        = The {T} cost @ dollars.
        = {N} pays @ dollars.
    bill
        {N} buys some {T} for ${a} in all.
        {N} pays ${a} for {T}.
"""),
        kinds("""
    extra | +
        {He} also buys a {red} hat for ${b}.
        {He} also pays ${b} for lunch.
        The bus there costs ${b}.
        = That makes @ dollars.
        = Now it is @ dollars.
    off | -
        The shop takes ${b} off.
        {He} gets ${b} back.
        = That leaves @ dollars.
    half price | / | 2
        {He} has a card and pays only half of that.
        Then the shop asks for only half of that.
        = Half of it is @ dollars.
"""),
        kinds("""
    paid | ~
        {N} gives the shop ${b}. How many dollars does {N} get back?
        {N} had ${b} at first. How many dollars are left?
        = @ dollars are left.
    split | /
        {b} friends share the cost equally. How many dollars does each one pay?
        = Each one pays @ dollars.
    weeks | /
        {N} saves ${b} a week to pay for it. How many weeks does that take?
        = It takes @ weeks.
    lack | -
        {N} has only ${b}. How many dollars does {N} lack?
        = {N} lacks @ dollars.
"""),
        kinds("""
    in all
        How many dollars does {N} spend?
        How many dollars does all that cost {N}?
"""),
        GOODS,
    ),
    "effort": Domain(
        (
            *TOLD[2:4],
            *kinds("""
    did
        {N} {gains} {a} {T} on Monday.
        This week {N} {gains} {a} {T}.
"""),
        ),
        kinds("""
    further | +
        Then {N} {gains} {b} more {T}.
        After a rest {N} {gains} {b} {T} more.
        = That makes @ {T}.
    again | * | 2
        The next week {N} {gains} just as many {T} again.
        = With the next week that is @ {T}.
"""),
        kinds("""
    to go | ~
        The {box} has {b} {T}. How many {T} are still to do?
        Of a {box} with {b} {T}, how many {T} are left?
        = @ {T} are left.
    time | /
        {M} does as much in {b} days. How many {T} does {M} do a day?
        = {M} does @ {T} a day.
    did more | -
        {M} {gains} {b} {T}. How many more {T} does {N} do than {M}?
        = {N} does @ more {T}.
    did both | +
        {M} {gains} {b} {T}. How many {T} do both do together?
        = Together they do @ {T}.
"""),
        kinds("""
    done
        How many {T} is that in all?
        How many {T} are done now?
"""),
        EFFORTS,
    ),
}
LEFT = kinds("""
    left | -
        {b} of all these things get lost. How many things are left?
        {N} gives {b} of all these things to {G}. How many things does {N} keep?
        = @ things are left.
""")
RELATIONS = kinds("""
    more | +
        {K} has {b} more {T} than {J}.
    fewer | -
        {K} has {b} fewer {T} than {J}.
    twice | * | 2
        {K} has twice as many {T} as {J}.
    times | *
        {K} has {b} times as many {T} as {J}.
    half | / | 2
        {K} has half as many {T} as {J}.
""")
UNDONE = (
    *(GAIN, LOSE),
    *kinds("""
    twice | * | 2
        Then {N} gets as many {T} as {he} already has.
"""),
    HALF,
)
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}


@dataclass(slots=True)
class Draft:
    """A problem while it is put together: what the question gives, how the answer follows, and the text of both."""

    rng: random.Random
    mix: MixConfig
    theme: Theme
    name: str
    pronoun: str
    others: list[str]  # people not yet mentioned; taken from the end
    given: dict[str, int] = field(default_factory=dict)  # quantities the question names
    steps: list[Step] = field(default_factory=list)
    asked: str = ""  # quantity the question is about
    kinds: list[str] = field(default_factory=list)  # kinds of what is told, in order
    sentences: list[str] = field(default_factory=list)  # of the question
    lines: list[str] = field(default_factory=list)  # of the answer
    values: dict[str, int] = field(default_factory=dict)  # of all quantities
    crowded: bool = True  # whether `he` or `she` would be unclear in the next sentence
    colors: tuple[str, ...] = COLORS  # the first two come next
    compared: tuple[str, str] | None = None  # a person whose amount an opening told, and that quantity

    def give(self, value: int) -> str:
        """Names a quantity that the question gives."""
        name = f"g{len(self.given)}"
        self.given[name] = self.values[name] = value
        return name

    def work_out(self, operation: str, left: str, right: str, line: str) -> str:
        """Adds a step and its line, in which `@` stands for the calculation; names its result."""
        a, b = self.values[left], self.values[right]
        if operation == "/":
            assert a % b == 0, (a, b)
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operation]
        name = f"s{len(self.steps)}"
        self.steps.append(Step(name, operation, left, right))
        self.values[name] = result
        self.lines.append(line.replace("@", f"{a}{operation}{b}=<<{a}{operation}{b}={result}>>{result}"))
        return name

    def number(self, kind: Kind, have: int) -> int | None:
        """A number for a kind to meet `have` with: results are whole, at least 2, and not above the largest."""
        mix, operation = self.mix, kind.operation
        top = {
            "+": min(mix.change, mix.largest - have),
            "-": min(mix.change, have - 2),
            "*": min(mix.factor, mix.largest // have),
            "/": min(mix.factor + 1, have // 2),
            "~": min(mix.change, mix.largest - have),
        }[operation]
        fitting = [n for n in range(2, top + 1) if operation != "/" or have % n == 0]
        if kind.fixed:
            return kind.fixed if kind.fixed in fitting else None
        return self.rng.choice(fitting) + (have if operation == "~" else 0) if fitting else None

    def words(self, other: str) -> dict[str, str]:
        """What the letters and words of a phrasing stand for; takes the next two colors, in place."""
        he, his = self.pronoun, "his" if self.pronoun == "he" else "her"
        red, blue, *rest = self.colors
        self.colors = (*rest, red, blue)
        theme = self.theme
        return {
            "N": self.name,
            "M": other,
            "G": self.rng.choice(GIVERS.split("|")).format(his=his),
            "T": theme.things,
            "he": he,
            "He": he.capitalize(),
            "gains": theme.gains,
            "loses": theme.loses,
            "lose": theme.lose,
            "box": theme.box,
            "boxes": theme.boxes,
            "red": red,
            "blue": blue,
        }

    def say(self, phrasings: Sequence[str], words: dict[str, str], **numbers: int) -> None:
        """Adds a phrasing to the question; N is often he or she where nobody else was just mentioned."""
        mix, text = self.mix, self.rng.choice(phrasings)
        if not self.crowded and text.startswith("{N} ") and self.rng.random() < mix.pronoun:
            text = "{He}" + text[3:]
        elif self.crowded and text.startswith("{He}"):
            text = "{N}" + text[4:]
        self.crowded = "{M}" in text or "{G}" in text
        self.sentences.append(capitalized(text.format(**words, **numbers)))


def capitalized(text: str) -> str:
    """The text with a capital at its start."""
    return text[0].upper() + text[1:]


def told(draft: Draft, kind: Kind, now: str | None) -> str | None:
    """Tells a kind: a calculation on the quantity `now`, or on a first amount where there is none yet.

    Names the new quantity; None where the numbers or people do not allow the kind.
    """
    rng, mix = draft.rng, draft.mix
    draft.kinds.append(kind.name)
    if kind.refers and draft.compared is None:
        return None
    other = draft.compared[0] if kind.refers and draft.compared else draft.others.pop()
    words = draft.words(other)
    first = rng.randint(2, mix.factor if kind.operation == "*" and kind.name != "times" else mix.start)
    left = now if now is not None else draft.give(first)
    have = draft.values[left]
    if not kind.operation:
        draft.say(kind.phrasings, words, a=have)
        return left
    if kind.refers and draft.compared:
        right, value = draft.compared[1], draft.values[draft.compared[1]]
    else:
        drawn = rng.randint(2, mix.per) if now is None and kind.name in ("boxes", "days", "price") else None
        found = drawn or draft.number(kind, have)
        if found is None:
            return None
        right, value = draft.give(found), found
    if now is None and kind.name in COMPARED:
        draft.compared = other, left
    draft.say(kind.phrasings, words, a=have, b=value)
    line = capitalized(rng.choice(kind.lines).format(**words, a=have, b=value))
    return (
        draft.work_out("-", right, left, line)
        if kind.operation == "~"
        else draft.work_out(kind.operation, left, right, line)
    )


def chain(draft: Draft, domain: Domain, steps: int) -> str | None:
    """Tells an opening, moves and an ending with as many steps in all; names the answer, None where it cannot be."""
    rng = draft.rng
    opens, ends = rng.random() < 0.6, rng.random() < 0.7
    if steps == 1:  # one of the three takes the only step
        opens, ends = rng.choice(((True, False), (False, True), (False, False)))
    if domain.moved and steps == opens + ends:
        return None
    openings = [kind for kind in domain.openings if bool(kind.operation) == opens]
    now = told(draft, rng.choice(openings), None)
    for _ in range(steps - opens - ends):
        now = now and told(draft, rng.choice(domain.moves), now)
    if draft.kinds.count("again") > 1:
        return None  # just as many as in which week?
    return now and told(draft, rng.choice(domain.endings if ends else domain.asks), now)


def people(draft: Draft, steps: int) -> str | None:
    """Compares people in a row, told in any order; asks for the last one's amount or for all of them together."""
    rng, theme = draft.rng, draft.theme
    total = steps in (2, 4) and rng.random() < 0.6  # half the steps are comparisons, the others add up
    names, facts = [draft.name], []
    now = draft.give(rng.randint(2, draft.mix.start))
    facts.append(f"{draft.name} has {draft.values[now]} {theme.things}.")
    amounts = [now]
    for _ in range(steps // 2 if total else steps):
        kind, name = rng.choice(RELATIONS), draft.others.pop()
        number = draft.number(kind, draft.values[now])
        if number is None:
            return None
        facts.append(kind.phrasings[0].format(K=name, J=names[-1], b=number, T=theme.things))
        now = draft.work_out(kind.operation, now, draft.give(number), f"{name} has @ {theme.things}.")
        draft.kinds.append(kind.name)
        names.append(name)
        amounts.append(now)
    order = rng.choice(("told forward", "told backward"))
    draft.sentences += facts if order == "told forward" else facts[::-1]
    draft.kinds += [order, "all" if total else "last"]
    if not total:
        draft.sentences.append(f"How many {theme.things} does {names[-1]} have?")
        return now
    draft.sentences.append(f"How many {theme.things} do they have in all?")
    sum_so_far = amounts[0]
    for amount in amounts[1:]:
        sum_so_far = draft.work_out("+", sum_so_far, amount, f"Together that is @ {theme.things}.")
    return sum_so_far


def meeting(draft: Draft, steps: int) -> str | None:
    """Tells amounts of two sorts of things; asks for their sum, their difference, or what follows from the sum."""
    rng, mix, theme = draft.rng, draft.mix, draft.theme
    priced = rng.random() < 0.5
    unit = "dollars" if priced else "things"
    sides: list[str] = []
    for begin, things in ((draft.name, theme.things), (f"{draft.pronoun.capitalize()} also", theme.others)):
        if sides and steps == 2:  # the second amount takes no step
            whole = rng.randint(2, mix.start)
            draft.sentences.append(
                f"{begin} buys {things} for ${whole}." if priced else f"{begin} has {whole} {things}."
            )
            sides.append(draft.give(whole))
            draft.kinds.append(unit)
            continue
        count, per = rng.randint(2, mix.factor), rng.randint(2, mix.per)
        many, each = f"buys {count} {things} for ${per} each", f"has {count} bags of {per} {things} each"
        draft.sentences.append(f"{begin} {many if priced else each}.")
        line = f"The {things} cost @ dollars." if priced else f"{draft.name} has @ {things}."
        sides.append(draft.work_out("*", draft.give(count), draft.give(per), line))
        draft.kinds.append(f"{unit} each")
    one, two = sides
    if steps < 4 and draft.values[one] > draft.values[two] and rng.random() < 0.5:
        draft.kinds.append("difference")
        more = f"dollars more do the {theme.things} cost than the {theme.others}"
        draft.sentences.append(
            f"How many {more}?" if priced else f"How many more {theme.things} than {theme.others} are there?"
        )
        return draft.work_out("-", one, two, f"That is @ {'dollars ' if priced else ''}more.")
    draft.kinds.append("sum")
    now = draft.work_out("+", one, two, f"Together that is @ {unit}.")
    if steps < 4:
        draft.sentences.append("How many dollars does all that cost?" if priced else "How many things is that in all?")
        return now
    if priced:
        return told(draft, rng.choice(DOMAINS["cost"].endings), now)
    return told(draft, LEFT[0], now)


def undoing(draft: Draft, steps: int) -> str | None:
    """Tells changes and what is left, and asks for the start: each step undoes a change, the last one first."""
    rng = draft.rng
    have = rng.randint(2, draft.mix.start)
    draft.say(("{N} has some {T}.", "At first {N} has a number of {T}."), draft.words(""))
    undo: list[tuple[str, int]] = []
    for _ in range(steps):
        kind = rng.choice(UNDONE)
        number = draft.number(kind, have)
        if number is None:
            return None
        draft.say(kind.phrasings, draft.words(""), b=number)
        draft.kinds.append(f"un-{kind.name}")
        have = {"+": have + number, "-": have - number, "*": have * number, "/": have // number}[kind.operation]
        undo.append((INVERSE[kind.operation], number))
    draft.say(
        ("Now {N} has {a} {T}.", "In the end {N} has {a} {T}.", "That leaves {N} with {a} {T}."),
        draft.words(""),
        a=have,
    )
    draft.say(("How many {T} did {N} have at first?", "How many {T} were there at the start?"), draft.words(""))
    now = draft.give(have)
    for operation, number in reversed(undo):
        now = draft.work_out(
            operation, now, draft.give(number), f"Before that {draft.name} had @ {draft.theme.things}."
        )
    return now


def distract(draft: Draft) -> None:
    """Adds a sentence with a number that does not matter, where no `them`, `he` or `she` can mean it; in place."""
    rng, things = draft.rng, draft.theme.things
    plain = [
        i
        for i, text in enumerate(draft.sentences)
        if i == 0
        or (f" {things}" in text and not re.search(r"\b([Hh]e|[Ss]he|them|they|also|[Tt]hen|rest|others)\b", text))
    ]
    other = draft.others.pop()
    number = rng.randint(2, draft.mix.start)
    texts = (
        f"{other} has {number} {draft.theme.others}.",
        f"{other} lives {number} miles away.",
        f"It is day {rng.randint(2, 28)} of the month.",
        f"{other} is {rng.randint(3, 12)} years old.",
        f"There are {number} people in the park.",
    )
    kind = rng.randrange(len(texts))
    draft.sentences.insert(rng.choice(plain), texts[kind])
    draft.kinds.append(f"distractor {kind}")


def draft_problem(rng: random.Random, mix: MixConfig) -> Draft:
    """A problem of random kinds and numbers; draws anew, with as many steps, until the numbers allow what was drawn."""
    steps = rng.choices(range(1, len(mix.steps) + 1), mix.steps)[0]
    while True:
        sort = rng.choice(
            ("things", "things", "things", "parts", "cost", "cost", "effort", "people", "meeting", "undoing")
        )
        chained = DOMAINS.get(sort)
        name, *others = rng.sample(list(PRONOUNS), len(PRONOUNS))
        theme = rng.choice(chained.themes if chained else GOODS)
        draft = Draft(rng, mix, theme, name, PRONOUNS[name], others, kinds=[sort])
        if sort == "meeting" and steps == 1:
            continue
        if chained:
            asked = chain(draft, chained, steps)
        else:
            asked = {"people": people, "meeting": meeting, "undoing": undoing}[sort](draft, steps)
        if (
            asked is None
            or len(draft.steps) != steps
            or min(draft.values.values()) < 2
            or max(draft.values.values()) > mix.largest
        ):
            continue
        draft.asked = asked
        if rng.random() < mix.distractor:
            distract(draft)
        return draft


def situation(draft: Draft) -> str:
    """What a problem tells, apart from its words and numbers."""
    return ", ".join(draft.kinds)


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
        problem = problem_of(draft_problem(rng, mix))
        if is_test(problem.question, mix.test_one_in) == (split == "test"):
            found.setdefault(problem.question, problem)
    return list(found.values())


def main() -> None:
    config = runtime.parse(Config, __doc__)
    for problem in generated_problems(config.number, config.seed, config.split):
        print(f"{problem.question}\n{problem.answer}\n")


if __name__ == "__main__":
    runtime.run(main)
