"""Where models live: one file a model, saved whole or not at all, loaded without running code from it.

A file is a dict of plain values and tensors: `config` (the model's shape), `weights`, and `facts` (step, parent,
seed, versions, metrics). It is written to a temporary file beside its place and moved there, so a reader never meets
half a model.
"""

import dataclasses
import hashlib
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import runtime
from model import GPT, ModelConfig
from runtime import UserError

FOLDER = Path("checkpoints")
BASE = FOLDER / "base.pt"
FINETUNED = FOLDER / "finetuned.pt"
DPO = FOLDER / "dpo.pt"

# What torch raises over a file that is cut short, damaged, or of another program.
DAMAGE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(struct.error, pickle.UnpicklingError, zipfile.BadZipFile),
)


def save(path: Path, model: GPT, facts: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Writes the model to `path`, replacing what is there whole or not at all; bfloat16 halves the file.

    Raises: UserError where it cannot be written.
    """
    weights = {name: weight.detach().to("cpu", dtype) for name, weight in model.state_dict().items()}
    del weights["head.weight"]  # tied to tokens.weight: one tensor, one copy
    write(path, {"config": dataclasses.asdict(model.config), "weights": weights, "facts": dict(facts)})


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a dict of plain values and tensors to `path`, whole or not at all.

    Raises: UserError where it cannot be written.
    """
    try:
        runtime.write_whole(path, lambda file: torch.save(dict(content), file))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise UserError(f"{path} cannot be written ({error}): free space or permissions, then run again") from None


def read(path: Path, maker: str) -> dict[str, Any]:
    """The dict that `write` stored at `path`; `maker` is the command that makes such a file.

    Raises: UserError where the file is missing or is not one of ours.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {maker} makes it") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a checkpoint: {maker} makes one") from None
    except DAMAGE:
        raise UserError(f"{path} is cut short or not a checkpoint: {maker} makes one") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint of this program: {maker} makes one")
    return content


def maker_of(path: Path) -> str:
    """The command that makes a checkpoint of this name."""
    by_name = {DPO.name: "python dpo.py", BASE.name: "python train.py"}
    by_folder = {"ppo": "python ppo.py", "reinforce": "python reinforce.py"}
    return by_folder.get(path.parent.name.partition("-")[0], by_name.get(path.name, "python finetune.py"))


def load(
    path: Path, device: torch.device, vocabulary: int | None = None, dropout: float = 0.0
) -> tuple[GPT, dict[str, Any]]:
    """The model stored at `path`, float32 and in eval mode, and its facts; `vocabulary` is the tokenizer's, in tokens.

    Raises: UserError where the file is missing, cut short, not a checkpoint, its weights do not fit its shape, or its
    vocabulary is another.
    """
    maker = maker_of(path)
    content = read(path, maker)
    try:
        model = GPT(ModelConfig(**{**content["config"], "dropout": dropout}))
        weights = {name: weight.float() for name, weight in content["weights"].items()}
        model.load_state_dict({**weights, "head.weight": weights["tokens.weight"]})
        facts = dict(content["facts"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        raise UserError(f"{path} holds a model of another shape, or none: {maker} makes one") from None
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise UserError(f"{path} holds weights that are no numbers: {maker} makes one")
    if vocabulary is not None and model.config.vocabulary != vocabulary:
        raise UserError(
            f"{path} has {model.config.vocabulary} tokens, the tokenizer {vocabulary}: bring back the one that it was "
            f"trained with, or train the model anew ({maker})"
        )
    return model.to(device).eval(), facts


def fingerprint(model: GPT) -> str:
    """A short text that two models share only where all their weights are equal."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode("utf-8") + weight.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
