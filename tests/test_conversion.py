"""Conversions end to end: the folder that is written, loaded by plain transformers, and measured without our code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Converted
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import converter
from converter.blocks import Block
from converter.conversion.report import ConversionReport
from converter.conversion.run import plan_conversion
from converter.errors import CheckpointError, ConverterError, RecipeError, UnsupportedError, VerificationError
from converter.families.opened import SourceModel
from converter.ops.untie_head import UntieHead

#: Needs no text.
NAIVE = "gpt2-to-llama-naive"

#: Positions last, and no block fitted to make up for them.
POSITIONS_LAST = """
name: positions-last
target: llama
steps:
  - fold_attention_scale
  - untie_head
  - layernorm_to_rmsnorm
  - fold_final_norm_bias
  - gelu_to_swiglu
  - learned_positions_to_rope
"""


@dataclass(frozen=True)
class Case:
    """One conversion: the source's model and folder, the result, and the text that it was measured on."""

    model: GPT2LMHeadModel
    source: Path
    target: Path
    report: ConversionReport
    held_out: Tensor

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.target / "config.json").read_text())

    def load(self) -> LlamaForCausalLM:
        """As anybody would."""
        return AutoModelForCausalLM.from_pretrained(self.target).eval()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Case:
    """A tied GPT-2 that scales by layer and has no bos, through the default recipe."""
    folder = tmp_path_factory.mktemp("case")
    model = models.gpt2(scale_attn_by_inverse_layer_idx=True, bos_token_id=None)
    source = models.save(model, folder / "source")
    held_out = models.write_ids(folder / "held_out.npy", rows=8, seed=5)
    report = converter.convert(source, folder / "llama", text=[text], eval_text=[held_out])
    return Case(model, source, folder / "llama", report, models.random_ids(8, seed=5))


def kl(source: Tensor, other: Tensor) -> float:
    """Nats per predicted token: the last position predicts nothing."""
    p, q = source[:, :-1].double().log_softmax(-1), other[:, :-1].double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def left_behind(folder: Path, *but: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in but)


# The folder


def test_the_config_holds_every_fact_for_old_and_new_readers(case: Case) -> None:
    wanted = {
        "model_type": "llama",
        "head_dim": 16,
        "intermediate_size": 80,
        "rms_norm_eps": 3e-4,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    assert {key: case.config[key] for key in wanted} == wanted
    loaded = case.load()
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id) == (None, 0, None)
    generation = json.loads((case.target / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


def test_the_folder_holds_what_it_needs_and_nothing_half_done(case: Case) -> None:
    names = {path.name for path in case.target.iterdir() if path.is_file()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "recipe.yaml", "conversion.json", "README.md"
    }  # fmt: skip
    assert left_behind(case.target.parent) == ["held_out.npy", "llama", "source"]
    record = json.loads((case.target / "conversion.json").read_text())
    assert record["source_sha256"] == SourceModel.open(case.source).checkpoint.sha256()
    assert record["rope"]["layout"] == "half_split"
    assert [step["name"] for step in record["steps"]] == [step.name for step in case.report.steps]


def test_plain_transformers_finds_every_tensor(case: Case) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(case.target, output_loading_info=True)
    assert not any(info.values())


def test_every_dropped_bias_is_reported_with_its_norm(case: Case) -> None:
    dropped = {drop.name: drop.norm for step in case.report.steps for drop in step.dropped}
    assert set(dropped) == {
        "embeddings.positions.weight", "head.final_norm.bias", *(f"layers.{layer}.k.bias" for layer in range(3))
    }  # fmt: skip
    assert dropped["head.final_norm.bias"] == pytest.approx(float(case.model.transformer.ln_f.bias.detach().norm()))
    assert all(norm is not None and norm > 0 for norm in dropped.values())


# What it computes


def test_the_written_files_compute_what_the_ops_made(tmp_path: Path, ids: Tensor) -> None:
    source = models.save(models.gpt2(scale_attn_weights=False), tmp_path / "source")
    converter.convert(source, tmp_path / "llama", recipe=NAIVE)
    plan = plan_conversion(source, NAIVE)
    expected = Converted(plan.source, torch.float32).after(*(step.op for step in plan.steps)).logits(ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    assert models.relative(models.logits_of(loaded, ids), expected) <= 1e-5
    assert models.relative(models.reference_logits(tmp_path / "llama", ids), expected) <= 1e-5


def test_the_report_is_what_transformers_measures_on_the_files(case: Case) -> None:
    total = case.report.verification.total  # type: ignore[union-attr]
    source, converted = (models.logits_of(model, case.held_out) for model in (case.model, case.load()))
    assert total.tokens == 8 * (models.CONTEXT - 1)
    assert total.kl == pytest.approx(kl(source, converted), abs=1e-6)
    losses = [
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), case.held_out[:, 1:].flatten())
        for logits in (source, converted)
    ]
    assert (total.source_loss, total.loss) == pytest.approx((float(losses[0]), float(losses[1])), abs=1e-6)
    agree = (source.argmax(-1) == converted.argmax(-1))[:, :-1].double().mean()
    assert total.agreement == pytest.approx(float(agree), abs=1e-9)
    assert case.report.steps[-1].comparison.total.kl == pytest.approx(total.kl, abs=1e-6)  # type: ignore[union-attr]
    again = converter.verify(case.source, case.target, text=[case.source.parent / "held_out.npy"])
    assert again.total.kl == pytest.approx(total.kl, abs=1e-9)


def test_the_steps_without_positions_cost_what_the_files_cost_when_positions_are_given(
    case: Case, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted model with the source's position vectors through inputs_embeds, and with a RoPE that turns nothing.

    That undoes the step for positions: what is left is the cost of the steps before it.
    """
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(POSITIONS_LAST)
    held_out = case.source.parent / "held_out.npy"
    report = converter.convert(case.source, tmp_path / "out", recipe=str(recipe), text=[text], eval_text=[held_out])
    named = {step.name: step.comparison.total.kl for step in report.steps if step.comparison}
    source = models.logits_of(case.model, case.held_out)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    positions = case.model.transformer.wpe.weight.detach()
    centred = positions - positions.mean(dim=1, keepdim=True)  # as all that enters an RMSNorm model's stream
    embeds = model.get_input_embeddings()(case.held_out) + centred - centred.mean(dim=0)

    def unturned(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.ones(*position_ids.shape, 16)
        return cos, torch.zeros_like(cos)

    with torch.no_grad():
        turned = kl(source, model(inputs_embeds=embeds, use_cache=False).logits)
        monkeypatch.setattr(LlamaRotaryEmbedding, "forward", unturned)
        found = kl(source, model(inputs_embeds=embeds, use_cache=False).logits)
        uncentred = kl(source, model(inputs_embeds=embeds + positions - centred, use_cache=False).logits)
    assert found == pytest.approx(named["gelu_to_swiglu"], abs=1e-6)
    assert named["gelu_to_swiglu"] > 1e-4
    assert min(turned, uncentred) > 10 * named["gelu_to_swiglu"]  # either mistake would show


def test_cached_generation_equals_the_full_forward(case: Case) -> None:
    model, prompt = case.load(), case.held_out[:3, :20]
    out = model.generate(
        prompt, max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0,
        attention_mask=torch.ones_like(prompt), output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    full = models.logits_of(model, out.sequences)[:, 19:-1]
    assert (torch.stack(out.logits, dim=1) - full).abs().max() <= 1e-4


def test_left_padded_generation_equals_each_prompt_alone(case: Case) -> None:
    model, prompts = case.load(), [case.held_out[row, :length] for row, length in enumerate((5, 20, 33))]
    padded = torch.stack([torch.nn.functional.pad(prompt, (33 - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(33) >= 33 - len(prompt)).long() for prompt in prompts])
    out = model.generate(
        padded, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.stack(out.logits, dim=1)
    for row, prompt in enumerate(prompts):
        alone = out.sequences[row : row + 1, 33 - len(prompt) :]
        full = models.logits_of(model, alone)[0, len(prompt) - 1 : -1]
        assert (logits[row] - full).abs().max() <= 1e-4


def test_a_trained_head_is_kept_though_the_flag_says_tied(tmp_path: Path) -> None:
    model = models.gpt2(tie_word_embeddings=False)
    source = models.save(model, tmp_path / "source", tie_word_embeddings=True)
    converter.convert(source, tmp_path / "llama", recipe=NAIVE)
    written = load_file(tmp_path / "llama" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], model.lm_head.weight)
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


# dtypes and shards


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_what_the_bytes_are(dtype: Any, tmp_path: Path, ids: Tensor) -> None:
    model = models.gpt2()
    source = models.save(model, tmp_path / "source")
    report = converter.convert(source, tmp_path / "llama", recipe=NAIVE, dtype=dtype)
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype)
    written = load_file(tmp_path / "llama" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "llama").dtype == getattr(torch, dtype)
    cast = report.steps[-1]
    assert (cast.name, cast.exact) == ("cast", False)
    assert 0 < cast.relative_change < 0.1  # type: ignore[operator]


def test_a_half_precision_source_stays_so(tmp_path: Path) -> None:
    model = models.gpt2()
    source = models.write(
        tmp_path / "source", models.config_of(model, dtype="float16"),
        {name: tensor.half() for name, tensor in models.tensors_of(model).items()},
    )  # fmt: skip
    assert converter.convert(source, tmp_path / "llama", recipe=NAIVE).dtype == "float16"


def test_sharded_output_is_the_same_model(tmp_path: Path, ids: Tensor) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    for name, size in (("one", "1GB"), ("many", "50KB")):
        converter.convert(source, tmp_path / name, recipe=NAIVE, max_shard_size=size)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert all((tmp_path / "many" / file).stat().st_size < 60_000 for file in files)
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("one", "many"))
    assert torch.equal(models.logits_of(one, ids), models.logits_of(many, ids))


# LLaMA to LLaMA


@pytest.mark.parametrize(
    ("facts", "changes"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"attention_bias": True, "mlp_bias": True}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_parameters": ..., "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, {}),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 45}, {"pad_token_id": 61}),
    ],
    ids=["8/2", "tied", "biases", "old schema", "scaled RoPE", "9/3 and a pad token without an embedding"],
)
def test_a_llama_written_again_is_the_same_model(
    facts: dict[str, Any], changes: dict[str, Any], tmp_path: Path, ids: Tensor
) -> None:
    model = models.llama(**facts)
    source = models.save(model, tmp_path / "source", **changes)
    report = converter.convert(source, tmp_path / "again", eval_text=[models.write_ids(tmp_path / "ids.npy", 4)])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert models.relative(models.logits_of(loaded, ids), models.logits_of(model, ids)) <= 1e-5
    assert report.verification.total.kl < 1e-9  # type: ignore[union-attr]
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    theta = model.config.rope_parameters["rope_theta"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
    assert (config["rope_scaling"] or {}).items() <= config["rope_parameters"].items()
    assert config["tie_word_embeddings"] is model.config.tie_word_embeddings
    assert config["pad_token_id"] is None


# What is refused, and leaves nothing behind


def poisoned(folder: Path, value: float) -> Path:
    model = models.gpt2()
    tensors = models.tensors_of(model)
    tensors["transformer.h.1.mlp.c_proj.weight"][3, 4] = value
    return models.write(folder, models.config_of(model), tensors)


def refused(kind: type[ConverterError], tmp_path: Path, source: Path, kept: bool = False, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        converter.convert(source, tmp_path / "llama", **{"recipe": NAIVE, **options})
    assert left_behind(tmp_path) == [*([".llama.partial"] if kept else []), source.name]
    return str(caught.value)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "Inf")])
def test_a_weight_that_is_not_finite_is_named(value: float, word: str, tmp_path: Path) -> None:
    message = refused(CheckpointError, tmp_path, poisoned(tmp_path / "source", value))
    assert f"'transformer.h.1.mlp.c_proj.weight' contains {word}" in message


def test_overflow_in_float16_is_counted_and_named(tmp_path: Path) -> None:
    source = poisoned(tmp_path / "source", 7e4)
    message = refused(UnsupportedError, tmp_path, source, dtype="float16")
    assert "1 of 3840 values of layers.1.down.weight (from h.1.mlp.c_proj.weight) overflow in float16" in message
    converter.convert(source, tmp_path / "llama", recipe=NAIVE, dtype="bfloat16", verify=False)


def test_what_the_steps_make_infinite_is_named(tmp_path: Path) -> None:
    """In fp32 too, where the cast changes nothing: a SwiGLU's gate is 1.6 times the MLP's first matrix."""
    model = models.gpt2()
    tensors = models.tensors_of(model)
    tensors["transformer.h.1.mlp.c_fc.weight"][0, 0] = 3e38
    source = models.write(tmp_path / "source", models.config_of(model), tensors)
    message = refused(UnsupportedError, tmp_path, source, verify=False)
    assert "1 of 3840 values of layers.1.gate.weight are not finite after the steps" in message


def test_a_quantised_tensor_is_named(tmp_path: Path) -> None:
    model = models.gpt2()
    tensors = models.tensors_of(model)
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].to(torch.float8_e4m3fn)
    source = models.write(tmp_path / "source", models.config_of(model), tensors)
    message = refused(CheckpointError, tmp_path, source)
    assert "'transformer.wte.weight' is of type float8_e4m3fn" in message


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_calibrated_op_without_text_is_an_error(evaluated: bool, tmp_path: Path, text: Path) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    message = refused(ConverterError, tmp_path, source, recipe=None, eval_text=[text] if evaluated else [])
    assert "is calibrated and needs text" in message
    assert "--text" in message


@pytest.mark.parametrize("measured", [False, True])
def test_a_context_of_one_is_converted_but_not_measured(measured: bool, tmp_path: Path) -> None:
    source = models.save(models.gpt2(n_positions=1), tmp_path / "source")
    if measured:
        assert "--no-verify" in refused(ConverterError, tmp_path, source, recipe="gpt2-to-llama-naive")
    else:
        converter.convert(source, tmp_path / "out", recipe="gpt2-to-llama-naive", verify=False)


def test_a_dtype_that_no_result_has_is_refused(tmp_path: Path) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    message = refused(ConverterError, tmp_path, source, recipe="gpt2-to-llama-naive", dtype="int8")
    assert "'int8' is no dtype" in message


def test_an_op_that_does_not_fit_is_told_with_the_recipes_line(tmp_path: Path) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    recipe = tmp_path / "source" / "mine.yaml"
    recipe.write_text("name: mine\ntarget: llama\nsteps:\n  - fold_attention_scale\n  - layernorm_to_rmsnorm\n")
    message = refused(UnsupportedError, tmp_path, source, recipe=str(recipe))
    assert message.startswith(f"{recipe}:5: layernorm_to_rmsnorm does not fit: ")
    assert "Put untie_head before it" in message


@pytest.mark.parametrize(
    ("steps", "kind", "words"),
    [
        ("[untie_head, layernorm_to_rmsnorm]", UnsupportedError, "its final norm has a bias. Add fold_final_norm_bias"),
        ("[cast: {dtype: float16}, untie_head]", RecipeError, "mine.yaml:3: cast must be the last step"),
        ("[]", UnsupportedError, "its norm is LayerNorm. Add layernorm_to_rmsnorm to the recipe"),
    ],
)
def test_a_recipe_that_does_not_end_at_its_target(
    steps: str, kind: type[ConverterError], words: str, tmp_path: Path
) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    recipe = source / "mine.yaml"
    recipe.write_text(f"name: mine\ntarget: llama\nsteps: {steps}\n")
    assert words in refused(kind, tmp_path, source, recipe=str(recipe))


@pytest.mark.parametrize(
    ("make", "recipe", "words"),
    [
        (models.llama, "gpt2-to-llama", "the model has RMSNorm already"),
        (models.gpt2, "llama-to-llama", "swap_rope_layout does not fit: the model has no RoPE"),
        (models.gpt2, "postln-to-llama", "the norms stand before the sublayers already (pre-LN)"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model(make: Any, recipe: str, words: str, tmp_path: Path) -> None:
    source = models.save(make(), tmp_path / "source")
    message = refused(UnsupportedError, tmp_path, source, recipe=recipe)
    assert words in message
    own = {models.llama: "llama-to-llama", models.gpt2: "gpt2-to-llama"}[make]
    assert f"The recipe for this checkpoint is '{own}'" in message


def test_a_qwen2_fits_the_recipe_of_a_llama(tmp_path: Path) -> None:
    # By its facts: it is a LLaMA with biases on q, k and v, and none on o is a bias of zero.
    config = Qwen2Config(**models.LLAMA, layer_types=["full_attention"] * 2)
    source = models.save(models.jitter(Qwen2ForCausalLM(config), 0), tmp_path / "source")
    text = models.write_ids(tmp_path / "text.npy")
    report = converter.convert(source, tmp_path / "target", recipe="llama-to-llama", text=text)
    assert report.verification is not None
    assert report.verification.total.kl < 1e-9


def test_a_windowed_mask_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = models.gpt2()
    window = torch.ones(72, 72).tril().triu(-8)[None, None]
    source = models.write(
        tmp_path / "source", models.config_of(model), models.tensors_of(model) | {"transformer.h.0.attn.bias": window}
    )
    assert "windowed" in refused(UnsupportedError, tmp_path, source)


def wrong_everywhere(block: Block) -> Block:
    return Block({role: tensor * 1.001 for role, tensor in block.items()})


def not_a_number(block: Block) -> Block:
    head = block["head.weight"].clone()
    head[7, 7] = torch.nan
    return Block({**block, "head.weight": head})


@pytest.mark.parametrize("fault", [wrong_everywhere, not_a_number])
def test_an_exact_op_that_changes_the_function_fails_the_conversion(
    fault: Callable[[Block], Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = UntieHead.apply

    def wrong(self: UntieHead, block: Block, spec: Any, notes: Any, *rest: Any) -> Block:
        return fault(right(self, block, spec, notes, *rest)) if notes.ref.kind == "head" else block

    monkeypatch.setattr(UntieHead, "apply", wrong)
    source = models.save(models.gpt2(), tmp_path / "source")
    message = refused(ConverterError, tmp_path, source)
    told = {
        wrong_everywhere: "exact op 'untie_head' changed the function",
        not_a_number: "head.weight (from wte.weight) are not finite",
    }
    assert told[fault] in message


@pytest.mark.parametrize("with_text", [False, True])
def test_files_that_hold_something_else_than_was_measured_fail_the_conversion(
    with_text: bool, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from converter.families.llama import Llama

    mappings = Llama.mappings
    swap = {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}

    def swapped(self: Llama, *arguments: Any) -> list[Any]:
        found = []
        for mapping in mappings(self, *arguments):
            name = next(
                (mapping.name.replace(old, new) for old, new in swap.items() if old in mapping.name), mapping.name
            )
            found.append(type(mapping)(name, mapping.role))
        return found

    monkeypatch.setattr(Llama, "mappings", swapped)
    source = models.save(models.gpt2(), tmp_path / "source")
    message = refused(VerificationError, tmp_path, source, kept=True, text=[text] if with_text else [])
    assert "goes on with --resume" in message
    assert "computes something else from the files" in message
    assert "layers.0 is the first block whose output differs" in message


def test_overrides_of_a_recipe_object_are_applied_too(tmp_path: Path) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    recipe = plan_conversion(source, NAIVE).recipe
    plan = plan_conversion(source, recipe, ["gelu_to_swiglu.units=3"])
    assert plan.target_spec.intermediate_size == 240


def test_a_single_text_needs_no_list(tmp_path: Path, text: Path) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    assert converter.convert(source, tmp_path / "out", recipe=NAIVE, text=text).verification is not None
    assert converter.verify(source, tmp_path / "out", text=str(text)).total.kl > 0


def test_models_that_do_not_fit_into_memory_are_verified_block_by_block(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.save(models.gpt2(), tmp_path / "source")
    whole = converter.convert(source, tmp_path / "whole", recipe=NAIVE, text=text)
    monkeypatch.setattr("converter.conversion.streamed.available_memory", lambda device: 1 << 20)
    monkeypatch.setattr("converter.conversion.finish.load", None)  # nothing is loaded as a whole
    streamed = converter.convert(source, tmp_path / "streamed", recipe=NAIVE, text=text)
    assert whole.verification is not None
    assert streamed.verification is not None
    assert streamed.verification.total.kl == pytest.approx(whole.verification.total.kl, rel=1e-4)
    assert (streamed.speed, whole.verified_by) == (None, "transformers' own class of each")
    assert "block by block" in json.loads((tmp_path / "streamed" / "conversion.json").read_text())["verified_by"]
    assert "block by block" in (tmp_path / "streamed" / "README.md").read_text()
