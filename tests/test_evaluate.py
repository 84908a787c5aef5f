"""Evaluation: each measure by hand or against a plain loop, and the comparison as a whole."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

import checkpoint
import evaluate
import pictures
import report
import runtime
import sample
import stories
from model import GPT, mean_loss
from pictures import Estimate
from problems import Problem
from sample import Completion
from tokenizer import Tokenizer

STORIES = [[256, *range(10, 13 + 3 * number), 256] for number in range(10)]
COUNTS = [[False] + [True] * (len(ids) - 1) for ids in STORIES]


def test_loss_is_the_same_at_every_batch_size_and_that_of_a_plain_loop(tiny: Callable[..., GPT]) -> None:
    model = tiny(scale=5.0)
    found = [mean_loss(model, STORIES, COUNTS, batch) for batch in (1, 3, 10)]
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] == pytest.approx(found[0], abs=1e-6)
    total, tokens = 0.0, 0
    for ids in STORIES:
        with torch.no_grad():
            log_probs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        total -= sum(log_probs[t, ids[t + 1]].item() for t in range(len(ids) - 1))
        tokens += len(ids) - 1
    assert found[0] == pytest.approx(total / tokens, abs=1e-5)


def test_bootstrap_has_the_width_of_the_normal_formula() -> None:
    values = numpy.random.default_rng(1).random(400).tolist()
    found = evaluate.bootstrap(values, 4_000, 1)
    half = 1.96 * numpy.std(values) / math.sqrt(400)
    assert found.mean == pytest.approx(numpy.mean(values))
    assert found.high - found.mean == pytest.approx(half, rel=0.15)
    assert found.mean - found.low == pytest.approx(half, rel=0.15)
    assert found.low < found.mean < found.high
    assert evaluate.bootstrap(values, 4_000, 1) == found
    few = evaluate.bootstrap(values[:100], 4_000, 1)
    assert few.high - few.low == pytest.approx(2 * (found.high - found.low), rel=0.2)  # as 1 / sqrt(n)
    assert evaluate.bootstrap([0.5] * 20, 100, 1) == Estimate(0.5, 0.5, 0.5)


def test_bootstrap_of_totals_weighs_each_by_its_count() -> None:
    """Three stories of 1, 1 and 8 tokens: the mean is per token, not per story."""
    totals, counts = [2.0, 0.0, 4.0], [1, 1, 8]
    found = evaluate.bootstrap(totals, 20_000, 1, counts)
    assert found.mean == pytest.approx(6 / 10)
    # The lowest of the 27 resamples is the second story three times, the highest the first: 1 / 27 each, over 2.5 %.
    assert (found.low, found.high) == (0.0, 2.0)


def test_the_loss_a_model_adds_is_weighted_by_tokens_and_paired_by_story(
    tiny: Callable[..., GPT], coder: Tokenizer
) -> None:
    plain = [[256, 65, 256], [256, *range(40, 60), 256], [256, *range(90, 100), 256]]
    on = evaluate.Material([("kite",)], [coder.prompt("kite")], plain, [], {})
    config = evaluate.Config(limit=4, resamples=2_000, problems=0, precision="float32")
    first = evaluate.measured("a", tiny(scale=5.0), {}, tiny(scale=5.0), None, on, coder, config)
    other = evaluate.measured("b", tiny(scale=5.0, seed=4), {}, tiny(scale=5.0), first, on, coder, config)
    counts = [[False] + [True] * (len(ids) - 1) for ids in plain]
    expected = mean_loss(tiny(scale=5.0, seed=4), plain, counts, 1) - mean_loss(tiny(scale=5.0), plain, counts, 1)
    assert other.added.mean == pytest.approx(expected, abs=1e-5)
    each = [
        (mine - theirs) / (len(ids) - 1) for mine, theirs, ids in zip(other.losses, first.losses, plain, strict=True)
    ]
    assert min(each) == pytest.approx(other.added.low)  # of 27 resamples, one is a story three times: over 2.5 %
    assert max(each) == pytest.approx(other.added.high)


def test_cost_of_a_point_by_hand() -> None:
    gained, added = Estimate(0.2, 0.1, 0.3), Estimate(0.5, 0.4, 0.6)
    assert evaluate.cost_of_a_point(gained, added) == pytest.approx(0.5 / 20)
    assert evaluate.cost_of_a_point(Estimate(0.2, 0.0, 0.4), added) is None
    assert evaluate.cost_of_a_point(Estimate(-0.2, -0.3, -0.1), added) is None


def test_time_left() -> None:
    assert evaluate.time_left(20.0, 4).startswith("4 more, about 80 seconds")
    assert evaluate.time_left(20.0, 29).startswith("29 more, about 10 minutes")


def test_story_log_probs_leave_out_the_prompt_and_forced_tokens(tiny: Callable[..., GPT]) -> None:
    model = tiny(scale=5.0)
    told = [Completion([5, 6], [7, 8, 9], [True, False, True], "limit"), Completion([5], [7], [True], "limit")]
    with torch.no_grad():
        log_probs = model(torch.tensor([[5, 6, 7, 8, 9]]))[0].log_softmax(-1)
        alone = model(torch.tensor([[5, 7]]))[0].log_softmax(-1)
    expected = [(log_probs[1, 7] + log_probs[3, 9]).item(), alone[0, 7].item()]
    for batch in (1, 2):
        assert evaluate.story_log_probs(model, told, batch) == pytest.approx(expected, abs=1e-4)


FOLDER = Path("runs/evaluate")
FAST = ("--limit", "8", "--resamples", "50", "--problems", "2", "--answers", "3", "--device", "cpu")


@pytest.fixture
def big_workspace(workspace: Path, tiny: Callable[..., GPT]) -> Path:
    """The workspace with a context that word problems fit, in bytes."""
    checkpoint.save(checkpoint.FINETUNED, tiny(context=700), {"step": 0})
    return workspace


def test_a_model_differs_from_itself_in_nothing(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    words = [("kite", "lake"), ("bird", "tree"), ("fish", "moon"), ("boat", "frog")] * 3
    on = evaluate.Material(words, [coder.prompt(" ".join(pair)) for pair in words], [[256, 65, 256]], [], {})
    config = evaluate.Config(limit=8, batch=5, resamples=200, problems=0, precision="float32")
    baseline, other = tiny(scale=5.0), tiny(scale=5.0, seed=4)
    first = evaluate.measured("a", baseline, {}, baseline, None, on, coder, config)
    again = evaluate.measured("b", tiny(scale=5.0), {}, baseline, first, on, coder, config)
    assert first.kl == again.kl == 0  # exactly
    assert again.gained == again.added == Estimate(0, 0, 0)
    assert again.cost is None
    assert (again.scores, again.length, again.loss) == (first.scores, first.length, first.loss)
    with torch.no_grad():
        log_probs = baseline(torch.tensor([[256, 65]]))[0].log_softmax(-1)
    by_hand = -(log_probs[0, 65] + log_probs[1, 256]).item() / 2  # the story's token and the end of text
    assert first.loss == pytest.approx(by_hand, abs=1e-5)
    told = evaluate.stories_of(other, coder, on.prompts, config)
    own, before = (evaluate.story_log_probs(model, told, 1) for model in (other, baseline))
    found = evaluate.measured("c", other, {}, baseline, replace(first, scores=[1.0] * len(words)), on, coder, config)
    assert found.kl == pytest.approx(numpy.mean(numpy.subtract(own, before)), abs=1e-4)
    assert found.kl > 1
    assert found.gained.mean == pytest.approx(found.words_used.mean - 1)
    assert found.added.mean == pytest.approx(found.loss - first.loss)
    assert found.added.mean != 0
    texts = [coder.answer_text(story.ids) for story in told]
    assert found.stories == texts[: config.shown]
    assert found.word_repeats == stories.word_repeats(zip(texts, words, strict=True))
    assert found.length == pytest.approx(numpy.mean([len(story.ids) for story in told]))
    assert found.ended == numpy.mean([story.stop == "end" for story in told])


@pytest.mark.usefixtures("big_workspace")
def test_command_compares_what_it_finds(
    command: Callable[..., int], tiny: Callable[..., GPT], capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = checkpoint.load(checkpoint.FINETUNED, torch.device("cpu"))
    facts = {"step": 3, "words_used": 0.2, "kl": 1.5, "kl_weight": 0.05}
    checkpoint.save(Path("checkpoints/ppo-0.05/final.pt"), model, facts)
    checkpoint.save(Path("checkpoints/ppo-0.05/rollout-0003.pt"), model, facts)
    checkpoint.save(checkpoint.DPO, tiny(context=700, seed=5, scale=20.0), {"step": 1})
    Path("checkpoints/ppo-0.05/rollout-0006.pt").write_bytes(b"cut short")
    assert command("evaluate", *FAST) == 0
    content = json.loads((FOLDER / "results.json").read_text("utf-8"))
    rows = {one["name"]: one for one in content["models"]}
    assert content["command"] == ["evaluate.py", *FAST]
    assert (content["config"]["seed"], content["machine"]["device"]) == (1, "cpu")
    assert list(rows) == ["finetuned", "dpo", "ppo-0.05"]
    same, other = rows["ppo-0.05"], rows["dpo"]
    assert same["kl"] == 0
    assert same["gained"] == {"mean": 0, "low": 0, "high": 0}
    assert same["loss"] == rows["finetuned"]["loss"] != other["loss"]
    assert other["kl"] > 0
    assert len(same["scores"]) == 10
    assert list(same["pass_at"]) == ["1", "2", "3"]
    assert 0 <= same["pass_at"]["1"]["mean"] <= same["pass_at"]["3"]["mean"] <= 1
    assert same["facts"]["words_used"] == 0.2
    assert {path.stem for path in FOLDER.glob("*.png")} == {*report.PICTURES} - {"health"}  # nothing has been logged
    for name in ("comparison", "frontier", "cost", "solving"):
        assert (FOLDER / f"{name}.png").stat().st_size > 1_000
        assert (FOLDER / f"{name}.svg").read_text("utf-8").startswith("<?xml")
    page = (FOLDER / "report.html").read_text("utf-8")
    assert page.count("<img ") == 4
    lines = (FOLDER / "table.md").read_text("utf-8").splitlines()
    assert lines[:2] == ["| model | finetuned | dpo | ppo-0.05 |", "| --- | --- | --- | --- |"]
    assert f"| loss | {same['loss']:.3f} | {other['loss']:.3f} | {same['loss']:.3f} |" in lines
    assert f"{other['words_used']['mean']:.1%}"[:-1] in page
    out = capsys.readouterr().out
    assert "2 more, about" in out
    assert "words used" in out
    assert "pass@3" in out
    assert "left out of the picture: checkpoints/ppo-0.05/rollout-0006.pt" in out.replace("\\", "/")
    assert "Once upon a time" in out


@pytest.mark.usefixtures("workspace")
def test_without_problems_and_with_named_checkpoints(
    command: Callable[..., int], tiny: Callable[..., GPT], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(Path("mine.pt"), tiny(context=128, seed=3), {"step": 0})
    assert command("evaluate", "mine.pt", *FAST, "--problems", "0") == 0
    rows = json.loads((FOLDER / "results.json").read_text("utf-8"))["models"]
    assert [one["name"] for one in rows] == ["finetuned", "mine.pt"]
    assert rows[0]["accuracy"] is None
    capsys.readouterr()
    assert command("evaluate", "mine.pt", "missing.pt", *FAST, "--problems", "0") == 1
    said = capsys.readouterr()
    assert "missing.pt is missing" in said.err
    assert "% of the words used" not in said.out  # said before anything is measured


def test_every_model_gets_the_same_random_numbers(
    tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []

    def generate(_model: GPT, prompts: list[list[int]], *, generator: torch.Generator, **_: object) -> list[Completion]:
        states.append(generator.get_state())
        return [Completion(prompt, [coder.end], [True], "end") for prompt in prompts]

    monkeypatch.setattr(evaluate, "generate", generate)
    for model, seed in ((tiny(), 1), (tiny(seed=2), 1), (tiny(), 2)):
        evaluate.stories_of(model, coder, [[1]], evaluate.Config(seed=seed))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_problems_are_graded_by_row(
    tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two problems of which the first is always answered right, whatever the batch: 1, 0, and not 0.5, 0.5."""
    asked = [Problem("one", "#### 1"), Problem("two", "#### 2")]

    temperatures: list[float] = []

    def solve(
        _model: GPT, coder: Tokenizer, questions: list[str], *, temperature: float, **_: object
    ) -> list[Completion]:
        temperatures.extend([temperature] * len(questions))
        ids = [*coder.encode("#### 1"), coder.end]
        return [Completion([1], ids, [True] * len(ids), "end") for _ in questions]

    monkeypatch.setattr(sample, "solve", solve)
    for batch in (1, 3, 16):
        config = evaluate.Config(batch=batch, answers=4, resamples=500)
        temperatures.clear()
        accuracy, pass_at = evaluate.problem_estimates(tiny(), coder, asked, config)
        assert temperatures == [0.0] * 2 + [1.0] * 8
        assert accuracy == Estimate(0.5, 0.0, 1.0)
        assert pass_at == {k: Estimate(0.5, 0.0, 1.0) for k in (1, 2, 3, 4)}


def test_found_names_each_checkpoint_once(workspace: Path) -> None:
    for name in ("ppo-0.5/final.pt", "ppo-0.05/final.pt", "dpo.pt", "base.pt"):
        (workspace / "checkpoints" / name).parent.mkdir(exist_ok=True)
        (workspace / "checkpoints" / name).touch()
    paths = evaluate.found(evaluate.Config())
    assert [evaluate.name_of(path) for path in paths] == ["finetuned", "dpo", "ppo-0.05", "ppo-0.5"]
    named = (str(workspace / checkpoint.FINETUNED), str(checkpoint.BASE), str(checkpoint.BASE))
    assert [evaluate.name_of(path) for path in evaluate.found(evaluate.Config(named))][1:] == ["base"]
    named = ("ppo-0.5", "finetuned", str(Path("checkpoints/dpo.pt")))
    assert [evaluate.name_of(path) for path in evaluate.found(evaluate.Config(named))] == [
        "finetuned",
        "ppo-0.5",
        "dpo",
    ]
    with pytest.raises(
        runtime.UserError, match=r"^ppo-5 is no model here: there are finetuned, dpo, ppo-0\.05, ppo-0\.5"
    ):
        evaluate.found(evaluate.Config(("ppo-5",)))


@pytest.mark.usefixtures("workspace")
def test_compare_prints_stories_and_measures_nothing(
    command: Callable[..., int],
    tiny: Callable[..., GPT],
    coder: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def generate(model: GPT, prompts: list[list[int]], **_: object) -> list[Completion]:
        told = ["A kite \x1b[31m, kites!", "", "x" * 200][: len(prompts)]
        ids = [coder.encode(text if model.config.layers == 2 else "No.") for text in told]
        return [Completion(prompt, row, [True] * len(row), "limit") for prompt, row in zip(prompts, ids, strict=True)]

    monkeypatch.setattr(evaluate, "generate", generate)
    monkeypatch.setenv("COLUMNS", "63")
    lines = [json.dumps({"words": words}) + "\n" for words in (["kite", "<b>"], ["moon"], ["boat"], ["frog"])]
    Path("data/instructions-heldout.jsonl").write_text("".join(lines), encoding="utf-8")
    Path("data/stories-heldout.txt").unlink()  # as nothing is measured
    checkpoint.save(Path("checkpoints/ppo-0.05/final.pt"), tiny(context=128), {})
    checkpoint.save(checkpoint.DPO, tiny(context=100, layers=1), {})
    assert command("evaluate", "--compare", "ppo-0.05", "dpo", "ppo-0.05", "--device", "cpu") == 0
    shown = capsys.readouterr().out.splitlines()
    wide = "x" * 30
    assert shown[:4] == ["== kite, <b>", "", f"{'ppo-0.05':33}dpo", ""]
    assert shown[4] == "A *kite* \N{REPLACEMENT CHARACTER}[31m, *kites*!".ljust(33) + "No."
    assert shown[6] == "== moon"
    assert shown[10] == f"{'(no text)':33}No."
    assert shown[16:18] == [f"{wide}   No.", wide]
    assert not any("frog" in line for line in shown)
    assert not Path("runs").exists()
    assert command("evaluate", "--compare", "ppo-0.06") == 1
    assert (
        "error: ppo-0.06 is no model here: there are finetuned, dpo, ppo-0.05, or give a file"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("workspace")
def test_one_model_alone_and_broken_runs_are_compared(
    command: Callable[..., int], tiny: Callable[..., GPT], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the baseline; words with markup; an empty runs folder, then a run that was cut and one that is no text."""
    words = [json.dumps({"words": ["<b>", "|", "`$x$`"]}) + "\n"]
    Path("data/instructions-heldout.jsonl").write_text("".join(words), encoding="utf-8")
    Path("runs").mkdir()
    assert command("evaluate", *FAST, "--problems", "0") == 0
    assert "more, about" not in capsys.readouterr().out
    assert sorted(path.stem for path in FOLDER.glob("*.png")) == ["comparison", "frontier"]
    assert command("evaluate", *FAST, "--problems", "0", "--folder", "elsewhere") == 0
    assert sorted(path.name for path in Path("elsewhere").iterdir()) == sorted(path.name for path in FOLDER.iterdir())
    page = (FOLDER / "report.html").read_text("utf-8")
    assert "<th>&lt;b&gt;, |, `$x$`</th>" in page
    line = json.dumps({"step": 1, **dict.fromkeys(pictures.HEALTH, 0.5)}) + "\n"
    for name, text in (("a", line + line[:20]), ("b", ""), ("c", "\xff\n}\n")):
        folder = Path(f"runs/ppo-{name}")
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    checkpoint.save(Path("checkpoints/reinforce/best.pt"), tiny(context=128), {"step": 3})
    assert command("evaluate", *FAST, "--problems", "0") == 0
    assert "left out of the picture: " in capsys.readouterr().out
    assert report.logged_runs() == {"ppo-a": {name: [(1, 0.5)] for name in pictures.HEALTH}}
    assert (FOLDER / "health.png").stat().st_size > 1_000
    (FOLDER / "solving.svg").write_text("of an earlier comparison", encoding="utf-8")
    (FOLDER / "mine.png").write_text("of the user", encoding="utf-8")
    assert command("evaluate", *FAST, "--problems", "0") == 0
    assert {path.stem for path in FOLDER.glob("*.*g")} == {"comparison", "frontier", "cost", "health", "mine"}


@pytest.mark.usefixtures("workspace")
def test_bad_files_are_one_line(
    command: Callable[..., int], tiny: Callable[..., GPT], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(Path("other.pt"), tiny(context=64), {"step": 0})
    assert command("evaluate", "other.pt", *FAST, "--problems", "0") == 1
    assert "other.pt has a context of 64 tokens" in capsys.readouterr().err
    checkpoint.save(Path("other.pt"), tiny(context=128, vocabulary=300), {"step": 0})
    assert command("evaluate", "other.pt", *FAST, "--problems", "0") == 1
    assert "other.pt has 300 tokens" in capsys.readouterr().err
    Path("other.pt").write_bytes(b"not a model")
    assert command("evaluate", "other.pt", *FAST, "--problems", "0") == 1
    assert "other.pt is cut short or not a checkpoint" in capsys.readouterr().err
    long = {"question": "How many are 2 apples and 3 apples? " * 9, "answer": "2 + 3 = <<2+3=5>>5 apples.\n#### 5"}
    Path("long.jsonl").write_text(json.dumps(long), encoding="utf-8")
    assert command("evaluate", *FAST, "--problems-file", "long.jsonl") == 1
    assert "--problems 1: none fits the context of 128 tokens" in capsys.readouterr().err
    assert command("evaluate", *FAST, "--opening", "x" * 200) == 1
    assert "--opening" in capsys.readouterr().err
    assert command("evaluate", *FAST, "--answers", "0") == 2
    assert "--answers 0: at least 1" in capsys.readouterr().err
    Path("runs").write_text("a file", encoding="utf-8")
    assert command("evaluate", *FAST, "--problems", "0") == 1
    said = capsys.readouterr()
    assert "cannot be written" in said.err
    assert "% of the words used" not in said.out
    Path("data/stories-heldout.txt").write_text("x" * 500, encoding="utf-8")
    assert command("evaluate", *FAST) == 1
    assert "every story is longer" in capsys.readouterr().err
    Path("data/instructions-heldout.jsonl").unlink()
    Path("data/stories-heldout.txt").write_text("A story.", encoding="utf-8")
    assert command("evaluate", *FAST) == 1
    assert "python prepare.py" in capsys.readouterr().err
    checkpoint.FINETUNED.unlink()
    assert command("evaluate", *FAST) == 1
    err = capsys.readouterr().err
    assert "finetuned.pt is missing: python finetune.py makes it" in err
    assert err.count("\n") == 1
