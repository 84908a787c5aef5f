"""The command line's exit status, seeds, devices, and logs."""

import html
import json
import math
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
import tyro

import runtime
from runtime import Checked, Count, Device, Log, Passes, Positive, Seed, Share, UserError


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of nothing."""

    steps: Count = 3  # how many
    share: Share = 0.5
    device: Device = "auto"
    lr_peak: Positive = 1.0
    passes: Passes = 1.0
    decay: Annotated[float, runtime.NOT_NEGATIVE] = 0.0
    group: Annotated[int | None, runtime.at_least(2)] = None
    seed: Seed = 1
    # Where to end.
    end: Annotated[Count, tyro.conf.arg(metavar="END")] = 9


def test_flags_become_a_config() -> None:
    assert runtime.parse(Config, "text", []) == Config()
    assert runtime.parse(Config, "text", ["--steps", "7", "--share", "0.1"]) == Config(7, 0.1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--steps", "-4"], "--steps -4: at least 1"),
        (["--steps", "many"], "many"),
        (["--step-s", "3"], "--step-s"),
        (["7"], "7"),
        (["--device", "tpu"], "tpu"),
        (["--steps"], "--steps"),
    ],
)
def test_a_wrong_flag_exits_with_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runtime.parse(Config, "text", args)
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert said in output.err
    assert not output.out
    assert "Traceback" not in output.err


@pytest.mark.parametrize(
    ("name", "taken", "refused", "said"),
    [
        ("steps", (1, 10**9), (0, -1), "--steps {}: at least 1"),
        ("share", (0.0, 0.999), (-0.1, 1.0, math.nan), "--share {}: 0 or more, below 1"),
        ("lr_peak", (1e-9, 1e9), (0.0, -1.0, math.inf, math.nan), "--lr-peak {}: more than 0"),
        ("passes", (0.1, 999.0), (0.0, 1e3, math.nan), "--passes {}: more than 0"),
        ("decay", (0.0, 1e9), (-0.1, math.inf, math.nan), "--decay {}: 0 or more"),
        ("group", (None, 2), (1,), "--group {}: at least 2"),
        ("seed", (0, 2**32 - 1), (-1, 2**32), "--seed {}: between 0 and 4294967295, as numpy takes no other"),
        ("end", (1,), (0,), "END {}: at least 1"),
    ],
)
def test_a_bound_holds_in_python_and_on_the_command_line(
    name: str, taken: tuple[float, ...], refused: tuple[float, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for value in taken:
        assert getattr(Config(**{name: value}), name) == value  # type: ignore[arg-type]
        assert getattr(runtime.parse(Config, None, [flag, str(value)]), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{re.escape(said.format(value))}$"):
            Config(**{name: value})  # type: ignore[arg-type]
        with pytest.raises(SystemExit) as stop:
            runtime.parse(Config, None, [flag, str(value)])
        assert stop.value.code == 2
        assert said.format(value) in capsys.readouterr().err


def test_help_shows_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runtime.parse(Config, None, ["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--steps INT how many (default: 3; at least 1)" in shown
    assert "--share FLOAT (default: 0.5; 0 or more, below 1)" in shown
    assert "--end END Where to end. (default: 9; at least 1)" in shown


def test_help_shows_the_comments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runtime.parse(Config, "What it does.", ["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "What it does." in shown
    assert "how many" in shown


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("data/x is missing: run y"), 1, "error: data/x is missing: run y\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_what_a_user_causes_is_one_line(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        runtime.run(main)
    assert stop.value.code == status
    assert stop.value.__suppress_context__
    assert capsys.readouterr() == ("", said)


def test_a_programmers_error_keeps_its_traceback() -> None:
    def main() -> None:
        raise KeyError("shape")

    with pytest.raises(KeyError):
        runtime.run(main)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_kept() -> None:
    runtime.keep_memory()
    block = torch.zeros(16 << 20)  # 64 MB
    address = block.data_ptr()
    del block
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.delattr("ctypes.CDLL")
    runtime.keep_memory()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert runtime.device_for("auto") == runtime.device_for("cpu") == torch.device("cpu")
    for name in ("cuda", "mps"):
        with pytest.raises(UserError, match=rf"--device {name}: this machine has cpu; run with --device auto"):
            runtime.device_for(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert runtime.device_for("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime.device_for("auto").type == "cuda"


def test_precision() -> None:
    cpu = torch.device("cpu")
    with runtime.autocast(cpu, "bfloat16"):
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with runtime.autocast(cpu, "float32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with runtime.autocast(cpu, "auto"):
        assert torch.is_autocast_enabled("cpu") == runtime.multiplies_bfloat16(cpu)
    assert not runtime.multiplies_bfloat16(torch.device("mps"))


def test_autocast_reads_no_stale_weight() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with runtime.autocast(torch.device("cpu"), "bfloat16"):
        before = torch.nn.functional.linear(torch.ones(1, 2), weight)
        with torch.no_grad():
            weight *= 3
        assert torch.nn.functional.linear(torch.ones(1, 2), weight).equal(3 * before)


def test_generators_are_reproducible_and_apart() -> None:
    def draws(seed: int, *stream: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=runtime.generator(seed, *stream)).tolist())

    keys = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (12, 0), (0, 12), (1, 1, 1), (1, 0, 1)]
    assert draws(1, 2) == draws(1, 2)
    assert len({draws(*key) for key in keys}) == len(keys)


def test_generators_take_any_seed() -> None:
    for seed in (0, 1, 2**31, 2**40):
        torch.rand(1, generator=runtime.generator(seed, 3))


def test_everything_is_seeded() -> None:
    runtime.seed_everything(5)
    first = torch.rand(3)
    runtime.seed_everything(5)
    assert torch.rand(3).equal(first)
    runtime.seed_everything(6)
    assert not torch.rand(3).equal(first)


def test_facts_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = runtime.machine_facts(torch.device("cpu"), "float32", 3)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["seed"], facts["device"], facts["precision"]) == (3, "cpu", "float32")
    assert facts["commit"]
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "runtime.py"))
    assert runtime.commit() == "unknown"


def test_a_log_holds_numbers_twice(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ppo-0.05"
    log = Log(folder, Config(), {"commit": "abc|def"})
    log.scalars(0, {"eval/words_used": 0.25})
    log.scalars(1, {"eval/words_used": 0.5, "lr": 1e-5})
    log.text(1, "stories", "| a |")
    log.close()
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "eval/words_used": 0.25},
        {"step": 1, "eval/words_used": 0.5, "lr": 1e-5},
    ]
    assert [path for path in folder.iterdir() if "tfevents" in path.name]


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(UserError, match=r"runs.ppo cannot be written .*: free it, or run elsewhere"):
        Log(tmp_path / "runs" / "ppo", Config(), {})
    assert (tmp_path / "runs").read_text() == "mine"


def test_markdown_shows_text_and_does_not_obey_it() -> None:
    text = "a | b <b>bold</b> `code` *x* _y_ [l](u) # h & ~ \\ end\nnext"
    cell = runtime.markdown(text)
    assert not set(cell.replace("<br>", "")) & set("|<>`*_[]\\~\n")
    assert cell.count("<br>") == 1
    assert html.unescape(cell.replace("<br>", "\n")) == text
    assert runtime.markdown("A kite, 18.50!") == "A kite, 18.50!"


def test_run_folders_are_named_by_time() -> None:
    name = runtime.run_folder("ppo-0.05")
    assert name.parent == Path("runs")
    assert name.name.startswith("ppo-0.05-20")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-1",), "MINUTES -1.0: 0 or more"),
        (("nan",), "MINUTES nan: 0 or more"),
        (("ten",), "could not convert string to float: 'ten'"),
        (("10", "-2"), "KL -2.0: 0 or more"),
        (("--bogus", "3"), "Unrecognized options: --bogus"),
        (("--limit",), "--limit"),
        (("--device", "tpu"), "tpu"),
        (("--seed", "-1"), "--seed -1"),
        (("--groups", "0"), "--groups 0: at least 1"),
    ],
)
def test_a_wrong_flag_is_one_line(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert command("ppo", *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert output.err.startswith("error: ")
    assert said in output.err


@pytest.mark.parametrize(
    ("system", "shown"), [("Linux", "python ppo.py --model 'a b.pt'"), ("Windows", 'python ppo.py --model "a b.pt"')]
)
def test_a_command_to_run_again_is_quoted_for_its_shell(
    system: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["somewhere/ppo.py"])
    monkeypatch.setattr(platform, "system", lambda: system)
    assert runtime.command_line(["--model", "a b.pt"]) == shown
