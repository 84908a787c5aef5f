"""Many processes do the work of one: same stories, weights and metrics; faults and stops end all of them alike.

`many.py` is what the processes of torchrun run here, each of them all scripts in turn, as a start takes seconds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import many
import numpy
import pytest
import torch
from conftest import BYTES

import checkpoint
import preferences
import tokenizer
from model import GPT
from preferences import Pair
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
WITHIN = 1e-5  # of weights, losses and metrics in float32


def filled(folder: Path, tiny: Callable[..., GPT], coder: Tokenizer) -> None:
    """Makes a working folder in which all scripts run."""
    ids = (numpy.arange(1200) * 3 % 19).astype(numpy.uint16)
    (folder / "data").mkdir(parents=True)
    numpy.save(folder / "data/tokens-train.npy", ids)
    numpy.save(folder / "data/tokens-heldout.npy", ids[:200])
    tokenizer.save(BYTES, folder / tokenizer.PATH)
    words = [
        [one, other, third] for one in ("kite", "lake") for other in ("bird", "tree") for third in ("fish", "moon")
    ]
    lines = [json.dumps({"words": row}) + "\n" for row in words]
    # Of uneven lengths, so that shares of a batch have uneven counts of tokens.
    told = [
        {"words": words[row % 8], "story": f"A {words[row % 8][0]} {'and more ' * (row % 7)}."} for row in range(30)
    ]
    (folder / "data/stories-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told), encoding="utf-8")
    for name in ("train", "heldout"):
        (folder / f"data/instructions-{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    plain = "\n<|endoftext|>\n".join(str(row["story"]) for row in told)
    (folder / "data/stories-heldout.txt").write_text(plain, encoding="utf-8")
    pairs = [Pair(("kite",), [7 + row, *range(3 * row), 256], [9 + row]) for row in range(8)]
    preferences.write_pairs(pairs, coder, folder / preferences.PAIRS)
    model = tiny(context=700, scale=5.0)
    with torch.no_grad():
        model.tokens.weight[coder.end] *= 8  # so that some answers end before their limit
    checkpoint.save(folder / "checkpoints/start.pt", model, {"step": 0})


def alone(work: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Does some of `many.py`'s work in this process, and is then where and as it was."""
    here = Path.cwd()
    try:
        with patch.object(sys, "argv", []):
            work(*arguments, **options)
    finally:
        os.chdir(here)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., GPT], coder: Tokenizer) -> dict[int, Any]:
    """What 1, 2 and 4 processes made of the same: `folder / "1" / "straight"`, ..., and what torchrun printed."""
    folder = tmp_path_factory.mktemp("processes")
    for kind in ("straight", "halves", "apart"):
        filled(folder / "1" / kind, tiny, coder)
    shutil.copytree(folder / "1", folder / "2")
    alone(many.halves, folder / "1" / "halves", second=False)
    shutil.copytree(folder / "1", folder / "4")  # which goes on with what one process began
    alone(many.straight, folder / "1" / "straight")
    done: dict[int, Any] = {1: folder / "1"}
    for count in (2, 4):
        command = [*TORCHRUN, str(count), str(ROOT / "tests/many.py"), str(folder / str(count))]
        done[count] = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=900)
        assert (folder / str(count) / "straight/told.json").exists(), done[count].stderr
    alone(many.halves, folder / "2" / "halves", second=True)
    return done


def metrics(folder: Path, script: str) -> list[dict[str, float]]:
    """What a run logged, but for its speeds."""
    (path,) = (folder / "runs").glob(f"{script}-*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if "speed/" not in name} for line in lines]


def assert_close(one: Any, other: Any, within: float = WITHIN) -> None:
    """Asserts that two states or results are equal to rounding, but for times and machines."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one.keys() - {"seconds", "run", "random", "machine", "command", "facts", "settings"}:
            assert_close(one[name], other[name], within)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_close(mine, theirs, within)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, atol=within, rtol=within)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=within, rel=within, nan_ok=True)
    else:
        assert one == other


@pytest.mark.parametrize("count", [2, 4])
def test_the_same_stories_are_written(told: dict[int, Any], count: int) -> None:
    one, many_ = (json.loads((told[1].parent / name / "straight/told.json").read_text()) for name in ("1", str(count)))
    assert one == many_
    assert all(one[script] for script in ("ppo", "reinforce", "evaluate"))
    assert len({len(ids) for ids in one["ppo"]}) > 1  # rows of uneven lengths


@pytest.mark.parametrize("script", many.STATES)
@pytest.mark.parametrize("count", [2, 4])
def test_weights_and_metrics_are_those_of_one_process(told: dict[int, Any], count: int, script: str) -> None:
    one, other = told[1] / "straight", told[1].parent / str(count) / "straight"
    states = [checkpoint.read(folder / "checkpoints" / many.STATES[script], "-") for folder in (one, other)]
    assert states[0]["step"] >= (2 if script == "ppo" else 3)  # rollouts of four steps
    start = checkpoint.read(one / "checkpoints/start.pt", "-")["weights"]
    if script != "train":  # which starts from random weights
        moved = max((weight - states[0]["weights"][name]).abs().max().item() for name, weight in start.items())
        assert moved > 100 * WITHIN
    assert_close(*states)
    assert_close(metrics(one, script), metrics(other, script))
    (log,) = (other / "runs").glob(f"{script}-*")
    assert len([path for path in log.iterdir() if "tfevents" in path.name]) == 1  # of one process


@pytest.mark.parametrize("count", [2, 4])
def test_a_comparison_is_that_of_one_process(told: dict[int, Any], count: int) -> None:
    one, other = (
        json.loads((told[1].parent / name / "straight/runs/evaluate/results.json").read_text(encoding="utf-8"))
        for name in ("1", str(count))
    )
    assert_close(one["models"], other["models"])


def test_the_mean_of_unequal_shares_would_be_seen(told: dict[int, Any]) -> None:
    folders = (told[1] / "straight", told[1].parent / "2/apart")
    states = [checkpoint.read(folder / "checkpoints" / many.STATES["finetune"], "-") for folder in folders]
    with pytest.raises(AssertionError, match="not close"):
        assert_close(states[0]["weights"], states[1]["weights"], within=10 * WITHIN)


@pytest.mark.parametrize("script", many.STATES)
@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_processes_goes_on(told: dict[int, Any], count: int, script: str) -> None:
    """Two processes stop, as one of them is asked to, and one goes on; one stops, and four go on."""
    folders = (told[1] / "straight", told[1].parent / str(count) / "halves")
    states = [checkpoint.read(folder / "checkpoints" / many.STATES[script], "-") for folder in folders]
    assert_close(*states)
    assert_close(*(metrics(folder, script) for folder in folders))


def test_all_print_as_one(told: dict[int, Any]) -> None:
    for count, fault in ((2, "error: Unrecognized options: --bogus, 3"), (4, "error: nowhere.pt is missing: ")):
        done = told[count]
        assert done.returncode == 1
        said = [line for line in done.stderr.splitlines() if line.startswith(("error:", "stopping", "stopped"))]
        assert [line for line in said if line.startswith("error:")] == said[-1:]
        assert said[-1].startswith(fault)
        assert len(said) == 1
        assert done.stdout.count("words used on 3 held-out instructions") == (5 if count == 2 else 3)
        assert "AssertionError" not in done.stderr


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Pre-training by two processes, which would last for minutes."""
    command = [
        *TORCHRUN,
        "2",
        str(ROOT / "train.py"),
        "900",
        *many.TOY,
        "--evaluate-every",
        "10",
        *many.CPU,
        *arguments,
    ]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def step_of(state: Path) -> int:
    """The step of a state; -1 without one."""
    return int(checkpoint.read(state, "-")["step"]) if state.exists() else -1


def faults(stderr: str) -> list[str]:
    """What the scripts said; the rest is torchrun's."""
    return [line for line in stderr.splitlines() if line.startswith(("error:", "stopping", "stopped"))]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_an_interrupt_stops_all_and_a_killed_process_ends_all(
    tmp_path: Path, tiny: Callable[..., GPT], coder: Tokenizer
) -> None:
    filled(tmp_path, tiny, coder)
    state = tmp_path / "checkpoints" / many.STATES["train"]
    launcher = started(tmp_path)
    while launcher.poll() is None and not state.exists():
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    said = faults(launcher.communicate(timeout=300)[1])
    assert [line.split(",")[0].split(":")[0] for line in said] == ["stopping after this step", "stopped; to go on"]
    assert "torchrun --nproc-per-node 2 train.py 900" in said[1]
    stopped_at = step_of(state)
    launcher = started(tmp_path, "--resume")
    while launcher.poll() is None and step_of(state) == stopped_at:
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="utf-8").split()
    leading = next(pid for pid in children if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(int(leading), signal.SIGKILL)
    began = time.monotonic()
    said = faults(launcher.communicate(timeout=300)[1])
    assert time.monotonic() - began < 30
    assert len(said) == 1
    assert said[0].startswith("error: a process of this run was killed or cannot be reached, so all have stopped")
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert step_of(state) > stopped_at
