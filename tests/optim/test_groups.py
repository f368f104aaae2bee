"""Which parameter is what, in language models of many architectures."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.optim.tiny_models import CONFIGS, tiny
from thinwire.optim.blocks import Blocks
from thinwire.optim.groups import ParamGroups


def kinds(groups: ParamGroups) -> dict[str, str]:
    return {name: group["kind"] for group in groups for name, _ in group["params"]}


def cut(groups: ParamGroups, end: str) -> list[tuple[int, ...]]:
    """Shapes (count, rows, columns) of the matrices in the first parameter whose name ends so."""
    for group in groups:
        for name, parameter in group["params"]:
            if name.endswith(end):
                return [tuple(part.shape) for part in Blocks.of(group).cut(parameter.detach())]
    raise AssertionError(f"no {end}")


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_trained_parameter_is_in_one_group_and_hidden_layers_are_matrices(kind: str) -> None:
    model = tiny(kind)
    groups = tw.optim.param_groups(model)
    found = kinds(groups)
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    table = str(groups).splitlines()
    assert len(table) == 1 + len(found)
    output = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        if parameter is model.get_input_embeddings().weight:
            assert found[name] == "embedding"
        elif parameter is output.weight:
            assert found[name] == "head"
        elif name.endswith(("bias", "A_log", "conv1d.weight")) or parameter.ndim < 2:
            assert found[name] == "vector"
        elif "wpe" not in name and "embed_positions" not in name:
            assert found[name] == "matrix", name


def test_the_same_model_wrapped_has_the_same_groups() -> None:
    model = tiny("qwen2")
    plain = kinds(tw.optim.param_groups(model))
    assert kinds(tw.optim.param_groups(torch.compile(model))) == plain
    assert plain["model.embed_tokens.weight"] == "embedding"
    assert "lm_head.weight" not in plain  # tied
    untied = tiny("qwen2", tie_word_embeddings=False)
    assert kinds(tw.optim.param_groups(untied))["lm_head.weight"] == "head"


FUSED = {  # the fused layer, the one after attention, and where query, key and value are among the parts
    "gpt2": ("c_attn", "c_proj", "qkv"),
    "gpt_neox": ("query_key_value", "dense", "qkv"),
    "bloom": ("query_key_value", "dense", "qkv"),
    "falcon": ("query_key_value", "dense", "qkv"),
    "phi3": ("qkv_proj", "o_proj", "qkv"),
    "gpt_bigcode": ("c_attn", "c_proj", "qkv"),
    "codegen": ("qkv_proj", "out_proj", "qvk"),
}
OLD_FALCON = {"new_decoder_architecture": False, "num_kv_heads": None}


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in FUSED),
        ("gpt_bigcode", {"multi_query": False}),
        ("falcon", {**OLD_FALCON, "multi_query": True}),
        ("falcon", {**OLD_FALCON, "multi_query": False}),
    ],
)
def test_parts_of_a_fused_layer_are_query_key_and_value(kind: str, changes: dict[str, Any]) -> None:
    """Without values attention puts out nothing, and without queries it does not look at keys."""
    torch.manual_seed(0)
    layer, after, order = FUSED[kind]
    model = tiny(kind, **changes).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    group, index = next(
        (group, index)
        for group in tw.optim.param_groups(model)
        for index, (name, _) in enumerate(group["params"])
        if name.endswith(f"{layer}.weight")
    )
    (name, weight), blocks = group["params"][index], Blocks.of(group)
    original = weight.clone()
    seen: list[Tensor] = []
    next_layer = model.get_submodule(name.removesuffix(f"{layer}.weight") + after)
    next_layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))

    def attention(without: str) -> Tensor:
        parts = [part.clone() for part in blocks.cut(original)]
        for letter in without:
            parts[order.index(letter)].zero_()
        weight.copy_(blocks.join(parts, weight.shape))
        model(torch.arange(7)[None])
        return seen[-1]

    whole, without_queries = attention(""), attention("q")
    assert not attention("v").any()
    torch.testing.assert_close(without_queries, attention("k"))
    torch.testing.assert_close(without_queries, attention("qk"))
    assert (whole - without_queries).abs().max() > 1e-7


def test_heads_and_fused_layers_are_split_as_asked() -> None:
    model = tiny("gpt_neox")
    split = tw.optim.param_groups(model)
    assert cut(split, "query_key_value.weight") == [(1, 32, 32)] * 3
    assert cut(tw.optim.param_groups(model, split_fused=False), "query_key_value.weight") == [(1, 96, 32)]
    assert cut(tw.optim.param_groups(model, split_heads=True), "query_key_value.weight") == [(12, 8, 32)]
    llama = tw.optim.param_groups(tiny("llama"), split_heads=True)
    assert cut(llama, "q_proj.weight") == [(4, 8, 32)]
    assert cut(llama, "k_proj.weight") == [(2, 8, 32)]
    assert cut(llama, "o_proj.weight") == [(1, 32, 32)]
    assert cut(tw.optim.param_groups(tiny("gpt2")), "c_fc.weight") == [(1, 128, 32)]  # stored 32 x 128
    experts = tw.optim.param_groups(tiny("gpt_oss"))
    assert cut(experts, "gate_up_proj") == [(3, 48, 32)] * 2
    assert cut(experts, "down_proj") == [(3, 32, 48)]


class Mixed(nn.Module):
    """Layers that language models seldom have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.depthwise = nn.Conv1d(4, 4, 3, groups=4)
        self.back = nn.ConvTranspose1d(4, 6, 3)
        self.tok_embed = nn.Parameter(torch.randn(5, 8))
        self.row = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.table = nn.Parameter(torch.randn(3, 4))
        self.classifier = nn.Linear(8, 3)


def test_any_other_module_has_its_place() -> None:
    groups = tw.optim.param_groups(Mixed())
    found = kinds(groups)
    assert (
        found["attention.in_proj_weight"] == found["attention.out_proj.weight"] == found["conv.weight"] == "matrix"
    )
    assert cut(groups, "in_proj_weight") == [(1, 8, 8)] * 3
    assert cut(groups, "conv.weight") == [(2, 3, 18)]
    assert found["tok_embed"] == "embedding"
    assert found["classifier.weight"] == "head"
    for name in ("depthwise.weight", "back.weight", "row.weight", "scale", "empty", "table", "classifier.bias"):
        assert found[name] == "vector"
    assert "frozen" not in found


def test_globs_and_predicates_overrule() -> None:
    found = kinds(tw.optim.param_groups(Mixed(), kinds={"ta*": "matrix", "*.out_proj.weight": "vector"}))
    assert (found["table"], found["attention.out_proj.weight"]) == ("matrix", "vector")
    groups = tw.optim.param_groups(Mixed(), kinds=lambda name, p: "matrix" if name == "table" else None)
    assert kinds(groups)["table"] == "matrix"
    assert "you said so" in str(groups)
    with pytest.raises(ValueError, match="'nothing', which matches no trained"):
        tw.optim.param_groups(Mixed(), kinds={"nothing": "vector"})
    with pytest.raises(ValueError, match=r"'scale' of shape .* needs 2 dimensions or more"):
        tw.optim.param_groups(Mixed(), kinds={"scale": "matrix"})
    with pytest.raises(ValueError, match="the kinds are matrix, embedding, head, vector"):
        tw.optim.param_groups(Mixed(), kinds={"scale": "scalar"})  # type: ignore[dict-item]


def test_torch_optimizers_take_the_groups() -> None:
    model = tiny("llama")
    optimizer = torch.optim.AdamW(tw.optim.param_groups(model))
    names = list(chain(*(group["param_names"] for group in optimizer.param_groups)))
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["kind"] == "matrix"


@pytest.mark.parametrize(
    ("blocks", "shape"),
    [
        (Blocks(), (5, 3)),
        (Blocks(), (5, 3, 2, 2)),
        (Blocks(transposed=True, sizes=(2, 3)), (4, 5)),
        (Blocks(stacked=True, transposed=True, repeat=3, sizes=(1, 1)), (2, 4, 6)),
        (Blocks(stacked=True, sizes=(3, 3)), (2, 6, 4)),
        (Blocks(repeat=2, sizes=(4, 1, 1)), (12, 3)),
        (Blocks(repeat=4, sizes=(3,), apart=True), (12, 3)),
        (Blocks(repeat=2, apart=True), (6, 2, 3)),
        (Blocks(repeat=2, sizes=(2, 1), apart=True), (6, 3)),
    ],
)
def test_join_undoes_cut(blocks: Blocks, shape: tuple[int, ...]) -> None:
    blocks.check("w", shape)
    tensor = torch.randn(shape)
    before = copy.deepcopy(tensor)
    parts = blocks.cut(tensor)
    assert torch.equal(blocks.join(parts, shape), before)
    assert sum(part.numel() for part in parts) == tensor.numel()


def test_what_does_not_add_up_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'w' of shape \(5, 3\) has 5 outputs, not 1 times \(2, 2\)"):
        Blocks(sizes=(2, 2)).check("w", (5, 3))
    with pytest.raises(ValueError, match=r"'w' .* has 5 outputs, not a multiple of 2"):
        Blocks(repeat=2, apart=True).check("w", (5, 3))
    with pytest.raises(ValueError, match=r"'w' .* it has a window"):
        Blocks(transposed=True).check("w", (5, 3, 2))
