"""What the tests share: a tokenizer of bytes, tiny models, a folder in which commands run, and the command line."""

import importlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoint
import runtime
import tokenizer
from model import GPT, ModelConfig
from tokenizer import Tokenizer

BYTES = {bytes([value]): value for value in range(256)}
WORDS = ("kite", "lake", "bird", "tree", "fish", "moon", "boat", "frog")  # of one length, so that prompts are too

torch.set_num_threads(1)  # a second thread only slows models this small down


@pytest.fixture(scope="session")
def coder() -> Tokenizer:
    """A tokenizer without merges: a token a byte, and the three special ones, 259 in all."""
    return Tokenizer(BYTES)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., GPT]:
    """Makes a seeded tiny model in eval mode: `tiny()`, `tiny(context=256)`, `tiny(dropout=0.5)`, `tiny(seed=2)`."""

    def make(seed: int = 0, scale: float = 1.0, **shape: int | float) -> GPT:
        torch.manual_seed(seed)
        defaults = {"vocabulary": 259, "context": 64, "layers": 2, "heads": 2, "channels": 16, "dropout": 0.0}
        model = GPT(ModelConfig(**{**defaults, **shape}))  # type: ignore[arg-type]
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight *= scale  # above 1: an untrained model whose next token depends on what it read
        return model.eval()

    return make


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., GPT]) -> Path:
    """A working folder: byte tokenizer, instructions, stories and a tiny `checkpoints/finetuned.pt` (context 128)."""
    monkeypatch.chdir(tmp_path)
    tokenizer.save(BYTES, tokenizer.PATH)
    rng = random.Random(1)
    told = []
    for number in range(40):
        words = rng.sample(WORDS, 3)
        told.append({"words": words, "story": f"A {words[0]} saw a {words[1]} {number} times."})
    for name, rows in (("train", told[:30]), ("heldout", told[30:])):
        lines = [json.dumps({"words": row["words"]}) + "\n" for row in rows]
        Path(f"data/instructions-{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    Path("data/stories-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told[:30]), encoding="utf-8")
    heldout = "\n<|endoftext|>\n".join(str(row["story"]) for row in told[30:])
    Path("data/stories-heldout.txt").write_text(heldout, encoding="utf-8")
    checkpoint.save(checkpoint.FINETUNED, tiny(context=128), {"step": 0, "parent": None, "seed": 0})
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a script's main as the command line would, `command("sample", "kite", "--seed", "2")`: its exit status."""

    def call(script: str, *args: object) -> int:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        try:
            runtime.run(importlib.import_module(script).main)
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call
