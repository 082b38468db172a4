"""The compiled kernel: shapes, threads, broken numbers, how it is kept and who asks it.

Shapes: B text, H head, G kv head, Q query, K key, D width of q and k, V width of v.
"""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llvmlite import binding
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import attnscope
from attnscope.attention import spec as visibility
from attnscope.attention import tiling as small
from attnscope.attention.kernels_cpu import CompiledAttention, object_code, usable
from attnscope.attention.kernels_cpu import layout as shapes
from attnscope.attention.kernels_cpu import sweep as operator
from attnscope.attention.kernels_cpu import sweep as sweeping
from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import Entropy, Features, GroupMass, Holding, Received, SumOfSquares, TopK
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.errors import UsageError
from attnscope.export.export import manifest
from attnscope.hooks.engines import ENGINES, engine_named
from helpers.dispatched import thread_count

HEADS, GROUPS = 6, 2


def spec_of(queries: int, keys: int, depth: int = 16, width: int = 16, **more) -> AttentionSpec:
    """Two texts with queries at the end of the keys."""
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (
        torch.randn(2, heads, length, size, generator=generator)
        for heads, length, size in ((HEADS, queries, depth), (GROUPS, keys, depth), (GROUPS, keys, width))
    )
    return AttentionSpec(q * 2, k, v, depth**-0.5, Visibility(queries, keys, more.pop("mask", None)), **more)


def asked_of(spec: AttentionSpec) -> list:
    """Of every kind one question whose answer depends on the order of sums."""
    B, Q, K = spec.batch, spec.visible.queries, spec.visible.keys
    generator = torch.Generator().manual_seed(1)
    groups_BQ, groups_BK = (torch.randint(-1, 4, (B, n), generator=generator) for n in (Q, K))
    share_BQ, features_KM = torch.rand(B, Q, generator=generator), torch.randn(K, 3, generator=generator)
    return [Entropy(), TopK(5), Received(share_BQ), GroupMass(groups_BQ, groups_BK), Features(features_KM)]


@pytest.mark.parametrize(("depth", "width"), [(40, 24), (80, 80), (128, 33), (256, 64), (7, 1)])
def test_any_width_of_heads(depth: int, width: int) -> None:
    spec = spec_of(50, 50, depth, width)
    compiled, dense = CompiledAttention(spec, with_output=True), DenseAttention(spec.weights(0, 50), spec.visible, spec)
    assert_close(compiled.entropy(), dense.entropy(), atol=1e-5, rtol=1e-5)
    v_BHKV = spec.v_BGKV.repeat_interleave(HEADS // GROUPS, 1)
    assert_close(compiled.output(), (dense.dense() @ v_BHKV).transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 300), (5, 70), (63, 64), (65, 65), (129, 300), (300, 300)])
def test_any_number_of_rows(queries: int, keys: int) -> None:
    spec = spec_of(queries, keys)
    compiled, dense = CompiledAttention(spec), DenseAttention(spec.weights(0, queries), spec.visible, spec)
    for question in asked_of(spec):
        found, expected = compiled.ask(question), dense.ask(question)
        if isinstance(question, TopK):
            found, expected = found[0], expected[0]
        assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert set(compiled.answered_by.values()) == {"numba"}


@pytest.mark.parametrize("size", [0.02, 1.0, 3.0])
@pytest.mark.parametrize(("texts", "tokens", "depth"), [(40, 7, 16), (2, 300, 64)])
def test_it_is_as_far_from_float64_as_the_dense_operator(texts: int, tokens: int, depth: int, size: float) -> None:
    """At most twice: its sums run in another order and its exp is its own. Logits are from near 0 to about 100."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(texts, heads, tokens, depth, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    spec = AttentionSpec(q * 2 * size, k * size, v, depth**-0.5, Visibility(tokens, tokens, None))
    k_BHKD, v_BHKV = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (spec.k_BGKD, spec.v_BGKV))
    exact = [part.double() for part in (spec.q_BHQD, k_BHKD, v_BHKV)]
    true_BQHV = scaled_dot_product_attention(*exact, is_causal=True, scale=spec.scale).transpose(1, 2)

    def off(output_BQHV: torch.Tensor) -> float:
        return float((output_BQHV - true_BQHV).square().mean().sqrt())

    dense = off((spec.weights(0, tokens) @ v_BHKV).transpose(1, 2))
    assert 0 < off(CompiledAttention(spec).output()) < 2 * dense
    assert off(CompiledAttention(replace(spec, scale=spec.scale * 1.01)).output()) > 10 * dense


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_the_same_bits_on_one_core_and_on_two(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """Many jobs, whose sums over rows are added in the jobs' order and not in that in which they end."""
    monkeypatch.setattr(sweeping, "JOB_SCORES", (2**12, 2**12))
    mask = torch.ones(1, 1, 500, 500, dtype=torch.bool).tril() if masked else None
    spec = spec_of(500, 500, mask=mask, sinks=torch.zeros(1, HEADS, 1))
    asked = asked_of(spec)
    found = []
    for threads in (1, 2, 3):
        with thread_count(threads):
            P = CompiledAttention(spec, with_output=True)
            answers = P.together(asked)
            found.append([P.output(), *answers.pop(asked[1]), *answers.values()])
    for other in found[1:]:
        assert_close(other, found[0], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_numbers_are_not_hidden(broken: float) -> None:
    """A logit that is no number shows in the rows that see it, as it does in the tiles, and in no other."""
    spec = spec_of(90, 90)
    spec.k_BGKD[0, 0, 70] = broken
    found, expected = (kind(spec).ask(SumOfSquares()) for kind in (CompiledAttention, TiledAttention))
    assert torch.equal(found.isnan(), expected.isnan())
    assert found.isnan().any()
    assert_close(found[:, 3:], expected[:, 3:], atol=1e-5, rtol=1e-5)


def test_what_the_kernel_does_not_know_is_left_to_the_tiles() -> None:
    P = CompiledAttention(spec_of(40, 40))
    P.together([Entropy(), Holding(95), TopK(40), TopK(3)])
    assert P.answered_by == {"Entropy": "numba", "Holding": "tiles", "TopK": "tiles"}


def test_it_is_compiled_once_and_loaded_without_numba(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    """The code is made where it may be written; where not, once per process."""
    name, code = object_code._object()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    made: list[int] = []
    monkeypatch.setattr(object_code, "_compiled", lambda: (made.append(1), (name, code))[1])
    with caplog.at_level(logging.WARNING, "attnscope"):
        assert object_code._object() == object_code._object() == (name, code)
    assert len(made) == 1
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "compiling the CPU kernel, once per machine"
    ]
    loaded = set(sys.modules)
    object_code._loaded_by_llvm(name, code)
    assert not {module for module in set(sys.modules) - loaded if module.startswith("numba")}
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert object_code._object() == (name, code)
    assert len(made) == 2


@pytest.fixture(scope="module")
def kernel() -> tuple[str, bytes]:
    name, code = object_code._object()
    if not (code.startswith(object_code.ELF) and code[18] == object_code.X86_64):
        pytest.skip("objects of this system are loaded by LLVM")
    return name, code


def test_an_object_is_put_into_memory_without_llvm(monkeypatch: pytest.MonkeyPatch, kernel: tuple[str, bytes]) -> None:
    """It answers with the same bits as where LLVM has loaded it."""
    spec, answers = spec_of(200, 200), []
    asked = asked_of(spec)
    for load in (object_code.linked, object_code._loaded_by_llvm):
        function = object_code.function_at(load(*kernel))
        monkeypatch.setattr(sweeping, "compiled_sweep", lambda function=function: function)
        answers.append(CompiledAttention(spec).together(asked))
    for question, found in answers[0].items():
        assert_close(found, answers[1][question], atol=0, rtol=0, equal_nan=True)
    for name in ("create_mcjit_compiler", "get_host_cpu_name", "get_host_cpu_features"):
        monkeypatch.setattr(binding, name, None)
    monkeypatch.delattr(binding, "parse_assembly")
    assert object_code._loaded(*object_code._object())


def test_an_object_that_is_not_whole_or_refers_elsewhere_is_left_to_llvm(
    monkeypatch: pytest.MonkeyPatch, kernel: tuple[str, bytes]
) -> None:
    name, code = kernel
    sections = int.from_bytes(code[40:48], "little")
    table = next(at for at in range(sections, len(code), 64) if code[at + 4] == object_code.RELOCATIONS)
    first = int.from_bytes(code[table + 24 : table + 32], "little")
    places = (0, 4, 18, first + 6, first + 8, first + 15, first + 20)  # of the header; of an address
    changed = [code[:place] + bytes([code[place] ^ 127]) + code[place + 1 :] for place in places]
    monkeypatch.setattr(object_code, "_loaded_by_llvm", lambda name, code: 1)
    for other in (*changed, *(code[:cut] for cut in range(0, len(code), 499))):
        assert object_code._loaded(name, other) == 1
    assert object_code._loaded("no such function", code) == 1
    assert object_code._loaded(name, code) != 1


def test_code_is_kept_for_one_processor_and_one_width_of_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What calls the kernel packs by that width, which PyTorch can be told."""
    keys = [object_code._key()]
    monkeypatch.setattr(object_code, "LANES", 1)
    keys.append(object_code._key())
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    keys.append(object_code._key())
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma")
    keys.append(object_code._key())
    rows = "vendor_id\t: A\ncpu family\t: 6\nmodel\t: 1\nmodel name\t: B\nstepping\t: 1\nflags\t: fma {}\n\nflags\t: {}"
    for name, text in (("one", rows.format("avx2", "")), ("two", rows.format("", "avx2")), ("arm", "Features: asimd")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(object_code, "PROCESSORS", str(tmp_path / name))
        keys.append(object_code._key())
    assert len(set(keys)) == 7
    assert object_code._description() == object_code._processor()


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "lanes"), [("avx2", 8), ("default", 4)])
def test_other_processors_registers_give_the_same(capability: str, lanes: int, tmp_path: Path) -> None:
    """AVX2's of 8 numbers, and of 4, as NEON's are: compiled for them, and run here."""
    have = binding.get_host_cpu_features()
    if not (have.get("avx2") and have.get("fma")):
        pytest.skip("this processor has no AVX2")
    told = {"ATEN_CPU_CAPABILITY": capability, "NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    told["NUMBA_CPU_FEATURES"] = ",".join(
        f"{'-' if name.startswith(('avx512', 'avx10', 'amx')) or not there else '+'}{name}"
        for name, there in have.items()
    )
    for code in (
        f"from attnscope.attention.kernels_cpu import layout; assert layout.LANES == {lanes}",
        f"import pytest; exit(pytest.main(['-q', '-n', '0', '-k', 'any_ or same_bits or broken', {__file__!r}]))",
    ):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_without_numba_the_tiles_answer_and_the_name_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "PAYS", 0)
    spec = spec_of(40, 40)
    assert usable(spec)
    assert isinstance(ENGINES["fused"].operator(spec), CompiledAttention)
    for module in ("attnscope.attention.kernels_cpu", "attnscope.attention.kernels_cpu.sweep"):
        monkeypatch.setattr(f"{module}.installed", lambda: False)
    assert type(ENGINES["fused"].operator(spec)) is small.SmallAttention
    monkeypatch.setattr(small, "SMALL", 40 * 40)  # of one head: the call has more
    assert type(ENGINES["fused"].operator(spec)) is TiledAttention
    with pytest.raises(UsageError, match=r"^the engine numba needs Numba, .*pip install 'attnscope\[fast\]'"):
        engine_named("numba")


def test_a_long_call_gives_back_what_its_threads_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(sweeping, "give_back_memory", lambda: trimmed.append(1))
    monkeypatch.setattr(sweeping, "LONG", 50)
    for tokens in (49, 50):
        CompiledAttention(spec_of(tokens, tokens)).entropy()
    assert trimmed == [1]


def test_the_kernel_hides_a_key_by_the_logit_of_masks() -> None:
    assert shapes.HIDDEN == visibility.HIDDEN


def test_short_texts_do_not_load_it() -> None:
    assert not usable(spec_of(300, 300))
    assert type(ENGINES["fused"].operator(spec_of(300, 300))) is TiledAttention


@pytest.mark.parametrize("listening", [False, True])
def test_the_manifest_says_who_read_what(demo, listening: bool) -> None:
    seen = attnscope.capture(demo, "the bank by the river", engine="numba", listen=listening)
    said = manifest(seen, {}, {})
    assert (said["engine"], said["output"]) == ("numba", "model" if listening else "attnscope")
    assert said["answered_by"]["Entropy"] == said["answered_by"]["TopK"] == ["numba"]
    eager = attnscope.capture(demo, "the bank by the river", engine="eager")
    assert manifest(eager, {}, {})["answered_by"] == {}
    for head, expected in zip(seen.heads, eager.heads, strict=True):
        assert head.score["entropy"] == pytest.approx(expected.score["entropy"], abs=1e-5)
