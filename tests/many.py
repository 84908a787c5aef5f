"""What each process does that `test_distributed.py` starts with torchrun: every script's main, and the module alone."""

import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import checkpoint
import distributed
import finetune
import ppo
import runtime
import sample
import training
from model import GPT, ModelConfig, token_log_probs
from sample import Completion
from training import Guard

CPU = ("--device", "cpu", "--precision", "float32")
START = ("--model", "checkpoints/start.pt", "--lr", "1e-3")
TOY = ("--model.vocabulary", "20", "--model.context", "16", "--model.layers", "1", "--model.heads", "1")
TOY = (*TOY, "--model.channels", "16", "--batch", "5", "--warmup", "1")
# Sizes that neither two nor four processes divide, and last batches of fewer rows than there are processes.
RUNS: dict[str, tuple[str, ...]] = {
    "train": ("0.22", *TOY, "--lr", "1e-2"),
    "finetune": ("0.4", "--problems", "0", "--heldout", "5", "--batch", "3", "--warmup", "1", "--base", START[1]),
    "dpo": ("1", "--minibatch", "3", *START),
    "ppo": ("9", "0.05", "--rollouts", "2", "--groups", "2", "--group", "5", "--limit", "8", "--minibatch", "3"),
    "reinforce": ("3", "--problems", "3", "--answers", "3", "--part", "5", "--limit", "8", "--evaluate-on", "3"),
    "evaluate": ("start", "--baseline", START[1], "--instructions", "7", "--problems", "3", "--answers", "3"),
}
RUNS["ppo"] = (*RUNS["ppo"], "--epochs", "1", "--evaluate-on", "3", "--demo-limit", "4", *START)
RUNS["reinforce"] = (*RUNS["reinforce"], "--evaluate-answers", "3", "--warmup", "1", *START)
RUNS["evaluate"] = (*RUNS["evaluate"], "--limit", "8", "--batch", "5", "--loss-batch", "3", "--resamples", "9")
STATES = {
    **{"train": "base-state.pt", "finetune": "finetuned-state.pt", "dpo": "dpo-state.pt"},
    **{"ppo": "ppo-0.05/state.pt", "reinforce": "reinforce/state.pt"},
}


def call(script: str, *arguments: str) -> None:
    """Runs a script's main as its command line would."""
    sys.argv = [f"{script}.py", *arguments]
    importlib.import_module(script).main()


@contextmanager
def rewarded(told: list[list[int]]) -> Iterator[None]:
    """Context in which rewards vary though the model is untrained, and what is written is added to `told`."""
    written = sample.generate

    def kept(*arguments: Any, **options: Any) -> list[Completion]:
        found = written(*arguments, **options)
        told.extend(one.ids for one in found)
        return found

    with (
        patch("problems.grade", lambda text, _gold: sum(map(ord, text)) % 2 == 0),
        patch("stories.words_used", lambda story, _words: sum(map(ord, story)) % 4 / 3),
        patch("sample.generate", kept),
        patch("ppo.generate", kept),
        patch("evaluate.generate", kept),
    ):
        yield


def straight(folder: Path) -> None:
    """Runs every script in the folder and writes there what the models wrote, `told.json`."""
    os.chdir(folder)
    told: dict[str, list[list[int]]] = {script: [] for script in RUNS}
    for script, arguments in RUNS.items():
        with rewarded(told[script]):
            call(script, *arguments, *CPU)
    runtime.write_whole(Path("told.json"), lambda file: file.write(json.dumps(told).encode()))


def halves(folder: Path, *, second: bool) -> None:
    """Runs every script until the last process alone is asked to stop in the second step, or on from there."""
    os.chdir(folder)
    for script in STATES:
        taken, step = [0], Guard.step

        def interrupted(self: Guard, loss: Tensor, taken: list[int] = taken, step: Any = step) -> float | None:
            taken[0] += 1
            if taken[0] == 2 and distributed.rank() == distributed.size() - 1:
                signal.raise_signal(signal.SIGINT)
            found: float | None = step(self, loss)
            return found

        with rewarded([]):
            if second:
                call(script, *RUNS[script], *CPU, "--resume")
                continue
            with patch.object(Guard, "step", interrupted):
                try:
                    call(script, *RUNS[script], *CPU)
                except KeyboardInterrupt:
                    continue
            raise AssertionError(f"{script} was not stopped")


def averaged(folder: Path) -> None:
    """Fine-tunes with the mistake that the others must not make: the mean of the losses of unequal shares."""
    os.chdir(folder)
    added = distributed.add_gradients

    def mean_of_share(model: GPT, ids: Tensor, mask: Tensor) -> Tensor:
        own = distributed.share(len(ids))
        return -token_log_probs(model, ids, mask)[own].sum() / mask[own].sum()

    def mean_of_gradients(weights: list[Tensor]) -> None:
        added(weights)
        for weight in weights:
            if weight.grad is not None:
                weight.grad /= distributed.size()

    with patch.object(finetune, "answer_loss", mean_of_share), patch("distributed.add_gradients", mean_of_gradients):
        call("finetune", *RUNS["finetune"], *CPU)


def budget(folder: Path) -> None:
    """Runs PPO for a minute, which is over at once for the last process alone; all must end after one rollout."""
    os.chdir(folder)
    speed = 1e6 if distributed.rank() == distributed.size() - 1 else 1.0
    with rewarded([]), patch.object(ppo, "time", SimpleNamespace(monotonic=lambda: speed * time.monotonic())):
        call("ppo", "1", *RUNS["ppo"][1:2], *RUNS["ppo"][4:], *CPU)
    if distributed.leads():
        assert checkpoint.read(Path("checkpoints/ppo-0.05/state.pt"), "-")["step"] == 1


def check_sums() -> None:
    """Asserts what the functions of `distributed.py` give, for more rows than processes and for fewer."""
    count, rank = distributed.size(), distributed.rank()
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    for rows in (1, 3, 7, 8):
        own = distributed.share(rows)
        spans = distributed.gathered([(own.start, own.stop)])
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == rows
        assert max(stop - start for start, stop in spans) - min(stop - start for start, stop in spans) <= 1
        values = torch.arange(2.0 * rows).reshape(rows, 2)
        weight.grad = None
        whole = distributed.whole(values[own] * weight, rows)
        assert torch.equal(whole, values * weight)
        (whole**2).sum().backward()
        distributed.add_gradients([weight, torch.zeros(1)])
        assert torch.equal(weight.grad, 2 * weight.detach() * (values**2).sum(0))
        assert distributed.gathered(list(range(rows))[own]) == list(range(rows))
    assert distributed.highest(rank / 8) == (count - 1) / 8
    assert len(distributed.neighbours()) == count - 1
    assert distributed.alive(distributed.neighbours())
    training.resume(Starting("the same"), None, Path("state.pt"))
    with pytest.raises(runtime.UserError, match="not all machines have the same models"):
        training.resume(Starting(f"of process {rank}"), None, Path("state.pt"))


@dataclass
class Starting:
    """A learner at its start."""

    inputs: str

    def restore(self, state: Mapping[str, Any]) -> None:
        raise AssertionError(state)


def check_nan() -> None:
    """Asserts that a NaN in the last process's rows, or in their gradient, skips the step in all."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocabulary=20, context=16, layers=1, heads=1, channels=16))
    guard = Guard(torch.optim.AdamW(model.parameters(), lr=1e-2), 1.0)
    ids, mask = torch.arange(20).reshape(4, 5), torch.ones(4, 4, dtype=torch.bool)
    last = distributed.rank() == distributed.size() - 1
    before = model.tokens.weight.detach().clone()
    for spoils in ("loss", "gradient"):
        guard.optimizer.zero_grad()
        with patch.object(model, "hidden", functools.partial(spoiled, model.hidden, last and spoils == "loss")):
            loss = -token_log_probs(model, ids, mask).mean()
        assert bool(loss.isfinite()) == (spoils == "gradient")  # in every process
        loss.backward()
        if last and spoils == "gradient":
            model.tokens.weight.grad[0, 0] = torch.nan  # type: ignore[index]
        assert guard.step(loss) is None
    assert guard.skipped == 2
    assert torch.equal(model.tokens.weight, before)


def spoiled(hidden: Callable[[Tensor], Tensor], spoils: bool, ids: Tensor) -> Tensor:
    """What `hidden` gives, NaN where asked."""
    return hidden(ids) * (torch.nan if spoils else 1.0)


def main() -> None:
    folder = Path(sys.argv[1])
    check_sums()
    check_nan()
    straight(folder / "straight")
    if distributed.size() == 2:
        halves(folder / "halves", second=False)
        averaged(folder / "apart")
        budget(folder / "apart")
        call("ppo", "--bogus", "3")
    else:
        halves(folder / "halves", second=True)
        call("ppo", "--model", "nowhere.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    runtime.run(main)
