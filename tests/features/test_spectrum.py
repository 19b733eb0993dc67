"""Windows and spectra of acceleration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.errors import DataError
from crowdml.features import spectrum, windows

TIME = np.arange(64) / 20  # seconds


def test_a_sine_of_k_periods_shows_in_bin_k_and_its_mirror():
    magnitude = 9.81 + 2 * np.cos(2 * np.pi * 5 * TIME / 3.2)
    bins = spectrum(magnitude[None])[0]
    assert bins.shape == (64,)
    np.testing.assert_allclose(bins[[0, 5, 59]], [9.81, 1, 1], rtol=1e-5)
    assert np.delete(bins, [0, 5, 59]).max() < 1e-5


def test_the_spectrum_does_not_change_when_the_watch_is_turned_round():
    acc = np.random.default_rng(6).standard_normal((10, 64, 3))
    turn, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((3, 3)))
    np.testing.assert_allclose(spectrum(acc @ turn), spectrum(acc), rtol=1e-4, atol=1e-6)


def test_three_axes_and_their_magnitude_give_the_same_spectrum():
    acc = np.random.default_rng(8).standard_normal((4, 64, 3))
    np.testing.assert_allclose(spectrum(acc), spectrum(np.linalg.norm(acc, axis=2)), rtol=1e-5)


@pytest.mark.parametrize("shape", [(64,), (2, 63), (2, 64, 2), (2, 32, 3)])
def test_windows_of_another_shape_are_refused(shape):
    with pytest.raises(DataError, match=r"\[n, 64, 3\]"):
        spectrum(np.zeros(shape))


@given(st.integers(0, 200), st.integers(1, 40))
def test_windows_that_do_not_overlap_use_each_measurement_once_at_most(n, length):
    cut = windows(np.arange(n), length, length)
    assert cut.shape == (n // length, length)
    assert cut.ravel().tolist() == list(range(n // length * length))


def test_overlapping_windows_keep_the_axes_of_the_signal():
    signal = np.arange(30).reshape(10, 3)
    cut = windows(signal, 4, 2)
    assert cut.shape == (4, 4, 3)
    assert (cut[1] == signal[2:6]).all()


def test_windows_of_no_length_are_refused():
    with pytest.raises(DataError, match="at least 1"):
        windows(np.arange(5), 0, 1)
