"""What runs share: the schedule, steps that refuse NaN, stopping, and going on as if nothing had happened."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import checkpoint
import preferences
import problems
import runtime
import train
import training
from model import GPT
from preferences import Pair
from runtime import UserError
from tokenizer import Tokenizer
from training import Guard

CPU = ("--device", "cpu", "--precision", "float32")
TOY = ("--model.vocabulary", "20", "--model.context", "16", "--model.layers", "1", "--model.heads", "1")
TOY = (*TOY, "--model.channels", "16", "--model.dropout", "0.2", "--batch", "4", "--warmup", "3")
SMALL = ("--groups", "2", "--group", "4", "--limit", "8", "--minibatch", "4", "--evaluate-on", "4", "--demo-limit", "8")
FEW = ("--problems", "2", "--answers", "4", "--limit", "8", "--evaluate-on", "3", "--evaluate-answers", "2")
BASE = ("--problems", "0", "--heldout", "4", "--batch", "4", "--dropout", "0.2")
# Of each script: arguments, its state, and a guarded step in the first half of the run, between two evaluations.
RUNS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "train": (("2.2", *TOY, "--evaluate-every", "5", "--lr", "1e-2"), "base-state.pt", 7),
    "finetune": (("2", *BASE, "--evaluate-every", "3"), "finetuned-state.pt", 4),
    "dpo": (("3", "--minibatch", "2", "--save-every", "4"), "dpo-state.pt", 6),
    "ppo": (("9", "0.05", "--rollouts", "4", "--evaluate-every", "2", *SMALL), "ppo-0.05/state.pt", 2),
    "reinforce": (("4", *FEW, "--evaluate-every", "2"), "reinforce/state.pt", 1),
}


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (1, 0.2), (9, 1.0), (10, 1.0), (60, 0.5), (85, 0.25), (109, 0.01), (110, 0.0)]
)
def test_learning_rate_by_hand(step: int, rate: float) -> None:
    assert training.linear_rate(step, 110, 10, 1.0) == pytest.approx(rate)
    assert training.linear_rate(step, 110, 10, 3e-3) == pytest.approx(3e-3 * rate)


def test_learning_rate_of_short_runs() -> None:
    assert [training.linear_rate(step, 2, 10, 1.0) for step in (0, 1)] == pytest.approx([0.1, 0.2])
    assert [training.linear_rate(step, 2, 0, 1.0) for step in (0, 1)] == pytest.approx([1.0, 0.5])
    assert training.linear_rate(0, 1, 1, 1.0) == 1.0


def test_only_matrices_decay(tiny: Callable[..., GPT]) -> None:
    model = tiny()
    decayed, free = training.adamw(model, 1e-3, 0.95, 0.3).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert all(weight.dim() == 2 for weight in decayed["params"])
    assert len(free["params"]) == 5  # the norms' gains
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


@pytest.fixture
def everything(workspace: Path, tiny: Callable[..., GPT], coder: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which all five scripts run, with rewards that vary."""
    ids = (numpy.arange(1200) * 3 % 19).astype(numpy.uint16)
    numpy.save("data/tokens-train.npy", ids)
    numpy.save("data/tokens-heldout.npy", ids[:200])
    checkpoint.save(checkpoint.BASE, tiny(context=512), {"step": 0})
    checkpoint.save(checkpoint.FINETUNED, tiny(context=512), {"step": 0})
    pairs = [Pair(("kite",), [7 + row, *range(row), 256], [9 + row]) for row in range(8)]
    preferences.write_pairs(pairs, coder, preferences.PAIRS)
    monkeypatch.setattr(problems, "grade", lambda text, _gold: sum(map(ord, text)) % 2 == 0)
    monkeypatch.setattr("stories.words_used", lambda story, _words: float(len(story.encode()) % 2))
    return workspace


def logged(script: str) -> str:
    """A run's metrics as text, in which NaN equals NaN, without its speeds."""
    (path,) = Path("runs").glob(f"{script}-*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return json.dumps([{name: value for name, value in line.items() if "speed/" not in name} for line in lines])


def assert_same(one: Any, other: Any) -> None:
    """Asserts that two states are equal bit for bit, but for times and the name of the run's folder."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one.keys() - {"seconds", "run"}:
            assert_same(one[name], other[name])
    elif isinstance(one, list):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("script", RUNS)
def test_stopped_and_resumed_is_the_same_run(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
) -> None:
    arguments, name, stops_at = RUNS[script]
    state = checkpoint.FOLDER / name
    first = checkpoint.FINETUNED.read_bytes()
    assert command(script, *arguments, *CPU) == 0
    straight, numbers = checkpoint.read(state, "-"), logged(script)
    models = {path: checkpoint.read(path, "-")["weights"] for path in checkpoint.FOLDER.rglob("*.pt") if path != state}
    shutil.rmtree("runs")
    for path in checkpoint.FOLDER.rglob("*.pt"):
        if path != checkpoint.BASE or script == "train":
            path.unlink()
    checkpoint.FINETUNED.write_bytes(first)
    taken, step = [0], Guard.step

    def interrupted(self: Guard, loss: Tensor) -> float | None:
        taken[0] += 1
        if taken[0] == stops_at:
            signal.raise_signal(signal.SIGINT)
        return step(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "step", interrupted)
        capsys.readouterr()
        assert command(script, *arguments, *CPU) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"stopped; to go on: python {script}.py {' '.join([*arguments, *CPU])} --resume"
    assert checkpoint.read(state, "-")["step"] < straight["step"]
    assert command(script, *arguments, *CPU, "--resume", "--lr", "0.5") == 1
    assert "--lr 0.5: the run that --resume goes on with has" in capsys.readouterr().err
    assert command(script, *arguments, *CPU, "--resume") == 0
    assert_same(straight, checkpoint.read(state, "-"))
    assert logged(script) == numbers
    for path, weights in models.items():
        assert_same(weights, checkpoint.read(path, "-")["weights"])
    before = {path: path.read_bytes() for path in models}
    assert command(script, *arguments, *CPU, "--resume") == 0  # a finished run has nothing left to do
    assert_same(straight, checkpoint.read(state, "-"))
    assert logged(script) == numbers
    assert all(path.read_bytes() == before[path] for path in models if path != checkpoint.FINETUNED)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("script", RUNS)
def test_one_nan_is_skipped_and_three_in_a_row_stop_the_run(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
) -> None:
    arguments, name, _ = RUNS[script]
    taken, step = [0], Guard.step

    def spoiled(self: Guard, loss: Tensor) -> float | None:
        taken[0] += 1
        if taken[0] in spoils:
            for weight in self.optimizer.param_groups[0]["params"]:
                if weight.grad is not None:
                    weight.grad.fill_(float("nan"))
        return step(self, loss)

    monkeypatch.setattr(Guard, "step", spoiled)
    spoils: range = range(2, 3)
    assert command(script, *arguments, *CPU) == 0
    state = checkpoint.read(checkpoint.FOLDER / name, "-")
    assert state["skipped"] == 1
    assert json.loads(logged(script))[-2 if script in ("ppo", "reinforce") else -1]["skipped_steps"] == 1
    assert all(weight.isfinite().all() for weight in state["weights"].values())
    shutil.rmtree("runs")
    taken[0], spoils = 0, range(1, 10**6)
    capsys.readouterr()
    assert command(script, *(["6", *arguments[1:]] if script == "reinforce" else arguments), *CPU) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: 3 steps in a row had a loss or gradient that is no number")
    assert all(
        weight.isfinite().all()
        for path in checkpoint.FOLDER.rglob("*.pt")
        for weight in checkpoint.read(path, "-")["weights"].values()
    )


@pytest.mark.usefixtures("everything")
def test_the_same_seed_gives_the_same_run(command: Callable[..., int]) -> None:
    before = {path: path.read_bytes() for path in (checkpoint.BASE, checkpoint.FINETUNED)}
    for script, (arguments, _, _) in RUNS.items():
        seen = []
        for seed in (4, 4, 5):
            for path, content in before.items():  # which train.py and finetune.py replace
                path.write_bytes(content)
            assert command(script, *arguments, *CPU, "--seed", seed) == 0
            seen.append(logged(script))
            shutil.rmtree("runs")
        assert seen[0] == seen[1] != seen[2], script


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("script", ["ppo", "reinforce"])
def test_a_new_run_leaves_no_checkpoint_of_an_earlier_one(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], script: str
) -> None:
    arguments, name, _ = RUNS[script]
    assert command(script, *arguments, *CPU) == 0
    saved = {path.name for path in (checkpoint.FOLDER / name).parent.glob("*.pt")}
    stale = (checkpoint.FOLDER / name).with_name("rollout-0990.pt" if script == "ppo" else "step-0990.pt")
    mine = stale.with_name("mine.pt")
    shutil.copy(checkpoint.FOLDER / name, mine)
    shutil.copy(checkpoint.FOLDER / name, stale)
    capsys.readouterr()
    assert command(script, *arguments, *CPU) == 0
    assert f"{len(saved) + 1} files of an earlier run" in capsys.readouterr().out
    assert {path.name for path in stale.parent.glob("*.pt")} == saved | {mine.name}
    assert command(script, *arguments, *CPU, "--model", next(stale.parent.glob("*0000.pt"))) == 1
    assert "copy the model elsewhere first" in capsys.readouterr().err


@pytest.mark.usefixtures("everything")
def test_a_state_that_does_not_fit_is_one_line(
    command: Callable[..., int], tiny: Callable[..., GPT], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, name, _ = RUNS["reinforce"]
    state = checkpoint.FOLDER / name
    assert command("reinforce", *arguments, *CPU) == 0
    whole = checkpoint.read(state, "-")
    for spoiled, said in (
        ({**whole, "weights": {}}, "does not fit"),
        ({name: value for name, value in whole.items() if name != "seen"}, "does not fit"),
        ({**whole, "inputs": "others"}, "have changed"),
        ({name: value for name, value in whole.items() if name != "step"}, "not the state of a run"),
    ):
        checkpoint.write(state, spoiled)
        capsys.readouterr()
        assert command("reinforce", *arguments, *CPU, "--resume") == 1
        assert said in capsys.readouterr().err
    checkpoint.save(checkpoint.FINETUNED, tiny(context=512, seed=7), {"step": 0})
    checkpoint.write(state, whole)
    assert command("reinforce", *arguments, *CPU, "--resume") == 1
    assert "have changed" in capsys.readouterr().err


@pytest.mark.usefixtures("everything")
def test_a_smaller_budget_than_was_spent_is_one_line(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for script in ("train", "finetune"):
        arguments, _, _ = RUNS[script]
        assert command(script, *arguments, *CPU) == 0
        assert command(script, "0.3", *arguments[1:], *CPU, "--resume") == 1
        assert "error: PASSES 0.3: the run has had" in capsys.readouterr().err
        checkpoint.BASE.unlink()
        shutil.copy(checkpoint.FINETUNED, checkpoint.BASE)


def test_a_second_interrupt_stops_at_once_and_leaves_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ppo.py", "10", "--resume", "a b"])
    before = signal.getsignal(signal.SIGINT)
    with training.session(tmp_path / "state.pt") as session:
        signal.raise_signal(signal.SIGINT)
        assert session.asked
        assert "again to stop at once" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt, match=r"stopped at once; .*: python ppo\.py 10 'a b' --resume"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_termination_asks_as_an_interrupt_does(tmp_path: Path) -> None:
    with training.session(tmp_path / "state.pt") as session:
        assert not session.asked
        signal.raise_signal(signal.SIGTERM)
        assert session.asked


def test_two_runs_of_one_state_are_refused(tmp_path: Path) -> None:
    with training.session(tmp_path / "state.pt"):
        with pytest.raises(UserError, match=r"another run writes .*state\.pt"), training.session(tmp_path / "state.pt"):
            pass
        with training.session(tmp_path / "other.pt"):
            pass
    with training.session(tmp_path / "state.pt"):
        pass


def test_a_state_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be written"), training.session(tmp_path / "file" / "state.pt"):
        pass


def test_curves_go_on_after_the_step_they_are_resumed_at(tmp_path: Path) -> None:
    config = train.Config()
    with runtime.Log(tmp_path / "run", config, {}) as log:
        for step in (1, 2, 3):
            log.scalars(step, {"loss": float(step)})
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # cut in the writing
    with runtime.Log(tmp_path / "run", config, {}, after=2) as log:
        log.scalars(3, {"loss": 30.0})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.0, 2.0, 30.0]


def run_until_killed(arguments: list[str], at_fsync: int) -> None:
    """What a child process does: trains, and kills itself inside its n-th save where `at_fsync` is not 0."""
    saves = [0]

    def fsync(_file: int) -> None:
        saves[0] += 1
        if saves[0] == at_fsync:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    sys.argv = ["train.py", *arguments]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        runtime.run(train.main)


@pytest.mark.skipif(sys.platform != "linux", reason="forks, to save the time that importing torch takes")
@pytest.mark.usefixtures("everything")
def test_killed_at_any_moment_a_run_goes_on_to_the_same_end(command: Callable[..., int]) -> None:
    """Twenty kills of one run, every other one inside a save, each followed by --resume."""
    arguments, name, _ = RUNS["train"]
    flags = ["9", *arguments[1:], *CPU]
    state = checkpoint.FOLDER / name
    assert command("train", *flags) == 0
    straight = checkpoint.read(state, "-")
    shutil.rmtree("runs")
    state.unlink()
    rng, fork = random.Random(1), multiprocessing.get_context("fork")
    for kill in range(20):
        at_fsync = rng.randint(1, 5) if kill % 2 else 0
        resume = ["--resume"] if state.exists() else []
        child = fork.Process(target=run_until_killed, args=([*flags, *resume], at_fsync))
        child.start()
        if not at_fsync:
            time.sleep(rng.uniform(0.02, 0.4))
            child.kill()
        child.join()
        if state.exists():
            checkpoint.read(state, "-")
    assert command("train", *flags, *(["--resume"] if state.exists() else [])) == 0
    assert_same(straight, checkpoint.read(state, "-"))
