"""The delta-mem study on a model of a few thousand weights."""

import copy
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import kvjax
from experiments import papers, points, table
from experiments.args import config_module, with_overrides
from experiments.delta_mem import evaluate, examples, model, mqar, objective, report, rows, training
from experiments.delta_mem.objective import Objective
from experiments.delta_mem.recall import Recall
from experiments.points import study
from experiments.table import Result
from experiments.transforms import resolve
from kvjax import memory
from kvjax.memory import DeltaMemConfig
from kvjax.models.decoder import step_hidden, unembed
from kvjax.soft.layout import IGNORE
from kvjax.train import first_state, make_step, take_apart
from tests.experiments.conftest import ROOT, byte_tokenizer

FILE = str(ROOT / "configs/delta_mem.py")
SIZES = {"history": 128, "questions": 2, "question": 64, "answer": 16}


def config_of(variant):
    return config_module(f"{FILE}:{variant}")[0].get_config(variant)


def smoke():
    return config_of("smoke")


WRITER = examples.Writer(byte_tokenizer())
EPISODES = Recall(turns=1, facts=2).episodes(3, 0)


@functools.cache
def base():
    tiny = smoke().model.tiny
    tiny.layers = 1
    return model.made(tiny, 256, 0)


@functools.cache
def remembering(**settings):
    """The tiny model with a memory that changes what it says."""
    return memory.attach(base(), DeltaMemConfig(gain=2.0, **settings), seed=1)


@functools.cache
def batch():
    maker = examples.Maker(WRITER, ConfigDict(SIZES))
    made = [maker(e, np.random.default_rng(i)) for i, e in enumerate(EPISODES[:2])]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


# ---- examples ----------------------------------------------------------------------------------


def test_an_example_asks_for_the_answer_behind_the_question():
    made = batch()
    for i, episode in enumerate(EPISODES[:2]):
        ids, numbers = WRITER.history(episode.messages)
        assert made.history[i].tolist() == ids + [0] * (128 - len(ids))
        assert WRITER.words.decode(ids) == "".join(f"{m}\n" for m in episode.messages)
        assert numbers[-1] == len(episode.messages) - 1
        said = set()
        for q in range(2):
            wanted = [int(x) for x in made.wanted[i, q] if x != IGNORE]
            places = made.at[i, q, : len(wanted)]
            assert [*made.asked[i, q][places[1:]], wanted[-1]] == wanted  # each follows its place
            assert made.length[i, q] == places[-1] + 2
            assert made.asked[i, q, places[-1] + 1] == wanted[-1]
            text = WRITER.words.decode(made.asked[i, q, : places[0] + 1])
            said.add((text, WRITER.words.decode(wanted)))
        assert said == {(f"Question: {q.text}\nAnswer:", f" {q.answers[0]}\n")
                        for q in episode.questions}  # fmt: skip


def test_a_history_that_is_too_long_keeps_its_end():
    maker = examples.Maker(WRITER, ConfigDict(SIZES | {"history": 20}))
    made = maker(EPISODES[0], np.random.default_rng(0))
    ids, numbers = WRITER.history(EPISODES[0].messages)
    assert made.history.tolist() == ids[-20:] and made.messages.tolist() == numbers[-20:]


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_holds_the_history_and_behind_it_the_questions(count):
    made = batch()
    ends = np.asarray(objective.question_ends(made, count))
    tokens, messages = objective.joined(made, ends)
    assert tokens.shape == messages.shape == (2, 128 + 64 * count)
    for i, n in enumerate((made.messages >= 0).sum(1)):
        np.testing.assert_array_equal(tokens[i, :n], made.history[i, :n])
        told = [made.asked[i, q, : made.length[i, q]] for q in range(count)]
        np.testing.assert_array_equal(tokens[i, n : ends[i, -1]], np.concatenate(told))
        assert ends[i].tolist() == (n + np.cumsum(made.length[i, :count])).tolist()
        assert (messages[i, n:] == -1).all() and (messages[i, :n] >= 0).all()


def test_a_question_that_does_not_fit_is_refused_before_training():
    sizes = ConfigDict(SIZES | {"question": 20})
    with pytest.raises(ValueError, match=r"config\.training\.question=20: the longest takes \d+"):
        examples.Maker(WRITER, sizes).check(EPISODES)


def test_training_and_held_out_episodes_differ_and_come_again(tmp_path):
    labels = {"recall": {"name": "recall"}, "facts": {"name": "facts"}}
    training = ConfigDict({"benchmarks": labels, "episodes": 5, "file": ""})
    seen = examples.training_episodes(training, 0)
    assert seen == examples.training_episodes(training, 0) and len(seen) == 5
    held = examples.held_out(ConfigDict({"name": "recall"}), 3, 0)
    assert not {e.messages for e in held} & {e.messages for e in seen}
    training.file = str(tmp_path / "episodes.jsonl")
    line = {"messages": ["a", "b"], "questions": [{"text": "c?", "answers": ["d"]}]}
    (tmp_path / "episodes.jsonl").write_text(json.dumps(line) + "\n{}\n")
    with pytest.raises(ValueError, match=r"episodes\.jsonl, line 2: KeyError: 'questions'"):
        examples.training_episodes(training, 0)
    (tmp_path / "episodes.jsonl").write_text(json.dumps(line) + "\n")
    (read,) = examples.training_episodes(training, 0)
    assert read.messages == ("a", "b") and read.questions[0].answers == ("d",)


def test_turns_after_a_fact_say_nothing_of_it():
    for episode in Recall(turns=30, facts=3).episodes(5, 1):
        told, later = episode.messages[:3], " ".join(episode.messages[3:])
        assert len(episode.messages) == 33
        for question, fact in zip(episode.questions, told, strict=True):
            person, (answer,) = fact.split("'")[0], question.answers
            assert fact == f"{person}'s favorite color is {answer}." and person in question.text
            assert person not in later and answer not in later.lower().split()
            assert Recall().score(question, f"{answer.upper()}.") == 1
            assert Recall().score(question, f"not {answer}") == 0


# ---- the objective -----------------------------------------------------------------------------


def answer_loss(taught, states, example, history=None):
    """−log p of each answer token through a cache: from the states, each question alone; or with
    the history in view, one behind the other."""
    lost, seen = [], history
    for q, size in enumerate(example.length):
        empty = kvjax.init_cache(taught, kvjax.cache(), 1, 64)
        cache = seen or memory.with_states(empty, states)
        hidden, after = step_hidden(taught, jnp.asarray(example.asked[q][None, :size]), cache)
        seen = seen and after
        scores = jax.nn.log_softmax(unembed(taught, hidden)[0])
        counts = example.wanted[q] != IGNORE
        lost += [-scores[p, w] for p, w in zip(example.at[q][counts], example.wanted[q][counts],
                                               strict=True)]  # fmt: skip
    return lost


@pytest.mark.slow
@pytest.mark.parametrize("writes", ["token", "message_mean"])
def test_the_loss_is_that_of_the_state_alone_and_of_the_history_in_view(writes):
    taught, made = remembering(writes=writes), batch()
    blind, seen = [], []
    for i in range(2):
        example = jax.tree.map(lambda x, i=i: x[i], made)
        count = int((example.messages >= 0).sum())
        cache = evaluate.inject(taught, example.history[:count], example.messages[:count],
                                kvjax.cache(), 128, 256)  # fmt: skip
        held = memory.states(cache)
        blind += answer_loss(taught, memory.writing(held, False), example)
        if writes == "token":
            on = memory.with_states(cache, memory.writing(held, True))
            seen += answer_loss(taught, held, example, on)
    how = Objective(context=0.25, seen=3, weight=0.0)  # there are two

    @jax.jit
    def run(made):
        return objective.from_state(taught, made, how).loss, objective.loss(how)(taught, made)

    found, mixed = run(made)
    np.testing.assert_allclose(found, np.mean(blind), rtol=1e-4)
    assert mixed.counted == len(blind)
    if seen:
        mean = 0.75 * np.mean(blind) + 0.25 * np.mean(seen)
        np.testing.assert_allclose(mixed.total / mixed.counted, mean, rtol=1e-4)


@pytest.mark.parametrize("gates", ["read", pytest.param("write", marks=pytest.mark.slow)])
def test_gates_are_pulled_to_their_target(gates):
    taught, made = remembering(), batch()
    free, pull = (Objective(gates=gates, weight=weight, target=0.5) for weight in (0.0, 2.0))

    @jax.jit
    def run(made):
        both = (objective.loss(how)(taught, made).total for how in (free, pull))
        return *both, objective.from_state(taught, made, free).gates

    without, total, means = run(made)
    assert means.shape == (1,) and 0 < float(means[0]) < 1
    per_token = (total - without) / (made.wanted != IGNORE).sum()
    np.testing.assert_allclose(per_token, 2 * (means[0] - 0.5) ** 2, rtol=1e-3)


def test_the_state_carries_the_gradient_and_training_lowers_the_loss():
    frame, params = take_apart(remembering())
    own = {**config_of("smollm2").training, "lessons": {}, "steps": 30, "warmup": 2, "rate": 2e-2}
    config = ConfigDict({"adapter": {"memory": {}}, "training": own})
    (plan,) = training.stages(config)
    step = make_step(frame, plan, objective.loss(Objective()))
    state = first_state(jax.tree.map(jnp.copy, params), plan)
    one = jax.tree.map(lambda leaf: leaf[None], batch())
    losses = []
    for _ in range(30):
        state, told = step(state, one)
        losses.append(float(told.loss))
    assert losses[-1] < 0.8 * losses[0]
    for name, weight in state.params.items():
        moved = bool((weight != params[name]).any())
        assert moved == (".beside." in name), name  # every weight of the memory, and no other


# ---- evaluation --------------------------------------------------------------------------------


def exam(taught=None, **arm):
    settings = ConfigDict({"name": "x", "budget": 64, **rows.ARM, **arm})
    settings.cache = resolve(ConfigDict(settings.cache))
    config = ConfigDict({"arm": settings, "budget": 64,
                         "evaluate": {"batch": 2, "new": 5, "history": 200}})  # fmt: skip
    return evaluate.Exam(config, taught or base(), WRITER, EPISODES)


def first_logits(asked, index):
    """What the first question of an episode finds, as logits."""
    prompt = jnp.asarray([asked.prompts[index][0]])
    return np.asarray(kvjax.step(asked.model, prompt, asked.before(index))[0])


def test_a_zeroed_state_is_the_frozen_model_to_the_last_bit():
    plain, mine = exam(context=False), exam(remembering(), context=False)
    zero = exam(remembering(), context=False, state="zero")
    np.testing.assert_array_equal(first_logits(zero, 0), first_logits(plain, 0))
    assert zero.replies(0) == plain.replies(0)
    assert np.abs(first_logits(mine, 0) - first_logits(plain, 0)).max() > 1e-3
    other = exam(remembering(), context=False, state="shuffled")
    found, wanted = (memory.states(each)[0].matrix for each in (other.before(0), mine.before(1)))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found - memory.states(mine.before(0))[0].matrix).max() > 1e-3


def test_a_history_is_injected_once_and_answers_as_one_prompt_would():
    asked = exam()
    replies = asked.replies(0)
    assert replies == asked.replies(0)
    whole = np.array([[*asked.histories[0][0], *asked.prompts[0][0]]])
    said = kvjax.generate(base(), whole, max_new_tokens=5, stop=WRITER.stops)
    assert WRITER.reply(said[0]) == replies[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "streaming", "kvarn", "heed"])
def test_a_memory_composes_with_a_cache_by_one_line(name):
    cache = config_of("compose").arms[f"base-{name}"].cache.to_dict()
    if name in ("window", "streaming"):
        cache["select"]["recent"] = 32
    mine, plain = exam(remembering(), cache=cache), exam(cache=cache)
    held = memory.states(mine.before(0))[0]
    assert held.write and float(jnp.abs(held.matrix).max()) > 0
    assert np.abs(first_logits(mine, 0) - first_logits(plain, 0)).max() > 1e-3
    assert len(mine.replies(0)) == 2
    assert np.abs(first_logits(plain, 0) - first_logits(exam(), 0)).max() > 1e-4  # it is lossy
    assert plain.size()["context_bytes"] < exam().size()["context_bytes"]


def test_bytes_of_what_stays():
    whole = exam().size()
    window = exam(cache={"select": {"name": "streaming", "recent": 16}}).size()
    assert whole["context_bytes"] > window["context_bytes"] > 0 == whole["state_bytes"]
    alone = exam(remembering(), context=False).size()
    assert alone == {"context_bytes": 0, "state_bytes": 1 * 8 * 8 * 4}


def test_a_history_over_the_limit_is_refused():
    asked = exam()
    asked.how.history = 10
    with pytest.raises(ValueError, match=r"config\.evaluate\.history=10: a history takes \d+"):
        asked._check()


def test_bm25_brings_what_fits_in_its_own_order():
    pytest.importorskip("bm25s")
    told = ["Anna likes red tea.", "The train was late.", "Boris plays chess.", "Anna went home."]
    found = evaluate.retrieved(told, [5, 5, 5, 5], "Who plays chess?", 5)
    assert found == [2]
    assert evaluate.retrieved(told, [5, 5, 5, 5], "What tea does Anna like?", 10) == [0, 3]
    assert evaluate.retrieved(told, [5, 50, 5, 5], "late train?", 15) == [0, 2, 3]
    asked = exam(context=False, retrieve=True)
    lines = [WRITER.ids(f"{m}\n") for m in EPISODES[0].messages]
    for prompt, question in zip(asked.prompts[0], EPISODES[0].questions, strict=True):
        bare = WRITER.question(question)
        assert prompt[-len(bare) :] == bare and len(prompt) - len(bare) <= 64
        assert prompt[: -len(bare)] in [[i for line in some for i in line] for some in
                                        (lines[:1], lines[1:2], lines[2:], lines[:2])]  # fmt: skip


# ---- the store ---------------------------------------------------------------------------------


def test_a_store_learns_to_recall_and_to_overwrite(tmp_path):
    config = smoke()
    config.mqar.update({"steps": 60, "batch": 16, "rate": 3e-2, "embed": 8})
    config.cell = ConfigDict({"rank": 4, "mode": "no_lambda"})
    task = mqar.MQAR(2, 1, 8, 4)
    with mqar.Metrics(tmp_path) as metrics:
        store = mqar.train(config, task, metrics, 0)
    found = mqar.recalled(store, task.draw(64, 0))
    assert found["low"] > 0.5 > found["old"]  # by chance 0.25


# ---- configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": ("tokens",)}, r"config\.rows: no 'tokens' there; choose among"),
     ({"asked": ("squad",)}, r"config\.asked: no 'squad' there"),
     ({"dtype": "int8"}, r"config\.dtype='int8'"),
     ({"budget": 0}, r"config\.budget=0: use 1 or more"),
     ({"benchmarks.facts.facts": 0}, r"config\.benchmarks\.facts: facts: 0; choose 1 to"),
     ({"adapters.token.memory": ConfigDict({"rank": 0})}, r"config\.adapters\.token: memory\.rank"),
     ({"adapters.token.memory": ConfigDict({"size": 8})}, r"adapters\.token: memory: .*size"),
     ({"adapters.lora.lora.rank": 0}, r"config\.adapters\.lora\.lora: give a rank of 1"),
     ({"adapters.blind.training.context": 1.0}, r"adapters\.blind: training\.gates='read'"),
     ({"training.context": 1.5}, r"config\.adapters\.\w+: training\.context=1\.5: use 0 to 1"),
     ({"adapters.message.training.context": 0.5}, r"message: training\.context=0\.5: message_mean"),
     ({"training.warmup": 120}, r"training\.steps=120, warmup=120"),
     ({"training.lessons": ("two",)}, r"config\.training\.lessons: no 'two' there"),
     ({"adapters.lora.training": ConfigDict({"lessons": ("two",)})},
      r"config\.adapters\.lora\.training\.lessons: no 'two' there"),
     ({"lessons.one.steps": 0}, r"config\.adapters\.\w+: training\.steps=0"),
     ({"lessons.one": ConfigDict({"context": 0.0}), "training.lessons": ()},
      r"config\.lessons\.one: no 'context' there; choose among benchmarks"),
     ({"training.seen": 0}, r"training\.seen=0: use 1 or more"),
     ({"arms.base.state": "zero"}, r"unknown|config\.arms\.base"),
     ({"arms.token.context": True, "arms.token.adapter": "none"},
      r"config\.arms\.token\.adapter: no 'none' there"),
     ({"arms.base-bm25.context": True}, r"config\.arms\.base-bm25\.retrieve: instead of"),
     ({"arms.token-zero.state": "none"}, r"config\.arms\.token-zero\.state='none': choose one"),
     ({"mqar.cells.r4-n1.rank": 0}, r"config\.mqar\.cells\.r4-n1: memory\.rank"),
     ({"mqar.steps": 0}, r"config\.mqar\.steps=0: use 2 or more")],
)  # fmt: skip
def test_impossible_configs(change, message):
    with pytest.raises(ValueError, match=message):
        config = with_overrides(config_of("smollm2"), change)
        study(config).validate(config)


def test_a_point_holds_what_defines_it_and_no_more():
    config = config_of("smollm2")
    found = {p.name: p.config for p in study(config).points(config)}
    assert len(found) == len(config.rows) * 5
    assert not found["facts-base"].training and not found["facts-base"].adapter
    other = with_overrides(config, {"training.clip": 2.0, "adapters.token.memory": ConfigDict(
        {"rank": 4})})  # fmt: skip
    again = {p.name: p.config for p in study(other).points(other)}
    changed = {name for name in found if points.plain(found[name]) != points.plain(again[name])}
    assert changed == {name for name in found if found[name].arm.adapter}
    keys = {training._key(found[f"{label}-token{end}"]) for label in config.asked
            for end in ("", "-zero", "-seen")}  # fmt: skip
    assert len(keys) == 1 and training._key(again["facts-token"]) not in keys
    ceiling = config_of("ceiling")
    recall = {p.name: p.config for p in study(ceiling).points(ceiling)}
    assert training._key(recall["recall-300-token-zero"]) in keys  # the same adapter, not another
    assert {name for name in recall if name.startswith("mqar-")} >= {"mqar-r4-n1", "mqar-r16-n4"}


def test_a_training_is_its_lessons_in_their_order_and_then_itself():
    config = with_overrides(config_of("smollm2"), {"training.lessons": ("short", "one")})
    (point,) = [p for p in study(config).points(config) if p.name == "facts-token"]
    parts = rows.lessons(point.config.training)
    assert [(name, part.steps, part.history) for name, part in parts.items()] == [
        ("1-short", 60, 80), ("2-one", 30, 16), ("adapter", 120, 384)]  # fmt: skip
    assert [*parts["2-one"].benchmarks] == ["recall-one"]
    assert "facts" in parts["adapter"].benchmarks
    plans = training.stages(point.config)
    assert [(plan.name, plan.steps) for plan in plans] == [
        (name, part.steps) for name, part in parts.items()]  # fmt: skip


def test_a_variants_training_is_its_own():
    config = config_of("variants")
    found = {p.name: p.config for p in study(config).points(config)}
    assert found["facts-blind"].training.context == 0 < found["facts-states4"].training.context
    assert training.memory_config(found["facts-rank16"].adapter.memory).rank == 16
    compose = config_of("compose")
    caches = {p.name: p.config.arm.cache for p in study(compose).points(compose)}
    assert caches["facts-token-heed"] == caches["facts-base-heed"] != caches["facts-token-seen"]


# ---- reports -----------------------------------------------------------------------------------


def result_of(name, scores, label="facts", **arm):
    settings = ({"name": "recall", "turns": int(label[7:])} if label.startswith("recall-")
                else {"name": label})  # fmt: skip
    arm = {"name": name, "adapter": "", "kind": "", "context": False, "state": "own",
           "retrieve": False, "cache": "exact"} | arm  # fmt: skip
    return Result(f"{label}-{name}", {"experiment": "delta_mem"}, {"commit": "c", "command": "x"}, {
        "part": "arms", "label": label, "arm": arm, "scores": scores,
        "scale": {"model": "tiny", "benchmark": settings, "episodes": len(scores), "questions": 2},
        "context_tokens": None,
        "quality": {"score": report.mean_interval(np.array(scores))._asdict(), "old": None,
                    "kinds": {"a": {"mean": 0.5, "n": 4}, "b": {"mean": 0.25, "n": 4}}},
        "size": {"context_bytes": 0, "state_bytes": 256},
        "trained": {"weights": 9, "episodes_seen": 8, "loss": {"first": 2.0, "last": 1.0}}
        if arm["adapter"] else None,
    })  # fmt: skip


LOW, HIGH = [[0.0, 0.5], [0.5, 0.5], [0.0, 0.0]], [[1.0, 1.0], [0.5, 1.0], [1.0, 0.5]]
TOKEN = {"adapter": "token", "kind": "memory"}


def arms_of(label):
    return [result_of("base", LOW, label), result_of("token", HIGH, label, **TOKEN),
            result_of("token-zero", LOW, label, state="zero", **TOKEN),
            result_of("lora", LOW, label, adapter="lora", kind="lora")]  # fmt: skip


def test_an_arm_stands_beside_its_controls_and_over_all_benchmarks():
    group = arms_of("facts")
    found = report.together(group)
    assert set(found["facts-token"]) == {"− base", "× base", "− zeroed", "− LoRA"}
    assert found["facts-token"]["− zeroed"].startswith("+58.3 [")
    assert found["facts-token"]["× base"].startswith("3.33 [")
    assert "− base" not in found["facts-base"]
    whole = [*group, *arms_of("finding")]
    text = table.markdown(whole, [])
    assert "**All of facts, finding, episodes pooled**" in text and "+58.3 [" in text
    assert report.summary(group) == ""
    cells = report.cells(group[1].result)
    assert cells["score, %"].startswith("83.3 [") and cells["loss"] == "2.000 to 1.000"
    assert cells["a, %"] == "50.0 (n = 4)" and cells["state bytes"] == "256"
    assert report.difference(group[1].result, group[0].result, "base")["score − base's"] == \
        found["facts-token"]["− base"]  # fmt: skip
    assert len(report.draw("s", [*group, result_of("base-seen", HIGH, context=True)]).axes) == 2


def test_recall_is_drawn_against_turns_and_a_store_against_pairs():
    group = [r for label in ("recall-10", "recall-30") for r in arms_of(label)]
    assert len({report.scale(r.result) for r in group}) == 1
    (axes,) = report.draw("s", group).axes
    lines = [bar.lines[0] for bar in axes.containers]
    assert [list(line.get_xdata()) for line in lines] == [[10, 30]] * 4
    x = {"mean": 0.5, "low": 0.25, "high": 0.75, "old": None}
    stores = [Result(f"mqar-{name}", {"experiment": "delta_mem"}, {"commit": "c", "command": "x"}, {
        "part": "mqar", "cell": {"rank": rank, "states": 1}, "recalled": {"2": x, "4": x},
        "scale": {"keys": 8, "values": 4, "overwritten": 0.5, "steps": 3, "batch": 2,
                  "sequences": 5}}) for name, rank in (("r8", 8), ("r4", 4))]  # fmt: skip
    assert sorted(stores, key=lambda r: report.order(r.result))[0].name == "mqar-r4"
    text = table.markdown(stores, [])
    assert "50.0 [25.0, 75.0]" in text and "50% written again" in text
    assert len(report.draw("s", stores).axes[0].containers) == 2


def test_the_papers_averages_are_recomputed_and_one_is_not_what_is_printed():
    published = papers.read("delta_mem")
    tables = {t["id"]: t for t in published["tables"]}
    main = tables["main"]
    numbers = {
        (r["model"], r["method"]): dict(zip(main["metrics"], r["values"], strict=True))
        for r in main["rows"]
    }
    five = ("IFEval", "HotpotQA EM", "GPQA-D", "MAB", "LoCoMo")
    off = []
    for row in tables["averages"]["rows"]:
        own, other = numbers[row["model"], row["method"]], numbers[row["model"], "base"]
        missing = [m for m in five if not own[m]]
        printed, recomputed, _ = row["values"]
        mean = sum(float(own[m] or other[m]) for m in five) / 5
        assert abs(mean - float(recomputed)) < 0.0051 and own["Avg"].rstrip("*") == printed
        assert own["Avg"].endswith("*") == bool(missing) == ("imputed" in row.get("note", ""))
        if printed != recomputed:
            off.append((row["method"], printed, recomputed))
        assert ("inconsistent" in row.get("note", "")) == (printed != recomputed)
    assert off == [("delta-mem, TSW (token)", "51.66", "51.16")]
    text = papers.markdown(published, report.measured(arms_of("facts")))
    assert "second-hand" in text and "83.3 [" in text and papers.latex(published, []).isascii()


# ---- the real loop -----------------------------------------------------------------------------


class Killed(Exception):
    pass


def mortal(made, lives):
    """Batches that end the process, as it were, after so many."""

    class Mortal:
        left = lives
        get_state, set_state = made.get_state, made.set_state

        def __next__(self):
            if not Mortal.left:
                raise Killed
            Mortal.left -= 1
            return next(made)

    return Mortal()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token", "lora"])
def test_a_killed_training_ends_where_the_uninterrupted_one_does(kind, tmp_path, monkeypatch):
    config = smoke()
    config.rows = (kind,)
    own = copy.deepcopy(study(config).points(config)[0].config)
    own.training.update({"steps": 6, "context": 0.5})
    whole = training.equip(base(), WRITER, own, tmp_path / "whole")
    batches = training.batches
    for lives in (3, 2):
        with monkeypatch.context() as patch:
            patch.setattr(training, "batches", lambda *a, n=lives: mortal(batches(*a), n))
            with pytest.raises(Killed):
                training.equip(base(), WRITER, own, tmp_path / "killed")
    again = training.equip(base(), WRITER, own, tmp_path / "killed")
    same = {k: v for k, v in whole.trained.items() if k != "seconds"}
    assert same == {k: v for k, v in again.trained.items() if k != "seconds"}
    ours, theirs = (take_apart(each.model)[1] for each in (whole, again))
    frozen = take_apart(base())[1]
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], name)
        if name in frozen:
            assert bool((value != frozen[name]).any()) == (kind == "lora" and "_proj.kernel" in name
                                                           and "self_attn" in name)  # fmt: skip
    (folder,) = (tmp_path / "killed").iterdir()
    assert not (folder / "checkpoints").exists()
    read = training.equip(base(), WRITER, own, tmp_path / "killed")  # read, not trained again
    assert read.trained == again.trained


@pytest.mark.slow
def test_the_smoke_study_runs_and_skips_what_it_has(tmp_path):
    config = smoke()
    chosen = study(config).points(config)
    outcomes = points.run_all(chosen, tmp_path)
    assert [o.status for o in outcomes] == ["done"] * 4, outcomes
    read = {p.name: json.loads((tmp_path / "points" / p.name / "result.json").read_text())
            for p in chosen}  # fmt: skip
    assert read["recall-token"]["trained"]["steps"] == 5
    assert len(list((tmp_path / "shared").glob("adapter-token-*"))) == 1
    assert set(read["mqar-r4-n1"]["recalled"]) == {"2"}
    assert {o.status for o in points.run_all(chosen, tmp_path)} == {"skipped"}
    text = table.markdown(table.load(tmp_path), [])
    assert "random weights, recall" in text and "One layer's memory" in text
