"""REINFORCE on word problems: many answers to each problem, and those that beat their own group get likelier.

    python reinforce.py                 467 steps of 16 problems with 16 answers each
    python reinforce.py 60              60 steps
    python reinforce.py --resume        goes on with a run that was stopped
    python reinforce.py --train-file data/gsm8k/train.jsonl --test-file data/gsm8k/test.jsonl

Reads `checkpoints/finetuned.pt`, and generated problems or files in GSM8K's format. Writes
`checkpoints/reinforce/step-0000.pt, step-0060.pt, ...`, `best.pt` (the one with the highest pass@1, as these curves can
peak and fall), and `runs/reinforce-TIME/`.

Williams 1992, with the mean of a problem's own answers as the baseline and calculator calls in the answers:
1. on policy, one update a step, so there is no ratio, no clip and no KL;
2. the advantage is not divided by the group's spread, as GRPO does (Shao et al. 2024, arXiv 2402.03300, section 4.1.2):
   `--by-spread` divides;
3. the loss is divided by the sampled tokens of the whole step, not by each answer's own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

import checkpoint
import problems
import runtime
import situations
import tokenizer
import training
from model import GPT, token_log_probs
from problems import Problem, pass_at_k
from runtime import Checked, Count, Device, Log, Positive, Precision, Seed, Share, UserError
from sample import Completion, packed, right_answers, solve
from tokenizer import Tokenizer
from training import Guard, Learner, Session

FOLDER = checkpoint.FOLDER / "reinforce"
STATE = FOLDER / "state.pt"


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of a run on word problems."""

    # With 16 problems each, 467 are as many as GSM8K's training part holds.
    steps: Annotated[Count, tyro.conf.Positional, tyro.conf.arg(metavar="STEPS")] = 467
    resume: bool = False  # go on with a run that was stopped
    problems: Count = 16  # a step
    answers: Annotated[int, runtime.at_least(2)] = 16  # to each problem: its group
    limit: Count = 128  # tokens of an answer; the longest generated gold answers have about 110
    part: Count = 128  # answers written, or learned from, at once: memory, not the result, depends on it
    lr: Positive = 3e-5  # at its peak; 2e-4 makes this model forget every right answer within ten steps
    warmup: Count = 10  # steps of rising learning rate: the first gradients are the noisiest
    beta2: Share = 0.95  # of Adam; 0.999 would scale a step by gradients of a thousand steps ago
    max_norm: Positive = 1.0  # of the gradient, clipped there
    by_spread: bool = False  # divide advantages by their group's spread, as GRPO does
    shuffle: bool = False  # give each answer another one's reward: the check that it is the reward that teaches
    collapsed: float = 0.25  # stop where the mean reward falls below this share of its highest
    window: Count = 20  # steps of that mean
    evaluate_every: Count = 60  # steps
    evaluate_on: Count = 400  # held-out problems
    evaluate_answers: Count = 8  # to each of them, for pass@1 to pass@8
    samples: int = 8  # answers shown in TensorBoard
    # Of generated problems; fine-tuning knows seeds 1 and 2, evaluate.py tests on 1.
    problem_seed: Annotated[int, runtime.at_least(0)] = 3
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED
    train_file: Path | None = None  # problems to practise on, in GSM8K's format, in place of generated ones
    test_file: Path | None = None  # held-out problems in that format


@dataclass(frozen=True, slots=True)
class Rollout:
    """Answers as they were written, and what they earned."""

    asked: list[Problem]  # B, the problem of each answer
    completions: list[Completion]  # B
    groups: Tensor  # (B,) number of each answer's problem
    rewards: Tensor  # (B,) 1 for the right number, else 0


def group_advantages(rewards: Tensor, groups: Tensor, by_spread: bool) -> Tensor:
    """(B,) how much better each answer did than the mean of its own problem's answers, in any order of rows.

    rewards: (B,). groups: (B,) numbers from 0. by_spread: divided by the group's standard deviation (GRPO), 0 where
    that is 0.
    """
    assert rewards.shape == groups.shape, (rewards.shape, groups.shape)
    sizes = torch.bincount(groups).to(rewards.dtype)  # (G,)
    means = torch.zeros_like(sizes).index_add(0, groups, rewards) / sizes.clamp(min=1)  # (G,)
    advantages = rewards - means[groups]
    if not by_spread:
        return advantages
    spread = (torch.zeros_like(sizes).index_add(0, groups, advantages**2) / sizes.clamp(min=1)).sqrt()
    return advantages / (spread[groups] + 1e-6)


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor, tokens: int) -> Tensor:
    """() minus the sum of advantage x log-probability over the sampled tokens, per sampled token of the whole step.

    log_probs: (B, T-1) nats, 0 off the answer's sampled tokens. advantages: (B,). Losses of parts of a step add up.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", with a baseline.
    """
    assert log_probs.shape[0] == len(advantages), (log_probs.shape, advantages.shape)
    return -(advantages[:, None] * log_probs).sum() / tokens


def no_signal(rewards: Tensor, groups: Tensor) -> float:
    """Share of groups whose answers all earned the same: they teach nothing."""
    told = [rewards[groups == group] for group in range(int(groups.max()) + 1)]
    return sum(bool((own == own[0]).all()) for own in told) / len(told)


@torch.no_grad()
def rollout(
    model: GPT, asked: Sequence[Problem], coder: Tokenizer, config: Config, generator: torch.Generator
) -> Rollout:
    """`config.answers` answers to each problem at temperature 1, calculator in the loop, graded."""
    rows = [number for number in range(len(asked)) for _ in range(config.answers)]
    rows.sort(key=lambda number: len(asked[number].question))  # rows of a part read prompts of similar lengths
    told: list[Completion] = []
    with runtime.autocast(model.device, config.precision):
        for start in range(0, len(rows), config.part):
            questions = [asked[number].question for number in rows[start : start + config.part]]
            told += solve(model, coder, questions, limit=config.limit, generator=generator)
    repeated = [asked[number] for number in rows]
    right = [
        problems.grade(coder.answer_text(answer.ids), problem.answer)
        for answer, problem in zip(told, repeated, strict=True)
    ]
    return Rollout(repeated, told, torch.tensor(rows), torch.tensor(right, dtype=torch.float32))


def accumulate(model: GPT, completions: Sequence[Completion], advantages: Tensor, config: Config) -> Tensor:
    """Adds the gradient of the step's loss to the weights', in place, part by part; returns the loss, ().

    An answer of advantage 0 adds nothing and is not run, but its tokens count: the step's loss is per token of all.
    """
    tokens = sum(sum(answer.sampled) for answer in completions)
    rows = [row for row in range(len(completions)) if advantages[row] != 0]
    rows.sort(key=lambda row: len(completions[row].prompt) + len(completions[row].ids))  # little padding
    total = torch.zeros(())
    for start in range(0, len(rows), config.part):
        part = rows[start : start + config.part]
        ids, mask = packed([completions[row] for row in part], model.device)
        with runtime.autocast(model.device, config.precision):
            log_probs = token_log_probs(model, ids, mask)
        loss = policy_gradient_loss(log_probs, advantages[part].to(model.device), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach().cpu()
    return total


def update(model: GPT, guard: Guard, batch: Rollout, config: Config, shuffling: torch.Generator) -> dict[str, float]:
    """One policy gradient step on a rollout, in place; returns its metrics.

    Without any signal no weight has a gradient, and Adam leaves it where it is.
    """
    rewards = batch.rewards
    if config.shuffle:
        rewards = rewards[torch.randperm(len(rewards), generator=shuffling)]
    advantages = group_advantages(rewards, batch.groups, config.by_spread)
    told = batch.completions
    metrics = {
        "objective/scores": batch.rewards.mean().item(),
        "groups/no_signal": no_signal(rewards, batch.groups),
        "answers/length": sum(len(answer.ids) for answer in told) / len(told),
        "answers/ended": sum(answer.ended for answer in told) / len(told),
        "answers/calculator": sum(not all(answer.sampled) for answer in told) / len(told),
    }
    guard.optimizer.zero_grad(set_to_none=True)
    loss = accumulate(model, told, advantages, config)
    norm = guard.step(loss)
    return {**metrics, "loss/policy": loss.item(), "grad_norm": norm or 0.0, "skipped_steps": guard.skipped}


def sample_table(batch: Rollout, coder: Tokenizer, number: int) -> str:
    """A rollout's first problem and its answers, each marked, as a Markdown table."""
    rows = ["| | answer |", "| --- | --- |", f"| question | {runtime.markdown(batch.asked[0].question)} |"]
    rows.append(f"| gold | {runtime.markdown(batch.asked[0].answer)} |")
    for answer, reward in list(zip(batch.completions, batch.rewards, strict=True))[:number]:
        rows.append(f"| {'right' if reward else 'wrong'} | {runtime.markdown(coder.answer_text(answer.ids))} |")
    return "\n".join(rows)


def collapse(rewards: Sequence[float], window: int, share: float) -> str | None:
    """Why a run with these mean rewards of its steps should stop; None where it should go on."""
    means = [sum(rewards[end - window : end]) / window for end in range(window, len(rewards) + 1)]
    if means and max(means) == 0:
        return (
            f"no answer of the first {window} steps was right, so nothing can be learned: fine-tune on problems first"
        )
    if means and means[-1] < share * max(means):
        return (
            f"the mean reward of {window} steps fell from {max(means):.1%} to {means[-1]:.1%}, a collapse: lower --lr"
        )
    return None


def fitting(known: Sequence[Problem], coder: Tokenizer, model: GPT, limit: int, name: str) -> list[Problem]:
    """The problems whose question leaves room for an answer of `limit` tokens; says how many do not.

    Raises: UserError where none does.
    """
    room = model.config.context - limit
    kept = [problem for problem in known if len(coder.prompt(problem.question)) <= room]
    if len(kept) < len(known):
        print(f"{len(known) - len(kept):,} of {len(known):,} {name} left out: their questions have over {room} tokens")
    if not kept:
        raise UserError(f"no question of the {name} leaves room for --limit {limit} tokens: lower it")
    return kept


def evaluated(model: GPT, heldout: Sequence[Problem], coder: Tokenizer, config: Config) -> dict[str, float]:
    """pass@1, pass@2, ... on held-out problems, by the unbiased estimator; the same draws each time."""
    with runtime.autocast(model.device, config.precision):
        right = right_answers(
            model,
            coder,
            heldout,
            answers=config.evaluate_answers,
            limit=config.limit,
            batch=config.part,
            generator=runtime.generator(config.seed, 2),
            temperature=1.0,
        )
    return {
        f"eval/pass@{k}": sum(pass_at_k(config.evaluate_answers, count, k) for count in right) / len(right)
        for k in range(1, config.evaluate_answers + 1)
    }


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same throughout a run."""

    coder: Tokenizer
    config: Config
    log: Log
    facts: dict[str, Any]  # of each checkpoint
    train: list[Problem]
    heldout: list[Problem]


def learner_for(model: GPT, config: Config) -> Learner:
    """The model in eval mode, as dropout would make the update's probabilities others than those of the answers.

    Its generators: of the answers, and of shuffled rewards.
    """
    optimizer = training.adamw(model.eval(), config.lr, config.beta2, weight_decay=0.0)
    writing, shuffling = (runtime.generator(config.seed, stream) for stream in (11, 12))
    return Learner(model, Guard(optimizer, config.max_norm), (writing, shuffling))


def problems_of(step: int, known: Sequence[Problem], config: Config) -> list[Problem]:
    """The problems of a step: pass after pass over all that are known, each pass in an order of its own."""
    numbers = range(step * config.problems, (step + 1) * config.problems)
    orders = {
        count: torch.randperm(len(known), generator=runtime.generator(config.seed, 10, count)).tolist()
        for count in {number // len(known) for number in numbers}
    }
    return [known[orders[number // len(known)][number % len(known)]] for number in numbers]


def evaluate_and_save(run: Run, learner: Learner) -> None:
    """Evaluates and saves exactly the weights that are there, and the state; `best.pt` where pass@1 is the highest."""
    config = run.config
    found = evaluated(learner.model, run.heldout, run.coder, config)
    run.log.scalars(learner.step, found)
    first, last = found["eval/pass@1"], found[f"eval/pass@{config.evaluate_answers}"]
    facts = {**run.facts, "step": learner.step, "minutes": learner.seconds / 60, **found}
    names = [f"step-{learner.step:04}.pt"]
    if learner.best is None or first > learner.best:
        learner.best = first
        names.append("best.pt")
    for name in names:
        checkpoint.save(FOLDER / name, learner.model, facts)
    training.write_state(STATE, config, run.log, learner.state())
    print(
        f"step {learner.step}: pass@1 {first:.1%}, pass@{config.evaluate_answers} {last:.1%} "
        f"on {len(run.heldout)} held-out problems{', the best so far' if len(names) == 2 else ''}",
        flush=True,
    )


def train(run: Run, learner: Learner, session: Session) -> None:
    """The loop: answer, grade, update."""
    config = run.config
    writing, shuffling = learner.generators
    if learner.best is None:
        evaluate_and_save(run, learner)
    while learner.step < config.steps:
        if session.asked:
            session.leave()
        began = time.monotonic()
        lr = training.linear_rate(learner.step, config.steps, config.warmup, config.lr)
        training.set_rate(learner.guard.optimizer, lr)
        batch = rollout(learner.model, problems_of(learner.step, run.train, config), run.coder, config, writing)
        written = time.monotonic()
        metrics = update(learner.model, learner.guard, batch, config, shuffling)
        learner.step += 1
        seconds = time.monotonic() - began
        learner.seconds += seconds
        learner.seen.append(metrics["objective/scores"])
        recent = sum(learner.seen[-config.window :]) / len(learner.seen[-config.window :])
        speed = {"speed/step_seconds": seconds, "speed/writing_seconds": written - began, "lr": lr}
        run.log.scalars(learner.step, {**metrics, "objective/scores_recent": recent, **speed})
        left = learner.seconds / learner.step * (config.steps - learner.step) / 60
        print(
            f"step {learner.step}/{config.steps}  reward {metrics['objective/scores']:.3f}  recent {recent:.3f}"
            f"  no signal {metrics['groups/no_signal']:.0%}  ended {metrics['answers/ended']:.0%}"
            f"  length {metrics['answers/length']:.0f}  {left:.0f} min left",
            flush=True,
        )
        if learner.step % config.evaluate_every == 0 or learner.step == config.steps:
            run.log.text(learner.step, "samples", sample_table(batch, run.coder, config.samples))
            evaluate_and_save(run, learner)
        elif session.asked:
            training.write_state(STATE, config, run.log, learner.state())
            session.leave()
        reason = collapse(learner.seen, config.window, config.collapsed)
        if reason:
            raise UserError(f"stopped at step {learner.step}: {reason}; {FOLDER / 'best.pt'} is whole")
    print(f"{FOLDER / 'best.pt'}: pass@1 {learner.best or 0:.1%}, after {learner.seconds / 60:.0f} minutes of practice")


def material(config: Config, model: GPT, coder: Tokenizer) -> tuple[list[Problem], list[Problem]]:
    """Problems to practise on, and held-out ones.

    Raises: UserError where the settings do not fit the model, or a file cannot be read, before anything is written.
    """
    if config.limit >= model.config.context:
        raise UserError(f"--limit {config.limit}: less than the model's context of {model.config.context} tokens")
    known = (
        problems.read_problems(config.train_file)
        if config.train_file
        else situations.generated_problems(config.steps * config.problems, config.problem_seed, "train")
    )
    heldout = (
        problems.read_problems(config.test_file)[: config.evaluate_on]
        if config.test_file
        else situations.generated_problems(config.evaluate_on, config.problem_seed, "test")
    )
    return (
        fitting(known, coder, model, config.limit, "problems to practise on"),
        fitting(heldout, coder, model, config.limit, "held-out problems"),
    )


def main() -> None:
    config = runtime.parse(Config, __doc__)
    if config.model.resolve().parent == FOLDER.resolve():
        raise UserError(f"--model {config.model}: a run replaces what is in {FOLDER}; copy the model elsewhere first")
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    facts = {**runtime.machine_facts(device, config.precision, config.seed), "parent": str(config.model)}
    with training.session(STATE) as session:
        state = training.read_state(STATE, config) if config.resume else None
        model, _ = checkpoint.load(config.model, device, coder.vocabulary)
        known, heldout = material(config, model, coder)
        learner = learner_for(model, config)
        learner.inputs = training.fingerprint(checkpoint.fingerprint(model.state_dict()), known, heldout)
        training.resume(learner, state, STATE)
        with training.log_of("reinforce", config, facts, state) as log:
            if state is None:
                training.clear(FOLDER, "step-*.pt", "best.pt", STATE.name)
            train(Run(coder, config, log, facts, known, heldout), learner, session)


if __name__ == "__main__":
    runtime.run(main)
