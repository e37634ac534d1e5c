"""`FORMER_BITS`: whether this process computes as versions before the native library did, to the last bit.

`VICINAL_NATIVE=0` in the environment says so. A run that such a version began goes on with it unchanged.
What came with the library computes the same up to rounding: skipped branches of drop path, fused AdamW, tables without
MKL, head mixing of CaiT.
"""

import os

__all__ = ["FORMER_BITS"]

FORMER_BITS = os.environ.get("VICINAL_NATIVE") == "0"
