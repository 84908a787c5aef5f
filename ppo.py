"""PPO: the model writes stories, a reward counts the requested words, and what did better than expected gets likelier.

    python ppo.py               10 minutes at a KL weight of 0.05
    python ppo.py 10 0.5        held closer to where it started
    python ppo.py 0 0.05        evaluates, saves and stops

Reads `checkpoints/finetuned.pt` and `data/instructions-*.jsonl`. Writes `checkpoints/ppo-KL/rollout-0000.pt, ...,
final.pt` and `runs/ppo-KL-TIME/`.

Schulman et al. 2017 (arXiv 1707.06347), as InstructGPT uses it (Ouyang et al. 2022, arXiv 2203.02155), and it differs
there:
1. the reward is code that counts words, in place of a reward model;
2. the penalty for leaving the reference is a term of the loss (k3), in place of a part of each token's reward;
3. the critic is one linear layer on the policy's own channels, and its gradient stops there;
4. no pre-training loss is mixed in.
"""

import copy
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import tyro
from torch import Tensor, nn

import checkpoint
import runtime
import stories
import tokenizer
from model import GPT, token_log_probs
from runtime import Device, Log, Precision, UserError
from sample import Completion, generate, packed
from tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a PPO run."""

    minutes: Annotated[float, tyro.conf.Positional] = (
        10.0  # budget; the rollout that is under way at its end is finished
    )
    kl_weight: Annotated[float, tyro.conf.Positional] = 0.05  # of the KL in the loss; usual: 0.01 to 0.5
    groups: int = 16  # groups of instructions a rollout, each of one prompt length
    group: int = 8  # different instructions a group: 16 x 8 = 128 stories a rollout
    limit: int = 200  # tokens of a story
    epochs: int = 2  # passes over a rollout; usual: 1 to 4
    minibatch: int = 16  # stories a step
    clip: float = 0.2  # how far a token's probability may move in a rollout before pushing it on gains nothing
    gamma: float = 1.0  # discount: the reward comes once, so a word early in a story is worth the same
    lam: float = 1.0  # of GAE; at 0.95 the start of a 200-token story would get e^-10 of the credit
    value_weight: float = 0.5  # of the critic's squared error in the loss
    lr: float = 1e-5  # usual: 1e-6 to 3e-5
    critic_lr: float = 1e-3  # a linear layer that starts at zero learns nothing in ten minutes at the policy's rate
    max_norm: float = 1.0  # of the gradient, clipped there
    evaluate_every: int = 10  # rollouts
    evaluate_on: int = 50  # held-out instructions
    samples: int = 6  # stories of a rollout shown in TensorBoard
    demo: tuple[str, ...] = ("rain", "cake", "jump")  # words of the story printed at each evaluation
    demo_limit: int = 120  # tokens of that story
    seed: int = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED

    def __post_init__(self) -> None:
        if not (0 <= self.minutes < math.inf):
            raise ValueError(f"MINUTES {self.minutes}: 0 or more")
        if not (0 <= self.kl_weight < math.inf):
            raise ValueError(f"KL {self.kl_weight}: 0 or more")
        for name in ("groups", "group", "limit", "epochs", "minibatch", "evaluate_every", "evaluate_on"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Words to use and the prompt that asks for them."""

    words: tuple[str, ...]
    prompt: list[int]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Stories as they were written, and what the update compares against. Position t predicts token t+1."""

    instructions: list[Instruction]  # B
    completions: list[Completion]  # B
    ids: Tensor  # (B, T) prompts and stories, padded behind
    mask: Tensor  # (B, T-1) bool, true at t where token t+1 belongs to the story
    scores: Tensor  # (B,) share of the requested words each story uses
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


def read_by_length(path: Path, coder: Tokenizer, longest: int) -> dict[int, list[Instruction]]:
    """Instructions by the length of their prompt in tokens, those of up to `longest`."""
    by_length: dict[int, list[Instruction]] = {}
    for words in stories.read_instructions(path):
        prompt = coder.prompt(tokenizer.story_request(words))
        if len(prompt) <= longest:
            by_length.setdefault(len(prompt), []).append(Instruction(words, prompt))
    return by_length


def drawn_instructions(
    by_length: dict[int, list[Instruction]], groups: int, group: int, generator: torch.Generator
) -> list[Instruction]:
    """groups x group instructions: for each group a random prompt length, then different instructions of that length.

    Raises: UserError where no length has enough of them.
    """
    lengths = sorted(length for length, known in by_length.items() if len(known) >= group)
    if not lengths:
        raise UserError(f"{stories.TRAIN_INSTRUCTIONS} has no {group} instructions of one length: lower --group")
    drawn = []
    for _ in range(groups):
        known = by_length[lengths[int(torch.randint(len(lengths), (), generator=generator))]]
        drawn += [known[index] for index in torch.randperm(len(known), generator=generator)[:group].tolist()]
    return drawn


def score(wanted: Instruction, story: Completion, coder: Tokenizer) -> float:
    """The reward: share of the requested words, 0 to 1, that the story uses before its end of text."""
    return stories.words_used(coder.answer_text(story.ids), wanted.words)


def last_positions(mask: Tensor) -> Tensor:
    """(B,) the last position of each row where `mask` (B, T-1) is true."""
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


def token_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """(B, T-1) rewards: the story's score (B,) on its last token, 0 elsewhere."""
    rewards = torch.zeros(mask.shape, device=mask.device)
    rewards[torch.arange(len(scores), device=mask.device), last_positions(mask)] = scores.float()
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
    """What a run trains, and what it is held to."""

    policy: GPT
    reference: GPT
    critic: Critic
    hidden: Hidden  # of the policy
    optimizer: torch.optim.AdamW


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
    return Learner(policy, reference, critic, Hidden(policy), optimizer)


def policy_outputs(learner: Learner, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and values, (B, T-1), of one forward pass of the policy."""
    log_probs = token_log_probs(learner.policy, ids, mask)
    return log_probs, learner.critic(learner.hidden.channels)


@torch.no_grad()
def rollout(
    learner: Learner, instructions: list[Instruction], coder: Tokenizer, config: Config, generator: torch.Generator
) -> Rollout:
    """A story for each instruction, its score, and the log-probabilities and values that the update compares against.

    No top-k: PPO compares probabilities under the full distribution, so the stories must be drawn from it.
    """
    prompts = [instruction.prompt for instruction in instructions]
    with runtime.autocast(learner.policy.device, config.precision):
        completions = generate(learner.policy, prompts, end=coder.end, limit=config.limit, generator=generator)
        ids, mask = packed(completions, learner.policy.device)
        # In the update's batch shapes, so that in bfloat16, too, the first ratio is 1.
        parts = list(zip(torch.split(ids, config.minibatch), torch.split(mask, config.minibatch), strict=True))
        log_probs, values = map(torch.cat, zip(*(policy_outputs(learner, *part) for part in parts), strict=True))
        reference = torch.cat([token_log_probs(learner.reference, *part) for part in parts])
    scores = [score(wanted, story, coder) for wanted, story in zip(instructions, completions, strict=True)]
    return Rollout(
        instructions, completions, ids, mask, torch.tensor(scores, device=ids.device), log_probs, reference, values
    )


def update(learner: Learner, batch: Rollout, config: Config, generator: torch.Generator) -> dict[str, float]:
    """Two passes of clipped updates over a rollout, in place; returns their metrics, means over minibatches."""
    mask = batch.mask
    rewards = token_rewards(batch.scores, mask)
    raw, returns = advantages_and_returns(rewards, batch.values, mask, config.gamma, config.lam)
    advantages = normalised(raw, mask)
    weights = [weight for group in learner.optimizer.param_groups for weight in group["params"]]
    seen: list[dict[str, float]] = []
    skipped = 0
    for _ in range(config.epochs):
        order = torch.randperm(len(mask), generator=generator).to(mask.device)
        for rows in torch.split(order, config.minibatch):
            with runtime.autocast(learner.policy.device, config.precision):
                log_probs, values = policy_outputs(learner, batch.ids[rows], mask[rows])
            log_ratio = (log_probs - batch.log_probs[rows]).clamp(-20.0, 20.0)
            ratio = log_ratio.exp()
            policy_loss = masked_mean(clipped_loss(ratio, advantages[rows], config.clip), mask[rows])
            value_loss = masked_mean((values - returns[rows]) ** 2, mask[rows])
            kl_loss = masked_mean(k3(log_probs, batch.reference[rows]), mask[rows])
            loss = policy_loss + config.value_weight * value_loss + config.kl_weight * kl_loss
            learner.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(weights, config.max_norm)
            if not (loss.isfinite() and norm.isfinite()):  # a clamped NaN has a finite gradient: both are asked
                skipped += 1
                continue
            learner.optimizer.step()
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
                        "grad_norm": norm.item(),
                    }
                )
    if not seen:
        raise UserError(
            "every step of a rollout had a loss that is no number: the last checkpoint is whole; lower --lr"
        )
    metrics = {name: sum(step[name] for step in seen) / len(seen) for name in seen[0]}
    metrics["policy/ratio_max"] = max(step["policy/ratio_max"] for step in seen)
    metrics["policy/ratio_error_first"] = seen[0]["policy/ratio_error_first"]
    return {
        **metrics,
        "value/explained_variance": explained_variance(batch.values, returns, mask),
        "skipped_steps": skipped,
    }


def rollout_metrics(batch: Rollout) -> dict[str, float]:
    """What a rollout's stories say of the policy that wrote them."""
    told = [story.ids for story in batch.completions]
    pairs = [pair for ids in told for pair in itertools.pairwise(ids)]
    return {
        "objective/scores": batch.scores.mean().item(),
        "objective/kl": story_kl(batch).mean().item(),
        "objective/entropy": -masked_mean(batch.log_probs, batch.mask).item(),
        "stories/ended": sum(story.ended for story in batch.completions) / len(told),
        "stories/length": sum(map(len, told)) / len(told),
        "stories/distinct_2": len(set(pairs)) / max(1, len(pairs)),
    }


def story_kl(batch: Rollout) -> Tensor:
    """(B,) KL of the policy from the reference for each story, nats: the sum of its tokens' log-ratios."""
    return (batch.log_probs - batch.reference).masked_fill(~batch.mask, 0.0).sum(1)


def sample_table(batch: Rollout, coder: Tokenizer, number: int) -> str:
    """The rollout's first stories as a Markdown table."""
    rows = ["| instruction | story | words used | KL |", "| --- | --- | --- | --- |"]
    for wanted, story, score, kl in list(
        zip(batch.instructions, batch.completions, batch.scores, story_kl(batch), strict=True)
    )[:number]:
        text = runtime.markdown(coder.answer_text(story.ids))
        rows.append(f"| {runtime.markdown(', '.join(wanted.words))} | {text} | {score:.0%} | {kl:.1f} |")
    return "\n".join(rows)


@torch.no_grad()
def evaluate(
    learner: Learner, heldout: list[Instruction], coder: Tokenizer, config: Config
) -> tuple[float, float, str]:
    """Words used on held-out instructions, 0 to 1, those stories' mean KL, nats, and the demo story; the same draws."""
    with runtime.autocast(learner.policy.device, config.precision):
        prompts = [wanted.prompt for wanted in heldout]
        source = runtime.generator(config.seed, 2)
        told = generate(learner.policy, prompts, end=coder.end, limit=config.limit, generator=source)
        ids, mask = packed(told, learner.policy.device)
        apart = 0.0
        for part in zip(torch.split(ids, config.minibatch), torch.split(mask, config.minibatch), strict=True):
            apart += (token_log_probs(learner.policy, *part) - token_log_probs(learner.reference, *part)).sum().item()
        prompt = coder.prompt(tokenizer.story_request(config.demo))
        source = runtime.generator(config.seed, 3)
        demo = generate(learner.policy, [prompt], end=coder.end, limit=config.demo_limit, generator=source)[0]
    scores = [score(wanted, story, coder) for wanted, story in zip(heldout, told, strict=True)]
    return sum(scores) / len(scores), apart / len(told), coder.answer_text(demo.ids)


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same throughout a run."""

    learner: Learner
    coder: Tokenizer
    config: Config
    log: Log
    folder: Path  # of its checkpoints
    facts: dict[str, Any]  # of each of them


def evaluated(run: Run, heldout: list[Instruction], number: int, minutes: float) -> float:
    """Evaluates, logs, prints and saves the policy after rollout `number`; returns the share of words used, 0 to 1."""
    used, kl, demo = evaluate(run.learner, heldout, run.coder, run.config)
    run.log.scalars(number, {"eval/words_used": used, "eval/kl": kl})
    run.log.text(number, "demo", runtime.markdown(demo))
    print(
        f"words used on {len(heldout)} held-out instructions: {used:.1%}\n    " + demo.replace("\n", "\n    "),
        flush=True,
    )
    facts = {**run.facts, "step": number, "minutes": minutes, "words_used": used, "kl": kl}
    for name in (f"rollout-{number:04}.pt", "final.pt"):
        checkpoint.save(run.folder / name, run.learner.policy, facts)
    return used


def train(run: Run) -> None:
    """The loop: write, score, update, until the minutes are spent."""
    config, coder, learner = run.config, run.coder, run.learner
    room = learner.policy.config.context - config.limit
    known = read_by_length(stories.TRAIN_INSTRUCTIONS, coder, room)
    heldout = [wanted for same in read_by_length(stories.HELDOUT_INSTRUCTIONS, coder, room).values() for wanted in same]
    heldout = heldout[: config.evaluate_on]
    if not heldout:
        raise UserError(
            f"no line of {stories.HELDOUT_INSTRUCTIONS} leaves room for --limit {config.limit} tokens: lower it"
        )
    draws, writing, shuffling = (runtime.generator(config.seed, stream) for stream in (10, 11, 12))
    number, spent = 0, 0.0  # rollouts, seconds
    used = evaluated(run, heldout, number, spent)
    while spent < 60 * config.minutes:
        began = time.monotonic()
        instructions = drawn_instructions(known, config.groups, config.group, draws)
        batch = rollout(learner, instructions, coder, config, writing)
        written = time.monotonic()
        metrics = {**rollout_metrics(batch), **update(learner, batch, config, shuffling)}
        number += 1
        seconds = time.monotonic() - began
        spent += seconds
        speed = {"speed/rollout_seconds": seconds, "speed/writing_seconds": written - began, "lr": config.lr}
        run.log.scalars(number, {**metrics, **speed})
        print(
            f"rollout {number}  {spent / 60:.1f} min  reward {metrics['objective/scores']:.3f}"
            f"  KL {metrics['objective/kl']:.2f}  ended {metrics['stories/ended']:.0%}"
            f"  length {metrics['stories/length']:.0f}",
            flush=True,
        )
        if number % config.evaluate_every == 0 or spent >= 60 * config.minutes:
            run.log.text(number, "samples", sample_table(batch, coder, config.samples))
            used = evaluated(run, heldout, number, spent / 60)
    print(
        f"{run.folder / 'final.pt'}: {used:.1%} of the words used, after {number} rollouts in {spent / 60:.1f} minutes"
    )


def main() -> None:
    config = runtime.parse(Config, __doc__)
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    policy, _ = checkpoint.load(config.model, device)
    if config.limit >= policy.config.context:
        raise UserError(f"--limit {config.limit}: less than the model's context of {policy.config.context} tokens")
    facts = {**runtime.machine_facts(device, config.precision, config.seed), "parent": str(config.model)}
    name = f"ppo-{config.kl_weight:g}"
    log = Log(runtime.run_folder(name), config, facts)
    facts["kl_weight"] = config.kl_weight
    train(Run(learner_for(policy, config), coder, config, log, checkpoint.FOLDER / name, facts))
    log.close()


if __name__ == "__main__":
    runtime.run(main)
