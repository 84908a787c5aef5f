"""What every training loop needs beside its algorithm: steps that refuse NaN, a stop that loses nothing, a state.

A state file holds all that a run is made of: weights, optimizer, random generators, counters, settings, and the folder
of its curves. `--resume` goes on from it, and N steps straight equal N/2, stop, resume, N/2 bit for bit on the CPU.
Ctrl-C (or SIGTERM) is asked for, not obeyed at once: the step under way is finished, the state written, and the command
that goes on printed. A second one stops at once and leaves the last state as it was.
"""

import contextlib
import dataclasses
import hashlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import filelock
import torch
from torch import Tensor

import checkpoint
import distributed
import runtime
from model import GPT
from runtime import Log, NoLog, UserError, run_folder

PATIENCE = 3  # steps in a row without a finite loss or gradient, after which a run stops


def adamw(model: GPT, lr: float, beta2: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over a model that decays matrices and leaves the norms' gains alone."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() == 2], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups, in place."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def linear_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Rate of a step, from 0 on: rises linearly over `warmup` steps, then falls linearly to 0 behind the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)


@dataclass(slots=True)
class Guard:
    """Takes an optimizer's steps, and skips and counts those whose loss or gradient is no number."""

    optimizer: torch.optim.Optimizer
    max_norm: float  # of the gradient, clipped there
    skipped: int = 0
    in_a_row: int = 0

    def step(self, loss: Tensor) -> float | None:
        """Steps on the gradients that are there; returns their norm before clipping, None where it skipped the step.

        loss: () what the gradients are of. Both are asked: a clamped NaN has a finite gradient. Of several processes
        each has the gradient of its own rows, which are added up here.
        Raises: UserError at the third skipped step in a row; the weights are those of the last good one.
        """
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        distributed.add_gradients(weights)
        norm = torch.nn.utils.clip_grad_norm_(weights, self.max_norm)
        if loss.isfinite() and norm.isfinite():
            self.optimizer.step()
            self.in_a_row = 0
            return float(norm)
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row == PATIENCE:
            raise UserError(
                f"{PATIENCE} steps in a row had a loss or gradient that is no number: stopped, the last checkpoint is "
                "whole; lower --lr, or look at the data"
            )
        return None


@dataclass(slots=True)
class Learner:
    """What a run trains and how far it is: all that `--resume` restores."""

    model: GPT
    guard: Guard
    generators: tuple[torch.Generator, ...] = ()
    step: int = 0
    seconds: float = 0.0
    best: float | None = None  # of the evaluations so far: a loss or a score
    seen: list[float] = field(default_factory=list)  # losses since the last evaluation, or rewards of all steps
    inputs: str = ""  # fingerprint of what the run began with: models and data

    def state(self) -> dict[str, Any]:
        """What is written for `--resume`."""
        return {
            "weights": self.model.state_dict(),
            "optimizer": self.guard.optimizer.state_dict(),
            "random": random_states(self.generators),
            **{"step": self.step, "seconds": self.seconds, "best": self.best, "seen": self.seen},
            **{"skipped": self.guard.skipped, "in_a_row": self.guard.in_a_row, "inputs": self.inputs},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state, in place."""
        self.model.load_state_dict(state["weights"])
        self.guard.optimizer.load_state_dict(state["optimizer"])
        set_random_states(state["random"], self.generators)
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.seen, self.guard.skipped, self.guard.in_a_row = state["seen"], state["skipped"], state["in_a_row"]


class Session:
    """Whether the user asked a run to stop, and how to leave it."""

    def __init__(self) -> None:
        self.signalled = False  # this process
        self.neighbours = distributed.neighbours()
        arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
        self.command = runtime.command_line([*arguments, "--resume"])

    @property
    def asked(self) -> bool:
        """Whether a process was asked to stop. All look at the same places of the loop, and see the same."""
        return distributed.highest(self.signalled) > 0

    def ask(self, number: int, _frame: FrameType | None) -> None:
        """What a signal does: the first asks, the second stops at once.

        Raises: Lost where torchrun sends it, as it ends all processes when one of them is gone.
        """
        if number == signal.SIGTERM and not distributed.alive(self.neighbours):
            raise distributed.Lost
        if self.signalled:
            raise KeyboardInterrupt(f"stopped at once; from the last state on: {self.command}")
        self.signalled = True
        waits = "; torchrun waits 30 seconds for it, or its --shutdown-timeout" if distributed.size() > 1 else ""
        said = f"stopping after this step, so that nothing is lost; again to stop at once{waits}"
        print(said, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Ends the run once its state is written, which others than the leading process wait for."""
        distributed.highest(0)
        raise KeyboardInterrupt(f"stopped; to go on: {self.command}")


@contextlib.contextmanager
def session(state: Path) -> Iterator[Session]:
    """Context of a run that writes `state`: a second run of it is refused, Ctrl-C and SIGTERM ask before they stop.

    Raises: UserError where another run holds it. The lock is the system's: it ends with the process, however that ends.
    """
    lock = filelock.FileLock(state.with_name(f".{state.name}.lock"))
    try:
        if distributed.leads():
            state.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"another run writes {state}: wait for it, or stop it") from None
    except OSError as error:
        raise UserError(f"{state.parent} cannot be written ({error.strerror}): free it, or run elsewhere") from None
    watched = Session()
    before = {number: signal.signal(number, watched.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield watched
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        lock.release()


def clear(folder: Path, *patterns: str) -> None:
    """Deletes an earlier run's files, so that none of them is taken for one of the run that starts anew.

    Raises: UserError where one cannot be deleted.
    """
    old = sorted(path for pattern in patterns for path in folder.glob(pattern) if distributed.leads())
    for path in old:
        try:
            path.unlink()
        except OSError as error:
            raise UserError(f"{path} cannot be deleted ({error.strerror}): close what has it open") from None
    if len(old) > 1:
        print(f"{len(old)} files of an earlier run in {folder} deleted; --resume would have gone on with it")


def logged_evaluation(
    learner: Learner, steps: int, log: Log, heldout: float, lr: float, norm: float | None, speed: float
) -> str:
    """Logs an evaluation of pre-training or fine-tuning and returns its line; empties `learner.seen`, in place.

    heldout: loss, nats a token. norm: of the last step's gradient, None where it was skipped. speed: tokens a second.
    """
    loss = sum(learner.seen) / len(learner.seen) if learner.seen else float("nan")
    counted = {"grad_norm": norm or 0.0, "skipped_steps": learner.guard.skipped, "speed/tokens_per_second": speed}
    log.scalars(learner.step, {"loss/train": loss, "loss/heldout": heldout, "lr": lr, **counted})
    learner.seen = []
    left = (steps - learner.step) * learner.seconds / learner.step / 60  # minutes
    progress = f"step {learner.step}/{steps}  loss {loss:.3f}  held out {heldout:.3f}"
    return f"{progress}  {speed:,.0f} tokens/s  {left:.0f} min left"


def settings(config: object) -> dict[str, str]:
    """A config's settings as text, but for `resume`."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    return {field.name: str(getattr(config, field.name)) for field in fields if field.name != "resume"}


def write_state(path: Path, config: object, log: Log, content: Mapping[str, Any]) -> None:
    """Writes what a run resumes from, whole or not at all."""
    checkpoint.write(path, {"settings": settings(config), "run": log.folder.as_posix(), **content})


def read_state(path: Path, config: object, budget: Sequence[str] = ()) -> dict[str, Any]:
    """What a run with these settings resumes from; those in `budget` may differ from what it began with.

    Raises: UserError where the state is missing or broken, or another setting has changed.
    """
    again = f"python {Path(sys.argv[0]).name} without --resume"
    content = checkpoint.read(path, again)
    began, now = content.get("settings"), settings(config)
    if not isinstance(began, dict) or not {"run", "step", "inputs"} <= content.keys():
        raise UserError(f"{path} is not the state of a run: {again} starts anew")
    for name in sorted(began.keys() | now.keys()):
        if name not in budget and began.get(name) != now.get(name):
            raise UserError(
                f"--{name.replace('_', '-')} {now.get(name)}: the run that --resume goes on with has "
                f"{began.get(name)}; give that, or start anew"
            )
    return content


class Restorable(Protocol):
    """What goes back to a state."""

    inputs: str

    def restore(self, state: Mapping[str, Any]) -> None: ...


def resume(learner: Restorable, state: Mapping[str, Any] | None, path: Path) -> None:
    """Brings the learner, in place, to the state that `read_state` found at `path`; a new run has none.

    Raises: UserError where the state is of other models or data, or does not fit, or another process's differs.
    """
    step = 0 if state is None else state["step"]
    if len(set(distributed.gathered([(learner.inputs, step, *sys.argv[1:])]))) > 1:
        raise UserError(f"not all machines have the same models, data, {path} and flags: give all the same folder")
    if state is not None:
        if state["inputs"] != learner.inputs:
            raise UserError(f"the models or data that {path} began with have changed: start anew without --resume")
        try:
            learner.restore(state)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise UserError(f"{path} does not fit this model or program: start anew without --resume") from None
    if distributed.rank():  # dropout of its own, for rows of its own
        torch.manual_seed(torch.initial_seed() + distributed.rank() + distributed.size() * step)


def fingerprint(*parts: object) -> str:
    """A short text that changes with the parts' own texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode("utf-8"))
    return digest.hexdigest()


def log_of(name: str, config: object, facts: Mapping[str, Any], state: Mapping[str, Any] | None) -> Log:
    """The log of a run: a new one, or that of the run it resumes, from its step on; the leading process keeps it."""
    if not distributed.leads():
        return NoLog()
    if state is None:
        return Log(run_folder(name), config, facts)
    return Log(Path(state["run"]), config, facts, after=state["step"])


def random_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Where the generators stand, the global one first."""
    return [torch.get_rng_state(), *(generator.get_state() for generator in generators)]


def set_random_states(states: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
    """Puts the generators where `random_states` found them, in place."""
    torch.set_rng_state(states[0])
    for generator, state in zip(generators, states[1:], strict=True):
        generator.set_state(state)
