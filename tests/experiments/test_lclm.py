"""The LCLM study on a model of a few thousand weights."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments import papers, points
from experiments.args import config_module, with_overrides
from experiments.lclm import report, training
from experiments.lclm.evaluate import score
from experiments.lclm.examples import RAW, Maker
from experiments.lclm.model import fresh, soft_config, tiny_config
from experiments.lclm.words import END, corpus, texts, vocabulary
from experiments.points import study
from experiments.table import Result
from kvjax.data import soft
from kvjax.soft import Region, add_memory_rows, lay_out, new_model
from kvjax.soft import loss as plain_loss
from kvjax.soft.encoder import first_layers
from kvjax.soft.expand import Reply
from kvjax.train import first_state, make_step, take_apart
from kvjax.train.lora import add_lora
from kvjax.train.schedule import members
from tests.experiments.conftest import ROOT

FILE = str(ROOT / "configs/lclm.py")
TEXTS = ["The sun rises in the east, and it sets in the west. 1 2 3.\n" * 40]


def smoke():
    return config_module(FILE + ":smoke")[0].get_config("smoke")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The config of an arm, its maker, model and documents."""
    (point,) = study(smoke()).points(smoke())
    words = vocabulary(TEXTS, 300, tmp_path_factory.mktemp("words") / "words.json")
    base = fresh(tiny_config(point.config.model.tiny, words.vocab_size, 1024), 0)
    decoder, markers = add_memory_rows(base)
    config = soft_config(point.config, markers)
    model = new_model(first_layers(base, 1), decoder, config)
    ids = np.asarray(words.encode(TEXTS[0]), np.int32)
    pieces = [ids[at : at + 96] for at in range(0, 480, 96)]
    return point.config, Maker(point.config.data, words, config), model, pieces


def test_a_vocabulary_is_read_again_as_it_was_made(made, tmp_path):
    words = made[1].words
    path = tmp_path / "deep" / "words.json"
    first = vocabulary(TEXTS, 300, path)
    again = vocabulary(["other text"], 300, path)
    text = "The year 1984 — naïve, of course.\n"
    assert first.encode(text) == again.encode(text) == words.encode(text)
    assert first.decode(first.encode(text)) == text
    assert first.vocab_size <= 300 and first.eos_ids == (first.backend.token_to_id(END),)
    assert len(first.encode("1984")) == 4  # a digit is a token


@pytest.mark.parametrize("kind", ["text", "continual", "reconstruction", "needle", "expand"])
def test_every_kind_of_document_fits_and_trains_on_something(made, kind):
    config, maker, _, pieces = made
    for seed in range(20):
        rng = np.random.default_rng(seed)
        row = lay_out(maker.parts(kind, pieces[seed % 5], rng, 16), maker.config)
        assert len(row.tokens) <= config.shape.length
        assert len(row.windows.length) <= config.shape.windows
        assert (row.labels[1:] >= 0).any()
        assert (row.slot >= 0).any() == (len(row.windows.length) > 0)


def test_the_answer_is_where_the_question_says(made):
    _, maker, _, pieces = made
    for seed in range(10):
        asked = maker.asked(pieces[0], np.random.default_rng(seed), 2)
        name = asked.question.removeprefix("What is the ").removesuffix("?")
        fact = f"The {name} is {asked.answer}."
        assert [fact in chunk for chunk in asked.chunks] == [asked.needed == i for i in (1, 2)]
        parts = maker.turn(asked, asked.needed, Reply((), asked.answer), 4)
        raw = maker.turn(asked, None, Reply((), asked.answer), RAW)
        assert sum(isinstance(part, Region) for part in parts) == 2
        said = maker.words.decode([i for p in parts if not isinstance(p, Region) for i in p.tokens])
        assert fact in said and said.endswith(f"ANSWER: {asked.answer}\n")
        assert not any(isinstance(part, Region) for part in raw)


def test_the_score_of_a_document_is_the_models_loss(made):
    _, maker, model, pieces = made
    rng = np.random.default_rng(0)
    rows = [lay_out(soft.continual(p, rng, 4, (9, 30)), maker.config) for p in pieces[:3]]
    found = score(model, [*rows, rows[0]], batch=2)
    assert found.shape == (4, 3)
    np.testing.assert_allclose(found[3], found[0], rtol=1e-5)
    found = found[:3]
    counted = sum(int((row.labels[1:] >= 0).sum()) for row in rows)
    assert found[:, 1].sum() == counted and (found[:, 2] <= found[:, 1]).all()
    stream = training.batches(made[0], maker, pieces, "sft", 0)
    batch = jax.tree.map(lambda leaf: leaf[0], next(stream))
    losses = jax.jit(lambda b: training.loss(64)(model, b))(batch)
    np.testing.assert_allclose(losses.total / losses.counted, plain_loss(model, batch), rtol=1e-5)


def test_a_batch_without_regions_moves_the_decoder_alone(made):
    config, maker, model, pieces = made
    plan = training.stage(config, "end_to_end", maker.config)
    frame, params = take_apart(model)
    step = make_step(frame, plan, training.loss(config.shape.chunk))
    state = first_state(jax.tree.map(jnp.copy, params), plan)
    batch = next(training.batches(config, maker, pieces, "end_to_end", 0))
    state, _ = step(state, batch)
    before = jax.tree.map(np.array, state)
    bare = batch._replace(slot=np.full_like(batch.slot, -1))
    state, _ = step(state, bare)
    assert step._cache_size() == 1
    for part in ("adapter", "encoder"):
        for a, b in zip(jax.tree.leaves(before.optimizer[part]),
                        jax.tree.leaves(state.optimizer[part]), strict=True):  # fmt: skip
            np.testing.assert_array_equal(a, b)
    moved = {n.split(".")[0] for n, w in state.params.items() if (w != before.params[n]).any()}
    assert moved == {"decoder"}


def test_the_stages_are_the_configs(made):
    config, maker, model, _ = made
    names = take_apart(model)[1]
    plans = {name: training.stage(config, name, maker.config) for name in training.STAGES}
    assert [part.name for part in plans["adapter"].parts] == ["adapter", "rows"]
    own = maker.config
    assert plans["adapter"].parts[1].rows == (own.memory_start, own.memory, own.memory_end)
    assert [part.name for part in plans["encoder"].parts] == ["adapter", "encoder"]
    assert {part.name for part in plans["sft"].parts} == {"adapter", "encoder", "decoder"}
    frozen = with_overrides(config, {"model.decoder": "frozen"})
    parts = training.stage(frozen, "sft", maker.config).parts
    assert [part.name for part in parts] == ["adapter", "encoder"]
    lora = training.stage(with_overrides(config, {"model.decoder": "lora"}), "sft", maker.config)
    grown = add_lora(names, training.LORA, 2)
    assert len(members(lora, grown)["decoder"]) == 2 * 7


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": ("n5",)}, r"config\.rows: no 'n5' among the arms; choose mixed"),
     ({"arms.n4.ratios": (3,)}, r"config\.model\.window=64: use a multiple of the ratio 3"),
     ({"arms.n4.ratios": ()}, r"config\.arms\.n4\.ratios=\(\): give at least one"),
     ({"shape.micro": 0}, r"config\.shape\.micro=0: use 1 or more"),
     ({"dtype": "int8"}, r"config\.dtype='int8'"),
     ({"model.decoder": "half"}, r"config\.model\.decoder='half'"),
     ({"data.spans": (9, 3)}, r"config\.data\.spans=\(9, 3\)"),
     ({"data.mixtures.sft.needle": -0.1}, r"config\.data\.mixtures\.sft\.needle=-0\.1"),
     ({"stages.sft.warmup": 3}, r"config\.stages\.sft: steps=3, warmup=3"),
     ({"stages.sft.rates.decoder": 0.0}, r"config\.stages\.sft\.rates\.decoder=0\.0"),
     ({"evaluate.questions": 1}, r"config\.evaluate\.questions=1: use 2 or more")],
)  # fmt: skip
def test_impossible_configs(change, message):
    config = with_overrides(smoke(), change)
    with pytest.raises(ValueError, match=message):
        study(config).validate(config)


def test_an_arm_differs_by_what_its_row_says():
    config = config_module(FILE)[0].get_config("")
    found = {point.name: point.config for point in study(config).points(config)}
    assert list(found) == ["mixed", "n16", "n4", "n4-no-reconstruction", "n8"]
    assert tuple(found["mixed"].ratios) == (4, 8, 16) and found["n8"].reconstruction
    assert not found["n4-no-reconstruction"].reconstruction
    a, b = (json.loads(found[n].to_json_best_effort()) for n in ("n4", "n8"))
    assert a.pop("ratios") != b.pop("ratios") and a == b


def result_of(name, *ratios):
    score = {"mean": 0.5, "low": 0.25, "high": 0.75}
    ratio = {"loss": score, "loss_without": score, "copied_tokens": score, "needle": score,
             "copied_documents": score,
             "expand": dict.fromkeys(("oracle", "own", "chunk_found"), score)}  # fmt: skip
    return Result(name, {"experiment": "lclm"}, {"commit": "c", "command": "x"}, {
        "arm": {"ratios": list(ratios), "reconstruction": True},
        "scale": {"model": "made here", "decoder": "full", "weights": {"adapter": 10},
                  "vocabulary": 300, "window": 64, "steps": {"sft": 3}, "positions": 9,
                  "documents": 4, "questions": 4},
        "quality": {"raw": {"loss": score, "needle": score, "chunks": score}}
        | {str(n): copy.deepcopy(ratio) for n in ratios},
    })  # fmt: skip


def test_a_result_reads_as_a_row_a_picture_and_beside_the_papers_numbers():
    group = [result_of("n4", 4), result_of("mixed", 4, 8)]
    cells = report.cells(group[0].result)
    assert cells["needle, %"] == "50.0 [25.0, 75.0]" and cells["loss"] == "0.500 [0.250, 0.750]"
    assert report.cells(group[1].result)["loss"].startswith("4: 0.500")
    assert report.order(group[0].result) < report.order(group[1].result)
    assert report.difference(group[0].result, group[1].result, "x") == {"loss at 4 − x's": "0.0000"}
    assert len(report.draw("s", group).axes) == 4
    text = papers.markdown(papers.read("lclm"), report.measured(group))
    assert "LCLM, mixed, 8x" in text and "75.06" in text and "second-hand" in text


@pytest.mark.slow
def test_a_point_trains_resumes_and_answers(tmp_path):
    (point,) = points.study(smoke()).points(smoke())
    (outcome,) = points.run_all([point], tmp_path)
    assert outcome.status == "done", outcome.error
    folder = tmp_path / "points" / "mixed"
    found = json.loads((folder / "result.json").read_text())
    assert set(found["quality"]) == {"raw", "4", "16"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(12)) and not (folder / "checkpoints").exists()
    assert points.run_all([point], tmp_path)[0].status == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["tiny", "smollm2"])
def test_documents_of_the_committed_arms_fit_with_room_to_spare(variant, tmp_path):
    config = study(whole := config_module(FILE)[0].get_config(variant)).points(whole)[0].config
    sides = texts(config)
    words = kvjax.load(config.model.name)[1] if config.model.name else vocabulary(
        sides[0], config.model.tiny.vocabulary, tmp_path / "words.json"
    )  # fmt: skip
    size, rng = words.vocab_size, np.random.default_rng(0)
    maker = Maker(config.data, words, soft_config(config, (size, size + 1, size + 2)))
    pieces = corpus(config, sides, words).train
    kinds = {kind for mixture in config.data.mixtures.values() for kind in mixture}
    for kind in sorted(kinds):
        made = [lay_out(maker.parts(kind, pieces[i], rng, 4), maker.config)
                for i in rng.integers(len(pieces), size=300)]  # fmt: skip
        assert max(len(row.tokens) for row in made) <= 0.97 * config.shape.length, kind
        assert max(len(row.windows.length) for row in made) <= config.shape.windows
