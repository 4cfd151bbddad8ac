"""Stateless randomness: every draw is a function of (secret key, purpose, index).

A running generator would have to be saved and restored. What is drawn once for a whole run (a
pool, groups, windows) follows from the key. What is drawn in a step follows from the key, the nonce
of the step's segment and the step's index (`in_segment`): no two segments share a random number,
whatever was copied or put back. Each stream is AES-128 in counter mode under a separate key, which
HKDF (RFC 5869) derives from 256 secret bits: distinguishing a stream from random bits means
breaking AES or SHA-256. The key is secret, because its holder can subtract the noise. No log,
ledger or report contains it.
"""

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from randomgen import AESCounter

from fedsim.errors import FileDamaged
from fedsim.files import read_json, write_json

if TYPE_CHECKING:
    import jax

FILE = "secret.json"
KEY_BYTES, NONCE_BYTES = 32, 16


class NoKey(FileDamaged, FileNotFoundError):
    """The key of a run is missing."""


class SecretKey:
    """256 secret bits, the streams derived from them, and the seed they came from, if any.

    Attributes:
      seed: None for a key from the operating system.
      fresh: the key of what is drawn in a step; this key itself where there are no segments.
      first: index of the first step of the segment.
    """

    def __init__(
        self,
        secret: bytes,
        seed: int | None = None,
        sealing: bytes | None = None,
    ):
        """Use `create`, `in_segment` or `load` instead.

        Args:
          secret: 256 bits.
          seed: the seed that the secret was derived from, if any.
          sealing: key of `seal`; None: 256 bits from the operating system. Seals are published, so
            their key must not follow from a seed that can be guessed.
        """
        self._secret = secret
        self._sealing = sealing or secrets.token_bytes(KEY_BYTES)
        self.seed = seed
        self.fresh, self.first = self, 0

    @classmethod
    def create(cls, seed: int | None = None, context: str = "") -> "SecretKey":
        """Create a key from the operating system, or from a seed for a reproducible run.

        Args:
          seed: None: the operating system's randomness.
          context: settings of the run, so that runs with other settings get other keys from the
            same seed: the noise of two runs with one key cancels when both are released.
        """
        if seed is None:
            return cls(secrets.token_bytes(KEY_BYTES))
        return cls(hashlib.sha256(f"fedsim seed {seed} {context}".encode()).digest(), seed)

    def in_segment(self, nonce: str, first: int = 0) -> "SecretKey":
        """This key for the steps of one segment of a run.

        Args:
          nonce: of the segment; `fresh` is a function of this key and of the nonce.
          first: index of the segment's first step.
        """
        info = b"segment/" + nonce.encode()
        secret = HKDFExpand(SHA256(), length=KEY_BYTES, info=info).derive(self._secret)
        key = SecretKey(self._secret, self.seed, self._sealing)
        key.fresh, key.first = SecretKey(secret, self.seed, self._sealing), first
        return key

    def nonce(self, context: str) -> str:
        """Return a new nonce of 128 bits (hex) from the operating system.

        Args:
          context: with a seed, the nonce is a function of the seed and of this, so that a run that
            nothing disturbs can be reproduced.
        """
        if self.seed is None:
            return secrets.token_hex(NONCE_BYTES)
        return self._derive(f"nonce {context}", ()).hex()

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

    def __reduce__(self):
        raise TypeError("a key stays in its process")

    def _derive(self, purpose: str, index: tuple[int, ...]) -> bytes:
        """Derive 128 bits for a purpose and index. The secret is uniform, so HKDF only expands."""
        info = purpose.encode() + b"".join(b"/%d" % i for i in index)
        return HKDFExpand(SHA256(), length=16, info=info).derive(self._secret)

    def generator(self, purpose: str, *index: int) -> np.random.Generator:
        """Return a NumPy generator (AES-128 in counter mode) for one purpose and index."""
        return self.streams(purpose, *index).at(0)

    def streams(self, purpose: str, *index: int) -> "Streams":
        """Return 2^64 generators for one purpose and index, such as one for each user."""
        return Streams(self._derive(purpose, index))

    def jax_key(self, purpose: str, *index: int) -> "jax.Array":
        """Return a JAX key (Threefry, 64 bits) for one purpose and index."""
        import jax  # takes a second, and `fedsim account` does without it

        words = np.frombuffer(self._derive(purpose, index)[:8], np.uint32)
        return jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")

    def seal(self, text: str) -> str:
        """Return a keyed digest of `text` (hex), by which only the key's owner can recognise it.

        A plain digest of the data would tell neighbouring data sets apart.
        """
        message = self._derive("seal", ()) + text.encode()
        return hmac.digest(self._sealing, message, "sha256").hex()

    def save(self, directory: Path) -> None:
        """Write `secret.json` with mode 0600, whole or not at all."""
        record = {"secret": self._secret.hex(), "seed": self.seed, "sealing": self._sealing.hex()}
        write_json(directory / FILE, record, mode=0o600)

    @classmethod
    def load(cls, directory: Path) -> "SecretKey":
        """Read the key that `save` wrote.

        Raises:
          NoKey: the directory has no key.
          FileDamaged: the file is not a key.
        """
        if not (directory / FILE).exists():
            why = "without it no step can be drawn again, nor the data be recognised"
            raise NoKey(f"{directory / FILE}: expected the key of the run, found none: {why}")
        record = read_json(directory / FILE)
        try:
            secret, sealing = (bytes.fromhex(record[name]) for name in ("secret", "sealing"))
            as_written = (secret.hex(), sealing.hex()) == (record["secret"], record["sealing"])
            if as_written and len(secret) == len(sealing) == KEY_BYTES:
                return cls(secret, record["seed"], sealing)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # the error must not show any of the secret
        raise FileDamaged(f"{directory / FILE}: expected the key of a run")


class Streams:
    """Independent generators from one key: parts of the counter's range, 2^64 blocks each.

    All indices share one generator object: a call of `at` invalidates the result of the last one.
    """

    def __init__(self, key: bytes):
        """Args:
        key: 128 bits.
        """
        self._bits: Any = AESCounter(key=int.from_bytes(key, "little"), counter=0)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, index: int) -> np.random.Generator:
        """Return the generator of an index, at its beginning."""
        self._start["s"]["counter"][1::2] = index  # the upper halves of four counters
        self._bits.state = self._start
        return self._generator
