"""EXPAND(i): a reader of compressed chunks asks for the ones it must see word for word.

A document is cut into chunks, each its own memory region under an index. The model replies with
chunks to expand or with its answer; expanded chunks come back as raw text (LCLM, arXiv 2606.09659;
there 512 tokens a chunk). What is said is a `Form`, who says it is a `Session`: the loop knows
neither the model nor the words, so a script can stand in for the model, and training examples are
made of the very same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

FIRST_TURN_LIMIT = 5  # chunks taken from a first reply that does not ask for any


@dataclass(frozen=True)
class Chunk:
    """Stands in a prompt for a compressed chunk; numbers count from 1."""

    number: int


Piece = str | Chunk


class Reply(NamedTuple):
    """What a reply asks for: chunks, or nothing and an answer."""

    expand: tuple[int, ...]
    answer: str | None


class Form(Protocol):
    """The words of a conversation about chunks."""

    def opening(
        self, count: int, question: str, expanded: Mapping[int, str], last: bool
    ) -> list[Piece]:
        """The whole prompt: all chunks, what is expanded so far, the question and the rules.
        `last`: an answer is now due."""
        ...

    def passages(self, texts: Mapping[int, str], last: bool) -> list[Piece]:
        """The next turn of a conversation that goes on: the chunks that were asked for."""
        ...

    def reply(self, reply: Reply) -> str:
        """The reply in the form's words, for training examples."""
        ...

    def parse(self, text: str) -> Reply:
        """A reply read; nothing asked for and no answer where it follows no rule."""
        ...


@dataclass(frozen=True)
class Directives:
    """A plain prompt; a reply is a line `EXPAND: 3,7` or `ANSWER: …`, of which the last counts."""

    rules: str = (
        "Chunks are compressed. Reply with one line: 'EXPAND: 3,7' to read chunks 3 and 7 word "
        "for word, or 'ANSWER: ...' with the answer."
    )
    due: str = "No more chunks can be read. Reply with one line: 'ANSWER: ...'."

    def opening(
        self, count: int, question: str, expanded: Mapping[int, str], last: bool
    ) -> list[Piece]:
        pieces: list[Piece] = []
        for i in range(1, count + 1):
            pieces += [f"Chunk {i}: ", Chunk(i), "\n"]
        rules = self.due if last else self.rules
        return [*pieces, f"{self._raw(expanded)}Question: {question}\n{rules}\n"]

    def passages(self, texts: Mapping[int, str], last: bool) -> list[Piece]:
        return [self._raw(texts) + (self.due if last else self.rules) + "\n"]

    def _raw(self, texts: Mapping[int, str]) -> str:
        return "".join(f"Passage {i}: {text}\n" for i, text in texts.items())

    def reply(self, reply: Reply) -> str:
        if reply.answer is not None:
            return f"ANSWER: {reply.answer}"
        return "EXPAND: " + ",".join(map(str, reply.expand))

    def parse(self, text: str) -> Reply:
        lines = re.findall(r"^\s*(EXPAND|ANSWER)\s*:[ \t]*(.*?)\s*$", text, re.M)
        if not lines:
            return Reply((), None)
        kind, rest = lines[-1]
        return Reply((), rest) if kind == "ANSWER" else Reply(numbers(rest), None)


_TOOL = {
    "type": "function",
    "function": {
        "name": "expand",
        "description": "Returns the text of a compressed segment word for word.",
        "parameters": {
            "type": "object",
            "properties": {"segment_id": {"type": "string", "description": "such as seg_3"}},
            "required": ["segment_id"],
        },
    },
}


@dataclass(frozen=True)
class ToolCalls:
    """The native tool calls of Qwen's chat models: `expand` with a `segment_id`; a reply without a
    call is the answer."""

    due: str = "No more segments can be read. Answer now."

    def opening(
        self, count: int, question: str, expanded: Mapping[int, str], last: bool
    ) -> list[Piece]:
        pieces: list[Piece] = [
            "# Tools\n\nYou may call functions, each call as JSON with name and arguments within "
            f"<tool_call></tool_call>.\n<tools>\n{json.dumps(_TOOL)}\n</tools>\n\n"
        ]
        for i in range(1, count + 1):
            pieces += [f"seg_{i}: ", Chunk(i), "\n"]
        end = f"\n{self.due}" if last else ""
        return [*pieces, f"{self._raw(expanded)}Question: {question}{end}"]

    def passages(self, texts: Mapping[int, str], last: bool) -> list[Piece]:
        return [self._raw(texts) + (self.due if last else "")]

    def _raw(self, texts: Mapping[int, str]) -> str:
        return "".join(
            f"<tool_response>\nseg_{i}: {text}\n</tool_response>\n" for i, text in texts.items()
        )

    def reply(self, reply: Reply) -> str:
        if reply.answer is not None:
            return reply.answer
        calls = ({"name": "expand", "arguments": {"segment_id": f"seg_{i}"}} for i in reply.expand)
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    def parse(self, text: str) -> Reply:
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)
        if not calls:
            return Reply((), text.strip() or None)
        return Reply(numbers(" ".join(map(_segment, calls))), None)


def _segment(call: str) -> str:
    """The segment that a call names; nothing where it is no such call."""
    try:
        data = json.loads(call)
        wanted = data["arguments"]["segment_id"] if data["name"] == "expand" else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    found = re.fullmatch(r"\s*seg_(\d+)\s*", wanted) if isinstance(wanted, str) else None
    return found[1] if found else ""


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers in a text, each once, in order; none of more than nine digits."""
    return tuple(dict.fromkeys(int(n) for n in re.findall(r"(?<!\d)\d{1,9}(?!\d)", text)))


# ---- the loop --------------------------------------------------------------------------------

Session = Callable[[Sequence[Piece]], str]  # says a turn to the model, returns its reply


@dataclass
class Transcript:
    """What happened: every reply, the chunks expanded in order, and the answer ("" if none)."""

    replies: list[str] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    answer: str = ""


def ask(
    open_session: Callable[[], Session],
    form: Form,
    chunks: Sequence[str],
    question: str,
    *,
    keep: bool = False,
    rounds: int = 5,
    must_expand: bool = True,
) -> Transcript:
    """Asks a question over chunks until the model answers.

    Args:
      open_session: begins a conversation; called once with `keep`, else for every turn.
      form: the words.
      chunks: the raw text of each chunk.
      question: the question.
      keep: the conversation goes on and expanded chunks are appended as turns, so the compressed
        chunks are prefilled once; False: each round is a new prompt with all that is expanded.
      rounds: the most replies that may expand; after them, or after one that names no new chunk,
        an answer is asked for.
      must_expand: a first reply that asks for no chunk is taken to ask for the chunks whose
        numbers it mentions (at most five), or for the first.

    Raises:
      ValueError: for no chunk, or no round.
    """
    if not chunks or rounds < 1:
        raise ValueError(f"{len(chunks)} chunks and {rounds} rounds; give at least one of each")
    found, session = Transcript(), None
    news: dict[int, str] = {}
    for turn in range(rounds + 1):
        last = turn == rounds or (turn > 0 and not news)
        if session is None or not keep:
            session = open_session()
            known = {i: chunks[i - 1] for i in found.expanded}
            said = form.opening(len(chunks), question, known, last)
        else:
            said = form.passages(news, last)
        text = session(said)
        found.replies.append(text)
        reply = form.parse(text)
        if turn == 0 and must_expand:
            reply = _expanding(reply, text, len(chunks))
        if reply.answer is not None or last:
            unruly = "" if reply.expand else text.strip()
            found.answer = unruly if reply.answer is None else reply.answer
            return found
        fresh = [i for i in reply.expand if 1 <= i <= len(chunks) and i not in found.expanded]
        news = {i: chunks[i - 1] for i in fresh}
        found.expanded += fresh
    return found


def _expanding(reply: Reply, text: str, count: int) -> Reply:
    """A first reply made to expand."""
    if any(1 <= i <= count for i in reply.expand):
        return reply
    mentioned = [i for i in numbers(text) if 1 <= i <= count][:FIRST_TURN_LIMIT]
    return Reply(tuple(mentioned or (1,)), None)


# ---- training examples -----------------------------------------------------------------------


class Turn(NamedTuple):
    """One turn of an example: the reader's replies are trained on, what is said to it is not."""

    pieces: Sequence[Piece]
    trained: bool


def example(
    form: Form,
    chunks: Sequence[str],
    question: str,
    needed: Sequence[int],
    answer: str,
    *,
    keep: bool = False,
) -> list[list[Turn]]:
    """Conversations that expand the chunks `needed` (from 1) and then answer.

    With `keep` one conversation of four turns; without, two of two turns, as `ask` rebuilds its
    prompt. With nothing needed, a single conversation that answers at once.

    Raises:
      ValueError: for a needed chunk that does not exist.
    """
    if any(not 1 <= i <= len(chunks) for i in needed):
        raise ValueError(f"needed is {list(needed)}; there are chunks 1 … {len(chunks)}")

    def opening(known: Mapping[int, str]) -> Turn:
        return Turn(form.opening(len(chunks), question, known, False), False)

    told = Turn([form.reply(Reply((), answer))], True)
    if not needed:
        return [[opening({}), told]]
    texts = {i: chunks[i - 1] for i in needed}
    first = [opening({}), Turn([form.reply(Reply(tuple(needed), None))], True)]
    if keep:
        return [[*first, Turn(form.passages(texts, False), False), told]]
    return [first, [opening(texts), told]]
