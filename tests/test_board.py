"""What a run shows while it trains: warnings, tables that no story breaks, and an evaluation with its pictures."""

from pathlib import Path

import markdown as python_markdown
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import board
import runtime
from board import Evaluation


def test_warnings_name_what_leaves_its_range() -> None:
    fine = {"objective/kl": 5.0, "scores_spread": 0.2, "stories/ended": 0.8, "policy/clipfrac": 0.1}
    fine["value/explained_variance"] = 0.1
    limits = board.LimitsConfig()
    assert board.warnings([fine] * 30, limits) == {}
    for name, value in (
        ("objective/kl", limits.kl + 1),
        ("stories/ended", limits.ended - 0.01),
        ("policy/clipfrac", limits.clipfrac + 0.01),
        ("value/explained_variance", -0.1),
    ):
        assert list(board.warnings([fine] * 30 + [{**fine, name: value}], limits)) == [name]
    flat = {**fine, "scores_spread": 0.0}
    assert board.warnings([fine] + [flat] * (limits.flat - 1), limits) == {}
    assert list(board.warnings([flat] * limits.flat, limits)) == ["objective/scores"]
    assert board.warnings([{**fine, "value/explained_variance": -1.0}], limits) == {}  # a critic starts blind


def test_a_sample_table_shows_markup_and_bolds_what_was_asked_for() -> None:
    """Read as TensorBoard reads it, by Python-Markdown: one table of one row with four cells."""
    words = ("kite", "<b>", "|", "`")
    table = board.sample_table([(words, "Kites | <script>\n**no** `x` [a](b) kite.", 0.25, 1.26)])
    shown = python_markdown.markdown(table, extensions=["markdown.extensions.tables"])
    assert shown.count("<td>") == 4
    assert "<strong>Kites</strong>" in shown
    assert "<strong>kite</strong>." in shown
    assert shown.count("<strong>") == 2
    assert "<script>" not in shown
    assert "<code>" not in shown
    assert "<a " not in shown
    assert "<td>25%</td>" in shown
    assert "<td>1.3</td>" in shown


def test_an_evaluation_is_shown_whole(tmp_path: Path) -> None:
    seen = Evaluation(
        0.5, 2.5, [3, 12], [True, False], "A kite.", ["A", " kite", "$\n"], [0.1] * 3, [0.9] * 3, [(" b|", 0.5)]
    )
    with runtime.Log(tmp_path / "ppo-1", board.LimitsConfig(), {}) as log:
        log.board.add_custom_scalars(board.LAYOUT)
        for step in (0, 10):
            board.show(log, step, seen, ("kite",), "Once", 12)
    assert [line["eval/kl"] for line in runtime.logged(tmp_path / "ppo-1")] == [2.5, 2.5]
    events = EventAccumulator(str(tmp_path / "ppo-1"), size_guidance={"images": 0, "tensors": 0}).Reload()
    names = {"words_used_against_kl", "heldout_lengths", "demo_tokens"}
    assert set(events.Tags()["images"]) == {f"pictures/{name}" for name in names}
    assert all([one.step for one in events.Images(f"pictures/{name}")] == [0, 10] for name in names)
    (text,) = {one.tensor_proto.string_val[0] for one in events.Tensors("demo/text_summary")}
    assert text == b"A **kite**."
    (text,) = {one.tensor_proto.string_val[0] for one in events.Tensors("next_words/text_summary")}
    assert text == b"Once ... b&#124; 50%"
    assert "custom_scalars__config__" in events.Tags()["tensors"]


@pytest.mark.parametrize("pieces", [["<|endoftext|>"], ["\n"], [""]])
def test_a_story_of_one_token_is_drawn(tmp_path: Path, pieces: list[str]) -> None:
    seen = Evaluation(0.0, 0.0, [1], [True], "", pieces, [1.0], [1.0], [])
    with runtime.Log(tmp_path / "run", board.LimitsConfig(), {}) as log:
        board.show(log, 0, seen, ("kite",), "Once", 1)
