/** Histories of a ledger for tests in Python. */

import { parse } from "../../src/crowdml/web/device/fractions.js";
import { parseLoss } from "../../src/crowdml/web/device/losses.js";
import { History } from "../../src/crowdml/web/device/spending.js";

/**
 * @typedef {[first: number, last: number, loss: string, deviceLoss: string]} Part
 * @typedef {{ epsilon: string, delta: number, samples: number, device: string | null, task: string | null }} Cap
 */

/** The cap and the budget that each step breaks, and the statement after it. @param {Cap[]} caps
 * @param {[task: string, parts: Part[]][]} steps */
export function verdicts(caps, steps) {
  const budgets = caps.map(({ epsilon, delta, samples, device, task }) => {
    return { epsilon: parse(epsilon), delta, samples, deviceEpsilon: device === null ? null : parse(device), task };
  });
  const kept = new History();
  return steps.map(([task, parts]) => {
    const charges = parts.map((part) => chargeOf(task, part));
    const refusal = kept.refusal(task, charges, budgets);
    if (refusal === null) kept.add(charges);
    const budget = refusal?.budget ? budgets.findIndex((each) => each === refusal.budget) : null;
    return { cap: refusal?.cap ?? null, budget, statement: kept.statement() };
  });
}

/** Milliseconds to read a ledger of so many check-ins of three rows, and to add one more. @param {number} checkIns */
export function times(checkIns) {
  const charges = Array.from({ length: checkIns }, (_, at) => checkIn(at)).flat();
  const begin = performance.now();
  const history = new History(charges);
  const read = performance.now();
  const next = checkIn(checkIns);
  history.refusal("t", next, [{ epsilon: parse("1"), delta: 1e-6, samples: 1e9, deviceEpsilon: null, task: null }]);
  history.statement(next);
  history.add(next);
  return { read: read - begin, step: performance.now() - read };
}

/** @param {number} at */
function checkIn(at) {
  /** @type {Part[]} */
  const parts = [
    [20 * at, 20 * at + 19, "zcdp 1374574429/68719476736", "zcdp 1374574429/171798691"],
    [20 * at, 20 * at + 19, "pure 1/20", "pure 1"],
    [20 * at, 20 * at + 19, "pure 1/20", "pure 1"],
  ];
  return parts.map((part) => chargeOf("t", part));
}

/** @param {string} task @param {Part} part */
function chargeOf(task, [first, last, loss, deviceLoss]) {
  return { task, row: "row", loss: parseLoss(loss), deviceLoss: parseLoss(deviceLoss), first, last };
}
