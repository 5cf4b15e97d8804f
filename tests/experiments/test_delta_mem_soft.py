"""Soft tokens in the delta-mem study: a compressor of random weights in place of a history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import kvjax
from experiments import points, table
from experiments.delta_mem import evaluate, model, report, rows, soft
from experiments.points import study
from kvjax import memory
from kvjax.models.decoder import embed
from kvjax.soft import SoftConfig, add_memory_rows, encode_context, new_model, prompt, save
from kvjax.soft.encoder import first_layers
from tests.experiments.test_delta_mem import (
    EPISODES,
    HIGH,
    LOW,
    TOKEN,
    WRITER,
    base,
    config_of,
    exam,
    first_logits,
    remembering,
    result_of,
    smoke,
)


def saved(decoder, folder):
    """A compressor by 8, made of a decoder, as a folder."""
    enlarged, markers = add_memory_rows(decoder)
    settings = SoftConfig(*markers, ratios=(8,), window=32)
    save(new_model(first_layers(decoder, 1), enlarged, settings), folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(base(), tmp_path_factory.mktemp("soft") / "model")


def opened(folder, taught=None):
    config = {"compressor": folder, "dtype": "float32", "arm": {"adapter": "x" if taught else ""}}
    return soft.with_memory_of(taught or base(), ConfigDict(config))


# ---- the arm -----------------------------------------------------------------------------------


def test_a_soft_token_is_in_the_message_of_its_first_token(folder):
    compressor, history = opened(folder), WRITER.history(EPISODES[0].messages)
    ids, numbers = history
    ((inputs, told),) = soft.compressed(compressor, [history], 8)
    count = -(-len(ids) // 8)
    assert inputs.shape == (count + 2, 16) and min(told) == 0
    assert told == [0, *(numbers[8 * j] for j in range(count)), len(EPISODES[0].messages) - 1]
    marks = [compressor.config.memory_start, compressor.config.memory_end]
    np.testing.assert_array_equal(inputs[np.array([0, -1])],
                                  embed(compressor.decoder, jnp.array([marks]))[0])  # fmt: skip


def test_questions_find_soft_tokens_in_place_of_the_history(folder):
    compressor = opened(folder)
    asked = exam(compressor, soft=8)
    ids, _ = WRITER.history(EPISODES[1].messages)
    held = [-(-n // 8) + 2 for n in exam().lengths]
    assert int(asked.before(1).length[0]) == held[1]
    context = encode_context(compressor, [ids])
    whole = prompt(compressor, [context[0], asked.prompts[1][0]])
    wanted = kvjax.forward(compressor.decoder, whole)[0, held[1] :]
    np.testing.assert_allclose(first_logits(asked, 1)[0], wanted, rtol=1e-3, atol=1e-4)
    bytes_of = kvjax.footprint(compressor.decoder.cache_spec(), kvjax.cache(), 1, max(held))
    assert asked.size()["context_bytes"] == bytes_of.total < exam().size()["context_bytes"] / 4
    assert asked.lengths == exam().lengths  # how long histories are is told as of any arm


def test_a_memory_that_corrects_nothing_leaves_soft_tokens_and_replies_alone(folder):
    plain = exam(opened(folder), soft=8)
    idle = exam(opened(folder, remembering(init="zero")), soft=8)
    found = idle.before(0)
    jax.tree.map(np.testing.assert_array_equal, found.layers, plain.before(0).layers)
    assert float(jnp.abs(memory.states(found)[0].matrix).max()) > 0  # it has written all the same
    replies = plain.replies(0)
    assert idle.replies(0) == replies and all(replies)


@pytest.mark.slow
@pytest.mark.parametrize("writes", ["token", "message_mean"])
def test_a_memory_reads_and_writes_over_soft_tokens(writes, folder):
    mine = exam(opened(folder, remembering(writes=writes)), soft=8)
    plain = exam(opened(folder), soft=8)
    held = memory.states(mine.before(0))[0]
    assert held.write == (writes == "token") and float(jnp.abs(held.matrix).max()) > 0
    assert np.abs(first_logits(mine, 0) - first_logits(plain, 0)).max() > 1e-3


def test_a_compressor_of_another_model_is_refused(folder):
    other = model.made(smoke().model.tiny, 256, 0)  # a layer more
    with pytest.raises(ValueError, match=r"config\.compressor='.*made of config\.model"):
        soft.with_memory_of(other, ConfigDict({"compressor": folder, "dtype": "float32"}))


# ---- configs and reports -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "message"),
    [({"soft": -1}, r"soft=-1: use how many tokens"),
     ({"soft": True}, r"soft=True: use how many tokens"),
     ({"soft": 8, "context": False}, r"soft=8: there is no history to compress; set context=True"),
     ({"soft": 8, "adapter": "lora"}, r"soft=8: the compressor's decoder takes a memory alone"),
     ({"soft": 16}, r"config\.arms\.mine\.soft=16: .* compresses by 8; use that")],
)  # fmt: skip
def test_impossible_soft_tokens(arm, message, folder):
    config = config_of("compose")
    config.compressor, config.rows = folder, ("mine",)
    config.arms["mine"] = ConfigDict(arm)
    with pytest.raises(ValueError, match=message):
        study(config).validate(config)


def test_a_compressor_that_is_not_there_is_named_where_an_arm_needs_it():
    config = config_of("compose")
    config.compressor = "nowhere"
    wanted = r"config\.compressor='nowhere': .*train one by configs/lclm\.py:smollm2"
    with pytest.raises(ValueError, match=wanted):
        study(config).validate(config)
    config.rows = ("base-seen", "token-seen")
    study(config).validate(config)


def test_only_a_soft_arms_point_holds_the_compressor():
    config = config_of("compose")
    found = {p.name: p.config for p in rows.points(config)}
    for name, own in found.items():
        assert ("compressor" in own) == ("soft" in own.arm) == name.endswith("-soft"), name
    assert evaluate.described(found["facts-token-soft"].arm, "memory")["cache"] == "soft-8+exact"
    assert evaluate.described(found["facts-token-heed"].arm, "memory")["cache"] == "heed-k2v2"


def test_the_control_of_soft_tokens_reads_them_too():
    seen = {"context": True, "cache": "soft-8+exact"}
    group = [result_of("base-seen", HIGH, context=True), result_of("base-soft", LOW, **seen),
             result_of("token-soft", HIGH, **seen, **TOKEN)]  # fmt: skip
    found = report.together(group)
    assert found["facts-token-soft"]["− base"].startswith("+58.3 [")
    assert found["facts-base-soft"] == {}
    views = [report.cells(each.result)["view"] for each in group]
    assert views == ["seen", "seen, soft-8+exact", "seen, soft-8+exact"]


# ---- the real loop -----------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("base-soft",),
                                   pytest.param(("base-soft", "token-soft"),
                                                marks=pytest.mark.slow)])  # fmt: skip
def test_soft_arms_run_end_to_end(names, tmp_path):
    config = smoke()
    config.part, config.rows, config.model.tiny.layers = "arms", names, 1
    words = model.vocabulary([], model.BYTES, tmp_path / "words.json")
    decoder = model.made(config.model.tiny, words.vocab_size, config.seed)
    config.compressor = saved(decoder, tmp_path / "model")
    study(config).validate(config)
    outcomes = points.run_all(study(config).points(config), tmp_path)
    assert [o.status for o in outcomes] == ["done"] * len(names), outcomes
    found = {r.result["arm"]["name"]: r.result for r in table.load(tmp_path)}
    for name in names:
        trained, size = found[name]["trained"], found[name]["size"]
        assert (trained["steps"] == 3) if name == "token-soft" else (trained is None)
        assert size["context_bytes"] == found["base-soft"]["size"]["context_bytes"] > 0
        assert (size["state_bytes"] > 0) == (name == "token-soft")
    assert "seen, soft-8+exact" in table.markdown(table.load(tmp_path), [])
