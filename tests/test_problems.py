"""Word problems: the calculator and the grader by hand, and generated problems against an independent solver."""

import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

import problems
from problems import MixConfig

GSM8K = Path(__file__).parent.parent.parent / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("1,000+1", "1001"),
        (".5*8", "4"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-2-3", "5"),
        ("100/10/5", "2"),
        ("-3+5", "2"),
        ("2*-3", "-6"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333"),
        ("7/2", "3.5"),
        ("20%*50", "10"),
        ("$5*3", "15"),
        (" 4 * 2 ", "8"),
        ("( 4 + 2 ) / 3", "2"),
        ("2--3", "5"),
        ("(" * 10 + "1" + ")" * 10, "1"),
        ("1/9999999", "0"),
        ("-1/9999999", "0"),
        ("-1/3", "-0.333333"),
        ("2/3", "0.666667"),
        ("0.1+10000000000000000", "10000000000000000.1"),
        ("007", "7"),
    ],
)
def test_calculator(expression: str, result: str) -> None:
    assert problems.calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "()",
        "1/0",
        "1/(2-2)",
        "2**9",
        "2//3",
        "2+",
        "*2",
        "1 2+",
        "1 2+3",
        "5$3",
        "12$",
        "1,0,0",
        "(1)(2)",
        "5%%",
        " ",
        "1..2",
        "1,00",
        "(1",
        "1)",
        "x",
        "__import__('os')",
        "\u0663+1",
        "(" * 11 + "1" + ")" * 11,
        "(" * 10_000,
        "-" * 10_000 + "1",
        "*".join(["2"] * 5_000),
        "9" * 1_000,
        "1e9",
    ],
)
def test_calculator_has_no_result_at_once(expression: str) -> None:
    began = time.perf_counter()
    assert problems.calculator(expression) is None
    assert time.perf_counter() - began < 0.1


def test_calculator_agrees_with_fractions_on_random_expressions() -> None:
    rng = random.Random(1)
    for _ in range(300):
        a, b, c = (rng.randint(1, 99) for _ in range(3))
        for text, value in (
            (f"{a}+{b}*{c}", Fraction(a + b * c)),
            (f"({a}-{b})*{c}", Fraction((a - b) * c)),
            (f"{a * b}/{b}-{c}", Fraction(a - c)),
        ):
            assert problems.calculator(text) == str(value)


def test_calculator_call_is_the_open_one_at_the_end() -> None:
    assert problems.calculator_call("Tom has 48/2=<<48/2=") == "24"
    assert problems.calculator_call("<<1+1=2>> and <<2*3=") == "6"
    assert problems.calculator_call("48/2=") is None
    assert problems.calculator_call("<<48/2=24>> so 24=") is None
    assert problems.calculator_call("<<48/\n2=") is None
    assert problems.calculator_call("<<1/0=") is None
    assert problems.calculator_call("<<" + "1+" * 5_000 + "1=") is None


def test_segments_mark_what_the_calculator_supplies() -> None:
    answer = "He has 48/2=<<48/2=24>>24.\nThen 24+1=<<24+1=25>>25.\n#### 25"
    assert problems.segments(answer) == [
        ("He has 48/2=<<48/2=", True),
        ("24>>", False),
        ("24.\nThen 24+1=<<24+1=", True),
        ("25>>", False),
        ("25.\n#### 25", True),
    ]
    assert problems.segments("no call") == [("no call", True)]
    assert problems.segments("1/0=<<1/0=5>>5") == [("1/0=<<1/0=5>>5", True)]  # no result: the model writes it all


def test_segments_join_to_the_answer_and_are_what_decoding_forces() -> None:
    for problem in problems.generated_problems(200, 2, "train"):
        pieces = problems.segments(problem.answer)
        assert "".join(text for text, _ in pieces) == problem.answer
        so_far = ""
        for text, written in pieces:
            if not written:
                assert text == f"{problems.calculator_call(so_far)}>>"
            so_far += text


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("#### 18", True),
        ("#### 18.", True),
        ("#### 18.0", True),
        ("#### $18", True),
        ("####18", True),
        ("#### 17 then #### 18", True),
        ("#### 18 then #### 17", False),
        ("#### 18 dollars", True),
        ("#### 18\n", True),
        ("#### -18", False),
        ("#### 1.8", False),
        ("18", False),
        ("#### ,", False),
        ("#### eighteen", False),
        ("####", False),
        ("", False),
        ("#### --18", False),
        ("#### 18,0,0", False),
        ("#### 18 #### ", False),
        ("#### " + "9" * 5_000, False),
        ("#### 18" + " dollars" * 5_000, True),
    ],
)
def test_grading_for_a_gold_answer_of_18(answer: str, right: bool) -> None:
    assert problems.grade(answer, "6*3=<<6*3=18>>18\n#### 18") is right


def test_grading_thousands_and_negative_gold() -> None:
    assert problems.grade("#### 1,000", "#### 1000")
    assert problems.grade("#### 1000", "#### 1,000")
    assert problems.grade("#### -5", "#### -5")
    assert not problems.grade("#### 5", "#### -5")


def test_a_gold_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="gold"):
        problems.grade("#### 18", "eighteen")


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    row = {"question": "1+1?", "answer": "<<1+1=2>>\n#### 2"}
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "question": "2?"}) + "\n", encoding="utf-8")
    assert [problem.question for problem in problems.read_problems(path)] == ["1+1?", "2?"]


def test_a_line_ends_at_its_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes('{"question": "a\u2028b\u0085", "answer": "#### 1"}\r\n'.encode())
    assert [problem.question for problem in problems.read_problems(path)] == ["a\u2028b\u0085"]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not {"),
        ("3", "not {"),
        ('{"answer": "#### 1"}', "no question"),
        ('{"question": "a"}', "no answer"),
        ('{"question": "a", "answer": 3}', "answer is not text"),
        ('{"question": " ", "answer": "#### 1"}', "question is not text, or empty"),
        ('{"question": "\\ud800", "answer": "#### 1"}', "surrogate"),
        ('{"question": "a", "answer": "2"}', "no '#### NUMBER'"),
        ('{"question": "a", "answer": "#### ,"}', "no '#### NUMBER'"),
    ],
)
def test_a_broken_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, wrong: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"some.jsonl, line 2: .*{re.escape(wrong)}") as caught:
        problems.read_problems(path)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_undecodable_files(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    with pytest.raises(ValueError, match=r"some.jsonl is missing"):
        problems.read_problems(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"some.jsonl is empty"):
        problems.read_problems(path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"some.jsonl is empty"):
        problems.read_problems(path)
    with pytest.raises(ValueError, match="cannot be read"):
        problems.read_problems(tmp_path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="not UTF-8"):
        problems.read_problems(path)


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
        draft = problems.draft_problem(rng, mix)
        known = {name: Fraction(value) for name, value in draft.given.items()}
        for step in draft.steps:
            known[step.name] = operations[step.operation](int(known[step.left]), int(known[step.right]))
        assert all(value.denominator == 1 and 2 <= value <= mix.largest for value in known.values())
        problem = problems.problem_of(draft)
        assert problems.final_number(problem.answer) == known[draft.asked]
        assert draft.steps[-1].name == draft.asked
        used = {operand for step in draft.steps for operand in (step.left, step.right)}
        assert set(known) - {draft.asked} == used  # nothing given or worked out in vain
        told = set(re.findall(r"\d+", problem.question))
        unspoken = {"2", "3"}  # half, twice, three times
        assert {str(value) for value in draft.given.values()} <= told | unspoken


def test_undone_problems_run_forward_to_what_is_left() -> None:
    """Played forward from the answer, the changes that the question tells lead to the amount that it ends with."""
    rng, played = random.Random(2), 0
    while played < 200:
        draft = problems.draft_problem(rng, MixConfig(distractor=0))
        if draft.kinds[0] != "undoing":
            continue
        have, told = draft.values[draft.asked], iter(re.findall(r"\d+", " ".join(draft.sentences)))
        for kind in draft.kinds[1:]:
            if kind in ("un-twice", "un-half"):
                have = have * 2 if kind == "un-twice" else have // 2
            else:
                have += int(next(told)) * (1 if kind == "un-gain" else -1)
        assert str(have) == next(told)
        played += 1


def test_the_mix_of_steps_is_the_one_asked_for() -> None:
    rng, mix = random.Random(1), MixConfig()
    counts = Counter(len(problems.draft_problem(rng, mix).steps) for _ in range(4_000))
    for steps, share in enumerate(mix.steps, start=1):
        assert counts[steps] / 4_000 == pytest.approx(share, abs=0.03)  # four standard errors
    only_two = MixConfig(steps=(0, 1))
    assert all(len(problems.draft_problem(rng, only_two).steps) == 2 for _ in range(100))


def test_nobody_is_said_to_have_two_amounts() -> None:
    """Once the question has told what somebody has, it does not tell another amount of the same things of them."""
    rng = random.Random(3)
    for _ in range(3_000):
        draft = problems.draft_problem(rng, MixConfig())
        text, things = " ".join(draft.sentences), draft.theme.things
        named = re.findall(rf"\b([A-Z][a-z]+) has \d+ {things}", text) + re.findall(
            r"\b([A-Z][a-z]+), who has \d+", text
        )
        others = [name for name in named if name != draft.name]
        assert len(others) == len(set(others)), text


def test_he_and_she_follow_a_sentence_about_nobody_else() -> None:
    rng, seen = random.Random(4), 0
    others = rf"\b({'|'.join(problems.PRONOUNS)}|friend|mother|father|sister|brother|grandma|teacher|man)\b"
    for _ in range(5_000):
        draft = problems.draft_problem(rng, MixConfig())
        for before, text in itertools.pairwise(draft.sentences):
            if re.match("S?[Hh]e ", text):
                assert text.startswith(draft.pronoun.capitalize())
                assert set(re.findall(others, before)) <= {draft.name}, (before, text)
                seen += 1
    assert seen > 500


def test_both_together_adds_what_the_opening_said_of_the_other() -> None:
    rng, seen = random.Random(6), 0
    while seen < 30:
        draft = problems.draft_problem(rng, MixConfig(distractor=0, steps=(0, 1)))
        if draft.kinds == ["things", "times", "both known"]:
            text = problems.problem_of(draft).question
            times = int(re.findall(r"has (\d+) times", text)[0])
            theirs = int(re.findall(r"has (\d+)(?! times)\b", text)[0])
            assert draft.values[draft.asked] == theirs * times + theirs
            seen += 1


def test_parts_differ_in_color_and_the_rest_is_of_something() -> None:
    rng, seen = random.Random(7), 0
    while seen < 200:
        draft = problems.draft_problem(rng, MixConfig())
        if draft.kinds[0] == "parts":
            assert "part" in draft.kinds
            named = re.findall("|".join(problems.COLORS), " ".join(draft.sentences[:-1]))
            assert len(named) == len(set(named)) == draft.kinds.count("part")
            seen += 1


def test_texts_are_finished_and_short() -> None:
    made = problems.generated_problems(2_000, 4, "train")
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
    for problem in problems.generated_problems(500, 3, "train"):
        calls = re.findall(r"<<([^=]*)=([^>]*)>>", problem.answer)
        assert 1 <= len(calls) <= 4
        assert all(problems.calculator(expression) == result for expression, result in calls)
        assert problem.answer.splitlines()[-1] == f"#### {calls[-1][1]}"
        assert problems.grade(problem.answer, problem.answer)


def test_ten_thousand_problems_have_a_thousand_situations() -> None:
    rng, mix = random.Random(1), MixConfig()
    drafts = [problems.draft_problem(rng, mix) for _ in range(10_000)]
    assert (
        len({problems.situation(draft) for draft in drafts}) >= 2_000
    )  # of what is told, whoever and whatever it is of
    things = [draft.theme.things for draft in drafts]
    assert not any(name in problems.situation(draft) for draft, name in zip(drafts, things, strict=True))
    skeletons = {re.sub(r"\d+", "0", problems.problem_of(draft).question) for draft in drafts}
    assert len(skeletons) > 9_000  # texts differ in more than their numbers


def test_train_and_test_never_share_a_question_and_seeds_repeat() -> None:
    train = {problem.question for seed in (1, 2) for problem in problems.generated_problems(2_000, seed, "train")}
    test = {problem.question for seed in (1, 2) for problem in problems.generated_problems(500, seed, "test")}
    assert not train & test
    assert len(test) > 900
    one_in = MixConfig().test_one_in
    assert one_in == 10
    assert all(problems.is_test(question, one_in) for question in test)
    assert not any(problems.is_test(question, one_in) for question in train)
    rng = random.Random(5)
    drawn = [problems.problem_of(problems.draft_problem(rng, MixConfig())).question for _ in range(3_000)]
    assert sum(problems.is_test(question, one_in) for question in drawn) / 3_000 == pytest.approx(0.1, abs=0.025)
    assert problems.generated_problems(50, 7, "test") == problems.generated_problems(50, 7, "test")
    assert problems.generated_problems(50, 7, "test") != problems.generated_problems(50, 8, "test")
    assert problems.generated_problems(50, 7, "test")[:20] == problems.generated_problems(20, 7, "test")


def test_command_prints_problems(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("problems", "3") == 0
    assert capsys.readouterr().out.count("\n####") == 3
    assert command("problems", "0") == 2


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K's files are not here")
def test_gsm8k_grades_right_and_its_exact_annotations_are_reproduced() -> None:
    known = problems.read_problems(GSM8K / "train.jsonl") + problems.read_problems(GSM8K / "test.jsonl")
    assert len(known) == 8_792
    assert all(problems.grade(problem.answer, problem.answer) for problem in known)
    calls = [call for problem in known for call in re.findall(r"<<([^<>=\n]*)=([^<>\n]*)>>", problem.answer)]
    differ = []
    for expression, stated in calls:
        result = problems.calculator(expression)
        number = re.fullmatch(r"-?[0-9]*\.?[0-9]+", stated.replace(",", "").strip())
        if result is None or number is None or abs(Fraction(result) - Fraction(number.group())) > Fraction(1, 100):
            differ.append((expression, stated, result))
    assert len(differ) < len(calls) / 100, differ[:20]
