"""What every script needs to run: command line, device, precision, seeds, run folders and logging.

A script's `Config` is its command line (tyro): a field is a flag, the comment on its line the help, and its annotation
bounds it. What a user can cause is a `UserError`: one line, exit status 1; a wrong flag exits with 2; Ctrl-C with 130.
"""

import contextlib
import ctypes
import dataclasses
import io
import itertools
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self, TypeVar

import numpy
import torch
import torch.distributed as dist
import tyro
from torch.utils.tensorboard import SummaryWriter

import distributed

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "float32", "bfloat16"]
ConfigT = TypeVar("ConfigT")
LOST = (
    "a process of this run was killed or cannot be reached, so all have stopped; what is saved is whole: start them "
    "again, a training run with --resume"
)


class UserError(Exception):
    """Something a user can mend; its text is one line that names the flag or file, the value, and what to run next."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a setting's value must be; called, it is the hint behind the setting's help."""

    text: str
    holds: Callable[[Any], bool]

    def __call__(self, default: str) -> str:
        return f"(default: {default}; {self.text})"


def bound(text: str, holds: Callable[[Any], bool]) -> object:
    """The mark of a setting's annotation that bounds it: on the command line, in its help, and in Python."""
    return tyro.conf.arg(help_behavior_hint=Bound(text, holds))


def at_least(least: int) -> object:
    """The mark of a setting that is not below `least`."""
    return bound(f"at least {least}", lambda value: value >= least)


NOT_NEGATIVE = bound("0 or more", lambda value: 0 <= value < float("inf"))
Count = Annotated[int, at_least(1)]
Positive = Annotated[float, bound("more than 0", lambda value: 0 < value < float("inf"))]
Passes = Annotated[float, bound("more than 0", lambda value: 0 < value < 1000)]
Share = Annotated[float, bound("0 or more, below 1", lambda value: 0 <= value < 1)]
Seed = Annotated[int, bound(f"between 0 and {2**32 - 1}, as numpy takes no other", lambda value: 0 <= value < 2**32)]


def check(settings: object, prefix: str = "--") -> None:
    """Raises ValueError, with flag, value and bound, where a setting is not as its annotation's mark says."""
    for name, annotation in typing.get_type_hints(type(settings), include_extras=True).items():
        value, marks = getattr(settings, name), getattr(annotation, "__metadata__", ())
        metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
        for bounds in (getattr(mark, "help_behavior_hint", None) for mark in marks):
            if isinstance(bounds, Bound) and value is not None and not bounds.holds(value):
                raise ValueError(f"{metavar or prefix + name.replace('_', '-')} {value}: {bounds.text}")


class Checked:
    """Settings that are checked when they are made, wherever that is."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


def parse(config: type[ConfigT], description: str | None, args: list[str] | None = None) -> ConfigT:
    """The config that the command line (or `args`) gives; what it refuses is one line and exit status 2."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return tyro.cli(config, description=description, args=args)
    except SystemExit as stop:
        if stop.code:
            distributed.say(f"error: {in_one_line(said.getvalue())}")
        raise
    except ValueError as error:
        distributed.say(f"error: {error}")
        raise SystemExit(2) from None


def command_line(arguments: Sequence[str]) -> str:
    """The command that runs this script with `arguments`, quoted as the system's shell reads it."""
    words = [*distributed.launcher(), Path(sys.argv[0]).name, *arguments]
    return subprocess.list2cmdline(words) if platform.system() == "Windows" else shlex.join(words)


def in_one_line(box: str) -> str:
    """What tyro says in a box of several lines, without its title and frame."""
    lines = [re.sub("[│╭╮╰╯─]", "", line).strip() for line in box.splitlines()[1:]]
    text = " ".join(line for line in lines if line and line != "Argument helptext:")
    return re.sub(r"\.? For full helptext, (see|run) ", "; see python ", text.removeprefix("Error parsing Config: "))


def run(main: Callable[[], None]) -> None:
    """Runs a script's main; a UserError is one line on the error stream and exit status 1, a stop exits with 130.

    Of several processes, the first that meets a fault says it.
    """
    keep_memory()
    with distributed.group(), distributed.silence():
        try:
            main()
        except UserError as error:
            distributed.say(f"error: {error}")
            raise SystemExit(1) from None
        except distributed.Lost:
            distributed.say(f"error: {LOST}")
            raise SystemExit(1) from None
        except KeyboardInterrupt as stop:
            distributed.say(stop.args[0] if stop.args else "stopped")
            raise SystemExit(130) from None


def keep_memory() -> None:
    """Tells glibc, where that is the C library, to keep freed memory for the next step; does nothing elsewhere.

    By default it hands every block over 32 MB back to the system, which must map and clear it anew page by page: the
    logits and activations of every step. Kept, pre-training was 1.4 times as fast.
    Source: mallopt(3).
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # numbers of malloc.h
        if libc.mallopt(mmap_threshold, 2**31 - 1):  # bytes; an old glibc refuses, and the other alone makes it worse
            libc.mallopt(trim_threshold, -1)  # never


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Makes the file that `write` fills, whole or not at all: beside its place first, then moved there.

    Of several processes the leading one does it.
    Raises: OSError (or what `write` raises) where it cannot be; what stood there is then as it was.
    """
    if not distributed.leads():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        for wait in (0.1, 1.0, 5.0):  # seconds: Windows replaces no file that another program has open
            try:
                os.replace(temporary, path)
                return
            except PermissionError:
                time.sleep(wait)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def device_for(name: Device) -> torch.device:
    """The device named, or for auto the fastest this machine has; of several GPUs the one of this process.

    Raises: UserError where the named device is not there, or there are fewer GPUs than processes.
    """
    alone = distributed.size() == 1  # processes on MPS cannot reach each other
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available() and alone, "cpu": True}
    kind = next(kind for kind, there in available.items() if there) if name == "auto" else name
    if not available[kind]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise UserError(f"--device {name}: this machine has {there}; run with --device auto")
    if kind != "cuda" or alone:
        return torch.device(kind)
    number, gpus = dist.get_node_local_rank(), torch.cuda.device_count()
    if number >= gpus:
        raise UserError(
            f"--device {name}: fewer GPUs than processes: torchrun --nproc-per-node {gpus}, or --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device(kind, number)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 faster than float32; without it bfloat16 is several times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return False


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Context in which matrix products run in the precision asked for; weights stay float32."""
    low = multiplies_bfloat16(device) if precision == "auto" else precision == "bfloat16"
    # Without the cache of casts, weights that an optimizer step changed are never read from a stale copy.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False) if low else contextlib.nullcontext()


def seed_everything(seed: int) -> None:
    """Seeds the global generators, for initial weights and dropout; every other draw has a generator of its own."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def generator(seed: int, *stream: int) -> torch.Generator:
    """A CPU generator for one purpose: one (seed, stream), one series of draws; another stream, an independent one."""
    words = numpy.random.SeedSequence([seed, *stream]).generate_state(2, numpy.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def commit() -> str:
    """The commit that runs, with `+` behind it where the working tree differs; `unknown` outside a checkout."""
    try:
        here = Path(__file__).parent
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def machine_facts(device: torch.device, precision: Precision, seed: int) -> dict[str, Any]:
    """What a checkpoint or run should say of where it came from."""
    low = multiplies_bfloat16(device) if precision == "auto" else precision == "bfloat16"
    return {
        "seed": seed,
        "commit": commit(),
        "torch": str(torch.__version__),  # its own class is none that a checkpoint may hold
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "precision": "bfloat16" if low else "float32",
        "threads": torch.get_num_threads(),
        "processes": distributed.size(),
    }


class Log:
    """Metrics of one run: TensorBoard's curves, and the same numbers in `metrics.jsonl` beside them.

    A run that is resumed goes on with its curves `after` a step; what was logged of later ones is dropped.
    """

    def __init__(self, folder: Path, config: object, facts: Mapping[str, Any], after: int | None = None) -> None:
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if after is not None and path.exists():
                kept = "".join(lines_until(path.read_text(encoding="utf-8"), after)).encode("utf-8")
                write_whole(path, lambda file: file.write(kept))
            self.lines = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}): free it, or run elsewhere") from None
        self.folder = folder
        self.board = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)
        settings = {**dataclasses.asdict(config), **facts}  # type: ignore[call-overload]
        rows = "".join(f"| {name} | {markdown(str(value))} |\n" for name, value in settings.items())
        self.board.add_text("config", f"| setting | value |\n| --- | --- |\n{rows}")

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a number for each name at a step."""
        try:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
            self.lines.write(json.dumps({"step": step, **metrics}) + "\n")
            self.lines.flush()
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written ({error.strerror}): free space, then --resume") from None

    def text(self, step: int, name: str, markdown_text: str) -> None:
        """Logs Markdown at a step."""
        self.board.add_text(name, markdown_text, step)
        self.board.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.board.close()
        self.lines.close()


class NoLog(Log):
    """The log of a process for which another one logs."""

    def __init__(self) -> None:
        self.folder = Path()

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def text(self, step: int, name: str, markdown_text: str) -> None:
        pass

    def close(self) -> None:
        pass


def lines_until(text: str, step: int) -> list[str]:
    """The lines of `metrics.jsonl` of up to a step; a last one that was cut in the writing is left out."""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in whole if json.loads(line)["step"] <= step]


def logged(folder: Path) -> list[dict[str, Any]]:
    """What the run of a folder has logged, in order: `step` and metrics of each line that was written whole."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines_until(text, sys.maxsize)]


def markdown(text: str) -> str:
    """Text of a model or user as one Markdown table cell that shows it and does not obey it."""
    escaped = "".join(f"&#{ord(char)};" if char in "&<>|`*_[]#\\~" else char for char in text)
    return escaped.replace("\n", "<br>")


def run_folder(name: str) -> Path:
    """A folder under `runs/` for a run that starts now, its own even when another starts in the same second."""
    started = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([started], (f"{started}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())
