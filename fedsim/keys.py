"""Stateless randomness: every draw is a function of (secret key, purpose, index).

A running generator would have to be saved and restored, and a step that is run again after a crash
would draw other units and release a second noise sample. Here a repeated step repeats its draw and
its noise. Streams of different purposes are independent: each is keyed with a keyed BLAKE2b digest.
The key is secret: whoever has it can subtract the noise. It is in no log, ledger or report.
"""

import hashlib
import secrets
from pathlib import Path

import jax
import numpy as np

from fedsim.errors import FileDamaged
from fedsim.files import read_json, write_json

FILE = "secret.json"
KEY_BYTES = 32


class SecretKey:
    """256 secret bits, the streams derived from them, and the seed they came from, if any."""

    def __init__(self, secret: bytes, seed: int | None = None):
        self._secret = secret
        self.seed = seed

    @classmethod
    def create(cls, seed: int | None = None, context: str = "") -> "SecretKey":
        """A key from the operating system, or from a seed, for a run that can be reproduced.

        Args:
          context: what else the key depends on. Two runs that share noise cancel it when both are
            released, so runs with other settings get other keys from the same seed.
        """
        if seed is None:
            return cls(secrets.token_bytes(KEY_BYTES))
        return cls(hashlib.sha256(f"fedsim seed {seed} {context}".encode()).digest(), seed)

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

    def __reduce__(self):
        raise TypeError("a key stays in its process")

    def _digest(self, purpose: str, index: tuple[int, ...]) -> bytes:
        message = purpose.encode() + b"".join(b"/%d" % i for i in index)
        return hashlib.blake2b(message, key=self._secret, digest_size=16).digest()

    def generator(self, purpose: str, *index: int) -> np.random.Generator:
        """A NumPy generator (Philox, 128-bit key) for one purpose and index."""
        key = int.from_bytes(self._digest(purpose, index), "little")
        return np.random.Generator(np.random.Philox(key=key))

    def jax_key(self, purpose: str, *index: int) -> jax.Array:
        """A JAX key (Threefry, 64 bits) for one purpose and index."""
        words = np.frombuffer(self._digest(purpose, index)[:8], np.uint32)
        return jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")

    def seal(self, text: str) -> str:
        """A keyed digest of `text` (hex): says whether a text is the same one, to the key's owner
        alone. A plain digest of the data would tell neighbouring data sets apart."""
        return self._digest("seal " + text, ()).hex()

    def save(self, directory: Path) -> None:
        """Write `secret.json`, readable by its owner alone, or leave nothing."""
        write_json(directory / FILE, {"secret": self._secret.hex(), "seed": self.seed}, mode=0o600)

    @classmethod
    def load(cls, directory: Path) -> "SecretKey":
        """The key that `save` wrote. Raises: FileDamaged; FileNotFoundError."""
        record = read_json(directory / FILE)
        try:
            secret = bytes.fromhex(record["secret"])
            if len(secret) == KEY_BYTES:
                return cls(secret, record["seed"])
        except (KeyError, TypeError, ValueError):
            pass  # nothing of it may be shown
        raise FileDamaged(f"{directory / FILE}: expected the key of a run")
