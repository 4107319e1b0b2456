"""A small transformer whose linear layers are hqarray's, with its backward pass written out.

Array code for NumPy and CuPy alike. Activations, parameters and gradients are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .delayed import DelayedScaling
from .layout import Array, namespace
from .linear import Saved, linear_backward, linear_forward
from .recipes import Recipe, as_recipe

OUTSIDE = as_recipe("bf16")
"""Recipe of the layer that makes logits, which mixed-precision training leaves alone."""

EPSILON = 1e-5
"""Of the norms."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder: `layers` blocks of causal attention and a GELU layer of 4 * width, each behind an RMS norm."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name; weights of linear layers are (out, in)."""
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (self.vocabulary, self.width), "places": (self.context, self.width)
        }
        for i in range(self.layers):
            shapes |= {
                f"{i}.norm": (self.width,), f"{i}.qkv": (3 * self.width, self.width),
                f"{i}.attended": (self.width, self.width), f"{i}.second_norm": (self.width,),
                f"{i}.up": (4 * self.width, self.width), f"{i}.down": (self.width, 4 * self.width),
            }
        return shapes | {"norm": (self.width,), "logits": (self.vocabulary, self.width)}

    @property
    def quantized_layers(self) -> list[str]:
        """Names of the linear layers that follow the recipe, in the order of the forward pass."""
        return [f"{i}.{name}" for i in range(self.layers) for name in ("qkv", "attended", "up", "down")]


class Parameters:
    """Arrays by name, as views of one flat float32 array, so that an optimizer does all of them at once."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], module: Any) -> None:
        self.flat: Array = module.zeros(sum(map(prod, shapes.values())), np.float32)
        self._views: dict[str, Array] = {}
        start = 0
        for name, shape in shapes.items():
            self._views[name] = self.flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]


class Transformer:
    """The model, its gradients, and what its linear layers need from step to step."""

    def __init__(self, shape: Shape, recipe: Recipe, seed: int, module: Any = np) -> None:
        """Initial values are the same for every recipe and module."""
        self.shape, self.recipe, self.module, self.seed = shape, recipe, module, seed
        shapes = shape.parameters()
        self.parameters, self.gradients = Parameters(shapes, module), Parameters(shapes, module)
        self.step = 0
        rng = np.random.default_rng(seed)
        for name, size in shapes.items():
            if len(size) == 1:
                self.parameters[name][...] = 1
                continue
            spread = 0.02 if name in ("tokens", "places", "logits") else size[1] ** -0.5
            if name.endswith(("attended", "down")):
                spread /= (2 * shape.layers) ** 0.5
            self.parameters[name][...] = module.asarray(rng.normal(0, spread, size).astype(np.float32))
        self.places = {name: i for i, name in enumerate(shape.quantized_layers)}
        self.scaling: DelayedScaling | None = None
        if recipe.delayed is not None:
            self.scaling = DelayedScaling(3 * len(self.places), recipe.delayed, like=self.parameters.flat)

    # --- linear layers ---------------------------------------------------------------------------

    def _linear(self, name: str, x: Array) -> tuple[Array, Saved]:
        place = self.places.get(name)
        if place is None:
            return linear_forward(x, self.parameters[name], OUTSIDE)
        return linear_forward(
            x, self.parameters[name], self.recipe,
            seed=(self.seed << 40) + self.step * len(self.places) + place,
            amax=None if self.scaling is None else self.scaling[3 * place : 3 * place + 3],
        )

    def _linear_backward(self, name: str, dy: Array, saved: Saved) -> Array:
        dx, _ = linear_backward(dy, saved, dw=self.gradients[name])
        return dx

    # --- the pass forward and back ----------------------------------------------------------------

    def loss(self, tokens: Array) -> Array:
        """Mean cross entropy, in nats a token, of predicting tokens (batch, context + 1) from those before them."""
        logits, _ = self._forward(tokens[:, :-1])
        return _cross_entropy(logits, tokens[:, 1:].reshape(-1))[0]

    def loss_and_gradients(self, tokens: Array) -> Array:
        """The loss; gradients are in .gradients. One step: what a recipe draws or records moves on."""
        self.gradients.flat[...] = 0
        logits, saved = self._forward(tokens[:, :-1])
        loss, dlogits = _cross_entropy(logits, tokens[:, 1:].reshape(-1))
        self._backward(dlogits, saved)
        self.step += 1
        if self.scaling is not None:
            self.scaling.update()
        return loss

    def _forward(self, tokens: Array) -> tuple[Array, list[Any]]:
        p, (batch, context) = self.parameters, tokens.shape
        # an embedding as a product: its gradient is then one too, and sums in the same order each time
        chosen = _one_hot(tokens.reshape(-1), self.shape.vocabulary)
        x = chosen @ p["tokens"] + self.module.tile(p["places"][:context], (batch, 1))
        tape: list[Any] = [chosen, (batch, context)]
        for i in range(self.shape.layers):
            normed, norm = _rms_norm(x, p[f"{i}.norm"])
            qkv, into = self._linear(f"{i}.qkv", normed)
            mixed, attention = _attention(qkv, batch, self.shape.heads)
            attended, out = self._linear(f"{i}.attended", mixed)
            x = x + attended
            normed, second_norm = _rms_norm(x, p[f"{i}.second_norm"])
            hidden, up = self._linear(f"{i}.up", normed)
            active, gelu = _gelu(hidden)
            y, down = self._linear(f"{i}.down", active)
            x = x + y
            tape.append((norm, into, attention, out, second_norm, up, gelu, down))
        normed, norm = _rms_norm(x, p["norm"])
        logits, head = self._linear("logits", normed)
        tape.append((norm, head))
        return logits, tape

    def _backward(self, dlogits: Array, tape: list[Any]) -> None:
        g = self.gradients
        chosen, (batch, context), *blocks, (norm, head) = tape
        dx, g["norm"][...] = _rms_norm_backward(self._linear_backward("logits", dlogits, head), norm)
        for i in reversed(range(self.shape.layers)):
            norm, into, attention, out, second_norm, up, gelu, down = blocks[i]
            dactive = self._linear_backward(f"{i}.down", dx, down)
            dnormed = self._linear_backward(f"{i}.up", _gelu_backward(dactive, gelu), up)
            dresidual, g[f"{i}.second_norm"][...] = _rms_norm_backward(dnormed, second_norm)
            dx = dx + dresidual
            dmixed = self._linear_backward(f"{i}.attended", dx, out)
            dnormed = self._linear_backward(f"{i}.qkv", _attention_backward(dmixed, attention), into)
            dresidual, g[f"{i}.norm"][...] = _rms_norm_backward(dnormed, norm)
            dx = dx + dresidual
        g["tokens"][...] = chosen.T @ dx
        g["places"][:context] = dx.reshape(batch, context, -1).sum(0)


# --- the other layers, each with its gradient ---------------------------------------------------


def _one_hot(numbers: Array, count: int) -> Array:
    module = namespace(numbers)
    return (numbers[:, None] == module.arange(count)).astype(np.float32)


def _rms_norm(x: Array, gain: Array) -> tuple[Array, tuple[Array, ...]]:
    scale = ((x * x).mean(1, keepdims=True) + np.float32(EPSILON)) ** np.float32(-0.5)
    normed = x * scale
    return normed * gain, (normed, scale, gain)


def _rms_norm_backward(dy: Array, saved: tuple[Array, ...]) -> tuple[Array, Array]:
    normed, scale, gain = saved
    dnormed = dy * gain
    dx = scale * (dnormed - normed * (dnormed * normed).mean(1, keepdims=True))
    return dx, (dy * normed).sum(0)


GELU_A, GELU_B = np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)


def _gelu(x: Array) -> tuple[Array, tuple[Array, Array]]:
    module = namespace(x)
    bent = module.tanh(GELU_A * (x + GELU_B * (x * x * x)))
    return np.float32(0.5) * x * (1 + bent), (x, bent)


def _gelu_backward(dy: Array, saved: tuple[Array, Array]) -> Array:
    x, bent = saved
    slope = GELU_A * (1 + 3 * GELU_B * (x * x))
    return np.float32(0.5) * dy * ((1 + bent) + x * (1 - bent * bent) * slope)


def _attention(qkv: Array, batch: int, heads: int) -> tuple[Array, tuple[Array, ...]]:
    """(tokens, 3 * width), queries, keys and values one after another -> (tokens, width)."""
    module, width = namespace(qkv), qkv.shape[1] // 3
    split = qkv.reshape(batch, -1, 3, heads, width // heads)
    q, k, v = (split[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = (q @ k.transpose(0, 1, 3, 2)) * np.float32((width // heads) ** -0.5)
    context = scores.shape[-1]
    scores = module.where(module.tril(module.ones((context, context), bool)), scores, np.float32(-np.inf))
    weights = module.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(-1, width)
    return mixed, (q, k, v, weights)


def _attention_backward(dmixed: Array, saved: tuple[Array, ...]) -> Array:
    q, k, v, weights = saved
    module, (batch, heads, context, size) = namespace(q), q.shape
    dout = dmixed.reshape(batch, context, heads, size).transpose(0, 2, 1, 3)
    dv = weights.transpose(0, 1, 3, 2) @ dout
    dweights = dout @ v.transpose(0, 1, 3, 2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * np.float32(size**-0.5)
    dq, dk = dscores @ k, dscores.transpose(0, 1, 3, 2) @ q
    stacked = module.stack([dq, dk, dv])  # (3, batch, heads, context, size)
    return stacked.transpose(1, 3, 0, 2, 4).reshape(batch * context, 3 * heads * size)


def _cross_entropy(logits: Array, wanted: Array) -> tuple[Array, Array]:
    module = namespace(logits)
    shifted = logits - logits.max(1, keepdims=True)
    exponentials = module.exp(shifted)
    sums = exponentials.sum(1, keepdims=True)
    rows = module.arange(len(wanted))
    loss = (module.log(sums[:, 0]) - shifted[rows, wanted]).mean()
    dlogits = exponentials / sums
    dlogits[rows, wanted] -= 1
    return loss, dlogits / np.float32(len(wanted))


class Adam:
    """Adam (arXiv 1412.6980) over one flat array, in float32."""

    def __init__(self, values: Array, decay: tuple[float, float] = (0.9, 0.95), epsilon: float = 1e-8) -> None:
        module = namespace(values)
        self.values, self.decay, self.epsilon, self.steps = values, decay, np.float32(epsilon), 0
        self.mean, self.square = module.zeros_like(values), module.zeros_like(values)

    def step(self, gradient: Array, rate: float) -> None:
        """Change the values in place."""
        self.steps += 1
        for moment, decay, new in ((self.mean, self.decay[0], gradient), (self.square, self.decay[1], gradient**2)):
            moment *= np.float32(decay)
            moment += np.float32(1 - decay) * new
        first, second = (1 - decay**self.steps for decay in self.decay)
        root = namespace(self.values).sqrt(self.square * np.float32(1 / second)) + self.epsilon
        self.values -= np.float32(rate / first) * self.mean / root


__all__ = ["Adam", "Parameters", "Shape", "Transformer"]
