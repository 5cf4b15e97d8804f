"""Decoding speed, prefill speed and peak memory beside Hugging Face transformers.

    .venv/bin/python scripts/bench/decode.py [--contexts 512,2048] [--batches 1,8]
        [--caches exact,int8,kvarn,kvarn4,memory] [--repeats 3] [--out runs/bench]

For each context and batch every side runs SmolLM2-135M in float32 in a process of its own, ours in
this environment and transformers in .venv-peer (made on the first run, 1.2 GB), on the same prompts
and the same cores. The sides take turns, repetition by repetition, so all see the same machine;
the best repetition counts. Transformers' default cache and its static cache are both measured and
the faster one is the one compared with. Prints a JSON line per side and a table with ratios.

The whole grid takes about an hour on two cores; `--contexts 512 --batches 1 --repeats 1` about two
minutes. Leave the machine alone meanwhile: what else ran is printed with the results. Where it
can't be left alone, `--threads 1 --by cpu` gives tokens per CPU second, which hardly depends on
what else runs.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = ("exact", "int8", "kvarn", "kvarn4", "memory")
PEERS = ("hf-dynamic", "hf-static")
QUIET = 0.05  # a number is provisional where other processes took more than this of the cores


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    names = {"type": lambda text: [part for part in text.split(",") if part]}
    parser.add_argument("--contexts", default=[512, 2048, 8192], **numbers)
    parser.add_argument("--batches", default=[1, 8], **numbers)
    parser.add_argument("--caches", default=["exact", "int8", "kvarn"], **names)
    parser.add_argument(
        "--peers", default=list(PEERS), **names, help="hf-dynamic, hf-static, or '' for none"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=128,
        help="decoded per repetition; a whole tile, so that each one encodes",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="a side begins no further repetition of a phase after this",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--by", choices=("seconds", "cpu"), default="seconds")
    parser.add_argument("--model", default="smollm2-135m", help="a name, or a Hugging Face folder")
    parser.add_argument("--out", type=Path, help="a folder for decode.jsonl and decode.md")
    args = parser.parse_args()
    if args.by == "cpu" and args.threads != 1:
        parser.error("--by cpu: threads that wait for each other use CPU too; add --threads 1")
    for option, given, known in (("caches", args.caches, OURS), ("peers", args.peers, PEERS)):
        if unknown := set(given) - set(known):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return args


# ---- environments ----------------------------------------------------------------------------


def peer_python() -> Path:
    """The interpreter of the peer's environment, which is made if it is not there.

    Python 3.11 where there is one, since that is what CPU builds of PyTorch are mostly kept for.
    """
    venv, wanted = ROOT / ".venv-peer", (HERE / "peer-requirements.txt").read_text()
    python, stamp = venv / "bin/python", venv / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    base = ["python3.11", *map(str, pyenv.glob("versions/3.11.*/bin/python")), sys.executable]
    chosen = next(p for p in base if works(p))
    print(f"making {venv} with {chosen} (minutes, once)", file=sys.stderr)
    subprocess.run([chosen, "-m", "venv", "--clear", str(venv)], check=True)
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", str(HERE / "peer-requirements.txt")], check=True)
    stamp.write_text(wanted)
    return python


def works(python: str) -> bool:
    try:
        done = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def model_folder(name: str) -> Path:
    """A Hugging Face folder that both sides load; a named model is converted once."""
    if Path(name).is_dir():
        return Path(name)
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not
    from kvjax.io.load import SMOLLM2, smollm2_folder

    if name != SMOLLM2:
        raise SystemExit(f"--model {name}: no such folder, and no model of that name but {SMOLLM2}")
    return smollm2_folder()


# ---- measuring -------------------------------------------------------------------------------


class Worker:
    """A side in its own process, which does one thing at a time."""

    def __init__(
        self,
        side: str,
        python: Path,
        folder: Path,
        args: argparse.Namespace,
        context: int,
        batch: int,
    ) -> None:
        self.side = side
        script = "peer_transformers.py" if side in PEERS else "ours.py"
        options = {
            "side": side,
            "folder": folder,
            "context": context,
            "batch": batch,
            "steps": args.steps,
            "repeats": args.repeats,
            "threads": args.threads,
        }
        command = [str(python), str(HERE / script)]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)} if script == "ours.py" else None,
        )

    def ask(self, word: str) -> dict:
        assert self.process.stdin and self.process.stdout
        print(word, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.side} died in {word}, exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def take_turns(workers: list[Worker], word: str, repeats: int, seconds: float) -> dict[str, list]:
    """Answers per side; a side whose time is spent stops early, after one repetition at least."""
    answers: dict[str, list] = {worker.side: [] for worker in workers}
    for _ in range(repeats):
        for worker in workers:
            done = answers[worker.side]
            if not done or sum(answer["seconds"] for answer in done) < seconds:
                done.append(worker.ask(word))
    return answers


def measure(workers: list[Worker], args: argparse.Namespace, context: int, batch: int) -> list:
    """One result per side at one point."""
    loads = {}
    for worker in workers:
        loads[worker.side] = worker.ask("load")
        worker.ask("warm")
    prefills = take_turns(workers, "prefill", args.repeats, args.seconds)
    for worker in workers:
        worker.ask("settle")
    decodes = take_turns(workers, "decode", args.repeats, args.seconds)
    results = []
    for side in decodes:
        decode = min(decodes[side], key=lambda answer: answer[args.by])
        prefill = min(prefills[side], key=lambda answer: answer[args.by])
        results.append(
            {
                "side": side,
                "context": context,
                "batch": batch,
                "decode_tokens_per_second": batch * args.steps / decode[args.by],
                "prefill_tokens_per_second": batch * context / prefill[args.by],
                "others": max(decode["others"], prefill["others"]),
                "peak_bytes": decodes[side][-1]["peak"],
                "load_peak_bytes": loads[side]["load_peak"],
                "decode_cpu_seconds": [answer["cpu"] for answer in decodes[side]],
                "prefill_cpu_seconds": [answer["cpu"] for answer in prefills[side]],
                "decode_seconds": [answer["seconds"] for answer in decodes[side]],
                "prefill_seconds": [answer["seconds"] for answer in prefills[side]],
                "first_tokens": decodes[side][0]["first"],
            }
        )
    return results


def run(args: argparse.Namespace) -> Iterator[dict]:
    folder = model_folder(args.model)
    pythons = {side: Path(sys.executable) for side in args.caches}
    pythons |= {side: peer_python() for side in args.peers}
    for context in args.contexts:
        for batch in args.batches:
            workers = []
            try:
                for side, python in pythons.items():
                    workers.append(Worker(side, python, folder, args, context, batch))
                yield from measure(workers, args, context, batch)
            finally:
                for worker in workers:
                    worker.close()


# ---- reporting -------------------------------------------------------------------------------


def machine(args: argparse.Namespace) -> dict:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "commit": commit.stdout.strip(),
        "model": args.model,
        "by": args.by,
        "steps": args.steps,
        "repeats": args.repeats,
    }


def ratio(result: dict, other: dict | None, field: str) -> str:
    return f"{result[field] / other[field]:.2f}×" if other else "–"


def table(results: list[dict]) -> str:
    """Markdown. Ratios are to the faster of transformers' caches, each measure for itself."""
    lines = [
        "| context | batch | side | decode tok/s | ÷ HF | ÷ exact "
        "| prefill tok/s | ÷ HF | peak MiB | ÷ exact |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    decode, prefill = "decode_tokens_per_second", "prefill_tokens_per_second"
    for one in results:
        here = [r for r in results if (r["context"], r["batch"]) == (one["context"], one["batch"])]
        peers = [r for r in here if r["side"] in PEERS]
        exact = next((r for r in here if r["side"] == "exact"), None)
        mine = one["side"] in OURS
        best = {f: max(peers, key=lambda r, f=f: r[f]) for f in (decode, prefill)} if peers else {}
        lines.append(
            f"| {one['context']} | {one['batch']} | {one['side']} | {one[decode]:.1f} "
            f"| {ratio(one, best.get(decode), decode)} "
            f"| {ratio(one, exact if mine else None, decode)} "
            f"| {one[prefill]:.1f} | {ratio(one, best.get(prefill), prefill)} "
            f"| {one['peak_bytes'] / 2**20:.0f} "
            f"| {ratio(one, exact if mine else None, 'peak_bytes')} |"
        )
    return "\n".join(lines) + "\n"


def remarks(results: list[dict], info: dict) -> list[str]:
    """What a reader must know before trusting the table."""
    found = []
    loud = [one for one in results if one["others"] > QUIET]
    if info["by"] == "cpu":
        found.append("Tokens per CPU second of one thread.")
    elif loud:
        worst = max(one["others"] for one in loud)
        found.append(
            f"Provisional: other processes took up to {worst:.0%} of the cores during "
            f"{len(loud)} of {len(results)} of the best repetitions."
        )
    for one in results:
        fewer = min(len(one["decode_seconds"]), len(one["prefill_seconds"]))
        if fewer < info["repeats"]:
            found.append(
                f"{one['side']} at {one['context']}, batch {one['batch']}: best of {fewer} only."
            )
    for exact in (r for r in results if r["side"] == "exact"):
        for peer in (r for r in results if r["side"] in PEERS):
            same = (exact["context"], exact["batch"]) == (peer["context"], peer["batch"])
            if same and exact["first_tokens"] != peer["first_tokens"]:
                found.append(
                    f"exact and {peer['side']} chose other tokens at "
                    f"{exact['context']}, batch {exact['batch']}."
                )
    return found


def main() -> None:
    args = parse()
    info = machine(args)
    print(json.dumps({"machine": info}), flush=True)
    results = []
    for result in run(args):
        results.append(result)
        print(json.dumps(result), flush=True)
    text = "\n".join([table(results), *remarks(results, info)])
    print("\n" + text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = [{"machine": info}, *results]
        (args.out / "decode.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (args.out / "decode.md").write_text(text)


if __name__ == "__main__":
    main()
