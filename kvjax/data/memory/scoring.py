"""The official rules for replies: SubEM, EM, LoCoMo's F1; and a local one for LongMemEval.

Each rule takes a question and a reply and gives a value in [0, 1]. MemoryAgentBench (arXiv
2507.05257): SubEM looks for a normalised answer inside the normalised reply ("4" is in "42"), EM
wants the whole of it. LoCoMo (arXiv 2402.17753): F1 over stemmed words, with a rule for each
category. LongMemEval (arXiv 2410.10813) asks a language model; there is none here, so its scores
are by the rule that `longmemeval` states and compare with no published number.
"""

import re
import string
from collections import Counter

import snowballstemmer

from kvjax.data.memory.episode import Question

NO_INFORMATION = "No information available"  # what LoCoMo's adversarial questions want to hear
NOT_MENTIONED = "Not mentioned"  # LongMemEval's abstention, in our episodes

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PREFIX = re.compile(r"(?:label|answer):(.*)", re.IGNORECASE)
_UNKNOWN = re.compile(
    r"not mention|never mention|no information|not enough information|not provided|not specified"
    r"|unanswerable|do(?:es)? not know|don't know|cannot (?:be )?(?:answer|determine)",
    re.IGNORECASE,
)
_STEMMER = snowballstemmer.stemmer("porter")


def normalise(text: str, dropped: str = "a|an|the") -> str:
    """Lower case without punctuation, without the words `dropped`, single spaces."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(rf"\b(?:{dropped})\b", " ", text).split())


def sub_em(question: Question, reply: str) -> float:
    """1 where a normalised answer is a substring of the normalised reply."""
    return float(_contains(normalise(reply), question.answers))


def stale(question: Question, reply: str) -> float:
    """1 where the reply has an old answer and no right one, by SubEM: for the old-answer rate."""
    text = normalise(reply)
    return float(_contains(text, question.old) and not _contains(text, question.answers))


def exact(question: Question, reply: str) -> float:
    """1 where the reply, or what stands in it after "label:" or "answer:", is an answer.

    Without such a mark the first line of the reply counts too, as in the official parser.
    """
    found = _PREFIX.search(reply)
    part = found[1] if found else reply.strip().partition("\n")[0]
    said = {normalise(reply), normalise(part)}
    return float(any(normalise(answer) in said for answer in question.answers))


def token_f1(question: Question, reply: str) -> float:
    """The best F1 of the reply's normalised words against an answer's."""
    words = normalise(reply).split()
    return max(_f1(words, normalise(answer).split()) for answer in question.answers)


def locomo(question: Question, reply: str) -> float:
    """F1 by LoCoMo's rules, told apart by `question.kind`.

    "multi-hop" (category 1): answer and reply are lists with commas, and the score is the mean over
    the answer's parts of each one's best F1; "open" (3): the answer is what stands before ";";
    "adversarial" (5): 1 where the reply says that it is not mentioned; else plain F1. The stemmer
    is Porter's own; the official code's (NLTK's) differs from it in a few words such as "dying".
    """
    if question.kind == "adversarial":
        text = reply.lower()
        return float("no information available" in text or "not mentioned" in text)
    return max(_locomo_f1(answer, reply, question.kind) for answer in question.answers)


def longmemeval(question: Question, reply: str) -> float:
    """A local rule in the place of LongMemEval's judge.

    "abstention": 1 where the reply says that it cannot know. Else 1 where an answer's normalised
    words stand in the reply's one after the other; an old answer beside it does no harm, and in
    "temporal-reasoning" only an answer's first sentence counts, and one that is a number, of days
    or weeks, months, years or nothing, may be off by one: both as the judge is told.
    """
    if question.kind == "abstention":
        return float(bool(_UNKNOWN.search(reply)))
    answers = list(question.answers)
    if question.kind == "temporal-reasoning":
        answers = [near for answer in answers for near in _off_by_one(answer.partition(". ")[0])]
    golds, words = [normalise(answer) for answer in answers], f" {normalise(reply)} "
    return float(any(gold and f" {gold} " in words for gold in golds))


def _contains(text: str, answers: tuple[str, ...]) -> bool:
    golds = [normalise(answer) for answer in answers]
    return any(gold and gold in text for gold in golds)


def _f1(words: list[str], gold: list[str]) -> float:
    """2 · common / (both lengths), the harmonic mean of precision and recall."""
    common = sum((Counter(words) & Counter(gold)).values())
    return 2 * common / (len(words) + len(gold)) if common else 0.0


def _stems(text: str) -> list[str]:
    return _STEMMER.stemWords(normalise(text, "a|an|the|and").split())


def _locomo_f1(answer: str, reply: str, kind: str) -> float:
    if kind == "open":
        answer = answer.partition(";")[0]
    if kind != "multi-hop":
        return _f1(_stems(reply), _stems(answer))
    parts = [_stems(part) for part in reply.split(",")]
    golds = [_stems(gold) for gold in answer.split(",")]
    return sum(max(_f1(part, gold) for part in parts) for gold in golds) / len(golds)


def _off_by_one(answer: str) -> list[str]:
    """Of "2 days": "1 day", "2 days", "3 days", with and without the "s"."""
    found = re.fullmatch(r"(\d+)(?:( day| week| month| year)s?)?\.?", answer.strip(), re.IGNORECASE)
    if not found:
        return [answer]
    numbers = [str(int(found[1]) + change) for change in (-1, 0, 1)]
    return [f"{n}{found[2]}{end}" for n in numbers for end in ("", "s")] if found[2] else numbers
