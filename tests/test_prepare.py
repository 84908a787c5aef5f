"""From raw text to `data/`, and downloads that break off, are refused, or meet no network."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest

import prepare
import stories
import tokenizer
from runtime import UserError
from tokenizer import Tokenizer

Command = Callable[..., int]
ANIMALS = ("bear", "bird", "fish", "frog", "goat", "deer")
THINGS = ("kite", "boat", "drum", "cake", "lamp", "rope", "coat")
PLACES = ("lake", "hill", "cave", "farm", "park")
COLOURS = ("grey", "pink", "blue", "gold")
FOODS = ("soup", "corn", "rice")
MOODS = ("proud", "shy", "merry", "calm", "brave", "angry", "sorry", "silly")
DRAW = ("--draw.least-stories", 5, "--draw.most-share", 0.5, "--draw.heldout-one-in", 10)


def made_up(number: int) -> list[str]:
    return [
        f"Once, Tom saw a {ANIMALS[n % 6]} with a {THINGS[n % 7]} near the {PLACES[n % 5]}. It had number {n}.\n"
        f"It was so {MOODS[n % 8]} and had a {COLOURS[n % 4]} bowl of {FOODS[n % 3]}."
        for n in range(number)
    ]


def written(path: Path, texts: list[str]) -> Path:
    path.write_text("\n<|endoftext|>\n".join(texts) + "\n<|endoftext|>\n", encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_everything_is_made_from_a_local_file(workspace: Path, command: Command, coder: Tokenizer) -> None:
    texts = made_up(300)
    before = tokenizer.PATH.read_bytes()
    assert command("prepare", "--stories", written(workspace / "own.txt", texts), *DRAW) == 0
    assert tokenizer.PATH.read_bytes() == before
    held = [text for text in texts if stories.is_heldout(text, 10)]
    kept = [text for text in texts if text not in held]
    assert 10 < len(held) < 60
    for path, told in ((prepare.TRAIN_TOKENS, kept), (prepare.HELDOUT_TOKENS, held)):
        ids = numpy.load(path)
        assert ids.dtype == numpy.uint16
        assert coder.decode(ids.tolist()) == "".join(f"<|endoftext|>{text}" for text in told)
        assert (ids == coder.end).sum() == len(told)
    rows = lines(stories.TRAIN_STORIES)
    assert [row["story"] for row in rows] == kept  # one instruction each
    for row in rows:
        words = row["words"]
        assert isinstance(words, list)
        assert len(set(words)) == 3
        assert stories.words_used(str(row["story"]), words) == 1
        assert not {"tom", "once", "saw", "the", "near", "number"} & set(words)
    train = stories.read_instructions(stories.TRAIN_INSTRUCTIONS)
    assert set(train) == {tuple(row["words"]) for row in rows}  # type: ignore[arg-type]
    assert len(set(train)) == len(train)
    heldout = stories.read_instructions(stories.HELDOUT_INSTRUCTIONS)
    assert len(held) < len(heldout) <= 2 * len(held)  # two each, but for the same three words twice
    for words in heldout:
        assert any(stories.words_used(text, words) == 1 for text in held)


def test_a_second_run_gives_the_same(workspace: Path, command: Command) -> None:
    source = written(workspace / "own.txt", made_up(200))
    assert command("prepare", "--stories", source, *DRAW) == 0
    first = {path: path.read_bytes() for path in Path("data").iterdir()}
    assert command("prepare", "--stories", source, *DRAW) == 0
    assert {path: path.read_bytes() for path in Path("data").iterdir()} == first
    written(source, made_up(400))  # more stories keep the split
    held = set(str(numpy.load(prepare.HELDOUT_TOKENS).tolist()).split(", 256, "))
    assert command("prepare", "--stories", source, *DRAW) == 0
    assert len(held & set(str(numpy.load(prepare.HELDOUT_TOKENS).tolist()).split(", 256, "))) >= len(held) - 1


def test_instruct_files_bring_their_own_words(workspace: Path, command: Command) -> None:
    pieces = [f"Words: quit, oak\nSummary: Short.\nStory: \n\n{text}" for text in made_up(60)]
    assert command("prepare", "--stories", written(workspace / "own.txt", pieces), *DRAW) == 0
    assert stories.read_instructions(stories.TRAIN_INSTRUCTIONS) == [("quit", "oak")]
    assert {str(row["story"]) for row in lines(stories.TRAIN_STORIES)} < set(made_up(60))


def test_a_new_tokenizer(workspace: Path, command: Command) -> None:
    source = written(workspace / "own.txt", made_up(200))
    flags = ("--stories", source, "--new-tokenizer", "--vocabulary", 300, "--problems", 20, *DRAW)
    assert command("prepare", *flags) == 0
    coder = tokenizer.load()
    assert coder.vocabulary == 300
    assert len(coder.encode(made_up(1)[0])) < 0.8 * len(made_up(1)[0])
    assert coder.decode(coder.encode("🦊 <|endoftext|> 1,000")) == "🦊 <|endoftext|> 1,000"
    assert int(numpy.load(prepare.TRAIN_TOKENS).max()) == coder.end == 297


def test_a_tokenizer_is_trained_where_none_is(workspace: Path, command: Command) -> None:
    tokenizer.PATH.unlink()
    source = written(workspace / "own.txt", made_up(200))
    assert command("prepare", "--stories", source, "--vocabulary", 300, "--problems", 20, *DRAW) == 0
    assert tokenizer.load().vocabulary == 300


def test_a_vocabulary_the_stories_do_not_give(
    workspace: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tokenizer.PATH.read_bytes()
    source = written(workspace / "own.txt", made_up(50))
    flags = ("--stories", source, "--new-tokenizer", "--vocabulary", 60_000, "--problems", 0, *DRAW)
    assert command("prepare", *flags) == 1
    assert "smaller --vocabulary" in capsys.readouterr().err
    assert tokenizer.PATH.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (None, 1, "own.txt is missing"),
        (b"", 1, "own.txt is empty"),
        (b"A kite.\xff", 1, "own.txt is not UTF-8"),
        (b"One story only.", 1, "own.txt has 1 stories"),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_spoiled_stories_are_one_line(
    command: Command, capsys: pytest.CaptureFixture[str], content: bytes | None, status: int, said: str
) -> None:
    if content is not None:
        Path("own.txt").write_bytes(content)
    before = sorted(Path("data").iterdir())
    assert command("prepare", "--stories", "own.txt") == status
    output = capsys.readouterr().err
    assert said in output
    assert len(output.splitlines()) == 1
    assert sorted(Path("data").iterdir()) == before


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--megabytes", 0),
        ("--megabytes", "nan"),
        ("--vocabulary", 299),
        ("--vocabulary", 65_537),
        ("--problems", -1),
        ("--timeout-s", 0),
        ("--seed", -1),
        ("--draw.words", 0),
        ("--draw.heldout-one-in", 0),
    ],
)
def test_wrong_flags_exit_with_2(
    command: Command, capsys: pytest.CaptureFixture[str], flag: str, value: object
) -> None:
    assert command("prepare", flag, value) == 2
    output = capsys.readouterr().err
    assert flag in output
    assert "Traceback" not in output


class Server(ThreadingHTTPServer):
    """Serves `body` by range; after `breaks_at` bytes of an answer it hangs up."""

    body = ("\n<|endoftext|>\n".join(made_up(1500)) + "\n<|endoftext|>\nA story that was cut in the mid").encode()
    breaks_at: int | None = None
    ranges: bool = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/stories.txt"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.asked.append(asked)
        first, last = map(int, re.findall(r"\d+", asked))
        body = self.server.body
        if self.server.ranges and first >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        part = body[first : last + 1] if self.server.ranges else body
        self.send_response(206 if self.server.ranges else 200)
        if self.server.ranges:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: self.server.breaks_at])

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def test_a_download_goes_on_where_it_broke_off(tmp_path: Path, server: Server) -> None:
    path, size = tmp_path / "data" / "download.txt", 50_000
    server.breaks_at = 20_000
    with pytest.raises(UserError, match=r"broke off after 20000 of 50000 bytes: run python prepare\.py again"):
        prepare.download(server.url, path, size, 5, "pass --stories PATH")
    server.breaks_at = None
    prepare.download(server.url, path, size, 5, "pass --stories PATH")
    assert path.read_bytes() == server.body[:size]
    assert server.asked == ["bytes=0-49999", "bytes=20000-49999"]
    prepare.download(server.url, path, size, 5, "pass --stories PATH")
    assert len(server.asked) == 2  # nothing is left to ask for
    prepare.download(server.url, path, 60_000, 5, "pass --stories PATH")
    assert path.read_bytes() == server.body[:60_000]
    assert server.asked[2:] == ["bytes=50000-59999"]


def test_a_file_smaller_than_asked_for_is_whole(tmp_path: Path, server: Server) -> None:
    path = tmp_path / "download.txt"
    for _ in range(2):
        prepare.download(server.url, path, 10**6, 5, "pass --stories PATH")
        assert path.read_bytes() == server.body
    assert len(server.asked) == 2


def test_a_server_without_ranges_is_refused(tmp_path: Path, server: Server) -> None:
    path = tmp_path / "download.txt"
    path.write_bytes(server.body[:100])
    server.ranges = False
    with pytest.raises(UserError, match=r"does not serve parts .* --stories PATH"):
        prepare.download(server.url, path, 50_000, 5, "pass --stories PATH")
    assert path.read_bytes() == server.body[:100]


def test_a_part_that_starts_elsewhere_is_refused(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "download.txt"
    path.write_bytes(server.body[:100])
    monkeypatch.setattr(re, "findall", lambda *_: ["0", "49999"])
    with pytest.raises(UserError, match="does not serve parts"):
        prepare.download(server.url, path, 50_000, 5, "pass --stories PATH")
    assert path.read_bytes() == server.body[:100]


def test_a_missing_page_and_no_url_are_refused(tmp_path: Path, server: Server) -> None:
    (tmp_path / "download.txt").write_bytes(b"more than the server has" * 10_000)
    with pytest.raises(UserError, match=r"cannot be read .*416.* --stories PATH"):
        prepare.download(server.url, tmp_path / "download.txt", 10**6, 5, "pass --stories PATH")
    with pytest.raises(UserError, match="cannot be read"):
        prepare.download("nowhere", tmp_path / "other.txt", 10**6, 5, "pass --stories PATH")


@pytest.mark.usefixtures("workspace")
def test_a_download_by_command(command: Command, server: Server) -> None:
    assert command("prepare", "--url", server.url, "--megabytes", 1, *DRAW) == 0
    told = [str(row["story"]) for row in lines(stories.TRAIN_STORIES)]
    assert set(told) <= set(made_up(1500))  # the cut story at the end is no story
    assert len(told) > 1000


@pytest.mark.usefixtures("workspace")
def test_gsm8k_by_command(command: Command, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.dumps({"question": "One and one?", "answer": "1+1=<<1+1=2>>2\n#### 2"})
    server.body = f"{row}\n{row}\n".encode()
    place = server.url.rpartition("/")[0]
    assert command("prepare", "--gsm8k", "--gsm8k-url", place) == 0
    assert capsys.readouterr().out.count("2 problems") == 2
    assert sorted(path.name for path in prepare.GSM8K.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert not prepare.TRAIN_TOKENS.exists()
    (prepare.GSM8K / "test.jsonl").write_bytes(b"{" * len(server.body))  # as long as the whole, and spoiled
    assert command("prepare", "--gsm8k", "--gsm8k-url", place) == 1
    assert "line 1" in capsys.readouterr().err


def test_offline_says_how_to_pass_a_file(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    assert command("prepare", "--url", f"http://127.0.0.1:{port}/stories.txt") == 1
    output = capsys.readouterr().err
    assert "--stories PATH" in output
    assert len(output.splitlines()) == 1


def test_a_download_cut_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "download.txt"
    whole = "A kite.<|endoftext|>Zoë sat.<|endoftext|>A kite.<|endoftext|>Zoë".encode()
    path.write_bytes(whole)
    told = [story.text for story in prepare.downloaded_stories(path, len(whole) - 1)]
    assert told == ["A kite.", "Zoë sat."]
    assert [story.text for story in prepare.downloaded_stories(path, 25)] == ["A kite."]
