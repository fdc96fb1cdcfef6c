"""Whole scripts in the styles of nanoGPT, Lightning, Hugging Face's Trainer and torchtitan, with a layer in each."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from attnzoo import build_attention, list_variants
from attnzoo.layer import starts

SIZES = {"hidden_size": 32, "num_heads": 2}
VOCAB = 16


def texts(rows: int = 8, length: int = 25) -> torch.Tensor:
    """Rows that count on from a random token, which a model learns within a few steps."""
    start = torch.randint(VOCAB, (rows, 1), generator=torch.Generator().manual_seed(0))
    return (start + torch.arange(length)) % VOCAB


class Block(nn.Module):
    def __init__(self, name: str = "fox", **options) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = build_attention(name, **SIZES, **options)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)
        self.layers = nn.ModuleList(blocks or [Block(gate_bias=5.0, block="pro"), Block("gated_deltanet")])
        self.ln_f = nn.LayerNorm(32)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def open_share(layer) -> float:
    """The mean forget gate of a FoX layer."""
    return layer.project(torch.randn(1, 16, 32)).gate.log_decay.exp().mean().item()


def said(layer) -> list[str]:
    """The notices of a training step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(torch.randn(2, 5, 32)).sum().backward()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def test_nanogpt():
    torch.manual_seed(0)
    model = GPT()
    model.apply(model._init_weights)
    for name, p in model.named_parameters():
        if name.endswith(("mlp.2.weight", "o_proj.weight")):
            nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * len(model.layers)))
    assert open_share(model.layers[0].attn) > 0.98
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    rows, losses = texts(), []
    for _ in range(12):
        for part in rows.chunk(2):
            with torch.amp.autocast("cpu", torch.bfloat16):
                loss = model(part[:, :-1], part[:, 1:])[1] / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad():
        idx = rows[:1, :4]
        for _ in range(3):
            idx = torch.cat([idx, model(idx[:, -24:])[0][:, -1:].softmax(-1).argmax(-1)], 1)
    assert idx.shape == (1, 7)


class Lit(nn.Module):
    """What a LightningModule has, and what its trainer does with it."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.hparams, self.model = {"lr": lr}, GPT()

    def training_step(self, batch, batch_idx):
        return self.model(batch[:, :-1], batch[:, 1:])[1]

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 20)}


def test_lightning(tmp_path):
    torch.manual_seed(0)
    module, rows = Lit(), texts()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]
    with torch.inference_mode():  # the trainer validates before the first step
        module.eval()
        first = module.validation_step(rows, 0).item()
        module.train()

    def closure():
        optimizer.zero_grad()
        loss = module.training_step(rows, 0)
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.step(closure)
        scheduler.step()
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": module.hparams}, tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    loaded = Lit(**saved["hyper_parameters"])
    loaded.load_state_dict(saved["state_dict"], strict=True)
    with torch.inference_mode():
        last = module.eval().validation_step(rows, 0)
        assert torch.equal(loaded.eval().validation_step(rows, 0), last)
    assert last.item() < 0.7 * first


def test_hugging_faces_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PreTrainedConfig):
        model_type = "somebody_elses"

    class Model(transformers.PreTrainedModel):
        config_class, base_model_prefix = Config, "model"

        def __init__(self, config):
            super().__init__(config)
            self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
            self.block = Block(gate_bias=5.0, rotary=10000.0)
            self.post_init()

        def _init_weights(self, module):
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.data.normal_(mean=0.0, std=0.02)
                if getattr(module, "bias", None) is not None:
                    module.bias.data.zero_()

        def forward(self, input_ids, labels=None):
            logits = self.head(self.block(self.embed(input_ids)))
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}

    torch.manual_seed(0)
    model = Model(Config())
    assert open_share(model.block.attn) > 0.98
    rows = [{"input_ids": row, "labels": row} for row in texts(32)]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=2e-2,
        logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "saved")
    loaded = Model.from_pretrained(tmp_path / "saved")
    batch = {"input_ids": texts(), "labels": texts()}
    assert torch.equal(loaded(**batch)["logits"], model.eval()(**batch)["logits"])
    assert said(loaded.train().block.attn) == []


def test_torchtitan(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    plain, rows = GPT(), texts()
    plain.apply(plain._init_weights)
    expected = plain(rows[:, :-1], rows[:, 1:])[1]
    expected.backward()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with torch.device("meta"):
            model = GPT()
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
            fully_shard(model.layers[number], mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        gate = model.layers[0].attn.gate.forget_proj.bias
        assert torch.equal(gate.full_tensor(), torch.full((2,), 5.0))
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                ours.copy_(torch.distributed.tensor.distribute_tensor(theirs, mesh, ours.placements))
        loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            gap = (ours.grad.full_tensor() - theirs.grad).abs().max()
            assert gap <= 1e-5 + 1e-4 * theirs.grad.abs().max(), name
    finally:
        torch.distributed.destroy_process_group()


# what cannot be prevented is said


def annotated_transformer(model):
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


def by_name(model):
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0)
        elif name.endswith("weight"):
            p.data.normal_(0.0, 0.02)
        else:
            p.data.zero_()


@pytest.mark.parametrize(
    ("init", "name", "options", "first"),
    [
        (annotated_transformer, "fox", {"block": "pro"}, "q_norm.weight"),
        (annotated_transformer, "gated_deltanet", {}, "output_norm.weight"),
        (by_name, "fox", {"gate_bias": 5.0}, "gate.forget_proj.bias"),
        (by_name, "wall", {}, "gate."),
        (by_name, "mamba2", {}, ""),
        (by_name, "alibi", {"gate": "independent"}, "gate."),
    ],
)
def test_an_initialisation_that_reaches_gates_and_norms_is_named_once(init, name, options, first):
    layer = build_attention(name, **SIZES, **options)
    init(layer)
    with torch.no_grad():
        layer(torch.randn(1, 3, 32))
    (line,) = said(layer)
    assert line.startswith(first)
    assert "reset_parameters()" in line
    assert said(layer) == []
    layer.reset_parameters()
    assert said(layer) == []


def test_numbers_that_are_still_on_their_way_are_waited_for_by_no_step(monkeypatch):
    """As on a GPU: the notice comes with the numbers, which are those of the first step."""
    layer = build_attention("fox", **SIZES, block="pro")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=5.0)
    there = []
    monkeypatch.setattr(starts, "_sent", lambda x: (x, lambda: bool(there)))
    again = copy.deepcopy(layer)
    assert said(layer) == said(again) == []
    again.reset_parameters()
    there.append(True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert len(said(layer)) == 1
    assert said(layer) == said(again) == []


@pytest.mark.gpu
def test_a_first_training_step_does_not_wait_for_a_gpu():
    layer = build_attention("fox", **SIZES, block="pro").cuda()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=5.0)
    x = torch.randn(2, 5, 32, device="cuda")
    layer.eval()(x)
    layer.train()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="expected the layer's own start"):
        layer(x)


def test_a_layer_that_begins_as_it_was_made_or_was_loaded_says_nothing():
    for name in list_variants():
        layer, other = (build_attention(name, **SIZES) for _ in range(2))
        layer.apply(GPT._init_weights.__get__(nn.Module()))
        assert said(copy.deepcopy(layer)) == [], name
        by_name(other)
        layer.load_state_dict(other.state_dict())
        assert said(layer) == [], name


def test_modules_that_were_exchanged_or_wrapped_since_are_not_asked_about():
    """As PEFT wraps those of `modules_to_save`."""
    layer = build_attention("fox", **SIZES, block="pro")
    layer.output_norm, gate = nn.Identity(), layer.gate
    nn.utils.parametrizations.weight_norm(layer.k_shift.proj)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.trained = copy.deepcopy(gate)

        def forward(self, *given):
            return self.trained(*given)

    layer.gate = Wrapped()
    with torch.no_grad():
        layer.q_norm.weight.mul_(9)
    (line,) = said(layer)
    assert line.startswith("q_norm.weight: expected the layer's own start")


def test_what_was_made_on_the_meta_device_and_never_initialised_is_named():
    with torch.device("meta"):
        layer = build_attention("fox", **SIZES, block="pro")
    layer.to_empty(device="cpu")
    for p in layer.parameters():
        p.data.fill_(0.1)  # what memory may hold
    (line,) = said(layer)
    assert "expected initial values after the meta device" in line
    with torch.device("meta"):
        layer = build_attention("fox", **SIZES, block="pro")
    layer.to_empty(device="cpu").reset_parameters()
    assert said(layer) == []


def test_a_layer_whose_start_another_thread_has_looked_at_is_left_alone(monkeypatch):
    """Threads may share a layer, and either may be the one to end the look."""
    attn = build_attention("fox", hidden_size=32, num_heads=2)

    def sent(squares):
        others = [attn.look_at_starts]  # of another thread, between the answer and its use

        def there():
            while others:
                others.pop()()
            return True

        return squares, there

    monkeypatch.setattr("attnzoo.layer.starts._sent", sent)
    attn.look_at_starts()
    assert attn._starts is None
