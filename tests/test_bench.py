"""What bench.py measures: its arithmetic against torch's counter, the plain way against the fast one, every part."""

import gc
import itertools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
import checkpoint
import ppo
import problems
import runtime
import sample
import stories
from bench import Config, Measured, Spent, Watch
from model import GPT, ModelConfig, padded, token_log_probs
from runtime import UserError
from sample import Completion, Instruction
from tokenizer import Tokenizer

Make = Callable[..., GPT]
Command = Callable[..., int]
CPU = torch.device("cpu")
SMALL = ("--stories", 8, "--limit", 4, "--answers", 16, "--evaluated", 2, "--steps", 2, "--repeats", 1, "--rows", 8)


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in this process, as a new one takes seconds to start."""
    monkeypatch.setattr(bench, "apart", lambda function, *arguments: function(*arguments))


def test_flops_are_those_that_torch_counts(tiny: Make) -> None:
    model, length = tiny(layers=3, channels=24, heads=2), 17
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    unseen = length * (length - 1) / 2  # pairs of a query and a later key, which torch multiplies and then masks
    assert bench.flops(model.config, length, length) + 3 * 4 * 24 * unseen == counter.get_total_flops()


def test_only_what_must_be_read_is_counted(tiny: Make) -> None:
    config = tiny().config
    mask = torch.tensor([[False, True, True, False, False], [False, False, False, False, True]])
    assert bench.flops_scored(config, mask) == bench.flops(config, 3, 2) + bench.flops(config, 5, 1)
    told = [Completion([1, 2], [3, 4, 5], [True, False, True], "limit"), Completion([1, 2, 3], [4], [True], "limit")]
    writing, at_once = bench.flops_written(config, told)
    assert at_once == 2 * bench.flops(config, 2, 0)
    assert writing + at_once == bench.flops(config, 4, 2) + bench.flops(config, 3, 1)


def test_a_piece_within_a_piece_counts_as_the_others(monkeypatch: pytest.MonkeyPatch, coder: Tokenizer) -> None:
    clock = itertools.count()
    monkeypatch.setattr(bench, "now", lambda _device: float(next(clock)))
    watch, wanted = Watch(CPU), Instruction(("kite",), [1])
    before = ppo.score, stories.words_used
    with watch.lap():  # at 0
        with watch.on({"ppo.score": "outer", "stories.words_used": "inner"}):
            assert ppo.score(wanted, coder.encode("A kite."), coder) == 1  # 1, 2
            assert stories.words_used("A kite.", ("kite",)) == 1  # 3, 4
        stories.words_used("A kite.", ("kite",))  # no longer watched
    assert {name: spent.seconds for name, spent in watch.pieces.items()} == {"outer": 1, "inner": 1, bench.REST: 3}
    assert (ppo.score, stories.words_used) == before


def test_a_backward_pass_costs_twice_its_forward_pass(tiny: Make) -> None:
    model, watch = tiny(), Watch(CPU)
    ids, mask = padded([[1, 2, 3], [1, 2, 3, 4, 5]], [[True] * 3, [True] * 5], CPU)
    once = bench.flops(model.config, 2, 2) + bench.flops(model.config, 4, 4)
    with watch.lap(), watch.on({"model.token_log_probs": "forward", "torch.Tensor.backward": "backward"}):
        loss = sys.modules["model"].token_log_probs(model, ids, mask).sum()
        loss.backward()
    assert (watch.pieces["forward"].reading, watch.pieces["forward"].tokens) == (once, 6)
    assert watch.pieces["backward"].reading == 2 * once


def test_plain_log_probs_are_the_fast_ones(tiny: Make) -> None:
    model = tiny(scale=8)
    rows = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    ids, mask = padded(rows, [[False, True, False, True], [False] * 3 + [True] * 3], CPU)
    for temperature in (1.0, 0.5):
        fast = token_log_probs(model, ids, mask, temperature)
        assert torch.allclose(bench.plain_token_log_probs(model, ids, mask, temperature), fast, atol=1e-4)


def test_plain_stories_are_the_fast_ones_where_nothing_is_left_to_chance(tiny: Make) -> None:
    model = tiny(scale=3000)  # each next token as good as certain
    prompts = [torch.randint(256, (length,), generator=runtime.generator(length)).tolist() for length in (3, 9, 1, 5)]
    likeliest = sample.generate(model, prompts, end=256, limit=20, generator=runtime.generator(1), temperature=0.0)
    end = next(token for token in likeliest[0].ids if not all(token in one.ids for one in likeliest))
    fast = sample.generate(model, prompts, end=end, limit=20, generator=runtime.generator(1), temperature=0.0)
    assert bench.plain_generate(model, prompts, end=end, limit=20, generator=runtime.generator(1)) == fast
    assert {one.stop for one in fast} == {"end", "limit"}


@pytest.mark.parametrize("name", sorted(bench.LAPS))
def test_every_part_is_measured_and_leaves_no_trace(workspace: Path, tiny: Make, name: str) -> None:
    if name in ("reinforce", "evaluate"):  # a word problem in bytes is long
        checkpoint.save(checkpoint.FINETUNED, tiny(context=700), {"step": 0})
    files = sorted(workspace.rglob("*"))
    real = sample.generate, problems.grade, torch.Tensor.backward, ppo.policy_outputs
    config = Config(stories=8, limit=4, answers=16, evaluated=2, steps=2, repeats=2 if name != "evaluate" else 1)
    found = bench.measured(name, config)
    assert len(found.laps) == config.repeats
    assert found.memory is None or found.memory > 10**7
    for lap in found.laps:
        assert list(lap)[-1] == bench.REST
        assert bench.LEFT_OUT not in lap
        assert all(spent.seconds > 0 for spent in lap.values()), lap
        assert bench.lap_tokens(lap) > 0
        assert sum(spent.reading for spent in lap.values()) > 0
        assert (sum(spent.writing for spent in lap.values()) > 0) == (name not in ("train", "finetune"))
        if name != "evaluate":
            forward, backward = lap["update: forward"], lap["update: backward"]
            assert backward.reading == pytest.approx(2 * forward.reading)
    assert (sample.generate, problems.grade, torch.Tensor.backward, ppo.policy_outputs) == real
    assert sorted(workspace.rglob("*")) == files


def test_exponent() -> None:
    sizes = [1.0, 2.0, 8.0, 64.0]
    assert bench.exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert bench.exponent(sizes, [7.0] * 4) == pytest.approx(0)


def test_a_line_ends_in_the_ratio_to_its_floor() -> None:
    limits = bench.Limits({"float32": [90.0, 100.0, 110.0]}, {"float32": [10.0, 1000.0, 1000.0]}, [1.0])
    laps = [{"writing": Spent(seconds, 50, 100, 2000), bench.REST: Spent(1.0)} for seconds in (5.0, 6.0, 30.0)]
    lines = bench.table(Measured("ppo", laps, 10**9, 3 * 10**9, 1), "PPO", limits, "float32").splitlines()
    assert lines[0] == "PPO, 3.00 GB at the peak"
    assert lines[2].split() == ["writing", "6.00", "[5.00,", "30.00]", "8", "3.00", "2.0"]  # 1 s writing, 2 s reading
    assert lines[3].split() == ["the", "rest", "1.00", "[1.00,", "1.00]", "-", "0.00", "-"]
    assert lines[4].split() == ["together", "7.00", "[6.00,", "31.00]", "7", "3.00", "2.3"]


@pytest.mark.usefixtures("at_home", "workspace")
def test_the_command_shows_the_parts_it_is_asked_for(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("bench", "ppo", "train", *SMALL, "--plain") == 0
    said = capsys.readouterr().out
    for text in ("note: one thread", "matrix products of 8 rows in float32", "memory copies", "scoring: reference"):
        assert text in said
    assert said.count("together") == 3
    assert said.count("at the peak") in (0, 3)
    assert "times as long as the scripts' own" in said


@pytest.mark.usefixtures("at_home", "workspace")
def test_the_command_shows_how_it_grows(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--factors", 1, 2, "--shares", 0.5, 1, "--sizes", 1, 2, 16, 2, 2, 16)
    assert command("bench", "--scale", *SMALL, *sizes) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("seconds like size^" in line for line in lines) == 3
    sizes_shown = [line.split()[0] for line in lines if "[" in line and ":" not in line]
    assert sizes_shown[:4] == ["8", "16", "2", "4"]


@pytest.mark.usefixtures("at_home", "workspace")
def test_without_a_checkpoint_it_says_so_and_measures_an_untrained_model(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ModelConfig(vocabulary=259, context=128, layers=1, heads=1, channels=8)  # the default one takes seconds
    monkeypatch.setattr(bench, "ModelConfig", lambda vocabulary: replace(small, vocabulary=vocabulary))
    assert command("bench", "ppo", *SMALL, "--model", "nothing.pt") == 0
    said = capsys.readouterr().out
    assert "note: nothing.pt is missing: an untrained model stands in" in said
    assert said.count("together") == 1


def test_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=Path(__file__))
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda _device: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert bench.notes(config, CPU, "bfloat16") == []
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda _device: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one, other = bench.notes(config, CPU, "float32")
    assert "one core" in one
    assert "no hardware for bfloat16: the parts run in float32" in other


@pytest.mark.usefixtures("at_home", "workspace")
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--stories", 12], 2, "--stories 12: a multiple of 8"),
        (["--answers", 0], 2, "--answers 0: a multiple of 16"),
        (["--repeats", 0], 2, "--repeats 0: at least 1"),
        (["sleep"], 2, "sleep"),
        (["ppo", *SMALL, "--limit", 128], 1, "--limit 128: less than the model's context of 128 tokens"),
        (["ppo", *SMALL, "--model", "data"], 1, "data is a folder"),
    ],
)
def test_wrong_input_is_one_line(
    command: Command, capsys: pytest.CaptureFixture[str], arguments: list[object], status: int, said: str
) -> None:
    assert command("bench", *arguments) == status
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_a_part_runs_in_a_process_of_its_own() -> None:
    with pytest.raises(UserError, match="the system ended a measurement"):
        bench.apart(os._exit, 9)  # else this one ends


def test_memory_does_not_grow_from_rollout_to_rollout(tiny: Make, coder: Tokenizer) -> None:
    config = ppo.Config(groups=1, group=8, limit=6, minibatch=8, epochs=1, precision="float32")
    learner = ppo.learner_for(tiny(), config)
    prompts = [Instruction((word,), coder.prompt(word)) for word in ("kite", "lake", "bird", "tree")]

    def held() -> tuple[int, int, int]:
        """Tensors and their bytes, and blocks of Python's own objects."""
        gc.collect()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        return len(tensors), sum(one.nbytes for one in tensors), sys.getallocatedblocks()

    def rollouts(number: int) -> None:
        for _ in range(number):
            batch = ppo.rollout(learner, prompts * 2, coder, config)
            metrics = {**ppo.rollout_metrics(batch, coder), **ppo.update(learner, batch, config)}
            assert math.isfinite(metrics["objective/kl"])

    rollouts(100)  # until the interpreter's own caches are full: 530 blocks in 180 rollouts, 96 in the next 400
    before = held()
    rollouts(200)
    after = held()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 10_000  # the last rollout may be a longer one
    assert after[2] <= before[2] + 500
