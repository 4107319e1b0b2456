"""hqarray: low-precision matrices (FP8, FP8 block, MX, NVFP4), hybrid and bit-exact.

    hx = hqarray.quantize(x, rowwise="mxfp8", columnwise="nvfp4")
    y = hx @ hw.T

Importing it loads NumPy and ml_dtypes only.
"""

from .arrays import HybridArray, QuantizedArray
from .delayed import DelayedScaling
from .explore import Comparison, compare
from .formats import ELEMENTS, FORMATS, FP8, MX, NVFP4, Element, Format, FP8Block, HighPrecision, as_format
from .gemm import Engine
from .grouped import GroupedArray
from .grouped_ops import grouped_quantize, split_quantize
from .linear import linear_backward, linear_forward
from .ops import amax, dequantize, engine_for, fake_quantize, matmul, quantize, requantize, with_columnwise
from .plots import plot_error, plot_formats, plot_groups, plot_scales, plot_tradeoff
from .recipes import RECIPES, Delayed, Recipe, as_recipe
from .shards import Shard, quantize_shard, shard_alignment

__version__ = "0.1.0"

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "FP8",
    "MX",
    "NVFP4",
    "RECIPES",
    "Comparison",
    "Delayed",
    "DelayedScaling",
    "Element",
    "Engine",
    "FP8Block",
    "Format",
    "GroupedArray",
    "HighPrecision",
    "HybridArray",
    "QuantizedArray",
    "Recipe",
    "Shard",
    "amax",
    "as_format",
    "as_recipe",
    "compare",
    "dequantize",
    "engine_for",
    "fake_quantize",
    "grouped_quantize",
    "linear_backward",
    "linear_forward",
    "matmul",
    "plot_error",
    "plot_formats",
    "plot_groups",
    "plot_scales",
    "plot_tradeoff",
    "quantize",
    "quantize_shard",
    "requantize",
    "shard_alignment",
    "split_quantize",
    "with_columnwise",
]
