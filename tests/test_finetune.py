"""Fine-tuning: what is learned and what is only read, what is dropped, and that a small set is learned."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import checkpoint
import finetune
import situations
from finetune import Conversation
from model import GPT, padded
from problems import Problem
from runtime import UserError
from stories import Story
from tokenizer import Tokenizer

Command = Callable[..., int]
Make = Callable[..., GPT]
FLAGS = ("--base", "checkpoints/finetuned.pt", "--heldout", 6, "--batch", 4, "--problems", 0, "--device", "cpu")


def learned(conversation: Conversation, coder: Tokenizer) -> str:
    """The text of the tokens that count."""
    return coder.decode([token for token, counts in zip(conversation.ids, conversation.counts, strict=True) if counts])


def test_a_story_is_learned_and_its_request_is_not(coder: Tokenizer) -> None:
    made = finetune.story_conversation(Story("A kite <|endoftext|> flew.", ("kite", "river")), coder)
    request = "Write a story that uses the words kite and river."
    assert coder.decode(made.ids) == f"<|user|>{request}<|assistant|>A kite <|endoftext|> flew.<|endoftext|>"
    assert learned(made, coder) == "A kite <|endoftext|> flew.<|endoftext|>"
    assert made.counts == [False] * (len(request) + 2) + [True] * 27
    assert made.ids.count(coder.end) == 1
    assert made.ids[-1] == coder.end
    assert made.ids[: len(request) + 2] == coder.prompt(request)


def test_what_the_calculator_supplies_is_not_learned(coder: Tokenizer) -> None:
    answer = "Half is 48/2 = <<48/2=24>>24.\nBoth: <<48+24=72>>72\n#### 72"
    made = finetune.problem_conversation(Problem("How many?", answer), coder)
    assert coder.decode(made.ids) == f"<|user|>How many?<|assistant|>{answer}<|endoftext|>"
    assert learned(made, coder) == "Half is 48/2 = <<48/2=24.\nBoth: <<48+24=72\n#### 72<|endoftext|>"
    assert made.counts[-1]


def test_generated_problems_read_as_they_are_written(coder: Tokenizer) -> None:
    for problem in situations.generated_problems(20, 1, "train"):
        made = finetune.problem_conversation(problem, coder)
        assert coder.answer_text(made.ids[len(coder.prompt(problem.question)) :]) == problem.answer
        prompt = len(coder.prompt(problem.question))
        assert not any(made.counts[:prompt])
        assert sum(not counts for counts in made.counts[prompt:]) > 0


def test_what_does_not_fit_is_dropped_whole() -> None:
    made = [Conversation(list(range(length)), [True] * length) for length in (5, 8, 9, 3)]
    assert finetune.fitting(made, 8) == [made[0], made[1], made[3]]
    with pytest.raises(UserError, match="none of the 4 conversations fits the context of 2 tokens"):
        finetune.fitting(made, 2)
    with pytest.raises(UserError, match="none of the 0"):
        finetune.fitting([], 8)


def test_a_pass_takes_each_row_once_by_length() -> None:
    lengths = numpy.random.default_rng(1).integers(10, 200, size=101).tolist()
    first = finetune.batches(lengths, 4, 8, 1, 0)
    assert sorted(numpy.concatenate(first).tolist()) == list(range(101))
    assert sorted(map(len, first)) == [1] + [4] * 25
    assert len(first) == -(-101 // 4)
    spreads = [max(lengths[row] for row in rows) - min(lengths[row] for row in rows) for rows in first]
    assert numpy.mean(spreads) < 45  # unsorted, four of them spread over 115 on average
    again, second, other = (finetune.batches(lengths, 4, 8, seed, number) for seed, number in ((1, 0), (1, 1), (2, 0)))
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in again]
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in second]
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in other]


def test_answer_loss_by_hand(tiny: Make) -> None:
    model = tiny(scale=8.0)
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    ids, mask = padded(rows, [[False, False, True, True, True], [False, True, True]], torch.device("cpu"))
    nats = []
    for row, first in zip(rows, (2, 1), strict=True):
        scores = torch.log_softmax(model(torch.tensor([row]))[0], dim=-1)
        nats += [-scores[place - 1, row[place]].item() for place in range(first, len(row))]
    assert len(nats) == 5
    assert finetune.answer_loss(model, ids, mask).item() == pytest.approx(sum(nats) / 5, rel=1e-5)


def logged() -> list[dict[str, float]]:
    (path,) = Path("runs").glob("finetune-*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("workspace")
def test_a_small_set_is_learned(command: Command, coder: Tokenizer) -> None:
    flags = (20, *FLAGS, "--lr", 1e-2, "--warmup", 5, "--evaluate-every", 30, "--dropout", 0, "--precision", "float32")
    assert command("finetune", *flags) == 0
    metrics = logged()
    assert metrics[0]["step"] == 30
    assert metrics[-1]["step"] == 20 * 6  # 24 stories in batches of 4
    assert metrics[-1]["loss/heldout"] < 1.6 < 2.2 < metrics[0]["loss/train"]
    model, facts = checkpoint.load(checkpoint.FINETUNED, torch.device("cpu"))
    assert facts["parent"] == str(Path("checkpoints/finetuned.pt"))
    assert facts["heldout_loss"] == metrics[-1]["loss/heldout"]
    assert all(weight.dtype == torch.bfloat16 for weight in torch.load(checkpoint.FINETUNED)["weights"].values())
    told = finetune.read_story_lines(Path("data/stories-train.jsonl"))
    made = [finetune.story_conversation(story, coder) for story in told]
    loss = finetune.answer_loss(model, *padded([m.ids for m in made], [m.counts for m in made], model.device))
    assert loss.item() < 1.6


@pytest.mark.usefixtures("workspace")
def test_the_rate_rises_and_falls(command: Command) -> None:
    assert command("finetune", 1, *FLAGS, "--evaluate-every", 1, "--warmup", 3, "--lr", 0.6) == 0
    assert [line["lr"] for line in logged()] == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.4, 0.2])


@pytest.mark.usefixtures("workspace")
def test_two_runs_of_one_seed_are_the_same(command: Command) -> None:
    checkpoint.FINETUNED.rename(checkpoint.BASE)
    flags = (1, *FLAGS[2:], "--precision", "float32")

    def weights(seed: int, dropout: float = 0.3) -> torch.Tensor:
        assert command("finetune", *flags, "--seed", seed, "--dropout", dropout) == 0
        return checkpoint.load(checkpoint.FINETUNED, torch.device("cpu"))[0].tokens.weight

    first = weights(1)
    assert first.equal(weights(1))
    assert not first.equal(weights(2))
    assert not first.equal(weights(1, dropout=0))


@pytest.mark.usefixtures("workspace")
def test_dropped_stories_are_counted(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("data/stories-train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"words": ["kite"], "story": "A kite. " * 40}) + "\n")
    assert command("finetune", 0.1, *FLAGS) == 0
    assert "31 stories and 0 problems, 1 dropped as longer than the context" in capsys.readouterr().out


@pytest.mark.usefixtures("workspace")
def test_problems_are_mixed_in(command: Command, tiny: Make, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(checkpoint.BASE, tiny(context=1024), {})
    assert command("finetune", 0.2, "--heldout", 6, "--batch", 4, "--problems", 12) == 0
    assert "30 stories and 12 problems" in capsys.readouterr().out


def spoil(kind: str, tiny: Make) -> None:
    path = Path("data/stories-train.jsonl")
    contents = {
        "empty": b"",
        "encoding": b"\xff\n",
        "json": path.read_bytes() + b"{\n",
        "fields": path.read_bytes() + b'{"story": "A kite."}\n',
        "words": path.read_bytes() + b'{"words": [], "story": "A kite."}\n',
        "story": path.read_bytes() + b'{"words": ["kite"], "story": 3}\n',
        "list": path.read_bytes() + b"[1]\n",
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "missing":
        path.unlink()
    elif kind == "long":
        checkpoint.save(checkpoint.FINETUNED, tiny(context=32), {})
    elif kind == "few":
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    else:
        checkpoint.FINETUNED.unlink()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "stories-train.jsonl is missing: python prepare.py makes it"),
        ("empty", "stories-train.jsonl is empty"),
        ("encoding", "stories-train.jsonl is not UTF-8"),
        ("json", "stories-train.jsonl, line 31 is no story"),
        ("fields", "stories-train.jsonl, line 31 is no story"),
        ("words", "stories-train.jsonl, line 31 is no story"),
        ("story", "stories-train.jsonl, line 31 is no story"),
        ("list", "stories-train.jsonl, line 31 is no story"),
        ("long", "none of the 30 conversations fits the context of 32 tokens"),
        ("few", "6 conversations, 6 of them held out"),
        ("base", "finetuned.pt is missing"),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_bad_input_is_one_line(
    command: Command, tiny: Make, capsys: pytest.CaptureFixture[str], kind: str, said: str
) -> None:
    spoil(kind, tiny)
    assert command("finetune", 1, *FLAGS) == 1
    output = capsys.readouterr().err
    assert said in output
    assert len(output.splitlines()) == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "args",
    [
        (0,),
        ("nan",),
        ("many",),
        ("--problems", -1),
        ("--batch", 0),
        ("--warmup", 0),
        ("--heldout", 0),
        ("--evaluate-every", 0),
        ("--sort-batches", 0),
        ("--lr", "nan"),
        ("--dropout", 2),
        ("--seed", -1),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_wrong_flags_exit_with_2(
    command: Command, capsys: pytest.CaptureFixture[str], args: tuple[object, ...]
) -> None:
    assert command("finetune", *args) == 2
    output = capsys.readouterr().err
    assert str(args[-1]) in output
    assert "Traceback" not in output


@pytest.mark.usefixtures("workspace")
def test_a_separator_inside_a_story_ends_no_line() -> None:
    row = {"words": ["kite"], "story": "A kite.\u2028It\x85flew."}
    path = Path("data/stories-train.jsonl")
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert finetune.read_story_lines(path) == [Story("A kite.\u2028It\x85flew.", ("kite",))]
