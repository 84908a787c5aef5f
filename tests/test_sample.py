"""The decoding loop against plain loops without a cache, and the command that writes a story or solves a problem."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

import checkpoint
import problems
import situations
from model import GPT, Cache, ModelConfig
from runtime import UserError
from sample import (
    Completion,
    calculator_forcing,
    fitting_instructions,
    generate,
    likeliest_next,
    sampled_tokens,
    solve,
)
from tokenizer import Tokenizer, story_request

Make = Callable[..., GPT]
Command = Callable[..., int]
END = 256
OPINIONS = 12.0  # scale of an untrained model's weights at which its tokens depend on all that it read


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_prompt(length: int) -> list[int]:
    return torch.randint(256, (length,), generator=seeded(length)).tolist()


def plain_answer(
    model: GPT,
    prompt: list[int],
    limit: int,
    choose: Callable[[Tensor, int], int],
    supplied: Callable[[list[int]], list[int]] | None = None,
) -> Completion:
    """The definition of an answer: the whole text is read anew for each token, one row at a time, without a cache.

    choose: the token for logits (V,) at a position. supplied: tokens the program writes behind a sampled one.
    """
    ids, sampled, queue = list(prompt), [], list[int]()
    while True:
        token = queue.pop(0) if (forced := bool(queue)) else choose(model(torch.tensor([ids]))[0, -1], len(ids))
        ids.append(token)
        sampled.append(not forced)
        answer = ids[len(prompt) :]
        if token == END and not forced:
            return Completion(prompt, answer, sampled, "end")
        if len(answer) == limit:
            return Completion(prompt, answer, sampled, "limit")
        if len(ids) == model.config.context:
            return Completion(prompt, answer, sampled, "context")
        if supplied is not None and not forced:
            queue += supplied(answer)


def greedy(logits: Tensor, _position: int) -> int:
    return int(logits.argmax())


def written_greedily(model: GPT, prompts: list[list[int]], limit: int) -> list[Completion]:
    return generate(model, prompts, end=END, limit=limit, generator=seeded(), temperature=0.0)


class Scripted:
    """Stands in for a GPT: says `says(position, last token)` as the next token, as good as certainly."""

    def __init__(self, context: int, says: Callable[[int, int], int]) -> None:
        self.config = ModelConfig(vocabulary=259, context=context, layers=1, heads=1, channels=1)
        self.device = torch.device("cpu")
        self.says = says

    def hidden(self, ids: Tensor, cache: Cache) -> Tensor:
        start = cache.length
        cache.length += ids.shape[1]
        rows = [[self.says(start + at + 1, token) for at, token in enumerate(row)] for row in ids.tolist()]
        return 100 * torch.nn.functional.one_hot(torch.tensor(rows), 259).float()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


def scripted(context: int, script: Sequence[int] | Callable[[int, int], int]) -> GPT:
    """A model that says `script[p]` at position p of any row, or what the function says."""
    if callable(script):
        return cast(GPT, Scripted(context, script))
    return cast(GPT, Scripted(context, lambda position, _: script[position] if position < len(script) else 0))


@pytest.mark.parametrize("length", [1, 2, 100, 255])
def test_cached_greedy_is_uncached_greedy(tiny: Make, length: int) -> None:
    model, prompt = tiny(context=256, scale=OPINIONS), random_prompt(length)
    written = written_greedily(model, [prompt], 40)
    assert written == [plain_answer(model, prompt, 40, greedy)]
    assert length == 255 or len(set(written[0].ids)) > 3  # else a loop of one token would agree with anything
    assert written[0].stop == ("context" if length == 255 else "limit")


def test_rows_of_different_length_decode_as_each_alone(tiny: Make) -> None:
    model = tiny(context=256, scale=OPINIONS)
    prompts = [random_prompt(length) for length in (7, 1, 30, 2, 255, 100, 7, 64, 3, 120, 9, 15, 200, 1, 31, 63)]
    assert written_greedily(model, prompts, 25) == [plain_answer(model, prompt, 25, greedy) for prompt in prompts]


def test_forced_tokens_are_read_like_sampled_ones(tiny: Make) -> None:
    model = tiny(context=128, scale=OPINIONS)
    prompts = [random_prompt(length) for length in (5, 1, 20, 11, 125)]

    def supplied(answer: list[int]) -> list[int]:
        return [len(answer), 7, END] if answer[-1] % 4 == 0 else []

    written = generate(
        model,
        prompts,
        end=END,
        limit=30,
        generator=seeded(),
        temperature=0.0,
        forcing=supplied,
        forcing_after=frozenset(range(0, 256, 4)),
    )
    assert written == [plain_answer(model, prompt, 30, greedy, supplied) for prompt in prompts]
    assert sum(not sampled for row in written for sampled in row.sampled) >= 6
    assert any(END in row.ids and row.stop == "limit" for row in written)  # a forced end of text stops nothing


def test_sampling_is_inverse_cdf_at_the_rows_own_numbers(tiny: Make) -> None:
    model, prompts, limit = tiny(scale=4.0), [random_prompt(length) for length in (3, 9, 1, 5)], 20
    written = generate(model, prompts, end=END, limit=limit, generator=seeded(), temperature=0.7)
    uniform = torch.rand(len(prompts), 9 + limit, generator=seeded())

    def draw(row: int) -> Callable[[Tensor, int], int]:
        def choose(logits: Tensor, position: int) -> int:
            weights = (logits.double() / 0.7).softmax(-1).tolist()
            left = uniform[row, position].item()
            for token, weight in enumerate(weights):
                left -= weight
                if left < 0:
                    return token
            raise AssertionError("no token left")

        return choose

    assert written == [plain_answer(model, prompt, limit, draw(row)) for row, prompt in enumerate(prompts)]


def test_seeds_make_stories(tiny: Make) -> None:
    model, prompts = tiny(), [random_prompt(4)] * 3

    def stories(generator: torch.Generator) -> list[Completion]:
        return generate(model, prompts, end=END, limit=20, generator=generator)

    first = stories(seeded(1))
    assert stories(seeded(1)) == first
    assert stories(seeded(2)) != first
    assert len({tuple(row.ids) for row in first}) == 3  # rows of one prompt draw apart
    source = seeded(1)
    assert stories(source) == first
    assert stories(source) != first  # a generator goes on from step to step


def test_a_finished_row_changes_no_other(tiny: Make) -> None:
    model = tiny(scale=3.0)
    prompts = [random_prompt(length) for length in (4, 9, 6, 2, 7)]
    together = generate(model, prompts, end=END, limit=[30, 30, 30, 30, 30], generator=seeded())
    some_short = generate(model, prompts, end=END, limit=[30, 30, 1, 30, 8], generator=seeded())
    assert [some_short[row] for row in (0, 1, 3)] == [together[row] for row in (0, 1, 3)]
    assert some_short[2].ids == together[2].ids[:1]
    assert some_short[4].ids == together[4].ids[:8]


def test_a_row_that_ends_leaves_the_batch() -> None:
    reads: list[int] = []

    def says(_position: int, token: int) -> int:
        reads.append(token)
        return END if token % 10 == 3 else token + 1

    first, second = generate(scripted(64, says), [[1], [20]], end=END, limit=9, generator=seeded())
    assert first == Completion([1], [2, 3, END], [True] * 3, "end")
    assert second == Completion([20], [21, 22, 23, END], [True] * 4, "end")
    assert END not in reads


def test_an_untrained_model_writes_text(tiny: Make, coder: Tokenizer) -> None:
    rows = generate(tiny(), [coder.prompt("a")] * 1000, end=END, limit=20, generator=seeded())
    assert len(rows) == 1000
    for row in rows:
        assert 1 <= len(row.ids) <= 20
        assert len(row.sampled) == len(row.ids)
        assert END not in row.ids[:-1]
        assert row.ended == (row.ids[-1] == END)
        assert isinstance(coder.decode(row.ids), str)
        assert coder.answer_text(row.ids) == coder.decode(row.ids[:-1] if row.ended else row.ids)
    assert any(row.ended for row in rows)
    assert any(row.stop == "limit" for row in rows)


@pytest.mark.parametrize(
    ("context", "limit", "end_at", "stop", "length"),
    [
        (64, 5, 3, "end", 3),
        (64, 5, 5, "end", 5),  # an end of text that falls on the last allowed token is an end
        (64, 5, 6, "limit", 5),
        (7, 9, 6, "context", 5),
        (7, 9, 5, "end", 5),  # and so on the last place of the context
        (7, 5, 6, "limit", 5),  # both at once: the row has what it was allowed
        (64, 1, 1, "end", 1),
        (64, 1, 2, "limit", 1),
        (3, 9, 1, "end", 1),
        (3, 9, 2, "context", 1),
    ],
)
def test_stop_reasons(context: int, limit: int, end_at: int, stop: str, length: int) -> None:
    prompt = [11, 12]
    script = [11, 12, *[50] * (end_at - 1), END, *[60] * 20]
    row = generate(scripted(context, script), [prompt], end=END, limit=limit, generator=seeded())[0]
    assert (row.stop, row.ended, len(row.ids)) == (stop, stop == "end", length)
    assert row.ids == script[2 : 2 + length]
    assert row.sampled == [True] * length


def test_an_end_of_text_in_a_prompt_stops_nothing() -> None:
    rows = generate(scripted(64, [0, 7, 7, 7, END]), [[1], [1, END, END]], end=END, limit=9, generator=seeded())
    assert rows == [
        Completion([1], [7, 7, 7, END], [True] * 4, "end"),
        Completion([1, END, END], [7, END], [True] * 2, "end"),
    ]


def test_a_prompt_forces_no_calculator() -> None:
    asked: list[list[int]] = []

    def forcing(answer: list[int]) -> list[int]:
        asked.append(answer)
        return [9]

    model = scripted(64, [0, 7, 7, 5, 7, END])
    rows = generate(
        model, [[1], [1, 5, 5]], end=END, limit=9, generator=seeded(), forcing=forcing, forcing_after=frozenset([5])
    )
    assert asked == [[7, 7, 5], [5]]
    assert [row.ids for row in rows] == [[7, 7, 5, 9, END], [5, 9, END]]
    assert [row.sampled for row in rows] == [[True, True, True, False, True], [True, False, True]]


def test_what_is_forced_stays_within_the_limit() -> None:
    rows = generate(
        scripted(8, [0, 7, 5, 7, 7, END]),
        [[1], [1]],
        end=END,
        limit=[3, 20],
        generator=seeded(),
        forcing=lambda _: [31, 32, 33, 34, 35, 36, 37, 38],
        forcing_after=frozenset([5]),
    )
    assert rows == [
        Completion([1], [7, 5, 31], [True, True, False], "limit"),
        Completion([1], [7, 5, 31, 32, 33, 34, 35], [True, True, *[False] * 5], "context"),
    ]


def test_the_calculator_writes_its_result(coder: Tokenizer) -> None:
    prompt = coder.prompt("How many?")
    text = "It is <<48/2=99>>24.\n#### 24"
    script = [*prompt, *coder.encode(text), coder.end]
    row = solve(scripted(128, script), coder, ["How many?"], limit=60, generator=seeded())[0]
    assert coder.answer_text(row.ids) == "It is <<48/2=24>>24.\n#### 24"
    assert "".join(coder.decode([token]) for token, own in zip(row.ids, row.sampled, strict=True) if not own) == "24>>"
    assert row.ended
    assert problems.grade(coder.answer_text(row.ids), "#### 24")


def test_a_call_the_calculator_refuses_goes_on_as_text(coder: Tokenizer) -> None:
    prompt = coder.prompt("How many?")
    script = [*prompt, *coder.encode("1=1, <<1/0=0>>, #### 7"), coder.end]
    row = solve(scripted(128, script), coder, ["How many?"], limit=60, generator=seeded())[0]
    assert coder.answer_text(row.ids) == "1=1, <<1/0=0>>, #### 7"
    assert all(row.sampled)


def test_the_calculator_is_asked_after_every_equals_sign(coder: Tokenizer) -> None:
    _, after = calculator_forcing(coder)
    assert after == {ord("=")}


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = torch.tensor([1.0, -torch.inf, 0.0, 2.0, -1.0, -torch.inf, 0.5, -torch.inf])
    number = 20_000
    uniform = torch.rand(number, generator=seeded())
    drawn = sampled_tokens(logits.expand(number, -1), uniform, temperature, 0).bincount(minlength=8)
    expected = number * (logits / temperature).softmax(-1)
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    chi_square = ((drawn - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi_square < 18.5  # exceeded by chance once in a thousand at 4 degrees of freedom


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    generator = seeded()
    logits = torch.randn(200, 10_000, generator=generator) * 3
    logits[:, :50] = -torch.inf
    logits[:, -50:] = -torch.inf
    lowest, highest = torch.zeros(200), torch.full((200,), 1 - 2**-24)
    assert sampled_tokens(logits, lowest, 1.0, 0).tolist() == [50] * 200
    last = sampled_tokens(logits, highest, 1.0, 0)
    assert last.max() < 9950
    assert last.min() > 9000
    only = torch.full((2, 7), -torch.inf)
    only[0, 6], only[1, 0] = 3.0, 3.0
    for uniform in (lowest[:2], highest[:2]):
        assert sampled_tokens(only, uniform, 1.0, 0).tolist() == [6, 0]


def test_temperature_zero_is_argmax() -> None:
    logits = torch.randn(50, 300, generator=seeded())
    uniform = torch.rand(50, generator=seeded())
    assert sampled_tokens(logits, uniform, 0.0, 0).equal(logits.argmax(-1))
    assert sampled_tokens(logits, uniform, 1e-4, 0).equal(logits.argmax(-1))
    assert not sampled_tokens(logits, uniform, 1.0, 0).equal(logits.argmax(-1))


def test_top_k() -> None:
    logits = torch.randn(500, 300, generator=seeded())
    uniform = torch.rand(500, generator=seeded())
    free = sampled_tokens(logits, uniform, 1.0, 0)
    assert sampled_tokens(logits, uniform, 1.0, 300).equal(free)
    assert sampled_tokens(logits, uniform, 1.0, 1000).equal(free)
    assert sampled_tokens(logits, uniform, 1.0, 1).equal(logits.argmax(-1))
    three = sampled_tokens(logits, uniform, 1.0, 3)
    best = logits.topk(3).indices
    assert (best == three[:, None]).any(1).all()
    assert [int((best[:, rank] == three).sum()) > 50 for rank in range(3)] == [True] * 3


def test_bfloat16_decodes(tiny: Make) -> None:
    model, prompts = tiny(scale=OPINIONS), [random_prompt(length) for length in (3, 9, 1)]
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        rows = written_greedily(model, prompts, 20)
        first = [int(model(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]
    assert [row.ids[0] for row in rows] == first
    assert [len(row.ids) for row in rows] == [20] * 3


def test_a_story_by_command(workspace: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    def told(*args: object) -> str:
        capsys.readouterr()
        assert command("sample", "kite", "moon", "--limit", 20, *args) == 0
        return capsys.readouterr().out

    assert told().strip()
    assert told("--seed", 3) == told("--seed", 3) != told("--seed", 4)
    assert told("--temperature", 0) == told("--temperature", 0, "--seed", 9) == told("--top-k", 1)
    assert told("--top-k", 100_000) == told()


def test_a_problem_by_command(
    workspace: Path, command: Command, tiny: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(checkpoint.FINETUNED, tiny(context=1024), {})
    assert command("sample", "--problem", 2, "--limit", 5, "--answers", 3) == 0
    shown = capsys.readouterr().out
    assert shown.count("sample ") == 3
    assert shown.count("greedy: wrong") == 1
    assert situations.generated_problems(2, 1, "test")[1].question in shown
    line = json.dumps({"question": "How many?", "answer": "1+1=<<1+1=2>>2\n#### 2"})
    (workspace / "own.jsonl").write_text(f"{line}\n", encoding="utf-8")
    assert command("sample", "--problem", 1, "--problems", "own.jsonl", "--limit", 5) == 0
    assert "How many?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (("kite!",), 2, "word 'kite!'"),
        (("🦊",), 2, "word '🦊'"),
        (("kite's-tail",), 2, 'word "kite\'s-tail"'),
        (("'tis",), 2, 'word "\'tis"'),
        (("two words",), 2, "word 'two words'"),
        (("",), 2, "word ''"),
        (("kite", "--limit", 0), 2, "--limit 0"),
        (("kite", "--answers", 0), 2, "--answers 0"),
        (("kite", "--top-k", -1), 2, "--top-k -1"),
        (("kite", "--temperature", -1), 2, "--temperature -1"),
        (("kite", "--temperature", "nan"), 2, "--temperature nan"),
        (("kite", "--temperature", "inf"), 2, "--temperature inf"),
        (("--problem", 0), 2, "--problem 0"),
        (("kite", "--device", "tpu"), 2, "tpu"),
        (("kite", "--model", "checkpoints/none.pt"), 1, "checkpoints/none.pt is missing"),
        (("kite",) * 40, 1, "40 words do not fit"),
        (("--problem", 1, "--problems", "none.jsonl"), 1, "none.jsonl"),
        (("--problem", 9, "--problems", "long.jsonl"), 1, "--problem 9"),
        (("--problem", 1, "--problems", "long.jsonl"), 1, "does not fit"),
    ],
)
def test_bad_input_is_said(
    workspace: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    args: tuple[object, ...],
    status: int,
    said: str,
) -> None:
    line = json.dumps({"question": "How many? " * 100, "answer": "#### 2"})
    (workspace / "long.jsonl").write_text(f"{line}\n", encoding="utf-8")
    assert command("sample", *args) == status
    output = capsys.readouterr()
    assert said in output.err + output.out
    assert "Traceback" not in output.err
    assert status == 2 or len(output.err.splitlines()) == 1


def test_instructions_that_leave_no_room_are_dropped(
    tmp_path: Path, coder: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instructions.jsonl"
    path.write_text('{"words": ["kite"]}\n{"words": ["kite", "lake"]}\n', encoding="utf-8")
    length = len(coder.prompt(story_request(("kite",))))
    kept = fitting_instructions(path, coder, length)
    assert [(one.words, len(one.prompt)) for one in kept] == [(("kite",), length)]
    assert "1 of 2 instructions" in capsys.readouterr().out
    with pytest.raises(UserError, match="--limit"):
        fitting_instructions(path, coder, length - 1)


def test_likeliest_next(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    model = tiny(scale=5.0)
    found = likeliest_next(model, coder, "ab", 3)
    with torch.no_grad():
        chances = model(torch.tensor([[coder.end, 97, 98]]))[0, -1].softmax(-1)
    assert [chance for _, chance in found] == pytest.approx(chances.sort(descending=True).values[:3].tolist())
