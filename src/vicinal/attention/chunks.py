"""Chunks of attention that fit the cache, and the buffers that all chunks share."""

import math

import torch
from torch import Tensor

from vicinal.attention.precision import product_dtype, softmax_dtype

__all__ = ["CPU_CHUNK_LOGITS", "ChunkedAttention", "even_chunk"]

# Logits in a chunk. On a CPU, three buffers of 2 MB minimize the sum of cache misses and of the cost to start
# operations; a GPU needs enough of them to be busy.
CPU_CHUNK_LOGITS = 2**19
GPU_CHUNK_LOGITS = 2**26


class ChunkedAttention:
    """Divides an attention into chunks and holds the buffers that they are computed in.

    A chunk is all heads of some images. Where the logits of one image exceed a chunk, it is one head of some images, so
    that the prior of that head stays in the cache; where one head of one image exceeds it, some of its query rows.
    Logits of a chunk are `(images, heads, rows, keys)`: all keys of a query are in one chunk.

    Args:
        q: queries, `(batch, heads, queries, dim)`.
        v: values, `(batch, heads, keys, v_dim)`.
        logit_buffers: number of buffers of the size of a chunk's logits.
    """

    def __init__(self, q: Tensor, v: Tensor, logit_buffers: int) -> None:
        batch, heads, queries, dim = q.shape
        keys, v_dim = v.shape[2:]
        self.dtype = product_dtype(q)
        self.softmax_dtype = softmax_dtype(q.dtype)
        chunk_logits = CPU_CHUNK_LOGITS if q.device.type == "cpu" else GPU_CHUNK_LOGITS
        images_per_chunk = chunk_logits / (heads * queries * keys)
        group = heads if images_per_chunk >= 1 else 1
        images = even_chunk(batch, batch / (images_per_chunk * heads / group))
        rows = queries if images > 1 else even_chunk(queries, 1 / (images_per_chunk * heads / group))
        self.head_groups = [slice(head, head + group) for head in range(0, heads, group)]
        self.chunks = [
            (slice(image, image + images), slice(row, row + rows))
            for image in range(0, batch, images)
            for row in range(0, queries, rows)
        ]
        matrices = images * group
        self._logits = [q.new_empty(matrices, rows, keys, dtype=self.dtype) for _ in range(logit_buffers)]
        sizes = {"q": (rows, dim), "k": (keys, dim), "v": (keys, v_dim), "gradient": (rows, v_dim)}
        self._inputs = {name: q.new_empty(matrices, *size, dtype=self.dtype) for name, size in sizes.items()}
        self._output = q.new_empty(matrices * max(rows, keys) * max(dim, v_dim), dtype=self.dtype)

    def load(self, name: str, x: Tensor) -> Tensor:
        """Copies a chunk `(images, heads, rows, dim)` of an input to its buffer; returns `(matrices, rows, dim)`."""
        buffer = self._inputs[name][: x.shape[0] * x.shape[1], : x.shape[2]]
        buffer.view(x.shape).copy_(x)
        return buffer

    def matrices(self, x: Tensor) -> Tensor:
        """Returns `(images, heads, rows, columns)` as `(matrices, rows, columns)`."""
        return x.flatten(0, 1).to(self.dtype)

    def store(self, result: Tensor, left: Tensor, right: Tensor, *, beta: float = 0.0, alpha: float = 1.0) -> None:
        """Writes `beta * result + alpha * left right` to a chunk of a result, `(images, heads, rows, dim)`.

        Batched products are slower into chunks with gaps. They go through a buffer, which the cache holds.
        """
        if result.is_contiguous() and result.dtype == self.dtype:
            result.flatten(0, 1).baddbmm_(left, right, beta=beta, alpha=alpha)
            return
        buffer = self._output[: result.numel()].view(result.shape)
        if beta:
            buffer.copy_(result)
        buffer.flatten(0, 1).baddbmm_(left, right, beta=beta, alpha=alpha)
        result.copy_(buffer)

    def product(self, number: int, rows: Tensor, keys: Tensor, heads: slice, scale: float = 1.0) -> Tensor:
        """Returns `scale * rows keys^T`, `(images, heads, rows, keys)`, in the buffer for logits of that number."""
        buffer = self._logits[number][: rows.shape[0], : rows.shape[1]]
        buffer.baddbmm_(rows, keys.mT, beta=0.0, alpha=scale)
        return buffer.view(-1, heads.stop - heads.start, *buffer.shape[1:]).to(self.softmax_dtype)

    def buffer_like(self, number: int, logits: Tensor) -> Tensor:
        """Returns the buffer for logits of that number, in the shape of `logits`."""
        if logits.dtype != self.dtype:
            return torch.empty_like(logits)
        return self._logits[number][: logits.shape[0] * logits.shape[1], : logits.shape[2]].view(logits.shape)


def even_chunk(total: int, chunks: float) -> int:
    """Returns the size of a chunk where `total` is divided into about `chunks` even ones, at least 1."""
    return max(1, math.ceil(total / max(1, round(chunks))))
