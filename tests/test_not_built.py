"""Every format of the table is quantized and decoded on CuPy; what were not would be refused in one place, by name."""

import pytest

import hqarray as hq
from hqarray.formats import FORMATS, as_format
from hqarray.rawkernels import catalogue, traits

named = pytest.mark.parametrize

OPTIONS = ("nvfp4(rht=true)", "nvfp4(rounding=stochastic)", "nvfp4(four_over_six=mae)", "nvfp4(global_bound=256)",
           "nvfp4(rht=true,per_row=true)", "fp8_row_e4m3(pow2=true)")


@named("grouped", [False, True])
def test_quantizing_names_the_format_what_it_lacks_and_the_remedy(monkeypatch, grouped):
    format = as_format("nvfp4_row")
    monkeypatch.setattr(traits, "not_built", lambda wanted: "a thing" if wanted == format else None)
    for pair in ((format, None), (None, format), (as_format("mxfp8"), format)):
        with pytest.raises(NotImplementedError) as error:
            traits.quantize_launch(*pair, "bfloat16", True, grouped)
        assert format.name in str(error.value) and "they lack a thing" in str(error.value)
        assert "NumPy arrays (cupy.asnumpy)" in str(error.value)


@named("name", [*FORMATS, *OPTIONS])
def test_each_format_is_quantized_and_decoded(name):
    format = as_format(name)
    assert traits.not_built(format) is None
    launches = [traits.quantize_launch(format, format, "bfloat16", True, grouped) for grouped in (False, True)]
    storage = format.storage
    launches += [traits.dequantize_launch(storage, "float32", False, True),
                 traits.decode_launch(storage, "float32", 1, False)]
    assert [launch.source.file for launch in launches] == ["quantize.cu", "quantize.cu", "dequantize.cu", "decode.cu"]


def test_the_catalogue_holds_every_row():
    assert catalogue.BUILT == FORMATS
    storages = {format.storage for format in catalogue.STORED.values()}
    assert {format.storage for format in FORMATS.values()} < storages


def test_no_engine_claims_what_is_not_native():
    for name in ("fp8_row_e4m3", "nvfp4_row"):
        storage = FORMATS[name].storage
        for other, chip in ((n, c) for n in FORMATS for c in ((9, 0), (10, 0))):
            engine = hq.gemm.choose_engine(storage, FORMATS[other].storage, chip)
            if (name, other, chip) == ("fp8_row_e4m3", "fp8_row_e4m3", (9, 0)):
                assert engine.name == "native"
            else:
                assert engine.name in ("bf16x3", "fp32") and storage.bf16_terms == 3
