"""The studies that ship with the package, and those of configs/paper: they read, and compare what they say."""

import itertools
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pictures

import vicinal
from vicinal.errors import VicinalError
from vicinal.models.backbones import BACKBONES
from vicinal.priors.gaussian_mixture import GaussianMixture
from vicinal.studies.arm_facts import check_arms, measure_arms
from vicinal.studies.published import find_published
from vicinal.studies.spec_reader import read_spec
from vicinal.studies.study_path import ready_studies

ROOT = Path(__file__).parents[2]
READY = ready_studies()
PAPER = {file.stem: file for file in sorted((ROOT / "configs" / "paper").glob("*.yaml"))}
ALL = [*READY.values(), *PAPER.values()]
CARRIED = {6: 1, 7: 3, 8: 6, 9: 12, 10: 25}
"""Explorations that so many seeds carry: 0.05 times 2^(n - 1), rounded down."""


def name(file):
    return file.stem


def shrunk(file, folder, model=None):
    """Returns a ready study on the stand-in for CIFAR-10, which is smaller, with another model if one is given."""
    values = yaml.safe_load(file.read_text())
    base, factors = values["base"], values.get("factors", {})
    base["batch_size"] = 8
    if base["dataset"] == "cifar10":
        base |= {"data_dir": str(folder), "train_size": 40, "val_size": 10 if base["val_size"] else 0}
    if "train_size" in factors:
        del base["train_size"], values["primary"]
        factors["train_size"] = [20, 40]
    if model is not None and "model" in base:
        base["model"] = model
    return values


def check(values, folder):
    """Measures and checks the arms of a study; returns its facts."""
    spec = read_spec(values)
    facts = measure_arms(spec, folder, folder, "cpu", {})
    check_arms(spec, facts, folder, folder)
    return facts


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """A folder of Parquet files as those of CIFAR-10, with 60 training and 20 test images."""
    folder = tmp_path_factory.mktemp("cifar10")
    features = Features({"img": Image(), "label": ClassLabel(names=[f"class {index}" for index in range(10)])})
    for split, count in (("train", 60), ("test", 20)):
        images = [Pictures.new("RGB", (32, 32), (index, 2 * index, 255 - index)) for index in range(count)]
        rows = {"img": images, "label": [index % 10 for index in range(count)]}
        Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_there_are_the_studies_that_the_documentation_names():
    assert set(READY) == {"demo", "priors", "kernels", "backbones", "pooling", "data-size", "mixing", "gab"}
    page = (ROOT / "docs" / "studies.md").read_text()
    assert [study for study in (*READY, *PAPER) if f"`{study}`" not in page] == []


def test_no_two_studies_have_the_same_folder():
    assert not set(READY) & set(PAPER)


@pytest.mark.parametrize("file", ALL, ids=name)
def test_a_study_states_question_cost_command_and_primary_comparison(file):
    spec = read_spec(file)
    assert spec.question.endswith("?")
    assert spec.cost is not None
    assert ("measured" if spec.answer else "estimated") in spec.cost
    assert spec.primary in spec.comparisons()
    command = file.stem if file in READY.values() else f"configs/paper/{file.name}"
    assert file.read_text().startswith(f"# vicinal study run {command} --jobs ")


@pytest.mark.parametrize("file", ALL, ids=name)
def test_the_seeds_carry_all_comparisons(file):
    spec = read_spec(file)
    explorations, seeds = len(spec.comparisons()) - 1, len(spec.seeds)
    if seeds < 6:
        assert explorations == 0
        assert "give no verdict" in file.read_text()
    else:
        assert seeds >= 8, "what carries a claim has 8 seeds"
        assert explorations <= CARRIED[seeds] or "map only" in file.read_text()


@pytest.mark.parametrize("study", [study for study in READY if study != "backbones"])
def test_arms_of_a_ready_study_differ_in_one_setting(study, cifar10, tmp_path):
    facts = check(shrunk(READY[study], cifar10, model="vit-micro"), tmp_path)
    assert len({each["steps"] for each in facts.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("study", READY)
def test_arms_of_a_ready_study_differ_in_one_setting_with_its_own_models(study, cifar10, tmp_path):
    check(shrunk(READY[study], cifar10), tmp_path)


def test_the_study_of_pooling_is_refused_unless_it_says_that_pooling_differs(cifar10, tmp_path):
    values = shrunk(READY["pooling"], cifar10, model="vit-micro")
    del values["also_differs"]
    with pytest.raises(VicinalError, match=r"mean-gmm: differs from the baseline token in prior and pool"):
        check(values, tmp_path)


def test_priors_has_every_prior():
    assert {arm["prior"] for arm in read_spec(READY["priors"]).arms.values()} == set(vicinal.list_priors())


@pytest.mark.parametrize("file", [READY["kernels"], PAPER["gmm-kernels"]], ids=["ready", "paper"])
def test_kernels_has_every_number_with_every_initialization(file):
    inits = get_args(get_type_hints(GaussianMixture.__init__)["init"])
    grid = {f"gmm:kernels={kernels},init={init}" for kernels, init in itertools.product((1, 3, 5, 7, 9), inits)}
    assert {arm["prior"] for arm in read_spec(file).arms.values()} == grid | {"none"}


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "svhn", "tiny-imagenet"])
def test_the_table_of_the_gmm_paper_has_its_backbones_recipe_and_figures(dataset):
    file = PAPER[f"gmm-{dataset}"]
    spec = read_spec(file)
    backbones = {backbone.name for backbone in BACKBONES.values() if "the paper's" in backbone.summary}
    assert {condition.name for condition in spec.conditions} == backbones
    assert {condition.name for condition in read_spec(READY["backbones"]).conditions} == backbones
    for run in spec.runs(Path(), Path()):
        assert (run.config.dataset, run.config.epochs, run.config.pool) == (dataset, 300, "paper")
    figures = [find_published("vit", dataset, prior) for prior in ("none", "gmm")]
    assert f"Published for ViT: {figures[0].value:.2f} and {figures[1].value:.2f}." in file.read_text()
