"""`create_model`: from a name to a model, with a prior in it."""

import difflib
from typing import Any

import timm
import torch
from torch import nn

from vicinal.errors import VicinalError
from vicinal.inspection.model_runner import ImageSize, ModelRunner, eval_without_side_effects
from vicinal.models.backbones import (
    ALIASES,
    BACKBONES,
    Backbone,
    Priors,
    attach_priors,
    check_patch,
    cut_of,
    image_size,
    images_of,
)

__all__ = ["backbone_of", "create_model", "make_timm_model", "note"]

DROP_PATH = 0.1


def create_model(
    name: str,
    *,
    prior: Priors = "none",
    img_size: ImageSize | None = None,
    num_classes: int | None = 10,
    in_chans: int = 3,
    global_pool: str | None = None,
    drop_path_rate: float = DROP_PATH,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """Create a model, with a prior in all of its attention over a grid.

    >>> import vicinal
    >>> model = vicinal.create_model("vit", prior="gmm:kernels=5", img_size=32, num_classes=10)
    >>> sum(parameter.numel() for parameter in model.parameters())  # 1,080 of them are the prior's
    2693506

    Nothing but the prior differs between a model with a prior and one without: same pooling, and from the same random
    state the same starting weights.

    Args:
        name: one of `vicinal models`, such as `vit`, `swin`, `cait`, `pit`, `t2t`, `vit-mini`; or any name of timm's.
        prior: what to attach, such as `gmm` or `gmm:kernels=3+gab`.
        img_size: height and width of the images. 32 by default; a model of timm's has its own default.
        num_classes: outputs; None for as many as the pretrained model has.
        in_chans: channels of the images.
        global_pool: `token`, the class token, or `avg`, the mean over patches. ViT, CaiT and PiT have `token` by
            default, Swin and T2T `avg`, with and without a prior. CaiT takes `token` only and Swin `avg` only.
        drop_path_rate: share of residual branches dropped in training.
        pretrained: load weights from the Hub; there are some for models of timm's.
        options: further arguments of the model, such as `patch_size`, `depth`, `embed_dim`. Without a `patch_size`,
            patches have the paper's size, and twice that from 64 pixels on.
    """
    backbone = backbone_of(name)
    arguments: dict[str, Any] = {
        "img_size": img_size,
        "num_classes": num_classes,
        "in_chans": in_chans,
        "global_pool": global_pool,
    }
    if backbone is None:
        return _from_timm(name, prior, arguments, drop_path_rate, pretrained, options)
    if pretrained:
        raise VicinalError(f"there are no pretrained weights for {name}; vicinal.load opens a model that you trained")
    try:
        return backbone.create(
            prior=prior,
            drop_path_rate=drop_path_rate,
            **{key: value for key, value in arguments.items() if value is not None},
            **options,
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise _cannot_make(name, error) from error


def backbone_of(name: str) -> Backbone | None:
    """The backbone behind a name of ours, in any of its spellings; None if it is no name of ours."""
    if not isinstance(name, str):
        raise VicinalError(f"a model is named by a text such as 'vit', given {name!r}")
    by_timm_name = {backbone.timm_name: backbone for backbone in BACKBONES.values()}
    return by_timm_name.get(name) or BACKBONES.get(ALIASES.get(name, name))


def make_timm_model(name: str, **arguments: Any) -> nn.Module:
    """A model of timm's registry; errors in its making are told as bad input."""
    if ":" in name or "/" in name:
        raise VicinalError(f"{name!r} is no model's name; vicinal.load({name!r}) opens a saved model")
    if not timm.is_model(name.split(".")[0]):
        known = [*BACKBONES, *ALIASES, *timm.list_models()]
        nearest = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(repr(each) for each in nearest)}?" if nearest else "."
        raise VicinalError(
            f"unknown model {name!r}{hint} `vicinal models` lists them, `vicinal models '{name[:4]}*'` timm's"
        )
    try:
        return timm.create_model(name, **arguments)  # type: ignore[no-any-return]
    except OSError as error:  # the only thing that timm reads are weights, of the Hub or of its own cache
        raise VicinalError(
            f"cannot get the pretrained weights of {name} ({type(error).__name__}): they are fetched once, with a "
            "connection, and then kept. pretrained=False makes it without them; `vicinal analyze`: --random-weights"
        ) from error
    except Exception as error:  # timm says what it does not like by asserts, TypeErrors and RuntimeErrors
        raise _cannot_make(name, error) from error


def _from_timm(
    name: str, prior: Priors, arguments: dict[str, Any], drop_path: float, pretrained: bool, options: dict[str, Any]
) -> nn.Module:
    given = {key: value for key, value in arguments.items() if value is not None} | options
    size = image_size(given["img_size"]) if "img_size" in given else None
    if size is not None:
        given["img_size"] = size[0] if size[0] == size[1] else size  # some take one number only
    given["drop_path_rate"] = drop_path
    while True:
        try:
            model = make_timm_model(name, pretrained=pretrained, **given)
            break
        except VicinalError as error:
            refused = [key for key in ("img_size", "drop_path_rate") if _is_refusal(error, key)]
            asked_for = refused == ["drop_path_rate"] and drop_path not in (0, DROP_PATH)
            if not refused or refused[0] not in given or asked_for:
                raise
            del given[refused[0]]  # may run on any size; has no residual branches to drop
    declared: Any = dict(model.pretrained_cfg)  # type: ignore[arg-type]
    patches: Any = getattr(model, "patch_embed", None)
    if size is None:
        size = image_size(getattr(patches, "img_size", None) or declared["input_size"][1:])
    else:
        check_patch(name, size, cut_of(model))
        _check_runs(name, model, (arguments["in_chans"], *size), declared["input_size"][1:])
    declared["input_size"] = (arguments["in_chans"], *size)
    declared.update(images_of(declared, arguments["in_chans"]))
    attach_priors(model, prior, declared["input_size"])
    return note(model, declared, given)


def _check_runs(name: str, model: nn.Module, shape: tuple[int, int, int], own: tuple[int, int]) -> None:
    """Run a model once: timm makes some for sizes at which they fail, which the first batch would tell."""
    run = ModelRunner(model, shape)
    try:
        with eval_without_side_effects(model), torch.no_grad():
            model(run.noise(1))
    except Exception as error:
        raise VicinalError(
            f"{name} does not run on images of {shape[1]} x {shape[2]} pixels ({_said(error)}); it was made for "
            f"{own[0]} x {own[1]}"
        ) from error


def note(model: nn.Module, declared: dict[str, Any], arguments: dict[str, Any]) -> nn.Module:
    """Note in a model what timm declares of it, and what it was made with."""
    notes = {"pretrained_cfg": declared, "default_cfg": declared, "model_args": arguments}
    for name, value in notes.items():
        setattr(model, name, value)
    return model


def _is_refusal(error: VicinalError, argument: str) -> bool:
    return f"unexpected keyword argument '{argument}'" in str(error)


def _cannot_make(name: str, error: Exception) -> VicinalError:
    if isinstance(error, VicinalError):
        return error
    return VicinalError(f"cannot make {name}: {_said(error)}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'it says no more'}"
