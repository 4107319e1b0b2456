"""Delayed scaling: the amax that a matrix is quantized with comes from those of earlier steps."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .inputs import Slots, as_array, backend_of
from .layout import Array, namespace
from .recipes import Delayed


class DelayedScaling:
    """Amaxes of many matrices over the last steps, in one buffer.

        state = hq.DelayedScaling(3 * layers, hq.Delayed(length=16), like=x)
        hx = hq.quantize(x, rowwise="fp8_e4m3", columnwise="nvfp4", amax=state[0])
        state.update()      # after each step

    A slot serves any format with one amax per matrix, different ones in the two parts too, since what it holds is
    an amax and not a scale; slots of a group's members serve grouped_quantize(amax=state[i:j]). Until something was
    recorded an amax is 0, and the scale 1.

    history  float32 (count, length), oldest first; zeros where nothing is recorded yet
    current  float32 (count,), largest magnitudes quantized since the last update; reduce it over processes before
             update() where they share a scale
    amax     float32 (count,), what is quantized with
    rule     Delayed

    The arrays are the state: keep copies of them in a checkpoint, and write them back with [...].
    """

    __slots__ = ("amax", "current", "history", "rule")

    def __init__(self, count: int, rule: Delayed | None = None, *, like: Any = None) -> None:
        """State of count matrices, zero, where `like` is: a NumPy or CuPy array or a tensor; None: on the host."""
        if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 0:
            raise ValueError(f"count is a number of matrices, such as 3 for each linear layer, not {count!r}")
        if rule is not None and not isinstance(rule, Delayed):
            raise TypeError(f"rule is {type(rule).__name__}; give a Delayed, such as hq.Delayed(length=16)")
        self.rule = Delayed() if rule is None else rule
        where: Array = np.empty(0, np.float32) if like is None else as_array(like, "like")
        if isinstance(where, np.ndarray):
            self._allocate(operator.index(count), np)
        else:
            with where.device:
                self._allocate(operator.index(count), namespace(where))

    def _allocate(self, count: int, module: Any) -> None:
        self.history: Array = module.zeros((count, self.rule.length), np.float32)
        self.current: Array = module.zeros(count, np.float32)
        self.amax: Array = module.zeros(count, np.float32)

    def __len__(self) -> int:
        return len(self.amax)

    def __getitem__(self, index: int | slice) -> Slots:
        """The slot of one matrix, or those of several: of the members of a group, or of a layer's operands.

        Raises IndexError for a number that there is not, TypeError for what is neither an integer nor a slice.
        """
        there = f"there are {len(self)} slots" + (f", 0 to {len(self) - 1}" if len(self) else "")
        if not isinstance(index, slice):
            if not hasattr(index, "__index__"):
                raise TypeError(f"state[{index!r}]: a slot is an integer, several are a slice; {there}")
            if not -len(self) <= operator.index(index) < len(self):
                raise IndexError(f"state[{index}]: {there}")
        return Slots(self.amax, self.current)[index]

    def update(self) -> None:
        """Take what was recorded into the history, and amaxes from there; on a GPU one kernel, and nothing waits.

        Formulas: TransformerEngine's delayed scaling. An amax of 0, of a matrix that was not quantized in this step,
        and an infinite one leave history and amax as they are.
        """
        backend_of(self.amax).update_amaxes(
            self.history, self.current, self.amax, self.rule.take == "max", self.rule.margin
        )

    def __repr__(self) -> str:
        return f"DelayedScaling({len(self)}, {self.rule!r})"


__all__ = ["DelayedScaling"]
