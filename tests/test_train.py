"""The training study: what its numbers are, that they can be had again, and how it shows them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from test_packaging import ROOT

import hqarray as hq
from hqarray import __main__ as command
from hqarray import train, train_plot
from hqarray.__main__ import main
from hqarray.train import SIZES, Run, Study
from hqarray.train_plot import Curve, text_plot
from hqarray.train_text import read_text

TEXT = read_text()
SIZE = replace(SIZES["tiny"], steps=12)
NAMES = ("mxfp8", "fp8_delayed", "mxfp4")


@pytest.fixture(scope="module")
def result() -> Study:
    return train.study(TEXT, train.named(NAMES), SIZE)


# --- numbers ------------------------------------------------------------------------------------


def test_bf16_comes_first_and_each_recipe_once(result):
    assert [run.recipe for run in result.runs] == ["bf16", *NAMES]
    assert list(train.named(["fp8", "bf16", "fp8"])) == ["bf16", "fp8"]
    assert list(train.named(["fp8_e5m2_gradient"])) == ["bf16", "fp8_current"]


def test_every_recipe_starts_from_the_same_model_and_learns(result):
    """At the start the model knows next to nothing, whatever the format."""
    for run in result.runs:
        assert len(run.losses) == 12
        assert run.losses[0] == pytest.approx(math.log(TEXT.vocabulary), rel=0.1)
        assert run.losses[0] == pytest.approx(result.runs[0].losses[0], rel=0.02)
        assert run.loss < run.losses[0] - 0.3
        assert run.held_out < run.losses[0]


def test_gap_is_relative_to_bf16_over_the_end(result):
    base, *others = result.runs
    assert result.gap(base) == 0
    for run in others:
        assert result.gap(run) == pytest.approx(sum(run.losses[-3:]) / sum(base.losses[-3:]) - 1)


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(result):
    again = train.study(TEXT, train.named(["mxfp8"]), SIZE)
    assert [run.losses for run in again.runs] == [run.losses for run in result.runs[:2]]
    assert train.study(TEXT, train.named([]), SIZE, seed=1).runs[0].losses != result.runs[0].losses


def test_json_holds_all_of_it(result):
    again = Study.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again.size == SIZE and again.text == TEXT.name and again.digest == TEXT.digest
    for run, other in zip(result.runs, again.runs, strict=True):
        np.testing.assert_allclose(run.losses, other.losses, atol=1e-6)
    lost = Study((Run("bf16", (math.nan, math.inf), math.nan, 1.0),), SIZE, 0, "", "", 1, "")
    assert lost.to_dict()["runs"]["bf16"]["losses"] == ["nan", "inf"]
    assert math.isnan(Study.from_dict(lost.to_dict()).runs[0].losses[0])


def test_the_study_that_readme_shows_begins_as_it_would_here():
    """The first loss of each recipe, where Python's texts are the same; what follows hangs on the order of sums."""
    kept = Study.from_dict(json.loads((ROOT / "docs" / "training.json").read_text()))
    assert kept.size == SIZES["small"] and kept.seed == 0
    assert [run.recipe for run in kept.runs] == list(train.named(train.RECIPES_OF_THE_STUDY))
    if kept.digest != TEXT.digest:
        pytest.skip("this Python's help texts are others")
    again = train.study(TEXT, train.named(train.RECIPES_OF_THE_STUDY), replace(kept.size, steps=1))
    for run, now in zip(kept.runs, again.runs, strict=True):
        assert now.losses[0] == pytest.approx(run.losses[0], rel=1e-4), run.recipe


def test_learning_rate_rises_and_falls():
    size = SIZES["small"]
    rates = [train._rate(size, i) for i in range(size.steps)]
    top = int(np.argmax(rates))
    assert 0.05 * size.steps <= top <= 0.15 * size.steps
    assert rates[0] < 0.1 * size.rate and max(rates) <= size.rate
    assert rates[-1] == pytest.approx(train.REST * size.rate, rel=0.01)


def test_smoothing_is_a_mean_over_neighbours():
    values = np.random.default_rng(0).standard_normal(200)
    smooth = train._smooth(values)
    np.testing.assert_allclose(smooth[5:-5], np.convolve(values, np.full(11, 1 / 11), "valid"), atol=1e-12)
    assert smooth[0] == pytest.approx(values[:6].mean()) and smooth[-1] == pytest.approx(values[-6:].mean())


# --- plots --------------------------------------------------------------------------------------


def test_a_letter_is_where_its_value_is():
    lines = text_plot([Curve("flat", np.zeros(40)), Curve("rising", np.linspace(0, 2, 40))], 60, "%", "steps")
    assert max(map(len, lines)) <= 60 and lines[0] == "%"
    assert lines[-2:] == ["a  flat", "b  rising"]
    rows = [line.partition("|")[2] for line in lines[1 : 1 + train_plot.HEIGHT]]
    assert set(rows[-1]) == {"a"}, "zero is the lowest line, and the earlier curve is in front"
    assert rows[0].rstrip().endswith("b") and "a" not in "".join(rows[:-1])
    columns = [row.index("b") for row in rows[:-1] if "b" in row]
    assert columns == sorted(columns, reverse=True)
    assert lines[1].startswith("+1.9") and lines[train_plot.HEIGHT].startswith("+0.00")


@pytest.mark.parametrize("values", [[], [math.nan, math.nan], [1.0], [0.0], [math.inf, 1.0], [-1.0, 1.0]], ids=str)
def test_any_values_can_be_drawn(values):
    lines = text_plot([Curve("one", np.array(values))], 40, "%", "steps")
    assert len(lines) == train_plot.HEIGHT + 4
    assert any("a" in line.partition("|")[2] for line in lines) == bool(np.isfinite(values).any())


def test_nothing_is_drawn_of_nothing():
    assert text_plot([], 80, "%", "steps") == []


def test_picture_is_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    train_plot.save_picture([Curve("a", np.array([0.0, 1.0, math.nan]))], tmp_path / "a.svg", "%", "steps")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


# --- the command --------------------------------------------------------------------------------


def test_command_prints_a_table_and_a_plot_that_fit_a_terminal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    numbers = tmp_path / "t.json"
    assert main(["train", "--size", "tiny", "--steps", "3", "--recipes", "mxfp8,mxfp4", "--json", str(numbers)]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    assert max(map(len, output.splitlines())) <= 80
    for line in ("bf16 ", "mxfp8 ", "mxfp4 ", "a  mxfp8", "b  mxfp4"):
        assert sum(text.startswith(line) for text in output.splitlines()) == 1, line
    assert list(json.loads(numbers.read_text())["runs"]) == ["bf16", "mxfp8", "mxfp4"]


def test_json_on_standard_output_is_all_there_is(capsys):
    assert main(["train", "--size", "tiny", "--steps", "1", "--recipes", "bf16", "--json", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"]) == ["bf16"]


def test_training_on_a_file_of_ones_own(tmp_path, capsys):
    (tmp_path / "own.txt").write_text("to be or not to be. " * 1000)
    arguments = ["train", "--size", "tiny", "--steps", "2", "--recipes", "fp8", "--json", "-"]
    assert main([*arguments, "--text", str(tmp_path / "own.txt")]) == 0
    assert json.loads(capsys.readouterr().out)["text"].endswith("own.txt")


def _no_cupy(monkeypatch):
    monkeypatch.setitem(command.sys.modules, "cupy", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "mxfp9"], "unknown recipe or format 'mxfp9'; did you mean"),
        (["--recipes", "fp8,,mxfp8"], "--recipes 'fp8,,mxfp8' has an empty name"),
        (["--steps", "0"], "--steps 0: train for 1 step or more"),
        (["--seed", "-1"], "--seed -1 is not between 0 and"),
        (["--text", "no/such/file"], "no/such/file: No such file or directory"),
        (["--text", __file__ + ".short"], "8 bytes are too few to train on"),
        (["--json", "no/such/folder/x.json"], "cannot be written"),
        (["--plot", "x.png"], "--plot needs matplotlib: pip install matplotlib"),
        (["--device", "gpu"], '--device gpu needs CuPy: pip install "hqarray[cuda13]"'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    if arguments[-1].endswith(".short"):
        short = tmp_path / "short.txt"
        short.write_bytes(b"8 bytes.")
        arguments = ["--text", str(short)]
    _no_cupy(monkeypatch)
    monkeypatch.setattr(command, "has_matplotlib", lambda: False)
    assert main(["train", *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and error.count("\n") == 1 and error.startswith("hqarray: ")
    assert message in error


def test_recipes_that_are_not_built_are_left_out_or_refused_by_name(capsys, monkeypatch):
    """Such as those that round at random, on a GPU for which there is no kernel."""
    lacks = lambda recipe, module: "no kernels yet" if recipe.stochastic("grad_output") else ""  # noqa: E731
    monkeypatch.setattr(command, "not_built", lacks)
    monkeypatch.setattr(command, "RECIPES_OF_THE_STUDY", ("mxfp8", "nvfp4"))
    assert main(["train", "--size", "tiny", "--steps", "1", "--json", "-"]) == 0
    output, error = capsys.readouterr()
    assert list(json.loads(output)["runs"]) == ["bf16", "mxfp8"]
    assert error == "hqarray: nvfp4 is left out: no kernels yet\n"
    assert main(["train", "--size", "tiny", "--steps", "1", "--recipes", "nvfp4"]) == 2
    assert "nvfp4 cannot be trained on this device: no kernels yet" in capsys.readouterr().err


def test_every_recipe_is_built_on_numpy_and_what_is_not_is_said(monkeypatch):
    assert not any(train.not_built(recipe, np) for recipe in hq.RECIPES.values())

    def refuse(*given, **named):
        raise NotImplementedError("reason")

    monkeypatch.setattr(train, "quantize_operand", refuse)
    assert train.not_built(hq.RECIPES["fp8"], np) == "reason"


def test_help_names_every_size(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in SIZES)
    assert all(name in hq.RECIPES or name in hq.FORMATS for name in train.RECIPES_OF_THE_STUDY)
