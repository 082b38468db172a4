"""Which transformers attnscope runs on: what is said where a name is gone; the pages tell the same versions."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import configuration_auto, modeling_auto

from attnscope.errors import ModelError
from attnscope.model.libraries import TRIED
from attnscope.model.loaded import LoadedModel
from attnscope.seam.listen import listen
from helpers.command_line import call

ROOT = Path(__file__).parents[1]
NAMES = [
    (AttentionInterface, "get_interface", "transformers.modeling_utils.AttentionInterface.get_interface"),
    (configuration_auto, "CONFIG_MAPPING_NAMES", "configuration_auto.CONFIG_MAPPING_NAMES"),
    (modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
]


@pytest.mark.parametrize(("owner", "name", "path"), NAMES, ids=[name for _, name, _ in NAMES])
def test_a_name_that_is_gone_is_told_with_versions_that_have_it(
    owner: object, name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    done = call("heads", "the river bank")
    assert done.code == 3
    said = done.err.splitlines()[-1]
    assert said.startswith(f"attnscope: transformers {transformers.__version__} has no ")
    assert path in said
    assert f'pip install "transformers>={TRIED[0]},<={TRIED[-1]}"' in said
    assert "Traceback" not in done.err


def test_a_model_is_left_without_hooks_where_the_seam_is_gone(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [len(module._forward_hooks) for module in demo.model.modules()]  # transformers leaves some of its own
    monkeypatch.delattr(AttentionInterface, "get_interface")
    with pytest.raises(ModelError, match="get_interface"):
        listen(demo.model, torch.tensor([[5, 6]]), lambda called: None)
    assert [len(module._forward_hooks) for module in demo.model.modules()] == before


def test_the_pages_and_the_package_tell_the_same_versions() -> None:
    oldest, newest = TRIED
    page = (ROOT / "docs/versions.md").read_text("utf-8")
    assert [row for row in re.findall(r"^\| (\d\S+) \|", page, re.MULTILINE) if row in TRIED][:2] == [oldest, newest]
    short = oldest.removesuffix(".0")
    assert f'"transformers>={short},<6"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert f"transformers=={newest}\n" in (ROOT / "constraints.txt").read_text("utf-8")
    script = (ROOT / "scripts/versions.sh").read_text("utf-8")
    assert f"{oldest} {newest}" in script
