"""The tokenizer and the template: every text round-trips, and text never becomes a special token."""

import base64
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import rustbpe

import tokenizer
from runtime import UserError
from tokenizer import SPECIAL, Tokenizer, story_request

TEXTS = [
    "",
    " ",
    "Once upon a time, there was a kite.",
    "tabs\tand\r\nnew\n\nlines   \n ",
    "18.50 and 1,000 = 2*500",
    "Zoë's naïve café, Привет, 你好, नमस्ते",
    "🦊🏳️‍🌈👩‍👩‍👧 \u200d\ufeff\u0000",
    "<|endoftext|><|user|>me<|assistant|>",
]


@pytest.fixture(scope="module")
def merged() -> Tokenizer:
    """A tokenizer with merges, trained as prepare.py trains the real one."""
    trainer = rustbpe.Tokenizer()
    text = "Once upon a time there was a little kite. The kite said: 12 + 30 = 42! <|endoftext|> " * 5
    trainer.train_from_iterator([text, *TEXTS], 400, pattern=tokenizer.PATTERN)
    return Tokenizer({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})


def random_texts(number: int) -> list[str]:
    rng = random.Random(7)
    sources = ["abc XYZ 019 .,'!<|>endoftext\n\t", "éßñ漢字🦊\u0301\u200d", "".join(map(chr, range(32)))]
    points = [rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]) for _ in range(50)]
    alphabet = "".join([*sources, *map(chr, points)])
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(number)]


def test_every_text_round_trips_without_special_ids(coder: Tokenizer, merged: Tokenizer) -> None:
    for text in TEXTS + random_texts(500):
        for each in (coder, merged):
            ids = each.encode(text)
            assert each.decode(ids) == text
            assert all(token < each.end for token in ids)


def test_merges_are_used_and_digits_stand_alone(merged: Tokenizer) -> None:
    assert len(merged.encode("Once upon a time there was a kite.")) < 15
    assert [merged.decode([token]) for token in merged.encode("12304")] == list("12304")
    assert not any(sum(char.isdigit() for char in piece) > 1 for piece in merged.pieces)


def test_special_tokens_take_the_last_ids(coder: Tokenizer) -> None:
    assert (coder.end, coder.user, coder.assistant, coder.vocabulary) == (256, 257, 258, 259)
    assert coder.decode([256, 257, 258]) == "".join(SPECIAL) == "<|endoftext|><|user|><|assistant|>"


def test_the_prompt_is_a_prefix_whatever_the_story(coder: Tokenizer, merged: Tokenizer) -> None:
    request = story_request(["kite", "river", "brave"])
    for each in (coder, merged):
        prompt = each.prompt(request)
        assert prompt[0] == each.user
        assert prompt[-1] == each.assistant
        assert each.decode(prompt) == f"<|user|>{request}<|assistant|>"
        for story in TEXTS + random_texts(100):
            whole = [each.user, *each.encode(request), each.assistant, *each.encode(story), each.end]
            assert whole[: len(prompt)] == prompt
            assert each.answer_text(whole[len(prompt) :]) == story


def test_special_names_in_a_request_are_text(coder: Tokenizer) -> None:
    prompt = coder.prompt("<|endoftext|><|assistant|>")
    assert [token for token in prompt if token > 255] == [coder.user, coder.assistant]


def test_an_answer_ends_at_its_first_end_of_text(coder: Tokenizer) -> None:
    ids = [*coder.encode("one"), coder.end, *coder.encode("two"), coder.end]
    assert coder.answer_text(ids) == "one"
    assert coder.answer_text(ids[:3]) == "one"
    assert coder.answer_text([coder.end]) == ""
    assert coder.answer_text([]) == ""


def test_broken_bytes_decode(coder: Tokenizer) -> None:
    assert coder.decode([0xFF, 65]) == "\ufffdA"
    assert coder.pieces[65] == "A"
    assert coder.pieces[0xFF] == "\ufffd"
    assert len(coder.pieces) == coder.vocabulary


@pytest.mark.parametrize(
    ("words", "request_text"),
    [
        (["kite"], "Write a story that uses the word kite."),
        (["kite", "river"], "Write a story that uses the words kite and river."),
        (["kite", "river", "brave"], "Write a story that uses the words kite, river and brave."),
    ],
)
def test_requests(words: list[str], request_text: str) -> None:
    assert story_request(words) == request_text


def test_a_request_needs_a_word() -> None:
    with pytest.raises(ValueError, match="at least one word"):
        story_request([])


def test_a_saved_tokenizer_is_loaded_again(tmp_path: Path, merged: Tokenizer) -> None:
    path = tmp_path / "new" / "tokenizer.tiktoken"
    ranks = {merged.encoding.decode_single_token_bytes(rank): rank for rank in range(merged.end)}
    tokenizer.save(ranks, path)
    loaded = tokenizer.load(path)
    assert loaded.vocabulary == merged.vocabulary
    assert all(loaded.encode(text) == merged.encode(text) for text in TEXTS)
    tokenizer.save({bytes([255 - value]): value for value in range(256)}, path)
    assert tokenizer.load(path).encode("A") == [255 - 65]  # the new file's, not a cached copy of the old one


Spoil = Callable[[list[str]], list[str]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[:0],
        lambda lines: lines[:100],
        lambda lines: lines[1:],
        lambda lines: [*lines, lines[0].replace(" 0", " 256")],
        lambda lines: [*lines, "no-base64! 256"],
        lambda lines: [*lines, "QQ=="],
        lambda lines: [*lines, "YWI= x"],
        lambda lines: [*lines, "é 256"],
        lambda lines: [line.replace(" 7", " -7") for line in lines],
        lambda lines: [*lines[:65], "QUE= 65", *lines[66:]],
    ],
)
def test_a_spoiled_file_is_one_line(tmp_path: Path, spoil: Spoil) -> None:
    path = tmp_path / "tokenizer.tiktoken"
    lines = [f"{base64.b64encode(bytes([value])).decode()} {value}" for value in range(256)]
    path.write_text("\n".join(spoil(lines)), encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.tiktoken is not a .*prepare\.py --new-tokenizer") as raised:
        tokenizer.load(path)
    assert "\n" not in str(raised.value)


def test_a_missing_file_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing: python prepare\.py makes it"):
        tokenizer.load(tmp_path / "tokenizer.tiktoken")
    with pytest.raises(UserError, match="not a tokenizer"):
        tokenizer.load(tmp_path)
