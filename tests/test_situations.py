"""Generated word problems against an independent solver, and that they vary, end, and keep training and test apart."""

import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

import problems
import situations
import wording
from situations import MixConfig

CONTENT = wording.read_content()


def test_a_seed_gives_the_problems_it_always_gave() -> None:
    """Of 10,000: models are compared on problems of a seed, so a change of these makes earlier results another test."""
    drawn = [
        problem
        for seed in (1, 2, 3, 4)
        for split, number in (("train", 2_250), ("test", 250))
        for problem in situations.generated_problems(number, seed, split)
    ]
    text = "".join(f"{problem.question}\n{problem.answer}\n\n" for problem in drawn)
    assert len(drawn) == 10_000
    assert (
        hashlib.sha256(text.encode("utf-8")).hexdigest()
        == "5e3cd98e43db19dd3ca7d8a1b68861ded21420fdb663a225a270f253348d74f2"
    )


def test_the_answer_follows_from_what_the_question_gives() -> None:
    """A solver that knows only the given quantities and the steps, not the text, reaches the text's answer."""
    operations: dict[str, Callable[[int, int], Fraction]] = {
        "+": lambda a, b: Fraction(a + b),
        "-": lambda a, b: Fraction(a - b),
        "*": lambda a, b: Fraction(a * b),
        "/": Fraction,
    }
    rng, mix = random.Random(1), MixConfig()
    for _ in range(3_000):
        draft = situations.draft_problem(rng, mix, CONTENT)
        given = {name: value for name, value in draft.values.items() if name.startswith("g")}
        known = {name: Fraction(value) for name, value in given.items()}
        for name, operation, left, right in draft.steps:
            known[name] = operations[operation](int(known[left]), int(known[right]))
        assert all(value.denominator == 1 and 2 <= value <= mix.largest for value in known.values())
        problem = situations.problem_of(draft)
        asked = draft.steps[-1][0]
        assert problems.final_number(problem.answer) == known[asked]
        used = {operand for step in draft.steps for operand in step[2:]}
        assert set(known) - {asked} == used  # nothing given or worked out in vain
        told = set(re.findall(r"\d+", problem.question))
        unspoken = {"2", "3"}  # half, twice, three times
        assert {str(value) for value in given.values()} <= told | unspoken
        assert problem.question.count("just as many") <= 1  # as many as when, the second time?


def test_undone_problems_run_forward_to_what_is_left() -> None:
    """Played forward from the answer, the changes that the question tells lead to the amount that it ends with."""
    rng, played = random.Random(2), 0
    while played < 200:
        draft = situations.draft_problem(rng, MixConfig(distractor=0), CONTENT)
        if draft.kinds[0] != "undoing":
            continue
        have, told = draft.values[draft.steps[-1][0]], iter(re.findall(r"\d+", " ".join(draft.sentences)))
        for kind in draft.kinds[1:]:
            if kind in ("un-twice", "un-half"):
                have = have * 2 if kind == "un-twice" else have // 2
            else:
                have += int(next(told)) * (1 if kind == "un-gain" else -1)
        assert str(have) == next(told)
        played += 1


def test_the_mix_of_steps_is_the_one_asked_for() -> None:
    rng, mix = random.Random(1), MixConfig()
    counts = Counter(len(situations.draft_problem(rng, mix, CONTENT).steps) for _ in range(4_000))
    for steps, share in enumerate(mix.steps, start=1):
        assert counts[steps] / 4_000 == pytest.approx(share, abs=0.03)  # four standard errors
    only_two = MixConfig(steps=(0, 1))
    assert all(len(situations.draft_problem(rng, only_two, CONTENT).steps) == 2 for _ in range(100))


def test_nobody_is_said_to_have_two_amounts() -> None:
    """Once the question has told what somebody has, it does not tell another amount of the same things of them."""
    rng = random.Random(3)
    for _ in range(3_000):
        draft = situations.draft_problem(rng, MixConfig(), CONTENT)
        text, things = " ".join(draft.sentences), draft.theme["T"]
        named = re.findall(rf"\b([A-Z][a-z]+) has \d+ {things}", text) + re.findall(
            r"\b([A-Z][a-z]+), who has \d+", text
        )
        others = [name for name in named if name != draft.name]
        assert len(others) == len(set(others)), text


def test_he_and_she_follow_a_sentence_about_nobody_else() -> None:
    rng, seen = random.Random(4), 0
    others = rf"\b({'|'.join(CONTENT.she + CONTENT.he)}|friend|mother|father|sister|brother|grandma|teacher|man)\b"
    for _ in range(5_000):
        draft = situations.draft_problem(rng, MixConfig(), CONTENT)
        for before, text in itertools.pairwise(draft.sentences):
            if re.match("S?[Hh]e ", text):
                assert text.startswith("She" if draft.name in CONTENT.she else "He")
                assert set(re.findall(others, before)) <= {draft.name}, (before, text)
                seen += 1
    assert seen > 500


def test_both_together_adds_what_the_opening_said_of_the_other() -> None:
    rng, seen = random.Random(6), 0
    while seen < 30:
        draft = situations.draft_problem(rng, MixConfig(distractor=0, steps=(0, 1)), CONTENT)
        if draft.kinds == ["things", "times", "both known"]:
            text = situations.problem_of(draft).question
            times = int(re.findall(r"has (\d+) times", text)[0])
            theirs = int(re.findall(r"has (\d+)(?! times)\b", text)[0])
            assert draft.values[draft.steps[-1][0]] == theirs * times + theirs
            seen += 1


def test_parts_differ_in_color_and_the_rest_is_of_something() -> None:
    rng, seen = random.Random(7), 0
    while seen < 200:
        draft = situations.draft_problem(rng, MixConfig(), CONTENT)
        if draft.kinds[0] == "parts":
            assert "part" in draft.kinds
            named = re.findall("|".join(CONTENT.colors), " ".join(draft.sentences[:-1]))
            assert len(named) == len(set(named)) == draft.kinds.count("part")
            seen += 1


def test_texts_are_finished_and_short() -> None:
    made = situations.generated_problems(2_000, 4, "train")
    lengths = []
    for problem in made:
        text = f"{problem.question} {problem.answer}"
        assert not re.search(r"[{}@|]|  | [.?]", text), text
        assert not re.search(r"(?<![.!?]) She | to \.|\b1 [a-z]+s\b", text), text
        assert all(re.match("[A-Z0-9#]", sentence) for sentence in re.split(r"(?<=[.?]) ", problem.question)), text
        assert problem.question.endswith("?")
        lengths.append(len(text.split()))
    assert max(lengths) <= 110
    assert sum(lengths) / len(lengths) < 50


def test_every_calculation_of_an_answer_is_right() -> None:
    for problem in situations.generated_problems(500, 3, "train"):
        calls = re.findall(r"<<([^=]*)=([^>]*)>>", problem.answer)
        assert 1 <= len(calls) <= 4
        assert all(problems.calculator(expression) == result for expression, result in calls)
        assert problem.answer.splitlines()[-1] == f"#### {calls[-1][1]}"
        assert problems.grade(problem.answer, problem.answer)


def test_ten_thousand_problems_have_a_thousand_situations() -> None:
    rng, mix = random.Random(1), MixConfig()
    drafts = [situations.draft_problem(rng, mix, CONTENT) for _ in range(10_000)]
    assert len({", ".join(draft.kinds) for draft in drafts}) >= 2_000  # of what is told, whoever and whatever it is of
    things = [draft.theme["T"] for draft in drafts]
    assert not any(name in ", ".join(draft.kinds) for draft, name in zip(drafts, things, strict=True))
    skeletons = {re.sub(r"\d+", "0", situations.problem_of(draft).question) for draft in drafts}
    assert len(skeletons) > 9_000  # texts differ in more than their numbers


def test_train_and_test_never_share_a_question_and_seeds_repeat() -> None:
    train = {problem.question for seed in (1, 2) for problem in situations.generated_problems(2_000, seed, "train")}
    test = {problem.question for seed in (1, 2) for problem in situations.generated_problems(500, seed, "test")}
    assert not train & test
    assert len(test) > 900
    one_in = MixConfig().test_one_in
    assert one_in == 10
    assert all(situations.is_test(question, one_in) for question in test)
    assert not any(situations.is_test(question, one_in) for question in train)
    rng = random.Random(5)
    drawn = [situations.problem_of(situations.draft_problem(rng, MixConfig(), CONTENT)).question for _ in range(3_000)]
    assert sum(situations.is_test(question, one_in) for question in drawn) / 3_000 == pytest.approx(0.1, abs=0.025)
    assert situations.generated_problems(50, 7, "test") == situations.generated_problems(50, 7, "test")
    assert situations.generated_problems(50, 7, "test") != situations.generated_problems(50, 8, "test")
    assert situations.generated_problems(50, 7, "test")[:20] == situations.generated_problems(20, 7, "test")


def test_a_kind_that_is_added_comes_in_problems(tmp_path: Path) -> None:
    path = tmp_path / "problems.toml"
    added = '[[moves]]\nname = "found"\nsorts = ["things", "people"]\nstep = "a + b"\n'
    texts = 'says = ["Behind the door {N} finds {b} more than {M}."]\nworks = ["Now it is @."]\n'
    path.write_text(wording.PATH.read_text(encoding="utf-8") + added + texts, encoding="utf-8")
    content, rng = wording.read_content(path), random.Random(8)
    drafts = [situations.draft_problem(rng, MixConfig(), content) for _ in range(500)]
    found = [draft for draft in drafts if "found" in draft.kinds]
    assert {draft.kinds[0] for draft in found} == {"things", "people"}
    for draft in found:
        told = re.findall(r"finds (\d+) more than", situations.problem_of(draft).question)
        added_up = re.findall(r"Now it is \d+\+(\d+)=", "\n".join(draft.lines))
        assert sorted(told) == sorted(added_up)


def test_command_prints_problems(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("situations", "3") == 0
    assert capsys.readouterr().out.count("\n####") == 3
    assert command("situations", "0") == 2
