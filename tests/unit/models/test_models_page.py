"""docs/models.md lists the entries of the test registries. Run this file as a program to update the page's tables."""

from pathlib import Path

from cluster.arch import read_target
from tests.checkpoints.speculators.registry import rows as speculators_rows
from tests.distributed import test_drafts
from tests.support.families import FAMILIES, family_checkpoint
from tests.support.gemma4_assistant import REGISTRY_ROW
from tests.unit.models.draft_cases import CASES
from tests.unit.models.mtp_cases import LISTS

PAGE = Path(__file__).resolve().parents[3] / "docs/models.md"
BEGIN, END = "<!-- {} begin, made from the test registry -->", "<!-- {} end -->"


def drafts() -> list[str]:
    rows = ["| family | dialect | checked against | on several ranks |", "|---|---|---|---|"]
    for name, case in (CASES | LISTS).items():
        rank_counts = "2 and 4" if name in test_drafts.LISTS else "2" if name in test_drafts.DRAFTS else ""
        rows.append(f"| {case.family} | {case.description} | {case.source} | {rank_counts} |")
    rows.append(f"| {' | '.join(REGISTRY_ROW)} |")
    return rows + [f"| {family} | {description} | {source} |  |" for family, description, source in speculators_rows()]


def targets() -> list[str]:
    rows = ["| family | configs | checked against |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        served = read_target(family_checkpoint(name, next(iter(family.cases))).folder).family.split("/")[0]
        rows.append(f"| {served} | {', '.join(family.cases)} | {family.architecture} of transformers, float64 |")
    return rows


TABLES = {"targets": targets, "drafts": drafts}


def page_with_tables() -> str:
    text = PAGE.read_text(encoding="utf-8")
    for name, make_table in TABLES.items():
        before, rest = text.split(BEGIN.format(name), 1)
        after = rest.split(END.format(name), 1)[1]
        text = "\n".join([before + BEGIN.format(name), *make_table(), END.format(name) + after])
    return text


def test_models_page_matches_the_test_registries() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with_tables()


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(), encoding="utf-8")
