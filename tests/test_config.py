"""Configuration files: what they may say, and what they are told when they say something else."""

from pathlib import Path

import pytest

from attnscope.cli.config import configured, keys_of, read_config
from attnscope.cli.heads import GROUPS
from attnscope.cli.option_groups import parameters
from attnscope.errors import UsageError
from helpers.commands import context

KEYS = keys_of(*GROUPS)
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def of_file(path):
    """What `heads` takes of a file, by field."""
    return configured(context("heads", "--config", str(path)), GROUPS, KEYS)


def test_values_are_text_as_typed(tmp_path):
    text = "model: demo\ntop: 3\nmin_weight: 1\noffline: true\ntop_k: all\nselect: 27.3\n"
    expected = {"model": "demo", "top": "3", "min_weight": "1", "offline": "true", "top_k": "all", "select": "27.3"}
    assert read_config(written(tmp_path, text), KEYS) == expected


def test_values_are_what_they_would_be_if_typed(tmp_path):
    text = "model: demo\ntop: 3\nmin_weight: 1\noffline: true\ntop_k: all\nselect: '27.3'\nout: runs\ndefine: [a=1]\n"
    expected = {"model": "demo", "top": "3", "min_weight": 1.0, "offline": True, "top_k": "all", "select": "27.3"}
    assert of_file(written(tmp_path, text)) == expected | {"out": Path("runs"), "define": ["a=1"]}
    text = "top: all\noffline: 1\nannotate: no\nrevision: 123\nselect: 27.10\nmin_weight: 1e-3\n"
    expected = {"top": "all", "offline": True, "annotate": False, "revision": "123", "select": "27.10"}
    assert of_file(written(tmp_path, text)) == expected | {"min_weight": 0.001}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "sink: null\n", "revision:\n"])
def test_what_says_nothing_is_left_out(tmp_path, text):
    assert read_config(written(tmp_path, text), KEYS) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk: 3", "unknown key 'topk'; did you mean 'top_k'?"),
        ("top-k: 3", "unknown key 'top-k'; did you mean 'top_k'?"),
        ("modle: demo", "unknown key 'modle'; did you mean 'model'?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("zzqq: 1", "unknown key 'zzqq'; the keys are model, device"),
        ("7: 1", "unknown key '7'"),
        ("model: a\nmodel: b", "'model' is given twice in line 2"),
        ("model: [a\ntop: 1", "is not YAML: expected ',' or ']', but got ':' in line 2"),
        ("model: demo\n  top: 1", "in line 2"),
        ("model: *nothing", "undefined alias 'nothing' in line 1"),
        ("[a]: 1", "in line 1"),
        ("text: \x07", "is not YAML"),
        ("- model", "holds a list, expected options"),
        ("demo", "holds a str, expected options"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_refusals_name_the_key_and_the_next_step(tmp_path, text, says):
    with pytest.raises(UsageError) as refusal:
        read_config(written(tmp_path, text), KEYS)
    assert says in str(refusal.value)
    assert "run.yaml" in str(refusal.value)
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top: many", "top: expected a number from 1, or all, got 'many'"),
        ("top: true", "top: expected a number from 1, or all, got 'true'"),
        ("top: 2.5", "top: expected a number from 1, or all, got '2.5'"),
        ("offline: maybe", "offline: expected true or false, got 'maybe'"),
        ("min_weight: 1,5", "min_weight: expected a number from -1,000,000 to 1,000,000, got '1,5'"),
        ("text: [a, b]", "text: expected text, got ['a', 'b']"),
        ("define: a=1", "define: expected a list of texts, got 'a=1'"),
        ("define: [[a=1]]", "define: expected a list of texts, got [['a=1']]"),
        ("scale: cubic", "scale: expected auto, linear, sqrt or log, got 'cubic'"),
        ("quantize: half", "quantize: expected 8bit or 4bit, got 'half'"),
    ],
)
def test_a_value_is_what_the_option_takes(tmp_path, text, says):
    with pytest.raises(UsageError) as refusal:
        of_file(written(tmp_path, text))
    assert str(refusal.value).endswith(f"/run.yaml: {says}; correct the value")  # a long path is cut in its middle


def test_a_section_says_how_pictures_look(tmp_path):
    text = "model: demo\nfigures: {dpi: 200, cmap: magma, annotate: no, image: svg, kinds: overview}\n"
    expected = {"dpi": 200, "cmap": "magma", "annotate": False, "image": "svg", "figures": "overview"}
    assert of_file(written(tmp_path, text)) == {"model": "demo"} | expected
    assert of_file(written(tmp_path, "figures: overview,heads\ndpi: 200")) == {"figures": "overview,heads", "dpi": 200}
    assert of_file(written(tmp_path, "figures: {dpi: null}\nsink: mask")) == {"sink": "mask"}
    assert of_file(written(tmp_path, "figures: {}")) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("figures: {dpy: 3}", "figures: unknown key 'dpy'; did you mean 'dpi'?"),
        ("figures: {model: demo}", "figures: unknown key 'model'"),
        ("figures: {7: 1}", "figures: unknown key '7'"),
        ("dpi: 3\nfigures: {dpi: 4}", "'dpi' is given twice, in figures too; leave out one of them"),
        ("figures: {dpi: 3, dpi: 4}", "'dpi' is given twice in line 1"),
        ("figures: {dpi: wide}", "dpi: expected a whole number from 10 to 1,200, got 'wide'"),
        ("figures: [dpi]", "figures: expected text, got ['dpi']"),
    ],
)
def test_what_a_section_cannot_say(tmp_path, text, says):
    with pytest.raises(UsageError) as refusal:
        of_file(written(tmp_path, text))
    assert "/run.yaml" in str(refusal.value)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="there is no file"):
        read_config(tmp_path / "absent.yaml", KEYS)
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path, KEYS)
    (tmp_path / "latin.yaml").write_bytes(b"text: caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8: byte 9"):
        read_config(tmp_path / "latin.yaml", KEYS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_files_are_valid_and_name_their_command(path):
    assert read_config(path, KEYS)["model"]
    assert f"attnscope heads --config configs/{path.name}" in path.read_text(encoding="utf-8")


def test_three_files_are_shipped():
    assert {"demo.yaml", "llama-3.2-3b.yaml", "long-context.yaml"} <= {path.name for path in CONFIGS}


def test_the_keys_are_the_options_of_heads():
    assert set(KEYS) == set(parameters(*GROUPS)) - {"config", "from_", "given"}
