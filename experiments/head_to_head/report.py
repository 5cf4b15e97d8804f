"""How a head-to-head result reads: its scale, its cells, its picture."""

from typing import Any

import numpy as np

from experiments.statistics import Interval, mean_interval

_NOTES = (
    "KL is KL(exact cache || this cache), perplexity × is exp of the increase in negative "
    "log-likelihood over the exact cache's at the same positions; in brackets the 95 % t interval "
    "over texts (over blocks where there is one text). Bytes "
    "are those of the live arrays, room for the decoded tokens included; bits are per key or value "
    "element of the text. Speed is greedy decoding after the text, all rows together; × is the "
    "exact cache's in the same process, by turns, so the exact row's own × shows the noise. "
    "A soft row keeps what a trained compressor makes of each block that was read; its encoder's "
    "passes are not in the speed, its weights not in the bytes."
)


def scale(result: dict[str, Any]) -> str:
    """One line that says what the numbers are about; equal lines are comparable."""
    s = result["scale"]
    texts = len(s["texts"])
    return (
        f"{s['model']} ({s['parameters'] / 1e6:.3g}M parameters, {s['dtype']}), "
        f"{texts} text{'s' * (texts > 1)} × {s['length']:,} tokens (n = {s['positions']:,}), "
        f"{s['regime']} in steps of {s['block']}, texts {s['tokens_sha256'][:8]}"
    )


def notes(_: dict[str, Any]) -> str:
    """The paragraph below a table."""
    return _NOTES


def order(result: dict[str, Any]) -> tuple[float, float]:
    """Rows from the most bytes to the fewest, better ones first among equals."""
    return (-result["size"]["bytes"], result["quality"]["kl"]["mean"])


def cells(result: dict[str, Any]) -> dict[str, str]:
    """The row of one result, as text."""
    q, size, speed = result["quality"], result["size"], result["speed"]
    increase = Interval(**q["nll_increase"])
    n = f"(n = {result['scale']['positions']:,})"
    decoded = f"(n = {speed['repeats']} × {speed['tokens']})"
    return {
        "MB": f"{size['bytes'] / 1e6:.1f}",
        "× smaller": f"{size['ratio']:.2f}",
        "bits": f"{size['bits_per_element']:.2f}",
        f"perplexity {n}": f"{q['perplexity']:.2f}",
        f"perplexity × {n}": _interval(Interval(*np.exp(increase)), 3),
        f"KL, nats {n}": _interval(Interval(**q["kl"]), 4),
        "KL by quarter": " ".join(f"{x:z.3f}" for x in q["kl_by_quarter"]),
        f"same top token, % {n}": f"{100 * q['agreement']['mean']:.1f}",
        f"tokens/s {decoded}": f"{speed['tokens_per_second']:.1f} ({speed['ratio']:.2f}×)",
    }


def _interval(x: Interval, digits: int) -> str:
    return f"{x.mean:z.{digits}f} [{x.low:z.{digits}f}, {x.high:z.{digits}f}]"


def difference(result: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, str]:
    """Paired differences to another row, position by position, with their 95 % interval."""
    found = {}
    for key, title in (("kl", "KL"), ("nll", "NLL")):
        pair = np.asarray(result["blocks"][key]) - np.asarray(other["blocks"][key])
        found[f"{title} − {name}'s"] = _interval(mean_interval(pair), 4)
    return found
