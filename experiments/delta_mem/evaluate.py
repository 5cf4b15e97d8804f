"""One arm on held-out episodes of one benchmark: inject a history once, ask all its questions.

What the questions find is made once for an episode: the cache of its history, or of the soft tokens
in place of that, or the memory's state alone, or the messages that BM25 brings. Every question then
starts from a copy. As in training, the memory goes on writing while the history is in view (token
by token, where it does), and is only read where the state is all there is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from ml_collections import ConfigDict

import kvjax
from experiments.delta_mem.examples import Writer, benchmark, held_out
from experiments.delta_mem.soft import History, compressed
from experiments.record import Metrics
from experiments.statistics import mean_interval
from experiments.transforms import build, label
from kvjax import memory
from kvjax.cache.segments import ModelCache
from kvjax.data.memory import Episode, stale
from kvjax.models.decoder import Decoder, init_beside, step_hidden, unembed
from kvjax.models.generate import decode_stretch
from kvjax.soft import LCLM

WIDTH = 32  # lengths are rounded up to this, so that few shapes are compiled


def evaluate(
    config: ConfigDict, model: Decoder | LCLM, writer: Writer, folder: Path
) -> dict[str, Any]:
    """Scores of `config.arm`, every question's own among them; replies go to `answers.jsonl`."""
    episodes = held_out(config.benchmark, config.evaluate.episodes, config.seed)
    exam = Exam(config, model, writer, episodes)
    judge, scores, old = benchmark(config.benchmark), [], []
    with Metrics(folder) as metrics, (folder / "answers.jsonl").open("w", encoding="utf-8") as file:
        for i, episode in enumerate(episodes):
            replies = exam.replies(i)
            both = list(zip(episode.questions, replies, strict=True))
            scores.append([judge.score(q, reply) for q, reply in both])
            old.append([stale(q, reply) for q, reply in both if q.old])
            metrics.write(i, {"score": float(np.mean(scores[-1]))})
            for (q, reply), score in zip(both, scores[-1], strict=True):
                row = {"episode": i, "question": q.text, "answers": q.answers, "reply": reply}
                file.write(json.dumps(row | {"kind": q.kind, "score": score}) + "\n")
    return {
        "scale": _scale(config, episodes),
        "context_tokens": _interval([[float(n)] for n in exam.lengths]),
        "quality": {"score": _interval(scores), "old": _interval([x for x in old if x]),
                    "kinds": _by_kind(episodes, scores)},
        "scores": scores,
        "size": exam.size(),
    }  # fmt: skip


def _scale(config: ConfigDict, episodes: Sequence[Episode]) -> dict[str, Any]:
    return {
        "model": config.model.name or "random weights",
        "benchmark": config.benchmark.to_dict(),
        "episodes": len(episodes),
        "questions": len(episodes[0].questions),
    }


def _interval(by_episode: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Over episodes, whose questions share a history; None where there is nothing."""
    means = np.array([[float(np.mean(values))] for values in by_episode])
    return mean_interval(means)._asdict() if len(means) else None


def _by_kind(episodes: Sequence[Episode], scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for episode, row in zip(episodes, scores, strict=True):
        for question, score in zip(episode.questions, row, strict=True):
            found.setdefault(question.kind, []).append(score)
    return {name: {"mean": float(np.mean(values)), "n": len(values)}
            for name, values in sorted(found.items())}  # fmt: skip


class Exam:
    """The histories and questions of some episodes as tokens of one shape.

    With a compressor in place of a model, the histories become soft tokens for its decoder.
    """

    def __init__(
        self, config: ConfigDict, model: Decoder | LCLM, writer: Writer, episodes: Sequence[Episode]
    ) -> None:
        self.arm, self.budget, self.how = config.arm, config.budget, config.evaluate
        self.writer, self.episodes = writer, episodes
        told = [writer.history(episode.messages) for episode in episodes]
        self.lengths = [len(ids) for ids, _ in told]
        self.model: Decoder = model.decoder if isinstance(model, LCLM) else model
        self.histories: Sequence[History] = told
        if isinstance(model, LCLM):
            self.histories = compressed(model, told, self.arm.soft)
        self.most = max(len(numbers) for _, numbers in self.histories)
        self.prompts = [self._prompts(episode) for episode in episodes]
        self.width = _rounded(self.most)
        self.asked = _rounded(max(len(p) for prompts in self.prompts for p in prompts))
        self.memory = any(block.beside is not None for block in self.model.layers)
        self.transform = build(self.arm.cache)
        self._check()

    def _check(self) -> None:
        most = max(self.lengths)
        if most > self.how.history:
            raise ValueError(f"config.evaluate.history={self.how.history}: a history takes {most} "
                             "tokens; allow more, or make the benchmark smaller")  # fmt: skip
        room, limit = self.width + self.asked + self.how.new, self.model.config.context
        if limit and room > limit:
            raise ValueError(f"the model's context is {limit} tokens, history, question and reply "
                             f"take {room}; make the benchmark smaller")  # fmt: skip

    def _prompts(self, episode: Episode) -> list[list[int]]:
        """Questions as ids, behind what BM25 finds for each where the arm asks it."""
        asked = [self.writer.question(q) for q in episode.questions]
        if not self.arm.retrieve:
            return asked
        lines = [self.writer.ids(f"{message}\n") for message in episode.messages]
        chosen = [retrieved(episode.messages, [len(line) for line in lines], q.text, self.budget)
                  for q in episode.questions]  # fmt: skip
        return [[i for line in some for i in lines[line]] + question
                for some, question in zip(chosen, asked, strict=True)]  # fmt: skip

    def replies(self, index: int) -> list[str]:
        """What the model answers to each question of an episode, greedily."""
        found, prompts, size = [], self.prompts[index], self.how.batch
        cache = self.before(index)
        for at in range(0, len(prompts), size):
            rows = prompts[at : at + size]
            filled = [*rows, *rows[-1:] * (size - len(rows))]  # one shape for the last ones too
            said = ask(self.model, cache, filled, self.asked, self.how.new, self.writer.stops)
            found += [self.writer.reply(row) for row in said[: len(rows)]]
        return found

    def before(self, index: int) -> ModelCache:
        """The cache, of one row, that an episode's questions start from."""
        if self.arm.context:
            cache = self._injected(index, self.transform)
        else:
            cache = kvjax.init_cache(self.model, self.transform, 1, self.asked + self.how.new)
        if not self.memory:
            return cache
        writes = self.arm.context and memory.memory_config(self.model).writes == "token"
        held = self._states(index, cache)
        return memory.with_states(cache, memory.writing(held, writes))

    def _states(self, index: int, cache: ModelCache) -> tuple:
        """The memories that the questions find: their own history's, another's, or empty ones."""
        if self.arm.state == "zero":
            return jax.tree.map(jnp.zeros_like, memory.states(cache))
        if self.arm.state == "own" and self.arm.context:
            return memory.states(cache)
        donor = index if self.arm.state == "own" else (index + 1) % len(self.episodes)
        return memory.states(self._injected(donor, kvjax.cache()))

    def _injected(self, index: int, transform: Any) -> ModelCache:
        history, numbers = self.histories[index]
        room = self.width + self.asked + self.how.new
        return inject(self.model, history, numbers, transform, self.width, room)

    def size(self) -> dict[str, int]:
        """Bytes that an episode leaves behind, for its longest history."""
        spec, tokens = self.model.cache_spec(), self.most if self.arm.context else 0
        tokens = min(self.budget, self.most) if self.arm.retrieve else tokens
        entries = kvjax.footprint(spec, self.transform, 1, tokens).total if tokens else 0
        states = jax.tree.leaves(init_beside(self.model, 1))
        return {"context_bytes": entries, "state_bytes": sum(leaf.nbytes for leaf in states)}


def _rounded(count: int) -> int:
    return -(-count // WIDTH) * WIDTH


def inject(
    model: Decoder, history: Sequence[int] | Array, numbers: Sequence[int], transform: Any,
    width: int, capacity: int,
) -> ModelCache:  # fmt: skip
    """The cache after a history, in one forward pass: its entries, and the memory it has written.

    Args:
      model: with or without a memory.
      history, numbers: n tokens, or inputs [n,E] such as soft tokens; and the message of each.
      transform: from `kvjax.cache`.
      width: what the tokens are padded to.
      capacity: of the cache.
    """
    told, messages = np.asarray(history), np.full((1, width), -1, np.int32)
    tokens = np.zeros((1, width, *told.shape[1:]), told.dtype)
    tokens[0, : len(told)], messages[0, : len(told)] = told, numbers
    cache = kvjax.init_cache(model, transform, 1, capacity)
    _, cache = step_hidden(model, jnp.asarray(tokens), cache, jnp.asarray(messages >= 0),
                           donate=True, messages=jnp.asarray(messages))  # fmt: skip
    return kvjax.finish(model, cache)


def ask(
    model: Decoder, cache: ModelCache, prompts: Sequence[Sequence[int]], width: int, new: int,
    stops: tuple[int, ...],
) -> np.ndarray:  # fmt: skip
    """Greedy replies [n,new] int32, −1 behind a stop: each prompt goes on from a copy of the cache.

    Args:
      model: the model.
      cache: of one row; it is not changed.
      prompts: n of them, of at most `width` tokens.
      width: what they are padded to.
      new: the most tokens of a reply.
      stops: ids that end one.
    """
    count = np.array([len(prompt) for prompt in prompts])
    tokens, real = np.zeros((len(prompts), width), np.int32), np.arange(width) < count[:, None]
    tokens[real] = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(prompts), 0), cache)
    hidden, rows = step_hidden(model, jnp.asarray(tokens), rows, jnp.asarray(real), donate=True)
    logits = _last_logits(model, hidden, count)
    graph, state = nnx.split(model)
    found, *_ = decode_stretch(
        graph, state, rows, logits, jax.random.key(0), jnp.zeros(len(prompts), bool),
        jnp.int32(new), stops=stops, steps=new,
    )  # fmt: skip
    return np.asarray(found)


def _last_logits(model: Decoder, hidden: Array, count: np.ndarray) -> Array:
    last = jnp.take_along_axis(hidden, jnp.asarray(count - 1)[:, None, None], 1)
    return unembed(model, last)[:, 0]


def retrieved(
    messages: Sequence[str], sizes: Sequence[int], question: str, budget: int
) -> list[int]:
    """The messages that BM25 finds best and that fit into `budget` tokens, in their own order."""
    try:
        import bm25s
    except ImportError as error:
        raise ValueError("BM25: bm25s is not installed; pip install 'kvjax[eval]'") from error
    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(messages), show_progress=False), show_progress=False)
    query = bm25s.tokenize([question], show_progress=False)
    ranked = index.retrieve(query, k=len(messages), show_progress=False)[0][0]
    kept: list[int] = []
    for number in map(int, ranked):
        if sizes[number] <= budget:
            kept.append(number)
            budget -= sizes[number]
    return sorted(kept)


def described(arm: ConfigDict, adapter: str) -> dict[str, Any]:
    """What a result says of its arm; `adapter`: the kind of its adapter."""
    cache = f"soft-{arm.soft}+{label(arm.cache)}" if arm.get("soft") else label(arm.cache)
    return {"name": arm.name, "adapter": arm.adapter, "kind": adapter, "context": arm.context,
            "state": arm.state, "retrieve": arm.retrieve, "cache": cache}  # fmt: skip
