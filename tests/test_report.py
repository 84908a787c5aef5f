"""The report: one page that holds everything, shows what a story says and obeys none of it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import report
from pictures import Estimate
from report import Result

HALF = Estimate(0.5, 0.25, 0.75)


def result(name: str, told: list[str]) -> Result:
    return Result(
        name=name,
        scores=[0.5],
        words_used=HALF,
        gained=Estimate(0.1, -0.05, 0.2),
        losses=[6.0],
        loss=2.0,
        added=Estimate(-0.25, -0.5, 0.125),
        cost=None,
        ended=0.9,
        length=120.4,
        distinct_2=0.4,
        repeated_4=0.1,
        word_repeats=1.5,
        kl=3.0,
        next_words=[(" <i>girl", 0.6)],
        accuracy=HALF,
        pass_at={1: HALF, 2: HALF},
        stories=told,
        facts={},
    )


def test_rows_by_hand() -> None:
    head, row = report.rows_of([result("a", [])])
    assert dict(zip(head, row, strict=True)) == {
        "model": "a",
        "words used %": "50.0 [25.0, 75.0]",
        "gained": "+10.0 [-5.0, +20.0]",
        "loss": "2.000",
        "added": "-0.250 [-0.500, +0.125]",
        "ended": "90%",
        "length": "120",
        "distinct-2": "0.400",
        "repeated-4": "0.100",
        "repeats": "1.50",
        "KL": "3.00",
        "accuracy %": "50.0 [25.0, 75.0]",
        "pass@1 %": "50.0 [25.0, 75.0]",
        "pass@2 %": "50.0 [25.0, 75.0]",
    }
    assert report.table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_columns_are_wrapped_marked_and_stacked_where_they_would_be_narrow() -> None:
    told = {"one": "A kite and a KITES bird.\nEnd", "two": "\x1b[2J"}
    assert report.side_by_side(told, ("kite",), 27, 5).splitlines() == [
        "one            two",
        "",
        "A *kite* and   \N{REPLACEMENT CHARACTER}[2J",
        "a *KITES*",
        "bird.",
        "End",
    ]
    stacked = report.side_by_side({**told, "three": ""}, ("kite",), 40, 30)
    assert stacked.splitlines()[:3] == ["one", "", "A *kite* and a *KITES* bird."]
    assert stacked.endswith("three\n\n(no text)")


def test_a_marked_story_counts_repeats_and_escapes() -> None:
    assert report.marked_html("Kite & kites <script>", ("kite", "<b>")) == (
        '<mark>Kite</mark> &amp; <mark class="again">kites<sup>2</sup></mark> &lt;script&gt;'
    )
    assert report.marked_html(" \n", ("kite",)) == "<i>no text</i>"


class Tags(HTMLParser):
    """Tags of a page, with their attributes; each must be closed in its turn."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_needs_nothing_and_obeys_nothing(tmp_path: Path) -> None:
    evil = '</td><script>alert(1)</script><img src=x onerror="alert(1)"> kite kite'
    (tmp_path / "a.svg").write_text("<svg/>", encoding="utf-8")
    page = report.page(
        [result("<b>a</b>", [evil, ""]), result("b", ["A kite.", "x"])],
        [("kite", "<b>"), ("|", "`")],
        'Once "<u>',
        {tmp_path / "a.svg": 'what "it" <s>shows'},
        {"Command": "python evaluate.py '<a>'"},
    )
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    names = [tag for tag, _ in tags.seen]
    assert not {"script", "b", "u", "s", "a", "link", "iframe"} & set(names)
    images = [attributes for tag, attributes in tags.seen if tag == "img"]
    assert images == [{"alt": 'what "it" <s>shows', "src": "data:image/svg+xml;base64,PHN2Zy8+"}]
    assert names.count("td") == 2 * 13 + 2 * 1 + 2 * 2  # numbers, next words, stories
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert '<mark>kite</mark> <mark class="again">kite<sup>2</sup></mark>' in page
    assert "&lt;i&gt;girl 60%" in page
    assert "default-src 'none'" in page
