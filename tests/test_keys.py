import numpy as np

from fedsim.clipping import Clip
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean


def test_streams_differ_by_purpose_index_and_key(key):
    def first(key, *stream):
        return key.generator(*stream).random()

    streams = [("units", 0), ("units", 1), ("group", 0), ("group", 0, 0), ("units", 10)]
    streams += [("units1", 0)]
    values = {first(key, *stream) for stream in streams} | {first(SecretKey.create(8), "units", 0)}
    assert len(values) == len(streams) + 1
    assert first(SecretKey.create(7), "units", 0) == first(key, "units", 0)  # as from any seed
    assert first(SecretKey.create(2**70), "units", 0) == first(SecretKey.create(2**70), "units", 0)
    assert first(SecretKey.create(), "units", 0) != first(SecretKey.create(), "units", 0)


def test_noise_and_sampling_are_independent_streams(key):
    zero, own = np.zeros(20_000, np.int32), {"clip": Clip(1.0), "noise_multiplier": 1.0}
    noise = noisy_mean(zero, **own, count=1, key=key, step=0).values()
    draws = key.generator("units", 0).standard_normal(20_000)
    assert abs(np.corrcoef(noise, draws)[0, 1]) < 5 / np.sqrt(20_000)


def test_the_key_is_in_no_representation(key):
    secret = key._secret.hex()
    assert secret not in repr(key) + str(key) + f"{key}"


def test_a_seal_does_not_follow_from_the_seed():
    """A ledger is published with its seals: two runs of one seed must not have the same."""
    first, second = SecretKey.create(5), SecretKey.create(5)
    assert first.generator("units", 0).random() == second.generator("units", 0).random()
    assert first.seal("ledger") != second.seal("ledger")


def test_a_seal_is_of_the_key_and_the_text(key, tmp_path):
    key.save(tmp_path)
    seal = key.seal("ledger")
    assert SecretKey.load(tmp_path).seal("ledger") == seal != key.seal("data")
    assert SecretKey(bytes(32), sealing=key._sealing).seal("ledger") != seal
