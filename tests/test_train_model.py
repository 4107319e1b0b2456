"""The study's model: its gradients against finite differences, its optimizer and its text against other definitions."""

import numpy as np
import pytest

import hqarray as hq
from hqarray import train_model, train_text
from hqarray.train_model import Adam, Shape, Transformer

SHAPE = Shape(vocabulary=11, context=8, width=16, layers=2, heads=2)
TOKENS = np.random.default_rng(3).integers(0, SHAPE.vocabulary, (3, SHAPE.context + 1))


@pytest.fixture
def model(monkeypatch):
    """Unquantized, with values large enough that no gradient is lost in float32's rounding."""
    monkeypatch.setattr(train_model, "OUTSIDE", hq.as_recipe("fp32"))
    model = Transformer(SHAPE, hq.as_recipe("fp32"), seed=1)
    rng = np.random.default_rng(2)
    model.parameters.flat += rng.normal(0, 0.2, model.parameters.flat.shape).astype(np.float32)
    return model


def slope(model, direction, size):
    """Central difference of the loss along a direction, in float32 sums."""
    start = model.parameters.flat.copy()
    ends = []
    for sign in (1, -1):
        model.parameters.flat[...] = start + np.float32(sign * size) * direction
        ends.append(float(model.loss(TOKENS)))
    model.parameters.flat[...] = start
    return (ends[0] - ends[1]) / (2 * size)


def largest_error(model, name):
    """Of a parameter's gradient against slopes along itself, where an error anywhere shows, and at random."""
    model.loss_and_gradients(TOKENS)
    gradient = model.gradients[name].copy()
    errors = []
    for direction in (gradient, np.random.default_rng(1).standard_normal(gradient.shape)):
        probe = train_model.Parameters(SHAPE.parameters(), np)
        probe[name][...] = direction / np.linalg.norm(direction)
        expected = float((gradient * probe[name]).sum())
        errors.append(abs(slope(model, probe.flat, 0.02) - expected) / np.linalg.norm(gradient))
    return max(errors)


@pytest.mark.parametrize("name", SHAPE.parameters())
def test_gradients_are_the_slopes_of_the_loss(model, name):
    assert largest_error(model, name) < 0.01


def test_slopes_notice_a_wrong_gradient(model, monkeypatch):
    right = train_model._attention_backward
    monkeypatch.setattr(train_model, "_attention_backward", lambda *given: right(*given) * np.float32(1.05))
    assert largest_error(model, "0.qkv") > 0.02


def test_attention_sees_nothing_that_comes_later(model):
    logits, _ = model._forward(TOKENS[:, :-1])
    changed = TOKENS[:, :-1].copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % SHAPE.vocabulary
    others, _ = model._forward(changed)
    before, after = (x.reshape(3, SHAPE.context, -1) for x in (logits, others))
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(-1) > 1e-3).all()


def test_a_model_that_knows_nothing_has_the_entropy_of_the_vocabulary():
    model = Transformer(SHAPE, hq.as_recipe("mxfp8"), seed=0)
    model.parameters["logits"][...] = 0
    assert float(model.loss(TOKENS)) == pytest.approx(np.log(SHAPE.vocabulary), rel=1e-6)


def test_every_linear_layer_of_a_block_follows_the_recipe_and_the_logits_do_not(monkeypatch):
    asked = []
    right = train_model.linear_forward
    monkeypatch.setattr(
        train_model, "linear_forward",
        lambda x, w, recipe, **given: asked.append((recipe.name, given.get("seed"))) or right(x, w, recipe, **given),
    )
    model = Transformer(SHAPE, hq.as_recipe("mxfp8"), seed=0)
    model.loss_and_gradients(TOKENS)
    model.loss_and_gradients(TOKENS)
    assert [name for name, _ in asked] == (["mxfp8"] * 8 + ["bf16"]) * 2
    seeds = [seed for name, seed in asked if name == "mxfp8"]
    assert len(set(seeds)) == len(seeds), "two layers or steps draw the same numbers"


def test_delayed_scaling_records_three_amaxes_a_layer_and_uses_those_of_the_step_before():
    model = Transformer(SHAPE, hq.as_recipe("fp8_delayed"), seed=0)
    assert len(model.scaling) == 3 * 8
    model.loss_and_gradients(TOKENS)
    used = model.scaling.amax.copy()
    assert (used > 0).all()
    weight = model.parameters["1.up"]
    place = model.places["1.up"]
    assert used[3 * place + 1] == np.abs(weight).max()


# --- optimizer and text -------------------------------------------------------------------------


def test_adam_is_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = rng.standard_normal(50).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(values.copy()))
    optimizer = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    ours = Adam(values)
    for _ in range(20):
        gradient = rng.standard_normal(50).astype(np.float32)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        ours.step(gradient, 0.01)
    np.testing.assert_allclose(values, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_text_comes_with_python_and_is_split_at_its_end():
    text = train_text.read_text()
    assert len(text.train) > 200_000 and 60 < text.vocabulary < 256
    assert len(text.held_out) == (len(text.train) + len(text.held_out)) // train_text.HELD_OUT
    assert max(text.train.max(), text.held_out.max()) < text.vocabulary


def test_pieces_are_pieces_of_the_text_and_the_same_for_a_seed():
    tokens = np.arange(200, dtype=np.uint8)
    pieces = train_text.batches(tokens, 5, 3, 17, seed=1)
    assert pieces.shape == (5, 3, 17) and (np.diff(pieces.astype(int), axis=2) == 1).all()
    np.testing.assert_array_equal(pieces, train_text.batches(tokens, 5, 3, 17, seed=1))
    assert not np.array_equal(pieces, train_text.batches(tokens, 5, 3, 17, seed=2))
    with pytest.raises(train_text.TextError, match="200 bytes of text hold no piece of 201"):
        train_text.batches(tokens, 1, 1, 201, seed=0)


def test_a_python_without_help_texts_says_what_to_do(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(train_text.importlib, "import_module", missing)
    with pytest.raises(train_text.TextError, match="--text FILE"):
        train_text.read_text()
