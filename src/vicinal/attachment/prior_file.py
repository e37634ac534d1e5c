"""`save_prior` keeps the priors of a model in a file; `load_prior` attaches them to such a model again."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.attachment.attach import Attachment, add_priors, check_model, detach, fits, layer_of
from vicinal.attachment.attached_priors import compare_sites, describe_site, get_priors, site_of, spec_of
from vicinal.attachment.dry_run import verified
from vicinal.attachment.subclass import WithPrior
from vicinal.attention.native import prepare_native_for
from vicinal.errors import VicinalError
from vicinal.inspection.image_context import UNKNOWN
from vicinal.inspection.model_inspection import Inspection, inspect_runner
from vicinal.inspection.model_runner import Example, make_runner, unwrapped
from vicinal.inspection.sites import AttentionSite
from vicinal.priors import Prior, build_prior
from vicinal.priors.spec import current_options, current_spec, parse_spec
from vicinal.tensor_file import read_tensors, write_tensors

__all__ = ["load_prior", "save_prior"]

FORMAT = 1
DIFFERENCES_SHOWN = 3


@dataclass(frozen=True)
class StoredPrior:
    """What the header of a file says of one layer's prior."""

    prior: str
    """Its spec."""
    options: dict[str, Any]
    """Options beside the spec."""
    layer: int
    depth: int
    image: tuple[int, int] | None
    """Height and width of the images that it was attached for; None if the model takes no images of a size."""
    site: dict[str, int]
    """Heads, rows, columns and further numbers of tokens."""

    @classmethod
    def of(cls, module: WithPrior) -> "StoredPrior":
        """Returns the entry of a module that carries a prior."""
        spec, options = spec_of(module.prior)
        image = None if module.prior_site.image == UNKNOWN else module.prior_site.image
        return cls(spec, options, module.prior.layer, module.prior.depth, image, site_of(module))

    @classmethod
    def from_header(cls, entry: Any) -> "StoredPrior":
        """Returns an entry that was read. Raises ValueError if it is not one."""
        if not isinstance(entry, dict) or entry.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"an entry must have {', '.join(cls.__dataclass_fields__)}, got {entry!r}")
        spec, options, image, site = (entry[key] for key in ("prior", "options", "image", "site"))
        numbers = [entry["layer"], entry["depth"], *(image or ())]
        if not (isinstance(spec, str) and isinstance(options, dict) and isinstance(site, dict)):
            raise ValueError(f"an entry must have a spec, options and a site, got {entry!r}")
        if image is not None and len(image) != 2:
            raise ValueError(f"image must be height and width, got {image!r}")
        if not all(type(number) is int and number >= 0 for number in (*numbers, *site.values())):
            raise ValueError(f"layer, depth, image and site must be whole numbers, got {entry!r}")
        options = current_options(parse_spec(spec)[0].name, options)
        size = None if image is None else (image[0], image[1])
        return cls(current_spec(spec), options, entry["layer"], entry["depth"], size, site)


def save_prior(model: nn.Module, file: str | Path) -> Path:
    """Writes the priors of a model to a file, atomically; `load_prior` attaches them to such a model again.

    >>> import tempfile, torch, vicinal, timm
    >>> def make():
    ...     torch.manual_seed(0)
    ...     return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    >>> model, images = make(), torch.randn(1, 3, 64, 64)
    >>> _ = vicinal.attach(model, "gab", img_size=64)
    >>> file = vicinal.save_prior(model, tempfile.mkdtemp() + "/prior.safetensors")
    >>> again = make()  # or from_pretrained, or load_state_dict: the weights without the priors
    >>> print(vicinal.load_prior(again, file))
    gab attached to 2 modules
    module         class      heads  grid              parameters  changes at start
    blocks.0.attn  Attention  3      4 x 4 + 1 prefix  2           yes
    blocks.1.attn  Attention  3      4 x 4 + 1 prefix  2           yes
    >>> torch.equal(again(images), model(images))
    True

    The model can be anybody's: of timm, of Hugging Face transformers, or your own. Its other weights are not written;
    keep them as its library does. The file is safetensors with JSON in its header.

    Args:
        model: a model that carries priors, in any number of layers.
        file: the file; one that exists is replaced. Its folder must exist.

    Returns:
        The file.

    Raises:
        VicinalError: the model carries no prior, or one that a file cannot hold.
    """
    _require_module(model)
    model, file = unwrapped(model), Path(file)
    entries: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, WithPrior):
            layer = (name or module.plain_class.__name__) + "".join(module.prior_site.name.partition("#")[1:])
            entries[layer] = vars(StoredPrior.of(module))
            tensors |= {f"{layer}.{key}": value for key, value in _state(layer, module.prior).items()}
    if not entries:
        raise VicinalError(f"{type(model).__name__} carries no prior; vicinal.attach one first")
    if not file.parent.is_dir():
        raise VicinalError(f"file must be in a folder that exists, got {file}")
    header = {"content": "prior", "format": FORMAT, "layers": entries}
    try:
        write_tensors(file, tensors, header)
    except TypeError as error:
        raise VicinalError(f"the options of a prior cannot be written as JSON: {error}") from None
    except OSError as error:
        raise VicinalError(f"cannot write {file}: {error.strerror or error}") from None
    return file


def load_prior(model: nn.Module, file: str | Path, *, example: Example | None = None) -> Attachment:
    """Attaches the priors that `save_prior` wrote to a model of the same attention layers, in place.

    >>> import tempfile, torch, vicinal
    >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.patches, self.encoder = torch.nn.Conv2d(3, 16, 8, stride=8), encoder
    ...     def forward(self, images):
    ...         return self.encoder(self.patches(images).flatten(2).mT)
    >>> model = Model()
    >>> _ = vicinal.attach(model, "gmm:kernels=3", img_size=32)
    >>> file = vicinal.save_prior(model, tempfile.mkdtemp() + "/prior.safetensors")
    >>> _ = vicinal.detach(model)
    >>> [layer.name for layer in vicinal.load_prior(model, file).layers]
    ['encoder.layers.0.self_attn']

    The file says which priors, with which options, in which layers and for images of which size. As in `attach`, the
    model runs on noise, positions of tokens are measured and every layer is verified. Then the values of the file are
    filled in, in their dtype. If a layer has another name, number of heads or grid than the saved one, nothing is
    changed. Parameters that several layers share come back as copies.

    Args:
        model: a model that carries no prior.
        file: a file of `save_prior`.
        example: an input to learn from how the model is called, as for `attach`; the size of the images is the file's.

    Returns:
        The modules that got a prior, and why others were left alone.

    Raises:
        VicinalError: the file cannot be used, the model carries priors already, or its layers are others.
    """
    _require_module(model)
    model, file = unwrapped(model), Path(file)
    check_model(model)
    prepare_native_for(model)
    stored, tensors = _read(file)
    if carried := list(get_priors(model)):
        raise VicinalError(f"{carried[0]} carries a prior already; vicinal.detach(model) first")
    sizes = dict.fromkeys(entry.image for entry in stored.values())
    try:
        inspections = {size: _inspect(model, size, example) for size in sizes}
        sites = _find_sites(stored, inspections)
        with torch.random.fork_rng(devices=[]):  # the initial parameters are overwritten
            priors = {name: _build(stored[name], site) for name, site in sites.items()}
        _fill(priors, tensors)
    except VicinalError as error:
        raise VicinalError(f"{file} does not fit {type(model).__name__}: {error}") from error
    try:
        for size, inspection in inspections.items():
            add_priors(inspection, [(sites[name], priors[name]) for name in sites if stored[name].image == size])
    except BaseException:
        detach(model)
        raise
    left = {site.name: site.reason for each in inspections.values() for site in each.refused}
    specs = ", ".join(dict.fromkeys(entry.prior for entry in stored.values()))
    return Attachment(specs, [layer_of(sites[name], prior) for name, prior in priors.items()], left)


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise VicinalError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _read(file: Path) -> tuple[dict[str, StoredPrior], dict[str, Tensor]]:
    """Returns what a file says of each layer, and its tensors. Raises VicinalError if it is not such a file."""
    if not file.is_file():
        raise VicinalError(f"file must be one that vicinal.save_prior wrote, got {file}, where there is no file")
    try:
        tensors, header = read_tensors(file)
        if not isinstance(header, dict) or header.get("content") != "prior":
            raise ValueError("it holds no priors")
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {header.get('format')!r}, and this version reads {FORMAT}")
        if not isinstance(header.get("layers"), dict) or not header["layers"]:
            raise ValueError("it names no layers")
        return {name: StoredPrior.from_header(entry) for name, entry in header["layers"].items()}, tensors
    except OSError as error:
        raise VicinalError(f"cannot open {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise VicinalError(f"{file} is not a file of vicinal.save_prior, or is damaged: {error}") from None


def _inspect(model: nn.Module, image: tuple[int, int] | None, example: Example | None) -> Inspection:
    """Returns the inspection of a model at an image size, called as the example shows."""
    runner = make_runner(model, image, example)
    if image is not None and runner.image != image:
        runner = replace(runner, shape=(*runner.shape[:-2], *image))
    return verified(inspect_runner(runner))


def _find_sites(
    stored: dict[str, StoredPrior], inspections: dict[tuple[int, int] | None, Inspection]
) -> dict[str, AttentionSite]:
    """Returns the site of each stored layer. Raises VicinalError if one is missing or differs, naming them."""
    served = {size: {site.name: site for site in each.served} for size, each in inspections.items()}
    refused = {site.name: site.reason for each in inspections.values() for site in each.refused}
    sites = {name: served[entry.image][name] for name, entry in stored.items() if name in served[entry.image]}
    found = {name: describe_site(site) for name, site in sites.items()}
    wrong = list(compare_sites(found, {name: entry.site for name, entry in stored.items()}, refused))
    if wrong:
        more = f" (and {len(wrong) - DIFFERENCES_SHOWN} more)" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise VicinalError("; ".join(wrong[:DIFFERENCES_SHOWN]) + more)
    return sites


def _build(entry: StoredPrior, site: AttentionSite) -> Prior:
    """Returns the prior of a stored layer with its initial values."""
    numbers: dict[str, Any] = {"layer": entry.layer, "depth": entry.depth, **entry.options}
    prior = build_prior(entry.prior, heads=site.heads, grid=site.grid, **numbers)
    if not fits(prior, site):
        raise VicinalError(f"{site.name} has keys that are not its queries, which {entry.prior} does not serve")
    return prior


def _fill(priors: dict[str, Prior], tensors: dict[str, Tensor]) -> None:
    """Gives priors their stored values and dtypes. Raises VicinalError if names or shapes differ."""
    states = {name: _state(name, prior) for name, prior in priors.items()}
    wanted = {f"{name}.{key}": value.shape for name, state in states.items() for key, value in state.items()}
    if wanted != (stored := {key: value.shape for key, value in tensors.items()}):
        wrong = sorted(key for key in wanted.keys() | stored.keys() if wanted.get(key) != stored.get(key))
        shapes = [
            "absent" if shape is None else str(tuple(shape)) for shape in (stored.get(wrong[0]), wanted.get(wrong[0]))
        ]
        raise VicinalError(f"{wrong[0]} is {shapes[0]}, expected {shapes[1]}")
    for name, prior in priors.items():
        for key, value in _parameters_and_buffers(prior):
            value.data = value.data.to(tensors[f"{name}.{key}"].dtype)
        prior.load_state_dict({key: tensors[f"{name}.{key}"] for key in states[name]})


def _parameters_and_buffers(prior: Prior) -> Iterator[tuple[str, Tensor]]:
    state = prior.state_dict().keys()
    for key, value in (*prior.named_parameters(), *prior.named_buffers()):
        if key in state:
            yield key, value


def _state(layer: str, prior: Prior) -> dict[str, Tensor]:
    """Returns copies of the parameters and buffers of a layer's prior, by name."""
    state = prior.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            raise VicinalError(f"{key} of the prior of {layer} must be a tensor with values, got {value!r}")
    return {key: value.detach().clone() for key, value in state.items()}
