"""Losses of language models by row: the same as from all logits, with fewer of them at a time."""

import pytest
import torch

import rholoss as rho
from rholoss import losses
from rholoss.errors import RholossError
from rholoss.integrations.causal_lm import CausalLMLoss

transformers = pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")
VOCABULARY = 50


def tiny(name="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    # At their initial size all logits are near 0, and every loss near log(50).
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=1.0)
    return model.eval()


def texts(rows=5, length=12):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    labels = tokens.clone()
    for row in range(rows):
        mask[row, length - row :] = 0
    labels[mask == 0] = losses.IGNORED
    labels[0] = losses.IGNORED  # a row in which nothing counts
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("tokens", [1, 7, 4096])
@torch.no_grad()
def test_the_losses_are_those_of_all_logits(tokens):
    model, batch = tiny(), texts()
    widths = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: widths.append(inputs[0].numel() // 16)
    )
    loss_B = CausalLMLoss(tokens)(model, batch)
    assert max(widths[:-1]) <= tokens  # the last is the row that is compared
    torch.testing.assert_close(
        loss_B, losses.TASKS["causal_lm"](model, batch), rtol=1e-5, atol=1e-5
    )
    assert loss_B[0] == 0
    assert loss_B[1:].std() > 0.1


@torch.no_grad()
def test_a_model_that_changes_its_logits_is_found_at_the_first_call():
    capped = tiny("Gemma2", final_logit_softcapping=1.0, head_dim=8, query_pre_attn_scalar=8)
    with pytest.raises(
        RholossError, match=r"changes its logits after the output layer\. Use loss="
    ):
        CausalLMLoss()(capped, texts())


@torch.no_grad()
def test_what_it_cannot_take_apart_is_refused():
    with pytest.raises(RholossError, match="needs a model with a backbone and an output layer"):
        CausalLMLoss()(torch.nn.Linear(2, 2), texts())
    with pytest.raises(RholossError, match="`tokens` must be at least 1, but is 0"):
        CausalLMLoss(0)


def test_the_selector_chooses_the_same_with_it():
    model, batch = tiny(), texts(rows=8)
    batch["index"] = torch.arange(8)
    chosen = []
    for loss in ("causal_lm", CausalLMLoss(5)):
        select = rho.Selector("rho", irreducible=torch.linspace(0, 1, 8), keep=0.5, loss=loss)
        chosen.append(select(model, batch)["index"].tolist())
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 4


def test_adapters_are_part_of_the_model():
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model = peft.get_peft_model(
        tiny(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    with torch.no_grad():
        loss_B, all_B = CausalLMLoss()(model, texts()), losses.TASKS["causal_lm"](model, texts())
        torch.testing.assert_close(loss_B, all_B, rtol=1e-5, atol=1e-5)
        with model.disable_adapter():
            assert not torch.allclose(loss_B, losses.TASKS["causal_lm"](model, texts()), atol=1e-4)
