"""The examples of docs/own_loop.md run as they stand: priors learn at a rate of their own, and are restored."""

import re
from pathlib import Path

import pytest
import torch

import vicinal
from vicinal.attachment import get_priors

PAGE = Path(__file__).parents[2] / "docs" / "own_loop.md"
NEEDED = {"Plain PyTorch": None, "Hugging Face Trainer": "transformers", "Lightning": "lightning"}


def blocks_of(heading):
    """Returns the Python blocks above all headings of the page, and those of one section."""
    first, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    by_name = {section.partition("\n")[0]: section for section in sections}
    assert by_name.keys() == NEEDED.keys()
    return [block for text in (first, by_name[heading]) for block in re.findall(r"```python\n(.*?)```", text, re.S)]


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")  # these two are Lightning's
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("heading", NEEDED)
def test_an_example_trains_and_restores_priors(heading, monkeypatch, tmp_path):
    if NEEDED[heading] is not None:
        pytest.importorskip(
            NEEDED[heading], reason=f"{NEEDED[heading]} is not installed: pip install {NEEDED[heading]}"
        )
    monkeypatch.chdir(tmp_path)
    optimizers = []
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups: optimizers.append(adamw(groups)) or optimizers[-1])
    names = {}
    for block in blocks_of(heading):
        exec(compile(block, PAGE.name, "exec"), names)

    model, again = names["model"], names["again"]
    priors = list(get_priors(model).values())
    assert len(priors) == 2
    # ViTForImageClassification reads its class token, so the prior of its last layer gets no gradient.
    for prior in priors[:1] if heading == "Hugging Face Trainer" else priors:
        initial = vicinal.build_prior(prior.spec, heads=prior.heads, grid=prior.grid)
        assert not torch.equal(prior.sigma, initial.sigma)
    for prior, other in zip(priors, get_priors(again).values(), strict=True):
        assert torch.equal(prior.sigma, other.sigma)
    *others, last = optimizers[0].param_groups
    assert {id(each) for each in last["params"]} == {id(each) for prior in priors for each in prior.parameters()}
    assert last["weight_decay"] == 0
    assert {group["weight_decay"] for group in others} == {0, 0.05}
    assert last["initial_lr"] == pytest.approx(30 * others[0]["initial_lr"])
    assert last["lr"] == pytest.approx(30 * others[0]["lr"], rel=1e-3, abs=1e-8)
