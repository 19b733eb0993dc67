# pyright: basic, reportMissingImports=false
"""Flower's SecAgg+ functions on one vector: python run_flower_secagg.py LENGTH COHORT. Prints JSON. Needs flwr."""

import json
import os
import sys
import time
from importlib.metadata import version

import numpy as np
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

LENGTH, COHORT = int(sys.argv[1]), int(sys.argv[2])
RANGE = 1 << 32
REBUILT = 5

keys = [os.urandom(32) for _ in range(COHORT - 1)]


def masking(neighbours):
    """What its client does after key agreement: its own mask, one for each neighbour, modulo the range."""
    vector = [np.zeros(LENGTH, np.int64)]
    began = time.process_time()
    vector = parameters_addition(vector, pseudo_rand_gen(os.urandom(32), RANGE, [(LENGTH,)]))
    for index, key in enumerate(keys[:neighbours]):
        mask = pseudo_rand_gen(key, RANGE, [(LENGTH,)])
        vector = parameters_addition(vector, mask) if index % 2 else parameters_subtraction(vector, mask)
    parameters_mod(vector, RANGE)
    return 1e3 * (time.process_time() - began)


def server():
    """What its server does when nobody is missing: rebuild every seed from its shares, and take off its mask."""
    threshold = COHORT // 2 + 1
    shares = [create_shares(os.urandom(32), threshold, COHORT) for _ in range(REBUILT)]
    total = [np.zeros(LENGTH, np.int64)]
    began = time.process_time()
    for some in shares:
        total = parameters_subtraction(total, pseudo_rand_gen(combine_shares(some), RANGE, [(LENGTH,)]))
        total = parameters_mod(total, RANGE)
    return (time.process_time() - began) / REBUILT * COHORT


print(
    json.dumps(
        {
            "version": version("flwr"),
            "device_ms": masking(COHORT - 1),
            "device_21_ms": masking(21),
            "server_s": server(),
            "rebuilt": REBUILT,
        }
    )
)
