"""Packing with regions: whatever the documents, none is lost, cut, or mixed with another."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.data import soft
from kvjax.data.packing import Packed, examples
from kvjax.soft import Region, Shape, SoftConfig, Text, lay_out

CONFIG = SoftConfig(1000, 1001, 1002, ratios=(4, 8), window=16)
SHAPE = Shape(rows=2, length=64, windows=6)

# A document: tokens of its parts, and the ratio of those that are regions.
PARTS = st.lists(
    st.tuples(st.integers(0, 24), st.sampled_from([None, 4, 8])), min_size=1, max_size=3
)
SOURCES = st.lists(PARTS, min_size=1, max_size=9)


def documents(source):
    """Every token is told apart by its document: 0 … 89 of document 0, 100 … 189 of 1."""
    found = []
    for i, parts in enumerate(source):
        ids = itertools.count(100 * i)
        parts = [([next(ids) for _ in range(n)], ratio) for n, ratio in parts]
        rows = [Region(tokens, ratio) if ratio else Text(tokens) for tokens, ratio in parts]
        found.append([Text([next(ids)]), *rows])
    return found


def batches(source, micro=1, ahead=4):
    kept = documents(source)
    made = examples(kept, lambda parts, _: lay_out(parts, CONFIG), seed=3)
    return iter(Packed(made, CONFIG, SHAPE, micro, ahead))


def unpacked(batch):
    """(decoder tokens, what each memory position's slot stands for) of every document."""
    found, windows = [], batch.windows
    for b in range(len(batch.tokens)):
        for number in range(batch.segments[b].max() + 1):
            (at,) = np.nonzero(batch.segments[b] == number)
            assert np.array_equal(at, np.arange(at[0], at[0] + len(at)))  # in one piece
            blocks = []
            for slot in batch.slot[b, at]:
                if slot >= 0:
                    window, place = divmod(int(slot), CONFIG.slots)
                    ratio = windows.ratio[window]
                    first = place * ratio
                    block = windows.tokens[window, first : windows.own[window]][:ratio]
                    blocks.append(tuple(block.tolist()))
            found.append((tuple(batch.tokens[b, at].tolist()), tuple(blocks)))
    return found


def expected(parts):
    row, blocks = lay_out(parts, CONFIG), []
    for part in parts:
        if isinstance(part, Region):
            ratio, ids = part.ratio, list(part.tokens)
            blocks += [tuple(ids[i : i + ratio]) for i in range(0, len(ids), ratio)]
    return tuple(row.tokens.tolist()), tuple(blocks)


@settings(max_examples=25)
@given(SOURCES)
def test_every_document_comes_whole_and_equally_often(source):
    stream, seen = batches(source), []
    for _ in range(3):
        batch = jax.tree.map(lambda leaf: leaf[0], next(stream))
        assert batch.tokens.shape == (2, 64) and batch.windows.tokens.shape == (6, 16)
        seen += unpacked(batch)
    wanted = [expected(parts) for parts in documents(source)]
    assert set(seen) <= set(wanted)
    epochs = len(seen) // len(source)
    counts = [seen.count(each) for each in wanted]
    # Up to `ahead` documents wait their turn, of two epochs at most where a source is short.
    waiting = -(-4 // len(source)) + 1
    assert max(counts) <= epochs + waiting and min(counts) >= epochs - waiting


@settings(max_examples=20)
@given(SOURCES, st.integers(0, 3), st.integers(1, 2))
def test_a_stream_goes_on_exactly_where_its_state_was_taken(source, before, micro):
    stream = batches(source, micro)
    for _ in range(before):
        next(stream)
    state, again = stream.get_state(), batches(source, micro)
    next(again)  # somewhere else
    again.set_state(state)
    for _ in range(2):
        assert again.get_state() == stream.get_state()
        for a, b in zip(*(jax.tree.leaves(next(each)) for each in (stream, again)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_full_stream_wastes_little():
    source = [[(9 + n % 17, None), (n % 15, 8 if n % 3 == 0 else None)] for n in range(40)]
    stream = batches(source, ahead=16)
    filled = np.mean([(next(stream).segments >= 0).mean() for _ in range(10)])
    assert filled > 0.85


@pytest.mark.parametrize(
    ("parts", "message"),
    [([(70, None)], "takes 71 positions and 0 windows; a row has 64"),
     ([(97, 8)], "takes 16 positions and 7 windows; a row has 64 and a batch 6")],
)  # fmt: skip
def test_a_document_that_never_fits_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        next(batches([parts]))


def test_impossible_settings():
    with pytest.raises(ValueError, match="source is empty"):
        batches([])
    with pytest.raises(ValueError, match="micro is 0"):
        batches([[(1, None)]], micro=0)


@given(st.integers(0, 200), st.integers(0, 99))
def test_continual_spans_alternate_and_keep_the_text(length, seed):
    ids = np.arange(length)
    parts = soft.continual(ids, np.random.default_rng(seed), 4, (3, 9))
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts] or [[]]), ids)
    kinds = [type(part) for part in parts]
    assert all(a is not b for a, b in itertools.pairwise(kinds))
    assert all(3 <= len(part.tokens) <= 9 for part in parts[:-1])
    assert all(part.trained for part in parts if isinstance(part, Text))


def test_a_reconstruction_asks_in_many_ways_and_trains_on_the_copy_alone():
    phrasings = [[100 + i] for i in range(len(soft.PHRASINGS))]
    assert len(set(soft.PHRASINGS)) == len(soft.PHRASINGS) >= 90
    made = [soft.reconstruction([1, 2, 3], np.random.default_rng(i), 8, phrasings, end=9)
            for i in range(60)]  # fmt: skip
    region, asked, copy = made[0]
    assert region == Region([1, 2, 3], 8) and copy == Text([1, 2, 3, 9], True)
    assert not asked.trained
    assert len({parts[1].tokens[0] for parts in made}) > 30


def test_raw_text_has_the_same_loss_and_no_region():
    parts = soft.answer([1, 2], [3], [4], 4)
    assert soft.raw(parts) == [Text([1, 2], False), Text([3], False), Text([4])]
    drawn = {soft.draw_ratio((4, 8, 16), np.random.default_rng(i)) for i in range(40)}
    assert drawn == {4, 8, 16}
