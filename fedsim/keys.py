"""Stateless randomness: every draw is a function of (secret key, purpose, index).

A running generator would have to be saved and restored, and a step that is run again after a crash
would draw other units and release a second noise sample. Here a repeated step repeats its draw and
its noise. Streams of different purposes are independent: each is keyed with a keyed BLAKE2b digest.
The key is secret: whoever has it can subtract the noise. It is in no log, ledger or report.
"""

import hashlib
import json
import secrets
from pathlib import Path

import jax
import numpy as np

from fedsim.files import write_json

FILE = "secret.json"


class SecretKey:
    """256 secret bits, and the streams derived from them."""

    def __init__(self, secret: bytes):
        self._secret = secret

    @classmethod
    def create(cls, seed: int | None = None) -> "SecretKey":
        """From the operating system, or from `seed` for a run that can be reproduced."""
        if seed is None:
            return cls(secrets.token_bytes(32))
        return cls(hashlib.sha256(f"fedsim seed {seed}".encode()).digest())

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

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

    def save(self, directory: Path) -> None:
        """Write `secret.json`, readable by its owner alone, or leave nothing."""
        write_json(directory / FILE, {"secret": self._secret.hex()}, mode=0o600)

    @classmethod
    def load(cls, directory: Path) -> "SecretKey":
        """The key that `save` wrote."""
        return cls(bytes.fromhex(json.loads((directory / FILE).read_text())["secret"]))
