"""Probes against plain sums over output_attentions, and against a decoder whose heads are built to do one thing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from attnscope.errors import InputError
from attnscope.hooks.projections import output_projections
from attnscope.model.loading import wrap
from attnscope.model.selection import LINEAR, stack_of
from attnscope.studies.atlas import ScanStudy, plan, read_trial
from attnscope.studies.copying import copying_of
from attnscope.studies.probes import Arm, Measure, Trial, begins, token_pool, trials
from helpers.families import tiny_model
from helpers.parity_models import ids_for, roused_model

WORDS, ROOM, SHARP = 120, 80, 400.0


@pytest.fixture(scope="module")
def demo_trials(demo):
    return {one.name: one for one in trials(token_pool(demo), begins(demo), 512, count=8)}


def matrices(loaded, ids_ST):
    """(S, N, T, T): every head's own weights, as transformers gives them."""
    with torch.no_grad():
        out = loaded.model(torch.tensor(ids_ST), output_attentions=True)
    return torch.cat(out.attentions, 1).double().numpy()


def test_halves_are_what_the_arms_say(demo_trials):
    trial = demo_trials["repeated p25"]
    first, second = ({name: arm.ids_ST[:, part] for name, arm in trial.arms.items()} for part in HALVES)
    assert all(np.array_equal(half, second["repeated"]) for half in (first["repeated"], *second.values()))
    assert all(not set(a) & set(b) for a, b in zip(first["other"], second["other"], strict=True))
    assert np.array_equal(np.sort(first["shuffled"]), np.sort(second["shuffled"]))
    assert all(len(set(row)) == 25 for row in first["repeated"])
    assert all(arm.ids_ST[:, 0].tolist() == [0] * 8 for arm in trial.arms.values())  # the begin token


HALVES = slice(1, 26), slice(26, 51)


def test_repetition_is_read_as_sums_over_the_models_own_weights(demo, demo_trials):
    trial = demo_trials["repeated p25"]
    values = read_trial(demo, trial).values
    query = np.arange(26, 51)
    for name, arm in trial.arms.items():
        weights = matrices(demo, arm.ids_ST)
        assert values[Measure(name, "copy")] == pytest.approx(weights[:, :, query, query - 25].mean(-1), abs=1e-6)
        assert values[Measure(name, "successor")] == pytest.approx(weights[:, :, query, query - 24].mean(-1), abs=1e-6)


def test_offsets_and_sinks_are_read_as_sums_too(demo, demo_trials):
    trial, sinks = demo_trials["offsets"], demo_trials["sink"]
    values = read_trial(demo, trial).values
    weights = matrices(demo, trial.arms["distinct"].ids_ST)
    for steps in range(5):
        query = np.arange(5, weights.shape[-1])
        expected = weights[:, :, query, query - steps].mean(-1)
        assert values[Measure("distinct", f"{steps} back")] == pytest.approx(expected, abs=1e-6)
    values = read_trial(demo, sinks).values
    for name, arm in sinks.arms.items():
        weights, tokens = matrices(demo, arm.ids_ST), arm.ids_ST.shape[1]
        assert values[Measure(name, "key 0")] == pytest.approx(weights[..., 0].mean(-1), abs=1e-6)
        assert values[Measure(name, "strongest key")] == pytest.approx(weights.mean(-2).max(-1), abs=1e-6)
        uniform = (1 / np.arange(1, tokens + 1)).mean()
        assert values[Measure(name, "key 0 of uniform")] == pytest.approx(np.full((8, 24), uniform), abs=1e-6)


def test_copying_is_the_rank_of_the_strongest_keys_token(demo):
    copying = copying_of(demo, [0, 5, 6, 7])
    [trial] = [one for one in trials(token_pool(demo), (0,), 512, count=4, copying=copying) if "p25" in one.name]
    found = read_trial(demo, trial).values[Measure("repeated", "copying")]
    ids, rows = torch.tensor(trial.arms["repeated"].ids_ST), range(26, 51, 3)
    expected = np.zeros((4, 24))
    with torch.no_grad():
        out = demo.model(ids, output_attentions=True, output_hidden_states=True)
        for number, block in enumerate(demo.model.model.layers):
            hidden = block.input_layernorm(out.hidden_states[number])
            value = block.self_attn.v_proj(hidden).view(4, -1, 3, 32).repeat_interleave(2, 2)
            for head in range(6):
                weights = out.attentions[number][:, head]
                z = weights @ value[:, :, head]
                written = z @ block.self_attn.o_proj.weight[:, head * 32 : head * 32 + 32].T
                top = demo.model.lm_head(written).topk(5).indices
                for row in rows:
                    token = ids.gather(1, weights[:, row].argmax(-1)[:, None])
                    expected[:, number * 6 + head] += (top[:, row] == token).any(-1).numpy() / len(rows)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "qwen3_next"])
def test_copying_has_gates_and_norms_as_they_were(model_type, demo):
    model = roused_model(model_type)
    loaded, ids_BT = wrap(model, demo.tokenizer), torch.cat([ids_for(model_type, seed) for seed in range(4)])
    row_R = torch.arange(3, ids_BT.shape[1])
    copying = replace(copying_of(loaded, [0, 5, 6, 7]), row_R=row_R)
    trial = Trial("copying", {"some": Arm(ids_BT.numpy(), {"copying": copying})}, [])
    read = read_trial(loaded, trial)
    attends = np.array([stack_of(layer) != LINEAR for layer, _ in read.heads])
    found = read.values[Measure("some", "copying")][:, attends]
    assert np.isnan(read.values[Measure("some", "copying")][:, ~attends]).all()  # a linear layer is not asked
    given = {}
    for block in model.model.layers:
        if hasattr(block, "self_attn"):
            block.self_attn.o_proj.register_forward_pre_hook(lambda out, inputs: given.setdefault(out, inputs[0]))
    with torch.no_grad():
        attentions, expected = iter(model(ids_BT, output_attentions=True).attentions), []
        for block in model.model.layers:
            if not hasattr(block, "self_attn"):
                continue
            weights_BHTT, out = next(attentions), block.self_attn.o_proj
            z_BTHV = given[out].unflatten(-1, (weights_BHTT.shape[1], -1))
            for head in range(z_BTHV.shape[2]):
                alone = torch.zeros_like(z_BTHV)
                alone[:, :, head] = z_BTHV[:, :, head]
                written_BTE = alone.flatten(-2) @ out.weight.T
                if model_type != "qwen3_next":
                    written_BTE = written_BTE * (block.post_attention_layernorm.weight + (model_type == "gemma2"))
                top = (written_BTE @ model.lm_head.weight.T).topk(5).indices
                token = ids_BT.gather(1, weights_BHTT[:, head].argmax(-1))[..., None]
                expected.append((top == token).any(-1)[:, row_R].double().mean(1).numpy())
    assert found == pytest.approx(np.stack(expected, 1))
    assert 0.01 < found.mean() < 0.2


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "o_proj"), ("gpt2", "c_proj"), ("gpt_neox", "dense"), ("opt", "out_proj")]
)
def test_output_projections_are_found_where_the_heads_go(model_type, name, demo):
    model = tiny_model(model_type)
    found = output_projections(wrap(model, demo.tokenizer), [1, 2, 3])
    assert len(found) == model.config.num_hidden_layers
    assert all(module.get_submodule(name) is out for module, out in found.items())


# a decoder whose residual stream is one-hot: its token, its place, the token before


def hand_built(tokenizer):
    """GPT-2 with 2 layers x 2 heads: previous-token and uniform, induction and uniform.

    The induction head writes what it copies twice as large as a token stands in the stream: the model says it.
    """
    width = 2 * WORDS + ROOM
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=width,
        vocab_size=WORDS,
        n_positions=ROOM,
        attn_implementation="eager",
        bos_token_id=0,
        pad_token_id=0,  # begin and padding with one token: whoever guesses a mask hides the begin token
        eos_token_id=1,  # and an end token that comes up in needles
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight[:, :WORDS] = torch.eye(WORDS)
        model.transformer.wpe.weight[:, WORDS : WORDS + ROOM] = torch.eye(ROOM)
        for block, ones in zip(model.transformer.h, (2, 3), strict=True):
            mean = ones / width  # of a vector with so many ones: the norm leaves it as it is
            block.ln_1.weight.fill_((mean - mean**2 + block.ln_1.eps) ** 0.5)
            block.ln_1.bias.fill_(mean)
        token, place, before = range(WORDS), range(WORDS, WORDS + ROOM), range(WORDS + ROOM, width)
        first, second = (block.attn for block in model.transformer.h)
        for position in range(1, ROOM):
            first.c_attn.weight[place[position], position - 1] = SHARP
        for position in range(ROOM):
            first.c_attn.weight[place[position], width + position] = 1
        for word in range(WORDS):
            first.c_attn.weight[token[word], 2 * width + word] = 1
            first.c_proj.weight[word, before[word]] = 1
            second.c_attn.weight[token[word], word] = SHARP
            second.c_attn.weight[before[word], width + word] = 1
            second.c_attn.weight[token[word], 2 * width + word] = 1
            second.c_proj.weight[word, token[word]] = 2
        model.transformer.ln_f.weight.fill_(1)
    return wrap(model, tokenizer)


@pytest.fixture(scope="module")
def built(demo):
    """The atlas of the hand-built decoder, and its effects as {(probe, against): effects}."""
    loaded = hand_built(demo.tokenizer)
    atlas = ScanStudy(loaded, plan(loaded, sequences=32, pool=range(1, WORDS))).run()
    assert atlas.heads == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert atlas.facts["not_measured"] == {}
    return atlas, {(one.probe, one.against): one.effects for one in atlas.findings}


def test_hand_built_heads_score_one_and_uniform_heads_score_the_null(built):
    atlas, found = built
    for period in ("p10", "p25"):
        effects = found[f"induction {period}", "other"]
        assert effects.score[2] == pytest.approx(1, abs=1e-3)
        assert effects.effect[[1, 3]] == pytest.approx(0, abs=1e-5)
        assert found[f"duplicate-token {period}", "other"].effect[[1, 3]] == pytest.approx(0, abs=1e-5)
    assert found["offset 1", "best other offset"].score[0] == pytest.approx(1, abs=1e-3)
    assert found["sink", "uniform"].effect[[1, 3]] == pytest.approx(0, abs=1e-5)
    assert found["strongest key", "uniform"].effect[[1, 3]] == pytest.approx(0, abs=1e-5)
    assert found["copying", "other heads"].score[2] == 1
    assert found["long-range-copying", "moved span"].score == pytest.approx([0, 0, 1, 0])
    assert list(atlas.roles.values()) == [("previous-token",), (), ("induction", "long-range-copying"), ()]
    uniform = dict.fromkeys(("L0H1", "L1H0", "L1H1"), 0)  # among distinct tokens the induction head finds none either
    assert atlas.facts["near_uniform"] == pytest.approx(uniform, abs=1e-6)
    assert atlas.facts["long_range_copying"] == {"runs": 32, "counted": 32, "recall": {"64": 1.0}}


def test_a_window_that_hides_the_key_is_null_not_zero(demo):
    loaded = wrap(tiny_model("mistral", sliding_window=16), demo.tokenizer)
    [short, long] = [one for one in trials(range(5, 90), (), 120, count=4) if "repeated" in one.name][:2]
    assert np.isfinite(read_trial(loaded, short).values[Measure("repeated", "successor")]).all()
    assert np.isnan(read_trial(loaded, long).values[Measure("repeated", "successor")]).all()


def test_a_pool_has_twenty_ids_or_more(demo):
    assert token_pool(demo, range(400, 420)) == tuple(range(400, 420))
    with pytest.raises(InputError, match="19 ids"):
        token_pool(demo, range(400, 419))
