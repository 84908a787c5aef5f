"""Pairs: which stories make one, what is dropped, and what the file keeps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import preferences
from model import GPT
from preferences import Pair
from runtime import UserError
from sample import Completion, Instruction
from tokenizer import Tokenizer

WORDS = ("kite", "lake", "bird")


def good(**changed: object) -> str:
    """A line of a pairs file, with some of its values changed."""
    row = {"words": ["kite"], "chosen": "c", "rejected": "d", "chosen_ids": [99, 256], "rejected_ids": [100]}
    return json.dumps({**row, **changed})


def told(coder: Tokenizer, *texts: str, ended: bool = True) -> list[Completion]:
    rows = [[*coder.encode(text), *([coder.end] if ended else [])] for text in texts]
    return [Completion([1], ids, [True] * len(ids), "end" if ended else "limit") for ids in rows]


def test_most_words_against_fewest(coder: Tokenizer) -> None:
    pair = preferences.preferred(WORDS, told(coder, "a kite", "a kite, a lake", "none", "a bird"), coder)
    assert pair is not None
    assert coder.answer_text(pair.chosen) == "a kite, a lake"
    assert coder.answer_text(pair.rejected) == "none"
    assert pair.chosen[-1] == coder.end
    assert pair.words == WORDS


def test_equal_scores_or_equal_text_make_no_pair(coder: Tokenizer) -> None:
    assert preferences.preferred(WORDS, told(coder, "a kite", "a lake", "a bird", "one kite"), coder) is None
    assert preferences.preferred(WORDS, told(coder, "a kite", "a kite"), coder) is None


def test_a_story_cut_at_the_limit_keeps_no_end_of_text(coder: Tokenizer) -> None:
    pair = preferences.preferred(WORDS, told(coder, "a kite", "none", ended=False), coder)
    assert pair is not None
    assert coder.end not in pair.chosen
    assert coder.end not in pair.rejected


def test_the_file_round_trips_and_reads_as_text(coder: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data" / "pairs.jsonl"
    pairs = [Pair(WORDS, [*coder.encode("a\u2028kite"), coder.end], coder.encode("none"))]
    preferences.write_pairs(pairs, coder, path)
    assert preferences.read_pairs(path, coder) == pairs
    assert json.loads(path.read_text(encoding="utf-8"))["rejected"] == "none"
    assert [other.name for other in path.parent.iterdir()] == ["pairs.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        good(rejected_ids=None),
        good(rejected_ids=[]),
        good(rejected_ids=[259]),
        good(rejected_ids=[-1]),
        good(rejected_ids=["a"]),
        good(rejected_ids=[100.0]),
        good(rejected_ids=[100, 256, 100]),  # goes on after its end of text
        good(rejected_ids=[101]),  # not the text beside it: written with another tokenizer
        good(words=[]),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, coder: Tokenizer, line: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(good() + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"pairs\.jsonl, line 2 .*preferences\.py"):
        preferences.read_pairs(path, coder)


def test_a_good_line_is_read(tmp_path: Path, coder: Tokenizer) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(good() + "\n", encoding="utf-8")
    assert preferences.read_pairs(path, coder) == [Pair(("kite",), [99, 256], [100])]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_rest(
    coder: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("old", encoding="utf-8")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        preferences.write_pairs([Pair(WORDS, [1], [2])], coder, path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [other.name for other in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_a_missing_file_says_what_makes_it(tmp_path: Path, coder: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"python preferences\.py"):
        preferences.read_pairs(tmp_path / "pairs.jsonl", coder)


@pytest.mark.usefixtures("workspace")
def test_command_writes_pairs_and_repeats(
    command: Callable[..., int],
    coder: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An untrained model uses no word: score stories by whether their first byte is odd.
    monkeypatch.setattr("stories.words_used", lambda story, _words: float(len(story.encode()) % 2))
    flags = ("--limit", "8", "--batch", "4", "--device", "cpu")
    assert command("preferences", "6", *flags) == 0
    first = preferences.PAIRS.read_bytes()
    assert len(preferences.read_pairs(preferences.PAIRS, coder)) == 6
    out = capsys.readouterr().out
    assert "6 of 6 pairs" in out
    assert "ran out" not in out
    assert command("preferences", "6", *flags) == 0
    assert preferences.PAIRS.read_bytes() == first
    assert command("preferences", "1000", *flags) == 0
    found = len(preferences.read_pairs(preferences.PAIRS, coder))
    assert found <= 30
    out = capsys.readouterr().out
    assert f"{found} of 1,000 pairs; {30 - found} groups that tied dropped; the instructions ran out" in out


def test_groups_after_the_last_pair_do_not_count(
    tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([None, Pair(WORDS, [1], [2]), None, Pair(WORDS, [3], [4]), None, None])
    monkeypatch.setattr(preferences, "preferred", lambda *_: next(made))
    asked = [Instruction(WORDS, coder.prompt("k"))] * 6
    config = preferences.Config(pairs=2, batch=6, limit=2, device="cpu", precision="float32")
    pairs, dropped = preferences.written_pairs(tiny(context=128), asked, coder, config)
    assert ([pair.chosen for pair in pairs], dropped) == ([[1], [3]], 2)


@pytest.mark.usefixtures("workspace")
def test_a_model_whose_groups_all_tie_gets_a_line(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("preferences", "3", "--limit", "4", "--device", "cpu") == 1
    assert "tied" in capsys.readouterr().err
    assert not preferences.PAIRS.exists()


@pytest.mark.parametrize("wrong", [("0",), ("-3",), ("many",), ("5", "--group", "1"), ("5", "--limit", "0")])
def test_wrong_values_exit_with_2(command: Callable[..., int], wrong: tuple[str, ...]) -> None:
    assert command("preferences", *wrong) == 2
