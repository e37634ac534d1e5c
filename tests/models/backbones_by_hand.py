"""The backbones again, from their weights, written out: no layers of timm or of ours, no fused attention."""

import torch
from torch.nn import functional as F


def norm(layer, x):
    return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, eps=1e-5)


def linear(layer, x):
    return torch.einsum("...i,oi->...o", x, layer.weight) + (0 if layer.bias is None else layer.bias)


def mlp(layers, x):
    return linear(layers.fc2, F.gelu(linear(layers.fc1, x)))


def heads(x, number):
    return x.unflatten(-1, (number, -1)).transpose(-3, -2)


def attention(layers, x, number, bias=0):
    q, k, v = (heads(part, number) for part in linear(layers.qkv, x).chunk(3, dim=-1))
    logits = torch.einsum("...hid,...hjd->...hij", q, k) / q.shape[-1] ** 0.5
    out = torch.einsum("...hij,...hjd->...hid", (logits + bias).softmax(-1), v)
    return linear(layers.proj, out.transpose(-3, -2).flatten(-2))


def block(layers, x, number, bias=0):
    x = x + attention(layers.attn, norm(layers.norm1, x), number, bias)
    return x + mlp(layers.mlp, norm(layers.norm2, x))


def patches(projection, images):
    """Every patch as one row of pixels, times the weights."""
    size = projection.weight.shape[-1]
    cut = images.unfold(2, size, size).unfold(3, size, size)  # (batch, channels, rows, columns, size, size)
    tokens = cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    return tokens @ projection.weight.flatten(1).T + projection.bias


def with_class(model, x):
    return x if model.cls_token is None else torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1)


def vit(model, images):
    x = with_class(model, patches(model.patch_embed.proj, images)) + model.pos_embed
    for layers in model.blocks:
        x = block(layers, x, 12)
    if model.global_pool == "token":
        return linear(model.head, norm(model.norm, x[:, 0]))
    return linear(model.head, norm(model.fc_norm, x.mean(1)))


def pit(model, images):
    x = with_class(model, patches(model.patch_embed.proj, images)) + model.pos_embed
    prefix = model.num_prefix_tokens
    for index, number in enumerate((2, 4, 8)):
        if index:
            pool = model.stages[index].pool
            side = round((x.shape[1] - prefix) ** 0.5)
            image = x[:, prefix:].transpose(1, 2).unflatten(2, (side, side))
            cut = F.pad(image, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2)
            kernels = pool.depthwise.weight.view(-1, 2, 3, 3)  # two outputs for every channel
            wide = torch.einsum("bcrsij,ckij->bckrs", cut, kernels).flatten(1, 2)
            wide = wide + pool.depthwise.bias[:, None, None]
            rows = wide.flatten(2).transpose(1, 2)
            rows = rows @ pool.pointwise.weight.flatten(1).T + pool.pointwise.bias
            x = torch.cat([linear(pool.token, x[:, :1]), rows], dim=1) if prefix else rows
        for layers in model.stages[index].blocks:
            x = block(layers, x, number)
    return linear(model.head, norm(model.norm, x[:, 0] if prefix else x.mean(1)))


def cait(model, images):
    def talk(layers, x, context):
        q = heads(linear(layers.q, x), 4)
        k, v = (heads(part, 4) for part in linear(layers.kv, context).chunk(2, dim=-1))
        logits = torch.einsum("bhid,bhjd->bhij", q, k) / 8
        mixed = torch.einsum("bhij,hg->bgij", logits, layers.mix_logits).softmax(-1)
        weights = torch.einsum("bhij,hg->bgij", mixed, layers.mix_weights)
        out = torch.einsum("bhij,bhjd->bhid", weights, v)
        return linear(layers.proj, out.transpose(1, 2).flatten(2))

    x = patches(model.patch_embed.proj, images) + model.pos_embed
    for layers in model.blocks:
        normed = norm(layers.norm1, x)
        x = x + layers.gamma_1 * talk(layers.attn, normed, normed)
        x = x + layers.gamma_2 * mlp(layers.mlp, norm(layers.norm2, x))
    token = model.cls_token.expand(len(x), -1, -1)
    for layers in model.blocks_token_only:
        token = token + layers.gamma_1 * talk(layers.attn, norm(layers.norm1, token), x)
        token = token + layers.gamma_2 * mlp(layers.mlp, norm(layers.norm2, token))
    return linear(model.head, norm(model.norm, token[:, 0]))


def gathered(image):
    """`(batch, channels, height, width)`: for each place of half the grid, its nine neighbors of all channels."""
    batch, channels, height, width = image.shape
    padded = F.pad(image, (1, 1, 1, 1))
    tokens = torch.zeros(batch, height // 2 * (width // 2), channels * 9, dtype=image.dtype)
    for row in range(height // 2):
        for column in range(width // 2):
            near = padded[:, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            tokens[:, row * (width // 2) + column] = near.reshape(batch, -1)
    return tokens


def t2t(model, images):
    image = images
    for layers in model.patch_embed.transformers:
        tokens = gathered(image)
        width = tokens.shape[-1]
        q, k, v = linear(layers.attn.qkv, norm(layers.norm1, tokens)).chunk(3, dim=-1)
        weights = (torch.einsum("bid,bjd->bij", q, k) / width**0.5).softmax(-1)
        x = v + linear(layers.attn.proj, weights @ v)
        x = x + mlp(layers.mlp, norm(layers.norm2, x))
        side = image.shape[2] // 2
        image = x.transpose(1, 2).unflatten(2, (side, side))
    x = linear(model.patch_embed.proj, gathered(image)) + model.pos_embed
    for layers in model.blocks:
        x = block(layers, x, 4)
    return linear(model.head, norm(model.norm, x).mean(1))


def swin(model, images):
    size = 4

    def offsets():
        place = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        difference = place[:, None] - place[None] + size - 1
        return difference[..., 0] * (2 * size - 1) + difference[..., 1]

    def windows(image):
        return image.unfold(1, size, size).unfold(2, size, size).permute(0, 1, 2, 4, 5, 3).flatten(3, 4)

    side = images.shape[2] // 2
    embed = model.patch_embed
    x = norm(embed.norm, patches(embed.proj, images)).unflatten(1, (side, side)) + embed.pos_embed
    for index, stage in enumerate(model.layers):
        if index:
            near = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
            x = linear(stage.downsample.reduction, norm(stage.downsample.norm, torch.cat(near, dim=-1)))
        side = x.shape[1]
        for number, layers in enumerate(stage.blocks):
            shift = size // 2 if number % 2 and side > size else 0
            table = layers.attn.relative_position_bias_table[offsets()].permute(2, 0, 1)
            # which part of the image a place comes from, once the shift has brought its ends together
            part = torch.arange(side).roll(-shift) < shift if shift else torch.zeros(side, dtype=torch.bool)
            part = windows((2 * part.long()[:, None] + part.long()[None])[None, :, :, None])[0, ..., 0]
            apart = torch.where(part[..., None, :] == part[..., :, None], 0.0, -100.0)[:, :, None]
            cut = windows(norm(layers.norm1, x).roll((-shift, -shift), (1, 2)))
            out = attention(layers.attn, cut, layers.attn.num_heads, table + apart)
            out = out.unflatten(3, (size, size)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)
            x = x + out.roll((shift, shift), (1, 2))
            x = x + mlp(layers.mlp, norm(layers.norm2, x))
    return linear(model.head.fc, norm(model.norm, x).mean((1, 2)))
