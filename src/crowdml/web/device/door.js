/**
 * The door: the only way from what a device sensed into a message. It draws once, and notes what has to be charged.
 *
 * A `Private` shows its value to nobody but the door, and a `Release` is made by the door alone: both are classes whose
 * fields no other module can reach. Mirrors src/crowdml/privacy/door.py and private.py.
 *
 * @typedef {import("./mechanisms.js").Contributions} Contributions
 * @typedef {import("./mechanisms.js").Losses} Losses
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {import("./mechanisms.js").Part} Part
 * @typedef {import("./mechanisms.js").Steps} Steps
 * @typedef {import("./models.js").Samples} Samples
 * @typedef {import("./noise.js").Source} Source
 * @typedef {{ readonly row: string, readonly part: Part, readonly losses: Losses }} Passage one release: it is charged
 */

import { drawRow, lossesAt } from "./mechanisms.js";

/** What only this module can do: open a Private, and make a Release or a Masked. */
const OWN = Symbol("door");

/** A value computed from samples. @template T */
export class Private {
  /** @type {T} */
  #value;
  /** @type {Part} */
  #part;

  /** @param {T} value @param {Part} part the rows of the sensed batch that it came from */
  constructor(value, part) {
    this.#value = value;
    this.#part = part;
  }

  get part() {
    return this.#part;
  }

  /** Computes on the value. Entry i of what `f` returns depends on sample i alone, or the row of the table is `whole`.
   * @template U @param {(value: T) => U} f @returns {Private<U>} */
  map(f) {
    return new Private(f(this.#value), this.#part);
  }

  /** For the door alone. @param {symbol} key @returns {T} */
  open(key) {
    if (key !== OWN) throw new Error("A Private value leaves through the door alone.");
    return this.#value;
  }

  /** @returns {never} */
  toJSON() {
    throw new Error("A Private value is never written down: it stays where it was sensed.");
  }
}

/** A batch as it was sensed. @param {Samples} samples @returns {Private<Samples>} */
export function sensed(samples) {
  return new Private(samples, { start: 0, stop: samples.y.length });
}

/** The first rows of a batch and the rest: what each of them loses does not add. @param {Private<Samples>} batch
 * @param {number} first @returns {[Private<Samples>, Private<Samples>]} */
export function split(batch, first) {
  const { start, stop } = batch.part;
  const { x, y } = batch.open(OWN);
  if (y.length !== stop - start || first < 0 || first > y.length) {
    throw new RangeError(`Cannot split ${first} rows off.`);
  }
  return [
    new Private({ x: x.slice(0, first), y: y.slice(0, first) }, { start, stop: start + first }),
    new Private({ x: x.slice(first), y: y.slice(first) }, { start: start + first, stop }),
  ];
}

/** A value that a mechanism let out: whole numbers on a public grid. Anyone may look. */
export class Release {
  /** @type {Int32Array} */
  #value;

  /** @param {symbol} key @param {Int32Array} value */
  constructor(key, value) {
    if (key !== OWN) throw new Error("A Release is made by the door alone.");
    this.#value = value;
  }

  get value() {
    return this.#value.slice(); // a copy: what was let out is not changed afterwards
  }
}

/** A device's summand with its share of the noise: it leaves under masks, and only so. */
export class Masked {
  /** @type {Steps} */
  #summand;

  /** @param {symbol} key @param {Steps} summand */
  constructor(key, summand) {
    if (key !== OWN) throw new Error("A Masked value is made by the door alone.");
    this.#summand = summand;
  }

  /** The summand with masks put on it, which is all that may be sent. @template T @param {(summand: Steps) => T} mask
   * @returns {T} */
  under(mask) {
    return mask(this.#summand.slice());
  }

  /** @returns {never} */
  toJSON() {
    throw new Error("A Masked value is never written down: it leaves under masks alone.");
  }
}

/** One turn's door. Whether budgets allow the turn is asked before it opens: which rows are drawn depends on no
 * value. */
export class Door {
  /** @type {Passage[]} */
  #passages = [];
  /** @type {{ readonly [row: string]: Mechanism }} */
  #table;
  /** @type {Source} */
  #noise;
  /** @type {number} */
  #trip;

  /** @param {{ readonly [row: string]: Mechanism }} table @param {Source} noise
   * @param {number} trip how many check-ins of this task the device made before */
  constructor(table, noise, trip) {
    this.#table = table;
    this.#noise = noise;
    this.#trip = trip;
  }

  /** What went through this door: each of them is charged. @returns {Passage[]} */
  get passages() {
    return [...this.#passages];
  }

  /** Lets a value out with all its noise, for anyone to see. @param {string} row @param {Private<Contributions>} value
   * @returns {Release} */
  release(row, value) {
    return new Release(OWN, Int32Array.from(this.#draw(row, "anyone", value)));
  }

  /** Adds this device's share of a cohort's noise: what comes back leaves under masks alone. @param {string} row
   * @param {Private<Contributions>} value @returns {Masked} */
  masked(row, value) {
    return new Masked(OWN, this.#draw(row, "aggregate", value));
  }

  /** @param {string} name @param {Mechanism["observer"]} observer @param {Private<Contributions>} value */
  #draw(name, observer, value) {
    const row = Object.hasOwn(this.#table, name) ? this.#table[name] : null;
    if (row === null) throw new Error(`Nothing may leave as ${name}: the table has no such row.`);
    if (row.observer !== observer) throw new Error(`Row ${name} is for ${row.observer} to see, not for ${observer}.`);
    if (!(value instanceof Private)) {
      throw new Error(`The door takes a Private value for ${name}, so that it is charged.`);
    }
    this.#check(name, row, value);
    const drawn = drawRow(row, value.open(OWN), this.#trip, this.#noise);
    this.#passages.push({ row: name, part: value.part, losses: lossesAt(row, this.#trip) });
    return drawn;
  }

  /** @param {string} name @param {Mechanism} row @param {Private<Contributions>} value */
  #check(name, { covers, whole }, value) {
    const { start, stop } = value.part;
    if (start < covers.start || stop > covers.stop) {
      throw new Error(`Row ${name} is priced for another part of the batch.`);
    }
    if (this.#passages.some((passage) => passage.row === name)) throw new Error(`Row ${name} was let out already.`);
    const wanted = whole ? 1 : stop - start;
    const given = value.open(OWN).length;
    if (given !== wanted) throw new Error(`Row ${name} takes ${wanted} contributions, and was given ${given}.`);
  }
}
