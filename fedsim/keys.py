"""Stateless randomness: every draw is a function of (secret key, purpose, index).

A running generator would have to be saved and restored, and a step that is run again after a crash
would draw other units and release a second noise sample. Here a repeated step repeats its draw and
its noise. Streams are AES-128 in counter mode, each with a key of its own, which HKDF (RFC 5869)
derives from 256 secret bits: to tell them from random bits is to break AES or SHA-256. The key is
secret: whoever has it can subtract the noise. It is in no log, ledger or report.
"""

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from randomgen import AESCounter

from fedsim.errors import FileDamaged
from fedsim.files import read_json, write_json

FILE = "secret.json"
KEY_BYTES = 32


class NoKey(FileDamaged, FileNotFoundError):
    """A run without its key."""


class SecretKey:
    """256 secret bits, the streams derived from them, and the seed they came from, if any."""

    def __init__(self, secret: bytes, seed: int | None = None, sealing: bytes | None = None):
        """Args: sealing: what `seal` is keyed with; None: 256 bits of the operating system's. A
        seal is published, so it must not follow from a seed that can be guessed."""
        self._secret = secret
        self._sealing = sealing or secrets.token_bytes(KEY_BYTES)
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

    def bound(self, context: str) -> "SecretKey":
        """A key that follows from this one and from `context`, with the same seals."""
        info = b"bound/" + context.encode()
        secret = HKDFExpand(SHA256(), length=KEY_BYTES, info=info).derive(self._secret)
        return SecretKey(secret, self.seed, self._sealing)

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

    def __reduce__(self):
        raise TypeError("a key stays in its process")

    def _derive(self, purpose: str, index: tuple[int, ...]) -> bytes:
        """128 bits for one purpose and index. The secret is uniform: HKDF needs no extraction."""
        info = purpose.encode() + b"".join(b"/%d" % i for i in index)
        return HKDFExpand(SHA256(), length=16, info=info).derive(self._secret)

    def generator(self, purpose: str, *index: int) -> np.random.Generator:
        """A NumPy generator (AES-128 in counter mode) for one purpose and index."""
        return self.streams(purpose, *index).at(0)

    def streams(self, purpose: str, *index: int) -> "Streams":
        """2^64 generators for one purpose and index, for draws of many users."""
        return Streams(self._derive(purpose, index))

    def jax_key(self, purpose: str, *index: int) -> jax.Array:
        """A JAX key (Threefry, 64 bits) for one purpose and index."""
        words = np.frombuffer(self._derive(purpose, index)[:8], np.uint32)
        return jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")

    def seal(self, text: str) -> str:
        """A keyed digest of `text` (hex): says whether a text is the same one, to the key's owner
        alone. A plain digest of the data would tell neighbouring data sets apart."""
        message = self._derive("seal", ()) + text.encode()
        return hmac.digest(self._sealing, message, "sha256").hex()

    def save(self, directory: Path) -> None:
        """Write `secret.json`, readable by its owner alone, or leave nothing."""
        record = {"secret": self._secret.hex(), "seed": self.seed, "sealing": self._sealing.hex()}
        write_json(directory / FILE, record, mode=0o600)

    @classmethod
    def load(cls, directory: Path) -> "SecretKey":
        """The key that `save` wrote. Raises: FileDamaged; NoKey: there is none."""
        if not (directory / FILE).exists():
            why = "without it no step can be drawn again, nor the data be recognised"
            raise NoKey(f"{directory / FILE}: expected the key of the run, found none: {why}")
        record = read_json(directory / FILE)
        try:
            secret, sealing = (bytes.fromhex(record[name]) for name in ("secret", "sealing"))
            as_written = (secret.hex(), sealing.hex()) == (record["secret"], record["sealing"])
            if as_written and len(secret) == len(sealing) == KEY_BYTES:
                return cls(secret, record["seed"], sealing)
        except (KeyError, TypeError, ValueError):
            pass  # nothing of it may be shown
        raise FileDamaged(f"{directory / FILE}: expected the key of a run")


class Streams:
    """Independent generators from one key: parts of the counter's range, 2^64 blocks each.

    One object for all, so the generator of one index is used up before that of the next is asked
    for.
    """

    def __init__(self, key: bytes):
        """Args: key: 128 bits."""
        self._bits: Any = AESCounter(key=int.from_bytes(key, "little"), counter=0)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, index: int) -> np.random.Generator:
        """The generator of an index, at its beginning."""
        self._start["s"]["counter"][1::2] = index  # the upper halves of four counters
        self._bits.state = self._start
        return self._generator
