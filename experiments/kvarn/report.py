"""How a result of this study reads: a table and a picture for each part.

`drift` compares encoders by bits, `paired` follows the error inside the model, `retrieval` counts
answers. `together` adds what only shows beside another row: ratios and differences in pairs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.head_to_head import report as head_to_head
from experiments.kvarn import paper_report, pictures
from experiments.kvarn.measured import measured
from experiments.statistics import Interval, mean_interval, ratio_interval
from experiments.table import Result

__all__ = ["cells", "difference", "draw", "measured", "notes", "order", "scale", "together"]

_DRIFT_NOTES = (
    "Each position's KL(exact cache || this cache), in nats, and the perplexity beside the exact "
    "cache's, in brackets the 95 % t interval over texts. Bits are the encoder's own per key and "
    "value element, all metadata counted; MB are the live arrays of the whole cache, exact sinks "
    "and newest tokens included. A ratio is of pooled KLs, paired by position, its interval by the "
    "delta method with the text as the unit. Rows ending in -exact keep 5 % or 95 % of each tile's "
    "tokens exact (the worst, or all but the worst) and have no bits of their own."
)
_PAIRED_NOTES = (
    "An exact and a lossy stream side by side. decode: the lossy cache stores what the lossy "
    "stream computes; static: it stores the exact stream's keys and values, encoded once. "
    "Attention's error is over its outputs, averaged over layers; errors of keys are ‖k − k̂‖ "
    "relative to ‖k‖, and the share of ‖k − k̂‖² that is magnitude's, (‖k‖ − ‖k̂‖)², within each "
    "layer, head and text. Brackets: 95 % t interval over texts."
)


def _part(result: dict[str, Any]) -> Any:
    return _PARTS[result["part"]]


class _Drift:
    """Rows by bits, each against the KVarN of its width, and against KIVI at 2 bits."""

    notes = _DRIFT_NOTES
    draw = staticmethod(pictures.drift)

    @staticmethod
    def scale(result: dict[str, Any]) -> str:
        return head_to_head.scale(result)

    @staticmethod
    def order(result: dict[str, Any]) -> tuple:
        bits = result["bits"]["mean"] if result["bits"] else 0.0
        return (-bits, result["quality"]["kl"]["mean"])

    @staticmethod
    def cells(result: dict[str, Any]) -> dict[str, str]:
        q, size, bits = result["quality"], result["size"], result["bits"]
        n = f"(n = {result['scale']['positions']:,})"
        encoded = {} if bits is None else {
            "bits K / V": f"{bits['key']:.3f} / {bits['value']:.3f}",
            "bits": f"{bits['mean']:.3f}",
            "MB": f"{size['bytes'] / 1e6:.1f}",
            "× smaller": f"{size['ratio']:.2f}",
        }  # fmt: skip
        return encoded | {
            f"KL, nats {n}": interval(Interval(**q["kl"]), 4),
            "KL by quarter": " ".join(f"{x:z.3f}" for x in q["kl_by_quarter"]),
            f"perplexity {n}": f"{q['perplexity']:.2f} (exact {q['exact_perplexity']:.2f})",
            f"perplexity × {n}": interval(Interval(*np.exp(Interval(**q["nll_increase"]))), 3),
            f"same top token, % {n}": f"{100 * q['agreement']['mean']:.1f}",
        }

    @staticmethod
    def together(group: Sequence[Result]) -> dict[str, dict[str, str]]:
        by_name = {each.name: each for each in group}
        found: dict[str, dict[str, str]] = {each.name: {} for each in group}
        for each in group:
            peers = {"KL ÷ KVarN's of its bits": kvarn_of(each), "KL ÷ kivi-2's": _kivi_of(each)}
            for title, name in peers.items():
                if name in by_name and name != each.name:
                    found[each.name][title] = kl_ratio(each, by_name[name])
        return found


class _Paired:
    """Both regimes in one table."""

    notes = _PAIRED_NOTES
    draw = staticmethod(pictures.paired)

    @staticmethod
    def scale(result: dict[str, Any]) -> str:
        both = result | {"scale": result["scale"] | {"regime": "decode and static"}}
        return "Beside the exact cache: " + head_to_head.scale(both)

    @staticmethod
    def order(result: dict[str, Any]) -> tuple:
        return (result["scale"]["regime"], result["quality"]["kl"]["mean"])

    @staticmethod
    def cells(result: dict[str, Any]) -> dict[str, str]:
        keys, values = result["errors"]["k"], result["errors"]["v"]
        worst = next(row for row in keys["worst"] if row["top"] == 0.05)
        return {
            "KL, nats": interval(Interval(**result["quality"]["kl"]), 4),
            "KL by quarter": " ".join(f"{x:z.3f}" for x in result["quality"]["kl_by_quarter"]),
            "attention MAE": _mean(result, "attention_mae"),
            "by quarter": _quarters(result, "attention_mae"),
            "attention error, relative": _mean(result, "attention_relative"),
            "by quarter, relative": _quarters(result, "attention_relative"),
            "key error": interval(Interval(**keys["relative"]), 3),
            "value error": interval(Interval(**values["relative"]), 3),
            "of key error in the worst 5 %, %": _percent(worst["of_all_error"]),
            "magnitude's share there, %": _percent(worst["magnitude"]),
            "of all, %": _percent(keys["worst"][-1]["magnitude"]),
        }

    @staticmethod
    def together(group: Sequence[Result]) -> dict[str, dict[str, str]]:
        by_name, found = {each.name: each for each in group}, {}
        for each in group:
            regime, _, row = each.name.partition("-")
            static = by_name.get(f"static-{row}")
            if regime == "decode" and static is not None:
                found[each.name] = {"KL ÷ static's": kl_ratio(each, static)}
        return found


class _Retrieval:
    """One table a task; every row against the exact cache and the KVarN of its width."""

    notes = (
        "Greedy answers that are right, in brackets Wilson's 95 % interval, and the negative "
        "log-likelihood of the whole right answer in nats, 95 % t interval over prompts. Lost: of "
        "the prompts that the exact cache answers, those that this one does not. Differences are "
        "paired by prompt. Prompts go in by blocks, and later blocks read the encoded ones."
    )
    draw = staticmethod(pictures.retrieval)

    @staticmethod
    def scale(result: dict[str, Any]) -> str:
        s = result["scale"]
        return (
            f"{s['task']}: {s['model']} ({s['parameters'] / 1e6:.3g}M parameters, {s['dtype']}), "
            f"n = {s['n']} prompts of {s['prompt_tokens']:,.0f} tokens on average, in steps of "
            f"{s['block']}, prompts {s['tokens_sha256'][:8]}"
        )

    @staticmethod
    def order(result: dict[str, Any]) -> tuple:
        bits = result["bits"]["mean"] if result["bits"] else 32.0
        return (-bits, result["nll"]["mean"])

    @staticmethod
    def cells(result: dict[str, Any]) -> dict[str, str]:
        depths = result["by_depth"]
        title = "by depth " + " ".join(f"{x['depth']:.2f}" for x in depths)
        return {
            "bits": f"{result['bits']['mean']:.3f}" if result["bits"] else "exact",
            f"right, % (n = {result['scale']['n']})": _percent(result["accuracy"]),
            title: " ".join(f"{100 * x['accuracy']:.0f}" for x in depths),
            "NLL": interval(Interval(**result["nll"]), 3),
        }

    @staticmethod
    def together(group: Sequence[Result]) -> dict[str, dict[str, str]]:
        by_name = {each.name: each for each in group}
        found: dict[str, dict[str, str]] = {each.name: {} for each in group}
        for each in group:
            task = each.result["scale"]["task"]
            exact = by_name.get(f"{task}-exact")
            if exact is not None and exact is not each:
                found[each.name] |= {
                    "lost": _lost(each, exact),
                    "NLL − exact's": _more(each, exact),
                }
            peer = by_name.get(f"{task}-{kvarn_of(each)}")
            if peer is not None and peer is not each:
                found[each.name]["NLL − KVarN's of its bits"] = _more(each, peer)
        return found


_PARTS: dict[str, Any] = {
    "drift": _Drift,
    "paired": _Paired,
    "retrieval": _Retrieval,
    "paper": paper_report,
}


def scale(result: dict[str, Any]) -> str:
    """One line that says what the numbers are about; equal lines are comparable."""
    return _part(result).scale(result)


def order(result: dict[str, Any]) -> tuple:
    """From most bits to fewest (or by regime), better rows first among equals."""
    return _part(result).order(result)


def cells(result: dict[str, Any]) -> dict[str, str]:
    """The row of one result, as text."""
    return _part(result).cells(result)


def together(group: Sequence[Result]) -> dict[str, dict[str, str]]:
    """{row: cells} that need other rows of the same table."""
    return _part(group[0].result).together(group)


def notes(result: dict[str, Any]) -> str:
    """The paragraph below a table."""
    return _part(result).notes


def draw(scale: str, group: Sequence[Result]) -> Figure:
    """The picture of one table."""
    return _part(group[0].result).draw(scale, group)


def difference(result: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, str]:
    """Paired differences to another row, with their 95 % interval, and the ratio of KLs."""
    if "blocks" not in result:
        return {}
    ratio = ratio_interval(_blocks(result, "kl"), _blocks(other, "kl"))
    return head_to_head.difference(result, other, name) | {f"KL ÷ {name}'s": interval(ratio, 3)}


def kvarn_of(each: Result) -> str:
    """The KVarN row of the same widths; empty for encoders without a choice of widths."""
    encode = each.config["cache"]["encode"]
    widths = encode.get("key_bits"), encode.get("value_bits")
    return "" if None in widths else "kvarn-k{}v{}".format(*widths)


def _kivi_of(each: Result) -> str:
    encode = each.config["cache"]["encode"]
    return "kivi-2" if encode.get("key_bits") == encode.get("value_bits") == 2 else ""


def kl_ratio(each: Result, other: Result) -> str:
    pair = (_blocks(x.result, "kl") for x in (each, other))
    return interval(ratio_interval(*pair), 3)


def _more(each: Result, other: Result) -> str:
    """The paired difference of the answers' log-likelihoods."""
    ours, theirs = (np.asarray(x.result["examples"]["nll"]) for x in (each, other))
    return interval(mean_interval((ours - theirs)[:, None]), 3)


def _lost(each: Result, exact: Result) -> str:
    ours, theirs = (np.asarray(x.result["examples"]["right"]) for x in (each, exact))
    return f"{int((theirs * (1 - ours)).sum())} of {int(theirs.sum())}"


def interval(x: Interval, digits: int) -> str:
    return f"{x.mean:z.{digits}f} [{x.low:z.{digits}f}, {x.high:z.{digits}f}]"


def _blocks(result: dict[str, Any], name: str) -> np.ndarray:
    return np.asarray(result["blocks"][name])


def _mean(result: dict[str, Any], name: str) -> str:
    return interval(mean_interval(_blocks(result, name)), 4)


def _quarters(result: dict[str, Any], name: str) -> str:
    return " ".join(f"{x.mean():.4f}" for x in np.array_split(_blocks(result, name), 4, axis=1))


def _percent(x: dict[str, float]) -> str:
    return interval(Interval(*(100 * Interval(**x)[i] for i in range(3))), 1)
