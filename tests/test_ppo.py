"""PPO: its formulas against hand calculation, what must not change them, and that a run learns."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoint
import ppo
import runtime
from model import GPT, padded, token_log_probs
from ppo import Config, Rollout
from sample import Completion, Instruction, packed
from tokenizer import Tokenizer

CONFIG = Config(groups=2, group=4, limit=12, minibatch=4, device="cpu", precision="float32")


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def story(prompt: list[int], ids: list[int], end: int) -> Completion:
    return Completion(prompt, ids, [True] * len(ids), "end" if ids[-1] == end else "limit")


def scored(learner: ppo.Learner, told: list[Completion], scores: list[float]) -> Rollout:
    """A rollout of given stories with given scores, each earned by the story's last token."""
    ids, mask = packed(told, torch.device("cpu"))
    with torch.no_grad():
        log_probs, values = ppo.policy_outputs(learner, ids, mask)
        reference = token_log_probs(learner.reference, ids, mask)
    wanted = [Instruction(("kite",), one.prompt) for one in told]
    found = [[0.0] * (len(one.ids) - 1) + [score] for one, score in zip(told, scores, strict=True)]
    rewards = ppo.token_rewards(found, [one.ended for one in told], mask, 0.0)
    return Rollout(wanted, told, ids, mask, torch.tensor(scores), rewards, log_probs, reference, values)


def test_advantages_by_hand() -> None:
    mask = torch.tensor([[True, True, False]])
    rewards, values = row([0, 1, 0]), row([0, 0, 100])
    advantages, _ = ppo.advantages_and_returns(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(advantages, row([0.95, 1.0, 0.0]))
    _, returns = ppo.advantages_and_returns(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, row([1.0, 1.0, 0.0]))


def test_a_story_that_is_only_its_end_gets_all_the_credit() -> None:
    mask = torch.tensor([[False, True, False]])
    advantages, _ = ppo.advantages_and_returns(row([0, 1, 0]), row([0, 0, 7]), mask, 1.0, 0.95)
    assert advantages.tolist() == [[0, 1, 0]]


def test_advantages_equal_the_definition_in_loops() -> None:
    torch.manual_seed(0)
    gamma, lam = 0.9, 0.8
    starts, ends = [2, 0, 5], [6, 9, 5]  # first and last story position of each row
    rewards, values = torch.randn(3, 10), torch.randn(3, 10)
    mask = torch.tensor([[first <= t <= last for t in range(10)] for first, last in zip(starts, ends, strict=True)])
    advantages, returns = ppo.advantages_and_returns(rewards, values, mask, gamma, lam)
    for b, (first, last) in enumerate(zip(starts, ends, strict=True)):
        for t in range(first, last + 1):
            expected = 0.0
            for k in range(t, last + 1):
                following = values[b, k + 1].item() if k < last else 0.0
                delta = rewards[b, k].item() + gamma * following - values[b, k].item()
                expected += (gamma * lam) ** (k - t) * delta
            assert advantages[b, t].item() == pytest.approx(expected, abs=1e-5)
            assert returns[b, t].item() == pytest.approx(expected + values[b, t].item(), abs=1e-5)
    assert not advantages[~mask].any()


@pytest.mark.parametrize(
    "text",
    [
        "A kite by the lake. The kite!",
        "lake",
        "kitekite lake kite",
        "no such word",
        "",
        "a la ke kit e",
        "LAKES and kites and moons",
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_a_token_earns_what_it_adds_to_the_score(coder: Tokenizer, text: str, ended: bool) -> None:
    wanted = Instruction(("kite", "lake", "moon"), [1])
    ids = coder.encode(text) + [coder.end] * ended or [5]
    found = ppo.rises(wanted, ids, coder)
    each = [ppo.score(wanted, ids[:length], coder) for length in range(len(ids) + 1)]
    assert found == pytest.approx([behind - before for before, behind in itertools.pairwise(each)])
    assert sum(found) == pytest.approx(ppo.score(wanted, ids, coder))


def test_rewards_stand_where_their_tokens_are_predicted(coder: Tokenizer) -> None:
    end = coder.end
    told = [story([1, 2], [7, end], end), story([1], [7, 8, 9, 10], end)]
    _, mask = packed(told, torch.device("cpu"))  # (2, 4): the stories' first tokens are predicted at 1 and 0
    rewards = ppo.token_rewards([[0.5, 0.25], [0.0, 1.0, 0.0, 0.125]], [True, False], mask, 0.0)
    assert rewards.tolist() == [[0.0, 0.5, 0.25, 0.0], [0.0, 1.0, 0.0, 0.125]]
    rewards = ppo.token_rewards([[0.5, 0.25], [0.0, 1.0, 0.0, 0.125]], [True, False], mask, 0.25)
    assert rewards.tolist() == [[0.0, 0.5, 0.25, 0.0], [0.0, 1.0, 0.0, -0.125]]
    assert [one.ended for one in told] == [True, False]


def test_no_token_is_credited_with_a_word_before_it(coder: Tokenizer) -> None:
    wanted, text = Instruction(("kite", "lake"), [1]), "a kite. a lake."
    ids = coder.encode(text)
    _, mask = packed([story([1], ids, coder.end)], torch.device("cpu"))
    rewards = ppo.token_rewards([ppo.rises(wanted, ids, coder)], [False], mask, 0.0)
    advantages, returns = ppo.advantages_and_returns(rewards, torch.zeros(mask.shape), mask, 1.0, 1.0)
    expected = [1.0] * len("a kite") + [0.5] * len(". a lake") + [0.0]
    assert returns.tolist() == advantages.tolist() == [expected]


def test_the_mask_is_the_story_shifted_by_one(coder: Tokenizer) -> None:
    told = [story([5, 6, 7], [8, coder.end], coder.end), story([5], [9], coder.end)]
    ids, mask = packed(told, torch.device("cpu"))
    assert mask.tolist() == [[False, False, True, True], [True, False, False, False]]
    assert ids[:, 1:][mask].tolist() == [8, coder.end, 9]


def test_clipped_loss_with_a_negative_advantage() -> None:
    ratio = torch.tensor([2.0, 0.5], requires_grad=True)
    loss = ppo.clipped_loss(ratio, torch.tensor([-1.0, -1.0]), 0.2)
    assert loss.tolist() == pytest.approx([2.0, 0.8])
    loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [1.0, 0.0]


def test_clipped_loss_with_a_positive_advantage() -> None:
    ratio = torch.tensor([2.0, 0.5], requires_grad=True)
    loss = ppo.clipped_loss(ratio, torch.tensor([1.0, 1.0]), 0.2)
    assert loss.tolist() == pytest.approx([-1.2, -0.5])
    loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0.0, -1.0]


def test_k3_has_the_kl_as_its_expectation_and_half_its_gradient_stays_finite() -> None:
    policy, reference = torch.tensor([0.95, 0.05]), torch.tensor([0.5, 0.5])
    expectation = (policy * ppo.k3(policy.log(), reference.log())).sum()
    assert expectation.item() == pytest.approx(0.4946, abs=5e-5)
    assert expectation.item() == pytest.approx((policy * (policy / reference).log()).sum().item(), abs=1e-6)


@pytest.mark.parametrize("apart", [-200.0, 200.0])
def test_one_token_far_from_the_reference_keeps_every_gradient_finite(apart: float) -> None:
    log_probs = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    ppo.k3(log_probs, torch.tensor([-1.5, -1.0 + apart, -2.5])).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert log_probs.grad[0].item() == pytest.approx(1 - math.exp(-0.5))


def test_normalised_counts_story_tokens_only() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = ppo.normalised(torch.tensor([[1.0, 2.0, 50.0], [3.0, -50.0, 9.0]]), mask)
    spread = math.sqrt(2 / 3)
    expected = torch.tensor([[-1 / spread, 0.0, 0.0], [1 / spread, 0.0, 0.0]])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_explained_variance_by_hand_and_without_variance() -> None:
    mask = torch.tensor([[True, True, True, False]])
    assert ppo.explained_variance(row([1, 2, 3, 9]), row([1, 2, 3, 0]), mask) == pytest.approx(1.0)
    assert ppo.explained_variance(row([2, 2, 2, 9]), row([1, 2, 3, 0]), mask) == pytest.approx(0.0)
    assert math.isnan(ppo.explained_variance(row([0, 1, 0, 0]), row([1, 1, 1, 5]), mask))


def test_first_pass_has_ratio_one_and_no_kl_with_dropout_in_the_config(
    tiny: Callable[..., GPT], coder: Tokenizer
) -> None:
    learner = ppo.learner_for(tiny(dropout=0.5).train(), CONFIG)
    wanted = [Instruction(("kite",), coder.prompt("a kite"))] * 8
    batch = ppo.rollout(learner, wanted, coder, CONFIG)
    again, values = ppo.policy_outputs(learner, batch.ids[:4], batch.mask[:4])
    assert torch.equal(again, batch.log_probs[:4])
    assert torch.equal(values, batch.values[:4])
    assert torch.equal(ppo.story_kl(batch), torch.zeros(8))
    config = replace(CONFIG, epochs=1, minibatch=8)
    batch = ppo.rollout(learner, wanted, coder, config)
    metrics = ppo.update(learner, batch, config)
    # The rows of the minibatch are shuffled: the same numbers from another order of rows, in float32.
    assert metrics["policy/ratio_error_first"] < 1e-5
    assert metrics["policy/clipfrac"] == 0
    assert metrics["loss/kl"] == pytest.approx(0, abs=1e-9)


def test_padding_changes_nothing(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    learner = ppo.learner_for(tiny(scale=5.0), CONFIG)
    torch.nn.init.normal_(learner.critic.value.weight)
    short, long = story([5, 6], [7, 8, coder.end], coder.end), story([5, 6], list(range(20, 32)), coder.end)
    alone, beside = scored(learner, [short], [0.5]), scored(learner, [short, long], [0.5, 1.0])
    width = alone.mask.shape[1]
    for name in ("log_probs", "values"):
        first, second = getattr(alone, name)[0], getattr(beside, name)[0, :width]
        torch.testing.assert_close(first[alone.mask[0]], second[alone.mask[0]], atol=1e-6, rtol=1e-5)
    outcomes = []
    for batch in (alone, replace(beside, mask=beside.mask & torch.tensor([[True], [False]]))):
        rewards = batch.rewards[:1]
        outcomes.append(ppo.advantages_and_returns(rewards, batch.values[:1], batch.mask[:1], 1.0, 0.95)[0][0, :width])
    torch.testing.assert_close(*outcomes, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("junk", [-50.0, math.nan])
def test_what_stands_in_the_padding_changes_no_logged_number(
    tiny: Callable[..., GPT], coder: Tokenizer, junk: float
) -> None:
    told = [story([5, 6], [7, 8, coder.end], coder.end), story([5, 6], list(range(20, 32)), coder.end)]
    seen = []
    for fill in (0.0, junk):
        learner = ppo.learner_for(tiny(scale=3.0), CONFIG)
        batch = scored(learner, told, [0.5, 1.0])
        dirty = [getattr(batch, name).masked_fill(~batch.mask, fill) for name in ("log_probs", "reference", "values")]
        batch = replace(batch, log_probs=dirty[0], reference=dirty[1], values=dirty[2])
        seen.append({**ppo.rollout_metrics(batch, coder), **ppo.update(learner, batch, CONFIG)})
    assert seen[0] == pytest.approx(seen[1], nan_ok=False)


def test_critic_moves_no_weight_of_the_policy(tiny: Callable[..., GPT]) -> None:
    learner = ppo.learner_for(tiny(), CONFIG)
    ids, mask = padded([[1, 2, 3]], [[False, True, True]], torch.device("cpu"))
    _, values = ppo.policy_outputs(learner, ids, mask)
    (values - 1).square().sum().backward()
    assert all(weight.grad is None for weight in learner.policy.parameters())
    assert learner.critic.value.weight.grad is not None
    assert learner.critic.value.bias.grad is not None


def test_the_reference_is_a_copy_without_a_hook(tiny: Callable[..., GPT]) -> None:
    learner = ppo.learner_for(tiny(), CONFIG)
    assert len(learner.policy.norm._forward_hooks) == 1
    assert not learner.reference.norm._forward_hooks
    shared = {weight.data_ptr() for weight in learner.policy.parameters()}
    assert shared.isdisjoint(weight.data_ptr() for weight in learner.reference.parameters())
    assert not any(weight.requires_grad for weight in learner.reference.parameters())
    ids, mask = padded([[1, 2, 3]], [[False, True, True]], torch.device("cpu"))
    torch.nn.init.normal_(learner.critic.value.weight)
    _, values = ppo.policy_outputs(learner, ids, mask)
    with torch.no_grad():
        learner.reference.tokens.weight.mul_(2)
        token_log_probs(learner.reference, ids, mask)
    assert torch.equal(learner.critic(learner.hidden.channels), values)


def test_a_better_story_gets_likelier_and_a_worse_one_less(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    config = replace(CONFIG, lr=1e-3, kl_weight=0.0, minibatch=2)
    learner = ppo.learner_for(tiny(), config)
    told = [story([5, 6], [7, 8, coder.end], coder.end), story([5, 6], [9, 9, 9], coder.end)]
    batch = scored(learner, told, [1.0, 0.0])
    ppo.update(learner, batch, config)
    moved = (token_log_probs(learner.policy, batch.ids, batch.mask) - batch.log_probs).sum(1)
    assert moved[0] > 0 > moved[1]


def test_a_larger_kl_weight_stays_closer(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    apart = []
    for weight in (0.0, 5.0):
        config = replace(CONFIG, lr=1e-3, kl_weight=weight, minibatch=2, epochs=30)
        learner = ppo.learner_for(tiny(), config)
        told = [story([5, 6], [7, 8, coder.end], coder.end), story([5, 6], [9, 9, 9], coder.end)]
        batch = scored(learner, told, [1.0, 0.0])
        ppo.update(learner, batch, config)
        apart.append(ppo.k3(token_log_probs(learner.policy, batch.ids, batch.mask), batch.reference).sum().item())
    assert apart[1] < apart[0] / 2


def test_a_step_without_a_finite_gradient_is_skipped(tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    learner = ppo.learner_for(tiny(), CONFIG)
    batch = scored(learner, [story([5, 6], [7, 8], coder.end)] * 8, [1.0] + [0.0] * 7)
    before = {name: weight.clone() for name, weight in learner.policy.state_dict().items()}
    broken = replace(batch, reference=batch.reference + math.nan)
    with pytest.raises(runtime.UserError, match="no number"):
        ppo.update(learner, broken, CONFIG)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.policy.state_dict().items())
    learner = ppo.learner_for(tiny(), CONFIG)
    one = batch.reference.clone()
    one[0] = math.nan
    assert ppo.update(learner, replace(batch, reference=one), CONFIG)["skipped_steps"] == 2


def test_drawn_instructions_are_different_and_of_one_length() -> None:
    known = {3: [Instruction((f"w{i}",), [i, 0, 0]) for i in range(9)], 4: [Instruction(("x",), [0] * 4)] * 3}
    drawn = ppo.drawn_instructions(known, 5, 8, runtime.generator(1))
    assert len(drawn) == 40
    for start in range(0, 40, 8):
        assert len({one.words for one in drawn[start : start + 8]}) == 8
        assert {len(one.prompt) for one in drawn[start : start + 8]} == {3}
    assert drawn != ppo.drawn_instructions(known, 5, 8, runtime.generator(2))
    known = {3: [Instruction((f"w{i}",), [0] * 3) for i in range(90)], 4: [Instruction(("x",), [0] * 4)] * 10}
    lengths = [len(one.prompt) for one in ppo.drawn_instructions(known, 400, 1, runtime.generator(1))]
    assert lengths.count(4) / 400 == pytest.approx(0.1, abs=0.06)  # as instructions have it: four standard errors
    with pytest.raises(runtime.UserError, match="--group"):
        ppo.drawn_instructions({4: known[4][:3]}, 5, 8, runtime.generator(1))


def test_reward_rises_on_a_toy(tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewarded for the share of bytes below 65, a quarter of what it writes at first, it comes to write those."""
    monkeypatch.setattr(ppo, "score", lambda _wanted, ids, _coder: sum(token < 65 for token in ids) / 6)
    config = replace(CONFIG, groups=8, limit=6, minibatch=16, lr=3e-3, kl_weight=0.0)
    learner = ppo.learner_for(tiny(), config)
    wanted = [Instruction(("kite",), coder.prompt("k"))] * 32
    rewards = []
    for _ in range(25):
        batch = ppo.rollout(learner, wanted, coder, config)
        ppo.update(learner, batch, config)
        rewards.append(batch.scores.mean().item())
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-3:]) / 3 > 0.6


FAST = ("--groups", "2", "--group", "4", "--limit", "8", "--minibatch", "4", "--evaluate-on", "4", "--demo-limit", "8")
FAST = (*FAST, "--device", "cpu")


def metrics_of(name: str) -> list[dict[str, float]]:
    (path,) = Path("runs").glob(f"{name}-*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("workspace")
def test_zero_minutes_evaluate_save_and_stop(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("ppo", "0", "0.05", *FAST) == 0
    assert "checkpoints/ppo-0.05/final.pt" in capsys.readouterr().out.replace("\\", "/")
    saved, facts = checkpoint.load(Path("checkpoints/ppo-0.05/final.pt"), torch.device("cpu"))
    first, _ = checkpoint.load(checkpoint.FINETUNED, torch.device("cpu"))
    assert all(torch.equal(weight, first.state_dict()[name]) for name, weight in saved.state_dict().items())
    assert facts["step"] == 0
    assert Path("checkpoints/ppo-0.05/rollout-0000.pt").exists()


@pytest.mark.usefixtures("workspace")
def test_a_name_keeps_runs_of_one_weight_apart(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("ppo", "0", "0.05", "--name", "ppo-seed-2", *FAST) == 0
    assert {path.parent.name for path in Path("checkpoints").glob("*/final.pt")} == {"ppo-seed-2"}
    assert len(metrics_of("ppo-seed-2")) == 1
    for wrong in ("../mine", "a/b", ".."):
        assert command("ppo", "0", "0.05", "--name", wrong, *FAST) == 2
        assert f"--name {wrong}: the name of a folder" in capsys.readouterr().err


@pytest.mark.usefixtures("workspace")
def test_a_run_logs_saves_and_can_be_repeated(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for weight in ("0.05", "0.050"):
        assert command("ppo", "0.002", weight, "--seed", "4", *FAST) == 0
        seen.append(metrics_of("ppo-0.05"))
        for path in Path("runs").glob("ppo-*"):
            path.rename(path.with_name(f"old-{len(seen)}-{path.name}"))
    assert "rollout 1 " in capsys.readouterr().out
    names = {"objective/scores", "objective/kl", "objective/entropy", "policy/approxkl", "policy/clipfrac"}
    names |= {"policy/ratio_max", "loss/policy", "loss/value", "loss/kl", "value/explained_variance", "stories/ended"}
    names |= {"stories/length", "stories/distinct_2", "stories/repeated_4", "stories/word_repeats", "grad_norm", "lr"}
    first = next(line for line in seen[0] if "loss/policy" in line)
    again = next(line for line in seen[1] if "loss/policy" in line)
    assert names <= first.keys()
    same = [name for name in first if not name.startswith("speed/")]
    assert [first[name] for name in same] == pytest.approx([again[name] for name in same], rel=0, abs=0, nan_ok=True)
    *_, facts = checkpoint.load(Path("checkpoints/ppo-0.05/final.pt"), torch.device("cpu"))
    assert facts["step"] >= 1
    assert facts["kl_weight"] == 0.05


@pytest.mark.usefixtures("workspace")
def test_the_kl_of_an_evaluation_is_that_of_its_stories(
    tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story by story, token by token: log-probability under the policy minus that under the reference."""
    learner = ppo.learner_for(tiny(), CONFIG)
    with torch.no_grad():
        for weight in learner.policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=runtime.generator(1)), alpha=0.1)
    told: list[Completion] = []
    generate = ppo.generate

    def kept(*arguments: Any, **options: Any) -> list[Completion]:
        found = generate(*arguments, **options)
        told.extend(found)
        return found

    monkeypatch.setattr(ppo, "generate", kept)
    config = replace(CONFIG, demo=("kite",), demo_limit=4)
    heldout = [Instruction(("kite",), [5, 6]), Instruction(("lake",), [7])]
    seen = ppo.evaluate(learner, heldout, coder, config)
    apart = 0.0
    for one in told[:2]:
        ids = torch.tensor([one.prompt + one.ids])
        for model, sign in ((learner.policy, 1), (learner.reference, -1)):
            log_probs = model(ids)[0].log_softmax(-1)
            for t in range(len(one.prompt) - 1, ids.shape[1] - 1):
                apart += sign * log_probs[t, ids[0, t + 1]].item()
    assert seen.kl == pytest.approx(apart / 2, abs=1e-4)
    assert abs(seen.kl) > 0.01
    assert seen.lengths == [len(one.ids) for one in told[:2]]
    assert seen.ended == [one.ended for one in told[:2]]
    demo = told[2]
    assert seen.pieces == [coder.decode([token]) for token in demo.ids]
    for model, found in ((learner.policy, seen.policy), (learner.reference, seen.reference)):
        chances = model(torch.tensor([demo.prompt + demo.ids]))[0].softmax(-1)
        first = len(demo.prompt) - 1
        by_hand = [chances[first + t, token].item() for t, token in enumerate(demo.ids)]
        assert found == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.usefixtures("workspace")
def test_a_changed_reference_is_refused(
    command: Callable[..., int], tiny: Callable[..., GPT], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("ppo", "0", "0.05", *FAST) == 0
    checkpoint.save(checkpoint.FINETUNED, tiny(seed=3, context=128), {"step": 0})
    assert command("ppo", "1", "0.05", *FAST, "--resume") == 1
    assert "have changed" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("-1",), ("ten",), ("nan",), ("inf",), ("10", "-1"), ("10", "nan"), ("10", "much")])
@pytest.mark.usefixtures("workspace")
def test_wrong_minutes_or_weight_are_one_line_and_status_2(
    command: Callable[..., int], wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("ppo", *wrong) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert not Path("runs").exists()


@pytest.mark.usefixtures("workspace")
def test_missing_files_are_one_line(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    Path("data/instructions-train.jsonl").unlink()
    assert command("ppo", "0.001", *FAST) == 1
    assert "python prepare.py" in capsys.readouterr().err
    checkpoint.FINETUNED.unlink()
    assert command("ppo", "0.001", *FAST) == 1
    assert "python finetune.py" in capsys.readouterr().err


@pytest.mark.usefixtures("workspace")
def test_a_run_folder_that_cannot_be_written_is_one_line(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs").write_text("a file, not a folder", encoding="utf-8")
    assert command("ppo", "0.001", *FAST) == 1
    assert capsys.readouterr().err.startswith("error: runs")
