"""The demo's atlas, its folder, a scan that goes on, and what the command says."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from attnscope.errors import InputError, UsageError
from attnscope.model.loading import wrap
from attnscope.study import scan as scan_room
from attnscope.study.atlas import kept as read_back
from attnscope.study.atlas import spelled
from attnscope.study.findings import compare, read
from attnscope.study.picture import probe_panel
from attnscope.study.pool import token_pool
from attnscope.study.scan import plan, scan
from helpers.command_line import call
from helpers.families import tiny_model

EXPECTED = {"induction": {"L3H0", "L3H1"}, "previous-token": {"L1H5", "L2H1"}, "offset-2": {"L1H4"}}


@pytest.fixture(scope="module")
def kept(demo, tmp_path_factory):
    """The demo's atlas, and the folder it was written to."""
    folder = tmp_path_factory.mktemp("atlas")
    return scan(demo, plan(demo), folder), folder


def heads_of(roles):
    """{role: its heads}."""
    return {role: {head for head, names in roles.items() if role in names} for role in EXPECTED}


def test_the_demos_heads_are_named(kept):
    found, folder = kept
    assert heads_of(spelled(found.roles)) == EXPECTED
    assert heads_of(json.loads((folder / "atlas.json").read_text())["roles"]) == EXPECTED


def test_a_kept_atlas_reads_back_as_it_was(kept, tmp_path):
    found, folder = kept
    again = read_back(folder)
    assert (again.heads, again.roles, again.facts) == (found.heads, found.roles, found.facts)
    assert again.table().equals(found.table())
    assert again.named("previous-token") == {1: (5,), 2: (1,)}
    assert again.named("retrieval") == {}
    with pytest.raises(InputError, match="holds no whole atlas"):
        read_back(tmp_path)
    (tmp_path / "atlas.json").write_text(json.dumps({"schema": "atlas/0"}))
    shutil.copy(folder / "atlas.parquet", tmp_path)
    with pytest.raises(InputError, match="'atlas/1' is read"):
        read_back(tmp_path)


def test_a_stranger_has_no_induction_head(real_model_folder):
    if "stories" not in real_model_folder.name:
        pytest.skip("said of the other model")
    from attnscope.model.loading import LoadOptions, load

    loaded = load(LoadOptions(model=str(real_model_folder)))
    assert not [names for names in scan(loaded, plan(loaded, sequences=32)).roles.values() if "induction" in names]


def test_the_picture_has_a_panel_per_probe_and_greys_who_is_not_named(kept):
    found, folder = kept
    assert (folder / "probes.png").read_bytes().startswith(b"\x89PNG")
    layers = [0, 1, 2, 3]
    [one] = [one for one in found.findings if (one.probe, one.against) == ("induction p50", "other")]
    panel = probe_panel(found, one, layers)
    assert panel.values_LH[3, :2] == pytest.approx(one.effects.effect[18:20])
    assert np.argwhere(~panel.behind_LH).tolist() == [[3, 0], [3, 1]]


def test_the_table_holds_every_contrast_of_every_head(kept):
    found, folder = kept
    table = pq.read_table(folder / "atlas.parquet")
    assert table.equals(found.table().cast(table.schema))
    assert len(table) == 24 * len(found.findings)
    row = next(row for row in table.to_pylist() if (row["layer"], row["head"], row["probe"]) == (3, 0, "induction p50"))
    assert row["against"] == "other"
    assert row["low_all"] <= row["low"] <= row["effect"] <= row["high"] <= row["high_all"]
    assert row["effect"] == pytest.approx(row["score"] - row["null"])
    assert row["n"] == 64


def test_a_scan_that_was_stopped_goes_on_and_ends_the_same(demo, kept, tmp_path, monkeypatch):
    found, folder = kept
    shutil.copytree(folder / "readings", tmp_path / "readings")
    left = sorted((tmp_path / "readings").glob("*.npz"))[:2]
    for path in left:
        path.unlink()
    read_now = []

    def watched(loaded, trial, advance):
        read_now.append(trial.name.replace(" ", "-"))
        return read(loaded, trial, advance)

    monkeypatch.setattr(scan_room, "read", watched)
    again = scan(demo, plan(demo), tmp_path)
    assert sorted(read_now) == [path.stem for path in left]
    assert again.table().equals(found.table())


def test_another_scan_is_not_mixed_in(demo, kept):
    _, folder = kept
    with pytest.raises(UsageError, match="holds another scan: seed, ids_sha256 differ"):
        scan(demo, plan(demo, seed=1), folder)


def test_the_pool_leaves_out_what_is_no_ordinary_token(demo):
    pool = token_pool(demo)
    texts = [demo.tokenizer.decode([token]) for token in pool]
    assert not set(pool) & {*demo.tokenizer.all_special_ids}
    assert all(text.strip().isprintable() and text.strip() for text in texts)
    every = sorted(demo.tokenizer.get_vocab().values())
    assert every.index(pool[0]) > 100
    assert every.index(pool[-1]) < len(every) - 100
    with pytest.raises(InputError, match="names the id 99999"):
        token_pool(demo, [*range(5, 50), 99999])


@pytest.mark.slow
def test_random_weights_name_nobody(demo):
    """20 models at each of 3 scales of their weights: a family-wise p of 0.05 comes in 5 % of them."""
    fired = {}
    for scale in (0.02, 0.1, 0.3):
        small = []
        for seed in range(20):
            loaded = wrap(tiny_model("llama", seed=seed, initializer_range=scale), demo.tokenizer)
            planned = plan(loaded, seed=seed, pool=range(5, 90))
            trials = [one for one in planned.trials if one.name in ("repeated p10", "repeated p25")]
            findings = [one for trial in trials for one in compare(trial, read(loaded, trial), seed)]
            assert all(np.nan_to_num(one.effects.low_all, nan=-1).max() < 0.3 for one in findings)
            small.append(min(one.effects.p.min() for one in findings if one.probe == "induction p25"))
        fired[scale] = sum(p <= 0.05 for p in small)
    assert max(fired.values()) <= 4
    assert sum(fired.values()) <= 8


# the command


def test_the_command_prints_and_writes(kept, tmp_path):
    """From the readings of the same scan, which it would else make again."""
    shutil.copytree(kept[1] / "readings", tmp_path / "a" / "readings")
    result = call("scan", "demo", "-q", "--out", str(tmp_path / "a"), columns=120)
    assert (result.code, result.err) == (0, "")
    first = result.out.decode().splitlines()
    assert any(line.split()[:3] == ["L3H0", "induction", "sink"] for line in first)
    assert (tmp_path / "a" / "atlas.parquet").exists()


def test_what_it_would_take_is_said_before_anything_is_read(tmp_path):
    result = call("scan", "demo", "--dry-run", "--out", str(tmp_path / "a"))
    assert result.code == 0
    assert b"tokens x 4 layers" in result.out
    assert not (tmp_path / "a").exists()


def test_few_sequences_have_no_interval_and_no_role():
    result = call("scan", "demo", "--sequences", "8", "-q", "--format", "jsonl")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert {row["low_all"] for row in rows} == {None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--probe", "inducton"], "there is no probe 'inducton'; the probes are induction p10"),
        (["--sequences", "1"], "Invalid value for '--sequences'"),
        (["--pool", "nowhere.txt"], "there is no file nowhere.txt"),
    ],
)
def test_bad_inputs_in_one_line(arguments, said):
    result = call("scan", "demo", "--sequences", "4", "-q", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (result.code, b"", 1)
    assert result.code in (2, 4)
    assert said in result.err
