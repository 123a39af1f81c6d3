"""docs/settings.md lists every setting of the code."""

import pytest
from pydantic import Field

from cluster.config import EngineConfig, Settings
from tests.reference_pages.settings import FILE, page_text, table


def test_settings_page_matches_the_code() -> None:
    assert FILE.read_text(encoding="utf-8") == page_text(), "run python -m tests.reference_pages.settings"


def test_settings_page_lists_every_engine_setting_once() -> None:
    engine, _ = FILE.read_text(encoding="utf-8").split("## vLLM's names")
    rows = engine.splitlines()
    for name in EngineConfig.model_fields:
        assert sum(row.startswith(f"| `{name}` |") for row in rows) == 1, name


def test_settings_table_shows_bounds_and_refuses_missing_descriptions() -> None:
    class DescribedSettings(Settings):
        least: int | None = Field(default=None, ge=2, le=5, description="some")
        share: float = Field(default=0.5, gt=0, lt=1, description="a|b")

    assert table(DescribedSettings).splitlines()[2:] == [
        "| `least` | integer from 2 to 5 | unset | some |",
        "| `share` | number over 0 below 1 | `0.5` | a\\|b |",
    ]

    class Bare(Settings):
        nothing: int = 3

    with pytest.raises(LookupError, match=r"Bare\.nothing"):
        table(Bare)
