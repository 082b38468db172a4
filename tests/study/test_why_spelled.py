"""Contributions to a logit spelled by hand, as TransformerLens stacks head results behind a norm that is not folded.

Plain torch on the raw weights: each head's own part of the output projection, what the rest of a block wrote by the
difference of residuals, the scale that the norm has at the token, and the rotation by pairs of coordinates.

Shapes: N component, T token, E model width, D width of a head, P pair of coordinates that rotate.
"""

import pytest
import torch

import attnscope
from attnscope.errors import ModelError
from attnscope.hooks.listen import listen
from attnscope.studies.attribution_records import LogitQuery
from helpers.parity_models import ids_for, roused_model
from helpers.why_families import taken_apart, wrapped

LAYER, QUERY, KEY = 3, 20, 17
BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
ATTENTION = {"llama": "self_attn", "gpt2": "attn", "gpt_neox": "attention"}
OUT = {"llama": "o_proj", "gpt2": "c_proj", "gpt_neox": "dense"}
NORMS = {"llama": "input_layernorm", "gpt2": "ln_1", "gpt_neox": "input_layernorm"}
FAULTS = ("heads", "scale", "weight", "bias", "rotation")


@pytest.fixture(scope="module", params=BLOCKS)
def spelled(request):
    return Spelled(request.param)


class Spelled:
    """A model's weights and what enters its blocks and output projections, and terms made of them alone."""

    def __init__(self, family):
        self.family, self.model = family, roused_model(family)
        self.ids = ids_for(family)[0].tolist()
        self.blocks = list(self.model.get_submodule(BLOCKS[family]))
        self.heads = self.model.config.num_attention_heads
        self.residuals, self.outputs = {}, {}
        handles = [
            handle
            for number, block in enumerate(self.blocks)
            for handle in (
                block.register_forward_pre_hook(self._keep(self.residuals, number)),
                self._attention(number)
                .get_submodule(OUT[family])
                .register_forward_pre_hook(self._keep(self.outputs, number)),
            )
        ]
        with torch.no_grad():
            self.model(torch.tensor([self.ids]))
        for handle in handles:
            handle.remove()

    @staticmethod
    def _keep(kept, number):
        return lambda module, args: kept.__setitem__(number, args[0][0].double())

    def _attention(self, number):
        return self.blocks[number].get_submodule(ATTENTION[self.family])

    def stack(self, fault):
        """(N, T, E): the embedding, then of each block its heads and the rest."""
        found = [self.residuals[0]]
        for number in range(LAYER):
            own = self._attention(number).get_submodule(OUT[self.family]).weight.detach().double()
            out_IE = own if self.family == "gpt2" else own.T  # GPT-2 keeps it with its inputs first
            z_TI = self.outputs[number]
            width = z_TI.shape[1] // self.heads
            parts = [slice(head * width, (head + 1) * width) for head in range(self.heads)]
            heads = [z_TI[:, part] @ out_IE[part] for part in parts]
            rest = self.residuals[number + 1] - self.residuals[number] - sum(heads)
            found += [*(heads[-1:] + heads[:-1] if fault == "heads" else heads), rest]
        return torch.stack(found)

    def side(self, name, head, row, fault=""):
        """(N, D): what each component, and last the layer's biases, are of the query or the key of a head."""
        norm = self.blocks[LAYER].get_submodule(NORMS[self.family])
        stack_NE, x_E = self.stack(fault)[:, row], self.residuals[LAYER][row]
        if self.family != "llama":  # the others take the mean away
            stack_NE, x_E = stack_NE - stack_NE.mean(-1, keepdim=True), x_E - x_E.mean()
        config = self.model.config
        epsilon = {"llama": "rms_norm_eps", "gpt2": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps"}[self.family]
        scale = (x_E.square().mean() + getattr(config, epsilon)).rsqrt()
        weight_E = norm.weight.detach().double()
        bias_E = torch.zeros_like(weight_E) if self.family == "llama" else norm.bias.detach().double()
        normed_NE = stack_NE * (1 if fault == "scale" else scale) * (1 if fault == "weight" else weight_E)
        weight_DE, bias_D = self._projection(name, head)
        own_D = weight_DE @ bias_E + bias_D * (fault != "bias")
        vectors_ND = torch.cat([normed_NE @ weight_DE.T, own_D[None]])
        return vectors_ND if fault == "rotation" else self._rotated(vectors_ND, row)

    def _projection(self, name, head):
        """(D, E) and (D,): the weight and bias of one head's query or key."""
        attention, width = self._attention(LAYER), self.residuals[0].shape[1] // self.heads
        rows = torch.arange(width)
        if self.family == "llama":
            group = head if name == "query" else head // (self.heads // self.model.config.num_key_value_heads)
            weight = {"query": attention.q_proj, "key": attention.k_proj}[name].weight
            return weight[group * width + rows].detach().double(), torch.zeros(width).double()
        if self.family == "gpt2":  # all queries, then all keys
            projection, weight = attention.c_attn, attention.c_attn.weight.T
            rows = rows + head * width + (name == "key") * self.heads * width
        else:  # query, key and value of each head
            projection, weight = attention.query_key_value, attention.query_key_value.weight
            rows = rows + head * 3 * width + (name == "key") * width
        return weight[rows].detach().double(), projection.bias[rows].detach().double()

    def _rotated(self, vectors_ND, row):
        """Each pair of coordinates (i, i + half) turned by row / theta^(i / half)."""
        if self.family == "gpt2":
            return vectors_ND
        rope = self.model.config.rope_parameters
        half = int(vectors_ND.shape[1] * rope.get("partial_rotary_factor", 1.0)) // 2
        angle_P = row / rope["rope_theta"] ** (torch.arange(half).double() / half)
        first_NP, second_NP = vectors_ND[:, :half], vectors_ND[:, half : 2 * half]
        turned = [
            first_NP * angle_P.cos() - second_NP * angle_P.sin(),
            second_NP * angle_P.cos() + first_NP * angle_P.sin(),
        ]
        return torch.cat([*turned, vectors_ND[:, 2 * half :]], 1)

    def terms(self, side, head, fault=""):
        """(N,): the side's terms with the whole of the other side."""
        rows = {"key": KEY, "query": QUERY}
        other = "query" if side == "key" else "key"
        found_ND, other_D = self.side(side, head, rows[side], fault), self.side(other, head, rows[other]).sum(0)
        return found_ND @ other_D * len(other_D) ** -0.5


@pytest.mark.parametrize("side", ["key", "query"])
def test_contributions_are_the_stack_of_head_results_behind_the_unfolded_norm(spelled, side):
    for head in range(spelled.heads):
        found = taken_apart(wrapped(spelled.model), spelled.ids, LogitQuery(LAYER, head, QUERY, KEY, side=side))
        expected_N = spelled.terms(side, head)
        torch.testing.assert_close(torch.from_numpy(found.contribution_N), expected_N, rtol=0, atol=1e-5)
        assert found.logit == pytest.approx(float(expected_N.sum()), abs=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stack_with_a_fault_is_another(spelled, fault):
    without = {"gpt2": {"rotation"}, "llama": {"bias"}}.get(spelled.family, set())  # what the family does not have
    found_N = taken_apart(wrapped(spelled.model), spelled.ids, LogitQuery(LAYER, 1, QUERY, KEY)).contribution_N
    apart = float((torch.from_numpy(found_N) - spelled.terms("key", 1, fault)).abs().max())
    assert (apart > 1e-3) == (fault not in without)


def test_a_linear_head_is_spelled_by_its_part_of_the_projection_behind_gate_and_norm():
    """Of key 0, which no position rotates, in the layer behind a linear one: bamba's layers 0 and 1."""
    model = roused_model("bamba")
    loaded, ids, (block, behind) = wrapped(model), ids_for("bamba")[0].tolist(), model.model.layers[:2]
    kept, calls = {}, []
    handles = [
        block.mamba.out_proj.register_forward_pre_hook(lambda module, args: kept.update(given=args[0][0].double())),
        behind.register_forward_pre_hook(lambda module, args: kept.update(residual=args[0][0].double())),
    ]
    listen(model, torch.tensor([ids]), lambda call: calls.append(call) if call.layer == 1 else None)
    for handle in handles:
        handle.remove()
    asked = LogitQuery(1, 2, QUERY, key=0)
    parts = taken_apart(loaded, ids, asked)
    found = {one.name: value for one, value in zip(parts.components, parts.contribution_N, strict=True)}

    spec, x_E, norm = calls[0].spec, kept["residual"][0], behind.input_layernorm
    q_D = spec.q_BHQD[0, 2, QUERY].double()
    W_k = behind.self_attn.k_proj.weight.double().view(spec.kv_heads, -1, len(x_E))[2 * spec.kv_heads // spec.heads]
    scale = norm.weight.double() / (x_E.square().mean() + norm.variance_epsilon).sqrt()
    heads = block.mamba.num_heads
    width = kept["given"].shape[1] // heads
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        written_E = block.mamba.out_proj.weight.double()[:, own] @ kept["given"][0, own]
        expected = spec.scale * float(q_D @ (W_k @ (scale * written_E)))
        assert found[f"linear L0H{head}"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert abs(expected) > 1e-3


@pytest.mark.parametrize("side", ["key", "query"])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_linear_heads_are_components_and_by_the_tokens_they_read(family, side):
    """`falcon_h1` has linear heads beside those of attention in each block, and in the one that is asked."""
    loaded, ids = wrapped(roused_model(family)), ids_for(family)[0].tolist()
    whole, by_tokens = (
        taken_apart(loaded, ids, LogitQuery(3, 1, QUERY, side=side, by_tokens=one)) for one in (False, True)
    )
    linear = {one.name for one in whole.components if one.stack == "linear"}
    assert linear == {f"linear L{layer}H{head}" for layer in range(3) for head in range(4)}
    for parts in (whole, by_tokens):
        assert abs(parts.sum - parts.logit) <= 1e-5 * abs(parts.contribution_N).sum()
    for name in linear:  # by tokens: the map's rows times values
        [at] = [place for place, one in enumerate(whole.components) if one.name == name]
        split = [v for one, v in zip(by_tokens.components, by_tokens.contribution_N, strict=True) if one.name == name]
        assert sum(split) == pytest.approx(whole.contribution_N[at], abs=1e-5)
    assert {one.position for one in by_tokens.components if one.stack == "linear"} > {0, 1}


@pytest.mark.parametrize(("model_type", "head"), [("qwen3_next", "linear L1H0"), ("jamba", "channels.0.0")])
def test_a_head_without_a_softmax_has_no_logit_to_take_apart(model_type, head):
    loaded = wrapped(roused_model(model_type))
    with pytest.raises(ModelError, match=f"{head} has no logits: its layer has no softmax"):
        attnscope.why(loaded, ids_for(model_type)[0].tolist(), head)
