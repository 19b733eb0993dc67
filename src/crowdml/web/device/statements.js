/**
 * Statements: a device's running totals, which stand in every envelope it signs.
 * Losses are texts in lowest terms, one of a kind, sorted: 'pure 1/10', 'renyi 2:1/50,3:3/50', 'unbounded', 'zcdp
 * 3/1000'. Mirrors src/crowdml/wire/statements.py.
 *
 * @typedef {{ readonly dearest: readonly string[], readonly device: readonly string[], readonly samples: number }}
 * Statement
 * @typedef {import("./codec.js").Plain} Plain
 */

import { asCount, asList, asMap, asText } from "./codec.js";
import { compare, fraction, ZERO } from "./fractions.js";
import { malformed } from "./problems.js";

const LONGEST_LOSS = 4096;
const LONGEST_FRACTION = 1024;
const MOST_LOSSES = 4;

/** @param {Plain} value @returns {Statement} */
export function readStatement(value) {
  const found = asMap(value, ["dearest", "device", "samples"], "The statement");
  return {
    dearest: readLosses(found.dearest, "statement.dearest"),
    device: readLosses(found.device, "statement.device"),
    samples: asCount(found.samples, "statement.samples", 0),
  };
}

/** @param {Plain} value @param {string} what @returns {string[]} */
function readLosses(value, what) {
  const texts = asList(value, what, MOST_LOSSES).map((text) => asText(text, what, LONGEST_LOSS));
  if (!texts.every(isExact)) malformed(`${what} must have losses in lowest terms, such as 'pure 1/10'.`);
  const kinds = texts.map(kindOf);
  if (kinds.some((kind, at) => at > 0 && kind <= kinds[at - 1])) malformed(`${what} must be sorted, one of each kind.`);
  if (texts.some((text) => text.length > LONGEST_FRACTION && kindOf(text) !== "renyi")) {
    malformed(`${what} has a fraction of more than ${LONGEST_FRACTION} bytes.`);
  }
  return texts;
}

/** @param {string} loss @returns {string} */
function kindOf(loss) {
  return loss.split(" ", 1)[0];
}

/** Whether the text is a loss in its one form. @param {string} text @returns {boolean} */
export function isExact(text) {
  const [kind, rest] = [kindOf(text), text.slice(kindOf(text).length + 1)];
  if (kind === "pure" || kind === "zcdp") return readFraction(rest) !== null;
  return kind === "renyi" ? isRenyi(rest) : text === "unbounded";
}

/** @param {string} text */
function isRenyi(text) {
  let [order, value] = [1, ZERO];
  for (const pair of text.split(",")) {
    const at = pair.indexOf(":");
    const [next, found] = [pair.slice(0, Math.max(at, 0)), readFraction(pair.slice(at + 1))];
    if (!/^[1-9][0-9]{0,8}$/.test(next) || Number(next) <= order || found === null) return false;
    if (compare(found, value) < 0) return false;
    [order, value] = [Number(next), found];
  }
  return true;
}

/** The fraction, if the text has it in lowest terms. @param {string} text */
function readFraction(text) {
  const found = /^(0|[1-9][0-9]{0,999})(?:\/([1-9][0-9]{0,999}))?$/.exec(text);
  if (!found) return null;
  const value = fraction(BigInt(found[1]), BigInt(found[2] ?? 1));
  const lowest = found[2] === undefined || (value.bottom > 1n && value.bottom === BigInt(found[2]));
  return lowest ? value : null;
}

/** Whether a statement names less than an earlier one of the same device: then its ledger is an older copy.
 * @param {Statement} before @param {Statement} now @returns {boolean} */
export function totalsFell(before, now) {
  return now.samples < before.samples || fell(before.device, now.device) || fell(before.dearest, now.dearest);
}

/** Whether a loss of any kind is smaller now. One of zero may be left out. @param {readonly string[]} before
 * @param {readonly string[]} now */
function fell(before, now) {
  const later = new Map(now.map((text) => [kindOf(text), text]));
  return before.some((text) => kindFell(text, later.get(kindOf(text))));
}

/** @param {string} before @param {string | undefined} now */
function kindFell(before, now) {
  if (kindOf(before) === "unbounded") return now === undefined;
  const earlier = values(before);
  if (now === undefined) return earlier.some(({ value }) => value.top > 0n);
  return values(now).some(({ order, value }) => {
    const at = earlier.find((each) => each.order >= order); // where an order is not listed the next one's value holds
    return at !== undefined && compare(value, at.value) < 0;
  });
}

/** Order and value of each fraction in a loss; one without orders has order 0. @param {string} text */
function values(text) {
  const pairs = text.slice(kindOf(text).length + 1).split(",");
  return pairs.map((pair) => {
    const parts = pair.split(":");
    const [top, bottom = "1"] = parts[parts.length - 1].split("/");
    return { order: parts.length > 1 ? Number(parts[0]) : 0, value: fraction(BigInt(top), BigInt(bottom)) };
  });
}
