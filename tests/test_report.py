"""The report: operands read from files, triples found, and numbers against a plain computation."""

import base64
import json
import math
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import hqarray as hq
from hqarray import report as report_module
from hqarray.interop.convert import convert, plan, target
from hqarray.linear import seed_of
from hqarray.operands import FileError, Matrix, Operands, Triple, default_operands, read_operands
from hqarray.recipes import PRODUCTS
from hqarray.report import Report, count_steps, select, study

RNG = np.random.default_rng(0)
X, W, DY = (RNG.standard_normal(shape).astype(np.float32) for shape in ((48, 40), (56, 40), (48, 56)))
TRIPLE = Triple("layer", *(Matrix(name, "memory", values) for name, values in (("x", X), ("w", W), ("dy", DY))))


def names(operands: Operands) -> tuple[list[str], list[str]]:
    return [triple.name for triple in operands.triples], [matrix.name for matrix in operands.matrices]


# --- the shipped layers -------------------------------------------------------------------------


def test_shipped_layers_are_the_two_of_the_note() -> None:
    operands = default_operands()
    assert names(operands) == (["layer0.ffn_up", "layer3.attn_q"], [])
    shapes = [tuple(m.values.shape for m in (t.x, t.w, t.dy)) for t in operands.triples]
    assert shapes == [((256, 384), (1536, 384), (256, 1536)), ((256, 384), (384, 384), (256, 384))]
    x = operands.triples[0].x.values
    assert x.dtype == ml_dtypes.bfloat16
    assert x.astype(np.float32).max() == 28.5
    assert x.astype(np.float32).std() == pytest.approx(0.69, abs=0.005)
    assert operands.notes == ()


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_safetensors_values_are_those_of_its_own_library(dtype: type, tmp_path: Path) -> None:
    tensors = {"a.x": X.astype(dtype), "a.w": W.astype(dtype), "a.dy": DY.astype(dtype), "odd": X[:3, :5].astype(dtype)}
    save_file(tensors, tmp_path / "layer.safetensors", metadata={"made": "here"})
    operands = read_operands([tmp_path / "layer.safetensors"])
    assert names(operands) == (["a"], ["odd"])
    (triple,) = operands.triples
    for matrix, name in ((triple.x, "a.x"), (triple.w, "a.w"), (triple.dy, "a.dy"), (operands.matrices[0], "odd")):
        assert matrix.values.dtype == np.dtype(dtype)
        assert matrix.values.tobytes() == tensors[name].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"])
def test_npy_and_npz_values_survive(dtype: str, tmp_path: Path) -> None:
    values = X.astype(dtype)
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "b.npz", a=values)
    np.savez_compressed(tmp_path / "c.npz", a=values)
    np.save(tmp_path / "d.npy", np.asfortranarray(values))
    for name in ("a.npy", "b.npz", "c.npz", "d.npy"):
        (matrix,) = read_operands([tmp_path / name]).matrices
        assert matrix.values.dtype.isnative
        assert np.array_equal(matrix.values, values), name


def test_bfloat16_is_read_from_void_and_from_named_bits(tmp_path: Path) -> None:
    values = X.astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "void.npy", values)
    np.savez(tmp_path / "bits.npz", **{"void": values, "x.bfloat16": values.view(np.uint16)})
    found = read_operands([tmp_path / "void.npy", tmp_path / "bits.npz"]).matrices
    assert [matrix.name for matrix in found] == ["void", "void", "x"]
    for matrix in found:
        assert matrix.values.dtype == ml_dtypes.bfloat16
        assert matrix.values.tobytes() == values.tobytes()


def test_what_is_skipped_is_named_with_the_reason(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mixed.npz", good=X, vector=X[0], cube=X[None], ints=X.astype(np.int32), bits=X.astype(np.uint16),
        none=X[:0], text=np.array([["a"]]), objects=np.array([[1, None]], object), complexes=X.astype(complex),
        flags=X > 0,
    )
    operands = read_operands([tmp_path / "mixed.npz"])
    assert names(operands) == ([], ["good"])
    notes = "\n".join(operands.notes)
    for name, reason in (
        ("vector", "1-D"), ("cube", "3-D"), ("ints", "dtype int32"), ("bits", "end its name in .bfloat16"),
        ("none", "empty, shape (0, 40)"), ("text", "dtype <U1"), ("objects", "pickle"),
        ("complexes", "dtype complex128"), ("flags", "dtype bool"),
    ):
        assert f"skipped {name} (mixed.npz): " in notes
        assert reason in next(line for line in notes.splitlines() if f" {name} " in line)


def test_float8_of_safetensors_is_skipped_and_named(tmp_path: Path) -> None:
    header = json.dumps({
        "q": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
        "x": {"dtype": "F32", "shape": [1, 2], "data_offsets": [4, 12]},
        "v": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
        "e": {"dtype": "F32", "shape": [0, 2], "data_offsets": [20, 20]},
    }).encode()
    path = tmp_path / "f.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4) + np.array([1, 2, 3, 4], "<f4").tobytes())
    operands = read_operands([path])
    assert names(operands) == ([], ["x"])
    assert operands.matrices[0].values.tolist() == [[1, 2]]
    assert [note.partition(": ")[2] for note in operands.notes] == [
        "F8_E4M3 is not a float type this quantizes; hqarray.interop.safetensors.load decodes it", "1-D",
        "empty, shape (0, 2)",
    ]


@pytest.mark.parametrize(("style", "format"), [("hqarray", "fp8_block_128x128"), ("fp8_block", None), ("nvfp4", None)])
def test_scales_of_quantized_weights_are_no_matrices(style: str, format: str | None, tmp_path: Path) -> None:
    x = np.ones((256, 256), np.float32)
    save_file({"layer.weight": x, "layer.weight_norm": x[:2], "other": x}, tmp_path / "in.safetensors")
    written = tmp_path / "out.safetensors"
    convert(plan(tmp_path / "in.safetensors", target(format, style=style, match=["layer.weight"])), written)
    operands = read_operands([written])
    assert names(operands) == ([], ["layer.weight_norm", "other"])
    assert any("is a scale of the quantized layer.weight" in note for note in operands.notes)


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b]0;title\x07\n": X, "b\x1b[2J": X[0]}, tmp_path / "f.safetensors")
    operands = read_operands([tmp_path / "f.safetensors"])
    assert operands.matrices[0].name == "a\ufffd]0;title\ufffd\ufffd"
    assert operands.notes == ("skipped b\ufffd[2J (f.safetensors): 1-D",)


@pytest.mark.parametrize("separator", [".", "_", "/"])
def test_names_ending_in_x_w_dy_make_a_triple(separator: str, tmp_path: Path) -> None:
    save_file({f"l.0{separator}{role}": v for role, v in (("w", W), ("dy", DY), ("x", X))}, tmp_path / "f.safetensors")
    operands = read_operands([tmp_path / "f.safetensors"])
    assert names(operands) == (["l.0"], [])
    assert operands.triples[0].dy.values.shape == DY.shape


def test_plain_names_make_a_triple_called_after_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=X, w=W, dy=DY, max=X, new=W)
    assert names(read_operands([tmp_path / "mine.npz"])) == (["mine"], ["max", "new"])


def test_npy_files_of_one_folder_make_a_triple(tmp_path: Path) -> None:
    for role, values in (("x", X), ("w", W), ("dy", DY)):
        np.save(tmp_path / f"up_{role}.npy", values)
    files = sorted(tmp_path.iterdir())
    assert names(read_operands(files)) == (["up"], [])
    assert names(read_operands(files * 2)) == (["up"], []), "a file given twice is read once"
    assert names(read_operands(files[:2])) == ([], ["up_dy", "up_w"])


def test_same_names_in_two_files_are_two_layers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=X, w=W, dy=DY)
    assert names(read_operands([tmp_path / "a.npz", tmp_path / "b.npz"])) == (["a", "b"], [])


def test_shapes_that_do_not_fit_make_no_triple_and_a_note(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", x=X, w=W.T, dy=DY)
    operands = read_operands([tmp_path / "f.npz"])
    assert names(operands) == ([], ["x", "w", "dy"])
    assert "f: no triple, x (48, 40), w (40, 56), dy (48, 56) do not fit" in operands.notes[0]


def test_unknown_kind_of_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"give .npy, .npz or .safetensors"):
        read_operands([tmp_path / "weights.pt"])


# --- selection ----------------------------------------------------------------------------------


def test_default_selection_is_every_recipe_without_a_history_and_every_other_quantized_format() -> None:
    selection = select()
    named = [recipe for name, recipe in hq.RECIPES.items() if name != "fp8_delayed"]
    assert list(selection.recipes[: len(named)]) == named
    assert selection.formats == tuple(hq.FORMATS.values())
    studied = {recipe.name for recipe in selection.recipes}
    assert {"mxfp4", "mxfp6_e2m3", "fp8_e5m2", "nvfp4_16x16"} <= studied
    assert not {"fp16", "fp32", "fp8_e4m3"} & studied  # unquantized, or the recipe fp8 already


def test_selected_names_mean_recipes_for_layers_and_formats_for_matrices() -> None:
    selection = select(["nvfp4", "mxfp8_fp8_block_weight", "mxfp8(rule=floor)"])
    assert [recipe.name for recipe in selection.recipes] == ["nvfp4", "mxfp8_fp8_block_weight", "mxfp8(rule=floor)"]
    assert [format.name for format in selection.formats] == [
        "nvfp4", "mxfp8", "fp8_block_128x128_pow2", "mxfp8(rule=floor)",
    ]


def test_delayed_scaling_is_sent_to_where_there_are_earlier_steps() -> None:
    with pytest.raises(ValueError, match=r"fp8_delayed takes amaxes of earlier.*\(fp8_current\).*hqarray train"):
        select(["fp8_delayed"])


# --- numbers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Report:
    return study(Operands((TRIPLE,), (Matrix("alone", "memory", X),), ()), select())


def relative(decoded: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(decoded - exact) / np.linalg.norm(exact))


def test_errors_are_those_of_a_plain_float64_computation(report: Report) -> None:
    """Fake-quantize each operand along the axis that the product contracts, multiply in float64.

    Gradients that are rounded at random are decoded from a part of the same seed.
    """
    x, w, dy = (values.astype(np.float64) for values in (X, W, DY))

    def rows(values: np.ndarray, format: hq.Format) -> np.ndarray:
        if format.is_stochastic:
            seed = seed_of("grad_output", 0)
            if values.shape == DY.shape:
                return hq.quantize(values, rowwise=format, seed=seed).dequantize().astype(np.float64)
            return hq.quantize(values.T, columnwise=format, seed=seed).dequantize().T.astype(np.float64)
        return hq.fake_quantize(values, format).astype(np.float64)

    for result in report.layers[0].results:
        r = result.recipe
        wt, xt = (rows(values, r[role][0]).astype(np.float32).T if role in r.from_rows else values.T
                  for role, values in (("weight", W), ("input", X)))
        expected = {
            "fprop": relative(rows(X, r.input[0]) @ rows(W, r.weight[0]).T, x @ w.T),
            "dgrad": relative(rows(DY, r.grad_output[0]) @ rows(wt, r.weight[1]).T, dy @ w),
            "wgrad": relative(rows(DY.T, r.grad_output[1]) @ rows(xt, r.input[1]).T, dy.T @ x),
        }
        assert result.error == pytest.approx(expected, rel=1e-4, abs=1e-6), r.name
        for role, values in (("input", X), ("weight", W), ("grad_output", DY)):
            if role in r.from_rows or r.stochastic(role):  # type: ignore[arg-type]
                continue  # columns are off by what rows lost as well, or by other draws
            pair = (
                hq.compare(values, r[role][0])[0].sqnr_db,
                hq.compare(np.ascontiguousarray(values.T), r[role][1])[0].sqnr_db,
            )
            assert result.sqnr_db[role] == pytest.approx(pair, abs=1e-6), (r.name, role)


def test_hybrid_routing_reads_each_format_where_the_recipe_says(report: Report) -> None:
    hybrid, mxfp8, nvfp4 = (
        study(Operands((TRIPLE,), (), ()), select([name])).layers[0].results[0]
        for name in ("mxfp8_forward_nvfp4_backward", "mxfp8", "nvfp4")
    )
    assert hybrid.error["fprop"] == mxfp8.error["fprop"]
    assert hybrid.error["wgrad"] == nvfp4.error["wgrad"]  # neither reads the weight
    assert hybrid.error["dgrad"] > 2 * mxfp8.error["dgrad"]


def test_bytes_are_those_of_all_six_parts(report: Report) -> None:
    for result in report.layers[0].results:
        arrays = [
            hq.quantize(values, rowwise=result.recipe[role][0], columnwise=result.recipe[role][1], seed=0)
            for role, values in (("input", X), ("weight", W), ("grad_output", DY))
        ]
        assert result.nbytes == sum(array.nbytes for array in arrays)


def test_engine_is_the_one_matmul_uses_on_numpy(report: Report) -> None:
    for result in report.layers[0].results:
        assert {engine.name for engine in result.engine.values()} == {"fp32"}
        assert set(result.engine) == set(PRODUCTS)


def test_matrix_without_a_triple_gets_what_compare_says(report: Report) -> None:
    assert report.matrices[0].comparison == hq.compare(X)


def test_unquantized_recipe_is_exact_up_to_float32_sums(report: Report) -> None:
    bf16 = study(
        Operands((Triple("t", *(Matrix("", "", v.astype(ml_dtypes.bfloat16)) for v in (X, W, DY))),), (), ()),
        select(["bf16"]),
    ).layers[0].results[0]
    assert all(0 < error < 1e-6 for error in bf16.error.values())
    assert set(bf16.sqnr_db.values()) == {(float("inf"), float("inf"))}


def test_step_is_called_as_often_as_counted() -> None:
    calls: list[None] = []
    operands = Operands((TRIPLE,), (Matrix("m", "", X), Matrix("n", "", W)), ())
    selection = select(["fp8", "mxfp8_fp8_block_weight"])
    study(operands, selection, lambda: calls.append(None))
    assert len(calls) == count_steps(operands, selection) == 1 * 2 + 2 * 3


def with_x(x: np.ndarray) -> Operands:
    return Operands((Triple("t", Matrix("t.x", "", x), TRIPLE.w, TRIPLE.dy),), (), ())


def test_nan_where_a_number_belongs_is_not_left_out_of_the_error() -> None:
    """One NaN in row 3 makes row 3 of Y64 NaN; MXFP4's block and FP8's dequantized NaN stay in that row of fprop."""
    x = X.copy()
    x[3, 4] = np.nan
    report = study(with_x(x), select(["bf16", "mxfp8", "mxfp4"]))
    bf16, mxfp8, mxfp4 = report.layers[0].results
    for result in (bf16, mxfp8):
        assert all(map(math.isfinite, result.error.values())) and set(result.nan.values()) == {0}
    # the columnwise block of 32 rows is NaN: column 4 of x and of wgrad alone, which is NaN in Y64 as well
    assert all(map(math.isfinite, mxfp4.error.values())) and set(mxfp4.nan.values()) == {0}
    assert all(map(math.isnan, mxfp4.sqnr_db["input"])), "31 finite elements of the block became NaN"
    assert all(map(math.isfinite, mxfp4.sqnr_db["weight"]))

    def spoil(products: float) -> Report:
        whole = study(with_x(X), select(["mxfp8"]))
        (layer,) = whole.layers
        (result,) = layer.results
        spoilt = replace(result, error={**result.error, "fprop": products}, nan={**result.nan, "fprop": 0.75})
        return replace(whole, layers=(replace(layer, results=(spoilt,)),))

    spoilt = spoil(math.nan)
    values = spoilt.to_dict()["layers"][0]["recipes"]["mxfp8"]
    assert values["relative_error"]["fprop"] == "nan" and values["nan"] == {"fprop": 0.75, "dgrad": 0, "wgrad": 0}
    assert spoilt.layers[0].table().rows[0][4] == "nan"
    assert any(line.startswith("nan: ") for line in spoilt.legend())
    assert not any(line.startswith("nan: ") for line in spoil(0.5).legend())


def test_product_that_is_nan_where_it_should_be_finite_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hq.HybridArray.__matmul__

    def spoilt(a: hq.HybridArray, b: hq.HybridArray) -> np.ndarray:
        product = whole(a, b)
        product[:, 0] = np.nan
        return product

    monkeypatch.setattr(hq.HybridArray, "__matmul__", spoilt)
    (result,) = study(with_x(X), select(["mxfp8"])).layers[0].results
    assert all(map(math.isnan, result.error.values()))
    assert result.nan == {"fprop": 1 / 56, "dgrad": 1 / 40, "wgrad": 1 / 40}


def test_layer_of_nan_is_not_exact() -> None:
    report = study(with_x(np.full_like(X, np.nan)), select(["bf16", "mxfp8", "nvfp4"]))
    for row, result in zip(report.layers[0].table().rows, report.layers[0].results, strict=True):
        assert row[1] == "nan" and row[4] == row[6] == "nan", row
        assert math.isfinite(result.error["dgrad"]) and row[5] != "nan"
    json.dumps(report.to_dict(), allow_nan=False)


def test_nan_in_an_operand_is_noted() -> None:
    x = X.copy()
    x[3, 4], x[5, 6] = np.nan, np.inf
    triple = Triple("t", Matrix("t.x", "", x), TRIPLE.w, TRIPLE.dy)
    result = study(Operands((triple,), (), ()), select(["fp8", "mxfp4"]))
    assert result.notes == ("t.x holds 2 elements that are NaN or infinite",)
    json.dumps(result.to_dict(), allow_nan=False)
    x[5, 6] = 0
    assert study(with_x(x), select(["fp8"])).notes == ("t.x holds 1 element that is NaN or infinite",)


# --- rendering ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 160])
def test_tables_fit_and_lose_no_digit(width: int, report: Report) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(report)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= width
    for row in report.layers[0].table().rows:
        start = " ".join(row[1:])
        assert any(" ".join(line.split()).endswith(start) for line in lines), row
    assert sum(line.startswith("mxfp8_forward_nvfp4_") for line in lines) == 1


@pytest.mark.parametrize("width", [20, 30, 40, 60, 70])
def test_a_narrow_terminal_shows_whole_numbers(width: int, report: Report) -> None:
    for table in report.tables():
        text = table.text(width)
        assert max(map(len, text.splitlines())) <= width
        for row in table.rows:
            for cell in row[1:]:
                assert cell in text.split(), (row[0], cell)
        cells = {cell for row in table.rows for cell in row[1:]}
        body = replace(table, title="").text(width).split()
        assert {word for word in body if word.replace("/", "").replace(".", "").isdigit()} <= cells, "a number was cut"


def test_title_of_a_narrow_table_stays_on_one_line() -> None:
    layer = replace(study(with_x(X), select(["mxfp8"])).layers[0], dtype="bfloat16")
    first = layer.table().text(80).splitlines()[0]
    assert first == "t: x 48 x 40, w 56 x 40, dy 48 x 56, bfloat16"


def test_legend_says_what_every_column_means(report: Report) -> None:
    legend = "\n".join(report.legend())
    for head in (*report.layers[0].table().head[4:], *report.matrices[0].table().head[1:]):
        name = head.replace("\n", " ").strip().removesuffix(" %") if head.startswith(tuple(PRODUCTS)) else head.strip()
        assert name in legend, head


def test_nvfp4_clips_by_the_rounding_of_its_scales_at_most() -> None:
    """The legend's claim: what is clipped is the largest of its block, by no more than E4M3 rounds, 2^-4."""
    x = np.random.default_rng(5).standard_normal((128, 256)).astype(np.float32)
    part = hq.quantize(x, rowwise="nvfp4").rowwise
    assert part is not None and part.global_scale is not None
    scales = hq.ELEMENTS["e4m3"].values[part.scales].astype(np.float64) * float(part.global_scale[0])
    beyond = np.abs(x.reshape(128, 16, 16)) / (6 * scales[..., None])
    clipped = beyond > 1 + 2.0**-20
    assert clipped.mean() == hq.compare(x, "nvfp4")[0].clipped
    assert 0.02 < clipped.mean() < 0.05 and beyond.max() <= 1 + 1 / 16
    exact = np.abs(x.reshape(128, 16, 16)).max(-1) / 6
    assert (scales < exact)[clipped.any(-1)].all(), "a block clips only where its scale was rounded down"


def test_json_holds_every_number(report: Report) -> None:
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    (layer,) = values["layers"]
    assert layer["shapes"] == {"x": [48, 40], "w": [56, 40], "dy": [48, 56]}
    hybrid = layer["recipes"]["mxfp8_forward_nvfp4_backward"]
    recipe = hq.RECIPES["mxfp8_forward_nvfp4_backward"]
    assert hybrid["formats"] == {
        "x": ["mxfp8", "nvfp4(rht=true)"], "w": ["mxfp8", "nvfp4"], "dy": [f.name for f in recipe.grad_output]
    }
    assert set(hybrid["relative_error"]) == set(PRODUCTS)
    assert set(hybrid["sqnr_db"]["x"]) == {"rowwise", "columnwise"}
    assert hybrid["engine"]["fprop"]["name"] == "fp32"
    assert values["matrices"][0]["formats"]["fp32"]["sqnr_db"] == "inf"


class Page(HTMLParser):
    """Tags and attributes of a page, and whether every tag is closed."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_page_that_needs_nothing_else(report: Report) -> None:
    text = report.html()
    page = Page(text)
    assert page.tags.count("table") == 2
    assert not {"script", "link", "iframe"} & set(page.tags)
    sources = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "url(" not in text and "@import" not in text
    assert "color-scheme: light dark" in text and "prefers-color-scheme: dark" in text


def test_html_draws_each_table_that_it_shows(report: Report) -> None:
    pytest.importorskip("matplotlib")
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", report.html())]
    assert len(pictures) == len(report.tables())
    for picture, result in zip(pictures, (*report.layers, *report.matrices), strict=True):
        assert picture == result.svg()
    for result in report.layers[0].results:
        assert f">{result.recipe.name}</text>" in pictures[0]
    for error in report.matrices[0].comparison:
        assert f">{error.format}" in pictures[-1]


def test_in_jupyter_a_report_is_the_page_without_its_frame(report: Report) -> None:
    part = report._repr_html_()
    assert part in report.html() and "<html" not in part and part.count("<table") == len(report.tables())


def test_html_without_matplotlib_says_how_to_get_pictures(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "find_spec", lambda name: None)
    page = Page(report.html())
    assert "img" not in page.tags and "pictures: pip install &quot;hqarray[explore]&quot;" in report.html()


def test_html_escapes_names_from_files() -> None:
    hostile = "</table><script>alert(1)</script>&$legend{legend}"
    matrix = Matrix(hostile, hostile, X)
    text = study(Operands((), (matrix,), (f"skipped {hostile}",)), select(["mxfp8"])).html()
    page = Page(text)
    assert "script" not in page.tags
    assert (page.tags.count("ul"), page.tags.count("li")) == (1, 4 if find_spec("matplotlib") else 5)
    assert "&lt;script&gt;" in text


def test_hostile_names_are_no_markup_in_the_terminal() -> None:
    matrix = Matrix("[red]bold[/red]", "", X)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(study(Operands((), (matrix,), ("[b]note[/b]",)), select(["mxfp8"])))
    assert "[red]bold[/red]" in captured.get() and "[b]note[/b]" in captured.get()
