"""The calibrated policy of the mini hybrid finds far facts, where a uniform window of the same size does not.
bench/needle.py is the long form."""

from statistics import mean

import needle

from hwkv_llamacpp import ModelGeometry, Policy

LENGTHS = {2048: (32, 700, 2000)}


def test_calibrated_policy_finds_what_a_uniform_window_loses():
    geometry = ModelGeometry.from_gguf(needle.MODEL)
    policy = Policy.load(needle.POLICY)
    policy.check(geometry, needle.POLICY)
    uniform = needle.same_size(geometry, policy, 2048)
    assert (
        policy.retention(2048, geometry) - 0.01
        <= uniform.retention(2048, geometry)
        <= policy.retention(2048, geometry)
        < 0.75
    )
    full, calibrated, same_size = (needle.recall(arm, LENGTHS, n_prompts=10)[2048] for arm in (None, policy, uniform))
    print(full, calibrated, same_size, sep="\n")
    assert mean(full.values()) > 0.9
    assert all(calibrated[distance] >= full[distance] - 0.1 for distance in full)
    assert same_size[2000] == 0
