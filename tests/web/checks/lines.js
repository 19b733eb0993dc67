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
    check("rows are the same however their lines end", () => endings(vectors[0].task)),
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
  const file = "a,b,kind\n0.5,0.25,left\n0.25,0.5,right\n0.1,0.1,left\n";
  const first = await readFile(toUtf8(file), task, []);
  equal(first.goesOn, false, "whether a file goes on that nobody knows");
  const places = await first.placesAfter(2);
  const again = await readFile(toUtf8(file), task, places);
  equal([again.given, again.rows.length, again.goesOn], [2, 1, true], "rows that were given, and that are left");
  const grown = await readFile(toUtf8(`${file}0.2,0.2,right\n`), task, places);
  equal([grown.given, grown.rows.length, grown.goesOn], [2, 2, true], "rows of the file that grew");
  const cut = await readFile(toUtf8("a,b,kind\n0.5,0.25,left\n"), task, places);
  equal([cut.given, cut.rows.length, cut.goesOn], [1, 0, true], "rows of a file that is the beginning of it");
  const other = await readFile(toUtf8("a,b,kind\n0.5,0.25,right\n0.25,0.5,right\n0.1,0.1,left\n"), task, places);
  equal([other.given, other.rows.length, other.goesOn], [0, 3, false], "rows of another file");
  const parted = await readFile(toUtf8("a,b,kind\n0.5,0.25,left\n0.1,0.1,left\n"), task, places);
  equal([parted.given, parted.rows.length, parted.goesOn], [1, 1, false], "rows of a file that parts from it");
  const moved = new Map([...places, ...(await again.placesAfter(1))].map((place) => [place.hash, place]));
  equal([...moved.values()].map(({ ends }) => ends), [false, false, true], "where reading stopped");
}

/** @param {string} text */
async function endings(text) {
  const task = await readTask(toUtf8(text));
  const first = await readFile(toUtf8("0.5,0.25,left\n0.25,0.5,right\n0.1,0.1,left"), task, []);
  const places = await first.placesAfter(3);
  for (
    const same of [
      "0.5,0.25,left\n0.25,0.5,right\n0.1,0.1,left\n0.2,0.2,right\n",
      "0.5,0.25,left\r\n0.25,0.5,right\r\n0.1,0.1,left\r\n0.2,0.2,right",
      "\ufeff0.5,0.25,left\n0.25,0.5,right\n0.1,0.1,left\n0.2,0.2,right\r\n",
    ]
  ) {
    const { rows, given: before, goesOn } = await readFile(toUtf8(same), task, places);
    equal([before, rows.length, goesOn], [3, 1, true], `rows of ${JSON.stringify(same)}`);
  }
}

/** @param {string} text */
async function width(text) {
  const task = await readTask(toUtf8(text));
  equal(firstLine(toUtf8("0.5,left\n"), task), "width", "a line that is too short");
  equal(firstLine(toUtf8(""), task), "empty", "no line");
  equal(firstLine(toUtf8("0.5;0.25;left\n"), task), null, "a line that fits");
}
