"""Pre-training: what is read, the schedule, stopping and going on, and that a toy is learned."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import checkpoint
import train
from prepare import write_tokens
from runtime import UserError
from train import Config, ModelConfig

Command = Callable[..., int]
TOY = ("--model.vocabulary", 20, "--model.context", 16, "--model.layers", 1, "--model.heads", 1, "--model.channels", 16)
CPU = ("--device", "cpu", "--precision", "float32")
SMALL = Config(batch=4, model=ModelConfig(vocabulary=20, context=16))


def toy_tokens(number: int, seed: int = 0) -> numpy.ndarray:
    """Steps of 3 around a ring of 19, with an id 19 put in now and then."""
    ids = numpy.arange(number) * 3 % 19
    ids[numpy.random.default_rng(seed).integers(number, size=number // 20)] = 19
    return ids.astype(numpy.uint16)


@pytest.fixture
def data(workspace: Path) -> Path:
    write_tokens(Path("data/tokens-train.npy"), toy_tokens(1200))
    write_tokens(Path("data/tokens-heldout.npy"), toy_tokens(200, seed=1))
    return workspace


def logged() -> list[dict[str, float]]:
    """Metrics of the runs, in the order they were started."""
    files = sorted(Path("runs").glob("train-*/metrics.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("length", [18, 19, 33, 40, 500, 1000, 1001])
def test_windows_predict_each_token_once(length: int) -> None:
    tokens, context = numpy.arange(length), 16
    for number in range(3):
        rows = train.windows(tokens, context, 1, number)
        assert rows.shape[1] == context + 1
        assert (numpy.diff(rows) == 1).all()
        predicted = numpy.sort(rows[:, 1:].ravel())
        assert (predicted == numpy.arange(predicted[0], predicted[0] + len(predicted))).all()
        assert predicted[0] - 1 < context  # the offset, less than a window
        assert length - 1 - predicted[-1] < context
        assert numpy.sort(rows[:, 0])[1:].tolist() == numpy.sort(rows[:, -1])[:-1].tolist()


def test_passes_have_their_own_order_and_offset() -> None:
    tokens = numpy.arange(1000)
    first, second = (train.windows(tokens, 16, 1, number) for number in (0, 1))
    assert first.tolist() == train.windows(tokens, 16, 1, 0).tolist()
    assert first[:, 0].tolist() != sorted(first[:, 0])
    assert {row % 16 for row in first[:, 0]} != {row % 16 for row in second[:, 0]}
    assert first.tolist() != train.windows(tokens, 16, 2, 0).tolist()


def test_batches_go_on_from_any_step() -> None:
    tokens = toy_tokens(500)
    a_pass = train.steps_of_a_pass(len(tokens), SMALL)
    assert a_pass == (500 - 17) // 16 // 4
    whole = list(itertools.islice(train.batches(tokens, SMALL, 0), 3 * a_pass))
    assert {tuple(batch.shape) for batch in whole} == {(4, 17)}
    for first in (1, a_pass - 1, a_pass, a_pass + 3):
        rest = itertools.islice(train.batches(tokens, SMALL, first), 5)
        assert all(left.equal(right) for left, right in zip(rest, whole[first : first + 5], strict=True))
    assert whole[0].dtype == torch.int64
    order = train.windows(tokens, 16, SMALL.seed, 1)
    assert whole[a_pass].tolist() == order[:4].tolist()
    assert whole[a_pass + 1].tolist() == order[4:8].tolist()


@pytest.mark.usefixtures("data")
def test_a_toy_is_learned(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", 8, *TOY, *CPU, "--lr", 1e-2, "--warmup", 10, "--evaluate-every", 40) == 0
    metrics = logged()
    # 19 in 20 tokens are certain, and the last token of one context is all it takes
    assert metrics[-1]["loss/heldout"] < 0.8 < 1.2 < metrics[0]["loss/train"]
    assert metrics[-1]["step"] == 8 * train.steps_of_a_pass(1200, Config(model=ModelConfig(context=16)))
    model, facts = checkpoint.load(checkpoint.BASE, torch.device("cpu"))
    assert facts["heldout_loss"] == min(line["loss/heldout"] for line in metrics)
    assert facts["parent"] is None
    after_six = model(torch.tensor([[0, 3, 6]]))[0, -1]
    assert after_six.argmax() == 9
    assert str(checkpoint.BASE) in capsys.readouterr().out.splitlines()[-1]


def stopped_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """Lets the run be interrupted, as by Ctrl-C, right behind its n-th evaluation."""
    left = iter(range(writes - 1))
    write = checkpoint.write

    def write_and_stop(path: Path, content: Mapping[str, Any]) -> None:
        write(path, content)
        if path == train.STATE and next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write", write_and_stop)


@pytest.mark.usefixtures("data")
def test_the_best_weights_are_kept(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = numpy.random.default_rng(1).integers(20, size=400).astype(numpy.uint16)
    numpy.save("data/tokens-heldout.npy", noise)  # the better the ring is known, the worse this is predicted
    flags = (4, *TOY, *CPU, "--warmup", 1, "--evaluate-every", 6, "--lr", 1e-2)
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        assert command("train", *flags) == 130
    assert command("train", "--resume", *flags) == 0
    metrics = logged()
    best = min(metrics, key=lambda line: line["loss/heldout"])
    assert best["step"] < metrics[2]["step"] < metrics[-1]["step"]
    facts = checkpoint.read(checkpoint.BASE, "")["facts"]
    assert (facts["step"], facts["heldout_loss"]) == (best["step"], best["loss/heldout"])


@pytest.mark.usefixtures("data")
def test_a_finished_run_resumes_to_nothing(command: Command) -> None:
    assert command("train", 1, *TOY, *CPU) == 0
    before = checkpoint.BASE.read_bytes()
    assert command("train", 1, "--resume", *TOY, *CPU) == 0
    assert checkpoint.BASE.read_bytes() == before


@pytest.mark.usefixtures("data")
def test_resume_refuses_what_it_cannot_read(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--resume", *TOY, *CPU) == 1
    assert "base-state.pt is missing" in capsys.readouterr().err
    for content in ({}, {"settings": 3, "run": "runs/x", "step": 1, "inputs": ""}):
        checkpoint.write(train.STATE, content)
        assert command("train", "--resume", *TOY, *CPU) == 1
        assert "not the state of a run" in capsys.readouterr().err
    assert command("train", 0.2, *TOY, *CPU) == 0
    whole = bytearray(train.STATE.read_bytes())
    weights = checkpoint.read(train.STATE, "")["weights"]["positions.weight"].numpy().tobytes()
    whole[whole.index(weights)] ^= 1
    train.STATE.write_bytes(whole)
    assert command("train", 0.4, "--resume", *TOY, *CPU) == 1
    assert "is damaged: its content is not what was written" in capsys.readouterr().err
    train.STATE.write_bytes(b"cut")
    assert command("train", "--resume", *TOY, *CPU) == 1
    assert "not a checkpoint" in capsys.readouterr().err


def spoil(kind: str, path: Path) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "bytes":
        path.write_bytes(b"no tokens")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flipped":
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 3] ^= 1  # of an id, which stays below the vocabulary
        path.write_bytes(whole)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif kind == "zip":
        with path.open("wb") as file:
            numpy.savez(file, toy_tokens(500))
    else:
        shapes = {
            "short": toy_tokens(17),
            "square": toy_tokens(400).reshape(20, 20),
            "floats": toy_tokens(400) / 2,
            "vocabulary": toy_tokens(400) + 1,
        }
        numpy.save(path, shapes[kind])


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", ["train", "heldout"])
@pytest.mark.parametrize(
    "kind", [*("missing", "bytes", "empty", "flipped", "cut", "zip"), *("short", "square", "floats", "vocabulary")]
)
def test_spoiled_tokens_are_one_line(
    command: Command, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    path = Path(f"data/tokens-{name}.npy")
    spoil(kind, path)
    assert command("train", 1, *TOY, *CPU) == 1
    output = capsys.readouterr().err
    assert str(path) in output
    assert "prepare.py" in output
    assert len(output.splitlines()) == 1
    assert not checkpoint.BASE.exists()
    assert not Path("runs").exists()


@pytest.mark.usefixtures("data")
def test_tokens_without_a_checksum_are_read_with_a_word(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    numpy.save("data/tokens-train.npy", toy_tokens(1200))
    assert command("train", 0.2, *TOY, *CPU) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "checksum" in line]
    assert said == ["data/tokens-train.npy has no checksum, as files written before December 2026: not checked"]


def test_too_few_tokens_for_a_batch() -> None:
    with pytest.raises(UserError, match="lower --batch"):
        train.steps_of_a_pass(17 + 16 * 4 - 1, SMALL)
    assert train.steps_of_a_pass(17 + 16 * 4, SMALL) == 1


@pytest.mark.parametrize(
    "args",
    [
        (0,),
        (-1,),
        ("nan",),
        ("many",),
        ("--batch", 0),
        ("--warmup", -1),
        ("--evaluate-every", 0),
        ("--lr", "nan"),
        ("--lr", -1),
        ("--model.dropout", 1),
        ("--seed", -1),
        ("--model.heads", 5),
        ("--model.heads", 0),
        ("--model.layers", 0),
        ("--device", "tpu"),
    ],
)
@pytest.mark.usefixtures("data")
def test_wrong_flags_exit_with_2(
    command: Command, capsys: pytest.CaptureFixture[str], args: tuple[object, ...]
) -> None:
    assert command("train", *args) == 2
    output = capsys.readouterr().err
    assert str(args[-1]) in output
    assert "Traceback" not in output
    assert not Path("runs").exists()
