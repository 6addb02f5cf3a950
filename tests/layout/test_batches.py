"""A global batch cut into replicas and micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megagraph_cli.layout.batches import microbatch_targets, steps_per_epoch


@given(st.integers(1, 10_000), st.integers(1, 8), st.integers(1, 16))
def test_padding_is_the_least_that_divides(batch_size: int, dp: int, num_microbatches: int) -> None:
    parts = dp * num_microbatches
    padded = microbatch_targets(batch_size, dp, num_microbatches) * parts
    assert batch_size <= padded < batch_size + parts


def test_a_batch_larger_than_the_training_set_is_one_step() -> None:
    assert [steps_per_epoch(num_train, 256) for num_train in (0, 1, 256, 257, 1024)] == [1, 1, 1, 2, 4]
