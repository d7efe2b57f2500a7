"""Names of prompt blocks in the pool: equal in every process and run that would compute equal rows. Pure.

A block's rows depend on its tokens and on every token before it, on the model, and on how rows are laid out. So its
key is the model's fingerprint and a hash chained over the tokens up to the block's end, which begins with the layout
(dtype, block size, layers, dimensions; whether checksums lie between the rows). Python's own `hash` differs between
processes and is not used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.v1 import registry_pb2

from transfer.layout import layout_hash


def block_keys(
    layout: registry_pb2.KvLayout, tokens: Sequence[int], lookahead: int = 0, *, checksums: bool = False
) -> tuple[str, ...]:
    """A key for each full block of `tokens`; a last block that is not full has none, and is never shared.

    With `lookahead` 1, for a layout with a draft layer, a key also depends on the token behind its block, as the draft
    layer's last row does; a block with nothing behind it has no key.
    """
    size = layout.block_size
    digest = hashlib.blake2b(layout_hash(layout).encode() + b" checksums" * checksums, digest_size=16)
    keys = []
    for end in range(size, len(tokens) - lookahead + 1, size):
        digest.update(struct.pack(f"<{size}I", *tokens[end - size : end]))
        with_next = digest.copy()
        with_next.update(struct.pack(f"<{lookahead}I", *tokens[end : end + lookahead]))
        keys.append(f"{layout.fingerprint}@{with_next.hexdigest()}")
    return tuple(keys)


@dataclass(frozen=True)
class Writers:
    """Who may write a block's object: TP rank 0 of every prefill group, each under a name of its own.

    MemCache gives two clients that allocate one name the same memory, and either may take it back while the other
    writes. With a name per writer nobody can; everybody reads every writer's objects.
    """

    group: int
    groups: int

    def own(self, key: str) -> str:
        """The name under which this group writes."""
        return f"{key}@{self.group}"

    def names(self, key: str) -> list[str]:
        """Every name under which the block may be, this group's first."""
        others = [group for group in range(self.groups) if group != self.group]
        return [f"{key}@{group}" for group in (self.group, *others)]
