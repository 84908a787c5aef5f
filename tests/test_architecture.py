"""The house: imports point down, importing does nothing, nothing stands twice, flags are read, commands exist."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).parent.parent
LAYERS = {
    -1: ("distributed",),
    0: ("model", "runtime"),
    1: ("checkpoint", "stories", "problems", "wording", "pictures"),
    2: ("tokenizer", "situations", "training", "board", "report"),
    3: ("sample",),
    4: ("prepare", "train", "finetune", "preferences", "export"),
    5: ("dpo", "ppo", "reinforce"),
    6: ("evaluate",),
    7: ("bench",),
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}
SCRIPTS = {*LAYERS[4], *LAYERS[5]}
READS_A_SCRIPT = {("dpo", "preferences")}  # the one pair of scripts of which one imports the other
FILES = sorted(ROOT.glob("*.py"))
TREES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
COMMANDS = {name for name, tree in TREES.items() if any(getattr(node, "name", "") == "main" for node in tree.body)}
COMMAND_LINE = re.compile(r" *(?:\$ )?(?:\.venv/bin/)?python3? ([a-z_]+)\.py((?: [^ #|`]+)*)(?: {2,}.*| *#.*)?$")


def imported(tree: ast.Module) -> set[str]:
    """Root files that a file imports, wherever it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names & set(LAYER)


@pytest.mark.parametrize("name", sorted(TREES))
def test_imports_point_down(name: str) -> None:
    assert name in LAYER, f"{name}.py stands in no layer"
    for other in imported(TREES[name]):
        assert LAYER[other] < LAYER[name], f"{name}.py imports {other}.py"
        if name in SCRIPTS and other in SCRIPTS:
            assert (name, other) in READS_A_SCRIPT, f"{name}.py imports {other}.py"
        assert not (name == "evaluate" and other in LAYERS[5]), f"evaluate.py knows checkpoints, not {other}.py"


@pytest.mark.parametrize("name", sorted(TREES))
def test_a_file_only_defines(name: str) -> None:
    first, *rest = TREES[name].body
    assert isinstance(first, ast.Expr), f"{name}.py has no docstring"
    for node in rest:
        guard = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        defines = isinstance(
            node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef
        )
        assert guard or defines, f"{name}.py, line {node.lineno}: {ast.unparse(node)}"
    if name in COMMANDS:
        assert [node.name for node in rest if isinstance(node, ast.FunctionDef)][-1] == "main"
        assert ast.unparse(rest[-1]).endswith("runtime.run(main)")


def test_importing_prints_and_starts_nothing(tmp_path: Path) -> None:
    code = (
        f"import sys, threading; sys.path.insert(0, {str(ROOT)!r})\n"
        f"import {', '.join(sorted(TREES))}\n"
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_no_function_is_written_twice() -> None:
    written = defaultdict(list)
    for name, tree in TREES.items():
        for function in functions(tree):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            text = "\n".join(map(ast.unparse, body))
            if len(text) > 60:  # below, two functions may well be alike by chance
                written[text].append(f"{name}.{function.name}")
    assert [names for names in written.values() if len(names) > 1] == []


def configs(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config"))


def is_config(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Config" in ast.unparse(annotation)


def read_fields(tree: ast.Module) -> set[str]:
    """Names read from a config, its own checks aside."""
    checks = {id(node) for f in functions(tree) if f.name == "__post_init__" for node in ast.walk(f)}
    typed = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg) and is_config(node.annotation)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and id(node) not in checks
        and ast.unparse(node.value) in {*typed, "config", "self.config", "model.config", "config.draw", "config.model"}
    }


@pytest.mark.parametrize("name", [name for name in sorted(TREES) if list(configs(TREES[name]))])
def test_every_setting_is_read(name: str) -> None:
    everywhere = set().union(*(read_fields(tree) for tree in TREES.values()))
    for config in configs(TREES[name]):
        assert [ast.unparse(mark) for mark in config.decorator_list] == ["dataclass(frozen=True, slots=True)"]
        known = read_fields(TREES[name]) if config.name == "Config" else everywhere  # the rest are read by their owners
        fields = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
        assert [field for field in fields if field not in known] == []


def flags(config: type, prefix: str = "") -> set[str]:
    """Flags that a config makes."""
    names = {"--help"}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        flag = prefix + field.name.rstrip("_").replace("_", "-")  # `from_` is --from, a word that Python keeps
        names |= {f"--{flag}", f"--no-{flag}"} if hints[field.name] is bool else {f"--{flag}"}
        if dataclasses.is_dataclass(hints[field.name]):
            names |= flags(typing.cast(type, hints[field.name]), f"{flag}.")
    return names


def texts() -> dict[str, str]:
    """Everything that prints a command: README, docs, docstrings, and messages."""
    paths = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *FILES) if path.exists()]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("name", sorted(texts()))
def test_every_command_exists_with_its_flags(name: str) -> None:
    for script, rest in re.findall(r"\bpython3? ([a-z_]+)\.py\b([^\n`]*)", texts()[name]):
        if script not in TREES and not (ROOT / "README.md").exists():
            continue  # not built yet
        assert script in TREES, f"{name} says python {script}.py"
        known = flags(importlib.import_module(script).Config)
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9.\-]*(?<![.\-])", re.split(r" {2,}|, python ", rest)[0]):
            assert flag in known, f"{name} says python {script}.py{rest}"


def command_lines() -> list[tuple[str, str]]:
    """Lines that are a command and nothing else, from README, docs and docstrings: script and arguments."""
    found = []
    for name, text in texts().items():
        source = ast.get_docstring(TREES[name[:-3]], clean=False) or "" if name.endswith(".py") else text
        for line in source.splitlines():
            match = COMMAND_LINE.match(line)
            if match and match[1] in COMMANDS:
                found.append((match[1], match[2].strip()))
    return sorted(set(found))


@pytest.mark.parametrize(("script", "arguments"), command_lines())
def test_every_printed_command_line_is_understood(script: str, arguments: str) -> None:
    if not re.search(r"[\[<…]", arguments):
        runtime.parse(importlib.import_module(script).Config, None, arguments.split())


def test_the_commands_of_docstrings_are_found() -> None:
    assert ("train", "--resume") in command_lines()
    assert ("ppo", "10 0.5") in command_lines()


def test_every_promise_names_a_test_that_exists() -> None:
    named = re.findall(r"`(test_\w+)\.py::(\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    for file, function in named:
        assert f"def {function}(" in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"), (file, function)


def ablations() -> dict[str, str]:
    """The diffs of docs/ablations.md by name."""
    text = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```diff ([a-z0-9.-]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", sorted(ablations()))
def test_each_ablation_applies_and_changes_the_algorithm(name: str, tmp_path: Path) -> None:
    (tmp_path / "ppo.py").write_bytes((ROOT / "ppo.py").read_bytes())
    done = subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=ablations()[name], text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    patched = (tmp_path / "ppo.py").read_text(encoding="utf-8")
    assert ast.dump(ast.parse(patched)) != ast.dump(TREES["ppo"])


def test_the_makefile_runs_the_ablations_there_are() -> None:
    listed = re.search(r"^ABLATIONS = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed is not None
    assert sorted(listed[1].split()) == sorted(ablations())
