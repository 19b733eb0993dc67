/**
 * Motion: readings of the accelerometer resampled by their timestamps to 20 Hz and cut into windows that do not overlap.
 * No browser is in here; phone/motion.js listens to it.
 *
 * @typedef {{ readonly at: number, readonly x: number, readonly y: number, readonly z: number }} Reading milliseconds, m/s2
 */

import { BINS } from "./spectrum.js";

/** Milliseconds between two readings at 20 Hz. */
export const STEP = 50;
/** Milliseconds: over a longer gap nothing is interpolated, and the window begins anew. */
export const LONGEST_GAP = 500;

/** Cuts windows of 64 magnitudes of acceleration out of readings as they come. */
export class Cutter {
  constructor() {
    /** @type {Reading | null} */
    this.last = null;
    /** When the next value is due. */
    this.due = 0;
    /** @type {number[]} the magnitudes of the window that is under way */
    this.window = [];
    /** @type {number[]} the last 64 magnitudes, for the eye alone */
    this.recent = [];
  }

  /** The windows that this reading completes: one at the most, for readings less than a gap apart.
   * @param {Reading} reading @returns {Float64Array[]} */
  add(reading) {
    const { last } = this;
    if (![reading.at, reading.x, reading.y, reading.z].every(Number.isFinite)) return [];
    if (last !== null && reading.at <= last.at) return [];
    this.last = reading;
    if (last === null || reading.at - last.at > LONGEST_GAP) {
      this.window = [];
      this.due = reading.at;
    }
    return this.take(last ?? reading, reading);
  }

  /** @param {Reading} from @param {Reading} to @returns {Float64Array[]} */
  take(from, to) {
    /** @type {Float64Array[]} */
    const windows = [];
    for (; this.due <= to.at; this.due += STEP) {
      const value = magnitudeAt(from, to, this.due);
      this.window.push(value);
      this.recent = [...this.recent, value].slice(-BINS);
      if (this.window.length === BINS) {
        windows.push(Float64Array.from(this.window));
        this.window = [];
      }
    }
    return windows;
  }

  /** How much of a window is there, from 0 to 1. */
  get share() {
    return this.window.length / BINS;
  }

  /** Begin anew: what was sensed so far belongs to no window. */
  restart() {
    this.last = null;
    this.window = [];
  }
}

/** |a| between two readings: each axis on the line between them. @param {Reading} from @param {Reading} to
 * @param {number} at */
function magnitudeAt(from, to, at) {
  const share = to.at > from.at ? Math.max(0, (at - from.at) / (to.at - from.at)) : 1;
  /** @param {number} one @param {number} other */
  const between = (one, other) => one + share * (other - one);
  return Math.hypot(between(from.x, to.x), between(from.y, to.y), between(from.z, to.z));
}
