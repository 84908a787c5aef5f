"""The reader of what problems tell of: a wrong entry is named with its place, in one line."""

from pathlib import Path

import pytest

import wording
from runtime import UserError


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('name = "boxes"', "name = boxes", r"line \d+"),
        ('name = "boxes"\n', "", r"\[\[openings\]\] number 2, None: .*'name'"),
        ('name = "boxes"\n', 'name = "boxes"\nsay = ["a"]\n', r"number 2, boxes: .*'say'"),
        ("[[asks]]", "[[questions]]", "'asks'|'questions'"),
        ('["{N} has {a} {red} {T} and {b} {blue} {T}."]', '"{a} {b}"', "number 5, colors: says: write"),
        ('["{N} has {a} {red} {T} and {b} {blue} {T}."]', "[]", "number 5, colors: says: write"),
        ("has {a} {red} {T} and {b}", "has {a} {red} {T} and", "number 5, colors: .*no {b}"),
        ("has {a} {red} {T} and {b}", "has {red} {T} and {b}", "{N} has {red} {T} .*no {a}"),
        ("has {a} {red} {T} and", "has {a} {rad} {T} and", "number 5, colors: .*unknown {rad}"),
        ("has {a} {red} {T} and", "has {a {red} {T} and", "number 5, colors: "),
        ("has {a} {red} {T} and", "has {a} {} {T} and", "number 5, colors: .*unknown {}"),
        ("has {a} {red} {T} and", "has {a} @ {T} and", "number 5, colors: .*none in says"),
        ('"In {a} days that makes @ {T}."', '"In {a} days."', "number 3, days: 'In {a} days.': one @"),
        ('step = "b - a"', 'step = "b : a"', "number 5, behind: step 'b : a'"),
        ('step = "b - a"', "step = 3", "number 5, behind: .*string"),
        ('step = "b - a"\n', "", "number 5, behind: step '' is none"),
        ('name = "share"\nsorts = ["things"]', 'name = "share"\nsorts = ["thing"]', "share: thing is none of amounts"),
        ('works = ["{M} has @ more {T}."]\n', "", "number 5, behind: step and works come together"),
        ('sorts = ["parts"]', 'sorts = ["cost"]', r"\[\[moves\]\]: sort parts has \[\]"),
        (
            'sorts = ["cost"]\nsays',
            'sorts = ["things"]\nsays',
            "sort cost has .'a . b'.,",
        ),
        ('step = "a - b"', 'step = "m - b"', "lose: step 'm - b' is none .* for moves"),
        ("rows, knits, rests, rest, ", "rows, knits, rest, ", "rows, knits, rest, scarf"),
        ("\nhe = [", "\nhim = [", "'him'"),
        ("miles away", "{miles} away", "unknown {miles}"),
        ("leaves = [", "stays = [", r"\[undoing\] has"),
        ("Now {N} has {a} {T}", "Now {N} has {T}", "'Now {N} has {T}.': no {a}"),
        ('step = "a - m"', 'step = "a + m"', r"\[\[meets\]\]: sort amounts has"),
        ("{his} mother", "{her} mother", "unknown {her}"),
    ],
)
def test_a_wrong_entry_is_named_with_its_place(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = wording.PATH.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "problems.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=f"problems.toml[:,] .*(?:{named})") as caught:
        wording.read_content(path)
    assert "\n" not in str(caught.value)
    assert "__init__" not in str(caught.value)


def test_a_missing_or_undecodable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"problems.toml cannot be read"):
        wording.read_content(tmp_path / "problems.toml")
    (tmp_path / "problems.toml").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"problems.toml: .*utf-8"):
        wording.read_content(tmp_path / "problems.toml")
