"""Which versions attnscope runs on: what is said where a name of transformers is gone; pages, pins and what is imported
tell the same.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import configuration_auto, modeling_auto

from attnscope.errors import ModelError
from attnscope.hooks.listen import listen
from attnscope.model import tasks
from attnscope.model.libraries import TRIED
from attnscope.model.loaded import LoadedModel
from helpers.command_line import call

ROOT = Path(__file__).parents[1]
NAMES = [
    (AttentionInterface, "get_interface", "transformers.modeling_utils.AttentionInterface.get_interface"),
    (configuration_auto, "CONFIG_MAPPING_NAMES", "configuration_auto.CONFIG_MAPPING_NAMES"),
    (modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Extras of what a user calls. Those for work on attnscope are left out: an import of the package is none of theirs.
EXTRAS = {name: items for name, items in PROJECT["optional-dependencies"].items() if name not in ("docs", "test")}
NOT_STATED = {
    "_typeshed",  # of type checkers, there for them alone
    "triton",  # comes with torch for CUDA, without which nothing imports it
}


def requirements(items: list[str]) -> dict[str, Requirement]:
    """By the names of their distributions, in their canonical spelling."""
    return {canonicalize_name(item.name): item for item in map(Requirement, items)}


def imported(tree: ast.Module) -> Iterator[str]:
    """The packages that a module imports anywhere, or looks for with `find_spec`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Name("find_spec"), args=[ast.Constant(str(module))]):
                yield module.partition(".")[0]


@pytest.fixture(autouse=True)
def nothing_asked_yet() -> None:
    """transformers is asked for its names once in a process: here as in one that has just begun."""
    tasks._types_with.cache_clear()


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
    tried = re.findall(r"^\| \w+ \| (\d\S+) \|", page, re.MULTILINE)
    assert {oldest, newest} <= set(tried)
    short = oldest.removesuffix(".0")
    assert f'"transformers>={short},<6"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert f"transformers=={newest}\n" in (ROOT / "constraints.txt").read_text("utf-8")
    script = (ROOT / "scripts/versions.sh").read_text("utf-8")
    assert f"{oldest} {newest}" in script


@pytest.mark.e2e
def test_what_is_imported_is_stated() -> None:
    """Each package is in the dependencies or in an extra, and not merely there because another one brings it."""
    stated = requirements([*PROJECT["dependencies"], *(item for items in EXTRAS.values() for item in items)])
    distributions = packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "attnscope").rglob("*.py"))
        for name in imported(ast.parse(path.read_text("utf-8")))
        if name not in sys.stdlib_module_names | NOT_STATED | {"attnscope"}
        if not stated.keys() & {canonicalize_name(other) for other in distributions.get(name, [name])}
    }
    assert missing == set()


def test_a_package_has_one_lowest_version_and_a_pin_that_is_not_below_it() -> None:
    pins = requirements((ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:])
    lowest: dict[str, set[str]] = {}
    for items in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for name, item in requirements(items).items():
            lowest.setdefault(name, set()).add(str(item.specifier))
            [pin] = pins[name].specifier
            assert item.specifier.contains(pin.version), f"{pins[name]} is not {item}"
    assert {name: found for name, found in lowest.items() if len(found) > 1} == {}
