"""Word problems: the calculator and the grader by hand, and generated problems against an independent solver."""

import json
import random
import re
import time
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
        "1..2",
        "1,00",
        "(1",
        "1)",
        "x",
        "__import__('os')",
        "\u0663+1",
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


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"question": "a"}', '{"question": "a", "answer": 3}', '{"question": "a", "answer": "2"}', ""],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"some.jsonl, line 2"):
        problems.read_problems(path)


def test_missing_empty_and_undecodable_files(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    with pytest.raises(ValueError, match=r"some.jsonl is missing"):
        problems.read_problems(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"some.jsonl is empty"):
        problems.read_problems(path)
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
    rng, mix, steps = random.Random(1), MixConfig(), []
    for _ in range(3_000):
        draft = problems.draft_problem(rng, mix)
        if draft is None:
            continue
        known = {name: Fraction(value) for name, value in draft.given.items()}
        for step in draft.steps:
            known[step.name] = operations[step.operation](int(known[step.left]), int(known[step.right]))
            assert known[step.name].denominator == 1
            assert 0 <= known[step.name] <= mix.largest
        problem = problems.problem_of(draft)
        assert problems.final_number(problem.answer) == known[draft.asked]
        assert draft.steps[-1].name == draft.asked
        told = set(re.findall(r"\d+", problem.question))
        unspoken = {"2", "3", "4"}  # half, twice, three times, four times
        assert {str(value) for value in draft.given.values()} <= told | unspoken
        steps.append(len(draft.steps))
    assert set(steps) == {1, 2, 3, 4}


def test_every_calculation_of_an_answer_is_right() -> None:
    for problem in problems.generated_problems(500, 3, "train"):
        calls = re.findall(r"<<([^=]*)=([^>]*)>>", problem.answer)
        assert 1 <= len(calls) <= 4
        assert all(problems.calculator(expression) == result for expression, result in calls)
        assert problem.answer.splitlines()[-1] == f"#### {calls[-1][1]}"
        assert problems.grade(problem.answer, problem.answer)


def test_ten_thousand_problems_have_a_thousand_situations() -> None:
    rng, mix = random.Random(1), MixConfig()
    drafts = [draft for _ in range(13_000) if (draft := problems.draft_problem(rng, mix))][:10_000]
    assert len(drafts) == 10_000
    assert len({tuple(draft.kinds) for draft in drafts}) >= 1_000
    assert all("{" not in sentence for draft in drafts for sentence in (*draft.sentences, *draft.lines))


def test_train_and_test_never_share_a_question_and_seeds_repeat() -> None:
    train = {problem.question for seed in (1, 2) for problem in problems.generated_problems(2_000, seed, "train")}
    test = {problem.question for seed in (1, 2) for problem in problems.generated_problems(500, seed, "test")}
    assert not train & test
    assert len(test) > 900
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
