"""Models on disk: whole or not at all, exact, and never a traceback or foreign code."""

import contextlib
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoint
from model import GPT
from runtime import UserError

Make = Callable[..., GPT]
CPU = torch.device("cpu")
FACTS = {"step": 7, "parent": None, "seed": 1, "metrics": {"loss": 1.5, "lengths": [1, 2]}}
IDS = torch.tensor([[5, 6, 7, 200]])
pytestmark = pytest.mark.filterwarnings("error")  # a library's warning on loading a file is not for users


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "base.pt"


def refusal(path: Path) -> str:
    """The one line that loading a spoiled file gives."""
    with pytest.raises(UserError) as raised:
        checkpoint.load(path, CPU)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_float32_comes_back_exactly(tiny: Make, path: Path) -> None:
    model = tiny(scale=3.0)
    checkpoint.save(path, model, FACTS)
    loaded, facts = checkpoint.load(path, CPU)
    assert facts == FACTS
    assert loaded.config == model.config
    assert all(loaded.state_dict()[name].equal(weight) for name, weight in model.state_dict().items())
    assert loaded(IDS).equal(model(IDS))
    assert not loaded.training


def test_bfloat16_comes_back_closely_in_half_the_space(tiny: Make, path: Path) -> None:
    model = tiny(channels=64)
    checkpoint.save(path, model, FACTS)
    size = path.stat().st_size
    checkpoint.save(path, model, FACTS, torch.bfloat16)
    assert path.stat().st_size < 0.6 * size
    loaded, _ = checkpoint.load(path, CPU)
    assert all(weight.dtype == torch.float32 for weight in loaded.parameters())
    assert torch.allclose(loaded.tokens.weight, model.tokens.weight, rtol=2**-8)
    assert torch.allclose(loaded(IDS), model(IDS), atol=0.01)
    assert not loaded.tokens.weight.equal(model.tokens.weight)


def test_the_head_stays_tied(tiny: Make, path: Path) -> None:
    checkpoint.save(path, tiny(), FACTS)
    assert "head.weight" not in checkpoint.read(path, "python train.py")["weights"]
    loaded, _ = checkpoint.load(path, CPU)
    assert loaded.head.weight is loaded.tokens.weight
    with torch.no_grad():
        loaded.tokens.weight[9] += 1
    assert loaded.head.weight[9].equal(loaded.tokens.weight[9])


def test_dropout_is_the_readers_choice(tiny: Make, path: Path) -> None:
    checkpoint.save(path, tiny(dropout=0.3), FACTS)
    assert checkpoint.load(path, CPU)[0].config.dropout == 0.0
    assert checkpoint.load(path, CPU, dropout=0.1)[0].config.dropout == 0.1


def test_a_file_cut_short(tiny: Make, path: Path) -> None:
    checkpoint.save(path, tiny(layers=1), FACTS)
    whole = path.read_bytes()
    for length in [0, 1, 2, 4, 10, 64, 100, 1000, *range(2000, len(whole), len(whole) // 25), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "cut short or not a checkpoint: python train.py makes one" in refusal(path)


def test_random_bytes(path: Path) -> None:
    path.parent.mkdir()
    rng = random.Random(1)
    for number in range(300):
        head = (b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95", b"PK\x05\x06")[number % 5]
        path.write_bytes(head + rng.randbytes(rng.randrange(200)))
        assert "not a checkpoint" in refusal(path)


def test_a_flipped_bit_is_found_or_changes_nothing(tiny: Make, path: Path) -> None:
    model = tiny(layers=1, channels=4)
    checkpoint.save(path, model, FACTS)
    whole = path.read_bytes()
    rng = random.Random(1)
    unnoticed = 0
    for _ in range(300):
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :])
        with contextlib.suppress(UserError):
            loaded, facts = checkpoint.load(path, CPU)
            unnoticed += 1
            assert facts == FACTS
            assert all(loaded.state_dict()[name].equal(weight) for name, weight in model.state_dict().items())
    assert unnoticed < 150  # dates and padding of the zip file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_flipped_bit_of_the_weights_is_found(tiny: Make, path: Path, dtype: torch.dtype) -> None:
    model = tiny(layers=1, channels=4)
    checkpoint.save(path, model, FACTS, dtype)
    whole = path.read_bytes()
    place = whole.index(model.positions.weight.detach().to(dtype).view(torch.uint8).numpy().tobytes())
    for byte in range(8):
        path.write_bytes(whole[: place + byte] + bytes([whole[place + byte] ^ 1]) + whole[place + byte + 1 :])
        assert "is damaged: its content is not what was written; python train.py makes one" in refusal(path)
    path.write_bytes(whole)
    checkpoint.load(path, CPU)


def test_a_fingerprint_sees_each_part() -> None:
    content = {"weights": {"a": torch.arange(6.0).view(2, 3)}, "facts": {"step": 1, "list": [1, (2.5, None)]}}
    others = [
        {**content, "weights": {"b": content["weights"]["a"]}},
        {**content, "weights": {"a": torch.arange(6.0).view(3, 2)}},
        {**content, "weights": {"a": torch.arange(6.0).view(2, 3).to(torch.bfloat16)}},
        {**content, "weights": {"a": torch.tensor([[0.0, 1, 2], [3, 4, 5.0001]])}},
        {**content, "facts": {"step": 1, "list": [1, 2.5, None]}},
        {**content, "facts": {"step": "1", "list": [1, (2.5, None)]}},
        {**content, "more": {}},
    ]
    same = {"weights": {"a": torch.arange(6.0).view(2, 3).t().contiguous().t()}, "facts": dict(content["facts"])}
    assert checkpoint.fingerprint(content) == checkpoint.fingerprint(same)
    assert len({checkpoint.fingerprint(one) for one in (content, *others)}) == 1 + len(others)
    assert checkpoint.fingerprint(torch.tensor(3)) != checkpoint.fingerprint(3)  # 0 dimensions have bytes, too


def test_a_file_without_a_checksum_loads_with_a_word(
    tiny: Make, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(path, tiny(), FACTS)
    checkpoint.load(path, CPU)
    assert capsys.readouterr().err == ""
    torch.save(checkpoint.read(path, "python train.py"), path)
    _, facts = checkpoint.load(path, CPU)
    assert facts == FACTS
    assert capsys.readouterr().err == f"{path} has no checksum, as files written before December 2026: not checked\n"


@pytest.mark.parametrize("name", ["layers", "context", "vocabulary", "channels", "heads"])
@pytest.mark.parametrize("size", [10**9, 10**12, 10**30])
def test_a_shape_beyond_the_weights_is_refused_before_it_is_built(
    tiny: Make, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    checkpoint.save(path, tiny(), FACTS)
    good = checkpoint.read(path, "python train.py")
    checkpoint.write(path, {**good, "config": {**good["config"], name: size}})
    monkeypatch.setattr(checkpoint, "GPT", None)  # calling it would be a traceback
    assert "holds a model of another shape" in refusal(path)


@pytest.mark.parametrize(
    "strange",
    [
        lambda weight: weight.to(torch.int32),
        lambda weight: weight.to(torch.complex64),
        lambda weight: weight > 0,
        lambda weight: weight.to_sparse(),
        lambda weight: weight.to("meta"),
    ],
)
def test_weights_that_are_no_plain_numbers(
    tiny: Make, path: Path, strange: Callable[[torch.Tensor], torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(path, tiny(), FACTS)
    good = checkpoint.read(path, "python train.py")
    spoiled = {**good, "weights": {**good["weights"], "positions.weight": strange(good["weights"]["positions.weight"])}}
    torch.save(spoiled, path)
    capfd.readouterr()
    assert "python train.py makes one" in refusal(path)
    assert "arning" not in capfd.readouterr().err


def test_a_tensor_that_claims_more_than_the_file_holds(tiny: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(path, tiny(), FACTS)
    good = checkpoint.read(path, "python train.py")
    weights = {**good["weights"], "positions.weight": torch.zeros(1, 16).expand(10**12, 16)}
    spoiled = {**good, "config": {**good["config"], "context": 10**12}, "weights": weights}
    torch.save(spoiled, path)
    assert "python train.py makes one" in refusal(path)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)  # would take 64 TB
    torch.save({**spoiled, "sha256": "0" * 64}, path)
    assert "python train.py makes one" in refusal(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("kind", ["pickle", "torch", "inside"])
def test_code_in_a_file_does_not_run(tiny: Make, tmp_path: Path, path: Path, kind: str) -> None:
    exploded = tmp_path / "exploded"
    path.parent.mkdir()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(exploded)))
    elif kind == "torch":
        torch.save(Bomb(exploded), path)
    else:
        checkpoint.save(path, tiny(), {"seed": Bomb(exploded)})
    assert "not a checkpoint" in refusal(path)
    assert not exploded.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: {},
        lambda _: {"model": 1},
        lambda good: {**good, "config": None},
        lambda good: {**good, "config": {**good["config"], "more": 1}},
        lambda good: {**good, "config": {**good["config"], "heads": 0}},
        lambda good: {**good, "config": {**good["config"], "heads": 3}},
        lambda good: {**good, "config": {**good["config"], "layers": 0}},
        lambda good: {**good, "config": {**good["config"], "layers": "2"}},
        lambda good: {**good, "config": {**good["config"], "layers": 3}},
        lambda good: {**good, "config": {**good["config"], "channels": 32}},
        lambda good: {**good, "config": {**good["config"], "context": 128}},
        lambda good: {**good, "config": {**good["config"], "context": -1}},
        lambda good: {**good, "weights": None},
        lambda good: {**good, "weights": {}},
        lambda good: {**good, "weights": {**good["weights"], "norm.weight": 1.0}},
        lambda good: {**good, "weights": {**good["weights"], "norm.weight": torch.zeros(3)}},
        lambda good: {**good, "weights": {**good["weights"], "more.weight": torch.zeros(3)}},
        lambda good: {**good, "weights": {1: torch.zeros(3)}},
        lambda good: {**good, "facts": 3},
        lambda good: {name: value for name, value in good.items() if name != "facts"},
        lambda good: list(good),
        lambda good: good["weights"]["norm.weight"],
        lambda _: 3,
    ],
)
def test_another_content(tiny: Make, path: Path, spoil: Callable[[dict[str, object]], object]) -> None:
    checkpoint.save(path, tiny(), FACTS)
    torch.save(spoil(checkpoint.read(path, "python train.py")), path)
    assert "python train.py makes one" in refusal(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "is missing" in refusal(tmp_path / "none" / "base.pt")
    (tmp_path / "base.pt").mkdir()
    assert "is a folder, not a checkpoint" in refusal(tmp_path / "base.pt")
    (tmp_path / "file").write_text("")
    assert "file/base.pt" in refusal(tmp_path / "file" / "base.pt").replace("\\", "/")


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("base.pt", "python train.py"),
        ("finetuned.pt", "python finetune.py"),
        ("dpo.pt", "python dpo.py"),
        ("ppo-0.05/final.pt", "python ppo.py"),
    ],
)
def test_a_missing_file_names_its_script(tmp_path: Path, name: str, maker: str) -> None:
    assert f"{maker} makes it" in refusal(tmp_path / name)


@pytest.mark.parametrize("broken", ["os.replace", "os.fsync", "torch.save", "torch.save full"])
def test_a_failing_write_leaves_the_earlier_file(
    tiny: Make, path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    checkpoint.save(path, tiny(), FACTS)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise RuntimeError("write failed") if broken.endswith("full") else OSError(28, "No space left")

    monkeypatch.setattr(broken.split()[0], fail)
    with pytest.raises(UserError, match=r"base\.pt cannot be written") as raised:
        checkpoint.save(path, tiny(seed=2), FACTS)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_earlier_file(tiny: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(path, tiny(), FACTS)
    before = path.read_bytes()

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, tiny(seed=2), FACTS)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        checkpoint.save(tmp_path / "file" / "base.pt", tiny(), FACTS)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_save_replaces_what_was_there(tiny: Make, path: Path) -> None:
    checkpoint.save(path, tiny(), FACTS)
    checkpoint.save(path, tiny(seed=2), {"step": 8})
    loaded, facts = checkpoint.load(path, CPU)
    assert facts == {"step": 8}
    assert loaded.tokens.weight.equal(tiny(seed=2).tokens.weight)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    "script", ["sample", "preferences", "dpo", "ppo", "reinforce", "finetune", "evaluate", "bench"]
)
def test_each_script_refuses_a_model_of_another_vocabulary(
    script: str, command: Callable[..., int], tiny: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(checkpoint.FINETUNED, tiny(vocabulary=300), FACTS)
    checkpoint.save(checkpoint.BASE, tiny(vocabulary=300), FACTS)
    assert command(script, *(["kite"] if script == "sample" else [])) == 1
    assert "has 300 tokens, the tokenizer 259" in capsys.readouterr().err
