"""Token identities as they travel: the same on all arms of a pair, unlike in any two pairs (architecture.md).

The pair's key is HMAC-SHA-256 under the gateway's key of `klaxon pseudonyms/1`, a zero byte and the pair id's
UTF-8; AES-256 under it is the only primitive.

- **Ids** are permuted within 0..2³¹−1 by a Feistel network of eight rounds, halves of 15 bits (high) and 16
  (low). Rounds 0, 2, … change the high half by the low one, rounds 1, 3, … the low one by the high one:
  `changed ^= AES(253, round, 0, 0, other as u32 little-endian, 0 × 8)[:4]` as u32 little-endian, cut to the
  changed half's bits.
- **Bytes** (engines without ids) become AES of one block: length, bytes, zeros for up to 15 bytes; 255 and
  the first 15 bytes of SHA-256 for longer ones. An emitted token of which only its id is known: 254, the id
  as u32 little-endian, zeros.

Both are bijections of what they are made of, so equality is kept exactly, and whoever has the key can turn
them back. What they do not hide: which positions hold equal tokens, and the log-probabilities themselves.
Test vectors: `schemas/examples/pseudonyms.json`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

MIN_KEY_BYTES: Final = 16
BLOCK_BYTES: Final = 16
ROUNDS: Final = 8
IDS: Final = 1 << 31
SHORT_BYTES: Final = BLOCK_BYTES - 1
"""Tokens up to so long can be turned back."""
_LOW_BITS: Final = 16
_LOW: Final = np.uint32((1 << 16) - 1)
_HIGH: Final = np.uint32((1 << 15) - 1)
_DOMAIN: Final = b"klaxon pseudonyms/1\0"
_LONG: Final = 255
_ID_ALONE: Final = 254
_ROUND: Final = 253
"""First byte of a block: what it is. A length up to 15: that many bytes follow."""

Ids = NDArray[np.int32]


class Pseudonyms:
    """The gateway's pseudonym key. Immutable, shared between threads."""

    __slots__ = ("_key", "key_id")

    def __init__(self, key: bytes, key_id: str) -> None:
        """`key`: at least 16 random bytes, else ValueError."""
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"pseudonym key of {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
        self._key = key
        self.key_id: Final = key_id

    def of(self, pair_id: str) -> PairPseudonyms:
        """The pseudonyms of one pair, for all of its arms."""
        return PairPseudonyms(hmac.digest(self._key, _DOMAIN + pair_id.encode(), hashlib.sha256))


class PairPseudonyms:
    """One pair's permutation, both ways. Not shared between threads."""

    __slots__ = ("_encrypt", "_key")

    def __init__(self, pair_key: bytes) -> None:
        """`pair_key`: the 32 bytes derived for the pair."""
        self._key = pair_key
        self._encrypt = _aes(pair_key).encryptor()

    def ids(self, ids: NDArray[np.integer]) -> Ids:
        """Pseudonyms of token ids, any shape; each must lie in 0..2³¹−1, else ValueError."""
        return self._permuted(ids, range(ROUNDS))

    def reveal(self, pseudonyms: NDArray[np.integer]) -> Ids:
        """The ids behind `ids`' pseudonyms."""
        return self._permuted(pseudonyms, range(ROUNDS - 1, -1, -1))

    def of_bytes(self, tokens: Sequence[bytes | int]) -> list[str]:
        """Pseudonyms of tokens known by their bytes: 32 hex digits each.

        An int stands for a token of which only its id is known (0..2³²−1):
        its pseudonym is unlike that of any bytes.
        """
        said = self._encrypt.update(b"".join(map(_block, tokens))).hex()
        return [said[at : at + 2 * BLOCK_BYTES] for at in range(0, len(said), 2 * BLOCK_BYTES)]

    def reveal_bytes(self, pseudonym: str) -> bytes | int | None:
        """The bytes behind a pseudonym, or the id where it had no more; None for tokens over 15 bytes.

        Those can only be recognised, by `of_bytes` of a candidate. Raises ValueError for what is no pseudonym
        of this pair.
        """
        sealed = bytes.fromhex(pseudonym)
        if len(sealed) != BLOCK_BYTES:
            raise ValueError(f"a pseudonym of {len(sealed)} bytes, not {BLOCK_BYTES}")
        block = _aes(self._key).decryptor().update(sealed)
        if block[0] == _LONG:
            return None
        if block[0] == _ID_ALONE and not any(block[5:]):
            return int.from_bytes(block[1:5], "little")
        length = block[0]
        if length > SHORT_BYTES or any(block[1 + length :]):
            raise ValueError("not a pseudonym of this pair under this key")
        return block[1 : 1 + length]

    def _permuted(self, ids: NDArray[np.integer], rounds: range) -> Ids:
        flat = np.asarray(ids).reshape(-1)
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= IDS):
            raise ValueError("a token id outside 0..2^31-1")
        values = flat.astype(np.uint32)
        low, high = values & _LOW, values >> np.uint32(_LOW_BITS)
        blocks = np.zeros((len(values), 4), dtype="<u4")
        for number in rounds:
            blocks[:, 0] = _ROUND | number << 8
            if number % 2 == 0:
                high ^= self._drawn(blocks, low) & _HIGH
            else:
                low ^= self._drawn(blocks, high) & _LOW
        permuted = (high << np.uint32(_LOW_BITS)) | low
        return permuted.astype(np.int32).reshape(np.shape(ids))

    def _drawn(self, blocks: NDArray[np.uint32], of: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Pseudorandom words of these halves in this round."""
        blocks[:, 1] = of
        return np.frombuffer(self._encrypt.update(blocks.tobytes()), dtype="<u4")[::4]


def _aes(key: bytes) -> Cipher[modes.ECB]:
    # ECB is AES itself: each block is one input of a pseudorandom function, no message in modes.
    return Cipher(algorithms.AES(key), modes.ECB())  # noqa: S305


def _block(token: bytes | int) -> bytes:
    if isinstance(token, int):
        return bytes([_ID_ALONE]) + token.to_bytes(4, "little") + bytes(BLOCK_BYTES - 5)
    length = len(token)
    if length <= SHORT_BYTES:
        return bytes([length]) + token.ljust(SHORT_BYTES, b"\0")
    return bytes([_LONG]) + hashlib.sha256(token).digest()[:SHORT_BYTES]
