"""What a driver sends to its workers, as it goes over the wire."""

import contextlib

from fedsim.noise.independent import blocks


@contextlib.contextmanager
def recorded(monkeypatch):
    """Bytes of everything that Ray is given to send while the block runs."""
    from ray import cloudpickle
    from ray._private.serialization import SerializationContext

    sent, serialize = [], SerializationContext.serialize

    def serialized(self, value):
        sent.append(cloudpickle.dumps(value))
        return serialize(self, value)

    with monkeypatch.context() as patched:
        patched.setattr(SerializationContext, "serialize", serialized)
        yield sent


def keys_of_noise(key, sizes, step):
    """The keys of all streams of a step's noise."""
    return [key._derive("noise", (step, leaf, number)) for leaf, number, _ in blocks(sizes)]


def other_secrets(key, step):
    """What no worker is ever to have: the key, its seals' key, and that of the draw."""
    return [key._secret, key._sealing, key._derive("units", (step,)), key._derive("pool", ())]


def found(secrets, sent):
    """Those of some secrets that are in what was sent."""
    return [secret for secret in secrets if any(secret in message for message in sent)]
