"""Takes a checkpoint to Hugging Face transformers, as a folder that holds a GPT-2, and brings such a folder back.

    python export.py                                        checkpoints/finetuned.pt -> exports/finetuned, seconds
    python export.py checkpoints/ppo-0.05/final.pt --to exports/ppo
    python export.py --from exports/ppo                     a folder of a Fable-shaped GPT-2 -> checkpoints/ppo.pt

Fable's model is a GPT-2 without biases, so its weights fit `GPT2LMHeadModel` with biases of zero and the exact GELU,
and give the same logits. The tokenizer becomes a `tokenizer.json` that gives the same ids. docs/export.md says what
a caller of transformers needs to know.

Needs the packages safetensors and tokenizers, which only this script uses, beside those of the other scripts.
Source: Radford et al. 2019 (GPT-2).
"""

import importlib.util
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

import checkpoint
import runtime
import sample
import tokenizer
from model import GPT, ModelConfig
from runtime import UserError
from tokenizer import SPECIAL, Tokenizer

FOLDER = Path("exports")
WEIGHTS, SHAPE, MERGES, CARD = "model.safetensors", "config.json", "tokenizer.json", "README.md"
FILES = {WEIGHTS, SHAPE, MERGES, CARD, "generation_config.json", "tokenizer_config.json"}
MARK = "fable"  # metadata of the weights that holds a checkpoint's facts; transformers drops it from what it saves

# Of a block our names, GPT-2's, and the channels that go in and out, each a multiple of C; a norm has no inputs.
PARTS = (
    ("norm_attention", "ln_1", 0, 1),
    ("attention.qkv", "attn.c_attn", 1, 3),
    ("attention.out", "attn.c_proj", 1, 1),
    ("norm_mlp", "ln_2", 0, 1),
    ("up", "mlp.c_fc", 1, 4),
    ("down", "mlp.c_proj", 4, 1),
)

# What config.json says of every model of ours; `transformers` assumes all but the first two where nothing is said.
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu",  # the exact one; GPT-2's own, gelu_new, is an approximation
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
SIZES = {
    "vocabulary": "vocab_size",
    "context": "n_positions",
    "layers": "n_layer",
    "heads": "n_head",
    "channels": "n_embd",
}
LARGEST = 2**26  # bytes of a JSON file; a tokenizer of 100,000 tokens has a tenth

# The name of a special token is a special token wherever it stands in what transformers encodes. So the template puts
# a sign that Unicode keeps for a program's own use into such names in a user's text, and `normalizer` takes it out.
CHAT = r"""
{%- macro plain(text) -%}
{{- text | replace('\ufdd0', '\ufdd00') | replace('<|', '<\ufdd01|') -}}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|user|>' + plain(message.content) -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + plain(message.content) + '<|endoftext|>' -}}
{%- else -%}
{{- raise_exception('Fable knows the roles user and assistant, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""".strip()


@dataclass(frozen=True, slots=True)
class Config:
    """What to export, or to bring back, and where to."""

    # Checkpoint to export; checkpoints/finetuned.pt where none is named.
    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    to: Path | None = None  # where it goes; exports/NAME, with --from checkpoints/NAME.pt
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None  # folder to bring back as a checkpoint
    force: bool = False  # take the place of something else; a folder that stood there gets another name

    def __post_init__(self) -> None:
        if self.model is not None and self.from_ is not None:
            raise ValueError(f"{self.model} and --from {self.from_}: one at a time")


def gpt2_weights(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of each weight our name, GPT-2's name, and GPT-2's shape; its matrices are (inputs, outputs), ours transposed."""
    channels = config.channels
    yield "tokens.weight", "transformer.wte.weight", (config.vocabulary, channels)
    yield "positions.weight", "transformer.wpe.weight", (config.context, channels)
    for layer in range(config.layers):
        for ours, theirs, inputs, outputs in PARTS:
            shape = (inputs * channels, outputs * channels) if inputs else (channels,)
            yield f"blocks.{layer}.{ours}.weight", f"transformer.h.{layer}.{theirs}.weight", shape
    yield "norm.weight", "transformer.ln_f.weight", (channels,)


def turned(name: str, weight: Tensor) -> Tensor:
    """A weight of ours, by its name, as GPT-2 holds it, or the other way round: matrices of blocks are transposed."""
    return weight.t().contiguous() if name.startswith("blocks.") and weight.dim() == 2 else weight


def bias_of(theirs: str) -> str | None:
    """Name of the bias that GPT-2 has beside a weight; its embeddings have none."""
    return None if theirs.endswith(("wte.weight", "wpe.weight")) else f"{theirs.removesuffix('weight')}bias"


def exported_weights(model: GPT) -> dict[str, Tensor]:
    """GPT-2's weights of a model by their names, float32 on the CPU, with biases of zero."""
    state = {name: weight.detach().float().cpu() for name, weight in model.state_dict().items()}
    weights = {}
    for ours, theirs, shape in gpt2_weights(model.config):
        weights[theirs] = turned(ours, state[ours])
        assert weights[theirs].shape == shape, (ours, weights[theirs].shape, shape)
        if bias := bias_of(theirs):
            weights[bias] = torch.zeros(shape[-1])
    return weights


def merge_of(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that merge into `token`, of several bytes; None where merging never makes it.

    tiktoken joins any neighbours that make a token, lowest rank first. So the parts that a token has before its last
    merge are always the same, alone or inside a longer text: as long as nothing is merged across their ends, what
    stands around them changes neither which pairs there are nor their order.
    """
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        joined = [first + second for first, second in itertools.pairwise(parts)]
        lowest = min(range(len(joined)), key=lambda place: ranks.get(joined[place], math.inf))
        if joined[lowest] not in ranks:
            return None
        parts[lowest : lowest + 2] = [joined[lowest]]
    return parts[0], parts[1]


def tokenizer_json(coder: Tokenizer) -> str:
    """`tokenizer.json` of the tokenizer: byte-level BPE with the same merges, pattern and special tokens."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Built

    alphabet = sorted(
        pre_tokenizers.ByteLevel.alphabet()
    )  # a printable character for each byte: itself where it is one
    shown = {ord(sign): sign for sign in alphabet if ord(sign) < 256}
    rest = (value for value in range(256) if value not in shown)
    shown |= dict(zip(rest, (sign for sign in alphabet if ord(sign) >= 256), strict=True))
    text = {token: "".join(shown[value] for value in token) for token in coder.ranks}
    in_order = sorted(coder.ranks, key=coder.ranks.__getitem__)
    pairs = [pair for token in in_order if len(token) > 1 and (pair := merge_of(token, coder.ranks))]
    built = Built(
        models.BPE(
            vocab={text[token]: rank for token, rank in coder.ranks.items()},
            merges=[(text[first], text[second]) for first, second in pairs],
            ignore_merges=True,  # as in tiktoken: a piece that is a token is that token
        )
    )
    built.normalizer = normalizers.Sequence(
        [normalizers.Replace("\ufdd01", ""), normalizers.Replace("\ufdd00", "\ufdd0")]
    )
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokenizer.PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return built.to_str()


def exported_files(model: GPT, coder: Tokenizer, source: Path, facts: Mapping[str, Any]) -> dict[str, bytes]:
    """Content of each file of the folder by name; source: path of the checkpoint."""
    import safetensors.torch

    sizes = {theirs: getattr(model.config, ours) for ours, theirs in SIZES.items()}
    ids = {"bos_token_id": coder.end, "eos_token_id": coder.end, "pad_token_id": coder.end}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    architecture = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    sampling = {"do_sample": True, "temperature": sample.Config().temperature, "top_k": sample.Config().top_k}
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), SPECIAL[0]),
        "additional_special_tokens": SPECIAL[1:],
        "model_max_length": model.config.context,
        "padding_side": "left",  # a batch of prompts goes on at the right
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
    }
    content = {
        SHAPE: architecture | FIXED | sizes | ids | dropout,
        # The context and not a number of new tokens: no prompt makes transformers read beyond the last position.
        "generation_config.json": ids | sampling | {"top_p": 1.0, "max_length": model.config.context},
        "tokenizer_config.json": tokens,
    }
    return {
        WEIGHTS: safetensors.torch.save(exported_weights(model), {"format": "pt", MARK: json.dumps(facts)}),
        MERGES: tokenizer_json(coder).encode(),
        CARD: card(model, source, facts).encode(),
        **{name: (json.dumps(values, indent=2) + "\n").encode() for name, values in content.items()},
    }


def rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A row of a Markdown table for each fact, those of parents behind."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from rows(value, f"{prefix}{name}.")
        else:
            yield f"| {runtime.markdown(prefix + name)} | {runtime.markdown(str(value))} |"


def commands(source: Path, facts: Mapping[str, Any]) -> list[str]:
    """The commands that made a checkpoint and, as far as its facts say, its parents, oldest first."""
    known = [f"{checkpoint.maker_of(source)}  # {source.as_posix()}"]
    parent, base = facts.get("parent"), facts.get("base")
    if isinstance(parent, str):
        known = [*commands(Path(parent), base if isinstance(base, Mapping) else {}), *known]
    return known


def card(model: GPT, source: Path, facts: Mapping[str, Any]) -> str:
    """The model card."""
    shape = model.config
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    made = "\n".join(("python prepare.py", *commands(source, facts)))
    table = "\n".join(rows(facts))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
language: en
---

# {source.with_suffix("").as_posix()}

A small GPT that writes children's stories with words it is asked for and works on grade-school word problems, made
with Fable. It is a GPT-2 without biases: {size:.1f} million parameters, {shape.layers} layers, {shape.heads} heads,
{shape.channels} channels, a vocabulary of {shape.vocabulary:,} tokens, a context of {shape.context}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, coder = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
request = [{{"role": "user", "content": "{tokenizer.story_request(sample.Config().words)}"}}]
prompt = coder.apply_chat_template(request, add_generation_prompt=True, return_tensors="pt")
print(coder.decode(model.generate(**prompt)[0], skip_special_tokens=True))
```

## Data and licence

Stories: TinyStories (Eldan and Li 2023, arXiv 2305.07759; CDLA-Sharing-1.0), unless `prepare.py --stories` was given
others. Word problems: generated. Fable itself has the MIT licence.

## How it was made

Without the settings that were given:

```
{made}
```

| fact | value |
| --- | --- |
{table}

## Limits

The model knows simple children's stories and generated word problems of one to four steps, in English, and nothing
else. It does not converse: one request, one answer. Fable runs a calculator that writes the result after `=` in
`<<48/2=`; transformers has none, so there the model guesses it.
"""


def is_export(folder: Path) -> bool:
    """Whether a folder holds what this script wrote and nothing else: transformers drops our mark when it saves."""
    from safetensors import SafetensorError, safe_open

    names = {path.name for path in folder.iterdir()}
    if not names <= FILES or not (folder / WEIGHTS).is_file():
        return not names  # an empty folder is nobody's loss
    try:
        with safe_open(folder / WEIGHTS, "pt") as weights:
            return MARK in (weights.metadata() or {})
    except SafetensorError:
        return False


def write_folder(files: Mapping[str, bytes], folder: Path, force: bool) -> None:
    """Makes a folder of these files, whole or not at all: beside its place first, then moved there.

    An earlier export is replaced. Something else is left alone, or with `force` moved to a name beside.
    Raises: UserError where the folder cannot be written or is something else.
    """
    place = Path(os.path.abspath(folder))
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise UserError(f"--to {folder}: a link or file stands there; name another folder")
    if place == Path.cwd() or place in Path.cwd().parents:
        raise UserError(f"--to {folder}: you work inside it; name another folder, such as exports/finetuned")
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    earlier = next(path for n in itertools.count(1) if not (path := place.with_name(f"{place.name}.old-{n}")).exists())
    try:
        ours = not place.exists() or is_export(place)
        if not ours and not force:
            raise UserError(f"--to {folder}: holds something else than an export; name another, or add --force")
        temporary.mkdir(parents=True)
        for name, content in files.items():
            with (temporary / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        try:
            if place.exists():
                place.rename(earlier)
            temporary.rename(place)
        except BaseException:
            if earlier.exists() and not place.exists():
                earlier.rename(place)
            raise
        if ours:
            shutil.rmtree(earlier, ignore_errors=True)
        else:
            print(f"{folder}: what stood there is now {folder.with_name(earlier.name)}")
    except OSError as error:
        raise UserError(f"--to {folder}: cannot be written ({error.strerror}); free it, or name another") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a folder.

    Raises: UserError where it is missing, too large or something else.
    """
    try:
        if not path.is_file():  # nor is a pipe one, from which reading would wait
            raise UserError(f"{path} is missing: --from takes a folder with {WEIGHTS}, {SHAPE} and {MERGES}")
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} has over {LARGEST:,} bytes: no such file of a small GPT-2")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path} is cut short or not JSON: export or save the model anew") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: export or save the model anew")
    return content


def fitting_shape(path: Path, coder: Tokenizer) -> ModelConfig:
    """The shape that a folder's config.json gives.

    Raises: UserError that names the first entry that no model of ours has.
    """
    said = read_json(path)
    known = {name: value for name, value in FIXED.items() if name not in ("model_type", "activation_function")}
    for name, value in FIXED.items():
        if (found := said.get(name, known.get(name))) != value:
            raise UserError(f"{path}: {name} is {found!r:.60}, in Fable {value!r}: this model does not fit")
    sizes = {ours: said.get(theirs) for ours, theirs in SIZES.items()}
    for ours, theirs in SIZES.items():
        if type(sizes[ours]) is not int:
            raise UserError(f"{path}: {theirs} is {sizes[ours]!r:.60}, not a whole number: this model does not fit")
    try:
        shape = ModelConfig(**sizes)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"{path}: {error!s:.90}: this model does not fit") from None
    if said.get("n_inner") not in (None, 4 * shape.channels):
        raise UserError(f"{path}: n_inner is {said['n_inner']!r:.60}, in Fable 4 times n_embd: this model does not fit")
    if shape.vocabulary != coder.vocabulary:
        raise UserError(
            f"{path}: vocab_size is {shape.vocabulary}, {tokenizer.PATH} has {coder.vocabulary} tokens: bring back the "
            "tokenizer that the model was trained with"
        )
    return shape


def check_vocabulary(path: Path, coder: Tokenizer) -> None:
    """Raises: UserError where a folder's tokenizer.json has other tokens than the tokenizer, or other ids of them."""

    def ids(content: dict[str, Any]) -> dict[str, int]:
        return {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}

    found = read_json(path)
    try:
        same = ids(found) == ids(json.loads(tokenizer_json(coder)))
    except (KeyError, TypeError):
        same = False
    if not same:
        raise UserError(
            f"{path} has other tokens than {tokenizer.PATH}: bring back the tokenizer that the model was trained with"
        )


def imported(folder: Path, coder: Tokenizer) -> tuple[GPT, dict[str, Any]]:
    """The model of a folder, and the facts of its checkpoint where it is an export that nobody trained on.

    Nothing is made larger than what the file holds: each weight's shape is compared before it is read.
    Raises: UserError that names the first thing that does not fit.
    """
    from safetensors import SafetensorError, safe_open

    shape = fitting_shape(folder / SHAPE, coder)
    check_vocabulary(folder / MERGES, coder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path} is missing: save the model as safetensors, in one file; a pickle is not read")
    weights = {}
    try:
        with safe_open(path, "pt") as file:
            left = set(file.keys())

            def taken(name: str, size: tuple[int, ...]) -> Tensor:
                if name not in left:
                    raise UserError(f"{path} has no {name}: this model does not fit {folder / SHAPE}")
                left.remove(name)
                entry = file.get_slice(name)
                if (found := tuple(entry.get_shape())) != size:
                    raise UserError(f"{path}: {name} is {found}, by {SHAPE} {size}: this model does not fit")
                if entry.get_dtype() not in ("F32", "F16", "BF16"):
                    raise UserError(f"{path}: {name} is {entry.get_dtype()}: save the model in float32 or bfloat16")
                weight: Tensor = file.get_tensor(name).float()
                if not weight.isfinite().all():
                    raise UserError(f"{path}: {name} holds values that are no numbers: this model is broken")
                return weight

            for ours, theirs, size in gpt2_weights(shape):
                weights[ours] = turned(ours, taken(theirs, size))
                if (bias := bias_of(theirs)) and taken(bias, size[-1:]).any():
                    raise UserError(f"{path}: {bias} is not zero, and Fable has no biases: train with them frozen")
            if left:
                raise UserError(f"{path} has {min(left)!r:.80}, a weight that Fable has not: this model does not fit")
            said = (file.metadata() or {}).get(MARK)
        facts = {"parent": folder.as_posix()} if said is None else dict(json.loads(said))
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError):
        raise UserError(f"{path} is cut short or damaged: export or save the model anew") from None
    model = GPT(shape)
    model.load_state_dict({**weights, "head.weight": weights["tokens.weight"]})
    return model.eval(), facts


def export(source: Path, folder: Path, force: bool) -> None:
    """Writes the checkpoint at `source` as a folder for transformers."""
    coder = tokenizer.load()
    model, facts = checkpoint.load(source, torch.device("cpu"), coder.vocabulary)
    files = exported_files(model, coder, source, facts)
    write_folder(files, folder, force)
    print(f"{folder}: {sum(map(len, files.values())) / 1e6:.1f} MB; AutoModelForCausalLM.from_pretrained reads it")


def bring_back(folder: Path, path: Path, force: bool) -> None:
    """Saves the model of a folder as a checkpoint."""
    model, facts = imported(folder, tokenizer.load())
    if path.exists() and not force:
        raise UserError(f"{path} is there already: name another with --to, or add --force")
    checkpoint.save(path, model, facts)
    print(f"{path}: from {folder}; python sample.py --model {path} writes with it")


def main() -> None:
    config = runtime.parse(Config, __doc__)
    missing = [name for name in ("safetensors", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export.py needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if config.from_ is not None:
        default = checkpoint.FOLDER / f"{Path(os.path.abspath(config.from_)).name}.pt"
        bring_back(config.from_, config.to or default, config.force)
        return
    source = config.model or checkpoint.FINETUNED
    inside = source.relative_to(checkpoint.FOLDER) if source.is_relative_to(checkpoint.FOLDER) else Path(source.name)
    export(source, config.to or FOLDER / inside.with_suffix(""), config.force)


if __name__ == "__main__":
    runtime.run(main)
