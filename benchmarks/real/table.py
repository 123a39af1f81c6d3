"""The results of all stages as tables, and whether all checks passed."""

from collections.abc import Mapping
from typing import Any

from cluster.bench.report import table

NGRAM = ("plain", "fixed", "adaptive")
YARDSTICK = "transformers"  # its row shows how far `transformers` agrees with itself; it has no goal


def report(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """Return the tables of the stages that ran, and whether all checks passed: answers differ only in near-ties, and
    there are no other problems.
    """
    sections, passed = [], True
    if "compared" in results:
        text, same = _comparison_text(results["compared"])
        sections.append(text)
        passed = passed and same
    if "pieces" in results:
        pieces = results["pieces"]
        wrong_texts = pieces["other_pieces"] + pieces["other_decode"]
        passed = passed and not wrong_texts
        sections.append(
            f"detokenisation: {pieces['texts']} texts, every id of {pieces['vocab_size']} among them; streamed pieces "
            f"join to other text in {pieces['other_pieces']}, other text than transformers in {pieces['other_decode']}"
        )
        sections += [f"  ids {example}" for example in pieces["examples"]]
    if "speed" in results:
        speed, keys = results["speed"], ("dtype", "what", "aerie", "transformers", "times")
        machine = speed["machine"]
        rows = [[row[key] for key in keys] for row in speed["rows"]]
        setup = f"{speed['threads']} threads, medians of {speed['repeats']} turns"
        title = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}; {setup}"
        sections.append(f"{title}\n{table((*keys[:-1], 'times as fast'), rows)}")
    if "ngram" in results:
        rows = [
            (
                row["kind"],
                row["batch"],
                *(f"{row[name]:.0f}" for name in NGRAM),
                *(row[f"{name} times"] for name in NGRAM[1:]),
            )
            for row in results["ngram"]["rows"]
        ]
        heading = ("n-gram: text", "batch", *(f"{name}, tokens/s" for name in NGRAM), "fixed, times", "adaptive, times")
        sections.append(table(heading, rows))
    memory = [(name, results[name]["peak_mib"]) for name in ("engine", "transformers") if name in results]
    if memory:
        sections.append(table(("float32", "peak memory, MiB"), [(name, round(mib)) for name, mib in memory]))
    if "server" in results:
        server = results["server"]
        sections.append(
            f"aerie serve: ready after {server['ready_s']:.1f} s; {server['processes']} processes hold "
            f"{server['proportional_mib']:.0f} MiB, shared pages once"
        )
    return "\n\n".join(sections), passed


def _comparison_text(comparison: Mapping[str, Any]) -> tuple[str, bool]:
    rows = [(row["who"], f"{row['same']} of {row['of']}", row["near_ties"]) for row in comparison["rows"]]
    lines = [table(("greedy tokens as transformers, batch 1", "same", "near-ties"), rows)]
    passed = not comparison["problems"]
    for row in comparison["rows"]:
        lines += [
            f"  {row['who']}: {difference['prompt']}, token {difference['at']}: reference {difference['reference']}, "
            f"ours {difference['ours']}, logits {difference['gap']:.2g} apart in float64"
            for difference in row["differences"]
        ]
        is_ours = not row["who"].startswith(YARDSTICK)
        passed = passed and not (is_ours and row["same"] + row["near_ties"] < row["of"])
    return "\n".join([*lines, *(f"WRONG {problem}" for problem in comparison["problems"])]), passed
