"""What a trained arm kept of held-out text: loss, copies, numbers found, EXPAND.

Replies are scored against the model's own argmax at each of their positions: all right there is
exactly what greedy decoding would have written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from ml_collections import ConfigDict

from experiments.lclm.examples import RAW, Asked, Maker
from experiments.statistics import mean_interval, share_interval
from kvjax.data import soft
from kvjax.data.soft import Parts
from kvjax.models.decoder import unembed
from kvjax.soft import LCLM, Batch, Row, Shape, Text, collate, hidden, lay_out, targets
from kvjax.soft.expand import Reply
from kvjax.soft.layout import IGNORE


def evaluate(
    config: ConfigDict, model: LCLM, maker: Maker, held_out: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Scores by ratio ("4", "8", …), each an interval {mean, low, high}, and of raw text ("raw").

    Document i and question i are the same for every ratio and every arm.
    """
    exam = _Exam(config, model, maker, held_out)
    return {"raw": exam.raw()} | {str(ratio): exam.at(ratio) for ratio in config.ratios}


class _Exam:
    def __init__(
        self, config: ConfigDict, model: LCLM, maker: Maker, held_out: Sequence[np.ndarray]
    ) -> None:
        self.maker, self.size = maker, config.evaluate
        order = np.random.default_rng(config.seed).permutation(len(held_out))
        self.pieces = [held_out[i] for i in order]
        self.score = functools.partial(score, model, batch=config.evaluate.batch)

    def at(self, ratio: int) -> dict[str, Any]:
        """Everything that is asked of one ratio."""
        texts = self._made("continual", self.size.documents, ratio)
        copies = self._scored(self._made("reconstruction", self.size.documents, ratio))
        return {
            "loss": _loss(self._scored(texts)),
            "loss_without": _loss(self._scored([_without(parts) for parts in texts])),
            "copied_tokens": _mean(copies[:, 2] / copies[:, 1]),
            "copied_documents": _share(copies),
            "needle": _share(self._scored(self._made("needle", self.size.questions, ratio))),
            "expand": self._expand(ratio),
        }

    def raw(self) -> dict[str, Any]:
        """The same model reading the same text uncompressed."""
        texts = [soft.raw(parts) for parts in self._made("continual", self.size.documents, None)]
        needles = self._made("raw_needle", self.size.questions, None)
        chunks = [self.maker.turn(q, None, Reply((), q.answer), RAW) for q in self._asked()]
        return {
            "loss": _loss(self._scored(texts)),
            "needle": _share(self._scored(needles)),
            "chunks": _share(self._scored(chunks)),
        }

    def _expand(self, ratio: int) -> dict[str, Any]:
        """EXPAND with the oracle's chunk and with the model's own: the reply, of those that expand
        one chunk, that the model finds likeliest."""
        asked, maker, count = self._asked(), self.maker, self.maker.data.chunks
        replies = [maker.turn(q, None, Reply((i,), None), ratio)
                   for q in asked for i in range(1, count + 1)]  # fmt: skip
        chosen = self._scored(replies)[:, 0].reshape(-1, count).argmin(1) + 1
        needed = np.array([q.needed for q in asked])

        def answered(expanded: np.ndarray) -> np.ndarray:
            told = [maker.turn(q, int(i), Reply((), q.answer), ratio)
                    for q, i in zip(asked, expanded, strict=True)]  # fmt: skip
            return self._scored(told)

        return {
            "oracle": _share(answered(needed)),
            "own": _share(answered(chosen)),
            "chunk_found": share_interval(int((chosen == needed).sum()), len(asked))._asdict(),
        }

    def _asked(self) -> list[Asked]:
        count = self.maker.data.chunks
        return [self.maker.asked(self._piece(i), self._draw("chunks", i), count)
                for i in range(self.size.questions)]  # fmt: skip

    def _made(self, kind: str, count: int, ratio: int | None) -> list[Parts]:
        seed = kind.removeprefix("raw_")
        return [self.maker.parts(kind, self._piece(i), self._draw(seed, i), ratio)
                for i in range(count)]  # fmt: skip

    def _piece(self, i: int) -> np.ndarray:
        return self.pieces[i % len(self.pieces)]

    def _draw(self, kind: str, i: int) -> np.random.Generator:
        return np.random.default_rng([*kind.encode(), i])

    def _scored(self, documents: Sequence[Parts]) -> np.ndarray:
        return self.score([lay_out(parts, self.maker.config) for parts in documents])


def _without(parts: Parts) -> Parts:
    """The document as if its regions had never been: what a memory must beat."""
    return [part for part in parts if isinstance(part, Text)]


def _loss(scores: np.ndarray) -> dict[str, float]:
    """Nats a token, averaged over documents."""
    counted = scores[scores[:, 1] > 0]
    return _mean(counted[:, 0] / counted[:, 1])


def _mean(values: np.ndarray) -> dict[str, float]:
    return mean_interval(values[:, None])._asdict()


def _share(scores: np.ndarray) -> dict[str, float]:
    """The share of documents that are right in every counted position."""
    return share_interval(int((scores[:, 2] == scores[:, 1]).sum()), len(scores))._asdict()


def score(model: LCLM, rows: Sequence[Row], batch: int) -> np.ndarray:
    """For each document, alone in its row: Σ −log p, positions that count, and those right, [n,3].

    `batch` documents at a time; all of a call share one program.
    """
    length = -(-max(len(row.tokens) for row in rows) // 128) * 128  # few shapes, few programs
    windows = batch * -(-max(len(row.windows.length) for row in rows) // 4) * 4
    graph, state = nnx.split(model)
    found = []
    for at in range(0, len(rows), batch):
        packed = [[row] for row in rows[at : at + batch]]
        whole = collate(packed, model.config, Shape(batch, length, windows))
        found.append(np.asarray(_score(graph, state, whole))[: len(packed)])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)
def _score(graph: nnx.GraphDef, state: nnx.State, batch: Batch) -> Array:
    model = nnx.merge(graph, state)

    def one(row: tuple[Array, Array]) -> Array:  # so that one row's logits are there at a time
        states, wanted = row
        scores = unembed(model.decoder, states[None])[0]
        counts = wanted != IGNORE
        chosen = jnp.take_along_axis(scores, jnp.maximum(wanted, 0)[:, None], 1)[:, 0]
        lost = jnp.where(counts, jax.nn.logsumexp(scores, -1) - chosen, 0).sum()
        right = (counts & (scores.argmax(-1) == wanted)).sum()
        return jnp.stack([lost, counts.sum().astype(lost.dtype), right.astype(lost.dtype)])

    return jax.lax.map(one, (hidden(model, batch), targets(batch)))
