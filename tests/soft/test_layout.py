"""Layout by hand: windows, slots, overlap, packing, and what does not fit."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.soft import Region, Shape, SoftConfig, Text, collate, lay_out
from kvjax.soft.layout import windows
from tests.soft import conftest

SMALL = SoftConfig(7, 8, 9, ratios=(4, 2), window=8)


def test_regions_among_text_by_hand():
    row = lay_out([Text([1, 2]), Region(range(11, 21)), Text([3], trained=False),
                   Region([31], ratio=2), Text([4])], SMALL)  # fmt: skip
    assert row.tokens.tolist() == [1, 2, 7, 8, 8, 8, 9, 3, 7, 8, 9, 4]
    assert row.labels.tolist() == [1, 2] + [-100] * 9 + [4]
    # Four slots a window, for the ratio 2; by 4 a window of 8 fills two of them.
    assert row.slot.tolist() == [-1, -1, -1, 0, 1, 4, -1, -1, -1, 8, -1, -1]
    assert row.windows.tokens[:, :3].tolist() == [[11, 12, 13], [19, 20, 0], [31, 0, 0]]
    assert row.windows.own.tolist() == row.windows.length.tolist() == [8, 2, 1]
    assert row.windows.ratio.tolist() == [4, 4, 2]


def test_overlap_is_seen_but_not_owned():
    cut = windows(range(1, 20), SoftConfig(7, 8, 9, ratios=(4,), window=8, overlap=3, causal=False))
    assert cut.first.tolist() == [0, 3, 3] and cut.own.tolist() == [8, 8, 3]
    assert cut.length.tolist() == [11, 14, 6]
    assert cut.tokens[1, :14].tolist() == list(range(6, 20))
    assert cut.tokens[2, :6].tolist() == list(range(14, 20))


def test_appended_ids_stand_behind_the_window():
    cut = windows(range(1, 12), SoftConfig(7, 8, 9, (4,), 8, pooling="eos", eos_id=5))
    assert cut.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 5, 5], [9, 10, 11, 5] + [0] * 6]
    assert cut.length.tolist() == [10, 4] and cut.own.tolist() == [8, 3]


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=3))
def test_every_slot_is_used_once_and_in_order(documents):
    """Whatever is packed, memory tokens take each window's slots, one after another."""
    rows = [[lay_out([Region(range(n), 2) for n in lengths], SMALL)] for lengths in documents]
    batch = collate(rows, SMALL, Shape(3, 100, 64))
    used = batch.slot[batch.slot >= 0]
    owns = [own for own in batch.windows.own if own]
    wanted = [w * SMALL.slots + i for w, own in enumerate(owns) for i in range(-(-own // 2))]
    assert used.tolist() == wanted
    assert (batch.segments >= 0).sum() == sum(len(row.tokens) for (row,) in rows)


def test_what_does_not_fit():
    row = lay_out([Region(range(20))], SMALL)
    with pytest.raises(ValueError, match="row 0 holds 14 tokens or more; it has 10"):
        collate([[row, row]], SMALL, Shape(1, 10, 9))
    with pytest.raises(ValueError, match="6 do not fit in 5"):
        collate([[row, row]], SMALL, Shape(1, 20, 5))
    with pytest.raises(ValueError, match="packed has 2 rows"):
        collate([[row], [row]], SMALL, Shape(1, 20, 9))
    with pytest.raises(ValueError, match="compresses by"):
        lay_out([Region([1], ratio=3)], SMALL)
    with pytest.raises(ValueError, match="parts is empty"):
        lay_out([], SMALL)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ratios": ()}, "give at least one"),
        ({"ratios": (0,)}, "each 1 or more"),
        ({"ratios": (5,)}, "use a multiple of the ratio 5"),
        ({"ratios": (4, 8), "pooling": "concat"}, "whose adapter fits one ratio"),
        ({"window": 0}, "use a multiple"),
        ({"overlap": -1}, "0 or more"),
        ({"pooling": "max"}, "mean, concat, eos"),
        ({"adapter": "big"}, "mlp, attn_mlp, mlp_attn"),
        ({"memory": 107}, "must be three ids"),
    ],
)
def test_settings_are_checked(change, match):
    with pytest.raises(ValueError, match=match):
        conftest.settings(**change)


def test_the_published_adapters_have_the_published_sizes():
    import dataclasses

    from kvjax.soft.adapter import adapter_shapes
    from tests.soft.conftest import stacks

    encoder, decoder = (
        dataclasses.replace(stack.config, hidden_size=size)
        for stack, size in zip(stacks(), (1024, 2560), strict=True)
    )
    for config, size in ((SoftConfig(1, 2, 3), 9_181_184),
                         (SoftConfig(1, 2, 3, pooling="concat"), 48_518_144)):  # fmt: skip
        shapes = adapter_shapes(config, encoder, decoder)
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == size
