"""Seeds of independent random streams."""

from trajectory_transformer.randomness import stream_seed


def test_stream_seeds_are_fixed_and_depend_on_every_word_and_their_order() -> None:
    assert stream_seed(1, 2) == 7764949442709860949
    seeds = {stream_seed(*words) for words in [(1,), (2,), (1, 2), (2, 1), (1, 2, 3)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
