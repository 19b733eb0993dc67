/**
 * Tables of a task: each key is read by its own reader, and a key without one is refused by name.
 * Mirrors src/crowdml/settings.py.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./json.js").Json} Json
 */

import { compare, toNumber, whole } from "./fractions.js";
import { isFraction, isJsonMap } from "./json.js";
import { Problem } from "./problems.js";

/**
 * @template T
 * @typedef {(value: Json | undefined, where: string) => T} Read reads a value; undefined where the key is missing
 */

/** Refuse a task by one sentence. @param {string} why @returns {never} */
export function refuseTask(why) {
  throw new Problem("invalid-task", `A browser cannot take part in this task: ${why}.`);
}

/** A table with these keys and no others.
 * @template {{ [key: string]: Read<unknown> }} R
 * @param {R} readers @returns {Read<{ [K in keyof R]: ReturnType<R[K]> }>} */
export function table(readers) {
  return (value, where) => {
    if (value === undefined || !isJsonMap(value)) return refuseTask(`${where || "the task"} is not a table`);
    const prefix = where ? `${where}.` : "";
    const unknown = Object.keys(value).find((key) => !(key in readers));
    if (unknown !== undefined) refuseTask(`it does not know ${prefix}${unknown}`);
    const found = Object.entries(readers).map(([key, read]) => [key, read(value[key], `${prefix}${key}`)]);
    return Object.fromEntries(found);
  };
}

/** What a reader finds, or this where the key is missing.
 * @template T @template const D @param {Read<T>} read @param {D} fallback @returns {Read<T | D>} */
export function optional(read, fallback) {
  return (value, where) => (value === undefined ? fallback : read(value, where));
}

/** What a reader finds, or null where the task says so or nothing. @template T @param {Read<T>} read
 * @returns {Read<T | null>} */
export function nullable(read) {
  return (value, where) => (value === undefined || value === null ? null : read(value, where));
}

/** @type {Read<string>} */
export function text(value, where) {
  return typeof value === "string" ? value : refuseTask(`${where} is not a text`);
}

/** @type {Read<boolean>} */
export function flag(value, where) {
  return typeof value === "boolean" ? value : refuseTask(`${where} is not true or false`);
}

/** @type {Read<Fraction>} */
export function number(value, where) {
  if (typeof value === "number") return whole(value);
  return value !== undefined && isFraction(value) ? value : refuseTask(`${where} is not a number`);
}

/** @param {Fraction} low @param {Fraction} high @returns {Read<Fraction>} */
export function numberBetween(low, high) {
  return (value, where) => {
    const found = number(value, where);
    const fits = compare(found, low) >= 0 && compare(found, high) <= 0;
    return fits
      ? found
      : refuseTask(`${where} is ${toNumber(found)}, and lies from ${toNumber(low)} to ${toNumber(high)}`);
  };
}

/** @type {Read<Fraction>} */
export function positive(value, where) {
  const found = number(value, where);
  return found.top > 0n ? found : refuseTask(`${where} is not above zero`);
}

/** @param {number} low @param {number} high @returns {Read<number>} */
export function count(low, high) {
  return (value, where) => {
    const fits = typeof value === "number" && value >= low && value <= high;
    return fits ? value : refuseTask(`${where} is not a whole number from ${low} to ${high}`);
  };
}

/** @template {string} W @param {...W} words @returns {Read<W>} */
export function oneOf(...words) {
  return (value, where) => {
    const found = words.find((word) => word === value);
    return found ?? refuseTask(`${where} is ${JSON.stringify(value) ?? "missing"}, and it knows ${words.join(", ")}`);
  };
}

/** @template T @param {Read<T>} read @returns {Read<T[]>} */
export function list(read) {
  return (
    value,
    where,
  ) => (Array.isArray(value) ? value.map((each) => read(each, where)) : refuseTask(`${where} is no list`));
}

/** A map from names to what a reader finds. @template T @param {Read<T>} read @returns {Read<{ [name: string]: T }>} */
export function named(read) {
  return (value, where) => {
    if (value === undefined || !isJsonMap(value)) return refuseTask(`${where} is not a table`);
    const found = Object.entries(value).map(([key, each]) => [key, read(each, `${where}.${key}`)]);
    return Object.assign(Object.create(null), Object.fromEntries(found));
  };
}

/** A value as it is; numbers as floats. @type {Read<unknown>} */
export function anything(value) {
  if (Array.isArray(value)) return value.map((each) => anything(each, ""));
  return value !== undefined && isFraction(value) ? toNumber(value) : value;
}
