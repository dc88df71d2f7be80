"""The figure of attention maps."""

import numpy as np

from trajectory_transformer.report.attention import attention_figure
from trajectory_transformer.tokens.layout import TokenLayout

LAYOUT = TokenLayout(goal_dim=1, observation_dim=1, action_dim=1, rewards=True)
LABELS = ["goal x", *(f"{name}, step {step}" for step in (5, 6) for name in ("x", "push", "reward", "return to go"))]


def test_panels_show_the_square_roots_of_the_maps_under_their_titles() -> None:
    maps = np.random.default_rng(0).random((3, 9, 9), dtype=np.float32)
    figure = attention_figure(dict(zip("abc", maps, strict=True)), LAYOUT, LABELS, columns=2)
    first, second, third, unused = figure.axes
    for panel, title, weights in zip((first, second, third), "abc", maps, strict=True):
        assert panel.get_title() == title
        np.testing.assert_allclose(np.asarray(panel.images[0].get_array()), np.sqrt(weights))
    assert not unused.axison
    texts = [label.get_text() for label in first.get_yticklabels()]
    assert texts == ["goal", "step 5, s", "a", "r", "step 6, s", "a", "r"]
    assert first.get_yticks().tolist() == [0, 1, 2, 3, 5, 6, 7]
    # Names stand at the left and below the lowest panel of each column.
    assert set(label.get_text() for label in second.get_yticklabels()) == {""}
    shown = [any(label.get_text() for label in panel.get_xticklabels()) for panel in (first, second, third)]
    assert shown == [False, True, True]


def test_named_tokens_all_have_their_names() -> None:
    figure = attention_figure({"a": np.eye(9, dtype=np.float32)}, LAYOUT, LABELS, columns=1, name_tokens=True)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == LABELS
