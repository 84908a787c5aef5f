"""Word problems: the calculator, the grader and pass@k by hand, and the reader on whatever a file may hold."""

import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

import problems
import situations
from runtime import UserError

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
    for problem in situations.generated_problems(200, 2, "train"):
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
        ("#### +18", True),
        ("#### +$18", True),
        ("#### $+18", True),
        ("#### +-18", False),
        ("#### \uff0b18", True),
        ("#### \u221218", False),
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
    for minus in "-\u2212\u2013\uff0d":
        assert problems.grade(f"#### {minus}5", "#### -5")
        assert problems.grade(f"#### {minus}$5", "#### -5")
        assert problems.grade("#### -5", f"#### {minus}5")
        assert not problems.grade(f"#### {minus}5", "#### 5")
        assert problems.calculator(f"3{minus}5*({minus}2)") == "13"
    assert problems.calculator("+3++4") == "7"


def test_a_gold_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="gold"):
        problems.grade("#### 18", "eighteen")


def test_pass_at_k_by_hand() -> None:
    found = [problems.pass_at_k(8, 2, k) for k in range(1, 9)]
    assert found == pytest.approx([0.25, 0.4643, 0.6429, 0.7857, 0.8929, 0.9643, 1, 1], abs=5e-5)
    assert problems.pass_at_k(2, 0, 2) == 0
    for right in range(9):
        series = [problems.pass_at_k(8, right, k) for k in range(1, 9)]
        assert series == sorted(series)
    for wrong in ((2, 0, 3), (2, 1, 0), (2, 3, 1)):
        with pytest.raises(ValueError, match="pass@"):
            problems.pass_at_k(*wrong)


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
    with pytest.raises(UserError, match=rf"some.jsonl, line 2: .*{re.escape(wrong)}") as caught:
        problems.read_problems(path)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_undecodable_files(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    with pytest.raises(UserError, match=r"some.jsonl is missing"):
        problems.read_problems(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"some.jsonl is empty"):
        problems.read_problems(path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"some.jsonl is empty"):
        problems.read_problems(path)
    with pytest.raises(UserError, match="cannot be read"):
        problems.read_problems(tmp_path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="not UTF-8"):
        problems.read_problems(path)


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
