"""Pictures show the numbers they are given, with their intervals, and text as text."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

import pictures
from pictures import Estimate

USED = [Estimate(0.3, 0.25, 0.4), Estimate(0.7, 0.6, 0.75)]


def ends(axes: Axes, across: int) -> list[list[float]]:
    """Where the interval lines of a panel begin and end, across (0) or up (1)."""
    bars = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
    lines = [segment for one in bars for collection in one.lines[2] for segment in collection.get_segments()]
    return [segment[:, across].round(9).tolist() for segment in lines if segment[0, across] != segment[1, across]]


def labels(figure: Figure) -> str:
    return " ".join(text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel()))


def test_comparison_draws_bars_losses_and_intervals() -> None:
    figure = pictures.comparison(["a", "b"], USED, [2.0, 2.5], [Estimate(0, 0, 0), Estimate(0.5, 0.4, 0.8)])
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([30, 70])
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    assert ends(left, 0) == [[25, 40], [60, 75]]
    assert ends(right, 0) == [[2.4, 2.8]]
    assert "(%)" in labels(figure)
    assert "nats a token" in labels(figure)


def test_frontier_draws_models_with_intervals_and_runs_as_lines() -> None:
    figure = pictures.frontier({"dpo": (3.0, USED[0])}, {"ppo-0.05": [(0.0, 0.2), (9.0, 0.6)]}, "finetuned")
    (axes,) = figure.axes
    run = axes.lines[0]
    assert run.get_label() == "ppo-0.05, as it trained"
    assert (list(run.get_xdata()), list(run.get_ydata())) == ([0.0, 9.0], pytest.approx([20, 60]))
    assert ends(axes, 1) == [[25, 40]]
    assert [note.get_text() for note in axes.texts] == ["dpo"]
    assert "KL from finetuned (nats a story)" in labels(figure)
    assert not pictures.frontier({}, {}, "finetuned").axes[0].lines


def test_cost_draws_gain_and_added_loss() -> None:
    figure = pictures.cost({"a": (USED[0], USED[1], 0.0123), "b": (USED[0], USED[1], None)}, "finetuned")
    (axes,) = figure.axes
    assert ends(axes, 0) == [[25, 40], [25, 40]]
    assert ends(axes, 1) == [[0.6, 0.75], [0.6, 0.75]]
    assert [note.get_text() for note in axes.texts] == ["a\n0.0123 nats a point", "b"]
    assert "points" in labels(figure)


def test_solving_draws_a_curve_a_model() -> None:
    figure = pictures.solving({"a": {1: USED[0], 2: USED[1]}, "b": {1: USED[0], 2: USED[1]}})
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in (bars[0] for bars in axes.containers)] == [
        pytest.approx([30, 70])
    ] * 2
    assert ends(axes, 1) == [[25, 40], [60, 75]] * 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_health_has_a_panel_a_metric() -> None:
    curves = {name: [(1, 0.1 * place), (2, 0.2 * place)] for place, name in enumerate(pictures.HEALTH)}
    figure = pictures.health({"run": curves})
    assert [axes.get_ylabel() for axes in figure.axes] == list(pictures.HEALTH.values())
    assert [axes.lines[0].get_ydata()[1] for axes in figure.axes] == pytest.approx([0, 0.2, 0.4, 0.6])


def test_lengths_tell_the_cut_from_the_ended() -> None:
    (axes,) = pictures.lengths([5, 5, 15, 20], [True, True, False, True], 20).axes
    ended, cut = ([bar.get_height() for bar in bars] for bars in axes.containers)
    assert [ended[5], ended[19], sum(ended)] == [2, 1, 3]
    assert [cut[15], sum(cut)] == [1, 1]


def test_tokens_stand_on_their_chances_in_lines() -> None:
    pieces = ["A", " $kite$", "\n", "x" * 90, " and", " more", "\x07"]
    places, lines = pictures.token_places(pieces)
    assert [(x, y) for _, x, y in places] == [(0, 0), (1, 0), (8, 0), (0, 1), (90, 1), (0, 2), (5, 2)]
    assert lines == 3
    chances = [0.0, 0.25, 0.5, 0.75, 1.0, 0.1, 0.2]
    figure = pictures.token_chances(pieces, {"policy": chances, "reference": chances[::-1]})
    first, second = figure.axes[:2]
    assert first.collections[0].get_array().tolist() == chances
    assert second.collections[0].get_array().tolist() == chances[::-1]
    assert [text.get_text() for text in first.texts][:3] == ["A", r" \$kite\$", "↵"]
    assert first.texts[-1].get_text() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.filterwarnings("error")
def test_any_name_is_saved_as_it_is_and_the_same_picture_gives_the_same_bytes(tmp_path: Path) -> None:
    names = ["$x_{", "_hidden", "<b>&|`\u65e5\x00\U0001f600"]
    seen = []
    for number in range(2):
        figure = pictures.solving({name: {1: USED[0]} for name in names})
        assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()][1] == " _hidden"
        pictures.save(figure, tmp_path / f"ppo-0.05-{number}")
        seen.append([(tmp_path / f"ppo-0.05-{number}.{kind}").read_bytes() for kind in ("png", "svg")])
    assert seen[0] == seen[1]
