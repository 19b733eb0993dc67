/**
 * The canonical JSON of a task: sorted keys, no blanks, numbers as exact decimals. Any other form is refused.
 * A number with a point is a fraction, one without is a whole number: `0.9` is nine tenths, never the float beside it.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {null | boolean | string | number | Fraction | JsonList | JsonMap} Json
 * @typedef {ReadonlyArray<Json>} JsonList
 * @typedef {{ readonly [key: string]: Json }} JsonMap
 */

import { fromUtf8 } from "./bytes.js";
import { parse } from "./fractions.js";
import { malformed } from "./problems.js";

const DEEPEST = 16;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?/y;
const TEXT = /"(?:[^"\\]|\\.)*"/y;
const WORD = /true|false|null/y;

/** @param {Uint8Array} bytes @returns {Json} */
export function readJson(bytes) {
  const reader = new Reader(fromUtf8(bytes));
  const value = reader.value(0);
  return reader.at === reader.text.length ? value : malformed("Something follows after the end of the JSON.");
}

class Reader {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  /** @param {number} depth @returns {Json} */
  value(depth) {
    if (depth > DEEPEST) malformed(`The JSON lies more than ${DEEPEST} deep.`);
    const first = this.text[this.at];
    if (first === "{") return this.map(depth);
    if (first === "[") return this.list(depth);
    if (first === '"') return this.string();
    const word = this.match(WORD);
    return word === null ? this.number() : JSON.parse(word);
  }

  /** @param {number} depth @returns {JsonMap} */
  map(depth) {
    /** @type {{ [key: string]: Json }} */
    const found = Object.create(null);
    /** @type {string | null} */
    let last = null;
    for (let end = this.opens("{", "}"); !end; end = this.ends("}")) {
      const key = this.string();
      if (last !== null && key <= last) malformed("The keys of the JSON are not sorted, each once.");
      this.take(":");
      found[key] = this.value(depth + 1);
      last = key;
    }
    return found;
  }

  /** @param {number} depth @returns {Json[]} */
  list(depth) {
    /** @type {Json[]} */
    const found = [];
    for (let end = this.opens("[", "]"); !end; end = this.ends("]")) found.push(this.value(depth + 1));
    return found;
  }

  /** @returns {string} */
  string() {
    const token = this.match(TEXT) ?? malformed(`A text is missing at ${this.at} of the JSON.`);
    try {
      return JSON.parse(token);
    } catch {
      return malformed(`The text at ${this.at} of the JSON is broken.`);
    }
  }

  /** @returns {number | Fraction} */
  number() {
    const token = this.match(NUMBER) ?? malformed(`A value is missing at ${this.at} of the JSON.`);
    const value = parse(token);
    if (/[.e]/.test(token)) return value;
    const number = Number(value.top);
    return Number.isSafeInteger(number) ? number : malformed(`${token} is too large for a setting.`);
  }

  /** Takes what opens a map or a list; whether it ends at once. @param {string} open @param {string} close */
  opens(open, close) {
    this.take(open);
    if (this.text[this.at] !== close) return false;
    this.take(close);
    return true;
  }

  /** Whether a map or a list ends here; else the comma before its next member is taken. @param {string} close */
  ends(close) {
    const end = this.text[this.at] === close;
    this.take(end ? close : ",");
    return end;
  }

  /** @param {string} token */
  take(token) {
    if (this.text[this.at] !== token) malformed(`The JSON has no ${token} at ${this.at}.`);
    this.at += 1;
  }

  /** @param {RegExp} pattern sticky @returns {string | null} */
  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found ? found[0] : null;
  }
}

/** @param {Json} value @returns {value is Fraction} */
export function isFraction(value) {
  return value !== null && typeof value === "object" && "top" in value && typeof value.top === "bigint";
}

/** @param {Json} value @returns {value is JsonMap} */
export function isJsonMap(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value) && !isFraction(value);
}
