/** spectra.json: windows of |a|, their spectra, and those in the task's ball; and readings cut into windows. */

import { intoBall } from "../../../src/crowdml/web/device/features.js";
import { Cutter } from "../../../src/crowdml/web/device/sensing.js";
import { spectrum } from "../../../src/crowdml/web/device/spectrum.js";
import { check, equal, holds } from "./expect.js";

/** @typedef {{ name: string, magnitudes: number[], spectrum: number[], l1: number[], l2: number[] }} Case */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return [
    ...vectors.map((row) => check(row.name, () => spectrumOf(row))),
    check("readings at any rate become windows of 3.2 s at 20 Hz", resampled),
    check("a gap ends the window that is under way", gap),
    check("what is no reading changes nothing", noReading),
  ];
}

/** @param {Case} row */
function spectrumOf(row) {
  const found = spectrum(Float64Array.from(row.magnitudes));
  near(found, row.spectrum, "the spectrum");
  for (const norm of /** @type {const} */ (["l1", "l2"])) {
    near(intoBall(Float64Array.from(row.spectrum), norm, 1), row[norm], `in the ${norm} ball`);
  }
}

/** Two Fourier transforms differ in their last digits. @param {Float32Array} found @param {number[]} wanted
 * @param {string} what */
function near(found, wanted, what) {
  equal(found.length, wanted.length, `how many numbers ${what} has`);
  const largest = Math.max(1e-3, ...wanted.map(Math.abs));
  found.forEach((value, at) => {
    holds(Math.abs(value - wanted[at]) <= 2 ** -22 * largest, `${what}: ${value} is not ${wanted[at]} at ${at}`);
  });
}

function resampled() {
  for (const hertz of [25, 50, 60, 100]) {
    const cutter = new Cutter();
    const windows = [];
    for (let at = 0; at <= 6450; at += 1000 / hertz) windows.push(...cutter.add({ at, x: 0, y: 3, z: at / 1000 }));
    equal(windows.length, 2, `windows at ${hertz} Hz`);
    windows.forEach((window, which) =>
      window.forEach((value, place) => {
        const wanted = Math.hypot(3, (3200 * which + 50 * place) / 1000);
        holds(Math.abs(value - wanted) < 1e-9, `reading ${place} of window ${which} at ${hertz} Hz is ${value}`);
      })
    );
  }
}

function gap() {
  const cutter = new Cutter();
  for (let at = 0; at < 3000; at += 20) cutter.add({ at, x: 0, y: 0, z: 1 });
  holds(cutter.share > 0.9, "most of a window is there");
  equal(cutter.add({ at: 4000, x: 0, y: 0, z: 1 }).length, 0, "windows across a gap");
  equal(cutter.window.length, 1, "readings of the new window");
}

function noReading() {
  const cutter = new Cutter();
  cutter.add({ at: 0, x: 0, y: 0, z: 1 });
  for (const at of [0, -20]) equal(cutter.add({ at, x: 0, y: 0, z: 9 }).length, 0, "windows");
  cutter.add({ at: 20, x: NaN, y: 0, z: 9 });
  equal(cutter.window, [1], "the window");
}
