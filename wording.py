"""What generated word problems tell of (`situations.py`): reads `data/problems.toml` and says what is wrong in it.

The file's top explains its entries. Whatever passes here can be drawn: no entry stops the generator later.
"""

import re
import string
import tomllib
from collections.abc import Set
from dataclasses import dataclass, field, fields
from pathlib import Path

from runtime import UserError

PATH = Path(__file__).parent / "data" / "problems.toml"  # beside the code that reads it, wherever that is run
STEPS = {  # of a chain, and of two amounts that meet: what the steps of their kinds may be
    "openings": r"([am] ([-+*/] b|[*/] [2-9]))?",
    "moves": r"a ([-+*/] b|[*/] [2-9])",
    "endings": r"a ([-+*/] b|[*/] [2-9])|b - a|a [-+] m",
    "asks": "",
    "meets": r"a [-+] m",
}
CHAIN, MEETING = ("openings", "moves", "endings", "asks"), ("openings", "endings", "meets")
PARTS = {"undoing": ("moves",), "prices": MEETING, "amounts": MEETING}  # of problems; of all others those of a chain
MET = {"openings": {"", "a * b"}, "meets": {"a + m", "a - m"}}
EXACT = {"people": {"openings": {""}, "endings": {"a + m"}}, "prices": MET, "amounts": MET}  # all steps a part has
FEWEST = 8  # names: the teller's, six in openings and four moves, one in a distractor
THEME = ("T", "gains", "loses", "lose", "box", "boxes", "O")  # what the columns of a theme are called in texts
BLANKS = {"N", "M", "G", "he", "He", "red", "blue", "a", "b", "m", *THEME}
UNDOING = dict.fromkeys(("begins", "leaves", "asks", "works"), BLANKS)
BLANKS_OF = {"givers": {"his"}, "distractors": {"M", "O", "b", "day", "age"}, **UNDOING}


@dataclass(frozen=True, slots=True)
class Kind:
    """An amount, a calculation or a question, and the ways to tell it, as `data/problems.toml` explains them."""

    part: str
    name: str
    sorts: list[str]
    says: list[str]
    step: str = ""
    works: list[str] = field(default_factory=list)
    once: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(STEPS[self.part], self.step):
            raise ValueError(f"step {self.step!r} is none that the file's top names for {self.part}")
        if bool(self.step) != bool(self.works) and self.sorts != ["undoing"]:
            raise ValueError("step and works come together")
        known = BLANKS - {"he", "He"} if "people" in self.sorts else BLANKS  # N is one after the other there
        needed = {"b"} & {*self.step} | ({self.step[:1] or "a"} if self.part == "openings" else set())
        require_texts("sorts", self.sorts)
        require_texts("says", self.says, known, needed)
        require_texts("works", self.works or ["@"], known)
        for text in (*self.says, *self.works):
            if text.count("@") != (text in self.works):
                raise ValueError(f"{text!r}: one @ in works, none in says")


@dataclass(frozen=True, slots=True)
class Content:
    """What problems tell of: the file `data/problems.toml`."""

    sorts: list[str]
    she: list[str]
    he: list[str]
    givers: list[str]
    colors: list[str]
    distractors: list[str]
    goods: list[str]
    efforts: list[str]
    undoing: dict[str, list[str]]
    openings: list[Kind]
    moves: list[Kind]
    endings: list[Kind]
    asks: list[Kind]
    meets: list[Kind]

    def __post_init__(self) -> None:
        if {*self.undoing} != {*UNDOING}:
            raise ValueError(f"[undoing] has {', '.join(UNDOING)}")
        lists = {own.name: getattr(self, own.name) for own in fields(self) if own.type == list[str]}
        for name, texts in (lists | self.undoing).items():
            require_texts(name, texts, BLANKS_OF.get(name, set()), {"a"} if name == "leaves" else set())
        if len({*self.she, *self.he}) < FEWEST or len({*self.colors}) < 2:
            raise ValueError(f"she, he, colors: at least {FEWEST} names and 2 colors")
        for row in self.goods + self.efforts:
            if len(row.split(", ")) != len(THEME):
                raise ValueError(f"{row!r}: {len(THEME)} words, a comma between them")
        sorts = {*self.sorts, "prices", "amounts"} - {"meeting"}
        for part in STEPS:
            for kind in getattr(self, part):
                if unknown := {*kind.sorts} - sorts:
                    raise ValueError(f"[[{part}]] {kind.name}: {min(unknown)} is none of {', '.join(sorted(sorts))}")
        for sort in sorted(sorts):
            for part in PARTS.get(sort, CHAIN):
                steps = {kind.step for kind in self.kinds(part, sort)}
                exact = EXACT.get(sort, {}).get(part)
                if steps != exact if exact else not steps or (part == "openings" and not steps > {""}):
                    raise ValueError(f"[[{part}]]: sort {sort} has {sorted(steps)}, not {exact or 'kinds with steps'}")

    def kinds(self, part: str, sort: str) -> list[Kind]:
        """The kinds of a part that come in a sort of problem."""
        return [kind for kind in getattr(self, part) if sort in kind.sorts]


def require_texts(name: str, texts: list[str], known: Set[str] = frozenset(), needed: Set[str] = frozenset()) -> None:
    """Raises ValueError where it is no list of texts, or braces in one hold what is unknown, or not what is needed."""
    if not (isinstance(texts, list) and texts and all(text and isinstance(text, str) for text in texts)):
        raise ValueError(f'{name}: write ["a text", "another"]')
    for text in texts:
        found = {blank for _, blank, _, _ in string.Formatter().parse(text) if blank is not None}
        for blank in sorted((found - known) | (needed - found)):
            raise ValueError(f"{text!r}: {'unknown' if blank in found else 'no'} {{{blank}}}")


def read_content(path: Path = PATH) -> Content:
    """What problems tell of.

    Raises: UserError that names the entry which is wrong.
    """
    place = ""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        for part in STEPS:
            for number, entry in enumerate(table.get(part, []), start=1):
                place = f", [[{part}]] number {number}, {entry.get('name') if isinstance(entry, dict) else entry}"
                table[part][number - 1] = Kind(part, **entry)
        place = ""
        return Content(**table)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): git checkout {path} brings it back") from None
    except (TypeError, ValueError) as error:  # of unknown and missing settings; of tomllib, and what is checked above
        what = re.sub(r"^\w+\.__init__\(\) ", "", str(error))
        raise UserError(f"{path}{place}: {what}: mend it, or git checkout {path}") from None
