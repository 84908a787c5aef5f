"""REINFORCE: the worked example of docs/reinforce.md, what must not change an update, and that a run learns."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import checkpoint
import problems
import reinforce
import runtime
import training
from model import GPT, token_log_probs
from problems import Problem
from reinforce import Config, Rollout
from sample import Completion, packed
from tokenizer import Tokenizer

CONFIG = Config(steps=4, problems=2, answers=4, limit=12, device="cpu", precision="float32")


def answer(ids: list[int], end: int, sampled: list[bool] | None = None) -> Completion:
    return Completion([5, 6], ids, sampled or [True] * len(ids), "end" if ids[-1] == end else "limit")


def gradients(model: GPT, told: list[Completion], advantages: Tensor, config: Config) -> list[Tensor]:
    model.zero_grad()
    reinforce.accumulate(model, told, advantages, config)
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def answers(end: int) -> list[Completion]:
    """Sixteen answers of different lengths; of every third, the second token was forced."""
    rows = [[7 + row, *range(20, 20 + row % 5), end] for row in range(16)]
    return [answer(ids, end, [row % 3 != 0 or place != 1 for place in range(len(ids))]) for row, ids in enumerate(rows)]


def test_groups_that_agree_have_no_advantage_in_any_order() -> None:
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])[order]
        groups = torch.tensor([0, 0, 1, 1])[order]
        assert reinforce.group_advantages(rewards, groups, by_spread=False).tolist() == [0, 0, 0, 0]
        assert reinforce.group_advantages(rewards, groups, by_spread=True).tolist() == [0, 0, 0, 0]
        assert reinforce.no_signal(rewards, groups) == 1.0
    mixed = torch.tensor([1.0, 0.0, 0.0, 0.0])
    found = reinforce.group_advantages(mixed, torch.tensor([0, 1, 0, 1]), by_spread=False)
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert reinforce.no_signal(mixed, torch.tensor([0, 1, 0, 1])) == 0.5


def test_the_worked_example_of_the_docs() -> None:
    """Five answers, two of them right: docs/reinforce.md prints these numbers."""
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), torch.zeros(5, dtype=torch.long)
    advantages = reinforce.group_advantages(rewards, groups, by_spread=False)
    torch.testing.assert_close(advantages, torch.tensor([-0.4, 0.6, -0.4, 0.6, -0.4]))
    log_probs = torch.tensor(
        [
            [0.0, -2.0, -1.0, -3.0],
            [0.0, -1.0, -1.5, 0.0],
            [0.0, -0.5, 0.0, 0.0],
            [0.0, -2.5, -1.0, -0.5],
            [0.0, -1.0, -1.0, 0.0],
        ],
        requires_grad=True,
    )
    assert log_probs.sum(1).tolist() == [-6.0, -2.5, -0.5, -4.0, -2.0]
    tokens = 3 + 2 + 1 + 3 + 2
    loss = reinforce.policy_gradient_loss(log_probs, advantages, tokens)
    # -(-0.4 x -6 + 0.6 x -2.5 - 0.4 x -0.5 + 0.6 x -4 - 0.4 x -2) / 11 = 0.5 / 11
    assert loss.item() == pytest.approx(0.5 / 11)
    loss.backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    assert log_probs.grad[:, 1].tolist() == pytest.approx([0.4 / 11, -0.6 / 11, 0.4 / 11, -0.6 / 11, 0.4 / 11])
    by_spread = reinforce.group_advantages(rewards, groups, by_spread=True)
    spread = math.sqrt(0.4 * 0.6)  # of two ones among five
    assert by_spread.tolist() == pytest.approx([value / spread for value in (-0.4, 0.6, -0.4, 0.6, -0.4)], rel=1e-4)
    better = policy_after(log_probs, advantages, tokens)
    assert better.item() < loss.item()


def test_the_table_of_the_docs_adds_up() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reinforce.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    *rows, total = [list(map(float, row[1:])) for row in cells if row[0] in ("1", "2", "3", "4", "5", "all")]
    assert len(rows) == 5
    rewards = torch.tensor([row[0] for row in rows])
    advantages = reinforce.group_advantages(rewards, torch.zeros(5, dtype=torch.long), by_spread=False)
    assert advantages.tolist() == pytest.approx([row[1] for row in rows])
    assert [row[1] * row[3] for row in rows] == pytest.approx([row[4] for row in rows])
    assert [sum(column) for column in zip(*rows, strict=True)] == pytest.approx(total)
    sums = torch.tensor([row[3] for row in rows])[:, None]
    loss = reinforce.policy_gradient_loss(sums, advantages, int(total[2])).item()
    assert f"0.5 / 11 = {loss:.4f}" in text


def policy_after(log_probs: Tensor, advantages: Tensor, tokens: int) -> Tensor:
    """The loss once the second answer's log-probability has risen from -2.5 to -2, as an update would have it."""
    moved = log_probs.detach().clone()
    moved[1, 2] += 0.5
    loss = reinforce.policy_gradient_loss(moved, advantages, tokens)
    assert loss.item() == pytest.approx(0.2 / 11, abs=1e-6)
    return loss


def test_what_is_trained_is_what_was_sampled(coder: Tokenizer) -> None:
    end = coder.end
    told = [answer([7, 8, end], end), answer([7, 8, 9], end), answer([7, 8, 9, end], end, [True, False, False, True])]
    ids, mask = packed(told, torch.device("cpu"))
    assert mask.sum(1).tolist() == [3, 3, 2]
    assert ids[:, 1:][mask].tolist() == [7, 8, end, 7, 8, 9, 7, end]
    assert not mask[:, 0].any()  # the prompt's second token is read, never learned


def test_parts_do_not_change_the_gradient(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    model, told = tiny(), answers(coder.end)
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0] * 2)
    advantages = reinforce.group_advantages(rewards, torch.arange(16) // 8, by_spread=False)
    whole = gradients(model, told, advantages, replace(CONFIG, part=16))
    for part in (6, 1):
        for one, other in zip(whole, gradients(model, told, advantages, replace(CONFIG, part=part)), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert max(one.abs().max().item() for one in whole) > 1e-3


def test_the_gradient_is_that_of_the_formula_in_a_loop(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    """Answer by answer and token by token, those without advantage too, over the tokens of all."""
    model, told = tiny(), answers(coder.end)[:6]
    advantages = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.75, -0.75])
    found = gradients(model, told, advantages, CONFIG)
    model.zero_grad()
    loss = torch.zeros(())
    for one, advantage in zip(told, advantages, strict=True):
        ids = torch.tensor([one.prompt + one.ids])
        log_probs = model(ids)[0].log_softmax(-1)
        for t in range(len(one.prompt) - 1, ids.shape[1] - 1):
            if one.sampled[t + 1 - len(one.prompt)]:
                loss = loss - advantage * log_probs[t, ids[0, t + 1]]
    (loss / sum(sum(one.sampled) for one in told)).backward()  # type: ignore[no-untyped-call]
    expected = [weight.grad for weight in model.parameters()]
    for one_gradient, other in zip(found, expected, strict=True):
        assert other is not None
        torch.testing.assert_close(one_gradient, other, atol=1e-6, rtol=1e-4)


def rollout_of(told: list[Completion], rewards: list[float]) -> Rollout:
    asked = [Problem("one?", "#### 1")] * len(told)
    return Rollout(asked, told, torch.zeros(len(told), dtype=torch.long), torch.tensor(rewards))


def test_one_update_makes_right_answers_likelier(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    config = replace(CONFIG, lr=1e-3)
    learner = reinforce.learner_for(tiny(), config)
    told = answers(coder.end)[:4]
    ids, mask = packed(told, torch.device("cpu"))
    before = token_log_probs(learner.model, ids, mask).sum(1)
    batch = rollout_of(told, [1.0, 0.0, 1.0, 0.0])
    reinforce.update(learner.model, learner.guard, batch, config, learner.generators[1])
    moved = token_log_probs(learner.model, ids, mask).sum(1) - before
    assert (moved > 0).tolist() == [True, False, True, False]


def test_a_step_without_signal_moves_nothing(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    """After a step that did move, Adam remembers a direction: it must not go on in it."""
    learner = reinforce.learner_for(tiny(), CONFIG)
    told = answers(coder.end)[:4]
    reinforce.update(
        learner.model, learner.guard, rollout_of(told, [1.0, 0.0, 0.0, 0.0]), CONFIG, learner.generators[1]
    )
    before = {name: weight.clone() for name, weight in learner.model.state_dict().items()}
    for rewards in ([1.0] * 4, [0.0] * 4):
        metrics = reinforce.update(
            learner.model, learner.guard, rollout_of(told, rewards), CONFIG, learner.generators[1]
        )
        assert metrics["groups/no_signal"] == 1
    assert all(torch.equal(weight, before[name]) for name, weight in learner.model.state_dict().items())


def test_collapse() -> None:
    assert reinforce.collapse([0.5, 0.0, 0.0], 4, 0.25) is None  # not a whole window yet
    assert "no answer" in str(reinforce.collapse([0.0] * 4, 4, 0.25))
    assert reinforce.collapse([0.4] * 4 + [0.1] * 4, 4, 0.25) is None
    assert "fell from 40.0% to 9.0%" in str(reinforce.collapse([0.4] * 4 + [0.09] * 4, 4, 0.25))
    assert reinforce.collapse([0.4] * 4 + [0.09] * 4 + [0.4] * 4, 4, 0.25) is None


def test_every_problem_comes_once_a_pass() -> None:
    known = [Problem(str(number), "#### 1") for number in range(7)]
    config = replace(CONFIG, problems=3)
    drawn = [problem.question for step in range(7) for problem in reinforce.problems_of(step, known, config)]
    passes = [drawn[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(one) == [str(number) for number in range(7)] for one in passes)
    assert passes[0] != passes[1]
    assert drawn == [problem.question for step in range(7) for problem in reinforce.problems_of(step, known, config)]


def test_a_rollout_keeps_answers_with_their_problems(
    tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "grade", lambda text, gold: len(text + gold) % 2 == 0)
    asked = [Problem("a long question?", "#### 1"), Problem("short?", "#### 22")]
    batch = reinforce.rollout(tiny(), asked, coder, replace(CONFIG, part=3), runtime.generator(1))
    assert len(batch.completions) == 8
    for problem, told, group in zip(batch.asked, batch.completions, batch.groups.tolist(), strict=True):
        assert problem == asked[group]
        assert told.prompt == coder.prompt(problem.question)
    assert torch.bincount(batch.groups).tolist() == [4, 4]
    texts = [
        coder.answer_text(told.ids) + asked.answer for told, asked in zip(batch.completions, batch.asked, strict=True)
    ]
    assert batch.rewards.tolist() == [float(len(text) % 2 == 0) for text in texts]
    assert 0 < batch.rewards.sum() < 8


@pytest.mark.parametrize(("shuffle", "learns"), [(False, True), (True, False)])
def test_reward_rises_on_a_toy_unless_it_is_shuffled(
    tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch, shuffle: bool, learns: bool
) -> None:
    """Right is an answer whose first byte is below 65, a quarter of them at first."""
    monkeypatch.setattr(problems, "grade", lambda text, _gold: bool(text) and ord(text[0]) < 65)
    config = replace(CONFIG, problems=4, answers=16, limit=1, lr=1e-2, warmup=1, shuffle=shuffle)
    learner = reinforce.learner_for(tiny(), config)
    asked = [Problem("k", "#### 1")] * 4
    rewards = []
    for _ in range(25):
        batch = reinforce.rollout(learner.model, asked, coder, config, learner.generators[0])
        metrics = reinforce.update(learner.model, learner.guard, batch, config, learner.generators[1])
        rewards.append(metrics["objective/scores"])
    assert sum(rewards[:3]) / 3 < 0.4
    assert (sum(rewards[-5:]) / 5 > 0.6) is learns


FAST = ("--problems", "2", "--answers", "4", "--limit", "8", "--evaluate-every", "2", "--evaluate-on", "3")
FAST = (*FAST, "--evaluate-answers", "2", "--device", "cpu")


@pytest.fixture
def practised(workspace: Path, tiny: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model whose context holds any question, and a grader that finds some answers right."""
    checkpoint.save(checkpoint.FINETUNED, tiny(context=512), {"step": 0, "parent": None, "seed": 0})
    monkeypatch.setattr(problems, "grade", lambda text, _gold: len(text) % 2 == 0)
    return workspace


def metrics_of() -> list[dict[str, float]]:
    (path,) = Path("runs").glob("reinforce-*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("speed/")} for line in lines]


@pytest.mark.usefixtures("practised")
def test_a_run_evaluates_saves_and_logs(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("reinforce", "3", *FAST) == 0
    out = capsys.readouterr().out
    assert out.count("pass@1 ") == 4  # at 0, 2 and 3, and at the end
    assert sorted(path.name for path in reinforce.FOLDER.glob("step-*.pt")) == [
        *("step-0000.pt", "step-0002.pt", "step-0003.pt")
    ]
    logged = metrics_of()
    measured = {line["step"]: line["eval/pass@1"] for line in logged if "eval/pass@1" in line}
    assert set(measured) == {0, 2, 3}
    model, facts = checkpoint.load(reinforce.FOLDER / "best.pt", torch.device("cpu"))
    assert facts["eval/pass@1"] == max(measured.values()) == measured[facts["step"]]
    same, _ = checkpoint.load(reinforce.FOLDER / f"step-{facts['step']:04}.pt", torch.device("cpu"))
    assert all(torch.equal(weight, same.state_dict()[name]) for name, weight in model.state_dict().items())
    names = {"objective/scores", "objective/scores_recent", "groups/no_signal", "answers/length", "answers/ended"}
    names |= {"answers/calculator", "loss/policy", "grad_norm", "lr"}
    assert names <= next(line for line in logged if "lr" in line).keys()


@pytest.mark.usefixtures("practised")
def test_best_is_the_peak_of_a_curve_that_falls(command: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((0.1, 0.5, 0.3))
    monkeypatch.setattr(reinforce, "evaluated", lambda *_: {"eval/pass@1": next(found), "eval/pass@2": 0.5})
    assert command("reinforce", "4", *FAST) == 0
    _, facts = checkpoint.load(reinforce.FOLDER / "best.pt", torch.device("cpu"))
    assert (facts["step"], facts["eval/pass@1"]) == (2, 0.5)


@pytest.mark.usefixtures("practised")
def test_a_run_that_never_is_right_stops_with_a_line(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(problems, "grade", lambda _text, _gold: False)
    assert command("reinforce", "9", *FAST, "--window", "3") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: stopped at step 3: no answer of the first 3 steps was right")
    assert (reinforce.FOLDER / "best.pt").exists()


@pytest.mark.usefixtures("practised")
def test_files_of_problems(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    row = {"question": "How many?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
    Path("train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    long = {**row, "question": "many " * 300}
    Path("test.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(long) + "\n", encoding="utf-8")
    files = ("--train-file", "train.jsonl", "--test-file", "test.jsonl")
    assert command("reinforce", "1", *FAST, *files) == 0
    assert "1 of 2 held-out problems left out" in capsys.readouterr().out
    Path("train.jsonl").write_text(json.dumps(row) + "\n{broken\n", encoding="utf-8")
    assert command("reinforce", "1", *FAST, *files) == 1
    assert "train.jsonl, line 2" in capsys.readouterr().err
    assert command("reinforce", "1", *FAST, "--train-file", "none.jsonl") == 1
    assert "none.jsonl is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [("0",), ("-3",), ("many",), ("--problems", "0"), ("--answers", "1"), ("--lr", "nan"), ("--part", "0")]
)
@pytest.mark.usefixtures("practised")
def test_wrong_flags_exit_with_2(command: Callable[..., int], wrong: tuple[str, ...]) -> None:
    assert command("reinforce", *wrong) == 2
    assert not Path("runs").exists()


@pytest.mark.usefixtures("practised")
def test_a_limit_that_leaves_no_room_and_a_second_run_are_refused(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("reinforce", "1", "--limit", "512") == 1
    assert "--limit 512" in capsys.readouterr().err
    with training.session(reinforce.STATE):
        assert command("reinforce", "1", *FAST) == 1
    assert "another run writes" in capsys.readouterr().err
