"""The mixin over TRL's SFTTrainer. TRL is not among the extras: run by `make compat`."""

import pytest
import torch

import rholoss as rho
from rholoss.integrations.causal_lm import CausalLMLoss
from rholoss.integrations.huggingface import RhoMixin

trl = pytest.importorskip("trl", reason="TRL is not installed; `make compat` runs this")
import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402

WORDS, ROWS, TRAINED, KEEP = 30, 32, 4, 0.25


class RhoSFTTrainer(RhoMixin, trl.SFTTrainer):
    """As a user would write it."""


def tokenizer():
    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{i}": i for i in range(2, WORDS)}}
    model = tokenizers.models.WordLevel(words, unk_token="[PAD]")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]"
    )


def texts():
    generator = torch.Generator().manual_seed(0)
    rows = [
        " ".join(f"w{i}" for i in torch.randint(2, WORDS, (4 + row % 8,), generator=generator))
        for row in range(ROWS)
    ]
    return datasets.Dataset.from_dict({"text": rows})


def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


@pytest.mark.parametrize("loss", ["causal_lm", CausalLMLoss(tokens=16)], ids=["logits", "by parts"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_are_selected_in_supervised_fine_tuning(tmp_path, loss, accumulate):
    il = torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    seen = []
    select = rho.Selector(
        "rho", irreducible=il, keep=KEEP, loss=loss,
        on_scores=[lambda step, stats, chosen: seen.append((stats, chosen))],
    )  # fmt: skip
    settings = trl.SFTConfig(
        str(tmp_path), per_device_train_batch_size=TRAINED, num_train_epochs=2, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, bf16=False,
        gradient_accumulation_steps=accumulate, dataset_num_proc=None,
    )  # fmt: skip
    trainer = RhoSFTTrainer(
        model(), settings, train_dataset=texts(), processing_class=tokenizer(), selector=select
    )
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert [len(chosen.index) for _, chosen in seen] == [TRAINED] * 4
    for stats, chosen in seen:
        best = (stats.loss - il[stats.index]).topk(TRAINED).indices
        assert sorted(stats.index[best].tolist()) == sorted(chosen.index.tolist())
    assert trainer.state.global_step == 4 // accumulate
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


def test_packing_is_refused(tmp_path):
    settings = trl.SFTConfig(str(tmp_path), packing=True, use_cpu=True, report_to=[], bf16=False)
    select = rho.Selector("uniform", keep=KEEP)
    with pytest.raises(rho.errors.RholossError, match="put several examples into one row"):
        RhoSFTTrainer(
            model(), settings, train_dataset=texts(), processing_class=tokenizer(), selector=select
        )
