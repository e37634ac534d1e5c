"""Arms that differ in more than they compare are refused, unless the study says so."""

import pytest

import vicinal
from small_studies import definition
from vicinal.studies.arm_facts import check_arms, measure_arms
from vicinal.studies.spec_reader import read_spec
from vicinal.studies.study import study


def check(tmp_path, **changes):
    spec = read_spec(definition(**changes))
    facts = measure_arms(spec, tmp_path, tmp_path, "cpu", {})
    check_arms(spec, facts, tmp_path, tmp_path)
    return facts


@pytest.mark.parametrize(
    ("arms", "listed", "message"),
    [
        (
            {"none": {}, "both": {"prior": "gmm", "lr": 0.1}},
            "lr",
            "arms.both: differs from the baseline none in prior and lr",
        ),
        (
            {"none": {"model": "vit-micro"}, "cait": {"model": "cait"}},
            "pool, parameters",
            "has the pooling token in place of avg of the baseline none",
        ),
        (
            {"none": {"model": "vit-micro"}, "mini": {"model": "vit-mini"}},
            "parameters",
            "parameters outside of the prior in place of 135,242 of the baseline none",
        ),
    ],
    ids=["two settings", "pooling", "parameters"],
)
def test_arms_that_differ_in_more_are_refused(tmp_path, arms, listed, message):
    with pytest.raises(vicinal.VicinalError) as error:
        check(tmp_path, arms=arms)
    assert message in str(error.value)
    assert f"also_differs: [{listed.split(', ')[0]}]" in str(error.value)
    check(tmp_path, arms=arms, also_differs=listed.split(", "))


def test_steps_must_be_equal_unless_the_arm_is_about_them(tmp_path):
    facts = {
        "none": {"pooling": "avg", "steps": 10, "parameters": 100},
        "gmm": {"pooling": "avg", "steps": 12, "parameters": 100},
    }
    spec = read_spec(definition())
    with pytest.raises(vicinal.VicinalError, match=r"arms\.gmm: has 12 steps in place of 10 of the baseline none"):
        check_arms(spec, facts, tmp_path, tmp_path)
    check_arms(read_spec(definition(also_differs=["steps"])), facts, tmp_path, tmp_path)
    longer = read_spec(definition(arms={"none": {}, "gmm": {"steps": 12}}, budget={}))
    check_arms(longer, facts, tmp_path, tmp_path)


def test_a_prior_adds_its_parameters_only(tmp_path):
    facts = check(tmp_path, arms={"none": {}, "elm": {"prior": "elm"}})
    assert facts["none"]["parameters"] == facts["elm"]["parameters"]
    assert facts["elm"]["prior_parameters"] == 4 * 16 * 16  # layers, tokens, tokens
    assert facts["elm"]["steps"] == 4


def test_facts_of_unchanged_arms_are_not_measured_again(tmp_path, monkeypatch):
    spec = read_spec(definition())
    facts = measure_arms(spec, tmp_path, tmp_path, "cpu", {})
    monkeypatch.setattr("vicinal.studies.arm_facts.prepare", None)
    assert measure_arms(spec, tmp_path, tmp_path, "cpu", facts) == facts
    with pytest.raises(TypeError):
        measure_arms(read_spec(definition(budget={"steps": 5})), tmp_path, tmp_path, "cpu", facts)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prior: gmm", "prior: gnm", "line 4, arms.gmm.prior: unknown prior 'gnm'; did you mean 'gmm'?"),
        ("train_size: 96", "train_size: 5000", "line 1, base.train_size: train_size must be from 1 to "),
        ("train_size: 96", "model: vit-mirco", "line 1, base.model: unknown model 'vit-mirco'"),
        ("train_size: 96", "dataset: digit", "line 1, base.dataset: unknown dataset 'digit'"),
        ("train_size: 96", "img_size: 9", "line 1, base.img_size: "),
        ("train_size: 96", "dataset: cifar10, data_dir: nowhere", "line 1, base.data_dir: "),
    ],
)
def test_what_only_data_and_models_show_is_an_error_before_any_run(tmp_path, old, new, message):
    file = tmp_path / "own.yaml"
    file.write_text("base: {train_size: 96}\narms:\n  none: {prior: none}\n  gmm: {prior: gmm}\n".replace(old, new))
    with pytest.raises(vicinal.VicinalError) as error:
        study(file, out=tmp_path / "study")
    assert str(error.value).startswith(f"{file}, {message}")
    assert not (tmp_path / "study").exists()


def test_an_impossible_level_of_a_factor_is_located(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("arms:\n  gmm: {prior: gmm}\nfactors:\n  train_size: [100, 5000]\n")
    with pytest.raises(vicinal.VicinalError, match=r"own\.yaml, line 4, factors\.train_size: train_size must be"):
        study(file, out=tmp_path / "study")
