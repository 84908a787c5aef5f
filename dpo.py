"""DPO: of each pair of stories, makes the preferred one likelier than the other, measured from where the model started.

    python dpo.py           one pass over the pairs
    python dpo.py 2         two passes
    python dpo.py --resume

Reads `checkpoints/finetuned.pt` and `data/pairs.jsonl` (from `preferences.py`). Writes `checkpoints/dpo.pt` and
`runs/dpo-TIME/`.

Rafailov et al. 2023 (arXiv 2305.18290), but the pairs are written by the model itself and preferred by code. The
reference's log-probabilities are computed once, before the first step, by the policy, which is the reference then, and
in the minibatches that the steps use: the first loss is exactly log 2, in bfloat16, too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import checkpoint
import preferences
import runtime
import tokenizer
import training
from model import GPT, padded, token_log_probs
from preferences import Pair
from runtime import Checked, Count, Device, Log, Positive, Precision, Seed, UserError
from tokenizer import Tokenizer
from training import Guard, Learner, Session

STATE = checkpoint.FOLDER / "dpo-state.pt"


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of a DPO run."""

    # Over the pairs; more than one learns them by heart.
    passes: Annotated[Count, tyro.conf.Positional, tyro.conf.arg(metavar="PASSES")] = 1
    resume: bool = False  # go on with a run that was stopped
    beta: Positive = 0.1  # the lower, the further from the reference a preference may pull; usual: 0.05 to 0.5
    minibatch: Count = 16  # pairs a step
    lr: Positive = 1e-5  # usual: 5e-7 to 5e-5, the higher for the smaller models
    max_norm: Positive = 1.0  # of the gradient, clipped there
    print_every: Count = 10  # steps
    save_every: Count = 50  # steps between states that --resume can go on from
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    model: Path = checkpoint.FINETUNED
    pairs: Path = preferences.PAIRS


def answer_log_probs(model: GPT, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Tensor:
    """(B,) log-probability, nats, of each whole answer after its prompt; its end of text counts."""
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    counts = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids, mask = padded(rows, counts, model.device)
    return token_log_probs(model, ids, mask).sum(1)


def pair_log_probs(model: GPT, pairs: Sequence[Pair], coder: Tokenizer) -> tuple[Tensor, Tensor]:
    """(B,) log-probabilities, nats, of the chosen and the rejected stories, from one forward pass."""
    prompts = [coder.prompt(tokenizer.story_request(pair.words)) for pair in pairs]
    both = answer_log_probs(model, prompts * 2, [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs])
    return both[: len(pairs)], both[len(pairs) :]


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """DPO loss of each pair, and the implicit rewards of its chosen and its rejected answer, (B,) each.

    policy_chosen, policy_rejected: (B,) log-probability of the answers under the policy, nats.
    reference_chosen, reference_rejected: (B,) the same under the reference.
    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7; the rewards are those of section 4 without the term
    that depends on the prompt alone.
    """
    shapes = {tuple(side.shape) for side in (policy_chosen, policy_rejected, reference_chosen, reference_rejected)}
    assert len(shapes) == 1, shapes  # (B,) against (B, 1) would broadcast to every pair with every other in silence
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    return -F.logsigmoid(chosen - rejected), chosen, rejected


def fitting(pairs: Sequence[Pair], coder: Tokenizer, context: int) -> list[Pair]:
    """The pairs of which both stories fit the context behind their prompt.

    Raises: UserError where none does.
    """
    kept = [
        pair
        for pair in pairs
        if len(coder.prompt(tokenizer.story_request(pair.words))) + max(len(pair.chosen), len(pair.rejected)) <= context
    ]
    if not kept:
        raise UserError(f"none of the {len(pairs)} pairs fits the context of {context} tokens: python preferences.py")
    return kept


def step_metrics(loss: Tensor, chosen: Tensor, rejected: Tensor, log_probs: tuple[Tensor, Tensor]) -> dict[str, float]:
    """What one step logs, means over its pairs. chosen, rejected: (B,) rewards. log_probs: (B,) each, of the policy."""
    margin = chosen - rejected
    return {
        "loss/dpo": loss.item(),
        "rewards/accuracies": (margin > 0).float().mean().item(),
        "rewards/margins": margin.mean().item(),
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "logps/chosen": log_probs[0].mean().item(),
        "logps/rejected": log_probs[1].mean().item(),
    }


def minibatches_of(pairs: Sequence[Pair], config: Config) -> list[list[Pair]]:
    """The pairs, shuffled once, in minibatches: their reference is computed in the shapes that the steps use."""
    rows = torch.randperm(len(pairs), generator=runtime.generator(config.seed, 1))
    return [[pairs[row] for row in part.tolist()] for part in torch.split(rows, config.minibatch)]


@torch.no_grad()
def reference_log_probs(
    policy: GPT, minibatches: Sequence[Sequence[Pair]], coder: Tokenizer, config: Config
) -> list[tuple[Tensor, Tensor]]:
    """(B,) log-probabilities of the chosen and rejected stories of each minibatch, nats, before the first step."""
    with runtime.autocast(policy.device, config.precision):
        bar = tqdm(minibatches, desc="reference", unit="batch", disable=None)
        return [pair_log_probs(policy, minibatch, coder) for minibatch in bar]


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same throughout a run."""

    coder: Tokenizer
    config: Config
    log: Log
    minibatches: list[list[Pair]]
    reference: list[tuple[Tensor, Tensor]]  # of each minibatch


def run_of(policy: GPT, pairs: Sequence[Pair], coder: Tokenizer, config: Config, log: Log) -> Run:
    """A run that starts at `policy`, which is its own reference."""
    minibatches = minibatches_of(pairs, config)
    reference = reference_log_probs(policy.eval(), minibatches, coder, config)
    return Run(coder, config, log, minibatches, reference)


def learner_for(policy: GPT, config: Config) -> Learner:
    """The policy with its optimizer."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    return Learner(policy, Guard(optimizer, config.max_norm))


def train(run: Run, learner: Learner, session: Session) -> dict[str, float]:
    """Trains the policy in place, dropout off; returns the metrics of the last step it took, none if all were done."""
    config, coder, log, minibatches, reference = run.config, run.coder, run.log, run.minibatches, run.reference
    policy, guard = learner.model.eval(), learner.guard
    metrics: dict[str, float] = {}
    steps = config.passes * len(minibatches)
    shuffling = runtime.generator(config.seed, 2)
    order = [
        index for _ in range(config.passes) for index in torch.randperm(len(minibatches), generator=shuffling).tolist()
    ]
    for index in order[learner.step :]:
        began = time.monotonic()
        with runtime.autocast(policy.device, config.precision):
            log_probs = pair_log_probs(policy, minibatches[index], coder)
        (policy_chosen, policy_rejected), (reference_chosen, reference_rejected) = log_probs, reference[index]
        losses, chosen, rejected = dpo_loss(
            policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta=config.beta
        )
        loss = losses.mean()
        guard.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = guard.step(loss)
        learner.step += 1
        learner.seconds += time.monotonic() - began
        if norm is not None:
            metrics = step_metrics(loss, chosen, rejected, log_probs)
        counted = {"skipped_steps": guard.skipped, "lr": config.lr}
        log.scalars(learner.step, counted if norm is None else {**metrics, "grad_norm": norm, **counted})
        if norm is not None and (learner.step % config.print_every == 0 or learner.step in (1, steps)):
            minutes = learner.seconds / learner.step * (steps - learner.step) / 60
            print(
                f"step {learner.step}/{steps}  loss {metrics['loss/dpo']:.4f}"
                f"  accuracy {metrics['rewards/accuracies']:.2f}  margin {metrics['rewards/margins']:.3f}"
                f"  {minutes:.0f} min left",
                flush=True,
            )
        stops = session.asked and learner.step < steps
        if learner.step % config.save_every == 0 or learner.step == steps or stops:
            training.write_state(STATE, config, log, learner.state())
        if stops:
            session.leave()
    if guard.skipped == steps:
        raise UserError("every step had a loss that is no number: nothing was saved; lower --lr")
    return metrics


def main() -> None:
    config = runtime.parse(Config, __doc__)
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    facts: dict[str, Any] = runtime.machine_facts(device, config.precision, config.seed)
    facts["parent"] = str(config.model)
    with training.session(STATE) as session:
        state = training.read_state(STATE, config) if config.resume else None
        policy, _ = checkpoint.load(config.model, device, coder.vocabulary)
        read = preferences.read_pairs(config.pairs, coder)
        pairs = fitting(read, coder, policy.config.context)
        print(f"{len(pairs):,} pairs, {len(read) - len(pairs):,} dropped as longer than the context")
        learner = learner_for(policy, config)
        learner.inputs = training.fingerprint(checkpoint.fingerprint(policy.state_dict()), pairs)
        with training.log_of("dpo", config, facts, state) as log:
            run = run_of(policy, pairs, coder, config, log)
            training.resume(learner, state, STATE)
            if state is None:
                training.clear(STATE.parent, STATE.name)
            metrics = train(run, learner, session)
        if not metrics:
            print(f"{checkpoint.DPO}: the run was finished already")
            return
        seen = {"pairs": len(pairs), "passes": config.passes, "step": learner.step}
        checkpoint.save(checkpoint.DPO, policy, {**facts, **seen, **metrics})
    skipped = f"; {learner.guard.skipped} steps without a finite loss skipped" if learner.guard.skipped else ""
    print(f"{checkpoint.DPO}: {metrics['rewards/accuracies']:.0%} of the last step's pairs ranked right{skipped}")


if __name__ == "__main__":
    runtime.run(main)
