"""Pre-trains the GPT on plain stories.

    python train.py             2.5 passes over the stories; about an hour on two slow cores
    python train.py 1           1 pass
    python train.py --resume    goes on with a run that was stopped, or on to more passes

Reads `data/tokens-train.npy` and `data/tokens-heldout.npy` (from `prepare.py`). Writes `checkpoints/base.pt`, the
weights with the lowest held-out loss, `checkpoints/base-state.pt`, from which `--resume` goes on, and
`runs/train-TIME/`.

Each pass cuts the stream of stories at a new offset into windows of the context's length, and takes them in random
order. The learning rate rises for a short while and then falls linearly to zero at the end of the last pass.
Source: Radford et al. 2019 (GPT-2), at the scale of TinyStories (Eldan and Li 2023, arXiv 2305.07759).
"""

import dataclasses
import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from tqdm import tqdm

import checkpoint
import runtime
import training
from model import GPT, ModelConfig, mean_loss, token_log_probs
from runtime import Checked, Count, Device, Log, Passes, Positive, Precision, Seed, Share, UserError
from training import Guard, Learner, Session

STATE = checkpoint.FOLDER / "base-state.pt"
Ids = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint16]]


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of a pre-training run."""

    # Over the stories; more fit them better until the held-out loss turns.
    passes: Annotated[Passes, tyro.conf.Positional, tyro.conf.arg(metavar="PASSES")] = 2.5
    resume: bool = False  # go on with a run that was stopped, or with a finished one to more passes
    batch: Count = 8  # windows a step: small, as few tokens are seen in all
    lr: Positive = 2e-3  # at its peak; usual for this size: 5e-4 to 3e-3
    warmup: Annotated[int, runtime.at_least(0)] = 100  # steps of rising learning rate
    weight_decay: Annotated[float, runtime.NOT_NEGATIVE] = 0.1  # on matrices only, as in GPT-3
    beta2: Share = 0.95  # of Adam; 0.999 remembers longer than these runs last
    max_norm: Positive = 1.0  # of the gradient, clipped there
    evaluate_every: Count = 200  # steps
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    train: Path = Path("data/tokens-train.npy")
    heldout: Path = Path("data/tokens-heldout.npy")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)


def read_tokens(path: Path, config: Config) -> Ids:
    """The stream of ids at `path`.

    Raises: UserError where it is missing, not a token file, damaged, shorter than a batch, or of a larger vocabulary
    than the model's.
    """
    try:
        with path.open("rb") as file:
            tokens: Ids = numpy.load(file)
            digest = file.read()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: python prepare.py makes it") from None
    except (ValueError, OSError, EOFError):
        raise UserError(f"{path} is not a token file: python prepare.py makes it anew") from None
    if not isinstance(tokens, numpy.ndarray) or tokens.dtype.kind not in "iu":
        raise UserError(f"{path} is not a token file: python prepare.py makes it anew")
    if digest and digest != hashlib.sha256(tokens.tobytes()).digest():
        raise UserError(f"{path} is damaged: its tokens are not those that were written; python prepare.py anew")
    if tokens.ndim != 1 or len(tokens) <= config.model.context + 1:
        raise UserError(
            f"{path} has too few tokens for one window of {config.model.context}: pass prepare.py more stories"
        )
    if int(tokens.max()) >= config.model.vocabulary:
        raise UserError(
            f"{path} has id {tokens.max()}, the model {config.model.vocabulary} tokens: python prepare.py makes it anew"
        )
    if not digest:
        print(f"{path} has no checksum, as files written before December 2026: not checked", file=sys.stderr)
    return tokens


def windows(tokens: Ids, context: int, seed: int, number: int) -> Ids:
    """(N, context + 1) windows of one pass in random order; pass `number` has its own offset and order.

    The last token of a window is the first of the next, so that each token but the first is predicted once a pass.
    """
    rng = numpy.random.default_rng([seed, number])
    offset = int(rng.integers(min(context, len(tokens) - context - 1)))
    count = (len(tokens) - offset - 1) // context
    starts = offset + context * rng.permutation(count)
    picked: Ids = tokens[starts[:, None] + numpy.arange(context + 1)]
    return picked


def batches(tokens: Ids, config: Config, first: int) -> Iterator[torch.Tensor]:
    """(B, context + 1) batches of pass after pass, from step `first` on; a pass's incomplete last batch is left out."""
    a_pass = steps_of_a_pass(len(tokens), config)
    step = first
    while True:
        order = windows(tokens, config.model.context, config.seed, step // a_pass)
        while True:
            start = step % a_pass * config.batch
            yield torch.from_numpy(order[start : start + config.batch].astype(numpy.int64))
            step += 1
            if step % a_pass == 0:
                break


def steps_of_a_pass(tokens: int, config: Config) -> int:
    """Full batches that any offset leaves in a pass.

    Raises: UserError where not even one is left.
    """
    steps = (tokens - config.model.context - 1) // config.model.context // config.batch
    if steps < 1:
        raise UserError(
            f"{config.train} has {tokens:,} tokens, too few for a batch: pass prepare.py more stories or lower --batch"
        )
    return steps


def train(
    learner: Learner, tokens: Ids, heldout: Ids, config: Config, log: Log, facts: dict[str, Any], session: Session
) -> None:
    """Trains the model in place; keeps its best weights at `checkpoint.BASE`."""
    model, guard = learner.model, learner.guard
    rows = [row.tolist() for row in windows(heldout, config.model.context, config.seed, 0)]
    counts = [[True] * len(row) for row in rows]
    everywhere = torch.ones(config.batch, config.model.context, dtype=torch.bool, device=model.device)
    steps = max(1, round(config.passes * steps_of_a_pass(len(tokens), config)))
    source = batches(tokens, config, learner.step)
    bar = tqdm(total=steps, initial=learner.step, desc="train", unit="step", disable=None)
    began, first = time.monotonic(), learner.step
    while learner.step < steps:
        ids = next(source).to(model.device)  # (B, context + 1)
        lr = training.linear_rate(learner.step, steps, config.warmup, config.lr)
        training.set_rate(guard.optimizer, lr)
        model.train()
        with runtime.autocast(model.device, config.precision):
            loss = -token_log_probs(model, ids, everywhere).mean()
        guard.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = guard.step(loss)
        if norm is not None:
            learner.seen.append(loss.item())
        learner.step += 1
        bar.update()
        evaluates = learner.step % config.evaluate_every == 0 or learner.step == steps
        if not evaluates and not session.asked:
            continue
        seconds = time.monotonic() - began
        learner.seconds += seconds
        if evaluates:
            model.eval()
            with runtime.autocast(model.device, config.precision):
                loss_heldout = mean_loss(model, rows, counts, config.batch)
            speed = (learner.step - first) * ids[:, 1:].numel() / seconds
            bar.write(training.logged_evaluation(learner, steps, log, loss_heldout, lr, norm, speed))
            if learner.best is None or loss_heldout < learner.best:
                learner.best = loss_heldout
                passes = learner.step / steps_of_a_pass(len(tokens), config)
                where = {"step": learner.step, "heldout_loss": loss_heldout, "passes": passes}
                checkpoint.save(checkpoint.BASE, model, {**facts, **where})
        training.write_state(STATE, config, log, learner.state())
        if session.asked and learner.step < steps:
            session.leave()
        began, first = time.monotonic(), learner.step
    bar.close()
    if learner.best is None or learner.step > steps:
        raise UserError(f"PASSES {config.passes:g}: the run has had {learner.step} of its {steps} steps; give more")


def main() -> None:
    config = runtime.parse(Config, __doc__)
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    tokens, heldout_tokens = read_tokens(config.train, config), read_tokens(config.heldout, config)
    steps_of_a_pass(len(tokens), config)  # says what is wrong before anything is written
    facts = {**runtime.machine_facts(device, config.precision, config.seed), "parent": None}
    with training.session(STATE) as session:
        state = training.read_state(STATE, config, budget=("passes",)) if config.resume else None
        model = GPT(config.model).to(device)
        optimizer = training.adamw(model, config.lr, config.beta2, config.weight_decay)
        learner = Learner(model, Guard(optimizer, config.max_norm))
        learner.inputs = training.fingerprint(tokens.tobytes(), heldout_tokens.tobytes())
        training.resume(learner, state, STATE)
        with training.log_of("train", config, facts, state) as log:
            if state is None:
                training.clear(STATE.parent, STATE.name)
            train(learner, tokens, heldout_tokens, config, log, facts, session)
    print(f"{checkpoint.BASE}: {learner.best:.3f} nats a token on held-out stories")


if __name__ == "__main__":
    runtime.run(main)
