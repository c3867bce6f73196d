"""The byte tokenizer: text as UTF-8 bytes, for models trained from scratch."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are bytes; pad and end-of-sequence follow; the rest is never produced by `encode`.

    The vocabulary is padded to a multiple of 16, so that an embedding or head of this width can be
    cut into NVFP4 blocks.
    """

    pad_id: int = 256
    eos_id: int = 257
    vocab_size: int = 272

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a completion."""
        return (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`; what UTF-8 cannot hold (a lone surrogate) becomes '?'."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special and unused ids are dropped, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")
