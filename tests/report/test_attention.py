"""The figure of attention maps."""

import numpy as np
import pytest

from trajectory_transformer.report.attention import attention_figure
from trajectory_transformer.tokens.layout import TokenLayout

LAYOUT = TokenLayout(goal_dim=1, observation_dim=1, action_dim=1, rewards=True)
SLOTS = ("x", "push", "reward", "return to go")


def labels(steps: int) -> list[str]:
    return ["goal x", *(f"{name}, step {step}" for step in range(5, 5 + steps) for name in SLOTS)]


def test_panels_show_the_square_roots_of_the_maps_under_their_titles() -> None:
    maps = np.random.default_rng(0).random((3, 81, 81), dtype=np.float32)
    figure = attention_figure(dict(zip("abc", maps, strict=True)), LAYOUT, labels(20), columns=2)
    first, second, third, unused = figure.axes
    for panel, title, weights in zip((first, second, third), "abc", maps, strict=True):
        assert panel.get_title() == title
        np.testing.assert_allclose(np.asarray(panel.images[0].get_array()), np.sqrt(weights))
    assert not unused.axison
    texts = [label.get_text() for label in first.get_yticklabels()]
    assert texts[:7] == ["goal", "step 5, s", "a", "r", "step 6, s", "a", "r"] and len(texts) == 1 + 3 * 20
    assert first.get_yticks().tolist()[:7] == [0, 1, 2, 3, 5, 6, 7]
    # Names stand at the left and below the lowest panel of each column.
    assert {label.get_text() for label in second.get_yticklabels()} == {""}
    shown = [any(label.get_text() for label in panel.get_xticklabels()) for panel in (first, second, third)]
    assert shown == [False, True, True]


@pytest.mark.parametrize(("steps", "name_tokens"), [(2, False), (20, True)])
def test_all_tokens_have_their_names_if_they_fit_or_are_asked_for(steps: int, name_tokens: bool) -> None:
    names = labels(steps)
    weights = np.eye(len(names), dtype=np.float32)
    figure = attention_figure({"a": weights}, LAYOUT, names, columns=1, name_tokens=name_tokens)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == names
