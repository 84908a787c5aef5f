"""TensorBoard on a tiny run and the report, opened in a real headless browser: each page shows its content, no error.

`pytest -m browser` runs it; skipped without Chromium, which on Debian `apt-get install chromium` brings.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import checkpoint
import evaluate
from model import GPT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or sys.platform == "win32", reason="no Chromium here"),
]
SECONDS = 60  # until a page must show what it is waited for
# All text of a page, and how many of its pictures have loaded, through every shadow root.
DEEP = """
(() => {
  let text = '', images = 0;
  const walk = (node) => {
    if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.nodeName)) return;
    if (node.nodeType === 3) text += node.textContent + ' ';
    if (node.nodeName === 'IMG' && node.naturalWidth > 0) images += 1;
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return [text.replace(/\\s+/g, ' '), images];
})()
"""


class Browser:
    """One tab of a headless Chromium, spoken to over its debugging pipe."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.read, self.number, self.errors = b"", 0, list[str]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")

    session: str | None = None

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; errors that the page reports meanwhile are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.read:
                assert select.select([self.from_browser], [], [], SECONDS)[0], f"no answer to {method}"
                block = os.read(self.from_browser, 1 << 16)
                assert block, "the browser is gone"
                self.read += block
            line, _, self.read = self.read.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            elif answer["method"] == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(str(answer["params"]["entry"]))

    def shows(self, url: str, wanted: list[str], images: int) -> None:
        """Opens a page and waits until it shows the texts wanted and as many pictures, without an error."""
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=url)
        missing: list[str] = wanted
        seen = 0
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            answer = self.ask("Runtime.evaluate", expression=DEEP, returnByValue=True)
            if "value" in answer["result"]:
                text, seen = answer["result"]["value"]
                missing = [one for one in wanted if one not in text]
                if not missing and seen >= images:
                    break
            time.sleep(0.2)
        assert not missing, f"{url} does not show {missing}, but {text[:2000]}"
        assert seen >= images, f"{url} shows {seen} pictures"
        assert not self.errors, self.errors


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Context with a browser that has a profile of its own, and no network beside this machine."""
    assert CHROMIUM is not None
    its_in, to_browser = os.pipe()
    from_browser, its_out = os.pipe()
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in (its_in, its_out)]  # clear of 3 and 4
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1400,2400"]
    arguments += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with Path(os.devnull).open("wb") as nowhere:
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        actions += [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), number) for number in (1, 2)]
        child = os.posix_spawn(CHROMIUM, [CHROMIUM, *arguments], os.environ, file_actions=actions)
    for number in (its_in, its_out, *high):
        os.close(number)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        os.close(to_browser)
        os.close(from_browser)


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Context with a TensorBoard of a folder; its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0", "--host", "127.0.0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        finally:
            server.terminate()


def test_pages_show_curves_stories_and_pictures(
    workspace: Path, command: Callable[..., int], tiny: Callable[..., GPT]
) -> None:
    few = ("--groups", "2", "--group", "4", "--limit", "8", "--minibatch", "4", "--evaluate-on", "4")
    for weight in ("0.05", "0.5"):
        runs = ("9", weight, "--rollouts", "1", "--demo-limit", "8", "--device", "cpu")
        assert command("ppo", *runs, *few) == 0
    checkpoint.save(checkpoint.DPO, tiny(context=128, seed=5), {"step": 1})
    assert command("evaluate", "--limit", "8", "--problems", "0", "--resamples", "50", "--device", "cpu") == 0
    with browser(workspace / "profile") as tab:
        report = (workspace / evaluate.FOLDER / "report.html").as_uri()
        tab.shows(report, ["Models compared", "ppo-0.05", "dpo", "words used %", "answered by each"], images=4)
        with tensorboard(workspace / "runs") as address:
            tab.shows(f"{address}#scalars", ["objective", "policy", "stories", "ppo-0.05-", "ppo-0.5-"], images=0)
            tab.shows(f"{address}#custom_scalars", ["All runs", "held-out KL (nats a story)"], images=0)
            tab.shows(f"{address}#text", ["config", "demo/text_summary", "next_words"], images=0)
            tab.shows(f"{address}#images", ["pictures", "demo_tokens", "heldout_lengths"], images=6)
