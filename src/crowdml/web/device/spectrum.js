/**
 * The spectrum of acceleration that activities are learned from: |a| at 20 Hz, 3.2 s windows, 64 bins.
 * Mirrors src/crowdml/features/spectrum.py.
 *
 * @typedef {import("./models.js").Numbers} Numbers
 */

/** Readings of a window, and numbers of its spectrum: 3.2 s at 20 Hz. */
export const BINS = 64;
const COSINES = Float64Array.from({ length: BINS }, (_, k) => Math.cos((2 * Math.PI * k) / BINS));
const SINES = Float64Array.from({ length: BINS }, (_, k) => Math.sin((2 * Math.PI * k) / BINS));

/** Magnitude of the 64-bin Fourier transform of |a|, over 64. Bin 0 is the mean; bins 33 to 63 mirror bins 31 to 1.
 * @param {Numbers} magnitudes 64 values of |a| @returns {Float32Array} */
export function spectrum(magnitudes) {
  if (magnitudes.length !== BINS) {
    throw new RangeError(`A window has ${BINS} readings, and this has ${magnitudes.length}.`);
  }
  const found = new Float32Array(BINS);
  for (let bin = 0; bin <= BINS / 2; bin++) {
    let [real, imaginary] = [0, 0];
    for (let at = 0; at < BINS; at++) {
      const place = (bin * at) % BINS;
      real += magnitudes[at] * COSINES[place];
      imaginary -= magnitudes[at] * SINES[place];
    }
    found[bin] = Math.hypot(real, imaginary) / BINS;
    if (bin > 0) found[BINS - bin] = found[bin];
  }
  return found;
}
