/** lines.json: the samples that are made of a file's bytes; and which rows of it were given before. */

import { fromHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { firstLine, readFile } from "../../../src/crowdml/web/device/lines.js";
import { readTask } from "../../../src/crowdml/web/device/tasks.js";
import { check, equal } from "./expect.js";

/** @typedef {{ name: string, task: string, file: string, x: number[][], y: number[], faults: { [why: string]: number } }} Case */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return [
    ...vectors.map((row) => check(row.name, () => samples(row))),
    check("rows that were given are not given again, and a file may grow", () => given(vectors[0].task)),
    check("a first line of another width is refused", () => width(vectors[0].task)),
  ];
}

/** @param {Case} row */
async function samples(row) {
  const task = await readTask(toUtf8(row.task));
  const { rows, faults } = await readFile(fromHex(row.file), task, []);
  equal(rows.map(({ x }) => Array.from(x)), row.x, "the features");
  equal(rows.map(({ y }) => y), row.y, "the labels");
  equal(faults, row.faults, "the faults");
}

/** @param {string} text */
async function given(text) {
  const task = await readTask(toUtf8(text));
  const file = toUtf8("a,b,kind\n0.5,0.25,left\n0.25,0.5,right\n0.1,0.1,left\n");
  const first = await readFile(file, task, []);
  const place = await first.placeAfter(2);
  const again = await readFile(file, task, [place]);
  equal([again.given, again.rows.length], [2, 1], "rows that were given, and that are left");
  const grown = await readFile(new Uint8Array([...file, ...toUtf8("0.2,0.2,right\n")]), task, [place]);
  equal([grown.given, grown.rows.length], [2, 2], "rows of the file that grew");
  const other = await readFile(toUtf8("a,b,kind\n0.5,0.25,right\n0.25,0.5,right\n0.1,0.1,left\n"), task, [place]);
  equal([other.given, other.rows.length], [0, 3], "rows of another file");
}

/** @param {string} text */
async function width(text) {
  const task = await readTask(toUtf8(text));
  equal(firstLine(toUtf8("0.5,left\n"), task), "width", "a line that is too short");
  equal(firstLine(toUtf8(""), task), "empty", "no line");
  equal(firstLine(toUtf8("0.5;0.25;left\n"), task), null, "a line that fits");
}
