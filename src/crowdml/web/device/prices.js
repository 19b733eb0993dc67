/**
 * What check-ins cost in all: the most expensive sample, and the device as if all its samples were replaced.
 * Mirrors src/crowdml/price.py.
 *
 * @typedef {import("./losses.js").Loss} Loss
 * @typedef {import("./losses.js").Total} Total
 * @typedef {import("./mechanisms.js").Losses} Losses
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {{ readonly [row: string]: Mechanism }} Table
 */

import { addTotals, epsilonOf, NOTHING, times, totalOf } from "./losses.js";

/** What the most expensive sample pays in all the check-ins that use it. @param {Table} table @param {number} uses
 * @param {number} delta @returns {Total} */
export function samplePrice(table, uses, delta) {
  const rows = Object.values(table);
  const starts = [...new Set(rows.map((row) => row.covers.start))];
  const totals = starts.map((place) => {
    const over = rows.filter(({ covers }) => covers.start <= place && place < covers.stop);
    return addTotals(over.map((row) => rowTotal(row, uses, (losses) => losses.loss)));
  });
  return totals.reduce((most, total) => (epsilonOf(total, delta) > epsilonOf(most, delta) ? total : most), NOTHING);
}

/** What so many check-ins cost the device. @param {Table} table @param {number} checkIns @returns {Total} */
export function devicePrice(table, checkIns) {
  return addTotals(Object.values(table).map((row) => rowTotal(row, checkIns, (losses) => losses.deviceLoss)));
}

/** What so many check-ins cost at the most: those of a schedule that cost most. @param {Mechanism} row
 * @param {number} checkIns @param {(losses: Losses) => Loss} which @returns {Total} */
function rowTotal({ losses, schedule }, checkIns, which) {
  if (schedule === null) return times(totalOf(which(losses)), checkIns);
  const dearest = schedule.levels.toSorted((one, other) => other - one).slice(0, checkIns);
  return addTotals(dearest.map((level) => totalOf(which(schedule.at(level)))));
}
