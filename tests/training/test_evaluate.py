import csv

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    recall_score,
    top_k_accuracy_score,
)

import vicinal
import vicinal.data
from small_runs import config
from vicinal.training.evaluate import _summarize, evaluate_split


def test_the_test_figure_is_that_of_the_saved_model(tmp_path):
    """Again from the pictures of the test split, one by one, and scikit-learn's figures."""
    run = vicinal.train(config(tmp_path / "run", epochs=5, train_size=600, lr=3e-3))
    model = run.model()
    declared = model.pretrained_cfg
    test = vicinal.data.open_dataset("digits").test
    pixels = torch.from_numpy(np.stack([np.asarray(test.image(index)) for index in range(len(test))]))
    images = (pixels.float()[:, None] / 255 - declared["mean"][0]) / declared["std"][0]
    with torch.no_grad():
        logits = torch.cat([model(image[None]) for image in images])
    found = run.results["test"]
    assert found["images"] == len(test) == 359
    assert len(set(logits.argmax(1).tolist())) > 3
    assert found["top1"] == pytest.approx(accuracy_score(test.labels, logits.argmax(1)))
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(test.labels, logits.argmax(1)))
    assert found["f1"] == pytest.approx(f1_score(test.labels, logits.argmax(1), average="macro"))
    assert found["top5"] == pytest.approx(top_k_accuracy_score(test.labels, logits, k=5))
    assert found["loss"] == pytest.approx(log_loss(test.labels, logits.double().softmax(1)), rel=1e-5)
    assert found["confusion"] == confusion_matrix(test.labels, logits.argmax(1), labels=range(10)).tolist()
    assert found["per_class"] == pytest.approx(recall_score(test.labels, logits.argmax(1), average=None))
    with open(run.folder / "predictions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    assert [row["image"] for row in rows] == [f"image {row}" for row in test.rows]
    assert [int(row["label"]) for row in rows] == test.labels.tolist()
    assert [int(row["prediction"]) for row in rows] == logits.argmax(1).tolist()
    expected = logits.double().softmax(1).amax(1).tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(expected, abs=1e-5)
    probabilities, gaps = logits.double().softmax(1).numpy(), 0.0
    confidence, right = probabilities.max(1), logits.argmax(1).numpy() == test.labels
    for number in range(15):
        inside = (confidence >= number / 15) & (confidence < (number + 1) / 15)
        if inside.any():
            gaps += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    assert found["calibration_error"] == pytest.approx(gaps, rel=1e-4)
    assert declared["label_names"] == [str(number) for number in range(10)]


def test_a_run_is_evaluated_again_on_its_own_splits(tmp_path):
    run = vicinal.train(config(tmp_path / "run", epochs=1, val_size=60))
    found = {split: evaluate_split(run, split)[0] for split in ("train", "val", "test")}
    assert (found["train"].images, found["val"].images) == (130, 60)
    for split in ("val", "test"):
        again, before = found[split].as_dict(), dict(run.results[split])
        for name in ("loss", "calibration_error"):  # sums over batches of another size
            assert again.pop(name) == pytest.approx(before.pop(name), rel=1e-6)
        assert again == before
    assert found["val"].top1 == run.metrics[-1]["val_top1"]


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classes_without_images_or_predictions_count_as_in_scikit_learn():
    """Class 2 has no images but predictions; class 3 has neither; class 1 has images and no hits."""
    labels, predicted = [0, 0, 0, 1, 1, 4], [0, 0, 2, 0, 2, 4]
    confusion = torch.from_numpy(confusion_matrix(labels, predicted, labels=range(5)))
    found = _summarize(torch.ones(3), torch.zeros(2, 15), confusion, torch.zeros(2, 6))
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert found.f1 == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert found.per_class == [pytest.approx(2 / 3), 0.0, None, None, 1.0]


def test_a_run_in_lower_precision_does_not_change_how_others_are_evaluated(tmp_path):
    run = vicinal.train(config(tmp_path / "run", epochs=1, val_size=60))
    vicinal.train(config(tmp_path / "other", epochs=1, precision="bf16"))
    assert evaluate_split(run, "test")[0].loss == pytest.approx(run.results["test"]["loss"], rel=1e-6)
