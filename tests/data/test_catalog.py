import pytest

from vicinal.data import SETS


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_whole(name):
    known = SETS[name]
    assert known.page == f"https://huggingface.co/datasets/{known.id}"
    assert len(known.info.mean) == len(known.info.std) == 3
    assert all(0 < value < 1 for value in (*known.info.mean, *known.info.std))
    assert min(known.images) > known.classes > 1


@pytest.mark.network
@pytest.mark.parametrize("name", SETS)
def test_the_hub_says_the_same(name):
    from datasets import load_dataset_builder

    known = SETS[name]
    info = load_dataset_builder(known.id, known.config).info
    assert type(info.features[known.image]).__name__ == "Image"
    assert info.features[known.label].num_classes == known.classes
    counts = [sum(info.splits[part].num_examples for part in split.split("+")) for split in (known.train, known.test)]
    assert tuple(counts) == known.images
