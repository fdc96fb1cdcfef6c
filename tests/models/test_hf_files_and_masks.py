"""Behind Hugging Face's interface: float64 outlasts a file, and a mask of ones beside packed sequences is none."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import HYBRID, SOME, build, ids, load


@pytest.mark.parametrize("attention", [*SOME, "mamba2", "alibi", "kda"], ids=ids)
def test_a_float64_model_comes_back_as_it_was(attention, tmp_path):
    tokens = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    model = build(attention).double()
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float64)
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
    # sums of products differ by the last bit where memory is aligned otherwise
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("attention", ["fox", HYBRID], ids=ids)
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
def test_a_mask_of_ones_beside_packed_sequences_is_none(attention, kind):
    model = build(attention)
    tokens = torch.randint(1, 64, (1, 9))
    positions, borders = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), torch.tensor([0, 4, 9])
    ones = torch.ones(1, 9, dtype=kind)
    apart = torch.cat([model(tokens[:, :4]).logits, model(tokens[:, 4:]).logits], 1)
    for given in ({"position_ids": positions}, {"cu_seq_lens_q": borders}):
        torch.testing.assert_close(model(tokens, attention_mask=ones, **given).logits, apart)
    both = model(tokens, attention_mask=ones, position_ids=positions, cu_seq_lens_q=borders).logits
    torch.testing.assert_close(both, apart)


def test_a_mask_with_padding_beside_packed_sequences_is_refused():
    model, tokens = build("fox"), torch.randint(1, 64, (1, 9))
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="position_ids"):
        model(tokens, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 4, 9]))


def test_tokens_that_are_not_there_are_named():
    model = build("fox")
    decoder, tokens = model.model, torch.randint(1, 64, (1, 9))
    for name, call in (
        ("input_ids", lambda bad: decoder(bad)),
        ("targets", lambda bad: decoder(tokens, targets=bad)),
        ("labels", lambda bad: model(tokens, labels=bad)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected tokens, got a tensor of the meta device"):
            call(tokens.to("meta"))
        with pytest.raises(ValueError, match=f"^{name}: expected a dense tensor, got torch.sparse_coo"):
            call(tokens.to_sparse())
    from attnzoo.models import Generator

    generator = Generator(decoder, 1, 20)
    for bad in (tokens[0].to("meta"), tokens[0].to_sparse()):
        with pytest.raises(ValueError, match="^prompt: expected "):
            generator.add(bad, 3)
    layer = decoder.blocks[0].attention
    with pytest.raises(ValueError, match="^x: expected a dense tensor, got torch.sparse_coo"):
        layer(torch.randn(1, 4, 32).to_sparse())
