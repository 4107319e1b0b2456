"""Formats that no CUDA kernel quantizes are refused in one place, by name and with the remedy; all are decoded."""

import pytest

import hqarray as hq
from hqarray.formats import FORMATS, as_format
from hqarray.rawkernels import catalogue, traits

named = pytest.mark.parametrize

LACKING = {
    "nvfp4(rht=true)": "the Hadamard transform", "nvfp4(rounding=stochastic)": "stochastic rounding",
    "nvfp4(four_over_six=mae)": "four-over-six", "nvfp4(global_bound=256)": "other bounds than 448",
    "nvfp4_row": "one global scale for each row", "fp8_row_e4m3": "one scale for each row",
    "mxfp8_32x32": "blocks of 32x32",
}


@named("grouped", [False, True])
@named(("name", "lacks"), LACKING.items())
def test_quantizing_names_the_format_what_it_lacks_and_the_remedy(name, lacks, grouped):
    format = as_format(name)
    for pair in ((format, None), (None, format), (as_format("mxfp8"), format)):
        with pytest.raises(NotImplementedError) as error:
            traits.quantize_launch(*pair, "bfloat16", True, grouped)
        assert format.name in str(error.value) and lacks in str(error.value)
        assert "NumPy arrays (cupy.asnumpy)" in str(error.value)


@named("name", LACKING)
def test_a_part_of_any_format_is_decoded(name):
    storage = as_format(name).storage
    for launch in (traits.dequantize_launch(storage, "float32", False, True),
                   traits.decode_launch(storage, "float32", 1, False)):
        assert launch.source.file in ("dequantize.cu", "decode.cu")


def test_the_catalogue_holds_the_rows_that_are_built():
    assert set(FORMATS) - set(catalogue.BUILT) == {name for name in LACKING if name in FORMATS}
    assert all(traits.not_built(format) is None for format in catalogue.BUILT.values())


def test_no_engine_claims_what_is_not_native():
    for name in ("fp8_row_e4m3", "nvfp4_row"):
        storage = FORMATS[name].storage
        for other, chip in ((n, c) for n in FORMATS for c in ((9, 0), (10, 0))):
            engine = hq.gemm.choose_engine(storage, FORMATS[other].storage, chip)
            if (name, other, chip) == ("fp8_row_e4m3", "fp8_row_e4m3", (9, 0)):
                assert engine.name == "native"
            else:
                assert engine.name in ("bf16x3", "fp32") and storage.bf16_terms == 3
