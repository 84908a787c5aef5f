"""Where models live: one file a model, saved whole or not at all, loaded without running code from it.

A file is a dict of plain values and tensors: `config` (the model's shape), `weights`, `facts` (step, parent, seed,
versions, metrics), and `sha256`, the fingerprint of all that. It is written to a temporary file beside its place and
moved there, so a reader never meets half a model; a bit that flips on the disk is found when the file is read.
"""

import dataclasses
import hashlib
import pickle
import struct
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    """Writes a dict of plain values and tensors to `path`, with their fingerprint, whole or not at all.

    Raises: UserError where it cannot be written.
    """
    try:
        signed = {**content, "sha256": fingerprint(content)}
        runtime.write_whole(path, lambda file: torch.save(signed, file))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise UserError(f"{path} cannot be written ({error}): free space or permissions, then run again") from None


def read(path: Path, maker: str) -> dict[str, Any]:
    """The dict that `write` stored at `path`; `maker` is the command that makes such a file.

    Raises: UserError where the file is missing, is not one of ours, or no longer what was written.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's words on a strange file are for programmers
            content = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(content, dict):
                raise UserError(f"{path} is not a checkpoint of this program: {maker} makes one")
            written = content.pop("sha256", None)
            changed = written is not None and written != fingerprint(content)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {maker} makes it") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a checkpoint: {maker} makes one") from None
    except DAMAGE:
        raise UserError(f"{path} is cut short or not a checkpoint: {maker} makes one") from None
    if changed:
        raise UserError(f"{path} is damaged: its content is not what was written; {maker} makes one")
    if written is None:
        print(f"{path} has no checksum, as files written before December 2026: not checked", file=sys.stderr)
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

    Raises: UserError where the file is missing, cut short, damaged, not a checkpoint, its weights do not fit its shape,
    or its vocabulary is another.
    """
    maker = maker_of(path)
    content = read(path, maker)
    try:
        config = ModelConfig(**{**content["config"], "dropout": dropout})
        refuse_other_shape(config, content["weights"])  # before a model is built: it may claim 10^9 layers
        model = GPT(config)
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


def refuse_other_shape(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError where the weights are not those of a model of this shape, or no plain floating point numbers.

    What has passed takes no more memory than the file did: a tensor can claim any size by reading one number again
    and again, but is not contiguous then.
    """
    vocabulary, channels = weights["tokens.weight"].shape
    context, _ = weights["positions.weight"].shape
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    there = {"vocabulary": vocabulary, "channels": channels, "context": context, "layers": layers}
    for name, size in there.items():
        if getattr(config, name) != size:
            raise ValueError(f"{name} {getattr(config, name)}, the weights have {size}")
    for name, weight in weights.items():
        if not weight.is_floating_point() or not weight.is_contiguous():
            raise ValueError(f"{name} holds {weight.dtype}, or is no plain tensor")


def fingerprint(content: object) -> str:
    """SHA-256 of plain values and tensors, in dicts and lists of any depth: equal only where all of them are."""
    digest = hashlib.sha256()
    feed(digest, content)
    return digest.hexdigest()


def feed(digest: "hashlib._Hash", part: object) -> None:
    """Feeds a part of a content into the digest, in place."""
    if isinstance(part, Tensor):
        if part.numel() * part.element_size() > part.untyped_storage().nbytes():
            raise ValueError(f"a tensor of {tuple(part.shape)} in {part.untyped_storage().nbytes()} bytes")
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(part, Mapping):
        digest.update(f"dict {len(part)}".encode())
        for key in part:
            feed(digest, key)
            feed(digest, part[key])
    elif isinstance(part, list | tuple):
        digest.update(f"list {len(part)}".encode())
        for one in part:
            feed(digest, one)
    else:
        digest.update(repr(part).encode())
