"""Tests of `export_draft`: the demo draft is exported to every dialect that can express it.

The exported draft has the same accept length in every step.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from cluster.arch import read_draft, read_target
from cluster.cli import main
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint
from cluster.tools.export_draft import AUX_LAYER_IDS_KEY, DIALECTS, export_draft
from tests.checkpoints.demo import DRAFT, TARGET, accept_lens, reference_run
from tests.support.tiny_checkpoints import draft_folder, target_folder

SLOW_CASES = (("specforge", 1, 1), ("speculators", 1, 1), ("specforge", 2, 1), ("modelopt", 3, 1), ("deepspec", 2, 1))


@pytest.mark.parametrize(
    ("dialect", "layers", "topk"),
    [
        ("modelopt", 1, 1),
        ("deepspec", 1, 1),
        ("speculators", 2, 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_CASES),
    ],
)
def test_exported_draft_has_the_accept_lengths_of_the_original(
    dialect: str, layers: int, topk: int, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    spec = export_draft(DRAFT, TARGET, dialect, out, layers)
    assert (spec.dialect, spec.num_layers, spec.aux_boundaries) == (dialect, layers, (3, 6, 9))
    assert accept_lens(out, topk=topk) == reference_run(topk)


def test_every_dialect_exports_to_every_other_dialect(tmp_path: Path) -> None:
    for first_dialect in DIALECTS:
        export_draft(DRAFT, TARGET, first_dialect, str(tmp_path / first_dialect))
        for second_dialect in DIALECTS:
            exported_spec = export_draft(
                str(tmp_path / first_dialect),
                TARGET,
                second_dialect,
                str(tmp_path / f"{first_dialect}-{second_dialect}"),
            )
            assert exported_spec.aux_boundaries == (3, 6, 9)


def test_export_refuses_a_draft_that_the_dialect_cannot_express(tmp_path: Path) -> None:
    target = target_folder()
    with pytest.raises(ConfigError, match="cannot express: norm_before_residual"):
        export_draft(draft_folder(target, norm_before_residual=True), target, "modelopt", str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="the embedding as an aux hidden state"):
        export_draft(draft_folder(target, num_aux=5), target, "specforge", str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="one of specforge, modelopt"):
        export_draft(DRAFT, TARGET, "eagle-1", str(tmp_path / "c"))
    assert not list(tmp_path.iterdir()), "a refused export must write nothing"


@pytest.mark.parametrize(
    ("dialect", "layers", "read"),
    [("specforge", [2, 5, 7], (2, 5, 7)), ("deepspec", [2, 5, 7], (2, 5, 7)), ("speculators", [0, 3, 5], (2, 5, 7))],
)
def test_aux_layers_that_the_dialect_would_number_otherwise_are_refused(
    dialect: str, layers: list[int], read: tuple[int, ...], tmp_path: Path
) -> None:
    """A list of aux layers has a fixed meaning if it is EAGLE-3's default for ten layers (boundaries 2, 5 and 7), or
    these numbers less one. The dialect would read such a list as other boundaries.
    """
    draft, boundaries = tmp_path / "draft", [layer + 1 for layer in layers]
    shutil.copytree(DRAFT, draft)
    config = json.loads((draft / "config.json").read_text())
    if dialect == "speculators":
        config["eagle_config"][AUX_LAYER_IDS_KEY] = layers
    else:
        config |= {"eagle_config": {}, AUX_LAYER_IDS_KEY: boundaries}
    (draft / "config.json").write_text(json.dumps(config))
    assert read_draft(str(draft), Checkpoint(str(draft)).shapes, read_target(TARGET)).aux_boundaries == tuple(
        boundaries
    )
    with pytest.raises(ConfigError, match=re.escape(f"aux boundaries {boundaries}, read back as {list(read)}")):
        export_draft(str(draft), TARGET, dialect, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_export_command_refuses_a_folder_that_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command_args = [
        "export-draft",
        DRAFT,
        "--target",
        TARGET,
        "--dialect",
        "speculators",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command_args) == 0
    assert "speculators, 1 layer(s), boundaries [3, 6, 9]" in capsys.readouterr().out
    assert main(command_args) == 2
    assert "not empty" in capsys.readouterr().err
