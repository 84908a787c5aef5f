"""Export to Hugging Face transformers and back: the same logits, stories, ids and weights, and hostile folders."""

import importlib.util
import itertools
import json
import os
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rustbpe
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
import export
import runtime
import sample
import situations
import stories
import tokenizer
from model import GPT
from tokenizer import SPECIAL, Tokenizer

ROOT = Path(__file__).parent.parent
FACTS = {"step": 7, "parent": "checkpoints/base.pt", "heldout_loss": 1.5, "base": {"seed": 3, "parent": None}}
Make = Callable[..., GPT]
Command = Callable[..., int]


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # read when the package is imported
        import transformers

        transformers.utils.logging.disable_progress_bar()
        yield transformers


def lively(model: GPT) -> GPT:
    """The model with norms that are not all ones, so that one left out or swapped with another shows."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.copy_(1 + torch.rand_like(weight))
    return model


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return tokenizer.load(ROOT / "data" / "tokenizer.tiktoken")


@pytest.fixture(scope="module")
def pair(tiny: Make, shipped: Tokenizer, tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Any:
    """A model of ours with the shipped tokenizer, and both as transformers loads them from its folder."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    model = lively(tiny(vocabulary=shipped.vocabulary, scale=8.0))
    export.write_folder(export.exported_files(model, shipped, Path("checkpoints/x.pt"), FACTS), folder, force=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, theirs, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def folder(workspace: Path, command: Command, tiny: Make) -> Path:
    """An export of a lively model, in the working folder."""
    checkpoint.save(checkpoint.FINETUNED, lively(tiny(scale=4.0)), FACTS)
    assert command("export") == 0
    return workspace / "exports" / "finetuned"


# The model


def test_the_folder_is_a_gpt2_of_transformers_own(pair: Any) -> None:
    model, theirs, coder = pair
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert type(theirs).__module__.startswith("transformers.")
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()
    assert all(not weight.any() for name, weight in theirs.named_parameters() if name.endswith("bias"))
    assert (theirs.config.activation_function, theirs.config.n_positions) == ("gelu", model.config.context)
    sampling = theirs.generation_config
    assert (sampling.temperature, sampling.top_k, sampling.do_sample) == (1.0, 0, True)
    assert sampling.eos_token_id == sampling.pad_token_id == coder.eos_token_id == coder.pad_token_id
    assert coder.all_special_tokens == list(SPECIAL)


@torch.no_grad()
def test_logits_are_equal_at_every_length(pair: Any, shipped: Tokenizer) -> None:
    model, theirs, _ = pair
    torch.manual_seed(1)
    drawn = torch.randint(shipped.vocabulary, (64,)).tolist()
    for text in (drawn, shipped.encode(stories.HELDOUT_STORIES.name + "Once upon a time, there was a kite. " * 20)):
        for length in range(1, model.config.context + 1):
            ids = torch.tensor([text[:length]])
            assert ids.shape[1] == length
            ours = model(ids)
            assert torch.allclose(ours, theirs(ids).logits, atol=1e-4, rtol=0)
            assert ours.std() > 0.5  # else 1e-4 would say little


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_stories_are_equal(
    coder: Tokenizer, tiny: Make, tmp_path: Path, transformers: Any, cached: bool
) -> None:
    """Token for token, one by one and as a batch with padding before the shorter prompts."""
    model = lively(tiny(scale=8.0, seed=5))
    with torch.no_grad():
        model.tokens.weight[coder.end] *= 3  # some stories end, others run into the context
    export.write_folder(export.exported_files(model, coder, Path("x.pt"), {}), tmp_path / "x", force=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    asked = ["kite", "a much longer request", "!", "lake and bird", "7", "moon moon"]
    told = sample.generate(
        model,
        [coder.prompt(text) for text in asked],
        end=coder.end,
        limit=64,
        generator=runtime.generator(1),
        temperature=0.0,
    )
    assert {"end", "context"} <= {story.stop for story in told}
    chats = [[{"role": "user", "content": text}] for text in asked]
    for rows in ([chats], [[chat] for chat in chats]):
        stop = iter(told)
        for row in rows:
            batch = loaded.apply_chat_template(row, add_generation_prompt=True, return_tensors="pt", padding=True)
            written = theirs.generate(**batch, do_sample=False, use_cache=cached)
            width = batch.input_ids.shape[1]
            for ids, story in zip(written.tolist(), itertools.islice(stop, len(row)), strict=True):
                answer = ids[width:]
                answer = answer[: answer.index(coder.end) + 1] if coder.end in answer else answer
                room = model.config.context - width  # a batch ends where its longest prompt meets the context
                assert answer == story.ids[:room]


# The tokenizer

PIECES = st.one_of(
    st.sampled_from([*SPECIAL, "<|", "|>", "<|end", "oftext|>", "<", "|", "\ufdd0", "\ufdd00", "\ufdd01", "<\ufdd01|"]),
    st.sampled_from(["'s", "'LL", "'\u017f", "don't", "I'VE", "Once upon a time", " kite", "aaaaaaaa", "<<48/2=24>>"]),
    st.text(" \t\n\r\u00a0\u2028\u3000\x85\x1c", max_size=4),
    st.text("0123456789.,$٣½²", max_size=6),
    st.text("🦊👩\u200d🏳️🌈\u0301\u0308é e\u200b\ufeff", max_size=6),
    st.text(max_size=8),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@settings(max_examples=500, deadline=None, database=None, derandomize=True)
@given(texts=st.lists(TEXTS, min_size=20, max_size=20))
def test_ids_are_equal_on_ten_thousand_strings(pair: Any, shipped: Tokenizer, texts: list[str]) -> None:
    loaded = pair[2]
    prompts = loaded.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts], add_generation_prompt=True
    )
    assert prompts.input_ids == [shipped.prompt(text) for text in texts]
    # Of plain text alone a sign that Unicode keeps for a program's own use is excepted, docs/export.md says why.
    plain = [re.sub("\ufdd0+(?=[01])", "", text) for text in texts]
    ids = loaded(plain, split_special_tokens=True).input_ids
    assert ids == [shipped.encode(text) for text in plain]
    assert [loaded.decode(row) for row in ids] == plain


def test_ids_are_equal_on_stories_and_problems(pair: Any, shipped: Tokenizer) -> None:
    told = [story.text for story in stories.read_stories(ROOT / stories.HELDOUT_STORIES)]
    asked = [text for one in situations.generated_problems(200, 1, "test") for text in (one.question, one.answer)]
    assert len(told) == 100
    assert pair[2](told + asked).input_ids == [shipped.encode(text) for text in told + asked]


def test_both_engines_know_the_same_letters_digits_and_spaces(pair: Any, shipped: Tokenizer) -> None:
    numbers = [*range(0x3100), *range(0x3100, 0xD800, 23), *range(0xE000, 0x110000, 23)]  # all take half a minute
    points = [chr(number) for number in numbers]
    for start in range(0, len(points), 4096):
        text = "".join(f"a{point} '{point}1" for point in points[start : start + 4096])
        assert pair[2].backend_tokenizer.encode(text).ids == shipped.encode(text)


def test_a_conversation_is_what_fine_tuning_reads(pair: Any, shipped: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi <|user|>"}, {"role": "assistant", "content": "So <|endoftext|>\n"}]
    ids = pair[2].apply_chat_template(chat).input_ids
    assert ids == [*shipped.prompt("Hi <|user|>"), *shipped.encode("So <|endoftext|>\n"), shipped.end]
    with pytest.raises(Exception, match="not system"):
        pair[2].apply_chat_template([{"role": "system", "content": "Be brave."}])


def test_special_names_in_plain_text_need_a_flag(pair: Any, shipped: Tokenizer) -> None:
    assert pair[2]("<|endoftext|>").input_ids == [shipped.end]
    assert pair[2]("<|endoftext|>", split_special_tokens=True).input_ids == shipped.encode("<|endoftext|>")


def made_ranks(rng: random.Random) -> dict[bytes, int]:
    """A tokenizer no training would give: tokens no merge makes, parts that rank behind their whole."""
    tokens = {bytes(rng.choices(b"abc", k=rng.randrange(2, 6))) for _ in range(40)}
    shuffled = rng.sample(sorted(tokens), len(tokens))
    return {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *shuffled])}


def test_any_ranks_give_the_same_ids() -> None:
    import tokenizers

    rng = random.Random(3)
    unmade = 0
    for _ in range(60):
        coder = Tokenizer(made_ranks(rng))
        unmade += sum(export.merge_of(token, coder.ranks) is None for token in coder.ranks if len(token) > 1)
        built = tokenizers.Tokenizer.from_str(export.tokenizer_json(coder))
        for text in ("".join(rng.choices("abc ", [5, 5, 5, 1], k=60)) for _ in range(40)):
            assert built.encode(text).ids == coder.encode(text), text
    assert unmade > 50


def test_merges_are_those_of_the_training() -> None:
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(["low lower lowest new newer newest wide wider"] * 3, 270, pattern=tokenizer.PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    assert len(ranks) == 270
    for token, rank in ranks.items():
        if rank > 255:
            first, second = export.merge_of(token, ranks)  # type: ignore[misc]
            assert first + second == token
            assert max(ranks[first], ranks[second]) < rank
    assert export.merge_of(b"abc", {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5}) == (b"a", b"bc")
    assert export.merge_of(b"abc", {b"a": 0, b"b": 1, b"c": 2, b"abc": 3}) is None


# The way back


def test_export_and_import_keep_every_bit(folder: Path, command: Command) -> None:
    assert command("export", "--from", folder, "--to", "checkpoints/back.pt") == 0
    there, facts = checkpoint.load(checkpoint.FINETUNED, torch.device("cpu"))
    back, facts_back = checkpoint.load(Path("checkpoints/back.pt"), torch.device("cpu"))
    assert checkpoint.fingerprint(there) == checkpoint.fingerprint(back)
    assert facts == facts_back == FACTS
    assert there.config == back.config


def test_a_model_trained_there_comes_back(folder: Path, command: Command, transformers: Any) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        theirs.transformer.h[1].mlp.c_fc.weight[3, 5] += 1  # from channel 3 to channel 5
    theirs.save_pretrained("exports/trained")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained("exports/trained")
    assert command("export", "--from", "exports/trained") == 0
    back, facts = checkpoint.load(Path("checkpoints/trained.pt"), torch.device("cpu"))
    assert facts == {"parent": "exports/trained"}
    before, _ = checkpoint.load(checkpoint.FINETUNED, torch.device("cpu"))
    moved = {
        name: (weight - before.state_dict()[name]).nonzero().tolist() for name, weight in back.state_dict().items()
    }
    assert {name: places for name, places in moved.items() if places} == {"blocks.1.up.weight": [[5, 3]]}
    with torch.no_grad():
        ids = torch.arange(40)[None]
        assert torch.allclose(back(ids), theirs(ids).logits, atol=1e-4, rtol=0)


def test_bfloat16_comes_back(folder: Path, command: Command, transformers: Any) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert command("export", "--from", folder) == 1  # finetuned.pt is there
    assert command("export", "--from", folder, "--to", "checkpoints/half.pt") == 0


def refused(command: Command, capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line that a command gives."""
    capsys.readouterr()
    assert command("export", *args) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert len(said) < 400
    return said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation_function": "gelu_new"}, "activation_function is 'gelu_new', in Fable 'gelu'"),
        ({"activation_function": None}, "activation_function is None"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_inner": 17}, "n_inner is 17"),
        ({"vocab_size": 50257}, "vocab_size is 50257, data/tokenizer.tiktoken has 259"),
        ({"n_embd": 10**30}, "wte.weight is (259, 16), by config.json (259, 1000000000000000"),
        ({"n_layer": 10**12}, "has no transformer.h.2.ln_1.weight"),
        ({"n_layer": 1}, "a weight that Fable has not"),
        ({"n_positions": 2**60}, "wpe.weight is (64, 16)"),
        ({"n_layer": 0}, "layers 0: at least 1"),
        ({"n_head": 3}, "16 channels do not divide into 3 heads"),
        ({"n_head": True}, "n_head is True, not a whole number"),
        ({"n_positions": "64"}, "n_positions is '64', not a whole number"),
        ({"n_embd": 16.0}, "n_embd is 16.0, not a whole number"),
        ({"model_type": "gpt\n" * 500}, "model_type is 'gpt\\n"),
    ],
)
def test_another_shape_is_refused_by_name(
    folder: Path, command: Command, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert said in refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")
    assert not Path("checkpoints/x.pt").exists()


def test_a_missing_size_is_refused(folder: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "n_embd"}))
    assert "n_embd is None" in refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")


Weights = dict[str, torch.Tensor]


def set_one(name: str, value: float) -> Callable[[Weights], None]:
    return lambda weights: weights[name].view(-1).__setitem__(1, value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (set_one("transformer.h.0.attn.c_attn.bias", 1e-9), "h.0.attn.c_attn.bias is not zero"),
        (set_one("transformer.ln_f.bias", 2.0), "ln_f.bias is not zero"),
        (set_one("transformer.h.1.mlp.c_proj.weight", float("nan")), "h.1.mlp.c_proj.weight holds values that are no"),
        (set_one("transformer.wpe.weight", float("inf")), "wpe.weight holds values that are no numbers"),
        (lambda weights: weights.pop("transformer.h.1.ln_2.weight"), "has no transformer.h.1.ln_2.weight"),
        (lambda weights: weights.pop("transformer.h.1.ln_2.bias"), "has no transformer.h.1.ln_2.bias"),
        (lambda weights: weights.update({"lm\nhead": torch.ones(2)}), "'lm\\nhead', a weight that Fable has not"),
        (lambda weights: weights.update({"lm_head.weight": torch.ones(259, 16)}), "'lm_head.weight', a weight"),
        (
            lambda weights: weights.update(
                {"transformer.h.0.mlp.c_fc.weight": weights["transformer.h.0.mlp.c_fc.weight"].t().contiguous()}
            ),
            "c_fc.weight is (64, 16), by config.json (16, 64)",
        ),
        (
            lambda weights: weights.update({"transformer.ln_f.weight": torch.ones(16, dtype=torch.int64)}),
            "ln_f.weight is I64",
        ),
    ],
)
def test_another_weight_is_refused_by_name(
    folder: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Weights], object],
    said: str,
) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load(path.read_bytes())
    spoil(weights)
    path.write_bytes(safetensors.torch.save(weights))
    assert said in refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")
    assert not Path("checkpoints/x.pt").exists()


def test_other_tokens_of_the_same_number_are_refused(
    folder: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = {bytes([value]): (value + 1) % 256 for value in range(256)}
    tokenizer.save(swapped, tokenizer.PATH)
    assert "has other tokens than data/tokenizer.tiktoken" in refused(
        command, capsys, "--from", folder, "--to", "checkpoints/x.pt"
    )


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_folder_is_one_line(
    folder: Path, command: Command, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = folder / name
    whole = path.read_bytes()

    def said() -> str:
        return refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")

    for content in (b"", b"{", b"[1]", whole[:-2], whole[: len(whole) // 2], b"[" * 100_000, b"\xff" * 50, whole[9:]):
        path.write_bytes(content)
        assert name in said()
    for header in (b"{}", b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        assert name in said()
    path.write_bytes(struct.pack("<Q", 2**63) + whole[8:])
    assert name in said()
    path.unlink()
    assert f"{name} is missing" in said()
    path.symlink_to(path.with_name("nowhere"))
    assert f"{name} is missing" in said()
    path.unlink()
    path.mkdir()
    assert f"{name} is missing" in said()
    if hasattr(os, "mkfifo"):
        path.rmdir()
        os.mkfifo(path)  # reading it would wait for ever
        assert f"{name} is missing" in said()
    assert not Path("checkpoints/x.pt").exists()


def test_a_huge_json_is_not_read(
    folder: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "LARGEST", 100)
    assert "config.json has over 100 bytes" in refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")


def test_facts_that_are_none_are_refused(folder: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load(path.read_bytes())
    for facts in ("{", "7", "[1]", "[" * 100_000):
        path.write_bytes(safetensors.torch.save(weights, {"fable": facts}))
        assert "cut short or damaged" in refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")


def test_a_pickle_is_never_read(folder: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "a pickle is not read" in refused(command, capsys, "--from", folder, "--to", "checkpoints/x.pt")


def test_a_checkpoint_is_not_overwritten_unasked(
    folder: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checkpoint.FINETUNED.read_bytes()
    assert "finetuned.pt is there already" in refused(command, capsys, "--from", folder)
    assert checkpoint.FINETUNED.read_bytes() == before
    assert command("export", "--from", folder, "--force") == 0


# The folder


def test_default_places(folder: Path, command: Command) -> None:
    assert {path.name for path in folder.iterdir()} == export.FILES
    Path("checkpoints/ppo-0.05").mkdir()
    checkpoint.FINETUNED.rename("checkpoints/ppo-0.05/final.pt")
    assert command("export", "checkpoints/ppo-0.05/final.pt") == 0
    assert Path("exports/ppo-0.05/final/config.json").exists()
    Path("checkpoints/ppo-0.05/final.pt").rename("elsewhere.pt")
    assert command("export", "elsewhere.pt") == 0
    assert Path("exports/elsewhere/config.json").exists()


def test_an_earlier_export_is_replaced_and_nothing_else(
    folder: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("export") == 0
    for name in ("training_args.bin", ".git"):
        (folder / name).write_text("mine")
        assert "add --force" in refused(command, capsys)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    trained = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(trained, {"format": "pt"}))  # as by transformers
    assert "add --force" in refused(command, capsys)
    assert command("export", "--force") == 0
    assert "is now" in capsys.readouterr().out
    assert sorted(path.name for path in folder.parent.iterdir()) == ["finetuned", "finetuned.old-1"]
    assert "fable" not in (folder.parent / "finetuned.old-1" / "model.safetensors").read_bytes()[:200].decode("latin-1")
    assert command("export", "--to", "exports/finetuned") == 0
    Path("empty").mkdir()
    assert command("export", "--to", "empty") == 0


@pytest.mark.usefixtures("folder")
def test_places_that_cannot_be_written(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("mine")
    Path("link").symlink_to("exports/finetuned")
    assert "a link or file stands there" in refused(command, capsys, "--to", "file", "--force")
    assert "a link or file stands there" in refused(command, capsys, "--to", "link", "--force")
    assert "cannot be written (Not a directory)" in refused(command, capsys, "--to", "file/x")
    for place in (".", "..", "/"):
        assert "you work inside it" in refused(command, capsys, "--to", place, "--force")
    before = {path: path.read_bytes() for path in Path("exports").rglob("*.*")}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert "cannot be written (No space left on device)" in refused(command, capsys, "--to", "exports/other")
    assert "cannot be written (No space left on device)" in refused(command, capsys)
    assert {path: path.read_bytes() for path in Path("exports").rglob("*.*")} == before
    assert sorted(path.name for path in Path("exports").iterdir()) == ["finetuned"]


@pytest.mark.parametrize("fault", [OSError(13, "Permission denied"), KeyboardInterrupt()])
def test_a_failing_move_leaves_the_earlier_folder(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise fault
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    assert command("export") != 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["finetuned"]


def test_a_wrong_checkpoint_is_one_line(folder: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: python dpo.py makes it" in refused(command, capsys, "checkpoints/dpo.pt")
    assert "not a checkpoint" in refused(command, capsys, folder / "config.json")
    assert command("export", "a.pt", "--from", "b") == 2


def test_missing_packages_are_named(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find(name))
    assert "export.py needs tokenizers: pip install tokenizers" in refused(command, capsys)


def test_the_card_says_where_the_model_comes_from(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "python train.py  # checkpoints/base.pt\npython finetune.py  # checkpoints/finetuned.pt\n" in card
    assert "| heldout&#95;loss | 1.5 |" in card
    assert "| base.seed | 3 |" in card
    assert "CDLA-Sharing-1.0" in card
    assert (
        "0.0 million parameters, 2 layers, 2 heads,\n16 channels, a vocabulary of 259 tokens, a context of 64" in card
    )


def test_the_parents_of_a_foreign_checkpoint_may_be_anything() -> None:
    assert export.commands(Path("x.pt"), {"parent": 5, "base": "y"}) == ["python finetune.py  # x.pt"]
    assert export.commands(Path("x.pt"), {"parent": "dpo.pt", "base": "y"})[0] == "python dpo.py  # dpo.pt"


def test_the_snippets_write_a_story(
    folder: Path,
    coder: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    transformers: Any,
) -> None:
    """The README's and the card's run as they stand."""
    transformers.set_seed(1)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text, where in ((readme, "."), ((folder / "README.md").read_text(encoding="utf-8"), "exports/finetuned")):
        monkeypatch.chdir(folder.parent.parent / where)
        [code] = [found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "transformers" in found]
        capsys.readouterr()
        names: dict[str, Any] = {}
        exec(compile(code, "snippet", "exec"), names)
        assert len(capsys.readouterr().out.strip()) > 2
        assert names["prompt"]["input_ids"].tolist() == [coder.prompt(names["request"][0]["content"])]
