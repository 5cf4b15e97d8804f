"""How the study's results read: arms beside their controls, and where a small state ends.

A control differs from its arm in one thing: the frozen model instead of the adapter, the state
zeroed, the state of another episode, LoRA instead of a memory. Differences are over the same
questions, averaged within an episode first, for these share a history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.delta_mem import pictures
from experiments.papers import Measured
from experiments.statistics import mean_interval, ratio_interval
from experiments.table import Result

NOTES = (
    "Scores are the benchmark's own, in percent; brackets: 95 % t interval over episodes, whose "
    "questions share a history. A history is injected once and then asked everything, greedily; "
    "an encoded cache is encoded once, after it. seen: the history is in view, by the cache that "
    "is named; else the state, or what BM25 brings, is all there is. soft-N: a trained compressor "
    "puts a soft token in place of N tokens; its own decoder, which was tuned for them, reads them "
    "with the memory that was trained beside the frozen model. Differences are paired, in points: "
    "base is the model with the same view and cache without an adapter (of soft tokens the "
    "compressor's decoder), zeroed and shuffled are the same adapter with an empty "
    "state and with that of another episode, LoRA is trained on the same data. Old: questions "
    "answered with what was right before an update. State bytes are of one conversation."
)
MQAR_NOTES = (
    "Each number of pairs has a store of its own, trained on that number; chance is one in the "
    "number of values. Brackets: 95 % t interval over sequences."
)
CONTROLS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "base": lambda arm: arm | {"adapter": "", "kind": "", "state": "own"},
    "zeroed": lambda arm: arm | {"state": "zero"},
    "shuffled": lambda arm: arm | {"state": "shuffled"},
    "LoRA": lambda arm: arm | {"adapter": "lora", "kind": "lora", "state": "own"},
}


def scale(result: dict[str, Any]) -> str:
    s = result["scale"]
    if result["part"] == "mqar":
        again = f", {s['overwritten']:.0%} written again" * bool(s["overwritten"])
        return (f"One layer's memory: {s['keys']} keys, {s['values']} values{again}; {s['steps']} "
                f"steps of {s['batch']}; n = {s['sequences']} sequences")  # fmt: skip
    settings = {k: v for k, v in s["benchmark"].items() if k not in ("name", "turns")}
    told = ", ".join(f"{key} {value}" for key, value in settings.items())
    return (f"{s['model']}, {s['benchmark']['name']}{f' ({told})' if told else ''}; n = "
            f"{s['episodes']} episodes × {s['questions']} questions")  # fmt: skip


def order(result: dict[str, Any]) -> tuple:
    if result["part"] == "mqar":
        cell = result["cell"]
        return (cell["rank"], cell.get("states", 1), len(cell))
    arm = result["arm"]
    turns = result["scale"]["benchmark"].get("turns", 0)
    kinds = ("", "memory", "lora").index(arm["kind"])
    return (turns, not arm["context"], kinds, arm["adapter"], arm["cache"], arm["state"])


def cells(result: dict[str, Any]) -> dict[str, str]:
    if result["part"] == "mqar":
        return {f"{n} pairs, %": _percent(x) for n, x in result["recalled"].items()}
    arm, quality, size = result["arm"], result["quality"], result["size"]
    seen = "seen" if arm["cache"] == "exact" else f"seen, {arm['cache']}"
    found = {"view": seen if arm["context"] else "BM25" if arm["retrieve"] else "",
             "state": arm["state"] if arm["kind"] == "memory" else "",
             "score, %": _percent(quality["score"])}  # fmt: skip
    if "turns" in result["scale"]["benchmark"]:
        found = {"turns": str(result["scale"]["benchmark"]["turns"])} | found
    if quality["old"]:
        found["old, %"] = _percent(quality["old"])
    kinds = quality["kinds"] if len(quality["kinds"]) > 1 else {}
    for kind, x in kinds.items():
        found[f"{kind}, %"] = f"{100 * x['mean']:.1f} (n = {x['n']})"
    found["context bytes"] = f"{size['context_bytes']:,}"
    found["state bytes"] = f"{size['state_bytes']:,}"
    return found | _trained(result["trained"])


def _trained(trained: dict[str, Any] | None) -> dict[str, str]:
    if trained is None:
        return {}
    loss = trained["loss"]
    return {"trained weights": f"{trained['weights']:,}",
            "episodes": str(trained["episodes_seen"]),
            "loss": f"{loss['first']:.3f} to {loss['last']:.3f}"}  # fmt: skip


def together(group: Sequence[Result]) -> dict[str, dict[str, str]]:
    """Paired differences from each arm's controls, where these are in the table."""
    if group[0].result["part"] == "mqar":
        return {}
    held = {_key(each.result, each.result["arm"]): each.result for each in group}
    found: dict[str, dict[str, str]] = {}
    for each in group:
        own = found.setdefault(each.name, {})
        for name, control in CONTROLS.items():
            if (other := _control(held, each.result, control)) is not None:
                ours, theirs = by_episode([each.result]), by_episode([other])
                own[f"− {name}"] = _points(ours - theirs)
                if name == "base" and theirs.mean() > 0:
                    own["× base"] = _ratio(ours, theirs)
    return found


def _key(result: dict[str, Any], arm: dict[str, Any]) -> tuple:
    fields = ("adapter", "kind", "context", "state", "retrieve", "cache")
    return (result["label"], *(arm[field] for field in fields))


def _control(
    held: dict[tuple, dict[str, Any]], result: dict[str, Any], control: Callable
) -> dict[str, Any] | None:
    """The arm's control, None where it has none here or is that itself."""
    key = _key(result, control(result["arm"]))
    return None if key == _key(result, result["arm"]) else held.get(key)


def by_episode(results: Sequence[dict[str, Any]]) -> np.ndarray:
    """Mean score of each episode [n,1], of several benchmarks one after the other."""
    return np.array([[float(np.mean(row))] for r in results for row in r["scores"]])


def difference(result: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, str]:
    if result["part"] == "mqar" or result["label"] != other.get("label"):
        return {}
    return {f"score − {name}'s": _points(by_episode([result]) - by_episode([other]))}


def notes(result: dict[str, Any]) -> str:
    return MQAR_NOTES if result["part"] == "mqar" else NOTES


def summary(results: Sequence[Result]) -> str:
    """A table of arms over all benchmarks that every one of them was asked, "" for a single one."""
    arms = [each.result for each in results if each.result["part"] == "arms"]
    labels = [label for label in dict.fromkeys(r["label"] for r in arms)]
    by_arm = {n: {r["label"]: r for r in arms if r["arm"]["name"] == n}
              for n in dict.fromkeys(r["arm"]["name"] for r in arms)}  # fmt: skip
    asked_all = {n: found for n, found in by_arm.items() if len(found) == len(labels)}
    whole = {n: [found[k] for k in labels] for n, found in asked_all.items()}
    if len(labels) < 2 or not whole:
        return ""
    rows = []
    for name, own in sorted(whole.items(), key=lambda pair: order(pair[1][0])):
        row = {"arm": name} | {r["label"]: _percent(r["quality"]["score"]) for r in own}
        row["all"] = _percent(mean_interval(by_episode(own))._asdict())
        rows.append(row | _against(whole, own))
    text = pd.DataFrame(rows).fillna("").to_markdown(index=False, disable_numparse=True)
    return f"**All of {', '.join(labels)}, episodes pooled**\n\n{text}"


def _against(whole: dict[str, list[dict[str, Any]]], own: list[dict[str, Any]]) -> dict[str, str]:
    """Pooled differences from the controls that were asked everything too."""
    held = {_key(rs[0], rs[0]["arm"]): rs for rs in whole.values()}
    found, ours = {}, by_episode(own)
    for name, control in CONTROLS.items():
        key = _key(own[0], control(own[0]["arm"]))
        if key in held and key != _key(own[0], own[0]["arm"]):
            theirs = by_episode(held[key])
            found[f"− {name}"] = _points(ours - theirs)
            if name == "base" and theirs.mean() > 0:
                found["× base"] = _ratio(ours, theirs)
    return found


def _percent(x: dict[str, float]) -> str:
    return f"{100 * x['mean']:.1f} [{100 * x['low']:.1f}, {100 * x['high']:.1f}]"


def _points(differences: np.ndarray) -> str:
    x = mean_interval(differences)
    return f"{100 * x.mean:+.1f} [{100 * x.low:+.1f}, {100 * x.high:+.1f}]"


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> str:
    x = ratio_interval(ours, theirs)
    return f"{x.mean:.2f} [{x.low:.2f}, {x.high:.2f}]"


def draw(title: str, group: Sequence[Result]) -> Figure:
    """Scores of arms; of recall, against turns; of a store, against pairs."""
    if group[0].result["part"] == "mqar":
        return pictures.stores(title, group)
    if len({each.result["label"] for each in group}) > 1:
        return pictures.recall(title, group)
    return pictures.arms(title, group)


def measured(results: Sequence[Result]) -> list[Measured]:
    """Scores with the history in view beside the paper's, and those without it beside its own."""
    found = []
    for each in results:
        if each.result["part"] == "arms":
            result, arm = each.result, each.result["arm"]
            table = "main" if arm["context"] else "no_context"
            text = _percent(result["quality"]["score"])
            found.append(Measured(table, result["scale"]["model"], arm["name"],
                                  f"{result['label']}, %", text, scale(result)))  # fmt: skip
    return found
