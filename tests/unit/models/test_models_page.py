"""docs/models.md lists what the test registries hold. Run this file as a program to write its tables again."""

from pathlib import Path

from cluster.arch import read_target
from tests.dialects.speculators.registry import rows as written_by_speculators
from tests.families import FAMILIES, made
from tests.ranks import test_drafts
from tests.unit.models.draft_cases import CASES, LISTS

PAGE = Path(__file__).resolve().parents[3] / "docs/models.md"
BEGIN, END = "<!-- {} begin, made from the test registry -->", "<!-- {} end -->"


def drafts() -> list[str]:
    rows = ["| family | dialect | checked against | on several ranks |", "|---|---|---|---|"]
    for name, case in (CASES | LISTS).items():
        gangs = "2 and 4" if name in test_drafts.LISTS else "2" if name in test_drafts.DRAFTS else ""
        rows.append(f"| {case.family} | {case.what} | {case.source} | {gangs} |")
    return rows + [f"| {family} | {what} | {source} |  |" for family, what, source in written_by_speculators()]


def targets() -> list[str]:
    rows = ["| family | configs | checked against |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        served = read_target(made(name, next(iter(family.cases))).folder).family.split("/")[0]
        rows.append(f"| {served} | {', '.join(family.cases)} | {family.architecture} of transformers, float64 |")
    return rows


TABLES = {"targets": targets, "drafts": drafts}


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        before, rest = text.split(BEGIN.format(name), 1)
        after = rest.split(END.format(name), 1)[1]
        text = "\n".join([before + BEGIN.format(name), *make(), END.format(name) + after])
    return text


def test_models_page_matches_the_test_registries() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
