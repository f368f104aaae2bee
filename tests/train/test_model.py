"""Models from presets, directories and ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from thinwire.train.config import ConfigError, ModelConfig
from thinwire.train.model import PRESETS, Vocabulary, build_model, identity, longest_sequence

SIZES = {  # with each family's usual vocabulary; Llamas are named without their embeddings
    "llama-nano": (257, 0.111e6),
    "llama-tiny": (257, 0.82e6),
    "llama-small": (32000, 26.4e6),
    "llama-300m": (32000, 368e6),
    "llama-600m": (32000, 716e6),
    "gpt2": (50257, 124.4e6),
    "gpt2-xl": (50257, 1557.6e6),
}


def test_presets_have_the_sizes_that_their_names_say() -> None:
    assert set(SIZES) == set(PRESETS)
    for name, (vocabulary, parameters) in SIZES.items():
        with torch.device("meta"):
            model = build_model(ModelConfig(name), Vocabulary(vocabulary), seed=0)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01), name


def test_the_vocabulary_is_the_tokenizers() -> None:
    model = build_model(ModelConfig(), Vocabulary(300, eos_id=7, pad_id=8), seed=0)
    assert model.get_input_embeddings().num_embeddings == 300  # type: ignore[operator]
    assert (model.config.eos_token_id, model.config.pad_token_id) == (7, 8)  # type: ignore[union-attr]


def test_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(12345)
        return torch.cat(
            [p.flatten() for p in build_model(ModelConfig(), Vocabulary(257), seed=seed).parameters()]
        )

    torch.rand(3)
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def _saved(directory: Path, **settings: bool) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(5)
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=48)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(directory, **settings)
    return model


def test_a_directory_is_loaded_with_its_weights(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    model = build_model(ModelConfig(str(tmp_path)), Vocabulary(257), seed=0)
    for name, parameter in saved.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    assert model.training
    assert longest_sequence(ModelConfig(str(tmp_path))) == 48


def test_random_weights_keep_the_architecture_and_take_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    model = build_model(ModelConfig(str(tmp_path), random_weights=True), Vocabulary(257), seed=0)
    assert model.get_parameter("transformer.wte.weight").shape == (257, 16)
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(model.get_parameter(name), saved.get_parameter(name))


def test_a_tokenizer_too_large_for_the_model_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    with pytest.raises(ConfigError, match=r"data.tokenizer: its 301 tokens do not fit the 300 embedding rows"):
        build_model(ModelConfig(str(tmp_path)), Vocabulary(301), seed=0)


def test_weights_that_would_have_to_be_unpickled_are_refused(tmp_path: Path) -> None:
    model = _saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model.name: .*safetensors"):
        build_model(ModelConfig(str(tmp_path)), Vocabulary(257), seed=0)


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ConfigError, match=r"^model\.name: "):
        longest_sequence(ModelConfig(str(tmp_path)))


def test_an_unknown_name_is_answered_with_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"'no/such' is neither a preset .*llama-tiny.* nor a loadable model id"):
        build_model(ModelConfig("no/such"), Vocabulary(257), seed=0)


def test_a_name_that_is_almost_a_presets_is_answered_with_that_preset() -> None:
    with pytest.raises(ConfigError, match=r"'llama-smal' is neither .*; did you mean llama-small\?$"):
        longest_sequence(ModelConfig("llama-smal"))


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def model_info(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise RuntimeError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ConfigError, match=r"'llama-big' is neither .*: asked the Hugging Face hub: no route$"):
        longest_sequence(ModelConfig("llama-big"))
    assert asked == ["llama-big"]


def test_models_that_differ_have_different_identities() -> None:
    tiny = build_model(ModelConfig(), Vocabulary(257), seed=0)
    other = build_model(ModelConfig(), Vocabulary(258), seed=1)
    assert identity(tiny) == identity(build_model(ModelConfig(), Vocabulary(257), seed=3))
    assert identity(tiny) != identity(other)
