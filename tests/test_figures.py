"""Figures are tested by what they plot and say, never by their pixels."""

import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import LogNorm, to_rgba
from PIL import Image

from attnscope.errors import UsageError
from attnscope.figures import Maps, Panel, Style, fonts, save_head_maps, save_layer, save_metrics, save_overview
from attnscope.figures.colours import LIGHT_CELL, find_limits, luminance
from attnscope.figures.drawing_process import draw_in_workers, worker_count
from attnscope.figures.fonts import Fonts, fonts_for, shown_label
from attnscope.figures.metrics import metrics_figure
from attnscope.figures.overview import figures_of, overview_figure, pooled
from attnscope.figures.writer import SharedRows, drawing, encode_png, filtered
from attnscope.utils.files import write_whole
from helpers.figures import (
    BANK,
    bank_maps,
    causal,
    first_tokens,
    layer_figure,
    numbered,
    pixels,
    plain_drawing,
    shown,
    words,
)
from helpers.forks import forked, until

SVG = Style(image="svg")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_head_plots_its_values_labels_and_numbers() -> None:
    maps = bank_maps()
    figure = shown(maps, Style(), index=3)
    plotted = figure.map.mesh.get_array()
    for query in range(9):
        for key in range(9):
            if key > query:
                assert plotted.mask[query, key], "a key the query cannot see is blank"
            else:
                assert plotted[query, key] == pytest.approx(float(maps.values_HQK[3, query, key]))
    assert words(figure.ax.get_xticklabels()) == list(BANK)
    assert words(figure.ax.get_yticklabels()) == list(BANK)
    assert (figure.ax.get_xlabel(), figure.ax.get_ylabel()) == ("key", "query")
    assert figure.words.title.get_text() == "L27H3 (kv 1)"
    assert figure.bar.ax.get_ylabel() == "attention weight"
    expected = [f"{maps.values_HQK[3, q, k]:.2f}" for q in range(9) for k in range(q + 1)]
    assert "0.00" in expected
    assert words(figure.map.numbers) == ["" if number == "0.00" else number for number in expected]
    assert figure.ax.yaxis_inverted(), "query 0 is the top row"


def test_a_title_names_the_role_of_the_head_and_its_score_on_the_text(tmp_path: Path) -> None:
    roles, scores = ("induction", "", "offset-2", "sink"), (0.724, 0.9, math.nan, 0.04)
    maps = replace(bank_maps(), roles=roles, role_scores=scores, roles_by="a scan of the model")
    jobs = [(tmp_path / f"{index}.svg", maps, index) for index in range(4)]
    texts = [" ".join(re.findall("<text[^>]*>([^<]*)<", path.read_text())) for path in save_head_maps(jobs, SVG)]
    expected = ["L27H0 (kv 0)  induction 0.72", "L27H1 (kv 0)", "L27H2 (kv 1)  offset-2", "L27H3 (kv 1)  sink 0.04"]
    both, role = "role: by a scan of the model, number: its score on this text", "role: by a scan of the model"
    for text, title, said in zip(texts, expected, (both, "", role, both), strict=True):
        assert f" {title} " in f" {text} "
        assert re.findall("role: [^;]*", text) == ([said] if said else []), "the caption explains what its title has"
    assert "role: " not in save_head_maps([(tmp_path / "bare.svg", bank_maps(), 0)], SVG)[0].read_text()


def test_a_figure_that_heads_share_has_room_for_the_longest_title() -> None:
    maps = first_tokens(replace(bank_maps(), roles=("sink", "long-range-copying" * 3, "", "")), 2)
    short, long = (shown(maps, Style(), index) for index in (0, 1))
    assert short.words.title.get_text().count("\n") == 0 < long.words.title.get_text().count("\n")
    assert short.figure.get_size_inches().tolist() == long.figure.get_size_inches().tolist()


@pytest.mark.parametrize(("bin_size", "scale"), [(1, "attention weight"), (3, "weight, square-root scale")])
def test_cells_of_several_tokens_are_on_a_square_root_scale(tmp_path: Path, bin_size: int, scale: str) -> None:
    maps = replace(bank_maps(), bin_size=bin_size, starts_Q=tuple(range(0, 9 * bin_size, bin_size)))
    for path in (*save_head_maps([(tmp_path / "a.svg", maps, 0)], SVG), save_layer(tmp_path / "b.svg", maps, SVG)):
        assert f">{scale}<" in path.read_text()
    logits = replace(maps, quantity="logit")
    assert ">logit<" in save_head_maps([(tmp_path / "c.svg", logits, 0)], SVG)[0].read_text()
    linear = save_head_maps([(tmp_path / "d.svg", maps, 0)], replace(SVG, scale="linear"))[0]
    assert ">attention weight<" in linear.read_text()


def test_blank_cells_are_light_and_numbers_contrast() -> None:
    figure = shown(bank_maps(), Style())
    assert luminance(np.array(to_rgba(figure.ax.get_facecolor()))) > 0.8
    seen = np.argwhere(figure.map.seen)
    for text, (query, key) in zip(figure.map.numbers, seen, strict=True):
        colour = np.array(figure.map.cmap(figure.map.mesh.norm(figure.map.mesh.get_array()[query, key])))
        dark_ink = luminance(np.array(to_rgba(text.get_color()))) < 0.5
        assert dark_ink == (luminance(colour) > LIGHT_CELL)


@pytest.mark.parametrize(("tokens", "numbers"), [(2, 3), (12, 78), (13, 0)])
def test_numbers_up_to_twelve_tokens(tokens: int, numbers: int) -> None:
    maps = Maps(0, (0,), causal(1, tokens), numbered(tokens), numbered(tokens))
    assert len(shown(maps, Style()).map.numbers) == numbers
    assert len(shown(maps, Style(annotate=False)).map.numbers) == 0


def test_one_scale_for_all_files_unless_per_head() -> None:
    values = causal(2, 4)
    values[0, 1:] *= 0.25  # a head whose telling rows are faint
    maps = Maps(0, (0, 1), values, numbered(4), numbered(4))
    highest = [max(float(v) for row in values[h, 1:] for v in row if not math.isnan(v)) for h in range(2)]
    shared = max(highest) if max(highest) < 0.9 else 1.0
    assert shown(maps, Style(), 0).map.mesh.get_clim() == pytest.approx((0, shared))
    assert shown(maps, Style(), 1).map.mesh.get_clim() == pytest.approx((0, shared))
    assert shown(maps, Style(per_head_scale=True), 0).map.mesh.get_clim() == pytest.approx((0, highest[0]))


def test_a_row_with_one_key_does_not_set_the_scale() -> None:
    values = np.array([[[1.0, np.nan], [0.3, 0.2]]])
    limits = find_limits([values], Style())
    assert (limits.high, limits.above) == (0.3, True)


def test_log_scale_has_a_floor_that_holds_zeros() -> None:
    values = np.array([[[1, np.nan, np.nan], [0.5, 0.5, np.nan], [0, 2e-3, 0.998]]], np.float32)
    figure = shown(Maps(0, (0,), values, numbered(3), numbered(3)), Style(scale="log"))
    assert isinstance(figure.map.mesh.norm, LogNorm)
    assert figure.map.mesh.get_clim() == pytest.approx((1e-3, 1))
    assert not figure.map.mesh.get_array().mask[2, 0], "a zero is small, not blank"
    assert figure.map.mesh.get_array()[2, 0] == pytest.approx(1e-3)
    assert words(figure.map.numbers) == ["1.00", "0.50", "0.50", "0", "2e-3", "1.00"]
    assert words(figure.bar.ax.get_yticklabels())[0] == "≤1e-3"
    assert figure.bar.ax.get_ylabel() == "weight, log scale"
    assert find_limits([np.array([[1e-12, 0.4]])], Style(scale="log")).low == 1e-6


def test_mask_takes_the_sink_out_and_prints_it() -> None:
    maps = bank_maps()
    figure = shown(maps, Style(sink="mask"), index=2)
    assert figure.map.mesh.get_array().shape == (9, 8)
    assert words(figure.ax.get_xticklabels()) == list(BANK[1:])
    assert figure.strip is not None
    assert figure.strip.mesh.get_array().filled(np.nan)[:, 0] == pytest.approx(maps.values_HQK[2, :, 0])
    assert words(figure.strip.numbers) == [f"{maps.values_HQK[2, q, 0]:.2f}".replace("0.00", "") for q in range(9)]
    mean = sum(float(maps.values_HQK[2, q, 0]) for q in range(1, 9)) / 8
    assert figure.words.note.get_text() == f"without key 0 (the), mean mass {mean:.2f} (grey strip, 0 to 1)"
    assert words(figure.strip.ax.get_yticklabels()) == list(BANK)
    assert shown(maps, Style()).strip is None


def test_scores_reach_equally_far_to_both_sides_of_0() -> None:
    scores = np.log(causal(1, 4)) - 1
    scores[0, 3, 1] = -np.inf
    figure = shown(Maps(0, (0,), scores, numbered(4), numbered(4), quantity="logit"), Style())
    finite = [float(value) for value in scores.ravel() if math.isfinite(value)]
    reach = max(abs(value) for value in finite)
    assert figure.map.mesh.get_clim() == pytest.approx((-reach, reach))
    assert figure.map.mesh.get_array().mask[3, 1]
    assert figure.bar.ax.get_ylabel() == "logit"
    assert figure.map.numbers[1].get_text().startswith("−")


def test_titles_name_bins_and_kv_heads() -> None:
    labels = ("0–4", "5–9")
    maps = Maps(3, (1,), causal(1, 2), labels, labels, bin_size=5, bin_rule="sum over keys", by_kv=True)
    figure = shown(maps, Style())
    assert figure.words.title.get_text() == "L3 kv 1"
    assert figure.words.note.get_text() == "5 x 5 tokens a cell: sum over keys"


@pytest.mark.parametrize("tokens", [2, 60, 200, pytest.param(9, marks=pytest.mark.e2e)])
def test_labels_never_overlap_and_nothing_leaves_the_picture(tokens: int) -> None:
    labels = tuple(f"token{index}" for index in range(tokens))
    figure = shown(Maps(0, (0,), causal(1, tokens), labels, labels), Style(sink="mask"))
    assert figure.strip is not None
    boxes = [text.get_window_extent() for text in figure.strip.ax.get_yticklabels()]
    assert all(above.y0 >= below.y1 - 4 for above, below in pairwise(boxes))
    width, height = figure.figure.get_size_inches() * figure.figure.dpi
    for part in (figure.words.title, figure.words.note, figure.words.foot, figure.ax, figure.strip.ax, figure.bar.ax):
        box = part.get_tightbbox() if part in figure.figure.axes else part.get_window_extent()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, part
    step = 5 if tokens == 200 else 1
    assert words(figure.strip.ax.get_yticklabels()) == list(labels[::step])


@pytest.mark.parametrize("images", [["svg"], pytest.param(["png", "pdf"], marks=pytest.mark.e2e)], ids="-".join)
def test_token_text_is_never_a_formula(tmp_path: Path, images: list[str]) -> None:
    labels = ("$x", "$\\foo$", "a_b^c", "\\frac{")
    maps = Maps(0, (0,), causal(1, 4), labels, labels)
    assert words(shown(maps, Style()).ax.get_xticklabels()) == list(labels)
    for image in images:
        save_head_maps([(tmp_path / f"a.{image}", maps, 0)], Style(image=image))
    save_layer(tmp_path / "layer.png", maps, Style())
    save_overview(tmp_path / "over.png", [maps], Style(), subtitle="costs $5 and \\$")


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("a\nb\t", "a↵b⇥"),
        ("\x00", "␀"),
        ("  ", "␣␣"),
        ("x" * 16, "x" * 16),
        ("x" * 17, "x" * 15 + "…"),
        ("❤\ufe0f", "❤"),
        ("\udc80", "�"),
        ("x" * 14 + "e\u0301zz", "x" * 14 + "…"),
    ],
)
def test_shown_label(token: str, label: str) -> None:
    assert shown_label(token) == label


def test_one_warning_for_characters_without_a_font(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fonts.font_manager, "findSystemFonts", list)
    monkeypatch.setattr(fonts, "_missing", set())
    fonts._cover.cache_clear()
    labels = ("銀", "\U0001f9a5")
    maps = Maps(0, (0,), causal(1, 2), labels, labels)
    with caplog.at_level(logging.WARNING, "attnscope"):
        save_head_maps([(tmp_path / "a.png", maps, 0)], Style())
        save_layer(tmp_path / "b.png", maps, Style())
        save_overview(tmp_path / "c.png", [maps], Style(), subtitle="銀")
    fonts._cover.cache_clear()
    assert len(caplog.records) == 1
    assert all(part in caplog.text for part in ("銀", "CJK", "emoji"))
    assert [warning for warning in recwarn if "lyph" in str(warning.message)] == []


def test_no_warning_for_what_the_shipped_font_has(caplog: pytest.LogCaptureFixture) -> None:
    assert fonts_for(["the", "é", "Ж", "↵", "a\u200db"]).families == ("DejaVu Sans",)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("image", "whole"),
    [
        ("png", False),
        ("svg", False),
        ("pdf", False),
        *(pytest.param(image, True, marks=pytest.mark.e2e) for image in ("png", "svg", "pdf")),
    ],
)
def test_two_runs_write_the_same_bytes(tmp_path: Path, image: str, whole: bool) -> None:
    maps, style = first_tokens(bank_maps(heads=2), 4), Style(image=image, sink="mask")
    panels = [Panel("entropy", np.array([[0.5, np.nan]]), 0, 2)]
    for name in ("one", "two"):
        folder = tmp_path / name
        save_head_maps([(folder / f"h{i}.{image}", maps, i) for i in range(2 if whole else 1)], style)
        if whole:
            save_layer(folder / f"layer.{image}", maps, style)
            save_overview(folder / f"over.{image}", [maps], style)
            save_metrics(folder / f"metrics.{image}", panels, style, layer_labels=[0])
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == (5 if whole else 1)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    if whole:
        assert (tmp_path / "one" / f"h0.{image}").read_bytes() != (tmp_path / "one" / f"h1.{image}").read_bytes()


@pytest.mark.parametrize(
    "style",
    [Style(sink="mask", scale="log"), Style(per_head_scale=True), pytest.param(Style(), marks=pytest.mark.e2e)],
)
def test_the_fast_picture_is_the_plain_drawing(tmp_path: Path, style: Style) -> None:
    """A re-used figure against one that matplotlib draws whole: no pixel differs by more than rounding."""
    maps = first_tokens(bank_maps(heads=3), 4)
    paths = save_head_maps([(tmp_path / f"{i}.png", maps, i) for i in range(3)], style)
    fast = pixels(paths[2])
    with drawing(Fonts()):
        whole = plain_drawing(shown(maps, style, index=2).figure)
    assert np.abs(fast - whole).max() <= 2
    other = pixels(paths[1])
    assert np.abs(other - whole).max() > 50, "the comparison sees another head"


def test_rows_that_pictures_share_are_compressed_as_part_of_a_whole_stream(tmp_path: Path) -> None:
    """zlib reads the stream back, and compares its checksum; a second picture takes the stretches of the first."""
    random = np.random.default_rng(0)
    background = random.integers(0, 256, (64, 20, 3), np.uint8)
    shared, pictures = SharedRows(background), [background.copy() for _ in range(3)]
    pictures[1][20:23] = pictures[2][20:23] = 0
    pictures[2][-1, 3] = 9
    for picture in pictures:
        lines = filtered(picture)
        stream = shared.compressed(lines)
        assert zlib.decompress(stream) == lines.tobytes()
        with pytest.raises(zlib.error, match="incorrect data check"):
            zlib.decompress(stream[:-1] + bytes([stream[-1] ^ 1]))
        assert stream == SharedRows(background).compressed(lines), "earlier pictures change no byte"
        (tmp_path / "a.png").write_bytes(encode_png(picture, 120, shared=shared))
        assert (pixels(tmp_path / "a.png") == picture).all()


@pytest.fixture(scope="module", params=["forkserver", pytest.param("spawn", marks=pytest.mark.e2e)])
def beginning(request: pytest.FixtureRequest) -> str:
    """How workers begin: forked from a process that has what draws, or as ever. Both are sent their work alike."""
    if request.param == "forkserver":
        multiprocessing.set_forkserver_preload([__name__])
        first = multiprocessing.get_context("forkserver").Process(target=print)
        with pytest.MonkeyPatch.context() as patch:  # where no path is set
            patch.setenv("PYTHONPATH", ENV["PYTHONPATH"])
            first.start()
        first.join()
    return request.param


@pytest.fixture
def workers(beginning: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers that begin quickly."""
    context, asked = multiprocessing.get_context(beginning), list[str]()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: asked.append(method) or context)
    yield
    assert set(asked) == {"spawn"}


@pytest.mark.usefixtures("workers")
def test_workers_write_what_one_process_writes(tmp_path: Path) -> None:
    maps, told = first_tokens(bank_maps(), 3), []
    one = save_head_maps([(tmp_path / "one" / f"{i}.png", maps, i) for i in range(4)], Style(), workers=1)
    two = save_head_maps(
        [(tmp_path / "two" / f"{i}.png", maps, i) for i in range(4)],
        Style(),
        title=lambda maps, index: f"L{maps.layer}H{index} (kv {index // 2})",
        workers=2,
        progress=told.append,
    )
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert told == [1, 2, 3, 4]


@pytest.mark.usefixtures("workers")
def test_a_failing_worker_says_why_and_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    maps = first_tokens(bank_maps(), 2)
    jobs = [(tmp_path / "good.png", maps, 0), (tmp_path / "file" / "bad.png", maps, 1)]
    with pytest.raises(UsageError, match="cannot write"):
        save_head_maps(jobs, Style(), workers=2)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("workers")
def test_an_interrupt_stops_the_workers_and_leaves_no_half_file(tmp_path: Path) -> None:
    maps, before = first_tokens(bank_maps(), 3), {*multiprocessing.active_children()}

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_head_maps(
            [(tmp_path / f"{i}.png", maps, i % 4) for i in range(400)], Style(), workers=2, progress=interrupt
        )
    written = list(tmp_path.iterdir())
    assert len(written) < 400
    assert all(path.suffix == ".png" and Image.open(path).load() for path in written)
    assert {*multiprocessing.active_children()} <= before


DRAW_MANY = """
import sys
from pathlib import Path
import numpy as np
from attnscope.figures import Maps, Style, save_head_maps
out, workers = Path(sys.argv[1]), int(sys.argv[2])
values = np.tril(np.ones((1, 9, 9), np.float32)) / np.arange(1, 10, dtype=np.float32)[:, None]
maps = Maps(0, (0,), values, tuple("abcdefghi"), tuple("abcdefghi"))
{guard}save_head_maps([(out / f"{{i}}.png", maps, 0) for i in range(int(sys.argv[3]))], Style(), workers=workers)
"""


def script(path: Path, guard: str) -> Path:
    path.write_text(DRAW_MANY.format(guard=guard))
    return path


def parents() -> dict[int, int]:
    """Every process that runs (ended ones that nobody has waited for do not), and the one that started it."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = status.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(status.parent.name)] = int(parent)
    return found


@pytest.mark.e2e
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the list of processes from /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent_and_leave_no_half_file(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, str(script(tmp_path / "draw.py", "if __name__ == '__main__': ")), str(tmp_path / "out")]
    parent = subprocess.Popen([*command, "2", "4000"], stderr=subprocess.DEVNULL, env=ENV)
    out = tmp_path / "out"
    until(lambda: len(list(out.glob("[0-9]*.png"))) >= 3)
    workers = {one for one, above in parents().items() if above == parent.pid}
    assert len(workers) >= 2
    parent.send_signal(number)
    parent.wait()
    until(lambda: not workers & parents().keys())
    assert 3 <= len(list(out.iterdir())) < 4000
    assert all(path.suffix == ".png" and Image.open(path).load() for path in out.iterdir())


TOLD_AMID = """
import multiprocessing, os, signal, sys, threading, time
from attnscope.utils.signals import begin_worker

def work():
    begin_worker()
    with getattr(threading, sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join(600)
print(worker.exitcode)
worker.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("lock", ["_active_limbo_lock", "_shutdown_locks_lock"])
def test_a_worker_told_to_end_while_it_holds_a_lock_of_threads_ends(lock: str) -> None:
    """As at its own end, where Python counts threads: a handler that starts one would wait for it for ever."""
    if not hasattr(threading, lock):
        pytest.skip(f"this Python has no {lock}")
    done = subprocess.run([sys.executable, "-c", TOLD_AMID, lock], capture_output=True, text=True, env=ENV)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_script_without_a_guard_draws_once(tmp_path: Path) -> None:
    """The default draws here."""
    path = script(tmp_path / "draw.py", "")
    code = path.read_text().replace(", workers=workers)", ")")
    path.write_text(code)
    done = forked(path, tmp_path / "one", 2, 3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list((tmp_path / "one").iterdir())) == 3


@pytest.mark.e2e
def test_a_script_without_a_guard_that_asks_for_workers_starts_nothing(tmp_path: Path) -> None:
    """It ends with a message, and does not start itself over and over."""
    path = script(tmp_path / "draw.py", "")
    done = subprocess.run([sys.executable, path, tmp_path / "two", "2", "3"], capture_output=True, text=True, env=ENV)
    assert done.returncode == 1
    assert "workers=1" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "two").exists()


def broken(job: int) -> Path:
    raise ZeroDivisionError(f"job {job}")


def without_a_word_that_travels(job: int) -> Path:
    class LocalError(Exception):
        pass

    raise LocalError("told")


def ends(job: int) -> Path:
    os._exit(3)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (broken, "ZeroDivisionError: job 7"),
        (without_a_word_that_travels, "LocalError: told"),
        (ends, "ended early.*workers=1"),
    ],
)
def test_another_error_of_a_worker_comes_with_its_words(draw: Callable[[int], Path], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        list(draw_in_workers(draw, [7], 1))


def test_vector_files_hold_title_labels_and_numbers(tmp_path: Path) -> None:
    maps = bank_maps()
    paths = save_head_maps([(tmp_path / f"{i}.svg", maps, i) for i in range(2)], Style(image="svg"))
    text = paths[1].read_text()
    for word in ("L27H1 (kv 0)", "river", "query", "attention weight", f"{maps.values_HQK[1, 8].max():.2f}"):
        assert f">{word}</text>" in text, word


def test_workers_pay_only_for_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.figures.drawing_process.cores", lambda: 2)
    assert worker_count([81] * 24, Style()) == 1
    assert worker_count([81] * 672, Style()) == 2


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def fail(temp: Path) -> None:
        temp.write_bytes(b"half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write_whole(path, fail)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a.png", b"old")]


def test_layer_shows_every_head_in_its_place() -> None:
    maps = bank_maps(heads=5)
    with drawing(Fonts()):
        figure = layer_figure(maps, Style())
    ax = figure.axes[0]
    array, columns = ax.images[1].get_array(), 3  # five heads: three columns, two rows
    tall, wide = (array.shape[0] - 9, (array.shape[1] - 9) // 2)
    for head in range(5):
        down, right = head // columns * tall, head % columns * wide
        tile = array[down : down + 9, right : right + 9].filled(np.nan)
        np.testing.assert_allclose(tile, maps.values_HQK[head], rtol=1e-6)
    assert array[tall:, 2 * wide :].mask.all(), "no sixth head"
    assert words(ax.texts) == ["H0 (kv 0)", "H1 (kv 0)", "H2 (kv 1)", "H3 (kv 1)", "H4 (kv 2)"]
    assert words(ax.get_yticklabels()) == list(BANK) * 2
    assert words(ax.get_xticklabels()) == list(BANK) * 2, "none below a place without a map"


def test_panels_of_a_layer_name_the_role_of_each_head_and_its_score(tmp_path: Path) -> None:
    roles, scores = ("induction", "", "offset-2", "sink"), (0.724, 0.9, math.nan, 0.04)
    maps = replace(bank_maps(), roles=roles, role_scores=scores, roles_by="a scan of the model")
    style = Style(sink="mask")
    with drawing(Fonts()):
        [(_, layer)] = figures_of([(tmp_path / "layer.png", maps)], style)
        titles, subtitle = layer.ax.texts, layer.words.note
        parts = [text.get_text().partition("\n")[::2] for text in titles]
        assert [role for _, role in parts] == ["induction 0.72", "", "offset-2", "sink 0.04"]
        assert all(re.fullmatch(r"H\d \(kv \d\) · \d\.\d\d", name) for name, _ in parts)
        highest = max(text.get_window_extent().y1 for text in titles)
        assert highest <= subtitle.get_window_extent().y0, "there is room for two lines above the first row"
    drawn = save_layer(tmp_path / "layer.svg", maps, SVG).read_text()
    foot = " ".join(re.findall("<text[^>]*>([^<]*)<", drawn))
    assert "role: by a scan of the model, number: its score on this text" in foot
    in_print = save_layer(tmp_path / "print.svg", maps, replace(SVG, width="page")).read_text()
    assert ">H0 (kv 0)<" in in_print
    assert "induction" not in in_print, "a paper has its own words"


def test_layer_strips_carry_the_removed_mass() -> None:
    maps = bank_maps(heads=1)
    with drawing(Fonts()):
        figure = layer_figure(maps, Style(sink="mask"))
    strip = figure.axes[0].images[2].get_array()
    assert strip.filled(np.nan)[:, 0] == pytest.approx(maps.values_HQK[0, :, 0])
    assert strip[:, 1:].mask.all()
    mean = sum(float(maps.values_HQK[0, q, 0]) for q in range(1, 9)) / 8
    assert words(figure.axes[0].texts) == [f"H0 (kv 0) · {mean:.2f}"]


def test_overview_puts_layers_down_and_heads_across() -> None:
    layers = [bank_maps(heads=3, layer=layer, seed=layer) for layer in (0, 2)]
    layers[1] = Maps(2, (1, 5), causal(2, 9, 2), BANK, BANK)
    with drawing(Fonts()):
        figure = overview_figure(layers, Style(), "demo")
    ax = figure.axes[0]
    array = ax.images[1].get_array()
    assert words(ax.get_yticklabels()) == ["0", "2"]
    assert words(ax.get_xticklabels()) == ["0", "1", "2", "5"]
    pitch = (array.shape[1] - 9) // 3
    for head, column in ((0, 1), (1, 3)):
        tile = array[-9:, column * pitch : column * pitch + 9].filled(np.nan)
        np.testing.assert_allclose(tile, layers[1].values_HQK[head], rtol=1e-6)
    assert array[-9:, :9].mask.all(), "layer 2 has no head 0"
    assert [text.get_text() for text in figure.texts] == [
        "2 layers × 4 heads",
        "demo",
        "grey: not visible to the query",
    ]


def test_large_thumbnails_keep_the_greatest_weight_of_a_square() -> None:
    values = causal(2, 7)
    small = pooled(values, 3, 2)
    assert small.shape == (2, 3, 4)
    for head, row, column in np.ndindex(2, 3, 4):
        cells = [
            float(values[head, query, key])
            for query in range(3 * row, min(7, 3 * row + 3))
            for key in range(2 * column, min(7, 2 * column + 2))
            if key <= query
        ]
        assert small[head, row, column] == pytest.approx(max(cells, default=math.nan), nan_ok=True)
    large = Maps(0, tuple(range(64)), causal(64, 90), numbered(90), numbered(90))
    with drawing(Fonts()):
        assert "each cell the greatest of 3 x 3" in overview_figure([large], Style()).texts[1].get_text()


def test_per_head_scale_shows_shares_of_each_head() -> None:
    values = np.array([[[1, np.nan], [0.1, 0.2]], [[1, np.nan], [0.4, 0.8]]], np.float32)
    with drawing(Fonts()):
        figure = layer_figure(Maps(0, (0, 1), values, ("a", "b"), ("a", "b")), Style(per_head_scale=True))
    array = figure.axes[0].images[1].get_array()
    np.testing.assert_allclose(array[-1].compressed(), [0.5, 1, 0.5, 1], rtol=1e-6)


def test_many_heads_are_numbered_where_there_is_room() -> None:
    panel = Panel("sink", np.random.default_rng(0).random((32, 64)), 0, 1)
    with drawing(Fonts()):
        figure = metrics_figure([panel], Style(), [str(i) for i in range(32)])
        figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
    assert len(boxes) >= 7
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_bad_choices_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="auto, linear, sqrt or log, got 'cubic'"):
        Style(scale="cubic")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="logarithms"):
        save_head_maps([(tmp_path / "a.png", replace(bank_maps(), quantity="logit"), 0)], Style(scale="log"))
    with pytest.raises(
        ValueError, match="weight or logit or norm or share or difference or signed or channel or size, got 'scores'"
    ):
        replace(bank_maps(), quantity="scores")
    with pytest.raises(ValueError, match="one quantity"):
        save_head_maps([(tmp_path / q, replace(bank_maps(), quantity=q), 0) for q in ("weight", "logit")], Style())
    with pytest.raises(UsageError, match="viridis"):
        save_head_maps([(tmp_path / "a.png", bank_maps(), 0)], Style(cmap="virids"))
    with pytest.raises(ValueError, match=r"\(1, 2, 2\), got \(1, 3, 3\)"):
        Maps(0, (0,), causal(1, 3), ("a", "b"), ("a", "b"))
    with pytest.raises(ValueError, match="one shape"):
        save_metrics(tmp_path / "m.png", [Panel("a", np.zeros((2, 2)), 0, 1)], Style(), layer_labels=[0])
