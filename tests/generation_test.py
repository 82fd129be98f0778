"""Statistics of a call."""

import dataclasses

from spsjax import Stats


def test_stats_count_first_token_as_prompt_and_one_round():
    stats = Stats(4, 0, 0.0, 1.0, [4], seconds=5.0, prompt_seconds=1.0, compile_seconds=7.0)
    assert stats.first_token_seconds == 2 and stats.cold_first_token_seconds == 9
    no_rounds = dataclasses.replace(stats, target_calls=0, seconds=1.0)
    assert no_rounds.first_token_seconds == 1
