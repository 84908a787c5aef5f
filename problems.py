"""Grade-school word problems in GSM8K's format: the reader, the calculator, the grader and pass@k.

A problem is a question, and an answer worked out step by step with calculator calls, `<<48/2=24>>`, whose last line is
`#### 24` (Cobbe et al. 2021, arXiv 2110.14168). When a model writes an answer, the program computes what stands between
`=` and `>>`. It parses + - * / and parentheses itself and bounds the work before doing it: no text can run code or
stall.
"""

import json
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from runtime import UserError


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its worked answer, which ends in `#### NUMBER`."""

    question: str
    answer: str


def read_problems(path: Path) -> list[Problem]:
    """The problems of a file in GSM8K's format, one JSON object a line.

    Raises: UserError that names the line where one is broken, and where the file is missing, empty or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines would cut at U+2028
    except FileNotFoundError:
        raise UserError(f"{path} is missing: python prepare.py --gsm8k brings GSM8K's files") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): convert it, then run again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): pass a file of problems") from None
    if lines == [""]:
        raise UserError(f"{path} is empty: pass a file with a problem a line")
    known = []
    for number, line in enumerate(lines, start=1):
        try:
            known.append(problem_in(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}: mend or delete the line") from None
    return known


def problem_in(line: str) -> Problem:
    """The problem that a line of JSON holds.

    Raises: ValueError that says what is wrong with it.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the latter from a line of nothing but brackets
        raise ValueError("not JSON") from None
    if not isinstance(row, dict):
        raise ValueError('not {"question": ..., "answer": ...}')
    for name in ("question", "answer"):
        if name not in row:
            raise ValueError(f"no {name}")
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"the {name} is not text, or empty")
        if re.search("[\ud800-\udfff]", row[name]):
            raise ValueError(f"the {name} has half a surrogate pair")
    if final_number(row["answer"]) is None:
        raise ValueError("the answer has no '#### NUMBER'")
    return Problem(row["question"], row["answer"])


CALL = re.compile(r"<<([^<>\n]*)=$")
SUPPLIED = re.compile(r"(<<[^<>\n=]*=)([^<>\n]*>>)")
# A number that no further digit follows: `1,0,0` is none.
NUMBER = re.compile(r"([+-]?)\$?([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?![,.]?[0-9])")
LITERAL = re.compile(r"\$?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(%?)")
# Signs as word processors and keyboards write them: minus sign, en dash, full-width hyphen and plus.
SIGNS = str.maketrans("\u2212\u2013\uff0d\uff0b", "---+")
SPACES = re.compile(r" *([-+*/()]) *")  # a space may stand around an operator, not inside a number
LONGEST = 100  # characters of an expression; GSM8K's longest have about 60
DEEPEST = 10  # parentheses and signs inside one another
DECIMALS = 6  # of a result that is not whole
LONGEST_NUMBER = 40  # characters of a final number


def segments(answer: str) -> list[tuple[str, bool]]:
    """The pieces of an answer; false for what the calculator supplies (`24>>` after `<<48/2=`), true for the rest.

    Where the calculator has no result, the model writes one itself.
    """
    pieces, start = [], 0
    for match in SUPPLIED.finditer(answer):
        if calculator_call(match.group(1)) is not None:
            pieces += [(answer[start : match.end(1)], True), (match.group(2), False)]
            start = match.end()
    return [piece for piece in [*pieces, (answer[start:], True)] if piece[0]]


def calculator_call(text: str) -> str | None:
    """The calculator's result where `text` ends in an open call, `<<48/2=`; None without a call or a result."""
    match = CALL.search(text[-LONGEST - 3 :])
    return calculator(match.group(1)) if match else None


def calculator(expression: str) -> str | None:
    """The value of an expression of numbers, + - * / and parentheses; None where it has none.

    Whole results print as whole numbers, others with up to six decimals. `1,000` and `$5` are numbers, `20%` a fifth.
    """
    if len(expression) > LONGEST:
        return None
    text = SPACES.sub(r"\1", expression.translate(SIGNS).strip(" "))
    value, end = total(text, 0, 0)
    if value is None or end != len(text):
        return None
    rounded = round(value, DECIMALS)  # exactly, as fractions are
    whole, rest = divmod(abs(rounded), 1)
    decimals = f"{int(rest * 10**DECIMALS):0{DECIMALS}d}".rstrip("0")
    return f"{'-' if rounded < 0 else ''}{whole}{'.' if decimals else ''}{decimals}"


def total(text: str, start: int, depth: int) -> tuple[Fraction | None, int]:
    """Value of the sum that starts at `start`, and where it ends; the value is None where there is none."""
    value, end = product(text, start, depth)
    while value is not None and end < len(text) and text[end] in "+-":
        sign = 1 if text[end] == "+" else -1
        term, end = product(text, end + 1, depth)
        value = None if term is None else value + sign * term
    return value, end


def product(text: str, start: int, depth: int) -> tuple[Fraction | None, int]:
    """Value of the product that starts at `start`, and where it ends."""
    value, end = factor(text, start, depth)
    while value is not None and end < len(text) and text[end] in "*/":
        operation = text[end]
        term, end = factor(text, end + 1, depth)
        if term is None or (operation == "/" and term == 0):
            return None, end
        value = value * term if operation == "*" else value / term
    return value, end


def factor(text: str, start: int, depth: int) -> tuple[Fraction | None, int]:
    """Value of the number, signed factor or parenthesis that starts at `start`, and where it ends."""
    if start >= len(text) or depth > DEEPEST:
        return None, start
    if text[start] in "+-":
        value, end = factor(text, start + 1, depth + 1)
        return value if value is None or text[start] == "+" else -value, end
    if text[start] == "(":
        value, end = total(text, start + 1, depth + 1)
        return (value, end + 1) if text[end : end + 1] == ")" else (None, end)
    match = LITERAL.match(text, start)
    if match is None:
        return None, start
    number = Fraction(match[1].replace(",", ""))
    return (number / 100 if match[2] else number), match.end()


def final_number(text: str) -> Fraction | None:
    """The number behind the last `####`; None without a marker or number."""
    _, marker, tail = text.rpartition("####")
    match = NUMBER.match(tail.translate(SIGNS).lstrip()) if marker else None
    if match is None or len(match[0]) > LONGEST_NUMBER or (match[1] and match[2]):
        return None
    return Fraction(match[1] + match[2] + match[3].replace(",", ""))


def grade(answer: str, gold: str) -> bool:
    """Whether an answer's final number equals the gold answer's.

    Raises: ValueError where the gold answer has none: a missing gold answer is an error, not a match.
    """
    right = final_number(gold)
    if right is None:
        raise ValueError(f"a gold answer without '#### NUMBER': {gold[-80:]!r}")
    return final_number(answer) == right


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Chance that k of `answers` answers, `right` of them right, hold a right one.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n-c, k) / C(n, k).
    Raises: ValueError where k answers are not to be had.
    """
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass@{k} of {answers} answers, {right} right")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)
