"""What a critic can explain: the table of docs/ppo.md. From the repository's root, 10 minutes:

    PYTHONPATH=. python docs/critic.py

Twelve rollouts of PPO without a critic, recorded; then each critic goes through them in order and is measured on each
rollout before it learns from it, against two targets: the whole score at the end, and what is still to be earned.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

import checkpoint
import ppo
import runtime
import tokenizer

ROLLOUTS, LAST = 12, 5
Recorded = list[
    tuple[Tensor, Tensor, Tensor]
]  # of each rollout: channels (N, C), target (N,), story (N,) of each token


def recorded() -> list[dict[str, Tensor]]:
    """Channels of each layer, both targets and the share of words used so far, at each token of each rollout."""
    config = replace(ppo.Config(), critic_lr=1e-30, unended_cost=0.0, seed=7)
    runtime.seed_everything(config.seed)
    coder = tokenizer.load()
    policy, _ = checkpoint.load(config.model, runtime.device_for("cpu"), coder.vocabulary)
    known, _ = ppo.material(config, policy, coder)
    learner = ppo.learner_for(policy, config)
    found = []
    for number in range(ROLLOUTS):
        drawn = ppo.drawn_instructions(known, config.groups, config.group, learner.draws)
        batch = ppo.rollout(learner, drawn, coder, config)
        kept: list[list[Tensor]] = [[] for _ in policy.blocks]
        hooks = [
            block.register_forward_hook(lambda _m, _i, out, own=own: own.append(out.float()))
            for block, own in zip(policy.blocks, kept, strict=True)
        ]
        normed = []
        with torch.no_grad(), runtime.autocast(policy.device, config.precision):
            for part in torch.split(batch.ids, 32):
                normed.append(policy.hidden(part[:, :-1]).float())
        for hook in hooks:
            hook.remove()
        mask = batch.mask
        so_far = batch.rewards.cumsum(1) - batch.rewards  # (B, T-1) earned before each token
        row = {
            "score": batch.scores[:, None].expand(mask.shape)[mask],
            "to go": (batch.scores[:, None] - so_far)[mask],
            "oracle": torch.stack([so_far, mask.cumsum(1) / config.limit], -1)[mask],
            "stories": mask.nonzero()[:, 0],
            "norm": torch.cat(normed)[mask],
        }
        found.append({**row, **{f"layer {n}": torch.cat(own)[mask] for n, own in enumerate(kept, start=1)}})
        ppo.update(learner, batch, config)
        print(f"rollout {number + 1} of {ROLLOUTS}", flush=True)
    return found


def show(name: str, explained: list[float], left: list[float]) -> None:
    """Prints the means over the last rollouts."""
    print(f"{name:44} explained {sum(explained[-LAST:]) / LAST:+.3f}  left {sum(left[-LAST:]) / LAST:.4f}", flush=True)


def adam(rows: Recorded, lr: float, passes: int = 2, scale: bool = False) -> tuple[list[float], list[float]]:
    """A linear critic in minibatches of 16 stories; scale: channels normalised by the first rollout."""
    shuffling = runtime.generator(0)
    critic = ppo.Critic(rows[0][0].shape[1])
    optimizer = torch.optim.AdamW(critic.parameters(), lr=lr, weight_decay=0.0)
    mean, spread = (rows[0][0].mean(0), rows[0][0].std(0)) if scale else (torch.zeros(()), torch.ones(()))
    explained, left = [], []
    for channels, target, story in rows:
        x = (channels - mean) / spread
        with torch.no_grad():
            apart = target - critic(x)
        explained.append(float(1 - apart.var() / target.var()))
        left.append(float(apart.var()))
        for _ in range(passes):
            for part in torch.split(torch.randperm(int(story.max()) + 1, generator=shuffling), 16):
                own = torch.isin(story, part)
                loss = nn.functional.mse_loss(critic(x[own]), target[own])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return explained, left


def least_squares(rows: Recorded, ridge: float = 0.1) -> tuple[list[float], list[float]]:
    """The best linear critic for all rollouts before, in closed form."""
    mean, spread = rows[0][0].mean(0), rows[0][0].std(0) + 1e-6
    size = rows[0][0].shape[1] + 1
    products, sums = torch.zeros(size, size).double(), torch.zeros(size).double()
    explained, left = [], []
    for number, (channels, target, _) in enumerate(rows):
        x = torch.cat([(channels - mean) / spread, torch.ones(len(channels), 1)], 1).double()
        value = torch.zeros(len(x)).double()
        if number:
            decay = ridge * torch.eye(size).double() * products[-1, -1]
            decay[-1, -1] = 0
            value = x @ torch.linalg.solve(products + decay, sums)
        apart = target - value.float()
        explained.append(float(1 - apart.var() / target.var()))
        left.append(float(apart.var()))
        products += x.T @ x
        sums += x.T @ target.double()
    return explained, left


def main() -> None:
    found = recorded()

    def rows(channels: str, target: str) -> Recorded:
        return [(row[channels], row[target], row["stories"]) for row in found]

    for target in ("score", "to go"):
        spread = [float(row[target].var()) for row in found]
        show(f"{target}: its mean", [0.0] * ROLLOUTS, spread)
        show(f"{target}: words so far and position", *least_squares(rows("oracle", target), 1e-4))
        for lr in (1e-4, 3e-4, 1e-3, 3e-3):
            show(f"{target}: Adam {lr:g}", *adam(rows("norm", target), lr))
        show(f"{target}: Adam 0.001, channels normalised", *adam(rows("norm", target), 1e-3, scale=True))
        show(f"{target}: the same, eight passes", *adam(rows("norm", target), 1e-3, passes=8, scale=True))
        for layer in (*(f"layer {n}" for n in range(1, 7)), "norm"):
            show(f"{target}: least squares, {layer}", *least_squares(rows(layer, target)))


if __name__ == "__main__":
    runtime.run(main)
