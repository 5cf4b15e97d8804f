"""The compressor against the official code's outputs, and what must not depend on what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models.decoder import forward_hidden, unembed
from kvjax.soft import Region, Shape, Text, collate, lay_out, logits, loss, targets
from kvjax.soft.model import LCLM, add_memory_rows, cross_entropy, inputs, new_model
from tests.soft.conftest import model, part, parts, reference, settings, stacks

VARIANTS = {
    "mean4": settings(ratios=(4,)),
    "mean8": settings(),
    "mean16": settings(ratios=(16,)),
    "concat4": settings(ratios=(4,), pooling="concat"),
    "eos_causal": settings(pooling="eos"),
    "eos_bidir": settings(pooling="eos", causal=False),
    "mean_causal_overlap": settings(overlap=8),
    "mean_bidir": settings(causal=False),
    "mean_bidir_overlap": settings(causal=False, overlap=8),
    "mean_W_eq_N": settings(window=8),
}


def close(got, wanted, tolerance=2e-5):
    wanted = np.asarray(wanted)
    assert np.abs(np.asarray(got) - wanted).max() <= tolerance * np.abs(wanted).max()


SHAPE = Shape(2, 64, 6)  # one shape, so that tests share programs


def golden_batch(config):
    """The reference's two rows; row 0 has two regions. Also their layout as it was there."""
    layout = part(f"mean{config.ratios[0]}.")
    regions = part("region.")
    rows = []
    for b in range(2):
        real = layout["attention_mask"][b] == 1
        own = [regions[k] for k in sorted(regions) if k.startswith(f"{b}.")]
        document = parts(layout["input_ids"][b][real], layout["labels_sft"][b][real], own)
        rows.append([lay_out(document, config)])
    count = sum(len(row.windows.length) for documents in rows for row in documents)
    return collate(rows, config, Shape(2, 64, max(count, SHAPE.windows))), layout


@functools.partial(jax.jit, static_argnums=0)
def _inputs(graph, state, batch):
    return inputs(nnx.merge(graph, state), batch)


@functools.partial(jax.jit, static_argnums=0)
def _scores(graph, state, embeddings, segments):
    decoder = nnx.merge(graph, state)
    return unembed(decoder, forward_hidden(decoder, embeddings, segments=segments))


def everything(model, batch):
    """Inputs, logits and loss, in programs that configs share; `gradients` runs `loss` itself."""
    fed = _inputs(*nnx.split(model), batch)
    scores = _scores(*nnx.split(model.decoder), fed.embeddings, batch.segments)
    return fed, scores, mean_loss(scores, batch)


@jax.jit
def mean_loss(scores, batch):
    total, count = cross_entropy(scores, targets(batch))
    return total / jnp.maximum(count, 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_official_code(name):
    config, expected = VARIANTS[name], part(f"{name}.")
    batch, layout = golden_batch(config)
    real = batch.segments >= 0
    there = layout["attention_mask"] == 1
    np.testing.assert_array_equal(batch.tokens[real], layout["input_ids"][there])
    np.testing.assert_array_equal(batch.labels[real], layout["labels_sft"][there])
    fed, scores, mean = everything(model(config), batch)
    runs = memory_runs(batch)
    for key in expected:
        kind, *where = key.split(".")
        if kind in ("z", "s"):
            got = fed.latents if kind == "z" else fed.soft
            b, places = runs[tuple(map(int, where))]
            close(got[b, places], expected[key])
    if "logits" in expected:
        close(np.asarray(scores)[real][:, ::11], expected["logits"][there])
    close(mean, expected["ce_sft"])
    other = batch.labels.copy()
    other[real] = layout["labels_cpt"][there]
    close(mean_loss(scores, batch._replace(labels=other)), expected["ce_cpt"])


def memory_runs(batch):
    """(row, region) -> (row, the positions of the region's memory tokens)."""
    found = {}
    for b, slot in enumerate(batch.slot):
        places = np.flatnonzero(slot >= 0)
        cuts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        found |= {(b, i): (b, cut) for i, cut in enumerate(cuts)}
    return found


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
@functools.partial(jax.value_and_grad, argnums=1)
def _gradients(graph, state, batch, checkpoint, windows_per_pass):
    return loss(nnx.merge(graph, state), batch, checkpoint, windows_per_pass)


def gradients(model, batch, checkpoint=False, windows_per_pass=None):
    """Of the loss, under the weights' Hugging Face names, [out, in]."""
    graph, state = nnx.split(model)
    mean, found = _gradients(graph, state, batch, checkpoint, windows_per_pass)
    close(mean, everything(model, batch)[2])
    filled = nnx.merge(graph, found)
    return {f"{side}.{k}": v for side in ("encoder", "adapter", "decoder")
            for k, v in getattr(filled, side).tensors().items()}  # fmt: skip


def test_gradients_equal_the_official_code(plain):
    batch, _ = golden_batch(plain.config)
    got = gradients(plain, batch)
    tensors, header = reference()
    for name, norm in zip(header["grad_norm_names"], tensors["grad_norms"], strict=True):
        assert np.linalg.norm(got[name]) == pytest.approx(norm, rel=1e-4), name
    exact = part("grad.")
    assert len(exact) > 10
    for name, wanted in exact.items():
        close(got[name], wanted, 1e-4)


def packed_batch(config):
    expected = part("packed.")
    rows = []
    for b in range(2):
        regions = [expected[k] for k in sorted(expected) if k.startswith(f"region_ids.{b}.")]
        documents = []
        for number in range(expected["document_id"][b].max() + 1):
            here = expected["document_id"][b] == number
            ids = expected["input_ids"][b][here]
            own, regions = regions[: (ids == 107).sum()], regions[(ids == 107).sum() :]
            documents.append(lay_out(parts(ids, expected["labels"][b][here], own), config))
        rows.append(documents)
    return collate(rows, config, SHAPE), expected


def test_packed_rows_equal_separate_documents(plain):
    batch, expected = packed_batch(plain.config)
    np.testing.assert_array_equal(batch.segments, expected["document_id"])
    real = batch.segments >= 0
    np.testing.assert_array_equal(batch.tokens[real], expected["input_ids"][real])
    np.testing.assert_array_equal(batch.labels[real], expected["labels"][real])
    _, scores, mean = everything(plain, batch)
    close(np.asarray(scores)[real][:, ::11], expected["logits"][real])
    close(mean, expected["ce"])


def test_the_last_token_of_a_document_predicts_nothing(plain):
    batch, _ = packed_batch(plain.config)
    border = np.flatnonzero(np.diff(batch.segments[0]) != 0)
    assert len(border) == 2
    assert (np.asarray(targets(batch))[0, border] == -100).all()


def test_other_latents_change_neither_earlier_tokens_nor_other_documents(plain):
    batch, _ = packed_batch(plain.config)
    changed = batch.windows.tokens.copy()
    changed[1] = 5  # row 0's second region, in its first document
    other = batch._replace(windows=batch.windows._replace(tokens=changed))
    before, after = (everything(plain, b)[1] for b in (batch, other))
    differs = np.abs(np.asarray(after - before)).max(-1) > 1e-6
    first = int(memory_runs(batch)[0, 1][1][0])
    last = int(np.flatnonzero(batch.segments[0] == 0)[-1])
    assert differs[0, first : last + 1].all()
    assert not differs[0, :first].any() and not differs[0, last + 1 :].any()
    assert not differs[1].any()


def test_a_later_loss_reaches_encoder_and_adapter(plain):
    row = lay_out([Region(np.arange(2, 21)), Text([5, 6, 7], trained=False), Text([9])],
                  plain.config)  # fmt: skip
    batch = collate([[row]], plain.config, SHAPE)
    assert int((targets(batch) >= 0).sum()) == 1
    got = gradients(plain, batch)
    for name in ("encoder.model.layers.0.mlp.up_proj.weight", "adapter.fc1.weight"):
        assert np.abs(got[name]).max() > 0


def test_without_regions_encoder_and_adapter_get_exact_zeros(plain):
    row = lay_out([Text([4, 5, 6, 7])], plain.config)
    batch = collate([[row]], plain.config, SHAPE)
    got = gradients(plain, batch)
    for name, gradient in got.items():
        assert np.isfinite(gradient).all()
        assert name.startswith("decoder.") or not gradient.any(), name
    assert np.abs(got["decoder.model.norm.weight"]).max() > 0


def test_text_alone_is_the_decoder_alone(plain):
    tokens = np.array([[4, 5, 6, 7, 8]], np.int32)
    batch = collate([[lay_out([Text(tokens[0])], plain.config)]], plain.config, Shape(1, 5, 0))
    close(nnx.jit(logits)(plain, batch), kvjax.forward(plain.decoder, tokens))


def test_an_empty_region_and_one_shorter_than_a_block(plain):
    document = [Text([4]), Region([]), Text([5]), Region([7, 8, 9]), Text([6])]
    row = lay_out(document, plain.config)
    assert row.tokens.tolist() == [4, 107, 109, 5, 107, 108, 109, 6]
    alone = lay_out([Region([7, 8, 9])], plain.config)
    fed, scores, _ = everything(plain, collate([[row], [alone]], plain.config, SHAPE))
    assert np.isfinite(scores).all()
    close(fed.latents[0, 5], fed.latents[1, 1])
    states = forward_hidden(plain.encoder, jnp.array([[7, 8, 9]]))
    close(fed.latents[0, 5], states[0].mean(0))


def test_each_region_of_one_batch_may_have_its_own_ratio():
    """A model for several ratios gives each region what a model of that ratio alone gives."""
    config = settings(ratios=(4, 8, 16))
    ids = part("region.")["0.0"]
    row = lay_out([Region(ids, ratio) for ratio in (16, 4, 8)], config)
    batch = collate([[row]], config, Shape(1, len(row.tokens), 9))
    fed, runs = everything(model(config), batch)[0], memory_runs(batch)
    assert [len(runs[0, i][1]) for i in range(3)] == [5, 20, 10]
    close(fed.soft[0, runs[0, 0][1]], part("mean16.")["s.0.0"])
    close(fed.soft[0, runs[0, 2][1]], part("mean8.")["s.0.0"])


@pytest.mark.slow
def test_recomputation_and_passes_of_few_windows_change_no_gradient(plain):
    batch, _ = packed_batch(plain.config)
    wanted = gradients(plain, batch)
    got = gradients(plain, batch, checkpoint=True, windows_per_pass=2)
    for name in wanted:
        close(got[name], wanted[name], 1e-4)


@pytest.mark.parametrize("kind", ["attn_mlp", pytest.param("mlp_attn", marks=pytest.mark.slow)])
def test_an_attention_adapter_sees_its_own_region_alone(kind):
    encoder, decoder = stacks()
    config = settings(adapter=kind)
    lclm = new_model(encoder, decoder, config)
    first, second = np.arange(2, 40), np.arange(30, 60)

    def soft(regions):
        row = lay_out([Region(r) for r in regions], config)
        batch = collate([[row]], config, Shape(1, 16, 4))
        return everything(lclm, batch)[0].soft[0], memory_runs(batch)

    together, places = soft([first, second])
    alone, where = soft([second])
    close(together[places[0, 1][1]], alone[where[0, 0][1]])
    changed, _ = soft([first, np.append(second[:-1], 3)])  # the last latent's own tokens
    moved = np.abs(np.asarray(changed - together)).max(-1)
    assert moved[places[0, 1][1]].min() > 0  # earlier latents of the region see it too
    assert moved[places[0, 0][1]].max() == 0


def test_new_rows_leave_the_old_vocabulary_as_it_was():
    _, decoder = stacks()
    larger, ids = add_memory_rows(decoder)
    assert ids == (110, 111, 112)
    tokens = jnp.asarray([[4, 5, 6]])
    got = kvjax.forward(larger, tokens)
    assert got.shape[-1] == 113
    close(got[..., :110], kvjax.forward(decoder, tokens))


def test_markers_must_be_in_the_vocabulary(plain):
    with pytest.raises(ValueError, match="add_memory_rows"):
        LCLM(plain.encoder, plain.adapter, plain.decoder, settings(memory=200))
