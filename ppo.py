"""PPO: the model writes stories, a reward counts the requested words, and what did better than expected gets likelier.

    python ppo.py               10 minutes at a KL weight of 0.05
    python ppo.py 10 0.5        held closer to where it started
    python ppo.py 0 0.05        evaluates, saves and stops
    python ppo.py 20 --resume   goes on with a run at 0.05 until it has had 20 minutes

Reads `checkpoints/finetuned.pt` and `data/instructions-*.jsonl`. Writes `checkpoints/ppo-KL/rollout-0000.pt, ...,
final.pt`, `state.pt` for `--resume`, and `runs/ppo-KL-TIME/`.

Schulman et al. 2017 (arXiv 1707.06347), as InstructGPT uses it (Ouyang et al. 2022, arXiv 2203.02155), and it differs
there:
1. the reward is code that counts words, in place of a reward model;
2. the penalty for leaving the reference is a term of the loss (k3), in place of a part of each token's reward;
3. each token earns what it adds to the score, in place of the whole score at the end; a story cut at the limit pays;
4. the critic is one linear layer on the policy's own channels, and its gradient stops there;
5. no pre-training loss is mixed in.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import tyro
from torch import Tensor, nn

import board
import checkpoint
import distributed
import runtime
import stories
import tokenizer
import training
from board import Evaluation, LimitsConfig
from model import GPT, token_log_probs
from runtime import Count, Device, Log, Positive, Precision, Seed, UserError
from sample import OPENING, Completion, Instruction, fits, fitting_instructions, generate, likeliest_next, packed
from tokenizer import Tokenizer
from training import Guard, Session

STATE = "state.pt"  # in the folder of a run's checkpoints


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a PPO run."""

    # Budget of the rollouts; the one that is under way at its end is finished, and evaluations come on top.
    minutes: Annotated[float, runtime.NOT_NEGATIVE, tyro.conf.Positional, tyro.conf.arg(metavar="MINUTES")] = 10.0
    # Weight of the KL in the loss; usual: 0.01 to 0.5.
    kl_weight: Annotated[float, runtime.NOT_NEGATIVE, tyro.conf.Positional, tyro.conf.arg(metavar="KL")] = 0.05
    resume: bool = False  # go on with the run of this name that was stopped, or has spent its budget
    name: str = ""  # of the run and the folder of its models; without one: ppo-KL
    rollouts: Annotated[int, runtime.NOT_NEGATIVE] = 0  # most rollouts, whatever the minutes; 0: as many as they hold
    groups: Count = 16  # groups of instructions a rollout, each of one prompt length
    group: Count = 8  # different instructions a group: 16 x 8 = 128 stories a rollout
    limit: Count = 200  # tokens of a story
    # Taken from the reward of a story cut at the limit: a longer one has more room for words.
    unended_cost: Annotated[float, runtime.NOT_NEGATIVE] = 0.3
    epochs: Count = 2  # passes over a rollout; usual: 1 to 4
    minibatch: Count = 16  # stories a step
    clip: Positive = 0.2  # how far a token's probability may move in a rollout before pushing it on gains nothing
    gamma: float = 1.0  # discount: the reward comes once, so a word early in a story is worth the same
    lam: float = 1.0  # of GAE; at 0.95 the start of a 200-token story would get e^-10 of the credit
    value_weight: float = 0.5  # of the critic's squared error in the loss
    lr: Positive = 3e-5  # usual: 1e-6 to 3e-5, the higher for the smaller models
    critic_lr: Positive = 3e-4  # at 3e-3 it is noise; at the policy's rate a layer that starts at zero learns too late
    max_norm: Positive = 1.0  # of the gradient, clipped there
    evaluate_every: Count = 10  # rollouts
    evaluate_on: Count = 50  # held-out instructions
    samples: int = 6  # stories of a rollout shown in TensorBoard
    demo: tuple[str, ...] = ("rain", "cake", "jump")  # words of the story printed at each evaluation
    demo_limit: Count = 120  # tokens of that story
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED
    limits: LimitsConfig = field(default_factory=LimitsConfig)  # where it warns

    def __post_init__(self) -> None:
        runtime.check(self)
        if self.name != Path(self.name).name or self.name == "..":
            raise ValueError(f"--name {self.name}: the name of a folder, such as ppo-seed-2")
        if not self.demo:
            raise ValueError("--demo: at least one word")


@dataclass(frozen=True, slots=True)
class Rollout:
    """Stories as they were written, and what the update compares against. Position t predicts token t+1."""

    instructions: list[Instruction]  # B
    completions: list[Completion]  # B
    ids: Tensor  # (B, T) prompts and stories, padded behind
    mask: Tensor  # (B, T-1) bool, true at t where token t+1 belongs to the story
    scores: Tensor  # (B,) share of the requested words each story uses
    rewards: Tensor  # (B, T-1) how much of it each token brings, less the cost of no end on the last
    log_probs: Tensor  # (B, T-1) nats, of the policy that wrote them
    reference: Tensor  # (B, T-1) nats, of the frozen reference
    values: Tensor  # (B, T-1) reward the critic expects from each position


class Critic(nn.Module):
    """Reward to expect from each position: one linear layer on the channels, zero at first to add no noise."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.value = nn.Linear(channels, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (B, T-1, C) -> (B, T-1) expected rewards. Detached: its gradient would wreck the policy."""
        return cast(Tensor, self.value(hidden.detach().float()).squeeze(-1).float())


class Hidden:
    """A model's channels after its final norm, kept by a hook, so that the model knows nothing of critics."""

    def __init__(self, model: GPT) -> None:
        self.channels = torch.empty(0)  # (B, T-1, C): the last token is never read
        model.norm.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self.channels = output


def by_length(known: Sequence[Instruction]) -> dict[int, list[Instruction]]:
    """Instructions by the length of their prompt in tokens."""
    found: dict[int, list[Instruction]] = {}
    for instruction in known:
        found.setdefault(len(instruction.prompt), []).append(instruction)
    return found


def drawn_instructions(
    known: dict[int, list[Instruction]], groups: int, group: int, generator: torch.Generator
) -> list[Instruction]:
    """groups x group instructions: for each group a prompt length, then different instructions of that length.

    Raises: UserError where no length has enough of them.
    """
    lengths = sorted(length for length, same in known.items() if len(same) >= group)
    if not lengths:
        raise UserError(f"{stories.TRAIN_INSTRUCTIONS} has no {group} instructions of one length: lower --group")
    # As often as instructions have it: long prompts are few, of rare words, and would otherwise be most of a rollout.
    shares = torch.tensor([len(known[length]) for length in lengths], dtype=torch.float32)
    drawn = []
    for _ in range(groups):
        same = known[lengths[int(torch.multinomial(shares, 1, generator=generator))]]
        drawn += [same[index] for index in torch.randperm(len(same), generator=generator)[:group].tolist()]
    return drawn


def score(wanted: Instruction, ids: list[int], coder: Tokenizer) -> float:
    """The reward: share of the requested words, 0 to 1, that the story uses before its end of text."""
    return stories.words_used(coder.answer_text(ids), wanted.words)


def rises(wanted: Instruction, ids: list[int], coder: Tokenizer) -> list[float]:
    """How much each token of a story raises its score: they add up to it.

    Between two tokens after which the score is the same no word is looked for: a word once used stays used.
    """
    found = [0.0] * len(ids)
    spans = [(0, len(ids), 0.0, score(wanted, ids, coder))]  # tokens from, tokens to, score before, score behind
    while spans:
        start, end, before, behind = spans.pop()
        if end - start == 1:
            found[start] = behind - before
        elif before != behind:
            middle = (start + end) // 2
            between = score(wanted, ids[:middle], coder)
            spans += [(start, middle, before, between), (middle, end, between, behind)]
    return found


def last_positions(mask: Tensor) -> Tensor:
    """(B,) the last position of each row where `mask` (B, T-1) is true."""
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


def token_rewards(found: Sequence[Sequence[float]], ended: Sequence[bool], mask: Tensor, cost: float) -> Tensor:
    """(B, T-1) rewards of the tokens of each story, on the positions that predict them; 0 off the story.

    found: what each token brings. ended: of each story; `cost` is taken from the last token of one that has not.
    """
    in_order = torch.tensor([reward for row in found for reward in row], device=mask.device)
    rewards = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, in_order)
    rewards[torch.arange(len(ended)), last_positions(mask)] -= cost * ~torch.tensor(ended, device=mask.device)
    return rewards


def advantages_and_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """How much better each token turned out than the critic expected, and what it should have expected.

    rewards, values: (B, T-1) in rewards. mask: (B, T-1) true on the story. Returns advantages and returns, (B, T-1),
    0 off the story.
    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16, summed from the last token back; nothing follows a
    story.
    """
    assert rewards.shape == values.shape == mask.shape, (rewards.shape, values.shape, mask.shape)
    values = values.masked_fill(~mask, 0.0)  # so that what stands in the padding, NaN even, never enters the sum
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])  # (B,) credit of the tokens after this one
    next_value = torch.zeros_like(running)  # (B,)
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * lam * running).masked_fill(~mask[:, t], 0.0)
        advantages[:, t] = running
        next_value = values[:, t]
    return advantages, advantages + values


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """() mean of x (B, T-1) where `mask` (B, T-1) is true; what stands elsewhere does not matter."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum()


def normalised(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, T-1) advantages with mean 0 and spread 1 over story tokens: a step does not depend on the reward's scale."""
    mean = masked_mean(advantages, mask)
    spread = masked_mean((advantages - mean) ** 2, mask).sqrt()
    return ((advantages - mean) / (spread + 1e-8)).masked_fill(~mask, 0.0)


def clipped_loss(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Minus PPO's clipped objective of each token, of the shape of `ratio`.

    ratio: probability of a token under the policy over that under the policy that wrote it.
    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7.
    """
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of each token's KL from the reference, nats, never below 0: e^r - r - 1, r = log(reference / policy).

    The log-ratio is clamped, not the exponential: after that, an overflowing token's gradient would be 0 x infinity.
    Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    r = (reference - log_probs).clamp(-20.0, 20.0)
    return r.exp() - r - 1


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Share of the returns' variance over story tokens that the critic foresaw; NaN where they do not vary."""
    told, seen = returns[mask], values[mask]
    if len(told) < 2 or told.var() == 0:
        return math.nan
    return float(1 - (told - seen).var() / told.var())


@dataclass(slots=True)
class Learner:
    """What a run trains, what it is held to, and how far it is: all that `--resume` restores."""

    policy: GPT
    reference: GPT
    critic: Critic
    hidden: Hidden  # of the policy
    guard: Guard  # of the optimizer of both
    draws: torch.Generator  # of instructions
    writing: torch.Generator
    shuffling: torch.Generator  # of minibatches
    number: int = 0  # rollouts done
    seconds: float = 0.0  # spent on them
    evaluated: int = -1  # rollouts done at the last evaluation
    used: float = 0.0  # share of words used in it
    inputs: str = ""  # fingerprint of what the run began with: the reference and the instructions

    def state(self) -> dict[str, Any]:
        """What is written for `--resume`; the reference, which is on disk, is not."""
        return {
            "weights": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.guard.optimizer.state_dict(),
            "random": training.random_states((self.draws, self.writing, self.shuffling)),
            **{"step": self.number, "seconds": self.seconds, "evaluated": self.evaluated, "used": self.used},
            **{"skipped": self.guard.skipped, "in_a_row": self.guard.in_a_row, "inputs": self.inputs},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state, in place."""
        self.policy.load_state_dict(state["weights"])
        self.critic.load_state_dict(state["critic"])
        self.guard.optimizer.load_state_dict(state["optimizer"])
        training.set_random_states(state["random"], (self.draws, self.writing, self.shuffling))
        self.number, self.seconds = state["step"], state["seconds"]
        self.evaluated, self.used = state["evaluated"], state["used"]
        self.guard.skipped, self.guard.in_a_row = state["skipped"], state["in_a_row"]


def learner_for(policy: GPT, config: Config) -> Learner:
    """The policy in eval mode, a frozen copy of it as the reference, and a critic."""
    policy.eval()  # dropout off: with it on, the ratio of new to old probabilities is noise
    reference = copy.deepcopy(policy).requires_grad_(False)  # before the hook, or the copy would carry it
    critic = Critic(policy.config.channels).to(policy.device)
    groups: list[dict[str, Any]] = [
        {"params": list(policy.parameters())},
        {"params": list(critic.parameters()), "lr": config.critic_lr},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0, fused=True)
    guard = Guard(optimizer, config.max_norm)
    draws, writing, shuffling = (runtime.generator(config.seed, stream) for stream in (10, 11, 12))
    return Learner(policy, reference, critic, Hidden(policy), guard, draws, writing, shuffling)


def policy_outputs(learner: Learner, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and values, (B, T-1), of one forward pass of the policy."""
    log_probs = token_log_probs(learner.policy, ids, mask)
    return log_probs, distributed.whole(learner.critic(learner.hidden.channels), len(ids))


@torch.no_grad()
def rollout(learner: Learner, instructions: list[Instruction], coder: Tokenizer, config: Config) -> Rollout:
    """A story for each instruction, its score, and the log-probabilities and values that the update compares against.

    No top-k: PPO compares probabilities under the full distribution, so the stories must be drawn from it.
    """
    prompts = [instruction.prompt for instruction in instructions]
    with runtime.autocast(learner.policy.device, config.precision):
        completions = generate(learner.policy, prompts, end=coder.end, limit=config.limit, generator=learner.writing)
        ids, mask = packed(completions, learner.policy.device)
        # In the update's batch shapes, so that the first ratio is 1 but for rounding.
        parts = list(zip(torch.split(ids, config.minibatch), torch.split(mask, config.minibatch), strict=True))
        log_probs, values = map(torch.cat, zip(*(policy_outputs(learner, *part) for part in parts), strict=True))
        reference = torch.cat([token_log_probs(learner.reference, *part) for part in parts])
    asked = list(zip(instructions, completions, strict=True))
    scores = torch.tensor([score(wanted, story.ids, coder) for wanted, story in asked], device=ids.device)
    found = [rises(wanted, story.ids, coder) for wanted, story in asked]
    rewards = token_rewards(found, [story.ended for story in completions], mask, config.unended_cost)
    return Rollout(instructions, completions, ids, mask, scores, rewards, log_probs, reference, values)


def update(learner: Learner, batch: Rollout, config: Config) -> dict[str, float]:
    """Two passes of clipped updates over a rollout, in place; returns their metrics, means over minibatches."""
    mask = batch.mask
    raw, returns = advantages_and_returns(batch.rewards, batch.values, mask, config.gamma, config.lam)
    advantages = normalised(raw, mask)
    seen: list[dict[str, float]] = []
    for _ in range(config.epochs):
        order = torch.randperm(len(mask), generator=learner.shuffling).to(mask.device)
        for rows in torch.split(order, config.minibatch):
            with runtime.autocast(learner.policy.device, config.precision):
                log_probs, values = policy_outputs(learner, batch.ids[rows], mask[rows])
            log_ratio = (log_probs - batch.log_probs[rows]).clamp(-20.0, 20.0)
            ratio = log_ratio.exp()
            policy_loss = masked_mean(clipped_loss(ratio, advantages[rows], config.clip), mask[rows])
            value_loss = masked_mean((values - returns[rows]) ** 2, mask[rows])
            kl_loss = masked_mean(k3(log_probs, batch.reference[rows]), mask[rows])
            loss = policy_loss + config.value_weight * value_loss + config.kl_weight * kl_loss
            learner.guard.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = learner.guard.step(loss)
            if norm is None:
                continue
            with torch.no_grad():
                outside = ((ratio - 1).abs() > config.clip).float()
                seen.append(
                    {
                        "loss/policy": policy_loss.item(),
                        "loss/value": value_loss.item(),
                        "loss/kl": kl_loss.item(),
                        "policy/approxkl": masked_mean(0.5 * log_ratio**2, mask[rows]).item(),
                        "policy/clipfrac": masked_mean(outside, mask[rows]).item(),
                        "policy/ratio_max": ratio[mask[rows]].max().item(),
                        "policy/ratio_error_first": (ratio[mask[rows]] - 1).abs().max().item(),
                        "grad_norm": norm,
                    }
                )
    metrics = {name: sum(step[name] for step in seen) / len(seen) for name in (seen[0] if seen else ())}
    if seen:
        metrics["policy/ratio_max"] = max(step["policy/ratio_max"] for step in seen)
        metrics["policy/ratio_error_first"] = seen[0]["policy/ratio_error_first"]
    return {
        **metrics,
        "value/explained_variance": explained_variance(batch.values, returns, mask),
        "skipped_steps": learner.guard.skipped,
    }


def rollout_metrics(batch: Rollout, coder: Tokenizer) -> dict[str, float]:
    """What a rollout's stories say of the policy that wrote them."""
    told = [story.ids for story in batch.completions]
    return {
        "objective/scores": batch.scores.mean().item(),
        "objective/kl": story_kl(batch).mean().item(),
        "objective/entropy": -masked_mean(batch.log_probs, batch.mask).item(),
        "stories/ended": sum(story.ended for story in batch.completions) / len(told),
        "stories/length": sum(map(len, told)) / len(told),
        "stories/distinct_2": stories.distinct_pairs(told),
        "stories/repeated_4": stories.repeated_4grams(told),
        "stories/word_repeats": stories.word_repeats((text, words) for words, text, *_ in samples(batch, coder)),
    }


def samples(batch: Rollout, coder: Tokenizer) -> list[tuple[tuple[str, ...], str, float, float]]:
    """The requested words of each story of a rollout, its text, the share of them it uses, and its KL, nats."""
    told = [coder.answer_text(story.ids) for story in batch.completions]
    asked = [instruction.words for instruction in batch.instructions]
    return list(zip(asked, told, batch.scores.tolist(), story_kl(batch).tolist(), strict=True))


def story_kl(batch: Rollout) -> Tensor:
    """(B,) KL of the policy from the reference for each story, nats: the sum of its tokens' log-ratios."""
    return (batch.log_probs - batch.reference).masked_fill(~batch.mask, 0.0).sum(1)


@torch.no_grad()
def evaluate(learner: Learner, heldout: list[Instruction], coder: Tokenizer, config: Config) -> Evaluation:
    """What the policy writes on held-out instructions and for the demo, with the same draws each time."""
    device = learner.policy.device
    with runtime.autocast(device, config.precision):
        prompts = [wanted.prompt for wanted in heldout]
        source = runtime.generator(config.seed, 2)
        told = generate(learner.policy, prompts, end=coder.end, limit=config.limit, generator=source)
        ids, mask = packed(told, device)
        apart = 0.0
        for part in zip(torch.split(ids, config.minibatch), torch.split(mask, config.minibatch), strict=True):
            apart += (token_log_probs(learner.policy, *part) - token_log_probs(learner.reference, *part)).sum().item()
        prompt = coder.prompt(tokenizer.story_request(config.demo))
        source = runtime.generator(config.seed, 3)
        demo = generate(learner.policy, [prompt], end=coder.end, limit=config.demo_limit, generator=source)
        ids, mask = packed(demo, device)
        policy, reference = (
            token_log_probs(model, ids, mask)[mask].exp().tolist() for model in (learner.policy, learner.reference)
        )
        next_words = likeliest_next(learner.policy, coder)
    scores = [score(wanted, story.ids, coder) for wanted, story in zip(heldout, told, strict=True)]
    return Evaluation(
        words_used=sum(scores) / len(scores),
        kl=apart / len(told),
        lengths=[len(story.ids) for story in told],
        ended=[story.ended for story in told],
        demo=coder.answer_text(demo[0].ids),
        pieces=[coder.decode([token]) for token in demo[0].ids],
        policy=policy,
        reference=reference,
        next_words=next_words,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same throughout a run."""

    learner: Learner
    coder: Tokenizer
    config: Config
    log: Log
    folder: Path  # of its checkpoints
    facts: dict[str, Any]  # of each of them
    known: dict[int, list[Instruction]]  # to practise on, by length
    heldout: list[Instruction]


def evaluate_and_save(run: Run) -> None:
    """Evaluates, logs, prints and saves the policy that is there, and the state."""
    number, minutes = run.learner.number, run.learner.seconds / 60
    seen = evaluate(run.learner, run.heldout, run.coder, run.config)
    if distributed.leads():
        board.show(run.log, number, seen, run.config.demo, OPENING, run.config.limit)
    print(
        f"words used on {len(run.heldout)} held-out instructions: {seen.words_used:.1%}\n    "
        + seen.demo.replace("\n", "\n    "),
        flush=True,
    )
    facts = {**run.facts, "step": number, "minutes": minutes, "words_used": seen.words_used, "kl": seen.kl}
    for name in (f"rollout-{number:04}.pt", "final.pt"):
        checkpoint.save(run.folder / name, run.learner.policy, facts)
    run.learner.evaluated, run.learner.used = number, seen.words_used
    training.write_state(run.folder / STATE, run.config, run.log, run.learner.state())


def spent(learner: Learner, config: Config) -> bool:
    """Whether the budget is used up."""
    return learner.seconds >= 60 * config.minutes or 0 < config.rollouts <= learner.number


def train(run: Run, session: Session) -> None:
    """The loop: write, score, update, until the budget is spent."""
    config, coder, learner = run.config, run.coder, run.learner
    history: list[dict[str, float]] = []
    warned: set[str] = set()
    if learner.evaluated < 0:
        evaluate_and_save(run)
    while not spent(learner, config):
        if session.asked:
            session.leave()
        began = time.monotonic()
        instructions = drawn_instructions(run.known, config.groups, config.group, learner.draws)
        batch = rollout(learner, instructions, coder, config)
        written = time.monotonic()
        metrics = {**rollout_metrics(batch, coder), **update(learner, batch, config)}
        learner.number += 1
        seconds = distributed.highest(time.monotonic() - began)  # so that all agree on the last rollout
        learner.seconds += seconds
        speed = {"speed/rollout_seconds": seconds, "speed/writing_seconds": written - began, "lr": config.lr}
        run.log.scalars(learner.number, {**metrics, **speed})
        print(
            f"rollout {learner.number}  {learner.seconds / 60:.1f} of {config.minutes:g} min"
            f"  reward {metrics['objective/scores']:.3f}  KL {metrics['objective/kl']:.2f}"
            f"  ended {metrics['stories/ended']:.0%}  length {metrics['stories/length']:.0f}",
            flush=True,
        )
        history.append({**metrics, "scores_spread": float(batch.scores.std(correction=0))})
        for name, text in board.warnings(history, config.limits).items():
            if name not in warned:
                print(f"warning: {name}: {text} (docs/metrics.md)", flush=True)
                warned.add(name)
        if learner.number % config.evaluate_every == 0 or spent(learner, config):
            run.log.text(learner.number, "samples", board.sample_table(samples(batch, coder)[: config.samples]))
            evaluate_and_save(run)
        elif session.asked:
            training.write_state(run.folder / STATE, config, run.log, learner.state())
            session.leave()
    if learner.evaluated != learner.number:  # resumed with a budget that was spent between two evaluations
        evaluate_and_save(run)
    print(
        f"{run.folder / 'final.pt'}: {learner.used:.1%} of the words used, after {learner.number} rollouts in "
        f"{learner.seconds / 60:.1f} minutes"
    )


def material(config: Config, policy: GPT, coder: Tokenizer) -> tuple[dict[int, list[Instruction]], list[Instruction]]:
    """Instructions to practise on, by length of their prompt, and held-out ones.

    Raises: UserError where the settings do not fit the model or the instructions, before anything is written.
    """
    context = policy.config.context
    if config.limit >= context:
        raise UserError(f"--limit {config.limit}: less than the model's context of {context} tokens")
    if not fits(policy, coder.prompt(tokenizer.story_request(config.demo))):
        raise UserError(f"--demo: {len(config.demo)} words do not fit the context of {context} tokens: give fewer")
    known = by_length(fitting_instructions(stories.TRAIN_INSTRUCTIONS, coder, context - config.limit))
    heldout = fitting_instructions(stories.HELDOUT_INSTRUCTIONS, coder, context - config.limit)[: config.evaluate_on]
    drawn_instructions(known, 1, config.group, runtime.generator(0))  # says it where there are too few
    return known, heldout


def main() -> None:
    config = runtime.parse(Config, __doc__)
    name = config.name or f"ppo-{config.kl_weight:g}"
    folder = checkpoint.FOLDER / name
    if config.model.resolve().parent == folder.resolve():
        raise UserError(f"--model {config.model}: a run replaces what is in {folder}; copy the model elsewhere first")
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    facts = {**runtime.machine_facts(device, config.precision, config.seed), "parent": str(config.model)}
    facts["kl_weight"] = config.kl_weight
    with training.session(folder / STATE) as session:
        state = training.read_state(folder / STATE, config, budget=("minutes", "rollouts")) if config.resume else None
        policy, _ = checkpoint.load(config.model, device, coder.vocabulary)
        known, heldout = material(config, policy, coder)
        learner = learner_for(policy, config)
        learner.inputs = training.fingerprint(checkpoint.fingerprint(policy.state_dict()), known, heldout)
        training.resume(learner, state, folder / STATE)
        with training.log_of(name, config, facts, state) as log:
            if state is None:
                training.clear(folder, "rollout-*.pt", "final.pt", STATE)
            if distributed.leads():
                log.board.add_custom_scalars(board.LAYOUT)
            train(Run(learner, coder, config, log, folder, facts, known, heldout), session)


if __name__ == "__main__":
    runtime.run(main)
