"""Pre-trains the GPT on plain stories.

    python train.py             4 passes over the stories; hours on two cores, see docs/results.md
    python train.py 1           1 pass
    python train.py --resume    goes on from the last evaluation of a run that stopped

Reads `data/tokens-train.npy` and `data/tokens-heldout.npy` (from `prepare.py`). Writes `checkpoints/base.pt`, the
weights with the lowest held-out loss, `checkpoints/base-state.pt`, from which `--resume` goes on, and
`runs/train-TIME/`.

Each pass cuts the stream of stories at a new offset into windows of the context's length, and takes them in random
order. The learning rate rises for a short while and then falls linearly to zero at the end of the last pass.
Source: Radford et al. 2019 (GPT-2), at the scale of TinyStories (Eldan and Li 2023, arXiv 2305.07759).
"""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from torch.nn import functional as F

import checkpoint
import runtime
from model import GPT, ModelConfig, mean_loss
from runtime import Device, Log, Precision, UserError

STATE = checkpoint.FOLDER / "base-state.pt"
Ids = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint16]]


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a pre-training run."""

    passes: Annotated[float, tyro.conf.Positional] = (
        4.0  # over the stories; more fit them better until the held-out loss turns
    )
    resume: bool = False  # go on from the last evaluation of a run that stopped
    batch: int = 8  # windows a step: small, as few tokens are seen in all
    lr: float = 1.5e-3  # at its peak; usual for this size: 5e-4 to 3e-3
    warmup: int = 100  # steps of rising learning rate
    weight_decay: float = 0.1  # on matrices only, as in GPT-3
    beta2: float = 0.95  # of Adam; 0.999 remembers longer than these runs last
    max_norm: float = 1.0  # of the gradient, clipped there
    evaluate_every: int = 200  # steps
    seed: int = 1
    device: Device = "auto"
    precision: Precision = "auto"
    train: Path = Path("data/tokens-train.npy")
    heldout: Path = Path("data/tokens-heldout.npy")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        if not 0 < self.passes < 1000:
            raise ValueError(f"PASSES {self.passes}: more than 0")
        limits = (("batch", self.batch, 1), ("warmup", self.warmup, 0), ("evaluate-every", self.evaluate_every, 1))
        for flag, value, least in limits:
            if value < least:
                raise ValueError(f"--{flag} {value}: at least {least}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr {self.lr}: more than 0")


def read_tokens(path: Path, config: Config) -> Ids:
    """The stream of ids at `path`.

    Raises: UserError where it is missing, not a token file, shorter than a batch, or of a larger vocabulary than the
    model's.
    """
    try:
        tokens: Ids = numpy.load(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: python prepare.py makes it") from None
    except (ValueError, OSError, EOFError):
        raise UserError(f"{path} is not a token file: python prepare.py makes it anew") from None
    if not isinstance(tokens, numpy.ndarray) or tokens.dtype.kind not in "iu":
        raise UserError(f"{path} is not a token file: python prepare.py makes it anew")
    if tokens.ndim != 1 or len(tokens) <= config.model.context + 1:
        raise UserError(
            f"{path} has too few tokens for one window of {config.model.context}: pass prepare.py more stories"
        )
    if int(tokens.max()) >= config.model.vocabulary:
        raise UserError(
            f"{path} has id {tokens.max()}, the model {config.model.vocabulary} tokens: python prepare.py makes it anew"
        )
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


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Rate of a step: rises linearly over `warmup` steps, then falls linearly to 0 behind the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)


def optimizer_for(model: GPT, config: Config) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), fused=True)


def train(
    model: GPT,
    tokens: Ids,
    heldout_tokens: Ids,
    config: Config,
    log: Log,
    facts: dict[str, Any],
    state: dict[str, Any] | None,
) -> float:
    """Trains the model in place, keeps its best weights at `checkpoint.BASE`; returns their held-out loss, nats."""
    rows = [row.tolist() for row in windows(heldout_tokens, config.model.context, config.seed, 0)]
    counts = [[True] * len(row) for row in rows]
    optimizer = optimizer_for(model, config)
    step, best, spent = 0, float("inf"), 0.0
    if state is not None:
        model.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        step, best, spent = state["step"], state["best"], state["seconds"]
    steps = max(1, round(config.passes * steps_of_a_pass(len(tokens), config)))
    start = time.monotonic() - spent
    source = batches(tokens, config, step)
    first = step
    began = time.monotonic()
    losses: list[torch.Tensor] = []
    while step < steps:
        ids = next(source).to(model.device)  # (B, context + 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config.warmup, config.lr)
        model.train()
        with runtime.autocast(model.device, config.precision):
            logits = model(ids[:, :-1])  # (B, context, V)
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        losses.append(loss.detach())
        step += 1
        if step % config.evaluate_every and step < steps:
            continue
        model.eval()
        speed = (step - first) * ids.numel() / (time.monotonic() - began)
        with runtime.autocast(model.device, config.precision):
            heldout = mean_loss(model, rows, counts, config.batch)
        seconds = time.monotonic() - start
        mean = torch.stack(losses).mean().item()
        metrics = {
            "loss/train": mean,
            "loss/heldout": heldout,
            "grad_norm": float(norm),
            "speed/tokens_per_second": speed,
        }
        log.scalars(step, {**metrics, "lr": optimizer.param_groups[0]["lr"]})
        left = (steps - step) * seconds / step / 60
        print(
            f"step {step}/{steps}  loss {mean:.3f}  held out {heldout:.3f}  {speed:,.0f} tokens/s  {left:.0f} min left",
            flush=True,
        )
        if heldout < best:
            best = heldout
            checkpoint.save(
                checkpoint.BASE,
                model,
                {**facts, "step": step, "heldout_loss": heldout, "passes": step * ids.numel() / len(tokens)},
            )
        checkpoint.write(
            STATE,
            {
                "weights": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                **{"step": step, "best": best, "seconds": seconds, "config": str(config.model)},
            },
        )
        first, began, losses = step, time.monotonic(), []
    return best


def main() -> None:
    config = runtime.parse(Config, __doc__)
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    tokens, heldout_tokens = read_tokens(config.train, config), read_tokens(config.heldout, config)
    state = checkpoint.read(STATE, "python train.py") if config.resume else None
    if state is not None and state.get("config") != str(config.model):
        raise UserError(f"{STATE} is of a model of another shape: start anew without --resume")
    facts = {**runtime.machine_facts(device, config.precision, config.seed), "parent": None}
    model = GPT(config.model).to(device)
    log = Log(runtime.run_folder("train"), config, facts)
    best = train(model, tokens, heldout_tokens, config, log, facts, state)
    log.close()
    print(f"{checkpoint.BASE}: {best:.3f} nats a token on held-out stories")


if __name__ == "__main__":
    runtime.run(main)
