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
from hqarray.drawing import STYLES
from hqarray.train import SIZES, Run, Study
from hqarray.train_model import Transformer
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


def test_seconds_are_those_of_the_steps(monkeypatch):
    """Not of the loss on other text after them."""
    now = [0.0]
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    loss = Transformer.loss

    def slow(model, tokens):
        now[0] += 100
        return loss(model, tokens)

    monkeypatch.setattr(Transformer, "loss", slow)

    def step():
        now[0] += 1

    (run,) = train.study(TEXT, train.named([]), replace(SIZE, steps=3), step=step).runs
    assert run.seconds == 3


def test_recipes_that_differ_in_the_rule_of_delayed_scaling_are_all_trained():
    rules = [hq.Delayed(), hq.Delayed(margin=1), hq.Delayed(16), hq.Delayed(16, "most_recent")]
    recipes = [replace(hq.RECIPES["fp8_delayed"], delayed=rule) for rule in rules]
    assert list(train.named(recipes).values())[1:] == recipes


def test_a_base_that_has_nothing_to_lose_has_no_gap():
    runs = (Run("bf16", (1.0, 0.0, 0.0, 0.0), 0.0, 1.0), Run("a", (1.0,) + (0.0,) * 3, 0.0, 1.0),
            Run("b", (1.0,) + (0.5,) * 3, 0.0, 1.0))
    study = Study(runs, SIZE, 0, "", "", 1, "")
    assert math.isnan(study.gap(runs[1])) and study.gap(runs[2]) == math.inf
    assert study.curves()[0].values.shape == (4,) and study.table()
    kept = json.loads(json.dumps(study.to_dict(), allow_nan=False))["runs"]
    assert kept["a"]["gap"] == "nan" and kept["b"]["gap"] == "inf"


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


def drawn(curves):
    """Axes with curves, and the line of each."""
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    assert train_plot.plot_curves(curves, "%", "steps", ax=axes) is axes
    return axes, [line for line in axes.get_lines() if not line.get_label().startswith("_")]


def test_curves_are_read_in_black_and_white():
    axes, lines = drawn([Curve(str(i), np.linspace(0, i, 50)) for i in range(7)])
    styles = [(line.get_linestyle(), line.get_marker()) for line in lines]
    assert len(set(styles)) == len(STYLES) and set(styles) == set(STYLES)
    colors = [line.get_color() for line in lines]
    assert len(set(colors)) == 7
    first, every = zip(*(line.get_markevery() for line in lines), strict=True)
    assert len(set(first)) > 1 and max(first) < 50 / 5 and set(every) == {5}, "marks of two curves are apart"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [str(i) for i in range(7)]


def test_what_is_beyond_the_axis_lies_at_its_edge_and_it_is_said():
    values = np.r_[50.0, np.ones(198), -80.0]
    axes, (line,) = drawn([Curve("a", values)])
    low, high = axes.get_ylim()
    assert line.get_ydata()[0] == high < 2 and line.get_ydata()[-1] == low < 0
    assert list(line.get_ydata()[1:-1]) == [1] * 198
    assert axes.get_ylabel() == "% (at the edge: beyond it)"
    assert drawn([Curve("a", values[1:-1])])[0].get_ylabel() == "%"
    endless = drawn([Curve("a", np.array([math.inf, math.nan, 1.0]))])[1][0].get_ydata()
    assert np.isfinite(endless).tolist() == [True, False, True]


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [-2.0, -2.0], [0.0, 0.0], [1.0, 3.0]], ids=str)
def test_a_line_of_few_steps_is_seen(values):
    """Neither on the frame nor without a mark."""
    axes, (line,) = drawn([Curve("a", np.array(values))])
    low, high = axes.get_ylim()
    assert all(low < y < high for y in line.get_ydata())
    assert line.get_marker() == "o" and line.get_markevery()[1] == 1
    assert line.get_xdata()[0] == 1 and axes.get_xlim()[0] < 1


def test_a_study_of_nothing_but_the_base_has_an_empty_picture():
    axes, lines = drawn([])
    assert lines == [] and axes.get_legend() is None


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


def test_the_picture_comes_last_and_nothing_is_lost_with_it(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    numbers, picture = tmp_path / "t.json", tmp_path / "t.svg"
    arguments = ["train", "--size", "tiny", "--steps", "2", "--recipes", "mxfp8", "--json", str(numbers)]
    assert main([*arguments, "--plot", str(picture)]) == 0
    assert ">mxfp8</text>" in picture.read_text() and "mxfp8 " in capsys.readouterr().out

    def fail(*given):
        raise OSError(28, "No space left on device")

    numbers.unlink()
    monkeypatch.setattr(command, "save", fail)
    assert main([*arguments, "--plot", str(picture)]) == 2
    output, error = capsys.readouterr()
    assert "mxfp8 " in output and error == f"hqarray: {picture}: No space left on device\n"
    assert list(json.loads(numbers.read_text())["runs"]) == ["bf16", "mxfp8"]


@pytest.mark.parametrize("plot", ["out", "out.jpg", "-", ".svg", "out.svg.gz"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(plot, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "train_study", lambda *given, **named: pytest.fail("trained"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--plot", plot]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hqarray: --plot: {plot!r} ") and "to a file that ends in .png or .svg" in error


@pytest.mark.parametrize("json_target", ["a.svg", "./a.svg", "linked.svg"])
def test_numbers_and_picture_in_one_place_are_refused(json_target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "train_study", lambda *given, **named: pytest.fail("trained"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked.svg").symlink_to("a.svg")
    assert main(["train", "--json", json_target, "--plot", "a.svg"]) == 2
    assert f"--json and --plot would both be written to {json_target}; name another" in capsys.readouterr().err


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
        (["--text", __file__ + ".same"], "all 20000 bytes are b'a', which leaves nothing to learn; give a"),
        (["--json", "no/such/folder/x.json"], "x.json: cannot be written: no such folder no/such/folder"),
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
    if arguments[-1].endswith(".same"):
        same = tmp_path / "same.txt"
        same.write_bytes(b"a" * 20000)
        arguments = ["--text", str(same)]
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
