"""The reward, the split, the words that mark a story, and reading files that may be spoiled."""

import hashlib
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

import stories
from runtime import UserError
from stories import DrawConfig, Story, words_used

EVERY_WORD = DrawConfig(least_stories=1, most_share=1.0)


@pytest.mark.parametrize(
    ("story", "words", "share"),
    [
        ("He helped her.", ["help"], 1.0),
        ("HELP!", ["help"], 1.0),
        ("help", ["HELP"], 1.0),
        ("The whelp ran.", ["help"], 0.0),
        ("He can't yelp", ["help"], 0.0),
        ("hel p", ["help"], 0.0),
        ("unhelpful", ["help"], 0.0),
        ("the dog's bone", ["dog"], 1.0),
        ("a well-known kite", ["known", "kite"], 1.0),
        ("one\nkite_and", ["kite", "and"], 1.0),
        ("a kite", ["kite", "river"], 0.5),
        ("a kite", ["kite", "river", "brave"], 1 / 3),
        ("a kite and a kite", ["kite", "river", "brave"], 1 / 3),
        ("a kite", ["kite", "kite", "river"], 0.5),
        ("a kite", ["kite", "KITE", "river"], 0.5),
        ("", ["kite"], 0.0),
        ("  \n", ["kite"], 0.0),
        ("<|endoftext|>kite", ["kite"], 0.0),
        ("a kite<|endoftext|>a river", ["kite", "river"], 0.5),
        ("a kite<|endoftext|>a river<|endoftext|>", ["kite", "river"], 0.5),
        ("The caf\u00e9s", ["cafe\u0301"], 1.0),
        ("The CAFE\u0301S", ["caf\u00e9"], 1.0),
        ("The cafe", ["caf\u00e9"], 0.0),
        ("The caf\u00e9", ["caf"], 1.0),
        ("A nai\u0308ve boy", ["na\u00efve", "ive"], 0.5),
        ("x\u030c", ["x\u030c"], 1.0),  # has no character of its own
        ("It\u2019s a kite", ["it's"], 1.0),
        ("It's a kite", ["it\u2019s"], 1.0),
        ("It\u02bcs a kite", ["IT\uff07S", "s"], 0.5),
        ("'it' s", ["it's"], 0.0),
        ("a \u041a\u043e\u0442", ["\u043a\u043e\u0442"], 1.0),
    ],
)
def test_words_used_by_hand(story: str, words: list[str], share: float) -> None:
    assert words_used(story, words) == pytest.approx(share, abs=1e-12)


def test_words_used_takes_any_iterable_once() -> None:
    assert words_used("a kite", iter(["kite", "river"])) == 0.5


def test_an_instruction_without_words_has_no_reward() -> None:
    with pytest.raises(ValueError, match="without words"):
        words_used("a kite", [])


@pytest.mark.parametrize(
    ("told", "times"),
    [
        ([("A kite. The kite, kites! A river.", ("kite", "river", "brave"))], (3 + 1) / 2),
        ([("a kite", ("kite",)), ("kite kite kite", ("kite",))], (1 + 3) / 2),
        ([("a kite a river", ("kite",)), ("nothing", ("kite",))], 1.0),
        ([("a kite<|endoftext|>kite kite", ("Kite", "kite"))], 1.0),
        ([("", ("kite",))], 0.0),
        ([], 0.0),
    ],
)
def test_word_repeats_by_hand(told: list[tuple[str, tuple[str, ...]]], times: float) -> None:
    assert stories.word_repeats(told) == pytest.approx(times)


def test_marked_counts_each_use_and_loses_nothing() -> None:
    text = "Kite, a <b>river</b> | kites!\nwhelp kite"
    assert stories.marked(text, ("kite", "river", "brave")) == [
        ("Kite", 1),
        (", a <b>", 0),
        ("river", 1),
        ("</b> | ", 0),
        ("kites", 2),
        ("!\nwhelp ", 0),
        ("kite", 3),
    ]
    after = "a kite<|endoftext|>kite"
    assert stories.marked(after, ("kite",)) == [("a ", 0), ("kite", 1), ("<|endoftext|>kite", 0)]
    assert stories.marked("", ("kite",)) == []
    assert stories.marked("a kite", ()) == [("a kite", 0)]
    assert stories.marked("It\u2019s a cafe\u0301.", ("it's", "caf\u00e9")) == [
        ("It\u2019s", 1),
        (" a ", 0),
        ("cafe\u0301", 1),
        (".", 0),
    ]
    assert stories.marked("<b>", ("<b>", "|")) == [("<b>", 0)]  # no word of a story, so never used


def test_distinct_pairs_and_repeated_4grams_by_hand() -> None:
    assert stories.distinct_pairs([[1, 2, 1, 2]]) == pytest.approx(2 / 3)
    assert stories.distinct_pairs([[1, 2], [1, 2], [3, 4]]) == pytest.approx(2 / 3)
    assert stories.distinct_pairs([[1], []]) == 0
    assert stories.repeated_4grams([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert stories.repeated_4grams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert stories.repeated_4grams([[1, 2, 3], []]) == 0
    assert stories.repeated_4grams([[1, 2, 3, 9, 1, 2, 3, 8]]) == 0  # three tokens come again, never four


def test_the_split_is_decided_by_the_text_alone() -> None:
    texts = [f"Story {number} of a kite." for number in range(20_000)]
    held = [text for text in texts if stories.is_heldout(text, 200)]
    assert 70 <= len(held) <= 130  # 100 expected, a standard deviation of 10
    digests = [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) for text in texts]
    assert held == [text for text, digest in zip(texts, digests, strict=True) if digest % 200 == 0]
    assert 4800 <= sum(stories.is_heldout(text, 4) for text in texts) <= 5200
    assert stories.is_heldout("any", 1)


def test_marking_words_by_hand() -> None:
    told = [
        "Once a bear saw the fish. The bear had a bear.",  # bear 3, the 2, and saw, had and fish 1
        "Once a bear ate the fish.",
        "Once a girl had the drum, and a fish.",
        "Once a girl ate the soup.",
    ]
    # A count alone would put "the" second, a document frequency alone "saw" first.
    assert 3 * math.log(4 / 2) > math.log(4 / 1) > math.log(4 / 2) > math.log(4 / 3) > 2 * math.log(4 / 4)
    marking = stories.marking_words(told, EVERY_WORD)
    assert marking[0] == ["bear", "saw", "had", "fish", "the"]
    assert marking[1] == ["ate", "bear", "fish", "the"]  # of one weight, so by the alphabet
    assert marking[2] == ["and", "drum", "girl", "had", "fish", "the"]
    assert marking[3] == ["soup", "ate", "girl", "the"]


def test_marking_keeps_the_best() -> None:
    told = ["Once a bear saw the fish. The bear saw a bear.", "Once a bear ate the fish.", "Once a girl ate the soup."]
    assert stories.marking_words(told, replace(EVERY_WORD, words=1, marking=2))[0] == ["saw", "bear"]


def test_names_contractions_and_short_words_are_left_out() -> None:
    told = [
        "One day, Lily met a small fox. Then Lily and Lily sat.",
        "He saw Lily, and it didn't go up. It's a fox!",
        "The sun was big. Big dogs were big, and Rose had a rose and a rose.",
    ]
    words = {word for marking in stories.marking_words(told, EVERY_WORD) for word in marking}
    assert {"fox", "small", "sat", "sun", "rose", "big"} <= words
    assert not words & {"lily", "didn't", "didn", "it's", "up", "it", "a"}


def test_words_in_too_few_or_too_many_stories_are_left_out() -> None:
    told = [f"the {'fox' if number < 3 else 'owl' if number < 10 else 'cow'} sat on the mat" for number in range(40)]
    marking = stories.marking_words(told, DrawConfig(least_stories=4, most_share=0.25))
    assert marking[0] == []  # fox: in 3 stories
    assert marking[5] == ["owl"]  # in 7
    assert marking[20] == []  # cow: in 30 of 40


def test_draws_are_distinct_and_seeded() -> None:
    marking = ["kite", "lake", "bird", "tree", "fish", "moon"]
    drawn = stories.drawn_instructions(marking, DrawConfig(), random.Random(1))
    assert [len(words) for words in drawn] == [3, 3]
    assert sorted(word for words in drawn for word in words) == sorted(marking)
    assert drawn == stories.drawn_instructions(marking, DrawConfig(), random.Random(1))
    assert drawn != stories.drawn_instructions(marking, DrawConfig(), random.Random(2))
    assert len(stories.drawn_instructions(marking[:5], DrawConfig(), random.Random(1))) == 1
    assert stories.drawn_instructions(marking[:2], DrawConfig(), random.Random(1)) == []


@pytest.mark.parametrize("order", ["WFSt", "StWF", "FStW", "WSt", "StFW"])
def test_instruct_fields_in_any_order(order: str) -> None:
    fields = {
        "W": "Words: quit, Oak,gloomy , oak\n",
        "F": "Features: Dialogue, BadEnding\nSummary: A short one.\nRandom sentence: It sat.\n",
        "St": "Story: \n\nSara saw an oak.\nShe said, Words: are hard.\n\nIt was gloomy.\n",
    }
    piece = order.replace("W", fields["W"]).replace("F", fields["F"]).replace("St", fields["St"])
    story = stories.parsed_story(f"\n{piece}\n")
    assert story.words == ("quit", "oak", "gloomy")
    assert story.text == "Sara saw an oak.\nShe said, Words: are hard.\n\nIt was gloomy."


def test_stories_are_read_once_each(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text(
        "A kite.\r\n<|endoftext|>\n A fox. \n<|endoftext|><|endoftext|>\nA kite.\n<|endoftext|>Zoë 🦊\n\nsat.",
        encoding="utf-8",
    )
    assert stories.read_stories(path) == [Story("A kite."), Story("A fox."), Story("Zoë 🦊\n\nsat.")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"<|endoftext|>\n<|endoftext|>", "no stories"),
        (b"A kite.\n\xff\xfe", r"not UTF-8 \(byte 8\)"),
    ],
)
def test_spoiled_stories_are_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "stories.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"stories\.txt.*{said}") as raised:
        stories.read_stories(path)
    assert "\n" not in str(raised.value)


def test_missing_stories_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.txt is missing: python prepare\.py"):
        stories.read_stories(tmp_path / "none.txt")
    with pytest.raises(UserError, match="cannot be read"):
        stories.read_stories(tmp_path)


def test_instructions_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "instructions.jsonl"
    path.write_bytes(b'{"words": ["kite", "fox"]}\r\n{"words": ["caf\xc3\xa9", "a\xe2\x80\xa8b"], "more": 1}\n')
    assert stories.read_instructions(path) == [("kite", "fox"), ("café", "a\u2028b")]


@pytest.mark.parametrize(
    "line",
    [
        *("", "kite", "{", "[]", "3", "null", "{}", '{"words": null}', '{"words": "kite"}', '{"words": {"kite": 1}}'),
        *('{"words": []}', '{"words": [1]}', '{"words": [""]}', '{"words": ["kite", null]}'),
    ],
)
def test_a_spoiled_instruction_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "instructions.jsonl"
    good = '{"words": ["kite"]}'
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"instructions\.jsonl, line 2 is not .*prepare\.py") as raised:
        stories.read_instructions(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\xff\n", None])
def test_spoiled_instruction_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "instructions.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"instructions\.jsonl"):
        stories.read_instructions(path)


@pytest.mark.parametrize(
    "wrong",
    [{"words": 0}, {"marking": 2}, {"least_stories": 0}, {"most_share": 0.0}, {"most_share": 2}, {"heldout_one_in": 0}],
)
def test_draws_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="--draw"):
        DrawConfig(**wrong)
