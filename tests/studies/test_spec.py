"""The file of a study: what it defines, and errors that name file, line and field."""

from pathlib import Path

import pytest

import vicinal
from vicinal.studies.spec import Comparison
from vicinal.studies.spec_reader import read_spec

GOOD = """\
question: Does it help?
base:
  model: vit-micro
  dataset: digits
arms:
  none: {prior: none}
  gmm:
    prior: gmm
  gab: {prior: gab}
baseline: none
factors:
  train_size: [100, 200]
  backbone:
    micro: {model: vit-micro}
    mini: {model: vit-mini}
seeds: [3, 5]
budget: {steps: 20}
primary: {arm: gmm, train_size: 200, backbone: mini}
also_differs: [parameters]
threads: 2
sigma: {value: 0.6, n: 8, study: priors}
"""


@pytest.fixture
def spec_of(tmp_path):
    def read(text):
        file = tmp_path / "own.yaml"
        file.write_text(text)
        return read_spec(file)

    return read


def small(**changes):
    return {"arms": {"none": {"prior": "none"}, "gmm": {"prior": "gmm"}}, "seeds": 2, **changes}


def test_a_grid_of_arms_conditions_and_seeds(spec_of):
    spec = spec_of(GOOD.replace("  model: vit-micro\n", ""))
    runs = spec.runs(Path("runs/own"), Path("/somewhere"))
    assert len(runs) == 3 * 2 * 2 * 2
    assert [run.seed for run in runs] == [3] * 12 + [5] * 12  # whole pairs first
    assert [run.name for run in runs[:4]] == [
        "100-micro-none-s3",
        "100-micro-gmm-s3",
        "100-micro-gab-s3",
        "100-mini-none-s3",
    ]
    assert len({run.name for run in runs}) == 24
    config = next(run.config for run in runs if run.name == "200-mini-gmm-s5")
    assert (config.train_size, config.model, config.prior, config.seed) == (200, "vit-mini", "gmm", 5)
    assert (config.steps, config.track, config.out) == (20, "none", Path("runs/own/runs/200-mini-gmm-s5"))
    assert spec.primary == Comparison("gmm", "200-mini")
    assert len(spec.comparisons()) == 8
    assert (spec.threads, spec.also_differs, spec.sigma.n) == (2, ("parameters",), 8)


def test_defaults():
    spec = read_spec({"arms": {"none": {}, "gmm": {"prior": "gmm"}}})
    assert spec.seeds == tuple(range(8))
    assert (spec.baseline, spec.threads, spec.metric) == ("none", 1, "top1")
    assert spec.primary == Comparison("gmm", "")  # the only comparison


def test_several_comparisons_have_no_primary_one_unless_it_is_named():
    spec = read_spec(small(factors={"train_size": [50, 60]}))
    assert spec.primary is None


def test_a_recipe_is_the_base():
    spec = read_spec(small(base={"recipe": "paper"}))
    assert spec.runs(Path("x"), Path())[0].config.mix == "both"


def test_relative_paths_start_at_the_directory_of_the_study():
    spec = read_spec(small(base={"dataset": "folder:photos", "cache_dir": "cache"}))
    config = spec.runs(Path("x"), Path("/data"))[0].config
    assert (config.dataset, config.cache_dir) == ("folder:/data/photos", Path("/data/cache"))


BAD = [
    ("arms:", "amrs:", "line 5, amrs: unknown field of a study 'amrs'; did you mean 'arms'?"),
    ("    prior: gmm", "    priro: gmm", "line 8, arms.gmm.priro: unknown setting 'priro'; did you mean 'prior'?"),
    ("    prior: gmm", "    seed: 3", "line 8, arms.gmm.seed: is set by seeds: leave it out"),
    ("    prior: gmm", "    epochs: 0", "line 8, arms.gmm.epochs: must be a whole number, at least 1, got 0"),
    ("  dataset: digits", "  lr: fast", "line 4, base.lr: must be a number, got 'fast'"),
    ("  dataset: digits", "  dataset: digits\n  dataset: digits", "line 5, base.dataset: is there twice"),
    ("  dataset: digits", "  steps: 3", "line 4, base.steps: is set in budget, too: leave one of them out"),
    ("baseline: none", "baseline: nine", "line 10, baseline: unknown arm 'nine'; did you mean 'none'?"),
    ("[100, 200]", "[]", "line 12, factors.train_size: must be a list of values, or levels"),
    ("[100, 200]", "[100, 100]", "line 12, factors.train_size.1: the value 100 is there twice"),
    ("[100, 200]", "[200, -1]", "line 12, factors.train_size: must be a number of images, at least 1, got -1"),
    ("train_size: [100, 200]", "size: [1]", "line 12, factors.size: unknown setting 'size'"),
    (
        "    mini: {model: vit-mini}",
        "    mini: {prior: gab}",
        "line 13, factors.backbone: sets prior, which arms set too",
    ),
    ("seeds: [3, 5]", "seeds: [3, 5, 3]", "line 16, seeds.2: the seed 3 is there twice"),
    ("seeds: [3, 5]", "seeds: 0", "line 16, seeds: must be a number of seeds, at least 1, or a list of seeds, got 0"),
    ("seeds: [3, 5]", "seeds: many", "line 16, seeds: must be a whole number, got 'many'"),
    ("{steps: 20}", "{steps: 20, epochs: 3}", "line 17, budget: must be either epochs or steps"),
    ("{steps: 20}", "{hours: 20}", "line 17, budget.hours: unknown budget 'hours'"),
    ("arm: gmm, train", "arm: none, train", "line 18, primary: unknown arm 'none'"),
    (", backbone: mini}", "}", "line 18, primary: must name one of the 4 conditions"),
    ("[parameters]", "[params]", "line 19, also_differs.0: unknown setting 'params'"),
    ("threads: 2", "threads: 0", "line 20, threads: must be a number of threads, at least 1, got 0"),
    (", study: priors", "", "line 21, sigma: needs study"),
    ("n: 8", "n: 1", "line 21, sigma: needs a value above 0 in points and n of at least 2"),
    ("  gab: {prior: gab}", "  no: {prior: gab}", "line 5, arms: the name False must be text: write it in quotes"),
    ("  gab: {prior: gab}", "  a/b: {prior: gab}", "line 9, arms.a/b: the name must consist of letters"),
    ("  gab: {prior: gab}", "  gab: gab", "line 9, arms.gab: must be a mapping such as `name: value`, got 'gab'"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[each[2].split(":")[0] for each in BAD])
def test_a_bad_definition_is_an_error_with_file_line_and_field(spec_of, tmp_path, old, new, message):
    text = GOOD if "model: vit-micro" in old else GOOD.replace("  model: vit-micro\n", "  drop_path: 0.1\n")
    assert old in text
    with pytest.raises(vicinal.VicinalError) as error:
        spec_of(text.replace(old, new, 1))
    assert str(error.value).startswith(f"{tmp_path / 'own.yaml'}, {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no fields"),
        ("- 1", "has no fields"),
        ("arms: {", "is not YAML"),
        ("seeds: 3", "arms: must be a mapping"),
    ],
)
def test_a_file_that_is_not_a_study_is_an_error(spec_of, text, message):
    with pytest.raises(vicinal.VicinalError, match=message):
        spec_of(text)


def test_a_mapping_has_errors_without_lines():
    with pytest.raises(vicinal.VicinalError, match=r"^study, arms\.gmm\.priro: unknown setting"):
        read_spec({"arms": {"gmm": {"priro": "gmm"}}})
