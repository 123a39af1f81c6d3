"""The results of all stages as tables, and whether every answer is as it must be."""

from collections.abc import Mapping
from typing import Any

from cluster.bench.report import table

YARDSTICK = "transformers"  # rows of it show how far `transformers` agrees with itself; they have no goal


def report(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """The tables of the stages that ran, and whether no answer differs but by a near-tie and nothing else is wrong."""
    parts, good = [], True
    if "compared" in found:
        text, same = _compared(found["compared"])
        parts.append(text)
        good = good and same
    if "pieces" in found:
        pieces = found["pieces"]
        wrong = pieces["other_pieces"] + pieces["other_decode"]
        good = good and not wrong
        parts.append(
            f"detokenisation: {pieces['texts']} texts, every id of {pieces['vocab_size']} among them; streamed pieces "
            f"join to other text in {pieces['other_pieces']}, other text than transformers in {pieces['other_decode']}"
        )
        parts += [f"  ids {example}" for example in pieces["examples"]]
    if "speed" in found:
        speed, keys = found["speed"], ("dtype", "what", "aerie", "transformers", "times")
        where = speed["machine"]
        rows = [[row[key] for key in keys] for row in speed["rows"]]
        how = f"{speed['threads']} threads, medians of {speed['repeats']} turns"
        head = f"{where['cpu']}, {where['cores']} cores, load {where['load_average']}; {how}"
        parts.append(f"{head}\n{table((*keys[:-1], 'times as fast'), rows)}")
    memory = [(name, found[name]["peak_mib"]) for name in ("engine", "transformers") if name in found]
    if memory:
        parts.append(table(("float32", "peak memory, MiB"), [(name, round(mib)) for name, mib in memory]))
    if "server" in found:
        server = found["server"]
        parts.append(
            f"aerie serve: ready after {server['ready_s']:.1f} s; {server['processes']} processes hold "
            f"{server['proportional_mib']:.0f} MiB, shared pages once"
        )
    return "\n\n".join(parts), good


def _compared(found: Mapping[str, Any]) -> tuple[str, bool]:
    rows = [(row["who"], f"{row['same']} of {row['of']}", row["near_ties"]) for row in found["rows"]]
    lines = [table(("greedy tokens as transformers, batch 1", "same", "near-ties"), rows)]
    good = not found["problems"]
    for row in found["rows"]:
        lines += [
            f"  {row['who']}: {one['prompt']}, token {one['at']}: {one['reference']} there, {one['ours']} here, logits "
            f"{one['gap']:.2g} apart in float64"
            for one in row["differences"]
        ]
        own = not row["who"].startswith(YARDSTICK)
        good = good and not (own and row["same"] + row["near_ties"] < row["of"])
    return "\n".join([*lines, *(f"WRONG {problem}" for problem in found["problems"])]), good
